"""Hugging Face transformers' models (5.7 and later), computed by this library's ops.

    from tilewright.integrations.transformers import accelerate

    model = AutoModelForCausalLM.from_pretrained(name)
    accelerate(model)

`accelerate` changes one model: norms, rotary embedding, MLP, attention, experts and the loss;
`restore` undoes it, and `accelerated` does it for models that other code builds. `register` only
adds names to transformers' tables of attention and experts functions. Importing this module does
not import transformers.
"""

from __future__ import annotations

from tilewright.integrations.transformers import attention, experts
from tilewright.integrations.transformers.acceleration import (
    PARTS,
    Report,
    accelerate,
    accelerated,
    restore,
)
from tilewright.integrations.transformers.tables import register
from tilewright.nn.experts import why_not

__all__ = [
    "PARTS",
    "Report",
    "accelerate",
    "accelerated",
    "attention",
    "experts",
    "register",
    "restore",
    "why_not",
]
