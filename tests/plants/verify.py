"""Faults planted in models for `tilewright verify`, as libraries and people make them: each has the
module in which it is found, and words of its message.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

import tilewright

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
    "gemma": {},
    "gemma2": {
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 3.0,
    },
    "qwen2": {},
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


def tiny(kind: str = "llama", dtype=torch.float32, **changes) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**COMMON, **FAMILIES[kind], **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def patched(module, forward) -> None:
    """Replaces an instance's forward by forward(own, ...), as libraries that patch models do."""
    module.forward = functools.partial(forward, module.forward)


def with_adapter(dtype=torch.float32, **changes) -> Any:
    import peft

    config = peft.LoraConfig(target_modules=["o_proj", "up_proj"], r=4)
    model = peft.get_peft_model(tiny(dtype=dtype, **changes), config)
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.5)
    return model


class Plant(NamedTuple):
    """make: builds the model with its fault.   module: that is named.   words: of its message.
    options: of `verify`.   unseen: documented as not seen.   alone: no other module is named.
    refused: the message is that of `Unverifiable`.
    """

    make: Callable[[], nn.Module]
    module: str = ""
    words: str = ""
    options: Mapping[str, Any] = MappingProxyType({})
    unseen: bool = False
    alone: bool = True
    refused: bool = False

    def check(self) -> None:
        """Raises AssertionError unless the fault is found as its row says."""
        try:
            found = tilewright.verify(self.make(), **{"tokens": TOKENS, **self.options})
        except ValueError as error:
            assert self.refused and self.words in str(error), error
            return
        assert not self.refused, str(found)
        said = {f.module: f.message for f in found.findings}
        if self.unseen:
            assert found.ok, str(found)
            return
        assert not found.ok and found.findings[0].module == self.module, str(found)
        assert self.words in said[self.module], said[self.module]
        assert not self.alone or set(said) == {self.module}, str(found)


PLANTS: dict[str, Plant] = {}


def plant(module: str = "", words: str = "", **options):
    def add(make):
        PLANTS[make.__name__] = Plant(make, module, words, **options)
        return make

    return add


@contextlib.contextmanager
def replaced(names: dict[str, Any], **changes):
    before = {name: names[name] for name in changes}
    names.update(changes)
    try:
        yield
    finally:
        names.update(before)


def with_globals(module, **changes) -> None:
    """Gives one module's forward other functions than those of transformers' module."""
    names = type(module).forward.__globals__

    def forward(own, *args, **kwargs):
        with replaced(names, **changes):
            return own(*args, **kwargs)

    patched(module, forward)


def with_own_config(module, **changes) -> None:
    """Gives one module's forward another configuration than the model's, while it runs."""

    def forward(own, *args, **kwargs):
        with replaced(vars(module.config), **changes):
            return own(*args, **kwargs)

    patched(module, forward)


# ---- attention

ATTENTION = "model.layers.1.self_attn"


def rotated_by_pairs(x, cos, sin):
    half = cos.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


@plant(ATTENTION, "it agrees with interleaved rotary embedding")
def interleaved_rope():
    model = tiny()
    with_globals(
        model.model.layers[1].self_attn,
        apply_rotary_pos_emb=lambda q, k, cos, sin, **_: (
            rotated_by_pairs(q, cos, sin),
            rotated_by_pairs(k, cos, sin),
        ),
    )
    return model


@plant(ATTENTION, "it agrees with keys without rotary embedding")
def keys_without_rope():
    model = tiny()
    attention = model.model.layers[1].self_attn
    own = type(attention).forward.__globals__["apply_rotary_pos_emb"]
    with_globals(
        attention, apply_rotary_pos_emb=lambda q, k, cos, sin, **_: (own(q, k, cos, sin)[0], k)
    )
    return model


