"""Pieces of a call, and how many of them are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MEMORY = 8 * 2**30  # bytes that a check may use on a device besides a call's inputs and results
# Elements of the widest tensor of a piece: half a GiB in float64, and there are about 8 such.
WORK = 2**26
# Elements of results that are kept for comparison, in float64 and in the twin's own dtype.
KEPT = 2**26
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """A part of a call that can be computed separately.

    inputs: argument -> the part of it that the piece reads; others are read whole.
    outputs: index of an output -> the part of it that this piece computes; other outputs are
        summed over pieces.
    within: argument -> the part of it whose gradient is summed over pieces, if it differs from
        `inputs`.
    other: arguments that replace those of the call.
    """

    inputs: Mapping[str, Index] = field(default_factory=dict)
    outputs: Mapping[int, Index] = field(default_factory=dict)
    within: Mapping[str, Index] = field(default_factory=dict)
    other: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pieces:
    """All pieces of a call.

    shapes: the shapes of the outputs that pieces compute parts of.
    parts: all pieces, in order.
    description: their description in a result.
    sample: indices of the parts whose own results are compared; None: all.
    eager: replaces the op's twin, with the same result and less memory.
    """

    shapes: Mapping[int, Sequence[int]]
    parts: Sequence[Piece]
    description: str
    sample: frozenset[int] | None = None
    eager: Callable[..., Any] | None = None

    def note(self) -> str | None:
        """The note in a result whose contract was checked on a sample only; else None."""
        return (
            None
            if self.sample is None
            else f"{len(self.sample)} of {len(self.parts)} {self.description}"
        )


def sample_of(parts: Sequence[Piece], num_elements: int) -> frozenset[int] | None:
    """Evenly spaced pieces, including the first and the last; None: all.

    num_elements: total number of result elements that belong to one piece each.
    """
    count = len(parts)
    keep = max(2, int(count * KEPT / max(num_elements, 1)))
    if keep >= count:
        return None
    return frozenset(round(i * (count - 1) / (keep - 1)) for i in range(keep))


def blocks(count: int, step: int) -> Iterator[slice]:
    return (slice(a, min(a + step, count)) for a in range(0, count, max(step, 1)))


def at_dim(dim: int, where: slice) -> Index:
    return (*(slice(None),) * dim, where)
