"""Digests of kernels: a kernel's syntax tree and everything that it reaches, constants and
functions included. Comments, docstrings, line breaks and the folders of files do not change them.
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
    """The digest of whole modules."""
    return _hash("\n".join(meaning(path.read_text()) for path in sorted(paths)))


def of_kernel(kernel: Callable) -> str:
    """The digest of a Triton kernel, or any function of this package, and of everything that it
    reaches by names of its module.

    Triton's own functions are left out: the caller has its version. Raises TypeError for a value
    that cannot be digested.
    """
    parts: dict[str, str] = {}
    _add(kernel, parts)
    return _hash("\n".join(f"{name}: {parts[name]}" for name in sorted(parts)))


def module_of(function: Callable) -> str:
    """The name of a function's module, without the folders that it is in."""
    return function.__module__.rpartition(".")[2]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _add(kernel: Any, parts: dict[str, str]) -> None:
    function = inspect.unwrap(getattr(kernel, "fn", kernel))
    name = f"{module_of(function)}.{function.__qualname__}"
    if name in parts:
        return
    source = textwrap.dedent(inspect.getsource(function))
    parts[name] = meaning(source)
    reached = inspect.getclosurevars(function)
    known = {**reached.globals, **reached.nonlocals}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id in known:
            _value(node.id, known[node.id], name, parts)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and isinstance(module := known.get(node.value.id), types.ModuleType)
            and not _of_triton(module.__name__)
        ):
            _value(node.attr, getattr(module, node.attr), name, parts)


def _of_triton(module: str) -> bool:
    return module.partition(".")[0] == "triton"


def _value(name: str, value: Any, user: str, parts: dict[str, str]) -> None:
    value = getattr(value, "value", value)  # unwraps a tl.constexpr
    if isinstance(value, types.ModuleType) or _of_triton(getattr(value, "__module__", None) or ""):
        # This package's function, decorated by Triton.
        if hasattr(value, "fn") and not _of_triton(value.fn.__module__):
            _add(value, parts)
        return
    if isinstance(value, bool | int | float | str | tuple | None):
        parts[f"{user} {name}"] = repr(value)
    elif callable(value) and hasattr(value, "__qualname__"):
        _add(value, parts)
    else:
        raise TypeError(f"{user}: {name} is {value!r}, of which no digest can be made")
