"""The block Hadamard transform, optionally with random signs, of each block of 16 or 32:

    y = H (s * x) / sqrt(size)

H is Sylvester's matrix of +-1: H[i, j] = (-1)^(number of set bits in i & j). H / sqrt(size) is
symmetric and its own inverse. It distributes one large element over its block, so that the block's
FP4 scale fits the other elements too. In a product of two tensors that are both transformed along
the summed dimension it cancels: (H a) . (H b) = a . b.
"""

from __future__ import annotations

import functools
import math

import torch

from tilewright.core import checks
from tilewright.core.library import from_kernels
from tilewright.core.registry import Op
from tilewright.core.takes import takes
from tilewright.kernels.quant.operators import transform
from tilewright.ops import cases
from tilewright.ops.quant import quantize

SIZES = (16, 32)


@checks.autocast("inputs")
@takes("x: C % size == 0", x="float [..., C]", size=SIZES, seed=quantize.SEED, inverse="bool")
def hadamard(
    x: torch.Tensor,
    size: int = 16,
    *,
    seed: int | None = None,
    inverse: bool = False,
    implementation: str = "auto",
) -> torch.Tensor:
    """The orthonormal Hadamard transform of each block of `size` elements along the last dimension.

    Computed in float32 (fp64 for fp64), in a fixed order: log2(size) stages of sums and differences
    with the element 1, 2, 4, ... positions away, then one product by size^-1/2, then one rounding.
    Every implementation gives the same bits. Differentiable any number of times: the gradient is
    the transform in the other direction.

    Args:
        x: [..., C] fp32 | bf16 | fp16 (fp64 with eager), any strides (non-contiguous tensors are
            copied). C must be a multiple of size.
        size: 16 or 32.
        seed: None: no signs. An int, 0 to 2^63 - 1, first multiplies position i of every block by a
            random sign s_i: negative where the lowest bit of word i % 4 of Philox4x32-10 with
            counter i // 4 and key seed is 1. The signs are the same for all blocks and tensors, so
            they cancel in a product.
        inverse: x = s * (H y / sqrt(size)), which undoes the transform of this size and seed.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        [..., C], contiguous, in x's dtype.

    Raises:
        TypeError, ValueError: invalid arguments.
        ImplementationUnavailable: a named implementation that cannot run here.

    Example:
        >>> y = tilewright.ops.hadamard(torch.ones(16))
        >>> y.tolist() == [4.0] + [0.0] * 15
        True

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149, which
    transforms the inputs of the weight gradient in blocks of 16 with one vector of signs per run,
    as does Transformer Engine's NVFP4 recipe.
    """
    return HADAMARD.pick(implementation, x)(x.contiguous(), size, seed, inverse)


# ---- the definition


def hadamard_eager(x, size, seed, inverse):
    v = x.to(torch.promote_types(x.dtype, torch.float32)).view(
        *x.shape[:-1], x.shape[-1] // size, size
    )
    signs = None
    if seed is not None:
        signs = (1 - 2 * (quantize.philox(seed, size, x.device) & 1)).to(v.dtype)
    if seed is not None and not inverse:
        v = v * signs
    h = 1
    while h < size:
        a, b = v.unflatten(-1, (size // (2 * h), 2, h)).unbind(-2)
        v = torch.stack([a + b, a - b], -2).view(v.shape)
        h *= 2
    v = v * size**-0.5
    if seed is not None and inverse:
        v = v * signs
    return v.view(x.shape).to(x.dtype)


# ---- fused implementations


@transform.formula(twice=True)
def _backward(op, dy, size, seed, inverse):
    return {"x": op(dy.contiguous(), size, seed, not inverse)}


@functools.cache
def _triton():
    from tilewright.kernels.quant import hadamard_triton

    return transform.define("hadamard_triton", hadamard_triton.hadamard)


@functools.cache
def _cpp():
    return transform.adopt("hadamard_cpp")


# ---- cases


def _case(name, shape, tags=cases.CONTRACT, size=16, **options):
    n = math.prod(shape)
    flops = n * (int(math.log2(size)) + 1)
    given = {"x": shape, "size": size, **options}
    return cases.of_shapes(name, tags, moved=(2 * n, 2 * n), flops=(flops, flops), **given)


HADAMARD = Op(
    "hadamard",
    hadamard,
    hadamard_eager,
    quantize.implementations(_triton, _cpp, gate=from_kernels("quant.hadamard_triton", "gate")),
    (
        _case("plain", (3, 5, 48)),
        _case("signs", (7, 64), seed=1),
        _case("inverse", (5, 32), seed=2**40 + 3, inverse=True),
        _case("by_32", (3, 5, 96), size=32),
        _case("by_32_inverse", (5, 32), size=32, seed=5, inverse=True),
        _case("vector", (16,), seed=0),
        _case("no_rows", (0, 32)),
        _case("no_columns", (3, 0)),
        _case("several_tiles", (9, 496), size=16, seed=9),
        *(
            _case(name, (cases.TOKENS[device], cases.MODELS[name].hidden), tags, size=16, seed=1)
            for device, tags in (("cuda", cases.CUDA), ("cpu", cases.CPU))
            for name in ("qwen3-8b", "deepseek-v3")
        ),
        _case(
            "llama-3-8b-32",
            (cases.TOKENS["cuda"], cases.MODELS["llama-3-8b"].inner),
            cases.CUDA,
            size=32,
            seed=1,
        ),
        _case("big", (2**18 + 1, 8192), cases.BIG, seed=1),
    ),
    goals=cases.near_copy(92, "forward", "backward"),
)
