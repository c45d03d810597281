"""Columns of rows of tokens that say which of them are padding, where documents begin, and which
tokens are learned: as transformers, TRL, axolotl and verl write them.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pyarrow as pa

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.data.types.dataset_type import Refused, Span

# Each takes tokens out of what is learned, as in TRL: a token that one of them has at 0.
PARTS = ("completion_mask", "assistant_masks")
# As labels do, it says of each token whether it is learned.
WHOLE = "loss_mask"
PADDING = "attention_mask"
BEGINS = ("position_ids", "seq_lengths")
READ = (*PARTS, WHOLE, PADDING, *BEGINS)
# Names of other tools, beside masks: for where documents begin, and for labels.
OTHERS = re.compile(
    r"((seq|sequence|segment|doc|document|sample)_(ids|lens|lengths)|lengths)|(label|target)_ids|targets"
)


def unread(name: str) -> bool:
    """Whether a column that is not read says, by its name, what is learned or where documents
    begin.
    """
    return name not in READ and (
        ("mask" in name and name != "special_tokens_mask")
        or name.startswith(("cu_seq", "seq_idx"))
        or OTHERS.fullmatch(name) is not None
    )


def documents(ids: np.ndarray, labels: np.ndarray | None, row: dict[str, Any]) -> list[tuple]:
    """The documents of a row: their tokens, labels, and which of the row's tokens they are.

    labels: None, if the row has none. Raises Refused for columns that contradict each other.
    """
    kept = _flags(row, PADDING, len(ids))
    parts = {name: _flags(row, name, len(ids)) for name in (*PARTS, WHOLE)}
    there = np.arange(len(ids)) if kept is None else kept.nonzero()[0]
    if len(ids) and not len(there):
        raise Refused(f"its {PADDING} has no 1, so that nothing is left of it")
    begins = _begins(there, len(ids), row)
    labels = _labels(ids, labels, {n: m for n, m in parts.items() if m is not None}, kept, begins)
    ends = [*(begins[1:] - 1), len(there) - 1] if len(there) else []
    spans = [
        Span(int(there[a]), int(there[b]) + 1, len(ids)) for a, b in zip(begins, ends, strict=True)
    ]
    return [(ids[s.first : s.stop], labels[s.first : s.stop], {}, s) for s in spans]


def _labels(
    ids: np.ndarray,
    labels: np.ndarray | None,
    masks: dict[str, np.ndarray],
    kept: np.ndarray | None,
    begins: np.ndarray,
) -> np.ndarray:
    """begins: of documents, whose first tokens are never targets, so that it does not matter what
    is said of them.
    """
    said = {} if labels is None else {"labels": labels != IGNORE}
    if WHOLE in masks:
        said[WHOLE] = masks[WHOLE]
    parts = [name for name in PARTS if name in masks]
    if parts:
        learned = np.logical_and.reduce([masks[name] for name in parts])
        if len(parts) > 1 and not learned.any() and all(masks[name].any() for name in parts):
            raise Refused(f"its {' and '.join(parts)} contradict each other: no token is 1 in both")
        said[" and ".join(parts)] = learned
    names = list(said)
    matters = np.ones(len(ids), bool)
    matters[begins if kept is None else kept.nonzero()[0][begins]] = False
    for name, other in itertools.pairwise(names):
        if (wrong := (said[name] != said[other]) & matters).any():
            i = int(wrong.argmax())
            raise Refused(
                f"its {name} and its {other} contradict each other: token {i + 1} is learned by "
                f"{name if said[name][i] else other} alone"
            )
    padding = np.zeros(len(ids), bool) if kept is None else ~kept
    for name in names:
        if (wrong := said[name] & padding).any():
            i = int(wrong.argmax())
            raise Refused(
                f"its {name} and its {PADDING} contradict each other: token {i + 1} is learned, and "
                "padding"
            )
    if labels is not None:
        return labels
    return np.where(said[names[0]], ids, IGNORE) if names else ids


def _begins(there: np.ndarray, tokens: int, row: dict[str, Any]) -> np.ndarray:
    """The first token of each document, among those that are `there`, places in a row of so many
    tokens.
    """
    first = np.zeros(len(there), bool)
    first[:1] = True
    starts = {}
    if (lengths := _integers(row, "seq_lengths")) is not None:
        starts["seq_lengths"] = first | _by_lengths(lengths, there, tokens)
    if (positions := _integers(row, "position_ids")) is not None:
        _check_length(positions, "position_ids", tokens)
        starts["position_ids"] = first | _by_positions(positions[there], there)
    if len(starts) == 2 and (starts["seq_lengths"] != starts["position_ids"]).any():
        i = int(there[(starts["seq_lengths"] != starts["position_ids"]).argmax()])
        raise Refused(
            f"its seq_lengths and its position_ids contradict each other: a document begins at "
            f"token {i + 1} by one of them alone"
        )
    begins = next(iter(starts.values()), first)
    holes = np.diff(there, prepend=there[:1] - 1) != 1
    holes[:1] = False
    if (wrong := holes & ~begins).any():
        i = int(there[wrong.argmax()])
        raise Refused(
            f"its {PADDING} has a 0 before token {i + 1}, within a document; accepted is padding "
            f"before or after it ({' or '.join(BEGINS)} say where documents begin)"
        )
    return begins.nonzero()[0]


def _by_lengths(lengths: np.ndarray, there: np.ndarray, tokens: int) -> np.ndarray:
    if (lengths <= 0).any() or lengths.sum() not in (tokens, len(there)):
        raise Refused(
            f"its seq_lengths must be above 0 and have the sum {tokens}, the row's tokens, got "
            f"{lengths.tolist()!r:.80}"
        )
    of = np.repeat(np.arange(len(lengths)), lengths)
    of = of[there] if len(of) == tokens else of
    return np.diff(of, prepend=of[:1]) != 0


def _by_positions(positions: np.ndarray, there: np.ndarray) -> np.ndarray:
    if (positions == there).all():  # counted over the padding before them, too
        return np.zeros(len(there), bool)
    begins = np.diff(positions, prepend=-2) != 1
    if (wrong := begins & (positions != 0)).any():
        i = int(wrong.argmax())
        raise Refused(
            f"its position_ids must count from 0 in each document; token {there[i] + 1} has "
            f"{positions[i]}"
        )
    return begins


def _flags(row: dict[str, Any], name: str, tokens: int) -> np.ndarray | None:
    """A column of 0 and 1, or false and true."""
    if (values := _numbers(row, name)) is None:
        return None
    _check_length(values, name, tokens)
    wrong = (values != 0) & (values != 1)
    if wrong.any():
        i = int(wrong.argmax())
        raise Refused(f"its {name} has {values[i]} at token {i + 1}; accepted are 0 and 1")
    return values.astype(bool)


def _integers(row: dict[str, Any], name: str) -> np.ndarray | None:
    values = _numbers(row, name)
    if values is not None and (values.dtype.kind == "b" or (values != np.trunc(values)).any()):
        raise Refused(f"its {name} must be integers, got {values.tolist()!r:.80}")
    return None if values is None else values.astype(np.int64)


def _check_length(values: np.ndarray, name: str, tokens: int) -> None:
    if len(values) != tokens:
        raise Refused(f"it has {tokens} input_ids and {len(values)} {name}")


def _numbers(row: dict[str, Any], name: str) -> np.ndarray | None:
    given = row.get(name)
    if given is None:
        return None
    if isinstance(given, pa.Array):
        given = given.to_pylist() if given.null_count else given.to_numpy(zero_copy_only=False)
    if isinstance(given, list | np.ndarray):
        values = np.asarray(given) if len(given) else np.empty(0, np.int64)
        if values.ndim == 1 and values.dtype.kind in "biuf":
            return values
    raise Refused(f"its {name} must be a list of numbers, got {given!r:.80}")
