"""low_precision_linear: its three products against formulas in float64 whose roundings are written
here again, what is saved, seeds, errors, and training. Parity with the eager twin is in
test_contract.py.
"""

import functools
import importlib
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import DEVICE, skip_unless_usable

from tilewright.core import platform
from tilewright.ops import (
    OPS,
    dequantize_block_fp8,
    dequantize_mxfp8,
    hadamard,
    low_precision_linear,
    quantize_block_fp8,
    quantize_mxfp8,
)
from tilewright.ops.quant import low_precision_linear as dense
from tilewright.ops.quant.low_precision_linear import LOW_PRECISION_LINEAR, RECIPES, Request
from tilewright.ops.quant.nvfp4 import QUANTIZE_NVFP4, dequantize_nvfp4, quantize_nvfp4

NAMES = LOW_PRECISION_LINEAR.names()
EVERY_NAME = pytest.mark.parametrize("name", NAMES)
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)
T, N, K = 140, 131, 150  # two blocks of 128 each, the second one incomplete


def usable(name, recipe="block_fp8", dtype=torch.float32):
    skip_unless_usable(LOW_PRECISION_LINEAR, name, dtype)
    if DEVICE == "cuda":
        major, minor = torch.cuda.get_device_capability()
        request = Request(recipe=recipe, capability=10 * major + minor)
        if reason := LOW_PRECISION_LINEAR.implementation(name).refuses(request):
            pytest.skip(reason)


def randn(*shape, seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g).to(DEVICE, dtype)


def inputs(T=T, N=N, K=K, dtype=torch.float32):
    """x, w, bias and dy, whose rows and columns have magnitudes of their own, so that a scale along
    another dimension is another one. Some are so small that powers of two round them otherwise,
    too: to subnormal codes.
    """
    x = randn(T, K, seed=0, dtype=dtype) * (1.5 ** (torch.arange(K, device=DEVICE) % 19)).to(dtype)
    x[:, ::5] *= 3e-5
    w = randn(N, K, seed=1, dtype=dtype) * 0.3
    w[:, K // 2 :] *= 40
    w[:, ::7] *= 3e-5
    dy = randn(T, N, seed=3, dtype=dtype) * (1.7 ** (torch.arange(N, device=DEVICE) % 13)).to(dtype)
    dy[T // 2 :] *= 0.01
    dy[::3] *= 3e-5
    leaves = [t.requires_grad_() for t in (x, w, randn(N, seed=2, dtype=dtype))]
    return *leaves, dy


def products(x, w, bias, dy, name, **options):
    """y, dx, dw and dbias."""
    y = low_precision_linear(x, w, bias, implementation=name, **options)
    return y, *torch.autograd.grad(y, (x, w, bias), dy)


# ---- formulas


def e4m3(v):
    """float64 v, whose magnitudes are at most 448, rounded to e4m3: three bits of mantissa, ties to
    even, and a smallest step of 2^-9.
    """
    step = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(np.abs(v), 1e-300))) - 3, -9)
    return np.round(v / step) * step


def by_blocks(t, rows, columns):
    """A matrix in blocks of rows x columns, each scaled to 448."""
    out = np.zeros_like(t)
    for i in range(0, t.shape[0], rows):
        for j in range(0, t.shape[1], columns):
            block = t[i : i + rows, j : j + columns]
            scale = np.abs(block).max() / 448 or 1.0
            out[i : i + rows, j : j + columns] = e4m3(block / scale) * scale
    return out


def powers_of_two(t):
    """A matrix in blocks of 1 x 32, each divided by the least power of two that leaves 448."""
    out = np.zeros_like(t)
    for j in range(0, t.shape[1], 32):
        block = t[:, j : j + 32]
        scale = 2.0 ** np.ceil(np.log2(np.abs(block).max(1, keepdims=True) / 448))
        out[:, j : j + 32] = e4m3(block / scale) * scale
    return out


