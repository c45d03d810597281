"""What a model is compared with: log-probabilities under weights that do not learn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from tilewright.nn import LoRALinear
from tilewright.nn.lora_experts import LoRAExperts
from tilewright.nn.sharded import shard
from tilewright.nn.weights import is_adapter
from tilewright.trainer.losses.loss import count_labels
from tilewright.trainer.models.head import TokenLosses
from tilewright.trainer.parallel.parts import Parts

Batch = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]


class Compared(Protocol):
    """What gives an engine's micro-batches their references.

    own: whether the policy begins with its weights.
    bound: how far apart the two log-probabilities of an answer may then be, in nats, for each nat
        and token of it.
    """

    own: bool
    bound: float

    def added(self, policy: Parts, batch: Batch) -> Batch:
        """A micro-batch with the column reference_logprob."""
        ...

    def moved(self) -> dict[str, Tensors]:
        """What a checkpoint stores of it, under the kind of reference; {} of one that stays."""
        ...


def adapters_off(model: nn.Module) -> AbstractContextManager[None]:
    """Within, adapters add zeros: the bits are the base's."""
    return scaled(model, 0.0)


@contextlib.contextmanager
def scaled(model: nn.Module, scale: float) -> Iterator[None]:
    """Within, all adapters have this scale."""
    adapters = [m for m in model.modules() if isinstance(m, LoRALinear | LoRAExperts)]
    scales = [m.scale for m in adapters]
    try:
        for module in adapters:
            module.scale = scale
        yield
    finally:
        for module, before in zip(adapters, scales, strict=True):
            module.scale = before


@contextlib.contextmanager
def holding(policy: Parts, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Within, these parameters have other values. There must be no graph that has saved them."""
    policy.reshard()  # what is gathered would keep its values
    own = [
        (shard(p), shard(tensors[n])) for n, p in policy.model.named_parameters() if n in tensors
    ]
    before = [p.clone() for p, _ in own]
    try:
        for p, other in own:
            p.copy_(other)
        yield
    finally:
        for (p, _), value in zip(own, before, strict=True):
            p.copy_(value)
        policy.reshard()


def logprobs(per_token: TokenLosses, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Those of labels [1, T], as a loss's further sum."""
    values = per_token.values()
    return values.sum(), count_labels(batch), -values


class Reference:
    """parts: of another model; None: the policy's, without its adapters.

    own: whether the policy begins with its weights.
    """

    bound = 0.0

    def __init__(self, parts: Parts | None = None, own: bool = True):
        self.parts, self.own = parts, own
        self._second: Tensors | None = None  # of adapters that move
        self._moves = False
        if parts is not None:
            parts.model.requires_grad_(False)
            parts.wrapped.eval()

    @torch.no_grad()
    def added(self, policy: Parts, batch: Batch) -> Batch:
        """A micro-batch with the column reference_logprob."""
        if self._second is not None:
            with holding(policy, self._second):
                [outcome] = policy.forward([batch], logprobs)
        elif self.parts is None:
            with adapters_off(policy.model):
                [outcome] = policy.forward([batch], logprobs)
        else:
            [outcome] = self.parts.forward([batch], logprobs)
            self.parts.reshard()  # no backward pass does it
        # Only the last stage of a pipeline has log-probabilities, and only it reads them.
        values = outcome.more or (torch.zeros_like(batch["labels"], dtype=torch.float32),)
        return {**batch, "reference_logprob": values[0]}

    # ---- references that move

    @torch.no_grad()
    def begin(self, policy: Parts) -> None:
        """Makes a reference that moves.   policy: as it begins, whose adapters add zeros."""
        self._moves = True
        if self.parts is None:
            named = policy.model.named_parameters()
            self._second = {n: p.detach().clone() for n, p in named if is_adapter(n)}

    @torch.no_grad()
    def move(self, policy: Parts, share: float) -> None:
        """share: of the policy in what the reference becomes; 1: it equals the policy."""
        [tensors] = self.moved().values()
        for name, p in policy.model.named_parameters():
            if name in tensors:
                shard(tensors[name]).lerp_(shard(p), share)

    def moved(self) -> dict[str, Tensors]:
        """What a checkpoint stores: {} of a reference that stays."""
        if not self._moves:
            return {}
        if self.parts is None:
            assert self._second is not None  # `begin` makes it
            return {"adapters": self._second}
        return {"model": {n: p.detach() for n, p in self.parts.model.named_parameters()}}
