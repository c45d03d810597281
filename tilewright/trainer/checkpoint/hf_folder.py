"""Reading a Hugging Face folder: its tensors by name, dense or quantized, and their description in
its configuration.
"""

from __future__ import annotations

import pathlib
from typing import Any, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from tilewright.core.files import open_tensors, read_json
from tilewright.core.registry import short
from tilewright.nn.quantized_layers import BESIDE, DENSE_DTYPES, absent
from tilewright.ops.quant.block_fp8 import BlockFP8
from tilewright.ops.quant.nf4_format import NF4, read_state
from tilewright.ops.quant.nvfp4 import NVFP4
from tilewright.ops.quant.quantize import Quantized
from tilewright.ops.quant.quantized_linear import dequantize
from tilewright.trainer.checkpoint.hf_names import INDEX, SINGLE, read_config

# Tensors beside a quantized weight that only inference with quantized activations needs.
ACTIVATIONS = (
    ".input_scale",
    ".input_global_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".activation_scale",
)
ROWS = 4096  # of a comparison's parts: 64 MiB of rows of 8,192 numbers in bfloat16


class Folder:
    """A folder's tensors, by name."""

    def __init__(self, path: str | pathlib.Path):
        folder = pathlib.Path(path)
        self.open: dict[pathlib.Path, safe_open] = {}
        self.checksums: dict[str, str] = {}  # of the tensors that have been read
        block = _quantization(folder).get("weight_block_size")
        if block is not None and not (
            isinstance(block, list)
            and len(block) == 2
            and all(type(n) is int and n > 0 for n in block)
        ):
            raise ValueError(
                f"{folder / 'config.json'}: weight_block_size must be two integers of at least 1, "
                f"got {block!r}"
            )
        self.block = (128, 128) if block is None else tuple(block)  # block size of block FP8
        single, index = folder / SINGLE, folder / INDEX
        if single.is_file():  # before the index, as transformers does
            self.file_of = dict.fromkeys(self._opened(single).keys(), single)
        elif index.is_file():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict):
                raise ValueError(
                    f"{index}: weight_map must be an object, from tensors' names to files', got "
                    f"{type(names).__name__}"
                )
            self.file_of = {name: _inside(folder, file, index) for name, file in names.items()}
        else:
            old = (
                " (pickled *.bin weights are not read; convert them)"
                if list(folder.glob("*.bin"))
                else ""
            )
            raise FileNotFoundError(f"{folder}: no {SINGLE} or {INDEX}{old}")

    def _opened(self, file: pathlib.Path):
        if file not in self.open:
            self.open[file] = open_tensors(file)
        return self.open[file]

    def _at(self, name):
        """The open file that holds a tensor."""
        file = self._opened(self.file_of[name])
        try:
            file.get_slice(name)
        except SafetensorError as error:
            raise ValueError(
                f"{self.file_of[name]}: holds no {name}, although {INDEX} says so"
            ) from error
        return file

    def dtype(self, name: str) -> torch.dtype | None:
        """The stored dtype of a tensor; None for one that is not a weight by itself."""
        return DENSE_DTYPES.get(self._at(name).get_slice(name).get_dtype())

    def _stored_as(self, name: str) -> str | None:
        """The dtype of a tensor in safetensors' words; None if there is none."""
        return self._at(name).get_slice(name).get_dtype() if name in self.file_of else None

    def refused(self, name: str) -> str | None:
        """Why a weight cannot be read, dense or quantized; None if it can."""
        if (format := self.format(name)) is not None:
            missing = absent(format, name, self._stored_as)
            return f"{name} is {format}, without {', '.join(missing)}" if missing else None
        if self.dtype(name) is not None:
            return None
        kind = self._at(name).get_slice(name).get_dtype()
        return (
            f"{name} is {kind} in {self.file_of[name].name}; accepted are {', '.join(DENSE_DTYPES)}, "
            "and what is quantized with its scales beside it"
        )

    def format(self, name: str) -> str | None:
        """A weight's quantization format; None if it is dense."""
        for key, format in (
            (".quant_state.bitsandbytes__nf4", "nf4"),
            ("_packed", "nvfp4"),
            ("_scale_2", "nvfp4"),
            ("_scale_inv", "block_fp8"),
        ):
            if name + key in self.file_of:
                return format
        return None

    def __contains__(self, name: str) -> bool:
        return name in self.file_of or f"{name}_packed" in self.file_of

    def shape(self, name: str) -> list[int]:
        """The shape of a weight, dense or quantized."""
        format = self.format(name)
        if format == "nf4":
            return list(self._state(name)["shape"])
        if format == "nvfp4":
            packed = f"{name}_packed" if f"{name}_packed" in self.file_of else name
            *lead, last = self._shape(packed)
            return [*lead, 2 * last]
        return self._shape(name)

    def _shape(self, name: str) -> list[int]:
        return list(self._at(name).get_slice(name).get_shape())

    def _state(self, name: str) -> dict:
        key = f"{name}.quant_state.bitsandbytes__nf4"
        try:
            return read_state(key, self._tensor(key), name)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.file_of[key]}: {error}") from error

    def group(self, name: str) -> int | str:
        """Elements per scale of a quantized weight; for BlockFP8 a square block's edge, or else the
        block in words.
        """
        format = self.format(name)
        if format == "nf4":
            return self._state(name)["blocksize"]
        rows, columns = self.block if format == "block_fp8" else (16, 16)
        return rows if rows == columns else f"{rows} x {columns}"

    def _tensor(self, name: str) -> torch.Tensor:
        t = self._at(name).get_tensor(name)
        if name not in self.checksums:
            self.checksums[name] = checksum_of(t)
        return t

    def quantized(self, name: str) -> Quantized:
        """A quantized weight. Raises ValueError, naming it, if its quantization is not one of these
        formats'.
        """
        format, stem = self.format(name), name.removesuffix(".weight")
        assert format is not None  # `read` takes a dense weight
        tensors = {
            n: self._tensor(n)
            for n in (name, *(name + s for s in BESIDE[format]))
            if n in self.file_of
        }
        try:
            if format == "nf4":
                return NF4.from_safetensors(tensors, name)
            if format == "block_fp8":
                return BlockFP8.from_safetensors(tensors, name, block=self.block)
            return NVFP4.from_safetensors(tensors, name)
        except (KeyError, TypeError, ValueError) as error:
            file = self.file_of[next(iter(tensors))]
            raise ValueError(
                f"{stem}: cannot be read as {format} ({error.args[0]}), in {file}"
            ) from error

    def equal(self, name: str, other: str) -> bool:
        """Whether two dense tensors have the same values. They are compared a part at a time."""
        if any(self.format(n) is not None or self.dtype(n) is None for n in (name, other)):
            return False
        a, b = (self._at(n).get_slice(n) for n in (name, other))
        shape = a.get_shape()
        if shape != b.get_shape():
            return False
        dtype = torch.promote_types(*(cast(torch.dtype, self.dtype(n)) for n in (name, other)))
        return all(
            torch.equal(a[rows : rows + ROWS].to(dtype), b[rows : rows + ROWS].to(dtype))
            for rows in range(0, shape[0], ROWS)
        )

    def read(self, name: str) -> torch.Tensor:
        """The weight, dense."""
        return self._tensor(name) if self.format(name) is None else dequantize(self.quantized(name))


