"""Engines at an address: what they are checked for, whether weights have arrived, who is asked."""

import asyncio
import json
import pathlib
import re

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

import httpx
from sampling import (
    PROMPT,
    Anew,
    Gone,
    Through,
    added,
    answering,
    ask,
    bare,
    base,
    client_of,
    forward,
    sampler_process,
    saved,
    step,
)
from serving import Served, trained, write_model, write_server
from training import QWEN3

from tests.engines.exchanges import Replay
from tests.engines.scenario import of_engine
from tilewright.sampler.__main__ import served as sampled_model
from tilewright.sampler.app import application
from tilewright.server import inference, probe, sending
from tilewright.server.api import add_engines
from tilewright.server.engines import Embedded, Failed, Sglang, Vllm, Wanted
from tilewright.server.hosts import allowed
from tilewright.server.rollouts import Rollouts

pytestmark = pytest.mark.packages
VLLM = pathlib.Path(__file__).parents[1] / "engines/vllm.json"


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """A model whose heads have a width that vLLM has on a CPU."""
    return write_model(tmp_path_factory.mktemp("wide") / "model", {**QWEN3, "head_dim": 32})


def asked(served, endpoints, logprobs="trainer"):
    """Does what waits for these engines."""
    asyncio.run(answering(served, Rollouts(served.log, logprobs, endpoints).all()))


def endpoint_of(served, transport, url="http://one", kind=Embedded):
    return served.api.endpoint(kind(client_of(transport, url)))


# ---- vLLM, by what it has answered


def test_vllm_samples_with_two_adapters_as_training_scores_them(wide_folder, tmp_path):
    """What vLLM 0.32 on a CPU has answered (`make rollout-vllm`) is what training computes now."""
    transport = Replay(json.loads(VLLM.read_text())["exchanges"], str(wide_folder))
    with Served(write_server(tmp_path, wide_folder)) as served:
        told = of_engine(served, transport, Vllm)
    assert told["facts"]["rank"] == 8 and told["facts"]["dtype"] == "float32"
    assert max(told["away"]) < 1e-5 and told["renewed"] == ["arrived", "arrived"]
    assert told["stopped"]["stop_reason"] == "stop"
    first = told["sequences"][0][1][0]["tokens"]
    assert told["stopped"]["tokens"] == first[: first.index(told["end"]) + 1]
    greedy = [each[0] for each in told["sequences"]]
    assert all(one[0] == one[1] for one in greedy)  # it draws one, which stands for both
    assert len({str(one[0]["logprobs"]) for one in greedy}) == 3
    assert len(told["sequences"][0][1][0]["topk_logprobs"][0]) == 2
    loads = [key for key in transport.asked if "load_lora_adapter" in key]
    assert len(loads) == 4 and all('"load_inplace":true' in key for key in loads)
    order = ("/pause?mode=wait", "load_lora", "reset_prefix", "update_weight_v", "/resume", "info")
    at = next(i for i, key in enumerate(transport.asked) if "/pause" in key)
    for i, part in enumerate(order):
        assert part in transport.asked[at + i], transport.asked[at : at + 6]


def test_adapters_that_vllm_has_swapped_are_found(wide_folder, tmp_path):
    swapped = json.loads(VLLM.read_text())["exchanges"]
    scores = [key for key in swapped if "logprob_token_ids" in key]
    names = dict.fromkeys(json.loads(key.split(" ", 2)[2])["model"] for key in scores)
    _, one, two, *_ = names  # after the base
    for key in scores:
        if f'"{one}"' in key:
            other = key.replace(f'"{one}"', f'"{two}"')
            swapped[key], swapped[other] = swapped[other], swapped[key]
    transport = Replay(swapped, str(wide_folder))
    with (
        Served(write_server(tmp_path, wide_folder)) as served,
        pytest.raises(AssertionError) as why,
    ):
        of_engine(served, transport, Vllm)
    assert "is stale: its log-probabilities differ by up to" in str(why.value)


# ---- the probe


