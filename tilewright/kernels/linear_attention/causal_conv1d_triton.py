"""Causal depthwise convolution in Triton. The definition is
tilewright/ops/linear_attention/causal_conv1d.py.

A program walks along a run of rows of one sequence, in BLOCK_C channels: each thread keeps the taps
of its channels and their last W - 1 rows in registers, so that each row is read once, but for those
that two runs share. Backward recomputes the sums before the activation, so that nothing is saved
but the inputs, and keeps the gradients of the last W - 1 of them too; a thread accumulates the
gradients of its channels' taps and biases. A second kernel adds those of all programs in fixed
order: no atomics. Runs are as long as the device's number of resident programs allows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.core.layout import last_contiguous
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv, next_power_of_2
from tilewright.kernels.linear_attention.operators import convolve, convolve_backward
from tilewright.kernels.linear_attention.tiles_triton import (
    Tiles,
    number_of_tiles,
    place,
    tiles_of,
)
from tilewright.kernels.math_triton import sigmoid, sigmoid_pair
from tilewright.kernels.norm.rmsnorm_triton import sharing
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import Tunable


class _Fixed(NamedTuple):
    """What is constant in a launch over runs of rows: W taps, and what is there."""

    W: int
    BIAS: bool
    SILU: bool
    PACKED: bool


@triton.jit
def _row(ptr, row, stride, c, mask):
    """Row `row` in channels c, as float32; 0 where masked."""
    return tl.load(ptr + row * stride + c, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _before(row, end, c, C):
    """The channels of a row before row `end`. The rows are compared for each channel, since
    Triton's interpreter cannot broadcast a condition.
    """
    return (c < C) & (row + tl.zeros_like(c) < end)


@triton.jit
def _taps(w_ptr, c, in_c, W: tl.constexpr):
    """A tuple of the taps of channels c, the earliest row's first."""
    taps = ()
    for tap in tl.static_range(W):
        w = tl.load(w_ptr + c * W + tap, mask=in_c, other=0.0)
        taps += (w.to(tl.float32),)
    return taps


@triton.jit
def _earlier(x_ptr, x_row, first, begin, c, C, W: tl.constexpr):
    """A tuple of the W - 1 rows before row `first` of the sequence that starts at row begin."""
    rows = ()
    for ago in tl.static_range(W - 1, 0, -1):
        at = first - ago
        rows += (_row(x_ptr, at, x_row, c, _before(begin, at + 1, c, C)),)
    return rows


@triton.jit
def _convolved(rows, taps, b):
    """The sum before the activation, of as many rows as taps."""
    total = b
    for tap in tl.static_range(len(taps)):
        total += taps[tap] * rows[tap]
    return total


@triton.jit
def _bias(b_ptr, c, in_c, BIAS: tl.constexpr):
    b = tl.zeros((c.shape[0],), tl.float32)
    if BIAS:
        b += tl.load(b_ptr + c, mask=in_c, other=0.0).to(tl.float32)
    return b


