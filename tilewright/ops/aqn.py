"""Adaptive quantisation noise (AQN): normal values that are a function of (seed, step, layer, element) alone.

Counter-based, so that nothing is stored: forward, recompute and backward make the same values again, wherever they run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AQN:
    """Which noise, and how much of it.

    alpha: its scale, >= 0. On a quantised weight, in units of the local quantisation step; on the weight of a norm, its
        standard deviation. 0 is no noise, bit for bit.
    seed: 0 to 2^63 - 1.   step: of training, 0 to 2^31 - 1.   layer: which weight, 0 to 2^32 - 1; two weights with one
        number get the same noise.
    """

    alpha: float
    seed: int
    step: int = 0
    layer: int = 0

    def __post_init__(self):
        if not isinstance(self.alpha, (int, float)) or not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be a finite number >= 0, got {self.alpha!r}")
        for name, end in (("seed", 2**63), ("step", 2**31), ("layer", 2**32)):
            value = getattr(self, name)
            if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if not 0 <= value < end:
                raise ValueError(f"{name} must be 0 to {end - 1}, got {value}")
