"""Positions of a batch's tokens: rotary angles, position ids and document boundaries."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from tilewright.ops.context_parallel import ContextParallel, check_boundaries, positions, shard
from tilewright.ops.rope import document_positions

if TYPE_CHECKING:
    from tilewright.trainer.model_config import ModelConfig


def _default(inv_freq, scaling):
    return inv_freq


def _linear(inv_freq, scaling):
    return inv_freq / scaling["factor"]


def _llama3(inv_freq, scaling):
    """Llama 3.1: stretches long wavelengths, keeps short ones, interpolates between."""
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


# type -> (inverse frequencies, the settings that it uses)
ROPE_TYPES = {
    "default": (_default, ()),
    "linear": (_linear, ("factor",)),
    "llama3": (
        _llama3,
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
}


def rope_tables(
    config: ModelConfig, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [length, head_dim / 2], float32."""
    scaling = dict(config.rope_scaling)
    exponent = (
        torch.arange(0, config.head_dim, 2, device=device, dtype=torch.int64).float()
        / config.head_dim
    )
    inv_freq = ROPE_TYPES[scaling.get("rope_type", "default")][0](
        1.0 / config.rope_theta**exponent, scaling
    )
    angle = torch.outer(torch.arange(length, device=device).float(), inv_freq)
    return angle.cos(), angle.sin()


class Sequence:
    """The inputs of every layer beside the hidden states, built once per batch.

    cos, sin: rotary angles by position.   position_ids: [B, S], this rank's, or None: from 0.
    cu_seqlens: of packed documents, of the whole sequence.   ends: its values on the host, which
    spare attention a synchronization in every layer.   longest: a power of two that bounds the
    documents' lengths, so that few values of it are compiled; None without ends.

    A plain class, not a frozen dataclass: Dynamo guards every field of those, and would recompile
    for each tuple of ends.
    """

    def __init__(
        self,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        ends: tuple[int, ...] | None = None,
    ):
        self.cos, self.sin = cos, sin
        self.position_ids, self.cu_seqlens, self.ends = position_ids, cu_seqlens, ends
        self.longest: int | None = None
        if ends is not None:
            longest = max(b - a for a, b in itertools.pairwise(ends))
            self.longest = 1 << (longest - 1).bit_length()

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        config: ModelConfig,
        cp: ContextParallel,
        *,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        ends: tuple[int, ...] | None = None,
    ) -> Sequence:
        """Builds it for a rank's tokens [B, S / cp.size].

        Positions default to those within each document.

        Raises ValueError for ends that differ from the values of cu_seqlens.
        """
        S, device = input_ids.shape[1] * cp.size, input_ids.device
        # The angles are computed in each call: a buffer would have to survive construction on the
        # meta device, and this costs less than one row of one matrix product. Positions that
        # restart in each document are below S; positions from outside may be up to the model's
        # maximum.
        length = S
        if position_ids is not None and cu_seqlens is None:
            length = max(S, config.max_position_embeddings)
        elif position_ids is None and cu_seqlens is not None:
            whole = document_positions(cu_seqlens, input_ids.numel() * cp.size)
            position_ids = shard(whole, 0, cp).view_as(input_ids)
        elif position_ids is None and cp.size > 1:
            position_ids = positions(S, cp, device).expand_as(input_ids)
        if ends is not None:
            ends = check_boundaries(cu_seqlens, ends, len(input_ids), S)[1]
        return cls(*rope_tables(config, length, device), position_ids, cu_seqlens, ends)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.cos, self.sin, self.position_ids, self.cu_seqlens
