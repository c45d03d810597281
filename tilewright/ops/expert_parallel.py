"""The experts of a mixture-of-experts layer spread over a process group: tokens travel to their
experts and back.

n ranks, E experts, and L = E / n of them on each: rank r holds the experts r L to (r + 1) L - 1. T
tokens on this rank (any number, also another one on each rank), K experts a token, H columns.

A token's row travels once to each rank that has experts for it, with its K indices and weights; the
result comes back as one row from each, already the weighted sum over that rank's experts. Between
the two a rank works on one row for each pair of a token and one of its experts, in the order of its
experts, so that nothing is padded. The number of rows is what the host has to know, and the only
thing:

                          all-to-alls                                  the host waits
    forward     4: sizes, rows, indices with weights, results          once, for the sizes
    backward    3: gradients of results, of rows, of weights           never
    repeated    2: rows, indices with weights (and, reentrant, results)  never, where `kept` is
    given

The gradient of x or of the weights is not sent where nothing asks for it. All is deterministic:
sums are in a fixed
order, in float32. (With DeepEP: its own kernels, two calls forward and two backward, and its own
wait for sizes.)
Not in the table of ops: the implementations of what is computed are `moe_mlp`'s, and a test needs
several processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tilewright import platform
from tilewright.ops import _checks
from tilewright.ops._library import once_across
from tilewright.ops.moe import checked_routing, moe_mlp, moe_mlp_eager
from tilewright.ops.permute import UNPERMUTE, sort_by_expert
from tilewright.ops.quantize import Quantized
from tilewright.registry import ImplementationUnavailable, short

DISPATCHES = ("alltoall", "deepep", "eager")


@dataclass(frozen=True)
class DeepEP:
    """How DeepEP communicates. buffer_size_gb: its buffer for NVLink on each GPU, in 10^9 bytes;
    num_sms: the multiprocessors that its kernels take, an even number.
    """

    buffer_size_gb: float = 2.0
    num_sms: int = 20


def no_deepep(device_type: str) -> str | None:
    """None if DeepEP can carry such tensors here, else the reason."""
    if reason := platform.no_module("deep_ep"):
        return reason
    if device_type != "cuda":
        return f"DeepEP takes CUDA tensors, not {device_type}"
    return platform.no_cuda(90)


class Plan(NamedTuple):
    """Where the rows of one call travel; made by `dispatch`, read by `combine`, and by the backward
    of both.

    route: what the transport keeps.   slots [P]: of each pair's row, the slot (received row * K +
    k) that it is.
    position [M, K] int32: of each slot of the M received rows its pair's row, or -1.   group: the
    process group.
    """

    route: Any
    slots: torch.Tensor
    position: torch.Tensor


class Dispatched(NamedTuple):
    """What a rank's experts work on, P pairs of a token and an expert, sorted by expert: rows [P,
    H], their experts [P, 1] int32 from 0 to L - 1, their weights [P, 1], and the plan for
    `combine`.
    """

    rows: torch.Tensor
    expert_index: torch.Tensor
    expert_weight: torch.Tensor
    plan: Plan


@torch.compiler.disable  # sizes are known at run time only
@_checks.autocast("products", "x", "gate_up_proj", "down_proj")
def ep_moe_mlp(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor | Quantized,
    down_proj: torch.Tensor | Quantized,
    expert_index: torch.Tensor,
    expert_weight: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    dispatch: str = "alltoall",
    implementation: str = "auto",
    recompute: bool = False,
    kept: list | None = None,
    deepep: DeepEP | None = None,
) -> torch.Tensor:
    """`moe_mlp` with the experts spread over a process group. Every rank of it must call this, with
    its own tokens.

    x: [T, H] fp32 | bf16 | fp16 (fp64 with eager); T may differ between ranks, and be 0.
    gate_up_proj: [L, 2 I, H] and down_proj: [L, H, I], this rank's experts, in x's dtype, or both
        quantised, as moe_mlp takes them.
    expert_index: [T, K] int32 or int64, of all E = n L experts; E for a slot without an expert.
    expert_weight: [T, K], any floating dtype, used in float32.
    dispatch: "alltoall"; "deepep", DeepEP's kernels (set up by `deepep`), with x in bf16; "eager",
        the definition: every rank gathers all tokens, computes its experts for all, and the results
        are summed.
    implementation: of moe_mlp.
    recompute: keep only the rows that were received, not what the experts computed of them, and
        compute that again in the backward. No row travels a second time.
    kept: for a call within `torch.utils.checkpoint`: a list that the first call fills and its
        repetition reads, so that rows go where they went, no sizes are exchanged again, and the
        host does not wait. (DeepEP does not read it.)
    Returns [T, H] in x's dtype. Rounding is moe_mlp's, and two more: each rank's sum over its
    experts of a token, and each of those experts' weighted result, are rounded to x's dtype. Sums
    over ranks are in float32. Differentiable in x, gate_up_proj, down_proj and expert_weight, once;
    a parameter's gradient is of all ranks' tokens, summed. Kept for the backward beside the plan: a
    row [H] for each pair of a token and an expert that came here, and what moe_mlp keeps of it;
    with `recompute` the received rows alone, one for each token that came. Raises TypeError or
    ValueError for arguments that do not fit, IndexError for an index outside (CPU only; on CUDA it
    counts as E), ImplementationUnavailable for an implementation, or DeepEP, that cannot run here.
    """
    _checks.choice("dispatch", dispatch, DISPATCHES)
    if dispatch == "deepep" and (reason := no_deepep(x.device.type)):
        raise ImplementationUnavailable(f"ep_moe_mlp[deepep]: {reason}")
    if len(gate_up_proj.shape) != 3:
        raise ValueError(
            f"gate_up_proj must have shape [L, 2 I, H], got {list(gate_up_proj.shape)}"
        )
    E = gate_up_proj.shape[0] * dist.get_world_size(group)
    index = _validate(x, expert_index, expert_weight, E)
    weight = expert_weight.to(torch.promote_types(x.dtype, torch.float32))
    if dispatch == "eager":
        return ep_moe_mlp_eager(x, gate_up_proj, down_proj, index, weight, group)

    received, own, own_weight, pairs, route = _transport(dispatch, group, deepep).send(
        x, index, weight, E, kept
    )
    own_expert, slots, position = _pairs(own, pairs, gate_up_proj.shape[0])

    def experts(received, own_weight):
        rows, of_pairs = _Spread.apply(received, own_weight, slots, position)
        rows = moe_mlp(
            rows, gate_up_proj, down_proj, own_expert, of_pairs, implementation=implementation
        )
        return _Collect.apply(rows, slots, position)

    if recompute and torch.is_grad_enabled():
        back = checkpoint(
            experts, received, own_weight, use_reentrant=False, preserve_rng_state=False
        )
    else:
        back = experts(received, own_weight)
    return _Return.apply(back, route)


def dispatch(
    x: torch.Tensor,
    expert_index: torch.Tensor,
    expert_weight: torch.Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
) -> Dispatched:
    """Sends tokens to their experts: the first half of `ep_moe_mlp`, whose arguments these are.

    num_experts: E, of all ranks; a multiple of the group's size. Differentiable in x (dx[t] is the
    sum of its rows' gradients, over the experts of a rank and then over ranks, both in float32,
    rounded after each) and in expert_weight.
    """
    index = _validate(x, expert_index, expert_weight, num_experts)
    if num_experts % dist.get_world_size(group):
        raise ValueError(
            f"num_experts must be a multiple of the group's {dist.get_world_size(group)} ranks, "
            f"got {num_experts}"
        )
    weight = expert_weight.to(torch.promote_types(x.dtype, torch.float32))
    return _dispatch(x, index, weight, num_experts, _AllToAll(group))


def combine(rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Sends the experts' results [P, H] back to where their tokens came from and sums them: [T, H].

    Weights have been applied already. Sums over the experts of a rank, then over ranks, both in
    float32, rounded after each. Differentiable in rows.
    """
    return _Return.apply(_Collect.apply(rows, plan.slots, plan.position), plan.route)


