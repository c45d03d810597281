"""GLM-4 of April 2025 (arXiv 2406.12793 has its forerunner): norms before and after attention and
MLP; half of a head's features rotate, neighbors by neighbors; gates and ups are one tensor on disk.
"""

from __future__ import annotations

from typing import Any

from tilewright.trainer.models.block import Block, Norms
from tilewright.trainer.models.families.architecture import FAMILIES, Architecture
from tilewright.trainer.models.families.reading import READ, dense, flag, unpadded
from tilewright.trainer.models.layers import Attention, Place
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.stored import Stored

BIAS, PART = "attention_bias", "partial_rotary_factor"
PADDING = 151_329  # transformers' default
NORMS = Norms(
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    return {**dense(hf, partial=True), "own": ((BIAS, flag(hf, BIAS)),)}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        PART: dict(config.rope_scaling).get(PART, 1.0),
        **unpadded(config, PADDING),
    }


def _block(place: Place) -> Block:
    bias = dict(place.config.own)[BIAS]
    return Block(place, Attention(place, qkv_bias=bias, interleaved=True), norms=NORMS)


GLM4 = Architecture(
    "glm4",
    "Glm4",
    read=_read,
    write=_write,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "max_position_embeddings": 131_072,
        BIAS: True,
        PART: 0.5,
    },
    neutral={BIAS: READ, PART: READ},
    block=_block,
    stored=Stored(fused=("gate_up_proj",)),
)
FAMILIES.add("glm4", GLM4)
