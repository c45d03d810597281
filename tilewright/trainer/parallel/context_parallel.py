"""Context parallelism: the ranks of a group share each sequence."""

from __future__ import annotations

from tilewright.ops.attention.context_parallel import ContextParallel
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.parallel.row import LAYOUTS, Axis, Layout


def spread_sequence(model: Transformer, cp: ContextParallel) -> None:
    """Shards sequences: each rank of `cp` is called with its own shard.

    Raises ValueError if the heads cannot be sharded accordingly.
    """
    sharing = min(block.self_attn.tp.heads for block in model.model.blocks)
    heads = model.config.num_attention_heads // sharing
    if heads % cp.ulysses_size:
        of = f" of a tensor-parallel rank (of {sharing})" if sharing > 1 else ""
        raise ValueError(
            f"train.ulysses_parallel_size = {cp.ulysses_size}: the model's {heads} query "
            f"heads{of} do not divide by {cp.ulysses_size}"
        )
    model.cp = cp
    for block in model.model.blocks:
        block.self_attn.cp = cp


LAYOUTS.add(
    "context",
    Layout(
        30,
        lambda mesh: mesh.context.size > 1,
        lambda parts, mesh: spread_sequence(parts.model, mesh.context),
        axes=(
            Axis("ring", 40, "ringattn_parallel_size"),
            Axis("ulysses", 50, "ulysses_parallel_size"),
        ),
    ),
)