def numpy(t):
    return t.detach().double().cpu().numpy()


def close(found, expected, near):
    """Relative to what an element's row and column are on average: in float32, unlike in float64, a
    code may be at a tie.
    """
    found, square = numpy(found), expected**2
    size = np.sqrt(square.mean(0) * square.mean(1, keepdims=True) / square.mean())
    assert found.shape == expected.shape
    assert (np.abs(found - expected) <= near * size).all()


ROUNDINGS = {
    "block_fp8": (lambda t: by_blocks(t, 1, 128), lambda t: by_blocks(t, 128, 128)),
    "mxfp8": (powers_of_two, powers_of_two),
}


@EVERY_NAME
@pytest.mark.parametrize("recipe", ROUNDINGS)
def test_each_product_rounds_both_factors_along_its_sum(recipe, name):
    usable(name, recipe)
    x, w, bias, dy = inputs()
    rows, of_weight = ROUNDINGS[recipe]
    y, dx, dw, dbias = products(x, w, bias, dy, name, recipe=recipe)
    x, w, bias, dy = map(numpy, (x, w, bias, dy))
    close(y, rows(x) @ of_weight(w).T + bias, 2e-4)
    close(dx, rows(dy) @ of_weight(w.T).T, 2e-4)
    close(dw, rows(dy.T) @ rows(x.T).T, 2e-4)
    assert (np.abs(numpy(dbias) - dy.sum(0)) < 1e-6 * np.abs(dy).sum(0)).all()


@EVERY_NAME
def test_nvfp4_transforms_what_the_weights_gradient_multiplies(name):
    """x and dy along T; dy stochastically, once for each product; w in squares."""
    usable(name, "nvfp4")
    seed = 2**62 + 11
    x, w, bias, dy = inputs(T=48, N=44, K=36)
    y, dx, dw, _ = products(x, w, bias, dy, name, recipe="nvfp4", seed=seed)

    def values(t, **options):
        return dequantize_nvfp4(quantize_nvfp4(t.detach().contiguous(), **options)).double()

    def turned(t, **options):
        return values(t.mT, hadamard=16, hadamard_seed=seed, **options)

    square = values(w, square=True)
    close(y, numpy(values(x) @ square.mT + bias), 1e-5)
    close(dx, numpy(values(dy, seed=seed) @ square), 1e-5)
    close(dw, numpy(turned(dy, seed=seed ^ 2**62) @ turned(x).mT), 1e-5)
    # Nearer to the exact product than what a transform of one factor alone would give.
    exact = numpy(dy).T @ numpy(x)
    assert np.linalg.norm(numpy(dw) - exact) < 0.3 * np.linalg.norm(exact)
    assert torch.equal(values(w.mT, square=True), square.mT)


def of_transform(t, recipe, square=False):
    """The values of t's transform along its rows, rounded, in float64."""
    missing = -t.shape[1] % 32
    wide = hadamard(torch.nn.functional.pad(t.detach().float(), (0, missing)), 32, seed=0)
    if recipe == "mxfp8":
        return dequantize_mxfp8(quantize_mxfp8(wide)).double()
    block = (128, 128) if square else (1, 128)
    return dequantize_block_fp8(quantize_block_fp8(wide, block=block)).double()


