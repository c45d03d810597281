"""Statistics of rows of logits, and their gradient, in Triton. The definition, and the formulas,
are in tilewright/ops/loss/softmax_stats.py.

T = rows, V = columns; rows are contiguous, with any row stride >= V. Forward: a program reads one
row once, in column blocks, with a running maximum (a scalar) and running sums (one per lane of the
block, reduced at the end). Under a small softcap, which bounds exponentials, the maximum is not
needed before the end. Backward: one program per output block; one read, one write, in place if
requested. Exponentials are base 2. Rows whose gradients are all 0 are written without being read.
Between them `_losses`, one program, computes losses, their sum and their derivatives from the
statistics, so that no small kernels are needed.

A row that does not start at a multiple of 16 bytes (V odd, say) is processed from the multiple of
16 bytes below its start, so that all loads but those of its first and last block stay 128 bits
wide. Strides are in units of UNIT elements and V in units of V_UNIT, 16 bytes where they are
multiples of that: alignment of rows and masks is then explicit in the code, whereas Triton detects
multiples of 16 elements only (32 bytes, in bf16).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.kernels.device import multiprocessors, older_triton
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv
from tilewright.kernels.loss.operators import (
    LossInputs,
    LossOutputs,
    Scaling,
    Stats,
    empty_statistics,
    into,
)
from tilewright.kernels.math_triton import (
    exp2_in_fmas,
    exp2_or_zero,
    softcapped,
    tanh_and_derivative,
    widened,
)
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import Tunable


def _forward_heuristic(V: int, itemsize: int, plain: bool) -> dict:
    """16 elements per thread, as many running sums beside them, 48 registers (bf16, sm_90); the
    loop prefetches two blocks, 80 KiB in flight per SM. With a second sum there are 72 registers,
    and four warps wait for each other instead of eight: 56 KiB in flight.
    """
    return {"BLOCK": 4096 if plain else 2048, "STAGES": 3, "num_warps": 8 if plain else 4}


def _forward_space(V: int, itemsize: int, plain: bool) -> list[dict]:
    # With all options ptxas spills for 8,192 columns, and for 4,096 on 8 warps with two stages.
    blocks = ((2048, 4), (4096, 16), *(((4096, 8), (8192, 16)) if plain else ()))
    return [
        {"BLOCK": block, "STAGES": stages, "num_warps": warps}
        for block, warps in blocks
        for stages in (2, 3, 4)
        if block * stages * itemsize <= 64 * 1024
    ]


def _backward_heuristic(V: int, itemsize: int, plain: bool) -> dict:
    """There are no sums: 32 elements per thread, so 64 bytes of bf16 in flight. (In float32 with
    16, ptxas spills 32 bytes for sm_120.) There ptxas spills 16 bytes of bf16 with the gradient of
    the entropy and 32, and 4 bytes of older Tritons' code without: 16 elements, which take a fifth
    more instructions.
    """
    wide = itemsize == 2 and (older_triton() or not plain)
    return {"BLOCK": 4096, "num_warps": 8 if wide else 4}


def _backward_space(V: int, itemsize: int, plain: bool) -> list[dict]:
    return [
        {"BLOCK": block, "num_warps": warps}
        for block, warps in ((1024, 4), (2048, 4), (2048, 8), (8192, 8))
    ]


LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Replaces values further below the peak, including -inf: the exponential is 0 all the same, and 0 *
# -inf is NaN.
FLOOR = tl.constexpr(-1024.0)


# How z follows from a logit x: x, x * inverse, softcap * tanh(x * inverse), or that to some ulp of
# a softcap of at most BOUND, for logits of 16 bits. Peaks are those of z, but of x if SCALED.
PLAIN, SCALED, SOFTCAP, BOUNDED = (tl.constexpr(mode) for mode in range(4))
# In logits of 16 bits, entropies exceed the contract from 50 on. Up to 64, exp(z) and its sum over
# 2^31 columns are in the range of float32.
BOUND = 32.0


class Fixed(NamedTuple):
    """What is constant in a launch.

    UNIT, V_UNIT: the units of strides and of V.   VECTOR: elements in 16 bytes.
    PEEL: whether rows are processed from before their start (see `peels`).
    CAPPED: PLAIN to BOUNDED.
    SMOOTH, WEIGHTS, MEAN, ARGMAX: what is requested, and whether classes have weights.
    SCALE: of gradients: 0 for none, 1 for a scalar, 2 for one per row.
    """

    UNIT: int
    V_UNIT: int
    VECTOR: int
    PEEL: bool
    CAPPED: int
    SMOOTH: bool = False
    WEIGHTS: bool = False
    MEAN: bool = False
    ARGMAX: bool = False
    SCALE: int = 0


@triton.jit
def _below(z, peak, inverse, CAPPED: tl.constexpr):
    """z - peak, where z is x if SCALED: a product that is rounded before the difference is off by
    an ulp of the peak, which is more than the exponential's range where the peak is above 2^30. So
    is a capped z, which may exceed the peak (by nothing that matters if it is BOUNDED).
    """
    below = z - peak
    if CAPPED == SOFTCAP:
        below = tl.where(below > 0.0, 0.0, below)  # keeps NaN, as tl.minimum does not
    elif CAPPED == SCALED:
        below = below * inverse
    return below


@triton.jit
def _cap(x, softcap, inverse, CAPPED: tl.constexpr):
    """z and its derivative."""
    if CAPPED == BOUNDED:
        z, slope = softcapped(x, softcap, inverse)
    else:
        t, slope = tanh_and_derivative(x * inverse)
        # Rounded: a product would be contracted with the difference from the peak, which was
        # rounded, and be off by half an ulp of the peak.
        z = tl.fma(t, softcap, 0.0)
    return z, slope


@triton.jit
def _capped(x, softcap, inverse, CAPPED: tl.constexpr):
    if CAPPED >= SOFTCAP:
        x, _ = _cap(x, softcap, inverse, CAPPED)
    return x


@triton.jit
def _finite(x):
    """x, or 0 where it is infinite, since inf - inf is NaN."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _loaded(x, CAPPED: tl.constexpr):
    """x in float32."""
    if CAPPED == BOUNDED:  # which is bound by instructions
        y = widened(x)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def _larger(a, b):
    """The larger of two, or NaN: exp2_in_fmas loses one."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _quarters(x):
    """The elements [BLOCK] whose index is 0, 1, 2, 3 modulo 4, each [BLOCK / 4]. A thread has four
    in a row, so that nothing moves.
    """
    a, b = tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
    a0, a2 = tl.split(tl.reshape(a, [x.shape[0] // 4, 2]))
    b1, b3 = tl.split(tl.reshape(b, [x.shape[0] // 4, 2]))
    return a0, b1, a2, b3


@triton.jit
def _row_start(row, stride, FIXED: tl.constexpr):
    """The offset at which processing of a row starts, and how many elements before the row's own
    first one that is.
    """
    own = row * stride * FIXED.UNIT
    start = own
    if FIXED.PEEL:
        start = own // FIXED.VECTOR * FIXED.VECTOR
    return start, (own - start).to(tl.int32)


@triton.jit
def _forward(
    logits_ptr,
    target_ptr,
    weight_ptr,
    weight_sum_ptr,
    peak_ptr,
    log_sum_ptr,
    picked_ptr,
    weighted_ptr,
    mean_ptr,
    argmax_ptr,
    V,
    stride,
    softcap,
    inverse,
    FIXED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    V = V * FIXED.V_UNIT
    row = tl.program_id(0).to(tl.int64)
    start, before = _row_start(row, stride, FIXED)
    lanes = tl.arange(0, BLOCK)
    extent = V + before  # columns to process, those before the row's first included
    full = extent // BLOCK * BLOCK
    x_ptr = logits_ptr + start + lanes
    top = float("-inf")  # largest logit so far; peak is its z
    peak = float("-inf")
    best = 0
    origin = 0.0  # of the weighted sum, while the row's peak is unknown
    if FIXED.SMOOTH:
        first = tl.load(logits_ptr + row * stride * FIXED.UNIT).to(tl.float32)
        origin = _finite(_capped(first, softcap, inverse, FIXED.CAPPED))
    s = tl.zeros([BLOCK], tl.float32)
    UNSHIFTED: tl.constexpr = FIXED.CAPPED == BOUNDED and not (
        FIXED.SMOOTH or FIXED.MEAN or FIXED.ARGMAX
    )
    if UNSHIFTED:  # top: for each lane
        top = tl.full([BLOCK // 4], float("-inf"), tl.float32)
        s = tl.zeros([BLOCK // 4], tl.float32)
    sz = tl.zeros([BLOCK], tl.float32)
    sw = tl.zeros([BLOCK], tl.float32)

    # Only the first block (if it starts before the row) and the last are masked: a mask that is not
    # constant over 16 bytes would split their loads. They are blocks 0 to `edge` and `full` to the
    # end; one body serves all three ranges.
    edge = 0
    if FIXED.PEEL:
        edge = BLOCK
    running, cap = (top, peak, best, s, sz, sw), (softcap, inverse)
    for part in tl.static_range(3):
        first, end = edge, full
        if part == 0:
            first, end = 0, edge
        elif part == 2:
            first, end = tl.maximum(full, edge), extent
        for at in tl.range(first, end, BLOCK, num_stages=STAGES if part == 1 else None):
            c = at + lanes - before
            if part == 1:
                x = _loaded(tl.load(x_ptr + at), FIXED.CAPPED)
                mask = c >= 0
            else:
                mask = (c >= 0) & (c < V) if part == 0 else c < V
                x = _loaded(tl.load(x_ptr + at, mask=mask, other=float("-inf")), FIXED.CAPPED)
            running = _step(x, c, mask, running, origin, weight_ptr, cap, FIXED, part != 1)
    top, peak, best, s, sz, sw = running

    total = tl.sum(s, axis=0)
    if UNSHIFTED:
        highest = tl.max(top, axis=0)
        peak = _capped(highest, softcap, inverse, FIXED.CAPPED)
        total /= exp2_or_zero(_capped(highest, softcap * LOG2E, inverse, FIXED.CAPPED))
        total = tl.maximum(total, 1.0)  # the largest exponential may differ from the divisor by ulp
        total = tl.where(tl.max((top != top).to(tl.int32), axis=0) > 0, float("nan"), total)
    peak = _finite(peak)
    tl.store(peak_ptr + row, peak)
    tl.store(log_sum_ptr + row, tl.log2(total) * LN2)
    y = tl.load(target_ptr + row)
    inside = (y >= 0) & (y < V)
    x = tl.load(logits_ptr + row * stride * FIXED.UNIT + y, mask=inside, other=0.0).to(tl.float32)
    picked = _below(_capped(x, softcap, inverse, FIXED.CAPPED), peak, inverse, FIXED.CAPPED)
    tl.store(picked_ptr + row, tl.where(inside, picked, 0.0))
    if FIXED.SMOOTH:
        weight_sum = V * 1.0
        if FIXED.WEIGHTS:
            weight_sum = tl.load(weight_sum_ptr)
        tl.store(weighted_ptr + row, tl.sum(sw, axis=0) + weight_sum * (origin - peak))
    if FIXED.MEAN:
        tl.store(mean_ptr + row, tl.sum(sz, axis=0) / total)
    if FIXED.ARGMAX:
        tl.store(argmax_ptr + row, best)


@triton.jit
def _step(x, c, mask, running, origin, weight_ptr, cap, FIXED: tl.constexpr, MASKED: tl.constexpr):
    """Adds one block x (masked lanes: -inf) to the running maximum and sums."""
    top, peak, best, s, sz, sw = running
    softcap, inverse = cap
    if FIXED.CAPPED == BOUNDED and not (FIXED.SMOOTH or FIXED.MEAN or FIXED.ARGMAX):
        higher = peak
        x0, x1, x2, x3 = _quarters(x)
        largest = _larger(_larger(top, x0), _larger(_larger(x1, x2), x3))
        z = _capped(x, softcap * LOG2E, inverse, FIXED.CAPPED)
        if MASKED:
            e0, e1, e2, e3 = _quarters(exp2_or_zero(tl.where(mask, z, float("-inf"))))
        else:
            # The special-function unit has 16 results a cycle. Three an element, of which two are
            # the cap's, would take longer than loads; so three of four exponentials do without it.
            z0, z1, z2, z3 = _quarters(z)
            e0, e1, e2, e3 = exp2_or_zero(z0), exp2_in_fmas(z1), exp2_in_fmas(z2), exp2_in_fmas(z3)
        s += (e0 + e1) + (e2 + e3)
    else:
        here = tl.max(x, axis=0)
        largest = tl.maximum(top, here)
        z = _capped(x, softcap, inverse, FIXED.CAPPED)
        if FIXED.CAPPED >= SOFTCAP and MASKED:
            z = tl.where(mask, z, float("-inf"))
        # The largest z up to rounding, which does not matter.
        higher = _capped(largest, softcap, inverse, FIXED.CAPPED)
        if FIXED.CAPPED >= SOFTCAP:
            higher = tl.maximum(peak, higher)  # the cap is monotone up to rounding
        shift = _finite(higher)
        changed = True
        if FIXED.MEAN or FIXED.ARGMAX:  # a branch: few of a row's blocks have a new maximum
            changed = (here > top) | (higher != peak)
        if changed:
            if FIXED.ARGMAX:
                first = tl.min(tl.where(x == here, c, 0x7FFFFFFF), axis=0)
                best = tl.where(here > top, first, best)
            lower = peak - shift
            if FIXED.CAPPED == SCALED:
                lower = lower * inverse
            # Above 0 only after an infinite logit, and then 0 times its exponential could be NaN.
            lower = tl.minimum(tl.maximum(lower, FLOOR), 0.0)
            shrink = tl.exp2(lower * LOG2E)
            if FIXED.MEAN:
                sz = (sz + s * lower) * shrink
            s = s * shrink
        below = _below(z, shift, inverse, FIXED.CAPPED)
        e = exp2_or_zero(below * LOG2E)  # in one FMA, a large shift would cost its rounding
        if FIXED.MEAN:
            sz += e * tl.maximum(below, FLOOR)
        s += e
        if FIXED.SMOOTH:
            z = z - origin
            if FIXED.WEIGHTS:
                w = tl.load(weight_ptr + c, mask=mask, other=0.0)
                z = z * w
            sw += tl.where(mask, z, 0.0) if MASKED else z
    return largest, higher, best, s, sz, sw


@triton.jit
def _scaled(g, scale):
    """g * scale, 0 where g is 0: an infinite scale leaves ignored rows 0."""
    return tl.where(g == 0.0, 0.0, g * scale)


@triton.jit
def _backward(
    logits_ptr,
    target_ptr,
    weight_ptr,
    peak_ptr,
    log_sum_ptr,
    mean_ptr,
    g_log_sum_ptr,
    g_target_ptr,
    g_weighted_ptr,
    g_mean_ptr,
    scale_ptr,
    out_ptr,
    V,
    stride,
    out_stride,
    softcap,
    inverse,
    FIXED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dlogits = (p (g_log_sum + g_mean + g_mean (z - peak - mean)) + g_weighted w + [c = y]
    g_target) (1 - tanh^2), every g times a scale.
    """
    V = V * FIXED.V_UNIT
    row = tl.program_id(0).to(tl.int64)
    start, before = _row_start(row, stride, FIXED)
    out_start, _ = _row_start(row, out_stride, FIXED)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = at - before
    peak = tl.load(peak_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    y = tl.load(target_ptr + row)
    g_log_sum = tl.load(g_log_sum_ptr + row)
    g_target = tl.load(g_target_ptr + row)
    mean = 0.0
    g_mean = 0.0
    g_weighted = 0.0
    if FIXED.MEAN:
        mean = tl.load(mean_ptr + row)
        g_mean = tl.load(g_mean_ptr + row)
    if FIXED.SMOOTH:
        g_weighted = tl.load(g_weighted_ptr + row)
    if FIXED.SCALE:
        scale = tl.load(scale_ptr + (row if FIXED.SCALE == 2 else 0))
        g_log_sum = _scaled(g_log_sum, scale)
        g_target = _scaled(g_target, scale)
        g_mean = _scaled(g_mean, scale)
        g_weighted = _scaled(g_weighted, scale)
    learn = (
        (g_log_sum != 0.0)
        | ((g_target != 0.0) & (y >= 0) & (y < V))
        | (g_mean != 0.0)
        | (g_weighted != 0.0)
    )

    if FIXED.CAPPED == BOUNDED:  # one instruction to compare with, and fewer registers
        y = tl.where((y >= 0) & (y < V), y, -1).to(tl.int32)  # nothing is stored at c = -1
    first = tl.program_id(1) * BLOCK
    stats, cap = (peak, log_sum, mean), (softcap, inverse)
    gradients = g_log_sum, g_target, g_weighted, g_mean
    # Unmasked: loads and stores stay wide.
    inner = (first >= before) & (first + BLOCK <= V + before)
    if learn & inner:
        x = _loaded(tl.load(logits_ptr + start + at), FIXED.CAPPED)
        d = _gradient(x, c, c >= 0, y, stats, gradients, weight_ptr, cap, FIXED)
        tl.store(out_ptr + out_start + at, d.to(out_ptr.dtype.element_ty))
    else:
        mask = (c >= 0) & (c < V)
        d = tl.zeros([BLOCK], tl.float32)
        if learn:
            x = _loaded(tl.load(logits_ptr + start + at, mask=mask, other=0.0), FIXED.CAPPED)
            d = _gradient(x, c, mask, y, stats, gradients, weight_ptr, cap, FIXED)
        tl.store(out_ptr + out_start + at, d.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gradient(x, c, mask, y, stats, gradients, weight_ptr, cap, FIXED: tl.constexpr):
    peak, log_sum, mean = stats
    g_log_sum, g_target, g_weighted, g_mean = gradients
    softcap, inverse = cap
    slope = x
    z = x
    if FIXED.CAPPED >= SOFTCAP:
        z, slope = _cap(x, softcap, inverse, FIXED.CAPPED)
    below = _below(z, peak, inverse, FIXED.CAPPED)
    p = tl.exp2(below * LOG2E - log_sum * LOG2E)  # one FMA per element, and log_sum is small
    if FIXED.MEAN:
        d = p * (g_log_sum + g_mean + g_mean * (tl.maximum(below, FLOOR) - mean))
    else:
        d = p * g_log_sum
    if FIXED.SMOOTH:
        if FIXED.WEIGHTS:
            d += g_weighted * tl.load(weight_ptr + c, mask=mask, other=0.0)
        else:
            d += g_weighted
    d += tl.where(c == y, g_target, 0.0)
    if FIXED.CAPPED >= SOFTCAP:
        d *= slope
    return d


# ---- losses

# One program, since the derivatives of each row need the divisor, a count of all targets, and sums
# keep one order: 10 us of 595 by counts (bench/predicted, Qwen3-8B). On an H100 the forward has
# 99 to 100 % of the bandwidth. If the last program of the statistics did this, it would save a
# launch, 3 us, for an atomic addition in each.
# Rows at a time: 32 warps, since the program waits for memory; 128 bits per thread.
LOSS_BLOCK, LOSS_WARPS = tl.constexpr(4096), 32
# Targets that are counted at a time: a step takes about a microsecond, however many it loads.
COUNT_BLOCK = tl.constexpr(16384)


@triton.jit
def _weight(class_weight_ptr, y, learn, WEIGHTS: tl.constexpr):
    """The class weights of targets; 0 for ignored ones."""
    if WEIGHTS:
        w = tl.load(class_weight_ptr + y, mask=learn, other=0.0)
    else:
        w = learn.to(tl.float32)
    return w


@triton.jit(do_not_specialize=["T", "rows", "ignore_index"])
def _losses(
    peak_ptr,
    log_sum_ptr,
    picked_ptr,
    weighted_ptr,
    target_ptr,
    every_target_ptr,
    class_weight_ptr,
    weight_sum_ptr,
    token_weight_ptr,
    num_tokens_ptr,
    before_ptr,
    losses_ptr,
    total_ptr,
    divisor_ptr,
    g_log_sum_ptr,
    g_target_ptr,
    g_weighted_ptr,
    rows,
    T,
    V,
    ignore_index,
    num_tokens,
    label_smoothing,
    z_loss,
    SMOOTH: tl.constexpr,
    WEIGHTS: tl.constexpr,
    Z_LOSS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIVISOR: tl.constexpr,
    DIVIDE: tl.constexpr,
    FIRST: tl.constexpr,
):
    """The loss of each of `rows` rows, their sum on top of that of the preceding rows (unless
    FIRST), and its derivatives.

    DIVISOR: "" for none, "count" for that of all T targets, "tensor" or "number" for num_tokens,
        "known" for the result of an earlier launch.
    DIVIDE: whether the sum and the derivatives are divided.
    """
    lanes = tl.arange(0, LOSS_BLOCK)
    divisor = 1.0
    if DIVISOR == "count":
        count = tl.zeros([COUNT_BLOCK], tl.float32)
        for at in range(0, T, COUNT_BLOCK):
            i = at + tl.arange(0, COUNT_BLOCK)
            y = tl.load(every_target_ptr + i, mask=i < T, other=-1)
            count += _weight(class_weight_ptr, y, (y != ignore_index) & (y >= 0) & (y < V), WEIGHTS)
        divisor = tl.sum(count, axis=0)
    elif DIVISOR == "tensor":
        divisor = tl.load(num_tokens_ptr).to(tl.float32)
    elif DIVISOR == "number":
        divisor = num_tokens
    elif DIVISOR == "known":
        divisor = tl.load(divisor_ptr)
    if (DIVISOR != "") & (DIVISOR != "known"):
        divisor = tl.where(divisor == 0.0, 1.0, divisor)
        tl.store(divisor_ptr, divisor)

    weight_sum = V * 1.0
    if SMOOTH & WEIGHTS:
        weight_sum = tl.load(weight_sum_ptr)
    soft = label_smoothing / V
    total = tl.zeros([LOSS_BLOCK], tl.float32)
    for at in range(0, rows, LOSS_BLOCK):
        i = at + lanes
        mask = i < rows
        y = tl.load(target_ptr + i, mask=mask, other=0)
        present = mask & (y != ignore_index)
        bad = present & ((y < 0) | (y >= V))
        w = _weight(class_weight_ptr, y, present & (bad == 0), WEIGHTS)
        log_sum = tl.load(log_sum_ptr + i, mask=mask, other=0.0)
        loss = (log_sum - tl.load(picked_ptr + i, mask=mask, other=0.0)) * w
        hard = w
        g_log_sum = w
        if SMOOTH:
            weighted = tl.load(weighted_ptr + i, mask=mask, other=0.0)
            loss = (1.0 - label_smoothing) * loss + soft * (weight_sum * log_sum - weighted)
            hard = w * (1.0 - label_smoothing)
            g_log_sum = hard + soft * weight_sum
        if Z_LOSS:
            lse = tl.load(peak_ptr + i, mask=mask, other=0.0) + log_sum
            loss += z_loss * lse * lse
            g_log_sum += 2.0 * z_loss * lse
        loss = tl.where(bad, float("nan"), tl.where(present, loss, 0.0))
        tl.store(losses_ptr + i, loss, mask=mask)
        row = tl.where(bad, float("nan"), 1.0)
        if TOKENS:
            u = tl.load(token_weight_ptr + i, mask=mask, other=0.0).to(tl.float32)
            row *= u
            loss = tl.where(present, loss * u, 0.0)
        if DIVIDE:
            row /= divisor
        total += loss
        # 0 for ignored rows, whatever their statistics are
        tl.store(g_log_sum_ptr + i, tl.where(present, row * g_log_sum, 0.0), mask=mask)
        tl.store(g_target_ptr + i, tl.where(present, -row * hard, 0.0), mask=mask)
        if SMOOTH:
            tl.store(g_weighted_ptr + i, tl.where(present, -row * soft, 0.0), mask=mask)

    total = tl.sum(total, axis=0)
    if DIVIDE:
        total /= divisor
    if FIRST == 0:
        total += tl.load(before_ptr)
    tl.store(total_ptr, total)


# Long: the arguments of a launch, one a line.
def losses(
    stats: Stats, rows: slice, inputs: LossInputs, outputs: LossOutputs, before: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Writes the losses of some rows, in one launch. Returns the total, which is the sum of the
    losses so far times their token weights, and its derivatives in these rows' log_sum, target and
    weighted (None without label smoothing).

    stats: these rows' statistics.   before: the total of the preceding rows; None for the first
    call, which computes the divisor.
    """
    first, smooth = before is None, inputs.label_smoothing != 0
    number, tensor = 1.0, None
    if outputs.divisor is None:
        divisor_mode = ""
    elif not first:
        divisor_mode = "known"
    elif inputs.num_tokens is None:
        divisor_mode = "count"
    elif (
        isinstance(inputs.num_tokens, torch.Tensor)
        and inputs.num_tokens.device == inputs.target.device
    ):
        divisor_mode, tensor = "tensor", inputs.num_tokens
    else:  # also for a CPU tensor, which needs no synchronization
        divisor_mode, number = "number", float(inputs.num_tokens)
    target = inputs.target[rows]
    n, T = target.shape[0], inputs.target.shape[0]
    weights = inputs.class_weight
    g = [torch.empty_like(stats.log_sum) for _ in range(3 if smooth else 2)]
    total = stats.log_sum.new_empty(())
    launch(
        _losses,
        (1,),
        stats.peak,
        stats.log_sum,
        stats.picked,
        stats.weighted,
        target,
        inputs.target if divisor_mode == "count" else None,
        weights,
        inputs.weight_sum,
        None if inputs.token_weight is None else inputs.token_weight[rows],
        tensor,
        before,
        outputs.losses[rows],
        total,
        outputs.divisor,
        g[0],
        g[1],
        g[2] if smooth else None,
        n,
        T,
        inputs.V,
        inputs.ignore_index,
        number,
        inputs.label_smoothing,
        inputs.z_loss,
        SMOOTH=smooth,
        WEIGHTS=weights is not None,
        Z_LOSS=inputs.z_loss != 0,
        TOKENS=inputs.token_weight is not None,
        DIVISOR=divisor_mode,
        DIVIDE=inputs.divide,
        FIRST=first,
        num_warps=LOSS_WARPS,
    )
    return total, g[0], g[1], g[2] if smooth else None


# ---- scaling a gradient computed in forward by the upstream gradient

# With eight warps, two 128-bit loads of 16 bits per thread.
SCALE_BLOCK = tl.constexpr(4096)
# Four programs of eight warps saturate an SM's bandwidth; 64 registers per thread let it hold them.
SCALE_PER_SM = 4
SCALE_REGISTERS = 64


@triton.jit(do_not_specialize=["n"])
def _scale(out_ptr, factor_ptr, n):
    """out *= factor, in float32; nothing is read or written if the factor is 1. A grid of few
    programs loops over the blocks, since launching one per block would take time even if none did
    anything.
    """
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        lanes = tl.arange(0, SCALE_BLOCK)
        full = n // SCALE_BLOCK * SCALE_BLOCK
        program = tl.program_id(0).to(tl.int64)
        for at in range(program * SCALE_BLOCK, full, tl.num_programs(0).to(tl.int64) * SCALE_BLOCK):
            x = tl.load(out_ptr + at + lanes).to(tl.float32)
            tl.store(out_ptr + at + lanes, (x * factor).to(out_ptr.dtype.element_ty))
        if (
            program == 0
            # A mask that is not constant over 16 bytes splits accesses: only where needed.
        ):
            mask = full + lanes < n
            x = tl.load(out_ptr + full + lanes, mask=mask).to(tl.float32)
            tl.store(out_ptr + full + lanes, (x * factor).to(out_ptr.dtype.element_ty), mask=mask)


def scale_(out: torch.Tensor, factor: torch.Tensor) -> None:
    """out *= factor [] float32, without synchronizing on the factor. out is contiguous."""
    n = out.numel()
    if n:
        most = SCALE_PER_SM * multiprocessors(out.device) if out.is_cuda else 2
        launch(
            _scale,
            (min(most, cdiv(n, SCALE_BLOCK.value)),),
            out,
            factor,
            n,
            num_warps=8,
            maxnreg=SCALE_REGISTERS,
        )


def vector(t: torch.Tensor) -> int:
    """Elements in 16 bytes."""
    return 16 // t.element_size()


def units(V: int, *tensors: torch.Tensor) -> tuple[int, int, int, bool]:
    """`Fixed` from UNIT to PEEL."""
    size = vector(tensors[0])
    unit = size if all(t.stride(0) % size == 0 for t in tensors) else 1
    return unit, size if V % size == 0 else 1, size, peels(V, *tensors)


def peels(V: int, *tensors: torch.Tensor) -> bool:
    """Whether rows start off a multiple of 16 bytes, alike in all tensors, so that processing from
    the multiple below helps. Different row strides cannot both be aligned, and memory that itself
    is off 16 bytes (a view into the middle of a tensor) not at all.
    """
    strides = {t.stride(0) for t in tensors}
    return len(strides) == 1 and strides.pop() % vector(tensors[0]) != 0 and V > 0


def _mode(scaling: Scaling, logits: torch.Tensor) -> int:
    if scaling.softcap:
        bounded = scaling.cap <= BOUND and logits.element_size() == 2
        return (BOUNDED if bounded else SOFTCAP).value
    return PLAIN.value if scaling.plain else SCALED.value


def forward(logits, target, class_weight, scaling, wanted):
    T, V = logits.shape
    stats = empty_statistics(logits, wanted)
    if T == 0:
        return stats
    weights = class_weight if wanted.weighted else None
    mode = _mode(scaling, logits)
    plain = mode in (PLAIN.value, BOUNDED.value) and not any(wanted)
    fixed = Fixed(
        *units(V, logits), mode, wanted.weighted, weights is not None, wanted.mean, wanted.argmax
    )
    launch(
        _forward,
        (T,),
        logits,
        target,
        weights,
        None if weights is None else weights.sum(),
        stats.peak,
        stats.log_sum,
        stats.picked,
        # The kernel does not write what is not requested.
        stats.weighted if wanted.weighted else stats.log_sum,
        stats.mean if wanted.mean else stats.log_sum,
        stats.argmax if wanted.argmax else target,
        V // fixed.V_UNIT,
        logits.stride(0) // fixed.UNIT,
        scaling.cap,
        scaling.inverse,
        FIXED=fixed,
        **FORWARD.config(logits.device, V, logits.element_size(), plain),
    )
    return stats


def _launch_backward(out, logits, target, class_weight, scaling, softmax, gradients, scale):
    T, V = logits.shape
    if T == 0:
        return
    smooth, mean = gradients.g_weighted is not None, gradients.g_mean is not None
    c = BACKWARD.config(
        logits.device, V, logits.element_size(), scaling.plain and not (smooth or mean)
    )
    fixed = Fixed(
        *units(V, logits, out),
        _mode(scaling, logits),
        smooth,
        smooth and class_weight is not None,
        mean,
        SCALE=0 if scale is None else 1 if scale.numel() == 1 else 2,
    )
    blocks = cdiv(V + (fixed.VECTOR - 1 if fixed.PEEL else 0), c["BLOCK"])
    launch(
        _backward,
        (T, blocks),
        logits,
        target,
        class_weight,
        *softmax,
        *gradients,
        scale,
        out,
        V // fixed.V_UNIT,
        logits.stride(0) // fixed.UNIT,
        out.stride(0) // fixed.UNIT,
        scaling.cap,
        scaling.inverse,
        FIXED=fixed,
        **c,
    )


backward, backward_ = into(_launch_backward)


# Pointers are to float32 except these.
_INDICES = {"target": "i64", "argmax": "i64", "every_target": "i64", "num_tokens": "i64"}
_NUMBERS: dict[str, str] = dict.fromkeys(
    ("softcap", "inverse", "num_tokens", "label_smoothing", "z_loss"), "fp32"
)


def _specs(kernel):
    """No option and all of them, whole and odd row strides. Whole ones are multiples of 16 bytes,
    and no argument is divisible by more.
    """

    def specs(key: dict, config: dict) -> list[KernelSpec]:
        data, options = "bf16" if key["itemsize"] == 2 else "fp32", not key["plain"]
        size = 16 // key["itemsize"]
        fixed = Fixed(size, size, size, False, (SOFTCAP if options else PLAIN).value)
        if options:
            fixed = fixed._replace(SMOOTH=True, WEIGHTS=True, MEAN=True)
        if kernel is _forward:
            fixed = fixed._replace(ARGMAX=options)
        else:
            fixed = fixed._replace(SCALE=2 if options else 1)
        odd = fixed._replace(UNIT=1, V_UNIT=1, PEEL=True)
        return [
            KernelSpec.of(
                kernel,
                f"{kernel.fn.__name__[1:]} {data}{' all options' if options else ''}{suffix}",
                {"logits": data, "out": data, **_INDICES, "*": "fp32"},
                {"FIXED": one, **config},
                _NUMBERS,
                # Forward writes a few scalars per row, and no vector.
                store=0 if kernel is _forward else 128,
            )
            for suffix, one in (("", fixed), (" odd", odd))
        ]

    return specs


_KEYS = [(128256, size, plain) for size in (2, 4) for plain in (True, False)]
FORWARD = Tunable(
    "cross_entropy",
    "forward",
    ("V", "itemsize", "plain"),
    "forward",
    _forward_heuristic,
    _forward_space,
    _KEYS,
    _specs(_forward),
)
BACKWARD = Tunable(
    "cross_entropy",
    "backward",
    ("V", "itemsize", "plain"),
    "backward",
    _backward_heuristic,
    _backward_space,
    _KEYS,
    _specs(_backward),
)
TUNABLES = (FORWARD, BACKWARD)


def _with(mode: tl.constexpr, label: str, sizes: tuple, alone: bool, **flags) -> list[KernelSpec]:
    """All options, with these instead. alone: whether forward's launch is that of no option."""
    flags = {"CAPPED": mode.value, "SMOOTH": False, "WEIGHTS": False, **flags}
    specs = []
    for tunable, kernel, plain in ((FORWARD, _forward, alone), (BACKWARD, _backward, False)):
        for size in sizes:
            key = {"V": 128256, "itemsize": size, "plain": plain}
            own = flags if kernel is _forward else {**flags, "ARGMAX": False, "SCALE": 1}
            for spec in _specs(kernel)(key, tunable.heuristic(**key)):
                name = f"{spec.label.replace(' all options', '')} {label}"
                specs.append(spec.changed(own, label=name))
    return specs


def gate_scaled() -> list[KernelSpec]:
    """The statistics of logits that are divided by a temperature, and their gradient."""
    return _with(SCALED, "scaled", (2, 4), alone=False)


def gate() -> list[KernelSpec]:
    """The kernels without tuned configurations, no option and all of them; and a softcap alone."""
    specs = [
        KernelSpec.of(
            _losses,
            f"losses {divisor_mode}{' all options' if options else ''}",
            {**_INDICES, "*": "fp32"},
            {
                **dict.fromkeys(("SMOOTH", "WEIGHTS", "Z_LOSS", "TOKENS"), options),
                "DIVISOR": divisor_mode,
                "DIVIDE": True,
                "FIRST": first,
                "num_warps": LOSS_WARPS,
            },
            _NUMBERS,
            # Any number of rows, a few numbers each: masks are not constant over 16 bytes.
            load=0,
            store=0,
        )
        for options in (False, True)
        for divisor_mode, first in (("count", True), ("known", False))
    ]
    specs.extend(_with(BOUNDED, "softcap", (2,), alone=True, MEAN=False, ARGMAX=False))
    specs.extend(
        KernelSpec.of(
            _scale,
            f"scale {data}",
            {"out": data, "factor": "fp32"},
            {"num_warps": 8},
            {"n": "i64"},
            options={"maxnreg": SCALE_REGISTERS},
            per_sm=SCALE_PER_SM,
        )
        for data in ("bf16", "fp32")
    )
    return specs
