"""What follows prompts: asked of the engine for sampling, before the workers score it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import pathlib
import sqlite3
from typing import Any

import httpx
import numpy as np

from tilewright.server.frames import packed, unpacked
from tilewright.server.log import Log, Request, Result
from tilewright.server.names import folder_of

log = logging.getLogger(__name__)
LOOK = 0.02  # seconds between looks for requests
AGAIN = 0.5  # seconds before an engine that does not answer is asked again
FAILED = "failed"  # what the fact "sampler" begins with where the launcher has given up


class Rollouts:
    """Sends what waits to the engine, all at once, and its answers to the log.

    What was begun when the API ends is asked for again, with the same random numbers.

    client: of the engine.   logprobs: "trainer", where the workers score what was sampled, or
    "engine".
    """

    def __init__(self, requests: Log, root: pathlib.Path, client: httpx.AsyncClient, logprobs: str):
        self.requests, self.root, self.client, self.logprobs = requests, root, client, logprobs
        self._begun: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until it is canceled."""
        try:
            while True:
                with contextlib.suppress(sqlite3.OperationalError):  # of a full disk: later
                    self.begin()
                await asyncio.sleep(LOOK)
        finally:
            for task in self._begun.values():
                task.cancel()

    def begin(self) -> None:
        """Begins what waits and was not begun. The launcher starts the engine for the first."""
        for request in self.requests.to_generate(self._begun):
            if not self.requests.fact("sampler"):
                self.requests.tell("sampler", "wanted")
            task = asyncio.create_task(self._ended(request))
            self._begun[request.number] = task
            task.add_done_callback(functools.partial(self._over, request.number))

    def _over(self, number: int, task: asyncio.Task[None]) -> None:
        del self._begun[number]

    async def all(self) -> None:
        """Does what waits."""
        self.begin()
        await asyncio.gather(*self._begun.values())

    async def cancel(self, request: Request) -> None:
        """A request that the log has ended: the engine need not go on."""
        if (task := self._begun.get(request.number)) is not None:
            task.cancel()
            with contextlib.suppress(httpx.TransportError):
                await self.client.post("/abort_request", json={"rid": request.id})

    async def _ended(self, request: Request) -> None:
        try:
            await self._do(request)
        except Exception as error:
            log.exception("%s", request.id)
            self._refuse(request, f"{type(error).__name__}: {error}", "server")

    async def _do(self, request: Request) -> None:
        value, arrays = unpacked(request.body)
        asked, more = value["asked"], value["generate"]
        params = {
            "max_new_tokens": more["max_tokens"],
            "temperature": asked["temperature"],
            "top_k": asked["top_k"],
            "top_p": asked["top_p"],
            "n": more["samples"],
            "seed": more["seed"],
            "stop": more["stops"],
            "stop_token_ids": value["ends"],
            "ignore_eos": True,
        }
        body = {
            "input_ids": arrays["tokens"].tolist(),
            "rid": request.id,
            "sampling_params": params,
            "return_logprob": True,
            "top_logprobs_num": more["topk"],
        }
        try:
            answer = await self._asked("/generate", body, value["weights"])
        except _Unanswered as error:
            self._refuse(request, str(error), "server")
            return
        if answer.status_code != 200:
            category = "user" if answer.status_code < 500 else "server"
            self._refuse(request, f"the engine for sampling: {_why(answer)}", category)
            return
        given = answer.json()
        each = given if isinstance(given, list) else [given]
        lengths = [len(one["output_ids"]) for one in each]
        arrays["sampled"] = np.concatenate([np.array(one["output_ids"]) for one in each])
        scored = [pair[0] for one in each for pair in one["meta_info"]["output_token_logprobs"]]
        about = {
            "lengths": lengths,
            "stop_reasons": [one["meta_info"]["finish_reason"]["type"] for one in each],
        }
        if more["topk"]:
            best = [row for one in each for row in one["meta_info"]["output_top_logprobs"]]
            arrays["topk_sampled_ids"] = np.array([[e[1] for e in row] for row in best])
            arrays["topk_sampled_logprobs"] = np.array(
                [[e[0] for e in row] for row in best], np.float32
            )
        if self.logprobs == "engine":
            arrays["sampled_logprobs"] = np.array(scored, np.float32)
            if not value["prompt_logprobs"] and not asked["topk"] and "targets" not in arrays:
                del arrays["tokens"]
                self.requests.finish(request, Result(packed(about, arrays)), ran=False)
                return
        self.requests.generated(request, packed({**value, "generated": about}, arrays))

    async def _asked(self, path: str, body: Any, weights: str | None) -> httpx.Response:
        """The answer of the engine, which has read the weights. Raises _Unanswered."""
        name = None if weights is None else self._known_as(weights)
        if name is not None:
            body = {**body, "lora_path": name}
        while True:
            try:
                answer = await self.client.post(path, json=body)
                if answer.status_code != 404 or name is None or weights is None:
                    return answer
                adapter = {"lora_name": name, "lora_path": str(exported(self.root, weights))}
                loaded = await self.client.post("/load_lora_adapter", json=adapter)
                if loaded.status_code != 200:
                    return loaded
            except httpx.TransportError as error:
                state = self.requests.fact("sampler") or ""
                if state.startswith(FAILED):
                    raise _Unanswered(f"the engine for sampling has {state}") from error
                await asyncio.sleep(AGAIN)

    def _known_as(self, weights: str) -> str:
        """The engine's name for weights: another one for what was saved again under a path."""
        return f"{weights}@{exported(self.root, weights).stat().st_mtime_ns}"

    def _refuse(self, request: Request, why: str, category: str) -> None:
        self.requests.finish(request, Result(error=why, category=category), ran=False)


def exported(root: pathlib.Path, weights: str) -> pathlib.Path:
    """Where the engine finds what a path has, or a sampler: adapters, or all weights."""
    own = folder_of(root, weights) if "/" in weights else root / "samplers" / weights
    return own / "adapter" if (own / "adapter").is_dir() else own / "model"


class _Unanswered(Exception):
    """The engine is not there."""


def _why(answer: httpx.Response) -> str:
    try:
        return answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.text:.200}"
