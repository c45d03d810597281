"""RMSNorm and add + RMSNorm in Triton. The definition is tilewright/ops/norm/rmsnorm.py.

T = rows / H, H = heads (1 unless the weight is 2-D), D = columns. Row (t, h) starts at (t * H + h)
* D. A program holds BLOCK_T rows of one head in registers while D <= 16,384 (backward: 8,192);
wider rows are processed in column blocks and read a second time, mostly from L2. Sums and the
weight gradient are fp32. The weight gradient is accumulated per program and reduced by a second
kernel in fixed order: no atomics, the same bits every run on one kind of device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.kernels.device import resident
from tilewright.kernels.launch import launch, warm_up
from tilewright.kernels.launchers import cdiv, next_power_of_2
from tilewright.kernels.math_triton import reciprocal
from tilewright.kernels.norm.operators import (
    no_rows,
    normalize,
    normalize_backward,
    sizes,
)
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import Tunable

# Widest row kept in registers: 16,384 fp32 over 512 threads is 32 registers per operand.
WHOLE_ROW = 16384
# The same in backward, which holds x, dy, w and the sum for dw (and db): at 16,384 columns ptxas
# spills up to 1,336 bytes per thread for sm_90 to sm_120, whether w is kept or reloaded for every
# row; at 8,192 none.
WHOLE_ROW_BACKWARD = 8192
WALK_BLOCK = 8192  # column block beyond those
# Bytes of rows that a block of the backward has in flight, in shared memory: all that sm_120 has
# for one block, and half of what sm_90 has for all.
STAGED_BYTES = 96 * 2**10
# Rows up to this many columns share a program. For D=128 on sm_100 ptxas spills 8 bytes in the
# float32 forward with 16 elements per thread.
NARROW = 512


def _heuristic(D: int, backward: bool) -> dict:
    """Targets 16 to 32 elements per thread in one operand."""
    walk = (WHOLE_ROW_BACKWARD if backward else WHOLE_ROW) < D
    block_d = WALK_BLOCK if walk else next_power_of_2(D)
    # Narrow rows (QK norm) share a program: a warp's loads stay 512 B.
    block_t = max(1, 1024 // block_d)
    warp = 256 if block_t > 1 and not backward else 512
    return {
        "BLOCK_D": block_d,
        "BLOCK_T": block_t,
        "num_warps": min(16, max(1, block_d * block_t // warp)),
    }


def _blocks(D: int, backward: bool, least: int, most: int) -> list[dict]:
    """Half, as many and twice as many rows per program, on 1 to 16 warps with `least` to `most`
    elements per thread.
    """
    base = _heuristic(D, backward)
    configs = []
    for block_t in (base["BLOCK_T"] // 2, base["BLOCK_T"], 2 * base["BLOCK_T"]):
        for warps in (1, 2, 4, 8, 16):
            if block_t and least <= base["BLOCK_D"] * block_t // (32 * warps) <= most:
                configs.append({**base, "BLOCK_T": block_t, "num_warps": warps})
    return configs


def forward_heuristic(D: int, itemsize: int, add: bool) -> dict:
    return _heuristic(D, False)


def forward_space(D: int, itemsize: int, add: bool) -> list[dict]:
    if D > WHOLE_ROW:
        return [
            {"BLOCK_D": block, "BLOCK_T": 1, "num_warps": warps}
            for block, warps in ((4096, 8), (4096, 16), (8192, 16))
        ]
    return _blocks(D, False, *((16 // itemsize, 8) if D <= NARROW else (8, 32)))


def backward_heuristic(D: int, itemsize: int) -> dict:
    """STAGES: loop iterations over rows in flight; all but one of them are loads into shared
    memory.
    """
    c = _heuristic(D, True)
    return {**c, "STAGES": 1 if c["BLOCK_D"] < D else _most_stages(c, itemsize)}


def _most_stages(c: dict, itemsize: int) -> int:
    step = 3 * c["BLOCK_T"] * c["BLOCK_D"] * itemsize  # dy, x and dsum
    # In narrow rows ptxas spills 4 bytes for sm_100 and sm_120 with one prefetched step.
    if c["BLOCK_D"] <= NARROW:
        return 1
    # ptxas 12.9 spills 4 bytes for sm_120 with two prefetched steps of 4,096 float32 columns.
    ahead = 1 if itemsize == 4 and c["BLOCK_D"] > 2048 else 2
    return 1 + min(ahead, STAGED_BYTES // step)


def backward_space(D: int, itemsize: int) -> list[dict]:
    if D > WHOLE_ROW_BACKWARD:
        return [
            {"BLOCK_D": block, "BLOCK_T": 1, "num_warps": warps, "STAGES": 1}
            for block, warps in ((4096, 16), (8192, 8))
        ]
    return [
        {**c, "STAGES": stages}
        for c in _blocks(D, True, 16 if D <= NARROW else 8, 16)
        for stages in range(1, _most_stages(c, itemsize) + 1)
    ]


class Fixed(NamedTuple):
    """What is constant in a launch.

    H, D: heads and columns.   BIAS: whether there is one.
    ROUND_XHAT: whether normalized rows are rounded before they are weighted.
    WALK, ADD: in forward: whether a row is wider than a block, and whether there is a residual.
    DSUM: in backward: whether the sum with the residual has a gradient.
    """

    H: int
    D: int
    BIAS: bool = False
    ROUND_XHAT: bool = False
    WALK: bool = False
    ADD: bool = False
    DSUM: bool = False


@triton.jit
def _weight(w_ptr, h, start, offset, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The multipliers of columns from `start` on, [BLOCK_D]."""
    c = start + tl.arange(0, BLOCK_D)
    return tl.load(w_ptr + h * D + c, mask=c < D, other=0.0).to(tl.float32) + offset


