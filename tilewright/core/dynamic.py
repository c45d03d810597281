"""Floats of an operator that change from call to call of compiled code.

A schema's int may be symbolic, so that one graph takes any value. Its float may not: torch.compile
would make a graph for each value, until it gives up. So an operator with floats has a second
overload, `numbers`, with a tensor [] float64 on the CPU in place of each. Compiled code calls it
where a float is symbolic. Its kernel reads the tensors, which need no synchronization, and calls the
operator: results are the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.core import torch_names

OVERLOAD = "numbers"
_FLOAT = re.compile(r"\bfloat\b(?=\??\s+\w)")
# A fake, which has no values, does not depend on the value of a float that is not 0.
_SOME = 0.5


def places_of_floats(overload: torch_names.OpOverload) -> tuple[int, ...]:
    """Of the arguments that are a float, or a float or None."""
    kinds = (str(a.type).removeprefix("Optional[") for a in overload._schema.arguments)
    return tuple(i for i, kind in enumerate(kinds) if kind.startswith("float"))


def schema_of_numbers(overload: torch_names.OpOverload) -> str:
    """`Library.define`'s argument for the overload with tensors in place of floats."""
    name, _, rest = str(overload._schema).partition("(")
    name = name.removeprefix(f"{overload.namespace}::")
    return f"{name}.{OVERLOAD}({_FLOAT.sub('Tensor', rest)}"


def written(flat: Sequence, places: Sequence[int]) -> list | None:
    """Arguments with tensors in place of these floats; None if no float is symbolic or a tensor."""
    found, values = False, list(flat)
    for i in places:
        value = values[i]
        if value is None or isinstance(value, torch.Tensor):
            found = found or value is not None
        elif torch_names.is_symbolic(value) and value != 0:  # whether one is 0 may decide on shapes
            # Not scalar_tensor or full, of which PyTorch makes a constant.
            values[i] = torch.ones((), dtype=torch.float64, device="cpu") * value
            found = True
    if not found:
        return None
    for i in places:
        if values[i] is not None and not isinstance(values[i], torch.Tensor):
            number = 0.0 if values[i] == 0 else values[i]
            values[i] = torch.full((), number, dtype=torch.float64, device="cpu")
    return values


def reading(function: Callable, places: Sequence[int]) -> Callable:
    """function(*flat) of floats, for tensors in their place."""

    def of_numbers(*flat: Any) -> Any:
        return function(*read(flat, places))

    return of_numbers


def read(flat: Sequence, places: Sequence[int]) -> list:
    """Arguments with the floats of tensors that hold values, and other tensors as they are."""
    values = list(flat)
    for i in places:
        if type(values[i]) is torch.Tensor and not torch_names.torch_dispatch_modes():
            values[i] = values[i].item()
    return values


def some(flat: Sequence, places: Sequence[int]) -> list:
    """Arguments for a fake."""
    return [_SOME if i in places and v is not None else v for i, v in enumerate(flat)]
