"""The limits that the numerics contract sets to the error of one result.

One is relative to the result's root mean square, and one to the median of its magnitudes, which
large elements do not move: where a few elements are far larger than the others, as in the gradient
of a softmax, the first says nothing about those. Codes in FP8 are judged in steps of their grid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch

from tilewright.bench import grid
from tilewright.bench.piece import Index
from tilewright.bench.tensors import deviation_of_parts, ordinary, root_mean_square

# In the units of `error`. 16-bit: one rounding on store, which remains even if the twin happens to
# be exact. float32: four roundings, since sums also have the result's precision and their order is
# free.
ATOL = {
    torch.float32: 2 * torch.finfo(torch.float32).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2,
    torch.float16: torch.finfo(torch.float16).eps / 2,
}
ATOL[torch.float64] = 1e-12
# The same for float32 results of 16-bit inputs: the twin may be exact by chance where the terms
# are.
WIDE = 8 * torch.finfo(torch.float32).eps
# What is always allowed relative to the median. It is below 2 %, so that an error of 2 % in an
# ordinary element shows; and so far above what remains of a cancellation in float32 that an order
# of sums which is less fortunate than the twin's does not.
ORDINARY = 1 / 64


# Parts of a tensor by their index in it, as text; "()": the whole tensor.
Parts = dict[str, tuple[Index, torch.Tensor]]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Bound:
    """A limit of one result's error.

    scale: errors are relative to the element or to this, whichever is larger.
    eager: the twin's error.   budget: what is allowed.   unit: as in `Finding`.
    slack: for codes and scales, the error that the values they hold may have.
    """

    scale: float
    eager: float
    budget: float
    unit: str = ""
    slack: float = 0.0


def of(
    twin: Parts, truth: Parts, dtype: torch.dtype, atol: float, of_sums: bool = False
) -> tuple[Bound, ...]:
    """dtype: the result's dtype.   of_sums: see `Judged`."""
    pairs = [(twin[k][1], t, at) for k, (at, t) in truth.items()]
    parts = [t for _, t, _ in pairs]
    if not parts[0].dtype.is_floating_point:
        e = differing(pairs)[0]
        return (Bound(0.0, e, 2 * e, "of the elements"),)
    # Numbers below the smallest normal one have fewer digits.
    rms, median = root_mean_square(parts), ordinary(parts, torch.finfo(dtype).smallest_normal)
    e = deviation_of_parts(pairs, rms)[0]
    bounds = [Bound(rms, e, 2 * e + atol)]
    if 0 < median < rms:
        e = deviation_of_parts(pairs, median)[0]
        budget = (4 if of_sums else 3) * e + atol * (rms / median if of_sums else 1.0)
        bounds.append(Bound(median, e, max(budget, ORDINARY), "of an ordinary element"))
    return tuple(bounds)


def usual(dtype: torch.dtype, result: torch.dtype) -> float:
    """The slack where an op gives none, for inputs and a result of these dtypes."""
    narrow = dtype.itemsize < 4 and result == torch.float32
    return WIDE if narrow else ATOL.get(result, ATOL[dtype])


def exact(truth: Parts) -> Bound:
    return Bound(root_mean_square([t for _, t in truth.values()]), 0.0, 0.0)


def on_grid(
    twin: Parts, held: Parts, dtype: torch.dtype, pairs: Sequence[Triple], nearest: bool
) -> Iterator[tuple[Bound]]:
    """The bounds for codes and for their scales.

    twin, held: the values that they hold, of the eager twin in the inputs' dtype and in float64.
    pairs: the twin's results, as `errors_on_grid` takes them.
    nearest: rounded to nearest; else up or down, as random bits say.
    """
    values = of(twin, held, dtype, ATOL[dtype])[-1]
    slack = 2 * values.eager + ATOL[dtype]
    for budget, (error, _) in zip(
        (0.5 if nearest else 1.0, 0.0), errors_on_grid(pairs, values.scale, slack), strict=True
    ):
        yield (Bound(values.scale, error, budget, "steps", slack),)


def differing(pairs) -> tuple[float, tuple[int, ...]]:
    """The share of integers that differ, and the index of one of them."""
    count = sum(t.numel() for _, t, _ in pairs)
    wrong = sum(float((r != t).sum(dtype=torch.float64)) for r, t, _ in pairs)
    return wrong / max(count, 1), deviation_of_parts(pairs, 0.0)[1]


def in_range(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Truth, with infinities where rounding to the result's dtype gives them."""
    if dtype != torch.float16 or not t.is_floating_point():
        return t
    rounded = t.to(dtype)
    return t.where(rounded.isfinite() | t.isnan(), rounded.to(t.dtype))


def errors_on_grid(
    pairs: Iterable[Triple], least: float, slack: float
) -> list[tuple[float, tuple[int, ...]]]:
    """The largest errors of codes and of scales, and where; pairs: codes, scales, values.
    least, slack: as in `grid.steps`.
    """
    worst = []
    for of_codes in (True, False):
        largest: tuple[float, tuple[int, ...]] = (0.0, ())
        for codes, scale, values in pairs:
            errors = (
                grid.steps(codes, scale, values, slack, least)
                if of_codes
                else grid.of_scales(scale, values, slack, least)
            )
            if errors.numel() and float(errors.max()) > largest[0]:
                index = torch.unravel_index(errors.argmax(), errors.shape)
                largest = float(errors.max()), tuple(map(int, index))
        worst.append(largest)
    return worst
