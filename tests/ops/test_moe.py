"""moe_mlp beyond the numerics contract (tests/ops/test_contract.py): saved tensors and rejected
arguments.
"""

import re

import pytest
import torch
from helpers import DEVICE, operators_of, skip_unless_usable

from tilewright.bench import contract
from tilewright.core import platform
from tilewright.ops import OPS, Gate, moe_mlp, quantize_nf4, route
from tilewright.ops.moe import moe_fused
from tilewright.ops.moe.moe import MOE_MLP, saved_bytes
from tilewright.ops.quant import weights
from tilewright.selection import use

NAMES = [i.name for i in MOE_MLP.implementations]
FUSED = [n for n in NAMES if n != "eager"]
T, K, E, H, I = 13, 2, 5, 24, 16


def inputs(dtype=torch.float32, T=T, K=K, seed=0):
    g = torch.Generator(device=DEVICE).manual_seed(seed)

    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, device=DEVICE, generator=g) * scale).to(dtype).requires_grad_()

    index = torch.rand(T, E, device=DEVICE, generator=g).topk(K, -1).indices
    weight = torch.rand(T, K, device=DEVICE, generator=g).requires_grad_()
    return [
        draw(T, H),
        draw(E, 2 * I, H, scale=H**-0.5),
        draw(E, H, I, scale=I**-0.5),
        index,
        weight,
    ]


def grads(y, arguments, dy):
    return torch.autograd.grad(y, [t for t in arguments if t.requires_grad], dy)


def test_the_definition_is_what_a_reader_would_write():
    x, gate_up, down, index, weight = (
        t.detach().double() if t.is_floating_point() else t for t in inputs()
    )
    expected = torch.zeros_like(x)
    for t in range(T):
        for k in range(K):
            gate, up = (gate_up[index[t, k]] @ x[t]).chunk(2)
            expected[t] += weight[t, k] * (down[index[t, k]] @ (gate / (1 + torch.exp(-gate)) * up))
    torch.testing.assert_close(
        moe_mlp(x, gate_up, down, index, weight, implementation="eager"), expected
    )


@pytest.mark.skipif(DEVICE != "cpu", reason="the parts of the CPU's implementations")
def test_parts_that_are_no_kernels_round_as_the_twin_does(monkeypatch):
    """Without the extension, F.silu(gate) * up as a part rounded twice, which broke the contract
    for the whole.
    """
    for op in OPS.values():
        monkeypatch.setattr(op, "_unpinned", {})
    monkeypatch.setattr(platform, "no_extension", lambda: "the extension is hidden by this test")
    case = next(c for c in MOE_MLP.cases if c.name == "frozen_block_fp8")
    for seed in range(3):
        assert not contract.check(MOE_MLP, "native", case, "cpu", torch.bfloat16, seed=seed)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_kept_is_what_the_formula_says(name, dtype):
    """Apart from parameters: x, gate and up, and the routing. No permuted copy of x, no h, no rows
    of y.
    """
    skip_unless_usable(MOE_MLP, name, dtype)
    arguments = inputs(dtype)
    seen = {}

    def pack(t):
        seen[t.untyped_storage().data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        moe_mlp(*arguments, implementation=name)
    for parameter in arguments[1:3]:
        del seen[parameter.untyped_storage().data_ptr()]
    assert sum(seen.values()) == saved_bytes(T, K, E, H, I, dtype.itemsize, triton=name == "triton")


def test_a_forward_and_its_backward_share_one_map_of_tiles(monkeypatch):
    skip_unless_usable(MOE_MLP, "triton", torch.float32)
    from tilewright.kernels.moe import grouped_gemm_triton, permute_triton

    made = []

    def noted(kernels, name):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a: made.append(name) or real(*a))

    noted(grouped_gemm_triton, "tile_map")
    noted(permute_triton, "sort_and_map")
    arguments = inputs(T=40)
    y = moe_mlp(*arguments, **biases(), implementation="triton")
    grads(y, arguments, torch.ones_like(y))
    assert made == ["sort_and_map"]


