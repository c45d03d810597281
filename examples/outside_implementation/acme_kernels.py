"""SwiGLU with a backward of its own: an implementation of an op from outside its library.

pip install ./examples/outside_implementation
tilewright check silu_mul --implementation acme
"""

from __future__ import annotations

import torch

from tilewright import Implementation


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up. Saves gate and up alone; PyTorch's two ops save silu(gate) too."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        g = gate.float()
        return (g * g.sigmoid() * up.float()).to(gate.dtype)  # computed in float32, rounded once

    @staticmethod
    def backward(ctx, dy):
        gate, up = (t.float() for t in ctx.saved_tensors)
        s, dy32 = gate.sigmoid(), dy.float()
        d_gate = dy32 * up * s * (1 + gate * (1 - s))
        return d_gate.to(dy.dtype), (dy32 * gate * s).to(dy.dtype)


def silu_mul(gate: torch.Tensor, up: torch.Tensor | None, kind: int) -> torch.Tensor:
    """What the public function passes on. up: None if gate holds both.   kind: 0, SiLU."""
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return SwiGLU.apply(gate, up)


def load():
    """Called at the first use: import here what the kernels need, a CUDA library for example."""
    return silu_mul


acme = Implementation("acme", load, devices=("cpu", "cuda"))
