"""Engines that clients add, and the weights that these are sent: routes of the JSON dialect.

Adapters go as files, which an engine reads; all weights are sent by the workers.
"""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

import httpx
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from safetensors import safe_open

from tilewright.core.files import folder_size
from tilewright.server import bodies
from tilewright.server.endpoints import Endpoint, Transfer, detected, exported
from tilewright.server.engines import ENGINES, Engine, Failed, Unanswered
from tilewright.server.hosts import allowed
from tilewright.server.log import Log, Model
from tilewright.server.names import canonical, checked, parsed
from tilewright.server.refused import Refused
from tilewright.server.rollouts import Rollouts

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


class Sync(How):
    model_id: str = "default"
    flush_cache: bool = True
    cache_invalidation_mode: Literal["auto", "flush", "none"] = "auto"
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"
    weight_version: str | None = Field(None, min_length=1, max_length=256)
    quantization: Any = None
    pools: list[str] | None = None


class Offer(bodies.Body):
    model_path: str


class Serving(Protocol):
    """What the routes need of the API."""

    requests: Log
    rollouts: Rollouts
    root: pathlib.Path

    def endpoint(self, engine: Engine, pool: str | None = None) -> Endpoint: ...
    def model(self, name: str) -> Model: ...
    def path(self, path: str) -> Any: ...
    def accept(self, call: bodies.Call) -> dict[str, Any]: ...
    async def at_once(self, request: Request, future: dict[str, Any]) -> Response: ...


class Inference:
    """The routes.   hosts: at which engines may be."""

    def __init__(self, api: Serving, hosts: list[str]):
        self.api, self.hosts = api, hosts

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
        return {
            "success": True,
            "message": f"{endpoint.engine.name} {facts.version}",
            "endpoint": _told(endpoint),
            "weights_synced": False,
            "sync_message": "weights are sent when a client samples from them, or syncs them",
        }

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
        if body.quantization is not None:
            raise Refused(501, "quantization: weights are sent as they are")
        asked = [
            one
            for one in self.api.rollouts.endpoints
            if body.pools is None or one.pool in body.pools
        ]
        if not asked:
            raise Refused(400, "there is no endpoint to send weights to: add_inference_endpoint")
        weights = f"{model.name}@sync"
        value = {**bodies.saving(None, overwrite=True), "sampler": weights, "dense": None}
        value |= {"inflight": False, "sent": True}
        call = bodies.Call(model.name, None, "save_weights_for_sampler", value)
        saved = await self.api.at_once(request, self.api.accept(call))
        if "error" in (made := json.loads(bytes(saved.body))):
            return JSONResponse({"success": False, "message": made["error"]})
        version = body.weight_version or f"{model.name}@{time.time_ns()}"
        reset = body.flush_cache and body.cache_invalidation_mode != "none"

        async def one(endpoint: Endpoint) -> str:
            endpoint.transfer = body.of(endpoint.transfer)
            how = {"pause": PAUSES[body.pause_mode], "reset": reset}
            verdict = await endpoint.renew(weights, model.name, version, **how)
            return f"{version}: {verdict.state}{f', {verdict.says}' if verdict.says else ''}"

        began = time.monotonic()
        told = [await _tried(endpoint, one) for endpoint in asked]
        failed = [one["message"] for one in told if not one["success"]]
        sent = asked[0].sent
        if model.about["rank"] is not None:
            folder = exported(self.api.root, weights)
            sent = {"bytes": folder_size(folder), "tensors": _count(folder), "buckets": 1}
        return JSONResponse(
            {
                "success": not failed,
                "message": "; ".join(failed) or f"{model.name} is {version}",
                "transfer_time": time.monotonic() - began,
                "total_bytes": sent.get("bytes", 0),
                "num_parameters": sent.get("tensors", 0),
                "num_buckets": sent.get("buckets", 0),
                "endpoints_synced": told,
            }
        )

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


async def _tried(endpoint: Endpoint, do: Callable[[Endpoint], Awaitable[str]]) -> dict[str, Any]:
    """What has become of it at an engine. The others go on."""
    url = httpx.URL(endpoint.url)
    told = {"host": url.host, "port": url.port, "success": True}
    try:
        return {**told, "message": await do(endpoint)}
    except Failed as failed:
        why = failed
    except httpx.TransportError as error:
        why = endpoint.lost(error)
    return {**told, "success": False, "message": str(why)}


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
    """Without a limit of time: samples may take long. Connections are kept for less than the 5
    seconds after which uvicorn closes them.
    """
    limits = httpx.Limits(max_keepalive_connections=100, keepalive_expiry=2.0)
    return httpx.AsyncClient(base_url=url, timeout=None, limits=limits)
