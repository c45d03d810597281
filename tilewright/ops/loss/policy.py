"""Policy losses. A formula is a class, whose fields are its options. t: tokens, see `Tokens`.

With lp the log-probability of a sampled token, r = exp(lp - old) and A its advantage. Sources:
reinforce, Williams (1992); importance_sampling and ppo, Schulman et al. (arXiv:1707.06347); cispo,
arXiv:2506.13585; dro, arXiv:2405.19107; gspo, arXiv:2507.18071; dr_grpo, arXiv:2503.20783, whose
constant divisor is the caller's; policy_loss, ppo with the dual clip of arXiv:1912.09729, truncated
importance sampling (Yao et al., 2025) and IcePop's mask (arXiv:2510.18855); opd, on-policy
distillation, whose gradient is that of the reverse KL to the teacher (arXiv:2306.13649), and not
that of lp - teacher, which is 0 on average. The estimators k1, k2 and k3 of a KL are Schulman's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import InitVar, dataclass, fields
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import torch

from tilewright.core.takes import takes

KL_TYPES = ("k1", "k2", "k3")
RATIO_TYPES = ("token", "sequence")


class Options(NamedTuple):
    """The options of all formulas, as an operator takes them; 0 for None.

    clip_low_threshold, clip_high_threshold: the ratios between which r is not clipped, for tokens
        without thresholds of their own.   dual_clip: where A < 0 the loss is at most -dual_clip *
        A; 0: no limit.   use_tis: the loss is multiplied by exp(old - rollout), clipped to
        [tis_clip_low, tis_clip_high], a constant.   icepop_beta: the loss is 0 where r is outside
        [1 / icepop_beta, icepop_beta]; 0: nowhere.   beta: the factor of dro's square, or of
        dr_grpo's KL to the reference, by the estimator kl_type.   ratio_type: r of a token, or
        exp(mean(lp - old)) of its document.
    """

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2
    dual_clip: float = 0.0
    use_tis: bool = False
    tis_clip_low: float = 0.1
    tis_clip_high: float = 2.0
    icepop_beta: float = 0.0
    beta: float = 0.0
    kl_type: str = "k3"
    ratio_type: str = "token"


class Tokens(NamedTuple):
    """Tensors [T] of one dtype, float32 or float64, and Documents; log-probabilities in nats. None
    for what is not given, which `check` refuses where a formula reads it.

    valid: 1 for a token to learn from, 0 for an ignored one, NaN for one whose loss is NaN.
    logprob: under the policy, differentiable.   old_logprob: under the policy that the update
    began with, or that sampled.   rollout_logprob: under the sampler, where that is another.
    ratio_low, ratio_high: thresholds of each token; None for those of the options.
    token_weight: what a token's loss is multiplied by; None: 1.
    known: `log_of_document`, where it is computed (`with_ratio`).
    """

    logprob: torch.Tensor
    valid: torch.Tensor
    advantage: Any = None
    old_logprob: Any = None
    rollout_logprob: Any = None
    ref_logprob: Any = None
    teacher_logprob: Any = None
    ratio_low: torch.Tensor | None = None
    ratio_high: torch.Tensor | None = None
    token_weight: torch.Tensor | None = None
    documents: Any = None
    known: torch.Tensor | None = None

    def masked(self) -> Tokens:
        """A copy in which the values of ignored tokens are 0."""
        *tensors, documents, known = self
        ignored = self.valid == 0
        masked = (t if t is None else t.masked_fill(ignored, 0.0) for t in tensors)
        return Tokens._make((*masked, documents, known))

    def with_ratio(self) -> Tokens:
        """A copy with the ratios of documents, which the loss and its statistics then share."""
        return self._replace(known=self.masked().log_of_document)

    @property
    def log_ratio(self) -> torch.Tensor:
        return self.logprob - self.old_logprob

    @property
    def ratio(self) -> torch.Tensor:
        return torch.exp(self.log_ratio)

    @property
    def log_of_document(self) -> torch.Tensor:
        """mean(lp - old) of each token's document, over those that are not ignored; float64."""
        if self.known is not None:
            return self.known
        by = self.documents
        mean = by.sums(self.log_ratio * self.valid) / by.sums(self.valid).clamp_min(1)
        return by.each(mean)

    @property
    def of_document(self) -> torch.Tensor:
        """The ratio of each token's document."""
        return torch.exp(self.log_of_document).to(self.logprob.dtype)

    def clipped(self, ratio: torch.Tensor, o: Any) -> torch.Tensor:
        low = o.clip_low_threshold if self.ratio_low is None else self.ratio_low
        high = o.clip_high_threshold if self.ratio_high is None else self.ratio_high
        # Not clamp, which refuses a number beside a tensor; NaN stays NaN.
        ratio = torch.where(ratio < low, low, ratio)
        return torch.where(ratio > high, high, ratio)

    def tis(self, o: Any) -> torch.Tensor:
        weight = torch.exp(self.old_logprob - self.rollout_logprob)
        return weight.clamp(o.tis_clip_low, o.tis_clip_high)


