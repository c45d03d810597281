"""Writes the site's pages of the API besides the ops: what mkdocstrings shows of each module."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType

from tilewright import ops

MODULES = (
    "tilewright",
    "tilewright.nn",
    "tilewright.integrations.transformers",
    "tilewright.integrations.peft",
    "tilewright.ops",
    "tilewright.ops.attention.context_parallel",
    "tilewright.ops.linear_attention.context_parallel",
    "tilewright.ops.moe.expert_parallel",
    "tilewright_lab.verify.verify",
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
        shown = members(module)
        # Those of a module's __getattr__ are not in its source: shown from where they are defined.
        late = [n for n in shown if n not in vars(module)]
        if own := [n for n in shown if n not in late]:
            lines += ["      members:", *(f"        - {n}" for n in own)]
        for n in late:
            lines += ["", f"::: {getattr(module, n).__module__}.{n}"]
            lines += ["    options:", "      show_root_heading: true", "      heading_level: 2"]
        yield name, "\n".join([*lines, ""])


def members(module: ModuleType) -> list[str]:
    """The functions and classes of a module's `__all__`, without the ops, which have pages of their
    own.
    """
    return [
        name
        for name in module.__all__
        if (inspect.isroutine(value := getattr(module, name)) or inspect.isclass(value))
        and not (module is ops and name in ops.OPS)
    ]
