"""Policy losses, a line each. t: tokens, see `Tokens`; o: the options.

With lp the log-probability of a sampled token, r = exp(lp - old) and A its advantage. Sources:
reinforce, Williams (1992); importance_sampling and ppo, Schulman et al. (arXiv:1707.06347); cispo,
arXiv:2506.13585; dro, arXiv:2405.19107; gspo, arXiv:2507.18071; dr_grpo, arXiv:2503.20783, whose
constant divisor is the caller's; policy_loss, ppo with the dual clip of arXiv:1912.09729, truncated
importance sampling (Yao et al., 2025) and IcePop's mask (arXiv:2510.18855); opd, on-policy
distillation, whose gradient is that of the reverse KL to the teacher (arXiv:2306.13649), and not
that of lp - teacher, which is 0 on average. The estimators k1, k2 and k3 of a KL are Schulman's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

KL_TYPES = ("k1", "k2", "k3")
RATIO_TYPES = ("token", "sequence")


class Options(NamedTuple):
    """The options of formulas. `Formula.defaults` has those that differ.

    clip_low_threshold, clip_high_threshold: the ratios between which it is not clipped, where the
        tokens have none of their own.   dual_clip: where A < 0 the loss is at most -dual_clip * A;
        0: no limit.   use_tis: the loss is multiplied by exp(old - rollout), clipped to
        [tis_clip_low, tis_clip_high], a constant.   icepop_beta: the loss is 0 where r is outside
        [1 / icepop_beta, icepop_beta]; 0: nowhere.   beta: of dro's square, or of dr_grpo's KL
        to the reference, by the estimator kl_type.   ratio_type: r of a token, or exp(mean(lp -
        old)) of its document.
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
    documents: Any = None
    known: torch.Tensor | None = None

    def masked(self) -> Tokens:
        """With zeros for whatever ignored tokens have."""
        *tensors, documents, known = self
        ignored = self.valid == 0
        masked = (t if t is None else t.masked_fill(ignored, 0.0) for t in tensors)
        return Tokens._make((*masked, documents, known))

    def with_ratio(self) -> Tokens:
        """With the ratios of documents, which the loss and its statistics then share."""
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

    def clipped(self, ratio: torch.Tensor, o: Options) -> torch.Tensor:
        low = o.clip_low_threshold if self.ratio_low is None else self.ratio_low
        high = o.clip_high_threshold if self.ratio_high is None else self.ratio_high
        # Not clamp, which refuses a number beside a tensor; NaN stays NaN.
        ratio = torch.where(ratio < low, low, ratio)
        return torch.where(ratio > high, high, ratio)

    def tis(self, o: Options) -> torch.Tensor:
        weight = torch.exp(self.old_logprob - self.rollout_logprob)
        return weight.clamp(o.tis_clip_low, o.tis_clip_high)


@dataclass(frozen=True)
class Formula:
    """A row of FORMULAS.

    function: (tokens, options) -> the loss of each token, differentiable in logprob.
    slope: (tokens, options) -> its derivative in the token's logprob; None where it depends on
        others.
    reads: the options that it depends on.   needs: the tensors of tokens that it
    reads (opd does without old_logprob).   defaults: of its options.
    """

    function: Callable[[Tokens, Options], torch.Tensor]
    slope: Callable[[Tokens, Options], torch.Tensor] | None = None
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("advantage", "old_logprob")
    defaults: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := {*self.reads, *self.defaults} - {*Options._fields}:
            raise ValueError(f"reads: {min(unknown)!r} is none of {', '.join(Options._fields)}")


def kl(of: str, logprob: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy, other) from tokens that the policy sampled."""
    d = logprob - other
    return d if of == "k1" else d.square() / 2 if of == "k2" else torch.expm1(-d) + d


def kl_slope(of: str, logprob: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    d = logprob - other
    return torch.ones_like(d) if of == "k1" else d if of == "k2" else -torch.expm1(-d)


def times(log_ratio: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio) * factor: 0 where the factor is 0, though the ratio overflow."""
    nothing = (factor == 0) & log_ratio.isfinite()
    return torch.exp(log_ratio.masked_fill(nothing, 0.0)).to(factor.dtype) * factor


def beyond(t: Tokens, o: Options, log_ratio: torch.Tensor) -> torch.Tensor:
    """Where the clipped ratio is taken, of which there is no gradient."""
    log_ratio = log_ratio.detach()
    limit = t.clipped(torch.exp(log_ratio).to(t.advantage.dtype), o) * t.advantage
    return times(log_ratio, t.advantage) > limit


def surrogate(
    t: Tokens, o: Options, log_ratio: torch.Tensor, still: torch.Tensor | None = None
) -> torch.Tensor:
    """still: where the caller has no gradient either."""
    outside = beyond(t, o, log_ratio)
    # Ahead of exp, whose slope overflows with it: 0 times infinity would be NaN.
    constant = outside if still is None else outside | still
    log_ratio = torch.where(constant, log_ratio.detach(), log_ratio)
    limit = t.clipped(torch.exp(log_ratio.detach()).to(t.advantage.dtype), o) * t.advantage
    return -torch.where(outside, limit, times(log_ratio, t.advantage))


