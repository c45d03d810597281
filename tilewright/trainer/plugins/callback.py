"""Callbacks: what happens in a run beside its steps."""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.trainer.callbacks import CALLBACKS, Plugin
from tilewright.trainer.config import Train
from tilewright.trainer.engine import Batch, Sums
from tilewright.trainer.options import given_options
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.plugins.run import Run


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


def _rows() -> list[tuple[str, Plugin]]:
    """The rows in order, with those of entry points."""
    rows = [(name, CALLBACKS[name]) for name in CALLBACKS.names()]
    return sorted(rows, key=lambda row: row[1].order)


def check_callbacks(train: Train, mesh: Mesh) -> None:
    """Raises what a row's `check` raises."""
    for _, row in _rows():
        if row.check:
            row.check(train, mesh)


def add_callbacks(run: Run) -> None:
    """Makes those of a run, in order."""
    named, given = run.config.train.callbacks, run.config.train.callback_args
    for name, row in _rows():
        if row.wanted(run) if row.wanted else name in named:
            make = pkgutil.resolve_name(row.make) if isinstance(row.make, str) else row.make
            run.callbacks.append(make(run, **given_options(row.options, given.get(name, {}))))
