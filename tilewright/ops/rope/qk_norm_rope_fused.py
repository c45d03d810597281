"""QK norm and rotary embedding on the fused kernels, and in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tilewright.core.formula import keep, kept
from tilewright.core.layout import check_overwritable, last_contiguous
from tilewright.core.library import Operator, on_its_device, once
from tilewright.core.takes import FLOAT
from tilewright.core.torch_names import in_forward_mode, in_transform
from tilewright.kernels.rope.operators import (
    HeadNorm,
    Heads,
    Rotation,
    by_head,
    prepare,
    prepare_backward,
    slices,
    values,
)
from tilewright.ops.rope.rope import rope_eager


def pieces(qkv, heads):
    """The same as `slices`; autograd does not allow in-place writes to the pieces, and concatenates
    their gradients.
    """
    q, k, v = by_head(qkv, heads).split((heads.q, heads.kv, heads.kv), 2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


# ---- two operators


def _gradients(op, dq, dk, dv, *of_forward):
    """Gradients by the names of their arguments."""
    if dq is None and dk is None and dv is None:
        return {}
    gradients = op(dq, dk, dv, *of_forward)
    return {"qkv": gradients.dqkv, "q_weight": gradients.dq_weight, "k_weight": gradients.dk_weight}


def _normalized(qkv, rstd) -> torch.Tensor | None:
    return None if rstd is None else qkv


@prepare.formula(normalized=_normalized)
def _backward(op, g, normalized, rstd, heads, norm, rotation):
    """Without v, which is no result of the operator: it is a view."""
    return _gradients(op, g.q, g.k, None, normalized, rstd, heads, norm, rotation)


def _with_v(operator: Operator, backward_op: Operator, title: str) -> type[torch.autograd.Function]:
    """The operator with v as a third result, so that one kernel writes the whole gradient of qkv.

    Its arguments are those of a call that bypasses the dispatcher.
    """
    signature = operator.signature
    names = [argument.name for argument in signature.direct]

    def gradients(ctx, *grads):
        by_name = _gradients(backward_op, *grads, *kept(ctx))
        return tuple([by_name.get(name) for name in names])

    refusing = once(title, gradients)

    class WithV(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *direct):
            qkv, heads, norm, rotation = signature.collect(direct)
            outputs = operator(qkv, heads, norm, rotation)
            normalized = _normalized(qkv, outputs.rstd)
            # Dynamo traces this, but not what a `Formula` keeps by.
            keep(ctx, (normalized, outputs.rstd, heads, norm, rotation))
            # Dynamo traces with all gradients, and does not support this call.
            if not torch.compiler.is_dynamo_compiling():
                ctx.set_materialize_grads(False)
            return outputs.q, outputs.k, values(qkv, heads)

        @staticmethod
        def backward(ctx, dq, dk, dv):
            if torch.compiler.is_dynamo_compiling():  # compiled code has no second derivative
                return gradients(ctx, dq, dk, dv)
            return refusing(ctx, dq, dk, dv)

    return WithV


class Fused:
    """One implementation: the call, and what `in_place` launches.

    overwrite: (qkv, heads, norm, rotation), writes q and k over their part of qkv; on its device.
    dtypes: those of weights that the kernels read; others are cast to float32, in which they
        compute.
    """

    def __init__(
        self, operator: Operator, backward_op: Operator, overwrite: Callable, dtypes=FLOAT
    ):
        self.operator, self.backward_op, self._dtypes = operator, backward_op, dtypes
        title = operator.name().split(".")[0]
        self._with_v = _with_v(operator, backward_op, title)
        self._overwrite = on_its_device(overwrite)
        self.rotate_back = once(title, self._rotate_back)

    def __call__(self, qkv, heads, norm, rotation):
        norm, contiguous = self._for_kernels(norm), last_contiguous(qkv)
        arguments = contiguous, heads, norm, rotation.for_kernels()
        learns = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (qkv, norm.q_weight, norm.k_weight)
        )
        if learns and not in_forward_mode() and not in_transform() and contiguous is qkv:
            return self._with_v.apply(*self.operator.signature.expand(arguments))
        outputs = self.operator(*arguments)
        return outputs.q, outputs.k, values(qkv, heads)

    def overwrite(self, qkv, heads, norm, rotation):
        self._overwrite(qkv, heads, self._for_kernels(norm), rotation.for_kernels())

    def _for_kernels(self, norm):
        q_weight, k_weight = (
            w if w is None else (w if w.dtype in self._dtypes else w.float()).contiguous()
            for w in (norm.q_weight, norm.k_weight)
        )
        return HeadNorm(q_weight, k_weight, float(norm.eps), float(norm.offset))

    def _rotate_back(self, ctx, d):
        """The gradient of qkv before a rotation in place."""
        rotation = kept(ctx)[0].for_kernels()
        parts = *slices(d, ctx.heads), values(d, ctx.heads)
        return self.backward_op(*parts, None, None, ctx.heads, HeadNorm(), rotation).dqkv


@functools.cache
def triton() -> Fused:
    from tilewright.kernels.rope import qk_norm_rope_triton as k

    backward = prepare_backward.define("qk_norm_rope_triton_backward", k.backward)
    return Fused(prepare.define("qk_norm_rope_triton", k.forward, backward), backward, k.overwrite)


@functools.cache
def cpp() -> Fused:
    overwrite = torch.ops.tilewright.qk_norm_rope_cpp_.default
    backward = prepare_backward.adopt("qk_norm_rope_cpp_backward")
    return Fused(
        prepare.adopt("qk_norm_rope_cpp", backward),
        backward,
        lambda qkv, heads, norm, rotation: overwrite(qkv, *heads, *norm, *rotation),
        (torch.float32, torch.bfloat16),
    )


# ---- in place


def in_place(
    fn: Callable, qkv: torch.Tensor, heads: Heads, norm: HeadNorm, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fn(qkv, ...) with q and k written over their part of qkv."""
    differentiable = [
        name
        for name, t in (("qkv", qkv), ("q_weight", norm.q_weight), ("k_weight", norm.k_weight))
        if t is not None and t.requires_grad
    ]
    if norm.q_weight is not None and differentiable and torch.is_grad_enabled():
        raise ValueError(
            "inplace=True with weights overwrites qkv, from which the gradient of "
            f"{' and '.join(differentiable)} is computed; pass inplace=False, or call it under "
            "torch.no_grad()"
        )
    compiling = torch.compiler.is_compiling()
    check_overwritable("qkv", qkv, compiling)
    if compiling:
        # The compiler decides where results are stored; the copies allow it to store them here.
        (*new, _), parts = fn(qkv, heads, norm, rotation), slices(qkv, heads)
        for x, y in zip(parts, new, strict=True):
            x.copy_(y)
        return *parts, values(qkv, heads)
    # Before anything is written, so that a tensor that autograd refuses is unchanged.
    _Overwritten.apply(qkv, rotation, heads, fn)
    with torch.no_grad():
        data = qkv.detach()
        if isinstance(fn, Fused):
            fn.overwrite(data, heads, norm, rotation)
        else:
            results = fn(data, heads, norm, rotation)
            for x, y in zip(slices(data, heads), results[:2], strict=True):
                x.copy_(y)
    return pieces(qkv, heads)


def _rotate_back_eager(d, heads, rotation):
    """The gradient of qkv before a rotation, from that of the rotated one."""
    q, k, v = pieces(d, heads)
    rotated: Any = rope_eager(q, k, rotation.inverse())  # k is given
    return torch.cat([t.transpose(1, 2) for t in (*rotated, v)], 2).flatten(2)


class _Overwritten(torch.autograd.Function):
    """Registers the in-place rotation of q and k with autograd. qkv is not saved: the backward
    needs only the angles.
    """

    @staticmethod
    def forward(ctx, qkv, rotation, heads, fn):
        keep(ctx, (rotation,))
        ctx.heads, ctx.fn = heads, fn
        ctx.mark_dirty(qkv)
        ctx.set_materialize_grads(False)
        return qkv

    @staticmethod
    def backward(ctx, d):
        if d is not None and isinstance(ctx.fn, Fused):
            d = ctx.fn.rotate_back(ctx, d)
        elif d is not None:
            d = _rotate_back_eager(d, ctx.heads, *kept(ctx))
        return d, None, None, None