@dataclass(frozen=True)
class Formula:
    """A policy loss, whose options are its fields. `loss` is [T], differentiable in logprob.

    reads: the options.   defaults: theirs.   needs: the tensors of tokens that it reads whatever
    the options are.
    """

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]]
    defaults: ClassVar[Mapping[str, Any]]
    needs: ClassVar[tuple[str, ...]] = ("advantage", "old_logprob")

    @property
    def by_token(self) -> bool:
        """Whether a token's loss depends on no other token, so that `slope` is known at once."""
        return True

    def loss(self, t: Tokens) -> torch.Tensor:
        raise NotImplementedError

    def slope(self, t: Tokens) -> torch.Tensor:
        """[T], the derivative of a token's loss in its log-probability."""
        raise NotImplementedError

    @property
    def needed(self) -> tuple[str, ...]:
        """The tensors of tokens that are read with these options."""
        return self.needs

    @property
    def options(self) -> Options:
        given = {name: getattr(self, name) for name in self.reads}
        return Options(**{name: value for name, value in given.items() if value is not None})

    @classmethod
    def of(cls, options: Options) -> Formula:
        """The formula with these options, in which 0 stands for None."""
        given = {name: getattr(options, name) for name in cls.reads}
        return cls(**{n: v for n, v in given.items() if v or cls.defaults[n] is not None})

    def __post_init__(self) -> None:
        check_options(Given(**{n: getattr(self, n) for n in self.reads}))
        given = {n for n in self.reads if getattr(self, n) != self.defaults[n]}
        if wrong := contradiction(self.name, given, self):
            option, _, why = wrong
            raise ValueError(f"{option} {why}, got {getattr(self, option)!r}")


THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
OF_TIS = ("use_tis", "tis_clip_low", "tis_clip_high")
# The lower and the upper limit of an interval, and the option without which neither is read.
INTERVALS = ((*THRESHOLDS, None), (*OF_TIS[1:], "use_tis"))
# Options that are read only where another one is on, and that other one, in words too.
READ_WITH = {
    "kl_type": ("beta", "beta above 0"),
    **dict.fromkeys(OF_TIS[1:], ("use_tis", "use_tis")),
}


class Given(NamedTuple):
    """The options of any formula as they are given; None: not given."""

    clip: float | None = None
    clip_low_threshold: float = 0.0
    clip_high_threshold: float = 0.0
    dual_clip: float | None = None
    use_tis: bool = False
    tis_clip_low: float = 0.0
    tis_clip_high: float = 0.0
    icepop_beta: float | None = None
    beta: float = 0.0
    kl_type: str = "k3"
    ratio_type: str = "token"


@takes(
    clip="number (0, 1]",
    **dict.fromkeys(THRESHOLDS, "number [0, inf)"),
    dual_clip="number (1, inf)",
    use_tis="bool",
    tis_clip_low="number [0, inf)",
    tis_clip_high="number [0, inf)",
    icepop_beta="number [1, inf)",
    beta="number [0, inf)",
    kl_type=KL_TYPES,
    ratio_type=RATIO_TYPES,
)
def check_options(given: Given) -> None:
    """Raises TypeError or ValueError for options out of their ranges."""


FORMULAS: dict[str, type[Formula]] = {}
Class = TypeVar("Class", bound=type[Formula])


