"""Tests specific to linear_cross_entropy and linear_logprob; parity with the eager twin is in
test_contract.py.
"""

import functools
import importlib
import math
import pathlib
import subprocess
import sys
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICE, as_on_a_gpu, join_group, launches, skip_unless_usable

from tilewright.bench import contract
from tilewright.core.registry import ImplementationUnavailable, short
from tilewright.kernels.loss.operators import Scaling, Wanted
from tilewright.ops import OPS, cross_entropy, linear_cross_entropy, linear_logprob
from tilewright.ops.loss import head as head_of_loss
from tilewright.ops.loss.head import Plan

ROOT = pathlib.Path(__file__).parents[2]
# In `tilewright.ops` the name is the function.
linear_module = importlib.import_module("tilewright.ops.loss.linear_cross_entropy")
LINEAR, LOGPROB = OPS["linear_cross_entropy"], OPS["linear_logprob"]
CHUNKED = ("triton", "cpp")
ALL = LINEAR.names()
MiB = 2**20
RETURNS = {"return_lse": True, "return_entropy": True, "return_argmax": True}


def problem(T=11, H=16, V=37, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, w, b = (
        torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((T, H), (V, H), (V,))
    )
    y = torch.randint(V, (T,), generator=g)
    y[1::3] = -100
    x, w, b = (t.to(DEVICE, dtype).requires_grad_() for t in (x, w * 2 / math.sqrt(H), b))
    return x, w, b, y.to(DEVICE)


def grads(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


# ---- against PyTorch's own composition

OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.2},
    "weights": {"class_weight": True},
    "weights_smoothing": {"class_weight": True, "label_smoothing": 0.1},
}


