"""Statistics of rows of logits, from which every softmax loss here is computed. Shared by
cross_entropy and linear_cross_entropy.

T = rows, V = columns, y = target; z = softcap * tanh(logits / softcap), or logits where softcap is
0. For each row

    peak     = max_c z_c, up to rounding; 0 where that is infinite or NaN
    log_sum  = log sum_c exp(z_c - peak)
    target   = z_y - peak, or 0 where y is outside [0, V): an ignored row, or another shard's row
    weighted = sum_c w_c (z_c - peak), w = class weights or ones  (for label smoothing)
    mean     = sum_c p_c (z_c - peak), p = softmax z              (entropy = log_sum - mean)
    argmax   = first index of the largest logit                   (any index if the row has a NaN)

Losses are sums of differences of logits, while lse = peak + log_sum is rounded at its own
magnitude: at logits of 1e6, to 1/16. So all but the peak are relative to it, and a constant added
to a row changes none of them. The peak is treated as a constant: what depends on it alone has no
gradient. A loss with gradients g in the others has, with respect to the logits,

    dlogits_c = (g_log_sum p_c + g_target [c = y] + g_weighted w_c
                 + g_mean p_c (1 + z_c - peak - mean)) * (1 - (z_c / softcap)^2)
    p_c       = exp((z_c - peak) - log_sum)

so one kernel for the statistics and one from their gradients to dlogits serve all losses. Between
them there is arithmetic on [T] vectors: `combine` in plain PyTorch, or `losses`, which also
computes its derivatives, in one kernel. Statistics are float32 (float64 for float64 logits, eager
only). A class that is masked out by a logit of -inf contributes nothing to log_sum and mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewright.core.library import Operator, adopt, define
from tilewright.kernels.launchers import LossInputs, LossOutputs, Stats
from tilewright.ops.loss.targets import divisor, present, weight_of, within

# ---- the definition


def stats_eager(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    softcap: float,
    smooth: bool,
    entropy: bool,
    argmax: bool,
) -> Stats:
    """logits: [T, V].   target: [T] int64.   class_weight: [V] or None, read if `smooth`.
    softcap: 0.0 for none.   smooth, entropy, argmax: whether to compute weighted, mean and argmax.
    Differentiable in logits.
    """
    z = capped(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)
    peak = peak_of(z)
    z = z - peak[:, None]
    inside = within(target, z.shape[-1])
    picked = z.gather(-1, target.where(inside, 0)[:, None])[:, 0].where(inside, 0)
    weighted = mean = None
    if smooth:
        weighted = z.sum(-1) if class_weight is None else (z * class_weight.to(z.dtype)).sum(-1)
    if entropy:  # p = 0 where z = -inf, and 0 * -inf would be NaN
        mean = (z.softmax(-1) * z.masked_fill(z == float("-inf"), 0)).sum(-1)
    return Stats(
        peak,
        z.logsumexp(-1),
        picked,
        weighted,
        mean,
        logits.detach().argmax(-1) if argmax else None,
    )


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


def finite(peak: torch.Tensor) -> torch.Tensor:
    """The peak; 0 where it is infinite or NaN."""
    return torch.nan_to_num(peak, nan=0.0, posinf=0.0, neginf=0.0)


def without_gradient(logits: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
    """logits [T, V], whose ignored rows get a gradient of 0 whatever their values; their statistics
    do not change. A loss of 0 would not suffice: autograd multiplies its gradient, 0, by the
    logits, and 0 * NaN is NaN.
    """
    return torch.where(ignored[:, None], logits.detach(), logits)


# ---- arithmetic on [T] vectors, the same for all implementations


def combine(
    stats: Stats,
    presence: torch.Tensor,
    y_weight: torch.Tensor | None,
    *,
    V: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weight_sum: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss per row, before token weights and reduction; 0 for ignored rows:

        (1 - e) w_y (lse - z_y) + e / V * sum_c w_c (lse - z_c) + z_loss * lse^2

    with e = label_smoothing. The differences are computed relative to the peak. Differentiable in
    the statistics.

    stats: of whole rows, with `weighted` where label_smoothing is not 0.
    presence: [T], as `presence` returns it.
    y_weight: [T], the class weight of each row's target, or None for ones.
    V: size of the whole vocabulary.
    weight_sum: scalar tensor, sum of the class weights; None for V.
    """
    loss = stats.log_sum - stats.target
    if y_weight is not None:
        loss = loss * y_weight
    if label_smoothing:
        total = V if weight_sum is None else weight_sum
        loss = (1 - label_smoothing) * loss + (label_smoothing / V) * (
            total * stats.log_sum - stats.weighted
        )
    if z_loss:
        # where: an ignored row's lse may be infinite or NaN, and so would 0 times it in the
        # gradient.
        loss = loss + z_loss * torch.where(presence == 0, 0.0, stats.lse).square()
    return torch.where(presence == 0, 0.0, loss * presence)


