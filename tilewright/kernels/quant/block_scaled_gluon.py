"""a b^T of MXFP8 or NVFP4 with warp specialization, for compute capability 10.0: the `scaled` of
low_precision_triton.py, and with a weight per expert the `scaled_rows` and `scaled_weights` of
low_precision_grouped_triton.py, where a configuration says so
(specialized.py).

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

A weight per expert is a third dimension of b, of which no tile has rows of two. The gradient of an
expert's weight sums columns that begin anywhere: only rows begin at multiples of 16 bytes for TMA.
A tile without columns is stored as zeros, and no partition waits for another.

Tiles of 128 columns have two sums in turn. Two of 256 would leave no tensor memory for scales;
there, all of a sum is in registers before the first columns are stored.

No clusters: 3.6's Gluon has no scaled product of two blocks. A tile of 128 x 256 reads 170 FLOPs a
byte in MXFP8, one of 128 x 128, as `_scaled` has, 128. float32 sums, in the order of `_scaled`.
Deterministic. Not measured on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewright.kernels.device import multiprocessors
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv
from tilewright.kernels.quant.fp8_gluon import store_rows
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
_reinterprets = (getattr(_memory, name, None) for name in ("reinterpret", "_reinterpret"))
reinterpret = next(filter(None, _reinterprets))

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
def _tile(t, sizes, PER: gl.constexpr, GROUP: gl.constexpr):
    """Locates tile t: its expert, row and column, and the scales of a row that its sum begins and
    ends at, the same ones if there is nothing to sum.
    """
    expert_ptr, end_ptr, E, m_tiles, n_tiles, across, _ = sizes
    CODES: gl.constexpr = 16 if PER == 1 else 32  # that share a scale
    e, begin, end = 0, 0, across
    if end_ptr is not None:
        e = t // (m_tiles * n_tiles)
        begin = gl.load(end_ptr + e - 1, mask=e > 0, other=0) // CODES
        end = gl.load(end_ptr + e) // CODES
    m, n = grouped(t - e * (m_tiles * n_tiles), m_tiles, n_tiles, GROUP)
    if expert_ptr is not None:
        e = gl.load(expert_ptr + m)
        end = gl.where(e < E, across, 0)
    return e, m, n, begin, end


@gluon.jit
def _steps(scales, PER: gl.constexpr):
    """The number of steps of a round, which has 16 scales of a row, or as many as are left."""
    return gl.minimum(gl.cdiv(scales, _SCALES // PER), PER)


@gluon.jit
def _load_box(t, e, row, column, full, to):
    """Loads a box of a descriptor t of rows, or of rows of each expert."""
    if len(t.block_shape) == 2:
        tma_load(t, [row, column], full, to)
    else:
        tma_load(t, [e, row, column], full, to.reshape(t.block_shape))


@gluon.jit
def _load(given, memory, barriers, sizes, PER: gl.constexpr, GROUP: gl.constexpr):
    """One warp. Codes and scales past the last read zeros."""
    a_from, b_from, a_scale_from, b_scale_from = given
    a, b, a_scale, b_scale = memory
    full, empty, arrived, _, freed, _, _ = barriers
    BYTES: gl.constexpr = a.shape[2] * PER // _SCALES  # of the codes of a scale
    stage, phase, slot, turn = 0, 0, 0, 0
    for t in range(gl.program_id(0), sizes[-1], gl.num_programs(0)):
        e, m, n, begin, end = _tile(t, sizes, PER, GROUP)
        row, column = m * a.shape[1], n * b.shape[1]
        for at in range(begin, end, _SCALES):
            here = arrived.index(slot)
            mbarrier.wait(freed.index(slot), turn ^ 1)
            mbarrier.expect(here, a_scale_from.block_type.nbytes + b_scale_from.block_type.nbytes)
            _load_box(a_scale_from, e, row, at, here, a_scale.index(slot))
            _load_box(b_scale_from, e, column, at, here, b_scale.index(slot))
            slot, turn = advance(slot, turn, a_scale.shape[0])
            for step in range(_steps(end - at, PER)):
                here = full.index(stage)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                mbarrier.expect(here, a_from.block_type.nbytes + b_from.block_type.nbytes)
                byte = at * BYTES + step * a.shape[2]
                _load_box(a_from, e, row, byte, here, a.index(stage))
                _load_box(b_from, e, column, byte, here, b.index(stage))
                stage, phase = advance(stage, phase, a.shape[0])


@gluon.jit
def _place_rows(tile, to, HALF: gl.constexpr):
    """tile: shared memory [ROWS, 16] of scales.   to: 32-bit columns.   HALF: the first eight, and
    zeros.
    """
    ROWS: gl.constexpr = tile.shape[0]
    LAYOUT: gl.constexpr = _all_rows_each(ROWS)
    there = reinterpret(to, tile.dtype, [ROWS, _SCALES], _SCALES_LAYOUT)
    scales = tile.load(LAYOUT)
    if HALF:
        j = gl.arange(0, _SCALES, gl.SliceLayout(0, LAYOUT))
        kept = gl.where((j < 8)[None, :], scales.to(gl.uint8, bitcast=True), 0)
        scales = kept.to(gl.uint8).to(tile.dtype, bitcast=True)
    there.store(scales)


@gluon.jit
def _place(memory, placed_at, barriers, sizes, PER: gl.constexpr, GROUP: gl.constexpr):
    """A warpgroup. A step of NVFP4 is of 256 codes, and an expert's last may be of 128: the scales
    of those that follow are another expert's, and 0 here.
    """
    _, _, a_scale, b_scale = memory
    a_to, b_to = placed_at
    _, _, arrived, placed, _, _, _ = barriers
    HALVES: gl.constexpr = PER == 1 and sizes[1] is not None
    slot, turn = 0, 0
    for t in range(gl.program_id(0), sizes[-1], gl.num_programs(0)):
        begin, end = _tile(t, sizes, PER, GROUP)[3:]
        for at in range(begin, end, _SCALES):
            mbarrier.wait(arrived.index(slot), turn)
            if HALVES and end - at < _SCALES:
                _place_rows(a_scale.index(slot), a_to.index(slot), True)
                _place_rows(b_scale.index(slot), b_to.index(slot), True)
            else:
                _place_rows(a_scale.index(slot), a_to.index(slot), False)
                _place_rows(b_scale.index(slot), b_to.index(slot), False)
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
def _multiply(memory, placed_at, accs, barriers, sizes, PER: gl.constexpr, GROUP: gl.constexpr):
    """One warp."""
    a, b, a_scale, b_scale = memory
    a_at, b_at = placed_at
    full, empty, _, placed, freed, summed, read = barriers
    FORMAT: gl.constexpr = "e2m1" if PER == 1 else "e4m3"
    stage, phase, slot, turn, which, whose = 0, 0, 0, 0, 0, 0
    for t in range(gl.program_id(0), sizes[-1], gl.num_programs(0)):
        begin, end = _tile(t, sizes, PER, GROUP)[3:]
        if begin < end:
            mbarrier.wait(read.index(which), whose ^ 1)
            for at in range(begin, end, _SCALES):
                mbarrier.wait(placed.index(slot), turn)
                for step in range(_steps(end - at, PER)):
                    mbarrier.wait(full.index(stage), phase)
                    tcgen05_mma_scaled(
                        a.index(stage),
                        b.index(stage).permute((1, 0)),
                        accs.index(which),
                        _of_step(a_at, slot * PER + step, a_scale.dtype, a.shape[1], PER),
                        _of_step(b_at, slot * PER + step, b_scale.dtype, b.shape[1], PER),
                        FORMAT,
                        FORMAT,
                        use_acc=(at > begin) | (step > 0),
                        mbarriers=[empty.index(stage)],
                    )
                    stage, phase = advance(stage, phase, a.shape[0])
                tcgen05_commit(freed.index(slot))
                slot, turn = advance(slot, turn, a_scale.shape[0])
            tcgen05_commit(summed.index(which))
            which, whose = advance(which, whose, accs.shape[0])


@gluon.jit
def _store_part(tile, given, staging, e, row, column):
    """Stores 128 rows of sums, of as many columns as `staging` has."""
    out, out_ptr, a_total_ptr, b_total_ptr, bias_ptr, row_ptr, N = given
    if a_total_ptr is not None:
        tile = tile * gl.load(a_total_ptr) * gl.load(b_total_ptr)
    if bias_ptr is not None:
        j = column + gl.arange(0, tile.shape[1], gl.SliceLayout(0, tile.type.layout))
        tile += gl.load(bias_ptr + j, mask=j < N, other=0.0).to(gl.float32)[None, :]
    tile = tile.to(staging.dtype)
    if row_ptr is not None:
        store_rows(tile, staging, out, out_ptr, row_ptr + row, column, N)
    elif len(out.block_shape) == 2:
        store_box(tile, staging, out, [row, column])
    else:
        store_box(tile, staging, out, [e, row, column])


@gluon.jit
def _store(given, accs, staging, barriers, sizes, PER: gl.constexpr, GROUP: gl.constexpr):
    """One or two warpgroups: all of a sum is in registers before its first columns are stored."""
    _, _, _, _, _, summed, read = barriers
    BLOCK_N: gl.constexpr = accs.shape[2]
    COLUMNS: gl.constexpr = staging.shape[1]
    LAYOUT: gl.constexpr = _a_row_each(COLUMNS, gl.num_warps())
    which, whose = 0, 0
    for t in range(gl.program_id(0), sizes[-1], gl.num_programs(0)):
        e, m, n, begin, end = _tile(t, sizes, PER, GROUP)
        row, column = m * _ROWS, n * BLOCK_N
        if begin < end:
            mbarrier.wait(summed.index(which), whose)
            acc, parts = accs.index(which), ()
            for p in gl.static_range(BLOCK_N // COLUMNS):
                parts += (acc.slice(p * COLUMNS, COLUMNS).load(LAYOUT),)
            mbarrier.arrive(read.index(which))
            which, whose = advance(which, whose, accs.shape[0])
            for p in gl.static_range(BLOCK_N // COLUMNS):
                _store_part(parts[p], given, staging, e, row, column + p * COLUMNS)
        else:
            for p in range(BLOCK_N // COLUMNS):
                none = gl.zeros([_ROWS, COLUMNS], gl.float32, LAYOUT)
                _store_part(none, given, staging, e, row, column + p * COLUMNS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["across"])
def _scaled(
    a_from,
    b_from,
    a_scale_from,
    b_scale_from,
    out,
    out_ptr,
    a_total_ptr,
    b_total_ptr,
    bias_ptr,
    expert_ptr,
    row_ptr,
    end_ptr,
    E,
    M,
    N,
    across,
    BLOCK_N: gl.constexpr,
    PER: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """The arguments are those of low_precision_triton's kernel; a, b, their scales and out are
    descriptors.

    expert_ptr, row_ptr: as low_precision_grouped_triton's `_scaled_rows` has them, with b
        [E, N, K]; out_ptr: out, where rows do not fill a tile.
    end_ptr: as its `_scaled_weights` has it, with out [E, M, N]. Without these, E is 1.
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
    staging = stages(out.dtype, 1, _ROWS, out.block_shape[-1]).index(0)
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
    mbarriers = (full, empty, arrived, placed, freed, summed, read)
    m_tiles, n_tiles = gl.cdiv(M, _ROWS), gl.cdiv(N, BLOCK_N)
    tiles = m_tiles * n_tiles
    if end_ptr is not None:
        tiles *= E
    sizes = (expert_ptr, end_ptr, E, m_tiles, n_tiles, across, tiles)
    given = (out, out_ptr, a_total_ptr, b_total_ptr, bias_ptr, row_ptr, N)
    factors = (a_from, b_from, a_scale_from, b_scale_from)
    gl.warp_specialize(
        [
            (_store, (given, accs, staging, mbarriers, sizes, PER, GROUP)),
            (_place, (memory, placed_at, mbarriers, sizes, PER, GROUP)),
            (_load, (factors, memory, mbarriers, sizes, PER, GROUP)),
            (_multiply, (memory, placed_at, accs, mbarriers, sizes, PER, GROUP)),
        ],
        [4, 1, 1],
        [_PLACING, ONE_WARP, ONE_WARP],
    )


