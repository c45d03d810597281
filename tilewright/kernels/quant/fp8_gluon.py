"""x w^T of block-scaled FP8 with warp specialization, for sm_90: the `fp8` of
quantized_linear_triton.py, and with a weight per expert the `rows` of
low_precision_grouped_triton.py, where a configuration says so (specialized.py).

Tensor cores sum FP8 with few bits, so a sum of 128 columns is scaled and added in float32. A
warpgroup has two such sums: the tensor cores make one while it adds the other, and the other
warpgroup's while it adds both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.kernels.device import multiprocessors
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.warp_specialized import (
    HOPPER,
    MULTIPLYING,
    ONE_WARP,
    advance,
    barriers,
    descriptor,
    descriptor_type,
    grouped,
    ring,
    stage_result,
    stages,
    store_box,
    tma_load,
    tma_store,
)

_STEP = 128  # summed columns of a tile: those of one scale


class _Fixed(NamedTuple):
    """What is constant in a launch: tiles of M x COLUMNS, in steps of K, and their STAGES."""

    BIAS: bool
    M: int
    COLUMNS: int
    GROUP: int
    STAGES: int
    K: int = _STEP


@gluon.jit
def _tile(t, expert_ptr, work, GROUP: gl.constexpr):
    """Tile t's expert, tile of rows, tile of columns, and steps, which are 0 in the tail.

    work: experts, tiles of rows and of columns, and steps.
    """
    E, m_tiles, n_tiles, steps = work
    m, n = grouped(t, m_tiles, n_tiles, GROUP)
    if expert_ptr is None:
        e = 0
    else:
        e = gl.load(expert_ptr + m)
        steps = gl.where(e < E, steps, 0)
    return e, m, n, steps


@gluon.jit
def _load(x, w, expert_ptr, work, ring, FIXED: gl.constexpr):
    """One warp. Steps past the last column read zeros."""
    a, b, full, empty = ring
    stage, phase = 0, 0
    for t in range(gl.program_id(0), work[1] * work[2], gl.num_programs(0)):
        e, m, n, count = _tile(t, expert_ptr, work, FIXED.GROUP)
        for step in range(count):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), x.block_type.nbytes + w.block_type.nbytes)
            k = step * a.shape[2]
            tma_load(x, [m * a.shape[1], k], full.index(stage), a.index(stage))
            here = b.index(stage).reshape(w.block_shape)
            tma_load(w, [e, n * b.shape[1], k], full.index(stage), here)
            stage, phase = advance(stage, phase, a.shape[0])


@gluon.jit
def _begin(part, a, b, full, stage, phase):
    """Begins a stage's product, in the registers of `part`."""
    mbarrier.wait(full.index(stage), phase)
    right = b.index(stage).permute((1, 0))
    return warpgroup_mma(a.index(stage), right, part, use_acc=False, is_async=True)


@gluon.jit
def store_rows(tile, staging, to, to_ptr, row_ptr, column, N):
    """Stores a tile's rows where a map says, one after the other from the first on, and not the
    rows that it has -1 for, the last ones.
    """
    ROWS: gl.constexpr = staging.shape[0]
    COLUMNS: gl.constexpr = staging.shape[1]
    first = gl.load(row_ptr)
    if first >= 0:
        stage_result(tile, staging)
        if gl.load(row_ptr + ROWS - 1) >= 0:
            tma_store(to, [first, column], staging)
        else:
            WIDE: gl.constexpr = gl.BlockedLayout(
                [1, 8], [32 * 8 // COLUMNS, COLUMNS // 8], [gl.num_warps(), 1], [1, 0]
            )
            r = gl.load(row_ptr + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE)))
            c = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, WIDE))
            at = to_ptr + r.to(gl.int64)[:, None] * N + c[None, :]
            gl.store(at, staging.load(WIDE), mask=(r >= 0)[:, None] & (c < N)[None, :])


