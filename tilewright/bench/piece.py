"""What a piece of a call is, and how many of them are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MEMORY = 8 * 2**30  # bytes that a check may take on a device beside a call's inputs and results
WORK = (
    2**26
)  # elements of the widest tensor of a piece: half a GiB in float64, and there are about 8 such
KEPT = (
    2**26
)  # elements of results that are kept for comparison, in float64 and in the twin's own dtype
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """What can be computed by itself.

    inputs: argument -> the part of it that the piece reads; others are read whole.
    outputs: number of an output -> the part of it that this piece is; to others it adds.
    within: argument -> the part of it whose gradient is summed over pieces, if `inputs` is not
    that.
    other: arguments in place of the call's.
    """

    inputs: Mapping[str, Index] = field(default_factory=dict)
    outputs: Mapping[int, Index] = field(default_factory=dict)
    within: Mapping[str, Index] = field(default_factory=dict)
    other: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pieces:
    """shapes: of the outputs that pieces are parts of.   parts: all of them, in order.   what:
    names them in a result.
    sample: which of the parts' own results are compared; None: all.   eager: in place of the op's
    twin, the same function with less memory.
    """

    shapes: Mapping[int, Sequence[int]]
    parts: Sequence[Piece]
    what: str
    sample: frozenset[int] | None = None
    eager: Callable[..., Any] | None = None

    def note(self) -> str | None:
        """What a result says of a contract that was not looked at everywhere."""
        return (
            None if self.sample is None else f"{len(self.sample)} of {len(self.parts)} {self.what}"
        )


def sample_of(parts: Sequence[Piece], own: int) -> frozenset[int] | None:
    """own: elements that belong to one piece each, of all together. Even steps, the first and
    the last among them.
    """
    count = len(parts)
    keep = max(2, int(count * KEPT / max(own, 1)))
    if keep >= count:
        return None
    return frozenset(round(i * (count - 1) / (keep - 1)) for i in range(keep))


def blocks(count: int, step: int) -> Iterator[slice]:
    return (slice(a, min(a + step, count)) for a in range(0, count, max(step, 1)))


def at_dim(dim: int, where: slice) -> Index:
    return (*(slice(None),) * dim, where)
