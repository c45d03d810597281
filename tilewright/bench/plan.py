"""Runs a plan: units of work by stages, within a time budget, each with one result file.

A call ends within its minutes, and the next one with the same folder resumes. Results from other
sources, versions, options, tuned launch configurations or devices are measured again (--keep
accepts other sources and versions), and so are errors, up to three times in all.

Exit code: 0, everything is present and holds; 1, an implementation broke the contract or failed; 3,
time ran out first; 4, more than a few ops failed in a stage that decides about the rest, and
nothing else was run.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright import selection
from tilewright.bench import report, run, runner, store
from tilewright.bench.options import at_least, chosen, has_device, names
from tilewright.bench.providers import BASELINES
from tilewright.bench.runner import Unit
from tilewright.bench.units import BY_NAME, DTYPES, failures
from tilewright.core import platform
from tilewright.core.registry import Case, Op, short

STOPPED = 4  # exit code
# A second pass over what was cut begins only if this many seconds are left: a process starts, and
# measures something.
WORTHWHILE = 15.0


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


@dataclass(frozen=True)
class Chosen:
    """What a call was asked for; see the command's options.

    out: the folder of the units' files.
    only: providers of timed cases; default: all.
    say: see `run.measure`.
    args: all of the command's options, for those of a plan's own.
    """

    device: str
    settings: run.Settings
    out: pathlib.Path
    only: Sequence[str] | None = None
    say: Callable[[str], object] | None = None
    args: argparse.Namespace = field(default_factory=argparse.Namespace)


@dataclass(frozen=True)
class Plan:
    """What a command runs.

    command: the module and its command, which workers are started as.
    about: the command's description.
    shares: the stages in their order, each with its weight: a stage's share of a call is its
        weight over the sum of the weights of all stages that the call was asked for.
    groups: which stages share processes.
    units: (stage, ops, dtypes, chosen, cases) -> the units of a stage, most decisive first.
    describe: a finished document, for the terminal.
    on_roof: stages that judge by the roofline, and need the stage `roofline`.
    decides: stages more than so many of whose units may not fail: what is timed after them would
        be thrown away.
    results: the folder in which a call without --out makes one.
    dtypes, settings, minutes: what a call has that does not say; None: it must.
    options: adds options of the plan's own.   refuse: parser and arguments -> an error, or None.
    """

    command: tuple[str, str]
    about: str | None
    shares: Mapping[str, float]
    groups: Sequence[Group]
    units: Callable[..., list[Unit]]
    describe: Callable[[dict[str, Any]], str]
    on_roof: Collection[str]
    settings: run.Settings
    decides: Mapping[str, int] = field(default_factory=dict)
    results: str = "bench_results"
    dtypes: Sequence[torch.dtype] = DTYPES
    minutes: float | None = None
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    refuse: Callable[[argparse.Namespace], str | None] = lambda args: None

    def ends(self, stages: Sequence[str], begin: float, until: float) -> dict[str, float]:
        """When each of these stages starts no further unit, by the shares. What a stage leaves over
        is the next one's.
        """
        of, passed, found = sum(self.shares[s] for s in stages), 0.0, {}
        for stage in self.shares:
            if stage in stages:
                passed += self.shares[stage]
                found[stage] = begin + (until - begin) * passed / of
        return found


def supported(op: Op, dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Those of the dtypes that an implementation other than the twin takes."""
    return [
        d for d in dtypes if any(d in i.dtypes for i in op.implementations if i.name != "eager")
    ]


def tagged(ops: Iterable[Op], tag: str, cases: Collection[str] | None) -> list[tuple[Op, Case]]:
    """The cases with a tag, of those named (None: of all)."""
    return [
        (op, case)
        for op in ops
        for case in op.cases
        if tag in case.tags and (cases is None or case.name in cases)
    ]


def conclude(
    all_units: Sequence[Unit], out: pathlib.Path, meta: dict[str, Any], keep: bool
) -> tuple[dict, list[str]]:
    """The document of a whole plan, and one line per failure."""
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


