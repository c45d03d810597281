"""Floats of an operator that change from call to call of compiled code.

A schema's int may be symbolic, so that one graph takes any value. Its float may not: torch.compile
would make a graph for each value, until it gives up. So an operator with floats has a second
overload, `numbers`, with one more argument: the symbolic floats, as a float64 tensor on the CPU.
Compiled code calls it where there are any. Its kernel reads them, without synchronization, and
calls the operator, so results are the same bits.

A symbolic float is never 0: compiled code has one graph for 0 and one for all other values, since a
0 may switch off a part of the computation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.core import torch_names

OVERLOAD = "numbers"
# In the place of a float that is among the numbers; no float of an operator is so large.
_AMONG_NUMBERS = -sys.float_info.max
_SOME = 0.5  # for a fake, whose results do not depend on the value


class Symbol:
    """A float of a graph that is being traced, as a float64 tensor []. Formulas compute with it,
    and branch on it as on any float other than 0 and 1.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __neg__(self) -> Symbol:
        return Symbol(-self.tensor)


def _define_operators() -> None:
    def of(name: str) -> Callable:
        def operator(self: Symbol, other: Any) -> Any:
            if isinstance(other, torch.Tensor):  # whose dtype a float would leave as it is
                dtype = other.dtype if other.is_floating_point() else torch.get_default_dtype()
                return getattr(self.tensor.to(other.device, dtype), name)(other)
            other = other.tensor if isinstance(other, Symbol) else other
            return Symbol(getattr(self.tensor, name)(other))

        return operator

    for name in ("add", "sub", "mul", "truediv", "pow"):
        for side in ("", "r"):
            setattr(Symbol, f"__{side}{name}__", of(f"__{side}{name}__"))


_define_operators()


def places_of_floats(overload: torch_names.OpOverload) -> tuple[int, ...]:
    """The indices of the arguments that are a float, or a float or None."""
    kinds = (str(a.type).removeprefix("Optional[") for a in overload._schema.arguments)
    return tuple(i for i, kind in enumerate(kinds) if kind.startswith("float"))


def schema_of(overload: torch_names.OpOverload) -> str:
    """`Library.define`'s argument for the overload with numbers."""
    name, _, rest = str(overload._schema).partition("(")
    arguments, arrow, results = rest.rpartition(") -> ")
    name = name.removeprefix(f"{overload.namespace}::")
    return f"{name}.{OVERLOAD}({arguments}, Tensor numbers{arrow}{results}"


def written(flat: Sequence, places: Sequence[int]) -> tuple[list, torch.Tensor | None]:
    """(The arguments without their symbolic floats, and these floats as a tensor; None without
    any.)
    """
    numbers, values = [], list(flat)
    for i in places:
        value = values[i]
        if isinstance(value, Symbol):
            numbers.append(value.tensor)
        elif value is None or not torch_names.is_symbolic(value):
            continue
        elif value == 0:
            values[i] = 0.0
            continue
        else:  # not torch.tensor or full, which would make a constant of it
            numbers.append(torch.ones((), dtype=torch.float64, device="cpu") * value)
        values[i] = _AMONG_NUMBERS
    return values, torch.stack(numbers) if numbers else None


def reading(function: Callable, places: Sequence[int]) -> Callable:
    """Adapts a function of the operator's arguments to those of the overload with numbers."""

    def of_numbers(*flat: Any) -> Any:
        return function(*_with(flat, places, flat[-1].tolist()))

    return of_numbers


def faking(fake: Callable, places: Sequence[int]) -> Callable:
    """Adapts the operator's fake to the arguments of the overload with numbers."""

    def of_numbers(*flat: Any) -> Any:
        return fake(*_with(flat, places, [_SOME] * len(places)))

    return of_numbers


def known(flat: Sequence, places: Sequence[int]) -> list:
    """The operator's arguments, for its formula: with symbols where a graph is traced."""
    numbers = flat[-1]
    if type(numbers) is torch.Tensor and not torch_names.torch_dispatch_modes():
        return _with(flat, places, numbers.tolist())
    return _with(flat, places, [Symbol(number) for number in numbers.unbind()])


def _with(flat: Sequence, places: Sequence[int], numbers: Sequence) -> list:
    remaining, values = iter(numbers), list(flat[:-1])
    for i in places:
        if values[i] == _AMONG_NUMBERS:
            values[i] = next(remaining)
    return values
