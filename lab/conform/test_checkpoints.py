"""What is saved, loaded and sampled from."""

import numpy as np
import pytest

from conform import wire
from conform.client import Model

TOP = 3


def trained(model, documents, steps, seed):
    """What so many steps have come to."""
    results = []
    for step in range(steps):
        results.append(model.passed(documents(seed + step)).bits())
        results.append(model.stepped())
    return results


def saved(server, model, name="first"):
    result = server.result(model.post("save_weights", path=name))
    assert result["path"] == f"tinker://{model.name}/weights/{name}"
    return result["path"]


@pytest.fixture
def loaded(server, session, count):
    """Creates models from checkpoints, which are unloaded behind the test."""
    made = []

    def load(path, optimizer):
        own = {"session_id": session, "model_seq_id": next(count)}
        body = {**own, "path": path, "optimizer": optimizer}
        result = server.result(server.send("load_weights", body))
        assert result["model_id"] == f"{session}:train:{own['model_seq_id']}"
        made.append(Model(server, result["model_id"]))
        return made[-1]

    yield load
    for model in made:
        server.send("unload_model", {"model_id": model.name})


def test_a_saved_model_goes_on_as_it_was(server, model, documents, loaded):
    """With its optimizer's states bit for bit; without them its weights alone are the same."""
    trained(model, documents, 2, 0)
    path = saved(server, model)
    wanted = trained(model, documents, 2, 50)
    assert trained(loaded(path, True), documents, 2, 50) == wanted
    without = trained(loaded(path, False), documents, 2, 50)
    assert without[0] == wanted[0] and without[-2] != wanted[-2]


def test_a_checkpoint_replaces_a_models_weights(server, model, documents):
    trained(model, documents, 1, 0)
    wanted = model.forward(documents()).bits()
    path = saved(server, model)
    trained(model, documents, 2, 9)
    assert model.forward(documents()).bits() != wanted
    answer = model.post("load_weights", path=path, optimizer=True)
    assert server.result(answer)["path"] == path
    assert model.forward(documents()).bits() == wanted
    after = trained(model, documents, 1, 3)
    answer = model.post("load_weights", path=path, optimizer=True)
    server.result(answer)
    assert trained(model, documents, 1, 3) == after


def test_a_name_is_not_saved_twice(server, model, documents):
    for kind in ("save_weights", "save_weights_for_sampler"):
        server.result(model.post(kind, path="taken"))
        assert server.refused(model.post(kind, path="taken"))
    model.passed(documents())


def test_checkpoints_are_listed_described_and_deleted(server, model, loaded):
    path = saved(server, model)
    run = f"training_runs/{model.name}"
    answer = server.send(f"{run}/checkpoints", method="GET")
    assert answer.status == 200, answer
    [one] = answer.body["checkpoints"]
    assert one["tinker_path"] == path and one["checkpoint_id"] == "weights/first"
    assert one["checkpoint_type"] == "training" and one["size_bytes"] > 0
    info = server.send("weights_info", {"tinker_path": path}).body
    assert info["is_lora"] and info["base_model"] and info["lora_rank"] > 0
    assert server.send(f"{run}/checkpoints/weights/first", method="DELETE").status == 204
    assert server.send(f"{run}/checkpoints/weights/first", method="DELETE").status == 404
    gone = model.post("load_weights", path=path, optimizer=True)
    assert gone.status == 404 and gone.detail


# ---- samplers


@pytest.fixture
def sampler(server, session, count):
    """Creates samplers: of the base, or of a path."""

    def create(**of):
        body = {"session_id": session, "sampling_session_seq_id": next(count), **of}
        answer = server.send("create_sampling_session", body)
        assert answer.status == 200, answer
        return answer.body["sampling_session_id"]

    return create


def asked(server, count, name, tokens, **more):
    """The answer to a request to sample."""
    params = {"max_tokens": 1, "temperature": 1.0, "seed": 11, **more.pop("params", {})}
    body = {
        "sampling_session_id": name,
        "seq_id": next(count),
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens.tolist()}]},
        "sampling_params": params,
        "prompt_logprobs": True,
        **more,
    }
    return server.send("asample", body)


