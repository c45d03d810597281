"""What a benchmark leaves behind: rows and their JSON, the table, the picture; and comparing
two runs.
"""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any

from tilewright.bench.providers import BASELINES
from tilewright.bench.timing import Timing, geomean

SCHEMA = 1
PASSES = ("forward", "backward", "forward_backward")
STATUSES = ("ok", "failed", "unavailable", "error")


# ---- rows


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

    status: "ok"; "failed", the contract is broken; "unavailable"; "error", it raised.   reason: why
    not "ok".
    contract: "definition", "holds", or what broke it (also of a baseline that is timed within the
    slack).
    looked_at: the parts of the results that the contract was judged on, in words; None: all of
    them.
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
    """One pass of a row.

    floor: the least seconds that the device allows: a copy of as many bytes, timed in the same
    rounds, or the matmul of
    the roofline.   large: with the roofline's large copy in its place.
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
        "op_ms": None if timing.alone is None else timing.alone * 1e3,
        "gb_per_s": bytes_ / t / 1e9 if bytes_ else None,
        "tflop_per_s": flops / t / 1e12 if flops else None,
        "roofline_percent": None if floor is None else 100 * floor / t,
        "large_roofline_percent": None if large is None else 100 * large / t,
    }


def compare_with_baselines(rows: list[dict]) -> None:
    """Fills in the speed-up of each row of one case over eager and over compile, in both passes."""
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
    found = r["speedup"][base] or {}
    return found.get("forward_backward", found.get("forward"))


def beyond(r: dict) -> bool:
    """Timed although it breaks the contract: a baseline within the slack that was allowed."""
    return r["status"] == "ok" and r["contract"] not in ("definition", "holds")


def key(r: dict) -> tuple[str, str, str, str]:
    return r["op"], r["case"], r["dtype"], r["provider"]


def summary(rows: Iterable[dict]) -> dict[str, Any]:
    """Geometric means of the speed-up of what `auto` takes, over an op's cases first and then over
    ops.

    left_out: cases whose `auto` row, or whose baseline, has no time.
    """
    chosen = [r for r in rows if r["auto"]]
    out: dict[str, Any] = {}
    for base in ("eager", "compile"):
        out[f"over_{base}"] = {}
        for dtype in [*dict.fromkeys(r["dtype"] for r in chosen), "all"]:
            by_op: dict[str, list[float]] = {}
            for r in chosen:
                value = speedup(r, base)
                if dtype in ("all", r["dtype"]) and value:
                    by_op.setdefault(r["op"], []).append(value)
            ops = {op: geomean(values) for op, values in by_op.items()}
            out[f"over_{base}"][dtype] = {"geomean": geomean(ops.values()), "ops": ops}
    out["left_out"] = [
        f"{' '.join(key(r))}: {r['reason'] or 'no baseline'}"
        for r in chosen
        if speedup(r, "eager") is None or speedup(r, "compile") is None
    ]
    return out


# ---- JSON


def write_json(path: pathlib.Path, document: dict) -> None:
    """Writes beside the file and renames: a reader, or an interrupt, never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(document, file, indent=1, allow_nan=False)
            file.write("\n")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read_json(path: pathlib.Path) -> dict:
    """A document that `check` accepts. Raises ValueError, naming the file, otherwise."""
    try:
        document = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from error
    check(document, str(path))
    return document


