"""Which columns of a data set are read, and which are refused: those that are missing, hold values
of another kind, or say what is learned and are not read.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
from collections.abc import Collection, Iterable
from typing import Any

from tilewright.trainer.data import marks, masks
from tilewright.trainer.data.columns.column import COLUMNS
from tilewright.trainer.data.encode import Columns, Use
from tilewright.trainer.data.fields import Dataset
from tilewright.trainer.data.rows import Rows, Source
from tilewright.trainer.data.types.dataset_type import DATASETS, DatasetType, Refused, number
from tilewright.trainer.data.types.tokenized import NotIntegers
from tilewright.trainer.losses.loss import LOSSES

log = logging.getLogger("tilewright")
ALPACA = (
    "; of Alpaca's columns make `prompt` (instruction and input) and `completion` (output), and "
    "set type to prompt_completion"
)
LEFT_OUT = "; data.select_columns leaves a column out"
# Rows of texts have these names for other things, such as who speaks.
STRUCTURE = ("pair", "role", "prefix")


def check_columns(
    entry: Dataset, names: list[str], features: Any, columns: Columns, loss: str = ""
) -> None:
    """Raises ValueError if the columns are not those of `entry.type`, and further ones that are
    asked for, or say what to learn and are not read. Warns of another column that is not read,
    whose name is nearly that of one that would be.

    features: features of columns, as the datasets package has them, if a file declares them.
    """
    kind = DATASETS[entry.type]
    if not kind.fits(names):
        either = " or ".join(" and ".join(f"`{c}`" for c in columns) for columns in kind.needed)
        other = next(((n, one) for n, one in DATASETS.items() if one.fits(names)), None)
        if other is not None:
            also = f"; for samples that are {other[1].says} set type to {other[0]}"
        else:
            also = ALPACA if {"instruction", "output"} <= set(names) else ""
        raise ValueError(
            f"{entry.path}: type {entry.type} needs a column {either}, has {names}{also}"
        )
    for name, column in columns.items():
        if column.default is None and name not in (*names, *kind.yields):
            kinds = [n for n, one in DATASETS.items() if name in one.yields]
            also = f"; data of type {' or '.join(kinds)} have it" if kinds else ""
            raise ValueError(
                f"{column.asked_by}: {entry.path} has no column {name}, has {names}{also}"
            )
    if loss:
        _check_judged(entry, kind, columns, loss)
    read = {*kind.columns, *columns}
    others = sorted({*names} - read)
    for name in others:
        if why := unread(entry, name, columns, loss):
            raise ValueError(f"{entry.path}: {why}")
    for name in others:
        if near := difflib.get_close_matches(name, sorted(read - {*names}), 1, cutoff=0.8):
            log.warning("%s: the column `%s` is not read; `%s` would be", entry.path, name, near[0])
    kind.check(entry.path, features)


def _says(name: str, kind: DatasetType) -> bool:
    """Whether a column that is not read says what is learned of rows."""
    if marks.OF_ROWS.fullmatch(name):
        return True
    return not kind.tokenizer and (masks.unread(name) or (not kind.aligned and name in masks.READ))


def _check_judged(entry: Dataset, kind: DatasetType, columns: Columns, loss: str) -> None:
    """Raises ValueError if the loss does not read what judges samples."""
    if _instructing() & {*kind.yields} and not columns.keys() & {*kind.yields}:
        raise ValueError(
            f"train.loss = {loss}: {entry.path} has {kind.says} (type {entry.type}), which this loss "
            "would all learn alike: it does not read "
            f"{' or '.join(kind.yields)}{_readers(kind.yields)}"
        )


def unread(entry: Dataset, name: str, columns: Columns, loss: str) -> str | None:
    """Why rows with a column are refused that is not read: by its name it says what is learned."""
    kind = DATASETS[entry.type]
    if _says(name, kind):
        also = f"; {', '.join(masks.READ)} are read" if kind.aligned else ""
        return f"type {entry.type} does not read the column `{name}`{also}{LEFT_OUT}"
    if not loss or (kind.tokenizer and name in STRUCTURE):
        return None
    why = not_instructed({name}, columns, loss)
    return None if why is None else f"train.loss = {loss} {why}"


def not_instructed(names: Iterable[str], columns: Columns, loss: str) -> str | None:
    """What a loss does not read, of columns that say what is learned. What other settings of the
    run read may be there.
    """
    ignored = sorted(_instructing() & {*names} - {*columns, *LOSSES[loss].accepts})
    if not ignored:
        return None
    return f"does not read the column `{ignored[0]}`{_readers(ignored[:1])}{LEFT_OUT}"


def _instructing() -> set[str]:
    return {name for name, column in COLUMNS.items() if column.instructs}


def _readers(columns: Collection[str]) -> str:
    losses = [name for name, loss in LOSSES.items() if {*columns} & {*loss.columns, *loss.accepts}]
    return f"; train.loss = {' or '.join(losses)} would" if losses else ""


def _is_whole(n: object) -> bool:
    return type(n) is int or (isinstance(n, float) and n.is_integer())


def _first_other(source: Source, column: str) -> str:
    """The place of the first row of a file whose value is no list of integers, or of the first row
    if each is one: a number with a fraction makes floating-point numbers of all others.
    """
    rows = source.select_columns([column])
    for part in rows.parts():
        for row, values in rows.read(part):
            if isinstance(values, Refused):
                continue
            value = values[column]
            if value is None:  # refused by itself
                continue
            if not isinstance(value, list) or not all(n is None or _is_whole(n) for n in value):
                return source.place(row)
    return source.place(source.first)


def _check_late(source: Source, entry: Dataset, use: Use) -> None:
    """Checks the columns of all rows: one may begin late. Raises ValueError."""
    try:
        check_columns(entry, source.every_column(), {}, use.columns, use.prompts.loss)
    except ValueError:
        nothing = source.select_columns([])
        for part in () if use.skips else nothing.parts():
            for at, row in nothing.read(part):
                if isinstance(row, Refused):  # for which there is no column
                    raise ValueError(f"{nothing.place(at)}: {row}") from None
        raise


def checked(source: Source, entry: Dataset, use: Use) -> Source:
    """The source with the columns that are read. Raises ValueError for columns of another kind."""
    kind, columns, loss = DATASETS[entry.type], use.columns, use.prompts.loss
    try:
        check_columns(entry, [*source.column_names], {}, columns, loss)
    except ValueError:
        _check_late(source, entry, use)
    for rows, path, features in source.declared():
        try:
            kind.check(path, features)
        except NotIntegers as wrong:
            raise NotIntegers(_first_other(rows, wrong.column), wrong.column, wrong.kind) from wrong
    if not isinstance(source, Rows):
        return source
    chosen = source.asking.columns  # by data.select_columns
    source = source.select_columns((*kind.columns, *columns))

    def refused(name: str) -> str | None:
        there = chosen is None or name in chosen
        return unread(entry, name, columns, loss) if there else None

    numbers = {n: number for n, c in columns.items() if c.batched}
    asking = source.asking._replace(
        cells=numbers | {**kind.cells},
        arrow=kind.arrow,
        refused=functools.cache(refused),
    )
    return dataclasses.replace(source, asking=asking)
