"""Dropout (Srivastava et al. 2014) into a residual stream, with a mask that is a function of
counters:

    y = residual + mask * x / (1 - p)
"""

from __future__ import annotations

import functools
import math

import torch

from tilewright.core import checks
from tilewright.core.library import from_kernels
from tilewright.core.registry import Case, Cost, Op, in_cpp, in_triton
from tilewright.core.takes import takes
from tilewright.kernels.activation.operators import Dropout, drop_add
from tilewright.ops import cases
from tilewright.ops.quant import quantize

# In the counter's last word: apart from the streams of aqn_noise (2^31) and of stochastic rounding
# and random signs (0), which may have the same seed.
STREAM = 2**30


@checks.autocast("inputs")
@takes(
    x="float [...]",
    residual="x | float32 [x]",
    p="static number [0, 1]",
    seed=quantize.SEED,
    offset="int [0, 2**62)",
    first="int [0, 2**62)",
    row="int [1, 2**62)",
    training="bool",
)
def dropout_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    p: float,
    *,
    seed: int,
    offset: int = 0,
    first: int = 0,
    row: int | None = None,
    training: bool = True,
    implementation: str = "auto",
) -> torch.Tensor:
    """Adds x to the residual stream, with each element dropped with probability p and the others
    divided by 1 - p; backward draws the mask again.

    Element i (row-major) has the 32 bits of word i % 4 of Philox4x32-10 (Salmon et al., SC 2011)
    with key seed and counter words (i // 4, i // 4 >> 32, offset, 2^30 + (offset >> 32)). It is
    dropped if they are below p 2^32, rounded to an integer: the probability is p to within 2^-33,
    and p itself where it is a multiple of 2^-32. The mask is the same in every implementation, on
    any device. Nothing is saved for backward: the mask is drawn again. If x is a part (some rows,
    or some columns of some rows) of a tensor that is sharded over devices, `first` and `row` locate
    it, and its mask is that part of the whole tensor's mask.

    Computed in float32, rounded once. Differentiable any number of times in x and residual.

    Args:
        x: any shape, fp32 | bf16 | fp16 (fp64 with eager), made contiguous.
        residual: shape of x, x's dtype or float32.
        p: probability of an element to be dropped, 0 to 1; with 0 all are kept, with 1 none. A
            dropped element counts as 0 even if it is not finite.
        seed: 0 to 2^63 - 1.
        offset: 0 to 2^62 - 1: the call's number. Calls with another one have another mask; a
            recomputation needs the same.
        first: 0 to 2^62 - 1, a multiple of 4: the index of x's first element in the whole tensor.
        row: the width of the whole tensor's rows, if x [..., n] has n columns of each: element c of
            row r has the index first + r row + c. Both widths must then be multiples of 4. Default:
            n.
        training: False adds x as it is.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        x's shape, in residual's dtype.

    Raises:
        TypeError, ValueError: invalid arguments, or a part that begins or ends within four elements
            that share a draw.
        ImplementationUnavailable: a named implementation that cannot run here.

    Example:
        >>> dropout_add(torch.ones(8), torch.zeros(8), 0.5, seed=3).tolist()
        [2.0, 2.0, 2.0, 0.0, 2.0, 0.0, 0.0, 2.0]

    Source: JMLR 15:1929, 2014; scaled in training, as torch.nn.functional.dropout.
    """
    p = float(p) if training else 0.0
    scale = 1.0 / (1.0 - p) if p < 1 else 0.0
    dropout = Dropout(round(p * 2**32), scale, seed, offset, *_blocks(x, first, row))
    return DROPOUT_ADD.pick(implementation, x)(x, residual, dropout)


