"""Lists of lists in rows of data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute  # which makes its functions when it is imported
KINDS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


def is_list(kind: pa.DataType) -> bool:
    """Whether values of a type are lists, stored in any way."""
    return any(is_one(kind) for is_one in KINDS)


def is_nested(given: Any) -> bool:
    """Whether `nested` reads it: an Arrow array, or a list of lists."""
    return isinstance(given, pa.Array) or (
        isinstance(given, list) and any(isinstance(one, list) for one in given)
    )


def nested(values: Any, what: str) -> np.ndarray:
    """Lists of lists, Python's or an Arrow array, as an array. Raises ValueError for lists of
    several lengths, a null, and a number beyond 64 bits; TypeError or ValueError for values of
    several types.

    what: they are, in errors.
    """
    if isinstance(values, list):
        try:
            values = pa.array(values)
        except OverflowError as error:
            raise ValueError(f"a number in {what} is beyond 64 bits: {error}") from error
    shape: list[int] = [len(values)]
    while is_list(values.type):
        lengths = pc.unique(pc.list_value_length(values)).to_pylist()
        if len(lengths) > 1 or None in lengths:
            raise ValueError(f"{what} have no shape: lists of lengths {sorted(map(str, lengths))}")
        shape.append(lengths[0] if lengths else 0)
        values = values.flatten()
    if values.null_count:
        raise ValueError(f"a number in {what} is null")
    return values.to_numpy(zero_copy_only=False).reshape(shape)
