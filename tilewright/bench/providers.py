"""What is timed: an op's implementations, its eager twin compiled, Liger-Kernel; and the gate before it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewright import platform
from tilewright.bench import contract
from tilewright.registry import Op

# What tilewright's own implementations are measured against.
BASELINES = ("eager", "compile", "torch", "liger")


class Unsupported(Exception):
    """The provider has no such variant of the op; the message says what it lacks."""


@dataclass(frozen=True)
class Provider:
    """One way to compute an op.

    call: takes the case's keyword arguments.   reason: why it cannot run here, or None.
    consumes: overwrites its inputs, and so is timed on a copy of its own.
    """

    name: str
    call: Callable[..., Any]
    reason: str | None = None
    consumes: bool = False


def providers(op: Op, device: str, dtype: torch.dtype) -> list[Provider]:
    """Every provider of an op, usable for such tensors here or not; the baselines first."""
    found = []
    for impl in op.implementations:
        reason = impl.why_not(device, dtype)
        if reason is None and impl.name == "triton" and device == "cpu":
            reason = "Triton's interpreter is for tests, its times mean nothing"
        found.append(Provider(impl.name, functools.partial(op.public, implementation=impl.name), reason))
    eager = functools.partial(op.public, implementation="eager")
    found.append(Provider("compile", torch.compile(eager, fullgraph=True, dynamic=False)))
    found.append(Provider("liger", functools.partial(_liger, op.name), no_liger(op.name, device),
                          consumes=op.name in _LIGER_CONSUMES))
    return sorted(found, key=lambda p: BASELINES.index(p.name) if p.name in BASELINES[:3] else 3)


def gate(op: Op, provider: Provider, kwargs: dict[str, Any], by: contract.Reference) -> list[contract.Finding]:
    """The numerics contract for a provider on the inputs that will be timed; what breaks it (none: it holds).

    The eager twin is the definition, and holds.
    """
    if provider.name == "eager":
        return []
    if provider.name in op.names():
        return [f for f in contract.judge(op, provider.name, kwargs, by) if not f.holds]

    def public(*, implementation, **kwargs):
        return eager(**kwargs) if implementation == "eager" else provider.call(**kwargs)

    eager = functools.partial(op.public, implementation="eager")
    judged = Op(op.name, public, op.eager, (), op.cases, op.atol)
    return [f for f in contract.judge(judged, provider.name, kwargs, by) if not f.holds]


# ---- Liger-Kernel

_LIGER_CONSUMES = ("cross_entropy", "rope")   # the gradient, and the rotated rows, overwrite the inputs


def no_liger(op_name: str, device: str) -> str | None:
    if op_name not in _LIGER:
        return "liger-kernel has no such op, or none with this meaning"
    if reason := platform.no_module("liger_kernel"):
        return reason
    if device != "cuda":
        return f"liger-kernel's Triton kernels take CUDA tensors, not {device}"
    return platform.no_cuda(80)


def _liger(op_name, **kwargs):
    return _LIGER[op_name](**kwargs)


def _only(given: dict[str, Any], **defaults) -> None:
    """Raises Unsupported if an option is set to something else than the only value that the provider has."""
    for name, value in given.items():
        if name not in defaults or value != defaults[name]:
            shown = "" if isinstance(value, torch.Tensor) else f"={value!r}"
            raise Unsupported(f"liger-kernel does not take {name}{shown}")


def _vector(weight):
    if weight.dim() != 1:
        raise Unsupported("liger-kernel takes one weight row, not one a head")


def _liger_rmsnorm(x, weight, eps=1e-6, *, bias=None, offset=0.0, cast="llama"):
    from liger_kernel.ops import LigerRMSNormFunction

    _vector(weight)
    _only({"bias": bias}, bias=None)
    # Not in place: it would overwrite the upstream gradient, which every provider is given.
    return LigerRMSNormFunction.apply(x, weight, eps, offset, cast, False)


def _liger_add_rmsnorm(x, residual, weight, eps=1e-6, *, bias=None, offset=0.0, cast="llama"):
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    _vector(weight)
    _only({"bias": bias}, bias=None)
    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, cast, False)


def _liger_silu_mul(gate, up=None):
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

    if up is not None:
        return LigerSiLUMulFunction.apply(gate, up)
    rows = LigerFusedGateUpSiLUMulFunction.apply(gate.reshape(-1, gate.shape[-1]))   # it takes two dimensions
    return rows.reshape(*gate.shape[:-1], -1)


def _liger_gelu_mul(gate, up=None, *, approximate="tanh"):
    from liger_kernel.ops import LigerGELUMulFunction

    _only({"approximate": approximate}, approximate="tanh")
    return LigerGELUMulFunction.apply(*(gate.chunk(2, -1) if up is None else (gate, up)))


_PLAIN_LOSS = {"token_weight": None, "num_tokens": None, "return_lse": False, "return_entropy": False,
               "return_argmax": False, "group": None}


def _liger_cross_entropy(logits, target, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None,
                         class_weight=None, reduction="mean", inplace=False, **more):
    from liger_kernel.transformers.functional import liger_cross_entropy

    _only(more, **_PLAIN_LOSS)
    loss = liger_cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), weight=class_weight,
                               ignore_index=ignore_index, reduction=reduction, lse_square_scale=z_loss,
                               label_smoothing=label_smoothing, softcap=softcap)
    # It returns the loss in the logits' dtype; the op's contract is float32.
    return (loss.reshape(target.shape) if reduction == "none" else loss).float()


def _liger_linear_cross_entropy(x, weight, target, *, bias=None, ignore_index=-100, label_smoothing=0.0,
                                z_loss=0.0, softcap=None, class_weight=None, reduction="mean",
                                accumulate="fp32", chunk_size=None, **more):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    _only(more, **_PLAIN_LOSS)
    loss = liger_fused_linear_cross_entropy(
        x.reshape(-1, x.shape[-1]), weight, target.reshape(-1), bias=bias, ce_weight=class_weight,
        ignore_index=ignore_index, lse_square_scale=z_loss, label_smoothing=label_smoothing,
        reduction=reduction, softcap=softcap, accum_dtype=torch.float32 if accumulate == "fp32" else None)
    return (loss.reshape(target.shape) if reduction == "none" else loss).float()


def _liger_rope(q, k, cos, sin, *, rotary_dim=None, inplace=False, **more):
    from liger_kernel.ops import LigerRopeFunction

    _only(more, interleaved=False, position_ids=None, cu_seqlens=None)
    if k is None:
        raise Unsupported("liger-kernel rotates q and k together, not q alone")
    if cos.dim() == 2:
        cos, sin = cos[:q.shape[2]], sin[:q.shape[2]]
    R = q.shape[-1] if rotary_dim is None else rotary_dim
    return LigerRopeFunction.apply(q, k, cos, sin, None, 1, R)


_LIGER: dict[str, Callable[..., Any]] = {
    "rmsnorm": _liger_rmsnorm,
    "add_rmsnorm": _liger_add_rmsnorm,
    "silu_mul": _liger_silu_mul,
    "gelu_mul": _liger_gelu_mul,
    "rope": _liger_rope,
    "cross_entropy": _liger_cross_entropy,
    "linear_cross_entropy": _liger_linear_cross_entropy,
}
