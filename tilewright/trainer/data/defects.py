"""Finds the first place at which a data file cannot be read. Only an error asks: the libraries that
read files name neither the file nor its line, or number the lines of a block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

KINDS = {str: "a string", bool: "a boolean", list: "a list", dict: "an object"}


class Defect(Exception):
    """A place in a file, if it is known ("line 7"), and a reason."""

    def __init__(self, place: str, reason: object):
        super().__init__(": ".join(filter(None, (place, " ".join(str(reason).split())))))


def find(files: list[str], kind: str) -> str | None:
    """The file, the place and the reason, one sentence; None if all files can be read one by one.

    kind: json, csv, parquet or arrow.
    """
    types: dict[str, tuple[str, str]] = {}  # JSON: of all files together
    for path in files:
        try:
            _json(path, types) if kind == "json" else READ[kind](path)
        except Defect as defect:
            return f"{path}: {defect}"
        except Exception as error:  # readers' exceptions have no common base
            return f"{path}: {Defect('', error)}"
    return None


def _json(path: str, types: dict[str, tuple[str, str]]) -> None:
    with open(path, "rb") as file:
        if file.read(1) == b"[":
            file.seek(0)
            _parsed(file.read(), 1)
            return
        file.seek(0)
        empty = True
        for number, line in enumerate(file, 1):
            if line.strip():
                empty = False
                _same_types(_parsed(line, number), f"{path}: line {number}", number, types)
        if empty:
            raise Defect("", "there is nothing in it")


def _parsed(text: bytes, first: int) -> Any:
    """first: the number of the first line."""
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_once)
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except _Twice as twice:
        raise Defect(_line_of(text, first), f"{twice} is there twice in one object") from twice
    except UnicodeEncodeError as error:
        reason = "a string in it has half of a surrogate pair"
        raise Defect(_line_of(text, first), reason) from error
    except UnicodeDecodeError as error:
        at = first + text[: error.start].count(b"\n")
        column = error.start - text.rfind(b"\n", 0, error.start)
        raise Defect(f"line {at}", f"it is not UTF-8: {error.reason} at byte {column}") from error
    except json.JSONDecodeError as error:
        at = first + error.lineno - 1
        if error.pos >= len(error.doc.rstrip()):  # the position may be that of the next line
            last = first + text.rstrip().count(b"\n")
            raise Defect(f"line {last}", "it ends within a JSON value") from error
        reason = f"it is not JSON: {error.msg} at character {error.colno}"
        raise Defect(f"line {at}", reason) from error


class _Twice(Exception):
    """A key of an object."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(key)
        found[key] = value
    return found


def _line_of(text: bytes, first: int) -> str:
    """Nothing for a text of several lines, of which nobody has said which."""
    return "" if b"\n" in text.strip() else f"line {first}"


def _same_types(row: Any, place: str, number: int, types: dict[str, tuple[str, str]]) -> None:
    if not isinstance(row, dict):
        raise Defect(f"line {number}", f"it is {_kind(row)}, and must be an object")
    for name, value in _columns(row):
        now = _kind(value)
        before, where = types.setdefault(name, (now, place))
        if before != now:
            raise Defect(f"line {number}", f"{name} is {now}, and {before} in {where}")


def _columns(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Names of columns and their values, nested ones included, nulls excluded."""
    if value is None:
        return
    if name:
        yield name, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _columns(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for inner in value:
            yield from _columns(inner, f"{name}[]")


def _kind(value: Any) -> str:
    return "null" if value is None else KINDS.get(type(value), "a number")


def _csv(path: str) -> None:
    import pandas

    for _ in pandas.read_csv(path, iterator=True, chunksize=10_000):
        pass


def _parquet(path: str) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        _batches(file.iter_batches())


def _arrow(path: str) -> None:
    import pyarrow as pa

    with pa.OSFile(path) as file:
        try:
            batches = iter(pa.ipc.open_stream(file))
        except pa.ArrowInvalid:  # Arrow's file format
            file.seek(0)
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        _batches(batches)


def _batches(batches: Iterator[Any]) -> None:
    row = 0
    try:
        for batch in batches:
            batch.validate(full=True)
            row += batch.num_rows
    except Exception as error:  # readers' exceptions have no common base
        raise Defect(f"from row {row + 1} on", error) from error


READ = {"csv": _csv, "parquet": _parquet, "arrow": _arrow}
