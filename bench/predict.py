"""Predicts the times of the goals' cases, and of kernels without a goal, from counts, without a
GPU.

    python -m bench predict [--device h200|h100|b200] [--op OP,..] [--roofs PATH] [--out FILE]
                            [--check]

The cases run on a simulated device (`tilewright_lab.pretend`), which tells their launches and
computes nothing; committed budgets and counts of the kernels, and the device's rates, turn launches
into seconds. With --roofs, a folder of the suite's results or its roofline.json, measured rates
take the place of the defaults, and the folder's times stand beside the predicted ones. It predicts
for the B200 only what Hopper's kernels refuse.

Without --device, --op and --roofs it writes bench/predicted/predicted.json, of all devices, which
`make docs` makes a page of; with one of them it prints. Exit code: 0; 1 with --check if the file is
out of date; 2 for invalid arguments, or where nothing can be predicted.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from bench import commands, variants
from bench.page import goals as judging
from bench.page.text import TITLES, number
from bench.predicted import launches, model, roofs
from bench.predicted.page import (
    COMMAND,
    FILE,
    HEURISTIC,
    Found,
    Predicted,
    Row,
    arithmetic,
    table,
)
from bench.predicted.roofs import Roofs
from bench.stages.goals import Aim, goals_on
from bench.stages.questions import implementation
from tilewright import selection
from tilewright.bench import run
from tilewright.bench.options import names
from tilewright.core import platform
from tilewright.core.registry import Case, Goal, ImplementationUnavailable, Op, short
from tilewright.kernels import tuning
from tilewright_lab import pretend


def rows(
    ops: Sequence[Op], on: Roofs, seen: set[str], measured: dict[str, Any] | None = None
) -> Iterator[Row]:
    """The rows of the goals.   seen: gets the kernels of these launches.   measured: the suite's
    documents, by name.
    """
    with launches.simulated(on.device, on.arch) as recorded:
        for op in ops:
            cached: dict[tuple, tuple] = {}
            for goal, case, dtype in goals_on(op, "cuda"):
                name = goal.by or op.choose("cuda", dtype)
                for question, by, launch, config in _alternatives(op, case, name):
                    key = (case.name, dtype, name, question)
                    if key not in cached:
                        cached[key] = _passes(recorded, op, by, case, dtype, launch, config)
                    passes, reason = cached[key]
                    usual, _ = cached[(*key[:3], HEURISTIC)]
                    if question != HEURISTIC and passes.get(goal.which) == usual.get(goal.which):
                        continue  # the launch is of another pass
                    row = _row(op, name, case, dtype, goal.which, passes, reason, on)
                    if question == HEURISTIC:
                        seen.update(_kernels(passes.get(goal.which)))
                        ms = _measured(measured, op, name, goal.which, case, dtype)
                        row = replace(row, measured_ms=ms)
                    yield _judged(replace(row, launch=question), op, goal, case, dtype, on)


def others(
    ops: Sequence[Op], on: Roofs, seen: set[str], measured: dict[str, Any] | None = None
) -> Iterator[Row]:
    """The rows, in bfloat16, of the case of each op without a goal whose roof takes longest, and of
    the cases of each op that launch a kernel that no row before launches. An op that no case times
    has those with the tag "predicted".   seen: as in `rows`.
    """
    dtype = torch.bfloat16
    with launches.simulated(on.device, on.arch) as recorded:
        for op in ops:
            name, shown, reason = op.choose("cuda", dtype), any(goals_on(op, "cuda")), None
            listed = run.timed(op, "cuda") or run.timed(op, "predicted")
            for case in sorted(listed, key=lambda c: -_whole(c, dtype, on)):
                passes, refused = _passes(recorded, op, name, case, dtype, "", {})
                reason = reason or refused
                whiches = _whiches(passes)
                kernels = {k for which in whiches for k in _kernels(passes[which])}
                if not passes or (shown and kernels <= seen):
                    continue
                for which in whiches:
                    row = _row(op, name, case, dtype, which, passes, None, on)
                    ms = _measured(measured, op, name, which, case, dtype)
                    yield replace(row, measured_ms=ms)
                seen.update(kernels)
                shown = True
            if not shown:
                yield Row(op.name, "", "", HEURISTIC, reason or "no case is timed or predicted")


def newer(
    ops: Sequence[Op], on: Roofs, seen: set[str], measured: dict[str, Any] | None = None
) -> Iterator[Row]:
    """The rows, in bfloat16, of the timed cases of each op that Hopper's kernels refuse: under the
    heuristics' launches, and under those that the suite is to time.   seen: as in `rows`.
    """
    dtype = torch.bfloat16
    refused = {op.name: _refused(op, dtype) for op in ops if op.requests}
    with launches.simulated(on.device, on.arch) as recorded:
        for op in ops:
            for case in refused.get(op.name, ()):
                name, usual = op.choose("cuda", dtype), {}
                for question, by, launch, config in _alternatives(op, case, name):
                    passes, reason = _passes(recorded, op, by, case, dtype, launch, config)
                    if reason is not None:
                        yield Row(op.name, case.name, "", question, reason)
                    for which in _whiches(passes):
                        if passes[which] == usual.get(which):
                            continue  # the launch is of another pass
                        row = _row(op, name, case, dtype, which, passes, None, on)
                        seen.update(_kernels(passes[which]))
                        if question == HEURISTIC:
                            usual[which] = passes[which]
                            ms = _measured(measured, op, name, which, case, dtype)
                            row = replace(row, measured_ms=ms)
                        yield replace(row, launch=question)


def _refused(op: Op, dtype: torch.dtype) -> list[Case]:
    """Timed cases whose options the kernels of a Hopper GPU do not have."""
    with launches.simulated("H200") as recorded:
        name = op.choose("cuda", dtype)
        return [
            case
            for case in run.timed(op, "cuda")
            if not _passes(recorded, op, name, case, dtype, "", {})[0]
        ]


def _whiches(passes: dict[str, launches.Pass]) -> tuple[str, ...]:
    """Passes that are shown. A forward that records a graph may compute the gradients."""
    if "backward" not in passes:
        return tuple(passes)
    both = passes["forward_backward"]
    apart = (*passes["forward"].launches, *passes["backward"].launches) == both.launches
    return ("forward", "backward" if apart else "forward_backward")


def _whole(case: Case, dtype: torch.dtype, on: Roofs) -> float:
    return model.floor(case.cost(dtype.itemsize), "forward_backward", on)


def _kernels(of: launches.Pass | None) -> set[str]:
    return {launch.source for launch in of.launches} if of else set()


def _alternatives(op: Op, case: Case, name: str) -> Iterator[tuple[str, str, str, dict]]:
    """(question, implementation, launch, constants): the heuristics', and those that the suite is
    to time, of the same kernels or of Gluon's beside Triton's.
    """
    yield HEURISTIC, name, "", {}
    for v in variants.asked(tuning.arch_of_device()):
        if (v.op, v.case) == (op.name, case.name) and v.launch and not isinstance(v.other, str):
            impl = implementation(v, op, v.other, "cuda")
            if impl is not None and (impl.name == name or (impl.name, name) == ("gluon", "triton")):
                yield v.name, impl.name, v.launch, dict(v.other)


def _passes(recorded, op: Op, name: str, case: Case, dtype: torch.dtype, launch: str, config: dict):
    """(passes, None), or ({}, why they cannot be had)."""
    try:
        if not launch:
            return launches.passes(recorded, op, name, case, dtype), None
        impl = op.implementation(name)
        with launches.configured(op, impl, case, dtype, launch, config):
            return launches.passes(recorded, op, name, case, dtype), None
    except (NotImplementedError, ImplementationUnavailable) as error:
        # Values on the host, which a simulated device has not.
        return {}, f"{name} cannot be simulated: {str(error).splitlines()[0]}"


def _row(op: Op, name: str, case: Case, dtype, which: str, passes, reason, on: Roofs) -> Row:
    """A row without a goal.   name: the implementation.   reason: why there are no passes."""
    cost = case.cost(dtype.itemsize)
    base = Row(op.name, case.name, which, HEURISTIC, "")
    if reason is None and which not in passes:
        reason = "has no such pass"
    if reason is None:
        try:
            predicted = model.predict(op.name, which, passes[which], cost, on)
        except ValueError as error:
            reason = f"{name} {error}"
    if reason is not None:
        return replace(base, words=reason)
    roof = model.floor(cost, which, on, predicted.dtype) / predicted.seconds
    words = predicted.words
    if predicted.unknown:
        words += ". Not derived: " + ", ".join(predicted.unknown)
    return replace(
        base,
        words=words,
        limit=predicted.limit,
        seconds=predicted.seconds,
        roof=100 * roof,
        unknown=predicted.unknown,
    )


def _judged(row: Row, op: Op, goal: Goal, case: Case, dtype: torch.dtype, on: Roofs) -> Row:
    """The row with what its goal says of it."""
    row = replace(row, goal=judging.goal_text(_alone(goal)))
    if row.seconds is None or row.roof is None:
        return replace(row, verdict="not derived")
    _, flops = model.traffic(case.cost(dtype.itemsize), goal.which)
    timed = {
        "median_ms": 1e3 * row.seconds,
        "tflop_per_s": flops / row.seconds / 1e12,
        "roofline_percent": row.roof,
    }
    judged = None
    if not goal.other and goal.metric != "peak_mib":
        # Memory is not predicted, so that a bound of time alone is judged.
        judged = judging.judge(
            replace(goal, within_mib=None, otherwise=None, by=""),
            {"predicted": {"auto": True, goal.which: timed}},
            on.flops.get(short(dtype)),
        )
    verdict = (
        f"not derived: {goal.other} is not predicted"
        if goal.other
        else f"not derived: {goal.metric}"
        if judged is None
        else f"{'met' if judged.met else 'missed'} ({number(judged.value)})"
    )
    if judged is not None and goal.within_mib is not None:
        verdict += "; memory not derived"
    if judged is not None and judged.met and row.unknown:
        verdict += "; in part"
    return replace(row, verdict=verdict)


def _alone(goal: Goal) -> Goal:
    """The goal without its cases, which a row names."""
    return replace(goal, cases=(), dtypes=(), otherwise=goal.otherwise and _alone(goal.otherwise))


def _measured(
    documents, op: Op, name: str, which: str, case: Case, dtype: torch.dtype
) -> float | None:
    """The median of an implementation in milliseconds, by the suite's goals, else by its times."""
    aim = Aim(op, case, dtype).name
    for unit in (aim, f"time/{aim.partition('/')[2]}"):
        for row in ((documents or {}).get(unit) or {}).get("rows") or ():
            if row["provider"] == name:
                return (row.get(which) or {}).get("median_ms")
    return None


