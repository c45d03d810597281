"""Products of two matrices on a CPU by the C++ extension, where it is faster than ATen or ATen has
none.

ATen's products take float32 factors (1.5 to 2.4 times as long on an AMD EPYC 9005, whose AVX-512
its library does not use; Intel's it does), or round the result to the 16 bits of the factors.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from tilewright.core import platform
from tilewright.core.library import declare

# Below this, packing a factor takes as long as multiplying it.
ROWS = 48


@functools.cache
def takes(dtype: torch.dtype) -> bool:
    """Whether this processor and build multiply two CPU matrices of this dtype into float32, and
    faster than ATen, if that does.
    """
    return platform.no_cpp("cpu") is None and torch.ops.tilewright.product_cpp_takes(dtype)


def multiplies(t: torch.Tensor) -> bool:
    """Whether `gemm_` multiplies a factor like t into float32 by `product_`."""
    return t.is_cpu and takes(t.dtype)


def product_(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, add: bool = False, scale: float = 1.0
) -> None:
    """out (+)= scale * a b, without autograd.

    a, b: [M, S] and [S, N], both float32 or both bfloat16, for which `takes` is true; copied unless
        rows or columns are contiguous.
    out: [M, N] float32 on the CPU, rows contiguous.

    Accumulates in float32, in an order that depends on shapes alone.
    """
    torch.ops.tilewright.product_cpp_.default(a, b, out, scale, add)


def gemm_(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, add: bool = False, scale: float = 1.0
) -> None:
    """out (+)= scale * a b, by `product_` or by ATen, without autograd.

    out: in the factors' dtype, or float32 where `multiplies` is true of them.
    """
    if out.dtype == torch.float32 and multiplies(a):
        product_(out, a, b, add=add, scale=scale)
    elif not add and scale == 1.0:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(out, a, b, beta=1 if add else 0, alpha=scale, out=out)


def huge_pages_(t: torch.Tensor) -> torch.Tensor:
    """A new t, on a CPU in huge pages if it is large, so that its first write takes less time."""
    if t.is_cpu and platform.no_cpp("cpu") is None:
        torch.ops.tilewright.huge_pages_cpp_.default(t)
    return t


@declare
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b."""
    return a.new_empty(a.shape[0], b.shape[1])


@product.formula(twice=True)
def _backward(op, dy, a, b, needs):
    gradients = {}
    if needs["a"]:
        gradients["a"] = op(dy, b.t())
    if needs["b"]:  # in b's memory layout, that of a layer's weight
        gradients["b"] = op(dy.t(), a).t() if b.stride(0) == 1 else op(a.t(), dy)
    return gradients


def _launch(a, b):
    out = product(a, b)
    product_(out, a, b)
    return out


_operator = product.define("product_cpp", _launch)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """F.linear(x, weight) of float32 CPU tensors, for which `takes` is true.

    x: [..., K].   weight: [N, K].   Returns [..., N]. Differentiable any number of times. Does not
    follow autocast.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] < ROWS:
        return F.linear(x, weight)
    return _operator(rows, weight.t()).view(*x.shape[:-1], weight.shape[0])
