"""Attention by third-party kernels: PyTorch's, and FlashAttention 2, 3 and 4."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tilewright.core import platform
from tilewright.core.layout import is_expanded, last_contiguous
from tilewright.core.library import once
from tilewright.core.registry import Implementation, always, nothing
from tilewright.core.torch_names import in_forward_mode, in_transform
from tilewright.ops import products
from tilewright.ops.attention.eager import by_document, host_seqlens
from tilewright.ops.attention.fused import gluon_refuses, gluon_slower_than
from tilewright.ops.attention.options import (
    OWN_DROPOUT,
    PART,
    PREFIXES,
    SINKS,
    SOFTCAP,
    WINDOW,
    Request,
    head_widths,
    one_width,
    unsupported_features,
)

HALVES = (torch.bfloat16, torch.float16)
_OF_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_GRADIENTS_OF_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# ---- PyTorch's fused attention: one call per document, so no mask is built


class ReadableGradient(torch.autograd.Function):
    """x, whose upstream gradient is copied if it has strides of 0, as the gradient of a sum does,
    or a last dimension that is not contiguous. PyTorch 2.11's fused attention misreads such
    gradients on CUDA: cuDNN's, and the memory-efficient one (an H100: gradients of 1e37).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad.contiguous() if is_expanded(grad) else last_contiguous(grad)

    @staticmethod
    def jvp(ctx, tangent):
        return tangent.view_as(tangent)


# Elements of a tensor from which gradients of PyTorch 2.11's kernels on CUDA may be wrong: cuDNN's,
# and its FlashAttention 2's (an H100: right of 2^30, errors of 8 to 19 of 2^31 + 2^19).
MOST = 2**31


def has_cuda_gradients(*tensors: torch.Tensor) -> bool:
    learn = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return learn and tensors[0].is_cuda


def in_parts(attend, q, k, v):
    """attend(q, k, v). Where gradients of the whole would be wrong, parts of the batch, or of the
    heads if the batch has one sequence, are computed separately: each tensor of a part has fewer
    than MOST elements, or one head.
    """
    # The order matters: comparing sizes would bound a dimension that is exported.
    if not has_cuda_gradients(q, k, v) or max(q.numel(), k.numel(), v.numel()) < MOST:
        return attend(q, k, v)
    B, heads, groups = q.shape[0], q.shape[1], k.shape[1]
    if B == heads == 1:
        return attend(q, k, v)
    dim = 0 if B > 1 else 1
    shared = dim == 1 and groups == 1  # one head of keys, for all queries
    n = B if dim == 0 else heads if shared else groups

    def halves(t):
        first = t.shape[dim] // n * (n // 2)
        return t.split((first, t.shape[dim] - first), dim)

    keys, values = ((t, t) if shared else halves(t) for t in (k, v))
    parts = zip(halves(q), keys, values, strict=True)
    return torch.cat([in_parts(attend, *part) for part in parts], dim)


def _fused(q, k, v, variant):
    width, widest = v.shape[3], max(v.shape[3], q.shape[3])
    if q.device.type == "cpu" and v.shape[3] != q.shape[3]:
        # Its fused kernel takes one width, and its other path allocates S x Sk scores. Zeros change
        # no logit, since the scale is given, and what they add to results is cut off.
        q, k, v = (F.pad(t, (0, widest - t.shape[3])) for t in (q, k, v))
        return _fused(q, k, v, variant)[..., :width]
    causal, mask = variant.causal, None
    if causal and q.shape[2] != k.shape[2]:  # of a document after its prefix
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        causal, mask = False, seen.tril(k.shape[2] - q.shape[2])
    q, k, v = map(last_contiguous, (q, k, v))  # otherwise PyTorch takes its path with S x Sk scores
    grouped = False
    if q.shape[1] != k.shape[1]:  # a constant, where compiled code has symbolic heads
        grouped = True

    def attend(q, k, v):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=variant.scale, enable_gqa=grouped
        )
        return ReadableGradient.apply(out) if out.is_cuda and out.requires_grad else out

    return in_parts(attend, q, k, v)


