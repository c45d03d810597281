"""The memory that a run will need, by rank and purpose, before any weight is made.

Two optimizer steps of the run's own code are taken on tensors without values (`memory_tracker.py`),
in a process group whose collectives do nothing: no weight and no activation is allocated, and the
layout may have more ranks than there are processes.

    python -m tilewright.trainer.train config.yaml --plan [--world N]
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tilewright.core import platform
from tilewright.core.registry import ImplementationUnavailable
from tilewright.core.torch_names import join_pretended_group
from tilewright.ops.moe.expert_transport import balanced_routing
from tilewright.trainer.build import (
    choose_ops,
    columns_of,
    compute_dtype,
    engine_around,
    reference,
    second_model,
    shape_of_run,
    unfilled,
)
from tilewright.trainer.columns import MISMATCHED
from tilewright.trainer.config import Config, ConfigError, Data, Train
from tilewright.trainer.data.batches import collate
from tilewright.trainer.data.columns.column import COLUMNS, Column
from tilewright.trainer.engine import Engine
from tilewright.trainer.losses.loss import Loss, loss_of
from tilewright.trainer.losses.preference_fields import kind_of_reference
from tilewright.trainer.memory_tracker import Tracker
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.optim.per_step import at_step
from tilewright.trainer.parallel.fields import Batching, Compute, Parallel
from tilewright.trainer.parallel.mesh import Layout, Mesh, build, layout_of, padding
from tilewright.trainer.parallel.offload import offload_activations
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.parallel.precision import resolved
from tilewright.trainer.parallel.row import LAYOUTS
from tilewright.trainer.parallel.stages import Stage, ranks_of_stages
from tilewright.trainer.reference import Reference

log = logging.getLogger("tilewright")
PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "head": "logits and loss head",
    "communication": "communication buffers",
    "temporary": "temporaries and inputs",
}


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """The most bytes that a rank needs at one time.

    peak: by part, in the order of PARTS; their sum is the largest of two steps.   whole: parts at
    their own largest.   saved: bytes of each layer that a micro-batch saves for backward.
    otherwise: the same if `train.enable_gradient_checkpointing` were the opposite, if asked for.
    """

    rank: int
    peak: dict[str, int]
    whole: dict[str, int]
    saved: dict[str, int]
    otherwise: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.peak.values())


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans the memory of a run in so many processes.   device: of each.

    Methods raise ConfigError or ValueError as the run would.
    """

    config: Config
    size: int
    device: torch.device

    @property
    def loss(self) -> Loss:
        train = self.config.train
        return loss_of(train.loss, dict(self.config), train.loss_args)

    @functools.cached_property
    def shape(self) -> ModelConfig:
        return shape_of_run(self.config.model, self.loss.head)

    def plan(self, rank: int, otherwise: bool = False) -> RankPlan:
        """Computed for full bins of one document each, and for tokens that are routed to all
        experts alike. Must not be called while a process group is initialized.
        """
        shape, train = self.shape, self.config.train
        layout_of(train, self.size)
        LAYOUTS.names()  # imports modules, some of which make tensors that are not the run's
        join_pretended_group(rank, self.size)
        try:
            with balanced_routing():
                mesh = build(train, rank, self.size, self.device, control_backend="fake")
                planned = self._measured(shape, train, mesh, steps=2)
                if not otherwise:
                    return planned
                recomputed = train.enable_gradient_checkpointing
                options = {"enable_gradient_checkpointing": not recomputed}
                options |= {"recompute_modules": None, "moe_checkpoint_method": None}
                other = train.model_copy(update={**options, "enable_reentrant": False})
                opposite = self._measured(shape, other, mesh, steps=0).saved
                return dataclasses.replace(planned, otherwise=opposite)
        finally:
            dist.destroy_process_group()

    def _measured(self, shape: ModelConfig, t: Train, mesh: Mesh, steps: int) -> RankPlan:
        """steps: see `_counted`."""
        c, loss = self.config, self.loss
        m, lora, p, kind = c.model, c.lora, c.preference, kind_of_reference(c)
        dropped = t.attention_dropout > 0
        ops = choose_ops(m, shape, mesh, compute_dtype(t), dropped, p.share_prefix)
        columns = columns_of(t, loss, shape, p.share_prefix)
        if kind == "precomputed":  # which is read, not computed
            columns["reference_logprob"] = COLUMNS["reference_logprob"]
        batch = full_batch(c.data, t.micro_batch_size, columns, mesh, loss.mismatched)
        # Compiled code saves less or as much; tracing it needs real tensors.
        eager = t.model_copy(update={"enable_compile": False, "enable_activation_offload": False})
        on = {"data": c.data, "train": eager, "mesh": mesh, "ops": ops}
        dtypes = resolved(c.precision, t, t)
        model = functools.partial(unfilled, **on, init_device=mesh.device, dtypes=dtypes)
        second = functools.partial(second_model, m, p, eager, shape, mesh, model)

        def made() -> Engine:
            parts = model(m, lora, shape)
            engine = engine_around(parts, eager, mesh, lora.lora_plus_scale)
            engine.reference = reference(kind, m, p, parts, second)
            if t.enable_activation_offload:
                limit = t.activation_gpu_limit * 1e9
                offload_activations(parts.model, limit, NoCopies(mesh.device))
            return engine

        return _counted(made, batch, loss, t, mesh, steps)

    def apart(self, rank: int, otherwise: bool = False) -> RankPlan:
        """`plan` in a process of its own: PyTorch caches device meshes by their ranks, and would
        use those of the plan, whose groups are gone, in the run or in another rank's plan.
        """
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as process:
            return process.submit(self.plan, rank, otherwise).result()

    def check(self, rank: int) -> None:
        """Raises ValueError if the plan of this rank does not fit into its device."""
        model, data, train = self.config.model, self.config.data, self.config.train
        if train.ignore_memory_plan:
            return
        layout_of(train, self.size)
        there, where = available(self.device)
        eager = model.attn_implementation == "eager"
        if most(train, data.sample_packing_sequence_len, eager, self.shape) < there:
            return
        try:
            needed = self.apart(rank)
        except (ConfigError, ImplementationUnavailable):
            raise
        except Exception as error:  # what is the run's own error it raises itself
            log.warning("no plan of memory could be made: %s: %s", type(error).__name__, error)
            return
        if needed.total > there:
            parts = ", ".join(f"{PARTS[k]} {gib(v)}" for k, v in needed.peak.items() if v)
            raise ValueError(
                f"rank {rank} needs {gib(needed.total)} ({parts}) and {where} {gib(there)}; use more "
                "processes, smaller bins or recomputation, or set train.ignore_memory_plan to true to "
                "start nevertheless"
            )

    def report(self) -> Iterator[str]:
        """The lines of `--plan`, for each pipeline rank of the first of its ranks: its shards are
        the largest, and the others' differ only by the remainder of what does not divide.
        """
        train = self.config.train
        layout = layout_of(train, self.size)
        axes = " x ".join(f"{n} {axis}" for axis, n in layout.sizes.items() if n > 1)
        experts = f", experts over {layout.expert}" if layout.expert > 1 else ""
        yield f"plan of memory, {axes or 'one process'}{experts}, on {self.device.type}"
        if layout.expert > 1:
            yield "for tokens routed evenly: a rank whose experts get more than their share needs more"
        planned = self.plan if layout.pp == 1 else self.apart
        for first in layout.stages()[0].flatten(1)[:, 0].tolist():
            yield ""
            yield from table(planned(first, otherwise=True), _whose(train, layout, first), train)
        there, where = available(self.device)
        yield ""
        yield f"{where} {gib(there)}"


