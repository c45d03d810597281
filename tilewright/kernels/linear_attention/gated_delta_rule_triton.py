"""The gated delta rule in Triton, in chunks of up to 64 tokens (C). The definition, with the
formulas of a chunk and their names, is tilewright/ops/linear_attention/gated_delta_rule.py; chunks
are those of arXiv:2412.06464. No chunk has tokens of two documents (`tiles_triton`).

    _scores           per chunk and head: G, P and (I + A)^-1.
    _states           per sequence, head and block of columns, one chunk after another: H at the
                      start of each chunk, and V.
    _outputs          per chunk, head and block of columns: o.
    _state_gradients  as _states, from the last chunk to the first: the gradient of the state at the
                      end of each chunk, and X = (I + A)^-T dV.
    _pair_gradients   per chunk and head: dv, the gradients of q k^T and k k^T, and the first parts
                      of those of beta and G.
    _row_gradients    per chunk, key head and block of its width: dq and dk, summed over the value
                      heads that the key head serves, and the other parts.
    _gate_gradients   per chunk and head: the sums of the parts, and dg.

V solves (I + A) V = beta (v - exp(G) k H), so that with X the gradient of the right side is X, that
of A is -X V^T, and that of H has -k^T (beta exp(G) X): neither needs the products of the inverse
with the keys and the values that the method is usually written with.

Forward saves G and the inverses; backward computes P, H and V once more. States and sums are
float32; P, the inverses, V, X, and states as operands of products, have the inputs' dtype. No
atomics: deterministic. A document's bits do not depend on what else is packed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.core.layout import last_contiguous
from tilewright.kernels.device import large_shared_memory
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv
from tilewright.kernels.linear_attention.operators import (
    CHUNK,
    L2_EPS,
    DeltaOptions,
    DeltaSaved,
    chunk,
    chunk_of,
    delta_rule,
    delta_rule_backward,
)
from tilewright.kernels.linear_attention.tiles_triton import number_of_tiles, place, tiles_of
from tilewright.kernels.math_triton import reciprocal
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import Tunable

# ---- one chunk


@triton.jit
def _rows(at, row_stride, row, live, first, WIDTH: tl.constexpr):
    """Rows `row` from `at`, columns first to first + WIDTH; 0 where not live."""
    d = first + tl.arange(0, WIDTH)
    return tl.load(at + row[:, None] * row_stride + d[None, :], mask=live[:, None], other=0.0)


@triton.jit
def _of_heads(at, row, live, h, first, HV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """`_rows` for head h of a contiguous [tokens, HV, D]."""
    return _rows(at + h * D, HV * D, row, live, first, WIDTH)


@triton.jit
def _number(at, row, live, h, HV: tl.constexpr):
    """A number per row, of head h of [tokens, HV]; 0 where not live."""
    return tl.load(at + row * HV + h, mask=live, other=0.0)


@triton.jit
def _decay(decay_ptr, row, end, h, HV: tl.constexpr):
    """G of rows, with the last one's beyond the end; and G of the last row, a number."""
    at = decay_ptr + h
    G = tl.load(at + tl.minimum(row, end - 1) * HV)
    last = tl.load(at + (tl.minimum(tl.min(row, 0) + row.shape[0], end) - 1) * HV)
    return G, last


@triton.jit
def _between(G):
    """exp(G_i - G_j) for j <= i, else 0."""
    i = tl.arange(0, G.shape[0])
    return tl.where(i[:, None] >= i[None, :], tl.exp(G[:, None] - G[None, :]), 0.0)