def by_hand(x, w, b, y, class_weight=None, **options):
    acc = torch.promote_types(x.dtype, torch.float32)
    return F.cross_entropy(
        F.linear(x, w, b).to(acc),
        y,
        None if class_weight is None else class_weight.to(acc),
        **options,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("case", OPTIONS)
def test_equals_linear_and_cross_entropy_of_torch(case, dtype):
    """Against float64, the error may be at most twice that of PyTorch's two steps in this dtype."""
    options = dict(OPTIONS[case])
    if "class_weight" in options:
        options["class_weight"] = torch.rand(37, device=DEVICE)
    x, w, b, y = problem(dtype=dtype)
    g = torch.randn(11 if case == "none" else (), device=DEVICE)
    ours = linear_cross_entropy(x, w, y, bias=b, chunk_size=4, implementation="eager", **options)
    theirs = by_hand(x, w, b, y, **options)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    truth = by_hand(*exact, y, **options)
    found, other = ([o.detach(), *grads((o * g).sum(), x, w, b)] for o in (ours, theirs))
    expected = [truth.detach(), *grads((truth * g).sum(), *exact)]
    for what, f, o, e in zip(("loss", "dx", "dw", "db"), found, other, expected, strict=True):
        allowed = 2 * contract.error(o, e)[0] + contract.ATOL[dtype]
        if dtype == torch.float64:
            allowed = 1e-13
        assert contract.error(f, e)[0] <= allowed, what


@pytest.mark.parametrize("name", ALL)
def test_a_constant_added_to_the_logits_costs_no_precision(name):
    """The logits are sums of few bits, exact in any order, so float64 has the same."""
    skip_unless_usable(LINEAR, name, torch.float32)
    eps = torch.finfo(torch.float32).eps
    x, w, b, _ = problem(T=8, H=8, V=300)
    x, w = ((n * t).round().div(n).detach().requires_grad_() for n, t in ((4, x), (2, w)))
    y = torch.arange(8, device=DEVICE)
    log_p = F.linear(x.detach().double(), w.detach().double()).log_softmax(-1)
    logprob, entropy = log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    dx = (log_p.exp() - F.one_hot(y, 300)) @ w.detach().double()
    for offset in (0, 1e3, 1e6):
        b = torch.full((300,), float(offset), device=DEVICE)
        assert torch.equal(F.linear(x, w, b).double(), F.linear(x.double(), w.double(), b.double()))
        options = {"bias": b, "chunk_size": 4, "implementation": name}
        # They differ in where gradients are computed.
        for how, truth in (("none", -logprob), ("sum", -logprob.sum())):
            loss = linear_cross_entropy(x, w, y, reduction=how, **options)
            torch.testing.assert_close(loss.detach().double(), truth, rtol=4 * eps, atol=4 * eps)
            assert contract.error(grads(loss.sum(), x)[0], dx)[0] < 16 * eps, offset
        if name in LOGPROB.names():
            found = linear_logprob(x, w, y, **options)
            for f, t in zip(found, (logprob, entropy), strict=True):
                torch.testing.assert_close(f.detach().double(), t, rtol=4 * eps, atol=4 * eps)
            assert contract.error(grads(found[0].sum(), x)[0], -dx)[0] < 16 * eps, offset


@pytest.mark.parametrize("name", ALL)
def test_softcap_z_loss_and_token_weights_by_hand(name):
    skip_unless_usable(LINEAR, name, torch.float32)
    x, w, b, y = problem()
    u = torch.rand(11, device=DEVICE, requires_grad=True)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b, u)]
    z = 3 * torch.tanh(F.linear(*exact[:3]) / 3)
    rows = F.cross_entropy(z, y, reduction="none") + 0.01 * z.logsumexp(-1).square() * (y >= 0)
    truth = (rows * exact[3]).sum() / 17
    options = {"softcap": 3.0, "z_loss": 0.01, "token_weight": u, "num_tokens": 17}
    loss = linear_cross_entropy(x, w, y, bias=b, chunk_size=4, implementation=name, **options)
    found = [loss.detach(), *grads(loss * 3, x, w, b, u)]
    for f, e in zip(found, [truth.detach(), *grads(truth * 3, *exact)], strict=True):
        assert contract.error(f, e)[0] < 3e-6


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks_change_nothing(name, reduction):
    """Also where the last one is short."""
    skip_unless_usable(LINEAR, name, torch.float32)
    x, w, b, y = problem()
    results, options = [], {"reduction": reduction, "implementation": name, **RETURNS}
    for size in (None, 1, 4, 10, 11, 1000):
        out = linear_cross_entropy(x, w, y, bias=b, chunk_size=size, **options)
        results.append([*(t.detach() for t in out), *grads(out.loss.sum(), x, w, b)])
    for other in results[1:]:
        for f, e in zip(other, results[0], strict=True):
            torch.testing.assert_close(f, e, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", CHUNKED)
def test_a_vocabulary_of_262144(name):
    """Sums over such a vocabulary lose the most precision, also PyTorch's."""
    skip_unless_usable(LINEAR, name, torch.float32)
    V = 2**18
    x, w, _, _ = problem(T=3, H=4, V=V)
    y = torch.tensor([V - 1, -100, 5], device=DEVICE)
    loss = linear_cross_entropy(x, w, y, chunk_size=2, implementation=name)
    theirs = F.cross_entropy(F.linear(x, w), y)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    truth = F.cross_entropy(F.linear(*exact), y)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=0)
    for f, o, e in zip(grads(loss, x, w), grads(theirs, x, w), grads(truth, *exact), strict=True):
        allowed = 2 * contract.error(o, e)[0] + contract.ATOL[torch.float32]
        assert contract.error(f, e)[0] <= allowed


# ---- backward's assumptions


