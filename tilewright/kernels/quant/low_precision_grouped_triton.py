"""Products with one weight per expert in Triton, of block-scaled FP8, MXFP8 and NVFP4, for
`low_precision_grouped_gemm`. The definition is in
tilewright/ops/moe/low_precision_grouped_gemm.py.

Rows lie where each expert's begin at a multiple of 128, so that a block of 128 rows belongs to one
expert, and so does a scale of 128, 32 or 16 of them:

    _place                     rows at these places, and what lies where.
    _rows, _scaled_rows        y[r] = w[e(r)] x[r]: a tile's expert is looked up by its block of
                               rows.
    _weights, _scaled_weights  dw[e] = the sum over e's rows of dy[r] x[r]^T, from both transposes.

The scaled ones are of MXFP8 and NVFP4. HARDWARE: as in low_precision_triton.py. float32 sums; no
atomics.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.core.layout import last_contiguous
from tilewright.kernels.device import conversions, large_shared_memory
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv, next_power_of_2, unit, without
from tilewright.kernels.quant.low_precision_triton import (
    product,
    rounded,
    scaled_heuristic,
    scaled_product,
    scaled_space,
    store,
)
from tilewright.kernels.quant.quantize_triton import spec
from tilewright.kernels.quant.quantized_linear_triton import tile_of_program
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import ALONE, Others, Tunable, choose


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


class _Copied(NamedTuple):
    """What is constant in a launch of `_place`: units of 16 bytes if possible, more EXPERTS than
    there are, and the PLACES of a program, COLUMNS at a time.
    """

    UNIT: int
    EXPERTS: int
    PLACES: int
    COLUMNS: int


@triton.jit(do_not_specialize=["R"])
def _place(
    x_ptr, offsets_ptr, placed_ptr, end_ptr, expert_ptr, row_ptr, R, E, sizes, FIXED: tl.constexpr
):
    """Fills PLACES places, of one block of 128.

    placed [P, C]: rows of x [R, C] at their places, zeros at others and in the tail.   end [E],
    expert [P / 128], row [P]: as `Placed` of low_precision_grouped_gemm.py has them, for any
    offsets.   sizes: C and x's stride, in units of UNIT elements.
    """
    columns, stride = sizes
    UNIT: tl.constexpr = FIXED.UNIT
    PLACES: tl.constexpr = FIXED.PLACES
    # Rows of e are first to last - 1, of E the tail's; past E there are none.
    e = tl.arange(0, FIXED.EXPERTS)
    last = tl.load(offsets_ptr + e, mask=e < E, other=R)
    last = tl.associative_scan(tl.minimum(tl.maximum(last, 0), R), 0, _larger)
    first = tl.load(offsets_ptr + e - 1, mask=(e > 0) & (e <= E), other=R)
    first = tl.where(e > 0, tl.minimum(tl.maximum(first, 0), R), 0)
    first = tl.associative_scan(first, 0, _larger)
    end = tl.cumsum((last - first + 127) // 128 * 128, 0)
    place = tl.program_id(0) * PLACES
    passed = end <= place
    own = tl.sum((passed & (e <= E)).to(tl.int32), 0)
    # Experts whose places come before have begun where this one's rows and places begin.
    base = tl.max(tl.where(passed, last, 0), 0) - tl.max(tl.where(passed, end, 0), 0)
    stop = tl.min(tl.where(passed, R, last), 0)
    p = place + tl.arange(0, PLACES)
    r = p + base  # past the tail's places, R and more
    tl.store(row_ptr + p, tl.where(r < stop, r, -1))
    if place % 128 == 0:
        tl.store(expert_ptr + place // 128, own)
    if place == 0:
        tl.store(end_ptr + e, end, mask=e < E)
    from_ptr = x_ptr + r.to(tl.int64)[:, None] * stride * UNIT
    to_ptr = placed_ptr + p.to(tl.int64)[:, None] * columns * UNIT
    copied = (r < tl.where(own < E, stop, 0))[:, None]
    for begin in range(0, columns * UNIT, FIXED.COLUMNS):
        c = begin + tl.arange(0, FIXED.COLUMNS)[None, :]
        inside = c < columns * UNIT
        x = tl.load(from_ptr + c, mask=copied & inside, other=0.0)
        tl.store(to_ptr + c, x, mask=inside)


@triton.jit
def _store_rows(acc, out_ptr, row_ptr, n, N):
    """row_ptr: for each row of acc, the row of out, which has N columns; -1 for none."""
    row = tl.load(row_ptr).to(tl.int64)
    tl.store(
        out_ptr + row[:, None] * N + n[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=(row >= 0)[:, None] & (n < N)[None, :],
    )


@triton.jit
def _of_expert(end_ptr, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A program's expert, the rows and columns of its tile of dw [N, K], and the first and the last
    block, exclusive, of the 128 columns of both factors that it sums.
    """
    n_tiles, k_tiles = tl.cdiv(N, BLOCK_M), tl.cdiv(K, BLOCK_N)
    e = tl.program_id(0) // (n_tiles * k_tiles)
    tile = tl.program_id(0) % (n_tiles * k_tiles)
    n = tile // k_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tile % k_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.load(end_ptr + e - 1, mask=e > 0, other=0) // 128
    end = tl.load(end_ptr + e) // 128
    return e, n, k, begin, end