@EVERY_NAME
@pytest.mark.parametrize("recipe", ROUNDINGS)
def test_with_hadamard_each_product_rounds_the_transforms_of_both_factors(recipe, name):
    """In float32, whatever the dtype; T is no multiple of 32."""
    dtype = torch.bfloat16 if name != "triton" or DEVICE == "cuda" else torch.float16
    usable(name, recipe, dtype)
    x, w, bias, dy = inputs(N=160, K=192)
    # Results that float16 has; w, and so its gradient, stays float32.
    x, dy = (x.detach() * 0.01).to(dtype).requires_grad_(), (dy * 0.01).to(dtype)
    y, dx, dw, _ = products(x, w, bias, dy, name, recipe=recipe, hadamard=True)

    def near(result, expected):
        result, expected = numpy(result), numpy(expected)
        bound = torch.finfo(dtype).eps / 2 * np.abs(expected) + 1e-5 * np.abs(expected).mean()
        assert (np.abs(result - expected) <= bound).all()

    rows = functools.partial(of_transform, recipe=recipe)
    of_weight = functools.partial(rows, square=True)
    near(y, rows(x) @ of_weight(w).mT + bias)
    near(dx, rows(dy) @ of_weight(w.mT).mT)
    close(dw, numpy(rows(dy.mT) @ rows(x.mT).mT), 1e-5)
    exact = numpy(dy).T @ numpy(x)
    assert np.linalg.norm(numpy(dw) - exact) < 0.06 * np.linalg.norm(exact), "it cancels"


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("recipe", ROUNDINGS)
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("eager", "gluon")])
def test_every_implementation_rounds_transforms_to_the_same_bits(name, recipe, square):
    dtype = torch.bfloat16 if name != "triton" or DEVICE == "cuda" else torch.float16
    skip_unless_usable(OPS["hadamard"], name, dtype)
    options = dense.Options(recipe, 0, True, hadamard=True)
    t = randn(70, 160, seed=0, dtype=dtype)
    rounded, expected = (
        dense.Rounding(by, options, "t", square=square).both(t, transpose=True)
        for by in (name, "eager")
    )
    assert rounded[1].data.shape == (160, 96)
    for r, e in zip(rounded, expected, strict=True):
        assert r[2:] == e[2:] and all(map(torch.equal, r[:2], e[:2]))


def test_a_transform_averages_the_rounding_of_an_outlier():
    """One that lies between two codes. block_fp8 rounds a block's largest element exactly, and is
    better without.
    """
    x, w = randn(64, 256, seed=0), randn(96, 256, seed=1)
    x[:, 5] = 17 * 64  # codes are of 16 and 18
    exact = numpy(x.double() @ w.double().mT)

    def error(recipe, transform):
        y = low_precision_linear(x, w, recipe=recipe, hadamard=transform)
        return np.linalg.norm(numpy(y) - exact) / np.linalg.norm(exact)

    assert error("mxfp8", True) < 0.6 * error("mxfp8", False)
    assert error("block_fp8", False) < error("block_fp8", True) < 0.06


def test_stochastic_gradients_are_right_on_average():
    x, w, bias, dy = inputs(T=32, N=32, K=16)
    rounded = dequantize_nvfp4(quantize_nvfp4(w.detach(), square=True))
    exact_dx = numpy(dy.double() @ rounded.double())
    every = (products(x, w, bias, dy, "auto", recipe="nvfp4", seed=seed) for seed in range(200))
    found = [numpy(dx) for _, dx, *_ in every]
    alone = np.linalg.norm(found[0] - exact_dx)
    # 200^-1/2 = 0.07 of it, and saturated elements, where a block's scale was rounded down.
    assert np.linalg.norm(np.mean(found, 0) - exact_dx) < 0.25 * alone


# ---- what is saved


# Bytes per element of x, and beside them.
SAVED = {"block_fp8": (1 + 4 / 128, 0), "mxfp8": (1 + 1 / 32, 0), "nvfp4": (9 / 16, 4)}


@EVERY_RECIPE
@pytest.mark.parametrize("name", [n for n in NAMES if n != "eager"])
def test_saved_are_the_weight_and_the_codes_of_x(name, recipe):
    usable(name, recipe)
    x, w, bias, _ = inputs(T=128, N=32, K=64)

    def saved(x, w):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            low_precision_linear(x, w, bias, recipe=recipe, implementation=name)
        own = {t.data_ptr() for t in (w, bias)}
        return sum(t.nbytes for t in kept if t.data_ptr() not in own)

    each, more = SAVED[recipe]
    assert saved(x, w) == x.numel() * each + more
    assert saved(x, w.detach()) == 0, "nothing of x where the weight is frozen"
    with torch.no_grad():
        assert saved(x, w) == 0