@dataclass_transform(frozen_default=True)
def formula(name: str) -> Callable[[Class], Class]:
    """A decorator that makes a class a formula, and a row of FORMULAS."""

    def decorate(cls: Class) -> Class:
        own = fields(dataclass(frozen=True)(cls))
        cls.name, cls.reads = name, tuple(f.name for f in own)
        cls.defaults = {f.name: f.default for f in own}
        FORMULAS[name] = cls
        return cls

    return decorate


# ---- what formulas have in common


def kl(of: str, logprob: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy, other) from tokens that the policy sampled."""
    d = logprob - other
    return d if of == "k1" else d.square() / 2 if of == "k2" else torch.expm1(-d) + d


def kl_slope(of: str, logprob: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    d = logprob - other
    return torch.ones_like(d) if of == "k1" else d if of == "k2" else -torch.expm1(-d)


def times(log_ratio: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio) * factor: 0 where the factor is 0, even if the ratio overflows."""
    nothing = (factor == 0) & log_ratio.isfinite()
    return torch.exp(log_ratio.masked_fill(nothing, 0.0)).to(factor.dtype) * factor


@dataclass(frozen=True)
class Clipped(Formula):
    """clip: a threshold on each side of 1, in place of both."""

    clip: InitVar[float | None] = None
    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2

    def __post_init__(self, clip: float | None) -> None:
        check_options(Given(clip))
        if clip is not None:
            if given := [n for n in THRESHOLDS if getattr(self, n) != self.defaults[n]]:
                raise ValueError(f"{given[0]} must not be given beside clip, got {clip!r} for that")
            object.__setattr__(self, THRESHOLDS[0], 1.0 - clip)
            object.__setattr__(self, THRESHOLDS[1], 1.0 + clip)
        super().__post_init__()

    def beyond(self, t: Tokens, log_ratio: torch.Tensor) -> torch.Tensor:
        """Where the clipped ratio is taken, which has no gradient."""
        log_ratio = log_ratio.detach()
        limit = t.clipped(torch.exp(log_ratio).to(t.advantage.dtype), self) * t.advantage
        return times(log_ratio, t.advantage) > limit

    def surrogate(
        self, t: Tokens, log_ratio: torch.Tensor, still: torch.Tensor | None = None
    ) -> torch.Tensor:
        """still: where the caller has no gradient either."""
        outside = self.beyond(t, log_ratio)
        # Ahead of exp, whose slope overflows with it: 0 times infinity would be NaN.
        constant = outside if still is None else outside | still
        log_ratio = torch.where(constant, log_ratio.detach(), log_ratio)
        limit = t.clipped(torch.exp(log_ratio.detach()).to(t.advantage.dtype), self) * t.advantage
        return -torch.where(outside, limit, times(log_ratio, t.advantage))

    def surrogate_slope(self, t: Tokens) -> torch.Tensor:
        return -times(t.log_ratio, t.advantage).masked_fill(self.beyond(t, t.log_ratio), 0.0)


# ---- the formulas


@formula("reinforce")
class Reinforce(Formula):
    """-lp A"""

    needs = ("advantage",)

    def loss(self, t: Tokens) -> torch.Tensor:
        return -t.logprob * t.advantage

    def slope(self, t: Tokens) -> torch.Tensor:
        return -t.advantage


@formula("importance_sampling")
class ImportanceSampling(Formula):
    """-r A"""

    def loss(self, t: Tokens) -> torch.Tensor:
        return -times(t.log_ratio, t.advantage)

    slope = loss


@formula("ppo")
class PPO(Clipped):
    """-min(r A, clip(r) A)"""

    def loss(self, t: Tokens) -> torch.Tensor:
        return self.surrogate(t, t.log_ratio)

    def slope(self, t: Tokens) -> torch.Tensor:
        return self.surrogate_slope(t)


@formula("cispo")
class CISPO(Clipped):
    """-sg(clip(r)) lp A"""

    clip_low_threshold: float = 0.0
    clip_high_threshold: float = 4.0

    def loss(self, t: Tokens) -> torch.Tensor:
        return -t.clipped(t.ratio, self).detach() * t.logprob * t.advantage

    def slope(self, t: Tokens) -> torch.Tensor:
        return -t.clipped(t.ratio, self) * t.advantage


