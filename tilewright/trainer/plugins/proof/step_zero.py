"""Before the first step of a preference run: the policy is its reference, bit for bit, on answers
and, where a loss reads their mean, on mismatched ones.

Every loss has a known value then (the logistic one ln 2), and its gradient is that of a margin of
0. A run that begins elsewhere has another reference than it says, dropout, noise, or numerics that
differ between the two passes, and no later number shows it.

A reference that was computed earlier may have been in rows packed otherwise, in which a token's
bits are others unless the model is batch-invariant: such a run is held to a bound.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from tilewright.nn.sharded import shard
from tilewright.nn.weights import base_weights, is_adapter
from tilewright.trainer.data.sources import place_of
from tilewright.trainer.losses.preferences import answers_of, pairs_of
from tilewright.trainer.models.head import TokenLosses
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.plugins.callback import Callback, Step
from tilewright.trainer.precomputed import Precomputed

TERMS = ("chosen ", "rejected ")


class First(NamedTuple):
    """The first difference of a rank.   micro_batch: from 1.   document: its number in the data
    set; -1: the mean of mismatched answers.   said: the numbers of both.
    """

    micro_batch: int
    document: int
    said: str


class Compared(NamedTuple):
    """A step's documents, or pairs, over all ranks: how many differ, and how many there are; the
    largest difference in nats, and this rank's first that counts.
    """

    differing: int
    count: int
    largest: float
    first: First | None


class StepZero(Callback):
    def before_step(self, step: Step) -> None:
        run, reference = self.run, self.run.engine.reference
        if step.number > 1:
            return
        compared = self.compared(step, 0.0 if reference is None else reference.bound)
        what = "pairs" if run.loss.pairs else "answers"
        if reference is None or not reference.own:
            which = "other weights than the policy begins with"
            if reference is None:
                which = "the column reference_logprob"
            run.metrics.say(
                f"reference: {which}, under which {compared.differing} of {compared.count} {what} "
                f"of the first step have other log-probabilities{self.begins()}"
            )
        elif compared.differing:
            self.refuse(compared, what, reference.bound)
        elif most := max(run.mesh.control.gather(compared.largest)):
            run.metrics.say(
                f"reference: log-probabilities of the first step's {compared.count} {what} differ "
                f"by up to {most:.3g} nats from the precomputed ones, which were in rows packed "
                "otherwise; model.batch_invariant makes them equal"
            )
        else:
            run.metrics.say(
                f"reference: all {compared.count} {what} of the first step have margins of "
                "exactly 0"
            )

    def compared(self, step: Step, bound: float) -> Compared:
        """bound: see `reference.Compared`."""
        run, number = self.run, itertools.count(1)
        terms = TERMS if run.loss.pairs else ("",)
        firsts: list[First] = []
        largest = [0.0]

        def look(per_token: TokenLosses, batch: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
            own, other, tokens, there = _terms(per_token, batch, run.loss.pairs)
            apart = (own - other).abs() * there
            largest.append(float(apart.nan_to_num(nan=torch.inf).max()))
            wrong = ((apart <= bound * (own.abs() + tokens)).logical_not() & there).any(0)
            count, here = wrong.double().sum(), next(number)
            # One synchronization a micro-batch, in the first step alone.
            for i in wrong.nonzero()[:1, 0].tolist():
                both = zip(terms, own[:, i].tolist(), other[:, i].tolist(), strict=True)
                firsts.append(First(here, int(batch["document"][i]), _said(both)))
            ratio = float(batch["first"][0]) if run.loss.mismatched and not wrong.any() else 0.0
            if ratio:
                count = count + 1
                firsts.append(
                    First(
                        here,
                        -1,
                        "log-probabilities of answers to other prompts and those under the "
                        f"reference differ by {ratio:.9g} in all",
                    )
                )
            return per_token.share * count, per_token.share * there.double().sum()

        own = dataclasses.replace(run.loss, function=look, reports=(), over={})
        sums = run.engine.forward(step.batches, own, training=True)
        differing, count = (round(n) for n in sums.values)
        return Compared(differing, count, max(largest), firsts[0] if firsts else None)

    def begins(self) -> str:
        """Names adapters with which the policy begins and its reference does not, if any."""
        parts = self.run.engine.parts
        added = _union(self.run.mesh.control.gather(list(adapters_that_add(parts.model))))
        return f"; {added[0]}" if added else ""

    def refuse(self, compared: Compared, what: str, bound: float) -> None:
        """Raises ValueError, with the same words on every rank."""
        run = self.run
        firsts = [First(*f) for f in run.mesh.control.gather(compared.first) if f is not None]
        first = min(firsts, key=lambda f: f.micro_batch)
        causes = _union(run.mesh.control.gather([*self.causes()]))
        allowed = (
            f" by more than {bound:g} nats for each nat and token of an answer, as much as other "
            "packing may change"
            if bound
            else ""
        )
        raise ValueError(
            f"the policy is not its reference before the first step: {compared.differing} of "
            f"{compared.count} {what} differ{allowed}, first {self.place(first)}: {first.said}. "
            + (f"Found: {'; '.join(causes)}" if causes else self.nothing_found())
        )

    def place(self, first: First) -> str:
        """Where a user finds a document."""
        run, origin = self.run, ""
        here = f"micro-batch {first.micro_batch}"
        if first.document < 0:
            return here
        if run.mesh.main:
            origin = run.batches.bins.origin(first.document)
            if origin:
                origin = place_of(origin, run.config.data.datasets, run.config.data)
        origin = run.mesh.control.broadcast(origin)
        return f"{origin or f'document {first.document} of the data set'} ({here})"

    def causes(self) -> Iterator[str]:
        """What this rank sees that makes the two differ."""
        run, reference = self.run, self.run.engine.reference
        t, lora = run.config.train, run.config.lora
        for name in ("hidden_dropout", "attention_dropout", "ffn_dropout"):
            if (rate := getattr(t, name)) and not t.dropout_warmup_steps:
                yield f"train.{name} = {rate}, which the reference's pass does not have"
        if lora.enable_aqn:
            yield "lora.enable_aqn = True, noise on the policy's weights alone"
        policy = run.engine.parts
        policy.reshard()  # a forward pass leaves weights gathered
        if not (reference is not None and reference.moved()):
            yield from adapters_that_add(policy.model)
        if (other := getattr(reference, "parts", None)) is not None:
            yield from differences(policy, other)

    def nothing_found(self) -> str:
        reference = self.run.engine.reference
        if isinstance(reference, Precomputed):
            return (
                f"The settings of this run do not explain it: {reference.cache.folder} holds other "
                "numbers than its reference has, which was computed on another machine or by "
                "another version, or has changed; without the folder it is computed again"
            )
        return (
            "Adapters, weights, numerics and dropout are not what differs: some op gives other "
            "bits in its second call"
        )


def _terms(
    per_token: TokenLosses, batch: Mapping[str, Any], paired: bool
) -> tuple[torch.Tensor, ...]:
    """Log-probabilities [terms, documents] of answers, those under the reference, the answers'
    tokens, and which documents have an answer, or are the first of a pair.
    """
    if paired:
        p, there = pairs_of(per_token, batch, reference=True)
        own, other = (p.chosen, p.rejected), (p.ref_chosen, p.ref_rejected)
        tokens = p.chosen_tokens, p.rejected_tokens
    else:
        p, there = answers_of(per_token, batch, reference=True)
        own, other, tokens = (p.answer,), (p.reference,), (p.tokens,)
    return *(torch.stack(of) for of in (own, other, tokens)), there


def _said(both: Iterator[tuple[str, float, float]]) -> str:
    return ", ".join(
        f"log-probability of the {term}answer {own:.9g}, under the reference {other:.9g} "
        f"({own - other:+.3g})"
        for term, own, other in both
    )


def _union(of_ranks: list[list[str]]) -> list[str]:
    return [*dict.fromkeys(itertools.chain.from_iterable(of_ranks))]


def adapters_that_add(model: nn.Module) -> Iterator[str]:
    """The first adapter whose B is not 0, in words."""
    for name, p in model.named_parameters():
        if is_adapter(name) and name.endswith(("B", "change")) and bool(shard(p).any()):
            yield f"the policy begins with adapters that add something, {name} is not 0"
            return


def differences(policy: Parts, other: Parts) -> Iterator[str]:
    """What differs between a policy and the model that it begins as: the first weight, and each
    part of the numerics.
    """
    mine, theirs = (dict(base_weights(parts.model)) for parts in (policy, other))
    for name in mine.keys() & theirs.keys():
        if isinstance(mine[name], nn.Parameter) != isinstance(theirs[name], nn.Parameter):
            yield (
                "the policy's weights are quantized (lora.quant_format) and the reference's are "
                "not; preference.reference = adapters_off compares with the quantized ones"
            )
            break
    for name, p in mine.items():
        q = theirs.get(name)
        if not isinstance(p, nn.Parameter) or not isinstance(q, nn.Parameter):
            continue
        a, b = shard(p), shard(q)
        if a.shape == b.shape and not torch.equal(a, b.to(a.dtype)):
            yield f"the reference has another {name} than the policy"
            break
    facts = [
        {
            **parts.model.ops.names(),
            **dataclasses.asdict(parts.model.ops.numerics),
            "matrix products": str(parts.autocast or next(parts.model.parameters()).dtype),
        }
        for parts in (policy, other)
    ]
    for name, value in facts[0].items():
        if value != facts[1][name]:
            yield f"unlike numerics: {name} {value} in the policy, {facts[1][name]} in the reference"
