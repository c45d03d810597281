"""Encodings of requests and results: they change no value."""

import numpy as np
import pytest

from conform import wire
from conform.client import JSON, PROTOBUF
from conform.reference import SUM


def changed(data, **how):
    """Data whose inputs of these names are encoded by functions."""
    return [
        (tokens, {name: how.get(name, wire.dense)(array) for name, array in inputs.items()})
        for tokens, inputs in data
    ]


@pytest.mark.parametrize(
    "how",
    [
        {"target_tokens": lambda array: array.astype(np.int32)},
        {"weights": wire.bfloat16},
        {"target_tokens": lambda array: array.astype(np.int32), "weights": wire.bfloat16},
    ],
    ids=["int32", "bfloat16", "both"],
)
def test_a_dtype_changes_no_bit(how, model, documents):
    wanted = model.passed(documents())
    assert model.passed(changed(documents(), **how)).bits() == wanted.bits()


def test_one_target_a_token_may_have_two_dimensions(model, documents, logprob_tolerance):
    wanted = model.passed(documents())
    column = {name: lambda array: array[:, None] for name in ("target_tokens", "weights")}
    found = model.passed(changed(documents(), **column))
    size = sum(float(inputs["weights"].sum()) for _, inputs in documents())
    assert found.loss == pytest.approx(wanted.loss, abs=logprob_tolerance * size)
    for got, want in zip(found.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(got.ravel(), want, rtol=0, atol=logprob_tolerance)


def several(reference, lengths=(7, 12)):
    """Documents with two targets a token, weights of either sign, and how many of both count. No
    weight is 0: what log-probability such a target has, the protocol does not say.
    """
    draw = np.random.default_rng(4)
    for n in lengths:
        first = draw.integers(0, reference.vocabulary, n)
        step = draw.integers(1, reference.vocabulary, n)
        targets = np.stack((first, (first + step) % reference.vocabulary), 1)
        weights = (draw.integers(1, 9, (n, 2)) * draw.choice([-1, 1], (n, 2)) / 8).astype("<f4")
        yield draw.integers(0, reference.vocabulary, n), targets, weights, draw.integers(1, 3, n)


def test_several_targets_a_token_have_weights(model, reference, logprob_tolerance):
    each = [*several(reference)]
    data = [(tokens, {"target_tokens": t, "weights": w}) for tokens, t, w, _ in each]
    found = model.passed(data)
    total = size = 0.0
    for got, (tokens, targets, weights, _) in zip(found.logprobs, each, strict=True):
        want = reference.logprobs(tokens, targets).numpy()
        np.testing.assert_allclose(got.reshape(want.shape), want, rtol=0, atol=logprob_tolerance)
        total -= (want * weights).sum()
        size += np.abs(weights).sum() * (logprob_tolerance + SUM * np.abs(want).max())
    assert found.loss == pytest.approx(total, abs=size)


def test_sparse_rows_have_the_targets_that_are_listed(model, reference, logprob_tolerance):
    data, total, size = [], 0.0, 0.0
    for tokens, targets, weights, counts in several(reference):
        rows = [row[:n].tolist() for row, n in zip(targets, counts, strict=True)]
        own = [row[:n].tolist() for row, n in zip(weights, counts, strict=True)]
        inputs = {
            "target_tokens": wire.sparse(rows, 2, "<i8"),
            "weights": wire.sparse(own, 2, "<f4"),
        }
        data.append((tokens, inputs))
        listed = np.arange(2) < counts[:, None]
        want = reference.logprobs(tokens, targets).numpy()
        total -= (want * weights * listed).sum()
        size += np.abs(weights * listed).sum() * (logprob_tolerance + SUM * np.abs(want).max())
    assert model.passed(data).loss == pytest.approx(total, abs=size)


def test_a_compressed_body_is_the_same_request(server, model, documents):
    body = model.body(1, documents())
    first = server.send("forward_backward", raw=wire.stored(body), Content_Encoding="zstd")
    assert server.send("forward_backward", raw=body).request == first.request
    assert server.passed(first).bits() == model.passed(documents()).bits()


def test_results_in_json_have_the_values_of_protobuf(server, model, documents):
    future = model.send_pass(documents())
    binary = server.passed(future)
    answer = server.wait(future)
    assert JSON in answer.kind
    assert answer.body["metrics"] == binary.metrics
    outputs = answer.body["loss_fn_outputs"]
    assert len(outputs) == len(documents())
    for name, each in binary.fields.items():
        for output, want in zip(outputs, each, strict=True):
            assert output[name]["shape"] == [*want.shape]
            assert np.array_equal(np.array(output[name]["data"], np.float32), want.ravel())


def test_errors_are_json_whatever_is_accepted(server, model):
    step = model.send_step()
    if step.status == 200:
        answer = server.wait(step, protobuf=True)
        assert JSON in answer.kind and answer.body["category"] == "user"
    given = {"Accept": PROTOBUF}
    answer = server.send("retrieve_future", {"request_id": "none"}, **given)
    assert answer.status == 404 and JSON in answer.kind and answer.detail
