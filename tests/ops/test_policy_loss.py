"""Tests specific to linear_policy_loss and its formulas. Parity with the eager twin is in
test_contract.py.
"""

import itertools
import math

import pytest
import torch
from helpers import DEVICE, skip_unless_usable

from tilewright.ops import (
    CISPO,
    DPO,
    GSPO,
    OPD,
    OPS,
    PPO,
    DrGRPO,
    GuardedPPO,
    HeadOptions,
    ImportanceSampling,
    PairedAnswers,
    Reinforce,
    SampledTokens,
    linear_logprob,
    linear_policy_loss,
    linear_preference_loss,
)
from tilewright.ops.loss import head, policy
from tilewright.ops.loss.documents import Documents
from tilewright.ops.loss.policy import FORMULAS, Options, Tokens

OP = OPS["linear_policy_loss"]
NAMES = OP.names()
F64 = torch.float64
LP, OLD, A = (
    torch.tensor(values, dtype=F64)
    for values in (
        [-1.0, -2.0, -0.5, -3.0, -0.1],
        [-1.3, -1.2, -0.6, -2.9, -2.0],
        [1.5, -0.5, -2.0, 0.0, -0.7],
    )
)
REF, ROLLOUT, TEACHER = LP - 0.4, OLD + torch.tensor([0.2, -1.5, 3.0, 0.0, 0.1]), LP + 0.3
CU = torch.tensor([0, 2, 2, 5])


def tokens(lp=LP, valid=None, **given):
    valid = torch.ones_like(lp) if valid is None else valid
    documents = Documents.of(CU, 5)
    own = Tokens(lp, valid, A, OLD, ROLLOUT, REF, TEACHER, documents=documents)
    return own._replace(**given)


def by_hand(loss):
    """The loss of each token, in Python's numbers."""
    name, o = loss.name, loss.options
    lp, old, adv, ref, out = (t.tolist() for t in (LP, OLD, A, REF, ROLLOUT))
    teacher = TEACHER.tolist()
    ends = CU.tolist()
    mean = [
        sum(lp[i] - old[i] for i in range(a, b)) / (b - a)
        for t in range(5)
        for a, b in itertools.pairwise(ends)
        if a <= t < b
    ]

    def clip(r):
        return min(max(r, o.clip_low_threshold), o.clip_high_threshold)

    def surrogate(r, a):
        return -min(r * a, clip(r) * a)

    def kl(d):
        return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[o.kl_type]

    def of(i):
        r, s, a = math.exp(lp[i] - old[i]), math.exp(mean[i]), adv[i]
        if name == "policy_loss":
            loss = surrogate(r, a)
            if o.dual_clip and a < 0:
                loss = min(loss, -o.dual_clip * a)
            if o.icepop_beta and not 1 / o.icepop_beta <= r <= o.icepop_beta:
                loss = 0.0
            weight = min(max(math.exp(old[i] - out[i]), o.tis_clip_low), o.tis_clip_high)
            return loss * weight if o.use_tis else loss
        return {
            "reinforce": -lp[i] * a,
            "importance_sampling": -r * a,
            "ppo": surrogate(r, a),
            "cispo": -clip(r) * lp[i] * a,
            "dro": -(lp[i] * a - o.beta / 2 * (lp[i] - old[i]) ** 2),
            "gspo": surrogate(s, a),
            "dr_grpo": surrogate(s if o.ratio_type == "sequence" else r, a)
            + o.beta * kl(lp[i] - ref[i]),
            "opd": r * (lp[i] - teacher[i]),
        }[name]

    return torch.tensor([of(i) for i in range(5)], dtype=F64)


