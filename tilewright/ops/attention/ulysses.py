"""Ulysses: ranks exchange heads for tokens by an all-to-all, and back."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from tilewright.core import checks
from tilewright.core.library import once_across

_once = once_across("context_parallel_attention")


def _exchanged(message, cp):
    received = torch.empty_like(message, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, message.contiguous(), group=cp.ulysses)
    return received


def _heads_for_tokens(tensors, cp):
    """[B, U h, s, D] each, of own tokens, to [B, h, U s, D] of own heads, all in one message."""
    message = torch.cat(
        [t.unflatten(1, (cp.ulysses_size, -1)).permute(1, 3, 0, 2, 4).flatten(3) for t in tensors],
        3,
    )
    columns = [t.shape[1] // cp.ulysses_size * t.shape[3] for t in tensors]
    parts = _exchanged(message, cp).flatten(0, 1).split(columns, 2)
    return [
        part.unflatten(2, (-1, t.shape[3])).permute(1, 2, 0, 3)
        for part, t in zip(parts, tensors, strict=True)
    ]


def _tokens_for_heads(tensors, cp):
    """The reverse. In memory [s, B, heads, D], the layout that a projection reads."""
    message = torch.cat(
        [t.unflatten(2, (cp.ulysses_size, -1)).permute(2, 3, 0, 1, 4).flatten(3) for t in tensors],
        3,
    )
    parts = _exchanged(message, cp).split([t.shape[1] * t.shape[3] for t in tensors], 3)
    return [
        part.unflatten(3, (-1, t.shape[3])).permute(1, 2, 0, 3, 4).flatten(2, 3).permute(1, 2, 0, 3)
        for part, t in zip(parts, tensors, strict=True)
    ]


class Scatter(torch.autograd.Function):
    """q, k and v of own tokens and all heads, to those of own heads and all tokens."""

    @staticmethod
    def forward(ctx, q, k, v, cp):
        # Query head h reads head h // groups of keys. With each key head repeated `again` times,
        # every rank gets as many, and its queries read them in order.
        groups = q.shape[1] // k.shape[1]
        ctx.cp, ctx.again = cp, groups // math.gcd(groups, q.shape[1] // cp.ulysses_size)
        if ctx.again > 1:
            k, v = (t.repeat_interleave(ctx.again, 1) for t in (k, v))
        return tuple(_heads_for_tokens((q, k, v), cp))

    @staticmethod
    @_once
    def backward(ctx, dq, dk, dv):
        dq, dk, dv = _tokens_for_heads((dq, dk, dv), ctx.cp)
        if ctx.again > 1:
            acc = torch.promote_types(dq.dtype, torch.float32)
            dk, dv = (
                t.unflatten(1, (-1, ctx.again)).sum(2, dtype=acc).to(t.dtype) for t in (dk, dv)
            )
        return dq, dk, dv, None


class Gather(torch.autograd.Function):
    """The results of own heads, back to own tokens."""

    @staticmethod
    def forward(ctx, out, cp):
        ctx.cp = cp
        return _tokens_for_heads((out,), cp)[0]

    @staticmethod
    @_once
    def backward(ctx, dout):
        return _heads_for_tokens((dout,), ctx.cp)[0], None


@checks.autocast("products", "q", "k", "v")
def over_heads(q, k, v, sinks, cp, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
    """attend(q, k, v, sinks) of the tokens of all Ulysses ranks and a part of the heads, for this
    rank's tokens and all heads.
    """
    if cp.ulysses_size == 1:
        return attend(q, k, v, sinks)
    own = None if sinks is None else sinks.chunk(cp.ulysses_size)[cp.ulysses_rank]
    return Gather.apply(attend(*Scatter.apply(q, k, v, cp), own), cp)
