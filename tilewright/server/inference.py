"""Engines that clients add, and the weights that these are sent: routes of the JSON dialect.

Adapters go as files, which an engine reads; all weights are sent by the workers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import pathlib
import shutil
import sqlite3
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, Protocol

import httpx
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field, field_validator
from safetensors import safe_open

from tilewright.core.files import folder_size
from tilewright.server import bodies
from tilewright.server.endpoints import (
    QUANTIZATION,
    Endpoint,
    Sending,
    Transfer,
    Workers,
    detected,
    exported,
    saved,
)
from tilewright.server.engines import CONNECT, ENGINES, Engine, Failed, Unanswered
from tilewright.server.hosts import allowed
from tilewright.server.log import SYNC, Log, Model
from tilewright.server.names import canonical, checked, parsed, synced_as
from tilewright.server.refused import Refused
from tilewright.server.rollouts import Rollouts

log = logging.getLogger("tilewright.server")

LOOK = 0.02  # seconds between looks for models that are to be sent
LATER = 5.0  # and after the log could not be written
LIMIT = 600.0  # seconds that a step's result waits for engines
ENDPOINT = "endpoint/"  # before the URLs of engines among paths
PAUSES = {"retract": "wait", "abort": "abort", "in_place": "keep"}


class Address(bodies.Body):
    host: str = Field(min_length=1, max_length=253)
    port: int = Field(ge=1, le=65535)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class How(bodies.Body):
    """How all weights are sent; None: as before."""

    master_address: str | None = Field(None, min_length=1, max_length=253)
    master_port: int | None = Field(None, ge=0, le=65535)
    group_name: str | None = Field(None, min_length=1, max_length=128)
    buffer_size_mb: int | None = Field(None, ge=1)

    def of(self, before: Transfer) -> Transfer:
        size = None if self.buffer_size_mb is None else self.buffer_size_mb << 20
        given = {"address": self.master_address, "port": self.master_port}
        given |= {"name": self.group_name, "bytes": size}
        return before._replace(**{n: v for n, v in given.items() if v is not None})


class Add(Address, How):
    world_size: int = Field(1, ge=1)
    pool: str | None = None
    sync_weights: bool = False


MOST_OF_BLOCK = 16384  # of `quantize_block_fp8`
Side = Annotated[int, Field(ge=1)]


class Fp8(bodies.Body):
    """Block-FP8, as `quantization_config` of Hugging Face has it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    quant_method: Literal["fp8"]
    fmt: Literal["e4m3"] = "e4m3"
    activation_scheme: Literal["dynamic"] = "dynamic"
    weight_block_size: list[Side] = Field([128, 128], min_length=2, max_length=2)
    modules_to_not_convert: list[str] | None = None

    @field_validator("weight_block_size")
    @classmethod
    def _fits(cls, sides: list[int]) -> list[int]:
        if math.prod(sides) > MOST_OF_BLOCK:
            raise ValueError(f"accepted are blocks of up to {MOST_OF_BLOCK} elements")
        return sides


class Quantize(bodies.Body):
    quantization: Fp8 | None


class Sync(How):
    model_id: str = "default"
    flush_cache: bool = True
    cache_invalidation_mode: Literal["auto", "flush", "none"] = "auto"
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"
    weight_version: str | None = Field(None, min_length=1, max_length=256)
    quantization: Fp8 | None = None
    pools: list[str] | None = None


class Offer(bodies.Body):
    model_path: str


class Serving(Protocol):
    """What the routes need of the API."""

    requests: Log
    rollouts: Rollouts
    root: pathlib.Path

    @property
    def owner(self) -> str: ...
    @property
    def rank(self) -> int | None: ...  # of adapters; None: all weights train
    def endpoint(self, engine: Engine, pool: str | None = None) -> Endpoint: ...
    def model(self, name: str) -> Model: ...
    def path(self, path: str) -> Any: ...
    def accept(self, call: bodies.Call) -> dict[str, Any]: ...
    async def at_once(self, request: Request, future: dict[str, Any]) -> Response: ...


