"""Newton-Schulz orthogonalization: singular values and vectors, both forms, batches, bad input."""

import pytest
import torch
from helpers import DEVICE, skip_unless_usable

from tilewright.core.registry import short
from tilewright.kernels.optim import newton_schulz as composed
from tilewright.ops import newton_schulz
from tilewright.ops.optim.newton_schulz import (
    NEWTON_SCHULZ,
    POLAR_EXPRESS,
    QUINTIC,
    SAFETY,
    newton_schulz_eager,
)

IMPLEMENTATIONS = pytest.mark.parametrize("name", NEWTON_SCHULZ.names())
F32, BF16 = torch.float32, torch.bfloat16


def matrix(*singular_values, shape, seed=0):
    """Float64, of Frobenius norm 1, with these singular values up to a common factor."""
    g = torch.Generator().manual_seed(seed)
    u, v = (
        torch.linalg.qr(torch.randn(n, len(singular_values), generator=g, dtype=torch.float64))[0]
        for n in shape
    )
    s = torch.tensor(singular_values, dtype=torch.float64)
    return (u * (s / s.norm())) @ v.T


def spectrum(low, n):
    return torch.logspace(0, torch.tensor(low).log10(), n, dtype=torch.float64).tolist()


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", [(24, 24), (20, 70), (70, 20)], ids=str)
def test_polar_express_gives_singular_values_of_one(name, shape):
    """From 1e-3 of the norm and more, in six steps; and the polar factor U V^T itself."""
    skip_unless_usable(NEWTON_SCHULZ, name, F32)
    x = matrix(*spectrum(2e-3, min(shape)), shape=shape)
    assert torch.linalg.svdvals(x)[-1] > 1e-3
    y = newton_schulz(x.to(F32).to(DEVICE), 6, coefficients="polar_express", implementation=name)
    y = y.cpu().double()
    found = torch.linalg.svdvals(y)
    assert found.min() > 0.99 and found.max() < 1.01
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(y, u @ vh, rtol=0, atol=5e-3)
    quintic = torch.linalg.svdvals(newton_schulz(x, 6, implementation="eager"))
    assert quintic.min() < 0.9 and quintic.max() > 1.1  # that one does not converge


@pytest.mark.parametrize(
    "coefficients, steps, low, least, most",
    [
        ("polar_express", 5, 1e-3, 0.84, 1.13),
        ("polar_express", 6, 1e-3, 0.99, 1.01),
        ("polar_express", 9, 1e-3, 0.999999, 1.000001),
        ("quintic", 5, 1e-2, 0.68, 1.14),
        ("quintic", 5, 1e-3, 0.47, 1.21),
    ],
)
def test_polynomials_map_singular_values_as_documented(coefficients, steps, low, least, most):
    """A matrix of one row and column each for the numbers between low and 1."""
    s = torch.tensor(spectrum(low, 4000), dtype=torch.float64)
    polynomials = NEWTON_SCHULZ.public.__globals__["_polynomials"](coefficients, steps)
    for a, b, c in zip(*(polynomials[i::3] for i in range(3)), strict=True):
        s = a * s + b * s**3 + c * s**5
    assert least < s.min() < least + 0.02 and most - 0.02 < s.max() < most


