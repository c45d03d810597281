"""Cross-entropy of a language model's logits, with its training options, in one pass:

    z      = softcap * tanh(logits / softcap), or logits without a softcap
    lse    = log sum_c exp z_c
    loss_t = u_t * ((1 - e) w_y (lse - z_y) + e / V * sum_c w_c (lse - z_c) + z_loss * lse^2)
             (0 for ignored targets)

V = vocabulary, T = tokens, y = target, e = label_smoothing, w = class weights, u = token weights.
It is computed from the statistics of `softmax_stats.py`. The fused implementations are three
kernels, forward and backward together: the statistics of the rows; the losses and their derivatives
with respect to the statistics; and the gradient of the logits, which multiplies by the upstream
gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilewright.core import checks, platform
from tilewright.core.library import Operator, declare, from_kernels
from tilewright.core.registry import Case, Cost, Implementation, Op, in_cpp, in_triton
from tilewright.core.takes import takes
from tilewright.core.torch_names import ProcessGroup
from tilewright.kernels.loss.operators import (
    LossInputs,
    LossOutputs,
    Scaling,
    Softmax,
    Stats,
    StatsGradients,
    Wanted,
    empty_rows,
    empty_statistics,
)
from tilewright.ops import cases
from tilewright.ops.loss import softmax_stats, targets
from tilewright.ops.loss.softmax_stats import (
    capped,
    peak_of,
    reshaped,
    stats_eager,
    without_gradient,
)
from tilewright.ops.loss.targets import (
    IGNORE_INDEX,
    TARGET,
    Labels,
    divisor,
    presence,
    present,
    weight_of,
)
from tilewright.ops.loss.vocabulary import world_size

REDUCTIONS = ("mean", "sum", "none")

LOGITS = {"logits": "float [*T, V]", "target": TARGET}
COLUMNS = "V >= 1"
SOFTCAP = "number (0, inf)"
# The options of a cross-entropy of targets [*T].
LOSS = {
    "ignore_index": IGNORE_INDEX,
    "label_smoothing": "number [0, 1]",
    "z_loss": "number [0, inf)",
    "softcap": SOFTCAP,
    "class_weight": "constant float [classes]",
    "token_weight": "float [*T]",
    "reduction": REDUCTIONS,
    "num_tokens": "constant float | int64 | int32 | int16 | int8 | uint8 [] or number [0, inf)",
    "return_lse": "bool",
    "return_entropy": "bool",
    "return_argmax": "bool",
}


class CrossEntropyOutput(NamedTuple):
    """loss, and the requested per-token results (else None): lse, entropy in nats, argmax. Only
    loss is differentiable.
    """

    loss: torch.Tensor
    lse: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    argmax: torch.Tensor | None = None


# Wide: F.cross_entropy's options, and each further term and result under its own name.
@checks.autocast("float32")
@checks.torch_names(input="logits", weight="class_weight")
@takes(COLUMNS, **LOGITS, **LOSS, inplace="bool")
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
    group: ProcessGroup | None = None,
    implementation: str = "auto",
) -> torch.Tensor | CrossEntropyOutput:
    """Cross-entropy between logits and target, per token or reduced (natural logarithm), with label
    smoothing, z-loss, softcap, class and token weights, entropy, argmax, in-place gradient,
    vocabulary-parallel.

    See the module's docstring for the formula. Statistics and loss are computed in float32,
    relative to the largest logit of a row, so a constant added to all logits costs no precision.
    The gradient is rounded once, on store. Differentiable once in logits and token_weight.

    A target that is neither in [0, V) nor ignore_index raises IndexError on CPU tensors and within
    `checked_targets()`. On CUDA tensors, where no loss synchronizes, its token's loss and its row's
    gradient are NaN (and so are the sum and the mean), whatever its token_weight, and the divisor
    does not count it.

    A row that holds +inf has lse inf and a gradient that is NaN there. Its loss is inf, or NaN if
    the target's logit is inf or an option makes it one. (F.cross_entropy and the torch
    implementation give NaN.) With a softcap it is an ordinary row.

    Args:
        logits: [..., V] fp32 | bf16 | fp16 (fp64 with eager and torch). The stride of rows may be
            larger than V.
        target: [...] int64, each in [0, V) or ignore_index. Ignored tokens have loss and gradient
            0 whatever their logits hold.
        ignore_index: the target that marks ignored tokens.
        label_smoothing: e in [0, 1].
        z_loss: coefficient of lse^2, >= 0 and finite in float32.
        softcap: > 0 and finite in float32; None: no softcap.
        class_weight: [V] float, or None. Not differentiable: refused if it requires a gradient.
        token_weight: [...] float, multiplies each token's loss, or None.
        reduction: "none" gives [...]; "sum" the sum; "mean" the sum divided by num_tokens if given,
            else by the sum of w_y over tokens that are not ignored (PyTorch's rule). token_weight
            is not in that divisor: weights may have any sign, and the scale of a batch should not
            depend on them. A divisor of 0 (all tokens ignored) counts as 1: loss and gradients are
            0, where PyTorch gives NaN.
        num_tokens: a real number >= 0 or a 0-d tensor. With gradient accumulation or data
            parallelism, the count over all of them. Not differentiable; a tensor's value is not
            read on the host.
        return_lse, return_entropy, return_argmax: return a CrossEntropyOutput that holds, for every
            token (also ignored ones), lse, the entropy of softmax z, and the index of the largest
            logit (the first, on ties; undefined in a row with a NaN). Detached.
        inplace: lets backward overwrite the logits with the gradient, which saves T * V * itemsize
            bytes at the peak. The logits, and all that share their memory, then hold the gradient
            (unless they had to be copied because their last dimension is strided). A second
            backward through them, and the backward of another op that saved them, raise
            RuntimeError. Ignored by eager and torch. Unsupported for logits whose elements share
            memory, as expanded ones do, and under torch.compile, which plans memory itself.
        group: logits are [..., V / world], this rank's shard of the vocabulary in rank order, all
            shards of one size; target and class_weight are those of the whole vocabulary and the
            same on every rank. Every rank returns the same loss, and its backward gives the
            gradient of its own shard, without communication. Costs two all-reduces of at most
            [4, T] (four with return_argmax). Unsupported by torch.
        implementation: "auto", or one of triton, cute, cpp, torch, eager.

    Returns:
        The loss in fp32 (fp64 for fp64), or a CrossEntropyOutput.

    Raises:
        TypeError, ValueError: invalid arguments.
        IndexError: a target out of range, as stated above.
        ImplementationUnavailable: a named implementation that cannot run here, or not with these
            options.

    Example:
        >>> logits = torch.zeros(3, 4, requires_grad=True)
        >>> loss = tilewright.ops.cross_entropy(logits, torch.tensor([0, 3, -100]))
        >>> f"{loss.item():.4f}"  # log 4, over two tokens
        '1.3863'

    Source: options as in torch.nn.functional.cross_entropy; z-loss as in PaLM (arXiv:2204.02311,
    section 5); softcap as in Gemma 2 (arXiv:2408.00118, section 2); sharded vocabulary as in
    Megatron-LM (arXiv:1909.08053, section 3).
    """
    returns = return_lse, return_entropy, return_argmax
    options = Options.of(ignore_index, label_smoothing, z_loss, softcap, reduction, *returns)
    labels = Labels(target, class_weight, token_weight, num_tokens, group)
    check_class_weight(class_weight, logits.shape[-1], group)
    if inplace:
        checks.overwritable("logits", logits)
    fn = CROSS_ENTROPY.pick(implementation, logits, Request.of(labels))
    loss, *extra = fn(logits.reshape(-1, logits.shape[-1]), labels, options, inplace)
    return output(loss, extra, options, target.shape)


# ---- options


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

    @classmethod
    def of(
        cls, ignore_index, label_smoothing, z_loss, softcap, reduction, *returns: bool
    ) -> Options:
        """Makes options from arguments as the public functions take them."""
        softcap = 0.0 if softcap is None else float(softcap)
        return cls(
            ignore_index, float(label_smoothing), float(z_loss), softcap, reduction, *returns
        )

    @property
    def scaling(self) -> Scaling:
        return Scaling(self.softcap)

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.label_smoothing != 0, self.entropy, self.argmax)

    def extra(
        self, softmax: Softmax, argmax: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """The requested per-token results."""
        return softmax.lse if self.lse else None, softmax.entropy if self.entropy else None, argmax


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


def check_class_weight(
    class_weight: torch.Tensor | None, columns: int, group: ProcessGroup | None
) -> None:
    """Raises TypeError or ValueError for a group, or for weights that do not fit the vocabulary of
    which this rank's logits have so many columns.
    """
    V = world_size(group) * columns
    if class_weight is None:
        return
    checks.shape("class_weight", class_weight, (V,), "the vocabulary")


def output(
    loss: torch.Tensor, extra: list[torch.Tensor | None], options: Options, shape: torch.Size
) -> torch.Tensor | CrossEntropyOutput:
    """The public functions' result, for targets of this shape."""
    loss = reshaped(loss, shape if options.reduction == "none" else ())
    if not (options.lse or options.entropy or options.argmax):
        return loss
    return CrossEntropyOutput(
        loss, *(None if t is None else t.detach().reshape(shape) for t in extra)
    )


# ---- the loss of the statistics: arithmetic on [T] vectors


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

    stats: statistics of whole rows, with `weighted` where label_smoothing is not 0.
    presence: [T], as `presence` returns it.
    y_weight: [T], the class weight of each row's target, or None for ones.
    V: size of the whole vocabulary.
    weight_sum: scalar tensor, sum of the class weights; None for V.
    """
    loss = stats.log_sum - stats.picked
    if y_weight is not None:
        loss = loss * y_weight
    if label_smoothing:
        total = V if weight_sum is None else weight_sum
        assert stats.weighted is not None
        loss = (1 - label_smoothing) * loss + (label_smoothing / V) * (
            total * stats.log_sum - stats.weighted
        )
    if z_loss:
        # where: an ignored row's lse may be infinite or NaN, and so would 0 times it in the
        # gradient.
        loss = loss + z_loss * torch.where(presence == 0, 0.0, stats.softmax.lse).square()
    return torch.where(presence == 0, 0.0, loss * presence)


def results(stats, valid, y_weight, class_weight, V, options):
    """The loss per row, as `combine`, and the requested per-token results."""
    losses = combine(
        stats,
        valid,
        y_weight,
        V=V,
        label_smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        weight_sum=None if class_weight is None else class_weight.sum(),
    )
    return losses, *options.extra(stats.softmax, stats.argmax)


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
        assert outputs.divisor is not None
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
        g_log_sum = g_log_sum + torch.where(
            row == 0, 0.0, 2 * inputs.z_loss * row * stats.softmax.lse
        )
    return total, g_log_sum, -hard, g_weighted


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
        V = world_size(group) * rows.shape[-1]
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
    rows = without_gradient(rows, valid == 0)
    stats = stats_eager(rows, target, class_weight, options.scaling, options.wanted, group)
    V = world_size(group) * rows.shape[-1]
    return results(stats, valid, y_weight, class_weight, V, options)


cross_entropy_eager = in_torch(losses_eager)


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
    if lse is not None and options.z_loss:
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


# ---- the fused kernels


class Summed(NamedTuple):
    """total: [] the sum of the losses times their token weights, divided if the reduction is
    "mean".   losses: [T], before token weights.   g_log_sum, g_picked, g_weighted: the total's
    derivatives in the statistics.   divisor: [], of "mean".
    """

    total: torch.Tensor
    losses: torch.Tensor
    peak: torch.Tensor
    log_sum: torch.Tensor
    mean: torch.Tensor | None
    argmax: torch.Tensor | None
    g_log_sum: torch.Tensor
    g_picked: torch.Tensor
    g_weighted: torch.Tensor | None
    divisor: torch.Tensor | None


@declare
def summed(logits: torch.Tensor, labels: Labels, options: Options, overwrite: bool) -> Summed:
    """overwrite: whether backward overwrites the logits with their gradient."""
    stats = empty_statistics(logits, options.wanted)
    rows, one = functools.partial(empty_rows, logits), logits.new_empty((), dtype=torch.float32)
    divisor = torch.empty_like(one) if options.reduction == "mean" else None
    of_stats = rows(), rows(), rows(options.wanted.weighted)
    return Summed._make((one, rows(), *stats.softmax, stats.argmax, *of_stats, divisor))


def _of_rows(labels, options, result):
    """What the gradient of the logits is computed from, beside them."""
    weights = labels.class_weight if options.label_smoothing else None
    softmax = Softmax(result.peak, result.log_sum)
    of_stats = StatsGradients(result.g_log_sum, result.g_picked, result.g_weighted)
    return labels.target, weights, options.scaling, softmax, of_stats, labels.group


@summed.formula(
    constants=Summed._fields[2:],
    of_rows=_of_rows,
    unweighted=lambda labels, losses: None if labels.token_weight is None else losses,
)
def _backward(op, g, logits, of_rows, overwrite, unweighted, divisor, needs):
    upstream = g.losses if g.total is None else g.total  # the loss is computed from one of the two
    if upstream is None:
        return {}
    grads = {}
    if needs["logits"]:
        target, *rest = of_rows
        grads["logits"] = op(logits, target.view(-1), *rest, upstream, overwrite)
    if needs["token_weight"]:
        each = upstream * unweighted
        grads["token_weight"] = each if divisor is None else each / divisor
    return grads


def loss_inputs(labels: Labels, V: int, options: Options, divide: bool) -> LossInputs:
    """labels: as of `Labels.for_kernels`."""
    class_weight, smooth = labels.class_weight, options.label_smoothing != 0
    return LossInputs(
        labels.target.view(-1),
        V,
        options.ignore_index,
        class_weight,
        class_weight.sum() if smooth and class_weight is not None else None,
        labels.token_weight,
        labels.num_tokens,
        options.label_smoothing,
        options.z_loss,
        divide,
    )


def _launch(kernels, logits, labels, options, overwrite):
    V, mean = world_size(labels.group) * logits.shape[1], options.reduction == "mean"
    targets.check(labels.target, V, options.ignore_index)
    inputs = loss_inputs(labels, V, options, divide=mean)
    stats = kernels.of_rows(
        logits, inputs.target, labels.class_weight, options.scaling, options.wanted, labels.group
    )
    outputs = LossOutputs(torch.empty_like(stats.peak), stats.peak.new_empty(()) if mean else None)
    total, *of_stats = (kernels.losses or losses_in_torch)(
        stats, slice(0, logits.shape[0]), inputs, outputs, None
    )
    kept = *stats.softmax, stats.argmax
    return Summed._make((total, outputs.losses, *kept, *of_stats, outputs.divisor))


@functools.cache
def operator(name: str) -> Operator:
    """`summed` on the kernels of this name."""
    kernels = softmax_stats.kernels(name)
    launch = functools.partial(_launch, kernels)
    return summed.define(f"cross_entropy_{name}", launch, kernels.gradient)


def fused(name: str) -> Callable:
    """The implementation on the kernels of this name."""
    launch = operator(name)

    def cross_entropy_fused(rows, labels, options, inplace):
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        labels = labels.for_kernels()
        token_weight, each = labels.token_weight, options.reduction == "none"
        if each:
            labels = labels._replace(token_weight=None)
        outputs = launch(rows, labels, options, inplace)
        loss = outputs.losses if each else outputs.total
        if each and token_weight is not None:
            loss = loss * token_weight.to(loss.dtype)
        return loss, *options.extra(
            Softmax(outputs.peak, outputs.log_sum, outputs.mean), outputs.argmax
        )

    return cross_entropy_fused


# ---- cases


def logits_case(
    name,
    shape,
    *,
    tags=cases.CONTRACT,
    flops=(4, 5),
    ignored="some",
    token_weight=False,
    class_weight=False,
    offset=0.0,
    saturated=False,
    **options,
):
    """flops: per logit, forward and backward.   offset: added to all logits, as far as the dtype
    represents it.   saturated: logits of 3.5 to 5 softcaps.
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
            logits += cases.representable(offset, dtype)
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
        return Cost(n, 2 * n, flops[0] * T * V, flops[1] * T * V)

    return Case(name, make, cost, tags)


def _all_cases():
    returns: dict[str, Any] = {"return_lse": True, "return_entropy": True, "return_argmax": True}
    everything: dict[str, Any] = {
        "label_smoothing": 0.1,
        "z_loss": 1e-2,
        "softcap": 5.0,
        "token_weight": True,
        "class_weight": True,
    }
    small = [
        logits_case("ragged", (3, 7, 1003)),
        logits_case("tiny", (5, 7)),
        logits_case("by_eight", (3, 4408)),  # rows aligned to 16 bytes only
        logits_case("none_ignored", (6, 100), ignored="none"),
        logits_case("all_ignored", (4, 100), ignored="all", **returns),
        logits_case("no_rows", (0, 64)),
        logits_case("one_class", (3, 1), label_smoothing=0.1, z_loss=0.1, **returns),
        logits_case("ignore_index_inside", (6, 100), ignore_index=7, label_smoothing=0.1),
        logits_case("label_smoothing", (6, 100), label_smoothing=0.1),
        logits_case("z_loss", (6, 100), z_loss=1e-2),
        logits_case("softcap", (6, 300), softcap=5.0),
        logits_case("softcap_saturated", (6, 300), softcap=5.0, saturated=True),
        logits_case("softcap_wide", (3, 9000), softcap=30.0),
        logits_case("class_weight", (6, 100), class_weight=True),
        logits_case("class_weight_smoothing", (6, 100), class_weight=True, label_smoothing=0.2),
        logits_case("token_weight", (2, 3, 100), token_weight=True),
        logits_case("sum", (6, 100), reduction="sum"),
        logits_case("none", (2, 5, 100), reduction="none"),
        logits_case("num_tokens", (6, 100), num_tokens=17),
        logits_case("returns", (2, 5, 1003), **returns),
        logits_case("offset_1e3", (6, 100), offset=1e3),
        logits_case("offset_1e4", (6, 100), offset=1e4, class_weight=True, label_smoothing=0.2),
        logits_case("offset_1e6", (2, 5, 1003), offset=1e6, **returns),
        logits_case("inplace", (6, 100), inplace=True, label_smoothing=0.1),
        logits_case("everything", (2, 5, 1000), reduction="none", **everything, **returns),
        logits_case(
            "everything_wide", (3, 9001), num_tokens=3, inplace=True, **everything, **returns
        ),
    ]
    timed = []
    for tags, T in ((cases.CUDA, 8192), (cases.CPU, 256)):
        for name in ("qwen3-8b", "llama-3-8b", "gemma-3-4b", "deepseek-v3"):
            options: dict[str, Any] = {"softcap": 30.0} if name.startswith("gemma") else {}
            timed.append(
                logits_case(
                    name, (T, cases.MODELS[name].vocab), tags=tags, ignored="none", **options
                )
            )
    timed.append(
        logits_case(
            "llama-3-8b-inplace",
            (8192, cases.MODELS["llama-3-8b"].vocab),
            tags=cases.CUDA,
            ignored="none",
            inplace=True,
        )
    )
    big = logits_case("big", (2**13 + 3, 2**18), tags=cases.BIG, reduction="none", ignored="none")
    return (*small, *timed, big)


_WHOLE = ("qwen3-8b", "llama-3-8b", "gemma-3-4b", "deepseek-v3")  # that write gradients elsewhere

CROSS_ENTROPY = Op(
    "cross_entropy",
    cross_entropy,
    cross_entropy_eager,
    (
        in_triton(
            lambda: fused("triton"),
            batch_invariant=cases.ANYWHERE,
            gate=from_kernels("loss.softmax_stats_triton", "gate"),
            tunables=from_kernels("loss.softmax_stats_triton", "TUNABLES"),
        ),
        # Not chosen by `auto` until measured to be faster than Triton on a GPU.
        Implementation(
            "cute",
            lambda: fused("cute"),
            platform.no_cute,
            devices=(),
            gate=from_kernels("loss.softmax_stats_cute", "specs"),
        ),
        in_cpp(lambda: fused("cpp"), batch_invariant=("cpu",)),
        Implementation(
            "torch",
            lambda: in_torch(losses_of_torch),
            devices=("cuda", "cpu"),
            dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
            refuses=whole_rows_only,
        ),
    ),
    _all_cases(),
    # A sum of exponentials in any order, its logarithm and a difference: where the twin is lucky
    # its double and 2 eps are too little (once in 12 seeds of all cases, by 0.8 eps).
    atol={torch.float32: 4 * torch.finfo(torch.float32).eps},
    goals=(
        *cases.near_copy(92, "forward", "forward_backward", only=_WHOLE),
        # At most 1.25 times its floor.
        *cases.near_copy(80, "forward_backward", only=("llama-3-8b-inplace",)),
    ),
    requests=(Request(sharded=True),),
)
