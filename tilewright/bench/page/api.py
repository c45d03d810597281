"""Writes the site's pages of the API besides the ops: what mkdocstrings shows of each module."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from tilewright import ops

MODULES = {
    "tilewright": "Choosing implementations, and adding one from outside.",
    "tilewright.nn": "Modules over the ops.",
    "tilewright.adapt": "Adapters and quantized weights in whole models.",
    "tilewright.integrations.transformers": "Hugging Face transformers' models, computed by the ops.",
    "tilewright.ops": "What `tilewright.ops` has besides the ops of the registry, which have pages "
    "of their own: tensor classes, schedules, checks.",
    "tilewright.ops.context_parallel": "Attention over a sequence that is sharded over ranks.",
    "tilewright.ops.expert_parallel": "Experts that are sharded over a process group.",
}


def pages() -> Iterator[tuple[str, str]]:
    """(name, Markdown) of each page."""
    for module, about in MODULES.items():
        names = getattr(importlib.import_module(module), "__all__", None)
        options = [
            "    options:",
            "      show_root_heading: false",
            "      show_root_toc_entry: false",
        ]
        if names is not None:
            kept = [n for n in names if n not in ops.OPS or module != "tilewright.ops"]
            options += ["      members:", *(f"        - {n}" for n in kept)]
        yield module, "\n".join([f"# `{module}`", "", about, "", f"::: {module}", *options, ""])
