"""The implementations of `moe_mlp`: two operators each, with one autograd formula for all, and
their launches: Triton's fused kernels, or a grouped GEMM composed with other ops.

Letters are those of moe.py.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tilewright.core.library import declare
from tilewright.kernels.moe.operators import GateConstants, Order, map_size
from tilewright.ops.activation.activation import ACTIVATIONS, SILU, SILU_MUL, Gate, gate_eager
from tilewright.ops.moe.experts import (
    SWIGLU,
    Projections,
    expert_of,
    gate_backward,
    or_zeros,
    rows_to_slots,
)
from tilewright.ops.moe.grouped_gemm import operators
from tilewright.ops.moe.permute import UNPERMUTE, sort_slots
from tilewright.ops.quant.weights import dense

_T = torch.Tensor


# ---- the operators


class Biases(NamedTuple):
    """[E, 2 I] and [E, H], or None."""

    gate_up_bias: _T | None = None
    down_bias: _T | None = None


NO_BIASES = Biases()


class GateOptions(NamedTuple):
    """A `Gate` in an operator."""

    activation: str
    alpha: float
    limit: float | None
    up_limit: float | None
    up_offset: float
    interleaved: bool

    @classmethod
    def of(cls, gate: Gate) -> GateOptions:
        limit = None if gate.limit is None else float(gate.limit)
        up_limit = None if gate.up_limit is None else float(gate.up_limit)
        numbers = float(gate.alpha), limit, up_limit, float(gate.up_offset)
        return cls(gate.activation, *numbers, gate.interleaved)

    def gate(self) -> Gate:
        return SWIGLU if self == _SWIGLU else Gate(*self)


_SWIGLU = GateOptions.of(SWIGLU)


class Results(NamedTuple):
    """y [T, H], and what is saved for backward (`Saved`)."""

    y: _T
    pre: _T | None
    offsets: _T
    slots: _T
    position: _T
    tiles: _T | None


class Saved(NamedTuple):
    """Gates and ups pre [R, 2 I], the order of rows (see `permute.Order`), and Triton's map of
    tiles.
    """

    pre: _T
    offsets: _T
    slots: _T
    position: _T
    tiles: _T | None


class Needs(NamedTuple):
    """Which gradients are needed."""

    dx: bool
    dgate_up: bool
    ddown: bool
    dweight: bool
    dgate_up_bias: bool
    ddown_bias: bool


class Gradients(NamedTuple):
    """Gradients, None for those that are not needed. dweight: the routing weights' gradient."""

    dx: _T | None
    dgate_up: _T | None
    ddown: _T | None
    dweight: _T | None
    dgate_up_bias: _T | None
    ddown_bias: _T | None


# The arguments of `mlp` that have them.
_DIFFERENTIABLE = "x", "gate_up_data", "down_data", "expert_weight", *Biases._fields


@declare
def mlp(
    x: _T,
    weights: Projections,
    biases: Biases,
    gate: GateOptions,
    expert_index: _T,
    expert_weight: _T,
    keep: bool,
    tiled: bool,
) -> Results:
    """keep: whether the result has pre.   tiled: whether it has a map of tiles, as Triton's has."""
    (E, N, _), R, i32 = weights.gate_up.shape, expert_index.numel(), torch.int32
    return Results(
        x.new_empty(x.shape),
        x.new_empty((R, N)) if keep else None,
        x.new_empty(E, dtype=i32),
        x.new_empty(R, dtype=i32),
        x.new_empty(expert_index.shape, dtype=i32),
        x.new_empty(map_size(R, E), dtype=i32) if tiled else None,
    )


@declare
def mlp_backward(
    dy: _T,
    weights: Projections,
    x: _T | None,
    down_bias: _T | None,
    gate: GateOptions,
    expert_weight: _T,
    of: Saved,
    needs: Needs,
) -> Gradients:
    """x: None unless gate_up's gradient is needed."""
    E, N, H = weights.gate_up.shape
    return Gradients(
        dy.new_empty(dy.shape) if needs.dx else None,
        dy.new_empty((E, N, H)) if needs.dgate_up else None,
        dy.new_empty(weights.down.shape) if needs.ddown else None,
        expert_weight.new_empty(expert_weight.shape) if needs.dweight else None,
        dy.new_empty((E, N)) if needs.dgate_up_bias else None,
        dy.new_empty((E, H)) if needs.ddown_bias else None,
    )


