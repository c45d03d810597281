"""Tests specific to rmsnorm_gated; more is in test_rmsnorm.py, and parity with the eager twin in
test_contract.py.
"""

import pytest
import torch
from helpers import DEVICE, skip_unless_usable

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
