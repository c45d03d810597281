"""tilewright verify: faults planted in models are named with their module and their cause; clean
models have no finding; bad input ends in one sentence.
"""

import copy
import functools
import re
import shutil
import sys

import pytest
import safetensors.torch
import torch
from helpers import keep_tables
from plants.verify import COMMON, TOKENS, patched, tiny, with_adapter
from torch import nn

import tilewright
from tilewright.integrations.transformers import PARTS, accelerate
from tilewright_lab.verify import verify as tool

pytestmark = pytest.mark.packages

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")


@pytest.fixture(autouse=True)
def _tables(monkeypatch):
    keep_tables(monkeypatch)


def verified(model, **options):
    return tilewright.verify(model, tokens=TOKENS, **options)


# ---- planted faults: each returns the model, the module, and words of the message


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

    def forward(own, *args, **kwargs):
        out = own(*args, **kwargs)
        # Its name since transformers 5.24, and before.
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None:
            keys = cache.layers[1].keys
            keys[:, :, -1] = keys[:, :, -2]
        return out

    patched(model.model.layers[1].self_attn, forward)
    return model, "model.layers.1.self_attn", "stale cache: token 17 computed from the cache"


def transposed_adapter(dtype):
    pytest.importorskip("peft")
    model = with_adapter(dtype)
    layer = model.base_model.model.model.layers[1].self_attn.o_proj

    def forward(own, x):
        A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        delta = x.to(A.dtype) @ (B @ A) * layer.scaling["default"]
        return (layer.base_layer(x) + delta).to(x.dtype)

    patched(layer, forward)
    return model, "model.layers.1.self_attn.o_proj", "the transpose of the adapter's B A"


def transposed_merge(dtype):
    pytest.importorskip("peft")
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


def another_activation(dtype):
    model = tiny("gemma3_text", dtype)
    model.model.layers[0].mlp.act_fn = nn.GELU()
    name = "model.layers.0.mlp.act_fn"
    return model, name, "computes another function than GELUTanh()"


def positions_off_by_one(dtype):
    """Rotary attention has the same values: positions count by their differences."""
    model = tiny(dtype=dtype)

    def forward(own, *args, position_ids=None, **kwargs):
        if position_ids is None:
            position_ids = torch.arange(TOKENS)[None]
        return own(*args, position_ids=position_ids + 1, **kwargs)

    model.model.forward = functools.partial(forward, model.model.forward)
    return model, "model", "position_ids for rotary_emb differs"


def detached_output(dtype):
    model = tiny(dtype=dtype)
    patched(model.model.layers[1].mlp, lambda own, x: own(x).detach())
    return model, "model.layers.1.mlp", "output is detached: no gradient passes it"


def fails_on_padding(dtype):
    model = tiny(dtype=dtype)

    def forward(own, *args, attention_mask=None, **kwargs):
        if attention_mask is not None and not attention_mask.all():
            raise IndexError("padding")
        return own(*args, attention_mask=attention_mask, **kwargs)

    model.model.forward = functools.partial(forward, model.model.forward)
    return model, "LlamaForCausalLM", "fails on the padded input with IndexError: padding"


def head_tied(dtype):
    model = tiny(dtype=dtype, num_hidden_layers=1)
    model.lm_head.weight = model.model.embed_tokens.weight
    words = "while tie_word_embeddings is false in the configuration"
    return model, "lm_head", words


def frequency_slightly_off(dtype):
    """As far as a rounding of bfloat16 takes it, in a buffer that is float32."""
    model = tiny(dtype=dtype, num_hidden_layers=1)
    model.model.rotary_emb.inv_freq[1] *= 1.001
    return model, "model.rotary_emb", "inv_freq is not that of the configuration"


