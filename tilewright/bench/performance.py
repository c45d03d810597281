"""Writes docs/performance.md, and its pictures, from committed raw results: nothing there is typed
by hand.

    python -m tilewright.bench report [--results bench_results] [--out docs/performance.md]
    [--check]

The page depends on the raw results, on bench_results/reasons.toml, on the tables of tuned constants
and on the registry (which ops, cases and goals there are), and on nothing else: not on the day, the
machine or the checkout. Of several results for the same device, op, case, dtype and provider the
newest is shown. A ratio is of two rows of the same interleaved rounds, never of two runs.

Exit code: 0; 1 with --check if the page or a picture is not what would be written, or a case in
which `auto` is behind has no reason; 2 if a file cannot be read.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright import platform, selection
from tilewright.bench import raw, report
from tilewright.bench.pictures import Picture, is_drawn
from tilewright.bench.providers import BASELINES
from tilewright.bench.raw import Entry, Group, Raw, Source, newest
from tilewright.bench.timing import geomean
from tilewright.registry import Goal, Op

COMMAND = "python -m tilewright.bench report"
TITLES = dict(zip(report.PASSES, ("forward", "backward", "forward + backward"), strict=False))
UNITS = {
    "roofline_percent": "% of roof",
    "matmul_percent": "% of the measured matrix product",
    "tflop_per_s": "TFLOP/s",
    "gb_per_s": "GB/s",
    "median_ms": "ms",
    "peak_mib": "MiB",
}
NO_REASON = "no reason known yet"


# ---- text


def number(value: float | None) -> str:
    """Three significant digits, without an exponent where that can be read."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "infinite"
    if value == 0 or not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3g}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def origins(sources: Iterable[Source]) -> list[str]:
    """Commit and date of results, each once, the newest first."""
    ordered = sorted(sources, key=lambda s: s.age, reverse=True)
    return list(dict.fromkeys(f"{s.commit}, {s.day}" for s in ordered))


def table(
    head: Sequence[str], rows: Sequence[tuple[Sequence[object], Iterable[Source]]]
) -> list[str]:
    """A table whose every row says from which commit and date it is: below it if all agree,
    else in a column.
    """
    named = [(list(cells), "; ".join(origins(sources))) for cells, sources in rows]
    empty = [i for i in range(len(head)) if all(cells[i] in ("", None) for cells, _ in named)]
    agree = len({origin for _, origin in named}) == 1
    named = [([*cells, *([] if agree else [origin])], origin) for cells, origin in named]
    shown = [
        h for i, h in enumerate([*head, *([] if agree else ["measured at"])]) if i not in empty
    ]
    out = ["| " + " | ".join(shown) + " |", "|" + "---|" * len(shown)]
    for cells, _ in named:
        out.append("| " + " | ".join(cell(c) for i, c in enumerate(cells) if i not in empty) + " |")
    return [*out, "", *([f"Measured at {named[0][1]}.", ""] if agree and named[0][1] else [])]


def listed(by_reason: dict[str, list[str]]) -> list[str]:
    """Reasons with what they hold for."""
    lines = [
        f"- {cell(reason)}: {', '.join(dict.fromkeys(where))}"
        for reason, where in by_reason.items()
    ]
    return [*lines, ""] if lines else []


WORKERS = ("--until", "--group", "--worker", "--of")  # what `suite` tells its own processes


def command(meta: dict[str, Any]) -> str:
    """The command line as it was given, without the folders of the machine that it ran on."""
    argv = meta.get("argv") or []
    given = [
        a
        for before, a in zip(["", *argv], argv, strict=False)
        if a not in WORKERS and before not in WORKERS
    ]
    given = [f".../{pathlib.PurePath(a).name}" if a.startswith("/") else a for a in given]
    return " ".join(["python -m tilewright.bench", *given]) if given else ""


# ---- which row is the one, and what it is compared with


@dataclass(frozen=True)
class Pair:
    """`auto` and another provider in the same rounds; `which` is the pass: forward + backward,
    else forward.
    """

    group: Group
    other: dict[str, Any]
    which: str

    @property
    def auto(self) -> dict[str, Any]:
        return self.group.auto

    @property
    def ratio(self) -> float:
        """The other's time over that of `auto`: above 1, `auto` is ahead."""
        return self.other[self.which]["median_ms"] / self.auto[self.which]["median_ms"]

    @property
    def overlap(self) -> bool:
        a, b = self.auto[self.which], self.other[self.which]
        return b["p80_ms"] >= a["p20_ms"] and a["p80_ms"] >= b["p20_ms"]


def pair(group: Group, provider: str) -> Pair | None:
    """None unless both have a time."""
    auto, other = group.auto, group.rows[provider]
    if auto["status"] != "ok" or other["status"] != "ok":
        return None
    for which in ("forward_backward", "forward"):
        if auto[which] and other[which]:
            return Pair(group, other, which)
    return None


def _tried(row: dict[str, Any] | None) -> bool:
    return row is not None and row["status"] != "unavailable"


