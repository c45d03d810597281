"""A quantizer of transformers: `from_pretrained(..., quantization_config=TilewrightConfig("nf4"))`.

Importing this module registers it with transformers, by `register_quantization_config` and
`register_quantizer`, as "tilewright". Saved folders name the format's own `quant_method`, so that
they load without this library.
"""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from tilewright import ops
from tilewright.core import platform
from tilewright.core.files import open_tensors
from tilewright.integrations.transformers.errors import NAME
from tilewright.integrations.transformers.versions import part_of
from tilewright.nn.adapt import merge_and_unload
from tilewright.nn.projections import replace_module
from tilewright.nn.quantize import linear_layers
from tilewright.nn.quantized_layers import (
    BESIDE,
    DENSE_DTYPES,
    QuantFormat,
    QuantizedLinear,
    absent,
    as_stored,
)
from tilewright.nn.save_pretrained import (
    guard_save_pretrained,
    readable_conversions,
    refuse_wrapped,
    stored_configuration,
    stored_state,
    why_unreadable,
)
from tilewright.nn.weights import adapted
from tilewright.ops.quant.block_fp8 import BlockFP8
from tilewright.ops.quant.mxfp8 import MXFP8
from tilewright.ops.quant.nf4_format import NF4
from tilewright.ops.quant.nvfp4 import NVFP4
from tilewright.ops.quant.quantize import Quantized

ConversionOps: Any = part_of("core_model_loading", "ConversionOps")
WeightConverter: Any = part_of("core_model_loading", "WeightConverter")
register_quantization_config = part_of("quantizers.auto", "register_quantization_config")
register_quantizer = part_of("quantizers.auto", "register_quantizer")
HfQuantizer: Any = part_of("quantizers.base", "HfQuantizer")
QuantizationConfigMixin: Any = part_of("utils.quantization_config", "QuantizationConfigMixin")

# Names of the tensors that replace a `weight`, by format; those of activations are ignored.
STORED = {
    format: ["weight", *(f"weight{ending}" for ending in endings)]
    for format, endings in BESIDE.items()
}
STORED["nvfp4"].append("input_global_scale")


@register_quantization_config(NAME)
class TilewrightConfig(QuantizationConfigMixin):
    """The `quantization_config` of `from_pretrained` that quantizes linear layers while they load.

    A layer is quantized as soon as its weight is read, so that one dense weight is in memory at a
    time. Output layers, embeddings and routers are left (as by `tilewright.nn.quantize_`), and
    so are the experts of transformers' mixtures, which are no linear layers. The quantized layers
    are `tilewright.nn.QuantizedLinear`. `save_pretrained` writes config.json and weights as
    bitsandbytes (nf4), compressed-tensors (nvfp4, mxfp8) or transformers' fine-grained FP8
    (block_fp8) load them; `quantized_config` reads such a folder into this library's layers.

    Args:
        format: nf4 | nvfp4 | block_fp8 | mxfp8.
        group_size: As in `tilewright.nn.QuantFormat`.
        double_quant: Quantizes the scales too; nf4 only.
        modules_to_not_convert: Further modules to leave: names, runs of names ("layers.0.mlp"),
            patterns, or regular expressions after "re:".

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The format or group size does not exist, or double_quant is set for another.

    Example:
        >>> from tilewright.integrations.transformers import TilewrightConfig
        >>> TilewrightConfig("nf4").group_size
        64
    """

    def __init__(
        self,
        format: str = "nf4",
        *,
        group_size: int | None = None,
        double_quant: bool = False,
        modules_to_not_convert: Iterable[str] | None = None,
        quant_method: str = NAME,
    ):
        chosen = QuantFormat(format, group_size)
        if not isinstance(double_quant, bool):
            raise TypeError(f"double_quant must be a bool, got {double_quant!r}")
        if double_quant and format != "nf4":
            raise ValueError(f"double_quant must be False for {format}; only nf4 has it")
        if isinstance(modules_to_not_convert, str):
            raise TypeError(
                "modules_to_not_convert must be a list of names, got the text "
                f"{modules_to_not_convert!r}"
            )
        if quant_method != NAME:
            raise ValueError(f"quant_method must be {NAME!r}, got {quant_method!r}")
        self.quant_method = quant_method
        self.format, self.group_size = format, chosen.group_size
        self.double_quant = double_quant
        self.modules_to_not_convert = list(modules_to_not_convert or ())
        self.written: dict[str, Any] | None = None  # what config.json has of a loaded model

    def quantize(self, weight: torch.Tensor) -> Quantized:
        """The weight as a file of this format gives it back."""
        if self.format == "nf4":
            return ops.quantize_nf4(
                weight, double_quant=self.double_quant, block_size=self.group_size or 64
            )
        return as_stored(QuantFormat(self.format, self.group_size)(weight))

    def to_dict(self) -> dict[str, Any]:
        """The configuration; a loaded model's is the one that the format's own readers need."""
        if self.written is not None:
            return copy.deepcopy(self.written)
        return {k: copy.deepcopy(v) for k, v in self.__dict__.items() if k != "written"}


