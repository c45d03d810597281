"""Float32 math for Triton kernels.

Triton compiles `1.0 / x` and `tl.exp(x)` for all of float32: nine and five instructions, which
scale operands in the last binades. Where x is known to lie elsewhere, one and two instructions give
the same accuracy; Triton's language has no names for them. The interpreter runs no PTX and uses
Triton's versions.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reciprocal(x):
    """1 / x to 1 ulp, for |x| from 2^-126 to 2^126; 0 above that, including infinity. NaN gives
    NaN.
    """
    if HARDWARE:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / x
    return y


@triton.jit
def exp_or_zero(x):
    """exp(x) with tl.exp's error; 0 where that is below 2^-126."""
    if HARDWARE:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [x * 1.4426950408889634],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        y = tl.exp(x)
    return y


@triton.jit
def exp2_or_zero(x):
    """2^x to 2 ulp; 0 where that is below 2^-126."""
    if HARDWARE:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def exp2_in_fmas(x):
    """2^x to 3 ulp, for |x| <= 126, without the special-function unit, in nine instructions; NaN
    gives any number. Adding 1.5 * 2^23 rounds to an integer, the exponent; a polynomial
    (relative error at most 1.6e-7) gives 2 to the power of the rest.
    """
    shifted = x + 12582912.0
    f = x - (shifted - 12582912.0)
    p = 1.3276472454890609e-3
    p = p * f + 9.675540961325169e-3
    p = p * f + 5.550713092088699e-2
    p = p * f + 2.4022120237350464e-1
    p = p * f + 6.931469440460205e-1
    p = p * f + 1.0
    exponent = shifted.to(tl.int32, bitcast=True) << 23
    return (p.to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), to a few ulp."""
    return reciprocal(1.0 + exp_or_zero(-x))


@triton.jit
def sigmoid_pair(x):
    """sigmoid(x) and sigmoid(-x), each to a few ulp: 1 - sigmoid(x) would cancel for large x."""
    e = exp_or_zero(-tl.abs(x))
    near = reciprocal(1.0 + e)
    far = e * near
    return tl.where(x < 0, far, near), tl.where(x < 0, near, far)


@triton.jit
def normal_distribution(x):
    """The normal distribution function and density; csrc/cpu/activation.cpp explains the fit and
    its error.

    tl.exp multiplies by log2 e in one rounding, which for exp(-z^2 / 2) would cost up to 70
    roundings of relative error. So the power of two is computed from the rounded product, and the
    rounding errors of both products (which fma yields; the third term is log2(e) / 2 less its
    float32 value) are added back to first order.
    """
    z = tl.abs(x)
    z = tl.where(z > 15.0, 15.0, z)  # both are 0 there, and the square of a larger z could overflow
    square = z * z
    power = square * 0.7213475108146667
    lost = tl.fma(square, 0.7213475108146667, -power) + 0.7213475108146667 * tl.fma(z, z, -square)
    lost += square * 9.629815e-09
    e = tl.exp2(-power) * (1.0 - 0.6931471805599453 * lost)
    t = reciprocal(1.0 + 0.345 * z)
    q = 0.144233868 - 0.0281518623 * t
    q = q * t - 0.269154072
    q = q * t + 0.185055152
    q = q * t - 0.0362382308
    q = q * t + 0.111267827
    q = q * t + 0.11736197
    q = q * t + 0.138005242
    q = q * t + 0.137620106
    tail = e * t * q
    return tl.where(x < 0, tail, 1.0 - tail), 0.3989422804014327 * e


@triton.jit
def tanh_and_derivative(x):
    """tanh to 2 ulp, and its derivative 1 - tanh^2, which would cancel where tanh is near 1. Below
    0.625 an odd polynomial (least maximum relative error, 4e-9, fitted to tanh(x) / x): 1 - 2q / (1
    + q), q = exp(-2 |x|), would lose the low bits of a small x.
    """
    u = x * x
    p = -5.704986862838268e-3
    p = p * u + 2.063908614218235e-2
    p = p * u - 5.373971536755762e-2
    p = p * u + 1.3331441581249237e-1
    p = p * u - 3.333328068256378e-1
    near = x + x * u * p
    size = tl.abs(x)
    q = tl.exp2(-2.0 * 1.4426950408889634 * size)
    h = q * reciprocal(1.0 + q)
    far = 1.0 - 2.0 * h
    return tl.where(size < 0.625, near, tl.where(x < 0.0, -far, far)), 4.0 * h * (1.0 - h)


@triton.jit
def softcapped(x, cap, inverse):
    """cap * tanh(x / cap) to some ulp of cap, and 1 - tanh^2 to some ulp.   inverse: 1 / cap.

    Softmax reads differences of such values, so an error relative to the cap is one relative to
    the range of logits. tanh = 1 - 2 h, h = 1 / (1 + e), e = exp(2 x / cap), takes five
    instructions where `tanh_and_derivative` takes twenty; 1 - h, which would cancel, is e h. Both
    saturate at infinities and keep NaN.
    """
    e = exp2_or_zero(x * (2.0 * 1.4426950408889634 * inverse))
    h = reciprocal(1.0 + e)
    # An fma: a product would be contracted with a difference that follows. The minimum, since
    # infinity times 0 is NaN; h has the NaN that it drops.
    return tl.fma(h, -2.0 * cap, cap), 4.0 * h * (tl.minimum(e, 8.507059173023462e37) * h)


@triton.jit
def widened(x):
    """x [.., even] as float32, two bfloat16 at a time with one instruction each."""
    if HARDWARE:
        if x.dtype == tl.bfloat16:
            y = tl.inline_asm_elementwise(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
                "=r,=r,r",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=2,
            )
        else:
            y = x.to(tl.float32)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def rounded_to(x, DTYPE: tl.constexpr):
    """float32 x [.., even] rounded to DTYPE and back. bfloat16 takes one instruction for two
    elements, and one each for the way back.
    """
    if HARDWARE:
        if DTYPE == tl.bfloat16:  # noqa: SIM300
            y = tl.inline_asm_elementwise(
                """
{
.reg .b32 both;
cvt.rn.bf16x2.f32 both, $3, $2;
shl.b32 $0, both, 16;
and.b32 $1, both, 0xffff0000;
}
""",
                "=r,=r,r,r",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=2,
            )
        else:
            y = x.to(DTYPE).to(tl.float32)
    else:
        y = x.to(DTYPE).to(tl.float32)
    return y


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_magnitude(x, AXIS: tl.constexpr):
    """The largest |x| along an axis of float32 x, or NaN if it has one."""
    if HARDWARE:  # the comparison instruction drops an operand's sign
        most = tl.reduce(tl.abs(x), AXIS, _larger)
    else:  # as bits, where a NaN is the largest
        most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=AXIS).to(
            tl.float32, bitcast=True
        )
    return most


# Whether these functions are compiled, on any device: the interpreter replaces them.
HARDWARE: tl.constexpr = tl.constexpr(isinstance(reciprocal, triton.JITFunction))
