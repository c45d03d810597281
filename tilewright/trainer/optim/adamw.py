"""AdamW: PyTorch's, with states in the parameters' dtype, and `ops.adamw_`, with states in one of
their own, and of parameters in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from tilewright import ops as tw
from tilewright.core.torch_names import on_shards
from tilewright.nn.sharded import shard
from tilewright.trainer.optim.muon import DTYPES, Muon, Settings
from tilewright.trainer.optim.optim import ADAM
from tilewright.trainer.optim.own_states import WithOwnStates, adamw_calls
from tilewright.trainer.optim.places import Piece
from tilewright.trainer.optim.row import OPTIMIZERS, Half, Optimizer

AdamW = on_shards(torch.optim.AdamW, shard)
STATES = "exp_avg", "exp_avg_sq"


class Piecewise(NamedTuple):
    """Flat tensors of a step, and where they are in the model's matrices."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    copies: list[torch.Tensor]
    places: list[tuple[int, int, int, int]]


class HalfAdamW(WithOwnStates):
    """AdamW of parameters in bfloat16, by `ops.adamw_`: with a master in float32 or without,
    rounded to nearest or stochastically.

    pieces: of the shard of each parameter; see `places.pieces`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        betas: tuple[float, float],
        eps: float,
        half: Half,
        pieces: Mapping[nn.Parameter, list[Piece]],
    ):
        self.half, self.pieces = half, pieces
        self.states = {**dict.fromkeys(STATES, half.states), "master": torch.float32}
        self._places: dict[tuple, torch.Tensor] = {}
        super().__init__(groups, {"lr": 1e-3, "weight_decay": 0.0, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        counted = ((p, group, self._counted(p)) for p, group in self.trained(closure))
        for numbers, parameters in adamw_calls(counted):
            t = self._piecewise(parameters)
            rounding = None
            if self.half.seed is not None and t.params:
                key = (*map(id, parameters), t.params[0].device)
                if key not in self._places:
                    self._places[key] = torch.tensor(t.places).to(t.params[0].device)
                rounding = tw.StochasticRounding(self.half.seed, self._places[key])
            tw.adamw_(*t[:4], **numbers, copies=t.copies or None, rounding=rounding)

    def _counted(self, p: nn.Parameter) -> torch.Tensor:
        """The number of this step, with the parameter's states there."""
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())  # on the CPU, where reading it waits for nothing
            for name in STATES:
                state[name] = torch.zeros_like(p, dtype=self.half.states)
            if self.half.master and p.dtype.itemsize == 2:
                state["master"] = p.detach().to(torch.float32)
        state["step"] += 1
        return state["step"]

    def _piecewise(self, trained: list[nn.Parameter]) -> Piecewise:
        t = Piecewise([], [], [], [], [], [])
        for p in trained:
            state = self.state[p]
            assert p.grad is not None
            params = state.get("master", p)
            tensors = params, p.grad, *(state[name] for name in STATES)
            tensors += (p,) if params is not p else ()
            flat = [
                shard(one).view(-1) if i != 1 else shard(one).reshape(-1)
                for i, one in enumerate(tensors)
            ]
            for piece in self.pieces[p]:
                for to, one in zip(t[:5], flat, strict=False):
                    to.append(one[piece.begin : piece.end])
                t.places.append(piece.place)
        return t


def adamw(
    groups: list[dict[str, Any]],
    apart: Any,
    *,
    adam_beta1: float,
    adam_beta2: float,
    adam_epsilon: float,
) -> torch.optim.Optimizer:
    """States in the parameters' dtype, float32; one fused kernel."""
    return AdamW(groups, betas=(adam_beta1, adam_beta2), eps=adam_epsilon, fused=True)


def anyprecision_adamw(
    groups: list[dict[str, Any]],
    apart: Any,
    *,
    adam_beta1: float,
    adam_beta2: float,
    adam_epsilon: float,
    optimizer_dtype: str,
) -> torch.optim.Optimizer:
    states = DTYPES[optimizer_dtype]
    return Muon(groups, Settings((adam_beta1, adam_beta2), adam_epsilon, states))


def half_adamw(
    groups: list[dict[str, Any]],
    half: Half,
    pieces: Mapping[nn.Parameter, list[Piece]],
    *,
    adam_beta1: float,
    adam_beta2: float,
    adam_epsilon: float,
    **_: Any,
) -> torch.optim.Optimizer:
    return HalfAdamW(groups, (adam_beta1, adam_beta2), adam_epsilon, half, pieces)


OPTIMIZERS.add("adamw", Optimizer(adamw, ADAM, of_half=half_adamw))
OPTIMIZERS.add(
    "anyprecision_adamw",
    Optimizer(anyprecision_adamw, (*ADAM, "optimizer_dtype"), of_half=half_adamw),
)
