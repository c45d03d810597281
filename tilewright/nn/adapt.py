"""Adapters in whole models.

    quantize_(model, "nf4")  # optional: QLoRA
    add_lora(model, rank=16, alpha=32)
    ...
    save_adapter(model, "adapter")  # what `peft` loads
    merge_and_unload(model)  # plain layers again

Only the adapters are trained. `quantize.py` quantizes models, `projections.py` finds the layers and
`peft.py` writes and reads PEFT's files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tilewright.nn.experts import why_not
from tilewright.nn.lora import LoRALinear, check_dropout
from tilewright.nn.lora_experts import LoRAExperts
from tilewright.nn.modules_to_save import mark, modules_to_save_of, saved_modules
from tilewright.nn.projections import (
    FUSED,
    OF_EXPERTS,
    PROJECTIONS,
    adaptable,
    as_names,
    chosen_parts,
    experts,
    last_name,
    projections,
    replace_module,
    rows_unknown,
    unmatched,
)
from tilewright.nn.quantized_layers import QuantizedExperts, QuantizedLinear
from tilewright.nn.save_pretrained import guard_save_pretrained, is_guarded
from tilewright.nn.sharded import is_sharded
from tilewright.nn.weights import Adapted, adapted, merged_experts, tied_names
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.quantized_linear import dequantize

# ---- adding adapters


# Long: half of it is its signature and its checks.
# Wide: with PEFT's names.
def add_lora(
    model: nn.Module,
    targets: Iterable[str] | None = None,
    *,
    rank: int = 16,
    alpha: float = 16,
    rslora: bool = False,
    dtype: torch.dtype = torch.float32,
    lora_dropout: float = 0.0,
    use_rslora: bool = False,
    use_dora: bool = False,
    modules_to_save: Iterable[str] = (),
    experts_mode: str = "per_expert",
) -> list[str]:
    """Adds adapters to projections and freezes all other parameters.

    `save_pretrained` of a transformers model then raises instead of writing files that
    from_pretrained cannot read.

    Args:
        model: Modified in place. Must have no adapters yet.
        targets: The projections (see `matches`), by their own names even where a layer fuses
            several; None: all of PROJECTIONS. The trainer's models also accept "lm_head". In a
            transformers model a layer that fuses several projections, as in Phi-3, counts as one
            and gets one adapter.
        rank: As in LoRALinear and LoRAExperts, as are `alpha`, `rslora` and `dtype`.
        alpha: The adapters' scale times `rank`, or with `rslora` times its square root.
        rslora: See `alpha`.
        dtype: The adapters' dtype.
        lora_dropout: As `dropout` in LoRALinear; experts have none.
        use_rslora: PEFT's name of `rslora`.
        use_dora: As in LoRALinear; experts have none.
        modules_to_save: Modules that are trained whole beside the adapters, by the ends of their
            paths ("lm_head"). `save_adapter` writes their weights, as PEFT does.
        experts_mode: The factors that the experts of a layer share, as `mode` in LoRAExperts.

    Returns:
        The paths of the adapted modules.

    Raises:
        TypeError: `targets` is a str.
        ValueError: There are no targets; some match no projection (heads, embeddings and routers
            are none) or only part of an experts module's; experts are not SiLU(gate) * up without
            biases; the split of a fused layer's rows is unknown; the model has adapters;
            `lora_dropout` or `use_dora` is set for experts; or a module to save does not exist, is
            adapted, quantized or tied. The message names them, and the model is unchanged.

    Example:
        >>> from torch import nn
        >>> from tilewright.nn import add_lora
        >>> model = nn.ModuleDict({"up_proj": nn.Linear(64, 32), "lm_head": nn.Linear(32, 8)})
        >>> add_lora(model, rank=4, alpha=8)
        ['up_proj']
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['up_proj.lora_A', 'up_proj.lora_B']
    """
    check_dropout("lora_dropout", lora_dropout)
    if paths := [path for path, _ in adapted(model)]:
        raise ValueError(
            f"{paths[0] or 'the model'} has adapters already; name all targets in one call, on a "
            "model without adapters"
        )
    linear, mixtures = list(projections(model, heads=True)), list(experts(model))
    parts_of = {path: list(parts) for path, _, parts in (*linear, *mixtures)}
    targets = _targets(targets, [p for path, parts in parts_of.items() for p in (path, *parts)])
    chosen = {path: chosen_parts(targets, path, parts) for path, parts in parts_of.items()}
    linear = [entry for entry in linear if chosen[entry[0]]]
    mixtures = [entry for entry in mixtures if chosen[entry[0]]]
    for path, module, parts in linear:
        if None in parts.values():
            raise ValueError(rows_unknown(path, module))
    for path, module, parts in mixtures:
        _check_experts(path, module, chosen[path], parts)
    if lora_dropout and mixtures:
        raise ValueError(
            f"lora_dropout must be 0 for adapters of experts, got {lora_dropout} and "
            f"{mixtures[0][0]}; name targets without them"
        )
    _check_heads(model, [path for path, _, _ in linear], lora_dropout, use_dora)
    if use_dora and (parameters := _parameters_to_peft(model, chosen)):
        raise ValueError(
            f"use_dora must be False for {parameters[0]}, got True: in models with experts PEFT "
            "adapts it as a parameter, which has no magnitudes; name targets without it"
        )
    whole = modules_to_save_of(model, modules_to_save, [path for path, _, _ in linear + mixtures])
    options: dict[str, Any] = {"rslora": rslora or use_rslora, "dtype": dtype}
    of_linear = {**options, "dropout": lora_dropout, "use_dora": use_dora}
    wrapped: dict[str, LoRALinear | LoRAExperts] = {}
    for path, module, parts in linear:
        if len(parts) > 1:
            names = {
                "parts": {last_name(p): rows for p, rows in parts.items()},
                "targets": [last_name(p) for p in chosen[path]],
            }
            wrapped[path] = LoRALinear(module, rank, alpha, **names, **of_linear)
        else:
            wrapped[path] = LoRALinear(module, rank, alpha, **of_linear)
    for path, module, _ in mixtures:
        weights = (getattr(module, name) for name in ("gate_up_proj", "down_proj"))
        gate_up, down = (w.weight() if isinstance(w, QuantizedExperts) else w for w in weights)
        wrapped[path] = LoRAExperts(gate_up, down, rank, alpha, mode=experts_mode, **options)
    model.requires_grad_(False)  # before the adapters are added
    for module in whole.values():
        mark(module)
    for path, module in wrapped.items():
        if isinstance(module, LoRAExperts):
            module.take_the_place_of(model.get_submodule(path))
        replace_module(model, path, module)
    guard_save_pretrained(model)
    return [part for path in wrapped for part in chosen[path]]


def _targets(targets: Iterable[str] | None, paths: list[str]) -> list[str]:
    """The requested entries, each of which matches at least one of the paths."""
    if not paths:
        raise ValueError(
            f"the model has no linear layers called {', '.join((*PROJECTIONS, *FUSED))}"
        )
    if targets is None:
        return [*PROJECTIONS, *FUSED]
    targets = as_names("targets", targets)
    if not targets:
        raise ValueError("targets must name projections, got []; None means all of them")
    if wrong := unmatched(targets, paths):
        names = sorted(set(map(last_name, paths)))
        raise ValueError(
            f"targets: {', '.join(map(repr, wrong))} match no projection; there are "
            f"{', '.join(names)}"
        )
    return targets


def _check_heads(model: nn.Module, paths: list[str], dropout: float, use_dora: bool) -> None:
    """Raises ValueError for options that only a layer that is called can have: losses compute the
    products of heads themselves.
    """
    heads = [path for path in paths if last_name(path) in adaptable(model)]
    for name, given, accepted in (("lora_dropout", dropout, 0), ("use_dora", use_dora, False)):
        if heads and given:
            raise ValueError(
                f"{name} must be {accepted} for {heads[0]}, got {given}: losses compute its "
                "products themselves; name targets without it"
            )


def _parameters_to_peft(model: nn.Module, chosen: dict[str, list[str]]) -> list[str]:
    """The chosen projections that PEFT adapts by their weights: it takes these names for experts in
    a model that has some.
    """
    mixture = any(True for _ in experts(model))
    every = (part for parts in chosen.values() for part in parts)
    return [part for part in every if mixture and last_name(part) in OF_EXPERTS]


def _check_experts(path: str, module: nn.Module, chosen: list[str], parts: list[str]) -> None:
    """Raises ValueError for experts that cannot have the requested adapters."""
    if not path:
        raise ValueError(
            "the model is itself a module of experts; call add_lora on the module that holds it"
        )
    if len(chosen) < len(parts):
        raise ValueError(
            f"targets: {path} has adapters on all of {', '.join(OF_EXPERTS)} or on none"
        )
    if reason := why_not(module, adapters=True):
        raise ValueError(
            f"{path}: experts of {type(module).__name__} {reason}; adapters take SiLU(gate) * up "
            "without biases. Name targets without them"
        )


def reset_adapters(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Initializes all adapters again, so that the model computes what it did without them.

    Calls `reset_parameters` of every module with adapters: A is drawn, and B is zero.

    Args:
        model: Modified in place; one without adapters is left as it is.
        generator: On the CPU, for values that depend neither on the device nor on sharding; None:
            PyTorch's default generator.

    Returns:
        None.

    Raises:
        RuntimeError: The generator is not on the CPU.

    Example:
        >>> import torch
        >>> from tilewright.nn import add_lora, reset_adapters
        >>> model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 32)})
        >>> paths = add_lora(model, rank=4, alpha=8)
        >>> _ = torch.nn.init.ones_(model["up_proj"].lora_B)
        >>> reset_adapters(model, torch.Generator().manual_seed(0))
        >>> model["up_proj"].lora_B.any().item()
        False
    """
    for _, module in adapted(model):
        module.reset_parameters(generator)


