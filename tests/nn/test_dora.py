"""DoRA: against its definition in float64, against peft on the same tensors. test_lora.py exchanges
files with peft.
"""

import json
import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("pydantic")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file, save_file  # noqa: E402

from tilewright import nn, ops  # noqa: E402
from tilewright.nn import LoRALinear, QuantizedLinear, add_lora  # noqa: E402
from tilewright.nn.weights import adapted  # noqa: E402
from tilewright.trainer.models.model import ModelConfig, Ops, Transformer  # noqa: E402
from tilewright.trainer.reference import adapters_off  # noqa: E402

pytestmark = pytest.mark.packages

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
}
PARTS = {"q_proj": 12, "k_proj": 4, "v_proj": 8}


def layer(quantized=False, bias=True, targets=None, parts=PARTS, dtype=torch.float32):
    torch.manual_seed(5)
    base = torch.nn.Linear(32, 24, bias=bias, dtype=dtype)
    if quantized:
        base = QuantizedLinear(ops.quantize_nf4(base.weight), base.bias)
    adapters = torch.float64 if dtype == torch.float64 else torch.float32
    options = {"parts": parts, "targets": targets, "dtype": adapters, "use_dora": True}
    return LoRALinear(base, 4, 6, **options)


def learn(model, seed=3, std=0.3):
    """Randomizes adapters, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoRALinear):
                module.lora_B.normal_(std=std, generator=generator)
                module.lora_magnitude_change.normal_(std=std, generator=generator)
    return model


def defined(module, x):
    """m W' / |W'| x + bias, with a matrix W' and a norm without a gradient."""
    base = module.base
    W = base.dense() if isinstance(base, QuantizedLinear) else base.weight
    W = W.to(module.lora_A.dtype)
    found, at, r = [], 0, module.rank
    for i, (start, stop) in enumerate(module.slices.values()):
        A, n = module.lora_A[i * r : (i + 1) * r], stop - start
        rows = W[start:stop] + module.scale * module.lora_B[at : at + n] @ A
        m = W[start:stop].norm(dim=1) + module.lora_magnitude_change[at : at + n]
        found.append((start, stop, rows * (m / rows.detach().norm(dim=1))[:, None]))
        at += n
    out = W.clone()
    for start, stop, rows in found:
        out = torch.cat((out[:start], rows, out[stop:]))
    return F.linear(x.to(out.dtype), out, None if base.bias is None else base.bias.to(out.dtype))


