"""The section reward: what train.loss = reward minimizes beside the pairs' order."""

from __future__ import annotations

from tilewright.trainer.section import Needs, Resume, Section, field


class Reward(Section):
    center_rewards_coefficient: float = field(
        0.0, Resume.NEXT_STEP, Needs("train.loss", ["reward"]), ge=0
    )
    """The squared sum of a pair's rewards times this is added to its loss: rewards then lie around
    0 (arXiv:2312.09244); 0.01 in TRL's examples.
    """
