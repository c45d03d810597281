"""CPU matrix products into float32: every memory layout, their derivatives, and where they are
used.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import OperatorNames, threads

from tilewright import nn as twnn
from tilewright.core import platform
from tilewright.ops import linear_cross_entropy, newton_schulz, products

DTYPES = [torch.float32, torch.bfloat16]
# Single elements; odd sums (an unpaired bfloat16); tile remainders; several panels, and blocks of
# both operands.
SHAPES = [(1, 1, 1), (7, 5, 3), (64, 2, 70), (257, 1025, 193), (5, 0, 4)]


def needs(dtype):
    if not products.takes(dtype):
        pytest.skip("this processor, or this build, has no such products")


def matrix(rows, columns, transposed, dtype, g):
    made = torch.randn((columns, rows) if transposed else (rows, columns), generator=g).to(dtype)
    return made.t() if transposed else made


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("M, S, N", SHAPES)
def test_every_order_of_memory(dtype, M, S, N):
    """Against float64: only the error of float32 sums, no 16-bit rounding."""
    needs(dtype)
    g = torch.Generator().manual_seed(0)
    for left, right, add in itertools.product((False, True), repeat=3):
        a, b = matrix(M, S, left, dtype, g), matrix(S, N, right, dtype, g)
        around = torch.full((M, N + 3), float("nan"))
        out = around[:, :N]
        out.normal_(generator=g) if add else None
        truth = 0.5 * (a.double() @ b.double()) + (out.double() if add else 0)
        products.product_(out, a, b, add=add, scale=0.5)
        torch.testing.assert_close(out.double(), truth, rtol=0, atol=2e-6 * max(S, 1) ** 0.5)
        assert around[:, N:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_the_same_bits_on_any_number_of_threads(dtype):
    needs(dtype)
    g = torch.Generator().manual_seed(0)
    a, b = matrix(300, 500, False, dtype, g), matrix(500, 400, True, dtype, g)
    found = []
    for n in (1, 2):
        with threads(n):
            found.append(torch.empty(300, 400))
            products.product_(found[-1], a, b)
    assert torch.equal(*found)


def test_what_does_not_fit_is_refused():
    needs(torch.float32)
    a = torch.zeros(4, 5)
    for out, left, right in (
        (torch.zeros(4, 4), a, a),
        (torch.zeros(4, 4, dtype=torch.bfloat16), a, a.t()),
        (torch.zeros(4, 4).t(), a, a.t()),
        (torch.zeros(3, 4), a, a.t()),
        (torch.zeros(4, 4), a.double(), a.double().t()),
    ):
        with pytest.raises(RuntimeError, match="tilewright"):
            products.product_(out, left, right)


def test_linear_and_its_derivatives():
    """Both first derivatives and one second; the weight's gradient has the weight's strides."""
    needs(torch.float32)
    g = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=g) for shape in ((3, 20, 33), (70, 33), (3, 20, 70)))

    def derivatives(fn, dtype):
        a, b = (t.to(dtype).clone().requires_grad_() for t in (x, w))
        y = fn(a, b)
        dx, dw = torch.autograd.grad(y, (a, b), dy.to(dtype), create_graph=True)
        assert dw.is_contiguous()
        (second,) = torch.autograd.grad(dx.square().sum(), b)
        return tuple(t.detach() for t in (y, dx, dw, second))

    truths = derivatives(F.linear, torch.float64)
    for found, truth in zip(derivatives(products.linear, torch.float32), truths, strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5 * float(truth.std()))


def test_what_a_layer_takes():
    """tilewright's products where they are faster, PyTorch's elsewhere."""
    needs(torch.float32)
    layer = twnn.Linear(8, 6, bias=False)

    def own(x, layer=layer, autocast=False):
        with OperatorNames() as calls, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            layer(x)
        return any("product_cpp" in name for name in calls.names)

    x = torch.randn(2, products.ROWS, 8)
    assert own(x)
    assert not own(x[:1, 1:]) and not own(x, autocast=True) and not own(x, twnn.Linear(8, 6))
    assert not own(x.bfloat16(), layer.bfloat16())


def test_a_bfloat16_head_with_float32_logits(monkeypatch):
    """Loss and gradient over several chunks, with unconverted bfloat16 operands."""
    needs(torch.bfloat16)
    taken, product_ = [], products.product_

    def spy(out, a, b, **options):
        taken.append((out.dtype, a.dtype, options.get("add", False)))
        product_(out, a, b, **options)

    monkeypatch.setattr(products, "product_", spy)
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=g).to(torch.bfloat16) for shape in ((96, 64), (130, 64)))
    y = torch.randint(130, (96,), generator=g)

    def step(dtype, **options):
        a, b = (t.to(dtype).clone().requires_grad_() for t in (x, w))
        loss = linear_cross_entropy(a, b, y, **options)
        loss.backward()
        return loss.detach().double(), b.grad.double()

    loss, dw = step(torch.bfloat16, fp32_logits=True, chunk_size=32, implementation="cpp")
    assert taken == [
        (torch.float32, torch.bfloat16, add) for chunk in range(3) for add in (False, chunk > 0)
    ]
    truth, exact = step(torch.float64, implementation="eager")
    assert abs(loss - truth) < 1e-6 * truth
    # The gradient is rounded once to bfloat16, as is its logits' gradient before.
    assert (dw - exact).norm() < 2**-8 * exact.norm()


def test_compiled_layers_are_one_graph():
    needs(torch.float32)
    a, b = (torch.randn(shape, requires_grad=True) for shape in ((5, 7), (7, 3)))
    torch.library.opcheck(torch.ops.tilewright.product_cpp.default, (a, b))
    torch.manual_seed(0)
    layer, x = twnn.Linear(8, 6, bias=False), torch.randn(products.ROWS, 8, requires_grad=True)
    found = []
    for fn in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        y = fn(x)
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), (x, layer.weight))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_where_atens_products_are_faster_they_are_taken(dtype, monkeypatch):
    """As on Intel's processors, in what is not a layer: newton_schulz, and a head's gradients."""
    if reason := platform.no_cpp("cpu"):
        pytest.skip(reason)
    monkeypatch.setattr(products, "takes", lambda dtype: False)
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=g) for shape in ((300, 400), (130, 400)))
    y = torch.randint(130, (300,), generator=g)

    def found(dtype, name):
        a, b = (t.to(dtype).requires_grad_() for t in (x, w))
        loss = linear_cross_entropy(a, b, y, chunk_size=96, implementation=name)
        orthogonal = newton_schulz(a.detach() * 0.01, implementation=name)
        return *torch.autograd.grad(loss, (a, b)), orthogonal

    with OperatorNames() as calls:
        results = found(dtype, "cpp")
    assert not any("product_cpp" in name for name in calls.names)
    limit = 1e-4 if dtype == torch.float32 else 0.03
    for t, truth in zip(results, found(torch.float64, "eager"), strict=True):
        assert (t - truth).norm() < limit * truth.norm()


def test_huge_pages_change_no_element():
    t = torch.arange(9 << 20)
    assert products.huge_pages_(t) is t
    assert torch.equal(t, torch.arange(9 << 20))
