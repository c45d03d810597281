"""Grouped GEMMs in Triton, and the fused ones of a mixture-of-experts MLP. The definition is
tilewright/ops/moe/grouped_gemm.py.

Rows are sorted by expert: those of expert e end at offsets[e], and the tail behind offsets[-1]
belongs to none. Everything is computed on the device, so no launch waits for it:

    _map_tiles   the tiles of BLOCK_M rows, none with rows of two experts: expert, first row and
                 end of each.
    _gemm        out[r] = f(x[r] @ w[e(r)]): a persistent grid loops over the tiles. The tail's
                 tiles come last and sum nothing, so that they write zeros.
    _dswiglu     The same f of a product that is in memory.
    _dweight     dweight[e] = the sum over e's rows of dy[r]^T x[r]; one block per tile of dweight.

Operands are read through tensor descriptors (TMA) if possible: 16-bit elements, rows at multiples
of 16 bytes, compute capability 9.0 and up. Gathered rows, float32 and odd strides are read through
pointers. Descriptors of weights have an expert dimension, so that reads past a weight's edge give
zeros and not the next expert's values.

float32 accumulation; no atomics. GATHER: row r is row slots[r] // TOP_K of the matrix, so no
permuted copy is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.kernels.device import dot_precision, has_tma, large_shared_memory, multiprocessors
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv, next_power_of_2
from tilewright.kernels.moe.gated_triton import Outputs, Tokens, gated
from tilewright.kernels.moe.operators import (
    MAP_ROWS,
    SILU_MUL,
    GateConstants,
    Order,
    map_size,
    product,
    product_backward_weight,
    product_backward_x,
)
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import ALONE, Others, Tunable, choose

# What _gemm computes from a tile of x @ w.
PLAIN, SWIGLU, DSWIGLU = 0, 1, 2
TILE_BLOCK = 128  # tiles that `write_tiles` writes at a time: one per thread
# Per program of _router_gradient that reads dy and a bias: 16 elements per thread, two 128-bit
# loads of 16 bits.
_SLOTS, _COLUMNS = 8, 256
# Per program of _dswiglu: 8 elements per thread, a 128-bit load of 16 bits each.
_DSWIGLU = {"ROWS": 4, "COLUMNS": 256}


@triton.jit
def write_tiles(
    e,
    offsets_ptr,
    tiles_ptr,
    E,
    R,
    capacity,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Writes expert e's tiles; with e = E the tail's and the total number, which it returns.

    tiles: experts [capacity], first rows [capacity], ends [capacity], number of tiles. Invalid
    offsets are clamped so that no access leaves the tensors, also where they would need more than
    2^31 tiles.
    """
    i = tl.arange(0, EXPERTS)
    end = tl.minimum(tl.maximum(tl.load(offsets_ptr + i, mask=i < E, other=R), 0), R)
    begin = tl.load(offsets_ptr + i - 1, mask=(i > 0) & (i <= E), other=0)
    begin = tl.minimum(tl.maximum(begin, 0), R)
    n = tl.where(i <= E, (tl.maximum(end - begin, 0).to(tl.int64) + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(i < e, n, 0))
    mine = tl.minimum(tl.sum(tl.where(i == e, n, 0)), tl.maximum(capacity - first, 0)).to(tl.int32)
    row = tl.sum(tl.where(i == e, begin, 0))
    stop = tl.sum(tl.where(i == e, end, 0))
    for j in range(0, mine, BLOCK):
        t = j + tl.arange(0, BLOCK)
        to = tiles_ptr + first + t
        mask = t < mine
        tl.store(to, tl.zeros((BLOCK,), tl.int32) + e, mask=mask)
        tl.store(to + capacity, (row + t * BLOCK_M).to(tl.int32), mask=mask)
        tl.store(to + 2 * capacity, (tl.zeros((BLOCK,), tl.int32) + stop).to(tl.int32), mask=mask)
    count = tl.minimum(first + mine, capacity).to(tl.int32)
    if e == E:
        tl.store(tiles_ptr + 3 * capacity, count)
    return count


@triton.jit(do_not_specialize=["R", "capacity"])
def _map_tiles(
    offsets_ptr,
    tiles_ptr,
    E,
    R,
    capacity,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """A program for each expert, and one for the tail."""
    e = tl.program_id(0)
    write_tiles(e, offsets_ptr, tiles_ptr, E, R, capacity, BLOCK_M, BLOCK, EXPERTS)


@triton.jit
def _halves(t, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and right halves of a tile, in registers."""
    return tl.split(tl.permute(tl.reshape(t, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _h_epilogue(gate, up, h_ptr, r, live, c, N, GATE: tl.constexpr):
    """h of a gate and an up, rounded as they are in memory."""
    a, _, v, _ = gated(gate.to(tl.float32), up.to(tl.float32), GATE)
    tl.store(
        h_ptr + r[:, None] * N + c[None, :],
        (a * v).to(h_ptr.dtype.element_ty),
        mask=live[:, None] & (c < N)[None, :],
    )


@triton.jit
def _halves_epilogue(
    gate, up, pre_ptr, h_ptr, r, live, c, N, STORE_PRE: tl.constexpr, GATE: tl.constexpr
):
    gate, up = gate.to(h_ptr.dtype.element_ty), up.to(h_ptr.dtype.element_ty)
    if STORE_PRE:
        mask = live[:, None] & (c < N)[None, :]
        at = pre_ptr + r[:, None] * (2 * N) + c[None, :]
        tl.store(at, gate, mask=mask)
        tl.store(at + N, up, mask=mask)
    _h_epilogue(gate, up, h_ptr, r, live, c, N, GATE)


@triton.jit
def _pairs_epilogue(
    acc, pre_ptr, h_ptr, r, live, n, N, STORE_PRE: tl.constexpr, GATE: tl.constexpr
):
    """Stores interleaved gates and ups, from column 2 n of pre on, and their h."""
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    acc = acc.to(h_ptr.dtype.element_ty)
    if STORE_PRE:
        both = 2 * n + tl.arange(0, COLUMNS)
        tl.store(
            pre_ptr + r[:, None] * (2 * N) + both[None, :],
            acc,
            mask=live[:, None] & (both < 2 * N)[None, :],
        )
    gate, up = tl.split(tl.reshape(acc, (ROWS, COLUMNS // 2, 2)))
    _h_epilogue(gate, up, h_ptr, r, live, n + tl.arange(0, COLUMNS // 2), N, GATE)


@triton.jit
def _dgate_epilogue(
    dh, memory, rows, n, N, STORE_H: tl.constexpr, GATE: tl.constexpr, SPLIT: tl.constexpr
):
    """From dh, the gradient of the unweighted h, columns from n on: writes the gradient of the
    pre-activation and, with STORE_H, scale * h. Returns <dh, h> per row.

    memory: where the pre-activation, its gradient and scale * h are.
    rows: their numbers, which exist, whose pre-activation was written (the tail's is not read), and
        scale.

    In SPLIT pieces, one after the other: the barrier keeps the loads of a piece, and their
    registers, behind the previous piece.
    """
    ROWS: tl.constexpr = dh.shape[0]
    COLUMNS: tl.constexpr = dh.shape[1]
    if SPLIT > 1:
        HALF: tl.constexpr = COLUMNS // 2
        left, right = _halves(dh, ROWS, COLUMNS)
        dot = _dgate_epilogue(left, memory, rows, n, N, STORE_H, GATE, SPLIT // 2)
        tl.debug_barrier()
        dot += _dgate_epilogue(right, memory, rows, n + HALF, N, STORE_H, GATE, SPLIT // 2)
    else:
        pre_ptr, dpre_ptr, hw_ptr = memory
        r, live, known, scale = rows
        dtype: tl.constexpr = dpre_ptr.dtype.element_ty
        c = n + tl.arange(0, COLUMNS)
        inside = (c < N)[None, :]
        mask = live[:, None] & inside
        if GATE.INTERLEAVED:
            both = 2 * n + tl.arange(0, 2 * COLUMNS)
            at = r[:, None] * (2 * N) + both[None, :]
            there = (both < 2 * N)[None, :]
            pre = tl.load(pre_ptr + at, mask=known[:, None] & there, other=0.0)
            g, u = tl.split(tl.reshape(pre, (ROWS, COLUMNS, 2)))
        else:
            at = r[:, None] * (2 * N) + c[None, :]
            g = tl.load(pre_ptr + at, mask=known[:, None] & inside, other=0.0)
            u = tl.load(pre_ptr + N + at, mask=known[:, None] & inside, other=0.0)
        a, da, v, dv = gated(g.to(tl.float32), u.to(tl.float32), GATE)
        d = scale[:, None] * dh
        dg, du = (d * v * da).to(dtype), (d * a * dv).to(dtype)
        if GATE.INTERLEAVED:
            dpre = tl.reshape(tl.join(dg, du), (ROWS, 2 * COLUMNS))
            tl.store(dpre_ptr + at, dpre, mask=live[:, None] & there)
        else:
            tl.store(dpre_ptr + N + at, du, mask=mask)
            tl.store(dpre_ptr + at, dg, mask=mask)
        h = a * v
        if STORE_H:
            # h is rounded before it is weighted: that was the down-projection's input.
            hw = scale[:, None] * h.to(dtype).to(tl.float32)
            tl.store(hw_ptr + r[:, None] * N + c[None, :], hw.to(dtype), mask=mask)
        dot = tl.sum(tl.where(inside, dh * h, 0.0), axis=1)
    return dot


@triton.jit(do_not_specialize=["capacity"])
def _gemm(
    x,
    w,
    out_ptr,
    pre_ptr,
    hw_ptr,
    partial_ptr,
    tiles_ptr,
    slots_ptr,
    weight_ptr,
    bias_ptr,
    E,
    capacity,
    N,
    K,
    x_stride,
    w_expert_stride,
    w_stride,
    TOP_K,
    GATHER: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EPILOGUE: tl.constexpr,
    STORE_PRE: tl.constexpr,
    STORE_H: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_W: tl.constexpr,
    PRECISION: tl.constexpr,
    MAP_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """N: columns of the result.   K: the summed dimension.   x: [rows, K], pointer or descriptor.

    w: [E, N, K], or TRANSPOSED [E, K, N]. With SWIGLU [E, 2 N, K], gates first: a tile of BLOCK_N
        columns has half gates and half the matching ups, BLOCK_N // 2 columns of h; its descriptor
        is [E, 2, N, K].
    GATE: defines h, see `gated`. INTERLEAVED: rows of w are gate, up, gate, up, ..., as are columns
        of pre and of its gradient.
    BIAS: bias [E, N], with SWIGLU [E, 2 N] in the order of w's rows, is added to x @ w before
        rounding.
    PLAIN: out [rows, N] = x @ w.
    SWIGLU: out [rows, N] = h, and with STORE_PRE pre [rows, 2 N] = x @ w.
    DSWIGLU: x @ w is the gradient of h, without the row's router weight. pre is read, out [rows, 2
        N] is its gradient, partial [rows, tiles of N] = <x @ w, h> over the tile, and with STORE_H
        hw [rows, N] = router weight * h.
    MAP_ROWS: rows per tile of the map, computed in MAP_ROWS // BLOCK_M pieces; those past its end
        do nothing.
    SPLIT: pieces of a tile in DSWIGLU, to save registers.
    """
    # Columns of N per tile.
    WIDE: tl.constexpr = BLOCK_N // 2 if EPILOGUE == 1 else BLOCK_N
    HALVES: tl.constexpr = EPILOGUE == 1 and not GATE.INTERLEAVED
    i = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    PIECES: tl.constexpr = MAP_ROWS // BLOCK_M
    m_tiles = tl.load(tiles_ptr + 3 * capacity) * PIECES
    n_tiles = tl.cdiv(N, WIDE)
    for t in range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0)):
        # Blocks that run together share GROUP tiles of rows and a few of columns: L2 holds their
        # operands.
        first = t // (GROUP * n_tiles) * GROUP
        height = tl.minimum(m_tiles - first, GROUP)
        inside = t - first * n_tiles
        m = first + inside % height
        n_tile = inside // height
        n = n_tile * WIDE
        e = tl.load(tiles_ptr + m // PIECES)
        row = tl.load(tiles_ptr + capacity + m // PIECES) + m % PIECES * BLOCK_M
        end = tl.load(tiles_ptr + 2 * capacity + m // PIECES)
        live = row + i < end
        r = (row + i).to(tl.int64)
        if GATHER:
            slot = tl.load(slots_ptr + r, mask=live, other=0)
            source = (slot // TOP_K).to(tl.int64)
        else:
            source = r
        if not TMA_X:
            x_at = x + source[:, None] * x_stride + ks[None, :]
        # Rows of w: the tile's first, all, and those that exist.
        start = n_tile * BLOCK_N
        if HALVES:  # row j of the tile: gate n + j, or up n + j - WIDE
            column = tl.where(j < WIDE, n + j, N + n + j - WIDE)
            there = n + j % WIDE < N
        else:
            column = start + j
            there = column < (2 * N if EPILOGUE == 1 else N)
        if not TMA_W:
            w_at = w + e.to(tl.int64) * w_expert_stride
            if TRANSPOSED:
                w_at += ks.to(tl.int64)[:, None] * w_stride + column[None, :]
            else:
                w_at += column.to(tl.int64)[None, :] * w_stride + ks[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, tl.where((e < E) & (row < end), K, 0), BLOCK_K):
            if TMA_X:
                a = x.load([row, k])
            else:
                a = tl.load(x_at + k, mask=live[:, None] & (k + ks < K)[None, :], other=0.0)
            if TMA_W:
                if HALVES:
                    b = tl.reshape(w.load([e, 0, n, k]), (BLOCK_N, BLOCK_K)).T
                elif TRANSPOSED:
                    b = tl.reshape(w.load([e, k, start]), (BLOCK_K, BLOCK_N))
                else:
                    b = tl.reshape(w.load([e, start, k]), (BLOCK_N, BLOCK_K)).T
            else:
                b = tl.load(w_at, mask=(k + ks < K)[:, None] & there[None, :], other=0.0)
                if TRANSPOSED:
                    w_at += BLOCK_K * w_stride
                else:
                    w_at += BLOCK_K
            acc = tl.dot(a, b, acc, input_precision=PRECISION)

        if BIAS:
            bias_at = bias_ptr + e.to(tl.int64) * (2 * N if EPILOGUE == 1 else N) + column
            acc += tl.load(bias_at, mask=there & (j * 0 + e < E), other=0.0).to(tl.float32)[None, :]
        if EPILOGUE == 0:
            c = n + j
            tl.store(
                out_ptr + r[:, None] * N + c[None, :],
                acc.to(out_ptr.dtype.element_ty),
                mask=live[:, None] & (c < N)[None, :],
            )
        elif EPILOGUE == 1:
            if GATE.INTERLEAVED:
                _pairs_epilogue(acc, pre_ptr, out_ptr, r, live, n, N, STORE_PRE, GATE)
            else:
                gate, up = _halves(acc, BLOCK_M, BLOCK_N)
                c = n + tl.arange(0, WIDE)
                _halves_epilogue(gate, up, pre_ptr, out_ptr, r, live, c, N, STORE_PRE, GATE)
        else:
            known = live & (i * 0 + e < E)
            scale = tl.load(weight_ptr + slot, mask=known, other=0.0)
            memory, rows = (pre_ptr, out_ptr, hw_ptr), (r, live, known, scale)
            dot = _dgate_epilogue(acc, memory, rows, n, N, STORE_H, GATE, SPLIT)
            tl.store(partial_ptr + r * n_tiles + n_tile, dot, mask=live)


@triton.jit(do_not_specialize=["R"])
def _dswiglu(
    dh_ptr,
    pre_ptr,
    dpre_ptr,
    hw_ptr,
    partial_ptr,
    slots_ptr,
    weight_ptr,
    offsets_ptr,
    E,
    R,
    N,
    STORE_H: tl.constexpr,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """What `_gemm` computes with DSWIGLU, from dh [R, N] in memory."""
    tiles = tl.cdiv(N, COLUMNS)
    tile = tl.program_id(0) % tiles
    r = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = r < R
    known = r < tl.minimum(tl.load(offsets_ptr + E - 1), R)
    slot = tl.load(slots_ptr + r, mask=live, other=0)
    scale = tl.load(weight_ptr + slot, mask=known, other=0.0)
    n = tile * COLUMNS
    c = n + tl.arange(0, COLUMNS)
    dh = tl.load(
        dh_ptr + r[:, None] * N + c[None, :], mask=live[:, None] & (c < N)[None, :], other=0.0
    )
    memory, rows = (pre_ptr, dpre_ptr, hw_ptr), (r, live, known, scale)
    dot = _dgate_epilogue(dh.to(tl.float32), memory, rows, n, N, STORE_H, GATE, 1)
    tl.store(partial_ptr + r * tiles + tile, dot, mask=live)


@triton.jit(do_not_specialize=["R"])
def _dweight(
    dy,
    x,
    out_ptr,
    offsets_ptr,
    slots_ptr,
    R,
    N,
    K,
    dy_stride,
    x_stride,
    TOP_K,
    GATHER_DY: tl.constexpr,
    GATHER_X: tl.constexpr,
    TMA_DY: tl.constexpr,
    TMA_X: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out [E, N, K].   dy: [rows, N], x: [rows, K], pointers or descriptors."""
    n_tiles, k_tiles = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    e = tl.program_id(0) // (n_tiles * k_tiles)
    t = tl.program_id(0) - e * (n_tiles * k_tiles)
    first = t // (GROUP * k_tiles) * GROUP
    height = tl.minimum(n_tiles - first, GROUP)
    inside = t - first * k_tiles
    n = (first + inside % height) * BLOCK_N
    k = inside // height * BLOCK_K
    begin = tl.minimum(tl.maximum(tl.load(offsets_ptr + e - 1, mask=e > 0, other=0), 0), R)
    end = tl.minimum(tl.maximum(tl.load(offsets_ptr + e), begin), R)
    ns, ks, rs = n + tl.arange(0, BLOCK_N), k + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    whole = begin + (end - begin) // BLOCK_R * BLOCK_R
    for r in range(begin, whole, BLOCK_R):
        if GATHER_DY or GATHER_X:
            source = (tl.load(slots_ptr + r + rs) // TOP_K).to(tl.int64)
        if TMA_DY:
            g = dy.load([r, n])
        else:
            at = source if GATHER_DY else (r + rs).to(tl.int64)
            g = tl.load(
                dy + at[:, None] * dy_stride + ns[None, :], mask=(ns < N)[None, :], other=0.0
            )
        if TMA_X:
            a = x.load([r, k])
        else:
            at = source if GATHER_X else (r + rs).to(tl.int64)
            a = tl.load(x + at[:, None] * x_stride + ks[None, :], mask=(ks < K)[None, :], other=0.0)
        acc = tl.dot(tl.trans(g), a, acc, input_precision=PRECISION)
    if whole < end:
        # Rows past the expert's end are another's, or the tail's: both factors become 0, since 0 *
        # NaN is NaN.
        live = whole + rs < end
        if GATHER_DY or GATHER_X:
            source = (tl.load(slots_ptr + whole + rs, mask=live, other=0) // TOP_K).to(tl.int64)
        if TMA_DY:
            g = dy.load([whole, n])
            g = tl.where(live[:, None], g, tl.zeros_like(g))
        else:
            at = source if GATHER_DY else (whole + rs).to(tl.int64)
            g = tl.load(
                dy + at[:, None] * dy_stride + ns[None, :],
                mask=live[:, None] & (ns < N)[None, :],
                other=0.0,
            )
        if TMA_X:
            a = x.load([whole, k])
            a = tl.where(live[:, None], a, tl.zeros_like(a))
        else:
            at = source if GATHER_X else (whole + rs).to(tl.int64)
            a = tl.load(
                x + at[:, None] * x_stride + ks[None, :],
                mask=live[:, None] & (ks < K)[None, :],
                other=0.0,
            )
        acc = tl.dot(tl.trans(g), a, acc, input_precision=PRECISION)
    to = out_ptr + (e * N + ns).to(tl.int64)[:, None] * K + ks[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(ns < N)[:, None] & (ks < K)[None, :])


@triton.jit(do_not_specialize=["SLOTS"])
def _router_gradient(
    partial_ptr,
    position_ptr,
    out_ptr,
    dy_ptr,
    bias_ptr,
    offsets_ptr,
    SLOTS,
    tiles,
    E,
    H,
    dy_stride,
    TOP_K,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """out[s] = the sum of row position[s] of partial [rows, tiles], and with BIAS <dy[s // TOP_K],
    bias[e]> of its expert; 0 where position[s] < 0. dy: [T, H].   bias: [E, H].
    """
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(position_ptr + s, mask=s < SLOTS, other=-1)
    t = tl.arange(0, TILES)
    mask = (position >= 0)[:, None] & (t < tiles)[None, :]
    partial = tl.load(
        partial_ptr + position.to(tl.int64)[:, None] * tiles + t[None, :], mask=mask, other=0.0
    )
    dot = tl.sum(partial, axis=1)
    if BIAS:
        i = tl.arange(0, EXPERTS)
        ends = tl.load(offsets_ptr + i, mask=i < E, other=2147483647)
        e = tl.sum((ends[None, :] <= position[:, None]).to(tl.int64), axis=1)
        dy_at = dy_ptr + (s // TOP_K).to(tl.int64) * dy_stride
        for k in range(0, H, COLUMNS):
            c = k + tl.arange(0, COLUMNS)
            inside = (position >= 0)[:, None] & (c < H)[None, :]
            d = tl.load(dy_at[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32)
            b = tl.load(bias_ptr + (e * H)[:, None] + c[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
            dot += tl.sum(d * b, axis=1)
    tl.store(out_ptr + s, dot, mask=s < SLOTS)


# ---- launches


def _aligned(*tensors: torch.Tensor) -> bool:
    """Whether rows start at multiples of 16 elements: what Triton detects for wide loads, and more
    than the 16 bytes that descriptors need.
    """
    return all(
        t.data_ptr() % 16 == 0 and all(s % 16 == 0 and s > 0 for s in t.stride()[:-1])
        for t in tensors
    )


def _fits(x: torch.Tensor, w: torch.Tensor, N: int) -> bool:
    """`_aligned` for all operands of a `_gemm`, whose results have rows of N or 2 N."""
    return _aligned(x, w) and N % 16 == 0


def _by_tma(t: torch.Tensor, aligned: bool) -> bool:
    return aligned and t.element_size() == 2 and has_tma(t.device)


def _rows(t: torch.Tensor) -> torch.Tensor:
    """A matrix with contiguous rows that do not overlap; a copy only if t is not one."""
    return t if t.stride(1) == 1 and t.stride(0) >= t.shape[1] else t.contiguous()


def _weights(w: torch.Tensor, transposed: bool) -> tuple[torch.Tensor, bool]:
    """w with contiguous rows, and whether those run along the result's columns."""
    if w.stride(2) != 1 and w.stride(1) == 1:
        w, transposed = w.mT, not transposed
    fits = w.stride(2) == 1 and w.stride(1) >= w.shape[2] and w.stride(0) >= w.shape[1] * w.shape[2]
    return (w if fits else w.contiguous()), transposed


def _key(N: int, K: int, x: torch.Tensor, rows: int, experts: int, aligned: bool) -> tuple:
    """A Tunable's key. rows: per average expert, as a power of two up to 1,024, so that token
    counts share few keys.
    """
    average = min(1024, next_power_of_2(max(1, rows // experts)))
    return N, K, x.element_size(), average, aligned, large_shared_memory(x.device)


def tile_map(offsets: torch.Tensor, rows: int, block: int = MAP_ROWS) -> torch.Tensor:
    """Tiles of `block` rows, for `_gemm` and for attention; entries past the last are not
    written. `permute_triton.sort_and_map` writes the same beside the order of rows.
    """
    E = offsets.shape[0]
    tiles = torch.empty(map_size(rows, E, block), dtype=torch.int32, device=offsets.device)
    capacity = tiles.shape[0] // 3
    launch(
        _map_tiles,
        (E + 1,),
        offsets,
        tiles,
        E,
        rows,
        capacity,
        BLOCK_M=block,
        BLOCK=TILE_BLOCK,
        EXPERTS=next_power_of_2(E + 1),
    )
    return tiles


# Long: one launch, whose arguments are half of it.
def _launch(
    tunable,
    x,
    weights,
    tokens,
    outputs,
    epilogue=PLAIN,
    *,
    router_weight=None,
    bias=None,
    gate=SILU_MUL,
    others=ALONE,
):
    """Launches one `_gemm`. x is a matrix with contiguous rows, weights are from `_weights`, and
    bias is a contiguous matrix or None.
    """
    w, transposed = weights
    offsets, slots, top_k, tiles = tokens
    out, pre, hw, partial = outputs
    rows, K = x.shape[0] if slots is None else slots.shape[0], x.shape[1]
    N = w.shape[2 if transposed else 1]
    if epilogue == SWIGLU:
        N //= 2
    E = offsets.shape[0]
    aligned = _fits(x, w, N)
    key = _key(N, K, x, rows, E, aligned)
    if "plain" in tunable.fields:
        key = (*key, gate == SILU_MUL and bias is None)
    tma = _by_tma(x, aligned)
    halves = epilogue == SWIGLU and not gate.INTERLEAVED
    tma_x, tma_w = tma and slots is None, tma and not (halves and transposed)
    config, run = choose(tunable, others, x.device, key, tma_w)
    c = {n: v for n, v in config.items() if v is not None}
    tiles = tile_map(offsets, rows) if tiles is None else tiles
    blocks = multiprocessors(x.device) * c.pop("per_sm")
    wide = c["BLOCK_N"] // 2 if epilogue == SWIGLU else c["BLOCK_N"]
    capacity = tiles.shape[0] // 3
    grid = min(blocks, capacity * (MAP_ROWS // c["BLOCK_M"]) * cdiv(N, wide))
    if run is not None:
        tokens = tokens._replace(tiles=tiles)
        run(grid, x, w, transposed, tokens, outputs, bias, epilogue, gate, c)
        return
    x_stride, w_stride = x.stride(0), w.stride(1)
    expert_stride = w.stride(0)
    if tma_x:
        x = TensorDescriptor.from_tensor(x, [c["BLOCK_M"], c["BLOCK_K"]])
    if tma_w:
        block = [c["BLOCK_K"], c["BLOCK_N"]] if transposed else [c["BLOCK_N"], c["BLOCK_K"]]
        if halves:
            w, block = w.unflatten(1, (2, N)), [2, wide, c["BLOCK_K"]]
        w = TensorDescriptor.from_tensor(w, [1, *block])
    launch(
        _gemm,
        (grid,),
        x,
        w,
        out,
        pre,
        hw,
        partial,
        tiles,
        slots,
        router_weight,
        bias,
        E,
        capacity,
        N,
        K,
        x_stride,
        expert_stride,
        w_stride,
        top_k,
        GATHER=slots is not None,
        TRANSPOSED=transposed,
        EPILOGUE=epilogue,
        STORE_PRE=pre is not None,
        STORE_H=hw is not None,
        BIAS=bias is not None,
        TMA_X=tma_x,
        TMA_W=tma_w,
        PRECISION=dot_precision(out),
        MAP_ROWS=MAP_ROWS,
        GATE=gate,
        **c,
    )


def _product(tunable, out, x, weight, transposed, tokens, bias=None, others=ALONE):
    if out.numel() and x.shape[1] == 0:
        return out.zero_()
    if out.numel():
        bias = None if bias is None else bias.contiguous()
        weights = _weights(weight, transposed)
        _launch(tunable, _rows(x), weights, tokens, Outputs(out), bias=bias, others=others)
    return out


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    tiles: torch.Tensor | None = None,
    others: Others = ALONE,
) -> torch.Tensor:
    """y [R, N] from x [R, K], weight [E, N, K] and optional bias [E, N], which needs K > 0; zeros
    in the tail. tiles: `tile_map` of the offsets; None: computed here.
    """
    y = product(x, weight, offsets)
    return _product(FORWARD, y, x, weight, False, Tokens(offsets, tiles=tiles), bias, others)


def backward_x(
    dy: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor | None = None,
    others: Others = ALONE,
) -> torch.Tensor:
    """dx [R, K] from dy [R, N] and weight [E, N, K]; zeros in the tail. tiles: as in `forward`."""
    dx = product_backward_x(dy, weight, offsets)
    tokens = Tokens(offsets, tiles=tiles)
    return _product(BACKWARD_X, dx, dy, weight, True, tokens, others=others)


def backward_weight(
    dy: torch.Tensor,
    x: torch.Tensor,
    offsets: torch.Tensor,
    slots: torch.Tensor | None = None,
    top_k: int = 1,
    gather: str = "x",
    others: Others = ALONE,
) -> torch.Tensor:
    """dweight [E, N, K] from dy [R, N] and x [R, K]; zeros for an expert without rows.

    slots [R] int32: row r of the operand named by `gather` ("x" or "dy") is its row slots[r] //
        top_k.
    """
    dy, x = _rows(dy), _rows(x)
    E, N, K = offsets.shape[0], dy.shape[1], x.shape[1]
    rows = dy.shape[0] if slots is None else slots.shape[0]
    out = product_backward_weight(dy, x, offsets)
    if out.numel() == 0:
        return out
    if rows == 0:
        return out.zero_()
    gathers = {"dy": slots is not None and gather == "dy", "x": slots is not None and gather == "x"}
    aligned = _aligned(dy, x)
    descriptors = _by_tma(dy, aligned)
    key = _key(N, K, dy, rows, E, aligned)
    c, run = choose(BACKWARD_WEIGHT, others, dy.device, key, descriptors)
    if run is not None:
        run(dy, x, out, offsets, slots, rows, top_k, gathers, c)
        return out
    c = c if slots is None else _gathered(c)
    tma = {n: descriptors and not gathered for n, gathered in gathers.items()}
    grid = E * cdiv(N, c["BLOCK_N"]) * cdiv(K, c["BLOCK_K"])
    launch(
        _dweight,
        (grid,),
        TensorDescriptor.from_tensor(dy, [c["BLOCK_R"], c["BLOCK_N"]]) if tma["dy"] else dy,
        TensorDescriptor.from_tensor(x, [c["BLOCK_R"], c["BLOCK_K"]]) if tma["x"] else x,
        out,
        offsets,
        slots,
        rows,
        N,
        K,
        dy.stride(0),
        x.stride(0),
        top_k,
        GATHER_DY=gathers["dy"],
        GATHER_X=gathers["x"],
        TMA_DY=tma["dy"],
        TMA_X=tma["x"],
        PRECISION=dot_precision(dy),
        **c,
    )
    return out


def _gathered(config: dict) -> dict:
    """The launch configuration of `_dweight` for gathered rows, whose indices Triton loads in
    separate stages: with as many stages it would keep half as many tiles in flight.
    """
    return {**config, "num_stages": 2 * config["num_stages"] - 1}


# ---- launches of a mixture-of-experts MLP


def up_swiglu(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    order: Order,
    keep_pre: bool,
    bias: torch.Tensor | None = None,
    gate: GateConstants = SILU_MUL,
    tiles: torch.Tensor | None = None,
    others: Others = ALONE,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(pre [R, 2 I] or None, h [R, I]) from x [T, H] and gate_up_proj [E, 2 I, H], gates first or
    interleaved.

    pre = x[token] @ gate_up_proj[e]^T + bias[e], rounded once; h = silu(gate) * up of the rounded
    pre, or as `gate` defines it. Zeros in the tail. R, I and H are not 0.
    """
    offsets, slots, position = order
    rows, N = slots.shape[0], gate_up_proj.shape[1] // 2
    pre = torch.empty((rows, 2 * N), dtype=x.dtype, device=x.device) if keep_pre else None
    h = torch.empty((rows, N), dtype=x.dtype, device=x.device)
    _launch(
        UP_SWIGLU,
        _rows(x),
        _weights(gate_up_proj, False),
        Tokens(offsets, slots, position.shape[1], tiles),
        Outputs(h, pre),
        SWIGLU,
        bias=None if bias is None else bias.contiguous(),
        gate=gate,
        others=others,
    )
    return pre, h


def down_dswiglu(
    dy: torch.Tensor,
    down_proj: torch.Tensor,
    pre: torch.Tensor,
    expert_weight: torch.Tensor,
    order: Order,
    keep_h: bool,
    bias: torch.Tensor | None = None,
    gate: GateConstants = SILU_MUL,
    tiles: torch.Tensor | None = None,
    others: Others = ALONE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dpre [R, 2 I], dexpert_weight [T, K] fp32, weighted h [R, I] or None) of a MoE MLP.

    dy [T, H]: the gradient of the layer's result.
    down_proj [E, H, I].
    pre [R, 2 I]: contiguous, as `up_swiglu` saved it.
    expert_weight [T, K] fp32.
    bias [E, H]: the down-projection's bias.
    gate: as in `up_swiglu`.

    With dh = dy[token] @ down_proj[e], which is stored only where the launch configuration has no
    pieces (SPLIT 0): dexpert_weight = <dh, h> + <dy[token],
    bias[e]>, and dpre is the gradient for weight * dh. weight * h is the input of down_proj's
    gradient: backward_weight(dy, weighted h, ..., "dy"). Zeros in the tail and for sentinels. R, I
    and H are not 0.
    """
    offsets, slots, position = order
    rows, K, N = slots.shape[0], dy.shape[1], down_proj.shape[2]
    dpre = torch.empty_like(pre)
    hw = torch.empty((rows, N), dtype=dy.dtype, device=dy.device) if keep_h else None
    dy = _rows(dy)
    weights = _weights(down_proj, True)
    aligned = _fits(dy, weights[0], N)
    key = _key(N, K, dy, rows, offsets.shape[0], aligned)
    c, _ = choose(DOWN_DSWIGLU, others, dy.device, key, _by_tma(dy, aligned))
    parts = cdiv(N, c["BLOCK_N"] if c["SPLIT"] else _DSWIGLU["COLUMNS"])
    partial = torch.empty((rows, parts), dtype=torch.float32, device=dy.device)
    operands = dy, weights, Tokens(offsets, slots, position.shape[1], tiles)
    if c["SPLIT"]:
        outputs = Outputs(dpre, pre, hw, partial)
        more = {"router_weight": expert_weight, "gate": gate, "others": others}
        _launch(DOWN_DSWIGLU, *operands, outputs, DSWIGLU, **more)
    else:
        dh = torch.empty((rows, N), dtype=dy.dtype, device=dy.device)
        _launch(DOWN_DSWIGLU, *operands, Outputs(dh), others=others)
        launch(
            _dswiglu,
            (cdiv(rows, _DSWIGLU["ROWS"]) * parts,),
            dh,
            pre,
            dpre,
            hw,
            partial,
            slots,
            expert_weight,
            offsets,
            offsets.shape[0],
            rows,
            N,
            STORE_H=keep_h,
            GATE=gate,
            **_DSWIGLU,
            num_warps=4,
        )
    return dpre, _router_weight_gradient(partial, order, dy, bias), hw


def _router_weight_gradient(partial, order, dy, bias):
    """[T, K] fp32: the sums of partial [R, parts], plus <dy[token], bias[e]>."""
    offsets, _, position = order
    dweight = torch.empty(position.shape, dtype=torch.float32, device=dy.device)
    parts, E = partial.shape[1], offsets.shape[0]
    columns = next_power_of_2(parts)
    block = max(1, 1024 // columns) if bias is None else _SLOTS
    launch(
        _router_gradient,
        (cdiv(dweight.numel(), block),),
        partial,
        position,
        dweight,
        None if bias is None else dy,
        None if bias is None else bias.contiguous(),
        None if bias is None else offsets,
        dweight.numel(),
        parts,
        E,
        dy.shape[1],
        dy.stride(0),
        position.shape[1],
        BIAS=bias is not None,
        BLOCK=block,
        TILES=columns,
        COLUMNS=_COLUMNS,
        EXPERTS=next_power_of_2(E),
    )
    return dweight


# ---- launch configurations


def _constants(m, n, k, warps, stages, per_sm, group=8, split=1, maxnreg=None) -> dict:
    """per_sm: blocks per SM, all of which run at once; the compile gate checks it."""
    return {
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": k,
        "GROUP": group,
        "SPLIT": split,
        "per_sm": per_sm,
        "num_warps": warps,
        "num_stages": stages,
        "maxnreg": maxnreg,
    }


# Without alignment each element is loaded separately, through registers. float32 is multiplied
# without tensor cores.
_ODD = _constants(64, 64, 32, 4, 2, 2)
_FP32 = _constants(64, 64, 32, 4, 3, 2)
_PAIR = _constants(128, 128, 64, 8, 3, 2, maxnreg=128)


def _gemm_heuristic(
    N: int, K: int, itemsize: int, rows: int, aligned: bool, large: bool, plain: bool = True
) -> dict:
    """With `large`, tiles of 128 x 256, which read their operands from L2 half as often, if K is
    long enough that filling the pipeline and writing the tile take little time. Else 96 KiB of
    operands in flight: two blocks per SM, one of which multiplies while the other fills or writes;
    on sm_120, one. Two may have 128 registers per thread, which Triton exceeds by a few unless they
    are the limit; with a bias, it spills then for sm_100.
    """
    if itemsize == 4:
        # With 32 columns of K per step and a bias, ptxas 12.9 spills 8 bytes for sm_120.
        return _FP32 if large else {**_FP32, "BLOCK_K": 16}
    if not aligned:
        return _ODD
    if rows <= 64:
        return _constants(64, 128, 64, 4, 4, 2 if large else 1)
    if not large:
        return _constants(128, 128, 64, 8, 3, 1)
    if K > 1024 and N > 1024:
        return _constants(128, 256, 64, 8, 4, 1)
    return _PAIR if plain else _constants(128, 128, 64, 8, 5, 1)


def _gemm_space(
    N: int, K: int, itemsize: int, rows: int, aligned: bool, large: bool, plain: bool = True
) -> list[dict]:
    if itemsize == 4 or not aligned:
        k = 16 if itemsize == 4 and not large else 32  # as in the heuristic
        return [
            _constants(m, n, k, 4, stages, 2)
            for m, n in ((32, 64), (64, 64), (64, 32))
            for stages in (2, 3)
        ]
    two = 2 if large else 1  # blocks with 96 KiB of operands
    shapes = [
        (64, 128, 64, 4, 4, two),
        (64, 256, 64, 4, 2, 1),
        (128, 128, 64, 4, 3, two),
        (128, 128, 64, 8, 3, two),
        (128, 64, 64, 4, 4, two),
        (128, 256, 64, 8, 2, 1),
        (128, 256, 32, 8, 4, 1),
    ]
    if large:
        shapes += [
            (128, 256, 64, 8, 3, 1),
            (128, 256, 64, 8, 4, 1),
            (128, 128, 64, 8, 5, 1),
            (64, 256, 64, 4, 4, 1),
        ]
    configs = [_constants(*shape, group) for shape in shapes for group in (4, 8, 16)]
    return configs + [{**_PAIR, "GROUP": group} for group in (4, 8, 16) if large]


def _up_heuristic(
    N: int, K: int, itemsize: int, rows: int, aligned: bool, large: bool, plain: bool
) -> dict:
    """A tile's columns are gates and ups. Two blocks per SM: one multiplies while the other writes
    pre and h, which are as many bytes as it has read. Other gates need 178 to 244 registers: one
    block, with more stages, which load the next tile's operands while it writes.
    """
    if itemsize == 4 or not aligned or rows <= 64 or not large:
        return _gemm_heuristic(N, K, itemsize, rows, aligned, large)
    return _PAIR if plain else _constants(128, 128, 64, 8, 5, 1)


def _up_space(
    N: int, K: int, itemsize: int, rows: int, aligned: bool, large: bool, plain: bool
) -> list[dict]:
    """The configurations of `_gemm_space` with at most 64 elements per thread, and tiles of 128 x
    256 that a large shared memory feeds. Which of these spill depends on the gate.
    """

    def included(m: int, n: int, warps: int) -> bool:
        return m * n <= 2048 * warps or (large and warps == 8)

    return [
        c
        for c in _gemm_space(N, K, itemsize, rows, aligned, large)
        if included(c["BLOCK_M"], c["BLOCK_N"], c["num_warps"])
    ]


def _down_heuristic(N: int, K: int, itemsize: int, rows: int, aligned: bool, large: bool) -> dict:
    """SPLIT: the pieces of the epilogue, which holds a sum, a gate, an up and their results for
    each element of a piece; 0: the product is stored, and a second kernel reads it. Two blocks per
    SM, if they fit: the epilogue reads and writes more than the product reads.
    """
    if itemsize == 4 or not aligned:
        # Four pieces in float32: with one or two ptxas spills 8 bytes for sm_100 or sm_120 with the
        # gate of gpt-oss.
        return {
            **(_FP32 if itemsize == 4 else _ODD),
            "BLOCK_N": 32,
            "SPLIT": 4 if itemsize == 4 else 2,
        }
    return (
        _constants(64, 128, 64, 4, 4, 2 if large else 1, split=4)
        if large or rows <= 64
        else _constants(128, 128, 64, 8, 3, 1, split=4)
    )


def _down_space(N: int, K: int, itemsize: int, rows: int, aligned: bool, large: bool) -> list[dict]:
    if itemsize == 4:
        return [{**_FP32, "BLOCK_M": m, "BLOCK_N": 32, "SPLIT": 4} for m in (32, 64)]
    if not aligned:
        return [{**_ODD, "BLOCK_N": n, "SPLIT": split} for n, split in ((32, 1), (32, 2), (64, 4))]
    two = 2 if large else 1
    shapes = [
        (64, 128, 64, 4, 4, two, 4),
        (128, 64, 64, 4, 4, two, 2),
        (128, 64, 64, 4, 4, two, 4),
        (128, 128, 64, 8, 3, 1, 4),
    ]
    if large:
        shapes += [
            (128, 128, 64, 8, 5, 1, 4),
            (128, 256, 64, 8, 3, 1, 0),
            (128, 256, 64, 8, 4, 1, 0),
        ]
    return [_constants(*shape[:6], group, shape[6]) for shape in shapes for group in (4, 8, 16)]


_WEIGHT_NAMES = ("BLOCK_N", "BLOCK_K", "BLOCK_R", "num_warps", "num_stages", "GROUP")


def _dweight_heuristic(
    N: int, K: int, itemsize: int, rows: int, aligned: bool, large: bool
) -> dict:
    """As for `_gemm`. Rows are the summed dimension."""
    if itemsize == 4 or not aligned:
        shape = (64, 64, 32, 4, 3 if itemsize == 4 else 2)
    else:
        shape = (
            (128, 256, 64, 8, 4) if large and rows > 512 and K % 256 == 0 else (128, 128, 64, 8, 3)
        )
    return dict(zip(_WEIGHT_NAMES, (*shape, 8), strict=True))


def _dweight_space(
    N: int, K: int, itemsize: int, rows: int, aligned: bool, large: bool
) -> list[dict]:
    if itemsize == 4 or not aligned:
        shapes = [(64, 64, 32, 4, 2), (64, 64, 32, 4, 3), (64, 64, 16, 4, 3), (32, 64, 32, 4, 3)]
    else:
        shapes = [
            (128, 128, 64, 4, 3),
            (128, 128, 64, 8, 3),
            (128, 256, 64, 8, 2),
            (256, 128, 64, 8, 2),
            (128, 256, 32, 8, 4),
            (64, 256, 64, 4, 2),
            (64, 128, 64, 4, 4),
        ]
        if large:
            shapes += [
                (128, 256, 64, 8, 3),
                (128, 256, 64, 8, 4),
                (256, 128, 64, 8, 3),
                (256, 128, 64, 8, 4),
            ]
    return [
        dict(zip(_WEIGHT_NAMES, (*shape, group), strict=True))
        for shape in shapes
        for group in (4, 8, 16)
    ]


# ---- for the compile gate

_TYPES = {2: "bf16", 4: "fp32"}
# Pointers to other types than the operands'.
_POINTERS = {
    **dict.fromkeys(("tiles", "slots", "offsets", "position"), "i32"),
    **dict.fromkeys(("partial", "weight"), "fp32"),
}
_MATRIX = {90: ("wgmma",), 100: ("tcgen05",)}
_COPIES = {90: ("wgmma", "tma"), 100: ("tcgen05", "tma")}
# For sm_120, ptxas 12.9 gives each TMA load a branch to a function for shared memory of another
# block of a cluster, with 8 bytes of stack. Without clusters it is never taken.
_TMA_STACK = {120: 8}


def about_key(key: dict) -> str:
    words = (
        _TYPES[key["itemsize"]],
        "" if key["aligned"] else "odd",
        "large" if key["large"] else "",
        "few rows" if key["rows"] <= 64 else "",
        "short" if key["K"] <= 1024 else "",
    )
    return " ".join(filter(None, words))


def _needs(key: dict, tma: bool) -> dict:
    """A spec's alignment and instructions. Without alignment no access is wider than an element;
    float32 without TF32 has no matrix instructions.
    """
    if not key["aligned"]:
        return {"load": 8 * key["itemsize"], "store": 8 * key["itemsize"]}
    uses = {} if key["itemsize"] == 4 else _COPIES if tma else _MATRIX
    return {
        "min_arch": 90 if tma else 80,
        "max_arch": 119 if key["large"] else 999,
        "uses": uses,
        "stack": _TMA_STACK if tma else {},
        "divisible": ("N", "K", "x_stride", "w_stride", "w_expert_stride", "dy_stride"),
    }


# The gate of gpt-oss, for the compile gate.
_CLAMPED = GateConstants(0, True, 1.702, 7.0, 7.0, 1.0)


def _operand(t: str, tma: bool, *block: int) -> str:
    return f"tensordesc<{t}[{','.join(map(str, block))}]>" if tma else f"*{t}"


def gemm_specs(
    label: str,
    epilogue: int,
    transposed: bool,
    gather: bool,
    specialized: Callable[..., KernelSpec] | None = None,
):
    """One spec without a bias; and with a bias or another gate, gpt-oss's, whose weights are
    transposed. With a key's `plain`, only the one that it is about.

    specialized: (label, dtype, pointers, constants, blocks of x and w) -> a spec of a kernel that
        takes the same arguments.
    """
    dswiglu = epilogue == DSWIGLU
    kinds = [("", transposed, SILU_MUL)]
    if epilogue != PLAIN:
        # down_proj [E, I, H] is read with the opposite layout of [E, H, I].
        kinds.append((" gpt-oss", epilogue == SWIGLU, _CLAMPED))
    elif not transposed:
        kinds.append((" biased", True, SILU_MUL))

    def spec(
        key: dict, config: dict, kind: str, transposed: bool, gate: GateConstants
    ) -> KernelSpec:
        t = _TYPES[key["itemsize"]]
        m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        # The down-projection's bias is added where it is the forward.
        bias = bool(kind) and not dswiglu
        halves = epilogue == SWIGLU and not gate.INTERLEAVED
        block = (2, n // 2, k) if halves else (k, n) if transposed else (n, k)
        tma = key["itemsize"] == 2 and key["aligned"]
        there = {"slots": gather, "pre": epilogue != PLAIN, "bias": bias}
        there |= dict.fromkeys(("hw", "partial", "weight"), dswiglu)
        pointers = {**_POINTERS, "*": t, **{name: None for name, has in there.items() if not has}}
        constants = {
            "GATHER": gather,
            "TRANSPOSED": transposed,
            "EPILOGUE": epilogue,
            "STORE_PRE": epilogue == SWIGLU,
            "STORE_H": dswiglu,
            "BIAS": bias,
            "TMA_X": tma and not gather,
            "TMA_W": tma,
            "PRECISION": "ieee" if key["itemsize"] == 4 else None,
            "MAP_ROWS": MAP_ROWS,
            "GATE": gate,
            **config,
        }
        if specialized is not None:
            about = f"{label}{kind} specialized {about_key(key)}"
            return specialized(about, t, pointers, constants, (m, k), (1, *block))
        return KernelSpec.of(
            _gemm,
            f"{label}{kind} {about_key(key)}",
            pointers,
            constants,
            {"x": _operand(t, tma and not gather, m, k), "w": _operand(t, tma, 1, *block)},
            per_sm=config["per_sm"],
            **_needs(key, tma),
        )

    return lambda key, config: [
        spec(key, config, *kind) for kind in kinds if key.get("plain") in (None, not kind[0])
    ]


def dswiglu_specs(key: dict) -> list[KernelSpec]:
    return [
        KernelSpec.of(
            _dswiglu,
            f"dswiglu{kind} {about_key(key)}",
            {**_POINTERS, "*": _TYPES[key["itemsize"]]},
            {"STORE_H": True, "GATE": gate, **_DSWIGLU},
            elements=_DSWIGLU["ROWS"] * _DSWIGLU["COLUMNS"],
            **{**_needs(key, False), "min_arch": 80, "max_arch": 999, "uses": {}},
        )
        for kind, gate in (("", SILU_MUL), (" gpt-oss", _CLAMPED))
    ]


def _down_specs(key: dict, config: dict) -> list[KernelSpec]:
    if config["SPLIT"]:
        return gemm_specs("down_dswiglu", DSWIGLU, True, True)(key, config)
    product = gemm_specs("down product", PLAIN, True, True)(key, config)
    return [*product, *dswiglu_specs(key)]


def _dweight_specs(key: dict, config: dict) -> list[KernelSpec]:
    t, r = _TYPES[key["itemsize"]], config["BLOCK_R"]
    tma = key["itemsize"] == 2 and key["aligned"]
    return [
        KernelSpec.of(
            _dweight,
            f"backward weight{f' gathered {gather}' if gather else ''} {about_key(key)}",
            {"out": t, "offsets": "i32", **({"slots": "i32"} if gather else {})},
            {
                "GATHER_DY": gather == "dy",
                "GATHER_X": gather == "x",
                "TMA_DY": tma and gather != "dy",
                "TMA_X": tma and gather != "x",
                "PRECISION": "ieee" if key["itemsize"] == 4 else None,
                **(_gathered(config) if gather else config),
            },
            {
                "dy": _operand(t, tma and gather != "dy", r, config["BLOCK_N"]),
                "x": _operand(t, tma and gather != "x", r, config["BLOCK_K"]),
            },
            **_needs(key, tma),
        )
        for gather in ("", "x", "dy")
    ]


def gate() -> tuple[KernelSpec, ...]:
    """The small kernels, whose configurations are not tuned: a few numbers per thread, at any
    position.
    """
    blocks = {"BLOCK_M": 128, "BLOCK": TILE_BLOCK, "EXPERTS": 256}
    biased = {"dy": "bf16", "bias": "bf16", "offsets": "i32"}
    return (
        KernelSpec.of(_map_tiles, "tiles", _POINTERS, blocks, load=32, store=32),
        *(
            KernelSpec.of(
                _router_gradient,
                f"router gradient{' biased' if bias else ''}",
                {"partial": "fp32", "position": "i32", "out": "fp32", **(biased if bias else {})},
                {
                    "BIAS": bias,
                    "BLOCK": _SLOTS if bias else 128,
                    "TILES": 8,
                    "COLUMNS": _COLUMNS,
                    "EXPERTS": 128,
                },
                load=128 if bias else 32,
                store=32,
                divisible=("H", "dy_stride") if bias else (),
            )
            for bias in (False, True)
        ),
        *dswiglu_specs(DOWN_DSWIGLU.named(_KEYS[-1])),
    )


_FIELDS = ("N", "K", "itemsize", "rows", "aligned", "large")
# plain: whether there is no bias, and no gate but silu(gate) * up of halves.
_PLAIN_FIELDS = (*_FIELDS, "plain")
_KEYS = [
    (2048, 2048, 2, 1024, True, False),
    (2048, 2048, 2, 64, True, False),
    (2047, 2047, 2, 1024, False, False),
    (2048, 2048, 4, 1024, True, False),
    (2048, 2048, 2, 1024, True, True),
]
_PRODUCT_KEYS = [*_KEYS, (2048, 2048, 4, 1024, True, True)]
_SUM_KEYS = [*_PRODUCT_KEYS, (2048, 768, 2, 1024, True, True)]
FORWARD = Tunable(
    "grouped_gemm",
    "forward",
    _PLAIN_FIELDS,
    "forward",
    _gemm_heuristic,
    _gemm_space,
    [(*key, plain) for key in _SUM_KEYS for plain in (True, False)],
    gemm_specs("forward", PLAIN, False, False),
)
BACKWARD_X = Tunable(
    "grouped_gemm",
    "backward_x",
    _FIELDS,
    "backward",
    _gemm_heuristic,
    _gemm_space,
    _SUM_KEYS,
    gemm_specs("backward x", PLAIN, True, False),
)
BACKWARD_WEIGHT = Tunable(
    "grouped_gemm",
    "backward_weight",
    _FIELDS,
    "backward",
    _dweight_heuristic,
    _dweight_space,
    [_KEYS[0], *_KEYS[2:]],
    _dweight_specs,
)
UP_SWIGLU = Tunable(
    "moe_mlp",
    "up_swiglu",
    _PLAIN_FIELDS,
    "forward",
    _up_heuristic,
    _up_space,
    [(*key, plain) for key in _PRODUCT_KEYS for plain in (True, False)],
    gemm_specs("up_swiglu", SWIGLU, False, True),
)
DOWN_DSWIGLU = Tunable(
    "moe_mlp", "down_dswiglu", _FIELDS, "backward", _down_heuristic, _down_space, _KEYS, _down_specs
)
TUNABLES = (FORWARD, BACKWARD_X, BACKWARD_WEIGHT)
FUSED = (UP_SWIGLU, DOWN_DSWIGLU)  # for the op composed of them
