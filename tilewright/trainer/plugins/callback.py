"""Callbacks: what happens in a run beside its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.trainer.callbacks import CALLBACKS
from tilewright.trainer.engine import Batch, Sums
from tilewright.trainer.options import given_options
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

    run: the run's parts: its engine, metrics, saver, mesh and configuration.
    """

    def __init__(self, run: Run):
        self.run = run

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


def callbacks(run: Run) -> list[Callback]:
    """Those of a run, in order."""
    named = run.config.train.callbacks
    all_rows = ((name, CALLBACKS[name]) for name in CALLBACKS.names())  # of entry points too
    rows = [(n, r) for n, r in all_rows if (r.wanted(run) if r.wanted else n in named)]
    given = run.config.train.callback_args
    return [
        row.make(run, **given_options(row.options, given.get(name, {})))
        for name, row in sorted(rows, key=lambda one: one[1].order)
    ]
