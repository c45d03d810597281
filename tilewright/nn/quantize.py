"""Quantizes the weights of whole models in place: `quantize_` all linear layers of any model, with
defaults and a report, `quantize_model` the projections of decoder layers.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tilewright.nn.experts import why_not
from tilewright.nn.modules import Linear
from tilewright.nn.projections import (
    all_paths,
    as_names,
    chosen_parts,
    experts,
    join_path,
    last_name,
    last_names,
    matches,
    projections,
    replace_module,
    unmatched,
)
from tilewright.nn.quantized_layers import QuantFormat, QuantizedExperts, QuantizedLinear, as_stored
from tilewright.nn.save_pretrained import guard_save_pretrained
from tilewright.nn.sharded import is_sharded
from tilewright.nn.weights import Adapted, adapted
from tilewright.ops.quant.quantize import Quantized

# Left by `quantize_`, by the last name: few weights that many values depend on.
HEADS = ("lm_head", "embed_out", "score", "classifier", "qa_outputs")
ROUTERS = ("gate", "router", "shared_expert_gate")

Format = QuantFormat | str | Callable[[torch.Tensor], Quantized]


class QuantizeReport(NamedTuple):
    """What `quantize_` did to a model.

    model: its class name.   format: the name of the format.
    changed: the paths of the quantized weights.   left: the paths of other modules with weights of
        this kind, and why they were left.
    before, after: bytes of the quantized weights.
    """

    model: str
    format: str
    changed: tuple[str, ...]
    left: dict[str, str]
    before: int
    after: int

    def __str__(self) -> str:
        size = " -> ".join(f"{n / 2**20:.1f} MiB" for n in (self.before, self.after))
        rows = [f"quantize_: {self.model}"]
        rows += [f"  changed  {self.format:<9}  {_names(self.changed)}: {size}"] * bool(
            self.changed
        )
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.left.items():
            by_reason.setdefault(reason, []).append(path)
        rows += [f"  left     {_names(paths)}: {reason}" for reason, paths in by_reason.items()]
        return "\n".join(rows)


def _names(paths: Iterable[str]) -> str:
    """How many of each last name."""
    counts = Counter(last_name(path) or "the model itself" for path in paths)
    return ", ".join(f"{n} {name}" for name, n in counts.items())


def quantize_(
    model: nn.Module,
    format: Format = "nf4",
    *,
    modules_to_not_convert: Iterable[str] = (),
    quiet: bool = False,
) -> QuantizeReport:
    """Quantizes the linear layers of any model in place, and the experts that can compute with
    quantized weights.

    Each weight is quantized once and frozen, one at a time; products read the quantized weights
    (`ops.quantized_linear`), also in a model that `accelerate` changed, before or after. Biases of
    quantized layers are frozen, too; all other parameters stay as they are. Output layers, routers,
    embeddings, layers that share a weight with another module or have hooks, and subclasses of
    nn.Linear, which may compute something else, are left unchanged. Code that reads `layer.weight`
    gets a dequantized copy of the weight at each access. `save_pretrained` of a transformers model
    then writes what bitsandbytes (nf4), compressed-tensors (nvfp4, mxfp8) and fine-grained FP8
    (block_fp8) read; `add_lora` adds adapters.

    Args:
        model: Modified in place. Must have no adapters yet.
        format: nf4 | nvfp4 | block_fp8 | mxfp8, a QuantFormat, or a function from a dense weight to
            a quantized one.
        modules_to_not_convert: Further modules to leave, experts too (see `matches`).
        quiet: Prints no report. Only rank 0 prints.

    Returns:
        The report, which is also printed.

    Raises:
        TypeError: `model`, `format` or `modules_to_not_convert` has a wrong type.
        ValueError: The model has adapters or sharded weights, an entry matches no module, or there
            is no layer to quantize: the model is then unchanged. Or a weight is not finite: the
            message names it, and layers before it are quantized.

    Example:
        >>> from torch import nn
        >>> from tilewright.nn import quantize_
        >>> model = nn.ModuleDict({"up": nn.Linear(64, 32), "lm_head": nn.Linear(32, 8)})
        >>> report = quantize_(model, "nf4")
        quantize_: ModuleDict
          changed  nf4        1 up: 0.0 MiB -> 0.0 MiB
          left     1 lm_head: an output layer
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    format = _format(format)
    skip = as_names("modules_to_not_convert", modules_to_not_convert)
    linear, left = linear_layers(model, skip)
    if isinstance(model, nn.Linear):
        raise ValueError(
            "model must be a module that contains linear layers, got a linear layer, which cannot "
            "be replaced in place; QuantizedLinear(QuantFormat(...)(layer.weight)) quantizes it"
        )
    paths = linear + _experts(model, left, skip)
    if not paths:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in list(left.items())[:4])
        raise ValueError(f"model has no layer to quantize ({reasons or 'no linear layers'})")
    done: list[str] = []
    before = after = 0
    guard_save_pretrained(model)
    for path in paths:
        dense = sum(p.nbytes for p in _weights(model.get_submodule(path)))
        done += quantize_at(model, path, lambda weight: as_stored(format(weight)))
        before += dense
        after += sum(b.nbytes for b in model.get_submodule(path).buffers())
    name = format.name if isinstance(format, QuantFormat) else getattr(format, "__name__", "given")
    report = QuantizeReport(type(model).__name__, name, tuple(done), left, before, after)
    if not quiet and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        print(report)
    return report


