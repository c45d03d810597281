"""How weights are sent: after steps, in block-FP8, over groups that stay, to vLLM; and memory that
engines use in turns with training.
"""

import asyncio
import base64

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

import httpx
from helpers import DEVICE
from safetensors.torch import load_file
from sampling import (
    Anew,
    Through,
    added,
    answering,
    ask,
    bare,
    client_of,
    sampler_process,
    saved,
    step,
)
from serving import Served, documents, trained, write_model, write_server
from training import QWEN3
from transformers import AutoModelForCausalLM

from tilewright.core import groups
from tilewright.core.registry import short
from tilewright.nn import QuantFormat, quantize_
from tilewright.server import api, inference, sending
from tilewright.server.bodies import Call, synced
from tilewright.server.engines import Vllm
from tilewright.server.keys import digest
from tilewright.server.refused import Refused
from tilewright.trainer.engine import moved

pytestmark = pytest.mark.packages
WHOLE = {"lora_rank": None, "enable_lora": False, "sync_inference_method": "gloo_broadcast"}
BLOCK = 16
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}


def sync(served, **body):
    status, told = bare(served, "/sync_inference_weights", body)
    assert status == 200, told
    return told


# ---- after steps


def test_engines_are_sent_a_model_after_so_many_steps(model_folder, tmp_path, sampler, monkeypatch):
    """And the result of the step is there once they have it."""
    monkeypatch.setattr(api, "WAIT", 0.0)
    with Served(write_server(tmp_path, model_folder, sync_every_steps=2)) as served:
        own, model = served.api.inference, served.model()

        def kept():
            return [f.name for f in (served.root / "samplers").iterdir()]

        def loads(steps):
            """How often adapters are loaded, after a step each."""
            transport.calls.clear()
            for number in steps:
                served.result(served.passes(model, 2 * number + 1, documents(number)))
                future = served.step(model, 2 * number + 2, learning_rate=1e-4)
                due = bool(number % 2)
                assert (served.result(future).get("type") == "try_again") == due
                assert own.is_due(model) == due
                asyncio.run(answering(served, own.send_due()))
                assert not own.is_due(model) and "metrics" in served.result(future)
            return transport.calls.count("/load_lora_adapter")

        transport = added(served, sampler, monkeypatch)
        assert loads([0]) == 0 and loads([1]) == 1 and loads([2, 3]) == 1
        [endpoint] = served.api.rollouts.endpoints
        # What was sent before is dropped, and what engines have is not.
        [name] = kept()
        assert endpoint.stale is None and endpoint._known[-1].weights == name
        paths = [path.path for path in served.log.paths(served.log.model(model).owner)]
        assert [path for path in paths if "@" in path] == [name]
        # An engine that has not got it is stale, one that answers otherwise than it should is in
        # the log, and training goes on.
        transport.change = loads_nothing
        assert loads([4, 5]) == 1
        assert "they are those of" in endpoint.stale
        assert len(kept()) == 2 and name in kept()
        transport.change = lambda path, body: {"answer": 3} if path == "/generate" else None
        assert loads([6, 7]) == 1
        # Without an engine nothing is kept but the last.
        served.api.rollouts.endpoints.clear()
        assert loads([8, 9, 10, 11]) == 0
        assert len(kept()) == 1 and kept() != [name]
        # It is nobody's when its model has ended.
        served.result(served.post("unload_model", {"model_id": model}))
        served.workers.sweep()
        assert kept() == []


def test_the_api_sends_a_model_by_itself(model_folder, tmp_path, sampler, monkeypatch):
    """As it is started: its own task does what is due, and the step's result comes then."""
    with Served(write_server(tmp_path, model_folder, sync_every_steps=1)) as served, served.client:
        model = served.model()
        transport = added(served, sampler, monkeypatch)
        served.result(served.passes(model, 1, documents()))
        future = served.step(model, 2, learning_rate=1e-4)[1]
        answer = served.at_once("retrieve_future", future)[1]
        assert "metrics" in answer and "/load_lora_adapter" in transport.calls
        assert served.api.rollouts.endpoints[0].stale is None


