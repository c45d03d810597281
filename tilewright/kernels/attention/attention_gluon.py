"""Attention's forward with warp specialization, for sm_90: the `_forward` of attention_triton.py,
which prepares the arguments (specialized.py). Tiles, masks and results are those of that module.

A block has a tile of 128 queries. One warp loads it, and blocks of keys and values into a ring; two
warpgroups have 64 queries each (FlashAttention-3, arXiv:2407.08608). Within a warpgroup the logits
of the next block and this block's sums are multiplied together, and the softmax of the former is
computed while the latter are in flight. Between the two, turns (`turn`) let one begin its products
while the other computes its softmax.

    loads:     wait empty, expect bytes on full, copy; a block of keys, a block of values, ...
    attends:   logits of the first block, and their softmax p
               per further block: begin q k^T, begin acc += p v of the block before;
                                  the softmax of the logits; wait for acc, rescale it
               acc += p v of the last block

Blocks of keys go from last to first, since the last ones need masks. Two documents may share a
block: rows of values that are the next document's are set to zero, since 0 times NaN is NaN.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.kernels.attention.logits_triton import (
    LN2,
    LOG2E,
    STRIDES,
    Fixed,
    blocks_of_keys,
    place,
    seen,
    tanh,
)
from tilewright.kernels.launch import launch
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.warp_specialized import (
    GATHERING_WIDE,
    HOPPER,
    MULTIPLYING,
    ONE_WARP,
    advance,
    barriers,
    descriptor,
    descriptor_type,
    load_rows,
    stages,
    thread_barrier,
    tma_load,
)

_ROWS = gl.constexpr(64)  # queries of a warpgroup
# Heads that are launched together at the end: 8,192 tokens have 512 tiles, four rounds on 132 SMs.
# Others were not measured.
LATE = 8
# Registers of a thread of a warpgroup, of narrow rows: what GATHERING_WIDE leaves.
ATTENDING_NARROW = gl.constexpr(208)


@gluon.jit
def launched(LATE: gl.constexpr):
    """A block's tile and head, counted as they are launched, and whether its head is one of the
    last LATE: a head's tiles before the next head's, but those of the last heads in turn, so that
    what is launched last are tiles of the same size.
    """
    t, h = gl.program_id(0), gl.program_id(1)
    first = gl.num_programs(1) - LATE
    late = h >= first
    if LATE:
        at = t + (h - first) * gl.num_programs(0)
        t, h = gl.where(late, at // LATE, t), gl.where(late, first + at % LATE, h)
    return t, h, late


@gluon.jit
def _blocks(m, offset, keys, window, N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """The last block of keys that 128 queries from row m on see, and three counts of the blocks
    before it: those that need a mask, those that need none, and those in which a window ends. There
    is at least one block, which may be masked.
    """
    first = m + offset
    low, free, full, high = blocks_of_keys(first, first + 127, keys, window, N, CAUSAL, WINDOW)
    low, free, full = low // N, free // N, full // N
    last = gl.maximum((high - 1) // N, low)
    return (
        last,
        gl.maximum(last - full, 0),
        gl.maximum(gl.minimum(full, last) - free, 0),
        gl.maximum(gl.minimum(free, last) - low, 0),
    )


@gluon.jit
def _load(operands, tile, memory, signals, FIXED: gl.constexpr):
    """One warp. Rows past a tensor's last read zeros."""
    q, q_rest, k, k_rest, v = operands
    batch, h, row, begin, keys, last, steps = tile
    q_s, q_rest_s, k_s, k_rest_s, v_s = memory
    q_full, k_full, k_empty, v_full, v_empty, alone = signals
    STAGES: gl.constexpr = k_s.shape[0]
    N: gl.constexpr = k_s.shape[1]
    WIDTH: gl.constexpr = k_s.shape[2]
    REST: gl.constexpr = FIXED.REST
    if steps > 0:
        rest: gl.constexpr = q_rest.block_type.nbytes if REST else 0
        mbarrier.expect(q_full, 2 * (q.block_type.nbytes + rest))
        for w in gl.static_range(2):
            at = row + w * _ROWS
            tma_load(q, [batch, h, at, 0], q_full, q_s.index(w).reshape(q.block_shape))
            if REST:
                here = q_rest_s.index(w).reshape(q_rest.block_shape)
                tma_load(q_rest, [batch, h, at, WIDTH], q_full, here)
    cleared, stage, phase = 0, 0, 0
    for step in range(steps):
        n = (last - step) * N
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        rest: gl.constexpr = k_rest.block_type.nbytes if REST else 0
        mbarrier.expect(k_full.index(stage), k.block_type.nbytes + rest)
        here = k_s.index(stage).reshape(k.block_shape)
        tma_load(k, [batch, h // FIXED.GROUP, begin + n, 0], k_full.index(stage), here)
        if REST:
            here = k_rest_s.index(stage).reshape(k_rest.block_shape)
            tma_load(k_rest, [batch, h // FIXED.GROUP, begin + n, WIDTH], k_full.index(stage), here)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        to, full, corner = (
            v_s.index(stage),
            v_full.index(stage),
            [batch, h // FIXED.GROUP, begin + n, 0],
        )
        # Only the last block of keys, which is loaded first, has rows of another document.
        cleared = load_rows(v, corner, to, full, keys - n, alone, cleared, FIXED.PACKED)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _softmax(s, top, total, sight, n, FIXED: gl.constexpr, MASKED: gl.constexpr):
    """The exponentials of products s [rows, keys from n on], the largest logit so far (in base 2),
    the sum of exponentials so far, and the factor of earlier sums.

    sight: the rows' positions, the number of keys, the window, the scale and the cap.
    """
    rows, keys, window, scale, cap = sight
    if FIXED.SOFTCAP:
        s = tanh(s * (scale / cap))
        factor = cap * LOG2E
    else:
        factor = scale * LOG2E
    if MASKED:
        column = n + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        mask = seen(rows[:, None], column[None, :], keys, window, FIXED.CAUSAL, FIXED.WINDOW)
        s = gl.where(mask, s, float("-inf"))
    new = gl.maximum(top, gl.max(s, 1) * factor)
    base = gl.where(new == float("-inf"), 0.0, new)  # a row that has seen no key yet
    p = gl.exp2(s * factor - base[:, None])
    shrink = gl.exp2(top - base)
    return p, new, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _operand(p, dtype: gl.constexpr):
    """Probabilities as the left operand of a product, in registers."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, p.type.layout, 2)
    return gl.convert_layout(p.to(dtype), LAYOUT)


@gluon.jit
def _product(q, q_rest, k, k_rest, N: gl.constexpr, REST: gl.constexpr):
    """Begins q k^T, of keys in two parts where they have a rest."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    # Not carried from a loop's last step, which would cost its registers.
    none = gl.zeros([_ROWS, N], gl.float32, LAYOUT)
    s = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
    if REST:
        s = warpgroup_mma(q_rest, k_rest.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _steps(count, state, given, FIXED: gl.constexpr, MASKED: gl.constexpr):
    """`count` blocks of keys, down from the one before n."""
    n, acc, p, top, total, k_stage, k_phase, v_stage, v_phase, parity = state
    q, q_rest, memory, signals, mine, other, sight = given
    k_s, k_rest_s, v_s = memory
    k_full, k_empty, v_full, v_empty = signals
    STAGES: gl.constexpr = k_s.shape[0]
    N: gl.constexpr = k_s.shape[1]
    for _ in range(count):
        n -= N
        mbarrier.wait(k_full.index(k_stage), k_phase)
        mbarrier.wait(mine, parity)
        rest = k_rest_s.index(k_stage)
        s = _product(q, q_rest, k_s.index(k_stage), rest, N, FIXED.REST)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        acc = warpgroup_mma(p, v_s.index(v_stage), acc, is_async=True)
        mbarrier.arrive(other)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(k_stage))
        s, top, total, shrink = _softmax(s, top, total, sight, n, FIXED, MASKED)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(v_empty.index(v_stage))
        acc *= gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
        p = _operand(s, v_s.dtype)
        k_stage, k_phase = advance(k_stage, k_phase, STAGES)
        v_stage, v_phase = advance(v_stage, v_phase, STAGES)
        parity ^= 1
    return n, acc, p, top, total, k_stage, k_phase, v_stage, v_phase, parity


@gluon.jit
def _attend(shared, W: gl.constexpr, FIXED: gl.constexpr):
    """Warpgroup W of two. last: -1 if there is nothing to do."""
    outputs, tile, blocks, numbers, memory_of_q, memory, signals, turn = shared
    sinks_ptr, out_ptr, lse_ptr = outputs
    h, m, offset, queries, keys, window = tile
    last, masked, free, ended = blocks
    scale, cap, out_at, o_row, lse_at = numbers
    q_s, q_rest_s, q_full = memory_of_q
    k_s, k_rest_s, v_s = memory
    k_full, k_empty, v_full, _empty = signals
    STAGES: gl.constexpr = k_s.shape[0]
    N: gl.constexpr = k_s.shape[1]
    WIDTH: gl.constexpr = v_s.shape[2]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    if last >= 0:
        i = W * _ROWS + gl.arange(0, _ROWS, ROW)
        rows = m + offset + i
        top = gl.full([_ROWS], float("-inf"), gl.float32, ROW)
        total = gl.zeros([_ROWS], gl.float32, ROW)
        if FIXED.SINKS:  # a key with this logit, whose value is 0
            top = gl.zeros([_ROWS], gl.float32, ROW) + gl.load(sinks_ptr + h) * LOG2E
            total = gl.where(top == float("-inf"), 0.0, 1.0)
        q, q_rest = q_s.index(W), q_rest_s.index(W)
        n = last * N
        acc = gl.zeros([_ROWS, WIDTH], gl.float32, SUMS)
        mbarrier.wait(q_full, 0)
        mbarrier.wait(k_full.index(0), 0)
        s = _product(q, q_rest, k_s.index(0), k_rest_s.index(0), N, FIXED.REST)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(0))
        sight = rows, keys, window, scale, cap
        s, top, total, _ = _softmax(s, top, total, sight, n, FIXED, True)
        p = _operand(s, v_s.dtype)
        v_stage, v_phase = 0, 0
        k_stage, k_phase = advance(v_stage, v_phase, STAGES)
        parity = 1 - W  # the first warpgroup's first turn is free
        state = n, acc, p, top, total, k_stage, k_phase, v_stage, v_phase, parity
        mine, other = turn.index(W), turn.index(1 - W)
        given = q, q_rest, memory, signals, mine, other, sight
        state = _steps(masked, state, given, FIXED, True)
        state = _steps(free, state, given, FIXED, False)
        if FIXED.WINDOW:
            state = _steps(ended, state, given, FIXED, True)
        _, acc, p, top, total, _, _, v_stage, v_phase, _ = state
        mbarrier.wait(v_full.index(v_stage), v_phase)
        acc = warpgroup_mma(p, v_s.index(v_stage), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        live = m + i < queries
        gl.store(lse_ptr + lse_at + i, (top + gl.log2(total)) * LN2, mask=live)
        share = 1.0 / gl.where(total == 0, 1.0, total)
        acc *= gl.convert_layout(share, gl.SliceLayout(1, SUMS))[:, None]
        # Through the memory of these queries, so that a thread stores 16 bytes.
        q.store(acc.to(q.dtype))
        thread_barrier()
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
        r = W * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, WIDE))
        d = gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE))
        at = out_ptr + out_at + r.to(gl.int64)[:, None] * o_row + d[None, :]
        gl.store(at, q.load(WIDE), mask=(m + r < queries)[:, None] & (d < FIXED.DV)[None, :])


