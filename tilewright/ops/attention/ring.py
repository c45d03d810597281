"""The ring: keys and values are transferred while the previous step's blocks are computed."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from tilewright.core import checks
from tilewright.core.library import once_across
from tilewright.ops.attention.attention import attention_part, attention_part_backward

_once = once_across("context_parallel_attention")

_met: set[dist.ProcessGroup] = set()


class _Transfer:
    """A message to a ring rank and one from another, in flight; either may be None."""

    def __init__(self, cp, message, to, received, source, tag):
        self.received = received
        ops = [
            dist.P2POp(op, t, group=cp.ring, group_peer=peer % cp.ring_size, tag=tag)
            for op, t, peer in ((dist.isend, message, to), (dist.irecv, received, source))
            if t is not None
        ]
        self.works = dist.batch_isend_irecv(ops) if ops else []
        self.message = message  # keeps its memory alive until it is sent

    def wait(self):
        """The received tensor, or None. On CUDA the stream waits, the host does not."""
        for work in self.works:
            work.wait()
        return self.received


def _meet(cp, device):
    """NCCL requires all ranks of a group in its first call, and the first message may be between
    two of them.
    """
    if device.type == "cuda" and cp.ring not in _met:
        dist.all_reduce(torch.zeros(1, device=device), group=cp.ring)
        _met.add(cp.ring)


def _room(intervals, k, v):
    """An uninitialized message of keys and values of those rows, in k's dtype; None for none."""
    B, heads, _, D = k.shape
    return k.new_empty(_rows_in(intervals) * B * heads * (D + v.shape[3])) if intervals else None


def _halves(message, intervals, k, v):
    """The keys and the values of a message, [B, Hk, rows, D] and [B, Hk, rows, Dv]: views of two
    contiguous parts, in memory [rows, B, Hk, ...].
    """
    rows = _rows_in(intervals)
    shapes = [(rows, *t.shape[:2], t.shape[3]) for t in (k, v)]
    parts = message.split([math.prod(shape) for shape in shapes])
    return [p.view(shape).permute(1, 2, 0, 3) for p, shape in zip(parts, shapes, strict=True)]


def _rows_in(intervals):
    return sum(b - a for a, b in intervals)


def _post(step, t, k, v, cp):
    """Starts the transfer of the keys and values of step t."""
    message = _room(step.send, k, v)
    if message is not None:
        for half, x in zip(_halves(message, step.send, k, v), (k, v), strict=True):
            rows = [x[:, :, a:b].permute(2, 0, 1, 3) for a, b in step.send]
            torch.cat(rows, out=half.permute(2, 0, 1, 3))
    return _Transfer(
        cp, message, cp.ring_rank + t, _room(step.receive, k, v), cp.ring_rank - t, 2 * t
    )


def _post_back(step, t, gradients, dk, dv, cp):
    """Starts the transfer of the gradients of step t's keys and values, to their owner."""
    return _Transfer(
        cp, gradients, cp.ring_rank - t, _room(step.send, dk, dv), cp.ring_rank + t, 2 * t + 1
    )


def _rows(t, rows):
    return t[:, :, rows[0] : rows[1]]


def _own_documents(cu_seqlens, begin, packed, rows):
    """cu_seqlens of a chunk, computed on the device without synchronizing."""
    return cu_seqlens.clamp(begin, begin + rows) - begin if packed else None


def _block_options(block, options):
    """Options of attention for a block. One without a mask is not causal."""
    if block.offset is None:
        return {**options, "causal": False, "window": None}
    return {**options, "offset": block.offset}


