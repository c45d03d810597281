"""Shared code of logprob_entropy and linear_logprob: how logits are scaled, and the results from
the statistics of their rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewright.core import checks
from tilewright.kernels.launchers import Stats
from tilewright.ops.loss.losses import check_options
from tilewright.ops.loss.softmax_stats import (
    capped,
    entropy,
    peak_of,
    stats_eager,
    without_gradient,
)
from tilewright.ops.loss.vocabulary import across, shard, shard_stats_eager


class Scaling(NamedTuple):
    """How logits are scaled: softcap (0.0: none) first, then division by the temperature."""

    temperature: float
    softcap: float

    @classmethod
    def checked(cls, temperature: float, softcap: float | None, ignore_index: int) -> Scaling:
        """Raises TypeError or ValueError for options that are invalid for all logits."""
        check_options(ignore_index, 0.0, 0.0, softcap, "none")
        checks.number(
            "temperature",
            temperature,
            checks.SMALLEST,
            checks.LARGEST,
            "a finite number > 0 (in float32)",
        )
        if softcap and not checks.SMALLEST <= softcap / temperature <= checks.LARGEST:
            raise ValueError(
                "softcap / temperature must be a finite number > 0 (in float32), got "
                f"{softcap!r} / {temperature!r}"
            )
        return cls(float(temperature), 0.0 if softcap is None else float(softcap))

    @property
    def of_kernels(self) -> tuple[float, float]:
        """softcap and multiplier, as kernels take them: z / t = (c / t) tanh((logits / t) / (c /
        t)), so a temperature divides the logits and the cap.
        """
        return self.softcap / self.temperature, 1 / self.temperature


def eager(
    rows: torch.Tensor,
    target: torch.Tensor,
    valid: torch.Tensor,
    scaling: Scaling,
    argmax: bool,
    group: torch.distributed.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """logprob, entropy and argmax of logits [T, V], this rank's shard of the vocabulary."""
    _, target, _ = shard(rows.shape[-1], target, None, group)
    rows = without_gradient(rows, valid == 0)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    # Peaks of shards are compared: rounded after the division, large ones would lose digits.
    z = capped(rows.to(dtype if group is None else torch.float64), scaling.softcap)
    statistics = stats_eager if group is None else shard_stats_eager
    peak = peak_of(z)  # subtracted before the division, for the same reason
    z = (z - peak[:, None]) / scaling.temperature
    stats = statistics(z, target, None, 0.0, False, True, False)
    stats = stats._replace(
        peak=stats.peak + peak / scaling.temperature,
        argmax=rows.detach().argmax(-1) if argmax else None,
    )
    if group is not None:
        stats = across(stats, rows, target, None, group)
    logprob, entropies, best = results(stats, valid)
    return logprob.to(dtype), entropies.to(dtype), best


def results(
    stats: Stats, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Log-probability and entropy per row, 0 where `valid` is 0, and argmax."""
    # A capped logit is rounded: z_y may be an ulp above the peak, and lse an ulp below z_y, where
    # p = 1 and the gradient is 0.
    return (
        torch.where(valid == 0, 0.0, (stats.target - stats.log_sum).clamp_max(0.0) * valid),
        torch.where(valid == 0, 0.0, entropy(stats).clamp_min(0.0) * valid),
        stats.argmax,
    )
