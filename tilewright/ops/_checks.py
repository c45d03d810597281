"""Argument checks that public functions share. Each raises one error that names the argument, its value and what is
accepted. TypeError for a wrong type or dtype, ValueError for a wrong shape or value."""

from __future__ import annotations

import torch

from tilewright.registry import short

ACCEPTED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def floating(name: str, t: torch.Tensor) -> None:
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.dtype not in ACCEPTED:
        raise TypeError(f"{name} must be one of {', '.join(map(short, ACCEPTED))}, got {short(t.dtype)}")


def same_device(**tensors: torch.Tensor | None) -> None:
    (first, t0), *rest = [(n, t) for n, t in tensors.items() if t is not None]
    for name, t in rest:
        if t.device != t0.device:
            raise ValueError(f"{name} is on {t.device}, {first} on {t0.device}; they must be on one device")


def shape(name: str, t: torch.Tensor, expected: tuple[int, ...], why: str) -> None:
    if tuple(t.shape) != tuple(expected):
        raise ValueError(f"{name} must have shape {list(expected)} ({why}), got {list(t.shape)}")


def choice(name: str, value: object, accepted: tuple) -> None:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {list(accepted)}, got {value!r}")
