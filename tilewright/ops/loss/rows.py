"""The statistics of rows of given logits as an operator that is differentiable in each statistic; a
kind of loss on logits is computed from them. Its backward reads the logits once more, and what it
saves beside them is [T].
"""

from __future__ import annotations

import functools

import torch

from tilewright.core.library import Operator, declare
from tilewright.core.torch_names import ProcessGroup
from tilewright.kernels.loss.operators import (
    Scaling,
    Stats,
    StatsGradients,
    Wanted,
    empty_statistics,
)
from tilewright.ops.loss import softmax_stats


@declare
def row_statistics(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    scaling: Scaling,
    wanted: Wanted,
    overwrite: bool,
    group: ProcessGroup | None,
) -> Stats:
    """As `softmax_stats.Kernels.of_rows`.   overwrite: whether backward overwrites the logits with
    their gradient.
    """
    return empty_statistics(logits, wanted)


@row_statistics.formula(constants=("peak", "argmax"), **softmax_stats.OF_STATISTICS)
def _backward(op, g, logits, target, weights, scaling, softmax, overwrite, group):
    gradients = StatsGradients(g.log_sum, g.picked, g.weighted, g.mean)
    if all(t is None for t in gradients):
        return {}
    of_loss = scaling, softmax, gradients
    return {"logits": op(logits, target, weights, *of_loss, group, inplace=overwrite)}


@functools.cache
def operator(name: str) -> Operator:
    """`row_statistics` on the kernels of this name."""
    kernels = softmax_stats.kernels(name)

    def launch(logits, target, class_weight, scaling, wanted, overwrite, group):
        return kernels.of_rows(logits, target, class_weight, scaling, wanted, group)

    return row_statistics.define(f"row_statistics_{name}", launch, kernels.gradient)
