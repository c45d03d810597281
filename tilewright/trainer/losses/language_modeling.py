"""Cross-entropy over the labels that are not ignored: pretraining, and supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.trainer.losses.loss import LOSSES, Loss, count_labels
from tilewright.trainer.models.head import TokenLosses


def language_modeling(
    per_token: TokenLosses, batch: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    return per_token.sum(), count_labels(batch)


LOSSES.add("language_modeling", Loss(language_modeling, nats=True))
