"""The grouped GEMM of grouped_gemm_triton.py with warp specialization, for sm_90: its `_gemm` with
the epilogues PLAIN and SWIGLU, for operands that TMA reads. Tiles, epilogues and results are those
of that module, which launches this one where a configuration says so.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

from tilewright.kernels.launch import launch
from tilewright.kernels.moe.grouped_gemm_triton import gated
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.warp_specialized import (
    GATHERING,
    ONE_WARP,
    accumulate,
    advance,
    descriptor,
    descriptor_type,
    halves,
    ring,
    stages,
    store_tile,
    thread_load,
    tma_load,
)

# Gathered stages that the loading warps have issued and not yet announced: cp.async completes in
# order, so waiting for an older one leaves these in flight.
_BEHIND = gl.constexpr(2)


@gluon.jit
def _tile(t, tiles_ptr, capacity, m_tiles, n_tiles, E, K, BLOCK_K: gl.constexpr, GROUP: gl.constexpr):
    """Of tile t: its expert, first row, end of rows, tile of columns, and steps along K, none in
    the tail. Blocks that run together share GROUP tiles of rows and a few of columns.
    """
    first = t // (GROUP * n_tiles) * GROUP
    height = gl.minimum(m_tiles - first, GROUP)
    inside = t - first * n_tiles
    m = first + inside % height
    e = gl.load(tiles_ptr + m)
    row = gl.load(tiles_ptr + capacity + m)
    end = gl.load(tiles_ptr + 2 * capacity + m)
    steps = gl.where((e < E) & (row < end), gl.cdiv(K, BLOCK_K), 0)
    return e, row, end, inside // height, steps


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
def _load(x, w, tiles_ptr, capacity, n_tiles, E, K, a, b, full, empty,
          TRANSPOSED: gl.constexpr, HALVES: gl.constexpr, GROUP: gl.constexpr):
    """One warp: both operands by TMA."""
    BLOCK_K: gl.constexpr = a.shape[2]
    m_tiles = gl.load(tiles_ptr + 3 * capacity)
    stage, phase = 0, 0
    for t in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        e, row, _, n, steps = _tile(t, tiles_ptr, capacity, m_tiles, n_tiles, E, K, BLOCK_K, GROUP)
        for step in range(steps):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), x.block_type.nbytes + w.block_type.nbytes)
            tma_load(x, [row, step * BLOCK_K], full.index(stage), a.index(stage))
            _weight(w, e, n, step * BLOCK_K, full.index(stage), b.index(stage), TRANSPOSED, HALVES)
            stage, phase = advance(stage, phase, a.shape[0])


@gluon.jit
def _announce(full, issued):
    """Says that the oldest of the gathered stages that were not announced yet is written."""
    STAGES: gl.constexpr = full.shape[0]
    fence_async_shared()  # cp.async writes as threads do, wgmma reads by the async proxy
    mbarrier.arrive(full.index((issued + STAGES - 1 - _BEHIND) % STAGES), pred=issued > _BEHIND)


@gluon.jit
def _gather(x_ptr, slots_ptr, x_stride, TOP_K, w, tiles_ptr, capacity, n_tiles, E, K, a, b, full,
            empty, TRANSPOSED: gl.constexpr, HALVES: gl.constexpr, GROUP: gl.constexpr):
    """A warpgroup: row r of the left operand is row slots[r] // TOP_K of x."""
    BLOCK_M: gl.constexpr = a.shape[1]
    BLOCK_K: gl.constexpr = a.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    m_tiles = gl.load(tiles_ptr + 3 * capacity)
    ks = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    i = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    stage, phase, issued = 0, 0, 0
    for t in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        e, row, end, n, steps = _tile(
            t, tiles_ptr, capacity, m_tiles, n_tiles, E, K, BLOCK_K, GROUP
        )
        live = row + i < end
        slot = gl.load(slots_ptr + row + i, mask=live, other=0)
        at = x_ptr + (slot // TOP_K).to(gl.int64)[:, None] * x_stride + ks[None, :]
        for step in range(steps):
            k = step * BLOCK_K
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), w.block_type.nbytes)
            _weight(w, e, n, k, full.index(stage), b.index(stage), TRANSPOSED, HALVES)
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
def _multiply(out, pre, out_ptr, pre_ptr, bias_ptr, tiles_ptr, capacity, n_tiles, E, N, K, a, b,
              staging, full, empty, TRANSPOSED: gl.constexpr, EPILOGUE: gl.constexpr,
              STORE_PRE: gl.constexpr, BIAS: gl.constexpr, INTERLEAVED: gl.constexpr,
              ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
              UP_LIMIT: gl.constexpr, OFFSET: gl.constexpr, GROUP: gl.constexpr):
    """Two warpgroups."""
    BLOCK_M: gl.constexpr = a.shape[1]
    BLOCK_K: gl.constexpr = a.shape[2]
    BLOCK_N: gl.constexpr = b.shape[2] if TRANSPOSED else b.shape[1]
    HALF: gl.constexpr = BLOCK_N // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    dtype: gl.constexpr = staging.dtype
    m_tiles = gl.load(tiles_ptr + 3 * capacity)
    stage, phase = 0, 0
    for t in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        e, row, end, n, steps = _tile(
            t, tiles_ptr, capacity, m_tiles, n_tiles, E, K, BLOCK_K, GROUP
        )
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
        acc, stage, phase = accumulate(acc, steps, a, b, full, empty, stage, phase, TRANSPOSED)
        if BIAS:
            j = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
            if EPILOGUE == 0:
                column, columns = n * BLOCK_N + j, N
            elif INTERLEAVED:
                column, columns = n * BLOCK_N + j, 2 * N
            else:  # column j: gate n HALF + j, or up n HALF + j - HALF
                column = n * HALF + j % HALF
                column, columns = gl.where(column < N, column + j // HALF * N, 2 * N), 2 * N
            bias = gl.load(
                bias_ptr + e.to(gl.int64) * columns + column,
                mask=(column < columns) & (e < E),
                other=0.0,
            )
            acc += bias.to(gl.float32)[None, :]
        if EPILOGUE == 0:
            left, right = halves(acc)
            column = n * BLOCK_N
            store_tile(left.to(dtype), staging, out, out_ptr, row, end, column, N, N)
            store_tile(right.to(dtype), staging, out, out_ptr, row, end, column + HALF, N, N)
        else:
            if INTERLEAVED:
                acc = acc.to(dtype)
                if STORE_PRE:
                    left, right = halves(acc)
                    column = n * BLOCK_N
                    store_tile(left, staging, pre, pre_ptr, row, end, column, 2 * N, 2 * N)
                    store_tile(right, staging, pre, pre_ptr, row, end, column + HALF, 2 * N, 2 * N)
                gate, up = acc.reshape([BLOCK_M, HALF, 2]).split()
            else:
                gate, up = halves(acc)
                gate, up = gate.to(dtype), up.to(dtype)
                if STORE_PRE:
                    column = n * HALF
                    store_tile(gate, staging, pre, pre_ptr, row, end, column, N, 2 * N)
                    store_tile(up, staging, pre, pre_ptr, row, end, N + column, 2 * N, 2 * N)
            h, _, v, _ = gated(
                gate.to(gl.float32), up.to(gl.float32), ACTIVATION, ALPHA, LIMIT, UP_LIMIT, OFFSET
            )
            store_tile((h * v).to(dtype), staging, out, out_ptr, row, end, n * HALF, N, N)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["capacity"])
