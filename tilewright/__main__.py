"""The command `tilewright`."""

from __future__ import annotations

import argparse
import sys

import torch

from tilewright import __version__, platform, registry, selection
from tilewright.registry import Op, short

DTYPES = ("float32", "bfloat16", "float16", "float64")


def explain(op: Op | None, device_type: str, dtype: torch.dtype) -> int:
    """Prints every implementation: usable here, or the reason why not; and what `auto` takes."""
    ops = selection.operations()
    print("  ".join(f"{k} {v}" for k, v in platform.describe().items()))
    print(f"for {short(dtype)} tensors on {device_type}; `auto` takes the row marked *\n")
    wide, narrow = max(map(len, ops)), max(len(name) for op in ops.values() for name in op.names())
    # eager and sdpa need no more than a device
    no_device = platform.no_cuda() if device_type == "cuda" else None
    for each in ops.values() if op is None else [op]:
        chosen = None if no_device else each.choose(device_type, dtype)
        for impl in each.implementations:
            reason = impl.why_not(device_type, dtype) or no_device
            if reason is None:
                does = impl.does(device_type)
                reason = f"usable; {does}" if does else "usable"
            mark = "*" if impl.name == chosen else " "
            print(f"{each.name:<{wide}} {mark} {impl.name:<{narrow}}  {reason}")
    if op is not None:
        if op.requests:
            print("\nunsupported:")
        for impl in op.implementations:
            if unsupported := dict.fromkeys(filter(None, map(impl.refuses, op.requests))):
                print(f"{impl.name:<{narrow}}  {'; '.join(unsupported)}")
        print("\n" + (op.public.__doc__ or "").strip())
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tilewright", description=__doc__)
    parser.add_argument("--version", action="version", version=f"tilewright {__version__}")
    commands = parser.add_subparsers(dest="command")

    def command(name: str, help_: str) -> argparse.ArgumentParser:
        p = commands.add_parser(name, help=help_, description=help_)
        cuda = torch.cuda.is_available()
        p.add_argument("--device", default="cuda" if cuda else "cpu", choices=["cpu", "cuda"])
        return p

    p = command(
        "explain",
        "list every op and implementation, the reason if it is unavailable, and the choice of auto",
    )
    p.add_argument("op", nargs="?")
    p.add_argument("--dtype", default="float32", choices=DTYPES)
    p = command("check", "check the numerics contract of an implementation on an op's small cases")
    p.add_argument("op")
    p.add_argument("--implementation", required=True, metavar="NAME")
    p.add_argument("--dtype", choices=DTYPES, help="default: float32, bfloat16 and float16")
    return parser


@platform.command
def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    try:
        op = None if args.op is None else selection.known(args.op)
        if args.command == "check" and args.implementation != "auto":
            op.implementation(args.implementation)
    except ValueError as error:
        print(f"tilewright {args.command}: {error}", file=sys.stderr)
        return 2
    if args.command == "check":
        return check(op, args.implementation, args.device, args.dtype)
    return explain(op, args.device, getattr(torch, args.dtype))


if __name__ == "__main__":
    sys.exit(main())
