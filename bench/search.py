"""Searches the launch configurations behind goals that were missed, compiled beforehand.

    python -m bench search --goals DIR --minutes 9 [options of `tilewright.bench tune`]

DIR has the suite's results: cases whose goals these do not meet are searched. On a GPU their
candidates are compiled first, on all cores but one.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.stages import goals
from tilewright import selection
from tilewright.bench import plan, runner, store
from tilewright.bench.options import has_device
from tilewright.bench.tune import TUNE
from tilewright.core import platform
from tilewright.core.registry import short
from tilewright_lab import pretend


def compile_beforehand(ops: Sequence[str], goals: pathlib.Path, until: float) -> None:
    """Compiles the candidates behind goals into Triton's cache, on all cores but one, before they
    are timed; within half of the remaining time.
    """
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    if pretend.no_compiling() or arch not in pretend.DEVICES:
        return
    seconds = (until - time.time()) / 2
    # It needs no GPU; if one were visible, PyTorch would initialize it in each process.
    command = [
        "env",
        "CUDA_VISIBLE_DEVICES=",
        sys.executable,
        "-m",
        "bench",
        "gpu-cache",
        "--what",
        "search",
        "--arch",
        str(arch),
        "--name",
        platform.device_name("cuda"),
        "--op",
        ",".join(ops),
        "--minutes",
        f"{seconds / 60:.2f}",
        "--jobs",
        str(max(1, len(os.sched_getaffinity(0)) - 1)),
        "--goals",
        str(goals),
    ]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        process.wait(seconds + runner.DYING)
    except subprocess.TimeoutExpired:
        print("compiling beforehand: did not end in time")
    finally:
        runner.kill(process)


def _options(parser: argparse.ArgumentParser) -> None:
    TUNE.options(parser)
    parser.add_argument(
        "--goals",
        type=pathlib.Path,
        required=True,
        metavar="DIR",
        help="the suite's results; goals that were not measured are not searched",
    )
    parser.allow_abbrev = False  # below, --goals is taken out of the arguments by its name


def main(argv: Sequence[str], start_time: float | None = None) -> int:
    start_time = start_time or time.time()
    p = plan.parser(replace(TUNE, command=("bench", "search"), about=__doc__, options=_options))
    args = p.parse_args(argv)
    has_device(p, args.device)
    if args.only is not None:
        p.error("argument --only: search takes the cases whose goals were missed")
    if not (args.goals / store.FILE).exists():
        p.error(f"argument --goals: {args.goals} has no results of the suite")
    ops = selection.operations()
    behind = [
        f"{op}.{case}.{short(dtype)}"
        for op in args.op
        for case, dtype in goals.unmet(ops[op], args.device, args.goals)
    ]
    if not behind:
        print(f"no goal that {args.goals} has was missed: nothing is searched")
        return 0
    of_goals = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    of_goals.add_argument("--goals")
    rest = [*of_goals.parse_known_args(argv)[1], "--only", ",".join(behind)]
    if args.device == "cuda":
        call = plan.asked(TUNE, plan.parser(TUNE).parse_args(rest), rest)
        if call.unmade():
            compile_beforehand(args.op, args.goals, start_time + 60 * args.minutes - runner.FINISH)
    return plan.main(TUNE, rest, start_time)
