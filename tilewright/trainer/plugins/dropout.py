"""Dropout: `train.hidden_dropout`, `attention_dropout`, `ffn_dropout` and `dropout_warmup_steps`.

Before a step it gives each micro-batch its masks. Forward passes without gradients have none.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tilewright.ops.activation.dropout_add import DROPOUT_ADD
from tilewright.ops.attention.context_parallel import positions
from tilewright.trainer.callbacks import CALLBACKS, Plugin
from tilewright.trainer.data.batches import BIN_ENDS
from tilewright.trainer.engine import Batch
from tilewright.trainer.models.fields import Dropouts
from tilewright.trainer.models.masks import MOST_BINS, MOST_LAYERS, Masks, Span, key_of, spans
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.parallel.fields import Parallel
from tilewright.trainer.plugins.callback import Callback, Step
from tilewright.trainer.plugins.run import Run


def check(train: Dropouts, mesh: Parallel, shape: ModelConfig, bins: int) -> None:
    """Raises ValueError for a model, or bins of a step, that dropout cannot have."""
    if train.ffn_dropout and shape.num_experts:
        raise ValueError(
            f"train.ffn_dropout = {train.ffn_dropout}: the model has experts, which compute their "
            "inner activations within one op; hidden_dropout drops their results"
        )
    tp = mesh.tensor_parallel_size
    shared = tp * mesh.ulysses_parallel_size * mesh.ringattn_parallel_size > 1
    for name, columns in (
        ("hidden_dropout", shape.hidden_size),
        ("ffn_dropout", shape.intermediate_size // tp),
    ):
        if shared and getattr(train, name) and columns % 4:
            raise ValueError(
                f"train.{name} = {getattr(train, name)}: ranks that share a sequence or matrices "
                f"need a multiple of 4 columns each, whose bits are drawn at once, and have {columns}"
            )
    for name, size, most in (
        ("layers", shape.num_hidden_layers, MOST_LAYERS),
        ("bins of a step", bins, MOST_BINS),
    ):
        if train.attention_dropout and size > most:
            raise ValueError(
                f"train.attention_dropout = {train.attention_dropout}: its masks tell {most} "
                f"{name} apart, and there are {size}"
            )


def operations(train: Dropouts, device_type: str, dtype: torch.dtype) -> dict[str, str]:
    """The implementation of dropout's own op, which `Ops` does not list."""
    dropped = train.hidden_dropout or train.ffn_dropout
    return {"dropout_add": DROPOUT_ADD.choose(device_type, dtype)} if dropped else {}


def part_of_target(train: Dropouts, done: int) -> float:
    """The factor of the probabilities after so many optimizer steps."""
    return min(1.0, done / train.dropout_warmup_steps) if train.dropout_warmup_steps else 1.0


class Dropout(Callback):
    def __init__(self, run: Run):
        super().__init__(run)
        self.train, self.batches = run.config.train, run.batches
        self.tp = run.mesh.layout.tp, run.mesh.layout.coordinates(run.mesh.rank)["tp"]

    def before_step(self, step: Step) -> None:
        done = step.number - 1
        part = part_of_target(self.train, done)
        step.batches = [self.masked(b, i, done, part) for i, b in enumerate(step.batches)]

    def masked(self, batch: Batch, number: int, done: int, part: float) -> dict[str, Any]:
        """A micro-batch with its masks.   number: of the rank's micro-batches in the step."""
        train, of, (size, rank) = self.train, self.batches, self.tp
        rest = {name: t for name, t in batch.items() if name != BIN_ENDS}
        if not part:
            return rest
        ends = [0, *batch[BIN_ENDS].tolist()]
        ends[-1] = batch["input_ids"].shape[1] * of.cp.size  # padding follows the last bin
        first = (number * of.world + of.rank) * of.micro
        bins = tuple(Span(first + i, a, b) for i, (a, b) in enumerate(itertools.pairwise(ends)))
        own = positions(ends[-1], of.cp, "cpu")
        masks = Masks(
            hidden=part * train.hidden_dropout,
            attention=part * train.attention_dropout,
            ffn=part * train.ffn_dropout,
            key=key_of(train.seed, done),
            bins=bins,
            inner=spans(bins, own),
            rows=spans(bins, own.chunk(size)[rank]),
        )
        return {**rest, "masks": masks}


CALLBACKS.add("dropout", Plugin(Dropout, 30, lambda run: run.config.train.drops))
