"""One page of a run, or of several in the same charts: python -m tilewright.trainer.report RUN ...

RUN is the output_dir of a run, which may still be going on. The page is drawn from its
metrics.jsonl, and shows its resolved_config.yaml: one HTML file that loads nothing else.
"""

from __future__ import annotations

if __name__ == "__main__":
    from tilewright.core.platform import require

    require("trainer")  # else the imports below end in a traceback
    require("bench")

import argparse
import html
import io
import math
import pathlib
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from tilewright.core import platform
from tilewright.core.files import write_text
from tilewright.trainer.plugins.records import rows

# The charts that come first: title, unit, and the names of numbers in metrics.jsonl. The first has
# the losses of single sets (eval_loss/code), too.
FIRST = (
    ("Loss", "nats per token", ("loss", "eval_loss")),
    ("Learning rate", "", ("lr",)),
    ("Gradient norm", "before clipping", ("grad_norm",)),
    ("Throughput", "tokens per second", ("tokens_per_second",)),
    ("Memory", "GB", ("memory_gb",)),
)
LEFT_OUT = ("step", "tokens", "seconds", "seconds_left")
PAGE = "report.html"
LINES = ("-", "--", ":", "-.")
STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1em; margin: 0; }
table { border-collapse: collapse; } td, th { padding: .2em .8em .2em 0; text-align: left; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 1em; }
main { margin: 1.5em 0; } figure { margin: 0; } svg { width: 100%; height: auto; }
pre { overflow-x: auto; background: #f4f4f4; padding: 1em; }
"""


@dataclass(frozen=True)
class Run:
    """name: its folder's, or its path where two have the same.   rows: of metrics.jsonl.
    settings: the text of resolved_config.yaml, "" without one.
    """

    name: str
    rows: list[dict[str, Any]]
    settings: str

    def points(self, name: str) -> list[tuple[int, float]]:
        """The steps that have a finite number of this name, and the numbers."""
        pairs = [(row["step"], row[name]) for row in self.rows if name in row]
        return [(step, value) for step, value in pairs if math.isfinite(value)]


@dataclass(frozen=True)
class Chart:
    """names: of numbers in metrics.jsonl, each a line of each run."""

    title: str
    unit: str
    names: list[str]


def read(folder: pathlib.Path, name: str) -> Run:
    """Raises FileNotFoundError for a folder without metrics.jsonl, ValueError for one that has no
    step, or rows that no run writes.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: holds no metrics.jsonl; give the output_dir of a run")
    entries = rows(path)
    for row in entries:
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise ValueError(f"{path}: is damaged: {str(row)[:60]} is no row of it")
        for key, value in row.items():
            if not isinstance(value, int | float):
                raise ValueError(f"{path}: is damaged: {key} is {str(value)[:60]}, not a number")
    if not entries:
        raise ValueError(f"{path}: has no step yet")
    settings = folder / "resolved_config.yaml"
    return Run(name, entries, settings.read_text() if settings.is_file() else "")


def charts(runs: list[Run]) -> list[Chart]:
    """The first ones, and one for all numbers that share what is before their slash."""
    names = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    rest = [name for name in names if name not in LEFT_OUT]
    made = []
    for title, unit, first in FIRST:
        own = [n for n in rest if n in first or (n.startswith("eval_loss/") and title == "Loss")]
        own.sort(key=lambda name: first.index(name.partition("/")[0]))
        rest = [name for name in rest if name not in own]
        made += [Chart(title, unit, own)] if own else []
    groups: dict[str, list[str]] = {}
    for name in rest:
        groups.setdefault(name.partition("/")[0], []).append(name)
    return made + [Chart(group, "", own) for group, own in groups.items()]


def draw(chart: Chart, runs: list[Run]) -> str:
    """The chart as an SVG element. Colors tell runs apart, and dashes their numbers; colors the
    numbers of a single run."""
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text, a dollar sign too, and the same numbers give the same file.
    look: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": chart.title,
        "text.parse_math": False,
    }
    with matplotlib.rc_context({**look, "font.family": "sans-serif", "font.size": 9}):
        figure = Figure(figsize=(7.6, 3.6), layout="tight")
        axes, lines, labels = figure.subplots(), [], []
        for r, run in enumerate(runs):
            for n, name in enumerate(chart.names):
                if points := run.points(name):
                    color = f"C{(r if len(runs) > 1 else n) % 10}"
                    dashes = LINES[n % len(LINES)] if len(runs) > 1 else "-"
                    few = "o" if len(points) < 30 else None
                    style = {"linestyle": dashes, "marker": few, "markersize": 3}
                    lines += axes.plot(*zip(*points, strict=True), color=color, lw=1, **style)
                    parts = [run.name] * (len(runs) > 1) + [name] * (len(chart.names) > 1)
                    # Legends leave out labels that begin with an underscore.
                    labels.append(" ".join(parts).lstrip("_"))
        axes.set(xlabel="optimizer step", ylabel=chart.unit)
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend(lines, labels, fontsize=8)
        text = io.StringIO()
        about = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=about)
    return text.getvalue().partition("<svg")[2].join(("<svg", ""))


