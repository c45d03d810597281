"""Ulysses: ranks exchange heads for tokens by an all-to-all, and back.

A group whose size does not divide the query heads gets heads of zeros beside them, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tilewright.core import checks
from tilewright.core.library import once_across

_once = once_across("context_parallel_attention")


def _exchanged(message, group):
    received = torch.empty_like(message, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, message.contiguous(), group=group)
    return received


def _heads_for_tokens(tensors, group):
    """[B, U h, s, D] each, of own tokens, to [B, h, U s, D] of own heads, all in one message."""
    size = dist.get_world_size(group)
    message = torch.cat(
        [t.unflatten(1, (size, -1)).permute(1, 3, 0, 2, 4).flatten(3) for t in tensors],
        3,
    )
    columns = [t.shape[1] // size * t.shape[3] for t in tensors]
    parts = _exchanged(message, group).flatten(0, 1).split(columns, 2)
    return [
        part.unflatten(2, (-1, t.shape[3])).permute(1, 2, 0, 3)
        for part, t in zip(parts, tensors, strict=True)
    ]


def _tokens_for_heads(tensors, group):
    """The reverse. In memory [s, B, heads, D], the layout that a projection reads."""
    size = dist.get_world_size(group)
    message = torch.cat(
        [t.unflatten(2, (size, -1)).permute(2, 3, 0, 1, 4).flatten(3) for t in tensors],
        3,
    )
    parts = _exchanged(message, group).split([t.shape[1] * t.shape[3] for t in tensors], 3)
    return [
        part.unflatten(3, (-1, t.shape[3])).permute(1, 2, 0, 3, 4).flatten(2, 3).permute(1, 2, 0, 3)
        for part, t in zip(parts, tensors, strict=True)
    ]


def lacking(heads: int, group: dist.ProcessGroup) -> int:
    """How many heads of zeros are added to those, so that each rank of the group has as many."""
    return -heads % dist.get_world_size(group)


def _with_zeros(t, heads):
    return F.pad(t, (0, 0, 0, 0, 0, heads)) if heads else t


class Scatter(torch.autograd.Function):
    """q, k and v of own tokens and all heads, to those of own heads and all tokens."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        # Query head h reads head h // groups of keys. With each key head repeated `again` times,
        # every rank gets as many, and its queries read them in order.
        H, zeros = q.shape[1], lacking(q.shape[1], group)
        groups, own = H // k.shape[1], (H + zeros) // dist.get_world_size(group)
        ctx.group, ctx.heads = group, H
        ctx.again = groups if zeros else groups // math.gcd(groups, own)
        if ctx.again > 1:
            k, v = (t.repeat_interleave(ctx.again, 1) for t in (k, v))
        return tuple(_heads_for_tokens([_with_zeros(t, zeros) for t in (q, k, v)], group))

    @staticmethod
    @_once
    def backward(ctx, dq, dk, dv):
        dq, dk, dv = _tokens_for_heads((dq, dk, dv), ctx.group)
        if lacking(ctx.heads, ctx.group):  # keys were repeated for every query head
            dq, dk, dv = (t[:, : ctx.heads] for t in (dq, dk, dv))
        if ctx.again > 1:
            acc = torch.promote_types(dq.dtype, torch.float32)
            dk, dv = (
                t.unflatten(1, (-1, ctx.again)).sum(2, dtype=acc).to(t.dtype) for t in (dk, dv)
            )
        return dq, dk, dv, None


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


@checks.autocast("products", "q", "k", "v")
def over_heads(q, k, v, sinks, group, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
    """attend(q, k, v, sinks) of the tokens of all ranks of a group and a part of the heads, for
    this rank's tokens and all heads. group: None for this rank alone.
    """
    if group is None:
        return attend(q, k, v, sinks)
    heads, own = q.shape[1], sinks
    if sinks is not None:
        own = F.pad(sinks, (0, lacking(heads, group)))
        own = own.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    return Gather.apply(attend(*Scatter.apply(q, k, v, group), own), group, heads)
