"""Scaled dot-product attention over one sequence or over packed documents:  softmax(mask(cap(scale
q k^T))) v

Shapes: B = batch, Hq / Hk = query / key heads (Hq a multiple of Hk), S = positions of queries, Sk =
of keys (S, unless said otherwise), D = head width.

Implementations differ in what they can compute. What a call asks for is a `Request`, and each of
them has a function
that says what of it it lacks: a named one then raises ImplementationUnavailable with that sentence,
and `auto` takes the next.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tilewright import platform
from tilewright.ops import _checks, cases
from tilewright.ops._library import define, differentiate
from tilewright.ops.rope import last_contiguous
from tilewright.registry import Case, Cost, Goal, Implementation, Op

HALVES = (torch.bfloat16, torch.float16)


class Request(NamedTuple):
    """What a call of attention asks for."""

    head_dim: int
    causal: bool = True
    packed: bool = False  # documents of different lengths
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    shorter: bool = False  # fewer queries than keys
    gradient: bool = False
    part: bool = False  # out with its log-sum-exp, for a part of the keys (`attention_part`)


@_checks.autocast("products", "q", "k", "v")
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    max_seqlen: int | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """Attention with grouped queries.

    q: [B, Hq, S, D]; k, v: [B, Hk, Sk, D]; fp32 | bf16 | fp16 (fp64 too). Sk >= S with `causal`:
        the queries are then the last S of Sk positions, as with a cache of keys.
    cu_seqlens: int32 or int64 [n + 1], 0 .. S, not decreasing: packed documents of a sequence with
        B = 1 and Sk = S, which never see each other. Its values are checked on a CPU, and on CUDA
        by implementations that read them on the host (all but triton), which waits for the device.
        `max_seqlen` spares flash-attn and native that.
    causal: a bool; position i sees positions up to i of its own document.
    window: an int >= 1: position i sees the last `window` positions up to itself; needs `causal`.
    None: all.
    softcap: a number > 0 (in float32): logits become softcap tanh(logit / softcap). None: they
    stay.
    sinks: [Hq], any floating dtype, used in float32: a further logit a head, which takes its share
        of the softmax and has no value (gpt-oss).
    scale: a finite number > 0 (in float32); default D ** -0.5.
    max_seqlen: the longest document, or a bound of it, where the host knows it; used with
    cu_seqlens only. Returns [B, Hq, S, D] in q's dtype. The softmax is in float32. Differentiable
    in q, k, v and sinks. Under torch.autocast q, k and v are cast to its dtype. None but eager
    makes a tensor of S x Sk. NaN and infinity in one document change nothing in another one, nor in
    its gradients, with eager (but where it is compiled), sdpa and triton (native and flash-attn: as
    their kernels have it). Within a document, or a sequence, they may spread to positions that do
    not see them, since what is not seen is multiplied by 0: with eager and sdpa to all, with triton
    to those that share a block of keys. Deterministic, forward and backward, but for PyTorch's and
    flash-attn's backward on CUDA, which are where torch.use_deterministic_algorithms asks for it.
    Raises TypeError or ValueError for arguments that do not fit, ImplementationUnavailable for a
    named implementation that cannot run here, or does not compute what is asked.
    Source: arXiv:1706.03762; grouped queries arXiv:2305.13245; windows arXiv:2004.05150; softcap
    arXiv:2408.00118; sinks arXiv:2309.17453, as gpt-oss trains them (arXiv:2508.10925).
    """
    B, _, S, D = check_qkv(q, k, v)
    Sk = k.shape[2]
    check_options(causal, window, softcap, scale)
    if causal and Sk < S:
        raise ValueError(
            f"k must have at least q's {S} positions for causal attention, got {Sk}{_layout(q, k)}"
        )
    if sinks is not None:
        _checks.floating("sinks", sinks)
        _checks.shape("sinks", sinks, (q.shape[1],), "one a query head")
    if max_seqlen is not None and (
        not isinstance(max_seqlen, int) or isinstance(max_seqlen, bool) or max_seqlen < 0
    ):
        raise ValueError(f"max_seqlen must be an int of at least 0, got {max_seqlen!r}")
    if cu_seqlens is not None:
        if B != 1:
            raise ValueError(f"packed documents need B = 1, got q of shape {list(q.shape)}")
        if Sk != S:
            raise ValueError(f"packed documents need as many keys as queries, got {Sk} and {S}")
        cu_seqlens = _checks.cu_seqlens(cu_seqlens, S, wait=getattr(cu_seqlens, "is_meta", False))
    _checks.same_device(q=q, k=k, v=v, cu_seqlens=cu_seqlens, sinks=sinks)
    gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, sinks)
    )
    shorter = False
    if (
        Sk != S
    ):  # compiled code with dynamic lengths makes this a constant, which a Request is made of
        shorter = True
    fn = ATTENTION.pick(
        implementation,
        q,
        Request(
            _head_width(D),
            causal,
            cu_seqlens is not None,
            window is not None,
            softcap is not None,
            sinks is not None,
            shorter,
            gradient,
        ),
    )
    return fn(
        q,
        k,
        v,
        cu_seqlens,
        causal,
        window or 0,
        float(softcap or 0.0),
        sinks,
        D**-0.5 if scale is None else float(scale),
        max_seqlen,
    )


def _head_width(D: int) -> int:
    """D, for a Request. Where compiled code has it as a symbol, one width stands for all that every
    implementation takes, and any other becomes a constant of the graph.
    """
    if torch.compiler.is_dynamo_compiling():
        if D % 8 == 0 and D <= 128:
            return 128
        return len(range(D))  # a constant; int(D) is not
    return D


def attention_part(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    offset: int = 0,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to a part of the keys, as ring attention puts it together. Not differentiable; its
    gradient is `attention_part_backward`.

    As `attention`, but for:
    offset: the position of the first query minus that of the first key, in one document; 0 with
    cu_seqlens. A query
        may see no key at all: its output is 0 then.
    Returns out [B, Hq, S, D] in q's dtype and the natural log-sum-exp of the logits, [B, Hq, S] in
    float32 (float64 for float64), -inf where no key is seen. Raises as `attention` does, and
    ImplementationUnavailable for a named implementation that gives no log-sum-exp.
    """
    fn, arguments = _part(
        "part", q, k, v, cu_seqlens, causal, window, softcap, scale, offset, implementation
    )
    return fn(q, k, v, *arguments)


