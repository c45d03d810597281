"""Losses of pairs of answers, of which one is preferred: train.loss = preference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.ops.loss.preference import Formula, Options, Pairs
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.config.preference import Preference
from tilewright.trainer.losses.loss import Loss
from tilewright.trainer.models.head import TokenLosses
from tilewright.trainer.tables import LOSSES, PREFERENCES

CHOSEN, REJECTED = 0, 1  # values of the column role
COLUMNS = ("labels", "pair", "role")
# Over the pairs. drift: how far both answers are from the reference, in nats.
REPORTS = (
    "reward_accuracy",
    "reward_margin",
    "reward_chosen",
    "reward_rejected",
    "logprob_chosen",
    "logprob_rejected",
    "drift",
)


def by_document(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Sums [documents] of values [1, T], in float64.

    lengths: the number of these tokens that each document has, in order.
    """
    return torch.segment_reduce(values[0].double(), "sum", lengths=lengths, unsafe=True)


def pairs_of(
    per_token: TokenLosses, batch: Mapping[str, Any], reference: bool
) -> tuple[Pairs, torch.Tensor]:
    """Of each document the pair that it is the chosen answer of, and whether it is one: its
    rejected answer is the document after it. Elsewhere the pair is filled, and differentiable.
    """
    labels, lengths = batch["labels"], batch["lengths"]
    learned = labels != IGNORE
    columns = [-per_token.values(), learned]
    if reference:
        columns.append(batch["reference_logprob"].where(learned, 0.0))
    sums = per_token.over_ranks(torch.stack([by_document(c, lengths) for c in columns]))
    if not reference:
        sums = torch.cat((sums, sums[:1].detach()))
    is_pair = batch["role"] == CHOSEN
    after = sums.roll(-1, 1)
    # A document that is no chosen answer has one token of log-probability -1 everywhere.
    fill = sums.new_tensor([-1.0, 1.0, -1.0])[:, None]
    chosen, rejected = (torch.where(is_pair, t, fill) for t in (sums, after))
    pairs = Pairs(chosen[0], rejected[0], chosen[2], rejected[2], chosen[1], rejected[1])
    return pairs, is_pair


def preference(
    per_token: TokenLosses,
    batch: Mapping[str, Any],
    *,
    formula: Formula,
    options: Options,
    sft_ratio: float,
) -> tuple[torch.Tensor, ...]:
    """The sum over pairs, their number, and REPORTS. Each of the ranks that share a sequence has
    its share of them.
    """
    pairs, is_pair = pairs_of(per_token, batch, formula.reference)
    loss = formula.function(pairs, options)
    if sft_ratio:
        loss = loss - sft_ratio * pairs.means.chosen
    found = [loss, torch.ones_like(loss)]
    with torch.no_grad():
        up, down = (options.beta * t for t in (pairs.up, pairs.down))
        if not formula.reference:  # rewards are log-probabilities per token
            up, down = options.beta * pairs.means.chosen, options.beta * pairs.means.rejected
        found += [(up > down).double(), up - down, up, down, pairs.chosen, pairs.rejected]
        if formula.reference:
            found.append(pairs.up.abs() + pairs.down.abs())
    share = per_token.share
    return tuple(share * t.where(is_pair, 0.0).sum() for t in found)


def settled(section: Preference) -> Loss:
    formula = PREFERENCES[section.loss]
    options = Options(
        beta=section.beta,
        label_smoothing=section.label_smoothing,
        simpo_gamma=section.simpo_gamma,
        dpop_lambda=section.dpop_lambda,
    )
    function = functools.partial(
        preference, formula=formula, options=options, sft_ratio=section.sft_ratio
    )
    more = ("reference_logprob",) if section.reference == "column" else ()
    reports = REPORTS if formula.reference else REPORTS[:-1]
    return Loss(function, (*COLUMNS, *more), reports, pairs=True)


LOSSES.add("preference", dataclasses.replace(settled(Preference()), settled=settled))
