"""The grouped GEMM of grouped_gemm_triton.py with warp specialization, for sm_90: its `_gemm` with
the epilogues PLAIN and SWIGLU, for operands that TMA reads. Tiles, epilogues and results are those
of that module, which prepares the arguments (specialized.py).

Half of a tile's columns at a time get their bias and are rounded. With interleaved gates and ups
half of h is computed before the other half is stored. For a whole tile at a time, the biases of a
thread's 64 columns, or gates, ups and results beside sums, would exceed its 208 registers.

No epilogue adds rows to tokens. The down-projection of Qwen3-30B-A3B (32,768 tokens, 8 experts
each, H = 2,048) writes 1.07 GB of rows while it multiplies, and `_collect` reads them: 1.21 GB with
y, 0.28 ms at 4.3 TB/s after 4.1 ms of products (bench/predicted). A product that adds to y does
so in float32, since 16 bits would be rounded 8 times: 268 MB of zeros, 537 M additions that read
and write 4 bytes each (4.3 GB, 1 ms, where L2 does not hold y), and a cast that moves 403 MB:
1.2 ms for 0.28, in an order that changes, or with experts that wait for each other. The same holds
for dx. With one expert per token it would be a store, and save 4 R H bytes; no model here routes
so.

None has the gate's gradient, DSWIGLU. `_dswiglu` reads dh from memory, where the product wrote it:
806 MB of such a layer (I = 768), 0.19 ms at 4.3 TB/s, beside 7 ms of products in its backward. In
the epilogue a tile of 256 columns of dh needs 512 of gates and ups and makes 512 of their gradients
and 256 of h: 128 KiB to load beside 192 of operands, or tiles of half the columns, whose operands
are read from L2 a third more often, which bounds this product (bench/predicted).

None adds a residual. Rows are not tokens, so that only `_collect` could; `add_rmsnorm`, which adds
it now, would move T H elements less, 31 us of such a layer's 4.4 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from tilewright.kernels.device import multiprocessors
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv
from tilewright.kernels.moe.gated_triton import Outputs, Tokens, gated
from tilewright.kernels.moe.operators import GateConstants
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.warp_specialized import (
    GATHERING,
    GATHERING_WIDE,
    HOPPER,
    ONE_WARP,
    accumulate,
    advance,
    clear_rows,
    descriptor,
    descriptor_type,
    grouped,
    halves,
    multiply,
    ring,
    stages,
    store_box,
    store_tile,
    thread_barrier,
    thread_load,
    tma_load,
)

# Gathered stages that the loading warps have issued and not yet announced: cp.async completes in
# order, so waiting for an older one leaves these in flight.
_BEHIND = gl.constexpr(2)


class _Fixed(NamedTuple):
    """What is constant in a launch of `_gemm` beside the gate: as grouped_gemm_triton's."""

    GATHER: bool
    TRANSPOSED: bool
    EPILOGUE: int
    STORE_PRE: bool
    BIAS: bool
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP: int
    STAGES: int


@gluon.jit
def _tile(
    t, tiles_ptr, capacity, m_tiles, n_tiles, E, K, BLOCK_K: gl.constexpr, GROUP: gl.constexpr
):
    """Tile t's expert, first row, end of rows, tile of columns, and steps along K, which are 0 in
    the tail.
    """
    m, n = grouped(t, m_tiles, n_tiles, GROUP)
    e = gl.load(tiles_ptr + m)
    row = gl.load(tiles_ptr + capacity + m)
    end = gl.load(tiles_ptr + 2 * capacity + m)
    steps = gl.where((e < E) & (row < end), gl.cdiv(K, BLOCK_K), 0)
    return e, row, end, n, steps


