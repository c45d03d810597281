"""Runs all checks and measurements of the registry on a device: correctness, speed, and dispatch
overhead.

    python -m tilewright.bench suite --minutes 9 --out DIR [--goals] [--op OP,..] ...

Stages, in this order, over every op, implementation and case of the registry:

    roofline   copy bandwidth and dense matmul: the device's peaks
    sanitize   a small launch of each op with a goal under compute-sanitizer's memcheck and
               racecheck (CUDA)
    goals      the cases of this device's goals: `auto` and the peers that have the op
    ab         the open questions of `bench.variants`: two ways each, interleaved, on the case that
               decides
    parity     the numerics contract of every implementation, on every small case and dtype
    graph      CUDA-graph capture and replay of every implementation that runs on CUDA tensors
    big        cases of more than 2^31 elements (CUDA)
    time       every timed case: implementations and peers, correctness-gated, interleaved
    overhead   cost of the dispatch above a kernel

--goals stands for the first three and the overhead of ops with a goal: the most decisive results,
in the first minutes. Each case has one result file. A call ends within its minutes, and the next
one with the same DIR resumes. Results from other sources, versions, options, tuned launch
configurations or devices are measured again (--keep accepts other sources and versions), and so
are errors, up to three times in all.

Exit code: 0, everything is present and holds; 1, an implementation broke the contract or failed; 3,
time ran out first.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tilewright import platform, selection
from tilewright.bench import (
    contract,
    overhead,
    pretend,
    report,
    run,
    runner,
    store,
    variants,
)
from tilewright.bench.options import at_least, chosen, has_device, names
from tilewright.bench.providers import BASELINES
from tilewright.bench.runner import Unit
from tilewright.bench.stages.checks import check_unit, failures, parity_unit, sanitize_unit
from tilewright.bench.stages.common import BY_NAME, DTYPES, TIMED
from tilewright.bench.stages.questions import ab_unit, implementation
from tilewright.bench.stages.timed import (
    goal_units,
    goals_on,
    overhead_unit,
    roofline_unit,
    time_unit,
)
from tilewright.registry import Op, short

STAGES = ("roofline", "sanitize", "goals", "ab", "parity", "graph", "big", "time", "overhead")
FIRST = ("roofline", "sanitize", "goals", "overhead")  # of --goals
# Stages that share processes. The group with `parity` can run in parallel: nothing is timed there.
GROUPS = (
    ("roofline",),
    ("sanitize",),
    ("goals",),
    ("ab",),
    ("parity", "graph"),
    ("big", "time", "overhead"),
)


def units(
    stage: str,
    ops: Iterable[Op],
    device: str,
    dtypes: Sequence[torch.dtype],
    settings: run.Settings,
    out: pathlib.Path,
    cases: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    not_launched: bool = False,
) -> list[Unit]:
    """The units of a stage, most decisive first.

    out: the folder of the units' files.
    only: providers of the stage `time`; default: all.
    not_launched: for the stage `overhead`, see `overhead.not_launched`.
    """
    ops = list(ops)

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
    if stage == "roofline":
        return [roofline_unit(device)]
    if stage == "sanitize" and device == "cuda":
        small = {op.name: case for op, case in reversed(tagged("contract"))}  # the first of each
        return [
            sanitize_unit(op, small[op.name], device, torch.bfloat16)
            for op in ops
            if op.name in small
            and any(goals_on(op, device))
            and torch.bfloat16 in supported[op.name]
        ]
    if stage == "goals":
        return goal_units(ops, device, settings, out, cases)
    if stage == "ab" and torch.bfloat16 in dtypes:
        deciding = {}
        for v in variants.VARIANTS:  # in the variants' order, not the registry's
            for op, case in tagged(device):
                if (op.name, case.name) == (v.op, v.case) and implementation(
                    v, op, v.now, device
                ).why_not(device, torch.bfloat16) is None:
                    deciding.setdefault((op.name, case.name), (op, case, []))[2].append(v)
        return [ab_unit(vs, op, case, device, settings) for op, case, vs in deciding.values()]
    if stage == "parity":
        return [
            parity_unit(op, case, device, supported[op.name])
            for op, case in tagged("contract")
            if supported[op.name]
        ]
    if stage == "graph" and device == "cuda":
        return [
            check_unit(
                "graph",
                op,
                case,
                device,
                supported[op.name][:1],
                contract.check_capture,
                contract.no_capture,
            )
            for op, case in tagged("contract")
            if supported[op.name]
        ]
    if stage == "big" and device == "cuda":

        def check(op, name, case, dtype):
            return contract.check_big(op, name, case, device, dtype)

        return [
            check_unit(
                "big", op, case, device, supported[op.name], check, lambda *_: None, limit=300.0
            )
            for op, case in tagged("big")
            if supported[op.name]
        ]
    if stage == "time":
        return [
            time_unit(op, case, device, dtype, settings, out, only)
            for dtype in TIMED
            for op, case in tagged(device)
            if dtype in supported[op.name]
        ]
    if stage == "overhead":
        dtypes_of = {op.name: [d for d in TIMED if d in supported[op.name]][:1] for op in ops}
        return [
            overhead_unit(op, device, dtypes_of[op.name], settings, not_launched)
            for op in ops
            if dtypes_of[op.name] and not (not_launched and "triton" not in op.names())
        ]
    if stage in STAGES:
        return []
    raise ValueError(f"stage must be one of {list(STAGES)}, got {stage!r}")


def describe(document: dict[str, Any]) -> str:
    """A short description of a document, for the terminal."""
    if "roofline" in document and "rows" not in document:
        return report.roofline_text(document["roofline"])
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
    if document["rows"] and "provider" in document["rows"][0]:
        return "".join(
            "\n    " + report.line(r) for r in document["rows"] if r["status"] != "unavailable"
        )
    return "\n" + overhead.table(document["rows"])


def conclude(
    all_units: Sequence[Unit], out: pathlib.Path, meta: dict[str, Any], keep: bool
) -> tuple[dict, list[str]]:
    """The suite's own document, and one line per failure."""
    unit_states, broken = {}, []
    for unit in all_units:
        document = runner.current(unit, out, meta, keep)
        if document is None:
            unit_states[unit.name] = {"status": "not reached", "seconds": None, "reason": None}
            continue
        bad = failures(document)
        broken += [f"{unit.name}: {b}" for b in bad]
        unit_states[unit.name] = {
            "status": "error" if bad else "done",
            "seconds": document.get("seconds"),
            "reason": "; ".join(bad) or None,
        }
    complete = all(u["status"] != "not reached" for u in unit_states.values())
    return {
        "schema": runner.SCHEMA,
        "kind": "suite",
        "meta": meta,
        "complete": complete,
        "units": unit_states,
    }, broken


