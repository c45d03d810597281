"""NF4, NVFP4, block-scaled FP8 and MXFP8 in Triton. The definitions are in
tilewright/ops/{nf4,nvfp4,block_fp8,mxfp8}.py, and the rounding in tilewright/ops/quant/quantize.py;
quantized bytes are the same there and here.

HARDWARE selects the GPU's conversion instructions (see `conversions`): e4m3 from compute capability
8.9 on, e2m1 from 10.0 on. They give the same bits as the integer operations on float32 that replace
them elsewhere: on older GPUs, in the interpreter, whose casts round differently, and with
stochastic rounding. NaN is the exception: its code is unspecified, and it comes only from a block
whose scale shows it. Divisions are `div_rn`, which is correctly rounded.

Elementwise loads and stores have a budget of few instructions per element, since at memory
bandwidth a GPU has time for ten to twenty. A scale is loaded once for the elements that share it.
In dequantization a thread processes eight elements at a time: loads then have the layout of stores,
and need no shared memory.

Each kernel reads its input once: a program holds whole blocks in registers, computes their largest
magnitudes (a NaN is the largest), rounds and packs.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import triton
import triton.language as tl

from tilewright.kernels.device import conversions
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv, next_power_of_2
from tilewright.kernels.math_triton import HARDWARE as COMPILED
from tilewright.kernels.math_triton import largest_magnitude, reciprocal, widened
from tilewright.kernels.quant import aqn_triton, nf4_tables, operators
from tilewright.kernels.quant.hadamard_triton import butterflies, sign_mask, signed
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import Tunable

TILE = 2048  # elements per program that quantizes: in four warps, 16 per thread
OUT = 512  # elements that a dequantizing program stores at a time: eight per thread of two warps
# Number of such stores. Their loads, of four bytes per thread, are all issued first.
PARTS = 4


class _Tile(NamedTuple):
    """What is constant in a launch that quantizes to NVFP4 or FP8.

    GROUPS: blocks across a tile.   RANDOM: see `random_bits`.   TALL: a tile's rows.
    HADAMARD: the size of the transform that is applied first (NVFP4).
    ROWS, COLUMNS: of a block, in a tile of TALL x WIDE (FP8).
    """

    GROUPS: int
    RANDOM: int
    HARDWARE: int
    TALL: int = 1
    HADAMARD: int = 0
    ROWS: int = 1
    COLUMNS: int = 16
    WIDE: int = 16


class _Stores(NamedTuple):
    """What is constant in a launch that dequantizes: OUT elements at a time, PARTS times.

    NOISE: see `_with_noise`.   NESTED: whether scales are (NF4).
    ROWS, COLUMNS: of a block.
    SPAN: columns that share a scale from any multiple of SPAN on: at most OUT, and a power of two.
    """

    OUT: int
    PARTS: int
    NOISE: int
    HARDWARE: int = 0
    NESTED: bool = False
    ROWS: int = 1
    COLUMNS: int = 16
    SPAN: int = 16


# ---- rounding


@triton.jit
def _encode(
    v,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    random,
    RANDOM: tl.constexpr,
):
    """Codes without signs of float32 |v|: see `encode` in tilewright/ops/quant/quantize.py."""
    v = tl.minimum(tl.abs(v), LARGEST)
    if RANDOM:
        e = (v.to(tl.int32, bitcast=True) >> 23) - 127
        e = tl.where(e < LOWEST, LOWEST, e)
        units = v * ((MANTISSA - e + 127) << 23).to(tl.float32, bitcast=True)
        n = ((units * 16777216.0).to(tl.int32) + (random >> 8).to(tl.int32)) >> 24
        code = ((e - LOWEST) << MANTISSA) + n
    else:
        # 2^e times UNIT has v's unit, 2^(e - MANTISSA), in its last place: adding it rounds v to
        # units, ties to even, and the sum's bits are their count, at most 16, above those of the
        # product.
        SHIFT: tl.constexpr = 23 - MANTISSA
        LEAST: tl.constexpr = (LOWEST + 127) << 23
        UNIT: tl.constexpr = 2.0**SHIFT
        e = tl.maximum(v.to(tl.int32, bitcast=True), LEAST) & 0x7F800000
        units = tl.fma(e.to(tl.float32, bitcast=True), UNIT, v).to(tl.int32, bitcast=True)
        code = units - (e - (e >> SHIFT)) - ((SHIFT << 23) + (LEAST >> SHIFT))
    return code


@triton.jit
def _to_e4m3(v, random, RANDOM: tl.constexpr, HARDWARE: tl.constexpr):
    if HARDWARE and not RANDOM:
        code = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        sign = (v.to(tl.int32, bitcast=True) >> 24) & 0x80
        code = (_encode(v, 448.0, 3, -6, random, RANDOM) | sign).to(tl.uint8)
    return code


@triton.jit
def from_e4m3(code, HARDWARE: tl.constexpr):
    """float32 values of e4m3 bytes, exact with and without HARDWARE."""
    if HARDWARE:
        v = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:  # covers subnormals, without subnormal float32 intermediates
        c = code.to(tl.int32)
        u = c & 0x7F
        small = u < 8
        v = ((u << 20) + (tl.where(small, 121, 120) << 23)).to(tl.float32, bitcast=True)
        v = tl.where(u == 0x7F, float("nan"), v - tl.where(small, 0.015625, 0.0))
        v = (v.to(tl.int32, bitcast=True) | ((c & 0x80) << 24)).to(tl.float32, bitcast=True)
    return v


@triton.jit
def _from_e2m1(code):
    """The halved values 0, 1, 2, 3, 4, 6, 8, 12 of codes 0 to 15."""
    u = code & 7
    e = u >> 1
    v = tl.where(u < 2, u, (2 + (u & 1)) << tl.where(e > 0, e - 1, 0)).to(tl.float32) * 0.5
    return (v.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


_BYTES = "abcd"
# Four bytes of two codes each, from four numbers for the low halves and four for the high ones. The
# first operand of the instruction becomes the high half.
_TO_E2M1: tl.constexpr = tl.constexpr(f"""
{{
.reg .b8 e2m1_a, e2m1_b, e2m1_c, e2m1_d;
{"".join(f"cvt.rn.satfinite.e2m1x2.f32 e2m1_{b}, ${i + 5}, ${i + 1};{chr(10)}" for i, b in enumerate(_BYTES))}\
mov.b32 $0, {{e2m1_a, e2m1_b, e2m1_c, e2m1_d}};
}}
""")


def _halves(low: int, high: int) -> str:
    """The PTX that unpacks two float16 in `both` to two results."""
    return f"mov.b32 {{half_a, half_b}}, both;\ncvt.f32.f16 ${low}, half_a;\ncvt.f32.f16 ${high}, half_b;\n"


# The reverse, through float16, which represents all e2m1 values: four for the low halves, four for
# the high ones.
_FROM_E2M1: tl.constexpr = tl.constexpr(f"""
{{
.reg .b8 e2m1_a, e2m1_b, e2m1_c, e2m1_d;
.reg .b16 half_a, half_b;
.reg .b32 both;
mov.b32 {{e2m1_a, e2m1_b, e2m1_c, e2m1_d}}, $8;
{"".join(f"cvt.rn.f16x2.e2m1x2 both, e2m1_{b};{chr(10)}{_halves(i, i + 4)}" for i, b in enumerate(_BYTES))}\
}}
""")


def _by_e4m3(sign: str, code: str, first: int) -> str:
    """Four results from `first` on, from the halves whose signs and magnitudes these instructions
    shift into place.
    """
    pairs = (
        f"cvt.rn.f16x2.e4m3x2 both, {pair};\nmul.rn.f16x2 both, both, "
        f"by;\n{_halves(first + i, first + i + 1)}"
        for i, pair in ((0, "first"), (2, "second"))
    )
    return f"""{sign}
{code}
and.b32 code, code, 0x1c1c1c1c;
or.b32 code, code, sign;
mov.b32 {{first, second}}, code;
{"".join(pairs)}"""


# The reverse on GPUs that convert only e4m3: the three magnitude bits, shifted by two, are the e4m3
# code of 1/64 of the value, subnormals included.
_FROM_E2M1_BY_E4M3: tl.constexpr = tl.constexpr(f"""
{{
.reg .b32 sign, code, both, by;
.reg .b16 first, second, half_a, half_b;
mov.b32 by, 0x54005400;
{_by_e4m3("shl.b32 sign, $8, 4;" + chr(10) + "and.b32 sign, sign, 0x80808080;", "shl.b32 code, $8, 2;", 0)}\
{_by_e4m3("and.b32 sign, $8, 0x80808080;", "shr.u32 code, $8, 2;", 4)}\
}}
""")


@triton.jit
def _to_e2m1(v, random, RANDOM: tl.constexpr, HARDWARE: tl.constexpr):
    """Bytes of two codes each from float32 v [.., 2], the first in the low half.   HARDWARE: round
    to nearest with the GPU's instruction.

    Both ways agree bitwise: both round to nearest with ties to even, where neighboring codes are
    those of neighboring numbers, so that even codes have even mantissas; both clamp to 6; and both
    keep the sign, of -0.0 and of what rounds to zero too (subnormal float32 does, flushed or not).
    NaN, which the instruction converts to 6, is the one difference. It comes only from a non-finite
    x or scale, which `quantize_nvfp4` refuses, or shows in global_scale.
    """
    if HARDWARE:
        first, second = tl.split(v)
        both = tl.inline_asm_elementwise(
            _TO_E2M1, "=r,f,f,f,f,f,f,f,f", [first, second], dtype=tl.uint8, is_pure=True, pack=4
        )
    else:
        first, second = tl.split(
            _encode(v, 6.0, 1, 0, random, RANDOM) | ((v.to(tl.int32, bitcast=True) >> 28) & 8)
        )
        both = (first | (second << 4)).to(tl.uint8)
    return both


@triton.jit
def from_e2m1(both, HARDWARE: tl.constexpr):
    """float32 values of the low and high halves of bytes, exact with and without HARDWARE."""
    if HARDWARE:
        ASM: tl.constexpr = _FROM_E2M1 if HARDWARE == 2 else _FROM_E2M1_BY_E4M3
        low, high = tl.inline_asm_elementwise(
            ASM,
            "=f,=f,=f,=f,=f,=f,=f,=f,r",
            [both],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        code = both.to(tl.int32)
        low, high = _from_e2m1(code & 15), _from_e2m1(code >> 4)
    return low, high


@triton.jit
def random_bits(element, key, RANDOM: tl.constexpr):
    """32 bits per element (int64): see `philox` in tilewright/ops/quant/quantize.py. RANDOM: 2 if
    each four in a row begin at a multiple of four and so share one Philox block, else 1.
    """
    if RANDOM == 2:  # the first of four, in the thread that holds them
        block, _ = tl.split(tl.reshape(element >> 2, (element.numel // 4, 2, 2)))
        block, _ = tl.split(block)
    else:
        block = element >> 2
    c0 = block.to(tl.uint32)
    c1 = (block >> 32).to(tl.uint32)
    c2 = c0 * 0
    c0, c1, c2, c3 = tl.philox(key, c0, c1, c2, c2)
    if RANDOM == 2:
        words = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), element.shape)
    else:
        word = element & 3
        words = tl.where(word < 2, tl.where(word == 0, c0, c1), tl.where(word == 2, c2, c3))
    return words


def random_kind(seed: int | None, *sides: int) -> int:
    """RANDOM of a kernel whose rows, and other runs within a row, have this many elements."""
    return 0 if seed is None else 1 if any(n % 4 for n in sides) else 2


@triton.jit
def _spread(scale, N: tl.constexpr):
    """Broadcasts the scales of groups to their N elements."""
    GROUPS: tl.constexpr = scale.shape[0]
    return tl.reshape(tl.broadcast_to(scale[:, None], (GROUPS, N // GROUPS)), (N,))


@triton.jit
def _scaled(v, scale, N: tl.constexpr):
    """v [N] times the scales of its groups."""
    GROUPS: tl.constexpr = scale.shape[0]
    return tl.reshape(tl.reshape(v, (GROUPS, N // GROUPS)) * scale[:, None], (N,))


@triton.jit
def _with_noise(v, size, first, draw, N: tl.constexpr, NOISE: tl.constexpr):
    """v [N] of elements from `first` on, with noise of magnitude size [N].   draw: seed, step,
    layer.   NOISE: 2 if `first` is a multiple of four, else 1.
    """
    seed, step, layer = draw
    return tl.fma(aqn_triton.normals(first, seed, step, layer, N, NOISE == 2), size, v)


# ---- NF4

BOUNDS: tl.constexpr = tl.constexpr(nf4_tables.BOUNDS)


def _bisection() -> str:
    """PTX: $0 = the number of bounds below $1, by 4 comparisons and 11 selections; 0 for NaN.

    Triton's operations would compare all elements of a thread before the first selection, and ptxas
    then packs the predicates into registers, which takes as many instructions as it saves.
    """
    at = [f"0f{struct.pack('>f', bound).hex()}" for bound in nf4_tables.BOUNDS]
    return "\n".join(
        (
            "{\n.reg .pred p;\n.reg .f32 b<7>;",
            f"setp.gt.f32 p, $1, {at[7]};",
            *(f"selp.f32 b{i}, {at[8 + i]}, {at[i]}, p;" for i in range(7)),
            "selp.b32 $0, 8, 0, p;",
            "setp.gt.f32 p, $1, b3;",
            *(f"selp.f32 b{i}, b{4 + i}, b{i}, p;" for i in range(3)),
            "@p or.b32 $0, $0, 4;",
            "setp.gt.f32 p, $1, b1;",
            "selp.f32 b0, b2, b0, p;",
            "@p or.b32 $0, $0, 2;",
            "setp.gt.f32 p, $1, b0;",
            "@p or.b32 $0, $0, 1;\n}",
        )
    )


BISECTION: tl.constexpr = tl.constexpr(_bisection())


@triton.jit
def _nf4_code(v, HARDWARE: tl.constexpr):
    """The number of bounds below float32 v; 0 for NaN."""
    if HARDWARE:
        code = tl.inline_asm_elementwise(
            BISECTION, "=r,f", [v], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        code = tl.zeros(v.shape, tl.int32)
        for k in tl.static_range(15):
            code += (v > BOUNDS[k]).to(tl.int32)
    return code


@triton.jit
def _nf4_quantize(x_ptr, data_ptr, absmax_ptr, n, size, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    g = pid * GROUPS + tl.arange(0, GROUPS)
    half = tl.arange(0, BLOCK // 2)
    at = pid * (GROUPS * BLOCK) + tl.arange(0, GROUPS * BLOCK)
    v = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    # Reshaped after the load: a load of pairs would stay one of pairs in machine code.
    v = tl.reshape(v, (GROUPS, BLOCK // 2, 2))
    most = largest_magnitude(largest_magnitude(v, 2), 1)
    least = tl.where(most < 1e-38, 1e-38, most)
    scaled = v * tl.div_rn(1.0, least)[:, None, None]
    whole = (g + 1) * BLOCK <= n
    if (pid + 1) * GROUPS * BLOCK > n:  # a shorter last block divides by absmax instead
        scaled = tl.where(
            whole[:, None, None],
            scaled,
            tl.div_rn(v, tl.broadcast_to(least[:, None, None], v.shape)),
        )
    code = _nf4_code(scaled, COMPILED)
    code = tl.where(tl.reshape(at, (GROUPS, BLOCK // 2, 2)) < n, code, 7)
    first, second = tl.split(code)
    byte = tl.arange(0, GROUPS)[:, None] * (BLOCK // 2) + half[None, :]
    tl.store(
        data_ptr + pid * (GROUPS * BLOCK // 2) + byte,
        ((first << 4) | second).to(tl.uint8),
        mask=byte < size - pid * (GROUPS * BLOCK // 2),
    )
    tl.store(absmax_ptr + g, tl.where(whole, most, least), mask=g * BLOCK < n)


@triton.jit(do_not_specialize=["seed", "step", "layer"])
def _nf4_dequantize(
    data_ptr,
    pair_ptr,
    absmax_ptr,
    nested_ptr,
    map_ptr,
    offset_ptr,
    out_ptr,
    n,
    alpha,
    seed: tl.int64,
    step: tl.int64,
    layer: tl.int64,
    FIXED: tl.constexpr,
    GATHER: tl.constexpr,
):
    """pair: for each byte the two values, as one 64-bit word. GATHER: they come from the 16 values
    in shared memory, one at a time, and not from this table in global memory.
    """
    OUT: tl.constexpr = FIXED.OUT
    PARTS: tl.constexpr = FIXED.PARTS
    BLOCK: tl.constexpr = FIXED.COLUMNS
    start = tl.program_id(0).to(tl.int64) * (OUT * PARTS)
    left = n - start
    i = tl.arange(0, OUT)
    byte = tl.arange(0, OUT // 2)
    group = tl.arange(0, OUT // BLOCK)
    held, scales = (), ()
    for part in tl.static_range(PARTS):
        held += (
            tl.load(
                data_ptr + start // 2 + part * (OUT // 2) + byte,
                mask=byte * 2 < left - part * OUT,
                other=0,
            ).to(tl.int32),
        )
        at = start // BLOCK + part * (OUT // BLOCK) + group
        known = group * BLOCK < left - part * OUT
        scale = tl.load(absmax_ptr + at, mask=known, other=0)
        if FIXED.NESTED:
            scale = tl.load(map_ptr + scale.to(tl.int32)) * tl.load(
                nested_ptr + at // 256, mask=known, other=0.0
            )
            scale = scale + tl.load(offset_ptr)
        scales += (scale,)
    if GATHER:  # the second values of bytes 0 to 15
        value = (tl.load(pair_ptr + tl.arange(0, 16)) >> 32).to(tl.int32)
        value = value.to(tl.float32, bitcast=True)
    for part in tl.static_range(PARTS):
        if GATHER:
            v = tl.interleave(
                tl.gather(value, held[part] >> 4, 0), tl.gather(value, held[part] & 15, 0)
            )
        else:
            pair = tl.load(pair_ptr + held[part])
            v = tl.interleave(
                pair.to(tl.int32).to(tl.float32, bitcast=True),
                (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True),
            )
        v = _scaled(v, scales[part], OUT)
        if FIXED.NOISE:  # half the narrowest gap between codes
            size = _spread(0.03979014977812767 * alpha * scales[part], OUT)
            v = _with_noise(v, size, start + part * OUT, (seed, step, layer), OUT, FIXED.NOISE)
        tl.store(
            out_ptr + start + part * OUT + i,
            v.to(out_ptr.dtype.element_ty),
            mask=i < left - part * OUT,
        )


def nf4_quantize(x, block):
    n = x.shape[0]
    data, absmax = operators.nf4_quantize(x, block)
    if n:
        groups = max(1, TILE // block)
        constants = {"BLOCK": block, "GROUPS": groups, "num_warps": 4}
        grid = (cdiv(n, groups * block),)
        launch(_nf4_quantize, grid, x, data, absmax, n, data.numel(), **constants)
    return data, absmax


def nf4_dequantize(data, absmax, nested_absmax, table, offset, n, block, dtype, noise):
    out = data.new_empty(n, dtype=dtype)
    if n:
        fixed = _nf4_stores(block, offset is not None, 2 if noise.alpha else 0)
        pairs = nf4_tables.on(data.device).pairs
        tensors = data, pairs, absmax, nested_absmax, table, offset, out
        constants = NF4_DEQUANTIZE.config(data.device, block) | {"num_warps": fixed.OUT // 256}
        grid = (cdiv(n, fixed.OUT * PARTS),)
        launch(_nf4_dequantize, grid, *tensors, n, *noise, FIXED=fixed, **constants)
    return out


def _nf4_stores(block: int, nested: bool, noise: int) -> _Stores:
    """A block of scales lies within one store."""
    return _Stores(max(OUT, block), PARTS, noise, NESTED=nested, COLUMNS=block)


# ---- NVFP4


@triton.jit
def _nvfp4_scales(most, total, HARDWARE: tl.constexpr):
    """Bytes of the scales of groups with these largest magnitudes, and the multipliers of their
    elements.
    """
    wanted = tl.div_rn(tl.div_rn(most, 6.0), total)
    wanted = tl.where(wanted < 0.001953125, 0.001953125, wanted)
    scale = tl.where(most == 0.0, 0, _to_e4m3(wanted, 0, False, HARDWARE).to(tl.int32)).to(tl.uint8)
    stored = from_e4m3(scale, HARDWARE)
    inverse = tl.where(
        scale == 0, 0.0, tl.div_rn(tl.div_rn(1.0, total), tl.where(scale == 0, 1.0, stored))
    )
    return scale, inverse


@triton.jit
def nvfp4_tile(v, total, random, TALL: tl.constexpr, RANDOM: tl.constexpr, HARDWARE: tl.constexpr):
    """Packed codes [rows, columns / 2] and scales [rows, columns / 16] of float32 v [rows,
    columns]; TALL rows share a scale.
    """
    ROWS: tl.constexpr = v.shape[0]
    GROUPS: tl.constexpr = v.shape[1] // 16
    v = tl.reshape(v, (ROWS // TALL, TALL, GROUPS, 8, 2))
    most = largest_magnitude(largest_magnitude(largest_magnitude(v, 4), 3), 1)
    scale, inverse = _nvfp4_scales(most, total, HARDWARE)
    v = v * inverse[:, None, :, None, None]
    if RANDOM:
        random = tl.reshape(random, (ROWS // TALL, TALL, GROUPS, 8, 2))
    # Past the end of x there are zeros: codes 0.
    code = _to_e2m1(
        v,
        random,
        RANDOM,
        HARDWARE == 2 and not RANDOM,
    )
    scale = tl.broadcast_to(scale[:, None, :], (ROWS // TALL, TALL, GROUPS))
    return tl.reshape(code, (ROWS, GROUPS * 8)), tl.reshape(scale, (ROWS, GROUPS))


@triton.jit(do_not_specialize=["key"])
def _nvfp4_rows(x_ptr, total_ptr, data_ptr, scale_ptr, C, width, tiles, key, FIXED: tl.constexpr):
    """GROUPS groups of one row, each in one thread, in loads of 16 bytes: the largest magnitude
    needs no exchange, and no other thread computes the scale.
    """
    GROUPS: tl.constexpr = FIXED.GROUPS
    RANDOM: tl.constexpr = FIXED.RANDOM
    VEC: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    PARTS: tl.constexpr = 16 // VEC
    row = (tl.program_id(0) // tiles).to(tl.int64)
    g0 = (tl.program_id(0) % tiles) * GROUPS
    g = tl.arange(0, GROUPS)
    part = tl.arange(0, PARTS)
    at = part[:, None, None] * VEC + g[None, :, None] * 16 + tl.arange(0, VEC)[None, None, :]
    first = row * C + g0 * 16
    v = widened(tl.load(x_ptr + first + at, mask=at < C - g0 * 16, other=0.0))
    most = largest_magnitude(largest_magnitude(v, 2), 0)
    scale, inverse = _nvfp4_scales(most, tl.load(total_ptr), FIXED.HARDWARE)
    v = tl.reshape(v * inverse[None, :, None], (PARTS, GROUPS, VEC // 2, 2))
    if RANDOM:
        random = tl.reshape(random_bits(first + at, key, RANDOM), (PARTS, GROUPS, VEC // 2, 2))
    else:
        random = 0
    code = _to_e2m1(v, random, RANDOM, FIXED.HARDWARE == 2 and not RANDOM)
    code = tl.reshape(tl.permute(code, (1, 0, 2)), (GROUPS, 8))
    byte = g[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(data_ptr + row * width + g0 * 8 + byte, code, mask=byte < width - g0 * 8)
    groups = (C + 15) // 16
    tl.store(scale_ptr + row * groups + g0 + g, scale, mask=g < groups - g0)


@triton.jit(do_not_specialize=["R", "bands", "key", "signs"])
def _nvfp4_quantize(
    x_ptr,
    total_ptr,
    data_ptr,
    scale_ptr,
    R,
    C,
    width,
    bands,
    tiles,
    key,
    signs,
    FIXED: tl.constexpr,
):
    """TALL rows, of one block each way, and GROUPS blocks across. width: bytes per row, an argument
    so that Triton specializes on its divisibility.
    """
    TALL: tl.constexpr = FIXED.TALL
    GROUPS: tl.constexpr = FIXED.GROUPS
    RANDOM: tl.constexpr = FIXED.RANDOM
    HADAMARD: tl.constexpr = FIXED.HADAMARD
    band = (tl.program_id(0) // tiles).to(tl.int64)
    r = (band % bands) * TALL + tl.arange(0, TALL)
    row = (band // bands) * R + r
    tile = tl.program_id(0) % tiles
    column = tile * (GROUPS * 16) + tl.arange(0, GROUPS * 16)
    at = row[:, None] * C + column[None, :]
    inside = (r < R)[:, None] & (column < C)[None, :]
    v = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    i = tl.arange(0, TALL * GROUPS * 16)  # without signs the mask is 0
    v = butterflies(signed(tl.reshape(v, (TALL * GROUPS * 16,)), i, signs, HADAMARD), HADAMARD)
    v = tl.reshape(v, (TALL, GROUPS * 16))
    if RANDOM:
        random = random_bits(at, key, RANDOM)
    else:
        random = 0
    code, scale = nvfp4_tile(v, tl.load(total_ptr), random, TALL, RANDOM, FIXED.HARDWARE)
    byte = tile * (GROUPS * 8) + tl.arange(0, GROUPS * 8)
    tl.store(
        data_ptr + row[:, None] * width + byte[None, :],
        code,
        mask=(r < R)[:, None] & (byte < width)[None, :],
    )
    g = tile * GROUPS + tl.arange(0, GROUPS)
    groups = (C + 15) // 16
    tl.store(
        scale_ptr + row[:, None] * groups + g[None, :],
        scale,
        mask=(r < R)[:, None] & (g < groups)[None, :],
    )


@triton.jit(do_not_specialize=["seed", "step", "layer"])
def _nvfp4_dequantize(
    data_ptr,
    scale_ptr,
    total_ptr,
    out_ptr,
    C,
    width,
    tiles,
    alpha,
    seed: tl.int64,
    step: tl.int64,
    layer: tl.int64,
    FIXED: tl.constexpr,
):
    OUT: tl.constexpr = FIXED.OUT
    PARTS: tl.constexpr = FIXED.PARTS
    row = (tl.program_id(0) // tiles).to(tl.int64)
    start = (tl.program_id(0) % tiles) * (OUT * PARTS)
    data_ptr += row * width + start // 2
    scale_ptr += row * ((C + 15) // 16) + start // 16
    i = tl.arange(0, OUT)
    byte = tl.arange(0, OUT // 2)
    group = tl.arange(0, OUT // 16)
    total = tl.load(total_ptr)
    held, scales = (), ()
    for part in tl.static_range(PARTS):
        left = C - start - part * OUT
        held += (
            tl.load(
                data_ptr + part * (OUT // 2) + byte,
                mask=byte < width - (start + part * OUT) // 2,
                other=0,
            ),
        )
        scales += (
            tl.load(scale_ptr + part * (OUT // 16) + group, mask=group * 16 < left, other=0),
        )
    for part in tl.static_range(PARTS):
        factor = from_e4m3(scales[part], FIXED.HARDWARE) * total
        low, high = from_e2m1(held[part], FIXED.HARDWARE)
        v = _scaled(tl.interleave(low, high), factor, OUT)
        first = row * C + start + part * OUT
        if FIXED.NOISE:
            size = _spread(0.5 * alpha * factor, OUT)
            v = _with_noise(v, size, first, (seed, step, layer), OUT, FIXED.NOISE)
        tl.store(
            out_ptr + first + i, v.to(out_ptr.dtype.element_ty), mask=i < C - start - part * OUT
        )


def _noise_kind(alpha: float, C: int) -> int:
    """NOISE of a kernel whose programs begin at multiples of C."""
    return 0 if alpha == 0 else 2 if C % 4 == 0 else 1


def _parts(C: int) -> int:
    """The number of stores of a program with C elements per row: no more than the row has."""
    return min(PARTS, next_power_of_2(cdiv(C, OUT)))


def nvfp4_quantize(x, global_scale, options):
    """Without the transpose; in blocks of one row, or of a transform."""
    codes = operators.nvfp4_quantize(x, global_scale, options)
    if not x.numel():
        return codes
    B, R, C = x.shape
    square, seed, hadamard, hadamard_seed, _ = options
    width, groups = codes.data.shape[2], codes.scale.shape[2]
    tall = 16 if square else 1
    across = min(TILE // (16 * tall), next_power_of_2(groups))
    bands, tiles = cdiv(R, tall), cdiv(groups, across)
    grid, tensors = (B * bands * tiles,), (x, global_scale, codes.data, codes.scale)
    key = seed or 0
    fixed = _Tile(across, random_kind(seed, C), conversions(x.device), tall, hadamard)
    if hadamard:
        numbers = R, C, width, bands, tiles, key, sign_mask(hadamard_seed)
        launch(_nvfp4_quantize, grid, *tensors, *numbers, FIXED=fixed, num_warps=4)
    else:
        warps = _nvfp4_warps(across, seed is not None)
        launch(_nvfp4_rows, grid, *tensors, C, width, tiles, key, FIXED=fixed, num_warps=warps)
    return codes


def _nvfp4_warps(groups: int, random: bool) -> int:
    """Two groups per thread, one where each element has random bits."""
    return max(1, groups // (32 if random else 64))


def nvfp4_dequantize(data, scale, global_scale, C, dtype, noise):
    out = operators.nvfp4_dequantize(data, scale, global_scale, C, dtype, noise)
    if out.numel():
        parts = _parts(C)
        tiles = cdiv(C, OUT * parts)
        grid, tensors = (data.shape[0] * tiles,), (data, scale, global_scale, out)
        fixed = _Stores(OUT, parts, _noise_kind(noise.alpha, C), conversions(data.device))
        options = {"FIXED": fixed, "num_warps": OUT // 256}
        launch(_nvfp4_dequantize, grid, *tensors, C, data.shape[1], tiles, *noise, **options)
    return out


# ---- block-scaled FP8, and MXFP8 as blocks of 1 x 32 with a byte for a scale


@triton.jit
def _fp8_quotients(floor):
    """1 / floor and floor / 448, correctly rounded, for floor from 2^-100 on, infinity, or NaN.

    div_rn branches for operands that its fast path does not take, so that a thread's divisions wait
    for each other. Here quotients are corrected by their remainders, which FMA has exactly. That of
    1 / floor is computed for 2^-4 floor, whose reciprocal is not subnormal.
    """
    if COMPILED:
        finite = floor < float("inf")
        near = reciprocal(floor * 0.0625)
        nearer = tl.fma(near, tl.fma(floor * -0.0625, near, 1.0), near)
        rounded = nearer * 0.0625
        rest = tl.fma(-floor, rounded, 1.0) * 0.0625
        inverse = tl.where(finite, tl.fma(rest, nearer, rounded), near)
        part = floor * 0.002232142857142857  # 1 / 448
        rest = tl.fma(part, -448.0, floor)
        part = tl.where(finite, tl.fma(rest, 0.002232142857142857, part), part)
    else:
        inverse = tl.div_rn(1.0, floor)
        part = tl.div_rn(floor, 448.0)
    return inverse, part


@triton.jit
def _fp8_scales(most, MX: tl.constexpr):
    """Multipliers for blocks with these largest magnitudes, and the inverse scales: for MXFP8,
    exponent bytes.
    """
    if MX:
        bits = most.to(tl.int32, bitcast=True)
        e = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 0)
        e = tl.where(bits < 0x7F800000, e, 255)
        scale = ((254 - e) << 23).to(tl.float32, bitcast=True)
        inverse = e.to(tl.uint8)
    else:
        floor = tl.where(most < 7.888609052210118e-31, 7.888609052210118e-31, most)  # 2^-100
        zero = most == 0.0
        scale, inverse = _fp8_quotients(floor)
        scale = tl.where(zero, 1.0, scale * 448.0)
        inverse = tl.where(zero, 1.0, inverse)
    return scale, inverse


@triton.jit
def _from_e8m0(byte):
    """float32 values of exponent bytes: 2^-127 is subnormal, and 255 is NaN."""
    e = byte.to(tl.int32)
    bits = tl.where(e == 0, 0x400000, e << 23)
    return tl.where(e == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def fp8_tile(
    v,
    random,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANDOM: tl.constexpr,
    HARDWARE: tl.constexpr,
    MX: tl.constexpr,
):
    """Codes of float32 v [rows, columns] and the inverse scales of its ROWS x COLUMNS blocks."""
    HIGH: tl.constexpr = v.shape[0]
    WIDE: tl.constexpr = v.shape[1]
    v = tl.reshape(v, (HIGH // ROWS, ROWS, WIDE // COLUMNS, COLUMNS))
    scale, inverse = _fp8_scales(largest_magnitude(largest_magnitude(v, 3), 1), MX)
    if RANDOM:
        random = tl.reshape(random, (HIGH // ROWS, ROWS, WIDE // COLUMNS, COLUMNS))
    scaled = v * scale[:, None, :, None]
    return tl.reshape(_to_e4m3(scaled, random, RANDOM, HARDWARE), (HIGH, WIDE)), inverse


@triton.jit(do_not_specialize=["R", "bands", "key"])
def _block_fp8_quantize(x_ptr, data_ptr, inverse_ptr, R, C, bands, tiles, key, FIXED: tl.constexpr):
    """GROUPS blocks across."""
    ROWS: tl.constexpr = FIXED.ROWS
    COLUMNS: tl.constexpr = FIXED.COLUMNS
    GROUPS: tl.constexpr = FIXED.GROUPS
    band = tl.program_id(0) // tiles
    g0 = (tl.program_id(0) % tiles) * GROUPS
    row = (band // bands).to(tl.int64) * R + (band % bands) * ROWS
    first = row * C + g0 * COLUMNS
    i = tl.arange(0, FIXED.TALL)
    g = tl.arange(0, GROUPS)
    j = tl.arange(0, FIXED.WIDE)
    column = g[:, None] * COLUMNS + j[None, :]
    at = first + (i.to(tl.int64)[:, None, None] * C + column[None, :, :])
    inside = (column < C - g0 * COLUMNS)[None, :, :]
    if FIXED.WIDE != COLUMNS:
        inside &= (j < COLUMNS)[None, None, :]
    if FIXED.TALL > 1:
        inside &= ((i < ROWS) & (i < R - (band % bands) * ROWS))[:, None, None]
    v = widened(tl.load(x_ptr + at, mask=inside, other=0.0))
    MX: tl.constexpr = inverse_ptr.dtype.element_ty == tl.uint8
    scale, inverse = _fp8_scales(largest_magnitude(largest_magnitude(v, 2), 0), MX)
    across = (C + COLUMNS - 1) // COLUMNS
    tl.store(inverse_ptr + band.to(tl.int64) * across + g0 + g, inverse, mask=g < across - g0)
    if FIXED.RANDOM:
        random = random_bits(at, key, FIXED.RANDOM)
    else:
        random = 0
    code = _to_e4m3(v * scale[None, :, None], random, FIXED.RANDOM, FIXED.HARDWARE)
    tl.store(data_ptr + at, code, mask=inside)


@triton.jit(do_not_specialize=["R", "seed", "step", "layer"])
def _block_fp8_dequantize(
    data_ptr,
    inverse_ptr,
    out_ptr,
    R,
    C,
    tiles,
    alpha,
    seed: tl.int64,
    step: tl.int64,
    layer: tl.int64,
    FIXED: tl.constexpr,
):
    ROWS: tl.constexpr = FIXED.ROWS
    COLUMNS: tl.constexpr = FIXED.COLUMNS
    OUT: tl.constexpr = FIXED.OUT
    PARTS: tl.constexpr = FIXED.PARTS
    row = tl.program_id(0) // tiles
    start = (tl.program_id(0) % tiles) * (OUT * PARTS)
    inverse_ptr += ((row // R) * ((R + ROWS - 1) // ROWS) + (row % R) // ROWS).to(tl.int64) * (
        (C + COLUMNS - 1) // COLUMNS
    )
    first = row.to(tl.int64) * C + start
    i = tl.arange(0, OUT)
    span = tl.arange(0, OUT // FIXED.SPAN) * FIXED.SPAN
    held, scales = (), ()
    for part in tl.static_range(PARTS):
        left = C - start - part * OUT
        held += (tl.load(data_ptr + first + part * OUT + i, mask=i < left, other=0),)
        scale = tl.load(
            inverse_ptr + (start + part * OUT + span) // COLUMNS, mask=span < left, other=0
        )
        if inverse_ptr.dtype.element_ty == tl.uint8:
            scale = _from_e8m0(scale)
        scales += (scale,)
    for part in tl.static_range(PARTS):
        v = _scaled(from_e4m3(held[part], FIXED.HARDWARE), scales[part], OUT)
        if FIXED.NOISE:
            size = _spread(0.125 * alpha * scales[part], OUT)
            v = _with_noise(v, size, first + part * OUT, (seed, step, layer), OUT, FIXED.NOISE)
        tl.store(
            out_ptr + first + part * OUT + i,
            v.to(out_ptr.dtype.element_ty),
            mask=i < C - start - part * OUT,
        )


def fp8_quantize(x, fp8):
    """Without the transpose."""
    codes = operators.fp8_quantize(x, fp8)
    if x.numel():
        B, R, C = x.shape
        rows, columns, _, seed, _ = fp8
        _, bands, across = codes.scale.shape
        tall, wide = next_power_of_2(rows), next_power_of_2(columns)
        groups = max(1, min(TILE // (tall * wide), next_power_of_2(across)))
        tiles = cdiv(across, groups)
        random, hardware = random_kind(seed, C, columns), conversions(x.device)
        fixed = _tile(groups, random, hardware, rows, columns)
        warps = _warps(tall * wide * groups, seed is not None)
        grid, numbers = (B * bands * tiles,), (R, C, bands, tiles, seed or 0)
        tensors = x, codes.data, codes.scale
        launch(_block_fp8_quantize, grid, *tensors, *numbers, FIXED=fixed, num_warps=warps)
    return codes


def _tile(groups: int, random: int, hardware: int, rows: int, columns: int) -> _Tile:
    """A tile of FP8 blocks of rows x columns."""
    tall, wide = next_power_of_2(rows), next_power_of_2(columns)
    return _Tile(groups, random, hardware, tall, ROWS=rows, COLUMNS=columns, WIDE=wide)


def _warps(elements: int, random: bool) -> int:
    """32 elements per thread; 16 where each has random bits, except in the largest tiles."""
    return max(1, min(16, elements // (512 if random else 1024)))


def fp8_dequantize(data, scale, rows, columns, dtype, noise):
    B, R, C = data.shape
    out = operators.fp8_dequantize(data, scale, rows, columns, dtype, noise)
    if out.numel():
        parts = _parts(C)
        tiles = cdiv(C, OUT * parts)
        fixed = _Stores(OUT, parts, _noise_kind(noise.alpha, C), conversions(data.device))
        span = min(OUT, columns & -columns)
        fixed = fixed._replace(ROWS=rows, COLUMNS=columns, SPAN=span)
        grid, tensors = (B * R * tiles,), (data, scale, out)
        options = {"FIXED": fixed, "num_warps": OUT // 256}
        launch(_block_fp8_dequantize, grid, *tensors, R, C, tiles, *noise, **options)
    return out


# ---- for the compile gate

NOISES = ((0, ""), (2, " noise"))
# HARDWARE -> its label, and the spec's fields for the GPUs that launch it. Where only e4m3 matters,
# 1 and 2 compile to the same code.
E4M3 = {"min_arch": 89, "uses": {90: ("e4m3",), 100: ("e4m3",), 120: ("e4m3",)}}
E2M1 = {
    1: ("", {"min_arch": 89, "max_arch": 99}),
    2: (" e2m1", {"min_arch": 100, "uses": {100: ("e2m1",), 120: ("e2m1",)}}),
}


# Tuples: of products of quantized matrices.
_TUPLES = {"sizes": ("i32",) * 4, "strides": ("i32",) * 3}
NUMBERS = {**aqn_triton.TYPES, **_TUPLES, "key": "i64", "eps": "fp32"}


def spec(
    kernel, label: str, pointers: dict[str, str], constexprs: dict, warps: int = 4, **needs
) -> KernelSpec:
    return KernelSpec.of(
        kernel, label, pointers, {"num_warps": warps, **constexprs}, NUMBERS, **needs
    )


def nf4_quantize_gate() -> list[KernelSpec]:
    return [
        spec(
            _nf4_quantize,
            f"nf4 quantize {d}",
            {"x": d, "data": "u8", "absmax": "fp32"},
            {"BLOCK": 64, "GROUPS": TILE // 64},
            divisible=("n", "size"),
            store=64,
            elements=TILE,
        )
        for d in ("bf16", "fp32")
    ]


def _nf4_dequantize_specs(key: dict, config: dict) -> list[KernelSpec]:
    nested_scales = {"nested": "fp32", "map": "fp32", "offset": "fp32"}
    out = max(OUT, key["block"])
    return [
        spec(
            _nf4_dequantize,
            f"nf4 dequantize {d}{' nested' if nested else ''}{kind}"
            f"{' gathered' if config['GATHER'] else ''}",
            {
                "data": "u8",
                "pair": "i64",
                "absmax": "u8" if nested else "fp32",
                "out": d,
                **nested_scales,
            },
            {"FIXED": _nf4_stores(key["block"], nested, noise), **config},
            out // 256,
            load=0,
            divisible=("n",),
            elements=out * PARTS,
        )
        for d in ("bf16", "fp32")
        for nested in (False, True)
        for noise, kind in NOISES
    ]


def _nf4_dequantize_heuristic(block: int) -> dict:
    """One load of 8 bytes per two values: a quarter fewer instructions than two from shared
    memory.
    """
    return {"GATHER": False}


def _nf4_dequantize_hopper(block: int) -> dict:
    """Measured on an H100: 4 % faster."""
    return {"GATHER": True}


NF4_DEQUANTIZE = Tunable(
    "dequantize_nf4",
    "dequantize",
    ("block",),
    "forward",
    _nf4_dequantize_heuristic,
    lambda block: [{"GATHER": True}],
    [(64,)],
    _nf4_dequantize_specs,
    _nf4_dequantize_hopper,
)


# TALL, whether rounding is stochastic, HADAMARD.
NVFP4_KINDS = (
    (1, False, 0),
    (1, True, 0),
    (16, False, 0),
    (16, True, 0),
    (1, False, 16),
    (1, True, 16),
    (1, False, 32),
    (16, True, 32),
)


def nvfp4_kind(tall: int, random: bool, size: int) -> str:
    """The end of a label."""
    return (
        f"{' square' if tall == 16 else ''}{' random' if random else ''}"
        f"{f' hadamard {size}' if size else ''}"
    )


def nvfp4_quantize_gate() -> list[KernelSpec]:
    pointers = {"total": "fp32", "data": "u8", "scale": "u8"}
    specs = []
    for d in ("bf16", "fp32"):
        for tall, random, size in NVFP4_KINDS:
            if tall == 16 and not size:  # nvfp4_gate of fused_quantize_triton.py has these
                continue
            label = f"nvfp4 quantize {d}{nvfp4_kind(tall, random, size)}"
            groups = TILE // 16 // tall
            kernel, warps = _nvfp4_rows, _nvfp4_warps(groups, random)
            if size:
                kernel, warps = _nvfp4_quantize, 4
            for hardware, (name, archs) in ((1, ("", E4M3)),) if random else E2M1.items():
                specs.append(
                    spec(
                        kernel,
                        f"{label}{name}",
                        {"x": d, **pointers},
                        {"FIXED": _Tile(groups, 2 * random, hardware, tall, size)},
                        warps,
                        divisible=("C", "width"),
                        store=0,
                        elements=TILE,
                        **archs,
                    )
                )
    return specs


def nvfp4_dequantize_gate() -> list[KernelSpec]:
    return [
        spec(
            _nvfp4_dequantize,
            f"nvfp4 dequantize {d}{kind}{name}",
            {"data": "u8", "scale": "u8", "total": "fp32", "out": d},
            {"FIXED": _Stores(OUT, PARTS, noise, hardware)},
            OUT // 256,
            load=0,
            divisible=("C", "width"),
            elements=OUT * PARTS,
            **archs,
        )
        for d in ("bf16", "fp32")
        for noise, kind in NOISES
        for hardware, (name, archs) in E2M1.items()
    ]


def _fp8_quantize_specs(name: str, scales: str, blocks) -> list[KernelSpec]:
    """blocks: label, rows, columns, and blocks per tile."""
    return [
        spec(
            _block_fp8_quantize,
            f"{name} quantize {d}{label}{' random' if random else ''}",
            {"x": d, "data": "u8", "inverse": scales},
            {"FIXED": _tile(groups, 2 * random, 1, rows, columns)},
            _warps(rows * columns * groups, random),
            divisible=("C",),
            elements=rows * columns * groups,
            **{} if random else E4M3,
        )
        for d in ("bf16", "fp32")
        for label, rows, columns, groups in blocks
        for random in (False, True)
    ]


def block_fp8_quantize_gate() -> list[KernelSpec]:
    return _fp8_quantize_specs(
        "block_fp8", "fp32", ((" 128x128", 128, 128, 1), (" 1x128", 1, 128, TILE // 128))
    )


def mxfp8_quantize_gate() -> list[KernelSpec]:
    return _fp8_quantize_specs("mxfp8", "u8", (("", 1, 32, TILE // 32),))


def _fp8_dequantize_specs(name: str, scales: str, rows: int, columns: int) -> list[KernelSpec]:
    return [
        spec(
            _block_fp8_dequantize,
            f"{name} dequantize {d}{kind}",
            {"data": "u8", "inverse": scales, "out": d},
            {"FIXED": _Stores(OUT, PARTS, noise, 1, ROWS=rows, COLUMNS=columns, SPAN=columns)},
            OUT // 256,
            load=0,
            divisible=("C",),
            elements=OUT * PARTS,
            **E4M3,
        )
        for d in ("bf16", "fp32")
        for noise, kind in NOISES
    ]


def block_fp8_dequantize_gate() -> list[KernelSpec]:
    return _fp8_dequantize_specs("block_fp8", "fp32", 128, 128)


def mxfp8_dequantize_gate() -> list[KernelSpec]:
    return _fp8_dequantize_specs("mxfp8", "u8", 1, 32)
