"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467).

    y = x / sqrt(mean(x^2) + eps) * (offset + w) + b

Shapes: D = columns, the last dimension; H = heads. Sums accumulate in float32 or wider, and the
result is rounded once, on store (`cast="llama"` also rounds the normalized row, as Llama and Qwen
do).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tilewright.core import checks, platform
from tilewright.core.library import Operator, from_kernels
from tilewright.core.registry import FLOATS, Goal, Implementation, Judged, Op, in_cpp, in_triton
from tilewright.core.takes import FLOAT, takes
from tilewright.kernels.norm.operators import Norm, normalize, normalize_backward
from tilewright.ops import cases
from tilewright.ops.norm.cases import norm_cases
from tilewright.ops.quant import aqn
from tilewright.ops.quant.aqn import AQN

CASTS = ("llama", "gemma", "none")
MAX_D = 65536  # widest row that the Triton kernels are compiled and tested for


NORM = {
    "x": "float [..., H, D] | [..., D]",
    "weight": "float [D] | [H, D]",
    "bias": "weight [D]",
    "eps": "number [0, inf)",
    "offset": "number",
    "cast": CASTS,
}
WIDTH = f"1 <= D <= {MAX_D}"
RESIDUAL = "x | float32 [x]"


@checks.autocast("norm", "x")
@takes(WIDTH, **NORM, noise="an AQN")
def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    offset: float = 0.0,
    cast: str = "llama",
    noise: AQN | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """Normalizes each row of x by its root mean square and scales it, with weight offset, cast
    policies, bias, and a weight for each head.

    Differentiable once in x, weight and bias (eager and torch: any number of times, and in forward
    mode). Gradients of weight and bias accumulate in float32, on a CPU in float32 over 64 rows and
    in float64 beyond (in a fixed order, without atomics).

    Args:
        x: [..., D], float32 | bfloat16 | float16 (float64 with eager and torch), any strides,
            D <= 65,536.
        weight: [D], or [H, D] for x of shape [..., H, D] (per-head QK norm). Any float dtype.
        eps: >= 0, added to the mean of squares.
        bias: [D] in weight's dtype, or None.
        offset: added to the weight; 1.0 for Gemma, whose checkpoints store w - 1.
        cast: "llama" rounds the normalized row to x's dtype before the weight; "gemma" stays in
            float32 to the end; "none" lets the eager twin compute in x's dtype throughout (the
            fused kernels then compute as for "gemma").
        noise: adds alpha times the `aqn_noise` of weight's shape to offset + weight for this call,
            in float32, and the gradient uses the same sum (QeRL); weight itself is unchanged. None,
            or an alpha of 0, adds nothing. Drawn by `aqn_noise`'s implementation of the same name
            if it exists, else by its "auto".
        implementation: "auto", or a name that `tilewright explain` lists.

    Returns:
        [..., D] in x's dtype; under torch.autocast in float32 (not on a CPU), as F.rms_norm does.

    Raises:
        TypeError, ValueError: invalid arguments.
        ImplementationUnavailable: a named implementation that cannot run here.

    Example:
        >>> rmsnorm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
        tensor([[0.8485, 1.1314]])

    Source: arXiv:1910.07467; cast policies as in transformers' LlamaRMSNorm and GemmaRMSNorm;
    noise: arXiv:2510.11696.
    """
    if noise is not None:
        weight, bias, offset = _with_noise(weight, bias, offset, noise, x.dtype, implementation)
    return RMSNORM.pick(implementation, x)(x, weight, bias, eps, offset, cast)


@checks.autocast("norm", "x", "residual")
@takes(WIDTH, **NORM, residual=RESIDUAL, noise="an AQN")
def add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    offset: float = 0.0,
    cast: str = "llama",
    noise: AQN | None = None,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x to the residual stream and normalizes the sum, in one pass over memory: the residual
    step of a pre-norm transformer.

    Differentiable once in x, residual, weight and bias.

    Args:
        x: as in `rmsnorm`.
        residual: shape of x, x's dtype or float32; the sum is rounded to residual's dtype. Under
            torch.autocast both are cast to float32 (not on a CPU).
        weight, eps, bias, offset, cast, noise, implementation: as in `rmsnorm`.

    Returns:
        (rmsnorm(x + residual) in x's dtype, x + residual in residual's).

    Raises:
        TypeError, ValueError: invalid arguments.
        ImplementationUnavailable: a named implementation that cannot run here.

    Example:
        >>> y, total = add_rmsnorm(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]]),
        ...                        torch.ones(2), eps=0.0)
        >>> y, total
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    if noise is not None:
        weight, bias, offset = _with_noise(weight, bias, offset, noise, x.dtype, implementation)
    return ADD_RMSNORM.pick(implementation, x)(x, residual, weight, bias, eps, offset, cast)