def parser() -> argparse.ArgumentParser:
    ops = selection.operations()
    p = argparse.ArgumentParser(
        prog="python -m tilewright.bench suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = p.add_argument
    add("--minutes", type=at_least(0.05, float), required=True, help="time budget of this call")
    add(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        help="folder of the results, read and written (default: bench_results/<device>-<date>)",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    add("--op", type=names(ops), default=list(ops), metavar="OP,..", help="default: every op")
    add(
        "--stage",
        type=names(STAGES),
        default=list(STAGES),
        metavar="STAGE,..",
        help="default: every stage",
    )
    add(
        "--goals",
        action="store_true",
        help=f"only the stages {', '.join(FIRST)}, of ops with a goal on this device",
    )
    add(
        "--stream",
        type=pathlib.Path,
        metavar="FILE",
        help="append each finished document to FILE, one per line",
    )
    add(
        "--case",
        type=names({c.name for op in ops.values() for c in op.cases}),
        metavar="CASE,..",
        help="default: every case",
    )
    add(
        "--dtype",
        type=names(BY_NAME),
        default=[short(d) for d in DTYPES],
        metavar="DTYPE,..",
        help="default: %(default)s",
    )
    add(
        "--jobs",
        type=at_least(1, int),
        help="worker processes of the stages without timing (default: half the "
        "cores, at most 8; 1 on a CPU)",
    )
    add("--provider", type=names(), metavar="NAME,..", help="for stage `time` (default: all)")
    add("--threads", type=at_least(1, int), metavar="N", help="CPU threads (default: torch's)")
    add("--rounds", type=at_least(1, int), default=9, help="per timed case (default %(default)s)")
    add(
        "--case-seconds",
        type=at_least(0, float),
        default=6.0,
        help="start no further round of a timed case after this time (default %(default)s)",
    )
    add(
        "--baseline-slack",
        type=at_least(1, float),
        default=8.0,
        help="time and mark a baseline whose error is at most this multiple of the contract's "
        "budget (default %(default)s; 1 is the contract itself)",
    )
    add("--keep", action="store_true", help="accept results of other sources and versions")
    add(
        "--sample-ms",
        type=at_least(0, float),
        default=8.0,
        help="on a CPU, the duration of one sample of repeated calls (default %(default)s)",
    )
    add(
        "--not-launched",
        action="store_true",
        help="measure the host time of Triton implementations on CPU tensors: kernels are "
        "compiled and specialized for compute capability 9.0, but not launched",
    )
    add("--commit", help="the commit of these sources, if git cannot determine it")
    return p


def main(argv: Sequence[str], start_time: float | None = None) -> int:
    """start_time: when the process started, from which the minutes count (default: now)."""
    start_time = start_time or time.time()
    argv, task = runner.parse_task(argv)
    p = parser()
    args = p.parse_args(argv)
    has_device(p, args.device)
    if args.not_launched and (reason := pretend.no_compiling()):
        p.error(f"--not-launched: {reason}")
    table = selection.operations()
    known = list(dict.fromkeys((*BASELINES, *(n for op in table.values() for n in op.names()))))
    args.provider = chosen(p, "--provider", args.provider, known) if args.provider else None
    if args.threads:
        torch.set_num_threads(args.threads)
    settings = run.Settings(
        args.rounds, args.case_seconds, args.sample_ms / 1e3, args.baseline_slack
    )
    meta = run.metadata(args.device, settings, ["suite", *argv], commit=args.commit)
    folder = f"{platform.slug(meta['device'])}-{meta['date'][:10]}"
    if args.out is None:
        args.out = pathlib.Path("bench_results") / folder
        argv += ["--out", str(args.out)]  # for the workers too
    plan = functools.partial(
        units,
        device=args.device,
        settings=settings,
        out=args.out / store.UNITS,
        only=args.provider,
        not_launched=args.not_launched,
    )
    groups = _groups(args, plan)
    if not any(groups[1:]) and "roofline" not in args.stage:
        p.error(
            f"nothing to do: no op of --op has a case of --case that takes --dtype in --stage on "
            f"{args.device}"
        )
    if task is not None:
        _work(args, groups, task, meta)
    # The suite's own document covers the device's whole plan, whichever part this call runs.
    whole = [u for stage in STAGES for u in plan(stage, table.values(), dtypes=DTYPES)]
    try:
        with runner.locked(args.out):
            return _supervise(args, argv, groups, whole, meta, start_time)
    except (runner.Unusable, OSError) as error:
        p.error(f"argument --out: {error}")


def _groups(args: argparse.Namespace, plan: Callable[..., list[Unit]]) -> list[list[Unit]]:
    """The units that a call was asked for, by `GROUPS`."""
    table = selection.operations()
    ops = [table[n] for n in args.op if not args.goals or any(goals_on(table[n], args.device))]
    dtypes = [d for n, d in BY_NAME.items() if n in args.dtype]
    requested = [s for s in args.stage if s in FIRST] if args.goals else args.stage
    # Times mean nothing without the roofline, so timed stages always include it.
    timed = {"time", "goals"} & set(requested)
    stages = [s for s in STAGES if s in requested or (s == "roofline" and timed)]
    return [
        [u for s in group if s in stages for u in plan(s, ops, dtypes=dtypes, cases=args.case)]
        for group in GROUPS
    ]


def _work(args: argparse.Namespace, groups, task: Mapping[str, Any], meta: dict[str, Any]) -> None:
    """Runs a worker's units and ends the process."""
    runner.end_with_parent(task["parent"])
    runner.work(
        runner.split(groups[task["group"]], task["worker"], task["of"]),
        args.out / store.UNITS,
        task["until"],
        meta,
        keep=args.keep,
        since=task["since"],
        slot=str(task["worker"]),
        describe=describe,
        now=functools.partial(run.moment, args.device),
        stream=args.stream,
    )
    runner.done()


def _supervise(args, argv, groups, whole, meta, start_time) -> int:
    until = start_time + 60 * args.minutes - runner.FINISH
    jobs = args.jobs or (min(8, max(1, (os.cpu_count() or 1) // 2)) if args.device == "cuda" else 1)
    out = store.unpack(args.out)
    roof = out / "roofline.json"
    # Nothing is timed without the roofline, so it is tried again however often it failed.
    if groups[0] and runner.has_failed(roof):
        roof.unlink()
    print(
        f"{meta['device']}, {', '.join(f'{k} {v}' for k, v in meta['versions'].items())}, commit "
        f"{report.commit(meta)}, clocks {meta.get('clocks') or 'unknown'}",
        flush=True,
    )
    going = True
    try:
        for i, (group, units_) in enumerate(zip(GROUPS, groups, strict=True)):
            if time.time() >= until or all(
                runner.current(u, out, meta, args.keep, start_time) for u in units_
            ):
                continue
            if {"time", "goals"} & set(group) and groups[0] and runner.has_failed(roof):
                print("no roofline: nothing is timed")
                break
            of = jobs if "parity" in group else 1
            task = {"until": until, "since": start_time, "group": i, "of": of}
            commands = [
                runner.worker_command(["suite", *argv], worker=k, **task) for k in range(of)
            ]
            going &= runner.supervise(commands, out, until)
    except KeyboardInterrupt:
        print("interrupted: what was found is kept")
    requested = [u for units_ in groups for u in units_]
    document, broken = conclude(requested, out, meta, args.keep)
    store.pack(args.out, conclude(whole, out, meta, args.keep)[0])
    reached = sum(u["status"] != "not reached" for u in document["units"].values())
    print(f"\n{reached} of {len(requested)} units in {args.out}, {time.time() - start_time:.0f} s")
    if not going:
        broken.append("workers ended twice between units; what they said is above")
    for line in broken:
        print(f"FAILED {line}")
    return 1 if broken else 0 if document["complete"] else 3
