"""cross_entropy on the fused kernels: one operator per set of kernels, one autograd formula for
all.
"""

from __future__ import annotations

import functools

import torch

from tilewright.core.library import define, differentiate
from tilewright.kernels.launchers import LossInputs, LossOutputs, Stats
from tilewright.ops.loss import softmax_stats, targets
from tilewright.ops.loss.losses import floats, number_or_tensor
from tilewright.ops.loss.softmax_stats import StatsGradients
from tilewright.ops.loss.vocabulary import across, group_of, named, shard


def _fake(
    logits,
    target,
    class_weight,
    token_weight,
    num_tokens,
    number,
    ignore_index,
    softcap,
    label_smoothing,
    z_loss,
    mean,
    entropy,
    argmax,
    overwrite,
    group,
):
    def vector(nonempty=True, dtype=torch.float32):
        return logits.new_empty(logits.shape[0] if nonempty else 0, dtype=dtype)

    return (
        logits.new_empty((), dtype=torch.float32),
        vector(),
        vector(),
        vector(),
        vector(entropy),
        vector(argmax, torch.int64),
        vector(),
        vector(),
        vector(label_smoothing != 0),
        logits.new_empty(() if mean else (0,), dtype=torch.float32),
    )


def _setup(ctx, inputs, output):
    logits, target, class_weight, token_weight, *_ = inputs
    softcap, smoothing, _, mean, _, _, overwrite, group = inputs[7:]
    _, losses, peak, log_sum, *_, g_log_sum, g_target, g_weighted, by = output
    ctx.save_for_backward(
        logits,
        target,
        class_weight if smoothing else None,
        peak,
        log_sum,
        g_log_sum,
        g_target,
        g_weighted if smoothing else None,
        losses if token_weight is not None else None,
        by if mean else None,
    )
    ctx.options = softcap, overwrite, group
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx, g_total, g_losses, *others):
    none = (None,) * 11
    g = g_losses if g_total is None else g_total  # the loss is computed from one of the two
    if g is None:
        return (None, None, None, None, *none)
    logits, target, class_weight, peak, log_sum, g_log_sum, g_target, g_weighted, losses, by = (
        ctx.saved_tensors
    )
    softcap, overwrite, group = ctx.options
    dlogits = d_token_weight = None
    if ctx.needs_input_grad[0]:
        _, local_target, weight = shard(
            logits.shape[-1], target.view(-1), class_weight, group_of(group)
        )
        dlogits = ctx.backward_op(
            logits,
            local_target,
            weight,
            softcap,
            Stats(peak, log_sum, None),
            StatsGradients(g_log_sum, g_target, g_weighted),
            g,
            inplace=overwrite,
        )
    if ctx.needs_input_grad[3]:
        d_token_weight = g * losses
        d_token_weight = d_token_weight if by is None else d_token_weight / by
    return dlogits, None, None, d_token_weight, *none


class Fused:
    """The operator and the call of one implementation."""

    def __init__(self, name: str):
        self.kernels = softmax_stats.LOADERS[name]()
        self.operator = define(f"cross_entropy_{name}", self._launch, _fake)
        differentiate(self.operator, _backward, _setup, backward_op=self.kernels.backward)
        self.operators = self.operator, *self.kernels.operators

    def cross_entropy(self, rows, labels, options, inplace):
        target, class_weight, token_weight, num_tokens, group = labels
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        summed = options.reduction != "none"
        flat_weight = None if token_weight is None else token_weight.reshape(-1)
        total, losses, peak, log_sum, mean, argmax, *_ = self.operator(
            rows,
            target.contiguous(),
            floats(class_weight),
            flat_weight.contiguous() if flat_weight is not None and summed else None,
            *number_or_tensor(num_tokens),
            options.ignore_index,
            options.softcap,
            options.label_smoothing,
            options.z_loss,
            options.reduction == "mean",
            options.entropy,
            options.argmax,
            inplace,
            named(group),
        )
        if not summed:
            total = losses if flat_weight is None else losses * flat_weight.to(losses.dtype)
        return (
            total,
            peak + log_sum if options.lse else None,
            log_sum - mean if options.entropy else None,
            argmax if options.argmax else None,
        )

    def _launch(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        token_weight: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
        number: float | None,
        ignore_index: int,
        softcap: float,
        label_smoothing: float,
        z_loss: float,
        mean: bool,
        entropy: bool,
        argmax: bool,
        overwrite: bool,
        group: str,
    ) -> tuple[
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
    ]:
        """The sum of the losses times their token weights, divided if `mean`; the losses; peak,
        log_sum, mean and argmax of the rows; the sum's derivatives in log_sum, target and weighted;
        the divisor. Results that the call does not request are empty. overwrite is for the autograd
        formula.
        """
        T, columns = logits.shape
        smooth, flat = label_smoothing != 0, target.view(-1)
        process_group = group_of(group)
        V, local_target, weight = shard(columns, flat, class_weight, process_group)
        targets.check(target, V, ignore_index)
        stats = self.kernels.forward(logits, local_target, weight, softcap, smooth, entropy, argmax)
        if process_group is not None:
            stats = across(stats, logits, local_target, weight, process_group)
        inputs = LossInputs(
            flat,
            V,
            ignore_index,
            class_weight,
            class_weight.sum() if smooth and class_weight is not None else None,
            token_weight,
            number if num_tokens is None else num_tokens,
            label_smoothing,
            z_loss,
            divide=mean,
        )
        outputs = LossOutputs(stats.peak.new_empty(T), stats.peak.new_empty(()) if mean else None)
        total, g_log_sum, g_target, g_weighted = self.kernels.losses(
            stats, slice(0, T), inputs, outputs, None
        )

        def or_empty(t, dtype=torch.float32):
            return logits.new_empty(0, dtype=dtype) if t is None else t

        return (
            total,
            outputs.losses,
            stats.peak,
            stats.log_sum,
            or_empty(stats.mean),
            or_empty(stats.argmax, torch.int64),
            g_log_sum,
            g_target,
            or_empty(g_weighted),
            or_empty(outputs.divisor),
        )


@functools.cache
def fused(name: str) -> Fused:
    """The implementation on the kernels of this name."""
    return Fused(name)
