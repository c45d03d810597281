"""Pipeline parallelism: the model's layers as stages on different ranks, run by a schedule of
torch.distributed.pipelining.

The micro-batches of a step are those of gradient accumulation. Every rank of a pipeline reads the
same ones, so that only hidden states travel forward and their gradients backward: documents and
positions are known everywhere. Between stages travels the residual stream, x + residual, [1, T, H].

A stage's weights keep their names in the whole model. Tied embeddings are held twice, on the first
stage and on the last; their gradients are added (see `Pipeline.sum_tied`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from tilewright.trainer.config import Train
from tilewright.trainer.loss import Loss
from tilewright.trainer.mesh import Mesh
from tilewright.trainer.model import Outcome, Transformer
from tilewright.trainer.pipeline_rules import too_few
from tilewright.trainer.positions import Sequence

SINGLE = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}  # one stage per rank
SEVERAL = {
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
}
# Of a batch, what positions are made of, and no loss reads.
_OF_SEQUENCE = ("position_ids", "cu_seqlens", "ends", "num_tokens")


def ranks_of_stages(train: Train) -> list[int]:
    """The pipeline rank of each stage: in turns, or there and back (a V)."""
    ranks = list(range(train.pipeline_parallel_size))
    if train.pipeline_parallel_schedule == "ZBVZeroBubble":
        return ranks + ranks[::-1]
    return ranks * train.virtual_pipeline_size


def split_layers(weights: list[int], ends: tuple[int, int], stages: int) -> list[int]:
    """The numbers of consecutive layers per stage, at least one each, with the least largest stage.

    weights: parameters of each layer.   ends: those of the embedding, and of norm and head.
    """
    before = list(itertools.accumulate(weights, initial=ends[0]))
    before[0] = 0
    before[-1] += ends[1]
    n = len(weights)
    # least[i]: of the first i layers on the stages so far, (largest stage, their numbers).
    least: list[tuple[int, list[int]] | None] = [(0, [])] + [None] * n
    for stage in range(1, stages + 1):
        least = [None] + [
            min(
                (max(done[0], before[i] - before[j]), [*done[1], i - j])
                for j in range(i)
                if (done := least[j]) is not None
            )
            if i >= stage
            else None
            for i in range(1, n + 1)
        ]
    assert least[n] is not None
    return least[n][1]


def layers_of_stages(model: Transformer, train: Train) -> list[range]:
    """The layers of each stage. Raises ValueError if they cannot be split as configured."""
    blocks, stages = list(model.model.layers), len(ranks_of_stages(train))
    if len(blocks) < stages:
        raise ValueError(
            f"train.pipeline_parallel_size = {train.pipeline_parallel_size}, "
            f"train.virtual_pipeline_size = {train.virtual_pipeline_size}: the model's "
            f"{len(blocks)} layers do not make {stages} stages"
        )
    sizes = train.pipeline_split
    if sizes is None:
        embedding = model.model.embed_tokens.weight.numel()
        # A tied head is a copy on the last stage, and costs as much time as one of its own.
        head = embedding + model.config.hidden_size
        sizes = split_layers([_size(block) for block in blocks], (embedding, head), stages)
    elif sum(sizes) != len(blocks):
        raise ValueError(
            f"train.pipeline_split = {sizes}: makes {sum(sizes)} layers, and the model has "
            f"{len(blocks)}"
        )
    return [range(end - n, end) for n, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class Stage(nn.Module):
    """Consecutive layers; on the first stage the embedding, on the last the norm, the head and the
    loss.

    Takes and returns hidden states [1, length, H], of which each micro-batch fills its part; the
    last stage returns the loss's sum. Micro-batches come from `queue`, in order: every schedule
    calls a stage with them in order.
    """

    def __init__(self, model: Transformer, layers: range, number: int, stages: int):
        super().__init__()
        self.number, self.layer_numbers = number, layers
        self.first, self.last = number == 0, number == stages - 1
        # In a tuple, not a submodule: the model's other weights are not this stage's.
        self.of = (model,)
        self.layers = nn.ModuleList(model.model.layers[i] for i in layers)
        if self.first or (self.last and model.config.tie_word_embeddings):
            self.embed_tokens = model.model.embed_tokens
        if self.last:
            self.norm, self.lm_head = model.model.norm, model.lm_head
        self.queue: Iterator[Mapping[str, Any]] = iter(())
        self.loss: Loss | None = None
        self.length: int | None = None  # None: as long as the micro-batch
        self.outcomes: list[Outcome] = []

    def start(self, batches: Iterable[Mapping[str, Any]], loss: Loss, length: int | None) -> None:
        self.queue, self.loss, self.length, self.outcomes = iter(batches), loss, length, []

    def forward(self, hidden: torch.Tensor | None = None) -> torch.Tensor:
        [model], batch = self.of, next(self.queue)
        ids, decoder = batch["input_ids"], model.model
        sequence = Sequence.of(
            ids,
            model.config,
            model.cp,
            **{name: batch.get(name) for name in ("position_ids", "cu_seqlens", "ends")},
        )
        T = ids.shape[1]
        x = decoder.embed(ids) if hidden is None else hidden
        if x.shape[1] > T:
            x = x[:, :T]
        x, residual, reports = decoder.through(self.layers, x, sequence)
        if self.last:
            seen = {name: t for name, t in batch.items() if name not in _OF_SEQUENCE}
            assert self.loss is not None
            outcome = model.outcome(decoder.norm(x, residual)[0], self.loss, seen)
            self.outcomes.append(outcome._replace(total=outcome.total.detach(), reports=reports))
            return outcome.total
        zero = torch.zeros((), device=x.device)
        self.outcomes.append(Outcome(zero, zero, None, reports))
        x = x + residual
        return (
            x if self.length is None or self.length == T else F.pad(x, (0, 0, 0, self.length - T))
        )


class _Link(PipelineStage):
    """A stage for torch's schedules, with shapes that are known."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Drops nothing: no shapes were tried out, and earlier calls have left gradients."""


