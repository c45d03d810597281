"""Packs documents into bins of a fixed number of tokens. Deterministic, so that every rank computes
the same bins.
"""

from __future__ import annotations

import numpy as np


def sequential(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Greedy, in order: a bin is closed when the next document does not fit."""
    bins, start, used = [], 0, 0
    for i, n in enumerate(lengths):
        if used + n > capacity:
            bins.append(np.arange(start, i))
            start, used = i, 0
        used += n
    if start < len(lengths):
        bins.append(np.arange(start, len(lengths)))
    return bins


def multipack(lengths: np.ndarray, capacity: int, group_size: int) -> list[np.ndarray]:
    """First-fit decreasing within groups of `group_size` documents (longest first; ties in
    order).
    """
    bins = []
    for first in range(0, len(lengths), group_size):
        group = lengths[first : first + group_size]
        contents: list[list[int]] = []
        room = np.empty(len(group), dtype=np.int64)
        for i in np.argsort(-group, kind="stable"):
            fits = np.flatnonzero(room[: len(contents)] >= group[i])
            if len(fits):
                target = fits[0]
            else:
                target = len(contents)
                contents.append([])
                room[target] = capacity
            contents[target].append(first + int(i))
            room[target] -= group[i]
        bins += [np.array(sorted(c)) for c in contents]
    return bins


def pack(
    lengths: np.ndarray, capacity: int, method: str = "sequential", group_size: int = 100_000
) -> list[np.ndarray]:
    """Indices of the documents of each bin. Every document is in exactly one bin, and no bin
    exceeds `capacity`.

    Raises ValueError for a document longer than a bin (the caller splits or truncates them) or an
    unknown method.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and lengths.max() > capacity:
        i = int(lengths.argmax())
        raise ValueError(f"document {i} has {lengths[i]} tokens, a bin holds {capacity}")
    if method == "sequential":
        return sequential(lengths, capacity)
    if method == "multipack":
        return multipack(lengths, capacity, group_size)
    raise ValueError(f"method must be sequential or multipack, got {method!r}")
