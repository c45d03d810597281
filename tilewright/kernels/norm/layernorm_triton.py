"""LayerNorm and add + LayerNorm in Triton. The definition is tilewright/ops/norm/layernorm.py.

T = rows, D = columns. Programs hold rows as those of RMSNorm do (rmsnorm_triton.py, with its launch
configurations): BLOCK_T whole rows while D <= 16,384 (backward: 8,192), and column blocks of wider
ones. Sums are fp32. The variance is that of deviations from the mean, whose own sum corrects the
mean (Chan, Golub & LeVeque 1983), so that a large mean costs no digits. Gradients of weight and
bias are summed as RMSNorm's: by program, then over programs in fixed order, without atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv
from tilewright.kernels.math_triton import reciprocal
from tilewright.kernels.norm.operators import no_rows, standardize, standardize_backward
from tilewright.kernels.norm.rmsnorm_triton import (
    backward_heuristic,
    backward_space,
    forward_heuristic,
    forward_space,
    sharing,
    summed,
)
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import Tunable

# Columns of a program that sums gradients of wide rows' weights: with four warps, 8 of each operand
# per thread, a 128-bit load of 16 bits.
WEIGHT_BLOCK = 1024


@triton.jit
def _row(x_ptr, residual_ptr, sum_ptr, at, mask):
    """x, or x + residual rounded to the sum's dtype, in float32."""
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _deviation(total, squares, eps, D: tl.constexpr):
    """What the rounded mean lacks, and 1 / sqrt(variance + eps), from the sums over a row of
    deviations from that mean and of their squares.
    """
    rest = total / D
    variance = squares / D
    # Squares that overflow make rows of zeros, as in the twin; infinity less infinity would be NaN.
    variance = tl.where(variance == float("inf"), variance, tl.maximum(variance - rest * rest, 0.0))
    return rest, reciprocal(tl.sqrt(variance + eps))


