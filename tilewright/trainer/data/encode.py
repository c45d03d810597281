"""Rows of a data set as samples of tokens, one encoder a data set.

An encoder takes some rows, as an Arrow table, and returns their samples as a record batch with the
columns input_ids and labels (lists of int32). What it holds in memory is a few times those rows.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tilewright.trainer.columns import IGNORE, ROW, SCHEMA
from tilewright.trainer.data import marks, masks
from tilewright.trainer.data.columns.column import COLUMNS, Column
from tilewright.trainer.data.fields import Data, Dataset
from tilewright.trainer.data.types.dataset_type import (
    DATASETS,
    WHOLE,
    Asked,
    DatasetType,
    Prompts,
    Refused,
    Span,
)
from tilewright.trainer.losses.loss import LOSSES
from tilewright.trainer.options import given_options

log = logging.getLogger("tilewright")
ALPACA = (
    "; of Alpaca's columns make `prompt` (instruction and input) and `completion` (output), and "
    "set type to prompt_completion"
)
LEFT_OUT = "; data.select_columns leaves a column out"
# Rows of texts have these names for other things, such as who speaks.
STRUCTURE = ("pair", "role", "prefix")
Row = Any  # names a row: its number, or a document's file and first byte
Sample = tuple[np.ndarray, np.ndarray, dict[str, Any]]  # input_ids, labels, further columns
Columns = Mapping[str, Column]  # by name


def schema(columns: Columns) -> pa.Schema:
    """The schema of files of samples."""
    further = (pa.field(name, c.type) for name, c in columns.items())
    return pa.schema([*SCHEMA, pa.field(ROW, pa.int64()), *further])


class Use(NamedTuple):
    """What samples are made for.   prompts: how they are cut.   stops: see `Asked`."""

    prompts: Prompts = WHOLE
    stops: tuple[int, ...] = ()


ANY = Use()


class RefusedRow(ValueError):
    """A row cannot be used.   row: where it is in the data set that was read."""

    def __init__(self, row: Row, reason: str):
        super().__init__(row, reason)
        self.row, self.reason = row, reason


@dataclasses.dataclass
class Encoded:
    """Samples, and how many were cut, have no target (see `has_target`), or are left out, with
    fewer than two tokens. Samples without a target are left out too, but of type tokenized.

    skipped: rows that cannot be used.   told: see `Asked`.
    """

    batch: pa.RecordBatch
    cut: int
    unlabeled: int
    short: int
    skipped: list[RefusedRow] = dataclasses.field(default_factory=list)
    told: Mapping[str, int] = dataclasses.field(default_factory=dict)


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


def check_columns(
    entry: Dataset, names: list[str], features: Any, columns: Columns, loss: str = ""
) -> None:
    """Raises ValueError if the columns are not those of `entry.type`, and further ones that are
    asked for, or say what to learn and are not read. Warns of another column that is not read,
    whose name is nearly that of one that would be.

    features: features of columns, as the datasets package has them, if a file declares them.
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
    for name, column in columns.items():
        if column.default is None and name not in (*names, *row.yields):
            kinds = [kind for kind, one in DATASETS.items() if name in one.yields]
            also = f"; data of type {' or '.join(kinds)} have it" if kinds else ""
            raise ValueError(
                f"{column.asked_by}: {entry.path} has no column {name}, has {names}{also}"
            )
    read = {*row.columns, *columns}
    if loss:
        _check_judged(entry, row, columns, loss)
    for name in sorted({*names} - read):
        if why := unread(entry, name, columns, loss):
            raise ValueError(f"{entry.path}: {why}")
    for name in sorted({*names} - read):
        if near := difflib.get_close_matches(name, sorted(read - {*names}), 1, cutoff=0.8):
            log.warning("%s: the column `%s` is not read; `%s` would be", entry.path, name, near[0])
    row.check(entry.path, features)


def _says(name: str, row: DatasetType) -> bool:
    """Whether a column that is not read says what is learned of rows."""
    if marks.OF_ROWS.fullmatch(name):
        return True
    return not row.tokenizer and (masks.unread(name) or (not row.aligned and name in masks.READ))


