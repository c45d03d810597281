"""The engines that sample, each by its own HTTP calls: `ENGINES`.

Sources: vLLM's OpenAI server, and its routes for reinforcement learning
(https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html); SGLang's native API
(https://docs.sglang.ai/basic_usage/native_api.html), which the embedded sampler speaks too.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import httpx

UNKNOWN = 404  # weights, or a route, that an engine has not
SEEDS = 1 << 31  # seeds of engines are less
CONNECT = 10.0  # seconds in which an engine accepts a connection
LIMIT = 600.0  # seconds of a call that does not sample: weights are large


class Facts(NamedTuple):
    """What an engine says of itself; None: it does not say.

    model: what it serves.   longest: tokens of a prompt with what follows.   dtype: of its weights.
    rank: the largest of adapters; 0: it takes none.   version: its software's.   quantized: how its
    weights are stored, where that is not in `dtype`.
    """

    model: str
    longest: int | None
    dtype: str | None
    rank: int | None
    version: str | None
    quantized: str | None = None


class Wanted(NamedTuple):
    """Samples of a prompt.

    name: by which they are aborted.   ends: tokens that end a sample, and are its last.   stops:
    texts that do.   topk: the most probable tokens at each of its tokens, so many.
    """

    name: str
    tokens: list[int]
    samples: int
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    ends: list[int]
    stops: list[str]
    topk: int


class Sampled(NamedTuple):
    """One of them.   logprobs: of each token, at temperature 1.   topk: of each token, the most
    probable ones with theirs.   reason: "stop" or "length".   routes: the experts of the prompt's
    and its tokens, as `read_routed_experts` takes them; None: the engine does not return them.
    """

    tokens: list[int]
    logprobs: list[float]
    topk: list[list[tuple[int, float]]]
    reason: str
    routes: Any = None


class Failed(Exception):
    """What an engine has refused, or answered in another way than it documents."""

    def __init__(self, status: int, says: str):
        super().__init__(says)
        self.status = status


class Unanswered(Failed):
    """An engine does not answer."""

    def __init__(self, url: str, error: httpx.TransportError):
        super().__init__(503, f"{url} does not answer: {type(error).__name__} {error}".strip())


class Engine:
    """What all of them share. client: with the engine's address.

    Methods raise `Failed`, and httpx.TransportError where the engine does not answer.
    """

    name: str
    # How all weights reach it: from a "folder", under a name; or "sent" to it, in the place of its
    # own, by one of these backends.
    whole: str
    backends: tuple[str, ...] = ("gloo", "nccl")

    def __init__(self, client: httpx.AsyncClient):
        self.client = client

    async def facts(self) -> Facts:
        raise NotImplementedError

    async def version(self) -> str | None:
        """What the engine calls the weights that it was given last."""
        raise NotImplementedError

    async def tell_version(self, version: str) -> None:
        await self._asked("/update_weight_version", {"new_version": version})

    async def publish(self, name: str, folder: pathlib.Path) -> None:
        """Loads adapters, as PEFT has them, in the place of those of this name."""
        raise NotImplementedError

    async def withdraw(self, name: str) -> None:
        raise NotImplementedError

    async def generate(self, wanted: Wanted, name: str | None) -> list[Sampled]:
        """name: of adapters; None: the model alone."""
        raise NotImplementedError

    async def score(self, rows: Sequence[list[int]], name: str | None) -> list[list[float]]:
        """Log-probabilities of the tokens of each row but the first.

        Each is asked for after its prefix, as samples are: what an engine computes for prompts may
        take another path, past its cache.
        """
        return [*await asyncio.gather(*(self._row(row, name) for row in rows))]

    async def _row(self, row: list[int], name: str | None) -> list[float]:
        raise NotImplementedError

    async def abort(self, request: str) -> None:
        """Ends a request of this name, whose connection is closed already."""

    async def pause(self, how: str) -> None:
        """how: what becomes of requests that have begun: "wait" for them, "keep" them for
        afterwards, or "abort" them.
        """
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def reset_cache(self) -> None:
        """Drops keys and values of prefixes."""
        raise NotImplementedError

    async def _asked(
        self, path: str, body: Any = None, *, limit: float | None = LIMIT, **query: str
    ) -> Any:
        """The JSON, or the text, that a route answers: of GET without a body.

        limit: seconds; None: as long as it takes.
        """
        method = "GET" if body is None else "POST"
        given: dict[str, Any] = {"json": body, "params": query}
        if limit is not None:
            given["timeout"] = httpx.Timeout(limit, connect=CONNECT)
        answer = await self.client.request(method, path, **given)
        told: Any
        try:
            told = answer.json()
        except ValueError:
            told = answer.text
        if answer.status_code != 200:
            raise Failed(answer.status_code, _why(answer.status_code, told))
        return told


def _why(status: int, told: Any) -> str:
    """The sentence of an error."""
    for name in ("error", "message", "detail"):
        while isinstance(told, Mapping) and name in told:
            told = told[name]
    return f"{told:.300}" if isinstance(told, str) and told else f"{status} {told!r:.300}"


# SGLang's own modes: what it retracts is computed again, with the new weights.
PAUSES = {"wait": "retract", "keep": "in_place", "abort": "abort"}


class Sglang(Engine):
    """SGLang, by /generate."""

    name, whole = "sglang", "sent"
    _records = False  # whether it was started with --enable-return-routed-experts

    async def facts(self) -> Facts:
        model, server = await asyncio.gather(
            self._asked("/get_model_info"), self._asked("/get_server_info")
        )
        rank = server.get("max_lora_rank")
        adapters = server.get("enable_lora") or server.get("lora_paths") or rank
        self._records = bool(server.get("enable_return_routed_experts"))
        return Facts(
            model["model_path"],
            server.get("context_length") or server.get("max_req_input_len"),
            server.get("dtype"),
            rank if adapters else 0,
            server.get("version"),
            server.get("quantization"),
        )

    async def version(self) -> str | None:
        return (await self._asked("/get_model_info")).get("weight_version")

    async def publish(self, name: str, folder: pathlib.Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            await self._asked("/load_lora_adapter", body)
        except Failed as failed:
            if "already" not in str(failed):
                raise
            await self.withdraw(name)
            await self._asked("/load_lora_adapter", body)

    async def withdraw(self, name: str) -> None:
        await self._asked("/unload_lora_adapter", {"lora_name": name})

    async def generate(self, wanted: Wanted, name: str | None) -> list[Sampled]:
        params = {
            "max_new_tokens": wanted.max_tokens,
            "temperature": wanted.temperature,
            "top_k": wanted.top_k,
            "top_p": wanted.top_p,
            "n": wanted.samples,
            "sampling_seed": wanted.seed % SEEDS,
            "stop": wanted.stops,
            "stop_token_ids": wanted.ends,
            "ignore_eos": True,
        }
        body = {
            "input_ids": wanted.tokens,
            "rid": wanted.name,
            "sampling_params": params,
            "return_logprob": True,
            "top_logprobs_num": wanted.topk,
        }
        body |= {"return_routed_experts": True} if self._records else {}
        given = await self._asked("/generate", body | _adapter(name), limit=None)
        return [_of_sglang(one) for one in (given if isinstance(given, list) else [given])]

    async def _row(self, row: list[int], name: str | None) -> list[float]:
        count = len(row) - 1
        body = {
            "input_ids": [row[:i] for i in range(1, len(row))],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "token_ids_logprob": [[token] for token in row[1:]],
        }
        if name is not None:
            body["lora_path"] = [name] * count
        given = await self._asked("/generate", body)
        return [one["meta_info"]["output_token_ids_logprobs"][0][0][0] for one in given]

    async def abort(self, request: str) -> None:
        await self._asked("/abort_request", {"rid": request})

    async def pause(self, how: str) -> None:
        await self._asked("/pause_generation", {"mode": PAUSES[how]})

    async def resume(self) -> None:
        await self._asked("/continue_generation", {})

    async def reset_cache(self) -> None:
        await self._asked("/flush_cache", {})


class Embedded(Sglang):
    """`tilewright.sampler`: SGLang's calls, and all weights from a folder."""

    name, whole = "embedded", "folder"


