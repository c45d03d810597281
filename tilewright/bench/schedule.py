"""The suite's plan: its stages, most decisive first, with their units and shares of the time."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.bench import contract, run, variants
from tilewright.bench.runner import Unit
from tilewright.bench.stages.checks import check_unit, parity_unit
from tilewright.bench.stages.common import TIMED, smallest
from tilewright.bench.stages.questions import ab_unit, implementation
from tilewright.bench.stages.smoke import smoke_units
from tilewright.bench.stages.timed import (
    goal_units,
    others,
    overhead_unit,
    products,
    roofline_unit,
    time_unit,
)
from tilewright.bench.stages.tools import counter_units, sanitize_units
from tilewright.core.registry import Op

# Stages in their order, each with its weight: a stage's share of a call is its weight over the sum
# of the weights of all stages that the call was asked for. The weights of the stages up to
# `counters` are percent of a first call. In eight minutes the goals of the products are to be known
# within four of them; `bench rehearse` estimates each stage's need.
SHARES = {
    "smoke": 10,
    "roofline": 4,
    "products": 33,
    "ab": 15,
    "goals": 25,
    "host": 4,
    "sanitize": 5,
    "counters": 4,
    "parity": 40,
    "graph": 20,
    "big": 15,
    "time": 60,
    "overhead": 10,
}
STAGES = tuple(SHARES)
FIRST = STAGES[: STAGES.index("parity")]  # of a first call
ON_ROOF = ("products", "goals", "time")  # which judge by the roofline
# Ops of the stage `host`: streaming ops, the most frequent in a step; an op of several kernels; and
# one whose arguments are lists of tensors.
HOST = ("rmsnorm", "silu_mul", "rope", "cross_entropy", "moe_mlp", "adamw_")


@dataclass(frozen=True)
class Group:
    """Stages that run in the same processes, one after the other.

    most: the largest number of processes, each with a part of every stage's units; 1 if times are
        measured.
    per_core: processes per processor core.
    """

    stages: tuple[str, ...]
    most: int = 1
    per_core: float = 1.0

    def processes(self, device: str, jobs: int | None) -> int:
        """jobs: number of processes where nothing is timed; None: by the number of cores."""
        if self.most == 1:
            return 1
        if jobs:
            return jobs
        cores = int((os.cpu_count() or 1) * self.per_core)
        return min(self.most, max(1, cores)) if device == "cuda" else 1


GROUPS = (
    Group(("smoke",), most=64),
    Group(("roofline", "products", "ab", "goals", "host", "sanitize", "counters")),
    # Half of the cores: each process starts compilers.
    Group(("parity", "graph"), most=8, per_core=0.5),
    Group(("big", "time", "overhead")),
)


def ends(stages: Sequence[str], begin: float, until: float) -> dict[str, float]:
    """When each of these stages starts no further unit, by the shares. What a stage leaves over is
    the next one's.
    """
    of, passed, found = sum(SHARES[s] for s in stages), 0, {}
    for stage in STAGES:
        if stage in stages:
            passed += SHARES[stage]
            found[stage] = begin + (until - begin) * passed / of
    return found


@dataclass(frozen=True)
class Chosen:
    """What a call was asked for; see the suite's options.

    out: the folder of the units' files.
    only: providers of the stage `time`; default: all.
    not_launched: for the stage `overhead`, see `overhead.not_launched`.
    say: for the stage `time`, see `run.measure`.
    """

    device: str
    settings: run.Settings
    out: pathlib.Path
    only: Sequence[str] | None = None
    not_launched: bool = False
    say: Callable[[str], object] | None = None


def units(
    stage: str,
    ops: Iterable[Op],
    dtypes: Sequence[torch.dtype],
    chosen: Chosen,
    cases: Sequence[str] | None = None,
) -> list[Unit]:
    """The units of a stage, most decisive first."""
    ops, device, settings, out = list(ops), chosen.device, chosen.settings, chosen.out

    def tagged(tag):
        return [
            (op, case)
            for op in ops
            for case in op.cases
            if tag in case.tags and (cases is None or case.name in cases)
        ]

    supported = {
        op.name: [
            d for d in dtypes if any(d in i.dtypes for i in op.implementations if i.name != "eager")
        ]
        for op in ops
    }
    if stage == "smoke":
        return smoke_units(ops, device, supported, cases)
    if stage == "roofline":
        return [roofline_unit(device)]
    if stage in ("products", "goals"):
        order = products if stage == "products" else others
        return goal_units(order, ops, device, settings, out, cases)
    if stage == "ab" and torch.bfloat16 in dtypes:
        return _questions(tagged(device), device, settings)
    if stage == "sanitize" and device == "cuda":
        return sanitize_units([op for op in ops if smallest(op, cases)])
    if stage == "counters" and device == "cuda":
        return counter_units(tagged("cuda"))
    if stage == "parity":
        return [
            parity_unit(op, case, device, supported[op.name])
            for op, case in tagged("contract")
            if supported[op.name]
        ]
    if stage in ("graph", "big") and device == "cuda":
        return _checked(stage, tagged("contract" if stage == "graph" else "big"), supported)
    if stage == "time":
        return [
            time_unit(op, case, device, dtype, settings, out, chosen.only, chosen.say)
            for dtype in TIMED
            for op, case in tagged(device)
            if dtype in supported[op.name]
        ]
    if stage in ("host", "overhead"):
        dtypes_of = {op.name: [d for d in TIMED if d in supported[op.name]][:1] for op in ops}
        return [
            overhead_unit(op, device, dtypes_of[op.name], settings, chosen.not_launched)
            for op in ops
            if dtypes_of[op.name]
            and not (chosen.not_launched and "triton" not in op.names())
            and (stage == "overhead" or op.name in HOST)
        ]
    if stage in STAGES:
        return []
    raise ValueError(f"stage must be one of {list(STAGES)}, got {stage!r}")


def _questions(here, device: str, settings: run.Settings) -> list[Unit]:
    """Open questions: in the variants' order and not the registry's, but those about one case
    together, so that its truth is computed once.
    """
    cases = {(op.name, case.name): (op, case) for op, case in here}
    about: dict[tuple[str, str], list[variants.Variant]] = {}
    for v in variants.VARIANTS:
        if (at := (v.op, v.case)) not in cases:
            continue
        impl = implementation(v, cases[at][0], v.now, device)
        if impl is not None and impl.why_not(device, torch.bfloat16) is None:
            about.setdefault(at, []).append(v)
    return [
        ab_unit(v, *cases[at], device, settings, keep=v is not found[-1])
        for at, found in about.items()
        for v in found
    ]


def _checked(stage: str, here, supported: Mapping[str, Sequence[torch.dtype]]) -> list[Unit]:
    def big(op, name, case, dtype):
        return contract.check_big(op, name, case, "cuda", dtype)

    return [
        check_unit(
            stage,
            op,
            case,
            "cuda",
            supported[op.name][:1],
            contract.check_capture,
            contract.no_capture,
        )
        if stage == "graph"
        else check_unit(
            stage, op, case, "cuda", supported[op.name], big, lambda *_: None, limit=300.0
        )
        for op, case in here
        if supported[op.name]
    ]
