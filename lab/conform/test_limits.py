"""What is refused: with a status, a sentence, and nothing changed."""

import json

import numpy as np
import pytest

from conform import wire
from conform.client import JSON


def one_with(documents, **changes):
    """One datum whose tokens and inputs are as functions make them; None leaves an input out."""
    [(tokens, inputs)] = documents(lengths=(5,))
    given = {"tokens": tokens, **inputs}
    for name, change in changes.items():
        given[name] = None if change is None else change(given[name])
    tokens = given.pop("tokens")
    return tokens, {name: array for name, array in given.items() if array is not None}


EITHER = 400, 422  # where the protocol does not say which
PASSES = {
    "NaN": (400, {"weights": lambda w: w * np.nan}, {}),
    "infinity": (400, {"weights": lambda w: w * np.inf}, {}),
    "unknown loss": (400, {}, {"loss": "no_such_loss"}),
    "unknown option": (400, {}, {"config": {"no_such_option": 1.0}}),
    "missing input": (400, {}, {"loss": "ppo"}),
    "missing targets": (EITHER, {"target_tokens": None}, {}),
    "shape": (422, {"weights": lambda w: w[:-1]}, {}),
    "dtype": (422, {"weights": lambda w: wire.dense(w)._replace(dtype=9)}, {}),
    "bytes": (422, {"weights": lambda w: wire.dense(w)._replace(shape=(7,))}, {}),
    "huge shape": (422, {"weights": lambda w: wire.dense(w)._replace(shape=(1 << 62,))}, {}),
    "fractions": (422, {"target_tokens": lambda t: t.astype(np.float32)}, {}),
    "no such token": (EITHER, {"tokens": lambda t: t + (1 << 30)}, {}),
    "negative token": (EITHER, {"tokens": lambda t: -1 - t}, {}),
    "no such target": (EITHER, {"target_tokens": lambda t: t + (1 << 40)}, {}),
    "no tokens": (
        EITHER,
        {n: lambda same: same[:0] for n in ("tokens", "target_tokens", "weights")},
        {},
    ),
}


def is_one_of(status, accepted):
    return status in (accepted if isinstance(accepted, tuple) else (accepted,))


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_that_cannot_be_computed_is_refused(name, model, documents):
    """Whole, and the next one runs."""
    status, changes, options = PASSES[name]
    data = [*documents(), one_with(documents, **changes)]
    answer = model.send_pass(data, **options)
    assert is_one_of(answer.status, status) and answer.detail, answer
    model.passed(documents())
    assert model.norm() > 0


@pytest.mark.parametrize("kind", [2, 3], ids=["image", "sound"])
def test_a_chunk_that_is_no_text_is_refused(kind, model, documents):
    [(tokens, inputs)] = documents(lengths=(5,))
    answer = model.send_pass([wire.datum(tokens, inputs, kind)])
    assert answer.status == 400 and answer.detail


ADAM = {"learning_rate": 1e-3}
PROMPT = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}}
PROMPT |= {"sampling_session_id": "none", "seq_id": 0, "sampling_params": {"max_tokens": 1}}
# The path, the status, and bytes, or JSON from `own`, which names a model, and `new`, which makes
# the body that creates one.
REFUSED = {
    "no JSON": ("optim_step", 422, b"{"),
    "a list": ("optim_step", 422, b"[]"),
    "NaN in JSON": ("optim_step", 422, b'{"model_id": "m", "seq_id": NaN}'),
    "nested": ("optim_step", 422, b"[" * 100_000),
    "no UTF-8": ("optim_step", 422, b'{"model_id": "\xff"}'),
    "missing": ("optim_step", 422, lambda own, new: own),
    "a text for a number": (
        "optim_step",
        422,
        lambda own, new: {**own, "adam_params": {"learning_rate": "much"}},
    ),
    "a text for seq_id": (
        "optim_step",
        422,
        lambda own, new: {**own, "seq_id": "one", "adam_params": ADAM},
    ),
    "model": ("optim_step", 404, lambda own, new: {"model_id": "none", "adam_params": ADAM}),
    "model to describe": ("get_info", 404, lambda own, new: {"model_id": "none"}),
    "model to unload": ("unload_model", 404, lambda own, new: {"model_id": "none"}),
    "future": ("retrieve_future", 404, lambda own, new: {"request_id": "none"}),
    "no future": ("retrieve_future", (404, 422), lambda own, new: {}),
    "checkpoint": (
        "load_weights",
        404,
        lambda own, new: {**own, "path": unknown(own), "optimizer": True},
    ),
    "checkpoint to describe": (
        "weights_info",
        404,
        lambda own, new: {"tinker_path": unknown(own)},
    ),
    "checkpoint to sample": (
        "create_sampling_session",
        404,
        lambda own, new: {**sampler(new), "model_path": unknown(own)},
    ),
    "sampler": ("asample", 404, lambda own, new: PROMPT),
    "base": ("create_model", 400, lambda own, new: {**new(), "base_model": "no/such"}),
    "base to sample": (
        "create_sampling_session",
        400,
        lambda own, new: {**sampler(new), "base_model": "no/such"},
    ),
    "rank": ("create_model", 400, lambda own, new: new(rank=1 << 20)),
    "rank 0": ("create_model", EITHER, lambda own, new: new(rank=0)),
    "session": ("create_model", (400, 404), lambda own, new: {**new(), "session_id": "../up"}),
    "outside": ("save_weights", 400, lambda own, new: {**own, "path": "../../up"}),
    "absolute": ("save_weights", 400, lambda own, new: {**own, "path": "/tmp/up"}),
    "outside, sampler": (
        "save_weights_for_sampler",
        400,
        lambda own, new: {**own, "path": "../up"},
    ),
    "NUL": ("save_weights", 400, lambda own, new: {**own, "path": "a\0b"}),
    "long name": ("save_weights", 400, lambda own, new: {**own, "path": "a" * 5000}),
    "read outside": (
        "load_weights",
        400,
        lambda own, new: {**own, "path": "/etc/passwd", "optimizer": True},
    ),
    "read above": (
        "load_weights",
        400,
        lambda own, new: {**own, "path": unknown(own, "../../up"), "optimizer": True},
    ),
    "no route": ("no_such_route", 404, lambda own, new: {}),
}


