"""Attention over a sequence that is sharded over ranks: all-to-all over heads (Ulysses), a ring, or
both.

There are R x U ranks (ring size R, Ulysses size U) and S tokens, a multiple of 2 R U. The sequence
is split into 2 R chunks. Ring rank r has chunks r and 2 R - 1 - r, an early and a late one, which
balances causal attention. The two are concatenated, and each of the U Ulysses ranks has a U-th of
them. With R = 2 and U = 2:

    chunk           0     1     2     3
    parts          0 1   2 3   4 5   6 7
    ring rank       0     1     1     0
    Ulysses rank    0     0     1     1        ring 0: 0 1 | 6 7     ring 1: 2 3 | 4 5

Ulysses: an all-to-all gives each rank a U-th of the query heads, the key heads that those read, and
all tokens of its ring rank; a second one does the reverse.

Ring: chunks and documents are intervals, so two chunks share at most one document, and one chunk's
queries see a rectangle of another's keys: the beginning of the later chunk by the end of the
earlier one. Only keys and values of such rectangles are sent: in step t = 1 .. R - 1 directly from
ring rank r to r + t, overlapped with the rectangles of the previous step. Results are combined by
their log-sum-exps, in float32. The backward sends keys and values again, and their gradients return
in float32.

Where a ring cuts a document depends on what stands before it, and so do the bits of such a sum.
With `whole_documents` ring ranks exchange heads for tokens too, after the Ulysses ranks, and each
calls `attention` with its heads of the whole sequence, in order, as one process does with all
heads: 2 all-to-alls more each way, and no messages.

                        Ulysses, all-to-alls           ring, messages sent per rank, at most
    forward     2: queries, keys and values; results    R - 1: keys with values
    backward    2: gradients, in reverse                2 (R - 1): keys with values; their gradients

A prefix is one rectangle more: a document's queries by its keys. Documents that end with a chunk
send nothing, and nothing is sent that no query sees. Deterministic: sums have a fixed order. Not in
the table of ops: the implementations are `attention`'s, and a test needs several processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tilewright.core import checks, torch_names
from tilewright.core.takes import takes
from tilewright.ops.attention.attention import ATTENTION, attention
from tilewright.ops.attention.options import (
    DOCUMENTS,
    HEADS,
    OPTIONS,
    QKV,
    check_heads,
    request_of,
)
from tilewright.ops.attention.prefixes import Prefix, check_prefixes
from tilewright.ops.attention.ring import Ring
from tilewright.ops.attention.ring_plan import plan, united
from tilewright.ops.attention.ulysses import over_heads

__all__ = ["ContextParallel", "context_parallel_attention", "positions", "shard", "unshard"]


@dataclass(frozen=True)
class ContextParallel:
    """Describes how a sequence is sharded over ranks, and this rank's shard. `of` makes one from
    process groups; without groups it is a layout alone.

    Args:
        ulysses_size, ring_size: number of ranks.
        ulysses_rank, ring_rank: this process's ranks.
        ulysses, ring: the process groups; None for size 1 (or in a layout).

    Raises:
        ValueError: a rank is out of range.

    Example:
        >>> ContextParallel(ring_size=2, ring_rank=0).intervals(8)
        [(0, 2), (6, 8)]
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
        """The layout of this process. Ranks of one Ulysses group must have the same ring rank, and
        vice versa.
        """

        def place(group):
            return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))

        (U, u), (R, r) = place(ulysses), place(ring)
        return cls(U, R, u, r, ulysses if U > 1 else None, ring if R > 1 else None)

    @property
    def size(self) -> int:
        return self.ulysses_size * self.ring_size

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups over whose ranks a sequence is sharded."""
        return tuple(g for g in (self.ulysses, self.ring) if g is not None)

    @property
    def multiple(self) -> int:
        """The number of which a sequence's length must be a multiple."""
        return 2 * self.size if self.size > 1 else 1

    def layout(self) -> ContextParallel:
        """A copy without the groups, which can be pickled."""
        return ContextParallel(self.ulysses_size, self.ring_size, self.ulysses_rank, self.ring_rank)

    def intervals(self, S: int) -> list[tuple[int, int]]:
        """This rank's tokens within the sequence, in order: one interval [a, b), or two."""
        if S % self.multiple:
            raise ValueError(
                f"the sequence must have a multiple of {self.multiple} tokens (2 x "
                f"{self.ring_size} ring x {self.ulysses_size} Ulysses ranks), got {S}"
            )
        if self.size == 1:
            return [(0, S)]
        chunk, shard_length = S // (2 * self.ring_size), S // self.size
        parts: list[tuple[int, int]] = []
        for at, number in ((0, self.ring_rank), (chunk, 2 * self.ring_size - 1 - self.ring_rank)):
            first, end = (
                max(at, min(at + chunk, shard_length * (self.ulysses_rank + i))) for i in (0, 1)
            )
            if first < end:
                parts.append((first - at + number * chunk, end - at + number * chunk))
        return united(parts)


