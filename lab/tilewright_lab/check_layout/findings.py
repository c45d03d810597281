"""What differs between a layout and one process, by which factor, and the likely fault."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence

import torch

from tilewright_lab.check_layout.compare import TOLERANCE, Alone, Compared, Deviation

# Absolute, of losses and norms that are compared as numbers.
TINY = 1e-12
# Largest relative difference of a number, but for its own rounding: that of the tensors that it is
# made of averages out in it.
NUMBER = 0.01
# Times the dtype's eps, twice a rounding: one process divides its sum, 4 ranks add theirs.
ROUNDED = 4
# How the hint of what has no cause of its own begins.
FOLLOWS = "follows from"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One kind of number that differs.

    kind: weights, tokens, loss, gradient, norm, reported loss or step.
    name: the first parameter that differs, in the backward's order.
    ranks: those on which it differs.   factor: by least squares, or the ratio of numbers.
    rest: the part of the tensor that remains after the factor; 0 for an exact multiple.
    differing, of: parameters that differ, and that were compared.
    """

    kind: str
    text: str
    hint: str = ""
    name: str | None = None
    ranks: tuple[int, ...] = ()
    factor: float | None = None
    rest: float | None = None
    differing: int = 0
    of: int = 0


def find(one: Alone, ranks: Sequence[Compared]) -> list[Finding]:
    """What differs, causes before what follows from them."""
    if weights := _tensors("weights", one, ranks):
        hint = (
            "the model starts with other weights: every rank is seeded alike before the function "
            "is called, so build the whole model in the same order, and take parts of it"
        )
        return [dataclasses.replace(weights, hint=hint)]
    tokens = _tokens(one, ranks)
    candidates = [tokens, _loss(one, ranks)]
    gradient = _tensors("gradients", one, ranks)
    if gradient is not None:
        if gradient.name not in one.squares:
            text = f"{gradient.name} has one on {_listed(gradient.ranks, len(ranks))}, and none in one process"
            gradient = dataclasses.replace(gradient, text=text)
        hint = _gradient_hint(gradient, one, ranks)
        if not hint and candidates[1] is not None:
            hint = f"{FOLLOWS} the loss"
        candidates.append(dataclasses.replace(gradient, hint=hint))
    reported = _reported(one, ranks)
    if reported is not None and not reported.hint and candidates[1] is not None:
        reported = dataclasses.replace(reported, hint=f"{FOLLOWS} the loss")
    candidates += [_norm(one, ranks, gradient), reported]
    step = _tensors("updates", one, ranks)
    if step is not None:
        candidates.append(dataclasses.replace(step, hint=_step_hint(step, any(candidates))))
    findings = [f for f in candidates if f is not None]
    if tokens is not None:
        follows = [dataclasses.replace(f, hint=f"{FOLLOWS} the data") for f in findings[1:]]
        findings = [tokens, *follows]
    return findings


def worst(ranks: Sequence[Compared]) -> float:
    """The largest relative error of a gradient with a size."""
    return max((d.error for c in ranks for d in c.gradients.values() if d.rest < 1), default=0.0)


# ---- tensors


def _tensors(kind: str, one: Alone, ranks: Sequence[Compared]) -> Finding | None:
    everywhere = [getattr(c, kind) for c in ranks]
    names = [n for n in one.order if any(n in d for d in everywhere)]
    names += [n for d in everywhere for n in d if n not in names and n not in one.order]
    differing = [n for n in names if any(n in d and not d[n].holds for d in everywhere)]
    if not differing:
        return None
    name = differing[0]
    by_rank = {r: d[name] for r, d in enumerate(everywhere) if name in d}
    bad = {r: d for r, d in by_rank.items() if not d.holds}
    factor, rest, text = _summary(by_rank, bad)
    return Finding(
        {"gradients": "gradient", "updates": "step"}.get(kind, kind),
        f"{name} is {text}",
        name=name,
        ranks=tuple(bad),
        factor=None if math.isnan(factor) else factor,
        rest=None if math.isnan(rest) else rest,
        differing=len(set(differing)),
        of=len(set(names)),
    )


def _summary(by_rank: dict[int, Deviation], bad: dict[int, Deviation]) -> tuple[float, float, str]:
    """(factor, rest, text) of a tensor."""
    values = list(bad.values())
    first = values[0]
    if all(_alike(d, first) for d in values):
        where = "" if len(by_rank) == 1 else f" on {_listed(bad, len(by_rank))}"
        return first.factor, 0.0 if first.multiple else first.rest, _factor(first) + where
    said = ", ".join(f"{_factor(d)} on rank {r}" for r, d in list(bad.items())[:4])
    most = max(values, key=lambda d: d.rest)
    return first.factor, 0.0 if most.multiple else most.rest, said


