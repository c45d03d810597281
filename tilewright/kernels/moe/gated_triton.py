"""What the kernels of grouped GEMMs have in common: the gate of an MLP, and what a launch reads and
writes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.kernels.math_triton import sigmoid, tanh_and_derivative


@triton.jit
def gated(g, u, GATE: tl.constexpr):
    """a, da/dg, v and dv/du of ops.activation.Gate, float32: a * v is the result for a gate and an
    up.
    """
    dv = 1.0
    if GATE.ACTIVATION == 3:
        near, dv = tanh_and_derivative(u * (1.0 / GATE.UP_LIMIT))
        v = GATE.UP_LIMIT * near + GATE.OFFSET
        s = sigmoid(GATE.ALPHA * g)
        soft, dsoft = tanh_and_derivative(g * (1.0 / GATE.LIMIT))
        a = GATE.LIMIT * soft * s
        da = s * dsoft + GATE.ALPHA * a * (1.0 - s)
    else:
        v, z = u, g
        if GATE.UP_LIMIT is not None:
            v = tl.minimum(u, GATE.UP_LIMIT, propagate_nan=tl.PropagateNan.ALL)
            v = tl.maximum(v, -GATE.UP_LIMIT, propagate_nan=tl.PropagateNan.ALL)
            dv = tl.where(v == u, 1.0, 0.0)
        v += GATE.OFFSET
        if GATE.LIMIT is not None:
            z = tl.minimum(g, GATE.LIMIT, propagate_nan=tl.PropagateNan.ALL)
        if GATE.ACTIVATION == 0:
            s = sigmoid(GATE.ALPHA * z)
            a = z * s
            da = s + GATE.ALPHA * a * (1.0 - s)
        elif GATE.ACTIVATION == 1:
            # (1 + tanh w) / 2 = sigmoid(2 w); beyond 20 it is 0 or 1, and a cube may overflow.
            w = tl.minimum(z, 20.0, propagate_nan=tl.PropagateNan.ALL)
            w = tl.maximum(w, -20.0, propagate_nan=tl.PropagateNan.ALL)
            s = sigmoid(1.5957691216057308 * (w + 0.044715 * w * w * w))
            a = z * s
            da = s + a * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * w * w)
        else:
            s = 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)
            a = z * s
            da = s + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
        if GATE.LIMIT is not None:
            da = tl.where(g > GATE.LIMIT, 0.0, da)
    return a, da, v, dv


class Tokens(NamedTuple):
    """The rows of a product. They are x's rows; with slots, row r is x's row slots[r] // top_k.

    offsets: ends of the experts' rows.   tiles: `tile_map` of the offsets, if already computed.
    """

    offsets: torch.Tensor
    slots: torch.Tensor | None = None
    top_k: int = 1
    tiles: torch.Tensor | None = None


class Outputs(NamedTuple):
    """The tensors that `_gemm` writes (pre: read with DSWIGLU), by its argument names."""

    out: torch.Tensor
    pre: torch.Tensor | None = None
    hw: torch.Tensor | None = None
    partial: torch.Tensor | None = None
