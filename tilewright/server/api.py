"""The API: it checks a request whole, appends it to the log, and answers once that is on the disk.

Results are read from the log when clients ask for them. The protocol's errors are
`{"detail": sentence}`; a request that was accepted ends with `{"error": ..., "category": ...}`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import contextvars
import datetime
import inspect
import json
import logging
import pathlib
import secrets
import shutil
import socket
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, TypeVar

import uvicorn
import zstandard
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.background import BackgroundTask

from tilewright.core.follow import follow
from tilewright.server import answers, binary, bodies
from tilewright.server.answers import PROTOBUF
from tilewright.server.bodies import Base, Call
from tilewright.server.datums import ROUTES, Data, check
from tilewright.server.endpoints import Endpoint, Workers
from tilewright.server.endpoints import Own as Serves
from tilewright.server.engines import ENGINES, Engine
from tilewright.server.fields import Own, load
from tilewright.server.frames import packed
from tilewright.server.inference import Inference, client_of
from tilewright.server.keys import Keys
from tilewright.server.log import GENERATE, SAMPLES, Conflict, Log, Model, Path, Result
from tilewright.server.losses import checked as checked_loss
from tilewright.server.names import (
    PARTS,
    below,
    canonical,
    checked,
    folder_of,
    parsed,
    path_of,
)
from tilewright.server.page import page
from tilewright.server.refused import Refused
from tilewright.server.rollouts import Rollouts
from tilewright.trainer.checkpoint import hf
from tilewright.trainer.config import Config
from tilewright.trainer.data.routes import Routes

SESSION = "session/"  # before the names of sessions among paths
WAIT = 40.0  # seconds that retrieve_future waits: published clients read for 45
SOON = 0.005  # seconds in which the result of a small request comes
POLL = 0.001, 0.02  # seconds between looks for a result from then on, at least and at most
# What SQLite says where it cannot write, in part.
UNWRITTEN = ("full", "locked", "busy", "I/O", "readonly")
ZSTD = 256  # bytes that are decompressed at a time
WAITED = 0.02  # of what a result was waited for, until the next look: it comes so much later
EACH = 0.0004  # seconds between looks of all that wait: hundreds would keep a core busy
PREFIX = "/api/v1"
PUBLISH = "training_runs/{name}/checkpoints/{kind}/{saved}/publish"
# What published clients are configured by.
CLIENT = {"use_pyqwest_transport": False, "sample_join_sampling_session": True}
# What a client may ask for that is not built, with the sentence of the refusal.
NOT_OFFERED = {
    "create_custom_loss": "losses of clients are code, which does not run on this server",
    "copy_weights": "checkpoints are not copied between accounts",
    "save_weights_external": "weights are saved as PEFT has them, by save_weights_for_sampler",
    PUBLISH: "checkpoints are for who has their key alone",
    "retrieve_futures": "results are asked for one by one, by retrieve_future",
}
# The same of paths without the prefix.
BARE = {
    **dict.fromkeys(
        ("update_dedicated_endpoint", "update_serverless_weights"),
        "weights and credentials are not sent to other hosts",
    ),
}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
Handler = Callable[[Request, bytes], Any]
_OWNER: contextvars.ContextVar[str] = contextvars.ContextVar("owner")


class Limits(NamedTuple):
    """What clients may ask for.   vocabulary, longest: tokens that there are, and of one document.
    bytes: of a request.   waiting: requests at a time.   idle: seconds after which a model that
    nobody asks for is unloaded; 0: never.   sampled: tokens of a prompt with what an engine for
    sampling adds.   routes: what recorded experts look like; None: the model has none.
    """

    vocabulary: int
    longest: int
    bytes: float
    waiting: int
    idle: float
    sampled: int
    routes: Routes | None


class Sampling(NamedTuple):
    """How samples are made.   logprobs: as `Rollouts` has it.   hosts: at which engines may be.
    exact: whether training computes in float32.   backend: by which all weights are sent.
    """

    logprobs: str
    hosts: list[str]
    exact: bool
    backend: str


class Api:
    """What the routes share.

    keys: one of which requests must come with.   base: what models are made from, of the kind
    `arch`.   ends: tokens that end a text.
    """

    def __init__(
        self,
        requests: Log,
        keys: Keys,
        base: Base,
        limits: Limits,
        *,
        ends: list[int],
        arch: str,
        tokenizer: str,
        sampling: Sampling,
    ):
        self.requests, self.keys, self.base, self.limits = requests, keys, base, limits
        self.ends, self.arch, self.tokenizer = ends, arch, tokenizer
        self.sampling, self.root = sampling, requests.file.parent
        self._polling = 0  # clients that wait for a result
        self.rollouts = Rollouts(requests, sampling.logprobs, routes=limits.routes)
        self.inference = Inference(self, sampling.hosts)

    def endpoint(self, engine: Engine, pool: str | None = None) -> Endpoint:
        """An engine at its address."""
        base, limits, how = self.base, self.limits, self.sampling
        known = base.names, limits.vocabulary, limits.sampled, base.rank
        own = Serves(*known, how.exact, how.backend)
        return Endpoint(engine, self.root, own, Workers(self.requests), pool)

    @property
    def rank(self) -> int | None:
        """The largest of adapters; None: all weights train."""
        return self.base.rank

    @property
    def owner(self) -> str:
        """Who the request in progress comes from."""
        return _OWNER.get()

    # ---- accepting

    async def body(self, request: Request) -> bytes:
        """The body of a request, decompressed. Raises Refused where it is too large."""
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            self._fits(size)
            parts.append(part)
        data = b"".join(parts)
        match request.headers.get("content-encoding", "identity"):
            case "identity":
                return data
            case "zstd":
                try:
                    return self._decompressed(data)
                except zstandard.ZstdError as error:
                    raise Refused(422, f"the body is no zstd: {error}", used=False) from error
            case other:
                raise Refused(415, f"Content-Encoding is {other!r}; accepted is 'zstd'", used=False)

    def _decompressed(self, data: bytes) -> bytes:
        """All frames. Raises ZstdError for what is cut off, and Refused where it is too large."""
        parts, size = [], 0
        while data:
            frame = zstandard.ZstdDecompressor().decompressobj()
            for at in range(0, len(data), ZSTD):  # each stands for a few MB at most
                parts.append(frame.decompress(data[at : at + ZSTD]))
                size += len(parts[-1])
                self._fits(size)
                if frame.eof:
                    data = frame.unused_data + data[at + ZSTD :]
                    break
            else:
                raise zstandard.ZstdError("its end is missing")
        return b"".join(parts)

    def _fits(self, size: int) -> None:
        if size > self.limits.bytes:
            raise Refused(
                413,
                f"the body is larger than {self.limits.bytes / 1e6:g} MB (max_body_mb)",
                used=False,
            )

    def authorized(self, request: Request) -> str:
        """Who a request comes from. Raises Refused."""
        given = request.headers.get("x-api-key") or ""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = given or (token if scheme.lower() == "bearer" else "")
        if (owner := self.keys.owner(given)) is None:
            raise Refused(401, "the key is missing or wrong: Authorization: Bearer KEY", used=False)
        return owner

    def accept(self, call: Call, *, ends: bool = False) -> dict[str, Any]:
        """Appends a request. Raises Refused where its model, or the queue, cannot take it.

        ends: whether it is for the end of its model, for which there is always room.
        """
        requests = self.requests
        if call.creates is None and call.kind not in SAMPLES:
            # A client that saw no answer ends its model again.
            self.model(call.model, ended=call.kind == "unload_model")
        elif (other := requests.model(call.model)) is not None and other.owner != self.owner:
            raise Refused(400, f"the name {call.model} is taken; give another", used=False)
        state = requests.fact("workers") or ""
        if state.startswith("failed"):
            raise Refused(503, f"the workers have {state}", used=False)
        if not ends and requests.waiting(self.owner) >= self.limits.waiting:
            raise Refused(429, f"{self.limits.waiting} requests wait already", used=False)
        if requests.full():
            raise Refused(429, f"{requests.file} has the size of log_max_gb", used=False)
        try:
            name = requests.append(
                call.model,
                call.seq,
                call.kind,
                packed(call.value, call.arrays),
                self.owner,
                creates=call.creates,
                same=None if call.same is None else packed(call.same),
            )
        except Conflict as error:
            raise Refused(422, str(error), used=False) from error
        answer = {"request_id": name}
        return answer if call.kind in SAMPLES else {**answer, "model_id": call.model}

    def model(self, name: str, *, ended: bool = False) -> Model:
        """A model that may be used, or also one that has ended. Raises Refused."""
        model = self.requests.model(checked("model_id", name))
        if model is None or model.owner != self.owner:
            raise Refused(404, f"there is no model {name}", used=False)
        if model.state == "ended" and not ended:
            if model.why is not None:
                raise Refused(410, f"{name} has ended: {model.why}", used=False)
            raise Refused(404, f"there is no model {name}", used=False)
        if model.state == "failed":
            raise Refused(400, f"{name} has failed: {model.why}", used=False)
        return model

    def path(self, path: str) -> Any:
        """What is known of a saved path or a sampler; None: nothing."""
        owner, about = self.requests.path(path) or (None, None)
        return about if owner == self.owner else None

    # ---- routes of requests with a future

    def passes(self, request: Request, data: bytes) -> dict[str, Any]:
        kind = request.headers.get("content-type", "").partition(";")[0]
        backward = request.url.path.endswith("forward_backward")
        if kind == PROTOBUF:
            given = binary.PassRequest(data, backward=backward)
        elif kind == "application/json":
            given = bodies.PassRequest(data, backward=backward)
        else:
            raise Refused(415, f"Content-Type must be {PROTOBUF} or application/json")
        model, seq = checked("model_id", given.model), given.seq
        if seq is not None and seq < 1:
            raise Refused(422, f"seq_id is {seq}; accepted are numbers from 1", used=False)
        name = "forward_backward" if given.backward else "forward"
        try:
            each = given.data()
            if not each:
                raise Refused(422, "data: there is no datum")
            documents = Data.joined(each)
            check(documents, self.limits.vocabulary, self.limits.longest)
            documents = checked_loss(given.loss, given.options, documents, self.limits.vocabulary)
            routes = given.routes(self.limits.routes, documents.lengths)
        except Refused as refused:
            if seq is not None:
                self._used(refused, model, seq, name, data)
            raise
        own = {"divided": self._named(model)} if given.backward else {}
        value = {"loss": given.loss, "options": given.options, **own}
        replayed = {} if routes is None else {ROUTES: routes}
        return self.accept(Call(model, seq, name, value, {**documents.arrays(), **replayed}))

    def create_model(self, request: Request, data: bytes) -> dict[str, Any]:
        call = bodies.create_model(bodies.read_json(data), self.base)
        session, _, number = call.model.partition(":train:")
        if number and (self.path(f"{SESSION}{session}") or {}).get("finished"):
            raise Refused(410, f"the session {session} is finished")
        return self.accept(call)

    def optim_step(self, request: Request, data: bytes) -> dict[str, Any]:
        def make(given: Any) -> Call:
            name = given.get("model_id") if isinstance(given, dict) else None
            known = self.requests.model(name) if isinstance(name, str) else None
            return bodies.optim_step(given, known.about if known is not None else {})

        return self._step("optim_step", data, make)

    async def abort(self, request: Request, data: bytes) -> Response:
        return await self.at_once(request, self._step("abort_gradient_epoch", data, bodies.abort))

    async def kill_session(self, request: Request, data: bytes) -> Response:
        """Ends a model, after it was saved if that is asked for."""
        body = bodies.read(bodies.KillSession, bodies.read_json(data))
        model = self.model(body.model_id, ended=True)
        name, said = f"final_{model.ran:06d}", f"{model.name} is unloaded"
        told: dict[str, Any] = {"success": True, "message": said, "checkpoint_path": None}
        if model.state == "ended":  # a client that saw no answer asks again
            kept = path_of(model.name, "weights", name)
            path = answers.as_named(kept) if self.path(kept) is not None else None
            return JSONResponse({**told, "checkpoint_path": path})
        if body.save_checkpoint:
            value = bodies.saving(name, overwrite=True)
            call = Call(model.name, None, "save_weights", value)
            saved = await self.at_once(request, self.accept(call, ends=True))
            told["checkpoint_path"] = json.loads(bytes(saved.body)).get("path")
            if told["checkpoint_path"] is None:
                return saved
        call = Call(model.name, None, "unload_model", None)
        await self.at_once(request, self.accept(call, ends=True))
        return JSONResponse(told)

    async def at_once(self, request: Request, future: dict[str, Any]) -> Response:
        """The result of a request, for routes without futures."""
        body = json.dumps({"request_id": future["request_id"]}).encode()
        answer = await self.retrieve(request, body)
        if json.loads(bytes(answer.body)).get("type") == "try_again":
            raise Refused(503, f"request {future['request_id']} is not done yet", used=False)
        return answer

    def save_weights(self, request: Request, data: bytes) -> dict[str, Any]:
        return self._step("save_weights", data, bodies.save_weights)

    def save_for_sampler(self, request: Request, data: bytes) -> dict[str, Any]:
        return self._step("save_weights_for_sampler", data, bodies.save_for_sampler)

    async def save_full(self, request: Request, data: bytes) -> Response:
        """In the JSON dialect, at once."""
        call = bodies.save_full(bodies.read_json(data))
        answer = await self.at_once(request, self.accept(call))
        made = json.loads(bytes(answer.body))
        return JSONResponse({**made, "dtype": call.value["dense"]}) if "path" in made else answer

    def load_weights(self, request: Request, data: bytes) -> dict[str, Any]:
        given = bodies.read_json(data)
        path = given.get("path") if isinstance(given, dict) else None
        known = self.path(canonical(path)) if isinstance(path, str) else None
        return self._step(
            "load_weights", data, lambda body: bodies.load_weights(body, self.base, known)
        )

    def unload_model(self, request: Request, data: bytes) -> dict[str, Any]:
        return self.accept(bodies.unload_model(bodies.read_json(data)), ends=True)

    def _step(self, kind: str, data: bytes, make: Callable[[Any], Call]) -> dict[str, Any]:
        """A request in JSON that may have a number of its model's sequence."""
        given = bodies.read_json(data)
        try:
            call = make(given)
        except Refused as refused:
            model, seq = (
                (given.get(name) if isinstance(given, dict) else None)
                for name in ("model_id", "seq_id")
            )
            if isinstance(model, str) and type(seq) is int and 1 <= seq < 1 << 31:
                self._used(refused, model, seq, kind, data)
            raise
        return self.accept(call)

    def _used(self, refused: Refused, model: str, seq: int, kind: str, data: bytes) -> None:
        """A request that is refused has used up its number, and its repetition is refused alike."""
        if refused.used and refused.status in (400, 422, 501):
            self.model(model)
            try:
                self.requests.refuse(model, seq, kind, data, self.owner, str(refused))
            except Conflict as error:
                raise Refused(422, str(error), used=False) from error

    def sample(self, request: Request, data: bytes) -> dict[str, Any]:
        given = bodies.read_json(data)
        name = given.get("sampling_session_id") if isinstance(given, dict) else None
        known = self.path(name) if isinstance(name, str) else None
        if known is None:
            raise Refused(404, f"there is no sampler {name}")
        limits, weights = self.limits, known["weights"]
        if (model := known.get("inflight")) is not None:
            weights = self.requests.inflight(model, self.owner) or weights
        engine = min(limits.sampled, self.rollouts.longest)
        sampling = bodies.Sampling(self.ends, limits.vocabulary, limits.longest, engine)
        call = bodies.sample(given, weights, sampling)
        if call.kind == GENERATE and not self.rollouts.takes(weights):
            raise Refused(400, f"{weights} holds no weights for sampling")
        answer = self.accept(call)
        count = call.value.get("generate", {}).get("samples") or len(call.value["asked"]["draws"])
        return {
            **answer,
            "sample_sequence_ids": [f"{answer['request_id']}:{i}" for i in range(count)],
        }

    async def cancel(self, request: Request, data: bytes) -> Response:
        """Ends a sample that is not there yet. What is there stays."""
        given = bodies.read_json(data)
        name = given.get("request_id") if isinstance(given, dict) else None
        if not isinstance(name, str) or self.requests.owner_of(name) != self.owner:
            raise Refused(404, f"there is no request {name!r:.80}")
        canceled = self.requests.cancel(name)
        if canceled is not None:
            await self.rollouts.cancel(canceled)
        return Response(status_code=204)

    # ---- results

    async def retrieve(self, request: Request, data: bytes) -> Response:
        given = bodies.read_json(data)
        name = given.get("request_id") if isinstance(given, dict) else None
        if not isinstance(name, str) or self.requests.owner_of(name) != self.owner:
            raise Refused(404, f"there is no request {name!r:.80}")
        began = time.monotonic()
        self._polling += 1
        try:
            result = await self._awaited(request, name, began)
        finally:
            self._polling -= 1
        if result is None:
            why = self.requests.blocked(name)
            state = {"queue_state": "paused_capacity" if why else "active"}
            state |= {"queue_state_reason": why} if why else {}
            return JSONResponse({"type": "try_again", "request_id": name, **state})
        if result.expired:
            raise Refused(410, f"the result of {name} is no longer kept")
        if result.error is not None:
            answer = JSONResponse({"error": result.error, "category": result.category})
            return await self._told(name, request, answer)
        kind, model = self.requests.kind_of(name) or ("", "")
        if kind == "optim_step" and not await self._sent(model, began):
            return JSONResponse({"type": "try_again", "request_id": name, "queue_state": "active"})
        assert result.body is not None  # else it would have expired
        protobuf = PROTOBUF in request.headers.get("accept", "")
        named = self._named(model)
        made = answers.answer(kind, result.body, named=named, protobuf=protobuf)
        return await self._told(name, request, made)

    async def _sent(self, model: str, began: float) -> bool:
        """Whether engines have been sent a model after a step, which is waited for, or there was
        no need.
        """
        while self.inference.is_due(model):
            if time.monotonic() - began > WAIT:
                return False
            await asyncio.sleep(POLL[1])
        return True

    async def _awaited(self, request: Request, name: str, began: float) -> Result | None:
        """A result, or None where it does not come in time, or its client has gone."""
        result = self.requests.result(name)
        if result is None:
            result = await asyncio.to_thread(self._soon, name)
        while result is None:
            waited = time.monotonic() - began
            if waited > WAIT or await request.is_disconnected():
                return None
            most = max(POLL[1], EACH * self._polling)
            await asyncio.sleep(min(max(POLL[0], WAITED * waited), most))
            result = self.requests.result(name)
        return result

    def _soon(self, name: str) -> Result | None:
        """A result that comes at once: asyncio's own clock ticks in milliseconds."""
        until = time.monotonic() + SOON
        while (result := self.requests.result(name)) is None and time.monotonic() < until:
            time.sleep(SOON / 50)
        return result

    async def _told(self, name: str, request: Request, answer: Response) -> Response:
        """The answer with a result, which counts as sent where a client is there to read it."""
        if not await request.is_disconnected():

            def sent() -> None:
                with contextlib.suppress(sqlite3.OperationalError):  # it stays longer
                    self.requests.sent(name)

            answer.background = BackgroundTask(sent)
        return answer

    # ---- what is answered at once

    def _named(self, model: str) -> bool:
        """Whether a model was created in the JSON dialect, which its answers are in."""
        known = self.requests.model(model)
        return known is not None and bool(known.about.get("named"))

    def create_session(self, request: Request, data: bytes) -> dict[str, Any]:
        body = bodies.read(bodies.CreateSession, bodies.read_json(data))
        name = secrets.token_hex(8)
        about = {"created": time.time(), "user_metadata": body.user_metadata}
        self.requests.remember(SESSION + name, self.owner, about)
        return {"type": "create_session", "session_id": name}

    def heartbeat(self, request: Request, data: bytes) -> dict[str, Any]:
        given = bodies.read_json(data)
        name = given.get("session_id") if isinstance(given, dict) else None
        if self._session(name).get("finished"):
            raise Refused(410, f"the session {name} is finished")
        self.requests.used(bodies.models_of(str(name)), self.owner)
        return {"type": "session_heartbeat"}

    def _session(self, name: Any) -> Any:
        """What is known of a session. Raises Refused."""
        if (known := self.path(f"{SESSION}{name}")) is None:
            raise Refused(404, f"there is no session {name!r:.80}")
        return known

    def finish_session(self, request: Request, data: bytes) -> Response:
        name = request.path_params["name"]
        about = {**self._session(name), "finished": time.time()}
        self.requests.remember(SESSION + name, self.owner, about)
        for path in self.requests.paths(self.owner):
            if path.path.startswith(bodies.samplers_of(name)):
                self.requests.drop(path.path)
                shutil.rmtree(
                    self.requests.file.parent / "samplers" / path.path, ignore_errors=True
                )
        return Response(status_code=204)

    def sessions(self, request: Request, data: bytes) -> dict[str, Any]:
        known = [p.path for p in self.requests.paths(self.owner) if p.path.startswith(SESSION)]
        shown, _ = _part(request, known, limit=20)
        return {"sessions": [path.removeprefix(SESSION) for path in shown]}

    def session(self, request: Request, data: bytes) -> dict[str, Any]:
        name = request.path_params["name"]
        known = self._session(name)
        models = [m.name for m in self._models() if m.name.startswith(bodies.models_of(name))]
        samplers = [
            p.path
            for p in self.requests.paths(self.owner)
            if p.path.startswith(bodies.samplers_of(name))
        ]
        more = {"user_metadata": known.get("user_metadata")}
        return {"training_run_ids": models, "sampler_ids": samplers, **more}

    async def create_sampler(self, request: Request, data: bytes) -> dict[str, Any]:
        given = bodies.read_json(data)
        if isinstance(given, dict) and "model_path" in given and "session_id" not in given:
            return await self.inference.offer(request, data)  # in the JSON dialect
        return await asyncio.to_thread(self._create_sampler, given)

    def _create_sampler(self, given: Any) -> dict[str, Any]:
        body = bodies.read(bodies.CreateSampler, given)
        weights = None
        if body.model_path is not None:
            weights = canonical(body.model_path)
            if self.path(weights) is None:
                raise Refused(404, f"there is no checkpoint {body.model_path}")
        else:
            bodies.check_base(body.base_model, self.base)
        name = bodies.sampler_of(body.session_id, body.sampling_session_seq_id)
        try:
            self.requests.claim(name, self.owner, {"weights": weights, "kind": "session"})
        except Conflict as error:
            raise Refused(400, str(error)) from error
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def join_sampler(self, request: Request, data: bytes) -> dict[str, Any]:
        """One more client of a sampler, whose samples have numbers of their own."""
        body = bodies.read(bodies.JoinSampler, bodies.read_json(data))
        if self.path(body.sampling_session_id) is None:
            raise Refused(404, f"there is no sampler {body.sampling_session_id}")
        count = self.requests.joined(body.sampling_session_id)
        return {"type": "join_sampling_session", "client_counter": count}

    def sampler(self, request: Request, data: bytes) -> dict[str, Any]:
        name = request.path_params["name"]
        if (known := self.path(name)) is None:
            raise Refused(404, f"there is no sampler {name}")
        weights = known["weights"]
        own = {"model_path": weights} if weights is not None and "/" in weights else {}
        return {"sampler_id": name, "base_model": self.base.names[0], **own}

    def info(self, request: Request, data: bytes) -> dict[str, Any]:
        given = bodies.read_json(data) if data else {**request.query_params}
        model = self.model(bodies.read(bodies.Info, given).model_id)
        known = {"arch": self.arch, "model_name": model.about["base_model"]}
        return {
            "type": "get_info",
            "model_data": {**known, "tokenizer_id": self.tokenizer},
            "model_id": model.name,
            **_adapters(model.about),
            "model_name": model.about["base_model"],
        }

    def weights_info(self, request: Request, data: bytes) -> dict[str, Any]:
        given = bodies.read_json(data)
        path = None
        if isinstance(given, dict):
            path = given.get("tinker_path") or given.get("xorl_path")
        if not isinstance(path, str) or (known := self.path(canonical(path))) is None:
            raise Refused(404, f"there is no checkpoint {path!r:.80}")
        parts = {f"train_{part}": part in known["parts"] for part in PARTS}
        rank = known["rank"]
        lora = None if rank is None else {"rank": rank, "alpha": known["scale"] * rank}
        return {
            "base_model": self.base.names[0],
            **_adapters(known),
            **(parts if "tinker_path" in given else {"lora_config": lora}),
        }

    def training_run(self, request: Request, data: bytes) -> dict[str, Any]:
        model = self.model(request.path_params["name"])
        return self._run(model, self.requests.paths(self.owner))

    def training_runs(self, request: Request, data: bytes) -> dict[str, Any]:
        runs = [m for m in self._models() if m.state != "ended"]
        shown, cursor = _part(request, runs, limit=20)
        paths = self.requests.paths(self.owner)
        return {"training_runs": [self._run(model, paths) for model in shown], "cursor": cursor}

    def _run(self, model: Model, paths: list[Path]) -> dict[str, Any]:
        """paths: all that its owner has saved."""
        saved = _saved(model.name, paths)
        last = {
            name: next((one for one in reversed(saved) if one["checkpoint_type"] == kind), None)
            for name, kind in (
                ("last_checkpoint", "training"),
                ("last_sampler_checkpoint", "sampler"),
            )
        }
        return {
            "training_run_id": model.name,
            "base_model": model.about["base_model"],
            "model_owner": self.keys.name(model.owner),
            **_adapters(model.about),
            "corrupted": model.state == "failed",
            "last_request_time": _iso(model.used),
            "user_metadata": model.about["user_metadata"],
            **last,
        }

    def _models(self) -> list[Model]:
        return [model for model in self.requests.models() if model.owner == self.owner]

    def checkpoints(self, request: Request, data: bytes) -> dict[str, Any]:
        name = checked("model_id", request.path_params["name"])
        return {"checkpoints": _saved(name, self.requests.paths(self.owner))}

    def every_checkpoint(self, request: Request, data: bytes) -> dict[str, Any]:
        """Those of all models, the newest first."""
        saved = [_checkpoint(p) for p in self.requests.paths(self.owner) if _is_saved(p)][::-1]
        shown, cursor = _part(request, saved, limit=100)
        return {"checkpoints": shown, "cursor": cursor}

    def keep(self, request: Request, data: bytes) -> Response:
        """Sets for how many seconds a checkpoint stays; null: until it is deleted."""
        given = request.path_params
        path = path_of(given["name"], given["kind"], given["saved"])
        if self.path(path) is None:
            raise Refused(404, f"there is no checkpoint {path}")
        seconds = bodies.read(bodies.Keep, bodies.read_json(data)).ttl_seconds
        self.requests.expire(path, seconds)
        return Response(status_code=204)

    def list_checkpoints(self, request: Request, data: bytes) -> dict[str, Any]:
        """In the JSON dialect."""
        name = checked("model_id", bodies.read(bodies.Named, bodies.read_json(data)).model_id)
        kept = ("checkpoint_id", "checkpoint_type", "time", "size_bytes")
        saved = [
            {**{n: one[n] for n in kept}, "path": answers.as_named(one["tinker_path"])}
            for one in _saved(name, self.requests.paths(self.owner))
        ]
        return {"checkpoints": saved}

    def delete_checkpoint(self, request: Request, data: bytes) -> dict[str, Any]:
        """In the JSON dialect."""
        body = bodies.read(bodies.DeleteCheckpoint, bodies.read_json(data))
        path = below(body.model_id) + body.checkpoint_id
        self._delete(path)
        return {"success": True, "deleted_path": answers.as_named(path), "error": None}

    def remove_checkpoint(self, request: Request, data: bytes) -> Response:
        given = request.path_params
        self._delete(path_of(given["name"], given["kind"], given["saved"]))
        return Response(status_code=204)

    def _delete(self, path: str) -> None:
        folder = folder_of(self.requests.file.parent, path)
        if self.path(path) is None:
            raise Refused(404, f"there is no checkpoint {path}")
        if user := self.requests.user_of(path):
            raise Refused(400, f"{path} is held by the sampler {user}")
        # While it is in the log, nothing else is saved under its name.
        shutil.rmtree(folder, ignore_errors=True)
        self.requests.drop(path)

    def session_info(self, request: Request, data: bytes) -> dict[str, Any]:
        models = self._models()
        live = [m.name for m in models if m.state in ("new", "live")]
        return {
            "registered_models": [m.name for m in models],
            "active_sessions": live,
            "session_activity": {m.name: _iso(m.used) for m in models},
            "idle_timeout_seconds": self.limits.idle or None,
            "loaded_sampling_adapters": [],
            "loaded_training_adapters": live,
            "max_training_adapters": None,
            "current_training_adapter": None,
        }

    def capabilities(self, request: Request, data: bytes) -> dict[str, Any]:
        known = {"max_context_length": self.limits.longest, "trainable": True, "sampleable": False}
        return {"supported_models": [{"model_name": name, **known} for name in self.base.names]}