@mlp.formula(
    constants=("pre",),
    # For the gradient of gate_up_proj, which a quantized one does not have.
    rows=lambda x, weights: x if weights.gate_up.is_dense else None,
    down_bias=lambda biases: biases.down_bias,
    saved=Saved,
)
def _backward(op, g, weights, rows, down_bias, gate, expert_weight, saved, needs):
    if g.y is None:
        return {}
    needed = Needs(*[needs[name] for name in _DIFFERENTIABLE])
    gradients = op(g.y, weights, rows, down_bias, gate, expert_weight, saved, needed)
    return dict(zip(_DIFFERENTIABLE, gradients, strict=True))


class Fused:
    """One implementation: its operator, and the call.

    launches: has the launchers of `mlp` and of its backward, for sizes that are not 0. The dense
        tensor of a quantized weight is a new one there, freed after one product.
    """

    def __init__(self, name: str, launches: _Triton | Composed):
        backward = mlp_backward.define(
            f"moe_mlp_{name}_backward", or_zeros(mlp_backward, launches.backward)
        )
        self.mlp = mlp.define(f"moe_mlp_{name}_forward", or_zeros(mlp, launches.forward), backward)
        self.tiled = isinstance(launches, _Triton)

    def moe_mlp(
        self,
        x,
        gate_up_proj,
        down_proj,
        expert_index,
        expert_weight,
        noise=None,
        biases=NO_BIASES,
        gate=SWIGLU,
    ):
        weights = Projections.of(gate_up_proj, down_proj, noise)
        leaves = x, weights.gate_up_data, weights.down_data, expert_weight, *biases
        keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in leaves)
        options, routing = GateOptions.of(gate), (expert_index, expert_weight.contiguous())
        return self.mlp(x, weights, biases, options, *routing, keep, self.tiled).y


# ---- Triton


def _constants(gate):
    """A gate's constants for the Triton kernels."""
    activation = ACTIVATIONS.index(gate.activation)
    limits = gate.limit, gate.up_limit
    return GateConstants(activation, gate.interleaved, gate.alpha, *limits, gate.up_offset)


class _Triton:
    """Gathers and the activation are fused into the products' kernels."""

    def __init__(self, gemm, rows):
        self.gemm, self.rows = gemm, rows  # the kernels' modules

    def forward(self, x, weights, biases, gate, index, expert_weight, keep, tiled):
        # The tiles are for this pass and its backward.
        order, tiles = self.rows.sort_and_map(index, weights.gate_up.shape[0])
        pre, h = self.gemm.up_swiglu(
            x,
            dense(weights.gate_up, x.dtype, "triton"),
            order,
            keep,
            biases.gate_up_bias,
            _constants(gate),
            tiles,
        )
        rows = self.gemm.forward(
            h, dense(weights.down, x.dtype, "triton"), order.offsets, biases.down_bias, tiles
        )
        y = self.rows.collect(rows, expert_weight, order.position)
        return Results._make((y, pre, *order, tiles))

    def backward(self, dy, weights, x, down_bias, gate, expert_weight, of, needs):
        gemm, (pre, offsets, slots, position, tiles) = self.gemm, of
        K = position.shape[1]
        dpre, dweight, weighted = gemm.down_dswiglu(
            dy,
            dense(weights.down, dy.dtype, "triton"),
            pre,
            expert_weight,
            Order(offsets, slots, position),
            needs.ddown,
            down_bias if needs.dweight else None,
            _constants(gate),
            tiles,
        )
        dx = dgate_up = ddown = dgate_up_bias = ddown_bias = None
        if needs.ddown:
            ddown = gemm.backward_weight(dy, weighted, offsets, slots, K, gather="dy")
        del weighted  # as large as half of pre
        if needs.dgate_up:
            dgate_up = gemm.backward_weight(dpre, x, offsets, slots, K)
        if needs.dx:
            rows = gemm.backward_x(dpre, dense(weights.gate_up, dy.dtype, "triton"), offsets, tiles)
            dx = self.rows.collect(rows, None, position)
        if needs.dgate_up_bias:
            column = gemm.backward_weight(dpre, ones(dpre), offsets)
            dgate_up_bias = column[..., 0].contiguous()
        if needs.ddown_bias:
            column = weight_column(expert_weight, slots, dy.dtype)
            column = gemm.backward_weight(dy, column, offsets, slots, K, gather="dy")
            ddown_bias = column[..., 0].contiguous()
        dweight = dweight if needs.dweight else None
        return Gradients(dx, dgate_up, ddown, dweight, dgate_up_bias, ddown_bias)