def surrogate_slope(t: Tokens, o: Options) -> torch.Tensor:
    return -times(t.log_ratio, t.advantage).masked_fill(beyond(t, o, t.log_ratio), 0.0)


def reinforce(t: Tokens, o: Options) -> torch.Tensor:
    return -t.logprob * t.advantage


def reinforce_slope(t: Tokens, o: Options) -> torch.Tensor:
    return -t.advantage


def importance_sampling(t: Tokens, o: Options) -> torch.Tensor:
    return -times(t.log_ratio, t.advantage)


def ppo(t: Tokens, o: Options) -> torch.Tensor:
    return surrogate(t, o, t.log_ratio)


def cispo(t: Tokens, o: Options) -> torch.Tensor:
    return -t.clipped(t.ratio, o).detach() * t.logprob * t.advantage


def cispo_slope(t: Tokens, o: Options) -> torch.Tensor:
    return -t.clipped(t.ratio, o) * t.advantage


def dro(t: Tokens, o: Options) -> torch.Tensor:
    return o.beta / 2 * (t.logprob - t.old_logprob).square() - t.logprob * t.advantage


def dro_slope(t: Tokens, o: Options) -> torch.Tensor:
    return o.beta * (t.logprob - t.old_logprob) - t.advantage


def gspo(t: Tokens, o: Options) -> torch.Tensor:
    return surrogate(t, o, t.log_of_document)


def dr_grpo(t: Tokens, o: Options) -> torch.Tensor:
    loss = surrogate(t, o, t.log_of_document if o.ratio_type == "sequence" else t.log_ratio)
    return loss + o.beta * kl(o.kl_type, t.logprob, t.ref_logprob) if o.beta else loss


def dr_grpo_slope(t: Tokens, o: Options) -> torch.Tensor:
    slope = surrogate_slope(t, o)
    return slope + o.beta * kl_slope(o.kl_type, t.logprob, t.ref_logprob) if o.beta else slope


def policy_loss(t: Tokens, o: Options) -> torch.Tensor:
    loss = surrogate(t, o, t.log_ratio, _still(t, o))
    if o.dual_clip:
        loss = torch.where(t.advantage < 0, torch.minimum(loss, -o.dual_clip * t.advantage), loss)
    if o.icepop_beta:
        loss = loss.masked_fill(_outside(t, o), 0.0)
    return loss * t.tis(o) if o.use_tis else loss


def policy_slope(t: Tokens, o: Options) -> torch.Tensor:
    slope = surrogate_slope(t, o).masked_fill(_still(t, o), 0.0)
    return slope * t.tis(o) if o.use_tis else slope


def _still(t: Tokens, o: Options) -> torch.Tensor:
    """Where dual_clip or icepop_beta leave no gradient."""
    still = torch.zeros_like(t.ratio, dtype=torch.bool)
    if o.dual_clip:
        still |= (t.advantage < 0) & (t.ratio.detach() > o.dual_clip)
    return still | _outside(t, o) if o.icepop_beta else still


def _outside(t: Tokens, o: Options) -> torch.Tensor:
    """Where icepop_beta leaves nothing of a token."""
    r = t.ratio.detach()
    return (r < 1 / o.icepop_beta) | (r > o.icepop_beta)


def opd(t: Tokens, o: Options) -> torch.Tensor:
    before = t.logprob.detach() if t.old_logprob is None else t.old_logprob
    return times(t.logprob - before, (t.logprob - t.teacher_logprob).detach())


THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
OF_TIS = ("use_tis", "tis_clip_low", "tis_clip_high")
# The lower and the upper limit of an interval, and the option without which neither is read.
INTERVALS = ((*THRESHOLDS, None), (*OF_TIS[1:], "use_tis"))
# Options that are read only where another one is on, and that other one, in words too.
READ_WITH = {
    "kl_type": ("beta", "beta above 0"),
    **dict.fromkeys(OF_TIS[1:], ("use_tis", "use_tis")),
}
FORMULAS = {
    "reinforce": Formula(reinforce, reinforce_slope, needs=("advantage",)),
    "importance_sampling": Formula(importance_sampling, importance_sampling),
    "ppo": Formula(ppo, surrogate_slope, THRESHOLDS),
    "cispo": Formula(
        cispo,
        cispo_slope,
        THRESHOLDS,
        defaults={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    ),
    "dro": Formula(dro, dro_slope, ("beta",), defaults={"beta": 0.05}),
    "gspo": Formula(gspo, None, THRESHOLDS, ("advantage", "old_logprob", "documents")),
    "dr_grpo": Formula(
        dr_grpo,
        dr_grpo_slope,
        (*THRESHOLDS, "beta", "kl_type", "ratio_type"),
        defaults={"clip_high_threshold": 1.28},
    ),
    "policy_loss": Formula(
        policy_loss, policy_slope, (*THRESHOLDS, "dual_clip", "icepop_beta", *OF_TIS)
    ),
    "opd": Formula(opd, opd, needs=("teacher_logprob",)),
}


def settled(name: str, given: Mapping[str, torch.Tensor | float | str | None]) -> Options:
    """The options of a formula: those given that are not None, and else its defaults. Raises
    ValueError for one that it does not read, and as `contradiction`.

    given: a threshold may be a tensor, which is of the tokens.
    """
    row = FORMULAS[name]
    for option, value in given.items():
        if value is not None and option not in row.reads:
            accepted = ", ".join(row.reads) or "no option"
            raise ValueError(
                f"{option} must be None for loss={name!r}, which reads {accepted}; got {value!r}"
            )
    numbers = {n: v for n, v in given.items() if v is not None and not isinstance(v, torch.Tensor)}
    options = Options(**{**row.defaults, **numbers})
    of_tokens = {n for n, v in given.items() if isinstance(v, torch.Tensor)}
    if wrong := contradiction(name, numbers, options, of_tokens):
        option, _, why = wrong
        raise ValueError(f"{option} {why}, got {getattr(options, option)!r}")
    return options


def contradiction(
    name: str, given: Mapping[str, Any], o: Options, of_tokens: Set[str] = frozenset()
) -> tuple[str, str, str] | None:
    """What is wrong with a formula's options together: the option at fault, the other one, and why;
    or None.

    given: those that are.   o: with the others' defaults.   of_tokens: thresholds that tokens have
    of their own, whose values are not looked at.
    """
    for option, (other, needed_value) in READ_WITH.items():
        if option in given and not getattr(o, other):
            return option, other, f"needs {needed_value}"
    for low, high, switch in INTERVALS:
        read = low in FORMULAS[name].reads and (switch is None or getattr(o, switch))
        if not read or {low, high} & of_tokens:
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


def needed(name: str, o: Options) -> tuple[str, ...]:
    """The tensors of tokens that a formula reads with these options."""
    by_option = {
        "rollout_logprob": o.use_tis,
        "ref_logprob": name == "dr_grpo" and o.beta,
        "documents": o.ratio_type == "sequence",
    }
    return (*FORMULAS[name].needs, *(n for n, reads in by_option.items() if reads))


def check(name: str, tokens: Tokens, o: Options) -> None:
    """Raises ValueError for a tensor that the formula reads and the tokens have not, and for one of
    READ that they have and it does not read.
    """
    reads = needed(name, o)
    for part in dict.fromkeys((*reads, *READ)):
        there, called = getattr(tokens, part) is not None, "cu_seqlens"
        called = part if part != "documents" else called
        if there != (part in reads):
            accepted = "None" if there else "a torch.Tensor"
            got = "a torch.Tensor" if there else "None"
            raise ValueError(f"{called} must be {accepted} for loss={name!r}, got {got}")


def by_token(name: str, o: Options) -> bool:
    """Whether a token's loss depends on no other token, so that its slope is known at once."""
    return FORMULAS[name].slope is not None and o.ratio_type == "token"


def losses(name: str, tokens: Tokens, o: Options) -> torch.Tensor:
    """[T], 0 for ignored tokens, whose gradient is 0 whatever they have."""
    found = FORMULAS[name].function(tokens.masked(), o)
    return torch.where(tokens.valid == 0, 0.0, found * tokens.valid)


def slopes(name: str, tokens: Tokens, o: Options) -> torch.Tensor:
    """[T], the derivatives of `losses`, of a formula that is `by_token`."""
    slope = FORMULAS[name].slope
    assert slope is not None
    found = slope(tokens.masked(), o)
    return torch.where(tokens.valid == 0, 0.0, found * tokens.valid)


@torch.no_grad()
def statistics(name: str, tokens: Tokens, o: Options) -> dict[str, torch.Tensor]:
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

    found = {}
    if t.old_logprob is not None:
        r = t.of_document if "documents" in needed(name, o) else t.ratio
        found["ratio_mean"] = mean(r)
        most = torch.where(learned == 0, 0.0, r)
        found["ratio_max"] = most.amax() if most.numel() else most.sum()
        if THRESHOLDS[0] in FORMULAS[name].reads:
            clipped = t.clipped(r, o)
            found["clipped_low"], found["clipped_high"] = mean(r < clipped), mean(r > clipped)
    if o.use_tis:
        found["tis_weight"] = mean(t.tis(o))
    others = {"old": t.old_logprob, "ref": t.ref_logprob, "rollout": t.rollout_logprob}
    for name_of, other in others.items():
        if other is not None:
            for of in KL_TYPES:
                found[f"{of}_{name_of}"] = mean(kl(of, t.logprob, other))
    return found
