"""Attention's backward in one kernel with warp specialization, for sm_90, in place of `_backward_q`
and `_backward_kv` of attention_triton.py, which prepares the arguments (specialized.py). Five
products for a block of queries and one of keys, where those two kernels need seven.

A block has a tile of 128 keys (latent attention's: 64) and a query head, and walks the queries that
see it, 64 at a time:

    loads:           keys and values; per step, queries and gradients into a ring
    differentiates:  eight warps, with 16 keys each; per step, as [keys, queries],
                         s = k q^T, dp = v g^T, p = exp(s - lse), dv += p g,
                         ds = p (dp - delta), dk += ds q
                     and leaves its part of dq, ds^T k, in shared memory
    adds:            that part to dq, by TMA

p and ds are left operands from registers; ds^T is read from shared memory. While the part of dq is
written there, dk and the next step's s are in flight.

Latent attention (keys of 129 to 192 columns in two parts, values of up to 128): dk and dv of 128
keys would take 160 registers of a thread, and s and dp 64 more, which leaves no room for operands.
So a tile has 64 keys, each four warps have half of the columns of every product, p and ds are left
operands from shared memory, and gradients have one stage: 160 registers, and 218 KiB.

Many blocks add to a row of dq, one after the other, from the last keys that it sees to the first:
the order is fixed, so that results are deterministic. A counter per block of rows says whose turn
it is. The last keys are launched first, and no block waits for one that is launched later. So the
running block that was launched first waits for none, and every wait ends. Blocks start at the
queries that no later keys see, so that no block waits long; and a warp that adds has two steps'
time. Query heads that share a key head add to its dk and dv in the same way.

The first keys have the most queries, and the blocks that are launched last should be short. So in
the last heads (LATE) the first keys are launched and added first, and queries are walked from the
last on.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.kernels.attention.attention_gluon import launched
from tilewright.kernels.attention.logits_triton import (
    STRIDES,
    Fixed,
    logits,
    place,
    power_of,
    rows_of,
    seen,
)
from tilewright.kernels.device import older_triton
from tilewright.kernels.launch import launch
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.warp_specialized import (
    HOPPER,
    ONE_WARP,
    advance,
    barriers,
    descriptor,
    descriptor_type,
    load_rows,
    stages,
    thread_barrier,
    tma_add,
    tma_store,
)

_ROWS = gl.constexpr(64)  # queries of a step
# Heads that are launched together at the end: 8,192 tokens have 128 tiles, one round on 132 SMs.
# Others were not measured.
LATE = 2
_STAGES = gl.constexpr(2)  # of queries and gradients, and of parts of dq
_WARPS = gl.constexpr(8)  # that differentiate


@gluon.jit
def _here(n):
    """n, as a value that the compiler cannot move before a loop, nor addresses computed from it."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _await_turn(turn_ptr, turn):
    """Waits until `turn` others have added, and sees what they wrote."""
    seen = gl.atomic_add(turn_ptr, 0, sem="acquire", scope="gpu")
    while seen < turn:
        seen = gl.atomic_add(turn_ptr, 0, sem="acquire", scope="gpu")


@gluon.jit
def _end_turn(turn_ptr):
    thread_barrier()
    gl.atomic_add(turn_ptr, 1, sem="release", scope="gpu")