@gluon.jit
def _weight(w, e, n, k, full, b, TRANSPOSED: gl.constexpr, HALVES: gl.constexpr):
    """Copies a step's tile of w to b."""
    if TRANSPOSED:
        tma_load(w, [e, k, n * b.shape[1]], full, b.reshape(w.block_shape))
    elif HALVES:
        tma_load(w, [e, 0, n * (b.shape[0] // 2), k], full, b.reshape(w.block_shape))
    else:
        tma_load(w, [e, n * b.shape[0], k], full, b.reshape(w.block_shape))


@gluon.jit
def _load(x, w, work, ring, FIXED: gl.constexpr, HALVES: gl.constexpr):
    """One warp: both operands by TMA."""
    tiles_ptr, capacity, n_tiles, E, K = work
    a, b, full, empty = ring
    BLOCK_K: gl.constexpr = a.shape[2]
    GROUP: gl.constexpr = FIXED.GROUP
    m_tiles = gl.load(tiles_ptr + 3 * capacity)
    stage, phase = 0, 0
    for t in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        e, row, _, n, steps = _tile(t, tiles_ptr, capacity, m_tiles, n_tiles, E, K, BLOCK_K, GROUP)
        for step in range(steps):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), x.block_type.nbytes + w.block_type.nbytes)
            tma_load(x, [row, step * BLOCK_K], full.index(stage), a.index(stage))
            here = b.index(stage)
            _weight(w, e, n, step * BLOCK_K, full.index(stage), here, FIXED.TRANSPOSED, HALVES)
            stage, phase = advance(stage, phase, a.shape[0])


@gluon.jit
def _announce(full, issued):
    """Says that the oldest of the gathered stages that were not announced yet is written."""
    STAGES: gl.constexpr = full.shape[0]
    fence_async_shared()  # cp.async writes as threads do, wgmma reads by the async proxy
    mbarrier.arrive(full.index((issued + STAGES - 1 - _BEHIND) % STAGES), pred=issued > _BEHIND)


@gluon.jit
def _gather(rows, w, work, ring, FIXED: gl.constexpr, HALVES: gl.constexpr):
    """A warpgroup: row r of the left operand is row slots[r] // TOP_K of x."""
    x_ptr, slots_ptr, x_stride, TOP_K = rows
    tiles_ptr, capacity, n_tiles, E, K = work
    a, b, full, empty = ring
    BLOCK_M: gl.constexpr = a.shape[1]
    BLOCK_K: gl.constexpr = a.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    m_tiles = gl.load(tiles_ptr + 3 * capacity)
    ks = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    i = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    stage, phase, issued = 0, 0, 0
    for t in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        e, row, end, n, steps = _tile(
            t, tiles_ptr, capacity, m_tiles, n_tiles, E, K, BLOCK_K, FIXED.GROUP
        )
        live = row + i < end
        slot = gl.load(slots_ptr + row + i, mask=live, other=0)
        at = x_ptr + (slot // TOP_K).to(gl.int64)[:, None] * x_stride + ks[None, :]
        for step in range(steps):
            k = step * BLOCK_K
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), w.block_type.nbytes)
            _weight(w, e, n, k, full.index(stage), b.index(stage), FIXED.TRANSPOSED, HALVES)
            # Rows and columns that do not exist are zeros.
            mask = live[:, None] & (k + ks < K)[None, :]
            thread_load(a.index(stage), at + k, mask=mask)
            async_copy.commit_group()
            issued += 1
            async_copy.wait_group(_BEHIND)
            _announce(full, issued)
            stage, phase = advance(stage, phase, a.shape[0])
    async_copy.wait_group(0)
    for _ in gl.static_range(_BEHIND):
        issued += 1
        _announce(full, issued)


@gluon.jit
def _fill(rows, w, work, ring, FIXED: gl.constexpr, HALVES: gl.constexpr):
    if FIXED.GATHER:
        _gather(rows, w, work, ring, FIXED, HALVES)
    else:
        _load(rows[0], w, work, ring, FIXED, HALVES)


