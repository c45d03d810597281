"""Samples of more than a token: begun by the embedded sampler, and scored by the workers."""

import asyncio
import json
import os
import signal

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

import httpx
from sampling import PROMPT, Gone, ask, base, forward, generate, saved
from serving import PROTOBUF, Served, documents, trained, write_server

from tilewright.nn import load_adapter
from tilewright.server import messages_pb2 as wire
from tilewright.server.engines import Embedded
from tilewright.server.rollouts import Rollouts
from tilewright_lab.server_torture.client import Server, processes

pytestmark = pytest.mark.packages


def test_samples_have_the_weights_and_the_log_probabilities_of_training(file, sampler):
    """Two models and the base at once: the first ratio is 1, within rounding."""
    with Served(file) as served:
        models = [served.model(i) for i in range(2)]
        for i, model in enumerate(models):
            trained(served, model, 2, seed=9 * i)
        session = models[0].partition(":")[0]
        names = [*(saved(served, model) for model in models), base(served, session)]
        greedy = {"temperature": 0.0}
        futures = [ask(served, name, params=greedy, num_samples=2) for name in names]
        assert all(len(answer["sample_sequence_ids"]) == 2 for _, answer in futures)
        # The workers go on with training, and nothing is scored before it is there.
        trained(served, models[0], 1, first=7)
        assert served.log.waiting() == 3
        generate(served, sampler)
        found = [served.result(future)["sequences"] for future in futures]
        tokens = [sequence[0]["tokens"] for sequence in found]
        assert len({tuple(sequence[0]["logprobs"]) for sequence in found}) == 3
        for sequences in found:
            assert sequences[0] == sequences[1] and sequences[0]["stop_reason"] == "length"
        # By the model of the second, which has not been trained since.
        own = forward(served, models[1], 7, PROMPT + tokens[1])
        assert found[1][0]["logprobs"] == pytest.approx(own[len(PROMPT) - 1 :].tolist(), rel=1e-5)


def test_the_sampler_has_the_adapter_that_was_saved(file, sampler, model_folder):
    """Greedy tokens are those of transformers with the exported adapter; also of a path."""
    from transformers import AutoModelForCausalLM

    with Served(file) as served:
        model = served.model()
        trained(served, model, 3)
        path = served.result(served.post("save_weights_for_sampler", {"model_id": model}))["path"]
        session = model.partition(":")[0]
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        name = served.post("create_sampling_session", body)[1]["sampling_session_id"]
        future = ask(served, name, params={"temperature": 0.0})
        generate(served, sampler)
        [sequence] = served.result(future)["sequences"]
        other = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        other.adaptable = ("lm_head",)
        folder = served.root / "models" / model / "sampler_weights"
        load_adapter(other, next(folder.iterdir()) / "adapter")
        prompt = torch.tensor([PROMPT])
        whole = other.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
        )
        assert sequence["tokens"] == whole[0, len(PROMPT) :].tolist()
        # What is saved again under its name is read again.
        trained(served, model, 2, first=10)
        save = {"model_id": model, "path": path.rpartition("/")[2], "overwrite": True}
        assert "path" in served.result(served.post("save_weights_for_sampler", save))
        again = ask(served, name, 1, params={"temperature": 0.0})
        generate(served, sampler)
        [other] = served.result(again)["sequences"]
        assert other["tokens"] != sequence["tokens"] or other["logprobs"] != sequence["logprobs"]


def test_what_a_sample_asks_for(file, sampler):
    """Samples differ from each other, not from themselves; ends, the most probable tokens, those of
    the prompt; in both encodings.
    """
    with Served(file) as served:
        session = served.model().partition(":")[0]
        name = base(served, session)
        seeded = {"seed": 5, "max_tokens": 12}
        more = {"num_samples": 3, "topk_sample_logprobs": 2, "prompt_logprobs": True}
        more |= {"topk_prompt_logprobs": 2}
        future = ask(served, name, params=seeded, **more)
        assert ask(served, name, params=seeded, **more) == future
        alone = ask(served, name, 1, params=seeded)
        cut = ask(served, name, 2, params={**seeded, "temperature": 0.7, "top_k": 5, "top_p": 0.9})
        generate(served, sampler)
        answer = served.result(future)
        [one] = served.result(alone)["sequences"]
        each = answer["sequences"]
        assert one["tokens"] == each[0]["tokens"]
        assert len({tuple(sequence["tokens"]) for sequence in each}) == 3
        for sequence in each:
            assert len(sequence["tokens"]) == len(sequence["topk_logprobs"]) == 12
            for own, best in zip(sequence["logprobs"], sequence["topk_logprobs"], strict=True):
                assert len(best) == 2 and best[0][1] >= best[1][1] and best[0][1] >= own - 1e-4
        assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == 5
        assert answer["topk_prompt_logprobs"][0] is None
        output = wire.SampleResponse()
        output.ParseFromString(served.result(future, accept=PROTOBUF))
        for sequence, own in zip(output.sequences, each, strict=True):
            assert np.frombuffer(sequence.tokens, "<i4").tolist() == own["tokens"]
            assert np.frombuffer(sequence.logprobs, "<f4").tolist() == own["logprobs"]
            assert sequence.topk_sampled_logprobs.k == 2
            assert sequence.topk_sampled_logprobs.length == 12
        assert len(served.result(cut)["sequences"][0]["tokens"]) == 12
        end = one["tokens"][3]
        stopped = ask(served, name, 3, params={**seeded, "stop": [end]})
        generate(served, sampler)
        [sequence] = served.result(stopped)["sequences"]
        assert sequence["stop_reason"] == "stop"
        assert sequence["tokens"] == one["tokens"][: one["tokens"].index(end) + 1]


