"""A linear layer over a frozen quantized weight, with the gradients of x and of bias.

    y = x @ dequant(q)^T + bias

T = rows of x, K = its columns, N = rows of q. Saved for backward: q's own tensors. The backward
dequantizes again, and does not need x, since no gradient of the weight is computed.

With many rows the weight is dequantized once, into x's dtype, and multiplied by PyTorch's GEMM; the
copy is freed after that product. With few rows, where writing and reading a copy would dominate,
the kernel dequantizes as it multiplies. The gradient of x always takes the first way: few rows
occur in generation, which needs no gradients, and a training step with so few is bound elsewhere.

On a CPU, in float32, a large weight is dequantized in parts of some rows. Each is multiplied while
it is in the caches, and takes the memory of the one before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from tilewright.core import checks
from tilewright.core.library import Operator, declare, from_kernels
from tilewright.core.registry import Case, Cost, Judged, Op
from tilewright.core.takes import takes
from tilewright.kernels.quant import nf4_tables, operators
from tilewright.kernels.quant.operators import FORMATS, Matrix
from tilewright.ops import cases
from tilewright.ops.quant import quantize
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.block_fp8 import BlockFP8, quantize_block_fp8
from tilewright.ops.quant.fp8 import E8M0, MX_BLOCK
from tilewright.ops.quant.mxfp8 import MXFP8
from tilewright.ops.quant.nf4 import quantize_nf4
from tilewright.ops.quant.nvfp4 import quantize_nvfp4
from tilewright.ops.quant.quantize import Quantized
from tilewright.ops.quant.weights import (
    Packed,
    check_parts,
    dense,
    dequantize,
    in_parts,
    pack,
    unpack,
)

LINEAR = {"x": "float [..., K]", "bias": "x [N]"}


@checks.autocast("products", "x", "bias")
@takes(q="an NF4, NVFP4, BlockFP8 or MXFP8 [N, K]", **LINEAR, noise="an AQN")
def quantized_linear(
    x: torch.Tensor,
    q: Quantized,
    bias: torch.Tensor | None = None,
    *,
    noise: AQN | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """The product with a quantized weight: y = x @ dequant(q)^T + bias.

    The weight is dequantized in float32 and rounded to x's dtype; products accumulate in float32
    and are rounded once, with bias (in float32, PyTorch's GEMM follows
    torch.backends.cuda.matmul.allow_tf32). Under torch.autocast x and bias are cast to its dtype.
    Differentiable in x and bias, any number of times: dx = dy @ dequant(q). Saved for backward:
    q's tensors, not a copy of them, and not x. Deterministic.

    Args:
        x: [..., K] fp32 | bf16 | fp16 (fp64 with eager), any strides.
        q: NF4, NVFP4, BlockFP8 or MXFP8 of shape [N, K]; frozen. It is dequantized to x's dtype,
            whatever dtype it was quantized from.
        bias: [N] in x's dtype, or None.
        noise: added to the weight as by `dequantize_*`, the same in forward and backward; None: no
            noise.
        implementation: "auto", or one that `tilewright explain quantized_linear` lists.

    Returns:
        [..., N] in x's dtype.

    Raises:
        TypeError, ValueError: Invalid arguments.
        ImplementationUnavailable: A named implementation that cannot run here.

    Example:
        >>> from tilewright.ops import quantize_nf4, quantized_linear
        >>> q = quantize_nf4(torch.eye(4))
        >>> quantized_linear(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), q)
        tensor([[1., 2., 3., 4.]])

    Source: QLoRA, arXiv:2305.14314, equation 5.
    """
    quantize.on_device("x", x)
    return QUANTIZED_LINEAR.pick(implementation, x)(x, q, bias, noise)


# ---- the definitions


def quantized_linear_eager(x, q, bias, noise):
    acc = torch.promote_types(x.dtype, torch.float32)
    w = dequantize(q, dtype=x.dtype, noise=noise, implementation="eager")
    return product_eager(x.to(acc), w.to(acc), bias).to(x.dtype)


def product_eager(x, w, bias):
    y = x @ w.t()
    return y if bias is None else y + bias.to(y.dtype)


# ---- fused implementations


@declare
def product(x: torch.Tensor, bias: torch.Tensor | None, weight: Packed) -> torch.Tensor:
    """x [T, K] -> [T, N]."""
    return x.new_empty((x.shape[0], weight.shape[0]))


@declare
def transposed(dy: torch.Tensor, weight: Packed) -> torch.Tensor:
    """dy [T, N] -> [T, K]."""
    return dy.new_empty((dy.shape[0], weight.shape[1]))


def _mm(x, w, bias):
    """x @ w + bias by PyTorch, with autocast disabled."""
    with checks.no_autocast(x):
        return torch.mm(x, w) if bias is None else torch.addmm(bias, x, w)


# Each is linear in x, and the other is its gradient.


@product.formula(twice=True)
def _backward(fused, dy, weight, needs):
    gradients = {}
    if needs["x"]:
        gradients["x"] = fused.transposed(dy, weight)
    if needs["bias"]:
        gradients["bias"] = bias_gradient(dy)
    return gradients


@transposed.formula(twice=True)
def _backward_transposed(fused, ddx, weight):
    return {"dy": fused.product(ddx, None, weight)}


def bias_gradient(dy: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias that is added to every row."""
    return dy.sum(0, dtype=torch.float32).to(dy.dtype)


