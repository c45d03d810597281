"""README.md's table of a run."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import re

from .faults import ROOT, Fault, load

README = pathlib.Path(__file__).with_name("README.md")
HEAD = "<!-- The table below is generated: python -m tests.mutations RESULTS --table -->\n"


def last_rows(out: pathlib.Path) -> dict[str, dict]:
    """The last row of each fault."""
    lines = out.read_text().splitlines() if out.exists() else []
    return {row["id"]: row for row in map(json.loads, lines)}


def digest(fault: Fault, first: str) -> str:
    """The digest of the source that has a fault and of the first test file that sees it."""
    names = (fault.file, first.partition("::")[0])
    parts = [fault.old, fault.new, *(code(ROOT / n) for n in names if (ROOT / n).is_file())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@functools.cache
def code(path: pathlib.Path) -> str:
    """A file without blank lines and lines of a comment."""
    comment = "#" if path.suffix == ".py" else "//"
    return re.sub(rf"(?m)^\s*({comment}.*)?\n", "", path.read_text())


def digests(out: pathlib.Path) -> dict[str, str]:
    """The digest of each fault today, with the file of the test that saw it last."""
    rows = last_rows(out)
    return {f.id: digest(f, rows.get(f.id, {}).get("first", "")) for f in load()}


def old(out: pathlib.Path) -> list[str]:
    """Faults without a row of today's sources."""
    rows = last_rows(out)
    return [i for i, now in digests(out).items() if rows.get(i, {}).get("digest") != now]


def cell(text: str) -> str:
    short = text if len(text) <= 110 else text[:107] + "..."
    return "`" + " ".join(short.replace("`", "'").replace("|", "\\|").split()) + "`"


def table(faults: list[Fault], rows: dict[str, dict]) -> str:
    lines = ["| fault | where | text | with the fault | first red test, or why none |"]
    lines.append("|---|---|---|---|---|")
    for f in faults:
        row = rows.get(f.id, {})
        seen = f"`{row['first'].removeprefix('tests/')}`" if row.get("first") else f.judgement
        where = f"{f.file.removeprefix('tilewright/')} {f.function}".strip()
        lines.append(f"| {f.id} | {where} | {cell(f.old)} | {cell(f.new)} | {seen} |")
    red = sum(row["result"] == "red" for row in rows.values())
    said = f"{len(faults)} faults: {red} red, {len(faults) - red} judged.\n"
    return "\n".join([said, *lines]) + "\n"


def write_table(out: pathlib.Path) -> None:
    before = README.read_text().partition(HEAD)[0]
    README.write_text(before + HEAD + "\n" + table(load(), last_rows(out)))
