"""What distinguishes a family of models: how its config.json is read and written, how its layers
differ from Llama's, and how its tensors are stored.

One file of this package per family. A layer reads the flags; `ModelConfig` has the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.trainer.models.families.reading import dense
from tilewright.trainer.tables import Table


def _nothing(config: Any) -> dict[str, Any]:
    return {}


def _usual(config: Any) -> float | None:
    return None


@dataclass(frozen=True)
class Architecture:
    """model_type: of config.json.   name: of transformers' class, without ForCausalLM.

    read: config.json to the fields of `ModelConfig`; raises ValueError, naming the field.
    write: a `ModelConfig` -> the items of config.json that differ from its fields' names and
        values.
    defaults: transformers' values of items that config.json may omit, where ours are others.
    neutral: items that are accepted at one value only.
    scored: the name with ForSequenceClassification, which reward models have, if it is another.
    """

    model_type: str
    name: str
    read: Callable[[dict[str, Any]], dict[str, Any]] = dense
    write: Callable[[Any], dict[str, Any]] = _nothing
    defaults: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    scored: str | None = None

    # Norms: y = x / rms(x) * (norm_offset + weight), rounded as `ops.rmsnorm`'s cast says.
    norm_offset: float = 0.0
    norm_cast: str = "llama"
    norms_after: bool = False  # the results of attention and MLP are normalized, too

    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of o_proj
    sinks: bool = False
    # The factor of attention's logits; None: head_dim ** -0.5.
    scale: Callable[[Any], float | None] = _usual

    activation: str = "silu"  # or "gelu", approximated by tanh: of the gate of MLPs
    scaled_embedding: bool = False  # by sqrt(hidden_size)

    router_bias: bool = False  # added to the router's logits
    score: str = "softmax"  # of the router; with "sigmoid" it has a bias for the choice
    expert_bias: bool = False
    # Experts are stored as [E, inputs, outputs], gates and ups interleaved, and not one by one.
    stacked_experts: bool = False
    further_layers: bool = False  # are stored, and not read: of multi-token prediction
    renamed: tuple[tuple[str, str], ...] = ()  # parts of parameters' names: (here, on disk)


FAMILIES = Table("families", "tilewright.trainer.models.families", Architecture)
