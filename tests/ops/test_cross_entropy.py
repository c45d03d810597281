"""Tests specific to cross_entropy; parity with the eager twin is in test_contract.py."""

import dataclasses
import functools
import importlib
import math
import operator
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DEVICE,
    as_on_a_gpu,
    join_group,
    launches,
    skip_unless_usable,
    threads,
    two_processes,
)

from tilewright.bench import contract
from tilewright.core.registry import ImplementationUnavailable, short
from tilewright.kernels.loss.operators import (
    LossInputs,
    LossOutputs,
    Scaling,
    Stats,
    StatsGradients,
    Wanted,
)
from tilewright.ops import GSPO, OPS, checked_targets, cross_entropy
from tilewright.ops.loss import softmax_stats, targets
from tilewright.ops.loss.cross_entropy import CROSS_ENTROPY, Request

# In `tilewright.ops` the name is the function.
module = importlib.import_module("tilewright.ops.loss.cross_entropy")

FUSED = ("triton", "cpp")
ALL = CROSS_ENTROPY.names()
EVERYTHING = {
    "label_smoothing": 0.1,
    "z_loss": 1e-2,
    "softcap": 5.0,
    "reduction": "none",
    "return_lse": True,
    "return_entropy": True,
    "return_argmax": True,
}


def problem(T=9, V=37, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(T, V, generator=g, dtype=torch.float64)
    y = torch.randint(V, (T,), generator=g)
    y[1::3] = -100
    return x.to(DEVICE, dtype).requires_grad_(), y.to(DEVICE)


def fused(name):
    skip_unless_usable(CROSS_ENTROPY, name, torch.float32)
    return softmax_stats.kernels(name)


# ---- against independent definitions, in float64


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_torch_in_float64(reduction, smoothing, weighted):
    x, y = problem(dtype=torch.float64)
    w = torch.rand(37, dtype=torch.float64, device=DEVICE) if weighted else None
    expected = F.cross_entropy(x, y, w, label_smoothing=smoothing, reduction=reduction)
    loss = cross_entropy(
        x, y, class_weight=w, label_smoothing=smoothing, reduction=reduction, implementation="eager"
    )
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
    grads = [torch.autograd.grad(t.sum(), x)[0] for t in (loss, expected)]
    torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-13)


def test_softcap_z_loss_token_weight_and_num_tokens_by_hand():
    x, _ = problem(T=3, V=4, dtype=torch.float64)
    y = torch.tensor([2, -100, 0], device=DEVICE)
    u = torch.tensor([0.5, 3.0, -2.0], dtype=torch.float64, device=DEVICE)
    expected = 0.0
    for t in (0, 2):
        z = [3.0 * math.tanh(v / 3.0) for v in x[t].tolist()]
        lse = math.log(sum(map(math.exp, z)))
        expected += u[t].item() * (lse - z[y[t]] + 0.01 * lse**2)
    options = {"softcap": 3.0, "z_loss": 0.01, "token_weight": u, "implementation": "eager"}
    loss = cross_entropy(x, y, num_tokens=11, **options)
    assert loss.item() == pytest.approx(expected / 11, rel=1e-13)
    for name in CROSS_ENTROPY.usable(DEVICE, torch.float32):  # a number or a tensor
        losses = [
            cross_entropy(x.float(), y, num_tokens=n, implementation=name)
            for n in (11, torch.tensor(11, device=DEVICE))
        ]
        assert torch.equal(*losses)


def test_entropy_and_lse_equal_categorical_and_argmax_is_the_first():
    x, y = problem(dtype=torch.float64)
    out = cross_entropy(
        x, y, return_lse=True, return_entropy=True, return_argmax=True, implementation="eager"
    )
    categorical = torch.distributions.Categorical(logits=x.detach())
    torch.testing.assert_close(out.entropy, categorical.entropy(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.lse, x.logsumexp(-1).detach(), rtol=1e-13, atol=1e-13)
    assert not out.lse.requires_grad and not out.entropy.requires_grad
    ties = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]], device=DEVICE).repeat(1, 700)
    y = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    for name in CROSS_ENTROPY.usable(DEVICE, torch.float32):
        found = cross_entropy(ties, y, return_argmax=True, implementation=name)
        assert found.argmax.tolist() == [1, 0], name


