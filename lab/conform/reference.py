"""What results must be: the folder's model by transformers in float64, and formulas of losses."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import torch

# Differences of a log-probability. float32: thirty layers of products lose about 1e-4 of a logit.
# bfloat16: a logit of 16 to 32 is rounded by up to 0.06, and each layer adds to that.
LOGPROB = {"float32": 1e-3, "bfloat16": 0.15}
# Of norms of gradients, relative: sums of other orders; packing may differ from request to request.
NORM = {"float32": 1e-3, "bfloat16": 3e-2}
# The rest of gradients that cancel, relative to one of them.
REST = {"float32": 1e-3, "bfloat16": 3e-2}
SUM = 1e-5  # of a sum that the server makes in float32, relative to the sum of its terms' sizes


class Reference:
    """The model of a folder. transformers computes norms and rotations in float32 in any dtype."""

    def __init__(self, folder: pathlib.Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
        self.vocabulary = self.model.config.get_text_config().vocab_size
        self._known: dict[bytes, torch.Tensor] = {}

    @torch.no_grad()
    def distributions(self, tokens: Any) -> torch.Tensor:
        """Log-probabilities [tokens, vocabulary] of what follows each token."""
        ids = np.asarray(tokens, np.int64)
        key = ids.tobytes()
        if key not in self._known:
            logits = self.model(input_ids=torch.tensor(ids)[None]).logits[0]
            self._known[key] = logits.double().log_softmax(-1)
        return self._known[key]

    def logprobs(self, tokens: Any, targets: Any) -> torch.Tensor:
        """Of targets [tokens] or [tokens, k]."""
        wanted = torch.tensor(np.asarray(targets, np.int64))
        wide = wanted if wanted.ndim == 2 else wanted[:, None]
        return self.distributions(tokens).gather(1, wide).reshape(wanted.shape)


def policy(
    name: str,
    lp: torch.Tensor,
    old: torch.Tensor,
    a: torch.Tensor,
    *,
    clip_low_threshold: float | None = None,
    clip_high_threshold: float | None = None,
    beta: float = 0.05,
) -> torch.Tensor:
    """The loss of one document."""
    first = (0.0, 4.0) if name == "cispo" else (0.8, 1.2)
    low = first[0] if clip_low_threshold is None else clip_low_threshold
    high = first[1] if clip_high_threshold is None else clip_high_threshold
    r = torch.exp(lp - old)
    if name == "gspo":
        r = torch.exp((lp - old).mean()).expand_as(lp)
    if name == "importance_sampling":
        return -(r * a).sum()
    if name in ("ppo", "gspo"):
        return -torch.minimum(r * a, r.clamp(low, high) * a).sum()
    if name == "cispo":
        return -(r.clamp(low, high).detach() * lp * a).sum()
    assert name == "dro"
    return -(lp * a - beta / 2 * (lp - old) ** 2).sum()


def slope(name: str, lp: torch.Tensor, *given: torch.Tensor, **options: float) -> torch.Tensor:
    """The derivative of a document's loss by each log-probability."""
    lp = lp.detach().requires_grad_()
    [gradient] = torch.autograd.grad(policy(name, lp, *given, **options), lp)
    return gradient
