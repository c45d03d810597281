"""The gated delta rule and the short convolution of transformers' linear attention (Qwen3-Next and
its like), by this library's ops.

As for rotary embedding, a layer keeps its own forward, in a namespace where these two functions are
this library's. What they compute is found by evaluating them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tilewright import ops
from tilewright.integrations.transformers.functions import called_by, calling
from tilewright.integrations.transformers.instance import generator
from tilewright.integrations.transformers.known import may_depend
from tilewright.ops.linear_attention.causal_conv1d import CAUSAL_CONV1D, causal_conv1d_eager
from tilewright.ops.linear_attention.gated_delta_rule import GATED_DELTA_RULE

# The names that models have called them by, and this library's ops.
FUNCTIONS = {
    "causal_conv1d_fn": CAUSAL_CONV1D.name,
    "torch_chunk_gated_delta_rule": GATED_DELTA_RULE.name,
    "chunk_gated_delta_rule": GATED_DELTA_RULE.name,
}
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}  # chunks of other lengths
CHUNK = 64


def called(cls: type) -> dict[str, Callable]:
    """The functions of these names that the class's forward calls."""
    return called_by(cls, FUNCTIONS)


def is_linear_attention(module: nn.Module) -> bool:
    return GATED_DELTA_RULE.name in {FUNCTIONS[name] for name in called(type(module))}


def ops_of(cls: type) -> tuple[str, ...] | str:
    """The ops that compute what the class's forward calls, or the reason why none does."""
    agrees = {CAUSAL_CONV1D.name: _convolves, GATED_DELTA_RULE.name: _is_the_rule}
    own = {n: f for n, f in called(cls).items() if not may_depend(f)}
    found = {FUNCTIONS[n] for n, f in own.items() if agrees[FUNCTIONS[n]](f)}
    if not found:
        return "does not call functions that compute what ops.gated_delta_rule does"
    forward = _forward(cls, found)
    return forward if isinstance(forward, str) else tuple(sorted(found))


def linear_attention_forward(base: type, names: Iterable[str]) -> Callable:
    """The class's own forward, in a namespace where functions that these ops compute are theirs."""
    forward = _forward(base, names)
    assert not isinstance(forward, str), "else `ops_of` has refused it"
    return forward


def _forward(cls: type, names: Iterable[str]) -> Callable | str:
    make = {CAUSAL_CONV1D.name: _convolution, GATED_DELTA_RULE.name: _rule}
    functions = {n: (f, FUNCTIONS[n]) for n, f in called(cls).items()}
    return calling(cls, {n: make[op](f) for n, (f, op) in functions.items() if op in names})


# ---- the convolution


@functools.cache
def _convolution(own: Callable) -> Callable:
    """own(hidden_states [B, C, S], weight [C, W], bias, activation) by `ops.causal_conv1d`."""

    @functools.wraps(own)
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        bounds, B = kwargs.get("cu_seq_lens_q"), hidden_states.shape[0]
        taps = weight.shape[-1]
        if (
            activation not in (None, "silu", "swish")
            or not 2 <= taps <= 8
            or (bounds is not None and B != 1)
            or kwargs.get("seq_idx") is not None
        ):
            return own(hidden_states, weight, bias, activation=activation, **kwargs)
        found = ops.causal_conv1d(
            hidden_states.transpose(1, 2),
            weight,
            bias,
            activation=activation and "silu",
            cu_seqlens=bounds,
        )
        return found.transpose(1, 2)

    return causal_conv1d_fn


@functools.cache
def _convolves(own: Callable) -> bool:
    g = generator()
    x, w, b = (torch.randn(*shape, generator=g) for shape in ((2, 3, 5), (3, 4), (3,)))
    try:
        found = [own(x, w, bias, activation=name) for bias in (None, b) for name in (None, "silu")]
    except Exception:
        return False
    rows = x.transpose(1, 2)
    wanted = [
        causal_conv1d_eager(rows, w, bias, None, silu).transpose(1, 2)
        for bias in (None, b)
        for silu in (False, True)
    ]
    return all(torch.allclose(f, t, **CLOSE) for f, t in zip(found, wanted, strict=True))


# ---- the rule


@functools.cache
def _rule(own: Callable) -> Callable:
    """own(query, key, value, g, beta, ...) by `ops.gated_delta_rule`.

    Documents given by cu_seqlens start anew, as in the package fla, whose function transformers
    takes where it is installed; transformers' own function reads no cu_seqlens.
    """
    signature = inspect.signature(own)

    @functools.wraps(own)
    def chunk_gated_delta_rule(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        more = given.arguments | given.arguments.get("kwargs", {})
        q, k, v, g, beta = (more[name] for name in ("query", "key", "value", "g", "beta"))
        bounds = more.get("cu_seqlens")
        if more.get("chunk_size", CHUNK) != CHUNK or not q.dtype == k.dtype == v.dtype:
            return own(*args, **kwargs)
        if bounds is not None and q.shape[0] != 1:
            return own(*args, **kwargs)
        return ops.gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=more.get("initial_state"),
            output_final_state=bool(more.get("output_final_state")),
            use_qk_l2norm=bool(more.get("use_qk_l2norm_in_kernel")),
            cu_seqlens=bounds,
        )

    return chunk_gated_delta_rule


@functools.cache
def _is_the_rule(own: Callable) -> bool:
    g, S = generator(), CHUNK + 6
    q, k = (torch.randn(1, S, 1, 4, generator=g) for _ in range(2))
    v = torch.randn(1, S, 2, 6, generator=g)
    decay = -torch.rand(1, S, 2, generator=g)
    beta, state = torch.rand(1, S, 2, generator=g), torch.randn(1, 2, 4, 6, generator=g)
    try:
        for first in (None, state):
            found = own(
                q,
                k,
                v,
                g=decay,
                beta=beta,
                initial_state=first,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            wanted = ops.gated_delta_rule(
                q,
                k,
                v,
                decay,
                beta,
                initial_state=first,
                output_final_state=True,
                use_qk_l2norm=True,
                implementation="eager",
            )
            if not all(torch.allclose(f, t, **CLOSE) for f, t in zip(found, wanted, strict=True)):
                return False
    except Exception:
        return False
    return True