@gluon.jit
def _multiply(given, ring, staging, sizes, work, FIXED: gl.constexpr):
    """Two warpgroups."""
    out, out_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, expert_ptr, row_ptr = given
    a, b, full, empty = ring
    _, T, N, across = sizes
    STAGES: gl.constexpr = a.shape[0]
    M: gl.constexpr = a.shape[1]
    COLUMNS: gl.constexpr = b.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 32])
    i = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    stage, phase = 0, 0
    for t in range(gl.program_id(0), work[1] * work[2], gl.num_programs(0)):
        e, m, n, count = _tile(t, expert_ptr, work, FIXED.GROUP)
        row = m * M + i
        x_scale_at = x_scale_ptr + row.to(gl.int64) * across
        # One scale for the tile: COLUMNS <= 128.
        band = e * gl.cdiv(N, 128) + n * COLUMNS // 128
        w_scale_at = w_scale_ptr + band.to(gl.int64) * across
        acc = gl.zeros((M, COLUMNS), gl.float32, LAYOUT)
        even = gl.zeros((M, COLUMNS), gl.float32, LAYOUT)
        odd = gl.zeros((M, COLUMNS), gl.float32, LAYOUT)
        for k in range(0, count, 2):
            # Used after both products have begun.
            even_scale = gl.load(x_scale_at + k, mask=row < T, other=0.0)
            even_scale *= gl.load(w_scale_at + k)
            there = k + 1 < across
            odd_scale = gl.load(x_scale_at + k + 1, mask=(row < T) & there, other=0.0)
            odd_scale *= gl.load(w_scale_at + k + 1, mask=there, other=0.0)
            even = _begin(even, a, b, full, stage, phase)
            first = stage
            stage, phase = advance(stage, phase, STAGES)
            odd = _begin(odd, a, b, full, stage, phase)
            even = warpgroup_mma_wait(1, deps=[even])
            mbarrier.arrive(empty.index(first))
            acc += even * even_scale[:, None]
            # Waits for all: ptxas serializes products that it sees in flight over the loop's end.
            odd = warpgroup_mma_wait(0, deps=[odd])
            mbarrier.arrive(empty.index(stage))
            acc += odd * odd_scale[:, None]
            stage, phase = advance(stage, phase, STAGES)
        if FIXED.BIAS:
            bias = gl.load(bias_ptr + n * COLUMNS + j, mask=n * COLUMNS + j < N, other=0.0)
            acc += bias.to(gl.float32)[None, :]
        tile = acc.to(staging.dtype)
        if row_ptr is None:
            store_box(tile, staging, out, [m * M, n * COLUMNS])
        else:
            store_rows(tile, staging, out, out_ptr, row_ptr + m * M, n * COLUMNS, N)
    tma.store_wait(0)


@gluon.jit
def _fp8(
    x,
    w,
    out,
    out_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    expert_ptr,
    row_ptr,
    sizes,
    FIXED: gl.constexpr,
):
    """Two warpgroups together, of tiles of 128 columns.

    out: rows of N.   x [T, K] with scales [T, across], w [E, N, K] with scales
    [E, ceil(N / 128), across]: descriptors.   expert [T / M], row [T]: as
    low_precision_grouped_triton's; None: one expert, whose row t is t.
    """
    E, T, N, across = sizes
    M: gl.constexpr = FIXED.M
    COLUMNS: gl.constexpr = FIXED.COLUMNS
    a = stages(x.dtype, FIXED.STAGES, M, FIXED.K)
    b = stages(w.dtype, FIXED.STAGES, COLUMNS, FIXED.K)
    staging = gl.allocate_shared_memory(out.dtype, [M, COLUMNS], out.layout)
    full, empty = ring(FIXED.STAGES, 1)
    m_tiles, n_tiles = gl.cdiv(T, M), gl.cdiv(N, COLUMNS)
    given = (out, out_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, expert_ptr, row_ptr)
    memory, work = (a, b, full, empty), (E, m_tiles, n_tiles, gl.cdiv(across, 2) * 2)
    gl.warp_specialize(
        [
            (_multiply, (given, memory, staging, sizes, work, FIXED)),
            (_load, (x, w, expert_ptr, work, memory, FIXED)),
        ],
        [1],
        [ONE_WARP],
    )


