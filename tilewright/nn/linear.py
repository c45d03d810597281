"""F.linear, whose float32 weight gets a float32 gradient from the product itself under
torch.autocast on a GPU.

PyTorch's own writes that gradient in 16 bits and casts it: one more rounding, and one more pass
over memory for each weight.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tilewright.core.registry import FLOATS
from tilewright.core.schema import PLAIN
from tilewright.core.torch_names import (
    HAS_OUT_DTYPE,
    in_forward_mode,
    in_legacy_vmap,
    in_transform,
    torch_dispatch_modes,
)

HALVES = (torch.bfloat16, torch.float16)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear. Under torch.autocast on CUDA, gradients of a float32 weight and its bias are
    computed in float32 and never rounded to autocast's dtype. Compiled and traced calls use
    F.linear's gradients, as do gradients that are to be differentiated.

    x: [..., K].   weight: [N, K].   bias: [N] or None. Differentiable any number of times.
    """
    if rounds_gradients(x, weight):
        return WideGradients.apply(x.to(torch.get_autocast_dtype("cuda")), weight, bias)
    return F.linear(x, weight, bias)


def rounds_gradients(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether PyTorch's product would round gradients that `WideGradients` does not."""
    return (
        not torch.compiler.is_compiling()
        and x.is_cuda
        and x.dtype in FLOATS
        and weight.dtype == torch.float32
        and weight.requires_grad
        and type(x) in PLAIN
        and type(weight) in PLAIN
        and torch.is_grad_enabled()
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") in HALVES
        and HAS_OUT_DTYPE
        and not in_transform()
        and not in_forward_mode()
        # A tracer needs PyTorch's own product, for which it has rules.
        and not torch_dispatch_modes()
    )


class WideGradients(torch.autograd.Function):
    """x weight^T + bias in x's dtype, 16 bits, of a float32 weight and bias."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        half = weight.to(x.dtype)
        # The weight may change before the backward pass, which reads `half`.
        ctx.weight, ctx.version = weight, weight._version
        ctx.save_for_backward(x, half if ctx.needs_input_grad[0] else None)
        return F.linear(x, half, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, dy):
        x, half = ctx.saved_tensors
        again = torch.is_grad_enabled()  # the gradients are to be differentiated themselves
        if again and ctx.weight._version != ctx.version:
            raise RuntimeError("the weight has been modified in place since the forward pass")
        dx = dw = db = None
        rows, inputs = _matrix(dy), _matrix(x)
        if ctx.needs_input_grad[0]:
            dx = dy @ (ctx.weight.to(x.dtype) if again else half)
        if ctx.needs_input_grad[1] and again:
            dw = (rows.t() @ inputs).to(ctx.weight.dtype)
        elif ctx.needs_input_grad[1]:
            dw = wide(rows.t(), inputs)
        if ctx.needs_input_grad[2]:
            db = rows.sum(0, dtype=ctx.weight.dtype)
        return dx, dw, db


def _matrix(t: torch.Tensor) -> torch.Tensor:
    # Not -1 rows, which are not known where there is no column.
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def wide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b in float32, of matrices of 16 bits."""
    if a.is_cuda and not in_legacy_vmap():
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # ATen has such a product for CUDA alone, and no batch of it
