"""Focal loss of a language model's head: -(1 - p_y)^gamma log p_y per token (arXiv:1708.02002)."""

from tilewright.ops.loss.head_cases import case
from tilewright.ops.loss.kind import kind_op


def focal(stats, gamma: float = 2.0):
    """Focal loss per token.

    gamma: >= 0; with 0 it is cross-entropy.
    """
    logprob = (stats.picked - stats.log_sum).clamp_max(0.0)
    missed = (-logprob.expm1()).clamp_min(1e-30)  # 1 - p; 0 ** gamma may have no derivative
    return -(missed**gamma) * logprob


LINEAR_FOCAL = kind_op(
    "linear_focal",
    focal,
    (case("ragged", ((3, 7), 33, 203)), case("tiny", (5, 3, 7), chunk_size=2, gamma=0.5)),
    gamma="number [0, inf)",
)
linear_focal = LINEAR_FOCAL.public