def biases(dtype=torch.float32):
    return {
        name: torch.randn(E, n, device=DEVICE).to(dtype)
        for name, n in (("gate_up_bias", 2 * I), ("down_bias", H))
    }


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gate_up_bias": torch.zeros(E, I)}, "[E, 2*I], where E = 5, I = 16, got [5, 16]"),
        ({"down_bias": torch.zeros(E, 2 * H)}, "[E, H], where E = 5, H = 24, got [5, 48]"),
        ({"gate": "silu"}, "must be a Gate, got str"),
    ],
)
def test_bad_biases_and_gates_are_named(change, message):
    change = {n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in change.items()}
    message = rf"{next(iter(change))} .*{re.escape(message)}"
    with pytest.raises((ValueError, TypeError), match=message):
        moe_mlp(*inputs(), **change)


def test_a_bias_without_an_inner_width_is_refused():
    x, gate_up, down, index, weight = inputs()
    with pytest.raises(ValueError, match=r"with down_bias is None or I > 0, got \[5, 0, 24\]"):
        moe_mlp(x, gate_up[:, :0], down[..., :0], index, weight, down_bias=biases()["down_bias"])


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"activation": "relu"}, "activation must be one of ['silu', 'gelu_tanh', 'gelu', "),
        ({"alpha": float("nan")}, "alpha must be a finite number, got nan"),
        ({"limit": 0}, "limit must be None or a positive finite number, got 0"),
        ({"up_limit": "7"}, "up_limit must be a number, got '7'"),
        ({"interleaved": 1}, "interleaved must be True or False, got 1"),
        ({"activation": "gelu", "alpha": 2}, "alpha must be 1 for 'gelu', which has no sigmoid"),
        ({"activation": "softcapped", "limit": 1.0}, "'softcapped' needs a limit and an up_limit"),
    ],
)
def test_a_gate_that_is_none_is_named(fields, message):
    error = TypeError if fields.keys() & {"up_limit", "interleaved"} else ValueError
    with pytest.raises(error, match=re.escape(message)):
        Gate(**fields)


