"""The API: it checks a request whole, appends it to the log, and answers once that is on the disk.

Results are read from the log when clients ask for them. The protocol's errors are
`{"detail": sentence}`; a request that was accepted ends with `{"error": ..., "category": ...}`.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import hmac
import inspect
import io
import json
import logging
import pathlib
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import uvicorn
import zstandard
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tilewright.server import binary, bodies
from tilewright.server.bodies import Base, Call
from tilewright.server.datums import Data, check
from tilewright.server.fields import load
from tilewright.server.follow import follow
from tilewright.server.frames import packed, unpacked
from tilewright.server.log import Conflict, Log, Model
from tilewright.server.losses import checked as checked_loss
from tilewright.server.names import PARTS, below, canonical, checked, folder_of, path_of
from tilewright.server.refused import Refused
from tilewright.trainer.checkpoint import hf

PROTOBUF = "application/x-protobuf"
WAIT = 40.0  # seconds that retrieve_future waits: published clients read for 45
POLL = 0.001, 0.02  # seconds between looks for a result, at least and at most
WAITED = 0.02  # of what a result was waited for, until the next look: it comes so much later
PREFIX = "/api/v1"
# What a client may ask for that is not built, with the sentence of the refusal.
NOT_OFFERED = {
    "create_custom_loss": "losses of clients are code, which does not run on this server",
    "copy_weights": "checkpoints are not copied between accounts",
    "save_weights_external": "weights are saved as PEFT has them, by save_weights_for_sampler",
    "save_full_weights_safetensors": "adapters are saved, by save_weights_for_sampler",
}
Handler = Callable[[Request, bytes], Any]


class Api:
    """What the routes share.

    key: that requests must come with.   base: what models are made from.   vocabulary, longest:
    tokens that there are, and of one document.   ends: tokens that end a text.
    """

    def __init__(
        self,
        requests: Log,
        key: str,
        base: Base,
        *,
        vocabulary: int,
        longest: int,
        ends: list[int],
        arch: str,
        tokenizer: str,
        most_bytes: float,
        most_waiting: int,
    ):
        self.requests, self.key, self.base = requests, key, base
        self.vocabulary, self.longest, self.ends = vocabulary, longest, ends
        self.arch, self.tokenizer = arch, tokenizer
        self.most_bytes, self.most_waiting = most_bytes, most_waiting
        self.owner = hashlib.sha256(key.encode()).hexdigest()[:16]

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
                most = int(self.most_bytes) + 1
                try:
                    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as stream:
                        data = stream.read(most)
                except zstandard.ZstdError as error:
                    raise Refused(422, f"the body is no zstd: {error}", used=False) from error
                self._fits(len(data))
                return data
            case other:
                raise Refused(415, f"Content-Encoding is {other!r}; accepted is 'zstd'", used=False)

    def _fits(self, size: int) -> None:
        if size > self.most_bytes:
            raise Refused(
                413,
                f"the body is larger than {self.most_bytes / 1e6:g} MB (max_body_mb)",
                used=False,
            )

    def authorized(self, request: Request) -> None:
        given = request.headers.get("x-api-key") or ""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = given or (token if scheme.lower() == "bearer" else "")
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            raise Refused(401, "the key is missing or wrong: Authorization: Bearer KEY", used=False)

    def accept(self, call: Call) -> dict[str, Any]:
        """Appends a request. Raises Refused where its model, or the queue, cannot take it."""
        requests = self.requests
        if call.creates is None and call.kind != "sample":
            # A client that saw no answer ends its model again.
            self.model(call.model, ended=call.kind == "unload_model")
        state = requests.fact("workers") or ""
        if state.startswith("failed"):
            raise Refused(503, f"the workers have {state}", used=False)
        if requests.waiting() >= self.most_waiting:
            raise Refused(429, f"{self.most_waiting} requests wait already", used=False)
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
        return answer if call.kind == "sample" else {**answer, "model_id": call.model}

    def model(self, name: str, *, ended: bool = False) -> Model:
        """A model that may be used, or also one that has ended. Raises Refused."""
        model = self.requests.model(checked("model_id", name))
        gone = model is not None and model.state == "ended" and not ended
        if model is None or model.owner != self.owner or gone:
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
        if kind == PROTOBUF:
            given = binary.PassRequest(data)
        elif kind == "application/json":
            backward = request.url.path.endswith("forward_backward")
            given = bodies.PassRequest(bodies.read_json(data), backward=backward)
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
            check(documents, self.vocabulary, self.longest)
            documents = checked_loss(given.loss, given.options, documents, self.vocabulary)
        except Refused as refused:
            if seq is not None:
                self._used(refused, model, seq, name, data)
            raise
        own = {"divided": kind != PROTOBUF} if given.backward else {}
        value = {"loss": given.loss, "options": given.options, **own}
        return self.accept(Call(model, seq, name, value, documents.arrays()))

    def create_model(self, request: Request, data: bytes) -> dict[str, Any]:
        return self.accept(bodies.create_model(bodies.read_json(data), self.base))

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
        model, path = self.model(body.model_id), None
        if body.save_checkpoint:
            name = f"final_{model.ran:06d}"
            value = {"name": name, "overwrite": True, "user_metadata": None}
            call = Call(model.name, None, "save_weights", value)
            saved = await self.at_once(request, self.accept(call))
            path = json.loads(bytes(saved.body)).get("path")
            if path is None:
                return saved
        call = Call(model.name, None, "unload_model", None)
        await self.at_once(request, self.accept(call))
        told = f"{model.name} is unloaded"
        return JSONResponse({"success": True, "message": told, "checkpoint_path": path})

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

    def load_weights(self, request: Request, data: bytes) -> dict[str, Any]:
        given = bodies.read_json(data)
        path = given.get("path") if isinstance(given, dict) else None
        known = self.path(canonical(path)) if isinstance(path, str) else None
        return self._step(
            "load_weights", data, lambda body: bodies.load_weights(body, self.base, known)
        )

    def unload_model(self, request: Request, data: bytes) -> dict[str, Any]:
        return self.accept(bodies.unload_model(bodies.read_json(data)))

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
            if isinstance(model, str) and type(seq) is int and seq >= 1:
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
        call = bodies.sample(given, known["weights"], self.ends, self.vocabulary, self.longest)
        answer = self.accept(call)
        count = len(call.value["asked"]["draws"])
        return {
            **answer,
            "sample_sequence_ids": [f"{answer['request_id']}:{i}" for i in range(count)],
        }

    # ---- results

    async def retrieve(self, request: Request, data: bytes) -> Response:
        given = bodies.read_json(data)
        name = given.get("request_id") if isinstance(given, dict) else None
        if not isinstance(name, str) or self.requests.owner_of(name) != self.owner:
            raise Refused(404, f"there is no request {name!r:.80}")
        began = time.monotonic()
        while (result := self.requests.result(name)) is None:
            waited = time.monotonic() - began
            if waited > WAIT or await request.is_disconnected():
                why = self.requests.blocked(name)
                state = {"queue_state": "paused_capacity" if why else "active"}
                state |= {"queue_state_reason": why} if why else {}
                return JSONResponse({"type": "try_again", "request_id": name, **state})
            await asyncio.sleep(min(max(POLL[0], WAITED * waited), POLL[1]))
        if result.expired:
            raise Refused(410, f"the result of {name} is no longer kept")
        if result.error is not None:
            self.requests.sent(name)
            return JSONResponse({"error": result.error, "category": result.category})
        kind, model = self.requests.kind_of(name) or ("", "")
        assert result.body is not None  # else it would have expired
        if self._named(model):
            answer = JSONResponse(_named_answer(kind, *unpacked(result.body)))
        else:
            answer = _answer(kind, result.body, PROTOBUF in request.headers.get("accept", ""))
        self.requests.sent(name)
        return answer

    # ---- what is answered at once

    def _named(self, model: str) -> bool:
        """Whether a model was created in the JSON dialect, which its answers are in."""
        known = self.requests.model(model)
        return known is not None and bool(known.about.get("named"))

    def create_session(self, request: Request, data: bytes) -> dict[str, Any]:
        bodies.read(bodies.Body, bodies.read_json(data))
        name = secrets.token_hex(8)
        self.requests.remember(f"session/{name}", self.owner, {"created": time.time()})
        return {"type": "create_session", "session_id": name}

    def heartbeat(self, request: Request, data: bytes) -> dict[str, Any]:
        given = bodies.read_json(data)
        self._session(given.get("session_id") if isinstance(given, dict) else None)
        return {"type": "session_heartbeat"}

    def _session(self, name: Any) -> str:
        known = self.path(f"session/{name}")
        if known is None:
            raise Refused(404, f"there is no session {name!r:.80}")
        if known.get("finished"):
            raise Refused(410, f"the session {name} is finished")
        return name

    def finish_session(self, request: Request, data: bytes) -> Response:
        name = self._session(request.path_params["name"])
        self.requests.remember(f"session/{name}", self.owner, {"finished": time.time()})
        return Response(status_code=204)

    def create_sampler(self, request: Request, data: bytes) -> dict[str, Any]:
        given = bodies.read_json(data)
        body = bodies.read(bodies.CreateSampler, given)
        weights = None
        if body.model_path is not None:
            weights = canonical(body.model_path)
            if self.path(weights) is None:
                raise Refused(404, f"there is no checkpoint {body.model_path}")
        else:
            bodies.check_base(body.base_model, self.base)
        name = bodies.sampler_of(body.session_id, body.sampling_session_seq_id)
        self.requests.remember(name, self.owner, {"weights": weights, "kind": "session"})
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def sampler(self, request: Request, data: bytes) -> dict[str, Any]:
        name = request.path_params["name"]
        if (known := self.path(name)) is None:
            raise Refused(404, f"there is no sampler {name}")
        weights = known["weights"]
        own = {"model_path": weights} if weights is not None and "/" in weights else {}
        return {"sampler_id": name, "base_model": self.base.names[0], **own}

    def info(self, request: Request, data: bytes) -> dict[str, Any]:
        model = self.model(bodies.read(bodies.Named, bodies.read_json(data)).model_id)
        known = {"arch": self.arch, "model_name": model.about["base_model"]}
        return {
            "type": "get_info",
            "model_data": {**known, "tokenizer_id": self.tokenizer},
            "model_id": model.name,
            "is_lora": True,
            "lora_rank": model.about["rank"],
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
        lora = {"rank": rank, "alpha": known["scale"] * rank}
        return {
            "base_model": self.base.names[0],
            "is_lora": True,
            "lora_rank": rank,
            **(parts if "tinker_path" in given else {"lora_config": lora}),
        }

    def training_run(self, request: Request, data: bytes) -> dict[str, Any]:
        return self._run(self.model(request.path_params["name"]))

    def training_runs(self, request: Request, data: bytes) -> dict[str, Any]:
        runs = [m for m in self.requests.models() if m.owner == self.owner and m.state != "ended"]
        limit, offset = (_number(request, name, n) for name, n in (("limit", 20), ("offset", 0)))
        cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
        shown = [self._run(model) for model in runs[offset : offset + limit]]
        return {"training_runs": shown, "cursor": cursor}

    def _run(self, model: Model) -> dict[str, Any]:
        return {
            "training_run_id": model.name,
            "base_model": model.about["base_model"],
            "model_owner": model.owner,
            "is_lora": True,
            "corrupted": model.state == "failed",
            "lora_rank": model.about["rank"],
            "last_request_time": _iso(model.created),
            "user_metadata": model.about["user_metadata"],
        }

    def checkpoints(self, request: Request, data: bytes) -> dict[str, Any]:
        return {"checkpoints": self._saved(request.path_params["name"])}

    def list_checkpoints(self, request: Request, data: bytes) -> dict[str, Any]:
        """In the JSON dialect."""
        name = bodies.read(bodies.Named, bodies.read_json(data)).model_id
        kept = ("checkpoint_id", "checkpoint_type", "time", "size_bytes")
        saved = [
            {**{n: one[n] for n in kept}, "path": _as_named(one["tinker_path"])}
            for one in self._saved(name)
        ]
        return {"checkpoints": saved}

    def _saved(self, name: str) -> list[dict[str, Any]]:
        name = checked("model_id", name)
        return [
            {
                "checkpoint_id": path.removeprefix(below(name)),
                "checkpoint_type": about["kind"],
                "time": _iso(created),
                "tinker_path": path,
                "size_bytes": about["size"],
                "public": False,
                "user_metadata": about["user_metadata"],
            }
            for path, about, created in self.requests.paths(self.owner)
            if path.startswith(below(name))
        ]

    def delete_checkpoint(self, request: Request, data: bytes) -> dict[str, Any]:
        """In the JSON dialect."""
        body = bodies.read(bodies.DeleteCheckpoint, bodies.read_json(data))
        path = below(body.model_id) + body.checkpoint_id
        self._delete(path)
        return {"success": True, "deleted_path": _as_named(path), "error": None}

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
        models = [m for m in self.requests.models() if m.owner == self.owner]
        live = [m.name for m in models if m.state in ("new", "live")]
        return {
            "registered_models": [m.name for m in models],
            "active_sessions": live,
            "session_activity": {m.name: _iso(m.created) for m in models},
            "idle_timeout_seconds": None,
            "loaded_sampling_adapters": [],
            "loaded_training_adapters": live,
            "max_training_adapters": None,
            "current_training_adapter": None,
        }

    def capabilities(self, request: Request, data: bytes) -> dict[str, Any]:
        known = {"max_context_length": self.longest, "trainable": True, "sampleable": False}
        return {"supported_models": [{"model_name": name, **known} for name in self.base.names]}


def _number(request: Request, name: str, default: int) -> int:
    given = request.query_params.get(name, str(default))
    if not given.isdecimal() or int(given) > 10**6:
        raise Refused(422, f"{name} is {given!r:.80}; accepted are numbers from 0")
    return int(given)


def _as_named(path: str) -> str:
    """A path as the JSON dialect has it."""
    return "xorl" + path.removeprefix("tinker")


def _named_answer(kind: str, value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """A result in the JSON dialect."""
    if kind in ("forward", "forward_backward"):
        outputs = _listed(value, arrays)
        for output, loss in zip(outputs["loss_fn_outputs"], value["losses"], strict=True):
            output["loss"] = loss
        return {**outputs, "info": {}}
    if kind == "optim_step":
        return {**value, "info": {}}
    if kind == "save_weights_for_sampler" and "path" in value:
        return {"path": _as_named(value["path"]), "model_path": _as_named(value["path"])}
    if isinstance(value, dict) and "path" in value:
        return {**value, "path": _as_named(value["path"])}
    return value


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _answer(kind: str, body: bytes, protobuf: bool) -> Response:
    value, arrays = unpacked(body)
    if kind in ("forward", "forward_backward"):
        if protobuf:
            return Response(binary.pass_output(value, arrays), media_type=PROTOBUF)
        return JSONResponse(_listed(value, arrays))
    if kind == "sample":
        if protobuf:
            return Response(binary.sample_output(value, arrays), media_type=PROTOBUF)
        return JSONResponse(_sampled(value, arrays))
    return JSONResponse(value)


def _listed(value: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    cuts = np.cumsum(value["lengths"])[:-1]
    columns = {name: np.split(array, cuts) for name, array in arrays.items()}
    outputs = [
        {
            name: {
                "data": parts[i].reshape(-1).tolist(),
                "dtype": "float32",
                "shape": [*parts[i].shape],
            }
            for name, parts in columns.items()
        }
        for i in range(len(value["lengths"]))
    ]
    known = {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs}
    return {**known, "metrics": value["metrics"]}


def _sampled(value: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    tokens, logprobs = (arrays.get(n, np.empty(0)) for n in ("sampled", "sampled_logprobs"))
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {"stop_reason": reason, "tokens": [int(tokens[i])], "logprobs": [float(logprobs[i])]}
            for i, reason in enumerate(value["stop_reasons"])
        ],
    }
    if "prompt_logprobs" in arrays:
        answer["prompt_logprobs"] = _without_nan(arrays["prompt_logprobs"])
    if "topk_ids" in arrays:
        rows = zip(arrays["topk_ids"].tolist(), arrays["topk_logprobs"].tolist(), strict=True)
        answer["topk_prompt_logprobs"] = [
            [[t, p] for t, p in zip(ids, own, strict=True) if t >= 0] or None for ids, own in rows
        ]
    return answer


def _without_nan(array: np.ndarray) -> list[float | None]:
    return [None if x != x else x for x in array.tolist()]


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
        "get_info": api.info,
        "forward_backward": api.passes,
        "forward": api.passes,
        "optim_step": api.optim_step,
        "save_weights": api.save_weights,
        "save_weights_for_sampler": api.save_for_sampler,
        "load_weights": api.load_weights,
        "weights_info": api.weights_info,
        "create_sampling_session": api.create_sampler,
        "asample": api.sample,
        "retrieve_future": api.retrieve,
        "client/config": lambda request, data: {"use_pyqwest_transport": False},
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
    }


def _not_offered(name: str, why: str) -> Handler:
    def handler(request: Request, data: bytes) -> Any:
        raise Refused(501, f"{name}: {why}", used=False)

    return handler


def application(api: Api) -> FastAPI:
    """The routes. All but health need the key."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
        return JSONResponse({"detail": str(error)}, error.status, headers)

    @app.exception_handler(404)
    async def unknown(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": f"there is no {request.url.path}"}, 404)

    def route(method: str, path: str, handler: Handler) -> None:
        async def call(request: Request) -> Response:
            api.authorized(request)
            data = await api.body(request)
            if inspect.iscoroutinefunction(handler):
                answer = await handler(request, data)
            else:  # it parses, compresses, and waits for the disk
                answer = await asyncio.to_thread(handler, request, data)
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        app.add_api_route(f"{PREFIX}/{path}", call, methods=[method])

    deleted = {"training_runs/{name}/checkpoints/{kind}/{saved}": api.remove_checkpoint}
    for method, routes in (("POST", _posts(api)), ("GET", _gets(api)), ("DELETE", deleted)):
        for path, handler in routes.items():
            route(method, path, handler)

    @app.get(f"{PREFIX}/healthz")
    async def alive() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/health")
    async def health() -> Response:
        state = api.requests.fact("workers") or "starting"
        ready = state == "ready"
        known = {"engine_running": ready, "active_requests": api.requests.waiting()}
        return JSONResponse({"status": "ok" if ready else state, **known}, 200 if ready else 503)

    return app


def main(argv: list[str] | None = None) -> int:
    """CONFIG.yaml [--server.key value ...] FD: the socket that the launcher listens on."""
    argv = sys.argv[1:] if argv is None else argv
    server, config = load(argv[0], argv[1:-1])
    follow()
    logging.basicConfig(level=server.log_level, format="%(asctime)s %(levelname)s %(message)s")
    root = pathlib.Path(config.train.output_dir)
    file = pathlib.Path(server.api_token_file or root / "api.key")
    assert config.model.model_path is not None and config.model.config_path is not None
    folder = hf.local_folder(config.model.config_path, config.model.revision)
    ends = json.loads((pathlib.Path(folder) / "config.json").read_text()).get("eos_token_id")
    shape = hf.shape_of(config.model)
    names = dict.fromkeys((server.model_name or config.model.model_path, config.model.model_path))
    api = Api(
        Log(root, server.log_max_gb),
        file.read_text().strip(),
        Base((*names,), config.lora.lora_rank, config.lora.lora_alpha, config.train.seed),
        vocabulary=shape.vocab_size,
        longest=config.data.sample_packing_sequence_len,
        ends=ends if isinstance(ends, list) else [] if ends is None else [ends],
        arch=shape.model_type,
        tokenizer=config.model.tokenizer_path or config.model.model_path,
        most_bytes=server.max_body_mb * 1e6,
        most_waiting=server.max_pending,
    )
    # uvicorn takes what it gets by number for a socket of a file, on which no TCP_NODELAY is set:
    # each answer would wait for the client's delayed acknowledgment, 40 ms.
    listening = socket.socket(fileno=int(argv[-1]))
    uvicorn.Server(
        uvicorn.Config(application(api), log_level="warning", timeout_graceful_shutdown=10)
    ).run(sockets=[listening])
    return 0


if __name__ == "__main__":
    sys.exit(main())
