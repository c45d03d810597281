"""One named mesh of all ranks: its sizes, checked once, and the process groups by purpose.

A rank's number counts through the axes of LAYOUTS in their order, the last one fastest. Ours are

    pp, replicate, shard, ring, ulysses, tp

So the ranks of a tensor-parallel group are neighbors, then those that share a sequence (ring,
Ulysses). Experts have their own view of the ranks of a pipeline stage. Along any other axis ranks
have copies of the model that train apart (`layouts.Axis`): what is said of "all ranks" is then of
those of a copy where it is about parameters and gradients, else of all copies.

Purposes, and the ranks of each group:

    batch     ranks with the same batch rank read the same bins: the shards of one sequence, the
              shards of one matrix, and the stages
    loss      ranks whose losses are added: those with the same tp coordinate. Tensor-parallel
              ranks compute the same loss; only the last of the stages has one
    params    ranks that hold the model's parameters, shards and stages of them: all ranks. Norms
              of gradients are summed over them
    apart     the copies that train apart, by axis
    stage     ranks of the same pipeline stage: statistics of its layers are summed
    row       the ones among these that share a row of tokens (ring, ulysses, tp)
    tensor    ranks that shard matrices (tp);   pipeline: the stages of one model, in order
    experts   the ranks of a stage as (replicate, expert_shard, expert)
    control   all ranks, on gloo: agreement, barriers; its timeout allows for preparing data

Device meshes are slices of one mesh of all ranks, (apart, pp, replicate, shard, tp) without the
axes of size 1 except shard: FSDP2 takes (replicate, shard), and a parameter that is a DTensor on
tp becomes one on (replicate, shard, tp).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilewright.core import platform
from tilewright.core.registry import short
from tilewright.ops.attention.context_parallel import ContextParallel
from tilewright.trainer.field_tree import ConfigError
from tilewright.trainer.parallel import exchange
from tilewright.trainer.parallel.fields import Parallel
from tilewright.trainer.parallel.layouts import given_sizes
from tilewright.trainer.parallel.row import axes

# Along these ranks work on the same batch; along all others on their own.
SAME_BATCH = ("pp", "ring", "ulysses", "tp")
# A step's collectives wait for the slowest rank: a step and a checkpoint take minutes.
STEP_TIMEOUT = datetime.timedelta(minutes=30)
# Rank 0 downloads, tokenizes and packs while the others wait.
CONTROL_TIMEOUT = datetime.timedelta(hours=24)
# A checkpoint is written in parallel to training, to file systems that may be slow.
CHECKPOINT_TIMEOUT = datetime.timedelta(hours=2)
# Axes in the order (replicas ..., shards ...) of parameters.
_PARAMETER_ORDER = {
    "all": ("replicate", "shard", "ring", "ulysses"),
    "ulysses_only": ("replicate", "ring", "shard", "ulysses"),
    "ring_only": ("replicate", "ulysses", "shard", "ring"),
    "none": ("replicate", "ring", "ulysses", "shard"),
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and which of them shard parameters and experts.

    apart: sizes of the axes along which copies of the model train apart, unless they are 1.
    """

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    expert: int = 1
    cp_fsdp_mode: str = "all"
    ep_outside: bool = False
    apart: Mapping[str, int] = field(default_factory=dict)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes, in the order in which ranks count."""
        own = {name: getattr(self, name) for name in (*SAME_BATCH, "replicate", "shard")}
        known = {**self.apart, **own}
        return {axis.name: known.get(axis.name, 1) for axis, _ in axes()}

    @property
    def size(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def copies(self) -> int:
        """Number of copies of the model that train apart."""
        return math.prod(self.apart.values())

    @property
    def data(self) -> int:
        """Number of ranks, or groups of ranks that share a sequence, with their own batches."""
        return self.copies * self.replicate * self.shard

    @property
    def context(self) -> int:
        """Number of ranks that share a sequence."""
        return self.ring * self.ulysses

    @property
    def parameters(self) -> tuple[int, int]:
        """(replicas, shards) of parameters over which FSDP2 and DDP average gradients;
        `cp_fsdp_mode` assigns ring and Ulysses to them.
        """
        replicas, shards = self.replicate, self.shard
        for mode, size in (("ulysses_only", self.ulysses), ("ring_only", self.ring)):
            if self.cp_fsdp_mode in ("all", mode):
                shards *= size
            else:
                replicas *= size
        return replicas, shards

    def coordinates(self, rank: int) -> dict[str, int]:
        place = {}
        for axis, size in reversed(self.sizes.items()):
            rank, place[axis] = divmod(rank, size)
        return place

    def batch_rank(self, rank: int) -> int:
        """Which of the `data` streams of batches a rank reads."""
        place, number = self.coordinates(rank), 0
        for axis, size in self.sizes.items():
            if axis not in SAME_BATCH:
                number = number * size + place[axis]
        return number

    @property
    def averaged(self) -> int:
        """Number of ranks over which FSDP2 and DDP average gradients."""
        return math.prod(self.parameters)

    def along(self, *names: str) -> torch.Tensor:
        """[places along all other axes, *names]: all ranks."""
        sizes = self.sizes
        rest = [axis for axis in sizes if axis not in names]
        ranks = torch.arange(self.size).view(*sizes.values())
        ranks = ranks.permute([[*sizes].index(axis) for axis in (*rest, *names)])
        return ranks.reshape(-1, *(sizes[axis] for axis in names))

    def stages(self) -> torch.Tensor:
        """[copies, pp, replicas, shards, tp]: all ranks."""
        ranks = self.along("pp", *_PARAMETER_ORDER[self.cp_fsdp_mode], "tp")
        return ranks.reshape(-1, self.pp, *self.parameters, self.tp)

    def stages_of_experts(self) -> torch.Tensor:
        """[copies, pp, replicas, shards of an expert, ranks that share a layer's experts]: all
        ranks.

        Tensor-parallel ranks have tokens of their own in a layer with experts, so experts are
        sharded over them too. With ep_outside the shards of an expert are neighbors.
        """
        ranks, n = self.stages().flatten(3), self.expert
        if self.ep_outside:
            return ranks.unflatten(3, (n, -1)).transpose(3, 4)
        return ranks.unflatten(3, (-1, n))


def layout_of(train: Parallel, world_size: int) -> Layout:
    """The layout of a configuration. Raises ConfigError if its sizes do not multiply to
    world_size.
    """
    mode, given = train.data_parallel_mode, given_sizes(train)
    if small := [f"{name} = {n}: must be 1 or more" for name, n in given.values() if n < 1]:
        raise ConfigError(small)
    sizes = {axis: n for axis, (_, n) in given.items()}
    model = math.prod(sizes.values())  # ranks beside those of data parallelism
    data, rest = divmod(world_size, model)
    if rest:
        shown = ", ".join(f"{name} = {n}" for name, n in given.values() if n > 1)
        raise ConfigError([f"{shown}: {world_size} processes do not divide by {model}"])
    if mode == "none" and data > 1:
        trained = "one process" if model == 1 else f"{model} processes"
        raise ConfigError(
            [f"train.data_parallel_mode = none: trains {trained}, but {world_size} were started"]
        )
    known: dict[str, Any] = {axis: sizes.pop(axis) for axis in SAME_BATCH}
    apart = {axis: n for axis, n in sizes.items() if n > 1}
    if mode != "fsdp2":
        return Layout(**known, replicate=data, apart=apart)
    replicas, shards = train.data_parallel_replicate_size, train.data_parallel_shard_size
    if shards == -1:
        shards = data // max(1, replicas)
    if replicas == -1:
        replicas = data // max(1, shards)
    if replicas * shards != data:
        batch = math.prod(known.values())
        spread = f" of {batch} for each batch" if batch > 1 else ""
        spread += f" of {model // batch} copies" if model > batch else ""
        raise ConfigError(
            [
                f"train.data_parallel_shard_size = {train.data_parallel_shard_size}, "
                f"train.data_parallel_replicate_size = {train.data_parallel_replicate_size}: "
                f"do not make {world_size} processes{spread}"
            ]
        )
    layout = Layout(
        **known,
        replicate=replicas,
        shard=shards,
        apart=apart,
        expert=train.expert_parallel_size,
        cp_fsdp_mode=train.cp_fsdp_mode,
        ep_outside=train.ep_outside,
    )
    group = layout.parameters[1] * layout.tp
    if group % layout.expert:
        raise ConfigError(
            [
                f"train.expert_parallel_size = {layout.expert}: does not divide the "
                f"{group} processes of a shard group"
            ]
        )
    return layout


@dataclass(frozen=True)
class Group:
    """Ranks that communicate for one purpose. Without a process group it is one rank alone.

    device: where the group sums tensors.
    """

    group: dist.ProcessGroup | None = None
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def alone(self) -> bool:
        """Whether there is nobody to tell anything: torchrun makes a group of one rank, too."""
        return self.group is None or dist.get_world_size(self.group) == 1

    def total(self, t: torch.Tensor) -> torch.Tensor:
        """Sums t over the ranks, in place, and returns it."""
        if self.group is not None:
            dist.all_reduce(t, group=self.group)
        return t

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)

    def broadcast(self, value: Any) -> Any:
        """The first rank's value, which JSON can hold, on every rank of the group."""
        if self.alone:
            return json.loads(json.dumps(value))
        return exchange.broadcast(value, self.group)

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, which JSON can hold, in order, on every rank of the group."""
        if self.alone:
            return [json.loads(json.dumps(value))]
        return exchange.gather(value, self.group)

    def gather_tensors(self, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Each rank's tensors, on the CPU, in order, on the first rank of the group; [] on others.
        They travel as bytes.
        """
        own = [t.detach().cpu().contiguous() for t in tensors]
        if self.group is None:
            return [own]
        told = self.gather([(list(t.shape), short(t.dtype)) for t in own])
        sizes = [
            sum(math.prod(shape) * getattr(torch, name).itemsize for shape, name in about)
            for about in told
        ]
        sent = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if own:
            flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in own])
            sent[: len(flat)] = flat
        first = dist.get_rank(self.group) == 0
        parts = [torch.empty_like(sent) for _ in told] if first else None
        dist.gather(sent, parts, group=self.group, group_dst=0)
        return [_tensors(*of_rank) for of_rank in zip(parts or (), told, strict=first)]

    def agree(self, problem: BaseException | None) -> None:
        """Raises, on every rank, the first exception that any of them has; otherwise the others
        would wait for it forever. A rank raises its own as it is, another one's with its message.
        """
        told = self.gather(exchange.described(problem))
        first = next((i for i, one in enumerate(told) if one is not None), None)
        if first is None:
            return
        own = self.group is None or dist.get_rank(self.group) == first
        raise problem if own and problem is not None else exchange.raised(told[first])

    @contextlib.contextmanager
    def agreeing(self, *kinds: type[BaseException]) -> Iterator[None]:
        """Around what ranks do by themselves, none of which may communicate: agrees on the
        exception of these kinds that it raises.
        """
        problem = None
        try:
            yield
        except kinds as error:
            problem = error
        self.agree(problem)


