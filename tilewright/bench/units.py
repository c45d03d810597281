"""Units that time the roofline and cases, and what all units share: dtypes, clocks, the options
that a result depends on, and how a document is described.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.bench import report, run, sources, store, timing
from tilewright.bench.runner import Unit
from tilewright.core import platform
from tilewright.core.registry import Case, Op, short
from tilewright.kernels import tuning

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
TIMED = (torch.bfloat16, torch.float32)
BY_NAME = {short(d): d for d in (*DTYPES, torch.float64)}


def threads(device: str) -> dict[str, Any]:
    return {"threads": torch.get_num_threads()} if device == "cpu" else {}


def constants(op: Op, device: str) -> list[list[Any]]:
    """The tuned configurations of this op's launches on this device, which replace the
    heuristic's.
    """
    configs = []
    for t in dict.fromkeys(
        t for i in op.implementations if i.why_not(device) is None for t in i.tunables()
    ):
        folder = platform.slug(platform.device_name(device))
        configs += [
            [t.name, e["key"], e["config"]]
            for e in tuning.table(folder, t.op).get(t.launch, ())
            if set(e["key"]) == set(t.fields)
            and e["config"]
            != t.choice(tuning.arch_of_device() if device == "cuda" else None, **e["key"])
        ]
    return configs


def smallest(op: Op, cases: Sequence[str] | None = None) -> Case | None:
    """The op's first contract case (among those named), which stands for a small call of it."""
    return next(
        (c for c in op.cases if "contract" in c.tags and (cases is None or c.name in cases)), None
    )


@functools.cache  # creating a CUDA clock measures its flush
def clock(device: str, sample_seconds: float) -> timing.CpuClock | timing.CudaClock:
    return timing.clock(device, sample_seconds)


def roofline_unit(device: str) -> Unit:
    def make():
        return {"roofline": timing.measure_roofline(device, TIMED).asdict()}

    # On a GPU the machine's time is short; a processor may be slow, and shared.
    limit = 60.0 if device == "cuda" else 240.0
    return Unit("roofline", make, {"roofline": None}, limit, threads(device))


# Other libraries sum float32 in another order: on a CPU gradients of weights by `torch.compile`
# missed the contract by factors of 1.3 to 5.0, and by 8e5 where it computed another thing.
REORDERED = 8.0


def reordered(settings: run.Settings, dtype: torch.dtype) -> run.Settings:
    """Settings by which a baseline is timed, and marked, that misses the contract in float32 by an
    order of summation.
    """
    if dtype != torch.float32:
        return settings
    slack = max(settings.baseline_slack, REORDERED)
    return dataclasses.replace(settings, baseline_slack=slack)


def time_unit(
    op: Op,
    case: Case,
    device: str,
    dtype: torch.dtype,
    settings: run.Settings,
    out: pathlib.Path,
    only: Sequence[str] | None = None,
    say: Callable[[str], object] | None = None,
) -> Unit:
    settings = reordered(settings, dtype)

    def make():
        roof = store.documents(out).get("roofline", {}).get("roofline")
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
            say,
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
        sources.of_measured(op, device),
    )


def describe(document: dict[str, Any]) -> str:
    """A short description of a document, for the terminal."""
    if "rows" not in document:
        return report.roofline_text(document["roofline"])
    rows = [r for r in document["rows"] if r["status"] != "unavailable"]
    if not rows:
        reasons = [f"{r['provider']}: {r['reason']}" for r in document["rows"]]
        return f"\n    nothing was timed: {'; '.join(reasons) or 'no provider has this op'}"
    return "".join("\n    " + report.line(r) for r in rows)
