"""Judges the registry's goals by the newest measurements of `auto`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright import selection
from tilewright.bench.page.comparisons import Device
from tilewright.bench.page.raw import Source
from tilewright.bench.page.text import TITLES, UNITS, count, number, table
from tilewright.registry import Goal, Op


@dataclass(frozen=True)
class Measured:
    """One case of a goal."""

    name: str
    value: float
    source: Source


def goal_text(goal: Goal) -> str:
    bound = (
        f"at least {number(goal.at_least)}"
        if goal.at_least is not None
        else f"at most {number(goal.at_most)}"
    )
    where = "; ".join(filter(None, (", ".join(goal.cases), ", ".join(goal.dtypes))))
    unit = (
        f"times as fast as {other}"
        if (other := goal.other)
        else UNITS.get(goal.metric, goal.metric)
    )
    return f"{TITLES.get(goal.which, goal.which)} {bound} {unit}" + (f" ({where})" if where else "")


def goal_row(op: Op, goal: Goal, device: Device | None) -> tuple[list[str], list[Source]]:
    """Best and worst measured case of a goal on a device, and whether it is met."""
    start = [f"`{op.name}`", device.name if device else _devices(goal), goal_text(goal)]
    measured, unmeasured = _goal_cases(op, goal, device) if device else ([], [])
    if not measured:
        return [*start, "", "", "not measured"], []
    ordered = sorted(measured, key=lambda m: (m.value, m.name))
    if goal.at_least is None:
        ordered.reverse()
    missed = [m for m in ordered if not met(goal, m.value)]
    verdict = "met" if not missed else f"not met in {len(missed)} of {count(len(ordered), 'case')}"
    if unmeasured:
        verdict += "; not measured: " + ", ".join(unmeasured)
    return [
        *start,
        *(f"{number(m.value)} ({m.name})" for m in (ordered[0], ordered[-1])),
        verdict,
    ], [m.source for m in measured]


def _devices(goal: Goal) -> str:
    return goal.device if isinstance(goal.device, str) else " or ".join(goal.device)


def met(goal: Goal, value: float) -> bool:
    return value >= goal.at_least if goal.at_least is not None else value <= goal.at_most


def _goal_cases(op: Op, goal: Goal, device: Device) -> tuple[list[Measured], list[str]]:
    cases = list(goal.cases) or [c.name for c in op.cases if device.kind in c.tags]
    dtypes = list(goal.dtypes) or [
        d for d in device.dtypes() if any(n[0] == op.name and n[2] == d for n in device.timed)
    ]
    measured, unmeasured = [], []
    for case in cases:
        for dtype in dtypes:
            group = device.timed.get((op.name, case, dtype))
            row = group.auto if group else {}
            value = (
                goal_value(goal, row, group.rows, group.roofline["flops_per_second"].get(dtype))
                if group
                else None
            )
            if value is None:
                unmeasured.append(f"{case} {dtype}")
            else:
                measured.append(Measured(f"{case} {dtype}", value, group.source))
    return measured, unmeasured


def goal_value(goal: Goal, row: dict, rows: Mapping[str, dict], peak: float | None) -> float | None:
    """The value of a goal's metric in a row of `auto`.

    rows: of the same rounds, by provider.
    peak: measured FLOP/s.
    """
    if goal.metric == "peak_mib":
        return row.get("peak_mib")
    if goal.metric == "matmul_percent":
        rate = (row.get(goal.which) or {}).get("tflop_per_s")
        return 100 * rate * 1e12 / peak if rate and peak else None
    if not goal.other:
        return (row.get(goal.which) or {}).get(goal.metric)
    ours, theirs = (
        (r.get(goal.which) or {}).get("median_ms") for r in (row, rows.get(goal.other) or {})
    )
    return theirs / ours if ours and theirs else None


def goals(devices: Sequence[Device]) -> list[str]:
    rows = []
    for op in selection.operations().values():
        for goal in op.goals:
            on = [d for d in devices if goal.holds_for(d.name, d.capability)] or [None]
            rows += [goal_row(op, goal, d) for d in on]
    out = ["## Goals", ""]
    if not rows:
        return [*out, "No op has a goal yet.", ""]
    return [
        *out,
        "Performance goals of `auto` in the registry, and its newest measurements.",
        "",
        *table(
            ["op", "device", "goal", "worst", "best", "verdict"],
            [(cells, sources) for cells, sources in rows],
        ),
    ]
