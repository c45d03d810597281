"""Results in FP8 with a scale per block of a row, judged in steps of their own grid."""

from __future__ import annotations

import torch

from tilewright.ops.quant import fp8
from tilewright.ops.quant.quantize import E4M3, LARGEST_E4M3

ARITHMETIC = 4 * torch.finfo(torch.float32).eps  # of the quantization, which is in float32


def is_codes(t: torch.Tensor) -> bool:
    return t.dtype == E4M3


def steps(
    codes: torch.Tensor, scale: torch.Tensor, values: torch.Tensor, slack: float, least: float
) -> torch.Tensor:
    """The distance of each decoded element from the value that it holds, beyond the error that the
    value itself may have, in steps of the grid there: at most 1/2 after rounding to nearest.

    slack: the error that the values may have, relative to the element or to `least`, whichever is
        larger.
    """
    if codes.shape != values.shape or scale.shape != _blocks(values, scale).shape[:-1]:
        return torch.full((1,), float("inf"), dtype=torch.float64)
    each = _of_elements(scale, values)
    allowed = (slack + ARITHMETIC) * values.abs().clamp_min(least)
    # The step at the larger number: the value may have been rounded across a power of two.
    size = ((values.abs() + allowed) / each).clamp_min(2.0**-6)
    step = each * 2.0 ** (torch.frexp(size).exponent - 4.0)
    beyond = ((codes.double() * each - values).abs() - allowed).clamp_min(0)
    return (beyond / step).nan_to_num(nan=float("inf"))


def decoded(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.double() * _of_elements(scale, codes)


def _of_elements(scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return scale.double().repeat_interleave(_width(scale), -1)[..., : like.shape[-1]]


def of_scales(
    scale: torch.Tensor, values: torch.Tensor, slack: float, least: float
) -> torch.Tensor:
    """The error of each block's scale beyond what the error of its largest magnitude explains: of
    float32 scales relative to them, of powers of two in binades.
    """
    largest = _blocks(values, scale).amax(-1) if values.numel() else scale.double()
    if scale.shape != largest.shape:
        return torch.full((1,), float("inf"), dtype=torch.float64)
    free = (slack + ARITHMETIC) * largest.clamp_min(least).where(largest > 0, 0)
    if scale.dtype != torch.float32:
        low, high = (
            ((largest + by) / LARGEST_E4M3).log2().ceil().clamp_min(-127) for by in (-free, free)
        )
        low = low.nan_to_num(nan=-127.0)  # a largest magnitude within its own error of 0
        exponent = scale.double().log2().round()  # on CUDA log2 of a power of two may be off
        return (
            torch.maximum(low - exponent, exponent - high).clamp_min(0).nan_to_num(nan=float("inf"))
        )
    expected = largest.clamp_min(fp8.LEAST).where(largest > 0, LARGEST_E4M3)
    beyond = ((scale.double() * LARGEST_E4M3 - expected).abs() - free).clamp_min(0)
    return (beyond / expected).nan_to_num(nan=float("inf"))


def _width(scale: torch.Tensor) -> int:
    return 128 if scale.dtype == torch.float32 else fp8.MX_BLOCK


def _blocks(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Magnitudes [..., blocks, width], padded with zeros."""
    width = _width(scale)
    padded = torch.nn.functional.pad(values.abs(), (0, -values.shape[-1] % width))
    return padded.reshape(*values.shape[:-1], padded.shape[-1] // width, width)
