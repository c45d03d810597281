"""`save_pretrained` for transformers models with adapters or quantized weights."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tilewright.core.registry import short
from tilewright.nn.quantized_layers import QuantizedLinear
from tilewright.nn.stored_names import (
    conversions_of,
    is_of_transformers,
    not_read_back,
    put_back,
    replaced_by_readers,
    split_by_readers,
)
from tilewright.nn.weights import adapted, base_weights, quantized
from tilewright.ops.quant.block_fp8 import BlockFP8
from tilewright.ops.quant.mxfp8 import BLOCK as MXFP8_BLOCK
from tilewright.ops.quant.mxfp8 import MXFP8
from tilewright.ops.quant.nf4_format import NF4
from tilewright.ops.quant.nvfp4_format import BLOCK, NVFP4
from tilewright.ops.quant.quantize import Quantized


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

    Writes linear layers as bitsandbytes (NF4), compressed-tensors (NVFP4, MXFP8) or fine-grained
    FP8 store them, so that from_pretrained reads the same bytes. Raises ValueError, and writes
    nothing, for adapters and for weights that these cannot read.
    """
    original = type(model).save_pretrained
    if any(True for _ in adapted(model)):
        raise ValueError(
            "save_pretrained cannot write adapters of tilewright: "
            "tilewright.nn.save_adapter(model, folder) writes them for peft, and "
            "merge_and_unload(model) adds them to the weights, which save_pretrained then writes"
        )
    if getattr(model, "_hf_peft_config_loaded", False):  # transformers saves the adapters alone
        return original(
            model, save_directory, is_main_process=is_main_process, state_dict=state_dict, **options
        )
    refuse_wrapped(model)
    saved = None
    if any(True for _ in _quantized(model)):
        if state_dict is not None:
            raise ValueError(
                f"save_pretrained cannot write a state_dict of quantized weights; {_WAY_OUT}"
            )
        state_dict, saved = stored_state(model)
    before = model.config.__dict__.get("quantization_config")
    conversions = model.__dict__.get("_weight_conversions")
    if saved is not None and state_dict is not None:
        if is_of_transformers(model):
            readable = readable_conversions(model, state_dict, saved["quant_method"])
            model._weight_conversions = readable
        model.config.quantization_config = saved
    try:
        return original(
            model, save_directory, is_main_process=is_main_process, state_dict=state_dict, **options
        )
    finally:
        if saved is not None:
            put_back(model, conversions)
        if saved is not None and before is None:
            del model.config.quantization_config
        elif saved is not None:
            model.config.quantization_config = before


def refuse_wrapped(model: nn.Module) -> None:
    """Raises ValueError for modules that PEFT wraps: the names of their weights are PEFT's own, by
    which from_pretrained finds none.
    """
    for path, module in model.named_modules():
        if any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__):
            raise ValueError(
                f"save_pretrained cannot write a model with PEFT's adapters ({path} is PEFT's "
                f"{type(module).__name__}): the PEFT model's save_pretrained writes the adapters, "
                "and its merge_and_unload() or unload() gives a model to save"
            )


def readable_conversions(model: Any, state: dict[str, torch.Tensor], method: str) -> list[Any]:
    """The conversions to revert when a transformers model with quantized weights is saved. Raises
    ValueError if its readers could not read the folder, or could not compute with it.

    state, method: the tensors to save, and the `quant_method` of their format.
    """
    if method == "compressed-tensors" and model.dtype != torch.bfloat16:
        raise ValueError(
            f"save_pretrained cannot write {_kinds(model)} for a model in {short(model.dtype)}: "
            "compressed-tensors dequantizes to bfloat16, and its products need one dtype; load it "
            "with dtype=torch.bfloat16, or call model.to(torch.bfloat16), which leaves the codes "
            "as they are"
        )
    if replaced := replaced_by_readers(model, method):
        raise ValueError(
            f"save_pretrained cannot write {replaced} beside weights of {method}: transformers "
            f"replaces it by another when it reads such a folder; {_WAY_OUT}"
        )
    if split := split_by_readers(model, method):
        raise ValueError(
            f"save_pretrained cannot write {type(model).__name__} for {method}: files of this "
            f"family hold several layers in one tensor ({split}), and transformers then reads no "
            f"folder of it; nf4 is read"
        )
    weights: dict[str, Any] = dict(_quantized(model))
    keys = [key for name, parts in weights.items() for key in parts[0].to_safetensors(name)]
    conversions, own = conversions_of(model, keys, state.keys() - {*keys}, method)
    if wrong := not_read_back(model, conversions, [*keys, *own]):
        raise ValueError(
            f"save_pretrained cannot write {wrong}; leave the layer dense (modules_to_not_convert)"
        )
    return conversions


