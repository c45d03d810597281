"""The block of a decoder: attention and an MLP, or experts, which add to the residual stream, and
the norms before and after each. `Architecture.block` composes that of a family.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import nn

from tilewright.trainer.models.layers import MLP, AddRMSNorm, Attention, Place, norm
from tilewright.trainer.models.masks import AFTER_ATTENTION, AFTER_MLP
from tilewright.trainer.models.moe import MoE, feed_forward


class Norms(NamedTuple):
    """The names of a block's norms, as on disk; None: there is no such norm."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


PRE_NORM = Norms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")


class Block(nn.Module):
    """Returns the layer's output, the residual stream and, with experts, the router's report."""

    def __init__(
        self,
        place: Place,
        attention: Attention | None = None,
        mlp: MLP | MoE | None = None,
        norms: Norms = PRE_NORM,
    ):
        """attention, mlp: default: Llama's, and experts where the configuration has some."""
        super().__init__()
        config, ops = place.config, place.ops
        self.layer, self.norms = place.layer, norms
        # The seed of a parameter's initial values depends on the order in which modules are added.
        if norms.before_attention is not None:
            self.add_module(norms.before_attention, AddRMSNorm(config, ops))
        self.self_attn = Attention(place) if attention is None else attention
        if norms.after_attention is not None:
            self.add_module(norms.after_attention, norm(config, ops, config.hidden_size))
        if norms.before_mlp is not None:
            self.add_module(norms.before_mlp, AddRMSNorm(config, ops))
        if norms.after_mlp is not None:
            self.add_module(norms.after_mlp, norm(config, ops, config.hidden_size))
        self.mlp = feed_forward(place) if mlp is None else mlp

    def before(self, name, x, residual):
        """What attention or the MLP reads, and the residual stream, of which x is the last part."""
        if name is not None:
            return getattr(self, name)(x, residual)
        total = x if residual is None else x + residual
        return total, total

    def after(self, name, x):
        return x if name is None else getattr(self, name)(x)

    def before_mlp(self, x, residual, sequence):
        norms = self.norms
        x, residual = self.before(norms.before_attention, x, residual)
        x = self.after(norms.after_attention, self.self_attn(x, sequence))
        x, residual = self.added(x, residual, sequence.masks, AFTER_ATTENTION)
        return self.before(norms.before_mlp, x, residual)

    def added(self, x, residual, masks, site):
        """x and the residual stream that it is added to; with dropout their sum, and None."""
        if masks is None or not masks.hidden:
            return x, residual
        return masks.add(x, residual, self.layer, site), None

    def forward(self, x, residual, sequence, routes=None, kept=None):
        """routes, kept: as in `MoE.forward`."""
        real = sequence.real
        x, residual = self.before_mlp(x, residual, sequence)
        masks, report = sequence.masks, ()
        if isinstance(self.mlp, MoE):
            more = () if kept is None else (kept,)
            x, *report = self.mlp(x, routes, real, *more)
        elif masks is None or not masks.ffn:
            x = self.mlp(x)
        else:
            x = self.mlp(x, functools.partial(masks.within, layer=self.layer, tp=self.mlp.tp))
        x = self.after(self.norms.after_mlp, x)
        return *self.added(x, residual, masks, AFTER_MLP), *report