def _check_judged(entry: Dataset, row: DatasetType, columns: Columns, loss: str) -> None:
    """Raises ValueError if the loss does not read what judges samples."""
    if _instructing() & {*row.yields} and not columns.keys() & {*row.yields}:
        raise ValueError(
            f"train.loss = {loss}: {entry.path} has {row.says} (type {entry.type}), which this loss "
            f"would all learn alike: it does not read {_either(row.yields)}{_readers(row.yields)}"
        )


def unread(entry: Dataset, name: str, columns: Columns, loss: str) -> str | None:
    """Why rows with a column are refused that is not read: by its name it says what is learned."""
    row = DATASETS[entry.type]
    if _says(name, row):
        also = f"; {', '.join(masks.READ)} are read" if row.aligned else ""
        return f"type {entry.type} does not read the column `{name}`{also}{LEFT_OUT}"
    if not loss or (row.tokenizer and name in STRUCTURE):
        return None
    found = not_instructed({name}, columns, loss)
    return None if found is None else f"train.loss = {loss} {found}"


def not_instructed(names: Iterable[str], columns: Columns, loss: str) -> str | None:
    """What a loss does not read, of columns that say what is learned. What other settings of the
    run read may be there.
    """
    found = sorted(_instructing() & {*names} - {*columns, *LOSSES[loss].accepts})
    if not found:
        return None
    return f"does not read the column `{found[0]}`{_readers(found[:1])}{LEFT_OUT}"


def _instructing() -> set[str]:
    return {name for name, column in COLUMNS.items() if column.instructs}


def _readers(columns: Collection[str]) -> str:
    found = [name for name, loss in LOSSES.items() if {*columns} & {*loss.columns, *loss.accepts}]
    return f"; train.loss = {_either(found)} would" if found else ""


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)


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
        names: Collection[str],
        columns: Columns | None = None,
        skip: bool = False,
        number: int = 0,
        use: Use = ANY,
    ):
        """names: the rows' columns.   columns: further ones of samples.   skip: rows that cannot
        be used.   number: the place of the data set among those that are prepared together.
        """
        self.skip, self.number = skip, number
        self.most, self.vocab, self.columns = most, vocab, columns or {}
        self.kind = DATASETS[entry.type]
        self.asked = Asked(
            entry.path,
            entry.type,
            most,
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
        out: dict[str, list] = {name: [] for name in schema(self.columns).names}
        cut = unlabeled = short = 0
        self.asked.told.clear()
        for index, row in rows:
            try:
                if isinstance(row, Refused):
                    raise row
                samples = [self._checked(sample, row, index) for sample in self.samples_of(row)]
            except (Refused, OverflowError, TypeError, ValueError) as refused:
                if not self.skip:
                    raise RefusedRow(index, str(refused)) from refused
                skipped.append(RefusedRow(index, str(refused)))
                continue
            for ids, labels, further in samples:
                if len(ids) < 2:  # a single token has no target
                    short += self.kind.counts_short
                    continue
                cut += len(ids) > self.most
                ids, labels = ids[: self.most], labels[: self.most]
                if not has_target(labels):
                    unlabeled += 1
                    if not self.kind.keeps_unlabeled:
                        continue
                out["input_ids"].append(ids)
                out["labels"].append(labels)
                out[ROW].append(index if isinstance(index, int) else index[0])
                for name, column in self.columns.items():
                    out[name].append(column.cut(further[name], self.most))
        arrays = [
            lists(
                (np.reshape(v, -1) for v in out[field.name]),
                field.type.value_type.to_pandas_dtype(),
            )
            if pa.types.is_list(field.type)
            else pa.array(out[field.name], field.type)
            for field in schema(self.columns)
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema(self.columns))
        return Encoded(batch, cut, unlabeled, short, skipped, dict(self.asked.told))

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
            outside = tokens[(tokens < 0) | (tokens >= self.vocab)]
            if len(outside):
                raise Refused(
                    f"token {outside[0]} is not in the model's vocabulary of {self.vocab}"
                )
        further = self._further(row, dict(*own), len(ids) if whole is None else whole.of)
        if whole is not None:
            for name, column in self.columns.items():
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
        for name, column in self.columns.items():
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
