"""Gated activations: silu(gate) * up (SwiGLU, Shazeer 2020, arXiv:2002.05202) and gelu(gate) * up
(GeGLU).

Shapes: I = inner width, the last dimension. Computed in float32, rounded once, on store.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

from tilewright.core import checks
from tilewright.core.registry import Case, Cost, Implementation, Op, in_cpp, in_triton
from tilewright.core.takes import takes
from tilewright.kernels.activation.operators import act_mul, act_mul_backward, as_rows
from tilewright.ops import cases
from tilewright.ops.activation.gate import ACTIVATIONS, Gate, gate_eager, gate_parts, gelu_tanh

__all__ = [
    "ACTIVATIONS",
    "GELU_MUL",
    "SILU_MUL",
    "Gate",
    "as_rows",
    "gate_eager",
    "gate_parts",
    "gelu_mul",
    "silu_mul",
]

SILU, GELU_TANH, GELU_ERF = 0, 1, 2
APPROXIMATE = {"tanh": GELU_TANH, "none": GELU_ERF}


# Without `up`, gate holds both.
GATED = "gate: up is not None or I % 2 == 0"
GATE_UP = {"gate": "float [..., I]", "up": "gate [gate]"}


@checks.autocast("inputs")
@takes(GATED, **GATE_UP)
def silu_mul(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, implementation: str = "auto"
) -> torch.Tensor:
    """SwiGLU: silu(gate) * up, where silu(g) = g / (1 + exp(-g)); gate and up separate or packed.

    Computed in float32, rounded once, on store. Differentiable once in both. Saved for backward:
    the inputs alone, from which the backward recomputes the activation; for a packed input it
    writes one packed gradient.

    Args:
        gate: [..., I] fp32 | bf16 | fp16 (fp64 with eager and torch), any strides. Rows of a wider
            tensor (contiguous last dimension, leading dimensions that merge into one stride) are
            read in place; other layouts are copied.
        up: same shape and dtype as gate. None: gate is packed, [..., 2 I] = [gate; up].
        implementation: "auto", or one of triton, cpp, torch, eager.

    Returns:
        [..., I], contiguous, in gate's dtype.

    Raises:
        TypeError, ValueError: invalid arguments.
        ImplementationUnavailable: a named implementation that cannot run here.

    Example:
        >>> tilewright.ops.silu_mul(torch.zeros(2), torch.ones(2)).tolist()
        [0.0, 0.0]

    Source: SwiGLU without its projections, arXiv:2002.05202; as in transformers' LlamaMLP.
    """
    return SILU_MUL.pick(implementation, gate)(gate, up, SILU)


@checks.autocast("inputs")
@takes(GATED, **GATE_UP, approximate=tuple(APPROXIMATE))
def gelu_mul(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    approximate: str = "tanh",
    implementation: str = "auto",
) -> torch.Tensor:
    """GeGLU, as in Gemma: gelu(gate) * up; gate and up separate or packed.

    Precision and differentiability as in `silu_mul`.

    Args:
        gate, up, implementation: as in `silu_mul`.
        approximate: "tanh" for 0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))), "none" for
            g Phi(g), where Phi is the normal CDF. The fused kernels keep the relative accuracy of
            Phi in the negative tail too.

    Returns:
        As `silu_mul`.

    Raises:
        TypeError, ValueError, ImplementationUnavailable: as `silu_mul`.

    Example:
        >>> y = tilewright.ops.gelu_mul(torch.ones(1), torch.ones(1), approximate="none")
        >>> f"{y.item():.4f}"
        '0.8413'

    Source: arXiv:2002.05202 and arXiv:1606.08415; "tanh" as in transformers' GemmaMLP.
    """
    return GELU_MUL.pick(implementation, gate)(gate, up, APPROXIMATE[approximate])


# ---- the definition


def act_mul_eager(gate, up=None, kind=SILU):
    if up is None:
        gate, up = gate.chunk(2, -1)
    acc = torch.promote_types(gate.dtype, torch.float32)
    g = gate.to(acc)
    a = F.silu(g) if kind == SILU else gelu_tanh(g) if kind == GELU_TANH else F.gelu(g)
    return (a * up.to(acc)).to(gate.dtype)


# ---- PyTorch's own operators: activation, then product, each rounded


def act_mul_torch(gate, up, kind):
    if up is None:
        gate, up = gate.chunk(2, -1)
    if kind == SILU:
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if kind == GELU_TANH else "none") * up


# ---- fused implementations


@act_mul.formula()
def _backward(op, dy, gate, up, kind):
    dgate, dup = op(dy, gate, up, kind)
    return {"gate": dgate, "up": dup}


@functools.cache
def _triton():
    from tilewright.kernels.activation import activation_triton as k

    backward = act_mul_backward.define("act_mul_triton_backward", k.backward)
    return act_mul.define("act_mul_triton", k.forward, backward)


@functools.cache
def _cpp():
    return act_mul.adopt("act_mul_cpp", act_mul_backward.adopt("act_mul_cpp_backward"))


def _tunables(op):
    from tilewright.kernels.activation import activation_triton

    return tuple(t for t in activation_triton.TUNABLES if t.op == op)


# ---- cases


def case(name, rows, inner, *, packed=False, strided=False, tags=cases.CONTRACT, **options):
    n = inner * math.prod(rows)

    def make(device, dtype, seed):
        new = {"device": device, "dtype": dtype, "gen": cases.generator(device, seed), "scale": 2.0}
        if packed:
            return {"gate": cases.randn(*rows, 2 * inner, **new), **options}
        if strided:  # rows of wider tensors
            wide = [cases.randn(*rows, 3 * inner, **new, requires_grad=False) for _ in range(2)]
            gate, up = (t[..., inner : 2 * inner].requires_grad_() for t in wide)
            return {"gate": gate, "up": up, **options}
        return {
            "gate": cases.randn(*rows, inner, **new),
            "up": cases.randn(*rows, inner, **new),
            **options,
        }

    def cost(itemsize):  # forward: 2 in, 1 out; backward: 3 in, 2 out
        return Cost(3 * n * itemsize, 5 * n * itemsize, 5 * n, 12 * n)

    return Case(name, make, cost, tags)


def _all_cases(models, **options):
    small = [
        case("ragged", (3, 7), 100, **options),
        case("packed", (5, 3), 77, packed=True, **options),
        case("strided", (4, 3), 36, strided=True, **options),
        case("no_rows", (0,), 64, packed=True, **options),
        case("one_row", (1,), 17, **options),
        case("no_columns", (3,), 0, **options),
        case("wide", (2,), 2500, packed=True, **options),
        # Rows aligned to 16 bytes only.
        case("by_eight", (3,), 1048, packed=True, **options),
    ]
    timed = []
    for device, tags in (("cuda", cases.CUDA), ("cpu", cases.CPU)):
        for name in models:
            experts = 8 if name == "qwen3-30b-a3b" else 1  # per token
            tokens = cases.TOKENS[device] * experts
            timed.append(
                case(name, (tokens,), cases.MODELS[name].inner, packed=True, tags=tags, **options)
            )
    return (*small, *timed, case("big", (2**17 + 1,), 16384, tags=cases.BIG, **options))


def _implementations(op):
    return (
        in_triton(_triton, batch_invariant=cases.ANYWHERE, tunables=lambda: _tunables(op)),
        in_cpp(_cpp, batch_invariant=("cpu",)),
        Implementation(
            "torch",
            lambda: act_mul_torch,
            devices=("cuda", "cpu"),
            rounds_between=True,
            dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        ),
    )


SILU_MUL = Op(
    "silu_mul",
    silu_mul,
    act_mul_eager,
    _implementations("silu_mul"),
    _all_cases(("qwen3-8b", "qwen3-30b-a3b", "llama-3-8b", "deepseek-v3")),
    goals=cases.near_copy(92, "forward", "backward"),
)
GELU_MUL = Op(
    "gelu_mul",
    gelu_mul,
    act_mul_eager,
    _implementations("gelu_mul"),
    (
        *_all_cases(("gemma-3-4b",)),
        case("erf", (3, 5), 200, approximate="none"),
        case("erf_packed", (3,), 33, packed=True, approximate="none"),
    ),
    goals=cases.near_copy(92, "forward", "backward"),
)