def test_log_probabilities_may_be_the_engines(file, sampler):
    """They are training's but for rounding, and no worker is needed but for those of prompts."""
    with Served(file) as served:
        session = served.model().partition(":")[0]
        name = base(served, session)
        futures = [ask(served, name, 0), ask(served, name, 1, prompt_logprobs=True)]
        generate(served, sampler, "engine", scored=False)
        assert served.log.waiting() == 1
        found = [served.result(future) for future in futures]
        other = ask(served, name, 2, params={"seed": 1})
        again = ask(served, name, 3, params={"seed": 1})
        generate(served, sampler, "engine")
        assert served.result(other)["sequences"] == served.result(again)["sequences"]
        own = found[1]["sequences"][0]
        trainer = ask(served, name, 1, prompt_logprobs=True)
        assert trainer[1]["request_id"] == futures[1][1]["request_id"]
        assert len(own["tokens"]) == 8 and found[1]["prompt_logprobs"][0] is None
        scored = ask(served, name, 4, prompt=PROMPT + own["tokens"], params={"max_tokens": 1},
                     prompt_logprobs=True)  # fmt: skip
        want = served.result(scored)["prompt_logprobs"][len(PROMPT) :]
        assert own["logprobs"] == pytest.approx(want, abs=1e-5)


def test_further_tokens_at_the_places_of_a_prompt_are_scored(file, sampler):
    """In the layout in which they are asked for, with samples and without."""
    prompt = [5, 6, 7, 8]
    rows = np.array([[1, 6, -1], [7, -1, 2], [-1, -1, -1]])
    dense = {"data": rows.reshape(-1).tolist(), "dtype": "int64", "shape": [3, 3]}
    sparse = {"data": [1, 6, 7, 2], "dtype": "int64", "shape": [3, 3]}
    sparse |= {"sparse_crow_indices": [0, 2, 4, 4], "sparse_col_indices": [0, 1, 0, 2]}
    with Served(file) as served:
        model = served.model()
        trained(served, model, 1)
        name = saved(served, model)
        futures = [
            ask(served, name, i, prompt=prompt, params={"max_tokens": most}, prompt_logprobs=True,
                target_prompt_logprobs=targets)
            for i, (most, targets) in enumerate(((1, dense), (1, sparse), (6, sparse)))
        ]  # fmt: skip
        generate(served, sampler)
        answers = [served.result(future) for future in futures]
        for answer in answers[:2]:  # the prompt's own tokens among them
            data = answer["target_prompt_logprobs"]["data"]
            own = [data[1], data[3 if answer is answers[0] else 2]]
            assert own == pytest.approx(answer["prompt_logprobs"][1:3], rel=1e-5)
        whole = np.array(answers[0]["target_prompt_logprobs"]["data"]).reshape(3, 3)
        assert not whole[rows < 0].any() and (whole[rows >= 0] < 0).all()
        for answer in answers[1:]:
            told = answer["target_prompt_logprobs"]
            assert told["data"] == pytest.approx(whole[rows >= 0].tolist(), rel=1e-5)
            assert told["sparse_crow_indices"] == [0, 2, 4, 4] and told["shape"] == [3, 3]
        for future, kind in zip(futures, ("dense", "sparse_csr", "sparse_csr"), strict=True):
            output = wire.SampleResponse()
            output.ParseFromString(served.result(future, accept=PROTOBUF))
            tensor = output.target_prompt_logprobs
            assert tensor.WhichOneof("encoding") == kind and [*tensor.shape] == [3, 3]
        for wrong, said in (
            ({**dense, "shape": [9, 1]}, "accepted are 3 rows"),
            ({**dense, "data": [97] * 9}, "has 97; accepted are -1 to 96"),
            ({**dense, "data": [3] * 9}, "a token twice"),
            ({"data": 3}, "a list of numbers"),
        ):
            status, answer = ask(served, name, 7, prompt=prompt, target_prompt_logprobs=wrong)
            assert status in (400, 422) and said in answer["detail"]