def names_where(
    ranks: Sequence[Compared],
    kind: str,
    keep: Callable[[str, Deviation], bool] = lambda name, deviation: True,
) -> list[str]:
    """Those of which every rank's deviation is to be kept."""
    everywhere: dict[str, bool] = {}
    for c in ranks:
        for name, d in getattr(c, kind).items():
            everywhere[name] = everywhere.get(name, True) and keep(name, d)
    return [name for name, kept in everywhere.items() if kept]


def is_small(name: str, ranks: Sequence[Compared]) -> bool:
    """Whether one process's gradient is zero but for rounding, or there is none."""
    return all(c.gradients[name].small for c in ranks if name in c.gradients)


def _alike(a: Deviation, b: Deviation) -> bool:
    return a.multiple == b.multiple and (
        _close(a.factor, b.factor) and (a.multiple or _close(a.rest, b.rest))
    )


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-9) or (math.isnan(a) and math.isnan(b))


def _listed(bad: Collection[int], number: int) -> str:
    if len(bad) == number:
        return "every rank"
    return f"rank{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))} only"


def _factor(d: Deviation) -> str:
    if math.isnan(d.rest):
        return "not finite"
    if math.isnan(d.factor):
        return "not zero, as it is in one process,"
    if d.multiple and abs(d.factor) < 1e-9:
        return "zero"
    if d.multiple:
        return f"exactly {d.factor:.4g} times one process's"
    rest = f"{d.rest:.0%} unrelated" if d.rest >= 0.01 else f"but for {d.rest:.1e} of it"
    return f"no multiple of one process's (nearest {d.factor:.3g} times, {rest})"


# ---- gradients


def divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]


def _times(factor: float, size: int, relative: float) -> int | None:
    """k > 1, which divides the number of ranks, for a factor of k; -k for 1 / k."""
    for k in divisors(size)[1:]:
        if math.isclose(factor, k, rel_tol=relative):
            return k
        if math.isclose(factor, 1 / k, rel_tol=relative):
            return -k
    return None


def _gradient_hint(gradient: Finding, one: Alone, ranks: Sequence[Compared]) -> str:
    assert gradient.name is not None
    if gradient.name not in one.squares:
        return "it is frozen in one process, or not in its graph"
    if text := _origin(gradient, ranks):
        return text
    deviations = [c.gradients[gradient.name] for c in ranks if gradient.name in c.gradients]
    same = all(_alike(d, deviations[0]) for d in deviations)
    if same and deviations[0].multiple:
        return _multiple_hint(gradient, one, ranks)
    hints = []
    together = ranks[0].together.get(gradient.name)
    if together is not None and not same:
        missing = "ranks have different gradients: an all-reduce is missing"
        if together.mean.holds:
            return f"{missing} (the mean over the ranks is one process's)"
        if together.total.holds:
            return f"{missing} (the sum over the ranks is one process's)"
        if together.total.multiple:
            return f"{missing} (the sum over the ranks is {together.total.factor:.4g} times)"
        hints.append(missing)
    # Such a divisor changes every gradient.
    right = names_where(ranks, "gradients", lambda n, d: d.holds and not is_small(n, ranks))
    if _is_local(one, ranks) and not right:
        counts = ", ".join(str(c.tokens) for c in ranks)
        hints.append(
            f"the loss is divided by each rank's own tokens ({counts}): divide its sum by the "
            "tokens of all ranks"
        )
    return "; ".join(hints)


def _origin(gradient: Finding, ranks: Sequence[Compared]) -> str:
    """Causes of which more is known than the gradient after the step."""
    stale = [r for r, c in enumerate(ranks) if c.stale]
    if stale:
        name = ranks[stale[0]].stale
        return (
            f"{name} has a gradient before the step on {_listed(stale, len(ranks))}: gradients are "
            "not set to zero"
        )
    assert gradient.name is not None
    narrow = {c.narrow[gradient.name] for c in ranks if gradient.name in c.narrow}
    rest, factor = gradient.rest, gradient.factor
    # A sum whose terms are rounded one after the other is off by a few roundings.
    if narrow and rest is not None and factor is not None:
        dtype = max(narrow, key=lambda d: torch.finfo(d).eps)
        most = len(ranks) * torch.finfo(dtype).eps
        if rest < most and abs(factor - 1) < most:
            name = str(dtype).removeprefix("torch.")
            return f"all its values are {name}'s: gradients are reduced, or cast, in {name}"
    shares = next((c.shares for c in ranks if c.shares), ())
    if shares and max(shares) - min(shares) > 1e-3 * max(map(abs, shares)):
        shown = ", ".join(f"{s:.4g}" for s in shares)
        return (
            f"synchronize() adds the ranks' gradients {shown} times: each rank scales its own "
            "before, as a clip by its own norm does; reduce them first"
        )
    if all(c.early for c in ranks):
        return "gradients are right before synchronize(), which reduces or scales them once more"
    return ""