def stored_state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state dict of a model with quantized weights in the layout of its format's checkpoints,
    and the quantization_config that their readers need.

    Raises ValueError for weights that these readers cannot read, and for several formats.
    """
    weights: dict[str, Any] = dict(_quantized(model))
    for name, parts in weights.items():
        if wrong := _why_not_stored(parts):
            raise ValueError(f"save_pretrained cannot write {name} {wrong}; {_WAY_OUT}")
    kinds = {name: _kind(parts[0]) for name, parts in weights.items()}
    if len(set(kinds.values())) > 1:
        several = ", ".join(sorted({str(kind) for kind, *_ in kinds.values()}))
        raise ValueError(
            f"save_pretrained cannot write weights of several formats ({several}); {_WAY_OUT}"
        )
    configuration, state = stored_configuration(model), model.state_dict()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedLinear):
            for name, _ in module.named_buffers():
                del state[f"{path}.{name}"]
    for name, [q] in weights.items():
        state |= {key: t.contiguous() for key, t in q.to_safetensors(name).items()}
    return state, configuration


def stored_configuration(model: nn.Module) -> dict[str, Any]:
    """The quantization_config of a model with quantized weights, whether its readers could read all
    of them or not.
    """
    weights = [q for _, parts in _quantized(model) for q in parts]
    if not weights:
        raise ValueError("the model has no quantized weight left to write")
    # bitsandbytes replaces transformers' Conv1D, too.
    left = [
        path
        for path, m in model.named_modules()
        if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"
    ]
    return _configuration(weights, left)


_WAY_OUT = (
    "it writes matrices of one format, without a state_dict. "
    "tilewright.nn.merge_and_unload(model) dequantizes the weights, which save_pretrained then "
    "writes"
)


def _quantized(model: nn.Module) -> Iterator[tuple[str, list[Quantized]]]:
    for name, module in base_weights(model):
        if parts := quantized(module):
            yield name, parts


def _kinds(model: nn.Module) -> str:
    return ", ".join(sorted({type(q).__name__ for _, parts in _quantized(model) for q in parts}))


def _kind(q: Quantized) -> tuple:
    return type(q).__name__, getattr(q, "block", None)


def _why_not_stored(parts: list[Quantized]) -> str | None:
    """Why readers of its format cannot read a weight."""
    [q, *more] = parts
    if more or len(q.shape) != 2:
        return f"as {type(q).__name__} {'in several parts' if more else 'of experts'}"
    return why_unreadable(q, q.shape)


def why_unreadable(like: Quantized, shape: Sequence[int]) -> str | None:
    """Why a matrix of this shape in the format of `like` could not be read by the packages that
    define the checkpoints; None if it can.
    """
    if isinstance(like, NVFP4) and shape[1] % BLOCK:
        return f"{list(shape)} as NVFP4: compressed-tensors reads rows of whole blocks of {BLOCK}"
    if isinstance(like, MXFP8) and shape[1] % MXFP8_BLOCK:
        return (
            f"{list(shape)} as MXFP8: compressed-tensors reads rows of whole blocks of "
            f"{MXFP8_BLOCK}"
        )
    # transformers finds the block by dividing the shape by the number of scales.
    if isinstance(like, BlockFP8) and any(
        n > b and n % b for n, b in zip(shape, like.block, strict=True)
    ):
        rows, columns = like.block
        return (
            f"{list(shape)} as BlockFP8: transformers reads whole blocks, here of {rows} x "
            f"{columns}; another group_size may divide it"
        )
    return None


def _configuration(weights: list[Quantized], left: list[str]) -> dict[str, Any]:
    """The quantization_config.   left: the paths of the dense linear layers."""
    first = weights[0]
    if isinstance(first, BlockFP8):
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(first.block),
            "modules_to_not_convert": left,
        }
    if isinstance(first, (NVFP4, MXFP8)):
        nvfp4 = isinstance(first, NVFP4)
        format = "nvfp4-pack-quantized" if nvfp4 else "mxfp8-quantized"
        arguments = {
            "num_bits": 4 if nvfp4 else 8,
            "type": "float",
            "strategy": "tensor_group" if nvfp4 else "group",
            "group_size": BLOCK if nvfp4 else MXFP8_BLOCK,
            "symmetric": True,
            "dynamic": False,
            "scale_dtype": "torch.float8_e4m3fn" if nvfp4 else "torch.uint8",
        }
        return {
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": arguments,
                    "input_activations": None,
                    "output_activations": None,
                    "format": format,
                }
            },
            "ignore": left,
        }
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": any(
            isinstance(q, NF4) and q.offset is not None for q in weights
        ),
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": short(first.dtype),
        "llm_int8_skip_modules": left,
    }