def test_a_newer_model_is_not_dropped_and_an_older_one_not_sent(file, sampler, monkeypatch):
    with Served(file) as served:
        own, model = served.api.inference, served.model()
        transport = added(served, sampler, monkeypatch)
        sent = []
        for number in range(2):
            step(served, model, number, number)
            weights = f"{model}@{number}"
            call = Call(model, None, "save_weights_for_sampler", synced(weights))
            served.log.ask(served.log.model(model), call.kind, call.value)
            served.answer()
            sent.append((weights, served.log.path(weights)))

        def send(weights):
            row, endpoints = served.log.model(model), served.api.rollouts.endpoints
            doing = own._sent(row, weights, endpoints, inference.Sending())
            return asyncio.run(answering(served, doing))[0]["message"]

        assert "arrived" in send(sent[0][0])
        assert served.log.path(sent[1][0]) == sent[1][1]
        assert "arrived" in send(sent[1][0]) and served.log.path(sent[0][0]) is None
        transport.calls.clear()
        assert send(sent[0][0]) == "newer weights are there" and transport.calls == []
        # A fact that is another one by now stays.
        served.log.tell("sync/m", "m@2")
        served.log.settle("sync/m", "m@1")
        assert served.log.facts("sync/") == {"m": "m@2"}


def test_a_result_does_not_wait_for_an_engine_for_ever(file, monkeypatch):
    with Served(file) as served:
        own = served.api.inference
        served.log.tell("sync/m", "m@1")
        assert own.is_due("m") and not own.is_due("other")
        monkeypatch.setattr(inference, "LIMIT", -1.0)
        assert not own.is_due("m")


def loads_nothing(path, body):
    return {"answer": {"success": True}} if path == "/load_lora_adapter" else None


def test_the_one_model_of_a_key_is_sent_to_an_engine_that_is_added(
    model_folder, tmp_path, sampler, monkeypatch
):
    keys = "".join(f"{name}: {digest('tml-' + name)}\n" for name in ("ann", "bob"))
    (tmp_path / "keys").write_text(keys)
    file = write_server(tmp_path, model_folder, api_token_file=str(tmp_path / "keys"))
    with Served(file, key="tml-bob") as served:
        served.model()
        served.key = "tml-ann"
        monkeypatch.setattr(inference, "client_of", lambda url: client_of(Through(sampler), url))
        engine = {"host": "127.0.0.1", "port": 1, "sync_weights": True}
        told = bare(served, "/add_inference_endpoint", engine)[1]
        assert told["success"] and not told["weights_synced"]
        assert told["sync_message"].startswith("there are 0 models")
        model = served.model()
        trained(served, model, 1)
        told = bare(served, "/add_inference_endpoint", engine)[1]
        assert told["weights_synced"] and ": arrived" in told["sync_message"]


# ---- in block-FP8, over a group


