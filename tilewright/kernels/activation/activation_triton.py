"""silu(gate) * up and gelu(gate) * up in Triton. The definition is
tilewright/ops/activation/activation.py.

gate and up are [rows, I] matrices with their own row strides and contiguous columns, or contiguous
tensors [..., I]. Strides and I are in units of UNIT elements, 16 bytes where all are multiples of
that: row alignment is then explicit in the code, whereas Triton detects multiples of 16 elements
only (32 bytes in bf16). A program computes BLOCK columns of one row: BLOCKS programs per row,
numbered row by row in one grid dimension (the others end at 65,535). float32 math, one rounding on
store. KIND: 0 SiLU, 1 GELU (tanh), 2 GELU (erf).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.kernels.activation.operators import (
    act_mul,
    act_mul_backward,
    as_rows,
)
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv, next_power_of_2, unit
from tilewright.kernels.math_triton import normal_distribution, sigmoid, sigmoid_pair
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import Tunable


def _heuristic(columns: int, itemsize: int) -> dict:
    """8 elements per thread: one 128-bit load of each 16-bit operand."""
    block = min(1024, next_power_of_2(columns))
    return {"BLOCK": block, "num_warps": max(1, block // 256)}


def _space(columns: int, itemsize: int) -> list[dict]:
    """One to four 128-bit loads of each operand per thread, at most 16 elements."""
    return [
        {"BLOCK": block, "num_warps": warps}
        for block in (512, 1024, 2048, 4096)
        for warps in (1, 2, 4, 8)
        if 16 // itemsize <= block // (32 * warps) <= 16 and block <= next_power_of_2(columns)
    ]


@triton.jit
def activation(g, KIND: tl.constexpr):
    """act(g)."""
    if KIND == 0:
        a = g * sigmoid(g)
    else:
        a, _ = _activate(g, KIND)
    return a


@triton.jit
def _activate(g, KIND: tl.constexpr):
    """act(g) and its derivative."""
    if KIND == 0:
        s, q = sigmoid_pair(g)
        a = g * s
        da = s * (1.0 + g * q)
    elif KIND == 1:
        # (1 + tanh u) / 2 = sigmoid(2 u): no libdevice, and no digits lost in the negative tail. s
        # or q is 0 from 12 on, and 0 times an overflowing cube would be NaN.
        z = tl.where(g > 20.0, 20.0, tl.where(g < -20.0, -20.0, g))
        s, q = sigmoid_pair(1.5957691216057308 * (z + 0.044715 * z * z * z))
        a = g * s
        da = s * (1.0 + z * q * 1.5957691216057308 * (1.0 + 0.134145 * z * z))
    else:
        cdf, density = normal_distribution(g)
        a = g * cdf
        da = cdf + g * density
    return a, da


@triton.jit
def _forward(
    gate_ptr,
    up_ptr,
    y_ptr,
    columns,
    BLOCKS,
    gate_stride,
    up_stride,
    y_stride,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    c = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = c < columns * UNIT
    g = tl.load(gate_ptr + row * gate_stride * UNIT + c, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row * up_stride * UNIT + c, mask=mask, other=0.0).to(tl.float32)
    a = activation(g, KIND)
    tl.store(y_ptr + row * y_stride * UNIT + c, (a * u).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    columns,
    BLOCKS,
    dy_stride,
    gate_stride,
    up_stride,
    dgate_stride,
    dup_stride,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    c = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = c < columns * UNIT
    d = tl.load(dy_ptr + row * dy_stride * UNIT + c, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate_ptr + row * gate_stride * UNIT + c, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row * up_stride * UNIT + c, mask=mask, other=0.0).to(tl.float32)
    a, da = _activate(g, KIND)
    tl.store(
        dgate_ptr + row * dgate_stride * UNIT + c,
        (d * u * da).to(dgate_ptr.dtype.element_ty),
        mask=mask,
    )
    tl.store(dup_ptr + row * dup_stride * UNIT + c, (d * a).to(dup_ptr.dtype.element_ty), mask=mask)


def _rows(t: torch.Tensor) -> torch.Tensor:
    """`as_rows`, but a contiguous tensor is returned as is: a view costs half a launch and more."""
    return t if t.is_contiguous() else as_rows(t)


def _pair(gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in the layout that the kernels take."""
    if up is not None:
        return _rows(gate), _rows(up)
    both, columns = as_rows(gate), gate.shape[-1] // 2
    return both[:, :columns], both[:, columns:]


def _launch(kernel, tunables, kind, tensors) -> None:
    """tensors: as `_rows` or `_pair` return them."""
    if not (n := tensors[0].numel()):
        return
    columns, size = tensors[0].shape[-1], tensors[0].element_size()
    c = tunables[kind].config(tensors[0].device, columns, size)
    blocks = cdiv(columns, c["BLOCK"])
    strides = [t.stride(0) if t.dim() == 2 else columns for t in tensors]
    by = unit(size, columns, *strides)
    launch(
        kernel,
        (n // columns * blocks,),
        *tensors,
        columns // by,
        blocks,
        *[s // by for s in strides],
        KIND=kind,
        UNIT=by,
        **c,
    )


def forward(gate, up, kind):
    y = act_mul(gate, up, kind)
    _launch(_forward, FORWARD, kind, (*_pair(gate, up), y))
    return y


def backward(dy, gate, up, kind):
    gradients = act_mul_backward(dy, gate, up, kind)
    _launch(_backward, BACKWARD, kind, (_rows(dy), *_pair(gate, up), *_pair(*gradients)))
    return gradients


_NAMES = ("silu", "gelu_tanh", "gelu_erf")


def _specs(kernel, kind: int):
    """Rows aligned to 16 bytes with no argument divisible by more; and an odd width in bf16, whose
    rows are read element by element and whose strides exceed 2^31.
    """
    label = f"{_NAMES[kind]} {'forward' if kernel is _forward else 'backward'}"
    strides = [name for name in kernel.arg_names if name.endswith("_stride")]

    def specs(key: dict, config: dict) -> list[KernelSpec]:
        data = "bf16" if key["itemsize"] == 2 else "fp32"
        return [
            KernelSpec.of(
                kernel,
                f"{label} {data}{' odd' if odd else ''}",
                {"*": data},
                {"KIND": kind, "UNIT": 1 if odd else 16 // key["itemsize"], **config},
                dict.fromkeys(strides, "i64" if odd else "i32"),
                # Rows with odd strides start at any element, differently in each tensor: no access
                # wider than one element is aligned.
                load=0 if odd else 128,
                store=0 if odd else 128,
                elements=config["BLOCK"],
            )
            for odd in ((False, True) if data == "bf16" else (False,))
        ]

    return specs


def _tunables(kernel, pass_name: str) -> tuple[Tunable, ...]:
    """One per KIND."""
    return tuple(
        Tunable(
            "silu_mul" if kind == 0 else "gelu_mul",
            f"{pass_name}{name.removeprefix('silu')[4:]}",
            ("columns", "itemsize"),
            pass_name,
            _heuristic,
            _space,
            [(4096, 2), (4096, 4)],
            _specs(kernel, kind),
        )
        for kind, name in enumerate(_NAMES)
    )


FORWARD, BACKWARD = _tunables(_forward, "forward"), _tunables(_backward, "backward")
TUNABLES = (*FORWARD, *BACKWARD)
