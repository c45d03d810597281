"""Rows of a data set as samples of tokens, one encoder a data set.

An encoder takes some rows, as an Arrow table, and returns their samples as a record batch with the
columns input_ids and labels (lists of int32). What it holds in memory is a few times those rows.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tilewright.trainer.columns import IGNORE, ROW, SCHEMA
from tilewright.trainer.data.columns.column import Column
from tilewright.trainer.data.fields import Data, Dataset
from tilewright.trainer.data.types.dataset_type import (
    DATASETS,
    WHOLE,
    Asked,
    Prompts,
    Refused,
    Span,
)
from tilewright.trainer.options import given_options

Row = Any  # names a row: its number, or a document's file and first byte
Sample = tuple[np.ndarray, np.ndarray, dict[str, Any]]  # input_ids, labels, further columns
Columns = Mapping[str, Column]  # by name


def schema(columns: Columns) -> pa.Schema:
    """The schema of files of samples."""
    further = (pa.field(name, c.type) for name, c in columns.items())
    return pa.schema([*SCHEMA, pa.field(ROW, pa.int64()), *further])


class Use(NamedTuple):
    """What samples of all data sets are made for.   vocab: tokens that there are.   columns:
    further ones of samples.   prompts: how they are cut.   stops: see `Asked`.
    """

    data: Data
    vocab: int
    columns: Columns
    prompts: Prompts = WHOLE
    stops: tuple[int, ...] = ()

    @property
    def skips(self) -> bool:
        """Whether rows that cannot be used are skipped."""
        return self.data.on_bad_row == "skip"


class RefusedRow(ValueError):
    """A row cannot be used.   row: where it is in the data set that was read."""

    def __init__(self, row: Row, reason: str):
        super().__init__(row, reason)
        self.row, self.reason = row, reason


class Counts(collections.Counter[str]):
    """Numbers of samples.   made: written.   cut.   targets, unlabeled: with a target (see
    `has_target`), and without one, which all types but tokenized leave out.   short: left out, with
    fewer than two tokens.   skipped: rows that cannot be used.
    """

    def nothing(self) -> str:
        """Why no sample has a target."""
        if self["skipped"] and not self["unlabeled"]:
            return (
                f"{self['skipped']} rows were skipped (data.on_bad_row = skip), and the others "
                "hold no sample of two tokens or more"
            )
        if not self["unlabeled"]:
            return "they hold no sample of two tokens or more"
        if self["made"]:
            return f"none of the {self['unlabeled']} samples has a label after its first token"
        return (
            f"none of the {self['unlabeled']} samples has an answer within the tokens to which it "
            "is cut (data.sample_packing_sequence_len, or max_seq_len of the data set)"
        )


class Encoded(NamedTuple):
    """Samples.   skipped: rows that cannot be used.   told: see `Asked`."""

    batch: pa.RecordBatch
    counts: Counts
    skipped: list[RefusedRow]
    told: collections.Counter[str]


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


def has_target(labels: np.ndarray) -> bool:
    """Whether a sample's labels have one to learn from: nothing precedes the first token."""
    return bool((labels[1:] != IGNORE).any())


