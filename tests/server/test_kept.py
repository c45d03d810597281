"""What a server keeps, and for how long: checkpoints, models that nobody uses, room on the disk."""

import json
import sqlite3
import types

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from serving import PROTOBUF, Served, documents, trained, write_server

from tilewright.core.files import folder_size

pytestmark = pytest.mark.packages
HOUR = 3600.0


@pytest.fixture
def later(monkeypatch):
    """Sets the log's clock, which stands still, to so many seconds from the beginning."""
    clock = types.SimpleNamespace(now=1e9)
    monkeypatch.setattr("tilewright.server.log.time", types.SimpleNamespace(time=lambda: clock.now))
    return lambda seconds: setattr(clock, "now", 1e9 + seconds)


def save(served, model, kind="save_weights", **more):
    return served.result(served.post(kind, {"model_id": model, **more}))


def loaded(served, path, number=0):
    """The name of a new model with what was saved."""
    body = {"session_id": "loaded", "model_seq_id": number, "path": path, "optimizer": True}
    return served.result(served.post("load_weights", body))["model_id"]


def saved(served, model):
    known = served.get(f"training_runs/{model}/checkpoints")[1]["checkpoints"]
    return [one["checkpoint_id"] for one in known]


def test_a_model_is_saved_as_it_begins(model_folder, tmp_path):
    file = write_server(tmp_path, model_folder, skip_initial_checkpoint=False)
    with Served(file) as served:
        model = served.model()
        assert saved(served, model) == ["weights/000000"]
        first = trained(served, model, 1)
        again = loaded(served, f"tinker://{model}/weights/000000")
        assert trained(served, again, 1) == first
        # What is saved without a name, and without a number in a sequence, gets a free one.
        names = [save(served, model)["path"].rpartition("/")[2] for _ in range(2)]
        assert len({"000000", *names}) == 3
        assert saved(served, model) == ["weights/000000", *(f"weights/{name}" for name in names)]
    with Served(file) as served:
        assert saved(served, model)[0] == "weights/000000"
        # A client may have the name for its own; once.
        assert "path" in save(served, model, path="000000")
        again = loaded(served, f"tinker://{model}/weights/000000", 1)
        assert trained(served, again, 1) == trained(served, model, 1, first=4) != first
        assert "is there already" in save(served, model, path="000000")["error"]


def test_what_is_over_the_limit_is_not_saved(model_folder, tmp_path):
    with Served(write_server(tmp_path, model_folder)) as served:
        model = served.model()
        trained(served, model, 1)
        save(served, model, path="a")
        there = sum(f.stat().st_size for f in served.root.rglob("*") if f.is_file())
        models = served.workers.models
        assert models.settings.most == 10**13
        models.settings = models.settings._replace(most=there)
        answer = save(served, model, path="b")
        assert answer["category"] == "user" and "StorageLimitError: " in answer["error"]
        answer = save(served, model, "save_weights_for_sampler", path="b")
        assert "delete checkpoints" in answer["error"]
        assert saved(served, model) == ["weights/a"]
        assert not (served.root / f"models/{model}/weights/b").exists()
        trained(served, model, 1, first=4)  # no quota on what is learned
        removed = {"model_id": model, "checkpoint_id": "weights/a"}
        assert served.post("delete_checkpoint", removed)[0] == 200
        models.settings = models.settings._replace(most=2 * there)
        assert "path" in save(served, model, path="b")


def test_files_that_go_while_they_are_counted_end_nothing(tmp_path, monkeypatch):
    """The API deletes checkpoints while the workers look for room."""
    (tmp_path / "a").write_bytes(bytes(9))
    monkeypatch.setattr("os.walk", lambda folder: [(folder, [], ["a", "gone"])])
    assert folder_size(tmp_path) == 9


