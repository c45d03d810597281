"""One call may come as several requests, the later ones first: sums add up."""

import numpy as np
import pytest


def test_a_batch_in_several_requests_has_the_gradient_of_the_whole(
    server, new_model, documents, norm_tolerance, logprob_tolerance
):
    whole, chunks = new_model(), new_model()
    data = documents()
    wanted = whole.passed(data)
    parts = [data[:1], data[1:3], data[3:]]
    futures = [chunks.send_pass(parts[i], seq=i + 1) for i in (2, 1, 0)][::-1]
    passed = [server.passed(future) for future in futures]
    each = [logprobs for one in passed for logprobs in one.logprobs]
    assert [len(logprobs) for logprobs in each] == [len(tokens) for tokens, _ in data]
    for got, want in zip(each, wanted.logprobs, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=logprob_tolerance)
    size = sum(float(inputs["weights"].sum()) for _, inputs in data)
    total = sum(one.loss for one in passed)
    assert total == pytest.approx(wanted.loss, abs=logprob_tolerance * size)
    assert chunks.norm() == pytest.approx(whole.norm(), rel=norm_tolerance)


def test_a_batch_that_comes_twice_has_twice_the_gradient(new_model, documents, norm_tolerance):
    once, twice = new_model(), new_model()
    once.passed(documents())
    for _ in range(2):
        twice.passed(documents())
    assert twice.norm() == pytest.approx(2 * once.norm(), rel=norm_tolerance)


def test_a_step_begins_a_new_sum(model, documents, norm_tolerance):
    norms = []
    for _ in range(2):
        model.passed(documents())
        norms.append(model.norm())
    assert norms[1] == pytest.approx(norms[0], rel=norm_tolerance)


def test_a_forward_pass_adds_nothing(new_model, documents, norm_tolerance):
    plain, also = new_model(), new_model()
    plain.passed(documents())
    also.forward(documents(1))
    also.passed(documents())
    also.forward(documents(2))
    assert also.norm() == pytest.approx(plain.norm(), rel=norm_tolerance)


def test_a_refused_chunk_leaves_the_others_gradient(new_model, documents, norm_tolerance):
    plain, also = new_model(), new_model()
    plain.passed(documents())
    also.passed(documents())
    assert also.send_pass(documents(1), "no_such_loss").status == 400
    assert also.norm() == pytest.approx(plain.norm(), rel=norm_tolerance)
