"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with experts."""

from __future__ import annotations

from typing import Any

from tilewright.trainer.models.families import qwen3
from tilewright.trainer.models.families.architecture import FAMILIES, Architecture
from tilewright.trainer.models.families.reading import dense, experts
from tilewright.trainer.models.model_config import ModelConfig

FIELDS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
)


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    return {**dense(hf), **experts(hf)}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **{name: getattr(config, name) for name in FIELDS},
        "mlp_only_layers": list(config.mlp_only_layers),
        "num_local_experts": config.num_experts,
    }


QWEN3_MOE = Architecture(
    "qwen3_moe",
    "Qwen3Moe",
    read=_read,
    write=_write,
    defaults={"num_key_value_heads": 4, "max_position_embeddings": 32_768},
    neutral={"use_sliding_window": False},
    block=qwen3.block,
)
FAMILIES.add("qwen3_moe", QWEN3_MOE)
