"""The parts of a persistent, warp-specialized matrix product for sm_90, in Gluon.

A block has two partitions. The loading one fills a ring of stages in shared memory; the other, two
warpgroups, multiplies the stages' operands and stores the result:

    loads:        wait empty[s], expect bytes on full[s], copy both operands to stage s
    multiplies:   wait full[s], wgmma on stage s, wait for the product before, arrive empty[s - 1]

full[s] completes when stage s is written, empty[s] when it is free, each once per turn of the ring;
whoever waits keeps the parity of the turn. A barrier in its first phase lets a wait for the phase
before pass, so that the first turn finds all stages empty.

A tile's result goes through shared memory, from which TMA stores it while the next tile is
multiplied. TMA cannot leave out rows: the last tile of an expert, which others follow, is stored
from there by threads.

No clusters. A tile of 128 x 256 reads 2 (128 + 256) bytes from L2 for 2 * 128 * 256 FLOPs of a
column of 16 bits, 85 FLOPs a byte. If two blocks share 256 columns by multicast, each reads
2 (128 + 128) bytes, 128 FLOPs a byte. An H100 did 699 TFLOP/s without (docs/predicted_measured.md),
for which L2 gives 8.3 TB/s, and a large product 790: 11 % to gain at most, if L2 is the limit.
Gluon has multicast and barriers of clusters from Triton 3.9 on; 3.6, which GPUs are found with, has
none, so that such a kernel would be a second one beside these. To be decided again where 3.9 runs
on a GPU and a profile shows waits for `full`.

float32 sums. Deterministic. What Triton 3.6 and 3.9 call by different names has one here.
"""

from __future__ import annotations

from typing import Any

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def _named(of: object, name: str, before: str) -> Any:
    """The attribute `name`, which is called `before` up to Triton 3.6."""
    return getattr(of, name, None) or getattr(of, before)


tma_load = _named(tma, "async_load", "async_copy_global_to_shared")
tma_store = _named(tma, "async_store", "async_copy_shared_to_global")
thread_load = _named(async_copy, "async_load", "async_copy_global_to_shared")
thread_barrier = _named(gl, "barrier", "thread_barrier")
reinterpret = _named(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")


@gl._core.builtin
def tma_add(to, corner, staging, _semantic=None):
    """Adds a tile in shared memory to a tensor at a corner, as `tma_store` stores it. Only from
    Triton 3.9 on, Gluon has a name for it.
    """
    corner = _semantic._convert_to_ir_values(corner, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, to.handle, corner, staging.handle)


# Registers per thread of the loading partition. A block of twelve warps may have 168 per thread;
# what loads do not take, the warpgroups that multiply get: 240, 224, 208.
ONE_WARP, GATHERING, GATHERING_WIDE = gl.constexpr(24), gl.constexpr(56), gl.constexpr(88)
MULTIPLYING = gl.constexpr(240)  # of a warpgroup that multiplies beside one loading warp


# ---- tensor descriptors, made by the host

# By the names that Triton and PyTorch give them.
_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), gl.bfloat16),
    **dict.fromkeys(("fp16", "float16"), gl.float16),
    **dict.fromkeys(("fp8e4nv", "float8_e4m3fn"), gl.float8e4nv),
    **dict.fromkeys(("fp32", "float32"), gl.float32),
    **dict.fromkeys(("u8", "uint8"), gl.uint8),
}


