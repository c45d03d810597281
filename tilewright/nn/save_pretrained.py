"""`save_pretrained` for transformers models with adapters or quantized weights."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

from torch import nn

from tilewright.nn.quantized import QuantizedLinear
from tilewright.nn.weights import adapted, base_weights, quantized
from tilewright.ops.nf4_format import NF4
from tilewright.registry import short


def guard_save_pretrained(model: nn.Module) -> None:
    """Replaces `save_pretrained` of transformers models by `_save_pretrained`.

    The original would write names of adapters and of quantized bytes that from_pretrained does not
    recognize: it would initialize such layers at random.
    """
    for module in model.modules():
        if hasattr(type(module), "save_pretrained") and not is_guarded(module):
            vars(module)["save_pretrained"] = functools.partial(_save_pretrained, module)


def is_guarded(module: nn.Module) -> bool:
    """Whether `guard_save_pretrained` has been applied to the module."""
    return getattr(module.__dict__.get("save_pretrained"), "func", None) is _save_pretrained


def _save_pretrained(
    model: Any,
    save_directory: str | pathlib.Path,
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """`save_pretrained` of a transformers model with adapters or quantized weights.

    Writes linear layers in NF4 as bitsandbytes does; from_pretrained reads the same bytes. Raises
    ValueError, and writes nothing, for adapters and for other formats.
    """
    original, stored = type(model).save_pretrained, dict(base_weights(model))
    if any(True for _ in adapted(model)):
        raise ValueError(
            "save_pretrained cannot write adapters of tilewright: "
            "tilewright.adapt.save_adapter(model, folder) writes them for peft, and "
            "merge_and_unload(model) adds them to the weights, which save_pretrained then writes"
        )
    weights: dict[str, Any] = {
        name: q for name, module in stored.items() for q in quantized(module)
    }
    if not weights:
        return original(
            model, save_directory, is_main_process=is_main_process, state_dict=state_dict, **options
        )
    other = next(
        (n for n, q in weights.items() if not isinstance(q, NF4) or len(quantized(stored[n])) > 1),
        None,
    )
    if other is not None or state_dict is not None:
        contents = (
            "a state_dict of quantized weights"
            if other is None
            else f"{other} as {type(weights[other]).__name__}"
        )
        raise ValueError(
            f"save_pretrained cannot write {contents}; it writes matrices in NF4, without a "
            "state_dict. tilewright.adapt.merge_and_unload(model) dequantizes the weights, which "
            "save_pretrained then writes"
        )
    state = model.state_dict()
    for path, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            for name, _ in module.named_buffers():
                del state[f"{path}.{name}"]
    for name, q in weights.items():
        state |= {key: t.contiguous() for key, t in q.to_safetensors(name).items()}
    model.config.quantization_config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": any(q.offset is not None for q in weights.values()),
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": short(next(iter(weights.values())).dtype),
        "llm_int8_skip_modules": [
            path for path, m in model.named_modules() if isinstance(m, nn.Linear)
        ],
    }
    try:
        return original(
            model, save_directory, is_main_process=is_main_process, state_dict=state, **options
        )
    finally:
        del model.config.quantization_config
