"""The command `tilewright`."""

from __future__ import annotations

import argparse
import importlib
import sys
from importlib import metadata

import torch

from tilewright import __version__, lab, selection
from tilewright.core import explain as explanation
from tilewright.core import platform, registry
from tilewright.core.registry import Op

DTYPES = ("float32", "bfloat16", "float16", "float64")
# Commands of tilewright-lab, by entry points, with the line that `tilewright --help` shows.
LAB = {
    "check-layout": "compare a training step on 1, 2 and 4 processes",
    "emulate": "run Triton kernels on a CPU, each access checked",
    "gate": "registers, spills and accesses of Triton kernels",
    "server-torture": "kill a training server's processes at chosen points",
    "verify": "compare every module of a transformers model with float64",
}


def explain(args: argparse.Namespace, op: Op | None) -> int:
    """Prints what `auto` takes for every op and why implementations are unusable; of one op, its
    documentation too.
    """
    device, dtype = args.device, getattr(torch, args.dtype)
    rows = explanation.rows(selection.operations().values() if op is None else [op], device, dtype)
    if args.json:
        print(explanation.as_json(rows, device, dtype))
        return 0
    print(explanation.heading(device, dtype))
    if op is not None or args.all:
        print(f"`auto` takes the row marked *\n\n{explanation.table(rows)}")
    else:
        print(f"\n{explanation.summary(rows)}\n")
        print(
            "`tilewright explain --all` lists every implementation, `tilewright explain OP` one op"
        )
    if op is not None:
        print(f"\n{explanation.contract(op)}")
    elif misplaced := selection.misplaced():
        print("\n" + "\n".join(misplaced))
    return 0


def check(op: Op, implementation: str, device_type: str, dtype: str | None) -> int:
    """Holds an implementation to the numerics contract, in one dtype or in all that it takes."""
    from tilewright.bench import check  # here: `explain` needs none of it

    if implementation == "auto":
        implementation = op.choose(device_type, getattr(torch, dtype or "float32"))
    impl = op.implementation(implementation)
    candidates = registry.FLOATS if dtype is None else (getattr(torch, dtype),)
    reasons = {d: impl.why_not(device_type, d) for d in candidates}
    if device_type == "cuda" and (no_device := platform.no_cuda()):
        reasons = dict.fromkeys(candidates, no_device)
    dtypes = [d for d, reason in reasons.items() if reason is None]
    if not dtypes:
        print(f"{op.name}[{impl.name}]: {next(iter(reasons.values()))}", file=sys.stderr)
        return 1
    return check.check(op, impl.name, device_type, dtypes)


def _of_lab(name: str, arguments: list[str]) -> int:
    """Runs a command of tilewright-lab; 2 where that is not installed."""
    entry_points = [*metadata.entry_points(group="tilewright.commands", name=name)]
    try:
        with lab.needed(f"tilewright {name}"):
            if entry_points:
                main = entry_points[0].load()
            else:  # a copy of a checkout that nobody installed
                package = name.replace("-", "_")
                main = importlib.import_module(f"tilewright_lab.{package}.command").main
    except lab.LabMissing as error:
        print(error, file=sys.stderr)
        return 2
    return main(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tilewright", description=__doc__)
    parser.add_argument("--version", action="version", version=f"tilewright {__version__}")
    commands = parser.add_subparsers(dest="command")

    def command(name: str, help_: str) -> argparse.ArgumentParser:
        p = commands.add_parser(name, help=help_, description=help_)
        cuda = torch.cuda.is_available()
        p.add_argument("--device", default="cuda" if cuda else "cpu", choices=["cpu", "cuda"])
        return p

    p = command("explain", "what `auto` takes for every op here, and why others are unusable")
    p.add_argument("op", nargs="?", help="one op: all its implementations and its documentation")
    p.add_argument("--dtype", default="float32", choices=DTYPES)
    p.add_argument("--all", action="store_true", help="a line for every implementation")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p = command("check", "check the numerics contract of an implementation on an op's small cases")
    p.add_argument("op")
    p.add_argument("--implementation", metavar="NAME", help="auto, or a name that explain OP shows")
    p.add_argument("--dtype", choices=DTYPES, help="default: float32, bfloat16 and float16")
    for name, help_ in LAB.items():
        commands.add_parser(name, help=help_, add_help=False)
    return parser


@platform.command
def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in LAB:
        return _of_lab(argv[0], argv[1:])
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    try:
        op = None if args.op is None else selection.known(args.op)
        if op is not None and args.command == "check" and args.implementation != "auto":
            if args.implementation is None:
                raise ValueError(f"--implementation is one of {', '.join(['auto', *op.names()])}")
            op.implementation(args.implementation)
    except ValueError as error:
        print(f"tilewright {args.command}: {error}", file=sys.stderr)
        return 2
    if op is not None and args.command == "check":
        return check(op, args.implementation, args.device, args.dtype)
    return explain(args, op)


if __name__ == "__main__":
    sys.exit(main())