def in_fp8(folder, source):
    """A model that is saved in block-FP8, and its tensors."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    quantize_(model, QuantFormat("block_fp8", BLOCK))
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_all_weights_are_sent_in_block_fp8(model_folder, tmp_path, monkeypatch):
    """With the bytes that saving has, to an engine of such weights, over a group that stays."""
    in_fp8(tmp_path / "fp8", model_folder)
    sent, fault, opened = [], [], []
    send, open_ = sending._buckets, sending.opened

    def buckets(tensors, most, broadcast):
        sent[:] = [(n, t) for n, t in tensors if not any(n.endswith(end) for end in fault)]
        return send(iter(sent), 1000, broadcast)

    monkeypatch.setattr(sending, "_buckets", buckets)
    monkeypatch.setattr(sending, "opened", lambda target: (opened.append(target), open_(target))[1])
    monkeypatch.setattr(
        inference,
        "client_of",
        lambda url: httpx.AsyncClient(transport=Anew(), base_url=url, timeout=None),
    )
    file = write_server(tmp_path, model_folder, sampler="none", **WHOLE)
    with sampler_process(tmp_path / "fp8") as url, Served(file) as served:
        engine = {"host": "127.0.0.1", "port": int(url.rpartition(":")[2])}
        assert bare(served, "/connect_inference_endpoint", {})[0] == 400  # there is none
        status, told = bare(served, "/add_inference_endpoint", engine)
        assert status == 200, told
        [endpoint] = served.api.rollouts.endpoints
        assert endpoint.facts.quantized is None and endpoint._noise.exact  # it has dequantized them
        served.api.rollouts.endpoints.append(endpoint)  # as if there were two
        status, told = bare(served, "/connect_inference_endpoint", {"master_port": 29600})
        assert status == 400 and "master_port is 29600, and 2 endpoints" in told["detail"]
        served.api.rollouts.endpoints.pop()
        told = bare(served, "/connect_inference_endpoint", {"group_name": "stays"})[1]
        assert told["success"] and told["connected_endpoints"] == [url], told
        model = served.model()
        trained(served, model, 4)
        told = sync(served, model_id=model, quantization=FP8)
        assert told["success"], told
        assert ": arrived" in told["endpoints_synced"][0]["message"]
        save = {"model_id": model, "path": "x", "dtype": "float32"}
        served.at_once("save_full_weights_safetensors", save)
        want = in_fp8(tmp_path / "saved", served.root / f"models/{model}/sampler_weights/x/model")
        assert {n for n, _ in sent} == {*want}
        for name, tensor in sent:
            assert tensor.dtype == want[name].dtype
            assert torch.equal(tensor.view(torch.uint8), want[name].view(torch.uint8)), name
        stored = sum(t.numel() * t.element_size() for t in want.values())
        assert (told["num_parameters"], told["total_bytes"]) == (len(want), stored)
        # It may be set for all that follows; what is left out is found.
        told = bare(served, "/api/v1/set_sync_quantization", {"quantization": FP8})[1]
        assert told["success"] and told["quantization"]["weight_block_size"] == [BLOCK, BLOCK]
        served.result(served.passes(model, 13, documents(9)))
        served.result(served.step(model, 14, learning_rate=1e-4))
        fault[:] = ["_scale_inv"]
        told = sync(served, model_id=model)
        assert not told["success"] and "is stale" in told["message"], told
        fault.clear()
        told = sync(served, model_id=model)
        assert told["success"], told
        assert any(t.dtype == torch.float8_e4m3fn for _, t in sent)
        bare(served, "/api/v1/set_sync_quantization", {"quantization": None})
        assert sync(served, model_id=model)["success"]
        assert all(t.dtype == torch.float32 for _, t in sent)
        # One group for all of them; then one for each.
        assert len(opened) == 1 and opened[0].name.startswith("stays-")
        told = bare(served, "/disconnect_inference_endpoint", {})[1]
        assert told["success"] and told["message"] == url
        assert sync(served, model_id=model)["success"] and len(opened) == 2
        for wrong, said in (
            ({**FP8, "scale_fmt": "ue8m0"}, "scale_fmt"),
            ({**FP8, "weight_block_size": [0, 1]}, "weight_block_size.0"),
            ({**FP8, "quant_method": "awq"}, "quant_method"),
            ({**FP8, "weight_block_size": [1000, 1000]}, "up to 16384 elements"),
        ):
            status, told = bare(served, "/api/v1/set_sync_quantization", {"quantization": wrong})
            assert status == 422 and said in told["detail"], told


def test_groups_and_quantization_are_of_all_weights(file, sampler, monkeypatch):
    with Served(file) as served:
        added(served, sampler, monkeypatch)
        for path, body in (
            ("/connect_inference_endpoint", {}),
            ("/api/v1/set_sync_quantization", {"quantization": FP8}),
        ):
            status, told = bare(served, path, body)
            assert status == 400 and "enable_lora: false" in told["detail"], told


def test_a_group_whose_engine_has_ended_is_not_used_again(model_folder):
    """The engine is told, and the next sync opens another one."""
    target = sending.Target("sglang", "", "g", "gloo", "127.0.0.1", 0, 1 << 20, 1)
    tensors = [("model.norm.weight", torch.ones(32))]
    with sampler_process(model_folder) as url:
        channel = sending.opened(target._replace(url=url))
        for _ in range(2):
            assert sending.send(channel.target, iter(tensors), channel).tensors == 1
    with pytest.raises(sending.Unsent, match=url):
        sending.send(channel.target, iter(tensors), channel)
    with pytest.raises(sending.Unsent):
        channel.close()


def test_a_channel_that_has_failed_is_not_kept(model_folder, tmp_path, monkeypatch):
    closed, target = [], {"engine": "sglang", "url": "http://one", "name": "g", "backend": "gloo"}
    target |= {"address": "127.0.0.1", "port": 0, "bytes": 1 << 20, "size": 1}

    class Open:
        close = closed.append

        def __init__(self, given):
            self.close = lambda: closed.append(self)

    def fails(target, tensors, channel):
        assert isinstance(channel, Open)
        raise sending.Unsent("it has ended")

    monkeypatch.setattr(sending, "opened", Open)
    monkeypatch.setattr(sending, "send", fails)
    with Served(write_server(tmp_path, model_folder, sampler="none", **WHOLE)) as served:
        models, model = served.workers.models, served.model()
        for count in range(2):  # the former one is closed
            models.connect("", {"targets": [target]}, {})
            assert len(closed) == count
        weights = saved(served, model)
        value = {"weights": weights, "target": target, "lengths": [1], "quantization": None}
        with pytest.raises(Refused, match="it has ended"):
            models.send("", value, {})
        assert models.disconnect("", {}, {}).value == {"disconnected": []}


def test_matrices_of_layers_are_quantized_and_no_others():
    draw = torch.Generator().manual_seed(0)
    names = (
        "embed_tokens",
        "layers.0.mlp.gate",
        "layers.0.mlp.experts.1.gate_proj",
        "layers.0.a.b",
    )
    tensors = [(f"model.{n}.weight", torch.randn(8, 8, generator=draw)) for n in names]
    tensors += [("lm_head.weight", torch.ones(8, 8)), ("model.norm.weight", torch.ones(8))]
    tensors += [("model.layers.0.ab.weight", torch.ones(8, 8))]
    how = {"weight_block_size": [4, 4], "modules_to_not_convert": ["a"]}
    made = dict(sending.quantized(iter(tensors), how))
    small = {name for name, tensor in made.items() if tensor.dtype == torch.float8_e4m3fn}
    assert small == {"model.layers.0.mlp.experts.1.gate_proj.weight", "model.layers.0.ab.weight"}
    assert {n for n in made if n.endswith("_scale_inv")} == {f"{n}_scale_inv" for n in small}
    assert made["model.layers.0.ab.weight_scale_inv"].shape == (2, 2)


# ---- vLLM, over NCCL


class Told(sending.Vllm):
    """vLLM's calls, without vLLM."""

    calls: list = []  # noqa: RUF012

    def _post(self, path, body):
        self.calls.append((path, body))