def test_whether_weights_have_arrived_is_told_by_their_scores():
    draw = np.random.default_rng(0)
    new = -4 + draw.normal(size=64)
    change = 1e-3 * draw.normal(size=64)
    old, noise = new - change, probe.Noise(3e-7, 1e-6, 8.0, exact=True)
    rounded = new + 4e-7 * draw.normal(size=64)

    def told(given, before=old, noise=noise):
        return probe.judge(given, new, {"the base": new + 1.0, "old": before}, noise)

    assert told(rounded) == probe.Verdict("arrived")
    assert told(old + 4e-7).says.endswith("they are those of old")
    assert told(new + 1.0).says.endswith("they are those of the base")
    part = told(rounded - 0.005 * change)
    assert part.state == "stale" and "some are missing" in part.says
    assert "accepted are 0.0001" in told(new + 2e-4, new + 1e-2).says
    # What weights that have arrived are rounded by is no evidence afterwards.
    seen = noise.seen(new + 2e-5 * np.sign(change), new)
    assert told(new + 2e-5, new - 1e-3).state == "stale"
    assert told(new + 2e-5, new - 1e-3, seen).state == "arrived"
    # Sums of larger terms are rounded more.
    far = probe.Noise(3e-7, 1e-6, 1.0, exact=True)
    assert told(new + 2e-4, new + 0.5, far).state == "arrived"
    assert told(np.where(np.arange(64) == 5, np.nan, new)).state == "stale"
    assert told(rounded, before=new).state == "undecided"
    # In bfloat16 a change of rounding's size is no evidence, and one beyond it is.
    wide = probe.Noise(2e-2, 6e-2, 8.0, exact=False)
    near = new + 2e-2 * draw.normal(size=64)
    assert told(near, noise=wide).state == "undecided"
    assert told(near, before=new - 0.5, noise=wide).state == "arrived"
    assert told(near - 0.5, before=new - 0.5, noise=wide).state == "stale"


def swaps_names(path, body):
    """The adapter that is loaded next is another one: the first."""
    if path == "/load_lora_adapter":
        swaps_names.first = getattr(swaps_names, "first", None) or body["lora_path"]
        return {**body, "lora_path": swaps_names.first}
    return None


def loads_nothing(path, body):
    """Loading succeeds, and the base samples."""
    if path == "/load_lora_adapter":
        return {"answer": {"success": True}}
    if path == "/generate" and body.get("lora_path"):
        return {name: value for name, value in body.items() if name != "lora_path"}
    return None


@pytest.mark.parametrize("fault", [swaps_names, loads_nothing])
def test_adapters_that_have_not_arrived_are_found_after_one_step(file, sampler, fault):
    """At a rate of 1e-4: the request fails, nothing samples there, and training goes on."""
    fault.first = None
    with Served(file) as served:
        models = [served.model(i) for i in range(2)]
        for i, model in enumerate(models):
            step(served, model, 0, i)
        names = [saved(served, model, i) for i, model in enumerate(models)]
        endpoint = endpoint_of(served, Through(sampler, fault))
        futures = [ask(served, name) for name in names]
        asked(served, [endpoint])
        answers = [served.result(future) for future in futures]
        failed = [one for one in answers if "error" in one]
        assert len(failed) == (1 if fault is swaps_names else 2)
        for one in failed:
            assert (
                one["category"] == "server" and "http://one is stale: its log-prob" in one["error"]
            )
            assert "they are those of" in one["error"]
        assert endpoint.stale is not None
        # It is asked no more, until weights arrive again: another one has them.
        right = endpoint_of(served, Through(sampler), "http://two")
        future = ask(served, names[1], 1)
        asked(served, [endpoint, right])
        assert len(served.result(future)["sequences"][0]["tokens"]) == 8
        assert endpoint.stale is not None and right.stale is None