def _gemm(x, w, out, pre, out_ptr, pre_ptr, tiles_ptr, slots_ptr, bias_ptr, E, capacity, N, K,
          x_stride, TOP_K, GATHER: gl.constexpr, TRANSPOSED: gl.constexpr, EPILOGUE: gl.constexpr,
          STORE_PRE: gl.constexpr, BIAS: gl.constexpr, INTERLEAVED: gl.constexpr,
          ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
          UP_LIMIT: gl.constexpr, OFFSET: gl.constexpr, BLOCK_M: gl.constexpr,
          BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """The arguments are those of grouped_gemm_triton's kernel.

    x: [rows, K], a descriptor, or with GATHER a pointer.
    w: a descriptor of [E, N, K], TRANSPOSED [E, K, N], or of halves [E, 2, N, K].
    out, pre: descriptors of [rows, N] and [rows, 2 N], for boxes of BLOCK_M by BLOCK_N // 2.
    """
    HALVES: gl.constexpr = EPILOGUE == 1 and not INTERLEAVED
    dtype: gl.constexpr = out.dtype
    ROWS: gl.constexpr = BLOCK_K if TRANSPOSED else BLOCK_N
    COLUMNS: gl.constexpr = BLOCK_N if TRANSPOSED else BLOCK_K
    a = stages(dtype, STAGES, BLOCK_M, BLOCK_K)
    b = stages(dtype, STAGES, ROWS, COLUMNS)
    staging = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N // 2], out.layout)
    # Gathered rows are announced by a second arrival.
    full, empty = ring(STAGES, 2 if GATHER else 1)
    n_tiles = gl.cdiv(N, BLOCK_N // 2 if EPILOGUE == 1 else BLOCK_N)
    # The arguments stand here twice, since in a variable Triton makes tensors of constexprs.
    if GATHER:
        gl.warp_specialize(
            [
                (_multiply, (
                    out, pre, out_ptr, pre_ptr, bias_ptr, tiles_ptr, capacity, n_tiles, E, N, K, a,
                    b, staging, full, empty, TRANSPOSED, EPILOGUE, STORE_PRE, BIAS, INTERLEAVED,
                    ACTIVATION, ALPHA, LIMIT, UP_LIMIT, OFFSET, GROUP,
                )),
                (_gather, (
                    x, slots_ptr, x_stride, TOP_K, w, tiles_ptr, capacity, n_tiles, E, K, a, b,
                    full, empty, TRANSPOSED, HALVES, GROUP,
                )),
            ],
            [4],
            [GATHERING],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    out, pre, out_ptr, pre_ptr, bias_ptr, tiles_ptr, capacity, n_tiles, E, N, K, a,
                    b, staging, full, empty, TRANSPOSED, EPILOGUE, STORE_PRE, BIAS, INTERLEAVED,
                    ACTIVATION, ALPHA, LIMIT, UP_LIMIT, OFFSET, GROUP,
                )),
                (_load, (
                    x, w, tiles_ptr, capacity, n_tiles, E, K, a, b, full, empty, TRANSPOSED,
                    HALVES, GROUP,
                )),
            ],
            [1],
            [ONE_WARP],
        )