@triton.jit(do_not_specialize=["S", "capacity", "count", "length"])
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
    length,
    C,
    x_row,
    FIXED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A run of `length` rows, ROWS at a time."""
    W: tl.constexpr = FIXED.W
    t = tl.program_id(1)
    there = t < number_of_tiles(map_ptr, capacity, count, FIXED.PACKED)
    if there:
        first, begin, end = place(map_ptr, cu_ptr, capacity, S, t, there, length, FIXED.PACKED)
        c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        in_c = c < C
        taps, b = _taps(w_ptr, c, in_c, W), _bias(b_ptr, c, in_c, FIXED.BIAS)
        x = _earlier(x_ptr, x_row, first, begin, c, C, W)
        end = tl.minimum(end, first + length)
        for start in tl.range(first, end, ROWS, num_stages=STAGES):
            for i in tl.static_range(ROWS):
                row = start + i
                mask = _before(row, end, c, C)
                x += (_row(x_ptr, row, x_row, c, mask),)
                y = _convolved(x, taps, b)
                if FIXED.SILU:
                    y = y * sigmoid(y)
                tl.store(y_ptr + row * C + c, y.to(y_ptr.dtype.element_ty), mask=mask)
                x = x[1:]


@triton.jit
def _gradient(dy_ptr, row, C, c, mask, rows, taps, b, SILU: tl.constexpr):
    """The gradient of row `row` of the sum before the activation; 0 where masked."""
    g = _row(dy_ptr, row, C, c, mask)
    if SILU:
        y = _convolved(rows, taps, b)
        s, rest = sigmoid_pair(y)
        g = g * (s * (1.0 + y * rest))
    return g


@triton.jit(do_not_specialize=["S", "capacity", "count", "length"])
def _backward(
    dy_ptr,
    x_ptr,
    w_ptr,
    b_ptr,
    dx_ptr,
    partial_ptr,
    map_ptr,
    cu_ptr,
    S,
    capacity,
    count,
    length,
    C,
    x_row,
    FIXED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx, and this program's partial sums of dw and db over runs p, p + P, p + 2P, ... of its
    channels.
    """
    W: tl.constexpr = FIXED.W
    p = tl.program_id(1)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < C
    taps, b = _taps(w_ptr, c, in_c, W), _bias(b_ptr, c, in_c, FIXED.BIAS)
    dw = ()
    for _ in tl.static_range(W):
        dw += (tl.zeros((BLOCK_C,), tl.float32),)
    db = tl.zeros((BLOCK_C,), tl.float32)
    tiles = number_of_tiles(map_ptr, capacity, count, FIXED.PACKED)
    for t in range(p, tiles, tl.num_programs(1)):
        first, begin, end = place(map_ptr, cu_ptr, capacity, S, t, t >= 0, length, FIXED.PACKED)
        x = _earlier(x_ptr, x_row, first, begin, c, C, W)
        # x's row takes part in its own row and the next W - 1, whose gradients g are.
        g = ()
        for i in tl.static_range(W - 1):
            row = first + i
            mask = _before(row, end, c, C)
            x += (_row(x_ptr, row, x_row, c, mask),)
            g += (_gradient(dy_ptr, row, C, c, mask, x, taps, b, FIXED.SILU),)
            x = x[1:]
        # Past its end, where the last ROWS may reach, a sequence is 0 and so are gradients; another
        # run of the same sequence starts at a multiple of `length`, which is one of ROWS.
        for start in tl.range(first, tl.minimum(end, first + length), ROWS, num_stages=STAGES):
            for i in tl.static_range(ROWS):
                own = start + i
                row = own + W - 1
                mask = _before(row, end, c, C)
                x += (_row(x_ptr, row, x_row, c, mask),)
                g += (_gradient(dy_ptr, row, C, c, mask, x, taps, b, FIXED.SILU),)
                dx = taps[W - 1] * g[0]
                sums = ()
                for tap in tl.static_range(W):
                    if tap < W - 1:
                        dx += taps[tap] * g[W - 1 - tap]
                    sums += (dw[tap] + x[0] * g[W - 1 - tap],)
                dw = sums
                if FIXED.BIAS:
                    db += g[0]
                to = dx_ptr + own * C + c
                tl.store(to, dx.to(dx_ptr.dtype.element_ty), mask=_before(own, end, c, C))
                x, g = x[1:], g[1:]
    to = partial_ptr + p.to(tl.int64) * (W + FIXED.BIAS) * C + c
    for tap in tl.static_range(W):
        tl.store(to + tap * C, dw[tap], mask=in_c)
    if FIXED.BIAS:
        tl.store(to + W * C, db, mask=in_c)


