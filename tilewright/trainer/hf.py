"""Hugging Face folders: config.json and safetensors, read into a model and written from one.

Fused parameters (see model.py) are put together on reading and taken apart on writing, bit for bit.
One parameter at a time is held in full, whatever the model's size, and sharded parameters (FSDP2's
DTensors) are filled and gathered in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from tilewright import adapt, lora
from tilewright._torch import pytree
from tilewright.files import open_tensors, publish, read_json, target_folder, written_aside
from tilewright.ops.block_fp8 import BlockFP8
from tilewright.ops.nf4_format import NF4, read_state
from tilewright.ops.nvfp4 import NVFP4
from tilewright.ops.quantize import Quantized
from tilewright.ops.quantized_linear import dequantize
from tilewright.registry import short
from tilewright.trainer.model import ModelConfig, Transformer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "chat_template.jinja",
)
LOAD_MODES = ("broadcast", "all_ranks")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(
    r"model(-g\d+)?-\d{5}-of-\d{5}\.safetensors"
)  # transformers removes stale ones of such names too
# Beside a quantised weight: what belongs to it, by format, and what only inference with quantised
# activations needs.
BESIDE = {
    "nf4": (
        ".absmax",
        ".quant_map",
        ".nested_absmax",
        ".nested_quant_map",
        ".quant_state.bitsandbytes__nf4",
    ),
    "nvfp4": ("_packed", "_scale", "_global_scale", "_scale_2"),
    "block_fp8": ("_scale_inv",),
}
# What weights may be that are not quantized, by safetensors' names.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
ACTIVATIONS = (
    ".input_scale",
    ".input_global_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".activation_scale",
)


def load_config(path: str | pathlib.Path) -> ModelConfig:
    """From a folder with config.json, or the file. Raises ValueError for a model that is not
    supported.
    """
    return ModelConfig.from_hf(read_config(path))


def local_folder(path: str) -> str:
    """A folder as it is; a Hugging Face Hub id downloaded. Raises FileNotFoundError, naming it,
    if it is neither.
    """
    if pathlib.Path(path).exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            path, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        )
    except (OSError, ValueError) as error:  # no network, no such repository, not the form of an id
        raise FileNotFoundError(
            f"{path}: no such file or folder, and the Hub does not give it "
            f"({' '.join(str(error).split())[:200]})"
        ) from error


def read_config(path: str | pathlib.Path) -> dict:
    file = pathlib.Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no config.json there")
    return read_json(file)


def sources(name: str, config: ModelConfig) -> list[str]:
    """The tensors on disk that make one parameter, in order."""
    stem, _, last = name.rpartition(".experts.")
    if stem:
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        return [
            f"{stem}.experts.{e}.{part}.weight" for e in range(config.num_experts) for part in parts
        ]
    if name.endswith("qkv_proj.weight"):
        return [name.replace("qkv_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
    if name.endswith("gate_up_proj.weight"):
        return [name.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
    return [name]


def fuse(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    if name.endswith(".experts.gate_up_proj"):
        return torch.stack(
            [torch.cat(pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]
        )
    if name.endswith(".experts.down_proj"):
        return torch.stack(tensors)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def split(name: str, full: torch.Tensor, config: ModelConfig) -> list[torch.Tensor]:
    """The inverse of `fuse`."""
    if name.endswith(".experts.gate_up_proj"):
        return [half for expert in full for half in expert.chunk(2)]
    if name.endswith(".experts.down_proj"):
        return list(full)
    if name.endswith("qkv_proj.weight"):
        kv = config.num_key_value_heads * config.head_dim
        return list(full.split((config.num_attention_heads * config.head_dim, kv, kv)))
    return list(full.chunk(2)) if name.endswith("gate_up_proj.weight") else [full]


class _Checkpoint:
    """Tensors of a folder, by name."""

    def __init__(self, path: str | pathlib.Path):
        folder = pathlib.Path(path)
        self.open: dict[pathlib.Path, safe_open] = {}
        block = _quantization(folder).get("weight_block_size")
        if block is not None and not (
            isinstance(block, list)
            and len(block) == 2
            and all(type(n) is int and n > 0 for n in block)
        ):
            raise ValueError(
                f"{folder / 'config.json'}: weight_block_size must be two integers of at least 1, "
                f"got "
                f"{block!r}"
            )
        self.block = (128, 128) if block is None else tuple(block)  # of block FP8
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
        """The file of a tensor, which holds it."""
        file = self._opened(self.file_of[name])
        try:
            file.get_slice(name)
        except SafetensorError as error:
            raise ValueError(
                f"{self.file_of[name]}: holds no {name}, although {INDEX} says so"
            ) from error
        return file

    def dtype(self, name: str) -> torch.dtype | None:
        """Of a tensor as it is stored; None for one that is no weight by itself."""
        return DTYPES.get(self._at(name).get_slice(name).get_dtype())

    def refused(self, name: str) -> str | None:
        """Why a tensor that is not quantized cannot be read; None if it can."""
        if self.format(name) is not None or self.dtype(name) is not None:
            return None
        kind = self._at(name).get_slice(name).get_dtype()
        return (
            f"{name} is {kind} in {self.file_of[name].name}; accepted are {', '.join(DTYPES)}, "
            f"and what is "
            "quantized with its scales beside it"
        )

    def format(self, name: str) -> str | None:
        """How a weight is quantised; None: it is not."""
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
        """Of the weight that a tensor is or, quantised, stands for."""
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
        """Elements that share a scale of a quantised weight; of BlockFP8 a square block's edge,
        or what it is.
        """
        format = self.format(name)
        if format == "nf4":
            return self._state(name)["blocksize"]
        rows, columns = self.block if format == "block_fp8" else (16, 16)
        return rows if rows == columns else f"{rows} x {columns}"

    def _tensor(self, name: str) -> torch.Tensor:
        return self._at(name).get_tensor(name)

    def quantized(self, name: str) -> Quantized:
        """Raises ValueError, naming the weight, for one that is quantised as these formats are
        not.
        """
        format, stem = self.format(name), name.removesuffix(".weight")
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
            raise ValueError(f"{stem}: cannot be read as {format} ({error.args[0]})") from error

    def read(self, name: str) -> torch.Tensor:
        """The weight, dense."""
        return self._tensor(name) if self.format(name) is None else dequantize(self.quantized(name))


def _check(model: Transformer, found: _Checkpoint) -> None:
    problems, expected = [], set()
    weights = list(adapt.base_weights(model))
    quantised = any(adapt.quantized(p) for _, p in weights)
    for name, p in weights:
        names = sources(name, model.config)
        expected |= {
            n + beside
            for n in names
            for format in [found.format(n)]
            for beside in ("", *BESIDE.get(format, ()))
        }
        missing = [n for n in names if n not in found]
        problems += [f"missing {n}" for n in missing]
        if missing:
            continue
        whole = torch.empty(adapt.shape_of(p), device="meta")
        for n, part in zip(names, split(name, whole, model.config), strict=True):
            if found.shape(n) != list(part.shape):
                problems.append(
                    f"{n} has shape {found.shape(n)}, the model's has {list(part.shape)}"
                )
        problems += [sentence for sentence in map(found.refused, names) if sentence]
        stored = [n for n in names if found.format(n) is not None]
        if stored and not quantised:
            problems.append(
                f"{stored[0]} is quantised: set lora.enable_qlora to true and lora.quant_format to "
                f"{found.format(stored[0])}"
            )
        elif like := adapt.quantized(p):
            want = lora.format_of(like[0])
            for n in stored:
                have = (found.format(n), found.group(n))
                if have != (want.name, want.group_size):
                    problems.append(
                        f"{n} is {have[0]} in groups of {have[1]}; lora.quant_format and "
                        f"lora.quant_group_size say {want.name} and {want.group_size}"
                    )
    # A tied head may be stored all the same; older files hold the rotary frequencies.
    spare = {
        n
        for n in found.file_of
        if n not in expected and not n.endswith(("rotary_emb.inv_freq", *ACTIVATIONS))
    }
    problems += [f"unexpected {n}" for n in sorted(spare - {"lm_head.weight"})]
    if problems:
        raise ValueError("the checkpoint does not fit the model:\n  " + "\n  ".join(problems))


def excluded(path: str | pathlib.Path) -> list[str]:
    """The modules that a quantised checkpoint's configuration says are not quantised; none of a
    dense one's.
    """
    folder, found = pathlib.Path(path), []
    config = _quantization(folder)
    if (folder / "hf_quant_config.json").is_file():  # modelopt's own
        config = {**_section(folder / "hf_quant_config.json", "quantization"), **config}
    for key in ("modules_to_not_convert", "llm_int8_skip_modules", "ignore", "exclude_modules"):
        names = [] if config.get(key) is None else config[key]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"{folder}: {key} of the quantization's configuration must be a list of names, got "
                f"{names!r}"
            )
        found += [name for name in names if name not in found]
    return found


def _quantization(folder: pathlib.Path) -> dict[str, Any]:
    """The quantization_config of config.json; {} of a folder without one."""
    file = folder / "config.json"
    return _section(file, "quantization_config") if file.is_file() else {}


def _section(file: pathlib.Path, key: str) -> dict[str, Any]:
    """An object within a file's; {} if it is not there or null."""
    found = read_json(file).get(key)
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"{file}: {key} must be an object, got {type(found).__name__}")
    return {} if found is None else found


