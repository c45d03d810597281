"""Statistics of each row of logits, from which every softmax loss here follows. Shared by
cross_entropy and linear_cross_entropy.

T = rows, V = columns, y = target; z = softcap * tanh(logits / softcap), or logits where softcap is
0. For each row

    peak     = max_c z_c, up to rounding; 0 where that is infinite or NaN log_sum  = log sum_c
    exp(z_c - peak) target   = z_y - peak, or 0 where y is outside [0, V): an ignored row, or a row
    of another vocabulary shard weighted = sum_c w_c (z_c - peak), w = class weights or ones
    (for label smoothing) mean     = sum_c p_c (z_c - peak), p = softmax z                 (entropy
    = log_sum - mean) argmax   = first index of the largest logit     (of a row with a NaN: any
    index)

Losses are made of differences of logits, and lse = peak + log_sum is rounded at its own size: at
logits of 1e6, to 1/16. So all but the peak are relative to it, and a constant added to a row
changes none of them. The peak counts as a
constant: what depends on it alone has no gradient. A loss with gradients g in the others has, with
respect to the logits,

    dlogits_c = (g_log_sum p_c + g_target [c = y] + g_weighted w_c + g_mean p_c (1 + z_c - peak -
    mean))
                * (1 - (z_c / softcap)^2),         p_c = exp((z_c - peak) - log_sum)

so one kernel that computes the statistics and one that turns their gradients into dlogits serve all
losses. Between them there is arithmetic on [T] vectors: `combine` in plain PyTorch, or `losses`,
which also has its derivatives, in one kernel. Statistics are float32 (float64 for float64 logits,
eager only). A class that is masked out by a logit of -inf contributes nothing to log_sum and mean.

Targets are looked at on the device, so that no loss waits for one: a target that is neither in the
vocabulary nor ignore_index makes its row's loss and gradient NaN, and the divisor of "mean" does
not count it. On a CPU, and within `checked_targets`, it is an IndexError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace

import torch

from tilewright import _torch
from tilewright.kernels.launchers import Asked, Found, Stats
from tilewright.ops._library import adopt, define

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
    softcap: 0.0 for none.   smooth, entropy, argmax: whether weighted, mean and argmax are wanted.
    Differentiable in logits."""
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

    The derivative of torch.tanh is 1 - tanh^2, which has few digits left where tanh is near 1, and
    none from 9.1 on (in float32). Here it is that of (1 - q) / (1 + q), which has them all; near 0,
    where 1 - q has lost its own, tanh's.
    """
    if not softcap:
        return z
    u = z / softcap
    size = u.abs()
    q = torch.exp(-2 * size)
    return softcap * torch.where(size < 0.5, torch.tanh(u), u.sign() * ((1 - q) / (1 + q)))


def within(target: torch.Tensor, V: int) -> torch.Tensor:
    """Whether each target is one of V columns."""
    return (target >= 0) & (target < V)


def peak_of(z: torch.Tensor) -> torch.Tensor:
    """[T], a constant: the largest z of each row."""
    return _finite(z.detach().amax(-1))


def _finite(peak: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(peak, nan=0.0, posinf=0.0, neginf=0.0)


def shard_stats_eager(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    softcap: float,
    smooth: bool,
    entropy: bool,
    argmax: bool,
) -> Stats:
    """`stats_eager` of a shard of the vocabulary, which in some row may be nothing but -inf
    although the whole row is
    not: log_sum is -inf there, and gradients are 0, where autograd's formulas for logsumexp and
    softmax give NaN.
    """
    options = softcap, smooth, entropy, argmax
    if softcap:  # of -inf it makes a number
        return stats_eager(logits, target, class_weight, *options)
    low = float("-inf")
    empty = (logits == low).all(-1)
    stats = stats_eager(logits.masked_fill(empty[:, None], 0), target, class_weight, *options)
    return stats._replace(
        log_sum=stats.log_sum.masked_fill(empty, low),
        target=stats.target.masked_fill(empty & within(target, logits.shape[-1]), low),
        weighted=stats.weighted.masked_fill(empty, low) if smooth else None,
    )


def without_gradient(logits: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
    """logits [T, V], whose ignored rows get a gradient of 0 whatever they hold; their statistics
    stay what they are. A
    loss of 0 alone would not do: autograd multiplies its gradient, 0, by what they hold, and 0 *
    NaN is NaN.
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
    """Loss of each row, before token weights and reduction; 0 for ignored rows:

        (1 - e) w_y (lse - z_y) + e / V * sum_c w_c (lse - z_c) + z_loss * lse^2,   e =
        label_smoothing

    whose differences are those of what is relative to the peak.
    stats: of whole rows, with `weighted` where label_smoothing is not 0.   presence: [T], as
        `presence` gives it.
    y_weight: [T], the class weight of each row's target, or None for ones.   V: size of the whole
    vocabulary.
    weight_sum: scalar tensor, sum of the class weights; None for V. Differentiable in the
    statistics.
    """
    loss = stats.log_sum - stats.target
    if y_weight is not None:
        loss = loss * y_weight
    if label_smoothing:
        total = V if weight_sum is None else weight_sum
        loss = (1 - label_smoothing) * loss + (label_smoothing / V) * (
            total * stats.log_sum - stats.weighted
        )
    if (
        z_loss
    ):  # where: an ignored row's lse may be infinite or NaN, and the square's gradient 0 times that
        loss = loss + z_loss * torch.where(presence == 0, 0.0, stats.lse).square()
    return torch.where(presence == 0, 0.0, loss * presence)


