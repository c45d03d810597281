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
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.plan import Plan
from tilewright.trainer.plugins.metrics import Metrics


@dataclasses.dataclass
class Built:
    """What a run is made of.

    held: the data sets that it is evaluated on, by name.   last: once, after the last step.
    identity: see `build.identity`.
    ops: the implementation of each op.
    export_as: the arguments of `Engine.export`.
    """

    shape: ModelConfig
    loss: Loss
    engine: Engine
    batches: Batches
    held: dict[str, Bins]
    last: dict[str, Bins]
    identity: dict[str, dict[str, Any]]
    made_of: MadeOf
    ops: dict[str, str]
    export_as: dict[str, Any]


@dataclasses.dataclass
class Run(Built):
    """The parts of a run, and its position. done: optimizer steps."""

    config: Config
    mesh: Mesh
    plan: Plan
    metrics: Metrics
    saver: checkpoint.Saver
    start: int
    done: int
    owes: bool  # an evaluation of these weights
    callbacks: list[Any] = dataclasses.field(default_factory=list)

    def end_if(self, problem: str | None) -> None:
        """Waits for the last checkpoint, and ends the run with a sentence, if there is one."""
        if problem is not None:
            self.saver.finish()
            raise ValueError(problem)
