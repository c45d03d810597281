"""Which checkpoint of a run is the best, by a number that its evaluations report."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from tilewright.trainer.checkpoint.fields import Checkpointing

_BY = "by="


@dataclasses.dataclass(frozen=True)
class Best:
    """The best checkpoint so far.

    metric: the number's name.   mode: min or max.
    over: identifies what evaluations are of (`over`): values of others do not compare.
    value, step: those of the checkpoint; None before there is one.
    """

    metric: str
    mode: str
    over: str = ""
    value: float | None = None
    step: int | None = None

    @classmethod
    def of(cls, train: Checkpointing, over: str, names: Collection[str]) -> Best | None:
        """That of a run before there is one; None if it does not ask for it. names: of what
        evaluations report.

        Raises ValueError if they do not report the number.
        """
        if train.best_metric is None or train.mode_of_best is None:
            return None
        if train.best_metric not in names:
            raise ValueError(
                f"train.best_metric = {train.best_metric}: evaluations report {', '.join(names)}"
            )
        return cls(train.best_metric, train.mode_of_best, over)

    def said(self) -> str:
        return f"global_step_{self.step} ({self.metric}={self.value:.5g})"

    def apart(self, other: Best) -> str | None:
        """Why values of another one do not compare with those of this one, if they do not."""
        if self.metric != other.metric:
            return f"by {other.metric}"
        if self.mode != other.mode:
            return f"by the {other.mode} of {other.metric}"
        mine, theirs = _parts(self.over), _parts(other.over)
        if mine[0] != theirs[0]:
            return "of other data sets"
        # Earlier versions have not said more than eval_max_batches.
        at = 1 if mine[1] and theirs[1] else 2
        return (
            None if mine[at] == theirs[at] else "of other batches, or of another loss or reference"
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


def over(fingerprints: Collection[str], by: str, most: float | None) -> str:
    """What evaluations are of.   fingerprints: of the data sets.   by: a hash of what else their
    values depend on.   most: train.eval_max_batches.
    """
    return " ".join([*fingerprints, f"{_BY}{by}", f"most={most or None}"])


def _parts(over: str) -> tuple[list[str], str, str]:
    """The arguments of `over`; "" for the second in checkpoints of earlier versions."""
    *sets, most = over.split(" ")
    by = sets.pop() if sets and sets[-1].startswith(_BY) else ""
    return sets, by, most


class History(NamedTuple):
    """What a run that goes on knows of the best checkpoints before it.

    best: with which its own compare; None if it has none.   former: by other evaluations: their
    checkpoints stay, and compare again where a run evaluates as they did.   told: lines for the
    log.
    """

    best: Best | None
    former: tuple[Best, ...] = ()
    told: tuple[str, ...] = ()


def history(train: Checkpointing, own: Best | None, state: Mapping[str, Any]) -> History:
    """own: `Best.of`.   state: of the checkpoint that the run goes on from."""
    root = pathlib.Path(train.output_dir, "checkpoints")
    last = [Best(**said) for said in [state.get("best")] if said]
    every = [*last, *(Best(**said) for said in state.get("former_bests", ()))]
    there = [b for b in every if b.step is not None and (root / f"global_step_{b.step}").is_dir()]
    same = next((b for b in there if own is not None and own.apart(b) is None), None)
    best = own
    if own is not None and same is not None:
        best = dataclasses.replace(own, value=same.value, step=same.step)
    told = []
    for one in last:
        if one.step is None or one is same:
            continue
        if one not in there:
            told.append(f"the best checkpoint so far, {one.said()}, is not in {root}")
        elif own is None:
            told.append(f"train.best_metric is not set: the best so far, {one.said()}, stays")
        else:
            told.append(
                f"the best checkpoint so far, {one.said()}, was the best {own.apart(one)}: it does "
                "not compare with this run's evaluations, and stays"
            )
    return History(best, tuple(b for b in there if b is not same), tuple(told))