def _with_noise(weight, bias, offset, noise, dtype, implementation):
    """Weight with noise, bias and offset for x of `dtype`. The weight becomes float32 or wider: 16
    bits would round the noise away.
    """
    if not aqn.arguments(noise).alpha:
        return weight, bias, offset
    acc = torch.promote_types(dtype, torch.float32)
    weight = aqn.add(_shifted(weight.to(acc), offset), noise, implementation)
    return weight, None if bias is None else bias.to(acc), 0.0


def _shifted(weight, offset):
    """weight + offset; the weight itself if the offset is 0: from torch 2.14 on, inductor does not
    compile the sum of a graph's input and zero under activation checkpointing.
    """
    return weight if offset == 0 else weight + offset


# ---- the definition


def rmsnorm_eager(x, weight, bias=None, eps=1e-6, offset=0.0, cast="llama"):
    acc = x.dtype if cast == "none" else torch.promote_types(x.dtype, torch.float32)
    h = x.to(acc)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if cast == "llama":
        h = h.to(x.dtype).to(acc)
    y = h * _shifted(weight.to(acc), offset)
    if bias is not None:
        y = y + bias.to(acc)
    return y.to(x.dtype)


def sum_eager(x, residual):
    acc = torch.promote_types(x.dtype, torch.float32)
    return (x.to(acc) + residual.to(acc)).to(residual.dtype)


def add_rmsnorm_eager(x, residual, weight, bias=None, eps=1e-6, offset=0.0, cast="llama"):
    total = sum_eager(x, residual)
    return rmsnorm_eager(total, weight, bias, eps, offset, cast).to(x.dtype), total


# ---- PyTorch's own fused op


def _torch():
    def rmsnorm_torch(x, weight, bias, eps, offset, cast):
        w = _shifted(weight, offset)
        # F.rms_norm takes one [D] weight of x's dtype and no bias.
        if w.dim() == 2 or bias is not None or w.dtype != x.dtype:
            y = torch.nn.functional.rms_norm(x, x.shape[-1:], None, eps) * w
            return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)
        return torch.nn.functional.rms_norm(x, x.shape[-1:], w, eps)

    return rmsnorm_torch


# ---- fused implementations: an operator each, one autograd formula for all


def gradients(backward, g, normalized, more, dtype):
    """Gradients of a norm's arguments, for the results' g.y and g.total.

    backward: (dy, dtotal, normalized, *more) -> the gradients of what is normalized, of the weight
        and of the bias.   dtype: x's dtype.
    """
    dy, dtotal = g.y, g.total
    if dy is None:
        if dtotal is None:
            return {}
        dy = torch.zeros_like(normalized, dtype=dtype)
    if dtotal is not None:
        dtotal = dtotal.contiguous()
    d, dweight, dbias = backward(dy.contiguous(), dtotal, normalized, *more)
    dx = d if d.dtype == dtype else d.to(dtype)
    return {"x": dx, "residual": d, "weight": dweight, "bias": dbias}


def parameters(weight, bias, dtypes):
    """Weight and bias as kernels read them: contiguous, and in float32 if `dtypes` lacks theirs."""
    if weight.dtype not in dtypes:  # bias has weight's dtype
        weight, bias = weight.float(), None if bias is None else bias.float()
    return weight.contiguous(), None if bias is None else bias.contiguous()


def _normalized(x, residual, total) -> torch.Tensor:
    return x if residual is None else total


# What a norm's formula needs besides its own arguments and results.
OF_NORM = {
    "normalized": _normalized,
    "has_bias": lambda bias: bias is not None,
    "dtype": lambda x: x.dtype,
}


@normalize.formula(**OF_NORM)
def _backward(op, g, normalized, rstd, weight, norm, has_bias, dtype):
    return gradients(op, g, normalized, (rstd, weight, norm, has_bias), dtype)


