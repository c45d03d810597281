"""The operators of the ops with FP8 results: what every implementation's launchers take and return.

B = matrices of R rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tilewright.core.library import declare
from tilewright.kernels.norm.operators import Norm
from tilewright.kernels.quant.operators import FP8, Codes, fp8_codes


class NormalizedCodes(NamedTuple):
    """data, scale: y's codes and scales.   y: what was quantized, like x, or None.   total: x +
    residual, like residual, or None.
    """

    data: torch.Tensor
    scale: torch.Tensor
    y: torch.Tensor | None
    total: torch.Tensor | None


@declare
def silu_mul_quantize(gate: torch.Tensor, up: torch.Tensor, R: int, fp8: FP8) -> Codes:
    """gate, up: [B * R, C] with contiguous columns.   fp8: a transpose only in MXFP8."""
    return fp8_codes(gate, gate.shape[0] // max(R, 1), R, gate.shape[1], fp8)


@declare
def rmsnorm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm,
    keep: bool,
    fp8: FP8,
) -> NormalizedCodes:
    """x: [..., R, D] or [D], contiguous, as residual.   keep: return y.   fp8: no transpose."""
    *lead, R, D = (1, *x.shape)
    data, scale, _, _ = fp8_codes(x, math.prod(lead), R, D, fp8)
    y = torch.empty_like(x) if keep else None
    return NormalizedCodes(data, scale, y, None if residual is None else torch.empty_like(residual))
