"""Sorting tokens' rows by expert, and back: the steps before and after a grouped product.

T = tokens, K = experts per token, R = T * K token slots (slot t * K + k is token t's k-th expert)
and rows, E = experts, H = columns. An expert index equal to E is a sentinel: the slot's expert is
not on this rank, as under expert parallelism. Result shapes depend on input shapes only, and on
CUDA nothing is read on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilewright.core import checks
from tilewright.core.library import Operator, define, from_kernels
from tilewright.core.registry import Case, Cost, DispatchOn, Implementation, Op, in_cpp, in_triton
from tilewright.core.takes import takes
from tilewright.core.torch_names import in_transform
from tilewright.kernels.moe.operators import Order, collect, collect_backward, sort, spread
from tilewright.ops import cases

MOST_EXPERTS = 4096  # the sort keeps a number for each in registers

# Declarations (core.takes) of the experts of T tokens.
INDEX = "int32 | int64 [T, K]"
SLOTS = "K >= 1", "T * K < 2**31"
INDICES = {"expert_index": INDEX, "num_experts": f"static int [1, {MOST_EXPERTS}]"}


class Permuted(NamedTuple):
    """rows [R, H] in the order that the other three fields, `Order`'s, describe."""

    rows: torch.Tensor
    offsets: torch.Tensor
    slots: torch.Tensor
    position: torch.Tensor


@takes(*SLOTS, **INDICES)
def sort_by_expert(
    expert_index: torch.Tensor, num_experts: int, *, implementation: str = "auto"
) -> Order:
    """Sorts slots by expert with a stable counting sort: by slot within an expert, sentinels last.

    Deterministic, and the same in every implementation. Not differentiable.

    Args:
        expert_index: [T, K] int32 or int64, 0 to num_experts (the sentinel). T * K is below 2^31.
        num_experts: E, 1 to 4,096.
        implementation: "auto", or one that `tilewright explain permute` lists.

    Returns:
        Order.

    Raises:
        TypeError, ValueError: Invalid arguments.
        IndexError: An index out of range (not checked on CUDA, where a check would synchronize: it
            counts as a sentinel).
        ImplementationUnavailable: A named implementation that cannot run here.

    Example:
        >>> from tilewright.ops import sort_by_expert
        >>> sort_by_expert(torch.tensor([[1], [0], [1]]), 2).slots
        tensor([1, 0, 2], dtype=torch.int32)
    """
    index = checked_index(expert_index, num_experts)
    return Order(
        *PERMUTE.pick(implementation, DispatchOn(index.device))(None, index, num_experts)[1:]
    )


def sort_slots(index: torch.Tensor, num_experts: int) -> Order:
    """`sort_by_expert` of a valid index, by the implementation of `auto`, whatever is pinned."""
    sorting = PERMUTE.part(DispatchOn(index.device))
    return Order(*sorting(None, index.contiguous(), num_experts)[1:])


@checks.autocast("inputs")
@takes(*SLOTS, x="float [T, H]", **INDICES)
def permute(
    x: torch.Tensor, expert_index: torch.Tensor, num_experts: int, *, implementation: str = "auto"
) -> Permuted:
    """Copies x's row for each of its experts, in the order of `sort_by_expert`.

    Differentiable in x: dx[t] is the sum over k, sentinels excluded, of drows[position[t, k]], in
    float32, in the order of k, rounded once. Saved for backward: `position` alone.

    Args:
        x: [T, H] fp32 | bf16 | fp16 (fp64 with eager), any strides; rows of a wider tensor are read
            in place.
        expert_index, num_experts: as in `sort_by_expert`.
        implementation: "auto", or one that `tilewright explain permute` lists.

    Returns:
        Permuted: rows[r] = x[slots[r] // K] for r < offsets[-1], and 0 for the rest, in x's dtype.

    Raises:
        TypeError, ValueError, IndexError, ImplementationUnavailable: As `sort_by_expert`.

    Example:
        >>> from tilewright.ops import permute
        >>> x, expert_index = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1], [0], [1]])
        >>> permute(x, expert_index, 2).rows.flatten()
        tensor([2., 1., 3.])
    """
    index = checked_index(expert_index, num_experts)
    return Permuted(*PERMUTE.pick(implementation, x)(x, index, num_experts))


