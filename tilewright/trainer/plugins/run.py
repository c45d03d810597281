"""The parts of a run."""

from __future__ import annotations

import dataclasses
from typing import Any

from tilewright.trainer.checkpoint import checkpoint
from tilewright.trainer.checkpoint.made_of import MadeOf
from tilewright.trainer.config import Config
from tilewright.trainer.data.batches import Batches, Bins
from tilewright.trainer.engine import Engine
from tilewright.trainer.losses.loss import Loss
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.plan import Plan
from tilewright.trainer.plugins.metrics import Metrics


@dataclasses.dataclass
class Run:
    """The parts of a run, and its position. done: optimizer steps."""

    config: Config
    mesh: Mesh
    engine: Engine
    batches: Batches
    held: dict[str, Bins]
    last: dict[str, Bins]
    loss: Loss
    plan: Plan
    metrics: Metrics
    saver: checkpoint.Saver
    identity: dict[str, dict[str, Any]]
    made_of: MadeOf
    ops: dict[str, str]
    export_as: dict[str, Any]
    start: int
    done: int
    owes: bool  # an evaluation of these weights
    callbacks: list[Any] = dataclasses.field(default_factory=list)

    def end_if(self, problem: str | None) -> None:
        """Waits for the last checkpoint, and ends the run with a sentence, if there is one."""
        if problem is not None:
            self.saver.finish()
            raise ValueError(problem)
