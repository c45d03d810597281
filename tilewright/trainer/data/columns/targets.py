"""Several targets of a token, with a weight each."""

from __future__ import annotations

from tilewright.trainer.data.columns.column import Column
from tilewright.trainer.losses.weighted import TARGET_WEIGHTS, TARGETS


def target_columns(k: int) -> dict[str, Column]:
    """The columns of `weighted_targets`, of k targets per token."""
    return {
        TARGETS: Column("token", "int64", fill=-1, target=True, width=k),
        TARGET_WEIGHTS: Column("token", "float32", target=True, width=k),
    }