@dataclass
class Device:
    """What one device has measured: the newest of each, and how `auto` compares.

    auto: the newest row of `auto` for each (op, case, dtype), with its group, whatever came of it.
    pairs: against each provider, in the newest rounds that had both, with `auto` the same
        implementation as in its newest row; none where that has no time.
    """

    kind: str
    name: str
    groups: list[Group]
    auto: dict[tuple[str, str, str], Group] = field(init=False)
    pairs: dict[tuple[str, str, str], dict[str, Pair]] = field(init=False)

    def __post_init__(self):
        self.groups = sorted(self.groups, key=_registry_order)
        tried = [g for g in self.groups if _tried(g.auto)]
        self.auto = newest(tried, lambda g: (g.op, g.case, g.dtype))
        self.pairs = {
            name: self._pairs(name, tried)
            for name, g in self.auto.items()
            if g.auto["status"] == "ok"
        }

    def _pairs(self, name: tuple[str, str, str], tried: list[Group]) -> dict[str, Pair]:
        taken = self.auto[name].auto["provider"]
        same = [g for g in tried if (g.op, g.case, g.dtype) == name and g.auto["provider"] == taken]
        known = dict.fromkeys(p for g in same for p in g.rows)
        chosen = {
            p: newest(
                [g for g in same if _tried(g.rows.get(p)) and not g.rows[p]["auto"]], lambda g: 0
            )
            for p in known
        }
        found = {p: pair(g[0], p) for p, g in chosen.items() if g}
        return {p: found[p] for p in sorted(found, key=_provider_order) if found[p]}

    @property
    def timed(self) -> dict[tuple[str, str, str], Group]:
        return {n: g for n, g in self.auto.items() if g.auto["status"] == "ok"}

    @property
    def title(self) -> str:
        return f"{self.name} ({self.kind})"

    @property
    def capability(self) -> str | None:
        """The compute capability, as its results say."""
        return next(
            (g.source.meta["capability"] for g in self.groups if g.source.meta.get("capability")),
            None,
        )

    def best_peer(self, name: tuple[str, str, str]) -> Pair | None:
        """The fastest provider that is neither eager, nor its compilation, nor one of
        tilewright's own.
        """
        found = [
            p for provider, p in self.pairs.get(name, {}).items() if _is_peer(name[0], provider)
        ]
        return min(found, key=lambda p: p.ratio, default=None)

    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(dtype for _, _, dtype in self.auto))


def _is_peer(op: str, provider: str) -> bool:
    if provider in ("eager", "compile"):
        return False
    table = selection.operations()
    return provider in BASELINES or op not in table or provider not in table[op].names()


def _provider_order(name: str) -> tuple[int, str]:
    return (BASELINES.index(name) if name in BASELINES else len(BASELINES)), name


def _registry_order(group: Group) -> tuple:
    """The registry's order of ops and cases; what it no longer has comes last, by name."""
    ops = selection.operations()
    op = ops.get(group.op)
    cases = [c.name for c in op.cases] if op else []
    return (
        list(ops).index(group.op) if op else len(ops),
        group.op,
        cases.index(group.case) if group.case in cases else len(cases),
        group.case,
    )


# ---- why a case is behind


@dataclass(frozen=True)
class Reason:
    """One entry of reasons.toml: glob patterns, and the sentence. A pattern that is not given
    fits all.
    """

    reason: str
    op: str = "*"
    case: str = "*"
    dtype: str = "*"
    against: str = "*"
    device: str = "*"

    def fits(self, p: Pair) -> bool:
        named = {
            "op": p.group.op,
            "case": p.group.case,
            "dtype": p.group.dtype,
            "against": p.other["provider"],
            "device": p.group.source.device[1],
        }
        return all(fnmatch.fnmatchcase(value, getattr(self, name)) for name, value in named.items())


def read_reasons(path: pathlib.Path) -> list[Reason]:
    """The entries, the first that fits counts; [] without a file. Raises ValueError for a
    malformed one.
    """
    if not path.exists():
        return []
    try:
        document = tomllib.loads(path.read_text())
        if unknown := set(document) - {"reason"}:
            raise ValueError(f"unknown {sorted(unknown)}; it holds [[reason]] entries")
        found = [Reason(**entry) for entry in document.get("reason", [])]
        for entry in found:
            if not all(isinstance(v, str) and v.strip() for v in vars(entry).values()):
                raise ValueError(f"every value must be a string, got {vars(entry)}")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    return found


def behind(device: Device) -> list[Pair]:
    """Every provider that is faster than `auto`, the furthest ahead first."""
    found = [p for pairs in device.pairs.values() for p in pairs.values() if p.ratio < 1]
    return sorted(found, key=lambda p: (p.ratio, report.key(p.other)))


def why(p: Pair, reasons: Sequence[Reason]) -> str:
    """What was measured to be so, then what is known."""
    said = []
    if p.overlap:
        ranges = " and ".join(_range(r[p.which]) for r in (p.auto, p.other))
        said.append(f"Within spread: p20 to p80 overlap ({ranges} ms).")
    if report.beyond(p.other):
        said.append("It breaks the numerics contract, and is timed within the slack for baselines.")
    if found := next((r.reason for r in reasons if r.fits(p)), None):
        said.append(found)
    return " ".join(said) if said and (p.overlap or found) else " ".join([*said, NO_REASON])


def _range(figures: dict[str, Any]) -> str:
    return f"{number(figures['p20_ms'])} to {number(figures['p80_ms'])}"


# ---- sections of one device


def headline(device: Device) -> list[str]:
    """Geometric means, over an op's cases and then over ops, as in report.summary."""
    dtypes = [*device.dtypes(), "all"]
    rows = []
    for provider in sorted(
        {p for pairs in device.pairs.values() for p in pairs}, key=_provider_order
    ):
        cells, used = [], []
        for dtype in dtypes:
            pairs = [
                p[provider]
                for (_, _, d), p in device.pairs.items()
                if dtype in (d, "all") and provider in p
            ]
            ops = {
                op: geomean(p.ratio for p in pairs if p.group.op == op)
                for op in {p.group.op for p in pairs}
            }
            used += [p.group.source for p in pairs]
            cells.append(
                f"{number(geomean(ops[o] for o in sorted(ops)))} ({count(len(ops), 'op')}, "
                f"{count(len(pairs), 'case')})"
                if pairs
                else ""
            )
        rows.append(([_label(provider), *cells], used))
    if not rows:
        return []
    caution = (
        (
            f" In {len(back)} of these comparisons an older result has `auto` behind; they are "
            f"listed with those in "
            "which it is not ahead."
        )
        if (back := taken_back(device))
        else ""
    )
    return [
        "### Headline",
        "",
        "How many times as fast as each other provider `auto` is, forward + backward (forward, "
        "where an op has no "
        "backward): geometric mean over an op's cases, then over ops. Above 1, `auto` is faster."
        + caution,
        "",
        *table(["over", *dtypes], rows),
        *by_op(device),
    ]


def _label(provider: str) -> str:
    return {"compile": "torch.compile", "torch": "PyTorch's own fused op"}.get(provider, provider)


