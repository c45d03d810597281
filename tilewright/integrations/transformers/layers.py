"""Norms, MLPs and rotary embeddings of transformers' models, computed by this library's ops.

What a class computes is found by evaluating it: its own forward, on a few numbers on the CPU, must
agree with an op. A class that does not agree is left as it is, with the reason.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tilewright import ops
from tilewright.core import checks
from tilewright.integrations.transformers.functions import called_by, calling
from tilewright.integrations.transformers.instance import (
    MERGED,
    SPLIT,
    generator,
    probe,
    was_changed,
    was_given,
)
from tilewright.integrations.transformers.known import (
    DTYPES,
    LENGTHS,
    is_known_class,
    may_depend,
    why_unknown,
)
from tilewright.ops.activation.activation import GELU_ERF, GELU_TANH, SILU, act_mul_eager
from tilewright.ops.norm.rmsnorm import rmsnorm_eager
from tilewright.ops.norm.rmsnorm_gated import rmsnorm_gated_eager
from tilewright.ops.rope.rope import prepare_tables, rope_eager

# 1e-5: a few roundings in float32.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


DIFFERS = "computes something else in another dtype, or for another number of rows"


def _agree(actual: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether the two agree to some roundings of their dtype, which must be the same."""
    within = 16 * torch.finfo(wanted.dtype).eps
    return actual.dtype == wanted.dtype and torch.allclose(actual, wanted, rtol=within, atol=within)


# ---- norms


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.RMSNorm) or "RMSNorm" in type(module).__name__


