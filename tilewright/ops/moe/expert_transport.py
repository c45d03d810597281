"""How `ep_moe_mlp` moves rows between ranks: PyTorch's all-to-all, or DeepEP's kernels.

A transport sends rows to the ranks of their experts and returns a route, which results, and the
gradients of both, follow. Letters are those of expert_parallel.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tilewright.core import platform
from tilewright.core.library import once_across
from tilewright.core.registry import short
from tilewright.ops.moe.permute import UNPERMUTE, sort_slots

once = once_across("ep_moe_mlp")


@dataclass(frozen=True)
class DeepEP:
    """DeepEP options. buffer_size_gb: its NVLink buffer on each GPU, in 10^9 bytes; num_sms: the
    SMs that its kernels use, an even number.
    """

    buffer_size_gb: float = 2.0
    num_sms: int = 20


def no_deepep(device_type: str) -> str | None:
    """None if DeepEP supports such tensors here, else the reason."""
    if reason := platform.no_module("deep_ep"):
        return reason
    if device_type != "cuda":
        return f"DeepEP takes CUDA tensors, not {device_type}"
    return platform.no_cuda(90)


def sum_rows(rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The sum of rows at each line of positions, skipping -1. There may be fewer rows than
    positions.
    """
    if rows.shape[0] == 0 or position.shape[0] == 0:
        return rows.new_zeros((position.shape[0], rows.shape[1]))
    # The C++ kernel needs as many rows as positions.
    fewer = rows.shape[0] < position.numel() and not rows.is_cuda
    name = "eager" if fewer else UNPERMUTE.unpinned(rows)
    return UNPERMUTE.pick(name, rows)(rows, None, position)


