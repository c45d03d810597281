"""Tests specific to route; parity with the eager twin is in test_contract.py."""

import contextlib
import sys

import pytest
import torch
from helpers import DEVICE, skip_unless_usable, threads

from tilewright.ops import OPS, route
from tilewright.ops.moe.route import round_tokens

ROUTE = OPS["route"]
EVERY = pytest.mark.parametrize("name", ROUTE.names())
FUSED = pytest.mark.parametrize("name", ["triton", "cpp"])
DEEPSEEK = {"score": "sigmoid", "renormalize": True, "groups": 4, "topk_groups": 2, "scale": 2.5}


def logits(T, E, **new):
    return torch.randn(T, E, device=DEVICE, **new)


# ---- routers of other libraries


@pytest.mark.packages
@EVERY
def test_equals_transformers_qwen3_moe(name):
    pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import (
        Qwen3MoeTopKRouter,
        load_balancing_loss_func,
    )

    skip_unless_usable(ROUTE, name, torch.float32)
    config = Qwen3MoeConfig(
        hidden_size=32, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True
    )
    router = Qwen3MoeTopKRouter(config).to(DEVICE)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(40, 32, device=DEVICE)
    out = router(x)
    weight, index = out[-2:]
    found = route(x @ router.weight.t(), 4, renormalize=True, implementation=name)
    assert torch.equal(found.expert_index, index)
    torch.testing.assert_close(found.expert_weight, weight.float())
    loss = load_balancing_loss_func((x @ router.weight.t(),), 16, 4)
    torch.testing.assert_close(found.load_balance_loss, loss)
    torch.testing.assert_close(found.z_loss, (x @ router.weight.t()).logsumexp(-1).square().mean())


@pytest.mark.packages
@EVERY
@pytest.mark.parametrize("k", [1, 2, 5])
def test_balance_loss_and_its_gradient_equal_transformers(name, k):
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    skip_unless_usable(ROUTE, name, torch.float32)
    x = logits(30, 8, requires_grad=True)
    found = route(x, k, implementation=name).load_balance_loss
    truth = load_balancing_loss_func((x.double(),), 8, k)
    torch.testing.assert_close(found, truth.float())
    torch.testing.assert_close(
        torch.autograd.grad(found, x), torch.autograd.grad(truth, x), rtol=1e-4, atol=1e-7
    )


@pytest.mark.packages
@EVERY
def test_equals_transformers_deepseek_v3(name):
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    skip_unless_usable(ROUTE, name, torch.float32)
    experts = {"n_routed_experts": 24, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    options = {"hidden_size": 16, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    router = DeepseekV3TopkRouter(DeepseekV3Config(**experts, **options)).to(DEVICE)
    torch.nn.init.normal_(router.weight, std=0.3)
    router.e_score_correction_bias.copy_(0.1 * torch.randn(24))
    x, weight, index = router(torch.randn(50, 16, device=DEVICE))
    found = route(x, 4, bias=router.e_score_correction_bias, implementation=name, **DEEPSEEK)
    order = found.expert_index.argsort(1)  # theirs is unordered
    assert torch.equal(found.expert_index.gather(1, order), index.sort(1).values)
    torch.testing.assert_close(
        found.expert_weight.gather(1, order), weight.gather(1, index.argsort(1))
    )


# ---- the choice


@EVERY
def test_ties_go_to_the_lower_index(name):
    skip_unless_usable(ROUTE, name, torch.float32)
    x = torch.zeros(3, 40, device=DEVICE)
    x[1, 17::5] = 2
    x[2, ::2] = -0.0
    index = route(x, 6, implementation=name).expert_index.tolist()
    assert index == [[0, 1, 2, 3, 4, 5], [17, 22, 27, 32, 37, 0], [0, 1, 2, 3, 4, 5]]
    x = torch.zeros(1, 12, device=DEVICE)
    x[0, 5], x[0, 8] = 1, 1
    for score in ("softmax", "sigmoid"):  # tied groups, too: 0 and 3
        found = route(x, 4, score=score, groups=4, topk_groups=3, implementation=name)
        assert found.expert_index.tolist() == [[5, 8, 0, 1]]


@EVERY
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_bias_moves_the_choice_and_not_the_weights(name, score, renormalize):
    """Nor their gradients."""
    skip_unless_usable(ROUTE, name, torch.float32)
    x, bias = logits(9, 6, requires_grad=True), torch.zeros(6, device=DEVICE)
    bias[4] = 10
    options = {"score": score, "renormalize": renormalize, "implementation": name}
    found = route(x, 2, bias=bias, **options)
    assert (found.expert_index[:, 0] == 4).all() and found.tokens_per_expert[4] == 9
    s = x.softmax(-1) if score == "softmax" else x.sigmoid()
    expected = s.gather(1, found.expert_index)
    if renormalize:
        expected = expected / expected.sum(1, keepdim=True)
    torch.testing.assert_close(found.expert_weight, expected)
    up = torch.randn_like(expected)
    pair = (torch.autograd.grad(weight, x, up)[0] for weight in (found.expert_weight, expected))
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-6)


@EVERY
def test_excluded_groups_lose_even_to_minus_infinity(name):
    """-inf inside a chosen group ranks above anything outside of it."""
    skip_unless_usable(ROUTE, name, torch.float32)
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 9.0, float("-inf")]], device=DEVICE)
    found = route(x, 2, groups=3, topk_groups=1, implementation=name)
    assert found.expert_index.tolist() == [[4, 5]] and found.expert_weight[0, 1] == 0


