"""Runs a plan: units of work by stages, within a time budget, each with one line of a file.

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
from tilewright.bench.runner import Unit, failures
from tilewright.bench.units import BY_NAME, DTYPES
from tilewright.core import platform
from tilewright.core.registry import Case, Op, short

STOPPED = 4  # exit code
# A second pass over what was cut begins only if this many seconds are left: a process starts, and
# measures something.
WORTHWHILE = 15.0


@dataclass(frozen=True)
class Chosen:
    """What a call was asked for; see the command's options.

    out: the folder of the results.
    only: providers of timed cases; default: all.
    say: see `run.measure`.
    args: all of the command's options, for those of a plan's own.
    meta: the call's metadata (see `run.metadata`).
    """

    device: str
    settings: run.Settings
    out: pathlib.Path
    only: Sequence[str] | None = None
    say: Callable[[str], object] | None = None
    args: argparse.Namespace = field(default_factory=argparse.Namespace)
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What a command runs.

    command: the module and its command, which workers are started as.
    about: the command's description.
    shares: the stages in their order, each with its weight: a stage's share of a call is its
        weight over the sum of the weights of all stages that the call was asked for.
    groups: stages that run in the same processes, one after the other.
    units: (stage, ops, dtypes, chosen, cases) -> the units of a stage, most decisive first. Raises
        ValueError for what was asked for and cannot be done.
    describe: a finished document, for the terminal.
    settings: settings of timed cases, for which the command has options; None: there are no such
        cases.
    on_roof: stages that judge by the roofline, and need the stage `roofline`.
    decides: stages more than so many of whose units may not fail: what is timed after them would
        be thrown away.
    results: the folder of a call without --out, by its device and date.
    dtypes, minutes: what a call has that does not say; None: it must.
    options: adds options of the plan's own.
    processes: (group, options) -> how many of them run its stages, each with a part of every
        stage's units; 1 if times are measured.
    finish: called at the end.
    """

    command: tuple[str, str]
    about: str | None
    shares: Mapping[str, float]
    groups: Sequence[tuple[str, ...]]
    units: Callable[..., list[Unit]]
    describe: Callable[[dict[str, Any]], str]
    settings: run.Settings | None = None
    on_roof: Collection[str] = ()
    decides: Mapping[str, int] = field(default_factory=dict)
    results: str = "bench_results/{device}-{date}"
    dtypes: Sequence[torch.dtype] = DTYPES
    minutes: float | None = None
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    processes: Callable[[tuple[str, ...], argparse.Namespace], int] = lambda group, args: 1
    finish: Callable[[Chosen], None] = lambda chosen: None

    def ends(self, stages: Sequence[str], begin: float, until: float) -> dict[str, float]:
        """When each of these stages starts no further unit, by the shares. What a stage leaves over
        is the next one's.
        """
        of, passed, times = sum(self.shares[s] for s in stages), 0.0, {}
        for stage in self.shares:
            if stage in stages:
                passed += self.shares[stage]
                times[stage] = begin + (until - begin) * passed / of
        return times


