"""Tests specific to rmsnorm_gated; parity with the eager twin is in test_contract.py."""

import pytest
import torch
from helpers import DEVICE, skip_unless_usable

from tilewright.core.registry import FLOATS, short
from tilewright.ops import rmsnorm_gated
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
        torch.testing.assert_close(grad, want)
