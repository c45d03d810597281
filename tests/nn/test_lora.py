"""Adapters on linear layers, dense and quantized: against plain products, against peft, and
checkpoints.
"""

import copy
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shutil
import weakref

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn import functional as F
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("pydantic")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from tilewright import nn, ops  # noqa: E402
from tilewright.nn import (  # noqa: E402
    Linear,
    LoRALinear,
    QuantFormat,
    QuantizedLinear,
    add_lora,
    quantize_model,
)
from tilewright.nn.quantized_layers import wrong_group_size  # noqa: E402
from tilewright.nn.weights import adapted, dense_weights, is_adapter  # noqa: E402
from tilewright.ops.quant.aqn import AQN  # noqa: E402
from tilewright.ops.quant.quantized_linear import dequantize  # noqa: E402
from tilewright.trainer.build import shape_of_run  # noqa: E402
from tilewright.trainer.checkpoint import hf  # noqa: E402
from tilewright.trainer.config import Model  # noqa: E402
from tilewright.trainer.models.initialize import init_weights  # noqa: E402
from tilewright.trainer.models.model import ModelConfig, Ops, Transformer  # noqa: E402
from tilewright.trainer.parallel.mesh import Mesh  # noqa: E402
from tilewright.trainer.parallel.recomputation import recompute_activations  # noqa: E402

pytestmark = pytest.mark.packages

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
FORMATS = [QuantFormat("nvfp4", 16), QuantFormat("block_fp8", 16), QuantFormat("nf4", 32)]
formats = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)


def bits(q):
    """The parts of a quantized tensor as comparable bytes; torch.equal does not support FP8."""
    return [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in q.tensors()]


def equal(a, b):
    same = type(a) is type(b) and (a.shape, a.dtype) == (b.shape, b.dtype)
    pairs = zip(bits(a), bits(b), strict=True)
    return same and all(s.dtype == t.dtype and torch.equal(s, t) for s, t in pairs)


IDS = torch.arange(40).view(2, 20) * 7 % 97


def make(merge_qkv=True, shape=QWEN3, seed=1):
    model = Transformer(ModelConfig.from_hf(shape), Ops.resolve(), merge_qkv)
    init_weights(model, seed)
    return model


def learn(model, seed=3, std=0.3):
    """Randomizes adapters, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if is_adapter(name) and name.endswith(("_B", "_magnitude_change")):
                p.normal_(std=std, generator=generator)
    return model


# ---- one layer

PARTS = {"q_proj": 12, "k_proj": 4, "v_proj": 8}


def layer(quantized=False, bias=True, targets=None, parts=PARTS, rslora=False, dtype=torch.float32):
    torch.manual_seed(5)
    base = torch.nn.Linear(32, 24, bias=bias, dtype=dtype)
    if quantized:
        base = QuantizedLinear(ops.quantize_nf4(base.weight), base.bias)
    module = LoRALinear(base, 4, 6, rslora=rslora, parts=parts, targets=targets)
    return module, lambda: torch.nn.init.normal_(module.lora_B)


def plain(module, x):
    """The layer's definition, part by part."""
    base = module.base
    weight = base.dense() if isinstance(base, QuantizedLinear) else base.weight
    y = F.linear(x, weight.to(x.dtype), None if base.bias is None else base.bias)
    found = list(y.split(list(module.parts.values()), -1))
    at, r = 0, module.rank
    for i, name in enumerate(module.slices):
        rows = module.parts[name]
        A, B = module.lora_A[i * r : (i + 1) * r], module.lora_B[at : at + rows]
        where = list(module.parts).index(name)
        found[where] = found[where] + (x.to(A.dtype) @ A.T @ B.T * module.scale).to(y.dtype)
        at += rows
    return torch.cat(found, -1)


@pytest.mark.parametrize("rslora, scale", [(False, 1.5), (True, 3.0)])
@pytest.mark.parametrize(
    "parts, targets",
    [(PARTS, None), (PARTS, ["v_proj", "q_proj"]), (PARTS, ["k_proj"]), (None, None)],
    ids=["all", "two", "one", "alone"],
)
@pytest.mark.parametrize("quantized", [False, True])
def test_output_and_gradients_equal_the_plain_products(parts, targets, rslora, scale, quantized):
    module, fill = layer(quantized, targets=targets, parts=parts, rslora=rslora)
    assert module.scale == scale
    fill()
    x = torch.randn(2, 7, 32, requires_grad=True)
    inputs = (x, module.lora_A, module.lora_B)
    y, want = module(x), plain(module, x)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(t, inputs, dy) for t in (y, want))
    for got, expected in zip(found, wanted, strict=True):
        # Sums in another order: 1.3e-5 is seen on an Intel Xeon, of elements up to 30.
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-5)
    base, low = (t.flatten(0, 1) for t in (module.base(x), F.linear(x, module.lora_A) * scale))
    separately = module._separately(base, low, module.lora_B).view(y.shape)
    assert torch.equal(separately, y) or parts is None
    assert not any(p.requires_grad for p in module.base.parameters())


def test_a_second_derivative_is_refused():
    module, fill = layer()
    fill()
    x = torch.randn(3, 32, requires_grad=True)
    [dx] = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("parts", [PARTS, None], ids=["fused", "alone"])
def test_the_first_output_is_the_bases_and_nothing_more_is_kept_than_needed(parts, quantized):
    module, _ = layer(quantized, parts=parts)
    x = torch.randn(5, 32, requires_grad=True)
    assert torch.equal(module(x), module.base(x))
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        module(x)
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    extra = [t.shape for key, t in kept.items() if key not in own and t.numel() > 1]
    low = len(module.slices) * 4
    # 16: the codes of NF4.
    assert sorted(math.prod(s) for s in extra if math.prod(s) != 16) == [5 * low, 5 * 32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_another_dtype_than_the_base(dtype):
    module, fill = layer(dtype=torch.bfloat16)
    fill()
    x = torch.randn(5, 32).bfloat16()
    y = module(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, plain(module, x), rtol=2e-2, atol=2e-2)
    module, fill = layer()
    fill()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x.to(dtype))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), plain(module, x.float()), rtol=5e-2, atol=5e-2)
    y.sum().backward()
    assert module.lora_A.grad.dtype == torch.float32 and module.lora_A.grad.any()


def test_adapters_begin_as_pefts_do():
    module, _ = layer()
    bound = 1 / math.sqrt(32)
    assert module.lora_A.abs().max() <= bound
    assert module.lora_A.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert not module.lora_B.any()
    twice = []
    for _ in range(2):
        module.reset_parameters(torch.Generator().manual_seed(4))
        twice.append(module.lora_A.detach().clone())
    assert torch.equal(*twice)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"rank": 0}, "rank must be an int >= 1"),
        ({"rank": True}, "rank must be an int"),
        ({"alpha": 0}, "alpha must be a finite number > 0"),
        ({"alpha": math.inf}, "alpha must be"),
        ({"parts": {"a": 3}}, "parts must have the base's 24 rows"),
        ({"parts": PARTS, "targets": ["x"]}, r"targets must be some of \['q_proj'"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LoRALinear(torch.nn.Linear(32, 24), **{"rank": 2, "alpha": 1, **arguments})
    with pytest.raises(TypeError, match="base must be"):
        LoRALinear(torch.nn.Conv1d(1, 1, 1), 2, 1)


# ---- merging


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("kind", ["nf4", "nvfp4", "block_fp8"])
def test_merging_is_all_or_nothing(experts, kind):
    """A later layer's sum overflows: no earlier layer has changed."""
    model = make(shape=MOE if experts else QWEN3)
    paths = nn.quantize_model(model, kind)
    assert len(paths) > 4
    add_lora(model, rank=2, alpha=4)
    path, _ = list(adapted(model))[-1]
    factors = [p for n, p in model.named_parameters() if is_adapter(n) and n.endswith("_B")]
    with torch.no_grad():
        for p in factors:
            p.normal_(std=0.05)
        factors[-1][..., 0, 0] = math.inf
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=rf"^{path}: nothing is merged: .*finite"):
        nn.merge_adapters(model)
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name]), name


