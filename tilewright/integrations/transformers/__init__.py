"""Hugging Face transformers' models (5.17 and later), computed by this library's ops.

    from tilewright.integrations.transformers import accelerate

    model = AutoModelForCausalLM.from_pretrained(name)
    accelerate(model)

`accelerate` changes one model: norms, rotary embedding, MLP, attention, experts and the loss;
`restore` undoes it, and `accelerated` does it for models that other code builds. `register` only
adds names to transformers' tables of attention and experts functions. `TilewrightConfig` quantizes
models while `from_pretrained` loads them; asking for it registers it with transformers. Importing
this module does not import transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewright.integrations.transformers import attention, experts
from tilewright.integrations.transformers.acceleration import (
    PARTS,
    Report,
    accelerate,
    accelerated,
    report_of,
    restore,
)
from tilewright.integrations.transformers.tables import register
from tilewright.integrations.transformers.versions import require_transformers
from tilewright.nn.experts import why_not

if TYPE_CHECKING:  # given by __getattr__
    from tilewright.integrations.transformers.quantizer import TilewrightConfig, quantized_config

__all__ = [
    "PARTS",
    "Report",
    "TilewrightConfig",
    "accelerate",
    "accelerated",
    "attention",
    "experts",
    "quantized_config",
    "register",
    "report_of",
    "restore",
    "why_not",
]


def __getattr__(name: str) -> Any:
    if name not in ("TilewrightConfig", "TilewrightHfQuantizer", "quantized_config"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_transformers()
    from tilewright.integrations.transformers import quantizer

    return getattr(quantizer, name)