def test_a_checkpoint_whose_time_is_over_goes(model_folder, tmp_path, later):
    with Served(write_server(tmp_path, model_folder)) as served:
        model = served.model()
        trained(served, model, 1)
        for name in ("a", "b", "c"):
            save(served, model, path=name, ttl_seconds=int(HOUR))
        known = served.get(f"training_runs/{model}/checkpoints")[1]["checkpoints"]
        assert all(one["expires_at"] > one["time"] for one in known)

        def keep(name, seconds):
            path = f"/api/v1/training_runs/{model}/checkpoints/weights/{name}/ttl"
            given = {"content": json.dumps({"ttl_seconds": seconds}).encode()}
            return served.client.put(path, **given, headers={"x-api-key": served.key}).status_code

        assert (keep("b", None), keep("c", int(3 * HOUR))) == (204, 204)
        assert keep("none", 3600) == 404 and keep("c", 0) == 422
        later(0.9 * HOUR)
        served.workers.sweep()
        assert len(saved(served, model)) == 3
        later(1.1 * HOUR)
        served.workers.sweep()
        assert saved(served, model) == ["weights/b", "weights/c"]
        folder = served.root / f"models/{model}/weights"
        assert sorted(f.name for f in folder.iterdir()) == ["b", "c"]
        newest, older = served.get("checkpoints")[1]["checkpoints"]
        assert newest["checkpoint_id"] == "weights/c" and older["expires_at"] is None


def test_a_model_that_nobody_uses_is_saved_and_unloaded(model_folder, tmp_path, later):
    file = write_server(tmp_path, model_folder, idle_session_timeout=HOUR)
    with Served(file) as served:
        model, fresh, used = (served.model() for _ in range(3))
        trained(served, model, 1)
        assert served.get("session_info")[1]["idle_timeout_seconds"] == HOUR
        later(0.9 * HOUR)
        session = used.partition(":")[0]
        assert served.post("session_heartbeat", {"session_id": session})[0] == 200
        served.workers.sweep()
        served.answer()
        assert len(served.get("session_info")[1]["active_sessions"]) == 3
        later(1.1 * HOUR)
        models = served.workers.models
        room = models.settings
        models.settings = room._replace(most=0)
        for _ in range(2):  # it cannot be saved, and stays
            served.workers.sweep()
            served.answer()
        assert served.get("session_info")[1]["active_sessions"] == [model, used]
        models.settings = room
        for _ in range(2):
            served.workers.sweep()
            served.answer()
        assert served.get("session_info")[1]["active_sessions"] == [used]
        status, answer = served.passes(model, 4, documents())
        assert status == 410 and "nobody asked for it for 3600 s" in answer["detail"]
        path = answer["detail"].rpartition(" ")[2]
        assert path.startswith(f"tinker://{model}/weights/idle_")
        unloaded = served.result(served.post("unload_model", {"model_id": model}))
        assert unloaded["type"] == "unload_model"
        # It had learned nothing.
        assert "saved" not in served.passes(fresh, 1, documents())[1]["detail"]
        assert saved(served, fresh) == []
        wanted = trained(served, used, 2)[3:]
        assert trained(served, loaded(served, path), 1, seed=2)[:2] == wanted[:2]


