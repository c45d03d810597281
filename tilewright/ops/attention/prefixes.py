"""Documents that begin with the first tokens of an earlier one, which are there once.

A prefix is (first, end, key_first, key_end): the document in rows first .. end also sees rows
key_first .. key_end, the first ones of a document that is whole, as if they stood before it. Any
implementation that takes fewer queries than keys computes it: the whole documents are packed, and
each other one is a call with its prefix's keys before its own. So there is one softmax, and nothing
is merged or rounded in between.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

Prefix = tuple[int, int, int, int]


def check_prefixes(
    prefixes: Sequence[Prefix], cu_seqlens: torch.Tensor | None, tokens: int
) -> tuple[Prefix, ...]:
    """Raises ValueError for invalid prefixes. They are compared with cu_seqlens on a CPU only."""
    if cu_seqlens is None:
        raise ValueError("prefixes need cu_seqlens: they are of packed documents")
    checked, before = tuple((a, b, c, d) for a, b, c, d in prefixes), 0
    readable = cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()
    ends = cu_seqlens.tolist() if readable else None
    for prefix in checked:
        a, b, c, d = prefix
        if not (0 <= c < d <= a < b <= tokens and before <= a):
            raise ValueError(
                "prefixes must be (first, end, key_first, key_end) with 0 <= key_first < key_end "
                f"<= first < end <= {tokens}, in order, got {prefix}"
            )
        before = b
        if any(c < other[1] and other[0] < d for other in checked):
            raise ValueError(
                f"prefixes must be of whole documents, got {prefix}, whose keys are in a document "
                "with a prefix"
            )
        if ends is not None and not (_is_document(ends, a, b) and _begins_one(ends, c, d)):
            raise ValueError(
                "prefixes must be of documents: cu_seqlens has no document of rows "
                f"{a} to {b}, or none that begins with rows {c} to {d}"
            )
    return checked


def _is_document(ends: list[int], a: int, b: int) -> bool:
    return a in ends and ends[bisect.bisect_right(ends, a)] == b


def _begins_one(ends: list[int], c: int, d: int) -> bool:
    return c in ends and ends[bisect.bisect_right(ends, c)] >= d


def prefixes_of(ends: Sequence[int], shared: Iterable[int]) -> tuple[Prefix, ...]:
    """The prefixes of documents, from their bounds and the number of tokens that each shares with
    the nearest document before it that shares none; 0: the document is whole.
    """
    prefixes, whole = [], 0
    for (a, b), count in zip(itertools.pairwise(ends), shared, strict=True):
        if not count:
            whole = a
        else:
            prefixes.append((a, b, whole, whole + count))
    return tuple(prefixes)


def attend_prefixed(
    attend: Callable,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    variant: Any,
    sinks: torch.Tensor | None,
    max_seqlen: int | None,
    prefixes: Sequence[Prefix],
) -> torch.Tensor:
    """attend: an implementation of attention, without prefixes."""
    S = q.shape[2]
    bounds = sorted({0, S, *itertools.chain(*prefixes)})
    # One split, whose gradient is one concatenation; a slice's would be a whole tensor each.
    parts = [t.split([b - a for a, b in itertools.pairwise(bounds)], 2) for t in (q, k, v)]

    def rows(i: int, *intervals: tuple[int, int]) -> torch.Tensor:
        pieces = [
            part for a, b in intervals for part in parts[i][bounds.index(a) : bounds.index(b)]
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)

    whole, at, bounds_of_whole = [], 0, cu_seqlens
    for a, b, _, _ in prefixes:
        whole, at = [*whole, (at, a)], b
        bounds_of_whole = bounds_of_whole - (cu_seqlens - a).clamp(0, b - a)
    whole.append((at, S))
    packed = [rows(i, *whole) for i in range(3)]
    attended = attend(*packed, bounds_of_whole, variant, sinks, max_seqlen)
    outs = [*attended.split([b - a for a, b in whole], 2)]
    for i, (a, b, c, d) in enumerate(prefixes):
        own, keys = rows(0, (a, b)), [rows(j, (c, d), (a, b)) for j in (1, 2)]
        outs.insert(2 * i + 1, attend(own, *keys, None, variant, sinks, None))
    return torch.cat(outs, 2)
