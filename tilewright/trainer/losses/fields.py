"""What every loss reads of a configuration."""

from __future__ import annotations

from typing import Annotated, Any

from tilewright.trainer.losses.loss import LOSSES
from tilewright.trainer.optim.per_step import Number
from tilewright.trainer.options import with_options, wrong_options
from tilewright.trainer.section import Only, Refuse, Resume, RowOf, Section, field


def _wrong_loss(config: Any) -> str | None:
    row = LOSSES[config.train.loss]
    return wrong_options(row.options, config.train.loss_args, "loss")


def _unshaped(field: str, neutral: float) -> Refuse:
    return Refuse("a preference is one of log-probabilities as they are", "loss").when(
        lambda c: c.train.loss == "preference" and getattr(c.train, field) != neutral
    )


def scored(config: Any) -> bool:
    """Whether the model is a reward model."""
    return LOSSES[config.train.loss].head == "reward"


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
        {},
        Resume.NEXT_STEP,
        Only("loss", table=lambda: with_options(LOSSES)),
        Refuse(_wrong_loss, "loss").when(_wrong_loss),
    )
    """Options of the loss that have no section here."""
    loss_temperature: Number = field(
        1.0,
        Resume.NEXT_STEP,
        _unshaped("loss_temperature", 1.0),
        Refuse("a distillation's is distillation.temperature", "loss").when(
            lambda c: c.train.loss_temperature != 1.0 and c.train.loss == "distillation"
        ),
        Refuse(NO_TOKENS, "loss").when(lambda c: c.train.loss_temperature != 1.0 and scored(c)),
        gt=0,
    )
    """Divides the logits of losses in training, and of a policy's in evaluations too; or a mapping,
    as weight_decay.
    """
    z_loss: Number = field(
        0.0,
        Resume.NEXT_STEP,
        _unshaped("z_loss", 0.0),
        Refuse("this loss is one of log-probabilities as they are", "loss").when(
            lambda c: c.train.z_loss != 0.0 and c.train.loss in ("policy", "distillation")
        ),
        Refuse(NO_TOKENS, "loss").when(lambda c: c.train.z_loss != 0.0 and scored(c)),
        ge=0,
    )
    """The squared log-sum-exp of a token's logits times this is added to its loss in training, and
    reported with it; or a mapping, as weight_decay.
    """
