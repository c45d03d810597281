"""Argument checks that public functions share. Each raises one error that names the argument, its value and what is
accepted. TypeError for a wrong type or dtype, ValueError for a wrong shape or value."""

from __future__ import annotations

import contextlib
import itertools

import torch

from tilewright.ops._library import define
from tilewright.registry import short

ACCEPTED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# What is > 0 and finite in float32, in which kernels take their numbers, and has a finite inverse there.
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
INT64 = torch.iinfo(torch.int64)


def floating(name: str, t: torch.Tensor) -> None:
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.dtype not in ACCEPTED:
        raise TypeError(f"{name} must be one of {', '.join(map(short, ACCEPTED))}, got {short(t.dtype)}")
    dense(name, t)


def dense(name: str, t: torch.Tensor) -> None:
    if t.layout != torch.strided or t.is_nested:   # kernels read memory
        raise TypeError(f"{name} must be a strided (dense) tensor, got "
                        f"{'a nested one' if t.is_nested else f'layout {short(t.layout)}'}")


def number(name: str, value: object, low: float, high: float, accepted: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not low <= value <= high:   # also NaN, and ints that no float holds
        raise ValueError(f"{name} must be {accepted}, got {value!r}")


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether elements of t may share memory: where a stride is no larger than what the smaller ones walk through."""
    if t.numel() == 0:
        return False
    last = 0   # the largest offset so far
    for stride, n in sorted((stride, n) for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1):
        if stride <= last:
            return True
        last += (n - 1) * stride
    return False


def no_autocast(t: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context without autocast on t's device: kernels do not follow it, so what stands in for them may not either."""
    device = t.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def same_device(**tensors: torch.Tensor | None) -> None:
    (first, t0), *_ = given = [(n, t) for n, t in tensors.items() if t is not None]
    for name, t in given:
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.device != t0.device:
            raise ValueError(f"{name} is on {t.device}, {first} on {t0.device}; they must be on one device")


def shape(name: str, t: torch.Tensor, expected: tuple[int, ...], why: str) -> None:
    if tuple(t.shape) != tuple(expected):
        raise ValueError(f"{name} must have shape {list(expected)} ({why}), got {list(t.shape)}")


def choice(name: str, value: object, accepted: tuple) -> None:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {list(accepted)}, got {value!r}")


def cu_seqlens(cu: torch.Tensor, tokens: int, *, wait: bool) -> torch.Tensor:
    """Packed documents' boundaries as int64 [documents + 1]: from 0, never decreasing, to `tokens`.

    wait: check the values on a CUDA device too, which waits for it. On a CPU they are always checked, in compiled code
    when it runs: the check is an operator, whose result the caller must use.
    """
    same_device(cu_seqlens=cu)
    if cu.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {short(cu.dtype)}")
    if cu.dim() != 1 or cu.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape [documents + 1], got {list(cu.shape)}")
    if wait and cu.is_meta:
        raise ValueError("cu_seqlens must be on a device that holds values, which decide how many documents there are; "
                         "got one on meta")
    return _checked_cu_seqlens(cu, tokens, wait)


def _cu_seqlens(cu: torch.Tensor, tokens: int, wait: bool) -> torch.Tensor:
    if wait or not cu.is_cuda:
        ends = cu.tolist()
        if ends[0] != 0:
            raise ValueError(f"cu_seqlens must start at 0, got {ends[0]}")
        for i, (a, b) in enumerate(itertools.pairwise(ends)):
            if b < a:
                raise ValueError(f"cu_seqlens must not decrease, got {b} after {a} at index {i + 1}")
        if ends[-1] != tokens:
            raise ValueError(f"cu_seqlens must end at {tokens}, the number of tokens, got {ends[-1]}")
    return cu.to(torch.int64, copy=True)


_checked_cu_seqlens = define("checked_cu_seqlens", _cu_seqlens,
                             lambda cu, tokens, wait: torch.empty_like(cu, dtype=torch.int64))
