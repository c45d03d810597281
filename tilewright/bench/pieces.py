"""Computes the numerics contract of a large case within bounded memory: by blocks of rows, heads or
experts.

The eager twin in float64 needs many times an implementation's memory (S x S attention scores,
float64 copies of logits or of every expert). `of` cuts a call into pieces that the twin computes in
sequence. Results shared by all pieces (a weight's gradient, a loss) are summed over all of them: in
float64 for truth, in float32 for the twin in the inputs' dtype. Results of one piece are compared
for all pieces if small enough, else for a fixed sample of them, which the result then names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.bench import piece
from tilewright.bench.piece import Piece, Pieces, at_dim, blocks, sample_of
from tilewright.bench.pieces_losses import (
    cross_entropy,
    linear,
    linear_cross_entropy,
    logprob,
    logprob_entropy,
)
from tilewright.core.registry import Op


def of(op: Op, kwargs: dict[str, Any]) -> Pieces | None:
    """The pieces of a call; None if the twin can compute it whole."""
    cut = TABLE.get(op.name)
    return cut(kwargs) if cut else None


# ---- ops with independent rows or columns


def _along(
    dim: int,
    *names: str,
    outputs: Sequence[str],
    description: str = "blocks of rows",
    placed: bool = True,
) -> Callable:
    """Cuts arguments along a dimension.

    names: arguments that are cut along `dim`.
    outputs: arguments with the outputs' shapes; any for an output that is not differentiable.
    placed: random values from a seed depend on an element's index.
    """

    def cut(kwargs):
        tensor_names = [n for n in names if kwargs.get(n) is not None]
        shapes = {i: kwargs[n].shape for i, n in enumerate(outputs)}
        if "up" in names and "up" not in tensor_names:  # packed
            shapes = dict.fromkeys(
                shapes, (*kwargs["gate"].shape[:-1], kwargs["gate"].shape[-1] // 2)
            )
        if (
            kwargs[tensor_names[0]].dim() < 2
            or kwargs.get("transpose")
            or (placed and kwargs.get("seed") is not None)
        ):
            return None
        size = kwargs[tensor_names[0]].shape[dim]
        widest = sum(kwargs[n].numel() for n in tensor_names)
        if 2 * widest <= piece.KEPT:
            return None
        step = max(1, size * piece.WORK // (2 * widest))
        parts = [
            Piece(
                {n: at_dim(dim, b) for n in tensor_names},
                {i: at_dim(dim, b) for i in range(len(shapes))},
            )
            for b in blocks(size, step)
        ]
        return Pieces(shapes, parts, description, sample_of(parts, 2 * widest))

    return cut


def _rope(kwargs):
    q, k = kwargs["q"], kwargs.get("k")
    if (
        any(kwargs.get(n) is not None for n in ("position_ids", "cu_seqlens"))
        or kwargs["cos"].dim() != 2
    ):
        return None
    return (
        _along(1, "q", outputs=("q",), description="blocks of heads")(kwargs)
        if k is None
        else (_heads_of(("q", "k"), q, k))
    )


def _heads_of(names, q, k):
    """Blocks of heads of two tensors [B, H, S, D]: equally many of each."""
    total = q.numel() + k.numel()
    if 2 * total <= piece.KEPT:
        return None
    count = min(k.shape[1], math.ceil(2 * total / piece.WORK))
    parts = [
        Piece(
            {n: at_dim(1, b) for n, b in zip(names, both, strict=True)},
            {i: at_dim(1, b) for i, b in enumerate(both)},
        )
        for both in zip(*(_even(t.shape[1], count) for t in (q, k)), strict=True)
    ]
    return Pieces({0: q.shape, 1: k.shape}, parts, "blocks of heads", sample_of(parts, 2 * total))


def _even(size: int, count: int) -> list[slice]:
    ends = [round(i * size / count) for i in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def _columns(argument):
    """Columns of rows that are only moved, or weighted and summed; every piece computes the whole
    order of slots.
    """

    def cut(kwargs):
        wide, index = kwargs[argument], kwargs.get("expert_index", kwargs.get("position"))
        T, K = index.shape
        num_elements = wide.shape[1] * T * (K + 1)
        if 4 * num_elements <= piece.KEPT:
            return None
        out = T * K + int(argument == "rows") * (T - T * K)
        parts = [
            Piece({argument: at_dim(1, b)}, {0: at_dim(1, b)})
            for b in blocks(wide.shape[1], max(1, piece.WORK // (2 * T * (K + 1))))
        ]
        return Pieces(
            {0: torch.Size((out, wide.shape[1]))},
            parts,
            "blocks of columns",
            sample_of(parts, num_elements),
        )

    return cut


# ---- attention: a key head with its group of query heads, and blocks of rows


def _attention(kwargs):
    q, k, cu = kwargs["q"], kwargs["k"], kwargs.get("cu_seqlens")
    B, Hq, S, _ = q.shape
    Hk, Sk = k.shape[1:3]
    group = Hq // Hk
    if B * Hq * S * Sk <= piece.KEPT // 4 or kwargs.get("dropout_p"):
        return None  # the mask of dropout has positions in the whole sequence
    ends = [0, S] if cu is None else cu.tolist()
    # A pass over all heads of 32k rows takes a minute.
    heads = [Hk - 1] if S > 2**14 else sorted({0, Hk - 1})
    parts = []
    for h in heads:
        query_heads, key_head = slice(h * group, (h + 1) * group), slice(h, h + 1)
        for a, b in itertools.pairwise(ends):
            longest = b - a if cu is not None else Sk
            for rows in blocks(b - a, max(1, piece.WORK // (B * group * max(longest, 1)))):
                # The twin aligns the last of these keys with the last row.
                last = Sk - S + rows.stop if kwargs.get("causal", True) and cu is None else longest
                last = rows.stop if kwargs.get("causal", True) and cu is not None else last
                queries = (slice(None), query_heads, slice(a + rows.start, a + rows.stop))
                keys = (slice(None), key_head, slice(a, a + last))
                inputs = {"q": queries, "k": keys, "v": keys}
                if kwargs.get("sinks") is not None:
                    inputs["sinks"] = (query_heads,)
                of_head = (slice(None), key_head)
                parts.append(
                    Piece(inputs, {0: queries}, {"k": of_head, "v": of_head}, {"cu_seqlens": None})
                )
    sampled = len(heads) < Hk
    return Pieces(
        {0: torch.Size((B, Hq, S, kwargs["v"].shape[3]))},
        parts,
        f"blocks of rows, of heads {heads} of {Hk}" if sampled else "blocks of rows",
        frozenset(range(len(parts))) if sampled else None,
    )


# ---- experts: in groups; a token's contributions are summed over them


def _experts(*adapters):
    def cut(kwargs):
        up, down, index = kwargs["gate_up_proj"], kwargs["down_proj"], kwargs["expert_index"]
        if not isinstance(up, torch.Tensor) or kwargs.get("noise") is not None:
            return None
        E, each = up.shape[0], up[0].numel() + down[0].numel()
        rows = index.numel() * up.shape[1]
        if not rows or E * each + rows <= piece.KEPT // 2:
            return None
        T, H = kwargs["x"].shape
        tokens = max(1, piece.WORK // (2 * index.shape[1] * max(H, up.shape[1])))
        names = [
            n
            for n in ("gate_up_proj", "down_proj", *adapters)
            if kwargs.get(n) is not None and kwargs[n].shape[0] == E
        ]
        parts = []
        for g, b in itertools.product(
            blocks(E, max(1, piece.WORK // (4 * each))), blocks(T, tokens)
        ):
            local_index = index[b] - g.start
            in_group = (local_index >= 0) & (local_index < g.stop - g.start)
            local_index = local_index.where(in_group, g.stop - g.start)
            parts.append(
                Piece(
                    {"x": (b,), "expert_weight": (b,), **dict.fromkeys(names, (g,))},
                    {0: (b,)},
                    other={"expert_index": local_index},
                )
            )
        num_elements = T * H + sum(kwargs[n].numel() for n in names if kwargs[n].requires_grad)
        return Pieces(
            {0: kwargs["x"].shape},
            parts,
            "blocks of tokens and groups of experts",
            sample_of(parts, num_elements),
        )

    return cut


def _grouped_gemm(kwargs):
    x, weight, ends = kwargs["x"], kwargs["weight"], kwargs["offsets"].tolist()
    E, N, K = weight.shape
    if weight.numel() + x.shape[0] * (N + K) <= piece.KEPT:
        return None
    parts, max_rows = [], max(1, piece.WORK // (2 * (N + K)))
    for e, (a, b) in enumerate(itertools.pairwise([0, *ends])):
        for rows in blocks(max(1, b - a), max_rows):
            row_slice = (slice(a + rows.start, a + min(rows.stop, b - a)),)
            count = torch.full(
                (1,), row_slice[0].stop - row_slice[0].start, dtype=torch.int32, device=x.device
            )
            parts.append(
                Piece(
                    {"x": row_slice, "weight": (slice(e, e + 1),)},
                    {0: row_slice},
                    other={"offsets": count},
                )
            )
    if ends[-1] < x.shape[0]:  # rows without an expert have output 0
        tail = (slice(ends[-1], x.shape[0]),)
        parts.append(
            Piece(
                {"x": tail, "weight": (slice(E - 1, E),)},
                {0: tail},
                other={"offsets": torch.zeros(1, dtype=torch.int32, device=x.device)},
            )
        )
    num_elements = x.shape[0] * (N + K) + weight.numel()
    return Pieces(
        {0: torch.Size((x.shape[0], N))},
        parts,
        "blocks of rows of experts",
        sample_of(parts, num_elements),
    )


TABLE: dict[str, Callable[[dict[str, Any]], Pieces | None]] = {
    "rmsnorm": _along(0, "x", outputs=("x",)),
    "add_rmsnorm": _along(0, "x", "residual", outputs=("x", "residual")),
    "layernorm": _along(0, "x", outputs=("x",)),
    "add_layernorm": _along(0, "x", "residual", outputs=("x", "residual")),
    "silu_mul": _along(0, "gate", "up", outputs=("gate",)),
    "gelu_mul": _along(0, "gate", "up", outputs=("gate",)),
    "silu_mul_quantize": _along(0, "gate", "up", outputs=("gate", "gate")),
    "hadamard": _along(0, "x", outputs=("x",), placed=False),  # signs are per column
    "rope": _rope,
    "attention": _attention,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear(linear_cross_entropy),
    "linear_logprob": linear(logprob),
    "logprob_entropy": logprob_entropy,
    "permute": _columns("x"),
    "unpermute": _columns("rows"),
    "grouped_gemm": _grouped_gemm,
    "moe_mlp": _experts("gate_up_bias", "down_bias"),
    "moe_lora": _experts("gate_A", "gate_B", "up_A", "up_B", "down_A", "down_B"),
}
