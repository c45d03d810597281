"""Device properties that launchers depend on.

Triton's interpreter runs kernels on CPU tensors, so each function supports those too.
"""

from __future__ import annotations

import functools

import torch


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
def conversions(device: torch.device) -> int:
    """The GPU's conversion instructions: 0 none, 1 e4m3, 2 e4m3 and e2m1. The interpreter runs no
    PTX.
    """
    if device.type != "cuda":
        return 0
    capability = torch.cuda.get_device_capability(device)
    return 2 if capability >= (10, 0) else 1 if capability >= (8, 9) else 0


@functools.cache
def old_ptxas() -> bool:
    """Whether Triton ships a ptxas of CUDA 12, whose register allocation spills where that of 3.9
    does not.
    """
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)


def dot_precision(t: torch.Tensor) -> str | None:
    """`input_precision` of a tl.dot of t; tf32 would keep 10 bits of float32."""
    return "ieee" if t.dtype == torch.float32 else None
