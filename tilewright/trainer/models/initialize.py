"""Random weights of a model."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from tilewright.nn.quantized_layers import quantize_as
from tilewright.nn.sharded import assign
from tilewright.nn.weights import base_weights, fill, quantized, shape_of
from tilewright.trainer.models.model import Transformer


@torch.no_grad()
def init_weights(
    model: Transformer, seed: int, std: float = 0.02, only: Collection[str] | None = None
) -> None:
    """Draws normal weights; norms scale by one, and biases are zero.

    Each parameter has its own generator, so its values depend on the seed and its name only,
    not on how the model is sharded. Adapters are unchanged.

    only: the names of the parameters; None: all.
    """
    with torch.device("meta"):  # without adapters, which are initialized separately
        bare = Transformer(model.config, model.ops, model.merge_qkv)
    order = [name for name, _ in bare.named_parameters()]
    for name, p in base_weights(model):
        if only is not None and name not in only:
            continue
        constant = _initial(name, model.config.architecture.norm_offset)
        if constant is not None:
            assert isinstance(p, nn.Parameter)  # norms and biases are not quantized
            p.fill_(constant)
            continue
        generator = torch.Generator(device="cpu").manual_seed(seed * 1_000_003 + order.index(name))
        full = torch.randn(shape_of(p), generator=generator) * std
        if not isinstance(p, nn.Parameter):
            like = quantized(p)[0]
            fill(p, [quantize_as(like, full.to(like.device))])
        else:  # each rank has drawn all of it: nothing is sent
            assign(p, full)


def _initial(name: str, norm_offset: float) -> float | None:
    """The constant that a parameter is initialized with; None: a random one."""
    if name.endswith("norm.weight"):
        return 1.0 - norm_offset
    return 0.0 if name.endswith("bias") else None
