"""What keys, models and samplers do not share, and what comes too late."""

import json

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from serving import (
    PROTOBUF,
    Served,
    documents,
    listed,
    pass_body,
    passed,
    trained,
    write_server,
)

from tilewright.server.keys import digest

pytestmark = pytest.mark.packages


def in_json(served, model, seq, data, loss="cross_entropy"):
    own = {"data": data, "loss_fn": loss}
    return served.post(
        "forward_backward", {"model_id": model, "seq_id": seq, "forward_backward_input": own}
    )


def norm(served, model, seq):
    return served.result(served.step(model, seq, learning_rate=0.0))["metrics"]["grad_norm"]


def test_nothing_of_a_key_is_another_keys(model_folder, tmp_path):
    keys = "".join(f"{name}: {digest('tml-' + name)}\n" for name in ("ann", "bob"))
    (tmp_path / "keys").write_text(keys)
    changes = {"api_token_file": str(tmp_path / "keys"), "max_pending": 2}
    with Served(write_server(tmp_path, model_folder, **changes), key="tml-ann") as served:
        model = served.model()
        session = model.partition(":")[0]
        path = served.result(served.post("save_weights", {"model_id": model, "path": "x"}))["path"]
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        made = served.post("create_sampling_session", sampler)
        assert made[0] == 200 and served.post("create_sampling_session", sampler) == made
        base = {**sampler, "base_model": served.base}
        del base["model_path"]
        status, answer = served.post("create_sampling_session", base)
        assert status == 400 and "is taken" in answer["detail"]
        used = served.log.model(model).used
        served.key = "tml-bob"
        for own in ({**sampler, "sampling_session_seq_id": 1}, base):
            assert served.post("create_sampling_session", own)[0] in (400, 404)
        assert served.get(f"samplers/{session}:sample:0")[0] == 404
        assert served.get(f"sessions/{session}")[0] == 404
        assert served.post("session_heartbeat", {"session_id": session})[0] == 404
        # As a heartbeat of the same session, if it were the other key's.
        served.log.used(f"{session}:train:", served.api.keys.owner("tml-bob"))
        assert served.log.model(model).used == used
        given = {"content": b'{"ttl_seconds": 5}', "headers": {"x-api-key": served.key}}
        url = f"/api/v1/training_runs/{model}/checkpoints/weights/x/ttl"
        assert served.client.put(url, **given).status_code == 404
        other = served.model(7)
        for seq in (1, 2):
            assert served.passes(other, seq, documents())[0] == 200
        assert served.passes(other, 3, documents())[0] == 429
        served.key = "tml-ann"
        assert served.get(f"samplers/{session}:sample:0")[1]["model_path"] == path
        assert served.passes(model, 1, documents())[0] == 200
        assert served.log.model(model).used > used


def test_the_model_decides_whether_a_step_divides_and_not_the_body(file):
    """A datum of weights 0.5 counts as one of weights 1: by its tokens; and weights of 0 do not."""
    [(tokens, inputs)] = documents(lengths=(8,))
    half = [(tokens, {**inputs, "weights": np.array([0.5] * 6 + [0] * 2, np.float32)})]
    with Served(file) as served:
        sums, named = served.model(train_unembed=False), "mine"
        lora = {"rank": 4, "alpha": 16, "seed": 3}
        created = {"model_id": named, "base_model": served.base, "lora_config": lora}
        served.result(served.post("create_model", created))
        norms = []
        for model in (sums, named):
            served.result(served.passes(model, 1, half))
            norms.append(norm(served, model, 2))
            served.result(in_json(served, model, 3, listed(half)))
            norms.append(norm(served, model, 4))
        assert norms[0] == pytest.approx(norms[1]) and norms[2] == pytest.approx(norms[3])
        assert norms[0] == pytest.approx(6 * norms[2], rel=1e-4)
        # Weights whose sum is negative, or 0.
        for seq, weights in ((5, [-1.0] * 8), (7, [1.0, -1.0] * 4)):
            data = [(tokens, {**inputs, "weights": np.array(weights, np.float32)})]
            served.result(in_json(served, named, seq, listed(data)))
            assert norm(served, named, seq + 1) > 0


def test_labels_may_be_ignored_in_some_documents_alone(file):
    data = [
        {"model_input": {"input_ids": [1, 2, 3, 4]}, "loss_fn_inputs": {"labels": labels}}
        for labels in ([1, 2, 3, 4], [-100, -100, 3, 4])
    ]
    with Served(file) as served:
        answer = served.result(in_json(served, served.model(), 1, data))
        each = [output["elementwise_loss"]["data"] for output in answer["loss_fn_outputs"]]
        assert each[0][1:] == each[1][1:] and each[0][0] > 0 == each[1][0]


def test_a_forward_pass_leaves_no_gradient(file):
    """By its route, whatever the message says."""
    with Served(file) as served:
        model = served.model()
        future = served.post("forward", raw=pass_body(model, 1, documents()))
        assert passed(served.result(future, accept=PROTOBUF))[0]["loss:sum"] > 0
        assert "there is no gradient" in served.result(served.step(model, 2))["error"]


