"""Norms of gradients and parameters by kind of module: `train.log_norms`.

The squares of a kind's norms of all parameters sum to the square of the global norm.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tilewright.nn.weights import is_adapter
from tilewright.trainer.callbacks import CALLBACKS, Plugin
from tilewright.trainer.parallel.gradients import is_split, own_square
from tilewright.trainer.plugins.callback import Callback, Step
from tilewright.trainer.plugins.run import Run

# Kinds, by a module of a parameter's path; the first that fits counts.
KINDS = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "score": "head",
    "experts": "experts",
    "gate": "router",
    "self_attn": "attention",
    "mlp": "mlp",
}


def kind_of(name: str) -> str:
    """The kind of a parameter with this name in the whole model. Norms of queries and keys are
    norms.
    """
    *path, _ = name.split(".")
    if is_adapter(name):
        return "adapters"
    if path and path[-1].endswith("norm"):
        return "norm"
    return next((kind for part, kind in KINDS.items() if part in path), "other")


class Norms(Callback):
    """Sums squares on the device around the optimizer's step, and reads them once after it."""

    def __init__(self, run: Run):
        super().__init__(run)
        engine, self.wanted = run.engine, run.config.train.log_norms
        # Kinds of the whole model, so that the stages of a pipeline agree on them.
        trained = [n for n, p in engine.parts.whole.named_parameters() if p.requires_grad]
        self.kinds = list(dict.fromkeys(map(kind_of, trained)))
        elsewhere, self.parameters = set(engine.parts.copies), dict[str, list[nn.Parameter]]()
        for name, p in engine.model.named_parameters():
            if p.requires_grad and p not in elsewhere:
                self.parameters.setdefault(kind_of(name), []).append(p)
        self.squares: dict[str, torch.Tensor] = {}
        if "gradients" in self.wanted:
            engine.optimizer.register_step_pre_hook(self._of_gradients)
        if "parameters" in self.wanted:
            engine.optimizer.register_step_post_hook(self._of_parameters)

    def _of_gradients(self, *_: Any) -> None:
        gradients = {
            k: [p.grad for p in of if p.grad is not None] for k, of in self.parameters.items()
        }
        self.squares["grad_norm"] = self._own(gradients)

    def _of_parameters(self, *_: Any) -> None:
        self.squares["param_norm"] = self._own(
            {kind: [p.detach() for p in of] for kind, of in self.parameters.items()}
        )

    def _own(self, tensors: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        """This rank's part of each kind's sum of squares."""
        ranks = self.run.mesh
        split = is_split([t for of in tensors.values() for t in of], ranks)
        parts = [own_square(tensors.get(kind, []), ranks, split) for kind in self.kinds]
        return torch.stack([part.to(ranks.device) for part in parts])

    def after_step(self, step: Step) -> None:
        if not self.squares:  # a step without a target does not reach the optimizer
            return
        names, ranks = list(self.squares), self.run.mesh
        squares, self.squares = torch.stack([*self.squares.values()]), {}
        every = [p for of in self.parameters.values() for p in of]
        if is_split(every, ranks):
            squares = ranks.params.total(squares)
        # The optimizer sees clipped gradients; those of the other reports are not.
        most = self.run.plan.max_norm(step.number - 1)
        clipped = min(1.0, most / (step.norm + 1e-6)) if most > 0 else 1.0
        for name, of_kinds in zip(names, squares.tolist(), strict=True):
            factor = clipped if name == "grad_norm" else 1.0
            for kind, square in zip(self.kinds, of_kinds, strict=True):
                step.values[f"{name}/{kind}"] = math.sqrt(square) / factor


CALLBACKS.add("norms", Plugin(Norms, 45, lambda run: bool(run.config.train.log_norms)))
