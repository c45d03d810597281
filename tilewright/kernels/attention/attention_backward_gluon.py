"""Attention's backward in one kernel with warp specialization, for sm_90: attention_triton.py
launches it in place of `_backward_q` and `_backward_kv` where a configuration says so. Five
products for a block of queries and one of keys, where those two kernels need seven.

A block has a tile of 128 keys and a query head, and walks the queries that see it, 64 at a time:

    loads:           keys and values; per step, queries and gradients into a ring
    differentiates:  two warpgroups, with 64 keys each; per step, as [keys, queries],
                         s = k q^T, dp = v g^T, p = exp(s - lse), dv += p g,
                         ds = p (dp - delta), dk += ds q
                     and adds its part of dq, ds^T k

Many warpgroups add to a row of dq, one after the other, from the last keys that it sees to the
first: the order is fixed, so that results are deterministic. A counter per block of rows says whose
turn it is. The last keys are launched first, and nobody waits for what is launched later; they
start at the queries that no later keys see, so that nobody waits long. An addition is announced a
step after it was made, when it has arrived. Query heads that share a key head add to its dk and dv
in the same way.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.kernels.attention.attention_gluon import ATTENDING
from tilewright.kernels.attention.attention_triton import logits, place, power_of, rows_of, seen
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
)

_ROWS = gl.constexpr(64)  # queries of a step; keys of a warpgroup
KEYS = 128  # of a tile
_KEYS = gl.constexpr(KEYS)
_STAGES = gl.constexpr(2)


@gluon.jit
def _here(n):
    """n, as a value that the compiler cannot move out of a loop: addresses are computed from it
    again in each step, instead of held in registers.
    """
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
def _turn_of(m, n, offset, keys, CAUSAL: gl.constexpr):
    """How many tiles of keys add to dq at rows from m on before that of keys from n on. A tile of
    keys sees these rows as `rows_of` says.
    """
    top = (keys - 1) // _KEYS
    if CAUSAL:
        top = gl.minimum(top, (m + offset + _ROWS - 1) // _KEYS)
    return top - n // _KEYS


@gluon.jit
def _load(
    q,
    k,
    v,
    g,
    lse_ptr,
    delta_ptr,
    batch,
    h,
    begin,
    n,
    offset,
    queries,
    keys,
    low,
    steps,
    k_s,
    v_s,
    q_s,
    g_s,
    lse_s,
    delta_s,
    at_s,
    kv_full,
    q_full,
    g_full,
    empty,
    alone,
    GROUP: gl.constexpr,
    PACKED: gl.constexpr,
):
    """One warp. Rows past a tensor's last read zeros."""
    r = gl.arange(0, _ROWS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    cleared = 0
    for w in range(gl.where(steps > 0, 2, 0)):
        at = n + w * _ROWS
        corner, live = [batch, h // GROUP, begin + at, 0], keys - at
        cleared = load_rows(k, corner, k_s.index(w), kv_full, live, alone, cleared, PACKED)
        cleared = load_rows(v, corner, v_s.index(w), kv_full, live, alone, cleared, PACKED)
    stage, phase = 0, 0
    m = low
    for _ in range(steps):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        corner, live = [batch, h, begin + m, 0], queries - m
        full = q_full.index(stage)
        cleared = load_rows(q, corner, q_s.index(stage), full, live, alone, cleared, PACKED)
        full = g_full.index(stage)
        cleared = load_rows(g, corner, g_s.index(stage), full, live, alone, cleared, PACKED)
        lse = gl.load(lse_ptr + m + r, mask=r < live, other=float("inf"))
        lse_s.index(stage).store(power_of(lse))
        at_s.index(stage).store(m + offset + r)
        mbarrier.arrive(q_full.index(stage))
        delta_s.index(stage).store(gl.load(delta_ptr + m + r, mask=r < live, other=0.0))
        mbarrier.arrive(g_full.index(stage))
        stage, phase = advance(stage, phase, _STAGES)
        m += _ROWS


@gluon.jit
def _store(t, to_ptr, stride, first, end, D: gl.constexpr):
    """Stores rows from row `first` on, without those from `end` on, as wgmma holds them: once per
    tile, and wider stores would keep more addresses.
    """
    r = first + gl.arange(0, _ROWS, gl.SliceLayout(1, t.type.layout))
    d = gl.arange(0, t.shape[1], gl.SliceLayout(0, t.type.layout))
    at = to_ptr + r.to(gl.int64)[:, None] * stride + d[None, :]
    gl.store(at, t.to(to_ptr.dtype.element_ty), mask=(r < end)[:, None] & (d < D)[None, :])


@gluon.jit
def _add_head(t, sum_ptr, first, end, turn, GROUP: gl.constexpr, D: gl.constexpr):
    """Adds a query head's part [64, WIDTH] to earlier heads', and keeps the sum for later ones."""
    WIDTH: gl.constexpr = t.shape[1]
    LAYOUT: gl.constexpr = t.type.layout
    r = first + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    at = sum_ptr + r.to(gl.int64)[:, None] * D + d[None, :]
    mask = (r < end)[:, None] & (d < D)[None, :]
    t += gl.load(at, mask=mask & (turn > 0), other=0.0)
    gl.store(at, t, mask=mask & (turn < GROUP - 1))
    return t


@gluon.jit
def _differentiate(
    shared,
    W: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    """Warpgroup W of two. Arguments of the kernel are read where they are used; what is computed
    from them would take registers, so it is computed here.
    """
    (
        part_ptr,
        row_turn_ptr,
        dk_ptr,
        dk_batch,
        dk_head,
        dk_row,
        dv_ptr,
        dv_batch,
        dv_head,
        dv_row,
        dk_sum_ptr,
        dv_sum_ptr,
        key_turn_ptr,
        S,
        Sk,
        batch,
        h,
        begin,
        n,
        offset,
        queries,
        keys,
        window,
        scale,
        cap,
        low,
        steps,
        there,
        k_s,
        v_s,
        q_s,
        g_s,
        lse_s,
        delta_s,
        at_s,
        p_s,
        ds_s,
        kv_full,
        q_full,
        g_full,
        empty,
    ) = shared
    WIDTH: gl.constexpr = k_s.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    j = n + W * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
    row = gl.arange(0, _ROWS, gl.SliceLayout(1, SUMS))
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, SUMS))
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    dk = gl.zeros([_ROWS, WIDTH], gl.float32, SUMS)
    dv = gl.zeros([_ROWS, WIDTH], gl.float32, SUMS)
    # Of products that begin anew: not carried by the loop, which would cost their registers.
    none, none_of = gl.zeros([_ROWS, _ROWS], gl.float32, LAYOUT), gl.zeros_like(dk)
    if steps > 0:
        mbarrier.wait(kv_full, 0)
    stage, phase = 0, 0
    m = low
    row_at = (batch.to(gl.int64) * gl.num_programs(1) + h) * S + begin
    for step in range(steps):
        w = _here(h * 0 + W)
        k, v, p_of, ds_of = k_s.index(w), v_s.index(w), p_s.index(w), ds_s.index(w)
        mbarrier.wait(q_full.index(stage), phase)
        s = warpgroup_mma(k, q_s.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(g_full.index(stage), phase)
        dp = warpgroup_mma(v, g_s.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        l, slope = logits(s, scale, cap, SOFTCAP)
        p = gl.exp2(l - lse_s.index(stage).load(COLUMN)[None, :])
        edge = n + _KEYS > keys
        if CAUSAL:
            edge = edge | (m + offset < n + _KEYS - 1)
        if WINDOW:
            edge = edge | (m + offset + _ROWS - 1 - n >= window)
        if edge:
            # From shared memory: the loop would hold positions in registers.
            at = at_s.index(stage).load(COLUMN)
            mask = seen(at[None, :], j[:, None], keys, window, CAUSAL, WINDOW)
            p = gl.where(mask, p, 0.0)
        p_of.store(p.to(p_of.dtype))
        fence_async_shared()
        thread_barrier()
        dv = warpgroup_mma(p_of, g_s.index(stage), dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = p * (dp - delta_s.index(stage).load(COLUMN)[None, :])
        if SOFTCAP:
            ds *= slope
        ds_of.store(ds.to(ds_of.dtype))
        fence_async_shared()
        thread_barrier()
        dk = warpgroup_mma(ds_of, q_s.index(stage), dk, is_async=True)
        dq = warpgroup_mma(ds_of.permute((1, 0)), k, none_of, use_acc=False, is_async=True)
        dv, dk, dq = warpgroup_mma_wait(0, deps=[dv, dk, dq])
        mbarrier.arrive(empty.index(stage))
        if step > 0:
            _end_turn(row_turn_ptr + row_at + m - _ROWS)
        _await_turn(row_turn_ptr + row_at + m, 2 * _turn_of(m, n, offset, keys, CAUSAL) + W)
        at = part_ptr + row_at * D + ((m + row) * D)[:, None] + d[None, :]
        mask = (m + row < queries)[:, None] & (d < D)[None, :]
        gl.atomic_add(at, dq, mask=mask, sem="relaxed", scope="gpu")
        stage, phase = advance(stage, phase, _STAGES)
        m += _ROWS
    if steps > 0:
        _end_turn(row_turn_ptr + row_at + m - _ROWS)
    if there:
        dk *= scale
        first = n + W * _ROWS
        b, kv, turn = batch.to(gl.int64), (h // GROUP).to(gl.int64), h % GROUP
        start = begin.to(gl.int64)
        if GROUP > 1:
            key_at = (b * (gl.num_programs(1) // GROUP) + kv) * Sk + begin
            counter_ptr = key_turn_ptr + 2 * (key_at + n) + W
            _await_turn(counter_ptr, turn)
            dk = _add_head(dk, dk_sum_ptr + key_at * D, first, keys, turn, GROUP, D)
            dv = _add_head(dv, dv_sum_ptr + key_at * D, first, keys, turn, GROUP, D)
            _end_turn(counter_ptr)
        if GROUP == 1 or turn == GROUP - 1:
            dk_at = b * dk_batch + kv * dk_head + start * dk_row
            _store(dk, dk_ptr + dk_at, dk_row, first, keys, D)
            dv_at = b * dv_batch + kv * dv_head + start * dv_row
            _store(dv, dv_ptr + dv_at, dv_row, first, keys, D)


@gluon.jit(do_not_specialize=["capacity", "S", "Sk", "offset", "window"])
def _backward(
    q,
    k,
    v,
    g,
    lse_ptr,
    delta_ptr,
    part_ptr,
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
    dk_batch,
    dk_head,
    dk_row,
    dv_batch,
    dv_head,
    dv_row,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    WIDTH: gl.constexpr,
    PACKED: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    """q, k, v, g: descriptors [batch, heads, positions, D].   part: dq without the scale, float32
    [B, Hq, S, D], zeros.
    dk_sum, dv_sum: float32 [B, Hk, Sk, D].   row_turn, key_turn: int32 [B, Hq, S] and
    [B, Hk, Sk, 2], zeros.
    """
    k_s, v_s = stages(q.dtype, 2, _ROWS, WIDTH), stages(q.dtype, 2, _ROWS, WIDTH)
    q_s, g_s = stages(q.dtype, _STAGES, _ROWS, WIDTH), stages(q.dtype, _STAGES, _ROWS, WIDTH)
    p_s, ds_s = stages(q.dtype, 2, _ROWS, _ROWS), stages(q.dtype, 2, _ROWS, _ROWS)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_s = gl.allocate_shared_memory(gl.float32, [_STAGES, _ROWS], LINE)
    delta_s = gl.allocate_shared_memory(gl.float32, [_STAGES, _ROWS], LINE)
    at_s = gl.allocate_shared_memory(gl.int32, [_STAGES, _ROWS], LINE)
    q_full, g_full, empty = barriers(_STAGES, 2), barriers(_STAGES, 2), barriers(_STAGES, 2)
    kv_full, alone = barriers(1, 4), barriers(1, 1)
    # The last keys of a document first; those of a head before the next head's.
    t = gl.num_programs(0) - 1 - gl.program_id(0)
    h = gl.program_id(1)
    there, batch, n, begin, queries, keys = place(
        tiles_ptr, cu_ptr, capacity, S, Sk, t, Sk, _KEYS, PACKED
    )
    if PACKED:  # packed documents have no offset; a constant takes no register
        offset = 0
    low, high = rows_of(n, n + _KEYS - 1, queries, offset, window, _ROWS, CAUSAL, WINDOW)
    steps = gl.where(there, gl.cdiv(high - low, _ROWS), 0)
    row_at = (batch.to(gl.int64) * gl.num_programs(1) + h) * S + begin
    shared = (
        part_ptr,
        row_turn_ptr,
        dk_ptr,
        dk_batch,
        dk_head,
        dk_row,
        dv_ptr,
        dv_batch,
        dv_head,
        dv_row,
        dk_sum_ptr,
        dv_sum_ptr,
        key_turn_ptr,
        S,
        Sk,
        batch,
        h,
        begin,
        n,
        offset,
        queries,
        keys,
        window,
        scale,
        cap,
        low,
        steps,
        there,
        k_s,
        v_s,
        q_s,
        g_s,
        lse_s,
        delta_s,
        at_s,
        p_s,
        ds_s,
        kv_full.index(0),
        q_full,
        g_full,
        empty,
    )
    gl.warp_specialize(
        [
            (_differentiate, (shared, 0, GROUP, D, CAUSAL, WINDOW, SOFTCAP)),
            (_differentiate, (shared, 1, GROUP, D, CAUSAL, WINDOW, SOFTCAP)),
            (
                _load,
                (
                    q,
                    k,
                    v,
                    g,
                    lse_ptr + row_at,
                    delta_ptr + row_at,
                    batch,
                    h,
                    begin,
                    n,
                    offset,
                    queries,
                    keys,
                    low,
                    steps,
                    k_s,
                    v_s,
                    q_s,
                    g_s,
                    lse_s,
                    delta_s,
                    at_s,
                    kv_full.index(0),
                    q_full,
                    g_full,
                    empty,
                    alone.index(0),
                    GROUP,
                    PACKED,
                ),
            ),
        ],
        [4, 1],
        [ATTENDING, ONE_WARP],
    )


def backward(tensors, numbers, constants: dict, grid) -> torch.Tensor:
    """dk and dv as attention_triton's, of operands that TMA reads. Returns dq without the scale, in
    float32.

    tensors: dout, q, k, v, lse, delta, dk, dv, tiles and cu_seqlens.
    numbers: from `capacity` to `cap`.   constants: from GROUP to SOFTCAP.
    """
    dout, q, k, v, lse, delta, dk, dv, tiles, cu_seqlens = tensors
    (B, Hq, S), (Hk, Sk), width = q.shape[:3], k.shape[1:3], constants["WIDTH"]
    part = q.new_zeros(q.shape, dtype=torch.float32)
    turns = q.new_zeros(B * (Hq * S + Hk * Sk * 2), dtype=torch.int32)
    shared = Hq > Hk
    sums = [lse.new_empty(k.shape) if shared else None for _ in range(2)]
    rows = [1, 1, _ROWS.value, width]
    launch(
        _backward,
        grid,
        *(descriptor(t, rows) for t in (q, k, v, dout)),
        lse,
        delta,
        part,
        turns[: B * Hq * S],
        dk,
        dv,
        *sums,
        turns[B * Hq * S :] if shared else None,
        tiles,
        cu_seqlens,
        *numbers,
        *dk.stride()[:3],
        *dv.stride()[:3],
        **{n: value for n, value in constants.items() if n in _backward.arg_names},
        num_warps=4,
    )
    return part


def fits(constants: dict) -> bool:
    """Whether it computes this without spilling registers. From 3.9 on, Triton holds a few thread
    indices more, for which packed documents with rows of 128 leave no registers.
    """
    wide = constants["WIDTH"] > 64
    one = not constants["REST"] and constants["DV"] == constants["D"]
    return (
        one
        and constants["WIDTH"] <= 128
        and not (wide and (constants["SOFTCAP"] or (constants["PACKED"] and not older_triton())))
    )


def spec(label: str, pointers: dict, constants: dict) -> KernelSpec:
    """pointers, constants: as attention_triton's."""
    t, shared = pointers["*"], constants["GROUP"] > 1
    operand = descriptor_type(t, 1, 1, _ROWS.value, constants["WIDTH"])
    return KernelSpec.of(
        _backward,
        label,
        {
            **pointers,
            "part": "fp32",
            "row_turn": "i32",
            "dk_sum": "fp32" if shared else None,
            "dv_sum": "fp32" if shared else None,
            "key_turn": "i32" if shared else None,
        },
        {**constants, "num_warps": 4},
        {
            **dict.fromkeys("qkvg", operand),
            "scale": "fp32",
            "cap": "fp32",
        },
        divisible=tuple(f"{t}_{of}" for t in ("dk", "dv") for of in ("batch", "head", "row")),
        # TMA reads the operands; sums are added and stored in pairs, as wgmma holds them.
        load=64,
        store=32,
        **HOPPER,
    )
