"""The section policy: what train.loss = policy minimizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from tilewright.ops.loss.policy import FORMULAS, INTERVALS, READ_WITH, Options, contradiction
from tilewright.trainer.section import Needs, Resume, Section, Stated, field

POLICY = Needs("train.loss", ["policy"])
COLUMNS_READ = Resume.OTHER_CONTENTS  # of a field that decides which columns samples have


def _known(name: str) -> str:
    if name not in FORMULAS:
        raise ValueError(f"must be one of {', '.join(FORMULAS)}")
    return name


# Pairs of options that may not fit to each other.
TOGETHER = {
    *((option, other) for option, (other, _) in READ_WITH.items()),
    *(pair for low, high, _ in INTERVALS for pair in ((low, high), (high, low))),
    *((high, switch or "loss") for _, high, switch in INTERVALS),
}


def _option(name: str, *, resume: Resume = Resume.NEXT_STEP, **more: Any) -> Any:
    """An option of formulas; null: what the formula has."""
    readers = Needs("loss", lambda: [n for n, row in FORMULAS.items() if name in row.reads])
    return field(None, resume, POLICY, readers, **more)


class Policy(Section):
    loss: Annotated[str, AfterValidator(_known)] = field("ppo", COLUMNS_READ, POLICY)
    """The formula: a loss for each token, of its log-probability and of the columns that it reads,
    among them advantage, old_logprob, rollout_logprob, reference_logprob and teacher_logprob.
    """
    average: Literal["tokens", "documents"] = field("tokens", Resume.NEXT_STEP, POLICY)
    """tokens: the mean over a step's tokens; documents: over documents of the means over theirs."""
    clip_low_threshold: float | None = _option("clip_low_threshold", ge=0)
    """The least ratio to the old policy that is not clipped; null: the formula's, mostly 0.8."""
    clip_high_threshold: float | None = _option("clip_high_threshold", ge=0)
    """The greatest ratio to the old policy that is not clipped; null: the formula's, mostly 1.2."""
    dual_clip: float | None = _option("dual_clip", gt=1)
    """Where an advantage is negative, the loss is at most -advantage times this; null: no limit."""
    use_tis: bool | None = _option("use_tis", resume=COLUMNS_READ)
    """Weigh tokens by the old policy's probability over the sampler's, clipped: truncated
    importance sampling.
    """
    tis_clip_low: float | None = _option("tis_clip_low", ge=0)
    """The least weight of use_tis; null: 0.1."""
    tis_clip_high: float | None = _option("tis_clip_high", ge=0)
    """The greatest weight of use_tis; null: 2."""
    icepop_beta: float | None = _option("icepop_beta", ge=1)
    """Nothing is learned where the ratio is not between 1 / this and this; null: everywhere."""
    beta: float | None = _option("beta", resume=COLUMNS_READ, ge=0)
    """Factor of dro's square (null: 0.05), or dr_grpo's KL to the reference (null: 0)."""
    kl_type: Literal["k1", "k2", "k3"] | None = _option("kl_type")
    """The estimate of that KL; null: k3."""
    ratio_type: Literal["token", "sequence"] | None = _option("ratio_type")
    """The ratio of a token, or the geometric mean over its document; null: token."""


def of_policy(policy: Policy) -> Iterator[Stated]:
    """Options fit to each other."""
    row, values = FORMULAS[policy.loss], {n: getattr(policy, n) for n in Options._fields}
    given = {n: v for n, v in values.items() if v is not None and n in row.reads}
    wrong = contradiction(policy.loss, given, Options(**{**row.defaults, **given}))
    for option, other in sorted(TOGETHER):
        why = wrong[2] if wrong is not None and wrong[:2] == (option, other) else None
        yield values[option] is not None, why, option, other
