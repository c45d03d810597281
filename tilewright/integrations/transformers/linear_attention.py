"""The gated delta rule and the short convolution of transformers' linear attention (Qwen3-Next and
its like), by this library's ops.

As for rotary embedding, a layer keeps its own forward, in a namespace where these two functions are
this library's. What they compute is found by evaluating them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tilewright import ops
from tilewright.integrations.transformers.errors import WARNED, warn_once
from tilewright.integrations.transformers.functions import called_by, calling, own_function
from tilewright.integrations.transformers.instance import generator, is_replaced
from tilewright.integrations.transformers.known import may_depend
from tilewright.integrations.transformers.packing import documents_of, restarts
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
    own = {n: f for n, f in called(cls).items() if not may_depend(f)}
    names = {FUNCTIONS[n] for n, f in own.items() if AGREES[FUNCTIONS[n]](f)}
    if not names:
        return "does not call functions that compute what ops.gated_delta_rule does"
    forward = _forward(cls, names)
    return forward if isinstance(forward, str) else tuple(sorted(names))


def linear_attention_forward(base: type, names: Iterable[str]) -> Callable:
    """The class's own forward, in a namespace where functions that these ops compute are theirs,
    and so are the others that an op computes where documents are packed: the class's own would
    carry the state of one into the next.
    """
    forward = _forward(base, names)
    assert not isinstance(forward, str), "else `ops_of` has refused it"
    return forward


def _forward(cls: type, names: Iterable[str]) -> Callable | str:
    make = {CAUSAL_CONV1D.name: _convolution, GATED_DELTA_RULE.name: _rule}
    functions = {n: (f, FUNCTIONS[n]) for n, f in called(cls).items()}
    computed = {n: (f, op) for n, (f, op) in functions.items() if AGREES[op](f)}
    return calling(cls, {n: make[op](f, op in names) for n, (f, op) in computed.items()})


# ---- the convolution


@functools.cache
def _convolution(own: Callable, always: bool = True) -> Callable:
    """own(hidden_states [B, C, S], weight [C, W], bias, activation) by `ops.causal_conv1d`.

    always: also of rows that are one document each.
    """

    @functools.wraps(own)
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        taps, bounds = weight.shape[-1], bounds_of(kwargs)
        if (
            activation not in (None, "silu", "swish")
            or not 2 <= taps <= 8
            or not (always or bounds is not None)
        ):
            return own(hidden_states, weight, bias, activation=activation, **kwargs)
        rows = hidden_states.transpose(1, 2)
        out = ops.causal_conv1d(
            rows if bounds is None else _in_one_row(rows),
            weight,
            bias,
            activation=activation and "silu",
            cu_seqlens=bounds,
        )
        return out.unflatten(1, (-1, rows.shape[1])).flatten(0, 1).transpose(1, 2)

    return causal_conv1d_fn


@functools.cache
def _convolves(own: Callable) -> bool:
    g = generator()
    x, w, b = (torch.randn(*shape, generator=g) for shape in ((2, 3, 5), (3, 4), (3,)))
    try:
        actual = [own(x, w, bias, activation=name) for bias in (None, b) for name in (None, "silu")]
    except Exception:
        return False
    rows = x.transpose(1, 2)
    wanted = [
        causal_conv1d_eager(rows, w, bias, None, silu).transpose(1, 2)
        for bias in (None, b)
        for silu in (False, True)
    ]
    return all(torch.allclose(f, t, **CLOSE) for f, t in zip(actual, wanted, strict=True))


# ---- the rule


@functools.cache
def _rule(own: Callable, always: bool = True) -> Callable:
    """own(query, key, value, g, beta, ...) by `ops.gated_delta_rule`.

    Packed documents start anew, as in the package fla, whose function transformers takes where it
    is installed; transformers' own function knows of none.
    """
    signature = inspect.signature(own)

    @functools.wraps(own)
    def chunk_gated_delta_rule(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        more = given.arguments | given.arguments.get("kwargs", {})
        values = tuple(more[name] for name in ("query", "key", "value", "g", "beta"))
        q, k, v = values[:3]
        bounds = bounds_of(more)
        if (
            more.get("chunk_size", CHUNK) != CHUNK
            or not q.dtype == k.dtype == v.dtype
            or not (always or bounds is not None)
        ):
            return own(*args, **kwargs)
        out, state = ops.gated_delta_rule(
            *(values if bounds is None else map(_in_one_row, values)),
            initial_state=more.get("initial_state"),
            output_final_state=bool(more.get("output_final_state")),
            use_qk_l2norm=bool(more.get("use_qk_l2norm_in_kernel")),
            cu_seqlens=bounds,
        )
        return out.unflatten(1, (-1, q.shape[1])).flatten(0, 1), state

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
            actual = own(
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
            if not all(torch.allclose(f, t, **CLOSE) for f, t in zip(actual, wanted, strict=True)):
                return False
    except Exception:
        return False
    return True


AGREES = {CAUSAL_CONV1D.name: _convolves, GATED_DELTA_RULE.name: _is_the_rule}


# ---- packed documents


def bounds_of(given: Mapping[str, Any]) -> torch.Tensor | None:
    """Where documents end in the concatenated rows, from the arguments of transformers' collators:
    cu_seq_lens_q, which the layer passes on as cu_seqlens, or else seq_idx [B, S].
    """
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if given.get(name) is not None:
            return given[name]
    return None if given.get("seq_idx") is None else documents_of(given["seq_idx"])


def _in_one_row(t: torch.Tensor) -> torch.Tensor:
    return t if t.shape[0] == 1 else t.flatten(0, 1).unsqueeze(0)


def first_recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """The first of each kind of layer that is given position_ids and whose child, which is not,
    carries a state from token to token.
    """
    by_kind: dict[type, nn.Module] = {}
    for layer in model.modules():
        if type(layer) not in by_kind and _recurrent(layer) and _takes_positions(type(layer)):
            by_kind[type(layer)] = layer
    return list(by_kind.values())


def _recurrent(layer: nn.Module) -> list[nn.Module]:
    return [child for child in layer.children() if called(type(child))]


def _takes_positions(cls: type) -> bool:
    own = own_function(cls.forward)
    return own is not None and "position_ids" in inspect.signature(own).parameters


def warning_forward(base: type) -> Callable:
    """The class's own forward, which warns once of documents that its child does not keep apart."""
    own = base.forward

    @functools.wraps(own)
    def forward(self, *args, **kwargs):
        kind = f"documents in {base.__name__}"
        if not torch.compiler.is_compiling() and kind not in WARNED:
            given = dict(zip(inspect.signature(own).parameters, (self, *args), strict=False))
            if reason := _leaks(_recurrent(self), given | kwargs):
                warn_once(kind, f"{base.__name__}: {reason}")
        return own(self, *args, **kwargs)

    return forward


def _leaks(recurrent: list[nn.Module], given: Mapping[str, Any]) -> str | None:
    """Why these layers carry the state of a document into the next, if they do."""
    if given.get("seq_idx") is not None:  # transformers' own functions refuse it, or keep to it
        return None
    ours = all(is_replaced(m) for m in recurrent)
    bounds = given.get("cu_seq_lens_q")
    if bounds is not None:
        leaks, by = not ours and bounds.numel() > 2, "cu_seq_lens_q and position_ids"
    else:
        mask = given.get("mamba_attention_mask", given.get("attention_mask"))
        leaks, by = restarts(given.get("position_ids"), mask), "position_ids alone"
    if not leaks:
        return None
    names = " and ".join(sorted({type(m).__name__ for m in recurrent}))
    flag = "return_flash_attn_kwargs" if ours else "return_seq_idx"
    return (
        f"{by} keep packed documents apart in attention only; {names} carries the state of each "
        f"into the next: pass {'cu_seq_lens_q' if ours else 'seq_idx'} too, as "
        f"DataCollatorWithFlattening({flag}=True) does"
    )
