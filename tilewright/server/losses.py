"""The losses of the wire, by name: what a datum must have, options, and the trainer's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.ops.loss.policy import FORMULAS
from tilewright.server.datums import Data, check_targets
from tilewright.server.refused import Refused
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.data.columns.column import COLUMNS, Column
from tilewright.trainer.data.columns.targets import target_columns
from tilewright.trainer.losses.loss import Loss
from tilewright.trainer.losses.policies import settled
from tilewright.trainer.losses.policy_fields import Policy
from tilewright.trainer.losses.weighted import (
    TARGET_WEIGHTS,
    TARGETS,
    weighted_language_modeling,
    weighted_targets,
)

TARGET = "target_tokens"
Documents = list[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]


@dataclass(frozen=True)
class Made:
    """A loss and the documents that it is computed of, as `collate` takes them, aligned."""

    loss: Loss
    columns: dict[str, Column]
    documents: Documents


@dataclass(frozen=True)
class WireLoss:
    """A row of LOSSES.

    inputs: names that each datum must have.   optional: further ones, and what stands for them.
    options: names of the options.   make: (data, options) -> `Made`.
    """

    inputs: tuple[str, ...]
    make: Callable[[Data, Mapping[str, Any]], Made]
    optional: Mapping[str, float] = field(default_factory=dict)
    options: tuple[str, ...] = ()


def _split(data: Data, columns: Mapping[str, np.ndarray], labels: np.ndarray) -> Documents:
    """By document."""
    cuts = data.starts[1:-1]
    rows = zip(np.split(data.tokens, cuts), np.split(labels, cuts), strict=True)
    further = {name: np.split(array, cuts) for name, array in columns.items()}
    return [
        (ids, own, {name: parts[i] for name, parts in further.items()})
        for i, (ids, own) in enumerate(rows)
    ]


def _cross_entropy(data: Data, options: Mapping[str, Any]) -> Made:
    targets, weights = data.inputs[TARGET], data.inputs["weights"]
    if targets.ndim == 1:
        documents = _split(data, {"weight": weights}, targets)
        return Made(Loss(weighted_language_modeling), {"weight": COLUMNS["weight"]}, documents)
    columns = {TARGETS: targets, TARGET_WEIGHTS: weights}
    documents = _split(data, columns, np.full(len(data.tokens), IGNORE))
    return Made(Loss(weighted_targets), target_columns(targets.shape[1]), documents)


# The names of inputs -> the trainer's columns.
OF_POLICIES = {"logprobs": "old_logprob", "advantages": "advantage"}


def _policy(name: str) -> Callable[[Data, Mapping[str, Any]], Made]:
    def make(data: Data, options: Mapping[str, Any]) -> Made:
        try:
            loss = settled(Policy.model_validate({"loss": name, **options}))
        except ValueError as error:
            raise Refused(400, f"loss_fn_config: {error}") from error
        given = {column: data.inputs[own] for own, column in OF_POLICIES.items()}
        columns = {column: COLUMNS[column] for column in given}
        return Made(loss, columns, _split(data, given, data.inputs[TARGET]))

    return make


LOSSES = {
    "cross_entropy": WireLoss((TARGET,), _cross_entropy, {"weights": 1.0}),
    **{
        name: WireLoss((TARGET, *OF_POLICIES), _policy(name), options=FORMULAS[name].reads)
        for name in ("importance_sampling", "ppo", "cispo", "dro", "gspo")
    },
}


def checked(name: str, options: Mapping[str, Any], data: Data, vocabulary: int) -> Data:
    """The data with what stands for inputs that were left out.

    Raises Refused for a loss, an option, an input or a target that is not accepted.
    """
    if name not in LOSSES:
        raise Refused(400, f"loss_fn is {name!r}; accepted are {', '.join(LOSSES)}")
    row = LOSSES[name]
    if unknown := sorted({*options} - {*row.options}):
        accepted = ", ".join(row.options) or "none"
        raise Refused(400, f"loss_fn_config has {unknown[0]!r}; {name} takes {accepted}")
    if missing := [n for n in row.inputs if n not in data.inputs]:
        raise Refused(400, f"loss_fn_inputs has no {missing[0]!r}, which {name} reads")
    if unread := sorted({*data.inputs} - {*row.inputs, *row.optional}):
        accepted = ", ".join((*row.inputs, *row.optional))
        raise Refused(400, f"loss_fn_inputs has {unread[0]!r}; {name} reads {accepted}")
    targets = data.inputs[TARGET]
    if targets.dtype.kind != "i":
        raise Refused(422, f"{TARGET} holds fractions; accepted are integers")
    inputs = dict(data.inputs)
    for n, value in row.optional.items():
        inputs.setdefault(n, np.full(targets.shape, value, np.float32))
    for n, array in inputs.items():
        if array.shape != targets.shape:
            raise Refused(
                422, f"{n} has {array.shape[1:]} a token, and {TARGET} {targets.shape[1:]}"
            )
        if n != TARGET:
            inputs[n] = array.astype(np.float32)
    if targets.ndim == 2 and name != "cross_entropy":
        raise Refused(422, f"{TARGET} has several a token; {name} takes one")
    check_targets(TARGET, targets, vocabulary, data.starts)
    if targets.ndim == 2:
        ordered = np.sort(targets, -1)
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1)
        if twice.any():
            raise Refused(
                400, f"{TARGET} of token {int(twice.argmax())} of the request has one twice"
            )
    made = data._replace(inputs=inputs)
    row.make(made, options)  # options that do not go together
    return made
