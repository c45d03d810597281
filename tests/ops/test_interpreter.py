"""Triton's interpreter as tests/lib/interpreter.py changes it: what a kernel may not do fails."""

import pytest
import torch
from helpers import DEVICE

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="kernels are compiled for a CUDA device")


@triton.jit
def combine(x_ptr, y_ptr, out_ptr, HOW: tl.constexpr):
    x, y = tl.load(x_ptr + tl.arange(0, 4)), tl.load(y_ptr + tl.arange(0, 4))
    if HOW == "+":
        out = x[:, None] + y[None, :]
    elif HOW == "-":
        out = x[:, None] - y[None, :]
    elif HOW == "*":
        out = x[:, None] * y[None, :]
    else:
        out = x[:, None] + tl.arange(0, 8)[:, None]
    tl.store(out_ptr + tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 4)[None, :], out)


def run(x, y, how):
    out = torch.full((4, 4), -1, dtype=x.dtype)
    combine[(1,)](x, y, out, how)
    return out


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("how", "+-*")
def test_blocks_are_broadcast(dtype, how):
    x, y = torch.tensor([9, 8, 7, 10], dtype=dtype), torch.tensor([1, 7, 2, 0], dtype=dtype)
    expected = {"+": torch.add, "-": torch.sub, "*": torch.mul}[how](x[:, None], y)
    assert torch.equal(run(x, y, how), expected)


@pytest.mark.parametrize(
    "dtype, x, y, how",
    [
        (torch.int32, 2**31 - 4, 4, "+"),
        (torch.int32, -(2**31), 1, "-"),
        (torch.int32, 46341, 46341, "*"),
        (torch.uint8, 250, 6, "+"),
        (torch.uint8, 16, 16, "*"),
    ],
)
def test_an_integer_that_overflows_is_an_error(dtype, x, y, how):
    """In one element, the last, and for no smaller y."""

    def last(value):
        return torch.tensor([0, 0, 0, value], dtype=dtype)

    run(last(x), last(y - 1), how)
    with pytest.raises(Exception, match="overflow"):
        run(last(x), last(y), how)


def test_shapes_that_do_not_fit_are_an_error():
    x = torch.ones(4, dtype=torch.int32)
    with pytest.raises(Exception, match="incompatible dimensions"):
        run(x, x, "other")


@triton.jit
def beside(x_ptr, out_ptr):
    at = tl.arange(0, 4)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, 1.0 / (x * 0.0))
    tl.store(out_ptr + 4 + at, 1.0 / (x * -0.0))
    tl.store(out_ptr + 8 + at, at * 0.5 + 1)
    tl.store(out_ptr + 12 + at, at * 2 + 1)
    tl.static_assert((at * 2 + 1).dtype == tl.int32)
    tl.static_assert((at * 2 + 1.0).dtype == tl.float32)
    tl.store(out_ptr + 16 + at, 3 - (at == 1))


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="the interpreter of its Triton (3.6) drops a zero's sign"
)
def test_a_number_takes_the_type_of_what_it_is_beside():
    """Zeros have a sign; 1 and 1.0, beside a block of integers, are not the same. Twice, since
    numbers are kept.
    """
    x, inf = torch.arange(1.0, 5), float("inf")
    for _ in range(2):
        out = torch.zeros(20)
        beside[(1,)](x, out)
        assert out[:8].tolist() == [inf] * 4 + [-inf] * 4
        assert out[8:].tolist() == [1, 1.5, 2, 2.5, 1, 3, 5, 7, 3, 2, 3, 3]
