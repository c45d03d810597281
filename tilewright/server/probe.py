"""Whether weights have arrived: what an engine makes of fixed tokens, beside training's forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

ROWS, MORE, LENGTH = 4, 32, 16  # rows of the probe, and where these do not tell; tokens of one
BOUND = 1e-4  # of float32, for log-probabilities of the size that they have at first
CLEAR = 4.0  # times the noise, above which a difference is none of rounding
PART = 0.001  # of what the weights have changed, below which a rest is none of theirs
# What float32 sums differ by, in another order, of log-probabilities of this size.
ROUNDING = 2.0**-24


def rows(vocabulary: int, longest: int, count: int) -> list[list[int]]:
    """Tokens, the same for all engines: each row begins with the same one, and has LENGTH more, or
    as many as fit. The first ROWS are those of any larger count.
    """
    length = min(LENGTH, longest - 1)
    drawn = np.random.default_rng(0).integers(0, vocabulary, 1 + MORE * LENGTH).tolist()
    first, rest = drawn[0], drawn[1:]
    return [[first, *rest[LENGTH * i : LENGTH * i + length]] for i in range(count)]


class Noise(NamedTuple):
    """What an engine and training differ by under the weights that both begin with.

    mean: root of the mean square.   most: the largest.   size: of the log-probabilities, the
    largest.   exact: whether both compute in float32.
    """

    mean: float
    most: float
    size: float
    exact: bool

    @classmethod
    def of(cls, given: np.ndarray, wanted: np.ndarray, *, exact: bool) -> Noise:
        away = np.abs(given - wanted)
        return cls(_mean(given - wanted), float(away.max()), float(np.abs(wanted).max()), exact)

    def seen(self, given: np.ndarray, wanted: np.ndarray) -> Noise:
        """With what they differ by under other weights, which have arrived: trained ones may round
        more.
        """
        size = max(1.0, float(np.abs(wanted).max()) / max(self.size, 1e-9))
        return self._replace(mean=max(self.mean, _mean(given - wanted) / size))

    def bounds(self, wanted: np.ndarray) -> tuple[float, float]:
        """The largest difference that is accepted, and its usual size. Both grow with the
        log-probabilities.
        """
        size = float(np.abs(wanted).max())
        grown = max(1.0, size / max(self.size, 1e-9))
        floor = ROUNDING * max(1.0, size)
        most = BOUND if self.exact else 2 * self.most
        return max(most * grown, floor), max(self.mean * grown, floor)


def tells(wanted: np.ndarray, other: np.ndarray, noise: Noise) -> bool:
    """Whether scores under two weights differ by more than rounding."""
    return _mean(wanted - other) > CLEAR * noise.bounds(wanted)[1]


class Verdict(NamedTuple):
    """state: "arrived", "undecided" or "stale".   says: why it is not the first."""

    state: str
    says: str = ""


def judge(
    given: np.ndarray, wanted: np.ndarray, others: Mapping[str, np.ndarray], noise: Noise
) -> Verdict:
    """Whether an engine has the weights that it was sent.

    Args:
        given: [N] log-probabilities of tokens, as the engine says.
        wanted: [N] by training's forward, under the weights that were sent.
        others: [N] under other weights that the engine has had, by their names, the last ones at
            the end. Weights that give the same as those that were sent cannot be told apart.
    """
    if not np.isfinite(given).all():
        return Verdict("stale", "its log-probabilities are not finite")
    most, usual = noise.bounds(wanted)
    rest, worst = _mean(given - wanted), float(np.abs(given - wanted).max())
    said = f"its log-probabilities differ by up to {worst:.3g} from those of training"
    nearest = min(others, key=lambda name: _mean(given - others[name]), default=None)
    if nearest is not None and _mean(given - others[nearest]) < rest:
        apart = _mean(wanted - others[nearest])
        if apart > CLEAR * usual:
            return Verdict("stale", f"{said}: they are those of {nearest}")
    if worst > most:
        return Verdict("stale", f"{said}; accepted are {most:.3g}")
    changed = [_mean(wanted - other) for other in others.values()]
    if changed and changed[-1] <= CLEAR * usual:
        return Verdict(
            "undecided",
            f"the weights before these differ by {changed[-1]:.3g}, and rounding by {usual:.3g}",
        )
    if changed and rest > max(CLEAR * usual, PART * changed[-1]):
        return Verdict(
            "stale",
            f"{said}, {rest / changed[-1]:.0%} of what the weights have changed: some are missing",
        )
    return Verdict("arrived")


def _mean(difference: np.ndarray) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(np.square(difference, dtype=np.float64))))