def set_noise(model: nn.Module, noise: AQN | None) -> None:
    """Sets noise on every quantized weight for future forward passes, in training mode only.

    Args:
        model: Its quantized weights get the noise; one without any is left as it is.
        noise: Its alpha, seed and step hold for all weights. Each weight has its own layer, counted
            from `noise.layer` in the model's order, and so its own noise. None: no noise.

    Returns:
        None.

    Raises:
        ValueError: A weight's layer exceeds 2^32 - 1.

    Example:
        >>> import torch
        >>> from tilewright.nn import quantize_model, set_noise
        >>> from tilewright.ops import AQN
        >>> model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 32)})
        >>> paths = quantize_model(model, "nf4")
        >>> set_noise(model, AQN(alpha=0.5, seed=0))
        >>> x = torch.randn(2, 64)
        >>> torch.equal(model["up_proj"](x), model.eval()["up_proj"](x))
        False
    """
    layer = 0
    module: Any
    for module in model.modules():
        if (setter := getattr(module, "set_noise", None)) is not None:
            setter(None if noise is None else dataclasses.replace(noise, layer=noise.layer + layer))
            layer += module.noise_layers


# ---- merging


def merge_adapters(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Adds all adapters to their weights and initializes new ones, with which training continues.

    Calls `merge_` of every module with adapters. Sums are in float32, and rounded once to the
    weight's dtype or quantized again in its format. `merge_and_unload` removes adapters instead.

    Args:
        model: Modified in place; one without adapters is left as it is. Every rank of a sharded
            model must call it.
        generator: For the new adapters; as in `reset_adapters`.

    Returns:
        None.

    Raises:
        ValueError: The sum of a quantized weight and its adapter is not finite (not checked on
            CUDA), or an adapted weight is tied to another one. Nothing is merged.
        RuntimeError: The generator is not on the CPU. Nothing is merged.

    Example:
        >>> import torch
        >>> from tilewright.nn import add_lora, merge_adapters
        >>> model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 32)})
        >>> paths = add_lora(model, rank=4, alpha=8)
        >>> _ = torch.nn.init.normal_(model["up_proj"].lora_B)
        >>> x = torch.randn(2, 64)
        >>> y = model["up_proj"](x)
        >>> merge_adapters(model)
        >>> torch.allclose(model["up_proj"](x), y, atol=1e-5), model["up_proj"].lora_B.any().item()
        (True, False)
    """
    if generator is not None and generator.device.type != "cpu":
        raise RuntimeError(f"generator must be on the CPU, got one on {generator.device}")
    check_merge(model)
    for _, module in adapted(model):
        module.merge_(generator)


def check_merge(model: nn.Module) -> None:
    """Raises ValueError, naming the first such layer, if `merge_adapters` would, and changes
    nothing. Every rank of a sharded model must call it; one may raise alone.
    """
    problem, tied = None, tied_names(model)
    for path, module in adapted(model):  # all: other ranks wait for this one's share of each
        try:
            module.check_merge()
            if isinstance(module, LoRALinear) and (others := tied.get(f"{path}.base.weight")):
                raise ValueError(f"its weight is tied to {others}, which would change too")
        except ValueError as error:
            problem = problem or ValueError(f"{path}: nothing is merged: {error}")
    if problem is not None:
        raise problem


@torch.no_grad()
def merge_and_unload(model: nn.Module) -> nn.Module:
    """Undoes `quantize_model` and `add_lora`: restores plain layers, with adapters merged.

    Linear layers become nn.Linear, experts their original modules, with tensors. `save_pretrained`
    then works as usual. Adapters are added in float32, and the sum is rounded once, to the weight's
    dtype. Quantized weights are dequantized to the dtype that they were quantized from, and stay
    dequantized. Weights stay frozen.

    Args:
        model: Modified in place.

    Returns:
        The model.

    Raises:
        ValueError: Parameters are sharded or distributed over ranks (the trainer's
            `hf.save_weights` writes those), or some experts' adapters were not added by `add_lora`.
            The model is then unchanged.

    Example:
        >>> import torch
        >>> from tilewright.nn import add_lora, merge_and_unload
        >>> model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 32)})
        >>> paths = add_lora(model, rank=4, alpha=8)
        >>> merge_and_unload(model)
        ModuleDict(
          (up_proj): Linear(in_features=64, out_features=32, bias=True)
        )
    """
    kinds = (LoRALinear, LoRAExperts, QuantizedLinear, QuantizedExperts)
    modules = {path: m for path, m in model.named_modules() if isinstance(m, kinds)}
    for path, module in modules.items():
        if any(map(is_sharded, module.parameters())) or getattr(module, "group", None) is not None:
            raise ValueError(
                f"{path}: its weights are sharded over ranks; merge_and_unload requires a model "
                "that is not sharded (trainer.hf.save_weights writes sharded ones)"
            )
        if isinstance(module, LoRAExperts) and module.replaced is None:
            raise ValueError(
                f"{path}: the original module of these experts is not known; merge_and_unload takes "
                "experts that add_lora gave adapters"
            )
    for path, module in modules.items():
        stem, _, name = path.rpartition(".")
        if isinstance(modules.get(stem), Adapted):
            continue  # the base of adapters
        if isinstance(module, QuantizedExperts):
            q, parent = module.weight(), model.get_submodule(stem)
            delattr(parent, name)
            dense = dequantize(q, dtype=torch.float32).to(q.dtype)
            setattr(parent, name, nn.Parameter(dense, False))
        else:
            replace_module(model, path, _plain(module))
    for _, module in saved_modules(model):
        mark(module, False)
    module: Any
    for module in model.modules():
        if is_guarded(module):
            del module.save_pretrained
        if getattr(module, "quantization_method", None) == "tilewright":  # set by from_pretrained
            module.hf_quantizer.remove_quantization_config(module)
    return model


def _plain(module: LoRALinear | LoRAExperts | QuantizedLinear) -> nn.Module:
    """The dense layer, with its adapters added to its weight."""
    if isinstance(module, LoRAExperts):
        return _plain_experts(module)
    if isinstance(module, LoRALinear) and isinstance(module.base, nn.Linear):
        module.merge_()
        return module.base
    base = module.base if isinstance(module, LoRALinear) else module
    assert isinstance(base, QuantizedLinear)
    weight = module.merged_weight() if isinstance(module, LoRALinear) else base.dense()
    plain = base.dense_class(
        base.in_features, base.out_features, bias=base.bias is not None, device="meta"
    )
    plain.weight = nn.Parameter(weight.to(base.weights()[0].dtype), False)
    if base.bias is not None:
        plain.bias = base.bias
    return plain


def _plain_experts(module: LoRAExperts) -> nn.Module:
    """The module that the experts with adapters replaced, with dense weights."""
    plain = module.replaced
    assert plain is not None
    if not isinstance(module.down_proj, QuantizedExperts):
        module.merge_()
    for name in ("gate_up_proj", "down_proj"):
        stored = getattr(module, name)
        if isinstance(stored, QuantizedExperts):
            dense = merged_experts(module, name).to(stored.weight().dtype)
            stored = nn.Parameter(dense, False)
        setattr(plain, name, stored)
    return plain
