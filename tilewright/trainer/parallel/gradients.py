"""The global norm of sharded gradients, and scaling them, in one pass."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tilewright.core.torch_names import scale_all_
from tilewright.trainer.parallel.mesh import Mesh


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
def global_norm(parameters: list[nn.Parameter], ranks: Mesh) -> torch.Tensor:
    """The norm of all gradients, float64, on their device. Every rank must call it.

    Ranks that hold the same shard of a gradient count it once: along its mesh those where it is
    replicated, and of a gradient that is no DTensor all that average it.
    """
    square, split = torch.zeros((), dtype=torch.float64), ranks.layout.pp > 1
    by_sharding = _by_sharding(parameters)
    split |= any(by_sharding)
    for key, gradients in by_sharding.items():
        own = torch.nn.utils.get_total_norm(gradients).double().square()
        if key:
            mesh, placements = key
            own = own / math.prod(
                mesh.size(i) for i, placement in enumerate(placements) if placement.is_replicate()
            )
        elif split:
            own = own / ranks.layout.averaged
        square = square.to(own.device) + own
    # A stage without a gradient has its sum on the CPU.
    return (ranks.params.total(square.to(ranks.device)) if split else square).sqrt()


@torch.no_grad()
def scale(parameters: list[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiplies all gradients by a number on their device."""
    for gradients in _by_sharding(parameters).values():
        scale_all_(gradients, factor.to(gradients[0].device, gradients[0].dtype))