@pytest.mark.parametrize("name", FUSED)
def test_each_bias_alone_is_both_with_the_other_zero(name):
    skip_unless_usable(MOE_MLP, name, torch.float32)
    arguments, both = [t.detach() for t in inputs()], biases()
    for n in both:
        zeros = {m: t if m == n else torch.zeros_like(t) for m, t in both.items()}
        found, expected = (
            moe_mlp(*arguments, **given, implementation=name) for given in ({n: both[n]}, zeros)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name, value", [*biases().items(), ("gate", Gate(limit=7.0))])
def test_quantized_experts_refuse_biases_and_other_gates(name, value):
    x, gate_up, down, index, weight = (t.detach() for t in inputs())
    frozen = [quantize_nf4(w, implementation="eager") for w in (gate_up, down)]
    with pytest.raises(ValueError, match=f"^{name} is for .* tensors, got .* quantized ones$"):
        moe_mlp(x, *frozen, index, weight, **{name: value})


@pytest.mark.parametrize("name", FUSED)
def test_a_backward_within_autocast_is_the_same(name):
    skip_unless_usable(MOE_MLP, name, torch.float32)
    arguments, more = inputs(), biases()
    y = moe_mlp(*arguments, **more, implementation=name)
    dy = torch.randn_like(y)
    expected, y = grads(y, arguments, dy), moe_mlp(*arguments, **more, implementation=name)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = grads(y, arguments, dy)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


CPP_PARTS = {
    "permute_cpp_sort",
    "permute_cpp_collect",
    "act_mul_cpp",
    "grouped_gemm_cpp_forward",
    "grouped_gemm_cpp_backward_x",
}


@pytest.mark.skipif(DEVICE != "cpu", reason="C++ is for the CPU")
@pytest.mark.parametrize("frozen", [False, True], ids=["tensors", "quantized"])
def test_a_name_fixes_its_parts_whatever_is_pinned(frozen):
    skip_unless_usable(MOE_MLP, "cpp", torch.float32)
    arguments = x, _, _, _, weight = inputs()
    if frozen:
        arguments[1:3] = (quantize_nf4(w.detach()) for w in arguments[1:3])

    def both_passes():
        torch.autograd.grad(moe_mlp(*arguments, implementation="cpp").sum(), (x, weight))

    with use("eager"):
        both_passes()
        ran = operators_of(both_passes)
    own = {"moe_mlp_cpp_forward", "moe_mlp_cpp_backward", "checked_expert_index"}
    more = {"nf4_cpp_dequantize" if frozen else "grouped_gemm_cpp_backward_weight"}
    assert ran.keys() == own | CPP_PARTS | more
    assert ran["permute_cpp_collect"] == 2


@pytest.mark.parametrize("name", FUSED)
def test_without_gradients_nothing_is_kept(name):
    skip_unless_usable(MOE_MLP, name, torch.float32)
    arguments = inputs()
    expected = moe_mlp(*arguments, implementation=name)
    with torch.no_grad():
        assert torch.equal(moe_mlp(*arguments, implementation=name), expected)
    x, gate_up, down, *routing = (t.detach() for t in arguments)
    packed = *weights.pack(gate_up), *weights.pack(down)
    options = *moe_fused.NO_BIASES, *moe_fused.GateOptions.of(Gate())
    forward = getattr(torch.ops.tilewright, f"moe_mlp_{name}_forward")
    _, pre, *_ = forward(x, *packed, *options, *routing, False, name == "triton")
    assert pre is None


@pytest.mark.parametrize("name", NAMES)
def test_a_sentinel_adds_nothing_and_gets_nothing(name):
    """The same as a weight of 0, and its own weight's gradient is 0."""
    skip_unless_usable(MOE_MLP, name, torch.float32)
    x, gate_up, down, index, weight = inputs()
    dy = torch.randn_like(x)
    away = torch.rand(T, K, device=DEVICE) < 0.5
    away[3] = True
    muted = (weight.detach() * ~away).requires_grad_()
    expected = moe_mlp(x, gate_up, down, index, muted, implementation=name)
    found = moe_mlp(x, gate_up, down, index.masked_fill(away, E), weight, implementation=name)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (found[3] == 0).all()
    *theirs, _ = grads(expected, [x, gate_up, down, muted], dy)
    *ours, dweight = grads(found, [x, gate_up, down, weight], dy)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (dweight[away] == 0).all() and (dweight[~away] != 0).all()


# Triton's interpreter is not what torch.compile calls.
@pytest.mark.parametrize("name", [n for n in FUSED if n != "triton" or DEVICE == "cuda"])
def test_compiled_with_the_router_in_one_graph(name):
    skip_unless_usable(MOE_MLP, name, torch.float32)
    x, gate_up, down, _, _ = inputs()
    gate = torch.randn(E, H, device=DEVICE, requires_grad=True)

    def layer(x, gate, gate_up, down):
        routing = route(x @ gate.t(), K, renormalize=True)
        return moe_mlp(
            x, gate_up, down, routing.expert_index, routing.expert_weight, implementation=name
        )

    leaves = (x, gate, gate_up, down)
    expected = layer(*leaves)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    dy = torch.randn_like(x)
    torch.testing.assert_close(
        grads(found, leaves, dy), grads(expected, leaves, dy), rtol=1e-5, atol=1e-5
    )
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "which, make, message",
    [
        (1, lambda t: t[:, :-1], r"gate_up_proj must .*where H = 24, got \[5, 31, 24\]"),
        (1, lambda t: t[:0], r"gate_up_proj .* with 1 <= E <= 4096, got \[0, "),
        (1, lambda t: t.half(), "gate_up_proj must be x's dtype float32, got float16"),
        (2, lambda t: t[1:], r"down_proj .*, where E = 5, H = 24, I = 16, got \[4, "),
        (3, lambda t: t[1:], r"expert_index .*, where T = 13, got \[12, 2\]"),
        (4, lambda t: t[:, :1], r"expert_weight .*, where T = 13, K = 2, got \[13, 1\]"),
    ],
)
def test_bad_input_is_named(which, make, message):
    arguments = inputs()
    arguments[which] = make(arguments[which].detach())
    error = TypeError if "dtype" in message else ValueError
    with pytest.raises(error, match=message):
        moe_mlp(*arguments)


@pytest.mark.skipif(DEVICE != "cpu", reason="a look at values would wait for the device")
def test_an_index_outside_is_named():
    arguments = inputs()
    arguments[3] = arguments[3].clone()
    arguments[3][4, 1] = E + 1
    with pytest.raises(IndexError, match=r"expert_index\[4, 1\] is 6; accepted are 0 to 4, and 5"):
        moe_mlp(*arguments)
