"""Training checkpoints: PyTorch's distributed format, written aside and renamed, found again, and
resumed from.

{output_dir}/checkpoints/global_step_N/ holds the model and optimizer (DCP, resharded on load as
needed), state.json (step, position in the data, model shape, op choices), each rank's random state,
and, in the last one, hf/. Reading one
runs no code that it names: what is pickled is read by unpicklers that know a list of types.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import pathlib
import pickle
import shutil
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from tilewright.files import read_json, replace_folder
from tilewright.trainer.parallel import World

log = logging.getLogger("tilewright")


class Damaged(ValueError):
    """A checkpoint that is not whole, or not what a checkpoint is."""


class Incomplete(Damaged, FileNotFoundError):
    """A checkpoint that lacks a file."""


def find(output_dir: str, wanted: str | None) -> pathlib.Path | None:
    """The first of `candidates`, if there is any."""
    return next(iter(candidates(output_dir, wanted)), None)


def candidates(output_dir: str, wanted: str | None) -> list[pathlib.Path]:
    """The folders to resume from: the second only if the first is damaged, and so on. "auto": those
    of output_dir, the one that was written last first.

    Raises FileNotFoundError for a path without a checkpoint.
    """
    if not wanted:
        return []
    if wanted == "auto":
        # Not the largest step: a run that was resumed from an earlier one leaves larger steps of
        # the former run behind.
        return sorted(complete(output_dir), key=_written, reverse=True)
    folder = pathlib.Path(wanted)
    if not (folder / "state.json").is_file():
        raise FileNotFoundError(
            f"train.load_checkpoint_path = {wanted}: no checkpoint there (no state.json)"
        )
    return [folder]


def _written(folder: pathlib.Path) -> float:
    """When, in seconds since 1970."""
    try:
        return read_state(folder)["written"]
    except Damaged:  # `resume` says so when its turn comes
        return (folder / "state.json").stat().st_mtime


def complete(output_dir: str) -> list[pathlib.Path]:
    """Checkpoints of a run's folder."""
    found = sorted(pathlib.Path(output_dir, "checkpoints").glob("global_step_*"))
    return [p for p in found if (p / "state.json").is_file()]


@contextlib.contextmanager
def claim(output_dir: str, world: World) -> Iterator[None]:
    """Makes the folder, and holds it for this run: a second live one is refused. What a run that
    was killed left there is put in order. Every rank must call it. Raises ValueError or OSError on
    all of them.
    """
    with contextlib.ExitStack() as stack:
        problem = None
        if world.main:
            try:
                folder = pathlib.Path(output_dir)
                folder.mkdir(parents=True, exist_ok=True)  # fails before anything is computed
                recover(output_dir, world, alone=_lock(folder, stack))
            except (OSError, ValueError) as error:
                problem = error
        world.agree(problem)
        yield


def _lock(folder: pathlib.Path, stack: contextlib.ExitStack) -> bool:
    """Whether no other process can be writing there, which some file systems do not tell. Raises
    ValueError if one is.

    The lock is the process's own, not its children's, and ends with it however it ends.
    """
    file = stack.enter_context((folder / ".lock").open("w"))
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise ValueError(
            f"train.output_dir = {folder}: another run is writing there; choose another folder, "
            f"or wait "
            "for it to end"
        ) from error
    except OSError as error:
        log.warning(
            "%s: its file system has no locks (%s): nobody would notice two runs that write there",
            folder,
            error,
        )
        return False
    return True


def recover(output_dir: str, world: World, *, alone: bool = True) -> None:
    """Of a run that was killed: gives checkpoints that are whole their name, and removes what was
    not finished.

    alone: no other run is writing here; otherwise what is not finished is only named.
    """
    if not world.main:
        return
    root = pathlib.Path(output_dir, "checkpoints")
    for old in root.glob(".global_step_*.old"):  # killed while a new one was about to take its name
        target = old.with_name(old.name[1 : -len(".old")])
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)
    for aside in sorted(
        [*root.glob(".global_step_*.partial"), *root.glob("global_step_*/.*.partial")]
    ):
        try:
            if not alone:
                raise Damaged("another run may be writing it")
            if aside.name != f".global_step_{(step := read_state(aside)['step'])}.partial":
                raise Damaged(f"its state is of step {step}")
            read_metadata(aside / "dcp")  # which is written when all else is
        except (OSError, Damaged) as problem:
            if alone:
                shutil.rmtree(aside)
            log.warning(
                "%s: an unfinished checkpoint of an earlier run%s (%s)",
                aside,
                ", removed" if alone else "",
                problem,
            )
        else:
            _give_name(aside, aside.with_name(aside.name[1 : -len(".partial")]))


def _give_name(aside: pathlib.Path, target: pathlib.Path) -> None:
    replace_folder(aside, target)
    log.info("checkpoint %s", target)


