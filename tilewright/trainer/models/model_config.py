"""A model's shape, read from and written as Hugging Face's config.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from tilewright.trainer.models.families.architecture import FAMILIES, Architecture
from tilewright.trainer.models.families.reading import READ, SLIDING, flag, number

# Fields of config.json that are accepted at one value only.
NEUTRAL = {
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
}
# Heads, and the ends of the names that transformers' classes with them have.
HEADS = {"language_model": "ForCausalLM", "reward": "ForSequenceClassification"}
# Fields whose items of config.json have other names, or are those of some models only.
WRITTEN_APART = (
    "rope_theta",
    "rope_scaling",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "head",
    "own",
)


@dataclass(frozen=True)
class Latent:
    """Fields of `ModelConfig` that latent attention has."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape. `from_hf` reads Hugging Face's config.json.

    Fields have the names of config.json where several models share one. Those that are None do not
    apply to the model. What all models of a family have in common is its `architecture`.
    """

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
    # The keys that a query sees, itself included, and the layers with this window; None: all.
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    rope_local_base_freq: float | None = None  # rope_theta of layers with a window
    query_pre_attn_scalar: int | None = None  # attention's logits are divided by its root
    swiglu_alpha: float | None = None  # of clamped gates: g sigmoid(alpha g) (u + 1)
    swiglu_limit: float | None = None
    # Latent attention; q_lora_rank of None: queries are projected at once.
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    rope_interleave: bool | None = None
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float | None = None
    n_shared_experts: int | None = None
    head: str = "language_model"  # or "reward"
    # A reward model's sequences end before this token.
    pad_token_id: int | None = None
    own: tuple[tuple[str, Any], ...] = ()  # items of config.json that its family alone reads

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> ModelConfig:
        """Raises ValueError, naming the field, for an unsupported model or feature."""
        names = FAMILIES.names()
        if hf.get("model_type") not in names:
            raise ValueError(f"model_type must be one of {names}, got {hf.get('model_type')!r}")
        family = FAMILIES[hf["model_type"]]
        if family.model_type != hf["model_type"]:
            raise ValueError(
                f"families: the row {hf['model_type']} is of model_type {family.model_type}"
            )
        hf = {**family.defaults, **hf}
        for key, neutral in {**NEUTRAL, **family.neutral}.items():
            if neutral is not READ and hf.get(key, neutral) not in (neutral, None):
                raise ValueError(
                    f"config.json: {key} = {hf[key]!r} is not supported; accepted: {neutral!r}"
                )
        return cls(
            family.model_type,
            **family.read(hf),
            rms_norm_eps=number(hf, "rms_norm_eps", cls.rms_norm_eps, float),
            tie_word_embeddings=flag(hf, "tie_word_embeddings"),
            **_head(hf),
        )

    def to_hf(self) -> dict[str, Any]:
        """config.json as transformers reads it."""
        out = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if name not in WRITTEN_APART and value is not None
        }
        family = self.architecture
        rope = dict(self.rope_scaling) or {"rope_type": "default"}
        # transformers 5 reads rope_parameters, 4 the other two.
        scored = self.head == "reward"
        name = family.scored or family.name if scored else family.name
        out |= {
            "rope_theta": self.rope_theta,
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "architectures": [f"{name}{HEADS[self.head]}"],
            "hidden_act": "silu",
            "attention_bias": False,
        }
        if rope["rope_type"] != "default":
            out["rope_scaling"] = rope
        if scored:
            out |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return out | dict(self.own) | family.write(self)

    def recorded(self) -> dict[str, Any]:
        """What tells this shape from others, as checkpoints and caches record it: what earlier
        versions had no field for is there only where it is used.
        """
        return {k: v for k, v in asdict(self).items() if k != "own" or v}

    @property
    def architecture(self) -> Architecture:
        return FAMILIES[self.model_type]

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.tie_word_embeddings and self.head == "language_model"

    @property
    def rope_dim(self) -> int:
        """Rotated features of a head."""
        if self.qk_rope_head_dim is not None:
            return self.qk_rope_head_dim
        return int(self.head_dim * dict(self.rope_scaling).get("partial_rotary_factor", 1.0))

    @property
    def latent(self) -> Latent | None:
        """The sizes of latent attention, if the model has it."""
        if self.kv_lora_rank is None:
            return None
        return Latent(**{f.name: getattr(self, f.name) for f in fields(Latent)})

    def is_moe(self, layer: int) -> bool:
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    def is_local(self, layer: int) -> bool:
        """Whether attention of the layer has the window."""
        if self.sliding_window is None:
            return False
        return self.layer_types is None or self.layer_types[layer] == SLIDING

    def keys_seen(self, layer: int, sequence: int) -> float:
        """Keys that a query of a layer sees, on average over a sequence of this length."""
        window = self.sliding_window if self.is_local(layer) else None
        if window is None or window >= sequence:
            return sequence / 2
        return window - window**2 / (2 * sequence)

    def attention_work(self) -> tuple[int, int]:
        """Multiply-adds of a layer's attention per token: of its projections, and per key."""
        H, heads, sizes = self.hidden_size, self.num_attention_heads, self.latent
        if sizes is None:
            projections = 2 * H * self.head_dim * (heads + self.num_key_value_heads)
            return projections, 2 * heads * self.head_dim
        width, rank = heads * self.head_dim, sizes.q_lora_rank
        queries = H * width if rank is None else rank * (H + width)
        narrow = H * (sizes.kv_lora_rank + sizes.qk_rope_head_dim)
        of_heads = heads * (sizes.qk_nope_head_dim + sizes.v_head_dim) * sizes.kv_lora_rank
        output = heads * sizes.v_head_dim * H
        return queries + narrow + of_heads + output, heads * (self.head_dim + sizes.v_head_dim)


def is_scored(hf: dict[str, Any]) -> bool:
    """Whether a config.json is of a model for sequence classification."""
    names = hf.get("architectures") or []
    return any(isinstance(n, str) and n.endswith(HEADS["reward"]) for n in names)


def _head(hf: dict[str, Any]) -> dict[str, Any]:
    """The fields of a reward model; none for another."""
    if not is_scored(hf):
        return {}
    labels = hf["id2label"] if hf.get("id2label") is not None else hf.get("num_labels", 2)
    number_of_labels = len(labels) if isinstance(labels, dict | list) else labels
    if number_of_labels != 1:
        raise ValueError(
            f"config.json: num_labels = {number_of_labels!r} is not supported; accepted: 1, that of "
            "a reward model"
        )
    padding = hf.get("pad_token_id")
    if padding is not None and type(padding) is not int:
        raise ValueError(f"config.json: pad_token_id must be an integer, got {padding!r}")
    return {"head": "reward", "pad_token_id": padding}
