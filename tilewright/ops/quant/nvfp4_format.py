"""The NVFP4 tensor class and its files, in the layouts of compressed-tensors and modelopt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilewright.core import checks
from tilewright.ops.quant import quantize, stored_scales

BLOCK = 16
LAYOUTS = ("compressed-tensors", "modelopt")


@dataclass(frozen=True)
class NVFP4(quantize.Quantized):
    """A tensor in NVFP4. Made by `quantize_nvfp4` or `NVFP4.from_safetensors`.

    data: uint8 [..., ceil(C / 2)] of rows of C elements, the even one in the low nibble.
    scale: float8_e4m3fn [..., ceil(C / 16)], one per block.   global_scale: float32 [], one per
        tensor. An element is its code's value times scale * global_scale.
    shape, dtype: those of the tensor that was quantized.
    """

    data: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype

    def to_safetensors(
        self, prefix: str = "weight", layout: str = "compressed-tensors"
    ) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint. compressed-tensors: `prefix_packed`, `prefix_scale` and
        `prefix_global_scale`, which is the inverse of global_scale; modelopt: `prefix`,
        `prefix_scale` and `prefix_scale_2`, which is global_scale.
        """
        checks.choice("layout", layout, LAYOUTS)
        if layout == "modelopt":
            return {
                prefix: self.data,
                f"{prefix}_scale": self.scale,
                f"{prefix}_scale_2": self.global_scale,
            }
        return {
            f"{prefix}_packed": self.data,
            f"{prefix}_scale": self.scale,
            f"{prefix}_global_scale": (1.0 / self.global_scale).reshape(1),
        }

    @classmethod
    def from_safetensors(
        cls,
        tensors: Mapping[str, torch.Tensor],
        prefix: str = "weight",
        *,
        dtype: torch.dtype = torch.bfloat16,
        shape: tuple[int, ...] | None = None,
    ) -> NVFP4:
        """The inverse of `to_safetensors`, for the layout whose keys are present. shape: required
        for rows of an odd number of elements, since checkpoints do not store it. An inverse's
        inverse may differ in the last bit. Raises KeyError for a missing tensor, and TypeError or
        ValueError, naming the tensor, for inconsistent ones. Reads scales on the host.
        """
        modelopt = f"{prefix}_scale_2" in tensors
        name, name_of_total = (
            (prefix, f"{prefix}_scale_2")
            if modelopt
            else (f"{prefix}_packed", f"{prefix}_global_scale")
        )
        scale, data = quantize.key(tensors, f"{prefix}_scale"), quantize.key(tensors, name)
        total = quantize.float_scales(tensors, name_of_total)
        if total.numel() != 1:
            raise ValueError(f"{name_of_total} must be one number, got shape {list(total.shape)}")
        total = total.reshape(())
        good = 0 < total < math.inf
        if not good or (not modelopt and 1.0 / total == math.inf):
            raise ValueError(
                f"{name_of_total} must be a finite number > 0, got {total.item():g}"
                f"{', whose inverse is infinite' if good else ''}"
            )
        shape = (*data.shape[:-1], 2 * data.shape[-1]) if shape is None else tuple(shape)
        quantize.part(name, data, torch.uint8, (*shape[:-1], -(-shape[-1] // 2)), data)
        quantize.part(
            f"{prefix}_scale", scale, quantize.E4M3, (*shape[:-1], -(-shape[-1] // BLOCK)), data
        )
        stored_scales.check(f"{prefix}_scale", scale, lambda zero: _blank(data, zero))
        return cls(data, scale, total if modelopt else 1.0 / total, shape, dtype)


quantize.register(NVFP4, ("data", "scale", "global_scale"))


def _blank(data: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Which blocks have a scale of 0 on purpose: blocks of zeros, and blocks too small for a scale
    in FP8. modelopt has divided the latter by their scale, so that all codes are the largest.

    zero: [..., blocks].
    """
    pairs = quantize.pad_to(data, -1, BLOCK // 2).unflatten(-1, (-1, BLOCK // 2))
    last = data.shape[-1] % (BLOCK // 2)
    magnitudes = pairs & 0x77  # without signs
    largest = magnitudes == 0x77
    if last:  # the padding
        largest[..., -1, last:] = True
    return zero & ((magnitudes == 0).all(-1) | largest.all(-1))
