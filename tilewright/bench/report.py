"""Rows of a benchmark: their fields, printing them, and comparing two runs."""

from __future__ import annotations

from typing import Any

from tilewright.bench.providers import BASELINES
from tilewright.bench.timing import Timing

SCHEMA = 1
PASSES = ("forward", "backward", "forward_backward")
# `contract` of a peer that draws random values of its own.
DRAWS = "not compared: it draws its own values; shape and dtype agree"
STATUSES = ("ok", "failed", "unavailable", "error")


def row(
    op: str,
    case: str,
    dtype: str,
    provider: str,
    *,
    auto: bool = False,
    status: str = "ok",
    reason: str | None = None,
) -> dict[str, Any]:
    """A row without times.

    status: "ok"; "failed" if the contract is broken; "unavailable"; "error" if it raised.
    reason: why the status is not "ok".
    contract: "definition", "holds", DRAWS, or the findings that break it (also for a baseline that
        is timed within the slack).
    looked_at: a description of the parts of the results that were checked; None: all.
    """
    return {
        "op": op,
        "case": case,
        "dtype": dtype,
        "provider": provider,
        "auto": auto,
        "status": status,
        "reason": reason,
        "contract": None,
        "looked_at": None,
        **dict.fromkeys(PASSES),
        "peak_mib": None,
        "speedup": {"eager": None, "compile": None},
    }


def figures(
    timing: Timing, bytes_: int, flops: int, floor: float | None, large: float | None = None
) -> dict[str, Any]:
    """The figures of one pass of a row.

    floor: the roofline bound in seconds: a copy with the same traffic, timed in the same rounds, or
        the roofline's matmul.
    large: the bound with the roofline's large copy instead.
    """
    t = timing.median
    return {
        "median_ms": t * 1e3,
        "p20_ms": timing.p20 * 1e3,
        "p80_ms": timing.p80 * 1e3,
        "samples_ms": [s * 1e3 for s in timing.samples],
        "calls_per_sample": timing.calls,
        "host_us": None if timing.host is None else timing.host * 1e6,
        "kernel_ms": None if timing.kernels is None else timing.kernels * 1e3,
        "op_ms": None if timing.idle is None else timing.idle * 1e3,
        "gb_per_s": bytes_ / t / 1e9 if bytes_ else None,
        "tflop_per_s": flops / t / 1e12 if flops else None,
        "roofline_percent": None if floor is None else 100 * floor / t,
        "large_roofline_percent": None if large is None else 100 * large / t,
    }


def compare_with_baselines(rows: list[dict]) -> None:
    """Adds the speed-up of each row of one case over eager and over compile, in both passes."""
    by_name = {r["provider"]: r for r in rows}
    for r in rows:
        for base in ("eager", "compile"):
            other = by_name.get(base)
            if other is None or r["status"] != "ok" or other["status"] != "ok":
                continue
            r["speedup"][base] = {
                p: other[p]["median_ms"] / r[p]["median_ms"] for p in PASSES if r[p] and other[p]
            }


def speedup(r: dict, base: str) -> float | None:
    """Forward + backward if the op has a backward, else forward."""
    ratios = r["speedup"][base] or {}
    return ratios.get("forward_backward", ratios.get("forward"))


def beyond(r: dict) -> bool:
    """Whether a row was timed although it breaks the contract: a baseline within the slack."""
    return r["status"] == "ok" and r["contract"] not in ("definition", "holds", DRAWS)


def key(r: dict) -> tuple[str, str, str, str]:
    return r["op"], r["case"], r["dtype"], r["provider"]


def check(rows: list[dict[str, Any]]) -> None:
    """Raises ValueError for an invalid row."""
    template = row("", "", "", "")
    for i, r in enumerate(rows):
        if missing := set(template) - set(r):
            raise ValueError(f"row {i} has no {sorted(missing)}")
        if r["status"] not in STATUSES:
            raise ValueError(f"row {i}: status must be one of {STATUSES}, got {r['status']!r}")
        if r["status"] != "ok" and (r["forward"] or r["forward_backward"]):
            raise ValueError(f"row {i} has a time although its status is {r['status']!r}")


def commit(meta: dict) -> str:
    if not meta["commit"]:
        return "unknown"
    return meta["commit"][:10] + (" + local changes" if meta["dirty"] else "")


