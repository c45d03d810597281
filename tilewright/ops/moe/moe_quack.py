"""The products of `moe_mlp` as QuACK's GEMMs, with the gather of rows and SwiGLU fused where its
version supports them.

    up          gemm_gated: gathers x; stores pre, and h = silu(gate) * up
    down        gemm
    back to h   gemm_dgated: gathers dy; computes dh, and from it, without storing it, dpre, w h
                and <dh, h>
    weights     gemm over the rows of each expert, which gathers dy, and x
    back to x   gemm

pre and dpre are [gate, up, gate, up, ...] in memory, which is how its epilogues hold a pair in one
thread. Weights keep gates before ups: QuACK reads and writes them in its order (`concat_layout`),
so no weight is copied. Written for quack-kernels 0.6.5; `missing_from` checks its functions'
parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from types import ModuleType

import torch
import torch.nn.functional as F

from tilewright.ops.activation.activation import Gate
from tilewright.ops.moe.moe_fused import (
    Composed,
    Fused,
    Gradients,
    Results,
    load_composed,
    ones,
    routing_gradient,
    weight_column,
)
from tilewright.ops.moe.permute import UNPERMUTE, sort_slots
from tilewright.ops.quant.weights import dense

# Parameters that are used of each function of quack.gemm_interface.
PARAMETERS = {
    "gemm": (
        "A",
        "B",
        "out",
        "bias",
        "cu_seqlens_m",
        "cu_seqlens_k",
        "A_idx",
        "tuned",
        "concat_layout",
    ),
    "gemm_gated": (
        "A",
        "B",
        "bias",
        "activation",
        "cu_seqlens_m",
        "A_idx",
        "store_preact",
        "tuned",
        "concat_layout",
    ),
    "gemm_dgated": (
        "A",
        "B",
        "PreAct",
        "activation",
        "colvec_scale",
        "colvec_reduce",
        "cu_seqlens_m",
        "A_idx",
        "tuned",
    ),
}
FUSED = (
    "fused where widths are multiples of 16 bytes and the gate is SwiGLU: the gather of x, the "
    "bias and SwiGLU "
    "with the up-projection; the gather of dy, dSwiGLU and the routing's gradient with the "
    "product back to h; the "
    "gathers of dy and x with the gradients of weights"
)
NOT_FUSED = "nothing is fused: each product is a call of its own"


def missing_from(interface: ModuleType) -> str | None:
    """None if quack.gemm_interface has all that `launchers` uses, else what is missing."""
    for name, required in PARAMETERS.items():
        if not hasattr(interface, name):
            return f"this version of quack has no {name}"
        parameters = inspect.signature(getattr(interface, name)).parameters
        if missing := [p for p in required if p not in parameters]:
            return f"{name} of this version of quack takes no {', '.join(missing)}"
    return None


def explain(device_type: str) -> str:
    """One sentence on what is fused with the installed version."""
    from quack import gemm_interface

    reason = missing_from(gemm_interface)
    return FUSED if reason is None else f"{NOT_FUSED} ({reason})"


def fits(gate_up_proj: torch.Tensor, itemsize: int, gate: Gate) -> bool:
    """Whether its epilogues support this: plain SwiGLU, of rows that are multiples of 16 bytes."""
    _, N, H = gate_up_proj.shape
    step = 16 // itemsize
    plain = dataclasses.replace(gate, interleaved=False).is_swiglu
    return plain and N // 2 % step == 0 and H % step == 0


class _Quack(Composed):
    """Fuses what QuACK's epilogues support (`fits`); other gates and widths are composed."""

    def __init__(self, interface: ModuleType):
        super().__init__("quack")
        self.gemm, self.gemm_gated, self.gemm_dgated = (
            getattr(interface, name) for name in PARAMETERS
        )

    # tuned=False: QuACK would tune at the first call for every number of rows.
    def forward(self, x, weights, biases, gate, index, expert_weight, keep, tiled):
        if not fits(weights.gate_up, x.element_size(), gate.gate()):
            return super().forward(x, weights, biases, gate, index, expert_weight, keep, tiled)
        order = offsets, slots, position = sort_slots(index, weights.gate_up.shape[0])
        ends = F.pad(offsets, (1, 0))
        ordered = ("B",) if biases.gate_up_bias is None else ("B", "bias")
        pre, h = self.gemm_gated(
            x.contiguous(),
            dense(weights.gate_up, x.dtype).contiguous().mT,
            bias=biases.gate_up_bias,
            activation="swiglu",
            cu_seqlens_m=ends,
            A_idx=slots // index.shape[1],
            store_preact=keep,
            tuned=False,
            **_layout(gate, *ordered),
        )
        rows = self.gemm(
            h,
            dense(weights.down, x.dtype).contiguous().mT,
            bias=biases.down_bias,
            cu_seqlens_m=ends,
            tuned=False,
        )
        y = UNPERMUTE.part(rows)(rows, expert_weight, position)
        return Results(y, pre if keep else None, *order, None)

    def backward(self, dy, weights, x, down_bias, gate, expert_weight, of, needs):
        if not fits(weights.gate_up, dy.element_size(), gate.gate()):
            return super().backward(dy, weights, x, down_bias, gate, expert_weight, of, needs)
        (E, N, H), dy = weights.gate_up.shape, dy.contiguous()
        ends, token = F.pad(of.offsets, (1, 0)), of.slots // of.position.shape[1]
        dpre, weighted, dots = self.gemm_dgated(
            dy,
            dense(weights.down, dy.dtype).contiguous(),
            of.pre,
            activation="swiglu",
            colvec_scale=expert_weight.flatten()[of.slots],
            colvec_reduce=True,
            cu_seqlens_m=ends,
            A_idx=token,
            tuned=False,
        )
        idle = (torch.diff(ends) == 0)[:, None, None]  # QuACK may leave empty sums unwritten
        dx = dgate_up = ddown = dweight = dgate_up_bias = ddown_bias = None
        if needs.ddown:
            ddown = self.gemm(dy.t(), weighted, cu_seqlens_k=ends, A_idx=token, tuned=False)
            ddown.masked_fill_(idle, 0)
        del weighted
        if needs.dgate_up:  # x^T dpre, written as its transpose: the first operand is gathered
            dgate_up = x.new_empty(E, N, H)
            options = {"out": dgate_up.mT, "cu_seqlens_k": ends, "A_idx": token, "tuned": False}
            self.gemm(x.contiguous().t(), dpre, **options, **_layout(gate, "out"))
            dgate_up.masked_fill_(idle, 0)
        if needs.dx:
            rows = self.gemm(
                dpre,
                dense(weights.gate_up, dy.dtype).contiguous(),
                cu_seqlens_m=ends,
                tuned=False,
                **_layout(gate, "B"),
            )
            dx = UNPERMUTE.part(rows)(rows, None, of.position)
        if needs.dweight:
            dweight = routing_gradient(dots, dy, down_bias, of)
        if needs.dgate_up_bias:
            if not gate.interleaved:  # in the order of the bias
                dpre = torch.cat((dpre[:, ::2], dpre[:, 1::2]), 1)
            dgate_up_bias = self.bias_gradient(dpre, ones(dpre), of.offsets)
        if needs.ddown_bias:
            column = weight_column(expert_weight, of.slots, dy.dtype)
            ddown_bias = self.bias_gradient(dy[token], column, of.offsets)
        return Gradients(dx, dgate_up, ddown, dweight, dgate_up_bias, ddown_bias)


def _layout(gate, *names):
    """Names for QuACK the tensors with gates before ups."""
    return {} if gate.interleaved else {"concat_layout": names}


@functools.cache
def load() -> Fused:
    """The fused implementation; `Composed` for versions without these epilogues."""
    from quack import gemm_interface

    if missing_from(gemm_interface):
        return load_composed("quack")
    return Fused("quack", _Quack(gemm_interface))
