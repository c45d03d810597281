"""This library's trainer as a step for `tilewright check-layout`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tilewright.trainer.build import (
    build_model,
    choose_ops,
    compute_dtype,
    engine_around,
    shape_of_run,
)
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.data.batches import collate
from tilewright.trainer.losses.loss import LOSSES
from tilewright.trainer.parallel import mesh
from tilewright.trainer.parallel.mesh import padding
from tilewright.trainer.parallel.precision import resolved
from tilewright_lab.check_layout.step import Step

__all__ = ["trainer_step"]

# What makes a configuration that of one process.
ALONE = (
    "--train.data_parallel_mode=none",
    *(
        f"--train.{name}_parallel_size=1"
        for name in ("pipeline", "tensor", "ringattn", "ulysses", "expert")
    ),
    *(f"--train.data_parallel_{name}_size=-1" for name in ("replicate", "shard")),
)
# Tokens of generated documents, one in each micro-batch, relative to the longest bin: ranks have
# unequal numbers, in total and as micro-batches.
LENGTHS = (1.0, 0.4, 0.75, 0.55, 0.9, 0.35, 0.6, 0.8)
# For the rules of a configuration; ranks with data of their own have their part of them.
STEPS = f"--train.gradient_accumulation_steps={len(LENGTHS)}"


def trainer_step(
    config: str,
    layouts: Mapping[str, tuple[int | Sequence[int], Sequence[str]]],
    arguments: Sequence[str] = (),
) -> Callable[[str, int, int], Step]:
    """A step of the trainer on generated documents, in layouts of a configuration.

    Args:
        config: The path of a YAML file of the trainer. Its data are not read.
        layouts: By name: the number of processes, or several, and the arguments that the trainer's
            command takes after the file.
        arguments: Those of all layouts, and of one process.

    Returns:
        A function for `tilewright check-layout`. It computes in the configuration's dtype, float32
        or bfloat16.

    Raises:
        ConfigError: On a rank: an argument is not accepted, or the configuration has dropout, whose
            masks are those of a run's data.

    Example:
        >>> from tilewright_lab.check_layout.trainer_step import trainer_step
        >>> tp = ["--train.tensor_parallel_size=2"]
        >>> trainer_step("demo.yaml", {"fsdp2": (2, []), "tensor": ((2, 4), tp)}).layouts
        {'fsdp2': 2, 'tensor': (2, 4)}
    """

    def step(layout: str, rank: int, world_size: int) -> Step:
        torch.set_default_dtype(torch.float32)
        own = layouts[layout][1] if layout in layouts else ALONE
        return _step(load(config, [STEPS, *arguments, *own]), rank, world_size)

    step.layouts = {name: number for name, (number, _) in layouts.items()}
    return step


def _step(config: Any, rank: int, world_size: int) -> Step:
    if config.train.drops:
        raise ConfigError(["train.hidden_dropout, attention_dropout, ffn_dropout: must be 0 here"])
    ranks = mesh.build(config.train, rank, world_size, torch.device("cpu"))
    shape = shape_of_run(config.model, "language_model", ranks)
    ops = choose_ops(config.model, shape, ranks, compute_dtype(config.train))
    c = config
    dtypes = resolved(c.precision, c.train, c.train)
    parts = build_model(c.model, c.lora, shape, c.data, c.train, ranks, ops, dtypes)
    engine = engine_around(parts, c.train, ranks, c.lora.lora_plus_scale)
    batches = _batches(config, ranks, shape.vocab_size)
    latest: dict[str, Any] = {}

    def loss() -> torch.Tensor:
        latest["sums"] = engine.forward_backward(batches, LOSSES[config.train.loss])
        return torch.tensor(latest["sums"].mean, dtype=torch.float64)

    def synchronize() -> None:
        latest["norm"] = engine.divide()

    return Step(
        model=engine.model,
        loss=loss,
        tokens=sum(int((batch["labels"] != IGNORE).sum()) for batch in batches),
        optimizer=engine.optimizer,
        synchronize=synchronize,
        clip=lambda: latest["norm"],
        reported_loss=lambda: latest["sums"].mean,
    )


def _batches(config: Any, ranks: mesh.Mesh, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """A rank's micro-batches of one document each; those of all ranks are the same in all
    layouts.
    """
    draw = np.random.default_rng(0)
    longest = config.data.sample_packing_sequence_len
    documents = [draw.integers(0, vocabulary, max(2, int(part * longest))) for part in LENGTHS]
    multiple = padding(config.data.pad_to_multiple_of, ranks.context, ranks.layout.tp)
    return [
        collate([[(ids, ids)]], multiple, ranks.context)
        for ids in documents[ranks.batch_rank :: ranks.layout.data]
    ]