VARIANTS = [
    *(formula() for formula in FORMULAS.values()),
    PPO(clip_low_threshold=0.5, clip_high_threshold=1.35),
    PPO(clip=0.4),
    *(DrGRPO(beta=0.3, kl_type=kl) for kl in policy.KL_TYPES),
    DrGRPO(ratio_type="sequence"),
    GuardedPPO(dual_clip=2.5),
    GuardedPPO(use_tis=True, tis_clip_high=1.1),
    GuardedPPO(icepop_beta=1.5),
    GuardedPPO(dual_clip=2.5, use_tis=True, icepop_beta=2.0),
]
EVERY = pytest.mark.parametrize("o", VARIANTS, ids=repr)


@EVERY
def test_a_formula_is_its_arithmetic_and_a_slope_its_derivative(o):
    lp = LP.clone().requires_grad_()
    found = policy.losses(o, tokens(lp))
    torch.testing.assert_close(found.detach(), by_hand(o), rtol=1e-14, atol=0)
    assert o.of(o.options) == o
    weight = torch.tensor([1.0, 0.5, -2.0, 0.0, 3.0], dtype=F64)
    weighted = policy.losses(o, tokens(token_weight=weight))
    torch.testing.assert_close(weighted, by_hand(o) * weight, rtol=1e-14, atol=0)
    if o.by_token:
        [slope] = torch.autograd.grad(found.sum(), lp)
        torch.testing.assert_close(policy.slopes(o, tokens()), slope, rtol=1e-14, atol=0)
        weighted = policy.slopes(o, tokens(token_weight=weight))
        torch.testing.assert_close(weighted, slope * weight, rtol=1e-14, atol=0)
    else:
        assert torch.autograd.gradcheck(lambda t: policy.losses(o, tokens(t)).sum(), lp)


@pytest.mark.parametrize("o", [GSPO(), DrGRPO(ratio_type="sequence")], ids=repr)
def test_ratios_of_documents_that_are_known_change_no_bit(o):
    found = []
    for known in (False, True):
        lp = LP.clone().requires_grad_()
        t = tokens(lp)
        t = t._replace(valid=t.valid.clone().index_fill_(0, torch.tensor([1]), 0))
        t = t.with_ratio() if known else t
        loss = policy.losses(o, t)
        [grad] = torch.autograd.grad(loss.sum(), lp)
        found.append((loss, grad, *policy.statistics(o, t).values()))
    assert all(map(torch.equal, *found))


# What autograd and finite differences call the derivative where the formula has no constant.
@pytest.mark.parametrize("name", ["reinforce", "importance_sampling", "ppo", "dro", "dr_grpo"])
def test_gradients_are_those_of_finite_differences(name):
    o = FORMULAS[name](**{"beta": 0.3} if name in ("dro", "dr_grpo") else {})
    lp = LP.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: policy.losses(o, tokens(t)), lp)


EXTREME = [-1e30, -1e4, -200.0, -89.0, -1.0, -1e-3, 0.0]


@EVERY
def test_what_is_finite_stays_so_though_a_ratio_overflows(o):
    """In float32 against float64, each token a document: 0 times infinity is 0 where the advantage
    is, and where a ratio is clipped, masked or limited.
    """
    lp, old, advantage = (
        torch.tensor(values)
        for values in zip(*itertools.product(EXTREME, EXTREME, [-2.0, 0.0, 2.0]), strict=True)
    )

    def found(dtype):
        leaf = lp.to(dtype).requires_grad_()
        others = {"advantage": advantage} | dict.fromkeys(
            ("old_logprob", "rollout_logprob", "teacher_logprob"), old
        )
        t = tokens(
            leaf,
            documents=Documents.of(torch.arange(len(lp) + 1), len(lp)),
            ref_logprob=leaf.detach() + 0.5,
            **{n: v.to(dtype) for n, v in others.items()},
        )
        loss = policy.losses(o, t)
        results = [loss.detach(), *torch.autograd.grad(loss.sum(), leaf)]
        if o.by_token:
            slope = policy.slopes(o, t._replace(logprob=leaf.detach()))
            torch.testing.assert_close(slope, results[1], equal_nan=True)
        return results

    narrow, wide = found(torch.float32), found(F64)
    for f, t in zip(narrow, wide, strict=True):
        finite = t.float().isfinite()
        assert finite.any() and not f[finite].isnan().any()
        torch.testing.assert_close(f[finite], t.float()[finite], rtol=1e-3, atol=1e-6)


