"""The operators of statistics of rows of logits, and of the logits' gradient: what every
implementation's launchers take and return. tilewright/ops/loss/softmax_stats.py has the formulas.

T = rows, V = columns. Statistics are [T] float32, and contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilewright.core.library import declare


class Scaling(NamedTuple):
    """What is done to logits before their softmax: z = softcap * tanh(logits / softcap), or the
    logits where softcap is 0; then z / temperature.
    """

    softcap: float = 0.0
    temperature: float = 1.0

    @property
    def plain(self) -> bool:
        return not self.softcap and self.temperature == 1.0

    @property
    def cap(self) -> float:
        """Kernels cap logits that are divided by the temperature."""
        return self.softcap / self.temperature

    @property
    def inverse(self) -> float:
        """What kernels multiply logits by, before they cap them."""
        inverse_temperature = 1 / self.temperature
        return inverse_temperature / self.cap if self.softcap else inverse_temperature

    @property
    def unit(self) -> float:
        """The unit of the peak that kernels return, in the unit of the other statistics. Without a
        softcap the peak is in the unit of the logits before their multiplication, which would
        round it.
        """
        return 1.0 if self.softcap else 1 / self.temperature


class Wanted(NamedTuple):
    """The statistics to compute besides peak, log_sum and picked."""

    weighted: bool = False
    mean: bool = False
    argmax: bool = False


class Stats(NamedTuple):
    """Statistics of rows of logits. argmax: int64."""

    peak: torch.Tensor
    log_sum: torch.Tensor
    picked: torch.Tensor
    weighted: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    argmax: torch.Tensor | None = None

    @property
    def softmax(self) -> Softmax:
        return Softmax(self.peak, self.log_sum, self.mean)


class Softmax(NamedTuple):
    """The statistics from which a row's probabilities are recomputed; mean, for the gradient in
    it.
    """

    peak: torch.Tensor
    log_sum: torch.Tensor
    mean: torch.Tensor | None = None

    @property
    def lse(self) -> torch.Tensor:
        """log sum_c exp z_c, for callers that need its value: losses use the other statistics."""
        return self.peak + self.log_sum

    @property
    def entropy(self) -> torch.Tensor:
        """The entropy of softmax z, in nats. Raises ValueError without a mean."""
        if self.mean is None:
            raise ValueError("entropy needs the mean: ask for it by Wanted(mean=True)")
        return self.log_sum - self.mean


class StatsGradients(NamedTuple):
    """Gradients of a loss in the statistics of its rows; None for zeros."""

    g_log_sum: torch.Tensor | None = None
    g_picked: torch.Tensor | None = None
    g_weighted: torch.Tensor | None = None
    g_mean: torch.Tensor | None = None


@declare
def statistics(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    scaling: Scaling,
    wanted: Wanted,
) -> Stats:
    """logits: [T, V], rows contiguous.   target: [T] int64.   class_weight: [V] float32, read for
    `weighted`.
    """
    return empty_statistics(logits, wanted)


def empty_rows(like: torch.Tensor, wanted: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """An uninitialized number for each row of a tensor, [T]; None unless wanted."""
    return like.new_empty(like.shape[0], dtype=dtype) if wanted else None


def empty_statistics(logits: torch.Tensor, wanted: Wanted) -> Stats:
    """Uninitialized statistics of the rows of a tensor."""
    return Stats(
        empty_rows(logits),
        empty_rows(logits),
        empty_rows(logits),
        empty_rows(logits, wanted.weighted),
        empty_rows(logits, wanted.mean),
        empty_rows(logits, wanted.argmax, torch.int64),
    )


@declare
def dlogits(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    scaling: Scaling,
    softmax: Softmax,
    gradients: StatsGradients,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of logits, times scale: [], [T], or None for 1. It must contain 1 / temperature.

    gradients: in log_sum and picked they are given.
    """
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@declare
def dlogits_(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    scaling: Scaling,
    softmax: Softmax,
    gradients: StatsGradients,
    scale: torch.Tensor | None,
) -> None:
    """`dlogits` in the memory of the logits."""


def into(launch: Callable) -> tuple[Callable, Callable]:
    """The launchers of `dlogits` and `dlogits_`, from launch(memory of the gradient, arguments)."""

    def backward(*args):
        out = dlogits(*args)
        launch(out, *args)
        return out

    def backward_(logits, *args):
        launch(logits, logits, *args)

    return backward, backward_


class LossInputs(NamedTuple):
    """The inputs of cross-entropy besides the statistics. Tensors are contiguous, on one device,
    and of all rows.

    target: [T] int64, in the whole vocabulary.
    V: vocabulary size.
    class_weight: [V] float32, or None.
    weight_sum: [] float32, their sum, or None for V.
    token_weight: [T] float, or None.
    num_tokens: the divisor of "mean"; None: the sum of the non-ignored targets' weights.
    divide: whether the total and the derivatives are divided.
    """

    target: torch.Tensor
    V: int
    ignore_index: int
    class_weight: torch.Tensor | None = None
    weight_sum: torch.Tensor | None = None
    token_weight: torch.Tensor | None = None
    num_tokens: torch.Tensor | float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    divide: bool = False


class LossOutputs(NamedTuple):
    """Output buffers of the losses of rows, float32.

    losses: [T], before token weights.
    divisor: [], of "mean"; None if nothing is divided.
    """

    losses: torch.Tensor
    divisor: torch.Tensor | None
