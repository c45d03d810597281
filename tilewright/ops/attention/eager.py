"""The definition of attention, of a part of the keys, and of the part's gradients."""

from __future__ import annotations

import itertools

import torch

from tilewright.core import checks
from tilewright.ops.quant import quantize

# In the counter's last word: apart from the streams of dropout_add (2^30), of aqn_noise (2^31) and
# of stochastic rounding and random signs (0), which may have the same seed.
STREAM = 2**29


def _logits(q, k, cu_seqlens, variant, offset):
    """[B, Hq, S, Sk], -inf where a query does not see a key.   together: cu_seqlens of documents
    that are masked in whole rows; None: one document.
    """
    causal, window, softcap, scale, _ = variant
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
    mask = row >= column if causal else torch.ones(S, Sk, dtype=torch.bool, device=q.device)
    if window:
        mask = mask & (row - column < window)
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens.to(torch.int64), column[0], right=True)
        mask = mask & (document[:, None] == document[None, :])
    return s.masked_fill(~mask, float("-inf"))


def host_seqlens(cu_seqlens, tokens):
    """cu_seqlens on the host; checked on CUDA too, since the copy synchronizes anyway."""
    return (
        checks.cu_seqlens(cu_seqlens, tokens, wait=True) if cu_seqlens.is_cuda else cu_seqlens
    ).tolist()


def by_document(fn, tensors, cu_seqlens):
    """fn's results [B, H, S, ...], computed separately per document. Values of one document are
    never multiplied with another's, not even by 0, which would turn infinities into NaN.
    """
    if cu_seqlens is None:
        return fn(*tensors)
    results = [
        fn(*(t[:, :, a:b] for t in tensors))
        for a, b in itertools.pairwise(host_seqlens(cu_seqlens, tensors[0].shape[2]))
        if a < b
    ]
    if not results:
        return fn(*tensors)  # differentiable without tokens too
    return tuple(torch.cat(parts, 2) for parts in zip(*results, strict=True))


def _per_document(fn, tensors, cu_seqlens):
    """`by_document` of fn(*tensors, None); in compiled code fn(*tensors, cu_seqlens), which masks:
    a graph cannot loop over values that the host would have to read.
    """
    if torch.compiler.is_compiling():
        return fn(*tensors, cu_seqlens)
    return by_document(lambda *document: fn(*document, None), tensors, cu_seqlens)


def _kept(p, rows, cu_seqlens, dropout):
    """Which of the probabilities [B, Hq, S, Sk] dropout keeps.

    rows: the positions of the queries in the sequence, [S].
    cu_seqlens: as for `_logits`.
    """
    B, H, _, Sk = p.shape
    column = torch.arange(Sk, device=p.device)
    if cu_seqlens is not None:  # within its document
        begins = cu_seqlens.to(torch.int64)
        column = column - begins[torch.searchsorted(begins, column, right=True) - 1]
    head = dropout.first_head + torch.arange(B * H, device=p.device).view(B, H, 1, 1)
    stream = torch.full_like(head, STREAM | dropout.draw)
    words = quantize.philox_words(dropout.seed, (column // 4, rows[:, None], head, stream))
    return sum(w * (column % 4 == i) for i, w in enumerate(words)) >= dropout.threshold


def attention_eager(q, k, v, cu_seqlens, variant, sinks, max_seqlen):
    dropout, rows = variant.dropout, torch.arange(q.shape[2], device=q.device)[None, None]

    def of_document(q, k, v, rows, together):
        Sk = k.shape[2]
        s = _logits(q, k, together, variant, Sk - q.shape[2])
        if sinks is not None:
            s = torch.cat((s, sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)), -1)
        p = s.softmax(-1)[..., :Sk]
        if dropout.threshold:
            p = torch.where(_kept(p, rows[0, 0], together, dropout), p * dropout.inverse, 0.0)
        return ((p @ v.repeat_interleave(q.shape[1] // k.shape[1], 1).to(p.dtype)).to(q.dtype),)

    return _per_document(of_document, (q, k, v, rows), cu_seqlens)[0]


def _eager_prefixed(q, k, v, cu_seqlens, variant, sinks, max_seqlen, prefixes):
    out = attention_eager(q, k, v, cu_seqlens, variant, sinks, max_seqlen)
    for a, b, c, d in prefixes:
        keys, values = (torch.cat((t[:, :, c:d], t[:, :, a:b]), 2) for t in (k, v))
        rows = attention_eager(q[:, :, a:b], keys, values, None, variant, sinks, None)
        out = torch.cat((out[:, :, :a], rows, out[:, :, b:]), 2)
    return out


def _eager_part(q, k, v, cu_seqlens, variant, offset):
    return _per_document(
        lambda *d: _part_of_document(*d, variant=variant, offset=offset),
        (q, k, v),
        cu_seqlens,
    )


def _part_of_document(q, k, v, together, variant, offset):
    s = _logits(q, k, together, variant, offset)
    lse = s.logsumexp(-1) if k.shape[2] else s.new_full(s.shape[:3], float("-inf"))
    p = _probabilities(s, lse)
    return (p @ v.repeat_interleave(q.shape[1] // k.shape[1], 1).to(p.dtype)).to(q.dtype), lse


def _probabilities(s, lse):
    return torch.exp(s - lse.masked_fill(lse == float("-inf"), 0.0)[..., None].to(s.dtype))


def _eager_part_backward(dout, q, k, v, out, lse, cu_seqlens, variant, offset):
    return _per_document(
        lambda *d: _gradients_of_document(*d, variant=variant, offset=offset),
        (dout, q, k, v, out, lse),
        cu_seqlens,
    )


def _gradients_of_document(dout, q, k, v, out, lse, together, variant, offset):
    s = _logits(q, k, together, variant, offset)
    groups = q.shape[1] // k.shape[1]
    p = _probabilities(s, lse)
    dout, out, wide = (t.to(p.dtype) for t in (dout, out, q))
    dp = dout @ v.repeat_interleave(groups, 1).to(p.dtype).transpose(-1, -2)
    ds = p * (dp - (dout * out).sum(-1, keepdim=True)) * variant.scale
    if variant.softcap:
        ds = ds * (1 - (s.masked_fill(s == float("-inf"), 0.0) / variant.softcap).square())
    dq = ds @ k.repeat_interleave(groups, 1).to(p.dtype)
    dk, dv = (
        t.unflatten(1, (k.shape[1], groups)).sum(2)
        for t in (ds.transpose(-1, -2) @ wide, p.transpose(-1, -2) @ dout)
    )
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


attention_eager.part, attention_eager.part_backward = _eager_part, _eager_part_backward
attention_eager.prefixed = _eager_prefixed
