"""Compares what a rank's step gave with one process's."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from tilewright_lab.check_layout.step import Measured, Refused, Step, dtypes, gathered, narrower

# Largest difference of a tensor in the 2-norm, relative to one process's, by the narrowest dtype
# that computed it: sums over ranks have another order, and layers amplify what that rounds. In
# float64 hardly anything else passes; in 16 bits a factor of 1.1 does not.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
    # A sharded tensor's scale may be another, and so each of its roundings.
    torch.float8_e4m3fn: 0.3,
    torch.float8_e4m3fnuz: 0.3,
    torch.float8_e5m2: 0.5,
    torch.float8_e5m2fnuz: 0.5,
}
# The same for what the optimizer adds to weights: Adam divides by the gradient's size, so it
# amplifies the rounding of small elements.
UPDATE = {
    torch.float64: 1e-6,
    torch.float32: 1e-2,
    torch.float16: 0.3,
    torch.bfloat16: 0.3,
    torch.float8_e4m3fn: 0.5,
    torch.float8_e4m3fnuz: 0.5,
    torch.float8_e5m2: 0.5,
    torch.float8_e5m2fnuz: 0.5,
}
# Roundings of the mean element, for gradients that are zero but for rounding, such as those of a
# bias before a softmax.
ROUNDINGS = 8


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How a tensor differs from one process's.

    factor: by least squares; NaN where one process's is zero.
    rest: the 2-norm of what remains after it, relative to the tensor.
    error: the 2-norm of the difference, relative to one process's.
    small: whether one process's is no larger than what rounding may add: a factor cannot show.
    """

    holds: bool
    factor: float
    rest: float
    multiple: bool
    error: float
    small: bool


def deviation(actual: torch.Tensor, want: torch.Tensor, relative: float, slack: float) -> Deviation:
    """relative, slack: the budget, relative to the tensor's 2-norm, and for each element."""
    actual, want = _elements(actual), _elements(want)
    size, own = float(want.norm()), float(actual.norm())
    slack *= math.sqrt(want.numel())
    difference = float((actual - want).norm())
    if not math.isfinite(own):
        return Deviation(False, math.nan, math.nan, False, math.inf, size <= slack)
    if not size and difference > slack:
        return Deviation(False, math.nan, 1.0, False, math.inf, True)
    factor = float(actual @ want) / size**2 if size else 1.0
    rest = float((actual - factor * want).norm())
    return Deviation(
        holds=difference <= relative * size + slack,
        factor=factor,
        rest=rest / own if own else 0.0,
        multiple=rest <= relative * own + slack * max(1.0, abs(factor)),
        error=difference / size if size else 0.0,
        small=size <= slack,
    )


def _elements(t: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(t) if t.is_complex() else t).double().flatten()


def _eps(*tensors: torch.Tensor) -> float:
    """The eps of the widest rounding among them."""
    return max(
        torch.finfo(t.dtype).eps if t.is_floating_point() or t.is_complex() else 0.0
        for t in tensors
    )


@dataclasses.dataclass(frozen=True)
class Together:
    """A gradient summed over the ranks, where none of them shards it by a DTensor.

    copies: the number of copies of each element, over the ranks.
    """

    total: Deviation
    mean: Deviation
    copies: int


@dataclasses.dataclass(frozen=True)
class Compared:
    """One rank's step beside one process's.

    Deviations are by name; `together` has those gradients that differ on any rank.
    dtype, number: the narrowest of any rank and of one process.   drew, stale: as in `Measured`.
    narrow: 16-bit dtypes, by name, whose values alone a gradient that differs has.
    shares: how many times each rank's gradients before synchronize() are in this rank's after it,
        if those add up to it; else empty.
    early: whether gradients before synchronize() are one process's.
    """

    loss: float | None
    tokens: int
    norm: float | None
    reported: float | None
    dtype: torch.dtype
    number: torch.dtype
    kinds: dict[str, str]
    weights: dict[str, Deviation]
    gradients: dict[str, Deviation]
    updates: dict[str, Deviation]
    together: dict[str, Together]
    drew: bool
    stale: str = ""
    narrow: dict[str, torch.dtype] = dataclasses.field(default_factory=dict)
    shares: tuple[float, ...] = ()
    early: bool = False


@dataclasses.dataclass(frozen=True)
class Alone:
    """One process's step, without its tensors.

    order: names in the order in which the backward finished their gradients.
    squares: the squares of the gradients' norms.
    steps: whether it has an optimizer.   idle, drew, buffers: as in `Measured`.
    """

    loss: float | None
    tokens: int
    norm: float | None
    reported: float | None
    dtype: torch.dtype
    order: list[str]
    squares: dict[str, float]
    steps: bool
    idle: list[str]
    drew: bool
    buffers: list[str]