@plant(ATTENTION, "it agrees with key and value heads that are tiled")
def tiled_heads():
    model = tiny()
    model.set_attn_implementation("eager")
    with_globals(model.model.layers[1].self_attn, repeat_kv=lambda x, n: x.repeat(1, n, 1, 1))
    return model


@plant(ATTENTION, "scaling 0.5 in the module")
def scaling_attribute():
    model = tiny()
    model.model.layers[1].self_attn.scaling = 0.5
    return model


@plant(ATTENTION, "differs from float64")
def scale_dropped_in_code():
    model = tiny()

    def forward(own, *args, **kwargs):
        attention = model.model.layers[1].self_attn
        with replaced(vars(attention), scaling=1.0):
            return own(*args, **kwargs)

    patched(model.model.layers[1].self_attn, forward)
    return model


@plant("model.layers.1.self_attn.q_proj", "differs from float64")
def bias_dropped_in_code():
    model = tiny("qwen2")
    layer = model.model.layers[1].self_attn.q_proj
    patched(layer, lambda own, x: nn.functional.linear(x, layer.weight))
    return model


@plant(ATTENTION, "two runs of the same input differ")
def dropout_of_probabilities():
    model = tiny()
    model.set_attn_implementation("eager")

    class Dropping:
        softmax = staticmethod(
            lambda *a, **k: nn.functional.dropout(nn.functional.softmax(*a, **k), 0.3)
        )
        dropout = nn.functional.dropout

    class Functions:
        functional = Dropping

    with_globals(model.model.layers[1].self_attn, nn=Functions)
    return model


@plant(ATTENTION, "dropout is on (attention_dropout 0.1)")
def attention_left_in_training_mode():
    model = tiny(attention_dropout=0.1).eval()
    model.model.layers[1].self_attn.train()
    return model


@plant("model.layers.0.self_attn", "attn_logit_softcapping 0.3 in the module", alone=False)
def softcap_of_attention():
    model = tiny("gemma2")
    model.model.layers[0].self_attn.attn_logit_softcapping = 0.3
    return model


@plant("model.layers.1.self_attn", "it agrees with a window of 5", alone=False)
def window_one_longer():
    model = tiny("mistral")
    model.set_attn_implementation("eager")

    def forward(own, *args, attention_mask=None, **kwargs):
        if attention_mask is not None:
            S = attention_mask.shape[-1]
            at = torch.arange(S)
            one = (at[:, None] - at[None] == 4) & (attention_mask.amax(-1, keepdim=True) == 0)
            attention_mask = attention_mask.masked_fill(one, 0)
        return own(*args, attention_mask=attention_mask, **kwargs)

    patched(model.model.layers[1].self_attn, forward)
    return model


@plant(ATTENTION, "leak", alone=False)
def mask_of_one_token_more():
    model = tiny()
    model.set_attn_implementation("eager")

    def forward(own, *args, attention_mask=None, **kwargs):
        if attention_mask is not None:
            attention_mask = attention_mask.clone()
            attention_mask.diagonal(1, -2, -1)[:] = 0
        return own(*args, attention_mask=attention_mask, **kwargs)

    patched(model.model.layers[1].self_attn, forward)
    return model


@plant(ATTENTION, "differs from float64")
def scale_one_percent_off():
    model = tiny()
    attention = model.model.layers[1].self_attn
    own = attention.scaling

    def forward(inner, *args, **kwargs):
        with replaced(vars(attention), scaling=own * 1.01):
            return inner(*args, **kwargs)

    patched(attention, forward)
    return model


@plant(words="the model has no model.layers.1.self_attn.q_proj.bias", refused=True)
def bias_dropped_from_the_module():
    model = tiny("qwen2")
    model.model.layers[1].self_attn.q_proj.bias = None
    return model


@plant(ATTENTION, "differs from float64", alone=False)
def positions_of_one_layer():
    model = tiny()

    def forward(own, *args, position_embeddings=None, **kwargs):
        cos, sin = (t.roll(1, 1) for t in position_embeddings)
        return own(*args, position_embeddings=(cos, sin), **kwargs)

    patched(model.model.layers[1].self_attn, forward)
    return model


