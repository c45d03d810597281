"""The weights of a model with adapters or quantized weights, by their original names."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from tilewright.nn.lora import LoRALinear
from tilewright.nn.lora_experts import LoRAExperts
from tilewright.nn.quantized_layers import QuantizedExperts, QuantizedLinear
from tilewright.nn.sharded import whole
from tilewright.ops.quant.quantize import Quantized
from tilewright.ops.quant.quantized_linear import dequantize

Adapted = LoRALinear | LoRAExperts
Stored = nn.Parameter | QuantizedLinear | QuantizedExperts


def adapted(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """Yields the modules with adapters, in order."""
    for path, module in model.named_modules():
        if isinstance(module, Adapted):
            yield path, module


def tied_names(model: nn.Module) -> dict[str, str]:
    """Maps each later name of a tied parameter to the parameter's first name."""
    first: dict[int, str] = {}
    tied = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if (earlier := first.setdefault(id(p), name)) != name:
            tied[name] = earlier
    return tied


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return name.rpartition(".")[2].startswith("lora_")


def base_weights(model: nn.Module) -> Iterator[tuple[str, Stored]]:
    """The parameters that the model had before `quantize_model` and `add_lora`, by their original
    names.

    Args:
        model: With adapters or quantized weights, or without.

    Returns:
        An iterator of names, each with the parameter or the module that holds it quantized: first
        all parameters, then the quantized weights, both in the model's order.

    Example:
        >>> import torch
        >>> from tilewright.nn import add_lora, base_weights
        >>> model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 32)})
        >>> paths = add_lora(model, rank=4, alpha=8)
        >>> [(name, tuple(p.shape)) for name, p in base_weights(model)]
        [('up_proj.weight', (32, 64)), ('up_proj.bias', (32,))]
    """
    for name, p in model.named_parameters():
        if not is_adapter(name):
            yield name.replace(".base.", "."), p
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield f"{path.removesuffix('.base')}.weight", module
        elif isinstance(module, QuantizedExperts):
            yield path, module


def quantized(stored: Stored) -> list[Quantized]:
    """The quantized tensors that an entry of `base_weights` holds.

    Args:
        stored: A parameter, or a module with a quantized weight.

    Returns:
        Views of the module's bytes: one, or several that are concatenated along rows; [] for a
        parameter.

    Example:
        >>> import torch
        >>> from tilewright.nn import base_weights, quantize_model, quantized
        >>> model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 32, bias=False)})
        >>> paths = quantize_model(model, "nf4")
        >>> [(name, [q.nbytes for q in quantized(m)]) for name, m in base_weights(model)]
        [('up_proj.weight', [1152])]
    """
    if isinstance(stored, nn.Parameter):
        return []
    return [stored.weight()] if isinstance(stored, QuantizedExperts) else stored.weights()


def shape_of(stored: Stored) -> tuple[int, ...]:
    """The shape of an entry of `base_weights` as a dense weight.

    Args:
        stored: A parameter, or a module with a quantized weight.

    Returns:
        The shape; a sharded parameter's is the shape over all ranks.

    Example:
        >>> import torch
        >>> from tilewright.nn import shape_of
        >>> from tilewright.nn import QuantFormat, QuantizedLinear
        >>> shape_of(QuantizedLinear(QuantFormat("nf4")(torch.randn(16, 64))))
        (16, 64)
    """
    if isinstance(stored, QuantizedLinear):
        return stored.out_features, stored.in_features
    return tuple(stored.weight().shape if isinstance(stored, QuantizedExperts) else stored.shape)


def trainable_parameters(model: nn.Module) -> tuple[int, int]:
    """Counts a model's trainable parameters, and all of them.

    Args:
        model: Any module.

    Returns:
        The number of trainable parameters and of all, adapters and quantized weights included; of
        sharded ones, over all ranks.

    Example:
        >>> import torch
        >>> from tilewright.nn import add_lora, trainable_parameters
        >>> model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 32, bias=False)})
        >>> paths = add_lora(model, rank=4, alpha=8)
        >>> trainable_parameters(model)
        (384, 2432)
    """
    stored = (m for _, m in base_weights(model) if not isinstance(m, nn.Parameter))
    dense = sum(math.prod(shape_of(m)) for m in stored)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return trained, sum(p.numel() for p in model.parameters()) + dense


def print_trainable_parameters(model: nn.Module) -> None:
    """Prints `trainable_parameters` and their share, as PEFT's method of this name.

    Args:
        model: Any module.

    Returns:
        None.

    Example:
        >>> import torch
        >>> from tilewright.nn import add_lora, print_trainable_parameters
        >>> model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 32, bias=False)})
        >>> paths = add_lora(model, rank=4, alpha=8)
        >>> print_trainable_parameters(model)
        trainable params: 384 || all params: 2,432 || trainable%: 15.7895
    """
    trained, every = trainable_parameters(model)
    share = 100 * trained / every if every else 0.0
    print(f"trainable params: {trained:,d} || all params: {every:,d} || trainable%: {share:.4f}")


def fill(stored: QuantizedLinear | QuantizedExperts, weights: list[Quantized]) -> None:
    """Replaces quantized weights by others of the same size."""
    if isinstance(stored, QuantizedLinear):
        stored.fill(weights)
    else:
        [q] = weights
        stored.fill(q)


@torch.no_grad()
def dense_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.dtype]]:
    """Yields `base_weights`, full and dense, with the adapters added in float32; and the dtype of
    each, which for quantized ones is that of the model's other weights.

    A head with an adapter no longer equals the weight that it is tied to, and comes last. Does not
    modify the model. Every rank of a sharded model must exhaust it.
    """
    owners = dict(adapted(model))
    other = next(model.parameters()).dtype
    for name, stored in base_weights(model):
        dtype = stored.dtype if isinstance(stored, nn.Parameter) else other
        owner = owners.get(name.removesuffix(".weight"), owners.get(name.rpartition(".")[0]))
        if isinstance(owner, LoRALinear) and name.endswith(".weight"):
            full = owner.merged_weight()
        elif isinstance(owner, LoRAExperts):
            full = merged_experts(owner, name.rpartition(".")[2])
        elif isinstance(stored, nn.Parameter):
            full = whole(stored.detach())
        else:
            full = torch.cat([dequantize(q, dtype=torch.float32) for q in quantized(stored)])
        yield name, full, dtype
    for name in tied_names(model):
        owner = owners.get(name.removesuffix(".base.weight"))
        if isinstance(owner, LoRALinear) and isinstance(owner.base, nn.Linear):
            yield name.replace(".base.", "."), owner.merged_weight(), owner.base.weight.dtype


def merged_experts(module: LoRAExperts, name: str) -> torch.Tensor:
    """An experts weight with its adapters added, full, in float32; a copy."""
    stored = getattr(module, name)
    full = (
        dequantize(stored.weight(), dtype=torch.float32)
        if isinstance(stored, QuantizedExperts)
        else whole(stored.detach()).float().clone()
    )
    factors = {key: whole(p).float() for key, p in module.adapters().items()}
    parts = ("gate", "up") if name == "gate_up_proj" else ("down",)
    module.add_adapters(full, [(factors[f"{part}_A"], factors[f"{part}_B"]) for part in parts])
    return full
