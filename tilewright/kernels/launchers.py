"""Launcher code that all kernel languages share: allocation of results, and the signatures that
become the operators' schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

# Triton's functions of these names can be called in kernels too, but take microseconds on the host.


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def unit(itemsize: int, columns: int, *strides: int) -> int:
    """The unit, in elements, of columns and row strides: 16 bytes if all are multiples of that,
    else one element.
    """
    vector = 16 // itemsize
    for stride in strides:
        columns |= stride  # vector is a power of 2
    return 1 if columns % vector else vector


# ---- statistics of rows of logits, and the losses computed from them


class Stats(NamedTuple):
    """Statistics of rows of logits, as tilewright/ops/loss/softmax_stats.py defines them. Each is
    [T]; the last three are None unless requested.
    """

    peak: torch.Tensor
    log_sum: torch.Tensor
    target: torch.Tensor
    weighted: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    argmax: torch.Tensor | None = None

    @property
    def lse(self) -> torch.Tensor:
        """log sum_c exp z_c, for callers that need its value: losses use the other statistics."""
        return self.peak + self.log_sum


class LossInputs(NamedTuple):
    """The inputs of a loss besides the statistics. Tensors are contiguous, on one device, and cover
    all rows.

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


def statistics(
    logits: torch.Tensor, smooth: bool, entropy: bool, argmax: bool
) -> tuple[torch.Tensor, ...]:
    """Uninitialized peak, log_sum, target, weighted, mean and argmax, [T] each; empty unless
    requested.
    """

    def new(nonempty, dtype=torch.float32):
        return logits.new_empty(logits.shape[0] if nonempty else 0, dtype=dtype)

    return new(True), new(True), new(True), new(smooth), new(entropy), new(argmax, torch.int64)


def inverse(softcap: float, inverse_temperature: float = 1.0) -> float:
    """What kernels multiply logits by: inverse_temperature / softcap, or without a softcap
    inverse_temperature.
    """
    return inverse_temperature / softcap if softcap else inverse_temperature


class StatsGradient(NamedTuple):
    """Inputs of the gradient of logits: the statistics' inputs, results and gradients."""

    target: torch.Tensor
    class_weight: torch.Tensor | None
    softcap: float
    peak: torch.Tensor
    log_sum: torch.Tensor
    mean: torch.Tensor | None
    g_log_sum: torch.Tensor
    g_target: torch.Tensor
    g_weighted: torch.Tensor | None
    g_mean: torch.Tensor | None
    scale: torch.Tensor | None
    inverse_temperature: float = 1.0


def statistics_backwards(launch: Callable) -> tuple[Callable, Callable]:
    """backward, and backward_ in place, from launch(dlogits to write, logits, StatsGradient)."""

    def backward(
        logits: torch.Tensor,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        softcap: float,
        peak: torch.Tensor,
        log_sum: torch.Tensor,
        mean: torch.Tensor | None,
        g_log_sum: torch.Tensor,
        g_target: torch.Tensor,
        g_weighted: torch.Tensor | None,
        g_mean: torch.Tensor | None,
        scale: torch.Tensor | None,
        inverse_temperature: float = 1.0,
    ) -> torch.Tensor:
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        gradient = StatsGradient(
            target,
            class_weight,
            softcap,
            peak,
            log_sum,
            mean,
            g_log_sum,
            g_target,
            g_weighted,
            g_mean,
            scale,
            inverse_temperature,
        )
        launch(dlogits, logits, gradient)
        return dlogits

    def backward_(
        logits: torch.Tensor,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        softcap: float,
        peak: torch.Tensor,
        log_sum: torch.Tensor,
        mean: torch.Tensor | None,
        g_log_sum: torch.Tensor,
        g_target: torch.Tensor,
        g_weighted: torch.Tensor | None,
        g_mean: torch.Tensor | None,
        scale: torch.Tensor | None,
        inverse_temperature: float = 1.0,
    ) -> None:
        gradient = StatsGradient(
            target,
            class_weight,
            softcap,
            peak,
            log_sum,
            mean,
            g_log_sum,
            g_target,
            g_weighted,
            g_mean,
            scale,
            inverse_temperature,
        )
        launch(logits, logits, gradient)

    return backward, backward_