@plant("LlamaForCausalLM", "a final softcap of 30.0; the configuration has none")
def final_softcap_of_another_family():
    model = tiny()
    patched(model.lm_head, lambda own, x: 30 * torch.tanh(own(x) / 30))
    return model


# ---- rotary frequencies


@plant("model.rotary_emb", "rotary base 500000 in the module, 1000000 by the conf")
def another_base():
    model = tiny()
    model.model.rotary_emb.inv_freq = 1 / 500000 ** (torch.arange(0, 8, 2) / 8)
    return model


@plant("model.rotary_emb", "rotary base 1001000 in the module, 1000000 by the conf")
def base_slightly_off():
    model = tiny()
    model.model.rotary_emb.inv_freq = 1 / 1001000 ** (torch.arange(0, 8, 2) / 8)
    return model


# ---- MLP, norms, embedding


@plant("model.layers.0.mlp", "it agrees with gate and up swapped")
def gate_and_up_swapped():
    model = tiny()
    mlp = model.model.layers[0].mlp
    patched(mlp, lambda own, x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x)))
    return model


@plant(unseen=True)
def gate_and_up_modules_swapped():
    model = tiny()
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
    return model


@plant("model.layers.0.mlp", "two runs of the same input differ")
def dropout_of_an_mlp():
    model = tiny()
    patched(
        model.model.layers[0].mlp, lambda own, x: nn.functional.dropout(own(x), 0.2, training=True)
    )
    return model


@plant("model.layers.0.mlp.down_proj", "differs from float64")
def downcast_in_an_mlp():
    model = tiny()
    layer = model.model.layers[0].mlp.down_proj
    patched(layer, lambda own, x: own(x.bfloat16().float()))
    return model


@plant("model.layers.0.mlp", "in evaluation mode; in training mode it agrees")
def wrong_in_evaluation():
    model = tiny()
    mlp = model.model.layers[0].mlp
    patched(mlp, lambda own, x: own(x) * (1 if mlp.training else 1.01))
    return model


@plant("model.layers.0.mlp", "under torch.no_grad; with gradients it agrees")
def wrong_without_gradients():
    model = tiny()
    patched(
        model.model.layers[0].mlp, lambda own, x: own(x) * (1 if torch.is_grad_enabled() else 1.01)
    )
    return model


def wrong_beyond_30_tokens():
    model = tiny()
    patched(model.model.layers[0].mlp, lambda own, x: own(x) * (1.01 if x.shape[1] > 30 else 1))
    return model


PLANTS["wrong_beyond_30_tokens"] = Plant(
    wrong_beyond_30_tokens, "model.layers.0.mlp", "40 tokens input", {"lengths": (40,)}
)
PLANTS["wrong_beyond_what_is_asked"] = Plant(wrong_beyond_30_tokens, unseen=True)


@plant("model.layers.0", "differs from float64")
def residual_dropped():
    model = tiny()
    layer = model.model.layers[0]

    def forward(own, hidden_states, **kwargs):
        mixed, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        return mixed + layer.mlp(layer.post_attention_layernorm(mixed))

    patched(layer, forward)
    return model


@plant("model.norm", "differs from float64")
def norm_without_one_plus():
    model = tiny("gemma")
    norm = model.model.norm
    patched(norm, lambda own, x: nn.functional.rms_norm(x, (32,), norm.weight, norm.eps))
    return model


@plant("model.layers.0.mlp.up_proj", "gradient of weight differs")
def gradient_two_percent_off():
    model = tiny()
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: g * 1.02)
    return model


@plant("model.layers.0.mlp.up_proj", "gradient of weight differs")
def gradient_with_an_offset():
    model = tiny()
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: g + 1e-3)
    return model


