"""AdamW, by what a client sees of its steps."""

import numpy as np
import pytest


def after(model, documents, scale=1.0, **adam):
    """Log-probabilities before and behind a step on a batch with weights times this."""
    data = documents()
    for _, inputs in data:
        inputs["weights"] *= np.float32(scale)
    before = model.passed(data)
    model.stepped(**adam)
    return [np.concatenate(one.logprobs) for one in (before, model.forward(documents()))]


def moved(pair):
    return np.abs(pair[1] - pair[0]).max()


def test_a_step_without_a_gradient_is_refused(server, model, documents):
    assert server.refused(model.send_step())
    model.passed(documents())
    model.stepped()
    assert server.refused(model.send_step()), "the step before has used it"
    model.forward(documents())
    assert server.refused(model.send_step()), "a forward pass has none"
    model.passed(documents())
    assert model.stepped() > 0


def test_a_step_of_rate_0_changes_nothing(model, documents):
    wanted = model.forward(documents()).bits()
    model.passed(documents())
    assert model.norm() > 0
    assert model.forward(documents()).bits() == wanted


def test_steps_on_a_batch_lower_its_loss(model, documents):
    losses = []
    for _ in range(5):
        losses.append(model.passed(documents()).loss)
        model.stepped()
    assert losses[-1] < losses[0]


def test_the_first_step_does_not_depend_on_the_gradients_size(new_model, documents):
    """Each weight moves by the rate, whatever its gradient: so does none of plain descent."""
    small, large = (after(new_model(), documents, scale) for scale in (1.0, 4.0))
    distance = moved(small)
    assert distance > 0
    np.testing.assert_allclose(large[1], small[1], rtol=0, atol=1e-2 * distance)


def test_eps_and_the_norms_limit_hold_steps_back(new_model, documents):
    """With an eps above all gradients the step is as large as they are, which the limit lowers."""
    plain = moved(after(new_model(), documents, eps=1.0))
    assert plain > 0
    for changes in ({"eps": 1e6}, {"eps": 1.0, "grad_clip_norm": 1e-6}):
        assert moved(after(new_model(), documents, **changes)) < 0.1 * plain, changes


def test_weight_decay_is_decoupled(new_model, documents):
    """Rate times decay is 1: what stands in the adapters goes, and the step alone stays in one of
    both factors, so that they add nothing. As a part of the gradient it would do otherwise.
    """
    plain = moved(after(new_model(), documents))
    decayed = moved(after(new_model(), documents, weight_decay=1e3))
    assert decayed <= 1e-2 * plain


def test_two_steps_depend_on_the_moments(new_model, documents):
    """beta1 joins the gradients of both."""
    results = []
    for beta1 in (0.0, 0.9):
        model = new_model()
        for seed in range(2):
            model.passed(documents(seed))
            model.stepped(beta1=beta1)
        results.append(np.concatenate(model.forward(documents()).logprobs))
    assert not np.array_equal(*results)


@pytest.mark.parametrize("name", ["learning_rate", "eps", "weight_decay"])
def test_a_setting_below_0_is_refused(name, server, model, documents):
    model.passed(documents())
    assert server.refused(model.send_step(**{name: -1.0}))