class Encoder:
    """The encoder of a data set. Raises ValueError if the tokenizer cannot serve its type."""

    def __init__(
        self, entry: Dataset, number: int, tokenizer: Any, names: Collection[str], use: Use
    ):
        """number: the place of the data set among those that are prepared together.   names: the
        rows' columns.
        """
        self.number, self.use, self.kind = number, use, DATASETS[entry.type]
        self.most = longest(entry, use.data)
        self.schema = schema(use.columns)
        self.asked = Asked(
            entry.path,
            entry.type,
            self.most,
            tokenizer,
            names,
            use.prompts,
            stops=use.stops,
            options=given_options(self.kind.options, entry.type_args),
        )
        self.samples_of = self.kind.samples(self.asked)

    def __call__(self, rows: Iterable[tuple[Row, Any]]) -> Encoded:
        """rows: (index, row), or (index, what is wrong with it). Raises RefusedRow."""
        skipped: list[RefusedRow] = []
        out: dict[str, list] = {name: [] for name in self.schema.names}
        counts = Counts()
        self.asked.told.clear()
        for index, row in rows:
            try:
                if isinstance(row, Refused):
                    raise row
                samples = [self._checked(sample, row, index) for sample in self.samples_of(row)]
            except (Refused, OverflowError, TypeError, ValueError) as refused:
                if not self.use.skips:
                    raise RefusedRow(index, str(refused)) from refused
                skipped.append(RefusedRow(index, str(refused)))
                continue
            for ids, labels, further in samples:
                if len(ids) < 2:  # a single token has no target
                    counts["short"] += self.kind.counts_short
                    continue
                counts["cut"] += len(ids) > self.most
                ids, labels = ids[: self.most], labels[: self.most]
                learned = has_target(labels)
                counts["targets" if learned else "unlabeled"] += 1
                if not (learned or self.kind.keeps_unlabeled):
                    continue
                out["input_ids"].append(ids)
                out["labels"].append(labels)
                out[ROW].append(index if isinstance(index, int) else index[0])
                for name, column in self.use.columns.items():
                    out[name].append(column.cut(further[name], self.most))
        arrays = [
            lists(map(np.ravel, out[field.name]), field.type.value_type.to_pandas_dtype())
            if pa.types.is_list(field.type)
            else pa.array(out[field.name], field.type)
            for field in self.schema
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        counts.update(made=batch.num_rows, skipped=len(skipped))
        return Encoded(batch, counts, skipped, self.asked.told.copy())

    def _checked(self, sample: Any, row: Any, index: Row) -> Sample:
        """An index outside the embedding would end a GPU run with an assertion that names no
        sample.
        """
        ids, labels, *own = sample
        whole = own.pop() if own and isinstance(own[-1], Span) and self.kind.aligned else None
        if len(own) > 1 or not all(isinstance(o, Mapping) for o in own):
            raise Refused(
                "a sample must be input_ids, labels and, if there are further columns, a mapping of "
                f"them, got {len(sample)} items"
            )
        ids, labels = (np.asarray(tokens, np.int64) for tokens in (ids, labels))
        if ids.shape != labels.shape or ids.ndim != 1:
            raise Refused(f"it has {ids.size} input_ids and {labels.size} labels")
        for tokens in (ids, labels[labels != IGNORE]):
            outside = tokens[(tokens < 0) | (tokens >= self.use.vocab)]
            if len(outside):
                raise Refused(
                    f"token {outside[0]} is not in the model's vocabulary of {self.use.vocab}"
                )
        further = self._further(row, dict(*own), len(ids) if whole is None else whole.of)
        if whole is not None:
            for name, column in self.use.columns.items():
                if column.each == "token" and not (own and name in own[0]):
                    further[name] = further[name][whole.first : whole.stop]
        if "origin" in further and isinstance(index, int):
            further["origin"] = f"{self.number}:{index}"
        return ids, labels, further

    def _further(self, row: Any, own: dict[str, Any], tokens: int) -> dict[str, Any]:
        """The further columns of a sample.   own: those that its type made."""
        if unknown := own.keys() - {*self.kind.yields}:
            raise Refused(f"a sample has {min(unknown)}, which its type does not say it yields")
        further = {}
        for name, column in self.use.columns.items():
            given = own.get(name, row.get(name))
            by_token = isinstance(given, list | tuple | np.ndarray | pa.Array) and name not in own
            if column.each == "token" and by_token and not self.kind.aligned:
                raise Refused(
                    f"{name}: a list of numbers needs rows that are tokens (type: tokenized); "
                    "accepted is one number, which stands for all tokens"
                )
            try:
                further[name] = column.read(given, tokens)
            except (TypeError, ValueError) as error:
                raise Refused(column.said(name, error)) from error
        return further
