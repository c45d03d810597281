"""What a model is compared with: log-probabilities under weights that do not learn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tilewright.nn import LoRALinear
from tilewright.nn.lora_experts import LoRAExperts
from tilewright.trainer.losses.loss import count_labels
from tilewright.trainer.models.head import TokenLosses
from tilewright.trainer.parallel.parts import Parts

Batch = Mapping[str, Any]


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within, adapters add zeros: the bits are the base's."""
    found = [m for m in model.modules() if isinstance(m, LoRALinear | LoRAExperts)]
    scales = [m.scale for m in found]
    try:
        for module in found:
            module.scale = 0.0
        yield
    finally:
        for module, scale in zip(found, scales, strict=True):
            module.scale = scale


def _values(per_token: TokenLosses, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return per_token.values().sum(), count_labels(batch)


class Reference:
    """parts: of another model; None: the policy's, without its adapters.

    own: whether the policy begins with its weights.
    """

    def __init__(self, parts: Parts | None = None, own: bool = True):
        self.parts, self.own = parts, own
        if parts is not None:
            parts.model.requires_grad_(False)
            parts.wrapped.eval()

    @torch.no_grad()
    def added(self, policy: Parts, batch: Batch) -> Batch:
        """A micro-batch with the column reference_logprob."""
        if self.parts is None:
            with adapters_off(policy.model):
                [outcome] = policy.forward([batch], _values)
        else:
            [outcome] = self.parts.forward([batch], _values)
            self.parts.reshard()  # no backward pass does it
        assert outcome.per_token is not None, "a pipeline, which is refused"
        return {**batch, "reference_logprob": -outcome.per_token}
