"""Where a run begins: with a checkpoint, with the weights of one, or with neither."""

from __future__ import annotations

import contextlib
import logging
import pathlib
from typing import Any

from tilewright.trainer.build import Things, of_main
from tilewright.trainer.checkpoint import checkpoint
from tilewright.trainer.checkpoint.checkpoint_files import read_state
from tilewright.trainer.checkpoint.fields import Checkpointing
from tilewright.trainer.checkpoint.made_of import NOTHING, MadeOf
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.plugins.run import Built

log = logging.getLogger("tilewright")


def accepted(train: Checkpointing, reference: str) -> set[str]:
    """What a run may be made of that its checkpoint was not.   reference: its kind."""
    changes = {*train.accept_changes}
    if train.allow_other_base:  # adapters that are switched off are compared with it
        changes |= {"base", "reference"} if reference == "adapters_off" else {"base"}
    return changes


def refuse_others(
    train: Checkpointing, reference: str, mesh: Mesh, folders: list[pathlib.Path], things: Things
) -> None:
    """Raises ValueError, on every rank, if a run that goes on from the first folder is made of
    other things than it was.   reference: its kind.
    """

    def check() -> None:
        if folders and train.load_optimizer:
            own = MadeOf(things, accepted(train, reference))
            with contextlib.suppress(checkpoint.Damaged):  # `resume` says so
                checkpoint.check(folders[0], read_state(folders[0]), {"data": {}}, own)

    of_main(mesh, check)


def resume(
    train: Checkpointing, reference: str, mesh: Mesh, made: Built, folders: list[pathlib.Path]
) -> tuple[pathlib.Path | None, dict[str, Any]]:
    """Fills the engine from the first folder that is not damaged, and sets the position in the
    data. Returns the folder that the run goes on from, and its state: None and {} without folders,
    or if the run takes the weights alone.   reference: the kind of the run's.
    """
    batches = made.batches
    if not folders:
        if train.load_checkpoint_path and mesh.main:
            log.info("%s holds no checkpoint to resume from: the run starts anew", train.output_dir)
        return None, {}
    free = {"base"} if train.allow_other_base else set()
    free |= set() if train.load_optimizer else {"optimizer", "data"}
    wanted = {k: v for k, v in made.identity.items() if k not in free}
    own = made.made_of._replace(accepted=accepted(train, reference))
    things = own if train.load_optimizer else NOTHING
    options = made.ops, train.verify_checkpoint, train.load_optimizer, things
    resumed, state = made.engine.load(folders, wanted, *options)
    if not train.load_optimizer:
        if made.engine.reference is not None:
            made.engine.reference.own = False
        return None, {}
    batches.load_state_dict(state["data"])
    batches.tokens = state.get("tokens", 0)
    made.engine.empty_steps = state.get("empty_steps", 0)  # none in those of earlier versions
    return resumed, state
