"""Hugging Face folders: config.json and safetensors, read into a model and written from one.

One parameter at a time is in memory in full, whatever the model's size and the files': sharded
parameters (FSDP2's DTensors) are filled and gathered in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pathlib
import re
from collections.abc import Iterator

import torch
import torch.distributed as dist

from tilewright.core.files import copy_into, publish, read_json, target_folder, written_aside
from tilewright.core.registry import short
from tilewright.nn.peft import ADAPTER_CONFIG
from tilewright.nn.weights import dense_weights
from tilewright.trainer.checkpoint.hf_folder import excluded, stored_dtype
from tilewright.trainer.checkpoint.hf_load import LOAD_MODES, load_weights, origin
from tilewright.trainer.checkpoint.hf_names import (
    CHAT_TEMPLATES,
    INDEX,
    SINGLE,
    fuse,
    load_config,
    local_folder,
    read_config,
    rows_of,
    shape_of,
    sources,
    split,
)
from tilewright.trainer.checkpoint.hf_write import Shard
from tilewright.trainer.models.head import AdaptedHead
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.shared import PLAIN
from tilewright.trainer.parallel.parts import Parts, parts_of

__all__ = [
    "INDEX",
    "LOAD_MODES",
    "SINGLE",
    "TOKENIZER_FILES",
    "excluded",
    "fuse",
    "load_config",
    "load_weights",
    "local_folder",
    "origin",
    "read_config",
    "read_json",
    "rows_of",
    "save_weights",
    "shape_of",
    "sources",
    "split",
    "stored_dtype",
    "tokenizer_files",
]


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
# transformers removes stale files of such names too.
SHARD = re.compile(r"model(-g\d+)?-\d{5}-of-\d{5}\.safetensors")


def full_tensors(parts: Parts, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields Hugging Face names and full tensors on the CPU. Every rank must exhaust it:
    gathering is collective. Parameters that are rows of one tensor are held until all are there.
    """
    config, held = _written(parts), {}
    for name, full, own in parts.of_all_ranks(dense_weights(parts.model)):
        rows = rows_of(name, config)
        for target, part in zip(sources(name, config), split(name, full, config), strict=True):
            wanted = own if name.endswith(PLAIN) else dtype or own
            part = part.to("cpu", wanted).contiguous()
            if rows is not None:
                held[target] = {**held.get(target, {}), rows.first: part}
                if sum(map(len, held[target].values())) < rows.all:
                    continue
                part = torch.cat([t for _, t in sorted(held.pop(target).items())])
            yield target, part


def _written(parts: Parts) -> ModelConfig:
    """The shape of dense weights: a head with an adapter is no longer tied to the embedding."""
    config = parts.whole.config
    if not config.tied or not isinstance(parts.whole.head_layer, AdaptedHead):
        return config
    return dataclasses.replace(config, tie_word_embeddings=False)


def save_weights(
    model: Transformer | Parts,
    path: str | pathlib.Path,
    *,
    tokenizer_path: str | pathlib.Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a folder that transformers' from_pretrained reads: safetensors, config.json, the
    tokenizer's files.

    Weights are dense: adapters are merged and quantized weights dequantized. Files of these names,
    and the weight files of a former model there, are replaced once all are written (see
    `files.publish`); other files in the folder are kept. Every rank must call it.

    Args:
        model: the model, or its parts. Parameters may be sharded; one at a time is gathered.
        path: the folder, which may exist.
        tokenizer_path: a folder whose tokenizer's files are copied; None: none.
        dtype: the dtype of stored tensors, but for a router's bias for the choice; default:
            the parameters' own.
        max_shard_bytes: maximum size of a file; tensors are not split.

    Raises:
        ValueError: the folder is a file, or holds an adapter.
    """
    parts, writes = parts_of(model), not dist.is_initialized() or dist.get_rank() == 0
    target = target_folder(path)
    if (target / ADAPTER_CONFIG).exists():
        raise ValueError(
            f"{target} holds an adapter ({ADAPTER_CONFIG}), which from_pretrained would put "
            "on these weights; give another folder, or remove the adapter"
        )
    shards: list[dict[str, int]] = []
    with written_aside(target) if writes else contextlib.nullcontext() as aside:
        stored = shard = None
        for name, tensor in full_tensors(parts, dtype):
            stored = stored or tensor.dtype
            if aside is None:
                continue
            if shard is None or shard.full(name, tensor, max_shard_bytes):
                if shard is not None:
                    shard.close()
                shard = Shard(aside / f"part-{len(shards)}.safetensors")
                shards.append(shard.sizes)
            shard.add(name, tensor)
        if aside is not None:
            assert shard is not None and stored is not None  # a model has tensors
            shard.close()
            there = {p.name for p in target.iterdir()}
            files = _name_shards(aside, shards, there)
            _write_config(_written(parts), aside, stored, tokenizer_path)
            weights, other = (SINGLE, INDEX) if not files else (INDEX, SINGLE)
            publish(
                aside,
                target,
                weights,
                "config.json",
                fits=_fits(target, _written(parts)),
                first=files,
                superseded=other,
                stale=sorted(filter(SHARD.fullmatch, there - set(files))),
            )
    if dist.is_initialized():
        dist.barrier()


def _fits(folder: pathlib.Path, config: ModelConfig) -> bool:
    """Whether the folder's config.json describes dense weights of this shape."""
    try:
        there = read_config(folder)
        return there.get("quantization_config") is None and (ModelConfig.from_hf(there) == config)
    except (OSError, ValueError):
        return False


def _name_shards(folder: pathlib.Path, shards: list[dict[str, int]], taken: set[str]) -> list[str]:
    """Gives `part-*` their final names; several get names that are not taken, and an index.
    Returns the names of several.
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
    shape: ModelConfig,
    folder: pathlib.Path,
    dtype: torch.dtype,
    tokenizer_path: str | pathlib.Path | None,
) -> None:
    """Writes config.json and the tokenizer's files."""
    config = {**shape.to_hf(), "dtype": short(dtype)}
    source = pathlib.Path(tokenizer_path) if tokenizer_path is not None else None
    if source is not None and source.is_dir():
        for file in tokenizer_files(source):
            copy_into(file, folder)
        # Token ids depend on the tokenizer, not on the model's shape.
        if (source / "config.json").is_file():
            theirs = read_config(source)
            config |= {
                k: theirs[k]
                for k in ("bos_token_id", "eos_token_id", "pad_token_id")
                if k in theirs and config.get(k) is None
            }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def tokenizer_files(folder: str | pathlib.Path) -> list[pathlib.Path]:
    """The tokenizer's files in a folder, the folder of its other chat templates, and
    generation_config.json.
    """
    names = (*TOKENIZER_FILES, CHAT_TEMPLATES, "generation_config.json")
    return [file for name in names if (file := pathlib.Path(folder, name)).exists()]
