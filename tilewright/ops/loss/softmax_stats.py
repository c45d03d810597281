"""Statistics of rows of logits, from which every softmax loss here is computed.

T = rows, V = columns, y = target; z = scaled logits (`Scaling`: softcap, then temperature). For
each row

    peak     = max_c z_c, up to rounding; 0 where that is infinite or NaN
    log_sum  = log sum_c exp(z_c - peak)
    picked   = z_y - peak, or 0 where y is outside [0, V): an ignored row, or another shard's row
    weighted = sum_c w_c (z_c - peak), w = class weights or ones  (for label smoothing)
    mean     = sum_c p_c (z_c - peak), p = softmax z              (entropy = log_sum - mean)
    argmax   = first index of the largest logit                   (any index if the row has a NaN)

Losses are sums of differences of logits, while lse = peak + log_sum is rounded at its own
magnitude: at logits of 1e6, to 1/16. So all but the peak are relative to it, and a constant added
to a row changes none of them. The peak is treated as a constant: what depends on it alone has no
gradient. A loss with gradients g in the others has, with respect to the logits,

    dlogits_c = (g_log_sum p_c + g_picked [c = y] + g_weighted w_c
                 + g_mean p_c (1 + z_c - peak - mean)) * (1 - (z_c / softcap)^2) / temperature
    p_c       = exp((z_c - peak) - log_sum)

so one kernel for the statistics and one from their gradients to dlogits serve all losses. Between
them there is arithmetic on [T] vectors, in plain PyTorch: a kind of loss. Statistics are float32
(float64 for float64 logits, eager only). A class that is masked out by a logit of -inf contributes
nothing to log_sum and mean.

The other files, in order: `vocabulary.py`, whose rows are sharded over ranks; `rows.py`, the
statistics of given logits as an operator; `head.py`, those of a language model's head, which has
no logits but a chunk of rows at a time; and the kinds: `cross_entropy.py`,
`linear_cross_entropy.py`, `logprob.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilewright.core.library import Operator
from tilewright.core.torch_names import ProcessGroup
from tilewright.kernels.loss import operators
from tilewright.kernels.loss.operators import Scaling, Softmax, Stats, StatsGradients, Wanted
from tilewright.ops.loss.targets import within
from tilewright.ops.loss.vocabulary import across, finite, shard

Group = ProcessGroup | None

# What the formula of an operator that returns statistics needs besides its arguments.
OF_STATISTICS: Any = {
    "weights": lambda class_weight, wanted: class_weight if wanted.weighted else None,
    "softmax": lambda result: result.softmax,
}

# ---- the definition


def stats_eager(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    scaling: Scaling,
    wanted: Wanted,
    group: Group = None,
) -> Stats:
    """The statistics of rows of logits [T, V], or [T, V / world], this rank's shard; target [T] and
    class_weight [V], read for `weighted`, are of the whole vocabulary. Differentiable in logits.
    """
    columns, dtype = logits.shape[-1], torch.promote_types(logits.dtype, torch.float32)
    _, target, class_weight = shard(columns, target, class_weight, group)
    # Peaks of shards are compared: in float32 the division would take digits of large ones.
    z = capped(logits.to(dtype if group is None else torch.float64), scaling.softcap)
    peak = peak_of(z)
    z = z - peak[:, None]  # before the division, for the same reason
    if scaling.temperature != 1.0:
        z, peak = z / scaling.temperature, peak / scaling.temperature
    low, masked_out = float("-inf"), None
    if group is not None and not scaling.softcap:
        # A shard may be all -inf in a row although the whole row is not: its gradients are 0, where
        # autograd's formulas for logsumexp and softmax give NaN.
        masked_out = (z == low).all(-1)
        z = z.masked_fill(masked_out[:, None], 0)
    inside = within(target, columns)
    weighted = mean = None
    picked = z.gather(-1, target.where(inside, 0)[:, None])[:, 0].where(inside, 0)
    if wanted.weighted:
        weighted = z.sum(-1) if class_weight is None else (z * class_weight.to(z.dtype)).sum(-1)
    if wanted.mean:  # p = 0 where z = -inf, and 0 * -inf would be NaN
        mean = (z.softmax(-1) * z.masked_fill(z == low, 0)).sum(-1)
    log_sum = z.logsumexp(-1)
    if masked_out is not None:
        log_sum = log_sum.masked_fill(masked_out, low)
        picked = picked.masked_fill(masked_out & inside, low)
        weighted = None if weighted is None else weighted.masked_fill(masked_out, low)
    argmax = logits.detach().argmax(-1) if wanted.argmax else None
    stats = Stats(peak, log_sum, picked, weighted, mean, argmax)
    if group is None:
        return stats
    *parts, argmax = across(stats, logits, target, class_weight, group)
    return Stats._make((*[None if t is None else t.to(dtype) for t in parts], argmax))


def capped(z: torch.Tensor, softcap: float) -> torch.Tensor:
    """softcap * tanh(z / softcap), or z where softcap is 0.

    The derivative of torch.tanh is 1 - tanh^2, which has few significant digits where tanh is near
    1, and none from 9.1 on (in float32). Here it is that of (1 - q) / (1 + q), which keeps them
    all; near 0, where 1 - q cancels, it is that of tanh.
    """
    if not softcap:
        return z
    u = z / softcap
    size = u.abs()
    q = torch.exp(-2 * size)
    return softcap * torch.where(size < 0.5, torch.tanh(u), u.sign() * ((1 - q) / (1 + q)))


def peak_of(z: torch.Tensor) -> torch.Tensor:
    """[T], a constant: the largest z of each row."""
    return finite(z.detach().amax(-1))


def without_gradient(logits: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
    """logits [T, V], whose ignored rows get a gradient of 0 whatever their values; their statistics
    do not change. A loss of 0 would not suffice: autograd multiplies its gradient, 0, by the
    logits, and 0 * NaN is NaN.
    """
    return torch.where(ignored[:, None], logits.detach(), logits)


def reshaped(rows: torch.Tensor, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Rows in this shape, but not as a view: FSDP2 warns if a module returns a view."""
    return rows if rows.shape == shape else rows.reshape(shape).clone()


