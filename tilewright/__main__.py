"""The command `tilewright`."""

from __future__ import annotations

import argparse
import sys

import torch

from tilewright import platform, registry


def explain(op_name: str | None, device_type: str, dtype: torch.dtype) -> int:
    ops = registry.operations()
    if op_name is not None and op_name not in ops:
        print(f"tilewright explain: unknown op {op_name!r}; have {', '.join(ops)}", file=sys.stderr)
        return 2
    print("  ".join(f"{k} {v}" for k, v in platform.describe().items()))
    print(f"for {registry.short(dtype)} tensors on {device_type}; `auto` takes the row marked *\n")
    for op in ops.values() if op_name is None else [ops[op_name]]:
        chosen = op.choose(device_type, dtype)
        for impl in op.implementations:
            reason = impl.why_not(device_type, dtype)
            mark = "*" if impl.name == chosen else " "
            print(f"{op.name:<22}{mark} {impl.name:<8}{'usable' if reason is None else reason}")
        if op_name is not None:
            print("\n" + (op.public.__doc__ or "").strip())
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tilewright", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("explain", help="every op and implementation: usable here, or why not; what auto picks")
    p.add_argument("op", nargs="?")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16", "float64"])
    args = parser.parse_args(argv)
    return explain(args.op, args.device, getattr(torch, args.dtype))


if __name__ == "__main__":
    sys.exit(main())
