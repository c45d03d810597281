"""Softmax statistics of rows whose vocabulary is sharded over ranks."""

from __future__ import annotations

import torch

from tilewright.core.torch_names import ProcessGroup
from tilewright.kernels.loss.operators import Stats
from tilewright.ops.loss.targets import within


class _Across(torch.autograd.Function):
    """Statistics of whole rows from those of this rank's shard. Every rank computes the same loss
    from the result and differentiates it separately, so gradients are those of the local shard and
    need no communication.
    """

    @staticmethod
    def forward(ctx, group, unit, peak, log_sum, picked, weighted, mean, inside, total):
        reduce = torch.distributed.all_reduce
        op = torch.distributed.ReduceOp
        low = float("-inf")
        whole = torch.where(log_sum == low, low, peak)  # a masked-out shard has no peak
        reduce(whole, op.MAX, group)
        whole = finite(whole)
        shift = (peak - whole) * unit  # from relative to this shard's peak to that of the row
        share = torch.where(log_sum == low, 0.0, torch.exp(log_sum + shift))
        parts = [share, torch.where(inside, picked + shift, 0.0)]
        if weighted is not None:
            parts.append(weighted + total * shift)
        if mean is not None:  # a masked-out shard has no mean either
            mean = mean + shift
            parts.append(torch.where(share == 0, 0.0, share * mean))
        parts = torch.stack(parts)
        reduce(parts, op.SUM, group)
        share = share / parts[0]  # of the whole row's probability
        whole_mean = None if mean is None else parts[-1] / parts[0]
        ctx.save_for_backward(share, mean, whole_mean)
        ctx.mark_non_differentiable(whole)
        ctx.set_materialize_grads(False)
        return (
            whole,
            parts[0].log(),
            parts[1].clone(),
            None if weighted is None else parts[2].clone(),
            whole_mean,
        )

    @staticmethod
    def backward(ctx, g_peak, g_log_sum, g_picked, g_weighted, g_mean):
        share, mean, whole_mean = ctx.saved_tensors
        g = None if g_log_sum is None else g_log_sum * share
        if g_mean is not None:
            through = g_mean * torch.where(share == 0, 0.0, share * (mean - whole_mean))
            g = through if g is None else g + through
            g_mean = g_mean * share
        return None, None, None, g, g_picked, g_weighted, g_mean, None, None


def across(
    stats: Stats,
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    group: ProcessGroup,
    unit: float = 1.0,
) -> Stats:
    """Statistics of whole rows, on every rank, from those of equal shards of the vocabulary, one
    per rank of `group` in rank order. Two all-reduces of at most [4, T] (four with argmax).
    Differentiable in this rank's statistics.

    stats: the statistics of this rank's shard, of the following arguments.
    logits: [T, V / world].
    target: [T], relative to the shard's first column.
    class_weight: [V / world] or None.
    unit: the unit of peaks, in the unit of the other statistics. Kernels return the peak of logits
        that they multiply by 1 / temperature before that.
    """
    columns = logits.shape[-1]
    total = columns if class_weight is None else class_weight.sum()
    *parts, best = stats
    whole = _Across.apply(group, unit, *parts, within(target, columns), total)
    if best is not None:
        op = torch.distributed.ReduceOp
        with torch.no_grad():
            value = logits.gather(-1, best[:, None])[:, 0].to(stats.peak.dtype)
            largest = value.clone()
            torch.distributed.all_reduce(largest, op.MAX, group)
            first = best + torch.distributed.get_rank(group) * columns
            best = first.where(value == largest, torch.iinfo(torch.int64).max)
            torch.distributed.all_reduce(best, op.MIN, group)
    return Stats._make((*whole, best))


def finite(peak: torch.Tensor) -> torch.Tensor:
    """The peak; 0 where it is infinite or NaN."""
    return torch.nan_to_num(peak, nan=0.0, posinf=0.0, neginf=0.0)


def world_size(group: ProcessGroup | None) -> int:
    """Raises TypeError for what is no group."""
    if group is None:
        return 1
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"group must be a torch.distributed.ProcessGroup or None, got {type(group).__name__}"
        )
    return torch.distributed.get_world_size(group)


def shard(
    columns: int,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    group: ProcessGroup | None,
) -> tuple[int, torch.Tensor, torch.Tensor | None]:
    """(whole vocabulary, target and class weights relative to this rank's columns)."""
    if group is None:
        return columns, target, class_weight
    start = torch.distributed.get_rank(group) * columns
    shard_weight = None if class_weight is None else class_weight[start : start + columns]
    return torch.distributed.get_world_size(group) * columns, target - start, shard_weight
