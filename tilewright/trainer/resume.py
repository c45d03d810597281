"""Where a run begins: with a checkpoint, with the weights of one, or with neither."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

from tilewright.trainer.build import Built
from tilewright.trainer.config import Train
from tilewright.trainer.parallel.mesh import Mesh

log = logging.getLogger("tilewright")


def resume(
    train: Train, mesh: Mesh, made: Built, folders: list[pathlib.Path]
) -> tuple[pathlib.Path | None, dict[str, Any]]:
    """Fills the engine from the first folder that is not damaged, and sets the position in the
    data. Returns the folder that the run goes on from, and its state: None and {} without folders,
    or if the run takes the weights alone.
    """
    batches = made.batches
    if not folders:
        if train.load_checkpoint_path and mesh.main:
            log.info("%s holds no checkpoint to resume from: the run starts anew", train.output_dir)
        return None, {}
    free = {"base"} if train.allow_other_base else set()
    free |= set() if train.load_optimizer else {"optimizer", "data"}
    wanted = {k: v for k, v in made.identity.items() if k not in free}
    options = made.ops, train.verify_checkpoint, train.load_optimizer
    resumed, state = made.engine.load(folders, wanted, *options)
    if not train.load_optimizer:
        if made.engine.reference is not None:
            made.engine.reference.own = False
        return None, {}
    batches.load_state_dict(state["data"])
    batches.tokens = state.get("tokens", 0)
    return resumed, state
