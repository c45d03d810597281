"""NVFP4: 4-bit floats (e2m1), one float8_e4m3fn scale per block of 16 along the last dimension, and
one float32 scale per tensor.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from tilewright.core import checks
from tilewright.core.library import declare, from_kernels
from tilewright.core.registry import Case, DispatchOn, Goal, Judged, Op
from tilewright.core.takes import takes
from tilewright.kernels.quant import operators
from tilewright.kernels.quant.operators import Codes, NVFP4Options
from tilewright.ops import cases
from tilewright.ops.quant import aqn, quantize
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.block_cases import (
    all_cases,
    dequantize_case,
    draw,
    quantize_case,
    timed_cases,
)
from tilewright.ops.quant.hadamard import SIZES, hadamard_eager
from tilewright.ops.quant.nvfp4_format import BLOCK, NVFP4

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Lower bounds of scales, so that their inverses and the inverses of products with block scales are
# finite in float32.
LEAST, LEAST_BLOCK = 2.0**-112, 2.0**-9  # the latter is e4m3's smallest number
STEP = 0.5  # of noise, in units of the scale


_values = quantize.constant(
    "nvfp4_values", lambda: torch.tensor((*VALUES, *(-v for v in VALUES))), 16
)


@checks.autocast("inputs")
@takes(
    "x: C % hadamard == 0",
    x="float [..., C]",
    square="bool",
    global_scale="float32 []",
    seed=quantize.SEED,
    hadamard=SIZES,
    hadamard_seed=quantize.SEED,
    transpose="bool",
)
def quantize_nvfp4(
    x: torch.Tensor,
    *,
    square: bool = False,
    global_scale: torch.Tensor | None = None,
    seed: int | None = None,
    hadamard: int | None = None,
    hadamard_seed: int | None = None,
    transpose: bool = False,
    implementation: str = "auto",
) -> NVFP4 | tuple[NVFP4, NVFP4]:
    """Quantizes x, or its Hadamard transform, to NVFP4; with `transpose` its transpose too.

    Computed in float32. With m a block's largest magnitude: scale = e4m3(m / 6 / global_scale), at
    least e4m3's smallest positive number unless m is 0, and then 0; codes are those of
    x * (1 / global_scale / scale), which compensates for the rounding of the scale. Magnitudes
    above 6 saturate at 6. Not differentiable: x is detached. Deterministic, and the same in every
    implementation.

    Args:
        x: [..., C] fp32 | bf16 | fp16 (fp64 with eager, through fp32), any strides (triton copies
            no transposed view); finite, as is its transform. C need not be a multiple of 16.
        square: one scale per 16 x 16 block of the last two dimensions, so that the transpose has
            the same values; it is stored for each of the block's rows.
        global_scale: float32 [], to share among tensors; default: (largest magnitude of x) / 2688,
            or 1 if that is 0.
        seed: None rounds to nearest, ties to even. An int selects stochastic rounding, unbiased for
            x / scale: element i (row-major) takes word i % 4 of Philox4x32-10 with counter i // 4
            and key seed. Block scales are always rounded to nearest.
        hadamard: 16 or 32 quantizes `hadamard(x.float(), hadamard, seed=hadamard_seed)` instead of
            x: in float32, not rounded to x's dtype in between, and never written to memory. C must
            be a multiple of it. `dequantize_nvfp4` then gives the transform;
            tilewright.ops.hadamard with inverse=True undoes it.
        hadamard_seed: the seed of the transform's signs, as in `hadamard`; None without a
            transform.
        transpose: returns (q, q of x.mT) with the same options, bit for bit as two calls would,
            from one read of x after that for the largest magnitude: a layer's forward needs one,
            its backward the other. x has 2 dimensions or more. Not with hadamard, since the
            transforms of the two differ.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        An NVFP4 of x's shape and dtype; with `transpose` a pair.

    Raises:
        TypeError, ValueError: Invalid arguments.
        ValueError: x is not finite (not checked on CUDA, where a check would synchronize:
            global_scale is then not finite).
        ImplementationUnavailable: A named implementation that cannot run here.

    Example:
        >>> from tilewright.ops import dequantize_nvfp4, quantize_nvfp4
        >>> dequantize_nvfp4(quantize_nvfp4(torch.tensor([6.0, -3.0, 0.5])))
        tensor([ 6.0000, -3.0000,  0.5000])
    """
    quantize.on_device("x", x)
    if hadamard is not None and transpose:
        raise ValueError(
            f"transpose must be False with a hadamard of {hadamard}: transforms of x and of its "
            "transpose differ; quantize x.mT by itself"
        )
    if hadamard is None and hadamard_seed is not None:
        raise ValueError(f"hadamard_seed must be None without hadamard, got {hadamard_seed!r}")
    if x.dim() > 1:  # not `as_3d`, which copies a transposed view
        matrices = x.detach().reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    else:
        matrices = quantize.as_3d(x.detach(), least=1 + (square or transpose))
    run = QUANTIZE_NVFP4.pick(implementation, matrices)
    options = NVFP4Options(square, seed, hadamard or 0, hadamard_seed, transpose)
    total, codes = run(matrices, global_scale, options)

    def wrap(data, scale, shape):
        return NVFP4(
            data.view(*shape[:-1], data.shape[-1]),
            scale.view(quantize.E4M3).view(*shape[:-1], scale.shape[-1]),
            total,
            tuple(shape),
            x.dtype,
        )

    return quantize.wrapped(codes, x.shape, wrap)


@checks.autocast("inputs")
@takes(q="an NVFP4", dtype=quantize.OUTPUTS, noise="an AQN")
def dequantize_nvfp4(
    q: NVFP4,
    *,
    dtype: torch.dtype | None = None,
    noise: AQN | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """Dequantizes q: value * (scale * global_scale) in float32, rounded to the result's dtype.

    Not differentiable. Deterministic.

    Args:
        q: the result of `quantize_nvfp4` or `NVFP4.from_safetensors`.
        dtype: the result's dtype: fp32 | bf16 | fp16 (fp64 with eager); default: the dtype of the
            tensor that was quantized.
        noise: adds alpha * n * step in float32, before the rounding, where n is the `aqn_noise` of
            q.shape and step = 0.5 * scale * global_scale, the gap next to 0. None, or an alpha of
            0, adds nothing.
        implementation: "auto", or one that `tilewright explain dequantize_nvfp4` lists.

    Returns:
        A contiguous tensor of q.shape.

    Raises:
        TypeError, ValueError: q is inconsistent, or an argument invalid.
        ImplementationUnavailable: as `quantize_nvfp4`.

    Example:
        >>> from tilewright.ops import dequantize_nvfp4, quantize_nvfp4
        >>> dequantize_nvfp4(quantize_nvfp4(torch.ones(16)), dtype=torch.bfloat16).dtype
        torch.bfloat16
    """
    dtype = quantize.output_dtype(q, dtype)
    drawn = aqn.arguments(noise)
    *lead, C = q.shape
    quantize.part("q.data", q.data, torch.uint8, (*lead, -(-C // 2)), q.data)
    quantize.part("q.scale", q.scale, quantize.E4M3, (*lead, -(-C // BLOCK)), q.data)
    quantize.part("q.global_scale", q.global_scale, torch.float32, (), q.data)
    rows = math.prod(lead)
    run = DEQUANTIZE_NVFP4.pick(implementation, DispatchOn(q.data.device, dtype))
    out = run(
        q.data.contiguous().view(rows, -(-C // 2)),
        q.scale.contiguous().view(torch.uint8).view(rows, -(-C // BLOCK)),
        q.global_scale,
        C,
        dtype,
        drawn,
    )
    return out.view(q.shape)


@declare
def _magnitude(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((), dtype=torch.float32)


def _largest_of(x):
    """The largest magnitude in float32; NaN if there is one."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    # PyTorch copies what is not contiguous.
    low, high = (x.mT if x.mT.is_contiguous() else x).aminmax()
    return torch.maximum(-low.float(), high.float()).abs()  # abs: -0.0 is no largest magnitude