def alone(measured: Measured) -> Alone:
    squares = {n: float(_elements(g).square().sum()) for n, g in measured.gradients.items()}
    if not squares:
        raise Refused("no parameter has a gradient after the backward")
    if measured.loss is None or not measured.tokens:
        raise Refused("one process must have a loss and tokens, whatever ranks have")
    if bad := [n for n, square in squares.items() if not math.isfinite(square)]:
        raise Refused(f"the gradient of {bad[0]!r} is not finite")
    order = measured.order + [n for n in squares if n not in measured.order]
    return Alone(
        loss=measured.loss,
        tokens=measured.tokens,
        norm=measured.norm,
        reported=measured.reported,
        dtype=measured.dtype,
        order=order,
        squares=squares,
        steps=bool(measured.updates),
        idle=measured.idle,
        drew=measured.drew,
        buffers=measured.buffers,
    )


def compare(step: Step, actual: Measured, want: Measured, group: dist.ProcessGroup) -> Compared:
    """Every rank must call it.   want: one process's."""
    parts = {name: step.parts.get(name, _all_of_it) for name in actual.weights}
    _check_names(actual.weights, want.weights, step)
    _check_shapes(actual, want, parts)
    _check_covered(actual, want, parts, group)
    # A parameter that one process does not train has a gradient of zero there.
    trained = set().union(*gathered(list(actual.gradients), group))
    missing = [n for n in want.weights if n in trained and n not in want.gradients]
    zeros = {n: torch.zeros_like(want.weights[n], dtype=torch.float64) for n in missing}
    want = dataclasses.replace(want, gradients=want.gradients | zeros)
    dtype = narrower(want.dtype, *dtypes(actual.dtype, group))
    relative = TOLERANCE[dtype]

    def compared(kind: str, relative: float, slack: Mapping[str, float]) -> dict[str, Deviation]:
        mine, theirs = getattr(actual, kind), getattr(want, kind)
        return {
            name: deviation(
                mine.get(name, torch.zeros(())).expand_as(part(theirs[name])),
                part(theirs[name]),
                relative,
                slack[name],
            )
            for name, part in parts.items()
            if name in theirs
        }

    level = ROUNDINGS * torch.finfo(dtype).eps * _mean_element(want.gradients.values())
    # A weight that is added to rounds to its own dtype, here or in one process.
    rounding = {
        name: _eps(w, want.weights[name]) * _mean_element([want.weights[name]])
        for name, w in actual.weights.items()
    }
    gradients = compared("gradients", relative, dict.fromkeys(want.gradients, level))
    return Compared(
        loss=actual.loss,
        tokens=actual.tokens,
        norm=actual.norm,
        reported=actual.reported,
        dtype=dtype,
        number=narrower(want.number, *dtypes(actual.number, group)),
        kinds=actual.kinds,
        weights=compared("weights", relative, rounding),
        gradients=gradients,
        updates=compared("updates", UPDATE[dtype], rounding) if actual.updates else {},
        together=_together(actual, want, parts, gradients, (relative, level), group),
        drew=actual.drew,
        stale=actual.stale,
        narrow={
            name: narrow
            for name, d in gradients.items()
            if not d.holds and (narrow := _narrow(actual.gradients.get(name))) is not None
        },
        shares=_shares(actual, want, gradients, relative, group),
        early=bool(actual.early)
        and all(
            deviation(g, parts[n](want.gradients[n]), relative, level).holds
            for n, g in actual.early.items()
        ),
    )


def _narrow(gradient: torch.Tensor | None) -> torch.dtype | None:
    """The 16-bit dtype in which all elements of a wider tensor can be written."""
    if gradient is None or gradient.dtype not in (torch.float32, torch.float64):
        return None
    if not bool(gradient.any()):
        return None
    narrow = (torch.bfloat16, torch.float16)
    return next(
        (d for d in narrow if torch.equal(gradient.to(d).to(gradient.dtype), gradient)), None
    )


