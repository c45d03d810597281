"""Runs all checks and measurements of the registry on a device: correctness, speed, and dispatch
overhead.

    python -m tilewright.bench suite --minutes 9 --out DIR [--stage STAGE,..] [--op OP,..] ...

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

Each stage has a share of the minutes (`bench.schedule`), and what it does not use is the next
one's; time that is left at the end is spent on what was cut. Each case has one result file. A call
ends within its minutes, and the next one with the same DIR resumes. Results from other sources,
versions, options, tuned launch configurations or devices are measured again (--keep accepts other
sources and versions), and so are errors, up to three times in all.

Exit code: 0, everything is present and holds; 1, an implementation broke the contract or failed; 3,
time ran out first; 4, more than three ops failed in `smoke`, and nothing else was run.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright import platform, selection
from tilewright.bench import overhead, pretend, report, run, runner, store
from tilewright.bench.options import at_least, chosen, has_device, names
from tilewright.bench.providers import BASELINES
from tilewright.bench.runner import Unit
from tilewright.bench.schedule import GROUPS, ON_ROOF, STAGES, Chosen, ends, units
from tilewright.bench.stages.checks import failures
from tilewright.bench.stages.common import BY_NAME, DTYPES
from tilewright.bench.stages.smoke import FAILURES_AT_MOST
from tilewright.core.registry import short

FAILED_SMOKE = 4  # exit code
# A second pass over what was cut begins only if this many seconds are left: a process starts, and
# measures something.
WORTHWHILE = 15.0


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
    add("--skip", type=names(STAGES), default=[], metavar="STAGE,..", help="stages to leave out")
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
        help="worker processes of stages without timing (default: by the number of cores; 1 on a "
        "CPU)",
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
    add(
        "--commit",
        metavar="COMMIT|FILE",
        help="the commit of these sources, or gpu-cache's commit.json, if git cannot tell",
    )
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
    # Of one case the first numbers, and how long the rest takes; of many, each when it is done.
    say = functools.partial(print, flush=True) if len(args.op) == 1 and args.case else None
    plan = functools.partial(
        units,
        chosen=Chosen(
            args.device, settings, args.out / store.UNITS, args.provider, args.not_launched, say
        ),
    )
    groups = _groups(args, plan)
    if not any(
        units_ for g in groups for s, units_ in g.items() if s != "roofline" or s in args.stage
    ):
        p.error(
            f"nothing to do: no op of --op has a case of --case that takes --dtype in --stage on "
            f"{args.device}"
        )
    if task is not None:
        _work(args, groups, task, meta)
    # The suite's own document covers the device's whole plan, whichever part this call runs.
    whole = [u for stage in STAGES for u in plan(stage, table.values(), DTYPES)]
    try:
        with runner.locked(args.out):
            return _supervise(_Call(args, argv, groups, meta, start_time), whole)
    except (runner.Unusable, OSError) as error:
        p.error(f"argument --out: {error}")


def _groups(
    args: argparse.Namespace, plan: Callable[..., list[Unit]]
) -> list[dict[str, list[Unit]]]:
    """The units that a call was asked for, by `GROUPS` and by stage."""
    table = selection.operations()
    ops = [table[n] for n in args.op]
    dtypes = [d for n, d in BY_NAME.items() if n in args.dtype]
    # Times mean nothing without the roofline, so timed stages always include it.
    timed = set(ON_ROOF) & set(args.stage)
    wanted = set(args.stage) - set(args.skip)
    stages = [s for s in STAGES if s in wanted or (s == "roofline" and timed)]
    return [
        {s: plan(s, ops, dtypes, cases=args.case) for s in group.stages if s in stages}
        for group in GROUPS
    ]


def _work(args: argparse.Namespace, groups, task: Mapping[str, Any], meta: dict[str, Any]) -> None:
    """Runs a worker's units and ends the process."""
    runner.end_with_parent(task["parent"])
    out = args.out / store.UNITS
    for stage, units_ in groups[task["group"]].items():
        if stage in ON_ROOF and not runner.has_succeeded(out / "roofline.json"):
            print(f"no roofline: {stage} is not timed")
            continue
        runner.work(
            runner.split(units_, task["worker"], task["of"]),
            out,
            task["ends"][stage],
            meta,
            keep=args.keep,
            since=task["since"],
            slot=str(task["worker"]),
            describe=describe,
            now=functools.partial(run.moment, args.device),
            stream=args.stream,
        )
    runner.done()


