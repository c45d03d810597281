"""Adaptive quantization noise: the bits, the distribution, addition to weights, forward and
backward, compiled code, the schedule. Parity of every implementation is in test_contract.py.
"""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from helpers import DEVICE, skip_unless_usable, with_dtypes
from torch.utils.checkpoint import checkpoint

from tilewright.kernels.quant.operators import Noise
from tilewright.ops import (
    AQN,
    add_rmsnorm,
    aqn_noise,
    aqn_schedule,
    dequantize_nf4,
    quantize_block_fp8,
    quantize_mxfp8,
    quantize_nf4,
    quantize_nvfp4,
    rmsnorm,
)
from tilewright.ops.norm.rmsnorm import ADD_RMSNORM, RMSNORM
from tilewright.ops.quant import aqn, block_fp8, mxfp8, nf4, nf4_format, nvfp4, quantize

NOISE = AQN(0.5, seed=2**40 + 7, step=12, layer=3)
EVERY = pytest.mark.parametrize("name", ["triton", "cpp", "eager"])
# Elements for statistics; Triton's interpreter computes some thousands per second.
MANY = {"eager": 2**18, "cpp": 2**18, "triton": 2**14 if DEVICE == "cpu" else 2**18}


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def implementation(name, dtype=torch.float32):
    """The callable (like, first, n, noise, dtype) -> elements first to first
    + n - 1.
    """
    skip_unless_usable(aqn.AQN_NOISE, name, dtype)
    return aqn.AQN_NOISE.resolve(name, DEVICE, dtype)


def draw(name, n, first=0, noise=NOISE):
    return implementation(name)(
        torch.empty(0, device=DEVICE), first, n, aqn.arguments(noise), torch.float32
    )


# ---- bits


def signed(word):
    """A 64-bit counter as a signed integer, for torch."""
    return word - 2**64 if word >= 2**63 else word


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_words_of_random123(counter, key, expected):
    """Random123's kat_vectors, philox4x32 10."""
    found = quantize.philox(
        key[0] | key[1] << 32, 4, "cpu", counter[2:], signed(counter[0] | counter[1] << 32)
    )
    assert tuple(found.tolist()) == expected


def numpys(seed, words, first, blocks):
    """Philox4x32-10 in unsigned integers, by the paper; and the normal values, by the
    definition.
    """
    mask = np.uint64(0xFFFFFFFF)
    block = np.arange(blocks, dtype=np.uint64) + np.uint64(first)
    c = [block & mask, block >> np.uint64(32), *(np.full(blocks, w, np.uint64) for w in words)]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p, q = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            q >> np.uint64(32) ^ c[1] ^ np.uint64(k[0]),
            q & mask,
            p >> np.uint64(32) ^ c[3] ^ np.uint64(k[1]),
            p & mask,
        ]
        k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
    u = [((w >> np.uint64(8)).astype(np.float64) + 0.5) / 2**24 for w in c]
    r, s = (np.sqrt(-2 * np.log(u[i])) for i in (0, 2))
    pairs = (
        r * np.cos(2 * np.pi * u[1]),
        r * np.sin(2 * np.pi * u[1]),
        s * np.cos(2 * np.pi * u[3]),
        s * np.sin(2 * np.pi * u[3]),
    )
    return np.stack(c, 1), torch.from_numpy(np.stack(pairs, 1).reshape(-1)).to(DEVICE)


@EVERY
@pytest.mark.parametrize(
    "noise", [NOISE, AQN(1, 2**63 - 1, 2**31 - 1, 2**32 - 1), AQN(1, 0)], ids=["a", "last", "0"]
)
def test_values_are_those_of_the_definition(name, noise):
    """Equal to float32's precision, so every visible bit of every u is right: another bit would
    change the value.
    """
    _, expected = numpys(noise.seed, (noise.layer, 2**31 + noise.step), 0, 64)
    torch.testing.assert_close(
        draw(name, 253, noise=noise).double(), expected[:253], rtol=5e-7, atol=5e-7
    )


