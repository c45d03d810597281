"""The operators of the fused linear losses, on one set of statistics kernels. They compute the
logits one chunk of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewright.core import torch_names
from tilewright.core.library import define, differentiate
from tilewright.kernels.launchers import LossInputs, LossOutputs, Stats
from tilewright.ops.loss import linear_chunks, softmax_stats, targets
from tilewright.ops.loss.linear_chunks import Precision, divides_later, logits_chunks, summed_dtype
from tilewright.ops.loss.softmax_stats import StatsGradients, entropy
from tilewright.ops.loss.vocabulary import across, group_of, shard

# ---- the logits' statistics, with a gradient for each of them


def _vector(x, nonempty=True, dtype=torch.float32):
    return x.new_empty(x.shape[0] if nonempty else 0, dtype=dtype)


def _fake_statistics(
    x, weight, bias, low, up, target, class_weight, softcap, scale, smooth, entropy, argmax, *chunks
):
    return (
        _vector(x),
        _vector(x),
        _vector(x),
        _vector(x, smooth),
        _vector(x, entropy),
        _vector(x, argmax, torch.int64),
    )


def _fake_statistics_backward(x, weight, bias, low, up, *rest):
    need_x, need_w, need_b, need_low, need_up, _, _ = rest[-7:]
    return (
        x.new_empty(x.shape if need_x else (0,)),
        weight.new_empty(weight.shape if need_w else (0,)),
        weight.new_empty(weight.shape[:1] if need_b else (0,)),
        x.new_empty(low.shape if need_low else (0,)),
        weight.new_empty(up.shape if need_up else (0,)),
    )


def _setup_statistics(ctx, inputs, output):
    *head, target, class_weight, softcap, scale, smooth, want_mean, _ = inputs[:12]
    peak, log_sum, _, _, mean, argmax = output
    ctx.save_for_backward(
        *head,
        target,
        class_weight if smooth else None,
        peak,
        log_sum,
        mean if want_mean else None,
    )
    ctx.scales = softcap, scale
    ctx.optional = smooth, want_mean
    ctx.chunks = inputs[12:]
    ctx.mark_non_differentiable(peak, argmax)
    ctx.set_materialize_grads(False)


def _backward_statistics(ctx, g_peak, g_log_sum, g_target, g_weighted, g_mean, g_argmax):
    none = (None,) * 12
    # A statistic that is not computed is an empty tensor, and so is its gradient.
    g_weighted, g_mean = (
        g if on else None for g, on in zip((g_weighted, g_mean), ctx.optional, strict=True)
    )
    gradients = g_log_sum, g_target, g_weighted, g_mean
    need = ctx.needs_input_grad[:5]
    if all(g is None for g in gradients):
        return (*(None for _ in need), *none)
    *precision, chunk_size, group = ctx.chunks
    *tensors, peak, log_sum, mean = ctx.saved_tensors
    of_head = ctx.backward_op(
        *tensors,
        *ctx.scales,
        peak,
        log_sum,
        mean,
        *(None if g is None else g.contiguous() for g in gradients),
        *precision,
        *need,
        chunk_size,
        group,
    )
    return (*(g if n else None for g, n in zip(of_head, need, strict=True)), *none)


# ---- the sum of the losses, whose forward computes the gradients too


def _fake_fused(
    x,
    weight,
    bias,
    token_weight,
    target,
    class_weight,
    num_tokens,
    number,
    ignore_index,
    softcap,
    label_smoothing,
    z_loss,
    mean,
    want_lse,
    want_entropy,
    argmax,
    fp32_sums,
    fp32_logits,
    need_x,
    need_w,
    need_b,
    chunk_size,
    group,
):
    dtype = summed_dtype(weight.dtype, fp32_sums)
    return (
        x.new_empty((), dtype=torch.float32),
        _vector(x),
        _vector(x, want_lse),
        _vector(x, want_entropy),
        _vector(x, argmax, torch.int64),
        x.new_empty(x.shape if need_x else (0,)),
        weight.new_empty(weight.shape if need_w else (0,), dtype=dtype),
        weight.new_empty(weight.shape[:1] if need_b else (0,), dtype=dtype),
        x.new_empty(() if mean else (0,), dtype=torch.float32),
    )


def _setup_fused(ctx, inputs, output):
    x, weight, mean = inputs[0], inputs[1], inputs[12]
    _, losses, lse, entropies, argmax, dx, dw, db, by = output
    ctx.save_for_backward(losses, by if mean and not divides_later(x) else None, dx, dw, db)
    ctx.dtypes = x.dtype, weight.dtype, weight.dtype
    ctx.mark_non_differentiable(losses, lse, entropies, argmax, dx, dw, db, by)
    ctx.set_materialize_grads(False)


def _backward_fused(ctx, g, *others):
    none = (None,) * 19
    if g is None:
        return (None, None, None, None, *none)
    losses, by, *grads = ctx.saved_tensors
    need = ctx.needs_input_grad[:4]
    of_head = [
        _times_upstream(grad, g, dtype, ctx.backward_op) if n else None
        for grad, dtype, n in zip(grads, ctx.dtypes, need[:3], strict=True)
    ]
    d_token_weight = None
    if need[3]:
        d_token_weight = g * losses if by is None else g * losses / by
    return (*of_head, d_token_weight, *none)


def _scale(acc: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """acc *= factor [] float32, in float32. If acc is bfloat16, a 0-dim CUDA factor would be
    rounded to it first; a CPU one is not, and a 1-dim one makes a float32 copy of acc.
    """
    return acc.mul_(factor.reshape(1) if acc.is_cuda else factor)


def _times_upstream(
    acc: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, scale_: Callable
) -> torch.Tensor:
    """acc * factor in dtype, in acc's memory if the graph is freed; scale_(acc, factor) then skips
    a factor of 1.
    """
    if type(acc) is not torch.Tensor or torch_names.keeps_graph():
        # Tensor subclasses: torch.compile traces.
        return _scale(acc.clone(), factor).to(dtype)
    scale_(acc, factor)
    return acc.to(dtype)


def _joined(parts: list[Stats], x: torch.Tensor, fields: tuple[str, ...] = Stats._fields) -> Stats:
    """Statistics of all rows; an empty tensor represents one that is not computed."""
    joined = []
    for name in Stats._fields:
        pieces = [p for part in parts if name in fields and (p := getattr(part, name)) is not None]
        dtype = torch.int64 if name == "argmax" else torch.float32
        pieces = pieces or [x.new_empty(0, dtype=dtype)]
        joined.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
    return Stats(*joined)


# ---- the operators


class Operators:
    """The operators on the statistics kernels of one implementation.

    statistics: differentiable in each statistic. Its logits are x weight^T + bias, and low up^T on
        top if low [T, r] and up [V, r] are given.
    fused: the sum of the losses, whose forward also computes the gradients.
    """

    def __init__(self, name: str):
        self.kernels = softmax_stats.LOADERS[name]()
        self.statistics = define(
            f"linear_stats_{name}_forward", self._launch_statistics, _fake_statistics
        )
        self.statistics_backward = define(
            f"linear_stats_{name}_backward", self._launch_backward, _fake_statistics_backward
        )
        self.fused = define(f"linear_cross_entropy_{name}_forward", self._launch_fused, _fake_fused)
        differentiate(
            self.statistics,
            _backward_statistics,
            _setup_statistics,
            backward_op=self.statistics_backward,
        )
        differentiate(self.fused, _backward_fused, _setup_fused, backward_op=self.kernels.scale_)

    def _launch_statistics(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        low: torch.Tensor | None,
        up: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        softcap: float,
        scale: float,
        smooth: bool,
        entropy: bool,
        argmax: bool,
        fp32_sums: bool,
        fp32_logits: bool,
        learns: bool,
        chunk_size: int | None,
        group: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        process_group = group_of(group)
        _, target, class_weight = shard(weight.shape[0], target, class_weight, process_group)
        chunk = linear_chunks.chunk_rows(
            x, weight, chunk_size, Precision(fp32_sums, fp32_logits, learns)
        )
        parts, head = [], (x, weight, bias, low, up)
        for rows, logits in logits_chunks(head, chunk, scale, fp32_logits):
            part = self.kernels.forward(
                logits, target[rows], class_weight, softcap, smooth, entropy, argmax
            )
            if process_group is not None:
                part = across(part, logits, target[rows], class_weight, process_group)
            parts.append(part)
        return tuple(_joined(parts, x))

    def _launch_backward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        low: torch.Tensor | None,
        up: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        softcap: float,
        scale: float,
        peak: torch.Tensor,
        log_sum: torch.Tensor,
        mean: torch.Tensor | None,
        g_log_sum: torch.Tensor | None,
        g_target: torch.Tensor | None,
        g_weighted: torch.Tensor | None,
        g_mean: torch.Tensor | None,
        fp32_sums: bool,
        fp32_logits: bool,
        learns: bool,
        need_x: bool,
        need_w: bool,
        need_b: bool,
        need_low: bool,
        need_up: bool,
        chunk_size: int | None,
        group: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        _, target, class_weight = shard(weight.shape[0], target, class_weight, group_of(group))
        chunk = linear_chunks.chunk_rows(
            x, weight, chunk_size, Precision(fp32_sums, fp32_logits, learns)
        )
        grads = [
            linear_chunks.Gradients(x, weight, chunk, fp32_sums, scale, (need_x, need_w, need_b))
        ]
        if low is not None and up is not None:
            need = need_low, need_up, False
            grads.append(linear_chunks.Gradients(low, up, chunk, fp32_sums, scale, need))
        head = x, weight, bias, low, up
        for rows, logits in logits_chunks(head, chunk, scale, fp32_logits):
            stats = Stats(
                peak[rows], log_sum[rows], None, mean=None if mean is None else mean[rows]
            )
            of_stats = StatsGradients(
                *(None if g is None else g[rows] for g in (g_log_sum, g_target, g_weighted, g_mean))
            )
            dlogits = self.kernels.backward(
                logits, target[rows], class_weight, softcap, stats, of_stats, inplace=True
            )
            for factor in grads:
                factor.add(rows, dlogits)
        base, *adapter = (factor.done(wide=False) for factor in grads)
        return *base, *(adapter[0][:2] if adapter else (x.new_empty(0), weight.new_empty(0)))

    def _launch_fused(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        token_weight: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
        number: float | None,
        ignore_index: int,
        softcap: float,
        label_smoothing: float,
        z_loss: float,
        mean: bool,
        want_lse: bool,
        want_entropy: bool,
        argmax: bool,
        fp32_sums: bool,
        fp32_logits: bool,
        need_x: bool,
        need_w: bool,
        need_b: bool,
        chunk_size: int | None,
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
    ]:
        """The sum of the losses times their token weights, divided if `mean` (except in float16:
        see `divides_later`), the losses, lse, entropy and argmax, the gradients of the sum, and the
        divisor.
        """
        smooth, flat = label_smoothing != 0, target.view(-1)
        process_group = group_of(group)
        V, local_target, shard_weight = shard(weight.shape[0], flat, class_weight, process_group)
        targets.check(target, V, ignore_index)
        chunk = linear_chunks.chunk_rows(
            x, weight, chunk_size, Precision(fp32_sums, fp32_logits, need_w)
        )
        grads = linear_chunks.Gradients(x, weight, chunk, fp32_sums, 1.0, (need_x, need_w, need_b))
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
            divide=mean and not divides_later(x),
        )
        divisor, total = x.new_empty((), dtype=torch.float32), None
        outputs = LossOutputs(_vector(x), divisor if mean else None)
        if x.shape[0] == 0:
            total, *_ = self.kernels.losses(
                Stats(*(_vector(x) for _ in range(4))), slice(0, 0), inputs, outputs, None
            )
        parts = []
        for rows, logits in logits_chunks((x, weight, bias), chunk, 1.0, fp32_logits):
            part = self.kernels.forward(
                logits, local_target[rows], shard_weight, softcap, smooth, want_entropy, argmax
            )
            if process_group is not None:
                part = across(part, logits, local_target[rows], shard_weight, process_group)
            parts.append(part)
            total, *of_stats = self.kernels.losses(part, rows, inputs, outputs, total)
            if grads.needed:
                dlogits = self.kernels.backward(
                    logits,
                    local_target[rows],
                    shard_weight,
                    softcap,
                    part,
                    StatsGradients(*of_stats),
                    inplace=True,
                )
                grads.add(rows, dlogits)
        stats = _joined(parts, x, Stats._fields if want_lse or want_entropy else ("argmax",))
        return (
            total,
            outputs.losses,
            stats.lse if want_lse else _vector(x, False),
            entropy(stats) if want_entropy else _vector(x, False),
            stats.argmax,
            *grads.done(wide=True),
            divisor if mean else _vector(x, False),
        )
