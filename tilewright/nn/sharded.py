"""Helpers for tensors that may be sharded (FSDP2): gather them, or take this rank's shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch

from tilewright.core.torch_names import movable

if TYPE_CHECKING:  # slow to import
    from torch.distributed.tensor import DTensor


def is_sharded(t: torch.Tensor) -> TypeGuard[DTensor]:
    from torch.distributed.tensor import DTensor

    return isinstance(t, DTensor)


def whole(t: torch.Tensor) -> torch.Tensor:
    """The full tensor, on every rank; every rank must call it."""
    return movable(t).full_tensor() if is_sharded(t) else t


def shard(t: torch.Tensor) -> torch.Tensor:
    """This rank's shard, or the tensor itself, sharing its memory; without a gradient."""
    return (t.to_local() if is_sharded(t) else t).detach()


def local(t: torch.Tensor) -> torch.Tensor:
    """This rank's shard, sharing its memory, for computation with this rank's part of the data.

    So the gradient of a replicated tensor is a sum over ranks, of which each computes a part.
    """
    if type(t) in (torch.Tensor, torch.nn.Parameter) or not is_sharded(t):
        return t
    from torch.distributed.tensor import Partial

    return t.to_local(
        grad_placements=[Partial() if at.is_replicate() else at for at in t.placements]
    )


def share(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a full tensor (the same on every rank), sharded as `like` is."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def assign(t: torch.Tensor, full: torch.Tensor) -> None:
    """Copies a full tensor (the same on every rank) into one that may be sharded."""
    local(t).copy_(share(full.to(t.device), t))
