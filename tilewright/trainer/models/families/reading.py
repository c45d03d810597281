"""Reads items of a config.json, and those that several families share. Every error is a ValueError
that names the item.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tilewright.ops.rope import tables

# Limit of sizes in config.json: no model has so wide a layer, and no machine holds its square.
LARGEST = 2**24
FULL, SLIDING = "full_attention", "sliding_attention"
READ: Any = object()  # in `Architecture.neutral`: the family reads this item
# Those whose frequencies depend on a sequence's length would need tables for each document.
ROPE_TYPES = {name: kind for name, kind in tables.ROPE_TYPES.items() if not kind.by_length}


def number(source: dict[str, Any], name: str, default: Any, kind: type = int) -> Any:
    """A field that must be a number if present; absent and null mean the default."""
    value = default if source.get(name) is None else source[name]
    if kind is int:
        good = type(value) is int and 1 <= value <= LARGEST
        accepted = f"an integer of at least 1 and at most {LARGEST}"
    else:
        good = type(value) in (int, float) and 0 < value < math.inf
        accepted = "a finite number above 0"
    if not good:
        raise ValueError(f"config.json: {name} must be {accepted}, got {value!r}")
    return kind(value)


def flag(source: dict[str, Any], name: str) -> bool:
    if not isinstance(source.get(name), bool | None):
        raise ValueError(f"config.json: {name} must be true or false, got {source[name]!r}")
    return bool(source.get(name))


def sizes(hf: dict[str, Any]) -> dict[str, int]:
    required = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    fields = {name: number(hf, name, None) for name in required}
    heads = fields["num_attention_heads"]
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": fields["hidden_size"] // heads,
        "max_position_embeddings": 4096,
    }
    fields |= {name: number(hf, name, default) for name, default in defaults.items()}
    if heads % fields["num_key_value_heads"]:
        raise ValueError(
            f"config.json: num_attention_heads = {heads} must divide by num_key_value_heads = "
            f"{fields['num_key_value_heads']}"
        )
    if fields["head_dim"] % 2:
        raise ValueError(f"config.json: head_dim must be even, got {fields['head_dim']}")
    return fields


def rope(
    hf: dict[str, Any],
    *,
    partial: bool = False,
    kinds: Mapping[str, tables.RopeType] = ROPE_TYPES,
) -> dict[str, Any]:
    """partial: whether the family may rotate a part of a head's features alone."""
    settings = next((hf[key] for key in ("rope_parameters", "rope_scaling") if hf.get(key)), {})
    if not isinstance(settings, dict):
        raise ValueError(f"config.json: rope_parameters must be an object, got {settings!r}")
    settings = dict(settings)
    theta = number(settings, "rope_theta", number(hf, "rope_theta", 10000.0, float), float)
    settings.pop("rope_theta", None)
    share = settings.get("partial_rotary_factor")
    if partial:
        settings.pop("partial_rotary_factor", None)
        share = hf.get("partial_rotary_factor") if share is None else share
        part = _part(hf, share)
    elif share not in (None, 1):
        raise ValueError(
            f"config.json: partial_rotary_factor = {share!r} is not supported; accepted: 1.0"
        )
    else:
        part = {}
    kind = settings.setdefault("rope_type", settings.pop("type", "default"))
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(
            f"config.json: rope type {kind!r} is not supported; accepted: {list(kinds)}"
        )
    required, optional = kinds[kind].required, kinds[kind].optional
    if absent := [k for k in required if k not in settings]:
        raise ValueError(f"config.json: rope type {kind!r} needs {', '.join(absent)}")
    for name in (*required, *(n for n in optional if settings.get(n) is not None)):
        if name == "truncate":
            flag(settings, name)
        elif name in tables.FACTORS:
            pairs = int(sizes(hf)["head_dim"] * part.get("partial_rotary_factor", 1.0)) // 2
            settings[name] = _factors(settings, name, pairs)
        else:
            number(settings, name, None, float)
    settings = settings | part if kind != "default" else part and {"rope_type": kind, **part}
    return {"rope_theta": theta, "rope_scaling": tuple(sorted(settings.items()))}


