"""Runs all checks and measurements of the registry on a device: correctness, speed, and dispatch
overhead.

    python -m bench suite --minutes 9 --out DIR [--stage STAGE,..] [--op OP,..] ...

Stages, in this order, over every op, implementation and case of the registry:

    smoke      each op's Triton implementation on a small case, against its twin, in as many
               processes as there are cores; more than three failures end the call
    roofline   copy bandwidth and dense matmul: the device's peaks
    products   goals of this library's matmuls and optimizer: `auto`, what a goal is about or
               compares with, and the peers
    ab         the open questions of `bench.variants`: two ways each, interleaved, on the case that
               decides
    goals      the other goals: a case of each streaming op, then the others
    host       host time of a few ops
    sanitize   a small launch of some ops under compute-sanitizer (CUDA)
    counters   hardware counters of a few kernels, by Nsight Compute (CUDA)
    parity     the numerics contract of every implementation, on every small case and dtype
    graph      CUDA-graph capture and replay of every implementation that runs on CUDA tensors
    big        cases of more than 2^31 elements (CUDA)
    time       every timed case: implementations and peers, correctness-gated, interleaved
    overhead   cost of the dispatch above a kernel

Each stage has a share of the minutes, and what it does not use is the next one's; time that is left
at the end is spent on what was cut. Each case has one result file. `tilewright.bench.plan` has the
rules of a call: what resumes, and the exit codes; 4 means that more than three ops failed in
`smoke`, and nothing else was run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from bench import overhead, variants
from bench.stages.checks import check_unit, parity_unit
from bench.stages.goals import goal_units, others, overhead_unit, products
from bench.stages.questions import ab_unit, implementation
from bench.stages.smoke import FAILURES_AT_MOST, smoke_units
from bench.stages.tools import counter_units, sanitize_units
from tilewright.bench import contract, plan, run
from tilewright.bench import units as timed
from tilewright.bench.options import at_least
from tilewright.bench.plan import Chosen, Plan, supported, tagged
from tilewright.bench.runner import Unit
from tilewright.bench.timed import RUN
from tilewright.bench.units import TIMED, smallest
from tilewright.core.registry import Op
from tilewright.kernels import tuning
from tilewright_lab import pretend

# Stages in their order, each with its weight: a stage's share of a call is its weight over the sum
# of the weights of all stages that the call was asked for. The weights of the stages up to
# `counters` are percent of a first call. In nine minutes the goals of the products are to be known
# within four of them; `bench rehearse` estimates each stage's need.
SHARES = {
    "smoke": 18,
    "roofline": 3,
    "products": 30,
    "ab": 13,
    "goals": 24,
    "host": 4,
    "sanitize": 5,
    "counters": 3,
    "parity": 40,
    "graph": 20,
    "big": 15,
    "time": 60,
    "overhead": 10,
}
STAGES = tuple(SHARES)
FIRST = STAGES[: STAGES.index("parity")]  # of a first call
# Ops of the stage `host`: streaming ops, the most frequent in a step; an op of several kernels; and
# one whose arguments are lists of tensors.
HOST = ("rmsnorm", "silu_mul", "rope", "cross_entropy", "moe_mlp", "adamw_")


GROUPS = (
    ("smoke",),
    ("roofline", "products", "ab", "goals", "host", "sanitize", "counters"),
    ("parity", "graph"),
    ("big", "time", "overhead"),
)


def processes(group: tuple[str, ...], device: str, jobs: int | None) -> int:
    """How many processes run a group.   jobs: how many where nothing is timed; None: half of the
    cores, at most 8, since each starts compilers.
    """
    if group not in (GROUPS[0], GROUPS[2]):
        return 1
    return jobs or (min(8, max(1, (os.cpu_count() or 1) // 2)) if device == "cuda" else 1)


def describe(document: dict[str, Any]) -> str:
    """A short description of a document, for the terminal."""
    if "results" in document:
        count = {}
        for r in document["results"]:
            count[r["status"]] = count.get(r["status"], 0) + 1
        bad = [
            f"{r['implementation']} {r['dtype']}: {r['reason']}"
            for r in document["results"]
            if r["status"] in ("broken", "error", "rejected")
        ]
        bad += [
            f"{t['question']}: {t['pass']} {t['now']['median']:.1f} us now, "
            f"{t['other']['median']:.1f} otherwise "
            f"({t['faster_percent']:+.1f} %): {t['better'] or 'neither'} is faster"
            for t in document.get("timed", ())
        ]
        return ", ".join(f"{n} {s}" for s, n in count.items()) + "".join(f"\n    {b}" for b in bad)
    if rows := document.get("rows"):
        return timed.describe(document) if "provider" in rows[0] else f"\n{overhead.table(rows)}"
    return timed.describe(document)


def units(
    stage: str,
    ops: Iterable[Op],
    dtypes: Sequence[torch.dtype],
    chosen: Chosen,
    cases: Sequence[str] | None = None,
) -> list[Unit]:
    """The units of a stage, most decisive first."""
    ops, device, settings, out = list(ops), chosen.device, chosen.settings, chosen.out
    not_launched = getattr(chosen.args, "not_launched", False)
    accepted = {op.name: supported(op, dtypes) for op in ops}

    if stage == "smoke":
        return smoke_units(ops, device, accepted, cases)
    if stage in RUN.shares:
        return RUN.units(stage, ops, dtypes, chosen, cases)
    if stage in ("products", "goals"):
        order = products if stage == "products" else others
        return goal_units(order, ops, device, settings, out, cases)
    if stage == "ab" and torch.bfloat16 in dtypes:
        return _questions(tagged(ops, device, cases), device, settings)
    if stage == "sanitize" and device == "cuda":
        return sanitize_units([op for op in ops if smallest(op, cases)])
    if stage == "counters" and device == "cuda":
        return counter_units(tagged(ops, "cuda", cases))
    if stage == "parity":
        return [
            parity_unit(op, case, device, accepted[op.name])
            for op, case in tagged(ops, "contract", cases)
            if accepted[op.name]
        ]
    if stage in ("graph", "big") and device == "cuda":
        return _checked(
            stage, tagged(ops, "contract" if stage == "graph" else "big", cases), accepted
        )
    if stage in ("host", "overhead"):
        dtypes_of = {op.name: [d for d in TIMED if d in accepted[op.name]][:1] for op in ops}
        return [
            overhead_unit(op, device, dtypes_of[op.name], settings, not_launched)
            for op in ops
            if dtypes_of[op.name]
            and not (not_launched and "triton" not in op.names())
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
    for v in variants.asked(tuning.arch_of_device()):
        if (at := (v.op, v.case)) not in cases:
            continue
        impl = implementation(v, cases[at][0], v.now, device)
        if impl is not None and impl.why_not(device, torch.bfloat16) is None:
            about.setdefault(at, []).append(v)
    return [
        ab_unit(v, *cases[at], device, settings, keep=v is not asked[-1])
        for at, asked in about.items()
        for v in asked
    ]


def _checked(stage: str, here, accepted: Mapping[str, Sequence[torch.dtype]]) -> list[Unit]:
    def big(op, name, case, dtype):
        return contract.check_big(op, name, case, "cuda", dtype)

    return [
        check_unit(
            stage,
            op,
            case,
            "cuda",
            accepted[op.name][:1],
            contract.check_capture,
            contract.no_capture,
        )
        if stage == "graph"
        else check_unit(
            stage, op, case, "cuda", accepted[op.name], big, lambda *_: None, limit=300.0
        )
        for op, case in here
        if accepted[op.name]
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--not-launched",
        action="store_true",
        help="measure the host time of Triton implementations on CPU tensors: kernels are "
        "compiled and specialized for compute capability 9.0, but not launched",
    )
    parser.add_argument(
        "--jobs",
        type=at_least(1, int),
        help="worker processes of stages without timing (default: by the number of cores; 1 on a "
        "CPU)",
    )


SETTINGS = run.Settings(rounds=9, max_seconds=6.0, baseline_slack=8.0)
SUITE = Plan(
    command=("bench", "suite"),
    about=__doc__,
    shares=SHARES,
    groups=GROUPS,
    units=units,
    describe=describe,
    on_roof=("products", "goals", "time"),
    decides={"smoke": FAILURES_AT_MOST},
    results="bench/results/{device}-{date}",
    settings=SETTINGS,
    options=_options,
    processes=lambda group, args: processes(group, args.device, args.jobs),
)


def main(argv: Sequence[str], start_time: float | None = None) -> int:
    if "--not-launched" in argv and (reason := pretend.no_compiling()):
        plan.parser(SUITE).error(f"--not-launched: {reason}")
    return plan.main(SUITE, argv, start_time)
