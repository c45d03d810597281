"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama, with one tensor on disk for queries, keys
and values, and one for gates and ups. Phi-4-mini rotates a part of a head's features; models of
long contexts have a factor for each pair of them (LongRoPE, arXiv 2402.13753).
"""

from __future__ import annotations

from typing import Any

from tilewright.ops.rope import tables
from tilewright.trainer.models.families.architecture import FAMILIES, Architecture
from tilewright.trainer.models.families.reading import READ, number, rope, sizes, unpadded, windows
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.stored import FUSED, Stored

PADDING = 32_000  # transformers' default
KINDS = {name: tables.ROPE_TYPES[name] for name in ("default", "longrope")}


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    return {**_angles(hf), **sizes(hf), **windows(hf, None)}


def _angles(hf: dict[str, Any]) -> dict[str, Any]:
    """As transformers reads them: the original context is an item beside the settings, and the
    first models call longrope by other names.
    """
    given = hf.get("rope_parameters") or hf.get("rope_scaling")
    if not isinstance(given, dict):
        return rope(hf, partial=True, kinds=KINDS)
    settings = {k: v for k, v in given.items() if k != "type"}
    kind = given.get("rope_type", given.get("type", "default"))
    settings["rope_type"] = "longrope" if kind in ("su", "yarn") else kind
    if settings["rope_type"] == "longrope":
        original = number(hf, tables.CONTEXT, None)
        settings[tables.CONTEXT] = original
        if settings.get("factor") is None:
            settings["factor"] = number(hf, "max_position_embeddings", None) / original
    return rope({**hf, "rope_parameters": settings}, partial=True, kinds=KINDS)


def _write(config: ModelConfig) -> dict[str, Any]:
    rope = dict(config.rope_scaling)
    return {
        "sliding_window": config.sliding_window,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        tables.CONTEXT: rope.get(tables.CONTEXT, config.max_position_embeddings),
        **unpadded(config, PADDING),
    }


PHI3 = Architecture(
    "phi3",
    "Phi3",
    read=_read,
    write=_write,
    defaults={"rms_norm_eps": 1e-5, tables.CONTEXT: 4096},
    neutral={
        "partial_rotary_factor": READ,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        # transformers leaves them to other classes.
        "use_sliding_window": False,
        "layer_types": None,
    },
    stored=Stored(fused=tuple(FUSED)),
)
FAMILIES.add("phi3", PHI3)
