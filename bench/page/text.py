"""Formats numbers, tables and origins for the generated pages."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from bench.page.raw import Source
from tilewright.bench import report

COMMAND = "python -m bench report"
TITLES: dict[str, str] = dict(
    zip(report.PASSES, ("forward", "backward", "forward + backward"), strict=False)
)
# The order of columns, independent of the order of results.
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64")
UNITS = {
    "roofline_percent": "% of roof",
    "matmul_percent": "% of the measured matrix product",
    "tflop_per_s": "TFLOP/s",
    "gb_per_s": "GB/s",
    "median_ms": "ms",
    "peak_mib": "MiB",
}


def in_order(dtypes: Iterable[str]) -> list[str]:
    """Each dtype once, in the order of `DTYPES`; unknown ones come last, by name."""
    return sorted(set(dtypes), key=lambda d: (DTYPES.index(d) if d in DTYPES else len(DTYPES), d))


def number(value: float | None) -> str:
    """Three significant digits, without an exponent where that is legible."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "infinite"
    if value == 0 or not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3g}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def origins(sources: Iterable[Source]) -> list[str]:
    """Commit and date of results, each once, the newest first."""
    ordered = sorted(sources, key=lambda s: s.age, reverse=True)
    return list(dict.fromkeys(f"{s.commit}, {s.day}" for s in ordered))


def table(
    head: Sequence[str], rows: Sequence[tuple[Sequence[object], Iterable[Source]]]
) -> list[str]:
    """A table with each row's commit and date: below the table if all agree, else in a column."""
    named = [(list(cells), "; ".join(origins(sources))) for cells, sources in rows]
    empty = [i for i in range(len(head)) if all(cells[i] in ("", None) for cells, _ in named)]
    agree = len({origin for _, origin in named}) == 1
    named = [([*cells, *([] if agree else [origin])], origin) for cells, origin in named]
    columns = [*head] if agree else [*head, "measured at"]
    shown = [h for i, h in enumerate(columns) if i not in empty]
    out = ["| " + " | ".join(shown) + " |", "|" + "---|" * len(shown)]
    for cells, _ in named:
        out.append("| " + " | ".join(cell(c) for i, c in enumerate(cells) if i not in empty) + " |")
    return [*out, "", *([f"Measured at {named[0][1]}.", ""] if agree and named[0][1] else [])]


def listed(by_reason: dict[str, list[str]]) -> list[str]:
    """A list of reasons, each with the cases that it applies to."""
    lines = [
        f"- {cell(reason)}: {', '.join(dict.fromkeys(where))}"
        for reason, where in by_reason.items()
    ]
    return [*lines, ""] if lines else []


PACKAGED = "tilewright.bench"
WORKERS = ("--until", "--group", "--worker", "--of")  # options of `suite`'s own processes


def command(meta: dict[str, Any]) -> str:
    """The user's command line, without the folders of its machine."""
    argv = meta.get("argv") or []
    shown = [
        a
        for before, a in zip(["", *argv], argv, strict=False)
        if a not in WORKERS and before not in WORKERS
    ]
    shown = [f".../{pathlib.PurePath(a).name}" if a.startswith("/") else a for a in shown]
    # Other commands were `tilewright.bench`'s when they were run, and are no more.
    module = "bench" if argv[:1] and argv[0] in ("suite", "layouts", "end-to-end") else PACKAGED
    return " ".join([f"python -m {module}", *shown]) if shown else ""
