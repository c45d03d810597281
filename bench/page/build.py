"""Writes docs/performance.md, docs/performance_ops.md and their pictures from raw results.

    python -m bench report [--results DIR] [--out docs/performance.md] [--check]

The pages depend only on the raw results, bench/results/reasons.toml, the tables of tuned constants,
the counts of kernels, and the registry (ops, cases, goals), not on the day, machine or checkout.
Of several results for the same device, op, case, dtype and provider, the newest is shown. A ratio
compares two rows of the same interleaved rounds, never of two runs.

Exit code: 0; 1 with --check if a page or a picture is out of date, or a case in which `auto` is
behind has no reason; 2 if a file cannot be read.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench import commands
from bench.page import detail, files, raw, summary
from bench.page.comparisons import Device, behind
from bench.page.goals import goals
from bench.page.pictures import Picture, is_drawn
from bench.page.plots import plots_of
from bench.page.raw import Raw
from bench.page.reasons import NO_REASON, Reason, read_reasons, why
from bench.page.text import COMMAND, number
from tilewright.bench import report
from tilewright.core import platform


def device_section(
    device: Device, results: Raw, reasons: Sequence[Reason], plots: list[Picture]
) -> list[str]:
    """The main page's section about one device."""
    return [
        f"## {device.title}",
        "",
        *summary.headline(device, plots),
        *summary.ratios(device, plots),
        *summary.not_ahead(device, reasons),
        *summary.steps(device, results),
        *summary.end_to_end(device, results),
        *summary.roofs(device, results, plots),
        *summary.missing(device, results),
    ]


def device_details(device: Device, results: Raw, reasons: Sequence[Reason]) -> list[str]:
    """The second page's section about one device."""
    return [
        f"## {device.title}",
        "",
        *(detail.auto_rows(device) if device.timed else []),
        *detail.older(device, reasons),
        *detail.all_checks(device, results),
        *detail.overheads(device, results),
        *detail.versions(device, results),
    ]


@dataclass(frozen=True)
class Page:
    """The contents of a report.

    texts: by path, the main page first.
    pictures: those of the main page.
    unexplained: cases in which `auto` is behind without a reason.
    """

    texts: dict[pathlib.Path, str]
    pictures: list[Picture]
    unexplained: list[str]

    @property
    def text(self) -> str:
        """Both pages, concatenated."""
        return "\n".join(self.texts.values())


def build(results: pathlib.Path, out: pathlib.Path, tables: pathlib.Path | None = None) -> Page:
    """The contents of `out` and of the second page beside it.

    Raises:
        ValueError: A raw result cannot be read; the message names the file.
    """
    raw_results = raw.read(results, tables)
    reasons = read_reasons(results / "reasons.toml")
    link = pathlib.Path(os.path.relpath(results, out.parent)).as_posix()
    details = out.with_name(f"{out.stem}_ops{out.suffix}")
    devices = [
        Device(kind, name, [g for g in raw_results.groups if g.source.device == (kind, name)])
        for kind, name in raw_results.devices()
    ]
    lines, pictures, unexplained = summary.opening(devices, raw_results, details.name), [], []
    details_lines = detail.opening(out.name)
    for device in devices:
        plots = plots_of(device, raw_results, f"img/{out.stem}")
        pictures += plots
        lines += device_section(device, raw_results, reasons, plots)
        details_lines += device_details(device, raw_results, reasons)
        unexplained += [
            f"{device.title}: {' '.join(report.key(p.other))}: {number(p.ratio)}"
            for p in behind(device)
            if NO_REASON in why(p, reasons)
        ]
    lines += [*goals(devices), *files.training(raw_results, link), *files.files(raw_results, link)]
    details_lines += [*files.counted(), *files.tuned(raw_results)]
    texts = {
        path: "\n".join(section).rstrip("\n") + "\n"
        for path, section in ((out, lines), (details, details_lines))
    }
    return Page(texts, pictures, unexplained)


def stale(page: Page, out: pathlib.Path) -> Iterator[str]:
    """The files on disk that are out of date."""
    for path, text in page.texts.items():
        if not path.exists():
            yield f"{path}: is not there; run `{COMMAND}`"
        elif (old := path.read_text()) != text:
            pairs = zip(old.splitlines(), text.splitlines(), strict=False)
            line = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), "its end")
            yield f"{path}: differs from what would be written, first at line {line}; run `{COMMAND}`"
    for picture in page.pictures:
        if not is_drawn(picture, out.parent):
            yield f"{out.parent / picture.link}: is not there, or shows other numbers; run `{COMMAND}`"


def draw(page: Page, out: pathlib.Path) -> None:
    """Draws pictures that changed, and removes those that the page no longer shows."""
    folder = out.parent / "img" / out.stem
    shown = {out.parent / p.link for p in page.pictures}
    for left in {
        p
        for kind in ("*-headline.png", "*-roofline.png", "*-ratios*.png")
        for p in folder.glob(kind)
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

    parser = commands.parser("report", __doc__)
    parser.add_argument(
        "--results",
        type=pathlib.Path,
        default=pathlib.Path("bench/results"),
        metavar="DIR",
        help="folder of raw results (default %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("docs/performance.md"),
        metavar="FILE",
        help="the page; <name>_ops.md and img/<name> are written beside it (default %(default)s)",
    )
    parser.add_argument(
        "--tuned",
        type=pathlib.Path,
        default=TABLES,
        metavar="DIR",
        help="tables of tuned launch configurations (default: those of the package)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit code 1 if a page or picture is out of date "
        "or a case in which `auto` is behind has no reason",
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
    for path, text in page.texts.items():
        path.write_text(text)
    draw(page, args.out)
    print(f"written to {' and '.join(map(str, page.texts))}")
    return 0
