"""A model cut into stages of a pipeline: which layers each has, and the module that runs them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tilewright.nn.weights import base_weights, shape_of
from tilewright.trainer.models.head import LossFunction
from tilewright.trainer.models.model import Outcome, Transformer
from tilewright.trainer.parallel.fields import Parallel


def ranks_of_stages(train: Parallel) -> list[int]:
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
    # least[i]: (largest stage, their numbers) of the first i layers on the stages so far.
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
    best = least[n]
    assert best is not None
    return best[1]


def layers_of_stages(model: Transformer, train: Parallel) -> list[range]:
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
        head = model.head.rows(model.config) * model.config.hidden_size + model.config.hidden_size
        sizes = split_layers([_size(block) for block in blocks], (embedding, head), stages)
    elif sum(sizes) != len(blocks):
        raise ValueError(
            f"train.pipeline_split = {sizes}: makes {sum(sizes)} layers, and the model has "
            f"{len(blocks)}"
        )
    return [range(end - n, end) for n, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


def length_of_hidden(train: Parallel, lengths: list[int], longest: int) -> int:
    """The length of the hidden states that travel in a step with micro-batches of these lengths.

    torch's schedules exchange one shape, for which they set up buffers and synchronize: a few
    different ones, in eighths of the longest.   longest: tokens of a micro-batch of full bins.
    """
    if train.pp_variable_seq_lengths:
        part = math.ceil(longest / 8)
        return math.ceil(max(lengths) / part) * part
    if max(lengths) > longest:
        raise ValueError(
            f"train.pp_variable_seq_lengths = False: a micro-batch has {max(lengths)} tokens, more "
            f"than the {longest} of full bins"
        )
    return longest


def _size(module: nn.Module) -> int:
    return sum(math.prod(shape_of(stored)) for _, stored in base_weights(module))


class Stage(nn.Module):
    """Consecutive layers; on the first stage the embedding, on the last the norm, the head and the
    loss.

    Takes and returns hidden states [1, length, H], of which each micro-batch fills its part; the
    last stage returns the loss's sum. Micro-batches come from `queue`, in order: every schedule
    calls a stage with them in order.
    """

    def __init__(self, model: Transformer, layers: range, number: int, stages: int, parts: int = 1):
        """parts: tensor-parallel ranks, each of which has a shard of the hidden states."""
        super().__init__()
        self.parts = parts
        self.number, self.layer_numbers = number, layers
        self.first, self.last = number == 0, number == stages - 1
        # In a tuple, not a submodule: the model's other weights are not this stage's.
        self.of = (model,)
        self.layers = nn.ModuleList(model.model.layers[i] for i in layers)
        if self.first or (self.last and model.config.tied):
            self.embed_tokens = model.model.embed_tokens
        if self.last:
            self.norm = model.model.norm
            self.add_module(model.head.module, model.get_submodule(model.head.module))
        self.queue: Iterator[Mapping[str, Any]] = iter(())
        self.loss: LossFunction | None = None
        self.length: int | None = None  # on this rank; None: as long as the micro-batch
        self.outcomes: list[Outcome] = []

    def start(
        self, batches: Iterable[Mapping[str, Any]], loss: LossFunction, length: int | None
    ) -> None:
        self.queue, self.loss, self.length, self.outcomes = iter(batches), loss, length, []

    def forward(self, hidden: torch.Tensor | None = None) -> torch.Tensor:
        [model], batch = self.of, next(self.queue)
        ids, decoder, sequence = batch["input_ids"], model.model, model.sequence(**batch)
        T = ids.shape[1] // self.parts
        x = decoder.embed(ids) if hidden is None else hidden
        if x.shape[1] > T:
            x = x[:, :T]
        x, residual, reports = decoder.through(self.layers, x, sequence)
        if self.last:
            assert self.loss is not None
            outcome = model.outcome(decoder.norm(x, residual)[0], self.loss, batch)
            self.outcomes.append(outcome._replace(total=outcome.total.detach(), reports=reports))
            return outcome.total
        zero = torch.zeros((), device=x.device)
        self.outcomes.append(Outcome(zero, zero, reports=reports))
        x = x if residual is None else x + residual
        rest = 0 if self.length is None else self.length - T
        return F.pad(x, (0, 0, 0, rest)) if rest else x


def keep(model: Transformer, stages: list[Stage]) -> None:
    """Drops the weights of other stages; the others keep their names."""
    kept = {i for stage in stages for i in stage.layer_numbers}
    layers: Any = model.model.layers
    for i in range(model.config.num_hidden_layers):
        if i not in kept:
            delattr(layers, str(i))
    held = {name for stage in stages for name, _ in stage.named_children()}
    parts: Any = model  # a stage's model lacks what others have
    if "embed_tokens" not in held:
        parts.model.embed_tokens = None
    if model.head.module not in held:
        parts.model.norm = None
        setattr(model, model.head.module, None)
