"""Callbacks: what happens in a run beside its steps."""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tilewright.trainer.config import Train
from tilewright.trainer.engine import Batch, Sums
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.tables import CALLBACKS

if TYPE_CHECKING:
    from tilewright.trainer.loop import Run


@dataclass
class Step:
    """An optimizer step.

    number: from 1.
    waited: seconds for its batches.
    sums, norm, tokens: once it is taken; tokens are those that all ranks together processed.
    values: numbers to report, to which callbacks may add.
    """

    number: int
    batches: Sequence[Batch]
    waited: float = 0.0
    sums: Sums | None = None
    norm: float = 0.0
    tokens: int = 0
    values: dict[str, float] = field(default_factory=dict)


class Callback:
    """Methods are called on every rank, and do nothing unless a subclass says so.

    run: the run's parts: its engine, metrics, saver, mesh and configuration. `Run.callbacks` has
        those that come before this one. The run has written nothing to its folder yet.
    """

    def __init__(self, run: Run):
        self.run = run

    def begin(self) -> None:
        """Once every callback is there, and none has refused the run."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around all steps."""
        yield

    def before_step(self, step: Step) -> None:
        """Before the forward passes of a step."""

    def after_step(self, step: Step) -> None:
        """After the weights have changed, and before a checkpoint is saved."""

    def saving(self) -> None:
        """Before a checkpoint is written, `Run.done` steps in: at the steps that ask for one, and
        where a signal ends the run.
        """

    def evaluated(self, done: int, values: Mapping[str, float]) -> None:
        """After an evaluation; done: optimizer steps.   values: what it reports, by its names in
        metrics.jsonl: "eval_loss". The one before the first step is outside `running`.
        """

    def close(self) -> None:
        """After the last checkpoint of a run that has reached its last step."""


@dataclass(frozen=True)
class Plugin:
    """A row of CALLBACKS.

    make: run -> the callback, or module:name of it, which the runs import that have the callback.
    order: callbacks are called in this order, those of equal order by name. Metrics, which report
        `Step.values`, have 50; the comparison with an earlier run has 60.
    wanted: run -> whether the run's configuration asks for it; without one it is there if
        `train.callbacks` names it.
    check: called for every run, before anything is built: raises, on every rank, for what the
        callback would refuse.
    """

    make: Callable[[Run], Callback] | str
    order: int = 40
    wanted: Callable[[Run], bool] | None = None
    check: Callable[[Train, Mesh], None] | None = None


def _rows() -> list[tuple[str, Plugin]]:
    """In order; of entry points too."""
    rows = [(name, CALLBACKS[name]) for name in CALLBACKS.names()]
    return sorted(rows, key=lambda row: row[1].order)


def check_callbacks(train: Train, mesh: Mesh) -> None:
    """Raises what a row's `check` raises."""
    for _, row in _rows():
        if row.check:
            row.check(train, mesh)


def add_callbacks(run: Run) -> None:
    """Makes those of a run, in order."""
    named = run.config.train.callbacks
    wanted = [row for n, row in _rows() if (row.wanted(run) if row.wanted else n in named)]
    for row in wanted:
        make = pkgutil.resolve_name(row.make) if isinstance(row.make, str) else row.make
        run.callbacks.append(make(run))
