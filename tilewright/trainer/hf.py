"""Hugging Face folders: config.json and safetensors, read into a model and written from one.

Fused parameters (see model.py) are put together on reading and taken apart on writing, bit for bit. One parameter at a
time is held in full, whatever the model's size, and sharded parameters (FSDP2's DTensors) are filled and gathered in
place.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from tilewright.trainer.model import ModelConfig, Transformer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
                   "tokenizer.model", "added_tokens.json", "chat_template.jinja")
LOAD_MODES = ("broadcast", "all_ranks")


def load_config(path: str | pathlib.Path) -> ModelConfig:
    """From a folder with config.json, or the file. Raises ValueError for a model that is not supported."""
    return ModelConfig.from_hf(read_config(path))


def read_json(file: pathlib.Path) -> Any:
    """Raises ValueError, naming the file, if it does not hold JSON."""
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: is not valid JSON ({error})") from error


def read_config(path: str | pathlib.Path) -> dict:
    file = pathlib.Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no config.json there")
    found = read_json(file)
    if not isinstance(found, dict):
        raise ValueError(f"{file}: must hold a JSON object, got {type(found).__name__}")
    return found


def sources(name: str, config: ModelConfig) -> list[str]:
    """The tensors on disk that make one parameter, in order."""
    stem, _, last = name.rpartition(".experts.")
    if stem:
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        return [f"{stem}.experts.{e}.{part}.weight" for e in range(config.num_experts) for part in parts]
    if name.endswith("qkv_proj.weight"):
        return [name.replace("qkv_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
    if name.endswith("gate_up_proj.weight"):
        return [name.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
    return [name]


def fuse(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    if name.endswith(".experts.gate_up_proj"):
        return torch.stack([torch.cat(pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)])
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
        index = folder / "model.safetensors.index.json"
        self.open: dict[pathlib.Path, safe_open] = {}
        if index.is_file():
            self.file_of = {k: folder / f for k, f in read_json(index)["weight_map"].items()}
        elif (folder / "model.safetensors").is_file():
            file = folder / "model.safetensors"
            self.file_of = dict.fromkeys(self._opened(file).keys(), file)
        else:
            old = " (pickled *.bin weights are not read; convert them)" if list(folder.glob("*.bin")) else ""
            raise FileNotFoundError(f"{folder}: no model.safetensors or model.safetensors.index.json{old}")

    def _opened(self, file: pathlib.Path):
        if file not in self.open:
            try:
                self.open[file] = safe_open(file, "pt")
            except SafetensorError as error:
                raise ValueError(f"{file}: cannot be read as safetensors ({error})") from error
        return self.open[file]

    def _at(self, name):
        return self._opened(self.file_of[name])

    def shape(self, name: str) -> list[int]:
        return list(self._at(name).get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        return self._at(name).get_tensor(name)


def _check(model: Transformer, found: _Checkpoint) -> None:
    problems, expected = [], set()
    for name, p in model.named_parameters():
        names = sources(name, model.config)
        expected |= set(names)
        missing = [n for n in names if n not in found.file_of]
        problems += [f"missing {n}" for n in missing]
        if not missing:
            shapes = [torch.empty(found.shape(n), device="meta") for n in names]
            try:
                made = list(fuse(name, shapes).shape)
            except RuntimeError:
                made = [list(s.shape) for s in shapes]
            if made != list(p.shape):
                problems.append(f"{', '.join(names[:3])} give shape {made}, the model has {list(p.shape)}")
    # A tied head may be stored all the same; older files hold the rotary frequencies.
    spare = {n for n in found.file_of if n not in expected and not n.endswith("rotary_emb.inv_freq")}
    problems += [f"unexpected {n}" for n in sorted(spare - {"lm_head.weight"})]
    if problems:
        raise ValueError("the checkpoint does not fit the model:\n  " + "\n  ".join(problems))


@torch.no_grad()
def load_weights(model: Transformer, path: str | pathlib.Path, *, mode: str = "broadcast") -> None:
    """Fills every parameter, in the parameter's dtype.

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
    if many:   # all ranks fail together, or the others would wait for rank 0 forever
        verdict = [None if problem is None else str(problem)]
        dist.broadcast_object_list(verdict, src=0)
        if verdict[0] is not None and problem is None:
            problem = ValueError(verdict[0])
    if problem is not None:
        raise problem
    for name, p in model.named_parameters():
        full = (fuse(name, [found.read(n) for n in sources(name, model.config)]).to(p.device, p.dtype) if reads
                else torch.empty(p.shape, dtype=p.dtype, device=p.device))
        if isinstance(p, DTensor):
            source = None if mode == "all_ranks" else 0
            p.copy_(distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=source))
        else:
            if many and mode == "broadcast":
                dist.broadcast(full, src=0)
            p.copy_(full)


def _full_tensors(model: Transformer, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face names and whole tensors on the CPU. Every rank must run it to the end: gathering is collective."""
    for name, p in model.named_parameters():
        full = p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
        for target, part in zip(sources(name, model.config), split(name, full, model.config), strict=True):
            yield target, part.to("cpu", dtype or p.dtype, copy=True).contiguous()


def save_weights(model: Transformer, path: str | pathlib.Path, *, tokenizer_path: str | pathlib.Path | None = None,
                 dtype: torch.dtype | None = None, max_shard_bytes: int = 5 * 10**9) -> None:
    """Writes a folder that transformers' from_pretrained reads: safetensors, config.json, the tokenizer's files.

    dtype: of the stored tensors, default the parameters' own. Written aside and renamed; every rank must call it.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    target = pathlib.Path(path)
    aside = target.with_name(f".{target.name}.partial")
    if writes:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    shards: list[dict[str, int]] = []
    held: dict[str, torch.Tensor] = {}

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
        _finish(model, aside, shards, stored, tokenizer_path)
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
    if dist.is_initialized():
        dist.barrier()


def _finish(model, folder, shards, dtype, tokenizer_path):
    if len(shards) == 1:
        (folder / "part-0.safetensors").rename(folder / "model.safetensors")
    else:
        weight_map = {}
        for i, names in enumerate(shards):
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            (folder / f"part-{i}.safetensors").rename(folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": sum(sum(s.values()) for s in shards)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    config = {**model.config.to_hf(), "dtype": str(dtype).removeprefix("torch.")}
    source = pathlib.Path(tokenizer_path) if tokenizer_path is not None else None
    if source is not None and source.is_dir():
        for file in (*TOKENIZER_FILES, "generation_config.json"):
            if (source / file).is_file():
                shutil.copy(source / file, folder / file)
        if (source / "config.json").is_file():   # token ids belong to the tokenizer, not to the model's shape
            theirs = read_config(source)
            config |= {k: theirs[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in theirs}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
