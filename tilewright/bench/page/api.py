"""Writes the site's pages of the API besides the ops: what mkdocstrings shows of each module."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

from tilewright import files, ops

MODULES = (
    "tilewright",
    "tilewright.nn",
    "tilewright.adapt",
    "tilewright.lora",
    "tilewright.integrations.transformers",
    "tilewright.integrations.peft",
    "tilewright.ops",
    "tilewright.ops.context_parallel",
    "tilewright.ops.expert_parallel",
)


def pages() -> Iterator[tuple[str, str]]:
    """(name, Markdown) of each page."""
    for name in MODULES:
        lines = [
            f"# `{name}`",
            "",
            f"::: {name}",
            "    options:",
            "      show_root_heading: false",
            "      show_root_toc_entry: false",
        ]
        module = importlib.import_module(name)
        members = _members(module)
        # Those of a module's __getattr__ are not in its source: shown from where they are defined.
        late = [n for n in members if n not in vars(module)]
        if shown := [n for n in members if n not in late]:
            lines += ["      members:", *(f"        - {n}" for n in shown)]
        for n in late:
            lines += ["", f"::: {getattr(module, n).__module__}.{n}"]
            lines += ["    options:", "      show_root_heading: true", "      heading_level: 2"]
        yield name, "\n".join([*lines, ""])


def _members(module) -> list[str]:
    """Its functions and classes, without the ops, which have pages of their own, and file helpers.

    Empty if the module does not list its names: then all public ones are shown.
    """
    names = {n: getattr(module, n) for n in getattr(module, "__all__", ())}
    return [
        n
        for n, value in names.items()
        if (inspect.isroutine(value) or inspect.isclass(value))
        and not (module is ops and n in ops.OPS)
        and value.__module__ != files.__name__
    ]