@triton.jit(do_not_specialize=["T"])
def _forward(
    x_ptr,
    residual_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    sum_ptr,
    rstd_ptr,
    T,
    eps,
    offset,
    FIXED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_T rows of one head."""
    D: tl.constexpr = FIXED.D
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.program_id(1)
    row = t * FIXED.H + h
    cols = tl.arange(0, BLOCK_D)
    in_t = t < T
    if not FIXED.WALK:
        mask = in_t[:, None] & (cols < D)[None, :]
        at = row[:, None] * D + cols[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if FIXED.ADD:
            r = x + tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
            r = r.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + at, r, mask=mask)
            x = r.to(tl.float32)
        rstd = reciprocal(tl.sqrt(tl.sum(x * x, axis=1) / D + eps))
        tl.store(rstd_ptr + row, rstd, mask=in_t)
        w = _weight(w_ptr, h, 0, offset, D, BLOCK_D)
        y = x * rstd[:, None]
        if FIXED.ROUND_XHAT:
            y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
        y = y * w[None, :]
        if FIXED.BIAS:
            y += tl.load(b_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        ss = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            c = start + cols
            mask = in_t[:, None] & (c < D)[None, :]
            at = row[:, None] * D + c[None, :]
            x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if FIXED.ADD:
                r = x + tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
                r = r.to(sum_ptr.dtype.element_ty)
                tl.store(sum_ptr + at, r, mask=mask)
                x = r.to(tl.float32)
            ss += x * x
        rstd = reciprocal(tl.sqrt(tl.sum(ss, axis=1) / D + eps))
        tl.store(rstd_ptr + row, rstd, mask=in_t)
        for start in range(0, D, BLOCK_D):
            c = start + cols
            mask = in_t[:, None] & (c < D)[None, :]
            at = row[:, None] * D + c[None, :]
            # recomputed from the inputs: the sum stored by this program's other threads may not be
            # visible yet
            if FIXED.ADD:
                x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
                x += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
                x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
            else:
                x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
            w = _weight(w_ptr, h, start, offset, D, BLOCK_D)
            y = x * rstd[:, None]
            if FIXED.ROUND_XHAT:
                y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
            y = y * w[None, :]
            if FIXED.BIAS:
                y += tl.load(b_ptr + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _backward(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    rstd_ptr,
    w_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    T,
    offset,
    FIXED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx, and this program's partial sums of dw and db over rows p, p + P, p + 2P, ... of one head,
    in registers.
    """
    D: tl.constexpr = FIXED.D
    p = tl.program_id(0)
    h = tl.program_id(1)
    P = tl.num_programs(0)
    cols = tl.arange(0, BLOCK_D)
    in_d = cols < D
    w = _weight(w_ptr, h, 0, offset, D, BLOCK_D)
    dw = tl.zeros([BLOCK_D], tl.float32)
    db = tl.zeros([BLOCK_D], tl.float32)
    # Where a thread may have a single product of a sum, products are rounded first: with an fma
    # into the first addition of an exchange between threads, two threads would differ in the last
    # bit, and either result could be stored. Seen for dw in narrow 16-bit rows on four warps; not
    # in float32, where with a bias and D=128 ptxas would spill 8 bytes for sm_90.
    APART: tl.constexpr = BLOCK_T > 1 and x_ptr.dtype.element_ty != tl.float32
    # The same for c, with a float32 weight and a D that is not a multiple of four.
    RAGGED: tl.constexpr = APART and D % 4 != 0 and w_ptr.dtype.element_ty == tl.float32
    for block in tl.range(p, tl.cdiv(T, BLOCK_T), P, num_stages=STAGES):
        t = block * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
        row = t * FIXED.H + h
        in_t = t < T
        mask = in_t[:, None] & in_d[None, :]
        at = row[:, None] * D + cols[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0)
        xhat = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=in_t, other=0.0)
        xhat = xhat * rstd[:, None]
        g = dy.to(tl.float32)
        if FIXED.BIAS:
            db += tl.sum(g, axis=0)
        normed = xhat
        if FIXED.ROUND_XHAT:
            normed = xhat.to(dy_ptr.dtype.element_ty).to(tl.float32)
        if APART:
            dw += tl.sum(tl.fma(g, normed, 0.0), axis=0)
        else:
            dw += tl.sum(g * normed, axis=0)
        g = g * w[None, :]
        if RAGGED:
            c = tl.sum(tl.fma(g, xhat, 0.0), axis=1) / D
        else:
            c = tl.sum(g * xhat, axis=1) / D
        dx = (g - xhat * c[:, None]) * rstd[:, None]
        if FIXED.DSUM:
            dx += tl.load(dsum_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_ptr + (p * FIXED.H + h).to(tl.int64) * D + cols, dw, mask=in_d)
    if FIXED.BIAS:
        tl.store(db_ptr + (p * FIXED.H + h).to(tl.int64) * D + cols, db, mask=in_d)


