"""Shared code of ops over a mixture's experts: declarations of their arguments, draws of a routing
in cases, rows and token slots, and the backward of the gated activation between two products.

T = tokens, K = experts per token, R = T K rows in the order of their experts, E = experts, H =
model width, I = inner width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from tilewright.core import checks
from tilewright.core.library import Declaration
from tilewright.core.registry import Implementation, no_kernels
from tilewright.ops.activation.activation import Gate, gate_parts
from tilewright.ops.moe.grouped_gemm import GROUPED_GEMM
from tilewright.ops.moe.permute import INDEX, MOST_EXPERTS, SLOTS
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.quantize import Quantized
from tilewright.ops.quant.weights import Packed, dense, pack

SWIGLU = Gate()

# Declarations (core.takes) of the tokens, weights and routing of E experts.
EXPERTS = {
    "x": "float [T, H]",
    "gate_up_proj": "x [E, 2*I, H]",
    "down_proj": "x [E, H, I]",
    "expert_index": INDEX,
    "expert_weight": "float [T, K]",
}
BIASES = {"gate_up_bias": "x [E, 2*I]", "down_bias": "x [E, H]"}
SIZES = f"1 <= E <= {MOST_EXPERTS}", *SLOTS
BIASED = "gate_up_proj: down_bias is None or I > 0"


class Projections(NamedTuple):
    """The weights of both projections in an operator, gate_up [E, 2 I, H] and down [E, H, I], each
    with the fields of a `Packed`.
    """

    gate_up_data: torch.Tensor
    gate_up_scales: list[torch.Tensor]
    gate_up_ints: list[int]
    gate_up_alpha: float
    down_data: torch.Tensor
    down_scales: list[torch.Tensor]
    down_ints: list[int]
    down_alpha: float

    @classmethod
    def of(
        cls,
        gate_up: torch.Tensor | Quantized,
        down: torch.Tensor | Quantized,
        noise: AQN | None = None,
    ) -> Projections:
        """down gets the noise of the layer after gate_up's."""
        after = None if noise is None else replace(noise, layer=noise.layer + 1)
        return cls(*pack(gate_up, noise), *pack(down, after))

    def dense(self, dtype: torch.dtype, implementation: str) -> tuple[torch.Tensor, torch.Tensor]:
        return dense(self.gate_up, dtype, implementation), dense(self.down, dtype, implementation)

    @property
    def gate_up(self) -> Packed:
        return Packed(*self[:4])

    @property
    def down(self) -> Packed:
        return Packed(*self[4:])


def or_zeros(declared: Declaration, launch: Callable) -> Callable:
    """The launcher (x, weights, ...), or its results as zeros where a size is 0."""

    def launched(x, weights, *rest):
        if x.numel() and all(weights.down.shape):
            with checks.no_autocast(x):
                return launch(x, weights, *rest)
        results = declared(x, weights, *rest)
        return type(results)(*[None if t is None else t.zero_() for t in results])

    return launched


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

    fields: fields of the Implementation that differ.
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
