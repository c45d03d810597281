"""Quantization in Triton fused with another op in one pass over memory: the transpose, the largest
magnitude of a Hadamard transform, silu(gate) * up, RMSNorm, add + RMSNorm. The definitions are
tilewright/ops/{nvfp4,block_fp8,mxfp8,fused_quantize}.py. A kernel detects MXFP8 by its scales,
which are bytes.

Values are rounded to the inputs' dtype before quantization, where the unfused op would round them:
the bytes are those of the two ops in sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.kernels.activation import activation_triton
from tilewright.kernels.device import conversions
from tilewright.kernels.fused_quantize import operators
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv, next_power_of_2, unit
from tilewright.kernels.math_triton import (
    largest_magnitude,
    reciprocal,
    rounded_to,
    widened,
)
from tilewright.kernels.norm import rmsnorm_triton
from tilewright.kernels.norm.operators import sizes
from tilewright.kernels.quant import operators as quantizing
from tilewright.kernels.quant import quantize_triton
from tilewright.kernels.quant.hadamard_triton import TILE, butterflies, sign_mask, signed
from tilewright.kernels.quant.operators import FP8, Codes
from tilewright.kernels.quant.quantize_triton import (
    E2M1,
    E4M3,
    fp8_tile,
    nvfp4_tile,
    random_bits,
    random_kind,
    spec,
)
from tilewright.kernels.spec import KernelSpec

BLOCK, MX_BLOCK = 128, 32  # columns that share a scale in FP8 and in MXFP8


class Square(NamedTuple):
    """A tile of SIDE x SIDE.

    LOW: the neighboring rows that a thread has, see `_places`; columns in `_turned_tile`.
    HADAMARD: the size of the transform that is applied first, 0 for none.
    """

    SIDE: int
    LOW: int
    HADAMARD: int = 0


class Coding(NamedTuple):
    """How a tile is quantized: its blocks of ROWS x COLUMNS share a scale.

    RANDOM: see `random_bits`.   HARDWARE: see `conversions`.
    """

    ROWS: int
    COLUMNS: int
    RANDOM: int
    HARDWARE: int


def _coding(rows: int, columns: int, random: int, x: torch.Tensor) -> Coding:
    return Coding(rows, columns, random, conversions(x.device))


# ---- a tile and its transpose


@triton.jit
def _places(bands, tiles, R, C, SIDE: tl.constexpr, LOW: tl.constexpr, WIDE: tl.constexpr):
    """The place of a program's tile of SIDE x SIDE of [B, R, C], and of the tile's elements.

    Returns the tile's matrix, row and column. Then, for its elements in rows of WIDE: the row less
    its remainder by LOW, the remainder, the column, and whether the element is inside. The last
    four are relative to the tile.

    A thread has 16 bytes of LOW neighboring rows, and a warp all rows of an MXFP8 block, so that
    most of a maximum is taken within a thread, in both directions, and codes of the transpose are
    exchanged several at a time. The compiler lays x out like that as a tensor of rows of 16 bytes,
    ordered by row % LOW, row // LOW and column.
    """
    band = (tl.program_id(0) // tiles).to(tl.int64)
    b = band // bands
    row0 = (band % bands) * SIDE
    column0 = (tl.program_id(0) % tiles) * SIDE
    i = tl.arange(0, SIDE * SIDE // WIDE)[:, None]
    high = i // (SIDE // WIDE) % (SIDE // LOW) * LOW
    low = i // (SIDE // WIDE * (SIDE // LOW))
    c = i % (SIDE // WIDE) * WIDE + tl.arange(0, WIDE)[None, :]
    inside = (high + low < (R - row0).to(tl.int32)) & (c < C - column0)
    return b, row0, column0, high, low, c, inside


def _warps(random: bool) -> int:
    """The warps for a tile of 64 x 64: 64 elements per thread, 16 where each has random bits."""
    return 8 if random else 2


def _square(side: int, warps: int, itemsize: int) -> dict:
    """A tile whose elements lie as in `_places`."""
    return {"SQUARE": Square(side, side * side * itemsize // (512 * warps)), "num_warps": warps}


@triton.jit
def _by_rows(x, SIDE: tl.constexpr, LOW: tl.constexpr):
    """[SIDE, SIDE] of elements in the order of `_places`."""
    x = tl.permute(tl.reshape(x, (LOW, SIDE // LOW, SIDE)), (1, 0, 2))
    return tl.reshape(x, (SIDE, SIDE))


# ---- NVFP4: the tensor's scale


@triton.jit
def _magnitude_bits(v):
    """The magnitudes of v in float32, as integers, in which a NaN is the largest."""
    return v.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit(do_not_specialize=["steps"])
def _largest(x_ptr, most_ptr, n, steps, TILE: tl.constexpr):
    """The largest magnitude of a program's `steps` tiles of memory; NaN if there is one."""
    i = tl.arange(0, TILE)
    bits = tl.zeros([TILE], tl.int32)
    at = tl.program_id(0).to(tl.int64) * TILE + i
    for _ in range(steps):
        bits = tl.maximum(bits, _magnitude_bits(tl.load(x_ptr + at, mask=at < n, other=0.0)))
        at += tl.num_programs(0) * TILE
    most = tl.max(bits, 0).to(tl.float32, bitcast=True)
    tl.store(most_ptr + tl.program_id(0), most)


