"""Checks of expert indices and positions, whose values are read only without a device
synchronization.
"""

from __future__ import annotations

import torch

from tilewright.core import checks
from tilewright.core.library import define
from tilewright.core.registry import short

MOST_EXPERTS = 4096  # the sort keeps a number for each in registers


def checked_index(index, num_experts):
    """index, contiguous; its values are checked if that does not synchronize."""
    checks.same_device(expert_index=index)
    checks.dense("expert_index", index)
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expert_index must be int32 or int64, got {short(index.dtype)}")
    if index.dim() != 2 or index.shape[1] == 0:
        raise ValueError(f"expert_index must have shape [T, K], K not 0, got {list(index.shape)}")
    if index.numel() >= 2**31:
        raise ValueError(
            f"expert_index must have fewer than 2^31 elements, got {list(index.shape)}"
        )
    if not isinstance(num_experts, int) or isinstance(num_experts, bool):
        raise TypeError(f"num_experts must be an int, got {num_experts!r}")
    if not 1 <= num_experts <= MOST_EXPERTS:
        raise ValueError(f"num_experts must be 1 to {MOST_EXPERTS}, got {num_experts}")
    return index.contiguous() if index.is_cuda else _checked_index(index, num_experts)


def _look_at_index(index: torch.Tensor, num_experts: int) -> torch.Tensor:
    if index.numel() and not index.is_cuda:
        low, high = index.aminmax()
        if low < 0 or high > num_experts:
            first = ((index < 0) | (index > num_experts)).nonzero()[0].tolist()
            raise IndexError(
                f"expert_index{first} is {int(index[tuple(first)])}; accepted are 0 to "
                f"{num_experts - 1}, "
                f"and {num_experts} for a slot without an expert"
            )
    return index.clone(memory_format=torch.contiguous_format)


def _look_at_position(position: torch.Tensor) -> torch.Tensor:
    if position.numel() and not position.is_cuda:
        used = position[position >= 0].long()
        seen = torch.zeros(used.shape[0] + 1, dtype=torch.bool)
        seen[used.clamp(max=used.shape[0])] = True
        if position.min() < -1 or not seen[:-1].all():
            raise IndexError(
                f"position must be -1 or a row, and its {used.shape[0]} rows be 0 to "
                f"{used.shape[0] - 1}, "
                f"each once; got rows from {int(position.min())} to {int(position.max())}"
            )
    return position.clone(memory_format=torch.contiguous_format)


# Operators, so that torch.compile defers the check of values to run time, with a result that is
# used, so that they are not removed.
_checked_index = define(
    "checked_expert_index",
    _look_at_index,
    lambda index, num_experts: torch.empty_like(index, memory_format=torch.contiguous_format),
    plain=lambda index, num_experts: index.contiguous(),
)
checked_position = define(
    "checked_position",
    _look_at_position,
    lambda position: torch.empty_like(position, memory_format=torch.contiguous_format),
    plain=lambda position: position.contiguous(),
)
