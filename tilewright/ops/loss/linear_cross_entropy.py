"""Cross-entropy of a language model's head, without materializing its logits:

    logits = x weight^T + bias + scale * (x A^T) B^T
    loss   = cross_entropy(logits, target, ...)

The eager twin allocates the logits [T, V], rounded to x's dtype, and continues as `cross_entropy`.

With reduction "mean" and "sum" forward computes the gradients too, and backward scales them by the
upstream gradient: GEMM, statistics kernel, gradient over the logits in place, two GEMMs, next rows.
For "none" the upstream gradient differs per row, and the loss is computed from `head_statistics`,
whose backward recomputes the logits. `head.py` has the chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tilewright.core import checks, torch_names
from tilewright.core.library import Operator, declare, in_transform, refuse_tangents
from tilewright.core.registry import Goal, Implementation, Judged, Op, in_cpp, in_triton
from tilewright.core.takes import takes
from tilewright.core.torch_names import ProcessGroup
from tilewright.kernels.loss.operators import (
    LossOutputs,
    StatsGradients,
    empty_rows,
    empty_statistics,
)
from tilewright.ops.loss import softmax_stats, targets
from tilewright.ops.loss.cross_entropy import (
    LOSS,
    CrossEntropyOutput,
    Options,
    Request,
    check_class_weight,
    in_torch,
    loss_inputs,
    losses_eager,
    losses_in_torch,
    losses_of_torch,
    output,
    reduced,
    results,
    whole_rows_only,
)
from tilewright.ops.loss.head import (
    ACCUMULATE,
    ADAPTER,
    CHUNK,
    HEAD,
    HEAD_OPTIONS,
    RANKS,
    SIZES,
    Chunks,
    Head,
    HeadGradients,
    Needs,
    Plan,
    joined,
    logits_eager,
    low_rank,
    replicated,
    statistics_of,
    summed_dtype,
)
from tilewright.ops.loss.head_cases import atol, case, offsets, timed
from tilewright.ops.loss.targets import Labels, presence, weight_of
from tilewright.ops.loss.vocabulary import world_size


# Wide: what cross_entropy takes, the head's options, and its adapter.
@checks.autocast("products", "x", "weight", "bias", "lora_A", "lora_B")
@checks.torch_names(input="x", linear_weight="weight", linear_bias="bias")
@takes(*SIZES, *RANKS, **HEAD, **HEAD_OPTIONS, **ADAPTER, **LOSS, accumulate=ACCUMULATE)
def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    lora_A: torch.Tensor | None = None,
    lora_B: torch.Tensor | None = None,
    lora_scale: float = 1.0,
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
    group: ProcessGroup | None = None,
    accumulate: str = "fp32",
    fp32_logits: bool = False,
    chunk_size: int | None = None,
    implementation: str = "auto",
) -> torch.Tensor | CrossEntropyOutput:
    """The head and its cross-entropy, `cross_entropy(x @ weight.T + bias, target, ...)`, without
    all logits, which are computed a chunk of rows at a time.

    GEMMs run as torch.mm does in x's dtype (on a CPU with AVX-512, those into float32 by
    tilewright's own, accumulated in float32). Logits are rounded to x's dtype (except with
    fp32_logits), statistics and loss are float32, and the gradient of the logits is rounded to x's
    dtype. Deterministic for the same chunks: no atomics. Under torch.autocast x, weight, bias and
    the adapter are cast to its dtype; the loss is float32.

    Memory beside inputs and gradients: one chunk of logits in x's dtype (see fp32_logits), and
    float32 sums for a 16-bit weight.

    Differentiable once in x, weight, bias, lora_A, lora_B and token_weight. Gradients that are not
    required cost nothing: with a frozen weight (LoRA), its GEMM and its sums are skipped.

    Args:
        x: [..., H] fp32 | bf16 | fp16 (fp64 with eager), any strides.
        weight: [V, H] in x's dtype.
        target: [...] int64, each in [0, V) or ignore_index, whose tokens have loss 0 and a gradient
            of 0 in x. But weight's gradient is a product with all rows of x, so an ignored row that
            holds a NaN or infinity makes it NaN (0 * NaN): clear such rows first. Any other target
            is treated as in `cross_entropy`; on CUDA tensors its NaN is in its row of x's gradient
            (torch: in every row) and in all of weight's.
        bias: [V] in x's dtype, or None.
        lora_A, lora_B, lora_scale: an adapter on the head, as in `linear_logprob`.
        ignore_index, label_smoothing, z_loss, softcap: as in `cross_entropy`.
        class_weight, token_weight, reduction, num_tokens: as in `cross_entropy`.
        return_lse, return_entropy, return_argmax: as in `cross_entropy`.
        group: weight, bias and lora_B are this rank's shard of the vocabulary, [V / world, H],
            [V / world] and [V / world, r], in rank order, all shards of one size; x, target and the
            rest are replicated. Each chunk costs the all-reduces of `cross_entropy`; backward
            all-reduces the gradient of x, [T, H], in x's dtype. Unsupported under torch.compile and
            by torch.
        accumulate: the dtype in which the gradients of weight and bias are summed over chunks.
            "fp32"; or "bf16", their own dtype (so fp16 for fp16), which saves 4 bytes per element
            of a 16-bit head and loses precision with every chunk. In fp16 it can overflow, because
            the sums are not yet divided by the number of tokens. No effect on a float32 weight. A
            single chunk needs no sum, so "fp32" costs it nothing (except for fp16, whose sum stays
            in float32 for the same reason).
        fp32_logits: keep the GEMM's float32 sums as logits instead of rounding them to a 16-bit x's
            dtype. A chunk then holds float32 logits and, if gradients are required, a copy in x's
            dtype for the GEMMs. On a CPU without AVX-512's bfloat16 instructions, and in float16,
            operands are cast first, since such a GEMM does not exist there.
        chunk_size: rows per chunk, or None for the rule of `head.py`. The eager twin has
            one chunk.
        implementation: "auto", or one of triton, cpp, torch, eager.

    Returns:
        As `cross_entropy`.

    Raises:
        TypeError, ValueError: invalid arguments.
        IndexError: a target out of range (as `cross_entropy`).
        ImplementationUnavailable: a named implementation that cannot run here, or not with these
            options.

    Example:
        >>> x, weight = torch.zeros(3, 8), torch.zeros(4, 8, requires_grad=True)
        >>> target = torch.tensor([0, 3, -100])
        >>> loss = tilewright.ops.linear_cross_entropy(x, weight, target, chunk_size=2)
        >>> f"{loss.item():.4f}"  # log 4, over two tokens
        '1.3863'

    Source: chunks with gradients in forward as in Liger-Kernel (arXiv:2410.10989, section 3.2).
    """
    returns = return_lse, return_entropy, return_argmax
    options = Options.of(ignore_index, label_smoothing, z_loss, softcap, reduction, *returns)
    labels = Labels(target, class_weight, token_weight, num_tokens, group)
    check_class_weight(class_weight, weight.shape[0], group)
    plan = Plan(accumulate == "fp32", fp32_logits, False, chunk_size)
    fn = LINEAR_CROSS_ENTROPY.pick(implementation, x, Request.of(labels))
    rows = replicated(x, group).reshape(-1, x.shape[-1])
    low = low_rank(x, lora_A, lora_B, lora_scale)
    head = Head(rows, weight, bias, None if low is None else replicated(low, group), lora_B)
    with checks.no_autocast(x):
        loss, *extra = fn(head, labels, options, plan)
    return output(loss, extra, options, target.shape)


# ---- the definition


def linear_cross_entropy_eager(head, labels, options, plan):
    return in_torch(losses_eager)(logits_eager(head, plan.fp32_logits), labels, options)


# ---- PyTorch's own: chunked for the options of F.linear_cross_entropy, else with all logits


def _no_torch(device_type: str) -> str | None:
    return (
        None
        if hasattr(F, "linear_cross_entropy")
        else "needs torch >= 2.13, for F.linear_cross_entropy"
    )


def linear_cross_entropy_torch(head, labels, options, plan):
    x, weight, bias, low, _ = head
    beyond = options.label_smoothing or options.softcap or options.z_loss
    beyond = beyond or options.lse or options.entropy or options.argmax or low is not None
    # F.linear_cross_entropy has none of these, and no rule for torch.func's transforms.
    if beyond or (not torch.compiler.is_compiling() and in_transform()):
        return in_torch(losses_of_torch)(logits_eager(head, False), labels, options)
    refuse_tangents("linear_cross_entropy[torch]", x, weight, bias)
    target, class_weight, token_weight, num_tokens, _ = labels
    reduction = options.reduction
    valid, target = (
        presence(target, weight.shape[0], options.ignore_index).reshape(-1),
        target.reshape(-1),
    )
    chunks = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=plan.chunk_size,
        chunking_method="auto" if plan.chunk_size is None else None,
        acc_policy="accurate" if plan.fp32_sums else "compact",
        # Compiled code retains the graph anyway, with a warning.
        allow_retain_graph=torch.compiler.is_compiling(),
    )
    losses = F.linear_cross_entropy(
        x,
        weight,
        torch.where(valid == 1, target, -100),
        linear_bias=bias,
        weight=None if class_weight is None else class_weight.to(x.dtype),
        reduction="sum" if reduction != "none" and token_weight is None else "none",
        ignore_index=-100,
        options=chunks,
    )
    # Targets out of range were ignored above; here they make the loss and the gradient NaN, of all
    # rows if summed.
    losses = losses * (1 + 0 * (valid if losses.dim() else valid.sum()))
    y_weight = weight_of(target, None if class_weight is None else class_weight.float())
    return reduced(losses, valid, y_weight, token_weight, reduction, num_tokens), None, None, None


# ---- the sum of the losses, whose forward computes the gradients too


class SummedHead(NamedTuple):
    """total, losses, divisor: as `cross_entropy.Summed`, but in float16 the total is not divided
    (see `divides_later`).   dx, dweight, dbias, dlow, dup: the total's gradients, of weight, bias
    and up in `summed_dtype`.
    """

    total: torch.Tensor
    losses: torch.Tensor
    lse: torch.Tensor | None
    entropy: torch.Tensor | None
    argmax: torch.Tensor | None
    dx: torch.Tensor | None
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None
    dlow: torch.Tensor | None
    dup: torch.Tensor | None
    divisor: torch.Tensor | None


@declare
def summed_head(
    head: Head, labels: Labels, options: Options, plan: Plan, needs: Needs
) -> SummedHead:
    x, weight, _, low, up = head
    one, dtype = x.new_empty((), dtype=torch.float32), summed_dtype(weight.dtype, plan.fp32_sums)
    return SummedHead(
        one,
        empty_rows(x),
        empty_rows(x, options.lse),
        empty_rows(x, options.entropy),
        empty_rows(x, options.argmax, torch.int64),
        x.new_empty(x.shape) if needs.need_x else None,
        weight.new_empty(weight.shape, dtype=dtype) if needs.need_weight else None,
        weight.new_empty(weight.shape[:1], dtype=dtype) if needs.need_bias else None,
        low.new_empty(low.shape) if low is not None and needs.need_low else None,
        up.new_empty(up.shape, dtype=dtype) if up is not None and needs.need_up else None,
        torch.empty_like(one) if options.reduction == "mean" else None,
    )


def divides_later(x: torch.Tensor) -> bool:
    """Whether "mean" divides after the gradients are computed: in float16 a logit's gradient,
    divided by the number of tokens, would underflow.
    """
    return x.dtype == torch.float16


@summed_head.formula(
    constants=SummedHead._fields[1:],
    dtype=lambda head: head.x.dtype,
    by=lambda head, divisor: None if divides_later(head.x) else divisor,
    of_head=HeadGradients,
)
def _backward(op, g, dtype, losses, by, of_head, needs):
    if g.total is None:
        return {}
    grads = {
        name: times_upstream(t, g.total, dtype, op)
        for name, t in zip(Head._fields, of_head, strict=True)
        if needs[name]
    }
    if needs["token_weight"]:
        each = g.total * losses
        grads["token_weight"] = each if by is None else each / by
    return grads


def _scale(acc: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """acc *= factor [] float32, in float32. If acc is bfloat16, a 0-dim CUDA factor would be
    rounded to it first; a CPU one is not, and a 1-dim one makes a float32 copy of acc.
    """
    return acc.mul_(factor.reshape(1) if acc.is_cuda else factor)


def times_upstream(
    acc: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, scale_: Callable
) -> torch.Tensor:
    """acc * factor in dtype, in acc's memory if the graph is freed; scale_(acc, factor) then skips
    a factor of 1.
    """
    # The factor may have a hidden dimension that acc does not have.
    if torch_names.in_legacy_vmap() or torch_names.in_transform():
        return (acc * factor).to(dtype)
    if type(acc) is not torch.Tensor or torch_names.keeps_graph():
        # Tensor subclasses: torch.compile traces.
        return _scale(acc.clone(), factor).to(dtype)
    scale_(acc, factor)
    return acc.to(dtype)


def scale_in_torch_(acc: torch.Tensor, factor: torch.Tensor) -> None:
    """acc *= factor [], on a CPU, where reading the factor is free."""
    if factor.item() != 1:
        acc.mul_(factor)


def _launch(kernels, head, labels, options, plan, needs):
    x, mean = head.x, options.reduction == "mean"
    V = world_size(labels.group) * head.weight.shape[0]
    targets.check(labels.target, V, options.ignore_index)
    inputs = loss_inputs(labels, V, options, divide=mean and not divides_later(x))
    losses = kernels.losses or losses_in_torch
    divisor = x.new_empty((), dtype=torch.float32) if mean else None
    outputs = LossOutputs(empty_rows(x), divisor)
    chunks, parts, total = Chunks(head, plan, needs=needs), [], None
    keeps = options.lse or options.entropy or options.argmax
    if x.shape[0] == 0:
        empty = empty_statistics(x, options.wanted)
        total, *_ = losses(empty, slice(0, 0), inputs, outputs, None)
    for rows, logits in chunks:
        where = logits, inputs.target[rows], labels.class_weight, options.scaling
        stats = kernels.of_rows(*where, options.wanted, labels.group)
        if keeps:
            parts.append(stats)
        total, *of_stats = losses(stats, rows, inputs, outputs, total)
        if chunks.needed:
            gradients = StatsGradients(*of_stats)
            dlogits = kernels.gradient(*where, stats.softmax, gradients, labels.group, inplace=True)
            chunks.add(rows, dlogits)
    extra: Sequence[torch.Tensor | None] = (None, None, None)
    if keeps:
        stats = joined(parts, x, options.wanted)
        extra = options.extra(stats.softmax, stats.argmax)
    of_head = chunks.gradients(wide=True)
    return SummedHead._make((total, outputs.losses, *extra, *of_head, outputs.divisor))


@functools.cache
def operator(name: str) -> Operator:
    """`summed_head` on the kernels of this name."""
    kernels = softmax_stats.kernels(name)
    return summed_head.define(
        f"linear_cross_entropy_{name}_forward",
        functools.partial(_launch, kernels),
        kernels.scale_ or scale_in_torch_,
    )


def fused(name: str) -> Callable:
    """The implementation on the kernels of this name."""
    launch, statistics = operator(name), statistics_of(name)

    def linear_cross_entropy_fused(head, labels, options, plan):
        head, labels = head._replace(x=head.x.contiguous()), labels.for_kernels()
        if options.reduction == "none":
            return _each(statistics, head, labels, options, plan)
        on = torch.is_grad_enabled()
        need = [on and t is not None and t.requires_grad for t in head]
        plan = plan._replace(learns=need[1])
        outputs = launch(head, labels, options, plan, Needs(*need))
        total = outputs.total
        if options.reduction == "mean" and divides_later(head.x):
            total = total / outputs.divisor
        return total, outputs.lse, outputs.entropy, outputs.argmax

    return linear_cross_entropy_fused


def _each(statistics, head, labels, options, plan):
    """The loss per row."""
    target, class_weight, token_weight, _, group = labels
    V = world_size(group) * head.weight.shape[0]
    valid, target = presence(target, V, options.ignore_index).reshape(-1), target.reshape(-1)
    stats = statistics(
        head, target, valid, class_weight, options.scaling, options.wanted, plan, group
    )
    y_weight = weight_of(target, class_weight)
    losses, *extra = results(stats, valid, y_weight, class_weight, V, options)
    return reduced(losses, valid, None, token_weight, "none", None), *extra


# ---- cases


def _all_cases():
    returns = {"return_lse": True, "return_entropy": True, "return_argmax": True}
    everything = {
        "bias": True,
        "label_smoothing": 0.1,
        "z_loss": 1e-2,
        "softcap": 5.0,
        "token_weight": True,
        "class_weight": True,
        "chunk_size": 4,
        **returns,
    }
    return (
        case("ragged", ((3, 7), 33, 203)),
        case("tiny", (5, 3, 7), chunk_size=2),
        case("chunks", (11, 32, 100), chunk_size=4),
        # A logit is not rounded to 16 bits alike in products of other numbers of rows. In a bias's
        # gradient of eight terms that is luck: an H100 was 3.7 times as far off as the twin.
        case("bias", (64, 32, 100), bias=True, chunk_size=24),
        case("sum", (11, 32, 100), chunk_size=4, reduction="sum", ignored="none"),
        case("frozen_weight", (11, 32, 100), chunk_size=4, bias=True, frozen=True),
        case("all_ignored", (6, 32, 100), ignored="all", chunk_size=4, z_loss=1e-2),
        case("no_rows", (0, 16, 64), bias=True),
        case("none", ((2, 5), 32, 100), reduction="none", bias=True, chunk_size=4),
        case("bf16_sums", (11, 32, 100), chunk_size=6, accumulate="bf16", ignored="none"),
        case("num_tokens", (11, 32, 100), chunk_size=4, num_tokens=17, token_weight=True),
        case("smoothing", (11, 32, 100), chunk_size=4, label_smoothing=0.2, class_weight=True),
        case("softcap", (11, 32, 100), chunk_size=4, softcap=5.0),
        case("everything", ((2, 5), 32, 300), **everything),
        case("fp32_logits", (11, 32, 100), chunk_size=4, bias=True, fp32_logits=True),
        case("everything_none", ((2, 5), 32, 300), reduction="none", **everything),
        # As many rows as "bias" has, for the same reason.
        case("lora", (64, 16, 100), chunk_size=24, lora=5, frozen=True),
        case("lora_everything", ((2, 5), 32, 300), lora=3, lora_scale=0.5, **everything),
        case("lora_none", (64, 16, 100), chunk_size=24, lora=5, frozen=True, reduction="none"),
        *offsets(chunk_size=4, label_smoothing=0.1),
        *timed(),
    )


def _within(device: str, ms: float, gib: float | None = None, otherwise: Goal | None = None):
    return Goal(
        device,
        "forward_backward",
        "median_ms",
        at_most=ms,
        cases=("llama-3-8b",),
        dtypes=("bfloat16",),
        within_mib=gib and gib * 1024,
        otherwise=otherwise,
    )


LINEAR_CROSS_ENTROPY = Op(
    "linear_cross_entropy",
    linear_cross_entropy,
    linear_cross_entropy_eager,
    (
        in_triton(lambda: fused("triton"), tunables=lambda: (CHUNK,)),
        in_cpp(lambda: fused("cpp"), tunables=lambda: (CHUNK,)),
        Implementation(
            "torch",
            lambda: linear_cross_entropy_torch,
            _no_torch,
            (),
            (torch.float32,),
            refuses=whole_rows_only,
        ),
    ),
    _all_cases(),
    atol,
    # Classes that are no row's target have elements of the weight's gradient that are 20 to 40
    # times smaller than its root mean square: sums of small terms of either sign, which the twin
    # computes from rounded logits too. There its own error is a quarter to a third in bfloat16.
    judged=Judged(
        of_sums=True,
        detects={
            torch.bfloat16: {
                "out 3": 0.3,  # of the rows: the largest logit, of rounded ones
                "grad x": 0.12,
                "grad weight": 0.91,
                "grad bias": 0.28,
                "grad lora_A": 0.07,
                "grad lora_B": 0.46,
            },
            torch.float16: {"grad weight": 0.12, "grad bias": 0.041, "grad lora_B": 0.047},
        },
    ),
    # The products, 6 T H V flops, take 33 ms at an H200's 790 TFLOP/s. One chunk of logits, 2,004
    # MiB, lies beside the gradients of x and weight, 64 and 1,002 MiB; in chunks, the weight's
    # gradient is summed in passes over it, which takes 3 ms more.
    goals=(
        _within("H100", 38),
        _within("H200", 36, 3.4, otherwise=_within("H200", 39, 1.5)),
    ),
    requests=(Request(sharded=True),),
)