# ---- precision at any magnitude of the logits


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_constant_added_to_the_logits_costs_no_precision(name, smoothing):
    """Against an independent float64 formula, since the twin is tested too: the error is at most
    twice that of F.cross_entropy, plus a rounding or two of each result.
    """
    skip_unless_usable(CROSS_ENTROPY, name, torch.float32)
    eps = torch.finfo(torch.float32).eps
    drawn, _ = problem(T=8, V=1000)
    y = torch.tensor([0, 1, 5, 500, 700, 997, 998, 999], device=DEVICE)
    largest = torch.full_like(drawn, torch.finfo(torch.float32).max)
    for x in (
        *(drawn.detach() + offset for offset in (0, 1e2, 1e3, 1e4, 1e5, 1e6, 1e8)),
        largest,
        -largest,
    ):
        relative = x.double() - x.double().amax(-1, keepdim=True)
        log_sum = relative.exp().sum(-1).log()
        log_p = relative - log_sum[:, None]
        wanted = torch.zeros_like(log_p).scatter(1, y[:, None], 1 - smoothing) + smoothing / 1000
        truth = -(wanted * log_p).sum(-1), log_p.exp() - wanted

        def errors(call, x=x, truth=truth):
            leaf = x.clone().requires_grad_()
            loss = call(leaf)
            found = loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]
            return [float((f.double() - t).abs().max()) for f, t in zip(found, truth, strict=True)]

        theirs = errors(
            lambda t: F.cross_entropy(t, y, label_smoothing=smoothing, reduction="none")
        )
        ours = errors(
            lambda t: cross_entropy(
                t, y, label_smoothing=smoothing, reduction="none", implementation=name
            )
        )
        for what, own, other, size in zip(
            ("loss", "gradient"), ours, theirs, (float(truth[0].max()), 1), strict=True
        ):
            assert own <= 2 * other + 2 * eps * size, (what, x.flatten()[0], own, other)
        out = cross_entropy(x, y, return_lse=True, return_entropy=True, implementation=name)
        torch.testing.assert_close(
            out.entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=16 * eps, atol=0
        )
        torch.testing.assert_close(out.lse.double(), x.double().logsumexp(-1), rtol=2 * eps, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_the_z_loss_of_large_logits_has_the_gradient_of_its_lse(name):
    """lse is rounded at the logits' size, here to 1/128, but no probability may be computed from
    it.
    """
    skip_unless_usable(CROSS_ENTROPY, name, torch.float32)
    x, y = problem(T=8, V=1000)
    y, x = y.clamp_min(0), (x.detach() + 1e5).requires_grad_()
    exact = x.detach().double().requires_grad_()
    truth = F.cross_entropy(exact, y, reduction="none") + 1e-5 * exact.logsumexp(-1).square()
    loss = cross_entropy(x, y, z_loss=1e-5, reduction="none", implementation=name)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=0)
    wanted, found = (
        torch.autograd.grad(t.sum(), leaf)[0] for t, leaf in ((truth, exact), (loss, x))
    )
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_a_logit_of_infinity_shows(name):
    """As documented: lse is infinite, the gradient NaN there, the loss infinite or NaN. A cap
    bounds it.
    """
    skip_unless_usable(CROSS_ENTROPY, name, torch.float32)
    x, _ = problem(T=3)
    with torch.no_grad():
        x[:2, 5] = math.inf
    y = torch.tensor([0, 5, 5], device=DEVICE)
    out = cross_entropy(x, y, reduction="none", return_lse=True, implementation=name)
    (grad,) = torch.autograd.grad(out.loss.sum(), x)
    assert out.loss[0] == math.inf or name == "torch"
    assert not out.loss[:2].isfinite().any() and out.loss[1].isnan() and out.loss[2].isfinite()
    assert (
        (out.lse[:2] == math.inf).all() and grad[:2, 5].isnan().all() and grad[2].isfinite().all()
    )
    capped = cross_entropy(x, y, softcap=5.0, reduction="none", implementation=name)
    assert capped.isfinite().all() and torch.autograd.grad(capped.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("scale", [0.1, 4.0, 12.0])
def test_a_saturated_cap_costs_no_precision(name, scale):
    """1 - tanh^2 of a tanh near 1 would: the gradient would have no digit left at 9 times the cap.
    What is left is the rounding of logit / cap, which its exponential multiplies by 2 logit / cap.
    """
    skip_unless_usable(CROSS_ENTROPY, name, torch.float32)
    g = torch.Generator().manual_seed(0)
    size, sign = torch.rand(6, 300, generator=g), torch.randn(6, 300, generator=g).sign()
    x = (5 * scale * (1 + 0.2 * size) * sign).to(DEVICE)
    y = torch.arange(6, device=DEVICE)
    u = x.double() / 5
    z = 5 * u.tanh()
    truth = (z.softmax(-1) - F.one_hot(y, 300)) / u.cosh().square()
    x.requires_grad_()
    loss = cross_entropy(x, y, softcap=5.0, reduction="none", implementation=name)
    torch.testing.assert_close(
        loss.double(), F.cross_entropy(z, y, reduction="none"), rtol=1e-6, atol=0
    )
    (found,) = torch.autograd.grad(loss.sum(), x)
    torch.testing.assert_close(found.double(), truth, rtol=2e-6 + 4e-7 * scale, atol=0)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=short)
