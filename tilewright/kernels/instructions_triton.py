"""Float32 functions that a GPU has an instruction for and Triton's language does not name.

Triton writes `1.0 / x` and `tl.exp(x)` for all of float32: nine and five instructions, which scale
operands of the last binades. Where x is known to lie elsewhere, one and two do, to the same
accuracy. In the interpreter, which runs no PTX, they are what Triton writes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reciprocal(x):
    """1 / x to 1 ulp, for |x| from 2^-126 to 2^126; 0 above that, infinity included. NaN of NaN."""
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
def sigmoid(x):
    """1 / (1 + exp(-x)), to a few ulp."""
    return reciprocal(1.0 + exp_or_zero(-x))


@triton.jit
def widened(x):
    """x [.., even] as float32. Two bfloat16 at a time, each by one instruction."""
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
    """float32 x [.., even] rounded to DTYPE and back. Two at a time to bfloat16, which is one
    instruction for both, and one each for the way back.
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
    """The largest of |x| along an axis of float32 x, or NaN where there is one."""
    if HARDWARE:  # an operand's sign is dropped by the instruction that compares
        most = tl.reduce(tl.abs(x), AXIS, _larger)
    else:  # bits, among which a NaN is the largest
        most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=AXIS).to(
            tl.float32, bitcast=True
        )
    return most


# Whether these functions are compiled, whatever a device: the interpreter makes something else of
# them.
HARDWARE: tl.constexpr = tl.constexpr(isinstance(reciprocal, triton.JITFunction))
