"""Newton-Schulz orthogonalization, the step of the optimizer Muon.

    X_0 = x / max(|x|_F, eps),    X <- a X + (b G + c G^2) X    with G = X X^T, `steps` times

This maps every singular value s of X_0 to p(...p(s)) with p(s) = a s + b s^3 + c s^5 and keeps the
singular vectors: it approximates U V^T of x = U S V^T.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from tilewright.core import checks, platform
from tilewright.core.library import declare, from_kernels, refuse_tangents
from tilewright.core.registry import (
    Case,
    Cost,
    Goal,
    Implementation,
    Judged,
    Op,
    in_gluon,
    in_triton,
)
from tilewright.core.takes import takes
from tilewright.kernels.optim.newton_schulz import WIDE, iterate, normalized
from tilewright.ops import cases, products

# Keller Jordan's: the largest slope at 0 with which singular values stay bounded. They oscillate
# within 0.68 to 1.21 and never converge.
QUINTIC = (3.4445, -4.7750, 2.0315)
# Polar Express: the polynomial of each step is the best for the interval that the previous ones
# leave of [1e-3, 1], with a cushion of 0.024 (arXiv 2505.16932, section 4; computed anew by
# Remez's algorithm, equal in 9 digits). The last one repeats.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.875, -1.25, 0.375),
)
SAFETY = 1.01  # of every step but the last: rounding lifts singular values above the interval
COEFFICIENTS = ("quintic", "polar_express")


@checks.autocast("inputs")
@takes(x="float [..., M, N]", steps="static int [1, inf)", eps="number (0, inf)")
def newton_schulz(
    x: torch.Tensor,
    steps: int = 5,
    *,
    coefficients: str | Sequence[Sequence[float]] = "quintic",
    eps: float = 1e-7,
    implementation: str = "auto",
) -> torch.Tensor:
    """Orthogonalizes matrices, as a step of Muon does: approximates U V^T of x = U S V^T.

    Products have factors in x's dtype and accumulate in float32; the iterates are rounded to x's
    dtype (the eager twin: float32 throughout). Singular values far below the largest stay small.
    Not differentiable.

    Args:
        x: [..., M, N] fp32 | bf16 | fp16 (fp64 with eager), any strides; each matrix by itself.
        steps: >= 1.
        coefficients: "quintic": Keller Jordan's, the same in each step; singular values of x / |x|
            of 0.01 and more become 0.68 to 1.14, those of 0.001 become 0.47. "polar_express":
            another polynomial in each step, which converges: singular values of 0.001 and more
            become 0.84 to 1.13 in 5 steps, 0.99 to 1.01 in 6. Or (a, b, c) of each step, the last
            of which repeats.
        eps: > 0; the least norm by which x is divided, so that zeros stay zeros.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        [..., M, N], contiguous, in x's dtype.

    Raises:
        TypeError, ValueError: invalid arguments, or an x that requires a gradient.
        ImplementationUnavailable: a named implementation that cannot run here.

    Example:
        >>> x = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
        >>> newton_schulz(x, 8, coefficients="polar_express").abs().round(decimals=3)
        tensor([[1., 0., 0.],
                [0., 1., 0.]])

    Source: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks";
    arXiv 2505.16932 (Polar Express).
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("x requires a gradient, and newton_schulz has none; pass x.detach()")
    polynomials = _polynomials(coefficients, steps)
    run = NEWTON_SCHULZ.pick(implementation, x)
    if run is not newton_schulz_eager:
        refuse_tangents(f"newton_schulz[{implementation}]", x)
    with torch.no_grad(), checks.no_autocast(x):
        return run(x, polynomials, float(eps))


