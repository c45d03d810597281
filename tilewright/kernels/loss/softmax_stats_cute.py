"""Statistics of rows of logits, and their gradient, in CuTe DSL for sm_90 and sm_100. The
definition, and the formulas, are in tilewright/ops/loss/softmax_stats.py.

T = rows, V = columns; rows are contiguous, with any row stride >= V. Forward: one block reads a row
of up to 16,384 columns once, a cluster of 2, 4 or 8 a wider one, each thread with its own running
maximum and sums, so that nothing waits during the loop; at its end warps merge by shuffles and
blocks through distributed shared memory. Backward: elementwise, in place if requested; rows whose
gradients are all 0 are written without being read. Exponentials are base 2.

Any V, any stride and any address: the elements before the first multiple of 16 bytes and after the
last one (`head` and the tail) are processed one by one, the rest in chunks of 16 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr

from tilewright.kernels import cute as tw
from tilewright.kernels.loss.operators import (
    Scaling,
    Softmax,
    StatsGradients,
    Wanted,
    empty_statistics,
    into,
)
from tilewright.kernels.spec import CuteSpec

# Columns that a single block processes: in bf16 eight chunks per thread, two turns of the loop. A
# wider row is shared by a cluster. Not tuned on a GPU.
ONE_BLOCK = 16384
# Per block: four blocks on an SM leave 64 registers per thread, and without options the kernels
# take at most 50. Not tuned on a GPU.
THREADS = 256
# Chunks of 16 bytes in flight per thread: 64 KiB per SM at four blocks of 256 threads, where 25 KiB
# cover its share of the memory latency. Not tuned on a GPU.
UNROLL = 4

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
FLOOR = -1024.0  # replaces values further below the peak: see softmax_stats_triton.py
LAST = 0x7FFFFFFF

# A thread's state: largest logit, its z, and the sums of e, e (z - PEAK) and w (z - z of the row's
# first column).
TOP, PEAK, S, SZ, SW = range(5)
SCALED = (2, 3, 5, 6)  # indices of a row's inputs in backward that are gradients of its statistics


@dataclass(frozen=True)
class Options:
    """vec: elements per chunk.   cluster: blocks per row.   scale: 0 for none, 1 for a scalar, 2
    for one per row.
    """

    vec: int
    cluster: int
    capped: bool
    smooth: bool
    weights: bool
    mean: bool
    argmax: bool = False
    scale: int = 0

    def chunk(self, rank, thread, k):
        """The index of the k-th chunk of a thread of block `rank`."""
        return (k * self.cluster + rank) * THREADS + thread


# ---- in both kernels


def _tanh(x: cute.TensorSSA) -> tuple[cute.TensorSSA, cute.TensorSSA]:
    """tanh to 2 ulp, and its derivative, by the formulas of softmax_stats_triton.py: below 0.625 a
    polynomial, since 1 - 2q / (1 + q), q = exp(-2 |x|), would lose the low bits of a small x.
    """
    u = x * x
    p = u * -5.704986862838268e-3 + 2.063908614218235e-2
    p = p * u - 5.373971536755762e-2
    p = p * u + 1.3331441581249237e-1
    p = p * u - 3.333328068256378e-1
    near = x + x * u * p
    q = cute.math.exp2(cute.where(x < 0.0, x, -x) * (2.0 * LOG2E), fastmath=True)
    h = q / (1.0 + q)
    far = 1.0 - 2.0 * h
    return cute.where((x < 0.625) & (x > -0.625), near, cute.where(x < 0.0, -far, far)), 4.0 * h * (
        1.0 - h
    )


def _capped(x, cap: tuple, o: Options):
    """cap: softcap and its inverse."""
    return cap[0] * _tanh(x * cap[1])[0] if o.capped else x


def _cap(x: Float32, cap: tuple, o: Options) -> Float32:
    """`_capped` for a scalar, which `_tanh` takes as a vector."""
    if not o.capped:
        return x
    out = cute.make_rmem_tensor(1, Float32)
    out[0] = x
    return _capped(out.load(), cap, o)[0]


def _finite(x: Float32) -> Float32:
    """x, or 0 where it is infinite, since inf - inf is NaN."""
    return cutlass.select_((x < Float32.inf) & (x > -Float32.inf), x, Float32(0.0))


def _lower(old: Float32, new: Float32) -> Float32:
    """The distance of an old peak below the new one, made finite by `_finite`."""
    return cute.arch.fmax(old - new, Float32(FLOOR))


def _exp(x):
    return cute.math.exp2(x * LOG2E, fastmath=True)


def _bits(x, dtype, other):
    """Bitcasts x from dtype to other."""
    out = cute.make_rmem_tensor(1, dtype)
    out[0] = x
    return cute.recast_tensor(out, other)[0]


def _split(start: cute.Pointer, V: Int32, o: Options):
    """(elements before the first whole chunk, whole chunks) of the row that begins at `start`."""
    itemsize = start.dtype.width // 8
    beyond = Int32(start.toint() % (o.vec * itemsize)) // itemsize
    head = cutlass.select_(beyond == 0, Int32(0), o.vec - beyond)
    head = cutlass.select_(head > V, V, head)
    return head, (V - head) // o.vec


def _whole_chunks(start: cute.Pointer, head: Int32, o: Options) -> cute.Pointer:
    """Where the whole chunks of the row at `start` begin: aligned to a chunk."""
    itemsize = start.dtype.width // 8
    return cute.make_ptr(
        start.dtype,
        start.toint() + Int64(head) * itemsize,
        start.memspace,
        assumed_align=o.vec * itemsize,
    )


def _loose(thread: Int32, head: Int32, body: Int32, V: Int32, o: Options):
    """(column, whether it exists) of the loose element of a thread: those of the head, then the
    tail.
    """
    column = cutlass.select_(thread < head, thread, body * o.vec + thread)
    return column, column < V


# ---- forward


@cute.jit
def _take(
    chunks: list,
    columns: list,
    wanted: cutlass.Constexpr,
    conditions: list,
    weight: cute.Pointer | None,
    origin: Float32,
    state: cute.Tensor,
    best: cute.Tensor,
    cap: tuple,
    o: cutlass.Constexpr,
):
    """Adds chunks (first columns in `columns`, ascending) to a thread's running maximum and sums.
    wanted: whether only elements whose condition holds count; the others are -inf.
    """
    n = cute.size(chunks[0])
    here = -Float32.inf
    for i in cutlass.range_constexpr(len(chunks)):
        here = cute.arch.fmax(
            here,
            chunks[i]
            .load()
            .to(Float32)
            .reduce(cute.ReductionOp.MAX, init_val=-Float32.inf, reduction_profile=0),
        )
    # A thread's loose element, which comes first, may lie past its chunks.
    if const_expr(o.argmax):
        if (here > state[TOP]) | ((here == state[TOP]) & (columns[0] < best[0])):
            first = Int32(LAST)
            for i in cutlass.range_constexpr(len(chunks) - 1, -1, -1):
                for j in cutlass.range_constexpr(n - 1, -1, -1):
                    first = cutlass.select_(chunks[i][j].to(Float32) == here, columns[i] + j, first)
            best[0] = first
    state[TOP] = cute.arch.fmax(state[TOP], here)
    peak = _cap(state[TOP], cap, o)  # the largest z up to rounding, which does not matter
    shift = _finite(peak)
    lower = _lower(state[PEAK], shift)
    shrink = _exp(lower)
    state[PEAK] = peak
    if const_expr(o.mean):
        state[SZ] = (state[SZ] + state[S] * lower) * shrink
    state[S] = state[S] * shrink
    for i in cutlass.range_constexpr(len(chunks)):
        # exp(-inf) is 0 and adds nothing, but softcap makes -inf finite and 0 * -inf would be NaN.
        if const_expr(wanted and (o.capped or o.smooth)):
            if conditions[i]:
                _add(chunks[i], columns[i], weight, origin, state, shift, cap, o)
        else:
            _add(chunks[i], columns[i], weight, origin, state, shift, cap, o)


def _sum(values: cute.TensorSSA) -> Float32:
    return values.reduce(cute.ReductionOp.ADD, init_val=0.0, reduction_profile=0)


def _add(
    chunk: cute.Tensor,
    column: Int32,
    weight: cute.Pointer | None,
    origin: Float32,
    state: cute.Tensor,
    shift: Float32,
    cap: tuple,
    o: Options,
) -> None:
    z = _capped(chunk.load().to(Float32), cap, o)
    below = z - shift
    e = _exp(below)  # folded into one FMA, a large shift would cost its rounding
    state[S] = state[S] + _sum(e)
    if o.mean:
        state[SZ] = state[SZ] + _sum(e * cute.where(below > FLOOR, below, FLOOR))
    if o.smooth:
        z = z - origin
        if o.weights:
            z = z * _weights(weight, column, cute.size(chunk))  # pyright: ignore[reportArgumentType] (`weights`: it is there)
        state[SW] = state[SW] + _sum(z)


def _weights(weight: cute.Pointer, column: Int32, n: int) -> cute.TensorSSA:
    """Class weights of n columns, one by one: a chunk of logits may begin anywhere among them."""
    out = cute.make_rmem_tensor(n, Float32)
    for j in range(n):
        out[j] = weight[column + j]
    return out.load()


def _join(a: tuple, b: tuple) -> tuple:
    """Merges the maximum, sums and index of two sets of columns."""
    top, peak = cute.arch.fmax(a[TOP], b[TOP]), cute.arch.fmax(a[PEAK], b[PEAK])
    shift = _finite(peak)
    lower, also = _lower(a[PEAK], shift), _lower(b[PEAK], shift)
    left, right = _exp(lower), _exp(also)
    first = cutlass.select_(a[-1] < b[-1], a[-1], b[-1])
    first = cutlass.select_(a[TOP] > b[TOP], a[-1], cutlass.select_(a[TOP] < b[TOP], b[-1], first))
    return (
        top,
        peak,
        a[S] * left + b[S] * right,
        (a[SZ] + a[S] * lower) * left + (b[SZ] + b[S] * also) * right,
        a[SW] + b[SW],
        first,
    )


def _join_warp(values: tuple) -> tuple:
    for offset in (16, 8, 4, 2, 1):
        values = _join(values, tuple(cute.arch.shuffle_sync_bfly(v, offset=offset) for v in values))
    return values


@cute.kernel
def _forward(
    logits: cute.Pointer,
    target: cute.Pointer,
    weight: cute.Pointer | None,
    weight_sum: cute.Pointer | None,
    peak: cute.Pointer,
    log_sum: cute.Pointer,
    picked: cute.Pointer,
    weighted: cute.Pointer | None,
    mean: cute.Pointer | None,
    argmax: cute.Pointer | None,
    V: Int32,
    stride: Int64,
    softcap: Float32,
    inverse: Float32,
    o: cutlass.Constexpr,
):
    thread = cute.arch.thread_idx()[0]
    block = cute.arch.block_idx()[0]
    rank = block % o.cluster
    row = Int64(block // o.cluster)
    warps = const_expr(THREADS // 32)
    buffer = tw.exchange_buffer(6, warps, o.cluster)
    if const_expr(o.cluster > 1):
        # The wait is after the loop: all blocks have started then.
        cute.arch.cluster_arrive_relaxed(aligned=True)

    cap = (softcap, inverse)
    start = logits + row * stride
    head, body = _split(start, V, o)
    chunks = _whole_chunks(start, head, o)
    origin = Float32(0.0)  # of the weighted sum, while the row's peak is unknown
    if const_expr(o.smooth):
        origin = _finite(_cap(start[0].to(Float32), cap, o))
    state = cute.make_rmem_tensor(5, Float32)
    state.fill(0.0)
    state[TOP] = -Float32.inf
    state[PEAK] = -Float32.inf
    best = cute.make_rmem_tensor(1, Int32)
    best[0] = 0

    if rank == 0:
        column, wanted = _loose(thread, head, body, V, o)
        if wanted:
            _take(
                [tw.load(start, column, 1)],
                [column],
                False,
                None,
                weight,
                origin,
                state,
                best,
                cap,
                o,
            )
    rounds = body // (THREADS * o.cluster * UNROLL)
    for i in cutlass.range(rounds, unroll=1):
        at = [o.chunk(rank, thread, i * UNROLL + k) for k in range(UNROLL)]
        _take(
            [tw.load(chunks, a * o.vec, o.vec) for a in at],
            [head + a * o.vec for a in at],
            False,
            None,
            weight,
            origin,
            state,
            best,
            cap,
            o,
        )
    if rounds * (THREADS * o.cluster * UNROLL) < body:
        at = [o.chunk(rank, thread, rounds * UNROLL + k) for k in range(UNROLL)]
        conditions = [a < body for a in at]
        _take(
            [
                tw.load(chunks, a * o.vec, o.vec, c, -float("inf"))
                for a, c in zip(at, conditions, strict=True)
            ],
            [head + a * o.vec for a in at],
            True,
            conditions,
            weight,
            origin,
            state,
            best,
            cap,
            o,
        )

    mine = _join_warp((state[TOP], state[PEAK], state[S], state[SZ], state[SW], best[0]))
    if const_expr(o.cluster > 1):
        cute.arch.cluster_wait()
    tw.exchange(
        (*mine[:-1], _bits(mine[-1], Int32, Float32)), buffer, Int32(0), rank, warps, o.cluster
    )
    low, zero = -Float32.inf, Float32(0.0)
    whole = (low, low, zero, zero, zero, Int32(LAST))
    for i in cutlass.range_constexpr((warps * o.cluster + 31) // 32):
        place = i * 32 + cute.arch.lane_idx()
        there = place < warps * o.cluster
        place = cutlass.select_(there, place, Int32(0))
        read = [buffer[0, v, place] for v in range(6)]
        read[-1] = _bits(read[-1], Float32, Int32)
        whole = _join(
            whole,
            tuple(
                cutlass.select_(there, r, w)
                for r, w in zip(read, (low, low, zero, zero, zero, Int32(LAST)), strict=True)
            ),
        )
    whole = _join_warp(whole)

    if (thread == 0) & (rank == 0):
        top = _finite(whole[PEAK])
        peak[row] = top
        log_sum[row] = LN2 * cute.math.log2(whole[S])
        y = target[row]
        inside = (y >= 0) & (y < V)
        x = tw.load(start, y, 1, inside)
        picked[row] = cutlass.select_(inside, _cap(x[0].to(Float32), cap, o) - top, Float32(0.0))
        if const_expr(o.smooth):
            total = Float32(V)
            if const_expr(o.weights):
                total = weight_sum[0]
            weighted[row] = whole[SW] + total * (origin - top)
        if const_expr(o.mean):
            mean[row] = whole[SZ] / whole[S]
        if const_expr(o.argmax):  # with a NaN in the row, no thread may have an index
            argmax[row] = Int64(cutlass.select_(whole[-1] < V, whole[-1], Int32(0)))


@cute.jit
def _launch_forward(
    logits: cute.Pointer,
    target: cute.Pointer,
    weight: cute.Pointer | None,
    weight_sum: cute.Pointer | None,
    peak: cute.Pointer,
    log_sum: cute.Pointer,
    picked: cute.Pointer,
    weighted: cute.Pointer | None,
    mean: cute.Pointer | None,
    argmax: cute.Pointer | None,
    V: Int32,
    stride: Int64,
    softcap: Float32,
    inverse: Float32,
    o: cutlass.Constexpr,
    blocks: Int32,
    parts: Int32,
    stream: cuda.CUstream,
):
    _forward(
        logits,
        target,
        weight,
        weight_sum,
        peak,
        log_sum,
        picked,
        weighted,
        mean,
        argmax,
        V,
        stride,
        softcap,
        inverse,
        o,
    ).launch(
        grid=(blocks, parts, 1), block=(THREADS, 1, 1), cluster=tw.shape(o.cluster), stream=stream
    )


# ---- backward


@cute.kernel
def _backward(
    logits: cute.Pointer,
    target: cute.Pointer,
    weight: cute.Pointer | None,
    peak: cute.Pointer,
    log_sum: cute.Pointer,
    mean: cute.Pointer | None,
    g_log_sum: cute.Pointer,
    g_target: cute.Pointer,
    g_weighted: cute.Pointer | None,
    g_mean: cute.Pointer | None,
    scale: cute.Pointer | None,
    out: cute.Pointer,
    V: Int32,
    stride: Int64,
    out_stride: Int64,
    softcap: Float32,
    inverse: Float32,
    o: cutlass.Constexpr,
):
    """dlogits = (p (g_log_sum + g_mean + g_mean (z - peak - mean)) + g_weighted w + [c = y]
    g_target) (1 - tanh^2), every g times a scale
    """
    thread = cute.arch.thread_idx()[0]
    row = Int64(cute.arch.block_idx()[0])
    part = cute.arch.block_idx()[1]
    start = logits + row * stride
    out_start = out + row * out_stride
    head, body = _split(start, V, o)  # also of `out`: the launcher ensures it

    y = target[row]
    learn = (g_log_sum[row] != 0.0) | ((g_target[row] != 0.0) & (y >= 0) & (y < V))
    # peak, log_sum, g_log_sum, g_target, mean, g_mean, g_weighted
    numbers = [
        peak[row],
        log_sum[row],
        g_log_sum[row],
        g_target[row],
        Float32(0.0),
        Float32(0.0),
        Float32(0.0),
    ]
    if const_expr(o.mean):
        numbers[4] = mean[row]
        numbers[5] = g_mean[row]
        learn = learn | (numbers[5] != 0.0)
    if const_expr(o.smooth):
        numbers[6] = g_weighted[row]
        learn = learn | (numbers[6] != 0.0)
    if const_expr(o.scale):
        factor = scale[row if const_expr(o.scale == 2) else 0]
        for i in cutlass.range_constexpr(len(numbers)):
            if const_expr(i in SCALED):
                numbers[i] = numbers[i] * factor
    y = Int32(cutlass.select_((y >= 0) & (y < V), y, Int64(-1)))

    cap = (softcap, inverse)
    chunks, out_chunks = _whole_chunks(start, head, o), _whole_chunks(out_start, head, o)
    at = [(part * UNROLL + k) * THREADS + thread for k in range(UNROLL)]
    if (part + 1) * (
        UNROLL * THREADS
    ) <= body:  # unconditional: all reads are in flight before the first is used
        _write(chunks, out_chunks, at, None, head, learn, y, numbers, weight, cap, o)
    else:
        _write(
            chunks, out_chunks, at, [a < body for a in at], head, learn, y, numbers, weight, cap, o
        )
    if part == 0:
        column, wanted = _loose(thread, head, body, V, o)
        if wanted:
            d = cute.make_rmem_tensor(1, Float32)
            d.fill(0.0)
            if learn:
                _gradient(tw.load(start, column, 1), d, column, y, numbers, weight, cap, o)
            tw.store(tw.rounded(d.load(), out.dtype), out_start, column)


@cute.jit
def _write(
    chunks: cute.Pointer,
    out: cute.Pointer,
    at: list,
    conditions,
    head: Int32,
    learn: cutlass.Boolean,
    y: Int32,
    numbers: list,
    weight: cute.Pointer | None,
    cap: tuple,
    o: cutlass.Constexpr,
):
    """Writes the gradients of this thread's chunks; zeros, without reads, in an ignored row."""
    ds = [cute.make_rmem_tensor(o.vec, out.dtype) for a in at]
    for k in cutlass.range_constexpr(len(at)):
        ds[k].fill(0.0)
    if learn:
        xs = [
            tw.load(chunks, a * o.vec, o.vec, None if conditions is None else conditions[k])
            for k, a in enumerate(at)
        ]
        for k in cutlass.range_constexpr(len(at)):
            d = cute.make_rmem_tensor(o.vec, Float32)
            d.fill(0.0)
            # There are no weights past the row's end.
            if const_expr(conditions is not None and o.weights):
                if conditions[k]:
                    _gradient(xs[k], d, head + at[k] * o.vec, y, numbers, weight, cap, o)
            else:
                _gradient(xs[k], d, head + at[k] * o.vec, y, numbers, weight, cap, o)
            ds[k].store(d.load().to(out.dtype))
    for k in cutlass.range_constexpr(len(at)):
        tw.store(
            ds[k], out, at[k] * o.vec, None if const_expr(conditions is None) else conditions[k]
        )


