"""The numbers behind NF4's codes, and behind the 8-bit codes of its scales."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch

# float32 values of the 16 codes: quantiles of a normal distribution, scaled to [-1, 1], with an
# exact 0.
CODES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

# The 15 bounds between neighboring codes' values; rounded to float32, they are those that float32
# gives, since the sums here are exact.
BOUNDS = tuple((a + b) / 2 for a, b in itertools.pairwise(CODES))


def codes() -> torch.Tensor:
    return torch.tensor(CODES, dtype=torch.float32)


def bounds() -> torch.Tensor:
    return torch.tensor(BOUNDS, dtype=torch.float32)


def dynamic_map() -> torch.Tensor:
    """The 256 float32 values of the 8-bit code for scales: signed, in seven decades below 1 with 1,
    2, 4, ... 64 values each at the middles of even steps (dynamic tree quantization, arXiv
    1511.04561), and 0 and 1.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = (10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        values += [*middles, *(-m for m in middles)]
    return torch.tensor(sorted(values), dtype=torch.float32)


class Tables(NamedTuple):
    """pairs: int64 [256], for each byte the two float32 values, the even element's first in
    memory.
    """

    codes: torch.Tensor
    bounds: torch.Tensor
    map: torch.Tensor
    pairs: torch.Tensor


@functools.cache
def on(device: torch.device) -> Tables:
    """Kept per device. For launchers, which compilers do not trace."""
    pairs = torch.stack((codes().repeat_interleave(16), codes().repeat(16)), -1)
    tables = codes(), bounds(), dynamic_map(), pairs.view(torch.int64).view(-1)
    return Tables(*(t.to(device) for t in tables))
