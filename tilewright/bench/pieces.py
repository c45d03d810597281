"""How the numerics contract of a large case is computed within a bound of memory: by blocks of
rows, heads or experts.

The eager twin in float64 holds many times what an implementation does (S x S scores of attention,
float64 copies of logits or of every expert). `of` cuts a call into pieces that the twin computes
one after another. What every piece adds to (the gradient of a weight, a loss) is summed over all of
them, in float64 and of the twin's own in float32. What belongs to one piece is compared for all
pieces if it is small enough, else for a fixed sample of them, which the result then names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.registry import Op

MEMORY = 8 * 2**30  # bytes that a check may take on a device beside a call's inputs and results
WORK = (
    2**26
)  # elements of the widest tensor of a piece: half a GiB in float64, and there are about 8 such
KEPT = (
    2**26
)  # elements of results that are kept for comparison, in float64 and in the twin's own dtype
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """What can be computed by itself.

    inputs: argument -> the part of it that the piece reads; others are read whole.
    outputs: number of an output -> the part of it that this piece is; to others it adds.
    within: argument -> the part of it whose gradient is summed over pieces, if `inputs` is not
    that.
    other: arguments in place of the call's.
    """

    inputs: Mapping[str, Index] = field(default_factory=dict)
    outputs: Mapping[int, Index] = field(default_factory=dict)
    within: Mapping[str, Index] = field(default_factory=dict)
    other: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pieces:
    """shapes: of the outputs that pieces are parts of.   parts: all of them, in order.   what:
    names them in a result.
    sample: which of the parts' own results are compared; None: all.   eager: in place of the op's
    twin, the same function with less memory.
    """

    shapes: Mapping[int, Sequence[int]]
    parts: Sequence[Piece]
    what: str
    sample: frozenset[int] | None = None
    eager: Callable[..., Any] | None = None

    def note(self) -> str | None:
        """What a result says of a contract that was not looked at everywhere."""
        return (
            None if self.sample is None else f"{len(self.sample)} of {len(self.parts)} {self.what}"
        )


def of(op: Op, kwargs: dict[str, Any]) -> Pieces | None:
    """The pieces of a call; None if the twin can have it whole."""
    cut = TABLE.get(op.name)
    return cut(kwargs) if cut else None


def _sample(parts: Sequence[Piece], own: int) -> frozenset[int] | None:
    """own: elements that belong to one piece each, of all together. Even steps, the first and
    the last among them.
    """
    count = len(parts)
    keep = max(2, int(count * KEPT / max(own, 1)))
    if keep >= count:
        return None
    return frozenset(round(i * (count - 1) / (keep - 1)) for i in range(keep))


def _blocks(count: int, step: int) -> Iterator[slice]:
    return (slice(a, min(a + step, count)) for a in range(0, count, max(step, 1)))


def _at(dim: int, where: slice) -> Index:
    return (*(slice(None),) * dim, where)


# ---- ops whose rows, or columns, have nothing to do with each other


def _along(
    dim: int, *names: str, outputs: Sequence[str], what: str = "blocks of rows", placed: bool = True
) -> Callable:
    """names: arguments that are cut along `dim`.   outputs: the arguments that have the outputs'
    shapes (of one
    that is not differentiable any).   placed: what a seed gives an element depends on its place.
    """

    def cut(kwargs):
        given = [n for n in names if kwargs.get(n) is not None]
        shapes = {i: kwargs[n].shape for i, n in enumerate(outputs)}
        if "up" in names and "up" not in given:  # packed
            shapes = dict.fromkeys(
                shapes, (*kwargs["gate"].shape[:-1], kwargs["gate"].shape[-1] // 2)
            )
        if (
            kwargs[given[0]].dim() < 2
            or kwargs.get("transpose")
            or (placed and kwargs.get("seed") is not None)
        ):
            return None
        size = kwargs[given[0]].shape[dim]
        widest = sum(kwargs[n].numel() for n in given)
        if 2 * widest <= KEPT:
            return None
        step = max(1, size * WORK // (2 * widest))
        parts = [
            Piece({n: _at(dim, b) for n in given}, {i: _at(dim, b) for i in range(len(shapes))})
            for b in _blocks(size, step)
        ]
        return Pieces(shapes, parts, what, _sample(parts, 2 * widest))

    return cut


def _rope(kwargs):
    q, k = kwargs["q"], kwargs.get("k")
    if (
        any(kwargs.get(n) is not None for n in ("position_ids", "cu_seqlens"))
        or kwargs["cos"].dim() != 2
    ):
        return None
    return (
        _along(1, "q", outputs=("q",), what="blocks of heads")(kwargs)
        if k is None
        else (_heads_of(("q", "k"), q, k))
    )


def _heads_of(names, q, k):
    """Blocks of heads of two tensors [B, H, S, D]: as many blocks of each."""
    total = q.numel() + k.numel()
    if 2 * total <= KEPT:
        return None
    count = min(k.shape[1], math.ceil(2 * total / WORK))
    parts = [
        Piece(
            {n: _at(1, b) for n, b in zip(names, both, strict=True)},
            {i: _at(1, b) for i, b in enumerate(both)},
        )
        for both in zip(*(_even(t.shape[1], count) for t in (q, k)), strict=True)
    ]
    return Pieces({0: q.shape, 1: k.shape}, parts, "blocks of heads", _sample(parts, 2 * total))


def _even(size: int, count: int) -> list[slice]:
    ends = [round(i * size / count) for i in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def _columns(argument):
    """Columns of rows that are only moved, or weighted and summed; orders of slots every piece
    finds whole.
    """

    def cut(kwargs):
        wide, index = kwargs[argument], kwargs.get("expert_index", kwargs.get("position"))
        T, K = index.shape
        own = wide.shape[1] * T * (K + 1)
        if 4 * own <= KEPT:
            return None
        out = T * K + int(argument == "rows") * (T - T * K)
        parts = [
            Piece({argument: _at(1, b)}, {0: _at(1, b)})
            for b in _blocks(wide.shape[1], max(1, WORK // (2 * T * (K + 1))))
        ]
        return Pieces(
            {0: torch.Size((out, wide.shape[1]))}, parts, "blocks of columns", _sample(parts, own)
        )

    return cut


# ---- attention: a key's head with the queries' heads that read it, and blocks of rows


def _attention(kwargs):
    q, k, cu = kwargs["q"], kwargs["k"], kwargs.get("cu_seqlens")
    B, Hq, S, _ = q.shape
    Hk, Sk = k.shape[1:3]
    group = Hq // Hk
    if B * Hq * S * Sk <= KEPT // 4:
        return None
    ends = [0, S] if cu is None else cu.tolist()
    heads = (
        [Hk - 1] if S > 2**14 else sorted({0, Hk - 1})
    )  # a pass over all heads of 32k rows takes a minute
    parts = []
    for h in heads:
        mine, theirs = slice(h * group, (h + 1) * group), slice(h, h + 1)
        for a, b in itertools.pairwise(ends):
            longest = b - a if cu is not None else Sk
            for rows in _blocks(b - a, max(1, WORK // (B * group * max(longest, 1)))):
                # The twin takes the last of these keys for the last row's own.
                last = Sk - S + rows.stop if kwargs.get("causal", True) and cu is None else longest
                last = rows.stop if kwargs.get("causal", True) and cu is not None else last
                queries = (slice(None), mine, slice(a + rows.start, a + rows.stop))
                keys = (slice(None), theirs, slice(a, a + last))
                inputs = {"q": queries, "k": keys, "v": keys}
                if kwargs.get("sinks") is not None:
                    inputs["sinks"] = (mine,)
                of_head = (slice(None), theirs)
                parts.append(
                    Piece(inputs, {0: queries}, {"k": of_head, "v": of_head}, {"cu_seqlens": None})
                )
    sampled = len(heads) < Hk
    return Pieces(
        {0: q.shape},
        parts,
        f"blocks of rows, of heads {heads} of {Hk}" if sampled else "blocks of rows",
        frozenset(range(len(parts))) if sampled else None,
    )


# ---- losses: blocks of rows; the mean is over the rows of all


def _counted(kwargs, target):
    """num_tokens of the whole call, which a piece does not know by itself."""
    if kwargs.get("reduction", "mean") != "mean" or kwargs.get("num_tokens") is not None:
        return {}
    return {"num_tokens": max(1, int((target != kwargs.get("ignore_index", -100)).sum()))}


def _per_row(kwargs):
    return [n for n in ("token_weight",) if kwargs.get(n) is not None]


def _loss_rows(kwargs, argument, V, eager=None, outputs=1):
    """One row of logits after another; what is summed over rows is a loss, unless it is not
    reduced.
    """
    target = kwargs["target"]
    if (
        kwargs.get("class_weight") is not None
        or target.dim() != 1
        or any(kwargs.get(n) for n in ("return_lse", "return_entropy", "return_argmax"))
    ):
        return None
    rows = target.shape[0]
    if rows * V <= KEPT // 2:
        return None
    whole = outputs == 2 or kwargs.get("reduction", "mean") == "none"
    other = {} if outputs == 2 else _counted(kwargs, target)
    if kwargs.get("inplace"):
        other = {**other, "inplace": False}
    parts = [
        Piece(
            dict.fromkeys((argument, "target", *_per_row(kwargs)), (b,)),
            dict.fromkeys(range(outputs), (b,)) if whole else {},
            other=other,
        )
        for b in _blocks(rows, max(1, WORK // (2 * V)))
    ]
    shapes = dict.fromkeys(range(outputs), target.shape) if whole else {}
    return Pieces(shapes, parts, "blocks of rows", _sample(parts, kwargs[argument].numel()), eager)


def _cross_entropy(kwargs):
    return _loss_rows(kwargs, "logits", kwargs["logits"].shape[-1])


class _Head(torch.autograd.Function):
    """x @ weight.t() in x's dtype with a weight that stays in its own, by blocks of the vocabulary;
    the weight's gradient in x's dtype, of some of its rows.
    """

    @staticmethod
    def forward(ctx, x, some, weight, rows):
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        if weight.dtype == x.dtype:
            return x @ weight.t()
        out = x.new_empty(x.shape[0], weight.shape[0])
        for b in _blocks(weight.shape[0], HEAD):
            torch.mm(x, weight[b].to(x.dtype).t(), out=out[:, b])
        return out

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        if weight.dtype == x.dtype:
            dx = g @ weight
        else:
            dx = torch.zeros_like(x)
            for b in _blocks(weight.shape[0], HEAD):
                dx.addmm_(g[:, b], weight[b].to(x.dtype))
        return dx, g[:, ctx.rows].t() @ x, None, None


HEAD = 2**14  # rows of the weight that are widened at a time


def _of_rows(V):
    """Which rows of a head's weight are looked at for their gradient: the last, where a tail is."""
    return slice(max(0, V - HEAD // 4), V)


def _linear(loss):
    """The loss of rows after rows, with one sample of the weight's rows for its gradient."""

    def cut(kwargs):
        weight = kwargs["weight"]
        V = weight.shape[0]
        plain = {
            "x",
            "weight",
            "target",
            "softcap",
            "temperature",
            "reduction",
            "num_tokens",
            "ignore_index",
            "chunk_size",
            "label_smoothing",
            "z_loss",
            "token_weight",
        }
        if kwargs.keys() - plain or not weight.requires_grad or kwargs["x"].dim() != 2:
            return None
        found = _loss_rows(kwargs, "x", V, loss, 2 if loss is _logprob else 1)
        if found is None:
            return None
        some = _of_rows(V)
        parts = [
            Piece(
                {**p.inputs, "weight": (some,)},
                p.outputs,
                other={**p.other, "whole": weight.detach(), "some": some},
            )
            for p in found.parts
        ]
        what = f"blocks of rows, and the weight's gradient for its rows from {some.start} on"
        return Pieces(found.shapes, parts, what, found.sample or frozenset(range(len(parts))), loss)

    return cut


def _linear_cross_entropy(x, weight, target, *, whole, some, chunk_size=None, **options):
    from tilewright.ops.cross_entropy import cross_entropy

    return cross_entropy(
        _Head.apply(x, weight, whole, some), target, **options, implementation="eager"
    )


def _logprob(
    x,
    weight,
    target,
    *,
    whole,
    some,
    chunk_size=None,
    softcap=None,
    temperature=1.0,
    ignore_index=-100,
):
    z = _Head.apply(x, weight, whole, some)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    z = (softcap * torch.tanh(z / softcap) if softcap else z) / temperature
    log_p = z.log_softmax(-1)
    kept = target != ignore_index
    logprob = log_p.gather(1, target.where(kept, 0)[:, None])[:, 0]
    return logprob.where(kept, 0.0), -(log_p.exp() * log_p).sum(-1).where(kept, 0.0)


# ---- experts: a group of them after another; what tokens get of each is summed


def _experts(*adapters):
    def cut(kwargs):
        up, down, index = kwargs["gate_up_proj"], kwargs["down_proj"], kwargs["expert_index"]
        if not isinstance(up, torch.Tensor) or kwargs.get("noise") is not None:
            return None
        E, each = up.shape[0], up[0].numel() + down[0].numel()
        rows = index.numel() * up.shape[1]
        if not rows or E * each + rows <= KEPT // 2:
            return None
        T, H = kwargs["x"].shape
        tokens = max(1, WORK // (2 * index.shape[1] * max(H, up.shape[1])))
        names = [
            n
            for n in ("gate_up_proj", "down_proj", *adapters)
            if kwargs.get(n) is not None and kwargs[n].shape[0] == E
        ]
        parts = []
        for g, b in itertools.product(_blocks(E, max(1, WORK // (4 * each))), _blocks(T, tokens)):
            mine = (index[b] >= g.start) & (index[b] < g.stop)
            here = (index[b] - g.start).where(mine, g.stop - g.start)
            parts.append(
                Piece(
                    {"x": (b,), "expert_weight": (b,), **dict.fromkeys(names, (g,))},
                    {0: (b,)},
                    other={"expert_index": here},
                )
            )
        own = T * H + sum(kwargs[n].numel() for n in names if kwargs[n].requires_grad)
        return Pieces(
            {0: kwargs["x"].shape},
            parts,
            "blocks of tokens and groups of experts",
            _sample(parts, own),
        )

    return cut


def _grouped_gemm(kwargs):
    x, weight, ends = kwargs["x"], kwargs["weight"], kwargs["offsets"].tolist()
    E, N, K = weight.shape
    if weight.numel() + x.shape[0] * (N + K) <= KEPT:
        return None
    parts, most = [], max(1, WORK // (2 * (N + K)))
    for e, (a, b) in enumerate(itertools.pairwise([0, *ends])):
        for rows in _blocks(max(1, b - a), most):
            mine = (slice(a + rows.start, a + min(rows.stop, b - a)),)
            count = torch.full(
                (1,), mine[0].stop - mine[0].start, dtype=torch.int32, device=x.device
            )
            parts.append(
                Piece(
                    {"x": mine, "weight": (slice(e, e + 1),)}, {0: mine}, other={"offsets": count}
                )
            )
    if ends[-1] < x.shape[0]:  # rows without an expert, which are 0
        tail = (slice(ends[-1], x.shape[0]),)
        parts.append(
            Piece(
                {"x": tail, "weight": (slice(E - 1, E),)},
                {0: tail},
                other={"offsets": torch.zeros(1, dtype=torch.int32, device=x.device)},
            )
        )
    own = x.shape[0] * (N + K) + weight.numel()
    return Pieces(
        {0: torch.Size((x.shape[0], N))}, parts, "blocks of rows of experts", _sample(parts, own)
    )


TABLE: dict[str, Callable[[dict[str, Any]], Pieces | None]] = {
    "rmsnorm": _along(0, "x", outputs=("x",)),
    "add_rmsnorm": _along(0, "x", "residual", outputs=("x", "residual")),
    "silu_mul": _along(0, "gate", "up", outputs=("gate",)),
    "gelu_mul": _along(0, "gate", "up", outputs=("gate",)),
    "silu_mul_quantize": _along(0, "gate", "up", outputs=("gate", "gate")),
    "hadamard": _along(0, "x", outputs=("x",), placed=False),  # signs are of columns
    "rope": _rope,
    "attention": _attention,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear(_linear_cross_entropy),
    "linear_logprob": _linear(_logprob),
    "permute": _columns("x"),
    "unpermute": _columns("rows"),
    "grouped_gemm": _grouped_gemm,
    "moe_mlp": _experts("gate_up_bias", "down_bias"),
    "moe_lora": _experts("gate_A", "gate_B", "up_A", "up_B", "down_A", "down_B"),
}
