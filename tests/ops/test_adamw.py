"""AdamW over many tensors: torch's numbers, states in bfloat16, compensation, bad input."""

import pytest
import torch
from helpers import DEVICE, skip_unless_usable

from tilewright.core.registry import short
from tilewright.ops import adamw_
from tilewright.ops.optim.adamw import ADAMW, LISTS

IMPLEMENTATIONS = pytest.mark.parametrize("name", ADAMW.names())
F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(33, 5), (7,), (), (0, 3), (2, 3, 4), (5000,)]


def draw(dtype=F32, seed=0, scale=1.0, shapes=SHAPES):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(s or (), generator=g) * scale).to(dtype).to(DEVICE) for s in shapes]


def zeros(like, dtype):
    return [torch.zeros_like(t, dtype=dtype) for t in like]


@IMPLEMENTATIONS
def test_is_torchs_adamw(name):
    skip_unless_usable(ADAMW, name, F32)
    options = {"lr": 1e-2, "betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.1}
    ours, theirs = draw(), [torch.nn.Parameter(p) for p in draw()]
    m, v = zeros(ours, F32), zeros(ours, F32)
    torchs = torch.optim.AdamW(theirs, **options)
    for step in range(1, 6):
        grads = draw(seed=step, scale=10.0**-step)
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g
        torchs.step()
        found = adamw_(ours, grads, m, v, step=step, implementation=name, **options)
    for mine, passed in zip(found, (ours, m, v), strict=True):
        assert all(a is b for a, b in zip(mine, passed, strict=True))  # in place
    for i, p in enumerate(theirs):
        torch.testing.assert_close(ours[i], p.detach(), rtol=2e-6, atol=2e-7)
        for mine, key in ((m, "exp_avg"), (v, "exp_avg_sq")):
            torch.testing.assert_close(mine[i], torchs.state[p][key], rtol=2e-6, atol=1e-9)


@IMPLEMENTATIONS
@pytest.mark.parametrize("beta", [0.0, 1e-3, 0.4, 0.5, 0.9])
def test_the_first_moment_keeps_the_digits_of_both_ends(name, beta):
    """Gradients are far below the moments, and above them."""
    skip_unless_usable(ADAMW, name, F32)
    m = torch.full((4,), 1 / 3, device=DEVICE)
    g = torch.tensor([1e-7, -1e-2, 1e3, 1e7], device=DEVICE) / 3
    wanted = beta * m.double() + (1 - beta) * g.double()
    v, p = torch.ones_like(m), torch.ones_like(m)
    adamw_([p], [g], [m], [v], step=2, lr=1e-2, betas=(beta, 0.9), implementation=name)
    # Both terms are rounded.
    torch.testing.assert_close(m.double(), wanted, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("name", ["eager", "cpp"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=short)
def test_states_in_bfloat16_are_rounded_once(name, dtype):
    """The update uses the moments before that: one step is that of states in float32."""
    skip_unless_usable(ADAMW, name, dtype)
    p, g, m, v = draw(dtype), draw(dtype, 1), draw(BF16, 2, 0.1), draw(BF16, 3, 0.1)
    v = [t.abs() for t in v]
    wide = [[t.clone() for t in p], [t.float() for t in m], [t.float() for t in v]]
    adamw_(wide[0], g, wide[1], wide[2], step=4, lr=0.1, implementation=name)
    adamw_(p, g, m, v, step=4, lr=0.1, implementation=name)
    for a, b in zip(p, wide[0], strict=True):
        assert torch.equal(a, b)
    for states, wanted in ((m, wide[1]), (v, wide[2])):
        for a, b in zip(states, wanted, strict=True):
            assert a.dtype == BF16 and torch.equal(a, b.to(BF16))


@IMPLEMENTATIONS
def test_compensation_keeps_what_rounding_cuts_off(name):
    """Steps of a twentieth of the last place: alone they are lost, summed they are not."""
    dtype = F32 if name == "triton" and DEVICE == "cpu" else BF16
    skip_unless_usable(ADAMW, name, dtype)
    lr = 1e-9 if dtype == F32 else 1e-4
    options = {"lr": lr, "betas": (0.0, 0.0), "eps": 1e-12, "weight_decay": 0.0}
    options |= {"implementation": name}
    n = 50
    p, kahan = (torch.ones(40, dtype=dtype, device=DEVICE) for _ in range(2))
    g, c = torch.ones_like(p), torch.zeros_like(p)
    for step in range(1, n + 1):
        for q, rest in ((p, None), (kahan, [c])):
            m, v = ([torch.zeros_like(q, dtype=F32)] for _ in range(2))
            adamw_([q], [g], m, v, rest, step=step, **options)
    assert (p == 1).all()
    total = kahan.double() + c.double()
    torch.testing.assert_close(total, torch.full_like(total, 1 - n * lr), rtol=0, atol=n * lr / 20)


@IMPLEMENTATIONS
def test_gradients_of_any_strides_and_dtype(name):
    skip_unless_usable(ADAMW, name, F32)
    g = torch.randn(40, 30, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    results = []
    for grad in (g, g.mT.contiguous().mT, g.to(BF16) if name != "triton" else g):
        p, m, v = (torch.ones(40, 30, device=DEVICE) for _ in range(3))
        results.append(adamw_([p], [grad], [m], [v], step=2, lr=0.1, implementation=name)[0][0])
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], results[2], rtol=1e-2, atol=1e-3)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [F32, torch.float64, torch.int32, torch.int64], ids=short)
def test_a_step_in_a_tensor_is_read_at_each_call(name, dtype):
    """As in a CUDA graph, which is captured once: the tensor is counted up in place."""
    skip_unless_usable(ADAMW, name, F32)
    results, counter = [], torch.zeros((), dtype=dtype, device=DEVICE)
    for counted in (False, True):
        p, m, v = draw(), zeros(draw(), F32), zeros(draw(), F32)
        for step in range(1, 4):
            counter.fill_(step)
            given = counter if counted else step
            adamw_(p, draw(seed=step), m, v, step=given, lr=0.1, implementation=name)
        results.append((p, m, v))
    assert counter == 3
    # The corrections, of about 1, have a few roundings of float32.
    torch.testing.assert_close(*results, rtol=1e-6, atol=2e-7)


@IMPLEMENTATIONS
def test_tensors_off_sixteen_bytes(name):
    skip_unless_usable(ADAMW, name, F32)
    results = []
    for offset in (0, 1):
        memory = [torch.zeros(2060, device=DEVICE)[offset : offset + 2055] for _ in range(4)]
        for t, value in zip(memory, draw(shapes=[(2055,)] * 4), strict=True):
            t.copy_(value.abs())
        p, g, m, v = ([t] for t in memory)
        adamw_(p, g, m, v, step=2, lr=0.1, implementation=name)
        results.append(p[0])
    assert torch.equal(*results)


def test_no_tensors():
    assert adamw_([], [], [], [], step=1, lr=0.1) == ([], [], [])


GOOD = {"step": 1, "lr": 0.1}


TENSOR = torch.ones(2, 3)


@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        ({"grads": []}, ValueError, "grads must have as many tensors as params, 1, got 0"),
        ({"exp_avgs": [torch.ones(3)]}, ValueError, r"exp_avgs\[0\] must have shape \[2, 3\]"),
        (
            {"exp_avgs": [TENSOR.half()], "exp_avg_sqs": [TENSOR.half()]},
            TypeError,
            "must be float32 or bfloat16, both of one dtype, got torch.float16",
        ),
        (
            {"exp_avg_sqs": [TENSOR.bfloat16()]},
            TypeError,
            "one dtype, got torch.float32 and torch.b",
        ),
        ({"params": [torch.ones(3, 2).mT]}, ValueError, r"params\[0\] must be contiguous, got str"),
        ({"compensations": [TENSOR.double()]}, TypeError, r"compensations\[0\] must be torch.flo"),
        ({"params": [TENSOR.int()]}, TypeError, r"params\[0\] must be one of"),
        (
            {"step": torch.ones((), device="meta")},
            ValueError,
            r"step is on meta, params\[0\] on cpu",
        ),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] must be at least 0 and below 1, got 1.0"),
    ],
)
def test_bad_input(changes, error, sentence):
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    given = {n: [torch.ones(2, 3)] for n in names} | GOOD | changes
    with pytest.raises(error, match=sentence):
        adamw_(**given)


