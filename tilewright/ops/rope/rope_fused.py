"""Rotary embedding on the fused kernels, and in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewright.core.layout import (
    check_overwritable,
    empty_dense_like,
    last_contiguous,
    share_no_element,
)
from tilewright.core.library import define, differentiate, on_its_device


class Rotation(NamedTuple):
    """The angles per token, as implementations take them.

    cos, sin: [P, R / 2], without gradients.
    positions: the table row per token, int64 [B, S]; None if token s of a sequence uses row s.
    interleaved: pairs are neighbors.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None = None
    interleaved: bool = False

    def for_kernels(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, bool]:
        """With contiguous float32 tables."""
        cos, sin = self.cos.float().contiguous(), self.sin.float().contiguous()
        return cos, sin, self.positions, self.interleaved

    def inverse(self) -> Rotation:
        return Rotation(self.cos, -self.sin, self.positions, self.interleaved)


# ---- one operator, whose gradient is the operator itself


def _fake(q, k, cos, sin, positions, interleaved, inverse):
    k_out = q.new_empty(0) if k is None else empty_dense_like(last_contiguous(k))
    return empty_dense_like(last_contiguous(q)), k_out


def _setup(ctx, inputs, output):
    _, k, cos, sin, positions, ctx.interleaved, ctx.inverse = inputs
    ctx.has_k = k is not None
    ctx.save_for_backward(cos, sin, positions)
    ctx.set_materialize_grads(False)


def _backward(ctx, dq, dk):
    cos, sin, positions = ctx.saved_tensors
    dk = dk if ctx.has_k else None
    if dq is None and dk is None:
        return (None,) * 7
    first, second = (dq, dk) if dq is not None else (dk, None)
    first, second = ctx.backward_op(
        first, second, cos, sin, positions, ctx.interleaved, not ctx.inverse
    )
    if dq is None:
        first, second = None, first
    return first, second if dk is not None else None, None, None, None, None, None


class Fused:
    """One implementation: the call, and its launcher for `in_place`.

    launch: (q, k, q_out, k_out, cos, sin, positions, interleaved, inverse), writes q_out and k_out.
    rotate: the launcher on its tensors' device.
    operator: the same out of place.
    """

    def __init__(self, name: str, launch: Callable):
        self.__name__ = self.__qualname__ = f"rope_{name}"  # function attributes
        self._launch = launch
        self.rotate = on_its_device(launch)
        self.operator = define(f"rope_{name}", self._launch_new, _fake)
        differentiate(self.operator, _backward, _setup, backward_op=self.operator, twice=True)

    def __call__(self, q, k, rotation):
        cos, sin, positions, interleaved = rotation.for_kernels()
        q_out, k_out = self.operator(q, k, cos, sin, positions, interleaved, False)
        return q_out, None if k is None else k_out

    def _launch_new(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor | None,
        interleaved: bool,
        inverse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = last_contiguous(q), last_contiguous(k)
        q_out = empty_dense_like(q)
        k_out = None if k is None else empty_dense_like(k)
        self._launch(q, k, q_out, k_out, cos, sin, positions, interleaved, inverse)
        return q_out, q.new_empty(0) if k_out is None else k_out


@functools.cache
def triton() -> Fused:
    from tilewright.kernels.rope import rope_triton

    return Fused("triton", rope_triton.rotate)


@functools.cache
def cpp() -> Fused:
    return Fused("cpp", torch.ops.tilewright.rope_cpp_rotate.default)


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
    rotation = Rotation(*rotation.for_kernels())
    # One Function per tensor: autograd lets a Function overwrite a view only if that is its only
    # result. They precede the single launch that writes both, so that a tensor that autograd
    # refuses is unchanged.
    for _, x in named:
        _Overwritten.apply(x, *rotation, fn)
    with torch.no_grad():
        q_data, k_data = q.detach(), None if k is None else k.detach()
        if isinstance(fn, Fused):
            fn.rotate(q_data, k_data, q_data, k_data, *rotation, False)
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
    def forward(ctx, x, cos, sin, positions, interleaved, fn):
        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved, ctx.fn = interleaved, fn
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        return x

    @staticmethod
    def backward(ctx, dx):
        rotation = Rotation(*ctx.saved_tensors, ctx.interleaved)
        if dx is not None and isinstance(ctx.fn, Fused):
            dx = ctx.fn.operator(dx, None, *rotation, True)[0]
        elif dx is not None:
            dx = ctx.fn(dx, None, rotation.inverse())[0]
        return dx, None, None, None, None, None