def _adapters(about: Any) -> dict[str, Any]:
    """What answers say of the adapters of a model or a checkpoint."""
    return {"is_lora": about["rank"] is not None, "lora_rank": about["rank"]}


def _is_saved(path: Path) -> bool:
    """Whether it is a checkpoint, and no session or sampler."""
    return "size" in path.about


def _checkpoint(saved: Path) -> dict[str, Any]:
    _, kind, name = parsed(saved.path)
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": saved.about["kind"],
        "time": _iso(saved.created),
        "tinker_path": saved.path,
        "size_bytes": saved.about["size"],
        "public": False,
        "user_metadata": saved.about["user_metadata"],
        "expires_at": None if saved.expires is None else _iso(saved.expires),
    }


def _saved(model: str, paths: list[Path]) -> list[dict[str, Any]]:
    """The checkpoints of a model among these."""
    return [_checkpoint(one) for one in paths if one.path.startswith(below(model))]


T = TypeVar("T")


def _part(request: Request, every: list[T], *, limit: int) -> tuple[list[T], dict[str, int]]:
    """Those that a request asks for by limit and offset, and the cursor that says which.

    limit: how many, where it does not say.
    """
    limit, offset = _number(request, "limit", limit), _number(request, "offset", 0)
    cursor = {"offset": offset, "limit": limit, "total_count": len(every)}
    return every[offset : offset + limit], cursor


