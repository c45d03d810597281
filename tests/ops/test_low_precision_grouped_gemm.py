"""low_precision_grouped_gemm: each expert is a low_precision_linear of its own; what is saved, the
tail, empty experts, errors. Parity with the eager twin is in test_contract.py.
"""

import re

import pytest
import torch
from helpers import DEVICE, skip_unless_usable

from tilewright.ops import low_precision_grouped_gemm, low_precision_linear
from tilewright.ops.moe.low_precision_grouped_gemm import (
    LOW_PRECISION_GROUPED_GEMM,
    RECIPES,
    Placed,
    places,
    requested,
)

NAMES = LOW_PRECISION_GROUPED_GEMM.names()
EVERY_NAME = pytest.mark.parametrize("name", NAMES)
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)
COUNTS, N, K = (140, 0, 3, 129), 136, 150  # of several blocks, of none, and of a part of one
TAIL = 5


def usable(name, recipe="block_fp8"):
    skip_unless_usable(LOW_PRECISION_GROUPED_GEMM, name, torch.float32)
    request = requested(torch.empty(0, device=DEVICE), recipe, 0)
    if reason := LOW_PRECISION_GROUPED_GEMM.implementation(name).refuses(request):
        pytest.skip(reason)


def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def inputs(counts=COUNTS, N=N, K=K, tail=TAIL):
    """x, weight, offsets and dy. Experts have magnitudes of their own, so that a scale that two
    share is another one; the tail is NaN.
    """
    R, E = sum(counts) + tail, len(counts)
    x, dy = randn(R, K, seed=0), randn(R, N, seed=1)
    ends = torch.tensor(counts).cumsum(0).tolist()
    for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        x[begin:end] *= 30.0**e
        dy[begin:end] *= 0.07**e
    x[ends[-1] :] = dy[ends[-1] :] = float("nan")
    weight = randn(E, N, K, seed=2) * (10.0 ** torch.arange(E, device=DEVICE))[:, None, None]
    offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    return x.requires_grad_(), weight.requires_grad_(), offsets, dy


def products(x, weight, offsets, dy, name, **options):
    """y, dx and dweight."""
    y = low_precision_grouped_gemm(x, weight, offsets, implementation=name, **options)
    return y, *torch.autograd.grad(y, (x, weight), dy)


def close(found, expected):
    torch.testing.assert_close(
        found,
        expected,
        rtol=1e-5,
        atol=1e-5 * float(expected.abs().max() if expected.numel() else 0),
    )


@EVERY_NAME
@pytest.mark.parametrize("recipe", ["block_fp8", "mxfp8"])
@pytest.mark.parametrize("hadamard", [False, True])
def test_each_expert_is_a_linear_layer_of_its_own(name, recipe, hadamard):
    """No scale or transform covers rows of two experts, in any of the three products."""
    usable(name, recipe)
    x, weight, offsets, dy = inputs(COUNTS[:3], 64, 160) if hadamard else inputs()
    options = {"recipe": recipe, "hadamard": hadamard}
    y, dx, dw = products(x, weight, offsets, dy, name, **options)
    begin = 0
    for e, end in enumerate(offsets.tolist()):
        own = [t.detach().requires_grad_() for t in (x[begin:end], weight[e])]
        expected = low_precision_linear(*own, **options, implementation="eager")
        close(y[begin:end], expected)
        of_x, of_w = torch.autograd.grad(expected, own, dy[begin:end])
        close(dx[begin:end], of_x)
        close(dw[e], of_w)
        begin = end
    assert not y[begin:].any() and not dx[begin:].any() and len(y) - begin == TAIL


@pytest.mark.parametrize("options", [{"recipe": "mxfp8", "hadamard": True}, {"recipe": "nvfp4"}])
def test_further_derivatives_of_the_definition_are_a_linear_layers(options):
    """The second one, and a tangent; of a single expert, whose scales are then the layer's."""
    x, weight, offsets, dy = inputs((45,), 32, 64, tail=0)
    dy.requires_grad_()
    # nvfp4 draws numbers for places: the transposed gradient, which x's derivative has, differs.
    leaves = (dy, weight, x) if options["recipe"] == "mxfp8" else (dy, weight)
    tangents = x.detach().cos(), weight.detach().sin()
    options = {**options, "implementation": "eager"}

    def grouped(x, weight):
        return low_precision_grouped_gemm(x, weight, offsets, **options)

    def one(x, weight):
        return low_precision_linear(x, weight[0], **options)

    def derivatives(call):
        gradients = torch.autograd.grad(call(x, weight), (x, weight), dy, create_graph=True)
        yield from torch.autograd.grad(gradients, leaves, tangents)
        yield torch.func.jvp(call, (x, weight), tangents)[1]

    for result, expected in zip(derivatives(grouped), derivatives(one), strict=True):
        close(result, expected)


