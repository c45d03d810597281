"""Focal loss of a language model's head: -(1 - p_y)^gamma log p_y per token (arXiv:1708.02002)."""

from __future__ import annotations

import torch

from tilewright.core import checks
from tilewright.core.takes import takes
from tilewright.kernels.loss.operators import Scaling, Wanted
from tilewright.ops.loss.head import HEAD, SIZES, HeadRows, head_op
from tilewright.ops.loss.head_cases import case


@checks.autocast("products", "x", "weight")
@takes(*SIZES, **HEAD, gamma="number [0, inf)")
def linear_focal(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    gamma: float = 2.0,
    implementation: str = "auto",
) -> torch.Tensor:
    """Focal loss per token, 0 where target is -100.

    Args:
        x: [..., H] fp32 | bf16 | fp16 (fp64 with eager).
        weight: [V, H] in x's dtype.
        target: [...] int64.
        gamma: >= 0.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        [...] in float32 (float64 for float64). Differentiable once in x and weight.

    Raises:
        TypeError, ValueError: Invalid arguments.

    Example:
        >>> x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
        >>> f"{linear_focal(x, weight, torch.tensor([0, 3]), gamma=0.0)[0].item():.4f}"  # log 4
        '1.3863'
    """
    rows = HeadRows.of(x, weight, target)
    fn = LINEAR_FOCAL.pick(implementation, x)
    with checks.no_autocast(x):
        return fn(rows, Scaling(), Wanted(), gamma)[0]


def focal(stats, valid, gamma):
    logprob = (stats.picked - stats.log_sum).clamp_max(0.0)
    missed = (-logprob.expm1()).clamp_min(1e-30)  # 1 - p; 0 ** gamma may have no derivative
    return (torch.where(valid == 0, 0.0, -(missed**gamma) * logprob * valid),)


LINEAR_FOCAL = head_op(
    "linear_focal",
    linear_focal,
    focal,
    (case("ragged", ((3, 7), 33, 203)), case("chunks", (11, 32, 100), gamma=0.5)),
)
