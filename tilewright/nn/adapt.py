"""Adapters and quantized weights in whole models.

    quantize_model(model, "nf4")                          # optional: QLoRA
    add_lora(model, rank=16, alpha=32)
    ...
    save_adapter(model, "adapter")                        # what `peft` loads
    merge_and_unload(model)                               # plain layers again

Only the adapters learn. `projections.py` finds the layers, `peft.py` writes and reads PEFT's files.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tilewright.nn.experts import why_not
from tilewright.nn.lora import LoRALinear
from tilewright.nn.lora_experts import LoRAExperts
from tilewright.nn.modules import Linear
from tilewright.nn.projections import (
    FUSED,
    OF_EXPERTS,
    PROJECTIONS,
    all_paths,
    chosen_parts,
    experts,
    join_path,
    last_names,
    projections,
    rows_unknown,
    unmatched,
)
from tilewright.nn.quantized import QuantFormat, QuantizedExperts, QuantizedLinear
from tilewright.nn.save_pretrained import guard_save_pretrained, is_guarded
from tilewright.nn.sharded import is_sharded
from tilewright.nn.weights import Adapted, adapted, merged_experts
from tilewright.ops.aqn import AQN
from tilewright.ops.quantize import Quantized
from tilewright.ops.quantized_linear import dequantize


def _entries(name: str, given: Iterable[str]) -> list[str]:
    if isinstance(given, str):  # a list of its letters otherwise
        raise TypeError(f"{name} must be a list of names, got the text {given!r}")
    return list(given)


def quantize_model(
    model: nn.Module,
    format: QuantFormat | str | Callable[[torch.Tensor], Quantized],
    *,
    exclude: Iterable[str] = (),
    strict: bool = True,
) -> list[str]:
    """Quantises the projections of the decoder layers, experts' too, one at a time, and returns
    their paths.

    format: a QuantFormat, or the name of one ("nf4"), or what else makes a quantized tensor of a
    dense one.
    exclude: modules that stay as they are (see `matches`).   strict: what of it matches no module
    is an error. Linear layers become QuantizedLinear, experts' tensors QuantizedExperts. A model on
    the meta device becomes one to fill later. `save_pretrained` of a transformers model then writes
    NF4 as bitsandbytes does, and refuses what from_pretrained could not read. Raises ValueError,
    and changes nothing, for a model with adapters (it is quantised first), for exclusions of some
    of what is fused, and for experts of a module that does not compute with quantised ones: those
    of modules without `set_noise`, as other libraries' are.
    """
    exclude, done = _entries("exclude", exclude), []
    if isinstance(format, str):
        format = QuantFormat(format)
    elif not callable(format):
        raise TypeError(
            f"format must be a QuantFormat, the name of one or a function, got {format!r}"
        )
    if there := [path for path, _ in adapted(model)]:
        raise ValueError(
            f"{there[0] or 'the model'} has adapters; call quantize_model before add_lora"
        )
    if strict and (wrong := unmatched(exclude, (path for path, _ in all_paths(model)))):
        raise ValueError(
            f"exclude: {', '.join(map(repr, wrong))} match no module; there are {last_names(model)}"
        )
    for path in _to_quantize(
        model, exclude
    ):  # paths: a reference here would keep the dense weights of all modules
        module = model.get_submodule(path)
        if isinstance(module, nn.Linear):
            quantized = QuantizedLinear(format(module.weight.detach()), module.bias)
            if isinstance(module, Linear):
                quantized.dense_class = Linear
            _replace(model, path, quantized)
            done.append(path)
            continue
        for name in ("gate_up_proj", "down_proj"):
            if isinstance(getattr(module, name), nn.Parameter):
                q = QuantizedExperts(format(getattr(module, name).detach()))
                delattr(module, name)
                setattr(module, name, q)
                done.append(join_path(path, name))
    guard_save_pretrained(model)
    return done


def _to_quantize(model: nn.Module, exclude: list[str]) -> list[str]:
    found = []
    for path, module, parts in itertools.chain(projections(model), experts(model)):
        out = chosen_parts(exclude, path, parts)
        if out and len(out) < len(parts):
            raise ValueError(
                f"exclude names {', '.join(out)} and not the rest of {path}; name all of it, or "
                f"keep the "
                "projections apart (merge_qkv = False)"
            )
        if out or isinstance(module, QuantizedLinear):
            continue
        if not isinstance(module, nn.Linear):
            reason = why_not(module, adapters=True)
            if reason is None and not hasattr(module, "set_noise"):
                reason = "compute with dense weights only (there is no `set_noise`)"
            if reason:
                raise ValueError(
                    f"{path}: experts of {type(module).__name__} {reason}, so they cannot be "
                    f"quantised; "
                    "name them in exclude"
                )
        found.append(path)
    return found


def add_lora(
    model: nn.Module,
    targets: Iterable[str] | None = None,
    *,
    rank: int = 16,
    alpha: float = 16,
    rslora: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Puts adapters on projections, freezes all else, and returns the paths of what has adapters
    now.

    targets: which ones (see `matches`), by their own names also where several are fused; None: all
        of PROJECTIONS. In a transformers model a layer that fuses several, as Phi-3's do, is one
        and has one adapter.
    rank, alpha, rslora, dtype: as LoRALinear and LoRAExperts have them; each expert has adapters of
    its own. `save_pretrained` of a transformers model then refuses to write what from_pretrained
    could not read. Raises ValueError, naming them and changing nothing, for no targets, for some
    that match no projection (heads, embeddings and routers are none) or only some of what experts
    have; for experts that are not SiLU(gate) * up without biases; for a fused layer if the rows of
    its parts are not known; and for a model that has adapters.
    """
    if there := [path for path, _ in adapted(model)]:
        raise ValueError(
            f"{there[0] or 'the model'} has adapters already; name all targets in one call, on a "
            f"model "
            "without adapters"
        )
    linear, mixtures = list(projections(model)), list(experts(model))
    every = [p for path, _, parts in (*linear, *mixtures) for p in (path, *parts)]
    if not every:
        raise ValueError(
            f"the model has no linear layers called {', '.join((*PROJECTIONS, *FUSED))}"
        )
    named, targets = (
        targets is not None,
        _entries("targets", (*PROJECTIONS, *FUSED) if targets is None else targets),
    )
    if not targets:
        raise ValueError("targets must name projections, got []; None means all of them")
    if named and (wrong := unmatched(targets, every)):
        names = sorted({p.rpartition(".")[2] for p in every})
        raise ValueError(
            f"targets: {', '.join(map(repr, wrong))} match no projection; there are "
            f"{', '.join(names)}"
        )
    options: dict[str, Any] = {"rslora": rslora, "dtype": dtype}
    made, done = {}, []
    chosen = {path: chosen_parts(targets, path, parts) for path, _, parts in (*linear, *mixtures)}
    for path, module, parts in linear:
        if chosen[path] and None in parts.values():
            raise ValueError(rows_unknown(path, module))
    for path, module, parts in mixtures:
        if chosen[path] and not path:
            raise ValueError(
                "the model is itself a module of experts; call add_lora on the module that holds it"
            )
        if chosen[path] and len(chosen[path]) < len(parts):
            raise ValueError(
                f"targets: {path} has adapters on all of {', '.join(OF_EXPERTS)} or on none"
            )
        if chosen[path] and (reason := why_not(module, adapters=True)):
            raise ValueError(
                f"{path}: experts of {type(module).__name__} {reason}; adapters take SiLU(gate) * "
                f"up "
                "without biases. Name targets without them"
            )
    for path, module, parts in linear:
        if chosen[path]:
            fused = (
                {
                    "parts": {p.rpartition(".")[2]: rows for p, rows in parts.items()},
                    "targets": [p.rpartition(".")[2] for p in chosen[path]],
                }
                if len(parts) > 1
                else {}
            )
            made[path] = LoRALinear(module, rank, alpha, **fused, **options)
            done += chosen[path]
    for path, module, _ in mixtures:
        if chosen[path]:
            gate_up, down = (
                w.weight() if isinstance(w, QuantizedExperts) else w
                for w in (getattr(module, name) for name in ("gate_up_proj", "down_proj"))
            )
            made[path] = LoRAExperts(gate_up, down, rank, alpha, **options)
            done += chosen[path]
    model.requires_grad_(False)  # before the adapters are in it
    for path, module in made.items():
        if isinstance(module, LoRAExperts):
            module.take_the_place_of(model.get_submodule(path))
        _replace(model, path, module)
    guard_save_pretrained(model)
    return done


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    stem, _, name = path.rpartition(".")
    module.train(model.get_submodule(path).training)
    setattr(model.get_submodule(stem), name, module)