def _polynomials(coefficients: str | Sequence[Sequence[float]], steps: int) -> list[float]:
    """a, b, c of each step, in one list."""
    if isinstance(coefficients, str):
        checks.choice("coefficients", coefficients, COEFFICIENTS)
        return list(_named(coefficients, steps))
    polynomials = [tuple(c) for c in coefficients]
    if not polynomials or any(len(c) != 3 for c in polynomials):
        raise ValueError(
            f"coefficients must be one of {list(COEFFICIENTS)}, or (a, b, c) of each step, got "
            f"{coefficients!r}"
        )
    polynomials += polynomials[-1:] * (steps - len(polynomials))
    return [float(n) for polynomial in polynomials[:steps] for n in polynomial]


@functools.cache
def _named(coefficients: str, steps: int) -> tuple[float, ...]:
    if coefficients == "quintic":
        return QUINTIC * steps
    numbers: list[float] = []
    for step in range(steps):
        a, b, c = POLAR_EXPRESS[min(step, len(POLAR_EXPRESS) - 1)]
        # The first one also divides x.
        s = SAFETY ** ((step < steps - 1) + (step == 0))
        numbers += [a / s, b / s**3, c / s**5]
    return tuple(numbers)


# ---- the definition


def newton_schulz_eager(x, coefficients, eps):
    w = x.to(torch.promote_types(x.dtype, torch.float32))
    tall = x.shape[-2] > x.shape[-1]
    w = w.mT if tall else w
    w = normalized(w, eps)
    for a, b, c in zip(*(coefficients[i::3] for i in range(3)), strict=True):
        gram = w @ w.mT
        w = a * w + (b * gram + c * (gram @ gram)) @ w
    return (w.mT if tall else w).to(x.dtype).contiguous()


# ---- faster implementations


