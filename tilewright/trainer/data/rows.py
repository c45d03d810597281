"""Rows of a data set before they are tokenized: where they are, and how they are read in parts of
bounded size.

A row is read as its own file says, whatever other rows and files hold: no type is guessed. Files
of JSON and CSV are read from the bytes of the rows that are asked for; files that declare their
types, by these types.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from tilewright.trainer.data.defects import Defect
from tilewright.trainer.data.types.dataset_type import Refused
from tilewright.trainer.data.types.text import PIECE

MOST_ROWS = 1000  # of a part: short rows cost memory too
HEAD = 100  # rows of a file whose keys say which columns there are
# A tokenizer splits text before the first character of a line.
LINE = re.compile(rb".*\n(?=\S)", re.DOTALL)
WORD = re.compile(rb".+(?=\s)", re.DOTALL)

Part = Any  # what `parts` yields and `read` takes: small


def share(first: int, stop: int, count: int, index: int) -> tuple[int, int]:
    """The range of part `index` of `count` contiguous parts of a range."""
    size, more = divmod(stop - first, count)
    first += size * index + min(index, more)
    return first, first + size + (index < more)


def _none(name: str) -> None:
    return None


class Asking(NamedTuple):
    """What is read of a row.   columns: null where a row has no such; None: all that it has.
    cells: how the text of a table's cell is read, of columns that are not text.   arrow: lists as
    Arrow arrays, of files that have such.   refused: why rows with another column are, where its
    name says so; a column may begin late in a file that does not declare its columns.
    """

    columns: tuple[str, ...] | None = None
    cells: Mapping[str, Callable[[str], Any]] = {}
    arrow: bool = False
    refused: Callable[[str], str | None] = _none

    def of(self, row: Mapping[str, Any]) -> dict[str, Any] | Refused:
        if self.columns is None:
            return {**row}
        for name in row:
            if name not in self.columns and row[name] is not None and (why := self.refused(name)):
                return Refused(why)
        return {n: row.get(n) for n in self.columns}


EVERYTHING = Asking()
Row = dict[str, Any] | Refused


class File:
    """A file of rows.   shown: its name, in errors.   nbytes: about those of its rows."""

    shown: str
    nbytes: int

    def __len__(self) -> int:
        raise NotImplementedError

    @functools.cached_property
    def names(self) -> list[str]:
        """The columns of the first rows."""
        raise NotImplementedError

    def every_name(self) -> list[str]:
        """The columns of all rows."""
        return self.names

    @functools.cached_property
    def features(self) -> Mapping[str, Any]:
        """Those of its columns, as the datasets package has them, if it declares them."""
        return {}

    def parts(self, first: int, stop: int, asking: Asking) -> Iterator[tuple[int, int]]:
        raise NotImplementedError

    def read(self, first: int, stop: int, asking: Asking) -> Iterator[Row]:
        raise NotImplementedError

    def place(self, row: int) -> str:
        return f"{self.shown}: row {row + 1}"


class _Index(NamedTuple):
    """The first byte and the first row of each segment of a file, and the end of the last one; and
    the number of lines before each.
    """

    bytes: array.array
    firsts: array.array
    lines: array.array

    @property
    def rows(self) -> int:
        return self.firsts[-1]


class TextFile(File):
    """A file whose rows are text. It is read once to find them, and again where a part of them is
    needed: the index has an entry for MOST_ROWS rows or PIECE bytes.
    """

    of_lines = True  # whether a row is found by its line

    def __init__(self, path: str, shown: str | None = None):
        self.path, self.shown = path, shown or path
        self.nbytes = pathlib.Path(path).stat().st_size

    def index(self) -> _Index:
        """Raises Defect."""
        raise NotImplementedError

    def _split(self, data: bytes) -> Iterator[tuple[int, Any]]:
        """The rows of a segment, each with the lines of the segment before it. Raises Defect."""
        raise NotImplementedError

    def _row(self, raw: Any, asking: Asking) -> Row:
        raise NotImplementedError

    def _names(self, count: int) -> list[str]:
        """The columns of so many rows."""
        raise NotImplementedError

    @functools.cached_property
    def _index(self) -> _Index:
        try:
            return self.index()
        except Defect as defect:
            raise ValueError(f"{self.shown}: {defect}") from defect

    def indexed(self, rows: Iterable[tuple[int, int]]) -> _Index:
        """rows: the first byte of each, and the lines before it."""
        index, count = _Index(*(array.array("q") for _ in _Index._fields)), 0
        for start, line in rows:
            if (
                not count
                or count - index.firsts[-1] >= MOST_ROWS
                or start - index.bytes[-1] >= PIECE
            ):
                index.bytes.append(start)
                index.firsts.append(count)
                index.lines.append(line)
            count += 1
        index.bytes.append(self.nbytes)
        index.firsts.append(count)
        return index

    def __len__(self) -> int:
        return self._index.rows

    @functools.cached_property
    def names(self) -> list[str]:
        return self._names(min(HEAD, len(self)))

    def every_name(self) -> list[str]:
        return self._names(len(self))

    def _segments(self, first: int, stop: int) -> Iterable[int]:
        """Those that have rows first to stop."""
        if first >= stop:
            return ()
        starts = self._index.firsts
        return range(bisect.bisect_right(starts, first) - 1, bisect.bisect_left(starts, stop))

    def parts(self, first: int, stop: int, asking: Asking) -> Iterator[tuple[int, int]]:
        for at in self._segments(first, stop):
            yield max(first, self._index.firsts[at]), min(stop, self._index.firsts[at + 1])

    def _read(self, first: int, stop: int) -> Iterator[tuple[int, int, Any]]:
        """(row, lines before it, what it is read from)."""
        for at in self._segments(first, stop):
            start, end = self._index.bytes[at : at + 2]
            with open(self.path, "rb") as file:
                file.seek(start)
                data = file.read(end - start)
            for row, (line, raw) in enumerate(self._split(data), self._index.firsts[at]):
                if row >= stop:
                    return
                if row >= first:
                    yield row, self._index.lines[at] + line, raw

    def read(self, first: int, stop: int, asking: Asking) -> Iterator[Row]:
        for _, _, raw in self._read(first, stop):
            yield self._row(raw, asking)

    def place(self, row: int) -> str:
        if self.of_lines:
            for _, line, _ in self._read(row, row + 1):
                return f"{self.shown}: line {line + 1}"
        return super().place(row)


class Range(NamedTuple):
    """Rows first to stop of a file."""

    file: int
    first: int
    stop: int


@dataclasses.dataclass
class Source:
    """What the rows of a data set are read from: the first to the stop of all that it holds."""

    first: int = dataclasses.field(default=0, kw_only=True)
    stop: int = dataclasses.field(default=-1, kw_only=True)  # -1: all

    def __post_init__(self):
        self.stop = self._all() if self.stop < 0 else self.stop

    def _all(self) -> int:
        """How many rows it holds."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.stop - self.first

    def shard(self, count: int, index: int) -> Self:
        first, stop = share(self.first, self.stop, count, index)
        return dataclasses.replace(self, first=first, stop=stop)

    def head(self, count: int) -> Self:
        """The first rows."""
        return dataclasses.replace(self, stop=min(self.stop, self.first + count))

    @property
    def column_names(self) -> list[str]:
        """The columns of the files' first rows."""
        raise NotImplementedError

    def every_column(self) -> list[str]:
        """The columns of all rows. It reads every row."""
        return self.column_names

    def select_columns(self, names: Iterable[str]) -> Self:
        return self

    def declared(self) -> Iterator[tuple[Source, str, Mapping[str, Any]]]:
        """The rows of each file that declares types, its name and its columns' features."""
        return iter(())

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    def parts(self) -> Iterator[Part]:
        raise NotImplementedError

    def read(self, part: Part) -> Iterator[tuple[Any, Row]]:
        """The rows of a part, each with what `place` knows it by."""
        raise NotImplementedError

    def place(self, row: Any) -> str:
        """Where a row is, for errors."""
        raise NotImplementedError


