"""The head of a reward model: one number for each document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tilewright.trainer.models.head import Around, Head, OfSequence, by_document, logits


class Scores(OfSequence):
    """Scores [B, S] of tokens, float32 with `Numerics.lm_head_fp32`; a document's reward is that of
    its last token that is not padding, as transformers' models for sequence classification have it.
    Where padding is the end token too, the reward is that of the token before.
    """

    def __init__(self, scores: torch.Tensor, around: Around):
        super().__init__(around.sequence, around.everywhere)
        self._scores, self._padding = scores, around.padding

    def rewards(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """[documents], float64, differentiable; on every rank that shares the sequence.

        batch: one packed row, with input_ids and position_ids [1, T], and `lengths`, the number
        of these tokens that each document has, in order.
        """
        ids, at, lengths = batch["input_ids"][0], batch["position_ids"][0], batch["lengths"]
        own = at if self._padding is None else at.where(ids != self._padding, 0)
        last = by_document(own, lengths, "max")
        for group in self._sequence:
            dist.all_reduce(last, dist.ReduceOp.MAX, group=group)
        is_last = at == last.repeat_interleave(lengths, output_size=len(at))
        # A sum of one number, exact.
        return self.over_ranks(by_document(self._scores[0].where(is_last, 0.0), lengths))


def _outputs(hidden: torch.Tensor, weight: torch.Tensor, around: Around) -> torch.Tensor:
    """Scores of every token, [B, S, 1]."""
    return around.tp.gather_for_all(logits(hidden, weight, around.ops))


def _scores(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, around: Around
) -> Scores:
    # As a norm's, the weight's gradient is that of this rank's tokens.
    return Scores(_outputs(hidden, weight, around)[..., 0], around)


REWARD = Head("score", lambda config: 1, _outputs, _scores)