_largest = _magnitude.define("largest_magnitude", _largest_of, plain=_largest_of)


class Scale(NamedTuple):
    """A tensor's largest magnitude, NaN if it has a NaN, and its scale; both [] in float32."""

    most: torch.Tensor
    total: torch.Tensor


@declare
def _scale(
    x: torch.Tensor, given: torch.Tensor | None, hadamard: int, hadamard_seed: int | None
) -> Scale:
    """The scale of x [B, R, C] or of its transform.   given: the scale of a finite x."""
    return Scale(*(x.new_empty((), dtype=torch.float32) for _ in range(2)))


# ---- the definitions


def quantize_eager(x, global_scale, options):
    square, seed, hadamard, hadamard_seed, transpose = options
    if transpose:
        one = options._replace(transpose=False)
        return quantize.both(lambda t: quantize_eager(t, global_scale, one), x)
    if hadamard:
        x = hadamard_eager(x.float(), hadamard, hadamard_seed, False)
    B, R, C = x.shape
    v = quantize.pad_to(x.float(), -1, BLOCK)
    blocks = v.view(B, R, v.shape[2] // BLOCK, BLOCK)
    most = blocks.abs().amax(3)
    if square:
        tall = quantize.pad_to(most, -2, BLOCK)
        tall = tall.view(B, tall.shape[1] // BLOCK, BLOCK, most.shape[2]).amax(2)
        most = tall.repeat_interleave(BLOCK, 1)[:, :R]
    exact_scale = (quantize.quotient(most, 6.0) / global_scale).clamp_min(LEAST_BLOCK)
    scale = torch.where(most > 0, quantize.to_e4m3(exact_scale), 0).to(torch.uint8)
    stored = scale.view(quantize.E4M3).float()
    inverse = torch.where(stored > 0, (1.0 / global_scale) / stored, 0.0)
    random = None
    if seed is not None:
        random = quantize.philox(seed, x.numel(), x.device).view(B, R, C)
        random = quantize.pad_to(random, -1, BLOCK).view(blocks.shape)
    codes = quantize.to_e2m1(blocks * inverse[..., None], random).view(v.shape)[:, :, :C]
    codes = quantize.pad_to(codes, -1, 2)
    return Codes(codes[..., ::2] | codes[..., 1::2] << 4, scale, None, None)


def largest_eager(x, hadamard, hadamard_seed):
    return _largest(hadamard_eager(x.float(), hadamard, hadamard_seed, False))


def scale_eager(most, given):
    """The scale of a tensor by its largest magnitude, or what is given, for a finite one."""
    if given is None:
        return torch.where(most == 0, 1.0, quantize.quotient(most, 2688.0).clamp_min(LEAST))
    return given * torch.where(most.isfinite(), 1.0, most)  # keeps a non-finite x visible


def _composed_scale(largest):
    """`scale_of` of `_whole`.   largest: computes the largest magnitude of a transform."""

    def scale_of(x, given, options, name):
        hadamard = options.hadamard
        most = largest(x, hadamard, options.hadamard_seed) if hadamard else _largest(x)
        return scale_eager(quantize.finite(most, name), given)

    return scale_of


def _fused_scale(operator):
    """`scale_of` of `_whole`."""

    def scale_of(x, given, options, name):
        most, total = operator(x, given, options.hadamard, options.hadamard_seed)
        if total.is_cuda:
            return total
        # In compiled code a check takes place only if its result is used.
        return torch.where(quantize.finite(most, name) >= 0, total, most)

    return scale_of


def _whole(codes_of, scale_of, readable=lambda x, transpose: x.contiguous()):
    """Composes the public function's two steps: the tensor's scale, then codes and block scales.

    scale_of: (x, the scale that is given or None, options, x's name in errors, or None where x is
        not checked) -> the scale.
    readable: (x [B, R, C] of any strides, whether it is transposed) -> x as both steps take it.
    """

    def run(x, global_scale, options, name="x"):
        x = readable(x, options.transpose)
        total = scale_of(x, global_scale, options, name)
        return total, codes_of(x, total, options)

    return run


def dequantize_eager(data, scale, global_scale, C, dtype, noise):
    acc = torch.promote_types(dtype, torch.float32)
    codes = (
        torch.stack([data & 15, data >> 4], -1).view(data.shape[0], 2 * data.shape[1])[:, :C].long()
    )
    factor = scale.view(quantize.E4M3).to(acc) * global_scale.to(acc)
    factor = factor.repeat_interleave(BLOCK, 1)[:, :C]
    values = _values(data).to(acc)[codes] * factor
    return aqn.add_eager(values, factor, STEP, noise).to(dtype)


# ---- fused implementations


@functools.cache
def _triton():
    from tilewright.kernels.fused_quantize import fused_quantize_triton as fused
    from tilewright.kernels.quant import quantize_triton as k

    return quantize.Fused(
        _whole(
            operators.nvfp4_quantize.define("nvfp4_triton_quantize", fused.nvfp4_quantize),
            _fused_scale(_scale.define("nvfp4_triton_scale", fused.nvfp4_scale)),
            fused.readable,
        ),
        operators.nvfp4_dequantize.define("nvfp4_triton_dequantize", k.nvfp4_dequantize),
    )


@functools.cache
def _cpp():
    return quantize.Fused(
        _whole(
            operators.nvfp4_quantize.adopt("nvfp4_cpp_quantize"),
            _composed_scale(operators.nvfp4_largest.adopt("nvfp4_cpp_largest")),
        ),
        operators.nvfp4_dequantize.adopt("nvfp4_cpp_dequantize"),
    )


def _turned_case(name, shape, **options):
    """A case that quantizes the transposed view of a matrix."""

    def make(device, dtype, seed):
        return {"x": draw(device, dtype, seed, shape).mT, **options}

    return Case(name, make)


QUANTIZE_NVFP4 = Op(
    "quantize_nvfp4",
    quantize_nvfp4,
    _whole(quantize_eager, _composed_scale(largest_eager)),
    quantize.implementations(
        lambda: _triton().quantize, lambda: _cpp().quantize, gate=quantize.gates("nvfp4")
    ),
    (
        *all_cases(lambda x: {"x": x}, 4.5),
        quantize_case("square", (19, 40), square=True),
        quantize_case("square_experts", (2, 33, 48), square=True),
        quantize_case("random", (5, 37), seed=1),
        quantize_case("random_square", (18, 50), seed=2**40 + 3, square=True),
        quantize_case("hadamard", (5, 48), hadamard=16),
        quantize_case("hadamard_signs", (3, 7, 64), hadamard=32, hadamard_seed=3),
        quantize_case(
            "hadamard_square", (18, 32), hadamard=16, hadamard_seed=1, square=True, seed=4
        ),
        quantize_case("transpose", (19, 70), transpose=True),
        quantize_case("transpose_random", (2, 17, 33), transpose=True, seed=1),
        quantize_case("transpose_square", (40, 24), transpose=True, square=True),
        _turned_case("turned", (2, 40, 37)),
        _turned_case("turned_hadamard", (48, 70), hadamard=16, hadamard_seed=1, seed=4),
        _turned_case("turned_square", (33, 18), square=True),
        *timed_cases("hadamard", 4.5, passes=2, hadamard=16, hadamard_seed=1),
        *timed_cases("transpose", 4.5, passes=2, results=2, transpose=True),
    ),
    judged=Judged(exact=True),
)
DEQUANTIZE_NVFP4 = Op(
    "dequantize_nvfp4",
    dequantize_nvfp4,
    dequantize_eager,
    quantize.implementations(
        lambda: _triton().dequantize,
        lambda: _cpp().dequantize,
        gate=from_kernels("quant.quantize_triton", "nvfp4_dequantize_gate"),
    ),
    (
        *all_cases(lambda x: {"q": quantize_nvfp4(x)}, 4.5),
        # Rows of whole blocks of random bits, and not.
        dequantize_case(quantize_nvfp4, "noise", (3, 5, 72), aqn.SOME),
        dequantize_case(quantize_nvfp4, "noise_ragged", (5, 37), aqn.SOME),
    ),
    goals=(*cases.near_copy(90, "forward"), Goal("EPYC", "forward", "over torchao", at_least=3)),
)
