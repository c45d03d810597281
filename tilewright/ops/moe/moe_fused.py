"""The implementations of `moe_mlp`: two operators each, with one autograd formula for all, and
their launches: Triton's fused kernels, or a grouped GEMM composed with other ops.

Letters are those of moe.py.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from tilewright.core.library import define, differentiate
from tilewright.ops.activation.activation import ACTIVATIONS, SILU, SILU_MUL, Gate, gate_eager
from tilewright.ops.moe.experts import (
    SWIGLU,
    Experts,
    Needs,
    Saved,
    Weight,
    expert_of,
    gate_backward,
    projection_noises,
    rows_to_slots,
)
from tilewright.ops.moe.grouped_gemm import operators
from tilewright.ops.moe.permute import PERMUTE, UNPERMUTE
from tilewright.ops.quant.quantize import Quantized
from tilewright.ops.quant.weights import Packed, pack, saved, to_save

_T = torch.Tensor


class Launches(Protocol):
    """The launches of an implementation. No size is 0; weights may be quantized."""

    def forward(
        self, x: _T, experts: Experts, index: _T, weight: _T, keep: bool
    ) -> tuple[_T, Saved]:
        """y [T, H] and what is saved for backward; without `keep`, pre has no rows."""

    def backward(
        self, dy: _T, x: _T | None, experts: Experts, weight: _T, of: Saved, needs: Needs
    ) -> tuple[_T | None, ...]:
        """The gradients of x, both projections, the routing's weights and both biases; None unless
        `needs` requests it. x is None unless gate_up's is requested.
        """


# ---- the operators

# Indices of the forward's inputs that can have a gradient: x, the projections' data, the routing's
# weights, biases.
_DIFFERENTIABLE = (0, 1, 5, 10, 12, 13)
_INPUTS = 15


def gate_numbers(gate: Gate) -> list[float]:
    """A gate as an operator argument; 0 for no limit."""
    limits = float(gate.limit or 0), float(gate.up_limit or 0)
    activation = float(ACTIVATIONS.index(gate.activation))
    return [activation, float(gate.alpha), *limits, float(gate.up_offset), float(gate.interleaved)]


def _gate_of(numbers):
    activation, alpha, limit, up_limit, offset, interleaved = numbers
    return Gate(
        ACTIVATIONS[int(activation)],
        alpha,
        limit or None,
        up_limit or None,
        offset,
        bool(interleaved),
    )


def map_size(R: int, E: int) -> int:
    """Elements of Triton's tile map; tests check it against kernels.grouped_gemm_triton.map_size,
    which needs Triton.
    """
    return 3 * ((R + (E + 1) * 127) // 128) + 1


def _setup(ctx, inputs, output):
    x, weight, down_bias, ctx.gate = inputs[0], inputs[10], inputs[13], inputs[14]
    gate_up, down = Packed(*inputs[1:5]), Packed(*inputs[5:9])
    tensors, ctx.projections = to_save(gate_up, down)
    # x is for the gradient of gate_up_proj, which a quantized one does not have.
    saved_x = x if gate_up.is_dense else None
    ctx.save_for_backward(saved_x, weight, down_bias, *output[1:], *tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, *_):
    grads = [None] * _INPUTS
    if dy is None:
        return tuple(grads)
    needs = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    x, weight, down_bias, *rest = ctx.saved_tensors
    gate_up, down = saved(rest[5:], ctx.projections)
    results = ctx.backward_op(dy, x, *gate_up, *down, weight, down_bias, rest[:5], ctx.gate, needs)
    for i, need, grad in zip(_DIFFERENTIABLE, needs, results, strict=True):
        grads[i] = grad if need else None
    return tuple(grads)


def _fake_backward(dy, x, data, scales, ints, alpha, *rest):
    gate_up, down = Packed(data, scales, ints, alpha), Packed(*rest[:4])
    weight, needs = rest[4], rest[-1]
    E, N, H = gate_up.shape
    shapes = (dy.shape, (E, N, H), down.shape, weight.shape, (E, N), (E, H))
    return tuple(
        (weight if i == 3 else dy).new_empty(shape if need else 0)
        for i, (shape, need) in enumerate(zip(shapes, needs, strict=True))
    )


class Fused:
    """One implementation: its two operators, and the call.

    dequantizes: the implementation that dequantizes weights; None: the `unpinned` one.
    """

    def __init__(self, name: str, launches: Launches, dequantizes: str | None = None):
        self.name, self.launches, self.dequantizes = name, launches, dequantizes
        self.forward_op = define(f"moe_mlp_{name}_forward", self.forward, self.fake_forward)
        backward_op = define(f"moe_mlp_{name}_backward", self.backward, _fake_backward)
        differentiate(self.forward_op, _backward, _setup, backward_op=backward_op)

    def forward(
        self,
        x: _T,
        up_data: _T,
        up_scales: list[_T],
        up_ints: list[int],
        up_alpha: float,
        down_data: _T,
        down_scales: list[_T],
        down_ints: list[int],
        down_alpha: float,
        expert_index: _T,
        expert_weight: _T,
        keep: bool,
        gate_up_bias: _T | None,
        down_bias: _T | None,
        gate: list[float],
    ) -> tuple[_T, _T, _T, _T, _T, _T]:
        gate_up = Packed(up_data, up_scales, up_ints, up_alpha)
        down = Packed(down_data, down_scales, down_ints, down_alpha)
        if not (x.numel() and all(down.shape)):
            return tuple(t.zero_() for t in self._results(x, gate_up.shape, expert_index, keep))
        experts = self._experts(gate_up, down, x.dtype, (gate_up_bias, down_bias), gate)
        y, of = self.launches.forward(x, experts, expert_index, expert_weight, keep)
        return y, *of

    def fake_forward(self, x, *rest):
        return self._results(x, Packed(*rest[:4]).shape, rest[8], rest[10])

    def _results(self, x, gate_up_shape, index, keep):
        (E, N, _), R = gate_up_shape, index.shape[0] * index.shape[1]
        return (
            x.new_empty(x.shape),
            x.new_empty((R, N) if keep else (0, N)),
            x.new_empty(E, dtype=torch.int32),
            x.new_empty(R, dtype=torch.int32),
            x.new_empty(index.shape, dtype=torch.int32),
            x.new_empty(map_size(R, E) if self.name == "triton" else 0, dtype=torch.int32),
        )

    def backward(
        self,
        dy: _T,
        x: _T | None,
        up_data: _T,
        up_scales: list[_T],
        up_ints: list[int],
        up_alpha: float,
        down_data: _T,
        down_scales: list[_T],
        down_ints: list[int],
        down_alpha: float,
        expert_weight: _T,
        down_bias: _T | None,
        saved: list[_T],
        gate: list[float],
        needs: list[bool],
    ) -> tuple[_T, _T, _T, _T, _T, _T]:
        gate_up = Packed(up_data, up_scales, up_ints, up_alpha)
        down = Packed(down_data, down_scales, down_ints, down_alpha)
        if not (dy.numel() and all(down.shape)):
            results = _fake_backward(
                dy, x, *gate_up, *down, expert_weight, down_bias, saved, gate, needs
            )
            return tuple(g.zero_() for g in results)
        experts = self._experts(gate_up, down, dy.dtype, (None, down_bias), gate)
        results = self.launches.backward(
            dy, x, experts, expert_weight, Saved(*saved), Needs(*needs)
        )
        # Results must not share memory.
        return tuple(
            (expert_weight if i == 3 else dy).new_empty(0) if g is None else g
            for i, g in enumerate(results)
        )

    def _experts(self, gate_up, down, dtype, biases, gate):
        weights = (Weight(p, dtype, self.dequantizes) for p in (gate_up, down))
        return Experts(*weights, *biases, _gate_of(gate))

    def moe_mlp(
        self,
        x,
        gate_up_proj,
        down_proj,
        expert_index,
        expert_weight,
        noise=None,
        biases=(None, None),
        gate=SWIGLU,
    ):
        leaves = [x, expert_weight, *biases]
        if not isinstance(gate_up_proj, Quantized):
            leaves += [gate_up_proj, down_proj]
        keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in leaves)
        noises = projection_noises(noise)
        return self.forward_op(
            x,
            *pack(gate_up_proj, noises[0]),
            *pack(down_proj, noises[1]),
            expert_index,
            expert_weight.contiguous(),
            keep,
            *biases,
            gate_numbers(gate),
        )[0]


# ---- Triton


def _constants(gate):
    """A gate's constants for the Triton kernels."""
    return {
        "ACTIVATION": ACTIVATIONS.index(gate.activation),
        "INTERLEAVED": gate.interleaved,
        "ALPHA": gate.alpha,
        "LIMIT": gate.limit,
        "UP_LIMIT": gate.up_limit,
        "OFFSET": gate.up_offset,
    }


