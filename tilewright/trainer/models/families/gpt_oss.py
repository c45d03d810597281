"""gpt-oss (arXiv 2508.10925): sinks, windows in every second layer, biases everywhere, and experts
with a clamped gate.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.trainer.models.block import Block
from tilewright.trainer.models.families.architecture import FAMILIES, Architecture
from tilewright.trainer.models.families.reading import (
    FULL,
    SLIDING,
    dense,
    experts,
    number,
    windows,
)
from tilewright.trainer.models.layers import Attention, Place
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.moe import MoE
from tilewright.trainer.models.stored import Stored

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    quantization = hf.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        raise ValueError(
            "config.json: quantization_config.quant_method = 'mxfp4' is not supported; accepted "
            "are dense weights, which transformers writes after from_pretrained with "
            "quantization_config=Mxfp4Config(dequantize=True)"
        )
    given = hf.get("rope_parameters") or hf.get("rope_scaling")
    fields = dense(hf if given else {**hf, "rope_scaling": ROPE})
    alternating = [FULL if i % 2 else SLIDING for i in range(fields["num_hidden_layers"])]
    return {
        **fields,
        **windows(hf, alternating),
        **experts(
            {**hf, "moe_intermediate_size": fields["intermediate_size"], "norm_topk_prob": True}
        ),
        "swiglu_alpha": number(hf, "swiglu_alpha", 1.702, float),
        "swiglu_limit": number(hf, "swiglu_limit", 7.0, float),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "sliding_window": config.sliding_window,
        "attention_bias": True,
    }


def _block(place: Place) -> Block:
    attention = Attention(place, qkv_bias=True, output_bias=True)
    return Block(place, attention, MoE(place, router_bias=True, expert_bias=True))


class _Stored(Stored):
    """Experts as [E, inputs, outputs], with outputs gate, up, gate, up, ...; their biases
    [E, outputs].
    """

    def sources(self, name: str, config: ModelConfig) -> list[str]:
        if ".experts." in name:
            return [name]
        return super().sources(name.replace(".mlp.gate.", ".mlp.router."), config)

    def fuse(self, name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        _, of_experts, last = name.rpartition(".experts.")
        if not of_experts:
            return super().fuse(name, tensors)
        [stored] = tensors
        if "up" in last:
            stored = torch.cat((stored[..., ::2], stored[..., 1::2]), -1)
        return stored if last.endswith("_bias") else stored.transpose(1, 2)

    def split(self, name: str, full: torch.Tensor, config: ModelConfig) -> list[torch.Tensor]:
        _, of_experts, last = name.rpartition(".experts.")
        if not of_experts:
            return super().split(name, full, config)
        full = full if last.endswith("_bias") else full.transpose(1, 2)
        return [torch.stack(full.chunk(2, -1), -1).flatten(-2) if "up" in last else full]


GPT_OSS = Architecture(
    "gpt_oss",
    "GptOss",
    read=_read,
    write=_write,
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rope_theta": 150_000.0,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
    },
    neutral={
        "attention_bias": True,
        "mlp_only_layers": None,
        "decoder_sparse_step": 1,
    },
    block=_block,
    stored=_Stored(),
    norm_cast="gemma",
    sinks=True,
)
FAMILIES.add("gpt_oss", GPT_OSS)
