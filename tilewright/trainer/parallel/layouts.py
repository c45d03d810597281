"""Applies layouts to a model's parts, with what they read of a configuration."""

from __future__ import annotations

from typing import Any

from tilewright.trainer.parallel.fields import Parallel
from tilewright.trainer.parallel.row import LAYOUTS, axes


def options_of(name: str, parallel: Parallel) -> Any:
    """The options of a layout that has some: its row's model."""
    options = LAYOUTS[name].options
    assert options is not None
    return options.model_validate(parallel.layout_args.get(name, {}))


def given_sizes(parallel: Parallel) -> dict[str, tuple[str, int]]:
    """The sizes that fields give axes, in order, and the fields, as errors name them."""
    sizes = {}
    for axis, layout in axes():
        if axis.field is not None and LAYOUTS[layout].options is None:
            sizes[axis.name] = f"train.{axis.field}", getattr(parallel, axis.field)
        elif axis.field is not None:
            size = getattr(options_of(layout, parallel), axis.field)
            sizes[axis.name] = f"train.layout_args.{layout}.{axis.field}", size
    return sizes
