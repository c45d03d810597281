"""What replaying recorded routes changes: log-probabilities of tokens with them and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.engine import Batch, Engine
from tilewright.trainer.losses.loss import count_labels
from tilewright.trainer.models.head import TokenLosses
from tilewright.trainer.plugins.callback import Callback, Step


def _values(per_token: TokenLosses, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of language modeling, with its value for each token."""
    return per_token.values().sum(), count_labels(batch)


def compare(engine: Engine, batches: Sequence[Batch]) -> dict[str, float]:
    """Mean log-probabilities of a step's labels, in nats, with recorded and with today's routes,
    and the mean absolute difference per token, from two forward passes without gradients. Every
    rank must call it. {} for a step without a label.
    """
    today = [{k: v for k, v in b.items() if k != "routed_experts"} for b in batches]
    with_records, without = (engine.forward(given, _values) for given in (batches, today))
    # Only the last stage of a pipeline has values.
    apart = torch.zeros((), dtype=torch.float64, device=engine.mesh.device)
    for a, b, batch in zip(with_records.per_token, without.per_token, batches, strict=True):
        if a is not None and b is not None:
            apart += (a - b)[batch["labels"].to(a.device) != IGNORE].abs().double().sum()
    total, tokens = float(engine.mesh.loss.total(apart)), with_records.denominator
    if not tokens:
        return {}
    return {
        "logprob_replayed": -with_records.mean,
        "logprob_routed_today": -without.mean,
        "logprob_difference": total / tokens,
    }


class Comparison(Callback):
    """Reports `compare` every `train.router_replay_compare_steps`."""

    def before_step(self, step: Step) -> None:
        if step.number % self.run.config.train.router_replay_compare_steps == 0:
            step.values |= compare(self.run.engine, step.batches)