@gluon.jit
def _await_sums(n):
    """Waits until what this warp added by TMA is in global memory."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;",
        "=r,r",
        [n],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _turn_of(m, n, step, offset, keys, window, KEYS: gl.constexpr, FIXED: gl.constexpr):
    """The number of tiles of keys that add to dq at rows from m on before the tile of keys from n
    on does. These are the tiles of later keys, or of earlier ones where rows are walked backwards.
    `rows_of` says which rows see a tile of keys.
    """
    top = (keys - 1) // KEYS
    if FIXED.CAUSAL:
        top = gl.minimum(top, (m + offset + _ROWS - 1) // KEYS)
    bottom = 0
    if FIXED.WINDOW:
        bottom = gl.maximum(m + offset - window + 1, 0) // KEYS
    return gl.where(step > 0, top - n // KEYS, n // KEYS - bottom)


@gluon.jit
def _load(operands, tile, walk, memory, signals, FIXED: gl.constexpr):
    """One warp. Rows past a tensor's last read zeros."""
    q, q_rest, k, k_rest, v, g, lse_ptr, delta_ptr = operands
    batch, h, begin, n, offset, queries, keys = tile
    m, step, steps = walk
    k_s, k_rest_s, v_s, q_s, q_rest_s, g_s, lse_s, delta_s, at_s = memory
    kv_full, q_full, g_full, empty, g_empty, alone = signals
    WIDTH: gl.constexpr = q_s.shape[2]
    r = gl.arange(0, _ROWS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    cleared = 0
    if steps > 0:
        corner, live = [batch, h // FIXED.GROUP, begin + n, 0], keys - n
        cleared = load_rows(k, corner, k_s, kv_full, live, alone, cleared, FIXED.PACKED)
        if FIXED.REST:
            rest = [batch, h // FIXED.GROUP, begin + n, WIDTH]
            cleared = load_rows(k_rest, rest, k_rest_s, kv_full, live, alone, cleared, FIXED.PACKED)
        cleared = load_rows(v, corner, v_s, kv_full, live, alone, cleared, FIXED.PACKED)
    stage, phase, g_phase = 0, 0, 0
    for _ in range(steps):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        corner, live = [batch, h, begin + m, 0], queries - m
        full = q_full.index(stage)
        cleared = load_rows(q, corner, q_s.index(stage), full, live, alone, cleared, FIXED.PACKED)
        if FIXED.REST:
            rest, to = [batch, h, begin + m, WIDTH], q_rest_s.index(stage)
            cleared = load_rows(q_rest, rest, to, full, live, alone, cleared, FIXED.PACKED)
        g_stage = stage
        if FIXED.REST:
            g_stage = 0
            mbarrier.wait(g_empty, g_phase ^ 1)
            g_phase ^= 1
        full = g_full.index(g_stage)
        cleared = load_rows(g, corner, g_s.index(g_stage), full, live, alone, cleared, FIXED.PACKED)
        lse = gl.load(lse_ptr + m + r, mask=r < live, other=float("inf"))
        delta = gl.load(delta_ptr + m + r, mask=r < live, other=0.0)
        lse_s.index(stage).store(power_of(lse))
        at_s.index(stage).store(m + offset + r)
        mbarrier.arrive(q_full.index(stage))
        delta_s.index(stage).store(delta)
        mbarrier.arrive(g_full.index(g_stage))
        stage, phase = advance(stage, phase, _STAGES)
        m += step


@gluon.jit
def _add(
    given,
    W: gl.constexpr,
    FIXED: gl.constexpr,
    EMPTY: gl.constexpr,
    ADDERS: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Warp W of ADDERS, each of which adds the part of one of ADDERS steps. Rows of another
    document get zeros, and those past the tensor's last nothing.
    """
    outputs, tile, walk, memory = given
    total, turn_ptr = outputs
    batch, h, begin, n, offset, keys, window = tile
    m, step, steps = walk
    dq_s, dq_full, dq_empty, total_rest, dq_rest_s = memory
    WIDTH: gl.constexpr = dq_s.shape[2]
    for at in range(W, steps if W < ADDERS else W, ADDERS):
        stage, row = at % _STAGES, m + at * step
        mbarrier.wait(dq_full.index(stage), at // _STAGES & 1)
        here, corner = dq_s.index(stage).reshape(total.block_shape), [batch, h, begin + row, 0]
        turn = _turn_of(row, n, step, offset, keys, window, KEYS, FIXED)
        _await_turn(turn_ptr + row, turn)
        if EMPTY and turn == 0:
            tma_store(total, corner, here)
            if FIXED.REST:
                there = dq_rest_s.index(stage).reshape(total_rest.block_shape)
                tma_store(total_rest, [batch, h, begin + row, WIDTH], there)
        else:
            tma_add(total, corner, here)
            if FIXED.REST:
                there = dq_rest_s.index(stage).reshape(total_rest.block_shape)
                tma_add(total_rest, [batch, h, begin + row, WIDTH], there)
        tma.store_wait(0)
        mbarrier.arrive(dq_empty.index(stage))
        _await_sums(row)
        _end_turn(turn_ptr + row)


@gluon.jit
def _store(t, to_ptr, stride, first, end, D: gl.constexpr):
    """Stores rows from row `first` on, without those from `end` on, as wgmma holds them: once per
    tile, and wider stores would keep more addresses.
    """
    r = first + gl.arange(0, t.shape[0], gl.SliceLayout(1, t.type.layout))
    d = gl.arange(0, t.shape[1], gl.SliceLayout(0, t.type.layout))
    at = to_ptr + r.to(gl.int64)[:, None] * stride + d[None, :]
    gl.store(at, t.to(to_ptr.dtype.element_ty), mask=(r < end)[:, None] & (d < D)[None, :])


@gluon.jit
def _add_head(
    t, sum_ptr, first, end, turn, GROUP: gl.constexpr, D: gl.constexpr, ROW: gl.constexpr
):
    """Adds a query head's part of a tile of D columns to earlier heads', and keeps the sum for
    later ones.   ROW: columns of all parts.
    """
    LAYOUT: gl.constexpr = t.type.layout
    r = first + gl.arange(0, t.shape[0], gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, t.shape[1], gl.SliceLayout(0, LAYOUT))
    at = sum_ptr + r.to(gl.int64)[:, None] * ROW + d[None, :]
    mask = (r < end)[:, None] & (d < D)[None, :]
    t += gl.load(at, mask=mask & (turn > 0), other=0.0)
    gl.store(at, t, mask=mask & (turn < GROUP - 1))
    return t


@gluon.jit
def _operand(t, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """t as the left operand, in registers, of a product with this layout."""
    return gl.convert_layout(t.to(dtype), gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def _offset(strides, batch, head, row):
    return batch * strides[0] + head * strides[1] + row * strides[2]


@gluon.jit
def _differentiate(shared, FIXED: gl.constexpr):
    """Arguments of the kernel are read where they are used; what is computed from them would take
    registers, so it is computed here.

    ahead: how many positions the first step's first query is after the first key.
    """
    outputs, tile, walk, memory, signals = shared
    dk_ptr, dk_strides, dv_ptr, dv_strides, dk_sum_ptr, dv_sum_ptr, key_turn_ptr, Sk = outputs
    batch, h, begin, n, queries, keys, window, scale, cap = tile
    ahead, step, steps, there = walk
    k_s, v_s, q_s, g_s, lse_s, delta_s, at_s, ds_s, dq_s = memory
    kv_full, q_full, g_full, empty, dq_full, dq_empty = signals
    KEYS: gl.constexpr = k_s.shape[0]
    WIDTH: gl.constexpr = k_s.shape[1]
    DTYPE: gl.constexpr = k_s.dtype
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, _ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, WIDTH, 16])
    # Half of the columns by each four warps.
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, _WARPS // 4], [16, WIDTH // 2, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    j = n + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    dk = gl.zeros([KEYS, WIDTH], gl.float32, SUMS)
    dv = gl.zeros([KEYS, WIDTH], gl.float32, SUMS)
    # Accumulators of products that start anew. The loop does not carry them: that would cost
    # registers.
    none = gl.zeros([KEYS, _ROWS], gl.float32, LAYOUT)
    none_of = gl.zeros([_ROWS, WIDTH], gl.float32, PART)
    if steps > 0:
        mbarrier.wait(kv_full, 0)
    stage, phase = 0, 0
    for _ in range(steps):
        q, g = q_s.index(stage), g_s.index(stage)
        mbarrier.wait(q_full.index(stage), phase)
        s = warpgroup_mma(k_s, q.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(g_full.index(stage), phase)
        dp = warpgroup_mma(v_s, g.permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        l, slope = logits(s, scale, cap, FIXED.SOFTCAP)
        p = gl.exp2(l - lse_s.index(stage).load(COLUMN)[None, :])
        edge = n + KEYS > keys
        if FIXED.CAUSAL:
            edge = edge | (ahead < KEYS - 1)
        if FIXED.WINDOW:
            edge = edge | (ahead + _ROWS > window)
        if edge:
            # From shared memory: the loop would hold positions in registers.
            at = at_s.index(stage).load(COLUMN)
            mask = seen(at[None, :], j[:, None], keys, window, FIXED.CAUSAL, FIXED.WINDOW)
            p = gl.where(mask, p, 0.0)
        weights = _operand(p, DTYPE, SUMS)
        dv = warpgroup_mma(weights, g, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        t = p * (dp - delta_s.index(stage).load(COLUMN)[None, :])
        if FIXED.SOFTCAP:
            t *= slope
        ds = _operand(t, DTYPE, SUMS)
        ds_s.store(t.to(DTYPE))
        fence_async_shared()
        thread_barrier()
        dq = warpgroup_mma(ds_s.permute((1, 0)), k_s, none_of, use_acc=False, is_async=True)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        dq, dv, weights = warpgroup_mma_wait(1, deps=[dq, dv, weights])
        if FIXED.PACKED and queries - n - ahead < _ROWS:
            # Added to the next document's rows: 0 times a NaN of this one's would be NaN.
            r = n + ahead + gl.arange(0, _ROWS, gl.SliceLayout(1, PART))
            dq = gl.where((r < queries)[:, None], dq, 0.0)
        mbarrier.wait(dq_empty.index(stage), phase ^ 1)
        dq_s.index(stage).store(dq)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(dq_full.index(stage))
        dk, ds = warpgroup_mma_wait(0, deps=[dk, ds])
        mbarrier.arrive(empty.index(stage))
        stage, phase = advance(stage, phase, _STAGES)
        ahead += step
    if there:
        dk *= scale
        h = _here(h)
        b, kv, turn = batch.to(gl.int64), (h // FIXED.GROUP).to(gl.int64), h % FIXED.GROUP
        start = begin.to(gl.int64)
        if FIXED.GROUP > 1:
            key_at = (b * (gl.num_programs(1) // FIXED.GROUP) + kv) * Sk + begin
            counter_ptr = key_turn_ptr + key_at + n
            _await_turn(counter_ptr, turn)
            dk = _add_head(
                dk, dk_sum_ptr + key_at * FIXED.D, n, keys, turn, FIXED.GROUP, FIXED.D, FIXED.D
            )
            dv = _add_head(
                dv, dv_sum_ptr + key_at * FIXED.D, n, keys, turn, FIXED.GROUP, FIXED.D, FIXED.D
            )
            _end_turn(counter_ptr)
        if FIXED.GROUP == 1 or turn == FIXED.GROUP - 1:
            dk_at = _offset(dk_strides, b, kv, start)
            _store(dk, dk_ptr + dk_at, dk_strides[2], n, keys, FIXED.D)
            dv_at = _offset(dv_strides, b, kv, start)
            _store(dv, dv_ptr + dv_at, dv_strides[2], n, keys, FIXED.D)


@gluon.jit
def _differentiate_parts(shared, parts, FIXED: gl.constexpr):
    """`_differentiate` of keys in two parts. Every product's columns are divided among four warps
    and four, so that no left operand is in registers.
    """
    outputs, tile, walk, memory, signals = shared
    dk_ptr, dk_strides, dv_ptr, dv_strides, dk_sum_ptr, dv_sum_ptr, key_turn_ptr, Sk = outputs
    batch, h, begin, n, queries, keys, window, scale, cap = tile
    ahead, step, steps, there = walk
    k_s, v_s, q_s, g_s, lse_s, delta_s, at_s, ds_s, dq_s = memory
    kv_full, q_full, g_full, empty, dq_full, dq_empty = signals
    k_rest_s, q_rest_s, dq_rest_s, p_s, g_empty = parts
    KEYS: gl.constexpr = k_s.shape[0]
    WIDTH: gl.constexpr = k_s.shape[1]
    REST: gl.constexpr = k_rest_s.shape[1]
    DTYPE: gl.constexpr = k_s.dtype
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, _WARPS // 4], [16, _ROWS // 2, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, _WARPS // 4], [16, WIDTH // 2, 16])
    RESTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, _WARPS // 4], [16, REST // 2, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    j = n + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    dk = gl.zeros([KEYS, WIDTH], gl.float32, SUMS)
    dk_rest = gl.zeros([KEYS, REST], gl.float32, RESTS)
    dv = gl.zeros([KEYS, WIDTH], gl.float32, SUMS)
    none = gl.zeros([KEYS, _ROWS], gl.float32, LAYOUT)
    none_of = gl.zeros([_ROWS, WIDTH], gl.float32, SUMS)
    none_of_rest = gl.zeros([_ROWS, REST], gl.float32, RESTS)
    if steps > 0:
        mbarrier.wait(kv_full, 0)
    stage, phase, g_phase = 0, 0, 0
    for _ in range(steps):
        q, q_rest, g = q_s.index(stage), q_rest_s.index(stage), g_s.index(0)
        mbarrier.wait(q_full.index(stage), phase)
        s = warpgroup_mma(k_s, q.permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma(k_rest_s, q_rest.permute((1, 0)), s, is_async=True)
        mbarrier.wait(g_full.index(0), g_phase)
        dp = warpgroup_mma(v_s, g.permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        l, _ = logits(s, scale, cap, False)
        p = gl.exp2(l - lse_s.index(stage).load(COLUMN)[None, :])
        edge = n + KEYS > keys
        if FIXED.CAUSAL:
            edge = edge | (ahead < KEYS - 1)
        if FIXED.WINDOW:
            edge = edge | (ahead + _ROWS > window)
        if edge:
            at = at_s.index(stage).load(COLUMN)
            mask = seen(at[None, :], j[:, None], keys, window, FIXED.CAUSAL, FIXED.WINDOW)
            p = gl.where(mask, p, 0.0)
        p_s.store(p.to(DTYPE))
        fence_async_shared()
        thread_barrier()
        dv = warpgroup_mma(p_s, g, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds_s.store((p * (dp - delta_s.index(stage).load(COLUMN)[None, :])).to(DTYPE))
        fence_async_shared()
        thread_barrier()
        ds = ds_s.permute((1, 0))
        dq = warpgroup_mma(ds, k_s, none_of, use_acc=False, is_async=True)
        dq_rest = warpgroup_mma(ds, k_rest_s, none_of_rest, use_acc=False, is_async=True)
        dk = warpgroup_mma(ds_s, q, dk, is_async=True)
        dk_rest = warpgroup_mma(ds_s, q_rest, dk_rest, is_async=True)
        dq, dq_rest, dv = warpgroup_mma_wait(2, deps=[dq, dq_rest, dv])
        if FIXED.PACKED and queries - n - ahead < _ROWS:
            # Added to the next document's rows: 0 times a NaN of this one's would be NaN.
            r = n + ahead + gl.arange(0, _ROWS, gl.SliceLayout(1, SUMS))
            dq = gl.where((r < queries)[:, None], dq, 0.0)
            r = n + ahead + gl.arange(0, _ROWS, gl.SliceLayout(1, RESTS))
            dq_rest = gl.where((r < queries)[:, None], dq_rest, 0.0)
        mbarrier.wait(dq_empty.index(stage), phase ^ 1)
        dq_s.index(stage).store(dq)
        dq_rest_s.index(stage).store(dq_rest)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(g_empty)
        mbarrier.arrive(dq_full.index(stage))
        dk, dk_rest = warpgroup_mma_wait(0, deps=[dk, dk_rest])
        mbarrier.arrive(empty.index(stage))
        stage, phase = advance(stage, phase, _STAGES)
        g_phase ^= 1
        ahead += step
    if there:
        dk *= scale
        dk_rest *= scale
        h = _here(h)
        b, kv, turn = batch.to(gl.int64), (h // FIXED.GROUP).to(gl.int64), h % FIXED.GROUP
        start = begin.to(gl.int64)
        if FIXED.GROUP > 1:
            key_at = (b * (gl.num_programs(1) // FIXED.GROUP) + kv) * Sk + begin
            counter_ptr = key_turn_ptr + key_at + n
            _await_turn(counter_ptr, turn)
            sum_ptr = dk_sum_ptr + key_at * FIXED.D
            dk = _add_head(dk, sum_ptr, n, keys, turn, FIXED.GROUP, WIDTH, FIXED.D)
            dk_rest = _add_head(
                dk_rest, sum_ptr + WIDTH, n, keys, turn, FIXED.GROUP, FIXED.D - WIDTH, FIXED.D
            )
            dv = _add_head(
                dv, dv_sum_ptr + key_at * FIXED.DV, n, keys, turn, FIXED.GROUP, FIXED.DV, FIXED.DV
            )
            _end_turn(counter_ptr)
        if FIXED.GROUP == 1 or turn == FIXED.GROUP - 1:
            to = dk_ptr + b * dk_strides[0] + kv * dk_strides[1] + start * dk_strides[2]
            _store(dk, to, dk_strides[2], n, keys, WIDTH)
            _store(dk_rest, to + WIDTH, dk_strides[2], n, keys, FIXED.D - WIDTH)
            dv_at = _offset(dv_strides, b, kv, start)
            _store(dv, dv_ptr + dv_at, dv_strides[2], n, keys, FIXED.DV)


@gluon.jit(do_not_specialize=["capacity", "S", "Sk", "offset", "window"])
def _backward(
    q,
    q_rest,
    k,
    k_rest,
    v,
    g,
    lse_ptr,
    delta_ptr,
    part,
    part_rest,
    row_turn_ptr,
    dk_ptr,
    dv_ptr,
    dk_sum_ptr,
    dv_sum_ptr,
    key_turn_ptr,
    tiles_ptr,
    cu_ptr,
    capacity,
    S,
    Sk,
    offset,
    window,
    scale,
    cap,
    dk_strides,
    dv_strides,
    FIXED: gl.constexpr,
    EMPTY: gl.constexpr,
    LATE: gl.constexpr,
    ADDERS: gl.constexpr,
):
    """q, k, v, g: descriptors [batch, heads, positions, D or DV].   part: one as q's, of dq without
    the scale, float32, zeros. EMPTY: not zeros, and tiles see all rows.
    q_rest, k_rest, part_rest: the REST columns that follow WIDTH, or None.
    dk_sum, dv_sum: float32 [B, Hk, Sk, D or DV].   row_turn, key_turn: int32 [B, Hq, S] and
    [B, Hk, Sk], zeros.
    LATE: so many last heads are launched together, the first keys first.
    """
    KEYS: gl.constexpr = k.block_shape[2]
    G_STAGES: gl.constexpr = 1 if FIXED.REST else _STAGES
    k_s = stages(q.dtype, 1, KEYS, FIXED.WIDTH).index(0)
    v_s = stages(q.dtype, 1, KEYS, FIXED.WIDTH).index(0)
    q_s, g_s = (
        stages(q.dtype, _STAGES, _ROWS, FIXED.WIDTH),
        stages(q.dtype, G_STAGES, _ROWS, FIXED.WIDTH),
    )
    ds_s = stages(q.dtype, 1, KEYS, _ROWS).index(0)
    dq_s = stages(gl.float32, _STAGES, _ROWS, FIXED.WIDTH)
    k_rest_s, q_rest_s, dq_rest_s, p_s = k_s, q_s, dq_s, ds_s  # not used
    if FIXED.REST:
        k_rest_s = stages(q.dtype, 1, KEYS, FIXED.REST).index(0)
        q_rest_s = stages(q.dtype, _STAGES, _ROWS, FIXED.REST)
        dq_rest_s = stages(gl.float32, _STAGES, _ROWS, FIXED.REST)
        p_s = stages(q.dtype, 1, KEYS, _ROWS).index(0)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_s = gl.allocate_shared_memory(gl.float32, [_STAGES, _ROWS], LINE)
    delta_s = gl.allocate_shared_memory(gl.float32, [_STAGES, _ROWS], LINE)
    at_s = gl.allocate_shared_memory(gl.int32, [_STAGES, _ROWS], LINE)
    MORE: gl.constexpr = 1 if FIXED.REST else 0
    q_full, g_full, empty = barriers(_STAGES, 2 + MORE), barriers(G_STAGES, 2), barriers(_STAGES, 1)
    kv_full, alone = barriers(1, 2 + MORE), barriers(1, 1)
    dq_full, dq_empty = barriers(_STAGES, 1), barriers(_STAGES, 1)
    g_empty = alone  # not used
    if FIXED.REST:
        g_empty = barriers(1, 1)
    # The last keys of a document first; all keys of a head before the next head's. In the last
    # heads, the keys with the most queries first, so that all SMs end at the same time.
    t, h, late = launched(LATE)
    t = gl.where(late, t, gl.num_programs(0) - 1 - t)
    there, batch, n, begin, queries, keys = place(
        tiles_ptr, cu_ptr, capacity, S, Sk, t, Sk, KEYS, FIXED.PACKED
    )
    # Packed documents have no offset, and other tiles are all there: constants take no registers.
    if FIXED.PACKED:
        offset = 0
    else:
        there = t == t
    low, high = rows_of(n, n + KEYS - 1, queries, offset, window, _ROWS, FIXED.CAUSAL, FIXED.WINDOW)
    steps = gl.where(there, gl.cdiv(high - low, _ROWS), 0)
    m = gl.where(late, low + (steps - 1) * _ROWS, low)
    step = gl.where(late, -_ROWS, _ROWS)
    row_at = (batch.to(gl.int64) * gl.num_programs(1) + h) * S + begin
    ahead = m + offset - n
    shared = (
        (dk_ptr, dk_strides, dv_ptr, dv_strides, dk_sum_ptr, dv_sum_ptr, key_turn_ptr, Sk),
        (batch, h, begin, n, queries, keys, window, scale, cap),
        (ahead, step, steps, there),
        (k_s, v_s, q_s, g_s, lse_s, delta_s, at_s, ds_s, dq_s),
        (kv_full.index(0), q_full, g_full, empty, dq_full, dq_empty),
    )
    walk = m, step, steps
    adds = (
        (part, row_turn_ptr + row_at),
        (batch, h, begin, n, offset, keys, window),
        walk,
        (dq_s, dq_full, dq_empty, part_rest, dq_rest_s),
    )
    parts = k_rest_s, q_rest_s, dq_rest_s, p_s, g_empty.index(0)
    operands = q, q_rest, k, k_rest, v, g, lse_ptr + row_at, delta_ptr + row_at
    tile = batch, h, begin, n, offset, queries, keys
    memory = k_s, k_rest_s, v_s, q_s, q_rest_s, g_s, lse_s, delta_s, at_s
    signals = kv_full.index(0), q_full, g_full, empty, g_empty.index(0), alone.index(0)
    gl.warp_specialize(
        [
            (_differentiate_parts, (shared, parts, FIXED))
            if FIXED.REST
            else (_differentiate, (shared, FIXED)),
            (_load, (operands, tile, walk, memory, signals, FIXED)),
            (_add, (adds, 0, FIXED, EMPTY, ADDERS, KEYS)),
            (_add, (adds, 1, FIXED, EMPTY, ADDERS, KEYS)),
        ],
        [1, 1, 1],
        [ONE_WARP, ONE_WARP, ONE_WARP],
    )


def _keys(fixed: Fixed) -> int:
    """Keys of a tile."""
    return 64 if fixed.REST else 128


def _ways(heads: int, seen: bool, fixed: Fixed) -> dict:
    """The kernel's last constants.   seen: as `_all_seen`."""
    # An addition takes about as long as a step, so that two warps share them. Triton 3.9 holds a
    # few thread indices more, which leave no registers for two beside 128 keys.
    adders = 2 if older_triton() or fixed.REST else 1
    return {"EMPTY": seen, "LATE": min(LATE, heads), "ADDERS": adders}


def _all_seen(fixed: Fixed, offset: int) -> bool:
    """Whether tiles of keys write all rows of dq, and no rows that are not theirs."""
    return not (fixed.PACKED or fixed.WINDOW or (fixed.CAUSAL and offset < 0))


def backward(tensors, numbers, fixed: Fixed, config: dict, grid) -> torch.Tensor:
    """dk and dv as attention_triton's, of operands that TMA reads. Returns dq without the scale, in
    float32.

    tensors: dout, q, k, v, lse, delta, dk, dv, tiles and cu_seqlens.
    numbers: from `capacity` to `cap`.
    """
    dout, q, k, v, lse, delta, dk, dv, tiles, cu_seqlens = tensors
    (B, Hq, S), (Hk, Sk) = q.shape[:3], k.shape[1:3]
    width, rest, keys = fixed.WIDTH, fixed.REST, _keys(fixed)
    assert keys == config["BLOCK_N"] // (2 if rest else 1), config  # the grid's tiles
    ways = _ways(Hq, _all_seen(fixed, numbers[3]), fixed)
    part = (q.new_empty if ways["EMPTY"] else q.new_zeros)(q.shape, dtype=torch.float32)
    turns = q.new_zeros(B * (Hq * S + Hk * Sk), dtype=torch.int32)
    shared = Hq > Hk
    sums = [lse.new_empty(t.shape) if shared else None for t in (k, v)]
    rows, tile = [1, 1, _ROWS.value, width], [1, 1, keys, width]
    launch(
        _backward,
        grid,
        descriptor(q, rows),
        descriptor(q, [*rows[:3], rest]) if rest else None,
        descriptor(k, tile),
        descriptor(k, [*tile[:3], rest]) if rest else None,
        descriptor(v, tile),
        descriptor(dout, rows),
        lse,
        delta,
        descriptor(part, rows),
        descriptor(part, [*rows[:3], rest]) if rest else None,
        turns[: B * Hq * S],
        dk,
        dv,
        *sums,
        turns[B * Hq * S :] if shared else None,
        tiles,
        cu_seqlens,
        *numbers,
        dk.stride()[:3],
        dv.stride()[:3],
        FIXED=fixed,
        **ways,
        num_warps=_WARPS.value,
    )
    return part


def fits(fixed: Fixed) -> bool:
    """Whether it computes this without spilling registers."""
    width, capped = fixed.WIDTH, fixed.SOFTCAP
    if fixed.REST:
        return not capped
    return fixed.DV == fixed.D and width <= (64 if capped else 128)


def spec(label: str, pointers: dict, fixed: Fixed) -> KernelSpec:
    """pointers, fixed: as attention_triton's."""
    t, shared = pointers["*"], fixed.GROUP > 1
    width, rest, keys = fixed.WIDTH, fixed.REST, _keys(fixed)
    rows = 1, 1, _ROWS.value
    described = {
        **dict.fromkeys("qg", descriptor_type(t, *rows, width)),
        **dict.fromkeys("kv", descriptor_type(t, 1, 1, keys, width)),
        "part": descriptor_type("fp32", *rows, width),
    }
    if rest:
        described["q_rest"] = descriptor_type(t, *rows, rest)
        described["k_rest"] = descriptor_type(t, 1, 1, keys, rest)
        described["part_rest"] = descriptor_type("fp32", *rows, rest)
    ways = _ways(LATE, _all_seen(fixed, 0), fixed)
    constants = {"FIXED": fixed, **ways, "num_warps": _WARPS.value}
    if not rest:
        constants |= {"q_rest": None, "k_rest": None, "part_rest": None}
    strides = dict.fromkeys(("dk_strides", "dv_strides"), STRIDES)
    return KernelSpec.of(
        _backward,
        label,
        {
            **pointers,
            "row_turn": "i32",
            "dk_sum": "fp32" if shared else None,
            "dv_sum": "fp32" if shared else None,
            "key_turn": "i32" if shared else None,
        },
        constants,
        {**described, "scale": "fp32", "cap": "fp32", **strides},
        divisible=tuple(strides),
        # TMA reads the operands; sums are added and stored in pairs, as wgmma holds them.
        load=64,
        store=32,
        **HOPPER,
    )