def attention_part_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    offset: int = 0,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a part of the keys contributes to the gradients of the whole: dq, and dk and dv of this
    part, in q's dtype.

    dout, out: [B, Hq, S, D] and lse: [B, Hq, S], of the whole softmax, over all its parts (and a
        sink, if there is one).
    The rest as in `attention_part`.
    """
    fn, arguments = _part(
        "part_backward", q, k, v, cu_seqlens, causal, window, softcap, scale, offset, implementation
    )
    for name, t in (("dout", dout), ("out", out)):
        _checks.shape(name, t, tuple(q.shape), "that of q")
    _checks.shape("lse", lse, tuple(q.shape[:3]), "q's without the head width")
    return fn(dout, q, k, v, out, lse, *arguments)


def _part(which, q, k, v, cu_seqlens, causal, window, softcap, scale, offset, implementation):
    B, _, S, D = check_qkv(q, k, v)
    check_options(causal, window, softcap, scale)
    if not isinstance(offset, int) or isinstance(offset, bool):
        raise TypeError(f"offset must be an int, got {offset!r}")
    if cu_seqlens is not None:
        if offset or k.shape[2] != S:
            raise ValueError(
                f"with cu_seqlens queries and keys are the same positions, got offset {offset}, "
                f"{S} queries and {k.shape[2]} keys"
            )
        if B != 1:
            raise ValueError(f"packed documents need B = 1, got q of shape {list(q.shape)}")
        cu_seqlens = _checks.cu_seqlens(cu_seqlens, S, wait=False)
    _checks.same_device(q=q, k=k, v=v, cu_seqlens=cu_seqlens)
    request = Request(
        D,
        causal,
        cu_seqlens is not None,
        window is not None,
        softcap is not None,
        False,
        offset != 0,
        which == "part_backward",
        True,
    )
    fn = getattr(ATTENTION.pick(implementation, q, request), which)
    scale = D**-0.5 if scale is None else float(scale)
    return fn, (cu_seqlens, causal, window or 0, float(softcap or 0.0), scale, offset)


def check_qkv(q, k, v):
    for name, t in (("q", q), ("k", k), ("v", v)):
        _checks.floating(name, t)
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
            f"{_layout(q, k)}"
        )
    _checks.shape("v", v, tuple(k.shape), "that of k")
    return B, H, S, D


def _layout(q, k):
    """What to say of q and k that would fit with heads and positions the other way round."""
    (_, S, H, _), (_, Sk, Hk, _) = q.shape, k.shape
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or Hk == 0 or H % Hk or Sk < S:
        return ""
    return (
        f"; the layout is [B, H, S, D], heads before positions: for q {list(q.shape)} and k "
        f"{list(k.shape)} in "
        "[B, S, H, D] pass q.transpose(1, 2), k.transpose(1, 2) and v.transpose(1, 2)"
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
        _checks.number(
            "softcap", softcap, _checks.SMALLEST, _checks.LARGEST, "a finite number > 0, or None"
        )
    if (
        scale is not None
    ):  # PyTorch's kernels give NaN for a causal mask and a scale that is not positive
        _checks.number(
            "scale",
            scale,
            _checks.SMALLEST,
            _checks.LARGEST,
            "a finite number > 0 (in float32), or None for D ** -0.5",
        )


# ---- the definition


def _logits(q, k, together, causal, window, softcap, scale, offset):
    """[B, Hq, S, Sk], -inf where a query does not see a key.   together: boundaries of documents
    that are masked, of whole rows; None: all of one document.
    """
    acc = torch.promote_types(q.dtype, torch.float32)
    S, Sk = q.shape[2], k.shape[2]
    s = (
        q.to(acc)
        @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).to(acc).transpose(-1, -2)
        * scale
    )
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    row = torch.arange(S, device=q.device)[:, None] + offset
    column = torch.arange(Sk, device=q.device)[None, :]
    seen = row >= column if causal else torch.ones(S, Sk, dtype=torch.bool, device=q.device)
    if window:
        seen = seen & (row - column < window)
    if together is not None:
        document = torch.searchsorted(together.to(torch.int64), column[0], right=True)
        seen = seen & (document[:, None] == document[None, :])
    return s.masked_fill(~seen, float("-inf"))


def _ends(cu_seqlens, tokens):
    """Boundaries on the host. Checked, where the public function could not without waiting."""
    return (
        _checks.cu_seqlens(cu_seqlens, tokens, wait=True) if cu_seqlens.is_cuda else cu_seqlens
    ).tolist()


def _by_document(fn, tensors, cu_seqlens):
    """fn's results [B, H, S, ...], of each document by itself: nothing of one is multiplied with
    anything of another, not by 0 either, which would make NaN of what is not finite.
    """
    if cu_seqlens is None:
        return fn(*tensors)
    found = [
        fn(*(t[:, :, a:b] for t in tensors))
        for a, b in itertools.pairwise(_ends(cu_seqlens, tensors[0].shape[2]))
        if a < b
    ]
    if not found:
        return fn(*tensors)  # without tokens still differentiable
    return tuple(torch.cat(parts, 2) for parts in zip(*found, strict=True))


def _apart(fn, tensors, cu_seqlens):
    """`_by_document` of fn(*tensors, None); in compiled code fn(*tensors, cu_seqlens), which masks:
    a graph holds no loop over what the host would have to read.
    """
    if torch.compiler.is_compiling():
        return fn(*tensors, cu_seqlens)
    return _by_document(lambda *own: fn(*own, None), tensors, cu_seqlens)


def attention_eager(
    q,
    k,
    v,
    cu_seqlens=None,
    causal=True,
    window=0,
    softcap=0.0,
    sinks=None,
    scale=1.0,
    max_seqlen=None,
):
    def of_document(q, k, v, together):
        Sk = k.shape[2]
        s = _logits(q, k, together, causal, window, softcap, scale, Sk - q.shape[2])
        if sinks is not None:
            s = torch.cat((s, sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)), -1)
        p = s.softmax(-1)[..., :Sk]
        return ((p @ v.repeat_interleave(q.shape[1] // k.shape[1], 1).to(p.dtype)).to(q.dtype),)

    return _apart(of_document, (q, k, v), cu_seqlens)[0]


def _eager_part(q, k, v, cu_seqlens, causal, window, softcap, scale, offset):
    return _apart(
        lambda *own: _part_of_document(*own, causal, window, softcap, scale, offset),
        (q, k, v),
        cu_seqlens,
    )


def _part_of_document(q, k, v, together, causal, window, softcap, scale, offset):
    s = _logits(q, k, together, causal, window, softcap, scale, offset)
    lse = s.logsumexp(-1) if k.shape[2] else s.new_full(s.shape[:3], float("-inf"))
    p = _probabilities(s, lse)
    return (p @ v.repeat_interleave(q.shape[1] // k.shape[1], 1).to(p.dtype)).to(q.dtype), lse


def _probabilities(s, lse):
    return torch.exp(s - lse.masked_fill(lse == float("-inf"), 0.0)[..., None].to(s.dtype))


def _eager_part_backward(
    dout, q, k, v, out, lse, cu_seqlens, causal, window, softcap, scale, offset
):
    return _apart(
        lambda *own: _gradients_of_document(*own, causal, window, softcap, scale, offset),
        (dout, q, k, v, out, lse),
        cu_seqlens,
    )


def _gradients_of_document(
    dout, q, k, v, out, lse, together, causal, window, softcap, scale, offset
):
    s = _logits(q, k, together, causal, window, softcap, scale, offset)
    groups = q.shape[1] // k.shape[1]
    p = _probabilities(s, lse)
    dout, out, wide = (t.to(p.dtype) for t in (dout, out, q))
    dp = dout @ v.repeat_interleave(groups, 1).to(p.dtype).transpose(-1, -2)
    ds = p * (dp - (dout * out).sum(-1, keepdim=True)) * scale
    if softcap:
        ds = ds * (1 - (s.masked_fill(s == float("-inf"), 0.0) / softcap).square())
    dq = ds @ k.repeat_interleave(groups, 1).to(p.dtype)
    dk, dv = (
        t.unflatten(1, (k.shape[1], groups)).sum(2)
        for t in (ds.transpose(-1, -2) @ wide, p.transpose(-1, -2) @ dout)
    )
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


attention_eager.part, attention_eager.part_backward = _eager_part, _eager_part_backward


def _lacking(**features: str) -> Callable[[Request], str | None]:
    """What refuses requests for `features`, fields of a Request, each with its name in words."""

    def refuses(request: Request) -> str | None:
        found = [words for name, words in features.items() if getattr(request, name)]
        return f"does not compute {', '.join(found)}" if found else None

    return refuses


WINDOW, SOFTCAP, SINKS = "a sliding window", "a softcap", "sinks"
PART = "a part of the keys with its log-sum-exp"


def _head_dims(request: Request, multiple: int, most: int) -> str | None:
    if request.head_dim % multiple or request.head_dim > most:
        return f"takes head widths that are multiples of {multiple} up to {most}, not {request.head_dim}"
    return None


# ---- PyTorch's fused attention: one call per document, so no mask is built


def _fused(q, k, v, causal, scale):
    q, k, v = map(last_contiguous, (q, k, v))  # else PyTorch takes its path with S x Sk scores
    grouped = False
    if q.shape[1] != k.shape[1]:  # a constant, where compiled code has the heads as symbols
        grouped = True
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _attention_sdpa(q, k, v, cu_seqlens, causal, window, softcap, sinks, scale, max_seqlen):
    return _by_document(lambda *own: (_fused(*own, causal, scale),), (q, k, v), cu_seqlens)[0]


def _of_pytorch(lacks: Callable[[Request], str | None]) -> Callable[[Request], str | None]:
    """`lacks`, and what is refused by all that pass is_causal on."""

    def refuses(request: Request) -> str | None:
        if request.shorter and request.causal:
            return "aligns a causal mask at the first key: it takes as many queries as keys"
        return lacks(request)

    return refuses


_sdpa_refuses = _of_pytorch(
    _lacking(window=f"{WINDOW} without a mask of S x S", softcap=SOFTCAP, sinks=SINKS, part=PART)
)


# ---- PyTorch's fused attention, cuDNN's kernels first, and its varlen_attn for packed documents


@functools.cache
def _varlen():
    """torch.nn.attention.varlen's function and its parameters, or the reason why it cannot be
    used.
    """
    try:
        found = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    names = inspect.signature(found).parameters
    if absent := {"scale", "window_size"} - set(names):
        return f"torch {torch.__version__}: varlen_attn takes no {' and no '.join(sorted(absent))}"
    return found, "enable_gqa" in names


def _no_native(device_type: str) -> str | None:
    if device_type != "cuda":
        return f"cuDNN's attention and varlen_attn take CUDA tensors, not {device_type}"
    if reason := platform.no_cuda(80):
        return reason
    return _varlen() if isinstance(_varlen(), str) else None


_native_lacks = _of_pytorch(_lacking(softcap=SOFTCAP, sinks=SINKS, part=PART))


def _native_refuses(request: Request) -> str | None:
    return _native_lacks(request) or _head_dims(request, 8, 256)


def _native():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ]
    varlen, grouped = _varlen()

    def attention_native(q, k, v, cu_seqlens, causal, window, softcap, sinks, scale, max_seqlen):
        B, H, S, _ = q.shape
        if not q.numel() or (cu_seqlens is None and not window):
            with sdpa_kernel(backends, set_priority=True):
                return _fused(q, k, v, causal, scale)
        cu, longest = _boundaries(q, cu_seqlens, max_seqlen)
        if not grouped and k.shape[1] != H:
            k, v = (t.repeat_interleave(H // k.shape[1], 1) for t in (k, v))
        more = {"enable_gqa": k.shape[1] != H} if grouped else {}
        sides = (window - 1 if window else -1, 0) if causal else (-1, -1)
        out = varlen(
            *map(_rows, (q, k, v)), cu, cu, longest, longest, scale=scale, window_size=sides, **more
        )
        return out.unflatten(0, (B, S)).transpose(1, 2)

    return attention_native


def _rows(t):
    """[B, H, S, D] as [B S, H, D], a view where memory is so ordered."""
    return t.transpose(1, 2).flatten(0, 1)


def _boundaries(q, cu_seqlens, max_seqlen):
    """int32 boundaries of documents, or of a batch's sequences, and the longest."""
    B, _, S, _ = q.shape
    if cu_seqlens is None:
        return torch.arange(0, B * S + 1, S, dtype=torch.int32, device=q.device), S
    if max_seqlen is None:
        ends = _ends(cu_seqlens, S)
        max_seqlen = max(b - a for a, b in itertools.pairwise(ends))
    return cu_seqlens.to(torch.int32), min(max_seqlen, S)


