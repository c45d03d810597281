"""A server as it is started: its processes, kills of each, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from helpers import pause, until
from serving import PROTOBUF, Served, documents, pass_body, passed, write_model, write_server

from tilewright.server.log import Log
from tilewright_lab.server_torture.client import processes


class Client:
    """Sends requests as a client does: it tries again where there is no answer."""

    def __init__(self, root):
        self.url, self.key = ((root / name).read_text().strip() for name in ("url", "api.key"))

    def post(self, path, body=None, *, raw=None, **headers):
        content = raw if raw is not None else json.dumps(body).encode()
        kind = PROTOBUF if raw is not None else "application/json"
        given = {"content-type": kind, "authorization": f"Bearer {self.key}", **headers}
        request = urllib.request.Request(
            url=f"{self.url}/api/v1/{path}", data=content, headers=given
        )
        while True:
            pause()
            try:
                with urllib.request.urlopen(request) as response:
                    data = response.read()
                    found = PROTOBUF in response.headers["content-type"]
                    return data if found else json.loads(data)
            except urllib.error.HTTPError as error:
                raise AssertionError(error.read()) from error
            except OSError:  # it is started again
                continue

    def result(self, future, **headers):
        while True:
            answer = self.post("retrieve_future", {"request_id": future["request_id"]}, **headers)
            if not (isinstance(answer, dict) and answer.get("type") == "try_again"):
                return answer


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("base") / "model")


def calls(model, step):
    """The requests of a step, in order."""
    adam = {"learning_rate": 1e-2, "eps": 1e-12}
    number = 2 * step + 1
    return [
        ("forward_backward", {"raw": pass_body(model, number, documents(step))}),
        ("optim_step", {"body": {"model_id": model, "seq_id": number + 1, "adam_params": adam}}),
    ]


def test_processes_that_are_killed_come_again_and_nothing_is_lost(model_folder, tmp_path):
    """By the command, on two ranks: results are those of one process that was not disturbed, within
    rounding, and of the same two ranks bit for bit where they are asked for twice.
    """
    wanted = []
    with Served(write_server(tmp_path / "alone", model_folder)) as served:
        model = served.model()
        for step in range(4):
            for path, given in calls(model, step):
                wanted.append(served.result(served.post(path, **given), accept=PROTOBUF))
    two = {"data_parallel_mode": "fsdp2", "nproc_per_node": 2, "checkpoint_every": 2}
    file = write_server(tmp_path / "served", model_folder, worker_connection_timeout=900, **two)
    root = tmp_path / "served/out"
    command = [sys.executable, "-m", "tilewright.server.launcher", "--config", str(file)]
    launcher = subprocess.Popen(command)
    try:
        until(lambda: (root / "url").is_file() or launcher.poll() is not None)
        client = Client(root)
        assert (root / "api.key").stat().st_mode & 0o777 == 0o600
        session = client.post("create_session", {"tags": [], "sdk_version": "0"})["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": str(model_folder)}
        body["lora_config"] = {"rank": 4, "seed": 3}
        model = client.result(client.post("create_model", body))["model_id"]
        found, futures = [], []
        for step in range(4):
            for path, given in calls(model, step):
                futures.append(client.post(path, **given))
                assert client.post(path, **given) == futures[-1], "it is not added again"
                if step == 1:
                    # The API in the middle of all; rank 0 or another one.
                    name = "api" if path == "forward_backward" else "worker"
                    os.kill(processes(launcher.pid)[name][-1], signal.SIGKILL)
                found.append(client.result(futures[-1], accept=PROTOBUF))
        assert [client.result(f, accept=PROTOBUF) for f in futures] == found
        assert len(found) == len(wanted)
        for got, want in zip(found, wanted, strict=True):
            if isinstance(want, bytes):
                assert passed(got)[0]["loss:sum"] == pytest.approx(
                    passed(want)[0]["loss:sum"], rel=1e-4
                )
        other = [*command, "--mode", "connect"]
        refused = subprocess.run(other, capture_output=True, text=True)
        assert refused.returncode == 1 and "another server runs there" in refused.stderr
        started = [pid for pids in processes(launcher.pid).values() for pid in pids]
        assert len(started) >= 3
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait() == 0
        assert not processes(launcher.pid)
        log = Log(root)
        assert log.fact("workers") == "stopped" and not log.waiting()
        log.close()
    finally:
        launcher.kill()
        launcher.wait()


def test_a_launcher_that_is_killed_takes_its_processes_along(model_folder, tmp_path):
    file = write_server(tmp_path, model_folder, worker_connection_timeout=900)
    command = [sys.executable, "-m", "tilewright.server.launcher", "--config", str(file)]
    launcher = subprocess.Popen(command)
    until(lambda: {*processes(launcher.pid)} == {"api", "worker"})
    launcher.kill()
    launcher.wait()
    until(lambda: not processes(launcher.pid))


def test_a_configuration_that_is_wrong_is_refused_whole(model_folder, tmp_path):
    wrong = {"worker_bind_host": "10.0.0.1", "api_host": "0.0.0.0", "optimizer": "muon"}
    file = write_server(tmp_path, model_folder, enable_lora=False, **wrong)
    command = [sys.executable, "-m", "tilewright.server.launcher", "--config", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    for said in (
        "server.worker_bind_host = 10.0.0.1: nothing is bound",
        "server.api_host = 0.0.0.0: the API has no TLS",
        "server.optimizer = muon: clients ask for adamw in each request",
        "server.lora_rank = 8: with enable_lora = false all weights train, and nothing reads it",
    ):
        assert said in ended.stderr