@triton.jit
def _sum_programs(
    partial_ptr,
    dw_ptr,
    db_ptr,
    P,
    C,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """dw [C, W] and db [C]: the sums over the P rows of partial [P, W + BIAS, C], in their order by
    BLOCK_P, rounded once.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    tap = tl.program_id(1)
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for first in range(0, P, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        at = (p.to(tl.int64)[:, None] * (W + BIAS) + tap) * C + c[None, :]
        total += tl.load(partial_ptr + at, mask=(p < P)[:, None] & (c < C)[None, :], other=0.0)
    total = tl.sum(total, axis=0)
    if tap < W:
        tl.store(dw_ptr + c * W + tap, total.to(dw_ptr.dtype.element_ty), mask=c < C)
    elif BIAS:
        tl.store(db_ptr + c, total.to(db_ptr.dtype.element_ty), mask=c < C)


# ---- launches


def _rows(t: torch.Tensor) -> torch.Tensor:
    """[B, S, C] as [B * S, C], with contiguous rows."""
    return last_contiguous(t.reshape(-1, t.shape[-1]))


def _constants(weight, bias, cu_seqlens, silu) -> dict:
    return {"FIXED": _Fixed(weight.shape[1], bias is not None, silu, cu_seqlens is not None)}


class _Walk(NamedTuple):
    """A launch over runs of rows.

    programs: that share the rows of a block of channels.   tiles: the runs, no more than programs
    unless there are more sequences.   numbers: the arguments after the tensors.
    """

    programs: int
    tiles: Tiles
    numbers: tuple[int, ...]


def _walk(kernel, tensors, x, rows, cu_seqlens, **constants) -> _Walk:
    """tensors: the kernel's, in order, with any float32 tensor for the partial sums."""
    (B, S, C), each = x.shape, constants["ROWS"]
    sample = None if cu_seqlens is None else cu_seqlens.new_empty(1, dtype=torch.int32)
    types = (None if t is None else t.dtype for t in (*tensors, cu_seqlens))
    arguments = *tensors, sample, cu_seqlens, 0, 0, 0, 0, C, rows.stride(0)
    P = sharing(
        kernel,
        B * S,
        MIN_RUN,
        cdiv(C, constants["BLOCK_C"]),
        constants.pop("num_warps"),
        x,
        (*types, C % 16, rows.stride(0) % 16),
        *arguments,
        **constants,
    )
    length = cdiv(cdiv(S, max(1, P // B)), each) * each
    if cu_seqlens is not None:  # each length compiles another map of the documents' runs
        length = next_power_of_2(length)
    tiles = tiles_of(B, S, cu_seqlens, length)
    return _Walk(P, tiles, (S, tiles.capacity, tiles.count, length, C, rows.stride(0)))


def forward(x, weight, bias, cu_seqlens, silu):
    y = convolve(x, weight, bias, cu_seqlens, silu)
    if y.numel():
        C, rows = x.shape[-1], _rows(x)
        config = FORWARD.config(x.device, C, x.element_size())
        constants = _constants(weight, bias, cu_seqlens, silu) | config
        tensors = rows, weight, bias, y
        walk = _walk(_forward, tensors, x, rows, cu_seqlens, **constants)
        maps = walk.tiles.map, walk.tiles.cu_seqlens
        grid = cdiv(C, config["BLOCK_C"]), walk.tiles.count
        launch(_forward, grid, *tensors, *maps, *walk.numbers, **constants)
    return y


def backward(dy, x, weight, bias, cu_seqlens, silu):
    gradients = convolve_backward(dy, x, weight, bias, cu_seqlens, silu)
    dx, dweight, dbias = gradients
    if not x.numel():
        for t in (dweight, dbias):
            if t is not None:
                t.zero_()
        return gradients
    (C, W), rows = weight.shape, _rows(x)
    config = BACKWARD.config(x.device, C, x.element_size())
    constants = _constants(weight, bias, cu_seqlens, silu) | config
    tensors, new = (dy.contiguous(), rows, weight, bias, dx), {"dtype": torch.float32}
    walk = _walk(_backward, (*tensors, x.new_empty(1, **new)), x, rows, cu_seqlens, **constants)
    P, sums = min(walk.programs, walk.tiles.count), W + (bias is not None)
    partial = x.new_empty((P, sums, C), **new)
    maps = walk.tiles.map, walk.tiles.cu_seqlens
    grid = cdiv(C, config["BLOCK_C"]), P
    launch(_backward, grid, *tensors, partial, *maps, *walk.numbers, **constants)
    shape = {"W": W, "BIAS": bias is not None}
    grid = cdiv(C, _SUM["BLOCK_C"]), sums
    launch(_sum_programs, grid, partial, dweight, dbias, P, C, **shape, **_SUM)
    return gradients


# ---- launch configurations

_SUM = {"BLOCK_P": 32, "BLOCK_C": 32}  # a warp reads 128 bytes of each row of partial sums
MIN_RUN = 16  # rows, so that those which two runs share are few


def _config(C: int, elements: int, warps: int, stages: int) -> dict:
    """`elements` channels per thread, if there are as many."""
    block = max(32, min(32 * elements * warps, next_power_of_2(C)))
    return {
        "BLOCK_C": block,
        "ROWS": 4,
        "STAGES": stages,
        "num_warps": max(1, min(warps, block // (32 * elements))),
    }


def _forward_heuristic(C: int, itemsize: int) -> dict:
    """One warp, 128 bits of a row per thread. Two times ROWS rows ahead are copied to shared
    memory: 64 KiB in flight in the 16 warps that an SM holds.
    """
    return _config(C, 16 // itemsize, 1, 3)


def _backward_heuristic(C: int, itemsize: int) -> dict:
    """As the forward, but four channels per thread: 64 KiB of x and dy in 16 warps, as 16-bit
    channels on 128 registers. With eight channels they are up to 230, and an SM holds 8 warps.
    """
    return _config(C, 4, 1, 3)


def _space(C: int, itemsize: int) -> list[dict]:
    """STAGES: loop iterations in flight; all but one of them are copies to shared memory."""
    return [
        _config(C, elements, warps, stages)
        for elements in (16 // itemsize, 8 // itemsize)
        for warps in (1, 2)
        for stages in (1, 2, 3)
    ]


def _specs_of(kernel, name: str):
    def specs(key: dict, config: dict) -> list[KernelSpec]:
        data, launches = "bf16" if key["itemsize"] == 2 else "fp32", []
        bits = 8 * key["itemsize"] * config["BLOCK_C"] // (32 * config["num_warps"])
        for label, both in (("", False), (" packed bias", True)):
            types = {"map": "i32", "cu": "i64"} if both else {"map": None, "cu": None}
            types |= {"partial": "fp32", "*": data}
            types |= {} if both else {"b": None}
            launches.append(
                KernelSpec.of(
                    kernel,
                    f"{name}{label} C={key['C']} {data}",
                    types,
                    {"FIXED": _Fixed(4, both, True, both), **config},
                    divisible=("C", "x_row"),
                    # Fewer than 128 bits where a thread has half as many channels, or the row is
                    # narrow; a warp reads 256 bytes at least of a wide one.
                    load=bits,
                    store=bits,
                    elements=config["ROWS"] * config["BLOCK_C"],
                )
            )
        return launches

    return specs


# The convolution of Qwen3-Next-80B-A3B, and a narrow one.
_KEYS = [(C, size) for C in (8192, 64) for size in (2, 4)]
FORWARD = Tunable(
    "causal_conv1d",
    "forward",
    ("C", "itemsize"),
    "forward",
    _forward_heuristic,
    _space,
    _KEYS,
    _specs_of(_forward, "forward"),
)
BACKWARD = Tunable(
    "causal_conv1d",
    "backward",
    ("C", "itemsize"),
    "backward",
    _backward_heuristic,
    _space,
    _KEYS,
    _specs_of(_backward, "backward"),
)
TUNABLES = (FORWARD, BACKWARD)


def gate() -> tuple[KernelSpec, ...]:
    """The sum of the programs' partial sums, whose configuration is not tuned: 16 bytes per thread
    of its input.
    """
    return tuple(
        KernelSpec.of(
            _sum_programs,
            f"sum of dw {t}{' and db' if bias else ''}",
            {"partial": "fp32", "db": t if bias else None, "*": t},
            {"W": 4, "BIAS": bias, **_SUM},
            divisible=("C",),
            # The taps of a channel are neighbors; a program has one.
            store=32 if t == "fp32" else 16,
        )
        for t, bias in (("bf16", False), ("fp32", True))
    )
