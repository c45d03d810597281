"""Attention over a sequence that is spread over processes: all-to-all over heads (Ulysses), a ring,
or both.

R x U ranks, a ring of R times U for Ulysses, and S tokens, a multiple of 2 R U. The sequence is cut
in 2 R chunks, of which ring rank r has chunks r and 2 R - 1 - r, an early and a late one, so that
causal attention is as much work for each. Of the two, one after the other, each of its U Ulysses
ranks has a U-th. With R = 2 and U = 2:

    chunk           0     1     2     3
    parts          0 1   2 3   4 5   6 7
    ring rank       0     1     1     0
    Ulysses rank    0     0     1     1        ring 0: 0 1 | 6 7     ring 1: 2 3 | 4 5

Ulysses: each rank gives its heads for tokens, so that it has a U-th of the query heads and all
tokens of its ring rank, and the key heads that those read; afterwards the reverse.

Ring: a chunk and a document are intervals, so that of two chunks at most one document is in both,
and what one chunk's queries see of another's keys is a rectangle: the beginning of the later chunk
by the end of the earlier one. Keys and values of such rectangles, and no others, travel: in step t
= 1 .. R - 1 straight from ring rank r to r + t, while the rectangles of the step before are
computed. The results are put together by their log-sum-exps, in float32. In the backward they
travel again, and their gradients come back in float32.

                        Ulysses, all-to-alls           ring, messages that a rank sends, at most
    forward     2: queries, keys and values; results    R - 1: keys with values
    backward    2: gradients, the other way round       2 (R - 1): keys with values; their gradients

Documents that end with a chunk send nothing, and nothing is sent that no query sees. All is
deterministic: sums are in
a fixed order. Not in the table of ops: the implementations are `attention`'s, and a test needs
several processes.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from tilewright.ops import _checks
from tilewright.ops._library import once_across
from tilewright.ops.attention import (
    ATTENTION,
    Request,
    attention,
    attention_part,
    attention_part_backward,
    check_options,
    check_qkv,
)


@dataclass(frozen=True)
class ContextParallel:
    """How a sequence is spread, and which part of it this rank has. Made by `of`; without groups it
    is a layout alone.

    ulysses, ring: the process groups, None where the size is 1 (or unknown, in a layout).
    """

    ulysses_size: int = 1
    ring_size: int = 1
    ulysses_rank: int = 0
    ring_rank: int = 0
    ulysses: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None

    def __post_init__(self):
        for name in ("ulysses", "ring"):
            size, rank = getattr(self, f"{name}_size"), getattr(self, f"{name}_rank")
            if size < 1 or not 0 <= rank < size:
                raise ValueError(
                    f"{name}_rank must be from 0 to {name}_size - 1, got {rank} of {size}"
                )

    @classmethod
    def of(
        cls, ulysses: dist.ProcessGroup | None = None, ring: dist.ProcessGroup | None = None
    ) -> ContextParallel:
        """Of this process. Ranks of one Ulysses group must have the same ring rank, and the
        other way round.
        """

        def place(group):
            return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))

        (U, u), (R, r) = place(ulysses), place(ring)
        return cls(U, R, u, r, ulysses if U > 1 else None, ring if R > 1 else None)

    @property
    def size(self) -> int:
        return self.ulysses_size * self.ring_size

    @property
    def multiple(self) -> int:
        """What a sequence's length must be a multiple of."""
        return 2 * self.size if self.size > 1 else 1

    def layout(self) -> ContextParallel:
        """Without the groups, so that it can be sent to another process."""
        return ContextParallel(self.ulysses_size, self.ring_size, self.ulysses_rank, self.ring_rank)

    def intervals(self, S: int) -> list[tuple[int, int]]:
        """Where this rank's tokens lie in the sequence, in order: one interval from a to before
        b, or two.
        """
        if S % self.multiple:
            raise ValueError(
                f"the sequence must have a multiple of {self.multiple} tokens (2 x "
                f"{self.ring_size} ring "
                f"x {self.ulysses_size} Ulysses ranks), got {S}"
            )
        if self.size == 1:
            return [(0, S)]
        chunk, own = S // (2 * self.ring_size), S // self.size
        found: list[tuple[int, int]] = []
        for at, number in ((0, self.ring_rank), (chunk, 2 * self.ring_size - 1 - self.ring_rank)):
            first, end = (max(at, min(at + chunk, own * (self.ulysses_rank + i))) for i in (0, 1))
            if first < end:
                found.append((first - at + number * chunk, end - at + number * chunk))
        return _united(found)