def by_op(device: Device) -> list[str]:
    dtypes = device.dtypes()
    head = ["op", *(f"{over}, {d}" for over in ("eager", "compile", "best peer") for d in dtypes)]
    rows = []
    for op in dict.fromkeys(op for op, _, _ in device.pairs):
        cells, used = [f"`{op}`"], []
        for over in ("eager", "compile", None):
            for dtype in dtypes:
                names = [n for n in device.pairs if n[0] == op and n[2] == dtype]
                pairs = [device.pairs[n].get(over) if over else device.best_peer(n) for n in names]
                used += [p.group.source for p in pairs if p]
                cells.append(number(geomean(p.ratio for p in pairs if p)))
        rows.append((cells, used))
    return table(head, rows)


def roofs(device: Device, found: Raw, plots: list[Picture]) -> list[str]:
    # Every file of a suite repeats its roof; the oldest is that of the measurement.
    once: dict[tuple[str, str], Entry] = {}
    for e in sorted(found.of("roofline", (device.kind, device.name)), key=lambda e: e.source.age):
        once.setdefault((e.source.folder, str(sorted(e.data.items()))), e)
    entries = list(reversed(once.values()))
    if not entries:
        return []
    dtypes = list(dict.fromkeys(d for e in entries for d in e.data["flops"]))
    rows = [
        (
            [
                number(e.data["copy"] / 1e9),
                *(number(_tera(e.data["flops"].get(d))) for d in dtypes),
                _clocks(e.source.meta),
            ],
            [e.source],
        )
        for e in entries
    ]
    return [
        "### Measured roofs",
        "",
        *table(["copy, GB/s", *(f"matmul {d}, TFLOP/s" for d in dtypes), "clocks before"], rows),
        *pictures_of(plots, "roofline"),
    ]


def _tera(value: float | None) -> float | None:
    return None if value is None else value / 1e12


def _clocks(meta: dict[str, Any]) -> str:
    units = {"sm_mhz": "MHz SM", "memory_mhz": "MHz memory", "power_w": "W", "temperature_c": "°C"}
    return ", ".join(
        f"{number(v)} {units.get(n, n)}"
        for n, v in (meta.get("clocks") or {}).items()
        if v is not None
    )


def versions(device: Device, found: Raw) -> list[str]:
    sets: dict[str, list[Source]] = {}
    for folder in found.folders:
        for source in folder.sources:
            if source.device == (device.kind, device.name):
                text = ", ".join(f"{k} {v}" for k, v in source.meta.get("versions", {}).items())
                threads = source.meta.get("threads")
                sets.setdefault(f"{text}; {threads} threads" if threads else text, []).append(
                    source
                )
    lines = [
        f"- {text} ({', '.join(sorted({s.folder for s in sources}))})"
        for text, sources in sets.items()
    ]
    return ["### Versions", "", *lines, ""]


def auto_rows(device: Device) -> list[str]:
    out = [
        "### What `auto` takes",
        "",
        "Medians [p20, p80] in ms. Rate and share of the measured roof are of forward + backward "
        "(forward, where "
        "there is no backward); the rate is in the unit that bounds the case. Kernels are the "
        "time on the device "
        "without what lies between them, alone is a call on an idle device, the host's gaps in "
        "it. The last "
        "columns are how many times "
        "as fast as the other `auto` is, in older rounds where the newest had no such row.",
        "",
    ]
    for op in dict.fromkeys(op for op, _, _ in device.timed):
        names = [n for n in device.timed if n[0] == op]
        rows = [(_auto_cells(device, n), [device.timed[n].source]) for n in names]
        head = [
            "case",
            "dtype",
            "`auto` is",
            *(TITLES.get(p, p) for p in report.PASSES),
            "kernels, ms",
            "alone, ms",
            "rate",
            "% of roof",
            "% of roof, large copy",
            "peak MiB",
            "eager",
            "compile",
            "best peer",
        ]
        out += [f"#### `{op}`", "", *table(head, rows)]
    return out


def _auto_cells(device: Device, name: tuple[str, str, str]) -> list[str]:
    group = device.timed[name]
    row, pairs, peer = group.auto, device.pairs[name], device.best_peer(name)
    times = [
        f"{number(f['median_ms'])} [{number(f['p20_ms'])}, {number(f['p80_ms'])}]" if f else ""
        for f in (row.get(p) for p in report.PASSES)
    ]
    main = row["forward_backward"] or row["forward"] or {}
    over = [number(pairs[b].ratio) if b in pairs else "" for b in ("eager", "compile")]
    return [
        name[1],
        name[2],
        row["provider"],
        *times,
        number(main.get("kernel_ms")),
        number(main.get("op_ms")),
        _rate(main, group.roofline, name[2]),
        number(main.get("roofline_percent")),
        number(main.get("large_roofline_percent")),
        number(row.get("peak_mib")),
        *over,
        f"{number(peer.ratio)} ({peer.other['provider']})" if peer else "",
    ]


def _rate(figures: dict[str, Any], roof: dict[str, Any], dtype: str) -> str:
    """In GB/s or TFLOP/s, whichever is nearer to its roof."""
    gb, tflop = figures.get("gb_per_s"), figures.get("tflop_per_s")
    peak = roof["flops_per_second"].get(dtype)
    if tflop and (
        not gb or (peak and tflop * 1e12 / peak > gb * 1e9 / roof["copy_bytes_per_second"])
    ):
        return f"{number(tflop)} TFLOP/s"
    return f"{number(gb)} GB/s" if gb else ""


def not_ahead(device: Device, reasons: Sequence[Reason]) -> list[str]:
    out = ["### Where it is not ahead", ""]
    found = behind(device)
    if not device.pairs:
        return []
    compared = sum(map(len, device.pairs.values()))
    if not found:
        return [
            *out,
            f"In none of the {compared} comparisons is another provider faster than `auto`.",
            "",
            *older(device, reasons),
        ]
    rows = [
        (
            [
                f"`{p.group.op}`",
                p.group.case,
                p.group.dtype,
                p.auto["provider"],
                p.other["provider"],
                number(p.ratio),
                TITLES[p.which],
                f"{number(p.auto[p.which]['median_ms'])}",
                f"{number(p.other[p.which]['median_ms'])}",
                why(p, reasons),
            ],
            [p.group.source],
        )
        for p in found
    ]
    return [
        *out,
        f"Every comparison in which another provider is faster than `auto` by the median: "
        f"{len(found)} of "
        f"{compared}. The ratio is the other's time over that of `auto`.",
        "",
        *table(
            [
                "op",
                "case",
                "dtype",
                "`auto` is",
                "against",
                "ratio",
                "pass",
                "`auto`, ms",
                "other, ms",
                "why",
            ],
            rows,
        ),
        *older(device, reasons),
    ]