def test_a_disk_that_is_full_ends_the_request_alone(model_folder, tmp_path, monkeypatch):
    file = write_server(tmp_path, model_folder, checkpoint_every=1)
    with Served(file) as served:
        model = served.model()
        saver = served.workers.models._saver

        def full(*_, **__):
            raise OSError("the disk of x is full")

        with monkeypatch.context() as patch:
            patch.setattr(saver, "write", full)
            trained(served, model, 1)  # its checkpoint fails
            answer = save(served, model, path="a")
            assert answer == {"error": "the disk of x is full", "category": "server"}
            patch.setattr(served.workers.models.engine, "export", full)
            answer = save(served, model, "save_weights_for_sampler", path="a")
            assert answer["category"] == "server"
        assert served.log.model(model).saved == 0
        # And the log's: the result is written when there is room, and requests are refused.
        finish, failed = served.log.finish, []

        def once(*given, **more):
            if not failed:
                failed.append(True)
                raise sqlite3.OperationalError("database or disk is full")
            finish(*given, **more)

        monkeypatch.setattr("tilewright.server.worker.LOOK", 0.0)
        monkeypatch.setattr(served.log, "finish", once)
        assert "path" in save(served, model, path="a") and failed
        monkeypatch.setattr(served.log, "append", lambda *_, **__: once())
        failed.clear()
        status, answer = served.passes(model, 4, documents())
        assert status == 503 and "cannot be written: database or disk is full" in answer["detail"]
        monkeypatch.undo()
        wanted = trained(served, model, 1, first=4)
    with Served(file) as served:
        path = f"tinker://{model}/weights/a"
        assert trained(served, loaded(served, path), 1)[:2] == wanted[:2]


def test_where_nothing_can_be_computed_again_a_kill_returns_to_the_checkpoint(
    model_folder, tmp_path
):
    """On a GPU without deterministic algorithms: the model fails, and its checkpoint is loaded."""
    file = write_server(tmp_path, model_folder, checkpoint_every=2)
    with Served(file) as served:
        model, other = served.model(), served.model()
        wanted = trained(served, model, 3)
        trained(served, other, 2)
    with Served(file, exact=False) as served:
        status, answer = served.passes(model, 10, documents())
        assert status == 400 and "3 requests cannot be computed again" in answer["detail"]
        path = answer["detail"].rpartition(" ")[2]
        assert saved(served, model) == [path.partition(model + "/")[2]]
        assert trained(served, loaded(served, path), 1, seed=4)[:2] == wanted[6:8]
        # The other's checkpoint has all.
        assert served.result(served.passes(other, 7, documents()), accept=PROTOBUF)
    with Served(file, exact=False) as served:
        assert path.partition(model + "/")[2] in saved(served, model)


def test_each_key_has_its_own(model_folder, tmp_path):
    from tilewright.server.keys import Keys, digest

    keys = {"ann": "tml-a", "bob": "tml-b"}
    lines = [f"{name}: {digest(key)}\n" for name, key in keys.items()]
    (tmp_path / "keys").write_text("".join(lines))
    file = write_server(tmp_path, model_folder, api_token_file=str(tmp_path / "keys"))
    with Served(file, key="tml-a") as served:
        model = served.model()
        created = {"model_id": "default", "base_model": served.base}
        future = served.post("create_model", created)
        served.result(future)
        path = save(served, model, path="x")["path"]
        assert served.get("training_runs")[1]["training_runs"][0]["model_owner"] == "ann"
        served.key = "tml-b"
        assert served.post("retrieve_future", {"request_id": future[1]["request_id"]})[0] == 404
        status, answer = served.post("create_model", created)
        assert status == 400 and "the name default is taken" in answer["detail"]
        assert served.step(model, 1)[0] == 404 and served.get(f"training_runs/{model}")[0] == 404
        body = {"session_id": "s", "model_seq_id": 0, "path": path, "optimizer": True}
        assert served.post("load_weights", body)[0] == 404
        assert served.post("weights_info", {"tinker_path": path})[0] == 404
        removed = {"model_id": model, "checkpoint_id": "weights/x"}
        assert served.post("delete_checkpoint", removed)[0] == 404
        for shown in ("training_runs", "checkpoints", "sessions"):
            assert served.get(shown)[1][shown] == []
        served.key = "tml-c"
        assert served.get("training_runs")[0] == 401
    (tmp_path / "keys").write_text(lines[0] + "bob: tml-b\n")
    with pytest.raises(ValueError, match="line 2 must be `NAME: SHA-256 of the key`"):
        Keys.read(tmp_path / "keys")
    with pytest.raises(ValueError, match="cannot be read"):
        Keys.read(tmp_path / "none")
