"""Reads a checkpoint's folder without running code that it names: pickles go through unpicklers
with a list of allowed types.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pathlib
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor, Shard

from tilewright._torch import dtensor_of, parts_of_shard
from tilewright.files import read_json
from tilewright.nn.sharded import is_sharded
from tilewright.trainer.exchange import crosses_ranks


@crosses_ranks
class Damaged(ValueError):
    """A checkpoint that is incomplete or has invalid contents."""


@crosses_ranks
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


def _member(owner: Any, name: str) -> enum.Enum:
    """What Python 3.11.0 to 3.11.3 name as builtins.getattr in a pickle of an enum's member."""
    if not isinstance(owner, enum.EnumMeta):
        raise pickle.UnpicklingError(f"it names builtins.getattr of {owner!r:.60}")
    return owner[name]


class _Unpickler(pickle.Unpickler):
    """Reads DCP's metadata. A pickle may name any function of any module, to be called: this one
    allows only what belongs there.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN or (
            module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)
        ):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
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


class Parts:
    """A DTensor whose shard has rows of each of several parts of the whole (see
    `_torch.strided_shard`), for DCP: one chunk per part. DCP takes a shard for one chunk.
    """

    def __init__(self, tensor: DTensor):
        self.whole = tensor.size()
        [axis] = [i for i, at in enumerate(tensor.placements) if parts_of_shard(at) > 1]
        self.number, dim = parts_of_shard(tensor.placements[axis]), tensor.placements[axis].dim
        if dim != 0:
            raise ValueError(f"parts must be of rows, got dimension {dim}")
        shape = torch.Size([self.whole[0] // self.number, *self.whole[1:]])
        placements = list(tensor.placements)
        placements[axis] = Shard(0)
        self.parts = [
            dtensor_of(part, tensor.device_mesh, placements, shape, tensor.stride())
            for part in tensor.to_local().chunk(self.number)
        ]

    def size(self) -> torch.Size:
        return self.whole

    def _offset(self, i: int, offsets: torch.Size) -> torch.Size:
        return torch.Size([offsets[0] + i * self.parts[i].shape[0], *offsets[1:]])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        chunks = [part.__create_chunk_list__()[0] for part in self.parts]
        return [
            dataclasses.replace(chunk, offsets=self._offset(i, chunk.offsets))
            for i, chunk in enumerate(chunks)
        ]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        items = []
        for part, chunk in zip(self.parts, self.__create_chunk_list__(), strict=True):
            [item] = part.__create_write_items__(fqn, part)
            data = dataclasses.replace(item.tensor_data, chunk=chunk, size=self.whole)
            index = dataclasses.replace(item.index, offset=chunk.offsets)
            items.append(dataclasses.replace(item, index=index, tensor_data=data))
        return items

    def shard(self, index: MetadataIndex) -> torch.Tensor:
        offsets = [chunk.offsets for chunk in self.__create_chunk_list__()]
        return self.parts[offsets.index(index.offset)].to_local()


def _in_parts(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name: Parts(t) if is_sharded(t) and max(map(parts_of_shard, t.placements)) > 1 else t
        for name, t in tensors.items()
    }


class SavePlanner(dcp.DefaultSavePlanner):
    """Writes such tensors as `Parts`."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = _in_parts(self.state_dict)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.shard(index) if isinstance(found, Parts) else super().lookup_object(index)


class Planner(dcp.DefaultLoadPlanner):
    """DCP unpickles tensors by a list of allowed types, but not numbers and names."""

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = _in_parts(self.state_dict)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found = self.state_dict[index.fqn]
        return found.shard(index) if isinstance(found, Parts) else super().lookup_tensor(index)

    def load_bytes(self, read_item: dcp.planner.ReadItem, value: Any) -> None:
        torch.save(torch.load(value, weights_only=True), safe := io.BytesIO())
        safe.seek(0)
        super().load_bytes(read_item, safe)
