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

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv, next_power_of_2
from tilewright.kernels.math_triton import exp_or_zero, reciprocal, sigmoid, sigmoid_pair
from tilewright.kernels.moe.operators import Router, choose, choose_backward
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import Tunable

LOWEST = tl.constexpr(-0x80000000)  # below the key of -inf
HIGHEST = tl.constexpr(0x7FFFFFFF)
TINY = tl.constexpr(1e-20)  # beside a sum of weights that may be 0, as in DeepSeek-V3
PER_SM = 2  # programs of forward that run at once on an SM
# At most this many programs in forward, as many as 128 SMs hold: rows of partial sums that one
# program adds in a few microseconds.
PROGRAMS = 128 * PER_SM


class _Fixed(NamedTuple):
    """What is constant in a launch: E experts, K of which are chosen, and how.

    GROUPS: of SIZE experts, of which the TOP best are eligible; in GP x SP columns.
    BIASED: whether choices have a bias.   REPLAYED: whether they are recorded ones.
    """

    E: int
    K: int
    SIZE: int
    GROUPS: int
    TOP: int
    BIASED: bool
    SIGMOID: bool
    RENORMALIZE: bool
    REPLAYED: bool
    GP: int
    SP: int


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
def _columns(FIXED: tl.constexpr):
    """The expert of each column, and whether it exists."""
    column = tl.arange(0, FIXED.GP * FIXED.SP)
    if FIXED.GROUPS == 1:
        expert = column
        valid = column < FIXED.SIZE
    else:
        expert = column // FIXED.SP * FIXED.SIZE + column % FIXED.SP
        valid = (column // FIXED.SP < FIXED.GROUPS) & (column % FIXED.SP < FIXED.SIZE)
    return column, expert, valid


@triton.jit
def _allowed(value, valid, FIXED: tl.constexpr):
    """Whether a column is in one of the row's TOP best groups."""
    ROWS: tl.constexpr = value.shape[0]
    GP: tl.constexpr = FIXED.GP
    SP: tl.constexpr = FIXED.SP
    value = tl.reshape(tl.where(valid[None, :], value, float("-inf")), [ROWS, GP, SP])
    score = tl.max(value, axis=2)
    if (FIXED.SIGMOID or FIXED.BIASED) and FIXED.SIZE > 1:  # of its best two
        first = tl.argmax(value, axis=2, tie_break_left=True)
        rest = tl.where(tl.arange(0, SP)[None, None, :] == first[:, :, None], float("-inf"), value)
        score += tl.max(rest, axis=2)
    group = tl.arange(0, GP)
    keys = tl.where((group < FIXED.GROUPS)[None, :], _keys(score), LOWEST)
    allowed = tl.zeros([ROWS, GP], tl.int32)
    for _ in range(FIXED.TOP):
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
    FIXED: tl.constexpr,
    ROWS: tl.constexpr,
):
    column, expert, valid = _columns(FIXED)
    E: tl.constexpr = FIXED.E
    K: tl.constexpr = FIXED.K
    WIDTH: tl.constexpr = FIXED.GP * FIXED.SP
    if FIXED.BIASED:
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
        if FIXED.SIGMOID:
            s = sigmoid(x)
            q = s * reciprocal(tl.sum(s, axis=1) + TINY)[:, None]
        else:
            s = e * reciprocal(total)[:, None]
            q = s
        choice = x
        if FIXED.BIASED:
            choice = s + bias[None, :]
        keys = tl.where(valid[None, :], _keys(choice), LOWEST)
        if FIXED.TOP < FIXED.GROUPS:
            value = choice
            if FIXED.SIGMOID and not FIXED.BIASED:
                value = s
            keys = tl.where(_allowed(value, valid, FIXED), keys, LOWEST)
        rank = tl.full([ROWS, WIDTH], K, tl.int32)
        for k in range(K):
            if FIXED.REPLAYED:
                own = tl.load(recorded_ptr + t * K + k, mask=inside, other=-1)
                own = tl.where((own >= 0) & (own < E), own, -1).to(tl.int32)
                hit = column[None, :] == own[:, None]
            else:
                hit = column[None, :] == tl.argmax(keys, axis=1, tie_break_left=True)[:, None]
            rank = tl.where(hit, k, rank)
            keys = tl.where(hit, LOWEST, keys)
        w = s
        if FIXED.RENORMALIZE:
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
    FIXED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    E: tl.constexpr = FIXED.E
    K: tl.constexpr = FIXED.K
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
    if FIXED.SIGMOID:
        s, rest = sigmoid_pair(x)  # 1 - s would cancel
    if FIXED.RENORMALIZE:
        inverse = reciprocal(tl.sum(tl.where(chosen != 0, s, 0.0), axis=1) + TINY)
        mean = tl.sum(g_score * s, axis=1) * inverse
        g_score = tl.where(chosen != 0, (g_score - mean[:, None]) * inverse[:, None], 0.0)
    tokens = tl.full([], 0.0, tl.float32) + T
    share = tl.load(count_ptr + c, mask=valid, other=0).to(tl.float32) / tokens
    balance = tl.load(g_balance_ptr) * E / tokens * share
    if FIXED.SIGMOID:
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