def test_merging_gives_what_was_computed_before_and_begins_new_adapters():
    for model in (make(), make(False)):
        before = model(IDS)
        add_lora(model, rank=4, alpha=6)
        learn(model)
        first = {n: p.detach().clone() for n, p in model.named_parameters() if is_adapter(n)}
        want = model(IDS)
        assert (want - before).abs().max() > 0.1
        nn.merge_adapters(model, torch.Generator().manual_seed(1))
        assert (model(IDS) - want).abs().max() <= 1e-6
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                assert not p.any()
            elif name.endswith("lora_A"):
                assert not torch.equal(p, first[name])


def test_a_merge_adds_in_float32_and_rounds_once():
    module, fill = layer(dtype=torch.bfloat16, targets=["q_proj"])
    fill()
    torch.nn.init.normal_(module.lora_B, std=1e-3)
    was = module.base.weight.detach().clone()
    want = was.float()
    want[:12] += 1.5 * module.lora_B.detach() @ module.lora_A.detach()
    torch.testing.assert_close(module.merged_weight(), want, rtol=1e-6, atol=1e-7)
    module.merge_()
    weight = module.base.weight
    assert torch.equal(weight, want.bfloat16()) and not torch.equal(weight[:12], was[:12])
    assert torch.equal(weight[12:], was[12:])


W = torch.randn(24, 48, generator=torch.Generator().manual_seed(8))
QUANTISED = {
    "nf4": ops.quantize_nf4(W, block_size=32),
    "nf4 nested": ops.quantize_nf4(W, double_quant=True),
    "nvfp4": ops.quantize_nvfp4(W),
    "block_fp8": ops.quantize_block_fp8(W.bfloat16(), block=(8, 16)),
}


def test_a_merge_leaves_quantized_parts_without_adapters_alone():
    parts = [ops.quantize_nvfp4(W[:8]), ops.quantize_nvfp4(W[8:])]
    options = {"parts": {"gate_proj": 8, "up_proj": 16}, "targets": ["up_proj"]}
    module = LoRALinear(QuantizedLinear(parts), 3, 3, **options)
    torch.nn.init.normal_(module.lora_B)
    module.merge_()
    first, second = module.base.weights()
    assert torch.equal(first.data, parts[0].data) and not torch.equal(second.data, parts[1].data)


# ---- quantized layers


@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantized_layer_keeps_its_bits_through_casts_meta_and_files(name, tmp_path):
    q = QUANTISED[name]
    layer = QuantizedLinear(q, torch.randn(24))
    x = torch.randn(3, 48)
    want = F.linear(x, dequantize(q, dtype=torch.float32), layer.bias)
    torch.testing.assert_close(layer(x), want, rtol=1e-5, atol=1e-5)
    fields = [f.name for f in dataclasses.fields(q)]
    tensors = {f"{n}_0" for n in fields if isinstance(getattr(q, n), torch.Tensor)}
    assert layer.state_dict().keys() == tensors | {"bias"}
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    on_meta = _pytree.tree_map(lambda t: t if t is None else t.to("meta"), q)
    empty = QuantizedLinear(on_meta, torch.empty(24, device="meta"))
    assert all(t.is_meta for t in empty.buffers())
    empty.to_empty(device="cpu")
    empty.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    for other in (empty, layer.half().float()):
        [found] = other.weights()
        assert equal(found, q)


