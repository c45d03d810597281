"""Reward models of pairs of answers, of which one is preferred: train.loss = reward.

Bradley-Terry: -log sigmoid(r_chosen - r_rejected - margin) (arXiv:2203.02155, equation 1; the
margin: arXiv:2307.09288, equation 2). A document's reward is the head's, see `Scores`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from tilewright.trainer.losses.loss import LOSSES, Loss
from tilewright.trainer.losses.preferences import CHOSEN
from tilewright.trainer.losses.reward_fields import Reward
from tilewright.trainer.models.reward_head import Scores

REPORTS = ("reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected")
PARTS = ("preference_loss", "center_loss")  # before their factors


def reward(
    scores: Scores, batch: Mapping[str, Any], *, center_rewards_coefficient: float
) -> tuple[torch.Tensor, ...]:
    """The sum over pairs, their number, REPORTS, and with a coefficient PARTS. Each of the ranks
    that share a sequence has its share of them.
    """
    rewards, is_pair = scores.rewards(batch), batch["role"] == CHOSEN
    # A chosen answer's rejected one is the document after it.
    chosen, rejected = rewards, rewards.roll(-1)
    parts = [-logsigmoid(chosen - rejected - batch["margin"].double())]
    loss = parts[0]
    if center_rewards_coefficient:
        parts.append((chosen + rejected).square())
        loss = loss + center_rewards_coefficient * parts[1]
    terms = [loss, torch.ones_like(loss)]
    with torch.no_grad():
        terms += [(chosen > rejected).double(), chosen - rejected, chosen, rejected]
        if center_rewards_coefficient:
            terms += [part.detach() for part in parts]
    return tuple(scores.share * t.where(is_pair, 0.0).sum() for t in terms)


def settled(section: Reward) -> Loss:
    function = functools.partial(
        reward, center_rewards_coefficient=section.center_rewards_coefficient
    )
    columns = ("labels", "pair", "role", "margin")
    reports = (*REPORTS, *PARTS * bool(section.center_rewards_coefficient))
    return Loss(function, columns, reports, pairs=True, head="reward", section="reward")


LOSSES.add("reward", dataclasses.replace(settled(Reward()), settled=settled))