# ---- launches


class Factor(NamedTuple):
    """Bytes of codes and scales of rows, or of each expert's rows, contiguous.   total: NVFP4's."""

    data: torch.Tensor
    scale: torch.Tensor
    total: torch.Tensor | None


def fits(data: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether TMA reads rows of codes, and stores those of out."""
    return data.shape[-1] % 16 == 0 and out.shape[-1] * out.element_size() % 16 == 0


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
        # As many slots of one step as shared memory leaves; or, with four steps a slot, one beside
        # the slot in use.
        "SLOTS": (3 if n == 256 else 4) if e2m1 else 2,
        "num_warps": config["num_warps"],
    }


def _described(factor: Factor, rows: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Codes and scales for tiles of `rows` rows. Rows of scales that TMA does not read, of 1/32 of
    the codes' bytes or 1/8, are copied to longer ones.
    """
    data, scale, total = factor
    box = [1] * (data.dim() - 2) + [rows]
    if more := -scale.shape[-1] % _SCALES.value:
        scale = torch.nn.functional.pad(scale, (0, more))
    if total is None:
        data = data.view(torch.float8_e4m3fn)
    else:
        scale = scale.view(torch.float8_e4m3fn)
    return descriptor(data, [*box, _STEP]), descriptor(scale, [*box, _SCALES.value])


def scaled(
    a: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    b: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    out: torch.Tensor,
    config: dict,
    *,
    bias: torch.Tensor | None = None,
    expert: torch.Tensor | None = None,
    row: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> None:
    """Writes `out`: as low_precision_triton.scaled; or `scaled_rows` or `scaled_weights` of
    low_precision_grouped_triton.py. `fits` says which.

    a, b: as `Factor`.   expert, row, ends: see `_scaled`.
    """
    a, b = Factor(*a), Factor(*b)
    M, N, n = a.data.shape[0], out.shape[-1], config["BLOCK_N"]
    E = 1 if row is ends is None else len(b.data if ends is None else ends)
    tiles = cdiv(M, 128) * cdiv(N, n) * (1 if ends is None else E)
    (a_from, a_scale_from), (b_from, b_scale_from) = _described(a, 128), _described(b, n)
    box = [1] * (out.dim() - 2) + [128, _piece(out.element_size())]
    launch(
        _scaled,
        (min(multiprocessors(out.device), tiles),),
        a_from,
        b_from,
        a_scale_from,
        b_scale_from,
        descriptor(out, box),
        None if row is None else out,
        a.total,
        b.total,
        bias,
        expert,
        row,
        ends,
        E,
        M,
        N,
        a.scale.shape[-1],
        **_constants(a.total is not None, config),
    )


def spec(label: str, e2m1: bool, out: str, kind: str, config: dict) -> KernelSpec:
    """As `scaled` launches it.   kind: "dense", with a bias of 16 bits; "rows" or "weights" of
    experts.
    """
    n, itemsize = config["BLOCK_N"], {"bf16": 2, "fp32": 4}[out]
    totals = {"a_total": "fp32", "b_total": "fp32"} if e2m1 else {}
    of_kind = {
        "dense": {"bias": out} if out == "bf16" else {},
        "rows": {"expert": "i32", "row": "i32", "out": out},
        "weights": {"end": "i32"},
    }[kind]
    codes, scales = ("u8", "fp8e4nv") if e2m1 else ("fp8e4nv", "u8")
    of_b, of_out = [1] * (kind == "rows"), [1] * (kind == "weights")
    return KernelSpec.of(
        _scaled,
        label,
        {**totals, **of_kind},
        _constants(e2m1, config),
        {
            "a_from": descriptor_type(codes, 128, _STEP),
            "b_from": descriptor_type(codes, *of_b, n, _STEP),
            "a_scale_from": descriptor_type(scales, 128, _SCALES.value),
            "b_scale_from": descriptor_type(scales, *of_b, n, _SCALES.value),
            "out": descriptor_type(out, *of_out, 128, _piece(itemsize)),
        },
        divisible=("M", "N"),
        store=0,
        min_arch=100,
        max_arch=109,
        uses={100: ("tcgen05", "block_scale", "tma")},
    )
