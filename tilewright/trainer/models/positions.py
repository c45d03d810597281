"""Positions of a batch's tokens: rotary angles, position ids and document boundaries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.ops.attention.context_parallel import (
    ContextParallel,
    check_boundaries,
    positions,
    shard,
)
from tilewright.ops.rope.rope import document_positions
from tilewright.trainer.models.model_config import ModelConfig


def _default(inv_freq, theta, scaling):
    return inv_freq


def _linear(inv_freq, theta, scaling):
    return inv_freq / scaling["factor"]


def _llama3(inv_freq, theta, scaling):
    """Llama 3.1: stretches long wavelengths, keeps short ones, interpolates between."""
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


def _yarn(inv_freq, theta, scaling):
    """arXiv 2309.00071: keeps features that rotate more than beta_fast times in the original
    context, stretches those with fewer rotations than beta_slow, interpolates between by index.
    """
    R, context = 2 * len(inv_freq), scaling["original_max_position_embeddings"]

    def index(rotations):
        return R * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = index(scaling.get("beta_fast") or 32)
    high = index(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)
    high += 0.001 * (low == high)
    indices = torch.arange(R // 2, device=inv_freq.device, dtype=torch.float32)
    stretched = ((indices - low) / (high - low)).clamp(0, 1)
    return stretched * inv_freq / scaling["factor"] + (1 - stretched) * inv_freq


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """By how much YaRN scales queries and keys whose context is `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _amplitude(scaling: Mapping[str, Any]) -> float:
    """The factor of cos and sin."""
    if scaling.get("rope_type") != "yarn":
        return 1.0
    given, factor = scaling.get("attention_factor"), scaling["factor"]
    if given is not None:
        return given
    own, every = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if own and every:
        return yarn_mscale(factor, own) / yarn_mscale(factor, every)
    return yarn_mscale(factor)


# type -> (inverse frequencies, the settings that it needs, and those that it may have)
ROPE_TYPES = {
    "default": (_default, (), ()),
    "linear": (_linear, ("factor",), ()),
    "llama3": (
        _llama3,
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        _yarn,
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def rope_tables(
    config: ModelConfig, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [length, rotated features / 2], float32."""
    return _tables(config.rope_dim, config.rope_theta, dict(config.rope_scaling), length, device)


def local_rope_tables(
    config: ModelConfig, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Those of layers with a window, if they are others."""
    theta = config.rope_local_base_freq
    return None if theta is None else _tables(config.rope_dim, theta, {}, length, device)


def _tables(R, theta, scaling, length, device):
    exponent = torch.arange(0, R, 2, device=device, dtype=torch.int64).float() / R
    inv_freq = ROPE_TYPES[scaling.get("rope_type", "default")][0](
        1.0 / theta**exponent, theta, scaling
    )
    angle = torch.outer(torch.arange(length, device=device).float(), inv_freq)
    cos, sin, amplitude = angle.cos(), angle.sin(), _amplitude(scaling)
    return (cos, sin) if amplitude == 1 else (amplitude * cos, amplitude * sin)


class Sequence:
    """The inputs of every layer beside the hidden states, built once per batch.

    cos, sin: rotary angles by position.   local: those of layers with a window, if they are others;
    see `angles`.   position_ids: [B, S], this rank's, or None: from 0.
    cu_seqlens: of packed documents, of the whole sequence.   ends: its values on the host, which
    spare attention a synchronization in every layer.   longest: a power of two that bounds the
    documents' lengths, so that few values of it are compiled; None without ends.
    routes: recorded experts [layers with experts, K, tokens of this rank's hidden states], or None;
    a layer is called with its own.

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
        local: tuple[torch.Tensor, torch.Tensor] | None = None,
    ):
        self.cos, self.sin = cos, sin
        self.local_cos, self.local_sin = local or (None, None)
        self.position_ids, self.cu_seqlens, self.ends = position_ids, cu_seqlens, ends
        self.routes: torch.Tensor | None = None
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
        angles = rope_tables(config, length, device)
        local = local_rope_tables(config, length, device)
        return cls(*angles, position_ids, cu_seqlens, ends, local)

    def angles(self, local: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of a layer.   local: whether it has a window."""
        if local and self.local_cos is not None and self.local_sin is not None:
            return self.local_cos, self.local_sin
        return self.cos, self.sin

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        angles = self.cos, self.sin, self.local_cos, self.local_sin
        return *angles, self.position_ids, self.cu_seqlens