def shard(t: torch.Tensor, dim: int, cp: ContextParallel) -> torch.Tensor:
    """This rank's part of a whole sequence's tensor, along `dim`; a view where it is one interval.
    Differentiable.

    Raises ValueError if the sequence is not a multiple of 2 x ring x Ulysses ranks.
    """
    parts = [t.narrow(dim, a, b - a) for a, b in cp.intervals(t.shape[dim])] or [
        t.narrow(dim, 0, 0)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def positions(
    S: int, cp: ContextParallel, device: torch.device | str | None = None
) -> torch.Tensor:
    """Of each of this rank's tokens, its place in the sequence of S: int64 [S / ranks]."""
    return shard(torch.arange(S, device=device), 0, cp)


def unshard(t: torch.Tensor, dim: int, cp: ContextParallel) -> torch.Tensor:
    """The whole sequence's tensor from all ranks' parts. Every rank of `cp` must call it. Not
    differentiable.
    """
    t = t.detach()
    for group, size in ((cp.ulysses, cp.ulysses_size), (cp.ring, cp.ring_size)):
        if size > 1:
            parts = [
                torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(size)
            ]
            dist.all_gather(parts, t.contiguous(), group=group)
            t = torch.cat(parts, dim)
    n = 2 * cp.ring_size
    chunks = t.tensor_split(n, dim)  # of ring ranks, each an early and a late one
    return torch.cat(
        [chunks[2 * c if c < cp.ring_size else 2 * (n - 1 - c) + 1] for c in range(n)], dim
    )


@torch.compiler.disable  # where documents end is known at run time only
@_checks.autocast("products", "q", "k", "v")
def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    *,
    cu_seqlens: torch.Tensor | None = None,
    ends: tuple[int, ...] | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """`attention` over a sequence of which this rank has the part that `shard` gives. Every rank of
    `cp` must call it.

    q: [B, Hq, S / n, D] of this rank's tokens, n = R U ranks, with Hq a multiple of U; k, v: [B,
    Hk, S / n, D], with Hk
        a divisor of Hq, also smaller than U: heads of keys then go to each rank that has queries
        for them.
    cu_seqlens: as in `attention`, on every rank of the whole sequence: 0 .. S. B = 1 with it.
    ends: the same on the host, where the caller has it (once a step, say). A ring reads it; without
        it a call on CUDA waits for the device. Must be cu_seqlens' values, which is checked on a
        CPU only.
    causal, window, softcap, sinks [Hq], scale: as in `attention`.
    implementation: of attention. A ring takes those that give a part's log-sum-exp, and no others.
    Returns [B, Hq, S / n, D] in q's dtype: `attention` of the whole sequence, of this rank's
    tokens. With a ring each rectangle's result is rounded to q's dtype before they are summed in
    float32, and rounded again. Differentiable in q, k, v and sinks, once; the gradient of sinks is
    this rank's share, of the queries and heads that it computed, and the shares of all ranks sum to
    the whole. Gradients of keys are summed over rectangles, and over Ulysses ranks that had the
    same head, in float32. Raises TypeError or ValueError for arguments that do not fit,
    ImplementationUnavailable for a named implementation that does not compute what is asked, both
    before anything is sent.
    Source: arXiv:2309.14509 (Ulysses); arXiv:2310.01889 (ring).
    """
    B, H, s, D = check_qkv(q, k, v)
    check_options(causal, window, softcap, scale)
    if k.shape[2] != s:
        raise ValueError(f"k must have as many tokens as q, {s}, got {k.shape[2]}")
    if s * cp.size % cp.multiple:
        raise ValueError(
            f"q must have an even number of tokens (the sequence is cut in 2 x {cp.size} parts), "
            f"got {s}"
        )
    if H % cp.ulysses_size:
        raise ValueError(
            f"q must have a multiple of {cp.ulysses_size} heads, so that each Ulysses rank has as "
            f"many, "
            f"got {H}"
        )
    for name in ("ulysses", "ring"):
        if getattr(cp, f"{name}_size") > 1 and getattr(cp, name) is None:
            raise ValueError(
                f"cp must have a process group for {name}_size = {getattr(cp, f'{name}_size')}: "
                "it is a layout alone"
            )
    if sinks is not None:
        _checks.floating("sinks", sinks)
        _checks.shape("sinks", sinks, (H,), "one a query head")
    cu_seqlens, ends = check_boundaries(cu_seqlens, ends, B, s * cp.size)
    _checks.same_device(q=q, k=k, v=v, cu_seqlens=cu_seqlens, sinks=sinks)
    ringed = cp.ring_size > 1
    gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, sinks)
    )
    # What cannot be computed is refused here, before other ranks wait for this one.
    ATTENTION.pick(
        implementation,
        q,
        Request(
            D,
            causal,
            cu_seqlens is not None,
            window is not None,
            softcap is not None,
            sinks is not None and not ringed,
            ringed and window is not None,
            gradient,
            ringed,
        ),
    )
    if cp.ulysses_size > 1:
        q, k, v = _Scatter.apply(q, k, v, cp)
        own = H // cp.ulysses_size
        sinks = None if sinks is None else sinks.narrow(0, cp.ulysses_rank * own, own)
    options = {
        "window": window,
        "softcap": softcap,
        "scale": scale,
        "implementation": implementation,
    }
    if ringed:
        S = s * cp.size
        if ends is None:
            ends = (
                (0, S)
                if cu_seqlens is None
                else tuple(_checks.cu_seqlens(cu_seqlens, S, wait=True).tolist())
            )
        out = _Ring.apply(
            q,
            k,
            v,
            sinks,
            cu_seqlens,
            cp,
            plan(ends, S, cp.ring_size, cp.ring_rank, causal, window),
            {**options, "causal": causal},
        )
    else:
        longest = None if ends is None else max(b - a for a, b in itertools.pairwise(ends))
        out = attention(
            q,
            k,
            v,
            cu_seqlens=cu_seqlens,
            causal=causal,
            sinks=sinks,
            max_seqlen=longest,
            **options,
        )
    return _Gather.apply(out, cp) if cp.ulysses_size > 1 else out