def _counted(
    made: Callable[[], Engine],
    batch: dict[str, Any],
    loss: Loss,
    train: Train,
    mesh: Mesh,
    steps: int,
) -> RankPlan:
    """What an engine needs from when it is made.   batch: each micro-batch.   steps: optimizer
    steps; 0: one forward and backward pass.
    """
    tracker = Tracker(mesh.device)
    with tracker.watching():
        with tracker.owned_by("parameters"):
            engine = made()
        saved, models = _mark(engine.parts, tracker), [engine.model]
        if isinstance(engine.reference, Reference) and engine.reference.parts is not None:
            models.append(engine.reference.parts.model)
        stored = [t for model in models for t in (*model.parameters(), *model.buffers())]
        owners = tracker.own("parameters", stored)
        for step in range(max(1, steps)):
            for micro_batches in _calls(train, last=step == steps - 1):
                engine.forward_backward([batch] * micro_batches, loss)
            owners |= tracker.own(
                "gradients", [p.grad for p in engine.parameters if p.grad is not None]
            )
            if step < steps:
                with tracker.owned_by("temporary"):
                    engine.optim_step(max_norm=at_step(train.max_grad_norm, 0))
                states = [s for state in engine.optimizer.state.values() for s in state.values()]
                owners |= tracker.own("optimizer", [s for s in states if torch.is_tensor(s)])
    peak, whole = (_by_part(sizes) for sizes in tracker.peak(owners))
    # Gradients are views of DDP's buckets.
    if train.data_parallel_mode == "ddp" and mesh.params.size > 1:
        buckets = sum(p.numel() * p.element_size() for p in engine.parameters if p.requires_grad)
        for sizes in (peak, whole):
            sizes["gradients"] = max(sizes["gradients"], buckets)
    return RankPlan(mesh.rank, peak, whole, saved)


