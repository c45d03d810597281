"""Engines at their addresses: what they are checked for, the weights that they have, and the probe
of these.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import httpx
import numpy as np

from tilewright.server import probe
from tilewright.server.engines import UNKNOWN, Engine, Facts, Failed, Sampled, Sglang, Vllm, Wanted
from tilewright.server.frames import packed, unpacked
from tilewright.server.log import SAMPLE, Log
from tilewright.server.names import folder_of

log = logging.getLogger("tilewright.server")

POLL = 0.01  # seconds between looks for what the workers have scored
OTHERS = 8  # of weights before, which those that were sent are told apart from
APART = 0.25  # root of the mean square, from which on an engine serves another model
BASE = "the base"


class Known(NamedTuple):
    """Weights that an engine has had, and training's scores under them.   name: as `known_as`."""

    name: str
    weights: str | None
    scores: np.ndarray


class Own(NamedTuple):
    """What engines are compared with: the server's.

    names: of the base.   longest: tokens of a document.   rank: the largest of adapters; None: all
    weights train.   exact: whether it computes in float32.
    """

    names: tuple[str, ...]
    vocabulary: int
    longest: int
    rank: int | None
    exact: bool


class Training(Protocol):
    """Log-probabilities by the forward pass of training. Raises Failed."""

    async def __call__(self, weights: str | None, rows: Sequence[list[int]]) -> np.ndarray: ...


class Scored:
    """`Training`, by the workers, which are asked as by a client."""

    def __init__(self, requests: Log):
        self.requests = requests

    async def __call__(self, weights: str | None, rows: Sequence[list[int]]) -> np.ndarray:
        asked = {"topk": 0, "draws": [], "temperature": 1.0, "top_k": -1, "top_p": 1.0}
        lengths = [len(row) - 1 for row in rows]
        value = {
            "weights": weights,
            "asked": asked,
            "prompt_logprobs": False,
            "last": None,
            "ends": [],
            "generated": {"lengths": lengths, "stop_reasons": []},
        }
        rest = np.concatenate([np.array(row[1:]) for row in rows])
        body = packed(value, {"tokens": np.array(rows[0][:1]), "sampled": rest})
        name = self.requests.append("probe", None, SAMPLE, body, owner="")
        while (result := self.requests.result(name)) is None:
            state = self.requests.fact("workers") or ""
            if state.startswith("failed"):
                raise Failed(503, f"the workers have {state}")
            await asyncio.sleep(POLL)
        if result.body is None:
            raise Failed(503, f"training cannot score {weights or BASE}: {result.error}")
        return unpacked(result.body)[1]["sampled_logprobs"].astype(np.float64)


async def detected(client: httpx.AsyncClient) -> Engine:
    """By what it answers. Raises Failed, and httpx.TransportError."""
    for kind in (Vllm, Sglang):
        engine = kind(client)
        try:
            await engine.facts()
        except Failed as failed:
            if failed.status != UNKNOWN:
                raise
        else:
            return engine
    raise Failed(400, f"{client.base_url} is neither vLLM nor SGLang: it has no /version")


