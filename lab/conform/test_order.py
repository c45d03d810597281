"""Requests of a model run in the order of their numbers, which begin with 1."""

from conform.client import norm_of


def sent(model, documents, seq):
    """Passes have odd numbers, and steps even ones."""
    return model.send_pass(documents(seq), seq=seq) if seq % 2 else model.send_step(seq)


def outcome(server, future, seq):
    return server.passed(future).bits() if seq % 2 else norm_of(server.result(future))


def test_requests_sent_out_of_order_have_the_results_of_the_straight_order(
    server, new_model, documents
):
    straight, mixed = new_model(), new_model()
    wanted = [outcome(server, sent(straight, documents, seq), seq) for seq in range(1, 7)]
    futures = {seq: sent(mixed, documents, seq) for seq in (5, 3, 6, 2, 4, 1)}
    assert [outcome(server, futures[seq], seq) for seq in range(1, 7)] == wanted


def test_a_request_waits_for_the_number_before_it(server, model, documents):
    """retrieve_future says so, and which number is missing. It may take 40 seconds."""
    step = model.send_step(2)
    answer = server.look(step).body
    assert answer["type"] == "try_again" and answer["request_id"] == step.request
    assert answer["queue_state"] == "paused_capacity" and "1" in answer["queue_state_reason"]
    server.passed(model.send_pass(documents(), seq=1))
    assert norm_of(server.result(step)) > 0


def test_the_numbers_of_a_model_are_its_own(server, new_model, documents):
    waiting, other = new_model(), new_model()
    step = waiting.send_step(2)
    other.passed(documents(), seq=1)
    assert norm_of(server.result(other.send_step(2))) > 0
    waiting.passed(documents(), seq=1)
    assert norm_of(server.result(step)) > 0


def test_a_passes_result_is_there_in_any_order_of_looks(server, new_model, documents):
    model, other = new_model(), new_model()
    futures = [model.send_pass(documents(seed)) for seed in range(3)]
    last_first = [server.passed(future).bits() for future in futures[::-1]]
    assert last_first[::-1] == [other.passed(documents(seed)).bits() for seed in range(3)]