class Inference:
    """The routes.   hosts: at which engines may be."""

    def __init__(self, api: Serving, hosts: list[str]):
        self.api, self.hosts = api, hosts
        self._sending = asyncio.Lock()  # one model at a time
        # By model: since when results wait; the newest that was sent; the newest that all have.
        self._due: dict[str, float] = {}
        self._newest: dict[str, str] = {}
        self._arrived: dict[str, str] = {}

    # ---- engines

    def restore(self) -> None:
        """Those that were added before the API was started. Each is checked when it is asked."""
        for path in self.api.requests.paths(""):
            url = path.path.removeprefix(ENDPOINT)
            if url != path.path and allowed(url, self.hosts):
                kind = ENGINES[path.about["engine"]]
                endpoint = self.api.endpoint(kind(client_of(url)), path.about["pool"])
                endpoint.transfer = Transfer(**path.about["transfer"])
                self.keep(endpoint)

    async def add(self, request: Request, data: bytes) -> dict[str, Any]:
        body = bodies.read(Add, bodies.read_json(data))
        self._check_host(body)
        client = client_of(body.url)
        try:
            endpoint = self.api.endpoint(await detected(client), body.pool)
            facts = await endpoint.registered()
        except (Failed, httpx.TransportError) as error:
            await client.aclose()
            why = error if isinstance(error, Failed) else Unanswered(body.url, error)
            raise Refused(400, str(why)) from error
        endpoint.transfer = body.of(endpoint.transfer)._replace(size=body.world_size)
        self.keep(endpoint)
        about = {"kind": "endpoint", "engine": endpoint.engine.name, "pool": body.pool}
        about["transfer"] = endpoint.transfer._asdict()
        self.api.requests.remember(ENDPOINT + endpoint.url, "", about)
        synced, said = False, "weights are sent when a client samples from them, or syncs them"
        if body.sync_weights:
            synced, said = await self._sync_first(request, endpoint)
        return {
            "success": True,
            "message": f"{endpoint.engine.name} {facts.version}",
            "endpoint": _told(endpoint),
            "weights_synced": synced,
            "sync_message": said,
        }

    async def _sync_first(self, request: Request, endpoint: Endpoint) -> tuple[bool, str]:
        """Sends the one model of a key to an engine that it has added, and tells what became of
        it.
        """
        owner, every = self.api.owner, self.api.requests.models()
        own = [m for m in every if m.owner == owner and m.state == "live"]
        if len(own) != 1:
            return False, f"there are {len(own)} models; sync_inference_weights sends one"
        try:
            weights, why = await self._saved(request, own[0])
        except Refused as refused:  # the engine is added
            return False, str(refused)
        if why is not None:
            return False, why
        [told] = await self._sent(own[0], weights, [endpoint], Sending())
        return told["success"], told["message"]

    def keep(self, endpoint: Endpoint) -> None:
        """Adds it, in the place of one at the same address."""
        every = self.api.rollouts.endpoints
        every[:] = [*(one for one in every if one.url != endpoint.url), endpoint]

    def remove(self, request: Request, data: bytes) -> dict[str, Any]:
        url = bodies.read(Address, bodies.read_json(data)).url
        every = self.api.rollouts.endpoints
        if url not in [one.url for one in every]:
            raise Refused(404, f"there is no endpoint {url}")
        self.api.requests.drop(ENDPOINT + url)
        every[:] = [one for one in every if one.url != url]
        return {"success": True, "message": f"{url} is asked no more"}

    def list(self, request: Request, data: bytes) -> dict[str, Any]:
        told = [_told(one) for one in self.api.rollouts.endpoints]
        return {"endpoints": told, "count": len(told)}

    def _check_host(self, body: Address) -> None:
        if not allowed(body.url, self.hosts):
            raise Refused(
                400, f"host is {body.host}; accepted are those of inference_allowlist, {self.hosts}"
            )

    # ---- weights

    async def sync(self, request: Request, data: bytes) -> Response:
        """Sends a model as it is to every engine: adapters under its name, or all weights."""
        body = bodies.read(Sync, bodies.read_json(data))
        model = self.api.model(checked("model_id", body.model_id))
        how = Sending(PAUSES[body.pause_mode], body.flush_cache, self._quantization(body))
        if body.cache_invalidation_mode == "none":
            how = how._replace(reset=False)
        asked = [
            one
            for one in self.api.rollouts.endpoints
            if body.pools is None or one.pool in body.pools
        ]
        if not asked:
            raise Refused(400, "there is no endpoint to send weights to: add_inference_endpoint")
        weights, why = await self._saved(request, model)
        if why is not None:
            return JSONResponse({"success": False, "message": why})
        for endpoint in asked:
            endpoint.transfer = body.of(endpoint.transfer)
        began = time.monotonic()
        told = await self._sent(model, weights, asked, how, body.weight_version)
        failed = [one["message"] for one in told if not one["success"]]
        sent = asked[0].sent
        if model.about["rank"] is not None:
            folder = exported(self.api.root, weights)
            sent = {"bytes": folder_size(folder), "tensors": _count(folder), "buckets": 1}
        return JSONResponse(
            {
                "success": not failed,
                "message": "; ".join(failed) or told[0]["message"],
                "transfer_time": time.monotonic() - began,
                "total_bytes": sent.get("bytes", 0),
                "num_parameters": sent.get("tensors", 0),
                "num_buckets": sent.get("buckets", 0),
                "endpoints_synced": told,
            }
        )

    async def _saved(self, request: Request, model: Model) -> tuple[str, str | None]:
        """The name of a model's weights as they are now, which are saved; or why they are not."""
        weights = synced_as(model.name, time.time_ns())
        call = bodies.Call(model.name, None, "save_weights_for_sampler", bodies.synced(weights))
        answer = await self.api.at_once(request, self.api.accept(call))
        return weights, json.loads(bytes(answer.body)).get("error")

    async def _sent(
        self,
        model: Model,
        weights: str,
        endpoints: list[Endpoint],
        how: Sending,
        version: str | None = None,
    ) -> list[dict[str, Any]]:
        """What has become of weights at each engine. Those that the model had before are dropped
        then.

        version: what engines call them.
        """
        version = version or weights

        async def one(endpoint: Endpoint) -> str:
            verdict = await endpoint.renew(weights, model.name, version, how)
            return f"{version}: {verdict.state}{f', {verdict.says}' if verdict.says else ''}"

        async with self._sending:
            if weights < self._newest.get(model.name, weights):  # it has waited for its turn
                return [_at(one) | {"message": "newer weights are there"} for one in endpoints]
            self._newest[model.name] = weights
            told = [*await asyncio.gather(*(_tried(endpoint, one) for endpoint in endpoints))]
            kept = self._arrived.get(model.name)
            if all(one["success"] for one in told):
                kept = self._arrived[model.name] = weights
            if kept is not None:  # else engines may have any of those before
                await asyncio.to_thread(self._drop_before, model, weights, kept)
        return told

    def _drop_before(self, model: Model, weights: str, kept: str) -> None:
        """Drops what was saved of a model before, to be sent, but for what engines have."""
        requests = self.api.requests
        for path in requests.paths(model.owner):
            own = path.path.startswith(synced_as(model.name)) and path.path < weights
            if own and path.path != kept:
                shutil.rmtree(saved(self.api.root, path.path), ignore_errors=True)
                requests.drop(path.path)

    # ---- after steps

    async def run(self) -> None:
        """Sends models that are due, by `sync_every_steps`, until it is canceled."""
        while True:
            wait = LOOK
            try:
                await self.send_due()
            except sqlite3.OperationalError:  # of a full disk
                wait = LATER
            await asyncio.sleep(wait)

    async def send_due(self) -> None:
        """Sends the models that are due, as the workers have saved them after a step."""
        requests = self.api.requests
        for name, weights in requests.facts(SYNC).items():
            try:
                if (model := requests.model(name)) is not None:
                    await self._send_after_step(model, weights)
            except Exception:  # of this model: others are sent, and results are not held back
                log.exception("%s after a step", name)
            requests.settle(SYNC + name, weights)
            self._due.pop(name, None)

    async def _send_after_step(self, model: Model, weights: str) -> None:
        for one in await self._sent(model, weights, [*self.api.rollouts.endpoints], Sending()):
            how, at = log.info if one["success"] else log.error, f"{one['host']}:{one['port']}"
            how("%s after a step, %s: %s", model.name, at, one["message"])

    def is_due(self, model: str) -> bool:
        """Whether a model is to be sent, or is being sent, for which its result waits; but not for
        longer than LIMIT.
        """
        if self.api.requests.fact(SYNC + model) is None:
            return False
        now = time.monotonic()
        return now - self._due.setdefault(model, now) < LIMIT

    # ---- how all weights are sent

    def quantize(self, request: Request, data: bytes) -> dict[str, Any]:
        """Sets with which quantization all weights are sent from now on; null: as they are."""
        body = bodies.read(Quantize, bodies.read_json(data))
        how = self._quantization(body)
        self.api.requests.tell(QUANTIZATION, json.dumps(how))
        return {"success": True, "quantization": how}

    def _quantization(self, body: Quantize | Sync) -> dict[str, Any] | None:
        """Raises Refused where adapters are sent, which have none."""
        if body.quantization is None:
            return None
        self._check_whole("quantization: adapters are sent as they are")
        return body.quantization.model_dump()

    def _check_whole(self, why: str) -> None:
        if self.api.rank is not None:
            raise Refused(400, f"{why}; all weights train with enable_lora: false")

    async def connect(self, request: Request, data: bytes) -> dict[str, Any]:
        """Makes a group with each engine, which stays between syncs."""
        body = bodies.read(How, bodies.read_json(data) if data else {})
        self._check_whole("adapters are read from files, and need no group")
        asked = [one for one in self.api.rollouts.endpoints if one.engine.whole == "sent"]
        if not asked:
            raise Refused(400, "there is no endpoint to connect: add_inference_endpoint")
        if body.master_port and len(asked) > 1:
            raise Refused(
                400,
                f"master_port is {body.master_port}, and {len(asked)} endpoints have a group each; "
                "accepted is 0, a free one for each",
            )
        for endpoint in asked:
            endpoint.transfer = body.of(endpoint.transfer)
        told = await self._asked("connect", {"targets": [one.target() for one in asked]})
        failed = [why for why in told["connected"].values() if why is not None]
        urls = [url for url, why in told["connected"].items() if why is None]
        said = "; ".join(failed) or "groups stay open until disconnect_inference_endpoint"
        return {"success": not failed, "message": said, "connected_endpoints": urls}

    async def disconnect(self, request: Request, data: bytes) -> dict[str, Any]:
        _check_empty(data)
        told = await self._asked("disconnect", {})
        said = ", ".join(told["disconnected"]) or "there was no group"
        return {"success": True, "message": said}

    # ---- memory that engines use in turns with training

    async def sleep(self, request: Request, data: bytes) -> dict[str, Any]:
        """Frees the memory of the workers' GPUs, once what came before is done."""
        _check_empty(data)
        return await self._asked("sleep", {})

    async def wake_up(self, request: Request, data: bytes) -> dict[str, Any]:
        _check_empty(data)
        return await self._asked("wake_up", {})

    async def _asked(self, kind: str, value: Any) -> Any:
        """What the workers answer."""
        try:
            return (await Workers(self.api.requests).asked(kind, value))[0]
        except Failed as failed:
            raise Refused(failed.status, str(failed)) from failed

    async def offer(self, request: Request, data: bytes) -> dict[str, Any]:
        """Loads what has a path on every engine, under its own name."""
        body = bodies.read(Offer, bodies.read_json(data))
        weights = canonical(body.model_path)
        _, kind, name = parsed(weights)
        if self.api.path(weights) is None:
            raise Refused(404, f"there is no checkpoint {body.model_path}")
        if kind != "sampler_weights" or exported(self.api.root, weights).name != "adapter":
            raise Refused(400, f"{body.model_path} holds no weights for sampling")

        async def one(endpoint: Endpoint) -> str:
            return f"{name}: {(await endpoint.renew(weights, name, weights)).state}"

        told = [await _tried(endpoint, one) for endpoint in self.api.rollouts.endpoints]
        return {
            "success": all(one["success"] for one in told),
            "model_path": body.model_path,
            "lora_name": name,
            "message": "; ".join(one["message"] for one in told) or "there is no endpoint",
        }


