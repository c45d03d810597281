"""The rows of the tables of optimizers and of schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel
from torch import nn

from tilewright.trainer.tables import Table


class Half(NamedTuple):
    """How an optimizer writes parameters in bfloat16.

    states: the dtype of moments.   master: whether it has the parameters in float32.
    seed: of stochastic rounding; None: to nearest.
    """

    states: torch.dtype
    master: bool
    seed: int | None


@dataclass(frozen=True)
class Optimizer:
    """A row of OPTIMIZERS.

    build: (parameter groups, `apart` of the model, and by keyword the values of `fields` and of
        `options`) -> the optimizer. A group has params, lr and weight_decay.
    fields: fields of the section `train` that it reads, beside those of the groups.
    options: the pydantic model of `train.optimizer_args`, or None where there are none.
    apart: model -> trainable parameters in groups of their own, with what the optimizer must know
        of each.
    apart_lr: the field with their peak learning rate.
    merged: model -> the parameters in which it merges several tensors of its own, of an optimizer
        that takes each by itself; `build` gets them as `merged`.
    version: the version of the states, which checkpoints have unless it is 1.
    needs_whole: why it cannot train parameters that are sharded, or None.
    ignores: fields of the section `train` that every other optimizer reads, with the reason.
    of_half: (parameter groups, `Half`, the pieces of each parameter's shard, and by keyword the
        values of `fields`) -> the optimizer of parameters in bfloat16; None: it has none.
    """

    build: Callable[..., torch.optim.Optimizer]
    fields: tuple[str, ...] = ()
    options: type[BaseModel] | None = None
    apart: Callable[[nn.Module], Mapping[nn.Parameter, Any]] = lambda model: {}
    apart_lr: str | None = None
    merged: Callable[[nn.Module], Mapping[nn.Parameter, Any]] | None = None
    version: int = 1
    needs_whole: str | None = None
    ignores: Mapping[str, str] = field(default_factory=dict)
    of_half: Callable[..., torch.optim.Optimizer] | None = None


class Position(NamedTuple):
    """A step after the warmup, from 0; the number of steps of the warmup; and the number of all
    steps until the decay has ended.
    """

    step: int
    warm: int
    end: int

    def done(self, before: int = 0, after: int = 0) -> float:
        """The share, 0 to 1, that is done of a decay which begins `before` steps after the warmup
        and ends `after` steps before the end.
        """
        begin = self.warm + before
        return min(1.0, max(0, self.step - begin) / max(1, self.end - after - begin - 1))


@dataclass(frozen=True)
class Schedule:
    """A row of SCHEDULES: what comes after the warmup.

    share: the share of the decay that is done, 0 to 1, or with `by_step` a `Position`, and by
        keyword the values of `fields` -> part of the way from lr_min to the peak.
    decays: False for a rate that stays at its peak.
    fields: fields of the section `train` that it reads, beside those of every schedule.
    needs: those of `fields` that have no default.
    ends: whether lr_decay_steps and lr_decay_ratio say where it ends.
    floor: the share is one of the peak, and lr_min the least rate, not the end of the way.
    options: the pydantic model of `train.lr_decay_args`, or None where there are none; `share` gets
        them by keyword, too.
    """

    share: Callable[..., float]
    decays: bool = True
    fields: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    by_step: bool = False
    ends: bool = True
    floor: bool = False
    options: type[BaseModel] | None = None


OPTIMIZERS = Table("optimizers", "tilewright.trainer.optim", Optimizer)
SCHEDULES = Table("schedules", "tilewright.trainer.optim", Schedule)
