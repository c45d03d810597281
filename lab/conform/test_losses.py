"""Losses and gradients against float64: adapters begin as zero, so a new model is the base."""

import itertools
import re

import numpy as np
import pytest
import torch

from conform import reference as formulas
from conform.reference import SUM

POLICIES = ["importance_sampling", "ppo", "cispo", "dro", "gspo"]
# Differences of log-probabilities whose ratios are inside and outside of the limits of every loss,
# and not near them, where rounding would decide.
APART = [0.1, -0.6, 0.3, -0.1, 1.6, -0.3, 0.6, -1.6]
METRIC = re.compile(r"[^:]+:(mean|sum|min|max|slack)")


def double(array):
    return torch.tensor(np.asarray(array, np.float64))


def with_policy(name, data, logprobs):
    """Data with old log-probabilities apart from the new ones, and advantages of either sign."""
    draw, made = np.random.default_rng(5), []
    for i, ((tokens, inputs), lp) in enumerate(zip(data, logprobs, strict=True)):
        n = len(tokens)
        apart = np.array([*itertools.islice(itertools.cycle(APART), n)])
        if name == "gspo":  # whose ratio is a document's
            apart = np.full(n, APART[i % 4])
        advantages = (draw.integers(1, 9, n) * draw.choice([-1, 1], n) / 4).astype(np.float32)
        old = (lp.astype(np.float64) - apart).astype(np.float32)
        own = {"logprobs": old, "advantages": advantages}
        made.append((tokens, {"target_tokens": inputs["target_tokens"], **own}))
    return made


def check_logprobs(passed, data, reference, tolerance):
    assert [len(one) for one in passed.logprobs] == [len(tokens) for tokens, _ in data]
    for i, (got, (tokens, inputs)) in enumerate(zip(passed.logprobs, data, strict=True)):
        want = reference.logprobs(tokens, inputs["target_tokens"]).numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance, err_msg=f"datum {i}")


def check_loss(passed, name, data, reference, tolerance, **options):
    """The sum, with what differences of log-probabilities may change it by."""
    total = slack = 0.0
    for tokens, inputs in data:
        lp = reference.logprobs(tokens, inputs["target_tokens"])
        given = double(inputs["logprobs"]), double(inputs["advantages"])
        own = formulas.policy(name, lp, *given, **options).item()
        sizes = formulas.slope(name, lp, *given, **options).abs()
        if name == "cispo":  # the ratio's own, through which no gradient goes
            sizes = sizes * (1 + lp.abs())
        total, slack = (
            total + own,
            slack + (sizes.sum() * tolerance).item() + SUM * 10 * len(tokens),
        )
    assert passed.loss == pytest.approx(total, abs=slack)


def test_cross_entropy_has_the_models_logprobs_in_the_requests_order(
    model, documents, reference, logprob_tolerance
):
    data = documents()
    for i, (_, inputs) in enumerate(data):  # of either sign, and some that leave a token out
        inputs["weights"][::3] *= -1
        inputs["weights"][i::4] = 0
    passed = model.passed(data)
    check_logprobs(passed, data, reference, logprob_tolerance)
    total = slack = 0.0
    for tokens, inputs in data:
        want = reference.logprobs(tokens, inputs["target_tokens"]).numpy()
        total -= (want * inputs["weights"]).sum()
        terms = np.abs(inputs["weights"]).sum()
        slack += terms * (logprob_tolerance + SUM * np.abs(want).max())
    assert passed.loss == pytest.approx(total, abs=slack)


def test_elementwise_losses_are_weights_times_logprobs(model, documents):
    passed = model.passed(documents())
    each = passed.fields["elementwise_loss"]
    for got, lp, (_, inputs) in zip(each, passed.logprobs, documents(), strict=True):
        np.testing.assert_allclose(got, -lp * inputs["weights"], rtol=1e-5)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policys_loss_is_its_formula(name, model, documents, reference, logprob_tolerance):
    data = with_policy(name, documents(), model.forward(documents()).logprobs)
    passed = model.passed(data, name)
    check_logprobs(passed, data, reference, logprob_tolerance)
    check_loss(passed, name, data, reference, logprob_tolerance)


