"""What a client does: it sends requests, waits for their results, and numbers those of a model."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any, NamedTuple

from conform import wire

PROTOBUF, JSON = "application/x-protobuf", "application/json"
READ = 60.0  # seconds of one answer: servers keep retrieve_future waiting for up to 40
PAUSE = 0.005  # seconds between looks, for servers that answer at once
RATE = 1e-3  # the learning rate of steps that are to change something


class Answer(NamedTuple):
    """body: of JSON, what it holds; else bytes.   kind: its Content-Type."""

    status: int
    body: Any
    kind: str

    @property
    def detail(self) -> str:
        """The sentence of a refusal."""
        assert isinstance(self.body, dict) and "detail" in self.body, self
        detail = self.body["detail"]
        assert isinstance(detail, str) and len(detail.split()) > 2, self
        return detail

    @property
    def request(self) -> str:
        """The id of a request that was accepted."""
        assert self.status == 200, self
        return self.body["request_id"]


class Server:
    """A server. patience: seconds that it has for one request."""

    def __init__(self, url: str, key: str, base: str, patience: float):
        self.at = urllib.parse.urlsplit(url.rstrip("/"))
        self.key, self.base, self.patience = key, base, patience

    def send(
        self,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        method: str = "POST",
        key: str | None = None,
        **headers: str,
    ) -> Answer:
        """raw: a body of protobuf, if no other Content_Type is given.   key: another one, or ""."""
        content = raw
        if raw is None:
            content = json.dumps(body).encode() if method == "POST" else None
        given = {"Content-Type": JSON if raw is None else PROTOBUF}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        if key := self.key if key is None else key:
            given["Authorization"] = f"Bearer {key}"
        plain = self.at.scheme == "http"
        kind = http.client.HTTPConnection if plain else http.client.HTTPSConnection
        connection = kind(self.at.hostname or "", self.at.port, timeout=READ)
        try:
            # It may refuse what is too large before all of it has come.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, f"{self.at.path}/api/v1/{path}", content, given)
            response = connection.getresponse()
            return _read(response.status, response.read(), response.headers)
        finally:
            connection.close()

    def look(self, future: Answer, *, protobuf: bool = False) -> Answer:
        """One look for a result."""
        accept = PROTOBUF if protobuf else JSON
        answer = self.send("retrieve_future", {"request_id": future.request}, Accept=accept)
        assert answer.status == 200, answer
        return answer

    def wait(self, future: Answer, *, protobuf: bool = False) -> Answer:
        """The answer with what a request has come to: a result, or an error."""
        end = time.monotonic() + self.patience
        while True:
            answer = self.look(future, protobuf=protobuf)
            if not (isinstance(answer.body, dict) and answer.body.get("type") == "try_again"):
                return answer
            assert time.monotonic() < end, f"no result in {self.patience} seconds: {answer.body}"
            time.sleep(PAUSE)

    def result(self, future: Answer) -> Any:
        """A result of JSON."""
        body = self.wait(future).body
        assert "error" not in body, body
        return body

    def passed(self, future: Answer) -> wire.Passed:
        """The result of a pass, in protobuf."""
        answer = self.wait(future, protobuf=True)
        assert isinstance(answer.body, bytes) and PROTOBUF in answer.kind, answer
        return wire.passed(answer.body)

    def refused(self, answer: Answer) -> str:
        """The sentence of what is refused: at once, or as the result, an error of the user's."""
        if answer.status != 200:
            assert answer.status in (400, 422), answer
            return answer.detail
        body = self.wait(answer).body
        assert body.get("category") == "user" and body["error"], body
        return body["error"]


def _read(status: int, data: bytes, headers: Any) -> Answer:
    kind = headers.get("Content-Type", "")
    if JSON not in kind:
        return Answer(status, data, kind)

    def refuse(name: str) -> float:
        raise AssertionError(f"JSON holds {name}: {data[:200]!r}")

    return Answer(status, json.loads(data, parse_constant=refuse), kind)


class Model:
    """A model, and the number of its next request."""

    def __init__(self, server: Server, name: str):
        self.server, self.name, self.next = server, name, 1

    def number(self, seq: int | None) -> int:
        seq = self.next if seq is None else seq
        self.next = max(self.next, seq + 1)
        return seq

    def post(self, path: str, seq: int | None = None, /, **body: Any) -> Answer:
        own = {"model_id": self.name, "seq_id": self.number(seq)}
        return self.server.send(path, {**own, **body})

    def body(self, seq: int | None, data: Sequence[Any], *given: Any, **options: Any) -> bytes:
        """The body of a pass."""
        return wire.request(self.name, self.number(seq), data, *given, **options)

    def send_pass(
        self, data: Sequence[Any], *given: Any, seq: int | None = None, **options: Any
    ) -> Answer:
        """given, options: as of wire.request."""
        return self.server.send("forward_backward", raw=self.body(seq, data, *given, **options))

    def send_step(self, seq: int | None = None, **adam: float) -> Answer:
        plain = {"learning_rate": RATE, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
        return self.post("optim_step", seq, adam_params={**plain, "grad_clip_norm": 0.0, **adam})

    def passed(self, *given: Any, **options: Any) -> wire.Passed:
        return self.server.passed(self.send_pass(*given, **options))

    def forward(self, *given: Any) -> wire.Passed:
        return self.passed(*given, forward=True)

    def stepped(self, **adam: float) -> float:
        """The norm of the gradients that a step has."""
        return norm_of(self.server.result(self.send_step(**adam)))

    def norm(self) -> float:
        """The norm of the gradients so far, which are gone then."""
        return self.stepped(learning_rate=0.0)


def norm_of(result: Any) -> float:
    return result["metrics"]["grad_norm"]
