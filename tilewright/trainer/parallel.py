"""Process groups, and how a model is spread over them: alone, DDP, or FSDP2 with optional
replication (HSDP), experts over some of the processes that shard the rest, and sequences over a
ring, Ulysses ranks, or both.

Rank = ((replica * shards + shard) * ring size + ring rank) * Ulysses size + Ulysses rank: ranks of
one sequence are neighbours, those of one Ulysses group the nearest.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from tilewright import _torch, platform
from tilewright.nn.lora_experts import LoRAExperts
from tilewright.ops.context_parallel import ContextParallel
from tilewright.ops.expert_parallel import DeepEP
from tilewright.trainer.config import Config, Model, Train
from tilewright.trainer.model import Experts, MoE, Transformer

log = logging.getLogger("tilewright")


@dataclass(frozen=True)
class World:
    """This process among the others.   cp: those with which it shares each sequence."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    cp: ContextParallel = field(default_factory=ContextParallel)

    @property
    def data_rank(self) -> int:
        """Among ranks that read different batches."""
        return self.rank // self.cp.size

    @property
    def data_size(self) -> int:
        return self.size // self.cp.size

    @property
    def main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def agree(self, problem: Exception | None) -> None:
        """Raises on every rank what the first that has a problem gives here: the others would
        wait for it for ever.
        """
        found = [problem] * self.size
        if dist.is_initialized():
            dist.all_gather_object(found, problem)
        for one in found:
            if one is not None:
                raise one

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks, in float64."""
        return self.total(torch.tensor(values, dtype=torch.float64, device=self.device)).tolist()

    def total(self, t: torch.Tensor) -> torch.Tensor:
        """t, which becomes its sum over all ranks."""
        if dist.is_initialized():
            dist.all_reduce(t)
        return t


def init_distributed(train: Train) -> World:
    """Joins the group that torchrun describes (NCCL on CUDA, gloo on CPU), or makes a group of one.

    Raises ConfigError, before any communication, if the configured sizes do not make up that number
    of processes.
    """
    place = platform.launched()
    rank, size, local = place or (0, 1, 0)
    train.mesh(size)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local)
    # One process is a group too: FSDP2 and asynchronous checkpoints need one, and there is one path
    # for all.
    alone = {"store": dist.HashStore()} if place is None else {}
    # The CPU backend beside NCCL carries asynchronous checkpoints.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", rank=rank, world_size=size, **alone
    )
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    return World(rank, size, device, context_parallel(train, size, device.type))


def context_parallel(train: Train, size: int, device_type: str) -> ContextParallel:
    """With which of `size` ranks this one shares sequences. Every rank must call it."""
    ring, ulysses = train.ringattn_parallel_size, train.ulysses_parallel_size
    if ring * ulysses == 1:
        return ContextParallel()
    mesh = init_device_mesh(
        device_type,
        (size // (ring * ulysses), ring, ulysses),
        mesh_dim_names=("data", "ring", "ulysses"),
    )
    return ContextParallel.of(mesh.get_group("ulysses"), mesh.get_group("ring"))


def _ranks(train: Train, world: World) -> torch.Tensor:
    """[replicas, shards] as FSDP2 sees them: `cp_fsdp_mode` says what a ring and Ulysses ranks
    are.
    """
    order = {
        "all": (0, 1, 2, 3),
        "ulysses_only": (0, 2, 1, 3),
        "ring_only": (0, 3, 1, 2),
        "none": (0, 2, 3, 1),
    }
    ranks = torch.arange(world.size).view(
        *train.data_mesh(world.size), train.ringattn_parallel_size, train.ulysses_parallel_size
    )
    return ranks.permute(order[train.cp_fsdp_mode]).reshape(train.mesh(world.size))


def _mesh(train: Train, world: World) -> DeviceMesh:
    ranks = _ranks(train, world)
    if len(ranks) == 1:
        return DeviceMesh(world.device.type, ranks[0], mesh_dim_names=("shard",))
    return DeviceMesh(world.device.type, ranks, mesh_dim_names=("replicate", "shard"))


def parallelize(model: Transformer, config: Config, world: World) -> nn.Module:
    """Context parallelism, recomputation, compilation and data parallelism, in this order: each
    wraps what the one before it made.
    """
    train: Train = config.train
    if world.cp.size > 1:
        model.spread_sequence(world.cp)
    if train.enable_gradient_checkpointing:
        model.recompute_activations(
            train.recompute_modules,
            train.enable_reentrant,
            train.moe_checkpoint_method == "moe_act",
        )
    if train.enable_compile:
        _compile(model, config)
    if train.data_parallel_mode == "fsdp2":
        return _fsdp2(model, train, config.model, world)
    return model


def _compile(model: Transformer, config: Config) -> None:
    """Whole layers, each one graph, or, where attention or experts cannot be part of one, what
    surrounds them.

    Inside what is recomputed: a graph break within a checkpointed function would leave all of it
    uncompiled.
    """
    names = {
        name
        for path, module in model.model.layers[0].named_modules()
        if path
        for name in (path.rpartition(".")[2], type(module).__name__)
    }
    if inside := names & {*config.model.basic_modules}:
        raise ValueError(
            f"model.basic_modules, train.enable_compile = True: {', '.join(sorted(inside))} would "
            f"be "
            "gathered in the midst of a layer's compiled code; leave one of them out"
        )
    made: dict[tuple[type, str], Compiled] = {}
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        # Tokens that travel wait for other ranks, and experts that are recomputed alone have a
        # checkpoint of their own.
        apart = isinstance(mlp, MoE) and (
            config.train.expert_parallel_size > 1 or mlp.experts.recompute
        )
        if attention.breaks or apart or block.recompute not in ((), ("_layer",)):
            parts = [
                (block.input_layernorm, "forward"),
                (attention, "project"),
                (attention, "output"),
                (block.post_attention_layernorm, "forward"),
                *([] if apart else [(mlp, "forward")]),
            ]
        else:
            parts = [(block, "_layer")]
        for module, name in parts:
            kind = (type(mlp if module is block else module), name)
            if kind not in made:
                made[kind] = Compiled(getattr(type(module), name))
            setattr(module, name, functools.partial(made[kind], module))


class Compiled:
    """A method that is compiled for all modules of a kind together.

    What dynamo makes of a function it keeps with the function's code, up to a limit for all that
    share it: this one has a copy of the code to itself.
    """

    def __init__(self, method: Callable):
        self.name, code = method.__qualname__, method.__code__.replace()
        self.plain = types.FunctionType(
            code, method.__globals__, method.__name__, method.__defaults__, method.__closure__
        )
        self.run = torch.compile(self.plain, fullgraph=True)

    def __call__(self, *args: Any) -> Any:
        dynamo = _torch.dynamo()
        for t in args:  # no two batches have the same length: a size that code is made for at once
            if torch.is_tensor(
                t
            ):  # x [B, S, H], cos [S, D], attended [B, heads, S, D]; position_ids [B, S]
                dynamo.maybe_mark_dynamic(t, t.dim() - (2 if t.is_floating_point() else 1))
        try:
            return self.run(*args)
        except dynamo.exc.FailOnRecompileLimitHit as error:
            log.warning(
                "train.enable_compile: %s has been compiled %d times and runs uncompiled from "
                "here on; "
                "TORCH_LOGS=recompiles says why",
                self.name,
                dynamo.config.recompile_limit,
            )
            log.debug("", exc_info=error)
            self.run = self.plain
        except dynamo.exc.Unsupported as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"train.enable_compile = True: {self.name} cannot be compiled: {reason}"
            ) from error
        return self.run(*args)


def compiled_parts(model: Transformer) -> dict[str, int]:
    """Which methods are compiled, and of how many modules."""
    return dict(
        Counter(
            value.func.name
            for module in model.model.layers.modules()
            for value in vars(module).values()
            if isinstance(value, functools.partial) and isinstance(value.func, Compiled)
        )
    )


def _expert_mesh(train: Train, world: World) -> DeviceMesh:
    """(replicas,) shards of an expert, ranks that share a layer's experts. With ep_outside,
    shards are neighbours.
    """
    ranks, n = _ranks(train, world), train.expert_parallel_size
    replicas, shards = ranks.shape
    ranks = (
        ranks.view(replicas, n, shards // n).transpose(1, 2)
        if train.ep_outside
        else ranks.view(replicas, shards // n, n)
    )
    names = ("replicate", "expert_shard", "expert")
    return (
        DeviceMesh(world.device.type, ranks[0], mesh_dim_names=names[1:])
        if replicas == 1
        else DeviceMesh(world.device.type, ranks, mesh_dim_names=names)
    )


def _spread(
    experts: Experts | LoRAExperts,
    mesh: DeviceMesh,
    names: Model,
    world: World,
    reshard: bool,
    policy: MixedPrecisionPolicy,
) -> None:
    """This rank's experts of a layer, built on meta: whole experts along the mesh's last dimension,
    and FSDP2 over the others, along rows, so that an expert's shards need not be a whole number of
    experts.
    """
    own = mesh["expert"]
    for name, p in list(experts.named_parameters()):
        E, rows = p.shape[:2]
        for what, size, parts in (
            ("experts", E, own.size()),
            (f"rows of {name}", rows, mesh["expert_shard"].size()),
        ):
            if size % parts:
                raise ValueError(
                    f"train.expert_parallel_size = {own.size()}: {size} {what} do not divide by "
                    f"{parts}"
                )
        local = torch.empty(E // own.size(), *p.shape[1:], dtype=p.dtype, device=p.device)
        experts.register_parameter(
            name,
            nn.Parameter(
                DTensor.from_local(local, own, [Shard(0)], run_check=False), p.requires_grad
            ),
        )
    experts.spread(
        own.get_group(),
        names.ep_dispatch,
        DeepEP(names.deepep_buffer_size_gb, names.deepep_num_sms),
    )
    fully_shard(
        experts,
        mesh=mesh[mesh.mesh_dim_names[:-1]],
        reshard_after_forward=reshard,
        mp_policy=policy,
        shard_placement_fn=lambda p: Shard(1),
    )
    # An expert's gradient is already summed over the ranks whose tokens came to it. Dividing by all
    # ranks, as for every other parameter, makes it the average over ranks too.
    experts.set_gradient_divide_factor(float(world.size))
    # gloo cannot divide while it sums, so FSDP2 has to divide afterwards; of a shard group of one
    # it always does, and being told to would divide twice.
    if world.device.type == "cpu" and mesh["expert_shard"].size() > 1:
        experts.set_force_sum_reduction_for_comms(True)


def _fsdp2(model: Transformer, train: Train, names: Model, world: World) -> Transformer:
    mesh = _mesh(train, world)
    half = torch.bfloat16 if train.enable_mixed_precision else None
    reshard = train.reshard
    # Activations have the weights' dtype from the embedding on. What comes beside them is float32
    # and stays so: cos and sin, the weights of the routing, the number of tokens that the loss is
    # divided by.
    policy = MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=torch.float32 if half else None, cast_forward_inputs=False
    )
    options = {"mesh": mesh, "mp_policy": policy}
    blocks, spread = list(model.model.layers), []
    if train.expert_parallel_size > 1:
        spread = [block.mlp.experts for block in blocks if isinstance(block.mlp, MoE)]
        if not spread:
            raise ValueError(
                f"train.expert_parallel_size = {train.expert_parallel_size}: the model has no "
                f"experts"
            )
        experts_mesh = _expert_mesh(train, world)
        for experts in spread:
            _spread(experts, experts_mesh, names, world, reshard, policy)
    extra, matched = set(names.basic_modules), set()
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        hits = extra & {type(module).__name__, last}
        if hits and (last == "lm_head" or (last in ("q_norm", "k_norm") and names.merge_qkv)):
            raise ValueError(
                f"model.basic_modules: {path} ({', '.join(sorted(hits))}) cannot be a unit of its "
                f"own: "
                "another module's kernel reads its weight"
            )
        if hits and any(True for _ in module.parameters()):
            matched |= hits
            if isinstance(module, FSDPModule):  # experts are units of their own already
                continue
            fully_shard(module, reshard_after_forward=reshard, **options)
    if extra - matched:
        raise ValueError(f"model.basic_modules: no module is called {sorted(extra - matched)}")
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    # The root's weights (embedding, head) are needed again at once, in the backward: keep them
    # gathered.
    fully_shard(model, reshard_after_forward=False, **options)
    if train.enable_forward_prefetch:
        for block, following in itertools.zip_longest(blocks, blocks[1:]):
            own = (
                [block.mlp.experts]
                if isinstance(block.mlp, MoE) and block.mlp.experts in spread
                else []
            )
            if ahead := [*own, *([] if following is None else [following])]:
                block.set_modules_to_forward_prefetch(ahead)
    return model


def wrap_ddp(model: nn.Module, config: Config, world: World) -> nn.Module:
    """DDP needs real weights, so it comes after they are loaded."""
    if config.train.data_parallel_mode != "ddp" or world.size == 1:
        return model
    # The buffers are frozen weights, the same everywhere.
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        broadcast_buffers=False,
    )


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
    """FSDP2 casts by itself; the others keep float32 weights and run matrix products in
    bfloat16 by autocast.
    """
    wanted = config.train.enable_mixed_precision and config.train.data_parallel_mode != "fsdp2"
    return torch.autocast(world.device.type, torch.bfloat16, enabled=wanted)


@torch.no_grad()
def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> float:
    """Scales gradients so that their global norm over all ranks is at most max_norm (0: only
    measures). Returns it.
    """
    alike: dict[
        tuple, list[nn.Parameter]
    ] = {}  # gradients that are spread in the same way, or not at all
    for p in parameters:
        if p.grad is not None:
            kind = (p.grad.device_mesh, p.grad.placements) if isinstance(p.grad, DTensor) else ()
            alike.setdefault(kind, []).append(p)
    square, spread = torch.zeros((), dtype=torch.float64), False
    for kind, group in alike.items():
        own = (
            torch.nn.utils.get_total_norm([p.grad.to_local() if kind else p.grad for p in group])
            .double()
            .square()
        )
        # every mesh is of all ranks; those that hold the same share of a gradient count it together
        # once
        if kind:
            spread, (mesh, placements) = True, kind
            own = own / math.prod(
                mesh.size(i) for i, placement in enumerate(placements) if placement.is_replicate()
            )
        square = square.to(own.device) + own
    if spread:
        dist.all_reduce(square)
    norm = square.sqrt().float()
    if max_norm > 0:
        for group in alike.values():
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return float(norm)
