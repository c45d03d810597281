"""Detects what an experts module computes, from its attributes and outputs.

Adapters and quantized weights require SiLU(gate) * up; `ops.moe_mlp` supports every gate that
`ops.Gate` describes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tilewright.core import checks
from tilewright.nn.weights import shape_of
from tilewright.ops.activation.activation import Gate, gate_eager

# The module of the default `_apply_gate`, which transformers adds to classes without one.
_DEFAULT_GATE = "transformers.integrations.moe"


def why_not(experts: nn.Module, *, adapters: bool = False) -> str | None:
    """Why `ops.moe_mlp` does not compute the same as an experts module.

    The gate is found by evaluating the module's `_apply_gate`, or with `adapters` its `act_fn`, on
    a few numbers.

    Args:
        experts: A module with gate_up_proj and down_proj, as transformers' experts.
        adapters: For `ops.moe_lora` instead: SiLU(gate) * up without biases, with gate_up_proj
            [E, 2 I, H], gates before ups, and down_proj [E, H, I].

    Returns:
        None if it computes the same, else the reasons, in words that follow "the experts".

    Raises:
        AttributeError: The module has neither `_apply_gate` nor `act_fn`; with `adapters` instead,
            no gate_up_proj or no down_proj.

    Example:
        >>> import torch
        >>> from tilewright.integrations.transformers import why_not
        >>> experts = torch.nn.Module()
        >>> experts.gate_up_proj, experts.down_proj = torch.empty(2, 32, 8), torch.empty(2, 8, 16)
        >>> experts.act_fn = torch.nn.ReLU()
        >>> why_not(experts, adapters=True)
        'are activated by ReLU and not by SiLU'
    """
    reasons = _other_layout(experts) if adapters else []
    # A version of transformers without one of these flags has no experts to which it would apply.
    if not getattr(experts, "has_gate", True):
        reasons.append("have no gate")
    elif not adapters and isinstance(gate := gate_of(experts), str):
        reasons.append(gate)
    if adapters:
        reasons += _other_parts(experts)
    if getattr(experts, "has_post_expert_norm", False):
        reasons.append("normalize what each of them gives")
    if adapters and (reason := _other_gate(experts)):
        reasons.append(reason)
    return ", ".join(reasons) or None


def _other_layout(experts: nn.Module) -> list[str]:
    gate_up, down = (list(shape_of(getattr(experts, n))) for n in ("gate_up_proj", "down_proj"))
    if not getattr(experts, "is_transposed", False) and gate_up == [down[0], 2 * down[2], down[1]]:
        return []
    return [
        "do not hold gate_up_proj as [E, 2 I, H] and down_proj as [E, H, I] "
        f"(they are {gate_up} and {down})"
    ]


def _other_parts(experts: nn.Module) -> list[str]:
    reasons = []
    biases = [name for name, _ in experts.named_parameters(recurse=False) if name.endswith("_bias")]
    if getattr(experts, "has_bias", False) or biases:
        reasons.append(f"have biases {biases}" if biases else "have biases")
    if not getattr(experts, "is_concatenated", True):
        reasons.append("interleave gates with ups")
    return reasons


def _other_gate(experts: nn.Module) -> str | None:
    gate, act = getattr(type(experts), "_apply_gate", None), getattr(experts, "act_fn", None)
    if gate is not None and gate.__module__ != _DEFAULT_GATE:
        return _gate_in_words(experts)
    if act is not None and not is_silu(act):
        return f"{_gate_in_words(experts)} and not by SiLU"
    return None


def _gate_in_words(experts: nn.Module) -> str:
    gate = getattr(type(experts), "_apply_gate", None)
    if gate is not None and gate.__module__ != _DEFAULT_GATE:
        return "apply their gate in a way of their own (_apply_gate)"
    act = experts.act_fn
    return f"are activated by {getattr(act, '__name__', type(act).__name__)}"


@torch.no_grad()
def is_silu(act: Any) -> bool:
    """Whether a function is SiLU, tested on a few values."""
    x = torch.linspace(-4, 4, 9, device="cpu")
    try:
        return torch.allclose(act(x.clone()), nn.functional.silu(x))
    except Exception:  # a function that cannot take this input is not SiLU
        return False


# All pairs of these gates and ups: dense where functions bend, and up to the range of limits.
_PROBE = torch.cat(
    [torch.linspace(-10, 10, 81), torch.logspace(1, 4, 10), -torch.logspace(1, 4, 10)]
)
# Attribute names of these constants in transformers' classes.
_LIMITS, _SLOPES = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")

_gates: weakref.WeakKeyDictionary[nn.Module, tuple] = weakref.WeakKeyDictionary()


def gate_attributes(experts: nn.Module) -> tuple:
    """Hashes of the attributes that a module's gate may depend on.

    Dynamo guards the values read here. They are hashes because a float that differs between modules
    would become a symbol.
    """
    return tuple(
        hash(getattr(experts, name, None)) for name in ("is_concatenated", *_LIMITS, *_SLOPES)
    )


def gate_of(experts: nn.Module, attributes: tuple | None = None) -> Gate | str:
    """The `Gate` that equals the module's `_apply_gate` on a grid, or the reason why none does.

    attributes: the module's `gate_attributes`; None: read here. The result is cached per module
    until an attribute changes.
    """
    if attributes is None:
        attributes = gate_attributes(experts)
    key = (*attributes, getattr(experts, "act_fn", None))
    known = _gates.get(experts)
    if known is None or known[0] != key:
        known = _gates[experts] = (key, _find_gate(experts))
    return known[1]


def _find_gate(experts: Any) -> Gate | str:
    interleaved = not getattr(experts, "is_concatenated", True)
    g, u = (t.flatten() for t in torch.meshgrid(_PROBE, _PROBE, indexing="ij"))
    pre = (torch.stack((g, u), -1).flatten() if interleaved else torch.cat((g, u)))[None]
    reason = _gate_in_words(experts)
    try:
        with torch.no_grad(), checks.no_autocast(pre):
            expected = experts._apply_gate(pre)
    except Exception as error:
        return f"{reason}, which fails for float32 on a CPU ({type(error).__name__}: {error})"
    # 1e-5: a few roundings in float32.
    return next(
        (
            gate
            for gate in _candidates(experts, interleaved)
            if expected.shape == g[None].shape
            and torch.allclose(expected, gate_eager(pre, gate), rtol=1e-5, atol=1e-5)
        ),
        reason,
    )


def _candidates(experts: nn.Module, interleaved: bool) -> Iterator[Gate]:
    """The gates that a module with these attributes may have."""
    quick_gelu = Gate(alpha=1.702)
    for gate in (Gate("silu"), Gate("gelu_tanh"), Gate("gelu"), quick_gelu):
        yield replace(gate, interleaved=interleaved)
    limit, alpha = _number(experts, _LIMITS), _number(experts, _SLOPES)
    if limit is not None and 0 < limit < math.inf:
        clamped = Gate(limit=limit, up_limit=limit, interleaved=interleaved)
        yield clamped
        if alpha is not None:
            yield replace(clamped, alpha=alpha, up_offset=1.0)
    act = getattr(experts, "act_fn", None)
    caps = [
        getattr(getattr(act, name, None), "softcap", None)
        for name in ("gate_softcap", "up_softcap")
    ]
    if None not in caps:
        limit, up_limit = (float(cap) for cap in caps if cap is not None)
        yield Gate("softcapped", limit=limit, up_limit=up_limit, interleaved=interleaved)


def _number(experts: nn.Module, names: tuple[str, ...]) -> float | None:
    """The first attribute of these names that is a number."""
    values = (getattr(experts, name, None) for name in names)
    return next((float(n) for n in values if isinstance(n, (int, float))), None)
