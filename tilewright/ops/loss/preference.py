"""Preference losses, a line each. p: a pair's log-probabilities, see `Pairs`, or those of answers
that are not paired, see `Answers`; o: the options.

Sources: sigmoid, Rafailov et al. (arXiv:2305.18290), with label smoothing Mitchell's note of 2023;
robust, arXiv:2403.00409; hinge, arXiv:2305.10425; ipo, arXiv:2310.12036; exo_pair,
arXiv:2402.00856; nca_pair, arXiv:2402.05369; bco_pair,
arXiv:2404.04656 without its shift of rewards; sppo_hard, arXiv:2405.00675; apo_zero and apo_down,
arXiv:2408.06266; dpop, arXiv:2402.13228; simpo, arXiv:2405.14734; orpo, arXiv:2403.07691,
which adds the likelihood of the chosen answer (sft_ratio: 1); sigmoid_norm, TRL's of that name;
kto, arXiv:2402.01306; kto_pair, TRL's of that name before 0.9, the sum over a pair;
apo_zero_unpaired, TRL's of that name; the offset of sigmoid, arXiv:2402.10571.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid

SMOOTHED = ("beta", "label_smoothing")
LEAST = 1e-3  # exo's label smoothing where it is 0: the logarithm of 0 is infinite


class Options(NamedTuple):
    """The options of formulas, as in the section preference."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    dpop_lambda: float = 50.0
    offset_alpha: float = 0.0
    kto_desirable_weight: float = 1.0
    kto_undesirable_weight: float = 1.0


class Pairs(NamedTuple):
    """Log-probabilities of the answers of pairs, in nats, float64 tensors of one shape.

    chosen, rejected: sums over an answer's tokens under the policy.   ref_chosen, ref_rejected:
    under the reference, if there is one.   chosen_tokens,
    rejected_tokens: their numbers, at least 1.
    gap: by how much the chosen answer's score is greater, at least 0.   kl_chosen, kl_rejected:
    [], mean log-ratios to the reference over many pairs, at least 0, detached.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    ref_chosen: torch.Tensor
    ref_rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    gap: torch.Tensor | None = None
    kl_chosen: torch.Tensor | float = 0.0
    kl_rejected: torch.Tensor | float = 0.0

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


class Answers(NamedTuple):
    """Log-probabilities of answers that are not paired, as those of `Pairs`.

    desirable: bool.   kl: [], the mean log-ratio to the reference of answers to other prompts, at
    least 0, detached.
    """

    answer: torch.Tensor
    reference: torch.Tensor
    tokens: torch.Tensor
    desirable: torch.Tensor
    kl: torch.Tensor | float = 0.0

    @property
    def ratio(self) -> torch.Tensor:
        return self.answer - self.reference


@dataclass(frozen=True)
class Formula:
    """A row of FORMULAS.

    function: (pairs, options) -> the loss of each, differentiable in chosen and rejected; or
        (answers, options), differentiable in answer.
    reads: the options that it depends on.
    reference: whether it depends on the reference.
    kl: whether it depends on mean log-ratios: kl_chosen and kl_rejected, or kl.
    paired: whether it is of `Pairs`, and not of `Answers`.
    """

    function: Callable[[Any, Options], torch.Tensor]
    reads: tuple[str, ...] = ("beta",)
    reference: bool = True
    kl: bool = False
    paired: bool = True

    def __post_init__(self) -> None:
        if unknown := {*self.reads} - {*Options._fields}:
            raise ValueError(f"reads: {min(unknown)!r} is none of {', '.join(Options._fields)}")


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x <= 0, to the last digits on both sides of -ln 2; x = 0 as -1e-30."""
    x = x.clamp_max(-1e-30)
    near = x > -math.log(2)
    # Each branch gets a value that it can differentiate.
    close = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    return torch.where(near, close, torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


def offset(p: Pairs, o: Options) -> torch.Tensor | float:
    return o.offset_alpha * torch.log(p.gap + 1e-6) if p.gap is not None else 0.0


def sigmoid(p: Pairs, o: Options) -> torch.Tensor:
    z, e = o.beta * p.margin - offset(p, o), o.label_smoothing
    return -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)


