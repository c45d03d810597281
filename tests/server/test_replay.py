"""Experts that an engine has recorded are replayed in passes, and where its samples are scored."""

import asyncio
import base64
import json

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

import httpx
from sampling import PROMPT, Through, answering, ask, base, client_of
from serving import Served, documents, listed, write_model, write_server
from training import MOE

from tilewright.sampler.__main__ import served as sampled_model
from tilewright.sampler.app import application
from tilewright.server.engines import Sglang
from tilewright.server.rollouts import Rollouts

pytestmark = pytest.mark.packages
LAYERS, K, EXPERTS = MOE["num_hidden_layers"], MOE["num_experts_per_tok"], MOE["num_experts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("moe") / "model", MOE)


def drawn(tokens, seed=0):
    """Routes of so many tokens, [tokens, layers, K]."""
    draw = np.random.default_rng(seed)
    return draw.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :K].astype(np.int32)


def logprobs(served, model, data, kind="forward", **more):
    """Those of the documents of a pass, in JSON."""
    own = {"data": data, "loss_fn": "cross_entropy", **more}
    answer = served.result(served.post(kind, {"model_id": model, f"{kind}_input": own}))
    assert "error" not in answer, answer
    each = answer["loss_fn_outputs"]
    return [np.array(one["logprobs"]["data"], np.float32) for one in each]


def test_recorded_experts_are_replayed_in_a_pass(folder, tmp_path):
    """Those of each document, whatever shares its micro-batch; a document without has today's."""
    data = listed(documents(lengths=(5, 20)))
    routes = [drawn(5), drawn(20, 1)]
    with Served(write_server(tmp_path, folder)) as served:
        model = served.model()
        plain = logprobs(served, model, data)
        replayed = logprobs(served, model, data, routed_experts=[r.tolist() for r in routes])
        for one, other in zip(plain, replayed, strict=True):
            assert np.abs(one - other).max() > 1e-3
        # As each datum has them; of one document alone; and in base64, as engines give them.
        text = [base64.b64encode(r.tobytes()).decode() for r in routes]
        own = [{**datum, "routed_experts": one} for datum, one in zip(data, text, strict=True)]
        for one, other in zip(logprobs(served, model, own), replayed, strict=True):
            assert np.array_equal(one, other)
        mixed = logprobs(served, model, [own[0], data[1]])
        np.testing.assert_allclose(mixed[0], replayed[0], atol=1e-6)
        np.testing.assert_allclose(mixed[1], plain[1], atol=1e-6)
        # A token that is not recorded has today's: the last one of a document.
        short = logprobs(served, model, [{**data[0], "routed_experts": routes[0][:-1].tolist()}])[0]
        np.testing.assert_allclose(short[:-1], replayed[0][:-1], atol=1e-6)
        assert abs(short[-1] - replayed[0][-1]) > 1e-6
        # Labels, whose last token is no input.
        ids = data[0]["model_input"]["input_ids"]
        shifted = {"model_input": {"input_ids": ids}, "loss_fn_inputs": {"labels": ids}}
        aligned = {
            "model_input": {"input_ids": ids[:-1]},
            "loss_fn_inputs": {"target_tokens": ids[1:]},
        }
        each = [
            logprobs(served, model, [{**datum, "routed_experts": rows.tolist()}])[0]
            for datum, rows in ((shifted, routes[0]), (aligned, routes[0][:-1]))
        ]
        assert np.array_equal(*each)
        # The backward pass has them, too.
        norms = []
        for more in ({}, {"routed_experts": text}):
            logprobs(served, model, data, "forward_backward", **more)
            step = {"model_id": model, "adam_params": {"learning_rate": 0.0}}
            norms.append(served.result(served.post("optim_step", step))["metrics"]["grad_norm"])
        assert norms[0] != norms[1]


