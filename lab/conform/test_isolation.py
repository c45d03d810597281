"""Models of one base train apart, and keys see what is theirs."""

import itertools

import pytest

from conform.client import norm_of

SCRIPT = "pass", "pass", "step", "forward", "pass", "step", "pass", "step", "forward"


def acts(model, documents, seed):
    """What each request of the script has come to, one at a time."""
    for i, kind in enumerate(SCRIPT):
        if kind == "step":
            yield model.stepped(beta2=0.9 + seed / 1000)
        else:
            yield model.passed(documents(seed + i), forward=kind == "forward").bits()


def test_models_that_are_mixed_have_the_bits_of_each_alone(new_model, documents):
    settings = [{"seed": 3}, {"seed": 4, "rank": 2}, {"seed": 3, "train_unembed": False}]
    alone = [[*acts(new_model(**own), documents, 10 * i)] for i, own in enumerate(settings)]
    models = [new_model(**own) for own in settings]
    running = [acts(model, documents, 10 * i) for i, model in enumerate(models)]
    mixed = [[*one] for one in zip(*itertools.zip_longest(*running), strict=True)]
    assert mixed == alone


def test_requests_that_wait_at_the_same_time_do_not_meet(server, new_model, documents):
    """All are sent before a result is asked for."""
    alone = [new_model().passed(documents(i)).bits() for i in range(3)]
    models = [new_model() for _ in range(3)]
    futures = [model.send_pass(documents(i)) for i, model in enumerate(models)]
    assert [server.passed(future).bits() for future in futures] == alone


def test_a_model_that_is_unloaded_leaves_the_others(server, new_model, documents):
    alone = [*acts(new_model(), documents, 0)]
    model, other = new_model(), new_model()
    other.passed(documents(5))
    running = acts(model, documents, 0)
    begun = [next(running) for _ in range(4)]
    assert server.result(server.send("unload_model", {"model_id": other.name}))
    assert [*begun, *running] == alone
    assert other.send_step().status == 404


@pytest.mark.parametrize("key", ["", "tml-another"], ids=["none", "another"])
def test_another_key_sees_nothing(key, server, model, documents):
    future = model.send_pass(documents())
    asked = {"request_id": future.request}
    for path, body in (
        ("retrieve_future", asked),
        ("get_info", {"model_id": model.name}),
        ("optim_step", {"model_id": model.name, "seq_id": 2, "adam_params": {}}),
        ("unload_model", {"model_id": model.name}),
        ("create_session", {}),
    ):
        answer = server.send(path, body, key=key)
        assert answer.status == 401 and answer.detail, path
    body = model.body(2, documents())
    assert server.send("forward_backward", raw=body, key=key).status == 401
    runs = server.send(f"training_runs/{model.name}", method="GET", key=key)
    assert runs.status == 401 and runs.detail
    server.passed(future)
    assert norm_of(server.result(model.send_step(2))) > 0, "it is as it was"
