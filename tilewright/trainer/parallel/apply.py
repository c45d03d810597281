"""Applies layouts to a model's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.parallel.precision import FULL
from tilewright.trainer.parallel.row import LAYOUTS
from tilewright.trainer.section import part


def apply_layouts(parts: Parts, sections: Mapping[str, Any], mesh: Mesh, *, filled: bool) -> Parts:
    """sections: model, lora, data, train and dtypes (default: float32 parameters), by name."""
    sections = {"dtypes": FULL, **sections}
    rows = map(LAYOUTS.__getitem__, LAYOUTS.names())  # those of entry points too
    for layout in sorted(rows, key=lambda row: row.order):
        read = [part(sections.values(), kind) for kind in layout.sections]
        if layout.filled == filled and layout.applies(mesh, *read):
            parts = layout.apply(parts, mesh, *read) or parts
    return parts
