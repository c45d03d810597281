"""The operators of the ops with FP8 results, and the calls of their implementations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from tilewright.core import checks
from tilewright.core.library import adopt, define
from tilewright.ops.activation import activation
from tilewright.ops.quant import mxfp8


def _fake_inverse(x, rows, columns, mx):
    if mx:
        return x.new_empty((rows, (columns + 31) // 32), dtype=torch.uint8)
    return x.new_empty((rows, (columns + 127) // 128), dtype=torch.float32)


def _fake_silu_mul(gate, up, seed, mx):
    return gate.new_empty(gate.shape, dtype=torch.uint8), _fake_inverse(gate, *gate.shape, mx)


def _fake_silu_mul_both(gate, up, rows, seed):
    return mxfp8.fake_both(
        gate.new_empty((gate.shape[0] // max(rows, 1), rows, gate.shape[1])), seed
    )


def _fake_rmsnorm(x, residual, weight, bias, eps, offset, round_xhat, seed, keep, mx):
    D = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    total = x.new_empty((0, D)) if residual is None else residual.new_empty((rows, D))
    return (
        x.new_empty((rows, D), dtype=torch.uint8),
        _fake_inverse(x, rows, D, mx),
        x.new_empty((rows if keep else 0, D)),
        total,
    )


class _Fused:
    """The calls of one implementation and its operators.

    dtypes: those of weight and bias that rmsnorm's kernels read; others are cast to float32.
    """

    def __init__(
        self,
        silu_mul: Callable,
        silu_mul_both: Callable,
        rmsnorm: Callable,
        dtypes: tuple[torch.dtype, ...] = checks.ACCEPTED,
    ):
        self.one, self.both, self.norm, self.dtypes = silu_mul, silu_mul_both, rmsnorm, dtypes

    def silu_mul(self, gate, up, seed, mx, transpose):
        rows = gate.shape[-2] if gate.dim() > 1 else 1
        if up is None:
            packed = activation.as_rows(gate)
            gate, up = packed.chunk(2, -1) if packed.shape[-1] else (packed, packed)
        gate, up = activation.as_rows(gate), activation.as_rows(up)
        return self.both(gate, up, rows, seed) if transpose else self.one(gate, up, seed, mx)

    def rmsnorm(self, x, residual, weight, bias, norm, into):
        eps, offset, cast = norm
        if weight.dtype not in self.dtypes:  # bias has weight's dtype
            weight, bias = weight.float(), None if bias is None else bias.float()
        # The llama cast rounds to the dtype of the norm's input, which is no rounding for a float32
        # residual stream.
        round_xhat = cast == "llama" and (residual is None or residual.dtype == x.dtype)
        return self.norm(
            x.contiguous(),
            None if residual is None else residual.contiguous(),
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            eps,
            offset,
            round_xhat,
            *into,
        )


@functools.cache
def load_triton() -> _Fused:
    from tilewright.kernels.fused_quantize import fused_quantize_triton as k

    return _Fused(
        define("silu_mul_triton_quantize", k.silu_mul_quantize, _fake_silu_mul),
        define("silu_mul_triton_mxfp8_both", k.silu_mul_mxfp8_both, _fake_silu_mul_both),
        define("rmsnorm_triton_quantize", k.rmsnorm_quantize, _fake_rmsnorm),
    )


@functools.cache
def load_cpp() -> _Fused:
    return _Fused(
        adopt("silu_mul_cpp_quantize", _fake_silu_mul),
        adopt("silu_mul_cpp_mxfp8_both", _fake_silu_mul_both),
        adopt("rmsnorm_cpp_quantize", _fake_rmsnorm),
        (torch.float32, torch.bfloat16),
    )
