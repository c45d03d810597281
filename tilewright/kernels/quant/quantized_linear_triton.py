"""Products with quantized weights in Triton. The definitions are in
tilewright/ops/quant/quantized_linear.py.

    _few_rows    y = x w^T for few rows of x: codes are dequantized in registers, on their way to
                 the tensor cores. If K is split in pieces, a tile's last program adds their sums.
    _sum_pieces  adds them in a second launch, where there are no counters for that.
    _fp8         y = x w^T of matrices in block-scaled FP8, without dequantizing.

`_few_rows` computes y^T = w x^T: a tensor core takes 64 rows or more of its first factor, which N
has and x does not, and that factor may come from registers, where it is dequantized. float32
accumulation; sums are added in the order of K, whoever adds them: atomics only count.

One row of Llama 3 8B's down projection in NF4 reads 33 MB, 10 us of an H100 (7 of an H200). Split
in four, its 64 KiB of partial sums stay in the L2, and a second launch costs what any launch
does: about a microsecond until it starts and two until it ends, beside 4 us of the host's. Counting
takes one round trip to the L2 of each program, below a microsecond, which all but the last one's
hides behind other programs, and reading the sums back another.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.kernels.arrivals import counters
from tilewright.kernels.device import conversions, dot_precision, large_shared_memory
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv, next_power_of_2, without
from tilewright.kernels.quant import nf4_tables, operators
from tilewright.kernels.quant.operators import FORMATS, Matrix
from tilewright.kernels.quant.quantize_triton import E2M1, E4M3, from_e2m1, from_e4m3, spec
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import ALONE, Others, Tunable, choose

NF4, NVFP4, BLOCK_FP8 = 0, 1, 2
# Rows of x in a tile of `_few_rows`. The weight is dequantized again for each tile; with 64 columns
# and four warps its sum takes 32 registers per thread. Not measured on a GPU.
MOST_ROWS = 64


class _Fixed(NamedTuple):
    """What is constant in a launch of `_few_rows`.

    FORMAT: of the weight.   NESTED: whether scales are (NF4).   HARDWARE: see quantize_triton.
    ROWS: rows that share a scale (block FP8).
    GROUP: columns of a tile that share a scale, of the SPAN columns per scale.
    SPLIT: programs whose sums a tile's last one adds.   BLOCK_T: rows of x in a tile.
    """

    FORMAT: int
    NESTED: bool
    HARDWARE: int
    BIAS: bool
    ROWS: int
    GROUP: int
    SPAN: int
    PRECISION: str | None
    SPLIT: int
    BLOCK_T: int


@triton.jit
def _tile(weight, value, n, live, k, K, strides, FIXED: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows n (int64) and columns k to k + BLOCK_K - 1 of the weight in float32; 0 past its edges.

    weight: pointers to its codes, its scales, the scales and the table of nested ones, and their
        offset or the global scale.
    value: the values of the 16 codes (NF4).   strides: as in `_few_rows`.
    """
    data_ptr, scale_ptr, nested_ptr, map_ptr, extra_ptr = weight
    _, width, across = strides
    FORMAT: tl.constexpr = FIXED.FORMAT
    SPAN: tl.constexpr = FIXED.SPAN
    GROUP: tl.constexpr = FIXED.GROUP
    BLOCK_N: tl.constexpr = n.shape[0]
    if FORMAT == 2:
        ks = k + tl.arange(0, BLOCK_K)
        code = tl.load(
            data_ptr + n[:, None] * width + ks[None, :],
            mask=live[:, None] & (ks < K)[None, :],
            other=0,
        )
        scale = tl.load(scale_ptr + n // FIXED.ROWS * across + k // SPAN, mask=live, other=0.0)
        w = from_e4m3(code, FIXED.HARDWARE) * scale[:, None]
    else:
        byte = k // 2 + tl.arange(0, BLOCK_K // 2)
        inside = live[:, None] & (byte < width)[None, :]
        both = tl.load(data_ptr + n[:, None] * width + byte[None, :], mask=inside, other=0)
        groups: tl.constexpr = BLOCK_K // GROUP
        first = k + tl.arange(0, groups) * GROUP
        # Past the edge a scale is 0, and so are its values.
        known = live[:, None] & (first < K)[None, :]
        at = n[:, None] * across + (first // SPAN)[None, :]
        if FORMAT == 1:
            code = tl.load(scale_ptr + at, mask=known, other=0)
            scale = from_e4m3(code, FIXED.HARDWARE) * tl.load(extra_ptr)
            even, odd = from_e2m1(both, FIXED.HARDWARE)
        else:
            if FIXED.NESTED:
                scale = tl.load(map_ptr + tl.load(scale_ptr + at, mask=known, other=0).to(tl.int32))
                scale = scale * tl.load(nested_ptr + at // 256, mask=known, other=0.0) + tl.load(
                    extra_ptr
                )
                scale = tl.where(known, scale, 0.0)
            else:
                scale = tl.load(scale_ptr + at, mask=known, other=0.0)
            # Loads of values would be made copies to shared memory, of four bytes each.
            flat = tl.reshape(both.to(tl.int32), (BLOCK_N * BLOCK_K // 2,))
            even = tl.reshape(tl.gather(value, flat >> 4, 0), (BLOCK_N, BLOCK_K // 2))
            odd = tl.reshape(tl.gather(value, flat & 15, 0), (BLOCK_N, BLOCK_K // 2))
        w = tl.reshape(tl.join(even, odd), (BLOCK_N, groups, GROUP)) * scale[:, :, None]
        w = tl.reshape(w, (BLOCK_N, BLOCK_K))
    return w


@triton.jit(do_not_specialize=["T"])
def _few_rows(
    x_ptr,
    data_ptr,
    scale_ptr,
    nested_ptr,
    map_ptr,
    extra_ptr,
    value_ptr,
    bias_ptr,
    sums_ptr,
    count_ptr,
    out_ptr,
    T,
    N,
    K,
    strides,
    piece,
    FIXED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [T, N], or float32 sums [pieces, T, N], each over `piece` columns, a multiple of BLOCK_K.

    count: a counter of each tile, zero at the start. With it, both are written: a tile's last of
    SPLIT programs adds what is in sums.
    strides: of rows: of x, of the weight's bytes, and of its scales.
    """
    BLOCK_T: tl.constexpr = FIXED.BLOCK_T
    SPLIT: tl.constexpr = FIXED.SPLIT
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < N
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    ks = tl.arange(0, BLOCK_K)
    begin = tl.program_id(2) * piece
    value = None if value_ptr is None else tl.load(value_ptr + tl.arange(0, 16))
    x_at = x_ptr + t.to(tl.int64)[:, None] * strides[0] + ks[None, :]
    weight = data_ptr, scale_ptr, nested_ptr, map_ptr, extra_ptr
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for k in range(begin, tl.minimum(K, begin + piece), BLOCK_K):
        x = tl.load(x_at + k, mask=(t < T)[:, None] & (k + ks < K)[None, :], other=0.0)
        w = _tile(weight, value, n, live, k, K, strides, FIXED, BLOCK_K)
        acc = tl.dot(w.to(x.dtype), tl.trans(x), acc, input_precision=FIXED.PRECISION)
    if count_ptr is None:
        if FIXED.BIAS:
            acc += tl.load(bias_ptr + n, mask=live, other=0.0).to(tl.float32)[:, None]
        to = out_ptr + (tl.program_id(2) * T + t).to(tl.int64)[:, None] * N + n[None, :]
        mask = (t < T)[:, None] & live[None, :]
        tl.store(to, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        own = sums_ptr + (tl.program_id(2) * T + t).to(tl.int64)[:, None] * N + n[None, :]
        mask = (t < T)[:, None] & live[None, :]
        tl.store(own, tl.trans(acc), mask=mask)
        count_ptr += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.debug_barrier()  # all threads have stored what one releases
        if tl.atomic_add(count_ptr, 1, sem="acq_rel") == SPLIT - 1:
            y = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
            # As many loads in flight as take 64 registers of a thread; all of 64 rows spill.
            for i in tl.range(0, SPLIT, loop_unroll_factor=128 // BLOCK_T):
                part = sums_ptr + (i * T + t).to(tl.int64)[:, None] * N + n[None, :]
                y += tl.load(part, mask=mask, other=0.0)
            if FIXED.BIAS:
                y += tl.load(bias_ptr + n, mask=live, other=0.0).to(tl.float32)[None, :]
            to = out_ptr + t.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(to, y.to(out_ptr.dtype.element_ty), mask=mask)
            tl.atomic_xchg(count_ptr, 0, sem="relaxed")


@triton.jit(do_not_specialize=["size"])
def _sum_pieces(
    sums_ptr,
    bias_ptr,
    out_ptr,
    N,
    size,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [size] = the sum of sums [SPLIT, size], plus bias [N] on each run of N."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    at = i
    for _ in tl.static_range(SPLIT):
        acc += tl.load(sums_ptr + at, mask=i < size, other=0.0)
        at += size  # in 64 bits: all pieces together may exceed 2^31 elements
    if BIAS:
        acc += tl.load(bias_ptr + i % N, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=i < size)


# ---- few rows


def constants(x: torch.Tensor, format: int, N: int, span: int) -> dict | None:
    """The launch configuration of `few_rows`, or None if the weight should be dequantized: many
    rows, or scales that change within a step of the kernel.
    """
    T, K = x.shape
    if T * N * K == 0 or (format != BLOCK_FP8 and (K % span or K % 2)):
        return None
    rows = min(1024, next_power_of_2(T))
    config = FEW_ROWS.config(x.device, format, N, K, x.element_size(), rows)
    step = config["BLOCK_K"]
    fits = span % step == 0 or (format != BLOCK_FP8 and step % span == 0)
    return config if config["fused"] and fits else None


def few_rows(
    x: torch.Tensor, bias: torch.Tensor | None, weight: Matrix, config: dict
) -> torch.Tensor:
    """config: from `constants`."""
    data, scale, nested, table, extra, kind, N, rows, span = weight
    T, K = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    c = without(config, "fused", "SPLIT", "LAST")
    split, tall = config["SPLIT"], _block_t(T)
    piece = cdiv(cdiv(K, c["BLOCK_K"]), split) * c["BLOCK_K"]
    out = operators.few_rows(x, bias, weight)
    sums = out if split == 1 else x.new_empty((split, T, N), dtype=torch.float32)
    tiles = cdiv(N, c["BLOCK_N"]), cdiv(T, tall)
    count = counters(x, math.prod(tiles)) if split > 1 and config["LAST"] else None
    whole = split == 1 or count is not None
    values = nf4_tables.on(x.device).codes if kind == NF4 else None
    results = None if count is None else sums, count, out if whole else sums
    tensors = x, data, scale, nested, table, extra, values, bias, *results
    strides = x.stride(0), K if kind == BLOCK_FP8 else K // 2, cdiv(K, span)
    fixed = _Fixed(
        FORMAT=kind,
        NESTED=table is not None,
        HARDWARE=0 if kind == NF4 else conversions(x.device),
        BIAS=bias is not None and whole,
        ROWS=rows,
        GROUP=min(span, c["BLOCK_K"]),
        SPAN=span,
        PRECISION=dot_precision(x),
        SPLIT=1 if count is None else split,
        BLOCK_T=tall,
    )
    launch(_few_rows, (*tiles, split), *tensors, T, N, K, strides, piece, FIXED=fixed, **c)
    if not whole:
        constants = {"BIAS": bias is not None, "SPLIT": split, "BLOCK": _SUM_BLOCK, "num_warps": 4}
        grid = (cdiv(T * N, _SUM_BLOCK),)
        launch(_sum_pieces, grid, sums, bias, out, N, T * N, **constants)
    return out


# With four warps a thread has two 128-bit loads of each piece. 64 rows and 4,096 columns have 256
# programs, two for an SM. Not measured on a GPU.
_SUM_BLOCK = 1024


def _block_t(T: int) -> int:
    return max(16, min(MOST_ROWS, next_power_of_2(T)))


# LAST: whether the last program of a tile adds the pieces' sums, if there are counters.
_NAMES = ("fused", "BLOCK_N", "BLOCK_K", "SPLIT", "LAST", "num_warps", "num_stages")
_PER_SM = 2  # one waits for memory while the other multiplies; the gate checks that they fit
_BLOCKS = _PER_SM * 132  # of an H200


def _heuristic(format: int, N: int, K: int, itemsize: int, rows: int) -> dict:
    """Not measured on a GPU; `bench tune` searches it. Dequantizing writes and reads two bytes per
    element beside the half byte (NF4, NVFP4) that both ways read: eight times the traffic, and
    three kernels. In registers, dequantization is repeated for each 64 rows. So it must pay for at
    least one tile of rows; float32 has no tensor cores and so is compute-bound sooner. SPLIT:
    enough blocks for all SMs, of at least four steps.
    """
    fused = rows <= (MOST_ROWS if itemsize == 2 else 16)
    n, k = (64, 64) if itemsize == 2 else (32, 32)
    pieces = max(1, min(_BLOCKS // cdiv(N, n), cdiv(K, 4 * k), 16))
    return dict(zip(_NAMES, (fused, n, k, 1 << pieces.bit_length() - 1, True, 4, 3), strict=True))


def _space(format: int, N: int, K: int, itemsize: int, rows: int) -> list[dict]:
    default = _heuristic(format, N, K, itemsize, rows)
    configs = [{**default, "fused": fused} for fused in (False, True)]
    configs.append({**default, "LAST": False})
    if rows <= 256:
        n, k = (64, 64) if itemsize == 2 else (32, 32)  # wider tiles spill, on sm_120 or in float32
        # With 16 rows wider tiles do not spill, and take a third fewer instructions an element.
        steps = (k, 128) if itemsize == 2 and rows <= 16 else (k,)
        configs += [
            dict(zip(_NAMES, (True, n, step, split, True, 4, stages), strict=True))
            for step in steps
            for split in (1, 2, 4, 8)
            for stages in (2, 3)
        ]
    return configs


# The variants of each format: whether scales are nested, and HARDWARE.
_VARIANTS = {
    NF4: ((False, 0), (True, 0)),
    NVFP4: ((False, 1), (False, 2)),
    BLOCK_FP8: ((False, 1),),
}


def _few_rows_specs(key: dict, config: dict) -> list[KernelSpec]:
    """Split, in both ways: counters may be missing."""
    if not config["fused"]:
        return []
    ways = (False, True)[: 1 + (config["SPLIT"] > 1 and config["LAST"])]
    return [
        _few_rows_spec(key, config, last, *variant)
        for last in ways
        for variant in _VARIANTS[key["format"]]
    ]


def _few_rows_spec(key: dict, config: dict, last: bool, nested: bool, hardware: int) -> KernelSpec:
    t = {2: "bf16", 4: "fp32"}[key["itemsize"]]
    kind = key["format"]
    name = next(n for n, k in FORMATS.items() if k == kind)
    c = without(config, "fused", "SPLIT", "LAST", "num_warps", "num_stages")
    span = {NF4: 64, NVFP4: 16, BLOCK_FP8: 128}[kind]
    tall, split = min(MOST_ROWS, max(16, key["rows"])), config["SPLIT"] > 1
    how = f"{' split' if split else ''}{' last' if last else ''}"
    pointers = {
        "x": t,
        "data": "u8",
        "scale": "u8" if nested or kind == NVFP4 else "fp32",
        "out": "fp32" if split and not last else t,
        "bias": t,
        **({"sums": "fp32", "count": "i32"} if last else {}),
        **({"value": "fp32"} if kind == NF4 else {}),
        **({"nested": "fp32", "map": "fp32"} if nested else {}),
        **({"extra": "fp32"} if nested or kind == NVFP4 else {}),
    }
    suffix, archs = E2M1[hardware] if kind == NVFP4 else ("", E4M3 if kind == BLOCK_FP8 else {})
    matrix = {} if t == "fp32" else {90: ("wgmma",), 100: ("tcgen05",)}
    uses = {
        arch: (*matrix.get(arch, ()), *archs.get("uses", {}).get(arch, ()))
        for arch in (90, 100, 120)
    }
    fixed = _Fixed(
        FORMAT=kind,
        NESTED=nested,
        HARDWARE=hardware,
        BIAS=last or not split,
        ROWS=128,
        GROUP=min(span, c["BLOCK_K"]),
        SPAN=span,
        PRECISION="ieee" if t == "fp32" else None,
        SPLIT=config["SPLIT"] if last else 1,
        BLOCK_T=tall,
    )
    return spec(
        _few_rows,
        f"{name}{' nested' if nested else ''} {t} {tall} rows{how}{suffix}",
        pointers,
        {"FIXED": fixed, **c},
        config["num_warps"],
        num_stages=config["num_stages"],
        divisible=("N", "K", "strides[0]", "strides[1]", "piece"),
        store=64 if t == "bf16" else 128,
        per_sm=_PER_SM if split else 1,
        # Triton 3.6 makes such code of most of them, whose products are short beside the
        # dequantization of what they multiply.
        serial=t == "bf16",
        **{**archs, "uses": uses},
    )


_FIELDS = ("format", "N", "K", "itemsize", "rows")
_KEYS = [
    (kind, 4096, 4096, itemsize, rows)
    for kind in FORMATS.values()
    for itemsize, rows in ((2, 16), (2, 64), (4, 16))
] + [(NVFP4, 32768, 4096, 2, 64)]
FEW_ROWS = Tunable(
    "quantized_linear", "few_rows", _FIELDS, "forward", _heuristic, _space, _KEYS, _few_rows_specs
)


# ---- block-scaled FP8 by block-scaled FP8


@triton.jit
def tile_of_program(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """This program's tile of rows and of columns. Neighboring programs share them, for L2."""
    n_tiles, m_tiles = tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M)
    first = tl.program_id(0) // (GROUP * n_tiles) * GROUP
    height = tl.minimum(m_tiles - first, GROUP)
    inside = tl.program_id(0) - first * n_tiles
    return first + inside % height, inside // height


@triton.jit
def _fp8(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    sizes,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out [T, N].   x [T, K] with scales [T, across], w [N, K] with scales [ceil(N / 128), across];
    one scale per 128 columns. The tensor cores sum only within these, since FP8 sums there keep few
    bits; the rest is accumulated in float32.
    """
    T, N, K, across = sizes
    t_tile, n_tile = tile_of_program(T, N, BLOCK_M, BLOCK_N, GROUP)
    t = t_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, 128)
    x_at = x_ptr + t.to(tl.int64)[:, None] * K + ks[None, :]
    w_at = w_ptr + n.to(tl.int64)[None, :] * K + ks[:, None]
    x_scale_at = x_scale_ptr + t.to(tl.int64) * across
    # One scale for the tile: BLOCK_N <= 128.
    w_scale_at = w_scale_ptr + (n_tile * BLOCK_N // 128).to(tl.int64) * across
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for b in range(across):
        left = K - b * 128
        x = tl.load(x_at + b * 128, mask=(t < T)[:, None] & (ks < left)[None, :], other=0.0)
        w = tl.load(w_at + b * 128, mask=(ks < left)[:, None] & (n < N)[None, :], other=0.0)
        scale = tl.load(x_scale_at + b, mask=t < T, other=0.0) * tl.load(w_scale_at + b)
        acc += tl.dot(x, w) * scale[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + t.to(tl.int64)[:, None] * N + n[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=(t < T)[:, None] & (n < N)[None, :],
    )


def fp8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    others: Others = ALONE,
) -> torch.Tensor:
    """y [T, N] from x [T, K] and w [N, K], float8_e4m3fn, contiguous, with scales for 1 x 128 and
    128 x 128 blocks.
    """
    (T, K), N = x.shape, w.shape[0]
    out = torch.empty((T, N), dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    key = N, K, min(4096, next_power_of_2(T)), large_shared_memory(x.device)
    c, run = choose(FP8, others, x.device, key, K, out)
    if run is not None:
        run(x, x_scale, w[None], w_scale, bias, None, out, c)
        return out
    grid = (cdiv(T, c["BLOCK_M"]) * cdiv(N, c["BLOCK_N"]),)
    tensors, sizes = (x, x_scale, w, w_scale, bias, out), (T, N, K, x_scale.shape[1])
    launch(_fp8, grid, *tensors, sizes, BIAS=bias is not None, **c)
    return out


_FP8_NAMES = ("BLOCK_M", "BLOCK_N", "GROUP", "num_warps", "num_stages")


def _fp8_heuristic(N: int, K: int, rows: int, large: bool) -> dict:
    """Two sums, of the tensor cores and of float32, are 128 registers per
    thread for tiles of 128 x 128 on eight warps; sm_120, whose tensor cores take both factors from
    registers, has room for half.
    """
    tile = (
        (64, 128, 8, 4, 3) if rows <= 64 else (128, 128, 8, 8, 3) if large else (64, 128, 8, 8, 3)
    )
    return dict(zip(_FP8_NAMES, tile, strict=True))


def _fp8_space(N: int, K: int, rows: int, large: bool) -> list[dict]:
    tiles = (
        ((64, 64), 4),
        ((64, 128), 4),
        ((64, 128), 8),
        ((128, 64), 8),
        *((((128, 128), 8),) if large else ()),
    )
    return [
        dict(zip(_FP8_NAMES, (*tile, group, warps, stages), strict=True))
        for tile, warps in tiles
        for group in (4, 8)
        for stages in (2, 3)
    ]


def _fp8_specs(key: dict, config: dict) -> list[KernelSpec]:
    c = without(config, "num_warps", "num_stages")
    factors = {"x": "fp8e4nv", "w": "fp8e4nv", "x_scale": "fp32", "w_scale": "fp32"}
    return [
        spec(
            _fp8,
            f"fp8 {key['rows']} rows{' large' if key['large'] else ''}",
            {**factors, "bias": "bf16", "out": "bf16"},
            {**c, "BIAS": True},
            config["num_warps"],
            num_stages=config["num_stages"],
            divisible=("sizes[1]", "sizes[2]"),  # N, K
            min_arch=90,
            max_arch=119 if key["large"] else 999,
            uses={90: ("wgmma",), 100: ("tcgen05",)},
        )
    ]


FP8 = Tunable(
    "fp8_linear",
    "fp8",
    ("N", "K", "rows", "large"),
    "forward",
    _fp8_heuristic,
    _fp8_space,
    [(4096, 4096, 64, False), (4096, 4096, 4096, False), (4096, 4096, 4096, True)],
    _fp8_specs,
)


# ---- for the compile gate


@functools.cache
def gate() -> tuple[KernelSpec, ...]:
    return tuple(
        spec(
            _sum_pieces,
            f"sum of pieces {t}",
            {"sums": "fp32", "bias": t, "out": t},
            {"BIAS": True, "SPLIT": 4, "BLOCK": _SUM_BLOCK},
            divisible=("N", "size"),
            store=64 if t == "bf16" else 128,
        )
        for t in ("bf16", "fp32")
    )
