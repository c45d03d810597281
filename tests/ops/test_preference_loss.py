"""Tests specific to linear_preference_loss. Parity with the eager twin is in test_contract.py."""

import itertools
import math

import pytest
import torch
from helpers import DEVICE, skip_unless_usable

from tilewright.bench import contract
from tilewright.ops import (
    DPO,
    OPS,
    ORPO,
    Hinge,
    PairedAnswers,
    SimPO,
    linear_logprob,
    linear_preference_loss,
)
from tilewright.ops.loss import linear_preference_loss as module
from tilewright.ops.loss.documents import Documents
from tilewright.ops.loss.preference import FORMULAS, KTO, Pairs

OP = OPS["linear_preference_loss"]
NAMES = OP.names()
F64 = torch.float64
G = torch.Generator().manual_seed(0)
X, W = torch.randn(9, 16, generator=G), torch.randn(62, 16, generator=G)
Y = torch.randint(62, (9,), generator=G)
Y[3] = -100
CU = torch.tensor([0, 4, 5, 5, 9])  # an answer of one token, one without
REF = torch.tensor([-20.0, -5.0, -1.0, -30.0])


def call(name, x=X, w=W, y=Y, cu=CU, ref: torch.Tensor | None = REF, loss=DPO(), **options):  # noqa: B008
    x, w = (t.detach().clone().to(DEVICE).requires_grad_() for t in (x, w))
    ref = None if ref is None else ref.to(DEVICE)
    found = linear_preference_loss(
        x, w, PairedAnswers(y.to(DEVICE), cu.to(DEVICE), ref), loss, implementation=name, **options
    )
    return found, torch.autograd.grad(found.loss.sum(), (x, w))


def in_float64(formula, ref, sft_ratio=0.0, score=None):
    """The mean over pairs from log-probabilities that are added token by token."""
    x, w = X.double().requires_grad_(), W.double().requires_grad_()
    logprob, _ = linear_logprob(x, w, Y, implementation="eager")
    ends = CU.tolist()
    sums = [logprob[a:b].sum() for a, b in itertools.pairwise(ends)]
    counts = [int((Y[a:b] != -100).sum()) for a, b in itertools.pairwise(ends)]
    learned = sum(counts[0::2])
    losses, given = [], sums if ref is None else ref.double()
    kl = [((sums[i] - given[i] + sums[i + 2] - given[i + 2]) / 2).detach() for i in (0, 1)]
    for i in (0, 2):
        c, r = sums[i], sums[i + 1]
        refs = (c.detach(), r.detach()) if ref is None else (ref[i].double(), ref[i + 1].double())
        n = [torch.tensor(max(counts[j], 1), dtype=F64) for j in (i, i + 1)]
        gap = None if score is None else (score[i] - score[i + 1]).double().clamp_min(0)
        loss = formula(Pairs(c, r, *refs, *n, gap, *(t.clamp_min(0) for t in kl)))
        losses.append(loss - sft_ratio * c * 2 / learned)
    loss = torch.stack(losses).mean()
    return loss.detach(), torch.autograd.grad(loss, (x, w)), counts


# ORPO's is infinite for an answer without a token, whose mean log-probability is 0.
@pytest.mark.parametrize("formula", [f for f in module.PAIRED if f != "orpo"])
def test_every_formula_is_that_of_the_sums_of_its_documents(formula):
    name = OP.choose(DEVICE, torch.float32)
    ref = REF if FORMULAS[formula].reference else None
    if FORMULAS[formula].kl:  # of one sign the mean log-ratio is 0
        ref = REF - 30
    value = FORMULAS[formula](beta=0.2)
    loss, grads, counts = in_float64(value, ref, 0.3)
    found, own = call(name, ref=ref, loss=value, sft_ratio=0.3)
    torch.testing.assert_close(found.loss.cpu().double(), loss, rtol=1e-5, atol=1e-6)
    assert found.tokens.tolist() == counts == [3, 1, 0, 4]
    for a, b in zip(own, grads, strict=True):
        assert contract.error(a.cpu(), b)[0] < 2e-5
    sums = found.logprob - (0 if ref is None else ref.to(DEVICE))
    reward = sums / found.tokens.clamp_min(1) if ref is None else sums
    torch.testing.assert_close(found.reward, 0.2 * reward, rtol=1e-4, atol=1e-6)
    assert not found.reward.requires_grad and not found.logprob.requires_grad


def test_scores_of_answers_are_an_offset_of_their_margin():
    loss, score = DPO(beta=0.2, offset_alpha=0.7), torch.tensor([3.0, 1.0, 0.5, 2.0])
    answers = PairedAnswers(Y, CU, REF, score)
    found = linear_preference_loss(X, W, answers, loss, implementation="eager").loss
    torch.testing.assert_close(found.double(), in_float64(loss, REF, score=score)[0])
    plain = linear_preference_loss(X, W, PairedAnswers(Y, CU, REF), DPO(beta=0.2)).loss
    assert abs(found - plain) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_equal_answers_have_no_margin(name):
    """To the bit, where their rows are the same."""
    skip_unless_usable(OP, name, torch.float32)
    twice = {"x": torch.cat((X[:4], X[:4])), "y": torch.cat((Y[:4], Y[:4]))}
    cu, ref = torch.tensor([0, 4, 8]), torch.tensor([-9.0, -9.0])
    found, _ = call(name, cu=cu, ref=ref, **twice)
    assert found.loss == torch.tensor(math.log(2))
    assert found.reward[0] == found.reward[1]
    hinge, _ = call(name, cu=cu, ref=ref, loss=Hinge(), **twice)
    assert hinge.loss == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_margins_of_ten_thousand_do_not_overflow(name, sign):
    skip_unless_usable(OP, name, torch.float32)
    ref = torch.tensor([0.0, 1e4, 0.0, 1e4]) * sign
    found, grads = call(name, ref=ref, loss=DPO(beta=1.0))
    margin = (found.logprob - ref.to(DEVICE))[0::2] - (found.logprob - ref.to(DEVICE))[1::2]
    expected = 0.0 if sign > 0 else -margin.mean().item()
    assert found.loss.item() == pytest.approx(expected, rel=1e-6)
    assert all(g.isfinite().all() for g in grads)
    assert any(g.any() for g in grads) == (sign < 0)