def test_the_base_is_looked_at_again_beside_adapters(file, sampler):
    """vLLM on a CPU gives requests without one the adapter of the last slot, once all are used."""
    last = []

    def last_slot(path, body):
        if path == "/load_lora_adapter":
            last.append(body["lora_name"])
        elif path == "/generate" and last and "lora_path" not in body:
            many = isinstance(body["input_ids"][0], list)
            return {**body, "lora_path": [last[-1]] * len(body["input_ids"]) if many else last[-1]}
        return None

    with Served(file) as served:
        model = served.model()
        session = model.partition(":")[0]
        trained(served, model, 1)
        own, plain = saved(served, model), base(served, session)
        endpoint = endpoint_of(served, Through(sampler, last_slot))
        future = ask(served, plain)
        asked(served, [endpoint])
        assert "sequences" in served.result(future)
        futures = [ask(served, own, 1), ask(served, plain, 1)]
        asked(served, [endpoint])
        assert "sequences" in served.result(futures[0])
        said = served.result(futures[1])["error"]
        assert "without adapters its log-probabilities differ" in said and f"those of {own}" in said


# ---- registration


def other_model(served, tmp_path):
    made = sampled_model(
        str(write_model(tmp_path / "other", {**QWEN3, "num_hidden_layers": 1})),
        None, "float32", "cpu", 256,
    )  # fmt: skip
    return application(made), made


def small_rank(path, body):
    if path != "/get_server_info":
        return None
    about = {"context_length": 64, "dtype": "float32", "enable_lora": True, "max_lora_rank": 4}
    return {"answer": {**about, "version": "0"}}


def no_adapters(path, body):
    told = small_rank(path, body)
    return told and {"answer": {**told["answer"], "enable_lora": False, "max_lora_rank": None}}


def test_an_engine_that_cannot_serve_the_server_is_refused(file, sampler, tmp_path, monkeypatch):
    """By name, with both values; nothing is added then."""
    with Served(file) as served:
        app, made = other_model(served, tmp_path)
        each = {
            9: (Through(app), f"serves {made.name} and this server {served.base}: their log-prob"),
            10: (Through(sampler, small_rank), "takes adapters up to rank 4, and lora_rank is 8"),
            11: (Through(sampler, no_adapters), "takes no adapters, and lora_rank is 8"),
            12: (httpx.MockTransport(lambda request: httpx.Response(404)), "neither vLLM nor SGL"),
            13: (Gone(), "does not answer"),
        }
        ports = {f"http://127.0.0.1:{port}": transport for port, (transport, _) in each.items()}
        monkeypatch.setattr(inference, "client_of", lambda url: client_of(ports[url], url))
        for port, (_, said) in each.items():
            body = {"host": "127.0.0.1", "port": port}
            status, told = bare(served, "/add_inference_endpoint", body)
            assert status == 400 and said in told["detail"], told
        status, told = bare(served, "/add_inference_endpoint", {"host": "10.0.0.1", "port": 1})
        assert status == 400 and "host is 10.0.0.1; accepted are those of inf" in told["detail"]
        assert bare(served, "/list_inference_endpoints")[1] == {"endpoints": [], "count": 0}
        made.engine.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang", "embedded", "none"])
def test_the_engine_of_the_configuration_is_asked_when_the_api_starts(model_folder, tmp_path, kind):
    """Beside those that clients have added, which take the embedded one's place."""
    url = "http://127.0.0.1:7"
    remote = {"sampler_url": url} if kind in ("vllm", "sglang") else {}
    with Served(write_server(tmp_path, model_folder, sampler=kind, **remote)) as served:
        (served.root / "sampler_url").write_text(f"{url}\n")
        rollouts = served.api.rollouts
        rollouts.managed = None
        add_engines(served.server, served.api)
        assert [(one.url, one.engine.name) for one in rollouts.asked] == (
            [] if kind == "none" else [(url, kind)]
        )
        assert (rollouts.managed is not None) == (kind == "embedded")
        other = {"kind": "endpoint", "engine": "sglang", "pool": None, "transfer": {}}
        served.log.remember("endpoint/http://127.0.0.1:8", "", other)
        rollouts.endpoints.clear()
        add_engines(served.server, served.api)
        own = [url] if remote else []
        assert [one.url for one in rollouts.asked] == ["http://127.0.0.1:8", *own]


def test_hosts_are_names_or_networks():
    hosts = ["localhost", "10.1.0.0/16", "fd00::/8"]
    for url in ("http://localhost:1", "http://10.1.2.3:1", "http://[fd00::1]:1"):
        assert allowed(url, hosts)
    for url in ("http://10.2.0.1:1", "http://local:1", "http://127.0.0.1:1", "http://[::1]:1"):
        assert not allowed(url, hosts)


