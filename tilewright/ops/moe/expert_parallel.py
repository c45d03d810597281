"""The experts of a mixture-of-experts layer, sharded over a process group: tokens are sent to their
experts and back.

n ranks, E experts, and L = E / n of them on each: rank r has the experts r L to (r + 1) L - 1.
T = tokens on this rank (any number, may differ between ranks), K = experts per token, H = columns.
A token's row is sent once to each rank that has experts for it, with its K indices and weights; the
result returns as one row per rank, already the weighted sum over that rank's experts. In between, a
rank computes one row per pair of a token and one of its experts, sorted by expert, without padding.
The host needs the number of rows only:

                all-to-alls                                              synchronizations
    forward     4: sizes, rows, indices with weights, results            one, for the sizes
    backward    3: gradients of results, of rows, of weights             none
    recomputed  2: rows, indices with weights (reentrant: also results)  none, with `kept`

Gradients of x and of the weights are sent only where required. Deterministic: sums have a fixed
order, in float32. (DeepEP has its own kernels, two calls forward and two backward, and its own
synchronization for sizes.) Not in the table of ops: the implementations of the computation are
`moe_mlp`'s, and a test needs several processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tilewright.core import checks
from tilewright.core.registry import ImplementationUnavailable
from tilewright.core.takes import takes
from tilewright.core.torch_names import ProcessGroup, uncompiled
from tilewright.ops.activation.gate import Gate
from tilewright.ops.moe.expert_transport import (
    AllToAll,
    DeepEP,
    Return,
    no_deepep,
    once,
    sum_rows,
    transport_of,
    values_at,
)
from tilewright.ops.moe.experts import BIASED, BIASES, EXPERTS, SIZES, SWIGLU
from tilewright.ops.moe.moe import moe_mlp, moe_mlp_eager
from tilewright.ops.moe.moe_fused import NO_BIASES, Biases
from tilewright.ops.moe.permute import INDICES, SLOTS, checked_index, sort_slots
from tilewright.ops.quant.quantize import Quantized

__all__ = ["DeepEP", "Dispatched", "Plan", "combine", "dispatch", "ep_moe_mlp"]

DISPATCHES = ("alltoall", "deepep", "eager")


class Plan(NamedTuple):
    """Where the rows of one call are sent; made by `dispatch`, read by `combine` and by both
    backwards.

    route: state of the transport.   slots [P]: the slot (received row * K + k) of each pair's row.
    position [M, K] int32: the pair's row of each slot of the M received rows, or -1.   group: the
    process group.
    """

    route: Any
    slots: torch.Tensor
    position: torch.Tensor


class Dispatched(NamedTuple):
    """The input of a rank's experts: P pairs of a token and an expert, sorted by expert. rows [P,
    H], their experts [P, 1] int32 from 0 to L - 1, their weights [P, 1], and the plan for
    `combine`.
    """

    rows: torch.Tensor
    expert_index: torch.Tensor
    expert_weight: torch.Tensor
    plan: Plan


# Wide: what moe_mlp takes, and how tokens reach the experts' ranks.
# Sizes are known at run time only. Below the other: torch 2.11 takes an outermost `disable` off a
# function that it is asked to compile, and the gradient of x is then zero.
@checks.autocast("products", "x", "gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
@uncompiled
@takes(*SIZES, BIASED, **EXPERTS, **BIASES, dispatch=DISPATCHES, recompute="bool")
def ep_moe_mlp(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor | Quantized,
    down_proj: torch.Tensor | Quantized,
    expert_index: torch.Tensor,
    expert_weight: torch.Tensor,
    group: ProcessGroup,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate: Gate = SWIGLU,
    dispatch: str = "alltoall",
    implementation: str = "auto",
    recompute: bool = False,
    kept: list | None = None,
    deepep: DeepEP | None = None,
    experts: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """`moe_mlp` with the experts sharded over a process group. Every rank of it must call this,
    with its own tokens.

    Rounds as moe_mlp does, and twice more, to x's dtype: each rank's sum over a token's experts,
    and each of those experts' weighted results. Sums over ranks are in float32. Differentiable once
    in x, gate_up_proj, down_proj, biases and expert_weight; a parameter's gradient is summed over
    all ranks' tokens. Saved for backward beside the plan: a row [H] per pair of a token and an
    expert here, and what moe_mlp saves of it; with `recompute` only the received rows, one per
    token.

    Args:
        x: [T, H] fp32 | bf16 | fp16 (fp64 with eager); T may differ between ranks, and be 0.
        gate_up_proj, down_proj: [L, 2 I, H] and [L, H, I], this rank's experts, in x's dtype, or
            both quantized, as moe_mlp takes them.
        expert_index: [T, K] int32 or int64, among all E = n L experts; E for a slot without an
            expert.
        expert_weight: [T, K], any floating dtype, used in float32.
        group: the process group, of n ranks.
        gate_up_bias, down_bias: [L, 2 I] and [L, H], this rank's experts', as moe_mlp takes them.
        gate: as in moe_mlp.
        dispatch: "alltoall"; "deepep", DeepEP's kernels (configured by `deepep`), with x in bf16;
            "eager", the definition: every rank gathers all tokens, computes its experts for them,
            and the results are summed.
        implementation: as in moe_mlp.
        recompute: save only the received rows, and recompute the experts in the backward. No row is
            sent a second time.
        kept: for a call within `torch.utils.checkpoint`: a list that the first call fills and the
            recomputation reads, so that the routing is the same, no sizes are sent again, and the
            host does not wait. (Ignored by DeepEP.)
        deepep: DeepEP's options; None: its defaults. Read with dispatch="deepep" only.
        experts: computes this rank's experts in place of `moe_mlp`, whose arguments it takes but
            for `noise` and `implementation`. Unsupported with dispatch="eager".

    Returns:
        [T, H] in x's dtype.

    Raises:
        TypeError, ValueError: Invalid arguments.
        IndexError: An index out of range (CPU only; on CUDA it counts as E).
        ImplementationUnavailable: An implementation, or DeepEP, that cannot run here.

    Example:
        >>> from tilewright.ops import moe_mlp
        >>> from tilewright.ops.moe.expert_parallel import ep_moe_mlp
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x, gate_up, down = torch.randn(4, 8), torch.randn(2, 32, 8), torch.randn(2, 8, 16)
        >>> index, weight = torch.tensor([[0], [1], [1], [0]]), torch.ones(4, 1)
        >>> y = ep_moe_mlp(x, gate_up, down, index, weight, dist.group.WORLD)  # one rank
        >>> torch.allclose(y, moe_mlp(x, gate_up, down, index, weight), rtol=1e-4, atol=1e-4)
        True
        >>> dist.destroy_process_group()
    """
    if dispatch == "deepep" and (reason := no_deepep(x.device.type)):
        raise ImplementationUnavailable(f"ep_moe_mlp[deepep]: {reason}")
    E = gate_up_proj.shape[0] * dist.get_world_size(group)
    index = checked_index(expert_index, E)
    weight = expert_weight.to(torch.promote_types(x.dtype, torch.float32))
    if dispatch == "eager" and experts is not None:
        raise ValueError("experts must be None with dispatch='eager', which computes by definition")
    if dispatch == "eager":
        return ep_moe_mlp_eager(
            x, gate_up_proj, down_proj, index, weight, group, Biases(gate_up_bias, down_bias), gate
        )

    received, local_index, local_weight, pairs, route = transport_of(dispatch, group, deepep).send(
        x, index, weight, E, kept
    )
    pair_expert, slots, position = _pairs(local_index, pairs, gate_up_proj.shape[0])

    compute = experts or functools.partial(moe_mlp, implementation=implementation)

    def computed(received, local_weight):
        rows, of_pairs = _Spread.apply(received, local_weight, slots, position)
        rows = compute(
            rows,
            gate_up_proj,
            down_proj,
            pair_expert,
            of_pairs,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            gate=gate,
        )
        return _Collect.apply(rows, slots, position)

    if recompute and torch.is_grad_enabled():
        results = checkpoint(
            computed, received, local_weight, use_reentrant=False, preserve_rng_state=False
        )
    else:
        results = computed(received, local_weight)
    return Return.apply(results, route)


@takes(*SLOTS, x="float [T, H]", **INDICES, expert_weight="float [T, K]")
def dispatch(
    x: torch.Tensor,
    expert_index: torch.Tensor,
    expert_weight: torch.Tensor,
    num_experts: int,
    group: ProcessGroup,
) -> Dispatched:
    """Sends tokens to their experts: the first half of `ep_moe_mlp`.

    Differentiable in x (dx[t] is the sum of its rows' gradients, over a rank's experts and then
    over ranks, both in float32, rounded after each) and in expert_weight.

    Args:
        x, expert_index, expert_weight: as in `ep_moe_mlp`.
        num_experts: E, over all ranks; a multiple of the group's size.
        group: the process group.

    Returns:
        Dispatched.

    Raises:
        TypeError, ValueError, IndexError: As `ep_moe_mlp`.

    Example:
        >>> from tilewright.ops.moe.expert_parallel import dispatch
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x, index = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1], [0], [1]])
        >>> sent = dispatch(x, index, torch.ones(3, 1), 2, dist.group.WORLD)  # one rank
        >>> sent.rows.flatten().tolist(), sent.expert_index.flatten().tolist()
        ([2.0, 1.0, 3.0], [0, 1, 1])
        >>> dist.destroy_process_group()
    """
    if num_experts % dist.get_world_size(group):
        raise ValueError(
            f"num_experts must be a multiple of the group's {dist.get_world_size(group)} ranks, "
            f"got {num_experts}"
        )
    index = checked_index(expert_index, num_experts)
    weight = expert_weight.to(torch.promote_types(x.dtype, torch.float32))
    return _dispatch(x, index, weight, num_experts, AllToAll(group))


def combine(rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Returns the experts' results to their tokens' ranks and sums them: the second half of
    `ep_moe_mlp`.

    Weights have been applied already. Sums over a rank's experts, then over ranks, both in float32,
    rounded after each. Differentiable in rows.

    Args:
        rows: [P, H], in the order of `Dispatched`.
        plan: from `dispatch`.

    Returns:
        [T, H] in rows' dtype.

    Raises:
        ValueError: rows has another number of rows than `dispatch` returned.

    Example:
        >>> from tilewright.ops.moe.expert_parallel import combine, dispatch
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x, index = torch.tensor([[1.0], [2.0]]), torch.tensor([[0, 1], [0, 2]])
        >>> weight = torch.tensor([[0.5, 0.25], [1.0, 0.0]])
        >>> sent = dispatch(x, index, weight, 2, dist.group.WORLD)  # one rank; 2: no expert
        >>> combine(sent.rows * sent.expert_weight, sent.plan).flatten().tolist()
        [0.75, 2.0]
        >>> dist.destroy_process_group()
    """
    P = plan.slots.shape[0]
    if rows.dim() != 2 or rows.shape[0] != P:
        raise ValueError(f"rows must have shape [{P}, H], as dispatched, got {list(rows.shape)}")
    return Return.apply(_Collect.apply(rows, plan.slots, plan.position), plan.route)