def _inside(folder: pathlib.Path, name: Any, index: pathlib.Path) -> pathlib.Path:
    """The file of a folder that its index names. Raises ValueError for one that is not in the
    folder.
    """
    if not isinstance(name, str):
        raise ValueError(f"{index}: weight_map must name files, got {name!r}")
    root, relative = folder.resolve(), pathlib.PurePath(name)
    # In the Hub's cache the files of a snapshot are links to blobs.
    roots = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if (
        relative.is_absolute()
        or ".." in relative.parts
        or not any((root / relative).resolve().is_relative_to(r) for r in roots)
    ):
        raise ValueError(f"{index}: weight_map names {name!r}, which is not in the folder")
    return folder / name


def stored_dtype(path: str | pathlib.Path, *, weights: bool = True) -> torch.dtype:
    """Of a folder's weights that are not quantized: the embedding's. With weights = False, what
    config.json says, which may be the path, and float32 if it says nothing. Raises ValueError for a
    dtype that is none of DTYPES.
    """
    folder = pathlib.Path(path)
    if weights:
        found, name = _Checkpoint(folder), "model.embed_tokens.weight"
        problem = found.refused(name) if name in found else f"missing {name}"
        if problem or (dtype := found.dtype(name)) is None:
            raise ValueError(f"{folder}: {problem or f'{name} is quantized'}")
        return dtype
    config = read_config(folder)
    value = next(
        (config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None), "float32"
    )
    accepted = {short(dtype): dtype for dtype in DTYPES.values()}
    if value not in accepted:
        raise ValueError(
            f"{path}: config.json's dtype must be one of {', '.join(accepted)}, got {value!r}"
        )
    return accepted[value]


