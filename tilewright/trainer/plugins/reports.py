"""Reports each step and evaluation of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tilewright.trainer.callbacks import CALLBACKS, Plugin
from tilewright.trainer.plugins.callback import Callback, Step


class Report(Callback):
    """Reports a step by `Metrics`."""

    def after_step(self, step: Step) -> None:
        run, sums = self.run, step.sums
        assert sums is not None  # the step is taken
        lr, loss = run.config.train.lr * run.plan.factor(step.number - 1), sums.mean
        # The step was finite, so NaN means that it had no target. JSON has no NaN.
        empty = run.engine.empty_steps
        losses = {"empty_steps": empty} if math.isnan(loss) else {"loss": loss}
        numbers = {"lr": lr, "grad_norm": step.norm, **sums.router(), **sums.reported()}
        step.values = {**losses, **numbers, "data_seconds": step.waited, **step.values}
        if losses.get("empty_steps") == 1:
            run.metrics.say(
                f"step {step.number}: no token of it has a label, so no weight has changed; later "
                "steps without one are counted"
            )
        run.metrics.step(step.number, step.tokens, **step.values)

    def evaluated(self, done: int, values: Mapping[str, float]) -> None:
        self.run.metrics.evaluation(done, values)

    def close(self) -> None:
        saver = self.run.saver
        if (best := saver.best) and best.step is not None:
            name = saver.folder(best.step).name
            self.run.metrics.say(f"the best checkpoint is {name}: {best.metric}={best.value:.5g}")


CALLBACKS.add("report", Plugin(Report, 50, lambda run: True))
