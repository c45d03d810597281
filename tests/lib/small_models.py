"""Small models of transformers' families: their own configurations with every width cut down.

Few layers, of each kind that the configuration has one; dropout and all else as by default.
"""

import re

import torch

AUTO = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
}
# Models with images, of which the text alone is taken.
IMAGES = {
    "image-text": ("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
}
EVERY = AUTO | IMAGES
LEFT_OUT = {
    "blt": "its local encoder's width follows from several fields",
    "dbrx": "its configuration has no rope_theta, which its model reads",
    "dots3_note": "its vision tower's widths follow from several fields",
    "gemma3n": "needs timm (gemma3n_text is here)",
    "gemma4_assistant": "has no layers of its own without another model's cache",
    "gemma4_unified_assistant": "has no layers of its own without another model's cache",
    "mimo_v2_flash": "its rotary width is a third of a head's, and then odd",
    "musicgen": "is three models, and its configuration is of none",
    "musicgen_melody": "is three models, and its configuration is of none",
    "nemo_speechlm": "computes from sound",
    "reformer": "has an attention of its own, and needs factors of its width",
    "vibevoice_asr": "is 700 million parameters of sound, whatever its widths",
    "voxtral_realtime": "computes from sound",
    "zamba": "shares weights between layers, of which it needs dozens",
    "zamba2": "shares weights between layers, of which it needs dozens",
}

# Upper bounds of a configuration's numbers, matched by full name; the first match applies.
SIZES = {
    re.compile(names): size
    for names, size in {
        r"(.*_)?vocab_size(_.*)?|.*_group_vocab": 64,
        r".*_token_(id|index)": 63,
        r"first_k_dense_replace|num_kv_shared_layers|num_(nextn_predict|mtp|dense|hash)_layers|.*_?groups?": 1,
        r"(.*_)?(n|num)_heads?|(.*_)?attention_heads|(.*_)?num_(key_value|kv|key|value|query)_(heads|groups)": 2,
        r"(.*_)?num_hidden_layers|n_layers?|(num_|.*_)?layers|num_blocks": 2,
        r"qk_head_dim": 32,
        r"(.*_)?head_(dim|size)|kv_channels|d_kv|d_head|dim_head|.*lora_rank|mamba_d_state|.*state_size": 16,
        r"(.*_)?hidden_size|d_model|n_embd|(emb_|embedding_)?dim|(.*_)?embedding_size|lru_width|word_embed_proj_dim|"
        r"dim_model_base|d_latents|intra_bottleneck_size|(.*_)?intermediate_size(_mlp)?|(.*_)?ffn_dim|d_?ff|dim_ff|d_inner|"
        r"(.*_)?hidden_dim|(.*_)?ffn_hidden_size|feed_forward_size|.*_width|embedding_rank|ple_embed_dim": 32,
        r"(moe_)?num_experts|n_routed_experts|num_local_experts": 4,
        r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts": 2,
        r"(.*_)?max_.*position.*|n_positions|n_ctx|model_max_length|max_seq_len|max_(source|target)_positions": 128,
        r"sliding_window(_size)?|attention_window_size|window_size|local_attention": 4,
        r"rotary_dim": 8,
    }.items()
}
OWN = {  # models that need fields beyond these rules to build, or to have attention
    "bamba": {"mamba_d_head": 32, "attn_layer_indices": [1]},
    "codegen": {"n_head": 4},
    "cohere_compass_text": {
        "rope_parameters": {
            k: {"rope_type": "default", "rope_theta": 1e4}
            for k in ("sliding_attention", "full_attention")
        }
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots3_note_text": {"head_dim": 32, "per_layer_config": {}},
    "esm": {"vocab_size": 64, "mask_token_id": 5, "pad_token_id": 1},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
        "window_size": 4,
    },
    "granitemoehybrid": {"mamba_d_head": 32, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "led": {"attention_window": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longformer": {"attention_window": [4, 4]},
    "mamba2": {"head_dim": 32},
    "mimo_v2_flash": {"head_dim": 24},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "output_gate_type": "sigmoid",
    },
    "qwen2_vl_vision": {"depth": 2, "embed_dim": 32, "num_heads": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xmod": {"default_language": "en_XX"},
    "chameleon": {"vocabulary_map": {"<image>": 60, "IMGIMGAZ": 61, "IMGIMGBZ": 62}},
    "hunyuan_vl_text": {"head_dim": 16},
    "mistral4": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 128,
        }
    },
    **{
        f"{kind}_text": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": section,
                "partial_rotary_factor": sum(section) / 8,
            }
        }
        for kind, section in (
            ("qwen2_vl", [2, 3, 3]),
            ("qwen2_5_vl", [2, 3, 3]),
            ("qwen2_5_omni", [2, 3, 3]),
            ("glm4v", [2, 3, 3]),
            ("glm4v_moe", [1, 1, 2]),
            ("glm_ocr", [2, 3, 3]),
            ("paddleocr_vl", [2, 3, 3]),
            ("ernie4_5_vl_moe", [3, 3, 2]),
        )
    },
}