def test_constants_have_no_gradient():
    """cispo's ratio, the weight of truncated importance sampling, tokens that IcePop masks, and the
    log-ratio to a teacher.
    """
    r, own = (LP - OLD).exp(), tokens()
    cispo = policy.slopes(CISPO(), own)
    torch.testing.assert_close(cispo, -r.clamp(0, 4) * A, rtol=1e-14, atol=0)
    plain = policy.slopes(GuardedPPO(), own)
    masked = policy.slopes(GuardedPPO(icepop_beta=1.5), own)
    outside = (r > 1.5) | (r < 1 / 1.5)
    assert outside.any() and not outside.all()
    assert torch.equal(masked, torch.where(outside, 0.0, plain))
    weight = (OLD - ROLLOUT).exp().clamp(0.1, 2)
    assert set(weight.tolist()) & {0.1, 2.0}
    assert torch.equal(policy.slopes(GuardedPPO(use_tis=True), own), plain * weight)
    torch.testing.assert_close(policy.slopes(OPD(), own), r * (LP - TEACHER), rtol=1e-14, atol=0)


@pytest.mark.parametrize("use_tis", [False, True])
def test_icepop_leaves_nothing_of_tokens_outside_of_its_band(use_tis):
    """On both sides, and for advantages of both signs; the bounds are inside."""
    o = GuardedPPO(
        icepop_beta=2.0, use_tis=use_tis, clip_low_threshold=0.0, clip_high_threshold=9.0
    )
    r = torch.tensor([0.4, 0.49, 0.51, 1.0, 1.9, 2.1, 5.0], dtype=F64).repeat(2)
    adv = torch.tensor([1.5] * 7 + [-0.5] * 7, dtype=F64)
    lp = r.log().requires_grad_()
    zeros = torch.zeros_like(r)
    t = Tokens(lp, zeros + 1, adv, zeros, zeros + 0.3)
    inside = (r > 0.5) & (r < 2.0)
    want = torch.where(inside, -r * adv, 0.0) * (math.exp(-0.3) if use_tis else 1.0)
    found = policy.losses(o, t)
    torch.testing.assert_close(found.detach(), want, rtol=1e-14, atol=0)
    [slope] = torch.autograd.grad(found.sum(), lp)
    torch.testing.assert_close(slope, want, rtol=1e-14, atol=0)
    torch.testing.assert_close(policy.slopes(o, t), want, rtol=1e-14, atol=0)
    edge = torch.zeros(2, dtype=F64)
    at = Tokens(edge, edge + 1, edge + 1, edge)
    assert policy.losses(GuardedPPO(icepop_beta=1.0), at).tolist() == [-1, -1]


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_icepop_of_hidden_states_is_that_of_the_tokens_inside(name, reduction):
    """The loss and its gradients, in both ways of computing them."""
    skip_unless_usable(OP, name, torch.float32)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 8, generator=generator) for n in (6, 11))
    target = torch.randint(11, (6,), generator=generator)
    lp = linear_logprob(x, weight, target, implementation="eager")[0]
    advantage = torch.tensor([1.0, 1, 1, -2, -2, -2])
    old = lp - torch.tensor([0.2, 1.0, 3.0] * 2).log()
    kept = torch.where(torch.tensor([False, True, False] * 2), target, -100)
    found = []
    for targets, loss in ((target, GuardedPPO(icepop_beta=2.0)), (kept, GuardedPPO())):
        own = [t.to(DEVICE).clone().requires_grad_() for t in (x, weight)]
        sampled = SampledTokens(*(t.to(DEVICE) for t in (targets, advantage, old)))
        value = linear_policy_loss(
            *own, sampled, loss, reduction=reduction, implementation=name
        ).loss
        found.append((value.detach(), *torch.autograd.grad(value.sum(), own)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert found[0][0].any()


def test_a_ratio_at_a_threshold_still_learns_and_one_beyond_does_not():
    one = torch.zeros(3, dtype=F64)
    at = Tokens(one, one + 1, torch.tensor([1.0, -1.0, 0.0], dtype=F64), one)
    for edge in ({"clip_high_threshold": 1.0}, {"clip_low_threshold": 1.0}):
        o = PPO(**edge)
        assert policy.slopes(o, at).tolist() == [-1, 1, 0]
        lp = one.clone().requires_grad_()
        loss = policy.losses(o, at._replace(logprob=lp))
        assert torch.autograd.grad(loss.sum(), lp)[0].tolist() == [-1, 1, 0]
    beyond = PPO(clip_low_threshold=0.5, clip_high_threshold=0.9)
    assert policy.slopes(beyond, at).tolist() == [0, 1, 0]


@pytest.mark.parametrize("name", ["importance_sampling", "dro", "cispo", "gspo"])
def test_an_infinite_or_missing_old_log_probability_comes_out_as_such(name):
    o, old = FORMULAS[name](), OLD.clone()
    old[0], old[3] = float("-inf"), float("nan")
    t = tokens(old_logprob=old)
    if name == "gspo":  # of the document
        t = t._replace(documents=Documents.of(torch.tensor([0, 1, 3, 5]), 5))
    found = policy.losses(o, t)
    assert found[3].isnan() and found[1:3].isfinite().all()
    if name != "cispo" and name != "gspo":  # whose ratios are clipped
        assert found[0].isinf()
    ignored = policy.losses(o, t._replace(valid=torch.isfinite(old).to(F64)))
    assert ignored[[0, 3]].tolist() == [0, 0] and ignored.isfinite().all()


def test_statistics_are_means_over_the_tokens_that_are_not_ignored():
    valid = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=F64)
    old = OLD.masked_fill(valid == 0, float("nan"))
    t = tokens(valid=valid, old_logprob=old)
    o = GuardedPPO(use_tis=True)
    found = policy.statistics(o, t)
    keep = valid == 1
    r, d = (LP - OLD).exp()[keep], (LP - OLD)[keep]
    expected = {
        "ratio_mean": r.mean(),
        "ratio_max": r.max(),
        "clipped_low": (r < 0.8).double().mean(),
        "clipped_high": (r > 1.2).double().mean(),
        "tis_weight": (OLD - ROLLOUT).exp().clamp(0.1, 2)[keep].mean(),
        "k1_old": d.mean(),
        "k2_old": (d * d / 2).mean(),
        "k3_old": ((-d).exp() - 1 + d).mean(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-14, atol=0)
    others = {f"k{i}_{name}" for i in (1, 2, 3) for name in ("old", "ref", "rollout")}
    assert set(found) == {*expected, *others}
    assert found["clipped_low"] > 0 and found["clipped_high"] > 0
    of_none = policy.statistics(o, t._replace(valid=valid * 0))
    assert all(value == 0 for value in of_none.values())


# ---- the op

G = torch.Generator().manual_seed(0)
X, W = torch.randn(8, 16, generator=G), torch.randn(62, 16, generator=G)
Y = torch.randint(62, (8,), generator=G)
Y[5] = -100
ADVANTAGE = torch.randn(8, generator=G)
NEAR = linear_logprob(X.double(), W.double(), Y, implementation="eager")[0].float()
STALE = NEAR + torch.tensor([0.5, -0.5, 0.05, -0.05]).repeat(2)
GIVEN = {"advantage": ADVANTAGE, "old_logprob": STALE}
DOCUMENTS = torch.tensor([0, 3, 3, 8])


def call(name, loss=PPO(), given=GIVEN, **options):  # noqa: B008
    x, w = (t.to(DEVICE).requires_grad_() for t in (X.clone(), W.clone()))
    sampled = SampledTokens(Y, **given)
    sampled = sampled._make(t if t is None else t.to(DEVICE) for t in sampled)
    head = HeadOptions(chunk_size=3)
    found = linear_policy_loss(x, w, sampled, loss, head, implementation=name, **options)
    return found, torch.autograd.grad(found.loss.sum(), (x, w))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "eager"])
