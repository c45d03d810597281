"""The ops between a merged projection and attention, in Triton: RMSNorm of each head of q and k,
and rotary embedding. The definition is tilewright/ops/rope/qk_norm_rope.py.

qkv is [B, S, (HQ + 2 HK) D]: a token's heads are adjacent. A program processes a token: some heads
of q at a time, then of k, so that the table row is read once; each head stays in registers from its
load to its store, as the two halves (or neighbors) that are rotated into each other and the
unrotated rest. Sums are fp32. Each program accumulates the weights' gradients over its tokens, and
they are added in fixed order: no atomics, the same bits every run on one kind of device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.core.layout import last_contiguous
from tilewright.kernels.device import programs
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import next_power_of_2
from tilewright.kernels.math_triton import reciprocal
from tilewright.kernels.norm.rmsnorm_triton import summed
from tilewright.kernels.rope.operators import (
    HeadNorm,
    Prepared,
    Rotation,
    prepare,
    prepare_backward,
    slices,
)
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import Tunable


class Fixed(NamedTuple):
    """What is constant in a launch.

    HQ, HK: heads of q, and of k as of v.   D: a head's features.   HALF: its rotated pairs.
    BLOCK_R, BLOCK_D: as `_blocks` gives them.
    INTERLEAVED: pairs are neighbors.   NORM: whether there is one.
    HAS_POS: whether positions are given.
    KEEP, INPLACE: in forward: whether 1 / rms is stored, and whether results overwrite the input.
    BLOCK_V: in backward: v's features at a time, all of a head.
    DQ, DK, DV: in backward: which gradients are given.
    """

    HQ: int
    HK: int
    D: int
    HALF: int
    BLOCK_R: int
    BLOCK_D: int
    INTERLEAVED: bool
    NORM: bool
    HAS_POS: bool = True
    KEEP: bool = False
    INPLACE: bool = False
    BLOCK_V: int = 0
    DQ: bool = True
    DK: bool = True
    DV: bool = True


@triton.jit
def _load_pairs(at, rows, FIXED: tl.constexpr):
    """The pairs that are rotated into each other, [rows, BLOCK_R] twice, in fp32. at: pointers to
    heads, and rows: which exist, [rows, 1].
    """
    BLOCK_H: tl.constexpr = rows.shape[0]
    BLOCK_R: tl.constexpr = FIXED.BLOCK_R
    HALF: tl.constexpr = FIXED.HALF
    if FIXED.INTERLEAVED:  # one contiguous read, split in registers
        both = tl.arange(0, 2 * BLOCK_R)
        x = tl.load(at + both[None, :], mask=rows & (both < 2 * HALF)[None, :], other=0.0).to(
            tl.float32
        )
        a, b = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_R, 2)))
    else:
        i = tl.arange(0, BLOCK_R)
        mask = rows & (i < HALF)[None, :]
        a = tl.load(at + i[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(at + (HALF + i)[None, :], mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(at, rows, a, b, FIXED: tl.constexpr):
    BLOCK_H: tl.constexpr = rows.shape[0]
    BLOCK_R: tl.constexpr = FIXED.BLOCK_R
    HALF: tl.constexpr = FIXED.HALF
    if FIXED.INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_R)
        x = tl.reshape(tl.join(a, b), (BLOCK_H, 2 * BLOCK_R))
        tl.store(
            at + both[None, :], x.to(at.dtype.element_ty), mask=rows & (both < 2 * HALF)[None, :]
        )
    else:
        i = tl.arange(0, BLOCK_R)
        mask = rows & (i < HALF)[None, :]
        tl.store(at + i[None, :], a.to(at.dtype.element_ty), mask=mask)
        tl.store(at + (HALF + i)[None, :], b.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _angles(cos_ptr, sin_ptr, pos_ptr, t, s, P, FIXED: tl.constexpr):
    """cos and sin of token t, [1, BLOCK_R]; NaN, without a read, where its position is outside the
    tables.
    """
    HALF: tl.constexpr = FIXED.HALF
    BLOCK_R: tl.constexpr = FIXED.BLOCK_R
    p = s
    if FIXED.HAS_POS:
        p = tl.load(pos_ptr + t)
    i = tl.arange(0, BLOCK_R)
    row = p + tl.zeros([BLOCK_R], tl.int64)
    inside = (i < HALF) & (row >= 0) & (row < P)
    cos = tl.load(cos_ptr + row * HALF + i, mask=inside, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + row * HALF + i, mask=inside, other=float("nan")).to(tl.float32)
    # Past the last pair: a NaN that belongs to no position must not enter sums over a head.
    return tl.where(i < HALF, cos, 0.0)[None, :], tl.where(i < HALF, sin, 0.0)[None, :]


@triton.jit
def _weights(w_ptr, offset, FIXED: tl.constexpr):
    """A norm's weights in the layout of heads: [1, BLOCK_R] twice, and [1, BLOCK_D] for the
    unrotated rest.
    """
    one = tl.zeros([1, 1], tl.int32)
    a, b = _load_pairs(w_ptr + one, one == 0, FIXED)
    d = 2 * FIXED.HALF + tl.arange(0, FIXED.BLOCK_D)
    rest = tl.load(w_ptr + d, mask=d < FIXED.D, other=0.0).to(tl.float32)
    return a + offset, b + offset, rest[None, :] + offset


@triton.jit
def _write_heads(
    x_ptr,
    y_ptr,
    w_ptr,
    rstd_ptr,
    angle,
    eps,
    offset,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FIXED: tl.constexpr,
):
    """H heads of a token, with the cos and sin of its angle."""
    cos, sin = angle
    D: tl.constexpr = FIXED.D
    HALF: tl.constexpr = FIXED.HALF
    if FIXED.NORM:
        wa, wb, w_rest = _weights(w_ptr, offset, FIXED)
    d = 2 * HALF + tl.arange(0, FIXED.BLOCK_D)
    for first in range(0, H, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        rows = (h < H)[:, None]
        x = x_ptr + (h * D)[:, None]
        y = y_ptr + (h * D)[:, None]
        a, b = _load_pairs(x, rows, FIXED)
        unturned = rows & (d < D)[None, :]
        if FIXED.NORM:
            total = tl.sum(a * a + b * b, axis=1)
            if 2 * HALF < D:
                rest = tl.load(x + d[None, :], mask=unturned, other=0.0).to(tl.float32)
                total += tl.sum(rest * rest, axis=1)
            if FIXED.INPLACE:
                # Threads may hold copies of elements that one of them is about to overwrite.
                tl.debug_barrier()
            rstd = reciprocal(tl.sqrt(total / D + eps))
            if FIXED.KEEP:
                tl.store(rstd_ptr + h, rstd, mask=h < H)
            a = a * rstd[:, None] * wa
            b = b * rstd[:, None] * wb
            if 2 * HALF < D:
                tl.store(
                    y + d[None, :],
                    (rest * rstd[:, None] * w_rest).to(y_ptr.dtype.element_ty),
                    mask=unturned,
                )
        else:
            if FIXED.INPLACE:
                tl.debug_barrier()
            elif 2 * HALF < D:
                tl.store(y + d[None, :], tl.load(x + d[None, :], mask=unturned), mask=unturned)
        _store_pairs(y, rows, a * cos - b * sin, b * cos + a * sin, FIXED)


@triton.jit(do_not_specialize=["S", "P"])
def _forward(
    x_ptr,
    q_ptr,
    k_ptr,
    rstd_ptr,
    qw_ptr,
    kw_ptr,
    cos_ptr,
    sin_ptr,
    pos_ptr,
    S,
    P,
    eps,
    offset,
    x_strides,
    q_strides,
    k_strides,
    FIXED: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Strides are from one batch and token to the next."""
    t = tl.program_id(0).to(tl.int64)
    b = t // S
    s = t % S
    angle = _angles(cos_ptr, sin_ptr, pos_ptr, t, s, P, FIXED)
    x = x_ptr + b * x_strides[0] + s * x_strides[1]
    rstd = rstd_ptr
    if FIXED.KEEP:
        rstd += t * (FIXED.HQ + FIXED.HK)
    q = q_ptr + b * q_strides[0] + s * q_strides[1]
    _write_heads(x, q, qw_ptr, rstd, angle, eps, offset, FIXED.HQ, BLOCK_H, FIXED)
    if FIXED.KEEP:
        rstd += FIXED.HQ
    x += FIXED.HQ * FIXED.D
    k = k_ptr + b * k_strides[0] + s * k_strides[1]
    _write_heads(x, k, kw_ptr, rstd, angle, eps, offset, FIXED.HK, BLOCK_H, FIXED)