@register_quantizer(NAME)
class TilewrightHfQuantizer(HfQuantizer):
    """What `TilewrightConfig` names; made by `from_pretrained`."""

    quantization_config: TilewrightConfig
    is_trainable = True
    is_compileable = True
    # The other parameters can be trained, and adapters that transformers does not know of.
    is_qat_trainable = True

    def __init__(self, quantization_config: TilewrightConfig, **kwargs: Any):
        # A copy, because it gets what config.json says of this model.
        super().__init__(copy.copy(quantization_config), **kwargs)
        self.layers: set[str] = set()
        self.file_of: dict[str, str] = {}  # by tensor, of a quantized checkpoint
        self.problems: list[str] = []  # weights of it that cannot be read
        self.conversions: list[Any] | None = None  # those of transformers for the dense model
        if platform.no_module("peft") is None:
            from tilewright.integrations.peft import register

            register()

    @property
    def serialized_names(self) -> dict[str, list[str]]:
        """As transformers' base class."""
        return {"weight": STORED[self.quantization_config.format]}

    @property
    def quantized_element_size(self) -> float:
        """Bytes of an element, for device maps."""
        return 0.57 if self.quantization_config.format in ("nf4", "nvfp4") else 1.04

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raises ValueError for weights on disk."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "device_map must not have 'disk' with TilewrightConfig: quantized layers are not "
                "offloaded to files; use devices and 'cpu'"
            )

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Whether save_pretrained can write the model: yes."""
        return True

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Whether this is the weight of a layer to quantize."""
        path, _, name = param_name.rpartition(".")
        return name == "weight" and path in self.layers

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> Any:
        if self.pre_quantized:
            format = self.quantization_config.format
            self.file_of = _check_files(model, checkpoint_files, format)
            return model
        config = self.quantization_config
        layers, left = linear_layers(model, config.modules_to_not_convert)
        if not layers:
            raise ValueError(f"{type(model).__name__} has no layer to quantize; left are {left}")
        for path in layers:
            weight = model.get_submodule(path).weight
            if wrong := why_unreadable(config.quantize(weight.detach().to("meta")), weight.shape):
                raise ValueError(
                    f"{path} is {wrong}; or name it in modules_to_not_convert, so that the saved "
                    "model can be read"
                )
        self.layers = set(layers)
        return model

    def get_quantize_ops(self) -> Any:
        """What quantizes a weight when it has been read."""
        return _Quantize(self)

    def get_weight_conversions(self) -> list[Any]:
        """What collects a layer's tensors from a quantized checkpoint."""
        if not self.pre_quantized:
            return []
        # Longest first: older versions try the patterns in this order.
        names = sorted(self.serialized_names["weight"], key=len, reverse=True)
        # From the point on, to the end: a module's name may end so, too.
        patterns = [rf"\.{re.escape(name)}$" for name in names]
        return [WeightConverter(patterns, ".weight", [_Read(self)])]

    def update_weight_conversions(self, weight_conversions: list, *args: Any) -> list:
        """Adds `get_weight_conversions` to the model's own."""
        return weight_conversions + self.get_weight_conversions()

    def unreadable(self, name: str, error: Exception) -> None:
        """Notes a weight of the checkpoint that cannot be read. transformers collects exceptions,
        and would raise one without the name.
        """
        # The file's names may have a further part in front, or one less.
        files = (
            f"{file}: "
            for known in (name, name.partition(".")[2])
            for key, file in self.file_of.items()
            if f".{known}" in f".{key}"
        )
        stem, format = name.removesuffix(".weight"), self.quantization_config.format
        self.problems.append(f"{next(files, '')}{stem} cannot be read as {format}: {error.args[0]}")

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.problems:
            first, *more = self.problems
            raise ValueError(first + (f"; and {len(more)} more like it" if more else ""))
        # Those that the file lacks, which transformers has initialized.
        for path in sorted(self.layers):
            layer = model.get_submodule(path)
            if isinstance(layer, nn.Linear):
                q = self.quantization_config.quantize(layer.weight.detach())
                bias: Any = layer.bias
                if bias is not None:
                    bias._is_hf_initialized = True
                _put(model, f"{path}.weight", q)
        _finish_biases(model)
        # Saving reverts conversions, of which this one is done by get_state_dict_and_metadata.
        used = getattr(model, "_weight_conversions", None)
        if used is not None:
            model._weight_conversions = [
                c
                for c in used
                if not any(isinstance(op, _Read) for op in getattr(c, "operations", ()))
            ]
            self.conversions = model._weight_conversions
        self.quantization_config.written = stored_configuration(model)
        for child in model.children():  # transformers saves the whole model by this quantizer alone
            guard_save_pretrained(child)
        return model

    def get_state_dict_and_metadata(self, model: Any, *args: Any, **kwargs: Any) -> tuple:
        """The tensors for save_pretrained, in the format's layout. Raises ValueError if the model
        has adapters of this library, or weights that readers of the format cannot read.
        """
        if any(True for _ in adapted(model)):
            raise ValueError(
                "save_pretrained cannot write adapters of tilewright; "
                "tilewright.nn.save_adapter(model, folder) writes them for peft"
            )
        if getattr(model, "_hf_peft_config_loaded", False):  # only the adapters are saved
            return None, {}
        refuse_wrapped(model)
        state, written = stored_state(model)
        if self.conversions is not None:
            model._weight_conversions = self.conversions
        model._weight_conversions = readable_conversions(model, state, written["quant_method"])
        self.quantization_config.written = written
        return state, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        if any(hasattr(m, "lora_A") and hasattr(m, "base_layer") for m in model.modules()):
            raise ValueError(
                "dequantize needs a model without PEFT's adapters: merge or unload them"
            )
        paths = [p for p, m in model.named_modules() if isinstance(m, QuantizedLinear)]
        if isinstance(dtype, str):  # as save_pretrained leaves config.dtype
            dtype = getattr(torch, dtype)
        merge_and_unload(model)
        if self.conversions is not None:
            model._weight_conversions = self.conversions
        for path in paths:
            model.get_submodule(path.removesuffix(".base")).to(dtype)
        return model


