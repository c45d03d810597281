"""Adapters and quantised weights in whole models, and adapters in PEFT's files.

    quantize_model(model, "nf4")                          # optional: QLoRA; or QuantFormat("nf4",
    64) add_lora(model, rank=16, alpha=32) ... save_adapter(model, "adapter")
    # what `peft` loads merge_and_unload(model)                               # plain layers again,
    which `save_pretrained` writes

Only the adapters learn. Layers are found by the names that Hugging Face's models give them, also
where several are fused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import itertools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from tilewright.lora import LoRALinear, QuantFormat, QuantizedLinear, _sharded, _whole
from tilewright.lora_experts import (
    LoRAExperts,
    QuantizedExperts,
    check_dtype,
    read_peft,
    settings,
    unsupported,
)
from tilewright.nn import Linear
from tilewright.ops.aqn import AQN
from tilewright.ops.nf4_format import NF4
from tilewright.ops.quantize import Quantized
from tilewright.ops.quantized_linear import dequantize
from tilewright.registry import short

# What is a projection of a decoder layer, by its last name; the head, embeddings and routers are
# not.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
Adapted = LoRALinear | LoRAExperts
Stored = nn.Parameter | QuantizedLinear | QuantizedExperts


def matches(entry: str, path: str) -> bool:
    """Whether an entry of a list of modules means this path: some of its names in a row ("q_proj",
    "layers.0.mlp"), or with * or ? a pattern of the whole path, or after "re:" a regular expression
    of its beginning.
    """
    if entry.startswith("re:"):
        try:
            return re.match(entry[3:], path) is not None
        except re.error as error:
            raise ValueError(
                f'{entry!r} must be a regular expression after "re:": {error}'
            ) from error
    if set(entry) & set("*?"):
        return fnmatch.fnmatchcase(path, entry)
    return f".{entry}." in f".{path}."


def projections(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, int | None]]]:
    """The linear projections without adapters: path, module, and the paths of those that it fuses
    with their rows; None where these are not known.
    """
    for path, module in model.named_modules():
        stem, _, name = path.rpartition(".")
        if not isinstance(module, (nn.Linear, QuantizedLinear)) or name not in (
            *PROJECTIONS,
            *FUSED,
        ):
            continue
        names, rows = _fused(model, name) or (name,), module.out_features
        if name == "qkv_proj" and len(names) > 1:
            widths = list(getattr(model.get_submodule(stem), "widths", ()))
        else:
            widths = [] if rows % len(names) else [rows // len(names)] * len(names)
        if len(widths) != len(names) or sum(widths) != rows:
            widths = [None] * len(names)
        yield path, module, {_join(stem, n): w for n, w in zip(names, widths, strict=True)}


def _fused(model: nn.Module, name: str) -> tuple[str, ...]:
    """The projections that a layer of that name fuses. None in a transformers model: what is one
    layer there, as in Phi-3, has one adapter in PEFT's files.
    """
    return () if hasattr(model, "save_pretrained") else FUSED.get(name, ())


def _rows_unknown(path: str, module: nn.Module) -> str:
    name = path.rpartition(".")[2]
    if name == "qkv_proj":
        return (
            f"{path}: how its {module.out_features} rows divide among {', '.join(FUSED[name])} is "
            f"not known; the "
            "module above it must have `widths`, the rows of each"
        )
    return f"{path}: {module.out_features} rows do not divide among {', '.join(FUSED[name])}"


def experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """The modules that hold experts as tensors [E, ...], without adapters: path, module, and the
    paths of what they fuse.
    """
    for path, module in model.named_modules():
        weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
        if not isinstance(module, LoRAExperts) and all(
            isinstance(w, QuantizedExperts) or (isinstance(w, nn.Parameter) and w.dim() == 3)
            for w in weights
        ):
            yield path, module, [_join(path, name) for name in OF_EXPERTS]


def _why_not(module: nn.Module) -> str | None:
    """None if LoRAExperts computes what this module with experts does, as far as that shows;
    else the reasons.
    """
    reasons = []
    gate_up, down = (tuple(shape_of(w)) for w in (module.gate_up_proj, module.down_proj))
    if getattr(module, "is_transposed", False) or gate_up != (down[0], 2 * down[2], down[1]):
        reasons.append(
            f"do not hold gate_up_proj as [E, 2 I, H] and down_proj as [E, H, I] (they are "
            f"{list(gate_up)} "
            f"and {list(down)})"
        )
    if not getattr(module, "has_gate", True):
        reasons.append("have no gate")
    biases = [name for name, _ in module.named_parameters(recurse=False) if name.endswith("_bias")]
    if getattr(module, "has_bias", False) or biases:
        reasons.append(f"have biases {biases}" if biases else "have biases")
    if not getattr(module, "is_concatenated", True):
        reasons.append("interleave gates with ups")
    if getattr(module, "has_post_expert_norm", False):
        reasons.append("normalise what each of them gives")
    # transformers puts its own function where a class has none.
    gate = getattr(type(module), "_apply_gate", None)
    if gate is not None and gate.__module__ != "transformers.integrations.moe":
        reasons.append("apply their gate in a way of their own (_apply_gate)")
    elif (act := getattr(module, "act_fn", None)) is not None and not _is_silu(act):
        reasons.append(
            f"are activated by {getattr(act, '__name__', type(act).__name__)} and not by SiLU"
        )
    return ", ".join(reasons) or None


@torch.no_grad()
def _is_silu(act: Any) -> bool:
    x = torch.linspace(-4, 4, 9, device="cpu")
    try:
        return torch.allclose(act(x.clone()), nn.functional.silu(x))
    except Exception:  # whatever it takes, it is not what SiLU takes
        return False


def unmatched(entries: Iterable[str], paths: Iterable[str]) -> list[str]:
    paths = list(paths)
    return [e for e in entries if not any(matches(e, p) for p in paths)]


def _chosen(entries: list[str], path: str, parts: Iterable[str]) -> list[str]:
    """The parts that entries mean, or that are of a module that entries mean."""
    return [p for p in parts if any(matches(e, p) or matches(e, path) for e in entries)]


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
    if strict and (wrong := unmatched(exclude, (path for path, _ in _paths(model)))):
        raise ValueError(
            f"exclude: {', '.join(map(repr, wrong))} match no module; there are "
            f"{_last_names(model)}"
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
                done.append(_join(path, name))
    _guard_save_pretrained(model)
    return done


def _to_quantize(model: nn.Module, exclude: list[str]) -> list[str]:
    found = []
    for path, module, parts in itertools.chain(projections(model), experts(model)):
        out = _chosen(exclude, path, parts)
        if out and len(out) < len(parts):
            raise ValueError(
                f"exclude names {', '.join(out)} and not the rest of {path}; name all of it, or "
                f"keep the "
                "projections apart (merge_qkv = False)"
            )
        if out or isinstance(module, QuantizedLinear):
            continue
        if not isinstance(module, nn.Linear):
            reason = _why_not(module)
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
    chosen = {path: _chosen(targets, path, parts) for path, _, parts in (*linear, *mixtures)}
    for path, module, parts in linear:
        if chosen[path] and None in parts.values():
            raise ValueError(_rows_unknown(path, module))
    for path, module, parts in mixtures:
        if chosen[path] and not path:
            raise ValueError(
                "the model is itself a module of experts; call add_lora on the module that holds it"
            )
        if chosen[path] and len(chosen[path]) < len(parts):
            raise ValueError(
                f"targets: {path} has adapters on all of {', '.join(OF_EXPERTS)} or on none"
            )
        if chosen[path] and (reason := _why_not(module)):
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
            weights = [
                w.weight() if isinstance(w, QuantizedExperts) else w
                for w in (module.gate_up_proj, module.down_proj)
            ]
            made[path] = LoRAExperts(*weights, rank, alpha, **options)
            done += chosen[path]
    model.requires_grad_(False)  # before the adapters are in it
    for path, module in made.items():
        if isinstance(module, LoRAExperts):
            module.take_the_place_of(model.get_submodule(path))
        _replace(model, path, module)
    _guard_save_pretrained(model)
    return done


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _paths(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module, and those that others fuse."""
    for path, module in model.named_modules():
        yield path, module
        stem, _, name = path.rpartition(".")
        for part in _fused(model, name):
            yield _join(stem, part), module
    for _, module, parts in experts(model):
        for part in parts:
            yield part, module