def asked(on: Roofs) -> Iterator[tuple[str, ...]]:
    """The words of each open question about a launch, with each pass that it changes, the predicted
    times now and of the other alternative, and the other's limit.
    """
    with launches.simulated(on.device, on.arch) as recorded:
        for v in variants.asked(tuning.arch_of_device()):
            if not v.launch or isinstance(v.other, str) or isinstance(v.now, str):
                continue
            op = selection.operations()[v.op]
            case = next(c for c in op.cases if c.name == v.case)
            impl = implementation(v, op, v.other, "cuda")
            if impl is None or "cuda" not in case.tags:
                continue
            ways = [
                _passes(
                    recorded, op, impl.name, case, torch.bfloat16, v.launch if way else "", way
                )[0]
                for way in (dict(v.now), dict(v.other))
            ]
            for which in ("forward", "backward"):
                now, other = (passes.get(which) for passes in ways)
                if now is None or other is None or now == other:
                    continue
                try:
                    times = [
                        model.predict(op.name, which, p, case.cost(2), on) for p in (now, other)
                    ]
                except ValueError:
                    continue  # counts do not tell
                ms = (f"{number(1e3 * t.seconds)} ms" for t in times)
                yield v.name, TITLES.get(which, which), *ms, times[1].limit


def find(ops: Sequence[Op], on: Roofs, measured: dict[str, Any] | None = None) -> Found:
    seen: set[str] = set()
    if on.arch > 90:
        more = list(newer(ops, on, seen, measured))
        return Found([], more, sorted(launches.kernels(on.arch) - launches.kernels() - seen))
    goals = list(rows(ops, on, seen, measured))
    more = list(others(ops, on, seen, measured))
    return Found(goals, more, sorted(launches.kernels() - seen))


