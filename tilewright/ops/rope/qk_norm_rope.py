"""The step from a merged projection to attention: RMSNorm over each head of q and k (QK norm, as in
Qwen3), then rotary position embedding of both. v stays in place.

Shapes: B = batch, S = sequence, D = head width, Hq and Hk = query and key heads, R = rotated
features (the first R of D), P = table rows. qkv [B, S, (Hq + 2 Hk) D] holds a token's heads: those
of q, k and v.
"""

from __future__ import annotations

import torch

from tilewright.core import checks
from tilewright.core.library import from_kernels
from tilewright.core.registry import Case, Cost, Op, in_cpp, in_triton
from tilewright.core.takes import takes
from tilewright.kernels.rope.operators import HeadNorm, Heads, Rotation
from tilewright.ops import cases
from tilewright.ops.norm.rmsnorm import NORM, rmsnorm_eager
from tilewright.ops.rope import qk_norm_rope_fused
from tilewright.ops.rope.qk_norm_rope_fused import in_place, pieces
from tilewright.ops.rope.rope import (
    TABLE_SIZES,
    TABLES,
    prepare_tables,
    rope_eager,
    rotated,
)

MAX_D = 1024  # the fused kernels hold a head in registers


# Wide: what rmsnorm takes for q and for k, and what rope takes.
@checks.autocast("inputs")
@takes(
    "2 <= D <= MAX_D",
    *TABLE_SIZES,
    num_heads="static int [1, inf)",
    num_kv_heads="static int [1, inf)",
    qkv="float [B, S, (num_heads + 2 * num_kv_heads) * D]",
    q_weight="float [D]",
    k_weight="float [D]",
    eps=NORM["eps"],
    offset=NORM["offset"],
    **TABLES,
    inplace="bool",
)
def qk_norm_rope(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    position_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inplace: bool = False,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes (q, k, v) for attention from a merged projection: `rmsnorm` over each head of q and
    k, and `rope` of both, in one pass over memory.

    Norm and rotation are computed in float32 and rounded once, at the end; `rmsnorm` and `rope` in
    sequence round twice (three times with cast="llama"). Differentiable once in qkv and the weights
    (eager: any number of times). The backward is one pass that writes the whole gradient of qkv,
    v's part included. The weights' gradients accumulate in float32, on a CPU in float32 over about
    64 heads and in float64 beyond (in a fixed order, without atomics). Saved for backward: qkv, 4
    bytes per head of q and k, and the tables; without weights only the tables.

    Args:
        qkv: [B, S, (Hq + 2 Hk) D] fp32 | bf16 | fp16 (fp64 with eager), D <= 1,024; any strides;
            the fused kernels read it in place if its last dimension is contiguous.
        cos, sin: as in `rope`.
        num_heads, num_kv_heads: Hq and Hk.
        q_weight, k_weight: [D] each, of any float dtype, or both None: no norm.
        eps, offset: as in `rmsnorm`.
        position_ids, cu_seqlens, interleaved, rotary_dim: as in `rope`.
        inplace: write q and k over their part of qkv; the backward of the op that produced qkv must
            not need it.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        q [B, Hq, S, D], k and v [B, Hk, S, D] in qkv's dtype, [B, S, H, D] in memory. v is a view
        of qkv, and so are q and k with inplace=True.

    Raises:
        TypeError, ValueError, IndexError: as `rmsnorm` and `rope`. Also ValueError for inplace with
            weights if a gradient is required, since the gradient is computed from the values that
            are overwritten. A token outside the tables, where that is not checked, becomes NaN in q
            and k.

    Example:
        >>> qkv, angle = torch.ones(1, 3, 4 * 8), torch.zeros(3, 4)
        >>> q, k, v = tilewright.ops.qk_norm_rope(
        ...     qkv, angle.cos(), angle.sin(), num_heads=2, num_kv_heads=1
        ... )
        >>> tuple(q.shape), tuple(k.shape), bool((q == 1).all())
        ((1, 2, 3, 8), (1, 1, 3, 8), True)

    Source: QK norm as in transformers' Qwen3Attention; arXiv:1910.07467 and arXiv:2104.09864.
    """
    D = qkv.shape[2] // (num_heads + 2 * num_kv_heads)
    if (q_weight is None) != (k_weight is None):
        present, absent = ("k_weight", "q_weight") if q_weight is None else ("q_weight", "k_weight")
        raise ValueError(
            f"q_weight and k_weight must be given both or neither, got {present} without {absent}"
        )
    R = rotated(D, rotary_dim, cos)
    cos, sin, position_ids = prepare_tables(
        qkv.shape[0], qkv.shape[1], R, cos, sin, position_ids, cu_seqlens
    )
    fn = QK_NORM_ROPE.pick(implementation, qkv)
    heads = Heads(num_heads, num_kv_heads)
    norm = HeadNorm(q_weight, k_weight, eps, offset)
    rotation = Rotation(cos, sin, position_ids, interleaved)
    if inplace:
        return in_place(fn, qkv, heads, norm, rotation)
    return fn(qkv, heads, norm, rotation)


# ---- the definition


def qk_norm_rope_eager(qkv, heads, norm, rotation):
    acc = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = pieces(qkv, heads)
    q, k = q.to(acc), k.to(acc)
    if norm.q_weight is not None:
        q, k = (
            rmsnorm_eager(x, w, None, norm.eps, norm.offset, "gemma")
            for x, w in ((q, norm.q_weight), (k, norm.k_weight))
        )
    q, k = (
        x.transpose(1, 2).to(qkv.dtype).contiguous().transpose(1, 2)
        for x in rope_eager(q, k, rotation)
    )
    return q, k, v


# ---- cases


def _case(
    name,
    shape,
    *,
    R=None,
    norm=True,
    weight=None,
    ids=False,
    documents=None,
    strided=False,
    tags=cases.CONTRACT,
    **options,
):
    """weight: dtype of the weights if not qkv's.   strided: qkv is a slice of wider rows."""
    B, hq, hk, S, D = shape
    R = R or D
    if R != D:
        options["rotary_dim"] = R
    rows = 3 * S if ids else S
    W = (hq + 2 * hk) * D

    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        new = {"device": device, "gen": g, "requires_grad": False}
        qkv = cases.randn(B, S, W + 8 if strided else W, dtype=dtype, **new)[..., :W]
        angle = torch.outer(
            torch.arange(rows, device=device).float(),
            10000.0 ** (-torch.arange(0, R, 2, device=device).float() / R),
        )
        kw = {
            "qkv": qkv.requires_grad_(),
            "cos": angle.cos(),
            "sin": angle.sin(),
            "num_heads": hq,
            "num_kv_heads": hk,
            **options,
        }
        if norm:
            for w in ("q_weight", "k_weight"):
                kw[w] = cases.randn(
                    D, dtype=weight or dtype, scale=0.2, shift=1.0, **new
                ).requires_grad_()
        if ids:
            kw["position_ids"] = torch.randint(0, rows, (B, S), device=device, generator=g)
        if documents:
            kw["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32, device=device)
        return kw

    def cost(itemsize):
        q_k, v = B * S * (hq + hk) * D, B * S * hk * D
        # forward: q and k in and out. backward: their gradients and v's in, qkv's out, and with a
        # norm q and k in.
        return Cost(
            2 * q_k * itemsize,
            ((3 if norm else 2) * q_k + 2 * v) * itemsize,
            (7 if norm else 3) * q_k,
            (11 if norm else 3) * q_k,
        )

    return Case(name, make, cost, tags)


def _all_cases():
    small = [
        _case("gqa", (2, 4, 2, 5, 16)),
        _case("no_norm", (2, 3, 1, 4, 12), norm=False),
        _case("partial", (1, 2, 2, 5, 24), R=10, offset=1.0),
        _case("interleaved", (2, 3, 1, 4, 20), interleaved=True),
        _case("partial_interleaved", (1, 2, 1, 5, 20), R=8, interleaved=True),
        _case("partial_no_norm", (1, 2, 1, 3, 11), R=6, norm=False),
        _case("positions", (2, 2, 1, 6, 16), ids=True),
        _case("documents", (1, 2, 1, 11, 8), documents=(0, 4, 5, 11)),
        _case("fp32_weight", (1, 5, 3, 3, 12), weight=torch.float32, eps=1e-2),
        _case("strided", (2, 2, 1, 3, 16), strided=True),
        _case("wide", (1, 3, 2, 2, 128)),
        _case("no_tokens", (1, 2, 1, 0, 16)),
    ]
    timed = []
    for device, tags in (("cuda", cases.CUDA), ("cpu", cases.CPU)):
        for name in ("qwen3-8b", "qwen3-30b-a3b", "llama-3-8b"):
            m = cases.MODELS[name]
            timed.append(
                _case(
                    name,
                    (1, m.heads, m.kv_heads, cases.TOKENS[device], m.head_dim),
                    norm=name.startswith("qwen3"),
                    tags=tags,
                )
            )
    return (*small, *timed, _case("big", (1, 16, 8, 2**19 + 1, 128), tags=cases.BIG))


QK_NORM_ROPE = Op(
    "qk_norm_rope",
    qk_norm_rope,
    qk_norm_rope_eager,
    (
        in_triton(
            qk_norm_rope_fused.triton,
            batch_invariant=cases.ANYWHERE,
            tunables=from_kernels("rope.qk_norm_rope_triton", "TUNABLES"),
        ),
        in_cpp(qk_norm_rope_fused.cpp, batch_invariant=("cpu",)),
    ),
    _all_cases(),
    # A gradient is a rotation (two products and a sum) and then a difference of two terms, which a
    # head of small values makes large: eager's error is 2.5e-7 in the mean of small cases and
    # 5.6e-7 in the worst of 80, Triton's 2.5e-7 and 8.2e-7. Where eager's error is small by chance,
    # 2 eps of slack are too few.
    atol={torch.float32: 4 * torch.finfo(torch.float32).eps},
    goals=(*cases.near_copy(92, "forward"), *cases.near_copy(85, "backward")),
)