@pytest.mark.parametrize("name", ["eager", *CHUNKED])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_twice_gives_the_same(name, reduction):
    """Forward computes the gradients; backward must not scale them in place while the graph is
    retained.
    """
    skip_unless_usable(LINEAR, name, torch.float32)
    x, w, b, y = problem()
    loss = linear_cross_entropy(x, w, y, bias=b, reduction=reduction, implementation=name).sum() * 3
    first = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
    for second, expected in zip(torch.autograd.grad(loss, (x, w, b)), first, strict=True):
        assert torch.equal(second, expected)


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_is_frozen_costs_no_gemm(name, reduction, monkeypatch):
    skip_unless_usable(LINEAR, name, torch.float32)
    x, w, b, y = problem()
    (expected,) = grads(
        linear_cross_entropy(x, w, y, bias=b, reduction=reduction, implementation="eager").sum(), x
    )
    made = []
    real = head_of_loss.Sums
    monkeypatch.setattr(head_of_loss, "Sums", lambda *a: made.append(real(*a)) or made[-1])
    loss = linear_cross_entropy(
        x, w.detach(), y, bias=b.detach(), reduction=reduction, implementation=name
    ).sum()
    (found,) = grads(loss, x)
    assert contract.error(found, expected)[0] < 2e-6
    assert made[-1].dw is made[-1].db is None
    with torch.no_grad():
        linear_cross_entropy(x, w, y, implementation=name)
    assert reduction == "none" or made[-1].dx is None


# ---- memory