def test_what_comes_after_its_gap_is_refused(model_folder, tmp_path, monkeypatch):
    """And there is always room for the end of a model."""
    with Served(write_server(tmp_path, model_folder, max_pending=3)) as served:
        model = served.model()
        for seq in (3, 4):
            assert served.passes(model, seq, documents())[0] == 200
        now = served.workers.server.model_copy(update={"gap_timeout": -1.0})
        monkeypatch.setattr(served.workers, "server", now)
        served.workers.skip_gaps()
        served.answer()
        status, answer = served.passes(model, 2, documents())
        assert status == 422 and f"the next of {model} is 5" in answer["detail"]
        status, answer = served.passes(model, 2, [])  # a refusal would use up its number
        assert status == 422 and "is 5" in answer["detail"]
        assert not served.log.waiting()
        assert served.result(served.passes(model, 5, documents()))["metrics"]
        for seq in (7, 8, 9):
            assert served.passes(model, seq, documents())[0] == 200
        assert served.passes(model, 10, documents())[0] == 429
        assert served.post("unload_model", {"model_id": model})[0] == 200


def test_samplers_go_with_their_session_and_their_time(model_folder, tmp_path):
    with Served(write_server(tmp_path, model_folder)) as served:
        model = served.model()
        session = model.partition(":")[0]
        path = served.result(served.post("save_weights", {"model_id": model, "path": "x"}))["path"]
        used = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        served.post("create_sampling_session", used)
        remove = {"model_id": model, "checkpoint_id": "weights/x"}
        status, answer = served.post("delete_checkpoint", remove)
        assert status == 400 and "is held by the sampler" in answer["detail"]
        for number, seconds in ((1, 3600), (2, None)):
            save = {"model_id": model, "sampling_session_seq_id": number, "ttl_seconds": seconds}
            served.result(served.post("save_weights_for_sampler", save))
        folders = served.root / "samplers"
        assert len([*folders.iterdir()]) == 2
        clock = served.log.expired  # those whose ttl_seconds are over
        served.log.expire(f"{session}:sample:1", -1)
        assert clock() == [f"{session}:sample:1"]
        served.workers.sweep()
        assert [f.name for f in folders.iterdir()] == [f"{session}:sample:2"]
        assert served.get(f"samplers/{session}:sample:1")[0] == 404
        finish = served.client.post(
            f"/api/v1/sessions/{session}/finish", content=b"{}", headers={"x-api-key": served.key}
        )
        assert finish.status_code == 204 and not [*folders.iterdir()]
        assert served.post("delete_checkpoint", remove)[0] == 200
        body = {"session_id": session, "model_seq_id": 5, "base_model": served.base}
        assert served.post("create_model", body)[0] == 410


def test_samplers_that_nobody_asks_go(model_folder, tmp_path, monkeypatch):
    with Served(write_server(tmp_path, model_folder, idle_session_timeout=3600)) as served:
        session = served.model().partition(":")[0]
        for number in (0, 1):
            own = {"session_id": session, "sampling_session_seq_id": number}
            served.post("create_sampling_session", {**own, "base_model": served.base})
        now = served.workers.server.model_copy(update={"idle_session_timeout": 1e-9})
        monkeypatch.setattr(served.workers, "server", now)
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        asked = {"sampling_session_id": f"{session}:sample:1", "seq_id": 0, "prompt": prompt}
        served.post("asample", {**asked, "sampling_params": {"max_tokens": 1}})
        idle = served.log.idle_samplers
        assert idle(0.0) == [f"{session}:sample:0"], "the other one has a request that waits"
        served.answer()
        assert idle(0.0) == [f"{session}:sample:0", f"{session}:sample:1"] and not idle(3600.0)
        served.workers.sweep()
        assert served.get(f"samplers/{session}:sample:0")[0] == 404


def test_a_model_with_requests_is_not_idle(file):
    with Served(file) as served:
        model = served.model()
        assert [m.name for m in served.log.idle(-1.0)] == [model]
        served.passes(model, 1, documents())
        assert not served.log.idle(-1.0)


def test_an_error_in_a_request_fails_its_model_alone(file, monkeypatch):
    """On one process; several begin again."""
    with Served(file) as served:
        model, other = served.model(), served.model()
        served.result(served.post("save_weights", {"model_id": model, "path": "x"}))
        run = served.workers.models.run

        def failing(kind, name, *rest):
            if (kind, name) == ("optim_step", model):
                raise ValueError("something is wrong")
            return run(kind, name, *rest)

        served.result(served.passes(model, 1, documents()))
        monkeypatch.setattr(served.workers.models, "run", failing)
        answer = served.result(served.step(model, 2))
        assert answer["category"] == "server" and "something is wrong" in answer["error"]
        status, answer = served.step(model, 3)
        assert status == 400 and "has failed: optim_step" in answer["detail"]
        assert len(trained(served, other, 1)) == 3


