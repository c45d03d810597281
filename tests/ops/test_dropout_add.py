"""dropout_add: the mask's bits and share, p at its ends, forward and backward; parity with the
eager twin is in test_contract.py.
"""

import pytest
import torch
from helpers import DEVICE, skip_unless_usable

from tilewright.ops import dropout_add
from tilewright.ops.activation.dropout_add import DROPOUT_ADD
from tilewright.ops.quant import quantize

EVERY = pytest.mark.parametrize("name", DROPOUT_ADD.names())
SEED, OFFSET = 2**62 + 5, 2**60 + 7


def words(n):
    stream = OFFSET % 2**32, 2**30 + OFFSET // 2**32
    return quantize.philox(SEED, n, torch.device(DEVICE), stream)


def drop(x, p, name, residual=None, **options):
    residual = torch.zeros_like(x) if residual is None else residual
    given = {"seed": SEED, "offset": OFFSET, **options}
    return dropout_add(x, residual, p, **given, implementation=name)


@EVERY
def test_the_mask_is_that_of_the_generator_and_the_others_are_scaled(name):
    """Bit for bit, in forward and backward, in several programs."""
    skip_unless_usable(DROPOUT_ADD, name, torch.float32)
    x = torch.ones(3, 701, device=DEVICE, requires_grad=True)
    y = drop(x, 0.3, name)
    scale = torch.tensor(1 / (1 - 0.3), device=DEVICE)
    expected = torch.where(words(x.numel()).view(x.shape) < round(0.3 * 2**32), 0, scale)
    assert torch.equal(y, expected)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


@EVERY
def test_p_counts_to_the_generators_last_bit(name):
    """An element is dropped if and only if its bits are below p 2^32."""
    skip_unless_usable(DROPOUT_ADD, name, torch.float32)
    x = torch.ones(64, device=DEVICE)
    for i, word in enumerate(words(64).tolist()[:3]):
        assert drop(x, word / 2**32, name)[i] != 0
        assert drop(x, (word + 1) / 2**32, name)[i] == 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements_is_p(p):
    n = 2**18
    dropped = float((drop(torch.ones(n, device=DEVICE), p, "eager") == 0).double().mean())
    assert abs(dropped - p) < 4 * (p * (1 - p) / n) ** 0.5  # standard deviations


@EVERY
def test_all_or_nothing(name):
    """p = 1, as torch's dropout, but for elements that are not finite."""
    skip_unless_usable(DROPOUT_ADD, name, torch.float32)
    x, r = (torch.randn(9, 33, device=DEVICE, requires_grad=True) for _ in range(2))
    y = drop(x, 1.0, name, r)
    dx, dr = torch.autograd.grad(y.sum(), (x, r))
    assert torch.equal(y, r) and not dx.any() and torch.equal(dr, torch.ones_like(r))
    assert torch.equal(drop(torch.full_like(x, float("inf")), 1.0, name, r), r)
    for options in ({"p": 0.0}, {"p": 1.0, "training": False}):
        assert torch.equal(drop(x, name=name, residual=r, **options), x + r)


@EVERY
def test_seed_and_offset_choose_the_mask(name):
    skip_unless_usable(DROPOUT_ADD, name, torch.float32)
    x = torch.ones(256, device=DEVICE)
    masks = [
        drop(x, 0.5, name, seed=seed, offset=offset) != 0
        for seed in (0, 1, 2**32)
        for offset in (0, 1, 2**32)
    ]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert 64 < int((mask != other).sum()) < 192  # 128, by 8 standard deviations


def test_the_cpp_operator_itself_checks_every_argument():
    """Called below the public function's checks."""
    skip_unless_usable(DROPOUT_ADD, "cpp", torch.float32)
    DROPOUT_ADD.resolve("cpp", "cpu")
    call, x = torch.ops.tilewright.dropout_add_cpp, torch.ones(3, 8)
    right = {"x": x, "residual": x, "threshold": 2**31, "scale": 2.0, "seed": 1, "offset": 2}
    right |= {"first": 0, "width": 1, "skip": 0, "dtype": torch.float32}
    call(**right)
    for wrong, message in (
        ({"x": x.t()}, "x must be a contiguous CPU tensor"),
        ({"x": x.half()}, "float32 and bfloat16"),
        ({"residual": x[:1]}, "residual must have x's shape"),
        ({"residual": x.bfloat16()}, "residual must have the result's dtype"),
        ({"residual": None, "dtype": torch.float16}, "float32 and bfloat16"),
        ({"threshold": -1}, r"threshold must be 0 to 2\^32, got -1"),
        ({"threshold": 2**32 + 1}, r"threshold must be 0 to 2\^32"),
        ({"seed": -1}, "seed must be >= 0"),
        ({"offset": 2**62}, r"offset 0 to 2\^62 - 1"),
        ({"first": -1}, "first and skip must be >= 0 and width > 0, got -1, 0 and 1"),
        ({"width": 0}, "width > 0"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(**{**right, **wrong})


# ---- a part of a tensor


@EVERY
@pytest.mark.parametrize("columns", [(0, 2048), (516, 1400), (2044, 2048)], ids=str)
def test_a_part_has_the_wholes_mask(name, columns):
    """Rows, and columns of them: bit for bit, in forward and backward, in several programs."""
    skip_unless_usable(DROPOUT_ADD, name, torch.float32)
    (a, b), row = columns, 2048
    torch.manual_seed(0)
    whole = torch.randn(7, row, device=DEVICE, requires_grad=True)
    part = whole.detach()[2:, a:b].clone().requires_grad_()
    want = drop(whole, 0.3, name)
    found = drop(part, 0.3, name, first=2 * row + a, row=row)
    assert torch.equal(found, want[2:, a:b])
    gradient = torch.autograd.grad(want.sum(), whole)[0]
    assert torch.equal(torch.autograd.grad(found.sum(), part)[0], gradient[2:, a:b])


def test_a_part_of_a_draw_is_refused():
    x = torch.ones(3, 6, device=DEVICE)
    assert drop(x, 0.5, "eager", row=6).shape == x.shape
    for options, message in (
        ({"first": 6}, "first must be a multiple of 4, the elements of a draw, got 6"),
        ({"row": 12}, r"columns must be multiples of 4, .* got row = 12 and x \[3, 6\]"),
        ({"row": 4}, "row no smaller than x's columns"),
    ):
        with pytest.raises(ValueError, match=message):
            drop(x, 0.5, "eager", **options)
    with pytest.raises(ValueError, match="row and x's columns must be multiples of 4"):
        drop(x[:, :4], 0.5, "eager", row=7)