@triton.jit(do_not_specialize=["T"])
def _backward_walk(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    rstd_ptr,
    w_ptr,
    dx_ptr,
    T,
    offset,
    FIXED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dx of one wide row, in two passes over its columns."""
    D: tl.constexpr = FIXED.D
    row = tl.program_id(0).to(tl.int64) * FIXED.H + tl.program_id(1)
    h = tl.program_id(1)
    cols = tl.arange(0, BLOCK_D)
    rstd = tl.load(rstd_ptr + row)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        c = start + cols
        g = tl.load(dy_ptr + row * D + c, mask=c < D, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * D + c, mask=c < D, other=0.0).to(tl.float32)
        w = _weight(w_ptr, h, start, offset, D, BLOCK_D)
        acc += g * w * (x * rstd)
    dot = tl.sum(acc, axis=0) / D
    for start in range(0, D, BLOCK_D):
        c = start + cols
        g = tl.load(dy_ptr + row * D + c, mask=c < D, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * D + c, mask=c < D, other=0.0).to(tl.float32)
        w = _weight(w_ptr, h, start, offset, D, BLOCK_D)
        dx = (g * w - x * rstd * dot) * rstd
        if FIXED.DSUM:
            dx += tl.load(dsum_ptr + row * D + c, mask=c < D, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * D + c, dx.to(dx_ptr.dtype.element_ty), mask=c < D)


@triton.jit(do_not_specialize=["T"])
def _weight_walk(
    dy_ptr,
    x_ptr,
    rstd_ptr,
    dw_ptr,
    db_ptr,
    T,
    FIXED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dw and db of one column block over rows p, p + P, ...: for rows too wide for `_backward`."""
    D: tl.constexpr = FIXED.D
    p = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    dw = tl.zeros([BLOCK_D], tl.float32)
    db = tl.zeros([BLOCK_D], tl.float32)
    for t in range(p, T, tl.num_programs(0)):
        row = t * FIXED.H + h
        g = tl.load(dy_ptr + row * D + c, mask=c < D, other=0.0)
        xhat = tl.load(x_ptr + row * D + c, mask=c < D, other=0.0).to(tl.float32) * tl.load(
            rstd_ptr + row
        )
        if FIXED.ROUND_XHAT:
            xhat = xhat.to(dy_ptr.dtype.element_ty).to(tl.float32)
        dw += g.to(tl.float32) * xhat
        if FIXED.BIAS:
            db += g.to(tl.float32)
    tl.store(dw_ptr + (p * FIXED.H + h).to(tl.int64) * D + c, dw, mask=c < D)
    if FIXED.BIAS:
        tl.store(db_ptr + (p * FIXED.H + h).to(tl.int64) * D + c, db, mask=c < D)


@triton.jit
def _sum_programs(
    partial_ptr, out_ptr, second_ptr, P, COLUMNS, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr
):
    """out [COLUMNS] = the sum over the P rows of partial, in their order by BLOCK_P, rounded once.
    With second [COLUMNS], partial is [P, 2, COLUMNS], and programs with index 1 in the grid's
    second dimension compute second.
    """
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.arange(0, BLOCK_P)
    stride = COLUMNS
    if second_ptr is not None:
        stride = 2 * COLUMNS
        partial_ptr += tl.program_id(1) * COLUMNS
    acc = tl.zeros([BLOCK_P, BLOCK], tl.float32)
    for first in range(0, P, BLOCK_P):
        at = (first + p).to(tl.int64)[:, None] * stride + c[None, :]
        acc += tl.load(
            partial_ptr + at, mask=(first + p < P)[:, None] & (c < COLUMNS)[None, :], other=0.0
        )
    total, mask = tl.sum(acc, axis=0), c < COLUMNS
    if second_ptr is not None:
        which = tl.program_id(1) + tl.zeros([BLOCK], tl.int32)
        tl.store(second_ptr + c, total.to(second_ptr.dtype.element_ty), mask=mask & (which == 1))
        mask = mask & (which == 0)
    tl.store(out_ptr + c, total.to(out_ptr.dtype.element_ty), mask=mask)


# A warp reads 128 bytes of each row, and a thread has eight elements in flight; 128 programs for
# 4,096 columns.
_SUM = {"BLOCK_P": 32, "BLOCK": 32}


def summed(
    partial: torch.Tensor, out: torch.Tensor, second: torch.Tensor | None = None
) -> torch.Tensor:
    """Writes to out, and returns, the sum over the first dimension of partial [P, *out.shape],
    contiguous and float32, in one launch; with second, of out's shape, partial is [P, 2,
    *out.shape].
    """
    columns = out.numel()
    grid = cdiv(columns, _SUM["BLOCK"]), 1 if second is None else 2
    launch(_sum_programs, grid, partial, out, second, partial.shape[0], columns, **_SUM)
    return out


_resident: dict[tuple, int] = {}


def sharing(
    kernel,
    T: int,
    block_t: int,
    groups: int,
    warps: int,
    x: torch.Tensor,
    key: tuple,
    *arguments,
    **constants,
) -> int:
    """Programs that share the rows of each of `groups` columns of a grid: together as many as the
    device holds at a time, so that there is no second, partial wave. key: what registers and shared
    memory depend on besides the constants.
    """
    each = 4 * groups
    if x.is_cuda:
        of = torch.cuda.get_device_properties(x.device)
        key = (kernel, x.device, warps, *key, *constants.values())
        if key not in _resident:
            compiled = warm_up(kernel, *arguments, **constants, num_warps=warps)
            _resident[key] = resident(compiled.n_regs, compiled.metadata.shared, warps, of)
        each = _resident[key] * of.multi_processor_count
    return max(1, min(each // groups, cdiv(T, block_t)))


def forward(x, residual, weight, bias, norm):
    T, H, D = sizes(x, weight)
    normalized = normalize(x, residual, weight, bias, norm)
    if T:
        c = FORWARD.config(x.device, D, x.element_size(), residual is not None)
        outputs = normalized.y, normalized.total, normalized.rstd
        arguments = x, residual, weight, bias, *outputs, T, norm.eps, norm.offset
        walk, add = c["BLOCK_D"] < D, residual is not None
        fixed = Fixed(H, D, bias is not None, norm.round_xhat, walk, add)
        launch(_forward, (cdiv(T, c["BLOCK_T"]), H), *arguments, FIXED=fixed, **c)
    return normalized


def backward(dy, dtotal, x, rstd, weight, norm, has_bias):
    T, H, D = sizes(x, weight)
    if T == 0:
        return no_rows(x, weight, has_bias)
    gradients = normalize_backward(dy, dtotal, x, rstd, weight, norm, has_bias)
    dx, dweight, dbias = gradients
    c = BACKWARD.config(x.device, D, x.element_size())
    block_d, warps = c["BLOCK_D"], c["num_warps"]
    walk = block_d < D
    # A stand-in for both until the number of programs is known.
    db = torch.empty(0, dtype=torch.float32, device=x.device)
    fixed, dsum = Fixed(H, D, has_bias, norm.round_xhat), dtotal is not None
    if walk:
        tensors = dy, dtotal, x, rstd, weight, dx
        constants = {"FIXED": Fixed(H, D, DSUM=dsum), "BLOCK_D": block_d, "num_warps": warps}
        launch(_backward_walk, (T, H), *tensors, T, norm.offset, **constants)
        kernel, warps, block_t = _weight_walk, 4, 1
        columns = cdiv(D, 1024)  # 8 elements per thread: a 128-bit load of 16 bits
        constants = {"FIXED": fixed, "BLOCK_D": 1024}

        def arguments(dw, db) -> tuple:
            return dy, x, rstd, dw, db, T
    else:
        kernel, block_t, columns = _backward, c["BLOCK_T"], 1
        blocks = {name: c[name] for name in ("BLOCK_T", "BLOCK_D", "STAGES")}
        constants = {"FIXED": fixed._replace(DSUM=dsum), **blocks}

        def arguments(dw, db) -> tuple:
            return dy, dtotal, x, rstd, weight, dx, dw, db, T, norm.offset

    dtypes = (x.dtype, dy.dtype, weight.dtype, None if dtotal is None else dtotal.dtype)
    P = sharing(kernel, T, block_t, H * columns, warps, x, dtypes, *arguments(db, db), **constants)
    dw = torch.empty((P, H, D), dtype=torch.float32, device=x.device)
    if has_bias:
        db = torch.empty((P, H, D), dtype=torch.float32, device=x.device)
    launch(kernel, (P, H, columns), *arguments(dw, db), **constants, num_warps=warps)
    if dbias is not None:  # all heads share one bias, so it is a sum over heads too
        summed(db.view(P * H, D), dbias)
    summed(dw, dweight)
    return gradients


# The usual training step; float32 weights, which need the most registers in forward; and all in
# float32: x, weight, whether there is a bias, whether the normalized row is rounded.
_TYPES = {
    2: (("bf16", "bf16", False, True), ("bf16", "fp32", True, True)),
    4: (("fp32", "fp32", True, False),),
}


def _specs(D: int, itemsize: int, launches) -> list[KernelSpec]:
    """launches: what is constant in all -> kernels, their labels, constants and configurations."""
    return [
        KernelSpec.of(
            kernel,
            f"{label} {data} weight={weight}{' bias' if bias else ''} D={D}",
            {**dict.fromkeys(("rstd", "dw", "db"), "fp32"), "w": weight, "b": weight, "*": data},
            {"FIXED": fixed, **config},
            {"eps": "fp32", "offset": "fp32"},
            elements=config.get("BLOCK_T", 1) * config["BLOCK_D"],
        )
        for data, weight, bias, cast in _TYPES[itemsize]
        for kernel, label, fixed, config in launches(Fixed(8 if D == 128 else 1, D, bias, cast))
    ]


def _forward_specs(key: dict, config: dict) -> list[KernelSpec]:
    def launches(fixed: Fixed):
        label = "add_forward" if key["add"] else "forward"
        walk = config["BLOCK_D"] < key["D"]
        yield _forward, label, fixed._replace(WALK=walk, ADD=key["add"]), config

    return _specs(key["D"], key["itemsize"], launches)


def _backward_specs(key: dict, config: dict) -> list[KernelSpec]:
    def launches(fixed: Fixed):
        if config["BLOCK_D"] < key["D"]:
            block = {name: config[name] for name in ("BLOCK_D", "num_warps")}
            yield _backward_walk, "backward_walk", Fixed(fixed.H, fixed.D, DSUM=True), block
            yield _weight_walk, "weight_walk", fixed, {"BLOCK_D": 1024, "num_warps": 4}
        else:
            yield _backward, "backward", fixed._replace(DSUM=True), config

    return _specs(key["D"], key["itemsize"], launches)


_WIDTHS = (128, 1024, 4096, 8192, 16384, 65536)
FORWARD = Tunable(
    "rmsnorm",
    "forward",
    ("D", "itemsize", "add"),
    "forward",
    forward_heuristic,
    forward_space,
    [(D, size, add) for D in _WIDTHS for size in (2, 4) for add in (False, True)],
    _forward_specs,
)
BACKWARD = Tunable(
    "rmsnorm",
    "backward",
    ("D", "itemsize"),
    "backward",
    backward_heuristic,
    backward_space,
    [(D, size) for D in _WIDTHS for size in (2, 4)],
    _backward_specs,
)
TUNABLES = (FORWARD, BACKWARD)


def gate() -> tuple[KernelSpec, ...]:
    """The reduction of the programs' partial sums, whose configuration is not tuned: 16 bytes per
    thread of its input.
    """
    return tuple(
        KernelSpec.of(
            _sum_programs,
            f"sum of dw {t}{' twice' if two else ''}",
            {"partial": "fp32", "out": t, **({"second": t} if two else {})},
            _SUM,
            divisible=("COLUMNS",),
            store=32 if t == "fp32" else 16,
        )
        for t, two in (("bf16", False), ("fp32", False), ("bf16", True))
    )