def smaller(fields: dict) -> dict:
    found = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            value = value if str(name).startswith("rope") else smaller(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            value = min(
                [value, *(size for names, size in SIZES.items() if names.fullmatch(str(name)))][:2]
            )
        found[name] = value
    if "sliding_window" in found:  # narrow enough to matter, and enabled
        found["sliding_window"] = 4
    if "use_sliding_window" in found:
        found["use_sliding_window"] = True
    layers = found.get("num_hidden_layers", 2)
    for name in ("layer_types", "layers_block_type"):  # one layer of each kind
        kinds = list(dict.fromkeys(found.get(name) or ()))
        if found.get("sliding_window") and kinds == ["full_attention"]:
            kinds.insert(0, "sliding_attention")
        if kinds:
            layers = found["num_hidden_layers"] = max(layers, len(kinds))
            found[name] = (kinds * layers)[:layers]
    for name, value in found.items():
        if isinstance(value, list) and len(value) == fields.get("num_hidden_layers"):
            found[name] = value[:layers]
    if "qk_rope_head_dim" in found:
        found["head_dim"] = found["qk_rope_head_dim"]
    if "per_layer_config" in found:
        found["per_layer_config"] = {
            k: v for k, v in found["per_layer_config"].items() if int(k) < layers
        }
    return found


def kinds(head: str) -> list[str]:
    """The model types of a head that can be built small; of those with images, the ones that no
    other head has.
    """
    from transformers.models.auto import modeling_auto

    others = {kind for name in AUTO for kind in kinds(name)} if head in IMAGES else ()
    names = getattr(modeling_auto, EVERY[head][1])
    return [kind for kind in names if kind not in LEFT_OUT and kind not in others]


def config_of(kind: str):
    """The small configuration of a model type."""
    import transformers

    default = transformers.AutoConfig.for_model(kind)
    fields = {**smaller(default.to_dict()), **OWN.get(kind, {})}
    for value in fields.values():
        if isinstance(value, dict) and value.get("model_type") in OWN:
            value.update(OWN[value["model_type"]])
    for name in ("transformers_version", "architectures", "dtype"):
        fields.pop(name, None)
    return type(default).from_dict(fields)


def build(kind: str, head: str, attn_implementation: str | None = "eager"):
    """A small model in evaluation mode; attn_implementation None: the family's default."""
    import transformers

    chosen = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    torch.manual_seed(0)
    model = getattr(transformers, EVERY[head][0]).from_config(config_of(kind), **chosen).eval()
    with torch.no_grad():  # transformers initializes weights too small for attention to matter
        for p in model.parameters():
            if p.dim() > 1 and p.is_floating_point():
                p.normal_(std=p.shape[-1] ** -0.5)
    return model
