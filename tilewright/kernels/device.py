"""Device properties that launchers depend on.

Triton's interpreter runs kernels on CPU tensors, so each function supports those too.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch


class SM(NamedTuple):
    """Limits of a multiprocessor, by the names of torch.cuda.get_device_properties."""

    shared_memory_per_multiprocessor: int
    max_threads_per_multi_processor: int
    regs_per_multiprocessor: int = 65536


# By compute capability (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability").
SMS = {90: SM(228 * 1024, 2048), 100: SM(228 * 1024, 2048), 120: SM(100 * 1024, 1536)}


def resident(registers: int, shared: int, warps: int, of: Any) -> int:
    """Blocks that an SM holds at a time, at least 1.

    registers: per thread.
    shared: bytes per block.
    of: an `SM`, or a device's properties.

    Each quarter of an SM has a quarter of the registers and of the warps. Registers are allocated
    to warps in units of 256; a block costs 1 KiB more shared memory (compute capability 8.0 and up;
    CUDA C++ Programming Guide, "Technical Specifications").
    """
    by_warp = max(1, -(-32 * registers // 256)) * 256
    return max(
        1,
        min(
            of.regs_per_multiprocessor // 4 // by_warp * 4 // warps,
            of.shared_memory_per_multiprocessor // (shared + 1024),
            of.max_threads_per_multi_processor // (32 * warps),
        ),
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of SMs. A few in the interpreter, so that a program has more than one tile there
    too.
    """
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs(t: torch.Tensor, each: int) -> int:
    """Programs that share the rows of a column reduction: `each` per SM."""
    return each * multiprocessors(t.device) if t.is_cuda else 4


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Whether the TMA unit copies tensor descriptors; True in the interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def large_shared_memory(device: torch.device) -> bool:
    """Whether a block may use 227 KiB of shared memory, from which tensor cores read operands,
    instead of 99 (sm_120) or 163 (sm_80).
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@functools.cache
def hopper(device: torch.device) -> bool:
    """Whether compute capability is 9.0, where a matrix product is summed in registers. Blackwell
    reads it from other memory, into registers that it needs only then.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def conversions(device: torch.device) -> int:
    """The GPU's conversion instructions: 0 none, 1 e4m3, 2 e4m3 and e2m1. The interpreter runs no
    PTX.
    """
    if device.type != "cuda":
        return 0
    capability = torch.cuda.get_device_capability(device)
    return 2 if capability >= (10, 0) else 1 if capability >= (8, 9) else 0


@functools.cache
def older_triton() -> bool:
    """Whether Triton is older than 3.9. Its code for the same kernel needs other, often more,
    registers, by Triton's own doing: ptxas of CUDA 12.8, 12.9 and 13.0 give it the same number.
    """
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)


def dot_precision(t: torch.Tensor) -> str | None:
    """`input_precision` of a tl.dot of t; tf32 would keep 10 bits of float32."""
    return "ieee" if t.dtype == torch.float32 else None
