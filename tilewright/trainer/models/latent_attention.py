"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values come from one narrow
vector per token, and one rotated key is shared by all heads.

    q       = q_b_proj(norm(q_a_proj(x))), or q_proj(x)      [heads, nope + rope]
    c, r    = kv_a_proj_with_mqa(x)                          [kv_lora_rank], [rope]
    k', v   = kv_b_proj(norm(c))                             [heads, nope], [heads, v]
    k       = [k'; rotated r]

Where an implementation of attention takes values as wide as keys alone, v is padded. Tensor
parallelism shards heads; the narrow vectors are computed on every rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilewright import ops as tw
from tilewright.nn import Linear, RMSNorm
from tilewright.ops.attention.attention import takes_values
from tilewright.trainer.models.layers import Attention
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.positions import Sequence

EPS = 1e-6  # of the norms of narrow vectors, whatever config.json says


class LatentAttention(Attention):
    def add_projections(self, config: ModelConfig, merge_qkv: bool) -> None:
        sizes = config.latent
        assert sizes is not None  # else the layer has `Attention`
        self.merge_qkv = False  # there is nothing to merge
        self.kv_widths = (sizes.kv_lora_rank, sizes.qk_rope_head_dim)
        self.q_parts = (sizes.qk_nope_head_dim, sizes.qk_rope_head_dim)
        self.kv_parts = (sizes.qk_nope_head_dim, sizes.v_head_dim)
        self.takes_values = takes_values(self.ops.attention, sum(self.q_parts), sizes.v_head_dim)
        self.interleaved = sizes.rope_interleave
        H, heads, name = config.hidden_size, self.heads, self.ops.rmsnorm
        rank, width = sizes.q_lora_rank, heads * sum(self.q_parts)
        if rank is None:
            self.q_proj = Linear(H, width, bias=False)
        else:
            self.q_a_proj = Linear(H, rank, bias=False)
            self.q_a_layernorm = RMSNorm(rank, EPS, implementation=name)
            self.q_b_proj = Linear(rank, width, bias=False)
        self.kv_a_proj_with_mqa = Linear(H, sum(self.kv_widths), bias=False)
        self.kv_a_layernorm = RMSNorm(sizes.kv_lora_rank, EPS, implementation=name)
        self.kv_b_proj = Linear(sizes.kv_lora_rank, heads * sum(self.kv_parts), bias=False)
        self.o_proj = Linear(heads * sizes.v_head_dim, H, bias=False)

    def project(
        self, x: torch.Tensor, sequence: Sequence
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.tp.gather(x)
        if hasattr(self, "q_proj"):
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(self.kv_widths, -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        q, kv = (
            t.unflatten(-1, (-1, sum(parts))).transpose(1, 2)
            for t, parts in ((q, self.q_parts), (kv, self.kv_parts))
        )
        (q_nope, q_rope), (k_nope, v) = q.split(self.q_parts, -1), kv.split(self.kv_parts, -1)
        # Where pairs are neighbors they stay so, and q k^T is that of any other order.
        q_rope, k_rope = tw.rope(
            q_rope,
            k_rope.unsqueeze(1),
            *sequence.angles(self.local),
            interleaved=self.interleaved,
            position_ids=sequence.rows,
            implementation=self.ops.rope,
        )
        q = torch.cat((q_nope, q_rope), -1)
        k = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), -1)
        return *self.rounded(q, k), v

    def _attend(self, q, k, v, sequence):
        if self.takes_values:
            return super()._attend(q, k, v, sequence)
        width = v.shape[-1]
        padded = F.pad(v, (0, q.shape[-1] - width))
        return super()._attend(q, k, padded, sequence)[..., :width]
