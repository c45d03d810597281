"""Before the first step of a preference run: the policy is its reference, bit for bit, on answers
and, where a loss reads their mean, on mismatched ones.

Every loss has a known value then (the logistic one ln 2), and its gradient is that of a margin of
0. A run that begins elsewhere has another reference than it says, dropout, noise, or numerics that
differ between the two passes, and no later number shows it.
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
    def before_step(self, step: Step) -> None:
        run = self.run
        if step.number > 1:
            return
        found: list[str] = []
        paired = run.loss.pairs
        what, terms = ("pair", TERMS) if paired else ("answer", ("",))

        def look(per_token: TokenLosses, batch: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
            if paired:
                p, there = pairs_of(per_token, batch, reference=True)
                both = ((p.chosen, p.ref_chosen), (p.rejected, p.ref_rejected))
            else:
                p, there = answers_of(per_token, batch, reference=True)
                both = ((p.answer, p.reference),)
            apart = torch.stack([own - other for own, other in both]).ne(0) & there
            count = apart.any(0).double().sum()
            # One synchronization a micro-batch, in the first step alone.
            for term, document in apart.nonzero()[:1].tolist():
                own, other = (float(t[document]) for t in both[term])
                found.append(
                    f"micro-batch {len(found) + 1}, {what} {int(there[: document + 1].sum())}: "
                    f"log-probability of the {terms[term]}answer {own:.9g}, under the reference "
                    f"{other:.9g}"
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
        reference = run.engine.reference
        assert reference is not None
        if not reference.own or run.config.train.load_checkpoint_path is not None:
            run.metrics.say(
                f"reference: other weights than the policy begins with, under which {differing} of "
                f"{pairs} {what}s of the first step have other log-probabilities"
            )
        elif differing:
            here = next((f for f in found if f), "on another process")
            raise ValueError(
                f"the policy is not its reference before the first step: {differing} of {pairs} "
                f"{what}s differ, first {here}. Dropout, noise on weights, and a quantized policy "
                "beside a reference that is not make such a difference; preference.reference_path "
                "names another model"
            )
        else:
            run.metrics.say(
                f"reference: all {pairs} {what}s of the first step have margins of exactly 0"
            )


CALLBACKS.add(
    "step_zero",
    Plugin(StepZero, 35, lambda run: run.done == 0 and run.engine.reference is not None),
)
