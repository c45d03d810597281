"""Log-probability and entropy of a language model's head, without materializing its logits:

    logprob = log softmax(z / temperature)_y

Symbols and chunks as in linear_cross_entropy. The upstream gradient differs per row: forward saves
[T] statistics only, and backward recomputes the logits, 8 T H V flops in total. A low-rank adapter
on the head adds scale B (A x) to a chunk's logits; with a frozen weight that costs 6 T H V, and no
memory that grows with V but the gradient of B.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilewright import platform
from tilewright.core import checks
from tilewright.core.registry import Goal, Implementation, Judged, Op
from tilewright.ops.loss import logprob as _logprob
from tilewright.ops.loss.linear_chunks import CHUNK, Precision
from tilewright.ops.loss.linear_fused import fused
from tilewright.ops.loss.linear_head import (
    atol,
    case,
    check_chunks,
    check_head,
    logits_of,
    offsets,
    replicated,
    timed,
)
from tilewright.ops.loss.logprob import Scaling
from tilewright.ops.loss.losses import Labels, reshaped
from tilewright.ops.loss.targets import presence


@checks.autocast("products", "x", "weight", "bias", "lora_A", "lora_B")
def linear_logprob(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    lora_A: torch.Tensor | None = None,
    lora_B: torch.Tensor | None = None,
    lora_scale: float = 1.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_argmax: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
    fp32_logits: bool = False,
    chunk_size: int | None = None,
    implementation: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """Log-probability of each target, and the entropy of its distribution, for reinforcement
    learning, preference and distillation losses.

    Both results are differentiable once in x, weight, bias, lora_A and lora_B; backward recomputes
    the logits. The gradients of weight, bias and lora_B are summed over chunks in float32. Autocast
    as in `linear_cross_entropy`.

    Args:
        x, weight, target, bias, ignore_index: as in `linear_cross_entropy`.
        lora_A: [r, H] in x's dtype, or None. An adapter on the head: its logits are those of weight
            + lora_scale * lora_B lora_A, which is not materialized. x lora_A^T is rounded to x's
            dtype, and so is the sum of the logits (except with fp32_logits).
        lora_B: [V, r] in x's dtype, with lora_A.
        lora_scale: a finite number.
        temperature: > 0, divides the (capped) logits.
        softcap: > 0, or None: no softcap. temperature, softcap and softcap / temperature must be
            finite in float32.
        return_argmax: also return the index of the largest logit, for token accuracy.
        group: weight, bias and lora_B are this rank's shard of the vocabulary, as in
            `linear_cross_entropy`; x, target and lora_A are replicated.
        fp32_logits, chunk_size: as in `linear_cross_entropy`.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        (logprob [...], entropy [...]), fp32 (fp64 for fp64), in nats. They are log softmax(z /
        temperature)_y, never above 0, and the entropy of softmax(z / temperature), never below 0.
        Both are 0 where target is ignore_index. With return_argmax also argmax [...] int64, of
        every token, as in `logprob_entropy`.

    Raises:
        TypeError, ValueError, IndexError, ImplementationUnavailable: as `linear_cross_entropy`.

    Example:
        >>> x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
        >>> logprob, entropy = tilewright.ops.linear_logprob(x, weight, torch.tensor([0, 3]))
        >>> f"{logprob[0].item():.4f} {entropy[0].item():.4f}"
        '-1.3863 1.3863'
    """
    scaling = Scaling.checked(temperature, softcap, ignore_index)
    check_chunks("fp32", chunk_size)
    check_head(x, weight, bias, Labels(target, group=group), fp32_logits)
    low = _adapter(x, weight, lora_A, lora_B, lora_scale)
    precision = Precision(fp32_sums=True, fp32_logits=fp32_logits)
    world = 1 if group is None else torch.distributed.get_world_size(group)
    valid = presence(target, world * weight.shape[0], ignore_index).reshape(-1)
    fn = LINEAR_LOGPROB.pick(implementation, x)
    rows, target = replicated(x, group).reshape(-1, x.shape[-1]), target.reshape(-1)
    if low is not None:
        low = replicated(low, group)
    head = rows, weight, bias, low, lora_B
    with checks.no_autocast(x):
        found = fn(head, target, valid, scaling, precision, chunk_size, return_argmax, group)
    return tuple(reshaped(t, x.shape[:-1]) for t in found if t is not None)


def _adapter(x, weight, lora_A, lora_B, lora_scale) -> torch.Tensor | None:
    """lora_scale * x lora_A^T [T, r], or None. Raises TypeError or ValueError for an adapter that
    does not fit the head.
    """
    checks.number(
        "lora_scale", lora_scale, -checks.LARGEST, checks.LARGEST, "a finite number (in float32)"
    )
    given = {"lora_A": lora_A, "lora_B": lora_B}
    if lora_A is None and lora_B is None:
        return None
    if absent := [name for name, t in given.items() if t is None]:
        raise ValueError(f"{absent[0]} must be given with the other factor, got None")
    for name, t in given.items():
        checks.floating(name, t)
        if t.dtype != x.dtype:
            raise TypeError(f"{name} must have x's dtype {x.dtype}, got {t.dtype}; cast it")
    if lora_A.dim() != 2 or lora_A.shape[0] == 0 or lora_A.shape[1] != x.shape[-1]:
        raise ValueError(
            f"lora_A must have shape [r, {x.shape[-1]}] (x's last dimension) with r >= 1, got "
            f"{list(lora_A.shape)}"
        )
    shape = weight.shape[0], lora_A.shape[0]
    checks.shape("lora_B", lora_B, shape, "rows of weight and of lora_A")
    checks.same_device(x=x, lora_A=lora_A, lora_B=lora_B)
    with checks.no_autocast(x):
        return F.linear(x.reshape(-1, x.shape[-1]), lora_A) * lora_scale


# ---- the definition


def linear_logprob_eager(
    head, target, valid, scaling, precision, chunk_size, argmax=False, group=None
):
    *base, low, up = head
    logits = logits_of(*base, precision.fp32_logits)
    if low is not None:
        logits = logits + logits_of(low, up, None, precision.fp32_logits)
    return _logprob.eager(logits, target, valid, scaling, argmax, group)


# ---- cases


BF16 = ("bfloat16",)


def _logprob_atol(dtype, kwargs, name):
    """In float32 the entropy's gradient has the factor z - mean, which cancels where the two are
    close, and in a case of five rows the twin's error may be small by chance: the others exceed
    twice it by up to 13 eps (AVX2).
    """
    return 16 * torch.finfo(dtype).eps if dtype == torch.float32 else atol(dtype, kwargs, name)


def _all_cases():
    return (
        case("ragged", ((3, 7), 33, 203), logprob=True),
        case("tiny", (5, 3, 7), chunk_size=2, logprob=True),
        case("all_ignored", (6, 32, 100), ignored="all", chunk_size=4, logprob=True),
        case("no_rows", (0, 16, 64), logprob=True),
        case(
            "everything",
            ((2, 5), 32, 300),
            chunk_size=4,
            bias=True,
            temperature=0.7,
            softcap=5.0,
            logprob=True,
        ),
        case(
            "fp32_logits",
            (11, 32, 100),
            chunk_size=4,
            bias=True,
            temperature=0.7,
            fp32_logits=True,
            logprob=True,
        ),
        case("lora", (11, 32, 100), chunk_size=4, lora=5, frozen=True, logprob=True),
        case(
            "lora_everything",
            ((2, 5), 32, 300),
            chunk_size=4,
            bias=True,
            temperature=0.7,
            softcap=5.0,
            lora=3,
            lora_scale=0.5,
            return_argmax=True,
            logprob=True,
        ),
        *offsets(chunk_size=4, temperature=0.5, logprob=True),
        *timed(logprob=True),
    )


LINEAR_LOGPROB = Op(
    "linear_logprob",
    linear_logprob,
    linear_logprob_eager,
    (
        Implementation(
            "triton",
            lambda: fused("triton").logprob,
            platform.no_triton,
            tunables=lambda: (CHUNK,),
        ),
        Implementation(
            "cpp",
            lambda: fused("cpp").logprob,
            platform.no_cpp,
            ("cpu",),
            (torch.float32, torch.bfloat16),
            tunables=lambda: (CHUNK,),
        ),
    ),
    _all_cases(),
    atol=_logprob_atol,
    # Classes that are no row's target have elements of the weight's gradient that are 20 to 40
    # times smaller than its root mean square: sums of small terms of either sign, which the twin
    # computes from rounded logits too. There its own error is a quarter to a third in bfloat16.
    judged=Judged(
        of_sums=True,
        detects={
            torch.bfloat16: {
                "grad x": 0.11,
                "grad weight": 1.3,
                "grad bias": 0.55,
                "grad lora_A": 0.094,
                "grad lora_B": 1.2,
            },
            torch.float16: {"grad weight": 0.14, "grad bias": 0.087, "grad lora_B": 0.21},
        },
    ),
    # (8192, 4096, 151936): the products alone take 42 ms there (huggingface/trl, issue 7244), and
    # the logits' recomputation a third of that. The gradients of x and weight take 1.3 GiB.
    goals=(
        Goal(
            "H100",
            "forward_backward",
            "median_ms",
            at_most=60,
            cases=("qwen3-8b",),
            dtypes=BF16,
            within_mib=4096,
        ),
        Goal("H200", "forward_backward", "median_ms", at_most=56, cases=("qwen3-8b",), dtypes=BF16),
    ),
)
