"""Preference losses. A formula is a class, whose fields are its options. p: a pair's
log-probabilities, see `Pairs`, or those of answers that are not paired, see `Answers`.

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
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import torch
from torch.nn.functional import logsigmoid

from tilewright.core.takes import takes

LEAST = 1e-3  # exo's label smoothing where it is 0: the logarithm of 0 is infinite


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
        """The log-ratio of the rejected answer to the reference."""
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


OPTIONS = (
    "beta",
    "label_smoothing",
    "simpo_gamma",
    "dpop_lambda",
    "offset_alpha",
    "kto_desirable_weight",
    "kto_undesirable_weight",
)


@takes(
    beta="number (0, inf)",
    label_smoothing="number [0, 0.5)",
    **dict.fromkeys(OPTIONS[2:], "number [0, inf)"),
)
def checked(
    beta: float = 1.0,
    label_smoothing: float = 0.0,
    simpo_gamma: float = 0.0,
    dpop_lambda: float = 0.0,
    offset_alpha: float = 0.0,
    kto_desirable_weight: float = 0.0,
    kto_undesirable_weight: float = 0.0,
) -> None:
    """Raises TypeError or ValueError for options, of any formula here, out of their ranges."""


class _Fields:
    """The names of a dataclass's fields, as an attribute of the class."""

    def __get__(self, _: Any, of: Any) -> tuple[str, ...]:
        return tuple(f.name for f in fields(of)) if is_dataclass(of) else ()


@dataclass(frozen=True)
class Formula:
    """A preference loss, whose options are its fields. Called with `Pairs`, or with `Answers` where
    not `paired`, it gives the loss of each, differentiable in the policy's log-probabilities. A
    formula is a dataclass that is frozen.

    name: the name of its row of FORMULAS.   reads: the options.
    reference: whether it depends on the reference.
    kl: whether it depends on mean log-ratios: kl_chosen and kl_rejected, or kl.
    """

    name: ClassVar[str] = ""
    reads: ClassVar[Any] = _Fields()
    reference: ClassVar[bool] = True
    kl: ClassVar[bool] = False
    paired: ClassVar[bool] = True

    beta: float = 0.1

    def __post_init__(self) -> None:
        checked(**{n: getattr(self, n) for n in self.reads if n in OPTIONS})

    def __call__(self, p: Any) -> torch.Tensor:
        raise NotImplementedError


Class = TypeVar("Class", bound=type[Formula])
FORMULAS: dict[str, type[Formula]] = {}