@pytest.mark.parametrize(
    "parts, targets",
    [(PARTS, None), (PARTS, ["v_proj", "q_proj"]), (PARTS, ["k_proj"]), (None, None)],
    ids=["all", "two", "one", "alone"],
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["float64", "float32", "quantized"])
def test_output_and_gradients_equal_the_definition(parts, targets, bias, kind):
    dtype = torch.float64 if kind == "float64" else torch.float32
    module = learn(layer(kind == "quantized", bias, targets, parts, dtype))
    x = torch.randn(2, 7, 32, dtype=dtype, requires_grad=True)
    y, want = module(x), defined(module, x)
    near = {"rtol": 1e-12, "atol": 1e-12} if kind == "float64" else {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(y, want, **near)
    inputs = (x, module.lora_A, module.lora_B, module.lora_magnitude_change)
    dy = torch.randn_like(y)
    got, expected = (torch.autograd.grad(t, inputs, dy) for t in (y, want))
    if kind != "float64":
        near = {"rtol": 2e-5, "atol": 1e-4}  # sums of 14 products of elements up to 30
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, **near)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("parts", [PARTS, None], ids=["fused", "alone"])
def test_the_first_output_is_the_bases_bit_for_bit(autocast, dtype, quantized, parts):
    module = layer(quantized, parts=parts, dtype=dtype)
    if not quantized:
        with torch.no_grad():
            module.base.weight[3] = 0  # without a direction
    x = torch.randn(5, 32, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        want = module.base(x)
        assert torch.equal(module(x), want)
        learn(module)
        assert not torch.equal(module(x), want)
        with adapters_off(module):
            assert torch.equal(module(x), want)
        module.reset_parameters()
        assert torch.equal(module(x), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_16_bits_are_near_those_of_float32(dtype):
    """A change far below a rounding of 16 bits of the magnitude has its effect."""
    torch.manual_seed(0)
    module = LoRALinear(torch.nn.Linear(256, 64, bias=False, dtype=dtype), 8, 8, use_dora=True)
    torch.nn.init.normal_(module.lora_B, std=0.1)
    torch.nn.init.normal_(module.lora_magnitude_change, std=1e-3)
    W = module.base.weight.double()
    merged = W + module.scale * module.lora_B.double() @ module.lora_A.double()
    want = (W.norm(dim=1) + module.lora_magnitude_change.double()) / merged.norm(dim=1)
    assert (module._factor(64) / want - 1).abs().max() < 2e-4
    assert (want - 1).abs().max() > 0.1


def test_a_row_that_its_adapter_cancels_and_one_of_zeros_stay_finite():
    module = LoRALinear(torch.nn.Linear(16, 4, bias=False), 4, 4, use_dora=True)
    with torch.no_grad():
        module.base.weight[0] = 0
        module.lora_A[0] = module.base.weight[1]
        module.lora_B[1, 0] = -1
    y = module(torch.randn(3, 16))
    y.sum().backward()
    for t in (y, module.lora_A.grad, module.lora_B.grad, module.lora_magnitude_change.grad):
        assert t.isfinite().all()
    assert module.merged_weight().isfinite().all() and not module.merged_weight()[0].any()


def test_nothing_of_the_weights_size_is_made():
    module = learn(LoRALinear(torch.nn.Linear(512, 512), 4, 4, use_dora=True))
    sizes = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            own = {module.base.weight.untyped_storage().data_ptr()}
            for t in found if isinstance(found, tuple) else (found,):
                if torch.is_tensor(t) and t.untyped_storage().data_ptr() not in own:
                    sizes.append(t.numel())
            return found

    with Made():
        module(torch.randn(3, 512)).sum().backward()
    assert len(sizes) > 20 and max(sizes) == 4 * 512


def test_compiled_it_is_one_graph_and_the_same_numbers():
    module = learn(layer())
    x = torch.randn(6, 32)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            want, found = module(x), compiled(x)
            assert torch.allclose(found, want, rtol=1e-5, atol=1e-5)
            gradients = [
                torch.autograd.grad(y.float().square().sum(), list(module.parameters())[:3])
                for y in (want, found)
            ]
            for a, b in zip(*gradients, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2 if autocast else 1e-5, atol=1e-3)


# ---- merging


@pytest.mark.parametrize("targets", [None, ["v_proj"]], ids=["all", "one"])
def test_merging_gives_what_was_computed(targets):
    module = learn(layer(targets=targets))
    x = torch.randn(6, 32)
    want, before = module(x), module.base.weight.detach().clone()
    torch.testing.assert_close(F.linear(x, module.merged_weight(), module.base.bias), want)
    module.merge_()
    torch.testing.assert_close(module(x), want)
    assert not module.lora_B.any() and not module.lora_magnitude_change.any()
    if targets is not None:
        assert torch.equal(module.base.weight[:16], before[:16])
    fresh = layer()
    assert torch.equal(fresh.merged_weight(), fresh.base.weight)


@pytest.mark.parametrize("format", ["nf4", "nvfp4"])
def test_a_merge_quantizes_the_scaled_sum(format):
    q = nn.QuantFormat(format)(torch.randn(24, 64))
    module = learn(LoRALinear(QuantizedLinear(q), 3, 3, use_dora=True))
    want = nn.quantize_as(q, module.merged_weight())
    torch.testing.assert_close(
        module.merged_weight().norm(dim=1),
        module.base.dense().norm(dim=1) + module.lora_magnitude_change.detach(),
    )
    nn.merge_adapters(torch.nn.ModuleDict({"up_proj": module}))
    [new] = module.base.weights()
    assert all(torch.equal(a, b) for a, b in zip(new.tensors(), want.tensors(), strict=True))


# ---- PEFT


def close(a, b, tolerance):
    assert (a - b).abs().max() <= tolerance * b.abs().max()


def make(shape=SHAPE):
    return Transformer(ModelConfig.from_hf(shape), Ops.resolve(), True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rslora", [True, False])
def test_a_layer_learns_as_pefts_does(bias, rslora):
    """Outputs, gradients, and the weights after a step of AdamW, to float32's rounding."""
    torch.manual_seed(2)
    model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 48, bias=bias)})
    own = LoRALinear(torch.nn.Linear(64, 48, bias=bias), 4, 6, rslora=rslora, use_dora=True)
    own.base.load_state_dict(model["up_proj"].state_dict())
    learn(own)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=rslora, use_dora=True, target_modules=["up_proj"]
    )
    other = peft.inject_adapter_in_model(config, model)["up_proj"]
    [(_, magnitude)] = own.magnitudes()
    assert not magnitude.requires_grad
    pairs = {
        own.lora_A: other.lora_A.default.weight,
        own.lora_B: other.lora_B.default.weight,
        own.lora_magnitude_change: other.lora_magnitude_vector.default.weight,
    }
    # PEFT's magnitudes begin as ours without adapters.
    torch.testing.assert_close(other.lora_magnitude_vector.default.weight, own.base_norms())
    with torch.no_grad():
        for mine, their in pairs.items():
            their.copy_(magnitude if mine is own.lora_magnitude_change else mine)
    before = {mine: mine.detach().clone() for mine in pairs}
    x = torch.randn(3, 5, 64)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    results = [own(xs[0]), other(xs[1])]
    close(*results, 1e-6)
    for y in results:
        y.square().sum().backward()
    close(xs[0].grad, xs[1].grad, 2e-6)
    for mine, their in pairs.items():
        close(mine.grad, their.grad, 2e-6)
    start = magnitude.detach().clone()
    for parameters in (list(pairs), list(pairs.values())):
        torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0).step()
    for mine, their in pairs.items():
        moved = mine.detach() - before[mine]
        wanted = their.detach() - (start if mine is own.lora_magnitude_change else before[mine])
        assert (moved - wanted).abs().max() <= 1e-6 and moved.abs().max() > 5e-3


