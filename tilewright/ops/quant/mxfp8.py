"""MXFP8: float8_e4m3fn with one power-of-two scale per 32 consecutive elements of a row, an E8M0
byte b for 2^(b - 127), the input format of tensor cores of compute capability 10 (OCP Microscaling
Formats 1.0).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilewright import platform
from tilewright.core import checks
from tilewright.core.library import adopt, define, from_kernels
from tilewright.core.registry import Case, DispatchOn, Implementation, Judged, Op
from tilewright.ops import cases
from tilewright.ops.quant import aqn, quantize
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.block_cases import all_cases, draw, timed_cases
from tilewright.ops.quant.block_fp8 import STEP

BLOCK = 32
E8M0 = torch.float8_e8m0fnu
NAN = 255  # its byte


@dataclass(frozen=True)
class MXFP8(quantize.Quantized):
    """A tensor in MXFP8. Made by `quantize_mxfp8` or `MXFP8.from_safetensors`.

    data: float8_e4m3fn [..., C].   scale: float8_e8m0fnu [..., ceil(C / 32)], one per block, in
        rows (a product that needs them in tiles reorders them); an element is its code's value
        times its block's scale.   dtype: of the tensor that was quantized.
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
        return cls(data, quantize.scales(name, scale.view(E8M0)), dtype)


quantize.register(MXFP8, ("data", "scale"))


