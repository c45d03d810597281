"""DeepSeek-V3 (arXiv 2412.19437): latent attention, and experts that a sigmoid router chooses by
groups, beside shared ones. The bias that balances the choice is kept as it is; the layers that
predict further tokens are neither read nor written.
"""

from __future__ import annotations

import re
from typing import Any

from tilewright.ops.rope.tables import yarn_mscale
from tilewright.trainer.models.block import Block
from tilewright.trainer.models.families.architecture import FAMILIES, Architecture
from tilewright.trainer.models.families.reading import dense, experts, flag, number
from tilewright.trainer.models.latent_attention import LatentAttention
from tilewright.trainer.models.layers import Place
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.moe import feed_forward
from tilewright.trainer.models.stored import Stored

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LAYER = re.compile(r"model\.layers\.(\d+)\.")
ROUTER = ("n_group", "topk_group", "n_shared_experts")


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    sizes = {name: number(hf, name, None) for name in SIZES}
    fields = dense({**hf, "head_dim": sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]})
    _check_heads(fields, sizes)
    first = hf.get("first_k_dense_replace")
    if type(first) is not int or first < 0:
        raise ValueError(
            f"config.json: first_k_dense_replace must be an integer of at least 0, got {first!r}"
        )
    routed = experts(
        {**hf, "num_experts": hf.get("n_routed_experts"), "mlp_only_layers": list(range(first))}
    )
    router = {name: number(hf, name, None) for name in ROUTER}
    E, groups, kept = routed["num_experts"], router["n_group"], router["topk_group"]
    if E % groups or kept > groups or routed["num_experts_per_tok"] > kept * (E // groups):
        raise ValueError(
            f"config.json: n_group = {groups}, topk_group = {kept}: {E} experts must make equal "
            f"groups, the best of which have {routed['num_experts_per_tok']} experts or more"
        )
    return {
        **fields,
        **sizes,
        **routed,
        **router,
        "q_lora_rank": None if hf.get("q_lora_rank") is None else number(hf, "q_lora_rank", None),
        "rope_interleave": flag(hf, "rope_interleave"),
        "routed_scaling_factor": number(hf, "routed_scaling_factor", None, float),
    }


def _check_heads(fields: dict[str, Any], sizes: dict[str, int]) -> None:
    if fields["num_key_value_heads"] != fields["num_attention_heads"]:
        raise ValueError(
            f"config.json: num_key_value_heads = {fields['num_key_value_heads']} is not supported; "
            f"accepted: num_attention_heads = {fields['num_attention_heads']}"
        )
    if sizes["qk_rope_head_dim"] % 2 or sizes["v_head_dim"] > fields["head_dim"]:
        raise ValueError(
            f"config.json: qk_rope_head_dim = {sizes['qk_rope_head_dim']} must be even, and "
            f"v_head_dim = {sizes['v_head_dim']} at most qk_nope_head_dim + qk_rope_head_dim = "
            f"{fields['head_dim']}"
        )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "head_dim": config.qk_rope_head_dim,  # as transformers does
        "q_lora_rank": config.q_lora_rank,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "norm_topk_prob": config.norm_topk_prob,
        "first_k_dense_replace": len(config.mlp_only_layers),
        "num_nextn_predict_layers": 0,
    }


def _block(place: Place) -> Block:
    rope, width = dict(place.config.rope_scaling), place.config.head_dim
    every = rope.get("mscale_all_dim")
    scale = width**-0.5 * (yarn_mscale(rope["factor"], every) ** 2 if every else 1.0)
    return Block(place, LatentAttention(place, scale=scale), feed_forward(place, score="sigmoid"))


class _Stored(Stored):
    def is_left(self, name: str, config: ModelConfig) -> bool:
        """Layers of multi-token prediction."""
        layer = LAYER.match(name)
        return layer is not None and int(layer[1]) >= config.num_hidden_layers


DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    "DeepseekV3",
    read=_read,
    write=_write,
    defaults={
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    neutral={
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "decoder_sparse_step": 1,
    },
    block=_block,
    stored=_Stored(),
)
FAMILIES.add("deepseek_v3", DEEPSEEK_V3)