# ---- several, and weights by their own names


def test_engines_are_added_and_one_that_dies_leaves_its_requests_to_the_others(
    file, sampler, monkeypatch
):
    alive, dies = Through(sampler), Dies(sampler)
    ports = {"http://127.0.0.1:1": dies, "http://127.0.0.1:2": alive}
    monkeypatch.setattr(inference, "client_of", lambda url: client_of(ports[url], url))
    with Served(file) as served:
        for port in (1, 2):
            body = {"host": "127.0.0.1", "port": port, "world_size": 1, "pool": f"p{port}"}
            status, told = bare(served, "/add_inference_endpoint", body)
            assert (status, told["success"]) == (200, True), told
            assert told["endpoint"]["healthy"] and told["endpoint"]["engine"] == "sglang"
        name = base(served, served.model().partition(":")[0])
        dies.dead = True
        futures = [ask(served, name, i) for i in range(4)]
        asked(served, served.api.rollouts.endpoints)
        assert all("sequences" in served.result(future) for future in futures)
        told = bare(served, "/list_inference_endpoints")[1]
        assert [one["healthy"] for one in told["endpoints"]] == [False, True] and told["count"] == 2
        # They are there when the API is started again.
        served.api.rollouts.endpoints.clear()
        served.api.inference.restore()
        assert [one.url for one in served.api.rollouts.endpoints] == [*ports]
        status, _ = bare(served, "/remove_inference_endpoint", {"host": "127.0.0.1", "port": 2})
        assert status == 200
        future = ask(served, name, 9)
        asked(served, served.api.rollouts.endpoints)
        answer = served.result(future)
        assert answer["category"] == "server" and "127.0.0.1:1 does not answer" in answer["error"]


class Dies(Through):
    dead = False

    async def handle_async_request(self, request):
        if self.dead:
            raise httpx.ReadError("it was killed")
        return await super().handle_async_request(request)


def test_a_model_is_sent_under_its_name_in_order(file, sampler, monkeypatch):
    """Pause, send, reset, version, resume, and then the probe; after a step it is sent again."""
    with Served(file) as served:
        model = served.model()
        trained(served, model, 1)
        transport = added(served, sampler, monkeypatch)
        body = {"model_id": model, "weight_version": "v1"}
        status, told = bare(served, "/sync_inference_weights", body)
        assert status == 200 and told["success"], told
        first, steps = transport.calls.index("/pause_generation"), 5
        assert transport.calls[first : first + steps] == [
            "/pause_generation",
            "/load_lora_adapter",
            "/flush_cache",
            "/update_weight_version",
            "/continue_generation",
        ]
        assert set(transport.calls[first + steps :]) == {"/get_model_info", "/generate"}
        [one] = told["endpoints_synced"]
        assert (one["success"], one["message"]) == (True, "v1: arrived")
        assert told["num_parameters"] == 30 and told["total_bytes"] > 10_000
        # A client of the engine alone samples from it.
        trained(served, model, 1, first=4)
        before = scored(served, transport, model)
        assert bare(served, "/api/v1/sync_inference_weights", body)[1]["success"]
        assert scored(served, transport, model) != before
        for body, status, said in (
            ({"model_id": model, "quantization": FP8}, 400, "adapters are sent as they are"),
            ({"model_id": model, "quantization": {}}, 422, "quant_method: Field required"),
            ({"model_id": model, "pools": ["none"]}, 400, "there is no endpoint"),
            ({"model_id": "none"}, 404, "there is no model none"),
            ({"model_id": model, "pause_mode": "x"}, 422, "pause_mode"),
        ):
            answer = bare(served, "/sync_inference_weights", body)
            assert answer[0] == status and said in answer[1]["detail"], answer


