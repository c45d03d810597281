"""What the sampler answers: SGLang's /generate and its calls for adapters, and /v1/completions."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from tilewright._version import __version__
from tilewright.core.groups import Apart
from tilewright.core.registry import short
from tilewright.sampler.asked import Asked
from tilewright.sampler.engine import BASE, Engine, Sample, Unknown, Unsampled


class Refused(Exception):
    """A request that is not done, with its status."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Sampling(_Body):
    """What both protocols have."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    n: int = Field(1, ge=1, le=1024)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int = Field(0, ge=0)


class SamplingParams(_Sampling):
    max_new_tokens: int = Field(128, ge=1)
    seed: int = Field(0, ge=0, alias="sampling_seed")


class Generate(_Body):
    """input_ids: of one prompt, or of several; then of each the others have one, too, or none."""

    text: str | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: SamplingParams = Field(
        default_factory=lambda: SamplingParams.model_validate({})
    )
    return_logprob: bool = False
    top_logprobs_num: int = Field(0, ge=0, le=1024)
    token_ids_logprob: list[int] | list[list[int]] | None = None
    lora_path: str | list[str] | None = None
    rid: str | None = None  # a name by which it is aborted


class Abort(_Body):
    rid: str


class Pause(_Body):
    mode: Literal["retract", "abort", "in_place"] = "retract"


class Group(_Body):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: Literal["gloo", "nccl"] = "nccl"


class Tensors(_Body):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    flush_cache: bool = True
    weight_version: str | None = None


class Left(_Body):
    group_name: str


class Version(_Body):
    new_version: str


class Completions(_Sampling):
    model: str
    prompt: str | list[int]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=1024)


class Adapter(_Body):
    lora_name: str = Field(min_length=1)
    lora_path: str | None = None
    pinned: bool = False


class Served(NamedTuple):
    """What an application serves.   tokenizer: None where the model has none.   ends: tokens that
    end a sample.   name: the model's.
    """

    engine: Engine
    tokenizer: Any
    ends: frozenset[int]
    name: str

    def tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.of("the prompt is a text").encode(prompt)
        size = self.engine.model.config.get_text_config().vocab_size
        if wrong := [token for token in prompt if not 0 <= token < size]:
            raise Refused(400, f"the prompt has the token {wrong[0]}; accepted are 0 to {size - 1}")
        return prompt

    def of(self, why: str) -> Any:
        """The tokenizer. Raises Refused with why it is needed."""
        if self.tokenizer is None:
            raise Refused(400, f"{why}, and this model has no tokenizer")
        return self.tokenizer

    def text(self, tokens: Sequence[int]) -> str:
        """Without a tokenizer the numbers."""
        if self.tokenizer is None:
            return "".join(f"<{token}>" for token in tokens)
        return self.tokenizer.decode(tokens)

    async def sampled(
        self,
        prompt: str | list[int],
        most: int,
        topk: int,
        weights: str,
        given: _Sampling,
        name: str | None = None,
        scored: Sequence[int] = (),
    ) -> list[Sample]:
        """The samples of a prompt, by the parameters that both protocols have. Raises Refused."""
        stops = [given.stop] if isinstance(given.stop, str) else given.stop or []
        ends = frozenset(given.stop_token_ids or ()) | (
            frozenset() if given.ignore_eos else self.ends
        )
        asked = Asked(
            self.tokens(prompt),
            most,
            given.seed,
            0,
            given.temperature,
            given.top_k or -1,
            given.top_p,
            ends,
            tuple(stops),
            topk,
            tuple(scored),
        )
        try:
            every = [asked._replace(sample=i) for i in range(given.n)]
            each = self.engine.submit(weights, every, name)
            return [await asyncio.wrap_future(sample) for sample in each]
        except Unsampled as error:
            raise Refused(404 if isinstance(error, Unknown) else 400, str(error)) from error


def application(served: Served) -> FastAPI:
    """The routes."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    _tell_errors(app)
    _tell_state(app, served)
    _sample(app, served)
    _change_weights(app, served)
    _receive(app, served)
    return app