@gluon.jit(do_not_specialize=["capacity", "S", "Sk", "offset", "window"])
def _forward(
    q,
    q_rest,
    k,
    k_rest,
    v,
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
    o_strides,
    FIXED: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    LATE: gl.constexpr,
):
    """q, k, v: descriptors [batch, heads, positions, D or DV], with boxes of WIDTH columns.
    q_rest, k_rest: descriptors of the same q and k, with boxes of the REST columns that follow, or
        None.
    """
    q_s = stages(q.dtype, 2, _ROWS, FIXED.WIDTH)
    k_s = stages(k.dtype, STAGES, N, FIXED.WIDTH)
    q_rest_s, k_rest_s = q_s, k_s  # not read
    if FIXED.REST:
        q_rest_s = stages(q.dtype, 2, _ROWS, FIXED.REST)
        k_rest_s = stages(k.dtype, STAGES, N, FIXED.REST)
    v_s = stages(v.dtype, STAGES, N, FIXED.WIDTH)
    k_full, k_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    single, turn = barriers(2, 1), barriers(2, 1)
    # The last tiles of a document have the most keys, and start first.
    t, h, _late = launched(LATE)
    t = gl.num_programs(0) - 1 - t
    there, batch, m, begin, queries, keys = place(
        tiles_ptr, cu_ptr, capacity, S, Sk, t, S, 2 * _ROWS, FIXED.PACKED
    )
    last, masked, free, ended = _blocks(m, offset, keys, window, N, FIXED.CAUSAL, FIXED.WINDOW)
    steps = gl.where(there, 1 + masked + free + ended, 0)
    last = gl.where(there, last, -1)
    row = begin + m
    b = batch.to(gl.int64)
    out_at = b * o_strides[0] + h.to(gl.int64) * o_strides[1] + row.to(gl.int64) * o_strides[2]
    lse_at = (b * gl.num_programs(1) + h) * S + row
    shared = (
        (sinks_ptr, out_ptr, lse_ptr),
        (h, m, offset, queries, keys, window),
        (last, masked, free, ended),
        (scale, cap, out_at, o_strides[2], lse_at),
        (q_s, q_rest_s, single.index(0)),
        (k_s, k_rest_s, v_s),
        (k_full, k_empty, v_full, v_empty),
        turn,
    )
    operands, tile = (q, q_rest, k, k_rest, v), (batch, h, row, begin, keys, last, steps)
    memory = q_s, q_rest_s, k_s, k_rest_s, v_s
    signals = single.index(0), k_full, k_empty, v_full, v_empty, single.index(1)
    gl.warp_specialize(
        [
            (_attend, (shared, 0, FIXED)),
            (_attend, (shared, 1, FIXED)),
            (_load, (operands, tile, memory, signals, FIXED)),
        ],
        [4, 1],
        # Narrow rows leave registers to the warp that loads.
        [MULTIPLYING, ONE_WARP] if FIXED.WIDTH > 64 else [ATTENDING_NARROW, GATHERING_WIDE],
    )