def best_quintic(low, high):
    """The odd quintic nearest to 1 on [low, high], by Remez's algorithm, and its error."""
    nodes = torch.linspace(low, high, 4, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    for _ in range(100):
        rows = torch.stack([nodes, nodes**3, nodes**5, signs], -1)
        a, b, c, e = torch.linalg.solve(rows, torch.ones(4, dtype=torch.float64))
        root = (9 * b * b - 20 * a * c).sqrt()
        q, r = (((-3 * b - root) / (10 * c)).sqrt(), ((-3 * b + root) / (10 * c)).sqrt())
        nodes = torch.stack([nodes[0], q, r, nodes[3]])
    return (a, b, c), abs(e)


def test_polar_express_is_the_best_polynomial_of_each_step():
    """Up to a factor: with a cushion the polynomial is centered on the interval that is left."""
    low, high = 1e-3, 1.0
    for a, b, c in POLAR_EXPRESS[:5]:
        cushion = max(low, 0.02407327424182761 * high)
        (p, q, r), _ = best_quintic(cushion, high)

        def at(x, p=p, q=q, r=r):
            return p * x + q * x**3 + r * x**5

        factor = 2 / (at(low) + at(high)) if cushion > low else 1.0
        expected = torch.stack([p, q, r]) * factor
        found = torch.tensor([a, b, c], dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=0)
        low = float(a * low + b * low**3 + c * low**5)
        high = 2 - low
    assert SAFETY > 1


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=short)
def test_follows_kellers_recurrence(name, dtype):
    """x <- a x + b x x^T x + c (x x^T)^2 x of the matrix over its norm, in float64."""
    skip_unless_usable(NEWTON_SCHULZ, name, dtype)
    x = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    y, (a, b, c) = x.double(), QUINTIC
    y = y / y.flatten(1).norm(dim=1)[:, None, None]
    for _ in range(3):
        gram = y @ y.mT
        y = a * y + b * gram @ y + c * gram @ gram @ y
    found = newton_schulz(x.to(DEVICE), 3, implementation=name)
    assert found.dtype == dtype and found.is_contiguous()
    away = (found.cpu().double() - y).norm() / y.norm()
    assert away < (1e-6 if dtype == F32 else 0.02), away


@pytest.mark.parametrize("steps", [1, 2, 5, 6])
def test_both_forms_agree(steps, monkeypatch):
    """Two steps on the Gram matrix are two steps."""
    if "cpp" not in NEWTON_SCHULZ.usable("cpu", F32):
        pytest.skip("cpp")
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(2))
    calls = []
    real = torch.Tensor.diagonal
    monkeypatch.setattr(
        torch.Tensor, "diagonal", lambda t, *a, **k: calls.append(1) or real(t, *a, **k)
    )
    gram = newton_schulz(x, steps, implementation="cpp")
    assert len(calls) == steps // 2
    monkeypatch.setattr(composed, "WIDE", 5)
    plain = newton_schulz(x, steps, implementation="cpp")
    assert len(calls) == steps // 2
    torch.testing.assert_close(gram, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(40, 44), (2, 40, 100)], ids=str)