def unknown(own, name="none"):
    return f"tinker://{own['model_id']}/weights/{name}"


def sampler(new):
    body = new()
    return {"session_id": body["session_id"], "sampling_session_seq_id": body["model_seq_id"]}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_with_a_sentence(name, server, model, creation):
    path, status, make = REFUSED[name]
    own = {"model_id": model.name, "seq_id": 1}
    raw = make if isinstance(make, bytes) else json.dumps(make(own, creation)).encode()
    answer = server.send(path, raw=raw, Content_Type=JSON)
    assert is_one_of(answer.status, status) and answer.detail, answer


def test_a_body_that_is_no_protobuf_is_422(server, model, documents):
    """Cut, and other bytes; no number is used by what cannot be read."""
    whole = model.body(1, documents())
    for raw in (whole[:-3], b"\xff\xff", b"\x0a\x05ab"):
        answer = server.send("forward_backward", raw=raw)
        assert answer.status == 422 and answer.detail, raw[:9]
    server.passed(server.send("forward_backward", raw=whole))


def test_an_encoding_that_is_not_known_is_415(server, model, documents):
    body = model.body(1, documents())
    answer = server.send("forward_backward", raw=body, Content_Encoding="br")
    assert answer.status == 415 and answer.detail
    answer = server.send("forward_backward", raw=body, Content_Encoding="zstd")
    assert answer.status == 422 and answer.detail, "it is no zstd"
    server.passed(server.send("forward_backward", raw=body))


def test_a_body_that_is_too_large_is_413(server, model, documents, pytestconfig):
    """Also one that becomes so; its number is not used."""
    most = pytestconfig.getoption("max_body_mb")
    if most is None:
        pytest.skip("--max-body-mb is not given")
    size = int(most * 1e6) + 100_000
    answer = server.send("forward_backward", raw=model.body(1, documents()) + bytes(size))
    assert answer.status == 413 and answer.detail
    bomb = wire.zeros(8 * size)
    assert len(bomb) < size / 100
    answer = server.send("forward_backward", raw=bomb, Content_Encoding="zstd")
    assert answer.status == 413 and answer.detail
    server.passed(model.send_pass(documents(), seq=1))


def test_malformed_requests_change_nothing(server, new_model, documents):
    """Bodies that are cut, and whose bytes are changed: each is answered, below 500, and another
    model's next step has the bits of one that was alone.
    """
    alone, model, victim = (new_model() for _ in range(3))
    wanted = [alone.passed(documents()).bits(), alone.stepped()]
    step = {"model_id": victim.name, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
    save = {"model_id": victim.name, "seq_id": 3, "path": "x"}
    whole = [
        ("forward_backward", victim.body(1, documents()), {}),
        ("optim_step", json.dumps(step).encode(), {"Content_Type": JSON}),
        ("save_weights", json.dumps(save).encode(), {"Content_Type": JSON}),
    ]
    draw = np.random.default_rng(0)
    for i in range(90):
        path, body, kind = whole[i % len(whole)]
        changed = bytearray(body)
        if draw.random() < 0.3:
            changed = changed[: draw.integers(1, len(changed))]
        for at in draw.integers(len(changed), size=draw.integers(1, 6)):
            changed[at] = draw.integers(256)
        answer = server.send(path, raw=bytes(changed), **kind)
        assert answer.status < 500, (path, bytes(changed), answer)
        assert answer.status == 200 or answer.detail
    assert [model.passed(documents()).bits(), model.stepped()] == wanted
