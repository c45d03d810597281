"""Scaled dot-product attention over one sequence or over packed documents:  softmax(scale q k^T + mask) v

Shapes: B = batch, Hq / Hk = query / key heads (Hq a multiple of Hk), S = sequence, D = head width.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from tilewright.ops import _checks, cases
from tilewright.registry import Case, Cost, Implementation, Op


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None,
              causal: bool = True, scale: float | None = None, implementation: str = "auto") -> torch.Tensor:
    """Attention with grouped queries.

    q: [B, Hq, S, D]; k, v: [B, Hk, S, D]; fp32 | bf16 | fp16 (fp64 too).
    cu_seqlens: int32 or int64 [n + 1], 0 .. S, not decreasing: packed documents of a sequence with B = 1, which never
        see each other. Its values are read on the host, which waits for a CUDA device.
    causal: a bool; position i sees positions up to i of its own document.
    scale: a finite number > 0 (in float32); default D ** -0.5.
    Returns [B, Hq, S, D] in q's dtype. The softmax is in float32. Differentiable in q, k and v. torch.autocast changes
    nothing: it computes in the dtype that q, k and v have.
    Raises TypeError or ValueError for arguments that do not fit, ImplementationUnavailable for a named implementation
    that cannot run here.
    Source: arXiv:1706.03762; grouped queries arXiv:2305.13245.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        _checks.floating(name, t)
        if t.dim() != 4:
            raise ValueError(f"{name} must have shape [B, H, S, D], got {list(t.shape)}")
        if t.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {t.dtype}")
    B, H, S, D = q.shape
    if H == 0 or D == 0:
        raise ValueError(f"q must have at least one head and a head width of at least 1, got {list(q.shape)}")
    if (k.shape[0], k.shape[2], k.shape[3]) != (B, S, D) or k.shape[1] == 0 or H % k.shape[1]:
        raise ValueError(f"k must have shape [{B}, a divisor of {H}, {S}, {D}] to go with q, got {list(k.shape)}")
    _checks.shape("v", v, tuple(k.shape), "that of k")
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {causal!r}")
    if scale is not None:   # PyTorch's kernels give NaN for a causal mask and a scale that is not positive
        _checks.number("scale", scale, _checks.SMALLEST, _checks.LARGEST,
                       "a finite number > 0 (in float32), or None for D ** -0.5")
    if cu_seqlens is not None:
        if B != 1:
            raise ValueError(f"packed documents need B = 1, got q of shape {list(q.shape)}")
        cu_seqlens = _checks.cu_seqlens(cu_seqlens, S, wait=True)
    _checks.same_device(q=q, k=k, v=v, cu_seqlens=cu_seqlens)
    fn = ATTENTION.pick(implementation, q)
    with _checks.no_autocast(q):
        return fn(q, k, v, cu_seqlens, causal, D ** -0.5 if scale is None else float(scale))


# ---- the definition

def attention_eager(q, k, v, cu_seqlens=None, causal=True, scale=1.0):
    acc = torch.promote_types(q.dtype, torch.float32)
    S, groups = q.shape[2], q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1).to(acc) for t in (k, v))
    index = torch.arange(S, device=q.device)
    allowed = index[:, None] >= index[None, :] if causal else index[:, None] >= 0 * index[None, :]
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens.to(torch.int64), index, right=True)
        allowed = allowed & (document[:, None] == document[None, :])
    scores = (q.to(acc) @ k.transpose(-1, -2) * scale).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ v).to(q.dtype)


# ---- PyTorch's fused attention: one call a document, so no mask is built and no document can see another

def _sdpa():
    def attention_sdpa(q, k, v, cu_seqlens, causal, scale):
        def call(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale,
                                                  enable_gqa=q.shape[1] != k.shape[1])

        if cu_seqlens is None:
            return call(q, k, v)
        ends = cu_seqlens.tolist()
        parts = [call(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b]) for a, b in itertools.pairwise(ends) if a < b]
        return torch.cat(parts, 2) if parts else call(q, k, v)   # without tokens still differentiable

    return attention_sdpa


# ---- cases

def _case(name, B, hq, hk, S, D, *, documents=None, tags=cases.CONTRACT, **options):
    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        q, k, v = (cases.randn(B, S, h, D, device=device, dtype=dtype, gen=g, requires_grad=False).transpose(1, 2)
                   .requires_grad_() for h in (hq, hk, hk))
        kw = {"q": q, "k": k, "v": v, **options}
        if documents:
            kw["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32, device=device)
        return kw

    def cost(itemsize):   # causal: half the score matrix; two products forward, five backward
        flops = 2 * B * hq * S * S * D
        return Cost(itemsize * B * S * D * 2 * (hq + hk), itemsize * B * S * D * 4 * (hq + hk), flops, 5 * flops // 2)

    return Case(name, make, cost, tags)


def _atol(dtype, kwargs):
    """dq and dk are sums of p (dp - delta), and delta is sum(dout out): PyTorch takes it from the output as stored,
    rounded, where the twin's softmax keeps float32. delta is as large as dp and cancels against it, wholly in a first
    row, so half an eps of the output is several eps of the gradients' root mean square. Rounding the output alone in a
    float64 backward gives the same errors. Measured beyond twice the twin's own, at S = 17: 5.6 eps in 16 bits (1,200
    draws); 17.6 eps in float32 (160 draws), where the probabilities too come again from a rounded log-sum-exp.

    In longer sequences most rows average over many keys, so that the root mean square that errors are measured against
    falls as 1 / sqrt(S), while the first rows, with few keys, keep theirs.
    """
    eps = torch.finfo(dtype).eps
    return (32 if dtype == torch.float32 else 8) * eps * max(1.0, (kwargs["q"].shape[2] / 17) ** 0.5)


ATTENTION = Op(
    "attention", attention, attention_eager,
    (Implementation("sdpa", _sdpa, devices=("cuda", "cpu"),
                    dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64)),),
    (
        _case("gqa", 2, 4, 2, 9, 8),
        _case("full", 1, 2, 2, 7, 16, causal=False),
        _case("scaled", 2, 2, 1, 5, 8, scale=0.3),
        _case("documents", 1, 4, 2, 17, 8, documents=(0, 1, 6, 17), tags=cases.HOST),
        _case("qwen3-8b", 1, 32, 8, 4096, 128, tags=cases.CUDA),
        _case("qwen3-8b", 1, 32, 8, 512, 128, tags=cases.CPU),
    ),
    atol=_atol,
)
