"""AdamW that rounds stochastically: bits of a counter, the same in every implementation and of any
part of a matrix; copies in bfloat16; the clip factor.
"""

import itertools
import math

import pytest
import torch
from helpers import DEVICE, skip_unless_usable

from tilewright.ops import StochasticRounding, adamw_
from tilewright.ops.optim.adamw import ADAMW, STREAM, random_bits, rounded
from tilewright.ops.quant.quantize import philox_words

F32, BF16 = torch.float32, torch.bfloat16
IMPLEMENTATIONS = pytest.mark.parametrize("name", ADAMW.names())
FUSED = pytest.mark.parametrize("name", [n for n in ADAMW.names() if n != "eager"])


def draw(shape, dtype=F32, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * scale).to(dtype).to(DEVICE)


def kind(name):
    """The dtype of parameters: Triton's interpreter casts those in bfloat16 otherwise."""
    return F32 if name == "triton" and DEVICE == "cpu" else BF16


def given(shape, seed=0, dtype=BF16, states=BF16):
    """p, g, m and v."""
    return [
        draw(shape, dtype, 4 * seed),
        draw(shape, dtype, 4 * seed + 1, 0.1),
        draw(shape, states, 4 * seed + 2, 0.1),
        draw(shape, states, 4 * seed + 3, 0.1).abs(),
    ]


def step(tensors, places=None, *, name, seed=7, number=3, **options):
    """A step of one tensor each, in place; returns p, m, v."""
    p, g, m, v = tensors
    places = None if places is None else torch.tensor([places], device=DEVICE)
    rounding = StochasticRounding(seed, places)
    options = {"lr": 0.1, "implementation": name, "rounding": rounding, **options}
    adamw_([p], [g], [m], [v], step=number, **options)
    return p, m, v


def copies(tensors):
    return [t.clone() for t in tensors]


@FUSED
def test_every_implementation_draws_the_same_bits(name):
    """Equal to the twin but where the float32 values differ in their last bits: 1 in 10,000 at
    most, by one unit.
    """
    skip_unless_usable(ADAMW, name, kind(name))
    # Beyond a tile or a piece; a row that is odd; less than a block of bits.
    shapes = [(3, 6000), (17, 1031), (5,), ()]
    different = count = 0
    for number in (1, 2**31 - 1):
        for i, shape in enumerate(shapes):
            tensors = given(shape, i, kind(name))
            twins = copies(tensors)
            mine = step(tensors, name=name, number=number, seed=2**62 + i)
            twins = step(twins, name="eager", number=number, seed=2**62 + i)
            for a, b in list(zip(mine, twins, strict=True))[kind(name) == F32 :]:
                # By one unit of bfloat16, or where m cancels.
                torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-8)
                different, count = different + int((a != b).sum()), count + a.numel()
    assert different <= count / 10_000


@IMPLEMENTATIONS
def test_a_part_of_a_matrix_has_the_bits_of_the_whole(name):
    """By rows, by columns, merged with another matrix; aligned to blocks of bits, and not."""
    skip_unless_usable(ADAMW, name, kind(name))
    for width in (48, 45):
        whole = given((12, width), dtype=kind(name))
        parts = copies(whole)
        wanted = step(whole, name=name)
        for rows, columns in (
            (slice(0, 5), slice(0, width)),
            (slice(5, 12), slice(0, 16)),
            (slice(5, 12), slice(16, width)),
        ):
            own = [t[rows, columns].contiguous() for t in parts]
            n = columns.stop - columns.start
            place = [0, rows.start * width + columns.start, n, width]
            for a, b in zip(step(own, place, name=name), wanted, strict=True):
                assert torch.equal(a, b[rows, columns])
    # Rows of two matrices in one tensor are two tensors of a call, in any order.
    q, k = given((3, 9), 1, kind(name)), given((4, 9), 2, kind(name))
    lists = [[b, a] for a, b in zip(copies(q), copies(k), strict=True)]
    places = torch.tensor([[9, 0, 36, 36], [2**32 - 1, 0, 27, 27]], device=DEVICE)
    options = {"lr": 0.1, "implementation": name}
    adamw_(*lists, step=3, rounding=StochasticRounding(7, places), **options)
    for own, matrix, at, n in ((q, 2**32 - 1, 1, 27), (k, 9, 0, 36)):
        alone = step(own, [matrix, 0, n, n], name=name)
        for a, b in zip(alone, (lists[0][at], lists[2][at], lists[3][at]), strict=True):
            assert torch.equal(a, b)