@gluon.jit
def _rounded(t, bias_ptr, e, E, column, end, columns, dtype: gl.constexpr, BIAS: gl.constexpr):
    """Half a tile, which begins at a column, in the dtype of the result; with BIAS plus that of
    expert e, which has `columns`, before column `end`. A half at a time: a thread has as many
    columns as rows' sums of one.
    """
    if BIAS:
        j = column + gl.arange(0, t.shape[1], gl.SliceLayout(0, t.type.layout))
        bias_ptr += e.to(gl.int64) * columns
        t += gl.load(bias_ptr + j, mask=(j < end) & (e < E), other=0.0).to(gl.float32)[None, :]
    return t.to(dtype)


@gluon.jit
def _h(gate, up, GATE: gl.constexpr):
    a, _, v, _ = gated(gate.to(gl.float32), up.to(gl.float32), GATE)
    return (a * v).to(gate.dtype)


@gluon.jit
def _h_of_pairs(t, GATE: gl.constexpr):
    """h of interleaved gates and ups."""
    gate, up = t.reshape([t.shape[0], t.shape[1] // 2, 2]).split()
    return _h(gate, up, GATE)


@gluon.jit
def _multiply(outputs, tiles, memory, FIXED: gl.constexpr, GATE: gl.constexpr):
    """Two warpgroups."""
    out, pre, out_ptr, pre_ptr, bias_ptr = outputs
    tiles_ptr, capacity, n_tiles, E, N, K = tiles
    a, b, staging, full, empty = memory
    BLOCK_M: gl.constexpr = a.shape[1]
    BLOCK_K: gl.constexpr = a.shape[2]
    BLOCK_N: gl.constexpr = FIXED.BLOCK_N
    HALF: gl.constexpr = BLOCK_N // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    dtype: gl.constexpr = staging.dtype
    m_tiles = gl.load(tiles_ptr + 3 * capacity)
    stage, phase = 0, 0
    for t in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        e, row, end, n, steps = _tile(
            t, tiles_ptr, capacity, m_tiles, n_tiles, E, K, BLOCK_K, FIXED.GROUP
        )
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
        acc, stage, phase = accumulate(
            acc, steps, a, b, full, empty, stage, phase, False, FIXED.TRANSPOSED
        )
        left, right = halves(acc)
        # Where the two are in the matrix that has both, and the ends of their columns there.
        at, beside, end_at, columns = n * BLOCK_N, n * BLOCK_N + HALF, N, N
        if FIXED.EPILOGUE == 1 and GATE.INTERLEAVED:
            end_at, columns = 2 * N, 2 * N
        elif FIXED.EPILOGUE == 1:
            at, beside, columns = n * HALF, N + n * HALF, 2 * N
        left = _rounded(left, bias_ptr, e, E, at, end_at, columns, dtype, FIXED.BIAS)
        right = _rounded(right, bias_ptr, e, E, beside, columns, columns, dtype, FIXED.BIAS)
        if FIXED.EPILOGUE == 0:
            store_tile(left, staging, out, out_ptr, row, end, at, N, N)
            store_tile(right, staging, out, out_ptr, row, end, beside, N, N)
        else:
            if FIXED.STORE_PRE:
                store_tile(left, staging, pre, pre_ptr, row, end, at, end_at, columns)
            if GATE.INTERLEAVED:
                # h of one half is computed before the other half is stored: gates and results of
                # both at a time take more registers than there are.
                left = _h_of_pairs(left, GATE)
            if FIXED.STORE_PRE:
                store_tile(right, staging, pre, pre_ptr, row, end, beside, columns, columns)
            if GATE.INTERLEAVED:
                right = _h_of_pairs(right, GATE)
                h = gl.join(left, right).permute((0, 2, 1)).reshape([BLOCK_M, HALF])
            else:
                h = _h(left, right, GATE)
            store_tile(h, staging, out, out_ptr, row, end, n * HALF, N, N)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["capacity"])
def _gemm(
    x,
    w,
    out,
    pre,
    out_ptr,
    pre_ptr,
    tiles_ptr,
    slots_ptr,
    bias_ptr,
    E,
    capacity,
    N,
    K,
    x_stride,
    TOP_K,
    FIXED: gl.constexpr,
    GATE: gl.constexpr,
):
    """The arguments are those of grouped_gemm_triton's kernel.

    x: [rows, K], a descriptor, or with GATHER a pointer.
    w: a descriptor of [E, N, K], TRANSPOSED [E, K, N], or of halves [E, 2, N, K].
    out, pre: descriptors of [rows, N] and [rows, 2 N], for boxes of BLOCK_M by BLOCK_N // 2.
    """
    HALVES: gl.constexpr = FIXED.EPILOGUE == 1 and not GATE.INTERLEAVED
    dtype: gl.constexpr = out.dtype
    BLOCK_M: gl.constexpr = FIXED.BLOCK_M
    BLOCK_N: gl.constexpr = FIXED.BLOCK_N
    BLOCK_K: gl.constexpr = FIXED.BLOCK_K
    STAGES: gl.constexpr = FIXED.STAGES
    ROWS: gl.constexpr = BLOCK_K if FIXED.TRANSPOSED else BLOCK_N
    COLUMNS: gl.constexpr = BLOCK_N if FIXED.TRANSPOSED else BLOCK_K
    a = stages(dtype, STAGES, BLOCK_M, BLOCK_K)
    b = stages(dtype, STAGES, ROWS, COLUMNS)
    staging = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N // 2], out.layout)
    # Gathered rows are announced by a second arrival.
    full, empty = ring(STAGES, 2 if FIXED.GATHER else 1)
    n_tiles = gl.cdiv(N, BLOCK_N // 2 if FIXED.EPILOGUE == 1 else BLOCK_N)
    outputs, tiles = (out, pre, out_ptr, pre_ptr, bias_ptr), (tiles_ptr, capacity, n_tiles, E, N, K)
    memory = a, b, staging, full, empty
    rows, work = (x, slots_ptr, x_stride, TOP_K), (tiles_ptr, capacity, n_tiles, E, K)
    gl.warp_specialize(
        [
            (_multiply, (outputs, tiles, memory, FIXED, GATE)),
            (_fill, (rows, w, work, (a, b, full, empty), FIXED, HALVES)),
        ],
        [4 if FIXED.GATHER else 1],
        [GATHERING if FIXED.GATHER else ONE_WARP],
    )


# ---- gradients of weights: a sum over an expert's rows


class _Weights(NamedTuple):
    """What is constant in a launch of `_dweight`: as grouped_gemm_triton's."""

    GATHER_DY: bool
    GATHER_X: bool
    BLOCK_N: int
    BLOCK_K: int
    BLOCK_R: int
    GROUP: int
    STAGES: int


@gluon.jit
def _weight_tile(t, offsets_ptr, R, n_tiles, k_tiles, GROUP: gl.constexpr):
    """Tile t's expert, the first row and the end of its rows, and its tiles of N and K."""
    e = t // (n_tiles * k_tiles)
    n, k = grouped(t - e * (n_tiles * k_tiles), n_tiles, k_tiles, GROUP)
    begin = gl.load(offsets_ptr + e - 1, mask=e > 0, other=0)
    begin = gl.minimum(gl.maximum(begin, 0), R)
    end = gl.minimum(gl.maximum(gl.load(offsets_ptr + e), begin), R)
    return e, begin, end, n, k


@gluon.jit
def _load_rows(dy, x, work, ring, GROUP: gl.constexpr):
    """One warp: both operands by TMA."""
    offsets_ptr, R, tiles, n_tiles, k_tiles = work
    a, b, full, empty = ring
    BLOCK_R: gl.constexpr = a.shape[1]
    stage, phase = 0, 0
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, begin, end, n, k = _weight_tile(t, offsets_ptr, R, n_tiles, k_tiles, GROUP)
        for row in range(begin, end, BLOCK_R):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), dy.block_type.nbytes + x.block_type.nbytes)
            tma_load(dy, [row, n * a.shape[2]], full.index(stage), a.index(stage))
            tma_load(x, [row, k * b.shape[2]], full.index(stage), b.index(stage))
            stage, phase = advance(stage, phase, a.shape[0])