@pytest.mark.parametrize("newer", [True, False], ids=["v2", "v1"])
@pytest.mark.parametrize(
    "name, options",
    [
        ("ppo", {"clip_low_threshold": 0.3, "clip_high_threshold": 3.0}),
        ("gspo", {"clip_low_threshold": 0.3, "clip_high_threshold": 3.0}),
        ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ("dro", {"beta": 0.5}),
    ],
)
def test_a_policys_options_are_read(
    name, options, newer, model, documents, reference, logprob_tolerance
):
    """In both fields that requests may have them in."""
    data = with_policy(name, documents(), model.forward(documents()).logprobs)
    passed = model.passed(data, name, options, newer=newer)
    check_loss(passed, name, data, reference, logprob_tolerance, **options)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policys_gradient_is_that_of_a_weighted_cross_entropy(
    name, model, documents, rest_tolerance
):
    """Its derivatives by log-probabilities are the weights: the difference has no gradient."""
    plain = model.forward(documents()).logprobs
    data = with_policy(name, documents(), plain)
    opposite = []
    for (tokens, inputs), lp in zip(data, plain, strict=True):
        given = double(inputs["logprobs"]), double(inputs["advantages"])
        weights = formulas.slope(name, double(lp), *given).numpy().astype(np.float32)
        opposite.append((tokens, {"target_tokens": inputs["target_tokens"], "weights": weights}))
    model.passed(data, name)
    alone = model.norm()
    model.passed(data, name)
    model.passed(opposite)
    assert alone > 0 and model.norm() <= rest_tolerance * alone


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_a_clipped_token_has_no_gradient(name, model, documents, rest_tolerance):
    """The ratio is e, and the advantage positive."""
    data = []
    for (tokens, inputs), lp in zip(documents(), model.forward(documents()).logprobs, strict=True):
        own = {"logprobs": lp - np.float32(1), "advantages": np.ones(len(tokens), np.float32)}
        data.append((tokens, {"target_tokens": inputs["target_tokens"], **own}))
    model.passed(data, "importance_sampling")
    whole = model.norm()
    model.passed(data, name)
    assert whole > 0 and model.norm() <= rest_tolerance * whole


def test_twice_the_weights_have_twice_the_gradient(model, documents, norm_tolerance):
    norms = []
    for scale in (1, 2):
        data = documents()
        for _, inputs in data:
            inputs["weights"] *= np.float32(scale)
        model.passed(data)
        norms.append(model.norm())
    assert norms[0] > 0 and norms[1] == pytest.approx(2 * norms[0], rel=norm_tolerance)


def test_opposite_weights_have_no_gradient(model, documents, rest_tolerance):
    """In one request, and in two."""
    opposite = documents()
    for _, inputs in opposite:
        inputs["weights"] *= np.float32(-1)
    model.passed(documents())
    alone = model.norm()
    model.passed([*documents(), *opposite])
    assert model.norm() <= rest_tolerance * alone
    model.passed(documents())
    model.passed(opposite)
    assert model.norm() <= rest_tolerance * alone


def test_a_forward_pass_has_a_backward_passes_values(model, documents, logprob_tolerance):
    forward, backward = model.forward(documents()), model.passed(documents())
    size = sum(float(inputs["weights"].sum()) for _, inputs in documents())
    assert forward.loss == pytest.approx(backward.loss, abs=logprob_tolerance * size)
    for got, want in zip(forward.logprobs, backward.logprobs, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=logprob_tolerance)


@pytest.mark.parametrize("name", ["cross_entropy", *POLICIES])
def test_metrics_say_how_they_are_joined(name, model, documents):
    """Published clients split a name at its colon, and raise for another reduction."""
    data = documents()
    if name != "cross_entropy":
        data = with_policy(name, data, model.forward(documents()).logprobs)
    metrics = model.passed(data, name).metrics
    assert "loss:sum" in metrics
    assert [one for one in metrics if METRIC.fullmatch(one) is None] == []
    assert all(np.isfinite(value) for value in metrics.values())
