"""The references of `tilewright verify`: a model of the configuration's class, with its classes as
they are on disk, transformers' eager attention and experts, and the same weights; in float64 (the
truth), and in the dtypes of the model (the eager twin).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import math
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tilewright.core import platform
from tilewright.nn.lora import LoRALinear
from tilewright.nn.quantized_layers import QuantizedLinear
from tilewright.ops.quant.quantized_linear import dequantize

NARROW = (torch.float32, torch.bfloat16, torch.float16)
CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
IGNORED = -100


class Unverifiable(ValueError):
    """The model, its configuration or the batch cannot be verified. The message is a sentence."""


class InFloat64(TorchFunctionMode):
    """Casts to and requests of a narrower floating dtype are for float64: models compute their
    norms, softmax, routing and rotary tables in float32 whatever their dtype.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in CASTS:
            func, args, kwargs = torch.Tensor.double, args[:1], {}
        args = tuple(_wide(a) for a in args)
        return func(*args, **{k: _wide(v) for k, v in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


@functools.cache
def pristine(name: str) -> ModuleType:
    """A module executed again from its file, under another name in the same package: libraries
    that patch a model replace classes and functions in the module itself.
    """
    module = importlib.import_module(name)
    package, _, last = name.rpartition(".")
    spec = importlib.util.spec_from_file_location(f"{package}.pristine_{last}", module.__file__)
    if spec is None or spec.loader is None:
        raise Unverifiable(f"{name}: its source cannot be read, so there is no reference for it")
    fresh = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = fresh
    try:
        spec.loader.exec_module(fresh)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return fresh


def reference_class(model: nn.Module) -> type:
    """The class of transformers that the model is of, from its module's file."""
    for cls in type(model).__mro__:
        name = cls.__module__
        if name.startswith(("transformers.models.", "transformers_modules.")):
            return getattr(pristine(name), cls.__name__)
    raise Unverifiable(
        f"model is a {type(model).__name__}, which is no model of transformers; there is no "
        "definition to compare it with"
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The transformers model inside a wrapper, such as PEFT's or DDP's."""
    if not isinstance(model, nn.Module):
        raise Unverifiable(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise Unverifiable(
            "model is compiled: its modules cannot be observed; verify it before torch.compile"
        )
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif type(model).__module__.split(".")[0] == "peft" and hasattr(model, "get_base_model"):
            model = cast(Any, model).get_base_model()
        else:
            break
    for name, p in model.named_parameters():
        if p.is_meta:
            raise Unverifiable(f"{name} is on the meta device: the model has no weights to verify")
        if hasattr(p, "device_mesh"):
            raise Unverifiable(f"{name} is sharded: verify the model before fully_shard")
    return model


# ---- weights


class Adapter(NamedTuple):
    """An adapter of a linear layer: base(x) + sum of scale * x A^T B^T, as names of parameters."""

    factors: tuple[tuple[str, str, float], ...]


class Weights(NamedTuple):
    """The weights of a model by their names in the configuration's class.

    tensors: each in its dtype; quantized ones dequantized.
    names: the model's name of each, where it has one as a parameter.
    adapters: adapters of linear layers, by path.
    paths: the path in the class of every module, by its path in the model.
    quantized: the number of quantized layers.
    """

    tensors: dict[str, torch.Tensor]
    names: dict[str, str]
    adapters: dict[str, Adapter]
    paths: dict[str, str]
    quantized: int


def _is_peft_lora(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.tuners.") or (
        hasattr(module, "lora_A") and hasattr(module, "base_layer")
    )


def _peft_adapter(path: str, module: Any) -> Adapter:
    """The active adapters of PEFT's LoRA of a linear layer."""
    kind = type(module).__name__
    if not hasattr(module, "lora_A") or not isinstance(
        module.get_base_layer(), (nn.Linear, QuantizedLinear)
    ):
        raise Unverifiable(f"{path}: adapters of kind {kind} are not known, only LoRA of linears")
    if variants := {**getattr(module, "lora_variant", {})}:
        raise Unverifiable(f"{path}: its adapter is a variant of LoRA ({sorted(variants)})")
    if any(b for b in getattr(module, "lora_bias", {}).values()):
        raise Unverifiable(f"{path}: its adapter has a bias, which is not known")
    if module.disable_adapters or module.merged:
        return Adapter(())
    active = [name for name in module.active_adapters if name in module.lora_A]
    return Adapter(
        tuple(
            (f"lora_A.{n}.weight", f"lora_B.{n}.weight", float(module.scaling[n])) for n in active
        )
    )


def weights_of(root: nn.Module) -> Weights:
    """Reads a model's weights, through adapters and quantized layers."""
    weights = Weights({}, {}, {}, {}, 0)
    inner: set[str] = set()
    quantized = 0
    for path, module in root.named_modules():
        parts = path.split(".")
        plain = ".".join(p for p in parts if p not in ("base_layer", "base"))
        if any(".".join(parts[:i]) in inner for i in range(1, len(parts))):
            if parts[-1] not in ("base_layer", "base"):
                continue  # of an adapter
        elif _is_peft_lora(module):
            weights.adapters[plain] = _peft_adapter(path, module)
            inner.add(path)
        elif isinstance(module, LoRALinear):
            if set(module.parts) != {""}:
                raise Unverifiable(f"{path}: adapters of fused projections are not known")
            if module.use_dora:
                raise Unverifiable(f"{path}: its adapter is a variant of LoRA (use_dora)")
            weights.adapters[plain] = Adapter((("lora_A", "lora_B", float(module.scale)),))
            inner.add(path)
        weights.paths[path] = plain
        if isinstance(module, QuantizedLinear):
            quantized += 1
            parts_of = [dequantize(q, dtype=q.dtype) for q in module.weights()]
            weights.tensors[f"{plain}.weight"] = torch.cat(parts_of)
            if module.bias is not None:
                weights.tensors[f"{plain}.bias"] = module.bias.detach()
            continue
        if path not in inner:
            _add_tensors(weights, path, plain, module)
    return weights._replace(quantized=quantized)


def _add_tensors(weights: Weights, path: str, plain: str, module: nn.Module) -> None:
    for name, value in (*module.named_parameters(recurse=False), *_persistent(module)):
        full, own = (f"{p}.{name}" if p else name for p in (plain, path))
        if isinstance(value, nn.Parameter):
            if type(value.data) is not torch.Tensor:  # torchao's
                value = value.detach().dequantize()
            if (
                not value.is_floating_point()
                or value.itemsize == 1
                or hasattr(value, "quant_state")
            ):
                raise Unverifiable(
                    f"{own} is stored quantized, as {value.dtype} by {type(module).__name__}, and "
                    "only the layers of TilewrightConfig and quantize_, and torchao's, are read "
                    "here; dequantize the model first"
                )
        weights.tensors[full] = value.detach()
        weights.names[full] = own


def _persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    state = module.state_dict()
    for name, buffer in module.named_buffers(recurse=False):
        if name in state:
            yield name, buffer


# ---- models


class AdaptedLinear(nn.Module):
    """The definition of a linear layer with LoRA, with PEFT's casts."""

    def __init__(self, base: nn.Linear, factors: list[tuple[torch.Tensor, torch.Tensor, float]]):
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.A = nn.ParameterList([A for A, _, _ in factors])
        self.B = nn.ParameterList([B for _, B, _ in factors])
        self.scales = [scale for _, _, scale in factors]
        self.transposed = False  # for a diagnosis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        dtype = y.dtype
        for A, B, scale in zip(self.A, self.B, self.scales, strict=True):
            x = x.to(A.dtype)
            delta = x @ (B @ A) if self.transposed else F.linear(F.linear(x, A), B)
            y = y + delta * scale
        return y.to(dtype)


class Twin(NamedTuple):
    """A reference.

    model: a model of the pristine class.   wide: whether it computes in float64.
    parameters: by the name in the model that is verified.
    """

    model: nn.Module
    wide: bool
    parameters: dict[str, nn.Parameter]

    def computing(self) -> contextlib.AbstractContextManager:
        return InFloat64() if self.wide else contextlib.nullcontext()

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if self.wide and tensor.is_floating_point() else tensor

    def module(self, path: str) -> nn.Module | None:
        try:
            return self.model.get_submodule(path)
        except AttributeError:
            return None


def plain_loss(logits, labels, vocab_size=None, num_items_in_batch=None, **kwargs):
    """Cross-entropy of the next token: the sum over the tokens that count, by their number or by
    num_items_in_batch.
    """
    target = kwargs.get("shift_labels")
    if target is None:
        target = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    logits = logits.float().flatten(0, -2)
    total = F.cross_entropy(
        logits, target.flatten().to(logits.device), ignore_index=IGNORED, reduction="sum"
    )
    return total / ((target != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)


def build(root: nn.Module, config: Any, weights: Weights, *, wide: bool) -> Twin:
    """A reference with the given weights, on the model's device, in evaluation mode."""
    from transformers.initialization import no_init_weights

    cls = reference_class(root)
    some = next(root.parameters())
    config = copy.deepcopy(config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    dtype = torch.float64 if wide else some.dtype
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    try:
        with InFloat64() if wide else contextlib.nullcontext(), no_init_weights():
            model = cls._from_config(config, dtype=dtype, **kinds)
    except Exception as error:
        raise Unverifiable(
            f"{cls.__name__} cannot be built from the configuration ({said(error)})"
        ) from error
    model.tie_weights()
    model.to(some.device)
    parameters = _fill(model, root, weights, wide)
    _adapt(model, root, weights, parameters, wide)
    if _loss_is_plain(model):
        model.loss_function = plain_loss
    return Twin(model.eval(), wide, parameters)


def read_config(config: Any) -> Any:
    """A configuration, or that of a folder or of a name on the Hub."""
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(config, PretrainedConfig):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise Unverifiable(
            "config must be a configuration of transformers, or a folder with one, got "
            f"{type(config).__name__}"
        )
    name = os.fspath(config)
    check_path(name)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of transformers' loaders, of any class
        raise Unverifiable(f"config {name!r} cannot be read: {said(error)}") from error


def check_path(name: str) -> None:
    """Raises Unverifiable for a path that is no folder: the Hub would be asked for it."""
    if os.path.sep in name and name[0] in "./~" and not os.path.isdir(name):
        raise Unverifiable(f"{name}: no such folder")


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def said(error: BaseException) -> str:
    """An error of anyone's code, in a line."""
    return f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")


def _loss_is_plain(model: Any) -> bool:
    return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


def _fill(model: nn.Module, root: nn.Module, weights: Weights, wide: bool) -> dict:
    """Gives a reference its weights; returns its parameters by the model's names."""
    own = dict(root.named_parameters(remove_duplicate=False))
    parameters: dict[str, nn.Parameter] = {}
    persistent = model.state_dict(keep_vars=True)
    done: set[int] = set()
    for name, slot in persistent.items():
        source = weights.tensors.get(name)
        if source is None:
            if id(slot) in done:
                continue  # tied to one that was given
            raise Unverifiable(
                f"the model has no {name}, which {type(model).__name__} of its configuration has"
            )
        if source.shape != slot.shape:
            raise Unverifiable(
                f"{name} is {list(source.shape)} in the model and {list(slot.shape)} by its "
                "configuration"
            )
        kept = own.get(weights.names.get(name, ""))
        if id(slot) not in done:
            done.add(id(slot))
            floating = source.is_floating_point()
            slot.data = source.double() if wide and floating else source.detach().clone()
            slot.requires_grad_(kept is not None and kept.requires_grad)
        if kept is not None:
            parameters[weights.names[name]] = slot
    return parameters


def _adapt(model, root, weights: Weights, parameters: dict, wide: bool) -> None:
    """Replaces linear layers of a reference by such with the adapters of the model."""
    own = dict(root.named_parameters(remove_duplicate=False))
    at = {plain: path for path, plain in reversed(weights.paths.items())}
    for plain, adapter in weights.adapters.items():
        factors = []
        for *names, scale in adapter.factors:
            pair = []
            for name in names:
                source = own[f"{at[plain]}.{name}"]
                fresh = nn.Parameter(
                    source.detach().double() if wide else source.detach().clone(),
                    requires_grad=source.requires_grad,
                )
                parameters[f"{at[plain]}.{name}"] = fresh
                pair.append(fresh)
            factors.append((*pair, scale))
        parent, _, name = plain.rpartition(".")
        setattr(
            model.get_submodule(parent), name, AdaptedLinear(model.get_submodule(plain), factors)
        )


def check_weights(root: nn.Module) -> None:
    """Raises Unverifiable if there are no weights, or some that are not finite: behind them
    everything is NaN, in the reference too.
    """
    if not any(True for _ in root.parameters()):
        raise Unverifiable(f"model is a {type(root).__name__} without parameters")
    for name, p in root.named_parameters():
        plain = type(p.data) is torch.Tensor and p.is_floating_point() and p.itemsize > 1
        if plain and not bool(torch.isfinite(p.detach()).all()):
            raise Unverifiable(f"{name} has values that are not finite, so nothing can be compared")


def check_memory(root: Any, shape: tuple[int, ...]) -> None:
    """Raises Unverifiable if the references do not fit in memory with input_ids of this shape."""
    some = next(root.parameters())
    count = sum(p.numel() for p in root.parameters())
    # Weights and two sets of gradients in float64; those of the model, of its eager twin, and its
    # weights.
    need = count * (24 + 4 * some.element_size())
    config = root.config.get_text_config() if hasattr(root.config, "get_text_config") else None
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
    layers, heads, hidden, vocab = (getattr(config, name, None) or 0 for name in sizes)
    # In float64 and its gradients: scores and their softmax of all layers, some twenty states of
    # each layer, logits.
    count_of_tokens, S = math.prod(shape), (shape or (0,))[-1]
    activations = 8 * count_of_tokens * (layers * (3 * heads * S + 20 * hidden) + 4 * vocab)
    free = platform.available_memory()
    if some.is_cuda:
        free = torch.cuda.mem_get_info(some.device)[0]
    if need + activations > free:
        raise Unverifiable(
            f"verifying {count / 1e9:.3g} billion parameters on {count_of_tokens} tokens takes about "
            f"{(need + activations) / 2**30:.0f} GiB, of which {free / 2**30:.0f} are free"
        )
