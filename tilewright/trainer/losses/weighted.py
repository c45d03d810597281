"""Cross-entropy in which tokens have weights of their own: the column `weight`; and several targets
with a weight each, of either sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.losses.loss import LOSSES, Loss
from tilewright.trainer.models.head import TokenLosses


def weighted_language_modeling(
    per_token: TokenLosses, batch: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum over the labels that are not ignored, and the sum of their weights."""
    weight = batch["weight"].masked_fill(batch["labels"] == IGNORE, 0.0)
    return (weight * per_token.values()).sum(), weight.double().sum()


TARGETS, TARGET_WEIGHTS = "targets", "target_weights"


def weighted_targets(
    per_token: TokenLosses, batch: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """- sum w log p(target) over the targets [1, T, k] of every token, -1 for none, and the number
    of tokens with a weight that is not 0. Labels are not read. Targets of a token must differ.
    """
    ids = batch[TARGETS]
    weight = batch[TARGET_WEIGHTS].masked_fill(ids < 0, 0.0)
    values = -per_token.listed(ids).logprobs.where(ids >= 0, 0.0)
    per_token.computed = values
    # 0 times what may not be finite is NaN.
    total = (weight * values.where(weight != 0, 0.0)).sum()
    return total, (weight != 0).any(-1).sum()


LOSSES.add(
    "weighted_language_modeling", Loss(weighted_language_modeling, ("labels", "weight"), nats=True)
)
