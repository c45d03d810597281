"""The optimizer steps of a run, and the actions due after each."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from tilewright.trainer.config import Train
from tilewright.trainer.models.head import Shaping
from tilewright.trainer.optim.optim import IN_GROUPS
from tilewright.trainer.optim.per_step import PerStep, at_step
from tilewright.trainer.optim.schedules import schedule, too_short


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

    @property
    def _scheduled(self) -> int:
        """The steps taken before the first one of the schedule."""
        return 0 if self.train.max_steps else self.shift

    def factor(self, step: int) -> float:
        """The factor of the peak learning rate; step: from 0."""
        shift = self._scheduled
        return schedule(step - shift, self.total - shift, self.train)

    def values(self, step: int) -> dict[str, float]:
        """The values of the fields that change from step to step, by name; step: from 0."""
        names = (*IN_GROUPS, *Shaping._fields)
        settings = {name: getattr(self.train, name) for name in names}
        at = step - self._scheduled
        return {n: v.at(at) for n, v in settings.items() if isinstance(v, PerStep)}

    def max_norm(self, step: int) -> float:
        """The norm to which gradients are clipped; step: from 0."""
        return at_step(self.train.max_grad_norm, step - self._scheduled)

    def problem(self) -> str | None:
        """Which field does not fit the number of the run's steps, or None."""
        t = self.train
        if t.enable_profiling and t.profile_start_step >= self.total:
            return (
                f"train.profile_start_step = {t.profile_start_step}: the run has {self.total} steps"
            )
        why = too_short(self.total - self._scheduled, t)
        return why and f"train.lr_decay_style = {t.lr_decay_style}: {why}"

    def saves(self, done: int) -> bool:
        t = self.train
        return bool(
            done == self.total
            or (t.save_steps and done % t.save_steps == 0)
            or (t.save_epochs and self._reaches(done, t.save_epochs))
        )

    def _reaches(self, done: int, epochs: float) -> bool:
        """Whether the last of these steps reaches a multiple of so many epochs."""
        # As written: 0.1 as a float is a little more, and ten of it more than an epoch.
        every = Fraction(str(epochs)) * self.steps_per_epoch
        steps = done - self.shift
        return steps // every > (steps - 1) // every

    def evaluates(self, done: int) -> bool:
        """done: 0: before the first step."""
        t = self.train
        if done == 0:
            return t.eval_strategy == "auto" if t.eval_on_start is None else t.eval_on_start
        if t.eval_strategy == "steps":
            return t.eval_steps is not None and done % t.eval_steps == 0
        if t.eval_strategy == "epoch":
            return self._reaches(done, t.eval_epochs)
        return t.eval_strategy == "auto" and (self.saves(done) or self.ends_epoch(done))

    def ends_epoch(self, done: int) -> bool:
        return self._reaches(done, 1)
