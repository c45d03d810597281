"""The Newton-Schulz iteration from two products and a start, which an implementation provides. The
definition is tilewright/ops/optim/newton_schulz.py.

All matrices but x are polynomials of x x^T: they are symmetric and commute, so the product of any
two of them is symmetric, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# symmetric(left, right, alpha, addend, beta): alpha left right^T + beta addend, a symmetric result.
# general(left, right, beta): left right + beta right.
# All take and return [B, rows, columns], contiguous; addend may be None.
# start(x, tall, eps): `normalized` of x [B, rows, columns], any strides, rounded to its dtype; of
# its transpose if tall.
Symmetric = Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor | None, float], torch.Tensor]
General = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
Start = Callable[[torch.Tensor, bool, float], torch.Tensor]
# Where rows are this many times longer than columns, two steps are taken on the Gram matrix: with
# half of each symmetric product, 3 M^2 N + 5 M^3 FLOPs, not 6 M^2 N + 2 M^3. More than two
# would save more, but in bfloat16 negative eigenvalues appear by rounding and grow: singular values
# reach 1.37 after three, and diverge after five.
WIDE = 2


def normalized(w: torch.Tensor, eps: float) -> torch.Tensor:
    """w / max(|w|_F, eps) of each matrix [..., M, N], in w's dtype. The largest element is divided
    by first, so that no square leaves the dtype's range.
    """
    largest = w.abs().amax((-2, -1), keepdim=True) if w.numel() else w.new_ones(())
    largest = torch.where(largest > 0, largest, 1.0)
    w = w / largest
    norm = torch.linalg.vector_norm(w, dim=(-2, -1), keepdim=True)
    return w / torch.maximum(norm, eps / largest)


def start_in_torch(x: torch.Tensor, tall: bool, eps: float) -> torch.Tensor:
    w = normalized((x.mT if tall else x).to(torch.promote_types(x.dtype, torch.float32)), eps)
    return w.to(x.dtype).contiguous()


def iterate(
    x: torch.Tensor,
    coefficients: list[float],
    eps: float,
    symmetric: Symmetric,
    general: General,
    start: Start = start_in_torch,
) -> torch.Tensor:
    """x: [..., M, N].   coefficients: a, b, c of each step.   Returns x's shape, contiguous."""
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    tall = x.shape[-2] > x.shape[-1]
    w = start(x.reshape(-1, *x.shape[-2:]), tall, eps)
    steps = list(zip(*(coefficients[i::3] for i in range(3)), strict=True))
    together = 2 if w.shape[2] >= WIDE * w.shape[1] else 1
    for first in range(0, len(steps), together):
        (a, b, c), *rest = steps[first : first + together]
        gram = symmetric(w, w, 1.0, None, 0.0)
        update = symmetric(gram, gram, c, gram, b)
        if not rest:
            w = general(update, w, a)
            continue
        half = symmetric(gram, update, 1.0, gram, a)
        gram = symmetric(half, update, 1.0, half, a)
        update.diagonal(dim1=1, dim2=2).add_(a)
        ((a, b, c),) = rest
        following = symmetric(gram, gram, c, gram, b)
        w = general(symmetric(following, update, 1.0, update, a), w, 0.0)
    return (w.mT if tall else w).reshape(x.shape).contiguous()
