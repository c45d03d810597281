"""A model's shape, read from and written as Hugging Face's config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from tilewright.trainer.positions import ROPE_TYPES

ARCHITECTURES = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
MODEL_TYPES = tuple(ARCHITECTURES)
# Limit of sizes in config.json: no model has so wide a layer, and no machine holds its square.
LARGEST = 2**24
# Fields of config.json that are accepted at one value only.
NEUTRAL = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
}
MOE_FIELDS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape. `from_hf` reads Hugging Face's config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    # Items of Hugging Face's dictionary, without rope_theta.
    rope_scaling: tuple[tuple[str, Any], ...] = ()
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> ModelConfig:
        """Raises ValueError, naming the field, for an unsupported model or feature."""
        if hf.get("model_type") not in MODEL_TYPES:
            raise ValueError(
                f"model_type must be one of {list(MODEL_TYPES)}, got {hf.get('model_type')!r}"
            )
        for key, neutral in NEUTRAL.items():
            if hf.get(key, neutral) not in (neutral, None):
                raise ValueError(
                    f"config.json: {key} = {hf[key]!r} is not supported; accepted: {neutral!r}"
                )
        return cls(
            hf["model_type"],
            **_rope(hf),
            **_sizes(hf),
            **(_experts(hf) if hf["model_type"] == "qwen3_moe" else {}),
            rms_norm_eps=_number(hf, "rms_norm_eps", cls.rms_norm_eps, float),
            tie_word_embeddings=_flag(hf, "tie_word_embeddings"),
        )

    def to_hf(self) -> dict[str, Any]:
        """config.json as transformers reads it."""
        out = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("rope_theta", "rope_scaling")
            and (self.model_type == "qwen3_moe" or f.name not in MOE_FIELDS)
        }
        if self.model_type == "qwen3_moe":
            out |= {
                "mlp_only_layers": list(self.mlp_only_layers),
                "num_local_experts": self.num_experts,
            }
        rope = dict(self.rope_scaling) or {"rope_type": "default"}
        # transformers 5 reads rope_parameters, 4 the other two.
        out |= {
            "rope_theta": self.rope_theta,
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "architectures": [f"{ARCHITECTURES[self.model_type]}ForCausalLM"],
            "hidden_act": "silu",
            "attention_bias": False,
        }
        if self.rope_scaling:
            out["rope_scaling"] = rope
        return out

    def is_moe(self, layer: int) -> bool:
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )


def _number(source: dict[str, Any], name: str, default: Any, kind: type = int) -> Any:
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


def _flag(source: dict[str, Any], name: str) -> bool:
    if not isinstance(source.get(name), bool | None):
        raise ValueError(f"config.json: {name} must be true or false, got {source[name]!r}")
    return bool(source.get(name))


def _sizes(hf: dict[str, Any]) -> dict[str, int]:
    required = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    sizes = {name: _number(hf, name, None) for name in required}
    heads = sizes["num_attention_heads"]
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": sizes["hidden_size"] // heads,
        "max_position_embeddings": ModelConfig.max_position_embeddings,
    }
    sizes |= {name: _number(hf, name, default) for name, default in defaults.items()}
    if heads % sizes["num_key_value_heads"]:
        raise ValueError(
            f"config.json: num_attention_heads = {heads} must divide by num_key_value_heads = "
            f"{sizes['num_key_value_heads']}"
        )
    if sizes["head_dim"] % 2:
        raise ValueError(f"config.json: head_dim must be even, got {sizes['head_dim']}")
    return sizes


def _rope(hf: dict[str, Any]) -> dict[str, Any]:
    rope = next((hf[key] for key in ("rope_parameters", "rope_scaling") if hf.get(key)), {})
    if not isinstance(rope, dict):
        raise ValueError(f"config.json: rope_parameters must be an object, got {rope!r}")
    rope = dict(rope)
    theta = _number(rope, "rope_theta", _number(hf, "rope_theta", 10000.0, float), float)
    rope.pop("rope_theta", None)
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ValueError(
            f"config.json: rope type {kind!r} is not supported; accepted: {list(ROPE_TYPES)}"
        )
    settings = ROPE_TYPES[kind][1]
    if absent := [k for k in settings if k not in rope]:
        raise ValueError(f"config.json: rope type {kind!r} needs {', '.join(absent)}")
    for name in settings:
        _number(rope, name, None, float)
    scaling = tuple(sorted(rope.items())) if kind != "default" else ()
    return {"rope_theta": theta, "rope_scaling": scaling}


def _experts(hf: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes num_local_experts.
    name = "num_experts" if hf.get("num_experts") is not None else "num_local_experts"
    sizes = {
        "num_experts": _number(hf, name, None),
        **{n: _number(hf, n, None) for n in ("num_experts_per_tok", "moe_intermediate_size")},
        "decoder_sparse_step": _number(hf, "decoder_sparse_step", 1),
    }
    if sizes["num_experts_per_tok"] > sizes["num_experts"]:
        raise ValueError(
            "config.json: num_experts_per_tok must be at most num_experts = "
            f"{sizes['num_experts']}, got {sizes['num_experts_per_tok']}"
        )
    dense = [] if hf.get("mlp_only_layers") is None else hf["mlp_only_layers"]
    if not isinstance(dense, (list, tuple)) or not all(type(n) is int for n in dense):
        raise ValueError(f"config.json: mlp_only_layers must be a list of integers, got {dense!r}")
    return sizes | {
        "mlp_only_layers": tuple(dense),
        "norm_topk_prob": _flag(hf, "norm_topk_prob"),
    }
