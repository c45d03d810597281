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
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.trainer.losses.preferences import answers_of, pairs_of
from tilewright.trainer.models.head import TokenLosses
from tilewright.trainer.plugins.callback import Callback, Plugin, Step
from tilewright.trainer.tables import CALLBACKS

TERMS = ("chosen ", "rejected ")


class StepZero(Callback):
    # Long: what is compared, and a sentence for each of four outcomes.
    def before_step(self, step: Step) -> None:
        run, reference = self.run, self.run.engine.reference
        if step.number > 1:
            return
        assert reference is not None
        found: list[str] = []
        largest = [0.0]
        paired = run.loss.pairs
        what, terms = ("pair", TERMS) if paired else ("answer", ("",))

        def look(per_token: TokenLosses, batch: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
            if paired:
                p, there = pairs_of(per_token, batch, reference=True)
                parts = (
                    (p.chosen, p.rejected),
                    (p.ref_chosen, p.ref_rejected),
                    (p.chosen_tokens, p.rejected_tokens),
                )
            else:
                p, there = answers_of(per_token, batch, reference=True)
                parts = (p.answer,), (p.reference,), (p.tokens,)
            own, other, tokens = (torch.stack(of) for of in parts)
            apart = (own - other).abs() * there
            largest.append(float(apart.nan_to_num(nan=torch.inf).max()))
            apart = (apart <= reference.bound * (own.abs() + tokens)).logical_not() & there
            count = apart.any(0).double().sum()
            # One synchronization a micro-batch, in the first step alone.
            for term, document in apart.nonzero()[:1].tolist():
                found.append(
                    f"micro-batch {len(found) + 1}, {what} {int(there[: document + 1].sum())}: "
                    f"log-probability of the {terms[term]}answer {float(own[term][document]):.9g}, "
                    f"under the reference {float(other[term][document]):.9g}"
                )
            if not apart.any():
                ratio = float(batch["first"][0]) if run.loss.mismatched else 0.0
                count = count + bool(ratio)
                found.append(
                    f"micro-batch {len(found) + 1}: log-probabilities of answers to other prompts "
                    f"and those under the reference differ by {ratio:.9g}"
                    if ratio
                    else ""
                )
            return per_token.share * count, per_token.share * there.double().sum()

        own = dataclasses.replace(run.loss, function=look, reports=(), over={})
        sums = run.engine.forward(step.batches, own, training=True)
        differing, pairs = (round(n) for n in sums.values)
        most = max(run.mesh.control.gather(max(largest)))
        if not reference.own or run.config.train.load_checkpoint_path is not None:
            run.metrics.say(
                f"reference: other weights than the policy begins with, under which {differing} of "
                f"{pairs} {what}s of the first step have other log-probabilities"
            )
        elif differing:
            here = next((f for f in found if f), "on another process")
            allowed = ""
            if reference.bound:
                allowed = (
                    f" by more than {reference.bound:g} nats for each nat and token of an answer, "
                    "as much as other packing may change"
                )
            raise ValueError(
                f"the policy is not its reference before the first step: {differing} of {pairs} "
                f"{what}s differ{allowed}, first {here}. Dropout, noise on weights, and a quantized "
                "policy beside a reference that is not make such a difference; "
                "preference.reference_path names another model"
            )
        elif most:
            run.metrics.say(
                f"reference: log-probabilities of the first step's {pairs} {what}s differ by up to "
                f"{most:.3g} nats from the precomputed ones, which were in rows packed otherwise; "
                "model.batch_invariant makes them equal"
            )
        else:
            run.metrics.say(
                f"reference: all {pairs} {what}s of the first step have margins of exactly 0"
            )


CALLBACKS.add(
    "step_zero",
    Plugin(StepZero, 35, lambda run: run.done == 0 and run.engine.reference is not None),
)
