"""Losses, separate from the model: functions of the head's per-token values, by name.

A loss is a function `(per_token, batch) -> (sum, denominator, *further sums)`. `per_token` is what
the head gives, of a language model `TokenLosses`; `batch` holds the micro-batch's tensors by name.
Sums and denominators are added over micro-batches and ranks, and the optimizer's step divides
gradients by the denominator once: each token has the same weight however a step is split into
micro-batches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from pydantic import BaseModel

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.losses.before import Before
from tilewright.trainer.models.head import LossFunction
from tilewright.trainer.models.model_config import HEADS
from tilewright.trainer.options import given_options
from tilewright.trainer.tables import Table

# Numbers that are reported with every step or evaluation.
RESERVED = {
    "step",
    "loss",
    "eval_loss",
    "hits",
    "labels",
    "lr",
    "grad_norm",
    "empty_steps",
    "tokens",
    "tokens_per_second",
    "data_seconds",
    "seconds",
    "seconds_left",
    "mfu",
    "memory_gb",
}


@dataclass(frozen=True)
class Loss:
    """A row of LOSSES.

    function: (per_token, batch) -> (sum, denominator, *reported sums), one for each of `reports`.
    columns: columns of a batch that it reads. A run whose batches have not all of them is refused.
    accepts: further columns that data may have: those that other settings of the run read. Another
        one that says what to learn, and is not read, is refused.
    reports: names of further sums, which are reported over the denominator.
    nats: whether the mean is a cross-entropy in nats, of which evaluations report the perplexity.
    tempered: whether it reads the log-probabilities of a sampler: evaluations, too, are at
        train.loss_temperature.
    pairs: whether documents must be a chosen and a rejected answer in turn.
    mismatched: whether batches have, beside themselves, documents' prompts with the answers of
        others: see `data.batches`.
    before: adds to a step's or an evaluation's micro-batches what the loss reads of all of them, or
        of a reference: see `losses.before`.
    over: names of reports that are means over another report, by name.
    widths: widths of columns with several numbers per token, as many as the loss reads.
    asked: what makes the loss read a column, in errors, where it is not its name.
    head: the head of the model, a name of HEADS.
    settled: a section of the configuration -> the loss that a run has, if the row depends on it.
    section: the name of that section.
    options: the pydantic model of `train.loss_args`, or None where there are none; the function
        gets them by keyword, too.
    """

    function: LossFunction
    columns: tuple[str, ...] = ("labels",)
    reports: tuple[str, ...] = ()
    nats: bool = False
    tempered: bool = False
    pairs: bool = False
    mismatched: bool = False
    before: Before | None = None
    over: Mapping[str, str] = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=dict)
    asked: Mapping[str, str] = field(default_factory=dict)
    head: str = "language_model"
    settled: Callable[[Any], Loss] | None = None
    section: str = "preference"
    accepts: tuple[str, ...] = ()
    options: type[BaseModel] | None = None

    def __post_init__(self) -> None:
        if taken := sorted(RESERVED & {*self.reports}):
            raise ValueError(f"reports: {taken[0]} is a number of every step")
        if self.head not in HEADS:
            raise ValueError(f"head must be one of {', '.join(HEADS)}, got {self.head!r}")

    @classmethod
    def of(cls, function: LossFunction) -> Loss:
        """A function that reports no further sums as a loss; a loss as it is."""
        return function if isinstance(function, Loss) else cls(function)

    def __call__(self, per_token: Any, batch: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Raises ValueError if the function does not return what is declared."""
        sums = self.function(per_token, batch)
        if len(sums) != 2 + len(self.reports):
            raise ValueError(
                f"train.loss: {self.function.__name__} must return a sum, its denominator and "
                f"{len(self.reports)} more to report, got {len(sums)} in all"
            )
        return sums


LOSSES = Table("losses", "tilewright.trainer.losses", Loss)


def loss_of(
    name: str, sections: Mapping[str, Any], given: Mapping[str, Any] = MappingProxyType({})
) -> Loss:
    """What train.loss = name minimizes.   sections: of the configuration, by name.   given:
    train.loss_args.
    """
    row = LOSSES[name]
    if row.settled is not None:
        row = row.settled(sections[row.section])
    if row.options is None:
        return row
    function = functools.partial(row.function, **given_options(row.options, given))
    return dataclasses.replace(row, function=functools.update_wrapper(function, row.function))


def count_labels(batch: Mapping[str, Any]) -> torch.Tensor:
    """The number of a batch's tokens that are not ignored."""
    return (batch["labels"] != IGNORE).sum()