@triton.jit
def _rows(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    expert_ptr,
    row_ptr,
    out_ptr,
    sizes,
    HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out: rows of N.   x [P, K] with scales [P, across], w [E, N, K] with scales
    [E, ceil(N / 128), across].   expert [P / 128]: the expert of each block of rows; E for the
    tail, which is 0, and more for none.   row [P]: the row of the result; -1 for none.
    """
    E, N, K, across = sizes
    n_tiles = tl.cdiv(N, BLOCK_N)
    first, n_tile = tl.program_id(0) // n_tiles * BLOCK_M, tl.program_id(0) % n_tiles
    e = tl.load(expert_ptr + first // 128)
    if e <= E:
        p = first.to(tl.int64) + tl.arange(0, BLOCK_M)
        n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        ks = tl.arange(0, 128)
        x_at = x_ptr + p[:, None] * K + ks[None, :]
        w_at = w_ptr + (e.to(tl.int64) * N + n.to(tl.int64))[None, :] * K + ks[:, None]
        x_scale_at = x_scale_ptr + p * across
        # One scale for the tile: BLOCK_N <= 128.
        band = e.to(tl.int64) * tl.cdiv(N, 128) + n_tile * BLOCK_N // 128
        w_scale_at = w_scale_ptr + band * across
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(tl.where(e < E, across, 0)):
            inside = ks < K - k * 128
            x = tl.load(x_at + k * 128, mask=inside[None, :], other=0)
            w = tl.load(w_at + k * 128, mask=inside[:, None] & (n < N)[None, :], other=0)
            scale = tl.load(x_scale_at + k) * tl.load(w_scale_at + k)
            acc += product(x, w, HARDWARE) * scale[:, None]
        _store_rows(acc, out_ptr, row_ptr + p, n, N)


@triton.jit(do_not_specialize=["P"])
def _weights(
    dy_ptr,
    dy_scale_ptr,
    x_ptr,
    x_scale_ptr,
    end_ptr,
    out_ptr,
    N,
    K,
    P,
    HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out [E, N, K].   dy [N, P] and x [K, P], with a scale for 128 columns.   end [E]: where
    each expert's columns end, a multiple of 128, as is P.
    """
    e, n, k, begin, end = _of_expert(end_ptr, N, K, BLOCK_M, BLOCK_N)
    ps = tl.arange(0, 128)
    blocks = P // 128
    dy_at = dy_ptr + n.to(tl.int64)[:, None] * (blocks * 128) + ps[None, :]
    x_at = x_ptr + k.to(tl.int64)[None, :] * (blocks * 128) + ps[:, None]
    dy_scale_at = dy_scale_ptr + n.to(tl.int64) * blocks
    x_scale_at = x_scale_ptr + k.to(tl.int64) * blocks
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for b in range(begin, end):
        dy = tl.load(dy_at + b * 128, mask=(n < N)[:, None], other=0)
        x = tl.load(x_at + b * 128, mask=(k < K)[None, :], other=0)
        dy_scale = tl.load(dy_scale_at + b, mask=n < N, other=0.0)
        x_scale = tl.load(x_scale_at + b, mask=k < K, other=0.0)
        acc += product(dy, x, HARDWARE) * dy_scale[:, None] * x_scale[None, :]
    store(acc, out_ptr + e.to(tl.int64) * N * K, n, k, N, K)


@triton.jit
def _scaled_rows(
    x_ptr,
    x_scale_ptr,
    x_total_ptr,
    w_ptr,
    w_scale_ptr,
    w_total_ptr,
    expert_ptr,
    row_ptr,
    out_ptr,
    E,
    sizes,
    E2M1: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out: rows of N.   x [P, K], w [E, N, K]: rows of `width` bytes and `across` scale bytes, and
    totals, as `_scaled` of low_precision_triton.py has them.   expert, row: as in `_rows`.
    """
    P, N, width, across = sizes
    WIDE: tl.constexpr = 16 if E2M1 else 32
    BYTES: tl.constexpr = BLOCK_K // 2 if E2M1 else BLOCK_K
    SCALES: tl.constexpr = BLOCK_K // WIDE
    m_tile, n_tile = tile_of_program(P, N, BLOCK_M, BLOCK_N, GROUP)
    e = tl.load(expert_ptr + m_tile * BLOCK_M // 128)
    if e <= E:
        p = m_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        own = e.to(tl.int64) * N + n.to(tl.int64)
        byte, group = tl.arange(0, BYTES), tl.arange(0, SCALES)
        x_at = x_ptr + p[:, None] * width + byte[None, :]
        w_at = w_ptr + own[:, None] * width + byte[None, :]
        x_scale_at = x_scale_ptr + p[:, None] * across + group[None, :]
        w_scale_at = w_scale_ptr + own[:, None] * across + group[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(tl.where(e < E, tl.cdiv(width, BYTES), 0)):
            inside = (byte < width - k * BYTES)[None, :]
            known = (group < across - k * SCALES)[None, :]
            x = tl.load(x_at + k * BYTES, mask=inside, other=0)
            w = tl.load(w_at + k * BYTES, mask=(n < N)[:, None] & inside, other=0)
            x_scale = tl.load(x_scale_at + k * SCALES, mask=known, other=0)
            w_scale = tl.load(w_scale_at + k * SCALES, mask=(n < N)[:, None] & known, other=0)
            acc = scaled_product(x, x_scale, w, w_scale, acc, E2M1, HARDWARE)
        if E2M1:  # one after the other: their product may be below float32's normal numbers
            acc = acc * tl.load(x_total_ptr) * tl.load(w_total_ptr)
        _store_rows(acc, out_ptr, row_ptr + p, n, N)


@triton.jit(do_not_specialize=["P"])
def _scaled_weights(
    dy_ptr,
    dy_scale_ptr,
    dy_total_ptr,
    x_ptr,
    x_scale_ptr,
    x_total_ptr,
    end_ptr,
    out_ptr,
    N,
    K,
    P,
    E2M1: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [E, N, K].   dy [N, P], x [K, P]: rows of bytes and scale bytes, and totals, as `_scaled`
    of low_precision_triton.py has them.   end [E]: as in `_weights`.

    A step of 256 codes may go past an expert's end; the codes past it are left out.
    """
    PART: tl.constexpr = 64 if E2M1 else 128  # bytes of 128 codes
    PART_SCALES: tl.constexpr = 8 if E2M1 else 4
    STEP: tl.constexpr = BLOCK_K // 128
    e, n, k, begin, end = _of_expert(end_ptr, N, K, BLOCK_M, BLOCK_N)
    byte, group = tl.arange(0, STEP * PART), tl.arange(0, STEP * PART_SCALES)
    blocks = P // 128
    dy_at = dy_ptr + n.to(tl.int64)[:, None] * (blocks * PART) + byte[None, :]
    x_at = x_ptr + k.to(tl.int64)[:, None] * (blocks * PART) + byte[None, :]
    dy_scale_at = dy_scale_ptr + n.to(tl.int64)[:, None] * (blocks * PART_SCALES) + group[None, :]
    x_scale_at = x_scale_ptr + k.to(tl.int64)[:, None] * (blocks * PART_SCALES) + group[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for b in range(begin, end, STEP):
        inside = (byte < (end - b) * PART)[None, :]
        known = (group < (end - b) * PART_SCALES)[None, :]
        dy = tl.load(dy_at + b * PART, mask=(n < N)[:, None] & inside, other=0)
        x = tl.load(x_at + b * PART, mask=(k < K)[:, None] & inside, other=0)
        dy_scale = tl.load(dy_scale_at + b * PART_SCALES, mask=(n < N)[:, None] & known, other=0)
        x_scale = tl.load(x_scale_at + b * PART_SCALES, mask=(k < K)[:, None] & known, other=0)
        acc = scaled_product(dy, dy_scale, x, x_scale, acc, E2M1, HARDWARE)
    if E2M1:  # one after the other, as in `_scaled_rows`
        acc = acc * tl.load(dy_total_ptr) * tl.load(x_total_ptr)
    store(acc, out_ptr + e.to(tl.int64) * N * K, n, k, N, K)


# ---- launchers


class Places(NamedTuple):
    """Places of `rows` rows, as `Placed` of low_precision_grouped_gemm.py has them, in int32."""

    rows: int
    ends: torch.Tensor
    expert: torch.Tensor
    row: torch.Tensor


def _copied(columns: int, itemsize: int, unit: int, experts: int) -> _Copied:
    """Each thread of four warps has eight 128-bit loads in flight, of rows of up to 1 KiB. Single
    elements take more registers: with 64 or 32 per thread ptxas spills, so these are at most 16.
    """
    widest = 1024 // itemsize if unit > 1 else 128
    wide = min(widest, next_power_of_2(columns))
    return _Copied(unit, next_power_of_2(experts + 1), PLACES=16, COLUMNS=wide)


def place(x: torch.Tensor, offsets: torch.Tensor, places: int) -> tuple[torch.Tensor, Places]:
    """x [R, C] at its places [P, C]; see `_place`.   offsets: contiguous."""
    (R, C), E = x.shape, offsets.shape[0]
    placed = x.new_empty((places, C))
    row_places = Places(R, *(offsets.new_empty(n) for n in (E, places // 128, places)))
    if placed.numel():
        x = last_contiguous(x)
        by = unit(x.element_size(), C, x.stride(0))
        fixed = _copied(C, x.element_size(), by, E)
        grid, sizes = (places // fixed.PLACES,), (C // by, x.stride(0) // by)
        tensors = x, offsets, placed, *row_places[1:]
        launch(_place, grid, *tensors, R, E, sizes, FIXED=fixed, num_warps=4)
    return placed, row_places


def rows(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    expert: torch.Tensor,
    row: torch.Tensor,
    out: torch.Tensor,
    others: Others = ALONE,
) -> None:
    """Writes `out`. e4m3 bytes, contiguous; see `_rows`. No size is 0."""
    (P, K), (E, N, _) = x.shape, w.shape
    key = N, K, rounded(P), large_shared_memory(x.device)
    c, run = choose(ROWS, others, x.device, key, K, out)
    if run is not None:
        run(x, x_scale, w, w_scale, None, (expert, row), out, {**c, "GROUP": GROUP})
        return
    grid = (P // c["BLOCK_M"] * cdiv(N, c["BLOCK_N"]),)
    tensors, sizes = (x, x_scale, w, w_scale, expert, row, out), (E, N, K, x_scale.shape[1])
    launch(_rows, grid, *tensors, sizes, HARDWARE=conversions(x.device) > 0, **c)


def weights(
    dy: torch.Tensor,
    dy_scale: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    ends: torch.Tensor,
    dtype: torch.dtype,
    others: Others = ALONE,
) -> torch.Tensor:
    """dw [E, N, K]; see `_weights`. No size is 0."""
    (N, P), K, E = dy.shape, x.shape[0], ends.shape[0]
    out = torch.empty((E, N, K), dtype=dtype, device=dy.device)
    key = N, K, rounded(P), large_shared_memory(dy.device)
    c, run = choose(WEIGHTS, others, dy.device, key, dy, x, out)
    if run is not None:
        run(dy, dy_scale, x, x_scale, ends, out, {**c, "GROUP": GROUP})
        return out
    grid, tensors = _tiles(E, N, K, c), (dy, dy_scale, x, x_scale, ends, out)
    launch(_weights, grid, *tensors, N, K, P, HARDWARE=conversions(dy.device) > 0, **c)
    return out


def scaled_rows(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_total: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    w_total: torch.Tensor | None,
    expert: torch.Tensor,
    row: torch.Tensor,
    out: torch.Tensor,
    others: Others = ALONE,
) -> None:
    """Writes `out`. Bytes in MXFP8, or with totals in NVFP4, contiguous; see `_scaled_rows`. No
    size is 0.
    """
    (P, width), (E, N, _) = x.shape, w.shape
    K = width * (1 if x_total is None else 2)
    key = x_total is not None, N, K, rounded(P), large_shared_memory(x.device)
    c, run = choose(SCALED_ROWS, others, x.device, key, x, out)
    if run is not None:
        run((x, x_scale, x_total), (w, w_scale, w_total), out, c, expert=expert, row=row)
        return
    grid = (P // c["BLOCK_M"] * cdiv(N, c["BLOCK_N"]),)
    tensors = x, x_scale, x_total, w, w_scale, w_total, expert, row, out
    sizes = P, N, width, x_scale.shape[1]
    flags = {"E2M1": x_total is not None, "HARDWARE": conversions(x.device) > 1}
    launch(_scaled_rows, grid, *tensors, E, sizes, **flags, **c)


def scaled_weights(
    dy: torch.Tensor,
    dy_scale: torch.Tensor,
    dy_total: torch.Tensor | None,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_total: torch.Tensor | None,
    ends: torch.Tensor,
    dtype: torch.dtype,
    others: Others = ALONE,
) -> torch.Tensor:
    """dw [E, N, K]; see `_scaled_weights`. No size is 0."""
    N, K, E = dy.shape[0], x.shape[0], ends.shape[0]
    P = dy.shape[1] * (1 if dy_total is None else 2)
    out = torch.empty((E, N, K), dtype=dtype, device=dy.device)
    key = dy_total is not None, N, K, rounded(P), large_shared_memory(dy.device)
    c, run = choose(SCALED_WEIGHTS, others, dy.device, key, dy, out)
    if run is not None:
        run((dy, dy_scale, dy_total), (x, x_scale, x_total), out, c, ends=ends)
        return out
    c = without(c, "GROUP")
    tensors = dy, dy_scale, dy_total, x, x_scale, x_total, ends, out
    flags = {"E2M1": dy_total is not None, "HARDWARE": conversions(dy.device) > 1}
    launch(_scaled_weights, _tiles(E, N, K, c), *tensors, N, K, P, **flags, **c)
    return out


def _tiles(E: int, N: int, K: int, config: dict) -> tuple[int]:
    """The grid of a weight's gradient."""
    return (E * cdiv(N, config["BLOCK_M"]) * cdiv(K, config["BLOCK_N"]),)


# ---- launch configurations

_NAMES = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
GROUP = 8  # tiles of rows that share columns, for L2


def _heuristic(N: int, K: int, rows: int, large: bool) -> dict:
    """Not measured on a GPU. As the products of low_precision_triton.py: two sums, and a scale for
    each row of both, in registers.
    """
    tile = (128, 64) if large else (64, 64)
    return dict(zip(_NAMES, (*tile, 8, 3), strict=True))


def _rows_space(N: int, K: int, rows: int, large: bool) -> list[dict]:
    widest = [dict(zip(_NAMES, (128, 128, 8, stages), strict=True)) for stages in (2, 3)]
    return _narrow() + (widest if large else [])


def _weights_space(N: int, K: int, rows: int, large: bool) -> list[dict]:
    # With a scale for each row of both, 128 x 128 spill for compute capability 9.0.
    return _narrow()


def _narrow() -> list[dict]:
    return [
        dict(zip(_NAMES, (*tile, warps, stages), strict=True))
        for tile, warps in (((64, 64), 4), ((64, 128), 8), ((128, 64), 8))
        for stages in (2, 3)
    ]


def _needs(key: dict) -> dict:
    return {
        "min_arch": 90,
        "max_arch": 119 if key["large"] else 999,
        "uses": {90: ("wgmma",), 100: ("tcgen05",)},
    }


def _rows_specs(key: dict, config: dict) -> list[KernelSpec]:
    pointers = {"x": "u8", "w": "u8", "x_scale": "fp32", "w_scale": "fp32"}
    pointers |= {"expert": "i32", "row": "i32", "out": "bf16"}
    label = f"fp8 rows{' large' if key['large'] else ''}"
    given = {**config, "HARDWARE": True}
    divisible = "sizes[1]", "sizes[2]"  # N, K
    return [spec(_rows, label, pointers, given, divisible=divisible, **_needs(key))]


def _weights_specs(key: dict, config: dict) -> list[KernelSpec]:
    factors = {"dy": "u8", "x": "u8", "dy_scale": "fp32", "x_scale": "fp32", "end": "i32"}
    return [
        spec(
            _weights,
            f"fp8 weights {out}{' large' if key['large'] else ''}",
            {**factors, "out": out},
            {**config, "HARDWARE": True},
            divisible=("N", "K"),
            **_needs(key),
        )
        for out in ("bf16", "fp32")
    ]


_FIELDS = ("N", "K", "rows", "large")
_KEYS = [(1536, 2048, 4096, False), (1536, 2048, 4096, True)]
ROWS = Tunable(
    "low_precision_grouped_gemm",
    "rows",
    _FIELDS,
    "forward_backward",
    _heuristic,
    _rows_space,
    _KEYS,
    _rows_specs,
)
WEIGHTS = Tunable(
    "low_precision_grouped_gemm",
    "weights",
    _FIELDS,
    "backward",
    _heuristic,
    _weights_space,
    _KEYS,
    _weights_specs,
)


# The configurations of dense products. Their key's fields have other names here.


def _scaled_heuristic(e2m1: bool, N: int, K: int, rows: int, large: bool) -> dict:
    """Not measured on a GPU."""
    return scaled_heuristic(e2m1, N, K, rows, large)


def _scaled_space(e2m1: bool, N: int, K: int, rows: int, large: bool) -> list[dict]:
    return scaled_space(e2m1, N, K, rows, large)


def _scaled_spec(kind: str, out: str, key: dict, config: dict) -> KernelSpec:
    """kind: "rows" or "weights"."""
    e2m1, large, of_rows = key["e2m1"], key["large"], kind == "rows"
    label = f"{'nvfp4' if e2m1 else 'mxfp8'} {kind}{'' if of_rows else ' ' + out}"
    names = ("x", "w") if of_rows else ("dy", "x")
    pointers = {name + part: "u8" for name in names for part in ("", "_scale")}
    if e2m1:
        pointers |= {f"{name}_total": "fp32" for name in names}
    return spec(
        _scaled_rows if of_rows else _scaled_weights,
        label + (" large" if large else ""),
        {**pointers, **dict.fromkeys(("expert", "row", "end"), "i32"), "out": out},
        {**config, "E2M1": e2m1, "HARDWARE": True},
        divisible=("sizes",) if of_rows else ("N", "K"),
        min_arch=100 if large else 120,
        max_arch=119 if large else 999,
        uses={100: ("tcgen05", "block_scale"), 120: ("mma", "block_scale")},
    )


def _scaled_rows_specs(key: dict, config: dict) -> list[KernelSpec]:
    return [_scaled_spec("rows", "bf16", key, config)]


def _scaled_weights_specs(key: dict, config: dict) -> list[KernelSpec]:
    return [_scaled_spec("weights", out, key, config) for out in ("bf16", "fp32")]


_SCALED_FIELDS = ("e2m1", "N", "K", "rows", "large")
_SCALED_KEYS = [(e2m1, *key) for e2m1 in (False, True) for key in _KEYS]
SCALED_ROWS = Tunable(
    "low_precision_grouped_gemm",
    "scaled_rows",
    _SCALED_FIELDS,
    "forward_backward",
    _scaled_heuristic,
    _scaled_space,
    _SCALED_KEYS,
    _scaled_rows_specs,
)
SCALED_WEIGHTS = Tunable(
    "low_precision_grouped_gemm",
    "scaled_weights",
    _SCALED_FIELDS,
    "backward",
    _scaled_heuristic,
    _scaled_space,
    _SCALED_KEYS,
    _scaled_weights_specs,
)


TUNABLES = ROWS, WEIGHTS, SCALED_ROWS, SCALED_WEIGHTS


# ---- for the compile gate


def _place_spec(data: str, tail: str) -> KernelSpec:
    """Rows aligned to 16 bytes, or with a tail of odd strides."""
    itemsize = {"bf16": 2, "fp32": 4}[data]
    fixed = _copied(2048, itemsize, 1 if tail else 16 // itemsize, 128)
    return KernelSpec.of(
        _place,
        f"place {data}{tail}",
        {"x": data, "placed": data, "*": "i32"},
        {"FIXED": fixed},
        {"sizes": ("i32", "i32")},
        load=0 if tail else 128,
        store=0 if tail else 128,
        elements=fixed.PLACES * fixed.COLUMNS,
    )


def gate() -> list[KernelSpec]:
    """What has no configurations."""
    return [_place_spec(*of) for of in (("bf16", ""), ("bf16", " odd"), ("fp32", ""))]
