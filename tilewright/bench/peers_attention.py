"""FlashAttention and PyTorch's flex_attention, called with the arguments of tilewright's."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tilewright.bench import peer
from tilewright.bench.peer import Unsupported, on_cuda, only
from tilewright.core import platform

# Distribution, module, least compute capability of forward and backward. The modules of 2 and 4
# share a package name, so the distribution decides which is installed.
FLASH = (
    ("flash-attn-4", "flash_attn.cute", 90),
    ("flash-attn-3", "flash_attn_interface", 90),
    ("flash-attn", "flash_attn", 80),
)


def _flash_installed() -> tuple[str, str, int] | None:
    return next((candidate for candidate in FLASH if peer.version_of(candidate[0])), None)


def no_flash(device: str) -> str | None:
    package = _flash_installed()
    if package is None:
        return (
            f"none of the packages {', '.join(name for name, *_ in FLASH)} is installed "
            f"({platform.INSTALL[FLASH[0][0]]})"
        )
    distribution, module, capability = package
    return on_cuda(distribution, module.partition(".")[0], capability)(device)


# Longest document of a cu_seqlens, cached: a training loop gets it from its loader. Reading it from
# the device at each call would be timed as part of the peer.
_longest: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _max_seqlen(cu_seqlens):
    if cu_seqlens not in _longest:
        _longest[cu_seqlens] = int(cu_seqlens.diff().max())
    return _longest[cu_seqlens]


def flash_attention(q, k, v, *, cu_seqlens=None, causal=True, scale=None, **more):
    installed = _flash_installed()
    assert installed is not None  # `no_flash`
    distribution, module, _ = installed
    only(distribution, more, window=None, softcap=None, sinks=None, max_seqlen=None)
    if k.shape[2] != q.shape[2]:
        raise Unsupported(f"{distribution} is called here with as many keys as queries only")
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(
            f"{distribution} takes bfloat16 and float16, not {str(q.dtype).removeprefix('torch.')}"
        )
    if distribution == "flash-attn" and v.shape[-1] != q.shape[-1]:
        raise Unsupported(
            f"{distribution} takes values as wide as keys, not {v.shape[-1]} beside {q.shape[-1]}"
        )
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        raise Unsupported(
            f"{distribution} takes head widths that are multiples of 8 up to 256, not {q.shape[-1]}"
        )
    flash = importlib.import_module(module)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, S, H, D]
    if cu_seqlens is None:
        out = flash.flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)
    else:
        longest, ends = _max_seqlen(cu_seqlens), cu_seqlens.to(torch.int32)
        out = flash.flash_attn_varlen_func(
            *(t.squeeze(0) for t in (q, k, v)),
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=causal,
        )
    out = out[0] if isinstance(out, tuple) else out  # 4, and early 3, return the log-sum-exp too
    return (out if cu_seqlens is None else out.unsqueeze(0)).transpose(1, 2)


_masks: Any = WeakIdKeyDictionary()  # whose setdefault has no type


@functools.cache
def _flex():
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    return flex, torch.compile(flex.flex_attention, dynamic=False)


def _capped(softcap: float):
    def capped(score, b, h, i, j):
        return softcap * torch.tanh(score / softcap)

    return capped


def flex_attention(
    q, k, v, *, cu_seqlens=None, causal=True, window=None, softcap=None, scale=None, **more
):
    only("flex_attention", more, sinks=None, max_seqlen=None)
    flex, compiled = _flex()
    S, Sk = q.shape[2], k.shape[2]
    masks = _masks.setdefault(q if cu_seqlens is None else cu_seqlens, {})
    if (key := (causal, window, S, Sk)) not in masks:
        document = (
            None
            if cu_seqlens is None
            else torch.searchsorted(cu_seqlens.long(), torch.arange(S, device=q.device), right=True)
        )

        def seen(b, h, i, j):
            mask = i + (Sk - S) >= j if causal else i >= 0
            if window is not None:
                mask = mask & (i + (Sk - S) - j < window)
            return mask if document is None else mask & (document[i] == document[j])

        masks[key] = flex.create_block_mask(seen, None, None, S, Sk, device=q.device)

    return compiled(
        q,
        k,
        v,
        score_mod=_capped(softcap) if softcap else None,
        block_mask=masks[key],
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
