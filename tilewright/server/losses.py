"""The losses of the wire, by name: what a datum must have, options, and the trainer's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tilewright.ops.loss import policy
from tilewright.ops.loss.documents import Documents as OfTokens
from tilewright.server.datums import Data, check_targets, twice
from tilewright.server.refused import Refused
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.data.columns.column import COLUMNS, Column
from tilewright.trainer.data.columns.targets import target_columns
from tilewright.trainer.losses.loss import Loss
from tilewright.trainer.losses.policies import COLUMNS as OF_TENSORS
from tilewright.trainer.losses.policies import settled
from tilewright.trainer.losses.policy_fields import Policy
from tilewright.trainer.losses.weighted import (
    TARGET_WEIGHTS,
    TARGETS,
    weighted_language_modeling,
    weighted_targets,
)

TARGET, WEIGHTS = "target_tokens", "weights"
Documents = list[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]


@dataclass(frozen=True)
class Made:
    """A loss and the documents that it is computed of, as `collate` takes them, aligned.

    each: log-probabilities of targets [tokens] or [tokens, k] -> what each adds to the loss.
    """

    loss: Loss
    columns: dict[str, Column]
    documents: Documents
    each: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class WireLoss:
    """A row of LOSSES.

    formula: of a policy loss, by its name in `ops.loss.policy`; None: cross-entropy.
    options: names on the wire -> the formula's options; None for one that changes nothing.
    near_one: options that are a distance from 1 on the wire, and the ratio itself here.
    """

    formula: str | None = None
    options: Mapping[str, str | None] = field(default_factory=dict)
    near_one: Mapping[str, int] = field(default_factory=dict)


def _same(formula: str) -> WireLoss:
    """A row whose options have the formula's names."""
    return WireLoss(formula, {name: name for name in policy.FORMULAS[formula].reads})


# What clients of the JSON dialect send with every loss.
_UNREAD: dict[str, str | None] = {"num_chunks": None, "return_per_token": None}
LOSSES = {
    "cross_entropy": WireLoss(),
    "causallm_loss": WireLoss(options=_UNREAD),
    **{name: _same(name) for name in ("importance_sampling", "ppo", "cispo", "dro", "gspo")},
    "policy_loss": WireLoss(
        "policy_loss",
        {
            "eps_clip": "clip_low_threshold",
            "eps_clip_high": "clip_high_threshold",
            "eps_clip_c": "dual_clip",
            **{n: n for n in ("use_tis", "tis_clip_low", "tis_clip_high", "icepop_beta")},
            "compute_kl_stats": None,  # they are reported in any case
            **_UNREAD,
        },
        {"eps_clip": -1, "eps_clip_high": 1},
    ),
    "drgrpo": WireLoss(
        "dr_grpo",
        {
            "clip_low": "clip_low_threshold",
            "clip_high": "clip_high_threshold",
            **{n: n for n in ("beta", "kl_type", "ratio_type")},
            **_UNREAD,
        },
        {"clip_low": -1, "clip_high": 1},
    ),
    "opd_loss": WireLoss("opd", _UNREAD),
}
# Inputs of data -> tensors of formulas.
TENSORS = {
    "logprobs": "old_logprob",
    "advantages": "advantage",
    "rollout_logprobs": "rollout_logprob",
    "ref_logprobs": "ref_logprob",
    "teacher_logprobs": "teacher_logprob",
}


def _settings(row: WireLoss, options: Mapping[str, Any]) -> dict[str, Any]:
    """The formula's options of those on the wire."""
    settings = {}
    for name, value in options.items():
        if (own := row.options[name]) is not None and value is not None:
            settings[own] = 1.0 + row.near_one[name] * value if name in row.near_one else value
    return settings


def make(name: str, options: Mapping[str, Any], data: Data) -> Made:
    """The loss of a request. Raises Refused for options that do not fit."""
    row = LOSSES[name]
    if row.formula is None:
        return _cross_entropy(data)
    try:
        section = Policy.model_validate({"loss": row.formula, **_settings(row, options)})
        loss = settled(section)
        given = section.model_dump(include={*policy.FORMULAS[row.formula].reads})
        formula = policy.FORMULAS[row.formula](**{n: v for n, v in given.items() if v is not None})
    except (TypeError, ValueError) as error:
        raise Refused(400, f"loss_fn_config: {error}") from error
    tensors = {t: data.inputs[n] for n, t in TENSORS.items() if n in data.inputs}
    columns = {OF_TENSORS[t]: array for t, array in tensors.items()}

    # A weight of 0 is a token that is not learned from.
    valid = data.inputs.get(WEIGHTS, np.ones(len(data.tokens), np.float32))

    def each(logprobs: np.ndarray) -> np.ndarray:
        documents = OfTokens.of(torch.from_numpy(data.starts), len(logprobs))
        tokens = policy.Tokens(
            torch.from_numpy(logprobs).double(),
            torch.from_numpy(valid).double(),
            **{t: torch.from_numpy(array).double() for t, array in tensors.items()},
            documents=documents,
        )
        return policy.losses(formula, tokens).float().numpy()

    labels = np.where(valid == 0, IGNORE, data.inputs[TARGET])
    documents = _split(data, columns, labels)
    return Made(loss, {name: COLUMNS[name] for name in columns}, documents, each)