@EVERY_NAME
def test_nvfp4_gradients_are_those_of_linear_layers_but_for_roundings(name):
    """An expert alone would have a scale of its own."""
    usable(name, "nvfp4")
    x, weight, offsets, dy = inputs((20, 33), 48, 32, tail=0)
    plain = [(t / 30.0).detach().clamp(-3, 3).requires_grad_() for t in (x, weight)]
    found = products(*plain, offsets, dy, name, recipe="nvfp4", seed=3)
    parts = zip(plain[0].split((20, 33)), plain[1], strict=True)
    y = torch.cat([rows @ w.mT for rows, w in parts])
    for f, e in zip(found, (y, *torch.autograd.grad(y, plain, dy)), strict=True):
        assert (f - e).norm() < 0.4 * e.norm()


@EVERY_NAME
def test_a_seed_gives_the_same_bits_again_and_another_one_others(name):
    usable(name, "nvfp4")
    given = inputs((5,), 24, 32)
    first, second = (products(*given, name, recipe="nvfp4") for _ in range(2))
    assert all(map(torch.equal, first, second))
    y, dx, dw = products(*given, name, recipe="nvfp4", seed=7)
    assert torch.equal(y, first[0])
    assert not torch.equal(dx, first[1]) and not torch.equal(dw, first[2])


@EVERY_NAME
def test_offsets_of_any_strides(name):
    """A column of a table; on CUDA nothing copies them to check their values."""
    usable(name)
    x, weight, offsets, dy = inputs((3, 2), 8, 16)
    table = torch.stack((offsets, torch.zeros_like(offsets)), 1)
    found = products(x, weight, table[:, 0], dy, name)
    assert all(map(torch.equal, found, products(x, weight, offsets, dy, name)))


@EVERY_NAME
@EVERY_RECIPE
@pytest.mark.parametrize(
    "counts, N, K, tail",
    [((0, 0), 8, 16, 3), ((3, 2), 0, 16, 0), ((3, 2), 8, 0, 1), ((1,), 1, 1, 0)],
)
def test_empty_matrices_and_experts(name, recipe, counts, N, K, tail):
    usable(name, recipe)
    x, weight, offsets, dy = inputs(counts, N, K, tail)
    y, dx, dw = products(x, weight, offsets, dy, name, recipe=recipe)
    assert (y.shape, dx.shape, dw.shape) == (dy.shape, x.shape, weight.shape)
    whole = sum(counts) * N * K
    assert all(bool(t.any()) == bool(whole) for t in (y, dx, dw))


