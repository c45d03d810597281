"""Publishes files and folders atomically, and reads files with errors that name the file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


def target_folder(folder: str | pathlib.Path) -> pathlib.Path:
    """The absolute path of a folder to write. Raises ValueError if it is a file."""
    target = pathlib.Path(folder).resolve()
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give a folder")
    return target


@contextlib.contextmanager
def locked(file: pathlib.Path, why: str) -> Iterator[None]:
    """Within, no other process has this lock. Raises ValueError with `why` where one has it."""
    import fcntl  # which Windows has not

    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(why) from error
        yield


@contextlib.contextmanager
def written_aside(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty temporary folder within `target` (created if needed) for files that `publish` moves
    into `target`.
    """
    aside = target / ".saving"
    shutil.rmtree(aside, ignore_errors=True)  # left by a killed process
    aside.mkdir(parents=True)
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def copy_into(source: str | pathlib.Path, folder: pathlib.Path) -> None:
    """Copies a file, or a folder of files, into a folder."""
    source = pathlib.Path(source)
    if source.is_dir():
        shutil.copytree(source, folder / source.name)
    else:
        shutil.copy(source, folder)


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
    """Moves the files of `aside` into `target`, each by one rename, and leaves other files there.

    If the process is killed, a reader finds the old files, the new ones, or, if the settings
    differ, weights without settings.

    Args:
        aside: The folder of the new files.
        target: The folder that readers open.
        weights: The file by which readers find the weights.
        settings: The file that describes the weights; it is moved last.
        fits: Whether the old settings also fit the new weights. If not, they are removed first, so
            that a reader fails instead of mixing the two.
        first: Files that `weights` refers to; `target` has no files of these names.
        superseded: A file to remove when `weights` arrives, because readers may prefer it.
        stale: Files to remove at the end.
    """
    names = {str(p.relative_to(aside)) for p in aside.rglob("*") if p.is_file()}
    first = list(first)
    for name in first:
        os.replace(aside / name, target / name)
    if not fits:
        (target / settings).unlink(missing_ok=True)
    os.replace(aside / weights, target / weights)
    if superseded is not None:
        (target / superseded).unlink(missing_ok=True)
    for name in (*sorted(names - {*first, weights, settings}), settings):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(aside / name, target / name)
    for name in stale:
        (target / name).unlink(missing_ok=True)


def replace_folder(aside: pathlib.Path, target: pathlib.Path) -> None:
    """Renames the folder `aside` to `target`, in the same parent folder.

    An existing `target` is removed only after the rename.
    """
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    aside.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def folder_size(folder: pathlib.Path) -> int:
    """Bytes of the files below a folder; those that are removed meanwhile are not counted."""
    size = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(os.path.join(at, name)).st_size
    return size


PROBE = 1 << 24  # bytes: what cannot be written of a file of tensors is more, as a rule


def no_space(folder: pathlib.Path) -> str | None:
    """The system's message if a folder has no space left, else None. A library that could not write
    there may only report its position in a file.
    """
    probe = folder / ".space"
    try:
        with probe.open("wb") as file:
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


@contextlib.contextmanager
def writing(file: str | pathlib.Path) -> Iterator[None]:
    """Raises OSError, naming the file, if safetensors cannot write it: its error is no OSError."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{file}: cannot be written ({error})") from error


def write_text(file: pathlib.Path, text: str) -> None:
    """Writes a file aside and renames it: a reader finds the old contents or the new ones."""
    aside = file.with_name(f".{file.name}.partial")
    aside.write_text(text, encoding="utf-8")
    aside.replace(file)


def check_writable(file: pathlib.Path, named: str) -> None:
    """Checks that `write_text` will be able to write a file. Raises ValueError, naming the option
    `named` and the file.
    """
    folder, wrong = file.absolute().parent, None
    try:
        if not folder.is_dir():
            wrong = f"there is no folder {folder}"
        elif file.is_dir():
            wrong = "is a folder; give a file"
        else:
            probe = file.with_name(f".{file.name}.partial")
            probe.touch()
            probe.unlink()
    except OSError as error:
        wrong = f"cannot be written: {error.strerror}"
    if wrong is not None:
        raise ValueError(f"{named} {file}: {wrong}")


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, naming the file, if it holds none."""
    try:
        document = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is not valid JSON ({error})") from error
    if not isinstance(document, dict):
        raise ValueError(f"{file}: must hold a JSON object, got {type(document).__name__}")
    return document


def open_tensors(file: pathlib.Path) -> safe_open:
    """Opens a safetensors file. Raises ValueError, naming the file, if it is not one."""
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: cannot be read as safetensors ({error})") from error


def save_tensors(
    file: str | pathlib.Path, tensors: Mapping[str, torch.Tensor], about: Any = None
) -> None:
    """Writes tensors of any dtype, and JSON, for `load_tensors`: a safetensors file of bytes."""
    kinds = {n: [str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in tensors.items()}
    # Copies: tensors may share memory, which a file cannot say.
    data = {
        n: t.detach().cpu().contiguous().view(-1).view(torch.uint8).clone()
        for n, t in tensors.items()
    }
    with writing(file):
        save_file(data, file, {"kinds": json.dumps(kinds), "about": json.dumps(about)})


def load_tensors(file: str | pathlib.Path) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors of `save_tensors`, and the JSON."""
    with open_tensors(pathlib.Path(file)) as opened:
        about = opened.metadata()
        tensors = {
            name: opened.get_tensor(name).view(getattr(torch, dtype)).view(shape)
            for name, (dtype, shape) in json.loads(about["kinds"]).items()
        }
    return tensors, json.loads(about["about"])


def is_hub_id(path: str) -> bool:
    """Whether a path can only be an id on the Hugging Face Hub: NAME or OWNER/NAME. If there is a
    folder OWNER here, OWNER/NAME is taken for a mistyped path in it.
    """
    local = pathlib.Path(path)
    return (
        re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path) is not None
        and not local.exists()
        and ("/" not in path or not local.parent.is_dir())
    )
