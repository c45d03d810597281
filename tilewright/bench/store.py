"""Stores a suite's documents: one file per unit under `units/` while it runs, then one line per
unit in `suite.jsonl`.

The first line is the suite's own document, under "unit": "suite"; the others follow by name. A
killed call may leave both; then the files, which are newer, take precedence.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

FILE = "suite.jsonl"
UNITS = "units"
SUMMARY = "suite"  # the name of the suite's own document


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a temporary file and renames it, so that no reader or interrupt leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: pathlib.Path, document: Any) -> None:
    """Writes a document with each of its rows on one line.

    Raises ValueError for infinity and NaN, which JSON does not have.
    """
    write_text(path, _layout(document, "\n") + "\n")


def _layout(value: Any, newline: str) -> str:
    """JSON with one line for each object of a list and for each field above such a list."""
    deeper = newline + " "
    if _is_table(value):
        inside = [json.dumps(row, allow_nan=False) for row in value]
        return f"[{deeper}{(',' + deeper).join(inside)}{newline}]"
    if isinstance(value, dict) and any(map(_has_table, value.values())):
        inside = [f"{json.dumps(n)}: {_layout(v, deeper)}" for n, v in value.items()]
        return f"{{{deeper}{(',' + deeper).join(inside)}{newline}}}"
    return json.dumps(value, allow_nan=False)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, dict) for each in value)


def _has_table(value: Any) -> bool:
    return _is_table(value) or (isinstance(value, dict) and any(map(_has_table, value.values())))


def _constant(name: str):
    raise ValueError(f"{name} is no number")


def parse(text: str) -> Any:
    """JSON without infinity and NaN. Raises ValueError."""
    return json.loads(text, parse_constant=_constant)


def read(folder: pathlib.Path) -> Iterator[tuple[str, pathlib.Path, Any]]:
    """Each document with its name and file: the suite's own first, then by name.

    Raises ValueError, naming the file, for one that cannot be read.
    """
    documents: dict[str, tuple[pathlib.Path, Any]] = {}
    path = folder / FILE
    if path.exists():
        lines = path.read_text().splitlines()
        for i, line in enumerate(lines, 1):
            try:
                document = parse(line)
                documents[document.pop("unit")] = path, document
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                reason = "it has no 'unit'" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{path}: line {i}: not readable as a unit: {reason}") from error
    for name, each in files(folder).items():
        try:
            documents[name] = each, parse(each.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{each}: not readable as JSON: {error}") from error
    for name in sorted(documents, key=lambda n: (n != SUMMARY, n)):
        yield name, *documents[name]


def files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The files of units that are not packed, by name."""
    units = folder / UNITS
    return {
        p.relative_to(units).with_suffix("").as_posix(): p
        for p in units.rglob("*.json")
        if p.parent != units or p.name == "roofline.json"
    }


def unpack(folder: pathlib.Path) -> pathlib.Path:
    """Writes packed units to files again, except those that exist. Returns their folder.

    Unreadable lines are skipped; their units are run again.
    """
    units = folder / UNITS
    units.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            document = json.loads(line)
            name = document.pop("unit")
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if name != SUMMARY and not (units / f"{name}.json").exists():
            write_text(units / f"{name}.json", json.dumps(document) + "\n")
    return units


def pack(folder: pathlib.Path, summary: Mapping[str, Any]) -> None:
    """Writes all units and the suite's own document into one file, and removes the units' files."""
    lines, packed = [_line(SUMMARY, summary)], []
    for name, path in sorted(files(folder).items()):
        with contextlib.suppress(OSError, ValueError):  # half a file: its unit is run again
            lines.append(_line(name, json.loads(path.read_text())))
        packed.append(path)
    write_text(folder / FILE, "".join(lines))
    for path in packed:
        path.unlink()
    for left in (*{p.parent for p in packed} - {folder / UNITS}, folder / UNITS):
        if left.exists() and not any(left.iterdir()):
            left.rmdir()


def _line(name: str, document: Mapping[str, Any]) -> str:
    return json.dumps({"unit": name, **document}, allow_nan=False) + "\n"


def append(stream: pathlib.Path | None, name: str, document: Mapping[str, Any]) -> None:
    """Appends a unit's document as one line, in one write, so that processes' lines do not mix."""
    if stream is not None:
        with stream.open("a") as file:
            file.write(_line(name, document))


def rows(path: pathlib.Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The metadata and timed rows of a suite, given its folder or file: rows of the stage `time`,
    or of `goals` where that has none.

    Raises ValueError if it holds no result.
    """
    folder = path if path.is_dir() else path.parent
    documents = {name: document for name, _, document in read(folder)}
    if SUMMARY not in documents:
        raise ValueError(f"{path}: holds no finished suite ({FILE})")
    timed_rows: dict[tuple, dict[str, Any]] = {}
    for stage in ("time/", "goals/"):
        for name, document in documents.items():
            if name.startswith(stage):
                for r in document["rows"]:
                    timed_rows.setdefault((r["op"], r["case"], r["dtype"], r["provider"]), r)
    return documents[SUMMARY]["meta"], list(timed_rows.values())