def test_samplers_in_flight_have_the_newest_weights(file, sampler):
    """Those of their own model; a snapshot keeps its own."""
    with Served(file) as served:
        model = served.model()
        names = []
        for number, kind in enumerate(("snapshot", "inflight", "inflight")):
            save = {"model_id": model, "sampling_session_seq_id": number, "kind": kind}
            answer = served.result(served.post("save_weights_for_sampler", save))
            names.append(answer["sampling_session_id"])
            trained(served, model, 1, first=1 + 3 * number)
        futures = [ask(served, name, params={"temperature": 0.0}) for name in names]
        generate(served, sampler)
        told = [served.result(future) for future in futures]
        assert all("sequences" in one for one in told), told
        first, one, two = (one["sequences"][0]["logprobs"] for one in told)
        assert one == two != first
        held = {"model_id": model, "kind": "inflight", "path": "x"}
        assert served.post("save_weights_for_sampler", held)[0] == 400


def test_samples_are_canceled(file, sampler):
    """Those that the engine has begun, and those that wait for the workers; what is there stays."""
    with Served(file) as served:
        name = base(served, served.model().partition(":")[0])
        futures = [ask(served, name, i) for i in range(3)]

        def cancel(future):
            body = {"request_id": future[1]["request_id"]}
            given = {"content": json.dumps(body), "headers": {"x-api-key": served.key}}
            return served.client.post("/api/v1/cancel_future", **given).status_code

        assert cancel(futures[0]) == 204
        generate(served, sampler, scored=False)
        assert cancel(futures[1]) == 204
        assert len(served.result(futures[2])["sequences"]) == 1 and cancel(futures[2]) == 204
        for future in futures[:2]:
            answer = served.result(future)
            assert answer == {"error": "the request was canceled", "category": "user"}
        assert len(served.result(futures[2])["sequences"]) == 1
        assert cancel((200, {"request_id": "none"})) == 404

        async def begun():
            """The engine is told, too."""
            aborted = []

            async def handle(request):
                if request.url.path == "/abort_request":
                    aborted.append(json.loads(request.content)["rid"])
                    return httpx.Response(200, json={})
                return await asyncio.Event().wait()

            transport = httpx.MockTransport(handle)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                endpoint = served.api.endpoint(Embedded(client))
                rollouts = Rollouts(served.log, "trainer", managed=endpoint)
                [request] = served.log.to_generate()
                rollouts.begin()
                await rollouts.cancel(served.log.cancel(request.id))
                assert aborted == [request.id]
                await asyncio.gather(*rollouts._begun.values(), return_exceptions=True)
                assert not served.log.to_generate()

        ask(served, name, 4)
        asyncio.run(begun())


def test_an_engine_that_has_ended_ends_its_futures_and_no_others(file, sampler, monkeypatch):
    with Served(file) as served:
        model = served.model()
        name = base(served, model.partition(":")[0])
        future = ask(served, name)
        served.log.tell("sampler", "failed: its exit code is 1")
        generate(served, Gone())
        answer = served.result(future)
        assert (
            answer["category"] == "server" and "has failed: its exit code is 1" in answer["error"]
        )
        assert len(trained(served, model, 1)) == 3
        # One that comes again is asked again.
        future, calls = ask(served, name, 1), []
        served.log.tell("sampler", "started")
        monkeypatch.setattr("tilewright.server.rollouts.AGAIN", 0.0)

        class Again(httpx.ASGITransport):
            async def handle_async_request(self, request):
                if b'"rid"' in request.content:
                    calls.append(request.url.path)
                    if len(calls) == 1:
                        raise httpx.ReadError("it was killed")
                return await super().handle_async_request(request)

        generate(served, Again(sampler))
        assert len(served.result(future)["sequences"][0]["tokens"]) == 8 and len(calls) == 2