@dataclasses.dataclass
class Rows(Source):
    """Those of some files' ranges, one after the other. Rows are known by their numbers among all
    of these.
    """

    files: Sequence[File]
    ranges: list[Range]
    asking: Asking = EVERYTHING

    @classmethod
    def of(cls, files: Sequence[File]) -> Rows:
        return cls(files, [Range(i, 0, len(file)) for i, file in enumerate(files)])

    def _all(self) -> int:
        return sum(r.stop - r.first for r in self.ranges)

    @property
    def column_names(self) -> list[str]:
        return self._asked(n for file in self.files for n in file.names)

    def every_column(self) -> list[str]:
        return self._asked(n for file in self.files for n in file.every_name())

    def _asked(self, names: Iterable[str]) -> list[str]:
        asked = self.asking.columns
        return [n for n in dict.fromkeys(names) if asked is None or n in asked]

    @property
    def nbytes(self) -> int:
        own = ((self.files[i], b - a) for i, a, b in self._own())
        return sum(file.nbytes * rows // max(1, len(file)) for file, rows in own)

    def declared(self) -> Iterator[tuple[Source, str, Mapping[str, Any]]]:
        for i, file in enumerate(self.files):
            if file.features:
                asked = self._asked(file.features)
                ranges = [r for r in self.ranges if r.file == i]
                features = {n: file.features[n] for n in asked}
                yield Rows(self.files, ranges, self.asking), file.shown, features

    def select_columns(self, names: Iterable[str]) -> Rows:
        columns = tuple(self._asked(names))
        return dataclasses.replace(self, asking=self.asking._replace(columns=columns))

    def _own(self) -> Iterator[Range]:
        """The ranges of rows first to stop."""
        before = 0
        for i, first, stop in self.ranges:
            a, b = max(self.first - before, 0), min(self.stop - before, stop - first)
            if a < b:
                yield Range(i, first + a, first + b)
            before += stop - first

    def parts(self) -> Iterator[Part]:
        """(file, first row, last row, number of the first)."""
        number = self.first
        for i, first, stop in self._own():
            for a, b in self.files[i].parts(first, stop, self.asking):
                yield i, a, b, number
                number += b - a

    def read(self, part: Part) -> Iterator[tuple[int, Row]]:
        i, first, stop, number = part
        yield from enumerate(self.files[i].read(first, stop, self.asking), number)

    def place(self, row: int) -> str:
        for i, first, stop in self.ranges:
            if row < stop - first:
                return self.files[i].place(first + row)
            row -= stop - first
        raise IndexError(row)


@dataclasses.dataclass
class Documents(Source):
    """Text files, each of which is a document. A long one is read in parts that end at line ends,
    each a row, known by its file and its first byte.
    """

    files: list[str]

    def _all(self) -> int:
        return len(self.files)

    @property
    def column_names(self) -> list[str]:
        return ["text"]

    @property
    def nbytes(self) -> int:
        return sum(pathlib.Path(f).stat().st_size for f in self.files[self.first : self.stop])

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

    def read(self, part: Part) -> Iterator[tuple[tuple[int, int], Row]]:
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
            text = text if start else text.removeprefix("\ufeff")  # a mark of byte order
            yield (i, start), {"text": text, "first": start == 0, "last": stop == size}


def _fitting(file: Any, start: int) -> int:
    """Bytes of the part that begins at `start`: cut after a line end, else before a space, else
    between characters.
    """
    file.seek(start)
    window = file.read(PIECE + 1)
    if len(window) <= PIECE:
        return len(window)
    if whole := LINE.match(window) or WORD.match(window):
        return whole.end()
    cut = PIECE
    while cut > 1 and window[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _lines(path: str, stop: int) -> int:
    """Line ends in the first `stop` bytes of a file."""
    with open(path, "rb") as file:
        return sum(file.read(min(PIECE, stop - at)).count(b"\n") for at in range(0, stop, PIECE))