def _pieces(config: dict, fixed: Fixed) -> dict[str, int]:
    """Keys in a block, and stages: as the configuration has them for rows of up to 128; wider ones
    have fewer keys, for their registers, and packed ones fewer still.
    """
    keys, stages = config["BLOCK_N"], config["num_stages"]
    if fixed.WIDTH > 128:
        return (
            {"N": keys // 4, "STAGES": 2 * stages}
            if fixed.PACKED
            else {"N": keys // 2, "STAGES": stages}
        )
    return {"N": keys, "STAGES": stages}


def forward(tensors, numbers, fixed: Fixed, config: dict, grid) -> None:
    """Launches the forward like attention_triton's, with operands that TMA reads.

    tensors: from q to cu_seqlens.   numbers: from `capacity` to `cap`.
    """
    (q, k, v), (sinks, out, *others) = tensors[:3], tensors[3:]
    assert config["BLOCK_M"] == 2 * _ROWS.value, config  # the grid's tiles
    width, rest, pieces = fixed.WIDTH, fixed.REST, _pieces(config, fixed)
    rows, keys = _ROWS.value, pieces["N"]
    launch(
        _forward,
        grid,
        descriptor(q, [1, 1, rows, width]),
        descriptor(q, [1, 1, rows, rest]) if rest else None,
        descriptor(k, [1, 1, keys, width]),
        descriptor(k, [1, 1, keys, rest]) if rest else None,
        descriptor(v, [1, 1, keys, width]),
        sinks,
        out,
        *others,
        *numbers,
        out.stride()[:3],
        FIXED=fixed,
        **pieces,
        LATE=min(LATE, grid[1]),
        num_warps=config["num_warps"],
    )


def spec(label: str, pointers: dict, fixed: Fixed, config: dict) -> KernelSpec:
    """pointers, fixed: as attention_triton's."""
    width, rest, t = fixed.WIDTH, fixed.REST, pointers["*"]
    pieces = _pieces(config, fixed)
    rows, keys = _ROWS.value, pieces["N"]
    described = {
        "q": descriptor_type(t, 1, 1, rows, width),
        **dict.fromkeys("kv", descriptor_type(t, 1, 1, keys, width)),
    }
    if rest:
        described["q_rest"] = descriptor_type(t, 1, 1, rows, rest)
        described["k_rest"] = descriptor_type(t, 1, 1, keys, rest)
    constants = {"FIXED": fixed, **pieces, "LATE": LATE, "num_warps": config["num_warps"]}
    return KernelSpec.of(
        _forward,
        label,
        pointers,
        constants if rest else {**constants, "q_rest": None, "k_rest": None},
        {**described, "scale": "fp32", "cap": "fp32", "o_strides": STRIDES},
        divisible=("o_strides",),
        # TMA reads all but one sink, and places of tiles.
        load=0,
        **HOPPER,
    )