@torch.no_grad()
def load_weights(model: Transformer, path: str | pathlib.Path, *, mode: str = "broadcast") -> None:
    """Fills every parameter, in the parameter's dtype, and every quantised weight, in its format:
    with what a quantised checkpoint holds, or by quantising, one layer at a time. Adapters are left
    alone.

    mode: "broadcast": rank 0 reads and sends; "all_ranks": every rank reads.
    Raises ValueError with every missing, unexpected and mis-shaped tensor at once.
    """
    if mode not in LOAD_MODES:
        raise ValueError(f"mode must be one of {list(LOAD_MODES)}, got {mode!r}")
    many = dist.is_initialized() and dist.get_world_size() > 1
    reads = not many or mode == "all_ranks" or dist.get_rank() == 0
    found = problem = None
    if reads:
        try:
            found = _Checkpoint(path)
            _check(model, found)
        except (OSError, ValueError) as error:
            problem = error
    if many:  # all ranks fail together, or the others would wait for rank 0 forever
        verdict = [None if problem is None else str(problem)]
        dist.broadcast_object_list(verdict, src=0)
        if verdict[0] is not None and problem is None:
            problem = ValueError(verdict[0])
    if problem is not None:
        raise problem
    for name, p in adapt.base_weights(model):
        if adapt.quantized(p):
            _fill(name, p, model.config, found, many and mode == "broadcast")
            continue
        full = (
            _read(name, model.config, found).to(p.device, p.dtype)
            if reads
            else torch.empty(p.shape, dtype=p.dtype, device=p.device)
        )
        if isinstance(p, DTensor):
            source = None if mode == "all_ranks" else 0
            p.copy_(distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=source))
        else:
            if many and mode == "broadcast":
                dist.broadcast(full, src=0)
            p.copy_(full)


