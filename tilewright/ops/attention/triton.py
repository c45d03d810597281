"""Attention by Tilewright's Triton kernels: two operators and one autograd formula."""

from __future__ import annotations

import functools

import torch

from tilewright.core.layout import last_contiguous
from tilewright.core.library import define, differentiate
from tilewright.ops.attention.options import Request


def _setup(ctx, inputs, output):
    q, k, v, cu_seqlens, causal, window, softcap, sinks, scale, offset = inputs
    ctx.variant, ctx.position = (causal, window, softcap), (scale, offset)
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, sinks)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, _):
    if dout is None:
        return (None,) * 10
    q, k, v, out, lse, cu_seqlens, sinks = ctx.saved_tensors
    dq, dk, dv, dsinks = ctx.backward_op(
        dout, q, k, v, out, lse, cu_seqlens, *ctx.variant, sinks, *ctx.position
    )
    dsinks = None if sinks is None else dsinks.to(sinks.dtype)
    return dq, dk, dv, None, None, None, None, dsinks, None, None


class _Fused:
    """attention, and the two passes over a part of the keys, on one set of launchers."""

    def __init__(self, kernels):
        self.__name__ = self.__qualname__ = "attention_triton"  # function attributes
        self._kernels = kernels
        self._forward = define("attention_triton", self._launch_forward, self._fake_forward)
        self._backward = define(
            "attention_triton_backward", self._launch_backward, self._fake_backward
        )
        differentiate(self._forward, _backward, _setup, backward_op=self._backward)

    def __call__(self, q, k, v, cu_seqlens, variant, sinks, max_seqlen):
        causal, window, softcap, scale = variant
        offset = k.shape[2] - q.shape[2]
        return self._forward(q, k, v, cu_seqlens, causal, window, softcap, sinks, scale, offset)[0]

    def part(self, q, k, v, cu_seqlens, variant, offset):
        causal, window, softcap, scale = variant
        with torch.no_grad():
            return self._forward(q, k, v, cu_seqlens, causal, window, softcap, None, scale, offset)

    def part_backward(self, dout, q, k, v, out, lse, cu_seqlens, variant, offset):
        causal, window, softcap, scale = variant
        with torch.no_grad():
            return self._backward(
                dout, q, k, v, out, lse, cu_seqlens, causal, window, softcap, None, scale, offset
            )[:3]

    def _launch_forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        causal: bool,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
        scale: float,
        offset: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = map(last_contiguous, (q, k, v))
        return self._kernels.forward(
            q, k, v, cu_seqlens, causal, window, softcap, sinks, scale, offset
        )

    def _fake_forward(self, q, k, v, cu_seqlens, causal, window, softcap, sinks, scale, offset):
        return self._kernels.empty_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def _launch_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        causal: bool,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
        scale: float,
        offset: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        dout, q, k, v, out = map(last_contiguous, (dout, q, k, v, out))
        return self._kernels.backward(
            dout, q, k, v, out, lse, cu_seqlens, causal, window, softcap, sinks, scale, offset
        )

    def _fake_backward(
        self, dout, q, k, v, out, lse, cu_seqlens, causal, window, softcap, sinks, scale, offset
    ):
        return (
            *map(self._kernels.empty_rows, (q, k, v)),
            lse.new_empty(0 if sinks is None else q.shape[1]),
        )


@functools.cache
def triton() -> _Fused:
    from tilewright.kernels.attention import attention_triton

    return _Fused(attention_triton)


def triton_refuses(request: Request) -> str | None:
    if request.head_dim > 256:
        return f"takes head widths up to 256, not {request.head_dim}"
    return None
