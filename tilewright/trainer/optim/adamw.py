"""AdamW: PyTorch's, with states in the parameters' dtype, and `ops.adamw_`, with states in one of
their own.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.core.torch_names import on_shards
from tilewright.nn.sharded import shard
from tilewright.trainer.optim.muon import DTYPES, Muon, Settings
from tilewright.trainer.optim.optim import ADAM
from tilewright.trainer.optim.row import OPTIMIZERS, Optimizer

AdamW = on_shards(torch.optim.AdamW, shard)


def adamw(
    groups: list[dict[str, Any]],
    apart: Any,
    *,
    adam_beta1: float,
    adam_beta2: float,
    adam_epsilon: float,
) -> torch.optim.Optimizer:
    """States in the parameters' dtype, float32; one fused kernel."""
    return AdamW(groups, betas=(adam_beta1, adam_beta2), eps=adam_epsilon, fused=True)


def anyprecision_adamw(
    groups: list[dict[str, Any]],
    apart: Any,
    *,
    adam_beta1: float,
    adam_beta2: float,
    adam_epsilon: float,
    optimizer_dtype: str,
) -> torch.optim.Optimizer:
    states = DTYPES[optimizer_dtype]
    return Muon(groups, Settings((adam_beta1, adam_beta2), adam_epsilon, states))


OPTIMIZERS.add("adamw", Optimizer(adamw, ADAM))
OPTIMIZERS.add("anyprecision_adamw", Optimizer(anyprecision_adamw, (*ADAM, "optimizer_dtype")))