def test_what_cannot_be_replayed_is_refused(folder, file, tmp_path):
    data = listed(documents(lengths=(5,)))
    wrong = drawn(5)
    wrong[2, 1, 0] = EXPERTS
    with Served(write_server(tmp_path / "experts", folder)) as served:
        model = served.model()

        def refused(**more):
            own = {"data": data, "loss_fn": "cross_entropy", **more}
            return served.post("forward", {"model_id": model, "forward_input": own})

        whole = drawn(5).tolist()
        for more, status, said in (
            ({"routed_experts": [wrong.tolist()]}, 400, "datum 0: routed_experts: "),
            ({"routed_experts": [drawn(3).tolist()]}, 400, "are of 3 tokens; accepted are 4 or 5"),
            ({"routed_experts": [whole, whole]}, 422, "has 2 items, and the request 1 data"),
            ({"routed_experts": {}}, 422, "it must be a list"),
            ({"routed_experts": [[[[10**30]]]]}, 400, "datum 0: routed_experts: "),
            ({"routed_experts": [whole], "routed_expert_logits": [1]}, 501, "routed_expert_logits"),
        ):
            answer = refused(**more)
            assert answer[0] == status and said in answer[1]["detail"], answer
    with Served(file) as served:
        model = served.model()
        answer = refused(routed_experts=[whole])
        assert answer[0] == 400 and "the model has no experts" in answer[1]["detail"]


def test_samples_bring_their_experts_and_are_scored_with_them(folder, tmp_path):
    """What an engine has recorded comes with its samples, for the pass that learns from them: the
    first ratio is 1.
    """
    made = sampled_model(str(folder), None, "float32", "cpu", 256)
    asked, whole = [], [True]

    def change(path, body):
        """The embedded sampler records nothing."""
        if path == "/generate" and body.pop("return_routed_experts", False):
            asked.append(path)
            return body
        return None

    class Recording(Through):
        async def handle_async_request(self, request):
            records = b"return_routed_experts" in request.content
            answer = await super().handle_async_request(request)
            told = json.loads(await answer.aread())
            if request.url.path == "/get_server_info":
                told["enable_return_routed_experts"] = True
            for i, one in enumerate(told if records else ()):
                tokens = len(PROMPT) + len(one["output_ids"]) - 1
                text = base64.b64encode(drawn(tokens, i).tobytes()).decode()
                one["meta_info"]["routed_experts"] = text if whole[0] else "AAAA"
            return httpx.Response(answer.status_code, json=told)

    try:
        with Served(write_server(tmp_path, folder)) as served:
            model = served.model()
            name = base(served, model.partition(":")[0])
            client = client_of(Recording(application(made), change))
            endpoint = served.api.endpoint(Sglang(client))
            rollouts = Rollouts(served.log, "trainer", [endpoint], routes=served.api.limits.routes)
            future = ask(served, name, num_samples=2, params={"temperature": 1.0, "seed": 1})
            asyncio.run(answering(served, rollouts.all()))
            answer = served.result(future)
            assert "sequences" in answer, answer
            sequences = answer["sequences"]
            assert asked
            for i, one in enumerate(sequences):
                tokens = PROMPT + one["tokens"]
                want = drawn(len(tokens) - 1, i)
                text = one["routed_experts"]
                assert np.array_equal(
                    np.frombuffer(base64.b64decode(text), "<i4").reshape(want.shape), want
                )
                inputs = {"target_tokens": tokens[1:]}
                datum = {"model_input": {"input_ids": tokens[:-1]}, "loss_fn_inputs": inputs}
                replayed = logprobs(served, model, [{**datum, "routed_experts": text}])[0]
                plain = logprobs(served, model, [datum])[0]
                own = np.array(one["logprobs"], np.float32)
                np.testing.assert_allclose(own, replayed[len(PROMPT) - 1 :], atol=1e-6)
                assert np.abs(own - plain[len(PROMPT) - 1 :]).max() > 1e-3
            whole[0] = False
            future = ask(served, name, 1, num_samples=2)
            asyncio.run(answering(served, rollouts.all()))
            answer = served.result(future)
            assert answer["category"] == "server" and "routed experts" in answer["error"]
    finally:
        made.engine.close()