def check_boundaries(
    cu_seqlens: torch.Tensor | None, ends: Sequence[int] | None, B: int, S: int
) -> tuple[torch.Tensor | None, tuple[int, ...] | None]:
    """Of packed documents, for B sequences of S tokens; ends: on the host."""
    if cu_seqlens is None:
        if ends is not None:
            raise ValueError("ends are cu_seqlens on the host: give both, or cu_seqlens alone")
        return None, None
    if B != 1:
        raise ValueError(f"packed documents need B = 1, got {B} sequences")
    cu_seqlens = _checks.cu_seqlens(cu_seqlens, S, wait=getattr(cu_seqlens, "is_meta", False))
    if ends is not None:
        ends = tuple(ends)
        right = (
            len(ends) == cu_seqlens.shape[0]
            and ends[0] == 0
            and ends[-1] == S
            and all(a <= b for a, b in itertools.pairwise(ends))
        )
        if not right or (not cu_seqlens.is_cuda and list(ends) != cu_seqlens.tolist()):
            raise ValueError(f"ends must be the values of cu_seqlens, got {list(ends)}")
    return cu_seqlens, ends


_once = once_across("context_parallel_attention")


# ---- Ulysses: heads for tokens, and back


def _exchanged(message, cp):
    received = torch.empty_like(message, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, message.contiguous(), group=cp.ulysses)
    return received


def _heads_for_tokens(tensors, cp):
    """[B, U h, s, D] each, of own tokens, to [B, h, U s, D] of own heads. One message carries
    all.
    """
    message = torch.cat(
        [t.unflatten(1, (cp.ulysses_size, -1)).permute(1, 3, 0, 2, 4) for t in tensors], 3
    )
    heads = [t.shape[1] // cp.ulysses_size for t in tensors]
    return _exchanged(message, cp).flatten(0, 1).permute(1, 2, 0, 3).split(heads, 1)


def _tokens_for_heads(tensors, cp):
    """The reverse. In memory [s, B, heads, D], which is what a projection reads."""
    message = torch.cat(
        [t.unflatten(2, (cp.ulysses_size, -1)).permute(2, 3, 0, 1, 4) for t in tensors], 3
    )
    parts = _exchanged(message, cp).split([t.shape[1] for t in tensors], 3)
    return [t.permute(1, 2, 0, 3, 4).flatten(2, 3).permute(1, 2, 0, 3) for t in parts]


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cp):
        # Query head h reads head h // groups of keys. With each of those `again` times, every rank
        # gets as many, and its queries read them in order.
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


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, cp):
        ctx.cp = cp
        return _tokens_for_heads((out,), cp)[0]

    @staticmethod
    @_once
    def backward(ctx, dout):
        return _heads_for_tokens((dout,), ctx.cp)[0], None


