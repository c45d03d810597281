"""Rows of a data set before they are tokenized: where they are, and how they are read in parts of
bounded size.

All files but text are read by datasets; text here, since its reader holds a whole file as one
string. What is beside that finds the file and line of a refused row, which datasets does not keep.
"""

from __future__ import annotations

import array
import csv
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from tilewright.trainer.data.types.dataset_type import Refused
from tilewright.trainer.data.types.text import PIECE

MOST_ROWS = 1000  # of a part: short rows cost memory too
# A tokenizer splits text before the first character of a line.
LINE = re.compile(rb".*\n(?=\S)", re.DOTALL)
WORD = re.compile(rb".+(?=\s)", re.DOTALL)

Part = Any  # what `parts` yields and `read` takes: small


def share(first: int, stop: int, count: int, index: int) -> tuple[int, int]:
    """The range of part `index` of `count` contiguous parts of a range."""
    size, more = divmod(stop - first, count)
    first += size * index + min(index, more)
    return first, first + size + (index < more)


@dataclasses.dataclass
class Rows:
    """Rows first to stop of a data set.   place: says where a row is."""

    dataset: Any
    place: Callable[[int], str]
    arrow: bool = False  # lists as Arrow arrays
    first: int = 0
    stop: int = -1

    def __post_init__(self):
        self.stop = len(self.dataset) if self.stop < 0 else self.stop

    def __len__(self) -> int:
        return self.stop - self.first

    @property
    def column_names(self) -> list[str]:
        return self.dataset.column_names

    @property
    def features(self) -> Any:
        return self.dataset.features

    @property
    def nbytes(self) -> int:
        return self.dataset.data.nbytes * len(self) // max(1, self.dataset.data.num_rows)

    def select_columns(self, names: list[str]) -> Rows:
        return dataclasses.replace(self, dataset=self.dataset.select_columns(names))

    def shard(self, count: int, index: int) -> Rows:
        first, stop = share(self.first, self.stop, count, index)
        return dataclasses.replace(self, first=first, stop=stop)

    def head(self, count: int) -> Rows:
        """The first rows."""
        return dataclasses.replace(self, stop=min(self.stop, self.first + count))

    def parts(self) -> Iterator[Part]:
        mean = max(1, self.nbytes // max(1, len(self)))
        step = max(1, min(MOST_ROWS, PIECE // mean))
        for first in range(self.first, self.stop, step):
            yield first, min(first + step, self.stop)

    def read(self, part: Part) -> Iterator[tuple[int, dict[str, Any] | Refused]]:
        first, stop = part
        try:
            rows = list(self._read(first, stop))
        except UnicodeDecodeError as error:
            if stop - first == 1:
                reason = f"it is not UTF-8: {error.reason} at byte {error.start + 1} of a text"
                yield first, Refused(reason)
                return
            rows = (found for i in range(first, stop) for found in self.read((i, i + 1)))
        yield from rows

    def _read(self, first: int, stop: int) -> Iterator[tuple[int, dict[str, Any]]]:
        rows = self.dataset.with_format("arrow" if self.arrow else None)[first:stop]
        names = self.column_names
        for i in range(stop - first):
            if self.arrow:
                cells = ((n, rows.column(n)[i]) for n in names)
                # A list as an array; a string has no values.
                yield (
                    first + i,
                    {n: c.values if hasattr(c, "values") else c.as_py() for n, c in cells},
                )
            else:
                yield first + i, {n: rows[n][i] for n in names}


@dataclasses.dataclass
class Documents:
    """Text files, each of which is a document. A long one is read in parts that end at line
    ends.
    """

    files: list[str]
    first: int = 0
    stop: int = -1

    def __post_init__(self):
        self.stop = len(self.files) if self.stop < 0 else self.stop

    def __len__(self) -> int:
        return self.stop - self.first

    column_names = ("text",)

    @property
    def features(self) -> Any:
        import datasets

        return {"text": datasets.Value("string")}

    @property
    def nbytes(self) -> int:
        return sum(pathlib.Path(f).stat().st_size for f in self.files[self.first : self.stop])

    def select_columns(self, names: list[str]) -> Documents:
        return self

    def shard(self, count: int, index: int) -> Documents:
        first, stop = share(self.first, self.stop, count, index)
        return dataclasses.replace(self, first=first, stop=stop)

    def head(self, count: int) -> Documents:
        """The first files."""
        return dataclasses.replace(self, stop=min(self.stop, self.first + count))

    def place(self, row: tuple[int, int]) -> str:
        index, start = row
        return f"{self.files[index]}: from line {_lines(self.files[index], start) + 1} on"

    def parts(self) -> Iterator[Part]:
        """Lists of (file, first byte, last byte, size of the file)."""
        part: list[tuple[int, int, int, int]] = []
        for i in range(self.first, self.stop):
            size, start = pathlib.Path(self.files[i]).stat().st_size, 0
            with open(self.files[i], "rb") as file:
                while start < size or not size:
                    stop = start + _fitting(file, start)
                    part.append((i, start, stop, size))
                    if sum(b - a for _, a, b, _ in part) > PIECE // 2 or len(part) == MOST_ROWS:
                        yield part
                        part = []
                    if not size:
                        break
                    start = stop
        if part:
            yield part

    def read(self, part: Part) -> Iterator[tuple[tuple[int, int], dict[str, Any] | Refused]]:
        for i, start, stop, size in part:
            with open(self.files[i], "rb") as file:
                file.seek(start)
                data = file.read(stop - start)
            try:
                text = data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
            except UnicodeDecodeError as error:
                reason = f"it is not UTF-8: {error.reason} at byte {start + error.start}"
                yield (i, start), Refused(reason)
                continue
            yield (i, start), {"text": text, "first": start == 0, "last": stop == size}


def _fitting(file: Any, start: int) -> int:
    """Bytes of the part that begins at `start`: cut after a line end, else before a space, else
    between characters.
    """
    file.seek(start)
    window = file.read(PIECE + 1)
    if len(window) <= PIECE:
        return len(window)
    if found := LINE.match(window) or WORD.match(window):
        return found.end()
    cut = PIECE
    while cut > 1 and window[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _lines(path: str, stop: int) -> int:
    """Line ends in the first `stop` bytes of a file."""
    with open(path, "rb") as file:
        return sum(file.read(min(PIECE, stop - at)).count(b"\n") for at in range(0, stop, PIECE))


def in_files(files: list[str], kind: str, row: int) -> str | None:
    """The file and line, or row, of a row of some files that were read one after the other. None if
    it cannot be told. Reads the files: only an error asks.
    """
    for path in files:
        numbers = _json_lines(path) if kind == "json" else None
        if numbers is None and kind == "json":
            return f"{path}: row {row + 1}" if len(files) == 1 else None
        count = _count(path, kind) if numbers is None else len(numbers)
        if row < count:
            at = f"row {row + 1}" if numbers is None else f"line {numbers[row]}"
            return f"{path}: {at}"
        row -= count
    return None


def _json_lines(path: str) -> array.array | None:
    """The numbers of lines that hold a row; None for a file whose rows are not lines: it is one
    array, or a line has a part of a row or several.
    """
    numbers = array.array("q")
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig", "replace"))
            except ValueError:
                return None
            if not isinstance(row, dict):
                return None
            numbers.append(number)
    return numbers


def _count(path: str, kind: str) -> int:
    """Rows of a file."""
    if kind == "parquet":
        import pyarrow.parquet as pq

        return pq.ParquetFile(path).metadata.num_rows
    if kind == "csv":
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            return max(0, sum(1 for row in csv.reader(file) if row) - 1)
    import pyarrow as pa

    with pa.OSFile(path) as file:
        try:
            return sum(batch.num_rows for batch in pa.ipc.open_stream(file))
        except pa.ArrowInvalid:  # Arrow's file format
            file.seek(0)
            reader = pa.ipc.open_file(file)
            return sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))
