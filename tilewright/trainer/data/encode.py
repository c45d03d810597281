"""Rows of a data set as samples of tokens, one encoder per `type`.

An encoder takes some rows, as an Arrow table, and returns their samples as a record batch with the
columns input_ids and labels (lists of int32). What it holds in memory is a few times those rows.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from tilewright.trainer.config import Data, Dataset
from tilewright.trainer.data import chat
from tilewright.trainer.data.columns import IGNORE
from tilewright.trainer.data.routes import Routes

log = logging.getLogger("tilewright")
COLUMNS = ("input_ids", "labels")
ROUTES = "routed_experts"  # of a tokenized row: experts that an engine chose
SCHEMA = pa.schema({name: pa.list_(pa.int32()) for name in COLUMNS})
# Experts are below 4,096.
REPLAYED = SCHEMA.append(pa.field(ROUTES, pa.list_(pa.int16())))
# Characters that a tokenizer gets at once: its working memory is about a hundred bytes per token.
PIECE = 1 << 20
# A tokenizer splits text before the first character of a line, and before a space.
LINE = re.compile(r".*\n(?=\S)", re.DOTALL)
WORD = re.compile(r".+(?=\s)", re.DOTALL)
NEEDED = {
    "tokenized": (("input_ids",),),
    "text": (("text",),),
    "chat": (("messages",), ("conversations",)),
    "prompt_completion": (("prompt", "completion"),),
}
OPTIONAL = {
    "tokenized": ("labels",),
    "text": (),
    "chat": ("tools",),
    "prompt_completion": ("tools",),
}
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


class NotIntegers(ValueError):
    """A column that does not hold lists of integers."""

    def __init__(self, place: str, column: str, kind: object):
        mixed = "Json(" in str(kind)  # how the datasets package calls it
        self.column, self.kind = column, kind
        super().__init__(
            f"{place}: the column `{column}` must hold lists of integers, not "
            f"{'values of several types' if mixed else kind}"
        )


def check_columns(entry: Dataset, names: list[str], features: Any) -> None:
    """Raises ValueError if the columns are not those of `entry.type`. Warns of a column that is
    not read, whose name is nearly that of one that would be.
    """
    needed = NEEDED[entry.type]
    if not any(set(columns) <= set(names) for columns in needed):
        either = " or ".join(" and ".join(f"`{c}`" for c in columns) for columns in needed)
        other = next(
            (kind for kind, ways in NEEDED.items() if any(set(w) <= set(names) for w in ways)), None
        )
        kinds: dict[str | None, str] = {
            "tokenized": "tokens",
            "text": "text",
            "chat": "conversations",
        }
        also = f"; for samples that are {kinds.get(other, 'prompts')} set type to {other}"
        if other is None:
            also = ALPACA if {"instruction", "output"} <= set(names) else ""
        raise ValueError(
            f"{entry.path}: type {entry.type} needs a column {either}, has {names}{also}"
        )
    read = {column for columns in needed for column in columns} | {*OPTIONAL[entry.type]}
    for name in sorted({*names} - read):
        if near := difflib.get_close_matches(name, sorted(read - {*names}), 1, cutoff=0.8):
            log.warning("%s: the column `%s` is not read; `%s` would be", entry.path, name, near[0])
    if entry.type == "text":
        kind = getattr(features["text"], "dtype", "list")
        if kind not in ("string", "large_string"):
            raise ValueError(f"{entry.path}: the column `text` must hold strings, not {kind}")
    elif entry.type == "tokenized":
        for name in sorted({*COLUMNS} & {*names}):
            kind = getattr(getattr(features[name], "feature", None), "dtype", "")
            if not kind.startswith(("int", "uint")):
                raise NotIntegers(entry.path, name, features[name])


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
        messages: bool,
        routes: Routes | None = None,
    ):
        """messages: prompts are lists of them.   routes: those that a tokenized row has, if they
        are replayed.
        """
        self.most, self.vocab, self.tokenizer, self.routes = most, vocab, tokenizer, routes
        self.kind = entry.type
        if entry.type in ("chat", "prompt_completion"):
            chat.check_tokenizer(entry.path, entry.type, tokenizer, template=messages)
        elif entry.type == "text":
            self.start, self.end = _around(tokenizer)

    def __call__(self, rows: Iterable[tuple[Row, Any]]) -> Encoded:
        """rows: (index, row). Raises RefusedRow."""
        out: tuple[list[np.ndarray], ...] = [], [], []
        cut = unlabeled = short = 0
        samples_of = getattr(self, f"_{self.kind}")
        for index, row in rows:
            try:
                samples = [self._checked(*sample) for sample in samples_of(row)]
            except chat.Refused as refused:
                raise RefusedRow(index, str(refused)) from refused
            for ids, labels, *routes in samples:
                if len(ids) < 2:  # a single token has no target
                    short += self.kind != "text"  # of which only an empty document is so short
                    continue
                cut += len(ids) > self.most
                ids, labels = ids[: self.most], labels[: self.most]
                if not has_target(labels):
                    unlabeled += 1
                    if self.kind != "tokenized":
                        continue
                out[0].append(ids)
                out[1].append(labels)
                out[2].extend(r[: self.most].reshape(-1) for r in routes)
        arrays, schema = [lists(out[0]), lists(out[1])], SCHEMA
        if self.routes is not None:
            arrays, schema = [*arrays, lists(out[2], np.int16)], REPLAYED
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        return Encoded(batch, cut, unlabeled, short)

    def _checked(self, ids: Any, labels: Any, *routes: np.ndarray) -> Arrays:
        """An index outside the embedding would end a GPU run with an assertion that names no
        sample.
        """
        ids, labels = np.asarray(ids, np.int64), np.asarray(labels, np.int64)
        for tokens in (ids, labels[labels != IGNORE]):
            outside = tokens[(tokens < 0) | (tokens >= self.vocab)]
            if len(outside):
                raise chat.Refused(
                    f"token {outside[0]} is not in the model's vocabulary of {self.vocab}"
                )
        return ids, labels, *routes

    def _tokenized(self, row: dict[str, Any]) -> Iterator[Arrays]:
        ids, labels = _integers(row["input_ids"]), _integers(row.get("labels"))
        if ids is None:
            raise chat.Refused("it has no input_ids")
        labels = ids if labels is None else labels
        if len(labels) != len(ids):
            raise chat.Refused(f"it has {len(ids)} input_ids and {len(labels)} labels")
        if self.routes is None:
            yield ids, labels
            return
        try:
            yield ids, labels, self.routes.read(row[ROUTES], len(ids))
        except (TypeError, ValueError) as error:
            raise chat.Refused(str(error)) from error

    def _text(self, row: dict[str, Any]) -> Iterator[Arrays]:
        """Samples of at most `most` tokens, which join to the document and its end token."""
        text = row["text"]
        if text is None:
            raise chat.Refused("it has no text")
        tokens = [self.start] if row.get("first", True) else []
        for piece in pieces(text):
            found = self.tokenizer(piece, add_special_tokens=False)["input_ids"]
            tokens.append(np.array(found, np.int64))
        tokens += [self.end] if row.get("last", True) else []
        ids = np.concatenate(tokens)
        cuts = [*range(0, len(ids), self.most), len(ids)]
        if len(ids) % self.most == 1 and len(ids) > self.most:
            cuts[-2] -= 1  # a single token has no target
        for first, stop in itertools.pairwise(cuts):
            yield ids[first:stop], ids[first:stop]

    def _chat(self, row: dict[str, Any]) -> list[chat.Sample]:
        return chat.chat(self.tokenizer, row)

    def _prompt_completion(self, row: dict[str, Any]) -> list[chat.Sample]:
        return chat.prompt_completion(self.tokenizer, row)


def _integers(values: pa.Array | None) -> np.ndarray | None:
    if values is None:
        return None
    if values.null_count:
        raise chat.Refused("a token in it is null")
    return values.to_numpy(zero_copy_only=False).astype(np.int64)


def _around(tokenizer: Any) -> Arrays:
    """The tokens before and after a document: what the tokenizer puts before a text, and the end
    token.
    """
    plain, whole = (
        list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True)
    )
    starts = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return np.array(whole[: next(starts, 0)], np.int64), np.array(end, np.int64)


def pieces(text: str) -> Iterator[str]:
    """Cuts a long text after line ends, else before spaces, into pieces of bounded size."""
    start = 0
    while len(text) - start > PIECE:
        window = text[start : start + PIECE]
        found = LINE.match(window) or WORD.match(window)
        stop = start + (found.end() if found else PIECE)
        yield text[start:stop]
        start = stop
    yield text[start:]
