"""Layouts: what is done to a model, from outside, to run it over a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.tables import LAYOUTS


@dataclass(frozen=True)
class Layout:
    """A row of LAYOUTS.

    order: layouts are applied in this order, since each wraps the result of the previous ones:
        pipeline 10, tensor parallelism 20, context parallelism 30, compilation 40, recomputation
        50, offload 55, FSDP2 60, DDP 70.
    applies: (mesh, *sections) -> whether it is wanted.
    apply: (parts, mesh, *sections) changes the parts in place, or returns others.
    sections: the names of the configuration's that both read.
    filled: applied after weights have their values, and not before.
    """

    order: int
    applies: Callable[..., bool]
    apply: Callable[..., Parts | None]
    sections: tuple[str, ...] = ()
    filled: bool = False


def apply_layouts(parts: Parts, sections: Mapping[str, Any], mesh: Mesh, *, filled: bool) -> Parts:
    """sections: of the configuration, by name."""
    rows = map(LAYOUTS.__getitem__, LAYOUTS.names())  # those of entry points too
    for layout in sorted(rows, key=lambda row: row.order):
        read = [sections[name] for name in layout.sections]
        if layout.filled == filled and layout.applies(mesh, *read):
            parts = layout.apply(parts, mesh, *read) or parts
    return parts