@EVERY
def test_saturated_scores_keep_the_order_of_logits(name):
    """sigmoid(20) and sigmoid(30) are both 1 in float32."""
    skip_unless_usable(ROUTE, name, torch.float32)
    x = torch.tensor([[20.0, 30.0, 25.0, -200.0]], device=DEVICE)
    assert route(x, 3, score="sigmoid", implementation=name).expert_index.tolist() == [[1, 2, 0]]


@FUSED
def test_indices_exist_whatever_logits_hold(name):
    skip_unless_usable(ROUTE, name, torch.float32)
    inf, nan = float("inf"), float("nan")
    x = torch.tensor(
        [[nan] * 5, [1, nan, 2, inf, 0], [-inf] * 5, [inf] * 5, [0, 1, 2, 3, 4]], device=DEVICE
    )
    for options in ({}, {"score": "sigmoid"}, {"bias": torch.zeros(5, device=DEVICE)}):
        index = route(x, 3, implementation=name, **options).expert_index
        assert all(len(set(row)) == 3 and 0 <= min(row) <= max(row) < 5 for row in index.tolist())
        assert index[4].tolist() == [4, 3, 2]


@EVERY
def test_weights_of_logits_that_are_not_finite(name):
    skip_unless_usable(ROUTE, name, torch.float32)
    inf, nan = float("inf"), float("nan")
    bad = [[1, nan, 0, 2], [1, inf, 0, 2], [-inf] * 4]
    x = torch.tensor([*bad, [1, -inf, 0, 2]], device=DEVICE)
    for renormalize in (False, True):
        weights = route(x, 2, renormalize=renormalize, implementation=name).expert_weight
        assert weights[:3].isnan().all() and weights[3].isfinite().all()
        options = {"renormalize": renormalize, "implementation": name}
        weights = route(x, 2, score="sigmoid", **options).expert_weight
        chosen = [[nan, 2.0], [inf, 2.0], [-inf, -inf], [2.0, 1.0]]
        scores = torch.sigmoid(torch.tensor(chosen, device=DEVICE))
        expected = scores / (scores.sum(-1, keepdim=True) + 1e-20) if renormalize else scores
        torch.testing.assert_close(weights, expected, equal_nan=True)


# ---- gradients


@EVERY
def test_counts_and_indices_are_not_differentiable(name):
    skip_unless_usable(ROUTE, name, torch.float32)
    found = route(logits(5, 4, requires_grad=True), 2, implementation=name)
    assert [t.requires_grad for t in found] == [False, True, False, True, True]
    integer, real = torch.int64, torch.float32
    assert [t.dtype for t in found] == [integer, real, integer, real, real]


