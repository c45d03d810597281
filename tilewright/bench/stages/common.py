"""Shared by the stages of a suite: dtypes, clocks, and the options that a result depends on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from tilewright import platform
from tilewright.bench import timing
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
            if set(e["key"]) == set(t.fields) and e["config"] != t.heuristic(**e["key"])
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