def test_a_quantized_layer_of_several_matrices():
    parts = [ops.quantize_nvfp4(W[:8]), ops.quantize_nvfp4(4 * W[8:])]
    both = QuantizedLinear(parts)
    x = torch.randn(2, 5, 48, requires_grad=True)
    want = F.linear(x, both.dense())
    torch.testing.assert_close(both(x), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(both.dense()[8:], dequantize(parts[1], dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        assert both(x).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"weight must be \[24, 48\], got \[8, 48\]"):
        both.fill(parts[:1])
    with pytest.raises(ValueError, match="of one width"):
        QuantizedLinear([parts[0], ops.quantize_nvfp4(W[:, :16])])


SHARED = torch.tensor(0.01)
JOINS = {
    "nf4": (lambda w: ops.quantize_nf4(w), True),
    "nf4 ragged": (lambda w: ops.quantize_nf4(w, block_size=4096), False),
    "nf4 ragged inside": (lambda w: ops.quantize_nf4(w, block_size=1024), False),
    "nf4 nested": (lambda w: ops.quantize_nf4(w, double_quant=True), False),
    "nvfp4": (ops.quantize_nvfp4, False),
    "nvfp4 shared": (lambda w: ops.quantize_nvfp4(w, global_scale=SHARED), True),
    "block_fp8": (lambda w: ops.quantize_block_fp8(w, block=(8, 8)), True),
    "block_fp8 ragged": (lambda w: ops.quantize_block_fp8(w, block=(16, 16)), False),
}


@pytest.mark.parametrize("name", JOINS)
def test_matrices_become_one_only_where_that_is_exact(name):
    quantize, exact = JOINS[name]
    w = torch.randn(56, 32)
    parts = [quantize(w[:32]), quantize(w[32:40]), quantize(w[40:])]
    with pytest.raises(ValueError, match=r"^parts must hold at least one"):
        nn.join([])
    found = nn.join(parts)
    assert len(found) == (1 if exact else 3)
    assert torch.equal(QuantizedLinear(found).dense(), torch.cat([dequantize(q) for q in parts]))


@pytest.mark.parametrize(
    "name, size",
    [
        *(("nvfp4", 32), ("block_fp8", 129), ("block_fp8", 0), ("nf4", 16), ("nf4", 48)),
        *(("nf4", 8192), ("nvfp4", 16.0), ("block_fp8", True), ("nf4", "64")),
    ],
)
def test_group_sizes_that_a_format_does_not_have(name, size):
    assert wrong_group_size(name, size)
    with pytest.raises(ValueError, match=f"{name} has groups of .*, got {size!r}"):
        QuantFormat(name, size)


@pytest.mark.parametrize("name", ["nf4 nested", *nn.FORMATS])
def test_every_group_size_that_is_accepted_works(name):
    """Forward, backward and requantizing of a matrix that is not a multiple of any block."""
    sizes = () if name == "nf4 nested" else nn.FORMATS[name][1]
    sizes = sizes if len(sizes) < 20 else (1, 2, 3, 7, 16, 33, 64, 100, 127, 128)
    for format in [QuantFormat(name, size) for size in sizes] or [None]:
        q = format(W) if format else QUANTISED[name]
        assert format is None or nn.format_of(q) == format
        module = LoRALinear(QuantizedLinear(q), 2, 2)
        torch.nn.init.normal_(module.lora_B)
        x = torch.randn(3, 48, requires_grad=True)
        y, dense, g = module(x), module.merged_weight(), torch.randn(3, 24)
        delta = module.lora_B @ module.lora_A
        torch.testing.assert_close(dense, dequantize(q, dtype=torch.float32) + delta)
        torch.testing.assert_close(y, F.linear(x, dense), rtol=1e-5, atol=1e-5)
        y.backward(g)
        torch.testing.assert_close(x.grad, g @ dense, rtol=1e-5, atol=1e-5)
        module.merge_()
        [new] = module.base.weights()
        assert equal(new, nn.quantize_as(q, dense)) and not equal(new, q)
        assert [t.shape for t in new.tensors()] == [t.shape for t in q.tensors()]
        assert not module.lora_B.any()
        assert (module.merged_weight() - dense).norm() < 0.15 * dense.norm()


# ---- models


@pytest.mark.parametrize("merge_qkv", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_with_new_adapters_computes_what_it_did(merge_qkv, autocast):
    model = make(merge_qkv)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        want = model(IDS)
        add_lora(model, rank=4)
        assert torch.equal(model(IDS), want)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in model.named_parameters() if is_adapter(n)}
    assert len(trained) == 2 * 2 * (4 if merge_qkv else 6)
    before = {n for n, _ in make(merge_qkv).named_parameters()}
    assert {n for n, _ in nn.base_weights(model)} == before


@formats
def test_adapters_on_a_quantized_model(format):
    model = make()
    full = model(IDS)
    done = quantize_model(model, format, exclude=["layers.0.mlp", "lm_head"])
    want = model(IDS)
    assert 0 < (want - full).abs().max() < 0.2 * full.abs().max()
    assert not any("layers.0.mlp" in path for path in done) and len(done) == 6
    add_lora(model, rank=4)
    assert torch.equal(model(IDS), want)
    assert {type(m.base) for _, m in adapted(model)} == {QuantizedLinear, Linear}
    model(IDS, labels=IDS).backward()
    assert all(m.lora_B.grad.any() for _, m in adapted(model))
    assert {n for n, _ in nn.base_weights(model)} == {n for n, _ in make().named_parameters()}


@pytest.mark.parametrize(
    "entry, path, same",
    [
        ("q_proj", "model.layers.0.self_attn.q_proj", True),
        ("proj", "a.q_proj", False),
        ("layers.1", "a.layers.1.q", True),
        ("layers.1", "a.layers.11.q", False),
        ("a.*.q", "a.b.c.q", True),
        ("*.q", "a.b.q.c", False),
        ("re:a\\..*_proj$", "a.b.q_proj", True),
        ("re:b", "a.b", False),
        ("model.layers.?.x", "model.layers.1.x", True),
    ],
)
def test_which_modules_an_entry_means(entry, path, same):
    assert nn.matches(entry, path) == same


@pytest.mark.parametrize(
    "targets, expected",
    [
        (["q_proj", "down_proj"], {"q_proj", "down_proj"}),
        (["qkv_proj"], {"q_proj", "k_proj", "v_proj"}),
        (["mlp"], {"gate_proj", "up_proj", "down_proj"}),
        (["*.v_proj"], {"v_proj"}),
    ],
)
def test_targets_are_named_as_if_nothing_were_fused(targets, expected):
    for merge_qkv in (True, False):
        if targets == ["qkv_proj"] and not merge_qkv:
            continue
        paths = add_lora(make(merge_qkv), targets, rank=2)
        assert {p.rpartition(".")[2] for p in paths} == expected and len(paths) == 2 * len(expected)
    assert add_lora(make(), ["layers.1.self_attn.o_proj"]) == ["model.layers.1.self_attn.o_proj"]


@pytest.mark.parametrize("name, size", [("nvfp4", 16), ("block_fp8", 128), ("nf4", 64)])
def test_a_format_is_named_and_has_a_group_size_by_default(name, size):
    assert nn.QuantFormat(name) == QuantFormat(name, size)
    model, named = make(), make()
    assert quantize_model(named, name) == quantize_model(model, QuantFormat(name, size))
    assert all(torch.equal(t, named.state_dict()[n]) for n, t in model.state_dict().items())


REFUSED = (  # by add_lora, of targets
    (["q_proj", "zzz"], "ValueError: targets: 'zzz' match no projection; there are down_proj, exp"),
    *(([name], f"ValueError: .*'{name}' match no projection") for name in ("score", "gate")),
    (["embed_tokens", "input_layernorm"], "'embed_tokens', 'input_layernorm' match no projection"),
    (["down_proj"], r"ValueError: .*layers\.0\.mlp\.experts has adapters on all of gate_proj, up"),
    (["re:("], r"ValueError: 're:\(' must be a regular expression"),
    ([], r"ValueError: targets must name projections, got \[\]; None means all"),
    ("q_proj", "TypeError: targets must be a list of names, got the text 'q_proj'"),
)
NOT_QUANTIZED = (  # format, exclude
    (FORMATS[0], "lm_head", "TypeError: exclude must be a list of names, got the text 'lm_head'"),
    (FORMATS[0], ["nosuch", "lm_head"], "Error: exclude: 'nosuch' match no module; .*q_proj"),
    (FORMATS[0], ["q_proj"], r"Error: exclude names model\.layers\.0.*q_proj and not the rest"),
    (FORMATS[0], ["experts.up_proj"], r"exclude names .*experts\.up_proj and not the rest of"),
    ("nf5", [], r"ValueError: name must be one of \['nvfp4', 'block_fp8', 'nf4', 'mxfp8'\], got "),
    (4, [], "TypeError: format must be a QuantFormat, the name of one or a function, got 4"),
)


@pytest.mark.parametrize(
    "change, message",
    [
        *((lambda model, t=targets: add_lora(model, t), message) for targets, message in REFUSED),
        *(
            (lambda model, f=format, e=exclude: quantize_model(model, f, exclude=e), message)
            for format, exclude, message in NOT_QUANTIZED
        ),
    ],
)
def test_what_cannot_be_changed_is_named_and_changes_nothing(change, message):
    model = make(shape=MOE)
    with pytest.raises((ValueError, TypeError)) as caught:
        change(model)
    assert re.search(message, f"{caught.typename}: {caught.value}")
    assert all(p.requires_grad for p in model.parameters())
    assert not any(isinstance(m, QuantizedLinear) for m in model.modules())


def test_what_is_not_fused_is_excluded_alone():
    assert len(quantize_model(make(False), FORMATS[0], exclude=["q_proj"])) == 2 * 5
    with pytest.raises(ValueError, match="no linear layers called"):
        add_lora(torch.nn.Sequential(torch.nn.Linear(2, 2)))


# ---- PEFT


def random_model(kind, shape, **changes):
    """A model of transformers whose weights are large enough to matter."""
    torch.manual_seed(1)
    settings = {k: v for k, v in shape.items() if k != "model_type"}
    config = kind(**{**settings, "initializer_range": 0.2, **changes})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def read(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def theirs(folder, kind=transformers.Qwen3Config, shape=QWEN3, **changes):
    random_model(kind, shape, **changes).save_pretrained(folder)
    return read(folder)


def ours(folder, merge_qkv=True):
    model = Transformer(hf.load_config(folder), Ops.resolve(), merge_qkv)
    hf.load_weights(model, folder)
    return model


def close(a, b, tolerance=1e-5):
    assert (a - b).abs().max() <= tolerance * b.abs().max()


PLAIN = [
    {"rank": 4, "alpha": 8},
    {"rank": 4, "alpha": 3, "rslora": True},
    {"rank": 2, "alpha": 2.5, "targets": ["q_proj", "v_proj", "down_proj"]},
    {"rank": 2, "alpha": 2, "targets": ["layers.1.mlp"]},
]


DORA = {"use_dora": True}


@pytest.mark.parametrize(
    "options, merge_qkv, kind",
    [
        (PLAIN[0], True, transformers.LlamaConfig),
        (PLAIN[1], True, transformers.Qwen3Config),
        (PLAIN[2], True, transformers.Qwen3Config),
        (PLAIN[2], False, transformers.LlamaConfig),
        (PLAIN[3], False, transformers.Qwen3Config),
        (PLAIN[1] | DORA, True, transformers.Qwen3Config),
        (PLAIN[2] | DORA, False, transformers.Qwen3Config),
        (PLAIN[2] | DORA, True, transformers.Qwen3Config),
    ],
    ids=["all", "rslora", "some", "some apart", "a layer", "dora", "dora apart", "some dora"],
)
def test_peft_loads_what_is_saved(options, merge_qkv, kind, tmp_path):
    peft = pytest.importorskip("peft")
    reference = theirs(tmp_path / "base", kind)
    model = ours(tmp_path / "base", merge_qkv)
    add_lora(model, **options)
    learn(model)
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "old").write_text("")
    (folder / nn.ADAPTER_CONFIG).write_text("{}")
    nn.save_adapter(model, folder, base_model=str(tmp_path / "base"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]
    names = [nn.ADAPTER_CONFIG, nn.ADAPTER_FILE, "old"]
    assert sorted(p.name for p in folder.iterdir()) == names
    dora = options.get("use_dora", False)
    assert (json.loads((folder / nn.ADAPTER_CONFIG).read_text()).get("use_dora") is True) == dora
    if dora:
        key = "base_model.model.model.layers.1.self_attn.q_proj.lora_magnitude_vector"
        assert load_file(folder / nn.ADAPTER_FILE)[key].shape == (32,)
    with torch.no_grad():
        want = model(IDS)
        alone = reference(IDS).logits
        loaded = peft.PeftModel.from_pretrained(reference, folder)
        close(loaded(IDS).logits, want)
    assert (want - alone).abs().max() > 0.05 * alone.abs().max()
    status = loaded.get_model_status()
    assert status.num_adapter_layers == sum(len(m.slices) for _, m in adapted(model))
    again = ours(tmp_path / "base", not merge_qkv)
    nn.load_adapter(again, folder)
    close(again(IDS), want)
    with torch.no_grad():
        merged = loaded.merge_and_unload()
        close(merged(IDS).logits, want)
        nn.merge_and_unload(again)
        close(again(IDS), want)
        down = "model.layers.1.mlp.down_proj.weight"
        close(again.get_parameter(down), merged.get_parameter(down), 1e-6)


@pytest.mark.parametrize(
    "options, merge_qkv",
    [
        ({"r": 4, "lora_alpha": 6}, True),
        ({"r": 3, "lora_alpha": 2, "use_rslora": True}, False),
        ({"r": 2, "target_modules": ["k_proj", "up_proj"], "lora_dropout": 0.1}, True),
        ({"r": 2, "target_modules": ["k_proj", "up_proj"], "lora_dropout": 0.1}, False),
        ({"r": 4, "lora_alpha": 6, "use_dora": True}, True),
        ({"r": 3, "use_rslora": True, "target_modules": ["k_proj"], "use_dora": True}, False),
    ],
)
def test_what_peft_saves_is_loaded(options, merge_qkv, tmp_path):
    peft = pytest.importorskip("peft")
    reference = theirs(tmp_path / "base")
    config = peft.LoraConfig(
        **{"target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    )
    wrapped = peft.get_peft_model(reference, config).eval()
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
            elif "magnitude" in name:
                p.mul_(torch.rand_like(p) + 0.5)
        want = wrapped(IDS).logits
    wrapped.save_pretrained(tmp_path / "adapter")
    model = ours(tmp_path / "base", merge_qkv).eval()  # dropout is loaded too
    nn.load_adapter(model, tmp_path / "adapter")
    close(model(IDS), want)
    nn.save_adapter(model, tmp_path / "again")
    found, was = (load_file(tmp_path / f / nn.ADAPTER_FILE) for f in ("again", "adapter"))
    assert found.keys() == was.keys()
    for name, t in was.items():
        torch.testing.assert_close(found[name], t, rtol=1e-6, atol=0)
    filled = ours(tmp_path / "base", merge_qkv)  # into existing adapters
    given = {"rank": config.r, "alpha": config.lora_alpha, "rslora": config.use_rslora}
    add_lora(filled, options.get("target_modules"), use_dora=config.use_dora, **given)
    nn.load_adapter(filled, tmp_path / "adapter")
    assert torch.equal(filled(IDS), model(IDS))


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    model = make()
    add_lora(model, ["q_proj"], rank=2, alpha=2)
    nn.save_adapter(model, tmp_path / "a")
    with pytest.raises(ValueError, match="no adapters"):
        nn.save_adapter(make(), tmp_path / "b")
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config\.json"):
        nn.load_adapter(make(), tmp_path / "nowhere")
    for changes, options, message in (
        ({}, {"targets": ["q_proj"], "rank": 3}, r"is \(2, 2, False\), the model's \(3, 16, "),
        ({}, {"targets": ["q_proj", "k_proj"], "rank": 2, "alpha": 2}, r"differ in .*k_proj"),
        ({"num_hidden_layers": 1}, None, r"no projections model\.layers\.1\.self_attn\.q_proj"),
        ({"hidden_size": 40}, None, r"lora_A must be \[2, 40\], got \[2, 32\]"),
    ):
        other = make(shape={**QWEN3, **changes})
        if options:
            add_lora(other, **options)
        with pytest.raises(ValueError, match=message):
            nn.load_adapter(other, tmp_path / "a")


@pytest.fixture(scope="module", params=[QWEN3, MOE], ids=["dense", "experts"])
def saved(request, tmp_path_factory):
    """A shape of a model, and the folder of its adapters."""
    model, folder = make(shape=request.param), tmp_path_factory.mktemp("adapter")
    add_lora(model, rank=2)
    nn.save_adapter(model, folder)
    return request.param, folder


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": "gaussian", "peft_version": "0.21", "of_a_later_version": False},
        {"loftq_config": {}, "use_dora": None, "use_rslora": None},  # PEFT's null is the default
        {"use_rslora": ...},
    ],
)
def test_settings_that_change_nothing_are_read(changes, saved, tmp_path):
    shape, folder = saved
    nn.load_adapter(make(shape=shape), with_settings(folder, tmp_path, changes))


def with_settings(folder, copied, changes):
    """A copy of an adapter with other settings; without those that are `...`."""
    shutil.copytree(folder, copied, dirs_exist_ok=True)
    file = copied / nn.ADAPTER_CONFIG
    settings = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in settings.items() if v is not ...}))
    return copied


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("lora_bias", True, "lora_bias"),
        ("bias", "all", "bias"),
        ("rank_pattern", {"q_proj": 4}, "rank_pattern|rank is|scale is"),
        ("peft_type", "IA3", "peft_type"),
        *(("init_lora_weights", v, "init_lora") for v in ("pissa", "pissa_niter_4", "loftq")),
        ("alora_invocation_tokens", [1, 2], "alora_invocation_tokens"),
        ("layer_replication", [[0, 2]], "layer_replication"),
        ("use_bdlora", {"target_modules_bd_a": ["q_proj"]}, "use_bdlora"),
        ("kasa_config", {"beta": 1.0}, "kasa_config"),
        ("arrow_config", {"k": 2}, "arrow_config"),
        ("of_a_later_version", 3, "of_a_later_version"),
        # ---- of another type
        ("r", 0, "r must be an int >= 1, got 0"),
        ("r", None, "r must be an int >= 1, got null"),
        ("r", ..., "r must be an int >= 1, got nothing"),
        ("r", True, "r must be an int >= 1, got true"),
        ("r", 2.0, "r must be an int >= 1, got 2.0"),
        ("lora_alpha", "two", 'lora_alpha must be a finite number > 0, got "two"'),
        ("lora_alpha", ..., "lora_alpha must be a finite number > 0, got nothing"),
        ("lora_alpha", math.nan, "lora_alpha must be a finite number > 0, got NaN"),
        ("lora_alpha", math.inf, "lora_alpha must be a finite number"),
        ("use_rslora", "false", 'use_rslora must be true or false, got "false"'),
        ("use_rslora", 0, "use_rslora must be"),
        ("rank_pattern", [2], r"rank_pattern must be an object, got \[2\]"),
        ("rank_pattern", {"x": "2"}, r"rank_pattern\['x'\] must be an int >= 1, got \"2\""),
        ("alpha_pattern", {"(": 2}, r"alpha_pattern must have regular expressions, got '\('"),
    ],
)
def test_settings_that_are_not_supported_are_named(key, value, message, saved, tmp_path):
    shape, folder = saved
    where = rf"adapter_config\.json: {message}" if " must " in message else message
    with pytest.raises(ValueError, match=where):
        nn.load_adapter(make(shape=shape), with_settings(folder, tmp_path, {key: value}))