@cute.jit
def _gradient(
    x: cute.Tensor,
    d: cute.Tensor,
    column: Int32,
    y: Int32,
    numbers: list,
    weight: cute.Pointer | None,
    cap: tuple,
    o: cutlass.Constexpr,
):
    """Writes the gradients of the elements x from `column` on to d."""
    n = const_expr(cute.size(x))
    peak, log_sum, g_log_sum, g_target, mean, g_mean, g_weighted = numbers
    z = x.load().to(Float32)
    if const_expr(o.capped):
        t, slope = _tanh(z * cap[1])
        z = cap[0] * t
    below = z - peak
    # One FMA per element, and log_sum is small.
    p = cute.math.exp2(
        below * LOG2E - log_sum * LOG2E,
        fastmath=True,
    )
    if const_expr(o.mean):
        v = p * (g_log_sum + g_mean + g_mean * (cute.where(below > FLOOR, below, FLOOR) - mean))
    else:
        v = p * g_log_sum
    if const_expr(o.smooth and o.weights):
        v = v + g_weighted * _weights(weight, column, n)
    elif const_expr(o.smooth):
        v = v + g_weighted
    d.store(v)
    if (y >= column) & (y < column + n):
        for j in cutlass.range_constexpr(n):
            d[j] = d[j] + cutlass.select_(column + j == y, g_target, Float32(0.0))
    if const_expr(o.capped):
        d.store(d.load() * slope)