class _Triton:
    """Gathers and the activation are fused into the products' kernels."""

    def __init__(self, gemm, rows):
        self.gemm, self.rows = gemm, rows  # the kernels' modules

    def forward(self, x, experts, index, weight, keep):
        gate_up, down, gate_up_bias, down_bias, gate = experts
        offsets, slots, position = order = self.rows.sort(index, gate_up.shape[0])
        # For this pass and its backward.
        tiles = self.gemm.tile_map(offsets, slots.shape[0], whole=True)
        pre, h = self.gemm.up_swiglu(
            x,
            gate_up.dense(),
            order,
            keep,
            gate_up_bias,
            _constants(gate),
            tiles,
        )
        rows = self.gemm.forward(h, down.dense(), offsets, down_bias, tiles)
        y = self.rows.collect(rows, weight, position)
        pre = x.new_empty(0, gate_up.shape[1]) if pre is None else pre
        return y, Saved(pre, offsets, slots, position, tiles)

    def backward(self, dy, x, experts, weight, of, needs):
        gemm, (pre, offsets, slots, position, tiles) = self.gemm, of
        K = position.shape[1]
        dpre, dweight, weighted = gemm.down_dswiglu(
            dy,
            experts.down.dense(),
            pre,
            weight,
            (offsets, slots, position),
            needs.down,
            experts.down_bias if needs.weight else None,
            _constants(experts.gate),
            tiles,
        )
        dx = dgate_up = ddown = dgate_up_bias = ddown_bias = None
        if needs.down:
            ddown = gemm.backward_weight(dy, weighted, offsets, slots, K, gather="dy")
        del weighted  # as large as half of pre
        if needs.gate_up:
            dgate_up = gemm.backward_weight(dpre, x, offsets, slots, K)
        if needs.x:
            rows = gemm.backward_x(dpre, experts.gate_up.dense(), offsets, tiles)
            dx = self.rows.collect(rows, None, position)
        if needs.gate_up_bias:
            column = gemm.backward_weight(dpre, ones(dpre), offsets)
            dgate_up_bias = column[..., 0].contiguous()
        if needs.down_bias:
            column = weight_column(weight, slots, dy.dtype)
            column = gemm.backward_weight(dy, column, offsets, slots, K, gather="dy")
            ddown_bias = column[..., 0].contiguous()
        return dx, dgate_up, ddown, dweight if needs.weight else None, dgate_up_bias, ddown_bias