def test_what_is_not_sampled_is_refused_before(file, model_folder, tmp_path, sampler):
    with Served(file) as served:
        model = served.model()
        session = model.partition(":")[0]
        path = served.result(served.post("save_weights", {"model_id": model, "path": "x"}))["path"]
        body = {"session_id": session, "sampling_session_seq_id": 1, "model_path": path}
        whole = served.post("create_sampling_session", body)[1]["sampling_session_id"]
        name = base(served, session)
        for status, said, future in (
            (400, "holds no weights for sampling", ask(served, whole)),
            (400, "none can follow", ask(served, name, prompt=[1] * 64)),
            (400, "has the token 97", ask(served, name, prompt=[97])),
            (422, "max_tokens", ask(served, name, params={"max_tokens": 0})),
            (404, "there is no sampler none", ask(served, "none")),
        ):
            assert (future[0], said in future[1]["detail"]) == (status, True), future
        text = ask(served, name, params={"stop": ["x"]})
        generate(served, sampler)
        answer = served.result(text)
        assert answer["category"] == "user" and "texts need a tokenizer" in answer["error"]
    with Served(write_server(tmp_path / "none", model_folder, sampler="none")) as served:
        name = base(served, served.model().partition(":")[0])
        status, answer = ask(served, name)
        assert status == 501 and "(sampler: none)" in answer["detail"]


def test_all_weights_are_sampled(model_folder, tmp_path, sampler):
    """With batch_invariant the first ratio is 1 bit for bit."""
    whole = {"lora_rank": None, "enable_lora": False, "batch_invariant": True}
    file = write_server(tmp_path, model_folder, **whole)
    with Served(file) as served:
        model = served.model()
        name = base(served, model.partition(":")[0])
        before = ask(served, name, params={"temperature": 0.0})
        generate(served, sampler)
        served.answer()
        served.result(served.passes(model, 1, documents()))
        served.result(served.step(model, 2, learning_rate=0.1))
        own = saved(served, model)
        future = ask(served, own, params={"temperature": 0.0})
        generate(served, sampler)
        [sequence] = served.result(future)["sequences"]
        want = forward(served, model, 3, PROMPT + sequence["tokens"])[len(PROMPT) - 1 :]
        assert sequence["logprobs"] == want.tolist()
        assert served.result(before)["sequences"][0]["tokens"] != sequence["tokens"]


def test_a_sampler_of_the_launcher_is_started_and_comes_again(model_folder, tmp_path):
    """By the command: it starts with the first request, is killed, and is asked again. Killed once
    more it stays away: its futures end, and training goes on.
    """
    limits = {"worker_connection_timeout": 900, "worker_max_retries": 1}
    file = write_server(tmp_path, model_folder, **limits)
    with Server(file) as server, server.client() as client:
        pids = processes(server.process.pid)
        assert "sampler" not in pids
        session = client.post("create_session", {}).value["session_id"]
        made = {"session_id": session, "sampling_session_seq_id": 0}
        made = client.post("create_sampling_session", {**made, "base_model": str(model_folder)})
        chunks = [{"type": "encoded_text", "tokens": PROMPT}]
        body = {"sampling_session_id": made.value["sampling_session_id"], "seq_id": 0}
        body |= {"prompt": {"chunks": chunks}, "sampling_params": {"max_tokens": 8, "seed": 1}}
        first = client.result(client.post("asample", body)).value
        assert len(first["sequences"][0]["tokens"]) == 8
        [pid] = processes(server.process.pid)["sampler"]
        os.kill(pid, signal.SIGKILL)
        again = client.result(client.post("asample", {**body, "seq_id": 1})).value
        assert json.dumps(again["sequences"]) == json.dumps(first["sequences"])
        [other] = processes(server.process.pid)["sampler"]
        assert other != pid
        os.kill(other, signal.SIGKILL)
        ended = client.result(client.post("asample", {**body, "seq_id": 2})).value
        assert ended["category"] == "server" and "failed: its exit code" in ended["error"]
        new = {"session_id": session, "model_seq_id": 0, "base_model": str(model_folder)}
        assert "model_id" in client.result(client.post("create_model", new)).value
    assert not processes(server.process.pid)


def test_a_sample_without_a_limit_fills_the_context(model_folder, tmp_path, sampler):
    """That of the model or of the sampler's cache, where these are less than a document's."""
    file = write_server(tmp_path, model_folder, sampler_cache_tokens=24)
    with Served(file) as served:
        name = base(served, served.model().partition(":")[0])
        futures = [
            ask(served, name, i, params={"max_tokens": most}) for i, most in enumerate((None, 30))
        ]
        generate(served, sampler)
        for future in futures:
            [sequence] = served.result(future)["sequences"]
            assert len(sequence["tokens"]) == 24 - len(PROMPT)
            assert sequence["stop_reason"] == "length"


def test_what_waits_when_a_launcher_begins_starts_the_sampler(file, sampler):
    """As after a kill of the launcher, which forgets what it had started."""
    with Served(file) as served:
        future = ask(served, base(served, served.model().partition(":")[0]))
        served.log.tell("sampler", "")
        generate(served, sampler)
        assert served.log.fact("sampler") == "wanted"
        assert len(served.result(future)["sequences"]) == 1
