"""Requests in JSON, checked: what they hold, and what the log has of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tilewright.nn.projections import FUSED
from tilewright.server.datums import Datum, Room, from_json, twice
from tilewright.server.frames import Arrays
from tilewright.server.log import GENERATE
from tilewright.server.names import PARTS, canonical, checked, parsed
from tilewright.server.refused import Refused
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.data.routes import Routes


class Body(BaseModel):
    """Unknown keys are ignored, as the protocol has it."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, strict=True)


class Call(NamedTuple):
    """A request as the log has it.

    seq: None of one in no sequence.   creates: what its model is created with, if it is.
    same: the part of `value` that its repetition has, too; None: all of it.
    """

    model: str
    seq: int | None
    kind: str
    value: Any
    arrays: Arrays = {}  # noqa: RUF012 (nothing is added to it)
    creates: Any = None
    same: Any = None


B = TypeVar("B", bound=Body)


def read_json(data: bytes) -> Any:
    """Raises Refused for what is no JSON, or holds NaN or infinity, or half of a character."""

    def refuse(name: str) -> float:
        raise Refused(422, f"the body holds {name:.80}; JSON has finite numbers")

    def finite(text: str) -> float:
        return number if math.isfinite(number := float(text)) else refuse(text)

    try:
        given = json.loads(data, parse_constant=refuse, parse_float=finite)
        if b"\\u" in data:
            json.dumps(given, ensure_ascii=False).encode()
        return given
    except UnicodeEncodeError as error:
        raise Refused(422, "the body holds a surrogate without its other half") from error
    except RecursionError as error:
        raise Refused(422, "the body is nested too deeply") from error
    except ValueError as error:
        raise Refused(422, f"the body is no JSON: {error}") from error


def read(kind: type[B], given: Any) -> B:
    """Raises Refused for the first field that is wrong."""
    if not isinstance(given, dict):
        raise Refused(422, f"the body must be an object, got {type(given).__name__}")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise Refused(422, f"{at}: {first['msg']}, got {first['input']!r:.80}") from error


# The places of requests, models and samplers in their sequences: the wire's int32.
Place = Annotated[int, Field(ge=0, lt=1 << 31)]
First = Annotated[int, Field(ge=1, lt=1 << 31)]
# And of samples, of which each client of a sampler has a billion.
Sampled = Annotated[int, Field(ge=0, lt=1 << 63)]
# What float32 holds, with room for what is made of it.
Rate = Annotated[float, Field(ge=0, le=1e6)]
Epsilon = Annotated[float, Field(ge=1e-37, le=1e6)]  # 0: what has no gradient would be NaN


# ---- models


class LoraConfig(Body):
    rank: int = Field(ge=1)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    alpha: float | None = None
    dropout: float | None = None
    target_modules: Any = None


class OptimizerConfig(Body):
    """Other settings than these would be without effect."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    type: str = "adamw"


class CreateModel(Body):
    session_id: str
    model_seq_id: Place
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


# What the log knows of each model, and of what is saved of it.
ABOUT = ("rank", "scale", "seed", "parts", "targets")


class Base(NamedTuple):
    """What models are made from: names of the base; the greatest rank, the alpha, and the seed of
    their adapters where a client gives none.   rank: None: models are all weights, without
    adapters.
    """

    names: tuple[str, ...]
    rank: int | None
    alpha: float
    seed: int


class CreateSession(Body):
    user_metadata: dict[str, Any] | None = None


def models_of(session: str) -> str:
    """What the names of a session's models begin with."""
    return f"{session}:train:"


def samplers_of(session: str) -> str:
    """What the names of a session's samplers begin with."""
    return f"{session}:sample:"


def model_of(session: str, number: int) -> str:
    return checked("session_id", f"{models_of(session)}{number}")


class NamedLora(Body):
    rank: int = Field(ge=1)
    dropout: float = 0.0
    alpha: float | None = Field(None, gt=0, le=1e6)
    target_modules: list[str] | None = None
    seed: int | None = None


class Settings(OptimizerConfig):
    """Used by steps that do not say them."""

    learning_rate: Rate | None = None
    weight_decay: Rate = 0.0
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.95], min_length=2, max_length=2
    )
    eps: Epsilon = 1e-12
    optimizer_dtype: str | None = None


