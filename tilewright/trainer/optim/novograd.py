"""NovoGrad (arXiv:1905.11286, algorithm 1): gradients over a moving norm of each tensor of the
model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tilewright.nn.sharded import is_sharded, shard
from tilewright.trainer.optim.matrices import Parts, merged, rows_here
from tilewright.trainer.optim.optim import ADAM, betas_and_eps
from tilewright.trainer.optim.row import OPTIMIZERS, Optimizer


class Whole:
    """A parameter that is one tensor of the model."""

    shape: tuple[int, ...] = ()  # of what there is of each tensor

    def sums(self, t: torch.Tensor) -> torch.Tensor:
        """The sum of this rank's shard of each of the parameter's tensors."""
        return t.sum()

    def spread(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A value of each tensor, for each row of this rank's shard."""
        return values


class Several(Whole):
    """A parameter that is several tensors, one after the other, in runs of this rank's rows.

    numbers: the tensor of each run.   lengths: the rows of each run.
    """

    def __init__(self, p: torch.Tensor, parts: Parts):
        experts = rows_here(p, 0) if parts.stacked else [range(1)]
        rows, dim = rows_here(p, int(parts.stacked)), int(parts.stacked)
        sizes = parts.rows or (p.shape[dim],)
        self.shape = ((p.shape[0] if parts.stacked else 1) * len(sizes),)
        self.rows = dim + 1  # dimensions that count rows
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        of_expert = [
            (i, len(own))
            for run in rows
            for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
            if (own := range(max(run.start, end - size), min(run.stop, end)))
        ]
        every = [e for run in experts for e in run]
        self.lengths = [length for _ in every for _, length in of_expert]
        numbers = [e * len(sizes) + i for e in every for i, _ in of_expert]
        self.numbers = torch.tensor(numbers, dtype=torch.long, device=p.device)
        self.repeats = torch.tensor(self.lengths, dtype=torch.long, device=p.device)

    def sums(self, t: torch.Tensor) -> torch.Tensor:
        t = t.flatten(0, self.rows - 1)
        if len({*self.lengths}) == 1:
            sums = t.reshape(len(self.lengths), -1).sum(1)
        else:
            sums = torch.stack([t.new_zeros(()), *(run.sum() for run in t.split(self.lengths))])[1:]
        return t.new_zeros(self.shape).index_add_(0, self.numbers, sums)

    def spread(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        of_rows = values[self.numbers].repeat_interleave(
            self.repeats, output_size=sum(self.lengths)
        )
        lead = like.shape[: self.rows]
        return of_rows.view(*lead, *[1] * (like.dim() - self.rows))


def squared_norms(
    tensors: list[torch.Tensor], several: Mapping[int, Several] | None = None
) -> list[torch.Tensor]:
    """The squared norms of the model's own tensors, in float32, on every rank. Tensors that are
    sharded alike share one all-reduce.

    several: the parameters that are merged, by their place. Their norms are [tensors], those of
    the others [].
    """
    from torch.distributed.tensor import DTensor, Partial

    norms: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    alike: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        alike.setdefault((t.device_mesh, t.placements) if is_sharded(t) else None, []).append(i)
    kinds = several or {}
    for key, places in alike.items():
        kind = [kinds.get(i, Whole()) for i in places]
        squares = (shard(tensors[i]).float().square() for i in places)
        each = [one.sums(t).view(-1) for one, t in zip(kind, squares, strict=True)]
        sums = torch.cat(each)
        if key is not None:
            mesh, placements = key
            parts = [at if at.is_replicate() else Partial() for at in placements]
            sums = DTensor.from_local(sums, mesh, parts, run_check=False).full_tensor()
        for i, one, total in zip(places, kind, sums.split([len(t) for t in each]), strict=True):
            norms[i] = total.view(one.shape)
    return norms


class NovoGrad(torch.optim.Optimizer):
    """For each tensor w with gradient g: v <- beta2 v + (1 - beta2) |g|^2, in the first step |g|^2;
    m <- beta1 m + g / (sqrt(v) + eps) + weight_decay w, m = 0 before the first step; w <- w - lr m.

    merged: the parameters that are several tensors, each with a norm of its own.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        merged: Mapping[nn.Parameter, Parts] | None = None,
    ):
        super().__init__(groups, defaults)
        self.several = {p: Several(p, parts) for p, parts in (merged or {}).items()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            raise ValueError("closure must be None: a step reads the gradients that are there")
        every = [(p, group) for group in self.param_groups for p in group["params"]]
        trained = [(p, p.grad, group) for p, group in every if p.grad is not None]
        kinds = [self.several.get(p) for p, _, _ in trained]
        several = {i: kind for i, kind in enumerate(kinds) if kind is not None}
        norms = squared_norms([grad for _, grad, _ in trained], several)
        for (p, grad, group), kind, norm in zip(trained, kinds, norms, strict=True):
            (beta1, beta2), state = group["betas"], self.state[p]
            if not state:
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(norm)
            m, v, own = shard(state["exp_avg"]), state["exp_avg_sq"], shard(p)
            v.copy_(torch.where(v == 0, norm, v * beta2 + norm * (1 - beta2)))
            divisor = (kind or Whole()).spread(v.sqrt() + group["eps"], own)
            m.mul_(beta1).add_(shard(grad) / divisor)
            m.add_(own, alpha=group["weight_decay"])
            own.sub_(m, alpha=group["lr"])


def novograd(
    groups: list[dict[str, Any]], apart: Any, *, merged: Mapping[nn.Parameter, Parts], **values: Any
) -> torch.optim.Optimizer:
    return NovoGrad(groups, betas_and_eps(values), merged)


# Version 1 had one norm of a merged parameter.
OPTIMIZERS.add("novograd", Optimizer(novograd, ADAM, merged=merged, version=2))