def main(argv: Sequence[str]) -> int:
    parser = commands.parser("predict", __doc__)
    every = selection.operations()
    parser.add_argument("--device", choices=list(roofs.DEVICES), help="default: all")
    parser.add_argument("--op", type=names(every), help="default: all")
    parser.add_argument(
        "--roofs", type=pathlib.Path, metavar="FILE", help="a suite's roofline.json"
    )
    parser.add_argument("--out", type=pathlib.Path, default=FILE, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if out of date")
    args = parser.parse_args(argv)
    if reason := pretend.no_compiling():
        print(f"predict: {reason}", file=sys.stderr)
        return 2
    partly = args.op or args.device or args.roofs
    if partly and args.check:
        parser.error("--check is of the whole page: without --op, --device and --roofs")
    ops = [every[n] for n in args.op or every]
    measured, by_device = None, {}
    try:
        for device in [args.device] if args.device else list(roofs.DEVICES):
            on = roofs.DEVICES[device]
            if args.roofs:
                on = roofs.read(on, args.roofs)
                measured = roofs.documents(args.roofs)
            by_device[device] = find(ops, on, measured)
    except ValueError as error:
        print(f"predict: {error}", file=sys.stderr)
        return 2
    if partly:
        by_device = {d: predictions for d, predictions in by_device.items() if predictions.rows}
        if not by_device:
            print("predict: Hopper has all cases of these ops too; name h200 or h100")
            return 2
        for device, predictions in by_device.items():
            parts = (
                table(r, measured is not None) for r in (predictions.goals, predictions.others) if r
            )
            lines = [line for part in parts for line in part]
            print(
                f"## {roofs.DEVICES[device].device}\n",
                *lines,
                *arithmetic(predictions.rows),
                sep="\n",
            )
        return 0
    version = platform.describe()["triton"].split("+")[0]
    first = roofs.DEVICES[next(iter(by_device))]
    text = Predicted(version, by_device, list(asked(first))).text()
    if args.check:
        same = args.out.exists() and args.out.read_text() == text
        print(f"{args.out}: {'up to date' if same else f'out of date; run `{COMMAND}`'}")
        return int(not same)
    args.out.write_text(text)
    print(f"written to {args.out}")
    return 0
