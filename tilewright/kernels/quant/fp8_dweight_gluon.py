"""a b^T of block-scaled FP8 whose factors both have a scale per row and 128 columns, with warp
specialization, for sm_90: gradients of weights, of a layer (`_by_rows` of low_precision_triton.py)
and of each expert (`_weights` of low_precision_grouped_triton.py), where a configuration says
so (specialized.py).

Tensor cores sum FP8 with few bits, so a sum of 128 columns is scaled and added in float32. Each of
two warpgroups has half of a tile's rows and goes at its own pace: one multiplies while the other
scales and adds. Two sums in turn in one warpgroup, as in fp8_gluon.py, and 32 scales of columns
would need more registers than a thread has.

A thread's columns are two of every eight. So scales are transposed first, 1/32 of the codes' bytes:
a warp then reads a step's 128 scales from four lines, and not from 128.
"""

from __future__ import annotations

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
    stages,
    store_box,
    tma_load,
)

_ROWS = gl.constexpr(64)  # of a warpgroup
_STEP = 128  # summed columns of a tile: those of one scale


@gluon.jit
def _tile(t, end_ptr, across, m_tiles, n_tiles, GROUP: gl.constexpr):
    """Tile t's expert, the steps at which the tile begins and ends, and its tiles of rows of a and
    of b.
    """
    e = t // (m_tiles * n_tiles)
    m, n = grouped(t - e * (m_tiles * n_tiles), m_tiles, n_tiles, GROUP)
    if end_ptr is None:
        begin, end = 0, across
    else:
        begin = gl.load(end_ptr + e - 1, mask=e > 0, other=0) // 128
        end = gl.load(end_ptr + e) // 128
    return e, begin, end, m, n


@gluon.jit
def _load(a_from, b_from, sums, ring, GROUP: gl.constexpr):
    """One warp. Columns past the last read zeros."""
    end_ptr, across, tiles, m_tiles, n_tiles = sums
    a, b, full, empty = ring
    stage, phase = 0, 0
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, begin, end, m, n = _tile(t, end_ptr, across, m_tiles, n_tiles, GROUP)
        for step in range(begin, end):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), a_from.block_type.nbytes + b_from.block_type.nbytes)
            k = step * a.shape[2]
            tma_load(a_from, [m * a.shape[1], k], full.index(stage), a.index(stage))
            tma_load(b_from, [n * b.shape[1], k], full.index(stage), b.index(stage))
            stage, phase = advance(stage, phase, a.shape[0])