def test_adapters_of_another_kind_are_refused(tmp_path):
    model, plain = make(), make()
    add_lora(model, ["up_proj"], rank=2, alpha=2, use_dora=True)
    add_lora(plain, ["up_proj"], rank=2, alpha=2)
    nn.save_adapter(model, tmp_path / "dora")
    nn.save_adapter(plain, tmp_path / "lora")
    file, config = (tmp_path / "dora" / n for n in (nn.ADAPTER_FILE, nn.ADAPTER_CONFIG))
    tensors, said = load_file(file), json.loads(config.read_text())
    name = next(n for n in tensors if "magnitude" in n)
    path = name.removeprefix("base_model.model.")
    without = {n: t for n, t in tensors.items() if n != name}
    for found, folder, settings, stored, message in (
        (plain, "dora", {}, tensors, "use_dora is True, the model's False"),
        (model, "lora", {}, tensors, "use_dora is False, the model's True"),
        (make(), "dora", {"use_dora": False}, tensors, "lora_magnitude_vector is not supported"),
        (make(), "dora", {"use_dora": 1}, tensors, "use_dora must be true or false, got 1"),
        (make(), "dora", {}, without, rf"{path} must be \[48\], got nothing"),
        (model, "dora", {}, tensors | {name: torch.ones(47)}, r"must be \[48\], got \[47\]"),
    ):
        config.write_text(json.dumps({**said, **settings}))
        save_file(stored, file)
        with pytest.raises(ValueError, match=message):
            nn.load_adapter(found, tmp_path / folder)


def test_experts_are_refused_and_what_is_beside_them_is_not():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    shape = {**SHAPE, "model_type": "qwen3_moe", **experts, "mlp_only_layers": [0]}
    shape["norm_topk_prob"] = True
    for targets, named in ((None, "layers.0.mlp.gate_proj"), (["layers.1.mlp"], "experts")):
        model = make(shape)
        with pytest.raises(ValueError, match=rf"use_dora must be False for .*{named}.*, got True"):
            add_lora(model, targets, rank=2, use_dora=True)
        assert not any(True for _ in adapted(model))
    assert len(add_lora(model, ["self_attn"], rank=2, use_dora=True)) == 8
    assert math.prod(model.model.layers[0].self_attn.o_proj.lora_magnitude_change.shape) == 32