def _shares(
    actual: Measured,
    want: Measured,
    gradients: Mapping[str, Deviation],
    relative: float,
    group: dist.ProcessGroup,
) -> tuple[float, ...]:
    """Each rank's share, by least squares over all gradients that every rank has whole."""
    whole = [n for n, k in actual.kinds.items() if k == "copy" and n in actual.early]
    names = set.intersection(*map(set, gathered(whole, group)))
    names = [n for n in want.gradients if n in names and not want.gradients[n].is_complex()]
    if not names or not any(gathered(any(not d.holds for d in gradients.values()), group)):
        return ()
    products = torch.zeros(group.size(), group.size(), dtype=torch.float64)
    own = torch.zeros(group.size(), dtype=torch.float64)
    square = 0.0
    for name in names:
        mine, after = (
            actual.early[name].double().flatten(),
            actual.gradients[name].double().flatten(),
        )
        ranks = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(ranks, mine, group=group)
        each = torch.stack(ranks)
        products += each @ each.T
        own += each @ after
        square += float(after @ after)
    if not math.isfinite(square) or not bool(products.isfinite().all()):
        return ()
    shares = torch.linalg.lstsq(products, own, driver="gelsd").solution
    rest = square - 2 * float(shares @ own) + float(shares @ products @ shares)
    # A square of what remains: its own rounding is that of the squares.
    return tuple(shares.tolist()) if rest <= (relative**2 + 1e-12) * square else ()


def _all_of_it(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _mean_element(tensors: Iterable[torch.Tensor]) -> float:
    """The root mean square of all elements."""
    square = count = 0.0
    for t in tensors:
        square += float(_elements(t).square().sum())
        count += t.numel()
    return math.sqrt(square / max(1.0, count))


def _check_names(mine: Iterable[str], theirs: Mapping[str, torch.Tensor], step: Step) -> None:
    for name in mine:
        if name not in theirs:
            raise Refused(
                f"{name!r} is no parameter of the one process{_nearest(name, theirs)}: give its "
                "name there in Step.names"
            )
    if unknown := [name for name in step.parts if name not in theirs]:
        raise Refused(
            f"Step.parts has {unknown[0]!r}, which is no parameter of the one process"
            f"{_nearest(unknown[0], theirs)}"
        )


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _check_shapes(actual: Measured, want: Measured, parts: Mapping) -> None:
    for kind in ("weights", "gradients"):
        theirs = getattr(want, kind)
        for name, t in getattr(actual, kind).items():
            if name not in theirs:
                continue
            shape = parts[name](theirs[name]).shape
            if t.shape != shape:
                there = list(theirs[name].shape)
                said = f"{list(t.shape)} here and {there} in one process"
                if name in parts and parts[name] is not _all_of_it:
                    said = f"{list(t.shape)} and its Step.parts gives {list(shape)}"
                raise Refused(f"{name!r} has shape {said}: say in Step.parts which part it is")


def _indices(shape: torch.Size) -> torch.Tensor:
    return torch.arange(shape.numel()).view(shape)


def _check_covered(
    actual: Measured, want: Measured, parts: Mapping, group: dist.ProcessGroup
) -> None:
    """Refuses a parameter of which no rank has some elements."""
    everyones = gathered(actual.kinds, group)
    for name, tensor in want.weights.items():
        kinds = {kinds[name] for kinds in everyones if name in kinds}
        if not kinds:
            raise Refused(f"no rank has the parameter {name!r} of the one process")
        if kinds == {"part"}:
            held = torch.zeros(tensor.numel())
            if name in parts:
                held[parts[name](_indices(tensor.shape)).flatten()] = 1
            dist.all_reduce(held, group=group)
            if missing := int((held == 0).sum()):
                raise Refused(
                    f"no rank has {missing} of the {held.numel()} elements of {name!r}: see "
                    "Step.parts"
                )


def _together(
    actual: Measured,
    want: Measured,
    parts: Mapping,
    gradients: Mapping[str, Deviation],
    budget: tuple[float, float],
    group: dist.ProcessGroup,
) -> dict[str, Together]:
    """What ranks that each hold a gradient would have if they added them, or their mean."""
    differing = gathered([name for name, d in gradients.items() if not d.holds], group)
    sharded = gathered([name for name, kind in actual.kinds.items() if kind == "sharded"], group)
    result = {}
    for name in want.gradients:
        if not any(name in one for one in differing) or any(name in one for one in sharded):
            continue
        full = want.gradients[name]
        if full.is_complex():  # Gloo does not add them
            continue
        total, copies = torch.zeros(2, full.numel(), dtype=torch.float64)
        if name in parts:
            at = parts[name](_indices(full.shape)).flatten()
            copies[at] = 1
            if name in actual.gradients:
                total[at] = actual.gradients[name].double().flatten()
        dist.all_reduce(total, group=group)
        dist.all_reduce(copies, group=group)
        result[name] = Together(
            deviation(total, full, *budget),
            deviation(total / copies, full, *budget),
            int(copies.max()),
        )
    return result
