"""NF4: 4-bit codes for the quantiles of a normal distribution, with one scale per block, in
bitsandbytes' storage.

QLoRA, arXiv 2305.14314. Blocks are runs of the whole tensor's row-major elements, whatever its
shape.
"""

from __future__ import annotations

import functools
import math

import torch

from tilewright.core import checks
from tilewright.core.library import declare, from_kernels
from tilewright.core.registry import Case, Cost, DispatchOn, Goal, Judged, Op
from tilewright.core.takes import takes
from tilewright.kernels.quant import operators
from tilewright.kernels.quant.nf4_tables import CODES
from tilewright.ops import cases
from tilewright.ops.quant import aqn, quantize
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.block_cases import shapes
from tilewright.ops.quant.nf4_format import (
    BLOCKS,
    NESTED_BLOCK,
    NF4,
    bound_table,
    check_parts,
    code_table,
    scale_table,
)

STEP = CODES[8] / 2  # of noise, in units of the scale: half the narrowest gap
ZERO = 7  # the code of 0, which pads an odd number of elements
LEAST = 1e-38  # lower bound of a scale as a divisor


@checks.autocast("inputs")
@takes(x="float", double_quant="bool", block_size=BLOCKS)
def quantize_nf4(
    x: torch.Tensor,
    *,
    double_quant: bool = False,
    block_size: int = 64,
    implementation: str = "auto",
) -> NF4:
    """Quantizes x to NF4, with the same bytes as bitsandbytes.

    A scale is the block's largest magnitude m; a code is that of the value nearest to x * (1 / m),
    or to x / m in a shorter last block, ties to the lower, all in float32. The scales' 8-bit codes
    are the nearest on a CUDA device; on a CPU those of the nearest of 65,536 even steps, since
    bitsandbytes uses a lookup table there. Not differentiable: x is detached. Deterministic, and
    the same in every implementation.

    Args:
        x: any shape, fp32 | bf16 | fp16 (fp64 with eager, through fp32); finite. Its row-major
            elements are split into blocks; the last may be shorter.
        double_quant: scales are quantized to 8 bits, in blocks of 256, after subtracting their
            mean.
        block_size: 32 to 4096, a power of two.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        An NF4 of x's shape and dtype.

    Raises:
        TypeError, ValueError: Invalid arguments.
        ValueError: x is not finite (not checked on CUDA, where a check would synchronize: such a
            block's scale is not finite).
        ImplementationUnavailable: A named implementation that cannot run here.

    Example:
        >>> from tilewright.ops import dequantize_nf4, quantize_nf4
        >>> dequantize_nf4(quantize_nf4(torch.tensor([-2.0, 0.0, 2.0])))
        tensor([-2.,  0.,  2.])
    """
    quantize.on_device("x", x)
    flat = x.detach().reshape(-1).contiguous()
    data, absmax = QUANTIZE_NF4.pick(implementation, flat)(flat, block_size)
    absmax = quantize.finite(absmax)
    nested, offset = None, None
    if double_quant:
        absmax, nested, offset = _nest(absmax)
    return NF4(data, absmax, nested, offset, tuple(x.shape), x.dtype, block_size)


