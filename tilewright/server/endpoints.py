"""Engines at their addresses: what they are checked for, the weights that they have, and the probe
of these.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import pathlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import httpx
import numpy as np

from tilewright.server import probe
from tilewright.server.engines import (
    UNKNOWN,
    Engine,
    Facts,
    Failed,
    Sampled,
    Sglang,
    Unanswered,
    Vllm,
    Wanted,
)
from tilewright.server.frames import Arrays, packed, unpacked
from tilewright.server.log import SAMPLE, Log
from tilewright.server.names import folder_of

log = logging.getLogger("tilewright.server")

POLL = 0.01  # seconds between looks for what the workers have scored
OTHERS = 8  # of weights before, which those that were sent are told apart from
APART = 0.25  # root of the mean square, from which on an engine serves another model
BASE = "the base"
QUANTIZATION = "sync_quantization"  # the fact with which all weights are sent
STATE = "state.json"  # of everything that is saved
# What is taken for the noise in 16 bits of an engine that has weights of another time.
UNKNOWN_NOISE = 0.02, 0.1


class Known(NamedTuple):
    """Weights that an engine has had, and training's scores under them.   name: as `known_as`.
    more: of all rows, where they were asked for.
    """

    name: str
    weights: str | None
    scores: np.ndarray
    more: np.ndarray | None = None


class Own(NamedTuple):
    """What engines are compared with: the server's.

    names: of the base.   longest: tokens of a document.   rank: the largest of adapters; None: all
    weights train.   exact: whether it computes in float32.   backend: by which all weights are
    sent.
    """

    names: tuple[str, ...]
    vocabulary: int
    longest: int
    rank: int | None
    exact: bool
    backend: str


class Transfer(NamedTuple):
    """How all weights are sent.   address, port: of rank 0 of the group, as the engine reaches it;
    0: a free one.   name: what the group's begins with.   bytes: of a bucket.   size: the engine's
    processes.
    """

    address: str = "127.0.0.1"
    port: int = 0
    name: str = "tilewright"
    bytes: int = 512 << 20
    size: int = 1


class Sending(NamedTuple):
    """What is done around weights that are sent.   pause: as `Engine.pause`.   reset: whether keys
    and values of prefixes are dropped.   quantization: of all weights, as `Training.send` has it.
    """

    pause: str = "wait"
    reset: bool = True
    quantization: Mapping[str, Any] | None = None


class Training(Protocol):
    """What the workers are asked for. Methods raise Failed."""

    async def score(self, weights: str | None, rows: Sequence[list[int]]) -> np.ndarray:
        """Log-probabilities by the forward pass of training."""
        ...

    async def send(
        self,
        weights: str,
        target: dict[str, Any],
        rows: Sequence[list[int]],
        quantization: Mapping[str, Any] | None,
    ) -> tuple[dict[str, int], np.ndarray]:
        """Sends all weights to an engine: what was sent, and scores under these weights.

        quantization: as `sending.quantized` has it; None: as it was set for all.
        """
        ...


class Workers:
    """`Training`, by requests in the log, as clients make them."""

    def __init__(self, requests: Log):
        self.requests = requests

    async def score(self, weights: str | None, rows: Sequence[list[int]]) -> np.ndarray:
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
        return (await self._done(SAMPLE, value, rows))[1]

    async def send(
        self,
        weights: str,
        target: dict[str, Any],
        rows: Sequence[list[int]],
        quantization: Mapping[str, Any] | None,
    ) -> tuple[dict[str, int], np.ndarray]:
        how = quantization or json.loads(self.requests.fact(QUANTIZATION) or "null")
        lengths = [len(row) - 1 for row in rows]
        value = {"weights": weights, "target": target, "lengths": lengths, "quantization": how}
        return await self._done("send", value, rows)

    async def _done(
        self, kind: str, value: Any, rows: Sequence[list[int]]
    ) -> tuple[Any, np.ndarray]:
        """The value of a result, and the scores of all rows."""
        rest = np.concatenate([np.array(row[1:]) for row in rows])
        given = {"tokens": np.array(rows[0][:1]), "sampled": rest}
        what = "sent" if kind == "send" else "scored by training"
        why = f"{value['weights'] or BASE} cannot be {what}"
        told, arrays = await self.asked(kind, value, given, why)
        return told, arrays["sampled_logprobs"].astype(np.float64)

    async def asked(
        self, kind: str, value: Any, arrays: Arrays | None = None, why: str = ""
    ) -> tuple[Any, Arrays]:
        """The value and the arrays of a result. Raises Failed, which begins with `why`."""
        name = self.requests.append("probe", None, kind, packed(value, arrays), owner="")
        while (result := self.requests.result(name)) is None:
            state = self.requests.fact("workers") or ""
            if state.startswith("failed"):
                raise Failed(503, f"the workers have {state}")
            await asyncio.sleep(POLL)
        if result.body is None:
            raise Failed(502, f"{why or kind}: {result.error}")
        return unpacked(result.body)


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
        self.pool, self.transfer = pool, Transfer()
        self.facts: Facts | None = None
        self.stale: str | None = None  # why nothing samples there
        self.running = 0
        self.undecided = 0  # probes
        self.sent: dict[str, int] = {}  # of all weights, the last time
        self._noise = probe.Noise(0.0, 0.0, 1.0, own.exact)
        self._there: dict[str, str] = {}  # weights by the engine's names, that have arrived
        self._known: list[Known] = []  # the base's first, the newest last
        self._base_proven = False  # since weights were sent last
        self._reading, self._idle = 0, asyncio.Event()  # samples that are drawn
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
            return await self._registered()

    async def _registered(self) -> Facts:
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
        if own.rank is None and own.backend not in self.engine.backends:
            by, is_by = ", ".join(self.engine.backends), f"{own.backend}_broadcast"
            raise Failed(
                502,
                f"{self.url}: {self.engine.name} takes all weights over {by} alone, and "
                f"sync_inference_method is {is_by}",
            )
        exact = own.exact and facts.dtype in ("float32", None) and not facts.quantized
        rows = self._rows(probe.ROWS if exact else probe.MORE, facts.longest)
        given = await self._scores(rows, None)
        wanted = await self.training.score(None, rows)
        noise = probe.Noise.of(given, wanted, exact=exact)
        most, _ = noise.bounds(wanted)
        alike = np.isfinite(given).all() and noise.mean <= APART
        alike = alike and not (exact and noise.most > most)
        if not alike and not (own.rank is None and self.engine.whole == "sent"):
            raise Failed(
                502,
                f"{self.url} serves {facts.model} and this server {own.names[0]}: their "
                f"log-probabilities differ by up to {noise.most:.3g}",
            )
        if not alike:  # it may have weights that were sent before; the next ones are probed
            mean, worst = (0.0, 0.0) if exact else UNKNOWN_NOISE
            noise = probe.Noise(mean, worst, noise.size, exact)
        first = wanted[: sum(len(row) - 1 for row in rows[: probe.ROWS])]
        self._noise, self._known, self._there = noise, [Known(BASE, None, first)], {}
        self.stale, self._base_proven = None, bool(alike)
        log.info("%s: %s, differs by up to %.3g from training", self.url, facts, noise.most)

    def forget(self) -> None:
        """The engine has ended: another one may come in its place."""
        self.facts = None

    def lost(self, error: httpx.TransportError) -> Unanswered:
        """It does not answer."""
        self.forget()
        return Unanswered(self.url, error)

    async def _ready(self, weights: str | None) -> str | None:
        """The engine's name for weights that have arrived there; None: they are its own."""
        if weights is None:
            if self.stale is not None:
                self.forget()  # the base is looked at again
            await self._registered()
            if not self._base_proven:
                await self._prove_base()
            return None
        await self._registered()
        name = known_as(self.root, weights)
        if name not in self._there:
            await self._publish(weights, name)
        return None if self._is_sent(weights) else name

    async def generate(self, wanted: Wanted, weights: str | None) -> list[Sampled]:
        self.running += 1
        try:
            for again in (True, False):
                async with self._lock:
                    name = await self._ready(weights)
                    self._reading += 1
                try:
                    return await self.engine.generate(wanted, name)
                except Failed as failed:
                    if failed.status != UNKNOWN or name is None or not again:
                        raise
                    self._there.pop(name, None)  # it was started again, and has forgotten them
                finally:
                    self._reading -= 1
                    if not self._reading:
                        self._idle.set()
            raise AssertionError("the second time it returns or raises")
        finally:
            self.running -= 1

    async def renew(
        self, weights: str, name: str, version: str, how: Sending | None = None
    ) -> probe.Verdict:
        """Replaces what the engine has under a name of its own, from which others sample, too.

        Raises Failed if the weights have not arrived.
        """
        async with self._lock:
            await self._registered()
            how = how or Sending()
            if self._is_sent(weights):
                return await self._send(weights, version, how)
            async with self._paused(how.pause):
                await self.engine.publish(name, self._folder(weights))
                await self._named(version, reset=how.reset)
            await self._check_version(version)
            verdict = await self._probed(weights, name)
            self._there[name] = weights
        return verdict

    @contextlib.asynccontextmanager
    async def _paused(self, how: str) -> AsyncIterator[None]:
        """Within, the engine draws no samples; it goes on afterwards, also after an error."""
        await self.engine.pause(how)
        try:
            yield
        finally:
            await self.engine.resume()

    async def _named(self, version: str, *, reset: bool) -> None:
        if reset:
            await self.engine.reset_cache()
        await self.engine.tell_version(version)

    async def _check_version(self, version: str) -> None:
        """An engine scores nothing while it is paused: what this server samples waits for the lock
        until it has.
        """
        if (told := await self.engine.version()) != version:
            self._now_stale(f"its version is {told!r}, and {version!r} was sent")

    # ---- weights

    async def _publish(self, weights: str, name: str) -> None:
        await self._withdraw_dropped()
        began = time.monotonic()
        if self._is_sent(weights):
            verdict = await self._send(weights, name, Sending())
        else:
            await self.engine.publish(name, self._folder(weights))
            verdict = await self._probed(weights, name)
            self._there[name] = weights
        log.info("%s: has %s, %s, %.3f s", self.url, name, verdict.state, time.monotonic() - began)

    def target(self) -> dict[str, Any]:
        """Where all weights are sent, as `sending.Target` has it: a group of another name each
        time.
        """
        how = self.transfer
        own = {"engine": self.engine.name, "url": self.url, "backend": self.own.backend}
        return {**how._asdict(), **own, "name": f"{how.name}-{time.time_ns()}"}

    async def _send(self, weights: str, version: str, how: Sending) -> probe.Verdict:
        """All weights, in the place of those that the engine has."""
        while self._reading:  # with the weights before
            self._idle.clear()
            await self._idle.wait()
        self._there.clear()
        self._base_proven = False  # also where only a part arrives
        rows = self._rows(probe.MORE)
        async with self._paused(how.pause):
            given = weights, self.target(), rows, how.quantization
            self.sent, wanted = await self.training.send(*given)
            await self._named(version, reset=how.reset)
        await self._check_version(version)
        verdict = await self._judged(weights, None, wanted)
        self._there[known_as(self.root, weights)] = weights
        return verdict

    def takes(self, weights: str) -> bool:
        """Whether there is what the engine needs of weights."""
        folder = exported(self.root, weights)
        return self._is_sent(weights) or (
            folder.is_dir() and (folder.name == "adapter" or self.engine.whole == "folder")
        )

    def _is_sent(self, weights: str) -> bool:
        """Whether the workers send them: all weights, to an engine that reads no folders."""
        whole = self.own.rank is None and (saved(self.root, weights) / STATE).is_file()
        return whole and self.engine.whole == "sent"

    def _folder(self, weights: str) -> pathlib.Path:
        return exported(self.root, weights).resolve()

    async def _withdraw_dropped(self) -> None:
        """Adapters whose files are gone."""
        for name, weights in [*self._there.items()]:
            if not self.takes(weights):
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
        wanted = await self.training.score(weights, self._rows(probe.ROWS))
        return await self._judged(weights, name, wanted)

    async def _judged(self, weights: str, name: str | None, wanted: np.ndarray) -> probe.Verdict:
        """wanted: training's scores of the rows, or of more of them."""
        own, rows = known_as(self.root, weights), self._rows(probe.ROWS)
        self._base_proven = False
        first = wanted[: sum(len(row) - 1 for row in rows)]
        before = [known for known in self._known if known.name != own]
        others = {known.name: known.scores for known in before}
        given = await self._scores(rows, name)
        verdict = probe.judge(given, first, others, self._noise)
        every = wanted if len(wanted) > len(first) else None
        last = before[-1]
        if verdict.state == "undecided" and (last.more is not None or self._is_there(last)):
            more = self._rows(probe.MORE)
            then = last.more
            if then is None:
                then = await self.training.score(last.weights, more)
            if every is None:
                every = await self.training.score(weights, more)
            if probe.tells(every, then, self._noise):
                given_more = await self._scores(more, name)
                verdict = probe.judge(given_more, every, {last.name: then}, self._noise)
        if verdict.state == "stale":
            self._now_stale(verdict.says)
        self._noise = self._noise.seen(given, first)
        self.undecided += verdict.state == "undecided"
        self.stale = None
        self._known = [before[0], *before[1:][-OTHERS:], Known(own, weights, first, every)]
        return verdict

    def _is_there(self, known: Known) -> bool:
        """Whether weights can be scored once more."""
        if known.weights is None:
            return True
        there = (saved(self.root, known.weights) / STATE).is_file()
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


def saved(root: pathlib.Path, weights: str) -> pathlib.Path:
    """Where that is which a path has, or a sampler."""
    return folder_of(root, weights) if "/" in weights else root / "samplers" / weights


def known_as(root: pathlib.Path, weights: str) -> str:
    """An engine's name for weights: another one for what was saved again under a path, so that no
    prefix of the former is found in a cache.
    """
    return f"{weights}@{(saved(root, weights) / STATE).stat().st_mtime_ns}"


def exported(root: pathlib.Path, weights: str) -> pathlib.Path:
    """Where an engine finds them: adapters, or all weights."""
    own = saved(root, weights)
    return own / "adapter" if (own / "adapter").is_dir() else own / "model"
