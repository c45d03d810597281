"""Names of a transformers model's quantized weights in a folder. transformers renames tensors when
it saves and loads, and joins, splits and transposes some, which codes do not survive.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tilewright.core import platform
from tilewright.core.registry import ImplementationUnavailable

LIBRARY = "transformers"


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model's `save_pretrained` is transformers' own: other libraries have one, too."""
    owners = [c for c in type(model).__mro__ if "save_pretrained" in vars(c)]
    return any(c.__module__.partition(".")[0] == LIBRARY for c in owners)


def _part(module: str, name: str) -> Any:
    """An object of the model's library that is not part of its public interface."""
    try:
        return getattr(importlib.import_module(f"{LIBRARY}.{module}"), name)
    except (ImportError, AttributeError):
        raise ImplementationUnavailable(
            f"{LIBRARY} {sys.modules[LIBRARY].__version__} has no {module}.{name}, by which names "
            f"of saved tensors are checked; versions up to {platform.TESTED[LIBRARY]} were tested"
        ) from None


def conversions_of(
    model: Any, keys: Iterable[str], dense: Iterable[str], method: str
) -> tuple[list[Any], list[str]]:
    """The conversions that saving a model reverts, without those that its reader cannot follow;
    and the names of the dense tensors that these would have changed. They are stored by the
    model's own names, which transformers reads too.

    Conversions that change a quantized tensor are left out, and for compressed-tensors those that
    join weights: transformers dequantizes before it joins, and drops weights that are dense.

    keys: the quantized tensors' names.   dense: those of the others.   method: `quant_method`.
    """
    converter = _part("core_model_loading", "WeightConverter")
    used = getattr(model, "_weight_conversions", None)
    if used is None:  # not by from_pretrained: as transformers then
        of_prefix = _part("core_model_loading", "PrefixChange")
        mapping = _part("conversion_mapping", "get_model_conversion_mapping")
        used = [c for c in mapping(model, add_legacy=False) if not isinstance(c, of_prefix)]
    keys, dense, kept, own = list(keys), list(dense), [], set()
    for conversion in used:
        if not isinstance(conversion, converter):
            kept.append(conversion)
            continue
        reverse = conversion.reverse_transform()
        joins = method == "compressed-tensors" and all(
            pattern.endswith(".weight") for pattern in reverse.target_patterns
        )
        if joins or any(reverse.rename_source_key(key)[1] is not None for key in keys):
            own.update(key for key in dense if reverse.rename_source_key(key)[1] is not None)
        else:
            kept.append(conversion)
    return kept, sorted(own)


def split_by_readers(model: Any, method: str) -> str | None:
    """A tensor of this family's files that holds several layers, if transformers cannot read it
    with this method, as it joins the scales to what it splits. None if there is none.
    """
    if method == "bitsandbytes":  # whose tensors it reads one by one
        return None
    for conversion in _part("conversion_mapping", "get_model_conversion_mapping")(model):
        sources = conversion.source_patterns
        if (
            isinstance(conversion, _part("core_model_loading", "WeightConverter"))
            and len(conversion.target_patterns) > 1
            and all(source.endswith(".weight") for source in sources)
        ):
            return sources[0]
    return None


def replaced_by_readers(model: Any, method: str) -> str | None:
    """The path of a module that transformers replaces by another when it reads a folder of this
    method; None if there is none.
    """
    table = _part("quantizers.base", "MODULES_TO_PATCH_FOR_QUANTIZATION")
    for path, module in model.named_modules():
        entry = table.get(type(module).__name__)
        if entry and any(method == getattr(m, "value", m) for m in entry["quantization_methods"]):
            return f"{path} ({type(module).__name__})"
    return None


def not_read_back(model: Any, conversions: list[Any], keys: Iterable[str]) -> str | None:
    """The first of these tensors that a folder's reader would not find, and the name that it looks
    for; None if it finds all.

    conversions: those that saving reverts.
    """
    revert = _part("core_model_loading", "revert_weight_conversion")
    rename = _part("core_model_loading", "rename_source_key")
    converter = _part("core_model_loading", "WeightConverter")
    mapping = _part("conversion_mapping", "get_model_conversion_mapping")(model)
    converters = [c for c in mapping if isinstance(c, converter)]
    renamings = [c for c in mapping if not isinstance(c, converter)]
    marks = {key: torch.empty(0) for key in keys}
    before = model.__dict__.get("_weight_conversions")
    try:
        model._weight_conversions = conversions
        stored = revert(model, dict(marks))
    finally:
        put_back(model, before)
    name_of = {id(mark): key for key, mark in marks.items()}
    for name, mark in stored.items():
        key = name_of[id(mark)]
        renamed, by = rename(name, renamings, converters, model.base_model_prefix, {key: True})
        if renamed != key or by is not None:
            return f"{key}, which is stored as {name} and which transformers reads as {renamed}"
    return None


def put_back(model: Any, conversions: list[Any] | None) -> None:
    """Sets the conversions that saving reverts; None: those of the model's class."""
    if conversions is None:
        model.__dict__.pop("_weight_conversions", None)
    else:
        model._weight_conversions = conversions