def linear_layers(
    model: nn.Module, modules_to_not_convert: Iterable[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """The paths of the linear layers to quantize, and of those left, with the reason.

    Raises ValueError for adapters, for sharded weights and for entries that match nothing.
    """
    skip = as_names("modules_to_not_convert", modules_to_not_convert)
    modules = dict(model.named_modules())
    if wrong := unmatched(skip, modules):
        raise ValueError(
            f"modules_to_not_convert: {', '.join(map(repr, wrong))} match no module; there are "
            f"{last_names(model)}"
        )
    for path, module in modules.items():
        if isinstance(module, Adapted) or hasattr(module, "lora_A"):  # PEFT's
            raise ValueError(f"{path or 'the model'} has adapters; quantize the model before")
    output = getattr(model, "get_output_embeddings", lambda: None)()
    # A module at two paths, and a tensor under two names, count twice.
    shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    # Those that transformers ties when a model has been loaded.
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    tied_names = {*tied, *tied.values()}
    chosen, left = [], {}
    for path, module in modules.items():
        if isinstance(module, nn.Embedding):
            left[path] = "an embedding"
        elif isinstance(module, QuantizedLinear):
            left[path] = "quantized already"
        elif isinstance(module, nn.Linear):
            if is_sharded(module.weight):
                raise ValueError(f"{path} is sharded over ranks; quantize the model before that")
            reason = _why_left(path, module, skip, module is output, shared)
            if f"{path}.weight" in tied_names:
                reason = reason or "shares its weight with another module"
            reason = reason or _why_unreadable_in(model, path)
            if reason is None:
                chosen.append(path)
            else:
                left[path] = reason
    return chosen, left


def _why_left(
    path: str, module: nn.Linear, skip: list[str], is_output: bool, shared: Counter
) -> str | None:
    if any(matches(entry, path) for entry in skip):
        return "named in modules_to_not_convert"
    if is_output or any(name in HEADS for name in path.split(".")):
        return "an output layer"
    if last_name(path) in ROUTERS:
        return "a router, by its name"
    if not module.weight.numel():
        return "has no elements"
    if shared[id(module.weight)] > 1:
        return "shares its weight with another module"
    if type(module) not in (nn.Linear, Linear):
        return f"a subclass of Linear ({type(module).__name__}), which may compute something else"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind) for kind in hooks) or "forward" in module.__dict__:
        return "has hooks or a forward of its own, which the new layer would not have"
    return None


def _why_unreadable_in(model: nn.Module, path: str) -> str | None:
    """Why transformers' readers of quantized folders would not take this layer as quantized."""
    if not hasattr(model, "save_pretrained"):
        return None
    # They leave these dense, by the ends or the beginnings of paths.
    for name in getattr(model, "_keep_in_fp32_modules", None) or ():
        if path.endswith(name) or re.match(rf"(?:{name})(?:(?<=\.)|(?=\.|$))", path):
            return f"kept in float32 by the model ({name})"
    if "weight" in path:
        return (
            "has 'weight' in its name, which transformers' readers of quantized folders search for"
        )
    return None


def _experts(model: nn.Module, left: dict[str, str], skip: list[str]) -> list[str]:
    """The paths of the experts modules to quantize; notes others in `left`. Raises ValueError for
    sharded ones.
    """
    chosen = []
    for path, module, _ in experts(model):
        if any(is_sharded(weight) for weight in _weights(module)):
            raise ValueError(f"{path} is sharded over ranks; quantize the model before that")
        reason = why_not(module, adapters=True)
        if any(matches(entry, path) for entry in skip):
            reason = "named in modules_to_not_convert"
        elif isinstance(module.down_proj, QuantizedExperts):
            reason = "quantized already"
        elif reason is None and not hasattr(module, "set_noise"):
            reason = "experts that compute with dense weights only"
        if reason is None:
            chosen.append(path)
        else:
            left[path] = reason
    return chosen