# ---- noise


@formats
def test_noise_is_of_each_weight_and_step_and_of_training_alone(format):
    model = make()
    quantize_model(model, format)
    add_lora(model, rank=2)
    plain_ = model(IDS)
    noise = AQN(1.0, 7, 3)
    nn.set_noise(model, noise)
    first = model(IDS)
    assert not torch.equal(first, plain_) and torch.equal(model(IDS), first)
    numbers = [n.layer for m in model.modules() if isinstance(m, QuantizedLinear) for n in m.noise]
    assert len(set(numbers)) == len(numbers) == 8
    quantized = ((p, m) for p, m in model.named_modules() if isinstance(m, QuantizedLinear))
    path, module = next(quantized)
    x = torch.randn(3, module.in_features)
    [q] = module.weights()
    want = F.linear(x, dequantize(q, dtype=torch.float32, noise=module.noise[0]))
    torch.testing.assert_close(module(x), want, rtol=1e-5, atol=1e-6)
    model.eval()
    assert torch.equal(model(IDS), plain_)
    model.train()
    nn.set_noise(model, dataclasses.replace(noise, step=4))
    assert not torch.equal(model(IDS), first)
    for none in (AQN(0.0, 7, 3), None):
        nn.set_noise(model, none)
        assert torch.equal(model(IDS), plain_)
    assert path.endswith("qkv_proj.base")


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_see_the_same_noise_and_learn(reentrant):
    found = []
    for recompute in (False, True):
        model = make()
        quantize_model(model, QuantFormat("nf4", 32))
        add_lora(model, rank=2)
        nn.reset_adapters(model, torch.Generator().manual_seed(0))
        learn(model)
        nn.set_noise(model, AQN(2.0, 7, 3))
        if recompute:
            recompute_activations(model, None, reentrant)
        model(IDS, labels=IDS).backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(a is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))