def taken_back(device: Device) -> list[Pair]:
    """Older rounds in which `auto` was behind where the newest have it ahead: the newest may be
    the lucky ones.
    """
    found = []
    for group in device.groups:
        for provider, now in device.pairs.get((group.op, group.case, group.dtype), {}).items():
            same = group.auto is not None and group.auto["provider"] == now.auto["provider"]
            then = pair(group, provider) if same and provider in group.rows else None
            if then and now.ratio >= 1 > then.ratio:
                found.append(then)
    return found


def older(device: Device, reasons: Sequence[Reason]) -> list[str]:
    rows = []
    for p in taken_back(device):
        now = device.pairs[p.group.op, p.group.case, p.group.dtype][p.other["provider"]].ratio
        rows.append(
            (
                [
                    f"`{p.group.op}`",
                    p.group.case,
                    p.group.dtype,
                    p.other["provider"],
                    number(p.ratio),
                    number(now),
                    why(p, reasons),
                ],
                [p.group.source],
            )
        )
    if not rows:
        return []
    return [
        "#### Older results in which it was not ahead",
        "",
        "The newest results of these say otherwise; where the two differ much, take either with "
        "care.",
        "",
        *table(
            ["op", "case", "dtype", "against", "ratio then", "ratio in the newest", "why"], rows
        ),
    ]


def ratios(device: Device, plots: list[Picture]) -> list[str]:
    shown = pictures_of(plots, "ratios")
    return ["### Against `torch.compile` and the best peer", "", *shown] if shown else []


def checks(device: Device, found: Raw, kind: str, title: str, intro: str) -> list[str]:
    """A table of one stage of a suite: (op, implementation) by dtype, then what does not hold,
    then what cannot run.
    """
    entries = found.of(kind, (device.kind, device.name))
    entries = list(
        newest(
            entries, lambda e: (e.op, e.case, e.data["implementation"], e.data["dtype"])
        ).values()
    )
    tried = [e for e in entries if e.data["status"] != "unavailable"]
    dtypes = list(dict.fromkeys(e.data["dtype"] for e in tried))
    rows = []
    for op, implementation in dict.fromkeys(
        (e.op, e.data["implementation"]) for e in sorted(tried, key=_entry_order)
    ):
        mine = [e for e in tried if (e.op, e.data["implementation"]) == (op, implementation)]
        cells = [_held([e for e in mine if e.data["dtype"] == d]) for d in dtypes]
        rows.append(([f"`{op}`", implementation, *cells], [e.source for e in mine]))
    if not entries:
        return []
    return [
        f"### {title}",
        "",
        intro,
        "",
        *(table(["op", "implementation", *dtypes], rows) if rows else []),
        *_bad(tried),
        *_unavailable(entries),
    ]


def _entry_order(entry: Entry) -> tuple:
    names = list(selection.operations())
    return (names.index(entry.op) if entry.op in names else len(names)), entry.op


def _held(entries: list[Entry]) -> str:
    if not entries:
        return ""
    held = sum(e.data["status"] == "holds" for e in entries)
    shares = [(t["share"], t["name"], e.case) for e in entries for t in e.data["tensors"]]
    worst = max(shares, default=None)
    return f"{held} of {len(entries)}" + (
        f"; {number(worst[0])} ({worst[1]}, {worst[2]})" if worst else ""
    )


def _bad(entries: list[Entry]) -> list[str]:
    lines = [
        f"- `{e.op}` {e.case} {e.data['implementation']} {e.data['dtype']}, {e.data['status']}: "
        f"{cell(e.data['reason'])}"
        for e in entries
        if e.data["status"] in ("broken", "error")
    ]
    return ["Does not hold:", "", *lines, ""] if lines else []


def _unavailable(entries: list[Entry]) -> list[str]:
    by: dict[str, list[str]] = {}
    for e in entries:
        if e.data["status"] == "unavailable":
            by.setdefault(str(e.data["reason"]), []).append(f"`{e.op}` {e.data['implementation']}")
    return ["Not checked, with the reason:", "", *listed(by)] if by else []


def gate(device: Device) -> list[str]:
    """What the contract said on the very inputs that were timed."""
    found: dict[tuple[str, str], dict[str, list[tuple[bool, Source]]]] = {}
    broken: dict[str, list[str]] = {}
    for (op, case, dtype, provider), g in newest_rows(device).items():
        row = g.rows[provider]
        if row["contract"] in (None, "definition"):
            continue
        holds = row["contract"] == "holds"
        found.setdefault((op, provider), {}).setdefault(dtype, []).append((holds, g.source))
        if not holds:
            broken.setdefault(f"`{op}` {provider}", []).append(f"{case} {dtype}: {row['contract']}")
    if not found:
        return []
    dtypes = device.dtypes()
    rows = [
        (
            [f"`{op}`", provider, *(_of(by.get(d, [])) for d in dtypes)],
            [source for each in by.values() for _, source in each],
        )
        for (op, provider), by in found.items()
    ]
    lines = [f"- {name}: {cell('; '.join(what))}" for name, what in broken.items()]
    return [
        "### The gate before the clock",
        "",
        "In how many timed cases the numerics contract held on the inputs that were timed. One "
        "that breaks it has "
        "no time, but for baselines within the slack that the run allowed.",
        "",
        *table(["op", "provider", *dtypes], rows),
        *(["Broken:", "", *lines, ""] if lines else []),
    ]


def _of(found: list[tuple[bool, Source]]) -> str:
    return f"{sum(h for h, _ in found)} of {len(found)}" if found else ""


