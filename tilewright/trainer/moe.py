"""Layers with experts: the router, the experts, and what the router reports."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from tilewright import ops as tw
from tilewright.nn.quantized import QuantizedExperts
from tilewright.ops.aqn import AQN
from tilewright.ops.expert_parallel import DeepEP, ep_moe_mlp
from tilewright.trainer.model_config import ModelConfig
from tilewright.trainer.ops_choice import Ops
from tilewright.trainer.recompute import Recomputed


class Experts(nn.Module):
    """All experts, or with `spread` those of this rank; then its parameters are DTensors, sharded
    by expert.

    `adapt.quantize_model` makes modules of the two tensors, `adapt.add_lora` LoRAExperts of the
    whole.
    """

    noise_layers = 2  # numbers of `AQN.layer` that it may need

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        E, H, I = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * I, H))
        self.down_proj = nn.Parameter(torch.empty(E, H, I))
        self.ops, self.recompute = ops, False
        self.noise: AQN | None = None
        self.group: dist.ProcessGroup | None = None

    def spread(self, group: dist.ProcessGroup, dispatch: str, deepep: DeepEP) -> None:
        """Tokens travel to the rank of `group` that has their experts."""
        self.group, self.dispatch, self.deepep = group, dispatch, deepep

    def forward(self, x_TH, index_TK, weight_TK, kept=None):
        if self.group is not None:
            gate_up, down = (
                p.to_local() if isinstance(p, DTensor) else p
                for p in (self.gate_up_proj, self.down_proj)
            )
            return ep_moe_mlp(
                x_TH,
                gate_up,
                down,
                index_TK,
                weight_TK,
                self.group,
                dispatch=self.dispatch,
                implementation=self.ops.moe_mlp,
                recompute=self.recompute,
                kept=kept,
                deepep=self.deepep,
            )
        compute = Recomputed(self._compute) if self.recompute else self._compute
        return compute(x_TH, index_TK, weight_TK)

    def set_noise(self, noise: AQN | None) -> None:
        """Noise on quantized experts for the forward passes to come, in training only."""
        self.noise = noise if isinstance(self.down_proj, QuantizedExperts) else None

    def _compute(self, x_TH, index_TK, weight_TK):
        gate_up, down = self.gate_up_proj, self.down_proj
        if isinstance(down, QuantizedExperts):
            return tw.moe_mlp(
                x_TH,
                gate_up.weight(),
                down.weight(),
                index_TK,
                weight_TK,
                noise=self.noise if self.training else None,
                implementation=self.ops.moe_mlp,
            )
        return tw.moe_mlp(x_TH, gate_up, down, index_TK, weight_TK, implementation=self.ops.moe_mlp)


class Router(nn.Linear):
    """Logits of experts. fp32: in float32, of x and weight as they are where it is called."""

    def __init__(self, hidden: int, experts: int, fp32: bool):
        super().__init__(hidden, experts, bias=False)
        self.fp32 = fp32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.fp32:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())


class MoE(nn.Module):
    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.gate = Router(config.hidden_size, config.num_experts, ops.numerics.router_fp32)
        self.experts = Experts(config, ops)
        self.top_k, self.renormalize, self.ops = (
            config.num_experts_per_tok,
            config.norm_topk_prob,
            ops,
        )

    def forward(self, x, kept=None):
        """The layer's output, and what the router did: tokens of each expert, load-balance loss,
        z-loss, [E + 2].

        kept: as in `ep_moe_mlp`, for a call that will be repeated in the backward.
        """
        x_TH = x.reshape(-1, x.shape[-1])
        routing = tw.route(
            self.gate(x_TH), self.top_k, renormalize=self.renormalize, implementation=self.ops.route
        )
        index_TK, weight_TK, tokens_E, *losses = routing
        report = torch.cat((tokens_E.float(), torch.stack(losses))).detach()
        # As F.linear's result is no view either: FSDP2 warns of one, since operations in place
        # would pass its hooks by.
        return torch.ops.aten._unsafe_view(
            self.experts(x_TH, index_TK, weight_TK, kept), x.shape
        ), report
