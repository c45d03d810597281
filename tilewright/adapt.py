"""Adapters and quantized weights in whole models, and adapters in PEFT's files.

quantize_model(model, "nf4")          # optional: QLoRA; or QuantFormat("nf4", 64)
add_lora(model, rank=16, alpha=32)
...
save_adapter(model, "adapter")        # what `peft` loads
merge_and_unload(model)               # plain layers again, which `save_pretrained` writes
"""

from tilewright.files import open_tensors, publish, read_json, target_folder, written_aside
from tilewright.nn.adapt import (
    add_lora,
    merge_adapters,
    merge_and_unload,
    quantize_model,
    reset_adapters,
    set_noise,
)
from tilewright.nn.peft import ADAPTER_CONFIG, ADAPTER_FILE, load_adapter, save_adapter
from tilewright.nn.projections import (
    FUSED,
    OF_EXPERTS,
    PROJECTIONS,
    experts,
    matches,
    projections,
    unmatched,
)
from tilewright.nn.quantized import QuantFormat
from tilewright.nn.weights import (
    Adapted,
    Stored,
    adapted,
    base_weights,
    dense_weights,
    fill,
    is_adapter,
    quantized,
    shape_of,
)

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_FILE",
    "FUSED",
    "OF_EXPERTS",
    "PROJECTIONS",
    "Adapted",
    "QuantFormat",
    "Stored",
    "adapted",
    "add_lora",
    "base_weights",
    "dense_weights",
    "experts",
    "fill",
    "is_adapter",
    "load_adapter",
    "matches",
    "merge_adapters",
    "merge_and_unload",
    "open_tensors",
    "projections",
    "publish",
    "quantize_model",
    "quantized",
    "read_json",
    "reset_adapters",
    "save_adapter",
    "set_noise",
    "shape_of",
    "target_folder",
    "unmatched",
    "written_aside",
]
