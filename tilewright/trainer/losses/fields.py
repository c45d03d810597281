"""What every loss reads of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from tilewright.trainer.losses.loss import LOSSES
from tilewright.trainer.optim.per_step import Number
from tilewright.trainer.options import with_options
from tilewright.trainer.section import Needs, Resume, RowOf, Section, Stated, field


def scored(objective: Objective) -> bool:
    """Whether the model is a reward model."""
    return LOSSES[objective.loss].head == "reward"


NO_TOKENS = "a reward model has one number for each document, and none for tokens"


class Objective(Section):
    """What is minimized."""

    loss: Annotated[str, RowOf(LOSSES)] = field("language_modeling", Resume.OTHER_CONTENTS)
    """What is minimized; language_modeling: the cross-entropy of the labels;
    weighted_language_modeling: with each token's weight, from the column weight; preference: what
    the section preference says; distillation: what the section distillation says; reward: a reward
    model's, of pairs.
    """
    loss_args: dict[str, Any] = field(
        {}, Resume.NEXT_STEP, Needs("loss", lambda: with_options(LOSSES))
    )
    """Options of the loss that have no section here."""
    loss_temperature: Number = field(1.0, Resume.NEXT_STEP, gt=0)
    """Divides the logits of losses in training, and of a policy's in evaluations too; or a mapping,
    as weight_decay.
    """
    z_loss: Number = field(0.0, Resume.NEXT_STEP, ge=0)
    """The squared log-sum-exp of a token's logits times this is added to its loss in training, and
    reported with it; or a mapping, as weight_decay.
    """


def of_objective(objective: Objective) -> Iterator[Stated]:
    """Logits are shaped for losses that read them so."""
    loss = objective.loss
    tempered, pulled = objective.loss_temperature != 1.0, objective.z_loss != 0.0
    for name, given in (("loss_temperature", tempered), ("z_loss", pulled)):
        as_they_are = "a preference is one of log-probabilities as they are"
        yield given and loss == "preference", as_they_are, name, "loss"
        yield given and scored(objective), NO_TOKENS, name, "loss"
    why = "a distillation's is distillation.temperature"
    yield tempered and loss == "distillation", why, "loss_temperature", "loss"
    why = "this loss is one of log-probabilities as they are"
    yield pulled and loss in ("policy", "distillation"), why, "z_loss", "loss"