class _Quantize(ConversionOps):
    """Replaces a linear layer by one with its weight quantized, when the weight has been read. One
    tensor of the file may be several of the model (queries, keys and values): others are passed on.
    """

    def __init__(self, hf_quantizer: TilewrightHfQuantizer):
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict,
        full_layer_name: Any = None,
        model: Any = None,
        missing_keys: Any = None,
        **kwargs,
    ):
        if len(input_dict) == 1:  # whatever its key, which versions give otherwise
            input_dict = {full_layer_name: next(iter(input_dict.values()))}
        left = {}
        for name, weight in input_dict.items():
            if not self.hf_quantizer.param_needs_quantization(model, name):
                left[name] = weight
                continue
            weight = weight[0] if isinstance(weight, list) else weight
            _put(model, name, self.hf_quantizer.quantization_config.quantize(weight))
            missing_keys.discard(name)
        return left


class _Read(ConversionOps):
    """Replaces a linear layer by one with the quantized weight of a checkpoint. Weights that are
    dense there are passed on.
    """

    def __init__(self, hf_quantizer: TilewrightHfQuantizer):
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: Any) -> _Read:
        # transformers copies it for each weight; what cannot be read is noted in one place.
        return self

    def convert(
        self,
        input_dict,
        full_layer_name: Any = None,
        model: Any = None,
        missing_keys: Any = None,
        **kwargs,
    ):
        stem = full_layer_name.removesuffix("weight")
        tensors = {
            stem + pattern.removeprefix(r"\.").removesuffix("$").replace("\\", ""): t[0]
            if isinstance(t, list)
            else t
            for pattern, t in input_dict.items()
        }
        like = model.get_parameter_or_buffer(full_layer_name)
        if set(tensors) == {full_layer_name} and not _is_codes(tensors[full_layer_name]):
            # transformers leaves the dtype of what a quantizer's operation reads to it.
            full = _in_float32(model, full_layer_name, like.dtype)
            weight = tensors[full_layer_name]
            return {full_layer_name: weight.to(torch.float32 if full else like.dtype)}
        config = self.hf_quantizer.quantization_config
        try:
            q = _from_tensors(config, tensors, full_layer_name, like.dtype)
            if tuple(q.shape) != tuple(like.shape):
                raise ValueError(
                    f"it is {list(q.shape)} in the checkpoint, and {list(like.shape)} in the model"
                )
        except (KeyError, TypeError, ValueError) as error:
            self.hf_quantizer.unreadable(full_layer_name, error)
            return {full_layer_name: torch.zeros(like.shape, dtype=like.dtype)}
        _put(model, full_layer_name, q)
        missing_keys.discard(full_layer_name)
        return {}