@EVERY
@pytest.mark.parametrize("first", [1, 2**33 - 6, 2**34 - 5, 2**34, 2**40 + 3])
def test_elements_far_on(name, first):
    """Beyond 32 bits of the element's index and of the counter, which has a word for it."""
    _, expected = numpys(NOISE.seed, (NOISE.layer, 2**31 + NOISE.step), first // 4, 16)
    torch.testing.assert_close(
        draw(name, 48, first).double(), expected[first % 4 :][:48], rtol=5e-7, atol=5e-7
    )


@EVERY
def test_an_element_does_not_depend_on_where_a_call_begins(name):
    whole = draw(name, 3000)
    for first, n in ((0, 1), (1, 2), (3, 500), (1024, 1024), (1021, 1979)):
        assert torch.equal(draw(name, n, first), whole[first : first + n])


def test_noise_is_not_made_of_the_words_of_random_rounding():
    """Stochastic rounding has zeros in the counter's upper words, noise its highest bit: also in
    step 0 of layer 0.
    """
    words, same = numpys(5, (0, 0), 0, 1000)
    assert quantize.philox(5, 4000, "cpu").tolist() == words.reshape(-1).tolist()
    assert correlated(draw("eager", 4000, noise=AQN(1, 5)).double(), same) < 4


def test_the_largest_and_smallest_u(monkeypatch):
    """As in one block of 2^24: near 0 and 1, where float32 has no room for the half, nothing is
    lost. The twin is tested, since words cannot be put into a kernel.
    """
    words = torch.tensor([[0, 0, 2**32 - 1, 2**31], [2**32 - 1, 2**32 - 1, 255, 2**30]])
    monkeypatch.setattr(quantize, "philox", lambda *a, **k: words)
    found = aqn._noise_eager(torch.empty(0), 0, 8, aqn.NONE, torch.float64)
    top, near = math.sqrt(-2 * math.log(2.0**-25)), math.sqrt(-2 * math.log1p(-(2.0**-25)))
    assert found.abs().max() == pytest.approx(top, rel=1e-12) and top < 5.89
    expected = [top, 0, -near, 0, near, 0, 0, top]
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=2e-6
    )
    assert found[2].item() == pytest.approx(-near, rel=1e-9)


@pytest.mark.parametrize("name", ["triton", "cpp"])
def test_errors_are_some_units_in_the_last_place(name):
    """Units of float32, also in the tails."""
    n = MANY[name]
    truth = implementation("eager", torch.float64)(
        torch.empty(0, device=DEVICE), 0, n, Noise(1.0, 9, 1, 2), torch.float64
    )
    wrong = (draw(name, n, noise=AQN(1, 9, 1, 2)).double() - truth).abs()
    assert (wrong <= 3 * 2.0**-23 * truth.abs().clamp_min(1)).all()
    tails = truth.abs() > 3
    assert (wrong[tails] <= 3 * 2.0**-23 * truth.abs()[tails]).all()


@with_dtypes(aqn.AQN_NOISE, dtypes=(torch.bfloat16, torch.float16))
def test_other_dtypes_are_rounded_once(name, dtype):
    skip_unless_usable(aqn.AQN_NOISE, name, dtype)
    found = aqn_noise((7, 41), NOISE, device=DEVICE, dtype=dtype, implementation=name)
    expected = aqn_noise((7, 41), NOISE, device=DEVICE, implementation=name).to(dtype)
    # The twin rounds its float64 result; float32 may fall on the other side of a tie.
    assert found.dtype == dtype and (found == expected).double().mean() > 0.99


# ---- the distribution of the twin, whose values the others have; fixed seeds make these tests
# deterministic


@functools.cache
def sample():
    return draw("eager", MANY["eager"]).double()


def test_moments_are_those_of_a_normal_distribution():
    """Each within four of its standard deviations."""
    x = sample()
    n = x.numel()
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs(x.pow(power).mean() - mean) < 4 * math.sqrt(variance / n), power


def test_the_shares_beyond_bounds_are_those_of_a_normal_distribution():
    """Including tails; and Kolmogorov's distance, whose 0.1 % point is 1.95 / sqrt(n)."""
    x = sample()
    n = x.numel()
    for bound in (-3, -2, -1, -0.1, 0, 0.5, 1, 2, 3, 3.5):
        p = 0.5 * math.erfc(bound / math.sqrt(2))
        assert abs((x > bound).double().mean() - p) < 4 * math.sqrt(p * (1 - p) / n), bound
    order = torch.special.ndtr(x.sort().values)
    at = torch.arange(n, device=x.device, dtype=torch.float64)
    distance = max((order - at / n).abs().max(), ((at + 1) / n - order).abs().max())
    assert distance < 1.95 / math.sqrt(n)


def correlated(a, b):
    """Correlation of two samples, and of their squares, in standard deviations."""
    n = a.numel()
    squares = (a.square() - 1) * (b.square() - 1) / 2
    return max(abs(float((a * b).mean())), abs(float(squares.mean()))) * math.sqrt(n)


