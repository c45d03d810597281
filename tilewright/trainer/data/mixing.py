"""How the samples of several data sets are merged into one order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Mixing = Literal["concat", "random", "interleave_under", "interleave_over"]
# As the datasets package calls them.
UNTIL: dict[str, Literal["first_exhausted", "all_exhausted"]] = {
    "interleave_under": "first_exhausted",
    "interleave_over": "all_exhausted",
}


def mixed(
    parts: Sequence[np.ndarray],
    how: Mixing = "concat",
    weights: Sequence[float] | None = None,
    count: int | None = None,
    seed: int = 0,
) -> np.ndarray:
    """The samples of an epoch, in order. Deterministic in the seed.

    Args:
        parts: the samples of each data set, in its order.
        how: concat, one set after the other; random, each sample of a set that is drawn by the
            weights, the set's next one, and from its beginning again after its last; interleave_*,
            of sets in turns, or drawn by the weights, until the first set (under) or the last one
            (over) has ended, the others from their beginning again.
        weights: one for each set; None: its number of samples (random), or turns (interleave).
        count: number of samples, for random; None: as many as there are.

    Raises ValueError for a set with a weight and without a sample.
    """
    if how == "concat":
        return np.concatenate(parts)
    if weights is None:
        parts = [part for part in parts if len(part)]
    elif empty := [i + 1 for i, part in enumerate(parts) if not len(part)]:
        raise ValueError(f"data.mixing = {how}: data set {empty[0]} has a weight, and no sample")
    if how in UNTIL:
        return _interleaved(parts, how, weights, seed)
    shares = np.array([len(p) for p in parts] if weights is None else weights, np.float64)
    rng = np.random.default_rng(seed)
    total = sum(map(len, parts)) if count is None else count
    drawn = rng.choice(len(parts), total, p=shares / shares.sum())
    merged = np.empty(total, np.int64)
    for i, part in enumerate(parts):
        at = (drawn == i).nonzero()[0]
        merged[at] = np.resize(part, len(at))
    return merged


def _interleaved(
    parts: Sequence[np.ndarray], how: Mixing, weights: Sequence[float] | None, seed: int
) -> np.ndarray:
    import datasets

    shares = None if weights is None else [w / sum(weights) for w in weights]
    sets = [datasets.Dataset.from_dict({"sample": part}) for part in parts]
    mixture = datasets.interleave_datasets(
        sets, probabilities=shares, seed=seed, stopping_strategy=UNTIL[how]
    )
    return np.asarray(mixture.with_format("numpy")["sample"][:], np.int64)
