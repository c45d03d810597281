"""RMSNorm and add + RMSNorm in CuTe DSL, for sm_90 and sm_100. The definition is
tilewright/ops/norm/rmsnorm.py.

T = rows / H, H = heads (1 unless the weight is 2-D), D = columns. Row (t, h) starts at (t * H + h)
* D. A row is read once and, whatever its width, stays in the registers of part of a warp, of a
block, or, from 16,384 columns on (backward: 8,192), of a cluster of up to 8 blocks, which add their
sums through distributed shared memory. Sums and the weight gradient are fp32; each block
accumulates the
weight gradient of its rows, and the blocks' partial sums are added in fixed order: no atomics, the
same bits every run on one kind of device.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr

from tilewright.kernels import cute as tw
from tilewright.kernels.device import multiprocessors
from tilewright.kernels.norm.operators import (
    Gradients,
    Norm,
    no_rows,
    normalize,
    sizes,
)
from tilewright.kernels.spec import CuteSpec

# Widest row of one block. Forward: 512 threads with 32 elements of x each. Backward also holds dy,
# w, the sums for dw and db, and the next row's x and dy, so 16 elements each; in a cluster its
# blocks have 256 threads, which may have 255 registers, as long as 8 blocks are enough for the row.
# Not tuned on a GPU.
ONE_BLOCK = 16384
ONE_BLOCK_BACKWARD = 8192
SHARED_BACKWARD = 4096
PER_THREAD = 32
PER_THREAD_BACKWARD = 16


@dataclass(frozen=True)
class Plan:
    """How a row of D columns is partitioned: chunk k of a thread is `vec` columns from
    `column(...)` on.

    threads: threads per row in one block.
    rows: rows per block at once; 1 if threads > 32.
    cluster: blocks per row.
    chunks: chunks per thread.
    """

    D: int
    H: int
    vec: int
    chunks: int
    threads: int
    rows: int
    cluster: int

    @property
    def block(self) -> int:
        return self.threads * self.rows

    @property
    def warps(self) -> int:
        """Warps that share a row in one block."""
        return max(1, self.threads // 32)

    def column(self, rank, thread, k):
        """First column of chunk k of a thread of block `rank`: neighbors in a warp read neighboring
        chunks.
        """
        return ((k * self.cluster + rank) * self.threads + thread) * self.vec

    def whole(self, k: int) -> bool:
        """Whether chunk k lies inside the row for every thread."""
        return self.column(0, 0, k + 1) <= self.D


def plan(D: int, H: int, vec: int, backward: bool = False) -> Plan:
    per_thread = PER_THREAD_BACKWARD if backward else PER_THREAD
    cluster = tw.cluster_for(D, ONE_BLOCK)
    if backward:
        cluster = 1 if D <= ONE_BLOCK_BACKWARD else tw.cluster_for(D, SHARED_BACKWARD)
    threads = 1
    while threads < 32 and threads * 16 < D:
        # Narrow rows share a warp, with 16 elements per thread.
        threads *= 2
    chunks = -(-(16 if threads < 32 or D <= 512 else per_thread) // vec)
    total = -(-D // vec)
    if total > threads * chunks:
        threads = 32 * -(-total // (32 * chunks * cluster))
        # More threads (416, say) take more registers for addresses, and spilled.
        if backward and cluster > 1 and threads > 256:
            threads = 512
    chunks = -(-total // (threads * cluster))
    return Plan(D, H, vec, chunks, threads, max(1, 128 // threads) if threads <= 32 else 1, cluster)


def _wanted(p: Plan, k: int, column, live):
    """The condition under which chunk k is read: None if always. live: whether the row exists; None
    if it does.
    """
    inside = None if p.whole(k) else column < p.D
    if inside is None or live is None:
        return live if inside is None else inside
    return inside & live


def _where(p: Plan):
    """Block and head. A single head is the constant 0, which takes no registers."""
    block, h, _ = cute.arch.block_idx()
    return block, h if p.H > 1 else 0


@cute.kernel
def _forward(
    x: cute.Pointer,
    residual: cute.Pointer | None,
    weight: cute.Pointer,
    bias: cute.Pointer | None,
    y: cute.Pointer,
    total: cute.Pointer | None,
    rstd: cute.Pointer,
    T: Int64,
    eps: Float32,
    offset: Float32,
    p: cutlass.Constexpr,
    round_xhat: cutlass.Constexpr,
):
    thread = cute.arch.thread_idx()[0] % p.threads
    block, h = _where(p)
    rank = block % p.cluster
    t = Int64(block // p.cluster) * p.rows + cute.arch.thread_idx()[0] // p.threads
    row = t * p.H + h
    live = None
    if const_expr(p.rows > 1):
        live = t < T
    buffer = None
    if const_expr(p.warps * p.cluster > 1):
        buffer = tw.exchange_buffer(1, p.warps, p.cluster)

    columns = [p.column(rank, thread, k) for k in range(p.chunks)]
    wanted = [_wanted(p, k, columns[k], live) for k in range(p.chunks)]
    xs = [tw.load(x, row * p.D + columns[k], p.vec, wanted[k]) for k in range(p.chunks)]
    if const_expr(residual is not None):
        rs = [tw.load(residual, row * p.D + columns[k], p.vec, wanted[k]) for k in range(p.chunks)]
        for k in cutlass.range_constexpr(p.chunks):
            xs[k] = tw.rounded(xs[k].load().to(Float32) + rs[k].load().to(Float32), total.dtype)
            tw.store(xs[k], total, row * p.D + columns[k], wanted[k])
    if const_expr(p.cluster > 1):
        tw.meet()

    squares = Float32(0.0)
    for k in cutlass.range_constexpr(p.chunks):
        v = xs[k].load().to(Float32)
        squares += (v * v).reduce(cute.ReductionOp.ADD, init_val=0.0, reduction_profile=0)
    squares = tw.row_sum(squares, buffer, Int32(0), rank, p.threads, p.cluster)
    scale = 1.0 / cute.math.sqrt(squares / Float32(p.D) + eps)
    first = (thread == 0) & (rank == 0)
    if const_expr(live is not None):
        first = first & live
    if first:
        rstd[row] = scale

    # The weights are loaded after the sum: their loads, from L2, would cost registers while the row
    # is in flight.
    for k in cutlass.range_constexpr(p.chunks):
        inside = _wanted(p, k, columns[k], None)
        w = tw.load(weight, Int64(h) * p.D + columns[k], p.vec, inside).load().to(Float32) + offset
        v = xs[k].load().to(Float32) * scale
        if const_expr(round_xhat):
            v = v.to(y.dtype).to(Float32)
        v = v * w
        if const_expr(bias is not None):
            v = v + tw.load(bias, columns[k], p.vec, inside).load().to(Float32)
        tw.store(tw.rounded(v, y.dtype), y, row * p.D + columns[k], wanted[k])


@cute.jit
def _launch_forward(
    x: cute.Pointer,
    residual: cute.Pointer | None,
    weight: cute.Pointer,
    bias: cute.Pointer | None,
    y: cute.Pointer,
    total: cute.Pointer | None,
    rstd: cute.Pointer,
    T: Int64,
    eps: Float32,
    offset: Float32,
    p: cutlass.Constexpr,
    round_xhat: cutlass.Constexpr,
    blocks: Int32,
    heads: Int32,
    stream: cuda.CUstream,
):
    _forward(x, residual, weight, bias, y, total, rstd, T, eps, offset, p, round_xhat).launch(
        grid=(blocks, heads, 1),
        block=(p.block, 1, 1),
        cluster=tw.shape(p.cluster),
        stream=stream,
        # Otherwise it spilled 8 bytes at 40 registers, D=4100.
        min_blocks_per_mp=int(p.vec * x.dtype.width < 128),
    )


def _read_rows(x, dy, rstd, t, T, h, columns, p: Plan):
    """This thread's chunks of x and of dy, and rstd, of row (t, h); zeros if t >= T."""
    row, live = t * p.H + h, t < T
    wanted = [_wanted(p, k, columns[k], live) for k in range(p.chunks)]
    return [
        tw.load(data, row * p.D + columns[k], p.vec, wanted[k])
        for data in (x, dy)
        for k in range(p.chunks)
    ] + [tw.load(rstd, row, 1, live)]


