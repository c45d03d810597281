"""Top-k routing of tokens to experts in Triton. The definition, and the formulas, are in
tilewright/ops/moe/route.py.

T = tokens, E = experts, K = experts per token. A program holds ROWS whole rows in registers, WIDTH
= GP * SP columns each: groups and the experts of a group, each padded to a power of two, so that a
reshape separates groups; padding comes after real columns, and column order is expert order.
Choices compare integers in the order of their floats, which makes ties exact: the largest of a row,
lower column first, K times.

Forward: programs process disjoint runs of tokens and accumulate probabilities and counts of
choices; a second launch adds the programs' sums in order. Backward: one pass from logits, choices
and counts alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv, next_power_of_2
from tilewright.kernels.math_triton import exp_or_zero, reciprocal, sigmoid, sigmoid_pair
from tilewright.kernels.moe.operators import choose, choose_backward
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import Tunable

LOWEST = tl.constexpr(-0x80000000)  # below the key of -inf
HIGHEST = tl.constexpr(0x7FFFFFFF)
TINY = tl.constexpr(1e-20)  # beside a sum of weights that may be 0, as in DeepSeek-V3
PER_SM = 2  # programs of forward that run at once on an SM
# At most this many programs in forward, as many as 128 SMs hold: rows of partial sums that one
# program adds in a few microseconds.
PROGRAMS = 128 * PER_SM


LIMIT = 128  # registers per thread with which an SM holds two programs of eight warps


def _forward_heuristic(width: int) -> dict:
    """8 elements per thread of each of half a dozen tiles, in the registers that let all PROGRAMS
    run at once. With more than 128 columns that takes programs of four warps, since code for 256
    spills with LIMIT.
    """
    if width <= 128:
        return {"ROWS": 2048 // width, "num_warps": 8, "maxnreg": LIMIT}
    return {"ROWS": max(1, 1024 // width), "num_warps": 4, "maxnreg": None}


def _backward_heuristic(width: int) -> dict:
    """Half as many elements per thread, in programs as small as a row of 512 allows."""
    return {"ROWS": max(1, 512 // width), "num_warps": 4 if width <= 1024 else 8}


def _space(width: int) -> list[dict]:
    """4 to 16 elements per thread."""
    return [
        {"ROWS": rows, "num_warps": warps}
        for warps in (4, 8)
        for each in (4, 8, 16)
        if (rows := each * 32 * warps // width) >= 1
    ]


def _forward_space(width: int) -> list[dict]:
    """Without a limit, and with it what the heuristic takes for fewer columns."""
    limited = {"ROWS": max(1, 2048 // width), "num_warps": 8, "maxnreg": LIMIT}
    return [*({**c, "maxnreg": None} for c in _space(width)), limited]


def _backward_space(width: int) -> list[dict]:
    """Without 8 elements per thread, for which ptxas spills a few bytes."""
    return [c for c in _space(width) if c["ROWS"] * width != 256 * c["num_warps"]]


@triton.jit
def _keys(x):
    """Integers in the order of floats; -0 equals 0, and NaN is above all, as in torch.sort."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ HIGHEST, bits)
    return tl.where(x != x, HIGHEST, keys)


