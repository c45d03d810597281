"""Packs documents into bins of a fixed number of tokens. Deterministic, so that every rank computes
the same bins.
"""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from tilewright.core import platform
from tilewright.trainer.data.prepare import follow_parent


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


def multipack(
    lengths: np.ndarray, capacity: int, group_size: int, mp_start_method: str | None = None
) -> list[np.ndarray]:
    """First-fit decreasing within groups of `group_size` documents (longest first; ties in
    order).

    mp_start_method: pack the groups in this rank's share of as many processes as there are CPUs.
    """
    starts = range(0, len(lengths), group_size)
    groups = [lengths[i : i + group_size] for i in starts]
    fit = functools.partial(first_fit_decreasing, capacity=capacity)
    if mp_start_method is None or len(groups) == 1:
        packed = map(fit, groups)
    else:
        context = multiprocessing.get_context(mp_start_method)
        cpus = len(os.sched_getaffinity(0)) // platform.local_processes()  # every rank packs
        count = max(1, min(len(groups), cpus))
        with ProcessPoolExecutor(count, mp_context=context, initializer=follow_parent) as pool:
            packed = list(pool.map(fit, groups))
    return [b + start for start, bins in zip(starts, packed, strict=True) for b in bins]


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """The bins of one group. A tree over the bins holds the most room below each node, so that the
    first bin with room is found in log2(bins) steps; bins without documents have all their room.
    """
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    contents: list[list[int]] = []
    order = np.argsort(-lengths, kind="stable")
    for i, n in zip(order.tolist(), lengths[order].tolist(), strict=True):
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < n:
                node += 1
        if node - leaves == len(contents):
            contents.append([])
        contents[node - leaves].append(i)
        room[node] -= n
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return [np.array(sorted(c)) for c in contents]


def pack(
    lengths: np.ndarray,
    capacity: int,
    method: str = "sequential",
    group_size: int = 100_000,
    mp_start_method: str | None = None,
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
        return multipack(lengths, capacity, group_size, mp_start_method)
    raise ValueError(f"method must be sequential or multipack, got {method!r}")


def fingerprint(bins: list[np.ndarray]) -> str:
    """A hash of the documents of every bin, in order: other methods and groups can make the same
    number of bins.
    """
    digest = hashlib.sha256(np.array([len(b) for b in bins], np.int64).tobytes())
    for b in bins:
        digest.update(np.asarray(b, np.int64).tobytes())
    return digest.hexdigest()[:16]