def _norm_parts(module: nn.Module) -> tuple[str, float, torch.Tensor, torch.Tensor] | str:
    """(the attribute of eps, eps, rows and a weight to evaluate it on), or the reason why it is no
    norm of rows by one weight.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(list(module.parameters())) != 1:
        return "has no weight [D] of its own, or further parameters"
    name = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
    if not isinstance(eps := getattr(module, name, None), float):
        return "has no eps"
    g, D = generator(), weight.shape[0]
    x = torch.randn(3, D, generator=g) * torch.tensor([[0.01], [1.0], [30.0]])
    return name, eps, x, torch.rand(D, generator=g) + 0.5


def norm_options(module: nn.Module) -> tuple | str:
    """(the attribute of eps, offset, cast, promotes) for `norm_forward`, or the reason why
    `ops.rmsnorm` does not compute the same.
    """
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return "takes more than the rows to normalize"
    parts = _norm_parts(module)
    if isinstance(parts, str):
        return parts
    name, eps, x, w = parts

    def own(x, w):
        return type(module).forward(probe(module, parameters={"weight": w}), x)

    try:
        expected, rounded = own(x, w), own(x.bfloat16(), w.bfloat16())
        promotes = own(x.bfloat16(), w).dtype == torch.float32
    except Exception as error:
        return f"cannot be evaluated ({type(error).__name__}: {error})"
    for offset in (0.0, 1.0):
        if torch.allclose(expected, rmsnorm_eager(x, w, None, eps, offset), **CLOSE):
            casts = {
                cast: (rmsnorm_eager(x.bfloat16(), w.bfloat16(), None, eps, offset, cast) - rounded)
                .float()
                .norm()
                for cast in ("llama", "gemma")
            }
            return name, offset, min(casts, key=lambda cast: float(casts[cast])), promotes
    return "does not compute x / rms(x) * (offset + weight)"


def norm_unknown(module: Any, eps: str, *computed: Any) -> str | None:
    """Why nobody can tell that a norm computes what its options say wherever it is called."""
    if (reason := why_unknown(module, ("weight", eps))) or is_known_class(type(module)):
        return reason
    g, D, value = generator(), module.weight.shape[0], getattr(module, eps)
    for dtype, length in itertools.product(DTYPES, LENGTHS):
        x = (torch.randn(length, D, generator=g) * 10.0 ** torch.randn(length, 1, generator=g)).to(
            dtype
        )
        w = (torch.rand(D, generator=g) + 0.5).to(dtype)
        own = probe(module, parameters={"weight": w})
        if is_gated_norm(module):
            gate = torch.randn(length, D, generator=g).to(dtype)
            actual, wanted = own(x, gate), rmsnorm_gated_eager(x, gate, w, value)
        else:
            offset, cast, _ = computed
            actual, wanted = own(x), rmsnorm_eager(x, w, None, value, offset, cast)
        if not _agree(actual, wanted):
            return DIFFERS
    return None


def norm_forward(base: type, eps: str, offset: float, cast: str, promotes: bool) -> Callable:
    own = base.forward

    @functools.wraps(own)
    def forward(self, hidden_states):
        if not isinstance(getattr(self, eps), float) or was_changed(self):
            return own(self, hidden_states)
        weight = self.weight
        if promotes and weight.dtype != hidden_states.dtype:
            # A float32 weight makes a 16-bit row float32.
            dtype = torch.promote_types(weight.dtype, hidden_states.dtype)
            hidden_states = hidden_states.to(dtype)
        with checks.no_autocast(hidden_states):
            return ops.rmsnorm(hidden_states, weight, getattr(self, eps), offset=offset, cast=cast)

    return forward


def is_gated_norm(module: nn.Module) -> bool:
    return is_norm(module) and len(inspect.signature(type(module).forward).parameters) == 3


def gated_norm_options(module: nn.Module) -> tuple | str:
    """(the attribute of eps,) for `gated_norm_forward`, or the reason why `ops.rmsnorm_gated` does
    not compute the same.
    """
    parts = _norm_parts(module)
    if isinstance(parts, str):
        return parts
    name, eps, x, w = parts
    gate = torch.randn(x.shape, generator=generator())
    try:
        actual = type(module).forward(probe(module, parameters={"weight": w}), x, gate)
    except Exception as error:
        return f"cannot be evaluated ({type(error).__name__}: {error})"
    if torch.allclose(actual, rmsnorm_gated_eager(x, gate, w, eps), **CLOSE):
        return (name,)
    return "does not compute x / rms(x) * weight * silu(gate)"


def gated_norm_forward(base: type, eps: str) -> Callable:
    own = base.forward

    @functools.wraps(own)
    def forward(self, hidden_states, gate):
        fits = isinstance(getattr(self, eps), float) and gate.dtype == hidden_states.dtype
        if not fits or was_changed(self):
            return own(self, hidden_states, gate)
        with checks.no_autocast(hidden_states):
            return ops.rmsnorm_gated(hidden_states, gate, self.weight, getattr(self, eps))

    return forward


# ---- MLPs


def is_mlp(module: nn.Module) -> bool:
    return any(
        all(isinstance(module._modules.get(name), nn.Module) for name in names)
        for names in (SPLIT, MERGED)
    )


def mlp_options(module: nn.Module) -> tuple | str:
    """(kind of activation, whether gate and up are merged) for `mlp_forward`, or the reason why
    `ops.silu_mul` and `ops.gelu_mul` do not compute the same.
    """
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules()):
        return "has dropout"
    merged, g = "up_proj" not in module._modules, generator()
    linears = _linears(merged, g)
    # Large values, which a limit would clamp.
    x = torch.randn(1, 12, 4, generator=g) * torch.logspace(-1, 3, 12)[:, None]
    down = linears["down_proj"]
    try:
        expected = type(module).forward(probe(module, modules=linears), x)
        inputs = [linear(x) for linear in list(linears.values())[:-1]]
        gate, up = inputs[0].chunk(2, -1) if merged else inputs
        for kind in (SILU, GELU_TANH, GELU_ERF):
            if torch.allclose(expected, down(act_mul_eager(gate, up, kind)), **CLOSE):
                return kind, merged
    except Exception as error:
        return f"cannot be evaluated ({type(error).__name__}: {error})"
    return "does not compute down_proj(silu(gate) * up), nor with GELU"


def mlp_unknown(module: nn.Module, kind: int, merged: bool) -> str | None:
    """Why nobody can tell that an MLP computes this wherever it is called."""
    if (reason := why_unknown(module, tuple(module._modules))) or is_known_class(type(module)):
        return reason
    g = generator()
    for dtype, length in itertools.product(DTYPES, LENGTHS):
        linears = _linears(merged, g, dtype)
        x = torch.randn(2, length, 4, generator=g).to(dtype)
        inputs = [linear(x) for linear in list(linears.values())[:-1]]
        gate, up = inputs[0].chunk(2, -1) if merged else inputs
        wanted = linears["down_proj"](act_mul_eager(gate, up, kind))
        # Its own rounds between the activation and the product.
        if not _agree(probe(module, modules=linears)(x), wanted):
            return DIFFERS
    return None


def _linears(merged: bool, g: torch.Generator, dtype: torch.dtype = torch.float32) -> dict:
    """Small projections of an MLP."""
    widths = {"gate_up_proj": (4, 12)} if merged else {"gate_proj": (4, 6), "up_proj": (4, 6)}
    linears = {}
    for name, (n, m) in {**widths, "down_proj": (6, 4)}.items():
        linears[name] = nn.Linear(n, m, bias=False)
        linears[name].weight.data.normal_(generator=g)
        linears[name].to(dtype)
    return linears


def mlp_forward(base: type, kind: int, merged: bool) -> Callable:
    def act_mul(gate, up=None):
        if kind == SILU:
            return ops.silu_mul(gate, up)
        return ops.gelu_mul(gate, up, approximate="tanh" if kind == GELU_TANH else "none")

    own = base.forward

    @functools.wraps(own)
    def forward(self, hidden_states):
        if was_given(self):  # another activation, or hooks on it
            return own(self, hidden_states)
        if merged:
            return self.down_proj(act_mul(self.gate_up_proj(hidden_states)))
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        if gate.dtype != up.dtype:  # one of them adapted or quantized
            dtype = torch.promote_types(gate.dtype, up.dtype)
            gate, up = gate.to(dtype), up.to(dtype)
        return self.down_proj(act_mul(gate, up))

    return forward


# ---- rotary embedding

ROTATIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")


def rotations_of(cls: type) -> dict[str, Callable]:
    """The functions of these names that the class's forward calls."""
    return called_by(cls, ROTATIONS)