def _weights(module: nn.Module) -> list[nn.Parameter]:
    names = ("weight", "gate_up_proj", "down_proj")
    attributes = (getattr(module, name, None) for name in names)
    return [p for p in attributes if isinstance(p, nn.Parameter)]


def _format(format: Format) -> Callable[[torch.Tensor], Quantized]:
    if isinstance(format, str):
        return QuantFormat(format)
    if not callable(format):
        raise TypeError(
            f"format must be a QuantFormat, the name of one or a function, got {format!r}"
        )
    return format


# ---- the projections of decoder layers


def quantize_model(
    model: nn.Module,
    format: Format,
    *,
    exclude: Iterable[str] = (),
    strict: bool = True,
) -> list[str]:
    """Quantizes the projections of the decoder layers, experts included, one at a time.

    Linear layers become QuantizedLinear, expert tensors QuantizedExperts. A model on the meta
    device is converted without values, to be filled later. `quantize_` takes any linear layer and
    reports what it did. `save_pretrained` of a transformers model then writes the layouts of
    bitsandbytes, compressed-tensors and fine-grained FP8.

    Args:
        model: Modified in place. Must have no adapters yet.
        format: A QuantFormat, its name, or a function from a dense weight to a quantized one.
        exclude: Modules to leave unchanged (see `matches`).
        strict: Raise if an entry of `exclude` matches no module.

    Returns:
        The paths of the quantized modules.

    Raises:
        TypeError: `format` or `exclude` has a wrong type.
        ValueError: The model has adapters; `exclude` names only some parts of a fused module; or an
            experts module, such as one of another library, cannot compute with quantized weights
            (it has no `set_noise`). The model is then unchanged. Or a weight is not finite: the
            message names it, and modules before it are quantized.

    Example:
        >>> from torch import nn
        >>> from tilewright.nn import quantize_model
        >>> model = nn.ModuleDict({"up_proj": nn.Linear(64, 32), "lm_head": nn.Linear(32, 8)})
        >>> quantize_model(model, "nf4")
        ['up_proj']
    """
    exclude = as_names("exclude", exclude)
    format = _format(format)
    if paths := [path for path, _ in adapted(model)]:
        raise ValueError(
            f"{paths[0] or 'the model'} has adapters; call quantize_model before add_lora"
        )
    if strict and (wrong := unmatched(exclude, (path for path, _ in all_paths(model)))):
        raise ValueError(
            f"exclude: {', '.join(map(repr, wrong))} match no module; there are {last_names(model)}"
        )
    done: list[str] = []
    # Paths, not modules: a reference would keep the dense weights of all of them.
    paths = _to_quantize(model, exclude)
    guard_save_pretrained(model)
    for path in paths:
        done += quantize_at(model, path, format)
    return done


def _to_quantize(model: nn.Module, exclude: list[str]) -> list[str]:
    """The paths of the modules to quantize. Raises ValueError for unsupported ones."""
    paths = []
    for path, module, parts in itertools.chain(projections(model), experts(model)):
        excluded = chosen_parts(exclude, path, parts)
        if excluded and len(excluded) < len(parts):
            raise ValueError(
                f"exclude names {', '.join(excluded)} and not the rest of {path}; name all of it, "
                "or keep the projections apart (merge_qkv = False)"
            )
        if excluded or isinstance(module, QuantizedLinear):
            continue
        if not isinstance(module, nn.Linear):
            reason = why_not(module, adapters=True)
            if reason is None and not hasattr(module, "set_noise"):
                reason = "compute with dense weights only (there is no `set_noise`)"
            if reason:
                raise ValueError(
                    f"{path}: experts of {type(module).__name__} {reason}, so they cannot be "
                    "quantized; name them in exclude"
                )
        paths.append(path)
    return paths


def _quantized(format: Callable, weight: torch.Tensor, path: str) -> Quantized:
    try:
        return format(weight.detach())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def quantize_at(model: nn.Module, path: str, format: Callable) -> list[str]:
    """Quantizes one module, and returns the paths of its projections."""
    module = model.get_submodule(path)
    if isinstance(module, nn.Linear):
        quantized = QuantizedLinear(_quantized(format, module.weight, path), module.bias)
        if isinstance(module, Linear):
            quantized.dense_class = Linear
        replace_module(model, path, quantized)
        return [path]
    done = []
    for name in ("gate_up_proj", "down_proj"):
        if isinstance(getattr(module, name), nn.Parameter):
            part = getattr(module, name)
            q = QuantizedExperts(_quantized(format, part, join_path(path, name)))
            delattr(module, name)
            setattr(module, name, q)
            done.append(join_path(path, name))
    return done
