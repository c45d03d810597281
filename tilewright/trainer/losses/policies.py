"""Policy losses of sampled tokens: train.loss = policy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tilewright.ops.loss import policy
from tilewright.ops.loss.documents import Documents as OneSequence
from tilewright.ops.loss.policy import Formula, Tokens
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.losses.loss import LOSSES, Loss
from tilewright.trainer.losses.policy_fields import Policy
from tilewright.trainer.models.head import TokenLosses, by_document

# Tensors that formulas read -> columns.
COLUMNS = {
    "advantage": "advantage",
    "old_logprob": "old_logprob",
    "rollout_logprob": "rollout_logprob",
    "ref_logprob": "reference_logprob",
    "teacher_logprob": "teacher_logprob",
}
# A maximum is no sum, and this is no mean of tokens.
NO_MEANS = {"ratio_max"}


class Documents(NamedTuple):
    """As `ops.loss.documents.Documents`, where ranks may share a sequence."""

    per_token: TokenLosses
    lengths: torch.Tensor

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        return self.per_token.over_ranks(by_document(values, self.lengths))

    def each(self, values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(self.lengths, output_size=int(self.lengths.sum()))


def policy_loss(
    per_token: TokenLosses,
    batch: Mapping[str, Any],
    *,
    loss: Formula,
    columns: Mapping[str, str],
    by_documents: bool,
    reports: tuple[str, ...],
) -> tuple[torch.Tensor, ...]:
    """The sum over tokens, or over documents of means, their number, sums of statistics over
    tokens, and the number of tokens.
    """
    documents = Documents(per_token, batch["lengths"])
    learned = (batch["labels"] != IGNORE)[0].double()
    count = there = learned.sum()
    weight = None
    if by_documents:
        lengths = documents.sums(learned)
        there = per_token.share * (lengths > 0).sum().double()
        weight = 1.0 / documents.each(lengths).clamp_min(1.0)
    given = {tensor: batch[column] for tensor, column in columns.items()}
    weights = {} if weight is None else {"token_weight": weight[None]}
    fused = per_token.policy(loss, **given, **weights)
    logprob = (-per_token.values() if fused is None else fused[1])[0].double()
    tokens = Tokens(
        logprob, learned, **{n: t[0].double() for n, t in given.items()}, token_weight=weight
    )
    if "documents" in loss.needed:
        tokens = tokens._replace(documents=documents).with_ratio()
    total = policy.losses(loss, tokens).sum() if fused is None else fused[0]
    means = policy.statistics(loss, tokens)
    return total, there, *(means[report] * count for report in reports), count


def settled(section: Policy) -> Loss:
    formula = policy.FORMULAS[section.loss]
    given = {
        "clip_low_threshold": section.clip_low_threshold,
        "clip_high_threshold": section.clip_high_threshold,
        "dual_clip": section.dual_clip,
        "use_tis": section.use_tis,
        "tis_clip_low": section.tis_clip_low,
        "tis_clip_high": section.tis_clip_high,
        "icepop_beta": section.icepop_beta,
        "beta": section.beta,
        "kl_type": section.kl_type,
        "ratio_type": section.ratio_type,
    }
    loss = formula(**{n: given[n] for n in formula.reads if given[n] is not None})
    reads = loss.needed
    columns = {tensor: column for tensor, column in COLUMNS.items() if tensor in reads}
    # One token, which suffices for the names of the statistics.
    one = dict.fromkeys((*columns, "logprob"), torch.zeros(1)) | {"valid": torch.ones(1)}
    tokens = Tokens(**one, documents=OneSequence.of(torch.tensor([0, 1]), 1))
    named = policy.statistics(loss, tokens)
    reports = tuple(n for n in named if n not in NO_MEANS)
    function = functools.partial(
        policy_loss,
        loss=loss,
        columns=columns,
        by_documents=section.average == "documents",
        reports=reports,
    )
    return Loss(
        function,
        ("labels", *columns.values()),
        (*reports, "policy_tokens"),
        tempered=True,
        section="policy",
        over=dict.fromkeys(reports, "policy_tokens"),
        asked=dict.fromkeys(columns.values(), f"policy.loss = {section.loss}"),
    )


ACCEPTS = (*COLUMNS.values(),)
LOSSES.add("policy", dataclasses.replace(settled(Policy()), settled=settled, accepts=ACCEPTS))