def test_tensors_that_share_memory_are_refused_where_one_is_overwritten():
    memory = torch.zeros(40, device=DEVICE)

    def given(**changes):
        lists = {n: draw(seed=i, shapes=[(4,), (4,)]) for i, n in enumerate(LISTS[:5])}
        return {**lists, **changes}

    p = draw(shapes=[(4,)])[0]
    copy = draw(BF16, shapes=[(4,)])[0]
    with pytest.raises(ValueError, match=r"^copies\[1\] must not share memory with copies\[0\]"):
        adamw_(**given(copies=[copy, copy]), step=1, lr=0.1)
    for name in LISTS[:5]:
        if name != "grads":
            with pytest.raises(ValueError, match=rf"^{name}\[1\] must not share .* {name}\[0\]:"):
                adamw_(**given(**{name: [p, p]}), step=1, lr=0.1)
            twins = [p, torch.nn.Parameter(p)]
            with pytest.raises(ValueError, match="must not share memory"):
                adamw_(**given(**{name: twins}), step=1, lr=0.1)
            for at in (3, 0):
                views = [memory[:4], memory[at : at + 4]]
                with pytest.raises(ValueError, match="must not share memory"):
                    adamw_(**given(**{name: views}), step=1, lr=0.1)
        for other in LISTS[:5]:
            if other != name:
                shared = given()
                shared[other] = [shared[name][1], shared[other][1]]
                with pytest.raises(ValueError, match="must not share memory"):
                    adamw_(**shared, step=1, lr=0.1)
    # One gradient of two, another view's end, and tensors without elements are apart.
    parts = memory.split(4)
    adamw_(**given(params=parts[:2], grads=[p, p], exp_avgs=parts[2:4]), step=1, lr=0.1)
    empty = given()
    for n in LISTS[:5]:
        empty[n] = [t[4:] for t in empty["params"]]
    adamw_(**empty, step=1, lr=0.1)


def test_gradients_of_other_dtypes_and_betas_that_are_not_two():
    for dtype in (torch.float16, torch.float64):
        for name in ("eager", "auto"):
            given, found = torch.linspace(-1, 1, 5, dtype=dtype), []
            for g in (given, given.float()):
                p, m, v = torch.ones(5), torch.zeros(5), torch.zeros(5)
                adamw_([p], [g], [m], [v], step=1, lr=0.1, implementation=name)
                found.append((p, m, v))
            torch.testing.assert_close(*found, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"betas must be two numbers, got \(0.9,\)"):
        adamw_([p], [p], [m], [v], step=1, lr=0.1, betas=(0.9,))
