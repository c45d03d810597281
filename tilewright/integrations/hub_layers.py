"""Layers for Hugging Face `kernels`: forwards without state of their own, which `kernelize` puts on
modules of the same parameters.

`tilewright.integrations.hub` exports this module as `layers` of a kernel repository.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tilewright import ops
from tilewright.core import checks
from tilewright.integrations.transformers.experts import experts_entry

# A layer may have no member beyond `forward` and these two flags: whether it is differentiable
# (`has_backward`, the default), and whether torch.compile traces it without a graph break. The
# annotated attributes are the module's that it is put on.


def _eps(norm: Any) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


class RMSNorm(nn.Module):
    """x / rms(x), rounded to x's dtype, times weight: Llama, Mistral, Qwen2, Qwen3, Phi-3, Mixtral
    and others.

    As in these models, a float32 weight makes a 16-bit result float32.
    """

    can_torch_compile = True
    weight: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(self.weight.dtype, hidden_states.dtype)
        with checks.no_autocast(hidden_states):
            return ops.rmsnorm(hidden_states.to(dtype), self.weight, _eps(self))


class RMSNormRoundedOnce(nn.Module):
    """x / rms(x) * weight in float32, rounded once: gpt-oss."""

    can_torch_compile = True
    weight: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        with checks.no_autocast(hidden_states):
            return ops.rmsnorm(hidden_states, self.weight, _eps(self), cast="gemma")


class RMSNormZeroCentered(nn.Module):
    """x / rms(x) * (1 + weight) in float32, rounded once: Gemma, Qwen3.5."""

    can_torch_compile = True
    weight: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with checks.no_autocast(x):
            return ops.rmsnorm(x, self.weight, _eps(self), offset=1.0, cast="gemma")


class SiluAndMul(nn.Module):
    """silu(gate) * up of [..., gate | up]."""

    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.silu_mul(x)


class SwiGLUMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)): Llama, Mistral, Qwen2, Qwen3."""

    can_torch_compile = True
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(ops.silu_mul(self.gate_proj(x), self.up_proj(x)))


class GeGLUMLP(nn.Module):
    """down_proj(gelu_tanh(gate_proj(x)) * up_proj(x)): Gemma."""

    can_torch_compile = True
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = ops.gelu_mul(self.gate_proj(x), self.up_proj(x), approximate="tanh")
        return self.down_proj(gated)


class MergedSwiGLUMLP(nn.Module):
    """down_proj(silu(gate) * up) with gate and up in one gate_up_proj: Phi-3, GLM-4."""

    can_torch_compile = True
    gate_up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(ops.silu_mul(self.gate_up_proj(hidden_states)))


class RotaryPosEmb(nn.Module):
    """Rotates queries and keys, features i and i + D / 2 as a pair, by tables as wide as a head:
    Llama and all models with its `rotate_half`. Models whose pairs are neighbors (GLM-4) cannot be
    told apart by their arguments: do not map it for them.
    """

    can_torch_compile = True

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q.dim() != 4 or cos.shape[-1] != q.shape[-1] or unsqueeze_dim not in (1, 2):
            raise ValueError(
                f"RotaryPosEmb takes q and k [B, heads, S, D], cos and sin [B, S, D], and "
                f"unsqueeze_dim 1 or 2, got q {list(q.shape)}, cos {list(cos.shape)}, "
                f"unsqueeze_dim {unsqueeze_dim}"
            )
        if unsqueeze_dim == 1:
            return ops.rope(q, k, cos, sin)
        q, k = ops.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)


class MoEExperts(nn.Module):
    """transformers' experts modules, with gate_up_proj and down_proj as 3D parameters: Mixtral,
    Qwen2-MoE, Qwen3-MoE, OLMoE, gpt-oss, DeepSeek-V3.
    """

    can_torch_compile = True
    forward = experts_entry("tilewright", "auto")