# ---- checkpoints that are quantized


def bitsandbytes(weight, **options):
    q = ops.quantize_nf4(weight.bfloat16(), **options)
    return q, lambda stem: q.to_safetensors(f"{stem}.weight")


def nvfp4(layout, global_scale=None):
    extra = {"modelopt": "input_scale", "compressed-tensors": "input_global_scale"}[layout]

    def make(weight):
        q = ops.quantize_nvfp4(weight.bfloat16(), global_scale=global_scale)

        def write(stem):
            return {**q.to_safetensors(f"{stem}.weight", layout), f"{stem}.{extra}": torch.ones(1)}

        return q, write

    return make


def deepseek(weight):
    q = ops.quantize_block_fp8(weight.bfloat16(), block=(16, 16))
    return q, lambda stem: q.to_safetensors(f"{stem}.weight")


OF_BITSANDBYTES = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head"]}
OF_COMPRESSED_TENSORS = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
OF_MODELOPT = {"quant_method": "modelopt", "exclude_modules": ["lm_head"]}
OF_DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [16, 16]}
nested = functools.partial(bitsandbytes, double_quant=True, block_size=32)
inverse = nvfp4("compressed-tensors")  # of the global scale
scaled = nvfp4("modelopt", torch.tensor(2.0**-11))
STORED = {  # storage of each projection, its configuration, and the matching format
    "bitsandbytes": (bitsandbytes, OF_BITSANDBYTES, QuantFormat("nf4", 64)),
    "bitsandbytes nested": (nested, OF_BITSANDBYTES, QuantFormat("nf4", 32)),
    "compressed-tensors": (inverse, OF_COMPRESSED_TENSORS, QuantFormat("nvfp4", 16)),
    "modelopt": (scaled, OF_MODELOPT, QuantFormat("nvfp4", 16)),
    "deepseek": (deepseek, OF_DEEPSEEK, QuantFormat("block_fp8", 16)),
}


def store(folder, name, dense=(), experts=False):
    """A checkpoint with quantized projections, except those in `dense`; and its dequantized
    counterpart.
    """
    quantize, config, _ = STORED[name]
    if experts:  # a file with separate projections per expert
        theirs(folder / "base", transformers.Qwen3MoeConfig, MOE)
        hf.save_weights(ours(folder / "base"), folder / "dense")
    else:
        theirs(folder / "dense")
    tensors, stood, bytes_ = load_file(folder / "dense/model.safetensors"), {}, {}
    for key in list(tensors):
        stem = key.removesuffix(".weight")
        projection = stem.rpartition(".")[2] in nn.PROJECTIONS
        if projection and not any(nn.matches(d, stem) for d in dense):
            q, write = quantize(tensors.pop(key))
            stood[key], bytes_[stem] = dequantize(q, dtype=torch.float32), q
            tensors |= {k: t.clone().contiguous() for k, t in write(stem).items()}
        else:
            stood[key] = tensors[key]
    shape = json.loads((folder / "dense/config.json").read_text())
    quantized = {"quantization_config": config}
    for where, what, extra in (("stored", tensors, quantized), ("stood", stood, {})):
        (folder / where).mkdir()
        (folder / where / "config.json").write_text(json.dumps({**shape, **extra}))
        save_file(what, folder / where / "model.safetensors")
    return bytes_


def empty(folder, format, merge_qkv, exclude=()):
    with torch.device("meta"):
        model = Transformer(hf.load_config(folder), Ops.resolve(), merge_qkv)
    quantize_model(model, format, exclude=exclude, strict=False)
    add_lora(model, rank=2)
    model.to_empty(device="cpu")
    model.tie()
    nn.reset_adapters(model)
    return model


@pytest.mark.parametrize("merge_qkv", [True, False])
@pytest.mark.parametrize("name", STORED)
def test_a_quantized_checkpoint_is_loaded_as_it_is(name, merge_qkv, tmp_path):
    bytes_ = store(tmp_path, name)
    folder = tmp_path / "stored"
    assert hf.excluded(folder) == ([] if name == "deepseek" else ["lm_head"])
    model = empty(folder, STORED[name][2], merge_qkv, hf.excluded(folder))
    hf.load_weights(model, folder)
    close(model(IDS), ours(tmp_path / "stood", merge_qkv)(IDS))
    o_proj = dict(nn.base_weights(model))["model.layers.1.self_attn.o_proj.weight"]
    [found], want = o_proj.weights(), bytes_["model.layers.1.self_attn.o_proj"]
    for a, b in zip(bits(found), bits(want), strict=True):
        # compressed-tensors store an inverse.
        assert torch.equal(a, b) or (a.dim() == 0 and abs(a / b - 1) < 1e-6)


@pytest.mark.parametrize("name", STORED)
def test_what_a_quantized_checkpoint_leaves_dense_or_the_user_excludes(name, tmp_path):
    """Dense in the file: quantized, unless excluded. Quantized in the file and excluded:
    dequantized.
    """
    store(tmp_path, name, dense=["layers.0.mlp"])
    folder, format = tmp_path / "stored", STORED[name][2]
    want = ours(tmp_path / "stood")
    model = empty(folder, format, True, ["layers.0.mlp", "layers.1.self_attn"])
    hf.load_weights(model, folder)
    # Dequantized weights are rounded to bfloat16.
    close(model(IDS), want(IDS), 3e-2 if name.startswith("b") else 1e-2)
    stored = dict(nn.base_weights(model))
    for path in ("layers.0.mlp.down_proj", "layers.1.self_attn.o_proj"):
        assert isinstance(stored[f"model.{path}.weight"], torch.nn.Parameter)
    assert isinstance(stored["model.layers.0.self_attn.o_proj.weight"], QuantizedLinear)
    model = empty(folder, format, True)
    hf.load_weights(model, folder)
    down = dict(nn.base_weights(model))["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(down, QuantizedLinear)
    again = format(dict(want.named_parameters())["model.layers.0.mlp.down_proj.weight"].detach())
    assert torch.equal(down.dense(), dequantize(again, dtype=torch.float32))


@pytest.mark.parametrize("name", STORED)
def test_a_tensor_that_a_quantized_weight_lacks_is_named_before_anything_is_read(name, tmp_path):
    store(tmp_path, name)
    folder, format = tmp_path / "stored", STORED[name][2]
    tensors = load_file(folder / "model.safetensors")
    weight = "model.layers.1.mlp.down_proj.weight"
    stored = [key for key in tensors if key.startswith(weight)]
    assert len(stored) > 1
    for key in stored:
        save_file({k: t for k, t in tensors.items() if k != key}, folder / "model.safetensors")
        model = empty(folder, format, True)
        for p in model.parameters():
            p.detach().fill_(7)
        with pytest.raises(ValueError, match=re.escape(weight)) as raised:
            hf.load_weights(model, folder)
        # Without its mark a weight is no longer known to be quantized, or is not found.
        said = key, f"{weight} is U8", f"{weight} is F8", f"missing {weight}"
        assert any(text in str(raised.value) for text in said)
        assert all(p.eq(7).all() for p in model.parameters())


@pytest.mark.parametrize("name", ["bitsandbytes", "deepseek"])
def test_a_quantized_folder_keeps_a_head_beside_a_tied_embedding(name, tmp_path):
    store(tmp_path, name)
    folder, format = tmp_path / "stored", STORED[name][2]
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"] * 2
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
        hf.load_weights(empty(folder, format, True), folder)
    model = Model(model_path=str(folder), config_path=str(folder))
    shape = shape_of_run(model, "language_model", Mesh())
    assert hf.load_config(folder).tied
    assert shape == dataclasses.replace(hf.load_config(folder), tie_word_embeddings=False)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "tie_word_embeddings": False}))
    untied = empty(folder, format, True)
    hf.load_weights(untied, folder)
    assert torch.equal(untied.lm_head.weight, head)


def test_a_quantized_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path):
    store(tmp_path, "bitsandbytes")
    folder = tmp_path / "stored"
    with pytest.raises(ValueError, match=r"q_proj\.weight is nf4 in groups of 64; .* nf4 and 32"):
        hf.load_weights(empty(folder, QuantFormat("nf4", 32), True), folder)
    with pytest.raises(ValueError, match=r"is nf4 in groups of 64; .* say nvfp4 and 16"):
        hf.load_weights(empty(folder, QuantFormat("nvfp4", 16), True), folder)
    with pytest.raises(ValueError, match=r"set lora\.enable_qlora to .* lora\.quant_format to nf4"):
        ours(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.spare": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected model\.layers\.0\.spare"):
        hf.load_weights(empty(folder, QuantFormat("nf4", 64), True), folder)