class NamedModel(Body):
    """How the JSON dialect creates one."""

    model_id: str = "default"
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: NamedLora | None = None
    optimizer_config: Settings | None = None


def create_model(given: Any, base: Base) -> Call:
    if isinstance(given, dict) and "session_id" not in given:
        return _create_named(given, base)
    body = read(CreateModel, given)
    check_base(body.base_model, base)
    _check_optimizer(body.optimizer_config)
    lora = body.lora_config or LoraConfig(rank=base.rank or 1)
    for name in ("alpha", "dropout", "target_modules"):
        if value := getattr(lora, name):
            raise Refused(
                400,
                f"lora_config.{name} is {value!r:.80}; a model of a session has the server's alpha, "
                "no dropout, and train_attn, train_mlp and train_unembed",
            )
    parts = [part for part in PARTS if getattr(lora, f"train_{part}")]
    if not parts:
        raise Refused(400, "lora_config: one of train_attn, train_mlp, train_unembed must be true")
    about = _about(lora.rank, base.alpha, lora.seed, parts, base)
    known = {"base_model": body.base_model, "user_metadata": body.user_metadata}
    model = model_of(body.session_id, body.model_seq_id)
    return Call(model, 0, "create_model", about, creates={**about, **known})


def _create_named(given: dict[str, Any], base: Base) -> Call:
    body = read(NamedModel, given)
    check_base(body.base_model, base)
    _check_optimizer(body.optimizer_config)
    lora = body.lora_config or NamedLora.model_validate({"rank": base.rank or 1})
    if lora.dropout:
        raise Refused(400, f"lora_config.dropout is {lora.dropout}; accepted is 0")
    settings = body.optimizer_config or Settings.model_validate({})
    if settings.optimizer_dtype not in (None, "fp32", "float32"):
        raise Refused(
            400, f"optimizer_config.optimizer_dtype is {settings.optimizer_dtype!r}; accepted is "
            "'fp32'"
        )  # fmt: skip
    targets = None
    if lora.target_modules is not None:
        targets = sorted({n for name in lora.target_modules for n in FUSED.get(name, (name,))})
        if not targets:
            raise Refused(400, "lora_config.target_modules is []; null stands for all projections")
    # None on the head unless it is named: this protocol's clients load adapters of layers alone.
    parts = ["attn", "mlp"] + ["unembed"] * ("lm_head" in (targets or ()))
    about = _about(lora.rank, lora.alpha or base.alpha, lora.seed, parts, base, targets)
    known = {"base_model": body.base_model, "user_metadata": body.user_metadata, "named": True}
    model = checked("model_id", body.model_id)
    return Call(
        model,
        0,
        "create_model",
        about,
        creates={**about, **known, "settings": settings.model_dump()},
    )


def _about(
    rank: int,
    alpha: float,
    seed: int | None,
    parts: list[str],
    base: Base,
    targets: list[str] | None = None,
) -> dict[str, Any]:
    if base.rank is None:  # clients send a rank in any case
        return {"rank": None, "scale": 1.0, "seed": base.seed, "parts": [], "targets": None}
    if rank > base.rank:
        raise Refused(400, f"lora_config.rank is {rank}; accepted are 1 to {base.rank}")
    seed = (base.seed if seed is None else seed) % (1 << 31)
    about = {"rank": rank, "scale": alpha / rank, "seed": seed, "parts": parts}
    return {**about, "targets": targets}


def check_base(name: str | None, base: Base) -> None:
    """Raises Refused for a base that is not this server's."""
    if name not in base.names:
        known = " or ".join(base.names)
        raise Refused(400, f"base_model is {name!r}; this server has {known}")