# ---- the launch


def gemm(
    grid: int,
    x: torch.Tensor,
    w: torch.Tensor,
    transposed: bool,
    tiles: torch.Tensor,
    slots: torch.Tensor | None,
    top_k: int,
    out: torch.Tensor,
    pre: torch.Tensor | None,
    bias: torch.Tensor | None,
    experts: int,
    epilogue: int,
    gate: dict,
    config: dict,
) -> None:
    """Launches `_gemm` on arguments that grouped_gemm_triton has prepared."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    rows = [k, n] if transposed else [n, k]
    if epilogue and not gate["INTERLEAVED"]:
        w, rows = w.unflatten(1, (2, out.shape[1])), [2, n // 2, k]
    launch(
        _gemm,
        (grid,),
        x if slots is not None else descriptor(x, [m, k]),
        descriptor(w, [1, *rows]),
        descriptor(out, [m, n // 2]),
        None if pre is None else descriptor(pre, [m, n // 2]),
        out,
        pre,
        tiles,
        slots,
        bias,
        experts,
        tiles.shape[0] // 3,
        out.shape[1],
        x.shape[1],
        x.stride(0),
        top_k,
        GATHER=slots is not None,
        TRANSPOSED=transposed,
        EPILOGUE=epilogue,
        STORE_PRE=pre is not None,
        BIAS=bias is not None,
        **gate,
        BLOCK_M=m,
        BLOCK_N=n,
        BLOCK_K=k,
        GROUP=config["GROUP"],
        STAGES=config["num_stages"],
        num_warps=config["num_warps"],
    )


# ---- for the compile gate


def spec(
    label: str,
    pointers: dict[str, str | None],
    constants: dict,
    left: tuple[int, ...],
    right: tuple[int, ...],
) -> KernelSpec:
    """left, right: blocks of x and w."""
    t, result = pointers["*"], (left[0], constants["BLOCK_N"] // 2)
    described = {"w": descriptor_type(t, *right), "out": descriptor_type(t, *result)}
    if not constants["GATHER"]:
        described["x"] = descriptor_type(t, *left)
    else:
        described["x"] = f"*{t}"
    if constants["STORE_PRE"]:
        described["pre"] = descriptor_type(t, *result)
    else:
        pointers, constants = {**pointers, "pre": None}, {**constants, "pre": None}
    return KernelSpec.of(
        _gemm,
        label,
        pointers,
        {**constants, "STAGES": constants["num_stages"]},
        described,
        min_arch=90,
        max_arch=99,
        uses={90: ("wgmma", "tma")},
        divisible=("N", "K", "x_stride"),
        # TMA reads; threads read maps, and 16 bytes of gathered rows.
        load=128 if constants["GATHER"] else 32,
    )
