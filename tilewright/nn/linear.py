"""F.linear, whose float32 weight gets a float32 gradient from the product itself under
torch.autocast on a GPU.

PyTorch's own writes that gradient in 16 bits and casts it: one more rounding, and one more pass
over memory for each weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilewright.core.torch_names import (
    HAS_OUT_DTYPE,
    FakeTensor,
    in_forward_mode,
    in_legacy_vmap,
    in_transform,
)

HALVES = (torch.bfloat16, torch.float16)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear. Under torch.autocast on CUDA, gradients of a float32 weight and its bias are
    computed in float32, not rounded to autocast's dtype.

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
        and weight.dtype == torch.float32
        and weight.requires_grad
        and torch.is_grad_enabled()
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") in HALVES
        and HAS_OUT_DTYPE
        and not in_transform()
        and not in_forward_mode()
    )


class WideGradients(torch.autograd.Function):
    """x weight^T + bias in x's dtype, 16 bits, of a float32 weight and bias."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        half = weight.to(x.dtype)
        ctx.save_for_backward(x, weight, half)
        return F.linear(x, half, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, dy):
        x, weight, half = ctx.saved_tensors
        # The gradients are to be differentiated themselves, or are a batch of them.
        plain = torch.is_grad_enabled() or in_legacy_vmap()
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = dy @ (weight.to(x.dtype) if plain else half)
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])
            dw = (rows.t() @ inputs).to(weight.dtype) if plain else wide(rows.t(), inputs)
        if ctx.needs_input_grad[2]:
            db = rows.sum(0, dtype=weight.dtype)
        return dx, dw, db


def wide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b in float32, of matrices of 16 bits."""
    if not a.is_cuda:  # ATen has such a product for CUDA alone
        return a.float() @ b.float()
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32)
    # Nothing is computed on fake tensors, for which PyTorch 2.11 has no rule of it.
    return out if isinstance(out, FakeTensor) else torch.mm(a, b, out_dtype=out.dtype, out=out)