def _number(request: Request, name: str, default: int) -> int:
    given = request.query_params.get(name, str(default))
    if not given.isdecimal() or len(given) > 7 or int(given) > 10**6:
        raise Refused(422, f"{name} is {given!r:.80}; accepted are numbers from 0")
    return int(given)


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


# ---- the application


def _posts(api: Api) -> dict[str, Handler]:
    return {
        "create_session": api.create_session,
        "session_heartbeat": api.heartbeat,
        "sessions/{name}/finish": api.finish_session,
        "create_model": api.create_model,
        "unload_model": api.unload_model,
        "kill_session": api.kill_session,
        "abort_gradient_epoch": api.abort,
        "list_checkpoints": api.list_checkpoints,
        "delete_checkpoint": api.delete_checkpoint,
        "forward_backward": api.passes,
        "forward": api.passes,
        "optim_step": api.optim_step,
        "save_weights": api.save_weights,
        "save_weights_for_sampler": api.save_for_sampler,
        "load_weights": api.load_weights,
        "weights_info": api.weights_info,
        "create_sampling_session": api.create_sampler,
        "join_sampling_session": api.join_sampler,
        "asample": api.sample,
        "retrieve_future": api.retrieve,
        "get_info": api.info,
        "save_full_weights_safetensors": api.save_full,
        "client/config": lambda request, data: dict(CLIENT),
        "client/dynamic_config": lambda request, data: {"sample_cancel_enabled": True},
        "cancel_future": api.cancel,
        "telemetry": lambda request, data: {"status": "accepted"},
        **{name: _not_offered(name, why) for name, why in NOT_OFFERED.items()},
    }