def test_elements_are_independent():
    """Neighbors, the two of a pair, blocks, rows of a power of two."""
    x = sample()
    for lag in (1, 2, 3, 4, 5, 8, 64, 1024, 4096):
        assert correlated(x[:-lag], x[lag:]) < 4, lag
    assert correlated(x[::2], x[1::2]) < 4


@pytest.mark.parametrize(
    "other",
    [
        {"layer": 4},
        {"layer": 3 + 2**31},
        {"step": 13},
        {"step": 12 + 2**30},
        {"seed": NOISE.seed + 1},
        {"seed": NOISE.seed + 2**32},
        {"layer": 12, "step": 3},
    ],
    ids=str,
)
def test_layers_steps_and_seeds_are_independent(other):
    n = 2**14
    a, b = sample()[:n], draw("eager", n, noise=dataclasses.replace(NOISE, **other)).double()
    assert correlated(a, b) < 4


# ---- on quantized weights

FORMATS = {
    "nf4": (nf4.DEQUANTIZE_NF4, quantize_nf4, {}),
    "nf4_nested": (nf4.DEQUANTIZE_NF4, quantize_nf4, {"double_quant": True}),
    "nf4_wide": (nf4.DEQUANTIZE_NF4, quantize_nf4, {"block_size": 256}),
    "nvfp4": (nvfp4.DEQUANTIZE_NVFP4, quantize_nvfp4, {}),
    "block_fp8": (block_fp8.DEQUANTIZE_BLOCK_FP8, quantize_block_fp8, {"block": (16, 16)}),
    "block_fp8_odd": (block_fp8.DEQUANTIZE_BLOCK_FP8, quantize_block_fp8, {"block": (3, 7)}),
    "mxfp8": (mxfp8.DEQUANTIZE_MXFP8, quantize_mxfp8, {}),
}
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)


def quantized(format, x):
    """The op that dequantizes, and what it takes."""
    op, up, options = FORMATS[format]
    return op, up(x, **options)


def steps(format, q):
    """The local quantization step of each element, from the stored scales."""
    if format.startswith("nf4"):
        scale, n = q.absmax, q.absmax.numel()
        if q.offset is not None:
            wide = q.nested_absmax.repeat_interleave(256)[:n]
            scale = nf4_format.dynamic_map().to(DEVICE)[q.absmax.long()] * wide + q.offset
        each = (0.5 * 0.0795803 * scale).repeat_interleave(q.block_size)
        return each[: math.prod(q.shape)].view(q.shape)
    columns = q.shape[-1]
    if format == "nvfp4":
        step = 0.5 * q.scale.float() * q.global_scale
        return step.repeat_interleave(16, -1)[..., :columns]
    if format == "mxfp8":
        return (0.125 * q.scale.float()).repeat_interleave(32, -1)[..., :columns]
    step = (0.125 * q.scale_inv).repeat_interleave(q.block[0], -2)
    return step.repeat_interleave(q.block[1], -1)[..., : q.shape[-2], :columns]


@EVERY
@EVERY_FORMAT
@pytest.mark.parametrize("shape", [(5, 37), (3, 7, 72), (2, 1100)], ids=str)
def test_what_is_added_is_alpha_times_noise_times_the_step(name, format, shape):
    op, q = quantized(format, randn(*shape))
    skip_unless_usable(op, name, torch.float32)
    plain, noisy = (op.public(q, noise=n, implementation=name) for n in (None, NOISE))
    unit = NOISE.alpha * steps(format, q)
    n = aqn_noise(shape, NOISE, device=DEVICE, implementation="eager")
    # The sum's rounding shows in the difference as one unit of the larger term.
    room = 4 * 2.0**-24 * (plain.abs() + noisy.abs()) / unit + 1e-6 * n.abs() + 1e-6
    assert (((noisy - plain) / unit - n).abs() <= room).all()


@EVERY
@EVERY_FORMAT
def test_no_noise_is_no_noise_bit_for_bit(name, format):
    x = randn(4, 70)
    x[1, 3:9] = -0.0  # a noise of 0 could turn it into 0
    op, q = quantized(format, x)
    skip_unless_usable(op, name, torch.float32)
    expected = op.public(q, implementation="eager")
    for noise in (None, AQN(0, 5, 6, 7), AQN(0.0, 5)):
        found = op.public(q, noise=noise, implementation=name)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert not torch.equal(op.public(q, noise=NOISE, implementation=name), expected)


