"""Tests specific to rmsnorm_gated; parity with the eager twin is in test_contract.py."""

import pytest
import torch
from helpers import DEVICE, skip_unless_usable, threads

from tilewright.bench import contract
from tilewright.core.registry import FLOATS, short
from tilewright.ops import OPS, rmsnorm_gated
from tilewright.ops.norm.rmsnorm_gated import RMSNORM_GATED


@pytest.mark.packages
@pytest.mark.parametrize("weight_dtype", [torch.float32, None], ids=["float32", "own"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_equals_transformers_bit_for_bit(dtype, weight_dtype):
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    norm = qwen.Qwen3NextRMSNormGated(64, eps=1e-5).to(weight_dtype or dtype)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(2, 7, 64).to(dtype)
    expected = norm(x, gate)
    assert torch.equal(rmsnorm_gated(x, gate, norm.weight, 1e-5, implementation="eager"), expected)


@pytest.mark.parametrize("name", RMSNORM_GATED.names())
def test_the_weight_has_any_float_dtype(name):
    """And its gradient has that."""
    skip_unless_usable(RMSNORM_GATED, name, torch.float32)
    x, gate = torch.randn(2, 5, 33, device=DEVICE)
    for dtype in (torch.float64, torch.bfloat16):
        if name == "triton" and DEVICE == "cpu" and dtype == torch.bfloat16:
            continue  # Triton's interpreter truncates on a cast to bfloat16
        weight = torch.linspace(0.5, 1.5, 33, device=DEVICE, dtype=dtype).requires_grad_()
        y = rmsnorm_gated(x, gate, weight, implementation=name)
        expected = rmsnorm_gated(x, gate, weight.float(), implementation="eager")
        torch.testing.assert_close(y, expected)
        [grad] = torch.autograd.grad(y.sum(), weight)
        [want] = torch.autograd.grad(expected.sum(), weight)
        assert grad.dtype == dtype
        # Computed in float32, in another order: not to the digits of float64.
        close = {} if dtype == torch.bfloat16 else {"rtol": 1.3e-6, "atol": 1e-5}
        torch.testing.assert_close(grad, want, **close)


def test_cpp_gives_the_same_bits_on_any_number_of_threads():
    skip_unless_usable(RMSNORM_GATED, "cpp", torch.bfloat16)
    x, gate = (torch.randn(999, 300, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    w = torch.randn(300, requires_grad=True)
    results = []
    for n in (1, 2, 3):
        with threads(n):
            y = rmsnorm_gated(x, gate, w, implementation="cpp")
            results.append((y, *torch.autograd.grad(y.sum(), (x, gate, w))))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_cpp_operators_themselves_check_every_tensor():
    """Called below the public function's checks."""
    skip_unless_usable(RMSNORM_GATED, "cpp", torch.float32)
    RMSNORM_GATED.resolve("cpp", "cpu")
    x, w = torch.ones(4, 8), torch.ones(8)
    right = {"x": x, "gate": x, "weight": w, "eps": 1e-6}
    forward = torch.ops.tilewright.rmsnorm_gated_cpp
    backward = torch.ops.tilewright.rmsnorm_gated_cpp_backward
    for call, given in ((forward, right), (backward, {"dy": x, **right})):
        call(**given)
        for wrong, message in (
            ({"x": torch.ones(8, 4).t()}, "x must be a contiguous CPU tensor"),
            ({"x": torch.tensor(1.0)}, "x must have at least one dimension"),
            ({"gate": x[:1]}, "gate must have x's shape"),
            ({"gate": x.bfloat16()}, "gate must have x's dtype"),
            ({"weight": w[:2]}, r"weight must be \[D\]"),
            ({"weight": torch.ones(16)[::2]}, "weight must be a contiguous"),
            ({"weight": w.half()}, "weight must be float32 or have x's dtype"),
        ):
            with pytest.raises(RuntimeError, match=message):
                call(**{**given, **wrong})
    for dy, message in (
        (x[:1], "dy must have x's shape"),
        (x.bfloat16(), "dy must have x's dtype"),
    ):
        with pytest.raises(RuntimeError, match=message):
            backward(dy, **right)


ONE_WIDE = [
    pytest.param(OPS[op], name, id=f"{op}-{name}")
    for op in ("rmsnorm", "add_rmsnorm", "layernorm", "add_layernorm", "rmsnorm_gated")
    for name in OPS[op].names()
    if name != "eager"
]


@pytest.mark.parametrize("op, name", ONE_WIDE)
def test_rows_of_one_element(op, name):
    skip_unless_usable(op, name, torch.float32)
    further = {"add_rmsnorm": 1, "add_layernorm": 1, "rmsnorm_gated": 1}.get(op.name, 0)
    rows = [torch.randn(7, 1, device=DEVICE, requires_grad=True) for _ in range(1 + further)]
    weight = torch.tensor([1.5], device=DEVICE, requires_grad=True)

    def results(name):
        outs = contract.leaves(op.public(*rows, weight, implementation=name))
        loss = sum(o.cos().sum() for o in outs)
        return *outs, *torch.autograd.grad(loss, (*rows, weight))

    for found, expected in zip(results(name), results("eager"), strict=True):
        torch.testing.assert_close(found, expected)
