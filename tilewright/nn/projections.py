"""Finds the projections and experts of a model by Hugging Face's module names, fused ones included,
and matches lists of names with them.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator

from torch import nn

from tilewright.nn.lora_experts import LoRAExperts
from tilewright.nn.quantized_layers import QuantizedExperts, QuantizedLinear

# Last names of the projections of a decoder layer. The head, embeddings and routers are none.
PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # latent attention
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")


def matches(entry: str, path: str) -> bool:
    """Whether an entry of a list of modules matches a path.

    Args:
        entry: A run of consecutive names of the path ("q_proj", "layers.0.mlp"); with * or ? a
            pattern of the whole path; after "re:" a regular expression that matches its beginning.
        path: A module's name in `named_modules`.

    Returns:
        Whether it matches.

    Raises:
        ValueError: What follows "re:" is no regular expression.

    Example:
        >>> from tilewright.nn import matches
        >>> [matches(e, "layers.0.mlp.up_proj") for e in ("up_proj", "0.mlp", "proj", "*_proj")]
        [True, True, False, True]
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
    model: nn.Module, heads: bool = False
) -> Iterator[tuple[str, nn.Linear | QuantizedLinear, dict[str, int | None]]]:
    """Yields the linear projections without adapters: path, module, and the rows of the projections
    that it fuses, by their paths; None if the split is unknown.   heads: `adaptable` ones, too.
    """
    known = {*PROJECTIONS, *FUSED, *(adaptable(model) if heads else ())}
    for path, module in model.named_modules():
        stem, _, name = path.rpartition(".")
        if not isinstance(module, (nn.Linear, QuantizedLinear)) or name not in known:
            continue
        names, rows = fused_projections(model, name) or (name,), module.out_features
        if name == "qkv_proj" and len(names) > 1:
            widths = list(getattr(model.get_submodule(stem), "widths", ()))
        else:
            widths = [] if rows % len(names) else [rows // len(names)] * len(names)
        if len(widths) != len(names) or sum(widths) != rows:
            widths = [None] * len(names)
        yield path, module, {join_path(stem, n): w for n, w in zip(names, widths, strict=True)}


def adaptable(model: nn.Module) -> tuple[str, ...]:
    """Names of the heads whose adapters a model computes itself, where there are any."""
    return tuple(getattr(model, "adaptable", ()))


def fused_projections(model: nn.Module, name: str) -> tuple[str, ...]:
    """The projections that a layer of this name fuses. () in a transformers model, and for the
    names in a model's `one_adapter`: there one layer, as in Phi-3, has one adapter in PEFT's files.
    """
    if hasattr(model, "save_pretrained") or name in getattr(model, "one_adapter", ()):
        return ()
    return FUSED.get(name, ())


def rows_unknown(path: str, module: nn.Linear | QuantizedLinear) -> str:
    """The message for a fused layer whose rows cannot be divided."""
    name = last_name(path)
    if name == "qkv_proj":
        return (
            f"{path}: how its {module.out_features} rows divide among {', '.join(FUSED[name])} is "
            "not known; the module above it must have `widths`, the rows of each"
        )
    return f"{path}: {module.out_features} rows do not divide among {', '.join(FUSED[name])}"


def experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yields the modules with expert tensors [E, ...], without adapters: path, module, and the
    paths of the projections that they fuse.
    """
    for path, module in model.named_modules():
        weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
        if not isinstance(module, LoRAExperts) and all(
            isinstance(w, QuantizedExperts) or (isinstance(w, nn.Parameter) and w.dim() == 3)
            for w in weights
        ):
            yield path, module, [join_path(path, name) for name in OF_EXPERTS]


def as_names(name: str, value: Iterable[str] | None) -> list[str]:
    """A list of names; None is an empty one. Raises TypeError for a text, which would be split into
    letters.
    """
    if isinstance(value, str):
        raise TypeError(f"{name} must be a list of names, got the text {value!r}")
    return list(value or ())


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Puts a module at a path, in the mode of the one before."""
    stem, _, name = path.rpartition(".")
    module.train(model.get_submodule(path).training)
    setattr(model.get_submodule(stem), name, module)


def unmatched(entries: Iterable[str], paths: Iterable[str]) -> list[str]:
    """The entries that match none of the paths."""
    paths = list(paths)
    return [e for e in entries if not any(matches(e, p) for p in paths)]


def chosen_parts(entries: list[str], path: str, parts: Iterable[str]) -> list[str]:
    """The parts that an entry matches, by their own paths or the module's."""
    return [p for p in parts if any(matches(e, p) or matches(e, path) for e in entries)]


def last_name(path: str) -> str:
    return path.rpartition(".")[2]


def join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def all_paths(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module, and the paths of fused modules' parts."""
    for path, module in model.named_modules():
        yield path, module
        stem, _, name = path.rpartition(".")
        for part in fused_projections(model, name):
            yield join_path(stem, part), module
    for _, module, parts in experts(model):
        for part in parts:
            yield part, module


def last_names(model: nn.Module) -> str:
    """The last names of all modules without children, for messages."""
    leaves = (p for p, module in all_paths(model) if not list(module.children()))
    return ", ".join(sorted(set(map(last_name, leaves)) - {""}))