def read_state(folder: pathlib.Path) -> dict[str, Any]:
    try:
        state = read_json(folder / "state.json")
    except (OSError, ValueError) as error:
        raise Damaged(str(error)) from error
    if absent := {"step", "written", "run", "ops"} - state.keys():
        raise Damaged(f"{folder / 'state.json'}: lacks {', '.join(sorted(absent))}")
    return state


# ---- reading what is pickled

_KNOWN = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _Unpickler(pickle.Unpickler):
    """Of DCP's metadata. A pickle may name any function of any module, to be called: this one
    knows what belongs.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN or (
            module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def read_metadata(folder: pathlib.Path) -> Metadata:
    """Of a DCP folder: what it holds, in which of its files. Raises Damaged if it is not that, or
    if a file is absent or too short.
    """
    path = folder / ".metadata"
    if not path.is_file():
        raise Incomplete(
            f"{folder.parent}: holds no dcp/.metadata, so it is not a whole checkpoint"
        )
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        pieces = list(metadata.storage_data.values())
        needed = {piece.relative_path: 0 for piece in pieces}
        for piece in pieces:
            if "/" in piece.relative_path:
                raise ValueError(f"{piece.relative_path} is not a file in the folder")
            needed[piece.relative_path] = max(
                needed[piece.relative_path], piece.offset + piece.length
            )
    except Exception as error:  # bytes at random make the unpickler raise anything
        raise Damaged(f"{path}: is not the metadata of a checkpoint: {error}") from error
    for name, size in needed.items():
        file = folder / name
        if (found := file.stat().st_size if file.is_file() else -1) < size:
            raise Damaged(
                f"{file}: is {'absent' if found < 0 else f'cut off after {found} bytes'}, and "
                f"should have "
                f"{size} bytes"
            )
    return metadata


class _Reader(dcp.FileSystemReader):
    """Of a folder whose metadata have been read."""

    def __init__(self, folder: pathlib.Path, metadata: Metadata):
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self) -> Metadata:
        return self.metadata


class _Planner(dcp.DefaultLoadPlanner):
    """DCP unpickles tensors by a list of types, but not numbers and names."""

    def load_bytes(self, read_item: dcp.planner.ReadItem, value: Any) -> None:
        torch.save(torch.load(value, weights_only=True), safe := io.BytesIO())
        safe.seek(0)
        super().load_bytes(read_item, safe)


@contextlib.contextmanager
def _first_failure(kind: type[Exception], what: str) -> Iterator[None]:
    """DCP's exception holds the failures of all ranks, with their traces, and is no Exception:
    makes one sentence.
    """
    try:
        yield
    except CheckpointException as error:
        [(rank, (first, _)), *_] = error.failures.items()
        if isinstance(first, KeyboardInterrupt):
            raise first from None
        reason = str(first).partition("\n")[0]
        raise kind(f"{what} (rank {rank}: {type(first).__name__}: {reason})") from first


# ---- writing


def _not_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """The name of a parameter that is not finite, or whose moments are not, on this rank."""
    names, finite = [], []
    for name, p in model.named_parameters():
        for t in (p, *optimizer.state.get(p, {}).values()):
            if torch.is_tensor(t) and t.is_floating_point():
                names.append(name)
                finite.append(
                    (t.to_local() if isinstance(t, DTensor) else t).isfinite().all().to(p.device)
                )
    good = torch.stack(finite).tolist()  # waits for the device once
    return None if all(good) else names[good.index(False)]


class Saver:
    """Writes checkpoints; with save_async, one may still be under way while training goes on.

    Every rank must make one, and call its methods at the same steps.   last: the newest whole
    checkpoint.
    """

    def __init__(
        self, output_dir: str, world: World, asynchronous: bool, last: pathlib.Path | None = None
    ):
        self.root, self.world, self.asynchronous = (
            pathlib.Path(output_dir, "checkpoints"),
            world,
            asynchronous,
        )
        self.last, self.pending = last, None
        # The thread that writes communicates while training does: in one group their messages would
        # be mixed up.
        self.group = dist.new_group(backend="gloo") if asynchronous else None

    def folder(self, step: int) -> pathlib.Path:
        return self.root / f"global_step_{step}"

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> pathlib.Path:
        """state: JSON. The folder has its final name only once it is complete.

        Raises ValueError, and writes nothing, if a weight or a moment is not finite.
        """
        self.finish()
        wrong = _not_finite(model, optimizer)
        self.world.agree(
            wrong
            and ValueError(
                f"step {step}: {wrong} or its moments are not finite, so that no "
                f"checkpoint is written; {self.go_on()}"
            )
        )
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
            self.pending = (
                dcp.async_save(tensors, checkpoint_id=aside / "dcp", process_group=self.group),
                aside,
                target,
            )
        else:
            with _first_failure(OSError, f"{aside}: cannot be written"):
                dcp.save(tensors, checkpoint_id=aside / "dcp")
            self._publish(aside, target)
        return target

    def poll(self) -> None:
        """Gives a checkpoint under way its name if all ranks have written their parts."""
        if self.pending is not None and self.world.sum(self.pending[0].done()) == [self.world.size]:
            self.finish()

    def finish(self) -> None:
        """Waits for a checkpoint under way and gives it its name."""
        if self.pending is not None:
            (future, aside, target), self.pending = self.pending, None
            with _first_failure(OSError, f"{aside}: cannot be written"):
                future.result()
            self._publish(aside, target)

    def _publish(self, aside: pathlib.Path, target: pathlib.Path) -> None:
        self.world.barrier()
        if self.world.main:
            _give_name(aside, target)
        self.world.barrier()
        self.last = target

    def go_on(self) -> str:
        """What a run that cannot go on says about how to."""
        last = (
            f"and resume from {self.last}"
            if self.last
            else "and start anew: no checkpoint has been written"
        )
        return f"lower train.lr or look at the data, {last}"

    def interrupted(self) -> str:
        """The newest whole checkpoint, for the last words of a run. Waits for one under way; to
        interrupt that gives it
        up. The other processes may be gone: no message is sent.
        """
        lost = ""
        if self.pending is not None:
            (future, aside, target), self.pending = self.pending, None
            if self.world.main:
                log.info("waiting for %s to be written; interrupt again to give it up", target)
            try:
                future.result()
                if self.world.main:
                    _give_name(aside, target)
                self.last = target
            except (Exception, CheckpointException, KeyboardInterrupt):
                lost = f"; {target.name} was being written and is given up"
        return (
            f"the last whole checkpoint is {self.last}"
            if self.last
            else "no checkpoint has been written"
        ) + lost


# ---- resuming


def resume(
    folders: list[pathlib.Path],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    run: dict[str, dict[str, Any]],
    ops: dict[str, str],
) -> tuple[pathlib.Path, dict[str, Any]]:
    """`restore` of the first of the folders that is not damaged, and which that is. Raises
    Damaged if all are.
    """
    for folder, following in zip(folders, [*folders[1:], None], strict=True):
        try:
            return folder, restore(folder, model, optimizer, world, run=run, ops=ops)
        except Damaged as error:
            if following is None:
                raise
            if world.main:
                log.warning("%s; going on from the one before it, %s", error, following)
    raise ValueError("there is no checkpoint to resume from")


def restore(
    folder: pathlib.Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    run: dict[str, dict[str, Any]],
    ops: dict[str, str],
) -> dict[str, Any]:
    """Fills model and optimizer and returns the saved state. Every rank must call it.

    run: what must be as it was when the checkpoint was written, by kind (model, optimizer, data).
    Raises ValueError if it is not, and Damaged, on all ranks, if the checkpoint cannot be read;
    warns if ops were computed by other implementations.
    """
    problem = state = metadata = None
    random: dict[str, torch.Tensor] = {}
    try:
        state = read_state(folder)
        _check(folder, state, run)
        metadata = read_metadata(folder / "dcp")
        file = folder / f"random_{world.rank}.safetensors"
        if file.is_file():  # a rank that did not exist then starts from its seed
            random = load_file(file)
    except SafetensorError as error:
        problem = Damaged(f"{file}: cannot be read as safetensors: {error}")
    except (OSError, ValueError) as error:
        problem = error
    world.agree(problem)
    if world.main and (
        changed := {k: (v, ops.get(k)) for k, v in state["ops"].items() if ops.get(k) != v}
    ):
        log.warning(
            "ops are computed differently from when %s was written: %s (then, now)", folder, changed
        )
    weights, moments = get_state_dict(model, optimizer)
    tensors = {"model": weights, "optimizer": moments}
    with _first_failure(Damaged, f"{folder}: cannot be read"):
        dcp.load(tensors, storage_reader=_Reader(folder / "dcp", metadata), planner=_Planner())
    set_state_dict(
        model, optimizer, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"]
    )
    if random:
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and torch.cuda.is_available():
            torch.cuda.set_rng_state(random["cuda"])
    return state


_ANEW = "To start anew from its weights, set model.model_path to its hf folder"


def _check(folder: pathlib.Path, state: dict[str, Any], run: dict[str, dict[str, Any]]) -> None:
    for kind, now in json.loads(json.dumps(run)).items():  # tuples as lists
        then = state["run"].get(kind, {})
        if absent := now.keys() - then.keys():
            raise ValueError(
                f"{folder} was written by a version that did not record {kind}: "
                f"{', '.join(sorted(absent))}. It cannot be compared with this run's. {_ANEW}"
            )
        if differ := {k: (then.get(k), v) for k, v in now.items() if then.get(k) != v}:
            raise ValueError(
                f"{folder} was written with another {kind}: {differ} (checkpoint, configuration). "
                f"{_ANEW}"
            )