def test_all_weights_are_sent_and_what_is_missing_is_found(model_folder, tmp_path, monkeypatch):
    """Over gloo, in buckets, to a process of its own; after one step at 1e-4 a norm or the
    embedding, which is the head, that is not sent is told, and the next sync mends it.
    """
    whole = {"lora_rank": None, "enable_lora": False, "sync_inference_method": "gloo_broadcast"}
    file = write_server(tmp_path, model_folder, sampler="none", **whole)
    with sampler_process(model_folder) as url:
        port = int(url.rpartition(":")[2])
        fault = []
        send = sending._buckets

        def buckets(tensors, most, broadcast):
            kept = ((n, t) for n, t in tensors if not any(part in n for part in fault))
            return send(kept, 4096, broadcast)

        monkeypatch.setattr(sending, "_buckets", buckets)
        with Served(file) as served:
            monkeypatch.setattr(
                inference,
                "client_of",
                lambda url: httpx.AsyncClient(transport=Anew(), base_url=url, timeout=None),
            )
            given = {"host": "127.0.0.1", "port": port, "group_name": "own", "buffer_size_mb": 1}
            added = bare(served, "/add_inference_endpoint", given)
            assert added[0] == 200, added
            transfer = served.api.rollouts.endpoints[0].transfer
            assert (transfer.name, transfer.bytes, transfer.size) == ("own", 1 << 20, 1)
            model = served.model()
            name = base(served, model.partition(":")[0])
            for i, (missing, state) in enumerate(
                (
                    ("", "arrived"),
                    ("model.norm.weight", "stale"),
                    ("layers.0.input_layernorm", "stale"),
                    ("embed_tokens", "stale"),
                    ("", "arrived"),
                )
            ):
                step(served, model, i, i)
                fault[:] = [missing] if missing else []
                body = {"model_id": model, "weight_version": f"v{i}"}
                status, told = bare(served, "/sync_inference_weights", body)
                said = told["endpoints_synced"][0]["message"]
                assert status == 200 and told["success"] == (state == "arrived"), told
                assert state in said and (missing == "" or "differ by up to" in said), said
            assert told["num_buckets"] > 3 and told["num_parameters"] == 24
            # A sampler's weights are sent when it is asked, and the base is none of them now.
            own = saved(served, model, 3)
            futures = [ask(served, own, params={"temperature": 0.0}), ask(served, name)]
            asked(served, served.api.rollouts.endpoints)
            [sequence] = served.result(futures[0])["sequences"]
            want = forward(served, model, 11, PROMPT + sequence["tokens"])[len(PROMPT) - 1 :]
            assert sequence["logprobs"] == pytest.approx(want.tolist(), abs=1e-6)
            # As after a start of the API: the engine has no base, and what is asked is sent again.
            served.api.rollouts.endpoints.clear()
            served.api.inference.restore()
            future = ask(served, own, 1, params={"temperature": 0.0})
            asked(served, served.api.rollouts.endpoints)
            assert served.result(future)["sequences"][0]["tokens"] == sequence["tokens"]
            assert "without adapters" in served.result(futures[1])["error"]


def test_what_is_sent_must_fit(model_folder, tmp_path):
    """An engine that refuses ends the request, and the workers go on."""
    with sampler_process(model_folder) as url:
        target = sending.Target("sglang", url, "g", "gloo", "127.0.0.1", 0, 1 << 20, 1)
        for name, tensor, said in (
            ("none", torch.zeros(3), "none: float32 [3] was sent; the model has none"),
            ("model.norm.weight", torch.zeros(3), "the model has [32]"),
            ("model.norm.weight", torch.zeros(32, dtype=torch.int8), "accepted dtypes are"),
        ):
            target = target._replace(name=f"g{said}")
            given = iter([(name, tensor), ("later", torch.zeros(1))])
            with pytest.raises(sending.Unsent, match=re.escape(said)):
                sending.send(target, given)
            assert next(given, None) is None  # others have gathered them, too
    with pytest.raises(sending.Unsent, match=r"refused|Connection"):
        sending.send(target, iter([]))


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def scored(served, transport, name):
    async def scores():
        async with client_of(transport, "http://one") as client:
            return await Sglang(client).score([PROMPT], name)

    return asyncio.run(scores())


