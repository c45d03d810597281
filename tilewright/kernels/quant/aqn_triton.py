"""Adaptive quantization noise in Triton: normal values in registers, for other kernels to add. The
definition is tilewright/ops/quant/aqn.py.

Every multiply-add is an explicit fma, so that compilers have no choice: an element has the same
bits in every kernel that computes it, in forward and backward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv
from tilewright.kernels.quant.operators import draw_noise
from tilewright.kernels.spec import KernelSpec

# Elements per program of the kernel that stores noise: 8 per thread of four warps, two calls of the
# generator, which gives four, and a 128-bit store of 16 bits.
TILE = 1024
# Arguments of kernels with noise that are not specialized: Triton would recompile for a step of 1,
# and for multiples of 16.
NUMBERS = ("seed", "step", "layer")
TYPES = {"alpha": "fp32", **dict.fromkeys(NUMBERS, "i64")}


@triton.jit
def _words(block, seed, step, layer):
    """Four 32-bit words per block (int64): see `philox` in tilewright/ops/quant/quantize.py."""
    none = block * 0
    return tl.philox(
        seed,
        block.to(tl.uint32),
        (block >> 32).to(tl.uint32),
        (none + layer).to(tl.uint32),
        (none + step + 0x80000000).to(tl.uint32),
    )


@triton.jit
def _radius(w):
    """sqrt(-2 ln u) of u = ((w >> 8) + 0.5) / 2^24 = k / 2^25.

    u = 2^e (1 + t) with 1 + t between sqrt(1/2) and sqrt(2). t is computed from integers and is
    exact, as a float32 u near 1 would not be. The polynomial was fitted to (2 t - 2 ln(1 + t)) /
    t^2: error 4e-9 of the logarithm.
    """
    k = ((w >> 7) | 1).to(tl.int32)
    e = (k.to(tl.float32).to(tl.int32, bitcast=True) - 0x3F3504F3) >> 23  # the bits of sqrt(1/2)
    t = (k - ((k * 0 + 1) << e)).to(tl.float32) * ((127 - e) << 23).to(tl.float32, bitcast=True)
    p = tl.fma(t * 0 + 0.15246158838272095, t, -0.2581107020378113)
    p = tl.fma(p, t, 0.26485979557037354)
    p = tl.fma(p, t, -0.2836326062679291)
    p = tl.fma(p, t, 0.33218109607696533)
    p = tl.fma(p, t, -0.4000397026538849)
    p = tl.fma(p, t, 0.5000317096710205)
    p = tl.fma(p, t, -0.6666665077209473)
    p = tl.fma(p, t, 0.9999997615814209)
    p = tl.fma(p, t, -2.0)
    return tl.sqrt_rn(tl.fma((25 - e).to(tl.float32), 1.3862943649291992, p * t))  # 2 ln 2


@triton.jit
def _turn(w):
    """cos and sin of 2 pi u: the angle to the nearest quarter turn, z pi / 4 with an exact z in
    [-1, 1], by polynomials fitted to 4e-9.
    """
    k = ((w >> 7) | 1).to(tl.int32)
    q = (k + 0x400000) >> 23
    z = (k - (q << 23)).to(tl.float32) * 2.384185791015625e-07  # 2^-22
    y = z * z
    s = tl.fma(y * 0 - 3.59504520019982e-05, y, 0.00249000103212893)
    s = tl.fma(s, y, -0.08074543625116348)
    s = z * tl.fma(s, y, 0.7853981852531433)
    c = tl.fma(y * 0 + 3.5303378354001325e-06, y, -0.0003259400837123394)
    c = tl.fma(c, y, 0.015854327008128166)
    c = tl.fma(c, y, -0.3084251284599304)
    c = tl.fma(c, y, 1.0)
    odd = (q & 1) != 0
    cos = tl.where(odd, s, c)
    sin = tl.where(odd, c, s)
    return tl.where(((q + 1) & 2) != 0, -cos, cos), tl.where((q & 2) != 0, -sin, sin)


@triton.jit
def normals(first, seed, step, layer, N: tl.constexpr, BY_FOUR: tl.constexpr):
    """Normal values [N] of elements from `first` (int64) on. BY_FOUR: `first` and N are multiples
    of four, so that one block of random bits serves four elements; otherwise it is recomputed for
    each.
    """
    if BY_FOUR:
        a, b, c, d = _words((first >> 2) + tl.arange(0, N // 4), seed, step, layer)
        r = _radius(a)
        cos, sin = _turn(b)
        v = _radius(c)
        x, y = _turn(d)
        n = tl.reshape(tl.join(tl.join(r * cos, v * x), tl.join(r * sin, v * y)), (N,))
    else:
        element = first + tl.arange(0, N)
        a, b, c, d = _words(element >> 2, seed, step, layer)
        late = (element & 2) != 0
        cos, sin = _turn(tl.where(late, d, b))
        n = _radius(tl.where(late, c, a)) * tl.where((element & 1) != 0, sin, cos)
    return n


@triton.jit(do_not_specialize=["first", "seed", "step", "layer"])
def _noise(
    out_ptr,
    first: tl.int64,
    n,
    seed: tl.int64,
    step: tl.int64,
    layer: tl.int64,
    TILE: tl.constexpr,
    BY_FOUR: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * TILE
    at = start + tl.arange(0, TILE)
    v = normals(start + first, seed, step, layer, TILE, BY_FOUR)
    tl.store(out_ptr + at, v.to(out_ptr.dtype.element_ty), mask=at < n)


def noise(like, first, n, noise, dtype):
    out = draw_noise(like, first, n, noise, dtype)
    if n:
        launch(
            _noise,
            (cdiv(n, TILE),),
            out,
            first,
            n,
            noise.seed,
            noise.step,
            noise.layer,
            TILE=TILE,
            BY_FOUR=first % 4 == 0,
            num_warps=4,
        )
    return out


def gate() -> list[KernelSpec]:
    return [
        KernelSpec(
            _noise,
            f"noise {d}{'' if by_four else ' unaligned'}",
            {"out_ptr": f"*{d}", "first": "i64", "n": "i32", **dict.fromkeys(NUMBERS, "i64")},
            {"TILE": TILE, "BY_FOUR": by_four},
            load=0,
            divisible=("n",),
            elements=TILE,
        )  # nothing is read
        for d in ("bf16", "fp32")
        for by_four in (True, False)
    ]
