"""Layouts: what is done to a model, from outside, to run it over a mesh, and the mesh's axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel

from tilewright.trainer.tables import Table


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


@dataclass(frozen=True)
class Layout:
    """A row of LAYOUTS.

    order: layouts are applied in this order, since each wraps the result of the previous ones:
        pipeline 10, tensor parallelism 20, context parallelism 30, compilation 40, recomputation
        50, offload 55, FSDP2 60, DDP 70.
    applies: (mesh, *sections) -> whether it is wanted.
    apply: (parts, mesh, *sections) changes the parts in place, or returns others.
    sections: which of model, lora, data, train and dtypes both read, by class.
    filled: applied after weights have their values, and not before.
    axes: axes that it adds to the mesh.
    options: the pydantic model of `train.layout_args` under the row's name, in which every option
        has a default; None: there are none. `options_of` returns them.
    """

    order: int = 0
    applies: Callable[..., bool] = lambda *_: False
    apply: Callable[..., Any] = lambda *_: None
    sections: tuple[type, ...] = ()
    filled: bool = False
    axes: tuple[Axis, ...] = ()
    options: type[BaseModel] | None = None


LAYOUTS = Table("layouts", "tilewright.trainer.parallel", Layout)


def axes() -> list[tuple[Axis, str]]:
    """The axes of all layouts, in order, with the names of the layouts.

    Raises ValueError for a name that two axes have.
    """
    pairs = [(axis, name) for name in LAYOUTS.names() for axis in LAYOUTS[name].axes]
    names = sorted(axis.name for axis, _ in pairs)
    if twice := [a for a, b in itertools.pairwise(names) if a == b]:
        raise ValueError(f"layouts: two axes of the mesh are called {twice[0]}")
    return sorted(pairs, key=lambda one: one[0].order)