@pytest.mark.parametrize("softcap", [2.0, 32.0, 64.0, 120.0])
def test_a_cap_of_any_size_in_wide_rows(name, dtype, softcap):
    """A kernel needs no maximum of a row before its sum where the cap is small and logits have 16
    bits, however far the maximum is from the cap.
    """
    skip_unless_usable(CROSS_ENTROPY, name, dtype)
    V = 9001
    x = torch.randn(9, V, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1], x[2], x[3, 5], x[4, 5000] = -math.inf, math.inf, math.inf, 12.0
    for i in range(4):
        x[5 + i, 6000 + i] = math.nan
    y = torch.full((9,), 5000)
    y[2:4] = 5
    z = softcap * torch.tanh(x.double() / softcap)
    truth = F.cross_entropy(z, y, reduction="none").to(DEVICE)
    x = x.to(DEVICE).requires_grad_()
    loss = cross_entropy(x, y.to(DEVICE), softcap=softcap, reduction="none", implementation=name)
    assert (loss[:5] >= 0).all() and loss[5:].isnan().all()
    # Some roundings of the cap; log V where all logits are equal.
    torch.testing.assert_close(loss[:5].double(), truth[:5], rtol=2e-7, atol=4e-7 * softcap)
    torch.testing.assert_close(loss[1:3].double(), truth[1:3], rtol=5e-7, atol=0)
    (found,) = torch.autograd.grad(loss.sum(), x)
    assert found[:5].isfinite().all() and found[5:].isnan().all()


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=short)
def test_equal_logits_have_the_logarithm_of_their_number(name, dtype):
    """To a rounding: exponentials by another formula than that of the largest have its error."""
    skip_unless_usable(CROSS_ENTROPY, name, dtype)
    x = torch.linspace(-60, 60, 41, device=DEVICE, dtype=dtype)[:, None].repeat(1, 4096)
    y = torch.zeros(41, device=DEVICE, dtype=torch.int64)
    loss = cross_entropy(x, y, softcap=30.0, reduction="none", implementation=name)
    torch.testing.assert_close(loss, torch.full_like(loss, math.log(4096)), rtol=0, atol=1.5e-6)


@pytest.mark.parametrize("name", FUSED)
def test_a_softcap_above_what_exponentials_hold(name):
    """exp(100) is no float32; the largest logit is subtracted first."""
    skip_unless_usable(CROSS_ENTROPY, name, torch.float16)
    x = torch.linspace(-400, 400, 1001, device=DEVICE).half().repeat(3, 1)
    y = torch.tensor([0, 500, 1000], device=DEVICE)
    call = functools.partial(cross_entropy, x, y, softcap=100.0, reduction="none")
    losses = [call(implementation=i) for i in (name, "eager")]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FUSED)
def test_a_certain_row_has_no_negative_loss(name):
    fused(name)
    x = torch.full((64, 8192), -1000.0, device=DEVICE, dtype=torch.bfloat16)
    x[:, 7] = torch.linspace(0, 90, 64, device=DEVICE)
    y = torch.full((64,), 7, device=DEVICE)
    loss = cross_entropy(x, y, softcap=30.0, reduction="none", implementation=name)
    assert loss.min() >= 0


# ---- rows and values that are difficult for kernels


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("V, stride", [(1000, 1024), (997, 1001), (4100, 4101), (8197, 8197)])
def test_rows_further_apart_than_their_length(name, V, stride, poisoned):
    fused(name)
    storage, g = torch.randn(3, 2, stride, device=DEVICE), torch.randn(3, 2, device=DEVICE)
    y = torch.tensor([[0, V - 1], [-100, 5], [7, 8]], device=DEVICE)
    x = storage.clone()[..., :V].requires_grad_()
    expected = cross_entropy(x, y, **EVERYTHING, implementation="eager")
    (truth,) = torch.autograd.grad(expected.loss, x, g)
    for inplace in (False, True):
        out = cross_entropy(x, y, **EVERYTHING, inplace=inplace, implementation=name)
        (grad,) = torch.autograd.grad(out.loss, x, g)
        assert contract.error(out.loss.detach(), expected.loss.detach())[0] < 1e-6
        assert contract.error(out.entropy, expected.entropy)[0] < 1e-6
        assert contract.error(grad, truth)[0] < 2e-6
        assert not inplace or grad.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("name", ALL)
