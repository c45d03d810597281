"""SGD without momentum."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.trainer.optim.optim import Optimizer
from tilewright.trainer.tables import OPTIMIZERS


def sgd(groups: list[dict[str, Any]], apart: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups)


OPTIMIZERS.add("sgd", Optimizer(sgd))
