"""Log-probabilities of several tokens at each place, and of all others together, without logits in
memory but those of a chunk of rows.

z = x weight^T / temperature, p = softmax z, and K are the tokens that are listed in a row:

    logprobs_i = log p_i,  others = log sum_{v not in K} p_v,  label = log p_y

With gradients g, G their sum, and r = p / exp(others) outside of K:

    dz_v = g_v - p_v G                             in K
           r_v (g_others - exp(others) G)          elsewhere, and g_label more at y

in which nothing large cancels, whatever mass is outside. `others` is the log-sum of these logits,
not log(1 - sum p_i), which has no digits where the sum is near 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tilewright.core import checks
from tilewright.kernels.loss.operators import Scaling, Softmax, Stats, StatsGradients, Wanted
from tilewright.ops.loss import softmax_stats
from tilewright.ops.loss.head import Chunks, Head, Needs, Plan, replicated
from tilewright.ops.loss.softmax_stats import stats_eager

Group = dist.ProcessGroup | None
FUSED = ("triton", "cpp")  # implementations with kernels; others compute in plain PyTorch


class Listed(NamedTuple):
    """In float32, or float64 for float64.

    logprobs: [T, k]; any finite number for no token (-1).   others: [T]; -inf if all are listed.
    label: [T]; any finite number where there is none.   best: [T], int64, the most probable token.
    """

    logprobs: torch.Tensor
    others: torch.Tensor
    label: torch.Tensor
    best: torch.Tensor


class How(NamedTuple):
    """implementation: of the statistics of logits.   plan: of the logits.   group: of the ranks
    that have the weight's rows, if it is this rank's shard of them.
    """

    implementation: str
    plan: Plan
    temperature: float = 1.0
    group: Group = None

    def places(self, ids: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens as columns of this rank's shard, and whether they are in it."""
        first = 0 if self.group is None else dist.get_rank(self.group) * columns
        here = (ids >= first) & (ids < first + columns)
        return (ids - first).where(here, 0), here

    def statistics(self, logits: torch.Tensor, labels: torch.Tensor, best: bool = False) -> Stats:
        given = logits, labels, None, Scaling(), Wanted(argmax=best)
        if self.implementation in FUSED:
            return softmax_stats.kernels(self.implementation).of_rows(*given, self.group)
        return stats_eager(*given, self.group)

    def gradient_(
        self, logits: torch.Tensor, labels: torch.Tensor, of: Softmax, g: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of a log-sum, times g [T], in the logits' memory."""
        if self.implementation in FUSED:
            kernels = softmax_stats.kernels(self.implementation)
            given = logits, labels, None, Scaling(), of, StatsGradients(g), self.group
            return kernels.gradient(*given, inplace=True)
        p = (logits.to(g.dtype) - of.peak[:, None] - of.log_sum[:, None]).exp_()
        return logits.copy_(p.mul_(g[:, None]))


def listed(head: Head, ids: torch.Tensor, labels: torch.Tensor, how: How) -> Listed:
    """Statistics of each row, by the module's formulas.

    Args:
        head: with T rows, and without a bias.
        ids: [T, k] int64, the tokens of the whole vocabulary that are listed; -1 for none. None may
            be twice in a row.
        labels: [T] int64; negative for none.

    Returns:
        A `Listed`, differentiable once in the head, but `best`. Statistics are float32 (float64 for
        float64), gradients are summed in float32.
    """
    x, weight, _, low, up = head
    how = how._replace(
        plan=how.plan._replace(learns=torch.is_grad_enabled() and weight.requires_grad)
    )
    with checks.no_autocast(x):
        rows = replicated(x, how.group).contiguous()
        low = None if low is None else replicated(low, how.group)
        return Listed(*_Listed.apply(rows, weight, low, up, ids, labels, how))


@torch.no_grad()
def most_probable(head: Head, k: int, how: How) -> tuple[torch.Tensor, torch.Tensor]:
    """The k tokens of each row that are most probable, int64 [T, k], and their log-probabilities,
    as `Listed` has them. The first is the most probable. Not differentiable.
    """
    V, parts = head.weight.shape[0], []
    none = head.x.new_full((len(head.x),), -1, dtype=torch.int64)
    for rows, logits in Chunks(head, how.plan, 1 / how.temperature):
        stats = how.statistics(logits, none[rows])
        values, ids = logits.topk(min(k, V))
        if how.group is not None:
            ids = ids + dist.get_rank(how.group) * V
            values, ids = (_joined(t, how.group) for t in (values, ids))
            values, order = values.topk(k)
            ids = ids.gather(-1, order)
        parts.append(
            (ids, values.to(stats.peak.dtype) - stats.peak[:, None] - stats.log_sum[:, None])
        )
    ids, logprobs = (torch.cat(p) for p in zip(*parts, strict=True))
    return ids, logprobs.clamp_max(0.0)


def _joined(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[T, n] of all ranks, [T, n ranks]."""
    parts = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return torch.cat(parts, -1)


class _Listed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, low, up, ids, labels, how):
        V, parts = weight.shape[0], []
        head = Head(x, weight, None, low, up)
        for rows, logits in Chunks(head, how.plan, 1 / how.temperature):
            at, here = how.places(ids[rows], V)
            stats = how.statistics(logits, labels[rows], best=True)
            chosen = (logits.gather(1, at).to(stats.peak.dtype) - stats.peak[:, None]).where(
                here, 0
            )
            if how.group is not None:
                dist.all_reduce(chosen, group=how.group)
            _leave_out(logits, at, here)
            rest = how.statistics(logits, labels[rows])
            others = (rest.peak - stats.peak) + (rest.log_sum - stats.log_sum)
            parts.append(
                (
                    chosen - stats.log_sum[:, None],
                    others.clamp_max(0.0),
                    stats.picked - stats.log_sum,
                    stats.argmax,
                    rest.peak,
                    # If nothing is left, of probabilities that are 0.
                    rest.log_sum.where(rest.log_sum > -torch.inf, 0.0),
                )
            )
        logprobs, others, label, best, *softmax = (torch.cat(p) for p in zip(*parts, strict=True))
        ctx.save_for_backward(x, weight, low, up, ids, labels, logprobs, others, *softmax)
        ctx.how = how
        ctx.mark_non_differentiable(best)
        return logprobs, others, label, best

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_logprobs, g_others, g_label, _):
        x, weight, low, up, ids, labels, logprobs, others, peak, log_sum = ctx.saved_tensors
        how, V = ctx.how, weight.shape[0]
        total = g_logprobs.sum(-1) + g_others + g_label
        g_rest = g_others - others.exp() * total
        g_listed = g_logprobs - logprobs.exp() * total[:, None]
        need_x, need_weight, *of_adapter = ctx.needs_input_grad[:4]
        needs, head = Needs(need_x, need_weight, False, *of_adapter), Head(x, weight, None, low, up)
        chunks = Chunks(head, how.plan, 1 / how.temperature, needs)
        for rows, logits in chunks:
            at, here = how.places(ids[rows], V)
            _leave_out(logits, at, here)
            of_rest = Softmax(peak[rows], log_sum[rows])
            dlogits = how.gradient_(logits, labels[rows], of_rest, g_rest[rows])
            dlogits.scatter_add_(1, at, g_listed[rows].where(here, 0.0).to(dlogits.dtype))
            own, mine = how.places(labels[rows, None], V)
            dlogits.scatter_add_(1, own, g_label[rows, None].where(mine, 0.0).to(dlogits.dtype))
            chunks.add(rows, dlogits)
        gradients = chunks.gradients()
        return gradients.dx, gradients.dweight, gradients.dlow, gradients.dup, None, None, None


def _leave_out(logits: torch.Tensor, at: torch.Tensor, here: torch.Tensor) -> None:
    """Makes columns -inf."""
    logits.scatter_add_(
        1, at, torch.zeros_like(at, dtype=logits.dtype).masked_fill_(here, -torch.inf)
    )