def test_masked_out_classes_and_large_logits(name):
    """Logits of -inf have probability 0, whether alone in a block or not; a shift changes
    nothing.
    """
    skip_unless_usable(CROSS_ENTROPY, name, torch.float32)
    x = torch.randn(3, 9000, device=DEVICE)
    x[:, :4500] = float("-inf")
    x[:, 8990:] = float("-inf")
    y = torch.tensor([4500, 8000, -100], device=DEVICE)
    a, b = x.requires_grad_(), x.detach()[:, 4500:8990].clone().requires_grad_()
    # float32 has steps of 2^-9 there, hence the tolerance below
    shift = 3e4
    options = {"return_entropy": True, "return_lse": True, "implementation": name}
    outs = [
        cross_entropy(t, torch.where(y < 0, y, y - d), **options)
        for t, d in ((a, 0), (b, 4500), (b + shift, 4500))
    ]
    torch.testing.assert_close(outs[0].loss, outs[1].loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(outs[0].entropy, outs[1].entropy, rtol=3e-6, atol=0)
    torch.testing.assert_close(outs[2].loss, outs[1].loss, rtol=2e-3, atol=0)
    ga, gb = torch.autograd.grad(outs[0].loss, a)[0], torch.autograd.grad(outs[1].loss, b)[0]
    torch.testing.assert_close(ga[:, 4500:8990], gb, rtol=1e-5, atol=1e-9)
    assert ga.isfinite().all() and not ga[:, :4500].any() and not ga[2].any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "options", [{}, {"z_loss": 0.1, "label_smoothing": 0.1, "softcap": 5.0}], ids=["plain", "all"]
)
def test_ignored_rows_get_zeros_whatever_they_hold(name, options):
    skip_unless_usable(CROSS_ENTROPY, name, torch.float32)
    x, y = problem()
    with torch.no_grad():
        x[1] = float("nan")  # 1 and 4 are ignored by `problem`
        x[4, 2] = float("inf")
    out = cross_entropy(x, y, return_lse=True, implementation=name, **options)
    out.loss.backward()
    assert out.loss.isfinite() and x.grad.isfinite().all()
    assert not x.grad[[1, 4]].any() and x.grad[0].any()
    z = x.detach()[7]  # ignored too, but its lse is right
    z = 5 * torch.tanh(z / 5) if "softcap" in options else z
    torch.testing.assert_close(out.lse[7], z.logsumexp(-1))


@pytest.mark.parametrize("name", FUSED)
def test_gradient_of_every_statistic(name):
    """The public op never differentiates the mean; other users of the statistics may. Upstream
    gradients are one number, or one per row, and an infinite one leaves a row without gradients 0.
    """
    kernels = fused(name)
    x, y = problem(T=4, V=300)
    w = torch.rand(300, device=DEVICE)
    g = [torch.randn(4, device=DEVICE) for _ in range(4)]
    for t in g:
        t[2] = 0
    for weights, softcap in ((None, 0.0), (w, 5.0)):
        leaf = x.detach().double().requires_grad_()
        how = weights, Scaling(softcap)
        wanted = Wanted(True, True, False)
        stats = softmax_stats.stats_eager(leaf, y, *how, wanted)
        (truth,) = torch.autograd.grad(
            stats[1:5], leaf, [t.double() for t in g]
        )  # all but the peak, and argmax
        found = kernels.of_rows(x.detach(), y, *how, wanted, None)
        for scale in (
            None,
            torch.tensor(3.0, device=DEVICE),
            torch.tensor([2.0, 0.0, math.inf, -1.0], device=DEVICE),
        ):
            of_loss = found.softmax, StatsGradients(*g)
            gradient = kernels.gradient(x.detach(), y, *how, *of_loss, None, scale)
            by = 1 if scale is None else scale.expand(4).clone().nan_to_num_(posinf=1)[:, None]
            assert contract.error(gradient, truth * by)[0] < 3e-6, scale


# ---- losses and their derivatives from the statistics

OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.1},
    "weights": {"class_weight": torch.rand(37) + 0.5},
    "tokens": {"token_weight": torch.randn(5000)},
    "number": {"num_tokens": 17.0, "divide": True},
    "tensor": {"num_tokens": torch.tensor(17), "divide": True},
    "zero": {"num_tokens": 0.0, "divide": True},
    "later": {"divisor": True},
    "count": {"divide": True},
}
OPTIONS["everything"] = functools.reduce(
    operator.or_, (OPTIONS[n] for n in ("smoothing", "z_loss", "weights", "tokens", "count"))
)