@checks.autocast("inputs")
@takes("K >= 1", position="int32 [T, K]", rows="float [T*K, H]", expert_weight="float [T, K]")
def unpermute(
    rows: torch.Tensor,
    expert_weight: torch.Tensor | None,
    position: torch.Tensor,
    *,
    implementation: str = "auto",
) -> torch.Tensor:
    """Sums each token's rows with weights: y[t] = sum_k expert_weight[t, k] * rows[position[t, k]].

    Differentiable in rows (0 for rows without a slot) and expert_weight (<dy[t],
    rows[position[t, k]]> in float32, 0 for a sentinel). Saved for backward: expert_weight and
    position, and rows if expert_weight requires a gradient.

    Args:
        rows: [T * K, H] fp32 | bf16 | fp16 (fp64 with eager), any strides.
        expert_weight: [T, K], any floating dtype, used in float32; None: ones.
        position: [T, K] int32, from `permute`: the slots that are not -1 have the rows 0, 1, ... in
            some order, each once. Rows without a slot are not read, so NaN in them is harmless.
        implementation: "auto", or one that `tilewright explain unpermute` lists.

    Returns:
        [T, H], contiguous, in rows' dtype, summed in float32 in the order of k, rounded once.

    Raises:
        TypeError, ValueError: Invalid arguments.
        IndexError: Positions other than those above (not checked on CUDA, where a check would
            synchronize: one outside rows counts as -1, and the gradient of rows that share a
            position is undefined).
        ImplementationUnavailable: A named implementation that cannot run here.

    Example:
        >>> from tilewright.ops import unpermute
        >>> rows = torch.tensor([[1.0], [2.0]])
        >>> position = torch.tensor([[1, 0]], dtype=torch.int32)
        >>> unpermute(rows, torch.tensor([[0.5, 1.0]]), position)
        tensor([[2.]])
    """
    if expert_weight is not None:
        expert_weight = expert_weight.to(torch.promote_types(rows.dtype, torch.float32))
    position = position.contiguous() if position.is_cuda else _checked_position(position)
    return UNPERMUTE.pick(implementation, rows)(rows, expert_weight, position)


# ---- checks of expert indices and positions, whose values are read only without a device
# synchronization


