"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): feature pairs rotate by an angle
that grows with position.

    (a, b) -> (a cos - b sin, b cos + a sin)

Shapes: B = batch, H = heads, S = sequence, D = head width, R = rotated features (the first R of D),
P = table rows.
"""

from __future__ import annotations

import torch

from tilewright.core import checks
from tilewright.core.library import define, from_kernels
from tilewright.core.registry import Case, Cost, Op, in_cpp, in_triton
from tilewright.core.takes import takes
from tilewright.kernels.rope.operators import Rotation
from tilewright.ops import cases
from tilewright.ops.rope import rope_fused
from tilewright.ops.rope.rope_fused import in_place

# Tables for tokens [B, S] and heads of width D, and what they are read by.
TABLES = {
    "cos": "constant float [P, W] | [1, S, W] | [B, S, W]",
    "sin": "constant float [cos]",
    "rotary_dim": "static int [2, D]",
    "position_ids": "int64 | int32 | int16 | uint8 [S] | [B, S]",
    "cu_seqlens": "int32 | int64 [ends]",
    "interleaved": "bool",
}
TABLE_SIZES = (
    "cos: P > 0 or B * S == 0",
    "ends > 1",
)


@checks.autocast("inputs")
@takes(
    "D >= 2", *TABLE_SIZES, q="float [B, H, S, D]", k="q [B, Hk, S, D]", **TABLES, inplace="bool"
)
def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Applies rotary position embedding to q and k, in one launch: half-split or interleaved,
    partial, position ids, packed documents, in place.

    Computed in float32, rounded once. Differentiable in q and k: the backward is the rotation by
    the opposite angle.

    Args:
        q: [B, Hq, S, D] fp32 | bf16 | fp16 (fp64 with eager). Any strides; the fused kernels read
            it in place if its last dimension is contiguous, and their result has q's strides, so
            that a transposed view of [B, S, H, D] stays one.
        k: [B, Hk, S, D], as q, or None (then None is returned for it).
        cos, sin: [P, R / 2], or [P, R] with the same values in both halves, as in transformers;
            also [B, S, ...] with a row per token (then without position_ids). Any float
            dtype. Not differentiable: refused if they require a gradient.
        interleaved: pairs are neighbors (2 i, 2 i + 1), as in GPT-J; default (i, R / 2 + i), as in
            NeoX and Llama.
        rotary_dim: R; default D. Features from R on pass through.
        position_ids: integers [S] or [B, S], rows of the tables; default 0 .. S - 1.
        cu_seqlens: int32 or int64 [n + 1], 0 .. B * S, non-decreasing: cumulative lengths of the
            packed documents in the B * S tokens; positions restart at each. Excludes position_ids.
        inplace: overwrite q and k (a contiguous last dimension, any other strides) and return them.
            The backward of the op that produced them must not need them. Slices of one projection
            are fine: their elements may interleave in memory if both repeat by a common stride.
            Compiled code checks for expanded tensors only.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        (q, k) in the inputs' dtypes.

    Raises:
        TypeError, ValueError: invalid arguments; with inplace also where autograd cannot track it
            (a leaf that requires grad, or a view made by split, chunk or unbind) and where elements
            share memory: within a tensor, as when expanded, or between q and k.
        IndexError: a position outside the tables, compiled or not. On a CUDA device values of
            position_ids and cu_seqlens are not read on the host, which would synchronize: a token
            outside the tables, and every token of invalid cu_seqlens, becomes NaN, and nothing is
            read out of bounds.

    Example:
        >>> q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
        >>> cos, sin = torch.tensor([[0.0]]), torch.tensor([[1.0]])  # a quarter turn
        >>> tilewright.ops.rope(q, None, cos, sin)[0].flatten().tolist()
        [0.0, 1.0]

    Source: arXiv:2104.09864; pairs as in transformers' LlamaRotaryEmbedding, or neighboring as in
    GPT-J.
    """
    R = rotated(q.shape[3], rotary_dim, cos)
    cos, sin, position_ids = prepare_tables(
        q.shape[0], q.shape[2], R, cos, sin, position_ids, cu_seqlens
    )
    rotation = Rotation(cos, sin, position_ids, interleaved)
    fn = ROPE.pick(implementation, q)
    return in_place(fn, q, k, rotation) if inplace else fn(q, k, rotation)