@dataclass_transform(frozen_default=True)
def formula(name: str) -> Callable[[Class], Class]:
    """A decorator that makes a class a formula, and a row of FORMULAS."""

    def decorate(cls: Class) -> Class:
        made = dataclass(frozen=True)(cls)
        made.name = name
        FORMULAS[name] = made
        return made

    return decorate


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x <= 0, to the last digits on both sides of -ln 2; x = 0 as -1e-30."""
    x = x.clamp_max(-1e-30)
    near = x > -math.log(2)
    # Each branch gets a value that it can differentiate.
    close = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    return torch.where(near, close, torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


@dataclass(frozen=True)
class Smoothed(Formula):
    label_smoothing: float = 0.0

    def both(self, z: torch.Tensor) -> torch.Tensor:
        e = self.label_smoothing
        return -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)


@formula("sigmoid")
class DPO(Smoothed):
    """-log sigmoid(z), z = beta (up - down), smoothed; less an offset by the gap of scores."""

    offset_alpha: float = 0.0

    def __call__(self, p: Pairs) -> torch.Tensor:
        offset = self.offset_alpha * torch.log(p.gap + 1e-6) if p.gap is not None else 0.0
        return self.both(self.beta * p.margin - offset)


@formula("robust")
class RobustDPO(Smoothed):
    """DPO with labels that are wrong at the rate label_smoothing, unbiased."""

    def __call__(self, p: Pairs) -> torch.Tensor:
        z, e = self.beta * p.margin, self.label_smoothing
        return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)


@formula("sigmoid_norm")
class NormalizedDPO(Smoothed):
    """DPO on mean log-probabilities per token."""

    def __call__(self, p: Pairs) -> torch.Tensor:
        return self.both(self.beta * p.means.margin)


@formula("hinge")
class Hinge(Formula):
    """max(0, 1 - beta (up - down))"""

    def __call__(self, p: Pairs) -> torch.Tensor:
        return torch.relu(1 - self.beta * p.margin)


@formula("ipo")
class IPO(Formula):
    """(up - down - 1 / (2 beta))^2 on mean log-probabilities per token."""

    def __call__(self, p: Pairs) -> torch.Tensor:
        return (p.means.margin - 1 / (2 * self.beta)).square()


@formula("exo_pair")
class EXO(Smoothed):
    """The reverse KL to the smoothed preference."""

    def __call__(self, p: Pairs) -> torch.Tensor:
        z, e = self.beta * p.margin, self.label_smoothing or LEAST
        right = torch.sigmoid(z) * (logsigmoid(z) - math.log1p(-e))
        return right + torch.sigmoid(-z) * (logsigmoid(-z) - math.log(e))


@formula("nca_pair")
class NCA(Formula):
    """-log sigmoid(u) - log sigmoid(-u) / 2 - log sigmoid(-d) / 2, u = beta up, d = beta down."""

    def __call__(self, p: Pairs) -> torch.Tensor:
        up, down = self.beta * p.up, self.beta * p.down
        return -logsigmoid(up) - 0.5 * logsigmoid(-up) - 0.5 * logsigmoid(-down)


@formula("bco_pair")
class BCO(Formula):
    """-log sigmoid(beta up) - log sigmoid(-beta down)"""

    def __call__(self, p: Pairs) -> torch.Tensor:
        return -logsigmoid(self.beta * p.up) - logsigmoid(-self.beta * p.down)


@formula("sppo_hard")
class SPPO(Formula):
    """(up - 1 / (2 beta))^2 + (down + 1 / (2 beta))^2"""

    def __call__(self, p: Pairs) -> torch.Tensor:
        half = 1 / (2 * self.beta)
        return (p.up - half).square() + (p.down + half).square()


@formula("apo_zero")
class APOZero(Formula):
    """sigmoid(-beta up) + sigmoid(beta down)"""

    def __call__(self, p: Pairs) -> torch.Tensor:
        return torch.sigmoid(-self.beta * p.up) + torch.sigmoid(self.beta * p.down)


@formula("apo_down")
class APODown(Formula):
    """sigmoid(beta up) + sigmoid(-beta (up - down))"""

    def __call__(self, p: Pairs) -> torch.Tensor:
        return torch.sigmoid(self.beta * p.up) + torch.sigmoid(-self.beta * p.margin)


@formula("dpop")
class DPOP(Formula):
    """-log sigmoid(beta (up - down - dpop_lambda max(0, -up)))"""

    dpop_lambda: float = 50.0

    def __call__(self, p: Pairs) -> torch.Tensor:
        return -logsigmoid(self.beta * (p.margin - self.dpop_lambda * torch.relu(-p.up)))


@formula("simpo")
class SimPO(Formula):
    """-log sigmoid(beta (chosen - rejected) - simpo_gamma) of means, without a reference."""

    reference = False
    simpo_gamma: float = 0.5

    def __call__(self, p: Pairs) -> torch.Tensor:
        mean = p.means
        return -logsigmoid(self.beta * (mean.chosen - mean.rejected) - self.simpo_gamma)


@formula("orpo")
class ORPO(Formula):
    """-beta log sigmoid(the log-odds ratio) of means per token, without a reference."""

    reference = False

    def __call__(self, p: Pairs) -> torch.Tensor:
        c, r = p.means.chosen, p.means.rejected
        return -self.beta * logsigmoid(c - r - (log1mexp(c) - log1mexp(r)))


@formula("kto_pair")
class KTOPair(Formula):
    """The sum of KTO's losses of a pair, with mean log-ratios over pairs."""

    kl = True

    def __call__(self, p: Pairs) -> torch.Tensor:
        up, down = p.up - p.kl_rejected, p.kl_chosen - p.down
        return torch.sigmoid(-self.beta * up) + torch.sigmoid(-self.beta * down)


@dataclass(frozen=True)
class Unpaired(Formula):
    paired = False
    kto_desirable_weight: float = 1.0
    kto_undesirable_weight: float = 1.0

    def each(self, p: Answers, kl: torch.Tensor | float) -> torch.Tensor:
        z = self.beta * (p.ratio - kl)
        good = self.kto_desirable_weight * torch.sigmoid(-z)
        return torch.where(p.desirable, good, self.kto_undesirable_weight * z.sigmoid())


@formula("kto")
class KTO(Unpaired):
    """w sigmoid(-beta (ratio - kl)), of an undesirable answer w sigmoid(beta (ratio - kl))."""

    kl = True

    def __call__(self, p: Answers) -> torch.Tensor:
        return self.each(p, p.kl)


@formula("apo_zero_unpaired")
class APOZeroUnpaired(Unpaired):
    """KTO with kl = 0."""

    def __call__(self, p: Answers) -> torch.Tensor:
        return self.each(p, 0.0)
