"""What a preference loss is: a function of a pair's log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Options(NamedTuple):
    """The options of formulas, as in the section preference."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    dpop_lambda: float = 50.0


class Pairs(NamedTuple):
    """Log-probabilities of the answers of pairs, in nats, float64 tensors of one shape.

    chosen, rejected: sums over an answer's tokens under the policy.   ref_chosen, ref_rejected:
    under the reference; as the policy's, detached, where there is none.   chosen_tokens,
    rejected_tokens: their numbers, at least 1.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    ref_chosen: torch.Tensor
    ref_rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor

    @property
    def up(self) -> torch.Tensor:
        """The log-ratio of the chosen answer to the reference."""
        return self.chosen - self.ref_chosen

    @property
    def down(self) -> torch.Tensor:
        """That of the rejected one."""
        return self.rejected - self.ref_rejected

    @property
    def margin(self) -> torch.Tensor:
        return self.up - self.down

    @property
    def means(self) -> Pairs:
        """Means over tokens for the sums."""
        of_chosen, of_rejected = self.chosen_tokens, self.rejected_tokens
        return self._replace(
            chosen=self.chosen / of_chosen,
            rejected=self.rejected / of_rejected,
            ref_chosen=self.ref_chosen / of_chosen,
            ref_rejected=self.ref_rejected / of_rejected,
        )


@dataclass(frozen=True)
class Formula:
    """A row of PREFERENCES.

    function: (pairs, options) -> the loss of each, differentiable in chosen and rejected.
    reads: the options that it depends on.
    reference: whether it depends on the reference.
    """

    function: Callable[[Pairs, Options], torch.Tensor]
    reads: tuple[str, ...] = ("beta",)
    reference: bool = True

    def __post_init__(self) -> None:
        if unknown := {*self.reads} - {*Options._fields}:
            raise ValueError(f"reads: {min(unknown)!r} is none of {', '.join(Options._fields)}")
