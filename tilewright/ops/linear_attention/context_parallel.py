"""Linear attention over a sequence that is sharded over ranks as for attention
(`tilewright.ops.attention.context_parallel`): a model has layers of both.

The rule: ranks exchange heads for tokens, those of a Ulysses group first, then those of a ring;
each computes its heads over the whole sequence, in order, with the bits of one process. The
alternative is to send states: each rank would first find, beside its chunks' last states from zero,
the matrices by which they change the states before. In Qwen3-Next-80B-A3B in 16 bits, heads are
24 KB a token, and states with their matrices 8 MB a rank. States are less to send where a rank has
more than 333 tokens for each rank; but each rank would walk over its chunks twice, with twice the
columns, and round where the layout cuts a document.

The convolution: each interval of a shard needs the W - 1 tokens ahead of it. Ranks gather the last
ones of all intervals.

                    rule, all-to-alls               convolution, all-gathers of 2 (W - 1) tokens
    each way        2 for Ulysses, 2 for a ring     1 for Ulysses, 1 for a ring

Deterministic. Not in the table of ops: the implementations are `gated_delta_rule`'s and
`causal_conv1d`'s, and a test needs several processes.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tilewright.core import checks, torch_names
from tilewright.core.library import once_across
from tilewright.core.takes import takes
from tilewright.ops.attention.context_parallel import (
    ContextParallel,
    check_boundaries,
    check_tokens,
    in_sequence,
    of_ring_ranks,
    taken,
)
from tilewright.ops.attention.ulysses import by_heads
from tilewright.ops.linear_attention.causal_conv1d import CAUSAL_CONV1D, causal_conv1d
from tilewright.ops.linear_attention.gated_delta_rule import (
    GATED_DELTA_RULE,
    Request,
    gated_delta_rule,
)

__all__ = ["context_parallel_causal_conv1d", "context_parallel_gated_delta_rule"]


# Wide: what gated_delta_rule takes, and the sequence's sharding.
@checks.autocast("products", "q", "k", "v")
@torch_names.uncompiled
@takes(
    "HK >= 1",
    "DK >= 1",
    "HV % HK == 0",
    "DV >= 1",
    "bounds >= 2",
    q="float [B, S, HK, DK]",
    k="q [q]",
    v="q [B, S, HV, DV]",
    g="float [B, S, HV]",
    beta="float [B, S, HV]",
    scale="number (0, inf)",
    use_qk_l2norm="bool",
    cu_seqlens="int32 | int64 [bounds]",
)
def context_parallel_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cp: ContextParallel,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """`gated_delta_rule` over a sharded sequence, of which this rank has the part given by `shard`.
    Every rank of `cp` must call it.

    The result, and the gradients of v, g and beta, have the bits of one process, except with eager,
    since the rounding of PyTorch's products depends on the number of heads. So do the gradients of
    q and k if no two ranks' value heads read one key head; else parts in q's dtype are summed in
    float32. Differentiable once in q, k, v, g and beta. Products accumulate in float32.

    Args:
        q, k: [B, S / n, HK, DK], this rank's tokens, with n = R U ranks.
        v: [B, S / n, HV, DV]. Where a size does not divide the value heads, keys are repeated for
            each of them, and heads of zeros are computed beside them.
        g, beta: [B, S / n, HV], sent in float32.
        cp: the layout, with its process groups.
        scale, use_qk_l2norm: as in `gated_delta_rule`.
        cu_seqlens: as in `gated_delta_rule`, for the whole sequence, on every rank: 0 .. S.
            Requires B = 1.
        implementation: as in `gated_delta_rule`.

    Returns:
        [B, S / n, HV, DV] in q's dtype: o of the whole sequence for this rank's tokens.

    Raises:
        TypeError, ValueError: invalid arguments.
        ImplementationUnavailable: a named implementation that cannot run here, or that does not
            support these widths. All errors are raised before any communication.

    Example:
        >>> from tilewright.ops.attention.context_parallel import ContextParallel
        >>> q, gates = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2)
        >>> o = context_parallel_gated_delta_rule(q, q, q, gates, gates, ContextParallel())
        >>> tuple(o.shape)  # one rank
        (1, 4, 2, 8)

    Source: arXiv:2412.06464; arXiv:2309.14509 (Ulysses).
    """
    (B, s), DK, DV = q.shape[:2], q.shape[3], v.shape[3]
    check_tokens("q", s, cp)
    cu_seqlens, _ = check_boundaries(cu_seqlens, None, B, s * cp.size)
    request = Request(key_dim=DK, value_dim=DV, float32=q.dtype == torch.float32)
    GATED_DELTA_RULE.pick(implementation, q, request)

    def rule(v, gates, q, k):
        v, gates, q, k = (t.transpose(1, 2) for t in (v, gates, q, k))
        o, _ = gated_delta_rule(
            q,
            k,
            v,
            *gates.unbind(-1),
            scale=scale,
            use_qk_l2norm=use_qk_l2norm,
            cu_seqlens=cu_seqlens,
            implementation=implementation,
        )
        return o.transpose(1, 2)

    def in_order(*tensors):
        o = rule(*(in_sequence(t, 2, cp.ring_size) for t in tensors))
        return taken(o, 2, of_ring_ranks(cp.ring_size))

    def of_ulysses(*tensors):
        return rule(*tensors) if cp.ring_size == 1 else by_heads(cp.ring, tensors, in_order)

    acc = torch.promote_types(q.dtype, torch.float32)
    gates = torch.stack((g.to(acc), beta.to(acc)), -1)
    tensors = [t.transpose(1, 2) for t in (v, gates, q, k)]
    return by_heads(cp.ulysses, tensors, of_ulysses).transpose(1, 2)


@checks.autocast("products", "x", "weight", "bias")
@torch_names.uncompiled
@takes(
    "C >= 1",
    "2 <= W <= 8",
    "bounds >= 2",
    x="float [B, S, C]",
    weight="float [C, W]",
    bias="weight [C]",
    activation=("silu",),
    cu_seqlens="int32 | int64 [bounds]",
)
def context_parallel_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    cp: ContextParallel,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """`causal_conv1d` over a sharded sequence, of which this rank has the part given by `shard`.
    Every rank of `cp` must call it.

    The result has the bits of one process, except for eager's silu, whose rounding in PyTorch
    depends on where an element lies. Differentiable once in x, weight and bias. Gradients of weight
    and bias are this rank's share, of its tokens; the ranks' shares sum to the whole. Gradients of
    the last W - 1 tokens of an interval are sums of parts in x's dtype, rounded twice.

    Args:
        x: [B, S / n, C], this rank's tokens, with n = R U ranks.
        weight, bias, activation: as in `causal_conv1d`, the same on every rank.
        cp: the layout, with its process groups.
        cu_seqlens: as in `causal_conv1d`, for the whole sequence, on every rank: 0 .. S. Requires
            B = 1.
        implementation: as in `causal_conv1d`.

    Returns:
        [B, S / n, C] in x's dtype: `causal_conv1d` of the whole sequence for this rank's tokens.

    Raises:
        TypeError, ValueError: invalid arguments.
        ImplementationUnavailable: a named implementation that cannot run here. All errors are
            raised before any communication.

    Example:
        >>> from tilewright.ops.attention.context_parallel import ContextParallel
        >>> x = torch.tensor([[[1.0], [2.0], [3.0]]])
        >>> weight = torch.tensor([[10.0, 1.0]])
        >>> context_parallel_causal_conv1d(x, weight, ContextParallel()).flatten()  # one rank
        tensor([ 1., 12., 23.])

    Source: arXiv:2312.00752 (Mamba).
    """
    B, s, _ = x.shape
    S, before = s * cp.size, weight.shape[1] - 1
    check_tokens("x", s, cp)
    cu_seqlens, _ = check_boundaries(cu_seqlens, None, B, S)
    CAUSAL_CONV1D.pick(implementation, x)

    def convolve(x, cu_seqlens):
        return causal_conv1d(
            x,
            weight,
            bias,
            activation=activation,
            cu_seqlens=cu_seqlens,
            implementation=implementation,
        )

    if cp.size == 1 or not S:
        return convolve(x, cu_seqlens)
    intervals, out = cp.intervals(S), []
    parts = x.split([b - a for a, b in intervals], 1)
    for (a, b), part, tail in zip(intervals, parts, _Before.apply(x, before, cp), strict=False):
        bounds = None
        if cu_seqlens is not None:
            # What stands ahead of the sequence belongs to its first document: zeros.
            bounds = (cu_seqlens - (a - before)).clamp(0, before + b - a)
            bounds = F.pad(bounds[1:], (1, 0))
        out.append(convolve(torch.cat((tail, part), 1), bounds)[:, before:])
    return torch.cat(out, 1)


class _Plan(NamedTuple):
    """Each rank has 2 x before slots, for the last tokens of its first interval and of its second,
    if it has one, each at the end of its half; and as many places, those ahead of its intervals.

    row: [slots] of this rank, rows of its shard.   slot: [places] of this rank, among all ranks'
    slots.   readers: [slots, n] of this rank, among all ranks' places.   -1: none.
    """

    row: torch.Tensor
    slot: torch.Tensor
    readers: torch.Tensor


@functools.lru_cache(64)
def _plan(S: int, before: int, layout: ContextParallel, device: torch.device) -> _Plan:
    U, R = layout.ulysses_size, layout.ring_size
    last, ahead = [], []  # positions of all ranks' slots and places
    for r, u in itertools.product(range(R), range(U)):
        own = ContextParallel(U, R, u, r).intervals(S)
        none = [-1] * (before * (2 - len(own)))
        last += [t if t >= a else -1 for a, b in own for t in range(b - before, b)] + none
        ahead += [t for a, _ in own for t in range(a - before, a)] + none
    mine = slice(*(2 * before * (layout.ring_rank * U + layout.ulysses_rank + i) for i in (0, 1)))
    slots = {t: n for n, t in enumerate(last) if t >= 0}
    rows, begin = [], 0  # of this rank's slots
    for a, b in layout.intervals(S):
        rows += [begin + t - a if t >= a else -1 for t in range(b - before, b)]
        begin += b - a
    readers = [[n for n, t in enumerate(ahead) if t == own >= 0] for own in last[mine]]
    most = max(1, *map(len, readers))
    return _Plan(
        torch.tensor(rows + [-1] * (2 * before - len(rows)), device=device),
        torch.tensor([slots.get(t, -1) for t in ahead[mine]], device=device),
        torch.tensor([own + [-1] * (most - len(own)) for own in readers], device=device),
    )


def _gathered(t: torch.Tensor, cp: ContextParallel) -> torch.Tensor:
    """[n, ..] of all ranks, those of ring rank 0 first."""
    for group, size in ((cp.ulysses, cp.ulysses_size), (cp.ring, cp.ring_size)):
        if size > 1:
            t = t.contiguous()
            parts = [torch.empty_like(t) for _ in range(size)]
            dist.all_gather(parts, t, group=group)
            t = torch.cat(parts)
    return t


def _at(t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """t[rows], with zeros for -1."""
    return torch.where((rows >= 0)[..., None, None], t[rows.clamp_min(0)], 0)


class _Before(torch.autograd.Function):
    """The tokens ahead of each of this rank's intervals, two of [B, before, C]; zeros ahead of the
    sequence, and where there is no second interval.
    """

    @staticmethod
    def forward(ctx, x, before, cp):
        ctx.cp, ctx.s = cp, x.shape[1]
        ctx.plan = _plan(ctx.s * cp.size, before, cp.layout(), x.device)
        gathered = _at(_gathered(_at(x.transpose(0, 1), ctx.plan.row), cp), ctx.plan.slot)
        return tuple(t.transpose(0, 1) for t in gathered.split(before))

    @staticmethod
    @once_across("context_parallel_causal_conv1d")
    def backward(ctx, *gradients):
        parts = _gathered(torch.cat(gradients, 1).transpose(0, 1), ctx.cp)
        acc = torch.promote_types(parts.dtype, torch.float32)
        sums = _at(parts, ctx.plan.readers).sum(1, dtype=acc).to(parts.dtype)
        dx, row = parts.new_zeros(ctx.s + 1, *parts.shape[1:]), ctx.plan.row
        dx[torch.where(row >= 0, row, ctx.s)] = sums  # slots without a token write the row beyond
        return dx[: ctx.s].transpose(0, 1), None, None
