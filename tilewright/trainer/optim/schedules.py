"""Schedules of the learning rate: warmup, then a decay, as a factor of each group's peak.

Steps count from 0, as in `transformers.optimization`, in NeMo and in torch's schedulers. Where a
decay has an end, this trainer's last step of it has the last rate, theirs the step after it: a
decay over N steps is their `num_training_steps` or `max_steps` N - 1. Schedules without an end have
no such offset. The warmup is transformers' from lr_start = 0, and NeMo's, whose first step is above
0, from lr_start = lr / (warmup + 1).
"""

from __future__ import annotations

import math

from tilewright.trainer.optim.fields import Rate
from tilewright.trainer.optim.row import SCHEDULES, Position, Schedule
from tilewright.trainer.options import given_options


def _wave(done: float, lr_cycles: float | None = None) -> float:
    cycles = 0.5 if lr_cycles is None else lr_cycles
    return 0.5 * (1 + math.cos(math.pi * (2 * cycles) * done))


def _restarts(done: float, lr_cycles: float | None = None) -> float:
    cycles = 1.0 if lr_cycles is None else lr_cycles
    return 0.5 * (1 + math.cos(math.pi * (cycles * done % 1))) if done < 1 else 0.0


def _power(done: float, lr_power: float = 1.0) -> float:
    return (1 - done) ** lr_power


# transformers: constant, constant_with_warmup, linear, cosine, cosine_with_restarts, polynomial,
# warmup_stable_decay, inverse_sqrt (with its default time scale).
CONSTANT = Schedule(lambda done: 1.0, decays=False, ends=False)
LINEAR = Schedule(lambda done: 1 - done)
SCHEDULES.add("constant", CONSTANT)
SCHEDULES.add("constant_with_warmup", CONSTANT)
SCHEDULES.add("linear", LINEAR)
SCHEDULES.add("cosine", Schedule(_wave, fields=("lr_cycles",)))
SCHEDULES.add("cosine_with_restarts", Schedule(_restarts, fields=("lr_cycles",)))
SCHEDULES.add("polynomial", Schedule(_power, fields=("lr_power",)))
SCHEDULES.add(
    "wsd",
    Schedule(
        lambda at, lr_constant_steps, lr_cycles: _wave(at.done(lr_constant_steps), lr_cycles),
        fields=("lr_constant_steps", "lr_cycles"),
        needs=("lr_constant_steps",),
        by_step=True,
    ),
)
SCHEDULES.add(
    "inverse_sqrt",
    Schedule(
        lambda at: ((at.warm or 10_000) / (at.step + (0 if at.warm else 10_000))) ** 0.5,
        by_step=True,
        ends=False,
        floor=True,
    ),
)
# NeMo: NoamAnnealing (in step 0 it has the rate of step 1, and its lr is the peak times
# sqrt(d_model warmup)), CosineAnnealing, SquareAnnealing, WarmupAnnealing,
# PolynomialHoldDecayAnnealing (WarmupHoldPolicy without a decay is constant_with_warmup); NxDT's
# LinearAnnealingWithWarmUp, with lr_min = 0.
SCHEDULES.add(
    "noam",
    Schedule(
        lambda at: (max(1, at.warm) / max(1, at.step)) ** 0.5,
        by_step=True,
        ends=False,
        floor=True,
    ),
)
SCHEDULES.add("linear_annealing", LINEAR)
SCHEDULES.add("warmup_annealing", LINEAR)
SCHEDULES.add(
    "cosine_annealing",
    Schedule(
        lambda at, lr_constant_steps: _wave(at.done(after=lr_constant_steps)),
        fields=("lr_constant_steps",),
        by_step=True,
    ),
)
SCHEDULES.add("square_annealing", Schedule(lambda done: (1 - done) ** 2, floor=True))
SCHEDULES.add(
    "warmup_hold",
    Schedule(
        lambda at, lr_constant_steps, lr_power: _power(at.done(lr_constant_steps), lr_power),
        fields=("lr_constant_steps", "lr_power"),
        needs=("lr_constant_steps",),
        by_step=True,
    ),
)
# torch: StepLR and ExponentialLR, whose steps begin after the warmup.
SCHEDULES.add(
    "step",
    Schedule(
        lambda at, lr_step_size, lr_gamma: lr_gamma ** ((at.step - at.warm) // lr_step_size),
        fields=("lr_step_size", "lr_gamma"),
        needs=("lr_step_size", "lr_gamma"),
        by_step=True,
        ends=False,
        floor=True,
    ),
)
SCHEDULES.add(
    "exponential",
    Schedule(
        lambda at, lr_gamma: lr_gamma ** (at.step - at.warm),
        fields=("lr_gamma",),
        needs=("lr_gamma",),
        by_step=True,
        ends=False,
        floor=True,
    ),
)


def bounds(total: int, rate: Rate) -> tuple[int, int]:
    """The numbers of steps until the warmup and until the decay have ended."""
    warm, end = rate.lr_warmup_steps, rate.lr_decay_steps
    return (
        warm or round(rate.lr_warmup_ratio * total),
        round(rate.lr_decay_ratio * total) if end is None else end,
    )


def too_short(total: int, rate: Rate) -> str | None:
    """Why the steps of a schedule that ends do not fit into `total` steps, or None."""
    row, (warm, end) = SCHEDULES[rate.lr_decay_style], bounds(total, rate)
    if not row.ends:
        return None
    if end < warm:
        return f"the decay would end before the warmup: after {end} steps, and {warm}"
    constant = rate.lr_constant_steps if "lr_constant_steps" in row.fields else 0
    if constant and warm + constant >= end:
        return f"{warm} steps of warmup and {constant} of a constant rate leave no decay of {end}"
    return None


def schedule(step: int, total: int, rate: Rate) -> float:
    """The factor of the peak learning rate in optimizer step `step` (from 0) of `total`.

    It rises linearly from lr_start / lr, at step 0, to 1 over lr_warmup_steps, or the first
    lr_warmup_ratio of the steps; then it stays, or falls to lr_min / lr, as the row
    `lr_decay_style` says, until lr_decay_steps, or lr_decay_ratio of the steps, and stays there.
    """
    warm, end = bounds(total, rate)
    if step < warm:
        start = rate.lr_start / rate.lr
        return start + (1 - start) * step / warm
    row = SCHEDULES[rate.lr_decay_style]
    if not row.decays:
        return 1.0
    at = Position(step, warm, max(end, warm + 1))
    done = at if row.by_step else at.done()
    least = rate.lr_min / rate.lr
    values = {name: getattr(rate, name) for name in row.fields}
    share = row.share(done, **values, **given_options(row.options, rate.lr_decay_args))
    if not 0 <= share <= 1:
        raise ValueError(
            f"train.lr_decay_style = {rate.lr_decay_style}: its share must be 0 to 1, got {share} "
            f"after {done} of the decay"
        )
    return max(share, least) if row.floor else least + (1 - least) * share
