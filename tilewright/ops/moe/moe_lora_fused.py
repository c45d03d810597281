"""The implementations of `moe_lora`: two operators each, with one autograd formula for all,
composed of a grouped GEMM and other ops.

Letters are those of moe_lora.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewright.core.library import declare
from tilewright.ops.activation.activation import SILU, SILU_MUL
from tilewright.ops.moe.experts import Projections, gate_backward, or_zeros, rows_to_slots
from tilewright.ops.moe.grouped_gemm import operators
from tilewright.ops.moe.permute import UNPERMUTE, sort_slots
from tilewright.ops.quant.weights import dense

_T = torch.Tensor


class Adapters(NamedTuple):
    """The factors of the three projections, as in `moe_lora`."""

    gate_A: _T
    gate_B: _T
    up_A: _T
    up_B: _T
    down_A: _T
    down_B: _T


class Results(NamedTuple):
    """y [T, H], and what is saved for backward (`Saved`)."""

    y: _T
    pre: _T | None
    low_gate_up: _T | None
    low_down: _T | None
    offsets: _T
    slots: _T
    position: _T


class Saved(NamedTuple):
    """Gates and ups pre [R, 2 I], A's results, and the order of rows (see `permute.Order`).

    A's results: those of gate and up together, and of down; per token if the factor (of down: B) is
    shared, else per row.
    """

    pre: _T
    low_gate_up: _T
    low_down: _T
    offsets: _T
    slots: _T
    position: _T


class Needs(NamedTuple):
    """Which gradients are needed."""

    dx: bool
    dweight: bool
    dgate_A: bool
    dgate_B: bool
    dup_A: bool
    dup_B: bool
    ddown_A: bool
    ddown_B: bool


class Gradients(NamedTuple):
    """Gradients, None for those that are not needed. dweight: the routing weights' gradient."""

    dx: _T | None
    dweight: _T | None
    dgate_A: _T | None
    dgate_B: _T | None
    dup_A: _T | None
    dup_B: _T | None
    ddown_A: _T | None
    ddown_B: _T | None


# The arguments of `lora` that have them.
_DIFFERENTIABLE = "x", "expert_weight", *Adapters._fields


@declare
def lora(
    x: _T,
    weights: Projections,
    expert_index: _T,
    expert_weight: _T,
    adapters: Adapters,
    scale: float,
    keep: bool,
) -> Results:
    """keep: whether the result has what only the backward reads."""
    T, R, i32 = x.shape[0], expert_index.numel(), torch.int32
    A, B = adapters.gate_A, adapters.down_B
    shapes = (
        (R, weights.gate_up.shape[1]),
        (T if _is_shared(A) else R, sum(_ranks(adapters))),
        (T if _is_shared(B) else R, B.shape[2]),
    )
    pre, hidden, up = (x.new_empty(shape) if keep else None for shape in shapes)
    return Results(
        x.new_empty(x.shape),
        pre,
        hidden,
        up,
        x.new_empty(weights.gate_up.shape[0], dtype=i32),
        x.new_empty(R, dtype=i32),
        x.new_empty(expert_index.shape, dtype=i32),
    )


@declare
def lora_backward(
    dy: _T,
    weights: Projections,
    x: _T,
    expert_weight: _T,
    adapters: Adapters,
    scale: float,
    of: Saved,
    needs: Needs,
) -> Gradients:
    leaves = x, expert_weight, *adapters
    return Gradients(
        *[t.new_empty(t.shape) if need else None for t, need in zip(leaves, needs, strict=True)]
    )


@lora.formula(constants=Results._fields[1:], saved=Saved)
def _backward(op, g, weights, x, expert_weight, adapters, scale, saved, needs):
    if g.y is None:
        return {}
    needed = Needs(*[needs[name] for name in _DIFFERENTIABLE])
    gradients = op(g.y, weights, x, expert_weight, adapters, scale, saved, needed)
    return dict(zip(_DIFFERENTIABLE, gradients, strict=True))


