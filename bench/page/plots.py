"""Selects the data of the pictures: rooflines, and ratios to the other providers."""

from __future__ import annotations

from collections.abc import Iterable

from bench.page.comparisons import NOBODY_RUNS, Device, flaws
from bench.page.pictures import Picture
from bench.page.raw import Group, Raw
from bench.page.text import origins
from tilewright.bench.timing import geomean


def pictures_of(plots: Iterable[Picture], kind: str) -> list[str]:
    return [
        line
        for p in plots
        if p.kind == kind
        for line in (f"![{p.alt}]({p.link})", "", p.caption, "")
    ]


def plots_of(device: Device, results: Raw, folder: str) -> list[Picture]:
    """The data of a device's pictures."""
    pictures = [
        *_headline_picture(device, folder),
        *_roofline_picture(device, results, folder),
        *_ratio_pictures(device, folder),
    ]
    return [p for p in pictures if p.data["panels"]]


def is_of_today(group: Group) -> bool:
    return not flaws(group.source, group.op)


def hollow(panels: list[dict]) -> str:
    """What a caption says of points that are not of today's code; "" if there are none."""
    if all(p[-1] for panel in panels for p in panel["points"]):
        return ""
    return " Hollow: measured on code that has changed since, or with local changes."


def _headline_picture(device: Device, folder: str) -> list[Picture]:
    """Each op's mean speedup over eager PyTorch and torch.compile, the largest over eager first."""
    over = ("compile", "eager")
    compared = {
        name: {other: p for other, p in pairs.items() if (name[0], other) not in NOBODY_RUNS}
        for name, pairs in device.pairs.items()
    }

    def gain(op: str) -> float:
        by = {
            other: [p[other].ratio for (o, _, _), p in compared.items() if o == op and other in p]
            for other in over
        }
        mean = geomean(by["eager"] or by["compile"])
        assert mean is not None, "an op in `rows` is compared with one of the two"
        return mean

    ops = dict.fromkeys(op for (op, _, _), p in compared.items() if p.keys() & over)
    rows = sorted(ops, key=gain, reverse=True)
    panels, used = [], []
    for dtype in device.dtypes():
        points = []
        for y, op in enumerate(rows):
            for provider in over:
                pairs = [
                    p[provider]
                    for (o, _, d), p in compared.items()
                    if (o, d) == (op, dtype) and provider in p
                ]
                if pairs:
                    today = all(is_of_today(p.group) for p in pairs)
                    points.append([y, provider, geomean(p.ratio for p in pairs), today])
                    used += [p.group.source for p in pairs]
        if points:
            panels.append({"dtype": dtype, "points": points})
    if not panels:
        return []
    return [
        Picture(
            "headline",
            f"{folder}/{device.slug}-headline.png",
            f"Speedup of auto over eager PyTorch and torch.compile by op, {device.name}",
            "The means of the table above by op, without comparisons that nobody would make."
            + hollow(panels),
            {
                "title": device.title,
                "from": origins(used),
                "rows": [[op, ""] for op in rows],
                "panels": panels,
            },
        )
    ]


def _roofline_picture(device: Device, results: Raw, folder: str) -> list[Picture]:
    panels, used, without_rate = [], [], []
    entries = sorted(
        results.of("roofline", (device.kind, device.name)), key=lambda e: e.source.age, reverse=True
    )
    for dtype in device.dtypes():
        roof = next((e for e in entries if dtype in e.data["flops"]), None)
        points = []
        for (op, _, d), group in device.timed.items():
            row = group.auto
            assert row is not None, "what is timed has a row"
            f = row["forward_backward"] or row["forward"]
            if d == dtype and f.get("gb_per_s") and f.get("tflop_per_s"):
                intensity, rate = f["tflop_per_s"] * 1e3 / f["gb_per_s"], f["tflop_per_s"] * 1e12
                points.append([op, intensity, rate, is_of_today(group)])
                used.append(group.source)
            elif d == dtype:
                without_rate.append(op)
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
        "Arithmetic intensity and achieved rate of `auto`, from the minimum bytes and operations "
        "of each case; "
        f"the lines are the measured copy and matmul. Measured at {'; '.join(origins(used))}."
    )
    if without_rate:
        ops = ", ".join(dict.fromkeys(without_rate))
        caption += f" Not shown, because their cases count no operations or no bytes: {ops}."
    caption += hollow(panels)
    return [
        Picture(
            "roofline",
            f"{folder}/{device.slug}-roofline.png",
            f"Roofline of {device.name}",
            caption,
            {"title": device.title, "from": origins(used), "panels": panels},
        )
    ]


ROWS_A_PICTURE = 45  # more are illegible at the width of a page


def _ratio_pictures(device: Device, folder: str) -> list[Picture]:
    over = {
        name: {"compile": pairs.get("compile"), "peer": device.best_peer(name)}
        for name, pairs in device.pairs.items()
    }
    rows = dict.fromkeys((op, case) for (op, case, _), pairs in over.items() if any(pairs.values()))
    unmeasured = dict.fromkeys(op for op, case, _ in over if (op, case) not in rows)
    pages: list[list[tuple[str, str]]] = [[]]
    for op in dict.fromkeys(op for op, _ in rows):
        op_rows = [r for r in rows if r[0] == op]
        if pages[-1] and len(pages[-1]) + len(op_rows) > ROWS_A_PICTURE:
            pages.append([])
        pages[-1] += op_rows
    pictures = []
    for i, page in enumerate(pages, 1):
        panels, used = [], []
        for dtype in device.dtypes():
            points = []
            for y, (op, case) in enumerate(page):
                for p in filter(None, over.get((op, case, dtype), {}).values()):
                    points.append([y, p.other["provider"], p.ratio, is_of_today(p.group)])
                    used.append(p.group.source)
            if points:
                panels.append({"dtype": dtype, "points": points})
        number_ = f"-{i}" if len(pages) > 1 else ""
        caption = (
            f"Speedup of `auto` over each other provider; left of 1, `auto` is slower. "
            f"Measured at {'; '.join(origins(used))}."
        )
        if unmeasured and i == len(pages):
            caption += f" Not shown, because neither has a time: cases of {', '.join(unmeasured)}."
        caption += hollow(panels)
        pictures.append(
            Picture(
                "ratios",
                f"{folder}/{device.slug}-ratios{number_}.png",
                f"Speedup of auto over other providers, {device.name}",
                caption,
                {"title": device.title, "from": origins(used), "rows": page, "panels": panels},
            )
        )
    return pictures
