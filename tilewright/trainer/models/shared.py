"""The ranks that compute a layer together, as a layer sees them: what it gathers and reduces."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from tilewright.core import torch_names

# Parameters that are no DTensors in any layout, and are not cast: a router's bias for the choice is
# no weight, and in bfloat16 it would choose other experts.
PLAIN = ("e_score_correction_bias",)


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that shard a layer's matrices. Tensors of each are [B, S, ...]. `TensorParallel()`
    is one rank alone, whose methods return their argument.
    """

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    name: str = ""
    sums: torch.dtype | None = None  # the dtype of sums over ranks; None: what is summed has it

    @property
    def heads(self) -> int:
        """Among how many ranks the heads are divided."""
        return self.size

    @property
    def part_of_heads(self) -> int:
        """Which of these parts this rank has."""
        return self.rank

    @classmethod
    def of(cls, mesh: DeviceMesh, sums: torch.dtype | None = None) -> TensorParallel:
        group = mesh.get_group()
        return cls(group, mesh.size(), mesh.get_local_rank(), group.group_name, sums)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' shards [B, S / size, ...] -> [B, S, ...]. The gradient on each rank is its
        part of a sum.
        """
        return x if self.size == 1 else _Gather.apply(x, self.size, self.name, None, self.sums)

    def gather_for_all(self, x: torch.Tensor) -> torch.Tensor:
        """`gather` for a computation that every rank repeats: each has the whole gradient."""
        if self.size == 1:
            return x
        return _Gather.apply(x, self.size, self.name, self.rank, self.sums)

    def own(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's part of a vector that every rank has whole."""
        return t if self.size == 1 else t.chunk(self.size)[self.rank]

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Sums [B, S, ...] over ranks -> this rank's shard [B, S / size, ...]."""
        return x if self.size == 1 else _ReduceScatter.apply(x, self.size, self.name, self.sums)

    def total(self, t: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, without a gradient."""
        return t if self.size == 1 else torch_names.all_reduce(t, self.name)


class RepeatedAttention(TensorParallel):
    """The tensor parallelism of attention that each rank computes whole."""

    @property
    def heads(self) -> int:
        return 1

    @property
    def part_of_heads(self) -> int:
        return 0

    def own(self, t: torch.Tensor) -> torch.Tensor:
        return t

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's shard of what is the same on each."""
        return x.chunk(self.size, 1)[self.rank]


class _Gather(torch.autograd.Function):
    """rank: None, or of one whose gradient is whole."""

    @staticmethod
    def forward(ctx, x, size, name, rank, sums):
        ctx.size, ctx.name, ctx.rank, ctx.sums = size, name, rank, sums
        return _all_gather(x, size, name)

    @staticmethod
    def backward(ctx, grad):
        if ctx.rank is None:
            return _reduce_scatter(grad, ctx.size, ctx.name, ctx.sums), None, None, None, None
        return grad.chunk(ctx.size, 1)[ctx.rank].contiguous(), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, size, name, sums):
        ctx.size, ctx.name = size, name
        return _reduce_scatter(x, size, name, sums)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather(grad, ctx.size, ctx.name), None, None, None


def _all_gather(x, size, name):
    """Collectives act on the first dimension. For one row, B = 1, nothing is copied."""
    parts = torch_names.all_gather(x.contiguous(), size, name).unflatten(0, (size, -1))
    return parts.transpose(0, 1).flatten(1, 2)


def _reduce_scatter(x, size, name, sums):
    parts = x.to(sums or x.dtype).unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1)
    return torch_names.reduce_scatter(parts.contiguous(), size, name).to(x.dtype)


def dim_of(placement: Placement) -> int:
    """The sharded dimension, or -1. `is_shard` is false where FSDP2 and tensor parallelism share
    one.
    """
    return getattr(placement, "dim", -1)
