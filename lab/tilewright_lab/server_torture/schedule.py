"""What a client sends, from a seed: waves of requests, each around one place of a kill.

Two models live through all of it: one of the first protocol, whose passes are in protobuf, and one
of the JSON dialect. Others are created, trained and unloaded. The requests of a wave are sent
before any of their results is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tilewright.server import messages_pb2 as wire
from tilewright_lab.server_torture.points import Place

VOCABULARY = 97
LENGTHS = 4, 40  # of documents


class Call(NamedTuple):
    """A request. kind, model: as the log has them.   body: bytes of protobuf, or JSON's.

    protobuf: whether its result is asked for in protobuf.
    """

    kind: str
    model: str
    path: str
    body: Any
    protobuf: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} of {self.model}"


Document = tuple[Sequence[int], Sequence[int], Sequence[float]]  # tokens, targets and weights


def in_json(numbered: dict[str, Any], documents: Sequence[Document], kind: str) -> dict[str, Any]:
    """The body of a pass in the JSON dialect.   numbered: its model, and its number."""
    data = [
        {
            "model_input": {"input_ids": [*tokens]},
            "loss_fn_inputs": {"target_tokens": [*targets], "weights": [*weights]},
        }
        for tokens, targets, weights in documents
    ]
    own = {"data": data, "loss_fn": "causallm_loss", "loss_fn_params": {}}
    return {**numbered, f"{kind}_input": own}


def in_protobuf(numbered: dict[str, Any], documents: Sequence[Document], kind: str) -> bytes:
    """The same of the first protocol."""
    body = wire.ForwardBackwardRequest(
        **numbered, loss_fn="cross_entropy", forward_only=kind == "forward"
    )
    for tokens, targets, weights in documents:
        datum = body.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
        for name, array, dtype in (
            ("target_tokens", np.array(targets, "<i8"), wire.DTYPE_INT64),
            ("weights", np.array(weights, "<f4"), wire.DTYPE_FLOAT32),
        ):
            datum.loss_fn_inputs[name].CopyFrom(
                wire.Tensor(dense=array.tobytes(), dtype=dtype, shape=array.shape)
            )
    return body.SerializeToString(deterministic=True)


class Wave(NamedTuple):
    """number: of the place that its kill is at, among those of a schedule; the opening has -1.

    model: whose request is killed at; None: no kill is to be in this wave.
    """

    number: int
    model: str | None
    calls: list[Call]


class Model:
    """What the client knows of a model. named: whether it is of the JSON dialect."""

    def __init__(self, name: str, *, named: bool):
        self.name, self.named = name, named
        self._seq = itertools.count(1)
        self.saved: list[str] = []  # by waves that are over

    def numbered(self, **more: Any) -> dict[str, Any]:
        return {"model_id": self.name, "seq_id": next(self._seq), **more}


class Traffic:
    """Requests, each of which is drawn.   session: of the models of the first protocol."""

    def __init__(self, seed: Sequence[int], session: str, base: str):
        self.draw = np.random.default_rng(seed)
        self.session, self.base = session, base
        self._numbers, self._names, self._sample = (itertools.count() for _ in range(3))
        self._samplers = itertools.count()
        self.samplers: list[str] = []
        # What is saved in a wave, and may be used in the next.
        self._later: list[tuple[list[str], str]] = []

    def over(self) -> None:
        """A wave is: what it has saved is there."""
        for where, path in self._later:
            where.append(path)
        self._later.clear()

    def _chance(self) -> bool:
        return bool(self.draw.random() < 0.5)

    # ---- models

    def create(self, *, named: bool) -> tuple[Model, Call]:
        seed = int(self.draw.integers(1000))
        if named:
            model = Model(f"named-{next(self._names)}", named=True)
            body = {"model_id": model.name, "lora_config": {"rank": 4, "alpha": 8, "seed": seed}}
            body["optimizer_config"] = {"type": "adamw", "learning_rate": 1e-2}
        else:
            number = next(self._numbers)
            model = Model(f"{self.session}:train:{number}", named=False)
            body = {"session_id": self.session, "model_seq_id": number}
            body["lora_config"] = {"rank": int(self.draw.integers(1, 9)), "seed": seed}
        body["base_model"] = self.base
        return model, Call("create_model", model.name, "create_model", body)

    def create_from(self, source: Model) -> tuple[Model, Call]:
        number = next(self._numbers)
        model = Model(f"{self.session}:train:{number}", named=False)
        body = {"session_id": self.session, "model_seq_id": number, "optimizer": self._chance()}
        body["path"] = source.saved[-1]
        return model, Call("create_from", model.name, "load_weights", body)

    def unload(self, model: Model) -> Call:
        return Call("unload_model", model.name, "unload_model", {"model_id": model.name})

    # ---- training

    def _documents(self) -> list[Document]:
        lengths = self.draw.integers(*LENGTHS, size=self.draw.integers(1, 5))
        return [
            (
                self.draw.integers(0, VOCABULARY, n).tolist(),
                self.draw.integers(0, VOCABULARY, n).tolist(),
                self.draw.random(n).astype(np.float32).tolist(),
            )
            for n in lengths.tolist()
        ]

    def passes(self, model: Model, *, backward: bool = True) -> Call:
        kind, documents = ("forward_backward" if backward else "forward"), self._documents()
        numbered = model.numbered()
        if model.named:
            return Call(kind, model.name, kind, in_json(numbered, documents, kind))
        content = in_protobuf(numbered, documents, kind)
        return Call(kind, model.name, kind, content, self._chance())

    def step(self, model: Model) -> Call:
        rate = float(self.draw.choice([1e-2, 3e-3]))
        if model.named:
            body = model.numbered(learning_rate=rate, gradient_clip=1.0)
        else:
            body = model.numbered(adam_params={"learning_rate": rate, "eps": 1e-12})
        return Call("optim_step", model.name, "optim_step", body)

    def abort(self, model: Model) -> Call:
        kind = "abort_gradient_epoch"
        return Call(kind, model.name, kind, model.numbered())

    # ---- files and samplers

    def save(self, model: Model) -> Call:
        body = model.numbered()
        body["path"] = f"at-{body['seq_id']}"
        scheme = "xorl" if model.named else "tinker"
        self._later.append((model.saved, f"{scheme}://{model.name}/weights/{body['path']}"))
        return Call("save_weights", model.name, "save_weights", body)

    def save_for_sampler(self, model: Model) -> Call:
        kind, body = "save_weights_for_sampler", model.numbered()
        if model.named or (self.samplers and self._chance()):
            body["name" if model.named else "path"] = f"for-{body['seq_id']}"
        else:
            number = next(self._samplers)
            body["sampling_session_seq_id"] = number
            self._later.append((self.samplers, f"{self.session}:sample:{number}"))
        return Call(kind, model.name, kind, body)

    def load(self, model: Model) -> Call:
        path = str(self.draw.choice(model.saved))
        body = model.numbered(path=path, optimizer=self._chance())
        return Call("load_weights", model.name, "load_weights", body)

    def sample(self) -> Call:
        name = self.samplers[-1]
        prompt = self.draw.integers(0, VOCABULARY, self.draw.integers(*LENGTHS)).tolist()
        body = {
            "sampling_session_id": name,
            "seq_id": next(self._sample),
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": {"max_tokens": 1, "seed": int(self.draw.integers(1000))},
            "prompt_logprobs": True,
            "num_samples": 2,
        }
        return Call("sample", name, "asample", body, self._chance())


def waves(every: Sequence[Place], seed: Sequence[int], session: str, base: str) -> Iterator[Wave]:
    """Requests around each of these places, in order, between an opening and a closing."""
    traffic = Traffic(seed, session, base)
    (one, first), (other, second) = (traffic.create(named=named) for named in (False, True))
    opening = [first, second]
    for model in (one, other):
        opening += [traffic.passes(model), traffic.step(model), traffic.save(model)]
    yield Wave(-1, None, [*opening, traffic.save_for_sampler(one)])
    for number, place in enumerate(every):
        models = (one, other) if traffic.draw.random() < 0.5 else (other, one)
        traffic.over()
        for model, calls in _around(traffic, place.kind, *models, one):
            yield Wave(number, model, calls)
            traffic.over()
    traffic.over()
    closing = [traffic.passes(model, backward=False) for model in (one, other)]
    yield Wave(len(every), None, [*closing, traffic.sample()])


def _around(
    traffic: Traffic, kind: str, model: Model, other: Model, one: Model
) -> Iterator[tuple[str | None, list[Call]]]:
    """The requests of one or two waves, and the model whose request of a kind is the first there.

    one: the model of the first protocol.
    """
    match kind:
        case "forward_backward" | "optim_step":
            calls = [traffic.passes(model), traffic.step(model), traffic.passes(other)]
        case "forward":
            calls = [traffic.passes(other), traffic.passes(model, backward=False)]
        case "abort_gradient_epoch":
            calls = [traffic.passes(model), traffic.abort(model)]
            calls += [traffic.passes(model), traffic.step(model)]
        case "save_weights":
            calls = [traffic.passes(model), traffic.step(model), traffic.save(model)]
        case "save_weights_for_sampler":
            calls = [traffic.passes(model), traffic.step(model), traffic.save_for_sampler(model)]
        case "load_weights" | "checkpoint":  # which follows it
            calls = [traffic.passes(other), traffic.load(model)]
            calls += [traffic.passes(model), traffic.step(model)]
        case "sample":
            calls = [traffic.passes(model), traffic.sample(), traffic.step(model)]
            yield traffic.samplers[-1], calls
            return
        case _:
            yield from _briefly(traffic, kind, one, other if model is one else model)
            return
    yield model.name, calls


def _briefly(
    traffic: Traffic, kind: str, one: Model, other: Model
) -> Iterator[tuple[str | None, list[Call]]]:
    """A model that is created, trained and unloaded."""
    if kind == "create_from":
        made, call = traffic.create_from(one)
    else:
        made, call = traffic.create(named=bool(traffic.draw.random() < 0.5))
    ends = kind == "unload_model"
    calls = [call, traffic.passes(made), traffic.step(made)]
    yield None if ends else made.name, calls
    calls = [traffic.passes(made), traffic.unload(made), traffic.passes(other)]
    yield made.name if ends else None, calls