def _read(name: str, config: ModelConfig, found: _Checkpoint) -> torch.Tensor:
    """`fuse` of the tensors that make one parameter, never all of them and it at once."""
    first, *rest = sources(name, config)
    if not rest:
        return found.read(first)
    whole = fuse(name, [torch.empty(found.shape(n), device="meta") for n in (first, *rest)])
    whole = torch.empty_like(whole, dtype=found.read(first).dtype, device="cpu")
    for n, part in zip((first, *rest), split(name, whole, config), strict=True):
        part.copy_(found.read(n))
    return whole


def _fill(
    name: str, stored: adapt.Stored, config: ModelConfig, found: _Checkpoint | None, broadcast: bool
) -> None:
    """found: None on the ranks that do not read."""
    like, error, weights = adapt.quantized(stored)[0], None, None
    if found is not None:
        try:
            weights = _quantized(name, like, config, found)
        except ValueError as problem:
            error = problem
    if broadcast:  # what the weights look like, or why there are none
        meta = weights and _on(torch.device("meta"), weights)
        told = [(meta, None if error is None else str(error))]
        dist.broadcast_object_list(told, src=0)
        [(meta, problem)] = told
        error = error or (problem and ValueError(problem))
        if not weights:
            weights = pytree.tree_map(
                lambda t: t if t is None else torch.empty_like(t, device=like.device), meta
            )
    if error:
        raise error
    adapt.fill(stored, weights)
    if broadcast:
        for buffer in stored.buffers():
            dist.broadcast(buffer, src=0)


def _quantized(
    name: str, like: Quantized, config: ModelConfig, found: _Checkpoint
) -> list[Quantized]:
    """What fills a weight. Projections that are stored quantised stay so, bit for bit; they become
    one matrix if that is possible (`lora.join`). Dense ones that are fused are quantised as one.
    Raises ValueError for experts that are stored quantised, and cannot become one tensor.
    """
    names = sources(name, config)
    if all(found.format(n) is None for n in names):
        return [_quantize_dense(like, _read(name, config, found))]
    joined = lora.join(
        [
            _on(
                like.device,
                _quantize_dense(like, found.read(n))
                if found.format(n) is None
                else found.quantized(n),
            )
            for n in names
        ]
    )
    if len(like.shape) == 2:
        return joined
    [q, *more], E = joined, like.shape[0]
    if more or (isinstance(q, BlockFP8) and like.shape[1] % q.block[0]):
        raise ValueError(
            f"{name}: the experts are stored in {found.format(names[0])} in a way that does not "
            f"make one "
            "tensor of them (NVFP4 needs one global scale for all, NF4 scales that are not "
            "quantised, "
            "block FP8 whole blocks); start from the weights before they were quantised"
        )
    if isinstance(q, BlockFP8):
        return [
            dataclasses.replace(
                q, data=q.data.view(like.shape), scale_inv=q.scale_inv.unflatten(0, (E, -1))
            )
        ]
    parts = (
        {}
        if isinstance(q, NF4)
        else {"data": q.data.unflatten(0, (E, -1)), "scale": q.scale.unflatten(0, (E, -1))}
    )
    return [dataclasses.replace(q, shape=tuple(like.shape), **parts)]


def _quantize_dense(like: Quantized, weight: torch.Tensor) -> Quantized:
    return dataclasses.replace(lora.quantize_as(like, weight.to(like.device)), dtype=weight.dtype)


def _on(device: torch.device, q: Any) -> Any:
    return pytree.tree_map(lambda t: t if t is None else t.to(device), q)


