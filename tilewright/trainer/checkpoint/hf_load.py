"""Fills a model from a Hugging Face folder. One parameter at a time is in memory in full, whatever
the model's size; sharded parameters (FSDP2's DTensors) are filled in place.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Collection, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from tilewright.core.registry import short
from tilewright.core.torch_names import pytree
from tilewright.nn.quantized_layers import (
    BESIDE,
    QuantFormat,
    QuantizedExperts,
    QuantizedLinear,
    format_of,
    join,
    quantize_as,
)
from tilewright.nn.sharded import assign
from tilewright.nn.weights import base_weights, fill, quantized, shape_of
from tilewright.ops.quant.block_fp8 import BlockFP8
from tilewright.ops.quant.nf4_format import NF4
from tilewright.ops.quant.nvfp4 import NVFP4
from tilewright.ops.quant.quantize import Quantized
from tilewright.trainer.checkpoint.hf_folder import ACTIVATIONS, Folder
from tilewright.trainer.checkpoint.hf_head import EMBEDDING, HEAD, stores_another_head
from tilewright.trainer.checkpoint.hf_names import fuse, rows_of, sources, split
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.parallel import exchange
from tilewright.trainer.parallel.parts import Parts, many, parts_of

LOAD_MODES = ("broadcast", "all_ranks")


def _otherwise_quantized(
    name: str, config: ModelConfig, folder: Folder, like: list[Quantized], any_quantized: bool
) -> Iterator[str]:
    """Why a parameter cannot be filled with weights that are stored quantized.   like: its own
    quantized weights; [] if it is dense.   any_quantized: whether the model has some.
    """
    stored = [n for n in sources(name, config) if folder.format(n) is not None]
    if stored and rows_of(name, config) is not None:
        yield (
            f"{stored[0]} is {folder.format(stored[0])}, and {name} would be some of its rows: set "
            "model.merge_qkv to true"
        )
    elif stored and not any_quantized:
        yield (
            f"{stored[0]} is quantized: set lora.enable_qlora to true and lora.quant_format to "
            f"{folder.format(stored[0])}"
        )
    elif like:
        want = format_of(like[0])
        assert isinstance(want, QuantFormat)  # by which the model was quantized
        for n in stored:
            have = (folder.format(n), folder.group(n))
            if have != (want.name, want.group_size):
                yield (
                    f"{n} is {have[0]} in groups of {have[1]}; lora.quant_format and "
                    f"lora.quant_group_size say {want.name} and {want.group_size}"
                )


def _check_fits(model: Transformer, folder: Folder, without: Collection[str]) -> None:
    problems, expected = [], set()
    weights = [(name, p) for name, p in base_weights(model) if name not in without]
    any_quantized = any(quantized(p) for _, p in weights)
    for name, p in weights:
        names = sources(name, model.config)
        expected |= {
            n + beside
            for n in names
            for format in [folder.format(n)]
            for beside in ("", *(BESIDE[format] if format else ()))
        }
        missing = [n for n in names if n not in folder]
        problems += [f"missing {n}" for n in missing]
        if missing:
            continue
        whole = torch.empty(shape_of(p), device="meta")
        rows = rows_of(name, model.config)
        for n, part in zip(names, split(name, whole, model.config), strict=True):
            shape = list(part.shape) if rows is None else [rows.all, *part.shape[1:]]
            if folder.shape(n) != shape:
                problems.append(f"{n} has shape {folder.shape(n)}, the model's has {shape}")
        problems += [sentence for sentence in map(folder.refused, names) if sentence]
        problems += _otherwise_quantized(name, model.config, folder, quantized(p), any_quantized)
    # A tied head may be stored nevertheless, if it is the embedding; older files contain the rotary
    # frequencies.
    spare = {
        n
        for n in folder.file_of
        if n not in expected
        and not n.endswith(("rotary_emb.inv_freq", *ACTIVATIONS))
        and not model.config.architecture.stored.is_left(n, model.config)
    }
    problems += [f"unexpected {n}" for n in sorted(spare - {HEAD})]
    if HEAD in spare and stores_another_head(folder, model.config):
        problems.append(
            f"{HEAD} is not {EMBEDDING}, although tie_word_embeddings is true: transformers keeps "
            "both; build the model with tie_word_embeddings false"
        )
    if problems:
        raise ValueError("the checkpoint does not fit the model:\n  " + "\n  ".join(problems))


@torch.no_grad()
def load_weights(
    model: Transformer | Parts,
    path: str | pathlib.Path,
    *,
    mode: str = "broadcast",
    without: Collection[str] = (),
) -> None:
    """Fills every parameter, in the parameter's dtype, and every quantized weight, in its format.

    A quantized weight is copied from a quantized checkpoint, or quantized from a dense one, one
    layer at a time. Adapters are unchanged. Every rank must call it. `parts.origin` then identifies
    the weights that were read.

    Args:
        model: the model, or its parts, to be filled. Parameters may be sharded.
        path: a folder with config.json and safetensors.
        mode: "broadcast": rank 0 reads and sends; "all_ranks": every rank reads.
        without: the names of parameters that the folder does not hold, and that are unchanged.

    Raises:
        ValueError: the folder does not match the model; the message lists every missing,
            unexpected and mis-shaped tensor. Every rank raises it.
        FileNotFoundError: the folder contains no weights.
    """
    if mode not in LOAD_MODES:
        raise ValueError(f"mode must be one of {list(LOAD_MODES)}, got {mode!r}")
    several = many()
    parts = parts_of(model)
    model, source, group = parts.model, parts.reader, parts.readers
    sends = (source, group) if several and mode == "broadcast" else None
    reads = sends is None or dist.get_rank() == source
    folder = problem = None
    if reads:
        try:
            folder = Folder(path)
            _check_fits(parts.whole, folder, without)
        except (OSError, ValueError) as error:
            problem = error
    parts.agree(problem)
    for name, p in base_weights(model):
        if name in without:
            continue
        if not isinstance(p, nn.Parameter):
            _fill(name, p, model.config, folder, sends)
            continue
        full = (
            # Contiguous: a family may store it transposed, and others receive bytes.
            _read(name, model.config, folder).to(p.device, p.dtype).contiguous()
            if folder is not None
            else torch.empty(p.shape, dtype=p.dtype, device=p.device)
        )
        if sends is not None:
            dist.broadcast(full, src=source, group=group)
        assign(p, full)
    parts.origin = _origin(parts.read_by_all({} if folder is None else folder.checksums))


def origin(whole: Transformer, path: str | pathlib.Path) -> str:
    """`Parts.origin` of a dense model that `load_weights` would fill from a folder. Weights are
    read one at a time, and not kept. Raises as `load_weights`.
    """
    folder = Folder(path)
    _check_fits(whole, folder, ())
    for name, _ in base_weights(whole):
        for source in sources(name, whole.config):
            folder.read(source)
    return _origin(folder.checksums)


def _origin(checksums: dict[str, str]) -> str:
    """A hash of the tensors that were read, in whatever files and by whatever ranks."""
    text = json.dumps(checksums, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def _read(name: str, config: ModelConfig, folder: Folder) -> torch.Tensor:
    """`fuse` of the tensors of one parameter, without holding all of them and the result at
    once.
    """
    first, *rest = sources(name, config)
    if not rest:
        return fuse(name, [folder.read(first)], config)
    shapes = [torch.empty(folder.shape(n), device="meta") for n in (first, *rest)]
    whole = fuse(name, shapes, config)
    whole = torch.empty_like(whole, dtype=folder.read(first).dtype, device="cpu")
    for n, part in zip((first, *rest), split(name, whole, config), strict=True):
        part.copy_(folder.read(n))
    return whole


def _fill(
    name: str,
    stored: QuantizedLinear | QuantizedExperts,
    config: ModelConfig,
    folder: Folder | None,
    sends: tuple[int, dist.ProcessGroup | None] | None,
) -> None:
    """folder: None on ranks that do not read.   sends: which rank sends, and to whom."""
    like, error, weights = quantized(stored)[0], None, None
    if folder is not None:
        try:
            weights = _quantized(name, like, config, folder)
        except ValueError as problem:
            error = problem
    if sends is not None:  # the weights' description, or why there are none
        source, group = sends
        at = source if group is None else dist.get_group_rank(group, source)
        told = exchange.broadcast(
            [weights and [_described(q) for q in weights], exchange.described(error)], group, at
        )
        if told[1] is not None and error is None:
            error = exchange.raised(told[1])
        if not weights and told[0] is not None:
            weights = [_empty(one, like.device) for one in told[0]]
    if error:
        raise error
    assert weights is not None  # else there was an error
    fill(stored, weights)
    if sends is not None:
        for buffer in stored.buffers():
            dist.broadcast(buffer, src=source, group=group)


def _quantized(name: str, like: Quantized, config: ModelConfig, folder: Folder) -> list[Quantized]:
    """The contents of a quantized weight. Projections that are stored quantized stay so, bit for
    bit; they are joined into one matrix if possible (`lora.join`). Dense ones that are fused are
    quantized as one. Raises ValueError for experts that are stored quantized and cannot become one
    tensor.
    """
    names = sources(name, config)
    if all(folder.format(n) is None for n in names):
        return [_quantize_dense(like, _read(name, config, folder))]
    joined = join(
        [
            _on(
                like.device,
                _quantize_dense(like, folder.read(n))
                if folder.format(n) is None
                else folder.quantized(n),
            )
            for n in names
        ]
    )
    if len(like.shape) == 2:
        return joined
    [q, *more], E = joined, like.shape[0]
    if more or (isinstance(q, BlockFP8) and like.shape[1] % q.block[0]):
        raise ValueError(
            f"{name}: the experts are stored in {folder.format(names[0])} in a way that does not "
            "make one tensor of them (NVFP4 needs one global scale for all, NF4 scales that are "
            "not quantized, block FP8 whole blocks); start from the weights before they were "
            "quantized"
        )
    if isinstance(q, BlockFP8):
        return [
            dataclasses.replace(
                q, data=q.data.view(like.shape), scale_inv=q.scale_inv.unflatten(0, (E, -1))
            )
        ]
    assert isinstance(q, NF4 | NVFP4)
    parts = (
        {}
        if isinstance(q, NF4)
        else {"data": q.data.unflatten(0, (E, -1)), "scale": q.scale.unflatten(0, (E, -1))}
    )
    return [dataclasses.replace(q, shape=tuple(like.shape), **parts)]


def _quantize_dense(like: Quantized, weight: torch.Tensor) -> Quantized:
    q: Any = quantize_as(like, weight.to(like.device))
    return dataclasses.replace(q, dtype=weight.dtype)


KINDS = {kind.__name__: kind for kind in (NF4, NVFP4, BlockFP8)}


def _described(q: Quantized) -> dict[str, Any]:
    """A quantized weight without its values, as JSON."""

    def told(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {"shape": list(value.shape), "dtype": short(value.dtype)}
        return {"dtype": short(value)} if isinstance(value, torch.dtype) else value

    entries = {f.name: told(getattr(q, f.name)) for f in dataclasses.fields(cast(Any, q))}
    return {"kind": type(q).__name__, **entries}


def _empty(told: dict[str, Any], device: torch.device) -> Quantized:
    """The weight that `_described` has described, with memory for its values."""

    def made(value: Any) -> Any:
        if isinstance(value, dict):
            dtype = getattr(torch, value["dtype"])
            shape = value.get("shape")
            return dtype if shape is None else torch.empty(shape, dtype=dtype, device=device)
        return tuple(value) if isinstance(value, list) else value

    return KINDS[told["kind"]](**{k: made(v) for k, v in told.items() if k != "kind"})


def _on(device: torch.device, q: Any) -> Any:
    return pytree.tree_map(lambda t: t if t is None else t.to(device), q)