# ---- the kernels of an implementation


class Kernels(NamedTuple):
    """The kernels of one implementation, without autograd.

    statistics: as `operators.statistics`.
    dlogits, dlogits_: the operators of the logits' gradient, out of place and in place.
    losses, scale_: as `cross_entropy.losses_in_torch` and `linear_cross_entropy.scale_in_torch_`,
        in one launch each; or None.
    """

    statistics: Callable
    dlogits: Operator
    dlogits_: Operator
    losses: Callable | None = None
    scale_: Callable | None = None

    @classmethod
    def of(cls, name: str, launchers, *fused: Callable) -> Kernels:
        prefix = f"softmax_stats_{name}_backward"
        return cls(
            launchers.forward,
            operators.dlogits.define(prefix, launchers.backward),
            operators.dlogits_.define(f"{prefix}_", launchers.backward_, mutates=("logits",)),
            *fused,
        )

    def of_rows(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        scaling: Scaling,
        wanted: Wanted,
        group: Group,
    ) -> Stats:
        """`stats_eager`, of logits with contiguous rows and float32 class weights. The peak is in
        `scaling.unit`.
        """
        _, target, class_weight = shard(logits.shape[1], target, class_weight, group)
        stats = self.statistics(logits, target, class_weight, scaling, wanted)
        if group is None:
            return stats
        return across(stats, logits, target, class_weight, group, scaling.unit)

    def gradient(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        scaling: Scaling,
        softmax: Softmax,
        gradients: StatsGradients,
        group: Group,
        scale: torch.Tensor | None = None,
        inplace: bool = False,
    ) -> torch.Tensor:
        """The gradient of the logits, times `scale`: [], [T], or None for 1. inplace: it overwrites
        the logits' memory, and is a view of it.
        """
        _, target, class_weight = shard(logits.shape[1], target, class_weight, group)
        if scaling.temperature != 1.0:
            factor = 1 / scaling.temperature
            scale = (softmax.peak.new_ones(()) if scale is None else scale) * factor

        def vector(g):
            return torch.zeros_like(softmax.peak) if g is None else g.contiguous()

        g_log_sum, g_picked, g_weighted, g_mean = gradients
        args = (
            logits,
            target,
            None if g_weighted is None else class_weight,
            scaling,
            softmax if g_mean is not None else Softmax(softmax.peak, softmax.log_sum),
            StatsGradients(
                vector(g_log_sum),
                vector(g_picked),
                None if g_weighted is None else g_weighted.contiguous(),
                None if g_mean is None else g_mean.contiguous(),
            ),
            None if scale is None else scale.contiguous(),
        )
        if not inplace:
            return self.dlogits(*args)
        self.dlogits_(*args)
        return logits.detach()


@functools.cache
def kernels(name: str) -> Kernels:
    """The kernels in Triton, in CuTe DSL (for sm_90 and sm_100), or in C++ (for the CPU, float32
    and bfloat16).
    """
    if name == "triton":
        from tilewright.kernels.loss import softmax_stats_triton as k

        return Kernels.of(name, k, k.losses, k.scale_)
    if name == "cute":
        from tilewright.kernels.loss import softmax_stats_cute

        return Kernels.of(name, softmax_stats_cute)
    return Kernels(
        operators.statistics.adopt("softmax_stats_cpp_forward"),
        operators.dlogits.adopt("softmax_stats_cpp_backward"),
        operators.dlogits_.adopt("softmax_stats_cpp_backward_"),
    )
