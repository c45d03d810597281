"""Ulysses: ranks exchange heads for tokens by an all-to-all, and back.

A group whose size does not divide the query heads gets heads of zeros beside them, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tilewright.core import checks
from tilewright.core.library import once_across

_once = once_across("Ulysses")


def _exchanged(message, group):
    received = torch.empty_like(message, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, message.contiguous(), group=group)
    return received


def _bits(t, dtype):
    """t, its last dimension as elements of another dtype: one message has several."""
    return t if t.dtype == dtype else t.contiguous().view(dtype)


def _heads_for_tokens(tensors, group):
    """[B, U h, s, D] each, of own tokens, to [B, h, U s, D] of own heads, all in one message."""
    size, dtypes = dist.get_world_size(group), [t.dtype for t in tensors]
    tensors = [_bits(t, dtypes[0]) for t in tensors]
    message = torch.cat(
        [t.unflatten(1, (size, -1)).permute(1, 3, 0, 2, 4).flatten(3) for t in tensors],
        3,
    )
    columns = [t.shape[1] // size * t.shape[3] for t in tensors]
    parts = _exchanged(message, group).flatten(0, 1).split(columns, 2)
    return [
        _bits(part.unflatten(2, (-1, t.shape[3])).permute(1, 2, 0, 3), dtype)
        for part, t, dtype in zip(parts, tensors, dtypes, strict=True)
    ]


def _tokens_for_heads(tensors, group):
    """The reverse. In memory [s, B, heads, D], the layout that a projection reads."""
    size, dtypes = dist.get_world_size(group), [t.dtype for t in tensors]
    tensors = [_bits(t, dtypes[0]) for t in tensors]
    message = torch.cat(
        [t.unflatten(2, (size, -1)).permute(2, 3, 0, 1, 4).flatten(3) for t in tensors],
        3,
    )
    parts = _exchanged(message, group).split([t.shape[1] * t.shape[3] for t in tensors], 3)
    return [
        _bits(
            part.unflatten(3, (-1, t.shape[3]))
            .permute(1, 2, 0, 3, 4)
            .flatten(2, 3)
            .permute(1, 2, 0, 3),
            dtype,
        )
        for part, t, dtype in zip(parts, tensors, dtypes, strict=True)
    ]


def lacking(heads: int, group: dist.ProcessGroup) -> int:
    """How many heads of zeros are added to those, so that each rank of the group has as many."""
    return -heads % dist.get_world_size(group)


def _with_zeros(t, heads):
    return F.pad(t, (0, 0, 0, 0, 0, heads)) if heads else t


class Scatter(torch.autograd.Function):
    """Tensors of own tokens and all heads, to those of own heads and all tokens. The first has the
    most heads, and no other one narrower elements.
    """

    @staticmethod
    def forward(ctx, group, *tensors):
        # Head h reads head h // groups of a tensor with fewer. With each of those repeated `again`
        # times, every rank gets as many, and its own heads read them in order.
        H, zeros = tensors[0].shape[1], lacking(tensors[0].shape[1], group)
        own = (H + zeros) // dist.get_world_size(group)
        ctx.group, ctx.heads = group, H
        ctx.again = []
        for t in tensors:
            groups = H // t.shape[1]
            ctx.again.append(groups if zeros else groups // math.gcd(groups, own))
        repeated = (
            t.repeat_interleave(again, 1) if again > 1 else t
            for t, again in zip(tensors, ctx.again, strict=True)
        )
        return tuple(_heads_for_tokens([_with_zeros(t, zeros) for t in repeated], group))

    @staticmethod
    @_once
    def backward(ctx, *gradients):
        gradients = _tokens_for_heads(gradients, ctx.group)
        if lacking(ctx.heads, ctx.group):  # those of fewer heads were repeated for each
            gradients = [t[:, : ctx.heads] for t in gradients]
        return None, *(
            t.unflatten(1, (-1, again))
            .sum(2, dtype=torch.promote_types(t.dtype, torch.float32))
            .to(t.dtype)
            if again > 1
            else t
            for t, again in zip(gradients, ctx.again, strict=True)
        )


class Gather(torch.autograd.Function):
    """The results of own heads, back to own tokens and all `heads`."""

    @staticmethod
    def forward(ctx, out, group, heads):
        ctx.group, ctx.zeros = group, lacking(heads, group)
        return _tokens_for_heads((out,), group)[0][:, :heads]

    @staticmethod
    @_once
    def backward(ctx, dout):
        return _heads_for_tokens((_with_zeros(dout, ctx.zeros),), ctx.group)[0], None, None


def by_heads(
    group: dist.ProcessGroup | None,
    tensors: Sequence[torch.Tensor],
    compute: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """compute(*tensors) of the tokens of all ranks of a group and a part of the heads, for this
    rank's tokens and all heads of the first tensor. group: None for this rank alone.
    """
    if group is None:
        return compute(*tensors)
    return Gather.apply(compute(*Scatter.apply(group, *tensors)), group, tensors[0].shape[1])


@checks.autocast("products", "q", "k", "v")
def over_heads(q, k, v, sinks, group, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
    """attend(q, k, v, sinks), `by_heads`."""
    own = sinks
    if group is not None and sinks is not None:
        own = F.pad(sinks, (0, lacking(q.shape[1], group)))
        own = own.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    return by_heads(group, (q, k, v), lambda q, k, v: attend(q, k, v, own))