@pytest.mark.parametrize("options", OPTIONS)
def test_losses_in_one_kernel_equal_those_in_torch(options):
    """More rows than a block holds, in one part and in several; ignored rows with arbitrary
    statistics, and out-of-range targets.
    """
    kernels = fused("triton")
    options = {
        k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in OPTIONS[options].items()
    }
    T, V = 5000, 37
    g = torch.Generator().manual_seed(0)
    stats = [torch.randn(T, generator=g).to(DEVICE) for _ in range(4)]
    y = torch.randint(V, (T,), generator=g).to(DEVICE)
    y[::3] = -100
    stats[0][:9:3] = math.nan
    stats[1][3], stats[1][6] = math.inf, math.nan
    wide = options.pop("divisor", False) or options.get("divide", False)
    for bad in (False, True):
        if bad:
            y[[1, 4097]] = torch.tensor([V, -1], device=DEVICE)
        asked = LossInputs(
            y,
            V,
            -100,
            weight_sum=options["class_weight"].sum() if "class_weight" in options else None,
            **options,
        )
        results = []
        for losses, sizes in (
            (module.losses_in_torch, (T,)),
            (kernels.losses, (T,)),
            (kernels.losses, (128, 4096, T)),
        ):
            found = LossOutputs(
                torch.full((T,), 7.0, device=DEVICE),
                torch.full((), 7.0, device=DEVICE) if wide else None,
            )
            parts, start, total = [], 0, None
            for end in sizes:
                rows = slice(start, end)
                total, *part = losses(
                    Stats(*(t[rows].contiguous() for t in stats)), rows, asked, found, total
                )
                parts.append(part)
                start = end
            results.append(
                [
                    total,
                    *found,
                    *(None if p[0] is None else torch.cat(p) for p in zip(*parts, strict=True)),
                ]
            )
        for other in results[1:]:
            for a, b in zip(other, results[0], strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
        total, losses, by, *gradients = results[0]
        assert bool(total.isnan()) == bad and losses.isnan().nonzero().flatten().tolist() == (
            [1, 4097] if bad else []
        )
        assert by is None or by.isfinite()
        assert all(t is None or t.isnan().any() == bad for t in gradients)


# ---- launches


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"num_tokens": 5},
        {"num_tokens": torch.tensor(5.0)},
        {"z_loss": 0.1},
        {"softcap": 5.0},
        {"inplace": True},
        {"label_smoothing": 0.1},
    ],
    ids=str,
)
def test_three_launches_and_no_wait(options, monkeypatch):
    """Forward and backward as on a GPU, where each PyTorch computation would be a launch, and
    reading a value a synchronization.
    """
    fused("triton")
    x, y = problem()
    upstream = torch.ones(9 if options.get("reduction") == "none" else (), device=DEVICE)
    found = launches(
        monkeypatch,
        lambda: torch.autograd.grad(
            cross_entropy(x, y, **options, implementation="triton"), x, upstream
        ),
    )
    assert found == ["_forward", "_losses", "_backward"]


# ---- targets


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [37, -1, 2**40])
def test_target_out_of_range(name, bad):
    skip_unless_usable(CROSS_ENTROPY, name, torch.float32)
    x, _ = problem(T=6)
    y = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    y[1, 2] = y[1, 1] = bad
    said = rf"target\[1, 1\] is {bad}; accepted are 0 to 36 and ignore_index"
    with pytest.raises(IndexError, match=said):
        cross_entropy(x.reshape(2, 3, 37), y, implementation=name)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "none"}, {"label_smoothing": 0.1, "z_loss": 0.1, "weights": True}],
    ids=["mean", "none", "all"],
)
def test_a_bad_target_makes_its_row_nan_where_there_is_no_look(name, options, monkeypatch):
    """In the loss and in the gradient, and nowhere else: the divisor does not count it."""
    skip_unless_usable(CROSS_ENTROPY, name, torch.float32)
    as_on_a_gpu(monkeypatch)
    x, y = problem()
    options = dict(options)
    if options.pop("weights", False):
        options |= {
            "class_weight": torch.rand(37, device=DEVICE),
            "token_weight": torch.rand(9, device=DEVICE),
        }
    rows = torch.tensor([2, 6], device=DEVICE)
    expected = cross_entropy(x, y.index_fill(0, rows, -100), implementation="eager", **options)
    y[2], y[6] = 37, -1
    loss = cross_entropy(x, y, implementation=name, **options)
    wanted, found = (torch.autograd.grad(t.sum(), x)[0] for t in (expected, loss))
    assert loss.sum().isnan()
    if loss.dim():
        torch.testing.assert_close(loss, expected.index_fill(0, rows, math.nan), equal_nan=True)
    torch.testing.assert_close(
        found, wanted.index_fill(0, rows, math.nan), equal_nan=True, rtol=1e-5, atol=1e-7
    )


def test_targets_on_a_gpu_are_looked_at_only_when_they_are_to_be(monkeypatch):
    """Also in code compiled outside the context: the check is made when it runs."""
    on_a_gpu = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not targets._may_read(on_a_gpu) and targets._may_read(torch.zeros(1))
    with checked_targets():
        assert targets._may_read(on_a_gpu)
        with monkeypatch.context() as recording:
            recording.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert not targets._may_read(on_a_gpu)
    assert not targets._may_read(on_a_gpu)
    real = targets._may_read
    monkeypatch.setattr(targets, "_may_read", lambda target: real(on_a_gpu))
    x, y = problem(T=6)
    y = y.view(2, 3).masked_fill(y.view(2, 3) == -100, 37)
    for name in CROSS_ENTROPY.usable(DEVICE, torch.float32):

        def loss(x, y, name=name):
            return cross_entropy(x.view(2, 3, 37), y, implementation=name)

        for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
            assert call(x, y).isnan()
            with (
                checked_targets(),
                pytest.raises(IndexError, match=r"target\[0, 1\] is 37; accepted are 0 to 36"),
            ):
                call(x, y)
            assert call(x, y).isnan()