@triton.jit
def _heads_gradient(
    dy_ptr,
    dy_head,
    x_ptr,
    dx_ptr,
    w_ptr,
    rstd_ptr,
    angle,
    offset,
    sums,
    H: tl.constexpr,
    GIVEN: tl.constexpr,
    FIXED: tl.constexpr,
):
    """dx of one token's heads; the sums for dw, with these heads' contribution.

    dy_head: dy's stride between heads.   angle: its cos and sin.   GIVEN: whether there is a dy.
    sums: of dw's pairs, twice, and of the unrotated rest, as `_no_sums` returns them.
    """
    cos, sin = angle
    dw_a, dw_b, dw_rest = sums
    D: tl.constexpr = FIXED.D
    HALF: tl.constexpr = FIXED.HALF
    BLOCK_H: tl.constexpr = dw_a.shape[0]
    BLOCK_R: tl.constexpr = FIXED.BLOCK_R
    BLOCK_D: tl.constexpr = FIXED.BLOCK_D
    if FIXED.NORM and GIVEN:
        wa, wb, w_rest = _weights(w_ptr, offset, FIXED)
    d = 2 * HALF + tl.arange(0, BLOCK_D)
    for first in range(0, H, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        rows = (h < H)[:, None]
        unturned = rows & (d < D)[None, :]
        dx = dx_ptr + (h * D)[:, None]
        if GIVEN:
            dy = dy_ptr + (h.to(tl.int64) * dy_head)[:, None]
            ya, yb = _load_pairs(dy, rows, FIXED)
            a = ya * cos + yb * sin  # rotate back by the same angle
            b = yb * cos - ya * sin
            if FIXED.NORM:
                x = x_ptr + (h * D)[:, None]
                xa, xb = _load_pairs(x, rows, FIXED)
                rstd = tl.load(rstd_ptr + h, mask=h < H, other=0.0)[:, None]
                xa = xa * rstd
                xb = xb * rstd
                dw_a += a * xa
                dw_b += b * xb
                a = a * wa
                b = b * wb
                c = tl.sum(a * xa + b * xb, axis=1)
                if 2 * HALF < D:
                    g = tl.load(dy + d[None, :], mask=unturned, other=0.0).to(tl.float32)
                    xr = tl.load(x + d[None, :], mask=unturned, other=0.0).to(tl.float32) * rstd
                    dw_rest += g * xr
                    g = g * w_rest
                    c += tl.sum(g * xr, axis=1)
                    g = (g - xr * (c / D)[:, None]) * rstd
                    tl.store(dx + d[None, :], g.to(dx_ptr.dtype.element_ty), mask=unturned)
                c = (c / D)[:, None]
                a = (a - xa * c) * rstd
                b = (b - xb * c) * rstd
            elif 2 * HALF < D:
                tl.store(dx + d[None, :], tl.load(dy + d[None, :], mask=unturned), mask=unturned)
        else:
            a = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
            b = a
            if 2 * HALF < D:
                tl.store(
                    dx + d[None, :],
                    tl.zeros([BLOCK_H, BLOCK_D], dx_ptr.dtype.element_ty),
                    mask=unturned,
                )
        _store_pairs(dx, rows, a, b, FIXED)
    return dw_a, dw_b, dw_rest


@triton.jit
def _no_sums(BLOCK_H: tl.constexpr, FIXED: tl.constexpr):
    """Sums for dw in BLOCK_H rows, 0 so far."""
    BLOCK_R: tl.constexpr = FIXED.BLOCK_R
    BLOCK_D: tl.constexpr = FIXED.BLOCK_D
    a = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
    return a, a, tl.zeros([BLOCK_H, BLOCK_D], tl.float32)


@triton.jit
def _store_weights(at, sums, FIXED: tl.constexpr):
    dw_a, dw_b, dw_rest = sums
    D: tl.constexpr = FIXED.D
    HALF: tl.constexpr = FIXED.HALF
    i = tl.arange(0, FIXED.BLOCK_R)
    step: tl.constexpr = 2 if FIXED.INTERLEAVED else 1
    apart: tl.constexpr = 1 if FIXED.INTERLEAVED else HALF
    tl.store(at + i * step, tl.sum(dw_a, axis=0), mask=i < HALF)
    tl.store(at + i * step + apart, tl.sum(dw_b, axis=0), mask=i < HALF)
    if 2 * HALF < D:
        d = 2 * HALF + tl.arange(0, FIXED.BLOCK_D)
        tl.store(at + d, tl.sum(dw_rest, axis=0), mask=d < D)


@triton.jit(do_not_specialize=["tokens", "S", "P"])
def _backward(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    x_ptr,
    rstd_ptr,
    qw_ptr,
    kw_ptr,
    dx_ptr,
    dw_ptr,
    cos_ptr,
    sin_ptr,
    pos_ptr,
    tokens,
    S,
    P,
    offset,
    dq_strides,
    dk_strides,
    dv_strides,
    x_strides,
    FIXED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The gradient of tokens p, p + programs, ..., and their contribution to the weights'
    gradients. BLOCK_H heads of q at a time, and BLOCK_K of k and of v.

    Strides are from one batch, head and token to the next; x_strides from one batch and token.
    """
    HQ: tl.constexpr = FIXED.HQ
    HK: tl.constexpr = FIXED.HK
    D: tl.constexpr = FIXED.D
    BLOCK_V: tl.constexpr = FIXED.BLOCK_V
    p = tl.program_id(0)
    q_sums = _no_sums(BLOCK_H, FIXED)
    k_sums = _no_sums(BLOCK_K, FIXED)
    # v is read with q, instead of after k.
    EARLY: tl.constexpr = FIXED.DV and HK <= BLOCK_K and not FIXED.INTERLEAVED
    d = tl.arange(0, BLOCK_V)
    few = tl.arange(0, BLOCK_K)
    for token in range(p, tokens, tl.num_programs(0)):
        t = token + tl.full([], 0, tl.int64)  # a Python int in the interpreter
        b = t // S
        s = t % S
        angle = _angles(cos_ptr, sin_ptr, pos_ptr, t, s, P, FIXED)
        dx = dx_ptr + t * ((HQ + 2 * HK) * D)
        dq = dq_ptr
        dk = dk_ptr
        x = x_ptr
        k_x = x_ptr
        q_rstd = rstd_ptr
        k_rstd = rstd_ptr
        if FIXED.DQ:
            dq += b * dq_strides[0] + s * dq_strides[2]
        if FIXED.DK:
            dk += b * dk_strides[0] + s * dk_strides[2]
        if FIXED.NORM:
            x += b * x_strides[0] + s * x_strides[1]
            k_x = x + HQ * D
            q_rstd += t * (HQ + HK)
            k_rstd = q_rstd + HQ
        if EARLY:
            dv = dv_ptr + b * dv_strides[0] + s * dv_strides[2]
            dv = dv + (few.to(tl.int64) * dv_strides[1])[:, None] + d[None, :]
            values = tl.load(dv, mask=(few < HK)[:, None] & (d < D)[None, :])
        q_sums = _heads_gradient(
            dq, dq_strides[1], x, dx, qw_ptr, q_rstd, angle, offset, q_sums, HQ, FIXED.DQ, FIXED
        )
        k_dx = dx + HQ * D
        k_sums = _heads_gradient(
            dk, dk_strides[1], k_x, k_dx, kw_ptr, k_rstd, angle, offset, k_sums, HK, FIXED.DK, FIXED
        )
        for first in range(0, HK, BLOCK_K):
            h = first + few
            mask = (h < HK)[:, None] & (d < D)[None, :]
            to = dx + ((HQ + HK + h) * D)[:, None] + d[None, :]
            if EARLY:
                tl.store(to, values, mask=mask)
            elif FIXED.DV:
                dv = dv_ptr + b * dv_strides[0] + s * dv_strides[2]
                dv = dv + (h.to(tl.int64) * dv_strides[1])[:, None] + d[None, :]
                tl.store(to, tl.load(dv, mask=mask), mask=mask)
            else:
                tl.store(to, tl.zeros([BLOCK_K, BLOCK_V], dx_ptr.dtype.element_ty), mask=mask)
    if FIXED.NORM:
        at = dw_ptr + p.to(tl.int64) * (2 * D)
        _store_weights(at, q_sums, FIXED)
        _store_weights(at + D, k_sums, FIXED)


# ---- launch configurations


def _blocks(D: int, half: int) -> tuple[int, int]:
    """BLOCK_R and BLOCK_D: the pairs and the unrotated features of a head that a tile covers."""
    rest = D - 2 * half
    return next_power_of_2(half), next_power_of_2(rest) if rest else 1


def _few(block_h: int, heads: int, interleaved: bool) -> int:
    """Heads of k and of v at a time: no more than there are. (Interleaved, that spills.)"""
    return block_h if interleaved else min(block_h, next_power_of_2(heads))


def _pairs(D: int, half: int) -> int:
    """The pairs of a head that a tile covers, or as many unrotated elements."""
    block_r, block_d = _blocks(D, half)
    return max(block_r, block_d // 2)


def _heuristic(D: int, half: int, itemsize: int, HQ: int, HK: int, norm: bool) -> dict:
    """About 1,024 pairs in flight per program: 8 per thread, a 128-bit load of 16-bit elements."""
    most = next_power_of_2(max(HQ, HK))  # wide enough for all heads
    return {"BLOCK_H": max(1, min(most, 1024 // _pairs(D, half))), "num_warps": 4}


def _space(D: int, half: int, itemsize: int, HQ: int, HK: int, norm: bool) -> list[dict]:
    """One or two 128-bit loads of each half per thread."""
    return [
        {"BLOCK_H": block_h, "num_warps": warps}
        for block_h in (4, 8, 16, 32)
        for warps in (1, 2, 4, 8)
        if block_h < 2 * max(HQ, HK)
        and 16 // itemsize <= block_h * _pairs(D, half) // (32 * warps) <= 8
    ]


def _backward_heuristic(D: int, half: int, itemsize: int, HQ: int, HK: int, norm: bool) -> dict:
    """As many programs as fit on an SM. Programs of four warps are four, with 128 registers per
    thread, for D = 128, and three, with 168, for wider heads.

    The next token's x and dy are not loaded ahead: they are 16 registers more than the 128 of a
    thread, and what four programs load at a time, 32 KiB, covers the latency (an H100: 88 to 93 %
    of its bandwidth).
    """
    c = _heuristic(D, half, itemsize, HQ, HK, norm)
    # Explicit, since ptxas chooses more for D = 128, and for wider heads fewer, and spills.
    limit = (128 if D <= 128 else 168) if norm else None
    if norm and 2 * half < D:
        # The sums of the unrotated rest are wide: with 64 features of 192, 255 registers.
        c["BLOCK_H"] = max(1, c["BLOCK_H"] // 2)
        limit = 168
    return {**c, "PROGRAMS": 4 if D <= 128 else 3, "maxnreg": limit}


def _backward_space(D: int, half: int, itemsize: int, HQ: int, HK: int, norm: bool) -> list[dict]:
    return [
        {**c, "PROGRAMS": each, "maxnreg": None}
        for c in _space(D, half, itemsize, HQ, HK, norm)
        for each in ((2, 4, 8, 16) if norm else (4,))
    ]


# ---- launches


def forward(qkv, heads, norm, rotation):
    prepared = prepare(qkv, heads, norm, rotation)
    _write(qkv, prepared, norm, rotation)
    return prepared


def overwrite(qkv, heads, norm, rotation):
    _write(qkv, Prepared(*slices(qkv, heads), None), norm, rotation)


def _write(qkv: torch.Tensor, to: Prepared, norm: HeadNorm, rotation: Rotation) -> None:
    """to: with each token's heads adjacent, or the views in qkv itself."""
    q, k, rstd = to
    cos, sin, positions, interleaved = rotation
    B, HQ, S, D = q.shape
    HK, half, normalized = k.shape[1], cos.shape[1], norm.q_weight is not None
    if B * S == 0:
        return
    fixed = Fixed(
        *(HQ, HK, D, half, *_blocks(D, half), interleaved, normalized, positions is not None),
        KEEP=rstd is not None,
        INPLACE=q.data_ptr() == qkv.data_ptr(),
    )
    tensors = qkv, q, k, rstd, norm.q_weight, norm.k_weight, cos, sin, positions
    strides = qkv.stride()[:2], (q.stride(0), q.stride(2)), (k.stride(0), k.stride(2))
    config = FORWARD.config(q.device, D, half, q.element_size(), HQ, HK, normalized)
    numbers = S, cos.shape[0], norm.eps, norm.offset
    launch(_forward, (B * S,), *tensors, *numbers, *strides, FIXED=fixed, **config)


def backward(dq, dk, dv, qkv, rstd, heads, norm, rotation):
    given = [last_contiguous(d) for d in (dq, dk, dv)]
    gradients = prepare_backward(*given, qkv, rstd, heads, norm, rotation)
    normalized = norm.q_weight is not None
    if not gradients.dqkv.numel():
        for d in gradients[1:] if normalized else ():
            d.zero_()
        return gradients
    dw = _write_gradients(given, qkv, rstd, gradients.dqkv, heads, norm, rotation)
    if dw is not None:
        summed(dw, gradients.dq_weight, gradients.dk_weight)
    return gradients


def _write_gradients(given, qkv, rstd, dqkv, heads, norm, rotation) -> torch.Tensor | None:
    """Returns the weights' gradients of each program, [P, 2, D] float32."""
    cos, sin, positions, interleaved = rotation
    B, S, W = dqkv.shape
    D, half, normalized = W // (heads.q + 2 * heads.kv), cos.shape[1], norm.q_weight is not None
    c = BACKWARD.config(dqkv.device, D, half, dqkv.element_size(), *heads, normalized)
    c = {name: value for name, value in c.items() if value is not None}
    each = c.pop("PROGRAMS")
    P = min(programs(dqkv, each), B * S) if normalized else B * S
    dw = torch.empty((P, 2, D), dtype=torch.float32, device=dqkv.device) if normalized else None
    fixed = Fixed(
        *(heads.q, heads.kv, D, half),
        *_blocks(D, half),
        interleaved,
        normalized,
        positions is not None,
        False,
        False,
        next_power_of_2(D),
        *(d is not None for d in given),
    )
    tensors = *given, qkv, rstd, norm.q_weight, norm.k_weight, dqkv, dw, cos, sin, positions
    strides = [(0, 0, 0) if d is None else d.stride()[:3] for d in given]
    strides.append(qkv.stride()[:2] if normalized else (0, 0))
    numbers = B * S, S, cos.shape[0], norm.offset
    few = _few(c["BLOCK_H"], heads.kv, interleaved)
    launch(_backward, (P,), *tensors, *numbers, *strides, FIXED=fixed, BLOCK_K=few, **c)
    return dw


# ---- specs for the compile gate


def _specs(
    kernel, name: str, key: dict, config: dict, strides: Mapping[str, tuple], more: dict
) -> list[KernelSpec]:
    """more: fields of `Fixed`."""
    data = "bf16" if key["itemsize"] == 2 else "fp32"
    D, half, norm = key["D"], key["half"], key["norm"]
    part = f" R={2 * half}" if 2 * half < D else ""
    tail = f"D={D}{part} heads={key['HQ']}+{key['HK']}{' norm' if norm else ''} {data}"
    absent = ["rstd", "qw", "kw", *(("x", "dw") if kernel is _backward else ())]
    types = dict.fromkeys(("rstd", "dw", "cos", "sin"), "fp32") | {"pos": "i64", "*": data}
    if not norm:  # None, as the launcher passes it
        types |= dict.fromkeys(absent)
    sizes = key["HQ"], key["HK"], D, half, *_blocks(D, half)
    return [
        KernelSpec.of(
            kernel,
            f"{name} {'interleaved' if interleaved else 'half-split'} {tail}",
            types,
            {
                "FIXED": Fixed(*sizes, interleaved, norm, **more),
                "BLOCK_K": _few(config["BLOCK_H"], key["HK"], interleaved),
                **config,
            },
            {"eps": "fp32", "offset": "fp32", **strides},
            divisible=tuple(strides),
            elements=config["BLOCK_H"] * D,
            per_sm=config.get("PROGRAMS", 1) if norm else 1,
        )
        for interleaved in ((False, True) if 2 * half == D else (True,))
    ]


def _forward_specs(key: dict, config: dict) -> list[KernelSpec]:
    """Whole heads, by halves and interleaved; and 64 features of 192."""
    strides = {f"{name}_strides": ("i32",) * 2 for name in "xqk"}
    return _specs(_forward, "forward", key, config, strides, {"KEEP": key["norm"]})


def _backward_specs(key: dict, config: dict) -> list[KernelSpec]:
    strides = {f"d{name}_strides": ("i32",) * 3 for name in "qkv"} | {"x_strides": ("i32",) * 2}
    more = {"BLOCK_V": next_power_of_2(key["D"])}
    return _specs(_backward, "backward", key, config, strides, more)


_FIELDS = ("D", "half", "itemsize", "HQ", "HK", "norm")
_KEYS = [
    (128, 64, 2, 32, 8, True),
    (128, 64, 2, 32, 4, True),
    (128, 64, 2, 32, 8, False),
    (256, 128, 2, 8, 4, True),
    (192, 32, 2, 128, 128, True),
    (128, 64, 4, 32, 8, True),
]
FORWARD = Tunable(
    "qk_norm_rope", "forward", _FIELDS, "forward", _heuristic, _space, _KEYS, _forward_specs
)
BACKWARD = Tunable(
    "qk_norm_rope",
    "backward",
    _FIELDS,
    "backward",
    _backward_heuristic,
    _backward_space,
    _KEYS,
    _backward_specs,
)
TUNABLES = (FORWARD, BACKWARD)
