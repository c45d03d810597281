"""Pipeline parallelism: the model's layers as stages on different ranks, run by a schedule of
torch.distributed.pipelining.

The micro-batches of a step are those of gradient accumulation. Every rank of a pipeline reads the
same ones, so that only hidden states travel forward and their gradients backward: documents and
positions are known everywhere. Between stages travels the residual stream, x + residual, [1, T, H].

A stage's weights keep their names in the whole model. Tied embeddings are held twice, on the first
stage and on the last; their gradients are added (see `Pipeline.sum_copies`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from tilewright.core.registry import short
from tilewright.core.torch_names import known_stage
from tilewright.nn.lora import LoRALinear
from tilewright.nn.sharded import shard, whole
from tilewright.nn.weights import adapted
from tilewright.trainer.models.head import LossFunction
from tilewright.trainer.models.model import Outcome, Transformer
from tilewright.trainer.parallel import exchange
from tilewright.trainer.parallel.fields import Batching, Compute, Width, too_few
from tilewright.trainer.parallel.mesh import Mesh, padding
from tilewright.trainer.parallel.parts import Parts, Weights
from tilewright.trainer.parallel.row import LAYOUTS, Axis, Layout
from tilewright.trainer.parallel.stages import (
    Stage,
    keep,
    layers_of_stages,
    length_of_hidden,
    ranks_of_stages,
)

SINGLE = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}  # one stage per rank
SEVERAL = {
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
}


def make_schedule(train: Compute, stages: list[PipelineStage], micro_batches: int) -> Any:
    """A rank's schedule. The last stage's output is the loss."""
    name = train.pipeline_parallel_schedule
    options = {"loss_fn": lambda output, _: output, "scale_grads": False}
    if name in SEVERAL:
        return SEVERAL[name](stages, micro_batches, **options)
    return SINGLE[name](stages[0], micro_batches, **options)


class Pipeline(Parts):
    """This rank's stages of a model, which keeps only their weights."""

    def __init__(self, model: Transformer, train: Compute, mesh: Mesh, longest: int):
        """longest: tokens of the longest micro-batch on a rank."""
        super().__init__(model)
        self.train, self.mesh, self.longest = train, mesh, longest
        self.dtype = torch.bfloat16 if train.enable_mixed_precision else torch.float32
        self.rank = mesh.layout.coordinates(mesh.rank)["pp"]
        self.ranks, parts = ranks_of_stages(train), layers_of_stages(model, train)
        config = model.config
        tied = config.tied
        if tied and self.ranks[0] == self.ranks[-1]:
            raise ValueError(
                f"train.pipeline_parallel_schedule = {train.pipeline_parallel_schedule}: the first "
                "and the last stage are on one process, and the embedding and the head, which are "
                "tied, would be one parameter in two stages; use InterleavedZeroBubble"
            )
        self.stages = [
            Stage(model, parts[i], i, len(parts), mesh.layout.tp)
            for i, rank in enumerate(self.ranks)
            if rank == self.rank
        ]
        self.with_experts = [i for i in range(config.num_hidden_layers) if config.is_moe(i)]
        # On meta: the names, shapes and order of what other ranks have.
        self.whole = copy.deepcopy(model)
        self.roots = [*self.stages]
        keep(model, self.stages)
        self.holds_tied = tied and self.rank in (self.ranks[0], self.ranks[-1])
        self.ends = _ends(mesh) if tied else None
        self._schedule: Any = None
        self._made_for: tuple[int, int] | None = None

    # ---- training

    def forward_backward(
        self, batches: Sequence[Mapping[str, Any]], loss: LossFunction
    ) -> list[Outcome]:
        """Runs the schedule; gradients are averaged over the ranks of a stage at its end. Returns
        an outcome per micro-batch, in which the parts of other stages are zero.
        """
        lengths = [batch["input_ids"].shape[1] for batch in batches]
        length = length_of_hidden(self.train, lengths, self.longest)
        if self.train.pp_variable_seq_lengths:
            self._agree(lengths)
        length = math.ceil(length / self.mesh.layout.tp)
        schedule = self._scheduled(len(batches), length)
        moved = [self.moved(batch) for batch in batches]
        for stage in self.stages:
            stage.start(moved, loss, length)
        # The target counts micro-batches: the loss is the last stage's output already.
        target = {"target": torch.arange(len(batches))} if self._holds_last else {}
        try:
            schedule.step(return_outputs=False, **target)
        except RuntimeError as error:  # torch's, around those of the model
            if isinstance(error.__cause__, ValueError):
                raise error.__cause__ from None
            raise
        return self._outcomes()

    def _agree(self, lengths: list[int]) -> None:
        """Raises ValueError if the ranks of the pipeline have other micro-batches, for which they
        would wait forever. On the host: the device need not be waited for.
        """
        seen = torch.tensor([len(lengths), max(lengths), sum(lengths)])
        most = torch.cat((seen, -seen))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.mesh.pipeline.group)
        if not torch.equal(most[:3], -most[3:]):
            raise ValueError("the stages of a pipeline must be given the same micro-batches")

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
        link = known_stage()
        links = [
            link(
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
        self._schedule = self._made_for = None  # frees its buffers first
        self._schedule = make_schedule(self.train, links, micro_batches)
        self._made_for = (micro_batches, length)
        return self._schedule

    def _outcomes(self) -> list[Outcome]:
        """This rank's outcomes, the sums of its stages': a report has a row for each layer of the
        model with experts.
        """
        outcomes = []
        for parts in zip(*(stage.outcomes for stage in self.stages), strict=True):
            reports: torch.Tensor | None = None
            if self.with_experts:
                rows = len(self.with_experts), 2 * self.whole.config.num_experts + 2
                reports = torch.zeros(rows, device=self.mesh.device)
            for stage, part in zip(self.stages, parts, strict=True):
                if part.reports is not None:
                    assert reports is not None
                    own = [n for n, i in enumerate(self.with_experts) if i in stage.layer_numbers]
                    reports[own] = part.reports
            outcomes.append(parts[-1]._replace(reports=reports))
        for stage in self.stages:
            stage.outcomes = []
        return outcomes

    # ---- weights

    def sum_copies(self) -> None:
        """Adds the gradients of the two copies of a tied weight; both then have the same bits."""
        if self.holds_tied and (gradient := self.tied.grad) is not None:
            dist.all_reduce(shard(gradient), group=self.ends)

    @property
    def tied(self) -> nn.Parameter:
        return cast(nn.Parameter, self.model.model.embed_tokens.weight)

    @property
    def copies(self) -> list[nn.Parameter]:
        """The tied weight of the last stage, which counts and is written once, on the first."""
        return [self.tied] if self.holds_tied and self._holds_last else []

    @property
    def reader(self) -> int:
        """The first rank of this rank's stage, which reads its weights for the others."""
        return int(self.mesh.layout.stages()[0, self.rank].flatten()[0])

    @property
    def readers(self) -> dist.ProcessGroup | None:
        return self.mesh.stage.group

    def agree(self, problem: BaseException | None) -> None:
        self.mesh.control.agree(problem)

    def read_by_all(self, checksums: dict[str, str]) -> dict[str, str]:
        for read in self.mesh.control.gather(checksums):
            checksums |= read
        return checksums

    def of_all_ranks(self, weights: Weights) -> Weights:
        """This rank's weights, by name, and on rank 0 then those of the other stages, one at a
        time, on the CPU. Every rank must exhaust it.
        """
        group = self.mesh.pipeline.group
        tied = {n for n, p in self.model.named_parameters() if any(p is c for c in self.copies)}
        own = (entry for entry in weights if entry[0] not in tied)
        if self.rank == 0:
            yield from own
        # The ranks of other pipelines take part in gathering only.
        sends = self.rank > 0 and self.mesh.rank == self.reader
        for name, full, dtype in own if self.rank else ():
            if sends:
                about = (name, list(full.shape), short(full.dtype), short(dtype))
                exchange.send(about, group, to=0)
                dist.send(full.cpu().contiguous(), group=group, group_dst=0)
        if sends:
            exchange.send(None, group, to=0)
        for rank in range(1, self.mesh.pipeline.size) if self.mesh.main else ():
            while (about := exchange.receive(group, rank)) is not None:
                name, shape, stored, dtype = about
                full = torch.empty(shape, dtype=getattr(torch, stored))
                dist.recv(full, group=group, group_src=rank)
                yield name, full, getattr(torch, dtype)

    def with_all_adapters(self) -> Transformer:
        """The whole model with every stage's adapters, and what is trained beside them, full; its
        other weights are on meta. Every rank must call it.
        """
        own = {
            name: whole(p.detach()).cpu().contiguous()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        # What DoRA's files need of weights that are on meta.
        for path, module in adapted(self.model):
            if isinstance(module, LoRALinear) and module.use_dora:
                own[f"{path}.row_norms"] = module.base_norms().cpu()
        group, model = self.mesh.pipeline.group, copy.deepcopy(self.whole)
        about = [(name, list(t.shape), short(t.dtype)) for name, t in own.items()]
        for rank, told in enumerate(exchange.gather(about, group)):
            for name, shape, dtype in told:
                full = own[name] if rank == self.rank else None
                if full is None:
                    full = torch.empty(shape, dtype=getattr(torch, dtype))
                dist.broadcast(full, group=group, group_src=rank)
                path, _, last = name.rpartition(".")
                value = nn.Parameter(full, requires_grad=False)
                setattr(model.get_submodule(path), last, full if last == "row_norms" else value)
        return model

    # ---- evaluation

    def forward(self, batches: Iterable[Mapping[str, Any]], loss: LossFunction) -> list[Outcome]:
        """The outcomes without gradients: micro-batches follow each other through the stages."""
        outcomes: list[Outcome] = []
        sent: list[tuple[Any, torch.Tensor]] = []
        for batch in map(self.moved, batches):
            hidden = None
            for stage in self.stages:
                stage.start([batch], loss, None)
                if not stage.first and (before := self.ranks[stage.number - 1]) != self.rank:
                    hidden = self._received(before, batch)
                hidden = stage(None if stage.first else hidden)
                if not stage.last and (after := self.ranks[stage.number + 1]) != self.rank:
                    for work, _ in sent:
                        work.wait()
                    work = dist.isend(hidden, group=self.mesh.pipeline.group, group_dst=after)
                    sent = [(work, hidden)]  # the message must outlive its sending
            outcomes += self._outcomes()
        for work, _ in sent:
            work.wait()
        return outcomes

    def _received(self, rank: int, batch: Mapping[str, Any]) -> torch.Tensor:
        length = batch["input_ids"].shape[1] // self.mesh.layout.tp
        shape = 1, length, self.model.config.hidden_size
        hidden = torch.empty(shape, dtype=self.dtype, device=self.mesh.device)
        dist.recv(hidden, group=self.mesh.pipeline.group, group_src=rank)
        return hidden


def longest_micro_batch(bins: int, width: Width, mesh: Mesh) -> int:
    """Tokens of a rank in a micro-batch of so many full bins."""
    tokens = bins * width.sample_packing_sequence_len
    multiple = padding(width.pad_to_multiple_of, mesh.context, mesh.layout.tp)
    return math.ceil(tokens / multiple) * multiple // mesh.context.size


def _ends(mesh: Mesh) -> Any:
    """The group of this rank's first and last stage. Every rank must call it."""
    ranks = mesh.layout.along("pp")[:, [0, -1]]
    own, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    return own


def _apply(parts: Parts, mesh: Mesh, train: Compute, steps: Batching, width: Width) -> Pipeline:
    longest = longest_micro_batch(steps.micro_batch_size, width, mesh)
    return Pipeline(parts.model, train, mesh, longest)


LAYOUTS.add(
    "pipeline",
    Layout(
        10,
        lambda mesh, *_: mesh.layout.pp > 1,
        _apply,
        (Compute, Batching, Width),
        axes=(Axis("pp", 10, "pipeline_parallel_size"),),
    ),
)
