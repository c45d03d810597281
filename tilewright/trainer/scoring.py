"""Scores of documents: log-probabilities of their labels, entropies and hits, whatever the packing
and the layout.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tilewright.ops.attention.context_parallel import unshard
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.data.batches import Bins, evaluation_batches
from tilewright.trainer.engine import Batch, Engine, Sums
from tilewright.trainer.losses.loss import Loss, count_labels
from tilewright.trainer.models.head import LossFunction, TokenLosses
from tilewright.trainer.models.reward_head import Scores
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts


class Score(NamedTuple):
    """The score of one document.

    document: its number in the data set.   tokens: the number of labels that are not ignored. The
    other numbers are sums over these labels, in nats.   hits: labels that are the most probable
    token.   logprobs: the log-probability of each of these labels, if asked for.
    """

    document: int
    tokens: int
    logprob: float
    entropy: float
    hits: int
    logprobs: list[float] | None = None


def statistics(per_token: TokenLosses, batch: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The loss of language modeling, and `TokenLosses.statistics`, as a loss for `Engine`."""
    logprob, entropy, hits = per_token.statistics()
    return -logprob.double().sum(), count_labels(batch), logprob, entropy, hits


class Rewarded(NamedTuple):
    """What a reward model says of one document, by its number in the data set."""

    document: int
    reward: float


