"""Items of a config.json. Every error is a ValueError that names the item."""

from __future__ import annotations

import math
from typing import Any

# Limit of sizes in config.json: no model has so wide a layer, and no machine holds its square.
LARGEST = 2**24
FULL, SLIDING = "full_attention", "sliding_attention"
READ: Any = object()  # in `Architecture.neutral`: the family reads this item


def number(source: dict[str, Any], name: str, default: Any, kind: type = int) -> Any:
    """A field that must be a number if present; absent and null mean the default."""
    value = default if source.get(name) is None else source[name]
    if kind is int:
        good = type(value) is int and 1 <= value <= LARGEST
        accepted = f"an integer of at least 1 and at most {LARGEST}"
    else:
        good = type(value) in (int, float) and 0 < value < math.inf
        accepted = "a finite number above 0"
    if not good:
        raise ValueError(f"config.json: {name} must be {accepted}, got {value!r}")
    return kind(value)


def flag(source: dict[str, Any], name: str) -> bool:
    if not isinstance(source.get(name), bool | None):
        raise ValueError(f"config.json: {name} must be true or false, got {source[name]!r}")
    return bool(source.get(name))