# ---- FlashAttention 3 and 4


class _Flash(NamedTuple):
    """One of flash-attn's packages. capabilities: tens of the compute capability that it is
    written for.
    """

    distribution: str
    oldest: str | None
    module: str
    capabilities: tuple[int, ...]
    lacks: Callable[[Request], str | None]
    head_dims: dict[int, int]  # the widest, by tens of the compute capability
    whole: object  # what it takes for a window without an end

    def missing(self, device_type: str) -> str | None:
        if reason := platform.no_distribution(self.distribution, self.oldest):
            return reason
        if device_type != "cuda":
            return f"{self.distribution} takes CUDA tensors, not {device_type}"
        if reason := platform.no_cuda():
            return reason
        tens = torch.cuda.get_device_capability()[0]
        if tens not in self.capabilities:
            return (
                f"{self.distribution} is for compute capability "
                f"{' and '.join(f'{c}.x' for c in self.capabilities)}"
                f", this device has {tens}.x"
            )
        return None

    def refuses(self, request: Request) -> str | None:
        tens = (
            torch.cuda.get_device_capability()[0]
            if torch.cuda.is_available()
            else self.capabilities[0]
        )
        return self.lacks(request) or _head_dims(request, 8, self.head_dims[tens])

    def load(self):
        module = importlib.import_module(self.module)

        def attention_flash(q, k, v, cu_seqlens, causal, window, softcap, sinks, scale, max_seqlen):
            options = {
                "softmax_scale": scale,
                "causal": causal,
                "softcap": softcap,
                "window_size": (window - 1, 0) if window else (self.whole, self.whole),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
            }
            if sinks is not None:
                options["learnable_sink"] = sinks.float() if sinks.dtype == torch.float64 else sinks
            if cu_seqlens is None:
                out = module.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), **options)
            else:
                cu, longest = _boundaries(q, cu_seqlens, max_seqlen)
                out = module.flash_attn_varlen_func(
                    *map(_rows, (q, k, v)),
                    cu_seqlens_q=cu,
                    cu_seqlens_k=cu,
                    max_seqlen_q=longest,
                    max_seqlen_k=longest,
                    **options,
                )
            out = (
                out[0] if isinstance(out, tuple) else out
            )  # 4, and early 3, return the log-sum-exp too
            return (out if cu_seqlens is None else out.unsqueeze(0)).transpose(1, 2)

        return attention_flash


