"""Columns with numbers per token."""

from __future__ import annotations

import dataclasses

import numpy as np

from tilewright.trainer.data.columns.column import COLUMNS, Column
from tilewright.trainer.data.routes import Routes
from tilewright.trainer.models.model_config import ModelConfig


def recorded(routes: Routes) -> Column:
    """routed_experts as a model reads them."""
    own = {"width": routes.width, "reader": routes.read, "checker": routes.check}
    return dataclasses.replace(ROUTED_EXPERTS, **own, depends=dataclasses.asdict(routes))


# Experts are below 4,096; -1 is a token without a record. It says how a model computes, not what is
# learned, and a run may leave it: `train.router_replay`.
ROUTED_EXPERTS = Column(
    "token",
    "int16",
    fill=-1,
    of_model=lambda shape: recorded(Routes.of(shape)),
    part="routes",
)

COLUMNS.add("routed_experts", ROUTED_EXPERTS)
COLUMNS.add(
    "weight", Column("token", "float32", instructs=True, default=1.0, target=True, least=0.0)
)
COLUMNS.add("advantage", Column("token", "float32", instructs=True, target=True))
# Log-probabilities, in nats: under the policy before the update, under the sampler if its numbers
# are others, under a teacher, and under a reference model.
COLUMNS.add("old_logprob", Column("token", "float32", instructs=True, target=True, most=0.0))
COLUMNS.add("rollout_logprob", Column("token", "float32", instructs=True, target=True, most=0.0))
COLUMNS.add(
    "teacher_logprob",
    Column("token", "float32", instructs=True, target=True, most=0.0, part="teacher"),
)
COLUMNS.add(
    "reference_logprob",
    Column("token", "float32", instructs=True, target=True, most=0.0, part="reference"),
)


def _twice(ids: np.ndarray) -> tuple[np.ndarray, str]:
    ordered = np.sort(ids, -1)
    return ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1), "an id is twice"


def _too_probable(logprobs: np.ndarray) -> tuple[np.ndarray, str]:
    # 0 stands where there is no entry. Rounded to bfloat16, they may sum to a little more than 1.
    wide = logprobs.astype(np.float64)
    mass = np.exp(wide, where=wide < 0, out=np.zeros_like(wide)).sum(-1)
    return mass > 1.01, "these log-probabilities are of probabilities whose sum is above 1"


def _in_vocabulary(shape: ModelConfig) -> Column:
    return dataclasses.replace(TEACHER_IDS, most=shape.vocab_size - 1)


# A teacher's most probable tokens, in any order, and their log-probabilities. -1 is no token.
TEACHER_IDS = Column(
    "token",
    "int32",
    fill=-1,
    instructs=True,
    target=True,
    least=-1,
    among=_twice,
    of_model=_in_vocabulary,
    part="teacher",
)
COLUMNS.add("teacher_ids", TEACHER_IDS)
COLUMNS.add(
    "teacher_logprobs",
    Column(
        "token",
        "float32",
        instructs=True,
        target=True,
        most=0.0,
        among=_too_probable,
        part="teacher",
    ),
)