def _tensors(flat: torch.Tensor, about: list[tuple[list[int], str]]) -> list[torch.Tensor]:
    """Tensors from their bytes, by their shapes and dtypes."""
    tensors, at = [], 0
    for shape, name in about:
        dtype = getattr(torch, name)
        end = at + math.prod(shape) * dtype.itemsize
        tensors.append(flat[at:end].clone().view(dtype).reshape(shape))
        at = end
    return tensors


@dataclass(frozen=True)
class Mesh:
    """This rank in the mesh, and its groups by purpose. `Mesh()` is one process without a group."""

    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    context: ContextParallel = field(default_factory=ContextParallel)
    loss: Group = field(default_factory=Group)
    params: Group = field(default_factory=Group)
    stage: Group = field(default_factory=Group)
    row: Group = field(default_factory=Group)
    pipeline: Group = field(default_factory=Group)
    control: Group = field(default_factory=Group)
    everyone: Group = field(default_factory=Group)
    apart: Mapping[str, Group] = field(default_factory=dict)
    shards: DeviceMesh | None = None  # of parameters: ([replicate,] shard)
    tensor: DeviceMesh | None = None  # (tp,); None if its size is 1
    experts: DeviceMesh | None = None  # ([replicate,] expert_shard, expert)

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def first_of_row(self) -> bool:
        """Whether it is the first of the ranks that share a row, which tells of its documents."""
        place = self.layout.coordinates(self.rank)
        return not any(place[axis] for axis in ("ring", "ulysses", "tp"))

    @property
    def batch_rank(self) -> int:
        return self.layout.batch_rank(self.rank)


