"""moe_mlp over quantized experts: the bits of dequantized ones, saved tensors, noise, rejected
arguments.
"""

import dataclasses
import re

import pytest
import torch
from helpers import DEVICE, join_group, skip_unless_usable, two_processes, with_dtypes

from tilewright.ops import moe_mlp, quantize_block_fp8, quantize_nf4, quantize_nvfp4
from tilewright.ops.moe import moe_fused
from tilewright.ops.moe.moe import MOE_MLP, saved_bytes
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.quantized_linear import dequantize

NAMES = [i.name for i in MOE_MLP.implementations]
FUSED = [n for n in NAMES if n != "eager"]
FORMATS = {
    "nf4": lambda w: quantize_nf4(w, double_quant=True),
    "nvfp4": quantize_nvfp4,
    "block_fp8": lambda w: quantize_block_fp8(w, block=(16, 16)),
}
EVERY_NAME = pytest.mark.parametrize("name", NAMES)
EVERY_FUSED = pytest.mark.parametrize("name", FUSED)
# Small: each row of NVFP4 is a program, which Triton's interpreter runs one by one.
T, K, E, H, I = 9, 2, 3, 16, 6


def inputs(format="nvfp4", dtype=torch.float32, T=T, down=None):
    """x, gate_up_proj, down_proj (of the format `down`), expert_index with slots without an expert,
    expert_weight.
    """
    g = torch.Generator().manual_seed(0)

    def draw(*shape, scale=1.0):
        return (torch.randn(shape, generator=g) * scale).to(DEVICE, dtype)

    index = torch.rand(T, E, generator=g).topk(K, -1).indices
    index[torch.rand(T, K, generator=g) < 0.2] = E
    return [
        draw(T, H).requires_grad_(),
        FORMATS[format](draw(E, 2 * I, H, scale=H**-0.5)),
        FORMATS[down or format](draw(E, H, I, scale=I**-0.5)),
        index.to(DEVICE),
        torch.rand(T, K, generator=g).to(DEVICE).requires_grad_(),
    ]


def with_tensors(arguments, noises=(None, None), implementation="eager"):
    x, *quantized = arguments[:3]
    options = {"dtype": x.dtype, "implementation": implementation}
    pairs = zip(quantized, noises, strict=True)
    return [x, *(dequantize(q, noise=n, **options) for q, n in pairs), *arguments[3:]]


def results(arguments, **options):
    x, *_, weight = arguments
    y = moe_mlp(*arguments, **options)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


def assert_equal(found, expected):
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@with_dtypes(MOE_MLP)
@pytest.mark.parametrize("format", FORMATS)
def test_the_bits_of_dequantized_experts(name, dtype, format):
    skip_unless_usable(MOE_MLP, name, dtype)
    arguments = inputs(format, dtype)
    found = results(arguments, implementation=name)
    assert_equal(found, results(with_tensors(arguments), implementation=name))


@EVERY_FUSED
def test_two_formats(name):
    skip_unless_usable(MOE_MLP, name, torch.float32)
    arguments = inputs("nf4", down="block_fp8")
    found = results(arguments, implementation=name)
    assert_equal(found, results(with_tensors(arguments), implementation=name))