@cute.kernel
def _backward(
    dy: cute.Pointer,
    dsum: cute.Pointer | None,
    x: cute.Pointer,
    rstd: cute.Pointer,
    weight: cute.Pointer,
    dx: cute.Pointer,
    dw: cute.Pointer,
    db: cute.Pointer | None,
    T: Int64,
    P: Int32,
    offset: Float32,
    p: cutlass.Constexpr,
    round_xhat: cutlass.Constexpr,
    ahead: cutlass.Constexpr,
):
    """dx, and this cluster's partial sums of dw and db over blocks of rows c, c + P, c + 2P, ... of
    one head. ahead: prefetches the next rows during these, and keeps the weights in registers;
    otherwise the weights are reread from L1.
    """
    group = cute.arch.thread_idx()[0] // p.threads
    thread = cute.arch.thread_idx()[0] % p.threads
    block, h = _where(p)
    rank = block % p.cluster
    c = block // p.cluster
    buffer = None
    if const_expr(p.warps * p.cluster > 1):
        buffer = tw.exchange_buffer(1, p.warps, p.cluster)

    columns = [p.column(rank, thread, k) for k in range(p.chunks)]
    inside = [_wanted(p, k, columns[k], None) for k in range(p.chunks)]
    ws = None
    if const_expr(ahead):
        ws = [
            tw.load(weight, Int64(h) * p.D + columns[k], p.vec, inside[k]) for k in range(p.chunks)
        ]
    dws = [cute.make_rmem_tensor(p.vec, Float32) for k in range(p.chunks)]
    dbs = [cute.make_rmem_tensor(p.vec, Float32) for k in range(p.chunks)]
    for k in cutlass.range_constexpr(p.chunks):
        dws[k].fill(0.0)
        dbs[k].fill(0.0)
    if const_expr(p.cluster > 1):
        tw.meet()

    rows = Int64(P) * p.rows  # from one block of rows to this cluster's next
    coming = None
    if const_expr(ahead):
        coming = _read_rows(x, dy, rstd, Int64(c) * p.rows + group, T, h, columns, p)
    # The same in all blocks of a cluster.
    rounds = Int32(((T + p.rows - 1) // p.rows - c + P - 1) // P)
    for i in cutlass.range(rounds, unroll=1):
        t = Int64(c) * p.rows + group + i * rows
        row = t * p.H + h
        wanted = [_wanted(p, k, columns[k], t < T if p.rows > 1 else None) for k in range(p.chunks)]
        here = _read_rows(x, dy, rstd, t + rows if ahead else t, T, h, columns, p)
        if const_expr(ahead):
            for held, read in zip(coming, here, strict=True):
                now = held.load()
                held.store(read.load())
                read.store(now)
        xs, gs, scale = here[: p.chunks], here[p.chunks : -1], here[-1]

        r = scale[0]
        dot = Float32(0.0)
        gws = [cute.make_rmem_tensor(p.vec, Float32) for k in range(p.chunks)]
        for k in cutlass.range_constexpr(p.chunks):
            g = gs[k].load().to(Float32)
            v = xs[k].load().to(Float32) * r
            if const_expr(db is not None):
                dbs[k].store(dbs[k].load() + g)
            if const_expr(round_xhat):
                dws[k].store(dws[k].load() + g * v.to(dy.dtype).to(Float32))
            else:
                dws[k].store(dws[k].load() + g * v)
            w = (
                ws[k]
                if const_expr(ahead)
                else tw.load(weight, Int64(h) * p.D + columns[k], p.vec, inside[k])
            )
            gws[k].store(g * (w.load().to(Float32) + offset))
            dot += (gws[k].load() * v).reduce(
                cute.ReductionOp.ADD, init_val=0.0, reduction_profile=0
            )
        dot = tw.row_sum(dot, buffer, i % 2, rank, p.threads, p.cluster) / Float32(p.D)
        for k in cutlass.range_constexpr(p.chunks):
            v = (gws[k].load() - xs[k].load().to(Float32) * r * dot) * r
            if const_expr(dsum is not None):
                v = v + tw.load(dsum, row * p.D + columns[k], p.vec, wanted[k]).load().to(Float32)
            tw.store(tw.rounded(v, dx.dtype), dx, row * p.D + columns[k], wanted[k])

    share = (Int64(c) * p.H + h) * p.D
    _store_share(dws, dw, share, columns, inside, group, thread, p)
    if const_expr(db is not None):
        _store_share(dbs, db, share, columns, inside, group, thread, p)


@cute.jit
def _store_share(
    sums: list,
    out: cute.Pointer,
    share: Int64,
    columns: list,
    inside: list,
    group: Int32,
    thread: Int32,
    p: cutlass.Constexpr,
):
    """Adds the partial sums of the block's groups of threads in fixed order, and writes the result
    to out[share:].
    """
    if const_expr(p.rows > 1):
        part = cute.make_tensor(
            cute.arch.alloc_smem(Float32, p.rows * p.D, alignment=16),
            cute.make_layout((p.rows, p.D), stride=(p.D, 1)),
        )
        for k in cutlass.range_constexpr(p.chunks):
            for j in cutlass.range_constexpr(p.vec):
                if columns[k] < p.D:
                    part[group, columns[k] + j] = sums[k][j]
        cute.arch.barrier()
        for column in cutlass.range(cute.arch.thread_idx()[0], p.D, p.block, unroll=1):
            value = Float32(0.0)
            for g in cutlass.range(p.rows, unroll=8):
                value += part[g, column]
            out[share + column] = value
    else:
        for k in cutlass.range_constexpr(p.chunks):
            tw.store(sums[k], out, share + columns[k], inside[k])


@cute.jit
def _launch_backward(
    dy: cute.Pointer,
    dsum: cute.Pointer | None,
    x: cute.Pointer,
    rstd: cute.Pointer,
    weight: cute.Pointer,
    dx: cute.Pointer,
    dw: cute.Pointer,
    db: cute.Pointer | None,
    T: Int64,
    P: Int32,
    offset: Float32,
    p: cutlass.Constexpr,
    round_xhat: cutlass.Constexpr,
    ahead: cutlass.Constexpr,
    alone: cutlass.Constexpr,
    blocks: Int32,
    heads: Int32,
    stream: cuda.CUstream,
):
    _backward(dy, dsum, x, rstd, weight, dx, dw, db, T, P, offset, p, round_xhat, ahead).launch(
        grid=(blocks, heads, 1),
        block=(p.block, 1, 1),
        cluster=tw.shape(p.cluster),
        stream=stream,
        min_blocks_per_mp=int(alone),
    )


# ---- launchers


def forward(x, residual, weight, bias, norm):
    T, H, D = sizes(x, weight)
    normalized = normalize(x, residual, weight, bias, norm)
    y, rstd, total = normalized
    if T:
        p = plan(D, H, tw.vector(D, x, residual, weight, bias, y, total))
        grid = -(-T // p.rows) * p.cluster, H
        tensors = x, residual, weight, bias, y, total, rstd
        tw.launch(_launch_forward, *tensors, T, norm.eps, norm.offset, p, norm.round_xhat, *grid)
    return normalized


def _clusters(x: torch.Tensor, p: Plan, T: int) -> int:
    """Clusters that share the rows of a head: enough that the heads together give every SM about
    512 threads, with 128 registers each. Each also costs a row of dw to write and to add.
    """
    blocks = multiprocessors(x.device) * max(1, 512 // p.block)
    return max(1, min(-(-T // p.rows), blocks // (p.cluster * p.H)))


def _registers(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, has_bias: bool) -> int:
    """Registers per thread for this row's and the next one's x and dy, for w, dw and db."""
    data, others = (
        2 * (x.element_size() + dy.element_size()),
        weight.element_size() + 4 + 4 * has_bias,
    )
    return PER_THREAD_BACKWARD * (data + others) // 4


def backward(dy, dtotal, x, rstd, weight, norm, has_bias):
    T, H, D = sizes(x, weight)
    if T == 0:
        return no_rows(x, weight, has_bias)
    dx = torch.empty_like(x)
    p = plan(D, H, tw.vector(D, dy, dtotal, x, weight, dx), backward=True)
    P = _clusters(x, p, T)
    dw = torch.empty((P, H, D), dtype=torch.float32, device=x.device)
    # 512 threads have 128 registers each; where these took 72 of them, ptxas spilled up to 24
    # bytes. 256 have 255, but ptxas limits itself to 128, for a second block, and spills 8 to 16
    # bytes, unless one block per SM is specified.
    many = _registers(dy, x, weight, has_bias) > 64
    ahead, alone = p.block <= 256 or not many, many or p.cluster > 1
    # Without registers to prefetch there are none for db either: PyTorch sums dy.
    db = torch.empty_like(dw) if has_bias and ahead else None
    tensors = dy, dtotal, x, rstd, weight, dx, dw, db
    options = norm.offset, p, norm.round_xhat, ahead, alone
    tw.launch(_launch_backward, *tensors, T, P, *options, P * p.cluster, H)
    dweight = dw.sum(0).reshape(weight.shape).to(weight.dtype)
    if not has_bias:
        return Gradients(dx, dweight, None)
    dbias = dy.reshape(-1, D).sum(0, dtype=torch.float32) if db is None else db.sum((0, 1))
    return Gradients(dx, dweight, dbias.to(weight.dtype))


def specs() -> list[CuteSpec]:
    """Launches of the launchers above, for the compile gate: rows shared by part of a warp, a warp,
    a block and clusters, and one of odd width; few options and all of them.
    """
    bf16, fp32 = torch.bfloat16, torch.float32
    usual, float_weight, all_float = (
        (bf16, bf16, False, True),
        (bf16, fp32, True, True),
        (fp32, fp32, True, False),
    )
    launches = []
    for D in (128, 1024, 4096, 4097, 8192, 16384, 32768, 65536):
        variants = (usual,) if D in (4097, 32768) else (usual, float_weight, all_float)
        # A row begins at a multiple of 2 bytes.
        needs = {"load": 0, "store": 0} if D == 4097 else {}
        for data, weight_type, bias, cast in variants:

            def new(*shape, dtype=data):
                return torch.empty(shape, dtype=dtype, device="meta")

            H = 8 if D == 128 else 1
            x = new(4, H, D)
            w = new(H, D, dtype=weight_type) if H > 1 else new(D, dtype=weight_type)
            b = new(D, dtype=weight_type) if bias else None
            rstd = new(4, H, dtype=fp32)
            tail = f"{tw.name(data)} weight={tw.name(weight_type)}{' bias' if bias else ''} D={D}"
            norm = Norm(1e-6, 0.0, cast)
            launches += [
                tw.spec(f"cute forward {tail}", forward, x, None, w, b, norm, **needs),
                tw.spec(f"cute add_forward {tail}", forward, x, x, w, b, norm, **needs),
                tw.spec(
                    f"cute backward {tail}",
                    backward,
                    x,
                    x if bias else None,
                    x,
                    rstd,
                    w,
                    norm,
                    bias,
                    **needs,
                ),
            ]
    return launches
