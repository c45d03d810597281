"""The folder of a run: locks it for one live run, finds its checkpoints, and cleans up after a
killed run.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import pathlib
import shutil
from collections.abc import Collection, Iterator

from tilewright.core.files import replace_folder
from tilewright.trainer.checkpoint.checkpoint_files import Damaged, read_metadata, read_state
from tilewright.trainer.parallel.mesh import Mesh

log = logging.getLogger("tilewright")


def earlier(output_dir: str, wanted: str | None, anew: bool = False) -> list[pathlib.Path]:
    """`candidates` for a new run, which does not start over what an earlier one has written.

    anew: the run takes the weights alone.
    """
    folders = candidates(output_dir, wanted)
    if (anew or wanted is None) and (there := complete(output_dir)):
        also = " and train.load_optimizer to true" if anew else ""
        raise ValueError(
            f"train.output_dir = {output_dir}: holds {there[-1].name} of an earlier run; set "
            f"train.load_checkpoint_path to auto{also} to go on with it, or choose another folder"
        )
    return folders


def candidates(output_dir: str, wanted: str | None) -> list[pathlib.Path]:
    """The folders to resume from: the second only if the first is damaged, and so on. "auto": those
    of output_dir, most recently written first.

    Raises FileNotFoundError for a path without a checkpoint.
    """
    if not wanted:
        return []
    if wanted == "auto":
        for folder in pathlib.Path(output_dir, "checkpoints").glob("global_step_*"):
            if not (folder / "state.json").is_file():
                log.warning("%s: is not complete (no state.json), so it is ignored", folder)
        # Not by step: a run that was resumed from an earlier step leaves larger steps of the former
        # run behind.
        return sorted(complete(output_dir), key=_written, reverse=True)
    folder = pathlib.Path(wanted)
    if not (folder / "state.json").is_file():
        raise FileNotFoundError(
            f"train.load_checkpoint_path = {wanted}: no checkpoint there (no state.json)"
        )
    return [folder]


def _written(folder: pathlib.Path) -> float:
    """Time of writing, in seconds since 1970."""
    try:
        return read_state(folder)["written"]
    except Damaged:  # `resume` reports it when it gets there
        return (folder / "state.json").stat().st_mtime


def time_after(root: pathlib.Path, now: float) -> float:
    """The time of a checkpoint that is written now, in seconds since 1970: after that of all others
    in the folder, also where the clock has been set back.
    """
    return max([now, *(_written(folder) + 0.001 for folder in complete(str(root.parent)))])


def complete(output_dir: str) -> list[pathlib.Path]:
    """The complete checkpoints in a run's folder."""
    folders = sorted(pathlib.Path(output_dir, "checkpoints").glob("global_step_*"))
    return [p for p in folders if (p / "state.json").is_file()]


def step_of(folder: pathlib.Path) -> int:
    """The step of a checkpoint, by its name; -1 for a folder that has been renamed."""
    number = folder.name.rpartition("_")[2]
    return int(number) if number.isdecimal() else -1


@contextlib.contextmanager
def claim(output_dir: str, mesh: Mesh) -> Iterator[None]:
    """Creates the folder, and locks it for this run: a second live run is refused. Cleans up what a
    killed run left there. Every rank must call it. Raises ValueError or OSError on all of them.
    """
    with contextlib.ExitStack() as stack:
        with mesh.control.agreeing(OSError, ValueError):
            if mesh.main:
                folder = pathlib.Path(output_dir)
                folder.mkdir(parents=True, exist_ok=True)  # fails before anything is computed
                recover(output_dir, mesh, alone=_lock(folder, stack))
        yield


def _lock(folder: pathlib.Path, stack: contextlib.ExitStack) -> bool:
    """Whether no other process can be writing there, which some file systems cannot tell. Raises
    ValueError if one is.

    The lock belongs to the process, not to its children, and ends with it however it ends.
    """
    file = stack.enter_context((folder / ".lock").open("w"))
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise ValueError(
            f"train.output_dir = {folder}: another run is writing there; choose another folder, "
            "or wait for it to end"
        ) from error
    except OSError as error:
        log.warning(
            "%s: its file system has no locks (%s): nobody would notice two runs that write there",
            folder,
            error,
        )
        return False
    return True


def recover(output_dir: str, mesh: Mesh, *, alone: bool = True) -> None:
    """Cleans up after a killed run: renames complete checkpoints, and removes unfinished ones.

    alone: no other run is writing here; otherwise unfinished ones are only reported.
    """
    if not mesh.main:
        return
    root = pathlib.Path(output_dir, "checkpoints")
    for gone in root.glob(".global_step_*.deleted") if alone else ():
        shutil.rmtree(gone)
    for old in root.glob(".global_step_*.old"):  # killed before a new one took its name
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
            read_metadata(aside / "dcp")
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
            publish(aside, aside.with_name(aside.name[1 : -len(".partial")]))


def publish(
    aside: pathlib.Path, target: pathlib.Path, keep: int = 0, spared: Collection[str] = ()
) -> None:
    """Gives a complete checkpoint its name.   keep, spared: see `prune`; this one stays, too."""
    replace_folder(aside, target)
    log.info("checkpoint %s", target)
    prune(target.parent, keep, {target.name, *spared})


def prune(root: pathlib.Path, keep: int, spared: Collection[str]) -> None:
    """Removes old checkpoints. They lose their name first, so that none is found half removed.

    keep: how many of the folder's checkpoints stay, of which the oldest go first; 0: all.
    spared: names of folders that stay in any case.
    """
    if keep:
        written = sorted(complete(str(root.parent)), key=_written)
        may_go = [old for old in written if old.name not in spared]
        for old in may_go[: max(0, len(written) - keep)]:
            old.rename(gone := old.with_name(f".{old.name}.deleted"))
            shutil.rmtree(gone)