@cute.jit
def _launch_backward(
    logits: cute.Pointer,
    target: cute.Pointer,
    weight: cute.Pointer | None,
    peak: cute.Pointer,
    log_sum: cute.Pointer,
    mean: cute.Pointer | None,
    g_log_sum: cute.Pointer,
    g_target: cute.Pointer,
    g_weighted: cute.Pointer | None,
    g_mean: cute.Pointer | None,
    scale: cute.Pointer | None,
    out: cute.Pointer,
    V: Int32,
    stride: Int64,
    out_stride: Int64,
    softcap: Float32,
    inverse: Float32,
    o: cutlass.Constexpr,
    blocks: Int32,
    parts: Int32,
    stream: cuda.CUstream,
):
    _backward(
        logits,
        target,
        weight,
        peak,
        log_sum,
        mean,
        g_log_sum,
        g_target,
        g_weighted,
        g_mean,
        scale,
        out,
        V,
        stride,
        out_stride,
        softcap,
        inverse,
        o,
    ).launch(grid=(blocks, parts, 1), block=(THREADS, 1, 1), stream=stream)


# ---- launchers


def forward(logits, target, class_weight, scaling, wanted):
    T, V = logits.shape
    statistics = empty_statistics(logits, wanted)
    if T:
        weights = class_weight if wanted.weighted else None
        o = Options(
            16 // logits.element_size(),
            tw.cluster_for(V, ONE_BLOCK),
            scaling.softcap != 0,
            wanted.weighted,
            weights is not None,
            wanted.mean,
            wanted.argmax,
        )
        tw.launch(
            _launch_forward,
            logits,
            target,
            weights,
            None if weights is None else weights.sum(),
            *statistics,
            V,
            logits.stride(0),
            scaling.cap,
            scaling.inverse,
            o,
            T * o.cluster,
            1,
        )
    return statistics