@formula("dro")
class DRO(Formula):
    """-(lp A - beta / 2 (lp - old)^2)"""

    beta: float = 0.05

    def loss(self, t: Tokens) -> torch.Tensor:
        return self.beta / 2 * (t.logprob - t.old_logprob).square() - t.logprob * t.advantage

    def slope(self, t: Tokens) -> torch.Tensor:
        return self.beta * (t.logprob - t.old_logprob) - t.advantage


@formula("gspo")
class GSPO(Clipped):
    """PPO with the ratio of a document, exp(mean(lp - old))."""

    needs = ("advantage", "old_logprob", "documents")

    @property
    def by_token(self) -> bool:
        return False

    def loss(self, t: Tokens) -> torch.Tensor:
        return self.surrogate(t, t.log_of_document)


@formula("dr_grpo")
class DrGRPO(Clipped):
    """PPO, + beta KL to the reference, by the estimator kl_type.

    ratio_type: the ratio of a "token", or of its document: "sequence".
    """

    clip_high_threshold: float = 1.28
    beta: float = 0.0
    kl_type: str = "k3"
    ratio_type: str = "token"

    @property
    def by_token(self) -> bool:
        return self.ratio_type == "token"

    @property
    def needed(self) -> tuple[str, ...]:
        by_option = {"ref_logprob": self.beta, "documents": not self.by_token}
        return (*self.needs, *(n for n, reads in by_option.items() if reads))

    def loss(self, t: Tokens) -> torch.Tensor:
        loss = self.surrogate(t, t.log_ratio if self.by_token else t.log_of_document)
        return loss + self.beta * kl(self.kl_type, t.logprob, t.ref_logprob) if self.beta else loss

    def slope(self, t: Tokens) -> torch.Tensor:
        slope = self.surrogate_slope(t)
        if not self.beta:
            return slope
        return slope + self.beta * kl_slope(self.kl_type, t.logprob, t.ref_logprob)


@formula("policy_loss")
class GuardedPPO(Clipped):
    """PPO with a dual clip, truncated importance sampling, and IcePop's mask.

    dual_clip: where A < 0 the loss is at most -dual_clip A; None: no limit.
    use_tis: times sg(exp(old - rollout)), clipped to [tis_clip_low, tis_clip_high].
    icepop_beta: the loss is 0 where r is outside [1 / icepop_beta, icepop_beta]; None: nowhere.
    """

    dual_clip: float | None = None
    icepop_beta: float | None = None
    use_tis: bool = False
    tis_clip_low: float = 0.1
    tis_clip_high: float = 2.0

    @property
    def needed(self) -> tuple[str, ...]:
        return (*self.needs, "rollout_logprob") if self.use_tis else self.needs

    def loss(self, t: Tokens) -> torch.Tensor:
        loss = self.surrogate(t, t.log_ratio, self._still(t))
        if self.dual_clip:
            limit = -self.dual_clip * t.advantage
            loss = torch.where(t.advantage < 0, torch.minimum(loss, limit), loss)
        if self.icepop_beta:
            loss = loss.masked_fill(self._outside(t), 0.0)
        return loss * t.tis(self) if self.use_tis else loss

    def slope(self, t: Tokens) -> torch.Tensor:
        slope = self.surrogate_slope(t).masked_fill(self._still(t), 0.0)
        return slope * t.tis(self) if self.use_tis else slope

    def _still(self, t: Tokens) -> torch.Tensor:
        """Where dual_clip or icepop_beta leave no gradient."""
        still = torch.zeros_like(t.ratio, dtype=torch.bool)
        if self.dual_clip:
            still |= (t.advantage < 0) & (t.ratio.detach() > self.dual_clip)
        return still | self._outside(t) if self.icepop_beta else still

    def _outside(self, t: Tokens) -> torch.Tensor:
        """Where icepop_beta leaves nothing of a token."""
        assert self.icepop_beta
        r = t.ratio.detach()
        return (r < 1 / self.icepop_beta) | (r > self.icepop_beta)


@formula("opd")
class OPD(Formula):
    """r sg(lp - teacher); without old_logprob r = exp(lp - sg(lp))."""

    needs = ("teacher_logprob",)

    def loss(self, t: Tokens) -> torch.Tensor:
        before = t.logprob.detach() if t.old_logprob is None else t.old_logprob
        return times(t.logprob - before, (t.logprob - t.teacher_logprob).detach())

    slope = loss


