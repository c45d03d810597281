"""silu(gate) * up and gelu(gate) * up in Triton. The definition is tilewright/ops/activation.py.

gate and up are [rows, I] matrices with a row stride each and contiguous columns. A program takes BLOCK columns of one
row; float32 math, one rounding on store. KIND: 0 SiLU, 1 GELU (tanh), 2 GELU (erf).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.kernels.spec import KernelSpec


def config(columns: int) -> dict:
    """8 elements a thread: one 128-bit load of each 16-bit operand."""
    block = min(1024, triton.next_power_of_2(columns))
    return {"BLOCK": block, "num_warps": max(1, block // 256)}


@triton.jit
def _sigmoid_pair(x):
    """sigmoid(x) and sigmoid(-x), each to a few ulp: 1 - sigmoid(x) would cancel for large x."""
    e = tl.exp(-tl.abs(x))
    near = 1.0 / (1.0 + e)
    far = e * near
    return tl.where(x < 0, far, near), tl.where(x < 0, near, far)


@triton.jit
def _activate(g, KIND: tl.constexpr):
    """act(g) and its derivative."""
    if KIND == 0:
        s, q = _sigmoid_pair(g)
        a = g * s
        da = s * (1.0 + g * q)
    elif KIND == 1:
        # (1 + tanh u) / 2 = sigmoid(2 u): no libdevice, and no digits lost in the negative tail.
        s, q = _sigmoid_pair(1.5957691216057308 * (g + 0.044715 * g * g * g))
        a = g * s
        da = s * (1.0 + g * q * 1.5957691216057308 * (1.0 + 0.134145 * g * g))
    else:
        # Phi(x) through erfc's Chebyshev fit (Numerical Recipes, erfcc): relative error below 1.2e-7, also in the
        # negative tail, where 1 + erf(x) would cancel.
        z = tl.abs(g) * 0.7071067811865476
        t = 1.0 / (1.0 + 0.5 * z)
        p = 0.17087277 * t - 0.82215223
        p = p * t + 1.48851587
        p = p * t - 1.13520398
        p = p * t + 0.27886807
        p = p * t - 0.18628806
        p = p * t + 0.09678418
        p = p * t + 0.37409196
        p = p * t + 1.00002368
        p = p * t - 1.26551223
        tail = 0.5 * t * tl.exp(p - 0.5 * g * g)
        cdf = tl.where(g < 0, tail, 1.0 - tail)
        a = g * cdf
        da = cdf + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    return a, da


@triton.jit
def _forward(gate_ptr, up_ptr, y_ptr, columns, gate_stride, up_stride, y_stride, KIND: tl.constexpr,
             BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < columns
    g = tl.load(gate_ptr + row * gate_stride + c, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row * up_stride + c, mask=mask, other=0.0).to(tl.float32)
    a, _ = _activate(g, KIND)
    tl.store(y_ptr + row * y_stride + c, (a * u).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, columns, dy_stride, gate_stride, up_stride, dgate_stride,
              dup_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < columns
    d = tl.load(dy_ptr + row * dy_stride + c, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate_ptr + row * gate_stride + c, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row * up_stride + c, mask=mask, other=0.0).to(tl.float32)
    a, da = _activate(g, KIND)
    tl.store(dgate_ptr + row * dgate_stride + c, (d * u * da).to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + row * dup_stride + c, (d * a).to(dup_ptr.dtype.element_ty), mask=mask)


def forward(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    rows, columns = gate.shape
    y = torch.empty((rows, columns), dtype=gate.dtype, device=gate.device)
    if y.numel():
        c = config(columns)
        _forward[(rows, triton.cdiv(columns, c["BLOCK"]))](gate, up, y, columns, gate.stride(0), up.stride(0),
                                                           columns, KIND=kind, **c)
    return y


def backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dgate: torch.Tensor, dup: torch.Tensor,
             kind: int) -> None:
    """Writes dgate and dup, which may be the halves of one tensor."""
    rows, columns = gate.shape
    if gate.numel():
        c = config(columns)
        _backward[(rows, triton.cdiv(columns, c["BLOCK"]))](
            dy, gate, up, dgate, dup, columns, dy.stride(0), gate.stride(0), up.stride(0), dgate.stride(0),
            dup.stride(0), KIND=kind, **c)


def specs() -> list[KernelSpec]:
    found = []
    strides = ("columns", "dy_stride", "gate_stride", "up_stride", "y_stride", "dgate_stride", "dup_stride")
    types = {"dy_ptr": "*bf16", "gate_ptr": "*bf16", "up_ptr": "*bf16", "y_ptr": "*bf16", "dgate_ptr": "*bf16",
             "dup_ptr": "*bf16", **dict.fromkeys(strides, "i32")}
    for kind, name in enumerate(("silu", "gelu_tanh", "gelu_erf")):
        for kernel, label in ((_forward, "forward"), (_backward, "backward")):
            c = config(4096)
            warps = c.pop("num_warps")
            names = [n for n in kernel.arg_names if n in types]
            found.append(KernelSpec(kernel, f"{name} {label} bf16", {n: types[n] for n in names},
                                    {"KIND": kind, **c}, warps,
                                    divisible=tuple(n for n in names if n in strides)))
    return found
