"""Layouts: what is done to a model, from outside, to run it over a mesh, and the mesh's axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from tilewright.trainer.config import Train
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.tables import LAYOUTS

if TYPE_CHECKING:
    from tilewright.trainer.parallel.mesh import Mesh


class Axis(NamedTuple):
    """An axis of the mesh, of a row of LAYOUTS.

    What ranks along pp, replicate, shard, ring, ulysses and tp share is in `mesh`. Along any other
    axis they have copies of the model that train apart, on batches of their own: losses and
    denominators are added over them, gradients are not, and what brings them together is the row's.
    A checkpoint has one copy.

    order: a rank's number counts through the axes in this order, the last one fastest: pp 10,
        replicate 20, shard 30, ring 40, ulysses 50, tp 60.
    field: what gives its size: an option of the row, or, of a row without options, a field of
        `train`; None: the processes that remain.
    """

    name: str
    order: int
    field: str | None


def _never(mesh: Mesh, *_: Any) -> bool:
    return False


def _nothing(parts: Parts, mesh: Mesh, *_: Any) -> None:
    return None


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
    axes: of the mesh, that it adds.
    options: the pydantic model of `train.layout_args` under the row's name, in which every option
        has a default; None: there are none. `options_of` returns them.
    """

    order: int = 0
    applies: Callable[..., bool] = _never
    apply: Callable[..., Parts | None] = _nothing
    sections: tuple[str, ...] = ()
    filled: bool = False
    axes: tuple[Axis, ...] = ()
    options: type[BaseModel] | None = None


def apply_layouts(parts: Parts, sections: Mapping[str, Any], mesh: Mesh, *, filled: bool) -> Parts:
    """sections: of the configuration, by name."""
    rows = map(LAYOUTS.__getitem__, LAYOUTS.names())  # those of entry points too
    for layout in sorted(rows, key=lambda row: row.order):
        read = [sections[name] for name in layout.sections]
        if layout.filled == filled and layout.applies(mesh, *read):
            parts = layout.apply(parts, mesh, *read) or parts
    return parts


def options_of(name: str, train: Train) -> Any:
    """The options of a layout that has some: its row's model."""
    options = LAYOUTS[name].options
    assert options is not None
    return options.model_validate(train.layout_args.get(name, {}))


def axes() -> list[tuple[Axis, str]]:
    """The axes of all layouts, in order, with the names of the layouts.

    Raises ValueError for a name that two axes have.
    """
    found = [(axis, name) for name in LAYOUTS.names() for axis in LAYOUTS[name].axes]
    names = sorted(axis.name for axis, _ in found)
    if twice := [a for a, b in itertools.pairwise(names) if a == b]:
        raise ValueError(f"layouts: two axes of the mesh are called {twice[0]}")
    return sorted(found, key=lambda one: one[0].order)


def given_sizes(train: Train) -> dict[str, tuple[str, int]]:
    """The sizes that fields give axes, in order, and the fields, as errors name them."""
    found = {}
    for axis, layout in axes():
        if axis.field is not None and LAYOUTS[layout].options is None:
            found[axis.name] = f"train.{axis.field}", getattr(train, axis.field)
        elif axis.field is not None:
            size = getattr(options_of(layout, train), axis.field)
            found[axis.name] = f"train.layout_args.{layout}.{axis.field}", size
    return found
