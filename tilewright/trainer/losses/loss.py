"""Losses, separate from the model: functions of the head's per-token values.

A loss is a function `(per_token, batch) -> (sum, denominator)`. `per_token` is a `TokenLosses`;
`batch` holds the micro-batch's tensors by name. Sums and denominators are added over micro-batches
and ranks, and the optimizer's step divides gradients by the denominator once: each token has the
same weight however a step is split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tilewright import ops as tw
from tilewright.nn import linear_in_row_blocks
from tilewright.trainer.models.ops_choice import Ops

IGNORE = -100  # the label of ignored tokens


class TokenLosses:
    """Negative log-probabilities of labels [B, S], 0 where a label is IGNORE.

    Either `sum()`, whose gradient the head computes in its forward pass, or `values()`, whose
    upstream gradient may differ per token: the backward pass then recomputes the logits.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        ops: Ops,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """group: of the ranks that have the weight's rows, if it is this rank's shard of them."""
        self._operands, self._labels, self._ops = (hidden, weight), labels, ops
        self._group = group
        self.computed: torch.Tensor | None = None

    def sum(self) -> torch.Tensor:
        return self.reduced("sum")

    def values(self) -> torch.Tensor:
        """[B, S], float32. Computed once."""
        if self.computed is None:
            self.computed = self.reduced("none")
        return self.computed

    def reduced(self, reduction: str) -> torch.Tensor:
        """reduction: as in `ops.cross_entropy`."""
        numerics = self._ops.numerics
        if numerics.batch_invariant:
            name = self._ops.cross_entropy
            return tw.cross_entropy(
                logits(*self._operands, self._ops),
                self._labels,
                reduction=reduction,
                implementation=name,
            )
        return tw.linear_cross_entropy(
            *in_autocast(*self._operands),
            self._labels,
            reduction=reduction,
            fp32_logits=numerics.lm_head_fp32,
            group=self._group,
            implementation=self._ops.linear_cross_entropy,
        )


Loss = Callable[[TokenLosses, Mapping[str, Any]], tuple[torch.Tensor, torch.Tensor]]


def language_modeling(
    per_token: TokenLosses, batch: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy over the labels that are not IGNORE."""
    return per_token.sum(), count_labels(batch)


def count_labels(batch: Mapping[str, Any]) -> torch.Tensor:
    """The number of a batch's tokens that are not ignored."""
    return (batch["labels"] != IGNORE).sum()


def logits(hidden: torch.Tensor, weight: torch.Tensor, ops: Ops) -> torch.Tensor:
    """[B, S, V], float32 with `Numerics.lm_head_fp32`."""
    hidden, weight = in_autocast(hidden, weight)
    if ops.numerics.lm_head_fp32:
        hidden, weight = hidden.float(), weight.float()
    product = linear_in_row_blocks if ops.numerics.batch_invariant else F.linear
    with torch.autocast(hidden.device.type, enabled=False):
        return product(hidden, weight)


def in_autocast(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Casts the head's operands to autocast's dtype; autocast is off around the product."""
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device):
        return operands
    return tuple(t.to(torch.get_autocast_dtype(device)) for t in operands)
