"""A reference that follows the policy (TR-DPO, arXiv:2404.09656)."""

from __future__ import annotations

from tilewright.trainer.callbacks import CALLBACKS, Plugin
from tilewright.trainer.plugins.callback import Callback, Step
from tilewright.trainer.reference import Reference


class Moving(Callback):
    def after_step(self, step: Step) -> None:
        section, engine = self.run.config.preference, self.run.engine
        steps = section.reference_update_steps
        assert steps is not None and isinstance(engine.reference, Reference)  # else refused
        if step.number % steps == 0:
            engine.reference.move(engine.parts, section.reference_ema)


CALLBACKS.add(
    "moving",
    Plugin(Moving, 20, lambda run: run.config.preference.reference_update_steps is not None),
)
