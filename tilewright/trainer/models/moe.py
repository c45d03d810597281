"""Layers with experts: the router, the experts, and the router's report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tilewright import ops as tw
from tilewright.nn.quantized_layers import QuantizedExperts
from tilewright.nn.sharded import local
from tilewright.ops.activation.gate import Gate
from tilewright.ops.moe.expert_parallel import DeepEP, ep_moe_mlp
from tilewright.ops.moe.route import TINY
from tilewright.ops.quant.aqn import AQN
from tilewright.trainer.models.layers import MLP, Place
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.models.recompute import Recomputed


class Experts(nn.Module):
    """All experts, or after `spread` this rank's; its parameters are then DTensors, sharded by
    expert.

    `adapt.quantize_model` replaces the two tensors by modules, `adapt.add_lora` the whole by
    LoRAExperts.
    """

    noise_layers = 2  # number of `AQN.layer` values that it may use

    def __init__(self, config: ModelConfig, ops: Ops, biased: bool = False):
        super().__init__()
        E, H, I = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * I, H))
        self.down_proj = nn.Parameter(torch.empty(E, H, I))
        self.biased = biased
        if self.biased:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(E, 2 * I))
            self.down_proj_bias = nn.Parameter(torch.empty(E, H))
        self.gate = _gate_of(config)
        self.ops, self.recompute = ops, False
        self.noise: AQN | None = None
        # Computes in place of `ops.moe_mlp`, without quantized weights.
        self.compute: Callable[..., torch.Tensor] | None = None
        self.group: dist.ProcessGroup | None = None

    def spread(self, group: dist.ProcessGroup, dispatch: str, deepep: DeepEP) -> None:
        """Sends tokens to the rank of `group` that has their experts."""
        self.group, self.dispatch, self.deepep = group, dispatch, deepep

    def forward(self, x_TH, index_TK, weight_TK, kept=None):
        if self.group is not None:
            return ep_moe_mlp(
                x_TH,
                local(self.gate_up_proj),
                local(self.down_proj),
                index_TK,
                weight_TK,
                self.group,
                **self._options(),
                dispatch=self.dispatch,
                implementation=self.ops.moe_mlp,
                recompute=self.recompute,
                kept=kept,
                deepep=self.deepep,
                experts=self.compute,
            )
        compute = Recomputed(self._compute) if self.recompute else self._compute
        return compute(x_TH, index_TK, weight_TK)

    def set_noise(self, noise: AQN | None) -> None:
        """Sets noise on quantized experts for future forward passes, in training only."""
        self.noise = noise if isinstance(self.down_proj, QuantizedExperts) else None

    def _options(self):
        """What differs from SiLU(gate) * up without biases."""
        if not self.biased:
            return {"gate": self.gate}
        return {
            "gate_up_bias": local(self.gate_up_proj_bias),
            "down_bias": local(self.down_proj_bias),
            "gate": self.gate,
        }

    def _compute(self, x_TH, index_TK, weight_TK):
        gate_up, down = self.gate_up_proj, self.down_proj
        if isinstance(down, QuantizedExperts):
            assert isinstance(gate_up, QuantizedExperts)
            return tw.moe_mlp(
                x_TH,
                gate_up.weight(),
                down.weight(),
                index_TK,
                weight_TK,
                noise=self.noise if self.training else None,
                implementation=self.ops.moe_mlp,
            )
        compute = self.compute or partial(tw.moe_mlp, implementation=self.ops.moe_mlp)
        return compute(x_TH, gate_up, down, index_TK, weight_TK, **self._options())


def _gate_of(config: ModelConfig) -> Gate:
    """What experts make of gates and ups: SwiGLU, or gpt-oss's clamped one."""
    alpha, limit = config.swiglu_alpha, config.swiglu_limit
    if alpha is None:
        return Gate()
    return Gate(alpha=alpha, limit=limit, up_limit=limit, up_offset=1.0)