def newest_rows(device: Device) -> dict[tuple[str, str, str, str], Group]:
    """The group of the newest row that was tried, for each (op, case, dtype, provider)."""
    chosen: dict[tuple[str, str, str, str], Group] = {}
    for group in device.groups:
        for provider, row in group.rows.items():
            key = (group.op, group.case, group.dtype, provider)
            if _tried(row) and (key not in chosen or group.source.age > chosen[key].source.age):
                chosen[key] = group
    return chosen


def overheads(device: Device, found: Raw) -> list[str]:
    entries = newest(
        found.of("overhead", (device.kind, device.name)),
        lambda e: (e.op, e.data["implementation"], e.data["dtype"], e.data["grad"]),
    ).values()
    if not entries:
        return []
    levels = list(dict.fromkeys(level for e in entries for level in e.data["us"]))
    rows = [
        (
            [
                f"`{e.op}`",
                e.data["implementation"],
                e.case,
                e.data["dtype"],
                "yes" if e.data["grad"] else "no",
                *(number(e.data["us"].get(level)) for level in levels),
                number(e.data["overhead_us"]),
            ],
            [e.source],
        )
        for e in sorted(entries, key=_entry_order)
    ]
    errors = [
        f"- `{e.op}` {level}: {cell(said)}"
        for e in entries
        for level, said in e.data["errors"].items()
    ]
    return [
        "### Host time of a call",
        "",
        "Medians in microseconds on each op's smallest case, at depths that "
        "[benchmarking](benchmarking.md) "
        "describes.",
        "",
        *table(
            ["op", "implementation", "case", "dtype", "gradients", *levels, "public - operator"],
            rows,
        ),
        *([*errors, ""] if errors else []),
    ]


def end_to_end(device: Device, found: Raw) -> list[str]:
    """A model's step beside transformers', where both come from the same rounds."""
    steps: dict[tuple, dict[str, Entry]] = {}
    for e in found.of("end_to_end", (device.kind, device.name)):
        steps.setdefault((e.case, e.data["dtype"], e.source), {})[e.data["provider"]] = e
    pairs = newest(
        (p["trainer"] for p in steps.values() if {"trainer", "transformers"} <= set(p)),
        lambda e: (e.case, e.data["dtype"]),
    )
    rows = []
    for (case, dtype), ours in pairs.items():
        both = steps[case, dtype, ours.source]
        theirs = both["transformers"].data
        for name, e in both.items():
            d = e.data
            mine = name == "trainer"
            less = d["peak_mib"] and theirs["peak_mib"] and d["peak_mib"] / theirs["peak_mib"]
            rows.append(
                (
                    [
                        case,
                        dtype,
                        name,
                        f"{number(d['median_ms'])} [{number(d['p20_ms'])}, {number(d['p80_ms'])}]",
                        number(theirs["median_ms"] / d["median_ms"]) if mine else "",
                        number(d["peak_mib"]),
                        number(less) if mine else "",
                        *(f"{d[n]:.2g}" for n in raw.ERRORS),
                    ],
                    [e.source],
                )
            )
    if not rows:
        return []
    return [
        "### A training step",
        "",
        "Forward and backward of the trainer's model at its default numerics beside transformers' "
        "model with sdpa "
        "(bfloat16: under autocast); how, in [benchmarking](benchmarking.md). Times are medians "
        "[p20, p80].",
        "",
        *table(
            [
                "model",
                "dtype",
                "of",
                "ms",
                "times as fast",
                "peak MiB",
                "share of memory",
                "error of loss",
                "of gradients",
                "of the worst gradient",
            ],
            rows,
        ),
    ]


def missing(device: Device, found: Raw) -> list[str]:
    """What the registry has and this device did not time, and what was tried and failed."""
    lines = []
    for op in selection.operations().values():
        cases = [c.name for c in op.cases if device.kind in c.tags]
        done = {case for name, case, _ in device.timed if name == op.name}
        if not cases:
            lines.append(
                f"- `{op.name}`: not measured here: it has no case that is timed on {device.kind}"
            )
        elif not done:
            lines.append(f"- `{op.name}`: not measured here")
        elif left := [c for c in cases if c not in done]:
            lines.append(f"- `{op.name}`: not measured here: {', '.join(left)}")
    out = [
        "### Not measured here",
        "",
        *(
            lines
            or [
                f"Every op of the registry has a time, in every case that is timed on "
                f"{device.kind}."
            ]
        ),
        "",
    ]
    failed: dict[str, list[str]] = {}
    for (op, case, dtype, provider), g in newest_rows(device).items():
        row = g.rows[provider]
        if row["status"] != "ok":
            what = f"`{op}` {provider}{' (`auto`)' if row['auto'] else ''}, {row['status']}: {row['reason']}"
            failed.setdefault(f"{what} ({g.source.commit}, {g.source.day})", []).append(
                f"{case} {dtype}"
            )
    units = newest(found.of("unit", (device.kind, device.name)), lambda e: e.case).values()
    for e in units:
        if e.data["error"]:
            failed.setdefault(f"{e.data['error']} ({e.source.commit}, {e.source.day})", []).append(
                e.case
            )
    if failed:
        out += ["Tried, and has no result:", "", *listed(failed)]
    return out


def device_section(
    device: Device, found: Raw, reasons: Sequence[Reason], plots: list[Picture]
) -> list[str]:
    return [
        f"## {device.title}",
        "",
        *headline(device),
        *ratios(device, plots),
        *not_ahead(device, reasons),
        *roofs(device, found, plots),
        *(auto_rows(device) if device.timed else []),
        *checks(
            device,
            found,
            "parity",
            "Numerics",
            "In how many cases the [numerics contract](numerics.md) holds, on small inputs of "
            "every kind; then "
            "the worst error as a share of its budget (1 is all of it), with tensor and case.",
        ),
        *gate(device),
        *checks(
            device,
            found,
            "graph",
            "CUDA graphs",
            "In how many cases forward and backward can be recorded in a CUDA graph and replayed "
            "on other "
            "values with the result of a direct call.",
        ),
        *checks(
            device,
            found,
            "big",
            "More than 2^31 elements",
            "In how many such cases forward and backward agree with the eager twin in the last "
            "rows.",
        ),
        *end_to_end(device, found),
        *overheads(device, found),
        *missing(device, found),
        *versions(device, found),
    ]


