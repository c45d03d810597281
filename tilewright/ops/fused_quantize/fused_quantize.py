"""Three ops whose results are in FP8, as the following product takes its inputs: block-scaled in
blocks of 1 x 128, or MXFP8. The bfloat16 result is not written to memory, or written in the same
pass.

Each gives, byte for byte, the result of the op followed by `quantize_mxfp8` or
`quantize_block_fp8(..., block=(1, 128))` in the same implementation: the op's result is rounded to
the input's dtype before it is quantized.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from tilewright.core import checks
from tilewright.core.library import Operator, from_kernels
from tilewright.core.registry import Judged, Op
from tilewright.core.takes import FLOAT, takes
from tilewright.kernels.fused_quantize import operators
from tilewright.kernels.fused_quantize.operators import NormalizedCodes
from tilewright.kernels.norm.operators import Norm
from tilewright.kernels.quant.operators import FP8, Codes
from tilewright.ops import cases
from tilewright.ops.activation import activation
from tilewright.ops.fused_quantize.cases import ADD_NORM_CASES, NORM_CASES, SILU_CASES
from tilewright.ops.norm.rmsnorm import (
    NORM,
    RESIDUAL,
    WIDTH,
    add_rmsnorm,
    rmsnorm,
    rmsnorm_eager,
    sum_eager,
)
from tilewright.ops.quant import block_fp8, fp8, mxfp8, quantize
from tilewright.ops.quant.block_fp8 import BlockFP8
from tilewright.ops.quant.mxfp8 import MXFP8

BLOCK = (1, 128)
FORMATS = ("block_fp8", "mxfp8")


QUANTIZED = {"seed": quantize.SEED, "format": FORMATS}


@checks.autocast("inputs")
@takes(activation.GATED, **activation.GATE_UP, **QUANTIZED, transpose="bool")
def silu_mul_quantize(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    seed: int | None = None,
    format: str = "block_fp8",
    transpose: bool = False,
    implementation: str = "auto",
) -> BlockFP8 | MXFP8 | tuple[MXFP8, MXFP8]:
    """SwiGLU in FP8: silu(gate) * up, the input of a down projection in FP8.

    Computed in float32; the product is rounded to gate's dtype, then quantized as by
    `quantize_block_fp8` or `quantize_mxfp8`: byte for byte as the two ops in sequence, in the same
    implementation. Not differentiable: for inference, and for a forward whose backward recomputes
    `silu_mul`. Deterministic.

    Args:
        gate, up: [..., I] as in `silu_mul`, or gate [..., 2 I] = [gate; up] alone. They and their
            result must be finite.
        seed: as in `quantize_block_fp8`.
        format: "block_fp8", with a float32 scale per 1 x 128 block, or "mxfp8", with a power of two
            per 32 elements of a row.
        transpose: returns (q, q of the product's transpose), bit for bit as `quantize_mxfp8`
            does, from one read of gate and up (eager: two of the product): an operand of the
            gradient of the projection's weight. MXFP8 only: a program holds the 32 rows of its
            transposed blocks. The result must have 2 dimensions or more.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        A BlockFP8 or MXFP8 of shape [..., I], of gate's dtype.

    Raises:
        TypeError, ValueError: Invalid arguments.
        ValueError: The product is not finite (not checked on CUDA, where a check would synchronize:
            such a block's scale is not finite).
        ImplementationUnavailable: A named implementation that cannot run here.

    Example:
        >>> from tilewright.ops import silu_mul_quantize
        >>> silu_mul_quantize(torch.ones(2, 256)).shape
        (2, 128)
    """
    quantize.on_device("gate", gate)
    shape = gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)
    if transpose and format != "mxfp8":
        raise ValueError(
            f"transpose must be False with format {format!r}: no program holds 128 rows; quantize "
            "silu_mul's result by quantize_block_fp8 with transpose=True"
        )
    if transpose and len(shape) < 2:
        raise ValueError(
            f"gate must have at least 2 dimensions for a transpose, got shape {list(gate.shape)}"
        )
    gate, up = gate.detach(), None if up is None else up.detach()
    run = SILU_MUL_QUANTIZE.pick(implementation, gate)
    codes = run(gate, up, _into(format, seed, transpose))
    return _wrap(codes, shape, gate.dtype, "silu(gate) * up", format)


@checks.autocast("norm", "x")
@takes(WIDTH, **NORM, **QUANTIZED, return_normalized="bool")
def rmsnorm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    offset: float = 0.0,
    cast: str = "llama",
    seed: int | None = None,
    return_normalized: bool = False,
    format: str = "block_fp8",
    implementation: str = "auto",
) -> BlockFP8 | MXFP8 | tuple[BlockFP8 | MXFP8, torch.Tensor]:
    """RMSNorm in FP8: rmsnorm(x, weight), the input of a projection in FP8.

    Sums in float32 or wider; the normalized row is rounded to x's dtype, then quantized as by
    `quantize_block_fp8` or `quantize_mxfp8`: byte for byte as the two ops in sequence, in the same
    implementation (Triton: with rmsnorm's launch configuration, which decides the order of sums).
    It cannot return the transpose in the same pass, since a program holds one row and a block of
    the transpose spans 32; `quantize_mxfp8` of the normalized rows, returned or recomputed, gives
    it. Not differentiable, in the result or in the normalized rows: it is for inference, and for a
    forward whose backward is `rmsnorm`'s. Deterministic.

    Args:
        x, weight, eps, bias, offset, cast: as in `rmsnorm`; the normalized rows must be finite.
        seed: as in `quantize_block_fp8`.
        format: as in `silu_mul_quantize`.
        return_normalized: also return the normalized rows in x's dtype, for consumers not in FP8.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        A BlockFP8 or MXFP8 of x's shape and dtype, or (it, normalized [..., D]).

    Raises:
        TypeError, ValueError: Invalid arguments.
        ValueError: Normalized rows are not finite (not checked on CUDA, where a check would
            synchronize: such a block's scale is not finite).
        ImplementationUnavailable: A named implementation that cannot run here.

    Example:
        >>> from tilewright.ops import rmsnorm_quantize
        >>> rmsnorm_quantize(torch.ones(2, 256), torch.ones(256)).scale_inv.shape
        torch.Size([2, 2])
    """
    quantize.on_device("x", x)
    x, weight, bias = x.detach(), weight.detach(), None if bias is None else bias.detach()
    run, into = RMSNORM_QUANTIZE.pick(implementation, x), _into(format, seed)
    outputs = run(x, None, weight, bias, eps, offset, cast, return_normalized, into)
    q = _wrap(_of(outputs), x.shape, x.dtype, "the normalized x", format)
    return (q, outputs.y) if return_normalized else q


# Wide: what add_rmsnorm takes, and the quantization's options.
@checks.autocast("norm", "x", "residual")
@takes(WIDTH, **NORM, residual=RESIDUAL, **QUANTIZED, return_normalized="bool")
def add_rmsnorm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    offset: float = 0.0,
    cast: str = "llama",
    seed: int | None = None,
    return_normalized: bool = False,
    format: str = "block_fp8",
    implementation: str = "auto",
) -> tuple[BlockFP8 | MXFP8 | torch.Tensor, ...]:
    """(rmsnorm(x + residual) in FP8, x + residual) in one pass over memory: the residual step of a
    pre-norm transformer before a projection in FP8.

    Byte for byte as `add_rmsnorm` followed by the quantization, in the same implementation. Not
    differentiable in any result. Deterministic.

    Args:
        residual: as in `add_rmsnorm`: x's shape, x's dtype or float32; the sum is rounded to its
            dtype.
        x, weight, eps, bias, offset, cast, seed, return_normalized, format: as in
            `rmsnorm_quantize`.
        implementation: "auto", or one that `tilewright explain add_rmsnorm_quantize` lists.

    Returns:
        (BlockFP8 or MXFP8 of x's shape and dtype, sum [..., D]), and with return_normalized the
        normalized rows in x's dtype as a third.

    Raises:
        TypeError, ValueError, ImplementationUnavailable: As `rmsnorm_quantize`.

    Example:
        >>> from tilewright.ops import add_rmsnorm_quantize
        >>> q, total = add_rmsnorm_quantize(torch.ones(2, 4), torch.ones(2, 4), torch.ones(4))
        >>> total[0]
        tensor([2., 2., 2., 2.])
    """
    quantize.on_device("x", x)
    x, residual, weight = x.detach(), residual.detach(), weight.detach()
    bias = None if bias is None else bias.detach()
    run, into = ADD_RMSNORM_QUANTIZE.pick(implementation, x), _into(format, seed)
    outputs = run(x, residual, weight, bias, eps, offset, cast, return_normalized, into)
    q = _wrap(_of(outputs), x.shape, x.dtype, "the normalized x + residual", format)
    return (q, outputs.total, outputs.y) if return_normalized else (q, outputs.total)


def _into(format: str, seed: int | None, transpose: bool = False) -> FP8:
    return fp8.mx(seed, transpose) if format == "mxfp8" else FP8(*BLOCK, False, seed, transpose)


def _of(normalized: NormalizedCodes) -> Codes:
    return Codes(normalized.data, normalized.scale, None, None)


def _wrap(codes, shape, dtype, name, format) -> Any:
    if format == "mxfp8":
        return mxfp8.of_codes(codes, shape, dtype, name)
    return block_fp8.of_codes(codes, shape, BLOCK, dtype, name)


# ---- the definitions: the two ops in sequence


def silu_mul_quantize_eager(gate, up, into):
    return fp8.quantize_eager(quantize.as_3d(activation.act_mul_eager(gate, up)), into)


def rmsnorm_quantize_eager(x, residual, weight, bias, eps, offset, cast, keep, into):
    total = x if residual is None else sum_eager(x, residual)
    y = rmsnorm_eager(total, weight, bias, eps, offset, cast).to(x.dtype).contiguous()
    codes = fp8.quantize_eager(quantize.as_3d(y), into)
    return NormalizedCodes(codes.data, codes.scale, y, total)


# ---- fused implementations


class _Fused(NamedTuple):
    """The operators of one implementation, and the functions that call them.

    dtypes: those of weight and bias that rmsnorm's kernels read; others are cast to float32.
    """

    silu: Operator
    norm: Operator
    dtypes: tuple[torch.dtype, ...] = FLOAT

    def silu_mul(self, gate, up, into):
        rows = gate.shape[-2] if gate.dim() > 1 else 1
        if up is None:
            packed = activation.as_rows(gate)
            gate, up = packed.chunk(2, -1) if packed.shape[-1] else (packed, packed)
        return self.silu(activation.as_rows(gate), activation.as_rows(up), rows, into)

    def rmsnorm(self, x, residual, weight, bias, eps, offset, cast, keep, into):
        if weight.dtype not in self.dtypes:  # bias has weight's dtype
            weight, bias = weight.float(), None if bias is None else bias.float()
        # The llama cast rounds to the dtype of the norm's input, which is no rounding for a float32
        # residual stream.
        round_xhat = cast == "llama" and (residual is None or residual.dtype == x.dtype)
        return self.norm(
            x.contiguous(),
            None if residual is None else residual.contiguous(),
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            Norm(float(eps), float(offset), round_xhat),
            keep,
            into,
        )


@functools.cache
def _triton():
    from tilewright.kernels.fused_quantize import fused_quantize_triton as k

    return _Fused(
        operators.silu_mul_quantize.define("silu_mul_triton_quantize", k.silu_mul_quantize),
        operators.rmsnorm_quantize.define("rmsnorm_triton_quantize", k.rmsnorm_quantize),
    )


@functools.cache
def _cpp():
    return _Fused(
        operators.silu_mul_quantize.adopt("silu_mul_cpp_quantize"),
        operators.rmsnorm_quantize.adopt("rmsnorm_cpp_quantize"),
        (torch.float32, torch.bfloat16),
    )


# ---- the values that the results hold: an implementation's may differ by their op's contract, and
# a code by a step where a tie is that near; a scale in bfloat16 by 3 to 4 %. Normalized rows that
# are returned too are those of rmsnorm.


def _held_silu(gate, up=None, transpose=False, **options):
    y = activation.silu_mul(gate, up, implementation="eager")
    return [y, y.mT] if transpose else [y]


def _held_norm(x, weight, bias=None, offset=0.0, cast="llama", eps=1e-6, **options):
    return [rmsnorm(x, weight, eps, bias=bias, offset=offset, cast=cast, implementation="eager")]


def _held_add_norm(x, residual, weight, bias=None, offset=0.0, cast="llama", eps=1e-6, **options):
    parameters = {"bias": bias, "offset": offset, "cast": cast}
    return [add_rmsnorm(x, residual, weight, eps, **parameters, implementation="eager")[0]]


SILU_MUL_QUANTIZE = Op(
    "silu_mul_quantize",
    silu_mul_quantize,
    silu_mul_quantize_eager,
    quantize.implementations(
        lambda: _triton().silu_mul,
        lambda: _cpp().silu_mul,
        gate=from_kernels("fused_quantize.fused_quantize_triton", "silu_mul_gate"),
    ),
    SILU_CASES,
    judged=Judged(quantizes=_held_silu, detects={torch.bfloat16: {"out 1": 0.04}}),
    goals=cases.near_copy(85, "forward"),
)
RMSNORM_QUANTIZE = Op(
    "rmsnorm_quantize",
    rmsnorm_quantize,
    rmsnorm_quantize_eager,
    quantize.implementations(
        lambda: _triton().rmsnorm,
        lambda: _cpp().rmsnorm,
        gate=from_kernels("fused_quantize.fused_quantize_triton", "rmsnorm_gate"),
    ),
    NORM_CASES,
    judged=Judged(quantizes=_held_norm, detects={torch.bfloat16: {"out 1": 0.036, "out 2": 0.05}}),
    goals=cases.near_copy(85, "forward"),
)
ADD_RMSNORM_QUANTIZE = Op(
    "add_rmsnorm_quantize",
    add_rmsnorm_quantize,
    rmsnorm_quantize_eager,
    quantize.implementations(
        lambda: _triton().rmsnorm,
        lambda: _cpp().rmsnorm,
        gate=from_kernels("fused_quantize.fused_quantize_triton", "add_rmsnorm_gate"),
    ),
    ADD_NORM_CASES,
    judged=Judged(
        quantizes=_held_add_norm, detects={torch.bfloat16: {"out 1": 0.04, "out 3": 0.057}}
    ),
    goals=cases.near_copy(85, "forward"),
)
