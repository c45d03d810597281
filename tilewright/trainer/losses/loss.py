"""Losses, separate from the model: functions of the head's per-token values, by name.

A loss is a function `(per_token, batch) -> (sum, denominator, *further sums)`. `per_token` is a
`TokenLosses`; `batch` holds the micro-batch's tensors by name. Sums and denominators are added over
micro-batches and ranks, and the optimizer's step divides gradients by the denominator once: each
token has the same weight however a step is split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.models.head import LossFunction, TokenLosses
from tilewright.trainer.tables import LOSSES

if TYPE_CHECKING:
    from tilewright.trainer.config.preference import Preference

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
    columns: of a batch that it reads. A run whose batches have not all of them is refused.
    reports: names of further sums, which are reported over the denominator.
    nats: whether the mean is a cross-entropy in nats, of which evaluations report the perplexity.
    pairs: whether documents must be a chosen and a rejected answer in turn.
    mismatched: whether batches have, beside themselves, documents' prompts with the answers of
        others: see `data.batches`.
    first: what is summed without gradients before, of a micro-batch, or of its mismatched
        documents: the batch that the loss gets has these sums of this rank, as `first` [sums].
    whole: they are added over the micro-batches of a step, or of an evaluation.
    over: names of reports that are means over another report, by name.
    asked: what makes the loss read a column, in errors, where it is not its name.
    settled: the section preference -> the loss that a run has, of a row that depends on it.
    """

    function: LossFunction
    columns: tuple[str, ...] = ("labels",)
    reports: tuple[str, ...] = ()
    nats: bool = False
    pairs: bool = False
    mismatched: bool = False
    first: LossFunction | None = None
    whole: bool = False
    over: Mapping[str, str] = field(default_factory=dict)
    asked: Mapping[str, str] = field(default_factory=dict)
    settled: Callable[[Preference], Loss] | None = None

    def __post_init__(self) -> None:
        if taken := sorted(RESERVED & {*self.reports}):
            raise ValueError(f"reports: {taken[0]} is a number of every step")

    def __call__(
        self, per_token: TokenLosses, batch: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        """Raises ValueError if the function does not return what is declared."""
        found = self.function(per_token, batch)
        if len(found) != 2 + len(self.reports):
            raise ValueError(
                f"train.loss: {self.function.__name__} must return a sum, its denominator and "
                f"{len(self.reports)} more to report, got {len(found)} in all"
            )
        return found


def loss_of(name: str, preference: Preference) -> Loss:
    """What train.loss = name minimizes."""
    row = LOSSES[name]
    return row if row.settled is None else row.settled(preference)


def count_labels(batch: Mapping[str, Any]) -> torch.Tensor:
    """The number of a batch's tokens that are not ignored."""
    return (batch["labels"] != IGNORE).sum()
