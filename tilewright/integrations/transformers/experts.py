"""Expert layers of transformers' models, computed by `ops.moe_mlp`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from tilewright.core import checks, torch_names
from tilewright.core.registry import ImplementationUnavailable
from tilewright.nn.experts import gate_attributes, gate_of, why_not
from tilewright.ops import moe_mlp
from tilewright.ops.activation.activation import Gate

ACCEPTED = (
    "experts that compute down_proj(activation(gate) * up), with or without biases, with "
    "gate_up_proj [E, 2 I, H] and down_proj [E, H, I], or both transposed, whose gate is one that "
    "ops.Gate describes"
)


# Before torch 2.12 Dynamo accepts no module as an argument of such a function: a graph break.
_once: Callable = torch.compiler.disable if torch.__version__ < "2.12" else torch_names.constant


@_once
def _reason_and_gate(experts: torch.nn.Module, attributes: tuple) -> tuple[str | None, tuple]:
    """`why_not`, and if it is None the fields of the module's gate. Constants for Dynamo, which
    calls it once while tracing.
    """
    if reason := why_not(experts):
        return reason, ()
    gate = gate_of(experts, attributes)
    assert isinstance(gate, Gate), "else `why_not` has given the reason"
    return None, astuple(gate)


def experts_entry(name: str, implementation: str) -> Callable:
    """Returns the function that transformers calls for a layer's experts under this name."""

    def experts_forward(
        self: Any,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        reason, gate = _reason_and_gate(self, gate_attributes(self))
        if reason:
            raise ImplementationUnavailable(
                f'{self.config.model_type}: experts_implementation="{name}" cannot compute '
                f'{type(self).__name__}, which {reason}; it takes {ACCEPTED} (others: "grouped_mm", "eager")'
            )
        gate_up, down = self.gate_up_proj, self.down_proj
        if getattr(self, "is_transposed", False):
            gate_up, down = gate_up.mT, down.mT  # some implementations support strided weights
        device = hidden_states.device.type
        autocast = checks.autocasts(device)
        dtype = torch.get_autocast_dtype(device) if autocast else gate_up.dtype
        gate_up, down = gate_up.to(dtype), down.to(dtype)
        biases = {}
        if getattr(self, "has_bias", False):
            biases = {
                "gate_up_bias": self.gate_up_proj_bias.to(dtype),
                "down_bias": self.down_proj_bias.to(dtype),
            }
        if getattr(self, "_is_expert_parallel", False):
            # Indices from num_experts on are experts on other ranks; moe_mlp has one index for all
            # of them.
            top_k_index = top_k_index.clamp(max=gate_up.shape[0])
        # Autocast must not change the dtype of moe_mlp's products.
        with checks.no_autocast(hidden_states):
            y = moe_mlp(
                hidden_states.to(dtype),
                gate_up,
                down,
                top_k_index,
                top_k_weights,
                gate=Gate(*gate),
                implementation=implementation,
                **biases,
            )
        return y.to(hidden_states.dtype)

    return experts_forward
