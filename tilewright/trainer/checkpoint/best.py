"""Which checkpoint of a run is the best, by a number that its evaluations report."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from tilewright.trainer.config import Train


@dataclasses.dataclass(frozen=True)
class Best:
    """The best checkpoint so far.

    metric: the number's name.   mode: min or max.
    over: identifies the batches that evaluations are of: values of other ones do not compare.
    value, step: of the checkpoint; None before there is one.
    """

    metric: str
    mode: str
    over: str = ""
    value: float | None = None
    step: int | None = None

    @classmethod
    def of(
        cls,
        train: Train,
        stored: Mapping[str, Any] | None,
        held: Mapping[str, Any],
        names: Collection[str],
    ) -> Best | None:
        """That of a run; None if it does not ask for it. stored: what the checkpoint that it
        resumes from says, which does not count if it is of another number, of other batches, or of
        a checkpoint that is not in the run's folder. held: the `Bins` of each data set to evaluate
        on.   names: of what evaluations report.

        Raises ValueError if they do not report the number.
        """
        if train.best_metric is None or train.mode_of_best is None:
            return None
        if train.best_metric not in names:
            raise ValueError(
                f"train.best_metric = {train.best_metric}: evaluations report {', '.join(names)}"
            )
        over = " ".join([bins.fingerprint() for bins in held.values()])
        over += f" most={train.eval_max_batches or None}"
        new = cls(train.best_metric, train.mode_of_best, over)
        found = new if stored is None else cls(**stored)
        same = (found.metric, found.mode, found.over) == (new.metric, new.mode, over)
        folder = pathlib.Path(train.output_dir, "checkpoints", f"global_step_{found.step}")
        return found if same and folder.is_dir() else new

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
