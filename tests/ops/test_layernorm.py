"""Tests specific to layernorm and add_layernorm; parity with the twin is in test_contract.py."""

import pytest
import torch
from helpers import DEVICE, skip_unless_usable

from tilewright.bench import contract
from tilewright.ops import OPS, add_layernorm, layernorm
from tilewright.ops.norm.cases import norm_case
from tilewright.ops.norm.layernorm import ADD_LAYERNORM, LAYERNORM


def test_equals_torch_in_float64():
    x, w, b = (torch.randn(n, dtype=torch.float64) for n in ((3, 5, 33), (33,), (33,)))
    expected = torch.nn.functional.layer_norm(x, (33,), w, b, 1e-5)
    found = layernorm(x, w, b, 1e-5, implementation="eager")
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("D", [96, 16512], ids=["whole_rows", "column_blocks"])
@pytest.mark.parametrize("outlier", [0.0, 1e4], ids=["", "beside_an_outlier"])
@pytest.mark.parametrize("op", ["layernorm", "add_layernorm"])
def test_a_large_mean_destroys_no_precision(op, outlier, D):
    """By the contract, against float64; also where one element is far from the others."""
    skip_unless_usable(LAYERNORM, "triton", torch.float32)
    case = norm_case(
        "", (9 if D < 1000 else 2, D), add=op == "add_layernorm", bias=True, mean=1000.0
    )
    kwargs = case.make(DEVICE, torch.float32, 0)
    with torch.no_grad():
        kwargs["x"][:, 0] += outlier
    by = contract.reference(OPS[op], kwargs, torch.float32)
    found = contract.judge(OPS[op], "triton", kwargs, by)
    assert not contract.broken(found)
    if op == "layernorm" and not outlier:  # nor the digits that a rounded mean costs the twin
        assert next(f for f in found if f.name == "out 0").error < 2e-6 < by.eager["out 0"]


@pytest.mark.parametrize("name", ADD_LAYERNORM.names())
def test_only_the_sum_is_used(name):
    """The gradient of the residual stream alone must not need the normalized output."""
    skip_unless_usable(ADD_LAYERNORM, name, torch.float32)
    x, r = (torch.randn(4, 8, device=DEVICE, requires_grad=True) for _ in range(2))
    w = torch.ones(8, device=DEVICE, requires_grad=True)
    add_layernorm(x, r, w, implementation=name)[1].sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(r.grad, x.grad)


@pytest.mark.parametrize("name", LAYERNORM.names())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weight_and_bias_of_any_float_dtype(name, dtype):
    """Gradients have the parameter's dtype."""
    skip_unless_usable(LAYERNORM, name, torch.float32)
    if name == "triton" and DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates on a cast to bfloat16")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 40, generator=generator).to(DEVICE).requires_grad_()
    w, b = (torch.linspace(0.5, 1.5, 40, device=DEVICE).to(dtype).requires_grad_() for _ in "wb")

    def step(name):
        y = layernorm(x, w, b, implementation=name)
        return [y, *torch.autograd.grad(y.square().sum(), (x, w, b))]

    for found, expected in zip(step(name), step("eager"), strict=True):
        assert found.dtype == expected.dtype
        rtol = 1e-2 if found.dtype == dtype != torch.float64 else 1e-5  # one rounding
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-4)
