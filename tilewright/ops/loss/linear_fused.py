"""linear_cross_entropy and linear_logprob on the fused kernels."""

from __future__ import annotations

import functools

import torch

from tilewright.kernels.launchers import Stats
from tilewright.ops.loss import logprob as _logprob
from tilewright.ops.loss.linear_chunks import Precision, divides_later
from tilewright.ops.loss.linear_operators import Operators
from tilewright.ops.loss.losses import floats, number_or_tensor, reduced
from tilewright.ops.loss.softmax_stats import combine, entropy
from tilewright.ops.loss.targets import presence, weight_of
from tilewright.ops.loss.vocabulary import named


def _requires_grad(*tensors):
    on = torch.is_grad_enabled()
    return tuple(on and t is not None and t.requires_grad for t in tensors)


class Fused:
    """The calls of one implementation."""

    def __init__(self, name: str):
        self.operators = Operators(name)

    def cross_entropy(self, x, weight, bias, labels, options, precision, chunk_size):
        x, weights = x.contiguous(), floats(labels.class_weight)
        need = _requires_grad(x, weight, bias)
        if options.reduction == "none":
            precision = Precision(precision.fp32_sums, precision.fp32_logits, need[1])
            labels = labels._replace(class_weight=weights)
            return self._each(x, weight, bias, labels, options, precision, chunk_size)
        target, _, token_weight, num_tokens, group = labels
        total, _, *extra, _, _, _, by = self.operators.fused(
            x,
            weight,
            bias,
            None if token_weight is None else token_weight.reshape(-1).contiguous(),
            target.contiguous(),
            weights,
            *number_or_tensor(num_tokens),
            options.ignore_index,
            options.softcap,
            options.label_smoothing,
            options.z_loss,
            options.reduction == "mean",
            *options.extra,
            precision.fp32_sums,
            precision.fp32_logits,
            *need,
            chunk_size,
            named(group),
        )
        if options.reduction == "mean" and divides_later(x):
            total = total / by
        return total, *(t if n else None for t, n in zip(extra, options.extra, strict=True))

    def _each(self, x, weight, bias, labels, options, precision, chunk_size):
        """The loss per row. labels.class_weight: as returned by `floats`."""
        target, weights, token_weight, _, group = labels
        V = weight.shape[0] * (1 if group is None else torch.distributed.get_world_size(group))
        valid, target = presence(target, V, options.ignore_index).reshape(-1), target.reshape(-1)
        target = target.contiguous()  # a reshape to its own shape keeps strides
        smooth = options.label_smoothing != 0
        stats = Stats(
            *self.operators.statistics(
                x,
                weight,
                bias,
                None,
                None,
                target,
                weights if smooth else None,
                options.softcap,
                1.0,
                smooth,
                options.entropy,
                options.argmax,
                *precision,
                chunk_size,
                named(group),
            )
        )
        losses = combine(
            stats,
            valid,
            weight_of(target, weights),
            V=V,
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            weight_sum=None if weights is None else weights.sum(),
        )
        return (
            reduced(losses, valid, None, token_weight, "none", None),
            stats.lse if options.lse else None,
            entropy(stats) if options.entropy else None,
            stats.argmax if options.argmax else None,
        )

    def logprob(self, head, target, valid, scaling, precision, chunk_size, argmax, group):
        x, weight, *rest = head
        softcap, scale = scaling.of_kernels
        stats = Stats(
            *self.operators.statistics(
                x.contiguous(),
                weight,
                *rest,
                target.contiguous(),
                None,
                softcap,
                scale,
                False,
                True,
                argmax,
                precision.fp32_sums,
                precision.fp32_logits,
                *_requires_grad(weight),
                chunk_size,
                named(group),
            )
        )
        return _logprob.results(stats._replace(argmax=stats.argmax if argmax else None), valid)


@functools.cache
def fused(name: str) -> Fused:
    """The implementation on the kernels of this name."""
    return Fused(name)
