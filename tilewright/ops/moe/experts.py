"""Shared code of ops over a mixture's experts: checks of a routing and its draws in cases, rows and
token slots, and the backward of the gated activation between two products.

T = tokens, K = experts per token, R = T K rows in the order of their experts, E = experts, H =
model width, I = inner width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from tilewright.core import checks
from tilewright.core.registry import Implementation, no_kernels
from tilewright.ops.activation.activation import Gate, gate_parts
from tilewright.ops.moe.grouped_gemm import GROUPED_GEMM
from tilewright.ops.moe.permute import checked_index
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.weights import Packed, dense

SWIGLU = Gate()


class Weight(NamedTuple):
    """One projection's weight [E, out, in] in an operator.

    implementation: of `dequantize_*`; None: the `unpinned` one.
    """

    packed: Packed
    dtype: torch.dtype
    implementation: str | None = None

    @property
    def shape(self):
        return self.packed.shape

    def dense(self) -> torch.Tensor:
        """The tensor. For a quantized weight it is a new one, to be freed after one product."""
        return dense(self.packed, self.dtype, self.implementation)


class Experts(NamedTuple):
    """The experts of `moe_mlp` in an operator: gate_up [E, 2 I, H], down [E, H, I], and biases."""

    gate_up: Weight
    down: Weight
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    gate: Gate


class Saved(NamedTuple):
    """Saved for backward: gates and ups pre [R, 2 I], the order of rows (see `permute.Order`), and
    Triton's tile map (else empty).
    """

    pre: torch.Tensor
    offsets: torch.Tensor
    slots: torch.Tensor
    position: torch.Tensor
    tiles: torch.Tensor


class Needs(NamedTuple):
    """Which gradients of `moe_mlp` are needed."""

    x: bool
    gate_up: bool
    down: bool
    weight: bool
    gate_up_bias: bool
    down_bias: bool


def check_routing(
    x: torch.Tensor, expert_index: torch.Tensor, expert_weight: torch.Tensor, E: int
) -> torch.Tensor:
    """Returns the index, as `checked_index` does, if it and its weights fit x [T, H]. Raises as
    `moe_mlp` does.
    """
    index = checked_index(expert_index, E)
    if index.shape[0] != x.shape[0]:
        raise ValueError(
            f"expert_index must have a row for each of x's {x.shape[0]}, got {list(index.shape)}"
        )
    checks.shape("expert_weight", expert_weight, tuple(index.shape), "that of expert_index")
    return index


def projection_noises(noise: AQN | None) -> tuple[AQN | None, AQN | None]:
    """The noises of gate_up_proj and of down_proj: those of one layer and the next."""
    return (None, None) if noise is None else (noise, replace(noise, layer=noise.layer + 1))


def expert_of(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The experts of rows in sorted order, by row number; the last expert for rows of the tail."""
    expert = torch.searchsorted(offsets, rows.to(torch.int32), right=True)
    return expert.clamp_(max=offsets.shape[0] - 1)


def rows_to_slots(values: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """[T, K] from one value per row; 0 for a slot without a row."""
    return torch.where(position < 0, 0, values[position.clamp_min(0)])


def gate_backward(
    dh: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, gate: Gate = SWIGLU
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weight * h, dpre, <dh, h>) per row, in float32: the step between the two products of the
    backward. It may overwrite dh.
    """
    # In place if possible: there are T K rows.
    a, da, v, dv = gate_parts(pre, gate)
    dh = dh.float()
    h = (a * v).to(pre.dtype).float()  # as the forward rounded it
    dots = (dh * h).sum(-1)
    weighted = h.mul_(weight).to(pre.dtype)
    del h
    dpre = torch.empty_like(pre)
    dgate, dup = gate.split(dpre)
    dh.mul_(weight)
    dup.copy_(a.mul_(dh).mul_(dv))
    dgate.copy_(dh.mul_(v).mul_(da))
    return weighted, dpre, dots


def over_grouped_gemm(name: str, load: Callable[[], Callable], **fields) -> Implementation:
    """The implementation of an op that is composed with this built-in one of `grouped_gemm`,
    available where that is.

    fields: of the Implementation, where they differ.
    """
    base = next(i for i in GROUPED_GEMM.built_in if i.name == name)
    return replace(base, load=load, gate=no_kernels, **fields)


def draw_routing(
    device: str, gen: torch.Generator, T: int, E: int, K: int, kind: str
) -> torch.Tensor:
    """An expert_index [T, K] for cases.

    kind: "uniform"; "skewed" (Zipf); "half", where half of the experts get no tokens; "one", where
        the last gets all (K is 1); "sentinels", where two fifths of the slots have no expert here;
        "none", where all have none.
    """
    if kind in ("one", "none"):
        return torch.full((T, K), E - 1 if kind == "one" else E, device=device)
    # Gumbel noise: top-k then draws K experts.
    scores = torch.rand(T, E, device=device, generator=gen).log().neg().log().neg()
    if kind == "skewed":
        scores = scores - torch.arange(1, E + 1, device=device).log()
    if kind == "half":
        scores[:, ::2] -= 1e3
    index = scores.topk(K, -1).indices
    if kind == "sentinels":
        index[torch.rand(T, K, device=device, generator=gen) < 0.4] = E
    return index