def _flash_on_cpu(q, k, v, variant) -> bool:
    """Whether `_Packed` computes what `_fused` does: PyTorch's fused kernel takes heads whose
    gradient is asked for outside of transforms.
    """
    return (
        q.is_cpu
        and q.numel() > 0
        and q.shape[3] == v.shape[3]
        and not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and any(t.requires_grad for t in (q, k, v))
        and not in_forward_mode()
        and not in_transform()
        and torch.backends.cuda.flash_sdp_enabled()  # a CPU's, too
    )


class _Packed(torch.autograd.Function):
    """PyTorch's fused kernel of a CPU, a call per document: the same bits as `_fused` of each. One
    result and one gradient of all documents are written; autograd's own would keep each document's
    result beside their concatenation, and pad each document's gradients to the whole length.
    """

    @staticmethod
    def forward(ctx, q, k, v, ends, variant):
        B, H, S, D = q.shape
        out, sums = q.new_empty(B, S, H, D).transpose(1, 2), []
        for a, b in itertools.pairwise(ends):
            own = (t[:, :, a:b] for t in (q, k, v))
            part, logsumexp = _OF_CPU(*own, 0.0, variant.causal, scale=variant.scale)
            out[:, :, a:b] = part
            sums.append(logsumexp)
        ctx.ends, ctx.variant = ends, variant
        ctx.save_for_backward(q, k, v, out, *sums)
        return out

    @staticmethod
    def backward(ctx, d):
        return _packed_gradients(ctx, d)


def _gradients_of_documents(ctx, d):
    q, k, v, out, *sums = ctx.saved_tensors
    grads = [t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in (q, k, v)]
    for (a, b), logsumexp in zip(itertools.pairwise(ctx.ends), sums, strict=True):
        own = (t[:, :, a:b] for t in (d, q, k, v, out))
        parts = _GRADIENTS_OF_CPU(*own, logsumexp, 0.0, ctx.variant.causal, scale=ctx.variant.scale)
        for grad, part in zip(grads, parts, strict=True):
            grad[:, :, a:b] = part
    return *grads, None, None


_packed_gradients = once("attention", _gradients_of_documents)


def attention_sdpa(q, k, v, cu_seqlens, variant, sinks, max_seqlen):
    if cu_seqlens is not None and _flash_on_cpu(q, k, v, variant):
        ends = tuple(dict.fromkeys(host_seqlens(cu_seqlens, q.shape[2])))  # no empty document
        return _Packed.apply(*map(last_contiguous, (q, k, v)), ends, variant)
    return by_document(
        lambda *document: (_fused(*document, variant=variant),), (q, k, v), cu_seqlens
    )[0]


def _aligned_at_the_first_key(
    lacks: Callable[[Request], str | None],
) -> Callable[[Request], str | None]:
    """`lacks`, and the limits of all implementations that pass is_causal on."""

    def refuses(request: Request) -> str | None:
        if request.shorter and request.causal and not request.prefixes:
            return "aligns a causal mask at the first key: it takes as many queries as keys"
        return lacks(request)

    return refuses


sdpa_refuses = _aligned_at_the_first_key(
    unsupported_features(
        window=f"{WINDOW} without a mask of S x S",
        softcap=SOFTCAP,
        sinks=SINKS,
        dropout=OWN_DROPOUT,
        part=PART,
    )
)


# ---- PyTorch's fused attention, cuDNN's kernels first, and its varlen_attn for packed documents


@functools.cache
def varlen() -> str | tuple[Callable, bool]:
    """torch.nn.attention.varlen's function and whether it supports grouped heads, or the reason why
    it is unavailable.
    """
    try:
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    names = inspect.signature(function).parameters
    if absent := {"scale", "window_size"} - set(names):
        return f"torch {torch.__version__}: varlen_attn takes no {' and no '.join(sorted(absent))}"
    return function, "enable_gqa" in names


