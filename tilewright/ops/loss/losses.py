"""Shared code of cross_entropy and linear_cross_entropy: a loss's labels and options, their checks,
and the losses in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewright.core import checks
from tilewright.ops.loss.softmax_stats import (
    capped,
    combine,
    entropy,
    peak_of,
    stats_eager,
    without_gradient,
)
from tilewright.ops.loss.targets import divisor, presence, weight_of
from tilewright.ops.loss.vocabulary import across, shard, shard_stats_eager

REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyOutput(NamedTuple):
    """loss, and the requested per-token results (else None): lse, entropy in nats, argmax. Only
    loss is differentiable.
    """

    loss: torch.Tensor
    lse: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    argmax: torch.Tensor | None = None


class Labels(NamedTuple):
    """The targets of a loss and their weights, as the public functions take them."""

    target: torch.Tensor
    class_weight: torch.Tensor | None = None
    token_weight: torch.Tensor | None = None
    num_tokens: torch.Tensor | float | None = None
    group: torch.distributed.ProcessGroup | None = None


class Options(NamedTuple):
    """The options of a loss. softcap: 0.0 for none.   lse, entropy, argmax: whether they are
    returned.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    reduction: str = "mean"
    lse: bool = False
    entropy: bool = False
    argmax: bool = False

    @property
    def extra(self) -> tuple[bool, bool, bool]:
        return self.lse, self.entropy, self.argmax


class Request(NamedTuple):
    """Features of a loss that not every implementation supports. sharded: the vocabulary is."""

    sharded: bool = False

    @classmethod
    def of(cls, labels: Labels) -> Request | None:
        return None if labels.group is None else cls(sharded=True)


def whole_rows_only(request: Request) -> str | None:
    """`refuses` of an implementation that PyTorch computes."""
    if request.sharded:
        return "takes whole rows of logits, not a shard of the vocabulary (group)"
    return None


# ---- checks


def check_options(ignore_index, label_smoothing, z_loss, softcap, reduction):
    """Raises TypeError or ValueError for an option that is invalid for all logits."""
    if not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")
    if not checks.INT64.min <= ignore_index <= checks.INT64.max:
        raise ValueError(f"ignore_index must fit in int64, as targets do, got {ignore_index!r}")
    checks.number("label_smoothing", label_smoothing, 0, 1, "in [0, 1]")
    checks.number("z_loss", z_loss, 0, checks.LARGEST, "a finite number >= 0 (in float32)")
    if softcap is not None:
        checks.number(
            "softcap",
            softcap,
            checks.SMALLEST,
            checks.LARGEST,
            "a finite number > 0 (in float32), or None for no cap",
        )
    checks.choice("reduction", reduction, REDUCTIONS)


def check_labels(logits: torch.Tensor, labels: Labels) -> None:
    """Raises TypeError or ValueError for labels that do not fit logits [..., V]."""
    target, class_weight, token_weight, num_tokens, group = labels
    checks.floating("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"logits must have a last dimension of at least 1, got shape {list(logits.shape)}"
        )
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"target must be a torch.Tensor, got {type(target).__name__}")
    if target.dtype != torch.int64:
        raise TypeError(f"target must be int64 (class indices), got {target.dtype}")
    checks.dense("target", target)
    checks.shape("target", target, tuple(logits.shape[:-1]), "logits without its last dimension")
    world = 1
    if group is not None:
        if not torch.distributed.is_available() or not isinstance(
            group, torch.distributed.ProcessGroup
        ):
            raise TypeError(
                "group must be a torch.distributed.ProcessGroup or None, got "
                f"{type(group).__name__}"
            )
        world = torch.distributed.get_world_size(group)
    if class_weight is not None:
        checks.floating("class_weight", class_weight)
        checks.shape("class_weight", class_weight, (world * logits.shape[-1],), "the vocabulary")
        if class_weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "class_weight must not require a gradient (it gets none), got one that does; "
                "pass class_weight.detach()"
            )
    if token_weight is not None:
        checks.floating("token_weight", token_weight)
        checks.shape("token_weight", token_weight, tuple(target.shape), "that of target")
    if isinstance(num_tokens, torch.Tensor):
        checks.shape("num_tokens", num_tokens, (), "a 0-d tensor, or a number")
        if num_tokens.is_complex() or num_tokens.dtype == torch.bool:
            raise TypeError(f"num_tokens must be of a real dtype, got {num_tokens.dtype}")
        checks.dense("num_tokens", num_tokens)
    elif num_tokens is not None:  # 0, where every token everywhere is ignored, counts as 1
        checks.number(
            "num_tokens",
            num_tokens,
            0,
            checks.LARGEST,
            "a finite number >= 0, a 0-d tensor or None",
        )
    checks.same_device(
        logits=logits, target=target, class_weight=class_weight, token_weight=token_weight
    )


# ---- results