def _calls(train: Batching, last: bool) -> list[int]:
    """The micro-batches of each call of a step. last: the plan's last step, which needs the most
    memory.
    """
    n, ranks = train.gradient_accumulation_steps, train.pipeline_parallel_size
    if ranks > 1:  # several are under way at once, and a schedule has buffers for each
        return [n if last else min(n, ranks)]
    return [1] * min(2, n)  # one after the other: more are like the second


class NoCopies:
    """Offload to a host whose memory is not counted."""

    def __init__(self, device: torch.device):
        self.device = device

    def to_host(self, t: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(t, device="meta")

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(host, device=self.device)

    def wait(self) -> None:
        pass


def _by_part(sizes: Counter[str]) -> dict[str, int]:
    """Adds up layers."""
    parts = dict.fromkeys(PARTS, 0)
    for owner, size in sizes.items():
        parts[owner if owner in PARTS else "activations"] += size
    return parts


def full_batch(
    data: Data, bins: int, columns: Mapping[str, Column], mesh: Mesh, mismatched: bool
) -> dict[str, Any]:
    """This rank's micro-batch of full bins of one document each.   columns, mismatched: of the
    run's loss.
    """
    length = data.sample_packing_sequence_len
    columns = {name: c for name, c in columns.items() if c.batched}
    further = {name: c.filled(length) for name, c in columns.items()}
    tokens = (np.zeros(length, np.int64), np.zeros(length, np.int64))
    document = (*tokens, {**further, MISMATCHED: tokens})
    multiple = padding(data.pad_to_multiple_of, mesh.context, mesh.layout.tp)
    return collate([[document]] * bins, multiple, mesh.context, columns, mismatched=mismatched)


def _mark(parts: Parts, tracker: Tracker) -> dict[str, int]:
    """Tells the tracker which layer is running. Returns the bytes by layer that are there when the
    first forward pass of the model, or of each stage, has ended; filled by then.
    """
    saved: dict[str, int] = {}

    def enter(name):
        def hook(*_):
            tracker.phase = name

        return hook

    def leave(names):
        def hook(*_):
            if not saved.keys() & set(names):
                saved.update({k: v for k, v in tracker.live().items() if k in names and v})
            tracker.phase = "temporary"

        return hook

    for root in parts.roots:
        layers = _layers(root)
        # What a stage that is not the last adds to its layers is the message to the next one.
        after = "communication" if isinstance(root, Stage) and not root.last else "head"
        for name, module in layers.items():
            module.register_forward_pre_hook(enter(name), prepend=True)
            module.register_forward_hook(enter(after))
        root.register_forward_pre_hook(enter(after), prepend=True)
        root.register_forward_hook(leave(["head", *layers]))
    return saved


def _layers(root: nn.Module) -> dict[str, nn.Module]:
    """The embedding and the layers of a model or of a stage, by name."""
    if isinstance(root, Stage):
        embedding, numbers, layers = root.first, root.layer_numbers, root.layers
        stem: Any = root
    else:
        stem = cast(Transformer, root).model
        embedding, layers = True, stem.layers
        numbers = range(len(layers))
    embeddings = {"embed_tokens": stem.embed_tokens} if embedding else {}
    return embeddings | {f"layers.{i}": layer for i, layer in zip(numbers, layers, strict=True)}


# ---- what is there


def available(device: torch.device) -> tuple[int, str]:
    """Bytes that this process may allocate on its device, and where."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], f"{device} has free"
    return platform.available_memory() // platform.local_processes(), (
        "this machine has available for each process"
    )


def most(train: Batching, length: int, eager: bool, shape: ModelConfig) -> int:
    """A bound in bytes, several times what one process would need: smaller runs are not planned.

    length: a bin's, in tokens.   eager: whether attention keeps all its probabilities.
    """
    hidden, heads = shape.hidden_size, shape.num_attention_heads + shape.num_key_value_heads
    shared = shape.n_shared_experts or 0
    experts = shape.moe_intermediate_size * (shape.num_experts + shared)
    inner = 3 * hidden * max(shape.intermediate_size, experts)
    layer = 2 * hidden * heads * shape.head_dim + inner
    weights = shape.num_hidden_layers * layer + 2 * shape.vocab_size * hidden
    routed = shape.moe_intermediate_size * (shape.num_experts_per_tok + shared)
    row = 20 * hidden + 8 * max(shape.intermediate_size, routed) + 8 * heads * shape.head_dim
    if eager or shape.sliding_window is not None:
        row += 4 * shape.num_attention_heads * length
    tokens = train.micro_batch_size * length
    under_way = train.gradient_accumulation_steps if train.pipeline_parallel_size > 1 else 1
    saved = under_way * shape.num_hidden_layers * row
    values = 24 * weights + tokens * (saved + 4 * shape.vocab_size)
    return 4 * values + (64 << 20)


# ---- the report


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.2f} MiB"


def _whose(train: Parallel, layout: Layout, first: int) -> str:
    """The ranks that are alike, by the first of them, and their stages."""
    place = layout.coordinates(first)["pp"]
    alike = layout.along("pp")[:, place].tolist()
    number = len(alike)
    ranks = f"rank {first}" if number == 1 else f"ranks {first} to {first + number - 1}, each"
    if alike != [*range(first, first + number)]:  # of copies that train apart
        ranks = f"ranks {', '.join(map(str, alike))}, each"
    if layout.pp == 1:
        return ranks
    stages = [str(i) for i, rank in enumerate(ranks_of_stages(train)) if rank == place]
    return f"{ranks}, stage{'s' if stages[1:] else ''} {', '.join(stages)}"


def table(plan: RankPlan, ranks: str, train: Compute) -> Iterator[str]:
    yield f"{ranks:40}{'at the peak':>14}{'at most':>14}"
    for part, name in PARTS.items():
        yield f"  {name:38}{gib(plan.peak[part]):>14}{gib(plan.whole[part]):>14}"
    yield f"  {'sum':38}{gib(plan.total):>14}"
    on = train.enable_gradient_checkpointing
    yield f"{'  saved for backward by':40}{'recomputed':>14}{'kept':>14}"
    recomputed, kept = (plan.saved, plan.otherwise)[:: 1 if on else -1]
    for name in kept | recomputed:
        yield f"    {name:36}{gib(recomputed.get(name, 0)):>14}{gib(kept.get(name, 0)):>14}"
    sums = (gib(sum(each.values())) for each in (recomputed, kept))
    yield f"    {'sum':36}{next(sums):>14}{next(sums):>14}"