@declare
def orthogonalize(x: torch.Tensor, coefficients: list[float], eps: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@functools.cache
def _triton():
    from tilewright.kernels.optim import newton_schulz_triton

    return orthogonalize.define("newton_schulz_triton", newton_schulz_triton.newton_schulz)


@functools.cache
def _gluon():
    from tilewright.kernels.optim import newton_schulz_gluon

    return orthogonalize.define("newton_schulz_gluon", newton_schulz_gluon.newton_schulz)


# Rows of a block of a symmetric product; what is above the diagonal of blocks is copied.
BLOCK = 256


def _factor(t):
    """t in the dtype whose products are the fastest: float32 where products are ATen's."""
    return t if products.takes(torch.float32) and products.takes(t.dtype) else t.float()


def _symmetric(left, right, alpha, addend, beta):
    B, M, _ = left.shape
    out = left.new_empty(B, M, M, dtype=torch.float32)
    a, b = _factor(left), _factor(right)
    for i in range(B):
        for start in range(0, M, BLOCK):
            end = min(start + BLOCK, M)
            block = out[i, start:end, :end]
            products.gemm_(block, a[i, start:end], b[i, :end].mT, scale=alpha)
            out[i, :start, start:end] = block[:, :start].mT
    if addend is not None:
        out.add_(addend, alpha=beta)
    return out.to(left.dtype)


def _general(left, right, beta):
    out = right.float() * beta
    a, b = _factor(left), _factor(right)
    for i in range(len(out)):
        products.gemm_(out[i], a[i], b[i], add=True)
    return out.to(right.dtype)


@functools.cache
def _cpp():
    return orthogonalize.define(
        "newton_schulz_cpp", functools.partial(iterate, symmetric=_symmetric, general=_general)
    )


# ---- cases


def _flops(M: int, N: int, steps: int) -> int:
    """FLOPs with half of each symmetric product, in the form that `iterate` takes."""
    M, N = min(M, N), max(M, N)
    one, two = 3 * M * M * N + M**3, 3 * M * M * N + 5 * M**3
    return steps // 2 * (two if N >= WIDE * M else 2 * one) + steps % 2 * one


def _case(name, shape, tags=cases.CONTRACT, *, zero=False, **options):
    """Normal values, on the diagonal shifted: otherwise singular values near 0, whose relative
    error no dtype bounds, would be amplified.
    """
    *lead, M, N = shape

    def make(device, dtype, seed):
        gen = cases.generator(device, seed)
        x = cases.randn(*shape, device=device, dtype=torch.float32, gen=gen, requires_grad=False)
        x.diagonal(dim1=-2, dim2=-1).add_(2 * math.sqrt(min(M, N)) if "contract" in tags else 0.0)
        return {"x": (x * (0.0 if zero else 0.01)).to(dtype), **options}

    def cost(itemsize):
        n = math.prod(lead)
        flops = n * _flops(M, N, options.get("steps", 5))
        return Cost(2 * n * M * N * itemsize, 0, flops, 0)

    return Case(name, make, cost, tags)


def _atol(dtype, kwargs, name):
    """Beside the twin's error, iterates in x's dtype carry a rounding each, which the slopes of the
    polynomials amplify. Measured in these cases, worst element: float32 5e-5, bfloat16 0.1, and
    0.4 in two steps on a small Gram matrix, 0.2 where M is 128 (in Frobenius norm 0.07 and 0.02).
    """
    if dtype == torch.bfloat16:
        return 0.5 if max(kwargs["x"].shape[-2:]) >= WIDE * min(kwargs["x"].shape[-2:]) else 0.15
    return 5e-5


_QWEN3 = cases.MODELS["qwen3-8b"]

NEWTON_SCHULZ = Op(
    "newton_schulz",
    newton_schulz,
    newton_schulz_eager,
    (
        in_gluon(
            _gluon,
            "symmetric products that fill the device with tiles of 128 x 128",
            dtypes=(torch.bfloat16,),
            tunables=from_kernels("optim.newton_schulz_gluon", "TUNABLES"),
        ),
        in_triton(
            _triton,
            dtypes=(torch.float32, torch.bfloat16),
            tunables=from_kernels("optim.newton_schulz_triton", "TUNABLES"),
            gate=from_kernels("optim.newton_schulz_triton", "gate"),
        ),
        # Its products are C++ or ATen's, whichever is faster.
        Implementation(
            "cpp", _cpp, platform.no_cpp, ("cpu",), dtypes=(torch.float32, torch.bfloat16)
        ),
    ),
    (
        _case("square", (24, 24), steps=3),
        _case("ragged", (2, 17, 33), steps=2),
        _case("wide", (3, 16, 48), coefficients="polar_express", steps=4),
        _case("tall aligned", (80, 32), coefficients="polar_express", steps=3),
        _case("tiles", (72, 136), steps=2),
        _case("one_step", (2, 1, 9, 5), steps=1, coefficients=((1.5, -0.5, 0.0),)),
        _case("row", (1, 40), steps=2),
        _case("zeros", (2, 5, 7), zero=True),
        _case("no_matrices", (0, 5, 7)),
        _case("no_columns", (3, 0)),
        _case("qwen3-8b-q", (4, _QWEN3.hidden, _QWEN3.hidden), cases.CUDA),
        _case("qwen3-8b-up", (2, _QWEN3.inner, _QWEN3.hidden), cases.CUDA),
        _case("qwen3-30b-a3b-experts", (64, 768, 2048), cases.CUDA),
        _case("square", (512, 512), cases.CPU),
        _case("wide", (4, 256, 1024), cases.CPU),
        _case("big", (2**19 + 1, 64, 64), cases.BIG, steps=1),
    ),
    atol=_atol,
    # The slack of 0.5 and 0.15, of a root mean square that is twice an ordinary element.
    judged=Judged(of_sums=True, detects={torch.bfloat16: {"out 0": 1.3}}),
    # Muon's step is to take at most 3 % more than AdamW's. Five iterations take 20 N flops a
    # parameter of a square matrix of width N (with half of each symmetric product), and a step of T
    # tokens 6 T: with N = 4096 and a million tokens 1.4 %, if the products are as fast as training,
    # which reaches half of the peak.
    goals=(Goal(cases.HOPPER, "forward", "matmul_percent", at_least=50, dtypes=("bfloat16",)),),
)
