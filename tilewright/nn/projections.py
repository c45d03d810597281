"""The projections and experts of a model, by the names that Hugging Face's models give them, also
where several are fused; and the lists of names that mean some of them.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator

from torch import nn

from tilewright.nn.lora_experts import LoRAExperts
from tilewright.nn.quantized import QuantizedExperts, QuantizedLinear

# What is a projection of a decoder layer, by its last name; the head, embeddings and routers are
# not.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")


def matches(entry: str, path: str) -> bool:
    """Whether an entry of a list of modules means this path: some of its names in a row ("q_proj",
    "layers.0.mlp"), or with * or ? a pattern of the whole path, or after "re:" a regular expression
    of its beginning.
    """
    if entry.startswith("re:"):
        try:
            return re.match(entry[3:], path) is not None
        except re.error as error:
            raise ValueError(
                f'{entry!r} must be a regular expression after "re:": {error}'
            ) from error
    if set(entry) & set("*?"):
        return fnmatch.fnmatchcase(path, entry)
    return f".{entry}." in f".{path}."


def projections(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Linear | QuantizedLinear, dict[str, int | None]]]:
    """The linear projections without adapters: path, module, and the paths of those that it fuses
    with their rows; None where these are not known.
    """
    for path, module in model.named_modules():
        stem, _, name = path.rpartition(".")
        if not isinstance(module, (nn.Linear, QuantizedLinear)) or name not in (
            *PROJECTIONS,
            *FUSED,
        ):
            continue
        names, rows = fused_projections(model, name) or (name,), module.out_features
        if name == "qkv_proj" and len(names) > 1:
            widths = list(getattr(model.get_submodule(stem), "widths", ()))
        else:
            widths = [] if rows % len(names) else [rows // len(names)] * len(names)
        if len(widths) != len(names) or sum(widths) != rows:
            widths = [None] * len(names)
        yield path, module, {join_path(stem, n): w for n, w in zip(names, widths, strict=True)}


def fused_projections(model: nn.Module, name: str) -> tuple[str, ...]:
    """The projections that a layer of that name fuses. None in a transformers model: what is one
    layer there, as in Phi-3, has one adapter in PEFT's files.
    """
    return () if hasattr(model, "save_pretrained") else FUSED.get(name, ())


def rows_unknown(path: str, module: nn.Linear | QuantizedLinear) -> str:
    name = path.rpartition(".")[2]
    if name == "qkv_proj":
        return (
            f"{path}: how its {module.out_features} rows divide among {', '.join(FUSED[name])} is "
            f"not known; the "
            "module above it must have `widths`, the rows of each"
        )
    return f"{path}: {module.out_features} rows do not divide among {', '.join(FUSED[name])}"


def experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """The modules that hold experts as tensors [E, ...], without adapters: path, module, and the
    paths of what they fuse.
    """
    for path, module in model.named_modules():
        weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
        if not isinstance(module, LoRAExperts) and all(
            isinstance(w, QuantizedExperts) or (isinstance(w, nn.Parameter) and w.dim() == 3)
            for w in weights
        ):
            yield path, module, [join_path(path, name) for name in OF_EXPERTS]


def unmatched(entries: Iterable[str], paths: Iterable[str]) -> list[str]:
    paths = list(paths)
    return [e for e in entries if not any(matches(e, p) for p in paths)]


def chosen_parts(entries: list[str], path: str, parts: Iterable[str]) -> list[str]:
    """The parts that entries mean, or that are of a module that entries mean."""
    return [p for p in parts if any(matches(e, p) or matches(e, path) for e in entries)]


def join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def all_paths(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module, and those that others fuse."""
    for path, module in model.named_modules():
        yield path, module
        stem, _, name = path.rpartition(".")
        for part in fused_projections(model, name):
            yield join_path(stem, part), module
    for _, module, parts in experts(model):
        for part in parts:
            yield part, module


def last_names(model: nn.Module) -> str:
    return ", ".join(
        sorted({p.rpartition(".")[2] for p, m in all_paths(model) if not list(m.children())} - {""})
    )
