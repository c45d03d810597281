"""The block Hadamard transform in Triton. The definition is tilewright/ops/quant/hadamard.py.

A butterfly stage is the sum and difference with the partner element. Three of the four or five
stages stay within a thread's eight elements, and the others exchange with neighboring lanes. tl.dot
with a matrix of signs is not used: the op is bandwidth-bound, and tensor cores add in an order of
their own, while butterflies give the bits of the definition.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv
from tilewright.kernels.quant.operators import transform
from tilewright.kernels.spec import KernelSpec

TILE = 2048  # elements per program: with 4 warps, two 128-bit loads of bf16 per thread


@triton.jit
def signed(v, at, mask, SIZE: tl.constexpr):
    """float32 v with a mask's signs applied, by the positions `at` of the elements in a block."""
    bit = (mask >> (at % SIZE).to(tl.int32)) & 1
    return (v.to(tl.int32, bitcast=True) ^ (bit << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _stage(v, H: tl.constexpr):
    """v [n]: replaces each element and the one H away by their sum and their difference."""
    N: tl.constexpr = v.shape[0]
    pairs = tl.reshape(v, (N // (2 * H), 2, H))
    own = pairs.to(tl.int32, bitcast=True)
    other = (own ^ tl.xor_sum(own, axis=1, keep_dims=True)).to(tl.float32, bitcast=True)
    upper = tl.arange(0, 2)[None, :, None] == 1
    return tl.reshape(tl.where(upper, other - pairs, pairs + other), (N,))


@triton.jit
def butterflies(v, SIZE: tl.constexpr):
    """The orthonormal transform of each SIZE consecutive elements of float32 v [n]."""
    v = _stage(v, 1)
    v = _stage(v, 2)
    v = _stage(v, 4)
    v = _stage(v, 8)
    if SIZE == 32:
        v = _stage(v, 16) * 0.17677669529663687
    else:
        v = v * 0.25
    return v


@triton.jit(do_not_specialize=["mask"])
def _hadamard(
    x_ptr,
    y_ptr,
    n,
    mask,
    SIZE: tl.constexpr,
    SIGNS: tl.constexpr,
    INVERSE: tl.constexpr,
    TILE: tl.constexpr,
):
    i = tl.arange(0, TILE)
    at = tl.program_id(0).to(tl.int64) * TILE + i
    v = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    if SIGNS and not INVERSE:
        v = signed(v, i, mask, SIZE)
    v = butterflies(v, SIZE)
    if SIGNS and INVERSE:
        v = signed(v, i, mask, SIZE)
    tl.store(y_ptr + at, v.to(y_ptr.dtype.element_ty), mask=at < n)


@functools.lru_cache(maxsize=256)
def sign_mask(seed: int | None) -> int:
    """An int32 whose bit i is set if the sign of position i in a block is negative: the lowest bit
    of word i % 4 of Philox4x32-10 with counter i // 4 and key `seed`.
    """
    if seed is None:
        return 0
    mask, low = 0, 0xFFFFFFFF
    for i in range(0, 32, 4):
        c, k0, k1 = [i // 4, 0, 0, 0], seed & low, seed >> 32
        for _ in range(10):
            a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
            c = [b >> 32 ^ c[1] ^ k0, b & low, a >> 32 ^ c[3] ^ k1, a & low]
            k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
        mask |= sum((word & 1) << i + j for j, word in enumerate(c))
    return mask - (mask >> 31 << 32)


def hadamard(x, size, seed, inverse):
    y = transform(x, size, seed, inverse)
    if x.numel():
        launch(
            _hadamard,
            (cdiv(x.numel(), TILE),),
            x,
            y,
            x.numel(),
            sign_mask(seed),
            SIZE=size,
            SIGNS=seed is not None,
            INVERSE=inverse,
            TILE=TILE,
            num_warps=4,
        )
    return y


def gate() -> list[KernelSpec]:
    return [
        KernelSpec(
            _hadamard,
            f"{d} {size}{' signs' if signs else ''}{' inverse' if inverse else ''}",
            {"x_ptr": f"*{d}", "y_ptr": f"*{d}", "n": "i64" if inverse else "i32", "mask": "i32"},
            {"SIZE": size, "SIGNS": signs, "INVERSE": inverse, "TILE": TILE},
            4,
            divisible=("n",),
            elements=TILE,
        )
        for d in ("bf16", "fp32")
        for size in (16, 32)
        for signs, inverse in ((False, False), (True, False), (True, True))
    ]