def test_blocks_below_the_diagonal_are_mirrored(shape, monkeypatch):
    if "cpp" not in NEWTON_SCHULZ.usable("cpu", F32):
        pytest.skip("cpp")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    monkeypatch.setitem(NEWTON_SCHULZ.public.__globals__, "BLOCK", 16)
    found, expected = (newton_schulz(x, 3, implementation=n) for n in ("cpp", "eager"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=short)
def test_in_bfloat16_singular_values_stay_bounded(dtype):
    """From 1e-5 of the largest, where rounding makes eigenvalues of the Gram matrix negative."""
    x = matrix(*spectrum(1e-5, 64), shape=(64, 256)).to(dtype)
    for coefficients in ("quintic", "polar_express"):
        y = newton_schulz(x.to(DEVICE), 6, coefficients=coefficients)
        assert torch.linalg.svdvals(y.double()).max() < 1.25


@IMPLEMENTATIONS
def test_each_matrix_by_itself_and_any_strides(name):
    skip_unless_usable(NEWTON_SCHULZ, name, F32)
    x = torch.randn(2, 3, 12, 20, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    y = newton_schulz(x, implementation=name)
    # A library may sum the products of a batch, or of a transpose, in another order.
    one = newton_schulz(x[1, 2], implementation=name)
    torch.testing.assert_close(y[1, 2], one, rtol=0, atol=1e-5)
    turned = newton_schulz(x.mT, implementation=name)
    torch.testing.assert_close(turned, y.mT, rtol=0, atol=1e-5)
    assert y.is_contiguous() and turned.is_contiguous()
    # The scale of a matrix does not matter, but a tiny one is not divided by its norm.
    torch.testing.assert_close(newton_schulz(1e3 * x, implementation=name), y, rtol=0, atol=1e-5)
    assert newton_schulz(1e-15 * x, implementation=name).abs().max() < 1e-2
    twice = newton_schulz(x[0, 0], 2, coefficients=[QUINTIC], implementation=name)
    torch.testing.assert_close(twice, newton_schulz(x[0, 0], 2, implementation=name))


def test_autocast_changes_nothing():
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    expected = newton_schulz(x, implementation="eager")
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(newton_schulz(x, implementation="eager"), expected)


@pytest.mark.parametrize(
    "arguments, error, sentence",
    [
        ((torch.ones(3),), ValueError, r"x must have shape \[..., M, N\], got \[3\]"),
        ((torch.ones(2, 2, requires_grad=True),), ValueError, "x requires a gradient, .*x.detach"),
        ((torch.ones(2, 2), 5, "cubic"), ValueError, r"one of \['quintic', 'polar_express'\], got"),
        ((torch.ones(2, 2), 5, [(1.0, 2.0)]), ValueError, r"or \(a, b, c\) of each step, got"),
    ],
)
def test_bad_input(arguments, error, sentence):
    x, *more = arguments
    options = dict(zip(("coefficients", "eps"), more[1:], strict=False))
    with pytest.raises(error, match=sentence):
        newton_schulz(x, *more[:1], **options)
    with torch.no_grad():  # where no graph is recorded, nothing is lost
        assert newton_schulz(torch.ones(2, 2, requires_grad=True)).shape == (2, 2)


def test_more_matrices_than_a_grid_has_rows(monkeypatch):
    skip_unless_usable(NEWTON_SCHULZ, "triton", F32)
    from tilewright.kernels.optim import newton_schulz_triton

    x = torch.randn(5, 12, 20, device=DEVICE)
    whole = newton_schulz(x, steps=2, implementation="triton")
    monkeypatch.setattr(newton_schulz_triton, "MOST", 2)
    assert torch.equal(newton_schulz(x, steps=2, implementation="triton"), whole)


@IMPLEMENTATIONS
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30, torch.finfo(torch.float32).max])
def test_matrices_of_any_size_are_orthogonalized(name, size):
    """Their norm, or its square, may be beyond float32."""
    skip_unless_usable(NEWTON_SCHULZ, name, torch.float32)
    x = torch.randn(2, 6, 9, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    x = x / x.abs().max() * size
    truth = newton_schulz_eager(x.double(), [*QUINTIC] * 5, 1e-37)
    found = newton_schulz(x, eps=1e-37, implementation=name)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tall", [False, True])
def test_programs_share_the_norm_of_a_matrix(tall, monkeypatch):
    """Each of two has tiles whose largest elements differ by 1e9; and a NaN stays in its matrix."""
    skip_unless_usable(NEWTON_SCHULZ, "triton", F32)
    from tilewright.kernels.optim import newton_schulz, newton_schulz_triton

    monkeypatch.setattr(newton_schulz_triton, "PARTS", 2)
    x = torch.randn(3, 200, 70, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[0, 64:] *= 1e9
    x[1, :, 64:] *= 1e9
    x[2, 130, 3] = float("nan")
    found = newton_schulz_triton._start(x, tall, 1e-7)
    wanted = newton_schulz.start_in_torch(x, tall, 1e-7)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0, equal_nan=True)
    assert found[2].isnan().all() and not found[:2].isnan().any()


def test_a_batch_that_fills_a_device_takes_large_tiles(monkeypatch):
    module = pytest.importorskip("tilewright.kernels.optim.newton_schulz_triton")
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    found = [module._as_if(B, M, None) for B, M in ((1, 768), (12, 768), (13, 768), (64, 768))]
    assert found == [768, 768, module.LARGE, module.LARGE], "21 tiles a matrix, for 264"
    assert module._as_if(1, 4096, None) == module._as_if(64, 4096, None) == 4096
    small, large = (module.SYMMETRIC.heuristic(M, 2, True) for M in (found[0], found[-1]))
    assert small["BLOCK"] == 64 and large["BLOCK"] == 128