# ---- the definition


class _Gather(torch.autograd.Function):
    """All ranks' rows, concatenated in rank order. The gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, x, sizes, group):
        ctx.sizes, ctx.group = sizes, group
        return _gathered(x, sizes, group)

    @staticmethod
    @once
    def backward(ctx, dy):
        return _own_sum(dy, ctx.sizes, ctx.group), None, None


class _Sum(torch.autograd.Function):
    """The sum over ranks; each takes its own rows."""

    @staticmethod
    def forward(ctx, x, sizes, group):
        ctx.sizes, ctx.group = sizes, group
        return _own_sum(x, sizes, group)

    @staticmethod
    @once
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


def ep_moe_mlp_eager(
    x,
    gate_up_proj,
    down_proj,
    expert_index,
    expert_weight,
    group,
    biases=NO_BIASES,
    gate=SWIGLU,
):
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=x.device)
    sizes[dist.get_rank(group)] = x.shape[0]
    dist.all_reduce(sizes, group=group)
    sizes = sizes.tolist()
    L = gate_up_proj.shape[0]
    local_index = _gathered(expert_index, sizes, group) - dist.get_rank(group) * L
    local_index = torch.where((local_index < 0) | (local_index > L), L, local_index)
    y = moe_mlp_eager(
        _Gather.apply(x, sizes, group),
        gate_up_proj,
        down_proj,
        local_index,
        _Gather.apply(expert_weight, sizes, group),
        biases=biases,
        gate=gate,
    )
    return _Sum.apply(y, sizes, group)


# ---- from rows, one per (token, rank), to pairs, one per (token, expert), and back


def _pairs(local_index, pairs, L):
    """Lists the pairs of received rows with the experts `local_index` [M, K]: expert [P, 1] and
    slot [P] of each pair, sorted by expert, and each slot's pair.
    """
    _, slots, position = sort_slots(local_index, L)
    slots = slots[:pairs]  # slots whose expert is on this rank come first
    return local_index.flatten()[slots][:, None], slots, position


def _dispatch(x, index, weight, E, transport):
    rows, local_index, local_weight, pairs, route = transport.send(x, index, weight, E, None)
    pair_expert, slots, position = _pairs(local_index, pairs, E // transport.size)
    rows, local_weight = _Spread.apply(rows, local_weight, slots, position)
    return Dispatched(rows, pair_expert, local_weight, Plan(route, slots, position))


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, slots, position):
        ctx.save_for_backward(position)
        return rows.index_select(0, slots // position.shape[1]), weight.flatten()[slots][:, None]

    @staticmethod
    @once
    def backward(ctx, drows, dweight):
        [position] = ctx.saved_tensors
        return (
            sum_rows(drows.contiguous(), position) if ctx.needs_input_grad[0] else None,
            values_at(dweight[:, 0], position) if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, slots, position):
        ctx.save_for_backward(slots, position)
        return sum_rows(rows.contiguous(), position)

    @staticmethod
    @once
    def backward(ctx, dy):
        slots, position = ctx.saved_tensors
        return dy.index_select(0, slots // position.shape[1]), None, None