PEAK = """
import resource, sys, torch
from tilewright.ops import linear_cross_entropy as f, linear_logprob
T, H, V = 2048, 8, 32768
x, w = torch.randn(T, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
y = torch.randint(V, (T,))
def call(x, y, how):
    if how == "logprob":
        return torch.stack(linear_logprob(x, w, y, implementation=sys.argv[1])).sum()
    return f(x, w, y, reduction=how, implementation=sys.argv[1]).sum()
hows = sys.argv[2:]
for how in hows:   # thread pools, code pages
    call(x[:64], y[:64], how).backward()
def peak():   # not ru_maxrss, which begins at the peak of the process that started this one
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))
before = peak()
for how in hows:
    call(x, y, how).backward()
print((peak() - before) / 1024)
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads a process's peak memory as Linux counts it"
)
@pytest.mark.parametrize(
    "name, hows, least, most",
    [
        ("eager", ["mean"], 256, math.inf),  # checks the measurement: all logits are 256 MiB
        ("cpp", ["mean", "none", "logprob"], 0, 100),  # a chunk is 64 MiB
    ],
    ids=["eager", "cpp"],
)
def test_logits_are_never_whole_in_memory(name, hows, least, most):
    if reason := LINEAR.implementation(name).why_not("cpu", torch.float32):
        pytest.skip(reason)
    run = subprocess.run(
        [sys.executable, "-c", PEAK, name, *hows],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert least <= float(run.stdout) <= most


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="a CUDA device's peak memory: only on one")
def test_logits_are_never_whole_in_gpu_memory():
    T, H, V = 2**15, 64, 2**17
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(V, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.randint(V, (T,), device="cuda")
    linear_cross_entropy(x, w, y, implementation="triton").backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, w, y, implementation="triton").backward()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * 1024 * MiB < T * V * 2


# ---- launches


@pytest.mark.parametrize("chunk_size, reduction", [(None, "mean"), (None, "sum"), (4, "mean")])
def test_launches_of_forward_and_backward(chunk_size, reduction, monkeypatch):
    """As on a GPU: three kernels and three products per chunk, and the cost of the upstream
    gradient.
    """
    skip_unless_usable(LINEAR, "triton", torch.float32)
    x, w, _, y = problem()
    upstream = torch.ones((), device=DEVICE)

    def run():
        options = {"reduction": reduction, "chunk_size": chunk_size, "implementation": "triton"}
        torch.autograd.grad(linear_cross_entropy(x, w, y, **options), (x, w), upstream)

    found = launches(monkeypatch, run)
    products = {"aten::mm": "product", "aten::addmm": "product"}
    chunk = ["product", "_forward", "_losses", "_backward", "product", "product"]
    expected = chunk * (1 if chunk_size is None else 3) + ["_scale", "_scale"]
    assert [products.get(n, n) for n in found] == expected


def test_an_upstream_gradient_of_one_reads_and_writes_nothing():
    """Any other multiplies whole blocks and the remainder of one."""
    skip_unless_usable(LINEAR, "triton", torch.float32)
    from tilewright.kernels.loss import softmax_stats_triton as kernels

    for n in (1, 4096, 3 * 4096 + 5):
        memory = torch.randn(n + 8, device=DEVICE)
        before, out = memory.clone(), memory[:n]
        for factor in (1.0, 3.0, math.nan):
            kernels.scale_(out, torch.tensor(factor, device=DEVICE))
            expected = torch.cat([before[:n] * factor, before[n:]])
            torch.testing.assert_close(memory, expected, rtol=0, atol=0, equal_nan=True)
            before = memory.clone()
    out = torch.ones(3, device=DEVICE)
    version = out._version
    for scale_ in (kernels.scale_, linear_module.scale_in_torch_):
        scale_(out, torch.ones((), device=DEVICE))
        assert out._version == version


# ---- the rule for chunks


SUMMED = Plan(fp32_sums=True, learns=True)


def rows(T, V, itemsize=4, device="cpu", H=64, plan=SUMMED):
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    x = types.SimpleNamespace(
        shape=(T, H), device=torch.device(device), element_size=lambda: itemsize, dtype=dtype
    )
    weight = types.SimpleNamespace(shape=(V, H), dtype=dtype)
    return head_of_loss.chunk_rows(x, weight, plan)


@pytest.mark.parametrize(
    "T, V, itemsize, expected",
    [
        (512, 32768, 4, 512),
        (513, 32768, 4, 288),
        (1025, 32768, 4, 352),  # 64 MiB are 512 rows; evened out, in 32s
        (1025, 32768, 2, 544),
        (100, 2**18, 4, 64),
        (100, 2**26, 4, 32),  # never less than one tile
        (5, 100, 4, 5),
        (0, 100, 4, 1),
        (1, 2**18, 4, 1),
    ],
)
def test_rows_in_a_chunk_on_a_cpu(T, V, itemsize, expected):
    assert rows(T, V, itemsize) == expected


def test_rows_in_a_chunk_as_asked_for():
    assert [rows(10, 100, plan=Plan(chunk_size=n)) for n in (1, 7, 10, 11)] == [1, 7, 10, 10]
    assert rows(0, 100, plan=Plan(chunk_size=3)) == 1


GPU = {"itemsize": 2, "device": "cuda"}
LLAMA = {"H": 4096, "V": 128256, **GPU}


@pytest.mark.parametrize(
    "T, options, chunks",
    [
        (8192, LLAMA, 1),
        (8192, {**LLAMA, "itemsize": 4}, 4),  # a float32 gradient is its own sum
        # Without a gradient of the weight there is no sum.
        (8192, {**LLAMA, "plan": Plan(fp32_sums=True)}, 2),
        (8192, {**LLAMA, "plan": Plan(learns=True)}, 2),  # accumulate="bf16"
        (8192, {**LLAMA, "plan": Plan(True, True, True)}, 7),  # 6,012 MiB, or 859 and 2,004
        (12288, LLAMA, 1),
        (12289, LLAMA, 4),
        (16384, LLAMA, 4),
        (32768, LLAMA, 8),
        (8192, {**LLAMA, "H": 2048, "V": 151936}, 3),
        (8192, {**LLAMA, "H": 2560, "V": 262144}, 4),
        (64, LLAMA, 1),
        (1024, {"H": 576, "V": 49152, "itemsize": 2}, 1),
        (1024, {"H": 576, "V": 49152, "itemsize": 4}, 4),
    ],
)
def test_chunks_follow_from_shapes(T, options, chunks, monkeypatch):
    """The lesser memory of two plans: all logits at once, or chunks of the budget and a float32
    sum. It depends on nothing else, so it is the same during CUDA graph capture and on every rank.
    """
    for name in ("mem_get_info", "memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *a: pytest.fail("memory was asked for"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "one that nobody tuned")
    chunk = head_of_loss.CHUNK
    monkeypatch.setattr(chunk, "config", lambda device, *key: chunk.heuristic(*key))
    found = rows(T, **options)
    assert -(-T // found) == chunks and (
        chunks == 1 or found % (128 if options.get("device") else 32) == 0
    )


def test_a_launch_configuration_may_refuse_a_single_chunk(monkeypatch):
    chunk = head_of_loss.CHUNK
    monkeypatch.setattr(
        chunk, "config", lambda device, *key: {**chunk.heuristic(*key), "whole": False}
    )
    assert [rows(T, **LLAMA) for T in (8192, 4096)] == [4096, 4096]


@pytest.mark.parametrize("name", CHUNKED)
def test_forward_and_backward_choose_the_same_chunks(name, monkeypatch):
    """The logits that backward recomputes are those of the statistics."""
    skip_unless_usable(LINEAR, name, torch.float32)
    seen, real = [], head_of_loss.chunk_rows
    monkeypatch.setattr(
        head_of_loss,
        "chunk_rows",
        lambda x, w, plan: seen.append(plan) or real(x, w, plan),
    )
    x, w, _, y = problem()
    for frozen in (False, True):
        weight = w.detach() if frozen else w
        grads(linear_cross_entropy(x, weight, y, reduction="none", implementation=name).sum(), x)
        grads(linear_logprob(x, weight, y, implementation=name)[0].sum(), x)
    assert seen == [SUMMED] * 4 + [Plan(fp32_sums=True)] * 4


# ---- out-of-range targets, unchecked


@pytest.mark.parametrize(
    "name, fn, options",
    [
        pytest.param(name, fn, options, id=f"{id}-{name}")
        for id, op, fn, options in (
            ("mean", LINEAR, linear_cross_entropy, {}),
            ("none", LINEAR, linear_cross_entropy, {"reduction": "none"}),
            ("all", LINEAR, linear_cross_entropy, {"label_smoothing": 0.1, "z_loss": 0.1}),
            ("logprob", LOGPROB, linear_logprob, {}),
        )
        for name in ALL
        if name in op.names()
    ],
)
def test_a_bad_target_makes_its_row_nan_where_there_is_no_look(name, fn, options, monkeypatch):
    skip_unless_usable(LINEAR, name, torch.float32)
    as_on_a_gpu(monkeypatch)
    x, w, b, y = problem()
    rows = torch.tensor([2, 6], device=DEVICE)
    first = contract.leaves(
        fn(x, w, y.index_fill(0, rows, -100), bias=b, implementation="eager", **options)
    )
    y[2], y[6] = 37, -1
    found = contract.leaves(fn(x, w, y, bias=b, chunk_size=4, implementation=name, **options))
    for f, e in zip(found, first, strict=True):  # e: the twin's result with those rows ignored
        assert f.isnan().any()
        if f.dim():
            e = e.detach().index_fill(0, rows, math.nan)
            torch.testing.assert_close(f, e, equal_nan=True, rtol=1e-5, atol=1e-6)
    dx, dw = grads(sum(f.sum() for f in found), x, w)
    wanted, _ = grads(sum(f.sum() for f in first), x, w)
    assert dw.isnan().all()
    if name == "torch":  # it sums over all rows
        assert dx[rows].isnan().all()
    else:
        torch.testing.assert_close(
            dx, wanted.index_fill(0, rows, math.nan), equal_nan=True, rtol=1e-4, atol=1e-6
        )


# ---- the dtype of logits


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("chunk_size", [4, None])
@torch.no_grad()
def test_logits_in_fp32_are_not_rounded(name, chunk_size):
    """Every result of both ops is then as accurate as float32; with logits in bfloat16 none is."""
    skip_unless_usable(LINEAR, name, torch.bfloat16)
    x, w, b, y = problem(T=64, H=32, V=96, dtype=torch.bfloat16)
    y = y.where(y >= 0, 5)
    exact = F.log_softmax(x.double() @ w.double().T + b.double(), -1)
    truth = (
        -exact.gather(1, y[:, None])[:, 0],
        exact.gather(1, y[:, None])[:, 0],
        -(exact.exp() * exact).sum(-1),
    )

    def errors(**options):
        options |= {"bias": b, "chunk_size": chunk_size, "implementation": name}
        found = (
            linear_cross_entropy(x, w, y, reduction="none", **options),
            *linear_logprob(x, w, y, **options),
        )
        return [float((f - t).norm() / t.norm()) for f, t in zip(found, truth, strict=True)]

    assert max(errors(fp32_logits=True)) < 1e-6
    assert min(errors()) > 1e-4


# ---- the dtype in which the weight's gradient is summed


def dw_errors(name, accumulate, chunk_size):
    """Root mean square errors of the gradients of weight and bias, and these gradients. All rows
    have one target, so that sums over chunks grow, where a narrow sum loses precision.
    """
    x, w, b, y = problem(T=256, H=16, V=24, dtype=torch.bfloat16)
    y.fill_(3)
    with torch.no_grad():
        x.add_(1.0)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    truth = grads(by_hand(*exact, y), *exact[1:])
    loss = linear_cross_entropy(
        x, w, y, bias=b, accumulate=accumulate, chunk_size=chunk_size, implementation=name
    )
    found = grads(loss, w, b)
    return [
        float((f - t).square().mean().sqrt() / t.square().mean().sqrt())
        for f, t in zip(found, truth, strict=True)
    ], found


@pytest.mark.parametrize("name", CHUNKED)
def test_fp32_sums_beat_bf16_sums(name):
    skip_unless_usable(LINEAR, name, torch.bfloat16)
    wide, narrow = dw_errors(name, "fp32", 2)[0], dw_errors(name, "bf16", 2)[0]
    assert all(2 * a < b for a, b in zip(wide, narrow, strict=True)), (wide, narrow)
    assert all(a < torch.finfo(torch.bfloat16).eps for a in wide), (
        "as good as one rounding of the sum"
    )


@pytest.mark.parametrize("name", CHUNKED)
def test_one_chunk_needs_no_sum(name):
    """Its GEMM accumulates in float32 whatever `accumulate` is."""
    skip_unless_usable(LINEAR, name, torch.bfloat16)
    (_, wide), (_, narrow) = dw_errors(name, "fp32", 256), dw_errors(name, "bf16", 256)
    assert torch.equal(wide[0], narrow[0])


@pytest.mark.parametrize(
    "accumulate, chunk, dtype",
    [("fp32", 2, torch.float32), ("bf16", 2, torch.bfloat16), ("fp32", 8, torch.bfloat16)],
)
def test_what_is_allocated_for_the_sum(accumulate, chunk, dtype):
    x, w, _, _ = problem(T=8, dtype=torch.bfloat16)
    made = head_of_loss.Sums(x, w, chunk, accumulate == "fp32", 1.0, True, True, True)
    assert made.dw.dtype == dtype and made.dx.dtype == torch.bfloat16


# ---- log-probability and entropy


@pytest.mark.parametrize("temperature, softcap", [(1.0, None), (0.6, 4.0), (2.0, 4.0)])
@pytest.mark.parametrize("name", LOGPROB.names())
def test_logprob_and_entropy_equal_log_softmax(name, temperature, softcap):
    skip_unless_usable(LOGPROB, name, torch.float32)
    x, w, b, y = problem()
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    z = F.linear(*exact)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    log_p = (z / temperature).log_softmax(-1)
    learn = y >= 0
    truth = (
        log_p.gather(-1, y.clamp_min(0)[:, None])[:, 0] * learn,
        -(log_p.exp() * log_p).sum(-1) * learn,
    )
    g = torch.randn(2, 11, device=DEVICE)
    found = linear_logprob(
        x, w, y, bias=b, temperature=temperature, softcap=softcap, chunk_size=4, implementation=name
    )
    for f, t in zip(found, truth, strict=True):
        assert contract.error(f.detach(), t.detach())[0] < 2e-6
    assert not found[0][~learn].any() and not found[1][~learn].any()
    # 1e-5: in the entropy's gradient, p (z - mean), the difference loses digits.
    for which in ((0,), (1,), (0, 1)):  # also each alone: a missing gradient means zeros
        of_found, of_truth = (
            torch.autograd.grad(
                [outs[i] for i in which], leaves, [g[i].to(d) for i in which], retain_graph=True
            )
            for outs, leaves, d in ((found, (x, w, b), g.dtype), (truth, exact, torch.float64))
        )
        for f, t in zip(of_found, of_truth, strict=True):
            assert contract.error(f, t)[0] < 1e-5


@pytest.mark.parametrize("name", LOGPROB.names())
def test_a_certain_token_has_logprob_0_and_hardly_any_entropy(name):
    """Never on the wrong side of 0, where exp(new - old) and a clipped ratio would be wrong."""
    skip_unless_usable(LOGPROB, name, torch.float32)
    w = 100 * torch.eye(8, device=DEVICE)
    logprob, entropy = linear_logprob(
        torch.eye(8, device=DEVICE), w, torch.arange(8, device=DEVICE), implementation=name
    )
    assert (
        not logprob.any() and (entropy >= 0).all() and (entropy < 1e-40).all()
    )  # 7 * 100 exp(-100)


@pytest.mark.parametrize("name", LOGPROB.names())
def test_a_class_that_is_masked_out_leaves_the_gradient_of_the_entropy_finite(name):
    """For any upstream gradient: 0 times the distance of a logit of -inf must be 0."""
    skip_unless_usable(LOGPROB, name, torch.float32)
    x, w, b, y = problem()
    y = y.clamp_min(0)
    masked = b.detach().clone()
    masked[36] = -math.inf
    truth = linear_logprob(x, w[:36], y % 36, bias=b[:36].detach(), implementation="eager")
    found = linear_logprob(x, w, y % 36, bias=masked, implementation=name)
    for f, t in zip(found, truth, strict=True):
        torch.testing.assert_close(f, t)
    g = torch.randn(2, 11, device=DEVICE) * 100
    found, truth = (grads((torch.stack(t) * g).sum(), x)[0] for t in (found, truth))
    assert contract.error(found, truth)[0] < 1e-5


# ---- ignored tokens, the divisor


@pytest.mark.parametrize("name", ["eager", *CHUNKED])
@pytest.mark.parametrize("fn", [linear_cross_entropy, linear_logprob])
def test_ignored_rows_of_x_get_zeros_whatever_they_hold(name, fn):
    """The weight's gradient gets NaN instead, as documented."""
    skip_unless_usable(LINEAR, name, torch.float32)
    x, w, _, y = problem()
    with torch.no_grad():
        x[1] = float("nan")  # ignored by `problem`
    out = fn(x, w, y, implementation=name)
    loss = out if fn is linear_cross_entropy else out[0].sum() + out[1].sum()
    dx, dw = grads(loss, x, w)
    assert loss.isfinite() and dx.isfinite().all() and not dx[1].any() and dx[0].any()
    assert dw.isnan().all()