@gluon.jit
def _gather_rows(gathered, other, rows, work, ring, DY: gl.constexpr, GROUP: gl.constexpr):
    """A warpgroup: row r of `gathered`, which is DY or x, is its row slots[r] // TOP_K. The slots
    of a step are read one step before.

    rows: slots, the stride and width of `gathered`, and TOP_K.
    """
    slots_ptr, stride, width, TOP_K = rows
    offsets_ptr, R, tiles, n_tiles, k_tiles = work
    mine, others, full, empty = ring
    BLOCK_R: gl.constexpr = mine.shape[1]
    COLUMNS: gl.constexpr = mine.shape[2]
    LANES: gl.constexpr = min(COLUMNS // 8, 32)
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
    )
    i = gl.arange(0, BLOCK_R, gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    stage, phase, issued = 0, 0, 0
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, begin, end, n, k = _weight_tile(t, offsets_ptr, R, n_tiles, k_tiles, GROUP)
        if DY:
            column, opposite = n * COLUMNS, k * others.shape[2]
        else:
            column, opposite = k * COLUMNS, n * others.shape[2]
        slot = gl.load(slots_ptr + begin + i, mask=begin + i < end, other=0)
        for row in range(begin, end, BLOCK_R):
            live = row + i < end
            source = (slot // TOP_K).to(gl.int64) * stride + column
            slot = gl.load(slots_ptr + row + BLOCK_R + i, mask=row + BLOCK_R + i < end, other=0)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), other.block_type.nbytes)
            tma_load(other, [row, opposite], full.index(stage), others.index(stage))
            at = gathered + source[:, None] + c[None, :]
            mask = live[:, None] & (column + c < width)[None, :]
            thread_load(mine.index(stage), at, mask=mask)
            async_copy.commit_group()
            issued += 1
            async_copy.wait_group(_BEHIND)
            _announce(full, issued)
            stage, phase = advance(stage, phase, mine.shape[0])
    async_copy.wait_group(0)
    for _ in gl.static_range(_BEHIND):
        issued += 1
        _announce(full, issued)