class Live(TorchDispatchMode):
    """Counts the bytes of live storages that operators have seen."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in _pytree.tree_leaves((args, kwargs, out)):
            if isinstance(t, torch.Tensor) and not t.is_meta:
                storage = t.untyped_storage()
                if storage._cdata not in self.known:
                    self.known[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.gone, storage._cdata)
        return out

    def gone(self, key):
        self.now -= self.known.pop(key)


@formats
@pytest.mark.parametrize("stored", [False, True], ids=["dense", "quantized"])
def test_quantising_while_loading_needs_two_tensors_beside_the_model(format, stored, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 32, "head_dim": 32}
    theirs(tmp_path / "base", **sizes, num_hidden_layers=3)
    tensors = load_file(tmp_path / "base/model.safetensors")
    folder = tmp_path / "base"
    if stored:
        for key in list(tensors):
            if key.removesuffix(".weight").rpartition(".")[2] in nn.PROJECTIONS:
                q = format(tensors.pop(key).bfloat16())
                tensors |= {k: t.clone().contiguous() for k, t in q.to_safetensors(key).items()}
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"weight_block_size": [16, 16]}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
    largest = 2 * 256 * 128 * 4  # gate_up_proj in float32
    with Live() as live:
        model = empty(folder, format, True)
        hf.load_weights(model, folder)
    own = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    dense = sum(math.prod(m.base.dense().shape) * 4 for _, m in adapted(model))
    assert own <= live.peak < own + 2 * largest < dense


# ---- what is written


@pytest.mark.parametrize("format", [None, *FORMATS], ids=lambda f: getattr(f, "name", "dense"))
def test_dense_weights_with_adapters_merged_are_what_transformers_loads(format, tmp_path):
    model = make()
    if format:
        quantize_model(model, format)
    add_lora(model, ["q_proj", "o_proj", "up_proj"], rank=2)
    learn(model)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    hf.save_weights(model, tmp_path)
    reference = read(tmp_path)
    with torch.no_grad():
        close(reference(IDS).logits, model(IDS), 1e-4)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert reference.config.to_dict().get("quantization_config") is None


# ---- experts


@pytest.mark.parametrize(
    "targets", [None, ["mlp"], ["q_proj", "o_proj"]], ids=["all", "experts", "attention"]
)
def test_experts_get_adapters_too_and_peft_loads_them(targets, tmp_path):
    peft = pytest.importorskip("peft")
    reference = theirs(tmp_path / "base", transformers.Qwen3MoeConfig, MOE)
    model = ours(tmp_path / "base")
    of_experts = [p for p in add_lora(model, targets, rank=2, alpha=3) if ".experts." in p]
    expected = [f"model.layers.0.mlp.experts.{n}" for n in nn.OF_EXPERTS]
    assert of_experts == ([] if targets and "mlp" not in targets else expected)
    assert not any(p.requires_grad for n, p in model.named_parameters() if not is_adapter(n))
    close(model(IDS), reference(IDS).logits, 1e-4)
    model(IDS, labels=IDS).backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if is_adapter(n))
    learn(model)
    with torch.no_grad():
        want = model(IDS)
        nn.save_adapter(model, tmp_path / "adapter")
        loaded = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter")
        close(loaded(IDS).logits, want, 1e-4)
        again = ours(tmp_path / "base", False)
        nn.load_adapter(again, tmp_path / "adapter")
        close(again(IDS), want)
        hf.save_weights(model, tmp_path / "merged")
        close(ours(tmp_path / "merged")(IDS), want, 1e-4)
        nn.merge_adapters(model)
        close(model(IDS), want, 1e-4)


@formats
@pytest.mark.parametrize("targets", [None, ["q_proj"]], ids=["adapted", "frozen"])
def test_quantized_experts_compute_with_what_they_stand_for(format, targets):
    model = make(shape=MOE)
    quantize_model(model, format)
    add_lora(model, targets, rank=2)
    dense = make(shape=MOE)
    with torch.no_grad():
        for name, full, _ in dense_weights(model):
            dict(dense.named_parameters())[name].copy_(full)
    close(model(IDS), dense(IDS), 1e-4)
    plain_ = model(IDS)
    nn.set_noise(model, AQN(1.0, 3))
    noisy = model(IDS)
    assert not torch.equal(noisy, plain_)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    assert experts.noise.layer not in {
        n.layer for m in model.modules() if isinstance(m, QuantizedLinear) for n in m.noise
    }
    experts.set_noise(None)
    assert not torch.equal(model(IDS), noisy)
    assert torch.equal(model.eval()(IDS), plain_)


@pytest.mark.parametrize("name", ["bitsandbytes", "modelopt", "deepseek"])
def test_experts_that_are_stored_quantized_are_loaded(name, tmp_path):
    store(tmp_path, name, experts=True)
    model = empty(tmp_path / "stored", STORED[name][2], True)
    hf.load_weights(model, tmp_path / "stored")
    close(model(IDS), ours(tmp_path / "stood")(IDS), 1e-4)


def test_experts_that_one_tensor_cannot_hold_are_refused(tmp_path):
    """compressed-tensors has one global scale per projection and expert."""
    store(tmp_path, "compressed-tensors", experts=True)
    model = empty(tmp_path / "stored", STORED["compressed-tensors"][2], True)
    message = r"experts\.gate_up_proj: the experts are stored in nvfp4 in a way"
    with pytest.raises(ValueError, match=message):
        hf.load_weights(model, tmp_path / "stored")


# ---- what is refused, and what a refusal leaves


class Mixture(torch.nn.Module):
    """Experts of another library."""

    def __init__(self, **settings):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(2, 8, 6))
        self.down_proj = torch.nn.Parameter(torch.randn(2, 6, 4))
        for name, value in settings.items():
            setattr(self, name, value)


class OwnGate(Mixture):
    def _apply_gate(self, gate_up):
        return gate_up


def with_mixture(module):
    return torch.nn.ModuleDict({"q_proj": torch.nn.Linear(6, 6), "experts": module})


@pytest.mark.parametrize(
    "module, reason",
    [
        (Mixture(act_fn=F.gelu), "activated by gelu"),
        (Mixture(act_fn=torch.nn.ReLU()), "activated by ReLU"),
        (Mixture(act_fn="silu"), "activated by str"),
        (OwnGate(), "_apply_gate"),
        (Mixture(has_bias=True), "have biases"),
        (
            Mixture(down_proj_bias=torch.nn.Parameter(torch.ones(2, 6))),
            r"biases \['down_proj_bias'\]",
        ),
        (Mixture(has_gate=False), "no gate"),
        (Mixture(is_concatenated=False), "interleave"),
        (Mixture(is_transposed=True), r"do not hold gate_up_proj as \[E, 2 I, H\]"),
        (
            Mixture(down_proj=torch.nn.Parameter(torch.ones(2, 4, 6))),
            r"they are \[2, 8, 6\] and \[2, 4, 6\]",
        ),
    ],
)
def test_experts_that_compute_something_else_get_no_adapters(module, reason):
    model = with_mixture(module)
    with pytest.raises(ValueError, match=f"^experts: .* {type(module).__name__} .*{reason}"):
        add_lora(model)
    assert model["experts"] is module and all(p.requires_grad for p in model.parameters())
    assert add_lora(model, ["q_proj"]) == ["q_proj"]


@pytest.mark.parametrize(
    "act",
    [F.silu, torch.nn.SiLU(), transformers.activations.SiLUActivation(), lambda x: x * x.sigmoid()],
)
def test_silu_is_known_by_what_it_computes(act):
    assert len(add_lora(with_mixture(Mixture(act_fn=act)), ["experts"], rank=2)) == 3


def test_transformers_experts_are_told_apart():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "head_dim": 16, "num_key_value_heads": 1}
    small = {**sizes, **heads, "num_local_experts": 2, "num_experts_per_tok": 1}
    with torch.device("meta"):
        oss, qwen = (
            transformers.AutoModelForCausalLM.from_config(config(**small, **more))
            for config, more in (
                (transformers.GptOssConfig, {}),
                (transformers.Qwen3MoeConfig, {"moe_intermediate_size": 32}),
            )
        )
    with pytest.raises(ValueError, match=r"^model\..*experts of GptOssExperts .*have biases"):
        add_lora(oss)
    with pytest.raises(ValueError, match="Qwen3MoeExperts compute with dense weights only"):
        quantize_model(qwen, FORMATS[0])
    assert not any(isinstance(m, QuantizedLinear) for m in qwen.modules())
    assert len(quantize_model(qwen, FORMATS[0], exclude=["experts"])) == 4
    assert len(add_lora(qwen)) == 4 + 3


def test_a_module_of_experts_alone_has_no_place_for_adapters():
    model = Mixture()
    with pytest.raises(ValueError, match=r"^the model is itself a module of experts"):
        add_lora(model)
    assert not list(model.children()) and all(p.requires_grad for p in model.parameters())


def test_rows_of_a_fused_projection_are_not_guessed():
    def fused():
        return torch.nn.ModuleDict(
            {"qkv_proj": torch.nn.Linear(32, 48), "o_proj": torch.nn.Linear(32, 32)}
        )

    model = fused()
    with pytest.raises(ValueError, match=r"^qkv_proj: how its 48 rows divide among .*`widths`"):
        add_lora(model)
    assert all(p.requires_grad for p in model.parameters())
    assert add_lora(model, ["o_proj"]) == ["o_proj"]
    assert quantize_model(fused(), FORMATS[0]) == ["qkv_proj", "o_proj"]
    model = fused()
    model.widths = (24, 8, 8)
    with pytest.raises(ValueError, match="`widths`"):
        add_lora(model)
    model.widths = (32, 8, 8)
    assert add_lora(model) == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_adapters_are_added_once_and_after_quantizing():
    model = make()
    add_lora(model, ["q_proj"], rank=2)
    with pytest.raises(ValueError, match=r"^model\..*\.qkv_proj has adapters already"):
        add_lora(model, ["o_proj"])
    with pytest.raises(ValueError, match="qkv_proj has adapters; call quantize_model before"):
        quantize_model(model, FORMATS[0])


def test_quantising_lets_go_of_each_dense_weight():
    model = make(shape=MOE)
    dense = [weakref.ref(p) for n, p in model.named_parameters() if "proj" in n]
    alive = []

    def format(weight):
        alive.append(sum(r() is not None for r in dense))
        return FORMATS[2](weight)

    assert len(quantize_model(model, format)) == len(dense)
    assert alive == [*range(len(dense), 0, -1)] and not any(r() is not None for r in dense)


def test_a_file_that_is_no_adapter_is_refused_in_one_sentence(tmp_path):
    model = make()
    add_lora(model, ["q_proj"], rank=2)
    nn.save_adapter(model, tmp_path)
    config, file = tmp_path / nn.ADAPTER_CONFIG, tmp_path / nn.ADAPTER_FILE
    good, tensors = config.read_text(), load_file(file)
    name = next(iter(tensors))

    def refused(message):
        with pytest.raises(ValueError, match=message) as caught:
            nn.load_adapter(make(), tmp_path)
        assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)

    for text, got in (("[]", "list"), ("null", "NoneType"), ("3", "int")):
        config.write_text(text)
        refused(rf"adapter_config\.json: must hold a JSON object, got {got}")
    config.write_text("{")
    refused(r"adapter_config\.json: is not valid JSON")
    config.write_text(good)
    for dtype in (torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        save_file({**tensors, name: tensors[name].to(dtype)}, file)
        refused(
            rf"adapter_model\.safetensors: {name} must be one of float32, .*, got {str(dtype)[6:]}"
        )
    file.write_bytes(b"no tensors")
    refused(r"adapter_model\.safetensors: cannot be read as safetensors")


def test_a_layer_that_transformers_fuses_has_one_adapter_as_peft_has_it(tmp_path):
    peft = pytest.importorskip("peft")

    def phi():
        return of_transformers(transformers.Phi3Config, pad_token_id=0)

    model = peft.get_peft_model(
        phi(), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    ).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
        want = model(IDS).logits
        model.save_pretrained(tmp_path / "theirs")
        loaded = phi()
        nn.load_adapter(loaded, tmp_path / "theirs")
        close(loaded(IDS).logits, want)
        nn.save_adapter(loaded, tmp_path / "ours")
        close(peft.PeftModel.from_pretrained(phi(), tmp_path / "ours")(IDS).logits, want)
    fused = {"qkv_proj", "gate_up_proj", "o_proj", "down_proj"}
    assert {p.rpartition(".")[2] for p in add_lora(phi())} == fused
    with pytest.raises(ValueError, match=r"'q_proj' match .* are down_proj, gate_up_proj, o_proj"):
        add_lora(phi(), ["q_proj"])


@pytest.mark.parametrize(
    "shape, key",
    [
        (QWEN3, "o_proj.lora_B"),
        (QWEN3, "layers.1.self_attn.o_proj.lora_A"),
        (MOE, "experts.base_layer.lora_B"),
        (MOE, "layers.0.mlp.experts.lora_A"),
    ],
)
def test_an_adapter_that_does_not_fit_leaves_the_model_as_it_was(shape, key, tmp_path):
    source, model, filled = make(shape=shape), make(shape=shape), make(shape=shape)
    add_lora(source, rank=2)
    add_lora(filled, rank=2)
    learn(source)  # so that what is not to be copied differs from filled's zeros
    nn.save_adapter(source, tmp_path / "a")
    file = tmp_path / "a" / nn.ADAPTER_FILE
    tensors = load_file(file)
    [name, *_] = [n for n in tensors if f"{key}." in n]
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, file)
    for before in (model, filled):
        modules = {n: type(m) for n, m in before.named_modules()}
        values = {n: (p.requires_grad, p.detach().clone()) for n, p in before.named_parameters()}
        with pytest.raises(ValueError, match=r"must (be|have shape) \["):
            nn.load_adapter(before, tmp_path / "a")
        assert {n: type(m) for n, m in before.named_modules()} == modules
        for n, p in before.named_parameters():
            assert p.requires_grad == values[n][0] and torch.equal(p, values[n][1])


SAVES = pytest.mark.parametrize(
    "save", [nn.save_adapter, hf.save_weights], ids=lambda f: f.__name__
)


def adapted_model(seed=1, **changes):
    model = make(shape={**QWEN3, **changes}, seed=seed)
    add_lora(model, ["q_proj"], rank=2)
    return learn(model, seed)


@SAVES
def test_a_save_replaces_files_of_its_own_alone(save, tmp_path, monkeypatch):
    model, folder = adapted_model(), tmp_path / "out"
    others = {
        "tokenizer.json": b"{}",
        "README.md": b"# A model\n",
        "optimizer.pt": b"\0\1",
        "sub/notes.txt": b"",
        "model-of-a-plane.safetensors": b"\2",
        "model.fp16.safetensors": b"\3",
        ".hidden": b"\4",
    }
    for name, content in others.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    save(model, folder)
    written = {
        p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name not in others
    }
    monkeypatch.chdir(folder)
    save(adapted_model(2), ".")
    assert {p.name for p in folder.iterdir()} == {*written, *(n.partition("/")[0] for n in others)}
    assert {name: (folder / name).read_bytes() for name in others} == others
    weights = next(n for n in written if n.endswith("model.safetensors"))
    assert (folder / weights).read_bytes() != written[weights]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ValueError, match=r"README\.md is a file; give a folder"):
        save(model, folder / "README.md")


def test_weights_are_not_written_where_an_adapter_would_be_put_on_them(tmp_path):
    model = adapted_model()
    nn.save_adapter(model, tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"holds an adapter \(adapter_config\.json\)"):
        hf.save_weights(model, tmp_path)
    assert sorted(tmp_path.iterdir()) == before


class Killed(BaseException):
    pass


def killed_at(step, monkeypatch, save):
    """Calls save, which dies at its step-th change of a name in the folder. Returns whether it
    survived.
    """
    left = [step]

    def dying(change):
        def changed(*arguments, **options):
            if not options.get("dir_fd") and ".saving" not in pathlib.Path(arguments[-1]).parts:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return change(*arguments, **options)

        return changed

    with monkeypatch.context() as patch:
        for name in ("replace", "rename", "unlink", "remove"):
            patch.setattr(os, name, dying(getattr(os, name)))
        try:
            save()
        except Killed:
            return False
    return True


def logits_of(folder):
    """The logits read by transformers and by the trainer, which must agree."""
    with torch.no_grad():
        logits = read(folder)(IDS).logits
        close(ours(folder)(IDS), logits)
    return logits


@pytest.mark.parametrize("first, second", [(1, 1), (1, 3), (3, 1), (3, 3), (3, 2)])
def test_weights_survive_a_save_that_is_killed(first, second, tmp_path, monkeypatch):
    """After each change of a name the folder holds either the old model or the new one, complete.
    first, second: files.
    """
    shape, folder = {**QWEN3, "num_hidden_layers": 1}, tmp_path / "out"
    old, new = make(shape=shape, seed=1), make(shape=shape, seed=2)
    limit = {1: 10**9, 2: 30_000, 3: 20_000}

    def save(model, files):
        hf.save_weights(model, folder, max_shard_bytes=limit[files])

    def files():
        return sorted(p.name for p in folder.iterdir())

    save(old, first)
    assert len(files()) == (2 if first == 1 else 2 + first)
    (folder / "tokenizer.json").write_text("{}")
    before, wanted, seen, step = files(), {m: m(IDS).detach() for m in (old, new)}, [], 0
    while not killed_at(step, monkeypatch, lambda: save(new, second)):
        found = logits_of(folder)
        seen += [
            m for m, want in wanted.items() if (found - want).abs().max() <= 1e-5 * want.abs().max()
        ]
        save(old, first)  # clears up
        step += 1
        assert len(seen) == step and len(files()) == len(before)
    assert seen[0] is old and seen[-1] is new
    close(logits_of(folder), wanted[new])
    named = {"model.safetensors"}
    if second > 1:
        named = json.loads((folder / hf.INDEX).read_text())["weight_map"].values()
        assert len({*named}) == second
        named = {hf.INDEX, *named}
    assert set(files()) == {"config.json", "tokenizer.json", *named}


@SAVES
def test_a_save_of_another_shape_that_is_killed_mixes_nothing(save, tmp_path, monkeypatch):
    """New settings with old weights, or the reverse, would load silently."""

    def settings_and_weights(folder):
        found = {}
        for p in folder.iterdir():
            if p.name in ("config.json", "adapter_config.json"):
                found["settings"] = json.loads(p.read_text())
            elif p.suffix == ".safetensors":
                found["weights"] = {n: t.tolist() for n, t in load_file(p).items()}
        return found

    old, new = adapted_model(1), adapted_model(1, rms_norm_eps=1e-2)
    for _, module in adapted(new):
        module.alpha = 32
    pairs = []
    for i, model in enumerate((old, new)):
        save(model, tmp_path / str(i))
        pairs.append(settings_and_weights(tmp_path / str(i)))
    assert pairs[0]["settings"] != pairs[1]["settings"]
    step, out = 0, tmp_path / "out"
    save(learn(old, 7), out)
    start = settings_and_weights(out)
    while not killed_at(step, monkeypatch, lambda: save(new, out)):
        found = settings_and_weights(out)
        assert "settings" not in found or found in (start, pairs[1])
        save(old, out)
        step += 1
    assert settings_and_weights(out) == pairs[1] and step > 2


# ---- transformers' own way of saving


def of_transformers(kind=transformers.LlamaConfig, **changes):
    shape = {k: v for k, v in MOE.items() if k != "mlp_only_layers"}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    return random_model(kind, shape, **sizes, **changes)


def adapt_only(model):
    add_lora(model, rank=2)
    return learn(model)


def adapt_quantized(model):
    quantize_model(model, FORMATS[2], exclude=["experts"], strict=False)
    return adapt_only(model)


def merged(model):
    nn.merge_adapters(adapt_only(model))
    return model


def quantized(format):
    def quantize(model):
        quantize_model(model, format, exclude=["experts"], strict=False)
        return model

    return quantize


CHANGES = {
    "adapters": adapt_only,
    "merged": merged,
    "adapters on nf4": adapt_quantized,
    "nvfp4": quantized(FORMATS[0]),
    "block_fp8": quantized(FORMATS[1]),
    "nf4": quantized(FORMATS[2]),
}
KINDS_OF_MODEL = pytest.mark.parametrize(
    "kind", [transformers.LlamaConfig, transformers.Qwen3MoeConfig], ids=lambda k: k.model_type
)


@pytest.mark.parametrize("change", ["adapters", "merged", "adapters on nf4"])
def test_save_pretrained_refuses_what_from_pretrained_would_begin_at_random(change, tmp_path):
    model = CHANGES[change](of_transformers())
    message = r"save_adapter.*merge_and_unload"
    for what in (model, model.model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match=f"^save_pretrained cannot write .*{message}"):
            what.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())  # other checkpoints still load
    assert get_model_state_dict(model).keys() == model.state_dict().keys()
    torch.save(model, tmp_path / "whole.pt")
    again = torch.load(tmp_path / "whole.pt", weights_only=False)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    with pytest.raises(ValueError, match="save_pretrained cannot write"):
        again.save_pretrained(tmp_path / "out")


@KINDS_OF_MODEL
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_merged_and_unloaded_is_a_plain_model(change, kind, tmp_path):
    plain_ = of_transformers(kind)
    types = {n: type(m) for n, m in plain_.named_modules()}
    model = CHANGES[change](of_transformers(kind))
    with torch.no_grad():
        want = model(IDS).logits
        assert change == "merged" or (want - plain_(IDS).logits).abs().max() > 1e-2
        assert nn.merge_and_unload(model) is model
        close(model(IDS).logits, want, 1e-4)  # one sum instead of two
    assert {n: type(m) for n, m in model.named_modules()} == types
    assert {n: (p.shape, p.dtype) for n, p in model.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in plain_.named_parameters()
    }
    assert model.__dict__.keys() == plain_.__dict__.keys()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        close(read(tmp_path)(IDS).logits, want, 1e-4)
    add_lora(model, rank=2)  # starts over
    with torch.no_grad():
        close(model(IDS).logits, want, 1e-4)


@formats
@pytest.mark.parametrize("adapters", [False, True])
def test_the_trainers_model_is_merged_and_unloaded_too(format, adapters):
    model = make(shape=MOE)
    types = {n: type(m) for n, m in model.named_modules()}
    model.bfloat16()
    quantize_model(model, format)
    if adapters:
        adapt_only(model)
    stood = {n: full for n, full, _ in dense_weights(model)}
    nn.merge_and_unload(model)
    assert {n: type(m) for n, m in model.named_modules()} == types
    for name, p in model.named_parameters():
        assert p.dtype == torch.bfloat16 and torch.equal(p, stood[name].bfloat16()), name


def test_what_cannot_be_unloaded_is_refused(tmp_path):
    model = make(shape=MOE)
    add_lora(model, rank=2)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    assert not list(experts.replaced.parameters())  # retained without its weights
    before = {n: type(m) for n, m in model.named_modules()}
    experts.group = object()
    with pytest.raises(ValueError, match=r"^model\..*\.experts: its weights are sharded over"):
        nn.merge_and_unload(model)
    experts.group = experts.__dict__["replaced"] = None
    with pytest.raises(
        ValueError, match=r"^model\..*\.experts: the original module of these experts"
    ):
        nn.merge_and_unload(model)
    assert {n: type(m) for n, m in model.named_modules()} == before


@pytest.mark.parametrize("change", ["adapters", "nf4"])
def test_a_checkpoint_of_transformers_trainer_is_refused_or_read(change, tmp_path):
    pytest.importorskip("accelerate")
    model = CHANGES[change](of_transformers())
    model.lm_head.requires_grad_(True)
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 2
    options = {"save_strategy": "steps", "save_steps": 1, "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, report_to=[], **options
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    if change == "adapters":
        with pytest.raises(ValueError, match=r"save_adapter.*merge_and_unload"):
            trainer.train()
        assert not list(tmp_path.rglob("*.safetensors"))
        return
    trainer.train()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1").eval()
    # In eval mode, on a CPU with AVX-512 BF16, bitsandbytes would multiply in bfloat16.
    for linear in (m for m in again.modules() if type(m).__name__ == "Linear4bit"):
        linear.train()
    with torch.no_grad():
        close(again(IDS).logits, model.eval()(IDS).logits, 1e-4)
