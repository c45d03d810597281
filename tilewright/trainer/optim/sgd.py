"""SGD without momentum."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.trainer.optim.optim import OPTIMIZERS, Optimizer


def sgd(groups: list[dict[str, Any]], apart: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups)


OPTIMIZERS.add("sgd", Optimizer(sgd))