def padding(multiple: int, cp: ContextParallel, tp: int = 1) -> int:
    """The multiple to which a micro-batch is padded.   multiple: pad_to_multiple_of.

    Each of the ranks that share a sequence has the same number of tokens, and each tensor-parallel
    rank the same number of those.
    """
    return math.lcm(multiple, cp.multiple * tp)


def join(train: Parallel) -> Mesh:
    """Joins the group that torchrun describes (NCCL on CUDA, gloo on CPU), or makes a group of one.

    Raises ConfigError, before any communication, if the configured sizes do not multiply to that
    number of processes.
    """
    launched = platform.launched()
    rank, size, local = launched or (0, 1, 0)
    layout_of(train, size)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local)
    # One process is a group too: FSDP2 and asynchronous checkpoints need one, and all runs take the
    # same path.
    alone: dict[str, Any] = {}
    if launched is None:
        exported: Any = dist  # torch does not list what it exports
        alone["store"] = exported.HashStore()
    # The CPU backend beside NCCL carries asynchronous checkpoints.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        rank=rank,
        world_size=size,
        timeout=STEP_TIMEOUT,
        **alone,
    )
    return build(train, rank, size, device_of(local))


def device_of(local: int) -> torch.device:
    """The device of a local rank."""
    return torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")