class Endpoint:
    """An engine, and what it has.

    root: the server's folder.   training: what its scores are compared with.   pool: of the
    engines that are sent weights together.   Methods raise `Failed`, and httpx.TransportError where
    the engine does not answer.
    """

    def __init__(
        self,
        engine: Engine,
        root: pathlib.Path,
        own: Own,
        training: Training,
        pool: str | None = None,
    ):
        self.engine, self.root, self.own, self.training = engine, root, own, training
        self.pool = pool
        self.facts: Facts | None = None
        self.stale: str | None = None  # why nothing samples there
        self.running = 0
        self.undecided = 0  # probes
        self._noise = probe.Noise(0.0, 0.0, 1.0, own.exact)
        self._there: dict[str, str] = {}  # weights by the engine's names, that have arrived
        self._known: list[Known] = []  # the base's first, the newest last
        self._base_proven = False  # since weights were sent last
        self._lock = asyncio.Lock()

    @property
    def url(self) -> str:
        return str(self.engine.client.base_url).rstrip("/")

    @property
    def longest(self) -> int:
        """Tokens of a prompt with what follows."""
        stated = self.facts.longest if self.facts is not None else None
        return min(self.own.longest, stated or self.own.longest)

    async def registered(self) -> Facts:
        """What the engine is, which is checked the first time. Raises Failed with both values."""
        async with self._lock:
            if self.facts is None:
                facts = await self.engine.facts()
                await self._check(facts)
                self.facts = facts
            return self.facts

    async def _check(self, facts: Facts) -> None:
        own, rank = self.own, facts.rank
        if own.rank is not None and rank is not None and rank < own.rank:
            takes = f"adapters up to rank {rank}" if rank else "no adapters"
            raise Failed(502, f"{self.url} takes {takes}, and lora_rank is {own.rank}")
        exact = own.exact and facts.dtype in ("float32", None)
        rows = self._rows(probe.ROWS if exact else probe.MORE, facts.longest)
        given = await self._scores(rows, None)
        wanted = await self.training(None, rows)
        noise = probe.Noise.of(given, wanted, exact=exact)
        most, _ = noise.bounds(wanted)
        if not np.isfinite(given).all() or noise.mean > APART or (exact and noise.most > most):
            raise Failed(
                502,
                f"{self.url} serves {facts.model} and this server {own.names[0]}: their "
                f"log-probabilities differ by up to {noise.most:.3g}",
            )
        first = wanted[: sum(len(row) - 1 for row in rows[: probe.ROWS])]
        self._noise, self._known, self._there = noise, [Known(BASE, None, first)], {}
        self.stale, self._base_proven = None, True
        log.info("%s: %s, differs by up to %.3g from training", self.url, facts, noise.most)

    def forget(self) -> None:
        """The engine has ended: another one may come in its place."""
        self.facts = None

    async def ready(self, weights: str | None) -> str | None:
        """The engine's name for weights that have arrived there; None: the base."""
        if weights is None and self.stale is not None:
            self.forget()
        await self.registered()
        if weights is None:
            async with self._lock:
                if not self._base_proven:
                    await self._prove_base()
            return None
        name = known_as(self.root, weights)
        async with self._lock:
            if name not in self._there:
                await self._publish(weights, name)
        return name

    async def generate(self, wanted: Wanted, weights: str | None) -> list[Sampled]:
        self.running += 1
        try:
            name = await self.ready(weights)
            try:
                return await self.engine.generate(wanted, name)
            except Failed as failed:
                if failed.status != UNKNOWN or name is None:
                    raise
                self._there.pop(name, None)  # it was started again, and has forgotten them
                return await self.engine.generate(wanted, await self.ready(weights))
        finally:
            self.running -= 1

    async def renew(
        self, weights: str, name: str, version: str, *, pause: str = "wait", reset: bool = True
    ) -> probe.Verdict:
        """Replaces what the engine has under a name of its own, from which others sample, too.

        pause: as `Engine.pause`.   reset: whether keys and values of prefixes are dropped.

        Raises Failed if the weights have not arrived.
        """
        await self.registered()
        engine = self.engine
        async with self._lock:
            await engine.pause(pause)
            try:
                await engine.publish(name, self._folder(weights))
                if reset:
                    await engine.reset_cache()
                await engine.tell_version(version)
            finally:
                await engine.resume()
            # It scores nothing while it is paused. What this server samples waits for the lock.
            if (told := await engine.version()) != version:
                self._now_stale(f"its version is {told!r}, and {version!r} was sent")
            verdict = await self._probed(weights, name)
            self._there[name] = weights
        return verdict

    # ---- weights

    async def _publish(self, weights: str, name: str) -> None:
        await self._withdraw_dropped()
        began = time.monotonic()
        await self.engine.publish(name, self._folder(weights))
        verdict = await self._probed(weights, name)
        self._there[name] = weights
        log.info("%s: has %s, %s, %.3f s", self.url, name, verdict.state, time.monotonic() - began)

    def _folder(self, weights: str) -> pathlib.Path:
        folder = exported(self.root, weights)
        if folder.name != "adapter" and not self.engine.whole:
            raise Failed(501, f"all weights are not sent to {self.engine.name} yet; train adapters")
        return folder.resolve()

    async def _withdraw_dropped(self) -> None:
        """Adapters whose files are gone."""
        for name, weights in [*self._there.items()]:
            if not exported(self.root, weights).is_dir():
                del self._there[name]
                with contextlib.suppress(Failed):
                    await self.engine.withdraw(name)

    async def _prove_base(self) -> None:
        """That the model alone is as before, beside weights that were sent since."""
        given = await self._scores(self._rows(probe.ROWS), None)
        others = {known.name: known.scores for known in self._known[1:]}
        verdict = probe.judge(given, self._known[0].scores, others, self._noise)
        if verdict.state == "stale":
            self._now_stale(f"without adapters {verdict.says}")
        self._base_proven = True

    async def _probed(self, weights: str, name: str) -> probe.Verdict:
        """Whether weights have arrived under a name. Raises Failed if not."""
        own, rows = known_as(self.root, weights), self._rows(probe.ROWS)
        self._base_proven = False
        wanted = await self.training(weights, rows)
        before = [known for known in self._known if known.name != own]
        others = {known.name: known.scores for known in before}
        given = await self._scores(rows, name)
        verdict = probe.judge(given, wanted, others, self._noise)
        if verdict.state == "undecided" and self._is_there(last := before[-1]):
            more = self._rows(probe.MORE)
            others = {last.name: await self.training(last.weights, more)}
            given, every = await self._scores(more, name), await self.training(weights, more)
            verdict = probe.judge(given, every, others, self._noise)
        if verdict.state == "stale":
            self._now_stale(verdict.says)
        self.undecided += verdict.state == "undecided"
        self.stale = None
        self._known = [before[0], *before[1:][-OTHERS:], Known(own, weights, wanted)]
        return verdict

    def _is_there(self, known: Known) -> bool:
        """Whether weights can be scored once more."""
        if known.weights is None:
            return True
        there = exported(self.root, known.weights).is_dir()
        return there and known_as(self.root, known.weights) == known.name

    def _now_stale(self, why: str) -> None:
        """Raises Failed: nothing samples there until weights have arrived again."""
        self._there.clear()
        self.stale = why
        raise Failed(502, f"{self.url} is stale: {why}")

    def _rows(self, count: int, longest: int | None = None) -> list[list[int]]:
        return probe.rows(self.own.vocabulary, min(longest or self.longest, self.longest), count)

    async def _scores(self, rows: Sequence[list[int]], name: str | None) -> np.ndarray:
        return np.concatenate([np.array(row) for row in await self.engine.score(rows, name)])


def known_as(root: pathlib.Path, weights: str) -> str:
    """An engine's name for weights: another one for what was saved again under a path, so that no
    prefix of the former is found in a cache.
    """
    return f"{weights}@{exported(root, weights).stat().st_mtime_ns}"


def exported(root: pathlib.Path, weights: str) -> pathlib.Path:
    """Where an engine finds what a path has, or a sampler: adapters, or all weights."""
    own = folder_of(root, weights) if "/" in weights else root / "samplers" / weights
    return own / "adapter" if (own / "adapter").is_dir() else own / "model"