def _check_empty(data: bytes) -> None:
    """Raises Refused for a body that is no object."""
    bodies.read(bodies.Body, bodies.read_json(data) if data else {})


async def _tried(endpoint: Endpoint, do: Callable[[Endpoint], Awaitable[str]]) -> dict[str, Any]:
    """What has become of it at an engine. The others go on."""
    told = _at(endpoint)
    try:
        return {**told, "message": await do(endpoint)}
    except Failed as failed:
        why = failed
    except httpx.TransportError as error:
        why = endpoint.lost(error)
    return {**told, "success": False, "message": str(why)}


def _at(endpoint: Endpoint) -> dict[str, Any]:
    url = httpx.URL(endpoint.url)
    return {"host": url.host, "port": url.port, "success": True}


def _told(endpoint: Endpoint) -> dict[str, Any]:
    url, facts = httpx.URL(endpoint.url), endpoint.facts
    own = {
        "host": url.host,
        "port": url.port,
        "worker_port": None,
        "world_size": endpoint.transfer.size,
        "pool": endpoint.pool,
        "healthy": facts is not None and endpoint.stale is None,
        "stale": endpoint.stale,
        "undecided": endpoint.undecided,
        "engine": endpoint.engine.name,
    }
    if facts is None:
        return {**own, "server_info": None}
    about = {
        "model_path": facts.model,
        "served_model_name": facts.model,
        "enable_lora": facts.rank != 0,
        "max_lora_rank": facts.rank,
        "version": facts.version,
    }
    return {**own, "server_info": about}


def _count(folder: pathlib.Path) -> int:
    """The number of tensors in a folder."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as opened:
            total += len(opened.keys())
    return total


def client_of(url: str) -> httpx.AsyncClient:
    """Without a limit of time but to connect: samples may take long. Connections are kept for less
    than the 5 seconds after which uvicorn closes them.
    """
    limits = httpx.Limits(max_keepalive_connections=100, keepalive_expiry=2.0)
    timeout = httpx.Timeout(None, connect=CONNECT)
    return httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits)