def _blocks(x: torch.Tensor, first: int, row: int | None) -> tuple[int, int, int]:
    """`first`, `width` and `skip` of Dropout. Raises ValueError for a part of a block."""
    columns = x.shape[-1] if x.dim() else 1
    if first % 4:
        raise ValueError(f"first must be a multiple of 4, the elements of a draw, got {first}")
    if row is None or row == columns:
        return first // 4, 1, 0
    if row % 4 or columns % 4 or row < columns:
        raise ValueError(
            "row and x's columns must be multiples of 4, and row no smaller than x's columns, got "
            f"row = {row} and x {list(x.shape)}"
        )
    return first // 4, max(1, columns // 4), (row - columns) // 4


# ---- the definition


def dropout_add_eager(x, residual, dropout):
    threshold, scale, seed, offset, first, width, skip = dropout
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if threshold:
        stream = offset & 0xFFFFFFFF, STREAM | offset >> 32
        if skip:
            first = first + torch.arange(-(-x.numel() // 4), device=x.device) // width * skip
        words = quantize.philox(seed, x.numel(), x.device, stream, first)
        kept = words.view(x.shape) >= threshold
        y = torch.where(kept, y * scale, 0.0)
    return (y + residual.to(y.dtype)).to(residual.dtype)


# ---- fused implementations: one operator, whose gradient is the operator without a residual


@drop_add.formula(
    twice=True,
    of_x=lambda x: x.dtype,
    has_residual=lambda residual: residual is not None,
)
def _backward(op, dy, dropout, of_x, has_residual):
    dx = op(dy.contiguous(), None, dropout, of_x)
    return {"x": dx, "residual": dy} if has_residual else {"x": dx}


def _fused(operator):
    def run(x, residual, dropout):
        return operator(x.contiguous(), residual.contiguous(), dropout, residual.dtype)

    return run


@functools.cache
def _triton():
    from tilewright.kernels.activation import dropout_add_triton

    return _fused(drop_add.define("dropout_add_triton", dropout_add_triton.forward))


@functools.cache
def _cpp():
    return _fused(drop_add.adopt("dropout_add_cpp"))


# ---- cases


def _case(name, *shape, p=0.1, mixed=False, strided=False, tags=cases.CONTRACT, **options):
    n = math.prod(shape)

    def make(device, dtype, seed):
        new = {"device": device, "gen": cases.generator(device, seed)}
        of_residual = torch.float32 if mixed else dtype
        if strided:
            x = cases.randn(*shape[::-1], dtype=dtype, **new, requires_grad=False).mT
            given = {"x": x.requires_grad_()}
        else:
            given = {"x": cases.randn(*shape, dtype=dtype, **new)}
        given["residual"] = cases.randn(*shape, dtype=of_residual, **new)
        return {**given, "p": p, "seed": 2**40 + 11 + seed, **options}

    def cost(itemsize):  # forward: x and residual in, y out; backward: dy in, dx out
        return Cost(3 * n * itemsize, 2 * n * itemsize, 2 * n, n)

    return Case(name, make, cost, tags)


DROPOUT_ADD = Op(
    "dropout_add",
    dropout_add,
    dropout_add_eager,
    (
        in_triton(_triton, gate=from_kernels("activation.dropout_add_triton", "gate")),
        in_cpp(_cpp),
    ),
    (
        _case("ragged", 3, 7, 100),
        _case("offset", 5, 33, p=0.5, offset=2**61 + 2**32 + 9),
        _case("fp32_residual", 6, 96, p=0.3, mixed=True),
        _case("strided", 4, 36, strided=True),
        _case("evaluation", 3, 50, training=False),
        _case("keeps_all", 40, p=0.0),
        _case("no_rows", 0, 64),
        _case("tiles", 2, 1500, p=0.25),
        *(
            _case(name, cases.TOKENS[device], cases.MODELS[name].hidden, tags=tags)
            for device, tags in (("cuda", cases.CUDA), ("cpu", cases.CPU))
            for name in ("qwen3-8b", "gemma-3-4b")
        ),
    ),
    # Ten rounds of multiplications for four elements are near the rate of a GPU's integer units,
    # and the backward moves less.
    goals=(
        *cases.near_copy(92, "forward", only=("qwen3-8b",)),
        *cases.near_copy(85, "backward", only=("qwen3-8b",)),
    ),
)
