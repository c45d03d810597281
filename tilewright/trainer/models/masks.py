"""Dropout in the layers of a model. A mask is a function of counters: of the run's seed, the step,
the layer, the site, the number of the token's bin in the step, the token's place in its bin, and
the element. So forward, recomputation and backward draw the same one, nothing is stored, and it
does not depend on how a step's bins are divided into ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilewright import ops as tw

AFTER_ATTENTION, AFTER_MLP, WITHIN_MLP = range(3)
# Of the counters of `ops.attention`, whose offset has 29 bits.
MOST_BINS, MOST_LAYERS = 2**20, 2**9


@dataclass(frozen=True)
class Masks:
    """Of a micro-batch [1, T].

    hidden, attention, ffn: the probabilities of an element to be dropped: of what is added to the
        residual stream, of attention's weights, of an MLP's inner activations.
    key: of the run's seed and the step; see `key_of`.
    bins: of each bin, in order: its number in the step, its first token, and its end.
    """

    hidden: float
    attention: float
    ffn: float
    key: int
    bins: tuple[tuple[int, int, int], ...]

    def add(self, x: torch.Tensor, residual: torch.Tensor, layer: int, site: int) -> torch.Tensor:
        """residual + dropout(x), [1, T, H]."""
        return self._drop(x, residual, self.hidden, layer, site)

    def inner(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """dropout(x) of an MLP's inner activations [1, T, I]."""
        return self._drop(x, torch.zeros_like(x), self.ffn, layer, WITHIN_MLP)

    def _drop(
        self, x: torch.Tensor, residual: torch.Tensor, p: float, layer: int, site: int
    ) -> torch.Tensor:
        stream = layer * 3 + site << 32
        return self._joined(
            lambda number, a, b: tw.dropout_add(
                x[:, a:b], residual[:, a:b], p, seed=self.key, offset=stream | number
            ),
            1,
        )

    def attend(
        self, attention: Callable[[int, int, dict], torch.Tensor], layer: int
    ) -> torch.Tensor:
        """Attention's result [1, heads, T, D].

        attention: from the first token of a bin, its end, and the arguments of dropout.
        """

        def of_bin(number: int, a: int, b: int) -> torch.Tensor:
            offset = layer * MOST_BINS + number
            options = {"dropout_p": self.attention, "seed": self.key, "offset": offset}
            return attention(a, b, options)

        return self._joined(of_bin, 2)

    def _joined(self, of_bin: Callable[[int, int, int], torch.Tensor], dim: int) -> torch.Tensor:
        parts = [of_bin(*one) for one in self.bins]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def key_of(seed: int, step: int) -> int:
    """seed: below 2^32.   step: optimizer steps done, below 2^31."""
    return seed << 31 | step
