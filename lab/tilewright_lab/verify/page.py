"""The page of a verification: one HTML file with its pictures in it."""

from __future__ import annotations

import base64
import html
import io
import math
import pathlib
import tempfile
from collections.abc import Iterable

from tilewright.core.files import write_text
from tilewright_lab.verify.result import Verification, number, spoken

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse}td,th{padding:.15em .8em;text-align:left;border-bottom:1px solid #ddd}
td:first-child{text-align:right;font-variant-numeric:tabular-nums}.bad{color:#b00020}
img{max-width:100%}code{font-size:.95em}"""
COLORS = {"values": "#4269d0", "gradients": "#efb118"}
LEAST = 1e-3  # shown for less


def check_folder(folder: str | pathlib.Path) -> None:
    """Makes the folder. Raises OSError, with a sentence, if a page cannot be written into it."""
    try:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"--out must be a folder that can be written to, got {folder} ({error.strerror})"
        ) from error


def save(verification: Verification, folder: str | pathlib.Path) -> pathlib.Path:
    """Writes verify.html into the folder, which is made. Needs matplotlib. Returns its path."""
    folder = pathlib.Path(folder)
    text = page(verification)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "verify.html"
    write_text(target, text)
    return target


def page(verification: Verification) -> str:
    """The page as text."""
    title = f"verify: {verification.model}"
    head = "no findings" if verification.ok else f"{len(verification.findings)} findings"
    parts = [
        f"<h1>{html.escape(title)}</h1><p>{verification.dtype}, on {', '.join(verification.scenes)} input. One "
        "contract unit is twice the error of eager PyTorch in this dtype and a rounding, against "
        "float64.</p>",
        f'<h2 class="{"" if verification.ok else "bad"}">{head}</h2>',
        _list(f"<code>{html.escape(f.module)}</code>: {html.escape(f.message)}"
              for f in verification.findings),
        "<h2>Contract units of every module</h2>", _picture(_units(verification)),
        "<h2>Every tensor beside the eager twin's</h2>", _picture(_scatter(verification)),
        "<h2>Modules</h2>",
        _table(
            ("units", "module", "tensor", "input", "error", "eager's", "ran by"),
            (
                (
                    number(r.units), verification.name(r.path), spoken(r.what), r.scene, f"{r.error:.1e}",
                    f"{r.eager:.1e}", r.by or "-",
                )
                for r in verification.worst()
            ),
        ),
        "<h2>End to end</h2>",
        _table(
            ("units", "tensor", "input", "error", "eager's"),
            (
                (number(r.units), r.what, r.scene, f"{r.error:.1e}", f"{r.eager:.1e}")
                for r in sorted(verification.whole, key=lambda r: -r.units)[:40]
            ),
        ),
        "<h2>Ran by</h2>",
        _table(
            ("modules", "class", "by"),
            ((str(n), kind, by) for (kind, by), n in sorted(verification.seen.items())),
        ),
        _list(f"left {html.escape(p)}: {html.escape(r)}" for p, r in verification.left.items()),
        "<h2>Notes</h2>" if verification.notes else "",
        _list(map(html.escape, verification.notes)),
    ]  # fmt: skip
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style>{''.join(parts)}</html>\n"
    )


def _list(items: Iterable[str]) -> str:
    items = list(items)
    return f"<ul>{''.join(f'<li>{i}</li>' for i in items)}</ul>" if items else ""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(r, 'td') for r in rows)}</table>"


def _picture(figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    return (
        f'<img alt="" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
    )


def _finite(value: float, least: float = LEAST) -> float:
    return min(max(value, least), 1e9) if math.isfinite(value) else 1e9


def _units(verification: Verification):
    """The worst value and the worst gradient of each module, in the order of their names."""
    from matplotlib.figure import Figure

    paths = sorted({r.path for r in verification.rows}, key=_natural)
    figure = Figure(figsize=(9, 1 + 0.17 * len(paths)))
    axes = figure.add_subplot()
    for kind, color in COLORS.items():
        worst: dict[str, float] = {}
        for r in verification.rows:
            if r.what.startswith("gradient") == (kind == "gradients"):
                worst[r.path] = max(worst.get(r.path, 0.0), _finite(r.units))
        at = [i for i, p in enumerate(paths) if p in worst]
        axes.plot([worst[paths[i]] for i in at], at, "o", ms=4, color=color, label=kind)
    axes.axvline(1, color="#b00020", lw=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(paths)), [verification.name(p) for p in paths], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("contract units (right of the line: a break)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=7)
    return figure


def _natural(path: str) -> list:
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in path.split(".")]


def _scatter(verification: Verification):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5))
    axes = figure.add_subplot()
    for kind, color in COLORS.items():
        rows = [
            r for r in verification.rows if r.what.startswith("gradient") == (kind == "gradients")
        ]
        x = [_finite(r.eager, 1e-9) for r in rows]
        y = [_finite(r.error, 1e-9) for r in rows]
        axes.plot(x, y, ".", ms=4, color=color, label=kind)
    ends = [1e-9, 1.0]
    axes.plot(ends, [2 * e for e in ends], color="#b00020", lw=1, label="twice eager's")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("error of the eager twin")
    axes.set_ylabel("error of the model")
    axes.legend(fontsize=7)
    return figure
