"""NF4, NVFP4 and block-scaled FP8 in Triton. The definitions are in tilewright/ops/{nf4,nvfp4,block_fp8}.py, and the
rounding in tilewright/ops/quantize.py; what is quantised has the same bytes there and here.

Codes are made and read with integer operations on the bits of float32: no cast to or from an 8-bit float, which not
every GPU has and the interpreter rounds in its own way. Divisions are `div_rn`, which are correctly rounded. HARDWARE:
the GPU has instructions for e2m1 (compute capability 10.0 and up), which give the same bits.

Each kernel reads its input once: a program holds whole blocks in registers, takes their largest magnitudes (as bits,
so that a NaN stays the largest), rounds and packs.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from tilewright.kernels import aqn_triton
from tilewright.kernels.hadamard_triton import butterflies, sign_mask, signed
from tilewright.kernels.spec import KernelSpec

TILE = 2048     # elements of a program that quantises
CODES = 1024    # bytes of a program that reads 4-bit codes


# ---- rounding

@triton.jit
def _encode(v, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, random, RANDOM: tl.constexpr):
    """Codes without signs of float32 |v|: see `encode` in tilewright/ops/quantize.py."""
    v = tl.abs(v)
    v = tl.where(v > LARGEST, LARGEST, v)
    e = (v.to(tl.int32, bitcast=True) >> 23) - 127
    e = tl.where(e < LOWEST, LOWEST, e)
    units = v * ((MANTISSA - e + 127) << 23).to(tl.float32, bitcast=True)
    if RANDOM:
        n = ((units * 16777216.0).to(tl.int32) + (random >> 8).to(tl.int32)) >> 24
    else:
        # Adding 2^23 rounds to an integer, ties to even, and subtracting it is exact: units are 16 at most.
        n = ((units + 8388608.0) - 8388608.0).to(tl.int32)
    return ((e - LOWEST) << MANTISSA) + n


@triton.jit
def _to_e4m3(v, random, RANDOM: tl.constexpr):
    sign = (v.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (_encode(v, 448.0, 3, -6, random, RANDOM) | sign).to(tl.uint8)


@triton.jit
def _from_e4m3(code):
    """Subnormal numbers too, without subnormal float32 on the way."""
    c = code.to(tl.int32)
    u = c & 0x7F
    small = u < 8
    v = ((u << 20) + (tl.where(small, 121, 120) << 23)).to(tl.float32, bitcast=True) - tl.where(small, 0.015625, 0.0)
    v = tl.where(u == 0x7F, float("nan"), v)
    return (v.to(tl.int32, bitcast=True) | ((c & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _from_e2m1(code):
    """Codes 0 to 15. The halves of 0, 1, 2, 3, 4, 6, 8, 12."""
    u = code & 7
    e = u >> 1
    v = tl.where(u < 2, u, (2 + (u & 1)) << tl.where(e > 0, e - 1, 0)).to(tl.float32) * 0.5
    return (v.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


# Four bytes of two codes each, of four numbers for the low halves and four for the high ones. The first operand of the
# instruction becomes the high half.
_TO_E2M1: tl.constexpr = tl.constexpr("""
{
.reg .b8 e2m1_a, e2m1_b, e2m1_c, e2m1_d;
cvt.rn.satfinite.e2m1x2.f32 e2m1_a, $5, $1;
cvt.rn.satfinite.e2m1x2.f32 e2m1_b, $6, $2;
cvt.rn.satfinite.e2m1x2.f32 e2m1_c, $7, $3;
cvt.rn.satfinite.e2m1x2.f32 e2m1_d, $8, $4;
mov.b32 $0, {e2m1_a, e2m1_b, e2m1_c, e2m1_d};
}
""")
# The reverse, by way of float16, which holds all of e2m1's values: four for the low halves, four for the high ones.
_FROM_E2M1: tl.constexpr = tl.constexpr("""
{
.reg .b8 e2m1_a, e2m1_b, e2m1_c, e2m1_d;
.reg .b16 half_a, half_b;
.reg .b32 both;
mov.b32 {e2m1_a, e2m1_b, e2m1_c, e2m1_d}, $8;
cvt.rn.f16x2.e2m1x2 both, e2m1_a;
mov.b32 {half_a, half_b}, both;
cvt.f32.f16 $0, half_a;
cvt.f32.f16 $4, half_b;
cvt.rn.f16x2.e2m1x2 both, e2m1_b;
mov.b32 {half_a, half_b}, both;
cvt.f32.f16 $1, half_a;
cvt.f32.f16 $5, half_b;
cvt.rn.f16x2.e2m1x2 both, e2m1_c;
mov.b32 {half_a, half_b}, both;
cvt.f32.f16 $2, half_a;
cvt.f32.f16 $6, half_b;
cvt.rn.f16x2.e2m1x2 both, e2m1_d;
mov.b32 {half_a, half_b}, both;
cvt.f32.f16 $3, half_a;
cvt.f32.f16 $7, half_b;
}
""")


@triton.jit
def _to_e2m1(v, random, RANDOM: tl.constexpr, HARDWARE: tl.constexpr):
    """Bytes of two codes of float32 v [.., 2], the first in the low half.   HARDWARE: to nearest, by the GPU.

    That the two agree to the bit: both round to nearest with ties to even, where neighbouring codes are those of
    neighbouring numbers, so that even codes have even mantissas; both make 6 of what is above; and both keep the sign,
    of -0.0 and of what becomes zero too (subnormal float32 does, flushed or not). NaN, which the instruction would make
    6, is the one difference. It comes only from an x or a scale that is not finite, which `quantize_nvfp4` refuses, or
    shows in global_scale.
    """
    if HARDWARE:
        first, second = tl.split(v)
        both = tl.inline_asm_elementwise(_TO_E2M1, "=r,f,f,f,f,f,f,f,f", [first, second], dtype=tl.uint8, is_pure=True,
                                         pack=4)
    else:
        first, second = tl.split(_encode(v, 6.0, 1, 0, random, RANDOM) | ((v.to(tl.int32, bitcast=True) >> 28) & 8))
        both = (first | (second << 4)).to(tl.uint8)
    return both


@triton.jit
def from_e2m1(both, HARDWARE: tl.constexpr):
    """The numbers (float32) of the low and of the high halves of bytes. Each is exact either way."""
    if HARDWARE:
        low, high = tl.inline_asm_elementwise(_FROM_E2M1, "=f,=f,=f,=f,=f,=f,=f,=f,r", [both],
                                              dtype=(tl.float32, tl.float32), is_pure=True, pack=4)
    else:
        code = both.to(tl.int32)
        low, high = _from_e2m1(code & 15), _from_e2m1(code >> 4)
    return low, high


@functools.cache
def has_e2m1(device: torch.device) -> bool:
    """Whether the GPU converts to and from e2m1. The interpreter runs no PTX."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


