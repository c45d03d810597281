"""What distinguishes a family of models: how its config.json is read and written, of which parts
its layers are composed, and how its tensors are stored.

One file of this package per family. `ModelConfig` has the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.trainer.models.block import Block
from tilewright.trainer.models.families.reading import dense
from tilewright.trainer.models.layers import Place
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.stored import Stored


def _nothing(config: ModelConfig) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """model_type: of config.json.   name: of transformers' class, without ForCausalLM.

    read: config.json to the fields of `ModelConfig`; raises ValueError, naming the field.
    write: the items of config.json that differ from the fields' names and values.
    defaults: transformers' values of items that config.json may omit, where ours are others.
    neutral: items that are accepted at one value only; `READ`: that `read` reads.
    scored: the name with ForSequenceClassification, which reward models have, if it is another.
    block: a layer, composed of the parts in `layers`, `moe` and `block`, or of the family's own.
    stored: its tensors on disk.
    """

    model_type: str
    name: str
    read: Callable[[dict[str, Any]], dict[str, Any]] = dense
    write: Callable[[ModelConfig], dict[str, Any]] = _nothing
    defaults: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    scored: str | None = None

    block: Callable[[Place], Block] = Block
    stored: Stored = field(default_factory=Stored)

    # All norms: y = x / rms(x) * (norm_offset + weight), rounded as `ops.rmsnorm`'s cast says.
    norm_offset: float = 0.0
    norm_cast: str = "llama"
    sinks: bool = False
    scaled_embedding: bool = False  # by sqrt(hidden_size)