# Long: an option of the command a statement, most with values of the plan.
def parser(plan: Plan) -> argparse.ArgumentParser:
    ops, stages, settings = selection.operations(), list(plan.shares), plan.settings
    p = argparse.ArgumentParser(
        prog=f"python -m {' '.join(plan.command)}",
        description=plan.about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = p.add_argument
    add(
        "--minutes",
        type=at_least(0.05, float),
        default=plan.minutes,
        required=plan.minutes is None,
        help="time budget of this call" + (" (default %(default)s)" if plan.minutes else ""),
    )
    add(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        help=f"folder of the results, read and written (default: {plan.results}/<device>-<date>)",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    add("--op", type=names(ops), default=list(ops), metavar="OP,..", help="default: every op")
    add(
        "--stage",
        type=names(stages),
        default=stages,
        metavar="STAGE,..",
        help="default: every stage",
    )
    add("--skip", type=names(stages), default=[], metavar="STAGE,..", help="stages to leave out")
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
        type=names([short(d) for d in plan.dtypes]),
        default=[short(d) for d in plan.dtypes],
        metavar="DTYPE,..",
        help="default: %(default)s",
    )
    if any(group.most > 1 for group in plan.groups):
        add(
            "--jobs",
            type=at_least(1, int),
            help="worker processes of stages without timing (default: by the number of cores; 1 on "
            "a CPU)",
        )
    add("--provider", type=names(), metavar="NAME,..", help="of timed cases (default: all)")
    add("--threads", type=at_least(1, int), metavar="N", help="CPU threads (default: torch's)")
    add(
        "--rounds",
        type=at_least(1, int),
        default=settings.rounds,
        help="per timed case (default %(default)s)",
    )
    add(
        "--case-seconds",
        type=at_least(0, float),
        default=settings.max_seconds,
        help="start no further round of a timed case after this time (default %(default)s)",
    )
    add(
        "--baseline-slack",
        type=at_least(1, float),
        default=settings.baseline_slack,
        help="time and mark a baseline whose error is at most this multiple of the contract's "
        "budget (default %(default)s; 1 is the contract itself)",
    )
    add("--keep", action="store_true", help="accept results of other sources and versions")
    add(
        "--sample-ms",
        type=at_least(0, float),
        default=1e3 * settings.sample_seconds,
        help="on a CPU, the duration of one sample of repeated calls (default %(default)s)",
    )
    add(
        "--commit",
        metavar="COMMIT|FILE",
        help="the commit of these sources, or gpu-cache's commit.json, if git does not know it",
    )
    plan.options(p)
    return p


def main(plan: Plan, argv: Sequence[str], start_time: float | None = None) -> int:
    """start_time: when the process started, from which the minutes count (default: now)."""
    start_time = start_time or time.time()
    argv, task = runner.parse_task(argv)
    p = parser(plan)
    args = p.parse_args(argv)
    has_device(p, args.device)
    if reason := plan.refuse(args):
        p.error(reason)
    table = selection.operations()
    known = list(dict.fromkeys((*BASELINES, *(n for op in table.values() for n in op.names()))))
    args.provider = chosen(p, "--provider", args.provider, known) if args.provider else None
    if args.threads:
        torch.set_num_threads(args.threads)
    settings = run.Settings(
        args.rounds, args.case_seconds, args.sample_ms / 1e3, args.baseline_slack
    )
    meta = run.metadata(args.device, settings, [plan.command[1], *argv], commit=args.commit)
    folder = f"{platform.slug(meta['device'])}-{meta['date'][:10]}"
    if args.out is None:
        args.out = pathlib.Path(plan.results) / folder
        argv += ["--out", str(args.out)]  # for the workers too
    # Of one case the first numbers, and how long the rest takes; of many, each when it is done.
    say = functools.partial(print, flush=True) if len(args.op) == 1 and args.case else None
    units = functools.partial(
        plan.units,
        chosen=Chosen(args.device, settings, args.out / store.UNITS, args.provider, say, args),
    )
    groups = _groups(plan, args, units)
    if not any(
        units_
        for g in groups
        for s, units_ in g.items()
        if s != "roofline" or args.stage == ["roofline"]
    ):
        p.error(
            f"nothing to do: no op of --op has a case of --case that takes --dtype in --stage on "
            f"{args.device}"
        )
    if task is not None:
        _work(plan, args, groups, task, meta)
    # The document of the whole covers the device's whole plan, whichever part this call runs.
    whole = [u for stage in plan.shares for u in units(stage, table.values(), DTYPES)]
    try:
        with runner.locked(args.out):
            return _supervise(_Call(plan, args, argv, groups, meta, start_time), whole)
    except (runner.Unusable, OSError) as error:
        p.error(f"argument --out: {error}")


def _groups(
    plan: Plan, args: argparse.Namespace, units: Callable[..., list[Unit]]
) -> list[dict[str, list[Unit]]]:
    """The units that a call was asked for, by the plan's groups and by stage."""
    table = selection.operations()
    ops = [table[n] for n in args.op]
    dtypes = [d for n, d in BY_NAME.items() if n in args.dtype]
    # Times mean nothing without the roofline, so timed stages always include it.
    timed = set(plan.on_roof) & set(args.stage)
    wanted = set(args.stage) - set(args.skip)
    stages = [s for s in plan.shares if s in wanted or (s == "roofline" and timed)]
    return [
        {s: units(s, ops, dtypes, cases=args.case) for s in group.stages if s in stages}
        for group in plan.groups
    ]


def _work(
    plan: Plan, args: argparse.Namespace, groups, task: Mapping[str, Any], meta: dict[str, Any]
) -> None:
    """Runs a worker's units and ends the process."""
    runner.begin_worker(task["parent"])
    out = args.out / store.UNITS
    for stage, units_ in groups[task["group"]].items():
        if stage in plan.on_roof and not runner.has_succeeded(out / "roofline.json"):
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
            describe=plan.describe,
            now=functools.partial(run.moment, args.device),
            stream=args.stream,
        )
    runner.done()


