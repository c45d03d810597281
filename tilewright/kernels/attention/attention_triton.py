"""Attention in Triton, over one sequence or packed documents: softmax(mask(cap(scale q k^T))) v, by
an online softmax. The definition is tilewright/ops/attention/attention.py; the method is
FlashAttention-2's (arXiv:2307.08691).

A tile is a block of rows of one document and one head. It loops over the keys that its rows may
see: those of its document, with CAUSAL up to the last row, with a window from the first row's on.
Blocks of keys that every row sees are not masked. Document bounds are read from cu_seqlens on the
device (`map_documents`), so no launch waits for it. No tile has rows of two documents: another
document's values, including NaN, are never read.

    _forward       out and the log-sum-exp per row, one tile of queries at a time.
    _backward_q    dq and <dout, out>, one tile of queries at a time.
    _backward_kv   dk and dv, one tile of keys at a time, over the query heads that read it.

Statistics and sums are float32; probabilities and their gradients are rounded to the operands'
dtype for the products. No atomics: deterministic. A row's bits depend on its own document alone,
not on what else is packed (with dropout also on its place in the sequence).

Keys of 129 to 192 columns with values of up to 128 are two parts, of 128 and 64 columns: one block
would be padded to 256. All other widths are one block, padded to a power of 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.core.layout import last_contiguous
from tilewright.kernels.attention import operators
from tilewright.kernels.attention.logits_triton import (
    LN2,
    LOG2E,
    STRIDES,
    Fixed,
    blocks_of_keys,
    logits,
    place,
    power_of,
    rows_of,
    seen,
    widths,
)
from tilewright.kernels.attention.operators import Variant, attend, attend_backward
from tilewright.kernels.device import dot_precision, large_shared_memory
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv, next_power_of_2
from tilewright.kernels.moe.grouped_gemm_triton import TILE_BLOCK, write_tiles
from tilewright.kernels.moe.operators import MAP_ROWS, map_size
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import ALONE, Others, Tunable, choose

# Arguments that are not specialized.
NUMBERS = ["capacity", "S", "Sk", "offset", "window", "threshold", "seed", "draw"]


@triton.jit
def _load(at, row, i, d, live, D: tl.constexpr, END: tl.constexpr, MASKED: tl.constexpr):
    """Rows i from `at`, [i, d]; 0 where not live. d: columns before END; there are D."""
    where = at + i[:, None] * row + d[None, :]
    if MASKED and D >= END:
        return tl.load(where, mask=live[:, None], other=0.0)
    if MASKED:
        return tl.load(where, mask=live[:, None] & (d < D)[None, :], other=0.0)
    if D >= END:
        return tl.load(where)
    return tl.load(where, mask=(d < D)[None, :], other=0.0)


@triton.jit
def _at(ptr, strides, batch, head, start, row):
    """The address of row `row` of a document that starts at `start`."""
    return ptr + batch * strides[0] + head.to(tl.int64) * strides[1] + (start + row) * strides[2]


@triton.jit
def _columns(FIXED: tl.constexpr):
    """The columns of keys, those of their rest (of keys again if there is none), and of values."""
    d = tl.arange(0, FIXED.WIDTH)
    d_rest = d
    if FIXED.REST:
        d_rest = FIXED.WIDTH + tl.arange(0, FIXED.REST)
    return d, d_rest, tl.arange(0, FIXED.WIDTH_V)


@triton.jit
def _kept(n, dropout, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N]: which probabilities dropout keeps, of keys from n of their document, a
    multiple of 4. A counter has the bits of four keys.

    dropout: the queries' rows of the sequence, their head, threshold, inverse, seed and draw.
    """
    rows, head, threshold, _, seed, draw = dropout
    none = rows[:, None] * 0 + tl.zeros((BLOCK_M, BLOCK_N // 4), tl.int64)
    a, b, c, d = tl.philox(
        seed,
        (none + (n // 4 + tl.arange(0, BLOCK_N // 4))[None, :]).to(tl.uint32),
        (none + rows[:, None]).to(tl.uint32),
        (none + head).to(tl.uint32),
        (none + draw + 0x20000000).to(tl.uint32),
    )
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK_M, BLOCK_N))
    # threshold is at least 1 here and at most 2^32.
    most = (tl.zeros((1, 1), tl.int64) + (threshold - 1)).to(tl.uint32)
    return words > most


@triton.jit
def _attend(
    sums, query, kv, columns, low, high, sight, dropout, FIXED: tl.constexpr, MASKED: tl.constexpr
):
    """The online softmax over keys `low` to `high`. Returns its sums.

    sums: those of values, the largest logit so far and the sum of exponentials, a row each.
    query: q and the rest of its columns.   kv: where keys and values begin, and their row strides.
    columns: a block's keys, and those of `_columns`.
    sight: the rows' positions, the number of keys, the window, the scale and the cap.
    dropout: as in `_kept`.
    """
    acc, top, total = sums
    q, q_rest = query
    k_at, v_at, k_row, v_row = kv
    j, d, d_rest, e = columns
    rows, keys, window, scale, cap = sight
    BLOCK_N: tl.constexpr = j.shape[0]
    k_at += low.to(tl.int64) * k_row
    v_at += low.to(tl.int64) * v_row
    for n in range(low, high, BLOCK_N):
        k = _load(k_at, k_row, j, d, n + j < keys, FIXED.D, FIXED.WIDTH, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=FIXED.PRECISION)
        if FIXED.REST:
            end: tl.constexpr = FIXED.WIDTH + FIXED.REST
            more = _load(k_at, k_row, j, d_rest, n + j < keys, FIXED.D, end, MASKED)
            s = tl.dot(q_rest, tl.trans(more), s, input_precision=FIXED.PRECISION)
        s, _ = logits(s, scale, cap, FIXED.SOFTCAP)
        if MASKED:
            mask = seen(rows[:, None], n + j[None, :], keys, window, FIXED.CAUSAL, FIXED.WINDOW)
            s = tl.where(mask, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen no key yet
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        if FIXED.DROPOUT:
            p = tl.where(_kept(n, dropout, q.shape[0], BLOCK_N), p, 0.0)
        v = _load(v_at, v_row, j, e, n + j < keys, FIXED.DV, FIXED.WIDTH_V, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=FIXED.PRECISION)
        top = new
        k_at += BLOCK_N * k_row
        v_at += BLOCK_N * v_row
    return acc, top, total


@triton.jit(do_not_specialize=NUMBERS)
def _forward(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    cu_ptr,
    capacity,
    S,
    Sk,
    offset,
    window,
    scale,
    cap,
    threshold: tl.int64,
    inverse,
    seed: tl.int64,
    draw,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    FIXED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # The last tiles of a document have the most keys, and start first.
    t = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    there, batch, m, begin, queries, keys = place(
        tiles_ptr, cu_ptr, capacity, S, Sk, t, S, BLOCK_M, FIXED.PACKED
    )
    if there:
        i = tl.arange(0, BLOCK_M)
        d, d_rest, e = _columns(FIXED)
        live = m + i < queries
        b, g, start = batch.to(tl.int64), (h // FIXED.GROUP).to(tl.int64), begin.to(tl.int64)
        q_at = _at(q_ptr, q_strides, b, h, start, m)
        k_at, v_at = _at(k_ptr, k_strides, b, g, start, 0), _at(v_ptr, v_strides, b, g, start, 0)
        q = _load(q_at, q_strides[2], i, d, live, FIXED.D, FIXED.WIDTH, True)
        q_rest = q
        if FIXED.REST:
            end: tl.constexpr = FIXED.WIDTH + FIXED.REST
            q_rest = _load(q_at, q_strides[2], i, d_rest, live, FIXED.D, end, True)
        WIDTH_V: tl.constexpr = FIXED.WIDTH_V  # Triton 3.6 takes no field in a tuple
        acc = tl.zeros((BLOCK_M, WIDTH_V), tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        if FIXED.SINKS:  # a key with this logit, whose value is 0
            top = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks_ptr + h) * LOG2E
            total = tl.where(top == float("-inf"), 0.0, 1.0)
        edges = blocks_of_keys(
            m + offset, m + offset + BLOCK_M - 1, keys, window, BLOCK_N, FIXED.CAUSAL, FIXED.WINDOW
        )
        rows = m + i + offset
        line, head = begin + m + i, b * tl.num_programs(1) + h + FIXED.FIRST_HEAD
        sums, query, kv = (acc, top, total), (q, q_rest), (k_at, v_at, k_strides[2], v_strides[2])
        columns = tl.arange(0, BLOCK_N), d, d_rest, e
        sight = rows, keys, window, scale, cap
        dropout = line, head, threshold, inverse, seed, draw
        for part in tl.static_range(3):  # the middle one needs no mask, the first is a window's
            if part > 0 or FIXED.WINDOW:
                low, high = edges[part], edges[part + 1]
                sums = _attend(
                    sums, query, kv, columns, low, high, sight, dropout, FIXED, part != 1
                )
        acc, top, total = sums
        share = 1.0 / tl.where(total == 0, 1.0, total)  # a division a row, not an element
        out = acc * share[:, None]
        if FIXED.DROPOUT:
            out *= inverse
        o_at = _at(out_ptr, o_strides, b, h, start, m)
        tl.store(
            o_at + i[:, None] * o_strides[2] + e[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=live[:, None] & (e < FIXED.DV)[None, :],
        )
        lse_at = lse_ptr + (b * tl.num_programs(1) + h) * S + start + m
        tl.store(lse_at + i, (top + tl.log2(total)) * LN2, mask=live)


@triton.jit
def _walk_keys(
    sums, given, kv, columns, low, high, sight, dropout, FIXED: tl.constexpr, MASKED: tl.constexpr
):
    """dq and the rest of its columns, without the scale, over keys `low` to `high`.

    sums: these so far.   given: q, the rest of its columns, dout, the shift of logits and delta.
    Others as in `_attend`.
    """
    dq, dq_rest = sums
    q, q_rest, g, power, delta = given
    k_at, v_at, k_row, v_row = kv
    j, d, d_rest, e = columns
    rows, keys, window, scale, cap = sight
    BLOCK_N: tl.constexpr = j.shape[0]
    k_at += low.to(tl.int64) * k_row
    v_at += low.to(tl.int64) * v_row
    for n in range(low, high, BLOCK_N):
        k = _load(k_at, k_row, j, d, n + j < keys, FIXED.D, FIXED.WIDTH, MASKED)
        v = _load(v_at, v_row, j, e, n + j < keys, FIXED.DV, FIXED.WIDTH_V, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=FIXED.PRECISION)
        if FIXED.REST:
            end: tl.constexpr = FIXED.WIDTH + FIXED.REST
            more = _load(k_at, k_row, j, d_rest, n + j < keys, FIXED.D, end, MASKED)
            s = tl.dot(q_rest, tl.trans(more), s, input_precision=FIXED.PRECISION)
        s, slope = logits(s, scale, cap, FIXED.SOFTCAP)
        p = tl.exp2(s - power[:, None])
        if MASKED:
            mask = seen(rows[:, None], n + j[None, :], keys, window, FIXED.CAUSAL, FIXED.WINDOW)
            p = tl.where(mask, p, 0.0)
        dp = tl.dot(g, tl.trans(v), input_precision=FIXED.PRECISION)
        if FIXED.DROPOUT:
            _, _, _, inverse, _, _ = dropout
            dp = tl.where(_kept(n, dropout, q.shape[0], BLOCK_N), dp * inverse, 0.0)
        ds = p * (dp - delta[:, None])
        if FIXED.SOFTCAP:
            ds = ds * slope
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=FIXED.PRECISION)
        if FIXED.REST:
            dq_rest = tl.dot(ds.to(k.dtype), more, dq_rest, input_precision=FIXED.PRECISION)
        k_at += BLOCK_N * k_row
        v_at += BLOCK_N * v_row
    return dq, dq_rest


@triton.jit(do_not_specialize=NUMBERS)
def _backward_q(
    g_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    dq_ptr,
    delta_ptr,
    tiles_ptr,
    cu_ptr,
    capacity,
    S,
    Sk,
    offset,
    window,
    scale,
    cap,
    threshold: tl.int64,
    inverse,
    seed: tl.int64,
    draw,
    g_strides,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    dq_strides,
    FIXED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    t = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    there, batch, m, begin, queries, keys = place(
        tiles_ptr, cu_ptr, capacity, S, Sk, t, S, BLOCK_M, FIXED.PACKED
    )
    if there:
        i = tl.arange(0, BLOCK_M)
        d, d_rest, e = _columns(FIXED)
        live = m + i < queries
        b, head, start = batch.to(tl.int64), h.to(tl.int64), begin.to(tl.int64)
        g_at = _at(g_ptr, g_strides, b, head, start, m)
        g = _load(g_at, g_strides[2], i, e, live, FIXED.DV, FIXED.WIDTH_V, True)
        q_at = _at(q_ptr, q_strides, b, head, start, m)
        q = _load(q_at, q_strides[2], i, d, live, FIXED.D, FIXED.WIDTH, True)
        q_rest = q
        if FIXED.REST:
            end: tl.constexpr = FIXED.WIDTH + FIXED.REST
            q_rest = _load(q_at, q_strides[2], i, d_rest, live, FIXED.D, end, True)
        o_at = _at(out_ptr, o_strides, b, head, start, m)
        out = _load(o_at, o_strides[2], i, e, live, FIXED.DV, FIXED.WIDTH_V, True)
        at = (b * tl.num_programs(1) + h) * S + start + m + i
        delta = tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
        tl.store(delta_ptr + at, delta, mask=live)
        power = power_of(tl.load(lse_ptr + at, mask=live, other=float("inf")))
        k_at = _at(k_ptr, k_strides, b, head // FIXED.GROUP, start, 0)
        v_at = _at(v_ptr, v_strides, b, head // FIXED.GROUP, start, 0)
        WIDTH: tl.constexpr = FIXED.WIDTH  # as in _forward
        REST: tl.constexpr = FIXED.REST
        dq = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        dq_rest = dq
        if FIXED.REST:
            dq_rest = tl.zeros((BLOCK_M, REST), tl.float32)
        edges = blocks_of_keys(
            m + offset, m + offset + BLOCK_M - 1, keys, window, BLOCK_N, FIXED.CAUSAL, FIXED.WINDOW
        )
        rows = m + i + offset
        line, of_mask = begin + m + i, b * tl.num_programs(1) + h + FIXED.FIRST_HEAD
        sums, given = (dq, dq_rest), (q, q_rest, g, power, delta)
        kv = k_at, v_at, k_strides[2], v_strides[2]
        columns = tl.arange(0, BLOCK_N), d, d_rest, e
        sight = rows, keys, window, scale, cap
        dropout = line, of_mask, threshold, inverse, seed, draw
        for part in tl.static_range(3):  # as in _forward
            if part > 0 or FIXED.WINDOW:
                low, high = edges[part], edges[part + 1]
                sums = _walk_keys(
                    sums, given, kv, columns, low, high, sight, dropout, FIXED, part != 1
                )
        dq, dq_rest = sums
        to = _at(dq_ptr, dq_strides, b, head, start, m) + i[:, None] * dq_strides[2]
        tl.store(
            to + d[None, :],
            (dq * scale).to(dq_ptr.dtype.element_ty),
            mask=live[:, None] & (d < FIXED.D)[None, :],
        )
        if FIXED.REST:
            tl.store(
                to + d_rest[None, :],
                (dq_rest * scale).to(dq_ptr.dtype.element_ty),
                mask=live[:, None] & (d_rest < FIXED.D)[None, :],
            )


@triton.jit(do_not_specialize=NUMBERS)
def _backward_kv(
    g_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    tiles_ptr,
    cu_ptr,
    capacity,
    S,
    Sk,
    offset,
    window,
    scale,
    cap,
    threshold: tl.int64,
    inverse,
    seed: tl.int64,
    draw,
    g_strides,
    q_strides,
    k_strides,
    v_strides,
    dk_strides,
    dv_strides,
    FIXED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # The first tiles of a document are read by the most queries, and start first.
    t = tl.program_id(0)
    kv = tl.program_id(1)
    there, batch, n, begin, queries, keys = place(
        tiles_ptr, cu_ptr, capacity, S, Sk, t, Sk, BLOCK_N, FIXED.PACKED
    )
    if there:
        i = tl.arange(0, BLOCK_M)
        j = tl.arange(0, BLOCK_N)
        d, d_rest, e = _columns(FIXED)
        b, head, start = batch.to(tl.int64), kv.to(tl.int64), begin.to(tl.int64)
        k_at = _at(k_ptr, k_strides, b, head, start, n)
        k = _load(k_at, k_strides[2], j, d, n + j < keys, FIXED.D, FIXED.WIDTH, True)
        v_at = _at(v_ptr, v_strides, b, head, start, n)
        v = _load(v_at, v_strides[2], j, e, n + j < keys, FIXED.DV, FIXED.WIDTH_V, True)
        WIDTH: tl.constexpr = FIXED.WIDTH  # as in _forward
        WIDTH_V: tl.constexpr = FIXED.WIDTH_V
        REST: tl.constexpr = FIXED.REST
        dk = tl.zeros((BLOCK_N, WIDTH), tl.float32)
        dv = tl.zeros((BLOCK_N, WIDTH_V), tl.float32)
        k_rest, dk_rest = k, dk
        end: tl.constexpr = FIXED.WIDTH + FIXED.REST
        if FIXED.REST:
            k_rest = _load(k_at, k_strides[2], j, d_rest, n + j < keys, FIXED.D, end, True)
            dk_rest = tl.zeros((BLOCK_N, REST), tl.float32)
        low, high = rows_of(
            n, n + BLOCK_N - 1, queries, offset, window, BLOCK_M, FIXED.CAUSAL, FIXED.WINDOW
        )
        # One loop over the heads of the group and their rows: several loops, or an unmasked part,
        # need more registers for addresses than the two sums leave. So h and m are incremented, and
        # a condition selects the mask.
        h = head * FIXED.GROUP
        m = low
        for _ in range(FIXED.GROUP * tl.cdiv(high - low, BLOCK_M)):
            live = m + i < queries
            at = start + m
            q_at = _at(q_ptr, q_strides, b, h, start, m)
            q = _load(q_at, q_strides[2], i, d, live, FIXED.D, FIXED.WIDTH, True)
            g_at = _at(g_ptr, g_strides, b, h, start, m)
            g = _load(g_at, g_strides[2], i, e, live, FIXED.DV, FIXED.WIDTH_V, True)
            of_row = (b * tl.num_programs(1) * FIXED.GROUP + h) * S + at + i
            power = power_of(tl.load(lse_ptr + of_row, mask=live, other=float("inf")))
            delta = tl.load(delta_ptr + of_row, mask=live, other=0.0)
            # Products are transposed: [keys, rows].
            s = tl.dot(k, tl.trans(q), input_precision=FIXED.PRECISION)
            if FIXED.REST:
                more = _load(q_at, q_strides[2], i, d_rest, live, FIXED.D, end, True)
                s = tl.dot(k_rest, tl.trans(more), s, input_precision=FIXED.PRECISION)
            s, slope = logits(s, scale, cap, FIXED.SOFTCAP)
            p = tl.exp2(s - power[None, :])
            # rows that see all of these keys need no mask; results of keys past the end are not
            # stored
            if FIXED.CAUSAL:
                edge = m + offset < n + BLOCK_N - 1
                if FIXED.WINDOW:
                    edge = edge | (m + offset + BLOCK_M - 1 - n >= window)
                if edge:
                    rows, columns = m + i[None, :] + offset, n + j[:, None]
                    mask = seen(rows, columns, keys, window, True, FIXED.WINDOW)
                    p = tl.where(mask, p, 0.0)
            used = p
            if FIXED.DROPOUT:
                line = begin + m + i
                head_of_row = b * tl.num_programs(1) * FIXED.GROUP + h + FIXED.FIRST_HEAD
                dropout = line, head_of_row, threshold, inverse, seed, draw
                kept = tl.trans(_kept(n, dropout, BLOCK_M, BLOCK_N))
                used = tl.where(kept, p, 0.0)
            dv = tl.dot(used.to(g.dtype), g, dv, input_precision=FIXED.PRECISION)
            dp = tl.dot(v, tl.trans(g), input_precision=FIXED.PRECISION)
            if FIXED.DROPOUT:
                dp = tl.where(kept, dp * inverse, 0.0)
            ds = p * (dp - delta[None, :])
            if FIXED.SOFTCAP:
                ds = ds * slope
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=FIXED.PRECISION)
            if FIXED.REST:
                dk_rest = tl.dot(ds.to(q.dtype), more, dk_rest, input_precision=FIXED.PRECISION)
            m += BLOCK_M
            last = m >= high
            h += last.to(tl.int64)
            m = tl.where(last, low, m)
        exists = (n + j < keys)[:, None]
        to = _at(dk_ptr, dk_strides, b, head, start, n) + j[:, None] * dk_strides[2]
        tl.store(
            to + d[None, :],
            (dk * scale).to(dk_ptr.dtype.element_ty),
            mask=exists & (d < FIXED.D)[None, :],
        )
        if FIXED.REST:
            tl.store(
                to + d_rest[None, :],
                (dk_rest * scale).to(dk_ptr.dtype.element_ty),
                mask=exists & (d_rest < FIXED.D)[None, :],
            )
        to = _at(dv_ptr, dv_strides, b, head, start, n) + j[:, None] * dv_strides[2]
        if FIXED.DROPOUT:
            dv *= inverse
        tl.store(
            to + e[None, :], dv.to(dv_ptr.dtype.element_ty), mask=exists & (e < FIXED.DV)[None, :]
        )


# ---- around the backward by specialized warps

# Rows of a program of `_delta` and `_round`. With rows of 128 and four warps a thread has 16
# elements, two 128-bit loads in 16 bits. Other values were not measured.
_FEW_ROWS = 16


@triton.jit
def _row_of(strides, i):
    """The offsets of rows i for program (rows, head, batch)."""
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    return b * strides[0] + h * strides[1] + i.to(tl.int64) * strides[2]


@triton.jit(do_not_specialize=["S"])
def _delta(
    g_ptr,
    out_ptr,
    delta_ptr,
    S,
    g_strides,
    o_strides,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """<dout, out> of each row."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    mask = (i < S)[:, None] & (d < D)[None, :]
    at = _row_of(g_strides, i)[:, None] + d[None, :]
    g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
    at = _row_of(o_strides, i)[:, None] + d[None, :]
    out = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    heads = tl.num_programs(1)
    at = (tl.program_id(2).to(tl.int64) * heads + tl.program_id(1)) * S + i
    tl.store(delta_ptr + at, tl.sum(g * out, 1), mask=i < S)


@triton.jit(do_not_specialize=["S"])
def _round(
    total_ptr,
    dq_ptr,
    S,
    scale,
    dq_strides,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dq from its contiguous float32 sums, which lack the scale."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    mask = (i < S)[:, None] & (d < D)[None, :]
    heads = tl.num_programs(1)
    row = (tl.program_id(2).to(tl.int64) * heads + tl.program_id(1)) * S + i
    total = tl.load(total_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0)
    at = _row_of(dq_strides, i)[:, None] + d[None, :]
    tl.store(dq_ptr + at, (total * scale).to(dq_ptr.dtype.element_ty), mask=mask)


# ---- launches


@triton.jit(do_not_specialize=["E", "R", "capacity", "length"])
def _map_documents(
    cu_ptr,
    bounds_ptr,
    tiles_ptr,
    E,
    R,
    capacity,
    length,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """A program for each document, and one for rows past the last: the map of tiles, and a copy of
    the bounds. What is not used is 0, since an operator's result is a function of its arguments.
    """
    e = tl.program_id(0)
    count = write_tiles(e, cu_ptr + 1, tiles_ptr, E, R, capacity, BLOCK_M, BLOCK, DOCUMENTS)
    if e == E:
        i = tl.arange(0, DOCUMENTS)
        bounds = tl.load(cu_ptr + i, mask=i <= E, other=0)
        tl.store(bounds_ptr + i, bounds, mask=i < (E + 2) // 2 * 2)
        t, none = tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.int32)
        for j in range(count, capacity, BLOCK):
            to, mask = tiles_ptr + j + t, j + t < capacity
            tl.store(to, none, mask=mask)
            tl.store(to + capacity, none, mask=mask)
            tl.store(to + 2 * capacity, none, mask=mask)
        for j in range(3 * capacity + 1, length, BLOCK):
            tl.store(tiles_ptr + j + t, none, mask=j + t < length)


def map_documents(cu_seqlens, rows, block):
    documents = operators.map_documents(cu_seqlens, rows, block)
    E = cu_seqlens.shape[0] - 1
    bounds, tiles, capacity = _parts(documents, rows, block)
    sizes = E, rows, capacity, tiles.shape[0]
    constants = {"BLOCK_M": block, "BLOCK": TILE_BLOCK, "DOCUMENTS": next_power_of_2(E + 2)}
    launch(_map_documents, (E + 1,), cu_seqlens, bounds, tiles, *sizes, **constants)
    return documents


def _parts(
    documents: torch.Tensor, rows: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The bounds and what fills 16 bytes with the last, the map of tiles, and its capacity."""
    E, flat = documents.shape[1] - 1, documents.view(-1)
    tiles = flat[(E + 2) // 2 * 2 :].view(torch.int32)
    return flat[: (E + 2) // 2 * 2], tiles, map_size(rows, E, block) // 3


def _tiles(documents, batch, rows, block):
    """The bounds of documents, the map of their tiles, its capacity, and the number of tiles to
    launch.
    """
    if documents is None:
        return None, None, 0, batch * cdiv(rows, block)
    if block != MAP_ROWS:
        documents = map_documents(documents[0], rows, block)
    bounds, tiles, capacity = _parts(documents, rows, block)
    return bounds, tiles, capacity, capacity


class _Problem(NamedTuple):
    """What the passes have in common; as `operators.attend` takes it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    documents: torch.Tensor | None
    variant: Variant
    offset: int


def _choose(tunable: Tunable, others: Others, problem: _Problem, fixed: Fixed, tensors: tuple):
    """The configuration, and the launcher of another language's kernel (see `tuning.choose`).

    tensors: those that such a kernel reads by TMA.
    """
    q = problem.q
    if fixed.DROPOUT:
        tunable = DROPPING[tunable]
    key = fixed.width, q.element_size(), large_shared_memory(q.device), fixed.SOFTCAP
    return choose(tunable, others, q.device, key, fixed, tensors)


def _numbers(problem: _Problem, capacity: int) -> tuple:
    """A kernel's arguments from `capacity` to `cap`."""
    q, k, _, _, (_, window, softcap, scale, _), offset = problem
    S, Sk = q.shape[2], k.shape[2]
    # At most the largest distance of two positions: larger ones would exceed 32 bits.
    return capacity, S, Sk, offset, min(window, S + Sk + abs(offset)), scale, softcap


def _fixed(problem: _Problem, sinks: bool = False) -> Fixed:
    q, k, v, documents, (causal, window, softcap, _, dropout), _ = problem
    return Fixed(
        q.shape[1] // k.shape[1],
        *widths(q.shape[3], v.shape[3]),
        documents is not None,
        causal,
        window > 0,
        softcap > 0,
        dropout.threshold > 0,
        dropout.first_head if dropout.threshold > 0 else 0,
        sinks,
        dot_precision(q),
    )


def _launch(kernel, tunable, block, problem, fixed, tiled, tensors, strided, others) -> None:
    """A program for each tile of `block` rows of `tiled`, and each of its heads.

    strided: those of `tensors` whose strides the kernel takes.
    """
    B, H, rows, _ = tiled.shape
    c, run = _choose(tunable, others, problem, fixed, tensors[:3])
    bounds, tiles, capacity, count = _tiles(problem.documents, B, rows, c[block])
    numbers = _numbers(problem, capacity)
    if run is not None:
        run((*tensors, tiles, bounds), numbers, fixed, c, (count, H))
        return
    launch(
        kernel,
        (count, H),
        *tensors,
        tiles,
        bounds,
        *numbers,
        *problem.variant.dropout[:-1],
        *[t.stride()[:3] for t in strided],
        FIXED=fixed,
        **c,
    )


def forward(q, k, v, documents, sinks, variant, offset, others: Others = ALONE):
    q, k, v = map(last_contiguous, (q, k, v))
    attended = attend(q, k, v, documents, sinks, variant, offset)
    if attended.lse.numel():
        problem = _Problem(q, k, v, documents, variant, offset)
        logits = None if sinks is None else sinks.float().contiguous()
        given = problem, _fixed(problem, sinks is not None), q
        tensors, strided = (q, k, v, logits, *attended), (q, k, v, attended.out)
        _launch(_forward, FORWARD, "BLOCK_M", *given, tensors, strided, others)
    return attended


def backward(*operands, others: Others = ALONE):
    """operands: as `operators.attend_backward` takes them."""
    dout, q, k, v, out, lse, documents, sinks, variant, offset = operands
    dout, q, k, v, out = map(last_contiguous, (dout, q, k, v, out))
    gradients = attend_backward(dout, q, k, v, out, lse, documents, sinks, variant, offset)
    dq, dk, dv, dsinks = gradients
    lse = lse.float().contiguous()
    problem = _Problem(q, k, v, documents, variant, offset)
    inputs, fixed = (dout, q, k, v), _fixed(problem)
    config, run = _choose(BACKWARD_KV, others, problem, fixed, inputs)
    if run is not None:
        delta = _together(problem, fixed, inputs, out, lse, gradients, config, run)
    else:
        delta = torch.empty_like(lse)
        if lse.numel():
            tensors, strided = (*inputs, out, lse, dq, delta), (*inputs, out, dq)
            given = problem, fixed, q, tensors, strided
            _launch(_backward_q, BACKWARD_Q, "BLOCK_M", *given, ALONE)
        if dk.numel():
            tensors, strided = (*inputs, lse, delta, dk, dv), (*inputs, dk, dv)
            given = problem, fixed, k, tensors, strided
            _launch(_backward_kv, BACKWARD_KV, "BLOCK_N", *given, ALONE)
    if dsinks is not None:
        # A sink is a logit without a value: dp is 0, and its gradient p (dp - delta) is -p delta.
        # (p is `share`.)
        share = torch.exp(sinks.float()[:, None] - lse)
        torch.sum(share * delta, (0, 2), out=dsinks).neg_()
    return gradients


def _together(problem, fixed, inputs, out, lse, gradients, config, run) -> torch.Tensor:
    """All gradients in one pass over the pairs, by another language's kernel. Returns <dout, out>.

    run: (tensors, numbers, fixed, configuration, grid) -> dq without the scale, in float32.
    """
    (dout, q, k, v), (dq, dk, dv, _) = inputs, gradients
    (B, Hq, S, D), Sk = q.shape, k.shape[2]
    rows = {"ROWS": _FEW_ROWS, "num_warps": 4}
    values = {**rows, "D": fixed.DV, "WIDTH": fixed.WIDTH_V}
    keys = {**rows, "D": D, "WIDTH": next_power_of_2(max(16, D))}
    grid = cdiv(S, _FEW_ROWS), Hq, B
    delta = torch.empty_like(lse)
    launch(_delta, grid, dout, out, delta, S, dout.stride()[:3], out.stride()[:3], **values)
    block = config["BLOCK_N"] // (2 if fixed.REST else 1)
    bounds, tiles, capacity, count = _tiles(problem.documents, B, Sk, block)
    numbers = _numbers(problem, capacity)
    tensors = dout, q, k, v, lse, delta, dk, dv, tiles, bounds
    total = run(tensors, numbers, fixed, config, (count, Hq))
    launch(_round, grid, total, dq, S, problem.variant.scale, dq.stride()[:3], **keys)
    return delta


# ---- launch configurations


_FORWARD_NAMES = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")


def _forward_heuristic(width: int, itemsize: int, large: bool, capped: bool) -> dict:
    """As many rows as keep the sums in registers, and two or three stages of keys and values in
    shared memory.
    """
    if itemsize == 4:
        tile = (32 if width <= 128 else 16, 16, 8, 1)
    elif width == 256:
        tile = (128 if large else 64, 16 if large and capped else 32, 8, 2 if large else 1)
    else:
        # Two parts of keys need registers for their addresses.
        half, stages = width == 192, 3 if large else 2
        keys = 64 if (large and not half) or width <= 64 else 32
        tile = (128, keys, 8, stages - half)
    return dict(zip(_FORWARD_NAMES, tile, strict=True))


def _backward_q_heuristic(width: int, itemsize: int, large: bool, capped: bool) -> dict:
    """Tiles that do not spill: beside dq, logits and their gradients are in registers. In rows of
    128, twice the keys, a third stage or half the warps spill. In rows of 192, 64 keys spill; in
    rows of 256 with a cap, 32. On smaller GPUs twice the keys spill or, in rows of 192, twice the
    queries. In float32 FMAs have their operands in registers, too: larger tiles spill, and in rows
    of 256 these. 64 queries fit in 16-bit rows of 256, and are not measured.
    """
    if itemsize == 4:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 8, "num_stages": 1}
    if width == 256 or (width == 192 and not large):
        return {
            "BLOCK_M": 32,
            "BLOCK_N": 16 if large else 32,
            "num_warps": 8,
            "num_stages": 2 if large else 1,
        }
    return {
        "BLOCK_M": 128 if large else 64,
        "BLOCK_N": 64 if large and width != 192 else 32,
        "num_warps": 8 if large else 4,
        "num_stages": 2 if large else 1,
    }


_BACKWARD_NAMES = ("BLOCK_N", "BLOCK_M", "num_warps", "num_stages")


def _backward_kv_heuristic(width: int, itemsize: int, large: bool, capped: bool) -> dict:
    """dk and dv together take half of the registers: the rest holds 32 rows of logits and their
    gradients.
    """
    if itemsize == 4:
        tile = (32, 32, 4, 1) if width <= 64 else (16, 16, 4, 1)
    elif width == 256 or (width == 192 and not large):
        tile = (32, 32, 8, 1)
    elif not large:
        tile = (64, 32, 8, 1)
    else:
        tile = (64 if capped else 128, 64 if width <= 64 else 32, 8, 2)
        if width == 192 and not capped:
            # With keys in two parts, ptxas serializes the pipelined products of Hopper; and sums of
            # two parts leave registers for 16 rows.
            tile = (64, 16, 8, 1)
    return dict(zip(_BACKWARD_NAMES, tile, strict=True))


def _space(heuristic, tiled, walked):
    """Tiles that fit shared memory, with at most 64 registers per thread of each sum."""

    def space(width: int, itemsize: int, large: bool, capped: bool) -> list[dict]:
        if itemsize == 4:
            return [heuristic(width, itemsize, large, capped)]
        configs = []
        for block, step in ((128, 128), (128, 64), (64, 64), (64, 32), (128, 32)):
            for warps in (4, 8):
                for stages in (1, 2, 3):
                    # In flight: `stages` of keys and values (or queries and gradients), and the
                    # tile's own.
                    shared = 2 * width * itemsize * (step * stages + block)
                    elements = block * width // (32 * warps)  # per sum and thread
                    if shared <= (220 if large else 96) * 1024 and elements <= 64:
                        configs.append(
                            {tiled: block, walked: step, "num_warps": warps, "num_stages": stages}
                        )
        return configs

    return space


def _arch(key):
    # Configurations with little shared memory are for all other architectures (and sm_80, which the
    # gate does not compile).
    return {"min_arch": 90, "max_arch": 109} if key["large"] else {"min_arch": 110}


def _variants(key: dict) -> dict[str, dict]:
    """The constants of the variants to compile. All of them for the most frequent key alone."""
    window_sinks = {"PACKED": True, "WINDOW": True, "SINKS": True}
    if key["capped"]:
        return {"packed window softcap sinks": {**window_sinks, "SOFTCAP": True}}
    packed = {"packed": {"PACKED": True}}
    if key["itemsize"] == 4:
        # Its products are long chains of FMAs, and each takes half a minute to compile.
        return packed
    packed["packed window sinks"] = window_sinks
    if key["width"] == 128 and key["large"]:
        return {"causal": {}, "full": {"CAUSAL": False}, **packed}
    return packed


def _dropping_variants(key: dict) -> dict[str, dict]:
    return {"packed dropout": {"PACKED": True, "DROPOUT": True}}


def specs_of(
    kernel,
    name: str,
    tensors: tuple[str, ...] = (),
    tiled: str = "BLOCK_M",
    variants=_variants,
    specialized: Callable[..., list[KernelSpec]] | None = None,
):
    """tensors: whose strides are multiples of 16.   tiled: the constant that decides on tensor
    cores of Hopper.

    specialized: (label, types, fixed, configuration) -> the specs of another language's kernel.
    """
    strides = dict.fromkeys((f"{t}_strides" for t in tensors), STRIDES)

    def specs_of_key(key: dict, config: dict) -> list[KernelSpec]:
        width, data = key["width"], "bf16" if key["itemsize"] == 2 else "fp32"
        values = 128 if width == 192 else width
        name_of_widths = f"D={width}" if values == width else f"D={width} DV={values}"
        wide = data == "bf16" and config[tiled] >= 64
        numbers = {**dict.fromkeys(("scale", "cap", "inverse"), "fp32"), **strides}
        numbers |= {"threshold": "i64", "seed": "i64"}
        specs = []
        for label, options in variants(key).items():
            packed, sinks = options.get("PACKED"), options.get("SINKS")
            types: dict[str, str | None] = {"lse": "fp32", "delta": "fp32", "*": data}
            types["sinks"] = "fp32" if sinks else None
            types |= {"tiles": "i32", "cu": "i64"} if packed else {"tiles": None, "cu": None}
            fixed = Fixed(4, *widths(width, values), **options)
            label = f"{name} {label} {name_of_widths} {data}{'' if key['large'] else ' small'}"
            if specialized is not None:
                specs += specialized(label, types, fixed, config)
                continue
            chosen = {n: v for n, v in config.items() if n.startswith(("BLOCK", "num_"))}
            fixed = fixed._replace(PRECISION="ieee" if data == "fp32" else None)
            specs.append(
                KernelSpec.of(
                    kernel,
                    label,
                    types,
                    {"FIXED": fixed, **chosen},
                    numbers,
                    divisible=tuple(strides),
                    **_arch(key),
                    undivided=data == "bf16" and not key["capped"],
                    uses={90: ("wgmma",), 100: ("tcgen05",)} if wide else {},
                )
            )
        return specs

    return specs_of_key


_FIELDS = ("width", "itemsize", "large", "capped")
_KEYS = [
    (width, 2, large, capped)
    for width in (128, 64, 256, 192)
    for large in (True, False)
    for capped in (False, True)
]
_KEYS += [(128, 4, True, False), (128, 4, False, False)]
FORWARD = Tunable(
    "attention",
    "forward",
    _FIELDS,
    "forward",
    _forward_heuristic,
    _space(_forward_heuristic, "BLOCK_M", "BLOCK_N"),
    _KEYS,
    specs_of(_forward, "forward", ("q", "k", "v", "o"), "BLOCK_M"),
)
BACKWARD_Q = Tunable(
    "attention",
    "backward_q",
    _FIELDS,
    "backward",
    _backward_q_heuristic,
    _space(_backward_q_heuristic, "BLOCK_M", "BLOCK_N"),
    _KEYS,
    specs_of(_backward_q, "backward_q", ("g", "q", "k", "v", "o", "dq"), "BLOCK_M"),
)
BACKWARD_KV = Tunable(
    "attention",
    "backward_kv",
    _FIELDS,
    "backward",
    _backward_kv_heuristic,
    _space(_backward_kv_heuristic, "BLOCK_N", "BLOCK_M"),
    _KEYS,
    specs_of(_backward_kv, "backward_kv", ("g", "q", "k", "v", "dk", "dv"), "BLOCK_N"),
)


def _dropping(
    tunable: Tunable,
    kernel,
    tensors: tuple[str, ...],
    tiled: str,
    walked: str,
    whole: int = 0,
    stages: int = 3,
):
    """The launch with dropout. Random bits take registers beside logits, as a softcap does and
    more, so that half as many pairs are computed at a time. Specialized warps would not hide them:
    ten rounds of Philox, about six instructions each, are 15 of a pair, and with the softmax's six
    the issue of instructions, 128 of threads a cycle and SM, takes 0.16 cycles, the products of a
    head of 128 elements 0.125 (512 FLOP at 4,096 a cycle).

    whole: the width up to which all fit.
    stages: the most.
    """

    def heuristic(width: int, itemsize: int, large: bool, capped: bool) -> dict:
        config = tunable.heuristic(width=width, itemsize=itemsize, large=large, capped=True)
        config = {**config, "num_stages": min(stages, config["num_stages"])}
        if width <= whole:
            return config
        config[walked] = max(16, config[walked] // 2)
        if tunable is BACKWARD_Q and itemsize == 2 and width <= 192:
            # Gradients, queries and their bits in registers of as many threads as there are.
            config |= {tiled: 64, "num_warps": 8}
        return config

    def space(width: int, itemsize: int, large: bool, capped: bool) -> list[dict]:
        config = heuristic(width, itemsize, large, capped)
        if itemsize == 4:
            return [config]
        steps = itertools.product((16, 32, 64), (1, 2, 3))
        return [{**config, walked: step, "num_stages": stages} for step, stages in steps]

    return Tunable(
        "attention",
        f"{tunable.launch}_dropout",
        _FIELDS,
        tunable.pass_name,
        heuristic,
        space,
        [(width, 2, large, False) for width in (128, 64, 192) for large in (True, False)],
        specs_of(kernel, tunable.launch, tensors, tiled, _dropping_variants),
    )


# In dk and dv, ptxas serializes the products of Hopper if they are pipelined beside random bits.
DROPPING = {
    FORWARD: _dropping(FORWARD, _forward, ("q", "k", "v", "o"), "BLOCK_M", "BLOCK_N"),
    BACKWARD_Q: _dropping(
        BACKWARD_Q, _backward_q, ("g", "q", "k", "v", "o", "dq"), "BLOCK_M", "BLOCK_N", 64
    ),
    BACKWARD_KV: _dropping(
        BACKWARD_KV, _backward_kv, ("g", "q", "k", "v", "dk", "dv"), "BLOCK_N", "BLOCK_M", 128, 1
    ),
}
TUNABLES = (FORWARD, BACKWARD_Q, BACKWARD_KV, *DROPPING.values())


def gate() -> list[KernelSpec]:
    """The map of documents."""
    return [
        KernelSpec.of(
            _map_documents,
            "documents",
            {"cu": "i64", "bounds": "i64", "tiles": "i32"},
            {"BLOCK_M": MAP_ROWS, "BLOCK": TILE_BLOCK, "DOCUMENTS": 256},
            load=32,
            store=32,
        )
    ]


def gate_of_one() -> list[KernelSpec]:
    """The kernels around a backward that is one (`_together`)."""
    specs = []
    rows = {"ROWS": _FEW_ROWS, "num_warps": 4}
    strides = dict.fromkeys(("g_strides", "o_strides", "dq_strides"), STRIDES)
    types = {"*": "bf16", "delta": "fp32", "total": "fp32"}
    for kernel, label, width in (
        (_delta, "delta", 128),
        (_round, "round", 128),
        (_round, "round", 192),
    ):
        specs.append(
            KernelSpec.of(
                kernel,
                label if width == 128 else f"{label} D={width}",
                types,
                {**rows, "D": width, "WIDTH": next_power_of_2(width)},
                {"scale": "fp32", **strides},
                divisible=tuple(n for n in strides if n in kernel.arg_names),
                store=32 if kernel is _delta else 128,  # a number for each row
                elements=_FEW_ROWS * next_power_of_2(width),
            )
        )
    return specs
