"""Gated activations: silu(gate) * up (SwiGLU, Shazeer 2020, arXiv:2002.05202) and gelu(gate) * up
(GeGLU).

Shapes: I = inner width, the last dimension. Computed in float32, rounded once, on store.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tilewright import platform
from tilewright.core import checks
from tilewright.core.library import define, differentiate
from tilewright.core.registry import Case, Cost, Implementation, Op
from tilewright.ops import cases
from tilewright.ops.activation.gate import ACTIVATIONS, Gate, gate_eager, gate_parts, gelu_tanh

__all__ = [
    "ACTIVATIONS",
    "GELU_MUL",
    "SILU_MUL",
    "Gate",
    "gate_eager",
    "gate_parts",
    "gelu_mul",
    "silu_mul",
]

SILU, GELU_TANH, GELU_ERF = 0, 1, 2
APPROXIMATE = {"tanh": GELU_TANH, "none": GELU_ERF}


@checks.autocast("inputs")
def silu_mul(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, implementation: str = "auto"
) -> torch.Tensor:
    """silu(gate) * up, where silu(g) = g / (1 + exp(-g)).

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
    check_gate_up(gate, up)
    return SILU_MUL.pick(implementation, gate)(gate, up, SILU)


@checks.autocast("inputs")
def gelu_mul(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    approximate: str = "tanh",
    implementation: str = "auto",
) -> torch.Tensor:
    """gelu(gate) * up, the GeGLU of Gemma.

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
    check_gate_up(gate, up)
    checks.choice("approximate", approximate, tuple(APPROXIMATE))
    return GELU_MUL.pick(implementation, gate)(gate, up, APPROXIMATE[approximate])


def check_gate_up(gate, up):
    checks.floating("gate", gate)
    if gate.dim() == 0:
        raise ValueError("gate must have at least one dimension, got a scalar")
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(
                f"a packed gate must have an even last dimension, got {list(gate.shape)}"
            )
        return
    checks.floating("up", up)
    checks.shape("up", up, gate.shape, "that of gate")
    if up.dtype != gate.dtype:
        raise TypeError(f"up must have gate's dtype {gate.dtype}, got {up.dtype}")
    checks.same_device(gate=gate, up=up)


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


def as_rows(t: torch.Tensor) -> torch.Tensor:
    """Reshapes [..., I] to [rows, I]: a view if the last dimension is contiguous and the leading
    ones merge, else a copy.
    """
    if t.dim() != 2:
        # reshape(-1, ...) fails for a tensor without elements.
        t = t.reshape(t.numel() // max(1, t.shape[-1]), t.shape[-1])
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def _rows_or_dense(t: torch.Tensor) -> torch.Tensor:
    """`as_rows`, but a contiguous tensor is returned as is: a view costs half a launch and more."""
    return t if t.is_contiguous() else as_rows(t)


def _fake_split(gate, up, kind):
    return gate.new_empty(gate.shape)


def _fake_split_backward(dy, gate, up, kind):
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _fake_packed(packed, kind):
    return packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2))


def _fake_packed_backward(dy, packed, kind):
    return packed.new_empty(packed.shape)


def _setup(ctx, inputs, output):
    *tensors, ctx.kind = inputs
    ctx.save_for_backward(*tensors)


def _split_backward(ctx, dy):
    return *ctx.backward_op(dy, *ctx.saved_tensors, ctx.kind), None


def _packed_backward(ctx, dy):
    return ctx.backward_op(dy, *ctx.saved_tensors, ctx.kind), None


class _Fused:
    """Two operators, split and packed: slicing a packed input would pad and add two gradients.

    forward, backward: launchers.   rows: converts [..., I] to the layout that they take.
    """

    def __init__(self, name: str, forward: Callable, backward: Callable, rows: Callable = as_rows):
        self._forward, self._backward, self._rows = forward, backward, rows
        op = f"act_mul_{name}"
        self.split = define(f"{op}_split_forward", self._launch_split, _fake_split)
        self.packed = define(f"{op}_packed_forward", self._launch_packed, _fake_packed)
        split_backward = define(
            f"{op}_split_backward", self._launch_split_backward, _fake_split_backward
        )
        packed_backward = define(
            f"{op}_packed_backward", self._launch_packed_backward, _fake_packed_backward
        )
        differentiate(self.split, _split_backward, _setup, backward_op=split_backward)
        differentiate(self.packed, _packed_backward, _setup, backward_op=packed_backward)

    def act_mul(self, gate, up, kind):
        return self.packed(gate, kind) if up is None else self.split(gate, up, kind)

    def _launch_split(self, gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
        y = self._forward(self._rows(gate), self._rows(up), kind)
        return y if y.dim() == gate.dim() else y.view(gate.shape)

    def _launch_split_backward(
        self, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._rows
        dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
        self._backward(rows(dy), rows(gate), rows(up), rows(dgate), rows(dup), kind)
        return dgate, dup

    def _launch_packed(self, packed: torch.Tensor, kind: int) -> torch.Tensor:
        inner = packed.shape[-1] // 2
        both = as_rows(packed)
        y = self._forward(both[:, :inner], both[:, inner:], kind)
        return y if packed.dim() == 2 else y.view(*packed.shape[:-1], inner)

    def _launch_packed_backward(
        self, dy: torch.Tensor, packed: torch.Tensor, kind: int
    ) -> torch.Tensor:
        inner = packed.shape[-1] // 2
        both, d = as_rows(packed), packed.new_empty(packed.shape)
        flat = as_rows(d)  # a view: d is contiguous
        self._backward(
            as_rows(dy), both[:, :inner], both[:, inner:], flat[:, :inner], flat[:, inner:], kind
        )
        return d


@functools.cache
def _triton():
    from tilewright.kernels.activation import activation_triton as k

    return _Fused("triton", k.forward, k.backward, _rows_or_dense)


@functools.cache
def _cpp():
    ops = torch.ops.tilewright
    return _Fused("cpp", ops.act_mul_cpp_forward.default, ops.act_mul_cpp_backward.default)


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
        Implementation(
            "triton",
            lambda: _triton().act_mul,
            platform.no_triton,
            batch_invariant=cases.ANYWHERE,
            tunables=lambda: _tunables(op),
        ),
        Implementation(
            "cpp",
            lambda: _cpp().act_mul,
            platform.no_cpp,
            ("cpu",),
            (torch.float32, torch.bfloat16),
            batch_invariant=("cpu",),
        ),
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
