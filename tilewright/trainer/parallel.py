"""Process groups, and how a model is spread over them: alone, DDP, or FSDP2 with optional replication (HSDP)."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tilewright import platform
from tilewright.trainer.config import Config, Model, Train
from tilewright.trainer.model import Transformer


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks, in float64."""
        t = torch.tensor(values, dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(t)
        return t.tolist()


def init_distributed(train: Train) -> World:
    """Joins the group that torchrun describes (NCCL on CUDA, gloo on CPU), or makes a group of one.

    Raises ConfigError, before any communication, if the configured sizes do not make up that number of processes.
    """
    place = platform.launched()
    rank, size, local = place or (0, 1, 0)
    train.mesh(size)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local)
    # One process is a group too: FSDP2 and asynchronous checkpoints need one, and there is one path for all.
    alone = {"store": dist.HashStore()} if place is None else {}
    # The CPU backend beside NCCL carries asynchronous checkpoints.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", rank=rank, world_size=size, **alone)
    return World(rank, size, torch.device("cuda", local) if cuda else torch.device("cpu"))


def _mesh(train: Train, world: World):
    replicas, shards = train.mesh(world.size)
    if replicas == 1:
        return init_device_mesh(world.device.type, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(world.device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def parallelize(model: Transformer, config: Config, world: World) -> nn.Module:
    """Recomputation, compilation and data parallelism, in this order: each wraps what the one before it made."""
    train: Train = config.train
    if train.enable_gradient_checkpointing:
        model.recompute_activations(train.recompute_modules, train.enable_reentrant)
    if train.enable_compile:
        for block in model.model.layers:
            block.compile()
    if train.data_parallel_mode == "fsdp2":
        return _fsdp2(model, train, config.model, world)
    return model


def _fsdp2(model: Transformer, train: Train, names: Model, world: World) -> Transformer:
    mesh = _mesh(train, world)
    half = torch.bfloat16 if train.enable_mixed_precision else None
    reshard = train.reshard
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    options = {"mesh": mesh, "mp_policy": policy}
    extra, matched = set(names.basic_modules), set()
    for path, module in model.named_modules():
        hits = extra & {type(module).__name__, path.rpartition(".")[2]}
        if hits and any(True for _ in module.parameters()):
            matched |= hits
            fully_shard(module, reshard_after_forward=reshard, **options)
    if extra - matched:
        raise ValueError(f"model.basic_modules: no module is called {sorted(extra - matched)}")
    blocks = list(model.model.layers)
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    # The root's weights (embedding, head) are needed again at once, in the backward: keep them gathered.
    fully_shard(model, reshard_after_forward=False, **options)
    if train.enable_forward_prefetch:
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
    return model


def wrap_ddp(model: nn.Module, config: Config, world: World) -> nn.Module:
    """DDP needs real weights, so it comes after they are loaded."""
    if config.train.data_parallel_mode != "ddp" or world.size == 1:
        return model
    return DistributedDataParallel(model, device_ids=[world.device.index] if world.device.type == "cuda" else None)


def unwrap(model: nn.Module) -> Transformer:
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextlib.contextmanager
def synchronise(model: nn.Module, last: bool):
    """Gradients are averaged over ranks in the last micro-batch's backward only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
    elif isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield


def precision(config: Config, world: World):
    """FSDP2 casts by itself; the others keep float32 weights and run matrix products in bfloat16 by autocast."""
    wanted = config.train.enable_mixed_precision and config.train.data_parallel_mode != "fsdp2"
    return torch.autocast(world.device.type, torch.bfloat16, enabled=wanted)


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> float:
    """Scales gradients so that their global norm over all ranks is at most max_norm (0: only measures). Returns it."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_([p for p in parameters if p.grad is not None], max_norm, norm)
    return float(norm)