@IMPLEMENTATIONS
def test_the_counter_is_of_seed_step_matrix_and_what_is_rounded(name):
    skip_unless_usable(ADAMW, name, kind(name))

    # The update is lost in half of the elements, and so are the decays of the moments.
    def tensors():
        kinds = kind(name), kind(name), BF16, BF16
        return [
            torch.full((4096,), x, dtype=dtype, device=DEVICE)
            for x, dtype in zip((1.0, 0.0, 0.1, 0.1), kinds, strict=True)
        ]

    def run(**changes):
        options = {"betas": (0.999, 0.999), "weight_decay": 0.0, "lr": 2e-3, **changes}
        return step(tensors(), name=name, **options)

    rounds = slice(kind(name) == F32, None)  # what is rounded
    base = run()[rounds]
    for change in ({"seed": 8}, {"number": 4}, {"places": [1, 0, 4096, 4096]}):
        for a, b in zip(run(**change)[rounds], base, strict=True):
            assert 0.05 < (a != b).double().mean() < 0.6
    up = [t == t.max() for t in base]
    for a, b in itertools.combinations(up, 2):  # independent
        both, product = (a & b).double().mean(), a.double().mean() * b.double().mean()
        assert abs(both - product) < 0.03
    for a, b in zip(run(number=torch.tensor(3.0, device=DEVICE))[rounds], base, strict=True):
        assert torch.equal(a, b)


