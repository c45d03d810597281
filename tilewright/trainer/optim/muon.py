"""Muon for matrices and AdamW for all other parameters, in one optimizer, with states in float32 or
bfloat16.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tilewright import ops as tw
from tilewright.nn.sharded import shard
from tilewright.trainer.optim.matrices import Parts, alike, compute_whole, matrices
from tilewright.trainer.optim.own_states import WithOwnStates, adamw_calls
from tilewright.trainer.optim.row import OPTIMIZERS, Optimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of all parameter groups; betas, eps and momentum of those that have none of their
    own.

    states: dtype of moments and momentum.   products: dtype of the products of orthogonalization.
    adjust: "original" scales the learning rate of an A x B matrix by sqrt(max(1, A / B)),
        "match_rms_adamw" by 0.2 sqrt(max(A, B)), so that an update's root mean square is AdamW's.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    states: torch.dtype = torch.float32
    products: torch.dtype = torch.float32
    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    coefficients: str = "quintic"
    adjust: str = "original"


class Muon(WithOwnStates):
    """Muon for the parameters in `matrices`, AdamW for all others (all, if it is empty).

    Muon's step of a matrix p with gradient g: m <- momentum m + (1 - momentum) g; u = the
    Newton-Schulz orthogonalization of m, or with Nesterov's momentum of
    momentum m + (1 - momentum) g; p <- (1 - lr weight_decay) p - lr adjust u. Each part of a merged
    projection, and each expert, is a matrix of its own. Sharded matrices are orthogonalized whole.

    AdamW's is `ops.adamw_`, with compensation for parameters of 16 bits.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        settings: Settings,
        matrices: Mapping[nn.Parameter, Parts] | None = None,
    ):
        self.settings, self.matrices = settings, dict(matrices or {})
        self.states = dict.fromkeys(("exp_avg", "exp_avg_sq", "momentum_buffer"), settings.states)
        defaults = {"betas": settings.betas, "eps": settings.eps, "momentum": settings.momentum}
        super().__init__(groups, {"lr": 1e-3, "weight_decay": 0.0, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        trained = [*self.trained(closure)]
        self._adamw([(p, group) for p, group in trained if p not in self.matrices])
        self._muon([(p, group) for p, group in trained if p in self.matrices])

    def _adamw(self, trained: list[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        counted = ((p, group, self._counted(p)) for p, group in trained)
        for numbers, parameters in adamw_calls(counted):
            rows = []
            for p in parameters:
                assert p.grad is not None
                states = (v for name, v in self.state[p].items() if name != "step")
                rows.append([shard(t) for t in (p, p.grad, *states)])
            tw.adamw_(*map(list, zip(*rows, strict=True)), **numbers)

    def _counted(self, p: nn.Parameter) -> torch.Tensor:
        """The number of this step of AdamW, with the parameter's states there."""
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())  # on the CPU, where reading it waits for nothing
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(p, dtype=self.settings.states)
            if p.dtype.itemsize == 2:
                state["compensation"] = torch.zeros_like(p)
        state["step"] += 1
        return state["step"]

    def _muon(self, trained: list[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        if not trained:
            return
        updates = {p: self._with_momentum(p, group["momentum"]) for p, group in trained}
        kinds = alike({p: self.matrices[p] for p in updates})
        parts = [self.matrices[same[0]] for same in kinds]
        compute_whole(kinds, updates, lambda stacks: self._orthogonalized(stacks, parts))
        for p, group in trained:
            own = shard(p)
            own.mul_(1 - group["lr"] * group["weight_decay"])
            own.sub_(updates[p].to(own.dtype), alpha=group["lr"])

    def _with_momentum(self, p: nn.Parameter, momentum: float) -> torch.Tensor:
        """Updates the momentum; returns this rank's shard of what is orthogonalized."""
        assert p.grad is not None
        s, state = self.settings, self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p, dtype=s.states)
        kept, g = shard(state["momentum_buffer"]), shard(p.grad).float()
        m = kept.float().lerp(g, 1 - momentum)
        kept.copy_(m)
        return (g.lerp(m, momentum) if s.nesterov else m).to(s.products).contiguous()

    def _orthogonalized(self, stacks: list[torch.Tensor], parts: list[Parts]) -> list[torch.Tensor]:
        """Each matrix of each stack, by its parts, times its adjustment. Matrices of equal shape
        are computed together.
        """
        split = [one.split(stack) for stack, one in zip(stacks, parts, strict=True)]
        together: dict[tuple[int, int], list[torch.Tensor]] = {}
        for pieces in split:
            for piece in pieces:
                rows, columns = piece.shape[-2:]
                flat = piece.reshape(math.prod(piece.shape[:-2]), rows, columns)
                together.setdefault((rows, columns), []).append(flat)
        s, done = self.settings, {}
        for shape, batch in together.items():
            result = tw.newton_schulz(torch.cat(batch), s.steps, coefficients=s.coefficients)
            result.mul_(adjustment(s.adjust, *shape))  # in float32, rounded once
            done[shape] = iter(result.split([len(flat) for flat in batch]))
        return [
            one.join([next(done[tuple(piece.shape[-2:])]).view(piece.shape) for piece in pieces])
            for one, pieces in zip(parts, split, strict=True)
        ]


def adjustment(adjust: str, rows: int, columns: int) -> float:
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def muon(
    groups: list[dict[str, Any]], apart: Mapping[nn.Parameter, Parts], **fields: Any
) -> torch.optim.Optimizer:
    """fields: FIELDS."""
    settings = Settings(
        betas=(fields["adam_beta1"], fields["adam_beta2"]),
        eps=fields["adam_epsilon"],
        states=DTYPES[fields["optimizer_dtype"]],
        products=torch.bfloat16 if fields["enable_mixed_precision"] else torch.float32,
        momentum=fields["muon_momentum"],
        nesterov=fields["muon_nesterov"],
        steps=fields["muon_ns_steps"],
        coefficients=fields["muon_ns_coefficients"],
        adjust=fields["muon_adjust_lr_fn"] or "original",
    )
    return Muon(groups, settings, apart)


FIELDS = (
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "optimizer_dtype",
    "enable_mixed_precision",
    "muon_lr",
    "muon_momentum",
    "muon_nesterov",
    "muon_ns_steps",
    "muon_ns_coefficients",
    "muon_adjust_lr_fn",
)
OPTIMIZERS.add("muon", Optimizer(muon, FIELDS, apart=matrices, apart_lr="muon_lr"))