# ---- results of a module


@pytest.mark.filterwarnings("error")
def test_fsdp2_warns_of_no_view(tmp_path):
    """FSDP2 warns of a module that returns a view, since an in-place operation on it would drop its
    hook.
    """
    from torch.distributed.fsdp import fully_shard

    # NumPy deprecates what the interpreter of an older Triton does.
    warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0")

    class Head(torch.nn.Linear):
        def forward(self, call, x, y):
            return call(x, self.weight, y)

    def logits_too(x, w, y, **options):
        return cross_entropy(F.linear(x, w), y, **options)

    x, y = torch.randn(2, 3, 8), torch.arange(6).view(2, 3)
    join_group(0, 1, tmp_path)
    try:
        head = fully_shard(Head(8, 16), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        for name in ALL:
            if LINEAR.implementation(name).why_not("cpu", torch.float32) is None:
                calls = [
                    functools.partial(fn, reduction=how, implementation=name)
                    for fn in (linear_cross_entropy, logits_too)
                    for how in ("mean", "none")
                ]
                if name in LOGPROB.names():
                    calls.append(functools.partial(linear_logprob, implementation=name))
                for call in calls:
                    outs = contract.leaves(head(call, x, y))
                    assert all(out.requires_grad and out._base is None for out in outs)
                    sum(out.sum() for out in outs).backward()
    finally:
        torch.distributed.destroy_process_group()


# ---- errors

X, W, Y = torch.randn(4, 6), torch.randn(8, 6), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize("bad", [8, -1, 2**40])
def test_target_out_of_range(bad):
    y = torch.zeros(2, 2, dtype=torch.int64)
    y[1] = bad
    said = rf"target\[1, 0\] is {bad}; accepted are 0 to 7 and ignore_index"
    for op in (LINEAR, LOGPROB):
        for name in op.usable("cpu", torch.float32):
            with pytest.raises(IndexError, match=said):
                op.public(X.reshape(2, 2, 6), W, y, implementation=name)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": X[:, :0], "weight": W[:, :0]}, r"x must have shape \[\*T, H\] with H >= 1"),
        ({"weight": W.bfloat16()}, "weight must be x's dtype float32, got bfloat16"),
        ({"weight": W[:, :5]}, r"weight must have shape \[V, H\], where H = 6, got \[8, 5\]"),
        ({"weight": W[:0]}, r"weight must have shape \[V, H\] with V >= 1, got \[0, 6\]"),
        ({"bias": W[0]}, r"bias must have shape \[V\], where V = 8, got \[6\]"),
        ({"target": Y[:3]}, r"target must have shape \[\*T\], where T = \[4\], got \[3\]"),
        ({"group": "tp"}, r"group must be a torch\.distributed\.ProcessGroup.*str"),
    ],
)
@pytest.mark.parametrize("fn", [linear_cross_entropy, linear_logprob])
def test_bad_input_is_one_clear_error(fn, change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fn(**{"x": X, "weight": W, "target": Y, **change})


def test_class_weights_of_another_vocabulary_are_refused():
    with pytest.raises(ValueError, match=r"class_weight must have shape \[8\].*got \[6\]"):
        linear_cross_entropy(X, W, Y, class_weight=W[0])


def test_a_refusal_of_the_dtype_that_autocast_has_made_says_so():
    if reason := LINEAR.implementation("torch").why_not("cpu", torch.float32):
        pytest.skip(reason)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(
            ImplementationUnavailable,
            match=r"^linear_cross_entropy\[torch\]: takes float32, not bfloat16 .*; under "
            r"torch\.autocast, which makes x, weight, bias, lora_A, lora_B bfloat16$",
        ),
    ):
        linear_cross_entropy(X, W, Y, implementation="torch")
    with pytest.raises(ImplementationUnavailable, match=r"not bfloat16 \(usable here: [^)]*\)$"):
        linear_cross_entropy(X.bfloat16(), W.bfloat16(), Y, implementation="torch")


