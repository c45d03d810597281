"""What a server's fields do, and the routes that tell."""

import math
import types

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from serving import PROTOBUF, Served, documents, passed, trained, write_model, write_server
from training import MOE

from tilewright.server import worker
from tilewright.server.api import BARE, NOT_OFFERED
from tilewright.server.fields import ONE_VALUE, load, size
from tilewright.server.models import Models
from tilewright.trainer.field_tree import ConfigError
from tilewright.trainer.parallel.mesh import Mesh

pytestmark = pytest.mark.packages
EXPERTS = {**MOE, "vocab_size": 97}


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("experts") / "model", EXPERTS)


def test_a_step_has_the_norms_of_each_kind_of_layer(model_folder, tmp_path):
    for told in (True, False):
        folder = tmp_path / str(told)
        with Served(write_server(folder, model_folder, log_gradient_norms=told)) as served:
            model = served.model()
            for seq, most in ((1, 0.0), (3, 1e-3)):  # clipped, too
                served.result(served.passes(model, seq, documents()))
                step = served.step(model, seq + 1, grad_clip_norm=most)
                metrics = served.result(step)["metrics"]
                kinds = {n.partition("/")[2]: v for n, v in metrics.items() if "/" in n}
                assert {*kinds} == ({"attention", "mlp", "head"} if told else set())
                if told:
                    norm = math.sqrt(sum(v * v for v in kinds.values()))
                    assert norm == pytest.approx(metrics["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("field", ["moe_shared_lora", "moe_hybrid_shared_lora"])
def test_experts_share_adapters_and_routers_are_told(field, experts_folder, tmp_path):
    first = []
    for on in (True, False):
        changes = {field: on, "log_router_stats": on}
        with Served(write_server(tmp_path / str(on), experts_folder, **changes)) as served:
            model = served.model()
            metrics, _ = passed(
                served.result(served.passes(model, 1, documents()), accept=PROTOBUF)
            )
            assert ("expert_load:mean" in metrics) == on
            norms = served.result(served.step(model, 2))["metrics"]
            assert norms["grad_norm/experts"] > 0 and "grad_norm/router" not in norms
            first.append(metrics["loss:sum"])
            [one, *_] = [
                m for m in served.workers.models.engine.model.modules() if hasattr(m, "mode")
            ]
            assert one.mode == {"moe_shared_lora": "shared"}.get(field, "hybrid_shared") or not on
    assert first[0] == pytest.approx(first[1], rel=1e-6)  # adapters add nothing yet


def test_losses_are_by_the_eager_twin_if_that_is_asked_for(model_folder, tmp_path):
    found = []
    for mode in ("compiled", "eager"):
        with Served(write_server(tmp_path / mode, model_folder, ce_mode=mode)) as served:
            of = served.workers.models.engine.model.ops.linear_cross_entropy
            answer = served.result(served.passes(served.model(), 1, documents()), accept=PROTOBUF)
            found.append((of, passed(answer)[0]["loss:sum"]))
    assert found[1][0] == "eager" != found[0][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


def test_a_server_tests_itself_before_it_is_ready(model_folder, tmp_path, monkeypatch):
    with Served(write_server(tmp_path / "a", model_folder)) as served:
        wanted = trained(served, served.model(), 1)
    file = write_server(tmp_path / "b", model_folder, enable_self_test=True)
    tested = []
    run = Models.self_test
    monkeypatch.setattr(Models, "self_test", lambda self: tested.append(run(self)))
    with Served(file) as served:
        served.workers.stopped = True  # it begins, and ends
        served.workers.lead()
        assert tested == [None] and not served.workers.models.about
        served.log.tell("workers", "ready")
        assert trained(served, served.model(), 1) == wanted  # and leaves nothing
        torch.nn.init.constant_(
            served.workers.models.engine.model.model.embed_tokens.weight, torch.inf
        )
        with pytest.raises(ConfigError, match=r"enable_self_test: cross_entropy: "):
            served.workers.models.self_test()


def test_the_references_own_file_is_accepted_whole(model_folder, tmp_path):
    """Each of its fields with its default, but for those that cannot be so here."""
    values = {name: value for name, (value, _) in ONE_VALUE.items()}
    values |= {"worker_bind_host": "0.0.0.0", "worker_bind_port": 5556, "freeze_router": True}
    values |= {"storage_limit": "10TB", "idle_session_timeout": 7200.0, "log_router_stats": True}
    server, _ = load(str(write_server(tmp_path, model_folder, **values)), [])
    assert size(server.storage_limit) == 10 * 10**12 and size("500MB") == 500e6
    wrong = {"pipeline_parallel_size": 2, "pipeline_parallel_schedule": "GPipe"}
    wrong |= {"pp_variable_seq_lengths": False, "optimizer": "muon", "muon_lr": 0.1}
    wrong |= {"muon_momentum": 0.9, "muon_nesterov": False, "muon_ns_steps": 6}
    wrong |= {"muon_adjust_lr_fn": "original", "load_checkpoint_path": "x"}
    wrong |= {"merge_lora_interval": 1, "reset_optimizer_on_merge": True}
    assert {*wrong} == {*ONE_VALUE}
    with pytest.raises(ConfigError) as error:
        load(str(write_server(tmp_path, model_folder, **wrong)), ["--server.storage_limit=5GB"])
    for name, (value, why) in ONE_VALUE.items():
        [said] = [line for line in error.value.problems if line.startswith(f"server.{name} = ")]
        assert why in said and said.endswith(f"accepted is {value!r}")
    for changes, said in (
        ({"storage_limit": "much"}, "must be a size such as 500MB"),
        ({"freeze_router": False}, "with enable_lora adapters alone train"),
        ({"enable_lora": False}, "server.lora_rank = 8: with enable_lora = false all weights"),
        ({"load_weights_mode": "dcp"}, "load_weights_mode"),
        ({"ckpt_manager": "torch"}, "server.ckpt_manager"),
        ({"sync_inference_method": "p2p"}, "server.sync_inference_method"),
        ({"sampler": "vllm"}, "sampler is 'vllm'; it needs the URL of one"),
        ({"sampler_url": "http://127.0.0.1:1"}, "only vllm and sglang have a URL"),
        ({"sampler": "vllm", "sampler_url": "x:1"}, "accepted is http://HOST:PORT"),
        ({"sampler": "sglang", "sampler_url": "http://10.0.0.1:1"}, "not in inference_allowlist"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(str(write_server(tmp_path, model_folder, **changes)), [])


def test_a_server_is_deterministic_if_that_is_asked_for(model_folder, tmp_path, monkeypatch):
    """By the workers' command, as rank 0 begins; a CPU's results have the same bits anyway."""
    seen = []

    def lead(workers):
        seen.append((workers.exact, torch.are_deterministic_algorithms_enabled()))

    monkeypatch.setattr(worker.Workers, "lead", lead)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "out").mkdir()
    for device in ("cpu", "cuda"):
        for asked in (True, False):
            file = write_server(tmp_path, model_folder, enable_full_determinism=asked)
            made = types.SimpleNamespace(mesh=Mesh(device=torch.device(device)))
            monkeypatch.setattr(worker, "models_of", lambda *_, made=made: made)
            monkeypatch.setattr(
                worker.launch, "run", lambda train, work, made=made: work(made.mesh) or 0
            )
            assert worker.main([str(file)]) == 0
    assert seen == [(True, True), (True, False), (True, True), (False, False)]


def test_what_is_not_offered_is_refused_with_a_sentence(model_folder, tmp_path):
    with Served(write_server(tmp_path, model_folder)) as served:
        headers = {"x-api-key": served.key}
        for prefix, table in (("/api/v1/", NOT_OFFERED), ("/", BARE)):
            for name, why in table.items():
                method = "GET" if name.startswith("list") else "POST"
                path = prefix + name.format(name="m", kind="weights", saved="x")
                answer = served.client.request(method, path, content=b"{}", headers=headers)
                assert answer.status_code == 501 and why in answer.json()["detail"]
                assert served.client.request(method, path, content=b"{}").status_code == 401


def test_routes_tell_what_there_is(model_folder, tmp_path):
    with Served(write_server(tmp_path, model_folder)) as served:
        given = {"tags": [], "sdk_version": "0", "user_metadata": {"who": "me"}}
        session = served.post("create_session", given)[1]["session_id"]
        other = served.post("create_session", {})[1]["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": served.base}
        model = served.result(served.post("create_model", body))["model_id"]
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": served.base}
        served.post("create_sampling_session", sampler)
        save = {"model_id": model, "path": "x"}
        served.result(served.post("save_weights", save))
        served.result(served.post("save_weights_for_sampler", save))
        assert served.get("sessions")[1]["sessions"] == [session, other]
        assert served.get("sessions?offset=1&limit=1")[1]["sessions"] == [other]
        assert served.get(f"sessions/{session}")[1] == {
            "training_run_ids": [model],
            "sampler_ids": [f"{session}:sample:0"],
            "user_metadata": {"who": "me"},
        }
        run = served.get(f"training_runs/{model}")[1]
        assert run["last_checkpoint"]["tinker_path"].endswith("/weights/x")
        assert run["last_sampler_checkpoint"]["tinker_path"].endswith("/sampler_weights/x")
        assert run["is_lora"] and run["lora_rank"] == 8
        every = served.get("checkpoints?limit=1")[1]
        assert every["cursor"]["total_count"] == 2 and len(every["checkpoints"]) == 1
        assert served.get(f"get_info?model_id={model}")[1]["model_id"] == model
        assert served.post("get_info", [])[0] == 422 and served.get("get_info")[0] == 404
        assert served.post("client/dynamic_config", {})[1] == {"sample_cancel_enabled": True}
        assert served.post(f"sessions/{session}/finish", {})[0] == 204
        assert served.post("session_heartbeat", {"session_id": session})[0] == 410
        assert served.get(f"sessions/{session}")[0] == 200 and served.get("sessions/none")[0] == 404


def test_a_result_stays_until_a_client_that_is_there_has_it(model_folder, tmp_path, monkeypatch):
    with Served(write_server(tmp_path, model_folder, checkpoint_every=1)) as served:
        model = served.model()
        future = served.passes(model, 1, documents())
        served.result(served.step(model, 2))  # which has a checkpoint
        with monkeypatch.context() as patch:

            async def gone(self):
                return True

            patch.setattr("starlette.requests.Request.is_disconnected", gone)
            served.result(future)
        served.log.forget(after_sent=-1.0, after=3600.0)
        assert "metrics" in served.result(future)  # it was not sent
        served.log.forget(after_sent=-1.0, after=3600.0)
        name = {"request_id": future[1]["request_id"]}
        assert served.post("retrieve_future", name)[0] == 410
