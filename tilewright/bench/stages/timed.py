"""Stages that time: the roofline, cases, goals and dispatch overhead."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from tilewright import platform, registry
from tilewright.bench import overhead, peers, run, sources, store, timing
from tilewright.bench.page import goals
from tilewright.bench.runner import Unit
from tilewright.bench.stages.checks import raised
from tilewright.bench.stages.common import BY_NAME, TIMED, clock, constants, threads
from tilewright.registry import Op, short


def roofline_unit(device: str) -> Unit:
    def make():
        return {"roofline": timing.measure_roofline(device, TIMED).asdict()}

    return Unit("roofline", make, {"roofline": None}, options=threads(device))


def time_unit(
    op: Op,
    case: registry.Case,
    device: str,
    dtype: torch.dtype,
    settings: run.Settings,
    out: pathlib.Path,
    only: Sequence[str] | None = None,
) -> Unit:
    def make():
        roof = store.parse((out / "roofline.json").read_text())["roofline"]
        if roof is None:
            raise RuntimeError("the roofline could not be measured")
        rows = run.measure(
            op,
            case,
            device,
            dtype,
            timing.Roofline(**roof),
            clock(device, settings.sample_seconds),
            settings,
            only,
        )
        run.free(device)
        return {"roofline": roof, "rows": rows}

    options = {
        "settings": vars(settings),
        "only": only and list(only),
        "constants": constants(op, device),
        **threads(device),
    }
    return Unit(
        f"time/{op.name}.{case.name}.{short(dtype)}",
        make,
        {"roofline": None, "rows": []},
        300.0,
        options,
        raised,
        sources.digest(op),
    )


def goal_units(
    ops: Sequence[Op],
    device: str,
    settings: run.Settings,
    out: pathlib.Path,
    cases: Sequence[str] | None,
) -> list[Unit]:
    """A unit for each case of this device's goals, with only the implementation that `auto` takes
    and the peers.

    Cases without bandwidth goals come first: they are matmuls, which take most of a step.
    """
    about: dict[tuple[Op, registry.Case, torch.dtype], set[str]] = {}
    for op in ops:
        for goal, case, dtype in goals_on(op, device):
            if cases is None or case.name in cases:
                about.setdefault((op, case, dtype), set()).add(goal.metric)
    ordered = sorted(about, key=lambda aim: "roofline_percent" in about[aim])
    return [
        replace(
            time_unit(
                op,
                case,
                device,
                dtype,
                settings,
                out,
                only=[op.choose(device, dtype), *peers.PEERS],
            ),
            name=f"goals/{op.name}.{case.name}.{short(dtype)}",
        )
        for op, case, dtype in ordered
    ]


def goals_on(op: Op, device: str) -> Iterator[tuple[registry.Goal, registry.Case, torch.dtype]]:
    """The goals of an op for this device, with each of their cases and its dtype (default:
    bfloat16).
    """
    capability = "{}.{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else None
    for goal in op.goals:
        if goal.holds_for(platform.device_name(device), capability):
            for case in run.timed(op, device, goal.cases or None):
                for dtype in [BY_NAME[n] for n in goal.dtypes] or [torch.bfloat16]:
                    if any(dtype in i.dtypes for i in op.implementations if i.name != "eager"):
                        yield goal, case, dtype


def unmet(op: Op, device: str, out: pathlib.Path) -> set[tuple[str, torch.dtype]]:
    """(case, dtype) of this device's goals that the results in a folder do not show to be met,
    including those not measured, without a time, or without the provider to compare with.
    """
    documents = {name: document for name, _, document in store.read(out)}
    unmet_goals = set()
    for goal, case, dtype in goals_on(op, device):
        try:
            document = documents[f"goals/{op.name}.{case.name}.{short(dtype)}"]
            rows = {r["provider"]: r for r in document["rows"]}
            auto = next(r for r in rows.values() if r["auto"])
            peak = document["roofline"]["flops_per_second"].get(short(dtype))
            value = goals.goal_value(goal, auto, rows, peak)
        except (KeyError, TypeError, StopIteration):  # missing, incomplete, no time of `auto`
            value = None
        if value is None or not goals.met(goal, value):
            unmet_goals.add((case.name, dtype))
    return unmet_goals


def overhead_unit(
    op: Op,
    device: str,
    dtypes: Sequence[torch.dtype],
    settings: run.Settings,
    not_launched: bool = False,
) -> Unit:
    def make():
        implementation = "triton" if not_launched else None
        with overhead.not_launched() if not_launched else contextlib.nullcontext():
            rows = [
                r
                for dtype in dtypes
                for r in overhead.overhead(
                    [op],
                    device,
                    dtype,
                    rounds=15,
                    sample_seconds=settings.sample_seconds / 2,
                    implementation=implementation,
                )
            ]
        return {"rows": rows}

    return Unit(
        f"overhead/{op.name}" + (".not-launched" if not_launched else ""),
        make,
        {"rows": []},
        options={
            "dtypes": [short(d) for d in dtypes],
            "sample_seconds": settings.sample_seconds,
            "constants": constants(op, device),
            **threads(device),
        },
        source=sources.digest(op),
    )