def entropy(stats: Stats) -> torch.Tensor:
    """Entropy of softmax z in nats, [T]. `stats` must have `mean`."""
    return stats.log_sum - stats.mean


# ---- losses and their derivatives in the statistics, in one pass


def losses_in_torch(
    stats: Stats, rows: slice, inputs: LossInputs, outputs: LossOutputs, before: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`softmax_stats_triton.losses` in plain PyTorch."""
    target = inputs.target[rows]
    valid = present(target, inputs.V, inputs.ignore_index)
    y_weight = weight_of(target, inputs.class_weight)
    if before is None and outputs.divisor is not None:
        full_target = inputs.target
        by = divisor(
            present(full_target, inputs.V, inputs.ignore_index),
            weight_of(full_target, inputs.class_weight),
            inputs.num_tokens,
        )
        outputs.divisor.copy_(by) if isinstance(by, torch.Tensor) else outputs.divisor.fill_(by)
    losses = outputs.losses[rows]
    losses.copy_(
        combine(
            stats,
            valid,
            y_weight,
            V=inputs.V,
            label_smoothing=inputs.label_smoothing,
            z_loss=inputs.z_loss,
            weight_sum=inputs.weight_sum,
        )
    )
    row = valid
    if inputs.token_weight is not None:
        u = inputs.token_weight[rows].to(torch.float32)
        row, losses = (
            torch.where(valid == 0, 0.0, valid * u),
            torch.where(valid == 0, 0.0, losses * u),
        )
    total = losses.sum()
    if inputs.divide:
        row, total = row / outputs.divisor, total / outputs.divisor
    total = total if before is None else before + total
    hard = (row if y_weight is None else row * y_weight) * (1 - inputs.label_smoothing)
    g_log_sum, g_weighted = hard, None
    if inputs.label_smoothing:
        soft = row * (inputs.label_smoothing / inputs.V)
        g_log_sum, g_weighted = (
            hard + soft * (inputs.V if inputs.weight_sum is None else inputs.weight_sum),
            -soft,
        )
    if inputs.z_loss:  # where: lse of an ignored row may be infinite
        g_log_sum = g_log_sum + torch.where(row == 0, 0.0, 2 * inputs.z_loss * row * stats.lse)
    return total, g_log_sum, -hard, g_weighted


# ---- fused implementations: the kernels of statistics, of losses and of the logits' gradient


class StatsGradients(NamedTuple):
    """Gradients of a loss in the statistics of its rows, [T] each; None means zeros."""

    log_sum: torch.Tensor | None = None
    target: torch.Tensor | None = None
    weighted: torch.Tensor | None = None
    mean: torch.Tensor | None = None


def _fake_backward(
    logits,
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
    inverse_temperature=1.0,
):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _fake_backward_(
    logits,
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
    inverse_temperature=1.0,
):
    return None


class Kernels:
    """The kernels of one implementation, without autograd.

    statistics: the launcher of the statistics.
    dlogits, dlogits_: the operators of the logits' gradient, out of place and in place.
    losses: (stats, rows, inputs, outputs, before) -> the total and its derivatives in the
        statistics.
    scale_: acc *= factor, for an upstream gradient.
    """

    def __init__(
        self,
        statistics: Callable,
        dlogits: Operator,
        dlogits_: Operator,
        losses: Callable,
        scale_: Callable,
    ):
        self._statistics, self._dlogits, self._dlogits_ = statistics, dlogits, dlogits_
        self.losses, self.scale_ = losses, scale_
        self.operators = dlogits, dlogits_

    @classmethod
    def define(cls, name: str, launchers, losses: Callable, scale_: Callable) -> Kernels:
        return cls(
            launchers.forward,
            define(f"softmax_stats_{name}_backward", launchers.backward, _fake_backward),
            define(
                f"softmax_stats_{name}_backward_",
                launchers.backward_,
                _fake_backward_,
                mutates=("logits",),
            ),
            losses,
            scale_,
        )

    def forward(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        softcap: float,
        smooth: bool,
        entropy: bool,
        argmax: bool,
        *tempered: float,
    ) -> Stats:
        """`stats_eager` of logits with contiguous rows and float32 class weights.

        tempered: 1 / temperature, by which z is multiplied; none for 1. softcap is already divided
            by the temperature. Without a softcap, peak is that of z before the multiplication,
            which would round it: a large one would lose the digits of the differences.
        """
        peak, log_sum, picked, weighted, mean, best = self._statistics(
            logits,
            target,
            class_weight if smooth else None,
            softcap,
            smooth,
            entropy,
            argmax,
            *tempered,
        )
        return Stats(
            peak,
            log_sum,
            picked,
            weighted if smooth else None,
            mean if entropy else None,
            best if argmax else None,
        )

    def backward(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        softcap: float,
        stats: Stats,
        gradients: StatsGradients,
        scale: torch.Tensor | None = None,
        *tempered: float,
        inplace: bool = False,
    ) -> torch.Tensor:
        """The gradient of the logits from the gradients of the statistics, times `scale`.

        stats: peak, log_sum and, for a gradient in the mean, mean are read.
        scale: [], [T], or None for 1.
        tempered: as in `forward`; `scale` must contain this factor of the derivative.
        inplace: overwrites the logits' memory, and returns a view of it.
        """

        def vector(g):
            return torch.zeros_like(stats.peak) if g is None else g.contiguous()

        g_log_sum, g_target, g_weighted, g_mean = gradients
        args = (
            logits,
            target,
            class_weight if g_weighted is not None else None,
            softcap,
            stats.peak,
            stats.log_sum,
            stats.mean if g_mean is not None else None,
            vector(g_log_sum),
            vector(g_target),
            None if g_weighted is None else g_weighted.contiguous(),
            None if g_mean is None else g_mean.contiguous(),
            None if scale is None else scale.contiguous(),
            *tempered,
        )
        if not inplace:
            return self._dlogits(*args)
        self._dlogits_(*args)
        return logits.detach()


def _fake_statistics(
    logits, target, class_weight, softcap, smooth, entropy, argmax, inverse_temperature=1.0
):
    rows = logits.shape[:1]
    values = [logits.new_empty(rows, dtype=torch.float32) for _ in range(5)]
    return *values, logits.new_empty(rows, dtype=torch.int64)


def _scale_in_torch_(acc: torch.Tensor, factor: torch.Tensor) -> None:
    """acc *= factor [], on a CPU, where reading the factor is free."""
    if factor.item() != 1:
        acc.mul_(factor)


@functools.cache
def triton() -> Kernels:
    """The kernels in Triton: statistics, losses, gradients and scale_."""
    from tilewright.kernels.loss import softmax_stats_triton as k

    return Kernels.define("triton", k, k.losses, k.scale_)


@functools.cache
def cute() -> Kernels:
    """The kernels in CuTe DSL for sm_90 and sm_100, with losses in PyTorch."""
    from tilewright.kernels.loss import softmax_stats_cute as k

    return Kernels.define("cute", k, losses_in_torch, _scale_in_torch_)


@functools.cache
def cpp() -> Kernels:
    """The kernels in C++ for the CPU (float32 and bfloat16), with losses in PyTorch."""
    return Kernels(
        adopt("softmax_stats_cpp_forward", _fake_statistics).overload,
        adopt("softmax_stats_cpp_backward", _fake_backward),
        adopt("softmax_stats_cpp_backward_", _fake_backward_),
        losses_in_torch,
        _scale_in_torch_,
    )


LOADERS = {"triton": triton, "cute": cute, "cpp": cpp}