def robust(p: Pairs, o: Options) -> torch.Tensor:
    z, e = o.beta * p.margin, o.label_smoothing
    return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)


def sigmoid_norm(p: Pairs, o: Options) -> torch.Tensor:
    return sigmoid(p.means._replace(gap=None), o)


def hinge(p: Pairs, o: Options) -> torch.Tensor:
    return torch.relu(1 - o.beta * p.margin)


def ipo(p: Pairs, o: Options) -> torch.Tensor:
    return (p.means.margin - 1 / (2 * o.beta)).square()


def exo_pair(p: Pairs, o: Options) -> torch.Tensor:
    z, e = o.beta * p.margin, o.label_smoothing or LEAST
    right = torch.sigmoid(z) * (logsigmoid(z) - math.log1p(-e))
    return right + torch.sigmoid(-z) * (logsigmoid(-z) - math.log(e))


def nca_pair(p: Pairs, o: Options) -> torch.Tensor:
    up, down = o.beta * p.up, o.beta * p.down
    return -logsigmoid(up) - 0.5 * logsigmoid(-up) - 0.5 * logsigmoid(-down)


def bco_pair(p: Pairs, o: Options) -> torch.Tensor:
    return -logsigmoid(o.beta * p.up) - logsigmoid(-o.beta * p.down)


def sppo_hard(p: Pairs, o: Options) -> torch.Tensor:
    half = 1 / (2 * o.beta)
    return (p.up - half).square() + (p.down + half).square()


def apo_zero(p: Pairs, o: Options) -> torch.Tensor:
    return torch.sigmoid(-o.beta * p.up) + torch.sigmoid(o.beta * p.down)


def apo_down(p: Pairs, o: Options) -> torch.Tensor:
    return torch.sigmoid(o.beta * p.up) + torch.sigmoid(-o.beta * p.margin)


def dpop(p: Pairs, o: Options) -> torch.Tensor:
    return -logsigmoid(o.beta * (p.margin - o.dpop_lambda * torch.relu(-p.up)))


def simpo(p: Pairs, o: Options) -> torch.Tensor:
    mean = p.means
    return -logsigmoid(o.beta * (mean.chosen - mean.rejected) - o.simpo_gamma)


def orpo(p: Pairs, o: Options) -> torch.Tensor:
    c, r = p.means.chosen, p.means.rejected
    return -o.beta * logsigmoid(c - r - (log1mexp(c) - log1mexp(r)))


def kto_pair(p: Pairs, o: Options) -> torch.Tensor:
    up, down = p.up - p.kl_rejected, p.kl_chosen - p.down
    return torch.sigmoid(-o.beta * up) + torch.sigmoid(-o.beta * down)


def kto(p: Answers, o: Options) -> torch.Tensor:
    z = o.beta * (p.ratio - p.kl)
    good, bad = o.kto_desirable_weight * torch.sigmoid(-z), o.kto_undesirable_weight * z.sigmoid()
    return torch.where(p.desirable, good, bad)


def apo_zero_unpaired(p: Answers, o: Options) -> torch.Tensor:
    return kto(p._replace(kl=0.0), o)


WEIGHTS = ("kto_desirable_weight", "kto_undesirable_weight")
FORMULAS = {
    **{f.__name__: Formula(f) for f in (hinge, ipo, nca_pair, bco_pair, sppo_hard)},
    **{f.__name__: Formula(f) for f in (apo_zero, apo_down)},
    **{f.__name__: Formula(f, SMOOTHED) for f in (robust, sigmoid_norm, exo_pair)},
    "sigmoid": Formula(sigmoid, (*SMOOTHED, "offset_alpha")),
    "dpop": Formula(dpop, ("beta", "dpop_lambda")),
    "simpo": Formula(simpo, ("beta", "simpo_gamma"), reference=False),
    "orpo": Formula(orpo, reference=False),
    "kto_pair": Formula(kto_pair, kl=True),
    "kto": Formula(kto, ("beta", *WEIGHTS), kl=True, paired=False),
    "apo_zero_unpaired": Formula(apo_zero_unpaired, ("beta", *WEIGHTS), paired=False),
}