def _validate(x, expert_index, expert_weight, E):
    _checks.floating("x", x)
    _checks.floating("expert_weight", expert_weight)
    _checks.same_device(x=x, expert_index=expert_index, expert_weight=expert_weight)
    if x.dim() != 2:
        raise ValueError(f"x must have shape [T, H], got {list(x.shape)}")
    return checked_routing(x, expert_index, expert_weight, E)


_once = once_across("ep_moe_mlp")


# ---- the definition


class _Gather(torch.autograd.Function):
    """All ranks' rows, one rank after the other. Its gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, x, sizes, group):
        ctx.sizes, ctx.group = sizes, group
        return _gathered(x, sizes, group)

    @staticmethod
    @_once
    def backward(ctx, dy):
        return _own_sum(dy, ctx.sizes, ctx.group), None, None


class _Sum(torch.autograd.Function):
    """The sum over ranks, of which each takes its own rows."""

    @staticmethod
    def forward(ctx, x, sizes, group):
        ctx.sizes, ctx.group = sizes, group
        return _own_sum(x, sizes, group)

    @staticmethod
    @_once
    def backward(ctx, dy):
        return _gathered(dy, ctx.sizes, ctx.group), None, None


def _gathered(x, sizes, group):
    parts = [x.new_empty((max(sizes), *x.shape[1:])) for _ in sizes]
    padded = x.new_zeros((max(sizes), *x.shape[1:]))
    padded[: x.shape[0]] = x
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _own_sum(x, sizes, group):
    total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    dist.all_reduce(total, group=group)
    return total.to(x.dtype).split(sizes)[dist.get_rank(group)].contiguous()


def ep_moe_mlp_eager(x, gate_up_proj, down_proj, expert_index, expert_weight, group):
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=x.device)
    sizes[dist.get_rank(group)] = x.shape[0]
    dist.all_reduce(sizes, group=group)
    sizes = sizes.tolist()
    L = gate_up_proj.shape[0]
    own = _gathered(expert_index, sizes, group) - dist.get_rank(group) * L
    own = torch.where((own < 0) | (own > L), L, own)
    y = moe_mlp_eager(
        _Gather.apply(x, sizes, group),
        gate_up_proj,
        down_proj,
        own,
        _Gather.apply(expert_weight, sizes, group),
    )
    return _Sum.apply(y, sizes, group)


# ---- from rows, one for each token and rank, to pairs, one for each token and expert, and back


def _pairs(own, pairs, L):
    """Of received rows with the experts `own` [M, K]: the expert [P, 1] and the slot [P] of each
    pair, sorted by expert, and each slot's pair.
    """
    _, slots, position = sort_by_expert(own, L)
    slots = slots[:pairs]  # those that have an expert here come first
    return own.flatten()[slots][:, None], slots, position


def _dispatch(x, index, weight, E, transport):
    rows, own, own_weight, pairs, route = transport.send(x, index, weight, E, None)
    own_expert, slots, position = _pairs(own, pairs, E // transport.size)
    rows, own_weight = _Spread.apply(rows, own_weight, slots, position)
    return Dispatched(rows, own_expert, own_weight, Plan(route, slots, position))


def _sum_over(rows, position):
    """The sum of each line of positions, those of -1 left out. The rows may be fewer than the
    positions.
    """
    if rows.shape[0] == 0 or position.shape[0] == 0:
        return rows.new_zeros((position.shape[0], rows.shape[1]))
    # The C++ kernel wants as many rows as positions.
    fewer = rows.shape[0] < position.numel() and not rows.is_cuda
    return UNPERMUTE.pick("eager" if fewer else "auto", rows)(rows, None, position)


def _at(values, row):
    """values[row], 0 where row is -1."""
    if values.shape[0] == 0:
        return values.new_zeros(row.shape)
    return torch.where(row < 0, 0, values[row.clamp_min(0).long()])


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, slots, position):
        ctx.save_for_backward(position)
        return rows.index_select(0, slots // position.shape[1]), weight.flatten()[slots][:, None]

    @staticmethod
    @_once
    def backward(ctx, drows, dweight):
        [position] = ctx.saved_tensors
        return (
            _sum_over(drows.contiguous(), position) if ctx.needs_input_grad[0] else None,
            _at(dweight[:, 0], position) if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, slots, position):
        ctx.save_for_backward(slots, position)
        return _sum_over(rows.contiguous(), position)

    @staticmethod
    @_once
    def backward(ctx, dy):
        slots, position = ctx.saved_tensors
        return dy.index_select(0, slots // position.shape[1]), None, None


# ---- transports


def _transport(name, group, deepep):
    return _AllToAll(group) if name == "alltoall" else _DeepEP(group, deepep or DeepEP())


class _AllToAll:
    """`torch.distributed.all_to_all_single` with uneven splits.

    A route of S rows: token [S], whose rows they are, sorted by destination; position [T, K] int32,
    the row that a slot added, -1 where a slot before it had added it; row [T, K], the row that
    serves a slot, -1 for none; sent and received, how many rows go to and come from each rank.
    """

    def __init__(self, group):
        self.group, self.size = group, dist.get_world_size(group)

    def send(self, x, index, weight, E, kept):
        route, own, pairs = kept[0] if kept else self.plan(index, E)
        if kept is not None and not kept:
            kept.append((route, own, pairs))
        return *_Send.apply(x, weight, own, route), pairs, route

    def plan(self, index, E):
        """The route, the indices [S, K] that travel with rows, and how many pairs of row and
        expert come here.
        """
        index = index.long()
        K, n, L = index.shape[1], self.size, E // self.size
        outside = (index < 0) | (index >= E)
        rank = torch.where(outside, n, index // L)
        # A slot adds a row if no slot before it has the same rank. argmax gives the first.
        first = (rank[:, :, None] == rank[:, None, :]).to(torch.uint8).argmax(-1)
        adds = first == torch.arange(K, device=index.device)
        ends, slots, position = sort_by_expert(torch.where(adds, rank, n), n)
        out = torch.zeros(2, n + 1, dtype=torch.int64, device=index.device)
        out[0, :n] = ends.diff(prepend=ends.new_zeros(1))
        out[1].scatter_add_(0, rank.flatten(), torch.ones_like(rank).flatten())
        out = out[:, :n].t().contiguous()  # rows and pairs for each rank
        into = torch.empty_like(out)
        dist.all_to_all_single(into, out, group=self.group)
        sizes = torch.cat((out, into)).tolist()  # the one place where the host waits
        rows_out, rows_in = ([row for row, _ in part] for part in (sizes[:n], sizes[n:]))
        sent = slots[: sum(rows_out)].long()
        token, to = sent // K, rank.flatten()[sent]
        own = torch.where(rank[token] == to[:, None], index[token] % L, L).int()
        return (
            _Route(self, token, position, position.gather(1, first), rows_out, rows_in),
            own,
            sum(pair for _, pair in sizes[n:]),
        )


class _Route(NamedTuple):
    transport: _AllToAll
    token: torch.Tensor
    position: torch.Tensor
    row: torch.Tensor
    sent: list[int]
    received: list[int]

    def there(self, rows):
        """Rows to the ranks of their experts."""
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

    def forward(self, x, weight, own):
        rows = self.there(x.index_select(0, self.token))
        # Indices and weights in one message of 32-bit words.
        words = weight.index_select(0, self.token).view(torch.int32)
        words = self.there(torch.cat((own, words), 1))
        K = own.shape[1]
        return rows, words[:, :K].contiguous(), words[:, K:].contiguous().view(weight.dtype)

    def forward_backward(self, drows, dweight, needs):
        """Gradients of x and weight, each None where it is not needed."""
        dx = _sum_over(self.back(drows), self.position) if needs[0] else None
        if not needs[1]:
            return dx, None
        dweight = self.back(dweight)
        slot = torch.arange(dweight.shape[1], device=dweight.device)
        flat = torch.where(self.row < 0, -1, self.row * dweight.shape[1] + slot)
        return dx, _at(dweight.flatten(), flat)

    def result(self, rows):
        return _sum_over(self.back(rows), self.position)

    def result_backward(self, dy):
        return self.there(dy.index_select(0, self.token))


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, own, route):
        ctx.route = route
        rows, own, weight = route.forward(x, weight, own)
        ctx.mark_non_differentiable(own)
        return rows, own, weight

    @staticmethod
    @_once
    def backward(ctx, drows, _, dweight):
        return (*ctx.route.forward_backward(drows, dweight, ctx.needs_input_grad[:2]), None, None)


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, route):
        ctx.route = route
        return route.result(rows)

    @staticmethod
    @_once
    def backward(ctx, dy):
        return ctx.route.result_backward(dy), None


_buffers: dict[tuple, Any] = {}


class _DeepEP:
    """DeepEP's normal kernels (github.com/deepseek-ai/DeepEP, `Buffer`), written from its published
    interface.

    This has never run on the GPUs that it needs: what the tests run is a stand-in for the package.
    """

    def __init__(self, group, options):
        self.group, self.size, self.options = group, dist.get_world_size(group), options

    def buffer(self, x):
        """One for a group and set of options; it lives as long as the process."""
        from deep_ep import Buffer

        key = (self.group, self.options)
        if key not in _buffers:
            row = x.shape[1] * max(2, x.element_size())
            configs = (Buffer.get_dispatch_config(self.size), Buffer.get_combine_config(self.size))
            least = max(c.get_nvl_buffer_size_hint(row, self.size) for c in configs)
            given = (
                int(self.options.buffer_size_gb * 1e9) // 128 * 128
            )  # DeepEP wants whole blocks of 128 bytes
            if given < least:
                raise ValueError(
                    f"deepep.buffer_size_gb must be at least {least / 1e9:.3g} for {self.size} "
                    f"ranks and "
                    f"rows of {x.shape[1]}, got {self.options.buffer_size_gb}"
                )
            between_nodes = max(c.get_rdma_buffer_size_hint(row, self.size) for c in configs)
            Buffer.set_num_sms(self.options.num_sms)
            _buffers[key] = Buffer(self.group, given, between_nodes)
        return _buffers[key]

    def send(self, x, index, weight, E, kept):
        if x.dtype != torch.bfloat16:
            raise TypeError(f"x must be bfloat16 for DeepEP, got {short(x.dtype)}")
        index = torch.where((index < 0) | (index >= E), -1, index.long())  # -1: no expert
        route = _DeepEPRoute(self.buffer(x), E)
        rows, own, weight = _Send.apply(x.contiguous(), weight, index, route)
        own = torch.where(own < 0, E // self.size, own).int()
        return rows, own, weight, route.pairs, route


class _DeepEPRoute:
    def __init__(self, buffer, E):
        self.buffer, self.E, self.handle, self.pairs = buffer, E, None, 0

    def forward(self, x, weight, index):
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(index, self.E)
        rows, own, weight, counts, self.handle, _ = self.buffer.dispatch(
            x,
            topk_idx=index,
            topk_weights=weight,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        self.pairs = sum(counts)  # on the host: DeepEP waits for them itself
        return rows, own, weight

    def forward_backward(self, drows, dweight, needs):
        # One kernel carries both; where only weights are wanted the rows travel all the same.
        dweight = dweight.contiguous() if needs[1] else None
        dx, dweight, _ = self.buffer.combine(drows.contiguous(), self.handle, topk_weights=dweight)
        return dx if needs[0] else None, dweight

    def result(self, rows):
        return self.buffer.combine(rows, self.handle)[0]

    def result_backward(self, dy):
        return self.buffer.dispatch(dy.contiguous(), handle=self.handle)[0]