def _fixed(router: Router, E: int, biased: bool = False, replayed: bool = False) -> _Fixed:
    size = E // router.groups
    chosen = E, router.k, size, router.groups, router.topk_groups
    flags = biased, router.sigmoid, router.renormalize, replayed
    return _Fixed(*chosen, *flags, next_power_of_2(router.groups), next_power_of_2(size))


def _options(config: dict) -> dict:
    """The limit of registers, if there is one."""
    return {"maxnreg": limit} if (limit := config.get("maxnreg")) else {}


def forward(logits, bias, recorded, router):
    T, E = logits.shape
    weight, index, counts, balance, z = chosen = choose(logits, bias, recorded, router)
    if recorded is not None:
        weight.fill_(float("nan"))
        index.zero_()
    fixed = _fixed(router, E, bias is not None, recorded is not None)
    c = FORWARD.config(logits.device, fixed.GP * fixed.SP)
    rows = _rows(c, T)
    blocks = cdiv(T, rows)
    steps = max(1, cdiv(blocks, PROGRAMS))
    programs = cdiv(blocks, steps)
    probability = logits.new_empty((programs, E), dtype=torch.float32)
    count = logits.new_empty((programs, E), dtype=torch.int32)
    square = logits.new_empty(programs, dtype=torch.float32)
    if T:
        tensors = logits, bias, recorded, index, weight, probability, count, square
        numbers = T, logits.stride(0), steps, router.scale
        options = {"ROWS": rows, "num_warps": c["num_warps"], **_options(c)}
        launch(_forward, (programs,), *tensors, *numbers, FIXED=fixed, **options)
    width = next_power_of_2(E)
    tensors = probability, count, square, counts, balance, z
    constants = {"E": E, "WIDTH": width, "ROWS": max(1, 4096 // width), "num_warps": 8}
    launch(_finish, (1,), *tensors, T, programs, **constants)
    return chosen


def backward(g_weight, g_balance, g_z, logits, index, counts, router):
    T, E = logits.shape
    out = choose_backward(g_weight, g_balance, g_z, logits, index, counts, router)
    if T:
        width = next_power_of_2(E)
        c = BACKWARD.config(logits.device, width)
        rows = _rows(c, T)
        tensors = g_weight, g_balance, g_z, logits, index, counts, out
        numbers = T, logits.stride(0), router.scale
        constants = {"FIXED": _fixed(router, E), "WIDTH": width, "ROWS": rows}
        grid, warps = (cdiv(T, rows),), c["num_warps"]
        launch(_backward, grid, *tensors, *numbers, **constants, num_warps=warps)
    return out


def _router(E: int, groups: int, top: int, biased: bool) -> dict:
    """The constants of a router; biased: sigmoid scores and a bias."""
    router = Router(8, biased, True, groups, top, 1.0)
    return {"FIXED": _fixed(router, E, biased), "WIDTH": E}


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
    def constants(router: dict, config: dict) -> dict:
        # A launch of the backward knows of no bias.
        fixed = router["FIXED"]
        fixed = fixed._replace(BIASED=fixed.BIASED and kernel is _forward)
        return {**router, "FIXED": fixed, **config}

    return lambda key, config: [
        _spec(kernel, f"{kernel.fn.__name__[1:]} {model} {data}", constants(router, config), data)
        for model, router in _ROUTERS.items()
        if router["WIDTH"] == key["width"]
        for data in ("bf16", "fp32")
    ]


def gate() -> list[KernelSpec]:
    """The kernels without tuned configurations, and the replay of a recorded choice."""
    replayed = _ROUTERS["qwen"]["FIXED"]._replace(REPLAYED=True)
    replay = {"FIXED": replayed, **FORWARD.heuristic(128)}
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