class Pipeline:
    """This rank's stages of a model, which keeps only their weights."""

    def __init__(self, model: Transformer, train: Train, mesh: Mesh, longest: int):
        """longest: tokens of the longest micro-batch on a rank."""
        self.train, self.mesh, self.longest = train, mesh, longest
        self.dtype = torch.bfloat16 if train.enable_mixed_precision else torch.float32
        self.rank = mesh.layout.coordinates(mesh.rank)["pp"]
        self.ranks, parts = ranks_of_stages(train), layers_of_stages(model, train)
        config = model.config
        tied = config.tie_word_embeddings
        if tied and self.ranks[0] == self.ranks[-1]:
            raise ValueError(
                f"train.pipeline_parallel_schedule = {train.pipeline_parallel_schedule}: the first "
                "and the last stage are on one process, and the embedding and the head, which are "
                "tied, would be one parameter in two stages; use InterleavedZeroBubble"
            )
        self.stages = [
            Stage(model, parts[i], i, len(parts))
            for i, rank in enumerate(self.ranks)
            if rank == self.rank
        ]
        self.with_experts = [i for i in range(config.num_hidden_layers) if config.is_moe(i)]
        self.model, whole = model, _names(model)
        _keep(model, self.stages)
        self.elsewhere = whole - _names(model)  # names of modules that other ranks have
        self.holds_tied = tied and self.rank in (self.ranks[0], self.ranks[-1])
        self.ends = _ends(mesh) if tied else None
        self._schedule: Any = None
        self._made_for: tuple[int, int] | None = None

    # ---- training

    def forward_backward(self, batches: list[Mapping[str, Any]], loss: Loss) -> list[Outcome]:
        """Runs the schedule; gradients are averaged over the ranks of a stage at its end. Returns
        an outcome per micro-batch, in which the parts of other stages are zero.
        """
        length = self._length(batches)
        schedule = self._scheduled(len(batches), length)
        for stage in self.stages:
            stage.start(batches, loss, length)
        # The target counts micro-batches: the loss is the last stage's output already.
        target = {"target": torch.arange(len(batches))} if self._holds_last else {}
        schedule.step(return_outputs=False, **target)
        return self._outcomes()

    def _length(self, batches: list[Mapping[str, Any]]) -> int:
        """The length of the hidden states that travel: one for all micro-batches of a step."""
        lengths = [batch["input_ids"].shape[1] for batch in batches]
        if not self.train.pp_variable_seq_lengths:
            if max(lengths) > self.longest:
                raise ValueError(
                    f"train.pp_variable_seq_lengths = False: a micro-batch has {max(lengths)} "
                    f"tokens, more than the {self.longest} of full bins"
                )
            return self.longest
        # On the host: the device need not be waited for. A rank with other micro-batches than its
        # neighbors' would wait for them forever.
        seen = torch.tensor([len(lengths), max(lengths), sum(lengths)])
        most = torch.cat((seen, -seen))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.mesh.pipeline.group)
        if not torch.equal(most[:3], -most[3:]):
            raise ValueError("the stages of a pipeline must be given the same micro-batches")
        return max(lengths)

    @property
    def _holds_last(self) -> bool:
        return self.rank == self.ranks[-1]

    def _scheduled(self, micro_batches: int, length: int) -> Any:
        """The schedule for so many micro-batches; made anew when their number or length changes."""
        if self._made_for == (micro_batches, length):
            return self._schedule
        name, H = self.train.pipeline_parallel_schedule, self.model.config.hidden_size
        if problem := too_few(name, micro_batches, self.train.pipeline_parallel_size):
            raise ValueError(f"{micro_batches} micro-batches: {problem}")
        like = torch.empty(1, length, H, dtype=self.dtype, device="meta", requires_grad=True)
        total = torch.empty((), device="meta", requires_grad=True)
        links = [
            _Link(
                stage,
                stage.number,
                len(self.ranks),
                self.mesh.device,
                input_args=() if stage.first else (like,),
                output_args=(total,) if stage.last else (like,),
                group=self.mesh.pipeline.group,
            )
            for stage in self.stages
        ]
        options = {"loss_fn": lambda output, _: output, "scale_grads": False}
        self._schedule = None  # frees its buffers first
        if name in SINGLE:
            self._schedule = SINGLE[name](links[0], micro_batches, **options)
        else:
            self._schedule = SEVERAL[name](links, micro_batches, **options)
        self._made_for = (micro_batches, length)
        return self._schedule

    def _outcomes(self) -> list[Outcome]:
        """This rank's outcomes, the sums of its stages': a report has a row for each layer of the
        model with experts.
        """
        outcomes = []
        for parts in zip(*(stage.outcomes for stage in self.stages), strict=True):
            reports = None
            for stage, part in zip(self.stages, parts, strict=True):
                if part.reports is not None:
                    if reports is None:
                        rows = len(self.with_experts), part.reports.shape[1]
                        reports = part.reports.new_zeros(rows)
                    own = [
                        self.with_experts.index(i)
                        for i in stage.layer_numbers
                        if i in self.with_experts
                    ]
                    reports[own] = part.reports
            outcomes.append(parts[-1]._replace(reports=reports))
        for stage in self.stages:
            stage.outcomes = []
        return outcomes

    def sum_tied(self) -> None:
        """Adds the gradients of the two copies of a tied weight; both then have the same bits."""
        if self.holds_tied and (gradient := self.tied.grad) is not None:
            own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(own, group=self.ends)

    @property
    def tied(self) -> nn.Parameter:
        return self.model.model.embed_tokens.weight

    @property
    def copy(self) -> nn.Parameter | None:
        """The tied weight of the last stage, which counts and is written once, on the first."""
        return self.tied if self.holds_tied and self._holds_last else None

    # ---- evaluation

    def forward(self, batches: Iterable[Mapping[str, Any]], loss: Loss) -> list[Outcome]:
        """The outcomes without gradients: micro-batches follow each other through the stages."""
        outcomes, sent = [], []
        for batch in batches:
            hidden = None
            for stage in self.stages:
                stage.start([batch], loss, None)
                if not stage.first and self.ranks[stage.number - 1] != self.rank:
                    hidden = self._received(stage.number - 1, batch)
                hidden = stage(None if stage.first else hidden)
                if not stage.last and self.ranks[stage.number + 1] != self.rank:
                    for work, _ in sent:
                        work.wait()
                    to = self._peer(stage.number + 1)
                    group = self.mesh.pipeline.group
                    sent = [(dist.isend(hidden, group=group, group_dst=to), hidden)]
            outcomes += self._outcomes()
        for work, _ in sent:
            work.wait()
        for stage in self.stages:
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # as after a backward pass: checkpoints read the shards
        return outcomes

    def _peer(self, stage: int) -> int:
        return self.ranks[stage]

    def _received(self, stage: int, batch: Mapping[str, Any]) -> torch.Tensor:
        shape = 1, batch["input_ids"].shape[1], self.model.config.hidden_size
        hidden = torch.empty(shape, dtype=self.dtype, device=self.mesh.device)
        dist.recv(hidden, group=self.mesh.pipeline.group, group_src=self._peer(stage))
        return hidden


def _names(model: Transformer) -> set[str]:
    """What `basic_modules` may call modules: classes, and the last parts of paths."""
    return {
        name
        for path, module in model.named_modules()
        for name in (type(module).__name__, path.rpartition(".")[2])
    }


def _keep(model: Transformer, stages: list[Stage]) -> None:
    """Drops the weights of other stages; the others keep their names."""
    kept = {i for stage in stages for i in stage.layer_numbers}
    layers: Any = model.model.layers
    for i in range(model.config.num_hidden_layers):
        if i not in kept:
            delattr(layers, str(i))
    held = {name for stage in stages for name, _ in stage.named_children()}
    if "embed_tokens" not in held:
        model.model.embed_tokens = None
    if "lm_head" not in held:
        model.model.norm = model.lm_head = None


def _ends(mesh: Mesh) -> Any:
    """The group of this rank's first and last stage. Every rank must call it."""
    ranks = torch.arange(mesh.size).view(mesh.layout.pp, -1)[[0, -1]].T
    own, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    return own