# ---- goals


@dataclass(frozen=True)
class Measured:
    """One case that a goal speaks of."""

    name: str
    value: float
    source: Source


def goal_text(goal: Goal) -> str:
    bound = (
        f"at least {number(goal.at_least)}"
        if goal.at_least is not None
        else f"at most {number(goal.at_most)}"
    )
    where = "; ".join(filter(None, (", ".join(goal.cases), ", ".join(goal.dtypes))))
    unit = (
        f"times as fast as {other}"
        if (other := goal.other)
        else UNITS.get(goal.metric, goal.metric)
    )
    return f"{TITLES.get(goal.which, goal.which)} {bound} {unit}" + (f" ({where})" if where else "")


def goal_row(op: Op, goal: Goal, device: Device | None) -> tuple[list[str], list[Source]]:
    """Best and worst measured case of a goal on a device, and whether it is met."""
    start = [f"`{op.name}`", device.name if device else _devices(goal), goal_text(goal)]
    measured, unmeasured = _goal_cases(op, goal, device) if device else ([], [])
    if not measured:
        return [*start, "", "", "not measured"], []
    ordered = sorted(measured, key=lambda m: (m.value, m.name))
    if goal.at_least is None:
        ordered.reverse()
    missed = [m for m in ordered if not met(goal, m.value)]
    verdict = "met" if not missed else f"not met in {len(missed)} of {count(len(ordered), 'case')}"
    if unmeasured:
        verdict += "; not measured: " + ", ".join(unmeasured)
    return [
        *start,
        *(f"{number(m.value)} ({m.name})" for m in (ordered[0], ordered[-1])),
        verdict,
    ], [m.source for m in measured]


def _devices(goal: Goal) -> str:
    return goal.device if isinstance(goal.device, str) else " or ".join(goal.device)


def met(goal: Goal, value: float) -> bool:
    return value >= goal.at_least if goal.at_least is not None else value <= goal.at_most


def _goal_cases(op: Op, goal: Goal, device: Device) -> tuple[list[Measured], list[str]]:
    cases = list(goal.cases) or [c.name for c in op.cases if device.kind in c.tags]
    dtypes = list(goal.dtypes) or [
        d for d in device.dtypes() if any(n[0] == op.name and n[2] == d for n in device.timed)
    ]
    measured, unmeasured = [], []
    for case in cases:
        for dtype in dtypes:
            group = device.timed.get((op.name, case, dtype))
            row = group.auto if group else {}
            value = (
                goal_value(goal, row, group.rows, group.roofline["flops_per_second"].get(dtype))
                if group
                else None
            )
            if value is None:
                unmeasured.append(f"{case} {dtype}")
            else:
                measured.append(Measured(f"{case} {dtype}", value, group.source))
    return measured, unmeasured


def goal_value(goal: Goal, row: dict, rows: Mapping[str, dict], peak: float | None) -> float | None:
    """What a row of `auto` says of a goal.   rows: of the same rounds, by provider.   peak:
    measured FLOP/s.
    """
    if goal.metric == "peak_mib":
        return row.get("peak_mib")
    if goal.metric == "matmul_percent":
        rate = (row.get(goal.which) or {}).get("tflop_per_s")
        return 100 * rate * 1e12 / peak if rate and peak else None
    if not goal.other:
        return (row.get(goal.which) or {}).get(goal.metric)
    ours, theirs = (
        (r.get(goal.which) or {}).get("median_ms") for r in (row, rows.get(goal.other) or {})
    )
    return theirs / ours if ours and theirs else None


def goals(devices: Sequence[Device]) -> list[str]:
    rows = []
    for op in selection.operations().values():
        for goal in op.goals:
            on = [d for d in devices if goal.holds_for(d.name, d.capability)] or [None]
            rows += [goal_row(op, goal, d) for d in on]
    out = ["## Goals", ""]
    if not rows:
        return [*out, "No op has a goal yet.", ""]
    return [
        *out,
        "What the registry asks of `auto`, and the newest measurements of it.",
        "",
        *table(
            ["op", "device", "goal", "worst", "best", "verdict"],
            [(cells, sources) for cells, sources in rows],
        ),
    ]


# ---- what was counted

BUDGETS = pathlib.Path(__file__).parent / "budgets"


def counts_of(triton: str) -> pathlib.Path:
    """The file of counts of the kernels as this version of Triton compiles them."""
    return BUDGETS / f"counts-triton-{triton}.json"


def counted() -> list[str]:
    """What kernels ask of a GPU, as their PTX was run on a CPU."""

    def times(counts, kind):
        asked, least = counts["requested"][kind], counts["least"][kind]
        return f"{asked:,} ({asked / least:.2f})" if least else "0"

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
        "What the Triton kernels ask of a GPU on aligned inputs in bfloat16, counted where their "
        "PTX for sm_90 is "
        "run on a CPU (tests/ptx/test_triton_ptx.py); these are no times. A sector is 32 bytes of "
        "global memory, "
        "counted once for each instruction of a warp that touches it; in parentheses, over the "
        "sectors that the "
        "programs touch, each program's once. Above 1, several instructions of a program touch "
        "one sector, which "
        "its L1 serves: scales and tables that many threads read, and wide rows of which a thread "
        "takes more than "
        "16 bytes. Instructions are those of PTX, one for a warp.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


# ---- constants, training runs, files


def tuned(found: Raw) -> list[str]:
    out = ["## Tuned constants", ""]
    launches: dict[tuple, list[Entry]] = {}
    for e in found.of("tuned"):
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
        "How many times as fast as with the heuristic's constants a launch is with the tuned ones.",
        "",
        *table(
            ["device", "op", "launch", "keys", "not the heuristic's", "mean", "least", "most"], rows
        ),
    ]


