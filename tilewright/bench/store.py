"""Stores a call's documents: one line per unit in `suite.jsonl`, appended when the unit ends.

If lines have the same name, the last one counts. A call that ends writes the file anew: first its
own document, under "unit": "suite", then the others by name.
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
    by_name: dict[str, Any] = {}
    path = folder / FILE
    for i, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
        try:
            document = parse(line)
            by_name[document.pop("unit")] = document
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = "it has no 'unit'" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}: line {i}: not readable as a unit: {reason}") from error
    for name in sorted(by_name, key=_place):
        yield name, path, by_name[name]


def _place(name: str) -> tuple[bool, str]:
    return name != SUMMARY, name


def documents(folder: pathlib.Path) -> dict[str, Any]:
    """Each document by name. Unreadable lines are skipped; their units are run again."""
    by_name: dict[str, Any] = {}
    path = folder / FILE
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            document = json.loads(line)
            by_name[document.pop("unit")] = document
    return by_name


def write(folder: pathlib.Path, documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes a folder's documents anew."""
    lines = [_line(name, documents[name]) for name in sorted(documents, key=_place)]
    write_text(folder / FILE, "".join(lines))


def _line(name: str, document: Mapping[str, Any]) -> str:
    return json.dumps({"unit": name, **document}, allow_nan=False) + "\n"


def append(path: pathlib.Path, name: str, document: Mapping[str, Any]) -> None:
    """Appends a unit's document as one line, in one write, so that processes' lines do not mix.

    Raises ValueError for infinity and NaN, which JSON does not have.
    """
    line = _line(name, document).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(line)


def rows(path: pathlib.Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The metadata and timed rows of a suite, given its folder or file: rows of the stage `time`,
    or of `goals` where that has none.

    Raises ValueError if it holds no result.
    """
    folder = path if path.is_dir() else path.parent
    by_name = {name: document for name, _, document in read(folder)}
    if SUMMARY not in by_name:
        raise ValueError(f"{path}: holds no finished suite ({FILE})")
    timed_rows: dict[tuple, dict[str, Any]] = {}
    for stage in ("time/", "goals/"):
        for name, document in by_name.items():
            if name.startswith(stage):
                for r in document["rows"]:
                    timed_rows.setdefault((r["op"], r["case"], r["dtype"], r["provider"]), r)
    return by_name[SUMMARY]["meta"], list(timed_rows.values())
