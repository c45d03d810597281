"""What a loss reads that is summed or computed before it: over a step, or by a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tilewright.trainer.columns import MISMATCHED
from tilewright.trainer.models.head import LossFunction, OfSequence

Batch = Mapping[str, Any]
# (the ranks of a sequence, a micro-batch) -> sums of this rank
Counted = Callable[[OfSequence, Batch], tuple[torch.Tensor, ...]]


class Passes(Protocol):
    """What an engine does for `Loss.before`, without gradients."""

    def compared(self, batch: Batch) -> Batch:
        """A micro-batch with the column reference_logprob, if the engine has a reference."""
        ...

    def sums(self, batch: Batch, function: LossFunction) -> torch.Tensor:
        """What a function of a micro-batch returns, float64, of this rank."""
        ...

    def count(self, batches: list[Batch], function: Counted) -> torch.Tensor:
        """The sums of a function over micro-batches and all ranks; without a forward pass."""
        ...


# (an engine, micro-batches of a step or of an evaluation) -> the micro-batches that the loss gets
Before = Callable[[Passes, Iterable[Batch]], Iterable[Batch]]


@dataclass(frozen=True)
class Compared:
    """Adds to micro-batches what answers are compared with.

    reference_logprob, of an engine with a reference.
    first: [sums] of a function of the micro-batch, or of its mismatched documents, of this rank.
    whole: they are added over the micro-batches.
    counts: [sums] of `counted`, over all micro-batches and ranks.
    """

    first: LossFunction | None = None
    whole: bool = False
    counted: Counted | None = None

    def __call__(self, engine: Passes, batches: Iterable[Batch]) -> Iterable[Batch]:
        if self.counted is not None:
            batches = list(batches)
            total = engine.count(batches, self.counted)
            batches = [{**batch, "counts": total} for batch in batches]
        compared = map(engine.compared, batches)
        if self.first is None:
            return compared
        first = self.first
        summed = (self._with_first(engine, batch, first) for batch in compared)
        if not self.whole:
            return summed
        every = list(summed)
        total = torch.stack([batch["first"] for batch in every]).sum(0)
        return [{**batch, "first": total} for batch in every]

    @staticmethod
    def _with_first(engine: Passes, batch: Batch, first: LossFunction) -> Batch:
        rest = dict(batch)
        of = rest.pop(MISMATCHED, None)
        return {**rest, "first": engine.sums(rest if of is None else engine.compared(of), first)}