@EVERY_FUSED
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_kept_is_what_the_formula_says(name, format):
    """The quantized tensors, which are not copied, gate and up, and the routing. No dequantized
    weight, and not x.
    """
    skip_unless_usable(MOE_MLP, name, torch.float32)
    arguments = inputs(format)
    seen = {}

    def keep(t):
        seen[t.untyped_storage().data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        moe_mlp(*arguments, implementation=name)
    held = sum(
        seen.pop(t.untyped_storage().data_ptr()) for q in arguments[1:3] for t in q.tensors()
    )
    assert held == sum(q.nbytes for q in arguments[1:3])
    more = {"quantized": True, "triton": name == "triton"}
    assert sum(seen.values()) == saved_bytes(T, K, E, H, I, 4, **more)


@EVERY_FUSED
def test_each_weight_is_dequantized_once_a_product(name, monkeypatch):
    """All experts at once; and not for a gradient that is not requested."""
    skip_unless_usable(MOE_MLP, name, torch.float32)
    shapes = []
    monkeypatch.setattr(
        moe_fused,
        "dense",
        lambda *a, real=moe_fused.dense: shapes.append(list(a[0].shape)) or real(*a),
    )
    x, up, down, index, weight = inputs()
    y = moe_mlp(x, up, down, index, weight, implementation=name)
    assert shapes == [[E, 2 * I, H], [E, H, I]]
    y.sum().backward()
    assert shapes[2:] == [[E, H, I], [E, 2 * I, H]]
    shapes.clear()
    moe_mlp(x.detach(), up, down, index, weight, implementation=name).sum().backward()
    assert shapes == [[E, 2 * I, H], [E, H, I], [E, H, I]]


@EVERY_NAME
def test_noise_is_of_one_layer_and_the_next_in_both_passes(name):
    skip_unless_usable(MOE_MLP, name, torch.float32)
    arguments = inputs()
    noise = AQN(0.5, 3, step=9, layer=4)
    noises = (noise, dataclasses.replace(noise, layer=5))
    found = results(arguments, noise=noise, implementation=name)
    by = name if name in ("triton", "cpp", "eager") else "auto"  # noise differs in last bits
    assert_equal(found, results(with_tensors(arguments, noises, by), implementation=name))
    plain = results(arguments, implementation=name)
    assert not torch.equal(found[0], plain[0])
    assert_equal(results(arguments, noise=AQN(0.0, 3), implementation=name), plain)


@EVERY_FUSED
def test_without_gradients_nothing_is_kept(name):
    skip_unless_usable(MOE_MLP, name, torch.float32)
    arguments = inputs()
    expected = moe_mlp(*arguments, implementation=name)
    kept = []
    with (
        torch.no_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        assert torch.equal(moe_mlp(*arguments, implementation=name), expected)
    assert not kept


def spread(rank, world, folder, format):
    from tilewright.ops.moe.expert_parallel import ep_moe_mlp

    group = join_group(rank, world, folder)
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(7 + rank, H, generator=g).requires_grad_()
    up, down = (torch.randn(2, *shape, generator=g) / 4 for shape in ((2 * I, H), (H, I)))
    q = [FORMATS[format](w) for w in (up, down)]
    index = torch.rand(7 + rank, 4, generator=g).topk(K, -1).indices
    weight = torch.rand(7 + rank, K, generator=g).requires_grad_()
    for options in ({}, {"recompute": True}, {"dispatch": "eager"}):
        found = []
        for weights in (q, [dequantize(w, implementation="eager") for w in q]):
            y = ep_moe_mlp(x, *weights, index, weight, group, **options)
            found.append((y.detach(), *torch.autograd.grad(y, (x, weight), torch.ones_like(y))))
        assert_equal(*found)


@pytest.mark.skipif(DEVICE != "cpu", reason="the processes are on the CPU")
def test_experts_spread_over_processes(tmp_path):
    two_processes(spread, tmp_path, "nf4")


DENSE = {"gate_up_proj": torch.ones(E, 2 * I, H), "down_proj": torch.ones(E, H, I)}
BOTH = "gate_up_proj and down_proj must both be tensors or both be quantized, got only"


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"gate_up_proj": DENSE["gate_up_proj"]}, TypeError, f"{BOTH} down_proj quantized"),
        ({"down_proj": DENSE["down_proj"]}, TypeError, f"{BOTH} gate_up_proj quantized"),
        (
            {"gate_up_proj": quantize_nf4(torch.ones(2 * I, H))},
            ValueError,
            "gate_up_proj must have shape [E, 2*I, H], where H = 16, got [12, 16]",
        ),
        (
            {"down_proj": quantize_nf4(torch.ones(E, H, I + 2))},
            ValueError,
            "down_proj must have shape [E, H, I], where E = 3, H = 16, I = 6, got [3, 16, 8]",
        ),
        ({"noise": 1.0}, TypeError, "noise must be an AQN or None, got float"),
        ({"noise": AQN(1.0, 0, layer=2**32 - 1)}, ValueError, "layer must be an int in [0, 2**32)"),
        ({**DENSE, "noise": AQN(1.0, 0)}, ValueError, "noise is for quantized weights, got it"),
    ],
)
def test_bad_input_is_named(change, error, message):
    names = ("x", "gate_up_proj", "down_proj", "expert_index", "expert_weight")
    arguments = dict(zip(names, inputs(), strict=True))
    with pytest.raises(error, match=re.escape(message)):
        moe_mlp(**{**arguments, **change})
