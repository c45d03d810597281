"""Cross-entropy of a language model's logits, with everything that training asks of it in one pass:

    z      = softcap * tanh(logits / softcap)     (or logits) lse    = log sum_c exp z_c loss_t =
    u_t * ((1 - e) w_y (lse - z_y) + e / V * sum_c w_c (lse - z_c) + z_loss * lse^2),  0 for ignored
    targets

V = vocabulary, T = tokens, y = target, e = label_smoothing, w = class weights, u = token weights.
The eager twin is `stats_eager` and `combine` of `_softmax_stats.py`. The fused implementations are
three kernels, forward and
backward together: statistics of the rows, the losses and their derivatives in the statistics, and
the gradient of the logits, which takes the upstream gradient as it goes.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch

from tilewright import platform
from tilewright.kernels.launchers import Asked, Found
from tilewright.ops import _checks, _softmax_stats, cases
from tilewright.ops._library import define, differentiate
from tilewright.ops._softmax_stats import (
    across,
    capped,
    check,
    combine,
    divisor,
    entropy,
    group_of,
    named,
    peak_of,
    presence,
    shard,
    shard_stats_eager,
    stats_eager,
    weight_of,
    without_gradient,
)
from tilewright.registry import Case, Cost, Implementation, Op

REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyOutput(NamedTuple):
    """loss, and per token what was asked for (else None): lse, entropy in nats, argmax. Only loss
    is differentiable.
    """

    loss: torch.Tensor
    lse: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    argmax: torch.Tensor | None = None


@_checks.autocast("float32")
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    reduction: str = "mean",
    num_tokens: int | torch.Tensor | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_argmax: bool = False,
    inplace: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
    implementation: str = "auto",
) -> torch.Tensor | CrossEntropyOutput:
    """Cross-entropy between logits and target, per token or reduced; natural logarithm. The module
    has the formula.

    logits: [..., V] fp32 | bf16 | fp16 (fp64 with eager and torch). Rows may lie further apart than
    V.
    target: [...] int64, each in [0, V) or ignore_index, whose tokens have loss and gradient 0
        whatever their logits hold.
    label_smoothing: e in [0, 1].   z_loss: factor of lse^2, >= 0.   softcap: > 0, or None for none.
        All are finite in float32.
    class_weight: [V] float, or None.   token_weight: [...] float, multiplies each token's loss, or
    None.
    reduction: "none": [...]; "sum"; or "mean", the sum divided by num_tokens if given, else by the
        sum of w_y over tokens that are not ignored (PyTorch's rule). token_weight is not in that
        divisor: weights may have any sign, and a batch's scale should not hang on them. A divisor
        of 0 (all tokens ignored) counts
        as 1: loss 0 and gradients 0, where PyTorch gives NaN.
    num_tokens: number >= 0 or 0-d tensor, real; with gradient accumulation or data parallelism, the
        count over all of them. Not differentiable. A tensor's value is not looked at.
    return_lse, return_entropy, return_argmax: return a CrossEntropyOutput that holds, for every
        token (also ignored ones), lse, the entropy of softmax z, and the index of the largest logit
        (the first, on ties; undefined in a row with a NaN). Detached.
    inplace: lets backward write the gradient over the logits' memory, T * V * itemsize bytes less
        at the peak. The logits, and all that shares their memory, then hold the gradient afterwards
        (where they had to be copied because their last dimension is strided, they do not); a second
        backward through them, and backward of another op that saved them, raise RuntimeError. The
        eager and torch implementations take no notice. It is refused for logits whose elements
        share memory, as expanded ones do, and under torch.compile, which reuses memory by its own
        plan.
    group: logits are [..., V / world], this rank's shard of the vocabulary in rank order, all of
        one size; target and class_weight are of the whole vocabulary and the same on every rank.
        Every rank returns the same loss, and its backward gives the gradient of its own shard,
        without communication. Costs two all-reduces of at most [4, T] (four with return_argmax).
    Returns loss in fp32 (fp64 for fp64), or a CrossEntropyOutput. Computed in fp32, relative to the
    largest logit of a row, so that a constant added to all of them costs no precision, and rounded
    once, on storing the gradient. Differentiable in logits and token_weight, once. A target that is
    neither in [0, V) nor ignore_index: on CUDA tensors, where no loss waits for the device, the
        loss of its token and the gradient of its row are NaN (so the sum and the mean are, too),
        whatever its token_weight, and the divisor does not count it. On CPU tensors, where a look
        costs no wait, and within
        `checked_targets()`: IndexError with its value and place.
    A row that holds +inf has lse inf and a gradient that is NaN there; its loss is inf, or NaN if
        that is its target's logit or options make one of it. (F.cross_entropy, and the torch
        implementation: NaN.) Under a softcap it is a row like any other.
    Raises TypeError or ValueError for arguments that do not fit; IndexError for a target out of
    range, as said above; ImplementationUnavailable for a named implementation that cannot run here.
    Source: options as in torch.nn.functional.cross_entropy; z-loss as in PaLM (arXiv:2204.02311,
    section 5); softcap as in Gemma 2 (arXiv:2408.00118, section 2); sharded vocabulary as in
    Megatron-LM (arXiv:1909.08053, section 3).
    """
    softcap = _validate(
        logits,
        target,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        class_weight,
        token_weight,
        reduction,
        num_tokens,
        inplace,
        group,
    )
    loss, *extra = CROSS_ENTROPY.pick(implementation, logits)(
        logits.reshape(-1, logits.shape[-1]),
        target,
        class_weight,
        token_weight,
        num_tokens,
        ignore_index,
        softcap,
        float(label_smoothing),
        float(z_loss),
        reduction,
        return_lse,
        return_entropy,
        return_argmax,
        inplace,
        group,
    )
    if reduction == "none":
        loss = reshaped(loss, target.shape)
    if not (return_lse or return_entropy or return_argmax):
        return loss
    return CrossEntropyOutput(
        loss, *(None if t is None else t.detach().reshape(target.shape) for t in extra)
    )


def reshaped(losses: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """In that shape, and not as a view, which FSDP2 warns of where a module returns one."""
    return losses if losses.shape == shape else losses.reshape(shape).clone()


def check_options(ignore_index, label_smoothing, z_loss, softcap, reduction):
    """Raises TypeError or ValueError for an option that no logits could make right."""
    if not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")
    if not _checks.INT64.min <= ignore_index <= _checks.INT64.max:
        raise ValueError(f"ignore_index must fit in int64, as targets do, got {ignore_index!r}")
    _checks.number("label_smoothing", label_smoothing, 0, 1, "in [0, 1]")
    _checks.number("z_loss", z_loss, 0, _checks.LARGEST, "a finite number >= 0 (in float32)")
    if softcap is not None:
        _checks.number(
            "softcap",
            softcap,
            _checks.SMALLEST,
            _checks.LARGEST,
            "a finite number > 0 (in float32), or None for no cap",
        )
    _checks.choice("reduction", reduction, REDUCTIONS)


def _validate(
    logits,
    target,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    class_weight,
    token_weight,
    reduction,
    num_tokens,
    inplace,
    group,
):
    _checks.floating("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"logits must have a last dimension of at least 1, got shape {list(logits.shape)}"
        )
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"target must be a torch.Tensor, got {type(target).__name__}")
    if target.dtype != torch.int64:
        raise TypeError(f"target must be int64 (class indices), got {target.dtype}")
    _checks.dense("target", target)
    _checks.shape("target", target, tuple(logits.shape[:-1]), "logits without its last dimension")
    check_options(ignore_index, label_smoothing, z_loss, softcap, reduction)
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
        _checks.floating("class_weight", class_weight)
        _checks.shape("class_weight", class_weight, (world * logits.shape[-1],), "the vocabulary")
        if class_weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "class_weight must not require a gradient (it gets none), got one that does; "
                "pass class_weight.detach()"
            )
    if token_weight is not None:
        _checks.floating("token_weight", token_weight)
        _checks.shape("token_weight", token_weight, tuple(target.shape), "that of target")
    if isinstance(num_tokens, torch.Tensor):
        _checks.shape("num_tokens", num_tokens, (), "a 0-d tensor, or a number")
        if num_tokens.is_complex() or num_tokens.dtype == torch.bool:
            raise TypeError(f"num_tokens must be of a real dtype, got {num_tokens.dtype}")
        _checks.dense("num_tokens", num_tokens)
    elif num_tokens is not None:  # 0, where every token everywhere is ignored, counts as 1
        _checks.number(
            "num_tokens",
            num_tokens,
            0,
            _checks.LARGEST,
            "a finite number >= 0, a 0-d tensor or None",
        )
    if inplace and torch.compiler.is_compiling():
        raise ValueError(
            "inplace must be False under torch.compile, which plans memory itself, got True; or "
            "keep the loss outside the compiled region"
        )
    if inplace and _checks.overlaps_itself(
        logits
    ):  # gradients would overwrite logits that are still to be read
        raise ValueError(
            "inplace=True cannot overwrite logits whose elements share memory, got shape "
            f"{list(logits.shape)} with strides {list(logits.stride())}; pass logits.contiguous() "
            f"or "
            "inplace=False"
        )
    _checks.same_device(
        logits=logits, target=target, class_weight=class_weight, token_weight=token_weight
    )
    return 0.0 if softcap is None else float(softcap)


# ---- in plain PyTorch


def in_torch(losses_of):
    """An implementation made of losses_of(rows, target, here, class_weight, y_weight, softcap,
    label_smoothing, z_loss, return_lse, return_entropy, return_argmax, group) -> [T] losses before
    token weights, lse, entropy, argmax.
    """

    def cross_entropy_in_torch(
        rows,
        target,
        class_weight,
        token_weight,
        num_tokens,
        ignore_index,
        softcap,
        label_smoothing,
        z_loss,
        reduction,
        return_lse,
        return_entropy,
        return_argmax,
        inplace,
        group,
    ):
        V = rows.shape[-1] * (1 if group is None else torch.distributed.get_world_size(group))
        here, flat = presence(target, V, ignore_index).reshape(-1), target.reshape(-1)
        class_weight = (
            None
            if class_weight is None
            else class_weight.to(torch.promote_types(rows.dtype, torch.float32))
        )
        y_weight = weight_of(flat, class_weight)
        losses, *extra = losses_of(
            rows,
            flat,
            here,
            class_weight,
            y_weight,
            softcap,
            label_smoothing,
            z_loss,
            return_lse,
            return_entropy,
            return_argmax,
            group,
        )
        return reduced(losses, here, y_weight, token_weight, reduction, num_tokens), *extra

    return cross_entropy_in_torch


def reduced(losses, here, y_weight, token_weight, reduction, num_tokens):
    """Losses [T] times token weights, or their sum or mean."""
    if token_weight is not None:
        losses = losses * token_weight.reshape(-1).to(losses.dtype)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    by = divisor(here, y_weight, num_tokens)
    return total / (by.to(losses.dtype) if isinstance(by, torch.Tensor) else by)


def losses_eager(
    rows,
    target,
    here,
    class_weight,
    y_weight,
    softcap,
    label_smoothing,
    z_loss,
    return_lse,
    return_entropy,
    return_argmax,
    group,
):
    statistics = stats_eager if group is None else shard_stats_eager
    V, mine, weight = shard(rows.shape[-1], target, class_weight, group)
    rows = without_gradient(rows, here == 0)
    stats = statistics(
        rows, mine, weight, softcap, label_smoothing != 0, return_entropy, return_argmax
    )
    if group is not None:
        stats = across(stats, rows, mine, weight, group)
    losses = combine(
        stats,
        here,
        y_weight,
        V=V,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        weight_sum=None if class_weight is None else class_weight.sum(),
    )
    return (
        losses,
        stats.lse if return_lse else None,
        entropy(stats) if return_entropy else None,
        stats.argmax,
    )


cross_entropy_eager = in_torch(losses_eager)


def losses_of_torch(
    rows,
    target,
    here,
    class_weight,
    y_weight,
    softcap,
    label_smoothing,
    z_loss,
    return_lse,
    return_entropy,
    return_argmax,
    group,
):
    """F.cross_entropy on float32 logits (in bf16 it would round its log-probabilities), with what
    it lacks around it: softcap before, z-loss after, lse and entropy beside it. It has no form for
    a sharded vocabulary.
    """
    if group is not None:
        raise ValueError(
            "cross_entropy[torch]: group must be None: F.cross_entropy takes whole rows "
            f"of logits only, got {group!r}; the other implementations accept one"
        )
    # A pass over the logits, left out where there is nothing to ignore if that may be looked at.
    if here.is_cuda or torch.compiler.is_compiling() or not here.all():
        rows = without_gradient(rows, here == 0)
    z = capped(rows.to(torch.promote_types(rows.dtype, torch.float32)), softcap)
    # One that is out of range stands for some class, and `here` makes a NaN of it: ignored, it
    # would have no gradient.
    kept = torch.where(here == 0, -100, target.clamp(0, rows.shape[-1] - 1))
    losses = torch.nn.functional.cross_entropy(
        z, kept, class_weight, ignore_index=-100, reduction="none", label_smoothing=label_smoothing
    )
    lse = None
    if (
        z_loss or return_lse
    ):  # relative to the peak: the gradient of a rounded lse would have its rounding in it
        peak = peak_of(z)
        lse = peak + (z - peak[:, None]).logsumexp(-1)
    if z_loss:
        losses = losses + z_loss * lse.square()
    losses = torch.where(here == 0, 0.0, losses * here)
    log_p = z.detach().log_softmax(-1) if return_entropy else None
    # A masked-out class has p = 0 and log p = -inf, and counts 0.
    H = (
        None
        if log_p is None
        else -(log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0)).sum(-1)
    )
    return (
        losses,
        lse if return_lse else None,
        H,
        rows.detach().argmax(-1) if return_argmax else None,
    )


# ---- fused: an operator with an autograd formula around one set of kernels


def floats(t: torch.Tensor | None) -> torch.Tensor | None:
    """As kernels take them: float32, one after the other."""
    return None if t is None else t.to(torch.float32).contiguous()


def number_or_tensor(
    num_tokens: torch.Tensor | float | None,
) -> tuple[torch.Tensor | None, float | None]:
    """As an operator's schema takes it."""
    if isinstance(num_tokens, torch.Tensor):
        return num_tokens.detach(), None
    return None, None if num_tokens is None else float(num_tokens)


