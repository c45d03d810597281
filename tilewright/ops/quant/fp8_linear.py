"""A linear layer over a frozen block-scaled FP8 weight that multiplies in FP8.

    y = dequant(fp8(x)) @ dequant(q)^T + bias

T = rows of x, K = its columns, N = rows of q. Saved for backward: q's own tensors. The gradient is
that of `quantized_linear`.
"""

from __future__ import annotations

import functools

import torch

from tilewright.core import checks, platform
from tilewright.core.library import from_kernels
from tilewright.core.registry import Op, in_gluon, in_triton
from tilewright.core.takes import takes
from tilewright.kernels.quant.operators import FP8
from tilewright.ops.quant import quantize
from tilewright.ops.quant.block_fp8 import BlockFP8, dequantize_block_fp8, quantize_block_fp8
from tilewright.ops.quant.quantized_linear import (
    LINEAR,
    by_rows,
    linear_case,
    load_triton,
    product,
    product_eager,
    timed_cases,
)
from tilewright.ops.quant.weights import check_parts

BLOCK = (128, 128)


@checks.autocast("products", "x", "bias")
@takes(q="a BlockFP8 [N, K]", **LINEAR)
def fp8_linear(
    x: torch.Tensor, q: BlockFP8, bias: torch.Tensor | None = None, *, implementation: str = "auto"
) -> torch.Tensor:
    """The product with a weight in FP8, in FP8: y = dequant(fp8(x)) @ dequant(q)^T + bias, where x
    is rounded to FP8 too.

    Autocast as in `quantized_linear`. A separate op that `quantized_linear` never chooses, because
    rounding x changes the result: half a unit in the last of three mantissa bits, 3 % of a product
    on average. Differentiable in x and bias, ignoring the rounding of x: the gradient is that of
    `quantized_linear`, dx = dy @ dequant(q) with the weight in x's dtype. Saved for backward: q's
    tensors. Deterministic. Products within 128 columns are summed by the tensor cores, in their
    precision; they are scaled and accumulated in float32, and rounded once, with bias.

    Args:
        x: [..., K] fp32 | bf16 | fp16 (fp64 with eager), any strides; finite. Quantized as by
            `quantize_block_fp8(x, block=(1, 128))`: one scale per 128 columns of a row.
        q: BlockFP8 of shape [N, K] with blocks of 128 x 128.
        bias: [N] in x's dtype, or None.
        implementation: "auto", or one that `tilewright explain fp8_linear` lists.

    Returns:
        [..., N] in x's dtype.

    Raises:
        TypeError, ValueError: As `quantized_linear`, and for other block sizes.
        ImplementationUnavailable: As `quantized_linear`.

    Example:
        >>> from tilewright.ops import fp8_linear, quantize_block_fp8
        >>> q = quantize_block_fp8(torch.eye(4))
        >>> fp8_linear(torch.tensor([[1.0, 2.0, 4.0, 7.0]]), q, implementation="eager")
        tensor([[1., 2., 4., 7.]])

    Source: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.
    """
    quantize.on_device("x", x)
    if tuple(q.block) != BLOCK:
        raise ValueError(f"q.block must be (128, 128), got {tuple(q.block)}")
    return FP8_LINEAR.pick(implementation, x)(x, q, bias)


# ---- the definition


class Straight(torch.autograd.Function):
    """Returns the second tensor, and passes its gradient to the first (straight-through)."""

    generate_vmap_rule = True  # for torch.func, as is the separate setup_context

    @staticmethod
    def forward(x, rounded):
        return rounded.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy):
        return dy, None

    @staticmethod
    def jvp(ctx, dx, _):
        return dx.clone()


def fp8_linear_eager(x, q, bias):
    acc = torch.promote_types(x.dtype, torch.float32)
    codes = quantize_block_fp8(x, block=(1, 128), implementation="eager")
    rounded = dequantize_block_fp8(codes, dtype=acc, implementation="eager")
    w = dequantize_block_fp8(q, dtype=acc, implementation="eager")
    return product_eager(Straight.apply(x.to(acc), rounded), w, bias).to(x.dtype)


# ---- Triton


def _launch(fp8, x, bias, weight):
    from tilewright.kernels.quant import quantize_triton

    check_parts(weight)
    codes = quantize_triton.fp8_quantize(x.contiguous()[None], FP8(1, 128, False, None, False))
    (scale,) = weight.scales
    return fp8(
        codes.data[0].view(quantize.E4M3),
        codes.scale[0],
        weight.data.contiguous().view(quantize.E4M3),
        scale.contiguous(),
        None if bias is None else bias.contiguous(),
        x.dtype,
    )


@functools.cache
def _triton():
    from tilewright.kernels.quant import quantized_linear_triton

    return _defined("triton", quantized_linear_triton.fp8)


@functools.cache
def _gluon():
    from tilewright.kernels.quant import specialized

    return _defined("gluon", specialized.fp8)


def _defined(name, fp8):
    launch = functools.partial(_launch, fp8)
    op = product.define(f"fp8_linear_{name}_forward", launch, load_triton())
    return lambda x, q, bias: by_rows(op, x, q, bias)


def no_fp8(device_type: str) -> str | None:
    if reason := platform.no_triton(device_type):
        return reason
    return platform.no_cuda(90) if device_type == "cuda" else None


# x is not differentiated in these cases: finite differences of a step function are not its
# gradient.
FP8_LINEAR = Op(
    "fp8_linear",
    fp8_linear,
    fp8_linear_eager,
    (
        in_gluon(
            _gluon,
            "products of more than 64 rows, with the results stored by TMA",
            tunables=from_kernels("quant.specialized", "FP8_LINEAR"),
            gate=from_kernels("quant.specialized", "fp8_gate"),
        ),
        in_triton(
            _triton,
            missing=no_fp8,
            tunables=lambda: (from_kernels("quant.quantized_linear_triton", "FP8")(),),
        ),
    ),
    (
        *(
            linear_case(name, "block_fp8", T, N, K, bias, lead, differentiable=False)
            for name, T, N, K, bias, lead in (
                ("aligned", 5, 24, 64, True, None),
                ("ragged", 7, 19, 33, False, None),
                ("two_scales", 3, 136, 272, True, None),
                ("three_dimensions", 6, 20, 32, False, (2, 3)),
                ("no_rows", 0, 8, 16, False, None),
            )
        ),
        *timed_cases(("block_fp8",), differentiable=False),
    ),
)
