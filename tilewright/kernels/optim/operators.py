"""The operator of AdamW: what every implementation's launchers take."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewright.core.library import declare


class Step(NamedTuple):
    """The numbers of a step; step: its own, from 1, or a tensor [] of it on the params' device.
    clip: what multiplies gradients, a tensor [] there, or None.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: torch.Tensor | float
    clip: torch.Tensor | None

    def corrected(self) -> tuple[Any, Any]:
        """lr / (1 - beta1^step) and (1 - beta2^step)^-1/2, in double precision; tensors if the step
        is one.
        """
        step = self.step.double() if isinstance(self.step, torch.Tensor) else self.step
        return self.lr / (1 - self.beta1**step), (1 - self.beta2**step) ** -0.5


@declare
def update(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    compensations: list[torch.Tensor],
    copies: list[torch.Tensor],
    places: torch.Tensor | None,
    seed: int,
    numbers: Step,
) -> None:
    """Contiguous tensors; there may be no compensations and no copies.

    places, seed: of stochastic rounding, see `StochasticRounding`.   places: int64 [tensors, 4], or
    None without it.
    """
