"""Rows that are tokens: input_ids and, if they are there, labels, and masks (see `data.masks`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from tilewright.trainer.columns import TOKENS
from tilewright.trainer.data import masks
from tilewright.trainer.data.types.dataset_type import Asked, DatasetType, Refused, Sample
from tilewright.trainer.tables import DATASETS


class NotIntegers(ValueError):
    """A column that does not hold lists of integers."""

    def __init__(self, place: str, column: str, kind: object):
        mixed = "Json(" in str(kind)  # how the datasets package calls it
        self.column, self.kind = column, kind
        super().__init__(
            f"{place}: the column `{column}` must hold lists of integers, not "
            f"{'values of several types' if mixed else kind}"
        )


def _check(path: str, features: Any) -> None:
    for name in sorted({*TOKENS} & {*features}):
        kind = getattr(getattr(features[name], "feature", None), "dtype", "")
        if not kind.startswith(("int", "uint")):
            raise NotIntegers(path, name, features[name])


def _samples(asked: Asked) -> Callable[[dict[str, Any]], Iterator[Sample]]:
    def samples(row: dict[str, Any]) -> Iterator[Sample]:
        ids, labels = _integers(row["input_ids"]), _integers(row.get("labels"))
        if ids is None:
            raise Refused("it has no input_ids")
        if labels is not None and len(labels) != len(ids):
            raise Refused(f"it has {len(ids)} input_ids and {len(labels)} labels")
        if any(row.get(name) is not None for name in masks.READ):
            yield from masks.documents(ids, labels, row)
        else:
            yield ids, ids if labels is None else labels

    return samples


def _integers(values: pa.Array | None) -> np.ndarray | None:
    if values is None:
        return None
    if values.null_count:
        raise Refused("a token in it is null")
    return values.to_numpy(zero_copy_only=False).astype(np.int64)


DATASETS.add(
    "tokenized",
    DatasetType(
        (("input_ids",),),
        _samples,
        optional=("labels", *masks.READ),
        says="tokens",
        check=_check,
        tokenizer=False,
        arrow=True,
        aligned=True,
        keeps_unlabeled=True,
    ),
)
