"""Reads a checkpoint's folder without running code that it names: pickles go through unpicklers
with a list of allowed types.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from tilewright.files import read_json


class Damaged(ValueError):
    """A checkpoint that is incomplete or has invalid contents."""


class Incomplete(Damaged, FileNotFoundError):
    """A checkpoint with a missing file."""


def read_state(folder: pathlib.Path) -> dict[str, Any]:
    try:
        state = read_json(folder / "state.json")
    except (OSError, ValueError) as error:
        raise Damaged(str(error)) from error
    if absent := {"step", "written", "run", "ops"} - state.keys():
        raise Damaged(f"{folder / 'state.json'}: lacks {', '.join(sorted(absent))}")
    return state


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
    """Reads DCP's metadata. A pickle may name any function of any module, to be called: this one
    allows only what belongs there.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN or (
            module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def read_metadata(folder: pathlib.Path) -> Metadata:
    """Reads the metadata of a DCP folder: its contents, and their files.

    Raises Damaged if they are not metadata, or if a file is missing or too short.
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
    except Exception as error:  # random bytes can make the unpickler raise anything
        raise Damaged(f"{path}: is not the metadata of a checkpoint: {error}") from error
    for name, size in needed.items():
        file = folder / name
        if (there := file.stat().st_size if file.is_file() else -1) < size:
            raise Damaged(
                f"{file}: is {'absent' if there < 0 else f'cut off after {there} bytes'}, and "
                f"should have {size} bytes"
            )
    return metadata


class Reader(dcp.FileSystemReader):
    """Reads a folder whose metadata have been read already."""

    def __init__(self, folder: pathlib.Path, metadata: Metadata):
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self) -> Metadata:
        return self.metadata


class Planner(dcp.DefaultLoadPlanner):
    """DCP unpickles tensors by a list of allowed types, but not numbers and names."""

    def load_bytes(self, read_item: dcp.planner.ReadItem, value: Any) -> None:
        torch.save(torch.load(value, weights_only=True), safe := io.BytesIO())
        safe.seek(0)
        super().load_bytes(read_item, safe)
