"""A request that is sent again is the same request; another one under its number is refused."""

import pytest

from conform.client import norm_of


def test_a_repeated_pass_adds_its_gradient_once(server, new_model, documents):
    once, again = new_model(), new_model()
    once.passed(documents())
    first = again.send_pass(documents(), seq=1)
    assert again.send_pass(documents(), seq=1).request == first.request
    result = server.passed(first)
    later = again.send_pass(documents(), seq=1)
    assert later.request == first.request and server.passed(later).bits() == result.bits()
    assert again.norm() == once.norm()


def test_a_repeated_step_is_taken_once(server, new_model, documents):
    once, again = new_model(), new_model()
    for model in (once, again):
        model.passed(documents())
    once.stepped()
    steps = [again.send_step(2) for _ in range(3)]
    assert len({step.request for step in steps}) == 1
    assert norm_of(server.result(steps[-1])) == norm_of(server.result(steps[0]))
    assert again.send_step(2).request == steps[0].request, "its result was taken"
    assert again.forward(documents()).bits() == once.forward(documents()).bits()


def test_a_model_that_is_created_twice_is_one(server, creation):
    body = creation()
    first = server.send("create_model", body)
    assert server.send("create_model", body).request == first.request
    model = server.result(first)["model_id"]
    assert server.send("create_model", body).request == first.request
    assert server.send("get_info", {"model_id": model}).status == 200
    server.send("unload_model", {"model_id": model})


def test_another_request_under_a_number_that_waits_is_422(server, model, documents):
    waits = model.send_pass(documents(2), seq=2)
    for other in (model.send_pass(documents(3), seq=2), model.send_step(2)):
        assert other.status == 422 and "2" in other.detail
    first = model.send_pass(documents(1), seq=1)
    server.passed(first)
    server.passed(waits)
    assert norm_of(server.result(model.send_step(3))) > 0


def test_another_request_under_a_number_that_was_done_is_422(server, model, documents):
    model.passed(documents(), seq=1)
    server.result(model.send_step(2))
    for other in (
        model.send_pass(documents(5), seq=1),
        model.send_step(2, learning_rate=0.5),
        model.send_step(1),
        model.post("save_weights", 2, path="other"),
    ):
        assert other.status == 422 and other.detail
    model.passed(documents(), seq=3)


@pytest.mark.parametrize("why", ["loss", "lengths", "NaN"])
def test_a_refused_request_has_used_its_number(why, server, model, documents):
    data, loss = documents(), "cross_entropy"
    tokens, inputs = data[0]
    if why == "loss":
        loss = "no_such_loss"
    elif why == "lengths":
        data[0] = tokens, {**inputs, "weights": inputs["weights"][:-1]}
    else:
        data[0] = tokens, {**inputs, "weights": inputs["weights"] * float("nan")}
    status = 422 if why == "lengths" else 400
    answers = [model.send_pass(data, loss, seq=1) for _ in range(2)]
    assert [answer.status for answer in answers] == [status, status]
    assert answers[0].detail == answers[1].detail
    assert model.send_pass(documents(), seq=1).status == 422, "the number is used"
    server.passed(model.send_pass(documents(), seq=2))
    assert norm_of(server.result(model.send_step(3))) > 0


def test_a_request_without_the_key_has_not_used_its_number(server, model, documents):
    body = model.body(1, documents())
    assert server.send("forward_backward", raw=body, key="tml-another").status == 401
    server.passed(server.send("forward_backward", raw=body))


def test_a_repeated_save_is_saved_once(server, model, documents):
    model.passed(documents())
    model.stepped()
    first = model.post("save_weights", 3, path="once")
    path = server.result(first)["path"]
    again = model.post("save_weights", 3, path="once")
    assert again.request == first.request and server.result(again)["path"] == path