def prepare_tables(
    B: int,
    S: int,
    R: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Converts tables and positions of a valid call to the form that implementations
    take: cos and sin [P, R / 2], and the table row of each token, int64 [B, S],
    or None if token s of a sequence has row s.

    Raises ValueError and IndexError as `rope`.
    """
    if cos.dim() == 3:
        if position_ids is not None or cu_seqlens is not None:
            raise ValueError(
                "cos and sin with a row for each token take neither position_ids nor cu_seqlens"
            )
        # With one row for all sequences, token s takes row s, which is the default.
        if cos.shape[0] > 1:
            position_ids = torch.arange(B * S, device=cos.device).view(B, S)
        cos, sin = cos.reshape(-1, cos.shape[-1]), sin.reshape(-1, sin.shape[-1])
    elif cu_seqlens is not None:
        if position_ids is not None:
            raise ValueError("position_ids and cu_seqlens exclude each other; got both")
        position_ids = checked_positions(
            document_positions(cu_seqlens, B * S).view(B, S), cos.shape[0]
        )
    elif position_ids is not None:
        position_ids = checked_positions(position_ids.expand(B, S), cos.shape[0])
    elif cos.shape[0] < S:
        raise IndexError(_outside(f"S is {S}: position", cos.shape[0], cos.shape[0]))
    if cos.shape[1] != R // 2:  # a view costs two microseconds
        cos, sin = cos[:, : R // 2], sin[:, : R // 2]
    return cos, sin, position_ids


def document_positions(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Position within its document of each of `tokens` packed tokens, int64 [tokens].

    Invalid boundaries raise ValueError; on a CUDA device, where a check would synchronize, they
    make every position -1.
    """
    cu = checks.cu_seqlens(cu_seqlens, tokens, wait=False)
    index = torch.arange(tokens, device=cu.device)
    positions = index - cu[torch.searchsorted(cu, index, right=True) - 1]
    if cu.is_cuda:
        right = (cu[0] == 0) & (cu[-1] == tokens) & (cu[1:] >= cu[:-1]).all()
        positions = torch.where(right, positions, -1)
    return positions


def _outside(name, value, rows):
    return f"{name} {value} is outside the tables, which have rows 0 to {rows - 1}"


def _positions(ids, rows):
    """ids as contiguous int64, checked unless that would synchronize with a GPU."""
    if not ids.is_cuda:
        wrong = ((ids < 0) | (ids >= rows)).nonzero()
        if len(wrong):
            index = wrong[0].tolist()
            raise IndexError(_outside(f"position_ids{index} =", int(ids[tuple(index)]), rows))
    return ids.to(torch.int64, copy=True, memory_format=torch.contiguous_format)


def _new_positions(ids: torch.Tensor, rows: int) -> torch.Tensor:
    return ids.new_empty(ids.shape, dtype=torch.int64)


# An operator, so that compiled code checks too, at run time, with the same message.
checked_positions = define(
    "rope_checked_positions",
    _positions,
    _new_positions,
    plain=lambda ids, rows: ids.to(torch.int64),
)


def rotated(D: int, rotary_dim: int | None, cos: torch.Tensor) -> int:
    """R, for heads of width D. Raises ValueError for tables that are not of this width."""
    R = D if rotary_dim is None else rotary_dim
    if R % 2:
        raise ValueError(f"rotary_dim must be even and 2 to {D} (head width), got {R}")
    if cos.shape[-1] not in (R, R // 2):
        raise ValueError(
            f"cos must have shape [P, {R // 2}] or [P, {R}] for rotary_dim {R}, got "
            f"{list(cos.shape)}"
        )
    return R


# ---- the definition


def rope_eager(q, k, rotation):
    cos, sin, position_ids, interleaved = rotation
    acc = torch.promote_types(q.dtype, torch.float32)
    S, R = q.shape[2], 2 * cos.shape[1]
    if position_ids is None:
        c, s = cos[:S].to(acc), sin[:S].to(acc)  # [S, R / 2]
    else:  # [B, 1, S, R / 2]; NaN for a position outside the tables
        outside = ((position_ids < 0) | (position_ids >= cos.shape[0])).unsqueeze(-1)
        rows = position_ids.clamp(0, cos.shape[0] - 1)
        c, s = (t[rows].to(acc).masked_fill(outside, float("nan")).unsqueeze(1) for t in (cos, sin))

    def rotate(x):
        if x is None:
            return None
        rotary, rest = x[..., :R].to(acc), x[..., R:]
        a, b = (rotary[..., ::2], rotary[..., 1::2]) if interleaved else rotary.chunk(2, -1)
        pair = (a * c - b * s, b * c + a * s)
        rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return torch.cat((rotated.to(x.dtype), rest), -1)

    return rotate(q), rotate(k)


# ---- cases


def _case(
    name,
    shape,
    *,
    R=None,
    full=False,
    ids=None,
    documents=None,
    transposed=True,
    per_token=False,
    no_k=False,
    tags=cases.CONTRACT,
    **options,
):
    B, hq, hk, S, D = shape
    R = R or D
    if R != D:
        options["rotary_dim"] = R
    rows = S if ids is None else 3 * S

    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        new = {"device": device, "dtype": dtype, "gen": g, "requires_grad": False}
        # The layout of projections: [B, S, H, D] viewed as [B, H, S, D].
        q, k = (
            cases.randn(B, S, h, D, **new).transpose(1, 2)
            if transposed
            else cases.randn(B, h, S, D, **new)
            for h in (hq, hk)
        )
        angle = torch.outer(
            torch.arange(rows, device=device).float(),
            10000.0 ** (-torch.arange(0, R, 2, device=device).float() / R),
        )
        if full:
            angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos(), angle.sin()
        if per_token:
            cos, sin = (t.expand(B, S, -1).contiguous() for t in (cos, sin))
        kw = {
            "q": q.requires_grad_(),
            "k": None if no_k else k.requires_grad_(),
            "cos": cos,
            "sin": sin,
            **options,
        }
        if ids is not None:
            kw["position_ids"] = torch.randint(
                0, rows, (B, S) if ids == 2 else (S,), device=device, generator=g
            )
        if documents:
            kw["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32, device=device)
        return kw

    def cost(itemsize):  # q and k in and out, each way
        n = B * S * (hq + (0 if no_k else hk)) * D * itemsize
        return Cost(2 * n, 2 * n, 0, 0)

    return Case(name, make, cost, tags)


def _all_cases():
    small = [
        _case("gqa", (2, 4, 2, 7, 16)),
        _case("full_tables", (1, 3, 1, 5, 20), full=True, transposed=False),
        _case("per_token", (2, 2, 2, 3, 8), full=True, per_token=True),
        _case("interleaved", (2, 3, 1, 6, 12), interleaved=True),
        _case("partial", (1, 2, 2, 5, 24), R=10),
        _case("partial_interleaved", (2, 2, 1, 4, 24), R=8, interleaved=True),
        _case("positions", (2, 2, 1, 9, 16), ids=2),
        _case("positions_shared", (2, 2, 1, 9, 16), ids=1),
        _case("documents", (1, 2, 1, 11, 16), documents=(0, 4, 5, 11)),
        _case("no_k", (1, 2, 1, 4, 16), no_k=True),
        _case("no_tokens", (1, 2, 1, 0, 16)),
    ]
    timed = []
    for device, tags in (("cuda", cases.CUDA), ("cpu", cases.CPU)):
        for name in ("qwen3-8b", "llama-3-8b", "gemma-3-4b", "deepseek-v3"):
            m = cases.MODELS[name]
            partial = {"R": 64, "interleaved": True} if name == "deepseek-v3" else {}
            timed.append(
                _case(
                    name,
                    (1, m.heads, m.kv_heads, cases.TOKENS[device], m.head_dim),
                    tags=tags,
                    **partial,
                )
            )
    return (*small, *timed, _case("big", (1, 64, 8, 2**18 + 1, 128), tags=cases.BIG))


ROPE = Op(
    "rope",
    rope,
    rope_eager,
    (
        in_triton(
            rope_fused.triton,
            batch_invariant=cases.ANYWHERE,
            tunables=from_kernels("rope.rope_triton", "TUNABLES"),
        ),
        in_cpp(rope_fused.cpp, batch_invariant=("cpu",)),
    ),
    _all_cases(),
    goals=cases.near_copy(92, "forward", "backward"),
)