def _register(name, kernels):
    def forward(
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
        the divisor. Those that are not there are empty. overwrite is for the autograd formula.
        """
        T, columns = logits.shape
        smooth, flat = label_smoothing != 0, target.view(-1)
        process_group = group_of(group)
        V, mine, weight = shard(columns, flat, class_weight, process_group)
        check(target, V, ignore_index)
        stats = kernels.forward(logits, mine, weight, softcap, smooth, entropy, argmax)
        if process_group is not None:
            stats = across(stats, logits, mine, weight, process_group)
        asked = Asked(
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
        found = Found(stats.peak.new_empty(T), stats.peak.new_empty(()) if mean else None)
        total, g_log_sum, g_target, g_weighted = kernels.losses(
            stats, slice(0, T), asked, found, None
        )

        def given(t, dtype=torch.float32):
            return logits.new_empty(0, dtype=dtype) if t is None else t

        return (
            total,
            found.losses,
            stats.peak,
            stats.log_sum,
            given(stats.mean),
            given(stats.argmax, torch.int64),
            g_log_sum,
            g_target,
            given(g_weighted),
            given(found.divisor),
        )

    def fake(
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
        def vector(wanted=True, dtype=torch.float32):
            return logits.new_empty(logits.shape[0] if wanted else 0, dtype=dtype)

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

    op = define(f"cross_entropy_{name}", forward, fake)

    def setup(ctx, inputs, output):
        (
            logits,
            target,
            class_weight,
            token_weight,
            _,
            _,
            _,
            softcap,
            smoothing,
            _,
            mean,
            _,
            _,
            overwrite,
            group,
        ) = inputs
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

    def formula(ctx, g_total, g_losses, *others):
        none = (None,) * 11
        g = g_losses if g_total is None else g_total  # one of the two is what the loss was made of
        if g is None:
            return (None, None, None, None, *none)
        logits, target, class_weight, peak, log_sum, g_log_sum, g_target, g_weighted, losses, by = (
            ctx.saved_tensors
        )
        softcap, overwrite, group = ctx.options
        dlogits = d_token_weight = None
        if ctx.needs_input_grad[0]:
            if overwrite and not torch.compiler.is_compiling():
                # Writes by a custom operator are not counted by themselves; counted, they make a
                # second backward an error.
                torch.autograd.graph.increment_version(logits)
            _, mine, weight = shard(
                logits.shape[-1], target.view(-1), class_weight, group_of(group)
            )
            dlogits = kernels.backward(
                logits,
                mine,
                weight,
                softcap,
                peak,
                log_sum,
                None,
                g_log_sum,
                g_target,
                g_weighted,
                None,
                g,
                overwrite,
            )
        if ctx.needs_input_grad[3]:
            d_token_weight = g * losses
            d_token_weight = d_token_weight if by is None else d_token_weight / by
        return dlogits, None, None, d_token_weight, *none

    differentiate(op, formula, setup)

    def cross_entropy_fused(
        rows,
        target,
        class_weight,
        token_weight,
        num_tokens,
        ignore_index,
        softcap,
        label_smoothing,
        z_loss,
        reduction,
        return_lse,
        return_entropy,
        return_argmax,
        inplace,
        group,
    ):
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        summed = reduction != "none"
        in_kernel = (
            token_weight.reshape(-1).contiguous() if token_weight is not None and summed else None
        )
        num_tokens, number = number_or_tensor(num_tokens)
        total, losses, peak, log_sum, mean, argmax, *_ = op(
            rows,
            target.contiguous(),
            floats(class_weight),
            in_kernel,
            num_tokens,
            number,
            ignore_index,
            softcap,
            label_smoothing,
            z_loss,
            reduction == "mean",
            return_entropy,
            return_argmax,
            inplace,
            named(group),
        )
        if not summed:
            total = (
                losses
                if token_weight is None
                else losses * token_weight.reshape(-1).to(losses.dtype)
            )
        return (
            total,
            peak + log_sum if return_lse else None,
            log_sum - mean if return_entropy else None,
            argmax if return_argmax else None,
        )

    return SimpleNamespace(cross_entropy=cross_entropy_fused, operators=(op, *kernels.operators))


_loaded: dict[str, SimpleNamespace] = {}


def _fused(name: str) -> SimpleNamespace:
    if name not in _loaded:
        _loaded[name] = _register(name, getattr(_softmax_stats, name)())
    return _loaded[name]


# ---- cases


def _case(
    name,
    shape,
    *,
    tags=cases.CONTRACT,
    ignored="some",
    token_weight=False,
    class_weight=False,
    offset=0.0,
    saturated=False,
    **options,
):
    """offset: added to all logits, as far as the dtype holds it.   saturated: logits of 3.5 to
    5 softcaps.
    """
    V, T = shape[-1], math.prod(shape[:-1])

    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        kw = {
            "logits": cases.randn(*shape, device=device, dtype=dtype, gen=g, scale=2.0),
            "target": torch.randint(V, shape[:-1], device=device, generator=g),
        }
        logits = kw["logits"].detach()
        if offset:
            logits += cases.held(offset, dtype)
        if saturated:
            logits.copy_(
                options["softcap"] * (3.5 + logits.abs() / 4).clamp_max(5.0).copysign(logits)
            )
        index = options.get("ignore_index", -100)
        if ignored == "all":
            kw["target"].fill_(index)
        elif ignored == "some":
            kw["target"].flatten()[1::3] = index
        if token_weight:
            kw["token_weight"] = cases.randn(
                *shape[:-1],
                device=device,
                dtype=torch.float32,
                gen=g,
                scale=0.5,
                shift=1.0,
                requires_grad=False,
            )
        if class_weight:
            kw["class_weight"] = torch.rand(V, device=device, generator=g) + 0.5
        return {**kw, **options}

    def cost(itemsize):
        n = T * V * itemsize  # forward: logits in; backward: logits in, their gradient out
        return Cost(n, 2 * n, 4 * T * V, 5 * T * V)

    return Case(name, make, cost, tags)


def _all_cases():
    returns = {"return_lse": True, "return_entropy": True, "return_argmax": True}
    everything = {
        "label_smoothing": 0.1,
        "z_loss": 1e-2,
        "softcap": 5.0,
        "token_weight": True,
        "class_weight": True,
    }
    small = [
        _case("ragged", (3, 7, 1003)),
        _case("tiny", (5, 7)),
        _case("by_eight", (3, 4408)),  # rows aligned to 16 bytes and no more
        _case("none_ignored", (6, 100), ignored="none"),
        _case("all_ignored", (4, 100), ignored="all", **returns),
        _case("no_rows", (0, 64)),
        _case("one_class", (3, 1), label_smoothing=0.1, z_loss=0.1, **returns),
        _case("ignore_index_inside", (6, 100), ignore_index=7, label_smoothing=0.1),
        _case("label_smoothing", (6, 100), label_smoothing=0.1),
        _case("z_loss", (6, 100), z_loss=1e-2),
        _case("softcap", (6, 300), softcap=5.0),
        _case("softcap_saturated", (6, 300), softcap=5.0, saturated=True),
        _case("class_weight", (6, 100), class_weight=True),
        _case("class_weight_smoothing", (6, 100), class_weight=True, label_smoothing=0.2),
        _case("token_weight", (2, 3, 100), token_weight=True),
        _case("sum", (6, 100), reduction="sum"),
        _case("none", (2, 5, 100), reduction="none"),
        _case("num_tokens", (6, 100), num_tokens=17),
        _case("returns", (2, 5, 1003), **returns),
        _case("offset_1e3", (6, 100), offset=1e3),
        _case("offset_1e4", (6, 100), offset=1e4, class_weight=True, label_smoothing=0.2),
        _case("offset_1e6", (2, 5, 1003), offset=1e6, **returns),
        _case("inplace", (6, 100), inplace=True, label_smoothing=0.1),
        _case("everything", (2, 5, 1000), reduction="none", **everything, **returns),
        _case("everything_wide", (3, 9001), num_tokens=3, inplace=True, **everything, **returns),
    ]
    timed = []
    for tags, T in ((cases.CUDA, 8192), (cases.CPU, 256)):
        for name in ("qwen3-8b", "llama-3-8b", "gemma-3-4b", "deepseek-v3"):
            options = {"softcap": 30.0} if name.startswith("gemma") else {}
            timed.append(
                _case(name, (T, cases.MODELS[name].vocab), tags=tags, ignored="none", **options)
            )
    timed.append(
        _case(
            "llama-3-8b-inplace",
            (8192, cases.MODELS["llama-3-8b"].vocab),
            tags=cases.CUDA,
            ignored="none",
            inplace=True,
        )
    )
    big = _case("big", (2**13 + 3, 2**18), tags=cases.BIG, reduction="none", ignored="none")
    return (*small, *timed, big)


CROSS_ENTROPY = Op(
    "cross_entropy",
    cross_entropy,
    cross_entropy_eager,
    (
        Implementation(
            "triton",
            lambda: _fused("triton").cross_entropy,
            platform.no_triton,
            batch_invariant=cases.ANYWHERE,
            gate=_softmax_stats.gate,
            tunables=_softmax_stats.tunables,
        ),
        # Never the choice of `auto` until it has been measured to beat Triton on a GPU.
        Implementation(
            "cute",
            lambda: _fused("cute").cross_entropy,
            platform.no_cute,
            devices=(),
            gate=_softmax_stats.cute_specs,
        ),
        Implementation(
            "cpp",
            lambda: _fused("cpp").cross_entropy,
            platform.no_cpp,
            ("cpu",),
            (torch.float32, torch.bfloat16),
            batch_invariant=("cpu",),
        ),
        Implementation(
            "torch",
            lambda: in_torch(losses_of_torch),
            devices=("cuda", "cpu"),
            dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        ),
    ),
    _all_cases(),
    goals=cases.near_copy(92, "forward", "forward_backward"),
)
