"""Products a b^T of two quantized matrices in Triton, for `low_precision_linear`. The definition is
in tilewright/ops/quant/low_precision_linear.py.

    _by_rows  block-scaled FP8, both factors with a scale per row and 128 columns: the gradient of a
              weight, which sums over tokens. A weight's own blocks are 128 x 128, and its products
              are `fp8` of quantized_linear_triton.py.
    _scaled   MXFP8 and NVFP4, whose scales the tensor cores of compute capability 10 apply.

HARDWARE: FP8 and FP4 are multiplied by tensor cores. Triton's interpreter, whose FP8 casts flush
subnormal numbers, multiplies what integer operations decode. float32 sums; no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.kernels.device import conversions, large_shared_memory
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv, next_power_of_2
from tilewright.kernels.quant.quantize_triton import from_e2m1, from_e4m3, spec
from tilewright.kernels.quant.quantized_linear_triton import tile_of_program
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import ALONE, Others, Tunable, choose

SPAN = 128  # columns that share a scale in block-scaled FP8


@triton.jit
def store(acc, out_ptr, m, n, M, N):
    tl.store(
        out_ptr + m.to(tl.int64)[:, None] * N + n[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=(m < M)[:, None] & (n < N)[None, :],
    )


@triton.jit
def product(a, b, HARDWARE: tl.constexpr):
    """a b of bytes of e4m3."""
    if HARDWARE:
        part = tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True))
    else:
        part = tl.dot(from_e4m3(a, 0), from_e4m3(b, 0), input_precision="ieee")
    return part


@triton.jit
def _by_rows(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    out_ptr,
    sizes,
    HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out [M, N].   a [M, K] with scales [M, across], b [N, K] with scales [N, across]; one scale
    per 128 columns, within which the tensor cores sum.
    """
    M, N, K, across = sizes
    m_tile, n_tile = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP)
    m, n = m_tile * BLOCK_M + tl.arange(0, BLOCK_M), n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, 128)
    a_at = a_ptr + m.to(tl.int64)[:, None] * K + ks[None, :]
    b_at = b_ptr + n.to(tl.int64)[None, :] * K + ks[:, None]
    a_scale_at = a_scale_ptr + m.to(tl.int64) * across
    b_scale_at = b_scale_ptr + n.to(tl.int64) * across
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(across):
        left = K - k * 128
        a = tl.load(a_at + k * 128, mask=(m < M)[:, None] & (ks < left)[None, :], other=0)
        b = tl.load(b_at + k * 128, mask=(ks < left)[:, None] & (n < N)[None, :], other=0)
        a_scale = tl.load(a_scale_at + k, mask=m < M, other=0.0)
        b_scale = tl.load(b_scale_at + k, mask=n < N, other=0.0)
        acc += product(a, b, HARDWARE) * a_scale[:, None] * b_scale[None, :]
    store(acc, out_ptr, m, n, M, N)