class Router(nn.Linear):
    """Logits of experts. fp32: in float32, from x and weight in the dtypes of the call.

    A sigmoid router adds e_score_correction_bias to its scores for the choice alone. The bias has
    no gradient, and stays whole and in float32 on every rank.
    """

    def __init__(self, config: ModelConfig, fp32: bool, bias: bool, sigmoid: bool):
        super().__init__(config.hidden_size, config.num_experts, bias=bias)
        self.fp32 = fp32
        self.e_score_correction_bias = (
            nn.Parameter(torch.empty(config.num_experts), requires_grad=False) if sigmoid else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = local(self.weight), None if self.bias is None else local(self.bias)
        if not self.fp32:
            return F.linear(x, weight, bias)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


class MoE(nn.Module):
    def __init__(
        self,
        place: Place,
        *,
        router_bias: bool = False,
        expert_bias: bool = False,
        score: str = "softmax",
    ):
        """router_bias: added to the router's logits.   score: of the router; with "sigmoid" it has
        a bias for the choice.
        """
        super().__init__()
        config, ops = place.config, place.ops
        # The number of layers with experts before this one.
        self.number = sum(config.is_moe(i) for i in range(place.layer))
        self.gate = Router(config, ops.numerics.router_fp32, router_bias, score == "sigmoid")
        self.experts = Experts(config, ops, expert_bias)
        self.shared_experts = (
            MLP(place, config.n_shared_experts * config.moe_intermediate_size)
            if config.n_shared_experts
            else None
        )
        self.top_k, self.ops = config.num_experts_per_tok, ops
        scale = config.routed_scaling_factor
        self.options = {
            "score": score,
            "renormalize": config.norm_topk_prob,
            "groups": config.n_group or 1,
            "topk_groups": config.topk_group or 1,
            "scale": 1.0 if scale is None else scale,
            "implementation": ops.route,
        }

    def forward(self, x, routes=None, real=None, kept=None):
        """The layer's output, and the router's report, `reported`.

        routes: recorded experts of this layer, int16 [K, T], -1 for a token without a record.
        real: bool [T], false for padding; None: no token is.
        kept: as in `ep_moe_mlp`, for a call that the backward repeats.
        """
        x_TH = x.reshape(-1, x.shape[-1])
        logits_TE, bias = self.gate(x_TH), self.gate.e_score_correction_bias
        recorded_TK = None
        if routes is not None:
            recorded_TK = self._completed(logits_TE.detach(), routes.T)
        routing = tw.route(
            logits_TE, self.top_k, bias=bias, expert_index=recorded_TK, **self.options
        )
        index_TK, weight_TK = routing.expert_index, routing.expert_weight
        report = reported(logits_TE, index_TK, self.options["score"], real)
        # Like F.linear's, the result must not be a view: FSDP2 warns of views, since operations in
        # place would bypass its hooks.
        y = torch.ops.aten._unsafe_view(self.experts(x_TH, index_TK, weight_TK, kept), x.shape)
        return (y if self.shared_experts is None else y + self.shared_experts(x)), report

    def _completed(self, logits_TE, recorded_TK):
        """Recorded routes; tokens without a whole record have today's."""
        bias = self.gate.e_score_correction_bias
        today = tw.route(logits_TE, self.top_k, bias=bias, **self.options).expert_index
        return torch.where((recorded_TK < 0).any(-1, keepdim=True), today, recorded_TK.long())


def feed_forward(place: Place, **of_experts: Any) -> MLP | MoE:
    """What a layer has beside attention.   of_experts: options of `MoE`."""
    return MoE(place, **of_experts) if place.config.is_moe(place.layer) else MLP(place)


@torch.no_grad()
def reported(
    logits_TE: torch.Tensor, index_TK: torch.Tensor, score: str, real: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums over the tokens that are real, [2 E + 2], float32: how many chose each expert, the
    experts' shares of scores, squared log-sum-exps, and the number of tokens.

    They are sums of which `ops.route` has the losses, for any part of a row.
    """
    x = logits_TE.detach().float()
    shares = x.sigmoid() if score == "sigmoid" else x.softmax(-1)
    if score == "sigmoid":
        shares = shares / (shares.sum(-1, keepdim=True) + TINY)
    chosen = torch.zeros_like(x).scatter_(-1, index_TK, 1.0)
    z = x.logsumexp(-1, keepdim=True).square()
    each = chosen, shares, z, torch.ones_like(z)
    if real is not None:  # no products: padding may be infinite
        each = tuple(t.masked_fill(~real[:, None], 0.0) for t in each)
    return torch.cat([t.sum(0) for t in each])


def statistics(sums: torch.Tensor) -> torch.Tensor:
    """Statistics of whole rows, added over rows, [layers, E + 3]: tokens per expert, load-balance
    losses, z-losses, and the number of rows with a token.

    sums: [rows, layers, 2 E + 2], those of `reported`.
    """
    E = sums.shape[-1] // 2 - 1
    chosen, shares, z, tokens = sums.split((E, E, 1, 1), -1)
    n = tokens.clamp_min(1.0)
    balance = E * (chosen / n * (shares / n)).sum(-1, keepdim=True)
    return torch.cat((chosen, balance, z / n, (tokens > 0).to(sums.dtype)), -1).sum(0)


def freeze_router(model: nn.Module) -> None:
    """Freezes the routers' weights. Raises ValueError without experts."""
    gates = [module.gate for module in model.modules() if isinstance(module, MoE)]
    if not gates:
        raise ValueError("train.freeze_router = True: the model has no experts")
    for gate in gates:
        gate.requires_grad_(False)
