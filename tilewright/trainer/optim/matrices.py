"""Which of the model's own matrices a parameter merges or stacks, for optimizers that take each by
itself; those that Muon orthogonalizes, and in which shards.

A shard says nothing of the whole matrix's singular values, so matrices are gathered: each rank
gets K / ranks whole ones of K equal ones, computes those, and sends every rank its shard back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tilewright.core.torch_names import movable, parts_of_shard, strided_shard
from tilewright.nn import LoRALinear, SwiGLU
from tilewright.nn.lora_experts import LoRAExperts
from tilewright.nn.sharded import is_sharded
from tilewright.nn.weights import is_adapter
from tilewright.trainer.models.latent_attention import LatentAttention
from tilewright.trainer.models.layers import Attention
from tilewright.trainer.models.moe import Experts, Router
from tilewright.trainer.models.shared import dim_of


@dataclasses.dataclass(frozen=True)
class Parts:
    """How the rows of a merged projection belong to its parts.

    rows: rows of each part; () for a matrix that is not merged.
    blocks: the rows are this many blocks, each with an equal share of every part.
    stacked: the first dimension counts tensors of experts, each in these parts.
    """

    rows: tuple[int, ...] = ()
    blocks: int = 1
    stacked: bool = False

    def split(self, matrix: torch.Tensor) -> list[torch.Tensor]:
        """matrix: [..., rows, columns]."""
        if not self.rows:
            return [matrix]
        blocked = matrix.unflatten(-2, (self.blocks, -1))
        parts = blocked.split([n // self.blocks for n in self.rows], -2)
        return [part.flatten(-3, -2) for part in parts]

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if not self.rows:
            return parts[0]
        blocked = [part.unflatten(-2, (self.blocks, -1)) for part in parts]
        return torch.cat(blocked, -2).flatten(-3, -2)

    def own(self, t: torch.Tensor) -> list[torch.Tensor]:
        """Views of a whole parameter, or of what has its shape: the model's own tensors in it."""
        each = t.unbind() if self.stacked else [t]
        return [part for one in each for part in one.split(self.rows or len(one))]


