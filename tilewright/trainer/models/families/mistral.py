"""Mistral (arXiv 2310.06825): Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from tilewright.trainer.models.families.architecture import FAMILIES, Architecture
from tilewright.trainer.models.families.reading import dense, windows


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    return {**dense(hf), **windows(hf, None)}


MISTRAL = Architecture(
    "mistral",
    "Mistral",
    read=_read,
    write=lambda config: {"sliding_window": config.sliding_window},  # null: no window
    defaults={
        "sliding_window": 4096,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    # transformers leaves them to its class Ministral.
    neutral={"use_sliding_window": False, "layer_types": None},
)
FAMILIES.add("mistral", MISTRAL)