def _check_optimizer(config: OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise Refused(400, f"optimizer_config.type is {config.type!r}; accepted is 'adamw'")


class LoadWeights(Body):
    model_id: str | None = None
    seq_id: First | None = None
    session_id: str | None = None
    model_seq_id: Place | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None


def load_weights(given: Any, base: Base, known: Mapping[str, Any] | None) -> Call:
    """known: what the log knows of the path; None: nothing."""
    body = read(LoadWeights, given)
    _, kind, _ = parsed(body.path)
    if kind != "weights":
        raise Refused(400, f"path is {body.path}: it holds weights for sampling alone")
    if known is None:
        raise Refused(404, f"there is no checkpoint {body.path}")
    _check_optimizer(body.optimizer_config)
    if body.base_model is not None:
        check_base(body.base_model, base)
    value = {"path": canonical(body.path), "optimizer": body.optimizer}
    if body.model_id is not None:
        return Call(checked("model_id", body.model_id), body.seq_id, "load_weights", value)
    if body.session_id is None or body.model_seq_id is None:
        raise Refused(422, "model_id or session_id with model_seq_id: one of them is needed")
    about = {n: known[n] for n in ABOUT}
    about |= {"base_model": base.names[0], "user_metadata": body.user_metadata}
    model = model_of(body.session_id, body.model_seq_id)
    return Call(model, 0, "create_from", value, creates=about)


class Info(Body):
    model_id: str = "default"


class Named(Body):
    model_id: str
    seq_id: First | None = None


def unload_model(given: Any) -> Call:
    body = read(Named, given)
    return Call(checked("model_id", body.model_id), None, "unload_model", None)


def abort(given: Any) -> Call:
    body = read(Named, given)
    return Call(checked("model_id", body.model_id), body.seq_id, "abort_gradient_epoch", None)


class KillSession(Body):
    """reset_weights is no field: the model is gone."""

    model_id: str
    save_checkpoint: bool = False


class DeleteCheckpoint(Body):
    model_id: str
    checkpoint_id: str


# ---- steps


class AdamParams(Body):
    learning_rate: Rate = 1e-4
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: Epsilon = 1e-12
    weight_decay: Rate = 0.0
    grad_clip_norm: float = Field(0.0, ge=0)


class OptimStep(Named):
    adam_params: AdamParams | None = None
    optimizer_params: OptimizerConfig | None = None
    learning_rate: Rate | None = None
    gradient_clip: float = Field(0.0, ge=0)


def optim_step(given: Any, known: Mapping[str, Any]) -> Call:
    """known: what its model was created with."""
    body = read(OptimStep, given)
    _check_optimizer(body.optimizer_params)
    own, settings = body.adam_params, known.get("settings")
    if own is not None:
        for name, given, other in (
            ("learning_rate", body.learning_rate, own.learning_rate),
            ("gradient_clip", body.gradient_clip or None, own.grad_clip_norm),
        ):
            if given is not None and given != other:
                raise Refused(422, f"{name} is {given}, and that of adam_params {other}; give one")
    if own is None and settings is not None:
        rate = settings["learning_rate"] if body.learning_rate is None else body.learning_rate
        beta1, beta2 = settings["betas"]
        params = {n: settings[n] for n in ("eps", "weight_decay")} | {"learning_rate": rate}
        params |= {"beta1": beta1, "beta2": beta2, "grad_clip_norm": body.gradient_clip}
        own = read(AdamParams, params)
    if own is None:
        raise Refused(422, "adam_params: it is missing")
    settings = {
        "lr": own.learning_rate,
        "adam_beta1": own.beta1,
        "adam_beta2": own.beta2,
        "adam_epsilon": own.eps,
        "weight_decay": own.weight_decay,
    }
    value = {"settings": settings, "max_norm": own.grad_clip_norm}
    return Call(checked("model_id", body.model_id), body.seq_id, "optim_step", value)


# ---- passes


class Chunk(Body):
    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(Body):
    input_ids: list[int] | None = None
    chunks: list[Chunk] | None = None


class DatumBody(Body):
    model_input: ModelInput
    loss_fn_inputs: dict[str, Any] = {}
    routed_experts: Any = None


class PassInput(Body):
    data: list[DatumBody]
    loss_fn: str
    loss_fn_params: dict[str, Any] | None = None
    loss_fn_config: dict[str, Any] | None = None
    routed_experts: Any = None
    routed_expert_logits: Any = None


class PassBody(Named):
    forward_backward_input: PassInput | None = None
    forward_input: PassInput | None = None


class PassRequest:
    """A request of a pass of the JSON dialect, with what `binary.PassRequest` has."""

    def __init__(self, data: bytes, *, backward: bool):
        body = read(PassBody, read_json(data))
        own = body.forward_backward_input if backward else body.forward_input
        if own is None:
            raise Refused(422, f"forward{'_backward' * backward}_input: it is missing")
        self.model, self.seq, self.backward = body.model_id, body.seq_id, backward
        self._input, self.loss, self._room = own, own.loss_fn, Room(len(data))

    @property
    def options(self) -> dict[str, Any]:
        """The loss's."""
        return self._input.loss_fn_params or self._input.loss_fn_config or {}

    def data(self) -> list[Datum]:
        if self._input.routed_expert_logits is not None:
            raise Refused(
                501,
                "routed_expert_logits: experts are weighted by this router's, not by recorded ones",
            )
        return [self._datum(i, datum) for i, datum in enumerate(self._input.data)]

    def routes(self, routes: Routes | None, lengths: np.ndarray) -> np.ndarray | None:
        """The experts that an engine has recorded of each token, as the column routed_experts of
        all documents; None: there are none.

        routes: of the model; None: it has no experts.   lengths: of the documents.
        """
        own = self._input
        each, of_data = own.routed_experts, [datum.routed_experts for datum in own.data]
        if each is None:
            each = of_data
        elif any(one is not None for one in of_data) or not isinstance(each, list):
            raise Refused(422, "routed_experts: it must be a list, or what each datum has")
        if all(one is None for one in each):
            return None
        if routes is None:
            raise Refused(400, "routed_experts: the model has no experts")
        if len(each) != len(of_data):
            raise Refused(
                422, f"routed_experts has {len(each)} items, and the request {len(of_data)} data"
            )
        rows = []
        for i, (one, datum, length) in enumerate(zip(each, own.data, lengths, strict=True)):
            tokens = len(self._ids(i, datum.model_input))
            try:
                if one is None:
                    row = np.full((tokens, routes.width), -1, np.int16)
                else:
                    row = routes.read(one, tokens)
            except (TypeError, ValueError) as error:
                raise Refused(400, f"datum {i}: routed_experts: {error}") from error
            rows.append(row[:length])
        return np.concatenate(rows)

    @staticmethod
    def _ids(i: int, given: ModelInput) -> list[int]:
        """The tokens of a datum."""
        if given.chunks is not None:
            if odd := [chunk.type for chunk in given.chunks if chunk.type != "encoded_text"]:
                raise Refused(
                    400, f"datum {i}: model_input has a chunk of {odd[0]}; accepted is encoded_text"
                )
            ids = [token for chunk in given.chunks for token in chunk.tokens]
        else:
            ids = given.input_ids or []
        return ids

    def _datum(self, i: int, datum: DatumBody) -> Datum:
        ids = self._ids(i, datum.model_input)
        if wrong := [token for token in ids if abs(token) >= 2**31]:
            raise Refused(400, f"datum {i}: model_input has the token {wrong[0]}")
        inputs = {
            name: from_json(value, f"datum {i}: {name}", self._room)
            for name, value in datum.loss_fn_inputs.items()
        }
        return shifted(i, np.array(ids, np.int64), inputs)


def shifted(i: int, tokens: np.ndarray, inputs: dict[str, np.ndarray]) -> Datum:
    """A datum whose targets are aligned: `labels` are the tokens themselves, which a datum without
    `target_tokens` has, and -100 is not learned from.
    """
    if not {"labels", "target_tokens"} & {*inputs}:
        return Datum(tokens, inputs)  # which `losses.checked` refuses
    if "labels" in inputs:
        labels = inputs.pop("labels")
        if len(labels) != len(tokens) or "target_tokens" in inputs:
            raise Refused(
                422,
                f"datum {i}: labels has {len(labels)} values, and model_input {len(tokens)} tokens; "
                "accepted are as many, without target_tokens",
            )
        tokens, targets = tokens[:-1], labels[1:]
        inputs = {name: array[1:] for name, array in inputs.items()}
    else:
        targets = inputs["target_tokens"]
    ignored = targets == IGNORE
    if targets.ndim == 1:  # also where none is: all data of a request have the same inputs
        weights = inputs.get("weights", np.ones(len(targets), np.float32))
        if weights.shape == targets.shape:  # else it is refused
            inputs = {**inputs, "weights": np.where(ignored, 0, weights).astype(np.float32)}
        targets = np.where(ignored, 0, targets)
    return Datum(tokens, {**inputs, "target_tokens": targets})


# ---- files


MOST_SECONDS = 315_360_000  # ten years, as published clients have it


class Keep(Body):
    """For how long a checkpoint stays; null: until it is deleted."""

    ttl_seconds: int | None = Field(None, ge=1, le=MOST_SECONDS)


class SaveWeights(Named, Keep):
    path: str | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(SaveWeights):
    name: str | None = None  # as the JSON dialect has the path
    sampling_session_seq_id: Place | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


def saving(name: str | None, *, overwrite: bool = False, of: SaveWeights | None = None) -> Any:
    """What the log has of a request to save a model.   name: None: the workers number it."""
    metadata, seconds = (None, None) if of is None else (of.user_metadata, of.ttl_seconds)
    value = {"name": name, "overwrite": overwrite, "user_metadata": metadata}
    return {**value, "ttl_seconds": seconds}


def synced(weights: str) -> Any:
    """The same, for engines that get a model under its own name."""
    value = {**saving(None, overwrite=True), "sampler": weights, "dense": None}
    return {**value, "inflight": False, "sent": True}


def save_weights(given: Any) -> Call:
    body = read(SaveWeights, given)
    value = saving(_name(body), overwrite=body.overwrite, of=body)
    return Call(checked("model_id", body.model_id), body.seq_id, "save_weights", value)


def save_for_sampler(given: Any) -> Call:
    body = read(SaveForSampler, given)
    model, sampler = checked("model_id", body.model_id), None
    inflight = body.kind == "inflight"
    if inflight and body.sampling_session_seq_id is None:
        raise Refused(400, "kind is 'inflight', of what has a path; accepted is 'snapshot'")
    if body.sampling_session_seq_id is not None:
        session = model.partition(":train:")[0]
        sampler = sampler_of(session, body.sampling_session_seq_id)
    name = None if sampler else _name(body, body.name)
    overwrite = body.overwrite and sampler is None
    value = {**saving(name, overwrite=overwrite, of=body), "sampler": sampler, "dense": None}
    value["inflight"] = inflight
    # Published clients number the sampler anew when they send the request again.
    same = {**value, "sampler": sampler is not None}
    return Call(model, body.seq_id, "save_weights_for_sampler", value, same=same)


class SaveFull(SaveWeights):
    name: str | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"


def save_full(given: Any) -> Call:
    """All weights, adapters merged, as transformers reads them; beside them what samplers read."""
    body = read(SaveFull, given)
    name = _name(body, body.name)
    own = saving(name, overwrite=body.overwrite, of=body)
    value = {**own, "sampler": None, "dense": body.dtype, "inflight": False}
    return Call(checked("model_id", body.model_id), body.seq_id, "save_weights_for_sampler", value)


def _name(body: SaveWeights, name: str | None = None) -> str | None:
    if (name := name or body.path) is None:
        # By the request's place in its sequence, so that it is the same when it comes again.
        return None if body.seq_id is None else f"{body.seq_id:06d}"
    return checked("path", name)


def sampler_of(session: str, number: int) -> str:
    return checked("session_id", f"{samplers_of(session)}{number}")


# ---- sampling


class SamplingParams(Body):
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)