def test_weights_are_loaded_into_a_model_with_states_or_without(file):
    with Served(file) as served:
        model = served.model()
        trained(served, model, 2)
        path = served.result(served.post("save_weights", {"model_id": model, "path": "x"}))["path"]
        wanted = trained(served, model, 1, first=7)
        load = {"model_id": model, "path": path}
        for first, states in ((11, True), (15, False)):
            body = {**load, "seq_id": first - 1, "optimizer": states}
            assert "path" in served.result(served.post("load_weights", body))
            found = trained(served, model, 1, first=first)
            assert found[:2] == wanted[:2]
            if states:
                assert found == wanted
        # A fresh optimizer's: of a new model with these weights.
        body = {"session_id": "new", "model_seq_id": 0, "path": path, "optimizer": False}
        other = served.result(served.post("load_weights", body))["model_id"]
        assert trained(served, other, 1) == found
        assert (
            json.loads(found[2])["metrics"]["step"] == 1 != json.loads(wanted[2])["metrics"]["step"]
        )


def test_norms_by_kind_are_of_gradients_before_they_are_clipped(file):
    """In either protocol, whose fields of the bound are its own."""
    with Served(file) as served:
        one, other, named = (
            served.model(train_unembed=False),
            served.model(train_unembed=False),
            "n",
        )
        lora = {"rank": 4, "alpha": 16, "seed": 3}
        created = {"model_id": named, "base_model": served.base, "lora_config": lora}
        created["optimizer_config"] = {"learning_rate": 1e-2}
        served.result(served.post("create_model", created))
        found = []
        for model in (one, other, named):
            served.result(served.passes(model, 1, documents()))
            bound = {one: {}, other: {"grad_clip_norm": 1e-3}}.get(model)
            if bound is None:
                step = {"model_id": named, "seq_id": 2, "gradient_clip": 1e-6}
                future = served.post("optim_step", step)
            else:
                future = served.step(model, 2, **bound)
            found.append(served.result(future)["metrics"])
            served.result(served.passes(model, 3, documents()))
            moved = served.result(served.step(model, 4))["metrics"]
            found[-1]["next"] = moved["grad_norm"]
        for name in found[0]:
            if name.startswith("grad_norm"):
                assert found[1][name] == pytest.approx(found[0][name], rel=1e-4)
        assert found[0]["next"] != found[1]["next"]
        # The second moment of Adam does not see a gradient of another scale but for eps.
        moments = served.workers.models.engine.optimizer.state
        assert max(s["exp_avg_sq"].max().item() for s in moments.values()) > 0
        served.workers.models.bank.take(named)
        count = sum(len(tokens) for tokens, _ in documents())
        assert found[2]["grad_norm"] * count == pytest.approx(found[0]["grad_norm"], rel=1e-3)


def test_results_that_were_sent_go_and_others_stay(file):
    with Served(file) as served:
        model = served.model()
        futures = [served.passes(model, seq, documents(seq)) for seq in (1, 2)]
        served.answer()
        served.result(served.step(model, 3))
        served.log.checkpointed(model, 4, "none")  # nothing is to be computed again
        served.result(futures[0])
        served.log.forget(after_sent=0.0, after=1e9)
        names = [{"request_id": answer["request_id"]} for _, answer in futures]
        assert [served.post("retrieve_future", name)[0] for name in names] == [410, 200]


def test_what_a_model_is_computed_again_from_stays(file):
    with Served(file) as served:
        model = served.model()
        wanted = trained(served, model, 1)
        served.log.forget(after_sent=-1.0, after=-1.0)
    with Served(file) as served:
        assert served.result(served.passes(model, 4, documents()), accept=PROTOBUF)
        assert len(wanted) == 3


def test_an_error_that_does_not_come_again_fails_the_model(file):
    with Served(file) as served:
        model = served.model()
        assert "there is no gradient" in served.result(served.step(model, 1))["error"]
        db = served.log._db
        db.execute("UPDATE results SET error = 'something else' WHERE error IS NOT NULL")
    with Served(file) as served:
        status, answer = served.passes(model, 2, documents())
        assert status == 400 and "has other bits" in answer["detail"]


def test_a_checkpoint_for_sampling_has_its_time_too(file):
    with Served(file) as served:
        model = served.model()
        save = {"model_id": model, "path": "x", "ttl_seconds": 3600}
        served.result(served.post("save_weights_for_sampler", save))
        [saved] = served.get(f"training_runs/{model}/checkpoints")[1]["checkpoints"]
        assert saved["expires_at"] > saved["time"]
        again = served.result(served.post("save_weights_for_sampler", {**save, "overwrite": True}))
        assert again["path"].endswith("/x")


def test_pages_of_lists_have_numbers(file):
    with Served(file) as served:
        for limit in ("9" * 5000, "-1", "x"):
            assert served.get(f"training_runs?limit={limit}")[0] == 422
