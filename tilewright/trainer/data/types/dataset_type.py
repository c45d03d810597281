"""Types of data sets: how rows with some columns become samples of tokens."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel

from tilewright.trainer.tables import Table


class Refused(ValueError):
    """A row cannot be used. The caller adds where it is."""


class Prompts(NamedTuple):
    """How prompts are cut, and what for.   most: tokens; None: they are whole.   keep: keep_start
    or keep_end.   loss: the name in LOSSES of what learns from samples; "": they are scored, or
    nobody has said.
    """

    most: int | None = None
    keep: str = "keep_start"
    loss: str = ""


WHOLE = Prompts()


@dataclass(frozen=True)
class Asked:
    """What samples are made for.   path: the data set's path, for errors.   kind: the type's name.
    most: tokens of a sample.   columns: names of the rows' columns, as far as the first rows tell.
    prompts: how a type cuts them.   told: for the log, how often each sentence holds of a sample.
    stops: tokens at which generation stops, beside the tokenizer's own (`data.ends`).   options:
    those of a type that has some.
    """

    path: str
    kind: str
    most: int
    tokenizer: Any
    columns: Collection[str]
    prompts: Prompts = WHOLE
    told: collections.Counter[str] = field(default_factory=collections.Counter)
    stops: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


class Span(NamedTuple):
    """Which tokens of a row a sample has: first to stop, of so many."""

    first: int
    stop: int
    of: int


# (input_ids, labels), or with a third item: values of columns that the type `yields`, by name. An
# `aligned` type has a fourth one, a Span, if a sample has not all tokens of its row.
Sample = Iterable[Any]


DIGITS = 4000  # of a number, at most: Python reads no more
NUMBER = re.compile(r"[-+]?([0-9]+|([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?)")
FLAGS = {"true": True, "false": False}


def number(cell: str) -> int | float | str:
    """A cell's text as a number, exactly; as it is if it is none, which its reader refuses."""
    match = NUMBER.fullmatch(cell.strip())
    if match is None or len(cell) > DIGITS:
        return cell
    return float(cell) if match[2] else int(cell)


def flag(cell: str) -> bool | str:
    """True and false, in small letters, capitals or with a capital; else the text."""
    return FLAGS.get(cell.strip().lower(), cell)


def _no_check(path: str, features: Any) -> None:
    pass


@dataclass(frozen=True)
class DatasetType:
    """A row of DATASETS.

    needed: sets of columns, one of which rows must have.   optional: further columns that are read.
    samples: what is asked for -> a function of a row, the mapping of its columns, that returns its
        samples: lists or arrays of input_ids and labels, IGNORE for a token that is not trained on.
        It raises Refused for a row that cannot be used, and ValueError if the tokenizer cannot
        serve.
    says: what the samples are, for the hint to another type.
    check: (path, features) -> raises ValueError for columns of another kind, in a file that
        declares them: features of some or none of the columns, as the datasets package has them.
    cells: how the text of a cell is read, in tables of text alone (CSV), of columns that are no
        text.
    tokenizer: whether it needs one.
    arrow: its lists are read as Arrow arrays.
    aligned: a row's tokens are its sample's, so that columns with numbers per token can be read
        from rows. Those with one value per document can be read from rows of every type.
    yields: columns that samples bring.
    keeps_unlabeled: a sample without a target is kept.   counts_short: one of fewer than two tokens
        is counted in the log.
    prompts: whether it cuts prompts.
    version: to be raised when samples change: prepared sets of another version are not used.
    options: the pydantic model of an entry's `type_args`, which `Asked.options` holds; None: there
        are none.
    """

    needed: tuple[tuple[str, ...], ...]
    samples: Callable[[Asked], Callable[[Any], Iterable[Sample]]]
    optional: tuple[str, ...] = ()
    says: str = "rows"
    check: Callable[[str, Any], None] = _no_check
    cells: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)
    tokenizer: bool = True
    arrow: bool = False
    aligned: bool = False
    yields: tuple[str, ...] = ()
    keeps_unlabeled: bool = False
    counts_short: bool = True
    prompts: bool = False
    version: int = 0
    options: type[BaseModel] | None = None

    def fits(self, names: Collection[str]) -> bool:
        """Whether rows with these columns have what is needed."""
        return any({*columns} <= {*names} for columns in self.needed)

    @property
    def columns(self) -> tuple[str, ...]:
        """All that are read, if they are there."""
        return (*(column for columns in self.needed for column in columns), *self.optional)


DATASETS = Table("datasets", "tilewright.trainer.data.types", DatasetType)
