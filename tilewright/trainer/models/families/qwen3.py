"""Qwen3 (arXiv 2505.09388): norms of queries and keys; windows as in Qwen2."""

from tilewright.trainer.models.block import Block
from tilewright.trainer.models.families import qwen2
from tilewright.trainer.models.families.architecture import FAMILIES, Architecture
from tilewright.trainer.models.layers import Attention, Place


def block(place: Place) -> Block:
    return Block(place, Attention(place, qk_norm=True))


QWEN3 = Architecture(
    "qwen3",
    "Qwen3",
    read=qwen2.read,
    write=qwen2.write,
    defaults={"sliding_window": 4096, "head_dim": 128, "max_position_embeddings": 32_768},
    block=block,
)
FAMILIES.add("qwen3", QWEN3)