@pytest.mark.parametrize(
    "loss, options, passes",
    [
        (PPO(), {}, 1),
        (PPO(), {"reduction": "none"}, 2),
        (GSPO(), {}, 2),
        (DrGRPO(), {}, 1),
        (DrGRPO(ratio_type="sequence"), {}, 2),
    ],
    ids=["ppo", "none", "gspo", "dr_grpo", "dr_grpo-sequence"],
)
def test_logits_are_computed_once_where_a_loss_is_a_sum_over_tokens(
    name, loss, options, passes, monkeypatch
):
    skip_unless_usable(OP, name, torch.float32)
    made, chunks = [], head.Chunks.__iter__
    monkeypatch.setattr(head.Chunks, "__iter__", lambda self: (made.append(self), chunks(self))[1])
    given = GIVEN if loss.by_token else {**GIVEN, "cu_seqlens": DOCUMENTS}
    call(name, loss, given, **options)
    assert len(made) == passes


@pytest.mark.parametrize("name", NAMES)
def test_what_ignored_tokens_have_changes_nothing(name):
    skip_unless_usable(OP, name, torch.float32)
    found, grads = call(name, return_statistics=True)
    spoiled = {k: v.masked_fill(Y == -100, float("nan")) for k, v in GIVEN.items()}
    other, other_grads = call(name, given=spoiled, return_statistics=True)
    assert found.loss.isfinite() and torch.equal(found.loss, other.loss)
    for a, b in zip(grads, other_grads, strict=True):
        assert torch.equal(a, b)
    assert found.statistics == other.statistics
    assert found.statistics["entropy"] == found.entropy.sum() / 7
    assert not found.logprob.requires_grad and not found.entropy.requires_grad


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("name", NAMES)
def test_a_clipped_token_has_no_gradient_though_its_ratio_overflows(name, reduction):
    skip_unless_usable(OP, name, torch.float32)
    given = {"advantage": ADVANTAGE.abs() + 1, "old_logprob": torch.full((8,), -100.0)}
    of_documents = {**given, "cu_seqlens": DOCUMENTS}
    for loss, own in (
        (PPO(), given),
        (DrGRPO(), given),
        (DrGRPO(ratio_type="sequence"), of_documents),
        (GSPO(), of_documents),
        (GuardedPPO(), given),
        (GuardedPPO(icepop_beta=2.0), given),
        (GuardedPPO(dual_clip=3.0), {**given, "advantage": -given["advantage"]}),
        (ImportanceSampling(), {**given, "advantage": torch.zeros(8)}),
    ):
        found, grads = call(name, loss, own, reduction=reduction)
        assert found.loss.isfinite().all(), loss
        assert not any(g.any() for g in grads), loss