def supported(op: Op, dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """The dtypes, among these, that an implementation other than the twin takes."""
    return [
        d for d in dtypes if any(d in i.dtypes for i in op.implementations if i.name != "eager")
    ]


def tagged(ops: Iterable[Op], tag: str, cases: Collection[str] | None) -> list[tuple[Op, Case]]:
    """The cases with a tag among those that `cases` names; None: among all."""
    return [
        (op, case)
        for op in ops
        for case in op.cases
        if tag in case.tags and (cases is None or case.name in cases)
    ]


def conclude(
    all_units: Sequence[Unit], documents: Mapping[str, Any], meta: dict[str, Any], keep: bool
) -> tuple[dict, list[str]]:
    """The document of a whole plan, and one line per failure.   documents: by unit."""
    unit_states, broken = {}, []
    for unit in all_units:
        document = runner.current(unit, documents.get(unit.name), meta, keep)
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
    ops, stages = selection.operations(), list(plan.shares)
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
        help="folder of the results, read and written (default: "
        f"{plan.results.format(device='<device>', date='<date>')})",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    add("--op", type=names(ops), default=list(ops), metavar="OP,..", help="default: every op")
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
    add(
        "--stream",
        type=pathlib.Path,
        metavar="FILE",
        help="append each finished document to FILE, one per line",
    )
    add(
        "--commit",
        metavar="COMMIT|FILE",
        help="the commit of these sources, or gpu-cache's commit.json, if git does not know it",
    )
    p.set_defaults(stage=stages, skip=[], provider=None, threads=None, keep=False)
    if plan.settings is not None:
        add("--stage", type=names(stages), metavar="STAGE,..", help="default: every stage")
        add("--skip", type=names(stages), metavar="STAGE,..", help="stages to leave out")
        add("--provider", type=names(), metavar="NAME,..", help="of timed cases (default: all)")
        add("--threads", type=at_least(1, int), metavar="N", help="CPU threads (default: torch's)")
        add(
            "--rounds",
            type=at_least(1, int),
            default=plan.settings.rounds,
            help="per timed case (default %(default)s)",
        )
        add(
            "--case-seconds",
            type=at_least(0, float),
            default=plan.settings.max_seconds,
            help="start no further round of a timed case after this time (default %(default)s)",
        )
        add(
            "--baseline-slack",
            type=at_least(1, float),
            default=plan.settings.baseline_slack,
            help="time and mark a baseline whose error is at most this multiple of the contract's "
            "budget (default %(default)s; 1 is the contract itself)",
        )
        add("--keep", action="store_true", help="accept results of other sources and versions")
        add(
            "--sample-ms",
            type=at_least(0, float),
            default=1e3 * plan.settings.sample_seconds,
            help="on a CPU, the duration of one sample of repeated calls (default %(default)s)",
        )
    plan.options(p)
    return p


def main(plan: Plan, argv: Sequence[str], start_time: float | None = None) -> int:
    """start_time: when the process started, from which the minutes count (default: now)."""
    argv, task = runner.parse_task(argv)
    p = parser(plan)
    args = p.parse_args(argv)
    has_device(p, args.device)
    ops = selection.operations().values()
    known = list(dict.fromkeys((*BASELINES, *(n for op in ops for n in op.names()))))
    args.provider = chosen(p, "--provider", args.provider, known) if args.provider else None
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        call = asked(plan, args, argv, start_time)
    except ValueError as error:
        p.error(str(error))
    if task is not None:
        call.work(task)
    try:
        with runner.locked(args.out):
            return call.supervise()
    except (runner.Unusable, OSError) as error:
        p.error(f"argument --out: {error}")


def asked(
    plan: Plan, args: argparse.Namespace, argv: Sequence[str], start_time: float | None = None
) -> Call:
    """What a command's options ask for. Raises ValueError if that is nothing, or cannot be done."""
    settings = run.Settings()
    if plan.settings is not None:
        settings = run.Settings(
            args.rounds, args.case_seconds, args.sample_ms / 1e3, args.baseline_slack
        )
    meta = run.metadata(args.device, settings, [plan.command[1], *argv], commit=args.commit)
    if args.out is None:
        device, date = platform.slug(meta["device"]), meta["date"][:10]
        args.out = pathlib.Path(plan.results.format(device=device, date=date))
        argv = [*argv, "--out", str(args.out)]  # for the workers too
    # One case says its first numbers, and how long the rest takes; many say each when it is done.
    say = functools.partial(print, flush=True) if len(args.op) == 1 and args.case else None
    of = Chosen(args.device, settings, args.out, args.provider, say, args, meta)
    table = selection.operations()
    ops = [table[n] for n in args.op]
    dtypes = [d for n, d in BY_NAME.items() if n in args.dtype]
    # Times mean nothing without the roofline, so timed stages always include it.
    timed = set(plan.on_roof) & set(args.stage)
    wanted = set(args.stage) - set(args.skip)
    stages = [s for s in plan.shares if s in wanted or (s == "roofline" and timed)]
    groups = [
        {s: plan.units(s, ops, dtypes, of, args.case) for s in group if s in stages}
        for group in plan.groups
    ]
    some = {s for group in groups for s, units in group.items() if units}
    if not (some if args.stage == ["roofline"] else some - {"roofline"}):
        raise ValueError(
            f"nothing to do: no op of --op has a case of --case that takes --dtype in --stage on "
            f"{args.device}"
        )
    return Call(plan, of, argv, groups, start_time or time.time())


@dataclass(frozen=True)
class Call:
    """One call: what it runs, in which order, until when."""

    plan: Plan
    chosen: Chosen
    argv: Sequence[str]
    groups: Sequence[Mapping[str, Sequence[Unit]]]
    began: float

    @property
    def until(self) -> float:
        return self.began + 60 * self.chosen.args.minutes - runner.FINISH

    def unmade(self) -> bool:
        """Whether a unit has no document yet."""
        return not self._are_current(self._asked())

    def work(self, task: Mapping[str, Any]) -> None:
        """Runs a worker's units and ends the process."""
        runner.begin_worker(task["parent"])
        of = self.chosen
        for stage, units in self.groups[task["group"]].items():
            roof = store.documents(of.out).get("roofline")
            if stage in self.plan.on_roof and not runner.has_succeeded(roof):
                print(f"no roofline: {stage} is not timed")
                continue
            runner.work(
                units[task["worker"] :: task["of"]],
                of.out,
                task["ends"][stage],
                of.meta,
                keep=of.args.keep,
                since=task["since"],
                slot=str(task["worker"]),
                describe=self.plan.describe,
                now=functools.partial(run.moment, of.device),
                stream=of.args.stream,
            )
        runner.done()

    def supervise(self) -> int:
        """Runs workers, and returns the command's exit code."""
        folder, meta = self.chosen.out, self.chosen.meta
        documents = store.documents(folder)
        if (owner := _owner(documents)) not in (None, self.plan.command[1]):
            raise runner.Unusable(f"{folder} has the results of `{owner}`; take another folder")
        # Nothing is timed without the roofline, so it is tried again however often it failed.
        roof = documents.get("roofline")
        if any("roofline" in g for g in self.groups) and not runner.has_succeeded(roof):
            documents.pop("roofline", None)
        if (folder / store.FILE).exists():  # also without what a killed call left of a line
            store.write(folder, documents)
        print(
            f"{meta['device']}, {', '.join(f'{k} {v}' for k, v in meta['versions'].items())}, "
            f"commit {report.commit(meta)}, clocks {meta.get('clocks') or 'unknown'}",
            flush=True,
        )
        # The document of the whole covers the device's whole plan, whichever part this call runs.
        ops = selection.operations().values()
        whole = [u for s in self.plan.shares for u in self.plan.units(s, ops, DTYPES, self.chosen)]
        going, stopped = True, False
        try:
            going, stopped = self._run()
        except KeyboardInterrupt:
            print("interrupted: what was found is kept")
        self.plan.finish(self.chosen)
        document, broken = self._conclude(self._asked())
        store.write(folder, store.documents(folder) | {store.SUMMARY: self._conclude(whole)[0]})
        reached = [u["status"] != "not reached" for u in document["units"].values()]
        print(
            f"\n{sum(reached)} of {len(reached)} units in {folder}, {time.time() - self.began:.0f} s"
        )
        if not going:
            broken.append("workers ended twice between units; what they said is above")
        for line in broken:
            print(f"FAILED {line}")
        if stopped:
            return STOPPED
        return 1 if broken else 0 if document["complete"] else 3

    def _run(self) -> tuple[bool, bool]:
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
        units = [u for s, of in self.groups[i].items() if time.time() < limits[s] for u in of]
        if self._are_current(units, self.began):
            return True
        args = self.chosen.args
        of = min(self.plan.processes(self.plan.groups[i], args), len(units))
        task = {"ends": limits, "since": self.began, "group": i, "of": of}
        commands = [
            runner.worker_command([*self.plan.command, *self.argv], worker=k, **task)
            for k in range(of)
        ]
        return runner.supervise(commands, self.chosen.out, self.until, stream=args.stream)

    def _failed(self, stage: str, units: Sequence[Unit]) -> bool:
        """Prints what failed before anything else is run."""
        _, broken = self._conclude(units)
        for line in broken:
            print(f"FAILED {line}", flush=True)
        return len(broken) > self.plan.decides[stage]

    def _asked(self) -> Sequence[Unit]:
        """Each unit once: the stages `host` and `overhead` share some."""
        return [*{u.name: u for group in self.groups for of in group.values() for u in of}.values()]

    def _are_current(self, units: Sequence[Unit], since: float = float("inf")) -> bool:
        of, documents = self.chosen, store.documents(self.chosen.out)
        return all(
            runner.current(u, documents.get(u.name), of.meta, of.args.keep, since) for u in units
        )

    def _conclude(self, units: Sequence[Unit]) -> tuple[dict, list[str]]:
        of = self.chosen
        return conclude(units, store.documents(of.out), of.meta, of.args.keep)


def _owner(documents: Mapping[str, Any]) -> str | None:
    """The command whose results a folder has; None: none, or they cannot be read."""
    try:
        return documents[store.SUMMARY]["meta"]["argv"][0]
    except (LookupError, TypeError):
        return None
