"""Log-probability and entropy of a language model's head, without materializing its logits:

    logprob = log softmax(z / temperature)_y

Symbols and chunks as in linear_cross_entropy. The upstream gradient differs per row: forward saves
[T] statistics only, and backward recomputes the logits, 8 T H V flops in total.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewright import platform
from tilewright.ops import _checks
from tilewright.ops._linear_chunks import CHUNK, Precision
from tilewright.ops._linear_fused import fused, logprob_of
from tilewright.ops._linear_head import (
    atol,
    case,
    check_chunks,
    check_head,
    logits_of,
    offsets,
    timed,
)
from tilewright.ops._losses import Labels, check_options, reshaped
from tilewright.ops._softmax_stats import capped, stats_eager, without_gradient
from tilewright.ops._targets import presence
from tilewright.registry import Implementation, Op


class Scaling(NamedTuple):
    """How logits are scaled: softcap (0.0: none) first, then division by the temperature."""

    temperature: float
    softcap: float


@_checks.autocast("products", "x", "weight", "bias")
def linear_logprob(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    fp32_logits: bool = False,
    chunk_size: int | None = None,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and the entropy of its distribution, for reinforcement
    learning.

    Both results are differentiable once in x, weight and bias; backward recomputes the logits. The
    gradients of weight and bias are summed over chunks in float32. Autocast as in
    `linear_cross_entropy`.

    Args:
        x, weight, target, bias, ignore_index: as in `linear_cross_entropy`.
        temperature: > 0, divides the (capped) logits.
        softcap: > 0, or None: no softcap. temperature, softcap and softcap / temperature must be
            finite in float32.
        fp32_logits, chunk_size: as in `linear_cross_entropy`.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        (logprob [...], entropy [...]), fp32 (fp64 for fp64), in nats. They are log softmax(z /
        temperature)_y, never above 0, and the entropy of softmax(z / temperature), never below 0.
        Both are 0 where target is ignore_index.

    Raises:
        TypeError, ValueError, IndexError, ImplementationUnavailable: as `linear_cross_entropy`.

    Example:
        >>> x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
        >>> logprob, entropy = tilewright.ops.linear_logprob(x, weight, torch.tensor([0, 3]))
        >>> f"{logprob[0].item():.4f} {entropy[0].item():.4f}"
        '-1.3863 1.3863'
    """
    check_options(ignore_index, 0.0, 0.0, softcap, "none")
    check_chunks("fp32", chunk_size)
    check_head(x, weight, bias, Labels(target), fp32_logits)
    _checks.number(
        "temperature",
        temperature,
        _checks.SMALLEST,
        _checks.LARGEST,
        "a finite number > 0 (in float32)",
    )
    if softcap and not _checks.SMALLEST <= softcap / temperature <= _checks.LARGEST:
        raise ValueError(
            "softcap / temperature must be a finite number > 0 (in float32), got "
            f"{softcap!r} / {temperature!r}"
        )
    scaling = Scaling(float(temperature), 0.0 if softcap is None else float(softcap))
    precision = Precision(fp32_sums=True, fp32_logits=fp32_logits)
    valid = presence(target, weight.shape[0], ignore_index).reshape(-1)
    fn = LINEAR_LOGPROB.pick(implementation, x)
    rows, target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    with _checks.no_autocast(x):
        results = fn(rows, weight, bias, target, valid, scaling, precision, chunk_size)
    return tuple(reshaped(t, x.shape[:-1]) for t in results)


# ---- the definition


def linear_logprob_eager(x, weight, bias, target, valid, scaling, precision, chunk_size):
    logits = without_gradient(logits_of(x, weight, bias, precision.fp32_logits), valid == 0)
    z = capped(logits.to(torch.promote_types(logits.dtype, torch.float32)), scaling.softcap)
    z = z / scaling.temperature
    return logprob_of(stats_eager(z, target, None, 0.0, False, True, False), valid)


# ---- cases


def _logprob_atol(dtype, kwargs):
    """In float32 the entropy's gradient has the factor z - mean, which cancels where the two are
    close, and in a case of five rows the twin's error may be small by chance: the others exceed
    twice it by up to 13 eps (AVX2).
    """
    return 16 * torch.finfo(dtype).eps if dtype == torch.float32 else atol(dtype, kwargs)


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
)