def test_the_counter_is_as_documented():
    """Elements beyond 2^32 have other bits, too."""
    first, matrix, number = 2**36 + 5, 11, 9
    like = torch.empty(20)
    bits = random_bits(like, torch.tensor([matrix, first, 20, 20]), 5, number)
    for i in (0, 3, 19):
        block, half = divmod(first + i, 8)
        counter = (block & 0xFFFFFFFF, (block >> 32) + STREAM, matrix, number)
        words = philox_words(5, [torch.tensor(c) for c in counter])
        assert bits[i] == int(words[half // 2]) >> 16 * (half % 2) & 0xFFFF


@IMPLEMENTATIONS
def test_the_mean_over_seeds_is_the_value(name):
    """4,096 draws: within four standard errors of the value in float32."""
    skip_unless_usable(ADAMW, name, kind(name))
    n, draws = 16, 4096
    values = torch.linspace(1.0, 1.0 + 2**-7, n + 1, device=DEVICE)[:n].double()
    # m is replaced by g, which is in float32.
    g = values.float().repeat(draws)
    p, m, v = (torch.ones(n * draws, dtype=BF16, device=DEVICE) for _ in range(3))
    adamw_(
        *([t] for t in (p, g, m, v)),
        step=1,
        lr=0.0,
        betas=(0.0, 0.9),
        rounding=StochasticRounding(3),
        implementation=name,
    )
    mean = m.view(draws, n).double().mean(0)
    share = (values - 1) * 2**7
    error = (share * (1 - share) / draws).sqrt() * 2**-7
    assert ((mean - values).abs() <= 4 * error + 2.0**-23).all()
    assert mean[0] == 1  # exact values stay


@pytest.mark.packages
def test_torchaos_rounding_has_the_same_mean_and_the_same_neighbors():
    """4,096 draws each, of the same values."""
    other = pytest.importorskip("torchao.optim.quant_utils")._fp32_to_bf16_sr
    values = draw((64,), scale=3.0)
    many = values.repeat(4096)
    n = many.numel()
    ours = rounded(many, random_bits(many, torch.tensor([0, 0, n, n], device=DEVICE), 5, 1))
    torch.manual_seed(0)
    theirs = other(many).float()
    unit = 2.0 ** (torch.frexp(values).exponent - 8)
    for found in (ours, theirs):
        mean = found.view(4096, 64).double().mean(0)
        assert ((mean - values).abs() <= 4.5 * unit / 2 / 4096**0.5).all()
    both = [t.view(4096, 64) for t in (ours, theirs)]
    for least_or_most in (torch.amin, torch.amax):
        assert torch.equal(*(least_or_most(t, 0) for t in both))


def test_rounding_of_every_kind_of_number():
    big, tiny = torch.finfo(BF16).max, torch.finfo(F32).smallest_normal
    inf, nan = math.inf, math.nan
    x = torch.tensor([0.0, -0.0, inf, -inf, big, -big, tiny / 4, -1.5, nan])
    for random in (0, 1, 2**15, 2**16 - 1):
        out = rounded(x, torch.full(x.shape, random))
        assert torch.equal(out[:8], x[:8]) and out[8].isnan()
        assert torch.equal(out.signbit(), x.signbit())
    # Above the largest of bfloat16; NaN whose payload is in the bits that are cut.
    above = torch.tensor([0x7F7FFFFF, 0x7F800001, -0x7FFFFF], dtype=torch.int32).view(F32)
    out = rounded(above, torch.full((3,), 2**16 - 1))
    assert out[0] == big and out[1].isnan() and out[2].isnan()
    small = torch.tensor([1, 2**16 - 1], dtype=torch.int32).view(F32)  # subnormal
    for random, wanted in ((0, [0, 0]), (1, [0, 1]), (2**16 - 1, [1, 1])):
        bits = rounded(small, torch.full((2,), random)).view(torch.int32) >> 16
        assert bits.tolist() == wanted


@FUSED
def test_numbers_of_every_kind_are_the_twins(name):
    skip_unless_usable(ADAMW, name, kind(name))
    big = torch.finfo(BF16).max
    values = torch.tensor([0.0, -0.0, math.inf, -math.inf, big, -big, math.nan, 1e-40] * 3)
    grads = values.roll(4) * 2  # as float32 the moments are beyond the largest of bfloat16
    for seed in range(3):
        tensors = [values.to(kind(name)), grads, values.to(BF16), values.to(BF16).abs()]
        tensors = [t.to(DEVICE) for t in tensors]
        options = {"seed": seed, "lr": 1e-3, "betas": (0.5, 0.5)}
        twins = step(copies(tensors), name="eager", **options)
        for a, b in zip(step(tensors, name=name, **options), twins, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@IMPLEMENTATIONS
def test_a_second_moment_that_decays_slowly_is_not_kept_for_ever(name):
    """At 0.999 it falls by less than half a unit in a step."""
    skip_unless_usable(ADAMW, name, kind(name))
    sums = {}
    for rounding in (None, StochasticRounding(1)):
        p, g, m = (torch.zeros(512, dtype=BF16, device=DEVICE) for _ in range(3))
        v = torch.full_like(p, 1.0)
        for number in range(1, 101):
            adamw_(
                *([t] for t in (p, g, m, v)),
                step=number,
                lr=0.0,
                rounding=rounding,
                implementation=name,
            )
        sums[rounding is None] = float(v.double().mean())
    assert name == "triton" or sums[True] == 1.0  # the interpreter truncates
    assert abs(sums[False] - 0.999**100) < 0.003


@IMPLEMENTATIONS
@pytest.mark.parametrize("random", [False, True])
def test_copies_are_the_parameters_rounded(name, random):
    skip_unless_usable(ADAMW, name, F32)
    tensors = given((9, 700), dtype=F32, states=F32)
    plain = copies(tensors)
    rounding = StochasticRounding(7) if random else None
    p, g, m, v = ([t] for t in tensors)
    w = [torch.zeros(9, 700, dtype=BF16, device=DEVICE)]
    out = adamw_(p, g, m, v, copies=w, step=2, lr=0.1, rounding=rounding, implementation=name)
    assert [len(out), out[-1] is w or out[-1][0] is w[0]] == [4, True]
    adamw_(*([t] for t in plain), step=2, lr=0.1, implementation=name)
    assert torch.equal(p[0], plain[0]) and torch.equal(m[0], plain[2])  # not rounded
    if random:
        n = w[0].numel()
        place = torch.tensor([0, 0, n, n], device=DEVICE)
        bits = random_bits(w[0], place, 7, 2)
        assert torch.equal(w[0], rounded(p[0], bits).to(BF16))
    elif not (name == "triton" and DEVICE == "cpu"):  # the interpreter truncates
        assert torch.equal(w[0], p[0].to(BF16))


@IMPLEMENTATIONS
def test_gradients_are_multiplied_by_the_clip_factor(name):
    skip_unless_usable(ADAMW, name, F32)
    factor = torch.tensor(0.25, device=DEVICE)  # exact
    results = []
    for clip in (factor, None):
        p, g, m, v = given((7, 300), dtype=F32, states=F32)
        g = g if clip is not None else g * factor
        adamw_([p], [g], [m], [v], step=2, lr=0.1, clip_factor=clip, implementation=name)
        results.append((p, m, v))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        (
            {"rounding": StochasticRounding(1), "compensations": [ONES]},
            ValueError,
            "compensations must be None with rounding",
        ),
        ({"rounding": StochasticRounding(-1)}, ValueError, r"rounding.seed must be an int from 0"),
        ({"rounding": 7}, TypeError, "rounding must be a StochasticRounding"),
        (
            {"rounding": StochasticRounding(1, torch.zeros(2, 4, dtype=torch.int64))},
            ValueError,
            r"rounding.places must be int64 \[1, 4\], a row for each of params, got .*\[2, 4\]",
        ),
        (
            {"rounding": StochasticRounding(1, torch.zeros(1, 4))},
            ValueError,
            r"rounding.places must be int64 .*, got torch.float32",
        ),
        ({"copies": []}, ValueError, "copies must have as many tensors as params, 1, got 0"),
        (
            {"copies": [ONES]},
            TypeError,
            "copies must be those in bfloat16 of params in float32, got torch.float32 of torch.float32",
        ),
        ({"clip_factor": 0.5}, TypeError, "clip_factor must be a torch.Tensor or None, got float"),
        ({"clip_factor": torch.ones(2)}, ValueError, r"clip_factor must have shape \[\]"),
    ],
)
def test_bad_input(changes, error, sentence):
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    lists = {n: [torch.ones(2, 3)] for n in names} | {"step": 1, "lr": 0.1} | changes
    with pytest.raises(error, match=sentence):
        adamw_(**lists)