class Prompt(Body):
    chunks: list[Chunk]


class CreateSampler(Body):
    session_id: str
    sampling_session_seq_id: Place
    base_model: str | None = None
    model_path: str | None = None


class JoinSampler(Body):
    sampling_session_id: str


class Sample(Body):
    sampling_session_id: str
    seq_id: Sampled
    num_samples: int = Field(1, ge=1, le=1024)
    prompt: Prompt
    sampling_params: SamplingParams = Field(
        default_factory=lambda: SamplingParams.model_validate({})
    )
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=1024)
    topk_sample_logprobs: int = Field(0, ge=0, le=1024)
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    record_stability_info: bool | None = None


class Sampling(NamedTuple):
    """What may be sampled.   ends: tokens that end a text.   vocabulary, longest: tokens that there
    are, and of a prompt.   engine: of a prompt with what the engine for sampling adds, more than
    one; 0: there is none.
    """

    ends: list[int]
    vocabulary: int
    longest: int
    engine: int


def sample(given: Any, weights: str | None, limits: Sampling) -> Call:
    """weights: what the sampler has; None: the base alone.

    One token is drawn by the workers; more by the engine for sampling, of which "generate" is a
    request.
    """
    body = read(Sample, given)
    params, vocabulary, longest = body.sampling_params, limits.vocabulary, limits.longest
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    texts = [one for one in stop or () if isinstance(one, str)]
    alone = params.max_tokens == 1 and not texts and not body.topk_sample_logprobs
    if not alone and not limits.engine:
        raise Refused(
            501,
            f"sampling_params.max_tokens is {params.max_tokens}; without an engine (sampler: none) "
            "this server samples one token after a prompt, and scores prompts",
        )
    tokens = _tokens_of(body.prompt, vocabulary, longest)
    _check_sample(body, len(tokens))
    most = min(params.max_tokens or limits.engine, limits.engine - len(tokens))
    if not alone and most < 1:
        raise Refused(
            400,
            f"prompt has {len(tokens)} tokens, and the context {limits.engine}: none can follow",
        )
    arrays = {"tokens": np.array(tokens, np.int64)}
    asked = {
        "topk": min(body.topk_prompt_logprobs, vocabulary),
        "draws": [],
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
    }
    seed = _seed(params.seed, given)
    if alone:
        asked["draws"] = np.random.default_rng(seed).random(body.num_samples).tolist()
    value = {
        "weights": weights,
        "asked": asked,
        "prompt_logprobs": bool(body.prompt_logprobs),
        "last": body.prompt_logprobs_last_n,
        "ends": limits.ends if stop is None else [one for one in stop if isinstance(one, int)],
    }
    if (targets := body.target_prompt_logprobs) is not None:
        arrays["targets"] = _targets_of(targets, len(tokens) - 1, vocabulary)
        names = ("sparse_crow_indices", "sparse_col_indices")
        value["targets"] = [targets.get(name) for name in names]
    if not alone:
        value["generate"] = {
            "max_tokens": most,
            "samples": body.num_samples,
            "seed": seed,
            "stops": texts,
            "topk": min(body.topk_sample_logprobs, vocabulary),
        }
    name = checked("sampling_session_id", body.sampling_session_id)
    kind = "sample" if alone else GENERATE
    return Call(name, body.seq_id, kind, value, arrays)


