"""`tilewright check-layout module:function`: a training step on 1, 2 and 4 processes, beside one.

    def train_step(layout: str, rank: int, world_size: int) -> Step: ...
    train_step.layouts = {"ddp": (2, 4), "tensor parallel": 2}

The function builds model and data of a rank. It is called once in one process, as layout "single",
and on the ranks of each layout that it names, over Gloo. Loss per token, every gradient, the
gradients' norm and one optimizer step are compared; what differs is named, with its factor.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import json
import multiprocessing
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tilewright.core import platform
from tilewright_lab.check_layout.compare import TOLERANCE, Alone
from tilewright_lab.check_layout.findings import FOLLOWS, Finding, find, worst
from tilewright_lab.check_layout.notes import notes, notes_of_one
from tilewright_lab.check_layout.ranks import FOREVER, SINGLE, Ranks, Target, named
from tilewright_lab.check_layout.step import Refused, Step

__all__ = ["Refused", "Result", "Step", "check", "main"]

TIMEOUT = 120.0  # an import of a large package on a slow disk takes most of a minute


@dataclasses.dataclass(frozen=True)
class Result:
    """A layout on a number of processes, beside one process.

    findings: what differs, causes first.   worst: the largest relative error of a gradient.
    dtype: the narrowest that any rank or one process computed in; it decides the tolerance, which
    is relative, of a tensor in the 2-norm.
    """

    layout: str
    world_size: int
    findings: list[Finding]
    notes: list[str]
    worst: float
    dtype: str
    tolerance: float

    @property
    def equal(self) -> bool:
        return not self.findings


def check(
    target: Target,
    *,
    timeout: float = TIMEOUT,
    layouts: Sequence[str] = (),
    world_sizes: Sequence[int] = (),
) -> tuple[Alone, list[Result]]:
    """Runs a step in one process and in its layouts.

    Args:
        target: The function, as `module:function` or `path/file.py:function`.
        timeout: Seconds for which the ranks may say nothing; a rank reports each part of a step.
        layouts: Only these; default: all that the function names.
        world_sizes: Only on these numbers of processes.

    Returns:
        What one process found, and a result for each layout and number of processes.

    Raises:
        Refused: The step cannot be checked: the reason in one sentence. No process is left.
    """
    if not 0 < timeout <= FOREVER.total_seconds():
        most = f"{FOREVER.total_seconds():.0f}"
        raise Refused(f"the timeout must be above 0 s and at most {most} s, got {timeout:g}")
    with tempfile.TemporaryDirectory() as folder:
        with Ranks(1, target, folder, timeout) as ranks:
            todo = plan(ranks.load(), layouts, world_sizes)
            [one] = ranks.run(SINGLE)
            results = [_result(ranks, one, layout, 1) for layout in todo.pop(1, ())]
        for size, names in sorted(todo.items()):
            with Ranks(size, target, folder, timeout) as ranks:
                ranks.load()
                results += [_result(ranks, one, layout, size) for layout in names]
    return one, results


def _result(ranks: Ranks, one: Alone, layout: str, size: int) -> Result:
    by_rank = ranks.run(layout)
    findings, dtype = find(one, by_rank), by_rank[0].dtype
    return Result(
        layout,
        size,
        findings,
        notes(one, by_rank, bool(findings)),
        worst(by_rank),
        _name(dtype),
        TOLERANCE[dtype],
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plan(
    given: Any, layouts: Sequence[str] = (), sizes: Sequence[int] = ()
) -> dict[int, list[str]]:
    """Layouts by world size.   given: the function's `layouts`."""
    has = named(given)
    for layout in layouts:
        if layout not in has:
            near = difflib.get_close_matches(layout, has, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise Refused(f"the function has no layout {layout!r}{hint} (it has {list(has)})")
    by_size: dict[int, list[str]] = {}
    for layout, of_it in has.items():
        for size in of_it:
            if (not layouts or layout in layouts) and (not sizes or size in sizes):
                by_size.setdefault(size, []).append(layout)
    if not by_size:
        raise Refused(
            f"no layout is left on {' or '.join(map(str, sizes))} processes; the function has "
            f"{ {n: has[n] for n in layouts or has} }"
        )
    return by_size


# ---- the command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewright check-layout",
        description="Runs a training step in one process and in layouts of several, over Gloo on "
        "the CPU, and names the first gradient that differs, by which factor, and the likely "
        "fault.",
        epilog="exit status: 0 all layouts equal one process, 1 one differs, 2 the step cannot be "
        "checked",
    )
    parser.add_argument(
        "function", metavar="module:function", help="or path/file.py:function; it returns a Step"
    )
    parser.add_argument(
        "--layout", action="append", default=[], metavar="NAME", help="only this one; repeatable"
    )
    parser.add_argument(
        "--world-size",
        action="append",
        type=int,
        default=[],
        metavar="N",
        help="only on this number of processes; repeatable",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help="for which the ranks may say nothing (default: %(default)g)",
    )
    parser.add_argument(
        "--float64",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="build and run under torch.set_default_dtype(torch.float64) (default: yes)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--verbose", action="store_true", help="show what ranks print, on standard error"
    )
    return parser


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM leaves the blocks that it is in, which end ranks and remove files. Only a main thread
    may set a handler.
    """

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@platform.command
def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    # Ranks are forked from one process that has imported what they need.
    multiprocessing.set_forkserver_preload(["tilewright_lab.check_layout.ranks"])
    target = Target(args.function, args.float64, args.verbose)
    try:
        with _ended_in_order():
            one, results = check(
                target, timeout=args.timeout, layouts=args.layout, world_sizes=args.world_size
            )
    except Refused as error:
        print(f"check-layout: {error}", file=sys.stderr)
        return 2
    print(as_json(args.function, one, results) if args.json else as_text(one, results))
    return 0 if all(result.equal for result in results) else 1


def as_json(function: str, one: Alone, results: Sequence[Result]) -> str:
    single = {
        "loss": one.loss,
        "tokens": one.tokens,
        "norm": one.norm,
        "gradients": len(one.squares),
        "dtype": _name(one.dtype),
        "tolerance": TOLERANCE[one.dtype],
        "notes": notes_of_one(one),
    }
    layouts = [{**dataclasses.asdict(r), "equal": r.equal} for r in results]
    equal = all(r.equal for r in results)
    return json.dumps(
        {"function": function, "equal": equal, "single": single, "layouts": layouts}, indent=1
    )


def as_text(one: Alone, results: Sequence[Result]) -> str:
    norm = "" if one.norm is None else f", norm {one.norm:.6g}"
    lines = [
        f"one process: loss {one.loss:.6g}, {one.tokens} tokens, {len(one.squares)} gradients{norm}; "
        f"{_computed(_name(one.dtype), TOLERANCE[one.dtype])}"
    ]
    lines += [f"    note: {note}" for note in notes_of_one(one)]
    for result in results:
        line = f"{result.layout} on {result.world_size}: {'equal' if result.equal else 'DIFFERS'}"
        if result.dtype != _name(one.dtype):
            line += f"; {_computed(result.dtype, result.tolerance)}"
        lines.append(line)
        follow = [f for f in result.findings if f.hint.startswith(FOLLOWS)]
        for f in result.findings:
            if f not in follow:
                lines += _cause(f)
        if follow:
            lines.append(f"    also: {', '.join(f.kind for f in follow)}, as follows from that")
        lines += [f"    note: {note}" for note in result.notes]
    return "\n".join(lines)


def _computed(dtype: str, tolerance: float) -> str:
    return f"computed in {dtype}, equal within {tolerance:.0e}"


def _cause(f: Finding) -> list[str]:
    lines = [f"    {f.kind}: {f.text}"]
    if f.differing:
        lines.append(
            f"        the first in the backward's order; {f.differing} of {f.of} parameters differ"
        )
    return [*lines, f"        likely: {f.hint}"] if f.hint else lines
