"""The layers of a dense decoder: norms on the residual stream, attention, and the MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from tilewright import ops as tw
from tilewright.core.torch_names import uncompiled
from tilewright.nn import Linear, RMSNorm, SwiGLU
from tilewright.nn.sharded import local
from tilewright.ops.attention.context_parallel import ContextParallel, context_parallel_attention
from tilewright.ops.attention.ulysses import over_heads
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.models.positions import Sequence
from tilewright.trainer.models.shared import TensorParallel


class Place(NamedTuple):
    """What a layer's parts are made from.   layer: its number."""

    config: ModelConfig
    ops: Ops
    layer: int = 0
    merge_qkv: bool = True


class AddRMSNorm(RMSNorm):
    """Adds to the residual stream and normalizes the sum. Returns (normalized, sum).

    A residual of None is zero.
    """

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__(config.hidden_size, **options_of_norm(config, ops))
        self.add_implementation, self.native = ops.add_rmsnorm, ops.numerics.rmsnorm_native

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return super().forward(x), x
        if self.native:
            total = x + residual
            return super().forward(total), total
        # Autocast would widen both to float32 on a GPU, and products narrow the result again: two
        # more passes over memory each. The sum is computed and kept in the residual stream's dtype
        # either way, and the bits that products read are the same.
        with torch.autocast(x.device.type, enabled=False):
            return tw.add_rmsnorm(
                x,
                residual,
                local(self.weight),
                self.eps,
                offset=self.offset,
                cast=self.cast,
                implementation=self.add_implementation,
            )


def norm(config: ModelConfig, ops: Ops, size: int) -> RMSNorm:
    """A norm of the model's kind, of another vector than the residual stream."""
    return RMSNorm(size, **options_of_norm(config, ops))


def options_of_norm(config: ModelConfig, ops: Ops) -> dict[str, Any]:
    family = config.architecture
    return {
        "eps": config.rms_norm_eps,
        "offset": family.norm_offset,
        "cast": family.norm_cast,
        "implementation": ops.rmsnorm,
    }


