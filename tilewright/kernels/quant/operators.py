"""The operators of quantization: what every implementation's launchers take and return.

Codes and scales in eight bits are bytes (uint8). B = matrices of R rows and C columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewright.core.library import declare
from tilewright.kernels.launchers import cdiv


class Noise(NamedTuple):
    """alpha: scale, 0 for no noise.   seed, step, layer: what the values are drawn from."""

    alpha: float
    seed: int
    step: int
    layer: int


class Codes(NamedTuple):
    """A quantized tensor, and its transpose or None.

    data: codes.   scale: the scales of its blocks.
    """

    data: torch.Tensor
    scale: torch.Tensor
    turned: torch.Tensor | None
    turned_scale: torch.Tensor | None


@declare
def draw_noise(
    like: torch.Tensor, first: int, n: int, noise: Noise, dtype: torch.dtype
) -> torch.Tensor:
    """Noise for elements first to first + n - 1, not multiplied by alpha, on like's device."""
    return like.new_empty(n, dtype=dtype)


@declare
def transform(x: torch.Tensor, size: int, seed: int | None, inverse: bool) -> torch.Tensor:
    """The Hadamard transform of contiguous x, whose last dimension divides by size."""
    return torch.empty_like(x)


# ---- NF4


@declare
def nf4_quantize(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n] -> codes [ceil(n / 2)], absmax [blocks]."""
    n = x.shape[0]
    data = x.new_empty((n + 1) // 2, dtype=torch.uint8)
    return data, x.new_empty(cdiv(n, block), dtype=torch.float32)


@declare
def nf4_dequantize(
    data: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    table: torch.Tensor | None,
    offset: torch.Tensor | None,
    n: int,
    block: int,
    dtype: torch.dtype,
    noise: Noise,
) -> torch.Tensor:
    """-> [n].   nested_absmax, table, offset: for double quantization; table: the values of the 256
    codes of scales.
    """
    return data.new_empty(n, dtype=dtype)


# ---- NVFP4


class NVFP4Options(NamedTuple):
    """square: a scale for 16 x 16 elements, not 1 x 16.   seed: for stochastic rounding, or None.
    hadamard: 0, or the size of the transform that is applied first.   hadamard_seed: the seed of
    its signs.   transpose: also the transpose.
    """

    square: bool
    seed: int | None
    hadamard: int
    hadamard_seed: int | None
    transpose: bool


@declare
def nvfp4_quantize(x: torch.Tensor, global_scale: torch.Tensor, options: NVFP4Options) -> Codes:
    """x [B, R, C] -> codes [B, R, ceil(C / 2)], scales [B, R, ceil(C / 16)]."""
    B, R, C = x.shape

    def new(rows, columns):
        return x.new_empty((B, rows, columns), dtype=torch.uint8)

    if not options.transpose:
        return Codes(new(R, cdiv(C, 2)), new(R, cdiv(C, 16)), None, None)
    return Codes(new(R, cdiv(C, 2)), new(R, cdiv(C, 16)), new(C, cdiv(R, 2)), new(C, cdiv(R, 16)))


@declare
def nvfp4_largest(x: torch.Tensor, hadamard: int, hadamard_seed: int | None) -> torch.Tensor:
    """The largest magnitude of the transform of x [B, R, C]; NaN if there is one."""
    return x.new_empty((), dtype=torch.float32)


@declare
def nvfp4_dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    C: int,
    dtype: torch.dtype,
    noise: Noise,
) -> torch.Tensor:
    """data [R, ceil(C / 2)], scale [R, ceil(C / 16)] -> [R, C]."""
    return data.new_empty((data.shape[0], C), dtype=dtype)


# ---- block-scaled FP8, and MXFP8 as blocks of 1 x 32


class FP8(NamedTuple):
    """rows, columns: the size of a block, which has one scale: float32, or for MXFP8 (mx) the
    exponent of a power of two in a byte.   seed: for stochastic rounding, or None.   transpose:
    also the transpose.
    """

    rows: int
    columns: int
    mx: bool
    seed: int | None
    transpose: bool


def fp8_codes(like: torch.Tensor, B: int, R: int, C: int, fp8: FP8) -> Codes:
    """Uninitialized codes [B, R, C] and scales [B, ceil(R / rows), ceil(C / columns)]."""
    rows, columns, mx, _, transpose = fp8
    scales = torch.uint8 if mx else torch.float32

    def new(R, C):
        scale = like.new_empty((B, cdiv(R, rows), cdiv(C, columns)), dtype=scales)
        return like.new_empty((B, R, C), dtype=torch.uint8), scale

    return Codes(*new(R, C), *(new(C, R) if transpose else (None, None)))


@declare
def fp8_quantize(x: torch.Tensor, fp8: FP8) -> Codes:
    """x [B, R, C]."""
    B, R, C = x.shape
    return fp8_codes(x, B, R, C, fp8)


@declare
def fp8_dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    noise: Noise,
) -> torch.Tensor:
    """data [B, R, C], scale [B, ceil(R / rows), ceil(C / columns)] -> [B, R, C]."""
    return data.new_empty(data.shape, dtype=dtype)


# ---- products with a quantized weight

FORMATS = {"nf4": 0, "nvfp4": 1, "block_fp8": 2}  # that a product reads without dequantizing


class Matrix(NamedTuple):
    """A quantized weight [N, K] as products read it, contiguous.

    data, scale: bytes; scale is float32 for NF4 without double quantization and for block FP8.
    nested, table, extra: for double quantization: nested_absmax, the values of the 256 scale codes,
        and the offset; extra is also NVFP4's global scale.
    format: one of FORMATS.   rows, span: rows and columns that share a scale.
    """

    data: torch.Tensor
    scale: torch.Tensor
    nested: torch.Tensor | None
    table: torch.Tensor | None
    extra: torch.Tensor | None
    format: int
    N: int
    rows: int
    span: int


@declare
def few_rows(x: torch.Tensor, bias: torch.Tensor | None, weight: Matrix) -> torch.Tensor:
    """x [T, K] w^T + bias [N] -> [T, N].   T, N and K are not 0."""
    return x.new_empty((x.shape[0], weight.N))
