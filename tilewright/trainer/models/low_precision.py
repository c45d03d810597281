"""Projections and experts whose products are in FP8 or FP4, forward and backward.

The layers of a model are converted in place, as tensor parallelism converts them: only the forward
differs, parameters keep their names, shapes and dtypes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from tilewright import ops as tw
from tilewright.nn import Linear
from tilewright.nn.projections import all_paths, chosen_parts, experts, projections, unmatched
from tilewright.nn.sharded import local
from tilewright.ops.activation.activation import Gate, gate_eager
from tilewright.ops.moe.experts import SWIGLU
from tilewright.ops.moe.moe_fused import add_bias
from tilewright.trainer.models.moe import Experts

# The share of layers, from the last one on, that NVFP4 leaves in bfloat16: of 62 layers of the
# model of arXiv:2509.25149 ten, most of them at its end.
LAST = 0.15


@dataclass
class Products:
    """How the products of one layer are computed.

    recipe, hadamard, implementation: as in `ops.low_precision_linear`.
    activation: the implementation of SiLU(gate) * up between the two products of experts.
    seed: of NVFP4's random numbers in the coming step, even; 0 for other recipes.
    """

    recipe: str
    hadamard: bool = False
    implementation: str = "auto"
    activation: str = "auto"
    seed: int = 0

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return tw.low_precision_linear(
            x,
            weight,
            bias,
            recipe=self.recipe,
            seed=self.seed,
            hadamard=self.hadamard,
            # One rank that raises leaves the others waiting: a loss that is not finite ends the
            # step on all.
            check_finite=False,
            implementation=self.implementation,
        )

    def moe_mlp(
        self,
        x: torch.Tensor,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        expert_index: torch.Tensor,
        expert_weight: torch.Tensor,
        *,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        gate: Gate = SWIGLU,
    ) -> torch.Tensor:
        """`ops.moe_mlp`, with both products of each expert in low precision."""
        rows, offsets, _, position = tw.permute(x, expert_index, gate_up_proj.shape[0])
        pre = _biased(self._grouped(rows, gate_up_proj, offsets, 0), gate_up_bias, offsets)
        if gate.is_swiglu:
            inner = tw.silu_mul(pre, implementation=self.activation)
        else:
            inner = gate_eager(pre, gate)
        rows = _biased(self._grouped(inner, down_proj, offsets, 1), down_bias, offsets)
        return tw.unpermute(rows, expert_weight, position)

    def _grouped(self, x, weight, offsets, number):
        return tw.low_precision_grouped_gemm(
            x,
            weight,
            offsets,
            recipe=self.recipe,
            # Other recipes take 0.
            seed=self.seed + number * (self.recipe == "nvfp4"),
            hadamard=self.hadamard,
            check_finite=False,
            implementation=self.implementation,
        )


def _biased(rows, bias, offsets):
    return rows if bias is None else add_bias(rows, bias.to(rows.dtype), offsets)


class LowPrecisionLinear(Linear):
    """A projection that computes with its `Products`."""

    products: Products

    def own_bias(self) -> torch.Tensor | None:
        return None if self.bias is None else local(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.products.linear(x, local(self.weight), self.own_bias())


def last_layers(layers: int) -> list[str]:
    """The layers that NVFP4 leaves by default, as entries of `exclude`."""
    return [f"layers.{i}" for i in range(layers - math.ceil(LAST * layers), layers)]


def chosen(model: nn.Module, exclude: Iterable[str], with_experts: bool) -> list[str]:
    """The paths of the projections, and of the experts, that a recipe computes. The head,
    embeddings, routers and norms are none.

    Raises ValueError for an entry that matches nothing, for one that names a part of a fused
    projection, and if nothing is left.
    """
    exclude = list(exclude)
    if wrong := unmatched(exclude, (path for path, _ in all_paths(model))):
        raise ValueError(f"{', '.join(map(repr, wrong))} match no module of the model")
    left = []
    for path, module, parts in (*projections(model), *experts(model)):
        excluded = chosen_parts(exclude, path, parts)
        if excluded and len(excluded) < len([*parts]):
            raise ValueError(
                f"names {', '.join(excluded)} and not the rest of {path}, which is one product"
            )
        if not excluded and (with_experts or not isinstance(module, Experts)):
            left.append(path)
    if not left:
        raise ValueError("leaves no product to compute in low precision")
    return left


def seed_of(run: int, step: int, place: Iterable[int], path: str) -> int:
    """The seed of a layer's random numbers, even (experts use the next one too).

    run: the run's seed.   step: optimizer steps done.   place: of the rank among those that have
    other tokens, or another part of the layer.
    """
    of = " ".join(map(str, (run, step, *place, path))).encode()
    return int.from_bytes(hashlib.blake2b(of, digest_size=8).digest(), "little") >> 2 << 1
