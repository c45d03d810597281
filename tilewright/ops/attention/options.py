"""The options of attention, their checks, and those that an implementation may not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewright.core import checks
from tilewright.kernels.attention.operators import Variant


def variant_of(
    head_dim: int, causal: bool, window: int | None, softcap: float | None, scale: float | None
) -> Variant:
    """Raises TypeError or ValueError for an invalid option."""
    check_options(causal, window, softcap, scale)
    scale = head_dim**-0.5 if scale is None else float(scale)
    return Variant(causal, window or 0, float(softcap or 0.0), scale)


class Request(NamedTuple):
    """A request for attention. Built with keywords; for a call, by `request_of`."""

    head_dim: int
    causal: bool = True
    packed: bool = False  # documents of different lengths
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    shorter: bool = False  # fewer queries than keys
    gradient: bool = False
    part: bool = False  # output and log-sum-exp for a part of the keys (`attention_part`)


def request_of(
    head_dim: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    *,
    packed: bool,
    sinks: bool = False,
    shorter: bool = False,
    gradient: bool = False,
    part: bool = False,
) -> Request:
    """From options as the public functions take them."""
    return Request(
        head_dim=_head_width(head_dim),
        causal=causal,
        packed=packed,
        window=window is not None,
        softcap=softcap is not None,
        sinks=sinks,
        shorter=shorter,
        gradient=gradient,
        part=part,
    )


def _head_width(D: int) -> int:
    """D, for a Request. Where Dynamo traces it as a symbol, one width represents all that every
    implementation supports, and any other becomes a constant of the graph.
    """
    if torch.compiler.is_dynamo_compiling():
        if D % 8 == 0 and D <= 128:
            return 128
        return len(range(D))  # a constant; int(D) is not
    return D


def check_qkv(q, k, v):
    for name, t in (("q", q), ("k", k), ("v", v)):
        checks.floating(name, t)
        if t.dim() != 4:
            raise ValueError(f"{name} must have shape [B, H, S, D], got {list(t.shape)}")
        if t.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {t.dtype}")
    B, H, S, D = q.shape
    if H == 0 or D == 0:
        raise ValueError(
            f"q must have at least one head and a head width of at least 1, got {list(q.shape)}"
        )
    if (k.shape[0], k.shape[3]) != (B, D) or k.shape[1] == 0 or H % k.shape[1]:
        raise ValueError(
            f"k must have shape [{B}, a divisor of {H}, Sk, {D}] to go with q, got {list(k.shape)}"
            f"{layout_hint(q, k)}"
        )
    checks.shape("v", v, tuple(k.shape), "that of k")
    return B, H, S, D


def layout_hint(q, k):
    """The end of an error message for q and k that would fit with heads and positions swapped."""
    (_, S, H, _), (_, Sk, Hk, _) = q.shape, k.shape
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or Hk == 0 or H % Hk or Sk < S:
        return ""
    return (
        f"; the layout is [B, H, S, D], heads before positions: for q {list(q.shape)} and k "
        f"{list(k.shape)} in [B, S, H, D] pass q.transpose(1, 2), k.transpose(1, 2) and v.transpose(1, 2)"
    )


def check_options(causal, window, softcap, scale):
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {causal!r}")
    if window is not None:
        if not isinstance(window, int) or isinstance(window, bool):
            raise TypeError(f"window must be an int or None, got {window!r}")
        if not 1 <= window < 2**31:
            raise ValueError(f"window must be from 1 to 2^31 - 1, or None, got {window!r}")
        if not causal:
            raise ValueError(f"window = {window} needs causal=True: it ends at a position itself")
    if softcap is not None:
        checks.number(
            "softcap", softcap, checks.SMALLEST, checks.LARGEST, "a finite number > 0, or None"
        )
    # PyTorch's kernels give NaN for a causal mask and a scale that is not positive.
    if scale is not None:
        checks.number(
            "scale",
            scale,
            checks.SMALLEST,
            checks.LARGEST,
            "a finite number > 0 (in float32), or None for D ** -0.5",
        )


# ---- unsupported options

WINDOW, SOFTCAP, SINKS = "a sliding window", "a softcap", "sinks"
PART = "a part of the keys with its log-sum-exp"


def unsupported_features(**features: str) -> Callable[[Request], str | None]:
    """`refuses` for requests with `features`: fields of a Request, each with its name in words."""

    def refuses(request: Request) -> str | None:
        unsupported = [words for name, words in features.items() if getattr(request, name)]
        return f"does not compute {', '.join(unsupported)}" if unsupported else None

    return refuses


def head_widths(request: Request, multiple: int, most: int) -> str | None:
    if request.head_dim % multiple or request.head_dim > most:
        return f"takes head widths that are multiples of {multiple} up to {most}, not {request.head_dim}"
    return None