@checks.autocast("inputs")
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
        transpose: returns (q, that of x.mT) with the same seed, bit for bit as two calls would,
            from one read of x (eager: two): the operands of a layer's forward and of its backward.
            x has 2 dimensions or more.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        An MXFP8 of x's shape and dtype; with `transpose` a pair.

    Raises:
        TypeError, ValueError: Invalid arguments.
        ValueError: x is not finite (not checked on CUDA, which would synchronize: such a block's
            scale is NaN, byte 255, and its codes are unspecified).
        ImplementationUnavailable: A named implementation that cannot run here.

    Example:
        >>> from tilewright.ops import quantize_mxfp8
        >>> quantize_mxfp8(torch.tensor([448.0, 1.0])).scale.float()
        tensor([1.])

    Source: OCP Microscaling Formats (MX) Specification 1.0, section 5, but the exponent is rounded
    up, where section 6.3 rounds it down.
    """
    quantize.source(x)
    quantize.seed(seed)
    if not isinstance(transpose, bool):
        raise TypeError(f"transpose must be a bool, got {transpose!r}")
    if x.dim() == 0:
        raise ValueError("x must have at least 1 dimension, got a scalar")
    matrices = quantize.as_3d(x.detach(), least=1 + transpose)
    parts = QUANTIZE_MXFP8.pick(implementation, matrices)(matrices, seed, transpose)
    q = blocks_of(*parts[:2], x.shape, x.dtype)
    return (q, blocks_of(*parts[2:], x.mT.shape, x.dtype, checked=True)) if transpose else q


def blocks_of(data, scale, shape, dtype, name="x", *, checked=False) -> MXFP8:
    """Wraps an implementation's codes and scale bytes [matrices, rows, blocks].

    name: of the tensor that must be finite.
    checked: another tensor with the same values has been checked.
    """
    scale = scale if checked else quantize.finite(scale, name)
    return MXFP8(
        data.view(quantize.E4M3).view(shape), scale.view(E8M0).view(_scales_shape(shape)), dtype
    )


@checks.autocast("inputs")
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
        dtype: of the result: fp32 | bf16 | fp16 (fp64 with eager); default: that of the tensor that
            was quantized.
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
    quantize.instance(q, MXFP8)
    dtype = quantize.output_dtype(dtype, q.dtype)
    of_noise = aqn.arguments(noise)
    quantize.part("q.data", q.data, quantize.E4M3, q.shape, q.data)
    quantize.part("q.scale", q.scale, E8M0, _scales_shape(q.shape), q.data)
    run = DEQUANTIZE_MXFP8.pick(implementation, DispatchOn(q.data.device, dtype))
    data = q.data.contiguous().view(torch.uint8).view(_rows(q.shape), q.shape[-1])
    scale = q.scale.contiguous().view(torch.uint8).view(data.shape[0], -(-q.shape[-1] // BLOCK))
    return run(data, scale, dtype, *of_noise).view(q.shape)


def _rows(shape) -> int:
    return math.prod(shape[:-1])


def _scales_shape(shape) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // BLOCK))


# ---- the definitions


def quantize_eager(x, seed, transpose=False):
    if transpose:
        return *quantize_eager(x, seed), *quantize_eager(x.mT.contiguous(), seed)
    B, R, C = x.shape
    v = quantize.pad_to(x.float(), -1, BLOCK)
    blocks = v.view(B, R, v.shape[2] // BLOCK, BLOCK)
    # As bits, of which a NaN has the largest.
    most = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    # For m 2^e with 1 <= m < 2 the scale's exponent is e - 8, plus one where m > 1.75: then the sum
    # carries into the exponent.
    e = ((most + 0x1FFFFF >> 23) - 8).clamp_min(0).masked_fill(most >= 0x7F800000, NAN)
    scaled = (
        (blocks * (254 - e << 23).view(torch.float32)[..., None])
        .view(v.shape)[..., :C]
        .contiguous()
    )
    random = None if seed is None else quantize.philox(seed, x.numel(), x.device).view(B, R, C)
    return quantize.to_e4m3(scaled, random), e.to(torch.uint8)


def dequantize_eager(data, scale, dtype, alpha=0.0, *key):
    acc = torch.promote_types(dtype, torch.float32)
    factor = scale.view(E8M0).to(acc).repeat_interleave(BLOCK, 1)[:, : data.shape[1]]
    values = data.view(quantize.E4M3).to(acc) * factor
    if alpha:
        values = aqn.add_eager(values, alpha * STEP * factor, *key)
    return values.to(dtype)


# ---- fused implementations


def fake_quantize(x, seed):
    return (
        x.new_empty(x.shape, dtype=torch.uint8),
        x.new_empty((*x.shape[:-1], (x.shape[-1] + BLOCK - 1) // BLOCK), dtype=torch.uint8),
    )


def fake_both(x, seed):
    return *fake_quantize(x, seed), *fake_quantize(x.mT.contiguous(), seed)


def _fake_dequantize(data, scale, dtype, *noise):
    return data.new_empty(data.shape, dtype=dtype)


def _either(one, both):
    return lambda x, seed, transpose: (both if transpose else one)(x, seed)


@functools.cache
def _triton():
    from tilewright.kernels.fused_quantize import fused_quantize_triton as fused
    from tilewright.kernels.quant import quantize_triton as k

    return (
        _either(
            define("mxfp8_triton_quantize", k.mxfp8_quantize, fake_quantize),
            define("mxfp8_triton_quantize_both", fused.mxfp8_quantize_both, fake_both),
        ),
        define("mxfp8_triton_dequantize", k.mxfp8_dequantize, _fake_dequantize),
    )


@functools.cache
def _cpp():
    one, dequantize = quantize.of_extension("mxfp8", fake_quantize, _fake_dequantize)
    return _either(one, adopt("mxfp8_cpp_quantize_both", fake_both)), dequantize


# ---- cases


def _case(name, shape, quantized=False, noise=None, **options):
    def make(device, dtype, seed):
        x = draw(device, dtype, seed, shape)
        return (
            {"q": quantize_mxfp8(x, **options), "noise": noise}
            if quantized
            else {"x": x, **options}
        )

    return Case(name, make)


_COMPILED = (torch.float32, torch.bfloat16)
QUANTIZE_MXFP8 = Op(
    "quantize_mxfp8",
    quantize_mxfp8,
    quantize_eager,
    (
        Implementation(
            "triton", lambda: _triton()[0], platform.no_triton, gate=quantize.gates("mxfp8")
        ),
        Implementation("cpp", lambda: _cpp()[0], platform.no_cpp, ("cpu",), _COMPILED),
    ),
    (
        *all_cases(lambda x: {"x": x}, 8.25),
        _case("random", (5, 37), seed=1),
        _case("transpose", (40, 70), transpose=True),
        _case("transpose_experts", (2, 33, 48), transpose=True),
        _case("transpose_random", (2, 20, 36), transpose=True, seed=3),
        *timed_cases("transpose", 8.25, results=2, transpose=True),
    ),
    judged=Judged(exact=True),
    goals=cases.near_copy(85, "forward"),
)
DEQUANTIZE_MXFP8 = Op(
    "dequantize_mxfp8",
    dequantize_mxfp8,
    dequantize_eager,
    (
        Implementation(
            "triton",
            lambda: _triton()[1],
            platform.no_triton,
            gate=from_kernels("quant.quantize_triton", "mxfp8_dequantize_gate"),
        ),
        Implementation("cpp", lambda: _cpp()[1], platform.no_cpp, ("cpu",), _COMPILED),
    ),
    (
        *all_cases(lambda x: {"q": quantize_mxfp8(x)}, 8.25),
        _case("noise", (3, 5, 72), True, aqn.SOME),
        _case("noise_ragged", (5, 37), True, aqn.SOME),
    ),
    goals=cases.near_copy(90, "forward"),
)
