"""Linear layers under autocast, whose float32 parameters get float32 gradients."""

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICE
from torch.utils.checkpoint import checkpoint

from tilewright.nn import Linear
from tilewright.nn.linear import WideGradients, rounds_gradients


def inputs(bias=True, device="cpu"):
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(3, 40, 24, generator=gen).bfloat16().to(device).requires_grad_()
    weight = torch.randn(16, 24, generator=gen).to(device).requires_grad_()
    b = torch.randn(16, generator=gen).to(device).requires_grad_() if bias else None
    return x, weight, b, torch.randn(3, 40, 16, generator=gen).bfloat16().to(device)


def check(y, x, weight, bias, dy):
    """Checks 16-bit operands: the result is rounded once, gradients of parameters not at all."""
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
    y = WideGradients.apply(x.detach(), weight, None)
    assert y.grad_fn.saved_tensors[1] is None, "the weight in 16 bits"
    y.backward(dy)
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


def test_the_weight_may_change_before_the_backward_pass():
    """By an optimizer's step between two losses. A derivative of the gradients reads it."""
    x, weight, b, dy = inputs()
    y = WideGradients.apply(x, weight, b)
    expected = dy.double() @ weight.detach().bfloat16().double()
    with torch.no_grad():
        weight += 1
    with pytest.raises(RuntimeError, match="modified in place"):
        torch.autograd.grad(y, x, dy, create_graph=True)
    y.backward(dy)
    torch.testing.assert_close(x.grad.double(), expected, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize(("rows", "N", "K"), [((), 5, 8), ((0,), 5, 8), ((3,), 0, 8), ((3,), 5, 0)])
def test_vectors_and_empty_tensors(rows, N, K):
    x = torch.randn(*rows, K).bfloat16().requires_grad_()
    weight, b = torch.randn(N, K, requires_grad=True), torch.randn(N)
    y = WideGradients.apply(x, weight, b)
    y.sum().backward()
    expected = F.linear(x, weight.bfloat16(), b.bfloat16())
    torch.testing.assert_close(y, expected)
    for t, g in zip((x, weight), torch.autograd.grad(expected.sum(), (x, weight)), strict=True):
        torch.testing.assert_close(t.grad, g, rtol=2**-7, atol=2**-7)


def test_recomputed_layers_have_the_same_gradients():
    x, weight, b, dy = inputs()
    expected = torch.autograd.grad(WideGradients.apply(x, weight, b), (x, weight, b), dy)
    for reentrant in (True, False):
        y = checkpoint(WideGradients.apply, x, weight, b, use_reentrant=reentrant)
        y.backward(dy)
        for t, g in zip((x, weight, b), expected, strict=True):
            assert torch.equal(t.grad, g)
            t.grad = None


class Own(torch.Tensor):
    pass


def elsewhere():
    """What makes PyTorch's product the right one, by name: what is set, and x and the weight."""
    x, weight = torch.empty(3, 24), torch.empty(16, 24, requires_grad=True)
    name = "tilewright.nn.linear"
    return {
        "no autocast": ({"torch.is_autocast_enabled": lambda device: False}, x, weight),
        "autocast to float32": ({"torch.get_autocast_dtype": lambda d: torch.float32}, x, weight),
        "compiled": ({"torch.compiler.is_compiling": lambda: True}, x, weight),
        "an older PyTorch": ({f"{name}.HAS_OUT_DTYPE": False}, x, weight),
        "torch.func": ({f"{name}.in_transform": lambda: True}, x, weight),
        "forward mode": ({f"{name}.in_forward_mode": lambda: True}, x, weight),
        "traced": ({f"{name}.torch_dispatch_modes": lambda: 1}, x, weight),
        "no gradients": ({"torch.is_grad_enabled": lambda: False}, x, weight),
        "a CPU": ({"torch.Tensor.is_cuda": False}, x, weight),
        "a frozen weight": ({}, x, weight.detach()),
        "a bfloat16 weight": ({}, x, weight.detach().bfloat16().requires_grad_()),
        "x in float64": ({}, x.double(), weight),
        "a weight of its own kind": ({}, x, weight.detach().as_subclass(Own).requires_grad_()),
        "x of its own kind": ({}, x.as_subclass(Own), weight),
    }


@pytest.mark.parametrize("where", [None, *elsewhere()])
def test_they_are_computed_under_autocast_on_a_gpu(where, monkeypatch):
    settings, x, weight = elsewhere()[where or "a frozen weight"]
    if where is None:
        weight = torch.nn.Parameter(weight)
    for name, value in {
        "torch.Tensor.is_cuda": True,
        "torch.is_autocast_enabled": lambda device: device == "cuda",
        "torch.get_autocast_dtype": lambda device: torch.bfloat16,
        **settings,
    }.items():
        monkeypatch.setattr(name, value)
    assert rounds_gradients(x, weight) == (where is None)


def test_a_layer_computes_them_where_products_would_be_rounded(monkeypatch):
    x, weight, b, dy = inputs()
    x = x.detach().float().requires_grad_()  # autocast's dtype is the product's
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
