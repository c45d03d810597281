"""NovoGrad (arXiv:1905.11286, algorithm 1): gradients over a moving norm of each tensor."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.nn.sharded import is_sharded, shard
from tilewright.trainer.optim.optim import ADAM, Optimizer, betas_and_eps
from tilewright.trainer.tables import OPTIMIZERS


def squared_norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of whole tensors, in float32, on every rank: one all-reduce for those sharded alike."""
    from torch.distributed.tensor import DTensor, Partial

    found: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    alike: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        alike.setdefault((t.device_mesh, t.placements) if is_sharded(t) else None, []).append(i)
    for key, places in alike.items():
        sums = torch.stack([shard(tensors[i]).float().square().sum() for i in places])
        if key is not None:
            mesh, placements = key
            parts = [at if at.is_replicate() else Partial() for at in placements]
            sums = DTensor.from_local(sums, mesh, parts, run_check=False).full_tensor()
        for i, total in zip(places, sums.unbind(), strict=True):
            found[i] = total
    return found


class NovoGrad(torch.optim.Optimizer):
    """For each tensor w with gradient g: v <- beta2 v + (1 - beta2) |g|^2, in the first step |g|^2;
    m <- beta1 m + g / (sqrt(v) + eps) + weight_decay w, m = 0 before the first step; w <- w - lr m.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            raise ValueError("closure must be None: a step reads the gradients that are there")
        every = [(p, group) for group in self.param_groups for p in group["params"]]
        trained = [(p, p.grad, group) for p, group in every if p.grad is not None]
        norms = squared_norms([grad for _, grad, _ in trained])
        for (p, grad, group), norm in zip(trained, norms, strict=True):
            (beta1, beta2), state = group["betas"], self.state[p]
            if not state:
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(norm)
            m, v, own = shard(state["exp_avg"]), state["exp_avg_sq"], shard(p)
            v.copy_(torch.where(v == 0, norm, v * beta2 + norm * (1 - beta2)))
            m.mul_(beta1).add_(shard(grad) / (v.sqrt() + group["eps"]))
            m.add_(own, alpha=group["weight_decay"])
            own.sub_(m, alpha=group["lr"])


def novograd(groups: list[dict[str, Any]], apart: Any, **values: Any) -> torch.optim.Optimizer:
    return NovoGrad(groups, betas_and_eps(values))


OPTIMIZERS.add("novograd", Optimizer(novograd, ADAM))