def test_odds_of_tokens_that_are_nearly_certain_are_finite_and_right():
    """ORPO's log(1 - p) of mean log-probabilities of -1e-12, which are 1 - exp() = 0 in float32."""
    sums = torch.tensor([-1e-12, -3e-12], dtype=F64, requires_grad=True)
    ones = torch.ones(2, dtype=F64)
    loss, _ = module.losses(ORPO(beta=1.0), sums, ones, None, None, 0.0)
    # The odds are 1 / -log p there: their ratio is 3.
    assert loss.item() == pytest.approx(-math.log(3 / 4), rel=1e-9)
    [grad] = torch.autograd.grad(loss.sum(), sums)
    assert grad[0].item() == pytest.approx(-0.25e12, rel=1e-6)


def test_a_small_sum_after_large_ones_keeps_its_digits():
    cu = torch.tensor([0, 3, 3, 5])
    values = torch.tensor([1e15, 3.0, 7e15, 1e-12, 2e-12], dtype=F64, requires_grad=True)
    sums = Documents.of(cu, 5).sums(values)
    assert sums.tolist() == [8e15 + 3, 0, 1e-12 + 2e-12]
    [grad] = torch.autograd.grad((sums * torch.tensor([1.0, 2.0, 3.0])).sum(), values)
    assert grad.tolist() == [1, 1, 1, 3, 3]


@pytest.mark.parametrize("name", NAMES)
def test_ignored_rows_and_documents_without_pairs_change_nothing(name):
    skip_unless_usable(OP, name, torch.float32)
    found, (dx, dw) = call(name)
    x = X.clone()
    x[3] = -50.0
    other, (other_dx, other_dw) = call(name, x=x)
    assert torch.equal(found.loss, other.loss) and torch.equal(dw, other_dw)
    assert torch.equal(dx, other_dx) and not dx[3].any()
    none, grads = call(name, x=X[:0], y=Y[:0], cu=CU[:1], ref=REF[:0])
    assert none.loss == 0 and not any(g.any() for g in grads)
    assert none.logprob.shape == none.reward.shape == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_a_sum_or_a_mean_is_that_of_the_pairs(name):
    skip_unless_usable(OP, name, torch.float32)
    each, _ = call(name, reduction="none")
    assert each.loss.shape == (2,)
    for reduction in ("sum", "mean"):
        whole, _ = call(name, reduction=reduction)
        torch.testing.assert_close(whole.loss, getattr(each.loss, reduction)())


def given(cu, ref=None, loss=DPO(), score=None):  # noqa: B008
    return linear_preference_loss(X, W, PairedAnswers(Y, cu, ref, score), loss)


@pytest.mark.parametrize(
    "bad, error, message",
    [
        (
            lambda: given(CU),
            ValueError,
            r"ref_logprob must be a torch.Tensor for DPO\(.*, got None",
        ),
        (
            lambda: given(CU, REF, SimPO()),
            ValueError,
            r"ref_logprob must be None for SimPO\(.*\), got a torch.Tensor",
        ),
        (lambda: DPO(simpo_gamma=1.0), TypeError, "unexpected keyword argument 'simpo_gamma'"),
        (lambda: Hinge(label_smoothing=0.1), TypeError, "unexpected keyword .*'label_smoothing'"),
        (lambda: DPO(label_smoothing=0.5), ValueError, "label_smoothing must be a number"),
        (
            lambda: given(CU, REF, DPO(offset_alpha=0.5)),
            ValueError,
            "score must be a torch.Tensor for DPO",
        ),
        (lambda: given(CU, REF, score=REF), ValueError, "score must be None for DPO"),
        (
            lambda: given(CU[:-1], REF[:-1]),
            ValueError,
            r"cu_seqlens must have shape \[n\] with n % 2 == 1",
        ),
        (lambda: given(CU, REF[:3]), ValueError, "ref_logprob must have shape"),
        (lambda: given(CU - 1, REF), ValueError, "cu_seqlens must start at 0"),
        (lambda: given(CU * 2, REF), ValueError, "cu_seqlens must end at 9"),
        (lambda: given(CU, REF, "dpo"), TypeError, "loss must be a loss of tilewright.ops.loss"),
        (lambda: given(CU, REF, KTO()), ValueError, "loss must be one of pairs, got KTO"),
        (
            lambda: linear_preference_loss(X, W, Y),
            TypeError,
            "answers must be a PairedAnswers, got Tensor",
        ),
    ],
)
def test_bad_input_is_named(bad, error, message):
    with pytest.raises(error, match=message):
        bad()
