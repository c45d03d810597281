"""Rows that are tokens: input_ids and, if they are there, labels, and masks (see `data.masks`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from tilewright.trainer.columns import TOKENS
from tilewright.trainer.data import masks
from tilewright.trainer.data.defects import kind_of
from tilewright.trainer.data.types.dataset_type import DATASETS, Asked, DatasetType, Refused, Sample


class NotIntegers(ValueError):
    """A column that does not hold lists of integers."""

    def __init__(self, place: str, column: str, kind: object):
        self.column, self.kind = column, kind
        super().__init__(f"{place}: {_said(column, kind)}")


def _said(column: str, kind: object) -> str:
    return f"the column `{column}` must hold lists of integers, not {kind}"


def check_tokens(path: str, features: Any, names: tuple[str, ...] = TOKENS) -> None:
    """Raises NotIntegers for a column that does not hold tokens."""
    for name in names:
        feature = features.get(name)
        kind = getattr(getattr(feature, "feature", feature), "dtype", "")
        listed = hasattr(feature, "feature") or kind == "null"
        if name in features and not (listed and kind.startswith(("int", "uint", "null"))):
            raise NotIntegers(path, name, feature)


def tokens(values: Any, name: str) -> np.ndarray | None:
    """A row's tokens, of a list or an Arrow array. Raises Refused."""
    if values is None:
        return None
    if isinstance(values, pa.Array):
        if values.null_count:
            raise Refused("a token in it is null")
        return values.to_numpy(zero_copy_only=False).astype(np.int64)
    if not isinstance(values, list):
        raise Refused(_said(name, f"{kind_of(values)}, {values!r:.60}"))
    if {*map(type, values)} <= {int}:
        return np.array(values, np.int64)
    other = next(v for v in values if type(v) is not int)
    raise Refused(
        "a token in it is null" if other is None else _said(name, f"lists with {other!r:.60}")
    )


def _samples(asked: Asked) -> Callable[[dict[str, Any]], Iterator[Sample]]:
    def samples(row: dict[str, Any]) -> Iterator[Sample]:
        ids, labels = (tokens(row.get(name), name) for name in TOKENS)
        if ids is None:
            raise Refused("it has no input_ids")
        if labels is not None and len(labels) != len(ids):
            raise Refused(f"it has {len(ids)} input_ids and {len(labels)} labels")
        if any(row.get(name) is not None for name in masks.READ):
            yield from masks.documents(ids, labels, row)
        else:
            yield ids, ids if labels is None else labels

    return samples


DATASETS.add(
    "tokenized",
    DatasetType(
        (("input_ids",),),
        _samples,
        optional=("labels", *masks.READ),
        says="tokens",
        check=check_tokens,
        tokenizer=False,
        arrow=True,
        aligned=True,
        keeps_unlabeled=True,
    ),
)