def _tell_errors(app: FastAPI) -> None:
    """Errors are answered with a sentence."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"error": {"message": str(error)}}, error.status)

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> JSONResponse:
        said = "; ".join(f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors())
        return JSONResponse({"error": {"message": said}}, 422)


def _tell_state(app: FastAPI, served: Served) -> None:
    """Whether it runs, and what it has."""
    engine = served.engine

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = [served.name, *engine.names]
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}

    @app.get("/get_model_info")
    async def info() -> dict[str, Any]:
        config = engine.model.config.get_text_config()
        about = {"model_path": served.name, "vocab_size": config.vocab_size}
        return {**about, "is_generation": True, "weight_version": engine.version}

    @app.get("/get_server_info")
    async def server() -> dict[str, Any]:
        return {
            "context_length": engine.longest,
            "dtype": short(engine.model.dtype),
            "quantization": "fp8" if engine.quantized else None,
            "continuous_batching": engine.continuous,
            "enable_lora": True,
            "max_lora_rank": None,
            "version": __version__,
        }

    @app.post("/update_weight_version")
    async def name_weights(body: Version) -> dict[str, Any]:
        engine.version = body.new_version
        return {"success": True, **body.model_dump()}


def _sample(app: FastAPI, served: Served) -> None:
    """The routes that sample."""

    @app.post("/generate")
    async def generate(body: Generate) -> Any:
        each = await asyncio.gather(*(_generate(served, body, one) for one in _prompts(body)))
        return each if _many(body.input_ids) else each[0]

    @app.post("/abort_request")
    async def abort(body: Abort) -> dict[str, bool]:
        served.engine.abort(body.rid)
        return {"success": True}

    @app.post("/flush_cache")
    async def flush() -> dict[str, bool]:
        await asyncio.to_thread(served.engine.reset_cache)
        return {"success": True}

    @app.post("/v1/completions")
    async def completions(body: Completions) -> dict[str, Any]:
        weights = BASE if body.model == served.name else body.model
        prompt = served.tokens(body.prompt)
        each = await served.sampled(prompt, body.max_tokens, body.logprobs or 0, weights, body)
        count = sum(len(sample.tokens) for sample in each)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
            "choices": [_choice(served, i, sample, body.logprobs) for i, sample in enumerate(each)],
            "usage": {**usage, "total_tokens": len(prompt) + count},
        }


def _change_weights(app: FastAPI, served: Served) -> None:
    """The routes that load weights, and hold samples up meanwhile."""
    engine, pauses = served.engine, contextlib.ExitStack()

    @app.post("/load_lora_adapter")
    async def load(body: Adapter) -> dict[str, Any]:
        if body.lora_path is None or body.lora_name == served.name:
            raise Refused(400, "lora_path must be given, and lora_name another than the model's")
        try:
            await asyncio.to_thread(engine.load, body.lora_name, pathlib.Path(body.lora_path))
        except (OSError, ValueError) as error:
            raise Refused(400, str(error)) from error
        return {"success": True, "loaded_adapters": engine.names}

    @app.post("/unload_lora_adapter")
    async def unload(body: Adapter) -> dict[str, Any]:
        try:
            await asyncio.to_thread(engine.forget, body.lora_name)
        except KeyError as error:
            raise Refused(404, f"there is no adapter {body.lora_name!r}") from error
        return {"success": True, "loaded_adapters": engine.names}

    @app.post("/pause_generation")
    async def pause(body: Pause | None = None) -> dict[str, bool]:
        """What has begun ends first, or is aborted."""
        if body is not None and body.mode == "abort":
            engine.abort(None)
        await asyncio.to_thread(pauses.enter_context, engine.pausing())
        return {"success": True}

    @app.post("/continue_generation")
    async def resume() -> dict[str, bool]:
        pauses.close()
        return {"success": True}


class _One(NamedTuple):
    """A prompt, tokens whose log-probabilities are told, too, and the name of weights."""

    prompt: str | list[int]
    scored: list[int]
    weights: str


def _receive(app: FastAPI, served: Served) -> None:
    """The routes by which all weights are sent, over a process group that the sender has made."""
    groups: dict[str, Apart] = {}

    @app.post("/init_weights_update_group")
    async def join(body: Group) -> dict[str, bool]:
        def joined() -> Apart:
            address = f"{body.master_address}:{body.master_port}"
            made = Apart(address, body.rank_offset, body.world_size, body.group_name, body.backend)
            made.join()
            return made

        try:
            groups[body.group_name] = await asyncio.to_thread(joined)
        except (RuntimeError, ValueError) as error:
            raise Refused(400, f"group_name {body.group_name!r}: {error}") from error
        return {"success": True}

    @app.post("/update_weights_from_distributed")
    async def update(body: Tensors) -> dict[str, bool]:
        if (group := groups.get(body.group_name)) is None:
            raise Refused(400, f"there is no group {body.group_name!r}; known are {[*groups]}")
        if len({len(body.names), len(body.dtypes), len(body.shapes)}) > 1:
            raise Refused(400, "names, dtypes and shapes: they are of different lengths")
        tensors = [*zip(body.names, body.dtypes, body.shapes, strict=True)]
        try:
            await asyncio.to_thread(served.engine.receive, tensors, group.broadcast)
        except (Unsampled, RuntimeError, ValueError) as error:
            raise Refused(400, str(error)) from error
        served.engine.version = body.weight_version or served.engine.version
        return {"success": True}

    @app.post("/destroy_weights_update_group")
    async def leave(body: Left) -> dict[str, bool]:
        if (group := groups.pop(body.group_name, None)) is None:
            raise Refused(400, f"there is no group {body.group_name!r}")
        group.close()
        return {"success": True}


def _many(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and isinstance(given[0], list)


def _prompts(body: Generate) -> list[_One]:
    """Those of a request. Raises Refused."""
    given: Any = body.text if body.input_ids is None else body.input_ids
    scored: Any = body.token_ids_logprob or []
    weights = body.lora_path or BASE
    if given is None or None not in (body.text, body.input_ids):
        raise Refused(400, "one of text and input_ids must be given")
    if not _many(given):
        if _many(scored) or isinstance(weights, list):
            raise Refused(400, "input_ids has one prompt, and another argument a list of several")
        return [_One(given, scored, weights)]
    every_scored = scored if _many(scored) else [scored] * len(given)
    every_weights = weights if isinstance(weights, list) else [weights] * len(given)
    for name, each in (("token_ids_logprob", every_scored), ("lora_path", every_weights)):
        if len(each) != len(given):
            raise Refused(400, f"{name} has {len(each)} items, and input_ids {len(given)} prompts")
    return [*map(_One, given, every_scored, every_weights)]


async def _generate(served: Served, body: Generate, one: _One) -> Any:
    """What follows one prompt of a request."""
    served.tokens(one.scored)
    given, topk = body.sampling_params, body.top_logprobs_num
    each = await served.sampled(
        one.prompt,
        given.max_new_tokens,
        topk,
        one.weights,
        given,
        name=body.rid,
        scored=one.scored,
    )
    answers = [_generated(served, sample, body.return_logprob) for sample in each]
    return answers if given.n > 1 else answers[0]


def _generated(served: Served, sample: Sample, logprobs: bool) -> dict[str, Any]:
    about: dict[str, Any] = {
        "finish_reason": {"type": sample.reason},
        "completion_tokens": len(sample.tokens),
        "weight_version": sample.weights,
    }
    if logprobs:
        pairs = zip(sample.logprobs, sample.tokens, strict=True)
        about["output_token_logprobs"] = [[lp, token, None] for lp, token in pairs]
    if sample.scored:
        about["output_token_ids_logprobs"] = [
            [[lp, None, None] for lp in each] for each in sample.scored
        ]
    if sample.topk:
        about["output_top_logprobs"] = [
            [[lp, token, None] for token, lp in each] for each in sample.topk
        ]
    return {"text": served.text(sample.tokens), "output_ids": sample.tokens, "meta_info": about}


def _choice(served: Served, index: int, sample: Sample, topk: int | None) -> dict[str, Any]:
    scored = None
    if topk is not None:
        scored = {
            "tokens": [served.text([token]) for token in sample.tokens],
            "token_logprobs": sample.logprobs,
            "top_logprobs": [{served.text([t]): lp for t, lp in each} for each in sample.topk],
        }
    return {
        "index": index,
        "text": served.text(sample.tokens),
        "token_ids": sample.tokens,
        "finish_reason": sample.reason,
        "logprobs": scored,
    }
