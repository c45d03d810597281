"""The operators of a mixture of experts: what every implementation's launchers take and return.

T = tokens, K = experts per token, R = T K slots and rows, E = experts. Slot t K + k is token t's
k-th expert. Rows are sorted by expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewright.core.library import declare


class GateConstants(NamedTuple):
    """An MLP's gate, as kernels have it (`gated_triton.gated`). By default silu(gate) * up, of
    halves.

    INTERLEAVED: rows of the projection are gate, up, gate, up, ...
    """

    ACTIVATION: int = 0
    INTERLEAVED: bool = False
    ALPHA: float = 1.0
    LIMIT: float | None = None
    UP_LIMIT: float | None = None
    OFFSET: float = 0.0


SILU_MUL = GateConstants()


# ---- the order of rows


class Order(NamedTuple):
    """Slots sorted by expert, all int32.

    offsets [E]: the end of each expert's rows; offsets[-1] rows are in use.   slots [R]: the slot
    of each row.   position [T, K]: the row of each slot, -1 for a sentinel.
    """

    offsets: torch.Tensor
    slots: torch.Tensor
    position: torch.Tensor


@declare
def sort(expert_index: torch.Tensor, num_experts: int) -> Order:
    """expert_index: [T, K] int32 or int64, contiguous; what is not an expert is a sentinel."""
    shapes = num_experts, expert_index.numel(), expert_index.shape
    return Order(*[expert_index.new_empty(shape, dtype=torch.int32) for shape in shapes])


@declare
def spread(x: torch.Tensor, position: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """Copies x [T, H], with contiguous columns, to rows [R, H], which are 0 from offsets[-1] on;
    without offsets the used rows are counted.
    """
    return x.new_empty((position.numel(), x.shape[1]))


@declare
def collect(
    rows: torch.Tensor, weight: torch.Tensor | None, position: torch.Tensor
) -> torch.Tensor:
    """Sums rows [R, H], with contiguous columns, to [T, H].   weight: [T, K] fp32, or None."""
    return rows.new_empty((position.shape[0], rows.shape[1]))


class Collected(NamedTuple):
    """Gradients of the rows, and of weight if the rows were given."""

    drows: torch.Tensor
    dweight: torch.Tensor | None


@declare
def collect_backward(
    dy: torch.Tensor, rows: torch.Tensor | None, weight: torch.Tensor, position: torch.Tensor
) -> Collected:
    return Collected(
        dy.new_empty((position.numel(), dy.shape[1])),
        None if rows is None else weight.new_empty(position.shape),
    )


# ---- grouped products: x [R, K] and weight [E, N, K] have results [R, N]


@declare
def product(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


@declare
def product_backward_x(
    dy: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    return dy.new_empty((dy.shape[0], weight.shape[2]))


@declare
def product_backward_weight(
    dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    return dy.new_empty((offsets.shape[0], dy.shape[1], x.shape[1]))


# Rows of a tile of `map_size`: those of most products' tiles, all specialized ones included.
MAP_ROWS = 128


def map_size(rows: int, E: int, block: int = MAP_ROWS) -> int:
    """Elements of Triton's map of tiles: each of E experts and the tail has at most one partial
    tile.
    """
    return 3 * ((rows + (E + 1) * (block - 1)) // block) + 1


# ---- routing


class Router(NamedTuple):
    """k: experts per token.   sigmoid: whether scores are sigmoids; else they are softmaxes.
    renormalize: whether weights are divided by their sum.   groups, topk_groups: experts are chosen
    from the best topk_groups of as many equal runs.   scale: multiplies the weights.
    """

    k: int
    sigmoid: bool
    renormalize: bool
    groups: int
    topk_groups: int
    scale: float


class Chosen(NamedTuple):
    """Weights [T, K] fp32 and experts [T, K] int64, slots of each expert [E] int64, and the losses
    [] fp32. (torch.library.opcheck needs a float first.)
    """

    weight: torch.Tensor
    index: torch.Tensor
    counts: torch.Tensor
    balance: torch.Tensor
    z: torch.Tensor


@declare
def choose(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    recorded: torch.Tensor | None,
    router: Router,
) -> Chosen:
    """logits: [T, E] with contiguous columns.   bias: [E] fp32.   recorded: [T, K] int64, the
    choice, of experts that are distinct in each row. A slot that has another value, or the value of
    a later one, has weight NaN and expert 0.
    """
    T, E = logits.shape
    return Chosen(
        logits.new_empty((T, router.k), dtype=torch.float32),
        logits.new_empty((T, router.k), dtype=torch.int64),
        logits.new_empty(E, dtype=torch.int64),
        logits.new_empty((), dtype=torch.float32),
        logits.new_empty((), dtype=torch.float32),
    )


@declare
def choose_backward(
    g_weight: torch.Tensor,
    g_balance: torch.Tensor,
    g_z: torch.Tensor,
    logits: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    router: Router,
) -> torch.Tensor:
    """The gradient of the logits, contiguous, from those of weights and losses."""
    return logits.new_empty(logits.shape)
