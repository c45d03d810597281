"""Attention by Tilewright's kernels: two operators and one autograd formula."""

from __future__ import annotations

import functools

import torch

from tilewright.core.library import Operator
from tilewright.kernels.attention.operators import attend, attend_backward
from tilewright.ops.attention.options import Request, head_widths


def _save(ctx, arguments, found):
    q, k, v, cu_seqlens, sinks, ctx.variant, ctx.offset = arguments
    ctx.save_for_backward(q, k, v, *found, cu_seqlens, sinks)


def _backward(ctx, g):
    if g.out is None:
        return {}
    *tensors, sinks = ctx.saved_tensors
    found = ctx.backward_op(g.out, *tensors, sinks, ctx.variant, ctx.offset)
    dsinks = None if sinks is None else found.dsinks.to(sinks.dtype)
    return {"q": found.dq, "k": found.dk, "v": found.dv, "sinks": dsinks}


attend.differentiate(_save, _backward, constants=("lse",))


class _Fused:
    """attention, and the two passes over a part of the keys, by one implementation's operators."""

    def __init__(self, forward: Operator, backward: Operator):
        self._forward, self._backward = forward, backward

    def __call__(self, q, k, v, cu_seqlens, variant, sinks, max_seqlen):
        return self._forward(q, k, v, cu_seqlens, sinks, variant, k.shape[2] - q.shape[2]).out

    def part(self, q, k, v, cu_seqlens, variant, offset):
        with torch.no_grad():
            found = self._forward(q, k, v, cu_seqlens, None, variant, offset)
        return found.out, found.lse

    def part_backward(self, dout, q, k, v, out, lse, cu_seqlens, variant, offset):
        with torch.no_grad():
            found = self._backward(dout, q, k, v, out, lse, cu_seqlens, None, variant, offset)
        return found.dq, found.dk, found.dv


@functools.cache
def triton() -> _Fused:
    from tilewright.kernels.attention import attention_triton as k

    backward = attend_backward.define("attention_triton_backward", k.backward)
    return _Fused(attend.define("attention_triton", k.forward, backward), backward)


class _Cpp(_Fused):
    def __call__(self, q, k, v, cu_seqlens, variant, sinks, max_seqlen):
        sinks = None if sinks is None else sinks.float().contiguous()
        return super().__call__(q, k, v, cu_seqlens, variant, sinks, max_seqlen)


@functools.cache
def cpp() -> _Fused:
    backward = attend_backward.adopt("attention_cpp_backward")
    return _Cpp(attend.adopt("attention_cpp", backward), backward)


def triton_refuses(request: Request) -> str | None:
    return head_widths(request, 1, 256)
