"""Which checkpoint of a run is the best, by a number that its evaluations report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tilewright.trainer.config import Train


@dataclasses.dataclass(frozen=True)
class Best:
    """The best checkpoint so far. metric: the number's name.   mode: min or max.   value, step: of
    the checkpoint; None before there is one.
    """

    metric: str
    mode: str
    value: float | None = None
    step: int | None = None

    @classmethod
    def of(cls, train: Train, stored: Mapping[str, Any] | None) -> Best | None:
        """That of a run; None if it does not ask for it. stored: what the checkpoint that it
        resumes from says, which does not count if it is of another number.
        """
        if train.best_metric is None or train.mode_of_best is None:
            return None
        new = cls(train.best_metric, train.mode_of_best)
        if stored is None or (stored["metric"], stored["mode"]) != (new.metric, new.mode):
            return new
        return cls(**stored)

    def check(self, values: Mapping[str, float]) -> None:
        """Raises ValueError if evaluations do not report the number."""
        if self.metric not in values:
            raise ValueError(
                f"train.best_metric = {self.metric}: evaluations report {', '.join(values)}"
            )

    def improved_by(self, values: Mapping[str, float]) -> bool:
        """Whether an evaluation is better; one that is not finite never is."""
        value = values.get(self.metric, math.nan)
        if not math.isfinite(value):
            return False
        if self.value is None:
            return True
        return value < self.value if self.mode == "min" else value > self.value

    def at(self, step: int, values: Mapping[str, float]) -> Best:
        """The better of this one and a checkpoint."""
        if not self.improved_by(values):
            return self
        return dataclasses.replace(self, value=values[self.metric], step=step)
