"""Activation checkpointing of a model's layers."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from tilewright.nn.lora_experts import LoRAExperts
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.moe import Experts, MoE
from tilewright.trainer.models.recompute import recompute
from tilewright.trainer.parallel.fields import Compute
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.parallel.row import LAYOUTS, Layout


def recompute_activations(
    model: Transformer,
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
    model.model.inputs_need_gradients = reentrant
    for block in model.model.blocks:
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


def _is_spread(experts: Experts | LoRAExperts) -> bool:
    return experts.group is not None


def _apply(parts: Parts, mesh: Mesh, train: Compute) -> None:
    recompute_activations(
        parts.model,
        train.recompute_modules,
        train.enable_reentrant,
        train.moe_checkpoint_method == "moe_act",
    )


LAYOUTS.add(
    "recomputation",
    Layout(
        50,
        lambda mesh, train: train.enable_gradient_checkpointing,
        _apply,
        (Compute,),
    ),
)