def _gets(api: Api) -> dict[str, Handler]:
    return {
        "get_server_capabilities": api.capabilities,
        "samplers/{name}": api.sampler,
        "session_info": api.session_info,
        "training_runs": api.training_runs,
        "training_runs/{name}": api.training_run,
        "training_runs/{name}/checkpoints": api.checkpoints,
        "checkpoints": api.every_checkpoint,
        "sessions": api.sessions,
        "sessions/{name}": api.session,
        "get_info": api.info,
    }


def _of_engines(own: Inference) -> dict[str, Handler]:
    """Routes outside of the prefix, and the one that is also within."""
    return {
        "GET /list_inference_endpoints": own.list,
        "POST /add_inference_endpoint": own.add,
        "POST /remove_inference_endpoint": own.remove,
        "POST /sync_inference_weights": own.sync,
        f"POST {PREFIX}/sync_inference_weights": own.sync,
        f"POST {PREFIX}/set_sync_quantization": own.quantize,
        "POST /connect_inference_endpoint": own.connect,
        "POST /disconnect_inference_endpoint": own.disconnect,
        "POST /sleep": own.sleep,
        "POST /wake_up": own.wake_up,
    }


def _not_offered(name: str, why: str) -> Handler:
    def handler(request: Request, data: bytes) -> Any:
        raise Refused(501, f"{name.rpartition('/')[2]}: {why}", used=False)

    return handler


