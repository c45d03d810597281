"""What distinguishes a family of models: how its config.json is read and written, of which parts
its layers are composed, and how its tensors are stored.

One file of this package per family. `ModelConfig` has the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.trainer.models.families.reading import dense
from tilewright.trainer.models.stored import Stored
from tilewright.trainer.tables import Table


@dataclass(frozen=True)
class Architecture:
    """model_type: of config.json.   name: of transformers' class, without ForCausalLM.

    read: config.json to the fields of `ModelConfig`; raises ValueError, naming the field.
    write: a `ModelConfig` -> the items of config.json that differ from its fields' names and
        values.
    defaults: transformers' values of items that config.json may omit, where ours are others.
    neutral: items that are accepted at one value only; `READ`: that `read` reads.
    scored: the name with ForSequenceClassification, which reward models have, if it is another.
    block: `layers.Place` -> a layer, composed of the parts in `layers`, `moe` and `block`, or of
        the family's own; None: `block.Block`.
    stored: its tensors on disk.
    """

    model_type: str
    name: str
    read: Callable[[dict[str, Any]], dict[str, Any]] = dense
    write: Callable[[Any], dict[str, Any]] = lambda config: {}
    defaults: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    scored: str | None = None

    block: Callable[[Any], Any] | None = None
    stored: Stored = field(default_factory=Stored)

    # All norms: y = x / rms(x) * (norm_offset + weight), rounded as `ops.rmsnorm`'s cast says.
    norm_offset: float = 0.0
    norm_cast: str = "llama"
    sinks: bool = False
    scaled_embedding: bool = False  # by sqrt(hidden_size)


FAMILIES = Table("families", "tilewright.trainer.models.families", Architecture)