@EVERY
def test_no_tokens_have_no_loss(name):
    skip_unless_usable(ROUTE, name, torch.float32)
    x = logits(0, 4, requires_grad=True)
    found = route(x, 2, implementation=name)
    assert found.load_balance_loss == 0 and found.z_loss == 0
    assert found.tokens_per_expert.tolist() == [0] * 4
    assert torch.autograd.grad(found.load_balance_loss + found.z_loss, x)[0].shape == (0, 4)


@FUSED
def test_tokens_beyond_one_step_of_a_program(name, monkeypatch):
    """Sums over tokens in several steps and several programs, and in chunks."""
    skip_unless_usable(ROUTE, name, torch.float32)
    small = contextlib.nullcontext()
    if name == "triton":
        from tilewright.kernels.moe import route_triton

        monkeypatch.setattr(route_triton, "PROGRAMS", 3)
        small = route_triton.FORWARD.override(
            torch.zeros(0, device=DEVICE).device, (16,), {"ROWS": 16, "num_warps": 4}
        )
    with small:
        for T in (100, 129, 700):
            x = logits(T, 12)
            found = route(x, 2, implementation=name)
            truth = route(x.double(), 2, implementation="eager")
            assert torch.equal(found.expert_index, truth.expert_index)
            assert torch.equal(found.tokens_per_expert, truth.tokens_per_expert)
            for f, t in zip(found[3:], truth[3:], strict=True):
                torch.testing.assert_close(f, t.float(), rtol=1e-6, atol=0)


