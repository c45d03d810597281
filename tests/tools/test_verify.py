"""tilewright verify: faults planted in models are named with their module and their cause; clean
models have no finding; bad input ends in one sentence.
"""

import copy
import functools

import pytest
import torch
from helpers import keep_tables
from torch import nn

import tilewright
from tilewright.integrations.transformers import PARTS, accelerate
from tilewright.tools import verify as tool

pytest.importorskip("transformers", minversion="5.7", reason="needs transformers 5.7 or later")

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # so that every layer matters
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}
TOKENS = 20


@pytest.fixture(autouse=True)
def _tables(monkeypatch):
    keep_tables(monkeypatch)


def tiny(kind="llama", dtype=torch.float32, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**COMMON, **FAMILIES[kind], **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def verified(model, **options):
    return tilewright.verify(model, tokens=TOKENS, **options)


# ---- planted faults: each returns the model, the module, and words of the message


def patched(module, forward):
    """Replaces an instance's forward by forward(own, ...), as libraries that patch models do."""
    module.forward = functools.partial(forward, module.forward)


def wrong_rotary_base(dtype):
    model = tiny(dtype=dtype)
    rotary = model.model.rotary_emb
    rotary.inv_freq = 1 / 10000 ** (torch.arange(0, 8, 2) / 8)
    return model, "model.rotary_emb", "rotary base 10000 in the module, 1000000 by the conf"


def rotary_base_of_a_kernel(dtype):
    model = tiny(dtype=dtype)

    def forward(own, x, position_ids):
        angle = position_ids[..., None].float() / 10000 ** (torch.arange(0, 8, 2) / 8)
        angle = torch.cat((angle, angle), -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    patched(model.model.rotary_emb, forward)
    return model, "model.rotary_emb", "rotary base 10000 in the module, 1000000 by the conf"


def dropped_window(dtype):
    from transformers import AttentionInterface

    def windowless(module, q, k, v, mask, scaling=None, **kwargs):
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=q.shape[2] > 1, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("windowless", windowless)
    model = tiny("mistral", dtype)
    attention = model.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "windowless"
    return model, "model.layers.1.self_attn", "without the window of 4"


def ignored_mask(dtype):
    model = tiny(dtype=dtype)

    def forward(own, *args, attention_mask=None, **kwargs):
        return own(*args, attention_mask=None, **kwargs)

    patched(model.model.layers[0].self_attn, forward)
    return model, "model.layers.0.self_attn", "ignores the padding mask"


def loss_normalized_twice(dtype):
    model = tiny(dtype=dtype)
    own = model.loss_function

    def loss(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
        count = num_items_in_batch or (labels[:, 1:] != -100).sum()
        return own(logits, labels, vocab_size, num_items_in_batch, **kwargs) / count

    model.loss_function = loss
    return model, "LlamaForCausalLM", "it is normalized twice, by 34 once more"


def scaled_gradient(dtype):
    model = tiny(dtype=dtype)
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda g: g * (1 + 2**-7))
    return model, "model.layers.1.mlp.up_proj", "gradient of weight differs"


def scaled_gradient_of_a_kernel(dtype):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * 2**-7

    model = tiny(dtype=dtype)
    patched(model.model.norm, lambda own, x: own(Scaled.apply(x)))
    return model, "model.norm", "it is 2^-7 times the right one"


def swapped_experts(dtype):
    model = tiny("qwen3_moe", dtype)

    def forward(own, hidden_states, top_k_index, top_k_weights):
        return own(hidden_states, torch.tensor([0, 3, 2, 1])[top_k_index], top_k_weights)

    patched(model.model.layers[1].mlp.experts, forward)
    return model, "model.layers.1.mlp.experts", "it agrees with experts 1 and 3 swapped"


def eps_of_a_norm(dtype):
    model = tiny(dtype=dtype, rms_norm_eps=1e-6)
    model.model.layers[0].post_attention_layernorm.variance_epsilon = 1e-5
    name = "model.layers.0.post_attention_layernorm"
    return model, name, "eps 1e-05 in the module, 1e-06 by the configuration"


def eps_of_a_kernel(dtype):
    model = tiny(dtype=dtype, rms_norm_eps=1e-6)
    norm = model.model.layers[0].input_layernorm
    patched(norm, lambda own, x: nn.functional.rms_norm(x, (32,), norm.weight, 1e-3))
    return model, "model.layers.0.input_layernorm", "it agrees with eps 0.001; the conf"


def stale_cache(dtype):
    model = tiny(dtype=dtype)

    def forward(own, *args, past_key_values=None, **kwargs):
        out = own(*args, past_key_values=past_key_values, **kwargs)
        if past_key_values is not None:
            keys = past_key_values.layers[1].keys
            keys[:, :, -1] = keys[:, :, -2]
        return out

    patched(model.model.layers[1].self_attn, forward)
    return model, "model.layers.1.self_attn", "stale cache: token 17 computed from the cache"


def with_adapter(dtype):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny(dtype=dtype), peft.LoraConfig(target_modules=["o_proj", "up_proj"], r=4)
    )
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.5)
    return model


def transposed_adapter(dtype):
    model = with_adapter(dtype)
    layer = model.base_model.model.model.layers[1].self_attn.o_proj

    def forward(own, x):
        A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        delta = x.to(A.dtype) @ (B @ A) * layer.scaling["default"]
        return (layer.base_layer(x) + delta).to(x.dtype)

    patched(layer, forward)
    return model, "model.layers.1.self_attn.o_proj", "the transpose of the adapter's B A"


def transposed_merge(dtype):
    model = with_adapter(dtype)
    layer = model.base_model.model.model.layers[1].self_attn.o_proj
    own = layer.get_delta_weight
    layer.get_delta_weight = lambda adapter: own(adapter).T
    name = "model.layers.1.self_attn.o_proj"
    return model, name, "merging adds another delta than B A scale"


def head_not_tied(dtype):
    model = tiny(dtype=dtype, tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model, "lm_head", "not tied: its weight is another tensor than model.embed_tokens"


FAULTS = (
    wrong_rotary_base, rotary_base_of_a_kernel, dropped_window, ignored_mask,
    loss_normalized_twice, scaled_gradient, scaled_gradient_of_a_kernel, swapped_experts,
    eps_of_a_norm, eps_of_a_kernel, stale_cache, transposed_adapter, transposed_merge, head_not_tied,
)  # fmt: skip
# They add to the named module: a head that is not tied misses a part of the embedding's gradient.
ALSO = {"head_not_tied": {"model.embed_tokens"}}


@pytest.mark.parametrize("fault", FAULTS, ids=[f.__name__ for f in FAULTS])
def test_a_planted_fault_is_named_with_its_module(fault):
    number = FAULTS.index(fault)
    model, module, words = fault(torch.float32 if number % 2 else torch.bfloat16)
    found = verified(model)
    said = {f.module: f.message for f in found.findings}
    assert not found.ok and module in said, str(found)
    assert words in said[module], said[module]
    assert set(said) - {module} <= ALSO.get(fault.__name__, set()), "and no other module is"