def by_rows(op: Operator, x, q, bias, noise=None):
    """An operator declared as `product`, for x of any shape."""
    if x.dim() == 2:  # no view where none is needed
        return op(x, bias, pack(q, noise))
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return op(rows, bias, pack(q, noise)).view(*x.shape[:-1], q.shape[0])


class _Fused:
    """One implementation: its operator, the operator of the gradient, and their caller.

    few_rows: (x, bias, packed) -> y, or None if the weight should be dequantized.
    """

    def __init__(self, name: str, few_rows: Callable):
        self.name, self.few_rows = name, few_rows
        self.product = product.define(f"quantized_linear_{name}_forward", self.forward, self)
        self.transposed = transposed.define(
            f"quantized_linear_{name}_backward", self.backward, self
        )

    def forward(self, x, bias, weight):
        y = self.few_rows(x, bias, weight) if weight.alpha == 0 else None
        if y is not None:
            return y
        if not (part := _rows_of_a_part(x, weight)):
            return _mm(x, dense(weight, x.dtype, self.name).t(), bias)
        y = x.new_empty(x.shape[0], weight.shape[0])
        for rows, of_rows in in_parts(weight, part):
            w = dense(of_rows, x.dtype, self.name)
            y[:, rows] = _mm(x, w.t(), None if bias is None else bias[rows])
        return y

    def backward(self, dy, weight):
        if not (part := _rows_of_a_part(dy, weight)):
            return _mm(dy, dense(weight, dy.dtype, self.name), None)
        dx = dy.new_zeros(dy.shape[0], weight.shape[1])
        with checks.no_autocast(dy):
            for rows, of_rows in in_parts(weight, part):
                dx.addmm_(dy[:, rows], dense(of_rows, dy.dtype, self.name))
        return dx

    def quantized_linear(self, x, q, bias, noise):
        return by_rows(self.product, x, q, bias, noise)