def scored(server, *given, **more):
    """The result of that, in protobuf."""
    answer = server.wait(asked(server, *given, **more), protobuf=True)
    assert isinstance(answer.body, bytes), answer
    return wire.sampled(answer.body)


def test_a_prompt_has_the_bases_logprobs(
    server, count, sampler, documents, reference, logprob_tolerance
):
    """NaN stands for the first token's, which follows nothing, and null in JSON."""
    tokens = documents()[3][0]
    answer = asked(server, count, sampler(base_model=server.base), tokens)
    assert len(answer.body["sample_sequence_ids"]) == 1
    binary = wire.sampled(server.wait(answer, protobuf=True).body)
    assert len(binary.prompt) == len(tokens) and np.isnan(binary.prompt[0])
    want = reference.logprobs(tokens[:-1], tokens[1:]).numpy()
    np.testing.assert_allclose(binary.prompt[1:], want, rtol=0, atol=logprob_tolerance)
    own = server.result(answer)["prompt_logprobs"]
    assert own[0] is None
    assert np.array_equal(np.array(own[1:], np.float32), binary.prompt[1:])


def test_the_most_probable_tokens_of_a_prompt(
    server, count, sampler, documents, reference, logprob_tolerance
):
    tokens = documents()[1][0]
    name = sampler(base_model=server.base)
    ids, logprobs = scored(server, count, name, tokens, topk_prompt_logprobs=TOP).topk
    assert ids.shape == logprobs.shape == (len(tokens), TOP)
    want = reference.distributions(tokens[:-1])
    np.testing.assert_allclose(
        logprobs[1:], want.topk(TOP).values.numpy(), rtol=0, atol=logprob_tolerance
    )
    own = want.numpy()[np.arange(len(tokens) - 1)[:, None], ids[1:]]
    np.testing.assert_allclose(logprobs[1:], own, rtol=0, atol=logprob_tolerance)


def test_a_sampled_token_has_its_logprob(
    server, count, sampler, documents, reference, logprob_tolerance
):
    """Temperature 0 takes the most probable one; a seed draws the same again."""
    tokens, name = documents()[1][0], sampler(base_model=server.base)
    last = reference.distributions(tokens)[-1].numpy()
    many = [scored(server, count, name, tokens, num_samples=4) for _ in range(2)]
    for one in many:
        assert len(one.tokens) == 4
        for [token], [logprob] in zip(one.tokens, one.logprobs, strict=True):
            assert logprob == pytest.approx(last[token], abs=logprob_tolerance)
    drawn = [[token.tolist() for token in one.tokens] for one in many]
    assert drawn[0] == drawn[1]
    greedy = scored(server, count, name, tokens, params={"temperature": 0.0})
    [[token]] = greedy.tokens
    assert last[token] == pytest.approx(last.max(), abs=2 * logprob_tolerance)


def test_a_sampler_has_the_weights_of_when_it_was_saved(
    server, session, count, sampler, model, documents, logprob_tolerance
):
    """By a path, by a snapshot, and the base's still, while the model trains on."""
    prompt = documents()[3][0]
    score = [(prompt[:-1], {"target_tokens": prompt[1:], "weights": np.ones(32, np.float32)})]
    before = model.forward(score).logprobs[0]
    trained(model, documents, 3, 0)
    wanted = model.forward(score).logprobs[0]
    assert np.abs(wanted - before).max() > 0
    result = server.result(model.post("save_weights_for_sampler", path="here"))
    assert result["path"] == f"tinker://{model.name}/sampler_weights/here"
    own = {"sampling_session_seq_id": next(count)}
    snapshot = server.result(model.post("save_weights_for_sampler", **own))["sampling_session_id"]
    by_path, base = sampler(model_path=result["path"]), sampler(base_model=server.base)

    def prompts():
        return [scored(server, count, n, prompt).prompt[1:] for n in (by_path, snapshot, base)]

    first = prompts()
    trained(model, documents, 3, 20)
    for got, again, want in zip(first, prompts(), (wanted, wanted, before), strict=True):
        assert np.array_equal(got, again)
        np.testing.assert_allclose(got, want, rtol=0, atol=logprob_tolerance)
    later = model.forward(score).logprobs[0]
    assert not np.array_equal(later, wanted), "it has trained on"
