"""PEFT's LoRA over this library's quantized layers.

    from tilewright.integrations.peft import register

    register()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))

Models that `from_pretrained` loads with a `TilewrightConfig` call `register` themselves.
"""

from __future__ import annotations

from typing import Any

from tilewright.core import platform
from tilewright.core.registry import ImplementationUnavailable
from tilewright.nn.quantized_layers import QuantizedLinear

__all__ = ["register"]


def register() -> None:
    """Lets PEFT put LoRA layers over `QuantizedLinear`, for the whole process.

    PEFT has a list of functions that choose a layer's class, and no function that extends it: the
    last one, `dispatch_default`, is replaced by one that checks for `QuantizedLinear` first. A
    second call does nothing. `get_peft_model`, `PeftModel.from_pretrained`, `save_pretrained` of
    adapters, `merge_adapter`, `merge_and_unload`, lora_dropout, use_rslora, rank patterns and
    modules_to_save work as over other layers. Merging quantizes the sum again, in the layer's
    format; unmerging puts back the bytes from before. DoRA, other variants and initializations that
    change the weight raise ValueError.

    Returns:
        None.

    Raises:
        ImplementationUnavailable: peft is missing.

    Example:
        >>> from tilewright.integrations.peft import register
        >>> register()
    """
    if reason := platform.no_module("peft"):
        raise ImplementationUnavailable(reason)
    from peft.tuners.lora import model

    from tilewright.integrations.peft.layer import QuantizedLoraLinear

    lora_model: Any = model  # which imports that function, and does not export it
    own = lora_model.dispatch_default
    if getattr(own, "knows_quantized_linear", False):
        return

    def dispatch_default(target, adapter_name, config, **kwargs):
        base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
        if isinstance(base, QuantizedLinear) and kwargs.get("parameter_name") is None:
            return QuantizedLoraLinear(target, adapter_name, config=config, **kwargs)
        return own(target, adapter_name, config=config, **kwargs)

    vars(dispatch_default)["knows_quantized_linear"] = True
    lora_model.dispatch_default = dispatch_default