class Ring(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks, by a plan (`ring_plan.plan`)."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, cu_seqlens, cp, plan, options):
        B, H, n, _ = q.shape
        acc = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty(B, n, H, v.shape[3], dtype=acc, device=q.device).transpose(1, 2)
        lse = torch.empty(B, H, n, dtype=acc, device=q.device)
        _meet(cp, q.device)
        incoming = _post(plan.steps[1], 1, k, v, cp)
        for i, (begin, packed) in enumerate(plan.chunks):
            rows = (i * plan.rows, (i + 1) * plan.rows)
            part, part_lse = attention_part(
                *(_rows(t, rows) for t in (q, k, v)),
                **options,
                cu_seqlens=_own_documents(cu_seqlens, begin, packed, plan.rows),
            )
            _rows(out, rows).copy_(part)
            _rows(lse, rows).copy_(part_lse)
        keys, values = k, v
        for t, step in enumerate(plan.steps):
            if t:
                received = incoming.wait()
                keys, values = (
                    (None, None) if received is None else _halves(received, step.receive, k, v)
                )
                if t + 1 < len(plan.steps):
                    incoming = _post(plan.steps[t + 1], t + 1, k, v, cp)
            for block in step.blocks:
                part, part_lse = attention_part(
                    _rows(q, block.queries),
                    _rows(keys, block.keys),
                    _rows(values, block.keys),
                    **_block_options(block, options),
                )
                _merge(_rows(out, block.queries), _rows(lse, block.queries), part, part_lse)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(acc)[:, None])
            out *= torch.exp(lse - total)[..., None]
            lse = total
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks, cu_seqlens)
        ctx.cp, ctx.plan, ctx.options = cp, plan, options
        return out

    @staticmethod
    @_once
    def backward(ctx, dout):
        q, k, v, out, lse, sinks, cu_seqlens = ctx.saved_tensors
        cp, plan = ctx.cp, ctx.plan
        with checks.no_autocast(q):
            dq, dk, dv = _ring_backward(dout, q, k, v, out, lse, cu_seqlens, cp, plan, ctx.options)
        dsinks = None
        if sinks is not None:  # a sink has a share of the softmax but no value
            delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            dsinks = (
                -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
            )
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None, None


def _merge(out, lse, part, part_lse):
    """Merges a part of the softmax into `out` and `lse`. Each row has seen its own key before."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_(torch.exp(lse - total)[..., None]).add_(part * torch.exp(part_lse - total)[..., None])
    lse.copy_(total)


# Long: one schedule, in which sending, computing and receiving overlap.
def _ring_backward(dout, q, k, v, out, lse, cu_seqlens, cp, plan, options):
    acc = lse.dtype

    def gradients(queries, keys, values, more):
        return attention_part_backward(
            _rows(dout, queries),
            _rows(q, queries),
            keys,
            values,
            _rows(out, queries),
            _rows(lse, queries).contiguous(),
            **more,
        )

    def zeros(t):
        B, heads, n, D = t.shape
        return torch.zeros(B, n, heads, D, dtype=acc, device=t.device).transpose(1, 2)

    incoming, returning = _post(plan.steps[1], 1, k, v, cp), None
    dq, dk, dv = map(zeros, (q, k, v))

    def take(returned, step):
        """Adds the gradients of keys and values that another rank has computed."""
        received = returned.wait()
        if received is not None:
            at = 0
            for a, b in step.send:
                for total, part in zip((dk, dv), _halves(received, step.send, k, v), strict=True):
                    total[:, :, a:b] += part[:, :, at : at + b - a]
                at += b - a

    for i, (begin, packed) in enumerate(plan.chunks):
        rows = (i * plan.rows, (i + 1) * plan.rows)
        documents = _own_documents(cu_seqlens, begin, packed, plan.rows)
        parts = gradients(
            rows, _rows(k, rows), _rows(v, rows), {**options, "cu_seqlens": documents}
        )
        for total, part in zip((dq, dk, dv), parts, strict=True):
            _rows(total, rows).add_(part)
    keys, values, totals = k, v, (dk, dv)
    for t, step in enumerate(plan.steps):
        message = None
        if t:
            received = incoming.wait()
            if received is not None:
                keys, values = _halves(received, step.receive, k, v)
                message = torch.zeros_like(received, dtype=acc)
                totals = _halves(message, step.receive, k, v)
            if t + 1 < len(plan.steps):
                incoming = _post(plan.steps[t + 1], t + 1, k, v, cp)
        for block in step.blocks:
            part_q, *parts = gradients(
                block.queries,
                _rows(keys, block.keys),
                _rows(values, block.keys),
                _block_options(block, options),
            )
            _rows(dq, block.queries).add_(part_q)
            for total, part in zip(totals, parts, strict=True):
                _rows(total, block.keys).add_(part)
        if t:
            if returning is not None:
                take(*returning)
            returning = _post_back(step, t, message, dk, dv, cp), step
    assert returning is not None  # a ring has at least two steps
    take(*returning)
    return dq, dk, dv