@triton.jit
def _columns(SIZE: tl.constexpr, GROUPS: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr):
    """The expert of each column, and whether it exists."""
    column = tl.arange(0, GP * SP)
    if GROUPS == 1:
        expert = column
        valid = column < SIZE
    else:
        expert = column // SP * SIZE + column % SP
        valid = (column // SP < GROUPS) & (column % SP < SIZE)
    return column, expert, valid


@triton.jit
def _allowed(
    value,
    valid,
    BEST_TWO: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    GP: tl.constexpr,
    SP: tl.constexpr,
):
    """Whether a column is in one of the row's TOP best groups."""
    value = tl.reshape(tl.where(valid[None, :], value, float("-inf")), [ROWS, GP, SP])
    score = tl.max(value, axis=2)
    if BEST_TWO:
        first = tl.argmax(value, axis=2, tie_break_left=True)
        rest = tl.where(tl.arange(0, SP)[None, None, :] == first[:, :, None], float("-inf"), value)
        score += tl.max(rest, axis=2)
    group = tl.arange(0, GP)
    keys = tl.where((group < GROUPS)[None, :], _keys(score), LOWEST)
    allowed = tl.zeros([ROWS, GP], tl.int32)
    for _ in range(TOP):
        hit = group[None, :] == tl.argmax(keys, axis=1, tie_break_left=True)[:, None]
        allowed = tl.where(hit, 1, allowed)
        keys = tl.where(hit, LOWEST, keys)
    whole = tl.broadcast_to(allowed[:, :, None], [ROWS, GP, SP])
    return tl.reshape(whole, [ROWS, GP * SP]) != 0


@triton.jit(do_not_specialize=["T", "steps"])
def _forward(
    logits_ptr,
    bias_ptr,
    recorded_ptr,
    index_ptr,
    weight_ptr,
    probability_ptr,
    count_ptr,
    square_ptr,
    T,
    stride,
    steps,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP: tl.constexpr,
    BIASED: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    REPLAYED: tl.constexpr,
    GP: tl.constexpr,
    SP: tl.constexpr,
    ROWS: tl.constexpr,
):
    column, expert, valid = _columns(SIZE, GROUPS, GP, SP)
    WIDTH: tl.constexpr = GP * SP
    if BIASED:
        bias = tl.load(bias_ptr + expert, mask=valid, other=0.0)
    probability = tl.zeros([ROWS, WIDTH], tl.float32)
    count = tl.zeros([ROWS, WIDTH], tl.int32)
    square = tl.zeros([ROWS], tl.float32)
    for step in range(steps):
        t = (tl.program_id(0) * steps + step).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = t < T
        x = tl.load(
            logits_ptr + t[:, None] * stride + expert[None, :],
            mask=inside[:, None] & valid[None, :],
            other=0.0,
        ).to(tl.float32)
        x = tl.where(valid[None, :], x, float("-inf"))
        top = tl.max(x, axis=1)
        e = exp_or_zero(x - top[:, None])
        total = tl.sum(e, axis=1)
        lse = top + tl.log(total)
        if SIGMOID:
            s = sigmoid(x)
            q = s * reciprocal(tl.sum(s, axis=1) + TINY)[:, None]
        else:
            s = e * reciprocal(total)[:, None]
            q = s
        choice = x
        if BIASED:
            choice = s + bias[None, :]
        keys = tl.where(valid[None, :], _keys(choice), LOWEST)
        if TOP < GROUPS:
            value = choice
            if SIGMOID and not BIASED:
                value = s
            allowed = _allowed(
                value, valid, (SIGMOID or BIASED) and SIZE > 1, GROUPS, TOP, ROWS, GP, SP
            )
            keys = tl.where(allowed, keys, LOWEST)
        rank = tl.full([ROWS, WIDTH], K, tl.int32)
        for k in range(K):
            if REPLAYED:
                own = tl.load(recorded_ptr + t * K + k, mask=inside, other=-1)
                own = tl.where((own >= 0) & (own < E), own, -1).to(tl.int32)
                hit = column[None, :] == own[:, None]
            else:
                hit = column[None, :] == tl.argmax(keys, axis=1, tie_break_left=True)[:, None]
            rank = tl.where(hit, k, rank)
            keys = tl.where(hit, LOWEST, keys)
        w = s
        if RENORMALIZE:
            w = s * reciprocal(tl.sum(tl.where(rank < K, s, 0.0), axis=1) + TINY)[:, None]
        # Each of the K chosen columns stores to its own position: no data moves between threads.
        chosen = (rank < K) & inside[:, None]
        at = t[:, None] * K + rank
        tl.store(
            index_ptr + at,
            tl.broadcast_to(expert[None, :], [ROWS, WIDTH]).to(tl.int64),
            mask=chosen,
        )
        tl.store(weight_ptr + at, w * scale, mask=chosen)
        probability += tl.where(inside[:, None], q, 0.0)
        count += chosen.to(tl.int32)
        square += tl.where(inside, lse * lse, 0.0)
    at = tl.program_id(0) * E + expert
    tl.store(probability_ptr + at, tl.sum(probability, axis=0), mask=valid)
    tl.store(count_ptr + at, tl.sum(count, axis=0), mask=valid)
    tl.store(square_ptr + tl.program_id(0), tl.sum(square, axis=0))


@triton.jit(do_not_specialize=["T", "programs"])
def _finish(
    probability_ptr,
    count_ptr,
    square_ptr,
    total_ptr,
    balance_ptr,
    z_ptr,
    T,
    programs,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds the programs' sums: counts of choices, and the two losses."""
    c = tl.arange(0, WIDTH)
    r = tl.arange(0, ROWS)
    probability = tl.zeros([ROWS, WIDTH], tl.float32)
    count = tl.zeros([ROWS, WIDTH], tl.int32)
    square = tl.zeros([ROWS], tl.float32)
    for first in range(0, programs, ROWS):
        inside = first + r < programs
        mask = inside[:, None] & (c < E)[None, :]
        at = (first + r)[:, None] * E + c[None, :]
        probability += tl.load(probability_ptr + at, mask=mask, other=0.0)
        count += tl.load(count_ptr + at, mask=mask, other=0)
        square += tl.load(square_ptr + first + r, mask=inside, other=0.0)
    tokens = tl.maximum(T, 1).to(tl.float32)
    counts = tl.sum(count, axis=0)
    tl.store(total_ptr + c, counts.to(tl.int64), mask=c < E)
    shares = (counts.to(tl.float32) / tokens) * (tl.sum(probability, axis=0) / tokens)
    tl.store(balance_ptr, E * tl.sum(shares, axis=0))
    tl.store(z_ptr, tl.sum(square, axis=0) / tokens)


@triton.jit(do_not_specialize=["T"])
def _backward(
    g_weight_ptr,
    g_balance_ptr,
    g_z_ptr,
    logits_ptr,
    index_ptr,
    count_ptr,
    out_ptr,
    T,
    stride,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    c = tl.arange(0, WIDTH)
    valid = c < E
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = t < T
    mask = inside[:, None] & valid[None, :]
    x = tl.load(logits_ptr + t[:, None] * stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
    x = tl.where(valid[None, :], x, float("-inf"))
    top = tl.max(x, axis=1)
    e = exp_or_zero(x - top[:, None])
    total = tl.sum(e, axis=1)
    p = e * reciprocal(total)[:, None]
    g_score = tl.zeros([ROWS, WIDTH], tl.float32)  # of chosen scores
    chosen = tl.zeros([ROWS, WIDTH], tl.int32)
    for k in range(K):
        own = tl.load(index_ptr + t * K + k, mask=inside, other=-1).to(tl.int32)
        g = tl.load(g_weight_ptr + t * K + k, mask=inside, other=0.0)
        hit = c[None, :] == own[:, None]
        g_score = tl.where(hit, (g * scale)[:, None], g_score)
        chosen = tl.where(hit, 1, chosen)
    s = p
    rest = p
    if SIGMOID:
        s, rest = sigmoid_pair(x)  # 1 - s would cancel
    if RENORMALIZE:
        inverse = reciprocal(tl.sum(tl.where(chosen != 0, s, 0.0), axis=1) + TINY)
        mean = tl.sum(g_score * s, axis=1) * inverse
        g_score = tl.where(chosen != 0, (g_score - mean[:, None]) * inverse[:, None], 0.0)
    tokens = tl.full([], 0.0, tl.float32) + T
    share = tl.load(count_ptr + c, mask=valid, other=0).to(tl.float32) / tokens
    balance = tl.load(g_balance_ptr) * E / tokens * share
    if SIGMOID:
        inverse = reciprocal(tl.sum(s, axis=1) + TINY)
        mean = tl.sum(s * balance[None, :], axis=1) * inverse
        g_score += (balance[None, :] - mean[:, None]) * inverse[:, None]
        d = g_score * s * rest
    else:
        g_score += balance[None, :]
        d = p * (g_score - tl.sum(p * g_score, axis=1)[:, None])
    lse = top + tl.log(total)
    d += p * (2.0 * tl.load(g_z_ptr) / tokens * lse)[:, None]
    tl.store(out_ptr + t[:, None] * E + c[None, :], d.to(out_ptr.dtype.element_ty), mask=mask)


def _rows(constants: dict, T: int) -> int:
    """Rows per program, fewer for a few tokens."""
    return min(constants["ROWS"], next_power_of_2(max(1, T)))


def _options(config: dict) -> dict:
    """The limit of registers, if there is one."""
    return {"maxnreg": limit} if (limit := config.get("maxnreg")) else {}


# Long: two launches, whose arguments are most of it.
def forward(logits, bias, recorded, router):
    T, E = logits.shape
    weight, index, counts, balance, z = chosen = choose(logits, bias, recorded, router)
    if recorded is not None:
        weight.fill_(float("nan"))
        index.zero_()
    size = E // router.groups
    GP, SP = next_power_of_2(router.groups), next_power_of_2(size)
    c = FORWARD.config(logits.device, GP * SP)
    rows = _rows(c, T)
    blocks = cdiv(T, rows)
    steps = max(1, cdiv(blocks, PROGRAMS))
    programs = cdiv(blocks, steps)
    probability = logits.new_empty((programs, E), dtype=torch.float32)
    count = logits.new_empty((programs, E), dtype=torch.int32)
    square = logits.new_empty(programs, dtype=torch.float32)
    if T:
        launch(
            _forward,
            (programs,),
            logits,
            bias,
            recorded,
            index,
            weight,
            probability,
            count,
            square,
            T,
            logits.stride(0),
            steps,
            router.scale,
            E=E,
            K=router.k,
            SIZE=size,
            GROUPS=router.groups,
            TOP=router.topk_groups,
            BIASED=bias is not None,
            SIGMOID=router.sigmoid,
            RENORMALIZE=router.renormalize,
            REPLAYED=recorded is not None,
            GP=GP,
            SP=SP,
            ROWS=rows,
            num_warps=c["num_warps"],
            **_options(c),
        )
    width = next_power_of_2(E)
    launch(
        _finish,
        (1,),
        probability,
        count,
        square,
        counts,
        balance,
        z,
        T,
        programs,
        E=E,
        WIDTH=width,
        ROWS=max(1, 4096 // width),
        num_warps=8,
    )
    return chosen


def backward(g_weight, g_balance, g_z, logits, index, counts, router):
    T, E = logits.shape
    out = choose_backward(g_weight, g_balance, g_z, logits, index, counts, router)
    if T:
        width = next_power_of_2(E)
        c = BACKWARD.config(logits.device, width)
        rows = _rows(c, T)
        launch(
            _backward,
            (cdiv(T, rows),),
            g_weight,
            g_balance,
            g_z,
            logits,
            index,
            counts,
            out,
            T,
            logits.stride(0),
            router.scale,
            E=E,
            K=router.k,
            SIGMOID=router.sigmoid,
            RENORMALIZE=router.renormalize,
            WIDTH=width,
            ROWS=rows,
            num_warps=c["num_warps"],
        )
    return out


def _router(E: int, groups: int, top: int, biased: bool) -> dict:
    """The constants of a router; biased: sigmoid scores and a bias."""
    return {
        "E": E,
        "K": 8,
        "SIZE": E // groups,
        "GROUPS": groups,
        "TOP": top,
        "BIASED": biased,
        "SIGMOID": biased,
        "RENORMALIZE": True,
        "REPLAYED": False,
        "GP": groups,
        "SP": E // groups,
        "WIDTH": E,
    }


# Qwen3-30B-A3B's, and DeepSeek-V3's with groups and a bias.
_ROUTERS = {"qwen": _router(128, 1, 1, False), "deepseek": _router(256, 8, 4, True)}
# Pointers are to float32 except these.
_INDICES = {"recorded": "i64", "index": "i64", "total": "i64"}


def _spec(kernel, label: str, constexprs: dict, data: str = "bf16") -> KernelSpec:
    """Rows are a small part of a model's traffic and as short as a cache line; results are
    scattered.
    """
    count = "i64" if kernel is _backward else "i32"
    return KernelSpec.of(
        kernel,
        label,
        {"logits": data, "out": data, "count": count, **_INDICES, "*": "fp32"},
        constexprs,
        {"scale": "fp32"},
        load=0,
        store=0,
        divisible=("stride",) if "stride" in kernel.arg_names else (),
        per_sm=PER_SM if kernel is _forward else 1,
    )


def _specs(kernel):
    return lambda key, config: [
        _spec(kernel, f"{kernel.fn.__name__[1:]} {model} {data}", {**router, **config}, data)
        for model, router in _ROUTERS.items()
        if router["WIDTH"] == key["width"]
        for data in ("bf16", "fp32")
    ]


def gate() -> list[KernelSpec]:
    """The kernels without tuned configurations, and the replay of a recorded choice."""
    replay = {**_ROUTERS["qwen"], "REPLAYED": True, **FORWARD.heuristic(128)}
    finish = {E: {"E": E, "WIDTH": E, "ROWS": 4096 // E, "num_warps": 8} for E in (128, 256)}
    return [
        *(_spec(_finish, f"finish E={E}", constants) for E, constants in finish.items()),
        _spec(_forward, "forward replay bf16", replay),
    ]


FORWARD = Tunable(
    "route",
    "forward",
    ("width",),
    "forward",
    _forward_heuristic,
    _forward_space,
    [(128,), (256,)],
    _specs(_forward),
)
BACKWARD = Tunable(
    "route",
    "backward",
    ("width",),
    "backward",
    _backward_heuristic,
    _backward_space,
    [(128,), (256,)],
    _specs(_backward),
)
TUNABLES = (FORWARD, BACKWARD)