def contradiction(name: str, given: Collection[str], o: Any) -> tuple[str, str, str] | None:
    """What is wrong with a formula's options together: the option at fault, the other one, and why;
    or None.

    given: the options that are given.   o: all options, with the defaults of the others.
    """
    for option, (other, needed_value) in READ_WITH.items():
        if option in given and not getattr(o, other):
            return option, other, f"needs {needed_value}"
    for low, high, switch in INTERVALS:
        read = low in FORMULAS[name].reads and (switch is None or getattr(o, switch))
        if not read:
            continue
        least, most = getattr(o, low), getattr(o, high)
        if least > most and low in given:
            return low, high, f"must be at most {high} = {most}"
        if least > most:
            return high, low, f"must be at least {low} = {least}"
        # The factor of every token's gradient is clipped to it.
        if most == 0 and (switch is not None or name == "cispo"):
            return high, switch or "loss", "must be above 0, or nothing is learned"
    return None


# What only some formulas read; the others are read by `statistics`.
READ = ("advantage", "teacher_logprob", "documents")


def check(formula: Formula, tokens: Tokens) -> None:
    """Raises ValueError for a tensor that the formula reads and the tokens lack, and for one of
    READ that the tokens have and the formula does not read.
    """
    reads, name = formula.needed, type(formula).__name__
    for part in dict.fromkeys((*reads, *READ)):
        there, called = getattr(tokens, part) is not None, "cu_seqlens"
        called = part if part != "documents" else called
        if there != (part in reads):
            accepted = "None" if there else "a torch.Tensor"
            got = "a torch.Tensor" if there else "None"
            raise ValueError(f"{called} must be {accepted} for {name}, got {got}")


def losses(formula: Formula, tokens: Tokens) -> torch.Tensor:
    """[T], 0 for ignored tokens, whose gradient is 0 whatever they have."""
    return _weighted(tokens, formula.loss(tokens.masked()))


def slopes(formula: Formula, tokens: Tokens) -> torch.Tensor:
    """[T], the derivatives of `losses`, of a formula that is `by_token`."""
    return _weighted(tokens, formula.slope(tokens.masked()))


def _weighted(tokens: Tokens, values: torch.Tensor) -> torch.Tensor:
    weight = tokens.valid if tokens.token_weight is None else tokens.valid * tokens.token_weight
    return torch.where(tokens.valid == 0, 0.0, values * weight)


@torch.no_grad()
def statistics(formula: Formula, tokens: Tokens) -> dict[str, torch.Tensor]:
    """Means over the tokens that are not ignored, [] in their dtype; 0 without one.

    ratio_mean, ratio_max, clipped_low and clipped_high (the shares of ratios beyond a threshold)
    where there are old log-probabilities, tis_weight where the options have one, and for old, ref
    and rollout, where given, k1_NAME, k2_NAME and k3_NAME: estimates of the KL to it.
    """
    t = tokens.masked()
    learned = (tokens.valid != 0).double()
    count = learned.sum().clamp_min(1)

    def mean(values: torch.Tensor) -> torch.Tensor:
        values = torch.where(learned == 0, 0.0, values.double())
        return (values.sum() / count).to(t.logprob.dtype)

    means = {}
    if t.old_logprob is not None:
        r = t.of_document if "documents" in formula.needed else t.ratio
        means["ratio_mean"] = mean(r)
        most = torch.where(learned == 0, 0.0, r)
        means["ratio_max"] = most.amax() if most.numel() else most.sum()
        if isinstance(formula, Clipped):
            clipped = t.clipped(r, formula)
            means["clipped_low"], means["clipped_high"] = mean(r < clipped), mean(r > clipped)
    if getattr(formula, "use_tis", False):
        means["tis_weight"] = mean(t.tis(formula))
    others = {"old": t.old_logprob, "ref": t.ref_logprob, "rollout": t.rollout_logprob}
    for name_of, other in others.items():
        if other is not None:
            for of in KL_TYPES:
                means[f"{of}_{name_of}"] = mean(kl(of, t.logprob, other))
    return means
