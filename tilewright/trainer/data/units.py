"""Documents that belong together, such as the members of a pair: one unit in every order and bin;
and the samples of one row, which are held out together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from tilewright.trainer.columns import ROW
from tilewright.trainer.data.columns.column import Column


def together(columns: Mapping[str, Column]) -> list[str]:
    """The columns whose equal values join consecutive documents."""
    return [name for name, c in columns.items() if c.together and c.batched]


class Units:
    """Numbers rows, and the units of documents, as they are written: a number is that of one unit,
    whatever data sets and rows have been merged.

    first: the first document of each unit; empty where all are units of one document.
    """

    def __init__(self, columns: Mapping[str, Column]):
        self.names = together(columns)
        self.first: list[int] = []
        self._rows = 0
        self._last: np.ndarray | None = None
        self._within = False

    def begin_set(self, yields: Collection[str]) -> None:
        """A unit ends with its data set.   yields: the columns that the set's type makes. Units
        that it makes end with their row: the next one may be equal.
        """
        self._last, self._within = None, not {*self.names}.isdisjoint(yields)

    def numbered(self, batch: pa.RecordBatch, at: int) -> pa.RecordBatch:
        """Samples with the numbers of their rows and units.   at: the number of the first one."""
        if not batch.num_rows:
            return batch
        values = np.stack([batch.column(n).to_numpy() for n in (ROW, *self.names)])
        before = np.empty_like(values)
        before[:, 1:], before[:, 0] = values[:, :-1], values[:, 0]
        if self._last is not None:
            before[:, 0] = self._last
        changes = values != before
        changes[:, 0] |= self._last is None
        self._last = values[:, -1]
        new_row = changes[0]
        if self.names:
            begins = changes[1:].any(0) | (new_row & self._within)
            new_row = new_row & begins  # else one that the row before is joined to
            batch = _renumbered(batch, self.names, len(self.first) - 1 + np.cumsum(begins))
            self.first += (at + begins.nonzero()[0]).tolist()
        numbers = self._rows - 1 + np.cumsum(new_row)
        self._rows = int(numbers[-1]) + 1
        return _renumbered(batch, [ROW], numbers)


def _renumbered(batch: pa.RecordBatch, names: list[str], numbers: np.ndarray) -> pa.RecordBatch:
    for name in names:
        i = batch.schema.get_field_index(name)
        made = pa.array(numbers, batch.schema.field(i).type)
        batch = batch.set_column(i, batch.schema.field(i), made)
    return batch


def unfolded(units: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The documents of units, in order.   starts: the first document of each unit, and the end."""
    lengths = starts[units + 1] - starts[units]
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts[units] - before, lengths)


def rows_of(dataset: Any) -> np.ndarray | None:
    """The rows of the stored table that a data set consists of, in order; None: all of them."""
    # The datasets package has no public name for the rows of a selection or shuffle.
    rows = dataset._indices
    return None if rows is None else rows.column(0).to_numpy()


def values_of(dataset: Any, name: str) -> np.ndarray:
    """A column with one value per sample, in the order of the data set."""
    rows, stored = rows_of(dataset), dataset.data.column(name).to_numpy()
    return stored if rows is None else stored[rows]


def has_rows(dataset: Any) -> bool:
    """Whether the rows of samples are known: a set that was saved elsewhere may not say."""
    return ROW in dataset.column_names and pa.types.is_integer(dataset.data.column(ROW).type)


def held_together(dataset: Any, columns: Mapping[str, Column]) -> np.ndarray:
    """The number of what is held out with each sample of a prepared set, from 0 in the order of the
    set: its row, or, where rows are not known, its unit.
    """
    if not has_rows(dataset):
        starts = starts_of(dataset, columns)
        if starts is None:
            return np.arange(len(dataset))
        return np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    _, first, inverse = np.unique(values_of(dataset, ROW), return_index=True, return_inverse=True)
    place = np.empty_like(first)
    place[np.argsort(first)] = np.arange(len(first))
    return place[inverse]


def check_pairs(dataset: Any, columns: Mapping[str, Column]) -> None:
    """Raises ValueError for a unit whose documents are not chosen answers, each followed by its
    rejected one.
    """
    if (starts := starts_of(dataset, columns)) is None:
        return
    roles = values_of(dataset, "role")
    place = np.arange(len(roles)) - np.repeat(starts[:-1], np.diff(starts))
    wrong = roles != place % 2
    wrong[starts[1:] - 1] |= np.diff(starts) % 2 == 1
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(
            f"document {i} has role {roles[i]}: a pair must be a chosen answer (role 0) and, after "
            "it, the rejected one (role 1), with one number in pair"
        )


def starts_of(dataset: Any, columns: Mapping[str, Column]) -> np.ndarray | None:
    """The first document of each unit of a prepared set, and the end; None: all are units of one
    document.
    """
    names = [name for name in together(columns) if name in dataset.column_names]
    if not names or not len(dataset):
        return None
    values = np.stack([values_of(dataset, name) for name in names])
    changes = (values[:, 1:] != values[:, :-1]).any(0)
    if (rows := rows_of(dataset)) is not None:
        changes |= np.diff(rows) != 1  # a unit that is taken twice in a row
    return np.array([0, *(changes.nonzero()[0] + 1), len(dataset)])
