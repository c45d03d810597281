"""Training checkpoints: PyTorch's distributed format, written aside and renamed, found again, and resumed from.

{output_dir}/checkpoints/global_step_N/ holds the model and optimizer (DCP, resharded on load as needed), state.json
(step, position in the data, model shape, op choices), each rank's random state, and, in the last one, hf/.
"""

from __future__ import annotations

import json
import logging
import pathlib
import shutil
import time
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tilewright.trainer.hf import read_json
from tilewright.trainer.parallel import World

log = logging.getLogger("tilewright")


def find(output_dir: str, wanted: str | None) -> pathlib.Path | None:
    """The folder to resume from. "auto": the one of output_dir that was written last, or None if there is none.

    Raises FileNotFoundError for a path without a checkpoint.
    """
    if not wanted:
        return None
    if wanted == "auto":
        # Not the largest step: a run that was resumed from an earlier one leaves larger steps of the former run behind.
        return max(complete(output_dir), key=lambda p: read_state(p)["written"], default=None)
    folder = pathlib.Path(wanted)
    if not (folder / "state.json").is_file():
        raise FileNotFoundError(f"train.load_checkpoint_path = {wanted}: no checkpoint there (no state.json)")
    return folder


def complete(output_dir: str) -> list[pathlib.Path]:
    """Checkpoints of a run's folder."""
    found = sorted(pathlib.Path(output_dir, "checkpoints").glob("global_step_*"))
    return [p for p in found if (p / "state.json").is_file()]


def recover(output_dir: str, world: World) -> None:
    """Gives a checkpoint back its name if the run was killed while a new one was about to take it."""
    if world.main:
        for old in pathlib.Path(output_dir, "checkpoints").glob(".global_step_*.old"):
            target = old.with_name(old.name[1:-len(".old")])
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(target)
    world.barrier()


def read_state(folder: pathlib.Path) -> dict[str, Any]:
    return read_json(folder / "state.json")


class Saver:
    """Writes checkpoints; with save_async, one may still be under way while training goes on."""

    def __init__(self, output_dir: str, world: World, asynchronous: bool):
        self.root, self.world, self.asynchronous = pathlib.Path(output_dir, "checkpoints"), world, asynchronous
        self.pending: tuple[Any, pathlib.Path, pathlib.Path] | None = None

    def folder(self, step: int) -> pathlib.Path:
        return self.root / f"global_step_{step}"

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer,
             state: dict[str, Any]) -> pathlib.Path:
        """state: JSON. Every rank must call it. The folder has its final name only once it is complete."""
        self.finish()
        target, aside = self.folder(step), self.root / f".global_step_{step}.partial"
        if self.world.main:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        self.world.barrier()
        weights, moments = get_state_dict(model, optimizer)
        tensors = {"model": weights, "optimizer": moments}
        random = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            random["cuda"] = torch.cuda.get_rng_state()
        save_file(random, aside / f"random_{self.world.rank}.safetensors")
        if self.world.main:
            text = json.dumps({"step": step, "written": time.time(), **state}, indent=1)
            (aside / "state.json").write_text(text + "\n")
        if self.asynchronous:
            self.pending = (dcp.async_save(tensors, checkpoint_id=aside / "dcp"), aside, target)
        else:
            dcp.save(tensors, checkpoint_id=aside / "dcp")
            self._publish(aside, target)
        return target

    def finish(self) -> None:
        """Waits for a checkpoint under way and gives it its name."""
        if self.pending is not None:
            future, aside, target = self.pending
            future.result()
            self.pending = None
            self._publish(aside, target)

    def _publish(self, aside: pathlib.Path, target: pathlib.Path) -> None:
        self.world.barrier()
        if self.world.main:
            old = target.with_name(f".{target.name}.old")
            if target.exists():   # a run that was resumed from before it: kept until the new one has the name
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            aside.rename(target)
            shutil.rmtree(old, ignore_errors=True)
            log.info("checkpoint %s", target)
        self.world.barrier()


def restore(folder: pathlib.Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, *,
            run: dict[str, dict[str, Any]], ops: dict[str, str]) -> dict[str, Any]:
    """Fills model and optimizer and returns the saved state.

    run: what must be as it was when the checkpoint was written, by kind (model, optimizer, data).
    Raises ValueError if it is not; warns if ops were computed by other implementations.
    """
    state = read_state(folder)
    for kind, now in json.loads(json.dumps(run)).items():   # tuples as lists
        then = state["run"][kind]
        if differ := {k: (then.get(k), v) for k, v in now.items() if then.get(k) != v}:
            raise ValueError(f"{folder} was written with another {kind}: {differ} (checkpoint, configuration). To "
                             "start anew from its weights, set model.model_path to its hf folder")
    if not (folder / "dcp" / ".metadata").is_file():
        raise FileNotFoundError(f"{folder}: holds no dcp/.metadata, so it is not a whole checkpoint")
    if changed := {k: (v, ops.get(k)) for k, v in state["ops"].items() if ops.get(k) != v}:
        log.warning("ops are computed differently from when %s was written: %s (then, now)", folder, changed)
    weights, moments = get_state_dict(model, optimizer)
    tensors = {"model": weights, "optimizer": moments}
    dcp.load(tensors, checkpoint_id=folder / "dcp")
    set_state_dict(model, optimizer, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"])
    file = folder / f"random_{world.rank}.safetensors"
    if file.is_file():   # a rank that did not exist then starts from its seed
        random = load_file(file)
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and torch.cuda.is_available():
            torch.cuda.set_rng_state(random["cuda"])
    return state
