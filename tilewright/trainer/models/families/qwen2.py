"""Qwen2 and Qwen2.5 (arXiv 2407.10671): biases of queries, keys and values, and windows in the
later layers, if at all.
"""

from __future__ import annotations

from typing import Any

from tilewright.trainer.models.block import Block
from tilewright.trainer.models.families.architecture import FAMILIES, Architecture
from tilewright.trainer.models.families.reading import dense, late_windows
from tilewright.trainer.models.layers import Attention, Place
from tilewright.trainer.models.model_config import ModelConfig


def read(hf: dict[str, Any]) -> dict[str, Any]:
    return {**dense(hf), **late_windows(hf)}


def write(config: ModelConfig) -> dict[str, Any]:
    return {"use_sliding_window": config.sliding_window is not None}


def _block(place: Place) -> Block:
    return Block(place, Attention(place, qkv_bias=True))


QWEN2 = Architecture(
    "qwen2",
    "Qwen2",
    read=read,
    write=write,
    defaults={"sliding_window": 4096, "max_position_embeddings": 32_768},
    block=_block,
)
FAMILIES.add("qwen2", QWEN2)
