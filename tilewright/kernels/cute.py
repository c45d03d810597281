"""Shared code of the CuTe DSL kernels: 16-byte loads and stores, a reduction over a cluster of
blocks, and compiling and launching.

Kernels take pointers and sizes, not tensors with layouts: a row's address is 64-bit arithmetic on
them, and a launch converts no layout. A compilation is keyed by the host function, its argument
types and its constants; all other numbers are arguments.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import typing
from collections.abc import Callable, Iterator

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_ptr

from tilewright.kernels.spec import CuteSpec

TYPES = {
    "fp32": cutlass.Float32,
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "i32": cutlass.Int32,
    "i64": cutlass.Int64,
}
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64"}

# Largest cluster on every GPU that has clusters (CUDA programming guide).
CLUSTER_LIMIT = 8


# ---- in kernels: access to global memory


def _transfer(dtype, n: int):
    """A copy of n elements by one thread, in accesses of at most 128 bits."""
    return cute.make_copy_atom(
        cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=min(128, n * dtype.width)
    )


def _at(pointer: cute.Pointer, offset, n: int) -> cute.Tensor:
    """The n elements at pointer + offset. The caller ensures that both are multiples of n elements,
    or of 16 bytes if that is less.
    """
    return cute.make_tensor(
        pointer + cute.assume(offset, divby=min(n, 128 // pointer.dtype.width)), cute.make_layout(n)
    )


@cute.jit
def load(
    pointer: cute.Pointer,
    offset: Int64,
    n: cutlass.Constexpr,
    wanted=None,
    fill: cutlass.Constexpr = 0.0,
):
    """n elements in registers. wanted: a condition, or None; where it is false, nothing is read and
    the result is `fill`.
    """
    out = cute.make_rmem_tensor(n, pointer.dtype)
    if const_expr(wanted is None):
        cute.copy(_transfer(pointer.dtype, n), _at(pointer, offset, n), out)
    else:
        out.fill(fill)
        if wanted:
            cute.copy(_transfer(pointer.dtype, n), _at(pointer, offset, n), out)
    return out


@cute.jit
def store(values: cute.Tensor, pointer: cute.Pointer, offset: Int64, wanted=None):
    n = cute.size(values)
    if const_expr(wanted is None):
        cute.copy(_transfer(pointer.dtype, n), values, _at(pointer, offset, n))
    else:
        if wanted:
            cute.copy(_transfer(pointer.dtype, n), values, _at(pointer, offset, n))


def rounded(values: cute.TensorSSA, dtype) -> cute.Tensor:
    """values, rounded to dtype, in registers."""
    out = cute.make_rmem_tensor(values.shape, dtype)
    out.store(values.to(dtype))
    return out


# ---- in kernels: reductions


@cute.jit
def exchange(
    values: tuple,
    buffer: cute.Tensor,
    side: Int32,
    rank: Int32,
    warps: cutlass.Constexpr,
    cluster: cutlass.Constexpr,
):
    """All-gathers values over the warps of a cluster: values[i] of warp w of block r is afterwards
    buffer[side, i, r * warps + w], in each block's own shared memory.

    buffer: [2, len(values), cluster * warps]. side: alternates between 0 and 1 in a loop. One side
    is then not overwritten before all warps have passed the barrier of the other side, so one
    barrier per call is enough. It is also the last access to another block's shared memory: a block
    may exit after it. The cluster must have synchronized once (`meet`) before, since a block's
    shared memory cannot be written before the block has started.
    """
    lane = cute.arch.lane_idx()
    place = rank * warps + cute.arch.warp_idx()
    if lane < cluster:  # lane i writes to block i; all lanes hold the values
        for i in cutlass.range_constexpr(len(values)):
            here = buffer.iterator + cute.crd2idx((side, i, place), buffer.layout)
            if const_expr(cluster > 1):
                cute.arch.inline_ptx(
                    "st.shared::cluster.f32 [{$r0}], {$r1};",
                    read_only_args=[cute.arch.map_dsmem_ptr(here, lane), values[i]],
                )
            else:
                cute.make_tensor(here, cute.make_layout(1))[0] = values[i]
    if const_expr(cluster > 1):
        meet()
    else:
        cute.arch.barrier()


def meet() -> None:
    """Barrier of all threads of a cluster; earlier writes to shared memory are visible after it."""
    cute.arch.cluster_arrive(aligned=True)
    cute.arch.cluster_wait()


def exchange_buffer(values: int, warps: int, cluster: int) -> cute.Tensor:
    """Shared memory for `exchange`."""
    shape = (2, values, cluster * warps)
    return cute.make_tensor(
        cute.arch.alloc_smem(Float32, 2 * values * cluster * warps, alignment=16),
        cute.make_ordered_layout(shape, order=(2, 1, 0)),
    )


@cute.jit
def row_sum(
    value: Float32,
    buffer,
    side: Int32,
    rank: Int32,
    threads: cutlass.Constexpr,
    cluster: cutlass.Constexpr,
) -> Float32:
    """The sum over the `threads` threads that share a row in each of `cluster` blocks, in fixed
    order: the same bits in every thread. threads: a power of 2 up to 32, or a multiple of 32 and
    then the whole block.
    """
    value = cute.arch.warp_reduction(value, operator.add, threads_in_group=min(32, threads))
    warps = const_expr(max(1, threads // 32))
    if const_expr(warps * cluster > 1):
        exchange((value,), buffer, side, rank, warps, cluster)
        value = Float32(0.0)
        for i in cutlass.range_constexpr((warps * cluster + 31) // 32):
            place = i * 32 + cute.arch.lane_idx()
            if place < warps * cluster:
                value += buffer[side, 0, place]
        value = cute.arch.warp_reduction(value, operator.add)
    return value


# ---- on the host


def name(dtype: torch.dtype) -> str:
    return _NAMES[dtype]


def cluster_for(columns: int, one_block: int) -> int:
    """Blocks that share a row of this many columns: a power of 2."""
    blocks = 1
    while blocks < CLUSTER_LIMIT and blocks * one_block < columns:
        blocks *= 2
    return blocks


def shape(cluster: int) -> tuple[int, int, int] | None:
    """A cluster's shape for a launch; None for a single block."""
    return (cluster, 1, 1) if cluster > 1 else None