def entropy(stats: Stats) -> torch.Tensor:
    """Entropy of softmax z in nats, [T]. `stats` must hold `mean`."""
    return stats.log_sum - stats.mean


# ---- targets

_CHECKED: ContextVar[bool] = ContextVar("checked_targets", default=False)


@contextlib.contextmanager
def checked_targets() -> Iterator[None]:
    """Within it, losses on CUDA tensors raise an IndexError that names the first target that is out
    of range and its row, as they always do on CPU tensors; without it, such a target makes its
    row's loss and gradient NaN.

    The look costs each loss one synchronisation with the device: for tests, and for the first step
    of a run. It is made when a loss runs, so code that torch.compile has compiled follows it too;
    while a CUDA graph is recorded nothing can be looked at, and NaN stands for such a target.
    """
    token = _CHECKED.set(True)
    try:
        yield
    finally:
        _CHECKED.reset(token)


def _may_look(target: torch.Tensor) -> bool:
    return not target.is_cuda or (_CHECKED.get() and not torch.cuda.is_current_stream_capturing())


def check(target: torch.Tensor, V: int, ignore_index: int) -> None:
    """Raises IndexError at the first target that is neither in [0, V) nor ignore_index, where
    that may be looked at.
    """
    if not _may_look(target):
        return
    outside = ~within(target, V) & (target != ignore_index)
    if outside.any():
        first = outside.nonzero()[0].tolist()
        raise IndexError(
            f"target{first or ''} is {int(target[tuple(first)])}; accepted are 0 to {V - 1} and "
            f"ignore_index ({ignore_index})"
        )


def _present(target: torch.Tensor, V: int, ignore_index: int) -> torch.Tensor:
    ignored = target == ignore_index
    return (~ignored).to(torch.float32).masked_fill_(~within(target, V) & ~ignored, float("nan"))


def _presence(target: torch.Tensor, V: int, ignore_index: int) -> torch.Tensor:
    check(target, V, ignore_index)
    return _present(target, V, ignore_index)


def _fake_presence(target, V, ignore_index):
    return torch.empty_like(target, dtype=torch.float32, memory_format=torch.contiguous_format)


# An operator, so that torch.compile leaves its look at the values for run time, and one whose
# result is used, so that it is not removed.
presence = define("target_presence", _presence, _fake_presence)
"""presence(target int64 [...], V, ignore_index) -> float32 [...]: 1 for a row to learn from, 0
where target is ignore_index, NaN where it is neither that nor in [0, V) and `check` may not
look."""


def divisor(
    here: torch.Tensor, y_weight: torch.Tensor | None, num_tokens: torch.Tensor | float | None
) -> torch.Tensor | float:
    """What "mean" divides the sum of losses by: num_tokens, or the weights of the targets to
    learn from; 1 for 0.
    """
    if num_tokens is None:
        num_tokens = (here == 1).to(here.dtype)
        num_tokens = (num_tokens if y_weight is None else num_tokens * y_weight).sum()
    if isinstance(num_tokens, torch.Tensor):
        num_tokens = num_tokens.detach()
        return torch.where(num_tokens == 0, 1, num_tokens)
    return num_tokens or 1


def weight_of(target: torch.Tensor, class_weight: torch.Tensor | None) -> torch.Tensor | None:
    """[T], the class weight of each target; that of some class for a target that is none."""
    return (
        None if class_weight is None else class_weight[target.clamp(0, class_weight.shape[0] - 1)]
    )


# ---- losses and their derivatives in the statistics, for kernels that make a gradient in one pass