def training(found: Raw, results: str) -> list[str]:
    lines = []
    for folder in found.folders:
        if folder.kind == "training":
            kept = ", ".join(f"[{f}]({results}/{folder.name}/{f})" for f in folder.files)
            lines.append(f"- {folder.name}: {kept}")
    if not lines:
        return []
    return [
        "## Training runs",
        "",
        "Whole runs, not single ops; commands, commits and dates are in their README.",
        "",
        *lines,
        "",
    ]


def files(found: Raw, results: str) -> list[str]:
    out = [
        "## Raw files",
        "",
        "Every result, shown above or not. Where several cover the same row, the newest is shown. "
        "Load is the "
        "machine's, the highest average over a minute at a start or an end; what measures counts "
        "too.",
        "",
        "| folder | kind | device | command | date | commit | complete | local changes | load |",
        "|" + "---|" * 9,
    ]
    for folder in sorted(found.folders, key=_folder_order, reverse=True):
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
            _each({True: "yes", False: "no"}.get(s.meta.get("dirty"), "unknown") for s in sources),
            number(
                max((load for s in sources if (load := _load(s.meta)) is not None), default=None)
            ),
        ]
        out.append("| " + " | ".join(map(cell, cells)) + " |")
    return [*out, ""]


def _starts(sources: list[Source]) -> list[Source]:
    """Those whose command is the one that was given: of a suite the summary's, for its files
    are its workers'.
    """
    return [s for s in sources if s.path.endswith("/suite.json")] or sources


def _load(meta: dict[str, Any]) -> float | None:
    found = [
        averages[0] for n in ("load_average", "load_average_at_end") if (averages := meta.get(n))
    ]
    return max(found, default=None)


def _folder_order(folder: raw.Folder) -> tuple:
    return max((s.when.isoformat() for s in folder.sources), default=""), folder.name


def _each(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _complete(folder: raw.Folder) -> str:
    left = [n for n, u in folder.units.items() if u["status"] == "not reached"]
    said = {True: "yes", False: "no", None: ""}[folder.complete]
    return (
        f"{said}: {len(left)} of {count(len(folder.units), 'unit')} not reached" if left else said
    )


# ---- the page

OPENING = (
    f"# Performance\n\n"
    f"What was measured: generated by `{COMMAND}` from the committed raw results and "
    f"bench_results/reasons.toml. Do "
    f"not edit this page; change those, and run it again. How numbers are made is in "
    f"[benchmarking](benchmarking.md). "
    f"`auto` is what a call takes that names no implementation. Numbers have three significant "
    f"digits. Of several "
    f"results for the same row the newest is shown, and a ratio is always of two rows that were "
    f"timed in the same "
    f"interleaved rounds.\n"
)
NO_GPU = (
    "**No number here was measured on a GPU: the GPU suite has not been run, and nothing is "
    "estimated.** On a machine "
    "with a CUDA device `python -m tilewright.bench suite --minutes 9 --out "
    "bench_results/<device>-<date>` measures, "
    f"and is repeated while its exit code is 3; `{COMMAND}` then adds what it wrote to this page.\n"
)


def untimed(devices: Sequence[Device]) -> list[str]:
    """A sentence about the implementations that no row of any device has timed."""
    timed = {
        (g.op, r["provider"])
        for d in devices
        for g in d.groups
        for r in g.rows.values()
        if r["status"] == "ok"
    }
    missing: dict[str, list[str]] = {}
    for op in selection.operations().values():
        for impl in op.implementations:
            if (op.name, impl.name) not in timed:
                missing.setdefault(impl.name, []).append(op.name)
    if not missing:
        return []
    return [
        "Implementations without a time on any device, whose speed is not known: "
        + "; ".join(
            f"{name} ({', '.join(f'`{op}`' for op in ops)})" for name, ops in missing.items()
        )
        + ". One that `auto` would not take anywhere stays until it is measured, and only where it is faster.\n"
    ]


def opening(devices: Sequence[Device], found: Raw) -> list[str]:
    out = [OPENING]
    rows = []
    for d in devices:
        sources = [s for f in found.folders for s in f.sources if s.device == (d.kind, d.name)]
        rows.append(([d.name, d.kind, len(d.timed), len({op for op, _, _ in d.timed})], sources))
    if rows:
        out += table(["device", "type", "timed cases (each dtype counts)", "ops"], rows)
    else:
        out += ["There is no result yet.", ""]
    if not any(d.kind == "cuda" for d in devices):
        out.append(NO_GPU)
    elif not any(d.timed for d in devices if d.kind == "cuda"):
        out += ["**No time here was measured on a GPU**: what its suite has reached is below.", ""]
    return out + untimed(devices)


def pictures_of(plots: Iterable[Picture], kind: str) -> list[str]:
    return [
        line
        for p in plots
        if p.kind == kind
        for line in (f"![{p.alt}]({p.link})", "", p.caption, "")
    ]


def plots_of(device: Device, found: Raw, folder: str) -> list[Picture]:
    """The pictures of a device, as data."""
    made = [*_roofline_picture(device, found, folder), *_ratio_pictures(device, folder)]
    return [p for p in made if p.data["panels"]]


def _slug(device: Device) -> str:
    return platform.slug(device.name)


def _roofline_picture(device: Device, found: Raw, folder: str) -> list[Picture]:
    panels, used, left = [], [], []
    entries = sorted(
        found.of("roofline", (device.kind, device.name)), key=lambda e: e.source.age, reverse=True
    )
    for dtype in device.dtypes():
        roof = next((e for e in entries if dtype in e.data["flops"]), None)
        points = []
        for (op, _, d), group in device.timed.items():
            f = group.auto["forward_backward"] or group.auto["forward"]
            if d == dtype and f.get("gb_per_s") and f.get("tflop_per_s"):
                points.append([op, f["tflop_per_s"] * 1e3 / f["gb_per_s"], f["tflop_per_s"] * 1e12])
                used.append(group.source)
            elif d == dtype:
                left.append(op)
        if roof and points:
            panels.append(
                {
                    "dtype": dtype,
                    "copy": roof.data["copy"],
                    "flops": roof.data["flops"][dtype],
                    "points": points,
                }
            )
    if not panels:
        return []
    caption = (
        "Arithmetic intensity and achieved rate of `auto`, by the least bytes and operations that "
        "a case needs; "
        f"the lines are the measured copy and matmul. Measured at {'; '.join(origins(used))}."
    )
    if left:
        caption += f" Not shown, for their cases count no operations or no bytes: {', '.join(dict.fromkeys(left))}."
    return [
        Picture(
            "roofline",
            f"{folder}/{_slug(device)}-roofline.png",
            f"Roofline of {device.name}",
            caption,
            {"title": device.title, "from": origins(used), "panels": panels},
        )
    ]


ROWS_A_PICTURE = 45  # more are not legible at the width of a page


def _ratio_pictures(device: Device, folder: str) -> list[Picture]:
    over = {
        name: {"compile": pairs.get("compile"), "peer": device.best_peer(name)}
        for name, pairs in device.pairs.items()
    }
    rows = dict.fromkeys((op, case) for (op, case, _), pairs in over.items() if any(pairs.values()))
    bare = dict.fromkeys(op for op, case, _ in over if (op, case) not in rows)
    pages: list[list[tuple[str, str]]] = [[]]
    for op in dict.fromkeys(op for op, _ in rows):
        mine = [r for r in rows if r[0] == op]
        if pages[-1] and len(pages[-1]) + len(mine) > ROWS_A_PICTURE:
            pages.append([])
        pages[-1] += mine
    made = []
    for i, page in enumerate(pages, 1):
        panels, used = [], []
        for dtype in device.dtypes():
            points = []
            for y, (op, case) in enumerate(page):
                for p in filter(None, over.get((op, case, dtype), {}).values()):
                    points.append([y, p.other["provider"], p.ratio])
                    used.append(p.group.source)
            if points:
                panels.append({"dtype": dtype, "points": points})
        number_ = f"-{i}" if len(pages) > 1 else ""
        caption = (
            f"How many times as fast as each `auto` is; left of 1 it is slower. "
            f"Measured at {'; '.join(origins(used))}."
        )
        if bare and i == len(pages):
            caption += f" Not shown, for neither has a time there, are cases of: {', '.join(bare)}."
        made.append(
            Picture(
                "ratios",
                f"{folder}/{_slug(device)}-ratios{number_}.png",
                f"How many times as fast as others auto is, {device.name}",
                caption,
                {"title": device.title, "from": origins(used), "rows": page, "panels": panels},
            )
        )
    return made


@dataclass(frozen=True)
class Page:
    """text: of the page.   pictures: that it shows.   unexplained: cases in which `auto` is
    behind without a reason.
    """

    text: str
    pictures: list[Picture]
    unexplained: list[str]


def build(results: pathlib.Path, out: pathlib.Path, tables: pathlib.Path | None = None) -> Page:
    """The page that `out` should hold. Raises ValueError, naming the file, for a raw result
    that cannot be read.
    """
    found = raw.read(results, tables)
    reasons = read_reasons(results / "reasons.toml")
    link = pathlib.Path(os.path.relpath(results, out.parent)).as_posix()
    devices = [
        Device(kind, name, [g for g in found.groups if g.source.device == (kind, name)])
        for kind, name in found.devices()
    ]
    lines, pictures, unexplained = opening(devices, found), [], []
    for device in devices:
        plots = plots_of(device, found, f"img/{out.stem}")
        pictures += plots
        lines += device_section(device, found, reasons, plots)
        unexplained += [
            f"{device.title}: {' '.join(report.key(p.other))}: {number(p.ratio)}"
            for p in behind(device)
            if NO_REASON in why(p, reasons)
        ]
    lines += [
        *goals(devices),
        *counted(),
        *tuned(found),
        *training(found, link),
        *files(found, link),
    ]
    return Page("\n".join(lines).rstrip("\n") + "\n", pictures, unexplained)


# ---- the command


def stale(page: Page, out: pathlib.Path) -> Iterator[str]:
    """What on disk is not what would be written."""
    if not out.exists():
        yield f"{out}: is not there; run `{COMMAND}`"
    elif (old := out.read_text()) != page.text:
        pairs = zip(old.splitlines(), page.text.splitlines(), strict=False)
        line = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), "its end")
        yield f"{out}: differs from what would be written, first at line {line}; run `{COMMAND}`"
    for picture in page.pictures:
        if not is_drawn(picture, out.parent):
            yield f"{out.parent / picture.link}: is not there, or shows other numbers; run `{COMMAND}`"