def of_documents(given: Scores, batch: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The rewards of a batch's documents, as a loss for `Engine`."""
    rewards = given.rewards(batch)
    return rewards.sum(), count_labels(batch), rewards


def batches_of(
    bins: Bins, size: int, mesh: Mesh, most: float | None = None
) -> Iterable[dict[str, torch.Tensor]]:
    """This rank's batches of a data set to evaluate on. See `evaluation_batches`."""
    return evaluation_batches(
        bins,
        size,
        mesh.batch_rank,
        mesh.layout.data,
        pin=mesh.device.type == "cuda",
        cp=mesh.context,
        tp=mesh.layout.tp,
        most=most,
    )


@dataclasses.dataclass(frozen=True)
class WithHits(Loss):
    """A loss that also reports how many of the labels are the most probable token, and how many
    labels there are: names that no other loss may have.
    """

    def __post_init__(self) -> None:
        pass

    @classmethod
    def beside(cls, loss: Loss) -> WithHits:
        """The head's products are computed once."""

        def function(per_token: TokenLosses, batch: Mapping[str, Any]) -> tuple[Any, ...]:
            *_, hits = per_token.statistics()
            return *loss(per_token, batch), hits.sum(), count_labels(batch)

        given = {f.name: getattr(loss, f.name) for f in dataclasses.fields(loss)}
        return cls(**given | {"function": function, "reports": (*loss.reports, "hits", "labels")})


def evaluation(
    engine: Engine, sets: Mapping[str, Iterable[Batch]], loss: LossFunction, *, accuracy: bool
) -> dict[str, float]:
    """What an evaluation reports, of all sets together: eval_loss, eval_NAME for each further sum
    of the loss, eval_perplexity of a loss in nats, and with `accuracy` eval_accuracy; and the same
    of each of several sets, as eval_loss/SET. {} if no batch has a label. Every rank must call it.

    What follows draws the random numbers that it would have drawn without it.
    """
    if not sets:
        return {}
    loss = Loss.of(loss)
    own, device = WithHits.beside(loss) if accuracy else loss, engine.mesh.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        by_set = {name: engine.forward(batches, own) for name, batches in sets.items()}
    values = _reported(Sums.joined(list(by_set.values())), loss)
    if len(by_set) > 1:
        for name, sums in by_set.items():
            values |= {f"{k}/{name}": v for k, v in _reported(sums, loss).items()}
    return values


def reported_names(sets: Collection[str], loss: LossFunction, *, accuracy: bool) -> list[str]:
    """The names of what `evaluation` reports, of sets with labels."""
    if not sets:
        return []
    loss = Loss.of(loss)
    names = ["eval_loss", *(f"eval_{name}" for name in loss.reports)]
    names += ["eval_perplexity"] * loss.nats + ["eval_accuracy"] * accuracy
    return names + [f"{n}/{one}" for one in sets for n in names if len(sets) > 1]


def _reported(sums: Sums, loss: Loss) -> dict[str, float]:
    """{} if no batch had a label."""
    if not sums.denominator:
        return {}
    more = sums.reported()
    hits, labels = more.pop("hits", 0.0), more.pop("labels", 0.0)
    values = {"eval_loss": sums.mean} | {f"eval_{name}": v for name, v in more.items()}
    if loss.nats:
        # Above 709 a float64 does not hold it.
        values["eval_perplexity"] = math.exp(min(sums.mean, 709.0))
    if labels:
        values["eval_accuracy"] = hits / labels
    return values


def passes(
    parts: Parts, mesh: Mesh, batches: Iterable[Batch], function: LossFunction
) -> Iterator[tuple[Batch, list[torch.Tensor] | None]]:
    """Each micro-batch, and the labels and what a function reports of its packed row, [T, ...]; or
    None on ranks that are not the first of those that share the row, or not the last of a pipeline.
    Every rank must exhaust it.
    """
    for batch in batches:
        [outcome] = parts.forward([batch], function)
        whole = None
        if outcome.more:  # of a pipeline's stages the last has them
            labels = batch["labels"].to(mesh.device)
            whole = [unshard(t, 1, mesh.context)[0] for t in (labels, *outcome.more)]
        yield batch, whole if mesh.first_of_row else None


def documents(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """The number of each document of a packed row, its first token, and where it ends."""
    ends = itertools.pairwise(batch["cu_seqlens"].tolist())
    for number, (first, end) in zip(batch["document"].tolist(), ends, strict=True):
        if number >= 0:  # else it is padding
            yield number, first, end


def scores(
    engine: Engine,
    batches: Iterable[Batch],
    *,
    each_token: bool = False,
    loss: Loss | None = None,
) -> Iterator[list[Score]]:
    """The scores of one micro-batch of every rank at a time, on every rank.

    A document's sums are exact sums of its tokens' float32 numbers, rounded to float64 once: they
    do not depend on which rank, micro-batch or bin it is in, as far as its tokens' numbers do not
    (`model.batch_invariant`).

    Args:
        batches: with the column `document` (`Bins(numbered=True)`). Ranks have the same number.
        each_token: with the log-probability of each label.
        loss: whose evaluations have the same log-probabilities; None: those of the model.
    """
    with engine.evaluating(loss):
        for batch, whole in passes(engine.parts, engine.mesh, batches, statistics):
            own = [] if whole is None else list(_of_documents(batch, *whole, each_token=each_token))
            yield [Score(*s) for rank in engine.mesh.control.gather(own) for s in rank]


def rewards(engine: Engine, batches: Iterable[Batch]) -> Iterator[list[Rewarded]]:
    """The rewards of one micro-batch of every rank at a time, on every rank, as `scores` has them.

    With `model.batch_invariant` a document's reward has the same bits in every batch; without, what
    else is in the batch may change its last bits, since libraries choose the order of a product's
    sums by the number of its rows.
    """
    mesh = engine.mesh
    with engine.evaluating():
        for batch in batches:
            [outcome] = engine.parts.forward([batch], of_documents)
            own: list[Rewarded] = []
            if outcome.more and mesh.first_of_row:  # of a pipeline's stages the last has them
                each = zip(batch["document"].tolist(), outcome.more[0].tolist(), strict=True)
                own = [Rewarded(*one) for one in each if one[0] >= 0]  # others are padding
            yield [Rewarded(*r) for rank in mesh.control.gather(own) for r in rank]


def _of_documents(
    batch: Batch,
    labels: torch.Tensor,
    *tokens: torch.Tensor,
    each_token: bool,
) -> Iterator[Score]:
    """The scores of a packed row's documents.   labels, tokens: [T], of the whole row."""
    counted = labels != IGNORE
    for number, first, end in documents(batch):
        logprobs, entropies, hits = (t[first:end][counted[first:end]].tolist() for t in tokens)
        yield Score(
            number,
            len(logprobs),
            math.fsum(logprobs),
            math.fsum(entropies),
            sum(hits),
            logprobs if each_token else None,
        )
