"""The operators of RMSNorm and LayerNorm: what every implementation's launchers take and return.

T = rows per head, H = heads (1 unless weight is [H, D]), D = columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewright.core.library import declare


class Norm(NamedTuple):
    """eps: added to the mean of squares.   offset: added to the weight.   round_xhat: whether the
    normalized row is rounded to y's dtype before it is scaled.
    """

    eps: float
    offset: float
    round_xhat: bool


class Normalized(NamedTuple):
    """y: like x.   rstd: [...] float32, 1 / sqrt(mean(x^2) + eps).   total: x + residual, like
    residual, or None.
    """

    y: torch.Tensor
    rstd: torch.Tensor
    total: torch.Tensor | None


class Gradients(NamedTuple):
    """Gradients of what was normalized, of weight, and of bias if there is one."""

    dx: torch.Tensor
    dweight: torch.Tensor
    dbias: torch.Tensor | None


@declare
def normalize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm,
) -> Normalized:
    """Normalizes x, or x + residual rounded to residual's dtype."""
    return Normalized(
        torch.empty_like(x),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
        None if residual is None else torch.empty_like(residual),
    )


@declare
def normalize_backward(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    norm: Norm,
    has_bias: bool,
) -> Gradients:
    """x: what was normalized.   dtotal: its gradient as a result of its own, added to dx."""
    return Gradients(
        torch.empty_like(x),
        torch.empty_like(weight),
        weight.new_empty(x.shape[-1]) if has_bias else None,
    )


class Standardized(NamedTuple):
    """y: like x.   mean, rstd: [...] float32, of each row: 1 / sqrt(variance + eps).
    total: x + residual, like residual, or None.
    """

    y: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor
    total: torch.Tensor | None


@declare
def standardize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> Standardized:
    """LayerNorm of x, or of x + residual rounded to residual's dtype."""
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    total = None if residual is None else torch.empty_like(residual)
    return Standardized(torch.empty_like(x), mean, rstd, total)


@declare
def standardize_backward(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    has_bias: bool,
) -> Gradients:
    """x: what was normalized.   dtotal: its gradient as a result of its own, added to dx."""
    dbias = torch.empty_like(weight) if has_bias else None
    return Gradients(torch.empty_like(x), torch.empty_like(weight), dbias)


def no_rows(x: torch.Tensor, weight: torch.Tensor, has_bias: bool) -> Gradients:
    """The gradients where T is 0."""
    dbias = weight.new_zeros(x.shape[-1]) if has_bias else None
    return Gradients(torch.empty_like(x), torch.zeros_like(weight), dbias)


def sizes(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int, int]:
    """T, H and D of x [..., D] or [..., H, D]."""
    D = x.shape[-1]
    H = weight.shape[0] if weight.dim() == 2 else 1
    return (x.numel() // (D * H) if x.numel() else 0), H, D