@pytest.mark.parametrize("recipe", ROUNDINGS)
@pytest.mark.parametrize("name", [n for n in NAMES if n != "eager"])
def test_saved_codes_of_a_transform_have_whole_blocks_of_rows(name, recipe):
    usable(name, recipe)
    x, w, _, _ = inputs(T=45, N=32, K=64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        low_precision_linear(x, w, recipe=recipe, hadamard=True, implementation=name)
    scales = 64 * 2 if recipe == "mxfp8" else 64 * 4
    assert sum(t.nbytes for t in kept if t.data_ptr() != w.data_ptr()) == 64 * 64 + scales


EVERY_OPTIONS = pytest.mark.parametrize(
    "options",
    [{"recipe": r} for r in RECIPES] + [{"recipe": r, "hadamard": True} for r in ROUNDINGS],
    ids=lambda options: "-".join(map(str, options.values())),
)


@EVERY_NAME
@EVERY_OPTIONS
def test_only_what_is_asked_for_is_computed(name, options):
    """With the same bits again."""
    usable(name, options["recipe"])
    x, w, bias, dy = inputs(20, *((32, 32) if "hadamard" in options else (24, 28)))
    whole, *every = products(x, w, bias, dy, name, **options)
    for i in range(3):
        leaves = [t.detach().requires_grad_(i == j) for j, t in enumerate((x, w, bias))]
        y = low_precision_linear(*leaves, **options, implementation=name)
        assert torch.equal(y, whole)
        assert torch.equal(torch.autograd.grad(y, leaves[i], dy)[0], every[i])


@pytest.mark.parametrize("rows", [48, 45])
def test_a_transpose_is_quantized_as_it_lies(rows):
    """What NVFP4's Triton kernels read is the matrix itself, or one of whole blocks of rows."""
    skip_unless_usable(QUANTIZE_NVFP4, "triton", torch.float32)
    t, read = randn(rows, 24, seed=0), []

    class Reads(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "nvfp4_triton" in func.name():
                read.append(args[0])
            return func(*args, **(kwargs or {}))

    options = dense.Options("nvfp4", 3, True)
    with Reads():
        found = dense.Rounding("triton", options, "dy", random=True).both(t, transpose=True)
    assert len(read) == 4, "for the scale and the codes of both"
    for matrix, lies in zip(read, (t[None], t[None], read[2], read[2]), strict=True):
        assert matrix.data_ptr() == lies.data_ptr()
    assert read[2].shape == (1, 24, 48) and read[2].mT.is_contiguous()
    assert (read[2].data_ptr() == t.data_ptr()) == (rows % 16 == 0)
    expected = dense.Rounding("eager", options, "dy", random=True).both(t, transpose=True)
    for f, e in zip(found, expected, strict=True):
        assert f[3:] == e[3:] and all(map(torch.equal, f[:3], e[:3]))


# ---- determinism, seeds


@EVERY_NAME
def test_the_seed_chooses_the_gradients(name):
    usable(name, "nvfp4")
    given = inputs(T=32, N=24, K=40)
    y, dx, dw, db = products(*given, name, recipe="nvfp4", seed=1)
    again = products(*given, name, recipe="nvfp4", seed=1)
    assert all(map(torch.equal, (y, dx, dw, db), again))
    other = products(*given, name, recipe="nvfp4", seed=2)
    assert torch.equal(y, other[0]) and torch.equal(db, other[3])
    assert not torch.equal(dx, other[1]) and not torch.equal(dw, other[2])


# ---- dtypes, ends of the range, errors


@EVERY_NAME
def test_a_float32_weight_is_rounded_from_float32(name):
    """And its gradient is not rounded to x's dtype."""
    dtype = torch.bfloat16 if name != "triton" or DEVICE == "cuda" else torch.float16
    usable(name, dtype=dtype)
    x, w, bias, dy = inputs(T=20, N=24, K=40)
    w = (w.detach() + 2**-12).requires_grad_()
    y, _, dw, db = products(x.to(dtype), w, bias, dy.to(dtype), name)
    assert (y.dtype, dw.dtype, db.dtype) == (dtype, torch.float32, torch.float32)
    whole = products(x.to(dtype).float(), w, bias, dy.to(dtype).float(), name)
    torch.testing.assert_close(dw, whole[2], rtol=1e-5, atol=1e-5 * float(dw.abs().max()))
    assert torch.equal(y, whole[0].to(dtype)) or DEVICE == "cuda"


@EVERY_NAME
@EVERY_RECIPE
def test_zeros_and_empty_matrices(name, recipe):
    usable(name, recipe)
    for T, N, K in ((0, 8, 16), (4, 0, 16), (4, 8, 0), (1, 1, 1)):
        x, w, bias, dy = (t.detach() * 0 for t in inputs(T, N, K))
        leaves = [t.requires_grad_() for t in (x, w, bias + 1)]
        y, *grads = products(*leaves, dy, name, recipe=recipe)
        assert torch.equal(y, torch.ones_like(dy))
        assert [g.shape for g in grads] == [t.shape for t in leaves]
        assert not any(g.any() for g in grads)


@pytest.mark.skipif(DEVICE != "cpu", reason="values are checked on a CPU")
@EVERY_NAME
@EVERY_RECIPE
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_named(name, recipe, value):
    usable(name, recipe)
    given = inputs(T=4, N=8, K=16)
    for i, what in ((0, "x"), (1, "w"), (3, "the gradient of y")):
        tensors = [t.detach().clone() for t in given]
        tensors[i][1, 2] = value
        leaves = [t.requires_grad_() for t in tensors[:3]]
        said = rf"^{what} must be finite \(in float32\), got an infinity or a NaN"
        with pytest.raises(ValueError, match=said):
            products(*leaves, tensors[3], name, recipe=recipe)


@EVERY_NAME
@EVERY_OPTIONS
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_of_unchecked_values_that_are_not_finite_no_result_is(name, options, value):
    """y, dx, dw, as in float32: a row or a column of each product."""
    usable(name, options["recipe"])
    given = inputs(T=4, N=32, K=32)
    for i in (0, 1, 3):
        tensors = [t.detach().clone() for t in given]
        tensors[i][1, 2] = value
        leaves = [t.requires_grad_() for t in tensors[:3]]
        y, dx, dw, _ = products(*leaves, tensors[3], name, check_finite=False, **options)
        rows = {0: (y[1], dw[:, 2]), 1: (y[:, 1], dx[:, 2]), 3: (dx[1], dw[2])}[i]
        assert not any(t.isfinite().any() for t in rows)
        exact = {0: dx, 1: dw, 3: y}[i]  # to which the tensor adds nothing
        assert exact.isfinite().all()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"w": torch.ones(8, 15)}, "w must have shape [N, K], where K = 16, got [8, 15]"),
        ({"bias": torch.ones(7)}, "bias must have shape [N], where N = 8, got [7]"),
        ({"w": torch.ones(8, 16).bfloat16()}, "w must be x's dtype float32 or float32, got bfl"),
        ({"bias": torch.ones(8).half()}, "bias must be w's dtype float32, got float16"),
        ({"recipe": "fp8"}, "recipe must be one of ['block_fp8', 'mxfp8', 'nvfp4'], got 'fp8'"),
        ({"recipe": "nvfp4", "seed": -1}, "seed must be an int in [0, 2**63), got -1"),
        ({"recipe": "mxfp8", "seed": 3}, "seed must be 0 with recipe 'mxfp8', which rounds to n"),
        ({"hadamard": 1}, "hadamard must be a bool, got 1"),
        ({"check_finite": None}, "check_finite must be a bool, got None"),
        (
            {"hadamard": True},
            "x must have shape [..., K] with K % 32 == 0 or not hadamard, where hadamard = True",
        ),
        (
            {"hadamard": True, "x": torch.ones(4, 64), "w": torch.ones(8, 64)},
            "w must have shape [N, K] with N % 32 == 0 or not hadamard, where hadamard = True",
        ),
        (
            {"hadamard": True, "recipe": "nvfp4", "x": torch.ones(4, 0), "w": torch.ones(0, 0)},
            "hadamard must be False with recipe 'nvfp4', which has a transform of its own of what "
            "dw sums over, got True (block_fp8 and mxfp8 take it)",
        ),
    ],
)
def test_errors_name_the_argument_its_value_and_what_is_accepted(changes, message):
    x, w, bias, _ = (t.detach().cpu() for t in inputs(4, 8, 16))
    given = {"x": x, "w": w, "bias": None if "x" in changes else bias, **changes}
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        low_precision_linear(**given)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", ["low_precision_linear", "low_precision_grouped_gemm"])
def test_a_gpu_without_scaled_products_refuses_with_a_sentence(name, recipe, monkeypatch):
    monkeypatch.setattr(platform, "no_cuda", lambda *_: None)
    monkeypatch.setattr(platform, "no_gluon", lambda *_: "another Triton")
    triton = OPS[name].implementation("triton")

    def asked(recipe, capability):
        request = Request(recipe=recipe, capability=capability)
        chosen = OPS[name].choose("cuda", torch.bfloat16, request)
        return triton.why_not("cuda", torch.bfloat16, request), chosen

    assert asked("block_fp8", 90) == asked(recipe, 100) == (None, "triton")
    sentence = f"needs compute capability 10.0 for recipe {recipe!r}, this device has 9.0"
    assert asked(recipe, 90) == (sentence, "eager")