# ---- what a ring computes and sends


class Block(NamedTuple):
    """A rectangle: queries [a, b) of this rank's rows, keys [a, b) of the rows that a step has.
    offset: the distance from its first key to its first query where the window cuts it, None where
    every query sees every key.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    offset: int | None


class Step(NamedTuple):
    """send: intervals of this rank's rows that ring rank r + t needs.   receive: of r - t's rows,
    one after the other.
    blocks: what is computed with them.
    """

    send: tuple[tuple[int, int], ...]
    receive: tuple[tuple[int, int], ...]
    blocks: tuple[Block, ...]


class Plan(NamedTuple):
    """steps: of t = 0, which sends nothing, to R - 1.   chunks: of this rank's two, where each
    begins in the sequence, and whether it holds more than one document.   rows: of a chunk.
    """

    steps: tuple[Step, ...]
    chunks: tuple[tuple[int, bool], ...]
    rows: int


@functools.lru_cache(maxsize=64)  # the layers of a model ask for the same
def plan(
    ends: tuple[int, ...], S: int, ring: int, rank: int, causal: bool, window: int | None
) -> Plan:
    """What ring rank `rank` of `ring` computes and sends for documents that end at `ends`. Every
    rank makes its own, and they agree.
    """
    rows = S // (2 * ring)
    steps = []
    for t in range(ring):
        send, receive = (
            _united([block.keys for block in _blocks(to, source, ends, rows, ring, causal, window)])
            for to, source in (((rank + t) % ring, rank), (rank, (rank - t) % ring))
        )
        blocks = _blocks(rank, (rank - t) % ring, ends, rows, ring, causal, window)
        if t == 0:
            steps.append(Step((), (), tuple(blocks)))
        else:
            steps.append(
                Step(
                    tuple(send),
                    tuple(receive),
                    tuple(block._replace(keys=_within(receive, block.keys)) for block in blocks),
                )
            )
    chunks = []
    for number in _chunks(rank, ring):
        begin = number * rows
        inside = bisect.bisect_left(ends, begin + rows) - bisect.bisect_right(ends, begin)
        chunks.append((begin, inside > 0))
    return Plan(tuple(steps), tuple(chunks), rows)


def _chunks(rank, ring):
    return rank, 2 * ring - 1 - rank


def _blocks(to, source, ends, rows, ring, causal, window):
    """What the queries of ring rank `to` see of the keys of `source`, but for a chunk's of
    itself.
    """
    found = []
    for (q_at, i), (k_at, j) in itertools.product(
        enumerate(_chunks(to, ring)), enumerate(_chunks(source, ring))
    ):
        if i == j or (causal and i < j) or rows == 0:
            continue
        shared = _shared(max(i, j), min(i, j), rows, ends)
        if shared is None:
            continue
        (qa, qb), (ka, kb) = shared if i > j else shared[::-1]
        offset = None
        if window is not None:
            ka, qb = max(ka, qa - window + 1), min(qb, kb - 1 + window)
            if ka >= kb or qa >= qb:
                continue
            offset = qa - ka if qb - 1 - ka >= window else None
        to_q, to_k = q_at * rows - i * rows, k_at * rows - j * rows
        found.append(Block((qa + to_q, qb + to_q), (ka + to_k, kb + to_k), offset))
    return _joined(found)


def _shared(late, early, rows, ends):
    """The beginning of chunk `late` and the end of chunk `early` that are in one document, or
    None.
    """
    first = late * rows
    after = bisect.bisect_right(ends, first)
    begin, end = ends[after - 1], ends[after]
    if begin >= (early + 1) * rows:
        return None
    return (first, min(end, first + rows)), (max(begin, early * rows), (early + 1) * rows)


def _joined(blocks):
    """Whole rectangles side by side as one: a causal step then is a single one."""
    for x, y in itertools.permutations(blocks, 2):
        if x.offset is not None or y.offset is not None:
            continue
        rest = [b for b in blocks if b not in (x, y)]
        if x.keys == y.keys and x.queries[1] == y.queries[0]:
            return _joined([Block((x.queries[0], y.queries[1]), x.keys, None), *rest])
        if x.queries == y.queries and x.keys[1] == y.keys[0]:
            return _joined([Block(x.queries, (x.keys[0], y.keys[1]), None), *rest])
    return sorted(blocks)


def _united(intervals):
    """Sorted, those that touch or overlap as one."""
    found: list[tuple[int, int]] = []
    for a, b in sorted(intervals):
        if found and a <= found[-1][1]:
            found[-1] = (found[-1][0], max(b, found[-1][1]))
        else:
            found.append((a, b))
    return found


def _within(intervals, part):
    """Where `part` of one of the intervals lies when they are one after the other."""
    before = 0
    for a, b in intervals:
        if a <= part[0] and part[1] <= b:
            return before + part[0] - a, before + part[1] - a
        before += b - a
    raise AssertionError(f"{part} is in none of {intervals}")


# ---- the ring

_met: set[dist.ProcessGroup] = set()


class _Transfer:
    """A message to a ring rank and what comes from another one, either of them possibly None,
    on their way.
    """

    def __init__(self, cp, message, to, received, source, tag):
        self.received = received
        ops = [
            dist.P2POp(op, t, group=cp.ring, group_peer=peer % cp.ring_size, tag=tag)
            for op, t, peer in ((dist.isend, message, to), (dist.irecv, received, source))
            if t is not None
        ]
        self.works = dist.batch_isend_irecv(ops) if ops else []
        self.message = message  # so that its memory stays until it was sent

    def wait(self):
        """What has come, or None. On CUDA the stream waits, the host does not."""
        for work in self.works:
            work.wait()
        return self.received


def _meet(cp, device):
    """NCCL wants all ranks of a group in its first call, and the first message may be of two of
    them.
    """
    if device.type == "cuda" and cp.ring not in _met:
        dist.all_reduce(torch.zeros(1, device=device), group=cp.ring)
        _met.add(cp.ring)


def _room(intervals, like):
    """For those rows of keys and of values, [2, rows, B, Hk, D] in the dtype of `like`; None
    for none.
    """
    B, heads, _, D = like.shape
    return like.new_empty(2, sum(b - a for a, b in intervals), B, heads, D) if intervals else None


def _post(step, t, k, v, cp):
    """The keys and values of step t."""
    message = _room(step.send, k)
    if message is not None:
        for half, x in zip(message, (k, v), strict=True):
            torch.cat([x[:, :, a:b].permute(2, 0, 1, 3) for a, b in step.send], out=half)
    return _Transfer(cp, message, cp.ring_rank + t, _room(step.receive, k), cp.ring_rank - t, 2 * t)


def _post_back(step, t, gradients, like, cp):
    """The gradients of step t's keys and values, to where those came from."""
    return _Transfer(
        cp, gradients, cp.ring_rank - t, _room(step.send, like), cp.ring_rank + t, 2 * t + 1
    )


