"""Decoder-only transformers, written on tilewright's ops, of the families in `architectures`.

Parameter names are Hugging Face's, except what is fused: qkv_proj [q; k; v], gate_up_proj [gate;
up], and the experts' gate_up_proj [E, 2 I, H] and down_proj [E, H, I]; `hf.py` converts. Shape
suffixes: B batch, S sequence, T = B S tokens, H hidden, V vocabulary, E experts, K experts per
token, I inner width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tilewright.nn import in_row_blocks
from tilewright.nn.lora_experts import LoRAExperts
from tilewright.nn.quantized_layers import quantize_as
from tilewright.nn.sharded import local
from tilewright.nn.weights import adapted, base_weights, fill, is_adapter, quantized, shape_of
from tilewright.ops.attention.context_parallel import ContextParallel
from tilewright.trainer.losses.loss import Loss, TokenLosses, logits
from tilewright.trainer.models.latent_attention import LatentAttention
from tilewright.trainer.models.layers import MLP, Attention, norm, residual_norm
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.moe import Experts, MoE
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.models.positions import Sequence
from tilewright.trainer.parallel.recompute import recompute
from tilewright.trainer.parallel.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from tilewright.trainer.parallel.pipeline import Pipeline


class Block(nn.Module):
    """Returns the layer's output, the residual stream and, with experts, the router's report."""

    def __init__(self, config: ModelConfig, ops: Ops, layer: int, merge_qkv: bool):
        super().__init__()
        self.input_layernorm = residual_norm(config, ops)
        attention = Attention if config.latent is None else LatentAttention
        self.self_attn = attention(config, ops, merge_qkv, layer)
        # Names of Gemma where results are normalized, too: else the norm before the MLP is called
        # after attention.
        self.norms_after = config.architecture.norms_after
        if self.norms_after:
            self.post_attention_layernorm = norm(config, ops, config.hidden_size)
            self.pre_feedforward_layernorm = residual_norm(config, ops)
            self.post_feedforward_layernorm = norm(config, ops, config.hidden_size)
        else:
            self.post_attention_layernorm = residual_norm(config, ops)
        before = sum(config.is_moe(i) for i in range(layer))
        self.mlp = MoE(config, ops, before) if config.is_moe(layer) else MLP(config, ops)

    def before_mlp(self, x, residual, sequence):
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, sequence)
        if self.norms_after:
            return self.pre_feedforward_layernorm(self.post_attention_layernorm(x), residual)
        return self.post_attention_layernorm(x, residual)

    def forward(self, x, residual, sequence, routes=None, kept=None):
        """routes, kept: as in `MoE.forward`."""
        x, residual = self.before_mlp(x, residual, sequence)
        if not isinstance(self.mlp, MoE):
            x = self.mlp(x)
            return (self.post_feedforward_layernorm(x) if self.norms_after else x), residual
        x, report = self.mlp(x, routes) if kept is None else self.mlp(x, routes, kept)
        return x, residual, report


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, ops: Ops, merge_qkv: bool):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, ops, i, merge_qkv) for i in range(config.num_hidden_layers)
        )
        self.norm = residual_norm(config, ops)
        # As transformers rounds it: to the dtype of the embedding.
        self.scale = config.hidden_size**0.5 if config.architecture.scaled_embedding else None
        # Reentrant checkpointing computes gradients only if an input requires them.
        self.inputs_need_gradients = False

    @property
    def blocks(self) -> list[Block]:
        """`layers`, as what they are."""
        return cast(list[Block], list(self.layers))

    def forward(
        self, input_ids: torch.Tensor, sequence: Sequence
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [B, S, H], and the routers' reports [layers with experts, E + 2]."""
        x, residual, reports = self.through(self.layers, self.embed(input_ids), sequence)
        return self.norm(x, residual)[0], reports

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        if self.scale is not None:
            x = x * torch.tensor(self.scale, dtype=x.dtype, device="cpu").item()
        if self.inputs_need_gradients and torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_()
        return x

    def through(
        self, layers: Iterable[nn.Module], x: torch.Tensor, sequence: Sequence
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The last layer's output and residual stream, whose sum is the input of a further layer;
        and the routers' reports.
        """
        residual, reports = None, []
        for layer in layers:
            more = []
            if sequence.routes is not None and isinstance(layer.mlp, MoE):
                # Selected here: compiled code would be recompiled for each layer's number.
                more = [sequence.routes[layer.mlp.number]]
            x, residual, *report = layer(x, residual, sequence, *more)
            reports += report
        return x, residual, torch.stack(reports) if reports else None


def _initial(name: str, norm_offset: float) -> float | None:
    """The constant that a parameter is initialized with; None: a random one."""
    if name.endswith("norm.weight"):
        return 1.0 - norm_offset
    return 0.0 if name.endswith("bias") else None


def _is_spread(experts: Experts | LoRAExperts) -> bool:
    return experts.group is not None


class Outcome(NamedTuple):
    """A loss on one micro-batch. Its tensors are this rank's.

    total: the summed loss.   per_token: [B, S], detached; None if the loss used the sum alone.
    reports: the routers', see `MoE.forward`.
    """

    total: torch.Tensor
    denominator: torch.Tensor
    per_token: torch.Tensor | None
    reports: torch.Tensor | None


class Transformer(nn.Module):
    """A causal language model.

    For FSDP2, build it under torch.device("meta"), then call `to_empty` and `init_weights`.
    """

    def __init__(self, config: ModelConfig, ops: Ops, merge_qkv: bool = True):
        super().__init__()
        self.config, self.ops, self.merge_qkv = config, ops, merge_qkv
        self.model = Decoder(config, ops, merge_qkv)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.cp, self.tp = ContextParallel(), TensorParallel()
        self.pipeline: Pipeline | None = None  # this rank's stages, if it has not all layers
        self.origin: str | None = None  # identifies the weights that were read from a folder
        self.merged = False  # whether adapters have been merged into them since
        if ops.numerics.batch_invariant:
            in_row_blocks(self)
        self.tie()

    @property
    def whole(self) -> Transformer:
        """The model; of a pipeline's stages, one with all layers, on meta."""
        return self if self.pipeline is None else self.pipeline.whole

    def tie(self) -> None:
        """Shares the embedding with the head again; call it after `to_empty`, which separates
        them.
        """
        if self.config.tie_word_embeddings and self.lm_head is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def init_weights(self, seed: int, std: float = 0.02) -> None:
        """Draws normal weights; norms scale by one, and biases are zero.

        Each parameter has its own generator, so its values depend on the seed and its name only,
        not on how the model is sharded. Adapters are unchanged.
        """
        with torch.device("meta"):  # without adapters, which are initialized separately
            bare = Transformer(self.config, self.ops, self.merge_qkv)
        order = [name for name, _ in bare.named_parameters()]
        for name, p in base_weights(self):
            constant = _initial(name, self.config.architecture.norm_offset)
            if constant is not None:
                assert isinstance(p, nn.Parameter)  # norms and biases are not quantized
                p.fill_(constant)
                continue
            generator = torch.Generator(device="cpu").manual_seed(
                seed * 1_000_003 + order.index(name)
            )
            full = torch.randn(shape_of(p), generator=generator) * std
            if not isinstance(p, nn.Parameter):
                like = quantized(p)[0]
                fill(p, [quantize_as(like, full.to(like.device))])
            elif isinstance(p, DTensor):
                p.copy_(distribute_tensor(full.to(p.device, p.dtype), p.device_mesh, p.placements))
            else:
                p.copy_(full)

    def recompute_activations(
        self,
        modules: Collection[str] | None = None,
        reentrant: bool = False,
        experts_alone: bool = False,
    ) -> None:
        """Recomputes whole layers (None), or only "self_attn" and/or "mlp" of each.

        experts_alone: in layers with experts, recomputes the part before the router as usual, and
        after it only the experts' computation: the routing is saved, and no token is sent to its
        experts a second time. Call it after compilation, which wraps the inner functions.
        """
        if unknown := set(modules or ()) - {"self_attn", "mlp"}:
            raise ValueError(f"recompute_modules accepts self_attn and mlp, got {sorted(unknown)}")
        self.model.inputs_need_gradients = reentrant
        for block in self.model.blocks:
            experts = block.mlp.experts if isinstance(block.mlp, MoE) else None
            names = set(modules or ("layer",))
            if experts_alone and experts is not None and names & {"layer", "mlp"}:
                experts.recompute = True
                names = {"before_mlp"} if "layer" in names else names - {"mlp"}
            keeps = None if experts is None else partial(_is_spread, experts)
            for name, module, method, communicates in (
                ("layer", block, "forward", True),
                ("before_mlp", block, "before_mlp", False),
                ("self_attn", block.self_attn, "forward", False),
                ("mlp", block.mlp, "forward", True),
            ):
                if name in names:
                    wrap = keeps if communicates else None
                    recompute(module, method, reentrant=reentrant, keeps=wrap)

    def spread_sequence(self, cp: ContextParallel) -> None:
        """Shards sequences: each rank of `cp` is called with its own shard.

        Raises ValueError if the heads cannot be sharded accordingly.
        """
        sharing = min(block.self_attn.tp.heads for block in self.model.blocks)
        heads = self.config.num_attention_heads // sharing
        if heads % cp.ulysses_size:
            of = f" of a tensor-parallel rank (of {sharing})" if sharing > 1 else ""
            raise ValueError(
                f"train.ulysses_parallel_size = {cp.ulysses_size}: the model's {heads} query "
                f"heads{of} do not divide by {cp.ulysses_size}"
            )
        self.cp = cp
        for block in self.model.blocks:
            block.self_attn.cp = cp

    def freeze_router(self) -> None:
        """Freezes the routers' weights. Raises ValueError without experts."""
        gates = [block.mlp.gate for block in self.model.blocks if isinstance(block.mlp, MoE)]
        if not gates:
            raise ValueError("train.freeze_router = True: the model has no experts")
        for gate in gates:
            gate.requires_grad_(False)

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        ends: tuple[int, ...] | None = None,
        routed_experts: torch.Tensor | None = None,
        loss: Loss | None = None,
        **more: Any,
    ) -> torch.Tensor | Outcome:
        """Logits [B, S, V] (float32 with `lm_head_fp32`); with labels the mean loss per token; with
        a loss its `Outcome`.

        Args:
            input_ids: [B, S]; with cu_seqlens [n + 1], packed documents and B = 1.
            labels: [B, S], already shifted: labels[t] is the token that follows t; -100 is ignored.
            position_ids: [B, S]; default: from 0 in every document.
            cu_seqlens, ends: see `Sequence`. After `spread_sequence` they describe the whole
                sequence, and all other tensors are this rank's shard.
            routed_experts: [1, S, layers with experts x K]: recorded routes, which are replayed; -1
                for a token that is routed as usual.
            loss: see `loss.py`; called with the head's values and all of these tensors.
            more: further tensors of the batch, for the loss.
        """
        sequence = Sequence.of(
            input_ids,
            self.config,
            self.cp,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            ends=ends,
        )
        sequence.routes = self.routes(routed_experts)
        hidden, reports = self.model(input_ids, sequence)
        if labels is None:
            own = logits(self.tp.gather(hidden), local(self.lm_head.weight), self.ops)
            return self.tp.gather_for_all(own.transpose(1, 2)).transpose(1, 2)
        batch = {"input_ids": input_ids, "labels": labels, **more}
        if loss is not None:
            return self.outcome(hidden, loss, batch)._replace(reports=reports)
        return self.token_losses(hidden, labels).reduced("mean")

    def routes(self, routed_experts: torch.Tensor | None) -> torch.Tensor | None:
        """A batch's, as `Sequence` has them: of the tokens that this rank has in each layer."""
        if routed_experts is None:
            return None
        own = self.tp.own(routed_experts[0])
        K = self.config.num_experts_per_tok
        return own.T.contiguous().unflatten(0, (-1, K))

    def outcome(self, hidden: torch.Tensor, loss: Loss, batch: Mapping[str, Any]) -> Outcome:
        """A loss of the final hidden states, this rank's shard; without reports."""
        per_token = self.token_losses(hidden, batch["labels"])
        total, denominator = loss(per_token, batch)
        values = None if per_token.computed is None else per_token.computed.detach()
        return Outcome(total, denominator, values, None)

    def token_losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> TokenLosses:
        """hidden: this rank's shard of the final hidden states."""
        weight, group = local(self.lm_head.weight), self.tp.group
        return TokenLosses(self.tp.gather_for_all(hidden), weight, labels, self.ops, group)

    def flops_per_token(self, sequence: int) -> float:
        """Floating-point operations per token, forward and backward, counting the experts that a
        token is routed to.
        """
        c = self.config
        layers = range(c.num_hidden_layers)
        dense = 3 * c.hidden_size * c.intermediate_size
        sparse = (
            3
            * c.hidden_size
            * c.moe_intermediate_size
            * (c.num_experts_per_tok + (c.n_shared_experts or 0))
            + c.hidden_size * c.num_experts
        )
        mlp = sum(sparse if c.is_moe(i) else dense for i in layers)
        attention, per_key = c.attention_work()
        matrix = c.num_hidden_layers * attention + mlp + c.hidden_size * c.vocab_size
        score = per_key * sum(c.keys_seen(i, sequence) for i in layers)
        # Two per multiply-add in the forward, and two again for each factor's gradient; a frozen
        # matrix has none.
        routed = c.num_experts_per_tok / max(1, c.num_experts)
        adapters = sum(
            p.numel() * (routed if isinstance(module, LoRAExperts) else 1.0)
            for _, module in adapted(self)
            for name, p in module.named_parameters()
            if is_adapter(name)
        )
        return (4.0 if adapters else 6.0) * matrix + 6.0 * (score + adapters)
