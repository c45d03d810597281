"""Reads a checkpoint's folder without running code that it names: pickles go through unpicklers
with a list of allowed types. state.json, which is written last, has a checksum of every other file
of the checkpoint, and one of itself.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import pathlib
import pickle
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.tensor import DTensor, Shard

from tilewright.core.files import read_json, write_text
from tilewright.core.torch_names import dtensor_of, parts_of_shard
from tilewright.nn.sharded import is_sharded
from tilewright.trainer.models.shared import dim_of
from tilewright.trainer.parallel.exchange import crosses_ranks


@crosses_ranks
class Damaged(ValueError):
    """A checkpoint that is incomplete or has invalid contents."""


@crosses_ranks
class Incomplete(Damaged, FileNotFoundError):
    """A checkpoint with a missing file."""


NO_CHECKSUM = "0" * 16  # in whose place the file has its checksum


_KINDS = {"step": int, "written": int | float, "run": dict, "ops": dict}  # of state.json


def write_state(folder: pathlib.Path, state: dict[str, Any]) -> None:
    """Writes state.json with its own checksum, in its last line."""
    text = json.dumps({**state, "checksum": NO_CHECKSUM}, indent=1) + "\n"
    before, _, after = text.rpartition(NO_CHECKSUM)
    write_text(folder / "state.json", before + xxhash.xxh3_64_hexdigest(text.encode()) + after)


def read_state(folder: pathlib.Path) -> dict[str, Any]:
    """What `write_state` wrote. Raises Damaged if it is not that."""
    file = folder / "state.json"
    try:
        state, text = read_json(file), file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise Damaged(str(error)) from error
    if absent := _KINDS.keys() - state.keys():
        raise Damaged(f"{file}: lacks {', '.join(sorted(absent))}")
    for name, kind in _KINDS.items():
        if not isinstance(state[name], kind):
            raise Damaged(f"{file}: {name} is {state[name]!r:.60}")
    own = str(state.pop("checksum", ""))  # none in those of earlier versions, as "files"
    if own or "files" in state:
        before, _, after = text.rpartition(own) if own else ("", "", "")
        there = xxhash.xxh3_64_hexdigest((before + NO_CHECKSUM + after).encode())
        if own != there:
            raise Damaged(f"{file}: has the checksum {there}, and says {own or 'none'}")
    return state


BLOCK = 1 << 22  # bytes that are read at a time: a core's cache holds them


def checksum(file: pathlib.Path) -> str:
    """XXH3 of a file's bytes."""
    digest, block = xxhash.xxh3_64(), memoryview(bytearray(BLOCK))
    with file.open("rb", buffering=0) as opened:
        while size := opened.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def checksums(folder: pathlib.Path, rank: int) -> dict[str, dict[str, Any]]:
    """Sizes and checksums of the files that a rank has written, by their paths in the folder."""
    files = [folder / f"random_{rank}.safetensors", *sorted(folder.glob(f"dcp/__{rank}_*"))]
    if rank == 0:
        files.append(folder / "dcp/.metadata")
    return {
        str(file.relative_to(folder)): {"bytes": file.stat().st_size, "xxh3": checksum(file)}
        for file in files
    }


def verify(folder: pathlib.Path, files: dict[str, dict[str, Any]]) -> None:
    """Raises Damaged if one of these files of state.json has another size or checksum."""
    for name, wanted in files.items():
        file = folder / name
        if not file.is_file():
            raise Incomplete(f"{file}: is absent, so that {folder.name} is not a whole checkpoint")
        if (there := file.stat().st_size) < wanted["bytes"]:
            raise Damaged(_cut_off(file, there, wanted["bytes"]))
        if (xxh3 := checksum(file)) != wanted["xxh3"]:
            raise Damaged(f"{file}: has the checksum {xxh3}, and state.json says {wanted['xxh3']}")


def share(
    folder: pathlib.Path, state: dict[str, Any], rank: int, size: int
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The files that one of `size` ranks checks: those that are read at once, and those with
    tensors, which are large.
    """
    files = state.get("files")
    if files is None:
        raise Damaged(
            f"{folder} was written by a version that recorded no checksums; "
            "train.verify_checkpoint = false reads it nevertheless"
        )
    own = sorted(files.items())[rank::size]
    large = {name: file for name, file in own if name.endswith(".distcp")}
    return {name: file for name, file in own if name not in large}, large


def _cut_off(file: pathlib.Path, there: int, size: int) -> str:
    return f"{file}: is cut off after {there} bytes, and should have {size} bytes"


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
    members: Any = owner
    return members[name]


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
        if not file.is_file():
            raise Damaged(f"{file}: is absent, and should have {size} bytes")
        if (there := file.stat().st_size) < size:
            raise Damaged(_cut_off(file, there, size))
    return metadata


class Reader(FileSystemReader):
    """Reads a folder whose metadata have been read already."""

    def __init__(self, folder: pathlib.Path, metadata: Metadata):
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self) -> Metadata:
        return self.metadata


class InParts:
    """A DTensor whose shard has rows of each of several parts of the whole (see
    `torch_names.strided_shard`), for DCP: one chunk per part. DCP takes a shard for one chunk.
    """

    def __init__(self, tensor: DTensor):
        self.whole = tensor.size()
        [axis] = [i for i, at in enumerate(tensor.placements) if parts_of_shard(at) > 1]
        at = tensor.placements[axis]
        self.number, dim = parts_of_shard(at), dim_of(at)
        if dim != 0:
            raise ValueError(f"parts must be of rows, got dimension {dim}")
        shape = torch.Size([self.whole[0] // self.number, *self.whole[1:]])
        placements = list(tensor.placements)
        placements[axis] = Shard(0)
        self.parts: list[Any] = [  # DTensors
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
        assert index.offset is not None  # a chunk has one
        offsets = [chunk.offsets for chunk in self.__create_chunk_list__()]
        return self.parts[offsets.index(index.offset)].to_local()


def _in_parts(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name: InParts(t) if is_sharded(t) and max(map(parts_of_shard, t.placements)) > 1 else t
        for name, t in tensors.items()
    }


class SavePlanner(DefaultSavePlanner):
    """Writes such tensors as `InParts`."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = _in_parts(self.state_dict)

    def lookup_object(self, index: MetadataIndex) -> Any:
        t = self.state_dict[index.fqn]
        return t.shard(index) if isinstance(t, InParts) else super().lookup_object(index)


class Planner(DefaultLoadPlanner):
    """DCP unpickles tensors by a list of allowed types, but not numbers and names."""

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = _in_parts(self.state_dict)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        t = self.state_dict[index.fqn]
        return t.shard(index) if isinstance(t, InParts) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        torch.save(torch.load(value, weights_only=True), safe := io.BytesIO())
        safe.seek(0)
        super().load_bytes(read_item, safe)