def _as_heads(t):
    """[2, rows, B, Hk, D] as keys and values [B, Hk, rows, D]."""
    return t.permute(0, 2, 3, 1, 4)


def _at(t, rows):
    return t[:, :, rows[0] : rows[1]]


def _own_documents(cu_seqlens, begin, packed, rows):
    """Where a chunk's documents begin and end in it; made on the device, without waiting for it."""
    return cu_seqlens.clamp(begin, begin + rows) - begin if packed else None


def _of_block(block, options):
    """A rectangle of which nothing is masked is not causal."""
    if block.offset is None:
        return {**options, "causal": False, "window": None}
    return {**options, "offset": block.offset}


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, cu_seqlens, cp, plan, options):
        B, H, n, D = q.shape
        acc = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty(B, n, H, D, dtype=acc, device=q.device).transpose(1, 2)
        lse = torch.empty(B, H, n, dtype=acc, device=q.device)
        _meet(cp, q.device)
        coming = _post(plan.steps[1], 1, k, v, cp)
        for i, (begin, packed) in enumerate(plan.chunks):
            rows = (i * plan.rows, (i + 1) * plan.rows)
            part, part_lse = attention_part(
                *(_at(t, rows) for t in (q, k, v)),
                **options,
                cu_seqlens=_own_documents(cu_seqlens, begin, packed, plan.rows),
            )
            _at(out, rows).copy_(part)
            _at(lse, rows).copy_(part_lse)
        keys, values = k, v
        for t, step in enumerate(plan.steps):
            if t:
                received = coming.wait()
                keys, values = (None, None) if received is None else _as_heads(received)
                if t + 1 < len(plan.steps):
                    coming = _post(plan.steps[t + 1], t + 1, k, v, cp)
            for block in step.blocks:
                part, part_lse = attention_part(
                    _at(q, block.queries),
                    _at(keys, block.keys),
                    _at(values, block.keys),
                    **_of_block(block, options),
                )
                _merge(_at(out, block.queries), _at(lse, block.queries), part, part_lse)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(acc)[:, None])
            out *= torch.exp(lse - total)[..., None]
            lse = total
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks, cu_seqlens)
        ctx.cp, ctx.plan, ctx.options = cp, plan, options
        return out

    @staticmethod
    @_once
    def backward(ctx, dout):
        q, k, v, out, lse, sinks, cu_seqlens = ctx.saved_tensors
        cp, plan = ctx.cp, ctx.plan
        with _checks.no_autocast(q):
            dq, dk, dv = _ring_backward(dout, q, k, v, out, lse, cu_seqlens, cp, plan, ctx.options)
        dsinks = None
        if sinks is not None:  # it has a share of the softmax and no value
            delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            dsinks = (
                -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
            )
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None, None