@pytest.mark.parametrize("name", FUSED)
def test_kernels_read_and_write_nothing_outside_for_bad_targets(name):
    kernels = fused(name)
    x, _ = problem(T=3)
    y = torch.tensor([2**40, -(2**40), 37], device=DEVICE)
    stats = kernels.of_rows(x.detach(), y, None, Scaling(), Wanted(), None)
    assert not stats.picked.any()
    g = torch.ones(3, device=DEVICE)
    of_loss = stats.softmax, StatsGradients(g, g)
    d = kernels.gradient(x.detach(), y, None, Scaling(), *of_loss, None)
    torch.testing.assert_close(d, x.detach().softmax(-1))


def test_ignore_index_inside_the_vocabulary():
    x, _ = problem(dtype=torch.float64)
    y = torch.tensor([0, 5, 5, 3, 36, 5, 1, 2, 3], device=DEVICE)
    loss = cross_entropy(x, y, ignore_index=5, implementation="eager")
    torch.testing.assert_close(loss, F.cross_entropy(x, y, ignore_index=5), rtol=1e-13, atol=0)


# ---- inplace, checkpointing, torch.compile, operators


@pytest.mark.parametrize("name", FUSED)
def test_inplace_uses_the_logits_memory_once(name):
    fused(name)
    h, y = problem()
    expected = torch.autograd.grad(cross_entropy(h * 2, y, implementation="eager"), h)[0]
    logits = h * 2
    logits.retain_grad()
    loss = cross_entropy(logits, y, inplace=True, implementation=name)
    loss.backward(retain_graph=True)
    torch.testing.assert_close(h.grad, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(logits, h.grad / 2, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ALL)
def test_inplace_over_rows_that_share_memory_is_refused(name):
    """One row's gradient would overwrite another row before it is read."""
    skip_unless_usable(CROSS_ENTROPY, name, torch.float32)
    y = torch.tensor([0, 8, -100, 3], device=DEVICE)
    flat = torch.randn(90, device=DEVICE)
    shared = [
        flat[:9].expand(4, 9),
        flat.as_strided((4, 9), (3, 1)),
        flat.as_strided((4, 9), (8, 1)),
        flat[:4, None].expand(4, 9),
        flat[:18].view(2, 1, 9).expand(2, 2, 9),
    ]
    said = r"cannot overwrite logits whose elements share memory, got shape \[.*with strides \["
    for t in shared:
        x = t.detach().requires_grad_()
        target = y.view(t.shape[:-1])
        with pytest.raises(ValueError, match=said):
            cross_entropy(x, target, inplace=True, implementation=name)
        cross_entropy(x, target, implementation=name)
    for t in (
        flat.as_strided((4, 9), (9, 1)),
        flat.as_strided((4, 9), (1, 4)),
        flat.as_strided((4, 9), (20, 1)),
    ):
        (truth,) = torch.autograd.grad(
            cross_entropy(c := t.clone().requires_grad_(), y, implementation="eager"), c
        )
        x = t.clone(memory_format=torch.preserve_format).requires_grad_()
        (found,) = torch.autograd.grad(cross_entropy(x, y, inplace=True, implementation=name), x)
        torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("name", ALL)
def test_checkpointed_in_place(name):
    skip_unless_usable(CROSS_ENTROPY, name, torch.float32)
    h, y = problem()
    w = torch.randn(37, 50, device=DEVICE, requires_grad=True)
    y = y.clamp_max(36)

    def loss(h, w):
        return cross_entropy(h @ w, y, inplace=True, implementation=name)

    expected = torch.autograd.grad(loss(h, w), (h, w))
    got = torch.autograd.grad(
        torch.utils.checkpoint.checkpoint(loss, h, w, use_reentrant=False), (h, w)
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_in_place_is_refused_in_compiled_code():
    x, y = problem()
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"inplace must be False under torch\.compile"):
        compiled(x * 1.5, y, inplace=True)


def test_cpp_gives_the_same_bits_on_any_number_of_threads():
    fused("cpp")
    results = []
    for n in (1, 2, 3):
        with threads(n):
            x, y = problem(T=50, V=5000)
            loss = cross_entropy(x, y, label_smoothing=0.1, implementation="cpp")
            results.append((loss, *torch.autograd.grad(loss, x)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs: only on a CUDA device")
@pytest.mark.parametrize("name", ALL)
def test_a_bad_target_in_a_cuda_graph_makes_the_loss_nan(name):
    x, y = problem()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        cross_entropy(x, y, implementation=name)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = cross_entropy(x, y, implementation=name)
    graph.replay()
    assert loss.isfinite()
    y[0] = 37
    graph.replay()
    assert loss.isnan()


# ---- a vocabulary in shards


SHARDED = {"logits": -1, "weight": 0, "bias": 0, "lora_B": 0}  # the dimension of the vocabulary


def sharded_calls():
    """(op, arguments) of a whole vocabulary, of 62 classes."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape, scale=1.0):
        return torch.randn(*shape, generator=g) * scale

    x, y = problem(T=8, V=62)
    x = x.detach()
    x[0] = 1.0  # a tie across the shards
    x[2, 31:] = float("-inf")  # a shard without probability; the row's target is in the other
    y[2] = 3
    second = torch.where(y < 0, y, y % 31 + 31)
    second[2] = -100
    far = x.clamp_min(-9) + 1e6 - 3 * (torch.arange(62) < 31)  # shards with distant peaks
    returns = {"return_lse": True, "return_entropy": True, "return_argmax": True}
    weights = {"class_weight": torch.rand(62, generator=g), "label_smoothing": 0.1}
    everything = {
        "softcap": 5.0,
        "z_loss": 1e-2,
        "token_weight": torch.rand(8, generator=g),
        **weights,
        **returns,
    }
    head = {"x": randn(8, 16), "weight": randn(62, 16, scale=0.5), "target": y, "chunk_size": 3}
    whole = {**head, "bias": randn(62), **everything}
    # Exact sums, which float32 resolves to 1/16 only after an offset is added.
    exact = {n: (4 * head[n]).round() / 4 for n in ("x", "weight")}
    adapter = {"lora_A": randn(4, 16, scale=0.5), "lora_B": randn(62, 4), "lora_scale": 0.5}
    warm = {"temperature": 0.7, "softcap": 5.0, "return_argmax": True}
    given = {**head, "advantage": randn(8), "old_logprob": randn(8, scale=0.1) - 4}
    pairs = {"cu_seqlens": torch.tensor([0, 3, 4, 4, 8]), "ref_logprob": randn(4) - 9}
    return [
        ("cross_entropy", {"logits": x, "target": y, **returns}),
        ("cross_entropy", {"logits": x, "target": y, **everything}),
        ("cross_entropy", {"logits": x, "target": y.clamp_max(30), **everything}),
        ("cross_entropy", {"logits": x, "target": second, **everything, "reduction": "none"}),
        ("cross_entropy", {"logits": far, "target": y, **weights, **returns, "reduction": "none"}),
        ("linear_cross_entropy", {**head, **returns}),
        ("linear_cross_entropy", {**whole, "num_tokens": 20}),
        ("linear_cross_entropy", {**whole, "reduction": "none"}),
        (
            "linear_cross_entropy",
            {**head, **exact, "bias": torch.full((62,), 1e6), "label_smoothing": 0.1, **returns},
        ),
        ("logprob_entropy", {"logits": x, "target": y, "return_argmax": True}),
        ("logprob_entropy", {"logits": x, "target": y, **warm}),
        ("logprob_entropy", {"logits": far, "target": y, "temperature": 1.5}),
        ("linear_logprob", head),
        ("linear_logprob", {**head, **adapter, "bias": randn(62), **warm}),
        ("linear_policy_loss", given),
        ("linear_policy_loss", {**given, "loss": GSPO(), "cu_seqlens": torch.tensor([0, 3, 3, 8])}),
        ("linear_preference_loss", {**head, **pairs}),
    ]


def of_shards(op, kwargs, dtype, **options):
    """Results, and the gradients of logits, or of all of the head."""
    kwargs = {
        n: v.to(dtype, copy=True) if torch.is_tensor(v) and v.is_floating_point() else v
        for n, v in kwargs.items()
    }
    leaves = {n: kwargs[n].requires_grad_() for n in (*SHARDED, "x", "lora_A") if n in kwargs}
    outs = contract.leaves(OPS[op].public(**kwargs, **options))
    total = sum(t.sum() + 0.3 * t.square().sum() for t in outs if t.requires_grad)
    grads = torch.autograd.grad(total, leaves.values())
    return [t.detach() for t in outs], dict(zip(leaves, grads, strict=True))


def _rank(rank, world, folder, name):
    options = {"group": join_group(rank, world, folder), "implementation": name}
    for i, (op, kwargs) in enumerate(sharded_calls()):
        own = {
            n: v.chunk(world, SHARDED[n])[rank].clone() if n in SHARDED else v
            for n, v in kwargs.items()
        }
        torch.save(of_shards(op, own, torch.float32, **options), f"{folder}/{i}-{rank}")
        far = {**own, "target": torch.full_like(own["target"], 2**20)}
        with pytest.raises(IndexError, match="0 to 61"):  # of the whole vocabulary
            of_shards(op, far, torch.float32, **options)
    torch.compiler.is_compiling = lambda: True  # compiling would take ten seconds
    with pytest.raises(ValueError, match=r"refused under torch\.compile"):
        of_shards("linear_cross_entropy", sharded_calls()[5][1], torch.float32, **options)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["eager", *FUSED])
def test_two_shards_of_the_vocabulary_equal_one(name, tmp_path):
    """Every op that takes a group is tested."""
    if DEVICE == "cuda":
        pytest.skip("gloo takes CPU tensors: run without a CUDA device")
    skip_unless_usable(CROSS_ENTROPY, name, torch.float32)
    take_a_group = {n for n, op in OPS.items() if "group" in signature(op.public).parameters}
    assert take_a_group == {op for op, _ in sharded_calls()}
    two_processes(_rank, tmp_path, name)
    for i, (op, kwargs) in enumerate(sharded_calls()):
        results, grads = of_shards(op, kwargs, torch.float64, implementation="eager")
        ranks = [torch.load(f"{tmp_path}/{i}-{r}") for r in range(2)]
        for found, _ in ranks:  # complete, and equal on every rank
            assert all(map(torch.equal, found, ranks[0][0]))
            for at, (f, e) in enumerate(zip(found, results, strict=True)):
                atol = 0 if op == "cross_entropy" and at < 2 else 1e-6  # the loss, lse
                torch.testing.assert_close(f.double(), e.double(), rtol=1e-5, atol=atol)
        limit = 1e-5 if op.endswith("cross_entropy") else 2e-5
        for leaf, truth in grads.items():
            parts = [own[leaf] for _, own in ranks]
            # What is replicated has the whole gradient on each rank.
            for part in [torch.cat(parts, SHARDED[leaf])] if leaf in SHARDED else parts:
                assert contract.error(part, truth)[0] < limit, (op, i, leaf)


@pytest.mark.parametrize("name", ["eager", *FUSED])
def test_a_shard_compiles_as_one_graph(name, tmp_path):
    if DEVICE == "cuda":
        pytest.skip("gloo takes CPU tensors: run without a CUDA device")
    skip_unless_usable(CROSS_ENTROPY, name, torch.float32)
    group = join_group(0, 1, tmp_path)
    try:
        x, y = problem()

        def loss(x, y):
            return cross_entropy(x, y, group=group, implementation=name)

        found, expected = (
            torch.autograd.grad(f(x, y), x)[0]
            for f in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss)
        )
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy"])
def test_a_shard_is_refused_by_pytorch_and_passed_over_by_auto(op, tmp_path, monkeypatch):
    if DEVICE == "cuda":
        pytest.skip("gloo takes CPU tensors: run without a CUDA device")
    op = OPS[op]
    request = Request(sharded=True)
    assert [i.name for i in op.implementations if i.refuses(request)] == ["torch"]
    if reason := op.implementation("torch").why_not("cpu", torch.float32):
        pytest.skip(reason)
    group = join_group(0, 1, tmp_path)
    try:
        y = torch.zeros(4, dtype=torch.int64)
        call = functools.partial(op.public, torch.randn(4, 8), target=y, group=group)
        if op.name == "linear_cross_entropy":
            call = functools.partial(call, weight=torch.randn(6, 8))
        with pytest.raises(
            ImplementationUnavailable, match=r"\[torch\]: takes whole rows of logits"
        ):
            call(implementation="torch")
        first = dataclasses.replace(op.implementation("torch"), devices=("cpu",))
        monkeypatch.setattr(op, "implementations", (first, *op.implementations))
        assert op.choose("cpu", torch.float32) == "torch"
        assert op.choose("cpu", torch.float32, request) != "torch"
    finally:
        torch.distributed.destroy_process_group()


# ---- errors

X, Y = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"logits": X[:, :0]}, r"logits must have shape \[\*T, V\] with V >= 1, got \[4, 0\]"),
        ({"target": Y[:3]}, r"target must have shape \[\*T\], where T = \[4\], got \[3\]"),
        ({"class_weight": X[0, :5]}, r"class_weight must have shape \[8\] \(the vocabulary\)"),
        ({"class_weight": torch.ones(8, requires_grad=True)}, "class_weight must not require a"),
        ({"token_weight": X[:, :1]}, r"token_weight must have shape \[\*T\], .* got \[4, 1\]"),
        ({"num_tokens": 10**400}, r"num_tokens must be a number in \[0, inf\) in float32 or a"),
        ({"group": "tp"}, "group must be a torch.distributed.ProcessGroup.*str"),
    ],
)
def test_bad_input_is_one_clear_error(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        cross_entropy(**{"logits": X, "target": Y, **changes})