def _adapter(name: str | None) -> dict[str, str]:
    return {} if name is None else {"lora_path": name}


def _of_sglang(given: Any) -> Sampled:
    about = given["meta_info"]
    best = about.get("output_top_logprobs") or []
    return Sampled(
        given["output_ids"],
        [pair[0] for pair in about["output_token_logprobs"]],
        [[(pair[1], pair[0]) for pair in row] for row in best],
        about["finish_reason"]["type"],
        about if about.get("routed_experts") is not None else None,
    )


class Vllm(Engine):
    """vLLM, by /v1/completions.

    It must run with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 for adapters, and VLLM_SERVER_DEV_MODE=1 for
    the routes that pause it, reset its cache and send it all weights.
    """

    name, whole, backends = "vllm", "sent", ("nccl",)

    def __init__(self, client: httpx.AsyncClient):
        super().__init__(client)
        self._model = ""  # what it serves, once it is asked

    async def facts(self) -> Facts:
        about, models = await asyncio.gather(self._asked("/version"), self._asked("/v1/models"))
        own = next(one for one in models["data"] if one["parent"] is None)
        self._model = own["id"]
        dtype = rank = quantized = None
        try:
            config = (await self._asked("/server_info", config_format="json"))["vllm_config"]
        except Failed as failed:  # without VLLM_SERVER_DEV_MODE
            if failed.status != UNKNOWN:
                raise
        else:
            dtype = config["model_config"]["dtype"].removeprefix("torch.")
            quantized = config["model_config"].get("quantization")
            rank = (config.get("lora_config") or {"max_lora_rank": 0})["max_lora_rank"]
        known = own["root"], own["max_model_len"], dtype, rank, about["version"]
        return Facts(*known, quantized)

    async def version(self) -> str | None:
        return (await self._asked("/weight_info"))["weight_version"]

    async def publish(self, name: str, folder: pathlib.Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        await self._asked("/v1/load_lora_adapter", body)

    async def withdraw(self, name: str) -> None:
        await self._asked("/v1/unload_lora_adapter", {"lora_name": name})

    async def generate(self, wanted: Wanted, name: str | None) -> list[Sampled]:
        same = not wanted.temperature  # it draws one alone then
        body = {
            "model": name or self._model,
            "prompt": wanted.tokens,
            "n": 1 if same else wanted.samples,
            "max_tokens": wanted.max_tokens,
            "temperature": wanted.temperature,
            "top_k": wanted.top_k,
            "top_p": wanted.top_p,
            "seed": wanted.seed % SEEDS,
            "stop": wanted.stops,
            "stop_token_ids": wanted.ends,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "logprobs": wanted.topk,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        given = await self._asked("/v1/completions", body, limit=None)
        each = [_of_vllm(choice, wanted.topk) for choice in given["choices"]]
        return each * wanted.samples if same else each

    async def _row(self, row: list[int], name: str | None) -> list[float]:
        # Its prompt_logprobs end the engine on a CPU where the head has an adapter (0.32).
        body = {
            "model": name or self._model,
            "prompt": [row[:i] for i in range(1, len(row))],
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 0,
            "logprob_token_ids": sorted({*row[1:]}),
            "return_tokens_as_token_ids": True,
        }
        given = await self._asked("/v1/completions", body)
        choices = sorted(given["choices"], key=lambda choice: choice["index"])
        each = zip(choices, row[1:], strict=True)
        return [one["logprobs"]["top_logprobs"][0][f"token_id:{token}"] for one, token in each]

    async def pause(self, how: str) -> None:
        await self._asked("/pause", {}, mode=how)

    async def resume(self) -> None:
        await self._asked("/resume", {})

    async def reset_cache(self) -> None:
        await self._asked("/reset_prefix_cache", {})


def _of_vllm(choice: Any, topk: int) -> Sampled:
    scored = choice["logprobs"]
    # The sampled token is the first, and once more where it is among the most probable ones.
    best = [
        sorted(((int(t.removeprefix("token_id:")), lp) for t, lp in row.items()), key=_rank)[:topk]
        for row in (scored["top_logprobs"] if topk else ())
    ]
    drawn = choice["token_ids"], scored["token_logprobs"], best, choice["finish_reason"]
    return Sampled(*drawn, choice.get("routed_experts"))


def _rank(pair: tuple[int, float]) -> float:
    return -pair[1]


ENGINES: Mapping[str, type[Engine]] = {one.name: one for one in (Embedded, Vllm, Sglang)}