def no_native(device_type: str) -> str | None:
    if device_type != "cuda":
        return f"cuDNN's attention and varlen_attn take CUDA tensors, not {device_type}"
    if reason := platform.no_cuda(80):
        return reason
    available = varlen()
    return available if isinstance(available, str) else None


_native_lacks = _aligned_at_the_first_key(
    unsupported_features(
        softcap=SOFTCAP, sinks=SINKS, dropout=OWN_DROPOUT, part=PART, prefixes=PREFIXES
    )
)


def native_refuses(request: Request) -> str | None:
    # varlen_attn's kernel and cuDNN's below 9.10 have one width.
    return _native_lacks(request) or one_width(request) or head_widths(request, 8, 256)


def native():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ]
    available = varlen()
    assert not isinstance(available, str), available
    attend, grouped = available

    def attention_native(q, k, v, cu_seqlens, variant, sinks, max_seqlen):
        if not q.numel() or (cu_seqlens is None and not variant.window):
            with sdpa_kernel(backends, set_priority=True):
                return _fused(q, k, v, variant)
        return in_parts(lambda q, k, v: packed(q, k, v, cu_seqlens, variant, max_seqlen), q, k, v)

    def packed(q, k, v, cu_seqlens, variant, max_seqlen):
        causal, window, _, scale, _ = variant
        B, H, S, _ = q.shape
        cu, longest = _boundaries(q, cu_seqlens, max_seqlen)
        if not grouped and k.shape[1] != H:
            k, v = (t.repeat_interleave(H // k.shape[1], 1) for t in (k, v))
        more = {"enable_gqa": k.shape[1] != H} if grouped else {}
        sides = (window - 1 if window else -1, 0) if causal else (-1, -1)
        out = attend(
            *map(_rows, (q, k, v)), cu, cu, longest, longest, scale=scale, window_size=sides, **more
        )
        return out.unflatten(0, (B, S)).transpose(1, 2)

    return attention_native


def _rows(t):
    """[B, H, S, D] as [B S, H, D], a view if the memory layout allows it."""
    return t.transpose(1, 2).flatten(0, 1)


def _boundaries(q, cu_seqlens, max_seqlen):
    """int32 cu_seqlens of documents, or of a batch's sequences, and the longest length."""
    B, _, S, _ = q.shape
    if cu_seqlens is None:
        return torch.arange(0, B * S + 1, S, dtype=torch.int32, device=q.device), S
    if max_seqlen is None:
        ends = host_seqlens(cu_seqlens, S)
        max_seqlen = max(b - a for a, b in itertools.pairwise(ends))
    return cu_seqlens.to(torch.int32), min(max_seqlen, S)


# ---- FlashAttention 2, 3 and 4


class Flash(NamedTuple):
    """One of flash-attn's packages. capabilities: supported major versions of the compute
    capability.
    """

    distribution: str
    oldest: str | None
    module: str
    capabilities: tuple[int, ...]
    lacks: Callable[[Request], str | None]
    head_dims: dict[int, int]  # the widest, by major version of the compute capability
    whole: object  # its value for an unlimited window
    # (width of keys, another one of values, the major version of the compute capability) -> the
    # reason why it does not take them
    values: Callable[[int, int, int], str | None]
    # (a request, the major version) -> what it was seen to compute wrongly
    wrong: Callable[[Request, int], str | None] = lambda request, major: None

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
        tens = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
        # On a device that it does not support `missing` says so.
        widest = self.head_dims.get(tens, self.head_dims[self.capabilities[0]])
        reason, values = self.lacks(request) or self.wrong(request, tens), request.value_dim
        if reason is None and values is not None:
            reason = self.values(request.head_dim, values, tens)
            widest = max(widest, *self.head_dims.values())
        return reason or head_widths(request, 8, widest)

    def load(self):
        module = importlib.import_module(self.module)

        def attention_flash(q, k, v, cu_seqlens, variant, sinks, max_seqlen):
            causal, window, softcap, scale, _ = variant
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
            # Version 4, and early 3, also return the log-sum-exp.
            out = out[0] if isinstance(out, tuple) else out
            return (out if cu_seqlens is None else out.unsqueeze(0)).transpose(1, 2)

        return attention_flash


def _values_of_2(D: int, Dv: int, major: int) -> str | None:
    return one_width(Request(head_dim=D, value_dim=Dv))


def _values_of_3(D: int, Dv: int, major: int) -> str | None:
    if 128 < D <= 192 and 96 < Dv <= 128:
        return None
    return (
        "takes values as wide as keys, or of 97 to 128 columns beside keys of 129 to 192, not "
        f"{Dv} beside {D}"
    )


def _values_of_4(D: int, Dv: int, major: int) -> str | None:
    """On Hopper any two widths; on Blackwell two up to 128, or those of DeepSeek-V3."""
    if major == 9 or max(D, Dv) <= 128 or (D, Dv) == (192, 128):
        return None
    return (
        "takes values of another width than keys' up to 128, or of 128 beside keys of 192, not "
        f"{Dv} beside {D}"
    )


def _wrong_of_4(request: Request, major: int) -> str | None:
    if major == 9 and request.packed and request.gradient:
        return (
            "has had wrong gradients in packed documents in the one mode that was tried "
            "(flash-attn-4 4.0.0b36, an H100, deterministic algorithms on, memory filled with NaN)"
        )
    return None


FLASH = {
    # Older betas silently give sinks no gradient, and have no backward of softcap on packed
    # documents.
    "flash_attention_4": Flash(
        "flash-attn-4",
        "4.0.0b36",
        "flash_attn.cute",
        (9, 10, 11),
        unsupported_features(dropout=OWN_DROPOUT, part=PART),
        {9: 256, 10: 128, 11: 128},
        None,
        _values_of_4,
        _wrong_of_4,
    ),
    "flash_attention_3": Flash(
        "flash-attn-3",
        None,
        "flash_attn_interface",
        (9,),
        unsupported_features(sinks=SINKS, dropout=OWN_DROPOUT, part=PART),
        {9: 256},
        -1,
        _values_of_3,
    ),
    # Earlier ones have no softcap.
    "flash_attention_2": Flash(
        "flash-attn",
        "2.6.0",
        "flash_attn",
        (8, 9, 10, 12),
        unsupported_features(sinks=SINKS, dropout=OWN_DROPOUT, part=PART),
        {8: 256, 9: 256, 10: 256, 12: 256},
        -1,
        _values_of_2,
    ),
}


def slower_than_gluon(device_type: str, request: Request | None) -> str | None:
    """This library's kernel that is faster than PyTorch's and FlashAttention 2's, or None.

    On compute capability 9.0 specialized warps are faster in rows of 128, and 2.6 times as fast for
    packed documents in rows of 64 (measured on an H100, docs/performance.md). For whole sequences
    in rows of 64 cuDNN is 4 % faster. request: None for the usual call.
    """
    if device_type != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        return None
    if request is None:
        return _ours(device_type, request)
    as_wide = request.value_dim in (None, request.head_dim)
    whole = not (request.softcap or request.dropout or request.shorter)
    least = 32 if request.packed else 64
    faster = least < request.head_dim <= 128 and as_wide and whole
    return _ours(device_type, request) if faster else None


def _ours(device_type: str, request: Request | None) -> str:
    """The one of this library's that `auto` takes on a GPU."""
    if platform.no_gluon(device_type) or (request and gluon_refuses(request)):
        return "triton"
    return gluon_slower_than(device_type, request) or "gluon"


def slower_than_sdpa(device_type: str, request: Request | None) -> str | None:
    """The C++ kernels have been measured on AMD EPYCs: PyTorch's took 3.2 times as long in float32
    on one whose AVX-512 ATen's products do not use, and 1.5 times on one with AVX2 alone, where its
    gradients in bfloat16 miss the contract (docs/performance.md). Where ATen's products may be the
    faster ones, PyTorch's is taken.
    """
    with_avx2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
    return None if with_avx2 or products.takes(torch.float32) else "sdpa"


def _major(device_type: str) -> int:
    """The major compute capability of the CUDA device; 0 for another kind of device."""
    return torch.cuda.get_device_capability()[0] if device_type == "cuda" else 0


def newer_than_2(device_type: str) -> str | None:
    """The reason for which a newer FlashAttention, which is not installed, would be faster than
    kernels of FlashAttention 2's class on this Hopper or Blackwell GPU; None if there is none.
    """
    major = _major(device_type)
    has = {n: FLASH[f"flash_attention_{n}"].missing(device_type) is None for n in (3, 4)}
    if major in FLASH["flash_attention_4"].capabilities[1:] and not has[4]:
        return (
            f"on compute capability {major}.x, flash_attention_4, which is not installed, is up to "
            "1.3 times as fast as cuDNN's kernels and 2.7 times as Triton's by its authors' "
            "measurement on a B200 (assets/fa4_paper.pdf of its repository)"
        )
    if major != 9 or has[3]:
        return None
    gradients = "computes gradients of packed documents, which flash_attention_4 refuses, and "
    return (
        "on compute capability 9.0, flash_attention_3, which is not installed, "
        f"{gradients if has[4] else ''}is 1.5 to 2 times as fast as such kernels by its authors' "
        "measurement (arXiv:2407.08608)"
    )


def _sentence(*parts: str | None) -> str:
    return "; ".join(filter(None, parts))


def native_does(device_type: str) -> str | None:
    major = _major(device_type)
    if major < 9:
        return None
    return _sentence(
        "dense attention is cuDNN's; documents and windows are FlashAttention 2's kernels",
        "where no newer FlashAttention takes a call, `auto` takes gluon, which is faster, for "
        "rows of 65 to 128 elements, with packed documents of 33 to 128"
        if major == 9
        else None,
        newer_than_2(device_type),
    )


_LOOPS = "one loop of FlashAttention 2's class computes "


def triton_does(device_type: str) -> str | None:
    """Which calls have kernels of FlashAttention 2's class where there are better ones."""
    if _major(device_type) < 9:
        return None
    return _sentence(f"{_LOOPS}every call", newer_than_2(device_type))


def gluon_does(device_type: str) -> str | None:
    return _sentence(
        "warps are specialized for 16-bit rows of up to 128 elements, and in forward for keys of "
        f"129 to 192 beside values of 65 to 128; {_LOOPS}"
        "the backward of a softcap, of values that are narrower or wider than keys and of latent "
        "attention (192 and 128), and the forward of windows in rows of up to 64, as triton's",
        newer_than_2(device_type),
    )


def sdpa_does(device_type: str) -> str | None:
    if device_type != "cuda":
        return None
    return (
        "for rows of more than 256 elements, which no kernel above takes, PyTorch's general "
        "kernels; with an option that it lacks, `auto` then takes eager and its matrix of queries "
        "by keys"
    )


def flash(name: str) -> Implementation:
    """An implementation of `FLASH`."""
    package = FLASH[name]
    return Implementation(
        name,
        package.load,
        package.missing,
        dtypes=HALVES,
        refuses=package.refuses,
        reads_host="host",
        aliases=(f"fa{name[-1]}",),
        does=newer_than_2 if name == "flash_attention_2" else always,
        slower_than=slower_than_gluon if name == "flash_attention_2" else nothing,
    )
