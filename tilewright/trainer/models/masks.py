"""Dropout in the layers of a model. A mask is a function of counters: the run's seed, the step,
the layer, the site, the number of the token's bin in the step, the token's place in its bin, and
the element or head. So forward, recomputation and backward draw the same one, nothing is stored,
and it does not depend on how a step's bins are divided into micro-batches, nor on how bins, rows,
columns and heads are divided into ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewright import ops as tw
from tilewright.trainer.models.shared import TensorParallel

AFTER_ATTENTION, AFTER_MLP, WITHIN_MLP = range(3)
# What the counters of `ops.attention` have room for: its offset has 29 bits.
MOST_BINS, MOST_LAYERS = 2**20, 2**9


class Span(NamedTuple):
    """Tokens of one bin that follow each other in a tensor.

    number: the bin's number in the step.
    first, end: where the tokens begin and end in the tensor.
    place: where the first token is in the bin.
    """

    number: int
    first: int
    end: int
    place: int = 0


def spans(bins: Sequence[Span], at: torch.Tensor) -> tuple[Span, ...]:
    """What a rank has of whole bins.   at: int64 [tokens], where each is in the micro-batch."""
    bin_of = torch.searchsorted(torch.tensor([b.end for b in bins]), at, right=True)
    cut = ((at.diff() != 1) | (bin_of.diff() != 0)).nonzero().flatten() + 1
    parts = []
    for a, b in itertools.pairwise((0, *cut.tolist(), len(at))):
        whole = bins[int(bin_of[a])]
        parts.append(Span(whole.number, a, b, int(at[a]) - whole.first))
    return tuple(parts)


@dataclass(frozen=True)
class Masks:
    """The dropout masks of a micro-batch [1, T].

    hidden, attention, ffn: the dropout probabilities of what is added to the residual stream, of
        attention's weights, and of an MLP's inner activations.
    key: made of the run's seed and the step; see `key_of`.
    bins: whole ones, in order, as attention has them.
    inner: what an MLP has of them: this rank's shard of the sequence.
    rows: what the residual stream has: a tensor-parallel rank's part of `inner`.
    """

    hidden: float
    attention: float
    ffn: float
    key: int
    bins: tuple[Span, ...]
    inner: tuple[Span, ...]
    rows: tuple[Span, ...]

    def add(self, x: torch.Tensor, residual: torch.Tensor, layer: int, site: int) -> torch.Tensor:
        """residual + dropout(x), [1, tokens of `rows`, H]."""
        of_call = self.key, layer * 3 + site
        return _joined(
            [
                _dropped(x, residual, self.hidden, of_call, span, (0, x.shape[-1]))
                for span in self.rows
            ],
            1,
        )

    def within(self, x: torch.Tensor, layer: int, tp: TensorParallel) -> torch.Tensor:
        """dropout(x) of an MLP's inner activations [1, tokens of `inner`, I / tp.size]."""
        of_call, n = (self.key, layer * 3 + WITHIN_MLP), x.shape[-1]
        columns, zero = (tp.rank * n, tp.size * n), torch.zeros_like(x)
        return _joined(
            [_dropped(x, zero, self.ffn, of_call, span, columns) for span in self.inner], 1
        )

    def attend(
        self, attention: Callable[[int, int, dict], torch.Tensor], layer: int, first_head: int
    ) -> torch.Tensor:
        """Attention's result [1, heads, tokens of `bins`, D].

        attention: from the first token of a bin, its end, and the arguments of dropout.
        first_head: the number of the first of these heads.
        """
        options = {"dropout_p": self.attention, "seed": self.key, "first_head": first_head}
        calls = (options | {"offset": layer * MOST_BINS + one.number} for one in self.bins)
        return _joined(
            [attention(b.first, b.end, call) for b, call in zip(self.bins, calls, strict=True)], 2
        )


def _dropped(
    x: torch.Tensor,
    residual: torch.Tensor,
    p: float,
    of_call: tuple[int, int],
    span: Span,
    columns: tuple[int, int],
) -> torch.Tensor:
    """residual + dropout(x) in the rows of a span.   of_call: the key, and the number of layer and
    site.   columns: the number of x's first column, and how many columns a whole row has.
    """
    (key, call), (first, row), rows = of_call, columns, slice(span.first, span.end)
    return tw.dropout_add(
        x[:, rows],
        residual[:, rows],
        p,
        seed=key,
        offset=call << 32 | span.number,
        first=span.place * row + first,
        row=row,
    )


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def key_of(seed: int, step: int) -> int:
    """seed: below 2^32.   step: optimizer steps done, below 2^31."""
    return seed << 31 | step