@checks.autocast("inputs")
@takes(q="an NF4", dtype=quantize.OUTPUTS, noise="an AQN")
def dequantize_nf4(
    q: NF4,
    *,
    dtype: torch.dtype | None = None,
    noise: AQN | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """Dequantizes q: code values times scales in float32, rounded to the result's dtype.

    Not differentiable. Deterministic.

    Args:
        q: the result of `quantize_nf4` or `NF4.from_safetensors`.
        dtype: the result's dtype: fp32 | bf16 | fp16 (fp64 with eager); default: the dtype of the
            tensor that was quantized.
        noise: adds alpha * n * step in float32, before the rounding, where n is the `aqn_noise` of
            q.shape and step = 0.5 * 0.0795803 * scale, half the gap next to 0. None, or an alpha of
            0, adds nothing.
        implementation: "auto", or one that `tilewright explain dequantize_nf4` lists.

    Returns:
        A contiguous tensor of q.shape.

    Raises:
        TypeError, ValueError: q is inconsistent, or an argument invalid.
        ImplementationUnavailable: as `quantize_nf4`.

    Example:
        >>> from tilewright.ops import dequantize_nf4, quantize_nf4
        >>> dequantize_nf4(quantize_nf4(torch.tensor([-2.0, 0.0, 2.0])), dtype=torch.bfloat16).dtype
        torch.bfloat16
    """
    dtype = quantize.output_dtype(q, dtype)
    drawn = aqn.arguments(noise)
    checks.choice("q.block_size", q.block_size, BLOCKS)
    n = math.prod(q.shape)
    nested = q.offset is not None
    scales = [q.absmax, q.nested_absmax, q.offset] if nested else [q.absmax]
    check_parts(q.data, scales, n, q.block_size)
    table = scale_table(q.data) if nested else None
    run = DEQUANTIZE_NF4.pick(implementation, DispatchOn(q.data.device, dtype))
    out = run(
        q.data.contiguous(),
        q.absmax.contiguous(),
        q.nested_absmax,
        table,
        q.offset,
        n,
        q.block_size,
        dtype,
        drawn,
    )
    return out.view(q.shape)


# ---- the definitions


def quantize_eager(x, block):
    n = x.shape[0]
    v = x.float()
    whole = n // block * block
    absmax = quantize.pad_to(v, -1, block).view(-1, block).abs().amax(1)
    scaled = v[:whole].view(-1, block) * (1.0 / absmax[: whole // block].clamp_min(LEAST))[:, None]
    if n > whole:
        absmax = torch.cat([absmax[:-1], absmax[-1:].clamp_min(LEAST)])
        scaled = torch.cat([scaled.view(-1), v[whole:] / absmax[-1]])
    codes = torch.bucketize(scaled.view(-1), bound_table(x)).to(torch.uint8)
    if n % 2:
        codes = torch.cat([codes, codes.new_full((1,), ZERO)])
    return codes[::2] << 4 | codes[1::2], absmax


def dequantize_eager(data, absmax, nested_absmax, table, offset, n, block, dtype, noise):
    acc = torch.promote_types(dtype, torch.float32)
    codes = torch.stack([data >> 4, data & 15], -1).view(-1)[:n].long()
    if offset is not None:
        scale = table.to(acc)[absmax.long()]
        absmax = scale * nested_absmax.to(acc).repeat_interleave(NESTED_BLOCK)[
            : scale.shape[0]
        ] + offset.to(acc)
    scale = absmax.to(acc).repeat_interleave(block)[:n]
    values = code_table(data).to(acc)[codes] * scale
    return aqn.add_eager(values, scale, STEP, noise).to(dtype)


@declare
def _nested(absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> codes, scales of blocks of codes, the mean."""
    nested = absmax.new_empty(-(-absmax.shape[0] // NESTED_BLOCK))
    return torch.empty_like(absmax, dtype=torch.uint8), nested, absmax.new_empty(())


def _nest_scales(absmax):
    """Double quantization. A 64th of the work, so all implementations use torch."""
    n = absmax.shape[0]
    if n == 0:
        return absmax.new_empty(0, dtype=torch.uint8), absmax.new_empty(0), absmax.new_zeros(())
    offset = absmax.mean()
    blocks = quantize.pad_to(absmax - offset, -1, NESTED_BLOCK).view(-1, NESTED_BLOCK)
    most = blocks.abs().amax(1)
    scaled = (blocks * (1.0 / most.clamp_min(LEAST))[:, None]).clamp(-1, 1)
    table = scale_table(absmax)
    bounds = (table[:-1] + table[1:]) / 2
    if absmax.is_cuda:
        codes = torch.bucketize(scaled, bounds)
    else:
        step = ((scaled + 1.0) * 32767.5 + 0.5).int()  # bitsandbytes' table has 65,536 entries
        codes = torch.bucketize(step.double() * (2.0 / 65535.0) - 1.0, bounds.double())
        codes = torch.where(most[:, None] > 0, codes, 0)
    return codes.to(torch.uint8).view(-1)[:n].clone(), most, offset


# An operator: a compiler that computes the mean in another order would change bytes.
_nest = _nested.define("nf4_nest", _nest_scales, plain=_nest_scales)


# ---- fused implementations


@functools.cache
def _triton():
    from tilewright.kernels.quant import quantize_triton as k

    return quantize.Fused(
        operators.nf4_quantize.define("nf4_triton_quantize", k.nf4_quantize),
        operators.nf4_dequantize.define("nf4_triton_dequantize", k.nf4_dequantize),
    )


@functools.cache
def _cpp():
    return quantize.Fused(
        operators.nf4_quantize.adopt("nf4_cpp_quantize"),
        operators.nf4_dequantize.adopt("nf4_cpp_dequantize"),
    )


# ---- cases


def _draw(device, dtype, seed, shape):
    """Normal values with blocks of zeros and blocks of very small values."""
    x = torch.randn(shape, device=device, generator=cases.generator(device, seed))
    flat = x.view(-1)
    if flat.numel() > 96:
        flat[:96] = 0
    flat[200:300] *= 1e-20
    return x.to(dtype)


_SMALL = {
    "ragged": (7, 33),
    "matrix": (16, 128),
    "one": (1,),
    "scalar": (),
    "no_elements": (0, 5),
    "half": (3, 96),
}


def _cases(double, make, listed=None):
    """make: (x, whether scales are quantized) -> arguments."""

    def case(name, shape, tags):
        n = math.prod(shape)
        return Case(
            f"{name} nested" if double else name,
            lambda device, dtype, seed: make(_draw(device, dtype, seed, shape), double),
            lambda itemsize: Cost(n * itemsize + n // 2 + n * 4 // 64, 0, 0, 0),
            tags,
        )

    return [case(*each) for each in listed or shapes(_SMALL)]


def _options(x, double):
    return {"x": x, "double_quant": double, "block_size": 64}


def _codes(x, double):
    return {"q": quantize_nf4(x, double_quant=double)}


def _noisy(x, double):
    return {**_codes(x, double), "noise": aqn.SOME}


QUANTIZE_NF4 = Op(
    "quantize_nf4",
    quantize_nf4,
    quantize_eager,
    quantize.implementations(
        lambda: _triton().quantize,
        lambda: _cpp().quantize,
        gate=from_kernels("quant.quantize_triton", "nf4_quantize_gate"),
    ),
    (*_cases(False, _options), *_cases(True, _options)),
    judged=Judged(exact=True),
)
DEQUANTIZE_NF4 = Op(
    "dequantize_nf4",
    dequantize_nf4,
    dequantize_eager,
    quantize.implementations(
        lambda: _triton().dequantize,
        lambda: _cpp().dequantize,
        tunables=lambda: (from_kernels("quant.quantize_triton", "NF4_DEQUANTIZE")(),),
    ),
    (
        *_cases(False, _codes),
        *_cases(True, _codes),
        *_cases(False, _noisy, [("noise", (3, 7, 33), cases.CONTRACT)]),
        *_cases(True, _noisy, [("noise", (5, 96), cases.CONTRACT)]),
    ),
    goals=(
        *cases.near_copy(90, "forward"),
        Goal(cases.HOPPER, "forward", "over bitsandbytes", at_least=1.2),
        Goal("EPYC", "forward", "over bitsandbytes", at_least=3),
    ),
)