def _factors(settings: dict[str, Any], name: str, pairs: int) -> tuple[float, ...]:
    """A number for each pair of rotated features."""
    values = settings[name]
    if not isinstance(values, list | tuple) or len(values) != pairs:
        raise ValueError(
            f"config.json: {name} must be a list of {pairs} numbers, one for each pair of rotated "
            f"features, got {values!r}"
        )
    return tuple(number({name: v if v is not None else 0}, name, None, float) for v in values)


def _part(hf: dict[str, Any], share: Any) -> dict[str, float]:
    """The setting of a rotation of a part of a head's features; {} for all of them."""
    width, item = sizes(hf)["head_dim"], "partial_rotary_factor"
    share = number({item: share}, item, 1.0, float)
    rotated = int(width * share)
    if share > 1 or rotated < 2 or rotated % 2:
        raise ValueError(
            f"config.json: {item} = {share}: must rotate an even number of the {width} features of "
            f"a head, not {width * share:g}"
        )
    return {} if share == 1 else {item: share}


def dense(hf: dict[str, Any], *, partial: bool = False) -> dict[str, Any]:
    """The sizes and rotary angles of a decoder without experts and windows.   partial: see
    `rope`.
    """
    return {**rope(hf, partial=partial), **sizes(hf)}


def unpadded(config: Any, default: int) -> dict[str, Any]:
    """The item of config.json that says that a `ModelConfig` has no padding token, where the
    default of transformers' class would be no token of the vocabulary, which that class refuses.
    """
    if config.pad_token_id is not None or config.vocab_size > default:
        return {}
    return {"pad_token_id": None}


def windows(hf: dict[str, Any], layer_types: list[str] | None) -> dict[str, Any]:
    """The sliding window, and which layers have it.

    layer_types: layer types for a config.json without them; None: all layers have the window.
    """
    if hf.get("sliding_window") is None:
        return {}
    kinds = hf.get("layer_types") or layer_types
    if kinds is None:
        return {"sliding_window": number(hf, "sliding_window", None)}
    layers = number(hf, "num_hidden_layers", None)
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or {*kinds} - {FULL, SLIDING}:
        raise ValueError(
            f"config.json: layer_types must name {FULL} or {SLIDING} for each of the {layers} "
            f"layers, got {kinds!r}"
        )
    return {"sliding_window": number(hf, "sliding_window", None), "layer_types": tuple(kinds)}


def late_windows(hf: dict[str, Any]) -> dict[str, Any]:
    """Windows of layers from max_window_layers on, if use_sliding_window: Qwen2 and Qwen3."""
    if not flag(hf, "use_sliding_window"):
        return {}
    layers, first = number(hf, "num_hidden_layers", None), hf.get("max_window_layers")
    first = 28 if first is None else first
    if type(first) is not int or first < 0:
        raise ValueError(
            f"config.json: max_window_layers must be an integer of at least 0, got {first!r}"
        )
    return windows(hf, [FULL if i < first else SLIDING for i in range(layers)])


def experts(hf: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes num_local_experts.
    name = "num_experts" if hf.get("num_experts") is not None else "num_local_experts"
    fields = {
        "num_experts": number(hf, name, None),
        **{n: number(hf, n, None) for n in ("num_experts_per_tok", "moe_intermediate_size")},
        "decoder_sparse_step": number(hf, "decoder_sparse_step", 1),
    }
    if fields["num_experts_per_tok"] > fields["num_experts"]:
        raise ValueError(
            "config.json: num_experts_per_tok must be at most num_experts = "
            f"{fields['num_experts']}, got {fields['num_experts_per_tok']}"
        )
    dense = [] if hf.get("mlp_only_layers") is None else hf["mlp_only_layers"]
    if not isinstance(dense, list | tuple) or not all(type(n) is int for n in dense):
        raise ValueError(f"config.json: mlp_only_layers must be a list of integers, got {dense!r}")
    return fields | {
        "mlp_only_layers": tuple(dense),
        "norm_topk_prob": flag(hf, "norm_topk_prob"),
    }
