"""Columns with numbers per token."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tilewright.trainer.data.columns.column import Column
from tilewright.trainer.data.routes import Routes
from tilewright.trainer.tables import COLUMNS

if TYPE_CHECKING:
    pass


def recorded(routes: Routes) -> Column:
    """routed_experts as a model reads them."""
    own = {"width": routes.width, "reader": routes.read, "checker": routes.check}
    return dataclasses.replace(ROUTED_EXPERTS, **own, depends=dataclasses.asdict(routes))


# Experts are below 4,096; -1 is a token without a record.
ROUTED_EXPERTS = Column(
    "token", "int16", fill=-1, of_model=lambda shape: recorded(Routes.of(shape))
)

COLUMNS.add("routed_experts", ROUTED_EXPERTS)
COLUMNS.add("weight", Column("token", "float32", default=1.0, target=True, least=0.0))
COLUMNS.add("advantage", Column("token", "float32", target=True))
# Log-probabilities, in nats: under the policy before the update, under the sampler if its numbers
# are others, under a teacher, and under a reference model.
COLUMNS.add("old_logprob", Column("token", "float32", target=True, most=0.0))
COLUMNS.add("rollout_logprob", Column("token", "float32", target=True, most=0.0))
COLUMNS.add("teacher_logprob", Column("token", "float32", target=True, most=0.0))
COLUMNS.add("reference_logprob", Column("token", "float32", target=True, most=0.0))
