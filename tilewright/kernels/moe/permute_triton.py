"""Sorting slots by expert, and moving rows there and back, in Triton. The definitions are in
tilewright/ops/moe/permute.py.

T = tokens, K = experts per token, R = T * K slots and rows, E = experts, H = columns.

The counting sort is two launches, and its prefix sums are added in a fixed order. `_histogram`: a
program counts the experts of a run of slots, in tiles of TILE. `_place`: each program adds the
counts of all preceding runs, which together are small, and then places its tiles: within a tile a
slot's rank is the number of equal ones before it. It can also write its share of the map of tiles
that grouped products need (`grouped_gemm_triton.tile_map`), which is a function of the same counts.
If there is one tile, as for 16 tokens with 8 experts each, `_place` counts too: one launch.

`route` counts experts as well, and passes nothing on. Its tokens_per_expert is the sum over all
slots, which `_place` has from what it reads anyway; it lacks the counts of each run before its own
and of each tile. Those of 32,768 tokens with 8 of 128 experts take `_histogram` 2 MiB read and 1
MiB written, a microsecond or two beside its launch, where a layer takes milliseconds; and a choice
changes between the two ops, by `round_to`, capacity or expert parallelism.

Rows move by token: a program reads a row of x once and writes it K times, or reads K rows and
writes their sum, so that no byte is moved twice. Rows without a slot come last; program t also
clears those among rows t K to t K + K - 1. Row strides and H are in units of UNIT elements, 16
bytes where they are multiples of that: row alignment is then explicit in the code, whereas Triton
detects multiples of 16 elements only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv, next_power_of_2, unit
from tilewright.kernels.moe import operators
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import Tunable

EXPERTS = 128  # per program of `_histogram`, each compared with every slot of a tile
MAPPED = 32  # tiles of the map at a time, each compared with all experts (128: 32 per thread)
# Programs that count used rows. Each that moves rows reads all counts, 256 bytes.
COUNTS = 64


# ---- sorting


class _Sorted(NamedTuple):
    """What is constant in a launch of `_place`.

    WIDTH: no fewer than experts, a power of 2.   ROWS: runs whose counts are added at a time.
    BLOCK_M: rows of a tile of the map, MAPPED of which are computed at a time.
    """

    WIDTH: int
    ROWS: int
    BLOCK_M: int = operators.MAP_ROWS
    MAPPED: int = MAPPED


@triton.jit
def _expert(index, E):
    """The experts of slots; E for none. Compared before the cast, which drops high bits."""
    return tl.where((index < 0) | (index > E), E, index).to(tl.int32)


@triton.jit(do_not_specialize=["steps"])
def _histogram(
    index_ptr, tile_ptr, run_ptr, R, E, steps, TILE: tl.constexpr, EXPERTS: tl.constexpr
):
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    tile = tl.program_id(0).to(tl.int64) * steps
    slot = tile * TILE + tl.arange(0, TILE)
    following = tl.load(index_ptr + slot, mask=slot < R, other=-1)
    for _ in range(steps):
        own = _expert(following, E)
        slot += TILE
        following = tl.load(index_ptr + slot, mask=slot < R, other=-1)
        # Column E is not stored.
        count = tl.sum((own[:, None] == expert[None, :]).to(tl.int32), axis=0)
        tl.store(tile_ptr + tile * E + expert, count, mask=expert < E)
        tile += 1
        total += count
    tl.store(run_ptr + tl.program_id(0) * E + expert, total, mask=expert < E)


@triton.jit
def _map(tiles_ptr, total, ends, run, runs, R, E, capacity, FIXED: tl.constexpr):
    """Writes this run's share of the map: the expert, first row and end of each tile, 0 past the
    last. total, ends: the number of each expert's rows, and their end.
    """
    BLOCK_M: tl.constexpr = FIXED.BLOCK_M
    WIDTH: tl.constexpr = FIXED.WIDTH
    MAPPED: tl.constexpr = FIXED.MAPPED
    expert = tl.arange(0, WIDTH)
    tiles = tl.cdiv(total, BLOCK_M)
    last = tl.cumsum(tiles, axis=0)  # past the last expert, as many as all have
    used, of_experts = tl.sum(total, axis=0), tl.sum(tiles, axis=0)
    number = of_experts + tl.cdiv(R - used, BLOCK_M)  # with the tail's
    # A tile's first row, less BLOCK_M times its place in the map.
    base = ends - total - (last - tiles) * BLOCK_M
    for first in range(run * MAPPED, capacity, runs * MAPPED):
        t = first + tl.arange(0, MAPPED)
        before = (last[None, :] <= t[:, None]) & (expert < E)[None, :]
        own = tl.sum(before.to(tl.int32), axis=1)
        of = tl.minimum(own, WIDTH - 1)
        row = tl.where(own < E, tl.gather(base, of, 0), used - of_experts * BLOCK_M) + t * BLOCK_M
        end = tl.where(own < E, tl.gather(ends, of, 0), R)
        to, live, mask = tiles_ptr + t, t < number, t < capacity
        tl.store(to, tl.where(live, own, 0), mask=mask)
        tl.store(to + capacity, tl.where(live, row, 0), mask=mask)
        tl.store(to + 2 * capacity, tl.where(live, end, 0), mask=mask)
    if run == 0:
        tl.store(tiles_ptr + 3 * capacity, number)


@triton.jit(do_not_specialize=["steps", "runs", "capacity"])
def _place(
    index_ptr,
    tile_ptr,
    run_ptr,
    offsets_ptr,
    slots_ptr,
    position_ptr,
    map_ptr,
    R,
    E,
    steps,
    runs,
    capacity,
    FIXED: tl.constexpr,
    TILE: tl.constexpr,
):
    """map: None, or the map of tiles of BLOCK_M rows, with room for `capacity`.
    tile, run: `_histogram`'s counts, or None for a single tile.
    """
    WIDTH: tl.constexpr = FIXED.WIDTH
    ROWS: tl.constexpr = FIXED.ROWS
    run = tl.program_id(0)
    expert = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.int32)
    before = tl.zeros([WIDTH], tl.int32)
    if run_ptr is None:
        for first in range(0, R, ROWS):
            r = first + tl.arange(0, ROWS)
            own = _expert(tl.load(index_ptr + r, mask=r < R, other=-1), E)
            total += tl.sum((own[:, None] == expert[None, :]).to(tl.int32), axis=0)
        total = tl.where(expert < E, total, 0)
    else:
        for first in range(0, runs, ROWS):
            r = first + tl.arange(0, ROWS)
            counts = tl.load(
                run_ptr + r[:, None] * E + expert[None, :],
                mask=(r < runs)[:, None] & (expert < E)[None, :],
                other=0,
            )
            total += tl.sum(counts, axis=0)
            before += tl.sum(tl.where((r < run)[:, None], counts, 0), axis=0)
    ends = tl.cumsum(total, axis=0)
    if run == 0:
        tl.store(offsets_ptr + expert, ends, mask=expert < E)
    if map_ptr is not None:
        _map(map_ptr, total, ends, run, runs, R, E, capacity, FIXED)
    next_row = ends - total + before  # per expert
    # Slots before this run that have no expert come first.
    next_other = tl.sum(total, axis=0) + run * steps * TILE - tl.sum(before, axis=0)
    lane = tl.arange(0, TILE)
    tile = run.to(tl.int64) * steps
    slot = tile * TILE + lane
    following = tl.load(index_ptr + slot, mask=slot < R, other=-1)
    for _ in range(steps):
        own = _expert(following, E)
        following = tl.load(index_ptr + slot + TILE, mask=slot + TILE < R, other=-1)
        counts = total
        if tile_ptr is not None:
            counts = tl.load(tile_ptr + tile * E + expert, mask=expert < E, other=0)
        # Counts the slots of the same expert that come before. (Comparisons of lanes alone would be
        # moved out of the loop, and spill.)
        least = own * TILE
        order = least + lane
        rank = tl.sum(
            ((order[:, None] >= least[None, :]) & (order[:, None] < order[None, :])).to(tl.int32),
            axis=0,
        )
        row = rank + tl.where(
            own < E, tl.gather(next_row, tl.minimum(own, WIDTH - 1), 0), next_other
        )
        tl.store(position_ptr + slot, tl.where(own < E, row, -1), mask=slot < R)
        tl.store(slots_ptr + row, slot.to(tl.int32), mask=slot < R)
        next_row += counts
        next_other += TILE - tl.sum(counts, axis=0)
        tile += 1
        slot += TILE


def sort(expert_index, num_experts):
    return _sort(expert_index, num_experts, None)


def sort_and_map(expert_index, num_experts):
    """The order, and the map of its tiles as `grouped_gemm_triton.tile_map` makes it, without
    another launch. Entries past the last tile are 0, since an operator's result must be a function
    of its arguments.
    """
    tiles = operators.map_size(expert_index.numel(), num_experts)
    tiles = expert_index.new_empty(tiles, dtype=torch.int32)
    return _sort(expert_index, num_experts, tiles), tiles


def _sort(expert_index, num_experts, tiles):
    # In one launch a run would wait for the counts of those before it, which nothing promises to
    # run meanwhile. That would save a launch, 3 us of 151 (bench/predicted, Qwen3-30B-A3B).
    R = expert_index.numel()
    order = operators.sort(expert_index, num_experts)
    config = SORT.config(expert_index.device, num_experts)
    by_tiles = {name: config[name] for name in ("TILE", "num_warps")}
    slot_tiles = cdiv(R, config["TILE"])
    steps = max(1, cdiv(slot_tiles, config["RUNS"]))
    runs = max(1, cdiv(slot_tiles, steps))
    by_tile = by_run = None
    if slot_tiles > 1:
        by_tile = expert_index.new_empty((runs * steps, num_experts), dtype=torch.int32)
        by_run = expert_index.new_empty((runs, num_experts), dtype=torch.int32)
        grid, counted = (runs, cdiv(num_experts, EXPERTS)), (expert_index, by_tile, by_run)
        launch(_histogram, grid, *counted, R, num_experts, steps, EXPERTS=EXPERTS, **by_tiles)
    width = max(16, next_power_of_2(num_experts))
    tensors = expert_index, by_tile, by_run, *order, tiles
    numbers = R, num_experts, steps, runs, 0 if tiles is None else tiles.shape[0] // 3
    fixed = _Sorted(width, max(1, 4096 // width))
    launch(_place, (runs,), *tensors, *numbers, FIXED=fixed, **by_tiles)
    return order


def _sort_heuristic(experts: int) -> dict:
    """TILE: slots; ranks cost TILE comparisons per slot, and smaller tiles more counts. A tile has
    a slot for each thread: with a smaller tile Triton lets each thread load all slots that it
    compares with, at three times the instructions, instead of reading them from shared memory.

    RUNS: at most. Each program of `_place` reads the counts of all, 128 KiB for 256 experts. A
    run's tiles follow each other, about a microsecond each; the next one's slots are loaded ahead.
    """
    return {"RUNS": 128, "TILE": 128, "num_warps": 4}


def _sort_space(experts: int) -> list[dict]:
    """With 256 runs, two share each of 128 SMs. Small tiles of 256 experts need more registers than
    a thread has, for the map.
    """
    return [
        {"RUNS": runs, "TILE": 32 * warps, "num_warps": warps}
        for warps in (2, 4)
        if experts <= 64 * warps
        for runs in (128, 256)
    ]


# ---- moving rows


class _Moved(NamedTuple):
    """What is constant in a launch that moves rows: K experts per token, UNROLL at a time.

    COUNTS: counts of used rows, if there are any.   WEIGHTED: whether `_collect` weights rows.
    DOTS: whether weights have gradients.
    """

    K: int
    UNIT: int
    UNROLL: int
    COUNTS: int = 0
    WEIGHTED: bool = False
    DOTS: bool = False


def _spread_heuristic(columns: int, itemsize: int) -> dict:
    """16 elements per thread: two 128-bit loads of 16-bit elements, and as many stores
    per expert.
    """
    block = 2048 if columns % 2048 == 0 else min(1024, next_power_of_2(columns))
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


def _collect_heuristic(columns: int, itemsize: int) -> dict:
    """8 elements per thread: one 128-bit load of each of up to 8 rows of 16-bit elements in flight,
    128 bytes.
    """
    block = min(1024, next_power_of_2(columns))
    return {"BLOCK": block, "num_warps": max(1, block // 256)}


def _space(columns: int, itemsize: int) -> list[dict]:
    """One to four 128-bit accesses of each row per thread, at most 16 elements."""
    return [
        {"BLOCK": block, "num_warps": warps}
        for block in (512, 1024, 2048, 4096)
        for warps in (1, 2, 4, 8)
        if 16 // itemsize <= block // (32 * warps) <= 16 and block <= next_power_of_2(columns)
    ]


# Registers per thread with which an SM holds this many programs of the backward, of four warps.
# With 128, for four programs, rows of odd strides spill, and under Triton 3.9 all 16-bit rows.
LIMIT, PER_SM = 168, 3


def _backward_heuristic(columns: int, itemsize: int) -> dict:
    """float32 takes 212 registers, two programs per SM: with LIMIT it spills.

    The next columns are not loaded ahead: dy and 8 rows are 36 registers more than the 144 of a
    thread (16 bits), which leave two programs, and three have 54 KiB in flight (an H100: 94 to 96 %
    of its bandwidth).
    """
    return {
        **_collect_heuristic(columns, itemsize),
        "maxnreg": LIMIT if itemsize == 2 else None,
    }


def _backward_space(columns: int, itemsize: int) -> list[dict]:
    """8 rows at a time, with a running product each: 8 columns per thread are 64
    registers of sums.
    """
    return [
        {**c, "maxnreg": None}
        for c in _space(columns, itemsize)
        if c["BLOCK"] // (32 * c["num_warps"]) <= 8
    ]


@triton.jit(do_not_specialize=["steps"])
def _count(position_ptr, used_ptr, R, steps, BLOCK: tl.constexpr):
    """Counts the slots of a run that have a row."""
    counts = tl.zeros([BLOCK], tl.int32)
    for step in range(steps):
        slot = (tl.program_id(0).to(tl.int64) * steps + step) * BLOCK + tl.arange(0, BLOCK)
        counts += (tl.load(position_ptr + slot, mask=slot < R, other=-1) >= 0).to(tl.int32)
    tl.store(used_ptr + tl.program_id(0), tl.sum(counts, axis=0))


@triton.jit
def _clear(out_ptr, used_ptr, t, c, mask, columns, FIXED: tl.constexpr):
    """Writes zeros at columns c of those of token t's K rows that no slot uses."""
    used = tl.sum(tl.load(used_ptr + tl.arange(0, FIXED.COUNTS)), axis=0)
    first = t * FIXED.K
    if first + FIXED.K > used:
        zero = (c * 0).to(out_ptr.dtype.element_ty)
        for row in range(tl.maximum(first, used.to(tl.int64)), first + FIXED.K):
            tl.store(out_ptr + row * columns * FIXED.UNIT + c, zero, mask=mask)