def _in_float32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether a model keeps a weight in float32 where the others have this dtype."""
    kept: set[str] = set()
    if dtype == torch.float16:
        kept.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        kept.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in kept)


def _is_codes(t: torch.Tensor) -> bool:
    """Whether a tensor cannot be a dense weight."""
    return not t.is_floating_point() or t.element_size() == 1


def _from_tensors(
    config: TilewrightConfig, tensors: dict, name: str, dtype: torch.dtype
) -> Quantized:
    if config.format == "nf4":
        return dataclasses.replace(NF4.from_safetensors(tensors, name), dtype=dtype)
    if config.format == "nvfp4":
        return NVFP4.from_safetensors(tensors, name, dtype=dtype)
    if name in tensors:
        # FP8 codes, which older versions of transformers cast to the model's dtype: it holds them
        # exactly.
        tensors = tensors | {name: tensors[name].to(torch.float8_e4m3fn)}
    if config.format == "mxfp8":
        return MXFP8.from_safetensors(tensors, name, dtype=dtype)
    size = config.group_size or 128
    return BlockFP8.from_safetensors(tensors, name, block=(size, size), dtype=dtype)


def _put(model: nn.Module, name: str, q: Quantized) -> None:
    path = name.removesuffix(".weight")
    linear: Any = model.get_submodule(path)
    bias = linear.bias
    layer: Any = QuantizedLinear(q, bias)
    # transformers initializes what has no such mark, also from the module around the layer.
    for marked in (layer, *layer.buffers()):
        marked._is_hf_initialized = True
    if getattr(bias, "_is_hf_initialized", False):  # else it is read later, or initialized
        layer.bias._is_hf_initialized = True
    replace_module(model, path, layer)


def _finish_biases(model: nn.Module) -> None:
    """Freezes the quantized layers' biases, which transformers may have set after the weights, and
    zeroes those that the file does not have: transformers initializes its own layers alone.
    """
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear) and layer.bias is not None:
            layer.bias.requires_grad_(False)
            if not getattr(layer.bias, "_is_hf_initialized", False):
                with torch.no_grad():
                    layer.bias.zero_()


def _check_files(model: nn.Module, files: list[str] | None, format: str) -> dict[str, str]:
    """The file of each tensor. Raises ValueError if a quantized weight of the checkpoint lacks a
    tensor, since it would be read as a dense one, and if experts are quantized one by one:
    transformers stacks their weights, and would stack the codes without their scales.
    """
    dtypes, file_of = {}, {}
    for file in files or ():
        with open_tensors(pathlib.Path(file)) as tensors:
            for key in tensors.keys():  # noqa: SIM118 (it is no dictionary)
                dtypes[key], file_of[key] = tensors.get_slice(key).get_dtype(), file
    modules = dict(model.named_modules())
    beside = re.compile(rf"(.*\bweight)({'|'.join(map(re.escape, BESIDE[format]))})")
    checked = set()
    for key, dtype in dtypes.items():
        if matched := beside.fullmatch(key):
            name = matched[1]
        elif key.endswith(".weight") and dtype not in DENSE_DTYPES:
            name = key
        else:
            continue
        if name in checked:
            continue
        checked.add(name)
        stem = name.rpartition(".")[0]
        if re.search(r"\.experts\.\d+\.", key) and stem not in modules:
            raise ValueError(
                f"{file_of[key]}: {stem} is quantized, and transformers stacks experts; the "
                "trainer, or the format's own reader, reads quantized experts"
            )
        if missing := absent(format, name, dtypes.get):
            have = ", ".join(f"{k} ({dtypes[k]})" for k in sorted(dtypes) if k.startswith(name))
            raise ValueError(
                f"{file_of[key]}: {stem} cannot be read as {format}: {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing; there are {have}"
            )
    return file_of


def quantized_config(folder: str | pathlib.Path, **kwargs: Any) -> Any:
    """The configuration of a quantized folder, so that this library reads its weights:
    `from_pretrained(folder, config=quantized_config(folder))`.

    Without it transformers loads the folder by the package that its configuration names. This
    library reads what `save_pretrained` wrote, and checkpoints that others made: 4-bit NF4 of
    bitsandbytes, NVFP4 and MXFP8 of compressed-tensors (weights alone; scales of activations are
    ignored), and fine-grained FP8.

    Args:
        folder: A folder, or a name on the Hub.
        kwargs: As in `AutoConfig.from_pretrained`.

    Returns:
        The model's configuration, whose quantization_config names this library.

    Raises:
        OSError: There is no such folder.
        ValueError: It has no config.json of a model, is not quantized, or is quantized in another
            way.

    Example:
        >>> import tempfile
        >>> from transformers import AutoConfig
        >>> from tilewright.integrations.transformers import quantized_config
        >>> written = AutoConfig.for_model("llama", quantization_config={
        ...     "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written.save_pretrained(folder)
        ...     config = quantized_config(folder)
        >>> config.quantization_config["quant_method"], config.quantization_config["format"]
        ('tilewright', 'nf4')
    """
    config = AutoConfig.from_pretrained(folder, **kwargs)
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        raise ValueError(
            f"{folder} is not quantized; from_pretrained(..., quantization_config="
            'TilewrightConfig("nf4")) quantizes it'
        )
    quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
    format, size = _format_of(folder, quantization)
    nested = format == "nf4" and bool(quantization.get("bnb_4bit_use_double_quant"))
    read = TilewrightConfig(format, group_size=size, double_quant=nested)
    config.quantization_config = read.to_dict()
    return config


def _format_of(folder: str | pathlib.Path, quantization: dict[str, Any]) -> tuple[str, int | None]:
    """The name and the group size of the format that a quantization_config describes."""
    method = quantization.get("quant_method")
    if quantization.get("load_in_4bit") and quantization.get("bnb_4bit_quant_type") == "nf4":
        return "nf4", None
    if method == "compressed-tensors" and quantization.get("format") == "nvfp4-pack-quantized":
        return "nvfp4", None
    if method == "compressed-tensors" and quantization.get("format") == "mxfp8-quantized":
        return "mxfp8", None
    block = quantization.get("weight_block_size")
    if (
        method == "fp8"
        and isinstance(block, (list, tuple))
        and len(block) == 2
        and block[0] == block[1]
        and quantization.get("scale_fmt", "float") == "float"
    ):
        return "block_fp8", block[0]
    details = {
        k: quantization[k]
        for k in ("bnb_4bit_quant_type", "format", "weight_block_size")
        if k in quantization
    }
    raise ValueError(
        f"{folder}: quant_method {str(method)!r} ({details}) is not read; accepted are bitsandbytes "
        "with bnb_4bit_quant_type 'nf4', compressed-tensors with format 'nvfp4-pack-quantized' "
        "or 'mxfp8-quantized', and fp8 with square blocks and float scales"
    )
