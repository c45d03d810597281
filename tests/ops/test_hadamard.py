"""The block Hadamard transform: the matrix, the signs, the bits of every implementation; its
gradient is in test_contract.py.
"""

import math

import pytest
import torch
from helpers import DEVICE, skip_unless_usable, with_dtypes

from tilewright.ops import hadamard
from tilewright.ops.quant import quantize
from tilewright.ops.quant.hadamard import HADAMARD

IMPLEMENTATIONS = pytest.mark.parametrize("name", HADAMARD.names())
SIZES = pytest.mark.parametrize("size", [16, 32])


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def sylvester(size):
    """By the recursion, where the op's definition uses butterflies."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / math.sqrt(size)


def signs(seed, size):
    words = quantize.philox(seed, size, torch.device("cpu"))
    return torch.tensor([-1.0 if int(w) & 1 else 1.0 for w in words], dtype=torch.float64)


@IMPLEMENTATIONS
@SIZES
@pytest.mark.parametrize("seed", [None, 7, 2**40 + 3])
def test_is_a_product_by_the_matrix_of_signs(name, size, seed):
    skip_unless_usable(HADAMARD, name, torch.float32)
    x = randn(3, 5, 3 * size)
    s = torch.ones(size, dtype=torch.float64) if seed is None else signs(seed, size)
    blocks = x.cpu().double().view(-1, size)
    forward = hadamard(x, size, seed=seed, implementation=name)
    backward = hadamard(x, size, seed=seed, inverse=True, implementation=name)
    for found, expected in (
        (forward, (blocks * s) @ sylvester(size)),
        (backward, (blocks @ sylvester(size)) * s),
    ):
        assert found.shape == x.shape and found.dtype == x.dtype and found.is_contiguous()
        torch.testing.assert_close(found.cpu().double(), expected.view(x.shape), rtol=0, atol=2e-6)


@with_dtypes(HADAMARD, ["triton", "cpp"])
@SIZES
@pytest.mark.parametrize(
    "options", [{}, {"seed": 3}, {"seed": 2**62 + 5, "inverse": True}], ids=str
)
def test_implementations_give_the_bits_of_the_twin(name, dtype, size, options, poisoned):
    skip_unless_usable(HADAMARD, name, dtype)
    # Within a program's tile, and beyond.
    for shape in ((5, 96), (2500 // size * size,), (2, 0, 64), (0, 32)):
        x = randn(*shape, dtype=dtype)
        found, expected = (hadamard(x, size, **options, implementation=n) for n in (name, "eager"))
        assert found.dtype == dtype and torch.equal(found, expected)


def test_signs_are_those_of_the_seed():
    x = torch.zeros(3, 32, device=DEVICE)
    x[0, 0] = x[1, 1] = x[2, 5] = 4.0  # each row's first element shows one position's sign
    seen = {tuple(hadamard(x, 32, seed=seed)[:, 0].sign().tolist()) for seed in range(40)}
    assert len(seen) == 8
    ones = torch.ones(2, 64, device=DEVICE)
    y = hadamard(ones, 16, seed=5)
    assert torch.equal(y[0, :16], y[1, 48:])  # the same for all blocks
    assert not torch.equal(y, hadamard(ones, 16, seed=6))
    assert not torch.equal(y, hadamard(ones, 16, seed=5 + 2**32))
    counts = sum((signs(seed, 32) < 0).double() for seed in range(400))
    assert ((counts - 200).abs() < 50).all()  # 5 standard deviations


def test_what_is_not_finite_stays_in_its_block():
    x = randn(2, 64)
    x[0, 20], x[1, 63] = float("nan"), float("inf")
    for name in HADAMARD.usable(DEVICE, torch.float32):
        bad = ~hadamard(x, implementation=name).isfinite()
        assert bad[0].tolist() == [False] * 16 + [True] * 16 + [False] * 32
        assert bad[1].tolist() == [False] * 48 + [True] * 16


def test_arguments_that_do_not_fit_are_refused_by_name():
    x = randn(4, 48)
    for call, message in [
        (lambda: hadamard(x, 32), r"x .* with C % size == 0, where size = 32, got \[4, 48\]"),
        (lambda: hadamard(x[:, :40]), r"x must .*, where size = 16, got \[4, 40\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