def reshaped(losses: torch.Tensor, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """In this shape, but not as a view: FSDP2 warns if a module returns one."""
    return losses if losses.shape == shape else losses.reshape(shape).clone()


def output(
    loss: torch.Tensor, extra: list[torch.Tensor | None], options: Options, shape: torch.Size
) -> torch.Tensor | CrossEntropyOutput:
    """The public functions' result, for targets of this shape."""
    loss = reshaped(loss, shape if options.reduction == "none" else ())
    if not any(options.extra):
        return loss
    return CrossEntropyOutput(
        loss, *(None if t is None else t.detach().reshape(shape) for t in extra)
    )


def reduced(losses, valid, y_weight, token_weight, reduction, num_tokens):
    """Losses [T] times token weights, or their sum or mean."""
    if token_weight is not None:
        losses = losses * token_weight.reshape(-1).to(losses.dtype)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    by = divisor(valid, y_weight, num_tokens)
    return total / (by.to(losses.dtype) if isinstance(by, torch.Tensor) else by)


# ---- in plain PyTorch


def in_torch(losses_of: Callable) -> Callable:
    """An implementation of cross_entropy from losses_of(rows, target [T], valid, class_weight,
    y_weight, options, group) -> [T] losses before token weights, lse, entropy, argmax.
    """

    def cross_entropy_in_torch(rows, labels, options, inplace=False):
        target, class_weight, token_weight, num_tokens, group = labels
        V = rows.shape[-1] * (1 if group is None else torch.distributed.get_world_size(group))
        valid, flat = presence(target, V, options.ignore_index).reshape(-1), target.reshape(-1)
        class_weight = (
            None
            if class_weight is None
            else class_weight.to(torch.promote_types(rows.dtype, torch.float32))
        )
        y_weight = weight_of(flat, class_weight)
        losses, *extra = losses_of(rows, flat, valid, class_weight, y_weight, options, group)
        loss = reduced(losses, valid, y_weight, token_weight, options.reduction, num_tokens)
        return loss, *extra

    return cross_entropy_in_torch


def losses_eager(rows, target, valid, class_weight, y_weight, options, group):
    statistics = stats_eager if group is None else shard_stats_eager
    V, local_target, weight = shard(rows.shape[-1], target, class_weight, group)
    rows = without_gradient(rows, valid == 0)
    smooth = options.label_smoothing != 0
    stats = statistics(
        rows, local_target, weight, options.softcap, smooth, options.entropy, options.argmax
    )
    if group is not None:
        stats = across(stats, rows, local_target, weight, group)
    losses = combine(
        stats,
        valid,
        y_weight,
        V=V,
        label_smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        weight_sum=None if class_weight is None else class_weight.sum(),
    )
    return (
        losses,
        stats.lse if options.lse else None,
        entropy(stats) if options.entropy else None,
        stats.argmax,
    )


def losses_of_torch(rows, target, valid, class_weight, y_weight, options, group):
    """F.cross_entropy on float32 logits (in bf16 it would round its log-probabilities), with the
    missing parts around it: softcap before, z-loss after, lse and entropy beside it. It supports no
    sharded vocabulary.
    """
    # A pass over the logits, skipped if there is nothing to ignore and the host may check that.
    if valid.is_cuda or torch.compiler.is_compiling() or not valid.all():
        rows = without_gradient(rows, valid == 0)
    z = capped(rows.to(torch.promote_types(rows.dtype, torch.float32)), options.softcap)
    # A target out of range is replaced by some class, and `valid` makes it NaN: ignored, it would
    # have no gradient.
    safe_target = torch.where(valid == 0, -100, target.clamp(0, rows.shape[-1] - 1))
    losses = torch.nn.functional.cross_entropy(
        z,
        safe_target,
        class_weight,
        ignore_index=-100,
        reduction="none",
        label_smoothing=options.label_smoothing,
    )
    lse = None
    if options.z_loss or options.lse:
        # Relative to the peak: otherwise the gradient would contain the rounding of lse.
        peak = peak_of(z)
        lse = peak + (z - peak[:, None]).logsumexp(-1)
    if options.z_loss:
        losses = losses + options.z_loss * lse.square()
    losses = torch.where(valid == 0, 0.0, losses * valid)
    log_p = z.detach().log_softmax(-1) if options.entropy else None
    # A masked-out class has p = 0 and log p = -inf, and contributes 0.
    H = (
        None
        if log_p is None
        else -(log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0)).sum(-1)
    )
    return (
        losses,
        lse if options.lse else None,
        H,
        rows.detach().argmax(-1) if options.argmax else None,
    )


# ---- as operators' schemas take them


def floats(t: torch.Tensor | None) -> torch.Tensor | None:
    """As kernels take them: contiguous float32."""
    return None if t is None else t.to(torch.float32).contiguous()


def number_or_tensor(
    num_tokens: torch.Tensor | float | None,
) -> tuple[torch.Tensor | None, float | None]:
    """As an operator's schema takes it."""
    if isinstance(num_tokens, torch.Tensor):
        return num_tokens.detach(), None
    return None, None if num_tokens is None else float(num_tokens)