@pytest.mark.parametrize("offsets", [(0, 3, 3), (128, 128, 300), (1, 129, 257), (0, 0, 0)])
def test_every_row_has_a_place_of_its_experts_own(offsets):
    R, E = 300, len(offsets)
    ends = torch.tensor(offsets, dtype=torch.int32)
    placed = Placed.of(ends, R)
    assert len(placed.row) == places(R, E) and places(R, E) % 128 == 0
    live = placed.row[placed.row >= 0]
    assert torch.equal(live, torch.arange(R)), "the tail's too, once each and in order"
    x = torch.arange(1.0, R + 1)[:, None]
    assert torch.equal(placed.collect(placed.spread(x))[: offsets[-1]], x[: offsets[-1]])
    assert not placed.collect(placed.spread(x))[offsets[-1] :].any()
    expert = torch.searchsorted(ends, torch.arange(R, dtype=torch.int32), right=True)
    at = (placed.row >= 0).nonzero()[:, 0]
    assert torch.equal(placed.expert[at // 128], expert)


@pytest.mark.parametrize(
    "offsets, R, columns, dtype",
    [
        # Invalid ones, and clamped to the rules, are the last three.
        *(
            (offsets, 300, 7, torch.bfloat16)
            for offsets in (
                *((0, 3, 3), (128, 128, 300), (1, 129, 257), (0, 0, 0), (300,), (7, 7, 140, 141)),
                *((200, 10, 250, 20), (-7, 400, 260), (2**31 - 1, -(2**31), 5)),
            )
        ),
        *((offsets, 0, 7, torch.float32) for offsets in ((0, 0, 0), (-7, 400, 260))),
        ((7, 7, 140, 141), 300, 600, torch.float32),
    ],
)
def test_the_kernel_places_rows_as_the_definition_does(offsets, R, columns, dtype):
    """No row of the tail is read: it is NaN."""
    usable("triton")
    from tilewright.kernels.quant import low_precision_grouped_triton as kernels

    E = len(offsets)
    ends = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    expected = Placed.of(ends, R)
    x = randn(R, columns, seed=0).to(dtype)
    x[expected.place < 0] = float("nan")
    apart = torch.stack((x, x), 2)  # neither columns nor rows next to each other
    for given in (x, apart[:, :, 0], apart.flatten(1)[:, columns:]):
        placed, found = kernels.place(given, ends, places(R, E))
        torch.testing.assert_close(placed, expected.spread(given), rtol=0, atol=0)
        assert found.rows == R
        for name in ("ends", "expert", "row"):
            t = getattr(found, name)
            assert t.dtype == torch.int32 and torch.equal(t.long(), getattr(expected, name)), name


SAVED = {"block_fp8": (1 + 4 / 128, 0), "mxfp8": (1 + 1 / 32, 0), "nvfp4": (9 / 16, 4)}


@EVERY_RECIPE
@pytest.mark.parametrize("name", [n for n in NAMES if n != "eager"])
def test_saved_are_the_weight_and_the_codes_of_x(name, recipe):
    usable(name, recipe)
    x, weight, offsets, _ = inputs((100, 28), 16, 32, tail=0)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        low_precision_grouped_gemm(x, weight, offsets, recipe=recipe, implementation=name)
    each, more = SAVED[recipe]
    own = weight.nbytes + offsets.nbytes
    assert sum(t.nbytes for t in kept) - own == places(128, 2) * 32 * each + more


@pytest.mark.skipif(DEVICE != "cpu", reason="values are checked on a CPU")
@EVERY_NAME
@EVERY_RECIPE
def test_what_is_not_finite_is_named(name, recipe):
    usable(name, recipe)
    for i, what in ((0, "x"), (1, "weight"), (3, "the gradient of y")):
        given = [t.detach().clone() for t in inputs((3, 2), 8, 16, tail=1)]
        given[i][1, 2] = float("inf")
        leaves = [t.requires_grad_() for t in given[:2]]
        with pytest.raises(ValueError, match=rf"^{what} must be finite \(in float32\)"):
            products(*leaves, *given[2:], name, recipe=recipe)


@EVERY_NAME
@EVERY_RECIPE
def test_of_unchecked_values_that_are_not_finite_no_result_is(name, recipe):
    """Those of another expert and of the tail are as ever, but for nvfp4's one scale."""
    usable(name, recipe)
    for i, at, value in ((0, (1, 2), "nan"), (1, (0, 1, 2), "inf"), (3, (1, 2), "nan")):
        given = [t.detach().clone() for t in inputs((3, 2), 32, 32, tail=1)]
        given[i][at] = float(value)
        leaves = [t.requires_grad_() for t in given[:2]]
        options = {"recipe": recipe, "hadamard": recipe != "nvfp4", "check_finite": False}
        y, dx, dw = products(*leaves, *given[2:], name, **options)
        rows = {0: (y[1], dw[0, :, 2]), 1: (y[:3, 1], dx[:3, 2]), 3: (dx[1], dw[0, 2])}[i]
        assert not any(t.isfinite().any() for t in rows)
        others = {0: (y[3:], dw[1]), 1: (y[3:], dx[3:]), 3: (dx[3:], dw[1])}[i]
        if recipe != "nvfp4":
            assert all(t.isfinite().all() for t in others)
            assert not y[5:].any() and not dx[5:].any()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"offsets": torch.tensor([3, 2]).int()}, "offsets must not decrease and lie within 0"),
        ({"weight": torch.ones(2, 8, 15)}, "weight must have shape [E, N, K], where K = 16"),
        ({"recipe": "fp8"}, "recipe must be one of ['block_fp8', 'mxfp8', 'nvfp4'], got 'fp8'"),
        ({"seed": 3}, "seed must be 0 with recipe 'block_fp8', which rounds to nearest, got 3"),
        (
            {"hadamard": True},
            "x must have shape [R, K] with K % 32 == 0 or not hadamard, where ",
        ),
        (
            {"hadamard": True, "x": torch.ones(6, 32), "weight": torch.ones(2, 8, 32)},
            "weight must have shape [E, N, K] with N % 32 == 0 or not hadamard, where ",
        ),
        (
            {
                "hadamard": True,
                "recipe": "nvfp4",
                "x": torch.ones(6, 0),
                "weight": torch.ones(2, 0, 0),
            },
            "hadamard must be False with recipe 'nvfp4'",
        ),
    ],
)
def test_errors_name_the_argument_its_value_and_what_is_accepted(changes, message):
    x, weight, offsets, _ = (t.cpu() for t in inputs((3, 2), 8, 16, tail=1))
    with pytest.raises(ValueError, match=re.escape(message)):
        low_precision_grouped_gemm(**{"x": x, "weight": weight, "offsets": offsets, **changes})


def test_operators_of_compiled_code_have_right_fakes():
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(256, 8, generator=g), torch.randn(3, 4, 8, generator=g)
    ends = torch.tensor([128, 128, 256])
    rows = torch.ops.tilewright.low_precision_rows_of_experts.default
    sums = torch.ops.tilewright.low_precision_sums_of_experts.default
    torch.library.opcheck(rows, (x, w, ends))
    torch.library.opcheck(sums, (x.mT[:4], x.mT, ends))
    wanted = torch.cat((x[:128] @ w[0].mT, x[128:] @ w[2].mT))
    torch.testing.assert_close(rows(x, w, ends), wanted)