@gluon.jit
def _multiply(
    out, a_scale_ptr, b_scale_ptr, sums, ring, staging, W: gl.constexpr, GROUP: gl.constexpr
):
    """Warpgroup W of two."""
    end_ptr, across, tiles, m_tiles, n_tiles = sums
    a, b, full, empty = ring
    STAGES: gl.constexpr = a.shape[0]
    M: gl.constexpr = a.shape[1]
    N: gl.constexpr = b.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    i = W * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    a_width, b_width = m_tiles * M, n_tiles * N
    stage, phase = 0, 0
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e, begin, end, m, n = _tile(t, end_ptr, across, m_tiles, n_tiles, GROUP)
        a_at = a_scale_ptr + (m * M + i) + begin.to(gl.int64) * a_width
        b_at = b_scale_ptr + (n * N + j) + begin.to(gl.int64) * b_width
        acc = gl.zeros((_ROWS, N), gl.float32, LAYOUT)
        for _ in range(begin, end):
            # Used after the product.
            a_scale, b_scale = gl.load(a_at), gl.load(b_at)
            a_at += a_width
            b_at += b_width
            mbarrier.wait(full.index(stage), phase)
            left = a.index(stage).slice(W * _ROWS, _ROWS)
            right = b.index(stage).permute((1, 0))
            # Not carried from a loop's last step, which would cost its registers.
            none = gl.zeros((_ROWS, N), gl.float32, LAYOUT)
            part = warpgroup_mma(left, right, none, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(stage))
            acc += part * a_scale[:, None] * b_scale[None, :]
            stage, phase = advance(stage, phase, STAGES)
        here = staging.index(W)
        store_box(acc.to(here.dtype), here, out, [e, m * M + W * _ROWS, n * N])
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["across"])
def _dweight(
    a_from,
    b_from,
    out,
    a_scale_ptr,
    b_scale_ptr,
    end_ptr,
    E,
    M,
    N,
    across,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """out: a descriptor of [E, M, N], for boxes of half of BLOCK_M by BLOCK_N.   a [M, columns],
    b [N, columns]: descriptors, with scales [across, M] and [across, N], M and N rounded up to
    tiles.   end [E]: where each expert's columns end, a multiple of 128; None: all, of one.
    """
    a, b = stages(a_from.dtype, STAGES, BLOCK_M, K), stages(b_from.dtype, STAGES, BLOCK_N, K)
    staging = stages(out.dtype, 2, BLOCK_M // 2, BLOCK_N)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    m_tiles, n_tiles = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    tiles = E * m_tiles * n_tiles
    sums, ring = (end_ptr, across, tiles, m_tiles, n_tiles), (a, b, full, empty)
    gl.warp_specialize(
        [
            (_multiply, (out, a_scale_ptr, b_scale_ptr, sums, ring, staging, 0, GROUP)),
            (_multiply, (out, a_scale_ptr, b_scale_ptr, sums, ring, staging, 1, GROUP)),
            (_load, (a_from, b_from, sums, ring, GROUP)),
        ],
        [4, 1],
        [MULTIPLYING, ONE_WARP],
    )


# ---- launches


def fits(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether TMA reads a [M, columns] and b [N, columns], and stores rows of N of `out`."""
    return a.shape[1] % 16 == 0 and b.shape[0] * out.element_size() % 16 == 0


def _turned(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales [R, across] as [across, R], R rounded up to a multiple of `rows`."""
    R, across = scale.shape
    turned = scale.new_empty(across, cdiv(R, rows) * rows)
    turned[:, :R] = scale.mT
    turned[:, R:] = 0
    return turned


def _stages(config: dict, itemsize: int) -> int:
    """A tile of results in float32 leaves room for one stage less."""
    return config["num_stages"] - (itemsize == 4)


def dweight(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    ends: torch.Tensor | None,
    out: torch.Tensor,
    config: dict,
) -> None:
    """Writes out [E, M, N]. a [M, columns], b [N, columns]: e4m3 bytes, contiguous, with a scale
    for 128 columns; `fits` says which. ends: see `_dweight`. No size is 0.
    """
    a, b = a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn)
    (E, M, N), m, n = out.shape, config["BLOCK_M"], config["BLOCK_N"]
    tiles = E * cdiv(M, m) * cdiv(N, n)
    launch(
        _dweight,
        (min(multiprocessors(a.device), tiles),),
        descriptor(a, [m, _STEP]),
        descriptor(b, [n, _STEP]),
        descriptor(out, [1, m // 2, n]),
        _turned(a_scale, m),
        _turned(b_scale, n),
        ends,
        E,
        M,
        N,
        a_scale.shape[1],
        BLOCK_M=m,
        BLOCK_N=n,
        K=_STEP,
        GROUP=config["GROUP"],
        STAGES=_stages(config, out.element_size()),
        num_warps=config["num_warps"],
    )


def spec(label: str, experts: bool, out: str, config: dict) -> KernelSpec:
    """experts: whether there is one sum for each."""
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    return KernelSpec.of(
        _dweight,
        label,
        {"a_scale": "fp32", "b_scale": "fp32", "end": "i32" if experts else None},
        {**config, "K": _STEP, "STAGES": _stages(config, {"bf16": 2, "fp32": 4}[out])},
        {
            "a_from": descriptor_type("fp8e4nv", m, _STEP),
            "b_from": descriptor_type("fp8e4nv", n, _STEP),
            "out": descriptor_type(out, 1, m // 2, n),
        },
        divisible=("M", "N"),
        # Scales of a thread's rows, and pairs of its columns; TMA reads and stores the rest.
        load=64,
        store=0,
        **HOPPER,
    )