def _merge(out, lse, part, part_lse):
    """Another part of the softmax into `out` and `lse`; each row has seen a key, itself, before."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_(torch.exp(lse - total)[..., None]).add_(part * torch.exp(part_lse - total)[..., None])
    lse.copy_(total)


def _ring_backward(dout, q, k, v, out, lse, cu_seqlens, cp, plan, options):
    acc = lse.dtype

    def gradients(queries, keys, values, more):
        return attention_part_backward(
            _at(dout, queries),
            _at(q, queries),
            keys,
            values,
            _at(out, queries),
            _at(lse, queries).contiguous(),
            **more,
        )

    def zeros(t):
        B, heads, n, D = t.shape
        return torch.zeros(B, n, heads, D, dtype=acc, device=t.device).transpose(1, 2)

    coming, returning = _post(plan.steps[1], 1, k, v, cp), None
    dq, dk, dv = map(zeros, (q, k, v))

    def take(returned, step):
        """Adds what another rank's queries contribute to the gradients of keys and values that
        it was sent.
        """
        received = returned.wait()
        if received is not None:
            at = 0
            for a, b in step.send:
                for total, part in zip((dk, dv), _as_heads(received), strict=True):
                    total[:, :, a:b] += part[:, :, at : at + b - a]
                at += b - a

    for i, (begin, packed) in enumerate(plan.chunks):
        rows = (i * plan.rows, (i + 1) * plan.rows)
        own = _own_documents(cu_seqlens, begin, packed, plan.rows)
        parts = gradients(rows, _at(k, rows), _at(v, rows), {**options, "cu_seqlens": own})
        for total, part in zip((dq, dk, dv), parts, strict=True):
            _at(total, rows).add_(part)
    keys, values, totals = k, v, (dk, dv)
    for t, step in enumerate(plan.steps):
        message = None
        if t:
            received = coming.wait()
            if received is not None:
                keys, values = _as_heads(received)
                message = torch.zeros_like(received, dtype=acc)
                totals = _as_heads(message)
            if t + 1 < len(plan.steps):
                coming = _post(plan.steps[t + 1], t + 1, k, v, cp)
        for block in step.blocks:
            part_q, *parts = gradients(
                block.queries,
                _at(keys, block.keys),
                _at(values, block.keys),
                _of_block(block, options),
            )
            _at(dq, block.queries).add_(part_q)
            for total, part in zip(totals, parts, strict=True):
                _at(total, block.keys).add_(part)
        if t:
            if returning is not None:
                take(*returning)
            returning = _post_back(step, t, message, dk, cp), step
    take(*returning)
    return dq, dk, dv
