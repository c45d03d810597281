"""Quantized weights: their formats, and the modules that hold them frozen.

A module stores a quantized tensor as byte buffers, which casting a module, broadcasting buffers
and checkpoints leave unchanged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.block_fp8 import BlockFP8, quantize_block_fp8
from tilewright.ops.quant.mxfp8 import MXFP8, quantize_mxfp8
from tilewright.ops.quant.nf4 import quantize_nf4
from tilewright.ops.quant.nf4_format import BLOCKS, NF4
from tilewright.ops.quant.nvfp4 import NVFP4, quantize_nvfp4
from tilewright.ops.quant.quantize import Quantized
from tilewright.ops.quant.quantized_linear import dequantize, quantized_linear

# ---- formats


@dataclasses.dataclass(frozen=True)
class QuantFormat:
    """A format of quantized weights. Called with a dense weight, it returns the quantized one.

    Args:
        name: nvfp4 | block_fp8 | nf4 | mxfp8.
        group_size: Elements that share a scale: 16 for nvfp4; 32 for mxfp8; the edge of the square
            blocks of block_fp8, 1 to 128, by default 128; 32 to 4096, a power of two, for nf4, by
            default 64.

    Raises:
        ValueError: The name or the group size does not exist.

    Example:
        >>> import torch
        >>> from tilewright.nn import QuantFormat
        >>> QuantFormat("nf4")
        QuantFormat(name='nf4', group_size=64)
        >>> QuantFormat("nf4")(torch.randn(4, 64)).shape
        (4, 64)
    """

    name: str
    group_size: int | None = None

    def __post_init__(self):
        if self.name not in FORMATS:
            raise ValueError(f"name must be one of {list(FORMATS)}, got {self.name!r}")
        if self.group_size is None:
            object.__setattr__(self, "group_size", DEFAULT_GROUPS[self.name])
        if wrong := wrong_group_size(self.name, self.group_size):
            raise ValueError(wrong)

    def __call__(self, weight: torch.Tensor) -> Quantized:
        size = cast(int, self.group_size)
        if self.name == "nf4":
            return quantize_nf4(weight, block_size=size)
        if self.name == "block_fp8":
            return quantize_block_fp8(weight, block=(size, size))
        return quantize_mxfp8(weight) if self.name == "mxfp8" else quantize_nvfp4(weight)


# By name: the class, the supported group sizes, and these in words.
FORMATS = {
    "nvfp4": (NVFP4, (16,), "16"),
    "block_fp8": (BlockFP8, range(1, 129), "1 to 128"),
    "nf4": (NF4, BLOCKS, ", ".join(map(str, BLOCKS))),
    "mxfp8": (MXFP8, (32,), "32"),
}


# The endings of the tensors that files may have beside a weight, by format.
BESIDE = {
    "nf4": (
        ".absmax",
        ".quant_map",
        ".nested_absmax",
        ".nested_quant_map",
        ".quant_state.bitsandbytes__nf4",
    ),
    "nvfp4": ("_packed", "_scale", "_global_scale", "_scale_2"),
    "block_fp8": ("_scale_inv",),
    "mxfp8": ("_scale",),
}
# Dtypes of dense weights, by safetensors' names; others are of codes.
DENSE_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}


def absent(format: str, name: str, dtype_of: Callable[[str], str | None]) -> list[str]:
    """The tensors of a quantized weight that a file lacks.

    dtype_of: name -> the dtype of this tensor of the file, in safetensors' notation; None if the
        file does not have it.
    """
    if format in ("block_fp8", "mxfp8"):
        needed = ["", *BESIDE[format]]
    elif format == "nvfp4":
        modelopt = any(dtype_of(name + ending) for ending in ("", "_scale_2"))
        needed = ["", "_scale", "_scale_2"] if modelopt else ["_packed", "_scale", "_global_scale"]
    else:
        needed = ["", ".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4"]
        nested = [".nested_absmax", ".nested_quant_map"]  # of scales that are quantized too
        if dtype_of(f"{name}.absmax") == "U8" or any(dtype_of(name + ending) for ending in nested):
            needed += nested
    return [name + ending for ending in needed if dtype_of(name + ending) is None]


DEFAULT_GROUPS = {"nvfp4": 16, "block_fp8": 128, "nf4": 64, "mxfp8": 32}  # of published checkpoints


def wrong_group_size(name: str, size: int | None) -> str | None:
    """None if the format supports the group size, else a sentence with the supported ones."""
    _, sizes, shown = FORMATS[name]
    return (
        None
        if type(size) is int and size in sizes
        else f"{name} has groups of {shown}, got {size!r}"
    )


def format_of(q: Quantized) -> QuantFormat | str:
    """The format of a quantized tensor.

    Args:
        q: NF4, NVFP4, BlockFP8 or MXFP8.

    Returns:
        The format; a description of it in words if no `QuantFormat` has q's options.

    Example:
        >>> import torch
        >>> from tilewright.nn import QuantFormat, format_of
        >>> from tilewright.ops import quantize_block_fp8
        >>> format_of(QuantFormat("nf4")(torch.randn(4, 64)))
        QuantFormat(name='nf4', group_size=64)
        >>> format_of(quantize_block_fp8(torch.randn(4, 64), block=(1, 64)))
        'block_fp8 of 1 x 64 blocks'
    """
    if isinstance(q, NF4):
        return QuantFormat("nf4", q.block_size)
    if isinstance(q, NVFP4):
        return QuantFormat("nvfp4", 16)
    if isinstance(q, MXFP8):
        return QuantFormat("mxfp8", 32)
    rows, columns = cast(BlockFP8, q).block
    return (
        QuantFormat("block_fp8", rows)
        if rows == columns <= 128
        else f"block_fp8 of {rows} x {columns} blocks"
    )


def quantize_as(q: Quantized, weight: torch.Tensor) -> Quantized:
    """Quantizes a weight in the format of another, with its options.

    Args:
        q: NF4, NVFP4, BlockFP8 or MXFP8. Its values are not used; NVFP4 gets a new global scale.
        weight: The dense weight, of any shape and dtype that the format's op takes, on any device.

    Returns:
        The quantized weight, on `weight`'s device. Its dtype, which dequantizing returns by
        default, is q's.

    Raises:
        TypeError, ValueError: The op of q's format does not take the weight, which may not be
            finite (not checked on CUDA).

    Example:
        >>> import torch
        >>> from tilewright.nn import quantize_as
        >>> from tilewright.ops import quantize_nf4
        >>> q = quantize_nf4(torch.randn(4, 64, dtype=torch.bfloat16), block_size=32)
        >>> new = quantize_as(q, torch.randn(8, 64))
        >>> new.shape, new.block_size, new.dtype
        ((8, 64), 32, torch.bfloat16)
    """
    if isinstance(q, NF4):
        new = quantize_nf4(weight, double_quant=q.offset is not None, block_size=q.block_size)
    elif isinstance(q, NVFP4):
        new = quantize_nvfp4(weight)
    elif isinstance(q, MXFP8):
        new = quantize_mxfp8(weight)
    else:
        new = quantize_block_fp8(weight, block=cast(BlockFP8, q).block)
    return dataclasses.replace(new, dtype=q.dtype)


def as_stored(q: Quantized) -> Quantized:
    """q as its file gives it back: NVFP4's files have the inverse of the tensor scale, and an
    inverse's inverse may differ in the last bit. Applying it twice changes nothing more.
    """
    if isinstance(q, NVFP4) and not q.global_scale.is_meta:
        return dataclasses.replace(q, global_scale=1.0 / (1.0 / q.global_scale))
    return q


def join(parts: Sequence[Quantized]) -> list[Quantized]:
    """Concatenates matrices along their rows, if the bytes stay those of the parts.

    They change where a block would span two parts, or where a per-tensor value differs: NVFP4's
    global scale, or the offset of NF4's double quantization.

    Args:
        parts: One or more quantized matrices.

    Returns:
        A list of one matrix, or else the parts.

    Raises:
        ValueError: There are no parts.

    Example:
        >>> import torch
        >>> from tilewright.nn import QuantFormat, join
        >>> parts = [QuantFormat("nf4")(torch.randn(rows, 64)) for rows in (4, 8)]
        >>> [q.shape for q in join(parts)]
        [(12, 64)]
    """
    if not parts:
        raise ValueError("parts must hold at least one quantized matrix, got none")
    first, *rest = parts
    if not rest or any(
        type(q) is not type(first) or q.shape[1] != first.shape[1] or q.dtype != first.dtype
        for q in rest
    ):
        return list(parts)

    def cat(field):
        return torch.cat([getattr(q, field) for q in parts])

    shape = (sum(q.shape[0] for q in parts), first.shape[1])
    same: list[Any] = list(parts)  # all have the class of the first
    if isinstance(first, NF4):
        if all(q.offset is None and q.block_size == first.block_size for q in same) and all(
            math.prod(q.shape) % q.block_size == 0 for q in same[:-1]
        ):
            return [dataclasses.replace(first, data=cat("data"), absmax=cat("absmax"), shape=shape)]
    elif isinstance(first, NVFP4):
        if all(torch.equal(q.global_scale, first.global_scale) for q in same):
            return [dataclasses.replace(first, data=cat("data"), scale=cat("scale"), shape=shape)]
    elif isinstance(first, MXFP8):
        return [dataclasses.replace(first, data=cat("data"), scale=cat("scale"))]
    elif all(q.block == same[0].block for q in same) and all(
        q.shape[0] % q.block[0] == 0 for q in same[:-1]
    ):
        return [dataclasses.replace(same[0], data=cat("data"), scale_inv=cat("scale_inv"))]
    return list(parts)


# ---- modules


class _Bytes(nn.Module):
    """Stores quantized tensors as byte buffers."""

    # Per tensor: its class; by field the buffer's name, the dtype and the shape; other fields.
    _layout: list[tuple[type[Quantized], dict[str, tuple], dict[str, Any]]] = []  # noqa: RUF012

    def _store(self, weights: Mapping[str, Quantized], *, flat: bool) -> None:
        """Replaces the buffers.

        weights: the tensors by the suffix of their buffers' names.   flat: store one-dimensional
        buffers; else with the tensors' dimensions, whose last one counts bytes.
        """
        layout, buffers = [], {}
        for ending, q in weights.items():
            tensors, rest = {}, {}
            for f in dataclasses.fields(cast(Any, q)):
                value = getattr(q, f.name)
                if not isinstance(value, torch.Tensor):
                    rest[f.name] = value
                    continue
                name = f"{f.name}{ending}"
                tensors[f.name] = (name, value.dtype, tuple(value.shape))
                value = value.detach()
                if flat or value.dim() == 0:
                    value = value.reshape(-1)
                buffers[name] = value.contiguous().view(torch.uint8)
            layout.append((type(q), tensors, rest))
        for name in list(self._buffers):
            del self._buffers[name]
        for name, t in buffers.items():
            self.register_buffer(name, t)
        if layout != self._layout:  # keep the same object if equal: no recompile
            self._layout = layout

    def _stored(self) -> list[Quantized]:
        """The quantized tensors, as views of the buffers."""
        return [
            kind(
                **{
                    field: getattr(self, name).view(dtype).view(shape)
                    for field, (name, dtype, shape) in tensors.items()
                },
                **rest,
            )
            for kind, tensors, rest in self._layout
        ]


class QuantizedLinear(_Bytes):
    """A frozen linear layer with a quantized weight: `ops.quantized_linear`.

    Args:
        weight: A quantized [N, K], or several, concatenated along rows, that cannot be joined (see
            `join`). On the meta device: filled later, by `fill` or by a state dict.
        bias: [N] or None; frozen.

    Raises:
        ValueError: Shapes do not match, or there are more than four weights.

    Example:
        >>> import torch
        >>> from tilewright.nn import QuantFormat, QuantizedLinear
        >>> layer = QuantizedLinear(QuantFormat("nf4")(torch.randn(16, 64)))
        >>> layer(torch.randn(2, 64)).shape
        torch.Size([2, 16])
    """

    noise_layers = 4  # upper bound of the `AQN.layer` values that it uses
    dense_class: type[nn.Linear] = nn.Linear  # restored by `merge_and_unload`

    def __init__(self, weight: Quantized | Sequence[Quantized], bias: torch.Tensor | None = None):
        super().__init__()
        self.fill([weight] if isinstance(weight, Quantized) else weight)
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise ValueError(f"bias must have shape [{self.out_features}], got {list(bias.shape)}")
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.noise: tuple[AQN, ...] | None = None

    def fill(self, weights: Sequence[Quantized]) -> None:
        """Replaces the weights by others of the same size, on the same device or another."""
        if (
            not weights
            or any(len(q.shape) != 2 for q in weights)
            or len({q.shape[1] for q in weights}) > 1
        ):
            raise ValueError(
                f"weight must be quantized matrices of one width, got shapes "
                f"{[q.shape for q in weights]}"
            )
        if len(weights) > self.noise_layers:
            raise ValueError(
                f"weight must be at most {self.noise_layers} matrices, got {len(weights)}"
            )
        shape = (sum(q.shape[0] for q in weights), weights[0].shape[1])
        if self._layout and shape != (self.out_features, self.in_features):
            raise ValueError(
                f"weight must be [{self.out_features}, {self.in_features}], got {list(shape)}"
            )
        self.out_features, self.in_features = shape
        self._store({f"_{i}": q for i, q in enumerate(weights)}, flat=False)

    def weights(self) -> list[Quantized]:
        """The quantized weights, as views of the layer's buffers."""
        return self._stored()

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight in its first dtype, for code that reads `layer.weight`: a new
        tensor at each access, whose changes are lost.
        """
        return self.dense(self.weights()[0].dtype)

    @property
    def qweight(self) -> torch.Tensor:
        """The codes of the first weight as bytes. PEFT and others read this attribute to find a
        quantized layer's device.
        """
        return self.get_buffer("data_0")

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dequantized weight, [N, K]."""
        parts = [dequantize(q, dtype=dtype) for q in self.weights()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def set_noise(self, noise: AQN | None) -> None:
        """Sets noise for future forward passes, in training mode only. It uses noise.layer and
        those after it, one per weight.
        """
        self.noise = None
        if noise is not None:
            layers = range(noise.layer, noise.layer + len(self._layout))
            self.noise = tuple(dataclasses.replace(noise, layer=layer) for layer in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # As in quantized_linear, so that the bias is cast too.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        noise = self.noise if self.training else None
        weights = self.weights()
        biases = (
            [None] * len(weights)
            if self.bias is None
            else self.bias.to(x.dtype).split([q.shape[0] for q in weights])
        )
        outputs = [
            quantized_linear(x, q, b, noise=None if noise is None else noise[i])
            for i, (q, b) in enumerate(zip(weights, biases, strict=True))
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, "
            f"weight={' + '.join(kind.__name__ for kind, _, _ in self._layout)}"
        )


class QuantizedExperts(_Bytes):
    """A frozen quantized tensor of all experts."""

    def __init__(self, q: Quantized):
        super().__init__()
        self.fill(q)

    def fill(self, q: Quantized) -> None:
        """Replaces the tensor."""
        self._store({"": q}, flat=True)

    def weight(self) -> Quantized:
        """The quantized tensor, as a view of the module's buffers."""
        [q] = self._stored()
        return q

    def extra_repr(self) -> str:
        q = self.weight()
        return f"{type(q).__name__}, shape={list(q.shape)}"