def _multiple_hint(gradient: Finding, one: Alone, ranks: Sequence[Compared]) -> str:
    factor, size = gradient.factor or 0.0, len(ranks)
    if factor == 0:
        return "there is no gradient: the parameter is not in the graph, or its gradient is dropped"
    relative = _relative(ranks)
    alike = names_where(
        ranks,
        "gradients",
        lambda n, d: d.multiple and math.isclose(d.factor, factor, rel_tol=relative),
    )
    # The factor of a gradient that is zero but for rounding does not show.
    others = [
        n for n in names_where(ranks, "gradients") if n not in alike and not is_small(n, ranks)
    ]
    k = _times(factor, size, relative)
    if k is not None and others:
        return _hint_of_some(k, len(alike), gradient)
    if k is not None and k > 1:
        assert one.loss is not None
        if k == size and _near(sum(c.loss or 0.0 for c in ranks), one.loss, ranks):
            return (
                "gradients are reduced twice: the ranks' losses add up to one process's, so that "
                "one sum of the gradients is right"
            )
        return (
            f"gradients are summed over {k} ranks where the loss needs their mean, or are reduced "
            "twice: look for a second reduction before you divide"
        )
    if k is not None:
        return (
            f"gradients are averaged over {-k} ranks where the loss needs their sum: it is already "
            "divided by the tokens of all ranks"
        )
    for rank, c in enumerate(ranks if not others else ()):
        for times in (1, size):
            if c.tokens and math.isclose(factor, one.tokens / c.tokens / times, rel_tol=relative):
                return (
                    f"the loss is divided by the {c.tokens} tokens of rank {rank}, not by "
                    f"the {one.tokens} of all"
                )
    return ""


def _hint_of_some(k: int, number: int, gradient: Finding) -> str:
    """number: of gradients with this factor."""
    which = f"only {number} of {gradient.of} gradients"
    more = gradient.differing - number
    rest = f"; {more} more {'differs' if more == 1 else 'differ'} by no such factor" * (more > 0)
    if k > 1:
        return (
            f"{which}: they are summed over {k} ranks that already have the whole sum (after an "
            f"all-to-all an expert has the tokens of all ranks), or not divided by {k} as the "
            f"others are{rest}"
        )
    return (
        f"{which}: they are divided by {-k} once more than the others, or one rank's part of a "
        f"sum is taken for all of it{rest}"
    )


# ---- numbers


def _relative(ranks: Sequence[Compared]) -> float:
    """The tolerance of a number that is not rounded itself, such as a factor."""
    return min(TOLERANCE[ranks[0].dtype], NUMBER)


def _near(a: float, b: float, ranks: Sequence[Compared]) -> bool:
    relative = _relative(ranks) + ROUNDED * torch.finfo(ranks[0].number).eps
    return math.isclose(a, b, rel_tol=relative, abs_tol=TINY)


def _copies(total: float, whole: float, ranks: Sequence[Compared]) -> bool:
    """Whether ranks have the whole between them, or each of them has it, or groups of them."""
    return any(_near(total, k * whole, ranks) for k in divisors(len(ranks)))


def _tokens(one: Alone, ranks: Sequence[Compared]) -> Finding | None:
    total = sum(c.tokens for c in ranks)
    if any(total == k * one.tokens for k in divisors(len(ranks))):
        return None
    counts = " + ".join(str(c.tokens) for c in ranks)
    return Finding(
        "tokens",
        f"{counts} = {total}, in one process {one.tokens}",
        "the ranks do not have the data of one process between them",
        factor=total / one.tokens if one.tokens else None,
    )


def _mean_of_tokens(ranks: Sequence[Compared]) -> float:
    total = sum(c.tokens for c in ranks if c.loss is not None)
    return sum(c.tokens * c.loss for c in ranks if c.loss is not None) / max(1, total)


def _is_local(one: Alone, ranks: Sequence[Compared]) -> bool:
    """Whether each rank's loss is the mean over its own tokens, and their numbers differ."""
    assert one.loss is not None
    total = sum(c.loss or 0.0 for c in ranks)
    return not _copies(total, one.loss, ranks) and _near(_mean_of_tokens(ranks), one.loss, ranks)


