"""Rows of a data set as samples of tokens, one encoder a data set.

An encoder takes some rows, as an Arrow table, and returns their samples as a record batch with the
columns input_ids and labels (lists of int32). What it holds in memory is a few times those rows.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from tilewright.trainer.columns import IGNORE, REPLAYED, SCHEMA
from tilewright.trainer.config import Data, Dataset
from tilewright.trainer.data.routes import Routes
from tilewright.trainer.data.types.dataset_type import Asked, Refused
from tilewright.trainer.tables import DATASETS

log = logging.getLogger("tilewright")
ALPACA = (
    "; of Alpaca's columns make `prompt` (instruction and input) and `completion` (output), and "
    "set type to prompt_completion"
)
Row = Any  # names a row: its number, or a document's file and first byte
Arrays = tuple[np.ndarray, ...]  # input_ids, labels and, if they are replayed, routes of a sample


class RefusedRow(ValueError):
    """A row cannot be used.   row: where it is in the data set that was read."""

    def __init__(self, row: Row, reason: str):
        super().__init__(row, reason)
        self.row, self.reason = row, reason


@dataclasses.dataclass
class Encoded:
    """Samples, and how many were cut, have no target (see `has_target`), or are left out, with
    fewer than two tokens. Samples without a target are left out too, but of type tokenized.
    """

    batch: pa.RecordBatch
    cut: int
    unlabeled: int
    short: int


def longest(entry: Dataset, data: Data) -> int:
    """Tokens of a sample, at most."""
    bin_size = data.sample_packing_sequence_len
    return min(entry.max_seq_len or bin_size, bin_size)


def lists(parts: Iterable[np.ndarray], dtype: Any = np.int32) -> pa.ListArray:
    """Arrays as an Arrow list array of integers."""
    parts = [np.asarray(p, dtype) for p in parts]
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    values = np.concatenate(parts) if parts else np.empty(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def check_columns(entry: Dataset, names: list[str], features: Any) -> None:
    """Raises ValueError if the columns are not those of `entry.type`. Warns of a column that is
    not read, whose name is nearly that of one that would be.
    """
    row = DATASETS[entry.type]
    if not row.fits(names):
        either = " or ".join(" and ".join(f"`{c}`" for c in columns) for columns in row.needed)
        other = next(((kind, one) for kind, one in DATASETS.items() if one.fits(names)), None)
        if other is not None:
            also = f"; for samples that are {other[1].says} set type to {other[0]}"
        else:
            also = ALPACA if {"instruction", "output"} <= set(names) else ""
        raise ValueError(
            f"{entry.path}: type {entry.type} needs a column {either}, has {names}{also}"
        )
    read = set(row.columns)
    for name in sorted({*names} - read):
        if near := difflib.get_close_matches(name, sorted(read - {*names}), 1, cutoff=0.8):
            log.warning("%s: the column `%s` is not read; `%s` would be", entry.path, name, near[0])
    row.check(entry.path, features)


def has_target(labels: np.ndarray) -> bool:
    """Whether a sample's labels have one to learn from: nothing precedes the first token."""
    return bool((labels[1:] != IGNORE).any())


class Encoder:
    """The encoder of a data set. Raises ValueError if the tokenizer cannot serve its type."""

    def __init__(
        self,
        entry: Dataset,
        most: int,
        vocab: int,
        tokenizer: Any,
        features: Any,
        routes: Routes | None = None,
    ):
        """features: of the rows' columns.   routes: those that a tokenized row has, if they are
        replayed.
        """
        self.most, self.vocab, self.routes = most, vocab, routes
        self.kind = DATASETS[entry.type]
        asked = Asked(entry.path, entry.type, most, tokenizer, features, routes)
        self.samples_of = self.kind.samples(asked)

    def __call__(self, rows: Iterable[tuple[Row, Any]]) -> Encoded:
        """rows: (index, row). Raises RefusedRow."""
        out: tuple[list[np.ndarray], ...] = [], [], []
        cut = unlabeled = short = 0
        for index, row in rows:
            try:
                samples = [self._checked(sample) for sample in self.samples_of(row)]
            except (Refused, TypeError, ValueError) as refused:
                raise RefusedRow(index, str(refused)) from refused
            for ids, labels, *routes in samples:
                if len(ids) < 2:  # a single token has no target
                    short += self.kind.counts_short
                    continue
                cut += len(ids) > self.most
                ids, labels = ids[: self.most], labels[: self.most]
                if not has_target(labels):
                    unlabeled += 1
                    if not self.kind.keeps_unlabeled:
                        continue
                out[0].append(ids)
                out[1].append(labels)
                out[2].extend(r[: self.most].reshape(-1) for r in routes)
        arrays, schema = [lists(out[0]), lists(out[1])], SCHEMA
        if self.routes is not None:
            arrays, schema = [*arrays, lists(out[2], np.int16)], REPLAYED
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        return Encoded(batch, cut, unlabeled, short)

    def _checked(self, sample: Any) -> Arrays:
        """An index outside the embedding would end a GPU run with an assertion that names no
        sample.
        """
        if len(sample) != (2 if self.routes is None else 3):
            raise Refused(f"a sample must be input_ids and labels, got {len(sample)} columns")
        ids, labels = (np.asarray(tokens, np.int64) for tokens in sample[:2])
        if ids.shape != labels.shape or ids.ndim != 1:
            raise Refused(f"it has {ids.size} input_ids and {labels.size} labels")
        for tokens in (ids, labels[labels != IGNORE]):
            outside = tokens[(tokens < 0) | (tokens >= self.vocab)]
            if len(outside):
                raise Refused(
                    f"token {outside[0]} is not in the model's vocabulary of {self.vocab}"
                )
        return ids, labels, *sample[2:]
