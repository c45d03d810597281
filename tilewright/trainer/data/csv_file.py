"""Files of comma-separated values. Each cell is text; an empty one is null, quoted or not. What is
read as a number or as true and false says so (`DatasetType.cells`).
"""

from __future__ import annotations

import codecs
import csv
import functools
import io
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

from tilewright.trainer.data import rows
from tilewright.trainer.data.defects import Defect, undecoded
from tilewright.trainer.data.types.dataset_type import Refused

ENDED = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class CsvFile(rows.TextFile):
    def index(self) -> Any:
        assert self.header  # else it raises
        after_header = itertools.islice(self._records(), 1, None)
        return self.indexed((start, line) for start, line, _ in after_header)

    @functools.cached_property
    def header(self) -> list[str]:
        """Raises ValueError."""
        try:
            return next(self._records())[2]
        except StopIteration:
            raise ValueError(f"{self.shown}: there is nothing in it") from None
        except Defect as defect:
            raise ValueError(f"{self.shown}: {defect}") from defect

    def _records(self) -> Iterator[tuple[int, int, list[str]]]:
        with open(self.path, "rb") as file:
            start = 3 * (file.read(3) == codecs.BOM_UTF8)
            file.seek(start)
            yield from _records(file, start)

    def _names(self, count: int) -> list[str]:
        return [*dict.fromkeys(self.header)]

    def _split(self, data: bytes) -> Iterator[tuple[int, list[str]]]:
        for _, line, cells in _records(io.BytesIO(data), 0):
            yield line, cells

    def _row(self, raw: list[str], asking: rows.Asking) -> rows.Row:
        if len(raw) > len(self.header):
            return Refused(f"it has {len(raw)} cells, and the header {len(self.header)}")
        row = asking.of(dict(zip(self.header, raw, strict=False)))
        if isinstance(row, Refused):
            return row
        for name, cell in row.items():
            if self.header.count(name) > 1:
                return Refused(f"the header has the column {name} twice")
            if cell is None:
                continue
            if not cell.isascii() and (wrong := undecoded(cell)):
                return Refused(wrong)
            row[name] = asking.cells.get(name, str)(cell) if cell else None
        return row


def _records(file: Any, start: int) -> Iterator[tuple[int, int, list[str]]]:
    """The first byte of each record that is not blank, the lines before it, and its cells."""
    csv.field_size_limit(sys.maxsize)
    taken: list[bytes] = []
    ended = False

    def lines() -> Iterator[str]:
        nonlocal ended
        for raw in file:
            for line in ENDED.findall(raw):
                taken.append(line)
                yield line.decode("utf-8", "surrogateescape")
        ended = True

    number = 0
    for cells in csv.reader(lines()):
        if ended:  # the reader has asked for another line of this record
            raise Defect(f"line {number + 1}", "it ends within a quoted cell")
        if cells:
            yield start, number, cells
        start += sum(map(len, taken))
        number += len(taken)
        taken.clear()
