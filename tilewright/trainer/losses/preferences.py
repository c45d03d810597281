"""Losses of answers that are preferred or not, in pairs or alone: train.loss = preference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.ops.loss.preference import Answers, Formula, Pairs
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.losses.before import Compared
from tilewright.trainer.losses.loss import LOSSES, Loss
from tilewright.trainer.losses.preference.row import PREFERENCES
from tilewright.trainer.losses.preference_fields import Preference
from tilewright.trainer.models.head import OfSequence, TokenLosses, by_document

CHOSEN, REJECTED = 0, 1  # values of the column role
COLUMNS = ("labels", "pair", "role")
# Over the pairs.
REPORTS = (
    "saturated",
    "reward_accuracy",
    "reward_margin",
    "reward_chosen",
    "reward_rejected",
    "logprob_chosen",
    "logprob_rejected",
)
# drift: how far answers are from the reference, in nats.   kl: mean log-ratios of other answers.
DRIFT, KL = ("drift",), ("kl",)
PARTS = ("preference_loss", "sft_loss")  # before their factors
# Reports on answers that are not paired: over all, and over the desirable or undesirable ones.
KINDS = ("desirable", "undesirable")
OVER = {f"{what}_{kind}": kind for kind in KINDS for what in ("reward", "logprob")}
ALONE = ("saturated", "reward_accuracy", *KINDS, *OVER)


def sums_of(per_token: TokenLosses, batch: Mapping[str, Any], reference: bool) -> torch.Tensor:
    """[3, documents]: log-probability, tokens, and log-probability under the reference, or without
    one 0.
    """
    labels, lengths = batch["labels"], batch["lengths"]
    learned = labels != IGNORE
    columns = [-per_token.values(), learned]
    if reference:
        columns.append(batch["reference_logprob"].where(learned, 0.0))
    sums = per_token.over_ranks(torch.stack([by_document(c[0], lengths) for c in columns]))
    return sums if reference else torch.cat((sums, torch.zeros_like(sums[:1])))


# A document without an answer has one token of log-probability -1 everywhere, so that what is made
# of it is finite, and differentiable.
def _filled(sums: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return torch.where(where, sums, sums.new_tensor([-1.0, 1.0, -1.0])[:, None])


def pairs_of(
    per_token: TokenLosses, batch: Mapping[str, Any], reference: bool
) -> tuple[Pairs, torch.Tensor]:
    """The pair of each document that is a chosen answer, and a mask of these documents. The
    document after the chosen answer is the rejected one. Elsewhere the pair is filled.
    """
    sums, is_pair = sums_of(per_token, batch, reference), batch["role"] == CHOSEN
    chosen, rejected = (_filled(t, is_pair) for t in (sums, sums.roll(-1, 1)))
    pairs = Pairs(chosen[0], rejected[0], chosen[2], rejected[2], chosen[1], rejected[1])
    if (score := batch.get("reward")) is not None:
        gap = (score.double() - score.double().roll(-1)).clamp_min(0.0)
        pairs = pairs._replace(gap=gap.where(is_pair, 1.0))
    return pairs, is_pair


def answers_of(
    per_token: TokenLosses, batch: Mapping[str, Any], reference: bool
) -> tuple[Answers, torch.Tensor]:
    """The answer of each document, and a mask of those that have one. Elsewhere it is filled."""
    sums = sums_of(per_token, batch, reference)
    is_one = (batch["desirable"] >= 0) & (sums[1] > 0)
    answer, tokens, other = _filled(sums, is_one)
    return Answers(answer, other, tokens, batch["desirable"] == 1), is_one


def chosen_tokens(of: OfSequence, batch: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The number of a micro-batch's pairs, and that of the tokens of their chosen answers."""
    there = (batch["role"] == CHOSEN).double()
    return of.share * there.sum(), of.share * (there * answer_tokens(of, batch)).sum()


