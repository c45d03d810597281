"""Requests and results as bytes: a JSON value and arrays beside it, in safetensors' format.

The log holds them, and rank 0 sends them to the other ranks. The same content has the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import load, save

Arrays = dict[str, np.ndarray]
VALUE = "value"  # the name of the JSON among the arrays


def packed(value: Any, arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    """value: what JSON can hold, without NaN and infinity.   arrays: by name; none is "value"."""
    text = json.dumps(value, allow_nan=False, sort_keys=True, separators=(",", ":"))
    # safetensors writes memory as it lies, whatever an array's strides are.
    contiguous = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    return save({VALUE: np.frombuffer(text.encode(), np.uint8), **contiguous})


def unpacked(data: bytes) -> tuple[Any, Arrays]:
    """What `packed` was given."""
    arrays = dict(sorted(load(data).items()))  # which are in no certain order
    return json.loads(arrays.pop(VALUE).tobytes()), arrays