def test_the_same_bits_on_any_number_of_threads():
    skip_unless_usable(ROUTE, "cpp", torch.float32)
    x = logits(500, 48, requires_grad=True)
    found = []
    for n in (1, 2):
        with threads(n):
            out = route(x, 4, renormalize=True, implementation="cpp")
            loss = out.expert_weight.square().sum() + out.load_balance_loss + out.z_loss
            found.append([*out, *torch.autograd.grad(loss, x)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ---- token rounding


def rounded_by_hand(index, weight, E, M):
    index, weight = index.clone(), weight.clone()
    for e in range(E):
        slots = [(-float(weight[t, k]), t, k) for t, k in (index == e).nonzero().tolist()]
        for _, t, k in sorted(slots)[len(slots) // M * M :]:
            index[t, k], weight[t, k] = E, 0
    return index, weight


@EVERY
@pytest.mark.parametrize("M", [1, 4, 16, 1000])
def test_rounding_keeps_each_experts_best_tokens(name, M):
    skip_unless_usable(ROUTE, name, torch.float32)
    x = logits(60, 5).mul(2).round().requires_grad_()  # few distinct values give equal weights
    plain, found = route(x, 2, implementation=name), route(x, 2, round_to=M, implementation=name)
    index, weight = rounded_by_hand(plain.expert_index, plain.expert_weight.detach(), 5, M)
    assert torch.equal(found.expert_index, index) and torch.equal(found.expert_weight, weight)
    assert torch.equal(found.tokens_per_expert, torch.bincount(index.flatten(), minlength=6)[:5])
    assert (found.tokens_per_expert % M == 0).all()
    assert torch.equal(
        found.load_balance_loss, plain.load_balance_loss
    )  # of the choice before rounding
    up = torch.randn(60, 2, device=DEVICE)
    dropped = torch.autograd.grad(found.expert_weight, x, up)[0]
    same = torch.autograd.grad(plain.expert_weight, x, torch.where(index < 5, up, 0))[0]
    assert torch.equal(dropped, same)


def test_rounding_of_nothing():
    none = torch.zeros(0, 2)
    index, weight, kept = round_tokens(none.long(), none, torch.zeros(3).long(), 4)
    assert index.shape == weight.shape == (0, 2) and kept.tolist() == [0, 0, 0]


# ---- bad input

X = torch.randn(3, 8)


@pytest.mark.parametrize(
    "args, options, message",
    [
        ((X[:, :0], 1), {}, r"logits .* with 1 <= E <= 4096, got \[3, 0\]"),
        ((torch.randn(1, 4097), 1), {}, r"1 <= E <= 4096, got \[1, 4097\]"),
        ((X, 9), {}, r"k must be .*, where topk_groups = 1, E = 8, groups = 1, got 9"),
        ((X, 0), {}, "k must be an int in .* got 0"),
        ((X, 5), {"groups": 4, "topk_groups": 2}, "k must be an int in .* got 5"),
        ((X, 2), {"groups": 3}, "groups must be such that E % groups == 0, where E = 8, got 3"),
        ((X, 2), {"groups": 9}, r"groups must be an int in \[1, E\], where E = 8, got 9"),
        ((X, 2), {"groups": 4, "topk_groups": 5}, r"topk_groups must .*, where groups = 4, got 5"),
        ((X, 2), {"bias": torch.zeros(7)}, r"bias .* \[E\], where E = 8, got \[7\]"),
        ((X.double(), 2), {"bias": torch.zeros(8)}, "bias must be float64 for float64 logits, got"),
        ((X, 2), {"implementation": "c"}, r"implementation 'c'; have \['auto', 'triton'"),
    ],
)
def test_bad_input_is_one_clear_error(args, options, message):
    with pytest.raises(TypeError if "float64" in message else ValueError, match=message):
        route(*args, **options)


def test_cpp_operators_themselves_check_every_tensor():
    """Below the public function's checks."""
    skip_unless_usable(ROUTE, "cpp", torch.float32)
    ROUTE.resolve("cpp", "cpu")
    ops, options = torch.ops.tilewright, (False, False, 1, 1, 1.0)
    given = {"logits": X, "bias": None, "recorded": None, "k": 2, "groups": 1}

    def forward(**changes):
        logits, bias, recorded, k, groups = {**given, **changes}.values()
        return ops.route_cpp_forward(logits, bias, recorded, k, False, False, groups, *options[3:])

    weight, index, counts, balance, z = forward()
    saved = {"g_weight": weight, "balance": balance, "z": z, "logits": X}
    saved |= {"index": index, "counts": counts, "k": 2}

    def backward(**changes):
        return ops.route_cpp_backward(*{**saved, **changes}.values(), *options)

    for call, wrong, message in (
        (forward, {"logits": X.t()}, "logits must be a CPU matrix"),
        (forward, {"logits": X.half()}, "take float32 and bfloat16"),
        (forward, {"bias": torch.zeros(7)}, "bias has the wrong dtype or size"),
        (forward, {"k": 9}, "do not fit 8 experts"),
        (forward, {"groups": 3}, "do not fit 8 experts"),
        (forward, {"recorded": index[:1]}, "recorded has the wrong dtype or size"),
        (backward, {"index": index + 7}, "index must be below 8, got"),
        (backward, {"index": index.int()}, "index has the wrong dtype"),
        (backward, {"g_weight": weight[:2]}, "g_weight has the wrong dtype or size"),
        (backward, {"counts": counts[1:]}, "counts must|counts has the wrong"),
        (backward, {"k": 3}, "index has the wrong dtype or size"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(**wrong)


# ---- replay of a recorded choice


@pytest.mark.parametrize("name", ROUTE.names())
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_replay_of_an_own_choice_changes_nothing(name, score):
    skip_unless_usable(ROUTE, name, torch.float32)
    g = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(40, 16, device=DEVICE, generator=g, requires_grad=True)
    options = {"score": score, "renormalize": True, "scale": 2.5, "implementation": name}
    first = route(x, 3, bias=torch.randn(16, device=DEVICE) / 9, **options)
    again = route(x, 3, expert_index=first.expert_index.int(), **options)
    for f, a in zip(first, again, strict=True):
        assert torch.equal(f, a)
    upstream = torch.randn(40, 3, device=DEVICE, generator=g)
    gradients = [
        torch.autograd.grad((r.expert_weight * upstream).sum() + r.load_balance_loss, x)[0]
        for r in (first, again)
    ]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", ROUTE.names())
def test_a_replayed_choice_has_todays_weights(name):
    skip_unless_usable(ROUTE, name, torch.float32)
    x = torch.tensor([[0.0, 3.0, 1.0, 2.0]], device=DEVICE, requires_grad=True)
    found = route(x, 2, expert_index=torch.tensor([[2, 0]], device=DEVICE), implementation=name)
    torch.testing.assert_close(found.expert_weight, x.softmax(-1)[:, [2, 0]])
    assert found.expert_index.tolist() == [[2, 0]]
    assert found.tokens_per_expert.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradients_of_a_replayed_choice(score):
    """gradcheck, and the largest gradient where the choice is not the router's."""
    g = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(5, 6, dtype=torch.float64, device=DEVICE, generator=g, requires_grad=True)
    index = x.detach().argsort(-1)[:, :2]  # the worst experts

    def outputs(x):
        options = {"score": score, "renormalize": True, "scale": 2.5, "implementation": "eager"}
        found = route(x, 2, expert_index=index, **options)
        return found.expert_weight, found.load_balance_loss, found.z_loss

    assert torch.autograd.gradcheck(outputs, x)
    [weight, *_] = outputs(x)
    [gradient] = torch.autograd.grad(weight[:, 0].sum(), x)
    assert (gradient.gather(1, index) != 0).all()


@EVERY
def test_a_slot_that_cannot_be_replayed_is_nan_where_nothing_is_read(name, monkeypatch):
    """On a GPU, and in compiled code, no value is checked."""
    skip_unless_usable(ROUTE, name, torch.float32)
    module = sys.modules["tilewright.ops.moe.route"]
    monkeypatch.setattr(module, "_recorded", lambda index, E: index)
    x = torch.randn(4, 4, device=DEVICE)
    index = torch.tensor([[1, 4], [-1, 2], [3, 3], [2**32 + 1, 0]], device=DEVICE)
    found = route(x, 2, renormalize=True, expert_index=index, implementation=name)
    wrong = torch.tensor([[0, 1], [1, 0], [1, 0], [1, 0]], dtype=torch.bool, device=DEVICE)
    assert torch.equal(found.expert_weight.isnan(), wrong)
    torch.testing.assert_close(found.expert_weight[~wrong], torch.ones(4, device=DEVICE))
    assert found.expert_index.tolist() == [[1, 0], [0, 2], [0, 3], [0, 0]]
    assert found.tokens_per_expert.tolist() == [1, 1, 1, 1]


@EVERY
def test_a_replay_has_no_bias_and_no_groups(name):
    skip_unless_usable(ROUTE, name, torch.float32)
    x, index = torch.randn(9, 8, device=DEVICE), torch.tensor([[7, 0]] * 9, device=DEVICE)
    options = {"score": "sigmoid", "expert_index": index, "implementation": name}
    plain = route(x, 2, **options)
    limited = route(x, 2, groups=4, bias=torch.randn(8, device=DEVICE), **options)
    for p, t in zip(plain, limited, strict=True):
        assert torch.equal(p, t)
    rounded = route(x, 2, round_to=4, **options)
    assert rounded.tokens_per_expert.tolist() == [8, 0, 0, 0, 0, 0, 0, 8]


@pytest.mark.parametrize(
    "index, error, message",
    [
        (
            torch.tensor([[0]]),
            ValueError,
            r"expert_index must have shape \[T, k\], where T = 1, k = 2, got \[1, 1\]",
        ),
        (torch.tensor([[0, 4]]), IndexError, "expert_index holds 4; accepted are 0 to 3"),
        (torch.tensor([[0, -1]]), IndexError, "expert_index holds -1; accepted are 0 to 3"),
        (torch.tensor([[1, 1]]), ValueError, "must hold distinct experts in each row"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(index, error, message):
    with pytest.raises(error, match=message):
        route(torch.randn(1, 4), 2, expert_index=index)