def losses_in_torch(
    stats: Stats, rows: slice, asked: Asked, found: Found, before: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What `softmax_stats_triton.losses` does, in plain PyTorch."""
    target = asked.target[rows]
    here = _present(target, asked.V, asked.ignore_index)
    y_weight = weight_of(target, asked.class_weight)
    if before is None and found.divisor is not None:
        whole = asked.target
        by = divisor(
            _present(whole, asked.V, asked.ignore_index),
            weight_of(whole, asked.class_weight),
            asked.num_tokens,
        )
        found.divisor.copy_(by) if isinstance(by, torch.Tensor) else found.divisor.fill_(by)
    losses = found.losses[rows]
    losses.copy_(
        combine(
            stats,
            here,
            y_weight,
            V=asked.V,
            label_smoothing=asked.label_smoothing,
            z_loss=asked.z_loss,
            weight_sum=asked.weight_sum,
        )
    )
    row = here
    if asked.token_weight is not None:
        u = asked.token_weight[rows].to(torch.float32)
        row, losses = torch.where(here == 0, 0.0, here * u), torch.where(here == 0, 0.0, losses * u)
    total = losses.sum()
    if asked.divide:
        row, total = row / found.divisor, total / found.divisor
    total = total if before is None else before + total
    hard = (row if y_weight is None else row * y_weight) * (1 - asked.label_smoothing)
    g_log_sum, g_weighted = hard, None
    if asked.label_smoothing:
        soft = row * (asked.label_smoothing / asked.V)
        g_log_sum, g_weighted = (
            hard + soft * (asked.V if asked.weight_sum is None else asked.weight_sum),
            -soft,
        )
    if asked.z_loss:  # where: lse of an ignored row may be infinite
        g_log_sum = g_log_sum + torch.where(row == 0, 0.0, 2 * asked.z_loss * row * stats.lse)
    return total, g_log_sum, -hard, g_weighted


# ---- a vocabulary in shards


class _Across(torch.autograd.Function):
    """Statistics of whole rows from those of this rank's shard. Every rank computes the same loss
    from the result and differentiates it by itself, so gradients are those of the local shard and
    need no communication.
    """

    @staticmethod
    def forward(ctx, group, peak, log_sum, target, weighted, mean, inside, total):
        reduce = torch.distributed.all_reduce
        op = torch.distributed.ReduceOp
        low = float("-inf")
        whole = torch.where(log_sum == low, low, peak)  # a shard that is masked out has no peak
        reduce(whole, op.MAX, group)
        whole = _finite(whole)
        shift = (
            peak - whole
        )  # what is relative to this shard's peak becomes relative to that of the row
        share = torch.where(log_sum == low, 0.0, torch.exp(log_sum + shift))
        parts = [share, torch.where(inside, target + shift, 0.0)]
        if weighted is not None:
            parts.append(weighted + total * shift)
        if mean is not None:  # nor a mean
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
    def backward(ctx, g_peak, g_log_sum, g_target, g_weighted, g_mean):
        share, mean, whole_mean = ctx.saved_tensors
        g = None if g_log_sum is None else g_log_sum * share
        if g_mean is not None:
            through = g_mean * torch.where(share == 0, 0.0, share * (mean - whole_mean))
            g = through if g is None else g + through
            g_mean = g_mean * share
        return None, None, g, g_target, g_weighted, g_mean, None, None


def across(
    stats: Stats,
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    group: torch.distributed.ProcessGroup,
) -> Stats:
    """Statistics of whole rows, on every rank, from those of equal shards of the vocabulary, one a
    rank of `group` in rank order. Two all-reduces of at most [4, T] (four with argmax).
    Differentiable in this rank's statistics.

    stats: of this rank's shard.   logits: [T, V / world], target: [T], counted from the shard's
    first column, and
        class_weight: [V / world] or None: what they are of.
    """
    columns = logits.shape[-1]
    total = columns if class_weight is None else class_weight.sum()
    *found, best = stats
    found = _Across.apply(group, *found, within(target, columns), total)
    if best is not None:
        op = torch.distributed.ReduceOp
        with torch.no_grad():
            value = logits.gather(-1, best[:, None])[:, 0].to(stats.peak.dtype)
            largest = value.clone()
            torch.distributed.all_reduce(largest, op.MAX, group)
            first = best + torch.distributed.get_rank(group) * columns
            best = first.where(value == largest, torch.iinfo(torch.int64).max)
            torch.distributed.all_reduce(best, op.MIN, group)
    return Stats(*found, best)


def named(group: torch.distributed.ProcessGroup | None) -> str:
    """A group by a name, since an operator's schema knows strings and no groups; `group_of`
    gives it back.
    """
    return "" if group is None else group.group_name


def group_of(name: str) -> torch.distributed.ProcessGroup | None:
    return _torch.group_by_name(name) if name else None


def shard(
    columns: int,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    group: torch.distributed.ProcessGroup | None,
) -> tuple[int, torch.Tensor, torch.Tensor | None]:
    """(whole vocabulary, target and class weights as this rank's columns see them)."""
    if group is None:
        return columns, target, class_weight
    start = torch.distributed.get_rank(group) * columns
    mine = None if class_weight is None else class_weight[start : start + columns]
    return torch.distributed.get_world_size(group) * columns, target - start, mine


# ---- fused implementations: the kernels of statistics, of losses and of the logits' gradient


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
):
    return None


def _register(
    forward: Callable, backward: Callable, backward_: Callable, losses: Callable, scale_: Callable
) -> SimpleNamespace:
    """forward: the launcher of the statistics.   backward, backward_: operators.   losses,
    scale_: launchers.
    """

    def statistics(logits, target, class_weight, softcap, smooth, entropy, argmax) -> Stats:
        """`stats_eager` of logits with contiguous rows and float32 class weights, without
        autograd.
        """
        peak, log_sum, picked, weighted, mean, best = forward(
            logits, target, class_weight if smooth else None, softcap, smooth, entropy, argmax
        )
        return Stats(
            peak,
            log_sum,
            picked,
            weighted if smooth else None,
            mean if entropy else None,
            best if argmax else None,
        )

    def gradient(
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
        inplace,
    ):
        """Gradient of the logits from the gradients of the statistics, of which None stands for
        zeros, times `scale` ([], [T], or None for 1). inplace: it overwrites the logits' memory,
        and is returned as a view of it.
        """

        def vector(g):
            return torch.zeros_like(peak) if g is None else g.contiguous()

        args = (
            logits,
            target,
            class_weight if g_weighted is not None else None,
            softcap,
            peak,
            log_sum,
            mean if g_mean is not None else None,
            vector(g_log_sum),
            vector(g_target),
            None if g_weighted is None else g_weighted.contiguous(),
            None if g_mean is None else g_mean.contiguous(),
            None if scale is None else scale.contiguous(),
        )
        if not inplace:
            return backward(*args)
        backward_(*args)
        return logits.detach()

    return SimpleNamespace(
        forward=statistics,
        backward=gradient,
        losses=losses,
        scale_=scale_,
        operators=(backward, backward_),
    )


def _scale_in_torch_(acc: torch.Tensor, factor: torch.Tensor) -> None:
    """acc *= factor [], on a CPU, where a look at the factor costs nothing."""
    if factor.item() != 1:
        acc.mul_(factor)


_loaded: dict[str, SimpleNamespace] = {}


def _defined(name: str, k: ModuleType, losses: Callable, scale_: Callable) -> SimpleNamespace:
    return _register(
        k.forward,
        define(f"softmax_stats_{name}_backward", k.backward, _fake_backward),
        define(
            f"softmax_stats_{name}_backward_", k.backward_, _fake_backward_, mutates=("logits",)
        ),
        losses,
        scale_,
    )


def triton() -> SimpleNamespace:
    """The kernels in Triton: forward, losses, backward and scale_."""
    if "triton" not in _loaded:
        from tilewright.kernels import softmax_stats_triton as k

        _loaded["triton"] = _defined("triton", k, k.losses, k.scale_)
    return _loaded["triton"]


def cute() -> SimpleNamespace:
    """Those in CuTe DSL for sm_90 and sm_100, with losses in PyTorch."""
    if "cute" not in _loaded:
        from tilewright.kernels import softmax_stats_cute as k

        _loaded["cute"] = _defined("cute", k, losses_in_torch, _scale_in_torch_)
    return _loaded["cute"]


def cpp() -> SimpleNamespace:
    """Those in C++ for the CPU (float32 and bfloat16), with losses in PyTorch."""
    if "cpp" not in _loaded:
        _loaded["cpp"] = _register(
            torch.ops.tilewright.softmax_stats_cpp_forward.default,
            adopt("softmax_stats_cpp_backward", _fake_backward),
            adopt("softmax_stats_cpp_backward_", _fake_backward_),
            losses_in_torch,
            _scale_in_torch_,
        )
    return _loaded["cpp"]


def tunables() -> tuple:
    from tilewright.kernels import softmax_stats_triton

    return softmax_stats_triton.TUNABLES


def gate() -> list:
    from tilewright.kernels import softmax_stats_triton

    return softmax_stats_triton.gate()


def cute_specs() -> list:
    from tilewright.kernels import softmax_stats_cute

    return softmax_stats_cute.specs()
