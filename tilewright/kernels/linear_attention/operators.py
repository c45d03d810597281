"""The operators of linear attention and of its convolution: what every implementation's launchers
take and return.

B = batch, S = positions, C = channels, W = taps. cu_seqlens are the bounds of packed documents,
int64, with B = 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewright.core.library import declare


class ConvGradients(NamedTuple):
    """Of x, of weight, and of bias if there is one."""

    dx: torch.Tensor
    dweight: torch.Tensor
    dbias: torch.Tensor | None


@declare
def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """x: [B, S, C].   weight: [C, W] and bias [C], contiguous."""
    return x.new_empty(x.shape)


@declare
def convolve_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    silu: bool,
) -> ConvGradients:
    """dy: like x."""
    return ConvGradients(
        x.new_empty(x.shape),
        torch.empty_like(weight),
        None if bias is None else torch.empty_like(bias),
    )
