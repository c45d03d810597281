"""Tests specific to silu_mul and gelu_mul; parity with the eager twin is in test_contract.py."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICE, skip_unless_usable, with_dtypes
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.bench import contract
from tilewright.ops import gelu_mul, silu_mul
from tilewright.ops.activation.activation import GELU_MUL, SILU_MUL

NAMES = SILU_MUL.names()
assert GELU_MUL.names() == NAMES
FUSED = ("triton", "cpp")
KINDS = ("silu", "tanh", "none")
EVERY = pytest.mark.parametrize("name", NAMES)
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
EVERY_TAKEN = with_dtypes(SILU_MUL)


def call(kind, name, gate, up=None):
    if kind == "silu":
        return silu_mul(gate, up, implementation=name)
    return gelu_mul(gate, up, approximate=kind, implementation=name)


def reference(kind, gate, up):
    """PyTorch's functions, in float64."""
    gate, up = gate.double(), up.double()
    return (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate=kind)) * up


def pair(*shape, dtype=torch.float32, scale=2.0):
    return [
        (scale * torch.randn(*shape, device=DEVICE)).to(dtype).requires_grad_() for _ in range(2)
    ]


@EVERY_TAKEN
@EVERY_KIND
def test_equals_torch_in_float64(name, kind, dtype):
    skip_unless_usable(SILU_MUL, name, dtype)
    gate, up = pair(5, 300, dtype=dtype)
    truth = reference(kind, gate, up)
    grad = torch.randn_like(gate)
    found = call(kind, name, gate, up)
    assert found.dtype == dtype and found.is_contiguous()
    # In eps. 16 bits: one rounding; PyTorch's two steps have two. float32: an exponential and a
    # quotient of a few eps each (5.6 measured over 30 draws); F.gelu cancels in 1 + tanh and 1 +
    # erf (40).
    if dtype == torch.float32:
        limit = 8 if name in FUSED or kind == "silu" else 64
    else:
        limit = 1.1 if name == "torch" else 0.51
    mine = found.detach(), *torch.autograd.grad(found, (gate, up), grad)
    truths = truth.detach(), *torch.autograd.grad(truth, (gate, up), grad.double())
    for i, (f, t) in enumerate(zip(mine, truths, strict=True)):
        # Autograd rounds a gradient to its leaf's dtype, so truth too carries half an eps.
        slack = 0.5 if i and dtype != torch.float32 else 0
        assert contract.error(f, t)[0] <= (limit + slack) * torch.finfo(dtype).eps


def test_float64_is_exact():
    gate, up = pair(3, 50, dtype=torch.float64)
    for name in ("eager", "torch"):
        for kind in KINDS:
            torch.testing.assert_close(
                call(kind, name, gate, up), reference(kind, gate, up), rtol=1e-15, atol=0
            )


# ---- the negative tail


def tail(kind, x):
    """The activation and its derivative for negative x in float64, without cancellation, unlike 1 +
    erf.
    """
    x = x.double()
    if kind == "silu":
        s, q = 1 / (1 + torch.exp(-x)), 1 / (1 + torch.exp(x))
        return x * s, s * (1 + x * q)
    cdf, density = torch.erfc(-x / math.sqrt(2)) / 2, torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return x * cdf, cdf + x * density


@EVERY_TAKEN
@pytest.mark.parametrize("kind, last", [("silu", 86.0), ("none", 13.0)])
def test_relative_accuracy_in_the_negative_tail(name, dtype, kind, last):
    """Down to results of the smallest normal number. F.gelu loses it: it uses 1 + erf(x / sqrt 2),
    which cancels.
    """
    skip_unless_usable(SILU_MUL, name, dtype)
    # From 2 on, past the zeros of the derivatives.
    x = -torch.linspace(2.0, last, 3000, device=DEVICE).to(dtype)
    gate = x.clone().requires_grad_()
    y = call(kind, name, gate, torch.ones_like(x))
    (dx,) = torch.autograd.grad(y.sum(), gate)
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    for found, truth in zip((y.detach(), dx), tail(kind, x), strict=True):
        normal = truth.abs() >= tiny
        assert normal.sum() > 300
        wrong = (found.double() - truth).abs()[normal]
        if kind == "none" and name not in FUSED:
            assert (wrong <= 8 * eps).all()  # the remaining accuracy is absolute
        else:
            # 16 bits: the rounding on store. float32: an exponential (1 eps), a quotient and a few
            # products.
            limit = 6 if dtype == torch.float32 else 0.51
            assert (wrong / truth.abs()[normal]).max() <= limit * eps


# ---- large and infinite arguments

SIZES = (0.0, 1e-38, 11.0, 50.0, 90.0, 200.0, 1e4, 6e4, 1e13, 1e19, 1e38, math.inf)
EXTREME = [sign * size for size in SIZES for sign in (1, -1)] + [math.nan]


@EVERY_TAKEN
@EVERY_KIND
def test_extreme_arguments(name, kind, dtype):
    """No NaN where eager has none, the same infinities, and correct limits; NaN stays NaN."""
    skip_unless_usable(SILU_MUL, name, dtype)
    values = torch.tensor(EXTREME, device=DEVICE).to(dtype)

    def step(name):
        gate, up = values.clone().requires_grad_(), torch.full_like(values, 0.5).requires_grad_()
        y = call(kind, name, gate, up)
        return [y.detach(), *torch.autograd.grad(y.sum(), (gate, up))]

    for found, eager in zip(step(name), step("eager"), strict=True):
        assert found[-1].isnan()
        known = ~eager.isnan()
        if kind == "tanh" and name == "torch":  # F.gelu's cube overflows
            known &= (values.abs() < 1e12) | ~values.isfinite()
        assert not found[known].isnan().any(), values[known & found.isnan()]
        torch.testing.assert_close(
            found[known], eager[known], rtol=2 * torch.finfo(dtype).eps, atol=1e-6
        )
    y, dgate, dup = step(name)
    finite = values.isfinite()
    right, left = finite & (values > 100), finite & (values < -100)
    assert torch.equal(dup[right], values[right]) or name in ("torch", "eager")
    if kind != "tanh" or name != "torch":
        assert (dgate[right] == 0.5).all() and (dgate[left] == 0).all()
    assert (y[left] == 0).all() and (dup[left] == 0).all()
    if name in FUSED:
        assert (y[values == math.inf] == math.inf).all()