@plant("model.layers.1.mlp", "differs from float64")
def gradient_one_percent_off_in_bfloat16():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * 0.98

    model = tiny(dtype=torch.bfloat16)
    patched(model.model.layers[1].mlp, lambda own, x: own(Scaled.apply(x)))
    return model


@plant("model.layers.0.mlp", "differs from float64")
def wrong_in_a_batch_of_one():
    model = tiny()
    patched(model.model.layers[0].mlp, lambda own, x: own(x) * (1.01 if len(x) == 1 else 1))
    return model


@plant("model.layers.0.self_attn", "layer_idx 1 in the module, 0 by the configuration", alone=False)
def layers_swapped():
    model = tiny()
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]
    return model


@plant("model.embed_tokens", "it is 2^1 times the right one", alone=False)
def embedding_scaled():
    model = tiny()
    patched(model.model.embed_tokens, lambda own, ids: own(ids) * 2)
    return model


# ---- experts


@plant("model.layers.1.mlp.experts", "", alone=False)
def experts_with_a_nan():
    model = tiny("qwen3_moe")

    def forward(own, x, index, weights):
        y = own(x, index, weights)
        return torch.where(torch.arange(len(y))[:, None] == 3, torch.nan, y)

    patched(model.model.layers[1].mlp.experts, forward)
    return model


@plant("model.layers.1.mlp.gate", "norm_topk_prob", alone=False)
def scores_not_normalized():
    model = tiny("qwen3_moe", norm_topk_prob=True)
    model.model.layers[1].mlp.gate.norm_topk_prob = False
    return model


@plant("model.layers.1.mlp.experts", "differs from float64")
def weights_of_experts_flipped():
    model = tiny("qwen3_moe")
    patched(
        model.model.layers[1].mlp.experts,
        lambda own, x, index, weights: own(x, index, weights.flip(-1)),
    )
    return model


# ---- logits and the loss


@plant("Gemma2ForCausalLM", "it agrees with a final softcap of 2", alone=False)
def final_softcap():
    model = tiny("gemma2")
    with_own_config(model, final_logit_softcapping=2.0)
    return model


@plant("Gemma2ForCausalLM", "it agrees with logits without the final softcap", alone=False)
def final_softcap_dropped():
    model = tiny("gemma2")
    with_own_config(model, final_logit_softcapping=None)
    return model


def with_loss(change):
    model = tiny()
    own = model.loss_function

    def loss(logits, labels, vocab_size, **kwargs):
        return own(*change(logits, labels), vocab_size, **kwargs)

    model.loss_function = loss
    return model


@plant("LlamaForCausalLM", "it agrees with labels that are not shifted")
def labels_not_shifted():
    return with_loss(lambda logits, labels: (logits, labels.roll(1, 1)))


@plant("LlamaForCausalLM", "it agrees with labels that are shifted twice")
def labels_shifted_twice():
    def change(logits, labels):
        return logits, nn.functional.pad(labels[:, 1:], (0, 1), value=-100)

    return with_loss(change)


@plant("LlamaForCausalLM", "by the 27 targets here, not by num_items_in_batch 55", alone=False)
def mean_over_its_own_targets():
    model = tiny()
    own = model.loss_function

    def loss(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
        return own(logits, labels, vocab_size, **kwargs)

    model.loss_function = loss
    return model


# ---- adapters


@plant(
    "model.layers.1.self_attn.o_proj",
    "its scale is 1.0, by PEFT's configuration lora_alpha 8 / r 4 = 2.0",
)
def scale_of_one_adapter():
    model = with_adapter()
    model.base_model.model.model.layers[1].self_attn.o_proj.scaling["default"] = 1.0
    return model


@plant("model.layers.0.self_attn.o_proj", "its scale is 0.5, by PEFT's configuration", alone=False)
def scale_of_all_adapters():
    model = with_adapter()
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = 0.5
    return model


def results(names: list[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            PLANTS[name].check()
            yield name, "as said"
        except AssertionError as error:
            yield name, str(error)