def rope_reason(cls: type) -> str | None:
    """Why `rope_forward` cannot be made for this class of attention, or None."""
    rotations = rotations_of(cls)
    if any(may_depend(f) for f in rotations.values()):
        return "rotates by a function that may compute something else for other tensors"
    if not any(_rotation(f) for f in rotations.values()):
        return "does not rotate pairs of features as ops.rope does"
    forward = _rotating(cls)
    return forward if isinstance(forward, str) else None


def rope_forward(base: type) -> Callable:
    """The class's own forward, in a namespace where the rotations are this library's.

    transformers has a place for another rotation, its kernelized functions, only where the package
    `kernels` is installed, and only for about half of its attentions.
    """
    forward = _rotating(base)
    assert not isinstance(forward, str), "else `rope_reason` has refused it"
    return forward


def _rotating(cls: type) -> Callable | str:
    rotations = {n: (f, _rotation(f)) for n, f in rotations_of(cls).items()}
    return calling(cls, {n: _rotate(f, *kind) for n, (f, kind) in rotations.items() if kind})


@functools.cache
def _rotate(own: Callable, interleaved: bool, apart: bool, whole: bool) -> Callable:
    """own(q, k, cos, sin) by `ops.rope`, whatever the names of its first four arguments.

    interleaved: pairs are neighbors.   apart: and the result has them half a width apart.
    whole: the tables are as wide as the rotated features, with the same values in both halves.
    """

    names = tuple(inspect.signature(own).parameters)

    def apply_rotary_pos_emb(*args, **kwargs):
        named = names[len(args) : 4]
        if len(args) + len(named) < 4 or any(name not in kwargs for name in named):
            return own(*args, **kwargs)  # names that its signature does not tell
        q, k, cos, sin = (*args[:4], *(kwargs[name] for name in named))
        others = (*args[4:], *(value for name, value in kwargs.items() if name not in named))
        other = any(value is not None and value != 1 for value in others)
        # `ops.rope` gives tables no gradient.
        learned = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
        fits = q.dim() == k.dim() == 4 and cos.dim() == 3 and q.dtype == k.dtype
        if other or learned or not fits:
            return own(*args, **kwargs)
        width = cos.shape[-1] * (1 if whole else 2)
        if apart:
            q, k = (t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for t in (q, k))
        return ops.rope(q, k, cos, sin, interleaved=interleaved and not apart, rotary_dim=width)

    return apply_rotary_pos_emb


@functools.cache
def _rotation(own: Callable) -> tuple[bool, bool, bool] | None:
    """(interleaved, apart, whole) of the rotation that a function computes, if it is one."""
    g = generator()
    q, k = (torch.randn(2, n, 3, 8, generator=g) for n in (4, 2))
    angle = torch.randn(2, 3, 4, generator=g)
    for whole in (True, False):
        tables = torch.cat((angle, angle), -1) if whole else angle
        cos, sin = tables.cos(), tables.sin()
        try:
            expected = own(q, k, cos, sin)
        except Exception:
            expected = None  # takes tables of the other width
        if expected is None:
            continue
        for interleaved, apart in ((False, False), (True, False), (True, True)):
            rotated = _rotate_eager(q, k, cos, sin, interleaved, apart)
            if all(torch.allclose(a, b, **CLOSE) for a, b in zip(expected, rotated, strict=True)):
                return interleaved, apart, whole
    return None


def _rotate_eager(q, k, cos, sin, interleaved: bool, apart: bool) -> Any:
    from tilewright.ops.rope.rope_fused import Rotation

    cos, sin, ids = prepare_tables(2, 3, 8, cos, sin, None, None)
    rotated: Any = rope_eager(q, k, Rotation(cos, sin, ids, interleaved))  # k is given
    if apart:
        return tuple(t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for t in rotated)
    return rotated
