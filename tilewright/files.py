"""Folders that are written so that a reader finds the old files or the new ones, and files that are
read with errors that name them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

from safetensors import SafetensorError, safe_open


def target_folder(folder: str | pathlib.Path) -> pathlib.Path:
    """Where a folder is to be written: the whole path. Raises ValueError if a file has the name."""
    target = pathlib.Path(folder).resolve()
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give a folder")
    return target


@contextlib.contextmanager
def written_aside(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty folder within `target`, which is made if need be: for files that `publish` moves
    into target.
    """
    aside = target / ".saving"
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    aside.mkdir(parents=True)
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def publish(
    aside: pathlib.Path,
    target: pathlib.Path,
    weights: str,
    settings: str,
    *,
    fits: bool,
    first: Iterable[str] = (),
    superseded: str | None = None,
    stale: Iterable[str] = (),
) -> None:
    """Moves the files of `aside` into `target`, each by one rename over what has its name. All else
    there stays.

    weights: the file by which readers find the weights.   first: those that it names, under names
    that are not taken.
    settings: the file that says what the weights are; it comes last.   fits: whether the settings
    that are there fit
        the new weights too. If not they go first: a reader then fails where it would mix the two.
    superseded: a file that goes with the arrival of `weights`, because readers may prefer it.
        stale: files that go at the end.
    So a process that is killed leaves the old files or the new ones as a reader finds them, or,
    between two settings that differ, weights without settings.
    """
    names, first = {p.name for p in aside.iterdir()}, list(first)
    for name in first:
        os.replace(aside / name, target / name)
    if not fits:
        (target / settings).unlink(missing_ok=True)
    os.replace(aside / weights, target / weights)
    if superseded is not None:
        (target / superseded).unlink(missing_ok=True)
    for name in (*sorted(names - {*first, weights, settings}), settings):
        os.replace(aside / name, target / name)
    for name in stale:
        (target / name).unlink(missing_ok=True)


def replace_folder(aside: pathlib.Path, target: pathlib.Path) -> None:
    """Gives the folder `aside` the name `target`, beside it.

    A folder of that name is kept until the new one has it, and removed then.
    """
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    aside.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The JSON object that a file holds. Raises ValueError, naming the file, if it holds none."""
    try:
        found = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: must hold a JSON object, got {type(found).__name__}")
    return found


def open_tensors(file: pathlib.Path) -> safe_open:
    """Raises ValueError, naming the file, if it is no safetensors."""
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: cannot be read as safetensors ({error})") from error
