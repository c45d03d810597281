"""Decoder-only transformers, written on tilewright's ops, of the families in `families`.

Parameter names are Hugging Face's, except what is fused: qkv_proj [q; k; v], gate_up_proj [gate;
up], and the experts' gate_up_proj [E, 2 I, H] and down_proj [E, H, I]; `checkpoint.hf` converts.
Shape suffixes: B batch, S sequence, T = B S tokens, H hidden, V vocabulary, E experts, K experts
per token, I inner width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from tilewright.nn import in_row_blocks
from tilewright.nn.sharded import local
from tilewright.ops.attention.context_parallel import ContextParallel
from tilewright.ops.attention.prefixes import Prefix
from tilewright.trainer.models.block import Block
from tilewright.trainer.models.head import (
    LANGUAGE_MODEL,
    AdaptedHead,
    Around,
    Head,
    LossFunction,
    OfSequence,
    Shaping,
    TokenLosses,
)
from tilewright.trainer.models.layers import AddRMSNorm, Place
from tilewright.trainer.models.masks import Masks
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.moe import MoE
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.models.positions import Sequence
from tilewright.trainer.models.reward_head import REWARD
from tilewright.trainer.models.shared import TensorParallel

# Items of a batch that no loss reads.
OF_SEQUENCE = ("cu_seqlens", "ends", "prefixes", "routed_experts", "real", "masks", "labeled")
HEADS: dict[str, Head] = {"language_model": LANGUAGE_MODEL, "reward": REWARD}


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, ops: Ops, merge_qkv: bool):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        family = config.architecture
        self.layers = nn.ModuleList(
            (family.block or Block)(Place(config, ops, i, merge_qkv))
            for i in range(config.num_hidden_layers)
        )
        self.norm = AddRMSNorm(config, ops)
        # As transformers rounds it: to the dtype of the embedding.
        self.scale = config.hidden_size**0.5 if family.scaled_embedding else None
        # Reentrant checkpointing computes gradients only if an input requires them.
        self.inputs_need_gradients = False

    @property
    def blocks(self) -> list[Block]:
        """`layers`, as what they are."""
        return cast(list[Block], list(self.layers))

    def forward(
        self, input_ids: torch.Tensor, sequence: Sequence
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [B, S, H], and the routers' reports [layers with experts, 2 E + 2]."""
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
        """The last layer's output and residual stream, whose sum is the input of a further layer
        (with dropout the sum, and None); and the routers' reports.
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


class Outcome(NamedTuple):
    """A loss on one micro-batch. Its tensors are this rank's.

    total: the summed loss.   per_token: [B, S], detached; None if the loss used the sum alone.
    reports: the routers', see `MoE.forward`.   more: the loss's further sums.
    """

    total: torch.Tensor
    denominator: torch.Tensor
    per_token: torch.Tensor | None = None
    reports: torch.Tensor | None = None
    more: tuple[torch.Tensor, ...] = ()


class Transformer(nn.Module):
    """A decoder with the head that its configuration names.

    For FSDP2, build it under torch.device("meta"), then call `to_empty` and
    `initialize.init_weights`.
    """

    def __init__(self, config: ModelConfig, ops: Ops, merge_qkv: bool = True):
        super().__init__()
        self.config, self.ops, self.merge_qkv = config, ops, merge_qkv
        self.model = Decoder(config, ops, merge_qkv)
        self.head = HEADS[config.head]
        # Beside layers' projections: the fused losses compute its adapter.
        self.adaptable = (self.head.module,) if config.head == "language_model" else ()
        self.one_adapter = config.architecture.stored.fused
        layer = nn.Linear(config.hidden_size, self.head.rows(config), bias=False)
        self.add_module(self.head.module, layer)
        self.cp, self.tp = ContextParallel(), TensorParallel()
        self.shaping = Shaping()
        self.everywhere: dist.ProcessGroup | None = None  # the ranks whose losses are added
        if ops.numerics.batch_invariant:
            in_row_blocks(self)
        self.tie()

    @property
    def head_layer(self) -> nn.Linear | AdaptedHead | None:
        """None on a stage of a pipeline that is not the last."""
        return cast(nn.Linear | AdaptedHead | None, getattr(self, self.head.module))

    def tie(self) -> None:
        """Shares the embedding with the head again; call it after `to_empty`, which separates
        them.
        """
        if self.config.tied and (layer := self.head_layer) is not None:
            plain = layer.base if isinstance(layer, AdaptedHead) else layer
            plain.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        labels: torch.Tensor | None = None,
        loss: LossFunction | None = None,
        **batch: Any,
    ) -> torch.Tensor | Outcome:
        """Logits [B, S, V], or scores [B, S, 1] of a reward model (float32 with `lm_head_fp32`);
        with labels the mean loss per token of a language model; with a loss its `Outcome`.

        Args:
            input_ids: [B, S]; with cu_seqlens [n + 1], packed documents and B = 1.
            labels: [B, S], already shifted: labels[t] is the token that follows t; -100 is ignored.
            loss: see `losses.loss`; called with what the head gives and the batch.
            batch: what `sequence` takes, and further tensors for the loss.
        """
        sequence = self.sequence(input_ids, **batch)
        hidden, reports = self.model(input_ids, sequence)
        if labels is None:
            return self.head.outputs(hidden, *self._around())
        if loss is not None:
            batch["position_ids"] = sequence.position_ids
            batch |= {"input_ids": input_ids, "labels": labels}
            return self.outcome(hidden, loss, batch)._replace(reports=reports)
        values = self.values(hidden, labels, batch.get("labeled"))
        if not isinstance(values, TokenLosses):
            raise ValueError("labels: a reward model has no loss of its own; give `loss` too")
        return values.reduced("mean")

    def sequence(
        self,
        input_ids: torch.Tensor,
        *,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        ends: tuple[int, ...] | None = None,
        prefixes: tuple[Prefix, ...] = (),
        routed_experts: torch.Tensor | None = None,
        real: torch.Tensor | None = None,
        masks: Masks | None = None,
        **_: Any,
    ) -> Sequence:
        """What the layers get of a batch beside hidden states.

        Args:
            input_ids: [B, S].
            position_ids: [B, S]; default: from 0 in every document.
            cu_seqlens, ends: see `Sequence`. With context parallelism they describe the whole
                sequence, and all other tensors are this rank's shard.
            prefixes: as in `ops.attention`; position_ids say where documents go on.
            routed_experts: [1, S, layers with experts x K]: recorded routes, which are replayed; -1
                for a token that is routed as usual.
            real: bool [B, S], false for padding, which routers' reports leave out; default: none
                is.
            masks: masks of dropout, which is off outside of training; with ends, and those of
                attention not with a ring.
        """
        sequence = Sequence.of(
            input_ids,
            self.config,
            self.cp,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            ends=ends,
            prefixes=prefixes,
        )
        sequence.masks = masks if self.training else None
        # Those of the tokens that this rank has in each layer.
        if routed_experts is not None:
            own = self.tp.own(routed_experts[0]).T.contiguous()
            sequence.routes = own.unflatten(0, (-1, self.config.num_experts_per_tok))
        if real is not None:
            sequence.real = self.tp.own(real.T).T.flatten()
        return sequence

    def outcome(
        self, hidden: torch.Tensor, loss: LossFunction, batch: Mapping[str, Any]
    ) -> Outcome:
        """A loss of the final hidden states, this rank's shard; without reports. It does not get
        what of a batch `sequence` alone reads.
        """
        per_token = self.values(hidden, batch["labels"], batch.get("labeled"))
        seen = {name: t for name, t in batch.items() if name not in OF_SEQUENCE}
        total, denominator, *more = loss(per_token, seen)
        values = None if per_token.computed is None else per_token.computed.detach()
        denominator, *more = (torch.as_tensor(t, device=total.device) for t in (denominator, *more))
        return Outcome(total, denominator, values, more=tuple(t.detach() for t in more))

    def values(
        self, hidden: torch.Tensor, labels: torch.Tensor, labeled: torch.Tensor | None = None
    ) -> OfSequence:
        """What the head gives losses.   hidden: this rank's shard of the final hidden states.
        labeled: see `head.labeled_rows`.
        """
        weight, around = self._around()
        return self.head.values(hidden, weight, labels, around._replace(labeled=labeled))

    def _around(self) -> tuple[torch.Tensor, Around]:
        """The head's weight, and what it computes with."""
        layer, adapted = self.head_layer, None
        assert layer is not None  # a pipeline's last stage computes it
        if isinstance(layer, AdaptedHead):
            layer, adapted = layer.base, layer
        return local(layer.weight), Around(
            self.ops,
            self.tp,
            self.cp.groups,
            self.shaping,
            self.everywhere,
            adapted,
            self.config.pad_token_id,
        )