def _by_password(request: Request) -> Request:
    """A request whose key is the password that its browser was asked for. The page alone is told by
    it: a browser adds the password to what pages of others send here, too.
    """
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return request
    try:
        key = base64.b64decode(given, validate=True).partition(b":")[2]
    except ValueError:
        return request
    return Request(scope={**request.scope, "headers": [(b"x-api-key", key)]})


async def _overview(api: Api, request: Request) -> Response:
    """The page of the server."""
    try:
        owner = api.authorized(_by_password(request))
    except Refused as refused:
        asked = {"WWW-Authenticate": 'Basic realm="tilewright"'}
        return JSONResponse({"detail": str(refused)}, refused.status, asked)
    about = {"model type": api.arch, "longest document": f"{api.limits.longest} tokens"}
    made = await asyncio.to_thread(page, api.requests, owner, base=api.base.names[0], about=about)
    return HTMLResponse(made, headers=PAGE_HEADERS)


def _tell_errors(app: FastAPI, api: Api) -> None:
    """Errors are answered with a sentence."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
        return JSONResponse({"detail": str(error)}, error.status, headers)

    @app.exception_handler(sqlite3.OperationalError)
    async def unwritten(request: Request, error: Exception) -> Response:
        """The disk is full, or another process holds the log."""
        if not any(word in str(error) for word in UNWRITTEN):
            raise error
        said = f"{api.requests.file} cannot be written: {error}"
        return JSONResponse({"detail": said}, 503, {"Retry-After": "10"})

    @app.exception_handler(404)
    async def unknown(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": f"there is no {request.url.path}"}, 404)


def application(api: Api) -> FastAPI:
    """The routes. All but health need the key. `api.rollouts` runs as long as the application."""

    @contextlib.asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(one.run()) for one in (api.rollouts, api.inference)]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # engines that are paused go on

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=running)

    _tell_errors(app, api)

    def route(method: str, path: str, handler: Handler) -> None:
        async def call(request: Request) -> Response:
            _OWNER.set(api.authorized(request))
            data = await api.body(request)
            if inspect.iscoroutinefunction(handler):
                answer = await handler(request, data)
            else:  # it parses, compresses, and waits for the disk
                answer = await asyncio.to_thread(handler, request, data)
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        # A plain route: what FastAPI makes of a function's parameters takes longer than the call.
        app.add_route(path, call, methods=[method])

    one = "training_runs/{name}/checkpoints/{kind}/{saved}"
    deleted = {one: api.remove_checkpoint, PUBLISH: _not_offered(PUBLISH, NOT_OFFERED[PUBLISH])}
    each = {
        "POST": _posts(api),
        "GET": _gets(api),
        "DELETE": deleted,
        "PUT": {f"{one}/ttl": api.keep},
    }
    for method, routes in each.items():
        for path, handler in routes.items():
            route(method, f"{PREFIX}/{path}", handler)
    for name, why in BARE.items():
        route("POST", f"/{name}", _not_offered(name, why))
    for call, handler in _of_engines(api.inference).items():
        method, _, path = call.partition(" ")
        route(method, path, handler)

    @app.get(f"{PREFIX}/healthz")
    async def alive() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/")
    async def overview(request: Request) -> Response:
        return await _overview(api, request)

    @app.get("/health")
    async def health() -> Response:
        state = api.requests.fact("workers") or "starting"
        ready = state == "ready"
        known = {"engine_running": ready, "active_requests": api.requests.waiting()}
        return JSONResponse({"status": "ok" if ready else state, **known}, 200 if ready else 503)

    return app


def api_of(server: Own, config: Config, requests: Log, keys: Keys) -> Api:
    """By a server's configuration."""
    model, lora = config.model, config.lora
    assert model.model_path is not None and model.config_path is not None
    folder = hf.local_folder(model.config_path, model.revision)
    stored = json.loads((pathlib.Path(folder) / "config.json").read_text())
    ends, longest = stored.get("eos_token_id"), config.data.sample_packing_sequence_len
    positions = stored.get("max_position_embeddings", longest)
    cached = server.sampler_cache_tokens if server.sampler == "embedded" else longest
    sampled = min(longest, positions, cached)
    shape = hf.shape_of(model)
    names = dict.fromkeys((server.model_name or model.model_path, model.model_path))
    rank = lora.lora_rank if lora.enable_lora else None
    return Api(
        requests,
        keys,
        Base((*names,), rank, lora.lora_alpha, config.train.seed),
        Limits(
            shape.vocab_size,
            longest,
            server.max_body_mb * 1e6,
            server.max_pending,
            server.idle_session_timeout,
            sampled,
            Routes.of(shape) if any(map(shape.is_moe, range(shape.num_hidden_layers))) else None,
        ),
        ends=ends if isinstance(ends, list) else [] if ends is None else [ends],
        arch=shape.model_type,
        tokenizer=model.tokenizer_path or model.model_path,
        sampling=Sampling(
            server.sampling_logprobs,
            server.inference_allowlist,
            not config.train.enable_mixed_precision,
            server.sync_inference_method.partition("_")[0],
        ),
    )


