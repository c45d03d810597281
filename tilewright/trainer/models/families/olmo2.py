"""OLMo 2 (arXiv 2501.00656): norms of what attention and the MLP add, and none before them; queries
and keys of all heads have one norm each.
"""

from __future__ import annotations

import torch

from tilewright.trainer.models.block import Block, Norms
from tilewright.trainer.models.families.architecture import FAMILIES, Architecture
from tilewright.trainer.models.layers import Attention, Place, norm
from tilewright.trainer.models.model_config import ModelConfig


class _Attention(Attention):
    undivided = "queries and keys of all heads have one norm each"

    def add_projections(self, config: ModelConfig, merge_qkv: bool) -> None:
        super().add_projections(config, merge_qkv)
        self.apart = True  # the fused pass has norms of each head
        self.q_norm, self.k_norm = (norm(config, self.ops, n) for n in self.widths[:2])

    def normalized(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = q.shape, k.shape
        q, k = self.q_norm(q.flatten(-2)), self.k_norm(k.flatten(-2))
        return q.view(shapes[0]), k.view(shapes[1])


def _block(place: Place) -> Block:
    return Block(place, _Attention(place), norms=NORMS)


NORMS = Norms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
OLMO2 = Architecture(
    "olmo2",
    "Olmo2",
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    block=_block,
    norm_cast="gemma",
)
FAMILIES.add("olmo2", OLMO2)