def _split(data: Data, columns: Mapping[str, np.ndarray], labels: np.ndarray) -> Documents:
    """By document."""
    cuts = data.starts[1:-1]
    rows = zip(np.split(data.tokens, cuts), np.split(labels, cuts), strict=True)
    further = {name: np.split(array, cuts) for name, array in columns.items()}
    return [
        (ids, own, {name: parts[i] for name, parts in further.items()})
        for i, (ids, own) in enumerate(rows)
    ]


def _cross_entropy(data: Data) -> Made:
    targets, weights = data.inputs[TARGET], data.inputs[WEIGHTS]

    def each(logprobs: np.ndarray) -> np.ndarray:
        return -weights * logprobs

    if targets.ndim == 1:
        documents = _split(data, {"weight": weights}, targets)
        columns = {"weight": COLUMNS["weight"]}
        return Made(Loss(weighted_language_modeling), columns, documents, each)
    labels = np.full(len(data.tokens), IGNORE)
    documents = _split(data, {TARGETS: targets, TARGET_WEIGHTS: weights}, labels)
    return Made(Loss(weighted_targets), target_columns(targets.shape[1]), documents, each)


def needed(name: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The inputs that each datum must have."""
    row = LOSSES[name]
    if row.formula is None:
        return (TARGET,)
    given = _settings(row, options)
    reads = policy.FORMULAS[row.formula](**given).needed
    return (TARGET, *(n for n, tensor in TENSORS.items() if tensor in reads))


def checked(name: str, options: Mapping[str, Any], data: Data, vocabulary: int) -> Data:
    """The data with what stands for inputs that were left out.

    Raises Refused for a loss, an option, an input or a target that is not accepted.
    """
    if name not in LOSSES:
        raise Refused(400, f"loss_fn is {name!r}; accepted are {', '.join(LOSSES)}")
    row = LOSSES[name]
    if unknown := sorted({*options} - {*row.options}):
        accepted = ", ".join(n for n, own in row.options.items() if own) or "none"
        raise Refused(400, f"loss_fn_config has {unknown[0]!r}; {name} takes {accepted}")
    try:
        wanted = needed(name, options)
    except (TypeError, ValueError) as error:
        raise Refused(400, f"loss_fn_config: {error}") from error
    if missing := [n for n in wanted if n not in data.inputs]:
        raise Refused(400, f"loss_fn_inputs has no {missing[0]!r}, which {name} reads")
    if unread := sorted({*data.inputs} - {*wanted, WEIGHTS}):
        accepted = ", ".join((*wanted, WEIGHTS))
        raise Refused(400, f"loss_fn_inputs has {unread[0]!r}; {name} reads {accepted}")
    targets = data.inputs[TARGET]
    if targets.dtype.kind != "i":
        raise Refused(422, f"{TARGET} holds fractions; accepted are integers")
    inputs = dict(data.inputs)
    if row.formula is None:
        inputs.setdefault(WEIGHTS, np.ones(targets.shape, np.float32))
    elif WEIGHTS in inputs and not np.isin(inputs[WEIGHTS], (0, 1)).all():
        raise Refused(400, f"{WEIGHTS}: {name} takes 0, for a token that is left out, and 1")
    for n, array in inputs.items():
        if array.shape != targets.shape:
            raise Refused(
                422, f"{n} has {array.shape[1:]} a token, and {TARGET} {targets.shape[1:]}"
            )
        if n != TARGET:
            inputs[n] = array.astype(np.float32)
    if targets.ndim == 2 and row.formula is not None:
        raise Refused(422, f"{TARGET} has several a token; {name} takes one")
    check_targets(TARGET, targets, vocabulary, data.starts)
    if targets.ndim == 2:
        wrong = twice(targets)
        if wrong.any():
            at = int(wrong.argmax())
            raise Refused(400, f"{TARGET} of token {at} of the request has one twice")
    whole = data._replace(inputs=inputs)
    make(name, options, whole)  # options that do not go together
    return whole
