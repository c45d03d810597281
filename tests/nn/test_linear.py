"""Linear layers under autocast, whose float32 parameters get float32 gradients."""

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICE

from tilewright.core.torch_names import FakeTensorMode
from tilewright.nn import Linear
from tilewright.nn.linear import WideGradients, rounds_gradients


def inputs(bias=True, device="cpu"):
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(3, 40, 24, generator=gen).bfloat16().to(device).requires_grad_()
    weight = torch.randn(16, 24, generator=gen).to(device).requires_grad_()
    b = torch.randn(16, generator=gen).to(device).requires_grad_() if bias else None
    return x, weight, b, torch.randn(3, 40, 16, generator=gen).bfloat16().to(device)


def check(y, x, weight, bias, dy):
    """Of 16-bit operands: the result is rounded once, gradients of parameters not at all."""
    wide = [None if t is None else t.detach().bfloat16().double() for t in (x, weight, bias)]
    exact = F.linear(*wide)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=2**-8)
    y.backward(dy)
    rows = dy.double().flatten(0, 1)
    found = {weight: rows.t() @ wide[0].flatten(0, 1)} | (
        {} if bias is None else {bias: rows.sum(0)}
    )
    for t, expected in found.items():
        assert t.grad.dtype == torch.float32
        torch.testing.assert_close(t.grad.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), dy.double() @ wide[1], rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_float32_parameters_are_not_rounded(bias):
    x, weight, b, dy = inputs(bias)
    check(WideGradients.apply(x, weight, b), x, weight, b, dy)


def test_a_gradient_that_is_not_asked_for_is_not_computed():
    x, weight, _, dy = inputs(False)
    WideGradients.apply(x.detach(), weight, None).backward(dy)
    assert weight.grad is not None and x.grad is None


def test_gradients_are_differentiable_and_batched():
    x, weight, _, dy = inputs(False)
    dy.requires_grad_()

    def second(y):
        dx, dw = torch.autograd.grad(y, (x, weight), dy, create_graph=True)
        return torch.autograd.grad(dx.float().sum() + dw.sin().sum(), (x, weight, dy))

    for found, expected in zip(
        second(WideGradients.apply(x, weight, None)),
        second(F.linear(x, weight.bfloat16())),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)
    y = WideGradients.apply(x, weight, None)
    batch = torch.stack((dy, 2 * dy)).detach()
    (dw,) = torch.autograd.grad(y, weight, batch, is_grads_batched=True)
    torch.testing.assert_close(2 * dw[0], dw[1])


@pytest.mark.parametrize(
    ("enabled", "dtype", "trained", "wide"),
    [
        (True, torch.float32, True, True),
        (False, torch.float32, True, False),
        (True, torch.bfloat16, True, False),
        (True, torch.float32, False, False),
    ],
)
def test_they_are_computed_under_autocast_on_a_gpu(enabled, dtype, trained, wide, monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: enabled and device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    with FakeTensorMode():
        weight = torch.empty(16, 24, device="cuda", dtype=dtype, requires_grad=trained)
        x = torch.empty(3, 24, device="cuda", dtype=dtype)
    assert rounds_gradients(x, weight) == wide
    with torch.no_grad():
        assert not rounds_gradients(x, weight)


def test_a_layer_computes_them_where_products_would_be_rounded(monkeypatch):
    x, weight, b, dy = inputs()
    layer = Linear(24, 16)
    layer.weight, layer.bias = torch.nn.Parameter(weight.detach()), torch.nn.Parameter(b.detach())
    monkeypatch.setattr("tilewright.nn.linear.rounds_gradients", lambda x, weight: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    check(layer(x), x, layer.weight, layer.bias, dy)


@pytest.mark.gpu
# Backward's thread has no CUDA context before its first kernel.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.skipif(DEVICE != "cuda", reason="a product of CUDA tensors")
def test_on_a_gpu():
    x, weight, b, dy = inputs(device="cuda")
    layer = Linear(24, 16, device="cuda")
    layer.weight, layer.bias = torch.nn.Parameter(weight.detach()), torch.nn.Parameter(b.detach())
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    check(y, x, layer.weight, layer.bias, dy)
