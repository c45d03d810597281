"""Where a run begins: with a checkpoint, with the weights of one, or with neither."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

from tilewright.trainer.build import Built, Things
from tilewright.trainer.checkpoint import checkpoint
from tilewright.trainer.checkpoint.checkpoint_files import read_state
from tilewright.trainer.checkpoint.made_of import NOTHING, MadeOf
from tilewright.trainer.config import Config
from tilewright.trainer.config.preference import kind_of_reference
from tilewright.trainer.parallel.mesh import Mesh

log = logging.getLogger("tilewright")


def accepted(config: Config) -> set[str]:
    """What a run may be made of that its checkpoint was not."""
    train, found = config.train, {*config.train.accept_changes}
    if train.allow_other_base:  # adapters that are switched off are compared with it
        found |= {"base", "reference"} if kind_of_reference(config) == "adapters_off" else {"base"}
    return found


def refuse_others(config: Config, mesh: Mesh, folders: list[pathlib.Path], things: Things) -> None:
    """Raises ValueError, on every rank, if a run that goes on from the first folder is made of
    other things than it was.
    """
    problem = None
    if mesh.main and folders and config.train.load_optimizer:
        try:
            state = read_state(folders[0])
            checkpoint.check(folders[0], state, {"data": {}}, MadeOf(things, accepted(config)))
        except checkpoint.Damaged:  # `resume` says so
            pass
        except ValueError as error:
            problem = error
    mesh.control.agree(problem)


def resume(
    config: Config, mesh: Mesh, made: Built, folders: list[pathlib.Path]
) -> tuple[pathlib.Path | None, dict[str, Any]]:
    """Fills the engine from the first folder that is not damaged, and sets the position in the
    data. Returns the folder that the run goes on from, and its state: None and {} without folders,
    or if the run takes the weights alone.
    """
    train, batches = config.train, made.batches
    if not folders:
        if train.load_checkpoint_path and mesh.main:
            log.info("%s holds no checkpoint to resume from: the run starts anew", train.output_dir)
        return None, {}
    free = {"base"} if train.allow_other_base else set()
    free |= set() if train.load_optimizer else {"optimizer", "data"}
    wanted = {k: v for k, v in made.identity.items() if k not in free}
    things = MadeOf(made.made_of, accepted(config)) if train.load_optimizer else NOTHING
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