def checked_index(index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """index, contiguous; its values are checked if that does not synchronize."""
    return index.contiguous() if index.is_cuda else _checked_index(index, num_experts)


def _look_at_index(index, num_experts):
    if index.numel() and not index.is_cuda:
        low, high = index.aminmax()
        if low < 0 or high > num_experts:
            first = ((index < 0) | (index > num_experts)).nonzero()[0].tolist()
            raise IndexError(
                f"expert_index{first} is {int(index[tuple(first)])}; accepted are 0 to "
                f"{num_experts - 1}, "
                f"and {num_experts} for a slot without an expert"
            )
    return index.clone(memory_format=torch.contiguous_format)


def _look_at_position(position):
    if position.numel() and not position.is_cuda:
        used = position[position >= 0].long()
        seen = torch.zeros(used.shape[0] + 1, dtype=torch.bool)
        seen[used.clamp(max=used.shape[0])] = True
        if position.min() < -1 or not seen[:-1].all():
            raise IndexError(
                f"position must hold -1 or a row, and its {used.shape[0]} rows must be 0 to "
                f"{used.shape[0] - 1}, each once; got rows from {int(position.min())} to "
                f"{int(position.max())}"
            )
    return position.clone(memory_format=torch.contiguous_format)


def _empty_index(index: torch.Tensor, num_experts: int) -> torch.Tensor:
    return torch.empty_like(index, memory_format=torch.contiguous_format)


def _empty_position(position: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(position, memory_format=torch.contiguous_format)


# Operators, so that torch.compile defers the check of values to run time, with a result that is
# used, so that they are not removed.
_checked_index = define(
    "checked_expert_index",
    _look_at_index,
    _empty_index,
    plain=lambda index, num_experts: index.contiguous(),
)
_checked_position = define(
    "checked_position",
    _look_at_position,
    _empty_position,
    plain=lambda position: position.contiguous(),
)


# ---- the definitions


def sort_eager(expert_index, num_experts):
    E = num_experts
    expert = expert_index.flatten().long()
    expert = torch.where((expert < 0) | (expert > E), E, expert)
    slots = expert.argsort(stable=True)
    counts = torch.zeros(E + 1, dtype=torch.int64, device=expert.device)
    offsets = counts.scatter_add(0, expert, torch.ones_like(expert))[:E].cumsum(0)
    row = torch.empty_like(slots).scatter(
        0, slots, torch.arange(slots.shape[0], device=slots.device)
    )
    position = torch.where(expert < E, row, -1).view(expert_index.shape)
    return offsets.int(), slots.int(), position.int()


def permute_eager(x, expert_index, num_experts):
    offsets, slots, position = sort_eager(expert_index, num_experts)
    if x is None:
        return None, offsets, slots, position
    # For the backward: a sum over each token's rows.
    acc = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(acc).index_select(0, slots // expert_index.shape[1])
    used = torch.arange(slots.shape[0], device=x.device) < offsets[-1]
    return torch.where(used[:, None], rows, 0).to(x.dtype), offsets, slots, position


def unpermute_eager(rows, expert_weight, position):
    (T, K), H = position.shape, rows.shape[1]
    acc = torch.promote_types(rows.dtype, torch.float32)
    present = position >= 0
    picked = rows.to(acc).index_select(0, position.flatten().clamp_min(0)).view(T, K, H)
    picked = torch.where(present[..., None], picked, 0)  # before the product: 0 times NaN is NaN
    if expert_weight is not None:
        picked = picked * torch.where(present, expert_weight.to(acc), 0)[..., None]
    return picked.sum(1).to(rows.dtype)


# ---- fused implementations. PyTorch has no alternative to the twins': a sort, an index, a sum.


def _rows(t):
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


@spread.formula()
def _backward_spread(fused, drows, position):
    return {"x": fused.collect(_rows(drows), None, position)}


def _rows_for_weight(rows, weight):
    # Within torch.func too, where a formula needs a saved tensor that requires a gradient (`once`).
    needed = in_transform() or (weight is not None and weight.requires_grad)
    return rows if needed else None


@collect.formula(of_weight=_rows_for_weight)
def _backward_collect(fused, dy, of_weight, weight, position, needs):
    if weight is None:
        return {"rows": fused.spread(_rows(dy), position, None)}
    rows = of_weight if needs["weight"] else None
    drows, dweight = fused.backward(_rows(dy), rows, weight, position)
    return {"rows": drows, "weight": dweight}


class _Fused:
    """The calls of one implementation and its four operators: `spread` copies a token's row to its
    experts' rows, `collect` sums them, and each is the other's backward; `backward` is that of
    `collect` with weights.
    """

    def __init__(self, operator: Callable[..., Operator]):
        """operator: (declaration, part of its name, what its formula launches) -> the operator."""
        self.sort = operator(sort, "sort")
        self.backward = operator(collect_backward, "backward")
        self.spread = operator(spread, "spread", self)
        self.collect = operator(collect, "collect", self)

    def permute(self, x, expert_index, num_experts):
        order = offsets, _, position = self.sort(expert_index, num_experts)
        return None if x is None else self.spread(_rows(x), position, offsets), *order

    def unpermute(self, rows, expert_weight, position):
        weight = None if expert_weight is None else expert_weight.contiguous()
        return self.collect(_rows(rows), weight, position)


@functools.cache
def _triton():
    from tilewright.kernels.moe import permute_triton

    def operator(declared, part, *launched):
        return declared.define(f"permute_triton_{part}", getattr(permute_triton, part), *launched)

    return _Fused(operator)


@functools.cache
def _cpp():
    names = "permute_cpp_sort", "permute_cpp_backward", "permute_cpp_spread", "permute_cpp_collect"
    by_part = {name.split("_")[-1]: name for name in names}
    return _Fused(lambda declared, part, *launched: declared.adopt(by_part[part], *launched))


def _implementations(op: str, **options: Any) -> tuple[Implementation, ...]:
    def tunables():
        return tuple(t for t in from_kernels("moe.permute_triton", "TUNABLES")() if t.op == op)

    return (
        in_triton(lambda: getattr(_triton(), op), tunables=tunables, **options),
        in_cpp(lambda: getattr(_cpp(), op)),
    )


# ---- cases

# E, K, H, and tokens of timed cases: on a GPU enough to make the tensors large, half as many where
# rows are wide, so that the float64 truth fits too.
MODELS = {
    "qwen3-30b-a3b": (128, 8, 2048, 1),
    "mixtral-8x7b": (8, 2, 4096, 1),
    "deepseek-v3": (256, 8, 7168, 2),
}


def _index(device, gen, T, E, K, kind):
    """Distinct experts per token. kind: "sentinels" for some slots without one, "none" for none at
    all, "empty" for experts without tokens, "one" for the last expert only (K is 1).
    """
    if kind == "none":
        return torch.full((T, K), E, device=device)
    if kind == "one":
        return torch.full((T, K), E - 1, device=device)
    scores = torch.rand(T, E, device=device, generator=gen)
    if kind == "empty":
        scores[:, E // 3 : 2 * E // 3] -= 2
    index = (
        scores.argsort(dim=1)[:, -K:] if T else torch.zeros(0, K, dtype=torch.int64, device=device)
    )
    if kind == "sentinels":
        index[torch.rand(T, K, device=device, generator=gen) < 0.4] = E
    return index.contiguous()


def _permute_case(
    name, T, E, K, H, *, kind="", strided=False, small_index=False, tags=cases.CONTRACT
):
    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        new = {"device": device, "dtype": dtype, "gen": g, "requires_grad": False}
        x = cases.randn(T, 3 * H, **new)[:, H : 2 * H] if strided else cases.randn(T, H, **new)
        index = _index(device, g, T, E, K, kind)
        return {
            "x": x.requires_grad_(),
            "expert_index": index.int() if small_index else index,
            "num_experts": E,
        }

    # A row in, K out, an index in, two tables out; backward: K rows in, one out, one table in.
    def cost(itemsize):
        n = T * (K + 1) * H * itemsize
        return Cost(n + T * K * 16, n + T * K * 4, 0, T * K * H)

    return Case(name, make, cost, tags)


def _unpermute_case(
    name, T, E, K, H, *, kind="", strided=False, weighted=True, fixed=False, tags=cases.CONTRACT
):
    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        new = {"device": device, "dtype": dtype, "gen": g, "requires_grad": False}
        rows = (
            cases.randn(T * K, 3 * H, **new)[:, H : 2 * H]
            if strided
            else cases.randn(T * K, H, **new)
        )
        weight = None
        if weighted:
            weight = torch.rand(T, K, device=device, generator=g).requires_grad_(not fixed)
        position = sort_eager(_index(device, g, T, E, K, kind), E)[2]
        return {"rows": rows.requires_grad_(), "expert_weight": weight, "position": position}

    # K rows in, one out; backward: one in, K out, and K in for the weights' gradient.
    def cost(itemsize):
        n = T * (K + 1) * H * itemsize
        return Cost(n + T * K * 8, n + T * K * (H * itemsize + 12), 2 * T * K * H, 3 * T * K * H)

    return Case(name, make, cost, tags)


def _all_cases(case, more):
    small = [
        case("ragged", 13, 6, 2, 33),
        case("sentinels", 11, 5, 3, 20, kind="sentinels"),
        case("all_sentinels", 4, 3, 2, 8, kind="none"),
        case("no_tokens", 0, 4, 2, 16),
        case("one_token", 1, 4, 3, 40),
        case("one_expert", 9, 1, 1, 24),
        case("empty_experts", 10, 9, 2, 16, kind="empty"),
        case("one_for_all", 21, 7, 1, 12, kind="one"),
        case("k_is_all", 5, 6, 6, 18),
        case("more_than_eight", 3, 20, 11, 10, kind="sentinels"),
        case("strided", 6, 4, 2, 36, strided=True),
        case("by_eight", 3, 5, 2, 1048),  # rows aligned to 16 bytes only
        case("wide", 2, 4, 2, 2500),
        case("no_columns", 3, 4, 2, 0),
        case("many_slots", 70, 130, 4, 1, kind="sentinels"),  # several tiles, and blocks of experts
        *more,
    ]
    timed = [
        case(name, cases.TOKENS[device] // part, E, K, H, tags=tags)
        for device, tags in (("cuda", cases.CUDA), ("cpu", cases.CPU))
        for name, (E, K, H, part) in MODELS.items()
    ]
    return (*small, *timed, case("big", 2**17 + 1, 128, 8, 2048, kind="sentinels", tags=cases.BIG))


PERMUTE = Op(
    "permute",
    permute,
    permute_eager,
    _implementations("permute"),
    _all_cases(_permute_case, [_permute_case("int32", 7, 5, 2, 9, small_index=True)]),
    goals=cases.near_copy(92, "forward", "backward"),
)
UNPERMUTE = Op(
    "unpermute",
    unpermute,
    unpermute_eager,
    _implementations("unpermute", gate=from_kernels("moe.permute_triton", "count_gate")),
    _all_cases(
        _unpermute_case,
        [
            _unpermute_case("unweighted", 7, 5, 2, 19, weighted=False, kind="sentinels"),
            _unpermute_case("fixed_weights", 7, 5, 2, 19, fixed=True, kind="sentinels"),
        ],
    ),
    goals=cases.near_copy(92, "forward", "backward"),
)
