"""The products of `moe_mlp` in QuACK's GEMMs, with the gather of rows and SwiGLU in them, where its
version has those.

    up            gemm_gated: gathers x; stores pre, and h = silu(gate) * up
    down          gemm
    back to h     gemm_dgated: gathers dy; makes dh and of it, without storing it, dpre, w h and
    <dh, h> weights       gemm over rows of each expert, which gathers dy, and x back to x     gemm

pre and dpre are [gate, up, gate, up, ...] in memory, which is how its epilogues hold the two of a
pair in one thread. Weights stay as they are, gates before ups: QuACK reads and writes those in its
order (`concat_layout`), so there is no copy of a weight. Written by quack-kernels 0.6.5, of whose
functions `lacking` looks for the parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F

from tilewright.ops.activation import Gate

# What is asked of each function of quack.gemm_interface.
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
NOT_FUSED = "fused: nothing, each product is one by itself"


def lacking(interface: ModuleType) -> str | None:
    """None if quack.gemm_interface has all that `launchers` asks of it, else what it lacks."""
    for name, wanted in PARAMETERS.items():
        if not hasattr(interface, name):
            return f"this version of quack has no {name}"
        has = inspect.signature(getattr(interface, name)).parameters
        if missing := [p for p in wanted if p not in has]:
            return f"{name} of this version of quack takes no {', '.join(missing)}"
    return None


def explain(device_type: str) -> str:
    """What is fused in one sentence; of the version that is installed."""
    from quack import gemm_interface

    reason = lacking(gemm_interface)
    return FUSED if reason is None else f"{NOT_FUSED} ({reason})"


def fits(gate_up_proj: torch.Tensor, itemsize: int, gate: Gate) -> bool:
    """Whether its epilogues compute this: SwiGLU as it is, of rows that are multiples of 16
    bytes.
    """
    _, N, H = gate_up_proj.shape
    step = 16 // itemsize
    return gate == Gate(interleaved=gate.interleaved) and N // 2 % step == 0 and H % step == 0


def launchers(
    interface: ModuleType, sort: Callable, collect: Callable, weight: Callable
) -> tuple[Callable, Callable]:
    """forward and backward, as `moe._register` takes them, for what `fits`.

    sort: (x, index, E) -> offsets, slots, position.   collect: (rows, expert_weight or None,
    position) -> [T, H].
    weight: makes a tensor of a weight, which may be quantised.
    """
    gemm, gemm_gated, gemm_dgated = (getattr(interface, name) for name in PARAMETERS)

    def both(*names, gate):
        """The tensors that lie gates before ups, for QuACK."""
        return {} if gate.interleaved else {"concat_layout": names}

    # tuned=False: QuACK would search for constants at the first call of every number of rows.
    def forward(
        x, gate_up_proj, down_proj, expert_index, expert_weight, keep, gate_up_bias, down_bias, gate
    ):
        offsets, slots, position = sort(x, expert_index, gate_up_proj.shape[0])
        ends = F.pad(offsets, (1, 0))
        lie = ("B",) if gate_up_bias is None else ("B", "bias")
        pre, h = gemm_gated(
            x.contiguous(),
            weight(gate_up_proj).contiguous().mT,
            bias=gate_up_bias,
            activation="swiglu",
            cu_seqlens_m=ends,
            A_idx=slots // expert_index.shape[1],
            store_preact=keep,
            tuned=False,
            **both(*lie, gate=gate),
        )
        rows = gemm(
            h, weight(down_proj).contiguous().mT, bias=down_bias, cu_seqlens_m=ends, tuned=False
        )
        y = collect(rows, expert_weight, position)
        return (
            y,
            pre if keep else x.new_empty(0, gate_up_proj.shape[1]),
            offsets,
            slots,
            position,
            offsets.new_empty(0),
        )  # of tiles

    def backward(
        dy, x, gate_up_proj, down_proj, expert_weight, pre, offsets, slots, position, gate, needs
    ):
        """The gradients of x and both weights, None where not needed; <dh, h> of each row; and
        dpre, in the order of the bias of the up-projection if that needs its gradient.
        """
        (E, N, H), dy = gate_up_proj.shape, dy.contiguous()
        ends, token = F.pad(offsets, (1, 0)), slots // position.shape[1]
        dpre, weighted, dots = gemm_dgated(
            dy,
            weight(down_proj).contiguous(),
            pre,
            activation="swiglu",
            colvec_scale=expert_weight.flatten()[slots],
            colvec_reduce=True,
            cu_seqlens_m=ends,
            A_idx=token,
            tuned=False,
        )
        idle = (torch.diff(ends) == 0)[:, None, None]  # QuACK may leave what is a sum over no rows
        dx = dgate_up = ddown = None
        if needs[2]:
            ddown = gemm(
                dy.t(), weighted, cu_seqlens_k=ends, A_idx=token, tuned=False
            ).masked_fill_(idle, 0)
        del weighted
        if needs[1]:  # x^T dpre, since it gathers the first: it is written as its transpose
            dgate_up = x.new_empty(E, N, H)
            gemm(
                x.contiguous().t(),
                dpre,
                out=dgate_up.mT,
                cu_seqlens_k=ends,
                A_idx=token,
                tuned=False,
                **both("out", gate=gate),
            )
            dgate_up.masked_fill_(idle, 0)
        if needs[0]:
            dx = collect(
                gemm(
                    dpre,
                    weight(gate_up_proj).contiguous(),
                    cu_seqlens_m=ends,
                    tuned=False,
                    **both("B", gate=gate),
                ),
                None,
                position,
            )
        if needs[4] and not gate.interleaved:
            dpre = torch.cat((dpre[:, ::2], dpre[:, 1::2]), 1)
        return dx, dgate_up, ddown, dots, dpre

    return forward, backward
