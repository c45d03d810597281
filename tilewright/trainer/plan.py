"""The optimizer steps of a run, and the actions due after each."""

from __future__ import annotations

import dataclasses

from tilewright.trainer.config import Train
from tilewright.trainer.optim.schedules import schedule


@dataclasses.dataclass(frozen=True)
class Plan:
    """The optimizer steps of a run, and the actions due after each.

    Steps are numbered through a run, but a step's samples depend on the number of ranks and on
    accumulation, which may change when a run resumes. Epochs, and with them the learning rate of a
    run that is counted in epochs, follow the data: `shift` is the number of steps taken minus the
    number of steps of the present size for the same data.
    """

    train: Train
    steps_per_epoch: int
    shift: int = 0

    @property
    def total(self) -> int:
        """The number of the last step."""
        return (
            self.train.max_steps or self.train.num_train_epochs * self.steps_per_epoch + self.shift
        )

    def factor(self, step: int) -> float:
        """The factor of the peak learning rate; step: from 0."""
        shift = 0 if self.train.max_steps else self.shift
        return schedule(step - shift, self.total - shift, self.train)

    def saves(self, done: int) -> bool:
        t = self.train
        every = max(1, round(t.save_epochs * self.steps_per_epoch)) if t.save_epochs else 0
        return bool(
            done == self.total
            or (t.save_steps and done % t.save_steps == 0)
            or (every and (done - self.shift) % every == 0)
        )

    def evaluates(self, done: int) -> bool:
        """done: 0: before the first step."""
        t = self.train
        if done == 0:
            return t.eval_strategy == "auto" if t.eval_on_start is None else t.eval_on_start
        if t.eval_strategy == "steps":
            return t.eval_steps is not None and done % t.eval_steps == 0
        if t.eval_strategy == "epoch":
            return (done - self.shift) % (t.eval_epochs * self.steps_per_epoch) == 0
        return t.eval_strategy == "auto" and (self.saves(done) or self.ends_epoch(done))

    def ends_epoch(self, done: int) -> bool:
        return (done - self.shift) % self.steps_per_epoch == 0