def checksum_of(t: torch.Tensor) -> str:
    """A tensor's dtype and shape, and XXH3 of its bytes as they are stored."""
    stored = t.contiguous().view(-1).view(torch.uint8).numpy().data
    return f"{short(t.dtype)} {list(t.shape)} {xxhash.xxh3_64_hexdigest(stored)}"


def excluded(path: str | pathlib.Path) -> list[str]:
    """The modules that a quantized checkpoint's configuration excludes from quantization; none for
    a dense one.
    """
    folder, names_left_out = pathlib.Path(path), []
    config = _quantization(folder)
    if (folder / "hf_quant_config.json").is_file():  # modelopt's own file
        config = {**_section(folder / "hf_quant_config.json", "quantization"), **config}
    for key in ("modules_to_not_convert", "llm_int8_skip_modules", "ignore", "exclude_modules"):
        names = [] if config.get(key) is None else config[key]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"{folder}: {key} of the quantization's configuration must be a list of names, got "
                f"{names!r}"
            )
        names_left_out += [name for name in names if name not in names_left_out]
    return names_left_out


def _quantization(folder: pathlib.Path) -> dict[str, Any]:
    """The quantization_config of config.json; {} if there is none."""
    file = folder / "config.json"
    return _section(file, "quantization_config") if file.is_file() else {}


def _section(file: pathlib.Path, key: str) -> dict[str, Any]:
    """An object within a file's JSON; {} if it is missing or null."""
    section = read_json(file).get(key)
    if section is not None and not isinstance(section, dict):
        raise ValueError(f"{file}: {key} must be an object, got {type(section).__name__}")
    return {} if section is None else section


def _inside(folder: pathlib.Path, name: Any, index: pathlib.Path) -> pathlib.Path:
    """The path of a file that the index names. Raises ValueError for a file outside the folder."""
    if not isinstance(name, str):
        raise ValueError(f"{index}: weight_map must name files, got {name!r}")
    root, relative = folder.resolve(), pathlib.PurePath(name)
    # In the Hub's cache a snapshot's files are links to blobs.
    roots = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if (
        relative.is_absolute()
        or ".." in relative.parts
        or not any((root / relative).resolve().is_relative_to(r) for r in roots)
    ):
        raise ValueError(f"{index}: weight_map names {name!r}, which is not in the folder")
    return folder / name


def stored_dtype(path: str | pathlib.Path, *, weights: bool = True) -> torch.dtype:
    """The dtype of a folder's dense weights: the embedding's. With weights = False, the dtype in
    config.json (`path` may be that file), or float32 if it has none. Raises ValueError for a dtype
    that is not in DENSE_DTYPES.
    """
    folder = pathlib.Path(path)
    if weights:
        stored, name = Folder(folder), "model.embed_tokens.weight"
        problem = stored.refused(name) if name in stored else f"missing {name}"
        if problem or (dtype := stored.dtype(name)) is None:
            raise ValueError(f"{folder}: {problem or f'{name} is quantized'}")
        return dtype
    config = read_config(folder)
    value = next(
        (config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None), "float32"
    )
    accepted = {short(dtype): dtype for dtype in DENSE_DTYPES.values()}
    if value not in accepted:
        raise ValueError(
            f"{path}: config.json's dtype must be one of {', '.join(accepted)}, got {value!r}"
        )
    return accepted[value]
