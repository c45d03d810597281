"""PEFT's LoRA layer over a quantized linear layer. Importing this module imports peft."""

from __future__ import annotations

from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import check_adapters_to_merge

from tilewright.core.torch_names import pytree
from tilewright.nn.quantized_layers import QuantizedLinear, as_stored, quantize_as
from tilewright.ops.quant.quantize import Quantized
from tilewright.ops.quant.quantized_linear import dequantize

# Initializations of PEFT that do not read the weight.
INITIALIZATIONS = (True, False, "gaussian", "eva")


class QuantizedLoraLinear(Linear):
    """`peft.tuners.lora.Linear` over `QuantizedLinear`: base(x) + scaling * B A dropout(x).

    Merging quantizes weight + scaling * B A again, in the layer's format; unmerging puts back the
    bytes from before.
    """

    def __init__(self, base_layer: QuantizedLinear, adapter_name: str, **kwargs: Any):
        super().__init__(base_layer, adapter_name, **kwargs)
        self.before: list[list[Quantized]] = []  # per merged adapter, the weights before it

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any
    ) -> None:
        """Adds an adapter. Raises ValueError for initializations that change the weight, and for
        biases of adapters.
        """
        if config.init_lora_weights not in INITIALIZATIONS:
            raise ValueError(
                f"init_lora_weights must be one of {list(INITIALIZATIONS)} over a quantized layer, "
                f"got {config.init_lora_weights!r}, which computes with a dense weight"
            )
        if getattr(config, "fan_in_fan_out", False):
            raise ValueError("fan_in_fan_out must be False over a quantized layer, got True")
        if config.lora_bias:
            raise ValueError("lora_bias must be False over a quantized layer, got True")
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def resolve_lora_variant(self, *, config: Any, **kwargs: Any) -> None:
        """Raises ValueError for DoRA and other variants, which read a dense weight."""
        for name in (key for keys in self.lora_variants for key in keys):
            if getattr(config, name, None):
                raise ValueError(
                    f"{name} must not be set over a quantized layer, got {getattr(config, name)!r}: "
                    "it computes with a dense weight"
                )

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight, as PEFT's `merge` does; the weight is quantized again."""
        base = cast(QuantizedLinear, self.get_base_layer())
        for name in check_adapters_to_merge(self, adapter_names):
            if name not in self.lora_A:
                continue
            delta, before, after, at = self.get_delta_weight(name).float(), base.weights(), [], 0
            for q in before:
                full = dequantize(q, dtype=torch.float32) + delta[at : at + q.shape[0]]
                if safe_merge and not torch.isfinite(full).all():
                    raise ValueError(f"adapter {name!r} makes weights that are not finite")
                after.append(as_stored(quantize_as(q, full)))
                at += q.shape[0]
            base.fill(after)
            self.before.append(before)
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Takes all merged adapters out, as PEFT's `unmerge` does."""
        base = cast(QuantizedLinear, self.get_base_layer())
        while self.merged_adapters:
            self.merged_adapters.pop()
            base.fill([_on(base.qweight.device, q) for q in self.before.pop()])


def _on(device: torch.device, q: Quantized) -> Quantized:
    return pytree.tree_map(lambda t: t if t is None else t.to(device), q)
