"""Layouts: what is done to a model, from outside, to run it over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilewright.trainer.config import Config
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.tables import LAYOUTS


@dataclass(frozen=True)
class Layout:
    """A row of LAYOUTS.

    order: layouts are applied in this order, since each wraps the result of the previous ones:
        pipeline 10, tensor parallelism 20, context parallelism 30, compilation 40, recomputation
        50, offload 55, FSDP2 60, DDP 70.
    applies: (configuration, mesh) -> whether it is wanted.
    apply: changes the parts in place, or returns others.
    filled: applied after weights have their values, and not before.
    """

    order: int
    applies: Callable[[Config, Mesh], bool]
    apply: Callable[[Parts, Config, Mesh], Parts | None]
    filled: bool = False


def apply_layouts(parts: Parts, config: Config, mesh: Mesh, *, filled: bool) -> Parts:
    rows = map(LAYOUTS.__getitem__, LAYOUTS.names())  # those of entry points too
    for layout in sorted(rows, key=lambda row: row.order):
        if layout.filled == filled and layout.applies(config, mesh):
            parts = layout.apply(parts, config, mesh) or parts
    return parts
