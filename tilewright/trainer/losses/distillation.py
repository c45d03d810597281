"""Distillation of a teacher's most probable tokens: train.loss = distillation.

p: the teacher's distribution, q: the student's, over the tokens that a teacher lists and one bucket
of all others. Merging tokens can only lessen a divergence, so that this is a lower bound of the
divergence over the vocabulary, is that divergence where all tokens are listed, and is 0 only if the
student also has the teacher's mass outside. Without the bucket, sums of unnormalized terms draw the
mass outside to 0; renormalized (`outside`), they leave it free.

    forward  sum p (log p - log q)             reverse  sum q (log q - log p)
    jsd      beta sum p (log p - log m) + (1 - beta) sum q (log q - log m)
             with m = beta p + (1 - beta) q

(arXiv:2306.13649, equation 1, as TRL's GKDTrainer computes it.) Neither is multiplied by the square
of the temperature.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.losses.distillation_fields import Distillation
from tilewright.trainer.losses.loss import LOSSES, Loss
from tilewright.trainer.models.head import TokenLosses

ROUNDING = 2.0**-23  # of the sum of float32 probabilities: the least mass outside
REPORTS = ("teacher_kl", "teacher_mass", "student_mass")


def divergence(name: str, p: torch.Tensor, q: torch.Tensor, beta: float) -> torch.Tensor:
    """[...], of log-probabilities [..., k] of teacher and student. Pairs of 0 add nothing."""
    if name == "forward":
        return (p.exp() * (p - q)).sum(-1)
    if name == "reverse":
        return (q.exp() * (q - p)).sum(-1)
    mixture = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    terms = beta * p.exp() * (p - mixture) + (1 - beta) * q.exp() * (q - mixture)
    return terms.sum(-1)


def with_bucket(
    p: torch.Tensor, q: torch.Tensor, others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [..., k + 1] of teacher and student.   p, q: [..., k], -inf for no token.
    others: [...], the student's of all other tokens.
    """
    left = (1.0 - p.exp().sum(-1)).clamp_min(ROUNDING).log()
    there, some = p > -torch.inf, others > -torch.inf
    p, q = (
        torch.cat((listed.where(there, 0.0), rest.where(some, 0.0)[..., None]), -1)
        for listed, rest in ((p, left), (q, others))
    )
    return p, q


def renormalized(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `with_bucket`, of the listed tokens alone."""
    there = p > -torch.inf
    p, q = (t.where(there, -1e30).log_softmax(-1).where(there, 0.0) for t in (p, q))
    return p, q


def distillation(
    per_token: TokenLosses,
    batch: Mapping[str, Any],
    *,
    name: str,
    beta: float,
    top_k: int,
    outside: str,
    temperature: float,
    share: float,
) -> tuple[torch.Tensor, ...]:
    """The sum over labels that the teacher has an entry for, their number, and sums of REPORTS, of
    agreements if there are top_k, and of cross-entropies if they are there.
    """
    labels = batch["labels"]
    if top_k:
        ids, given = batch["teacher_ids"].long(), batch["teacher_logprobs"].double()
    else:
        ids, given = labels.where(labels != IGNORE, -1)[..., None], batch["teacher_logprob"]
        given = given.double()[..., None]
    learned = (labels != IGNORE) & (ids >= 0).any(-1)
    ids = ids.where(learned[..., None], -1)
    listed = per_token.listed(ids, temperature)
    p = given.where(ids >= 0, -torch.inf)
    q, others = listed.logprobs.double(), listed.others.double()
    compared = renormalized(p, q) if outside == "renormalize" else with_bucket(p, q, others)
    losses = divergence(name, *compared, beta)
    further = []
    with torch.no_grad():
        further += [divergence("forward", *compared, beta), p.exp().sum(-1), 1.0 - others.exp()]
        if top_k:
            best = ids.gather(-1, p.argmax(-1, keepdim=True))[..., 0]
            further.append((listed.best == best).double())
    if share or temperature == 1.0:
        nll = -listed.label.double() if temperature == 1.0 else per_token.values().double()
        further.append(nll.detach())
        losses = (1 - share) * losses + share * nll if share else losses
    return tuple(t.where(learned, 0.0).sum() for t in (losses, torch.ones_like(losses), *further))


def settled(section: Distillation) -> Loss:
    k = section.top_k
    function = functools.partial(
        distillation,
        name=section.divergence,
        beta=section.beta,
        top_k=k,
        outside=section.outside,
        temperature=section.temperature,
        share=section.cross_entropy_share,
    )
    columns = ("teacher_ids", "teacher_logprobs") if k else ("teacher_logprob",)
    reports = (*REPORTS, *("teacher_agreement",) * bool(k))
    reports += ("cross_entropy",) * (section.cross_entropy_share > 0 or section.temperature == 1.0)
    return Loss(
        function,
        ("labels", *columns),
        reports,
        widths=dict.fromkeys(columns, k) if k else {},
        asked=dict.fromkeys(columns, f"distillation.top_k = {k}"),
        section="distillation",
    )


ACCEPTS = ("teacher_ids", "teacher_logprobs", "teacher_logprob")
LOSSES.add(
    "distillation", dataclasses.replace(settled(Distillation()), settled=settled, accepts=ACCEPTS)
)