@triton.jit
def random_bits(element, key):
    """32 bits for each element (int64): see `philox` in tilewright/ops/quantize.py."""
    block = element >> 2
    c0 = block.to(tl.uint32)
    c1 = (block >> 32).to(tl.uint32)
    c2 = c0 * 0
    c0, c1, c2, c3 = tl.philox(key, c0, c1, c2, c2)
    word = element & 3
    return tl.where(word < 2, tl.where(word == 0, c0, c1), tl.where(word == 2, c2, c3))


@triton.jit
def magnitude(v):
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _with_noise(v, size, first, seed, step, layer, N: tl.constexpr, NOISE: tl.constexpr):
    """v [N] of elements from `first` on, with noise of size [N]. NOISE: 2 if `first` is a multiple of four, else 1."""
    return tl.fma(aqn_triton.normals(first, seed, step, layer, N, NOISE == 2), size, v)


# ---- NF4

@triton.jit
def _nf4_quantize(x_ptr, bound_ptr, data_ptr, absmax_ptr, n, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    g = pid * GROUPS + tl.arange(0, GROUPS)
    half = tl.arange(0, BLOCK // 2)
    at = pid * (GROUPS * BLOCK) + tl.arange(0, GROUPS * BLOCK)
    v = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    v = tl.reshape(v, (GROUPS, BLOCK // 2, 2))   # after the load: one of pairs would be of pairs in machine code too
    most = tl.max(tl.max(magnitude(v), axis=2), axis=1).to(tl.float32, bitcast=True)
    least = tl.where(most < 1e-38, 1e-38, most)
    scaled = v * tl.div_rn(1.0, least)[:, None, None]
    whole = (g + 1) * BLOCK <= n
    if (pid + 1) * GROUPS * BLOCK > n:   # a last block that is shorter divides
        scaled = tl.where(whole[:, None, None], scaled, tl.div_rn(v, tl.broadcast_to(least[:, None, None], v.shape)))
    code = tl.zeros(v.shape, tl.int32)
    for k in tl.static_range(15):
        code += (scaled > tl.load(bound_ptr + k)).to(tl.int32)
    code = tl.where(tl.reshape(at, (GROUPS, BLOCK // 2, 2)) < n, code, 7)
    first, second = tl.split(code)
    byte = g[:, None] * (BLOCK // 2) + half[None, :]
    tl.store(data_ptr + byte, ((first << 4) | second).to(tl.uint8), mask=byte < (n + 1) // 2)
    tl.store(absmax_ptr + g, tl.where(whole, most, least), mask=g * BLOCK < n)


@triton.jit(do_not_specialize=["seed", "step", "layer"])
def _nf4_dequantize(data_ptr, value_ptr, absmax_ptr, nested_ptr, map_ptr, offset_ptr, out_ptr, n, alpha,
                    seed: tl.int64, step: tl.int64, layer: tl.int64, BLOCK: tl.constexpr, NESTED: tl.constexpr,
                    TILE: tl.constexpr, NOISE: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    both = tl.load(data_ptr + byte, mask=byte * 2 < n, other=0).to(tl.int32)
    block = byte // (BLOCK // 2)   # both of a byte's elements are in it
    inside = byte * 2 < n
    if NESTED:
        code = tl.load(absmax_ptr + block, mask=inside, other=0).to(tl.int32)
        scale = tl.load(map_ptr + code) * tl.load(nested_ptr + block // 256, mask=inside, other=0.0)
        scale = scale + tl.load(offset_ptr)
    else:
        scale = tl.load(absmax_ptr + block, mask=inside, other=0.0)
    first = tl.load(value_ptr + (both >> 4)) * scale
    second = tl.load(value_ptr + (both & 15)) * scale
    v = tl.interleave(first, second)
    start = tl.program_id(0).to(tl.int64) * (2 * TILE)
    if NOISE:   # half the narrowest gap between codes
        size = 0.03979014977812767 * alpha * scale
        v = _with_noise(v, tl.interleave(size, size), start, seed, step, layer, 2 * TILE, NOISE)
    at = start + tl.arange(0, 2 * TILE)
    tl.store(out_ptr + at, v.to(out_ptr.dtype.element_ty), mask=at < n)


def nf4_quantize(x: torch.Tensor, bounds: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n] -> bytes of codes, absmax [blocks].   bounds: the 15 between code values."""
    n = x.shape[0]
    data = x.new_empty((n + 1) // 2, dtype=torch.uint8)
    absmax = x.new_empty(triton.cdiv(n, block), dtype=torch.float32)
    if n:
        groups = max(1, TILE // block)
        _nf4_quantize[(triton.cdiv(n, groups * block),)](x, bounds, data, absmax, n, BLOCK=block, GROUPS=groups,
                                                         num_warps=4)
    return data, absmax


def nf4_dequantize(data: torch.Tensor, values: torch.Tensor, absmax: torch.Tensor, nested_absmax: torch.Tensor | None,
                   table: torch.Tensor | None, offset: torch.Tensor | None, n: int, block: int, dtype: torch.dtype,
                   alpha: float, seed: int, step: int, layer: int) -> torch.Tensor:
    """values: of the 16 codes.   table: of the 256 codes of scales.   alpha and what follows: of the noise."""
    out = data.new_empty(n, dtype=dtype)
    if n:
        _nf4_dequantize[(triton.cdiv(n, 2 * CODES),)](
            data, values, absmax, nested_absmax, table, offset, out, n, alpha, seed, step, layer, BLOCK=block,
            NESTED=offset is not None, TILE=CODES, NOISE=2 if alpha else 0, num_warps=4)
    return out


# ---- NVFP4

@triton.jit
def nvfp4_tile(v, total, random, TALL: tl.constexpr, RANDOM: tl.constexpr, HARDWARE: tl.constexpr):
    """Packed codes [rows, columns / 2] and scales [rows, columns / 16] of float32 v [rows, columns]; TALL rows share
    theirs."""
    ROWS: tl.constexpr = v.shape[0]
    GROUPS: tl.constexpr = v.shape[1] // 16
    v = tl.reshape(v, (ROWS // TALL, TALL, GROUPS, 8, 2))
    most = tl.max(tl.max(tl.max(magnitude(v), axis=4), axis=3), axis=1).to(tl.float32, bitcast=True)
    wanted = tl.div_rn(tl.div_rn(most, 6.0), total)
    wanted = tl.where(wanted < 0.001953125, 0.001953125, wanted)
    scale = tl.where(most == 0.0, 0, _to_e4m3(wanted, 0, False).to(tl.int32)).to(tl.uint8)
    stored = _from_e4m3(scale)
    inverse = tl.where(scale == 0, 0.0, tl.div_rn(tl.div_rn(1.0, total), tl.where(scale == 0, 1.0, stored)))
    v = v * inverse[:, None, :, None, None]
    if RANDOM:
        random = tl.reshape(random, (ROWS // TALL, TALL, GROUPS, 8, 2))
    code = _to_e2m1(v, random, RANDOM, HARDWARE)   # behind the end of x there are zeros, whose codes are 0
    scale = tl.broadcast_to(scale[:, None, :], (ROWS // TALL, TALL, GROUPS))
    return tl.reshape(code, (ROWS, GROUPS * 8)), tl.reshape(scale, (ROWS, GROUPS))


@triton.jit
def _nvfp4_quantize(x_ptr, total_ptr, data_ptr, scale_ptr, R, C, width, bands, tiles, key, signs, TALL: tl.constexpr,
                    GROUPS: tl.constexpr, RANDOM: tl.constexpr, HARDWARE: tl.constexpr, HADAMARD: tl.constexpr):
    """TALL rows, of one block each way, and GROUPS blocks across. width: bytes of a row, an argument so that the code
    can know what it is a multiple of.   HADAMARD: 0, or the size of the transform that comes first."""
    band = (tl.program_id(0) // tiles).to(tl.int64)
    r = (band % bands) * TALL + tl.arange(0, TALL)
    row = (band // bands) * R + r
    tile = tl.program_id(0) % tiles
    column = tile * (GROUPS * 16) + tl.arange(0, GROUPS * 16)
    at = row[:, None] * C + column[None, :]
    inside = (r < R)[:, None] & (column < C)[None, :]
    v = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HADAMARD:   # without signs the mask is 0
        i = tl.arange(0, TALL * GROUPS * 16)
        v = butterflies(signed(tl.reshape(v, (TALL * GROUPS * 16,)), i, signs, HADAMARD), HADAMARD)
        v = tl.reshape(v, (TALL, GROUPS * 16))
    if RANDOM:
        random = random_bits(at, key)
    else:
        random = 0
    code, scale = nvfp4_tile(v, tl.load(total_ptr), random, TALL, RANDOM, HARDWARE)
    byte = tile * (GROUPS * 8) + tl.arange(0, GROUPS * 8)
    tl.store(data_ptr + row[:, None] * width + byte[None, :], code, mask=(r < R)[:, None] & (byte < width)[None, :])
    g = tile * GROUPS + tl.arange(0, GROUPS)
    groups = (C + 15) // 16
    tl.store(scale_ptr + row[:, None] * groups + g[None, :], scale, mask=(r < R)[:, None] & (g < groups)[None, :])


@triton.jit(do_not_specialize=["seed", "step", "layer"])
def _nvfp4_dequantize(data_ptr, scale_ptr, total_ptr, out_ptr, C, width, tiles, alpha, seed: tl.int64, step: tl.int64,
                      layer: tl.int64, TILE: tl.constexpr, NOISE: tl.constexpr, HARDWARE: tl.constexpr):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * TILE
    byte = first + tl.arange(0, TILE)
    low, high = from_e2m1(tl.load(data_ptr + row * width + byte, mask=byte < width, other=0), HARDWARE)
    scale = tl.load(scale_ptr + row * ((C + 15) // 16) + byte // 8, mask=byte < width, other=0)
    factor = _from_e4m3(scale) * tl.load(total_ptr)
    v = tl.interleave(low * factor, high * factor)
    if NOISE:
        size = 0.5 * alpha * factor
        v = _with_noise(v, tl.interleave(size, size), row * C + first * 2, seed, step, layer, 2 * TILE, NOISE)
    column = first * 2 + tl.arange(0, 2 * TILE)
    tl.store(out_ptr + row * C + column, v.to(out_ptr.dtype.element_ty), mask=column < C)


def _noise_kind(alpha: float, C: int) -> int:
    """NOISE of a kernel whose programs begin at multiples of C."""
    return 0 if alpha == 0 else 2 if C % 4 == 0 else 1


def nvfp4_quantize(x: torch.Tensor, global_scale: torch.Tensor, square: bool, seed: int | None, hadamard: int,
                   signs: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [matrices, rows, C] -> bytes of codes [.., .., ceil(C / 2)], bytes of scales [.., .., ceil(C / 16)].
    hadamard: 0, or the size of the transform of x that is quantised.   signs: its seed."""
    B, R, C = x.shape
    groups = triton.cdiv(C, 16)
    data = x.new_empty((B, R, (C + 1) // 2), dtype=torch.uint8)
    scale = x.new_empty((B, R, groups), dtype=torch.uint8)
    if x.numel():
        tall = 16 if square else 1
        across = min(TILE // (16 * tall), triton.next_power_of_2(groups))
        bands, tiles = triton.cdiv(R, tall), triton.cdiv(groups, across)
        _nvfp4_quantize[(B * bands * tiles,)](x, global_scale, data, scale, R, C, data.shape[2], bands, tiles,
                                              seed or 0, sign_mask(signs), TALL=tall, GROUPS=across,
                                              RANDOM=seed is not None, HARDWARE=seed is None and has_e2m1(x.device),
                                              HADAMARD=hadamard, num_warps=4)
    return data, scale


def nvfp4_dequantize(data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, C: int, dtype: torch.dtype,
                     alpha: float, seed: int, step: int, layer: int) -> torch.Tensor:
    """data [R, ceil(C / 2)], scale [R, ceil(C / 16)], bytes -> [R, C]."""
    out = data.new_empty((data.shape[0], C), dtype=dtype)
    if out.numel():
        tile = min(CODES, triton.next_power_of_2(data.shape[1]))
        tiles = triton.cdiv(data.shape[1], tile)
        _nvfp4_dequantize[(data.shape[0] * tiles,)](data, scale, global_scale, out, C, data.shape[1], tiles, alpha,
                                                    seed, step, layer, TILE=tile, NOISE=_noise_kind(alpha, C),
                                                    HARDWARE=has_e2m1(data.device), num_warps=4)
    return out


# ---- block-scaled FP8

@triton.jit
def _fp8_scales(most):
    """What blocks with these largest magnitudes are multiplied by, and the inverses."""
    floor = tl.where(most < 7.888609052210118e-31, 7.888609052210118e-31, most)   # 2^-100
    zero = most == 0.0
    return tl.where(zero, 1.0, tl.div_rn(1.0, floor) * 448.0), tl.where(zero, 1.0, tl.div_rn(floor, 448.0))


@triton.jit
def fp8_tile(v, random, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANDOM: tl.constexpr):
    """Codes of float32 v [rows, columns] and the inverse scales of its blocks, which are ROWS x COLUMNS."""
    HIGH: tl.constexpr = v.shape[0]
    WIDE: tl.constexpr = v.shape[1]
    v = tl.reshape(v, (HIGH // ROWS, ROWS, WIDE // COLUMNS, COLUMNS))
    most = tl.max(tl.max(magnitude(v), axis=3), axis=1).to(tl.float32, bitcast=True)
    scale, inverse = _fp8_scales(most)
    if RANDOM:
        random = tl.reshape(random, (HIGH // ROWS, ROWS, WIDE // COLUMNS, COLUMNS))
    return tl.reshape(_to_e4m3(v * scale[:, None, :, None], random, RANDOM), (HIGH, WIDE)), inverse


@triton.jit
def _block_fp8_quantize(x_ptr, data_ptr, inverse_ptr, R, C, bands, tiles, key, ROWS: tl.constexpr,
                        COLUMNS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr,
                        RANDOM: tl.constexpr):
    """GROUPS blocks across, of ROWS x COLUMNS elements in a tile of TALL x WIDE."""
    band = (tl.program_id(0) // tiles).to(tl.int64)
    i = tl.arange(0, TALL)
    r = (band % bands) * ROWS + i
    row = (band // bands) * R + r
    g = (tl.program_id(0) % tiles) * GROUPS + tl.arange(0, GROUPS)
    j = tl.arange(0, WIDE)
    column = g[:, None] * COLUMNS + j[None, :]
    at = row[:, None, None] * C + column[None, :, :]
    inside = ((i < ROWS) & (r < R))[:, None, None] & ((j < COLUMNS)[None, :] & (column < C))[None, :, :]
    v = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    most = tl.max(tl.max(magnitude(v), axis=2), axis=0).to(tl.float32, bitcast=True)
    scale, inverse = _fp8_scales(most)
    across = (C + COLUMNS - 1) // COLUMNS
    tl.store(inverse_ptr + band * across + g, inverse, mask=g < across)
    if RANDOM:
        random = random_bits(at, key)
    else:
        random = 0
    tl.store(data_ptr + at, _to_e4m3(v * scale[None, :, None], random, RANDOM), mask=inside)


@triton.jit(do_not_specialize=["seed", "step", "layer"])
def _block_fp8_dequantize(data_ptr, inverse_ptr, out_ptr, R, C, tiles, alpha, seed: tl.int64, step: tl.int64,
                          layer: tl.int64, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
                          NOISE: tl.constexpr):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * TILE
    c = first + tl.arange(0, TILE)
    across = (C + COLUMNS - 1) // COLUMNS
    bands = (R + ROWS - 1) // ROWS
    own = ((row // R) * bands + (row % R) // ROWS) * across
    scale = tl.load(inverse_ptr + own + c // COLUMNS, mask=c < C, other=0.0)
    v = _from_e4m3(tl.load(data_ptr + row * C + c, mask=c < C, other=0)) * scale
    if NOISE:
        v = _with_noise(v, 0.125 * alpha * scale, row * C + first, seed, step, layer, TILE, NOISE)
    tl.store(out_ptr + row * C + c, v.to(out_ptr.dtype.element_ty), mask=c < C)


def block_fp8_quantize(x: torch.Tensor, rows: int, columns: int,
                       seed: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [matrices, R, C] -> bytes of codes, inverse scales [.., ceil(R / rows), ceil(C / columns)]."""
    B, R, C = x.shape
    bands, across = triton.cdiv(R, rows), triton.cdiv(C, columns)
    data = x.new_empty(x.shape, dtype=torch.uint8)
    inverse = x.new_empty((B, bands, across), dtype=torch.float32)
    if x.numel():
        tall, wide = triton.next_power_of_2(rows), triton.next_power_of_2(columns)
        groups = max(1, min(TILE // (tall * wide), triton.next_power_of_2(across)))
        tiles = triton.cdiv(across, groups)
        _block_fp8_quantize[(B * bands * tiles,)](x, data, inverse, R, C, bands, tiles, seed or 0, ROWS=rows,
                                                  COLUMNS=columns, TALL=tall, WIDE=wide, GROUPS=groups,
                                                  RANDOM=seed is not None, num_warps=_warps(tall * wide * groups))
    else:
        inverse.fill_(1.0)
    return data, inverse


def _warps(elements: int) -> int:
    """16 elements a thread, and 32 in the largest tiles."""
    return max(1, min(16, elements // 512))


def block_fp8_dequantize(data: torch.Tensor, inverse: torch.Tensor, rows: int, columns: int, dtype: torch.dtype,
                         alpha: float, seed: int, step: int, layer: int) -> torch.Tensor:
    """data [matrices, R, C], bytes -> the same shape."""
    B, R, C = data.shape
    out = data.new_empty(data.shape, dtype=dtype)
    if out.numel():
        tile = min(2 * CODES, triton.next_power_of_2(C))
        tiles = triton.cdiv(C, tile)
        _block_fp8_dequantize[(B * R * tiles,)](data, inverse, out, R, C, tiles, alpha, seed, step, layer, ROWS=rows,
                                                COLUMNS=columns, TILE=tile, NOISE=_noise_kind(alpha, C), num_warps=4)
    return out


# ---- for the compile gate

NOISES = ((0, ""), (2, " noise"))
# HARDWARE -> what says it in a label, and what a spec says of the GPUs that launch it.
E2M1 = {False: ("", {"max_arch": 99}), True: (" e2m1", {"min_arch": 100, "uses": {100: ("e2m1",), 120: ("e2m1",)}})}


def _spec(kernel, label, types, constexprs, warps=4, load=128, store=128, divisible=(), **archs):
    return KernelSpec(kernel, label, types, constexprs, warps, load=load, store=store, divisible=divisible, **archs)


def nf4_quantize_gate() -> list[KernelSpec]:
    return [_spec(_nf4_quantize, f"nf4 quantize {d}",
                  {"x_ptr": f"*{d}", "bound_ptr": "*fp32", "data_ptr": "*u8", "absmax_ptr": "*fp32", "n": "i32"},
                  {"BLOCK": 64, "GROUPS": TILE // 64}, divisible=("n",), store=0) for d in ("bf16", "fp32")]


def nf4_dequantize_gate() -> list[KernelSpec]:
    types = {"data_ptr": "*u8", "value_ptr": "*fp32", "nested_ptr": "*fp32", "map_ptr": "*fp32", "offset_ptr": "*fp32"}
    found = []
    for d in ("bf16", "fp32"):
        for nested in (False, True):
            own = {**types, "absmax_ptr": "*u8" if nested else "*fp32", "out_ptr": f"*{d}", "n": "i32",
                   **aqn_triton.TYPES}
            for noise, kind in NOISES:
                found.append(_spec(
                    _nf4_dequantize, f"nf4 dequantize {d}{' nested' if nested else ''}{kind}",
                    {n: own[n] for n in _nf4_dequantize.arg_names if n in own},
                    {"BLOCK": 64, "NESTED": nested, "TILE": CODES, "NOISE": noise}, load=0, divisible=("n",)))
    return found


def nvfp4_quantize_gate() -> list[KernelSpec]:
    types = {"total_ptr": "*fp32", "data_ptr": "*u8", "scale_ptr": "*u8", "R": "i32", "C": "i32", "width": "i32",
             "bands": "i32", "tiles": "i32", "key": "i64", "signs": "i32"}
    found = []
    for d in ("bf16", "fp32"):
        for tall, random, size in ((1, False, 0), (1, True, 0), (16, False, 0), (16, True, 0), (1, False, 16),
                                   (1, True, 16), (1, False, 32), (16, True, 32)):
            label = f"nvfp4 quantize {d}{' square' if tall == 16 else ''}{' random' if random else ''}"
            for hardware, (name, archs) in ((False, ("", {})),) if random else E2M1.items():
                found.append(_spec(_nvfp4_quantize, f"{label}{f' hadamard {size}' if size else ''}{name}",
                                   {"x_ptr": f"*{d}", **types},
                                   {"TALL": tall, "GROUPS": TILE // 16 // tall, "RANDOM": random,
                                    "HARDWARE": hardware, "HADAMARD": size},
                                   divisible=("C", "width"), store=0, **archs))
    return found


def nvfp4_dequantize_gate() -> list[KernelSpec]:
    return [_spec(_nvfp4_dequantize, f"nvfp4 dequantize {d}{kind}{name}",
                  {"data_ptr": "*u8", "scale_ptr": "*u8", "total_ptr": "*fp32", "out_ptr": f"*{d}", "C": "i32",
                   "width": "i32", "tiles": "i32", **aqn_triton.TYPES},
                  {"TILE": CODES, "NOISE": noise, "HARDWARE": hardware}, load=0, divisible=("C", "width"), **archs)
            for d in ("bf16", "fp32") for noise, kind in NOISES for hardware, (name, archs) in E2M1.items()]


def block_fp8_quantize_gate() -> list[KernelSpec]:
    found = []
    for d in ("bf16", "fp32"):
        for rows, groups in ((128, 1), (1, TILE // 128)):
            for random in (False, True):
                found.append(_spec(
                    _block_fp8_quantize, f"block_fp8 quantize {d} {rows}x128{' random' if random else ''}",
                    {"x_ptr": f"*{d}", "data_ptr": "*u8", "inverse_ptr": "*fp32", "R": "i32", "C": "i32",
                     "bands": "i32", "tiles": "i32", "key": "i64"},
                    {"ROWS": rows, "COLUMNS": 128, "TALL": rows, "WIDE": 128, "GROUPS": groups, "RANDOM": random},
                    _warps(rows * 128 * groups), store=0, divisible=("C",)))
    return found


def block_fp8_dequantize_gate() -> list[KernelSpec]:
    return [_spec(_block_fp8_dequantize, f"block_fp8 dequantize {d}{kind}",
                  {"data_ptr": "*u8", "inverse_ptr": "*fp32", "out_ptr": f"*{d}", "R": "i32", "C": "i32",
                   "tiles": "i32", **aqn_triton.TYPES},
                  {"ROWS": 128, "COLUMNS": 128, "TILE": 2 * CODES, "NOISE": noise}, load=0, divisible=("C",))
            for d in ("bf16", "fp32") for noise, kind in NOISES]