@triton.jit
def _decoded(code, scale, E2M1: tl.constexpr):
    """float32 values of rows of bytes of codes, with a scale byte for 16 or 32."""
    ROWS: tl.constexpr = code.shape[0]
    COLUMNS: tl.constexpr = code.shape[1] * 2 if E2M1 else code.shape[1]
    WIDE: tl.constexpr = 16 if E2M1 else 32
    if E2M1:
        low, high = from_e2m1(code, 0)
        v, factor = tl.reshape(tl.join(low, high), (ROWS, COLUMNS)), from_e4m3(scale, 0)
    else:
        e = scale.to(tl.int32)  # 2^(e - 127): subnormal for 0, and NaN for 255
        bits = tl.where(e == 255, 0x7FC00000, tl.where(e == 0, 0x400000, e << 23))
        v, factor = from_e4m3(code, 0), bits.to(tl.float32, bitcast=True)
    v = tl.reshape(v, (ROWS, COLUMNS // WIDE, WIDE)) * factor[:, :, None]
    return tl.reshape(v, (ROWS, COLUMNS))


@triton.jit
def scaled_product(a, a_scale, b, b_scale, acc, E2M1: tl.constexpr, HARDWARE: tl.constexpr):
    """acc + a b^T of rows of bytes with their scale bytes; see `_scaled`."""
    FORMAT: tl.constexpr = "e2m1" if E2M1 else "e4m3"
    if HARDWARE:
        if E2M1:
            a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
            b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
        else:
            a = a.to(tl.float8e4nv, bitcast=True)
            b = b.to(tl.float8e4nv, bitcast=True)
        acc = tl.dot_scaled(a, a_scale, FORMAT, tl.trans(b), b_scale, FORMAT, acc)
    else:
        a, b = _decoded(a, a_scale, E2M1), _decoded(b, b_scale, E2M1)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit
def _scaled(
    a_ptr,
    a_scale_ptr,
    a_total_ptr,
    b_ptr,
    b_scale_ptr,
    b_total_ptr,
    bias_ptr,
    out_ptr,
    sizes,
    E2M1: tl.constexpr,
    BIAS: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out [M, N].   a [M, K], b [N, K]: rows of `width` bytes and `across` scale bytes. E2M1: two
    codes per byte with a scale for 16, and a total that multiplies each tensor; else e4m3 with a
    scale for 32.
    """
    M, N, width, across = sizes
    WIDE: tl.constexpr = 16 if E2M1 else 32
    BYTES: tl.constexpr = BLOCK_K // 2 if E2M1 else BLOCK_K
    SCALES: tl.constexpr = BLOCK_K // WIDE
    m_tile, n_tile = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP)
    m, n = m_tile * BLOCK_M + tl.arange(0, BLOCK_M), n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    byte, group = tl.arange(0, BYTES), tl.arange(0, SCALES)
    a_at = a_ptr + m.to(tl.int64)[:, None] * width + byte[None, :]
    b_at = b_ptr + n.to(tl.int64)[:, None] * width + byte[None, :]
    a_scale_at = a_scale_ptr + m.to(tl.int64)[:, None] * across + group[None, :]
    b_scale_at = b_scale_ptr + n.to(tl.int64)[:, None] * across + group[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(tl.cdiv(width, BYTES)):
        inside, known = (byte < width - k * BYTES)[None, :], (group < across - k * SCALES)[None, :]
        a = tl.load(a_at + k * BYTES, mask=(m < M)[:, None] & inside, other=0)
        b = tl.load(b_at + k * BYTES, mask=(n < N)[:, None] & inside, other=0)
        a_scale = tl.load(a_scale_at + k * SCALES, mask=(m < M)[:, None] & known, other=0)
        b_scale = tl.load(b_scale_at + k * SCALES, mask=(n < N)[:, None] & known, other=0)
        acc = scaled_product(a, a_scale, b, b_scale, acc, E2M1, HARDWARE)
    if E2M1:  # one after the other: their product may be below float32's normal numbers
        acc = acc * tl.load(a_total_ptr) * tl.load(b_total_ptr)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    store(acc, out_ptr, m, n, M, N)


# ---- launchers


def by_rows(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    dtype: torch.dtype,
    others: Others = ALONE,
) -> torch.Tensor:
    """a b^T [M, N] of e4m3 bytes a [M, K] and b [N, K], contiguous, with scales for blocks of
    1 x 128. No size is 0.
    """
    (M, K), N = a.shape, b.shape[0]
    out = torch.empty((M, N), dtype=dtype, device=a.device)
    key = M, N, rounded(K), large_shared_memory(a.device)
    c, run = choose(BY_ROWS, others, a.device, key, a, b, out)
    if run is not None:
        run(a, a_scale, b, b_scale, None, out[None], c)
        return out
    grid, tensors = (cdiv(M, c["BLOCK_M"]) * cdiv(N, c["BLOCK_N"]),), (a, a_scale, b, b_scale, out)
    sizes = M, N, K, a_scale.shape[1]
    launch(_by_rows, grid, *tensors, sizes, HARDWARE=conversions(a.device) > 0, **c)
    return out


def scaled(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_total: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_total: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    others: Others = ALONE,
) -> torch.Tensor:
    """a b^T [M, N] + bias [N] of bytes in MXFP8, or with totals in NVFP4, contiguous. No size is
    0.
    """
    (M, width), N = a.shape, b.shape[0]
    out = torch.empty((M, N), dtype=dtype, device=a.device)
    key = a_total is not None, N, width, rounded(M), large_shared_memory(a.device)
    c, run = choose(SCALED, others, a.device, key, a, out)
    if run is not None:
        run((a, a_scale, a_total), (b, b_scale, b_total), out, c, bias=bias)
        return out
    grid = (cdiv(M, c["BLOCK_M"]) * cdiv(N, c["BLOCK_N"]),)
    tensors = a, a_scale, a_total, b, b_scale, b_total, bias, out
    sizes = M, N, width, a_scale.shape[1]
    flags = {"E2M1": a_total is not None, "BIAS": bias is not None}
    launch(_scaled, grid, *tensors, sizes, **flags, HARDWARE=conversions(a.device) > 1, **c)
    return out


def rounded(tokens: int) -> int:
    """A number of tokens as a key of configurations has it, so that few numbers need one."""
    return min(4096, next_power_of_2(max(1, tokens)))


# ---- launch configurations

_NAMES = ("BLOCK_M", "BLOCK_N", "GROUP", "num_warps", "num_stages")


def _by_rows_heuristic(M: int, N: int, tokens: int, large: bool) -> dict:
    """Not measured on a GPU. As `fp8` of quantized_linear_triton.py, but a tile half as wide: the
    scales of b's rows are 32 more values per thread.
    """
    tile = (128, 64) if large else (64, 64)
    return dict(zip(_NAMES, (*tile, 8, 8, 3), strict=True))


def _by_rows_space(M: int, N: int, tokens: int, large: bool) -> list[dict]:
    # 128 x 128 spill for compute capability 9.0.
    return [
        dict(zip(_NAMES, (*tile, 8, warps, stages), strict=True))
        for tile, warps in (((64, 64), 4), ((64, 128), 8), ((128, 64), 8))
        for stages in (2, 3)
    ]


def _by_rows_specs(key: dict, config: dict) -> list[KernelSpec]:
    return [
        spec(
            _by_rows,
            f"fp8 by rows {out}{' large' if key['large'] else ''}",
            {"a": "u8", "b": "u8", "a_scale": "fp32", "b_scale": "fp32", "out": out},
            {**config, "HARDWARE": True},
            divisible=tuple(f"sizes[{i}]" for i in range(3)),  # not `across`
            min_arch=90,
            max_arch=119 if key["large"] else 999,
            uses={90: ("wgmma",), 100: ("tcgen05",)},
        )
        for out in ("bf16", "fp32")
    ]


BY_ROWS = Tunable(
    "low_precision_linear",
    "by_rows",
    ("M", "N", "tokens", "large"),
    "backward",
    _by_rows_heuristic,
    _by_rows_space,
    [(4096, 4096, 4096, False), (4096, 4096, 4096, True)],
    _by_rows_specs,
)


def scaled_heuristic(e2m1: bool, N: int, width: int, rows: int, large: bool) -> dict:
    """Not measured on a GPU. 128 rows are what one tensor core instruction of compute capability
    10.0 takes, and sums are in its own memory; on 12.0 they are in registers, 64 per thread of
    eight warps. Steps of 128 bytes.
    """
    tile = (128, 128, 8, 4, 3) if large else (128, 128, 8, 8, 2)
    return {**dict(zip(_NAMES, tile, strict=True)), "BLOCK_K": 256 if e2m1 else 128}


def scaled_space(e2m1: bool, N: int, width: int, rows: int, large: bool) -> list[dict]:
    return [
        {**dict(zip(_NAMES, (128, n, 8, warps, stages), strict=True)), "BLOCK_K": step}
        for n in (64, 128)
        for step in ((128, 256) if e2m1 else (128,))
        for warps in ((4, 8) if large else (8,))
        for stages in ((2, 3, 4) if large else (2, 3))
    ]


def _scaled_specs(key: dict, config: dict) -> list[KernelSpec]:
    e2m1, large = key["e2m1"], key["large"]
    recipe = "nvfp4" if e2m1 else "mxfp8"
    totals = {"a_total": "fp32", "b_total": "fp32"} if e2m1 else {}
    codes = dict.fromkeys(("a", "a_scale", "b", "b_scale"), "u8")
    return [
        spec(
            _scaled,
            f"{recipe} {out}{' large' if large else ''}",
            {**codes, **totals, "out": out, **({"bias": out} if out == "bf16" else {})},
            {**config, "E2M1": e2m1, "BIAS": out == "bf16", "HARDWARE": True},
            divisible=("sizes",),
            min_arch=100 if large else 120,
            max_arch=119 if large else 999,
            uses={100: ("tcgen05", "block_scale"), 120: ("mma", "block_scale")},
        )
        for out in ("bf16", "fp32")
    ]


SCALED = Tunable(
    "low_precision_linear",
    "scaled",
    ("e2m1", "N", "width", "rows", "large"),
    "forward_backward",
    scaled_heuristic,
    scaled_space,
    [
        (e2m1, 4096, 2048 if e2m1 else 4096, 4096, large)
        for e2m1 in (False, True)
        for large in (False, True)
    ],
    _scaled_specs,
)


TUNABLES = BY_ROWS, SCALED
