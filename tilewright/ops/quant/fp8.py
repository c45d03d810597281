"""What block-scaled FP8 and MXFP8 have in common: float8_e4m3fn codes, and a scale per block.
MXFP8's blocks are 1 x 32, and its scales powers of two: E8M0 bytes b for 2^(b - 127).
"""

from __future__ import annotations

import functools

import torch

from tilewright.kernels.quant import operators
from tilewright.kernels.quant.operators import FP8, Codes
from tilewright.ops.quant import aqn, quantize

MX_BLOCK = 32
E8M0 = torch.float8_e8m0fnu
NAN = 255  # its byte
STEP = 0.125  # of noise, in units of the scale
LEAST = 2.0**-100  # lower bound of a block's largest magnitude: its scale's inverse is finite


def scales_shape(shape, rows: int, columns: int) -> tuple[int, ...]:
    return (*shape[:-2], *(-(-n // rows) for n in shape[-2:-1]), -(-shape[-1] // columns))


# ---- the definitions


def quantize_eager(x, fp8):
    rows, columns, mx, seed, transpose = fp8
    if transpose:
        return quantize.both(lambda t: quantize_eager(t, fp8._replace(transpose=False)), x)
    B, R, C = x.shape
    v = quantize.pad_to(quantize.pad_to(x.float(), -1, columns), -2, rows)
    blocks = v.view(B, v.shape[1] // rows, rows, v.shape[2] // columns, columns)
    scale, inverse = (_powers if mx else _scales)(blocks)
    scaled = (blocks * scale[:, :, None, :, None]).view(v.shape)[:, :R, :C]
    random = None if seed is None else quantize.philox(seed, x.numel(), x.device).view(B, R, C)
    return Codes(quantize.to_e4m3(scaled.contiguous(), random), inverse, None, None)


def _scales(blocks):
    """The factor that each block is multiplied by, and its inverse."""
    most = blocks.abs().amax((2, 4))
    floor = most.clamp_min(LEAST)
    scale = torch.where(most == 0, 1.0, floor.reciprocal() * 448.0)
    return scale, torch.where(most == 0, 1.0, quantize.quotient(floor, 448.0))


def _powers(blocks):
    # As bits, of which a NaN has the largest.
    most = (blocks.view(torch.int32) & 0x7FFFFFFF).amax((2, 4))
    # For m 2^e with 1 <= m < 2 the scale's exponent is e - 8, plus one where m > 1.75: then the sum
    # carries into the exponent.
    e = ((most + 0x1FFFFF >> 23) - 8).clamp_min(0).masked_fill(most >= 0x7F800000, NAN)
    return (254 - e << 23).view(torch.float32), e.to(torch.uint8)


def dequantize_eager(data, scale, rows, columns, dtype, noise):
    acc = torch.promote_types(dtype, torch.float32)
    _, R, C = data.shape
    scale = (scale.view(E8M0) if scale.dtype == torch.uint8 else scale).to(acc)
    factor = scale.repeat_interleave(rows, 1)[:, :R].repeat_interleave(columns, 2)[:, :, :C]
    values = data.view(quantize.E4M3).to(acc) * factor
    return aqn.add_eager(values, factor, STEP, noise).to(dtype)


# ---- fused implementations


@functools.cache
def load_triton() -> quantize.Fused:
    from tilewright.kernels.fused_quantize import fused_quantize_triton as fused
    from tilewright.kernels.quant import quantize_triton as k

    return quantize.Fused(
        operators.fp8_quantize.define("fp8_triton_quantize", fused.fp8_quantize),
        operators.fp8_dequantize.define("fp8_triton_dequantize", k.fp8_dequantize),
    )


@functools.cache
def load_cpp() -> quantize.Fused:
    return quantize.Fused(
        operators.fp8_quantize.adopt("fp8_cpp_quantize"),
        operators.fp8_dequantize.adopt("fp8_cpp_dequantize"),
    )


def quantizers(format: str):
    """The implementations of `quantize_<format>`."""
    return quantize.implementations(
        lambda: load_triton().quantize, lambda: load_cpp().quantize, gate=quantize.gates(format)
    )


def dequantizers(gate):
    """The implementations of a format's `dequantize`."""
    return quantize.implementations(
        lambda: load_triton().dequantize, lambda: load_cpp().dequantize, gate=gate
    )


def mx(seed: int | None, transpose: bool) -> FP8:
    """The options of MXFP8."""
    return FP8(1, MX_BLOCK, True, seed, transpose)
