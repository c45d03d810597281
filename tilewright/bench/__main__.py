"""python -m tilewright.bench: lists ops that can be timed here, times and tunes them, reports the
results, and compiles kernels without a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys

import torch

from tilewright import platform, selection
from tilewright.bench.options import at_least, chosen, has_device, names
from tilewright.core import registry

# Commands with their own parsers: name -> (module with main(argv) -> int, help). Imported on
# demand.
ELSEWHERE = {
    "compile-gate": (
        "tilewright.bench.compile_gate",
        "compile every GPU kernel without a GPU and check its budgets",
    ),
    "suite": (
        "tilewright.bench.suite",
        "check and time every op on this device within a time budget; resumable",
    ),
    "tune": (
        "tilewright.bench.tune",
        "search launch configurations within a time budget and write the tables",
    ),
    "gpu-cache": (
        "tilewright.bench.gpu_cache",
        "fill Triton's cache with the kernels that a GPU launches first, without a GPU",
    ),
    "margins": (
        "tilewright.bench.margins",
        "write docs/margins.md: errors as shares of what the numerics contract allows",
    ),
    "rehearse": (
        "tilewright.bench.rehearse",
        "run the first call on a GPU on a simulated one, and estimate its clock",
    ),
    "end-to-end": (
        "tilewright.tools.end_to_end",
        "time a training step of the trainer's model and of transformers' on a CPU",
    ),
    "layouts": (
        "tilewright.tools.layouts",
        "train with each layout of the trainer, and of transformers' Trainer, on a CPU",
    ),
    "report": (
        "tilewright.bench.page.build",
        "write docs/performance.md from committed raw results",
    ),
}
BUDGETED = ("suite", "tune")  # their minutes count from the start of the process
# `run ARGS` stands for `suite RUN ARGS`.
RUN = [
    *("--stage", "time", "--minutes", "1440", "--rounds", "15", "--case-seconds", "60"),
    *("--baseline-slack", "1", "--dtype", "float32,bfloat16"),
]
DTYPES = {registry.short(d): d for d in (*registry.FLOATS, torch.float64)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tilewright.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    help_ = "list ops with their cases and providers, and the reason if a provider is unavailable"
    p = commands.add_parser("list", help=help_, description=help_)
    p.add_argument("--op", type=names(), metavar="OP,..", help="default: every op")
    p.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        choices=["cpu", "cuda"],
    )
    p.add_argument(
        "--dtype",
        type=names(),
        default=["float32", "bfloat16"],
        metavar="DTYPE,..",
        help="default: float32,bfloat16",
    )
    c = commands.add_parser(
        "compare", help="compare the timed rows of two suites; exit code 1 on a regression"
    )
    c.add_argument("before", type=pathlib.Path, help="suite.jsonl or its folder")
    c.add_argument("after", type=pathlib.Path)
    c.add_argument(
        "--threshold",
        type=at_least(0, float),
        default=0.05,
        help="a significant slowdown by more than this fraction is a regression (default "
        "%(default)s)",
    )
    commands.add_parser("run", help=f"time every provider: suite {' '.join(RUN)}", add_help=False)
    for name, (_, about) in ELSEWHERE.items():
        commands.add_parser(name, help=about, add_help=False)
    return parser


@platform.command
def main(argv: list[str] | None = None, start_time: float | None = None) -> int:
    """start_time: when the process started, for commands with a time budget (default: now)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["run"]:
        argv = ["suite", *RUN, *argv[1:]]
    if argv and argv[0] in ELSEWHERE:
        command = importlib.import_module(ELSEWHERE[argv[0]][0]).main
        more = (start_time,) if argv[0] in BUDGETED else ()
        return command(argv[1:], *more) or 0
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command == "compare":
        return _compare(args)
    if args.command == "list":
        return _list(parser, args)
    parser.print_help()
    return 2


def _compare(args: argparse.Namespace) -> int:
    from tilewright.bench import report, store

    try:
        before, after = store.rows(args.before), store.rows(args.after)
        text, regressions = report.compare(before, after, args.threshold)
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    print(text)
    return 1 if regressions else 0


def _list(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from tilewright.bench import run

    table = selection.operations()
    ops = [table[n] for n in chosen(parser, "--op", args.op, list(table))]
    dtypes = [DTYPES[n] for n in chosen(parser, "--dtype", args.dtype, list(DTYPES))]
    has_device(parser, args.device)
    print(run.listing(ops, args.device, dtypes))
    return 0


if __name__ == "__main__":
    from tilewright.bench.runner import started

    sys.exit(main(start_time=started()))
