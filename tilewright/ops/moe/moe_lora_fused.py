"""The implementations of `moe_lora`: two operators each, with one autograd formula for all,
composed of a grouped GEMM and other ops.

Letters are those of moe_lora.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewright.core import checks
from tilewright.core.library import define, differentiate
from tilewright.ops.activation.activation import SILU, SILU_MUL
from tilewright.ops.moe.experts import Weight, gate_backward, projection_noises, rows_to_slots
from tilewright.ops.moe.grouped_gemm import operators
from tilewright.ops.moe.permute import PERMUTE, UNPERMUTE, Order
from tilewright.ops.quant.weights import Packed, pack, saved, to_save

_T = torch.Tensor


class Adapters(NamedTuple):
    """The factors of the three projections, as in `moe_lora`."""

    gate_A: _T
    gate_B: _T
    up_A: _T
    up_B: _T
    down_A: _T
    down_B: _T


class Low(NamedTuple):
    """A's results, saved for backward: those of gate and up together, and of down; per token if the
    factor (of down: B) is shared, else per row.
    """

    gate_up: _T
    down: _T


# Indices of the forward's inputs that can have a gradient: x, the routing's weights, adapters.
_DIFFERENTIABLE = (0, *range(2, 9))
_INPUTS = 19


def _fake_forward(x, index, weight, *rest):
    adapters, keep, gate_up = Adapters(*rest[:6]), rest[7], Packed(*rest[8:12])
    T, R = x.shape[0] if keep else 0, index.shape[0] * index.shape[1]
    rows = R if keep else 0
    return (
        x.new_empty(x.shape),
        x.new_empty(rows, 2 * adapters.gate_B.shape[1]),
        x.new_empty(
            T if _is_shared(adapters.gate_A) else rows,
            adapters.gate_A.shape[1] + adapters.up_A.shape[1],
        ),
        x.new_empty(T if _is_shared(adapters.down_B) else rows, adapters.down_A.shape[1]),
        x.new_empty(gate_up.shape[0], dtype=torch.int32),
        x.new_empty(R, dtype=torch.int32),
        x.new_empty(index.shape, dtype=torch.int32),
    )


def _fake_backward(dy, x, weight, *rest):
    inputs, needs = (x, weight, *rest[:6]), rest[7]
    return tuple(t.new_empty(t.shape if need else 0) for t, need in zip(inputs, needs, strict=True))


def _setup(ctx, inputs, output):
    tensors, ctx.projections = to_save(Packed(*inputs[11:15]), Packed(*inputs[15:]))
    ctx.save_for_backward(*(inputs[i] for i in _DIFFERENTIABLE), *output[1:], *tensors)
    ctx.scale = inputs[9]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, *_):
    grads = [None] * _INPUTS
    if dy is None:
        return tuple(grads)
    needs = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    tensors = ctx.saved_tensors
    gate_up, down = saved(tensors[14:], ctx.projections)
    results = ctx.backward_op(
        dy, *tensors[:8], list(tensors[8:14]), needs, ctx.scale, *gate_up, *down
    )
    for i, need, grad in zip(_DIFFERENTIABLE, needs, results, strict=True):
        grads[i] = grad if need else None
    return tuple(grads)


class _Fused:
    """One implementation: its two operators, and the call.

    launches: computes both passes. No size is 0 there.
    """

    def __init__(self, name: str, launches: Composed):
        self.launches = launches
        self.dequantizes = "triton" if name == "triton" else None
        self.forward_op = define(f"moe_lora_{name}_forward", self.forward, _fake_forward)
        backward_op = define(f"moe_lora_{name}_backward", self.backward, _fake_backward)
        differentiate(self.forward_op, _backward, _setup, backward_op=backward_op)

    def forward(
        self,
        x: _T,
        index: _T,
        weight: _T,
        gate_A: _T,
        gate_B: _T,
        up_A: _T,
        up_B: _T,
        down_A: _T,
        down_B: _T,
        scale: float,
        keep: bool,
        base_data: _T,
        base_scales: list[_T],
        base_ints: list[int],
        base_alpha: float,
        last_data: _T,
        last_scales: list[_T],
        last_ints: list[int],
        last_alpha: float,
    ) -> tuple[_T, _T, _T, _T, _T, _T, _T]:
        gate_up = Packed(base_data, base_scales, base_ints, base_alpha)
        down = Packed(last_data, last_scales, last_ints, last_alpha)
        adapters = Adapters(gate_A, gate_B, up_A, up_B, down_A, down_B)
        if not (x.numel() and gate_B.numel()):
            results = _fake_forward(x, index, weight, *adapters, scale, keep, *gate_up, *down)
            return tuple(t.zero_() for t in results)
        base = self._projections(gate_up, down, x.dtype)
        with checks.no_autocast(x):
            y, pre, low, order = self.launches.forward(
                base, x, index, weight, adapters, scale, keep
            )
        return y, pre, *low, *order

    def backward(
        self,
        dy: _T,
        x: _T,
        weight: _T,
        gate_A: _T,
        gate_B: _T,
        up_A: _T,
        up_B: _T,
        down_A: _T,
        down_B: _T,
        saved: list[_T],
        needs: list[bool],
        scale: float,
        base_data: _T,
        base_scales: list[_T],
        base_ints: list[int],
        base_alpha: float,
        last_data: _T,
        last_scales: list[_T],
        last_ints: list[int],
        last_alpha: float,
    ) -> tuple[_T, _T, _T, _T, _T, _T, _T, _T]:
        adapters = Adapters(gate_A, gate_B, up_A, up_B, down_A, down_B)
        if not (x.numel() and gate_B.numel()):
            results = _fake_backward(dy, x, weight, *adapters, saved, needs)
            return tuple(t.zero_() for t in results)
        base = self._projections(
            Packed(base_data, base_scales, base_ints, base_alpha),
            Packed(last_data, last_scales, last_ints, last_alpha),
            x.dtype,
        )
        pre, *rest = saved
        with checks.no_autocast(x):
            results = self.launches.backward(
                base, dy, x, weight, adapters, (pre, Low(*rest[:2]), Order(*rest[2:])), scale, needs
            )
        # Results must not share memory.
        return tuple(
            (weight if i == 1 else dy).new_empty(0) if g is None else g
            for i, g in enumerate(results)
        )

    def _projections(self, gate_up, down, dtype):
        return tuple(Weight(p, dtype, self.dequantizes) for p in (gate_up, down))

    def moe_lora(self, x, gate_up_proj, down_proj, index, weight, adapters, scale, noise):
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, *adapters))
        base, last = (
            pack(w, weight_noise)
            for w, weight_noise in zip(
                (gate_up_proj, down_proj), projection_noises(noise), strict=True
            )
        )
        return self.forward_op(x, index, weight.contiguous(), *adapters, scale, keep, *base, *last)[
            0
        ]


class Composed:
    """Both passes over the grouped GEMM of this name; other ops use the implementation of `auto`,
    whatever is pinned.
    """

    def __init__(self, name: str):
        self.product, self.backward_x, self.backward_weight = operators(name)

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

    def forward(
        self,
        base: tuple[Weight, Weight],
        x: _T,
        index: _T,
        weight: _T,
        adapters: Adapters,
        scale: float,
        keep: bool,
    ) -> tuple[_T, _T, Low, Order]:
        """y, pre and A's results (without rows unless `keep`), and the order of rows."""
        gate_up, down = base
        order = Order(*PERMUTE.part(x)(None, index, gate_up.shape[0])[1:])
        offsets, slots, position = order
        token = slots // index.shape[1]
        rows = x[token]
        A = torch.cat((adapters.gate_A, adapters.up_A), 1)  # one pass over the rows for both
        low = self._times(x if _is_shared(A) else rows, A, offsets)  # per token if A is shared
        low_rows = _at_rows(low, token, offsets) if _is_shared(A) else low
        pre = self.product(rows, gate_up.dense(), offsets)
        del rows
        factors = adapters.gate_B, adapters.up_B
        for half, part, B in zip(
            pre.chunk(2, -1), _split(low_rows, adapters), factors, strict=True
        ):
            half.add_(self._times(part, B, offsets), alpha=scale)
        h = SILU_MUL.part(pre)(pre, None, SILU)
        pre = pre if keep else pre.new_empty(0, pre.shape[1])
        low_down = self._times(h, adapters.down_A, offsets)
        rows = self.product(h, down.dense(), offsets)
        del h
        B, collect = adapters.down_B, UNPERMUTE.part(x)
        if _is_shared(B):  # per token, with the weights of its experts
            low_down = collect(low_down, weight, position)
            y = collect(rows, weight, position).add_(low_down @ B[0].t(), alpha=scale)
        else:
            rows = rows.add_(self.product(low_down, B, offsets), alpha=scale)
            y = collect(rows, weight, position)
        if not keep:
            low, low_down = low.new_empty(0, low.shape[1]), low_down.new_empty(0, low_down.shape[1])
        return y, pre, Low(low, low_down), order

    def backward(
        self,
        base: tuple[Weight, Weight],
        dy: _T,
        x: _T,
        weight: _T,
        adapters: Adapters,
        of: tuple[_T, Low, Order],
        scale: float,
        needs: list[bool],
    ) -> tuple[_T | None, ...]:
        """The gradients of x, the routing's weights and the adapters, None if not needed.

        of: pre, A's results and the order of rows, as forward returned them.
        """
        need_x, need_weight, *need_factors = needs
        pre, low, (offsets, slots, position) = of
        rows = _Rows(
            slots // position.shape[1], weight.flatten()[slots][:, None], offsets, position
        )
        dpre, dots, *ddown = self._down_backward(
            base[1], dy, pre, low.down, adapters, rows, scale, need_factors[4:]
        )
        dx, *dgate_up = self._gate_up_backward(
            base[0], dpre, x, low.gate_up, adapters, rows, scale, [need_x, *need_factors[:4]]
        )
        dweight = rows_to_slots(dots, position) if need_weight else None
        return dx, dweight, *dgate_up, *ddown

    def _down_backward(self, down, dy, pre, low, adapters, rows, scale, needs):
        """dpre, <dh, h> per row, and the gradients of down's factors."""
        token, column, offsets, _ = rows
        A, B, dA, dB = adapters.down_A, adapters.down_B, None, None
        dy_rows = dy[token]
        if _is_shared(B):
            upstream = _at_rows((dy @ B[0]).mul_(scale), token, offsets)
        else:
            upstream = self.backward_x(dy_rows, B, offsets).mul_(scale)
        dh = self.backward_x(dy_rows, down.dense(), offsets)
        dh = dh.add_(self._times_transposed(upstream, A, offsets))
        h, dpre, dots = gate_backward(dh, pre, column)  # h weighted per row
        del dh
        if needs[0]:
            dA = self._gradient(upstream, h, A, offsets)
        del h
        if needs[1] and _is_shared(B):
            dB = (dy.t() @ (low * scale))[None]
        elif needs[1]:
            weighted = (scale * column * low.float()).to(dy.dtype)
            dB = self.backward_weight(dy_rows, weighted, offsets)
        return dpre, dots, dA, dB

    def _gate_up_backward(self, gate_up, dpre, x, low, adapters, rows, scale, needs):
        """The gradients of x and of gate's and up's factors."""
        token, _, offsets, position = rows
        need_x, need_gate_A, need_gate_B, need_up_A, need_up_B = needs
        need_A = need_gate_A or need_up_A
        A = torch.cat((adapters.gate_A, adapters.up_A), 1)
        if (need_gate_B or need_up_B) and _is_shared(A):
            low = _at_rows(low, token, offsets)
        dB, upstream = [], []
        for half, part, B, need in zip(
            dpre.chunk(2, -1),
            _split(low, adapters),
            (adapters.gate_B, adapters.up_B),
            (need_gate_B, need_up_B),
            strict=True,
        ):
            upstream.append(self._times_transposed(half, B, offsets).mul_(scale))
            dB.append(self._gradient(half, part * scale, B, offsets) if need else None)
        upstream = torch.cat(upstream, 1)
        collect, dx, dA = UNPERMUTE.part(dpre), None, None
        if _is_shared(A):
            upstream = collect(upstream, None, position)  # per token
            if need_A:
                dA = (upstream.t() @ x)[None]
            if need_x:
                dx = collect(self.backward_x(dpre, gate_up.dense(), offsets), None, position)
                dx = dx.add_(upstream @ A[0])
        else:
            if need_A:
                dA = self.backward_weight(upstream, x[token], offsets)
            if need_x:
                dx = self.backward_x(dpre, gate_up.dense(), offsets)
                dx = collect(dx.add_(self.backward_x(upstream, A, offsets)), None, position)
        # Copies: two results of an operator must not share memory.
        dgate_A, dup_A = (
            part.clone(memory_format=torch.contiguous_format) if need else None
            for part, need in zip(
                (None, None) if dA is None else dA.split(_ranks(adapters), 1),
                (need_gate_A, need_up_A),
                strict=True,
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
    return _Fused(name, Composed(name))


def load(name: str) -> Callable:
    """The call of the implementation of this name."""
    return _fused(name).moe_lora
