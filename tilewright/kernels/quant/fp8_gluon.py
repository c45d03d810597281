"""x w^T of block-scaled FP8 with warp specialization, for sm_90: the `fp8` of
quantized_linear_triton.py, which launches it where a configuration says so.

Tensor cores sum FP8 with few bits, so a sum of 128 columns is scaled and added in float32. A
warpgroup has two such sums: the tensor cores make one while it adds the other, and the other
warpgroup's while it adds both.
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
    ONE_WARP,
    advance,
    descriptor,
    descriptor_type,
    grouped,
    ring,
    stages,
    store_box,
    tma_load,
)

_STEP = 128  # summed columns of a tile: those of one scale


@gluon.jit
def _load(x, w, m_tiles, n_tiles, steps, a, b, full, empty, GROUP: gl.constexpr):
    """One warp. Steps past the last column read zeros."""
    stage, phase = 0, 0
    for t in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m, n = grouped(t, m_tiles, n_tiles, GROUP)
        for step in range(steps):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), x.block_type.nbytes + w.block_type.nbytes)
            k = step * a.shape[2]
            tma_load(x, [m * a.shape[1], k], full.index(stage), a.index(stage))
            tma_load(w, [n * b.shape[1], k], full.index(stage), b.index(stage))
            stage, phase = advance(stage, phase, a.shape[0])


@gluon.jit
def _begin(part, a, b, full, stage, phase):
    """Begins a stage's product, in the registers of `part`."""
    mbarrier.wait(full.index(stage), phase)
    right = b.index(stage).permute((1, 0))
    return warpgroup_mma(a.index(stage), right, part, use_acc=False, is_async=True)


@gluon.jit
def _multiply(
    out,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    T,
    N,
    across,
    m_tiles,
    n_tiles,
    steps,
    a,
    b,
    staging,
    full,
    empty,
    BIAS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Two warpgroups."""
    STAGES: gl.constexpr = a.shape[0]
    M: gl.constexpr = a.shape[1]
    COLUMNS: gl.constexpr = b.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 32])
    i = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    stage, phase = 0, 0
    for t in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m, n = grouped(t, m_tiles, n_tiles, GROUP)
        row = m * M + i
        x_scale_at = x_scale_ptr + row.to(gl.int64) * across
        # One scale for the tile: COLUMNS <= 128.
        w_scale_at = w_scale_ptr + (n * COLUMNS // 128).to(gl.int64) * across
        acc = gl.zeros((M, COLUMNS), gl.float32, LAYOUT)
        even = gl.zeros((M, COLUMNS), gl.float32, LAYOUT)
        odd = gl.zeros((M, COLUMNS), gl.float32, LAYOUT)
        for k in range(0, steps, 2):
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
        if BIAS:
            bias = gl.load(bias_ptr + n * COLUMNS + j, mask=n * COLUMNS + j < N, other=0.0)
            acc += bias.to(gl.float32)[None, :]
        store_box(acc.to(staging.dtype), staging, out, [m * M, n * COLUMNS])
    tma.store_wait(0)


@gluon.jit
def _fp8(
    x,
    w,
    out,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    T,
    N,
    across,
    BIAS: gl.constexpr,
    M: gl.constexpr,
    COLUMNS: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """out [T, N], x [T, K] with scales [T, across], w [N, K] with scales [ceil(N / 128), across]:
    descriptors.
    """
    a = stages(x.dtype, STAGES, M, K)
    b = stages(w.dtype, STAGES, COLUMNS, K)
    staging = gl.allocate_shared_memory(out.dtype, [M, COLUMNS], out.layout)
    full, empty = ring(STAGES, 1)
    m_tiles, n_tiles = gl.cdiv(T, M), gl.cdiv(N, COLUMNS)
    steps = gl.cdiv(across, 2) * 2
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out,
                    x_scale_ptr,
                    w_scale_ptr,
                    bias_ptr,
                    T,
                    N,
                    across,
                    m_tiles,
                    n_tiles,
                    steps,
                    a,
                    b,
                    staging,
                    full,
                    empty,
                    BIAS,
                    GROUP,
                ),
            ),
            (_load, (x, w, m_tiles, n_tiles, steps, a, b, full, empty, GROUP)),
        ],
        [1],
        [ONE_WARP],
    )


def fp8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: dict,
) -> None:
    """As quantized_linear_triton's, where rows of x, w and out, of 16 bits, begin at multiples of
    16 bytes.
    """
    (T, N), m, n = out.shape, config["BLOCK_M"], config["BLOCK_N"]
    launch(
        _fp8,
        (min(multiprocessors(x.device), cdiv(T, m) * cdiv(N, n)),),
        descriptor(x, [m, _STEP]),
        descriptor(w, [n, _STEP]),
        descriptor(out, [m, n]),
        x_scale,
        w_scale,
        bias,
        T,
        N,
        x_scale.shape[1],
        BIAS=bias is not None,
        M=m,
        COLUMNS=n,
        K=_STEP,
        GROUP=config["GROUP"],
        STAGES=config["num_stages"],
        num_warps=config["num_warps"],
    )


def spec(label: str, config: dict) -> KernelSpec:
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    return KernelSpec.of(
        _fp8,
        label,
        {"x_scale": "fp32", "w_scale": "fp32", "bias": "bf16"},
        {
            "BIAS": True,
            "M": m,
            "COLUMNS": n,
            "K": _STEP,
            "STAGES": config["num_stages"],
            **config,
        },
        {
            "x": descriptor_type("fp8e4nv", m, _STEP),
            "w": descriptor_type("fp8e4nv", n, _STEP),
            "out": descriptor_type("bf16", m, n),
        },
        divisible=("N",),
        # Scales, one per row and 128 columns; TMA reads and stores the rest.
        load=32,
        store=0,
        **HOPPER,
    )