@triton.jit
def _inverse(A, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A. From the inverses T of the diagonal blocks of
    size s, that of a block of size 2 s has -T2 A21 T1 below them: exact substitution by blocks, and
    no power of A, whose growth would cancel.
    """
    i = tl.arange(0, A.shape[0])[:, None]
    j = tl.arange(0, A.shape[0])[None, :]
    T = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (j < i), A, 0.0)
    for level in tl.static_range(1, 6):
        if A.shape[0] > 1 << level:
            # i is in the second half of a block of size 2 s, j in the first half of the same.
            joined = (i >> (level + 1) == j >> (level + 1)) & ((i >> level) > (j >> level))
            below = tl.dot(T, tl.where(joined, A, 0.0), input_precision=PRECISION)
            T -= tl.dot(below, T, input_precision=PRECISION)
    return T


@triton.jit(do_not_specialize=["S", "capacity", "count"])
def _scores(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    decay_ptr,
    solved_ptr,
    p_ptr,
    map_ptr,
    cu_ptr,
    S,
    capacity,
    count,
    scale,
    q_strides,
    k_strides,
    C: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    PACKED: tl.constexpr,
    SOLVE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """P; with SOLVE also G and the inverse, else G is read."""
    t = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    there = t < number_of_tiles(map_ptr, capacity, count, PACKED)
    if there:
        first, _, end = place(map_ptr, cu_ptr, capacity, S, t, there, C, PACKED)
        i = tl.arange(0, C)
        row = first + i
        live = row < end
        qk = tl.zeros((C, C), tl.float32)
        kk = tl.zeros((C, C), tl.float32)
        for d in range(0, DK, BLOCK):
            k = _rows(k_ptr + (h // GROUP) * k_strides[1], k_strides[0], row, live, d, BLOCK)
            q = _rows(q_ptr + (h // GROUP) * q_strides[1], q_strides[0], row, live, d, BLOCK)
            qk = tl.dot(q, tl.trans(k), qk, input_precision=PRECISION)
            if SOLVE:
                kk = tl.dot(k, tl.trans(k), kk, input_precision=PRECISION)
        to = (row * HV + h)[:, None] * C + i[None, :]
        if SOLVE:
            G = tl.cumsum(_number(g_ptr, row, live, h, HV), 0)
            tl.store(decay_ptr + row * HV + h, G, mask=live)
        else:
            G, _ = _decay(decay_ptr, row, end, h, HV)
        between = _between(G)
        p = qk * between * scale
        tl.store(p_ptr + to, p.to(p_ptr.dtype.element_ty), mask=live[:, None])
        if SOLVE:
            beta = _number(beta_ptr, row, live, h, HV)
            A = tl.where(i[:, None] > i[None, :], beta[:, None] * kk * between, 0.0)
            T = _inverse(A, PRECISION)
            tl.store(solved_ptr + to, T.to(solved_ptr.dtype.element_ty), mask=live[:, None])


# ---- one chunk after another


@triton.jit
def _chunks_of(cu_ptr, capacity, S, n, C: tl.constexpr, PACKED: tl.constexpr):
    """The index of sequence n's first chunk, the number of its chunks, its first row, and its end,
    as the map of tiles has them.
    """
    if PACKED:
        begin = tl.minimum(tl.maximum(tl.load(cu_ptr + n), 0), S)
        end = tl.minimum(tl.maximum(tl.load(cu_ptr + n + 1), 0), S)
        first = begin * 0
        for d in range(0, n, 256):
            i = d + tl.arange(0, 256)
            a = tl.load(cu_ptr + i, mask=i < n, other=0)
            b = tl.load(cu_ptr + i + 1, mask=i < n, other=0)
            a = tl.minimum(tl.maximum(a, 0), S)
            b = tl.minimum(tl.maximum(b, 0), S)
            first += tl.sum((tl.maximum(b - a, 0) + C - 1) // C)
        chunks = (tl.maximum(end - begin, 0) + C - 1) // C
        chunks = tl.minimum(chunks, tl.maximum(capacity - first, 0))
    else:
        each = tl.cdiv(S, C)
        first = n.to(tl.int64) * each
        chunks = first * 0 + each
        begin = n.to(tl.int64) * S
        end = begin + S
    return first, chunks, begin, end


@triton.jit
def _state_at(
    chunk, h, first, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr
):
    """Offsets of the columns from `first` of a state, [DK, BV], in [chunks, HV, DK, DV]."""
    d = tl.arange(0, DK)
    v = first + tl.arange(0, BV)
    return (chunk * HV + h) * (DK * DV) + d[:, None] * DV + v[None, :]


@triton.jit(do_not_specialize=["S", "capacity"])
def _states(
    k_ptr,
    v_ptr,
    beta_ptr,
    decay_ptr,
    solved_ptr,
    initial_ptr,
    states_ptr,
    new_ptr,
    final_ptr,
    cu_ptr,
    S,
    capacity,
    k_strides,
    v_strides,
    C: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(2)
    h = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BV
    DATA: tl.constexpr = k_ptr.dtype.element_ty
    first, chunks, begin, end = _chunks_of(cu_ptr, capacity, S, n, C, PACKED)
    whole = _state_at(n.to(tl.int64), h, column, HV, DK, DV, BV)
    if initial_ptr is not None:
        H = tl.load(initial_ptr + whole)
    else:
        H = tl.zeros((DK, BV), tl.float32)
    k_at = k_ptr + (h // GROUP) * k_strides[1]
    v_at = v_ptr + h * v_strides[1] + column
    for c in tl.range(0, chunks, num_stages=STAGES):
        row = begin + c * C + tl.arange(0, C)
        live = row < end
        rounded = H.to(DATA)
        if states_ptr is not None:
            tl.store(states_ptr + _state_at(first + c, h, column, HV, DK, DV, BV), rounded)
        k = _rows(k_at, k_strides[0], row, live, 0, DK)
        v = _rows(v_at, v_strides[0], row, live, 0, BV)
        T = _of_heads(solved_ptr, row, live, h, 0, HV, C, C)
        beta = _number(beta_ptr, row, live, h, HV)
        G, last = _decay(decay_ptr, row, end, h, HV)
        read = tl.dot(k, rounded, input_precision=PRECISION)
        right = beta[:, None] * (v.to(tl.float32) - tl.exp(G)[:, None] * read)
        V = tl.dot(T, right.to(DATA), input_precision=PRECISION)
        to = new_ptr + (row * HV + h)[:, None] * DV + column + tl.arange(0, BV)[None, :]
        tl.store(to, V.to(DATA), mask=live[:, None])
        V = V * tl.exp(last - G)[:, None]
        H = H * tl.exp(last)
        H = tl.dot(tl.trans(k), V.to(DATA), H, input_precision=PRECISION)
    if final_ptr is not None:
        tl.store(final_ptr + whole, H)


@triton.jit(do_not_specialize=["S", "capacity", "count"])
def _outputs(
    q_ptr,
    decay_ptr,
    p_ptr,
    states_ptr,
    new_ptr,
    o_ptr,
    map_ptr,
    cu_ptr,
    S,
    capacity,
    count,
    scale,
    q_strides,
    C: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BV: tl.constexpr,
):
    t = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BV
    there = t < number_of_tiles(map_ptr, capacity, count, PACKED)
    if there:
        first, _, end = place(map_ptr, cu_ptr, capacity, S, t, there, C, PACKED)
        row = first + tl.arange(0, C)
        live = row < end
        q = _rows(q_ptr + (h // GROUP) * q_strides[1], q_strides[0], row, live, 0, DK)
        H = tl.load(states_ptr + _state_at(t.to(tl.int64), h, column, HV, DK, DV, BV))
        G, _ = _decay(decay_ptr, row, end, h, HV)
        o = tl.dot(q, H, input_precision=PRECISION) * (tl.exp(G) * scale)[:, None]
        p = _of_heads(p_ptr, row, live, h, 0, HV, C, C)
        V = _of_heads(new_ptr, row, live, h, column, HV, DV, BV)
        o = tl.dot(p, V, o, input_precision=PRECISION)
        to = o_ptr + (row * HV + h)[:, None] * DV + column + tl.arange(0, BV)[None, :]
        tl.store(to, o.to(o_ptr.dtype.element_ty), mask=live[:, None])


# ---- backward


@triton.jit(do_not_specialize=["S", "capacity"])
def _state_gradients(
    do_ptr,
    q_ptr,
    k_ptr,
    beta_ptr,
    decay_ptr,
    solved_ptr,
    p_ptr,
    dfinal_ptr,
    dstates_ptr,
    x_ptr,
    dinitial_ptr,
    cu_ptr,
    S,
    capacity,
    scale,
    q_strides,
    k_strides,
    C: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(2)
    h = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BV
    DATA: tl.constexpr = k_ptr.dtype.element_ty
    first, chunks, begin, end = _chunks_of(cu_ptr, capacity, S, n, C, PACKED)
    whole = _state_at(n.to(tl.int64), h, column, HV, DK, DV, BV)
    if dfinal_ptr is not None:
        dH = tl.load(dfinal_ptr + whole)
    else:
        dH = tl.zeros((DK, BV), tl.float32)
    for back in tl.range(0, chunks, num_stages=STAGES):
        c = chunks - 1 - back
        row = begin + c * C + tl.arange(0, C)
        live = row < end
        rounded = dH.to(DATA)
        tl.store(dstates_ptr + _state_at(first + c, h, column, HV, DK, DV, BV), rounded)
        q = _rows(q_ptr + (h // GROUP) * q_strides[1], q_strides[0], row, live, 0, DK)
        k = _rows(k_ptr + (h // GROUP) * k_strides[1], k_strides[0], row, live, 0, DK)
        do = _of_heads(do_ptr, row, live, h, column, HV, DV, BV)
        p = _of_heads(p_ptr, row, live, h, 0, HV, C, C)
        T = _of_heads(solved_ptr, row, live, h, 0, HV, C, C)
        beta = _number(beta_ptr, row, live, h, HV)
        G, last = _decay(decay_ptr, row, end, h, HV)
        dV = tl.dot(k, rounded, input_precision=PRECISION) * tl.exp(last - G)[:, None]
        dV = tl.dot(tl.trans(p), do, dV, input_precision=PRECISION)
        X = tl.dot(tl.trans(T), dV.to(DATA), input_precision=PRECISION)
        to = x_ptr + (row * HV + h)[:, None] * DV + column + tl.arange(0, BV)[None, :]
        tl.store(to, X.to(DATA), mask=live[:, None])
        e = tl.exp(G)
        of_o = (do.to(tl.float32) * (e * scale)[:, None]).to(DATA)
        of_v = (X * (-e * beta)[:, None]).to(DATA)
        dH = tl.dot(tl.trans(q), of_o, dH * tl.exp(last), input_precision=PRECISION)
        dH = tl.dot(tl.trans(k), of_v, dH, input_precision=PRECISION)
    if dinitial_ptr is not None:
        tl.store(dinitial_ptr + whole, dH)


@triton.jit(do_not_specialize=["S", "capacity", "count"])
def _pair_gradients(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    decay_ptr,
    new_ptr,
    x_ptr,
    dv_ptr,
    dqk_ptr,
    dkk_ptr,
    dbeta_ptr,
    ddecay_ptr,
    map_ptr,
    cu_ptr,
    S,
    capacity,
    count,
    scale,
    q_strides,
    k_strides,
    v_strides,
    C: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    there = t < number_of_tiles(map_ptr, capacity, count, PACKED)
    if there:
        first, _, end = place(map_ptr, cu_ptr, capacity, S, t, there, C, PACKED)
        i = tl.arange(0, C)
        row = first + i
        live = row < end
        beta = _number(beta_ptr, row, live, h, HV)
        dp = tl.zeros((C, C), tl.float32)
        da = tl.zeros((C, C), tl.float32)
        dbeta = tl.zeros((C,), tl.float32)
        for column in range(0, DV, BLOCK):
            V = _of_heads(new_ptr, row, live, h, column, HV, DV, BLOCK)
            X = _of_heads(x_ptr, row, live, h, column, HV, DV, BLOCK)
            do = _of_heads(do_ptr, row, live, h, column, HV, DV, BLOCK)
            dp = tl.dot(do, tl.trans(V), dp, input_precision=PRECISION)
            da = tl.dot(X, tl.trans(V), da, input_precision=PRECISION)
            wide = X.to(tl.float32)
            to = dv_ptr + (row * HV + h)[:, None] * DV + column + tl.arange(0, BLOCK)[None, :]
            dv = wide * beta[:, None]
            tl.store(to, dv.to(dv_ptr.dtype.element_ty), mask=live[:, None])
        qk = tl.zeros((C, C), tl.float32)
        kk = tl.zeros((C, C), tl.float32)
        for d in range(0, DK, BLOCK):
            q = _rows(q_ptr + (h // GROUP) * q_strides[1], q_strides[0], row, live, d, BLOCK)
            k = _rows(k_ptr + (h // GROUP) * k_strides[1], k_strides[0], row, live, d, BLOCK)
            qk = tl.dot(q, tl.trans(k), qk, input_precision=PRECISION)
            kk = tl.dot(k, tl.trans(k), kk, input_precision=PRECISION)
        G, _ = _decay(decay_ptr, row, end, h, HV)
        between = _between(G)
        dp = dp * between * scale
        da = tl.where(i[:, None] > i[None, :], -da * between, 0.0)
        dbeta = tl.sum(da * kk, 1)
        da = da * beta[:, None]
        both = dp * qk + da * kk
        to = (row * HV + h)[:, None] * C + i[None, :]
        tl.store(dqk_ptr + to, dp.to(dqk_ptr.dtype.element_ty), mask=live[:, None])
        tl.store(dkk_ptr + to, da.to(dkk_ptr.dtype.element_ty), mask=live[:, None])
        at = row * HV + h
        # A row's part as i, less its part as j.
        ddecay = tl.sum(both, 1) - tl.sum(both, 0)
        tl.store(ddecay_ptr + at, ddecay, mask=live)
        for column in range(0, DV, BLOCK):  # its loads overlap with nothing that it would wait for
            X = _of_heads(x_ptr, row, live, h, column, HV, DV, BLOCK).to(tl.float32)
            v = _rows(v_ptr + h * v_strides[1], v_strides[0], row, live, column, BLOCK).to(
                tl.float32
            )
            dbeta += tl.sum(X * v, 1)
        tl.store(dbeta_ptr + at, dbeta, mask=live)


@triton.jit(do_not_specialize=["S", "capacity", "count", "tokens"])
def _row_gradients(
    do_ptr,
    q_ptr,
    k_ptr,
    beta_ptr,
    decay_ptr,
    new_ptr,
    x_ptr,
    states_ptr,
    dstates_ptr,
    dqk_ptr,
    dkk_ptr,
    dq_ptr,
    dk_ptr,
    dbeta_ptr,
    ddecay_ptr,
    map_ptr,
    cu_ptr,
    S,
    capacity,
    count,
    tokens,
    scale,
    q_strides,
    k_strides,
    C: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """dbeta, ddecay: [DK / BK, tokens, HV]."""
    t = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    block = tl.program_id(2)
    there = t < number_of_tiles(map_ptr, capacity, count, PACKED)
    if there:
        first, _, end = place(map_ptr, cu_ptr, capacity, S, t, there, C, PACKED)
        i = tl.arange(0, C)
        row = first + i
        live = row < end
        q = _rows(q_ptr + head * q_strides[1], q_strides[0], row, live, block * BK, BK)
        k = _rows(k_ptr + head * k_strides[1], k_strides[0], row, live, block * BK, BK)
        dq = tl.zeros((C, BK), tl.float32)
        dk = tl.zeros((C, BK), tl.float32)
        for member in range(GROUP):
            h = head * GROUP + member
            # First: after the sums over columns, registers spill under Triton 3.6.
            dqk = _of_heads(dqk_ptr, row, live, h, 0, HV, C, C)
            dkk = _of_heads(dkk_ptr, row, live, h, 0, HV, C, C)
            dq = tl.dot(dqk, k, dq, input_precision=PRECISION)
            dk = tl.dot(tl.trans(dqk), q, dk, input_precision=PRECISION)
            dk = tl.dot(dkk, k, dk, input_precision=PRECISION)
            dk = tl.dot(tl.trans(dkk), k, dk, input_precision=PRECISION)
            of_q = tl.zeros((C, BK), tl.float32)
            of_k = tl.zeros((C, BK), tl.float32)
            of_a = tl.zeros((C, BK), tl.float32)
            shrunk = tl.zeros((BV,), tl.float32)
            for column in range(0, DV, BV):
                d = block * BK + tl.arange(0, BK)
                v = column + tl.arange(0, BV)
                # Transposed: [BV, BK].
                at = (t.to(tl.int64) * HV + h) * (DK * DV) + d[None, :] * DV + v[:, None]
                H = tl.load(states_ptr + at)
                dH = tl.load(dstates_ptr + at)
                do = _of_heads(do_ptr, row, live, h, column, HV, DV, BV)
                V = _of_heads(new_ptr, row, live, h, column, HV, DV, BV)
                X = _of_heads(x_ptr, row, live, h, column, HV, DV, BV)
                of_q = tl.dot(do, H, of_q, input_precision=PRECISION)
                of_k = tl.dot(V, dH, of_k, input_precision=PRECISION)
                of_a = tl.dot(X, H, of_a, input_precision=PRECISION)
                shrunk += tl.sum(H.to(tl.float32) * dH.to(tl.float32), 1)
            G, last = _decay(decay_ptr, row, end, h, HV)
            e = tl.exp(G)
            beta = _number(beta_ptr, row, live, h, HV)
            wide = k.to(tl.float32)
            of_q = of_q * (e * scale)[:, None]
            of_k = of_k * tl.exp(last - G)[:, None]
            of_a = of_a * -e[:, None]
            to_end = tl.sum(wide * of_k, 1)
            dbeta = tl.sum(wide * of_a, 1)
            ddecay = tl.sum(q.to(tl.float32) * of_q, 1) - to_end + beta * dbeta
            # Sums a column: Triton 3.6 finds no layout for a sum of a sum of tensor memory.
            of_last = tl.sum(to_end[:, None], 0) + tl.sum(shrunk, 0) * tl.exp(last)
            ddecay += tl.where(row == tl.minimum(first + C, end) - 1, of_last, 0.0)
            at = (block * tokens.to(tl.int64) + row) * HV + h
            tl.store(dbeta_ptr + at, dbeta, mask=live)
            tl.store(ddecay_ptr + at, ddecay, mask=live)
            dq += of_q
            dk += of_k + of_a * beta[:, None]
        to = (row * (HV // GROUP) + head)[:, None] * DK + block * BK + tl.arange(0, BK)[None, :]
        tl.store(dq_ptr + to, dq.to(dq_ptr.dtype.element_ty), mask=live[:, None])
        tl.store(dk_ptr + to, dk.to(dk_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["S", "capacity", "count", "tokens"])
def _gate_gradients(
    dbeta_pairs_ptr,
    ddecay_pairs_ptr,
    dbetas_ptr,
    ddecays_ptr,
    dbeta_ptr,
    dg_ptr,
    map_ptr,
    cu_ptr,
    S,
    capacity,
    count,
    tokens,
    C: tl.constexpr,
    HV: tl.constexpr,
    PARTS: tl.constexpr,
    PACKED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """G_i is the sum of g up to i, so that dg_i is the sum of dG from i on."""
    t = tl.program_id(0)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = t < number_of_tiles(map_ptr, capacity, count, PACKED)
    if there:
        first, _, end = place(map_ptr, cu_ptr, capacity, S, t, there, C, PACKED)
        row = first + tl.arange(0, C)
        mask = (row < end)[:, None] & (h < HV)[None, :]
        at = row[:, None] * HV + h[None, :]
        dbeta = tl.load(dbeta_pairs_ptr + at, mask=mask, other=0.0)
        ddecay = tl.load(ddecay_pairs_ptr + at, mask=mask, other=0.0)
        for part in range(PARTS):
            from_ = part * tokens.to(tl.int64) * HV + at
            dbeta += tl.load(dbetas_ptr + from_, mask=mask, other=0.0)
            ddecay += tl.load(ddecays_ptr + from_, mask=mask, other=0.0)
        dg = tl.cumsum(ddecay, 0, reverse=True)
        tl.store(dbeta_ptr + at, dbeta, mask=mask)
        tl.store(dg_ptr + at, dg, mask=mask)


# ---- rows of q and k divided by their norms


@triton.jit
def _read_rows(x_ptr, x_strides, T, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of [tokens, H, D] in float32, their offsets in a contiguous one, and which exist."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    mask = (r < T)[:, None] & (d >= 0)[None, :]
    at = (r // H * x_strides[0] + r % H * x_strides[1])[:, None] + d[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return x, r[:, None] * D + d[None, :], mask


@triton.jit(do_not_specialize=["T"])
def _normalize(
    x_ptr, y_ptr, T, eps, x_strides, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    x, at, mask = _read_rows(x_ptr, x_strides, T, H, D, BLOCK)
    y = x * reciprocal(tl.sqrt(tl.sum(x * x, 1) + eps))[:, None]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _normalize_backward(
    dy_ptr,
    x_ptr,
    dx_ptr,
    T,
    eps,
    x_strides,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    x, at, mask = _read_rows(x_ptr, x_strides, T, H, D, BLOCK)
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0)
    inverse = reciprocal(tl.sqrt(tl.sum(x * x, 1) + eps))
    y = x * inverse[:, None]
    dx = (dy - y * tl.sum(y * dy, 1)[:, None]) * inverse[:, None]
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


# ---- launches


class _Problem(NamedTuple):
    """What the launches of a pass have in common. q, k, v: [tokens, H, D], the last dimension
    contiguous; q and k normalized if they are to be.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    cu_seqlens: torch.Tensor | None
    sequences: int
    scale: float
    S: int


def _problem(q, k, v, beta, cu_seqlens, options: DeltaOptions) -> _Problem:
    B, S = q.shape[:2]
    q, k, v = (last_contiguous(t.reshape(-1, *t.shape[2:])) for t in (q, k, v))
    if options.normalize:
        q, k = _normalized(q), _normalized(k)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _Problem(q, k, v, beta, cu_seqlens, N, options.scale, S)


def _normalized(x):
    y, (n, H, D) = x.new_empty(x.shape), x.shape
    grid = (cdiv(n * H, ROWS),)
    launch(_normalize, grid, x, y, n * H, L2_EPS, x.stride()[:2], H=H, D=D, **_OF_ROWS)
    return y


def _normalized_backward(dy, x, dx):
    """x: [B, S, H, D]."""
    x = last_contiguous(x.reshape(-1, *x.shape[2:]))
    n, H, D = x.shape
    grid = (cdiv(n * H, ROWS),)
    strides = x.stride()[:2]
    launch(_normalize_backward, grid, dy, x, dx, n * H, L2_EPS, strides, H=H, D=D, **_OF_ROWS)


class _Launcher:
    """Launches with the constants of a problem."""

    def __init__(self, problem: _Problem):
        q, v = problem.q, problem.v
        self.problem, self.device = problem, q.device
        tokens, HV, DV = v.shape
        batch = tokens // problem.S
        self.chunk = chunk_of(q)
        self.tiles = tiles_of(batch, problem.S, problem.cu_seqlens, self.chunk)
        self.shape = {
            "C": self.chunk,
            "HV": HV,
            "GROUP": HV // q.shape[1],
            "DK": q.shape[2],
            "DV": DV,
        }
        self.key = q.shape[2], DV, q.element_size(), large_shared_memory(q.device)
        self.common = {
            "PACKED": problem.cu_seqlens is not None,
            "PRECISION": _precision(q.element_size()),
        }

    def config(self, tunable: Tunable) -> dict:
        return tunable.config(self.device, *self.key)

    def per_chunk(self, kernel, tunable, others, tensors, numbers, strided, **constants):
        """A program for each chunk and each of `others`."""
        tiles = self.tiles
        at = tiles.map, tiles.cu_seqlens, self.problem.S, tiles.capacity, tiles.count
        self.launch(
            kernel, tunable, (tiles.count, *others), (*tensors, *at, *numbers), strided, constants
        )

    def per_sequence(self, kernel, tunable, tensors, numbers, strided):
        """A program for each sequence, head and block of columns."""
        config, p = self.config(tunable), self.problem
        grid = (self.shape["DV"] // config["BV"], self.shape["HV"], p.sequences)
        at = p.cu_seqlens, p.S, self.tiles.capacity
        self.launch(kernel, tunable, grid, (*tensors, *at, *numbers), strided, {})

    def launch(self, kernel, tunable, grid, arguments, strided, constants):
        constants = {**self.shape, **self.common, **constants, **self.config(tunable)}
        names = set(kernel.arg_names) | {"num_warps", "num_stages"}
        launch(
            kernel,
            grid,
            *arguments,
            *[t.stride()[:2] for t in strided],
            **{n: v for n, v in constants.items() if n in names},
        )


def _precision(itemsize: int) -> str:
    """The input precision of products. The inverse's operands are float32 also where the inputs
    have 16 bits. TF32 then suffices: its 10 bits are as many as float16 has, to which the inverse
    is rounded.
    """
    return "tf32" if itemsize == 2 else "ieee"


def _scored(run: _Launcher, g, decay, solved) -> torch.Tensor:
    """P; with g, also writes G and the inverses."""
    p = run.problem
    scores = p.q.new_empty(*p.v.shape[:2], run.chunk)
    tensors = p.q, p.k, g, p.beta, decay, solved if g is not None else None, scores
    run.per_chunk(
        _scores,
        SCORES,
        (p.v.shape[1],),
        tensors,
        (p.scale,),
        (p.q, p.k),
        SOLVE=g is not None,
    )
    return scores


def _states_of(run: _Launcher, initial_state, decay, solved, final):
    """H at the start of each chunk, and V."""
    p = run.problem
    (n, HV, DV), DK = p.v.shape, p.q.shape[2]
    states, new = p.q.new_empty(run.tiles.count, HV, DK, DV), p.q.new_empty(n, HV, DV)
    tensors = p.k, p.v, p.beta, decay, solved, initial_state, states, new, final
    run.per_sequence(_states, STATES, tensors, (), (p.k, p.v))
    return states, new


def forward(q, k, v, g, beta, initial_state, cu_seqlens, options):
    results = delta_rule(q, k, v, g, beta, initial_state, cu_seqlens, options)
    if not v.numel():
        results.state.copy_(initial_state) if initial_state is not None else results.state.zero_()
        return results
    p = _problem(q, k, v, beta, cu_seqlens, options)
    run = _Launcher(p)
    scores = _scored(run, g, results.decay, results.solved)
    states, new = _states_of(run, initial_state, results.decay, results.solved, results.state)
    HV, DV = v.shape[2:]
    blocks = DV // run.config(OUTPUTS)["BV"]
    tensors = p.q, results.decay, scores, states, new, results.o
    run.per_chunk(_outputs, OUTPUTS, (HV, blocks), tensors, (p.scale,), (p.q,))
    return results


# Long: the tensors of four launches, one after another.
def backward(do, dstate, saved: DeltaSaved, options):
    gradients = delta_rule_backward(do, dstate, saved, options)
    q, k, v, beta, initial_state, cu_seqlens, decay, solved = saved
    dq, dk, dv, dg, dbeta, dinitial = gradients
    if not v.numel():
        for t in (dq, dk):
            t.zero_()
        if dinitial is not None:
            dinitial.copy_(dstate) if dstate is not None else dinitial.zero_()
        return gradients
    p = _problem(q, k, v, beta, cu_seqlens, options)
    run = _Launcher(p)
    (n, HV, _), (_, HK, DK) = p.v.shape, p.q.shape
    scores = _scored(run, None, decay, solved)
    states, new = _states_of(run, initial_state, decay, solved, None)
    dstates, x = torch.empty_like(states), torch.empty_like(new)
    tensors = do, p.q, p.k, beta, decay, solved, scores, dstate, dstates, x, dinitial
    run.per_sequence(_state_gradients, STATE_GRADIENTS, tensors, (p.scale,), (p.q, p.k))

    parts = DK // run.config(ROW_GRADIENTS)["BK"]
    of_pairs = torch.empty_like(dbeta), torch.empty_like(dg)
    dbetas, ddecays = beta.new_empty(parts, n, HV), beta.new_empty(parts, n, HV)
    dqk, dkk = (p.q.new_empty(n, HV, run.chunk) for _ in range(2))
    tensors = do, p.q, p.k, p.v, beta, decay, new, x, dv, dqk, dkk, *of_pairs
    run.per_chunk(_pair_gradients, PAIR_GRADIENTS, (HV,), tensors, (p.scale,), (p.q, p.k, p.v))
    to = dq, dk
    if options.normalize:  # float32, since part of it cancels
        to = tuple(p.q.new_empty(p.q.shape, dtype=torch.float32) for _ in range(2))
    tensors = do, p.q, p.k, beta, decay, new, x, states, dstates, dqk, dkk, *to, dbetas, ddecays
    run.per_chunk(_row_gradients, ROW_GRADIENTS, (HK, parts), tensors, (n, p.scale), (p.q, p.k))
    if options.normalize:
        _normalized_backward(to[0], q, dq)
        _normalized_backward(to[1], k, dk)
    tiles = run.tiles
    launch(
        _gate_gradients,
        (tiles.count, cdiv(HV, HEADS)),
        *of_pairs,
        dbetas,
        ddecays,
        dbeta,
        dg,
        tiles.map,
        tiles.cu_seqlens,
        p.S,
        tiles.capacity,
        tiles.count,
        n,
        C=run.chunk,
        HV=HV,
        PARTS=parts,
        PACKED=cu_seqlens is not None,
        **_OF_GATES,
    )
    return gradients


# ---- launch configurations

ROWS = 8  # of q or k in a program: with one warp for 2, 8 to 16 elements per thread
_OF_ROWS = {"BLOCK": ROWS, "num_warps": 4}
HEADS = 16  # of g and beta in a program: two sectors of a token
_OF_GATES = {"HEADS": HEADS, "num_warps": 4}


def _scores_heuristic(DK: int, DV: int, itemsize: int, large: bool) -> dict:
    """Columns of a row at a time, 128 bytes. Two sums of 64 x 64, 32 elements of each per thread of
    four warps, or 16 of eight on smaller GPUs, whose products have their factors in registers, too.
    Not measured on a GPU.
    """
    return {
        "BLOCK": 64 if itemsize == 2 else 32,
        "num_warps": 4 if itemsize == 2 and large else 8,
        "num_stages": 1,
    }


def _states_heuristic(DK: int, DV: int, itemsize: int, large: bool) -> dict:
    """Few columns for many programs: chunks follow each other. Not measured on a GPU."""
    return {
        "BV": 32 if itemsize == 2 else 16,
        "STAGES": 2 if itemsize == 2 and DK <= 128 else 1,
        "num_warps": 4 if itemsize == 2 and large and DK <= 128 else 8,
        "num_stages": 1,
    }


def _outputs_heuristic(DK: int, DV: int, itemsize: int, large: bool) -> dict:
    """One sum of 64 x BV, 64 elements per thread, so that q is read once. In float32, 128 columns
    spill, as four warps do under Triton 3.6; 64, and more of rows of 256, fit. Not measured on a
    GPU.
    """
    return {
        "BV": min(DV, 128 if itemsize == 2 and DK <= 128 else 32),
        "num_warps": 4 if itemsize == 2 else 8,
        "num_stages": 1,
    }


def _state_gradients_heuristic(DK: int, DV: int, itemsize: int, large: bool) -> dict:
    """Few columns, as for the states: twice as many spill with DK = 256 and in float32, as four
    warps do on smaller GPUs. With one stage Triton 3.6 spills for compute capability 10.0. Not
    measured on a GPU.
    """
    return {
        "BV": 32 if itemsize == 2 and DK <= 128 else 16,
        "STAGES": 2 if itemsize == 2 and large and DK <= 128 else 1,
        "num_warps": 8,
        "num_stages": 1,
    }


def _pair_gradients_heuristic(DK: int, DV: int, itemsize: int, large: bool) -> dict:
    """Four sums of 64 x 64, 32 elements of each per thread."""
    return {"BLOCK": 64 if itemsize == 2 else 32, "num_warps": 8, "num_stages": 1}


def _row_gradients_heuristic(DK: int, DV: int, itemsize: int, large: bool) -> dict:
    """Five sums of 64 x BK. With wider BV, 16 bits spill under Triton 3.9 for compute capability
    10.0; with a narrower one, float32 under both.
    """
    return {
        "BK": 32,
        "BV": 32 if itemsize == 2 else 64,
        "num_warps": 8,
        "num_stages": 1,
    }


def _alone(heuristic):
    """A search among warps and stages alone."""

    def space(DK: int, DV: int, itemsize: int, large: bool) -> list[dict]:
        base = heuristic(DK, DV, itemsize, large)
        if itemsize == 4:  # long to compile, and not what is trained in
            return [base]
        stages = "STAGES" if "STAGES" in base else "num_stages"
        return [{**base, "num_warps": warps, stages: n} for warps in (4, 8) for n in (1, 2)]

    return space


_FIELDS = ("DK", "DV", "itemsize", "large")
_KEYS = [(128, 128, 2, True), (128, 128, 2, False), (64, 64, 2, True), (256, 256, 2, True)]
_KEYS += [(128, 128, 4, True), (256, 256, 2, False)]
_FLOAT32 = (
    *("g", "beta", "decay", "initial", "final", "dfinal", "dinitial"),
    *("dbeta", "ddecay", "dbetas", "ddecays", "dg"),
)


def _specs_of(kernel, name: str, strided: tuple[str, ...]):
    strides = dict.fromkeys((f"{t}_strides" for t in strided), ("i32", "i32"))

    def specs_of_key(key: dict, config: dict) -> list[KernelSpec]:
        data, specs = "bf16" if key["itemsize"] == 2 else "fp32", []
        variants = (
            [("", True)]
            if key["itemsize"] == 4 or key["DK"] != 128
            else [("", True), (" one", False)]
        )
        for label, packed in variants:
            types = {**dict.fromkeys(_FLOAT32, "fp32"), "*": data}
            types |= {"map": "i32", "cu": "i64"} if packed else {"map": None, "cu": None}
            specs.append(
                KernelSpec.of(
                    kernel,
                    f"{name}{label} DK={key['DK']} DV={key['DV']} {data}"
                    f"{'' if key['large'] else ' small'}",
                    types,
                    {
                        "C": chunk(key["DK"], key["itemsize"]),
                        "HV": 32,
                        "GROUP": 2,
                        "DK": key["DK"],
                        "DV": key["DV"],
                        "PACKED": packed,
                        "SOLVE": True,
                        "PRECISION": _precision(key["itemsize"]),
                        **config,
                    },
                    {"scale": "fp32", **strides},
                    divisible=tuple(strides),
                    **({"min_arch": 90, "max_arch": 109} if key["large"] else {"min_arch": 110}),
                    **_accesses(key),
                )
            )
        return specs

    return specs_of_key


def _accesses(key: dict) -> dict:
    """Chunks of 64 rows use tensor cores of Hopper and later, and move 128 bits at a time; a thread
    has fewer elements of a smaller one.
    """
    if chunk(key["DK"], key["itemsize"]) == CHUNK:
        return {"uses": {90: ("wgmma",), 100: ("tcgen05",)}}
    return {"load": 64, "store": 32}


def _tunable(kernel, name, pass_name, heuristic, strided) -> Tunable:
    return Tunable(
        "gated_delta_rule",
        name,
        _FIELDS,
        pass_name,
        heuristic,
        _alone(heuristic),
        _KEYS,
        _specs_of(kernel, name, strided),
    )


SCORES = _tunable(_scores, "scores", "forward", _scores_heuristic, ("q", "k"))
STATES = _tunable(_states, "states", "forward", _states_heuristic, ("k", "v"))
OUTPUTS = _tunable(_outputs, "outputs", "forward", _outputs_heuristic, ("q",))
STATE_GRADIENTS = _tunable(
    _state_gradients, "state_gradients", "backward", _state_gradients_heuristic, ("q", "k")
)
PAIR_GRADIENTS = _tunable(
    _pair_gradients, "pair_gradients", "backward", _pair_gradients_heuristic, ("q", "k", "v")
)
ROW_GRADIENTS = _tunable(
    _row_gradients, "row_gradients", "backward", _row_gradients_heuristic, ("q", "k")
)
TUNABLES = (SCORES, STATES, OUTPUTS, STATE_GRADIENTS, PAIR_GRADIENTS, ROW_GRADIENTS)


def gate() -> list[KernelSpec]:
    """The kernels whose configuration is not tuned."""
    rows = {"H": 16, "D": 128, **_OF_ROWS}
    specs = [
        KernelSpec.of(
            _gate_gradients,
            f"gate_gradients{'' if packed else ' one'}",
            {**({"map": "i32", "cu": "i64"} if packed else {"map": None, "cu": None}), "*": "fp32"},
            {"C": 64, "HV": 32, "PARTS": 4, "PACKED": packed, **_OF_GATES},
            # 16 heads of a token, each thread four of them
        )
        for packed in (True, False)
    ]
    for data in ("bf16", "fp32"):
        for kernel, name in (
            (_normalize, "normalize"),
            (_normalize_backward, "normalize_backward"),
        ):
            specs.append(
                KernelSpec.of(
                    kernel,
                    f"{name} {data}",
                    {"dy": "fp32", "*": data},
                    rows,
                    {"eps": "fp32", "x_strides": ("i32", "i32")},
                    divisible=("x_strides",),
                    elements=ROWS * 128,
                )
            )
    return specs