# ---- packed


def same(name, found, expected):
    """Bitwise equality, except that F.gelu and F.silu compute strided elements differently from
    contiguous ones.
    """
    if name in FUSED:
        assert torch.equal(found, expected)
    else:
        tolerance = (64 if found.dtype == torch.float32 else 2) * torch.finfo(found.dtype).eps
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@EVERY_TAKEN
@EVERY_KIND
@pytest.mark.parametrize("inner", [64, 33])
def test_packed_equals_split_bit_for_bit(name, kind, dtype, inner):
    skip_unless_usable(SILU_MUL, name, dtype)
    gate, up = pair(3, 2, inner, dtype=dtype)
    packed = torch.cat((gate, up), -1).detach().requires_grad_()
    grad = torch.randn_like(gate)
    one, two = call(kind, name, packed), call(kind, name, gate, up)
    (found,) = torch.autograd.grad(one, packed, grad)
    same(name, one, two)
    same(name, found, torch.cat(torch.autograd.grad(two, (gate, up), grad), -1))


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves(out) if t is not None]
        self.seen.append((func.name().split(".")[0], [t.numel() for t in tensors]))
        return out


@pytest.mark.parametrize("name", FUSED)
@EVERY_KIND
def test_packed_gradient_is_one_tensor(name, kind):
    """One operator writes the whole gradient: no slice gradients are padded or added."""
    skip_unless_usable(SILU_MUL, name, torch.float32)
    packed = torch.randn(4, 3, 20, device=DEVICE, requires_grad=True)
    y = call(kind, name, packed)
    grad = torch.randn_like(y)
    with Operators() as operators:
        (found,) = torch.autograd.grad(y, packed, grad)
    written = [(op, sizes) for op, sizes in operators.seen if op != "aten::detach"]
    assert written == [(f"tilewright::act_mul_{name}_backward", [packed.numel()])]
    assert found.shape == packed.shape and found.is_contiguous()
    assert found.untyped_storage().nbytes() == 4 * 240


# ---- shapes


@EVERY
@EVERY_KIND
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 6), (2, 0, 6), (0, 0)], ids=str)
def test_without_elements(name, kind, shape):
    skip_unless_usable(SILU_MUL, name, torch.float32)
    gate, up = pair(*shape)
    for tensors in ((gate, up), (gate,)):
        y = call(kind, name, *tensors)
        assert y.shape == (shape if len(tensors) == 2 else (*shape[:-1], shape[-1] // 2))
        for t, g in zip(tensors, torch.autograd.grad(y.sum(), tensors), strict=True):
            assert g.shape == t.shape


# ---- bad input

G, U = torch.randn(3, 8), torch.randn(3, 8)


def test_cpp_operators_themselves_check_every_tensor():
    """Called below the public functions' checks."""
    skip_unless_usable(SILU_MUL, "cpp", torch.float32)
    SILU_MUL.resolve("cpp", "cpu")
    ops = torch.ops.tilewright
    forward, backward = ops.act_mul_cpp, ops.act_mul_cpp_backward
    for call, names, given in (
        (forward, ("gate", "up"), [G, U]),
        (backward, ("dy", "gate", "up"), [G, G, U]),
    ):
        for i, name in enumerate(names):
            wants = "up" if name == "gate" else name  # a mismatch of gate is reported as one of up
            for wrong in (torch.ones(8), torch.ones(3, 2), torch.ones(1, 8), G.bfloat16()):
                with pytest.raises(RuntimeError, match=f"{wants} must be a CPU tensor of gate's"):
                    call(*given[:i], wrong, *given[i + 1 :], 0)
        for gate, message in ((torch.tensor(1.0), "a dimension"), (torch.ones(3, 5), "an even")):
            with pytest.raises(RuntimeError, match=f"gate must .*{message}"):
                call(*given[: len(given) - 2], gate, None, 0)
        with pytest.raises(RuntimeError, match="kind must be 0, 1 or 2, got 3"):
            call(*given, 3)
    with pytest.raises(RuntimeError, match=r"dy must .*with 4 columns"):
        backward(G, G, None, 0)


@pytest.mark.parametrize("fn", [silu_mul, gelu_mul])
@pytest.mark.parametrize(
    "args, error, message",
    [
        ((G, U.half()), TypeError, "up must be gate's dtype float32, got float16"),
        ((torch.randn(3, 7),), ValueError, r"gate .* or I % 2 == 0, got \[3, 7\]"),
        (
            (G, U[:2]),
            ValueError,
            r"up must have shape \[gate\], where gate = \[3, 8\], got \[2, 8\]",
        ),
        ((G, U, "c"), ValueError, r"implementation 'c'; have \['auto', 'triton'"),
    ],
)
def test_bad_input_is_one_clear_error(fn, args, error, message):
    gate, *rest = args
    given = dict(zip(("up", "implementation"), rest, strict=False))
    with pytest.raises(error, match=message):
        fn(gate, **given)
