"""The section distillation: what train.loss = distillation learns of a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tilewright.trainer.section import Needs, Resume, Section, Stated, field

DISTILLED = Needs("train.loss", ["distillation"])
COMPARED = Needs("cross_entropy_share", but=1.0, why="nothing of the divergence is in the loss")


class Distillation(Section):
    divergence: Literal["forward", "reverse", "jsd"] = field(
        "forward", Resume.NEXT_STEP, DISTILLED, COMPARED
    )
    """forward: KL(teacher || student); reverse: KL(student || teacher); jsd: the generalized
    Jensen-Shannon divergence (arXiv:2306.13649, equation 1).
    """
    beta: float = field(
        0.5, Resume.NEXT_STEP, DISTILLED, Needs("divergence", ["jsd"]), COMPARED, gt=0, lt=1
    )
    """The teacher's weight in jsd's mixture; near 0 it is like forward, near 1 like reverse."""
    top_k: int = field(32, Resume.OTHER_BINS, DISTILLED, ge=0)
    """Entries per token in the columns teacher_ids and teacher_logprobs; 0: the label alone, whose
    log-probability under the teacher is the column teacher_logprob.
    """
    outside: Literal["bucket", "renormalize"] = field("bucket", Resume.NEXT_STEP, DISTILLED)
    """All tokens without an entry. bucket: they count as one more token; renormalize: they do not
    count, and the entries' probabilities are divided by their sum.
    """
    temperature: float = field(1.0, Resume.NEXT_STEP, DISTILLED, gt=0)
    """Divides the student's logits in the divergence; the teacher's log-probabilities must be those
    at this temperature.
    """
    cross_entropy_share: float = field(0.0, Resume.NEXT_STEP, DISTILLED, ge=0, le=1)
    """The loss is this share of the labels' cross-entropy, whose temperature is 1, and the rest of
    the divergence.
    """


def of_distillation(distillation: Distillation) -> Iterator[Stated]:
    """A distribution has several entries."""
    alone = distillation.outside == "renormalize" and distillation.top_k < 2
    yield alone, "one token is all of a distribution that is renormalized", "outside", "top_k"
