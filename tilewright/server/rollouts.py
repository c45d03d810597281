"""What follows prompts: asked of the engines for sampling, before the workers score it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sqlite3
from collections.abc import Iterable, Sequence

import httpx
import numpy as np

from tilewright.server.datums import ROUTES
from tilewright.server.endpoints import Endpoint
from tilewright.server.engines import Failed, Sampled, Unanswered, Wanted
from tilewright.server.frames import packed, unpacked
from tilewright.server.log import Log, Request, Result
from tilewright.trainer.data.routes import Routes

log = logging.getLogger("tilewright.server")
LOOK = 0.02  # seconds between looks for requests
AGAIN = 0.5  # seconds before an engine that does not answer is asked again
FAILED = "failed"  # what the fact "sampler" begins with where the launcher has given up


class Rollouts:
    """Sends what waits to an engine, all at once, and its answers to the log.

    What was begun when the API ends is asked for again, with the same random numbers.

    logprobs: "trainer", where the workers score what was sampled, or "engine".   endpoints: the
    engines, of which the least busy one is asked, and where it does not answer the next.   managed:
    the one that the launcher starts, and starts again, where there is no other.   routes: what
    recorded experts look like; None: the model has none.
    """

    def __init__(
        self,
        requests: Log,
        logprobs: str,
        endpoints: Iterable[Endpoint] = (),
        managed: Endpoint | None = None,
        routes: Routes | None = None,
    ):
        self.requests, self.logprobs = requests, logprobs
        self.endpoints, self.managed, self.routes = [*endpoints], managed, routes
        self._begun: dict[int, asyncio.Task[None]] = {}

    @property
    def asked(self) -> list[Endpoint]:
        """The engines that are asked."""
        own = [] if self.managed is None else [self.managed]
        return self.endpoints or own

    @property
    def longest(self) -> int:
        """Tokens of a prompt with what follows, that all of them take; 0: there is none."""
        return min((endpoint.longest for endpoint in self.asked), default=0)

    def takes(self, weights: str | None) -> bool:
        """Whether one of them can have weights; None: the base's."""
        return weights is None or any(endpoint.takes(weights) for endpoint in self.asked)

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
        """Begins what waits and was not begun. The launcher starts its engine for the first."""
        for request in self.requests.to_generate(self._begun):
            if not self.endpoints and self.managed and not self.requests.fact("sampler"):
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
            for endpoint in self.asked:
                with contextlib.suppress(httpx.TransportError, Failed):
                    await endpoint.engine.abort(request.id)

    async def _ended(self, request: Request) -> None:
        try:
            await self._do(request)
        except Exception as error:
            log.exception("%s", request.id)
            self._refuse(request, f"{type(error).__name__}: {error}", "server")

    async def _do(self, request: Request) -> None:
        value, arrays = unpacked(request.body)
        asked, more = value["asked"], value["generate"]
        wanted = Wanted(
            request.id,
            arrays["tokens"].tolist(),
            more["samples"],
            more["max_tokens"],
            asked["temperature"],
            asked["top_k"],
            asked["top_p"],
            more["seed"],
            value["ends"],
            more["stops"],
            more["topk"],
        )
        try:
            each = await self._sampled(wanted, value["weights"])
        except Failed as failed:
            category = "user" if failed.status < 500 or failed.status == 501 else "server"
            self._refuse(request, f"the engine for sampling: {failed}", category)
            return
        arrays["sampled"] = np.concatenate([np.array(one.tokens) for one in each])
        about = {
            "lengths": [len(one.tokens) for one in each],
            "stop_reasons": [one.reason for one in each],
        }
        if more["topk"]:
            best = np.array([row for one in each for row in one.topk])
            arrays["topk_sampled_ids"] = best[..., 0].astype(np.int64)
            arrays["topk_sampled_logprobs"] = best[..., 1].astype(np.float32)
        if self.routes is not None and all(one.routes is not None for one in each):
            try:
                rows = [
                    self.routes.read(one.routes, len(wanted.tokens) + len(one.tokens))
                    for one in each
                ]
            except (TypeError, ValueError) as error:
                self._refuse(request, f"the engine for sampling: {error}", "server")
                return
            arrays[ROUTES] = np.concatenate(rows)
        if self.logprobs == "engine":
            scored = np.concatenate([np.array(one.logprobs) for one in each])
            arrays["sampled_logprobs"] = scored.astype(np.float32)
            if not value["prompt_logprobs"] and not asked["topk"] and "targets" not in arrays:
                del arrays["tokens"]
                self.requests.finish(request, Result(packed(about, arrays)), ran=False)
                return
        self.requests.generated(request, packed({**value, "generated": about}, arrays))

    async def _sampled(self, wanted: Wanted, weights: str | None) -> Sequence[Sampled]:
        """By the first engine that can. Raises Failed."""
        while True:
            why: list[Failed] = []
            for endpoint in sorted(self.asked, key=_busy):
                try:
                    return await self._once_more(endpoint, wanted, weights)
                except httpx.TransportError as error:
                    why.append(endpoint.lost(error))
                except Failed as failed:
                    if failed.status < 500:  # of the request: another engine says the same
                        raise
                    why.append(failed)
            if not why:
                raise Failed(503, "there is none: add_inference_endpoint")
            if self.asked != [self.managed] or not isinstance(why[-1], Unanswered):
                raise Failed(why[-1].status, "; ".join(map(str, why)))
            state = self.requests.fact("sampler") or ""
            if state.startswith(FAILED):
                raise Failed(503, f"it has {state}")
            await asyncio.sleep(AGAIN)

    @staticmethod
    async def _once_more(endpoint: Endpoint, wanted: Wanted, weights: str | None) -> list[Sampled]:
        """Also where a connection had ended that was kept: the same samples come again."""
        try:
            return await endpoint.generate(wanted, weights)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            return await endpoint.generate(wanted, weights)

    def _refuse(self, request: Request, why: str, category: str) -> None:
        self.requests.finish(request, Result(error=why, category=category), ran=False)


def _busy(endpoint: Endpoint) -> tuple[bool, int]:
    return endpoint.stale is not None, endpoint.running