def vector(columns: int, *tensors: torch.Tensor | None) -> int:
    """Elements that a thread may read at once from consecutive rows of this many contiguous
    columns: at most 16 bytes of the narrowest dtype.
    """
    present = [t for t in tensors if t is not None]
    n = 16 // min(t.element_size() for t in present)
    while columns % n or any(address(t) % min(16, n * t.element_size()) for t in present):
        n //= 2
    return n


def address(t: torch.Tensor) -> int:
    """The address of its first element; 0 for meta tensors, with which the compile gate plans
    launches and which stand in for aligned ones.
    """
    return 0 if t.is_meta else t.data_ptr()


@functools.cache
def _scalars(function: Callable) -> tuple:
    """The name of each host function argument's type if it is a number, else None."""
    kinds = {cutlass.Int32: "i32", cutlass.Int64: "i64", cutlass.Float32: "fp32"}
    hints = typing.get_type_hints(function.__wrapped__)
    return tuple(kinds.get(hints[n]) for n in inspect.signature(function.__wrapped__).parameters)


def argument_types(function: Callable, arguments: tuple) -> tuple:
    """The key of a compilation: "*bf16 16" for a pointer to memory aligned to 16 bytes, "i32",
    None, or the constant itself.
    """
    out = []
    for value, scalar in zip(arguments, _scalars(function)[:-1], strict=True):
        if isinstance(value, torch.Tensor):
            out.append(f"*{name(value.dtype)} {math.gcd(16, address(value))}")
        else:
            out.append(scalar or value)
    return tuple(out)


def _fake(kind):
    if not isinstance(kind, str):
        return kind
    if kind.startswith("*"):
        dtype, aligned = kind[1:].split()
        return make_ptr(
            TYPES[dtype], int(aligned), cute.AddressSpace.gmem, assumed_align=int(aligned)
        )
    return TYPES[kind](1)


def compiled(function: Callable, types: tuple, arch: int, options: str = ""):
    """Compiles a host function for compute capability `arch` (90, 100, ...) and these argument
    types.
    """
    return cute.compile(
        function, *map(_fake, types), cuda.CUstream(0), options=f"--gpu-arch sm_{arch}a {options}"
    )


_compiled: dict[tuple, Callable] = {}
_recorded: list[tuple] | None = None


def launch(function: Callable, *arguments) -> None:
    """Calls a host function with tensors, None, numbers and constants, on the current stream of the
    tensors' device. Compiles it on the first call with these types. The last two arguments are the
    grid: blocks, and groups of them.
    """
    types = argument_types(function, arguments)
    if _recorded is not None:
        _recorded.append((function, types))
        return
    device = arguments[0].device
    major, minor = torch.cuda.get_device_capability(device)
    key = (function, types, 10 * major + minor)
    with torch.cuda.device(device):
        if key not in _compiled:
            _compiled[key] = compiled(*key)
        given = [
            make_ptr(
                TYPES[name(a.dtype)],
                a.data_ptr(),
                cute.AddressSpace.gmem,
                assumed_align=int(kind.split()[1]),
            )
            if isinstance(a, torch.Tensor)
            else a
            for a, kind in zip(arguments, types, strict=True)
            if a is None or isinstance(kind, str)
        ]
        _compiled[key](*given, cuda.CUstream(torch.cuda.current_stream(device).cuda_stream))


@contextlib.contextmanager
def recording() -> Iterator[list[tuple]]:
    """Inside the block, `launch` only records (host function, types). The compile gate compiles
    what the launchers record for meta tensors, so that the two cannot differ.
    """
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def spec(label: str, launcher: Callable, *arguments, **needs: int) -> CuteSpec:
    """The spec of the one kernel that launcher(*arguments) launches, given meta tensors. needs:
    load, store of CuteSpec.
    """
    with recording() as calls:
        launcher(*arguments)
    ((function, types),) = calls
    clusters = any(getattr(kind, "cluster", 1) > 1 for kind in types)
    return CuteSpec(
        function,
        label,
        types,
        uses={90: ("cluster",), 100: ("cluster",)} if clusters else {},
        **needs,
    )
