"""A linear layer over a frozen quantised weight: y = x @ dequant(q)^T + bias, with the gradient of x and of bias."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tilewright.ops import _checks, quantize
from tilewright.ops.block_fp8 import BlockFP8, dequantize_block_fp8
from tilewright.ops.nf4 import NF4, dequantize_nf4
from tilewright.ops.nvfp4 import NVFP4, dequantize_nvfp4
from tilewright.ops.quantize import Quantized

_DEQUANTIZE = {NF4: dequantize_nf4, NVFP4: dequantize_nvfp4, BlockFP8: dequantize_block_fp8}


def dequantize(q: Quantized, **options) -> torch.Tensor:
    """`dequantize_nf4`, `dequantize_nvfp4` or `dequantize_block_fp8`, by q's format."""
    if type(q) not in _DEQUANTIZE:
        raise TypeError(f"q must be an NF4, NVFP4 or BlockFP8, got {type(q).__name__}")
    return _DEQUANTIZE[type(q)](q, **options)


class _Linear(torch.autograd.Function):
    """Keeps the quantised weight only, and dequantises again in the backward."""

    @staticmethod
    def forward(ctx, x, bias, q, options):
        ctx.save_for_backward(*q.tensors())
        ctx.q, ctx.options = q, options
        return F.linear(x, dequantize(q, dtype=x.dtype, **options), bias)

    @staticmethod
    def backward(ctx, dy):
        dx = dy @ dequantize(ctx.q, dtype=dy.dtype, **ctx.options) if ctx.needs_input_grad[0] else None
        db = dy.sum(tuple(range(dy.dim() - 1))) if ctx.needs_input_grad[1] else None
        return dx, db, None, None


def quantized_linear(x: torch.Tensor, q: Quantized, bias: torch.Tensor | None = None, *,
                     implementation: str = "auto") -> torch.Tensor:
    quantize.source(x)
    _checks.same_device(x=x, q=q.tensors()[0])
    return _Linear.apply(x, bias, q, {"implementation": implementation})
