"""The global norm of sharded gradients, and scaling them, in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tilewright.core.torch_names import scale_all_
from tilewright.trainer.parallel.mesh import Mesh


def _by_sharding(tensors: Iterable[torch.Tensor]) -> dict[tuple, list[torch.Tensor]]:
    """This rank's shard of each tensor, by (mesh, placements), or () for a replicated one."""
    alike: dict[tuple, list[torch.Tensor]] = {}
    for t in tensors:
        if isinstance(t, DTensor):
            alike.setdefault((t.device_mesh, t.placements), []).append(t.to_local())
        else:
            alike.setdefault((), []).append(t)
    return alike


def _gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def is_split(tensors: Iterable[torch.Tensor], ranks: Mesh) -> bool:
    """Whether ranks hold different parts of a model with these parameters or gradients."""
    return ranks.layout.pp > 1 or any(isinstance(t, DTensor) for t in tensors)


@torch.no_grad()
def own_square(tensors: Iterable[torch.Tensor], ranks: Mesh, split: bool) -> torch.Tensor:
    """The sum of squares of tensors, float64, on their device; if `split` this rank's part, and the
    parts of all ranks add up to it.

    Ranks that hold the same shard count it once: along its mesh those where it is replicated, and
    of a tensor that is no DTensor all that average its gradient.
    """
    square = torch.zeros((), dtype=torch.float64)
    for key, alike in _by_sharding(tensors).items():
        own = torch.nn.utils.get_total_norm(alike).double().square()
        if key:
            mesh, placements = key
            own = own / math.prod(
                mesh.size(i) for i, placement in enumerate(placements) if placement.is_replicate()
            )
        elif split:
            own = own / ranks.layout.averaged
        square = square.to(own.device) + own
    return square


@torch.no_grad()
def global_norm(parameters: list[nn.Parameter], ranks: Mesh) -> torch.Tensor:
    """The norm of all gradients, float64, on their device. Every rank must call it."""
    gradients = _gradients(parameters)
    split = is_split(gradients, ranks)
    square = own_square(gradients, ranks, split)
    # A stage without a gradient has its sum on the CPU.
    return (ranks.params.total(square.to(ranks.device)) if split else square).sqrt()


@torch.no_grad()
def scale(parameters: list[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiplies all gradients by a number on their device."""
    for gradients in _by_sharding(_gradients(parameters)).values():
        scale_all_(gradients, factor.to(gradients[0].device, gradients[0].dtype))