def test_a_cap_that_is_none_in_units_of_the_temperature_is_refused():
    with pytest.raises(
        ValueError, match=r"softcap / temperature must be a finite.*got 1e\+30 / 1e-20"
    ):
        linear_logprob(X, W, Y, softcap=1e30, temperature=1e-20)


# ---- another kind of loss on the head


@pytest.mark.parametrize("name", LOGPROB.names())
def test_a_kind_need_not_know_of_rows_of_nan_that_are_ignored(name):
    """Its derivative there is NaN, and 0 times it, too."""
    skip_unless_usable(LOGPROB, name, torch.float32)

    def kind(stats, valid):
        logprob = stats.picked - stats.log_sum
        return (torch.where(valid == 0, 0.0, -((1 - logprob.exp()) ** 2) * logprob * valid),)

    op = head_of_loss.head_op("probe", lambda: None, kind, ())
    x, w, _, y = problem()
    with torch.no_grad():
        x[1] = math.nan
    assert y[1] == -100
    rows = head_of_loss.HeadRows.of(x, w.detach(), y)
    (loss,) = op.resolve(name, DEVICE)(rows, Scaling(), Wanted())
    (dx,) = torch.autograd.grad(loss.sum(), x)
    assert not dx[1].any() and not dx.isnan().any() and dx.any()