def add_engines(server: Own, api: Api) -> None:
    """That of the configuration, and what clients have added."""
    api.inference.restore()
    if server.sampler == "none":
        return
    managed = server.sampler == "embedded"
    url = (api.root / "sampler_url").read_text().strip() if managed else server.sampler_url
    assert url is not None  # the configuration was checked
    endpoint = api.endpoint(ENGINES[server.sampler](client_of(url)))
    if managed:
        api.rollouts.managed = endpoint
    else:
        api.inference.keep(endpoint)


def main(argv: list[str] | None = None) -> int:
    """CONFIG.yaml [--server.key value ...] FD: the socket that the launcher listens on."""
    argv = sys.argv[1:] if argv is None else argv
    server, config = load(argv[0], argv[1:-1])
    follow()
    logging.basicConfig(level=server.log_level, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells each sample
    root = pathlib.Path(config.train.output_dir)
    keys = Keys.read(pathlib.Path(server.api_token_file or root / "api.key"))
    api = api_of(server, config, Log(root, server.log_max_gb), keys)
    add_engines(server, api)
    # uvicorn takes what it gets by number for a socket of a file, on which no TCP_NODELAY is set:
    # each answer would wait for the client's delayed acknowledgment, 40 ms.
    listening = socket.socket(fileno=int(argv[-1]))
    uvicorn.Server(
        uvicorn.Config(application(api), log_level="warning", timeout_graceful_shutdown=10)
    ).run(sockets=[listening])
    return 0


if __name__ == "__main__":
    sys.exit(main())
