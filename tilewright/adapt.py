"""Adapters and quantized weights in whole models, and adapters in PEFT's files.

quantize_(model, "nf4")               # optional: QLoRA; or QuantFormat("nf4", 64)
add_lora(model, rank=16, alpha=32)
...
save_adapter(model, "adapter")        # what `peft` loads
merge_and_unload(model)               # plain layers again, which `save_pretrained` writes
"""

from tilewright.files import open_tensors, publish, read_json, target_folder, written_aside
from tilewright.nn.adapt import (
    add_lora,
    check_merge,
    merge_adapters,
    merge_and_unload,
    reset_adapters,
    set_noise,
)
from tilewright.nn.modules_to_save import saved_modules
from tilewright.nn.peft import ADAPTER_CONFIG, ADAPTER_FILE, load_adapter, save_adapter
from tilewright.nn.projections import (
    FUSED,
    OF_EXPERTS,
    PROJECTIONS,
    experts,
    matches,
    projections,
    replace_module,
    unmatched,
)
from tilewright.nn.quantize import QuantizeReport, linear_layers, quantize_, quantize_model
from tilewright.nn.quantized import QuantFormat
from tilewright.nn.save_pretrained import (
    guard_save_pretrained,
    readable_conversions,
    refuse_wrapped,
    stored_state,
    why_unreadable,
)
from tilewright.nn.weights import (
    Adapted,
    Stored,
    adapted,
    base_weights,
    dense_weights,
    fill,
    is_adapter,
    print_trainable_parameters,
    quantized,
    shape_of,
    trainable_parameters,
)

# The names that the site shows. The library's own modules use the others too.
__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_FILE",
    "FUSED",
    "OF_EXPERTS",
    "PROJECTIONS",
    "Adapted",
    "QuantFormat",
    "QuantizeReport",
    "Stored",
    "add_lora",
    "base_weights",
    "load_adapter",
    "matches",
    "merge_adapters",
    "merge_and_unload",
    "print_trainable_parameters",
    "quantize_",
    "quantize_model",
    "quantized",
    "reset_adapters",
    "save_adapter",
    "set_noise",
    "shape_of",
    "trainable_parameters",
]