def merge_adapters(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """`merge_` of every module with adapters."""
    for _, module in adapted(model):
        module.merge_(generator)


@torch.no_grad()
def merge_and_unload(model: nn.Module) -> nn.Module:
    """Makes plain layers of what `quantize_model` and `add_lora` put into the model, in place, and
    returns the model: nn.Linear, and the experts' modules as they were, with tensors.
    `save_pretrained` then works as ever.

    Adapters are added in float32, and the sum is rounded once, to the dtype of the weight. What is
    quantized is dequantized, to the dtype that it was quantized from, and not quantized again.
    Weights stay frozen. Raises ValueError, and changes nothing, for parameters that are sharded or
    spread over processes (the trainer's `hf.save_weights` writes those), and for experts whose
    adapters `add_lora` did not put there.
    """
    kinds = (LoRALinear, LoRAExperts, QuantizedLinear, QuantizedExperts)
    found = {path: m for path, m in model.named_modules() if isinstance(m, kinds)}
    for path, module in found.items():
        if any(map(is_sharded, module.parameters())) or getattr(module, "group", None) is not None:
            raise ValueError(
                f"{path}: its weights are spread over processes; merge_and_unload takes a model "
                f"that each "
                "process has whole (trainer.hf.save_weights writes spread ones)"
            )
        if isinstance(module, LoRAExperts) and module.replaced is None:
            raise ValueError(
                f"{path}: what these experts were before is not known; merge_and_unload takes "
                f"experts "
                "that add_lora gave adapters"
            )
    for path, module in found.items():
        stem, _, name = path.rpartition(".")
        if isinstance(found.get(stem), Adapted):
            continue  # the base of adapters
        if isinstance(module, QuantizedExperts):
            q, parent = module.weight(), model.get_submodule(stem)
            delattr(parent, name)
            setattr(
                parent, name, nn.Parameter(dequantize(q, dtype=torch.float32).to(q.dtype), False)
            )
        else:
            _replace(model, path, _plain(module))
    for module in model.modules():
        if is_guarded(module):
            del module.save_pretrained
    return model


def _plain(module: LoRALinear | LoRAExperts | QuantizedLinear) -> nn.Module:
    """The layer without adapters, which are added to its weight, and not quantized."""
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
    dense = not isinstance(module.down_proj, QuantizedExperts)
    if dense:
        module.merge_()
    for name in ("gate_up_proj", "down_proj"):
        stored = getattr(module, name)
        if isinstance(stored, QuantizedExperts):
            full = merged_experts(module, name).to(stored.weight().dtype)
            stored = nn.Parameter(full, False)
        setattr(plain, name, stored)
    return plain


def reset_adapters(model: nn.Module, generator: torch.Generator | None = None) -> None:
    for _, module in adapted(model):
        module.reset_parameters(generator)


def set_noise(model: nn.Module, noise: AQN | None) -> None:
    """Noise on every quantised weight in the forward passes to come, in training mode only: each
    weight's is its own.
    None: no noise.
    """
    layer = 0
    module: Any
    for module in model.modules():
        if (take := getattr(module, "set_noise", None)) is not None:
            take(None if noise is None else dataclasses.replace(noise, layer=noise.layer + layer))
            layer += module.noise_layers
