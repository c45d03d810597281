"""The text model of Gemma 3 (arXiv 2503.19786): layers with a window and rotary angles of their own
between layers that see everything; norms before and after attention and MLP, whose weights are
offsets from one; norms of queries and keys; GEGLU; and an embedding that is scaled, and tied.
"""

from __future__ import annotations

from typing import Any

from tilewright.trainer.models.block import Block, Norms
from tilewright.trainer.models.families.architecture import FAMILIES, Architecture
from tilewright.trainer.models.families.reading import FULL, SLIDING, number, rope, sizes, windows
from tilewright.trainer.models.layers import MLP, Attention, Place
from tilewright.trainer.models.model_config import ModelConfig

GELU = "gelu_pytorch_tanh"
PATTERN = 6  # every sixth layer sees everything
NORMS = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    every, layers = (
        number(hf, name, default)
        for name, default in (("sliding_window_pattern", PATTERN), ("num_hidden_layers", None))
    )
    number(hf, "sliding_window", None)
    return {
        **_angles(hf),
        **sizes(hf),
        **windows(hf, [SLIDING if (i + 1) % every else FULL for i in range(layers)]),
        "query_pre_attn_scalar": number(hf, "query_pre_attn_scalar", None),
    }


def _angles(hf: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 has rope_parameters of each kind of layer, 4 one rope_scaling, and two
    bases.
    """
    of_kinds = hf.get("rope_parameters")
    if not isinstance(of_kinds, dict) or not {FULL, SLIDING} & of_kinds.keys():
        return {
            **rope(hf),
            "rope_local_base_freq": number(hf, "rope_local_base_freq", 10_000.0, float),
        }
    full, local = (
        rope({"rope_parameters": of_kinds.get(kind), "rope_theta": hf.get(item, default)})
        for kind, item, default in (
            (FULL, "rope_theta", 1_000_000.0),
            (SLIDING, "rope_local_base_freq", 10_000.0),
        )
    )
    if local["rope_scaling"]:
        raise ValueError(
            f"config.json: rope_parameters.{SLIDING} = {of_kinds[SLIDING]!r} is not supported; "
            "accepted: rope type 'default'"
        )
    return {**full, "rope_local_base_freq": local["rope_theta"]}


def _write(config: ModelConfig) -> dict[str, Any]:
    full = dict(config.rope_scaling) or {"rope_type": "default"}
    return {
        "rope_parameters": {
            FULL: {**full, "rope_theta": config.rope_theta},
            SLIDING: {"rope_type": "default", "rope_theta": config.rope_local_base_freq},
        },
        "hidden_act": GELU,
        "hidden_activation": GELU,
    }


def _block(place: Place) -> Block:
    root = place.config.query_pre_attn_scalar
    assert root is not None
    attention = Attention(place, qk_norm=True, scale=root**-0.5)
    return Block(place, attention, MLP(place, activation="gelu"), NORMS)


GEMMA3 = Architecture(
    "gemma3_text",
    "Gemma3",
    read=_read,
    write=_write,
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    neutral={
        "hidden_act": GELU,
        "hidden_activation": GELU,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    scored="Gemma3Text",
    block=_block,
    norm_offset=1.0,
    norm_cast="gemma",
    scaled_embedding=True,
)
FAMILIES.add("gemma3_text", GEMMA3)