def line(r: dict) -> str:
    """One row, for the terminal."""
    name = ("*" if r["auto"] else " ") + r["provider"]
    if r["status"] == "failed":
        return f"{name:<13} FAILED: {r['reason']}"
    if r["status"] != "ok":
        return f"{name:<13} {r['status']}: {r['reason']}"
    parts = [f"{name:<13}"]
    for pass_name, label in zip(PASSES, ("fwd", "bwd", "fwd+bwd"), strict=True):
        if r[pass_name]:
            f = r[pass_name]
            roof = (
                ""
                if f["roofline_percent"] is None
                else f" {f['roofline_percent']:5.1f} % of roofline"
            )
            parts.append(
                f"{label} {f['median_ms']:9.4f} ms [{f['p20_ms']:.4f}, {f['p80_ms']:.4f}]{roof}"
            )
    parts += [
        f"{speedup(r, b):.2f}x {b}"
        for b in ("eager", "compile")
        if speedup(r, b) and r["provider"] != b
    ]
    return "  ".join(parts) + (" (beyond the contract)" if beyond(r) else "")


def roofline_text(roof: dict) -> str:
    flops = ", ".join(f"{d} {f / 1e12:.3g} TFLOP/s" for d, f in roof["flops_per_second"].items())
    return f"copy {roof['copy_bytes_per_second'] / 1e9:.1f} GB/s; matmul {flops}"


Run = tuple[dict[str, Any], list[dict[str, Any]]]  # metadata and rows, as `store.rows` reads them


def compare(before: Run, after: Run, threshold: float = 0.05) -> tuple[str, list[str]]:
    """Compares two runs row by row.

    A change is significant if the ranges p20 to p80 do not overlap. A regression is a significant
    slow-down of more than `threshold`, or a row that had a time and now fails. Slower baselines are
    shown but are no regressions.

    Returns:
        The text, and the regressions among its lines.
    """
    if threshold < 0:
        raise ValueError(f"threshold must be at least 0, got {threshold}")
    metas = before[0], after[0]
    out, regressions = [], []
    if metas[0]["device"] != metas[1]["device"]:
        out.append(f"note: different devices: {metas[0]['device']} and {metas[1]['device']}")
    then, now = (f"commit {commit(m)}, {m['date']}" for m in metas)
    out.append(f"before: {then}; after: {now}; a ratio above 1 is slower")
    old, new = ({key(r): r for r in rows} for _, rows in (before, after))
    for k in [*old, *(k for k in new if k not in old)]:
        a, b, name = old.get(k), new.get(k), " ".join(k)
        if a is None or b is None:
            out.append(f"{name}: only {'after' if a is None else 'before'}")
            continue
        if a["status"] != "ok" or b["status"] != "ok":
            lines, worse = _changed_status(name, a, b)
        else:
            lines, worse = _changed_times(name, a, b, threshold)
        out += lines
        regressions += worse
    out.append(f"\n{len(regressions)} regression(s) beyond {threshold:.0%}")
    return "\n".join(out), regressions


def _changed_status(name: str, a: dict, b: dict) -> tuple[list[str], list[str]]:
    change = f"{name}: {a['status']} before, {b['status']} after: {b['reason'] or a['reason']}"
    ours = b["provider"] not in BASELINES
    return [change] if a["status"] != b["status"] else [], (
        [f"{name}: {b['status']}: {b['reason']}"] if a["status"] == "ok" and ours else []
    )


def _changed_times(name: str, a: dict, b: dict, threshold: float) -> tuple[list[str], list[str]]:
    lines, regressions = [], []
    for pass_name in PASSES:
        x, y = a[pass_name], b[pass_name]
        if x is None or y is None:
            continue
        ratio = y["median_ms"] / x["median_ms"]
        significant = y["p20_ms"] > x["p80_ms"] or y["p80_ms"] < x["p20_ms"]
        worse = significant and ratio > 1 + threshold
        ours = b["provider"] not in BASELINES
        if worse:
            mark = "  REGRESSION" if ours else "  baseline slower"
        elif significant:
            mark = "  faster" if ratio < 1 - threshold else ""
        else:
            mark = "  not significant"
        times = f"{x['median_ms']:.4g} -> {y['median_ms']:.4g} ms"
        lines.append(f"{name} {pass_name}: {times}, ratio {ratio:.3f}{mark}")
        if worse and ours:
            regressions.append(lines[-1])
    return lines, regressions
