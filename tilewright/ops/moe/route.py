"""Routing of tokens to experts: scores, top-k choice, weights, and the losses that balance a
router. Switch (arXiv:2101.03961), ST-MoE (arXiv:2202.08906), DeepSeek-V3 (arXiv:2412.19437).

T = tokens, E = experts, K = experts per token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewright.core import checks
from tilewright.core.library import Operator, from_kernels
from tilewright.core.registry import Op, in_cpp, in_triton, short
from tilewright.core.takes import takes
from tilewright.kernels.moe.operators import Router, choose, choose_backward
from tilewright.ops import cases
from tilewright.ops.moe.route_cases import all_cases

SCORES = ("softmax", "sigmoid")
# A kernel holds whole rows in registers. Published models have up to 512 experts.
MOST_EXPERTS = 4096
TINY = 1e-20  # added to sums of scores before a division, as published


class Routing(NamedTuple):
    """The result of `route`."""

    expert_index: torch.Tensor
    expert_weight: torch.Tensor
    tokens_per_expert: torch.Tensor
    load_balance_loss: torch.Tensor
    z_loss: torch.Tensor


# Wide: each model's routing, under the names of models' configurations.
@checks.autocast("float32")
@takes(
    "1 <= E <= MOST_EXPERTS",
    "E % groups == 0",
    logits="float [T, E]",
    score=SCORES,
    renormalize="bool",
    groups="static int [1, E]",
    topk_groups="static int [1, groups]",
    k="static int [1, topk_groups * E // groups]",
    bias="constant float32 | float64 [E]",
    scale="number",
    round_to="int [0, 2**31)",
    expert_index="int32 | int64 [T, k]",
)
def route(
    logits: torch.Tensor,
    k: int,
    *,
    score: str = "softmax",
    renormalize: bool = False,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
    round_to: int = 0,
    expert_index: torch.Tensor | None = None,
    implementation: str = "auto",
) -> Routing:
    """Chooses the k best experts of each token, by softmax or sigmoid scores, groups and a bias,
    with their weights and two losses; or replays a recorded choice with today's weights.

    Differentiable once in logits, through expert_weight, load_balance_loss (through P; f is a
    count) and z_loss; all sums in float32. Saved for backward: logits, expert_index and the counts.
    Logits may be -inf. With softmax scores, NaN or +inf (or a row of -inf alone) makes all weights
    of the row NaN. With sigmoid scores logits are independent: +inf has score 1, -inf 0, and NaN
    makes its own weight NaN where it is chosen, and with renormalize its whole row's. Indices are
    valid in any case. Such a row's gradient, and both losses, need not be finite.

    Args:
        logits: [T, E] fp32 | bf16 | fp16 (fp64 with eager), any strides (columns that are not
            contiguous are copied); E is at most 4,096.
        k: experts per token, 1 to topk_groups * E / groups. The choice is the k largest of s +
            bias, best first; without a bias, of the logits, which have the order of s, so that
            rounding makes no ties. Ties: the lower index first, of experts and of groups.
        score: "softmax" for s = softmax(logits) over experts, "sigmoid" for s = sigmoid(logits); in
            float32.
        renormalize: divide the k weights by their sum + 1e-20.
        bias: [E] fp32 (fp64 with fp64 logits), added to s for the choice only; not differentiable:
            refused if it requires a gradient.
        groups, topk_groups: the E experts are `groups` equal runs, and only those of the
            `topk_groups` best runs can be chosen. A group's value is its largest score
            (DeepSeek-V2's softmax router); with a bias or with sigmoid scores it is the sum of its
            two largest s + bias (DeepSeek-V3's), or the only one if a group is a single expert.
        scale: multiplies the weights, after renormalizing.
        round_to: M > 0 for token rounding, by `round_tokens` after everything else: every expert
            keeps a multiple of M tokens, its best ones. 0: off.
        expert_index: [T, k] int32 or int64, the recorded choice, as an inference engine or an
            earlier call gives it, or None. It replaces the choice, so that bias, groups and
            topk_groups have no effect; all else is computed from logits as usual, and weights keep
            their gradients. Experts of a token are distinct and in [0, E). On CUDA tensors and in
            compiled code that is not checked: a slot that breaks it (the first of two equal ones)
            gets expert 0 and weight NaN, and is not counted.
        implementation: "auto", or one that `tilewright explain route` lists.

    Returns:
        Routing. Neither loss is multiplied by a coefficient; both are of the choice before
        rounding, and 0 for T = 0. (fp32 below is fp64 for fp64 logits.)
            expert_index [T, K] int64; with round_to, E where a slot was dropped.
            expert_weight [T, K] fp32: the chosen s (without bias), renormalized, times scale; with
                round_to, 0 where a slot was dropped.
            tokens_per_expert [E] int64: slots per expert; with round_to, those that are kept.
            load_balance_loss [] fp32: E * sum_e f_e P_e, where f_e is the number of tokens that
                chose e, over T (so the f_e sum to K), and P_e is the mean over tokens of the
                softmax score, or of s_e / (sum_e s_e + 1e-20) with sigmoid scores. As
                transformers' load_balancing_loss_func for one layer; DeepSeek-V3's is this over K.
            z_loss [] fp32: mean over tokens of logsumexp(logits)^2.

    Raises:
        TypeError, ValueError: Invalid arguments.
        IndexError: An expert of expert_index that does not exist, as stated above.
        ImplementationUnavailable: A named implementation that cannot run here.

    Example:
        >>> from tilewright.ops import route
        >>> route(torch.tensor([[0.0, 3.0, 1.0]]), 2).expert_index
        tensor([[1, 2]])

    Source of the replay: arXiv:2510.11370.
    """
    if bias is not None:
        wide = torch.promote_types(logits.dtype, torch.float32)
        if bias.dtype != wide:
            raise TypeError(
                f"bias must be {short(wide)} for {short(logits.dtype)} logits, got "
                f"{short(bias.dtype)}"
            )
        bias = bias.detach()
    if expert_index is not None:
        expert_index = _recorded(expert_index, logits.shape[1])
        bias, groups, topk_groups = None, 1, 1
    sigmoid = score == "sigmoid"
    router = Router(k, sigmoid, renormalize, groups, topk_groups, float(scale))
    routing = ROUTE.pick(implementation, logits)(logits, bias, expert_index, router)
    if not round_to:
        return routing
    index, weight, tokens, *losses = routing
    return Routing._make((*round_tokens(index, weight, tokens, round_to), *losses))


def _recorded(expert_index: torch.Tensor, E: int) -> torch.Tensor:
    """expert_index as kernels take it: contiguous int64."""
    index = expert_index.to(torch.int64).contiguous()
    if not index.is_cuda and not torch.compiler.is_compiling():
        if outside := index[(index < 0) | (index >= E)].tolist():
            raise IndexError(f"expert_index holds {outside[0]}; accepted are 0 to {E - 1}")
        if (index.sort(-1).values.diff(dim=-1) == 0).any():
            raise ValueError("expert_index must hold distinct experts in each row, got equal ones")
    return index


# ---- the definition


def route_eager(logits, bias, recorded, router):
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    T, E = x.shape
    s = torch.sigmoid(x) if router.sigmoid else torch.softmax(x, -1)
    wrong = None
    if recorded is None:
        index = _choose(x.detach(), s.detach(), bias, router)
    else:
        wrong = (recorded < 0) | (recorded >= E)
        equal = recorded[:, :, None] == recorded[:, None, :]
        wrong |= equal.triu(1).any(-1)
        index = recorded.where(~wrong, 0)
    weight = s.gather(-1, index)
    weight = weight if wrong is None else weight.where(~wrong, 0)
    if router.renormalize:
        weight = weight / (weight.sum(-1, keepdim=True) + TINY)
    counts = torch.zeros(E, dtype=torch.int64, device=x.device)
    ones = torch.ones_like(index) if wrong is None else (~wrong).to(index.dtype)
    counts = counts.scatter_add(0, index.flatten(), ones.flatten())
    tokens = max(T, 1)
    p = s / (s.sum(-1, keepdim=True) + TINY) if router.sigmoid else s
    balance = E * (counts.to(x.dtype) / tokens * (p.sum(0) / tokens)).sum()
    z = x.logsumexp(-1).square().sum() / tokens
    weight = weight * router.scale
    weight = weight if wrong is None else weight.where(~wrong, torch.nan)
    return Routing(index, weight, counts, balance, z)


def _choose(x, s, bias, router):
    value = x if bias is None else s + bias
    # Stable: ties by the lower index.
    order = value.sort(dim=-1, descending=True, stable=True).indices
    if router.topk_groups < router.groups:
        of_groups = s if bias is None and router.sigmoid else value
        runs = of_groups.unflatten(-1, (router.groups, -1))
        two = min(2, runs.shape[-1]) if router.sigmoid or bias is not None else 1
        best = (
            runs.topk(two, dim=-1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
        )
        out = torch.ones_like(best, dtype=torch.bool).scatter(
            -1, best[:, : router.topk_groups], False
        )
        # Experts of chosen groups come first, in their previous order, even where a value is -inf.
        out = out.repeat_interleave(runs.shape[-1], dim=-1).gather(-1, order)
        order = order.gather(-1, out.to(torch.uint8).sort(dim=-1, stable=True).indices)
    return order[:, : router.k].contiguous()


def round_tokens(
    expert_index: torch.Tensor,
    expert_weight: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    multiple: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token rounding: every expert keeps the largest multiple of `multiple` tokens that it has,
    those with the highest weights (ties: the lower token index), so that a grouped product computes
    no padding.

    expert_index [T, K] int64, distinct per token; expert_weight [T, K]; tokens_per_expert [E]: how
    often each expert occurs, as in `route`'s result. Returns the three after rounding. A dropped
    slot has index E, weight 0 and no gradient; the other weights of its token are unchanged, not
    renormalized. Composed of PyTorch's own operators for every implementation, two stable sorts of
    T * K elements; nothing is read on the host.
    Source: after arXiv:2512.14080, which rounds to the nearest multiple; this one never adds a
    token.
    """
    E = tokens_per_expert.shape[0]
    expert = expert_index.flatten()
    best_first = expert_weight.detach().flatten().argsort(descending=True, stable=True)
    # By expert, best first, ties by slot.
    order = best_first[expert[best_first].argsort(stable=True)]
    rounded = tokens_per_expert - tokens_per_expert % multiple
    first = tokens_per_expert.cumsum(0) - tokens_per_expert
    expert_of_slot = expert[order]
    rank = torch.arange(order.shape[0], device=order.device) - first[expert_of_slot]
    keep = (
        torch.zeros_like(expert_of_slot, dtype=torch.bool)
        .scatter(0, order, rank < rounded[expert_of_slot])
        .view(expert_index.shape)
    )
    return torch.where(keep, expert_index, E), torch.where(keep, expert_weight, 0), rounded


# ---- fused implementations. torch.topk guarantees nothing about ties; the twin is the nearest.


@choose.formula()
def _backward(op, g, logits, index, counts, router):
    given = (g.weight, index.shape), (g.balance, ()), (g.z, ())
    if all(d is None for d, _ in given):
        return {}
    gradients = (
        logits.new_zeros(shape, dtype=torch.float32) if d is None else d.contiguous()
        for d, shape in given
    )
    return {"logits": op(*gradients, logits, index, counts, router)}


def _fused(forward: Operator) -> Callable:
    """The call of one implementation."""

    def route_fused(logits, bias, recorded, router):
        if logits.stride(1) != 1 and logits.shape[1] > 1:
            logits = logits.contiguous()
        bias = None if bias is None else bias.contiguous()
        weight, index, counts, balance, z = forward(logits, bias, recorded, router)
        return Routing(index, weight, counts, balance, z)

    return route_fused


@functools.cache
def _triton():
    from tilewright.kernels.moe import route_triton

    backward = choose_backward.define("route_triton_backward", route_triton.backward)
    return _fused(choose.define("route_triton_forward", route_triton.forward, backward))


@functools.cache
def _cpp():
    backward = choose_backward.adopt("route_cpp_backward")
    return _fused(choose.adopt("route_cpp_forward", backward))


def _atol(dtype, kwargs, name):
    """A logit's gradient is a difference of sums over a row that nearly cancel, so in float32
    either side may lose 12 eps; in the smallest cases the twin's error may be small by chance, and
    the other's exceeds twice it by up to 4.3 (40 seeds). With ties whole rows cancel: C++ exceeds
    it by up to 39 there (12 seeds, every layout of gradients, AVX2).
    """
    if dtype != torch.float32:
        return None
    row = kwargs["logits"][:1]
    return (64 if row.numel() and row.equal(row.round()) else 8) * torch.finfo(dtype).eps


ROUTE = Op(
    "route",
    route,
    route_eager,
    (
        in_triton(
            _triton,
            batch_invariant=cases.ANYWHERE,
            gate=from_kernels("moe.route_triton", "gate"),
            tunables=from_kernels("moe.route_triton", "TUNABLES"),
        ),
        in_cpp(_cpp, batch_invariant=("cpu",)),
    ),
    all_cases(),
    atol=_atol,
)
