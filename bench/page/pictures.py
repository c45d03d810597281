"""The pictures of docs/performance.md, drawn from plain data and marked with its digest.

The PNG contains the digest as text, so a picture can be checked against the current numbers without
drawing it: its bytes differ between versions of matplotlib and FreeType.
"""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
from dataclasses import dataclass
from typing import Any

STYLE = 3  # increment when the drawing changes, so that unchanged numbers are drawn again
COMPILE = "#8c8c8c"
COLORS = ("#2a6f97", "#e0a458", "#468f6b", "#b5534c", "#8a5a9e", "#5c6b73")
MARKERS = "osD^vP"
BASELINES = {"compile": "auto over torch.compile", "eager": "auto over eager PyTorch"}


@dataclass(frozen=True)
class Picture:
    """kind: the type of drawing. link: path from the page. data: everything drawn, as JSON."""

    kind: str
    link: str
    alt: str
    caption: str
    data: dict[str, Any]

    @property
    def digest(self) -> str:
        text = json.dumps([STYLE, self.kind, self.data], sort_keys=True)
        return "tilewright " + hashlib.sha256(text.encode()).hexdigest()

    def figure(self):
        """Draws the picture with matplotlib."""
        return (_roofline if self.kind == "roofline" else _ratios)(self.data)

    def draw(self, folder: pathlib.Path) -> None:
        path = folder / self.link
        path.parent.mkdir(parents=True, exist_ok=True)
        # No Software entry: it would record matplotlib's version.
        self.figure().savefig(
            path, dpi=130, metadata={"Description": self.digest, "Software": None}
        )


def is_drawn(picture: Picture, folder: pathlib.Path) -> bool:
    """Whether the file exists and shows these numbers."""
    path = folder / picture.link
    return path.exists() and picture.digest.encode() in path.read_bytes()


def _panels(data: dict[str, Any], width: float, height: float, **shared):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(1, len(data["panels"]), squeeze=False, sharey=True, **shared)[0]
    for axes in panels:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    # Only days: the page names the commits.
    days = sorted({origin.rpartition(", ")[2] for origin in data["from"]})
    figure.suptitle(
        f"{data['title']}\nmeasured {' to '.join(dict.fromkeys((days[0], days[-1])))}", fontsize=9
    )
    return figure, panels


def _style(op: str, ops: list[str]) -> dict[str, str]:
    i = ops.index(op)
    return {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i // len(COLORS) % len(MARKERS)]}


def _scatter(axes, points, color: str, **how) -> None:
    """Points of x, y and whether they are of today's code; the others are hollow."""
    for today in (True, False):
        some = [(x, y) for x, y, is_today in points if is_today == today]
        axes.scatter(
            [x for x, _ in some],
            [y for _, y in some],
            facecolor=color if today else "none",
            edgecolor=color,
            linewidth=0 if today else 0.8,
            zorder=3,
            **how,
        )


def _roofline(data: dict[str, Any]):
    """Achieved rate by arithmetic intensity, under the measured roofs: one panel per dtype."""
    figure, panels = _panels(data, max(5.5, 4.2 * len(data["panels"])), 4.4, sharex=True)
    ops = list(dict.fromkeys(p[0] for panel in data["panels"] for p in panel["points"]))
    x = [p[1] for panel in data["panels"] for p in panel["points"]]
    ridges = [panel["flops"] / panel["copy"] for panel in data["panels"]]
    low, high = min(x) / 2, 3 * max(*x, *ridges)
    for axes, panel in zip(panels, data["panels"], strict=True):
        ridge = panel["flops"] / panel["copy"]
        axes.plot(
            [low, ridge, high],
            [low * panel["copy"], panel["flops"], panel["flops"]],
            color="black",
            linewidth=1,
            zorder=2,
        )
        axes.annotate(
            f"matmul {panel['flops'] / 1e12:.3g} TFLOP/s",
            (high, panel["flops"]),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=7.5,
        )
        axes.annotate(
            f"copy {panel['copy'] / 1e9:.3g} GB/s",
            (0.02, 0.98),
            xycoords="axes fraction",
            va="top",
            fontsize=7.5,
        )
        for op in ops:
            _scatter(
                axes,
                [(x, y, today) for o, x, y, today in panel["points"] if o == op],
                s=22,
                alpha=0.85,
                **_style(op, ops),
            )
        axes.set(xscale="log", yscale="log", xlim=(low, high), title=panel["dtype"])
        axes.set_xlabel("FLOP per byte")
        axes.grid(color="#e4e4e4", linewidth=0.5, zorder=1)
    panels[0].set_ylabel("achieved FLOP/s")
    _legend(figure, [(op, _style(op, ops)) for op in ops], 5)
    return figure


def _ratios(data: dict[str, Any]):
    """`auto` over torch.compile and over the best peer (headline: over eager), shown by color: one
    row per case (headline: per op), one panel per dtype, a line at 1.
    """
    rows = data["rows"]
    figure, panels = _panels(data, 2.6 + 3.4 * len(data["panels"]), 1.7 + 0.19 * len(rows))
    points = [p for panel in data["panels"] for p in panel["points"]]
    ratios = [ratio for _, _, ratio, _ in points]
    peers = sorted({other for _, other, _, _ in points} - {"compile"})
    styles = {
        "compile": {"color": COMPILE, "marker": "o"},
        **{p: {"color": COLORS[i % len(COLORS)], "marker": "D"} for i, p in enumerate(peers)},
    }
    left, right = math.log2(min(0.8, *ratios)) - 0.2, math.log2(max(1.25, *ratios)) + 0.2
    for axes, panel in zip(panels, data["panels"], strict=True):
        for i, (op, _) in enumerate(rows):
            # Every other op, to separate the blocks.
            if list(dict.fromkeys(o for o, _ in rows)).index(op) % 2:
                axes.axhspan(i - 0.5, i + 0.5, color="#f3f6f8", linewidth=0, zorder=0)
        for other, style in styles.items():
            _scatter(
                axes,
                [(math.log2(r), row, today) for row, o, r, today in panel["points"] if o == other],
                s=26 if other == "compile" else 18,
                **style,
            )
        axes.axvline(0, color="black", linewidth=1, zorder=2)
        step = 1 if right - left < 7 else 2
        ticks = range(math.ceil(left / step) * step, math.floor(right) + 1, step)
        axes.set_xticks(list(ticks), [f"{2.0**t:.3g}x" for t in ticks])
        axes.set(xlim=(left, right), ylim=(len(rows) - 0.5, -0.5), title=panel["dtype"])
        axes.set_xlabel("times as fast (log scale)")
        axes.grid(axis="x", color="#e4e4e4", linewidth=0.5, zorder=1)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(
        range(len(rows)), [f"{op}  {case}".rstrip() for op, case in rows], fontsize=7.5
    )
    _legend(
        figure,
        [
            (BASELINES.get(other, f"over the best peer: {other}"), style)
            for other, style in styles.items()
        ],
        3,
    )
    return figure


def _legend(figure, entries: list[tuple[str, dict[str, Any]]], columns: int) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="", markersize=5, label=label, **style) for label, style in entries
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )
