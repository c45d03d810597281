"""Cross-entropy in which tokens have weights of their own: the column `weight`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.losses.loss import Loss
from tilewright.trainer.models.head import TokenLosses
from tilewright.trainer.tables import LOSSES


def weighted_language_modeling(
    per_token: TokenLosses, batch: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum over the labels that are not ignored, and the sum of their weights."""
    weight = batch["weight"].masked_fill(batch["labels"] == IGNORE, 0.0)
    return (weight * per_token.values()).sum(), weight.double().sum()


LOSSES.add(
    "weighted_language_modeling", Loss(weighted_language_modeling, ("labels", "weight"), nats=True)
)