@dataclass(frozen=True)
class _Call:
    """One call: what it runs, in which order, until when."""

    plan: Plan
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
        """Whether all workers could start, and whether a stage that decides ended the call."""
        stages, going = [s for group in self.groups for s in group], True
        shares = self.plan.ends(stages, time.time(), self.until)
        # The roofline is needed even if what came before took too long.
        shares |= {s: self.until for s in stages if s == "roofline"}
        for limits in (shares, dict.fromkeys(stages, self.until)):
            for i, group in enumerate(self.groups):
                if limits is shares or self.until - time.time() > WORTHWHILE:
                    going &= self._run_group(i, limits)
                if limits is shares and any(
                    self._failed(s, group[s]) for s in self.plan.decides if s in group
                ):
                    return going, True
        return going, False

    def _run_group(self, i: int, limits: Mapping[str, float]) -> bool:
        units_ = [u for s, of in self.groups[i].items() if time.time() < limits[s] for u in of]
        current = functools.partial(
            runner.current, out=self.out, meta=self.meta, keep=self.args.keep, since=self.began
        )
        if all(current(u) for u in units_):
            return True
        of = self.plan.groups[i].processes(self.args.device, getattr(self.args, "jobs", None))
        task = {"ends": limits, "since": self.began, "group": i, "of": min(of, len(units_))}
        commands = [
            runner.worker_command([*self.plan.command, *self.argv], worker=k, **task)
            for k in range(task["of"])
        ]
        return runner.supervise(commands, self.out, self.until, stream=self.args.stream)

    def _failed(self, stage: str, units_: Sequence[Unit]) -> bool:
        """Prints what failed before anything else is run."""
        _, broken = conclude(units_, self.out, self.meta, self.args.keep)
        for line in broken:
            print(f"FAILED {line}", flush=True)
        return len(broken) > self.plan.decides[stage]


def _owner(out: pathlib.Path) -> str | None:
    """The command whose packed results a folder has; None: none, or they cannot be read."""
    try:
        with (out / store.FILE).open() as file:
            summary = store.parse(file.readline())
        return summary["meta"]["argv"][0]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _supervise(call: _Call, whole: Sequence[Unit]) -> int:
    args, meta = call.args, call.meta
    if (owner := _owner(args.out)) not in (None, call.plan.command[1]):
        raise runner.Unusable(f"{args.out} has the results of `{owner}`; take another folder")
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
        return STOPPED
    return 1 if broken else 0 if document["complete"] else 3