@pytest.mark.parametrize("name", ["low_precision_linear", "low_precision_grouped_gemm"])
def test_a_call_says_which_gpu_it_is_for(name, monkeypatch):
    """A GPU of 9.0, by the public function."""
    op, on_gpu = OPS[name], torch.device("cuda")
    module = importlib.import_module(op.public.__module__)
    monkeypatch.setattr(dense, "capability", {on_gpu: 90}.__getitem__)
    stand_in, asked = SimpleNamespace(is_cuda=True, device=on_gpu), []
    request = dense.requested
    monkeypatch.setattr(module, "requested", lambda x, *options: request(stand_in, *options))
    pick = op.pick
    monkeypatch.setattr(op, "pick", lambda n, x, given: asked.append(given) or pick(n, x, given))
    case = next(c for c in op.cases if c.name.startswith("mxfp8"))
    op.public(**case.make("cpu", torch.float32, 0), implementation="eager")
    assert asked == [Request(recipe="mxfp8", capability=90)]


# ---- derivatives


@pytest.mark.parametrize("transform", [False, True])
def test_torch_func_and_forward_mode_of_the_definition(transform):
    """A tangent is that of the rounded factors, and so is a second derivative."""
    x, w, bias, dy = (t.detach() for t in inputs(8, *((32, 64) if transform else (12, 40))))
    options = {"recipe": "mxfp8", "hadamard": transform, "implementation": "eager"}

    def call(x, w):
        return low_precision_linear(x, w, bias, **options)

    leaves = [t.clone().requires_grad_() for t in (x, w)]
    expected = torch.autograd.grad(call(*leaves), leaves, dy)
    found = torch.func.vjp(call, x, w)[1](dy)
    assert all(map(torch.equal, found, expected))

    def rounded(t):
        if not transform:
            return dequantize_mxfp8(quantize_mxfp8(t))
        values = dequantize_mxfp8(quantize_mxfp8(hadamard(t, 32, seed=0)))
        return hadamard(values, 32, seed=0, inverse=True)

    def near(result, expected):
        atol = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=atol)

    _, tangent = torch.func.jvp(call, (x, w), (x.cos(), w.sin()))
    near(tangent, x.cos() @ rounded(w).mT + rounded(x) @ w.sin().mT)
    (dx,) = torch.autograd.grad(call(*leaves), leaves[0], dy, create_graph=True)
    (of_w,) = torch.autograd.grad(dx, leaves[1], x.cos())
    near(of_w, rounded(dy).mT @ x.cos())