def _last_names(model: nn.Module) -> str:
    return ", ".join(
        sorted({p.rpartition(".")[2] for p, m in _paths(model) if not list(m.children())} - {""})
    )


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    stem, _, name = path.rpartition(".")
    module.train(model.get_submodule(path).training)
    setattr(model.get_submodule(stem), name, module)


def adapted(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """The modules with adapters, in order."""
    for path, module in model.named_modules():
        if isinstance(module, Adapted):
            yield path, module


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name is an adapter's."""
    return name.rpartition(".")[2].startswith("lora_")


def base_weights(model: nn.Module) -> Iterator[tuple[str, Stored]]:
    """What the model had before `quantize_model` and `add_lora`, by its names then: each is a
    parameter, or the module that holds it quantised.
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
    """What a module of `base_weights` holds; [] of a parameter."""
    if isinstance(stored, nn.Parameter):
        return []
    return [stored.weight()] if isinstance(stored, QuantizedExperts) else stored.weights()


def shape_of(stored: Stored) -> tuple[int, ...]:
    """Of the weight that it is or stands for."""
    if isinstance(stored, QuantizedLinear):
        return stored.out_features, stored.in_features
    return tuple(stored.weight().shape if isinstance(stored, QuantizedExperts) else stored.shape)


def fill(stored: QuantizedLinear | QuantizedExperts, weights: list[Quantized]) -> None:
    """Gives it other weights of the same size."""
    if isinstance(stored, QuantizedLinear):
        stored.fill(weights)
    else:
        [q] = weights
        stored.fill(q)


@torch.no_grad()
def dense_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.dtype]]:
    """`base_weights`, whole and dense, with the adapters added in float32; and the dtype that each
    was trained in, of quantised ones that of the model's other weights. Changes nothing. Of a
    sharded model every rank must run it to the end.
    """
    owners = dict(adapted(model))
    other = next(model.parameters()).dtype
    for name, stored in base_weights(model):
        dtype = stored.dtype if isinstance(stored, nn.Parameter) else other
        owner = owners.get(name.removesuffix(".weight"), owners.get(name.rpartition(".")[0]))
        if isinstance(owner, LoRALinear) and name.endswith(".weight"):
            full = owner.merged_weight()
        elif isinstance(owner, LoRAExperts):
            full = _merged_experts(owner, name.rpartition(".")[2])
        elif isinstance(stored, nn.Parameter):
            full = _whole(stored.detach())
        else:
            full = torch.cat([dequantize(q, dtype=torch.float32) for q in quantized(stored)])
        yield name, full, dtype


def _merged_experts(module: LoRAExperts, name: str) -> torch.Tensor:
    stored = getattr(module, name)
    full = (
        dequantize(stored.weight(), dtype=torch.float32)
        if isinstance(stored, QuantizedExperts)
        else _whole(stored.detach()).float().clone()
    )
    factors = {key: _whole(p).float() for key, p in module.adapters().items()}
    parts = ("gate", "up") if name == "gate_up_proj" else ("down",)
    module._add(full, [(factors[f"{part}_A"], factors[f"{part}_B"]) for part in parts])
    return full


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
        if any(map(_sharded, module.parameters())) or getattr(module, "group", None) is not None:
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
        if _guarded(module):
            del module.save_pretrained
    return model


def _plain(module: LoRALinear | LoRAExperts | QuantizedLinear) -> nn.Module:
    """The layer without adapters, which are added to its weight, and not quantized."""
    if isinstance(module, LoRAExperts):
        dense = not isinstance(module.down_proj, QuantizedExperts)
        if dense:
            module.merge_()
        for name in ("gate_up_proj", "down_proj"):
            stored = getattr(module, name)
            setattr(
                module.replaced,
                name,
                stored
                if dense
                else nn.Parameter(_merged_experts(module, name).to(stored.weight().dtype), False),
            )
        return module.replaced
    base = module.base if isinstance(module, LoRALinear) else module
    if isinstance(base, nn.Linear):
        module.merge_()
        return base
    weight = module.merged_weight() if isinstance(module, LoRALinear) else module.dense()
    plain = base.dense_class(base.in_features, base.out_features, device="meta")
    plain.weight, plain.bias = nn.Parameter(weight.to(base.weights()[0].dtype), False), base.bias
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
    for module in model.modules():
        if (take := getattr(module, "set_noise", None)) is not None:
            take(None if noise is None else dataclasses.replace(noise, layer=noise.layer + layer))
            layer += module.noise_layers


# ---- transformers' save_pretrained


def _guard_save_pretrained(model: nn.Module) -> None:
    """Transformers models take `_save_pretrained` in place of their own, which would write the
    names of adapters and of quantized bytes; from_pretrained does not know them, and begins such
    layers at random.
    """
    for module in model.modules():
        if hasattr(type(module), "save_pretrained") and not _guarded(module):
            module.save_pretrained = functools.partial(_save_pretrained, module)


def _guarded(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("save_pretrained"), "func", None) is _save_pretrained


def _save_pretrained(
    model: Any,
    save_directory: str | pathlib.Path,
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """What `save_pretrained` of a transformers model is, once it has adapters or quantized weights.

    Linear layers in NF4 are written as bitsandbytes writes them, and from_pretrained gives the same
    bytes. Raises ValueError, and writes nothing, for adapters and for other formats.
    """
    own, stored = type(model).save_pretrained, dict(base_weights(model))
    if any(True for _ in adapted(model)):
        raise ValueError(
            "save_pretrained cannot write adapters of tilewright: "
            "tilewright.adapt.save_adapter(model, "
            "folder) writes them for peft, and merge_and_unload(model) adds them to the weights, "
            "which "
            "save_pretrained then writes"
        )
    weights = {name: q for name, module in stored.items() for q in quantized(module)}
    if not weights:
        return own(
            model, save_directory, is_main_process=is_main_process, state_dict=state_dict, **options
        )
    other = next(
        (n for n, q in weights.items() if not isinstance(q, NF4) or len(quantized(stored[n])) > 1),
        None,
    )
    if other is not None or state_dict is not None:
        what = (
            "a state_dict of quantized weights"
            if other is None
            else f"{other} as {type(weights[other]).__name__}"
        )
        raise ValueError(
            f"save_pretrained cannot write {what}; it writes matrices in NF4, without a "
            f"state_dict. "
            "tilewright.adapt.merge_and_unload(model) dequantizes the weights, which "
            "save_pretrained then "
            "writes"
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
        return own(
            model, save_directory, is_main_process=is_main_process, state_dict=state, **options
        )
    finally:
        del model.config.quantization_config


# ---- PEFT's format


def save_adapter(
    model: nn.Module,
    folder: str | pathlib.Path,
    *,
    base_model: str | None = None,
    files: Iterable[str | pathlib.Path] = (),
) -> None:
    """Writes the folder that `peft` loads onto the transformers model of the same weights.

    base_model: its path or Hub id, for adapter_config.json.   files: further ones to copy into the
    folder. Files of these names are replaced, once all are written (see `publish`); whatever else
    the folder holds stays. Where training is distributed, every rank must call it. Raises
    ValueError for a model without adapters or with adapters that one file cannot hold, and for a
    folder that is a file.
    """
    target = target_folder(folder)
    found = list(adapted(model))
    if not found:
        raise ValueError("the model has no adapters")
    settings = {(m.rank, m.alpha, m.rslora) for _, m in found}
    if len(settings) > 1:
        raise ValueError(
            f"adapters differ in (rank, alpha, rslora): {sorted(settings)}; one file holds one of "
            f"each"
        )
    [(rank, alpha, rslora)] = settings
    tensors: dict[str, torch.Tensor] = {}
    of_experts: dict[str, Any] = {"target_parameters": [], "rank_pattern": {}, "alpha_pattern": {}}
    paths = []
    for path, module in found:
        if isinstance(module, LoRAExperts):
            written, entries = module.to_peft(path)
            tensors |= written
            of_experts["target_parameters"] += entries["target_parameters"]
            of_experts["rank_pattern"] |= entries["rank_pattern"]
            of_experts["alpha_pattern"] |= entries["alpha_pattern"]
            continue
        for name, A, B in module.adapters():
            paths.append(_part_path(path, name))
            for key, t in (("lora_A", A), ("lora_B", B)):
                tensors[f"base_model.model.{paths[-1]}.{key}.weight"] = t.to(
                    "cpu", copy=True
                ).contiguous()
    # Of a mixture of experts PEFT takes modules of these names for experts, so their weights are
    # named instead.
    mixture = any(isinstance(m, LoRAExperts) for _, m in found) or any(True for _ in experts(model))
    weights = [p for p in paths if mixture and p.rpartition(".")[2] in OF_EXPERTS]
    of_experts["target_parameters"] += [f"{p}.weight" for p in weights]
    paths = [p for p in paths if p not in weights]
    many = dist.is_available() and dist.is_initialized()
    if not many or dist.get_rank() == 0:
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": rank,
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "use_rslora": rslora,
            "target_modules": _target_names(model, paths),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
            "modules_to_save": None,
            "layers_to_transform": None,
            "rank_pattern": of_experts["rank_pattern"],
            "alpha_pattern": of_experts["alpha_pattern"],
            "target_parameters": of_experts["target_parameters"] or None,
        }
        with written_aside(target) as aside:
            save_file(tensors, aside / ADAPTER_FILE, metadata={"format": "pt"})
            (aside / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            for file in files:
                shutil.copy(file, aside)
            old = target / ADAPTER_CONFIG
            publish(
                aside,
                target,
                ADAPTER_FILE,
                ADAPTER_CONFIG,
                fits=old.is_file() and old.read_bytes() == (aside / ADAPTER_CONFIG).read_bytes(),
            )
    if many:
        dist.barrier()


def target_folder(folder: str | pathlib.Path) -> pathlib.Path:
    """Where a folder is to be written: the whole path. Raises ValueError if a file has the name."""
    target = pathlib.Path(folder).resolve()
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give a folder")
    return target


@contextlib.contextmanager
def written_aside(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty folder within `target`, which is made if need be: for files that `publish` moves
    into target.
    """
    aside = target / ".saving"
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    aside.mkdir(parents=True)
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def publish(
    aside: pathlib.Path,
    target: pathlib.Path,
    weights: str,
    settings: str,
    *,
    fits: bool,
    first: Iterable[str] = (),
    superseded: str | None = None,
    stale: Iterable[str] = (),
) -> None:
    """Moves the files of `aside` into `target`, each by one rename over what has its name. All else
    there stays.

    weights: the file by which readers find the weights.   first: those that it names, under names
    that are not taken.
    settings: the file that says what the weights are; it comes last.   fits: whether the settings
    that are there fit
        the new weights too. If not they go first: a reader then fails where it would mix the two.
    superseded: a file that goes with the arrival of `weights`, because readers may prefer it.
        stale: files that go at the end.
    So a process that is killed leaves the old files or the new ones as a reader finds them, or,
    between two settings that differ, weights without settings.
    """
    names, first = {p.name for p in aside.iterdir()}, list(first)
    for name in first:
        os.replace(aside / name, target / name)
    if not fits:
        (target / settings).unlink(missing_ok=True)
    os.replace(aside / weights, target / weights)
    if superseded is not None:
        (target / superseded).unlink(missing_ok=True)
    for name in (*sorted(names - {*first, weights, settings}), settings):
        os.replace(aside / name, target / name)
    for name in stale:
        (target / name).unlink(missing_ok=True)


def _part_path(path: str, name: str) -> str:
    stem, dot, _ = path.rpartition(".")
    return f"{stem}{dot}{name}" if name else path


def _target_names(model: nn.Module, paths: list[str]) -> list[str]:
    """Last names if all modules of those names have adapters, which is what they mean to
    `peft`; else whole paths.
    """
    names = {p.rpartition(".")[2] for p in paths}
    every = {
        p
        for path, module in _paths(model)
        for p in [path.removesuffix(".base")]
        if p.rpartition(".")[2] in names
        and isinstance(module, (nn.Linear, QuantizedLinear, LoRALinear))
    }
    return sorted(names) if every == set(paths) else sorted(paths)


def load_adapter(model: nn.Module, folder: str | pathlib.Path) -> None:
    """Puts the adapters of a folder in PEFT's format on the model; of a model that has adapters
    already, they must be the same ones, and are filled.

    Raises FileNotFoundError, or ValueError naming the file, and changes nothing, for what is not
    there, cannot be read, does not fit, or uses what is not here (DoRA, a rank for each module,
    ...).
    """
    folder = pathlib.Path(folder)
    for file in (ADAPTER_CONFIG, ADAPTER_FILE):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder}: no {file} there")
    config = read_json(folder / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder}: peft_type must be LORA, got {config.get('peft_type')!r}")
    if key := unsupported(config):
        raise ValueError(f"{folder}: {key} = {config[key]!r} is not supported")
    rank, alpha, rslora = settings(config, folder / ADAPTER_CONFIG)
    with open_tensors(folder / ADAPTER_FILE) as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for key, t in tensors.items():
        check_dtype(f"{folder / ADAPTER_FILE}: {key}", t)
    mixtures = [path for path, m in model.named_modules() if isinstance(m, LoRAExperts)] or [
        path for path, _, _ in experts(model)
    ]
    wanted = [
        path
        for path in mixtures
        if any(key.startswith(f"base_model.model.{path}.") for key in tensors)
    ]
    pairs = _pairs(
        folder,
        {
            key: t
            for key, t in tensors.items()
            if not any(key.startswith(f"base_model.model.{path}.") for path in wanted)
        },
    )
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in config.get(key) or ():
            if path := next((p for p in pairs if matches(rf"re:(.*\.)?({pattern})$", p)), None):
                raise ValueError(f"{folder}: {key} = {config[key]} is not supported, as for {path}")
    new = not any(True for _ in adapted(model))
    sizes: dict[str, tuple[int, int | None]]  # of each projection: its columns and rows
    if new:
        sizes = {
            p: (module.in_features, rows)
            for _, module, parts in projections(model)
            for p, rows in parts.items()
        }
        if missing := sorted(set(pairs) - set(sizes)):
            raise ValueError(f"{folder}: the model has no projections {', '.join(missing[:4])}")
    else:
        sizes = {}
        for path, module in adapted(model):
            want = (module.rank, module.alpha, module.rslora)
            if isinstance(module, LoRALinear):
                if want != (rank, alpha, rslora):
                    raise ValueError(
                        f"{folder}: (r, lora_alpha, use_rslora) is {(rank, alpha, rslora)}, the "
                        f"model's "
                        f"{want}"
                    )
                sizes |= {
                    _part_path(path, name): (module.in_features, stop - start)
                    for name, (start, stop) in module.slices.items()
                }
        if differ := sorted(
            set(pairs) ^ set(sizes)
            | {
                p
                for p in mixtures
                if p not in wanted and isinstance(model.get_submodule(p), LoRAExperts)
            }
        ):
            raise ValueError(
                f"{folder}: adapters of the file and of the model differ in {', '.join(differ[:4])}"
            )
    for path, found in pairs.items():
        columns, rows = sizes[path]
        for kind, shape in {"lora_A": (rank, columns), "lora_B": (rows, rank)}.items():
            if kind not in found or (None not in shape and tuple(found[kind].shape) != shape):
                got = list(found[kind].shape) if kind in found else "nothing"
                raise ValueError(f"{folder}: {path}.{kind} must be {list(shape)}, got {got}")
    for path in wanted:
        module = model.get_submodule(path)
        if isinstance(module, LoRAExperts):
            module.peft_values(tensors, config, path)
        elif _why_not(module) is None:  # else add_lora says why
            E, H, I = shape_of(module.down_proj)
            read_peft(
                tensors,
                config,
                path,
                (E, H, I),
                rank,
                alpha / (math.sqrt(rank) if rslora else rank),
            )
    if new:
        add_lora(
            model,
            [f"re:{re.escape(p)}$" for p in (*pairs, *wanted)],
            rank=rank,
            alpha=alpha,
            rslora=rslora,
        )
    for path, module in adapted(model):
        if isinstance(module, LoRAExperts):
            module.load_peft_(tensors, config, path)
        else:
            module.load_adapters(
                {
                    name: (found["lora_A"], found["lora_B"])
                    for name in module.slices
                    for found in [pairs[_part_path(path, name)]]
                }
            )


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The JSON object that a file holds. Raises ValueError, naming the file, if it holds none."""
    try:
        found = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: must hold a JSON object, got {type(found).__name__}")
    return found


def open_tensors(file: pathlib.Path) -> safe_open:
    """Raises ValueError, naming the file, if it is no safetensors."""
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: cannot be read as safetensors ({error})") from error


def _pairs(
    folder: pathlib.Path, tensors: dict[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """A and B of each module's path."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, t in tensors.items():
        path, _, kind = (
            key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        )
        if kind not in ("lora_A", "lora_B"):
            raise ValueError(f"{folder}: {key} is not supported")
        pairs.setdefault(path, {})[kind] = t
    return pairs