class _Fused:
    """One implementation: its operator, and the call."""

    def __init__(self, name: str):
        launches = Composed(name)
        backward = lora_backward.define(
            f"moe_lora_{name}_backward", or_zeros(lora_backward, launches.backward)
        )
        self.lora = lora.define(
            f"moe_lora_{name}_forward", or_zeros(lora, launches.forward), backward
        )

    def moe_lora(self, x, gate_up_proj, down_proj, index, weight, adapters, scale, noise):
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, *adapters))
        weights = Projections.of(gate_up_proj, down_proj, noise)
        return self.lora(x, weights, index, weight.contiguous(), adapters, scale, keep).y


class Composed:
    """Both passes over the grouped GEMM of this name; other ops use the implementation of `auto`,
    whatever is pinned.
    """

    def __init__(self, name: str):
        self.product, self.backward_x, self.backward_weight = operators(name)
        self.dequantizes = "triton" if name in ("gluon", "triton") else None

    def _dense(self, packed, like):
        """A projection's tensor. For a quantized one it is a new one, to be freed after one
        product.
        """
        return dense(packed, like.dtype, self.dequantizes)

    # A factor by rows, its transpose by rows, and its gradient: dense if it is shared. Rows of the
    # tail are 0 in `upstream`, and finite in `rows`.
    def _times(self, rows, factor, offsets):
        if _is_shared(factor):
            return rows @ factor[0].t()
        return self.product(rows, factor, offsets)

    def _times_transposed(self, rows, factor, offsets):
        return rows @ factor[0] if _is_shared(factor) else self.backward_x(rows, factor, offsets)

    def _gradient(self, upstream, rows, factor, offsets):
        if _is_shared(factor):
            return (upstream.t() @ rows)[None]
        return self.backward_weight(upstream, rows, offsets)

    def forward(self, x, weights, index, expert_weight, adapters, scale, keep):
        order = offsets, slots, position = sort_slots(index, weights.gate_up.shape[0])
        token = slots // index.shape[1]
        rows = x[token]
        A = torch.cat((adapters.gate_A, adapters.up_A), 1)  # one pass over the rows for both
        low = self._times(x if _is_shared(A) else rows, A, offsets)  # per token if A is shared
        low_rows = _at_rows(low, token, offsets) if _is_shared(A) else low
        pre = self.product(rows, self._dense(weights.gate_up, x), offsets)
        del rows
        factors = adapters.gate_B, adapters.up_B
        for half, part, B in zip(
            pre.chunk(2, -1), _split(low_rows, adapters), factors, strict=True
        ):
            half.add_(self._times(part, B, offsets), alpha=scale)
        h = SILU_MUL.part(pre)(pre, None, SILU)
        pre = pre if keep else None
        low_down = self._times(h, adapters.down_A, offsets)
        rows = self.product(h, self._dense(weights.down, x), offsets)
        del h
        B, collect = adapters.down_B, UNPERMUTE.part(x)
        if _is_shared(B):  # per token, with the weights of its experts
            low_down = collect(low_down, expert_weight, position)
            y = collect(rows, expert_weight, position).add_(low_down @ B[0].t(), alpha=scale)
        else:
            rows = rows.add_(self.product(low_down, B, offsets), alpha=scale)
            y = collect(rows, expert_weight, position)
        kept = (pre, low, low_down) if keep else (None, None, None)
        return Results(y, *kept, *order)

    def backward(self, dy, weights, x, expert_weight, adapters, scale, of, needs):
        offsets, slots, position = of.offsets, of.slots, of.position
        column = expert_weight.flatten()[slots][:, None]
        rows = _Rows(slots // position.shape[1], column, offsets, position)
        dpre, dots, *ddown = self._down_backward(weights.down, dy, of, adapters, rows, scale, needs)
        dx, *dgate_up = self._gate_up_backward(
            weights.gate_up, dpre, x, of, adapters, rows, scale, needs
        )
        dweight = rows_to_slots(dots, position) if needs.dweight else None
        return Gradients(dx, dweight, *dgate_up, *ddown)

    def _down_backward(self, down, dy, of, adapters, rows, scale, needs):
        """dpre, <dh, h> per row, and the gradients of down's factors."""
        token, column, offsets, _ = rows
        A, B, dA, dB = adapters.down_A, adapters.down_B, None, None
        dy_rows = dy[token]
        if _is_shared(B):
            upstream = _at_rows((dy @ B[0]).mul_(scale), token, offsets)
        else:
            upstream = self.backward_x(dy_rows, B, offsets).mul_(scale)
        dh = self.backward_x(dy_rows, self._dense(down, dy), offsets)
        dh = dh.add_(self._times_transposed(upstream, A, offsets))
        h, dpre, dots = gate_backward(dh, of.pre, column)  # h weighted per row
        del dh
        if needs.ddown_A:
            dA = self._gradient(upstream, h, A, offsets)
        del h
        if needs.ddown_B and _is_shared(B):
            dB = (dy.t() @ (of.low_down * scale))[None]
        elif needs.ddown_B:
            weighted = (scale * column * of.low_down.float()).to(dy.dtype)
            dB = self.backward_weight(dy_rows, weighted, offsets)
        return dpre, dots, dA, dB

    def _gate_up_backward(self, gate_up, dpre, x, of, adapters, rows, scale, needs):
        """The gradients of x and of gate's and up's factors."""
        token, _, offsets, position = rows
        need_A, need_B = (needs.dgate_A, needs.dup_A), (needs.dgate_B, needs.dup_B)
        A, low = torch.cat((adapters.gate_A, adapters.up_A), 1), of.low_gate_up
        if any(need_B) and _is_shared(A):
            low = _at_rows(low, token, offsets)
        dB, upstream = [], []
        for half, part, B, need in zip(
            dpre.chunk(2, -1),
            _split(low, adapters),
            (adapters.gate_B, adapters.up_B),
            need_B,
            strict=True,
        ):
            upstream.append(self._times_transposed(half, B, offsets).mul_(scale))
            dB.append(self._gradient(half, part * scale, B, offsets) if need else None)
        upstream = torch.cat(upstream, 1)
        collect, dx, dA = UNPERMUTE.part(dpre), None, None
        if _is_shared(A):
            upstream = collect(upstream, None, position)  # per token
            if any(need_A):
                dA = (upstream.t() @ x)[None]
            if needs.dx:
                dx = collect(
                    self.backward_x(dpre, self._dense(gate_up, dpre), offsets), None, position
                )
                dx = dx.add_(upstream @ A[0])
        else:
            if any(need_A):
                dA = self.backward_weight(upstream, x[token], offsets)
            if needs.dx:
                dx = self.backward_x(dpre, self._dense(gate_up, dpre), offsets)
                dx = collect(dx.add_(self.backward_x(upstream, A, offsets)), None, position)
        # Copies: two results of an operator must not share memory.
        dgate_A, dup_A = (
            part.clone(memory_format=torch.contiguous_format) if need and part is not None else None
            for part, need in zip(
                (None, None) if dA is None else dA.split(_ranks(adapters), 1), need_A, strict=True
            )
        )
        return dx, dgate_A, dB[0], dup_A, dB[1]


class _Rows(NamedTuple):
    """Rows in the order of their experts: their tokens, their routing weights [R, 1]; offsets and
    position as in `permute.Order`.
    """

    token: _T
    weight: _T
    offsets: _T
    position: _T


def _is_shared(factor):
    return factor.shape[0] == 1


def _at_rows(of_tokens, token, offsets):
    """Rows of an adapter's rank from those of tokens; the tail is 0, as from a grouped GEMM."""
    tail = torch.arange(token.shape[0], device=token.device) >= offsets[-1]
    return of_tokens[token].masked_fill_(tail[:, None], 0)


def _ranks(adapters):
    """The ranks of gate and up."""
    return adapters.gate_A.shape[1], adapters.up_A.shape[1]


def _split(low, adapters):
    """A's results for gate and for up."""
    return low.split(_ranks(adapters), -1)


@functools.cache
def _fused(name):
    return _Fused(name)


def load(name: str) -> Callable:
    """The call of the implementation of this name."""
    return _fused(name).moe_lora
