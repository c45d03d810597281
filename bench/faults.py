"""Plants faults in the results of the eager twin: each must break the numerics contract.

Every result of an op is replaced by zeros, by the result for other inputs and by an input of the
same shape, and one ordinary element of it, whose magnitude is the median, is moved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tilewright.bench import contract, grid
from tilewright.bench.tensors import ordinary
from tilewright.core.cases import DETECTED
from tilewright.core.registry import Case, Op

# Results that are 0 but for rounding: a gradient of the logits of one class.
RESIDUES = {("logprob_entropy", "one_class", "grad logits")}
ELEMENT = "an element"
OTHER = 1000  # added to the seeds of inputs and of upstream gradients
GRID = (torch.float8_e4m3fn, torch.float8_e8m0fnu)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Planted(NamedTuple):
    """A planted fault. name: of the result.   caught: the findings that break the contract."""

    name: str
    fault: str
    caught: list[contract.Finding]


def plant(
    op: Op,
    case: Case,
    dtype: torch.dtype,
    seed: int = 0,
    layout: str = "contiguous",
) -> Iterator[Planted]:
    """Plants each fault by itself. Those that change nothing beyond rounding are left out."""
    kwargs = case.make("cpu", dtype, seed)
    by = contract.reference(op, kwargs, dtype, layout)
    eager, _ = contract.run(op, "eager", contract.convert(kwargs, None), grads=by.grads)
    other_kwargs = case.make("cpu", dtype, seed + OTHER)
    other, _ = contract.run(op, "eager", contract.convert(other_kwargs, None), layout, seed=OTHER)
    given = [t.detach() for t in (*contract.leaves(kwargs), *by.grads)]
    whole = op.judged.together(eager, kwargs) if op.judged.together else eager
    judged = {n for n in eager if whole[n] is not eager[n]}  # together with others
    for name, right in eager.items():
        if not right.numel() or (op.name, case.name, name) in RESIDUES:
            continue
        wrong = {"zeros": torch.zeros_like(right)}
        if name in other and other[name].shape == right.shape:
            wrong["other inputs"] = other[name]
        for i, t in enumerate(t for t in given if t.shape == right.shape):
            wrong[f"argument {i}"] = t.to(right.dtype)
        truth = by.truth[name]["()"][1]
        wrong[ELEMENT] = (
            _step_away(right, eager[by.scales[name]], truth, kwargs.get("seed") is None)
            if name in by.scales
            else _lost(right)
            if name in judged
            else _moved(right, truth, op.judged.detected(dtype, name))
        )
        for fault, value in wrong.items():
            # A residue that rounding left of a parameter may be 0 or another's in one element.
            chance = op.judged.together and name in judged and right.numel() < 8
            if not chance and not unchanged(value, right, 0 if fault == ELEMENT else 4):
                results = {**eager, name: value}
                findings = contract.compared(op, results, kwargs, _only(by, name))
                yield Planted(name, fault, contract.broken(findings))


def detectable(by: contract.Reference, name: str) -> float | None:
    """The least error of an ordinary element, relative to it, that always breaks the contract; None
    for integers, for results that are judged in another way, and where no element is ordinary.
    """
    parts = [t for _, t in by.truth[name].values()]
    if by.dtypes[name] not in contract.ATOL or not parts[0].is_floating_point():
        return None
    median = ordinary(parts, torch.finfo(by.dtypes[name]).smallest_normal)
    if not median or name in by.scales.values():
        return None
    return min(b.budget * max(1.0, b.scale / median) for b in by.bounds[name])


def _only(by: contract.Reference, name: str) -> contract.Reference:
    """The reference of one result, and of the codes or scales that belong to it."""
    pair = next((p for p in by.scales.items() if name in p), (name,))
    return dataclasses.replace(by, truth={n: by.truth[n] for n in pair})


def unchanged(one: torch.Tensor, other: torch.Tensor, ulps: int) -> bool:
    """Whether the two differ by this number of the dtype's eps at most, in the unit of `error`."""
    if ulps and one.is_floating_point() and one.dtype not in GRID:
        return contract.error(one, other)[0] <= ulps * torch.finfo(one.dtype).eps
    return bool((one.view(INTEGERS[one.itemsize]) == other.view(INTEGERS[one.itemsize])).all())


def _moved(right: torch.Tensor, truth: torch.Tensor, amount: float) -> torch.Tensor:
    """`right` with an ordinary element moved away from truth by `amount` of it, and on to the next
    value of the dtype. Integers, and numbers on a coarse grid, move by one step.
    """
    moved = right.clone(memory_format=torch.contiguous_format)
    raw = moved.view(-1).view(INTEGERS[right.itemsize])  # a sign and a magnitude
    if not right.is_floating_point():
        for at in range(1 if amount == DETECTED else math.ceil(amount * right.numel())):
            raw[right.numel() // 2 - at] ^= 1
        return moved
    at = _ordinary(right)
    if at is None:
        return moved
    if right.dtype in GRID:
        raw[at] += 1
        return moved
    value = float(moved.view(-1)[at])
    up = abs(value) >= abs(float(truth.reshape(-1)[at]))
    moved.view(-1)[at] = value * (1 + (amount if up else -amount))
    if abs(float(moved.view(-1)[at]) - value) < amount * abs(value):
        raw[at] += 1 if up else -1
    return moved


def _ordinary(t: torch.Tensor, where: torch.Tensor | None = None) -> int | None:
    """The index of the element whose magnitude is nearest to the median; where: of those alone."""
    least = 0.0 if t.dtype in GRID else torch.finfo(t.dtype).smallest_normal
    size = t.double().abs().flatten()
    size = size.where((size > least) & size.isfinite(), float("nan"))
    if size.isnan().all():
        return None
    distance = (size - size.nanmedian()).abs().nan_to_num(nan=float("inf"))
    if where is not None:
        distance = distance.where(where.flatten(), float("inf"))
    return int(distance.argmin()) if distance.isfinite().any() else None


def _step_away(
    codes: torch.Tensor, scale: torch.Tensor, truth: torch.Tensor, nearest: bool
) -> torch.Tensor:
    """`codes` with an ordinary code, whose value is not near a tie, off by a step, or by two steps
    where it has been rounded up or down by chance.
    """
    moved, raw = codes.clone(), codes.view(torch.uint8)
    mantissa = raw & 7  # of the least and the largest, a neighbor is in another binade
    clear = (grid.steps(codes, scale, truth, 0.0, 0.0) < 0.25) & (mantissa > 1) & (mantissa < 6)
    at = _ordinary(grid.decoded(codes, scale), clear)
    if at is not None:
        up = grid.decoded(codes, scale).abs() >= truth.abs()
        by = 1 if nearest else 2
        moved.view(-1).view(torch.uint8)[at] += by if up.flatten()[at] else -by
    return moved


def _lost(right: torch.Tensor) -> torch.Tensor:
    """A part of a number, with an ordinary element off by as much as the largest."""
    moved, at = right.clone(), _ordinary(right)
    if at is not None:
        moved.view(-1)[at] += right.abs().max()
    return moved
