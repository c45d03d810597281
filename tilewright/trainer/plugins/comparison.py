"""Ends a run where it differs from an earlier one: `train.assert_deterministic`."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.trainer.callbacks import CALLBACKS, Plugin
from tilewright.trainer.plugins.callback import Callback, Step


class Comparison(Callback):
    """With the steps and evaluations that the witness has."""

    def after_step(self, step: Step) -> None:
        self.run.end_if(self.run.witness.problem(step.number, step.values))

    def evaluated(self, done: int, values: Mapping[str, float]) -> None:
        self.run.end_if(self.run.witness.evaluation(done, values))

    def close(self) -> None:
        for line in self.run.witness.summary():
            self.run.metrics.say(line)


CALLBACKS.add("witness", Plugin(Comparison, 60, lambda run: True))