def draw(page: Page, out: pathlib.Path) -> None:
    """Draws what has changed, and removes pictures of this page that it no longer shows."""
    folder = out.parent / "img" / out.stem
    shown = {out.parent / p.link for p in page.pictures}
    for left in {
        p for kind in ("*-roofline.png", "*-ratios*.png") for p in folder.glob(kind)
    } - shown:
        left.unlink()
    todo = [p for p in page.pictures if not is_drawn(p, out.parent)]
    if todo and (reason := platform.no_module("matplotlib")):
        print(f"report: text only, pictures are not drawn: {reason}", file=sys.stderr)
        return
    for picture in todo:
        picture.draw(out.parent)


def main(argv: Sequence[str]) -> int:
    from tilewright.kernels.tuning import TABLES

    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results",
        type=pathlib.Path,
        default=pathlib.Path("bench_results"),
        metavar="DIR",
        help="raw results (default %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("docs/performance.md"),
        metavar="FILE",
        help="the page; pictures go to img/<its name> beside it (default %(default)s)",
    )
    parser.add_argument(
        "--tuned",
        type=pathlib.Path,
        default=TABLES,
        metavar="DIR",
        help="tables of tuned constants (default: those of the package)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit code 1 if the page is not up to date "
        "or a case that is behind has no reason",
    )
    args = parser.parse_args(argv)
    try:
        page = build(args.results, args.out, args.tuned)
    except ValueError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    for case in page.unexplained:
        print(f"{NO_REASON}: {case}")
    if args.check:
        wrong = list(stale(page, args.out))
        print("\n".join(wrong) or f"{args.out}: up to date")
        return 1 if wrong or page.unexplained else 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page.text)
    draw(page, args.out)
    print(f"written to {args.out}")
    return 0