@pytest.mark.parametrize(
    "options",
    [{"recipe": r} for r in RECIPES]
    + [{"recipe": "block_fp8", "hadamard": True, "check_finite": False}],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("name", [n for n in NAMES if n != "triton"])
def test_a_layer_that_learns_compiles_as_one_graph(name, options):
    """The smallest case, which tests of all ops take, has a frozen weight."""
    usable(name, options["recipe"])
    torch._dynamo.reset()
    given = inputs(20, *((32, 64) if "hadamard" in options else (24, 40)))

    def call(x, w, bias):
        return low_precision_linear(x, w, bias, **options, implementation=name)

    y = torch.compile(call, fullgraph=True, backend="aot_eager")(*given[:3])
    found = y, *torch.autograd.grad(y, given[:3], given[3])
    assert all(map(torch.equal, found, products(*given, name, **options)))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "eager"])
def test_a_second_derivative_is_refused(name):
    usable(name)
    x, w, bias, _ = inputs(T=4, N=8, K=16)
    y = low_precision_linear(x, w, bias, implementation=name)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="is differentiable once; use implementation='eager'"):
        torch.autograd.grad(dx.sum(), w)


# ---- training


def losses(layer, steps=40):
    """The losses of an MLP that learns another one's results."""
    torch.manual_seed(0)
    teacher = [torch.randn(n, k) * k**-0.5 for n, k in ((64, 32), (16, 64))]
    weights = [(torch.randn_like(w) * w.shape[1] ** -0.5).requires_grad_() for w in teacher]
    optimizer = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.0)
    found = []
    for step in range(steps):
        x = torch.randn(128, 32)
        target = torch.relu(x @ teacher[0].mT) @ teacher[1].mT
        hidden = torch.relu(layer(x, weights[0], 2 * step))
        loss = (layer(hidden, weights[1], 2 * step + 1) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return found


@EVERY_RECIPE
def test_a_network_learns_nearly_as_in_float32(recipe):
    exact = losses(lambda x, w, step: x @ w.mT)

    def layer(x, w, step):
        seed = {"seed": step} if recipe == "nvfp4" else {}
        return low_precision_linear(x, w, recipe=recipe, **seed)

    found = losses(layer)
    first, last, other = exact[0], sum(exact[-5:]) / 5, sum(found[-5:]) / 5
    assert last < 0.25 * first, "the task is learned"
    # FP4 also adds the noise of its own forward to the loss: 1 to 2 % of the target's variance.
    assert other < last + {"nvfp4": 0.06}.get(recipe, 0.01) * first


@pytest.mark.parametrize("name", ["low_precision_linear", "low_precision_grouped_gemm"])
def test_gradients_of_float32_weights_have_the_errors_of_fp8_tensor_cores(name):
    """On a GPU; the other tensors are bfloat16, whose own roundings are larger."""
    op = OPS[name]
    case = next(c for c in op.cases if c.name == "block_fp8 float32_weight")
    kwargs = case.make("cpu", torch.bfloat16, 0)
    found = {
        name: op.atol(
            torch.bfloat16,
            kwargs | {"x": SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)},
            f"grad {name}",
        )
        for name, t in kwargs.items()
        if isinstance(t, torch.Tensor) and t.requires_grad
    }
    wide = [n for n in found if kwargs[n].dtype == torch.float32 and n != "bias"]
    assert len(wide) == 1
    assert found == {name: 2**-9 if name in wide else None for name in found}
