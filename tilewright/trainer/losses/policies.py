"""Policy losses of sampled tokens: train.loss = policy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tilewright.ops.loss import policy
from tilewright.ops.loss.documents import Documents as OneSequence
from tilewright.ops.loss.policy import Options, Tokens
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.losses.loss import LOSSES, Loss
from tilewright.trainer.losses.policy_fields import Policy
from tilewright.trainer.losses.preferences import by_document
from tilewright.trainer.models.head import TokenLosses

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
        return self.per_token.over_ranks(by_document(values[None], self.lengths))

    def each(self, values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(self.lengths, output_size=int(self.lengths.sum()))


def policy_loss(
    per_token: TokenLosses,
    batch: Mapping[str, Any],
    *,
    name: str,
    options: Options,
    columns: Mapping[str, str],
    by_documents: bool,
    reports: tuple[str, ...],
) -> tuple[torch.Tensor, ...]:
    """The sum over tokens, or over documents of means, their number, sums of statistics over
    tokens, and the number of tokens.
    """
    documents = Documents(per_token, batch["lengths"])
    learned = (batch["labels"] != IGNORE)[0].double()
    given = {tensor: batch[column][0].double() for tensor, column in columns.items()}
    logprob = -per_token.values()[0].double()
    tokens = Tokens(logprob, learned, **given)
    if "documents" in policy.needed(name, options):
        tokens = tokens._replace(documents=documents).with_ratio()
    losses, count = policy.losses(name, tokens, options), learned.sum()
    found = policy.statistics(name, tokens, options)
    further = [*(found[report] * count for report in reports), count]
    if not by_documents:
        return losses.sum(), count, *further
    lengths = documents.sums(learned)
    share = per_token.share
    there = share * (lengths > 0).sum().double()
    return (losses / documents.each(lengths).clamp_min(1.0)).sum(), there, *further


def settled(section: Policy) -> Loss:
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
    options = policy.settled(section.loss, given)
    reads = policy.needed(section.loss, options)
    columns = {tensor: column for tensor, column in COLUMNS.items() if tensor in reads}
    # Of one token, for the names of the statistics.
    one = dict.fromkeys((*columns, "logprob"), torch.zeros(1)) | {"valid": torch.ones(1)}
    tokens = Tokens(**one, documents=OneSequence.of(torch.tensor([0, 1]), 1))
    named = policy.statistics(section.loss, tokens, options)
    reports = tuple(n for n in named if n not in NO_MEANS)
    function = functools.partial(
        policy_loss,
        name=section.loss,
        options=options,
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
