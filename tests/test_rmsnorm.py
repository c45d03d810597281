"""What is special to rmsnorm and add_rmsnorm; parity with the eager twin is in test_contract.py."""

import pytest
import torch
from helpers import DEVICE

from tilewright import platform
from tilewright.ops import add_rmsnorm, rmsnorm
from tilewright.ops.rmsnorm import ADD_RMSNORM, RMSNORM


def test_equals_torch_in_float64():
    x, w = torch.randn(3, 5, 33, dtype=torch.float64), torch.randn(33, dtype=torch.float64)
    expected = torch.nn.functional.rms_norm(x, (33,), w, 1e-5)
    torch.testing.assert_close(rmsnorm(x, w, 1e-5, implementation="eager"), expected, rtol=1e-14, atol=1e-14)


def test_llama_cast_equals_transformers_bit_for_bit():
    norm = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm(64, eps=1e-5).to(torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    assert torch.equal(rmsnorm(x, norm.weight, 1e-5, implementation="eager"), norm(x))


def test_gemma_cast_equals_transformers_bit_for_bit():
    norm = pytest.importorskip("transformers.models.gemma.modeling_gemma").GemmaRMSNorm(64, eps=1e-6).to(torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    assert torch.equal(rmsnorm(x, norm.weight, offset=1.0, cast="gemma", implementation="eager"), norm(x))


@pytest.mark.parametrize("name", RMSNORM.names())
def test_per_head_weight_is_a_norm_per_head(name):
    if reason := RMSNORM.implementation(name).why_not(DEVICE, torch.float32):
        pytest.skip(reason)
    x = torch.randn(2, 3, 4, 16, device=DEVICE)
    w = torch.randn(4, 16, device=DEVICE)
    y = rmsnorm(x, w, implementation=name)
    for h in range(4):
        torch.testing.assert_close(y[:, :, h], rmsnorm(x[:, :, h], w[h], implementation="eager"))


def test_cpp_gives_the_same_bits_on_any_number_of_threads():
    if reason := platform.no_cpp("cpu"):
        pytest.skip(reason)
    x = torch.randn(999, 300, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(300, requires_grad=True)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = rmsnorm(x, w, implementation="cpp")
            results.append((y, *torch.autograd.grad(y.sum(), (x, w))))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_only_the_sum_is_used():
    """The gradient of the residual stream alone must not need the normalised output."""
    for name in ADD_RMSNORM.usable(DEVICE, torch.float32):
        x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
        r = torch.randn(4, 8, device=DEVICE, requires_grad=True)
        w = torch.ones(8, device=DEVICE, requires_grad=True)
        add_rmsnorm(x, r, w, implementation=name)[1].sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(r.grad, x.grad), name


X, W = torch.randn(4, 8), torch.randn(8)


@pytest.mark.parametrize("call, error, message", [
    (lambda: rmsnorm(X.long(), W), TypeError, "x must be one of float32.*int64"),
    (lambda: rmsnorm([1.0], W), TypeError, "x must be a torch.Tensor, got list"),
    (lambda: rmsnorm(X, W.int()), TypeError, "weight must be one of"),
    (lambda: rmsnorm(torch.tensor(1.0), W), ValueError, "at least one dimension"),
    (lambda: rmsnorm(X, W[:5]), ValueError, r"weight must have shape \[8\].*got \[5\]"),
    (lambda: rmsnorm(torch.randn(2, 4, 8), torch.randn(3, 8)), ValueError,
     r"weight must have shape \[4, 8\].*\[3, 8\]"),
    (lambda: rmsnorm(X, W, bias=torch.randn(7)), ValueError, r"bias must have shape \[8\]"),
    (lambda: rmsnorm(X, W, bias=torch.randn(8).double()), TypeError, "bias must have weight's dtype"),
    (lambda: rmsnorm(X, W, cast="lama"), ValueError, "cast must be one of .*'lama'"),
    (lambda: rmsnorm(X, W.to("meta")), ValueError, "weight is on meta, x on cpu"),
    (lambda: rmsnorm(torch.empty(1, 65537), torch.empty(65537)), ValueError, "1 to 65536, got 65537"),
    (lambda: rmsnorm(torch.empty(3, 0), torch.empty(0)), ValueError, "1 to 65536, got 0"),
    (lambda: add_rmsnorm(X, X[:2], W), ValueError, r"residual must have shape \[4, 8\].*\[2, 8\]"),
    (lambda: add_rmsnorm(X, X.half(), W), TypeError, "residual must be"),
    (lambda: rmsnorm(X, W, implementation="tritn"), ValueError,
     r"unknown implementation 'tritn'; have \['auto', 'triton'"),
])
def test_bad_input_is_one_clear_error(call, error, message):
    with pytest.raises(error, match=message):
        call()