def _check_dim(t: torch.Tensor, dim: int) -> None:
    if not -t.dim() <= dim < t.dim():
        accepted = f"from {-t.dim()} to {t.dim() - 1}" if t.dim() else "none of a scalar"
        raise IndexError(f"dim must be a dimension of t ({accepted}), got {dim}")


def shard(t: torch.Tensor, dim: int, cp: ContextParallel) -> torch.Tensor:
    """Takes this rank's shard of a whole sequence's tensor. Differentiable. Sends nothing.

    Args:
        t: the tensor, of any shape and dtype, the same on every rank.
        dim: the dimension of the sequence.
        cp: the layout; its process groups are not used.

    Returns:
        This rank's tokens, in order: a view if the shard is one interval, else a copy.

    Raises:
        ValueError: the length is not a multiple of 2 x ring x Ulysses ranks.
        IndexError: t has no such dimension.

    Example:
        >>> from tilewright.ops.attention.context_parallel import ContextParallel, shard
        >>> shard(torch.arange(8), 0, ContextParallel(ring_size=2, ring_rank=1)).tolist()
        [2, 3, 4, 5]
    """
    _check_dim(t, dim)
    parts = [t.narrow(dim, a, b - a) for a, b in cp.intervals(t.shape[dim])] or [
        t.narrow(dim, 0, 0)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def positions(
    S: int, cp: ContextParallel, device: torch.device | str | None = None
) -> torch.Tensor:
    """The position within the sequence of each of this rank's tokens.

    Args:
        S: the whole sequence's length.
        cp: the layout; its process groups are not used.
        device: the result's device; None: PyTorch's default device.

    Returns:
        int64 [S / ranks], in the order of `shard`.

    Raises:
        ValueError: S is not a multiple of 2 x ring x Ulysses ranks.

    Example:
        >>> from tilewright.ops.attention.context_parallel import ContextParallel, positions
        >>> positions(8, ContextParallel(ring_size=2, ring_rank=0)).tolist()
        [0, 1, 6, 7]
    """
    return shard(torch.arange(S, device=device), 0, cp)


def unshard(t: torch.Tensor, dim: int, cp: ContextParallel) -> torch.Tensor:
    """Gathers the whole sequence's tensor from all ranks' shards: the inverse of `shard`. Every
    rank of `cp` must call it. Not differentiable.

    Args:
        t: this rank's shard; those of all ranks have one shape and dtype.
        dim: the dimension of the sequence.
        cp: the layout, with its process groups.

    Returns:
        The whole sequence's tensor, on every rank: a new one, without a gradient.

    Raises:
        IndexError: t has no such dimension.

    Example:
        >>> from tilewright.ops.attention.context_parallel import ContextParallel, unshard
        >>> unshard(torch.arange(4), 0, ContextParallel()).tolist()  # one rank
        [0, 1, 2, 3]
    """
    _check_dim(t, dim)
    t = t.detach()
    for group, size in ((cp.ulysses, cp.ulysses_size), (cp.ring, cp.ring_size)):
        if size > 1:
            parts = [
                torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(size)
            ]
            dist.all_gather(parts, t.contiguous(), group=group)
            t = torch.cat(parts, dim)
    return in_sequence(t, dim, cp.ring_size) if cp.ring_size > 1 else t.clone()


def of_ring_ranks(ring):
    """The numbers of the chunks that ring ranks have, an early and a late one each."""
    return [number for r in range(ring) for number in (r, 2 * ring - 1 - r)]


def taken(t, dim, numbers):
    """The chunks of t in another order. One split, whose gradient is one concatenation."""
    chunks = t.split([t.shape[dim] // len(numbers)] * len(numbers), dim)
    return torch.cat([chunks[number] for number in numbers], dim)


def in_sequence(t, dim, ring):
    """The whole sequence, from the tokens of ring rank 0, then of rank 1, and so on."""
    there = of_ring_ranks(ring)
    return taken(t, dim, sorted(range(len(there)), key=there.__getitem__))


# Long: 16 lines of keyword arguments, and the order in which ranks communicate.
# Document lengths are known at run time only. Below the other: torch 2.11 takes an outermost
# `disable` off a function that it is asked to compile.
# Wide: what attention takes, and the sequence's sharding.
@checks.autocast("products", "q", "k", "v")
@checks.torch_names(
    dropout_p="a mask of dropout has positions of the whole sequence, which a rank's part of the "
    "keys does not have"
)
@torch_names.uncompiled
@takes(
    *HEADS,
    "bounds >= 2",
    "k: Sk == S",
    **QKV,
    cu_seqlens=DOCUMENTS,
    **OPTIONS,
    sinks="float [Hq]",
)
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
    prefixes: Sequence[Prefix] = (),
    whole_documents: bool = False,
    implementation: str = "auto",
) -> torch.Tensor:
    """`attention` over a sharded sequence, of which this rank has the part given by `shard`. Every
    rank of `cp` must call it.

    With a ring, each block's result is rounded to q's dtype, they are summed in float32, and the
    sum is rounded again. Differentiable once in q, k, v and sinks. The gradient of sinks is this
    rank's share, of the queries and heads that it computed; the ranks' shares sum to the whole.
    Gradients of keys are summed in float32 over blocks, and over ranks that share a head.

    Args:
        q: [B, Hq, S / n, D], this rank's tokens, with n = R U ranks and Hq a multiple of U.
        k, v: [B, Hk, S / n, D] and [B, Hk, S / n, Dv], Hk a divisor of Hq. If Hk < U, key heads are
            sent to every rank with queries for them.
        cp: the layout, with its process groups.
        cu_seqlens: as in `attention`, for the whole sequence, on every rank: 0 .. S. Requires B =
            1.
        ends: the values of cu_seqlens on the host, if the caller has them (once per step, say). A
            ring reads them; without them a call on CUDA synchronizes. Checked against cu_seqlens on
            a CPU only.
        causal, window, softcap, sinks, scale: as in `attention`; sinks [Hq].
        prefixes: as in `attention`, of rows of the whole sequence.
        whole_documents: ring ranks exchange heads for tokens instead of sending keys and values, so
            a batch-invariant implementation gives the bits of `attention` in one process. Where
            ring_size does not divide Hq / U, keys are repeated for each query head, and heads of
            zeros are computed beside them.
        implementation: as in `attention`. A ring requires one that returns a part's log-sum-exp,
            except with whole_documents.

    Returns:
        [B, Hq, S / n, Dv] in q's dtype: `attention` of the whole sequence for this rank's tokens.

    Raises:
        TypeError, ValueError: invalid arguments.
        ImplementationUnavailable: a named implementation for which the request is unsupported. All
            errors are raised before any communication.

    Example:
        >>> q = torch.zeros(1, 2, 4, 8)
        >>> out = context_parallel_attention(q, q, q, ContextParallel())  # one rank
        >>> tuple(out.shape)
        (1, 2, 4, 8)

    Source: arXiv:2309.14509 (Ulysses); arXiv:2310.01889 (ring).
    """
    B, _, s, D = q.shape
    _check_shards(q, k, cp)
    cu_seqlens, ends = check_boundaries(cu_seqlens, ends, B, s * cp.size)
    ringed = cp.ring_size > 1 and not whole_documents
    if prefixes:
        if not causal:
            raise ValueError("prefixes need causal=True, got False")
        prefixes = check_prefixes(prefixes, cu_seqlens, s * cp.size)
    gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, sinks)
    )
    # Unsupported requests raise here, before other ranks wait for this one.
    request = request_of(
        (D, v.shape[3]),
        causal,
        window,
        softcap,
        packed=cu_seqlens is not None,
        sinks=sinks is not None and not ringed,
        shorter=ringed and window is not None,
        gradient=gradient,
        part=ringed,
    )
    if prefixes and not ringed:
        request = request._replace(shorter=True, prefixes=True)
    ATTENTION.pick(implementation, q, request)
    options = {
        "window": window,
        "softcap": softcap,
        "scale": scale,
        "implementation": implementation,
    }
    S = s * cp.size
    if ringed and ends is None:
        ends = (
            (0, S)
            if cu_seqlens is None
            else tuple(checks.cu_seqlens(cu_seqlens, S, wait=True).tolist())
        )
    longest = None if ends is None else max(b - a for a, b in itertools.pairwise(ends))

    def attend(q, k, v, sinks):
        if ringed:
            blocks = plan(ends, S, cp.ring_size, cp.ring_rank, causal, window, prefixes)
            own = {**options, "causal": causal}
            return Ring.apply(q, k, v, sinks, cu_seqlens, cp, blocks, own)
        return attention(
            q,
            k,
            v,
            cu_seqlens=cu_seqlens,
            causal=causal,
            sinks=sinks,
            max_seqlen=longest,
            prefixes=prefixes,
            **options,
        )

    def in_order(q, k, v, sinks):
        q, k, v = (in_sequence(t, 2, cp.ring_size) for t in (q, k, v))
        return taken(attend(q, k, v, sinks), 2, of_ring_ranks(cp.ring_size))

    def of_ulysses(q, k, v, sinks):
        if cp.ring_size > 1 and whole_documents:
            return over_heads(q, k, v, sinks, cp.ring, in_order)
        return attend(q, k, v, sinks)

    return over_heads(q, k, v, sinks, cp.ulysses, of_ulysses)


