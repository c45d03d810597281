"""What a kernel computes, as a digest: of its syntax tree and of all that it calls. Comments,
documentation, line breaks and names of files change nothing; a constant, a decorated function that
it calls, or one that this calls, does.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import pathlib
import textwrap
import types
from collections.abc import Callable, Iterable
from typing import Any

from tilewright.bench.sources import meaning


def of_files(paths: Iterable[pathlib.Path]) -> str:
    """Of whole modules."""
    return _hash("\n".join(meaning(path.read_text()) for path in sorted(paths)))


def of_kernel(kernel: Callable) -> str:
    """Of a function of Triton's, or any function of this package, and of what it reaches by names
    of its module.

    What belongs to Triton itself counts as its version, which the caller has. Raises TypeError for
    a value whose change could not be noticed.
    """
    found: dict[str, str] = {}
    _add(kernel, found)
    return _hash("\n".join(f"{name}: {found[name]}" for name in sorted(found)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _add(kernel: Any, found: dict[str, str]) -> None:
    function = inspect.unwrap(getattr(kernel, "fn", kernel))
    name = f"{function.__module__}.{function.__qualname__}"
    if name in found:
        return
    source = textwrap.dedent(inspect.getsource(function))
    found[name] = meaning(source)
    reached = inspect.getclosurevars(function)
    known = {**reached.globals, **reached.nonlocals}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id in known:
            _value(node.id, known[node.id], name, found)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and isinstance(module := known.get(node.value.id), types.ModuleType)
            and not _of_triton(module.__name__)
        ):
            _value(node.attr, getattr(module, node.attr), name, found)


def _of_triton(module: str) -> bool:
    return module.partition(".")[0] == "triton"


def _value(name: str, value: Any, user: str, found: dict[str, str]) -> None:
    value = getattr(value, "value", value)  # of a tl.constexpr
    if isinstance(value, types.ModuleType) or _of_triton(getattr(value, "__module__", None) or ""):
        if hasattr(value, "fn") and not _of_triton(
            value.fn.__module__
        ):  # ours, decorated by Triton
            _add(value, found)
        return
    if isinstance(value, bool | int | float | str | tuple | None):
        found[f"{user} {name}"] = repr(value)
    elif callable(value) and hasattr(value, "__qualname__"):
        _add(value, found)
    else:
        raise TypeError(f"{user}: {name} is {value!r}, of which no digest can be made")
