"""Faults planted in models for `tilewright verify`, as libraries and people make them: each has the
module in which it is found, and words of its message.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
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


def drawn(config, dtype) -> Any:
    """A model whose norms and biases are not those that it begins with."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def tiny(kind: str = "llama", dtype=torch.float32, **changes) -> Any:
    from transformers import AutoConfig

    return drawn(AutoConfig.for_model(kind, **{**COMMON, **FAMILIES[kind], **changes}), dtype)


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
    """make: builds the model with its fault.   module: the one named first.   words: words of its
    message.   options: `verify`'s.   unseen: documented as not seen.   also: other modules that
    are named, None: any.   refused: the message is that of `Unverifiable`.
    """

    make: Callable[[], nn.Module]
    module: str = ""
    words: str = ""
    options: Mapping[str, Any] = MappingProxyType({})
    unseen: bool = False
    also: Collection[str] | None = ()
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
        assert self.also is None or set(said) - {self.module} <= {*self.also}, str(found)


PLANTS: dict[str, Plant] = {}


def plant(module: str = "", words: str = "", **options):
    """Registers the plant of a function that makes the model."""

    def add(make):
        PLANTS[make.__name__] = Plant(make, module, words, **options)
        return make

    return add


def layers_until(module: str, model) -> Any:
    """A model of as few layers as have the module.   model: arguments of `tiny`."""
    return tiny(**{"num_hidden_layers": 1 + ("layers.1." in module), **dict(model)})


def changed(module: str = "", words: str = "", model=(), **options):
    """Registers the plant of a function that changes the model."""

    def add(change):
        def make():
            made = layers_until(module, model)
            change(made)
            return made

        PLANTS[change.__name__] = Plant(make, module, words, **options)
        return change

    return add


def forward_of(module: str, words: str, at: str | None = None, eager=False, model=(), **options):
    """Registers the plant of a module's new forward(own, ...).   at: the module, if another one is
    named.   eager: with the eager attention.
    """

    def add(forward):
        def make():
            made = layers_until(module, model)
            if eager:
                made.set_attn_implementation("eager")
            patched(made.get_submodule(module if at is None else at), forward)
            return made

        PLANTS[forward.__name__] = Plant(make, module, words, **options)
        return forward

    return add


@contextlib.contextmanager
def replaced(names: dict[str, Any], **changes):
    before = {name: names[name] for name in changes}
    names.update(changes)
    try:
        yield
    finally:
        names.update(before)


def with_functions(own, arguments, **changes):
    """What a module's forward gives with other functions than those of transformers' module."""
    with replaced(type(own.__self__).forward.__globals__, **changes):
        return own(*arguments[0], **arguments[1])


