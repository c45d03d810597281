"""A server as its processes, and a client that repeats what had no answer, as published ones do."""

from __future__ import annotations

import contextlib
import http.client
import json
import pathlib
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from tilewright.core import platform

PROTOBUF, JSON = "application/x-protobuf", "application/json"
PATIENCE = 300.0  # seconds without an answer, or a result, after which nothing is expected
PAUSE = 0.02  # seconds before what had no answer is sent again
HELD = 60.0  # seconds that a connection is read for: the API answers within 40
BUSY = (429, 503)


class Stuck(Exception):
    """A server that does not answer, or has ended."""


class Answer(NamedTuple):
    status: int
    body: bytes
    protobuf: bool

    @property
    def value(self) -> Any:
        return json.loads(self.body)


class Client:
    """A connection to a server.

    root: its folder, with the url and the key.   alive: raises Stuck where the server has ended.
    """

    def __init__(self, root: pathlib.Path, alive: Callable[[], object]):
        url, key = ((root / name).read_text().strip() for name in ("url", "api.key"))
        address = urllib.parse.urlsplit(url)
        assert address.hostname is not None  # the launcher wrote it
        self._connection = http.client.HTTPConnection(address.hostname, address.port, HELD)
        self._key, self._alive = key, alive
        self.times: list[float] = []  # of each answer, by time.time()

    def close(self) -> None:
        self._connection.close()

    def call(self, method: str, path: str, content: bytes | None = None, **headers: str) -> Answer:
        """Sends a request until there is an answer. Raises Stuck."""
        given = {"Authorization": f"Bearer {self._key}", "Content-Type": JSON}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        until = time.monotonic() + PATIENCE
        while True:
            try:
                self._connection.request(method, path, content, given)
                response = self._connection.getresponse()
                kind = response.headers.get("Content-Type", "")
                answer = Answer(response.status, response.read(), kind == PROTOBUF)
                if answer.status not in BUSY:
                    self.times.append(time.time())
                    return answer
            except (OSError, http.client.HTTPException):
                self._connection.close()
            self._alive()
            if time.monotonic() > until:
                raise Stuck(f"{path} had no answer for {PATIENCE:g} seconds")
            time.sleep(PAUSE)

    def until(self, seen: Callable[[], object], otherwise: str) -> None:
        """Waits for something else of the server. Raises Stuck with what is said otherwise."""
        until = time.monotonic() + PATIENCE
        while not seen():
            self._alive()
            if time.monotonic() > until:
                raise Stuck(otherwise)
            time.sleep(PAUSE)

    def post(self, path: str, body: Any) -> Answer:
        """body: bytes of protobuf, or what JSON can hold."""
        if isinstance(body, bytes):
            return self.call("POST", f"/api/v1/{path}", body, Content_Type=PROTOBUF)
        return self.call("POST", f"/api/v1/{path}", json.dumps(body).encode())

    def result(self, future: Answer, *, protobuf: bool = False) -> Answer:
        """What a request has come to; where it was refused, that. Raises Stuck."""
        if future.status != 200 or "request_id" not in future.value:
            return future
        content = json.dumps({"request_id": future.value["request_id"]}).encode()
        accept = PROTOBUF if protobuf else JSON
        until = time.monotonic() + PATIENCE
        while True:
            answer = self.call("POST", "/api/v1/retrieve_future", content, Accept=accept)
            if answer.protobuf or answer.value.get("type") != "try_again":
                return answer
            if time.monotonic() > until:
                raise Stuck(f"{answer.value} after {PATIENCE:g} seconds")


class Server:
    """A server by its launcher, within `with`, once it is ready.

    file: its configuration.   module: the launcher's.   options: further ones of it.
    python: what starts the launcher; None: this Python.
    """

    def __init__(
        self,
        file: pathlib.Path,
        module: str = "tilewright.server.launcher",
        options: Sequence[str] = (),
        python: str | None = None,
    ):
        self.root = pathlib.Path(yaml.safe_load(file.read_text())["output_dir"])
        self.said = file.with_suffix(".log")
        command = [python or sys.executable, "-m", module, *options]
        self._command = [*command, "--config", str(file)]
        self.ready = "connect" not in options  # else there are no workers

    def __enter__(self) -> Server:
        with self.said.open("ab") as said:
            self.process = subprocess.Popen(self._command, stdout=said, stderr=said)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        self.process.wait()

    def alive(self) -> None:
        if self.process.poll() is not None:
            end = "\n".join(self.said.read_text(errors="replace").splitlines()[-20:])
            raise Stuck(f"the server has ended with {self.process.returncode}: {end}")

    def _wait(self) -> None:
        until = time.monotonic() + PATIENCE
        while True:
            self.alive()
            if (self.root / "url").is_file():
                with self.client() as client:
                    path = "/health" if self.ready else "/api/v1/healthz"
                    # Where the workers are not ready, /health has a status that is sent again.
                    if client.call("GET", path).status == 200:
                        return
            if time.monotonic() > until:
                raise Stuck(f"the server is not ready after {PATIENCE:g} seconds")
            time.sleep(PAUSE)

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        client = Client(self.root, self.alive)
        try:
            yield client
        finally:
            client.close()


def processes(launcher: int) -> dict[str, list[int]]:
    """Those that a launcher has started, by the last part of their module: api, worker, sampler."""
    own = f"{platform.SERVER}={launcher}".encode()
    pids: dict[str, list[int]] = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environment, words = (
                (folder / name).read_bytes().split(b"\0") for name in ("environ", "cmdline")
            )
        except OSError:  # it has ended
            continue
        for word in words if own in environment else ():
            if word.startswith((b"tilewright.server.", b"tilewright.sampler")):
                name = word.decode().rpartition(".")[2]
                pids.setdefault(name, []).append(int(folder.name))
    return pids


def write_model(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Random weights of a small model, as transformers writes them."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        **changes,
    }
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)
    return folder


def write_server(
    folder: pathlib.Path, model: pathlib.Path, changes: Mapping[str, Any]
) -> pathlib.Path:
    """A server's configuration: float32, one process; it is started again however often it ends."""
    given = {
        "model_path": str(model),
        "output_dir": str(folder / "out"),
        "lora_rank": 8,
        "sample_packing_sequence_len": 64,
        "pad_to_multiple_of": 8,
        "api_port": 0,
        "enable_mixed_precision": False,
        "enable_gradient_checkpointing": False,
        "data_parallel_mode": "none",
        "nproc_per_node": 1,
        "worker_max_retries": 1_000_000,
        "worker_connection_timeout": 900,
        # What comes after a kill is no gap.
        "gap_timeout": 3600,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "server.yaml").write_text(yaml.safe_dump(given))
    return folder / "server.yaml"