def summary(run: Run) -> dict[str, str]:
    """A run in a row of the page's table."""
    last: dict[str, Any] = {}
    for row in run.rows:
        last |= row
    speeds = [speed for _, speed in run.points("tokens_per_second")]
    cells = {"steps": f"{last['step']}"}
    for title, name in (("loss", "loss"), ("evaluation", "eval_loss"), ("tokens", "tokens")):
        if name in last:
            cells[title] = f"{last[name]:.5g}" if isinstance(last[name], float) else f"{last[name]}"
    if speeds:
        cells["tokens per second (median)"] = f"{statistics.median(speeds):.5g}"
    if "memory_gb" in last:
        cells["memory (GB)"] = f"{last['memory_gb']:.4g}"
    return cells


def _table(head: list[str], body: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "\n".join(["<table>", line(head, "th"), *(line(row, "td") for row in body), "</table>"])


def _leaves(tree: Any, at: str = "") -> Iterator[tuple[str, str]]:
    if not isinstance(tree, dict):
        yield at, str(tree)
        return
    for name, value in tree.items():
        yield from _leaves(value, f"{at}.{name}" if at else str(name))


def differences(runs: list[Run]) -> list[list[str]]:
    """The fields whose values differ between runs: [name, value of each run]. Raises ValueError
    for settings that are not YAML.
    """
    by_run = []
    for run in runs:
        try:
            by_run.append(dict(_leaves(yaml.safe_load(run.settings) or {})))
        except yaml.YAMLError as error:
            raise ValueError(f"{run.name}: resolved_config.yaml is not YAML") from error
    names = dict.fromkeys(name for settings in by_run for name in settings)
    values = {name: [settings.get(name, "") for settings in by_run] for name in names}
    return [[name, *of] for name, of in values.items() if len({*of}) > 1]


def page(runs: list[Run]) -> str:
    """The page, HTML."""
    title = html.escape(", ".join(run.name for run in runs))
    about = [summary(run) for run in runs]
    columns = list(dict.fromkeys(name for one in about for name in one))
    table = [
        [run.name, *(one.get(c, "") for c in columns)] for run, one in zip(runs, about, strict=True)
    ]
    figures = [
        f"<figure><h2>{html.escape(chart.title)}</h2>\n{draw(chart, runs)}</figure>"
        for chart in charts(runs)
    ]
    apart = differences(runs) if len(runs) > 1 else []
    settings = [_table(["field", *(run.name for run in runs)], apart)] if apart else []
    settings += [
        f"<details><summary>Configuration of {html.escape(run.name)}</summary>"
        f"<pre>{html.escape(run.settings)}</pre></details>"
        for run in runs
        if run.settings
    ]
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f"<style>{STYLE}</style></head><body><h1>{title}</h1>",
            _table(["run", *columns], table),
            "<main>",
            *figures,
            "</main>",
            *settings,
            "</body></html>\n",
        ]
    )


def write(runs: list[str], target: pathlib.Path) -> None:
    """Writes the page of these folders. Raises ValueError and OSError, as `read`."""
    folders = [pathlib.Path(run) for run in runs]
    names = [folder.resolve().name for folder in folders]
    if len({*names}) < len(names):
        names = runs
    made = page([read(folder, name) for folder, name in zip(folders, names, strict=True)])
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, made)


@platform.command
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tilewright.trainer.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run")
    parser.add_argument("--out", metavar="FILE", help=f"default: {PAGE} in the first RUN")
    args = parser.parse_args(argv)
    target = pathlib.Path(args.runs[0], PAGE) if args.out is None else pathlib.Path(args.out)
    try:
        write(args.runs, target)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