class _Fused(NamedTuple):
    """The operator of one implementation, and the functions that call it.

    dtypes: those of weight and bias that the kernels read; others are cast to float32, in which
    the kernels compute.
    """

    normalize: Operator
    dtypes: tuple[torch.dtype, ...] = FLOAT

    @classmethod
    def of(cls, name, launchers, *dtypes):
        backward = normalize_backward.define(f"rmsnorm_{name}_backward", launchers.backward)
        return cls(normalize.define(f"rmsnorm_{name}", launchers.forward, backward), *dtypes)

    def rmsnorm(self, x, weight, bias, eps, offset, cast):
        weight, bias = parameters(weight, bias, self.dtypes)
        norm = Norm(float(eps), float(offset), cast == "llama")
        return self.normalize(x.contiguous(), None, weight, bias, norm).y

    def add_rmsnorm(self, x, residual, weight, bias, eps, offset, cast):
        weight, bias = parameters(weight, bias, self.dtypes)
        # The llama cast rounds to x's dtype only if the sum that is normalized has it: with a
        # float32 residual stream there is no rounding.
        norm = Norm(float(eps), float(offset), cast == "llama" and residual.dtype == x.dtype)
        outputs = self.normalize(x.contiguous(), residual.contiguous(), weight, bias, norm)
        return outputs.y, outputs.total


@functools.cache
def _triton():
    from tilewright.kernels.norm import rmsnorm_triton

    return _Fused.of("triton", rmsnorm_triton)


@functools.cache
def _cute():
    from tilewright.kernels.norm import rmsnorm_cute

    return _Fused.of("cute", rmsnorm_cute, FLOATS)


@functools.cache
def _cpp():
    backward = normalize_backward.adopt("rmsnorm_cpp_backward")
    return _Fused(normalize.adopt("rmsnorm_cpp", backward), (torch.float32, torch.bfloat16))


RMSNORM = Op(
    "rmsnorm",
    rmsnorm,
    rmsnorm_eager,
    (
        in_triton(
            lambda: _triton().rmsnorm,
            batch_invariant=cases.ANYWHERE,
            tunables=from_kernels("norm.rmsnorm_triton", "TUNABLES"),
            gate=from_kernels("norm.rmsnorm_triton", "gate"),
        ),
        # Not chosen by `auto` until measured to be faster than Triton on a GPU.
        Implementation(
            "cute",
            lambda: _cute().rmsnorm,
            platform.no_cute,
            devices=(),
            gate=from_kernels("norm.rmsnorm_cute", "specs"),
        ),
        in_cpp(lambda: _cpp().rmsnorm, batch_invariant=("cpu",)),
        Implementation(
            "torch",
            _torch,
            devices=("cuda", "cpu"),
            dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        ),
    ),
    norm_cases(add=False),
    # With cast="llama" a row is rounded twice, and a weight's gradient adds such rows: the twin's
    # own error is 1 to 2 %.
    judged=Judged(detects={torch.bfloat16: {"out 0": 0.05, "grad x": 0.041, "grad weight": 0.05}}),
    goals=(
        *cases.near_copy(92, "forward"),
        *cases.near_copy(85, "backward"),
        *(
            Goal(
                "H100",
                pass_name,
                "median_ms",
                at_most=most,
                cases=("8192x4096",),
                dtypes=("bfloat16",),
            )
            for pass_name, most in (("forward", 0.0485), ("forward_backward", 0.128))
        ),
    ),
)
ADD_RMSNORM = Op(
    "add_rmsnorm",
    add_rmsnorm,
    add_rmsnorm_eager,
    (
        in_triton(
            lambda: _triton().add_rmsnorm,
            batch_invariant=cases.ANYWHERE,
            tunables=from_kernels("norm.rmsnorm_triton", "TUNABLES"),
        ),
        Implementation(
            "cute", lambda: _cute().add_rmsnorm, platform.no_cute, devices=()
        ),  # see above
        in_cpp(lambda: _cpp().add_rmsnorm, batch_invariant=("cpu",)),
    ),
    norm_cases(add=True),
    # As of rmsnorm, with the rounding of the sum.
    judged=Judged(
        detects={
            torch.bfloat16: {
                "out 0": 0.057,
                "grad x": 0.049,
                "grad residual": 0.049,
                "grad weight": 0.076,
            }
        }
    ),
    goals=(*cases.near_copy(92, "forward"), *cases.near_copy(85, "backward")),
)
