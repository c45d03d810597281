"""RMSNorm with a gate in Triton. The definition is tilewright/ops/norm/rmsnorm_gated.py.

A program holds BLOCK_T rows in registers. Backward recomputes all from the inputs; the weight
gradient is accumulated per program in float32 and reduced by a second kernel in fixed order: no
atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv, next_power_of_2
from tilewright.kernels.math_triton import reciprocal, sigmoid_pair
from tilewright.kernels.norm.rmsnorm_triton import sharing, summed
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import Tunable


@triton.jit
def _scaled(x, w, eps, D: tl.constexpr, TYPE: tl.constexpr, PRODUCT: tl.constexpr):
    """1 / the root mean square, the normalized rows before and after their rounding to TYPE, and
    these times the weight, rounded to PRODUCT.
    """
    rstd = reciprocal(tl.sqrt(tl.sum(x * x, axis=1) / D + eps))
    xhat = x * rstd[:, None]
    normed = xhat.to(TYPE).to(tl.float32)
    return rstd, xhat, normed, (w[None, :] * normed).to(PRODUCT).to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def _forward(
    x_ptr,
    gate_ptr,
    w_ptr,
    y_ptr,
    T,
    eps,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
):
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    PRODUCT: tl.constexpr = tl.float32 if WIDE else TYPE
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    mask = (t < T)[:, None] & (d < D)[None, :]
    at = t[:, None] * D + d[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    _, _, _, scaled = _scaled(x, w, eps, D, TYPE, PRODUCT)
    s, _ = sigmoid_pair(gate)
    tl.store(y_ptr + at, (scaled * (gate * s)).to(TYPE), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _backward(
    dy_ptr,
    x_ptr,
    gate_ptr,
    w_ptr,
    dx_ptr,
    dgate_ptr,
    dw_ptr,
    T,
    eps,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx, dgate, and this program's partial sum of dw over blocks p, p + P, p + 2P, ... of rows."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    PRODUCT: tl.constexpr = tl.float32 if WIDE else TYPE
    p = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    # Added over the rows of a block once, at the end: a sum between threads for each block would
    # take as many instructions as all else.
    dw = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for block in tl.range(p, tl.cdiv(T, BLOCK_T), tl.num_programs(0), num_stages=STAGES):
        t = block * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
        mask = (t < T)[:, None] & (d < D)[None, :]
        at = t[:, None] * D + d[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd, xhat, normed, scaled = _scaled(x, w, eps, D, TYPE, PRODUCT)
        s, rest = sigmoid_pair(gate)
        dgate = dy * scaled * (s * (1.0 + gate * rest))
        tl.store(dgate_ptr + at, dgate.to(TYPE), mask=mask)
        g = dy * (gate * s)
        dw += g * normed
        g = g * w[None, :]
        # Products are rounded before they are added: with an fma into the first addition of an
        # exchange between threads, two threads would differ in the last bit, and either result
        # could be stored (as in rmsnorm).
        c = tl.sum(tl.fma(g, xhat, 0.0), axis=1) / D
        dx = (g - xhat * c[:, None]) * rstd[:, None]
        tl.store(dx_ptr + at, dx.to(TYPE), mask=mask)
    tl.store(dw_ptr + p.to(tl.int64) * D + d, tl.sum(dw, axis=0), mask=d < D)


# ---- launches


def _constants(x: torch.Tensor, weight: torch.Tensor) -> dict:
    """WIDE: the product of weight and normalized row stays in float32."""
    return {"D": x.shape[-1], "WIDE": torch.promote_types(x.dtype, weight.dtype) == torch.float32}


def forward(x, gate, weight, eps):
    y, (T, D) = torch.empty_like(x), _sizes(x)
    if T:
        config = FORWARD.config(x.device, D, x.element_size())
        grid = (cdiv(T, config["BLOCK_T"]),)
        launch(_forward, grid, x, gate, weight, y, T, eps, **_constants(x, weight), **config)
    return y


def backward(dy, x, gate, weight, eps):
    dx, dgate, (T, D) = torch.empty_like(x), torch.empty_like(x), _sizes(x)
    if not T:
        return dx, dgate, torch.zeros_like(weight)
    config = BACKWARD.config(x.device, D, x.element_size())
    constants = _constants(x, weight) | config
    warps = constants.pop("num_warps")
    tensors, sample = (dy, x, gate, weight, dx, dgate), x.new_empty(1, dtype=torch.float32)
    dtypes, arguments = (dy.dtype, x.dtype, weight.dtype), (*tensors, sample, T, eps)
    P = sharing(_backward, T, config["BLOCK_T"], 1, warps, x, dtypes, *arguments, **constants)
    dw = x.new_empty((P, D), dtype=torch.float32)
    launch(_backward, (P,), *tensors, dw, T, eps, **constants, num_warps=warps)
    return dx, dgate, summed(dw, torch.empty_like(weight))


def _sizes(x: torch.Tensor) -> tuple[int, int]:
    D = x.shape[-1]
    return x.numel() // D, D


# ---- launch configurations


def _config(D: int, elements: int, each: int) -> dict:
    """Rows that share a program until it has `elements`, `each` of them per thread."""
    block_d = next_power_of_2(D)
    block_t = max(1, elements // block_d)
    warps = min(16, max(1, block_t * block_d // (32 * each)))
    return {"BLOCK_D": block_d, "BLOCK_T": block_t, "num_warps": warps}


def _forward_heuristic(D: int, itemsize: int) -> dict:
    """Two or four 128-bit loads of each operand per thread. With 16 elements of float32 in rows of
    4,096 ptxas spills 4 bytes for sm_100.
    """
    return _config(D, 1024, 16 if itemsize == 2 else 8)


def _backward_heuristic(D: int, itemsize: int) -> dict:
    """8 elements per thread, which holds six operands of each.

    STAGES: blocks of rows in flight. All but one of them are copies to shared memory: about 72 KiB
    per SM for rows of 128 columns.
    """
    return {**_config(D, 1024, 8), "STAGES": 3 if itemsize == 2 else 2}


def _forward_space(D: int, itemsize: int) -> list[dict]:
    return [
        _config(D, elements, each)
        for elements in (512, 1024, 2048)
        for each in (8, 16)
        if next_power_of_2(D) <= 512 * each
    ]


def _backward_space(D: int, itemsize: int) -> list[dict]:
    return [{**c, "STAGES": stages} for c in _forward_space(D, itemsize) for stages in (1, 2, 3)]


def _specs_of(kernel, name: str):
    def specs(key: dict, config: dict) -> list[KernelSpec]:
        data = "bf16" if key["itemsize"] == 2 else "fp32"
        return [
            KernelSpec.of(
                kernel,
                f"{name} {data} weight={weight} D={key['D']}",
                {"w": weight, "dw": "fp32", "*": data},
                {"D": key["D"], "WIDE": weight == "fp32", **config},
                {"eps": "fp32"},
                elements=config["BLOCK_T"] * config["BLOCK_D"],
            )
            for weight in dict.fromkeys((data, "fp32"))
        ]

    return specs


_KEYS = [(D, size) for D in (128, 1024, 4096) for size in (2, 4)]
FORWARD = Tunable(
    "rmsnorm_gated",
    "forward",
    ("D", "itemsize"),
    "forward",
    _forward_heuristic,
    _forward_space,
    _KEYS,
    _specs_of(_forward, "forward"),
)
BACKWARD = Tunable(
    "rmsnorm_gated",
    "backward",
    ("D", "itemsize"),
    "backward",
    _backward_heuristic,
    _backward_space,
    _KEYS,
    _specs_of(_backward, "backward"),
)
TUNABLES = (FORWARD, BACKWARD)