@dataclass(frozen=True)
class _Call:
    """One call of the suite: what it runs, in which order, until when."""

    args: argparse.Namespace
    argv: Sequence[str]
    groups: Sequence[Mapping[str, Sequence[Unit]]]
    meta: dict[str, Any]
    began: float

    @property
    def out(self) -> pathlib.Path:
        return self.args.out / store.UNITS

    @property
    def until(self) -> float:
        return self.began + 60 * self.args.minutes - runner.FINISH

    def run(self) -> tuple[bool, bool]:
        """Whether all workers could start, and whether the smoke stage ended the call."""
        stages, going = [s for group in self.groups for s in group], True
        shares = ends(stages, time.time(), self.until)
        # The roofline is needed even if what came before took too long.
        shares |= {s: self.until for s in stages if s == "roofline"}
        for limits in (shares, dict.fromkeys(stages, self.until)):
            for i, group in enumerate(self.groups):
                if limits is shares or self.until - time.time() > WORTHWHILE:
                    going &= self._run_group(i, limits)
                if "smoke" in group and limits is shares and self._smoke_failed(group["smoke"]):
                    return going, True
        return going, False

    def _run_group(self, i: int, limits: Mapping[str, float]) -> bool:
        units_ = [u for s, of in self.groups[i].items() if time.time() < limits[s] for u in of]
        current = functools.partial(
            runner.current, out=self.out, meta=self.meta, keep=self.args.keep, since=self.began
        )
        if all(current(u) for u in units_):
            return True
        of = GROUPS[i].processes(self.args.device, self.args.jobs)
        task = {"ends": limits, "since": self.began, "group": i, "of": min(of, len(units_))}
        commands = [
            runner.worker_command(["suite", *self.argv], worker=k, **task)
            for k in range(task["of"])
        ]
        return runner.supervise(commands, self.out, self.until, stream=self.args.stream)

    def _smoke_failed(self, units_: Sequence[Unit]) -> bool:
        """Prints what failed before anything else is run."""
        _, broken = conclude(units_, self.out, self.meta, self.args.keep)
        for line in broken:
            print(f"FAILED {line}", flush=True)
        return len(broken) > FAILURES_AT_MOST


def _supervise(call: _Call, whole: Sequence[Unit]) -> int:
    args, meta = call.args, call.meta
    store.unpack(args.out)
    # Nothing is timed without the roofline, so it is tried again however often it failed.
    if any("roofline" in g for g in call.groups) and runner.has_failed(call.out / "roofline.json"):
        (call.out / "roofline.json").unlink()
    print(
        f"{meta['device']}, {', '.join(f'{k} {v}' for k, v in meta['versions'].items())}, commit "
        f"{report.commit(meta)}, clocks {meta.get('clocks') or 'unknown'}",
        flush=True,
    )
    going, stopped = True, False
    try:
        going, stopped = call.run()
    except KeyboardInterrupt:
        print("interrupted: what was found is kept")
    # The stages `host` and `overhead` share units.
    asked = {u.name: u for group in call.groups for of in group.values() for u in of}
    document, broken = conclude(list(asked.values()), call.out, meta, args.keep)
    store.pack(args.out, conclude(whole, call.out, meta, args.keep)[0])
    reached = sum(u["status"] != "not reached" for u in document["units"].values())
    print(f"\n{reached} of {len(asked)} units in {args.out}, {time.time() - call.began:.0f} s")
    if not going:
        broken.append("workers ended twice between units; what they said is above")
    for line in broken:
        print(f"FAILED {line}")
    if stopped:
        return FAILED_SMOKE
    return 1 if broken else 0 if document["complete"] else 3