# The gradient of a bias is a product too, of an expert's rows with a column of ones, or with the
# routing weights.


def ones(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_ones(rows.shape[0], 1)


def weight_column(
    expert_weight: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return expert_weight.flatten()[slots][:, None].to(dtype)


@functools.cache
def load_triton() -> Fused:
    from tilewright.kernels.moe import grouped_gemm_triton, permute_triton

    return Fused("triton", _Triton(grouped_gemm_triton, permute_triton))


@functools.cache
def load_gluon() -> Fused:
    from tilewright.kernels.moe import permute_triton, specialized

    return Fused("gluon", _Triton(specialized, permute_triton))


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

    def forward(self, x, weights, biases, gate, index, expert_weight, keep, tiled):
        gate, order = gate.gate(), sort_slots(index, weights.gate_up.shape[0])
        offsets, slots, position = order
        pre = self.product(x[slots // index.shape[1]], dense(weights.gate_up, x.dtype), offsets)
        pre = add_bias(pre, biases.gate_up_bias, offsets)
        h = SILU_MUL.part(pre)(pre, None, SILU) if gate.is_swiglu else gate_eager(pre, gate)
        rows = self.product(h, dense(weights.down, x.dtype), offsets)
        rows = add_bias(rows, biases.down_bias, offsets)
        y = UNPERMUTE.part(h)(rows, expert_weight, position)
        return Results(y, pre if keep else None, *order, None)

    def backward(self, dy, weights, x, down_bias, gate, expert_weight, of, needs):
        pre, offsets, slots, position, _ = of
        token = slots // position.shape[1]
        rows = dy[token]
        dh = self.backward_x(rows, dense(weights.down, dy.dtype), offsets)
        column = expert_weight.flatten()[slots][:, None]
        weighted, dpre, dots = gate_backward(dh, pre, column, gate.gate())
        dx = dgate_up = ddown = dweight = dgate_up_bias = ddown_bias = None
        if needs.ddown:
            ddown = self.backward_weight(rows, weighted, offsets)
        if needs.ddown_bias:
            ddown_bias = self.bias_gradient(rows, column.to(dy.dtype), offsets)
        del rows, dh, weighted
        if needs.dgate_up:
            dgate_up = self.backward_weight(dpre, x[token], offsets)
        if needs.dgate_up_bias:
            dgate_up_bias = self.bias_gradient(dpre, ones(dpre), offsets)
        if needs.dx:
            rows = self.backward_x(dpre, dense(weights.gate_up, dy.dtype), offsets)
            dx = UNPERMUTE.part(dy)(rows, None, position)
        if needs.dweight:
            dweight = routing_gradient(dots, dy, down_bias, of)
        return Gradients(dx, dgate_up, ddown, dweight, dgate_up_bias, ddown_bias)

    def bias_gradient(self, rows, column, offsets):
        return self.backward_weight(rows, column, offsets)[..., 0].contiguous()


def routing_gradient(
    dots: torch.Tensor, dy: torch.Tensor, down_bias: torch.Tensor | None, of: Saved
) -> torch.Tensor:
    """The gradient [T, K] of the routing's weights, from <dh, h> per row."""
    dweight = rows_to_slots(dots, of.position)
    if down_bias is None:
        return dweight
    # <dy[t], down_bias[e]> in float32; 0 for a slot without a row.
    of_bias = (dy.float() @ down_bias.float().t()).gather(1, expert_of(of.position, of.offsets))
    return dweight.add_(torch.where(of.position < 0, 0, of_bias))


@functools.cache
def load_composed(name: str) -> Fused:
    return Fused(name, Composed(name))
