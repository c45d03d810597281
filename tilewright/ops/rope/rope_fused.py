"""Rotary embedding on the fused kernels, and in place."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from tilewright.core.formula import keep, kept
from tilewright.core.layout import check_overwritable, share_no_element
from tilewright.core.library import Operator, on_its_device
from tilewright.kernels.rope.operators import Rotation, rotate

# ---- one operator, whose gradient is the operator itself


@rotate.formula(twice=True)
def _backward(op, g, rotation, inverse):
    if g.q is None:
        if g.k is None:
            return {}
        return {"k": op(g.k, None, rotation, not inverse).q}
    dq, dk = op(g.q, g.k, rotation, not inverse)
    return {"q": dq, "k": dk}


class Fused:
    """One implementation: the call, and what `in_place` launches.

    overwrite: (q, k, rotation), writes over q and k; on their device.
    """

    def __init__(self, operator: Operator, overwrite: Callable):
        self.operator, self.overwrite = operator, on_its_device(overwrite)

    def __call__(self, q, k, rotation):
        q_out, k_out = self.operator(q, k, rotation.for_kernels(), False)
        return q_out, k_out


@functools.cache
def triton() -> Fused:
    from tilewright.kernels.rope import rope_triton as k

    return Fused(rotate.define("rope_triton", k.forward), k.overwrite)


@functools.cache
def cpp() -> Fused:
    overwrite = torch.ops.tilewright.rope_cpp_.default
    return Fused(rotate.adopt("rope_cpp"), lambda q, k, rotation: overwrite(q, k, *rotation))


# ---- in place


def in_place(fn: Callable, q: torch.Tensor, k: torch.Tensor | None, rotation: Rotation):
    """fn(q, k, rotation) written over q and k, which it returns."""
    named = [(name, x) for name, x in (("q", q), ("k", k)) if x is not None]
    compiling = torch.compiler.is_compiling()
    for name, x in named:
        check_overwritable(name, x, compiling)
    if compiling:
        # The compiler decides where results are stored; the copies allow it to store them here.
        for (_, x), new in zip(named, fn(q, k, rotation), strict=False):
            x.copy_(new)
        return q, k
    if k is not None and q.numel() and k.numel() and not share_no_element(q, k):
        raise ValueError(
            "inplace=True cannot overwrite q and k that share memory, or may: "
            f"shapes {list(q.shape)} and {list(k.shape)}, strides {list(q.stride())} and "
            f"{list(k.stride())}, {k.data_ptr() - q.data_ptr()} bytes from q to k; pass "
            "inplace=False"
        )
    rotation = rotation.for_kernels()
    # One Function per tensor: autograd lets a Function overwrite a view only if that is its only
    # result. They precede the single launch that writes both, so that a tensor that autograd
    # refuses is unchanged.
    for _, x in named:
        _Overwritten.apply(x, rotation, fn)
    with torch.no_grad():
        q_data, k_data = q.detach(), None if k is None else k.detach()
        if isinstance(fn, Fused):
            fn.overwrite(q_data, k_data, rotation)
        else:
            results = fn(q_data, k_data, rotation)
            for x, new in zip((q_data, k_data), results, strict=True):
                if x is not None:
                    x.copy_(new)
    return q, k


class _Overwritten(torch.autograd.Function):
    """Registers the in-place rotation of x with autograd. x is not saved: the backward needs only
    the angles.
    """

    @staticmethod
    def forward(ctx, x, rotation, fn):
        keep(ctx, (rotation,))
        ctx.fn = fn
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        return x

    @staticmethod
    def backward(ctx, dx):
        (rotation,) = kept(ctx)
        if dx is not None and isinstance(ctx.fn, Fused):
            dx = ctx.fn.operator(dx, None, rotation, True).q
        elif dx is not None:
            dx = ctx.fn(dx, None, rotation.inverse())[0]
        return dx, None, None