def _common(logits: torch.Tensor, out: torch.Tensor) -> int:
    """Elements in the widest chunks, up to 16 bytes, whose bounds are aligned alike in both
    tensors' rows.
    """
    itemsize = logits.element_size()
    apart = math.gcd(
        16, tw.address(logits) - tw.address(out), (logits.stride(0) - out.stride(0)) * itemsize
    )
    return apart // itemsize


def _run_backward(out, logits, target, class_weight, scaling, softmax, gradients, scale):
    """No op with a temperature has these kernels."""
    T, V = logits.shape
    if T == 0:
        return
    smooth, mean = gradients.g_weighted is not None, gradients.g_mean is not None
    weights = class_weight if smooth else None
    o = Options(
        _common(logits, out),
        1,
        scaling.softcap != 0,
        smooth,
        weights is not None,
        mean,
        scale=0 if scale is None else 1 if scale.numel() == 1 else 2,
    )
    tw.launch(
        _launch_backward,
        logits,
        target,
        weights,
        *softmax,
        *gradients,
        scale,
        out,
        V,
        logits.stride(0),
        out.stride(0),
        scaling.cap,
        scaling.inverse,
        o,
        T,
        max(1, -(-(V // o.vec) // (UNROLL * THREADS))),
    )


backward, backward_ = into(_run_backward)


def specs() -> list[CuteSpec]:
    """Launches of the launchers above, for the compile gate: no option and all of them. V is not a
    constant of a kernel, but the cluster size that depends on it is.
    """
    launches = []
    for data in (torch.bfloat16, torch.float32):
        for everything in (False, True):

            def new(*shape, dtype=torch.float32):
                return torch.empty(shape, dtype=dtype, device="meta")

            label = f"{tw.name(data)}{' all options' if everything else ''}"
            y, rows = new(4, dtype=torch.int64), new(4)
            more = rows if everything else None
            scaling = Scaling(30.0 if everything else 0.0)
            for V in (16000, 32000, 50257, 128256):  # forward stores a number or two per row
                x, w = new(4, V, dtype=data), new(V) if everything else None
                wanted = Wanted(everything, everything, everything)
                forwards = x, y, w, scaling, wanted
                launches.append(tw.spec(f"cute forward {label} V={V}", forward, *forwards, store=0))
            of_loss = Softmax(rows, rows, more), StatsGradients(rows, rows, more, more)
            rest = y, w, scaling, *of_loss, rows if everything else new()
            launches.append(tw.spec(f"cute backward {label}", backward, x, *rest))
            # A row stride one element larger than the gradient's.
            apart = new(4, V + 1, dtype=data)[:, :V]
            narrow = {"load": 0, "store": 0}
            launches.append(
                tw.spec(f"cute backward {label} odd stride", backward, apart, *rest, **narrow)
            )
    return launches
