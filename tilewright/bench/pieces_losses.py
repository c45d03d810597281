"""Pieces of losses: blocks of rows; means are over the rows of all blocks."""

from __future__ import annotations

import torch

from tilewright.bench import piece
from tilewright.bench.piece import Piece, Pieces, blocks, sample_of


def _counted(kwargs, target):
    """num_tokens of the whole call, which a piece alone cannot count."""
    if kwargs.get("reduction", "mean") != "mean" or kwargs.get("num_tokens") is not None:
        return {}
    return {"num_tokens": max(1, int((target != kwargs.get("ignore_index", -100)).sum()))}


def _per_row(kwargs):
    return [n for n in ("token_weight",) if kwargs.get(n) is not None]


def _loss_rows(kwargs, argument, V, eager=None, outputs=1):
    """Blocks of rows of logits; the loss is summed over blocks unless it is not reduced."""
    target: torch.Tensor = kwargs["target"]
    if (
        kwargs.get("class_weight") is not None
        or target.dim() != 1
        or (
            outputs == 1
            and any(kwargs.get(n) for n in ("return_lse", "return_entropy", "return_argmax"))
        )
    ):
        return None
    rows = target.shape[0]
    if rows * V <= piece.KEPT // 2:
        return None
    whole = outputs > 1 or kwargs.get("reduction", "mean") == "none"
    other = {} if outputs > 1 else _counted(kwargs, target)
    if kwargs.get("inplace"):
        other = {**other, "inplace": False}
    parts = [
        Piece(
            dict.fromkeys((argument, "target", *_per_row(kwargs)), (b,)),
            dict.fromkeys(range(outputs), (b,)) if whole else {},
            other=other,
        )
        for b in blocks(rows, max(1, piece.WORK // (2 * V)))
    ]
    shapes = dict.fromkeys(range(outputs), target.shape) if whole else {}
    return Pieces(
        shapes, parts, "blocks of rows", sample_of(parts, kwargs[argument].numel()), eager
    )


def cross_entropy(kwargs):
    return _loss_rows(kwargs, "logits", kwargs["logits"].shape[-1])


def logprob_entropy(kwargs):
    outputs = 3 if kwargs.get("return_argmax") else 2
    return _loss_rows(kwargs, "logits", kwargs["logits"].shape[-1], outputs=outputs)


class _Head(torch.autograd.Function):
    """x @ weight.t() in x's dtype, by blocks of the vocabulary, with the weight stored in its own
    dtype; the weight's gradient in x's dtype, for some of its rows.
    """

    @staticmethod
    def forward(ctx, x, weight_part, weight, rows):
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        if weight.dtype == x.dtype:
            return x @ weight.t()
        out = x.new_empty(x.shape[0], weight.shape[0])
        for b in blocks(weight.shape[0], HEAD):
            torch.mm(x, weight[b].to(x.dtype).t(), out=out[:, b])
        return out

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        if weight.dtype == x.dtype:
            dx = g @ weight
        else:
            dx = torch.zeros_like(x)
            for b in blocks(weight.shape[0], HEAD):
                dx.addmm_(g[:, b], weight[b].to(x.dtype))
        return dx, g[:, ctx.rows].t() @ x, None, None


HEAD = 2**14  # rows of the weight that are cast at a time


def _of_rows(V):
    """The rows of a head's weight whose gradient is compared: the last, which include a tail."""
    return slice(max(0, V - HEAD // 4), V)


def linear(loss):
    """The loss by blocks of rows, with the weight's gradient compared on a sample of its rows."""

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
        row_pieces = _loss_rows(kwargs, "x", V, loss, 2 if loss is logprob else 1)
        if row_pieces is None:
            return None
        weight_rows = _of_rows(V)
        parts = [
            Piece(
                {**p.inputs, "weight": (weight_rows,)},
                p.outputs,
                other={**p.other, "full_weight": weight.detach(), "weight_rows": weight_rows},
            )
            for p in row_pieces.parts
        ]
        description = (
            f"blocks of rows, and the weight's gradient for its rows from {weight_rows.start} on"
        )
        return Pieces(
            row_pieces.shapes,
            parts,
            description,
            row_pieces.sample or frozenset(range(len(parts))),
            loss,
        )

    return cut


def linear_cross_entropy(
    x, weight, target, *, full_weight, weight_rows, chunk_size=None, **options
):
    from tilewright.ops.loss.cross_entropy import cross_entropy

    return cross_entropy(
        _Head.apply(x, weight, full_weight, weight_rows), target, **options, implementation="eager"
    )


def logprob(
    x,
    weight,
    target,
    *,
    full_weight,
    weight_rows,
    chunk_size=None,
    softcap=None,
    temperature=1.0,
    ignore_index=-100,
):
    z = _Head.apply(x, weight, full_weight, weight_rows)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    z = (softcap * torch.tanh(z / softcap) if softcap else z) / temperature
    log_p = z.log_softmax(-1)
    valid = target != ignore_index
    logprob = log_p.gather(1, target.where(valid, 0)[:, None])[:, 0]
    return logprob.where(valid, 0.0), -(log_p.exp() * log_p).sum(-1).where(valid, 0.0)
