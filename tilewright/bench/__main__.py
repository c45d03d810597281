"""python -m tilewright.bench: lists ops that can be timed here, times them, compares two
measurements, and searches launch configurations.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import torch

from tilewright import selection
from tilewright.bench.options import at_least, chosen, has_device, names
from tilewright.core import platform, registry

# Commands that belong to a checkout: by their names, the commands that have them.
ELSEWHERE = {
    **{
        name: f"python -m bench {name}"
        for name in ["suite", "gpu-cache", "margins", "rehearse", "end-to-end", "layouts", "report"]
    },
    "compile-gate": "tilewright gate --registry",
    "overhead": "python -m bench suite --stage overhead",
}
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
        "compare", help="compare the timed rows of two measurements; exit code 1 on a regression"
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
    help_ = "time every provider of every op on its timed cases; resumable"
    commands.add_parser("run", help=help_, add_help=False)
    help_ = "search launch configurations within a time budget and write the tables"
    commands.add_parser("tune", help=help_, add_help=False)
    return parser


@platform.command
def main(argv: list[str] | None = None, start_time: float | None = None) -> int:
    """start_time: when the process started, for commands with a time budget (default: now)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["run"]:
        from tilewright.bench import plan
        from tilewright.bench.timed import RUN

        return plan.main(RUN, argv[1:], start_time)
    if argv[:1] == ["tune"] and "--goals" in argv:
        print("tune --goals is `python -m bench search --goals` now", file=sys.stderr)
        return 2
    if argv[:1] == ["tune"]:
        from tilewright.bench import plan
        from tilewright.bench.tune import TUNE

        return plan.main(TUNE, argv[1:], start_time)
    if argv and argv[0] in ELSEWHERE:
        print(f"{argv[0]} is `{ELSEWHERE[argv[0]]}` now", file=sys.stderr)
        return 2
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
