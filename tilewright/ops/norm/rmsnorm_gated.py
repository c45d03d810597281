"""RMSNorm with a gate, which ends a layer of linear attention (Qwen3-Next, Mamba 2):

    y = w x / sqrt(mean(x^2) + eps) * silu(gate)

Shapes: D = columns, the last dimension. Sums accumulate in float32 or wider.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tilewright.core import checks
from tilewright.core.library import declare, from_kernels
from tilewright.core.registry import Case, Cost, Judged, Op, in_cpp, in_triton
from tilewright.core.takes import takes
from tilewright.ops import cases

# Widest row, which kernels keep in registers: with 8,192 columns on 512 threads ptxas spills 4
# bytes in the backward of bfloat16 for sm_120.
MAX_D = 4096


@checks.autocast("norm", "x", "gate")
@takes(
    f"1 <= D <= {MAX_D}",
    x="float [..., D]",
    gate="x [x]",
    weight="float [D]",
    eps="number [0, inf)",
)
def rmsnorm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    implementation: str = "auto",
) -> torch.Tensor:
    """Normalizes each row of x by its root mean square, scales it, and multiplies it by silu(gate),
    as in Qwen3-Next.

    Computed in float32, with the roundings of transformers' Qwen3NextRMSNormGated: the normalized
    row to x's dtype, and its product with the weight to the wider one of weight's and x's.
    Differentiable once in x, gate and weight (eager: any number of times); nothing but these is
    saved for backward. The gradient of weight accumulates in float32, on a CPU in float32 over 64
    rows and in float64 beyond (in a fixed order, without atomics).

    Args:
        x: [..., D], float32 | bfloat16 | float16 (float64 with eager), any strides, D <= 4096.
        gate: x's shape and dtype.
        weight: [D], any float dtype.
        eps: >= 0, added to the mean of squares.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        [..., D] in x's dtype; under torch.autocast in float32 (not on a CPU), as F.rms_norm does.

    Raises:
        TypeError, ValueError: invalid arguments.
        ImplementationUnavailable: a named implementation that cannot run here.

    Example:
        >>> x, gate = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 100.0]])
        >>> rmsnorm_gated(x, gate, torch.ones(2), eps=0.0)
        tensor([[  0.0000, 113.1371]])

    Source: arXiv:1910.07467; as in transformers' Qwen3NextRMSNormGated.
    """
    return RMSNORM_GATED.pick(implementation, x)(x, gate, weight, float(eps))


# ---- the definition


def rmsnorm_gated_eager(x, gate, weight, eps):
    acc = torch.promote_types(x.dtype, torch.float32)
    h = x.to(acc)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    h = weight.to(acc) * h.to(x.dtype).to(acc)
    h = h.to(torch.promote_types(weight.dtype, x.dtype)).to(acc)
    return (h * torch.nn.functional.silu(gate.to(acc))).to(x.dtype)


# ---- fused implementations


class Gradients(NamedTuple):
    dx: torch.Tensor
    dgate: torch.Tensor
    dweight: torch.Tensor


@declare
def normalize_gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    return torch.empty_like(x)


@declare
def normalize_gated_backward(
    dy: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> Gradients:
    return Gradients(torch.empty_like(x), torch.empty_like(x), torch.empty_like(weight))


@normalize_gated.formula()
def _backward(op, dy, x, gate, weight, eps):
    dx, dgate, dweight = op(dy.contiguous(), x, gate, weight, eps)
    return {"x": dx, "gate": dgate, "weight": dweight}


def _fused(operator):
    def run(x, gate, weight, eps):
        if weight.dtype not in (x.dtype, torch.float32):
            # The kernels round the product to float32 or to x's dtype.
            weight = weight.float()
        return operator(x.contiguous(), gate.contiguous(), weight.contiguous(), eps)

    return run


@functools.cache
def _triton():
    from tilewright.kernels.norm import rmsnorm_gated_triton as k

    def backward(*arguments):
        return Gradients(*k.backward(*arguments))

    operator = normalize_gated.define(
        "rmsnorm_gated_triton",
        k.forward,
        normalize_gated_backward.define("rmsnorm_gated_triton_backward", backward),
    )

    return _fused(operator)


@functools.cache
def _cpp():
    backward = normalize_gated_backward.adopt("rmsnorm_gated_cpp_backward")
    return _fused(normalize_gated.adopt("rmsnorm_gated_cpp", backward))


# ---- cases


def _case(name, shape, *, mixed=False, strided=False, tags=cases.CONTRACT):
    n = functools.reduce(int.__mul__, shape)

    def make(device, dtype, seed):
        new = {"device": device, "gen": cases.generator(device, seed)}
        kw = {
            name: cases.randn(*shape, dtype=dtype, **new, requires_grad=False)
            for name in ("x", "gate")
        }
        if strided:  # every second column
            kw = {name: t.repeat_interleave(2, -1)[..., ::2] for name, t in kw.items()}
        kw["weight"] = cases.randn(
            shape[-1],
            dtype=torch.float32 if mixed else dtype,
            scale=0.2,
            shift=1.0,
            **new,
            requires_grad=False,
        )
        return {name: t.requires_grad_() for name, t in kw.items()}

    def cost(itemsize):  # forward: x, gate in, y out; backward: x, gate, dy in, dx, dgate out
        return Cost(3 * n * itemsize, 5 * n * itemsize, 8 * n, 20 * n)

    return Case(name, make, cost, tags)


RMSNORM_GATED = Op(
    "rmsnorm_gated",
    rmsnorm_gated,
    rmsnorm_gated_eager,
    (
        in_triton(_triton, tunables=from_kernels("norm.rmsnorm_gated_triton", "TUNABLES")),
        in_cpp(_cpp, batch_invariant=("cpu",)),
    ),
    (
        _case("ragged", (3, 7, 100)),
        _case("one_row", (1, 5)),
        _case("no_rows", (0, 64)),
        _case("heads", (2, 5, 4, 128)),
        _case("fp32_weight", (6, 96), mixed=True),
        _case("strided", (4, 36), strided=True),
        _case("wide", (2, 2500)),
        *(
            # 32 value heads of Qwen3-Next-80B-A3B
            _case("qwen3-next-80b-a3b", (cases.TOKENS[device], 32, 128), tags=tags)
            for device, tags in (("cuda", cases.CUDA), ("cpu", cases.CPU))
        ),
        _case("big", (2**19 + 1, 4096), tags=cases.BIG),
    ),
    # As of rmsnorm with cast="llama", with one more rounding, of the product with the weight.
    judged=Judged(
        detects={
            torch.bfloat16: {
                "out 0": 0.036,
                "grad x": 0.047,
                "grad gate": 0.038,
                "grad weight": 0.12,
            }
        }
    ),
    goals=(*cases.near_copy(92, "forward"), *cases.near_copy(85, "backward")),
)