# ---- wide tiles


@gluon.jit
def _store_half(acc, bias_ptr, out, out_ptr, row_ptr, staging, row, column, N, BIAS: gl.constexpr):
    """Stores a warpgroup's 64 rows of 128 columns."""
    if BIAS:
        j = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        acc += gl.load(bias_ptr + j, mask=j < N, other=0.0).to(gl.float32)[None, :]
    tile = acc.to(staging.dtype)
    if row_ptr is None:
        store_box(tile, staging, out, [row, column])
    else:
        store_rows(tile, staging, out, out_ptr, row_ptr + row, column, N)


@gluon.jit
def _multiply_half(part, left, b, HALF: gl.constexpr):
    """left times 128 of the columns of b, in the registers of `part`."""
    right = b.slice(HALF * 128, 128).permute((1, 0))
    part = warpgroup_mma(left, right, part, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[part])


@gluon.jit
def _multiply_wide(given, ring, staging, sizes, work, W: gl.constexpr, FIXED: gl.constexpr):
    """Warpgroup W of two."""
    out, out_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, expert_ptr, row_ptr = given
    a, b, full, empty = ring
    _, T, N, across = sizes
    STAGES: gl.constexpr = a.shape[0]
    ROWS: gl.constexpr = a.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    i = W * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    here, bands = staging.index(W), gl.cdiv(N, 128)
    stage, phase = 0, 0
    for t in range(gl.program_id(0), work[1] * work[2], gl.num_programs(0)):
        e, m, n, count = _tile(t, expert_ptr, work, FIXED.GROUP)
        row, band = m * 2 * ROWS + i, 2 * n
        x_scale_at = x_scale_ptr + row.to(gl.int64) * across
        w_scale_at = w_scale_ptr + (e * bands + band).to(gl.int64) * across
        first = gl.zeros((ROWS, 128), gl.float32, LAYOUT)
        second = gl.zeros((ROWS, 128), gl.float32, LAYOUT)
        for k in range(count):
            # Used after the products.
            x_scale = gl.load(x_scale_at + k, mask=row < T, other=0.0)
            first_scale = gl.load(w_scale_at + k)
            second_scale = gl.load(w_scale_at + across + k, mask=band + 1 < bands, other=0.0)
            mbarrier.wait(full.index(stage), phase)
            left = a.index(stage).slice(W * ROWS, ROWS)
            # Not carried from the last step, which would cost its registers.
            none = gl.zeros((ROWS, 128), gl.float32, LAYOUT)
            part = _multiply_half(none, left, b.index(stage), 0)
            first += part * (x_scale * first_scale)[:, None]
            part = _multiply_half(part, left, b.index(stage), 1)
            mbarrier.arrive(empty.index(stage))
            second += part * (x_scale * second_scale)[:, None]
            stage, phase = advance(stage, phase, STAGES)
        at, column = m * 2 * ROWS + W * ROWS, band * 128
        # Without these conditions ptxas allocates both products at once, and spills.
        if at < T:
            _store_half(first, bias_ptr, out, out_ptr, row_ptr, here, at, column, N, FIXED.BIAS)
        if (at < T) & (band + 1 < bands):
            _store_half(
                second, bias_ptr, out, out_ptr, row_ptr, here, at, column + 128, N, FIXED.BIAS
            )
    tma.store_wait(0)


