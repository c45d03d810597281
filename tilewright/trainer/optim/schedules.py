"""Schedules of the learning rate: warmup, then a decay, as a factor of each group's peak."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.trainer.tables import SCHEDULES

if TYPE_CHECKING:
    from tilewright.trainer.config import Train


@dataclass(frozen=True)
class Schedule:
    """A row of SCHEDULES: the decay after the warmup.

    share: part of the decay that is done, 0 to 1 -> part of the way from lr_min to the peak.
    decays: False for a rate that stays at its peak.
    """

    share: Callable[[float], float]
    decays: bool = True


SCHEDULES.add("constant", Schedule(lambda done: 1.0, decays=False))
SCHEDULES.add("linear", Schedule(lambda done: 1 - done))
SCHEDULES.add("cosine", Schedule(lambda done: 0.5 * (1 + math.cos(math.pi * done))))


def schedule(step: int, total: int, train: Train) -> float:
    """The factor of the peak learning rate in optimizer step `step` (from 0) of `total`.

    It rises linearly from lr_start / lr, at step 0, to 1 over the first lr_warmup_ratio of the
    steps; then it stays, or falls to lr_min / lr, as the row `lr_decay_style` says, until
    lr_decay_ratio of the steps, and stays there.
    """
    warm = round(train.lr_warmup_ratio * total)
    if step < warm:
        start = train.lr_start / train.lr
        return start + (1 - start) * step / warm
    row = SCHEDULES[train.lr_decay_style]
    if not row.decays:
        return 1.0
    end = max(round(train.lr_decay_ratio * total), warm + 1)
    done = min(1.0, (step - warm) / max(1, end - warm - 1))
    least, share = train.lr_min / train.lr, row.share(done)
    if not 0 <= share <= 1:
        raise ValueError(
            f"train.lr_decay_style = {train.lr_decay_style}: its share must be 0 to 1, got {share} "
            f"after {done} of the decay"
        )
    return least + (1 - least) * share
