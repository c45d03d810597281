"""Qwen3 (arXiv 2505.09388): norms of queries and keys; windows as in Qwen2."""

from tilewright.trainer.models.families import qwen2
from tilewright.trainer.models.families.architecture import FAMILIES, Architecture

QWEN3 = Architecture(
    "qwen3",
    "Qwen3",
    read=qwen2.read,
    write=qwen2.write,
    defaults={"sliding_window": 4096, "head_dim": 128, "max_position_embeddings": 32_768},
    qk_norm=True,
)
FAMILIES.add("qwen3", QWEN3)