class Group:
    """In the place of NCCL's."""

    def __init__(self, size):
        self.size, self.id, self.received = size, bytes(range(128)), []

    def join(self):
        """Nothing to wait for."""

    def broadcast(self, tensor):
        self.received.append(tensor)

    def close(self):
        self.received.append("closed")


def test_vllm_is_sent_all_weights_by_its_own_calls(monkeypatch):
    """Those of its weight transfer over NCCL: a group by an id, a start, buckets and an end."""
    made = []
    monkeypatch.setattr(sending, "ById", lambda size: (made.append(Group(size)), made[0])[1])
    monkeypatch.setitem(sending.CHANNELS, "vllm", Told)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    Told.calls.clear()
    target = sending.Target("vllm", "http://vllm", "g", "nccl", "127.0.0.1", 0, 40, 2)
    tensors = [(f"t{i}", torch.full((2, 4), i, dtype=torch.bfloat16)) for i in range(3)]
    assert sending.send(target, iter(tensors)) == (3, 48, 2)
    update = {"names": ["t0", "t1"], "dtype_names": ["bfloat16"] * 2, "shapes": [[2, 4]] * 2}
    about = {"rank_offset": 1, "world_size": 3, "packed": False}
    about["nccl_unique_id_b64"] = base64.b64encode(bytes(range(128))).decode()
    assert Told.calls == [
        ("/init_weight_transfer_engine", {"init_info": about}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": update}),
        (
            "/update_weights",
            {"update_info": {k: v[:1] if k != "names" else ["t2"] for k, v in update.items()}},
        ),
        ("/finish_weight_update", {}),
        ("/shutdown_weight_transfer_engine", {}),
    ]
    [group] = made
    assert [t for t in group.received if t == "closed"] == ["closed"] and len(group.received) == 4
    assert all(a is b for a, (_, b) in zip(group.received, tensors, strict=False))


def test_vllm_takes_all_weights_over_nccl_alone(model_folder, tmp_path):
    """Which is told when it is added, with both values."""
    answers = {
        "/version": {"version": "0"},
        "/v1/models": {"data": [{"id": "m", "root": "m", "parent": None, "max_model_len": 64}]},
        "/server_info": {"vllm_config": {"model_config": {"dtype": "torch.float32"}}},
    }
    transport = httpx.MockTransport(
        lambda request: httpx.Response(200, json=answers[request.url.path])
    )
    with Served(write_server(tmp_path, model_folder, sampler="none", **WHOLE)) as served:
        endpoint = served.api.endpoint(Vllm(client_of(transport, "http://vllm")))
        said = "vllm takes all weights over nccl alone, and sync_inference_method is gloo_broadcast"
        with pytest.raises(Exception, match=said):
            asyncio.run(endpoint.registered())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="NCCL: only on a CUDA device")
def test_a_group_by_an_id_sends_bytes():
    """One rank: a GPU has room for no other."""
    group = groups.ById(1)
    assert len(group.id) == 128
    group.join()
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        tensor = torch.ones(4, device="cuda").to(dtype)
        group.broadcast(tensor)
        assert torch.equal(tensor.float(), torch.ones(4, device="cuda")), short(dtype)
    group.close()


