"""Losses apart from the model: the head's value for each token, and what is made of them.

A loss is a function `(per_token, batch) -> (sum, denominator)`. `per_token` is a `TokenLosses`;
`batch` holds the micro-batch's tensors by name. Sums and denominators are added up over
micro-batches and ranks, and gradients are divided by the denominator once, at the optimizer's step:
each token weighs the same however a step is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tilewright import ops as tw
from tilewright.nn import linear_in_row_blocks
from tilewright.trainer.ops_choice import Ops

IGNORE = -100  # a label that is not trained on


class TokenLosses:
    """Negative log-probabilities of labels [B, S], 0 where a label is IGNORE.

    Either `sum()`, whose gradient the head computes in its forward pass, or `values()`, whose
    upstream gradient may differ by token: the backward pass then computes the logits again.
    """

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, ops: Ops
    ) -> None:
        self._operands, self._labels, self._ops = (hidden, weight), labels, ops
        self.computed: torch.Tensor | None = None

    def sum(self) -> torch.Tensor:
        return self.reduced("sum")

    def values(self) -> torch.Tensor:
        """[B, S], float32. Computed once."""
        if self.computed is None:
            self.computed = self.reduced("none")
        return self.computed

    def reduced(
        self, reduction: str, num_tokens: torch.Tensor | float | None = None
    ) -> torch.Tensor:
        """reduction, num_tokens: as in `ops.cross_entropy`."""
        numerics, options = self._ops.numerics, {"reduction": reduction, "num_tokens": num_tokens}
        if numerics.batch_invariant:
            name = self._ops.cross_entropy
            return tw.cross_entropy(
                logits(*self._operands, self._ops), self._labels, implementation=name, **options
            )
        return tw.linear_cross_entropy(
            *in_autocast(*self._operands),
            self._labels,
            fp32_logits=numerics.lm_head_fp32,
            implementation=self._ops.linear_cross_entropy,
            **options,
        )


Loss = Callable[[TokenLosses, Mapping[str, Any]], tuple[torch.Tensor, torch.Tensor]]


def language_modeling(
    per_token: TokenLosses, batch: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy, for each label that is not IGNORE."""
    return per_token.sum(), count_labels(batch)


def count_labels(batch: Mapping[str, Any]) -> torch.Tensor:
    """The tokens of a batch that are trained on."""
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
    """Operands of the head's product in autocast's dtype; autocast is off around the product."""
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device):
        return operands
    return tuple(t.to(torch.get_autocast_dtype(device)) for t in operands)
