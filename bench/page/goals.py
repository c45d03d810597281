"""Judges the registry's goals by the newest measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.page.comparisons import Device
from bench.page.raw import Source
from bench.page.text import TITLES, UNITS, count, number, table
from tilewright import selection
from tilewright.core.registry import Goal, Op


@dataclass(frozen=True)
class Measured:
    """One case of a goal."""

    name: str
    value: float
    met: bool
    source: Source


@dataclass(frozen=True)
class Judged:
    value: float
    met: bool


def goal_text(goal: Goal) -> str:
    unit = UNITS.get(goal.metric, goal.metric)
    if goal.other:
        other = "the fastest of all" if goal.other == "best" else goal.other
        unit = f"times as fast as {other}"
    bounds = []
    for g in _bounds(goal):
        bound = (
            f"at least {number(g.at_least)}"
            if g.at_least is not None
            else f"at most {number(g.at_most)}"
        )
        within = "" if g.within_mib is None else f" within {g.within_mib / 1024:.3g} GiB"
        bounds.append(f"{bound} {unit}{within}")
    of = f" of {goal.by}" if goal.by else ""
    where = "; ".join(filter(None, (", ".join(goal.cases), ", ".join(goal.dtypes))))
    which = TITLES.get(goal.which, goal.which)
    return f"{which}{of} {' or '.join(bounds)}" + (f" ({where})" if where else "")


def _bounds(goal: Goal) -> list[Goal]:
    """The goal and those that count as well."""
    return [goal, *(_bounds(goal.otherwise) if goal.otherwise else [])]


def goal_row(op: Op, goal: Goal, device: Device | None) -> tuple[list[str], list[Source]]:
    """Best and worst measured case of a goal on a device, and whether it is met."""
    start = [f"`{op.name}`", device.name if device else devices_text(goal), goal_text(goal)]
    measured, unmeasured = _goal_cases(op, goal, device) if device else ([], [])
    if not measured:
        return [*start, "", "", "not measured"], []
    ordered = sorted(measured, key=lambda m: (m.value, m.name))
    if goal.at_least is None:
        ordered.reverse()
    missed = [m for m in ordered if not m.met]
    verdict = "met" if not missed else f"not met in {len(missed)} of {count(len(ordered), 'case')}"
    if unmeasured:
        verdict += "; not measured: " + ", ".join(unmeasured)
    return [
        *start,
        *(f"{number(m.value)} ({m.name})" for m in (ordered[0], ordered[-1])),
        verdict,
    ], [m.source for m in measured]


def devices_text(goal: Goal) -> str:
    return goal.device if isinstance(goal.device, str) else " or ".join(goal.device)


def _goal_cases(op: Op, goal: Goal, device: Device) -> tuple[list[Measured], list[str]]:
    cases = list(goal.cases) or [c.name for c in op.cases if device.kind in c.tags]
    dtypes = list(goal.dtypes) or [
        d for d in device.dtypes() if any(n[0] == op.name and n[2] == d for n in device.timed)
    ]
    measured, unmeasured = [], []
    for case in cases:
        for dtype in dtypes:
            group = device.timed.get((op.name, case, dtype))
            peak = group.roofline["flops_per_second"].get(dtype) if group else None
            judged = judge(goal, group.rows, peak) if group else None
            if group is None or judged is None:
                unmeasured.append(f"{case} {dtype}")
            else:
                measured.append(Measured(f"{case} {dtype}", judged.value, judged.met, group.source))
    return measured, unmeasured


def judge(goal: Goal, rows: Mapping[str, dict], peak: float | None) -> Judged | None:
    """The value of a goal's metric, and whether it is met; None if it was not measured.

    rows: rows of the same rounds, by provider.
    peak: measured FLOP/s.
    """
    row = (
        rows.get(goal.by) if goal.by else next((r for r in rows.values() if r.get("auto")), None)
    ) or {}
    value, mib = _value(goal, row, rows, peak), row.get("peak_mib")
    bounds = _bounds(goal)
    if value is None or (mib is None and any(g.within_mib is not None for g in bounds)):
        return None
    return Judged(value, any(_meets(g, value, mib) for g in bounds))


def _meets(goal: Goal, value: float, mib: float | None) -> bool:
    if goal.at_least is not None:
        reached = value >= goal.at_least
    else:
        assert goal.at_most is not None, "a goal has one of the two bounds"
        reached = value <= goal.at_most
    if goal.within_mib is None or not reached:
        return reached
    return mib is not None and mib <= goal.within_mib


def _value(goal: Goal, row: dict, rows: Mapping[str, dict], peak: float | None) -> float | None:
    if goal.metric == "peak_mib":
        return row.get("peak_mib")
    if goal.metric == "matmul_percent":
        rate = (row.get(goal.which) or {}).get("tflop_per_s")
        return 100 * rate * 1e12 / peak if rate and peak else None
    if not goal.other:
        return (row.get(goal.which) or {}).get(goal.metric)

    def milliseconds(r):
        return (r.get(goal.which) or {}).get("median_ms")

    against = rows.values() if goal.other == "best" else [rows.get(goal.other) or {}]
    ours, theirs = milliseconds(row), [t for r in against if (t := milliseconds(r))]
    return min(theirs) / ours if ours and theirs else None


def _held(device: Device) -> list[Measured]:
    """All measured cases of the goals that hold for a device."""
    return [
        case
        for op in selection.operations().values()
        for goal in op.goals
        if goal.holds_for(device.name, device.capability)
        for case in _goal_cases(op, goal, device)[0]
    ]


def _tallies(devices: Sequence[Device]) -> str:
    counts = [(d.name, _held(d)) for d in devices]
    return " ".join(
        f"{name}: {sum(case.met for case in cases)} of {len(cases)} measured goals met, each case "
        "counted."
        for name, cases in counts
        if cases
    )


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
        "[Performance goals](goals.md) of the registry, and their newest measurements. "
        + _tallies(devices),
        "",
        *table(
            ["op", "device", "goal", "worst", "best", "verdict"],
            [(cells, sources) for cells, sources in rows],
        ),
    ]