# ---- memory


def test_a_server_that_sleeps_goes_on_as_it_was(model_folder, tmp_path, monkeypatch):
    """In the middle of a step of one model, and beside another one: requests wait, and then have
    the same bits.
    """

    def run(folder, sleeps):
        with Served(write_server(folder, model_folder)) as served:
            one, other = served.model(), served.model()
            results = [trained(served, one, 1), trained(served, other, 1)]
            results.append(served.result(served.passes(one, 4, documents(8))))
            name = saved(served, one)
            if sleeps:
                assert [bare(served, "/sleep", {})[1]["success"] for _ in range(2)] == [True, True]
                future = served.step(one, 5)
                served.answer()
                monkeypatch.setattr(api, "WAIT", 0.0)
                told = served.post("retrieve_future", {"request_id": future[1]["request_id"]})[1]
                assert told["type"] == "try_again" and told["queue_state"] == "paused_capacity"
                assert "sleeps" in told["queue_state_reason"]
                assert bare(served, "/wake_up", {})[1]["success"]
                assert not served.workers.models.asleep
                monkeypatch.undo()
            else:
                future = served.step(one, 5)
            results += [served.result(future), trained(served, other, 1, first=4)]
            scores = served.result(ask(served, name, params={"max_tokens": 1, "seed": 1}))
            return [*results, scores["sequences"]]

    assert run(tmp_path / "sleeps", sleeps=True) == run(tmp_path / "not", sleeps=False)


def test_workers_that_are_started_again_are_awake(file):
    with Served(file) as served:
        model = served.model()
        bare(served, "/sleep", {})
        future = served.passes(model, 1, documents())
    with Served(file) as served:
        assert "metrics" in served.result(future)


def test_all_of_an_engine_is_moved(file):
    """Weights, gradients, states and what is parked; counters stay. (Nothing computes on meta.)"""
    with Served(file) as served:
        one, other = served.model(), served.model()
        for model in (one, other):
            trained(served, model, 1)
            served.result(served.passes(model, 4, documents()))
        models = served.workers.models
        held = models.engine
        count = len(held.optimizer.state)
        models._move(torch.device("meta"))
        every = [*held.model.parameters(), *held.model.buffers()]
        every += [p.grad for p in held.model.parameters() if p.grad is not None]
        every += [t for own in held.optimizer.state.values() for t in own.values()]
        for tenant in models.bank._parked.values():
            every += [*tenant.values.values(), *tenant.gradients.values()]
            every += [t for own in tenant.states.values() for t in own.values()]
        large = [t for t in every if torch.is_tensor(t) and t.numel() > 1]
        assert count and len(large) > 4 * count
        assert {t.device.type for t in large} == {"meta"}
    counter = torch.zeros(())
    assert moved({"step": counter, "k": 3}, torch.device("meta")) == {"step": counter, "k": 3}


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="a CUDA device's memory: only on one")
def test_sleep_frees_the_memory_of_a_gpu(tmp_path):
    shape = {**QWEN3, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 4096}
    with Served(write_server(tmp_path, write_model(tmp_path / "model", shape))) as served:
        model = served.model()
        trained(served, model, 1)
        before = torch.cuda.memory_allocated()
        bare(served, "/sleep", {})
        assert torch.cuda.memory_allocated() < before / 4
        bare(served, "/wake_up", {})
        assert len(trained(served, model, 1, first=4)) == 3


# ---- several clients of a sampler


def test_each_client_of_a_sampler_has_numbers_of_its_own(file):
    with Served(file) as served:
        model = served.model()
        name = saved(served, model)
        join = {"sampling_session_id": name, "type": "join_sampling_session"}
        counts = [served.post("join_sampling_session", join)[1]["client_counter"] for _ in range(2)]
        assert counts == [1, 2]
        params = {"max_tokens": 1, "temperature": 0.0}
        each = [served.result(ask(served, name, 10**9 * n, params=params)) for n in (0, *counts)]
        assert each[0]["sequences"] == each[1]["sequences"] == each[2]["sequences"]
        # A session that is made again is the same one.
        own = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 5}
        body = {**own, "base_model": served.base}
        made = served.post("create_sampling_session", body)
        join["sampling_session_id"] = made[1]["sampling_session_id"]
        assert served.post("join_sampling_session", join)[1]["client_counter"] == 1
        assert served.post("create_sampling_session", body) == made
        join["sampling_session_id"] = "none"
        assert served.post("join_sampling_session", join)[0] == 404
