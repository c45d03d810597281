"""Tests specific to layernorm and add_layernorm; more is in test_rmsnorm.py, and parity with the
twin in test_contract.py.
"""

import pytest
import torch
from helpers import DEVICE, skip_unless_usable

from tilewright.bench import contract
from tilewright.ops import OPS, layernorm
from tilewright.ops.norm.cases import norm_case
from tilewright.ops.norm.layernorm import LAYERNORM


def test_equals_torch_in_float64():
    x, w, b = (torch.randn(n, dtype=torch.float64) for n in ((3, 5, 33), (33,), (33,)))
    expected = torch.nn.functional.layer_norm(x, (33,), w, b, 1e-5)
    found = layernorm(x, w, b, 1e-5, implementation="eager")
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("D", [96, 16512], ids=["whole_rows", "column_blocks"])
@pytest.mark.parametrize("outlier", [0.0, 1e4], ids=["", "beside_an_outlier"])
@pytest.mark.parametrize("op", ["layernorm", "add_layernorm"])
@pytest.mark.parametrize("name", ["triton", "cpp"])
def test_a_large_mean_destroys_no_precision(name, op, outlier, D):
    """By the contract, against float64; also where one element is far from the others."""
    skip_unless_usable(LAYERNORM, name, torch.float32)
    case = norm_case(
        "", (9 if D < 1000 else 2, D), add=op == "add_layernorm", bias=True, mean=1000.0
    )
    kwargs = case.make(DEVICE, torch.float32, 0)
    with torch.no_grad():
        kwargs["x"][:, 0] += outlier
    by = contract.reference(OPS[op], kwargs, torch.float32)
    found = contract.judge(OPS[op], name, kwargs, by)
    assert not contract.broken(found)
    if op == "layernorm" and not outlier:  # nor the digits that a rounded mean costs the twin
        assert next(f for f in found if f.name == "out 0").error < 2e-6 < by.eager["out 0"]


def test_cpp_operators_themselves_check_every_tensor():
    """Called below the public functions' checks."""
    skip_unless_usable(LAYERNORM, "cpp", torch.float32)
    LAYERNORM.resolve("cpp", "cpu")
    x, w, one = torch.ones(4, 8), torch.ones(8), torch.ones(4)
    forward = {"x": x, "residual": x, "weight": w, "bias": w, "eps": 1e-6}
    backward = {"dy": x, "dtotal": x, "x": x, "mean": one, "rstd": one, "weight": w}
    backward["has_bias"] = True
    of_x = (
        ({"x": torch.ones(8, 4).t()}, "x must be a contiguous CPU tensor"),
        ({"x": torch.tensor(1.0)}, "x must have at least one dimension"),
        ({"weight": w[:2]}, r"weight must be \[D\]"),
        ({"weight": torch.ones(16)[::2]}, "weight must be a contiguous"),
        ({"weight": w.half(), "bias": None}, "float32 and bfloat16"),
    )
    of_forward = (
        ({"x": x.half()}, "float32 and bfloat16"),
        ({"bias": w[:2]}, r"bias must be \[D\]"),
        ({"bias": w.bfloat16()}, "bias must have weight's dtype"),
        ({"residual": x[:1]}, "residual must have x's shape"),
        ({"residual": x.bfloat16()}, "residual must be float32 or"),
    )
    of_backward = (
        ({"dy": x[:1]}, "dy must have x's shape"),
        ({"x": x.bfloat16()}, "x must be float32 or"),
        ({"dtotal": x[:1]}, "dtotal must have x's shape"),
        ({"dtotal": x.bfloat16()}, "dtotal must have x's dtype"),
        ({"mean": one[:2]}, "mean must be float32 with one element"),
        ({"rstd": one.double()}, "rstd must be float32 with one element"),
    )
    for name, right, more in (
        ("layernorm_cpp", forward, of_forward),
        ("layernorm_cpp_backward", backward, of_backward),
    ):
        call = getattr(torch.ops.tilewright, name)
        call(**right)
        for wrong, message in (*of_x, *more):
            given = {key: value for key, value in {**right, **wrong}.items() if key in right}
            with pytest.raises(RuntimeError, match=message):
                call(**given)
