"""Positions of a batch's tokens: rotary angles, position ids and document boundaries."""

from __future__ import annotations

import bisect
import itertools

import torch

from tilewright.ops.attention.context_parallel import (
    ContextParallel,
    check_boundaries,
    positions,
    shard,
)
from tilewright.ops.attention.prefixes import Prefix
from tilewright.ops.rope import tables
from tilewright.ops.rope.rope import document_positions
from tilewright.trainer.models.masks import Masks
from tilewright.trainer.models.model_config import ModelConfig


def rope_tables(
    config: ModelConfig, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [length, rotated features / 2], float32."""
    return tables.rope_tables(
        config.rope_theta, config.rope_dim, length, dict(config.rope_scaling), device=device
    )


def local_rope_tables(
    config: ModelConfig, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Those of layers with a window, if they are others."""
    theta = config.rope_local_base_freq
    if theta is None:
        return None
    return tables.rope_tables(theta, config.rope_dim, length, device=device)


def original_context(config: ModelConfig) -> int | None:
    """The longest documents with the angles of short ones, where those of longer ones are others
    (longrope).
    """
    scaling = dict(config.rope_scaling)
    return scaling[tables.CONTEXT] if scaling.get("rope_type") == "longrope" else None


def tables_by_length(
    config: ModelConfig, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [2 length, rotated features / 2]: of documents within the original context, then
    of longer ones.
    """
    scaling = dict(config.rope_scaling)
    same = [dict.fromkeys(tables.FACTORS, scaling[name]) for name in tables.FACTORS]
    short, long = (
        tables.rope_tables(
            config.rope_theta, config.rope_dim, length, scaling | factors, device=device
        )
        for factors in same
    )
    return torch.cat((short[0], long[0])), torch.cat((short[1], long[1]))


def longer_than(
    context: int,
    input_ids: torch.Tensor,
    cp: ContextParallel,
    position_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor | bool:
    """Whether a token's document is longer, for each of a rank's tokens, or for all."""
    if cu_seqlens is None and (position_ids is None or cp.size > 1):
        return input_ids.shape[1] * cp.size > context
    if cu_seqlens is None:
        assert position_ids is not None
        return position_ids.amax(-1, keepdim=True) >= context
    ends = cu_seqlens.long()
    tokens = torch.arange(input_ids.numel() * cp.size, device=ends.device)
    document = torch.searchsorted(ends[1:], tokens, right=True).clamp(max=len(ends) - 2)
    return shard((ends.diff() > context)[document], 0, cp).view_as(input_ids)


class Sequence:
    """The inputs of every layer beside the hidden states, built once per batch.

    cos, sin: rotary angles by position.   local: those of layers with a window, if they are others;
    see `angles`.   position_ids: [B, S], this rank's, or None: from 0.
    rows: in cos and sin, by token: position_ids, but where angles depend on a document's length.
    cu_seqlens: the whole sequence's packed documents.   ends: its values on the host, which
    spare attention a synchronization in every layer.   longest: a power of two that bounds the
    documents' lengths, so that few values of it are compiled; None without ends.
    routes: recorded experts [layers with experts, K, tokens of this rank's hidden states], or None;
    a layer is called with its own.
    masks: dropout masks, or None.   prefixes: prefixes of documents, see `ops.attention`.
    real: bool [tokens of this rank's hidden states], false for padding, which routers do not
    report; or None: every token is real.

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
        self.rows = position_ids
        self.routes: torch.Tensor | None = None
        self.masks: Masks | None = None
        self.real: torch.Tensor | None = None
        self.prefixes: tuple[Prefix, ...] = ()
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
        prefixes: tuple[Prefix, ...] = (),
    ) -> Sequence:
        """Builds it for a rank's tokens [B, S / cp.size].

        Positions default to those within each document.

        Raises ValueError for ends that differ from the values of cu_seqlens, and for prefixes where
        angles depend on a document's length.
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
        context = original_context(config)
        by_length = context is not None and length > context
        if by_length and prefixes:
            raise ValueError(
                f"preference.share_prefix = True: documents of more than {context} tokens "
                "(original_max_position_embeddings) have other angles than shorter ones, so they "
                "cannot share keys; make data.sample_packing_sequence_len at most that"
            )
        angles = (tables_by_length if by_length else rope_tables)(config, length, device)
        local = local_rope_tables(config, length, device)
        sequence = cls(*angles, position_ids, cu_seqlens, ends, local)
        sequence.prefixes = prefixes
        if context is not None and by_length:
            at = torch.arange(S, device=device) if position_ids is None else position_ids
            long = longer_than(context, input_ids, cp, position_ids, cu_seqlens)
            sequence.rows = at + length * long
        return sequence

    def angles(self, local: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of a layer.   local: whether it has a window."""
        if local and self.local_cos is not None and self.local_sin is not None:
            return self.local_cos, self.local_sin
        return self.cos, self.sin

    def documents(self, first: int, end: int) -> torch.Tensor:
        """cu_seqlens of the documents between two tokens, which are bounds of documents."""
        assert self.ends is not None and self.cu_seqlens is not None  # of packed documents
        bounds = (bisect.bisect_left(self.ends, at) for at in (first, end))
        a, b = bounds
        return self.cu_seqlens[a : b + 1] - first

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        angles = self.cos, self.sin, self.local_cos, self.local_sin
        return *angles, self.position_ids, self.rows, self.cu_seqlens, self.real