@triton.jit
def _scaled(xhat, w_ptr, b_ptr, c, in_d):
    """xhat [BLOCK_T, BLOCK_D] times the weight, plus the bias, of columns c."""
    y = xhat * tl.load(w_ptr + c, mask=in_d, other=0.0).to(tl.float32)[None, :]
    if b_ptr is not None:
        y += tl.load(b_ptr + c, mask=in_d, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit(do_not_specialize=["T"])
def _forward(
    x_ptr,
    residual_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    T,
    eps,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WALK: tl.constexpr,
):
    """BLOCK_T rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t = row < T
    cols = tl.arange(0, BLOCK_D)
    if not WALK:
        mask = in_t[:, None] & (cols < D)[None, :]
        at = row[:, None] * D + cols[None, :]
        x = _row(x_ptr, residual_ptr, sum_ptr, at, mask)
        if residual_ptr is not None:
            tl.store(sum_ptr + at, x.to(sum_ptr.dtype.element_ty), mask=mask)
        mean = tl.sum(x, axis=1) / D
        x = tl.where(mask, x - mean[:, None], 0.0)
        rest, rstd = _deviation(tl.sum(x, axis=1), tl.sum(x * x, axis=1), eps, D)
        tl.store(mean_ptr + row, mean + rest, mask=in_t)
        tl.store(rstd_ptr + row, rstd, mask=in_t)
        xhat = (x - rest[:, None]) * rstd[:, None]
        y = _scaled(xhat, w_ptr, b_ptr, cols, cols < D)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            c = start + cols
            mask = in_t[:, None] & (c < D)[None, :]
            at = row[:, None] * D + c[None, :]
            x = _row(x_ptr, residual_ptr, sum_ptr, at, mask)
            if residual_ptr is not None:
                tl.store(sum_ptr + at, x.to(sum_ptr.dtype.element_ty), mask=mask)
            total += x
        mean = tl.sum(total, axis=1) / D
        # The sum is recomputed from the inputs: what this program's other threads stored may not be
        # visible yet.
        total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        squares = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            c = start + cols
            mask = in_t[:, None] & (c < D)[None, :]
            at = row[:, None] * D + c[None, :]
            x = _row(x_ptr, residual_ptr, sum_ptr, at, mask)
            x = tl.where(mask, x - mean[:, None], 0.0)
            total += x
            squares += x * x
        rest, rstd = _deviation(tl.sum(total, axis=1), tl.sum(squares, axis=1), eps, D)
        tl.store(mean_ptr + row, mean + rest, mask=in_t)
        tl.store(rstd_ptr + row, rstd, mask=in_t)
        for start in range(0, D, BLOCK_D):
            c = start + cols
            mask = in_t[:, None] & (c < D)[None, :]
            at = row[:, None] * D + c[None, :]
            x = _row(x_ptr, residual_ptr, sum_ptr, at, mask)
            xhat = (x - mean[:, None] - rest[:, None]) * rstd[:, None]
            y = _scaled(xhat, w_ptr, b_ptr, c, c < D)
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _product(a, b, ROUND: tl.constexpr):
    """a * b; with ROUND, rounded before it is added to anything."""
    if ROUND:
        y = tl.fma(a, b, 0.0)
    else:
        y = a * b
    return y


@triton.jit(do_not_specialize=["T"])
def _backward(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    w_ptr,
    dx_ptr,
    partial_ptr,
    T,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx, and this program's partial sums of dw and db over blocks of rows p, p + P, ..., in
    registers.
    """
    p = tl.program_id(0)
    P = tl.num_programs(0)
    cols = tl.arange(0, BLOCK_D)
    in_d = cols < D
    w = tl.load(w_ptr + cols, mask=in_d, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK_D], tl.float32)
    db = tl.zeros([BLOCK_D], tl.float32)
    # Where a thread may have a single product of a sum: see rmsnorm_triton.
    APART: tl.constexpr = BLOCK_T > 1 and x_ptr.dtype.element_ty != tl.float32
    for block in tl.range(p, tl.cdiv(T, BLOCK_T), P, num_stages=STAGES):
        row = block * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
        in_t = row < T
        mask = in_t[:, None] & in_d[None, :]
        at = row[:, None] * D + cols[None, :]
        g = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=in_t, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=in_t, other=0.0)
        xhat = (x - mean[:, None]) * rstd[:, None]
        if BIAS:
            db += tl.sum(g, axis=0)
        dw += tl.sum(_product(g, xhat, APART), axis=0)
        g = _product(g, w[None, :], APART)
        c = tl.sum(g, axis=1) / D
        d = tl.sum(_product(g, xhat, APART), axis=1) / D
        dx = (g - c[:, None] - xhat * d[:, None]) * rstd[:, None]
        if dsum_ptr is not None:
            dx += tl.load(dsum_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    _store_partial(partial_ptr, p, cols, dw, db, D, BIAS)


@triton.jit
def _store_partial(partial_ptr, p, c, dw, db, D: tl.constexpr, BIAS: tl.constexpr):
    """dw and db of columns c to partial [P, 2, D], or dw alone to [P, D]."""
    at = partial_ptr + p.to(tl.int64) * (2 * D if BIAS else D) + c
    tl.store(at, dw, mask=c < D)
    if BIAS:
        tl.store(at + D, db, mask=c < D)


@triton.jit
def _backward_walk(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    w_ptr,
    dx_ptr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dx of one wide row, in two passes over its columns."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    sum_g = tl.zeros([BLOCK_D], tl.float32)
    sum_gx = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        c = start + cols
        g = tl.load(dy_ptr + row * D + c, mask=c < D, other=0.0).to(tl.float32)
        g *= tl.load(w_ptr + c, mask=c < D, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * D + c, mask=c < D, other=0.0).to(tl.float32)
        sum_g += g
        sum_gx += g * ((x - mean) * rstd)
    mean_g = tl.sum(sum_g, axis=0) / D
    slope = tl.sum(sum_gx, axis=0) / D * rstd
    for start in range(0, D, BLOCK_D):
        c = start + cols
        g = tl.load(dy_ptr + row * D + c, mask=c < D, other=0.0).to(tl.float32)
        g *= tl.load(w_ptr + c, mask=c < D, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * D + c, mask=c < D, other=0.0).to(tl.float32)
        dx = (g - mean_g - (x - mean) * slope) * rstd
        if dsum_ptr is not None:
            dx += tl.load(dsum_ptr + row * D + c, mask=c < D, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * D + c, dx.to(dx_ptr.dtype.element_ty), mask=c < D)


@triton.jit(do_not_specialize=["T"])
def _weight_walk(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    partial_ptr,
    T,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BIAS: tl.constexpr,
):
    """dw and db of one column block over rows p, p + P, ...: for rows too wide for `_backward`."""
    p = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    dw = tl.zeros([BLOCK_D], tl.float32)
    db = tl.zeros([BLOCK_D], tl.float32)
    for t in range(p, T, tl.num_programs(0)):
        at = tl.cast(t, tl.int64) * D + c
        g = tl.load(dy_ptr + at, mask=c < D, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=c < D, other=0.0).to(tl.float32)
        dw += g * ((x - tl.load(mean_ptr + t)) * tl.load(rstd_ptr + t))
        if BIAS:
            db += g
    _store_partial(partial_ptr, p, c, dw, db, D, BIAS)


def forward(x, residual, weight, bias, eps):
    standardized = standardize(x, residual, weight, bias, eps)
    y, mean, rstd, total = standardized
    if T := rstd.numel():
        D = x.shape[-1]
        c = FORWARD.config(x.device, D, x.element_size(), residual is not None)
        tensors = x, residual, weight, bias, y, total, mean, rstd
        grid, walk = (cdiv(T, c["BLOCK_T"]),), c["BLOCK_D"] < D
        launch(_forward, grid, *tensors, T, eps, D=D, WALK=walk, **c)
    return standardized


def _walk(config: dict) -> dict:
    """Half of the columns that rmsnorm's walk takes at a time: with all of them, Triton 3.6 spills
    8 bytes for one type or another.
    """
    return {"BLOCK_D": config["BLOCK_D"] // 2, "num_warps": config["num_warps"]}


def backward(dy, dtotal, x, mean, rstd, weight, has_bias):
    T, D = rstd.numel(), x.shape[-1]
    if T == 0:
        return no_rows(x, weight, has_bias)
    gradients = standardize_backward(dy, dtotal, x, mean, rstd, weight, has_bias)
    c = BACKWARD.config(x.device, D, x.element_size())
    block_t, warps, columns = c["BLOCK_T"], c["num_warps"], 1
    if c["BLOCK_D"] < D:
        tensors = dy, dtotal, x, mean, rstd, weight, gradients.dx
        launch(_backward_walk, (T,), *tensors, D=D, **_walk(c))
        kernel, block_t, warps, columns = _weight_walk, 1, 4, cdiv(D, WEIGHT_BLOCK)
        constants = {"D": D, "BLOCK_D": WEIGHT_BLOCK, "BIAS": has_bias}

        def arguments(partial) -> tuple:
            return dy, x, mean, rstd, partial, T
    else:
        kernel = _backward
        blocks = {name: c[name] for name in ("BLOCK_T", "BLOCK_D", "STAGES")}
        constants = {"D": D, **blocks, "BIAS": has_bias}

        def arguments(partial) -> tuple:
            return dy, dtotal, x, mean, rstd, weight, gradients.dx, partial, T

    def partial(programs):
        shape = (programs, 2, D) if has_bias else (programs, D)
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    dtypes = (x.dtype, dy.dtype, weight.dtype, None if dtotal is None else dtotal.dtype)
    P = sharing(kernel, T, block_t, columns, warps, x, dtypes, *arguments(partial(0)), **constants)
    parts = partial(P)
    launch(kernel, (P, columns), *arguments(parts), **constants, num_warps=warps)
    summed(parts, gradients.dweight, gradients.dbias)
    return gradients


# The usual training step; float32 weights; and all in float32: x, weight, whether there is a bias.
_TYPES = {
    2: (("bf16", "bf16", True), ("bf16", "fp32", False)),
    4: (("fp32", "fp32", True),),
}


def _specs(D: int, itemsize: int, launches) -> list[KernelSpec]:
    return [
        KernelSpec.of(
            kernel,
            f"{label} {data} weight={weight}{' bias' if bias else ''} D={D}",
            {
                **dict.fromkeys(("mean", "rstd", "partial"), "fp32"),
                "w": weight,
                "b": weight if bias else None,
                "*": data,
                **pointers,
            },
            {"D": D, "BIAS": bias, **constexprs},
            {"eps": "fp32"},
            elements=constexprs.get("BLOCK_T", 1) * constexprs["BLOCK_D"],
        )
        for data, weight, bias in _TYPES[itemsize]
        for kernel, label, pointers, constexprs in launches
    ]


def _forward_specs(key: dict, config: dict) -> list[KernelSpec]:
    label, pointers = "add_forward", {}
    if not key["add"]:
        label, pointers = "forward", {"residual": None, "sum": None}
    constexprs = {**config, "WALK": config["BLOCK_D"] < key["D"]}
    return _specs(key["D"], key["itemsize"], [(_forward, label, pointers, constexprs)])


def _backward_specs(key: dict, config: dict) -> list[KernelSpec]:
    launches = [(_backward, "backward", {}, config)]
    if config["BLOCK_D"] < key["D"]:
        launches = [
            (_backward_walk, "backward_walk", {}, _walk(config)),
            (_weight_walk, "weight_walk", {}, {"BLOCK_D": WEIGHT_BLOCK, "num_warps": 4}),
        ]
    return _specs(key["D"], key["itemsize"], launches)


_WIDTHS = (768, 1024, 4096, 8192, 16384, 65536)
FORWARD = Tunable(
    "layernorm",
    "forward",
    ("D", "itemsize", "add"),
    "forward",
    forward_heuristic,
    forward_space,
    [(D, size, add) for D in _WIDTHS for size in (2, 4) for add in (False, True)],
    _forward_specs,
)
BACKWARD = Tunable(
    "layernorm",
    "backward",
    ("D", "itemsize"),
    "backward",
    backward_heuristic,
    backward_space,
    [(D, size) for D in _WIDTHS for size in (2, 4)],
    _backward_specs,
)
TUNABLES = (FORWARD, BACKWARD)
