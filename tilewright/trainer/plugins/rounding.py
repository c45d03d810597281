"""Stochastic rounding of a recipe's products: `precision.recipe: nvfp4`.

Before a step each layer gets the seed of its random numbers. A seed is a function of the run's
seed, the step and the layer, so recomputation draws the same numbers, and so does a resumed run.
"""

from __future__ import annotations

from tilewright.trainer.callbacks import CALLBACKS, Plugin
from tilewright.trainer.parallel.low_precision import set_seeds
from tilewright.trainer.plugins.callback import Callback, Step


class Rounding(Callback):
    def before_step(self, step: Step) -> None:
        run = self.run
        set_seeds(run.engine.parts, run.mesh, run.config.train.seed, step.number - 1)


CALLBACKS.add("rounding", Plugin(Rounding, 30, lambda run: run.config.precision.recipe == "nvfp4"))
