"""a b^T of MXFP8 or NVFP4 with warp specialization, for compute capability 10.0: the `scaled` of
low_precision_triton.py, which launches it where a configuration says so.

The tensor cores read codes from shared memory, and scales from tensor memory, where their sums are.
A block has four partitions, which wait for each other at mbarriers as those of warp_specialized.py:

    loads (a warp):            wait empty[s], copy a step's codes to stage s: full[s]; every PER
                               steps wait freed[i], copy 16 bytes of each row's scales: arrived[i]
    places (a warpgroup):      wait arrived[i], copy scales to tensor memory: placed[i]
    multiplies (a warp):       wait read[j], placed[i], full[s]; products that end complete
                               empty[s], freed[i] and, with a tile's last, summed[j]
    stores (one or two         wait summed[j], load the sums: read[j], and store them while the
    warpgroups):               next tile is multiplied

Lane l of tensor memory has four bytes of scales of each of rows l, l + 32, l + 64 and l + 96, and
then the next four of each. TMA does not move less than 16 bytes, so thread l loads 16 of each of
these rows, and stores them without an exchange. Scales stay as quantizers write them, by rows.

Tiles of 128 columns have two sums in turn. Two of 256 would leave no tensor memory for scales;
there, all of a sum is in registers before the first columns are stored.

No clusters: 3.6's Gluon has no scaled product of two blocks. A tile of 128 x 256 reads 170 FLOPs a
byte in MXFP8, one of 128 x 128, as `_scaled` has, 128. float32 sums, in the order of `_scaled`.
Deterministic. Not measured on a GPU.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma_scaled,
    tma,
)

from tilewright.kernels.device import multiprocessors
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.warp_specialized import (
    ONE_WARP,
    advance,
    barriers,
    descriptor,
    descriptor_type,
    grouped,
    ring,
    stages,
    store_box,
    tma_load,
)

_memory = blackwell.tensor_memory_descriptor
# Triton 3.6 has it by its second name.
_found = (getattr(_memory, name, None) for name in ("reinterpret", "_reinterpret"))
reinterpret = next(filter(None, _found))

_ROWS = gl.constexpr(128)  # of a tile, as many as the tensor cores' memory has
_STEP = 128  # summed bytes of codes of a tile: those of a swizzle
_SCALES = gl.constexpr(16)  # bytes of a row's scales, the fewest that TMA moves
_SCALES_LAYOUT = gl.constexpr(TensorMemoryScalesLayout())
# Registers per thread of the warpgroup that places scales: those of 256 + 128 rows.
_PLACING = gl.constexpr(88)


# ---- layouts of registers, as the tensor cores' memory has rows: lane l has row l of each 32


@gluon.constexpr_function
def _a_row_each(columns, warps):
    """Float32 [128, columns]: a thread has a row; with eight warps, half of it."""
    lanes = [[1 << i, 0] for i in range(5)]
    across = [[0, 1 << i] for i in range(columns.bit_length() - 1)]
    own, others = (across, []) if warps == 4 else (across[:-1], across[-1:])
    return gl.DistributedLinearLayout(own, lanes, [[32, 0], [64, 0], *others], [], [128, columns])


@gluon.constexpr_function
def _all_rows_each(rows):
    """Bytes [rows, 16]: each warp has all; a register four of a row, then come other rows."""
    lanes = [[1 << i, 0] for i in range(5)]
    others = [[32 << i, 0] for i in range(rows.bit_length() - 6)]
    registers = [[0, 1], [0, 2], *others, [0, 4], [0, 8]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [rows, 16])


# ---- the kernel


@gluon.jit
def _load(given, memory, barriers, sizes, PER: gl.constexpr, GROUP: gl.constexpr):
    """One warp. Codes and scales past the last read zeros."""
    a_from, b_from, a_scale_from, b_scale_from = given
    a, b, a_scale, b_scale = memory
    full, empty, arrived, _, freed, _, _ = barriers
    m_tiles, n_tiles, rounds = sizes
    stage, phase, slot, turn = 0, 0, 0, 0
    for t in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m, n = grouped(t, m_tiles, n_tiles, GROUP)
        row, column = m * a.shape[1], n * b.shape[1]
        for k in range(rounds):
            here = arrived.index(slot)
            mbarrier.wait(freed.index(slot), turn ^ 1)
            mbarrier.expect(here, a_scale_from.block_type.nbytes + b_scale_from.block_type.nbytes)
            tma_load(a_scale_from, [row, k * _SCALES], here, a_scale.index(slot))
            tma_load(b_scale_from, [column, k * _SCALES], here, b_scale.index(slot))
            slot, turn = advance(slot, turn, a_scale.shape[0])
            for step in range(PER):
                here = full.index(stage)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                mbarrier.expect(here, a_from.block_type.nbytes + b_from.block_type.nbytes)
                at = (k * PER + step) * a.shape[2]
                tma_load(a_from, [row, at], here, a.index(stage))
                tma_load(b_from, [column, at], here, b.index(stage))
                stage, phase = advance(stage, phase, a.shape[0])


@gluon.jit
def _place_rows(tile, to):
    """tile: shared memory [ROWS, 16] of scales.   to: 32-bit columns."""
    ROWS: gl.constexpr = tile.shape[0]
    there = reinterpret(to, tile.dtype, [ROWS, _SCALES], _SCALES_LAYOUT)
    there.store(tile.load(_all_rows_each(ROWS)))


@gluon.jit
def _place(memory, placed_at, barriers, sizes):
    """A warpgroup."""
    _, _, a_scale, b_scale = memory
    a_to, b_to = placed_at
    _, _, arrived, placed, _, _, _ = barriers
    m_tiles, n_tiles, rounds = sizes
    slot, turn = 0, 0
    for _ in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        for _ in range(rounds):
            mbarrier.wait(arrived.index(slot), turn)
            _place_rows(a_scale.index(slot), a_to.index(slot))
            _place_rows(b_scale.index(slot), b_to.index(slot))
            mbarrier.arrive(placed.index(slot))
            slot, turn = advance(slot, turn, a_scale.shape[0])


@gluon.jit
def _of_step(placed_at, step, dtype: gl.constexpr, ROWS: gl.constexpr, PER: gl.constexpr):
    """A step's scales [ROWS, 16 / PER]."""
    SLOTS: gl.constexpr = placed_at.shape[0]
    COLUMNS: gl.constexpr = placed_at.shape[2] // PER
    LAYOUT: gl.constexpr = TensorMemoryLayout([_ROWS, COLUMNS], col_stride=1)
    parts = reinterpret(placed_at, gl.int32, [SLOTS * PER, _ROWS, COLUMNS], LAYOUT)
    return reinterpret(parts.index(step), dtype, [ROWS, _SCALES // PER], _SCALES_LAYOUT)


@gluon.jit
def _multiply(memory, placed_at, accs, barriers, sizes, PER: gl.constexpr):
    """One warp."""
    a, b, a_scale, b_scale = memory
    a_at, b_at = placed_at
    full, empty, _, placed, freed, summed, read = barriers
    m_tiles, n_tiles, rounds = sizes
    FORMAT: gl.constexpr = "e2m1" if PER == 1 else "e4m3"
    stage, phase, slot, turn, which, whose = 0, 0, 0, 0, 0, 0
    for _ in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        mbarrier.wait(read.index(which), whose ^ 1)
        for k in range(rounds):
            mbarrier.wait(placed.index(slot), turn)
            for step in range(PER):
                mbarrier.wait(full.index(stage), phase)
                tcgen05_mma_scaled(
                    a.index(stage),
                    b.index(stage).permute((1, 0)),
                    accs.index(which),
                    _of_step(a_at, slot * PER + step, a_scale.dtype, a.shape[1], PER),
                    _of_step(b_at, slot * PER + step, b_scale.dtype, b.shape[1], PER),
                    FORMAT,
                    FORMAT,
                    use_acc=(k > 0) | (step > 0),
                    mbarriers=[empty.index(stage)],
                )
                stage, phase = advance(stage, phase, a.shape[0])
            tcgen05_commit(freed.index(slot))
            slot, turn = advance(slot, turn, a_scale.shape[0])
        tcgen05_commit(summed.index(which))
        which, whose = advance(which, whose, accs.shape[0])


@gluon.jit
def _store(given, accs, staging, barriers, sizes, GROUP: gl.constexpr):
    """One or two warpgroups: all of a sum is in registers before its first columns are stored."""
    out, a_total_ptr, b_total_ptr, bias_ptr, N = given
    _, _, _, _, _, summed, read = barriers
    m_tiles, n_tiles, _ = sizes
    BLOCK_N: gl.constexpr = accs.shape[2]
    COLUMNS: gl.constexpr = staging.shape[1]
    LAYOUT: gl.constexpr = _a_row_each(COLUMNS, gl.num_warps())
    j = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    which, whose = 0, 0
    for t in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m, n = grouped(t, m_tiles, n_tiles, GROUP)
        mbarrier.wait(summed.index(which), whose)
        acc, parts = accs.index(which), ()
        for p in gl.static_range(BLOCK_N // COLUMNS):
            parts += (acc.slice(p * COLUMNS, COLUMNS).load(LAYOUT),)
        mbarrier.arrive(read.index(which))
        which, whose = advance(which, whose, accs.shape[0])
        for p in gl.static_range(BLOCK_N // COLUMNS):
            tile, column = parts[p], n * BLOCK_N + p * COLUMNS
            if a_total_ptr is not None:
                tile = tile * gl.load(a_total_ptr) * gl.load(b_total_ptr)
            if bias_ptr is not None:
                bias = gl.load(bias_ptr + column + j, mask=column + j < N, other=0.0)
                tile += bias.to(gl.float32)[None, :]
            store_box(tile.to(staging.dtype), staging, out, [m * _ROWS, column])
    tma.store_wait(0)


@gluon.jit
def _scaled(
    a_from,
    b_from,
    a_scale_from,
    b_scale_from,
    out,
    a_total_ptr,
    b_total_ptr,
    bias_ptr,
    M,
    N,
    width,
    BLOCK_N: gl.constexpr,
    PER: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """The arguments are those of low_precision_triton's kernel; a, b, their scales and out are
    descriptors.

    PER: steps that share 16 bytes of scales: 4 in MXFP8, 1 in NVFP4, which has totals.
    """
    gl.static_assert(a_from.block_shape[0] == _ROWS)
    BYTES: gl.constexpr = a_from.block_shape[1]
    memory = (
        stages(a_from.dtype, STAGES, _ROWS, BYTES),
        stages(b_from.dtype, STAGES, BLOCK_N, BYTES),
        stages(a_scale_from.dtype, SLOTS, _ROWS, _SCALES),
        stages(b_scale_from.dtype, SLOTS, BLOCK_N, _SCALES),
    )
    staging = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    SUMS: gl.constexpr = 256 // BLOCK_N
    SUM: gl.constexpr = TensorMemoryLayout([_ROWS, BLOCK_N], col_stride=1)
    accs = allocate_tensor_memory(gl.float32, [SUMS, _ROWS, BLOCK_N], SUM)
    # 16 bytes of 128 rows are 16 columns, of four bytes of a row in each lane.
    A: gl.constexpr = TensorMemoryLayout([_ROWS, 16], col_stride=1)
    B: gl.constexpr = TensorMemoryLayout([_ROWS, BLOCK_N // 8], col_stride=1)
    placed_at = (
        allocate_tensor_memory(gl.int32, [SLOTS, _ROWS, 16], A),
        allocate_tensor_memory(gl.int32, [SLOTS, _ROWS, BLOCK_N // 8], B),
    )
    full, empty = ring(STAGES, 1)
    arrived, freed = ring(SLOTS, 1)
    placed, summed = barriers(SLOTS, 1), barriers(SUMS, 1)
    read = barriers(SUMS, 1)
    found = (full, empty, arrived, placed, freed, summed, read)
    sizes = gl.cdiv(M, _ROWS), gl.cdiv(N, BLOCK_N), gl.cdiv(width, BYTES * PER)
    given = (out, a_total_ptr, b_total_ptr, bias_ptr, N)
    factors = (a_from, b_from, a_scale_from, b_scale_from)
    gl.warp_specialize(
        [
            (_store, (given, accs, staging, found, sizes, GROUP)),
            (_place, (memory, placed_at, found, sizes)),
            (_load, (factors, memory, found, sizes, PER, GROUP)),
            (_multiply, (memory, placed_at, accs, found, sizes, PER)),
        ],
        [4, 1, 1],
        [_PLACING, ONE_WARP, ONE_WARP],
    )


# ---- launches


def fits(a: torch.Tensor, a_scale: torch.Tensor, N: int, itemsize: int) -> bool:
    """Whether TMA reads rows of codes and of scales, and stores rows of N. Then steps are a
    multiple of PER.
    """
    return a.shape[1] % 16 == 0 and a_scale.shape[1] % 16 == 0 and N * itemsize % 16 == 0


def _piece(itemsize: int) -> int:
    """Columns of a result that are stored at a time: those of a swizzle."""
    return 128 // itemsize


def _constants(e2m1: bool, config: dict) -> dict:
    n = config["BLOCK_N"]
    return {
        "BLOCK_N": n,
        "PER": 1 if e2m1 else 4,
        "GROUP": config["GROUP"],
        "STAGES": config["num_stages"],
        # Of a step each, as many as shared memory leaves; of four, one beside that in use.
        "SLOTS": (3 if n == 256 else 4) if e2m1 else 2,
        "num_warps": config["num_warps"],
    }


def scaled(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_total: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_total: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: dict,
) -> None:
    """Writes `out`: the arguments are those of low_precision_triton.scaled. `fits` says which."""
    (M, width), N, n = a.shape, b.shape[0], config["BLOCK_N"]
    if a_total is None:
        a, b = a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn)
    else:
        a_scale, b_scale = (s.view(torch.float8_e4m3fn) for s in (a_scale, b_scale))
    launch(
        _scaled,
        (min(multiprocessors(a.device), cdiv(M, 128) * cdiv(N, n)),),
        descriptor(a, [128, _STEP]),
        descriptor(b, [n, _STEP]),
        descriptor(a_scale, [128, _SCALES.value]),
        descriptor(b_scale, [n, _SCALES.value]),
        descriptor(out, [128, _piece(out.element_size())]),
        a_total,
        b_total,
        bias,
        M,
        N,
        width,
        **_constants(a_total is not None, config),
    )


def spec(label: str, e2m1: bool, out: str, config: dict) -> KernelSpec:
    """As `scaled` launches it, with a bias of 16 bits."""
    n, itemsize = config["BLOCK_N"], {"bf16": 2, "fp32": 4}[out]
    totals = {"a_total": "fp32", "b_total": "fp32"} if e2m1 else {}
    codes, scales = ("u8", "fp8e4nv") if e2m1 else ("fp8e4nv", "u8")
    return KernelSpec.of(
        _scaled,
        label,
        {**totals, **({"bias": out} if out == "bf16" else {})},
        _constants(e2m1, config),
        {
            "a_from": descriptor_type(codes, 128, _STEP),
            "b_from": descriptor_type(codes, n, _STEP),
            "a_scale_from": descriptor_type(scales, 128, _SCALES.value),
            "b_scale_from": descriptor_type(scales, n, _SCALES.value),
            "out": descriptor_type(out, 128, _piece(itemsize)),
        },
        divisible=("M", "N", "width"),
        store=0,
        min_arch=100,
        max_arch=109,
        uses={100: ("tcgen05", "block_scale", "tma")},
    )