@gluon.jit
def _fp8_wide(
    x,
    w,
    out,
    out_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    expert_ptr,
    row_ptr,
    sizes,
    FIXED: gl.constexpr,
):
    """As `_fp8`, of tiles of 256 columns, which read a quarter less from L2. Each warpgroup has
    half of the rows and goes at its own pace: one multiplies while the other scales and adds.
    """
    E, T, N, across = sizes
    M: gl.constexpr = FIXED.M
    COLUMNS: gl.constexpr = FIXED.COLUMNS
    STAGES: gl.constexpr = FIXED.STAGES
    a = stages(x.dtype, STAGES, M, FIXED.K)
    b = stages(w.dtype, STAGES, COLUMNS, FIXED.K)
    staging = stages(out.dtype, 2, M // 2, COLUMNS // 2)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    given = (out, out_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, expert_ptr, row_ptr)
    memory, work = (a, b, full, empty), (E, gl.cdiv(T, M), gl.cdiv(N, COLUMNS), across)
    gl.warp_specialize(
        [
            (_multiply_wide, (given, memory, staging, sizes, work, 0, FIXED)),
            (_multiply_wide, (given, memory, staging, sizes, work, 1, FIXED)),
            (_load, (x, w, expert_ptr, work, memory, FIXED)),
        ],
        [4, 1],
        [MULTIPLYING, ONE_WARP],
    )


# ---- launches


def _kernel(config: dict) -> tuple:
    """The kernel, and the box of its result."""
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    return (_fp8_wide, (m // 2, n // 2)) if n == 256 else (_fp8, (m, n))


def _fixed(bias: bool, config: dict) -> _Fixed:
    names = "BLOCK_M", "BLOCK_N", "GROUP", "num_stages"
    return _Fixed(bias, *(config[name] for name in names))


def fits(columns: int, out: torch.Tensor) -> bool:
    """Whether TMA reads rows of `columns` codes, and stores those of a result, of 16 bits."""
    return columns % 16 == 0 and out.shape[-1] % 8 == 0 and out.element_size() == 2


def fp8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    maps: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    config: dict,
) -> None:
    """Writes `out`, rows of N: as `fp8` of quantized_linear_triton.py, or `rows` of
    low_precision_grouped_triton.py. `fits` says which.

    x [T, K], w [E, N, K]: e4m3 codes, contiguous.   maps: expert, row; see `_fp8`.
    """
    x, w = x.view(torch.float8_e4m3fn), w.view(torch.float8_e4m3fn)
    (T, _), (E, N, _) = x.shape, w.shape
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    expert, row = maps or (None, None)
    kernel, box = _kernel(config)
    descriptors = descriptor(x, [m, _STEP]), descriptor(w, [1, n, _STEP]), descriptor(out, [*box])
    tensors = out, x_scale, w_scale, bias, expert, row
    grid = (min(multiprocessors(x.device), cdiv(T, m) * cdiv(N, n)),)
    constants = {"FIXED": _fixed(bias is not None, config), "num_warps": config["num_warps"]}
    launch(kernel, grid, *descriptors, *tensors, (E, T, N, x_scale.shape[1]), **constants)


def spec(label: str, experts: bool, config: dict) -> KernelSpec:
    """experts: whether each has a weight; there is no bias then."""
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    maps = {"expert": "i32", "row": "i32", "out": "bf16"} if experts else {"bias": "bf16"}
    kernel, box = _kernel(config)
    return KernelSpec.of(
        kernel,
        label,
        {"x_scale": "fp32", "w_scale": "fp32", **maps},
        {"FIXED": _fixed(not experts, config), **config},
        {
            "x": descriptor_type("fp8e4nv", m, _STEP),
            "w": descriptor_type("fp8e4nv", 1, n, _STEP),
            "out": descriptor_type("bf16", *box),
            "sizes": ("i32",) * 4,
        },
        divisible=("sizes[2]",),  # N
        # Scales, one per row and 128 columns; TMA reads and stores the rest.
        load=32,
        store=0,
        **HOPPER,
    )
