"""Functions of transformers below their decorators, and copies that call others in their place."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import CellType, FunctionType, ModuleType
from typing import Any

from tilewright.integrations.transformers.versions import absent


def own_function(function: Callable) -> FunctionType | None:
    """The Python function below its decorators, or None."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function if isinstance(function, FunctionType) else None


def with_globals(function: Callable, space: dict[str, Any]) -> FunctionType | None:
    """A copy of a function whose own code, below its decorators, looks names up in `space`.

    The decorators are kept: each is copied with what it wraps replaced. None if one of them does
    not hold what it wraps in its closure, as `functools.wraps` decorators do.
    """
    if not isinstance(function, FunctionType):
        return None
    wrapped = getattr(function, "__wrapped__", None)
    cells = function.__closure__ or ()
    if wrapped is not None:
        inner = with_globals(wrapped, space)
        places = [_content(cell) is wrapped for cell in cells]
        if inner is None or not any(places):
            return None
        cells = [
            CellType(inner) if is_place else cell
            for cell, is_place in zip(cells, places, strict=True)
        ]
        space = function.__globals__
    copied = FunctionType(
        function.__code__, space, function.__name__, function.__defaults__, tuple(cells)
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copied, function)
    if wrapped is None:
        del copied.__wrapped__
    else:
        copied.__wrapped__ = inner
    return copied


def called_by(cls: type, names: Iterable[str]) -> dict[str, Callable]:
    """The functions of these names that a class's forward calls."""
    own = own_function(cls.forward)
    if own is None:
        return {}
    space, used = own.__globals__, own.__code__.co_names
    return {n: space[n] for n in names if n in used and callable(space.get(n))}


def calling(base: type, chosen: dict[str, Callable]) -> FunctionType | str:
    """The class's own forward, in a namespace where these functions stand for those of their names;
    or the reason why it cannot be made.
    """
    own = own_function(base.forward)
    copied = None
    if own is not None:
        space = own.__globals__
        # Whatever another library has replaced there since: the copies hold what they were made of,
        # so that no other object gets the same id.
        now = tuple((key, id(value)) for key, value in space.items() if key != "__builtins__")
        copied = with_globals(
            base.forward, _namespace(space["__name__"], tuple(sorted(chosen.items())), now).__dict__
        )
    if copied is None:
        return absent(f"forward of {base.__name__} below a decorator that keeps it in its closure")
    return copied


@functools.cache
def _namespace(name: str, chosen: tuple[tuple[str, Any], ...], now: tuple) -> ModuleType:
    """A copy of a module with the values of `chosen`.   now: what the names of the module are.

    It can be imported: torch.compile looks the names of its functions up there.
    """
    module = sys.modules[name]
    number = sum(key.startswith(f"{__name__}.") for key in sys.modules)
    copied = ModuleType(f"{__name__}.{name.replace('.', '_')}_{number}")
    copied.__dict__.update({k: v for k, v in module.__dict__.items() if k != "__name__"})
    copied.__dict__.update(chosen)
    sys.modules[copied.__name__] = copied
    return copied


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
