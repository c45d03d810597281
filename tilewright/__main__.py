"""The command `tilewright`."""

from __future__ import annotations

import argparse
import sys

import torch

from tilewright import __version__, platform, registry


def explain(op_name: str | None, device_type: str, dtype: torch.dtype) -> int:
    ops = registry.operations()
    if op_name is not None and op_name not in ops:
        print(
            f"tilewright explain: unknown op {op_name!r}{registry.instead_of(op_name, ops)}",
            file=sys.stderr,
        )
        return 2
    print("  ".join(f"{k} {v}" for k, v in platform.describe().items()))
    print(f"for {registry.short(dtype)} tensors on {device_type}; `auto` takes the row marked *\n")
    wide, narrow = max(map(len, ops)), max(len(name) for op in ops.values() for name in op.names())
    no_device = (
        platform.no_cuda() if device_type == "cuda" else None
    )  # eager and sdpa need no more than a device
    for op in ops.values() if op_name is None else [ops[op_name]]:
        chosen = None if no_device else op.choose(device_type, dtype)
        for impl in op.implementations:
            reason = impl.why_not(device_type, dtype) or no_device
            if reason is None:
                does = impl.does(device_type)
                reason = f"usable; {does}" if does else "usable"
            mark = "*" if impl.name == chosen else " "
            print(f"{op.name:<{wide}} {mark} {impl.name:<{narrow}}  {reason}")
        if op_name is not None:
            if op.requests:
                print("\nunsupported:")
            for impl in op.implementations:
                if unsupported := dict.fromkeys(filter(None, map(impl.refuses, op.requests))):
                    print(f"{impl.name:<{narrow}}  {'; '.join(unsupported)}")
            print("\n" + (op.public.__doc__ or "").strip())
    return 0


@platform.command
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tilewright", description=__doc__)
    parser.add_argument("--version", action="version", version=f"tilewright {__version__}")
    commands = parser.add_subparsers(dest="command")
    p = commands.add_parser(
        "explain", help="every op and implementation: usable here, or why not; what auto picks"
    )
    p.add_argument("op", nargs="?")
    p.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    p.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16", "float16", "float64"]
    )
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    return explain(args.op, args.device, getattr(torch, args.dtype))


if __name__ == "__main__":
    sys.exit(main())