_FLASH = {
    # Older betas give sinks no gradient, without a word, and know no backward of softcap on packed
    # documents.
    "flash_attention_4": _Flash(
        "flash-attn-4",
        "4.0.0b36",
        "flash_attn.cute",
        (9, 10, 11),
        _lacking(part=PART),
        {9: 256, 10: 128, 11: 128},
        None,
    ),
    "flash_attention_3": _Flash(
        "flash-attn-3",
        None,
        "flash_attn_interface",
        (9,),
        _lacking(sinks=SINKS, part=PART),
        {9: 256},
        -1,
    ),
}


# ---- our own


def _triton():
    if "triton" not in _loaded:
        from tilewright.kernels import attention_triton as kernels

        _loaded["triton"] = _register(kernels)
    return _loaded["triton"]


_loaded: dict[str, Callable] = {}


def _register(kernels):
    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        causal: bool,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
        scale: float,
        offset: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = map(last_contiguous, (q, k, v))
        return kernels.forward(q, k, v, cu_seqlens, causal, window, softcap, sinks, scale, offset)

    def forward_fake(q, k, v, cu_seqlens, causal, window, softcap, sinks, scale, offset):
        return kernels.empty_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def backward(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        causal: bool,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
        scale: float,
        offset: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        dout, q, k, v, out = map(last_contiguous, (dout, q, k, v, out))
        return kernels.backward(
            dout, q, k, v, out, lse, cu_seqlens, causal, window, softcap, sinks, scale, offset
        )

    def backward_fake(
        dout, q, k, v, out, lse, cu_seqlens, causal, window, softcap, sinks, scale, offset
    ):
        return (
            *map(kernels.empty_rows, (q, k, v)),
            lse.new_empty(0 if sinks is None else q.shape[1]),
        )

    forward_op = define("attention_triton", forward, forward_fake)
    backward_op = define("attention_triton_backward", backward, backward_fake)

    def setup(ctx, inputs, output):
        q, k, v, cu_seqlens, ctx.causal, ctx.window, ctx.softcap, sinks, ctx.scale, ctx.offset = (
            inputs
        )
        ctx.save_for_backward(q, k, v, *output, cu_seqlens, sinks)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def formula(ctx, dout, _):
        if dout is None:
            return (None,) * 10
        q, k, v, out, lse, cu_seqlens, sinks = ctx.saved_tensors
        dq, dk, dv, dsinks = backward_op(
            dout,
            q,
            k,
            v,
            out,
            lse,
            cu_seqlens,
            ctx.causal,
            ctx.window,
            ctx.softcap,
            sinks,
            ctx.scale,
            ctx.offset,
        )
        dsinks = None if sinks is None else dsinks.to(sinks.dtype)
        return dq, dk, dv, None, None, None, None, dsinks, None, None

    differentiate(forward_op, formula, setup)

    def attention_triton(q, k, v, cu_seqlens, causal, window, softcap, sinks, scale, max_seqlen):
        return forward_op(
            q, k, v, cu_seqlens, causal, window, softcap, sinks, scale, k.shape[2] - q.shape[2]
        )[0]

    def part(q, k, v, cu_seqlens, causal, window, softcap, scale, offset):
        with torch.no_grad():
            return forward_op(q, k, v, cu_seqlens, causal, window, softcap, None, scale, offset)

    def part_backward(dout, q, k, v, out, lse, cu_seqlens, causal, window, softcap, scale, offset):
        with torch.no_grad():
            return backward_op(
                dout, q, k, v, out, lse, cu_seqlens, causal, window, softcap, None, scale, offset
            )[:3]

    attention_triton.part, attention_triton.part_backward = part, part_backward
    return attention_triton


def _triton_refuses(request: Request) -> str | None:
    if request.head_dim > 256:
        return f"takes head widths up to 256, not {request.head_dim}"
    return None


def _tunables():
    from tilewright.kernels import attention_triton

    return attention_triton.TUNABLES


# ---- cases


def _case(
    name, B, hq, hk, S, D, *, keys=None, documents=None, sinks=False, tags=cases.CONTRACT, **options
):
    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        lengths = (S, keys or S, keys or S)
        q, k, v = (
            cases.randn(B, n, h, D, device=device, dtype=dtype, gen=g, requires_grad=False)
            .transpose(1, 2)
            .requires_grad_()
            for h, n in zip((hq, hk, hk), lengths, strict=True)
        )
        kw = {"q": q, "k": k, "v": v, **options}
        if documents:
            kw["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32, device=device)
        if sinks:
            kw["sinks"] = cases.randn(hq, device=device, dtype=dtype, gen=g)
        return kw

    def cost(itemsize):  # two products forward, five backward, over the pairs that see each other
        longest = [b - a for a, b in itertools.pairwise(documents)] if documents else [S] * B
        window = options.get("window") or S
        pairs = sum(
            n * n
            if not options.get("causal", True)
            else min(n, window) * (2 * n - min(n, window)) // 2
            for n in longest
        )
        flops = 4 * hq * pairs * D
        return Cost(
            itemsize * B * S * D * 2 * (hq + hk),
            itemsize * B * S * D * 4 * (hq + hk),
            flops,
            5 * flops // 2,
        )

    return Case(name, make, cost, tags)


def _documents(tokens, *lengths):
    """Boundaries of documents whose lengths repeat."""
    ends, lengths = [0], itertools.cycle(lengths)
    while ends[-1] < tokens:
        ends.append(min(tokens, ends[-1] + next(lengths)))
    return tuple(ends)


def _atol(dtype, kwargs):
    """dq and dk are sums of p (dp - delta), and delta is sum(dout out): PyTorch takes it from the
    output as stored, rounded, where the twin's softmax keeps float32. delta is as large as dp and
    cancels against it, wholly in a first row, so half an eps of the output is several eps of the
    gradients' root mean square. Rounding the output alone in a float64 backward gives the same
    errors. Measured beyond twice the twin's own, at S = 17: 5.6 eps in 16 bits (1,200 draws); 17.6
    eps in float32 (160 draws), where the probabilities too come again from a rounded log-sum-exp.

    In longer sequences most rows average over many keys, so that the root mean square that errors
    are measured against falls as 1 / sqrt(S), while the first rows, with few keys, keep theirs.
    """
    eps = torch.finfo(dtype).eps
    return (
        (32 if dtype == torch.float32 else 8) * eps * max(1.0, (kwargs["q"].shape[2] / 17) ** 0.5)
    )


_LONG = ("qwen3-30b-a3b_8k", "qwen3-30b-a3b_32k", "qwen3-30b-a3b_32k_packed")
ATTENTION = Op(
    "attention",
    attention,
    attention_eager,
    (
        *(
            Implementation(
                name,
                flash.load,
                flash.missing,
                dtypes=HALVES,
                refuses=flash.refuses,
                aliases=(f"fa{name[-1]}",),
            )
            for name, flash in _FLASH.items()
        ),
        # PyTorch's before ours, which is for what it and flash-attn refuse, until ours has been
        # measured to be faster.
        Implementation("native", _native, _no_native, dtypes=HALVES, refuses=_native_refuses),
        Implementation(
            "triton",
            _triton,
            platform.no_triton,
            batch_invariant=cases.ANYWHERE,
            refuses=_triton_refuses,
            tunables=_tunables,
        ),
        # On a CPU a head of a document is computed by itself; on CUDA a kernel may split by how
        # full the device is.
        Implementation(
            "sdpa",
            lambda: _attention_sdpa,
            devices=("cuda", "cpu"),
            dtypes=_checks.ACCEPTED,
            batch_invariant=("cpu",),
            refuses=_sdpa_refuses,
            aliases=("torch",),
        ),
    ),
    (
        _case("gqa", 2, 4, 2, 9, 8),
        _case("full", 1, 2, 2, 7, 16, causal=False),
        _case("scaled", 2, 2, 1, 5, 8, scale=0.3),
        _case("documents", 1, 4, 2, 17, 8, documents=(0, 1, 6, 17), tags=cases.HOST),
        _case("window", 1, 4, 2, 21, 8, documents=(0, 3, 21), window=4, tags=cases.HOST),
        _case("softcap", 2, 2, 1, 9, 12, softcap=2.0),
        _case(
            "sinks", 1, 4, 2, 17, 8, documents=(0, 1, 6, 17), sinks=True, window=5, tags=cases.HOST
        ),
        _case("cache", 2, 4, 2, 3, 8, keys=11),
        _case("qwen3-8b", 1, 32, 8, 4096, 128, tags=cases.CUDA),
        _case("qwen3-30b-a3b_8k", 1, 32, 4, 8192, 128, tags=cases.CUDA),
        _case("qwen3-30b-a3b_32k", 1, 32, 4, 32768, 128, tags=cases.CUDA),
        _case(
            "qwen3-30b-a3b_32k_packed",
            1,
            32,
            4,
            32768,
            128,
            tags=cases.CUDA,
            documents=_documents(32768, 4096, 512, 1024, 8192, 2560),
        ),
        _case("gpt-oss-20b_8k", 1, 64, 8, 8192, 64, tags=cases.CUDA, sinks=True, window=128),
        _case("qwen3-8b", 1, 32, 8, 512, 128, tags=cases.CPU),
        _case(
            "big", 2**12 + 1, 64, 8, 64, 128, tags=cases.BIG
        ),  # short rows: the twin holds every score
    ),
    atol=_atol,
    goals=tuple(
        Goal(
            cases.DATACENTER,
            "forward_backward",
            f"over {other}",
            at_least=least,
            cases=_LONG,
            dtypes=("bfloat16",),
        )
        for other, least in (("flash-attn", 1 / 1.3), ("flex", 1.2))
    ),
    on_host=("eager", "sdpa", "native", *_FLASH),
)
