"""Tensors that may be sharded (FSDP2): the whole of them, and this rank's shard."""

from __future__ import annotations

import torch


def is_sharded(t: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor  # here: it takes long to import

    return isinstance(t, DTensor)


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if is_sharded(t) else t


def local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if is_sharded(t) else t


def share(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's share of a tensor that every rank has."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def assign(t: torch.Tensor, full: torch.Tensor) -> None:
    (t.to_local() if is_sharded(t) else t).copy_(share(full.to(t.device), t))
