"""Tests specific to causal_conv1d; parity with the eager twin is in test_contract.py."""

import itertools

import pytest
import torch
from helpers import DEVICE, skip_unless_usable, threads

from tilewright.ops import causal_conv1d
from tilewright.ops.linear_attention.causal_conv1d import CAUSAL_CONV1D

EVERY = pytest.mark.parametrize("name", CAUSAL_CONV1D.names())


def drawn(B, S, C, W, dtype=torch.float32):
    gen = torch.Generator().manual_seed(0)
    shapes = (B, S, C), (C, W), (C,)
    return [
        torch.randn(shape, generator=gen).to(DEVICE, dtype).requires_grad_() for shape in shapes
    ]


@pytest.mark.packages
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("W", [2, 4])
def test_equals_transformers(activation, W):
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x, weight, bias = inputs = drawn(2, 9, 6, W)
    found = causal_conv1d(x, weight, bias, activation=activation, implementation="eager")
    expected = qwen.causal_conv1d_fn(x.mT, weight, bias, activation).mT
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    pair = [torch.autograd.grad(y, inputs, grad) for y in (found, expected)]
    torch.testing.assert_close(*pair)


@EVERY
def test_documents_are_convolved_alone(name):
    """Values of one, NaN included, reach neither another's results nor its gradients."""
    skip_unless_usable(CAUSAL_CONV1D, name, torch.float32)
    bounds = (0, 2, 2, 40, 41, 50)
    x, weight, bias = drawn(1, 50, 5, 4)
    with torch.no_grad():
        x[:, 2:40] = float("nan")
    y = causal_conv1d(
        x, weight, bias, cu_seqlens=torch.tensor(bounds, device=DEVICE), implementation=name
    )
    [dx] = torch.autograd.grad(y.sum(), x)
    for a, b in itertools.pairwise(bounds):
        part = x.detach()[:, a:b].requires_grad_()
        alone = causal_conv1d(part, weight, bias, implementation="eager")
        torch.testing.assert_close(y[:, a:b], alone, equal_nan=True)
        torch.testing.assert_close(dx[:, a:b], torch.autograd.grad(alone.sum(), part)[0])


@pytest.mark.parametrize("W", [2, 5, 8])
def test_cpp_in_pieces_of_channels_and_chunks_of_tokens(W):
    """More than one of each, in batches and documents whose ends are not theirs; the same bits on
    any number of threads.
    """
    skip_unless_usable(CAUSAL_CONV1D, "cpp", torch.float32)
    for B, S, documents in ((3, 701, None), (1, 1500, (0, 3, 3, 90, 1437, 1500))):
        inputs = drawn(B, S, 530, W)
        given = {"activation": "silu"}
        if documents:
            given["cu_seqlens"] = torch.tensor(documents)

        def step(name, inputs=inputs, given=given):
            y = causal_conv1d(*inputs, **given, implementation=name)
            return y, *torch.autograd.grad(y.square().sum(), inputs)

        expected = step("eager")
        results = []
        for n in (1, 2, 3):
            with threads(n):
                results.append(step("cpp"))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
        for f, e in zip(results[0], expected, strict=True):
            torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-3)


def test_cpp_operators_themselves_check_every_tensor():
    """Called below the public function's checks."""
    skip_unless_usable(CAUSAL_CONV1D, "cpp", torch.float32)
    CAUSAL_CONV1D.resolve("cpp", "cpu")
    x, bounds = torch.ones(1, 5, 8), torch.tensor([0, 2, 5])
    right = {"x": x, "weight": torch.ones(8, 4), "bias": torch.ones(8), "cu_seqlens": bounds}
    right["silu"] = True
    forward = torch.ops.tilewright.causal_conv1d_cpp
    backward = torch.ops.tilewright.causal_conv1d_cpp_backward
    for call, given in ((forward, right), (backward, {"dy": x, **right})):
        call(**given)
        for wrong, message in (
            ({"x": x[0]}, r"x must be a CPU tensor \[B, S, C\]"),
            ({"x": x.half(), "dy": x.half()}, "float32 and bfloat16"),
            ({"weight": torch.ones(7, 4)}, r"weight must be \[C, W\]"),
            ({"weight": torch.ones(8, 9)}, r"weight must be \[C, W\]"),
            ({"weight": torch.ones(4, 8).t()}, "weight must be a contiguous"),
            ({"bias": torch.ones(7)}, r"bias must be \[C\]"),
            ({"bias": torch.ones(8).bfloat16()}, "bias must have weight's dtype"),
            ({"cu_seqlens": bounds.int()}, "cu_seqlens must be a vector of at least two int64"),
            ({"cu_seqlens": bounds[:1]}, "cu_seqlens must be a vector of at least two int64"),
            ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens must begin with 0 and end with 5"),
            ({"cu_seqlens": torch.tensor([1, 5])}, "cu_seqlens must begin with 0 and end with 5"),
            ({"cu_seqlens": torch.tensor([0, 9, 5])}, "cu_seqlens must not decrease"),
            ({"cu_seqlens": torch.tensor([0, -9, 5])}, "cu_seqlens must not decrease"),
        ):
            more = {key: value for key, value in wrong.items() if key in given}
            with pytest.raises(RuntimeError, match=message):
                call(**{**given, **more})
    for dy, message in ((x[:, :1], "dy must have x's shape"), (x.half(), "dy must have x's dtype")):
        with pytest.raises(RuntimeError, match=message):
            backward(dy, **right)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weight": torch.zeros(6, 9)}, r"weight must have shape \[C, W\] with 2 <= W <= 8, .*9\]"),
        ({"activation": "relu"}, r"activation must be one of \['silu'\] or None, got 'relu'"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens must end at 4, .*got 3"),
        ({"x": torch.zeros(2, 4, 6)}, r"x must have shape .* cu_seqlens is None or B == 1"),
    ],
)
def test_bad_input_is_one_clear_error(changes, message):
    given = {"x": torch.zeros(1, 4, 6), "weight": torch.zeros(6, 4), "cu_seqlens": None}
    if "x" in changes:
        given["cu_seqlens"] = torch.tensor([0, 4])
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**{**given, **changes})