@triton.jit(do_not_specialize=["n"])
def _total(part_ptr, given_ptr, most_ptr, total_ptr, n, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of n magnitudes, and the scale of their tensor, given or computed from it."""
    bits = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, n, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        bits = tl.maximum(bits, _magnitude_bits(tl.load(part_ptr + i, mask=i < n, other=0.0)))
    most = tl.max(bits, 0).to(tl.float32, bitcast=True)
    if given_ptr is None:
        total = tl.where(most > 0.0, tl.maximum(tl.div_rn(most, 2688.0), LEAST), 1.0)
    else:
        total = tl.load(given_ptr)
    total = tl.where(most < float("inf"), total, total * most)  # keeps a non-finite x visible
    tl.store(most_ptr, most)
    tl.store(total_ptr, total)


@triton.jit(do_not_specialize=["signs"])
def _largest_transformed(x_ptr, most_ptr, n, signs, SIZE: tl.constexpr, TILE: tl.constexpr):
    """The largest magnitude of a program's elements after the transform; NaN if there is one."""
    i = tl.arange(0, TILE)
    at = tl.program_id(0).to(tl.int64) * TILE + i
    v = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    v = butterflies(signed(v, i, signs, SIZE), SIZE)
    tl.store(most_ptr + tl.program_id(0), largest_magnitude(v, 0))


@triton.jit
def _turned_tile(x_ptr, R, C, strides, bands, tiles, signs, SQUARE: tl.constexpr):
    """A tile of SIDE x SIDE of x [B, R, C] whose columns are contiguous, as float32, transformed if
    HADAMARD is not 0; its matrix, row and column. strides: from one matrix and column to the next.

    A thread has two elements of LOW neighboring columns, and a warp 64 of each: loads are of whole
    sectors, and no transform of up to LOW columns, nor a block's largest magnitude, needs another
    thread. The compiler lays x out like that as a tensor of pairs, ordered by column % LOW,
    column // LOW and row, as in `_fp8_both`.
    """
    SIDE: tl.constexpr = SQUARE.SIDE
    LOW: tl.constexpr = SQUARE.LOW
    HADAMARD: tl.constexpr = SQUARE.HADAMARD
    stride, pitch = strides
    band = (tl.program_id(0) // tiles).to(tl.int64)
    b = band // bands
    column0 = (band % bands) * SIDE
    row0 = (tl.program_id(0) % tiles) * SIDE
    i = tl.arange(0, SIDE * SIDE // 2)[:, None]
    high = i // (SIDE // 2) % (SIDE // LOW) * LOW
    low = i // (SIDE // 2 * (SIDE // LOW))
    r = i % (SIDE // 2) * 2 + tl.arange(0, 2)[None, :]
    inside = (high + low < (C - column0).to(tl.int32)) & (r < R - row0)
    at = b * stride + (column0 + high) * pitch + (row0 + r) + low.to(tl.int64) * pitch
    v = widened(tl.load(x_ptr + at, mask=inside, other=0.0))
    v = tl.permute(tl.reshape(v, (LOW, SIDE // LOW, SIDE)), (2, 1, 0))
    v = tl.reshape(v, (SIDE * SIDE,))
    if HADAMARD:  # without signs the mask is 0
        v = butterflies(signed(v, tl.arange(0, SIDE * SIDE), signs, HADAMARD), HADAMARD)
    return tl.reshape(v, (SIDE, SIDE)), b, row0, column0


@triton.jit(do_not_specialize=["C", "bands", "signs"])
def _largest_turned(x_ptr, most_ptr, R, C, strides, bands, tiles, signs, SQUARE: tl.constexpr):
    """`_largest_transformed` of x with contiguous columns."""
    v, _, _, _ = _turned_tile(x_ptr, R, C, strides, bands, tiles, signs, SQUARE)
    most = largest_magnitude(tl.reshape(v, (v.numel,)), 0)
    tl.store(most_ptr + tl.program_id(0), most)


SIDE = 64  # of a tile that is turned: 128 bytes of bf16, and a sector of codes


def _turned_config(random: bool, hadamard: int) -> dict:
    """64 elements per thread, and 32 where each has random bits: with 64, ptxas spills 16 bytes for
    sm_100.
    """
    low = 16 if random else 32
    return {"SQUARE": Square(SIDE, low, hadamard), "num_warps": SIDE // low}


def readable(x: torch.Tensor, transpose: bool) -> torch.Tensor:
    """x [B, R, C] as NVFP4's launchers take it: contiguous, or with contiguous columns, as the
    transpose of a matrix has; with `transpose`, of a contiguous one.
    """
    turned = x.mT.is_contiguous() if transpose else x.stride(1) == 1
    return x if turned else x.contiguous()


def _turned_launch(kernel, x, tensors, more, config, hadamard_seed) -> None:
    """Launches a kernel that reads x with `_turned_tile`.   more: numbers after those of x."""
    B, R, C = x.shape
    bands, tiles = cdiv(C, SIDE), cdiv(R, SIDE)
    strides = x.stride(0) if B > 1 else 0, x.stride(2)
    numbers = R, C, strides, bands, tiles, sign_mask(hadamard_seed), *more
    launch(kernel, (B * bands * tiles,), x, *tensors, *numbers, **config)


# Programs of `_largest`: several for each SM, whose magnitudes `_total` reads in one step.
PARTS = 2048
TOTAL = {"LEAST": 2.0**-112, "BLOCK": 4096, "num_warps": 8}  # nvfp4.LEAST


def _largest_parts(x, hadamard, hadamard_seed):
    """The largest magnitudes of parts of x, or of its transform."""
    dense, n = x.is_contiguous(), x.numel()
    tiles = cdiv(n, TILE)
    if not hadamard and (dense or x.mT.is_contiguous()):
        most = x.new_empty(min(tiles, PARTS), dtype=torch.float32)
        if n:
            steps = cdiv(tiles, most.numel())
            launch(_largest, (most.numel(),), x, most, n, steps, TILE=TILE, num_warps=4)
    elif dense:
        most = x.new_empty(tiles, dtype=torch.float32)
        config = {"SIZE": hadamard, "TILE": TILE, "num_warps": 4}
        if n:
            signs = sign_mask(hadamard_seed)
            launch(_largest_transformed, (tiles,), x, most, n, signs, **config)
    else:
        B, R, C = x.shape
        most = x.new_empty(B * cdiv(C, SIDE) * cdiv(R, SIDE), dtype=torch.float32)
        config = _turned_config(False, hadamard)
        _turned_launch(_largest_turned, x, (most,), (), config, hadamard_seed)
    return most


def nvfp4_scale(x, given, hadamard, hadamard_seed):
    """x: see `readable`."""
    parts = _largest_parts(x, hadamard, hadamard_seed)
    most, total = parts.new_empty(()), parts.new_empty(())
    launch(_total, (1,), parts, given, most, total, parts.numel(), **TOTAL)
    return most, total


# ---- NVFP4: codes


@triton.jit
def _nvfp4_put(x, at, memory, total, place, width, key, CODING: tl.constexpr):
    """Quantizes a tile x.

    at: its elements' numbers, for random bits.   memory: where codes and scales are.
    place: the first row of the tile's matrix overall, its numbers of rows and of columns, and the
        tile's first row and column.   width: bytes of a row's codes.
    """
    data_ptr, scale_ptr = memory
    first, rows, columns, row0, column0 = place
    if CODING.RANDOM:
        random = random_bits(at, key, CODING.RANDOM)
    else:
        random = 0
    code, scale = nvfp4_tile(
        x.to(tl.float32), total, random, CODING.ROWS, CODING.RANDOM, CODING.HARDWARE
    )
    r = row0 + tl.arange(0, x.shape[0])
    byte = column0 // 2 + tl.arange(0, x.shape[1] // 2)
    g = column0 // 16 + tl.arange(0, x.shape[1] // 16)
    groups = (columns + 15) // 16
    row = first + r
    tl.store(
        data_ptr + row[:, None] * width + byte[None, :],
        code,
        mask=(r < rows)[:, None] & (byte < width)[None, :],
    )
    tl.store(
        scale_ptr + row[:, None] * groups + g[None, :],
        scale,
        mask=(r < rows)[:, None] & (g < groups)[None, :],
    )


@triton.jit(do_not_specialize=["C", "bands", "signs", "key"])
def _nvfp4_turned(
    x_ptr,
    total_ptr,
    data_ptr,
    scale_ptr,
    R,
    C,
    strides,
    bands,
    tiles,
    signs,
    width,
    key,
    SQUARE: tl.constexpr,
    CODING: tl.constexpr,
):
    """Quantizes a tile of x with contiguous columns, or of its transform."""
    v, b, row0, column0 = _turned_tile(x_ptr, R, C, strides, bands, tiles, signs, SQUARE)
    r = row0 + tl.arange(0, SQUARE.SIDE)
    c = column0 + tl.arange(0, SQUARE.SIDE)
    at = (b * R + r)[:, None] * C + c[None, :]
    total, place = tl.load(total_ptr), (b * R, R, C, row0, column0)
    _nvfp4_put(v, at, (data_ptr, scale_ptr), total, place, width, key, CODING)


@triton.jit(do_not_specialize=["R", "bands", "key"])
def _nvfp4_both(
    x_ptr,
    total_ptr,
    data_ptr,
    scale_ptr,
    turned_ptr,
    turned_scale_ptr,
    R,
    C,
    width,
    turned_width,
    bands,
    tiles,
    key,
    SQUARE: tl.constexpr,
    CODING: tl.constexpr,
):
    """Quantizes a tile of SIDE x SIDE of x and, given `turned`, its transpose."""
    SIDE: tl.constexpr = SQUARE.SIDE
    WIDE: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    b, row0, column0, high, low, c, inside = _places(bands, tiles, R, C, SIDE, SQUARE.LOW, WIDE)
    at = (b * R + row0 + high) * C + column0 + c + low.to(tl.int64) * C
    x = _by_rows(widened(tl.load(x_ptr + at, mask=inside, other=0.0)), SIDE, SQUARE.LOW)
    r = row0 + tl.arange(0, SIDE)
    c = column0 + tl.arange(0, SIDE)
    at = (b * R + r)[:, None] * C + c[None, :]
    total, place = tl.load(total_ptr), (b * R, R, C, row0, column0)
    _nvfp4_put(x, at, (data_ptr, scale_ptr), total, place, width, key, CODING)
    if turned_ptr is not None:
        at = (b * C + c)[:, None] * R + r[None, :]
        memory, place = (turned_ptr, turned_scale_ptr), (b * C, C, R, column0, row0)
        _nvfp4_put(tl.trans(x), at, memory, total, place, turned_width, key, CODING)


def _nvfp4_of_turned(x, global_scale, options):
    square, seed, hadamard, hadamard_seed, _ = options
    codes = quantizing.nvfp4_quantize(x, global_scale, options)
    if x.numel():
        random = random_kind(seed, x.shape[2])
        config = {
            **_turned_config(seed is not None, hadamard),
            "CODING": _coding(16 if square else 1, 16, random, x),
        }
        more = codes.data.shape[2], seed or 0
        tensors = global_scale, codes.data, codes.scale
        _turned_launch(_nvfp4_turned, x, tensors, more, config, hadamard_seed)
    return codes


def nvfp4_quantize(x, global_scale, options):
    """x: see `readable`."""
    turned = not x.is_contiguous()
    if not options.transpose:
        if turned:
            return _nvfp4_of_turned(x, global_scale, options)
        if options.hadamard or not options.square:
            return quantize_triton.nvfp4_quantize(x, global_scale, options)
    codes = quantizing.nvfp4_quantize(x, global_scale, options)
    if x.numel():
        outputs = tuple(codes)
        if turned:
            x, outputs = x.mT, outputs[2:] + outputs[:2]
        B, R, C = x.shape
        seed = options.seed
        bands, tiles = cdiv(R, SIDE), cdiv(C, SIDE)
        numbers = R, C, cdiv(C, 2), cdiv(R, 2), bands, tiles, seed or 0
        launch(
            _nvfp4_both,
            (B * bands * tiles,),
            *(x, global_scale, *outputs, *numbers),
            CODING=_coding(16 if options.square else 1, 16, random_kind(seed, R, C), x),
            **_square(SIDE, _warps(seed is not None), x.element_size()),
        )
    return codes


# ---- block-scaled FP8 or MXFP8 of a matrix, or MXFP8 of silu(gate) * up, and of its transpose


@triton.jit
def _by_threads(x, LOW: tl.constexpr, WIDE: tl.constexpr):
    """The reverse."""
    SIDE: tl.constexpr = x.shape[0]
    x = tl.permute(tl.reshape(x, (SIDE // LOW, LOW, SIDE)), (1, 0, 2))
    return tl.reshape(x, (SIDE * SIDE // WIDE, WIDE))


@triton.jit
def _offsets(row, low, c, stride, UNIT: tl.constexpr):
    """Only the last term differs between the rows of a thread."""
    return (row * stride * UNIT + c) + low * stride * UNIT


@triton.jit
def _fp8_codes(v, random, MX: tl.constexpr, CODING: tl.constexpr):
    """`fp8_tile` in blocks of CODING."""
    return fp8_tile(v, random, CODING.ROWS, CODING.COLUMNS, CODING.RANDOM, CODING.HARDWARE, MX)


@triton.jit
def _put_scales(inverse, to_ptr, b, rows, columns, row0, column0, CODING: tl.constexpr):
    """Stores the inverse scales of the tile at (row0, column0) of matrix b."""
    ROWS: tl.constexpr = CODING.ROWS
    COLUMNS: tl.constexpr = CODING.COLUMNS
    r = row0 // ROWS + tl.arange(0, inverse.shape[0])
    g = column0 // COLUMNS + tl.arange(0, inverse.shape[1])
    down = (rows + ROWS - 1) // ROWS
    across = (columns + COLUMNS - 1) // COLUMNS
    tl.store(
        to_ptr + (b * down + r)[:, None] * across + g[None, :],
        inverse,
        mask=(r < down)[:, None] & (g < across)[None, :],
    )


@triton.jit(do_not_specialize=["rows", "bands", "key"])
def _fp8_both(
    x_ptr,
    up_ptr,
    data_ptr,
    inverse_ptr,
    turned_ptr,
    turned_inverse_ptr,
    rows,
    columns,
    bands,
    tiles,
    stride,
    up_stride,
    key,
    ROW_UNIT: tl.constexpr,
    UNIT: tl.constexpr,
    SQUARE: tl.constexpr,
    CODING: tl.constexpr,
):
    """Quantizes a tile of SIDE x SIDE of x, or of silu(x) * up if up is given, and its transpose.
    columns and strides are in units of UNIT elements, rows (of a matrix) of ROW_UNIT: this makes
    the alignment of stores explicit.
    """
    WIDE: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    MX: tl.constexpr = inverse_ptr.dtype.element_ty == tl.uint8
    SIDE: tl.constexpr = SQUARE.SIDE
    LOW: tl.constexpr = SQUARE.LOW
    RANDOM: tl.constexpr = CODING.RANDOM
    R = rows * ROW_UNIT
    C = columns * UNIT
    b, row0, column0, high, low, c, inside = _places(bands, tiles, R, C, SIDE, LOW, WIDE)
    row = b * R + row0 + high
    low = low.to(tl.int64)
    c += column0
    at = _offsets(row, low, c, stride, UNIT)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    y = widened(x)
    if up_ptr is not None:
        at = _offsets(row, low, c, up_stride, UNIT)
        up = tl.load(up_ptr + at, mask=inside, other=0.0)
        y = rounded_to(activation_triton.activation(y, 0) * widened(up), x.dtype)
    y = _by_rows(y, SIDE, LOW)
    at = _offsets(row, low, c, columns, UNIT)
    if RANDOM:
        random = random_bits(_by_rows(at, SIDE, LOW), key, RANDOM)
    else:
        random = 0
    code, inverse = _fp8_codes(y, random, MX, CODING)
    tl.store(data_ptr + at, _by_threads(code, LOW, WIDE), mask=inside)
    _put_scales(inverse, inverse_ptr, b, R, C, row0, column0, CODING)
    r = row0 + tl.arange(0, SIDE)
    c = column0 + tl.arange(0, SIDE)
    at = (b * C + c)[:, None] * R + r[None, :]
    if RANDOM:
        random = random_bits(at, key, RANDOM)
    code, inverse = _fp8_codes(tl.trans(y), random, MX, CODING)
    tl.store(turned_ptr + at, code, mask=(c < C)[:, None] & (r < R)[None, :])
    _put_scales(inverse, turned_inverse_ptr, b, C, R, column0, row0, CODING)


def _tile(rows: int, columns: int, mx: bool, random: bool, itemsize: int) -> dict:
    """The tile's side is that of a block; 64 in MXFP8, for rows of two sectors in each result.

    64 elements per thread: each thread computes the scales of its rows and columns, so that fewer
    elements take more instructions, and more take so many registers that an SM has too few loads in
    flight.
    """
    side = 64 if mx else max(rows, columns, 32)
    warps = _warps(random) if mx else max(1, side * side // 2048)
    return _square(side, warps, itemsize)


def _both(x: torch.Tensor, up: torch.Tensor | None, codes: Codes, fp8: FP8) -> Codes:
    """Fills codes [B, R, C] and their transposes from x and up [B * R, C] with contiguous columns,
    of at least one element.
    """
    B, R, C = codes.data.shape
    c = _tile(fp8.rows, fp8.columns, fp8.mx, fp8.seed is not None, x.element_size())
    bands, tiles = cdiv(R, c["SQUARE"].SIDE), cdiv(C, c["SQUARE"].SIDE)
    by = unit(x.element_size(), C, x.stride(0), 0 if up is None else up.stride(0))
    row_unit = 16 if R % 16 == 0 else 1
    strides = x.stride(0) // by, 0 if up is None else up.stride(0) // by
    launch(
        _fp8_both,
        (B * bands * tiles,),
        *(x, up, *codes, R // row_unit, C // by, bands, tiles, *strides, fp8.seed or 0),
        ROW_UNIT=row_unit,
        UNIT=by,
        CODING=_coding(fp8.rows, fp8.columns, random_kind(fp8.seed, R, C), x),
        **c,
    )
    return codes


def fp8_quantize(x, fp8):
    """With the transpose, one pass over x in MXFP8, and otherwise if blocks fill a square tile:
    power-of-two sides up to 128. Not with stochastic rounding, whose random words for whole tiles
    do not fit in registers (ptxas spills 900 bytes and more for sm_90).
    """
    if not fp8.transpose:
        return quantize_triton.fp8_quantize(x, fp8)
    rows, columns, mx, seed, _ = fp8
    B, R, C = x.shape
    uneven = max(rows, columns) > 128 or rows & (rows - 1) or columns & (columns - 1)
    if x.numel() and not mx and (uneven or seed is not None):
        one = fp8._replace(transpose=False)
        return Codes(
            *quantize_triton.fp8_quantize(x, one)[:2],
            *quantize_triton.fp8_quantize(x.mT.contiguous(), one)[:2],
        )
    codes = quantizing.fp8_quantize(x, fp8)
    return _both(x.view(B * R, C), None, codes, fp8) if x.numel() else codes


# ---- silu(gate) * up, then FP8


@triton.jit(do_not_specialize=["key"])
def _silu_mul_quantize(
    gate_ptr,
    up_ptr,
    data_ptr,
    inverse_ptr,
    columns,
    tiles,
    gate_stride,
    up_stride,
    key,
    UNIT: tl.constexpr,
    GROUPS: tl.constexpr,
    CODING: tl.constexpr,
):
    """GROUPS blocks of one row. Strides and columns are in units of UNIT elements: see
    activation_triton.
    """
    BLOCK: tl.constexpr = CODING.COLUMNS
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    n = columns * UNIT
    c = tile * (GROUPS * BLOCK) + tl.arange(0, GROUPS * BLOCK)
    mask = c < n
    gate = tl.load(gate_ptr + row * gate_stride * UNIT + c, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * up_stride * UNIT + c, mask=mask, other=0.0)
    y = rounded_to(activation_triton.activation(widened(gate), 0) * widened(up), gate.dtype)
    at = row * n + c
    if CODING.RANDOM:
        random = random_bits(at, key, CODING.RANDOM)
    else:
        random = 0
    MX: tl.constexpr = inverse_ptr.dtype.element_ty == tl.uint8
    code, inverse = _fp8_codes(tl.reshape(y, (1, GROUPS * BLOCK)), random, MX, CODING)
    tl.store(data_ptr + at, tl.reshape(code, (GROUPS * BLOCK,)), mask=mask)
    g = tile * GROUPS + tl.arange(0, GROUPS)
    across = (n + BLOCK - 1) // BLOCK
    tl.store(inverse_ptr + row * across + g, tl.reshape(inverse, (GROUPS,)), mask=g < across)


# Elements per program: with 2 warps, two 128-bit loads of each bf16 operand per thread.
SILU_TILE = 1024


def silu_mul_quantize(gate, up, R, fp8):
    codes = operators.silu_mul_quantize(gate, up, R, fp8)
    if not gate.numel():
        return codes
    seed, block = fp8.seed, fp8.columns
    if fp8.transpose:
        return _both(gate, up, codes, fp8)
    rows, columns = gate.shape
    across = cdiv(columns, block)
    groups = min(SILU_TILE // block, next_power_of_2(across))
    tiles = cdiv(across, groups)
    by = unit(gate.element_size(), columns, gate.stride(0), up.stride(0))
    numbers = columns // by, tiles, gate.stride(0) // by, up.stride(0) // by, seed or 0
    launch(
        _silu_mul_quantize,
        (rows * tiles,),
        *(gate, up, codes.data, codes.scale, *numbers),
        UNIT=by,
        GROUPS=groups,
        CODING=_coding(1, block, random_kind(seed, columns), gate),
        num_warps=max(1, groups * block // 512),
    )
    return codes


# ---- RMSNorm, or add + RMSNorm, then FP8


class Norm(NamedTuple):
    """What is constant of a norm.

    H, D: heads and columns, see `sizes`.   OFFSET: of weights.   BIAS: whether there is one.
    ROUND_XHAT: whether the row is rounded before weights.   KEEP: whether y is stored.
    WALK: whether a row is wider than a block.
    """

    H: int
    D: int
    OFFSET: float
    BIAS: bool
    ROUND_XHAT: bool
    KEEP: bool
    WALK: bool


@triton.jit
def _quantize_rows(y, at, mask, memory, rows, column0, D, key, CODING: tl.constexpr):
    """y [rows, columns] float32, from column column0 on; `at`: offsets in all of x.

    memory: where codes and inverse scales are.   rows: their numbers, and which exist.
    """
    data_ptr, inverse_ptr = memory
    row, in_t = rows
    BLOCK: tl.constexpr = CODING.COLUMNS
    if CODING.RANDOM:  # D is constexpr: the compiler itself computes four elements' words once
        random = random_bits(at, key, CODING.RANDOM)
    else:
        random = 0
    MX: tl.constexpr = inverse_ptr.dtype.element_ty == tl.uint8
    code, inverse = _fp8_codes(y, random, MX, CODING)
    tl.store(data_ptr + at, code, mask=mask)
    g = column0 // BLOCK + tl.arange(0, y.shape[1] // BLOCK)
    across = (D + BLOCK - 1) // BLOCK
    tl.store(
        inverse_ptr + row[:, None] * across + g[None, :],
        inverse,
        mask=in_t[:, None] & (g < across)[None, :],
    )


@triton.jit
def _columns(ptr, c, D, ROWS: tl.constexpr):
    """ptr[c] [1, columns] as float32, 0 from D on. A tile of one row is loaded in its
    own layout.
    """
    if ROWS == 1:
        v = widened(tl.load(ptr + c[None, :], mask=(c < D)[None, :], other=0.0))
    else:
        v = tl.load(ptr + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    return v


@triton.jit
def _normalized(
    x, rstd, w_ptr, b_ptr, y_ptr, at, mask, h, c, DTYPE: tl.constexpr, NORM: tl.constexpr
):
    w = _columns(w_ptr + h * NORM.D, c, NORM.D, x.shape[0])
    if NORM.OFFSET != 0.0:
        w += NORM.OFFSET
    y = x * rstd[:, None]
    if NORM.ROUND_XHAT:
        y = rounded_to(y, DTYPE)
    y = y * w
    if NORM.BIAS:
        y += _columns(b_ptr, c, NORM.D, x.shape[0])
    y = rounded_to(y, DTYPE)
    if NORM.KEEP:
        tl.store(y_ptr + at, y.to(DTYPE), mask=mask)
    return y  # past the end of a row it is 0, as x and b are there


@triton.jit
def _summed(x_ptr, residual_ptr, sum_ptr, at, mask, STORE: tl.constexpr):
    """The input of the norm, float32: x, or its sum with the residual, rounded to the residual's
    dtype.
    """
    x = widened(tl.load(x_ptr + at, mask=mask, other=0.0))
    if residual_ptr is not None:
        total = (x + widened(tl.load(residual_ptr + at, mask=mask, other=0.0))).to(
            sum_ptr.dtype.element_ty
        )
        if STORE:
            tl.store(sum_ptr + at, total, mask=mask)
        x = widened(total)
    return x


@triton.jit(do_not_specialize=["T", "key"])
def _rmsnorm_quantize(
    x_ptr,
    residual_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    sum_ptr,
    data_ptr,
    inverse_ptr,
    T,
    eps,
    key,
    NORM: tl.constexpr,
    CODING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """rmsnorm_triton._forward, with the same sums and order of operations, and the quantization of
    its rows.
    """
    D: tl.constexpr = NORM.D
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.program_id(1)
    row = t * NORM.H + h
    cols = tl.arange(0, BLOCK_D)
    in_t = t < T
    memory, rows = (data_ptr, inverse_ptr), (row, in_t)
    if not NORM.WALK:
        mask = in_t[:, None] & (cols < D)[None, :]
        at = row[:, None] * D + cols[None, :]
        x = _summed(x_ptr, residual_ptr, sum_ptr, at, mask, True)
        rstd = reciprocal(tl.sqrt(tl.sum(x * x, axis=1) / D + eps))
        y = _normalized(x, rstd, w_ptr, b_ptr, y_ptr, at, mask, h, cols, DTYPE, NORM)
        _quantize_rows(y, at, mask, memory, rows, 0, D, key, CODING)
    else:
        ss = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            c = start + cols
            mask = in_t[:, None] & (c < D)[None, :]
            x = _summed(x_ptr, residual_ptr, sum_ptr, row[:, None] * D + c[None, :], mask, True)
            ss += x * x
        rstd = reciprocal(tl.sqrt(tl.sum(ss, axis=1) / D + eps))
        for start in range(0, D, BLOCK_D):
            c = start + cols
            mask = in_t[:, None] & (c < D)[None, :]
            at = row[:, None] * D + c[None, :]
            x = _summed(x_ptr, residual_ptr, sum_ptr, at, mask, False)
            y = _normalized(x, rstd, w_ptr, b_ptr, y_ptr, at, mask, h, c, DTYPE, NORM)
            _quantize_rows(y, at, mask, memory, rows, start, D, key, CODING)


def _registers(wider: bool) -> dict:
    """The register limit of a launch whose residual is wider than x. Without it, ptxas targets 48
    registers per thread for sm_90 with rows of 4,096, and spills 8 bytes; with this limit, which
    the largest block needs, it uses 58.
    """
    return {"maxnreg": 128} if wider else {}


def rmsnorm_quantize(x, residual, weight, bias, norm, keep, fp8):
    """Uses rmsnorm's or add_rmsnorm's launch configuration, which determines the order of its
    sums.
    """
    T, H, D = sizes(x, weight)
    add = residual is not None
    normalized = operators.rmsnorm_quantize(x, residual, weight, bias, norm, keep, fp8)
    if T:
        c = rmsnorm_triton.FORWARD.config(x.device, D, x.element_size(), add)
        columns, walk = min(fp8.columns, c["BLOCK_D"]), c["BLOCK_D"] < D
        outputs = normalized.y, normalized.total, normalized.data, normalized.scale
        launch(
            _rmsnorm_quantize,
            (cdiv(T, c["BLOCK_T"]), H),
            *(x, residual, weight, bias, *outputs, T, norm.eps, fp8.seed or 0),
            NORM=Norm(H, D, norm.offset, bias is not None, norm.round_xhat, keep, walk),
            CODING=_coding(1, columns, fp8.seed is not None, x),
            **_registers(add and residual.dtype != x.dtype),
            **c,
        )
    return normalized


# ---- for the compile gate


def nvfp4_gate() -> list[KernelSpec]:
    specs = _turned_specs()
    codes = {"total": "fp32", "data": "u8", "scale": "u8"}
    both = {**codes, "turned": "u8", "turned_scale": "u8"}
    for d in ("bf16", "fp32"):
        for tall, outputs in ((1, both), (16, both), (16, codes)):
            for random in (False, True):
                config = _square(SIDE, _warps(random), 2 if d == "bf16" else 4)
                kind = quantize_triton.nvfp4_kind(tall, random, 0)
                label = f"nvfp4 quantize{' both' if outputs is both else ''} {d}{kind}"
                for hardware, (name, archs) in ((1, ("", E4M3)),) if random else E2M1.items():
                    specs.append(
                        spec(
                            _nvfp4_both,
                            f"{label}{name}",
                            {"x": d, **outputs},
                            {**config, "CODING": Coding(tall, 16, 2 * random, hardware)},
                            store=0,
                            divisible=("R", "C", "width", "turned_width"),
                            elements=(2 if outputs is both else 1) * SIDE * SIDE,
                            **archs,
                        )
                    )
        specs += [
            spec(
                _largest_transformed,
                f"nvfp4 largest {d} hadamard {size}",
                {"x": d, "most": "fp32"},
                {"SIZE": size, "TILE": TILE},
                store=0,  # a program writes one number
                divisible=("n",),
            )
            for size in (16, 32)
        ]
        specs.append(
            spec(
                _largest,
                f"nvfp4 largest {d}",
                {"x": d, "most": "fp32"},
                {"TILE": TILE},
                store=0,  # a program writes one number
                divisible=("n",),
                elements=TILE,
            )
        )
    for given in ("", " given"):
        pointers = {"part": "fp32", "given": "fp32" if given else None, "*": "fp32"}
        specs.append(spec(_total, f"nvfp4 total{given}", pointers, TOTAL, load=0, store=0))
    return specs


def _turned_specs() -> list[KernelSpec]:
    """A warp's loads are of whole sectors, 4 or 8 bytes per thread."""
    codes = {"total": "fp32", "data": "u8", "scale": "u8"}
    numbers = {**quantize_triton.NUMBERS, "strides": ("i32", "i32")}
    needs = {"divisible": ("R", "strides", "width"), "elements": SIDE * SIDE}
    specs = []
    for d, load in (("bf16", 32), ("fp32", 64)):
        for tall, random, size in quantize_triton.NVFP4_KINDS:
            config = _turned_config(random, size)
            label = f"nvfp4 turned {d}{quantize_triton.nvfp4_kind(tall, random, size)}"
            for hardware, (name, archs) in ((1, ("", E4M3)),) if random else E2M1.items():
                specs.append(
                    KernelSpec.of(
                        _nvfp4_turned,
                        f"{label}{name}",
                        {"x": d, **codes},
                        {**config, "CODING": Coding(tall, 16, 2 * random, hardware)},
                        numbers,
                        load=load,
                        **needs,
                        **archs,
                    )
                )
        specs += [
            KernelSpec.of(
                _largest_turned,
                f"nvfp4 largest turned {d}{f' hadamard {size}' if size else ''}",
                {"x": d, "most": "fp32"},
                _turned_config(False, size),
                numbers,
                load=load,
                store=0,  # a program writes one number
                **needs,
            )
            for size in (0, 16, 32)
        ]
    return specs


def _both_spec(
    label: str,
    d: str,
    block: tuple[int, int, bool],
    row_unit: int = 16,
    random: bool = False,
    silu: bool = False,
) -> KernelSpec:
    """block: rows, columns, and whether it is MXFP8's. row_unit: 1 for an odd number of rows, whose
    transpose is stored byte by byte; otherwise sides are multiples of 16.
    """
    c = _tile(*block, random, 2 if d == "bf16" else 4)
    scales = "u8" if block[2] else "fp32"
    codes = {"data": "u8", "inverse": scales, "turned": "u8", "turned_inverse": scales}
    return spec(
        _fp8_both,
        f"{label}{' random' if random else ''}{' odd' if row_unit == 1 else ''}",
        {"x": d, **({"up": d} if silu else {}), **codes},
        {
            **c,
            "ROW_UNIT": row_unit,
            "UNIT": 8 if d == "bf16" else 4,
            "CODING": Coding(*block[:2], 2 * random, 1),
        },
        store=0 if random or row_unit == 1 else 128,
        per_sm=2 if d == "bf16" else 1,  # one loads while another quantizes
        elements=2 * c["SQUARE"].SIDE ** 2,
        **{} if random else E4M3,
    )


def block_fp8_gate() -> list[KernelSpec]:
    return [
        _both_spec(f"block_fp8 quantize both {d} {rows}x128", d, (rows, 128, False))
        for d in ("bf16", "fp32")
        for rows in (1, 128)
    ]


def mxfp8_gate(silu: bool = False) -> list[KernelSpec]:
    op = "silu_mul mxfp8" if silu else "mxfp8 quantize"
    kinds = (("bf16", 16, False), ("bf16", 16, True), ("fp32", 16, False), ("bf16", 1, False))
    return [
        _both_spec(f"{op} both {d}", d, (1, MX_BLOCK, True), row_unit, random, silu)
        for d, row_unit, random in kinds[: 4 if silu else 3]
    ]


def silu_mul_gate() -> list[KernelSpec]:
    """Rows aligned to 16 bytes, and an odd width, whose rows are read element by element. The codes
    of a thread's 8 elements are 8 bytes.
    """
    specs = []
    for d, by, random, mx in (
        ("bf16", 8, False, False),
        ("bf16", 8, True, False),
        ("bf16", 1, False, False),
        ("fp32", 4, False, False),
        ("bf16", 8, False, True),
        ("fp32", 4, True, True),
    ):
        block = MX_BLOCK if mx else BLOCK
        label = f"silu_mul quantize {'mxfp8 ' if mx else ''}{d}{' random' if random else ''}"
        specs.append(
            spec(
                _silu_mul_quantize,
                f"{label}{' odd' if by == 1 else ''}",
                {"gate": d, "up": d, "data": "u8", "inverse": "u8" if mx else "fp32"},
                {
                    "UNIT": by,
                    "GROUPS": SILU_TILE // block,
                    "CODING": Coding(1, block, 2 * random, 1),
                },
                SILU_TILE // 512,
                load=0 if by == 1 else 128,
                store=0,
                elements=SILU_TILE,
                **{} if random else E4M3,
            )
        )
    return [*specs, *mxfp8_gate(silu=True)]


_WIDTHS = 128, 4096, 8192, 16384, 65536  # several rows per program, one, and a part of one
# x and weight, whether there is a bias, whether the normalized row is rounded, stochastic rounding,
# whether the normalized row is returned.
_NORMS = (
    ("bf16", "bf16", False, True, False, False),
    ("bf16", "fp32", True, True, False, True),
    ("bf16", "bf16", False, True, True, False),
    ("fp32", "fp32", True, False, False, True),
)


def rmsnorm_gate() -> list[KernelSpec]:
    return [
        *(_rmsnorm_spec(*norm, D) for norm in _NORMS for D in _WIDTHS),
        *(_rmsnorm_spec(*_NORMS[0], D, mx=True) for D in (128, 4096)),
    ]


def add_rmsnorm_gate() -> list[KernelSpec]:
    """The residual in x's dtype, and in float32 where the normalized row is then not rounded;
    MXFP8.
    """
    return [
        *(_rmsnorm_spec(*_NORMS[0], D, add="bf16") for D in _WIDTHS),
        *(
            _rmsnorm_spec("bf16", "bf16", False, False, False, True, D, add="fp32")
            for D in (4096, 16384)
        ),
        *(_rmsnorm_spec(*_NORMS[0], D, add="bf16", mx=True) for D in (128, 4096)),
    ]


def _rmsnorm_spec(d, weight, bias, cast, random, keep, D, *, add="", mx=False) -> KernelSpec:
    """add: the residual's dtype, or none."""
    pointers = {
        **dict.fromkeys(("x", "y"), d),
        **dict.fromkeys(("w", "b"), weight),
        "sum": add or d,
        "data": "u8",
        "inverse": "u8" if mx else "fp32",
        **({"residual": add} if add else {}),
    }
    c = dict(rmsnorm_triton.FORWARD.heuristic(D=D, itemsize=2 if d == "bf16" else 4, add=bool(add)))
    num_warps, walk = c.pop("num_warps"), c["BLOCK_D"] < D
    label = (
        f"{'add_' if add else ''}rmsnorm quantize {'mxfp8 ' if mx else ''}{d} weight={weight}"
        f"{f' residual={add}' if add else ''}{' bias' if bias else ''}{' random' if random else ''} D={D}"
    )
    return spec(
        _rmsnorm_quantize,
        label,
        pointers,
        {
            "NORM": Norm(8 if D == 128 else 1, D, 1.0 if bias else 0.0, bias, cast, keep, walk),
            "CODING": Coding(1, MX_BLOCK if mx else BLOCK, random, 1),
            **c,
        },
        num_warps,
        store=128 if keep or add else 0,
        options=_registers(add not in ("", d)),
        elements=c["BLOCK_T"] * c["BLOCK_D"],
        **{} if random else E4M3,
    )