@triton.jit(do_not_specialize=["R"])
def _spread(
    x_ptr, position_ptr, used_ptr, out_ptr, sizes, R, FIXED: tl.constexpr, BLOCK: tl.constexpr
):
    """sizes: columns, blocks of them, and the stride of x."""
    columns, BLOCKS, x_stride = sizes
    K: tl.constexpr = FIXED.K
    UNIT: tl.constexpr = FIXED.UNIT
    UNROLL: tl.constexpr = FIXED.UNROLL
    t = (tl.program_id(0) // BLOCKS).to(tl.int64)
    c = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = c < columns * UNIT
    x = tl.load(x_ptr + t * x_stride * UNIT + c, mask=mask)
    for k in range(0, K, UNROLL):
        for u in tl.static_range(UNROLL):
            slot = t * K + k + u
            p = tl.load(position_ptr + slot, mask=slot < (t + 1) * K, other=-1)
            end = tl.where((p >= 0) & (p < R), columns * UNIT, 0)  # nothing, for a sentinel
            tl.store(out_ptr + p.to(tl.int64) * columns * UNIT + c, x, mask=c < end)
    _clear(out_ptr, used_ptr, t, c, mask, columns, FIXED)


@triton.jit(do_not_specialize=["R"])
def _collect(
    rows_ptr, weight_ptr, position_ptr, y_ptr, sizes, R, FIXED: tl.constexpr, BLOCK: tl.constexpr
):
    """sizes: columns, blocks of them, and the stride of rows."""
    columns, BLOCKS, rows_stride = sizes
    K: tl.constexpr = FIXED.K
    UNIT: tl.constexpr = FIXED.UNIT
    UNROLL: tl.constexpr = FIXED.UNROLL
    t = (tl.program_id(0) // BLOCKS).to(tl.int64)
    c = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = c < columns * UNIT
    y = tl.zeros([BLOCK], tl.float32)
    for k in range(0, K, UNROLL):
        for u in tl.static_range(UNROLL):
            slot = t * K + k + u
            p = tl.load(position_ptr + slot, mask=slot < (t + 1) * K, other=-1)
            there = (p >= 0) & (p < R)
            end = tl.where(there, columns * UNIT, 0)  # nothing, for a sentinel
            row = tl.load(
                rows_ptr + p.to(tl.int64) * rows_stride * UNIT + c, mask=c < end, other=0.0
            )
            if FIXED.WEIGHTED:
                w = tl.load(weight_ptr + slot, mask=there, other=0.0)
                y += w * row.to(tl.float32)
            else:
                y += row.to(tl.float32)
    tl.store(y_ptr + t * columns * UNIT + c, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def _backward(
    dy_ptr,
    rows_ptr,
    weight_ptr,
    position_ptr,
    used_ptr,
    drows_ptr,
    dweight_ptr,
    sizes,
    R,
    FIXED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program loops over one token's dy once for UNROLL of its experts.

    sizes: columns, and the strides of dy and rows.
    """
    columns, dy_stride, rows_stride = sizes
    K: tl.constexpr = FIXED.K
    UNIT: tl.constexpr = FIXED.UNIT
    UNROLL: tl.constexpr = FIXED.UNROLL
    t = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    for first in range(0, K, UNROLL):
        k = first + tl.arange(0, UNROLL)
        p = tl.load(position_ptr + t * K + k, mask=k < K, other=-1)
        there = (p >= 0) & (p < R)
        w = tl.load(weight_ptr + t * K + k, mask=there, other=0.0)
        p = p.to(tl.int64)
        dot = tl.zeros([UNROLL, BLOCK], tl.float32)
        for at in range(0, columns * UNIT, BLOCK):
            c = at + lane
            d = tl.load(dy_ptr + t * dy_stride * UNIT + c, mask=c < columns * UNIT, other=0.0).to(
                tl.float32
            )
            mask = there[:, None] & (c < columns * UNIT)[None, :]
            if FIXED.DOTS:
                row = tl.load(
                    rows_ptr + p[:, None] * rows_stride * UNIT + c[None, :], mask=mask, other=0.0
                )
                dot += row.to(tl.float32) * d[None, :]
            tl.store(
                drows_ptr + p[:, None] * columns * UNIT + c[None, :],
                (w[:, None] * d[None, :]).to(drows_ptr.dtype.element_ty),
                mask=mask,
            )
        if FIXED.DOTS:
            tl.store(dweight_ptr + t * K + k, tl.sum(dot, axis=1), mask=k < K)
    for at in range(0, columns * UNIT, BLOCK):
        c = at + lane
        _clear(drows_ptr, used_ptr, t, c, c < columns * UNIT, columns, FIXED)


def _unroll(K: int) -> int:
    return min(8, next_power_of_2(K))


def _used(position: torch.Tensor) -> torch.Tensor:
    """The number of rows in use, as COUNTS partial counts."""
    used = position.new_empty(COUNTS)
    steps = max(1, cdiv(position.numel(), COUNTS * 1024))
    launch(_count, (COUNTS,), position, used, position.numel(), steps, BLOCK=1024, num_warps=4)
    return used


def spread(x, position, offsets):
    K, columns = position.shape[1], x.shape[1]
    rows = operators.spread(x, position, offsets)
    if rows.numel():
        used = _used(position) if offsets is None else offsets[-1:]
        c = SPREAD.config(x.device, columns, x.element_size())
        blocks = cdiv(columns, c["BLOCK"])
        by = unit(x.element_size(), columns, x.stride(0))
        fixed = _Moved(K, by, _unroll(K), used.shape[0])
        grid, tensors = (x.shape[0] * blocks,), (x, position, used, rows)
        sizes = columns // by, blocks, x.stride(0) // by
        launch(_spread, grid, *tensors, sizes, rows.shape[0], FIXED=fixed, **c)
    return rows


def collect(rows, weight, position):
    (T, K), columns = position.shape, rows.shape[1]
    y = operators.collect(rows, weight, position)
    if y.numel():
        c = COLLECT.config(rows.device, columns, rows.element_size())
        blocks = cdiv(columns, c["BLOCK"])
        by = unit(rows.element_size(), columns, rows.stride(0))
        fixed = _Moved(K, by, _unroll(K), WEIGHTED=weight is not None)
        grid, tensors = (T * blocks,), (rows, weight, position, y)
        sizes = columns // by, blocks, rows.stride(0) // by
        launch(_collect, grid, *tensors, sizes, rows.shape[0], FIXED=fixed, **c)
    return y


def backward(dy, rows, weight, position):
    (T, K), columns = position.shape, dy.shape[1]
    drows, dweight = gradients = operators.collect_backward(dy, rows, weight, position)
    if drows.numel():
        c = BACKWARD.config(dy.device, columns, dy.element_size())
        c = {name: value for name, value in c.items() if value is not None}
        strides = dy.stride(0), 0 if rows is None else rows.stride(0)
        by = unit(dy.element_size(), columns, *strides)
        fixed = _Moved(K, by, _unroll(K), COUNTS, DOTS=rows is not None)
        tensors = dy, rows, weight, position, _used(position), drows, dweight
        sizes = tuple(n // by for n in (columns, *strides))
        launch(_backward, (T,), *tensors, sizes, T * K, FIXED=fixed, **c)
    elif dweight is not None:
        dweight.zero_()
    return gradients


# Pointers of the kernels that move rows, except those to rows.
_TYPES = {"position": "i32", "used": "i32", "weight": "fp32", "dweight": "fp32"}


def _specs(kernel):
    """Rows aligned to 16 bytes with no argument divisible by more; and an odd width in bf16."""

    def specs(key: dict, config: dict) -> list[KernelSpec]:
        aligned, data = 16 // key["itemsize"], "bf16" if key["itemsize"] == 2 else "fp32"
        wide = "i32", "i64" if kernel is _backward else "i32", "i64"  # strides
        flags = kernel is _collect, kernel is _backward
        counts = 0 if kernel is _collect else COUNTS
        return [
            KernelSpec.of(
                kernel,
                f"{kernel.fn.__name__[1:]} {data}{tail} H={key['columns']}",
                {**_TYPES, "*": data},
                {"FIXED": _Moved(8, by, 8, counts, *flags), **config},
                {"sizes": wide if tail else ("i32",) * 3},
                load=need,
                store=need,
                elements=config["BLOCK"],
                per_sm=PER_SM if config.get("maxnreg") else 1,
            )
            # Rows of odd strides start at any element.
            for tail, by, need in (("", aligned, 128), (" odd", 1, 0))
            if data == "bf16" or not tail
        ]

    return specs


def _small(kernel, label: str, none: tuple[str, ...] = (), **constexprs) -> KernelSpec:
    """Without wide accesses: the sort's tables are small beside the rows that are moved next, and
    its writes are scattered by nature.   none: pointers that the launch does not have.
    """
    types = {"index": "i64", **dict.fromkeys(none), "*": "i32"}
    return KernelSpec.of(kernel, label, types, constexprs, load=0, store=0)


def _sort_specs(key: dict, config: dict) -> list[KernelSpec]:
    """The counting sort."""
    E, by_tiles = key["experts"], {name: config[name] for name in ("TILE", "num_warps")}
    return [
        _small(_histogram, "histogram", EXPERTS=EXPERTS, **by_tiles),
        *(
            _small(
                _place,
                f"place{how} E={E}",
                none,
                FIXED=_Sorted(E, 4096 // E),
                **by_tiles,
            )
            for how, none in (
                ("", ("map",)),
                (" and map", ()),
                (" one tile and map", ("tile", "run")),
            )
        ),
    ]


def count_gate() -> list[KernelSpec]:
    """The count of used rows reads a few hundred KiB."""
    return [_small(_count, "count", BLOCK=1024, num_warps=4)]


# The keys are the experts of Qwen3-30B-A3B and of DeepSeek-V3.
SORT = Tunable(
    "permute",
    "sort",
    ("experts",),
    "forward",
    _sort_heuristic,
    _sort_space,
    [(128,), (256,)],
    _sort_specs,
)
_FIELDS, _KEYS = ("columns", "itemsize"), [(2048, 2), (4096, 4), (7168, 2)]
SPREAD = Tunable(
    "permute", "spread", _FIELDS, "forward", _spread_heuristic, _space, _KEYS, _specs(_spread)
)
COLLECT = Tunable(
    "unpermute",
    "collect",
    _FIELDS,
    "forward",
    _collect_heuristic,
    _space,
    _KEYS[:2],
    _specs(_collect),
)
BACKWARD = Tunable(
    "unpermute",
    "backward",
    _FIELDS,
    "backward",
    _backward_heuristic,
    _backward_space,
    _KEYS[:2],
    _specs(_backward),
)
TUNABLES = (SORT, SPREAD, COLLECT, BACKWARD)