def _check_shards(q, k, cp):
    """Raises ValueError for heads or tokens that the layout cannot share out."""
    check_heads(q, k)
    H, s = q.shape[1:3]
    if H % cp.ulysses_size:
        raise ValueError(
            f"q must have a multiple of {cp.ulysses_size} heads, the same number for each Ulysses "
            f"rank, got {H}"
        )
    check_tokens("q", s, cp)


def check_tokens(argument: str, s: int, cp: ContextParallel) -> None:
    """Raises ValueError for a shard of s tokens that `cp` does not have, or that it cannot send."""
    if s * cp.size % cp.multiple:
        raise ValueError(
            f"{argument} must have an even number of tokens (the sequence is cut in 2 x {cp.size} "
            f"parts), got {s}"
        )
    for name in ("ulysses", "ring"):
        if getattr(cp, f"{name}_size") > 1 and getattr(cp, name) is None:
            raise ValueError(
                f"cp must have a process group for {name}_size = {getattr(cp, f'{name}_size')}: "
                "it is a layout alone"
            )


def check_boundaries(
    cu_seqlens: torch.Tensor | None, ends: Sequence[int] | None, B: int, S: int
) -> tuple[torch.Tensor | None, tuple[int, ...] | None]:
    """cu_seqlens of packed documents in B sequences of S tokens, on the device and on the host."""
    if cu_seqlens is None:
        if ends is not None:
            raise ValueError("ends are cu_seqlens on the host: give both, or cu_seqlens alone")
        return None, None
    if B != 1:
        raise ValueError(f"packed documents need B = 1, got {B} sequences")
    cu_seqlens = checks.cu_seqlens(cu_seqlens, S, wait=cu_seqlens.is_meta)
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
