"""Lists the sources of the pages: counts, tuned constants, training runs, raw files."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from bench.page import raw
from bench.page.raw import Entry, Raw, Source
from bench.page.text import cell, command, count, number, table
from tilewright.bench.timing import geomean
from tilewright_lab.gate.compilers import BUDGETS


def counts_of(triton: str) -> pathlib.Path:
    """The file of counts of kernels compiled by this version of Triton."""
    return BUDGETS / f"counts-triton-{triton}.json"


def counted() -> list[str]:
    """The memory traffic and work of kernels, counted by running their PTX on a CPU."""

    def times(counts, kind):
        requested, least = counts["requested"][kind], counts["least"][kind]
        return f"{requested:,} ({requested / least:.2f})" if least else "0"

    latest = max(
        BUDGETS.glob(counts_of("*").name),
        key=lambda p: [int(n) for n in re.findall(r"\d+", p.stem)],
    )
    head = [
        "op",
        "kernel",
        "sectors read",
        "written",
        "passes over shared memory",
        "bank conflicts",
        "instructions",
        "multiply-adds",
    ]
    rows = [
        [
            f"`{name}`",
            f"`{kernel}`",
            times(counts, "read"),
            times(counts, "written"),
            f"{counts['wavefronts']:,}",
            f"{counts['conflicts']:,}",
            f"{sum(counts['issued'].values()):,}",
            f"{counts['products']:,}",
        ]
        for name, kernels in json.loads(latest.read_text()).items()
        for kernel, counts in kernels.items()
    ]
    return [
        "## Counts",
        "",
        "Memory traffic and work of the Triton kernels on aligned bfloat16 inputs, counted by "
        "running their PTX for "
        "sm_90 on a CPU (tests/ptx/test_triton_ptx.py); these are not times. A sector is 32 bytes of "
        "global memory, "
        "counted once per warp instruction that accesses it; in parentheses, relative to the "
        "distinct sectors that "
        "each program accesses. A ratio above 1 means that several instructions of a program "
        "access the same sector, "
        "which L1 serves: scales and tables that many threads read, and rows of which a thread "
        "loads more than "
        "16 bytes. Instructions are PTX instructions per warp.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def tuned(results: Raw) -> list[str]:
    out = ["## Tuned launch configurations", ""]
    launches: dict[tuple, list[Entry]] = {}
    for e in results.of("tuned"):
        launches.setdefault((e.source.device[1], e.op, e.case), []).append(e)
    rows = []
    for (device, op, launch), entries in sorted(launches.items()):
        gains = [
            e.data["heuristic_us"] / e.data["median_us"]
            for e in entries
            if e.data["median_us"] and e.data["heuristic_us"]
        ]
        other = sum(e.data["config"] != e.data["heuristic"] for e in entries)
        rows.append(
            (
                [
                    device,
                    f"`{op}`",
                    launch,
                    len(entries),
                    other,
                    *map(
                        number, (geomean(gains), min(gains, default=None), max(gains, default=None))
                    ),
                ],
                [e.source for e in entries],
            )
        )
    if not rows:
        return [*out, "None are committed: every launch uses its heuristic.", ""]
    return [
        *out,
        "The speedup of each launch with its tuned configuration over the heuristic's.",
        "",
        *table(
            ["device", "op", "launch", "keys", "not the heuristic's", "mean", "min", "max"], rows
        ),
    ]


def training(raw_results: Raw, results: str) -> list[str]:
    lines = []
    for folder in raw_results.folders:
        if folder.kind == "training":
            links = ", ".join(f"[{f}]({results}/{folder.name}/{f})" for f in folder.files)
            lines.append(f"- {folder.name}: {links}")
    if not lines:
        return []
    return [
        "## Training runs",
        "",
        "Complete training runs; commands, commits and dates are in their README.",
        "",
        *lines,
        "",
    ]


YES_NO: dict[Any, str] = {True: "yes", False: "no"}


def files(raw_results: Raw, results: str) -> list[str]:
    out = [
        "## Raw files",
        "",
        "Every result, shown above or not. Where several cover the same row, the newest is shown. "
        "Load is the "
        "machine's highest one-minute load average at the start or end, including the benchmark "
        "itself. The command of a suite is that of its last call, which packs what all calls "
        "measured.",
        "",
        "| folder | kind | device | command | date | commit | complete | local changes | load |",
        "|" + "---|" * 9,
    ]
    for folder in sorted(raw_results.folders, key=_folder_order, reverse=True):
        if folder.kind == "training":
            continue
        sources = sorted(folder.sources, key=lambda s: s.age)
        dates = list(dict.fromkeys(s.meta["date"] for s in sources))
        cells = [
            f"[{folder.name}]({results}/{folder.name})",
            folder.kind if sources else "not read",
            _each(s.meta["device"] for s in sources),
            _each(f"`{c}`" for s in _starts(sources) if (c := command(s.meta))),
            dates[0] + (f" to {dates[-1]}" if len(dates) > 1 else "") if dates else "",
            _each(s.commit.removesuffix(" + local changes") for s in sources),
            _complete(folder),
            _each(YES_NO.get(s.meta.get("dirty"), "unknown") for s in sources),
            number(
                max((load for s in sources if (load := _load(s.meta)) is not None), default=None)
            ),
        ]
        out.append("| " + " | ".join(map(cell, cells)) + " |")
    return [*out, ""]


def _starts(sources: list[Source]) -> list[Source]:
    """Sources whose command is the user's: for a suite that of its summary, since its units record
    the workers' commands.
    """
    return [s for s in sources if s.path.endswith("/suite")] or sources


def _load(meta: dict[str, Any]) -> float | None:
    loads = [
        averages[0] for n in ("load_average", "load_average_at_end") if (averages := meta.get(n))
    ]
    return max(loads, default=None)


def _folder_order(folder: raw.Folder) -> tuple:
    return max((s.when.isoformat() for s in folder.sources), default=""), folder.name


def _each(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _complete(folder: raw.Folder) -> str:
    unreached = [n for n, u in folder.units.items() if u["status"] == "not reached"]
    answer = {True: "yes", False: "no", None: ""}[folder.complete]
    return (
        f"{answer}: {len(unreached)} of {count(len(folder.units), 'unit')} not reached"
        if unreached
        else answer
    )
