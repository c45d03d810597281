"""The report of a run before its first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from tilewright.trainer.data.batches import Batches, Bins
from tilewright.trainer.engine import Engine
from tilewright.trainer.models.ops_choice import Numerics
from tilewright.trainer.parallel.compiling import compiled_parts
from tilewright.trainer.parallel.mesh import Mesh, padding
from tilewright.trainer.parallel.tensor_parallel import undivided
from tilewright.trainer.plan import Plan
from tilewright.trainer.plugins import adapters


def summary(
    engine: Engine, batches: Batches, plan: Plan, mesh: Mesh, multiple: int, compiled: bool
) -> Iterator[str]:
    """What is trained, where, and on how many tokens, a line each.

    multiple: data.pad_to_multiple_of.   compiled: train.enable_compile.
    """
    yield (
        f"{adapters.size(engine.parts.whole)} on {mesh.size} x {mesh.device.type}, {plan.total} steps, "
        f"{batches.steps_per_epoch} per epoch, {batches.bins.tokens} tokens of data"
    )
    multiple = padding(multiple, mesh.context, mesh.layout.tp)
    if (tp := mesh.layout.tp) > 1:
        why = undivided(engine.parts.whole, tp)
        repeated = f", attention whole on each, as {why}" if why else ""
        yield (
            f"matrices on {tp} tensor-parallel ranks{repeated}, micro-batches padded to a multiple "
            f"of {multiple} tokens"
        )
    if mesh.context.size > 1:
        yield (
            f"a sequence on {mesh.context.ring_size} ring x {mesh.context.ulysses_size} Ulysses "
            f"ranks, padded to a multiple of {multiple} tokens"
        )
    if compiled:
        parts = compiled_parts(engine.model).items()
        yield "compiled: " + ", ".join(f"{n} x {part}" for part, n in parts)


def too_long(most: int, data: Mapping[str, Bins]) -> Iterator[str]:
    """A warning for each set with samples beyond the positions that a model was made for.

    most: its max_position_embeddings.
    """
    for name, bins in data.items():
        lengths = bins.lengths + bins.shared
        if count := int((lengths > most).sum()):
            yield (
                f"warning: {count} of {len(lengths)} samples of {name} are longer than the "
                f"model's max_position_embeddings = {most} (up to {lengths.max()} tokens): it "
                "may not have seen such positions; data.datasets.max_seq_len cuts samples"
            )


def choices(chosen: dict[str, str], numerics: Numerics) -> Iterator[str]:
    """The implementations of ops, and the model's numerics."""
    yield "ops: " + " ".join(f"{k}={v}" for k, v in chosen.items())
    settings = dataclasses.asdict(numerics)
    yield "numerics: " + " ".join(f"{k}={v}" for k, v in settings.items())