def _check_sample(body: Sample, size: int) -> None:
    """Raises Refused for options that are not offered, or do not fit a prompt of so many tokens."""
    for name, value in (
        ("prompt_alt_tokens_k", body.prompt_alt_tokens_k),
        ("record_stability_info", body.record_stability_info),
    ):
        if value:
            raise Refused(501, f"{name}: it is not offered here")
    last = body.prompt_logprobs_last_n
    if last is not None and (not body.prompt_logprobs or last >= size):
        raise Refused(400, "prompt_logprobs_last_n: it needs prompt_logprobs and a longer prompt")
    if body.sampling_params.top_k == 0:
        raise Refused(400, "sampling_params.top_k is 0; accepted are -1, for all, and 1 or more")


def _targets_of(given: Any, rows: int, vocabulary: int) -> np.ndarray:
    """Tokens at each place of a prompt but the first, -1 for none."""
    at = "target_prompt_logprobs"
    data = given.get("data")
    ids = from_json(given, at, Room(8 * len(data) if isinstance(data, list) else 0))
    if ids.ndim != 2 or ids.dtype.kind != "i" or len(ids) != rows or not ids.size:
        raise Refused(422, f"{at} has the shape {[*ids.shape]}; accepted are {rows} rows of tokens")
    wrong = (ids < -1) | (ids >= vocabulary)
    if wrong.any():
        raise Refused(400, f"{at} has {ids[wrong][0]}; accepted are -1 to {vocabulary - 1}")
    if twice(ids).any():
        raise Refused(400, f"{at} has a token twice at one place")
    return ids


def _tokens_of(prompt: Prompt, vocabulary: int, longest: int) -> list[int]:
    tokens = [token for chunk in prompt.chunks for token in chunk.tokens]
    if odd := [chunk.type for chunk in prompt.chunks if chunk.type != "encoded_text"]:
        raise Refused(400, f"prompt has a chunk of {odd[0]!r}; accepted is 'encoded_text'")
    if not 0 < len(tokens) <= longest:
        raise Refused(400, f"prompt has {len(tokens)} tokens; accepted are 1 to {longest}")
    if wrong := [t for t in tokens if not 0 <= t < vocabulary]:
        raise Refused(400, f"prompt has the token {wrong[0]}; accepted are 0 to {vocabulary - 1}")
    return tokens


def _seed(seed: int | None, given: Any) -> int:
    """One that is the same when the request comes again."""
    if seed is None:
        digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).digest()
        seed = int.from_bytes(digest[:8], "little")
    return seed % (1 << 63)