def values_at(values: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """values[row], 0 where row is -1."""
    if values.shape[0] == 0:
        return values.new_zeros(row.shape)
    return torch.where(row < 0, 0, values[row.clamp_min(0).long()])


def transport_of(name: str, group: dist.ProcessGroup, deepep: DeepEP | None):
    """The transport of a `dispatch` that communicates."""
    return AllToAll(group) if name == "alltoall" else DeepEPTransport(group, deepep or DeepEP())


_BALANCED: ContextVar[bool] = ContextVar("balanced_routing", default=False)


@contextlib.contextmanager
def balanced_routing() -> Iterator[None]:
    """A context within which `ep_moe_mlp` reads no sizes and assumes that tokens are routed to all
    experts alike. For tensors without values.
    """
    token = _BALANCED.set(True)
    try:
        yield
    finally:
        _BALANCED.reset(token)


def _expected(T: int, K: int, E: int, n: int) -> tuple[int, int]:
    """The expected numbers of rows and pairs from one rank to another."""
    missed = math.comb(E - E // n, K) / math.comb(E, K)
    return math.ceil(T * (1 - missed)), math.ceil(T * K / n)


class AllToAll:
    """`torch.distributed.all_to_all_single` with uneven splits.

    A route of S rows: token [S], the rows' tokens, sorted by destination; position [T, K] int32,
    the row that a slot added, -1 if a slot before it had added it; row [T, K], the row that serves
    a slot, -1 for none; sent and received, the numbers of rows to and from each rank.
    """

    def __init__(self, group):
        self.group, self.size = group, dist.get_world_size(group)

    def send(self, x, index, weight, E, saved_plan):
        route, local_index, pairs = saved_plan[0] if saved_plan else self.plan(index, E)
        if saved_plan is not None and not saved_plan:
            saved_plan.append((route, local_index, pairs))
        return *Send.apply(x, weight, local_index, route), pairs, route

    def plan(self, index, E):
        """The route, the indices [S, K] that are sent with rows, and the number of (row, expert)
        pairs that arrive here.
        """
        index = index.long()
        K, n, L = index.shape[1], self.size, E // self.size
        outside = (index < 0) | (index >= E)
        rank = torch.where(outside, n, index // L)
        # A slot adds a row if no slot before it has the same rank. argmax returns the first.
        first = (rank[:, :, None] == rank[:, None, :]).to(torch.uint8).argmax(-1)
        adds = first == torch.arange(K, device=index.device)
        ends, slots, position = sort_slots(torch.where(adds, rank, n), n)
        out = torch.zeros(2, n + 1, dtype=torch.int64, device=index.device)
        out[0, :n] = ends.diff(prepend=ends.new_zeros(1))
        out[1].scatter_add_(0, rank.flatten(), torch.ones_like(rank).flatten())
        out = out[:, :n].t().contiguous()  # rows and pairs for each rank
        into = torch.empty_like(out)
        dist.all_to_all_single(into, out, group=self.group)
        if _BALANCED.get():
            sizes = [_expected(index.shape[0], K, E, n)] * (2 * n)
        else:
            sizes = torch.cat((out, into)).tolist()  # the only synchronization with the host
        rows_out, rows_in = ([row for row, _ in part] for part in (sizes[:n], sizes[n:]))
        sent = slots[: sum(rows_out)].long()
        token, to = sent // K, rank.flatten()[sent]
        local_index = torch.where(rank[token] == to[:, None], index[token] % L, L).int()
        return (
            _Route(self, token, position, position.gather(1, first), rows_out, rows_in),
            local_index,
            sum(pair for _, pair in sizes[n:]),
        )


class _Route(NamedTuple):
    transport: AllToAll
    token: torch.Tensor
    position: torch.Tensor
    row: torch.Tensor
    sent: list[int]
    received: list[int]

    def send_to_experts(self, rows):
        """Sends rows to the ranks of their experts."""
        into = rows.new_empty((sum(self.received), *rows.shape[1:]))
        dist.all_to_all_single(
            into, rows.contiguous(), self.received, self.sent, group=self.transport.group
        )
        return into

    def back(self, rows):
        into = rows.new_empty((sum(self.sent), *rows.shape[1:]))
        dist.all_to_all_single(
            into, rows.contiguous(), self.sent, self.received, group=self.transport.group
        )
        return into

    def forward(self, x, weight, local_index):
        rows = self.send_to_experts(x.index_select(0, self.token))
        # Indices and weights in one message of 32-bit words.
        words = weight.index_select(0, self.token).view(torch.int32)
        words = self.send_to_experts(torch.cat((local_index, words), 1))
        K = local_index.shape[1]
        return rows, words[:, :K].contiguous(), words[:, K:].contiguous().view(weight.dtype)

    def forward_backward(self, drows, dweight, needs):
        """Gradients of x and weight, each None if not needed."""
        dx = sum_rows(self.back(drows), self.position) if needs[0] else None
        if not needs[1]:
            return dx, None
        dweight = self.back(dweight)
        slot = torch.arange(dweight.shape[1], device=dweight.device)
        flat = torch.where(self.row < 0, -1, self.row * dweight.shape[1] + slot)
        return dx, values_at(dweight.flatten(), flat)

    def result(self, rows):
        return sum_rows(self.back(rows), self.position)

    def result_backward(self, dy):
        return self.send_to_experts(dy.index_select(0, self.token))


class Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, local_index, route):
        ctx.route = route
        rows, local_index, weight = route.forward(x, weight, local_index)
        ctx.mark_non_differentiable(local_index)
        return rows, local_index, weight

    @staticmethod
    @once
    def backward(ctx, drows, _, dweight):
        return (*ctx.route.forward_backward(drows, dweight, ctx.needs_input_grad[:2]), None, None)


class Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, route):
        ctx.route = route
        return route.result(rows)

    @staticmethod
    @once
    def backward(ctx, dy):
        return ctx.route.result_backward(dy), None


_buffers: dict[tuple, Any] = {}


class DeepEPTransport:
    """DeepEP's normal kernels (github.com/deepseek-ai/DeepEP, `Buffer`), written from its published
    interface.

    This has never run on the GPUs that it requires: the tests run a stand-in for the package.
    """

    def __init__(self, group, options):
        self.group, self.size, self.options = group, dist.get_world_size(group), options

    def buffer(self, x):
        """One per group and set of options; it lives as long as the process."""
        from deep_ep import Buffer

        key = (self.group, self.options)
        if key not in _buffers:
            row = x.shape[1] * max(2, x.element_size())
            configs = (Buffer.get_dispatch_config(self.size), Buffer.get_combine_config(self.size))
            least = max(c.get_nvl_buffer_size_hint(row, self.size) for c in configs)
            # DeepEP requires whole blocks of 128 bytes.
            size = int(self.options.buffer_size_gb * 1e9) // 128 * 128
            if size < least:
                raise ValueError(
                    f"deepep.buffer_size_gb must be at least {least / 1e9:.3g} for {self.size} "
                    f"ranks and "
                    f"rows of {x.shape[1]}, got {self.options.buffer_size_gb}"
                )
            between_nodes = max(c.get_rdma_buffer_size_hint(row, self.size) for c in configs)
            Buffer.set_num_sms(self.options.num_sms)
            _buffers[key] = Buffer(self.group, size, between_nodes)
        return _buffers[key]

    def send(self, x, index, weight, E, saved_plan):
        if x.dtype != torch.bfloat16:
            raise TypeError(f"x must be bfloat16 for DeepEP, got {short(x.dtype)}")
        index = torch.where((index < 0) | (index >= E), -1, index.long())  # -1: no expert
        route = _DeepEPRoute(self.buffer(x), E)
        rows, local_index, weight = Send.apply(x.contiguous(), weight, index, route)
        local_index = torch.where(local_index < 0, E // self.size, local_index).int()
        return rows, local_index, weight, route.pairs, route


class _DeepEPRoute:
    def __init__(self, buffer, E):
        self.buffer, self.E, self.handle, self.pairs = buffer, E, None, 0

    def forward(self, x, weight, index):
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(index, self.E)
        rows, local_index, weight, counts, self.handle, _ = self.buffer.dispatch(
            x,
            topk_idx=index,
            topk_weights=weight,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        self.pairs = sum(counts)  # on the host: DeepEP itself waits for them
        return rows, local_index, weight

    def forward_backward(self, drows, dweight, needs):
        # One kernel moves both; if only weights are needed the rows are sent all the same.
        dweight = dweight.contiguous() if needs[1] else None
        dx, dweight, _ = self.buffer.combine(drows.contiguous(), self.handle, topk_weights=dweight)
        return dx if needs[0] else None, dweight

    def result(self, rows):
        return self.buffer.combine(rows, self.handle)[0]

    def result_backward(self, dy):
        return self.buffer.dispatch(dy.contiguous(), handle=self.handle)[0]