def _layout(block: list[int], dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """A layout with the widest swizzle that the block's rows have."""
    default_for: Any = gl.NVMMASharedLayout.get_default_for  # callable, which its type denies
    return default_for(block, dtype)


def descriptor(t: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """The TMA descriptor of t, whose rows must be contiguous and at multiples of 16 bytes."""
    dtype = _DTYPES[str(t.dtype).removeprefix("torch.")]
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block, _layout(block, dtype))


def descriptor_type(dtype: str, *block: int) -> str:
    """What a compilation takes for a `descriptor` of this dtype, by Triton's name."""
    return f"tensordesc<{dtype}{list(block)},{_layout(list(block), _DTYPES[dtype])!r}>"


# What the compile gate holds each such kernel to.
HOPPER = {"min_arch": 90, "max_arch": 99, "uses": {90: ("wgmma", "tma")}}


# ---- the ring


@gluon.jit
def stages(dtype: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory [STAGES, ROWS, COLUMNS] of an operand."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], layout)


@gluon.jit
def barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """mbarriers, each with ARRIVALS per phase."""
    mbarriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(mbarriers.index(s), count=ARRIVALS)
    return mbarriers


@gluon.jit
def ring(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """(full, empty): mbarriers of the stages. ARRIVALS: on full, per turn."""
    return barriers(STAGES, ARRIVALS), barriers(STAGES, 1)


@gluon.jit
def grouped(t, m_tiles, n_tiles, GROUP: gl.constexpr):
    """Tile t's row and column. Blocks that run together share GROUP tiles of rows and a few of
    columns, which L2 then holds.
    """
    first = t // (GROUP * n_tiles) * GROUP
    height = gl.minimum(m_tiles - first, GROUP)
    inside = t - first * n_tiles
    return first + inside % height, inside // height


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The stage that follows, and the parity of its turn."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def previous(stage, STAGES: gl.constexpr):
    """Computed, and not kept in a variable: where two names have one value before a loop, Triton
    does not carry the one that the loop only sets to the other.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def multiply(a, b, acc, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr):
    """Begins acc + a b. a: [M, K], or A_TURNED [K, M].   b: [N, K], or B_TURNED [K, N]."""
    if A_TURNED:
        a = a.permute((1, 0))
    if not B_TURNED:
        b = b.permute((1, 0))
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def accumulate(
    acc, steps, a, b, full, empty, stage, phase, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr
):
    """Adds `steps` stages' products a b to acc [M, N]. One product is always in flight, so that
    the tensor cores do not wait for the barriers between two.

    a: [STAGES, M, K], or A_TURNED [STAGES, K, M].   b: [STAGES, N, K], or B_TURNED [STAGES, K, N].
    """
    STAGES: gl.constexpr = a.shape[0]
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        acc = multiply(a.index(stage), b.index(stage), acc, A_TURNED, B_TURNED)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(previous(stage, STAGES)), pred=step > 0)
        stage, phase = advance(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(previous(stage, STAGES)), pred=steps > 0)
    return acc, stage, phase


@gluon.jit
def clear_rows(tile, live):
    """Sets the rows of a tile of 16-bit elements in shared memory from `live` on to zero. The
    swizzle permutes 16 bytes of up to 128 of a row, all of which are set here, one row after the
    other: warps that load have few registers.
    """
    ROWS: gl.constexpr = tile.shape[0]
    WORDS: gl.constexpr = min(tile.shape[1], 64) // 2
    ACROSS: gl.constexpr = tile.shape[1] // 2 // WORDS
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines = reinterpret(tile, gl.int32, [ACROSS * ROWS, WORDS], PLAIN)
    zeros = gl.zeros([WORDS], gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for row in range(gl.maximum(live, 0), ROWS):
        for across in range(ACROSS):
            lines.index(across * ROWS + row).store(zeros)


@gluon.jit
def load_rows(x, corner, to, full, live, alone, cleared, PACKED: gl.constexpr):
    """Loads a box of rows, announced on `full`. With PACKED, rows from `live` on are another
    document's, and set to zero: 0 times their NaN would be NaN.

    alone: an mbarrier for such boxes.   cleared: how many there were; returned with this one.
    """
    here = to.reshape(x.block_shape)
    if PACKED and live < to.shape[0]:
        mbarrier.expect(alone, x.block_type.nbytes)
        tma_load(x, corner, alone, here)
        mbarrier.wait(alone, cleared & 1)
        clear_rows(to, live)
        fence_async_shared()
        mbarrier.arrive(full)
        cleared += 1
    else:
        mbarrier.expect(full, x.block_type.nbytes)
        tma_load(x, corner, full, here)
    return cleared


# ---- results


@gluon.jit
def halves(t):
    """The left and the right half of a tile, in registers."""
    ROWS: gl.constexpr = t.shape[0]
    COLUMNS: gl.constexpr = t.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 16])
    left, right = t.reshape([ROWS, 2, COLUMNS]).permute((0, 2, 1)).split()
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    return left, gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def stage_result(tile, staging):
    """Writes a tile to shared memory, for TMA, when it has read what was there."""
    tma.store_wait(0)
    thread_barrier()
    staging.store(tile)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def store_box(tile, staging, to, corner):
    """Stores a tile at a corner of a tensor [.., ROWS, COLUMNS], whose descriptor leaves out what
    is not in it; TMA may still read it from `staging`, shared memory of the tile's shape, on
    return.
    """
    stage_result(tile, staging)
    tma_store(to, corner, staging.reshape(to.block_shape))


@gluon.jit
def store_tile(tile, staging, to, to_ptr, row, end, column, width, stride):
    """Stores a tile at (row, column) of a matrix, without the rows from `end` on and the columns
    from `width` on; TMA may still read it from `staging` on return.

    staging: shared memory of the tile's shape.   to: descriptor of the matrix, with its rows of
        `stride` elements, all of which are its columns.   width: a multiple of 8 elements.
    """
    ROWS: gl.constexpr = staging.shape[0]
    COLUMNS: gl.constexpr = staging.shape[1]
    stage_result(tile, staging)
    # The descriptor's last column is the matrix's, not this part's.
    if (row + ROWS <= end) & (column + COLUMNS <= width):
        tma_store(to, [row, column], staging)
    else:
        WIDE: gl.constexpr = gl.BlockedLayout(
            [1, 8], [32 * 8 // COLUMNS, COLUMNS // 8], [gl.num_warps(), 1], [1, 0]
        )
        r = row + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
        c = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, WIDE))
        at = to_ptr + r.to(gl.int64)[:, None] * stride + c[None, :]
        gl.store(at, staging.load(WIDE), mask=(r < end)[:, None] & (c < width)[None, :])