def test_a_version_a_cache_or_an_error_of_a_sync_is_told(file, sampler, monkeypatch):
    """After one step at 1e-4. The engine goes on after an error, too."""
    fault, kept = [], {}

    def change(path, body):
        if fault == ["version"] and path == "/update_weight_version":
            return {"answer": {"success": True}}
        if fault == ["cache"] and path == "/generate":
            return kept.get(json.dumps(body))
        if fault == ["cache"] and path == "/flush_cache":
            return {"answer": {"success": True}}
        if fault == ["error"] and path == "/load_lora_adapter":
            return {"lora_name": "", "lora_path": ""}
        return None

    class Cached(Through):
        """Prefixes are answered from what was computed before."""

        async def handle_async_request(self, request):
            answer = await super().handle_async_request(request)
            if request.url.path == "/generate" and answer.status_code == 200:
                key = json.dumps(json.loads(request.content))
                kept[key] = {"answer": json.loads(await answer.aread())}
                return httpx.Response(200, json=kept[key]["answer"])
            return answer

    with Served(file) as served:
        model = served.model()
        transport = Cached(sampler, change)
        monkeypatch.setattr(inference, "client_of", lambda url: client_of(transport, url))
        assert bare(served, "/add_inference_endpoint", {"host": "127.0.0.1", "port": 1})[0] == 200
        for i, (name, said) in enumerate(
            (
                ("", "arrived"),
                ("version", "its version is 'v0', and 'v1' was sent"),
                ("cache", "they are those of"),
                ("error", "lora_name"),
                ("", "arrived"),
            )
        ):
            step(served, model, i, i)
            fault[:] = [name] if name else []
            body = {"model_id": model, "weight_version": f"v{i}"}
            status, told = bare(served, "/sync_inference_weights", body)
            assert status == 200 and told["success"] == (not name), told
            assert said in told["endpoints_synced"][0]["message"], (name, told)
            assert transport.calls.count("/pause_generation") == i + 1
            assert transport.calls.count("/continue_generation") == i + 1
            assert served.api.rollouts.endpoints[0].stale is None or name in (
                "version",
                "cache",
                "error",
            )


def test_what_has_a_path_is_offered_under_its_name(file, sampler, monkeypatch):
    """In the JSON dialect: to every engine; again is success."""
    with Served(file) as served:
        model = served.model()
        trained(served, model, 1)
        save = {"model_id": model, "path": "x"}
        path = served.result(served.post("save_weights_for_sampler", save))["path"]
        transport = added(served, sampler, monkeypatch)
        for _ in range(2):
            told = bare(served, "/api/v1/create_sampling_session", {"model_path": path})[1]
            assert (told["success"], told["lora_name"], told["model_path"]) == (True, "x", path)
        assert scored(served, transport, "x")
        whole = served.result(served.post("save_weights", save))["path"]
        for other, status in ((path + "y", 404), (whole, 400), ("x", 400)):
            answer = bare(served, "/api/v1/create_sampling_session", {"model_path": other})
            assert answer[0] == status


def test_what_an_engine_refuses_is_told_by_its_name(file, sampler):
    """A refusal ends the request as the client's; an answer that is none, as the server's."""
    with Served(file) as served:
        name = base(served, served.model().partition(":")[0])
        text = ask(served, name, params={"stop": ["x"]})
        endpoint = endpoint_of(served, Through(sampler))
        asked(served, [endpoint])
        answer = served.result(text)
        assert answer["category"] == "user" and "texts need a tokenizer" in answer["error"]

    async def broken():
        limits = []

        def answer(request):
            limits.append(request.extensions["timeout"]["read"])
            return httpx.Response(500, text="no JSON")

        wanted = Wanted("a", PROMPT, 1, 1, 1.0, -1, 1.0, 0, [], [], 0)
        async with client_of(httpx.MockTransport(answer)) as client:
            with pytest.raises(Failed, match="no JSON") as why:
                await Vllm(client).version()
            assert why.value.status == 500
            # A sample takes as long as it takes; an engine that hangs ends all other calls.
            for kind in (Vllm, Embedded):
                with pytest.raises(Failed):
                    await kind(client).generate(wanted, None)
            assert limits == [600.0, None, None]

    asyncio.run(broken())
