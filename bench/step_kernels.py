"""The kernels of an optimizer step of the trainer, from the trace that its profiler writes.

On a CPU, which launches no kernels, the operators that call no others stand in their place.
"""

from __future__ import annotations

import gzip
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

# The first step recorded, and that after the last one: compilation and the allocator's growth are
# over, and a trace of few steps is read in a second.
FIRST, AFTER = 6, 9
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
GAPS = 12
# What aten::mm calls before BLAS computes the product, whose time is its own.
PREPARING = {"aten::resolve_conj", "aten::resolve_neg"}


def fields(folder: pathlib.Path) -> dict[str, Any]:
    """Fields of the trainer's `train` that make it write the trace."""
    return {
        "enable_profiling": True,
        "profile_start_step": FIRST,
        "profile_end_step": AFTER,
        "profile_trace_dir": str(folder),
        "profile_record_shapes": False,
        "profile_profile_memory": False,
        "profile_with_stack": False,
    }


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The events of a trace's folder.

    Raises FileNotFoundError if it has none, or several.
    """
    paths = [*folder.glob("*.json"), *folder.glob("*.json.gz")]
    if len(paths) != 1:
        raise FileNotFoundError(f"{folder.name} must hold one trace, has {len(paths)}")
    read = gzip.open if paths[0].suffix == ".gz" else open
    with read(paths[0], "rt") as file:
        return json.load(file)["traceEvents"]


def _leaves(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operators that no other one of their thread begins within."""
    leaves: list[dict[str, Any]] = []
    events = (e for e in events if e["name"] not in PREPARING)
    for e in sorted(events, key=lambda e: (e["tid"], e["ts"], -e["dur"])):
        last = leaves[-1] if leaves else None
        if last and last["tid"] == e["tid"] and e["ts"] < last["ts"] + last["dur"]:
            leaves.pop()
        leaves.append(e)
    return leaves


def summary(events: Sequence[dict[str, Any]], steps: int = AFTER - FIRST) -> dict[str, Any]:
    """Milliseconds of a step from the first kernel's begin to the last one's end (`span_ms`) and
    in kernels (`busy_ms`); the launches and microseconds of each operator's kernels, longest first;
    and the waits without a kernel (`gaps`), longest first, by the operators before and after.
    """
    operators = [e for e in events if e.get("cat") == "cpu_op" and "dur" in e]
    by_number = {e.get("args", {}).get("External id"): e["name"] for e in operators}
    kernels = [e for e in events if e.get("cat") in KERNELS]
    launched = kernels or _leaves(operators)
    if not launched:
        raise ValueError("the trace has no operator and no kernel")
    total: dict[tuple[str, str], list[float]] = {}
    waits: dict[tuple[str, str], list[float]] = {}
    until, before = min(e["ts"] for e in launched), ""
    for e in sorted(launched, key=lambda e: e["ts"]):
        of = by_number.get(e.get("args", {}).get("External id"), "") if kernels else e["name"]
        _count(total, (of, e["name"]), e["dur"])
        if e["ts"] > until:
            _count(waits, (before, of), e["ts"] - until)
        if e["ts"] + e["dur"] > until:
            until, before = e["ts"] + e["dur"], of
    gaps = [
        {"after": a, "before": b, "times": count / steps, "us": us / steps}
        for (a, b), (count, us) in waits.items()
    ]
    rows = [
        {"operator": of, "kernel": name, "launches": count / steps, "us": us / steps}
        for (of, name), (count, us) in total.items()
    ]
    begin, end = min(e["ts"] for e in launched), max(e["ts"] + e["dur"] for e in launched)
    return {
        "span_ms": (end - begin) / steps / 1e3,
        "busy_ms": sum(r["us"] for r in rows) / 1e3,
        "kernels": sorted(rows, key=lambda r: -r["us"]),
        "gaps": sorted(gaps, key=lambda g: -g["us"])[:GAPS],
    }


def _count(totals: dict[tuple[str, str], list[float]], key: tuple[str, str], us: float) -> None:
    entry = totals.setdefault(key, [0, 0.0])
    entry[0] += 1
    entry[1] += us


def table(step: dict[str, Any], most: int = 45) -> str:
    lines = [f"a step takes {step['span_ms']:.1f} ms, {step['busy_ms']:.1f} ms of it in kernels"]
    lines += [
        f"  {r['us']:9.0f} us {r['launches']:6.1f} x {r['operator'][:44]:<44} {r['kernel'][:60]}"
        for r in step["kernels"][:most]
    ]
    lines += [
        f"  {g['us']:9.0f} us {g['times']:6.1f} x without a kernel between {g['after'] or '-'} and "
        f"{g['before'] or '-'}"
        for g in step["gaps"]
    ]
    return "\n".join(lines)