def config_of_a_module(dtype):
    """Of which nothing that is computed depends."""
    model = tiny(dtype=dtype, num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config.max_position_embeddings = 48
    words = "its own config has max_position_embeddings 48, the model's has 64"
    return model, "model.layers.0.self_attn", words


def takes_padding_to_be_left(dtype):
    model = tiny(dtype=dtype, num_hidden_layers=1)

    def forward(own, *args, attention_mask=None, **kwargs):
        if attention_mask is not None and attention_mask.dim() == 2:
            lengths = attention_mask.sum(1, keepdim=True)
            S = attention_mask.shape[1]
            attention_mask = (torch.arange(S) >= S - lengths).to(attention_mask.dtype)
        return own(*args, attention_mask=attention_mask, **kwargs)

    model.model.forward = functools.partial(forward, model.model.forward)
    return model, "model.layers.0.self_attn", "padded input"


def leak_of_a_middle_token(dtype):
    """Not of the last one, which alone is changed first."""
    model = tiny(dtype=dtype, num_hidden_layers=1)

    def forward(own, x):
        y = own(x)
        return torch.cat((y[:, :1] + x[:, x.shape[1] * 3 // 4, None], y[:, 1:]), 1)

    patched(model.model.norm, forward)
    return model, "model.norm", "leak: the second half, changed, moves the first half here"


FAULTS = (
    wrong_rotary_base, rotary_base_of_a_kernel, dropped_window, ignored_mask,
    loss_normalized_twice, scaled_gradient, scaled_gradient_of_a_kernel, swapped_experts,
    eps_of_a_norm, eps_of_a_kernel, stale_cache, transposed_adapter, transposed_merge, head_not_tied,
    another_activation, positions_off_by_one, detached_output,
    fails_on_padding, head_tied, frequency_slightly_off, config_of_a_module,
    takes_padding_to_be_left, leak_of_a_middle_token,
)  # fmt: skip
# They add to the named module: a head that is not tied misses a part of the embedding's gradient,
# and one that is tied adds to it.
# Positions of a full row are wrong for a cached token, too.
ALSO = {
    "head_not_tied": {"model.embed_tokens"},
    "head_tied": {"model.embed_tokens"},
    "positions_off_by_one": {"model.layers.0.self_attn"},
}


@pytest.mark.parametrize("fault", FAULTS, ids=[f.__name__ for f in FAULTS])
def test_a_planted_fault_is_named_with_its_module(fault):
    number = FAULTS.index(fault)
    model, module, words = fault(torch.float32 if number % 2 else torch.bfloat16)
    found = verified(model)
    said = {f.module: f.message for f in found.findings}
    assert not found.ok and module in said, str(found)
    assert words in said[module], said[module]
    assert set(said) - {module} <= ALSO.get(fault.__name__, set()), "and no other module is"


def test_a_class_that_a_library_has_patched_is_not_the_reference(monkeypatch):
    """As Liger does: classes and functions are replaced in transformers' own module."""
    from transformers.models.llama import modeling_llama

    def forward(self, x):
        return self.down_proj(nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))

    own = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: own(q, k, cos, -sin)
    )
    found = verified(tiny(num_hidden_layers=1))
    assert {f.module for f in found.findings} == {
        "model.layers.0.mlp",
        "model.layers.0.self_attn",
    }, str(found)
    assert any(re.search(r"a forward of .*test_verify", by) for _, by in found.seen), found.seen


# ---- models without a fault


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3_moe", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("patch", [False, True], ids=["plain", "accelerated"])
def test_a_clean_model_has_no_finding(kind, dtype, patch):
    # Roundings add up over layers in bfloat16; Gemma's layers have two types.
    layers = 2 if dtype == torch.bfloat16 or kind == "gemma3_text" else 1
    model = tiny(kind, dtype, num_hidden_layers=layers)
    if patch:
        accelerate(model, parts=PARTS, quiet=True)
    found = verified(model)
    assert found.ok, str(found)
    assert found.scenes == ("plain", "padded", "packed")
    assert max(row.units for row in found.rows) < 1 and not found.left.get("norm")
    seen = " ".join(by for _, by in found.seen)
    for op in ("rmsnorm[", "rope[", "attention[", "linear_cross_entropy["):
        assert (op in seen) == patch, seen
    assert patch or "sdpa" in seen, seen


def test_the_callers_autocast_and_no_grad_change_nothing():
    model = tiny(num_hidden_layers=1)
    rows = verified(model).rows
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = verified(model)
    assert found.ok and found.rows == rows
    assert any(row.what.startswith("gradient") for row in rows)


@pytest.mark.parametrize(
    "kind, dtype, changes",
    [
        ("falcon", torch.float32, {}),  # adds to the output of its attention in place
        ("opt", torch.bfloat16, {"ffn_dim": 48, "word_embed_proj_dim": 32}),  # large biases
        ("mamba", torch.float32, {"state_size": 4}),  # no attention, and a cache of its own
    ],
)
def test_a_clean_model_of_another_kind_has_no_finding(kind, dtype, changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    config = AutoConfig.for_model(kind, **{n: COMMON[n] for n in names}, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.1)
    found = verified(model)
    assert found.ok and found.scenes[:2] == ("plain", "padded"), str(found)
    assert not any("Error" in note for note in found.notes), found.notes


def test_a_cache_may_differ_as_far_as_the_eager_twin_does(monkeypatch):
    """Roundings behind massive activations: of a trained model, so that its drift is planted."""
    from tilewright_lab.verify.probes import Moved, cache_drift
    from tilewright_lab.verify.record import observable
    from tilewright_lab.verify.reference import weights_of
    from tilewright_lab.verify.scenes import quiet_state, scenes

    model, drifts = tiny(num_hidden_layers=1), []
    for one in (model, stale_cache(torch.float32)[0]):
        with quiet_state(one, False):
            [plain, *_] = scenes(one, None, TOKENS)
            plain = plain._replace(batch=plain.without_labels())
            drifts.append(cache_drift(one, observable(one, weights_of(one)), plain))
    assert drifts[0] < 1e-4 < 0.1 < drifts[1]

    def far(root, *_):
        return Moved("model.norm", "far", 2.0, 0.3) if root is model else None

    monkeypatch.setattr(tool, "stale_cache", far)
    for drift, ok in ((0.1, True), (0.05, False)):
        monkeypatch.setattr(tool, "cache_drift", lambda root, *_, d=drift: d * (root is not model))
        found = verified(model)
        assert found.ok == ok, str(found)
    assert found.findings[0].message == "stale cache: far"


def test_a_model_with_adapters_and_quantized_layers():
    pytest.importorskip("peft")
    model = with_adapter(torch.float32, num_hidden_layers=1)
    assert verified(model).ok
    quantized = tiny(hidden_size=64, num_hidden_layers=1)
    tilewright.quantize_(quantized, "nf4")
    found = verified(quantized)
    assert found.ok, str(found)
    assert found.notes == ["7 quantized layers: right are their dequantized weights"]


def test_nothing_is_left_behind():
    model = tiny("qwen3_moe", num_hidden_layers=1)
    model.model.layers[0].mlp.train(False)
    weight = model.model.norm.weight
    weight.grad = torch.ones_like(weight)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    held = [dict(vars(m)) for m in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert verified(model).ok
    assert torch.equal(torch.rand(2), expected)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert all(p.grad is None for p in model.parameters() if p is not weight)
    for module, before in zip(model.modules(), held, strict=True):
        assert vars(module).keys() == before.keys()
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_a_leak_in_the_mask_of_the_model_is_seen_without_a_reference(monkeypatch):
    """Documents that see each other, by a mask that the patched model builds."""
    model = tiny(num_hidden_layers=1)
    own = model.model.forward

    def forward(*args, position_ids=None, **kwargs):
        if position_ids is not None:
            position_ids = torch.arange(position_ids.shape[1])[None]
        return own(*args, position_ids=position_ids, **kwargs)

    model.model.forward = forward
    said = {f.module: f.message for f in verified(model).findings}
    assert "leak: " in said["model.layers.0.self_attn"]
    assert "documents that see each other" in said["model.layers.0.self_attn"]


# ---- the given batch, and what cannot be verified


def test_a_given_batch_with_padding_and_a_right_configuration(tmp_path):
    model = tiny(num_hidden_layers=1)
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    found = tilewright.verify(model, {"input_ids": ids, "labels": ids, "attention_mask": mask})
    assert found.ok and found.scenes == ("given", "padded", "packed"), str(found)
    tiny(num_hidden_layers=1, rms_norm_eps=1e-3).config.save_pretrained(tmp_path)
    [finding, *_] = verified(model, config=str(tmp_path)).findings
    assert "eps 1e-06 in the module, 0.001 by the configuration" in finding.message


def without_parameters():
    model = nn.Module()
    model.config = None
    return model


def with_nan():
    model = tiny(num_hidden_layers=1)
    model.model.norm.weight.data[3] = torch.nan
    return model


def rowed(rows=1, **filled):
    ids = torch.arange(3, 12).expand(rows, 9)
    return {"input_ids": ids} | {name: torch.full_like(ids, v) for name, v in filled.items()}


def raising(training):
    """A model that raises in one of its modes."""
    model = tiny(num_hidden_layers=1)

    def forward(own, *args, **kwargs):
        if model.training == training:
            raise KeyError("no")
        return own(*args, **kwargs)

    patched(model.model.norm, forward)
    return model


def without_embedding():
    model = tiny(num_hidden_layers=1)
    model.get_input_embeddings = lambda: None
    return model


def encoder_decoder():
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=8, num_layers=1, num_heads=1, d_ff=8, d_kv=8)
    )


def with_dora():
    model = tiny(num_hidden_layers=1)
    tilewright.nn.add_lora(model, ["q_proj"], rank=2, use_dora=True)
    return model


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: (nn.Linear(2, 2), {}), "without a config"),
        (lambda: (3, {}), "model must be a torch.nn.Module, got int"),
        (lambda: (tiny(), {"tokens": 4}), "tokens must be an int of 8 or more, got 4"),
        (lambda: (tiny(), {"lengths": [40, 4]}), "lengths must be ints of 8 or more, got 4"),
        (lambda: (tiny(), {"batch": {"ids": 1}}), "batch must be a mapping with input_ids"),
        (
            lambda: (tiny(), {"batch": {"input_ids": torch.full((1, 9), 64)}}),
            "input_ids must be from 0 to 63, got 64",
        ),
        (
            lambda: (tiny(), {"batch": {"input_ids": torch.arange(-1, 8)[None]}}),
            "input_ids must be from 0 to 63, got -1",
        ),
        (
            lambda: (tiny(), {"config": 5}),
            "config must be a configuration of transformers, or a folder with one, got int",
        ),
        (lambda: (torch.compile(tiny()), {}), "verify it before torch.compile"),
        (lambda: (without_parameters(), {}), "model is a Module without parameters"),
        (lambda: (with_nan(), {}), "model.norm.weight has values that are not finite"),
        (lambda: (tiny(), {"batch": [1]}), "batch must be a mapping with input_ids, got list"),
        (
            lambda: (tiny(), {"batch": rowed(0)}),
            "batch must have a row of tokens, got input_ids [0, 9]",
        ),
        (lambda: (tiny(), {"batch": rowed(labels=-100)}), "batch must have a target: labels after"),
        (
            lambda: (tiny(), {"batch": rowed(attention_mask=0)}),
            "batch must have a target: labels aft",
        ),
        (
            lambda: (tiny(), {"batch": rowed(labels=64)}),
            "labels that are not -100 must be from 0 to 63, got 64",
        ),
        (
            lambda: (tiny(), {"batch": rowed() | {"labels": torch.zeros(1, 4).long()}}),
            "labels must be a tensor of input_ids' shape [1, 9], got [1, 4]",
        ),
        (lambda: (tiny(), {"tokens": 10**8}), "parameters on 200000000 tokens takes about"),
        (
            lambda: (raising(True), {}),
            "a training step on the plain input fails with KeyError: 'no'",
        ),
        (lambda: (raising(False), {}), "a forward in evaluation mode fails with KeyError: 'no'"),
        (
            lambda: (without_embedding(), {}),
            "it has no embedding of them (LlamaForCausalLM); only language models are verified",
        ),
        (lambda: (encoder_decoder(), {}), "model is an encoder and a decoder (T5ForConditional"),
        (lambda: (tiny().to("meta"), {}), "is on the meta device"),
        (lambda: (with_dora(), {}), "q_proj: its adapter is a variant of LoRA (use_dora)"),
        (
            lambda: (tiny(), {"config": tiny(intermediate_size=40).config}),
            "gate_proj.weight is [48, 32] in the model and [40, 32] by its configuration",
        ),
    ],
)
def test_what_cannot_be_verified_is_said_in_a_sentence(make, words):
    model, options = make()
    with pytest.raises(ValueError, match="") as error:
        tilewright.verify(model, **options)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_command(tmp_path, capsys, monkeypatch):
    from tilewright.__main__ import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setitem(sys.modules, "recipe", None)
    del sys.modules["recipe"]  # and none is left afterwards
    folder = tmp_path / "model"
    tiny(num_hidden_layers=1).save_pretrained(folder)
    out = tmp_path / "page"
    assert main(["verify", str(folder), "--tokens", "12", "--accelerate", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "no findings" in said and "rmsnorm[" in said
    [page] = out.iterdir()
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 2 and "http" not in text

    (tmp_path / "recipe.py").write_text(
        "from transformers import AutoModelForCausalLM\n"
        "def faulty():\n"
        f"    model = AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        "    model.model.norm.variance_epsilon = 0.1\n"
        "    return model\n"
        "def nothing():\n"
        "    return 3\n"
        "def leaving():\n"
        "    raise SystemExit(0)\n"
    )
    state = safetensors.torch.load_file(folder / "model.safetensors")
    del state["model.norm.weight"]
    shutil.copytree(folder, tmp_path / "partial")
    safetensors.torch.save_file(state, tmp_path / "partial/model.safetensors", {"format": "pt"})
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote/config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "a.C", "AutoModelForCausalLM": "a.M"}}'
    )
    assert main(["verify", "recipe:faulty", "--tokens", "12", "--dtype", "bfloat16"]) == 1
    assert "model.norm: " in capsys.readouterr().out
    for name, words in (
        ("recipe:nothing", "recipe:nothing must return a torch.nn.Module, or one and a batch"),
        ("recipe.py:nothing", "recipe.py:nothing must return a torch.nn.Module, or one and"),
        ("recipe:fault", "recipe has no 'fault'; did you mean 'faulty'?"),
        ("absent.py:build", "absent.py: no such file"),
        ("recipe", "recipe names no function: give recipe.py:FUNCTION"),
        ("./recipe.py", "./recipe.py names no function: give ./recipe.py:FUNCTION"),
        ("./model --config /nowhere", "/nowhere: no such folder"),
        ("./model --config ./remote", "config './remote' cannot be read: ValueError: "),
        ("./nowhere", "./nowhere: no such folder"),
        (str(out), "cannot be loaded: "),
        ("recipe:leaving", "recipe:leaving cannot be called: SystemExit: 0"),
        ("./partial", "has no weights for model.norm.weight, which would be random"),
        ("./remote", "its class is code beside its weights; load it in a function"),
        ("./model --tokens 0", "--tokens must be 8 or more, got 0"),
        ("./model --lengths 40,4", "--lengths must be 8 or more, got 4"),
        ("./model --out recipe.py/x", "--out must be a folder that can be written to, got recipe"),
        ("./model --device cuda:99", "./model cannot be moved to cuda:99: "),
    ):
        assert main(["verify", *name.split()]) == 2
        said = capsys.readouterr().err
        assert words in said and said.splitlines()[-1].startswith("tilewright verify: "), said


def test_example_of_the_page():
    """docs/verify.md: its program runs, and prints what the page shows of it."""
    import contextlib
    import io
    import pathlib

    text = (pathlib.Path(__file__).parents[2] / "docs/verify.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    [shown] = re.findall(r"^```text\n(.*?)^```$", text, re.M | re.S)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(program, "docs/verify.md", "exec"), {})
    numbers = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")
    said = [numbers.sub("#", line) for line in out.getvalue().splitlines()]
    for line in shown.splitlines():
        assert numbers.sub("#", line) in said, out.getvalue()


def test_every_name_of_the_module_is_public():
    assert set(tool.__all__) == {"Finding", "Unverifiable", "Verification", "verify"}
