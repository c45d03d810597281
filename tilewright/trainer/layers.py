"""The layers of a dense decoder: norms on the residual stream, attention, and the MLP."""

from __future__ import annotations

import torch
from torch import nn

from tilewright import ops as tw
from tilewright.nn import Linear, RMSNorm, SwiGLU
from tilewright.nn.sharded import local
from tilewright.ops.context_parallel import ContextParallel, context_parallel_attention
from tilewright.trainer.model_config import ModelConfig
from tilewright.trainer.ops_choice import Ops
from tilewright.trainer.positions import Sequence
from tilewright.trainer.tensor_parallel import TensorParallel


class AddRMSNorm(RMSNorm):
    """Adds to the residual stream and normalizes the sum. Returns (normalized, sum).

    A residual of None is zero.
    """

    def __init__(self, size: int, eps: float, ops: Ops):
        super().__init__(size, eps, implementation=ops.rmsnorm)
        self.add_implementation, self.native = ops.add_rmsnorm, ops.numerics.rmsnorm_native

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return super().forward(x), x
        if self.native:
            total = x + residual
            return super().forward(total), total
        return tw.add_rmsnorm(
            x, residual, local(self.weight), self.eps, implementation=self.add_implementation
        )


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, ops: Ops, merge_qkv: bool):
        super().__init__()
        H, D = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim, self.ops = (
            config.num_attention_heads,
            config.num_key_value_heads,
            D,
            ops,
        )
        widths = (self.heads * D, self.kv_heads * D, self.kv_heads * D)
        self.widths, self.merge_qkv = widths, merge_qkv
        # No fused pass computes as PyTorch does.
        self.apart = ops.numerics.rmsnorm_native or ops.numerics.rope_native
        if merge_qkv:
            self.qkv_proj = Linear(H, sum(widths), bias=False)
        else:
            self.q_proj, self.k_proj, self.v_proj = (Linear(H, n, bias=False) for n in widths)
        self.o_proj = Linear(widths[0], H, bias=False)
        self.qk_norm = config.model_type != "llama"
        if self.qk_norm:
            self.q_norm = RMSNorm(D, config.rms_norm_eps, implementation=ops.rmsnorm)
            self.k_norm = RMSNorm(D, config.rms_norm_eps, implementation=ops.rmsnorm)
        self.cp, self.tp = ContextParallel(), TensorParallel()

    def forward(self, x: torch.Tensor, sequence: Sequence) -> torch.Tensor:
        apart = self.breaks and sequence.cu_seqlens is not None
        attend = self._attend_uncompiled if apart else self._attend
        return self.output(attend(*self.project(x, sequence), sequence))

    @property
    def breaks(self) -> bool:
        """Whether attention over packed documents stays outside a compiled graph.

        A loop over documents would recompile for each number of them, and ranks that share a
        sequence wait for each other.
        """
        return self.ops.attention == "sdpa" or self.cp.size > 1

    def project(
        self, x: torch.Tensor, sequence: Sequence
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Projects x [B, S, H] to q, k and v, [B, heads, S, D]: this rank's heads."""
        x = self.tp.gather(x)
        if self.merge_qkv and not self.apart:
            q, k, v = self._heads_of_merged(self.qkv_proj(x), sequence)
        elif self.merge_qkv:
            q, k, v = self._heads(*self.qkv_proj(x).split(self.widths, -1), sequence)
        else:
            q, k, v = self._heads(self.q_proj(x), self.k_proj(x), self.v_proj(x), sequence)
        if self.ops.numerics.attention_cast_bf16:  # and back: attention takes one dtype
            q, k = (t.bfloat16().to(t.dtype) for t in (q, k))
        return q, k, v

    def output(self, attended):
        """Projects attention's result [B, heads, S, D] to [B, S, H]."""
        return self.tp.reduce_scatter(self.o_proj(attended.transpose(1, 2).flatten(2)))

    def _attend(self, q, k, v, sequence):
        if self.cp.size > 1:
            return context_parallel_attention(
                q,
                k,
                v,
                self.cp,
                cu_seqlens=sequence.cu_seqlens,
                ends=sequence.ends,
                implementation=self.ops.attention,
            )
        return tw.attention(
            q,
            k,
            v,
            cu_seqlens=sequence.cu_seqlens,
            max_seqlen=sequence.longest,
            implementation=self.ops.attention,
        )

    @torch.compiler.disable
    def _attend_uncompiled(self, *args):
        return self._attend(*args)

    def _heads(self, q, k, v, sequence):
        """Attention's inputs [B, heads, S, D] from the three projections."""
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        rotated = tw.rope(
            q,
            k,
            sequence.cos,
            sequence.sin,
            position_ids=sequence.position_ids,
            implementation=self.ops.rope,
        )
        return *rotated, v

    def _heads_of_merged(self, qkv, sequence):
        """The same from the merged projection, in one pass; the norms' modules hold weights
        only.
        """
        norms = {}
        if self.qk_norm:
            norms = {
                "q_weight": self.q_norm.weight,
                "k_weight": self.k_norm.weight,
                "eps": self.q_norm.eps,
            }
        return tw.qk_norm_rope(
            qkv,
            sequence.cos,
            sequence.sin,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            position_ids=sequence.position_ids,
            implementation=self.ops.qk_norm_rope,
            **norms,
        )


class MLP(SwiGLU):
    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__(config.hidden_size, config.intermediate_size, implementation=ops.silu_mul)
        self.tp = TensorParallel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.reduce_scatter(super().forward(self.tp.gather(x)))
