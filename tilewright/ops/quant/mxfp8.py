"""MXFP8: float8_e4m3fn with one power-of-two scale per 32 consecutive elements of a row, an E8M0
byte b for 2^(b - 127), the input format of tensor cores of compute capability 10 (OCP Microscaling
Formats 1.0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilewright.core import checks
from tilewright.core.library import from_kernels
from tilewright.core.registry import DispatchOn, Judged, Op
from tilewright.core.takes import takes
from tilewright.kernels.quant.operators import Codes
from tilewright.ops import cases
from tilewright.ops.quant import aqn, fp8, quantize, stored_scales
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.block_cases import (
    all_cases,
    dequantize_case,
    quantize_case,
    timed_cases,
)
from tilewright.ops.quant.fp8 import E8M0
from tilewright.ops.quant.fp8 import MX_BLOCK as BLOCK


@dataclass(frozen=True)
class MXFP8(quantize.Quantized):
    """A tensor in MXFP8. Made by `quantize_mxfp8` or `MXFP8.from_safetensors`.

    data: float8_e4m3fn [..., C].   scale: float8_e8m0fnu [..., ceil(C / 32)], one per block, in
        rows (a product that needs them in tiles reorders them); an element is its code's value
        times its block's scale.   dtype: the dtype of the tensor that was quantized.
    """

    data: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def to_safetensors(self, prefix: str = "weight") -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint in compressed-tensors' layout: `prefix`, and `prefix_scale`
        as bytes.
        """
        return {prefix: self.data, f"{prefix}_scale": self.scale.view(torch.uint8)}

    @classmethod
    def from_safetensors(
        cls,
        tensors: Mapping[str, torch.Tensor],
        prefix: str = "weight",
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> MXFP8:
        """The inverse of `to_safetensors`; scales may also be float8_e8m0fnu. Raises KeyError for a
        missing tensor, and TypeError or ValueError, naming the tensor, for inconsistent ones. Reads
        scales on the host.
        """
        name = f"{prefix}_scale"
        data, scale = quantize.key(tensors, prefix), quantize.key(tensors, name)
        scale = scale.view(torch.uint8) if scale.dtype == E8M0 else scale
        quantize.part(prefix, data, quantize.E4M3, data.shape, data)
        quantize.part(name, scale, torch.uint8, _scales_shape(data.shape), data)
        scale = scale.view(E8M0)  # which has no 0
        stored_scales.check(name, scale, lambda zero: zero)
        return cls(data, scale, dtype)


quantize.register(MXFP8, ("data", "scale"))


@checks.autocast("inputs")
@takes(x="float [..., C]", seed=quantize.SEED, transpose="bool")
def quantize_mxfp8(
    x: torch.Tensor,
    *,
    seed: int | None = None,
    transpose: bool = False,
    implementation: str = "auto",
) -> MXFP8 | tuple[MXFP8, MXFP8]:
    """Quantizes x to MXFP8; with `transpose` its transpose too.

    A block's scale is the least power of two s with (largest magnitude) / s <= 448, so that nothing
    saturates, but at least 2^-127, also for a block of zeros; codes are those of x / s in float32.
    The scale comes from the bits of the largest magnitude by integer operations. 1 / s is a normal
    number (s is at most 2^120), so x / s is exact, or below 2^-126, where its code is 0 however it
    is rounded. Not differentiable: x is detached. Deterministic, and the same in every
    implementation.

    Args:
        x: [..., C] fp32 | bf16 | fp16 (fp64 with eager, through fp32); finite. C need not be a
            multiple of 32.
        seed: None rounds to nearest, ties to even. An int selects stochastic rounding, as in
            `quantize_nvfp4`.
        transpose: returns (q, q of x.mT) with the same seed, bit for bit as two calls would,
            from one read of x (eager: two): the operands of a layer's forward and of its backward.
            x has 2 dimensions or more.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        An MXFP8 of x's shape and dtype; with `transpose` a pair.

    Raises:
        TypeError, ValueError: Invalid arguments.
        ValueError: x is not finite (not checked on CUDA, where a check would synchronize: such a
            block's scale is NaN, byte 255, and its codes are unspecified).
        ImplementationUnavailable: A named implementation that cannot run here.

    Example:
        >>> from tilewright.ops import quantize_mxfp8
        >>> quantize_mxfp8(torch.tensor([448.0, 1.0])).scale.float()
        tensor([1.])

    Source: OCP Microscaling Formats (MX) Specification 1.0, section 5, but the exponent is rounded
    up, where section 6.3 rounds it down.
    """
    quantize.on_device("x", x)
    matrices = quantize.as_3d(x.detach(), least=1 + transpose)
    codes = QUANTIZE_MXFP8.pick(implementation, matrices)(matrices, fp8.mx(seed, transpose))
    return of_codes(codes, x.shape, x.dtype)


def of_codes(
    codes: Codes, shape, dtype: torch.dtype, name: str = "x"
) -> MXFP8 | tuple[MXFP8, MXFP8]:
    """An implementation's codes, whose scales are bytes [matrices, rows, blocks], and their
    transpose if they have it.   name: the name of the tensor that must be finite.
    """

    def wrap(data, scale, shape):
        scale = scale.view(E8M0).view(_scales_shape(shape))
        return MXFP8(data.view(quantize.E4M3).view(shape), scale, dtype)

    codes = codes._replace(scale=quantize.finite(codes.scale, name))
    return quantize.wrapped(codes, shape, wrap)


@checks.autocast("inputs")
@takes(q="an MXFP8", dtype=quantize.OUTPUTS, noise="an AQN")
def dequantize_mxfp8(
    q: MXFP8,
    *,
    dtype: torch.dtype | None = None,
    noise: AQN | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """Dequantizes q: value * scale in float32, rounded to the result's dtype.

    Not differentiable. Deterministic.

    Args:
        q: the result of `quantize_mxfp8` or `MXFP8.from_safetensors`.
        dtype: the result's dtype: fp32 | bf16 | fp16 (fp64 with eager); default: the dtype of the
            tensor that was quantized.
        noise: adds alpha * n * step in float32, before the rounding, where n is the `aqn_noise` of
            q.shape and step = 0.125 * scale, the gap above 1. None, or an alpha of 0, adds nothing.
        implementation: "auto", or one that `tilewright explain dequantize_mxfp8` lists.

    Returns:
        A contiguous tensor of q.shape.

    Raises:
        TypeError, ValueError: q is inconsistent, or an argument invalid.
        ImplementationUnavailable: as `quantize_mxfp8`.

    Example:
        >>> from tilewright.ops import dequantize_mxfp8, quantize_mxfp8
        >>> dequantize_mxfp8(quantize_mxfp8(torch.tensor([448.0, 1.0])))
        tensor([448.,   1.])
    """
    dtype = quantize.output_dtype(q, dtype)
    drawn = aqn.arguments(noise)
    quantize.part("q.data", q.data, quantize.E4M3, q.shape, q.data)
    quantize.part("q.scale", q.scale, E8M0, _scales_shape(q.shape), q.data)
    run = DEQUANTIZE_MXFP8.pick(implementation, DispatchOn(q.data.device, dtype))
    rows, C = math.prod(q.shape[:-1]), q.shape[-1]
    data = q.data.contiguous().view(torch.uint8).view(1, rows, C)
    scale = q.scale.contiguous().view(torch.uint8).view(1, rows, -(-C // BLOCK))
    return run(data, scale, 1, BLOCK, dtype, drawn).view(q.shape)


def _scales_shape(shape) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // BLOCK))


QUANTIZE_MXFP8 = Op(
    "quantize_mxfp8",
    quantize_mxfp8,
    fp8.quantize_eager,
    fp8.quantizers("mxfp8"),
    (
        *all_cases(lambda x: {"x": x}, 8.25),
        quantize_case("random", (5, 37), seed=1),
        quantize_case("transpose", (40, 70), transpose=True),
        quantize_case("transpose_experts", (2, 33, 48), transpose=True),
        quantize_case("transpose_random", (2, 20, 36), transpose=True, seed=3),
        *timed_cases("transpose", 8.25, results=2, transpose=True),
    ),
    judged=Judged(exact=True),
    goals=cases.near_copy(85, "forward"),
)
DEQUANTIZE_MXFP8 = Op(
    "dequantize_mxfp8",
    dequantize_mxfp8,
    fp8.dequantize_eager,
    fp8.dequantizers(from_kernels("quant.quantize_triton", "mxfp8_dequantize_gate")),
    (
        *all_cases(lambda x: {"q": quantize_mxfp8(x)}, 8.25),
        dequantize_case(quantize_mxfp8, "noise", (3, 5, 72), aqn.SOME),
        dequantize_case(quantize_mxfp8, "noise_ragged", (5, 37), aqn.SOME),
    ),
    goals=cases.near_copy(90, "forward"),
)
