"""Causal depthwise convolution in Triton. The definition is
tilewright/ops/linear_attention/causal_conv1d.py.

A program holds BLOCK_T rows of one sequence times BLOCK_C channels, and reads them once for each
tap, all but the first time from L1. Backward recomputes the sums before the activation, for each of
the W rows in which a row of x takes part, in the same way, so that nothing is saved but the inputs.
Gradients of weight and bias are accumulated per program and reduced by a second kernel in fixed
order: no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.core.layout import last_contiguous
from tilewright.kernels.device import programs
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv, next_power_of_2
from tilewright.kernels.linear_attention.operators import convolve, convolve_backward
from tilewright.kernels.linear_attention.tiles_triton import number_of_tiles, place, tiles_of
from tilewright.kernels.math_triton import sigmoid, sigmoid_pair
from tilewright.kernels.norm.rmsnorm_triton import summed
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import Tunable


@triton.jit
def _before(
    x_ptr, w_ptr, b_ptr, x_row, row, begin, live, c, in_c, W: tl.constexpr, BIAS: tl.constexpr
):
    """The sums before the activation, of rows `row` [i] that are live, in channels c [j]; row
    begin is the first of the sequence.
    """
    total = tl.zeros((row.shape[0], c.shape[0]), tl.float32)
    if BIAS:
        total += tl.load(b_ptr + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(W):
        at = row - (W - 1 - tap)
        w = tl.load(w_ptr + c * W + tap, mask=in_c, other=0.0).to(tl.float32)
        mask = (live & (at >= begin))[:, None] & in_c[None, :]
        x = tl.load(x_ptr + at[:, None] * x_row + c[None, :], mask=mask, other=0.0)
        total += w[None, :] * x.to(tl.float32)
    return total


@triton.jit(do_not_specialize=["S", "capacity", "count"])
def _forward(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    map_ptr,
    cu_ptr,
    S,
    capacity,
    count,
    C,
    x_row,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    t = tl.program_id(0)
    there = t < number_of_tiles(map_ptr, capacity, count, PACKED)
    if there:
        first, begin, end = place(map_ptr, cu_ptr, capacity, S, t, there, BLOCK_T, PACKED)
        row = first + tl.arange(0, BLOCK_T)
        c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        in_c, live = c < C, row < end
        y = _before(x_ptr, w_ptr, b_ptr, x_row, row, begin, live, c, in_c, W, BIAS)
        if SILU:
            y = y * sigmoid(y)
        to = y_ptr + row[:, None] * C + c[None, :]
        tl.store(to, y.to(y_ptr.dtype.element_ty), mask=live[:, None] & in_c[None, :])


@triton.jit
def _gradient(
    dy_ptr,
    x_ptr,
    w_ptr,
    b_ptr,
    x_row,
    C,
    row,
    begin,
    live,
    c,
    in_c,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """That of the sums before the activation."""
    mask = live[:, None] & in_c[None, :]
    g = tl.load(dy_ptr + row[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    if SILU:
        y = _before(x_ptr, w_ptr, b_ptr, x_row, row, begin, live, c, in_c, W, BIAS)
        s, rest = sigmoid_pair(y)
        g = g * (s * (1.0 + y * rest))
    return g


@triton.jit(do_not_specialize=["S", "capacity", "count"])
def _backward(
    dy_ptr,
    x_ptr,
    w_ptr,
    b_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    map_ptr,
    cu_ptr,
    S,
    capacity,
    count,
    C,
    x_row,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TAPS: tl.constexpr,
):
    """dx, and this program's partial sums of dw and db over tiles p, p + P, p + 2P, ... of its
    channels.
    """
    p = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < C
    taps = tl.arange(0, TAPS)
    dw = tl.zeros((TAPS, BLOCK_C), tl.float32)
    db = tl.zeros((BLOCK_C,), tl.float32)
    for t in range(p, number_of_tiles(map_ptr, capacity, count, PACKED), tl.num_programs(0)):
        first, begin, end = place(map_ptr, cu_ptr, capacity, S, t, t >= 0, BLOCK_T, PACKED)
        own = first + tl.arange(0, BLOCK_T)
        live = own < end
        g = _gradient(
            dy_ptr, x_ptr, w_ptr, b_ptr, x_row, C, own, begin, live, c, in_c, W, BIAS, SILU
        )
        if BIAS:
            db += tl.sum(g, axis=0)
        dx = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        # x's row takes part in its own row and the next W - 1. No unrolled loop: it would load the
        # rows of all taps ahead, and spill.
        for ago in range(W):
            at = own - ago
            seen = (live & (at >= begin))[:, None] & in_c[None, :]
            x = tl.load(x_ptr + at[:, None] * x_row + c[None, :], mask=seen, other=0.0)
            share = tl.sum(g * x.to(tl.float32), axis=0)
            dw += tl.where(taps[:, None] == W - 1 - ago, share[None, :], 0.0)
        for later in range(W):
            row = own + later
            g = _gradient(
                dy_ptr, x_ptr, w_ptr, b_ptr, x_row, C, row, begin, row < end, c, in_c, W, BIAS, SILU
            )
            w = tl.load(w_ptr + c * W + (W - 1 - later), mask=in_c, other=0.0).to(tl.float32)
            dx += w[None, :] * g
        to = dx_ptr + own[:, None] * C + c[None, :]
        mask = (own < end)[:, None] & in_c[None, :]
        tl.store(to, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    at = p.to(tl.int64) * C + c
    mask = (taps < W)[:, None] & in_c[None, :]
    tl.store(dw_ptr + at[None, :] * W + taps[:, None], dw, mask=mask)
    if BIAS:
        tl.store(db_ptr + at, db, mask=in_c)


# ---- launches


def _rows(t: torch.Tensor) -> torch.Tensor:
    """[B, S, C] as [B * S, C], with contiguous rows."""
    return last_contiguous(t.reshape(-1, t.shape[-1]))


def _constants(weight, bias, cu_seqlens, silu) -> dict:
    return {
        "W": weight.shape[1],
        "BIAS": bias is not None,
        "SILU": silu,
        "PACKED": cu_seqlens is not None,
    }


def forward(x, weight, bias, cu_seqlens, silu):
    y = convolve(x, weight, bias, cu_seqlens, silu)
    if y.numel():
        (B, S, C), rows = x.shape, _rows(x)
        config = FORWARD.config(x.device, C, x.element_size())
        tiles = tiles_of(B, S, cu_seqlens, config["BLOCK_T"])
        launch(
            _forward,
            (tiles.count, cdiv(C, config["BLOCK_C"])),
            rows,
            weight,
            bias,
            y,
            tiles.map,
            tiles.cu_seqlens,
            S,
            tiles.capacity,
            tiles.count,
            C,
            rows.stride(0),
            **_constants(weight, bias, cu_seqlens, silu),
            **config,
        )
    return y


def backward(dy, x, weight, bias, cu_seqlens, silu):
    found = convolve_backward(dy, x, weight, bias, cu_seqlens, silu)
    dx, dweight, dbias = found
    if not x.numel():
        for t in (dweight, dbias):
            if t is not None:
                t.zero_()
        return found
    (B, S, C), rows, W = x.shape, _rows(x), weight.shape[1]
    config = BACKWARD.config(x.device, C, x.element_size())
    tiles, blocks = tiles_of(B, S, cu_seqlens, config["BLOCK_T"]), cdiv(C, config["BLOCK_C"])
    P = max(1, min(tiles.count, programs(x, PROGRAMS) // blocks))
    dw = torch.empty((P, C, W), dtype=torch.float32, device=x.device)
    db = None if bias is None else torch.empty((P, C), dtype=torch.float32, device=x.device)
    launch(
        _backward,
        (P, blocks),
        dy.contiguous(),
        rows,
        weight,
        bias,
        dx,
        dw,
        db,
        tiles.map,
        tiles.cu_seqlens,
        S,
        tiles.capacity,
        tiles.count,
        C,
        rows.stride(0),
        **_constants(weight, bias, cu_seqlens, silu),
        TAPS=next_power_of_2(W),
        **config,
    )
    summed(dw, dweight)
    if db is not None:
        summed(db, dbias)
    return found


# ---- launch configurations

PROGRAMS = 2  # of the backward, per SM: as many as registers allow


def _config(C: int, elements: int, warps: int) -> dict:
    """16 to 128 channels in a row of a tile: 128 16-bit channels are two sectors for each of eight
    threads, and the loads of other taps find them in L1.
    """
    block = max(16, min(128, next_power_of_2(C)))
    return {"BLOCK_T": elements // block, "BLOCK_C": block, "num_warps": warps}


def _forward_heuristic(C: int, itemsize: int) -> dict:
    """16 elements per thread: two 128-bit loads of each tap in 16 bits."""
    return _config(C, 2048, 4)


def _backward_heuristic(C: int, itemsize: int) -> dict:
    """8 elements per thread: with 16, up to 254 registers hold addresses, gradients and sums."""
    return _config(C, 2048, 8)


def _space(heuristic, most):
    def space(C: int, itemsize: int) -> list[dict]:
        base = heuristic(C, itemsize)
        return [
            {**base, "BLOCK_T": rows, "num_warps": warps}
            for rows in (base["BLOCK_T"] // 2, base["BLOCK_T"], 2 * base["BLOCK_T"])
            for warps in (2, 4, 8)
            if 8 <= rows * base["BLOCK_C"] // (32 * warps) <= most
        ]

    return space


def _specs_of(kernel, name: str):
    def specs(key: dict, config: dict) -> list[KernelSpec]:
        data, found = "bf16" if key["itemsize"] == 2 else "fp32", []
        for label, options in (
            ("", {"BIAS": False, "PACKED": False}),
            (" packed bias", {"BIAS": True, "PACKED": True}),
        ):
            types = {"map": "i32", "cu": "i64"} if options["PACKED"] else {"map": None, "cu": None}
            types |= {"dw": "fp32", "db": "fp32" if options["BIAS"] else None, "*": data}
            types |= {} if options["BIAS"] else {"b": None}
            found.append(
                KernelSpec.of(
                    kernel,
                    f"{name}{label} C={key['C']} {data}",
                    types,
                    {"W": 4, "TAPS": 4, "SILU": True, **options, **config},
                    divisible=("C", "x_row"),
                    elements=config["BLOCK_T"] * config["BLOCK_C"],
                )
            )
        return found

    return specs


# The convolution of Qwen3-Next-80B-A3B, and a narrow one.
_KEYS = [(C, size) for C in (8192, 64) for size in (2, 4)]
FORWARD = Tunable(
    "causal_conv1d",
    "forward",
    ("C", "itemsize"),
    "forward",
    _forward_heuristic,
    _space(_forward_heuristic, 32),
    _KEYS,
    _specs_of(_forward, "forward"),
)
BACKWARD = Tunable(
    "causal_conv1d",
    "backward",
    ("C", "itemsize"),
    "backward",
    _backward_heuristic,
    _space(_backward_heuristic, 8),
    _KEYS,
    _specs_of(_backward, "backward"),
)
TUNABLES = (FORWARD, BACKWARD)
