"""The smallest configuration of each family."""

from training import QWEN3

SMALL = {**QWEN3, "vocab_size": 100, "num_hidden_layers": 4, "head_dim": 16}


ALTERNATING = ["sliding_attention", "full_attention"] * 2


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}


SHAPES = {
    "mistral": {**SMALL, "model_type": "mistral", "sliding_window": 5},
    "qwen2": {**SMALL, "model_type": "qwen2", "tie_word_embeddings": False},
    "gemma3": {
        **SMALL,
        "model_type": "gemma3_text",
        "sliding_window": 5,
        "layer_types": ALTERNATING,
        "query_pre_attn_scalar": 24,
        "rope_theta": 10000.0,
        "rope_local_base_freq": 100.0,
    },
    "gpt_oss": {
        **SMALL,
        "model_type": "gpt_oss",
        "tie_word_embeddings": False,
        "sliding_window": 5,
        "layer_types": ALTERNATING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.5,
        "rope_parameters": YARN,
    },
    # Heads that two ranks cannot share.
    "odd": {
        **SMALL,
        "model_type": "gpt_oss",
        "tie_word_embeddings": False,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "sliding_window": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": YARN,
    },
    "deepseek_v3": {
        **SMALL,
        "model_type": "deepseek_v3",
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "rope_parameters": YARN,
    },
    "olmo2": {**SMALL, "model_type": "olmo2", "tie_word_embeddings": False},
    "phi3": {
        **SMALL,
        "model_type": "phi3",
        "tie_word_embeddings": False,
        "head_dim": 8,
        "partial_rotary_factor": 0.5,
        "sliding_window": 5,
        "original_max_position_embeddings": 8,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.5],
            "long_factor": [1.5, 4.0],
        },
    },
    "glm4": {**SMALL, "model_type": "glm4", "tie_word_embeddings": False},
}