def _full_tensors(
    model: Transformer, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face names and whole tensors on the CPU. Every rank must run it to the end:
    gathering is collective.
    """
    for name, full, own in adapt.dense_weights(model):
        for target, part in zip(
            sources(name, model.config), split(name, full, model.config), strict=True
        ):
            yield target, part.to("cpu", dtype or own, copy=True).contiguous()


def save_weights(
    model: Transformer,
    path: str | pathlib.Path,
    *,
    tokenizer_path: str | pathlib.Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a folder that transformers' from_pretrained reads: safetensors, config.json, the
    tokenizer's files. Its weights are dense, with adapters added and what is quantised dequantised.

    dtype: of the stored tensors, default the parameters' own.   max_shard_bytes: of one file; a
    tensor is in one. Files of these names, and the files of weights that a former model had there,
    are replaced, once all are written (see `files.publish`); whatever else the folder holds stays.
    Every rank must call it. Raises ValueError for a folder that is a file, or that holds an
    adapter.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    target = target_folder(path)
    if (target / adapt.ADAPTER_CONFIG).exists():
        raise ValueError(
            f"{target} holds an adapter ({adapt.ADAPTER_CONFIG}), which from_pretrained would put "
            f"on "
            "these weights; give another folder, or remove the adapter"
        )
    shards: list[dict[str, int]] = []
    held: dict[str, torch.Tensor] = {}
    with written_aside(target) if writes else contextlib.nullcontext() as aside:

        def flush():
            save_file(held, aside / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
            shards.append({n: t.numel() * t.element_size() for n, t in held.items()})
            held.clear()

        stored = None
        for name, tensor in _full_tensors(model, dtype):
            stored = stored or tensor.dtype
            if writes:
                size = sum(t.numel() * t.element_size() for t in held.values())
                if held and size + tensor.numel() * tensor.element_size() > max_shard_bytes:
                    flush()
                held[name] = tensor
        if writes:
            flush()
            there = {p.name for p in target.iterdir()}
            files = _name_shards(aside, shards, there)
            _write_config(model, aside, stored, tokenizer_path)
            weights, other = (SINGLE, INDEX) if not files else (INDEX, SINGLE)
            publish(
                aside,
                target,
                weights,
                "config.json",
                fits=_fits(target, model.config),
                first=files,
                superseded=other,
                stale=sorted(filter(SHARD.fullmatch, there - set(files))),
            )
    if dist.is_initialized():
        dist.barrier()


def _fits(folder: pathlib.Path, config: ModelConfig) -> bool:
    """Whether the config.json there describes dense weights of this shape."""
    try:
        found = read_config(folder)
        return found.get("quantization_config") is None and ModelConfig.from_hf(found) == config
    except (OSError, ValueError):
        return False


def _name_shards(folder: pathlib.Path, shards: list[dict[str, int]], taken: set[str]) -> list[str]:
    """Gives `part-*` their names, and the index, if there are several; names of several that
    are not taken.
    """
    if len(shards) == 1:
        (folder / "part-0.safetensors").rename(folder / SINGLE)
        return []
    for generation in itertools.count(1):
        stem = "model" if generation == 1 else f"model-g{generation}"
        files = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        if not taken & set(files):
            break
    weight_map = {}
    for i, (file, names) in enumerate(zip(files, shards, strict=True)):
        (folder / f"part-{i}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {
        "metadata": {"total_size": sum(sum(s.values()) for s in shards)},
        "weight_map": weight_map,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return files


def _write_config(
    model: Transformer,
    folder: pathlib.Path,
    dtype: torch.dtype,
    tokenizer_path: str | pathlib.Path | None,
) -> None:
    """With the tokenizer's files."""
    config = {**model.config.to_hf(), "dtype": short(dtype)}
    source = pathlib.Path(tokenizer_path) if tokenizer_path is not None else None
    if source is not None and source.is_dir():
        for file in tokenizer_files(source):
            shutil.copy(file, folder)
        if (
            source / "config.json"
        ).is_file():  # token ids belong to the tokenizer, not to the model's shape
            theirs = read_config(source)
            config |= {
                k: theirs[k]
                for k in ("bos_token_id", "eos_token_id", "pad_token_id")
                if k in theirs
            }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def tokenizer_files(folder: str | pathlib.Path) -> list[pathlib.Path]:
    """Those of a folder, and what belongs to generation."""
    files = (pathlib.Path(folder, name) for name in (*TOKENIZER_FILES, "generation_config.json"))
    return [file for file in files if file.is_file()]