@pytest.mark.parametrize("name", NAMES)
def test_thresholds_may_be_each_tokens_own(name):
    skip_unless_usable(OP, name, torch.float32)
    low, high = torch.full((8,), 0.8), torch.full((8,), 1.2)
    same = {**GIVEN, "clip_low_threshold": low, "clip_high_threshold": high}
    (a, of_a), (b, of_b) = call(name), call(name, given=same)
    assert torch.equal(a.loss, b.loss) and all(map(torch.equal, of_a, of_b))
    wide = {**GIVEN, "clip_low_threshold": low * 0, "clip_high_threshold": high + 9}
    c, _ = call(name, given=wide)
    plain, _ = call(name, ImportanceSampling())
    torch.testing.assert_close(c.loss, plain.loss)
    assert not torch.equal(a.loss, c.loss)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("name", NAMES)
def test_a_tokens_loss_is_multiplied_by_its_weight(name, reduction):
    """Not the statistics; "mean" divides by the number of tokens."""
    skip_unless_usable(OP, name, torch.float32)
    weight = torch.arange(8.0) - 2
    each, _ = call(name, reduction="none")
    found, grads = call(
        name,
        given={**GIVEN, "token_weight": weight},
        reduction=reduction,
        return_statistics=True,
    )
    expected = each.loss * weight.to(DEVICE)
    if reduction != "none":
        expected = expected.sum() / (7 if reduction == "mean" else 1)
    torch.testing.assert_close(found.loss, expected)
    assert found.statistics == call(name, return_statistics=True)[0].statistics
    advantage = {**GIVEN, "advantage": ADVANTAGE * weight}
    same, of_same = call(name, ImportanceSampling(), advantage, reduction=reduction)
    own = {**GIVEN, "token_weight": weight}
    found, grads = call(name, ImportanceSampling(), own, reduction=reduction)
    torch.testing.assert_close(found.loss, same.loss)
    for a, b in zip(grads, of_same, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_mean_divides_by_the_tokens(name):
    skip_unless_usable(OP, name, torch.float32)
    total, of_total = call(name)
    mean, grads = call(name, reduction="mean")
    torch.testing.assert_close(mean.loss, total.loss / 7)
    torch.testing.assert_close(grads[0], of_total[0] / 7)


def of_policy(x, w, head, name):
    sampled = SampledTokens(*(t.to(DEVICE) for t in (Y, ADVANTAGE, STALE)))
    return linear_policy_loss(x, w, sampled, PPO(), head, implementation=name).loss


def of_pairs(x, w, head, name):
    ends, ref = torch.tensor([0, 3, 8]), torch.tensor([-9.0, -20.0])
    answers = PairedAnswers(*(t.to(DEVICE) for t in (Y, ends, ref)))
    return linear_preference_loss(x, w, answers, DPO(), head, implementation=name).loss


@pytest.mark.parametrize("loss", [of_policy, of_pairs])
@pytest.mark.parametrize("name", NAMES)
def test_autocast_casts_the_tensors_of_the_heads_options_too(name, loss):
    """As if the caller had cast each of them; gradients return in their own dtype."""
    skip_unless_usable(OP, name, torch.bfloat16)
    g = torch.Generator().manual_seed(1)
    shapes = {"bias": (62,), "lora_A": (3, 16), "lora_B": (62, 3)}
    options = {n: torch.randn(shape, generator=g) for n, shape in shapes.items()}
    found = []
    for cast in (False, True):
        leaves = [t.to(DEVICE).clone().requires_grad_() for t in (X, W, *options.values())]
        x, w, *more = (t.bfloat16() for t in leaves) if cast else leaves
        with torch.autocast(DEVICE, torch.bfloat16, enabled=not cast):
            value = loss(x, w, HeadOptions(**dict(zip(options, more, strict=True))), name)
        found.append((value, *torch.autograd.grad(value, leaves)))
    assert all(map(torch.equal, *found))
    assert {t.dtype for t in found[0]} == {torch.float32}


def own(loss=PPO(), **given):  # noqa: B008
    return lambda: linear_policy_loss(X, W, SampledTokens(Y, **{**GIVEN, **given}), loss)


SEQUENCE = DrGRPO(ratio_type="sequence")
TIS = {"use_tis": True}


@pytest.mark.parametrize(
    "bad, message",
    [
        (own(advantage=None), "advantage must be a torch.Tensor for PPO, got None"),
        (own(old_logprob=None), "old_logprob must be a torch.Tensor"),
        (own(GSPO()), "cu_seqlens must be a torch.Tensor for GSPO, got None"),
        (own(SEQUENCE), "cu_seqlens must be a torch.Tensor for DrGRPO"),
        (own(DrGRPO(beta=0.1)), "ref_logprob must be a torch.Tensor"),
        (own(GuardedPPO(use_tis=True)), "rollout_logprob must be a torch.Tensor"),
        (own(teacher_logprob=STALE), "teacher_logprob must be None for PPO, got a torch"),
        (own(cu_seqlens=DOCUMENTS), "cu_seqlens must be None for PPO"),
        (own(OPD(), teacher_logprob=STALE), "advantage must be None for OPD"),
        (own("ppo"), "loss must be a loss of tilewright.ops.loss.policy, got str"),
        (lambda: linear_policy_loss(X, W, Y), "tokens must be a SampledTokens, got Tensor"),
        (
            lambda: linear_policy_loss(X, W, SampledTokens(Y), PPO(), W),
            "head must be a HeadOptions, got Tensor",
        ),
        (lambda: PPO(dual_clip=3.0), "unexpected keyword argument 'dual_clip'"),
        (lambda: Reinforce(clip=0.2), "unexpected keyword argument 'clip'"),
        (lambda: PPO(clip=1.5), r"clip must be a number in \(0, 1\]"),
        (lambda: PPO(clip=0.2, clip_high_threshold=1.3), "threshold must not be given beside clip"),
        (lambda: GuardedPPO(dual_clip=1.0), r"dual_clip must be a number in \(1, inf\)"),
        # Options that do not fit to each other.
        (
            lambda: PPO(clip_low_threshold=2, clip_high_threshold=1),
            "low_threshold must be at most clip_high_threshold = 1, got 2",
        ),
        (
            lambda: GSPO(clip_low_threshold=1.5),
            "low_threshold must be at most clip_high_threshold = 1.2, got 1.5",
        ),
        (lambda: CISPO(clip_high_threshold=0), "above 0, or nothing is learned, got 0"),
        (
            lambda: DrGRPO(clip_high_threshold=0.5),
            "clip_high_threshold must be at least clip_low_threshold = 0.8, got 0.5",
        ),
        (lambda: DrGRPO(kl_type="k1"), "kl_type needs beta above 0, got 'k1'"),
        (lambda: DrGRPO(kl_type="k4", beta=0.1), "kl_type must be one of"),
        (lambda: GuardedPPO(tis_clip_low=0.5), "tis_clip_low needs use_tis, got 0.5"),
        (lambda: GuardedPPO(tis_clip_high=3), "tis_clip_high needs use_tis, got 3"),
        (lambda: GuardedPPO(**TIS, tis_clip_low=3), "tis_clip_low must be at most tis_clip_high ="),
        (
            lambda: GuardedPPO(**TIS, tis_clip_high=0.05),
            "tis_clip_high must be at least tis_clip_low = 0.1",
        ),
        (
            lambda: GuardedPPO(**TIS, tis_clip_low=0, tis_clip_high=0),
            "tis_clip_high must be above 0",
        ),
    ],
)
def test_bad_input_is_named(bad, message):
    with pytest.raises((TypeError, ValueError), match=message):
        bad()


def test_every_option_reaches_the_formulas_by_its_name():
    """Through the operator, which takes those of all formulas."""
    assert {*Options._fields} == {n for f in FORMULAS.values() for n in f.reads}
    assert {*policy.Given._fields} == {*Options._fields, "clip"}
    values = {name: 1.5 + i / 8 for i, name in enumerate(Options._fields)}
    values |= {"use_tis": True, "kl_type": "k1", "ratio_type": "sequence"}
    for formula in FORMULAS.values():
        own = {name: values[name] for name in formula.reads}
        loss = formula(**own)
        assert formula.of(loss.options) == loss and loss.reads == tuple(own)
        assert {name: getattr(loss.options, name) for name in own} == own
