"""The arguments of attention, and the options that an implementation may not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewright.kernels.attention.operators import Dropout, Variant
from tilewright.ops.quant import quantize

# Declarations (core.takes). PyTorch's kernels give NaN for a causal mask and a scale that is not
# positive.
QKV = {"q": "float [B, Hq, S, D]", "k": "q [B, Hk, Sk, D]", "v": "q [B, Hk, Sk, Dv]"}
HEADS = "Hq >= 1", "D >= 1", "Dv >= 1"
OPTIONS = {
    "causal": "bool",
    "window": "int [1, 2**31)",
    "softcap": "number (0, inf)",
    "scale": "number (0, inf)",
}
DROPOUT = {
    "dropout_p": "static number [0, 1)",
    "seed": quantize.SEED,
    "offset": "int [0, 2**29)",
    "first_head": "int [0, 2**31)",
}
DOCUMENTS = "int32 | int64 [bounds]"  # cu_seqlens
PACKED = "bounds >= 2", "q: cu_seqlens is None or B == 1", "k: cu_seqlens is None or Sk == S"

NO_DROPOUT = Dropout()


def variant_of(
    head_dim: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    dropout: Dropout = NO_DROPOUT,
) -> Variant:
    scale_of: float = head_dim**-0.5 if scale is None else float(scale)
    return Variant(causal, window or 0, float(softcap or 0.0), scale_of, dropout)


def dropout_of(dropout_p: float, seed: int | None, offset: int, first_head: int) -> Dropout:
    """Raises ValueError for dropout without a seed: each call would have the same mask."""
    if dropout_p == 0:
        return NO_DROPOUT
    if seed is None:
        raise ValueError(
            f"seed must be given where dropout_p is not 0, got dropout_p = {dropout_p}"
        )
    p = float(dropout_p)
    return Dropout(round(p * 2**32), 1.0 / (1.0 - p), seed, offset, first_head)


class Request(NamedTuple):
    """A request for attention. Built with keywords; for a call, by `request_of`.

    value_dim: the width of values where it is not `head_dim`, that of queries and keys; else None.
    """

    head_dim: int
    value_dim: int | None = None
    causal: bool = True
    packed: bool = False  # documents of different lengths
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    shorter: bool = False  # fewer queries than keys
    gradient: bool = False
    dropout: bool = False
    part: bool = False  # output and log-sum-exp for a part of the keys (`attention_part`)
    prefixes: bool = False  # documents that continue a prefix: packed ones, and `shorter` calls


def request_of(
    widths: tuple[int, int],
    causal: bool,
    window: int | None,
    softcap: float | None,
    *,
    packed: bool,
    sinks: bool = False,
    shorter: bool = False,
    gradient: bool = False,
    dropout: bool = False,
    part: bool = False,
) -> Request:
    """Makes a request from options as the public functions take them. Raises ValueError for a
    window that is not causal.

    widths: the widths of keys and of values.
    """
    if window is not None and not causal:
        raise ValueError(
            f"window = {window} needs causal=True: it ends at the query's own position"
        )
    head_dim, value_dim = _head_widths(*widths)
    return Request(
        head_dim=head_dim,
        value_dim=value_dim,
        causal=causal,
        packed=packed,
        window=window is not None,
        softcap=softcap is not None,
        sinks=sinks,
        shorter=shorter,
        gradient=gradient,
        dropout=dropout,
        part=part,
    )


def _head_widths(D: int, Dv: int) -> tuple[int, int | None]:
    """head_dim and value_dim of a Request. Where Dynamo traces D as a symbol, one width represents
    all that every implementation supports, and any other becomes a constant of the graph.
    """
    if not torch.compiler.is_dynamo_compiling():
        return D, None if Dv == D else Dv
    if Dv != D:
        return len(range(D)), len(range(Dv))  # constants; int(D) is not
    return (128 if D % 8 == 0 and D <= 128 else len(range(D))), None


def check_heads(q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises ValueError for key heads among which query heads cannot be shared out."""
    H, Hk = q.shape[1], k.shape[1]
    if Hk == 0 or H % Hk:
        raise ValueError(
            f"k must have a divisor of q's {H} heads, got {list(k.shape)}{layout_hint(q, k)}"
        )


def layout_hint(q, k):
    """The end of an error message for q and k that would fit with heads and positions swapped."""
    (_, S, H, _), (_, Sk, Hk, _) = q.shape, k.shape
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or Hk == 0 or H % Hk or Sk < S:
        return ""
    return (
        f"; the layout is [B, H, S, D], heads before positions: for q {list(q.shape)} and k "
        f"{list(k.shape)} in [B, S, H, D] pass q.transpose(1, 2), k.transpose(1, 2) and v.transpose(1, 2)"
    )


# ---- unsupported options

WINDOW, SOFTCAP, SINKS = "a sliding window", "a softcap", "sinks"
# PyTorch's and flash-attn's draw from streams of their own.
OWN_DROPOUT = "dropout by counters"
PART = "a part of the keys with its log-sum-exp"
PREFIXES = "documents that share a prefix"


def unsupported_features(**features: str) -> Callable[[Request], str | None]:
    """`refuses` for requests with `features`: fields of a Request, each with its name in words."""

    def refuses(request: Request) -> str | None:
        unsupported = [words for name, words in features.items() if getattr(request, name)]
        return f"does not compute {', '.join(unsupported)}" if unsupported else None

    return refuses


def head_widths(request: Request, multiple: int, most: int) -> str | None:
    for width in (request.head_dim, request.value_dim):
        if width is not None and (width % multiple or width > most):
            widths = f"that are multiples of {multiple} up to" if multiple > 1 else "up to"
            return f"takes head widths {widths} {most}, not {width}"
    return None


def one_width(request: Request) -> str | None:
    """A reason of implementations whose kernels have one width for keys and values."""
    if request.value_dim is not None:
        return f"takes values as wide as keys, not {request.value_dim} beside {request.head_dim}"
    return None