def check(document: Any, name: str = "document") -> None:
    """Raises ValueError if it is not a benchmark's result of this schema."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"{name}: schema must be {SCHEMA}, got {found!r}")
    for field in ("meta", "roofline", "rows", "summary", "complete"):
        if field not in document:
            raise ValueError(f"{name}: has no {field!r}")
    template = row("", "", "", "")
    for i, r in enumerate(document["rows"]):
        r.setdefault("backward", None)  # not timed by itself at first
        r.setdefault("looked_at", None)  # all of it, at first
        if missing := set(template) - set(r):
            raise ValueError(f"{name}: row {i} has no {sorted(missing)}")
        if r["status"] not in STATUSES:
            raise ValueError(
                f"{name}: row {i}: status must be one of {STATUSES}, got {r['status']!r}"
            )
        if r["status"] != "ok" and (r["forward"] or r["forward_backward"]):
            raise ValueError(f"{name}: row {i} has a time although its status is {r['status']!r}")


# ---- text


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
    for which, label in zip(PASSES, ("fwd", "bwd", "fwd+bwd"), strict=True):
        if r[which]:
            f = r[which]
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


def _cell(value: float | None, form: str = "{:.3g}") -> str:
    return "" if value is None else form.format(value)


def markdown(document: dict) -> str:
    """The table of a document, with its metadata above and what was not timed below."""
    meta, roof = document["meta"], document["roofline"]
    out = [
        f"# Benchmark: {meta['device']}",
        "",
        f"Commit {commit(meta)}, {meta['date']}, {meta['threads']} threads. "
        + ", ".join(f"{k} {v}" for k, v in meta["versions"].items())
        + ".",
        "",
        f"Measured roofline: {roofline_text(roof)}.",
        "",
    ]
    if not document["complete"]:
        out += ["The run was interrupted: rows are missing.", ""]
    for text in summary_lines(document):
        out += [text, ""]
    out += [
        "Times are medians [p20, p80] in ms over interleaved rounds; `*` marks what `auto` takes; "
        "GB/s, "
        "TFLOP/s and % of roofline are of forward + backward (forward, where there is no "
        "backward).",
        "",
    ]
    on_cuda = meta["device_type"] == "cuda"
    head = [
        "op",
        "case",
        "dtype",
        "provider",
        "contract",
        "forward",
        "backward",
        "forward + backward",
        "GB/s",
        "TFLOP/s",
        "% roofline",
        "over eager",
        "over compile",
        *(["host us", "peak MiB"] if on_cuda else []),
    ]
    out += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    others = []
    for r in document["rows"]:
        if r["status"] != "ok":
            others.append(r)
            if r["status"] == "unavailable":
                continue
        f = r["forward_backward"] or r["forward"] or {}
        times = [
            f"{r[p]['median_ms']:.4g} [{r[p]['p20_ms']:.4g}, {r[p]['p80_ms']:.4g}]" if r[p] else ""
            for p in PASSES
        ]
        held = {"ok": "beyond" if beyond(r) else r["contract"], "failed": "FAILED"}.get(
            r["status"], "error"
        )
        cells = [
            r["op"],
            r["case"],
            r["dtype"],
            r["provider"] + ("*" if r["auto"] else ""),
            held,
            *times,
            _cell(f.get("gb_per_s")),
            _cell(f.get("tflop_per_s")),
            _cell(f.get("roofline_percent"), "{:.0f}"),
            _cell(speedup(r, "eager"), "{:.2f}"),
            _cell(speedup(r, "compile"), "{:.2f}"),
        ]
        if on_cuda:
            cells += [_cell(f.get("host_us"), "{:.0f}"), _cell(r["peak_mib"], "{:.0f}")]
        out.append("| " + " | ".join(cells) + " |")
    if marked := [r for r in document["rows"] if beyond(r)]:
        out += [
            "",
            "Beyond the contract, and timed as a baseline:",
            "",
            *(f"- {' '.join(key(r))}: {r['contract']}" for r in marked),
        ]
    if others:
        out += ["", "Not timed:", ""]
        grouped: dict[tuple, list[str]] = {}
        for r in others:
            group = (r["op"], r["provider"], r["status"], r["reason"])
            grouped.setdefault(group, []).append(f"{r['case']} {r['dtype']}")
        for (op, provider, status, reason), where in grouped.items():
            out.append(f"- {op} {provider}, {status}: {reason} ({', '.join(where)})")
    return "\n".join(out) + "\n"


def roofline_text(roof: dict) -> str:
    flops = ", ".join(f"{d} {f / 1e12:.3g} TFLOP/s" for d, f in roof["flops_per_second"].items())
    return f"copy {roof['copy_bytes_per_second'] / 1e9:.1f} GB/s; matmul {flops}"


def summary_lines(document: dict) -> list[str]:
    """The geometric means, in words."""
    out = []
    for base in ("eager", "compile"):
        found = document["summary"][f"over_{base}"]
        parts = [f"{dtype} {v['geomean']:.2f}x" for dtype, v in found.items() if v["geomean"]]
        if parts:
            out.append(
                f"Forward + backward of `auto` over {base}, geometric mean over ops: "
                f"{', '.join(parts)}."
            )
    if left := document["summary"]["left_out"]:
        out.append("Left out of the means: " + "; ".join(left) + ".")
    return out


# ---- the picture

COLOURS = {
    "torch": "#c9c9c9",
    "compile": "#8c8c8c",
    "liger": "#e0a458",
    "cpp": "#2a6f97",
    "triton": "#2a6f97",
}
MORE_COLOURS = ("#468f6b", "#8a5a9e", "#b5534c")


def plotted(rows: Iterable[dict]) -> list[dict]:
    return [
        r for r in rows if r["status"] == "ok" and r["provider"] != "eager" and speedup(r, "eager")
    ]


def plot(document: dict, path: pathlib.Path) -> None:
    """Speed-up over eager as bars: a panel for each dtype, a block for each op, its geometric mean
    on top.

    The mean over all ops is drawn for providers that have every op in that dtype.
    """
    import math

    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows, meta = plotted(document["rows"]), document["meta"]
    dtypes = list(dict.fromkeys(r["dtype"] for r in rows))
    names = list(dict.fromkeys(r["provider"] for r in rows))
    order = [n for n in BASELINES if n in names]
    order += [n for n in names if n not in BASELINES]
    extra = iter(MORE_COLOURS * 5)
    colour = {n: COLOURS.get(n) or next(extra) for n in order}
    hatched = {key(r) for r in rows if beyond(r)}
    ops: dict[str, list[str]] = {}
    for r in rows:
        if r["case"] not in ops.setdefault(r["op"], []):
            ops[r["op"]].append(r["case"])
    value: dict[tuple, float | None] = {key(r): speedup(r, "eager") for r in rows}
    labels = [("all ops", None)] if len(ops) > 1 else []  # (op, case); case None: a geometric mean
    for op, cases in ops.items():
        labels += [(op, None), *((op, case) for case in cases)]
    for dtype in dtypes:
        for name in order:
            for op, cases in ops.items():
                found = [value.get((op, case, dtype, name)) for case in cases]
                value[op, None, dtype, name] = geomean(v for v in found if v)
            means = [value[op, None, dtype, name] for op in ops]
            value["all ops", None, dtype, name] = geomean(means) if all(means) else None

    bar = 0.8 / len(order)
    places, y = {}, 0.0
    for label in labels:
        y += 0.55 if label[1] is None and places else 0.0  # air between ops
        places[label] = y
        y += 1.0
    found = [v for v in value.values() if v]
    low, high = min(0.8, *found), max(1.25, *found)
    left, right = math.log2(low) - 0.15, math.log2(high) + 0.7

    size = 2.6 + 4.6 * len(dtypes), 1.9 + (0.17 * len(order) + 0.10) * y
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for panel, dtype in zip(panels, dtypes, strict=True):
        for (op, case), place in places.items():
            for i, name in enumerate(order):
                v = value.get((op, case, dtype, name))
                if v is None:
                    continue
                at = place + (i - (len(order) - 1) / 2) * bar
                panel.barh(
                    at,
                    math.log2(v),
                    height=0.92 * bar,
                    color=colour[name],
                    linewidth=0,
                    zorder=2,
                    edgecolor="white",
                    hatch="////" if (op, case, dtype, name) in hatched else None,
                )
                panel.text(
                    max(math.log2(v), 0) + 0.04,
                    at,
                    f"{v:.2f}",
                    va="center",
                    fontsize=7,
                    weight="bold" if case is None else "normal",
                    zorder=3,
                )
            if case is None:
                panel.axhspan(place - 0.5, place + 0.5, color="#eef3f6", zorder=0, linewidth=0)
        panel.axvline(0, color="black", linewidth=1, zorder=4)
        step = 0.5 if right - left < 2.5 else 1.0
        ticks = [t * step for t in range(math.ceil(left / step), math.floor(right / step) + 1)]
        panel.set_xticks(ticks, [f"{2**t:.3g}x" for t in ticks])
        panel.set_xlim(left, right)
        panel.set_ylim(y - 0.35, -0.65)
        panel.set_title(dtype, fontsize=11)
        panel.set_xlabel("speed-up over eager PyTorch (log scale)")
        panel.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=1)
        panel.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
    panels[0].set_yticks(
        list(places.values()), [f"{op}: geometric mean" if c is None else c for op, c in places]
    )
    for text, (_, case) in zip(panels[0].get_yticklabels(), places, strict=True):
        text.set_fontsize(9 if case is None else 8)
        text.set_fontweight("bold" if case is None else "normal")
    figure.suptitle(
        f"Forward + backward against eager PyTorch\n{meta['device']}, {meta['threads']} threads, "
        f"torch {meta['versions']['torch']}\ncommit {commit(meta)}, {meta['date'][:10]}",
        fontsize=11,
    )
    shown = {"compile": "torch.compile", "torch": "torch's fused op", "liger": "Liger-Kernel"}
    handles = [
        Patch(color=colour[n], label=shown.get(n, n if n in BASELINES else f"tilewright {n}"))
        for n in order
    ]
    handles.append(Line2D([], [], color="black", linewidth=1, label="eager = 1"))
    if hatched:
        handles.append(
            Patch(
                facecolor="#8c8c8c",
                edgecolor="white",
                hatch="////",
                linewidth=0,
                label="beyond the numerics contract",
            )
        )
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# ---- two runs


def compare(before: dict, after: dict, threshold: float = 0.05) -> tuple[str, list[str]]:
    """The text that compares two documents row by row, and the regressions among them.

    A change is significant if the ranges p20 to p80 do not overlap. A regression is a significant
    slow-down of more than `threshold`, or a row that had a time and now fails. Baselines are shown,
    but a slower one is not a regression of tilewright's.
    """
    if threshold < 0:
        raise ValueError(f"threshold must be at least 0, got {threshold}")
    out, regressions = [], []
    if before["meta"]["device"] != after["meta"]["device"]:
        out.append(
            f"note: different devices: {before['meta']['device']} and {after['meta']['device']}"
        )
    out.append(
        f"before: commit {commit(before['meta'])}, {before['meta']['date']}; "
        f"after: commit {commit(after['meta'])}, {after['meta']['date']}; a ratio above 1 is slower"
    )
    old, new = ({key(r): r for r in d["rows"]} for d in (before, after))
    for k in [*old, *(k for k in new if k not in old)]:
        a, b, name = old.get(k), new.get(k), " ".join(k)
        ours = k[3] not in BASELINES
        if a is None or b is None:
            out.append(f"{name}: only {'after' if a is None else 'before'}")
            continue
        if a["status"] != "ok" or b["status"] != "ok":
            if a["status"] != b["status"]:
                out.append(
                    f"{name}: {a['status']} before, {b['status']} after: "
                    f"{b['reason'] or a['reason']}"
                )
            if a["status"] == "ok" and ours:
                regressions.append(f"{name}: {b['status']}: {b['reason']}")
            continue
        for which in PASSES:
            x, y = a[which], b[which]
            if x is None or y is None:
                continue
            ratio = y["median_ms"] / x["median_ms"]
            significant = y["p20_ms"] > x["p80_ms"] or y["p80_ms"] < x["p20_ms"]
            worse = significant and ratio > 1 + threshold
            if worse:
                mark = "  REGRESSION" if ours else "  baseline slower"
            elif significant:
                mark = "  faster" if ratio < 1 - threshold else ""
            else:
                mark = "  not significant"
            out.append(
                f"{name} {which}: {x['median_ms']:.4g} -> {y['median_ms']:.4g} ms, "
                f"ratio {ratio:.3f}{mark}"
            )
            if worse and ours:
                regressions.append(out[-1])
    out.append(f"\n{len(regressions)} regression(s) beyond {threshold:.0%}")
    return "\n".join(out), regressions