def _loss(one: Alone, ranks: Sequence[Compared]) -> Finding | None:
    """The losses that were differentiated: their mean, their sum, each of them, or their mean over
    tokens is one process's. Gradients show which of these a step needs.
    """
    assert one.loss is not None
    total = sum(c.loss or 0.0 for c in ranks)
    if _copies(total, one.loss, ranks) or _is_local(one, ranks):
        return None
    shown = ", ".join("none" if c.loss is None else f"{c.loss:.6g}" for c in ranks)
    hint = ""
    if _tokens(one, ranks) is None:
        hint = (
            "the numbers of tokens agree, so a rank has other data or targets, such as targets "
            "that are shifted otherwise, or another divisor"
        )
    return Finding(
        "loss",
        f"{shown} on the ranks, in one process {one.loss:.6g}: neither their mean, nor their sum, "
        "nor their mean over tokens is that",
        hint,
        factor=total / one.loss / len(ranks) if one.loss else None,
        ranks=tuple(range(len(ranks))),
    )


def _by_rank(values: Sequence[float], want: float, ranks: Sequence[Compared]) -> tuple[int, ...]:
    return tuple(r for r, v in enumerate(values) if not _near(v, want, ranks))


def _said(values: Sequence[float], want: float) -> str:
    first = values[0]
    if all(math.isclose(v, first, rel_tol=1e-6) for v in values):
        times = f", {first / want:.4g} times" if want else ""
        return f"{first:.6g} on every rank, in one process {want:.6g}{times}"
    return f"{', '.join(f'{v:.6g}' for v in values)} on the ranks, in one process {want:.6g}"


def _norm(one: Alone, ranks: Sequence[Compared], gradient: Finding | None) -> Finding | None:
    norms = [c.norm for c in ranks if c.norm is not None]
    if one.norm is None or len(norms) < len(ranks):
        return None
    bad = _by_rank(norms, one.norm, ranks)
    if not bad:
        return None
    if gradient is None:
        hint = _norm_hint(norms, one, ranks)
    else:
        hint = f"{FOLLOWS} the gradients, unless it has a fault of its own"
    factor = norms[bad[0]] / one.norm if one.norm else None
    return Finding("norm", _said(norms, one.norm), hint, ranks=bad, factor=factor)


def _norm_hint(norms: Sequence[float], one: Alone, ranks: Sequence[Compared]) -> str:
    """Gradients are right, so it is how their squares are added."""
    assert one.norm is not None
    square, size = one.norm**2, len(ranks)
    if not all(math.isclose(n, norms[0], rel_tol=1e-6) for n in norms):
        if _near(sum(n * n for n in norms), square, ranks):
            return (
                "each rank reports the norm of what it holds: the squares are not summed over ranks"
            )
        return "ranks count different gradients"
    copied = {n for n in one.squares if all(c.kinds.get(n) == "copy" for c in ranks)}
    copies = sum(s for n, s in one.squares.items() if n in copied)
    parts = sum(one.squares.values()) - copies
    for k in divisors(size)[1:]:
        if _near(norms[0] ** 2, k * square, ranks):
            return f"every gradient is counted by {k} ranks: sqrt({k}) times the norm"
        if parts and _near(norms[0] ** 2, k * copies + parts, ranks):
            return f"squares of gradients that every rank holds whole are counted by {k} ranks"
        if copies and _near(norms[0] ** 2, copies + k * parts, ranks):
            return f"squares of sharded gradients are counted by {k} ranks"
        if _near(norms[0], k * one.norm, ranks):
            return f"norms are summed over {k} ranks instead of squares"
        if _near(norms[0] * k, one.norm, ranks):
            return f"the norm is divided by {k}"
    return ""


def _reported(one: Alone, ranks: Sequence[Compared]) -> Finding | None:
    values = [c.reported for c in ranks if c.reported is not None]
    want = one.reported if one.reported is not None else one.loss
    if len(values) < len(ranks) or want is None:
        return None
    bad = _by_rank(values, want, ranks)
    if not bad:
        return None
    hint = ""
    times = _times(values[0] / want, len(ranks), 1e-3) if want else None
    alike = all(math.isclose(v, values[0], rel_tol=1e-6) for v in values)
    if not alike:
        hint = "each rank reports its own loss: it is not reduced over the ranks"
    elif times is not None:
        hint = f"it is summed over {times} ranks" if times > 1 else f"it is divided by {-times}"
    elif _near(values[0], sum(c.loss or 0.0 for c in ranks) / len(ranks), ranks):
        hint = "it is the mean of the ranks' means, which have different numbers of tokens"
    factor = values[0] / want if want else None
    return Finding("reported loss", _said(values, want), hint, ranks=bad, factor=factor)


def _step_hint(step: Finding, explained: bool) -> str:
    if explained:
        return f"{FOLLOWS} the above"
    if step.factor == 0:
        return "it is not updated: the optimizer does not have it"
    return "gradients and norm are one process's: the clipping or the optimizer is not"