# The gradient of a bias is a product too: of an expert's rows with a column of ones, or with the
# routing's weights.


def ones(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_ones(rows.shape[0], 1)


def weight_column(
    expert_weight: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return expert_weight.flatten()[slots][:, None].to(dtype)


@functools.cache
def load_triton() -> Fused:
    from tilewright.kernels.moe import grouped_gemm_triton, permute_triton

    return Fused("triton", _Triton(grouped_gemm_triton, permute_triton), "triton")


# ---- over a grouped GEMM


def add_bias(rows: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor) -> torch.Tensor:
    """The rows of each expert plus its bias, rounded. (The tail gets the last expert's bias; it is
    never read.)
    """
    if bias is None:
        return rows
    return rows + bias[expert_of(torch.arange(rows.shape[0], device=rows.device), offsets)]


class Composed:
    """The grouped GEMM of this name; other ops use the implementation of `auto`, whatever is
    pinned. The gathered rows are a copy, which lives as long as one product.
    """

    def __init__(self, name):
        self.product, self.backward_x, self.backward_weight = operators(name)

    def forward(self, x, experts, index, weight, keep):
        gate_up, down, gate_up_bias, down_bias, gate = experts
        _, offsets, slots, position = PERMUTE.part(x)(None, index, gate_up.shape[0])
        pre = self.product(x[slots // index.shape[1]], gate_up.dense(), offsets)
        pre = add_bias(pre, gate_up_bias, offsets)
        h = SILU_MUL.part(pre)(pre, None, SILU) if gate.is_swiglu else gate_eager(pre, gate)
        rows = add_bias(self.product(h, down.dense(), offsets), down_bias, offsets)
        y = UNPERMUTE.part(h)(rows, weight, position)
        pre = pre if keep else pre.new_empty(0, pre.shape[1])
        return y, Saved(pre, offsets, slots, position, offsets.new_empty(0))

    def backward(self, dy, x, experts, weight, of, needs):
        pre, offsets, slots, position, _ = of
        token = slots // position.shape[1]
        rows = dy[token]
        dh = self.backward_x(rows, experts.down.dense(), offsets)
        column = weight.flatten()[slots][:, None]
        weighted, dpre, dots = gate_backward(dh, pre, column, experts.gate)
        dx = dgate_up = ddown = dweight = dgate_up_bias = ddown_bias = None
        if needs.down:
            ddown = self.backward_weight(rows, weighted, offsets)
        if needs.down_bias:
            ddown_bias = self.bias_gradient(rows, column.to(dy.dtype), offsets)
        del rows, dh, weighted
        if needs.gate_up:
            dgate_up = self.backward_weight(dpre, x[token], offsets)
        if needs.gate_up_bias:
            dgate_up_bias = self.bias_gradient(dpre, ones(dpre), offsets)
        if needs.x:
            rows = self.backward_x(dpre, experts.gate_up.dense(), offsets)
            dx = UNPERMUTE.part(dy)(rows, None, position)
        if needs.weight:
            dweight = routing_gradient(dots, dy, experts.down_bias, offsets, position)
        return dx, dgate_up, ddown, dweight, dgate_up_bias, ddown_bias

    def bias_gradient(self, rows, column, offsets):
        return self.backward_weight(rows, column, offsets)[..., 0].contiguous()


def routing_gradient(
    dots: torch.Tensor,
    dy: torch.Tensor,
    down_bias: torch.Tensor | None,
    offsets: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """The gradient [T, K] of the routing's weights, from <dh, h> per row."""
    dweight = rows_to_slots(dots, position)
    if down_bias is None:
        return dweight
    # <dy[t], down_bias[e]> in float32; 0 for a slot without a row.
    of_bias = (dy.float() @ down_bias.float().t()).gather(1, expert_of(position, offsets))
    return dweight.add_(torch.where(position < 0, 0, of_bias))


@functools.cache
def load_composed(name: str) -> Fused:
    return Fused(name, Composed(name))