class Scaled(torch.autograd.Function):
    """What it is given, with another gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None


BFLOAT16, TWO = {"dtype": torch.bfloat16}, {"num_hidden_layers": 2}
EXPERTS = {"kind": "qwen3_moe"}
FIRST, ATTENTION = "model.layers.0.self_attn", "model.layers.1.self_attn"
MLP = "model.layers.0.mlp"
CAUSAL = "LlamaForCausalLM"

# ---- attention


def rotated_by_pairs(x, cos, sin):
    half = cos.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


@forward_of(ATTENTION, "it agrees with interleaved rotary embedding")
def interleaved_rope(own, *args, **kwargs):
    def apply(q, k, cos, sin, **_):
        return rotated_by_pairs(q, cos, sin), rotated_by_pairs(k, cos, sin)

    return with_functions(own, (args, kwargs), apply_rotary_pos_emb=apply)


@forward_of(ATTENTION, "it agrees with keys without rotary embedding")
def keys_without_rope(own, *args, **kwargs):
    rotate = type(own.__self__).forward.__globals__["apply_rotary_pos_emb"]

    def apply(q, k, cos, sin, **_):
        return rotate(q, k, cos, sin)[0], k

    return with_functions(own, (args, kwargs), apply_rotary_pos_emb=apply)


@forward_of(ATTENTION, "it agrees with key and value heads that are tiled", eager=True)
def tiled_heads(own, *args, **kwargs):
    return with_functions(own, (args, kwargs), repeat_kv=lambda x, n: x.repeat(1, n, 1, 1))


@changed(
    words="the model has no model.layers.0.self_attn.q_proj.bias",
    model={"kind": "qwen2"},
    refused=True,
)
def bias_dropped_from_the_module(model):
    model.model.layers[0].self_attn.q_proj.bias = None


@changed(ATTENTION, "dropout is on (attention_dropout 0.1)", model={"attention_dropout": 0.1})
def attention_left_in_training_mode(model):
    model.eval().model.layers[1].self_attn.train()


@forward_of(
    ATTENTION, "it agrees with a window of 5", eager=True, model={"kind": "mistral"}, also=None
)
def window_one_longer(own, *args, attention_mask=None, **kwargs):
    if attention_mask is not None:
        at = torch.arange(attention_mask.shape[-1])
        one = (at[:, None] - at[None] == 4) & (attention_mask.amax(-1, keepdim=True) == 0)
        attention_mask = attention_mask.masked_fill(one, 0)
    return own(*args, attention_mask=attention_mask, **kwargs)


@changed(ATTENTION, "without the window of 4", model={"kind": "mistral", **BFLOAT16})
def dropped_window(model):
    from transformers import AttentionInterface

    def windowless(module, q, k, v, mask, scaling=None, **kwargs):
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=q.shape[2] > 1, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("windowless", windowless)
    attention = model.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "windowless"


@forward_of(FIRST, "ignores the padding mask")
def ignored_mask(own, *args, attention_mask=None, **kwargs):
    return own(*args, attention_mask=None, **kwargs)


@forward_of(ATTENTION, "leak", eager=True, also=None)
def mask_of_one_token_more(own, *args, attention_mask=None, **kwargs):
    if attention_mask is not None:
        attention_mask = attention_mask.clone()
        attention_mask.diagonal(1, -2, -1)[:] = 0
    return own(*args, attention_mask=attention_mask, **kwargs)


@forward_of(ATTENTION, "stale cache: token 17 computed from the cache", model=BFLOAT16)
def stale_cache(own, *args, **kwargs):
    out = own(*args, **kwargs)
    # Its name since transformers 5.24, and before.
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if cache is not None:
        keys = cache.layers[1].keys
        keys[:, :, -1] = keys[:, :, -2]
    return out


@changed(FIRST, "its own config has max_position_embeddings 48, the model's has 64", model=BFLOAT16)
def config_of_a_module(model):
    """Nothing that is computed depends on it."""
    attention = model.model.layers[0].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config.max_position_embeddings = 48


# ---- positions, padding


# Positions of a full row are wrong for a cached token, too.
@forward_of("model", "position_ids for rotary_emb differs", also={FIRST})
def positions_off_by_one(own, *args, position_ids=None, **kwargs):
    """Rotary attention has the same values: positions count by their differences."""
    if position_ids is None:
        position_ids = torch.arange(TOKENS)[None]
    return own(*args, position_ids=position_ids + 1, **kwargs)


@forward_of(CAUSAL, "fails on the padded input with IndexError: padding", at="model")
def fails_on_padding(own, *args, attention_mask=None, **kwargs):
    if attention_mask is not None and not attention_mask.all():
        raise IndexError("padding")
    return own(*args, attention_mask=attention_mask, **kwargs)


@forward_of(FIRST, "padded input", at="model")
def takes_padding_to_be_left(own, *args, attention_mask=None, **kwargs):
    if attention_mask is not None and attention_mask.dim() == 2:
        S, lengths = attention_mask.shape[1], attention_mask.sum(1, keepdim=True)
        attention_mask = (torch.arange(S) >= S - lengths).to(attention_mask.dtype)
    return own(*args, attention_mask=attention_mask, **kwargs)


# ---- rotary frequencies

ROTARY = "model.rotary_emb"


@changed(ROTARY, "rotary base 10000 in the module, 1000000 by the configuration", model=BFLOAT16)
def another_base(model):
    model.model.rotary_emb.inv_freq = 1 / 10000 ** (torch.arange(0, 8, 2) / 8)


@changed(ROTARY, "rotary base 1001000 in the module, 1000000 by the configuration")
def base_slightly_off(model):
    model.model.rotary_emb.inv_freq = 1 / 1001000 ** (torch.arange(0, 8, 2) / 8)


@changed(ROTARY, "inv_freq is not that of the configuration")
def frequency_slightly_off(model):
    """As far as a rounding of bfloat16 takes it, in a buffer that is float32."""
    model.model.rotary_emb.inv_freq[1] *= 1.001


@forward_of(ROTARY, "rotary base 10000 in the module, 1000000 by the configuration")
def rotary_base_of_a_kernel(own, x, position_ids):
    angle = position_ids[..., None].float() / 10000 ** (torch.arange(0, 8, 2) / 8)
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


# ---- MLP, norms, embedding


@forward_of(MLP, "it agrees with gate and up swapped")
def gate_and_up_swapped(own, x):
    mlp = own.__self__
    return mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))


@changed(unseen=True)
def gate_and_up_modules_swapped(model):
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


@changed(
    "model.layers.0.mlp.act_fn",
    "computes another function than GELUTanh()",
    model={"kind": "gemma3_text", **BFLOAT16, **TWO},
)
def another_activation(model):
    model.model.layers[0].mlp.act_fn = nn.GELU()


@forward_of(MLP, "two runs of the same input differ")
def dropout_of_an_mlp(own, x):
    return nn.functional.dropout(own(x), 0.2, training=True)


@forward_of("model.layers.0.mlp.down_proj", "differs from float64")
def downcast_in_an_mlp(own, x):
    return own(x.bfloat16().float())


@forward_of(MLP, "in evaluation mode; in training mode it agrees")
def wrong_in_evaluation(own, x):
    return own(x) * (1 if own.__self__.training else 1.01)


@forward_of(MLP, "under torch.no_grad; with gradients it agrees")
def wrong_without_gradients(own, x):
    return own(x) * (1 if torch.is_grad_enabled() else 1.01)


@forward_of(MLP, "40 tokens input", options={"lengths": (40,)})
def wrong_beyond_30_tokens(own, x):
    return own(x) * (1.01 if x.shape[1] > 30 else 1)


PLANTS["wrong_beyond_what_is_asked"] = Plant(PLANTS["wrong_beyond_30_tokens"].make, unseen=True)


@forward_of(MLP, "differs from float64")
def wrong_in_a_batch_of_one(own, x):
    return own(x) * (1.01 if len(x) == 1 else 1)


@forward_of("model.layers.1.mlp", "output is detached: no gradient passes it", model=BFLOAT16)
def detached_output(own, x):
    return own(x).detach()


POST = "model.layers.0.post_attention_layernorm"
EPS = {"rms_norm_eps": 1e-6}


@changed(POST, "eps 1e-05 in the module, 1e-06 by the configuration", model={**EPS, **BFLOAT16})
def eps_of_a_norm(model):
    model.get_submodule(POST).variance_epsilon = 1e-5


@forward_of("model.layers.0.input_layernorm", "it agrees with eps 0.001; the conf", model=EPS)
def eps_of_a_kernel(own, x):
    return nn.functional.rms_norm(x, (32,), own.__self__.weight, 1e-3)


@forward_of(
    "model.norm", "leak: the second half, changed, moves the first half here", model=BFLOAT16
)
def leak_of_a_middle_token(own, x):
    """Not of the last one, which alone is changed first."""
    y = own(x)
    return torch.cat((y[:, :1] + x[:, x.shape[1] * 3 // 4, None], y[:, 1:]), 1)


@changed(FIRST, "layer_idx 1 in the module, 0 by the configuration", also=None, model=TWO)
def layers_swapped(model):
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


@forward_of("model.embed_tokens", "it is 2^1 times the right one", also=None)
def embedding_scaled(own, ids):
    return own(ids) * 2


# ---- gradients

UP = "model.layers.0.mlp.up_proj"


@changed(UP, "gradient of weight differs")
def gradient_slightly_off(model):
    model.get_submodule(UP).weight.register_hook(lambda g: g * (1 + 2**-7))


@changed(UP, "gradient of weight differs")
def gradient_with_an_offset(model):
    model.get_submodule(UP).weight.register_hook(lambda g: g + 1e-3)


@forward_of("model.norm", "it is 2^-7 times the right one", model=BFLOAT16)
def gradient_of_a_kernel(own, x):
    return own(Scaled.apply(x, 2**-7))


@forward_of("model.layers.1.mlp", "differs from float64", model=BFLOAT16)
def gradient_two_percent_off_in_bfloat16(own, x):
    return own(Scaled.apply(x, 0.98))


# ---- experts

OF_EXPERTS = "model.layers.1.mlp.experts"


@forward_of(OF_EXPERTS, "", model=EXPERTS, also=None)
def experts_with_a_nan(own, x, index, weights):
    y = own(x, index, weights)
    return torch.where(torch.arange(len(y))[:, None] == 3, torch.nan, y)


@changed(
    "model.layers.1.mlp.gate",
    "norm_topk_prob",
    model={**EXPERTS, "norm_topk_prob": True},
    also=None,
)
def scores_not_normalized(model):
    model.model.layers[1].mlp.gate.norm_topk_prob = False


@forward_of(OF_EXPERTS, "it agrees with experts 1 and 3 swapped", model=EXPERTS)
def swapped_experts(own, hidden_states, top_k_index, top_k_weights):
    return own(hidden_states, torch.tensor([0, 3, 2, 1])[top_k_index], top_k_weights)


# ---- logits and the loss


GEMMA2 = {"at": "", "model": {"kind": "gemma2"}, "also": None}


@forward_of("Gemma2ForCausalLM", "it agrees with a final softcap of 2", **GEMMA2)
def final_softcap(own, *args, **kwargs):
    with replaced(vars(own.__self__.config), final_logit_softcapping=2.0):
        return own(*args, **kwargs)


@forward_of("Gemma2ForCausalLM", "it agrees with logits without the final softcap", **GEMMA2)
def final_softcap_dropped(own, *args, **kwargs):
    with replaced(vars(own.__self__.config), final_logit_softcapping=None):
        return own(*args, **kwargs)


@forward_of(CAUSAL, "a final softcap of 30.0; the configuration has none", at="lm_head")
def final_softcap_of_another_family(own, x):
    return 30 * torch.tanh(own(x) / 30)


# The gradient of the embedding lacks a part of the head's, or has one more.
TIES = {"also": {"model.embed_tokens"}}


@changed(
    "lm_head",
    "not tied: its weight is another tensor than model.embed_tokens",
    model={"tie_word_embeddings": True},
    **TIES,
)
def head_not_tied(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


@changed(
    "lm_head", "while tie_word_embeddings is false in the configuration", model=BFLOAT16, **TIES
)
def head_tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def loss_of(words, **options):
    """Registers the plant of a function(own, logits, labels, vocab_size, ...) that is the loss."""

    def add(loss):
        def change(model):
            model.loss_function = functools.partial(loss, model.loss_function)

        change.__name__ = loss.__name__
        changed(CAUSAL, words, **options)(change)
        return loss

    return add


@loss_of("it agrees with labels that are not shifted")
def labels_not_shifted(own, logits, labels, vocab_size, **kwargs):
    return own(logits, labels.roll(1, 1), vocab_size, **kwargs)


@loss_of("it agrees with labels that are shifted twice")
def labels_shifted_twice(own, logits, labels, vocab_size, **kwargs):
    labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    return own(logits, labels, vocab_size, **kwargs)


@loss_of("by the 27 targets here, not by num_items_in_batch 55", also=None)
def mean_over_its_own_targets(own, logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    return own(logits, labels, vocab_size, **kwargs)


@loss_of("it is normalized twice, by 34 once more", model=BFLOAT16)
def loss_normalized_twice(own, logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    count = num_items_in_batch or (labels[:, 1:] != -100).sum()
    return own(logits, labels, vocab_size, num_items_in_batch, **kwargs) / count


# ---- adapters

ADAPTED = "model.layers.1.self_attn.o_proj"


@plant(ADAPTED, "its scale is 1.0, by PEFT's configuration lora_alpha 8 / r 4 = 2.0")
def scale_of_one_adapter():
    model = with_adapter()
    model.base_model.model.get_submodule(ADAPTED).scaling["default"] = 1.0
    return model


@plant(ADAPTED, "the transpose of the adapter's B A")
def transposed_adapter():
    model = with_adapter()
    layer = model.base_model.model.get_submodule(ADAPTED)

    def forward(own, x):
        A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        delta = x.to(A.dtype) @ (B @ A) * layer.scaling["default"]
        return (layer.base_layer(x) + delta).to(x.dtype)

    patched(layer, forward)
    return model


@plant(ADAPTED, "merging adds another delta than B A scale")
def transposed_merge():
    model = with_adapter(torch.bfloat16)
    layer = model.base_model.model.get_submodule(ADAPTED)
    own = layer.get_delta_weight
    layer.get_delta_weight = lambda adapter: own(adapter).T
    return model


# ---- what rows above find in another way: run by the table alone

BEFORE = len(PLANTS)


@changed(ATTENTION, "scaling 0.5 in the module")
def scaling_attribute(model):
    model.model.layers[1].self_attn.scaling = 0.5


@changed(FIRST, "attn_logit_softcapping 0.3 in the module", model={"kind": "gemma2"}, also=None)
def softcap_of_attention(model):
    model.model.layers[0].self_attn.attn_logit_softcapping = 0.3


def with_scale(own, arguments, factor):
    attention = own.__self__
    with replaced(vars(attention), scaling=attention.scaling * factor):
        return own(*arguments[0], **arguments[1])


@forward_of(ATTENTION, "differs from float64")
def scale_dropped_in_code(own, *args, **kwargs):
    return with_scale(own, (args, kwargs), 8**0.5)


@forward_of(ATTENTION, "differs from float64")
def scale_one_percent_off(own, *args, **kwargs):
    return with_scale(own, (args, kwargs), 1.01)


@forward_of(f"{ATTENTION}.q_proj", "differs from float64", model={"kind": "qwen2"})
def bias_dropped_in_code(own, x):
    return nn.functional.linear(x, own.__self__.weight)


@forward_of(ATTENTION, "two runs of the same input differ", eager=True)
def dropout_of_probabilities(own, *args, **kwargs):
    class Dropping:
        softmax = staticmethod(
            lambda *a, **k: nn.functional.dropout(nn.functional.softmax(*a, **k), 0.3)
        )
        dropout = nn.functional.dropout

    class Functions:
        functional = Dropping

    return with_functions(own, (args, kwargs), nn=Functions)


@forward_of(ATTENTION, "differs from float64", also=None)
def positions_of_one_layer(own, *args, position_embeddings=None, **kwargs):
    cos, sin = (t.roll(1, 1) for t in position_embeddings)
    return own(*args, position_embeddings=(cos, sin), **kwargs)


@forward_of("model.layers.0", "differs from float64")
def residual_dropped(own, hidden_states, **kwargs):
    layer = own.__self__
    mixed, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    return mixed + layer.mlp(layer.post_attention_layernorm(mixed))


@forward_of("model.norm", "differs from float64", model={"kind": "gemma"})
def norm_without_one_plus(own, x):
    norm = own.__self__
    return nn.functional.rms_norm(x, (32,), norm.weight, norm.eps)


@changed(f"{MLP}.up_proj", "gradient of weight differs")
def gradient_two_percent_off(model):
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: g * 1.02)


@forward_of("model.layers.1.mlp.experts", "differs from float64", model=EXPERTS)
def weights_of_experts_flipped(own, x, index, weights):
    return own(x, index, weights.flip(-1))


@plant(f"{FIRST}.o_proj", "its scale is 0.5, by PEFT's configuration", also=None)
def scale_of_all_adapters():
    model = with_adapter()
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = 0.5
    return model


FURTHER = [*PLANTS][BEFORE:]


def results(names: list[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            PLANTS[name].check()
            yield name, "as said"
        except AssertionError as error:
            yield name, str(error)
