"""The kernels of a pass and their times, by PyTorch's profiler, on a CUDA device.

    python -m bench profile --out DIR [--op OP,..] [--case CASE,..] [--implementation NAME]

Each timed case of the ops is run by one implementation (default: what `auto` takes); each pass is
warmed up, then profiled over a few calls with a cold L2 cache. DIR/profile.jsonl gets a line per
case: the kernels of a call of each pass, in order of their time, each with its launches and
microseconds.
"""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench import commands
from tilewright import selection
from tilewright.bench import run, timing
from tilewright.bench.options import at_least, names
from tilewright.bench.providers import providers
from tilewright.core.registry import Case, Op, short

CALLS = 3
DTYPE = torch.bfloat16


def kernels(fn: Any, clock: timing.CudaClock) -> list[dict[str, Any]]:
    """The kernels of a call, longest first: name, launches, microseconds."""
    before, timed = timing.parts(fn)
    fn()
    total: dict[str, list[float]] = {}
    for _ in range(CALLS):
        if before is not None:
            before()
        clock.flush()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            timed()
            torch.cuda.synchronize()
        for event in profile.key_averages():
            if event.self_device_time_total:
                entry = total.setdefault(event.key, [0, 0.0])
                entry[0] += event.count
                entry[1] += event.self_device_time_total
    rows = [
        {"kernel": name, "launches": count / CALLS, "us": us / CALLS}
        for name, (count, us) in total.items()
    ]
    return sorted(rows, key=lambda r: -r["us"])


def profiled(op: Op, case: Case, name: str, clock: timing.CudaClock) -> dict[str, Any]:
    """A document of one case."""
    provider = next(p for p in providers(op, "cuda", DTYPE) if p.name == name)
    if provider.reason:
        raise RuntimeError(provider.reason)
    kwargs = case.make("cuda", DTYPE, run.SEED)
    passes = run.passes(provider, kwargs)
    return {
        "op": op.name,
        "case": case.name,
        "dtype": short(DTYPE),
        "provider": name,
        "passes": {p: kernels(fn, clock) for p, fn in passes.items() if p != "forward_backward"},
    }


def table(document: dict[str, Any]) -> str:
    lines = []
    for name, rows in document["passes"].items():
        whole = sum(r["us"] for r in rows)
        about = f"{document['op']} {document['case']} [{document['provider']}] {name}"
        lines.append(f"{about}: {whole:.0f} us in kernels")
        lines += [f"    {r['us']:9.1f} us {r['launches']:5.1f} x {r['kernel'][:90]}" for r in rows]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Exit code 1: a case failed; 2: no CUDA device."""
    ops = selection.operations()
    p = commands.parser("profile", __doc__)
    p.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    p.add_argument("--op", type=names(ops), default=list(ops), metavar="OP,..", help="default: all")
    p.add_argument("--case", type=names(), metavar="CASE,..", help="default: each op's first")
    p.add_argument("--implementation", metavar="NAME", help="default: what `auto` takes")
    p.add_argument("--minutes", type=at_least(0, float), default=60.0, help="no case begins later")
    p.add_argument("--commit", metavar="COMMIT|FILE", help="as of the suite")
    args = p.parse_args(argv)
    if not torch.cuda.is_available():
        print("profile: no CUDA device")
        return 2
    until = time.monotonic() + 60 * args.minutes
    clock = timing.CudaClock()
    meta = run.metadata("cuda", run.Settings(), ["profile", *argv], commit=args.commit)
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for op in (ops[n] for n in args.op):
        cases = run.timed(op, "cuda", args.case)
        for case in cases if args.case else cases[:1]:
            if time.monotonic() > until:
                print("out of time")
                return failed
            try:
                name = args.implementation or op.choose("cuda", DTYPE)
                document = profiled(op, case, name, clock)
            except Exception as error:  # the others are still profiled
                timing.raise_if_lost(error, op.name)
                print(f"{op.name} {case.name}: {timing.first_line(error)}")
                failed = 1
                continue
            finally:
                run.free("cuda")
            with (args.out / "profile.jsonl").open("a") as file:
                file.write(json.dumps({"meta": meta, **document}) + "\n")
            print(table(document), flush=True)
    return failed