def desirable_tokens(of: OfSequence, batch: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The number of a micro-batch's answers, and that of the tokens of desirable ones."""
    tokens, kind = answer_tokens(of, batch), batch["desirable"]
    count = ((kind >= 0) & (tokens > 0)).double().sum()
    return of.share * count, of.share * (tokens * (kind == 1)).sum()


def answer_tokens(of: OfSequence, batch: Mapping[str, Any]) -> torch.Tensor:
    return of.over_ranks(by_document(batch["labels"][0] != IGNORE, batch["lengths"]))


def likelihood(answers: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    """Terms of the log-probabilities of answers. Their mean over the pairs or answers of a step is
    the mean of -log p over the tokens that are learned.
    """
    count, tokens = batch["counts"]
    return -answers * (count / tokens.clamp_min(1.0))


def pair_ratios(per_token: TokenLosses, batch: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The sum over a micro-batch's pairs of chosen answers' log-ratios, the number of pairs, and
    the sum of rejected answers'.
    """
    return _sums_of_ratios(per_token.share, *pairs_of(per_token, batch, reference=True))


def _sums_of_ratios(share: float, pairs: Pairs, is_pair: torch.Tensor) -> tuple[torch.Tensor, ...]:
    terms = pairs.up, torch.ones_like(pairs.up), pairs.down
    return tuple(share * t.where(is_pair, 0.0).sum() for t in terms)


def mismatched_ratios(per_token: TokenLosses, batch: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The sum of the log-ratios of a batch of mismatched documents, and their number."""
    ratios = -per_token.values().double() - batch["reference_logprob"].double()
    total = ratios.where(batch["labels"] != IGNORE, 0.0).sum()
    return total, per_token.share * batch["documents"].double()


def divergences(per_token: TokenLosses, sums: torch.Tensor) -> list[torch.Tensor]:
    """Means over all ranks, at least 0.   sums: this rank's first sum, number, and further sums."""
    total = per_token.over_all(sums)
    means = (total / total[1].clamp_min(1.0)).clamp_min(0.0)
    return [means[0], *means[2:]]


@torch.enable_grad()
def saturated(given: Pairs | Answers, names: tuple[str, ...], formula: Formula) -> torch.Tensor:
    """Whether each pair or answer learns nothing: the formula's gradients with respect to these
    log-probabilities are 0 in float32, the dtype in which they reach the head.
    """
    own = [getattr(given, name).detach().requires_grad_() for name in names]
    loss = formula(given._replace(**dict(zip(names, own, strict=True))))
    grads = torch.autograd.grad(loss.sum(), own, materialize_grads=True)
    return (torch.stack(grads).float() == 0).all(0).double()


def preference(
    per_token: TokenLosses,
    batch: Mapping[str, Any],
    *,
    formula: Formula,
    reference: bool,
    loss_ratio: float,
    sft_ratio: float,
) -> tuple[torch.Tensor, ...]:
    """The sum over pairs, their number, REPORTS, with a reference DRIFT, and with `sft_ratio`
    PARTS. Each of the ranks that share a sequence has its share of them.
    """
    pairs, is_pair = pairs_of(per_token, batch, reference)
    if formula.kl:
        own = batch.get("first")
        if own is None:
            own = torch.stack(_sums_of_ratios(per_token.share, pairs, is_pair))
        kl_chosen, kl_rejected = divergences(per_token, own)
        pairs = pairs._replace(kl_chosen=kl_chosen, kl_rejected=kl_rejected)
    parts = [formula(pairs)]
    loss = loss_ratio * parts[0]
    if sft_ratio:
        parts.append(likelihood(pairs.chosen, batch))
        loss = loss + sft_ratio * parts[1]
    terms = [loss, torch.ones_like(loss)]
    with torch.no_grad():
        terms.append(saturated(pairs, ("chosen", "rejected"), formula))
        up, down = (formula.beta * t for t in (pairs.up, pairs.down))
        if not formula.reference:  # rewards are log-probabilities per token
            up, down = formula.beta * pairs.means.chosen, formula.beta * pairs.means.rejected
        terms += [(up > down).double(), up - down, up, down, pairs.chosen, pairs.rejected]
        if reference:
            terms.append(pairs.up.abs() + pairs.down.abs())
        if sft_ratio:
            terms += [part.detach() for part in parts]
    share = per_token.share
    return tuple(share * t.where(is_pair, 0.0).sum() for t in terms)


def unpaired(
    per_token: TokenLosses,
    batch: Mapping[str, Any],
    *,
    formula: Formula,
    reference: bool,
    loss_ratio: float,
    sft_ratio: float,
) -> tuple[torch.Tensor, ...]:
    """The sum over answers, their number, and ALONE, DRIFT, KL and PARTS, as `preference`. The
    likelihood that is added is that of desirable answers.
    """
    answers, is_one = answers_of(per_token, batch, reference)
    if formula.kl:
        answers = answers._replace(kl=divergences(per_token, batch["first"])[0])
    parts = [formula(answers)]
    loss, good = loss_ratio * parts[0], answers.desirable
    if sft_ratio:
        parts.append(likelihood(answers.answer, batch).where(good, 0.0))
        loss = loss + sft_ratio * parts[1]
    terms = [loss, torch.ones_like(loss)]
    with torch.no_grad():
        terms.append(saturated(answers, ("answer",), formula))
        ratio = answers.ratio
        right = torch.where(good, ratio > answers.kl, ratio < answers.kl)
        terms.append(right.double())
        kinds = [k.double() for k in (good, ~good)]
        values = formula.beta * ratio, answers.answer
        terms += [*kinds, *(k * v for k in kinds for v in values)]
        if reference:
            terms.append(ratio.abs())
        if formula.kl:
            terms.append(answers.kl * torch.ones_like(loss))
        if sft_ratio:
            terms += [part.detach() for part in parts]
    share = per_token.share
    return tuple(share * t.where(is_one, 0.0).sum() for t in terms)


def settled(section: Preference) -> Loss:
    row, whole = PREFERENCES[section.loss], section.kl_scope == "step"
    options = {
        "beta": section.beta,
        "label_smoothing": section.label_smoothing,
        "simpo_gamma": section.simpo_gamma,
        "dpop_lambda": section.dpop_lambda,
        "offset_alpha": section.offset_alpha,
        "kto_desirable_weight": section.kto_desirable_weight,
        "kto_undesirable_weight": section.kto_undesirable_weight,
    }
    formula = row(**{name: options[name] for name in row.reads})
    compared = formula.reference and section.reference != "none"
    given = {"formula": formula, "reference": compared}
    given |= {"loss_ratio": section.loss_ratio, "sft_ratio": section.sft_ratio}
    more = ("reference_logprob",) if section.reference == "column" else ()
    drift, parts = DRIFT * compared, PARTS * bool(section.sft_ratio)
    if not formula.paired:
        return Loss(
            functools.partial(unpaired, **given),
            ("labels", "desirable", *more),
            (*ALONE, *drift, *KL * formula.kl, *parts),
            mismatched=formula.kl,
            before=Compared(
                mismatched_ratios if formula.kl else None,
                whole,
                desirable_tokens if section.sft_ratio else None,
            ),
            over=OVER,
            asked={"desirable": f"preference.loss = {section.loss}"},
        )
    asked = {}
    if section.offset_alpha:
        asked = {"reward": f"preference.offset_alpha = {section.offset_alpha}"}
    return Loss(
        functools.partial(preference, **given),
        (*COLUMNS, *more, *asked),
        (*REPORTS, *drift, *parts),
        pairs=True,
        before=Compared(
            pair_ratios if formula.kl and whole else None,
            whole,
            chosen_tokens if section.sft_ratio else None,
        ),
        asked=asked,
    )


ACCEPTS = ("desirable", "reference_logprob", "reward", "prefix")
LOSSES.add(
    "preference", dataclasses.replace(settled(Preference()), settled=settled, accepts=ACCEPTS)
)
