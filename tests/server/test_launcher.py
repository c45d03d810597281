"""A server as it is started: its processes, kills of each, and how it ends."""

import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from helpers import until
from ranks import ROOT
from serving import PROTOBUF, Served, documents, pass_body, passed, write_server

from tilewright.server.log import Log
from tilewright_lab.server_torture.client import Server, processes


def calls(model, step):
    """The requests of a step, in order."""
    adam = {"learning_rate": 1e-2, "eps": 1e-12}
    number = 2 * step + 1
    return [
        ("forward_backward", pass_body(model, number, documents(step))),
        ("optim_step", {"model_id": model, "seq_id": number + 1, "adam_params": adam}),
    ]


def test_processes_that_are_killed_come_again_and_nothing_is_lost(model_folder, tmp_path):
    """By the command, on two ranks: results are those of one process that was not disturbed, within
    rounding, and of the same two ranks bit for bit where they are asked for twice.
    """
    wanted = []
    with Served(write_server(tmp_path / "alone", model_folder)) as served:
        model = served.model()
        for step in range(4):
            for path, body in calls(model, step):
                own = {"raw" if isinstance(body, bytes) else "body": body}
                wanted.append(served.result(served.post(path, **own), accept=PROTOBUF))
    two = {"data_parallel_mode": "fsdp2", "nproc_per_node": 2, "checkpoint_every": 2}
    file = write_server(tmp_path / "served", model_folder, worker_connection_timeout=900, **two)
    with Server(file) as server, server.client() as client:
        launcher = server.process
        assert (server.root / "api.key").stat().st_mode & 0o777 == 0o600
        opened = client.post("create_session", {"tags": [], "sdk_version": "0"}).value
        new = {"session_id": opened["session_id"], "model_seq_id": 0}
        new |= {"base_model": str(model_folder), "lora_config": {"rank": 4, "seed": 3}}
        model = client.result(client.post("create_model", new)).value["model_id"]
        answers, futures = [], []
        for step in range(4):
            for path, body in calls(model, step):
                futures.append(client.post(path, body))
                again = client.post(path, body)
                assert again.value == futures[-1].value, "it is not added again"
                if step == 1:
                    # The API in the middle of all; rank 0 or another one.
                    name = "api" if path == "forward_backward" else "worker"
                    os.kill(processes(launcher.pid)[name][-1], signal.SIGKILL)
                answers.append(client.result(futures[-1], protobuf=True))
        assert [client.result(f, protobuf=True) for f in futures] == answers
        for got, want in zip(answers, wanted, strict=True):
            assert got.status == 200
            if isinstance(want, bytes):
                assert passed(got.body)[0]["loss:sum"] == pytest.approx(
                    passed(want)[0]["loss:sum"], rel=1e-4
                )
        other = [sys.executable, "-m", "tilewright.server.launcher", "--config", str(file)]
        refused = subprocess.run([*other, "--mode", "connect"], capture_output=True, text=True)
        assert refused.returncode == 1 and "another server runs there" in refused.stderr
        run = [sys.executable, "-m", "tilewright.server.worker", str(file)]
        others = subprocess.run(run, capture_output=True, text=True)
        assert others.returncode == 1 and "other workers are on" in others.stderr
        started = [pid for pids in processes(launcher.pid).values() for pid in pids]
        assert len(started) >= 3
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait() == 0
        assert not processes(launcher.pid)
        log = Log(server.root)
        assert log.fact("workers") == "stopped" and not log.waiting()
        log.close()


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


def test_the_example_of_a_loop_learns():
    command = [sys.executable, ROOT / "examples/rl_loop.py", "--steps", "10"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    rewards = [float(line.rpartition(" ")[2]) for line in run.stdout.splitlines()]
    assert len(rewards) == 10 and rewards[0] < 0.1 and rewards[-1] > 0.5