@gluon.jit
def _fill_rows(operands, work, ring, FIXED: gl.constexpr):
    dy, x, slots_ptr, dy_stride, x_stride, N, K, TOP_K = operands
    a, b, full, empty = ring
    if FIXED.GATHER_DY:
        _gather_rows(dy, x, (slots_ptr, dy_stride, N, TOP_K), work, ring, True, FIXED.GROUP)
    elif FIXED.GATHER_X:
        swapped, rows = (b, a, full, empty), (slots_ptr, x_stride, K, TOP_K)
        _gather_rows(x, dy, rows, work, swapped, False, FIXED.GROUP)
    else:
        _load_rows(dy, x, work, ring, FIXED.GROUP)


@gluon.jit
def _sum_rows(out, work, memory, FIXED: gl.constexpr):
    """Two warpgroups."""
    offsets_ptr, R, tiles, n_tiles, k_tiles = work
    a, b, staging, full, empty = memory
    STAGES: gl.constexpr = a.shape[0]
    BLOCK_R: gl.constexpr = a.shape[1]
    BLOCK_N: gl.constexpr = a.shape[2]
    BLOCK_K: gl.constexpr = b.shape[2]
    HALF: gl.constexpr = BLOCK_K // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_K, 16])
    stage, phase = 0, 0
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e, begin, end, n, k = _weight_tile(t, offsets_ptr, R, n_tiles, k_tiles, FIXED.GROUP)
        acc = gl.zeros((BLOCK_N, BLOCK_K), gl.float32, LAYOUT)
        whole = (end - begin) // BLOCK_R
        acc, stage, phase = accumulate(acc, whole, a, b, full, empty, stage, phase, True, True)
        rest = end - begin - whole * BLOCK_R
        if rest > 0:
            # Rows past the expert's end are another's, or the tail's: both factors become 0, since
            # 0 * NaN is NaN.
            mbarrier.wait(full.index(stage), phase)
            clear_rows(a.index(stage), rest)
            clear_rows(b.index(stage), rest)
            fence_async_shared()
            thread_barrier()
            acc = multiply(a.index(stage), b.index(stage), acc, True, True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(stage))
            stage, phase = advance(stage, phase, STAGES)
        left, right = halves(acc)
        store_box(left.to(staging.dtype), staging, out, [e, n * BLOCK_N, k * BLOCK_K])
        store_box(right.to(staging.dtype), staging, out, [e, n * BLOCK_N, k * BLOCK_K + HALF])
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["R"])
def _dweight(
    dy, x, out, offsets_ptr, slots_ptr, E, R, N, K, dy_stride, x_stride, TOP_K, FIXED: gl.constexpr
):
    """The arguments are those of grouped_gemm_triton's kernel.

    dy: [rows, N], x: [rows, K]: descriptors, pointers where gathered.
    out: a descriptor of [E, N, K], for boxes of BLOCK_N by BLOCK_K // 2.
    """
    GATHER: gl.constexpr = FIXED.GATHER_DY or FIXED.GATHER_X
    BLOCK_N: gl.constexpr = FIXED.BLOCK_N
    BLOCK_K: gl.constexpr = FIXED.BLOCK_K
    a = stages(out.dtype, FIXED.STAGES, FIXED.BLOCK_R, BLOCK_N)
    b = stages(out.dtype, FIXED.STAGES, FIXED.BLOCK_R, BLOCK_K)
    staging = gl.allocate_shared_memory(
        out.dtype,
        [BLOCK_N, BLOCK_K // 2],
        gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_K // 2], out.dtype),
    )
    full, empty = ring(FIXED.STAGES, 2 if GATHER else 1)
    n_tiles, k_tiles = gl.cdiv(N, BLOCK_N), gl.cdiv(K, BLOCK_K)
    tiles = E * n_tiles * k_tiles
    work, memory = (offsets_ptr, R, tiles, n_tiles, k_tiles), (a, b, staging, full, empty)
    operands = dy, x, slots_ptr, dy_stride, x_stride, N, K, TOP_K
    gl.warp_specialize(
        [
            (_sum_rows, (out, work, memory, FIXED)),
            (_fill_rows, (operands, work, (a, b, full, empty), FIXED)),
        ],
        [4 if GATHER else 1],
        [GATHERING_WIDE if GATHER else ONE_WARP],
    )


# ---- launches


def gemm(
    grid: int,
    x: torch.Tensor,
    w: torch.Tensor,
    transposed: bool,
    tokens: Tokens,
    outputs: Outputs,
    bias: torch.Tensor | None,
    epilogue: int,
    gate: GateConstants,
    config: dict,
) -> None:
    """Launches `_gemm` on arguments that grouped_gemm_triton has prepared."""
    (offsets, slots, top_k, tiles), (out, pre, _, _) = tokens, outputs
    assert tiles is not None  # they are prepared
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    rows = [k, n] if transposed else [n, k]
    if epilogue and not gate.INTERLEAVED:
        w, rows = w.unflatten(1, (2, out.shape[1])), [2, n // 2, k]
    operands = (
        x if slots is not None else descriptor(x, [m, k]),
        descriptor(w, [1, *rows]),
        descriptor(out, [m, n // 2]),
        None if pre is None else descriptor(pre, [m, n // 2]),
    )
    flags = slots is not None, transposed, epilogue, pre is not None, bias is not None
    launch(
        _gemm,
        (grid,),
        *operands,
        *(out, pre, tiles, slots, bias),
        *(offsets.shape[0], tiles.shape[0] // 3, out.shape[1], x.shape[1], x.stride(0), top_k),
        FIXED=_Fixed(*flags, m, n, k, config["GROUP"], config["num_stages"]),
        GATE=gate,
        num_warps=config["num_warps"],
    )


def _weight_blocks(gathered: str, config: dict) -> tuple[int, int, int]:
    """BLOCK_N, BLOCK_K, BLOCK_R. The narrow one is the gathered operand's: the addresses of 256
    columns need more registers than the warps that load have.
    """
    n, k = config["BLOCK_N"], config["BLOCK_K"]
    narrow, wide = sorted((n, k))
    n, k = {"x": (wide, narrow), "dy": (narrow, wide)}.get(gathered, (n, k))
    return n, k, config["BLOCK_R"]


def weight(
    dy: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    offsets: torch.Tensor,
    slots: torch.Tensor | None,
    rows: int,
    top_k: int,
    gathers: dict[str, bool],
    config: dict,
) -> None:
    """Launches `_dweight` on arguments that grouped_gemm_triton has prepared."""
    n, k, r = _weight_blocks(next((name for name, has in gathers.items() if has), ""), config)
    E, N, K = out.shape
    tiles = E * cdiv(N, n) * cdiv(K, k)
    gathers_dy, gathers_x = gathers["dy"], gathers["x"]
    fixed = _Weights(gathers_dy, gathers_x, n, k, r, config["GROUP"], config["num_stages"])
    operands = (
        dy if gathers_dy else descriptor(dy, [r, n]),
        x if gathers_x else descriptor(x, [r, k]),
        descriptor(out, [1, n, k // 2]),
    )
    grid = (min(multiprocessors(out.device), tiles),)
    numbers = E, rows, N, K, dy.stride(0), x.stride(0), top_k
    constants = {"FIXED": fixed, "num_warps": config["num_warps"]}
    launch(_dweight, grid, *operands, offsets, slots, *numbers, **constants)


# ---- for the compile gate


def _needs(gather: bool) -> dict:
    return {
        **HOPPER,
        "divisible": ("N", "K", "x_stride", "dy_stride"),
        # TMA reads and stores; threads read maps, and 16 bytes of gathered rows.
        "load": 128 if gather else 32,
    }


def weight_spec(about: str, t: str, gathered: str, config: dict) -> KernelSpec:
    n, k, r = _weight_blocks(gathered, config)
    gathers = gathered == "dy", gathered == "x"
    return KernelSpec.of(
        _dweight,
        f"backward weight{f' gathered {gathered}' if gathered else ''} specialized {about}",
        {"offsets": "i32", **({"slots": "i32"} if gathered else {})},
        {"FIXED": _Weights(*gathers, n, k, r, config["GROUP"], config["num_stages"]), **config},
        {
            "dy": f"*{t}" if gathered == "dy" else descriptor_type(t, r, n),
            "x": f"*{t}" if gathered == "x" else descriptor_type(t, r, k),
            "out": descriptor_type(t, 1, n, k // 2),
        },
        **{**_needs(bool(gathered)), "store": 0},
    )


def spec(
    label: str,
    t: str,
    pointers: Mapping[str, str | None],
    constants: dict,
    left: tuple[int, ...],
    right: tuple[int, ...],
) -> KernelSpec:
    """t: the elements of x, w and the results.   left, right: blocks of x and w."""
    result = left[0], constants["BLOCK_N"] // 2
    described = {"w": descriptor_type(t, *right), "out": descriptor_type(t, *result)}
    if not constants["GATHER"]:
        described["x"] = descriptor_type(t, *left)
    else:
        described["x"] = f"*{t}"
    if constants["STORE_PRE"]:
        described["pre"] = descriptor_type(t, *result)
    else:
        pointers, constants = {**pointers, "pre": None}, {**constants, "pre": None}
    given = {**constants, "STAGES": constants["num_stages"]}
    return KernelSpec.of(
        _gemm,
        label,
        pointers,
        {"FIXED": _Fixed(*(given[name] for name in _Fixed._fields)), **constants},
        described,
        **_needs(constants["GATHER"]),
    )
