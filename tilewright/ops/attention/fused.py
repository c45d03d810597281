"""Attention by Tilewright's kernels: two operators and one autograd formula."""

from __future__ import annotations

import functools

import torch

from tilewright.core.library import Operator
from tilewright.kernels.attention.operators import attend, attend_backward, map_documents
from tilewright.kernels.launchers import next_power_of_2
from tilewright.kernels.moe.operators import MAP_ROWS
from tilewright.ops.attention.options import Request, head_widths


@attend.formula(
    constants=("lse",),
    tensors=lambda q, k, v, out, lse, cu_seqlens: (q, k, v, out, lse, cu_seqlens),
)
def _backward(op, g, tensors, sinks, variant, offset):
    if g.out is None:
        return {}
    gradients = op(g.out, *tensors, sinks, variant, offset)
    dsinks = None if sinks is None else gradients.dsinks.to(sinks.dtype)
    return {"q": gradients.dq, "k": gradients.dk, "v": gradients.dv, "sinks": dsinks}


class _Fused:
    """attention, and the two passes over a part of the keys, by one implementation's operators.

    mapped: an operator that makes of cu_seqlens what they read; None: they read cu_seqlens.
    """

    def __init__(self, forward: Operator, backward: Operator, mapped: Operator | None = None):
        self._forward, self._backward, self._mapped = forward, backward, mapped

    def _documents(self, cu_seqlens, rows):
        if cu_seqlens is None or self._mapped is None:
            return cu_seqlens
        return self._mapped(cu_seqlens, rows, MAP_ROWS)

    def __call__(self, q, k, v, cu_seqlens, variant, sinks, max_seqlen):
        documents = self._documents(cu_seqlens, q.shape[2])
        return self._forward(q, k, v, documents, sinks, variant, k.shape[2] - q.shape[2]).out

    def part(self, q, k, v, cu_seqlens, variant, offset):
        with torch.no_grad():
            documents = self._documents(cu_seqlens, q.shape[2])
            outputs = self._forward(q, k, v, documents, None, variant, offset)
        return outputs.out, outputs.lse

    def part_backward(self, dout, q, k, v, out, lse, cu_seqlens, variant, offset):
        with torch.no_grad():
            documents = self._documents(cu_seqlens, q.shape[2])
            gradients = self._backward(dout, q, k, v, out, lse, documents, None, variant, offset)
        return gradients.dq, gradients.dk, gradients.dv


@functools.cache
def triton() -> _Fused:
    from tilewright.kernels.attention import attention_triton as k

    backward = attend_backward.define("attention_triton_backward", k.backward)
    return _Fused(attend.define("attention_triton", k.forward, backward), backward, _mapped())


@functools.cache
def gluon() -> _Fused:
    from tilewright.kernels.attention import specialized as k

    backward = attend_backward.define("attention_gluon_backward", k.backward)
    return _Fused(attend.define("attention_gluon", k.forward, backward), backward, _mapped())


@functools.cache
def _mapped() -> Operator:
    from tilewright.kernels.attention.attention_triton import map_documents as launch

    return map_documents.define("attention_documents_triton", launch)


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


def gluon_refuses(request: Request) -> str | None:
    """Why specialized warps compute a request in neither pass; None if they do."""
    if reason := head_widths(request, 8, 256):
        return reason
    D, DV, latent = _widths(request)
    if not latent and next_power_of_2(max(16, D)) != next_power_of_2(max(16, DV)):
        return f"takes values as wide as keys, or 65 to 128 beside 129 to 192, not {DV} beside {D}"
    if request.softcap and latent:
        return f"takes no softcap of values of {DV} beside keys of {D}"
    return "takes no dropout" if request.dropout else None


def _widths(request: Request) -> tuple[int, int, bool]:
    """Widths of keys and of values, and whether they are latent attention's: keys in two parts."""
    D, DV = request.head_dim, request.value_dim or request.head_dim
    return D, DV, 128 < D <= 192 and 64 < DV <= 128


def gluon_slower_than(device_type: str, request: Request | None) -> str | None:
    """Returns "triton" where specialized warps have measured faster in no pass: in wider rows, and,
    without a gradient, in the forward of windows in rows of up to 64. A tuned table of the device,
    which may give them these rows, is consulted for each launch.
    """
    if request is None:
        return None
    from tilewright.kernels import tuning

    D, DV, latent = _widths(request)
    wide = max(D, DV) > 128 and not latent
    few = D <= 64 and request.window and not request.gradient
    return "triton" if (wide or few) and not tuning.gives_gluon("attention") else None