def build(
    train: Parallel, rank: int, size: int, device: torch.device, control_backend: str = "gloo"
) -> Mesh:
    """The mesh of an initialized process group. Every rank must call it."""
    layout = layout_of(train, size)
    everyone = Group(dist.group.WORLD, size, device)
    # A rank that is no member would get an int.
    control: Any = dist.new_group(backend=control_backend, timeout=CONTROL_TIMEOUT)
    shards = tensor = experts = None
    pipeline = Group()
    fsdp2 = train.data_parallel_mode == "fsdp2"
    if fsdp2 or layout.pp * layout.tp > 1:
        root = _device_mesh(device, layout.stages(), "shard", "tp")
        if fsdp2:
            shards = _slice(root, "replicate", "shard")
        if layout.tp > 1:
            tensor = root["tp"]
        if layout.pp > 1:
            pipeline = Group(root.get_group("pp"), layout.pp, device)
    # Beside tensor parallelism a rank has tokens of its own in every layer with experts.
    if fsdp2 and (layout.expert > 1 or layout.tp > 1):
        names = ("expert_shard", "expert")
        root = _device_mesh(device, layout.stages_of_experts(), *names)
        experts = _slice(root, "replicate", *names)
    return Mesh(
        layout,
        rank,
        device,
        context_parallel(layout, device),
        loss=_subgroup(everyone, layout.stages().flatten(0, 3).T),
        params=_subgroup(everyone, layout.stages().flatten(1)),
        stage=_subgroup(everyone, layout.along("pp").T),
        row=_row(layout, everyone),
        pipeline=pipeline,
        control=Group(control, size),
        everyone=everyone,
        apart={axis: _subgroup(everyone, layout.along(axis)) for axis in layout.apart},
        shards=shards,
        tensor=tensor,
        experts=experts,
    )


def context_parallel(layout: Layout, device: torch.device) -> ContextParallel:
    """The ranks with which this one shares sequences. Every rank must call it."""
    if layout.context == 1:
        return ContextParallel()
    names = ("ring", "ulysses", "tp")
    mesh = DeviceMesh(device.type, layout.along(*names), mesh_dim_names=("others", *names))
    return ContextParallel.of(mesh.get_group("ulysses"), mesh.get_group("ring"))


def _row(layout: Layout, everyone: Group) -> Group:
    """The ranks with which this one shares rows of tokens. Every rank must call it."""
    if layout.context * layout.tp == 1:
        return Group()
    return _subgroup(everyone, layout.along("ring", "ulysses", "tp").flatten(1))


def checkpoint_group() -> dist.ProcessGroup:
    """A group for the thread that writes checkpoints: in training's group their messages would
    interleave. Every rank must call it.
    """
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=CHECKPOINT_TIMEOUT))


def _device_mesh(device: torch.device, ranks: torch.Tensor, *names: str) -> DeviceMesh:
    """A mesh of ranks [copies, pp, replicas, *names], without the axes apart, pp, replicate and tp
    of size 1.
    """
    kept = {
        name: size
        for name, size in zip(("apart", "pp", "replicate", *names), ranks.shape, strict=True)
        if size > 1 or name not in ("apart", "pp", "replicate", "tp")
    }
    return DeviceMesh(device.type, ranks.reshape(tuple(kept.values())), mesh_dim_names=tuple(kept))


def _slice(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """This rank's part of a mesh along the axes that it has of these."""
    axes = mesh.mesh_dim_names or ()
    return mesh[tuple(name for name in names if name in axes)]


def _subgroup(everyone: Group, ranks: torch.Tensor) -> Group:
    """This rank's row of ranks [groups, size]. Every rank must call it."""
    if len(ranks) == 1:
        return everyone
    own: Any
    own, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    return Group(own, ranks.shape[1], everyone.device)