def merged(model: nn.Module) -> dict[nn.Parameter, Parts]:
    """The trainable parameters that hold several of the model's own tensors: projections, their
    biases and adapters, and stacks of experts.
    """
    parts: dict[nn.Parameter, Parts] = {}
    for module in model.modules():
        own = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
        if isinstance(module, Experts | LoRAExperts):
            for name, p in own.items():
                rows = (p.shape[1] // 2,) * 2 if name.startswith("gate_up_proj") else ()
                parts[p] = Parts(rows, stacked=True)
        elif isinstance(module, LoRALinear) and len(module.slices) > 1:
            rows = tuple(end - start for start, end in module.slices.values())
            ranks = (module.rank,) * len(rows)
            parts |= {p: Parts(ranks if n == "lora_A" else rows) for n, p in own.items()}
        elif isinstance(module, Attention) and module.merge_qkv:
            parts |= {p: Parts(module.widths) for p in _trainable(module.qkv_proj)}
        elif isinstance(module, SwiGLU):
            parts |= {p: Parts((module.inner,) * 2) for p in _trainable(module.gate_up_proj)}
    return parts


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters of a projection. Those of an adapter are in parts of its own."""
    own = () if isinstance(module, LoRALinear) else module.parameters(recurse=False)
    return [p for p in own if p.requires_grad]


def matrices(model: nn.Module) -> dict[nn.Parameter, Parts]:
    """The trainable hidden matrices [rows, columns], and stacked experts' [E, rows, columns].

    Not among them: embeddings, the head, routers, norms, and adapters.
    """
    parts: dict[torch.Tensor, Parts] = {**merged(model)}
    wholes: dict[nn.Parameter, Parts] = {}
    heads = [getattr(model, name, None) for name in ("lm_head", "score")]
    for module in model.modules():
        if isinstance(module, LatentAttention):  # two projections, of one matrix in the model
            parts[module.kv_a_proj_with_mqa.weight] = Parts(module.kv_widths)
        elif isinstance(module, nn.Embedding | Router) or any(module is h for h in heads):
            continue
        for name, p in module.named_parameters(recurse=False):
            of_matrix = p.dim() in (2, 3) and not name.endswith("_bias")  # of experts
            if p.requires_grad and of_matrix and not is_adapter(name):
                wholes[p] = Parts()
    # A tied head's weight is the embedding's.
    return {p: parts.get(p, whole) for p, whole in wholes.items()}


def rows_here(t: torch.Tensor, dim: int) -> list[range]:
    """The runs of a dimension's numbers that this rank's shard has, in order. Computed on the host,
    from placements alone.
    """
    runs = [range(t.shape[dim])]
    if is_sharded(t):
        for i, at in enumerate(t.placements):
            if dim_of(at) == dim:
                ranks, rank = t.device_mesh.size(i), t.device_mesh.get_local_rank(i)
                runs = _shard_of(runs, parts_of_shard(at), ranks, rank)
    return runs


def _shard_of(runs: list[range], parts: int, ranks: int, rank: int) -> list[range]:
    """A rank's of several, of as many parts of these runs, each of which is sharded."""
    pieces, every = [], range(sum(map(len, runs)))
    for part in _chunk_sizes(every, parts):
        own = [*_chunk_sizes(part, ranks), *[range(0)] * ranks][rank]
        at = 0
        for run in runs:
            if piece := run[max(0, own.start - at) : max(0, own.stop - at)]:
                pieces.append(piece)
            at += len(run)
    return pieces


def _chunk_sizes(of: range, number: int) -> list[range]:
    """As `torch.chunk`."""
    size = -(-len(of) // number)
    return [of[i : i + size] for i in range(0, len(of), size)] if of else []


Compute = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def alike(matrices: Mapping[nn.Parameter, Parts]) -> list[list[nn.Parameter]]:
    """Parameters of one shape, one sharding and the same parts together."""
    groups: dict[tuple, list[nn.Parameter]] = {}
    for p, parts in matrices.items():
        key: tuple = (tuple(p.shape), parts)
        if isinstance(p, DTensor):
            key = (*key, p.device_mesh, p.placements)
        groups.setdefault(key, []).append(p)
    return list(groups.values())


def compute_whole(
    kinds: list[list[nn.Parameter]], shards: Mapping[nn.Parameter, torch.Tensor], compute: Compute
) -> None:
    """Replaces this rank's shards by those of the computed whole matrices, in place.

    kinds: from `alike`. Every rank must pass the same parameters in the same order.
    shards: the shard of each parameter, contiguous, in any dtype.
    compute: takes and returns a stack of whole matrices [..., rows, columns] per kind; some may be
        empty.
    """
    stacks = [_gathered([shards[p] for p in same], same[0]) for same in kinds]
    results = compute([stack.local for stack in stacks])
    for same, stack, result in zip(kinds, stacks, results, strict=True):
        for p, shard in zip(same, stack.sent_back(result), strict=True):
            shards[p].copy_(shard)


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Whole matrices on this rank, and the placements that they went through, the last one theirs.

    path: () if nothing was sharded.
    nested: dimensions of the mesh that shard rows or columns, if one of them shards blocks, as
        FSDP2 does over tensor parallelism of the same dimension, and tensor parallelism the parts
        of a merged projection.
    """

    local: torch.Tensor
    moved: DTensor | None = None
    path: tuple[tuple[Placement, ...], ...] = ()
    nested: tuple[int, ...] = ()

    def sent_back(self, result: torch.Tensor) -> torch.Tensor:
        if self.moved is None:
            return result
        mesh = self.moved.device_mesh
        if self.nested:  # whole on every rank, which keeps its own part
            for i in self.nested:
                at = self.path[0][i]
                blocks = parts_of_shard(at)
                # This rank's share of each block.
                cut = result.unflatten(dim_of(at), (blocks, mesh.size(i), -1))
                own = cut.select(dim_of(at) + 1, mesh.get_local_rank(i))
                result = own.flatten(dim_of(at), dim_of(at) + 1)
            return result
        whole = DTensor.from_local(
            result,
            mesh,
            self.moved.placements,
            run_check=False,
            shape=self.moved.shape,
            stride=self.moved.stride(),
        )
        for placements in reversed(self.path[:-1]):
            whole = whole.redistribute(placements=placements)
        return whole.to_local()


def _gathered(shards: list[torch.Tensor], like: nn.Parameter) -> _Stack:
    """Stacks K shards, and redistributes the stack from shards of all to K / ranks whole ones.

    Ranks with different experts of a stack keep them; replicas compute the same.
    """
    stack = torch.stack(shards)
    if not isinstance(like, DTensor):
        return _Stack(stack)
    placed = [_along_stack(placement) for placement in like.placements]
    # Dimensions of the mesh that shard rows or columns.
    split = [i for i, p in enumerate(placed) if dim_of(p) > like.dim() - 2]
    nested = any(type(placed[i]) is not Shard for i in split)
    path = [tuple(placed)]
    # Undone from the last to the first. Along the first one, ranks get different matrices.
    for i in reversed(split):
        placed[i] = Shard(0) if i == split[0] and not nested else Replicate()
        path.append(tuple(placed))
    path = [path[0], path[-1]] if nested else path
    shape = torch.Size((len(shards), *like.shape))
    whole = DTensor.from_local(
        stack,
        like.device_mesh,
        path[0],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    for placements in path[1:]:
        whole = movable(whole).redistribute(placements=placements)
    return _Stack(whole.to_local(), whole, tuple(path), tuple(split) if nested else ())


def _along_stack(placement: Placement) -> Placement:
    """The same sharding of a tensor behind one more dimension."""
    if dim_of(placement) < 0:
        return placement
    dim = dim_of(placement) + 1
    if type(placement) is Shard:
        return Shard(dim)
    return strided_shard(dim, parts_of_shard(placement))
