"""The global norm of sharded gradients, and scaling them, in one pass."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tilewright._torch import scale_all_
from tilewright.trainer.mesh import Group


def _by_sharding(parameters: list[nn.Parameter]) -> dict[tuple, list[torch.Tensor]]:
    """This rank's shard of each gradient, by (mesh, placements), or () for a replicated one."""
    alike: dict[tuple, list[torch.Tensor]] = {}
    for p in parameters:
        if isinstance(p.grad, DTensor):
            key = (p.grad.device_mesh, p.grad.placements)
            alike.setdefault(key, []).append(p.grad.to_local())
        elif p.grad is not None:
            alike.setdefault((), []).append(p.grad)
    return alike


@torch.no_grad()
def global_norm(parameters: list[nn.Parameter], ranks: Group) -> torch.Tensor:
    """The norm of all gradients, float64, on their device. Every rank of `ranks` must call it.

    Ranks that hold the same shard of a gradient count it once.
    """
    square, sharded = torch.zeros((), dtype=torch.float64), False
    for key, gradients in _by_sharding(parameters).items():
        own = torch.nn.utils.get_total_norm(gradients).double().square()
        if key:
            sharded, (mesh, placements) = True, key
            own = own / math.prod(
                mesh.size(i) for i, placement in enumerate(placements) if placement.is_replicate()
            )
        square = square.to(own.device) + own
    return (ranks.total(square) if sharded else square).sqrt()


@torch.no_grad()
def scale(parameters: list[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiplies all gradients by a number on their device."""
    for gradients in _by_sharding(parameters).values():
        scale_all_(gradients, factor.to(gradients[0].device, gradients[0].dtype))