class Attention(nn.Module):
    """Grouped queries, with what the model's family adds: biases, norms of queries and keys, sinks,
    a window, a rotation of the first features of a head alone.
    """

    # Why ranks cannot have some of the heads each; None: they can.
    undivided: str | None = None

    def __init__(
        self,
        place: Place,
        *,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        output_bias: bool = False,
        interleaved: bool = False,
        scale: float | None = None,
    ):
        """qk_norm: of each head.   interleaved: neighbors are rotated, as in `ops.rope`.
        scale: the factor of the logits; None: head_dim ** -0.5.
        """
        super().__init__()
        config = place.config
        self.heads, self.kv_heads, self.head_dim, self.ops = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            place.ops,
        )
        sinks = config.architecture.sinks
        self.sinks = nn.Parameter(torch.empty(self.heads)) if sinks else None
        self.layer, self.local = place.layer, config.is_local(place.layer)
        self.window = config.sliding_window if self.local else None
        self.scale = scale
        self.qk_norm, self.qkv_bias, self.output_bias = qk_norm, qkv_bias, output_bias
        rotary_dim = None if config.rope_dim == config.head_dim else config.rope_dim
        self.rotation = {"interleaved": interleaved, "rotary_dim": rotary_dim}
        self.cp, self.tp = ContextParallel(), TensorParallel()
        self.add_projections(config, place.merge_qkv)

    def add_projections(self, config: ModelConfig, merge_qkv: bool) -> None:
        H, D = config.hidden_size, config.head_dim
        widths = (self.heads * D, self.kv_heads * D, self.kv_heads * D)
        self.widths, self.merge_qkv = widths, merge_qkv
        # No fused pass computes as PyTorch does.
        numerics, bias = self.ops.numerics, self.qkv_bias
        self.apart = numerics.rmsnorm_native or numerics.rope_native
        if merge_qkv:
            self.qkv_proj = Linear(H, sum(widths), bias=bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (Linear(H, n, bias=bias) for n in widths)
        self.o_proj = Linear(widths[0], H, bias=self.output_bias)
        if self.qk_norm:
            self.q_norm, self.k_norm = (norm(config, self.ops, D) for _ in "qk")

    def forward(self, x: torch.Tensor, sequence: Sequence) -> torch.Tensor:
        apart = (self.breaks or sequence.prefixes) and sequence.cu_seqlens is not None
        # `torch.compiler.disable` returns something without a type.
        attend: Any = self._attend_uncompiled if apart else self._attend
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
            q, k, v = self.qkv_proj(x).split(self.widths, -1)
            q, k, v = self._heads(q, k, v, sequence)
        else:
            q, k, v = self._heads(self.q_proj(x), self.k_proj(x), self.v_proj(x), sequence)
        return *self.rounded(q, k), v

    def rounded(self, q, k):
        """Queries and keys, in bfloat16 if the numerics say so, and back: attention takes one
        dtype.
        """
        if not self.ops.numerics.attention_cast_bf16:
            return q, k
        return q.bfloat16().to(q.dtype), k.bfloat16().to(k.dtype)

    def output(self, attended):
        """Projects attention's result [B, heads, S, D] to [B, S, H]."""
        return self.tp.reduce_scatter(self.o_proj(attended.transpose(1, 2).flatten(2)))

    def _attend(self, q, k, v, sequence):
        options = {
            "cu_seqlens": sequence.cu_seqlens,
            "window": self.window,
            "scale": self.scale,
            "sinks": None if self.sinks is None else self.tp.own(local(self.sinks)),
            "prefixes": sequence.prefixes,
            "implementation": self.ops.attention,
        }
        masks = sequence.masks
        if masks is not None and masks.attention:
            return self._dropped(q, k, v, sequence, masks, options)
        if self.cp.size > 1:
            # A ring's sums depend on where it cuts a document, which the batch decides.
            options["whole_documents"] = self.ops.numerics.batch_invariant
            return context_parallel_attention(q, k, v, self.cp, ends=sequence.ends, **options)
        return tw.attention(q, k, v, max_seqlen=sequence.longest, **options)

    def _dropped(self, q, k, v, sequence, masks, options):
        """Attention with dropout, of each bin by itself."""
        part = self.tp.part_of_heads * self.cp.ulysses_size + self.cp.ulysses_rank
        options["max_seqlen"] = sequence.longest

        def of_heads(q, k, v, sinks):
            def of_bin(a: int, b: int, dropout: dict[str, Any]) -> torch.Tensor:
                own = (t[:, :, a:b] for t in (q, k, v))
                of_call = dropout | {"cu_seqlens": sequence.documents(a, b), "sinks": sinks}
                return tw.attention(*own, **options | of_call)

            return masks.attend(of_bin, self.layer, part * q.shape[1])

        return over_heads(q, k, v, options["sinks"], self.cp.ulysses, of_heads)

    @uncompiled
    def _attend_uncompiled(self, *args):
        return self._attend(*args)

    def _heads(self, q, k, v, sequence):
        """Attention's inputs [B, heads, S, D] from the three projections."""
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        q, k = self.normalized(q, k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        rotated = tw.rope(
            q,
            k,
            *sequence.angles(self.local),
            **self.rotation,
            position_ids=sequence.rows,
            implementation=self.ops.rope,
        )
        return *rotated, v

    def normalized(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [B, S, heads, D] with their norms."""
        return (self.q_norm(q), self.k_norm(k)) if self.qk_norm else (q, k)

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
                "offset": self.q_norm.offset,
            }
        q, k, v = tw.qk_norm_rope(
            qkv,
            *sequence.angles(self.local),
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            **self.rotation,
            position_ids=sequence.rows,
            implementation=self.ops.qk_norm_rope,
            **norms,
        )
        if v.requires_grad and not self.qk_norm:
            # A view would keep the whole projection for backward, which nothing else needs.
            v = v.transpose(1, 2).contiguous().transpose(1, 2)
        return q, k, v


class MLP(SwiGLU):
    """down(a(gate(x)) * up(x)), where a is SiLU, or GELU approximated by tanh."""

    def __init__(self, place: Place, inner: int | None = None, *, activation: str = "silu"):
        """inner: default: the model's intermediate_size.   activation: "silu" or "gelu"."""
        config, ops = place.config, place.ops
        super().__init__(
            config.hidden_size,
            config.intermediate_size if inner is None else inner,
            implementation=ops.silu_mul,
        )
        self.gelu = ops.gelu_mul if activation == "gelu" else None
        self.tp = TensorParallel()

    def forward(
        self, x: torch.Tensor, drop: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """drop: of the inner activations."""
        gated = self.gated(x)
        return self.output(gated if drop is None else drop(gated))

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """The inner activations: of this rank's columns."""
        gate_up = self.gate_up_proj(self.tp.gather(x))
        if self.gelu is None:
            return tw.silu_mul(gate_up, implementation=self.implementation)
        return tw.gelu_mul(gate_up, approximate="tanh", implementation=self.gelu)

    def output(self, gated: torch.Tensor) -> torch.Tensor:
        return self.tp.reduce_scatter(self.down_proj(gated))
