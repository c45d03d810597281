"""What each rank of a ring computes and sends: chunks, documents and windows as intervals.

Ring rank r of R has chunks r and 2 R - 1 - r of a sequence that is split into 2 R chunks. A chunk
and a document are intervals, so two chunks share at most one document, and the keys of one chunk
that another's queries see form a rectangle. So do a prefix's keys and a later document's queries.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from typing import NamedTuple

from tilewright.ops.attention.prefixes import Prefix


class Block(NamedTuple):
    """A rectangle: queries [a, b) of this rank's rows, keys [a, b) of the rows of a step.

    offset: the distance from its first key to its first query where the window cuts it, None where
        every query sees every key.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    offset: int | None


class Step(NamedTuple):
    """send: intervals of this rank's rows that ring rank r + t needs.
    receive: intervals of the rows of r - t, concatenated.
    blocks: what is computed with them.
    """

    send: tuple[tuple[int, int], ...]
    receive: tuple[tuple[int, int], ...]
    blocks: tuple[Block, ...]


class Plan(NamedTuple):
    """steps: from t = 0, which sends nothing, to R - 1.
    chunks: for each of this rank's two, its start in the sequence, and whether it contains more
        than one document.
    rows: per chunk.
    """

    steps: tuple[Step, ...]
    chunks: tuple[tuple[int, bool], ...]
    rows: int


@functools.lru_cache(maxsize=64)  # all layers of a model request the same plan
def plan(
    ends: tuple[int, ...],
    S: int,
    ring: int,
    rank: int,
    causal: bool,
    window: int | None,
    prefixes: tuple[Prefix, ...] = (),
) -> Plan:
    """The plan of ring rank `rank` of `ring` for documents that end at `ends`. Every rank computes
    its own plan, and the plans agree.
    """
    rows = S // (2 * ring)

    def blocks_of(to: int, source: int) -> list[Block]:
        blocks = _blocks(to, source, ends, rows, ring, causal, window)
        return _joined(blocks + _prefixed(to, source, prefixes, rows, ring, window))

    steps = []
    for t in range(ring):
        send, receive = (
            united([block.keys for block in blocks_of(to, source)])
            for to, source in (((rank + t) % ring, rank), (rank, (rank - t) % ring))
        )
        blocks = blocks_of(rank, (rank - t) % ring)
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
    """The keys of `source` that queries of ring rank `to` see, except a chunk's own keys."""
    blocks = []
    for (q_at, i), (k_at, j) in itertools.product(
        enumerate(_chunks(to, ring)), enumerate(_chunks(source, ring))
    ):
        if i == j or (causal and i < j) or rows == 0:
            continue
        shared = _shared(max(i, j), min(i, j), rows, ends)
        if shared is None:
            continue
        queries, keys = shared if i > j else shared[::-1]
        to_q, to_k = (q_at - i) * rows, (k_at - j) * rows
        blocks += _rectangle(queries, keys, to_q, to_k, window)
    return blocks


def _prefixed(to, source, prefixes, rows, ring, window):
    """The keys of `source` in prefixes of documents whose queries ring rank `to` has."""
    blocks = []
    for (q_at, i), (k_at, j) in itertools.product(
        enumerate(_chunks(to, ring)), enumerate(_chunks(source, ring))
    ):
        for first, end, key_first, key_end in prefixes:
            queries = max(first, i * rows), min(end, (i + 1) * rows)
            keys = max(key_first, j * rows), min(key_end, (j + 1) * rows)
            to_q, to_k, apart = (q_at - i) * rows, (k_at - j) * rows, first - key_end
            if queries[0] < queries[1] and keys[0] < keys[1]:
                blocks += _rectangle(queries, keys, to_q, to_k, window, apart)
    return blocks


def _rectangle(queries, keys, to_q, to_k, window, apart=0):
    """The block of rows of the sequence, cut by a window, if there is any of it left.

    to_q, to_k: from rows of the sequence to those of ranks.   apart: how many rows farther queries
    are from keys than their positions.
    """
    (qa, qb), (ka, kb) = queries, keys
    qa, qb, to_q, offset = qa - apart, qb - apart, to_q + apart, None
    if window is not None:
        ka, qb = max(ka, qa - window + 1), min(qb, kb - 1 + window)
        if ka >= kb or qa >= qb:
            return []
        offset = qa - ka if qb - 1 - ka >= window else None
    return [Block((qa + to_q, qb + to_q), (ka + to_k, kb + to_k), offset)]


def _shared(late, early, rows, ends):
    """The start of chunk `late` and the end of chunk `early` that share a document;
    None if none.
    """
    first = late * rows
    after = bisect.bisect_right(ends, first)
    begin, end = ends[after - 1], ends[after]
    if begin >= (early + 1) * rows:
        return None
    return (first, min(end, first + rows)), (max(begin, early * rows), (early + 1) * rows)


def _joined(blocks):
    """Merges adjacent whole rectangles: a causal step then is a single one."""
    for x, y in itertools.permutations(blocks, 2):
        if x.offset is not None or y.offset is not None:
            continue
        rest = [b for b in blocks if b not in (x, y)]
        if x.keys == y.keys and x.queries[1] == y.queries[0]:
            return _joined([Block((x.queries[0], y.queries[1]), x.keys, None), *rest])
        if x.queries == y.queries and x.keys[1] == y.keys[0]:
            return _joined([Block(x.queries, (x.keys[0], y.keys[1]), None), *rest])
    return sorted(blocks)


def united(intervals):
    """Sorted; intervals that touch or overlap are merged."""
    result: list[tuple[int, int]] = []
    for a, b in sorted(intervals):
        if result and a <= result[-1][1]:
            result[-1] = (result[-1][0], max(b, result[-1][1]))
        else:
            result.append((a, b))
    return result


def _within(intervals, part):
    """`part`, which lies in one of the intervals, as an interval of their concatenation."""
    before = 0
    for a, b in intervals:
        if a <= part[0] and part[1] <= b:
            return before + part[0] - a, before + part[1] - a
        before += b - a
    raise AssertionError(f"{part} is in none of {intervals}")