@pytest.mark.parametrize("name", ["triton", "cpp"])
def test_weights_with_noise_are_rounded_once(name):
    """To bf16 or fp16, from the float32 sum."""
    dtype = torch.float16 if name == "triton" else torch.bfloat16
    for format in FORMATS:
        op, q = quantized(format, randn(6, 80))
        skip_unless_usable(op, name, dtype)
        found, exact = (
            op.public(q, noise=NOISE, dtype=d, implementation=name) for d in (dtype, torch.float32)
        )
        assert torch.equal(found, exact.to(dtype))


def test_experts_have_noise_of_their_own():
    q = quantize_nf4(torch.ones(2, 8, 64, device=DEVICE))
    delta = dequantize_nf4(q, noise=NOISE) - 1
    assert not torch.equal(delta[0], delta[1]) and not torch.equal(delta[:, 0], delta[:, 1])


# ---- on the weight of a norm

NORMS = [
    pytest.param(op, name, id=f"{op.name}-{name}")
    for op in (RMSNORM, ADD_RMSNORM)
    for name in ("triton", "cpp", "torch", "eager")
    if name in op.names()
]


@pytest.mark.parametrize("op, name", NORMS)
@pytest.mark.parametrize(
    "shape, weight_shape",
    [((6, 52), (52,)), ((5, 3, 33), (3, 33)), ((40, 130), (130,)), ((2, 16500), (16500,))],
    ids=str,
)
def test_a_norm_with_noise_is_a_norm_with_another_weight(op, name, shape, weight_shape):
    """Values and gradients; weights are unchanged; also with more rows than programs."""
    add = op is ADD_RMSNORM
    skip_unless_usable(op, name, torch.float32)
    if name == "triton" and DEVICE == "cpu" and shape[-1] > 1000:
        pytest.skip("slow in the interpreter; the contract has a case, noise_wide")
    inputs = [randn(*shape, seed=i).requires_grad_() for i in range(1 + add)]
    w, b = (randn(*s, seed=5).requires_grad_() for s in (weight_shape, shape[-1:]))
    kept = w.detach().clone()
    b = None if name == "torch" else b

    def run(weight, **options):
        fn = add_rmsnorm if add else rmsnorm
        y = fn(*inputs, weight, bias=b, offset=0.25, cast="gemma", **options)
        outs = y if add else (y,)
        wrt = [*inputs, weight, *([] if b is None else [b])]
        return [*outs, *torch.autograd.grad(outs, wrt, [randn(*shape, seed=7)] * len(outs))]

    found = run(w, noise=NOISE, implementation=name)
    other = (kept + NOISE.alpha * aqn_noise(weight_shape, NOISE, device=DEVICE)).requires_grad_()
    for f, e in zip(found, run(other, implementation="eager"), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-5, atol=2e-5)
    assert torch.equal(w, kept)
    plain = run(w, implementation=name)
    assert all(map(torch.equal, run(w, noise=AQN(0, 3), implementation=name), plain))
    assert not torch.equal(plain[0], found[0])


@pytest.mark.parametrize("name", ["triton", "cpp", "eager"])
def test_forward_and_backward_multiply_by_the_same_bits(name):
    """With rows of +-1, rstd is 1, y is the weight itself, and dx shows it again: for y = x w and a
    gradient in one column, dx there is w (1 - 1 / D), the same operations on the same bits.
    """
    skip_unless_usable(RMSNORM, name, torch.float32)
    D = 64
    x = torch.ones(D, D, device=DEVICE, requires_grad=True)
    w = randn(D).requires_grad_()
    y = rmsnorm(x, w, 0.0, noise=NOISE, implementation=name)
    (dx,) = torch.autograd.grad(y, x, torch.eye(D, device=DEVICE))
    # In the columns without a gradient dx is -w_i / D, an exact division by a power of two.
    for i in range(D):
        assert torch.equal(-dx[i, (i + 1) % D] * D, y[0, i]), i


@pytest.mark.parametrize("name", ["triton", "cpp"])
def test_a_noisy_weight_is_saved_once_and_in_float32(name):
    """The backward reads the forward's own weight; 16 bits would round the noise away."""
    skip_unless_usable(RMSNORM, name, torch.float32)
    saved = []

    def count(noise):
        saved.clear()
        x, w = randn(4, 8).requires_grad_(), randn(8, dtype=torch.bfloat16).requires_grad_()
        known = {x.data_ptr(): "x", w.data_ptr(): "weight"}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(known.get(t.data_ptr(), (t.dtype, tuple(t.shape)))) or t,
            lambda t: t,
        ):
            y = rmsnorm(x, w, noise=noise, implementation=name)
        assert torch.autograd.grad(y, w, torch.ones_like(y))[0].dtype == torch.bfloat16
        return list(saved)

    wide = torch.float32
    assert count(None) == ["x", (wide, (4,)), "weight"]
    assert count(NOISE) == ["x", (wide, (4,)), (wide, (8,))]