def _rows_of_a_part(x: torch.Tensor, weight: Packed) -> int:
    """The rows of a part of a weight that is dequantized in parts; 0: it is dequantized whole."""
    N, K = weight.shape
    suits = x.is_cpu and x.dtype == torch.float32 and x.shape[0] <= _PART_ROWS and not weight.alpha
    if not suits or 4 * N * K < 2 * _PART_BYTES:
        return 0
    return max(_PART_BYTES // (4 * K * 128), 1) * 128


def _matrix(weight: Packed, rows: int, span: int) -> Matrix:
    check_parts(weight)
    scale, *more = weight.scales
    nested, table, extra = None, None, None
    if len(more) == 2:
        (nested, extra), table = more, nf4_tables.on(scale.device).map
    elif more:
        (extra,) = more
    return Matrix(
        weight.data.contiguous(),
        scale.contiguous(),
        nested,
        table,
        extra,
        FORMATS[weight.format],
        weight.shape[0],
        rows,
        span,
    )


def _shared(weight: Packed) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    block = {"nvfp4": [16], "mxfp8": [MX_BLOCK]}.get(weight.format, weight.block)
    rows, span = block if len(block) == 2 else (1, *block)
    return rows, span


def _few_rows_triton(kernels, x, bias, weight):
    if weight.format == "mxfp8":  # a step of the kernel covers more columns than share a scale
        return None
    rows, span = _shared(weight)
    config = kernels.constants(x, FORMATS[weight.format], weight.shape[0], span)
    if config is None:
        return None
    bias = None if bias is None else bias.contiguous()
    return kernels.few_rows(x, bias, _matrix(weight, rows, span), config)


@functools.cache
def load_triton() -> _Fused:
    from tilewright.kernels.quant import quantized_linear_triton

    return _Fused("triton", functools.partial(_few_rows_triton, quantized_linear_triton))


def _few_rows_cpp(kernel, x, bias, weight):
    N, K = weight.shape
    rows, span = _shared(weight)
    # Codes are read 16 at a time, with one scale.
    if (
        not 0 < x.shape[0] <= _CPP_ROWS[x.dtype]
        or N * K == 0
        or K % 16
        or span % 16
        or (weight.format == "nf4" and K % span)
    ):
        return None
    if weight.format == "mxfp8":
        # As float32 scales, an eighth of the weight's bytes; values are unchanged.
        q, _ = unpack(weight, x.dtype)
        assert isinstance(q, MXFP8)
        quantize.part("q.scale", q.scale, E8M0, (N, -(-K // MX_BLOCK)), q.data)
        weight = pack(BlockFP8(q.data, q.scale.float(), (rows, span), x.dtype))
    bias = None if bias is None else bias.contiguous()
    return kernel(x.contiguous(), bias, _matrix(weight, rows, span))


@functools.cache
def _cpp():
    kernel = operators.few_rows.adopt("quantized_linear_cpp_few_rows")
    return _Fused("cpp", functools.partial(_few_rows_cpp, kernel))


# Rows up to which the fused C++ product is faster than dequantizing and PyTorch's GEMM. Measured on
# two (shared) cores of an AMD EPYC with 2,048 x 2,048 and 4,096 x 14,336 weights of each format: in
# float32 1.4 to 5 times as fast up to 64 rows and about even at 256; in bfloat16 1.1 to 3 times up
# to 16, even at 64, slower at 256.
_CPP_ROWS = {torch.float32: 64, torch.bfloat16: 32}


# Bytes of a part of a weight: larger tensors take new pages from the system in every call. Each
# part reads all rows of x: up to so many, parts were faster. Measured like _CPP_ROWS (AVX2 alone),
# both passes: 1.8 times as fast with 65 rows, 1.2 to 1.5 with 256, 1.06 with 2,048.
_PART_BYTES, _PART_ROWS = 16 * 2**20, 2048


# ---- cases

_QUANTIZE = {
    "nf4": quantize_nf4,
    "nf4 nested": lambda w: quantize_nf4(w, double_quant=True),
    "nvfp4": quantize_nvfp4,
    "block_fp8": quantize_block_fp8,
    "block_fp8 16": lambda w: quantize_block_fp8(w, block=(16, 16)),
}
_BITS = {"nf4": 4.5, "nf4 nested": 4.13, "nvfp4": 4.5, "block_fp8": 8.002}


def linear_case(
    name, format, T, N, K, bias=False, lead=None, tags=cases.CONTRACT, differentiable=True
):
    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        draw = {"device": device, "dtype": dtype, "gen": g}
        w = cases.randn(N, K, scale=max(K, 1) ** -0.5, requires_grad=False, **draw)
        arguments = {
            "x": cases.randn(*(lead or (T,)), K, requires_grad=differentiable, **draw),
            "q": _QUANTIZE[format](w),
        }
        if bias:
            arguments["bias"] = cases.randn(N, requires_grad=differentiable, **draw)
        return arguments

    def cost(itemsize):
        moved = int(_BITS.get(format, 8) / 8 * N * K) + itemsize * T * (N + K)
        return Cost(
            moved,
            moved if differentiable else 0,
            2 * T * N * K,
            2 * T * N * K if differentiable else 0,
        )

    return Case(f"{format} {name}", make, cost, tags)


def timed_cases(formats, differentiable=True):
    """The down projection of Llama 3 8B, whose rows are longest: with one token, with small
    batches, and with the tokens of a training step. On a CPU only formats with a fused
    implementation there.
    """
    model = cases.MODELS["llama-3-8b"]
    timed = []
    for format in formats:
        for tags, rows in (
            (cases.CUDA, (1, 16, 64, 8192)),
            (cases.CPU, (1, 16, 256) if differentiable else ()),
        ):
            timed += [
                linear_case(
                    f"llama-3-8b-down_{T}",
                    format,
                    T,
                    model.hidden,
                    model.inner,
                    tags=tags,
                    differentiable=differentiable,
                )
                for T in rows
            ]
    return timed


_CASES = (
    *(
        linear_case("aligned", format, 5, 24, 64, bias=True)
        for format in ("nf4", "nvfp4", "block_fp8")
    ),
    *(
        linear_case("three_dimensions", format, 6, 20, 32, lead=(2, 3))
        for format in ("nf4", "nvfp4", "block_fp8")
    ),
    *(linear_case("ragged", format, 7, 19, 33) for format in ("nf4", "nvfp4", "block_fp8")),
    *(
        linear_case("two_scales", format, 3, 20, 192, bias=True)
        for format in ("nf4 nested", "nvfp4", "block_fp8")
    ),
    linear_case("small_blocks", "block_fp8 16", 4, 40, 48),
    linear_case("many_rows", "nf4", 67, 12, 64, bias=True),
    linear_case("no_rows", "nf4", 0, 8, 64),
    linear_case("no_rows", "nvfp4", 0, 8, 16),
    linear_case("no_outputs", "nf4", 4, 0, 64),
    *timed_cases(("nf4", "nvfp4", "block_fp8")),
)

QUANTIZED_LINEAR = Op(
    "quantized_linear",
    quantized_linear,
    quantized_linear_eager,
    quantize.implementations(
        lambda: load_triton().quantized_linear,
        lambda: _cpp().quantized_linear,
        gate=from_kernels("quant.quantized_linear_triton", "gate"),
        tunables=lambda: (from_kernels("quant.quantized_linear_triton", "FEW_ROWS")(),),
    ),
    _CASES,
    # The twin rounds the weight, and then the product.
    judged=Judged(detects={torch.bfloat16: {"out 0": 0.029, "grad x": 0.037}}),
)