@pytest.mark.parametrize("op, name", [cell for cell in NORMS if cell.values[1] != "triton"])
def test_noise_on_a_16_bit_weight_is_that_on_the_same_weight_in_float32(op, name):
    add = op is ADD_RMSNORM
    skip_unless_usable(op, name, torch.bfloat16)
    x, w, b = (randn(*s, dtype=torch.bfloat16) for s in ((6, 52), (52,), (52,)))

    def run(w, b):
        y = op.public(*([x] * (1 + add)), w, bias=b, offset=1.0, noise=NOISE, implementation=name)
        return y[0] if add else y

    assert torch.equal(run(w, b), run(w.float(), b.float()))


# ---- checkpointing and compiled code


def layer(x, w, q, noise, name):
    """A norm and a product with a quantized weight, as in a block."""
    h = rmsnorm(x, w, noise=noise, implementation=name)
    noise = dataclasses.replace(noise, layer=noise.layer + 1)
    return h @ dequantize_nf4(q, noise=noise, implementation=name).T


class Graphs:
    """A backend that counts graphs and runs them split into forward and backward."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, example_inputs):
        from torch._dynamo.backends.debugging import aot_eager

        self.count += 1
        return aot_eager(graph, example_inputs)


@pytest.mark.parametrize(
    "name, made",
    [
        *(("eager", made) for made in ("inside", "outside")),
        ("cpp", "inside"),
        ("triton", "outside"),
    ],
)
def test_steps_and_layers_do_not_recompile(name, made):
    """One graph for the first step and one for all others; equal bits."""
    skip_unless_usable(RMSNORM, name, torch.float32)
    x, w = randn(5, 64).requires_grad_(), randn(64).requires_grad_()
    q = quantize_nf4(randn(8, 64))

    def by_number(x, w, step):
        return layer(x, w, q, AQN(0.5, 77, step, 3), name)

    def by_noise(x, w, noise):
        return layer(x, w, q, noise, name)

    torch._dynamo.reset()
    graphs = Graphs()
    fn = by_number if made == "inside" else by_noise
    compiled = torch.compile(fn, fullgraph=True, backend=graphs)
    g = randn(5, 8, seed=3)
    for step in (5, 6, 16, 1, 0, 2**31 - 1):
        noise = AQN(0.5, 77, step, 3)
        y, expected = compiled(x, w, step if made == "inside" else noise), by_noise(x, w, noise)
        assert torch.equal(y, expected)
        grads = (torch.autograd.grad(t, (x, w), g) for t in (y, expected))
        assert all(map(torch.equal, *grads)), step
    assert graphs.count <= 2, "a step of 0 or 1 may not have a graph of its own either"


@EVERY
def test_other_numbers_in_compiled_code(name):
    """seed and layer become symbols when they first change. A fused operator's alpha, and the
    absence of noise, are constants of its graph.
    """
    skip_unless_usable(RMSNORM, name, torch.float32)
    x, w = randn(5, 64), randn(64)
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(
        lambda x, w, noise: rmsnorm(x, w, noise=noise, implementation=name),
        fullgraph=True,
        backend=graphs,
    )
    for noise, new in (
        (AQN(0.0, 1, 0), True),
        (AQN(0.5, 1, 1), True),
        (AQN(0.5, 1, 2), True),
        (AQN(0.5, 2, 3), True),
        (AQN(0.5, 2**40, 4, 9), True),
        (AQN(0.5, 5, 5, 2**32 - 1), False),
        (AQN(0.5, 3, 0, 1), False),
        (AQN(0.3, 6, 6, 6), True),
        (AQN(0.3, 7, 7, 7), False),
        (AQN(0.5, 8, 9, 7), False),
        (AQN(0.0, 8, 8, 8), False),
    ):
        before = graphs.count
        assert torch.equal(
            compiled(x, w, noise), rmsnorm(x, w, noise=noise, implementation=name)
        ), noise
        assert new or graphs.count == before, noise


@pytest.mark.parametrize("name", ["cpp", "eager"])
def test_inductor_recomputes_the_same_noise(name):
    """The twin's noise is an operator: fused with other arithmetic it could differ in backward. The
    test checks that it stays one in both graphs, since a compiler's result might differ in the last
    bits only.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    skip_unless_usable(RMSNORM, name, torch.float32)
    x, w = randn(5, 64).requires_grad_(), randn(64).requires_grad_()
    g = randn(5, 64, seed=3)
    graphs = []

    def keep(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    def twice(x, w, step):
        return checkpoint(
            lambda x: rmsnorm(x, w, noise=AQN(0.5, 1, step), implementation=name) * 2,
            x,
            use_reentrant=False,
        )

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    torch.compile(twice, fullgraph=True, backend=backend)(x, w, 3).backward(g)
    operator = f"tilewright.aqn_{name}_noise.default"
    assert len(graphs) == 2 and all(operator in graph for graph in graphs)
    torch._dynamo.reset()
    compiled = torch.compile(twice, fullgraph=True)
    for step in (3, 4):
        grads = (torch.autograd.grad(fn(x, w, step), (x, w), g) for fn in (compiled, twice))
        torch.testing.assert_close(*grads)


# ---- the schedule


def test_the_schedule_has_a_quiet_stage_and_then_equal_factors():
    found = [aqn_schedule(step, 100, start=1e-2, end=1e-4, stages=4) for step in range(100)]
    stages = sorted(set(found), key=found.index)
    assert [found.count(s) for s in stages] == [25] * 4
    assert stages == [0.0, 1e-2, pytest.approx(1e-3), pytest.approx(1e-4)]
    # As published: ten stages, nine of them with noise.
    ten = sorted(
        {aqn_schedule(step, 1000, start=5e-2, end=5e-4, stages=10) for step in range(1000)},
        reverse=True,
    )
    assert ten == [*(pytest.approx(5e-2 * 100 ** (-i / 8)) for i in range(9)), 0.0]


@pytest.mark.parametrize(
    "step, total, stages, expected",
    [
        (0, 10, 2, 0.0),
        (4, 10, 2, 0.0),
        (5, 10, 2, 0.5),
        (9, 10, 2, 0.5),
        (1000, 10, 2, 0.5),
        (0, 1, 5, 0.0),
        (1, 1, 5, 0.125),
        (99, 10, 5, 0.125),
        (3, 10, 3, 0.0),
        (4, 10, 3, 0.5),
        (7, 10, 3, 0.125),
    ],
)
def test_the_schedule_at_its_ends(step, total, stages, expected):
    assert aqn_schedule(step, total, start=0.5, end=0.125, stages=stages) == pytest.approx(expected)


# ---- refusals

schedule = functools.partial(aqn_schedule, start=1, end=0.1, stages=3)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: AQN(-1.0, 0), r"alpha must be a number in \[0, inf\) in float32, got -1.0"),
        (lambda: AQN(1.0, 2**63), r"seed must be an int in \[0, 2\*\*63\), got 92233720368547"),
        (lambda: AQN(1.0, 0, 2**31), r"step must be an int in \[0, 2\*\*31\), got 2147483648"),
        (lambda: AQN(1.0, 0, 0, 2**32), r"layer must be an int in \[0, 2\*\*32\), got 42949"),
        (lambda: AQN(1.0, 0.5), "seed must be an int, got 0.5"),
        (lambda: aqn_noise((3, -1), NOISE), r"size must not be negative, got \(3, -1\)"),
        (lambda: aqn_noise((3, 1.5), NOISE), "size must be an int or a sequence of ints"),
        (lambda: schedule(-1, 10), r"step must be an int in \[0, inf\), got -1"),
        (lambda: schedule(1, 0), r"total_steps must be an int in \[1, inf\), got 0"),
        (lambda: schedule(1, 10, stages=1), r"stages must be an int in \[2, inf\), got 1"),
        (lambda: schedule(1, 10, start=0), r"start must be a number in \(0, inf\) in float32"),
        (lambda: schedule(1, 10, end="1"), "end must be a number, got '1'"),
    ],
)
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_the_cpp_operator_itself_checks_its_numbers():
    run = implementation("cpp")
    said = r"seed must be >= 0, step 0 to 2\^31 - 1 and layer 0 to 2\^32 - 1"
    for bad in ((-1, 0, 0), (0, -1, 0), (0, 2**31, 0), (0, 0, 2**32)):
        with pytest.raises(RuntimeError, match=said):
            run(torch.empty(0), 0, 4, Noise(1.0, *bad), torch.float32)
