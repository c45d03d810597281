"""Modules over `tilewright.ops`, and adapters and quantized weights in whole models.

quantize_(model, "nf4")               # optional: QLoRA; or QuantFormat("nf4", 64)
add_lora(model, rank=16, alpha=32)
...
save_adapter(model, "adapter")        # what `peft` loads
merge_and_unload(model)               # plain layers again, which `save_pretrained` writes

`modules.py` has norms, the MLP and losses; `row_blocks.py` a batch-invariant linear layer;
`quantized_layers.py`, `lora.py` and `lora_experts.py` frozen layers and their adapters;
`quantize.py`, `adapt.py`, `weights.py`, `save_pretrained.py` and `peft.py` apply these to whole
models. `routed_experts.py` reads recorded choices of experts.
"""

from tilewright.nn.adapt import (
    add_lora,
    merge_adapters,
    merge_and_unload,
    reset_adapters,
    set_noise,
)
from tilewright.nn.lora import LoRALinear
from tilewright.nn.modules import CrossEntropyLoss, Linear, LinearCrossEntropyLoss, RMSNorm, SwiGLU
from tilewright.nn.peft import ADAPTER_CONFIG, ADAPTER_FILE, load_adapter, save_adapter
from tilewright.nn.projections import FUSED, OF_EXPERTS, PROJECTIONS, matches
from tilewright.nn.quantize import QuantizeReport, quantize_, quantize_model
from tilewright.nn.quantized_layers import (
    BESIDE,
    DEFAULT_GROUPS,
    FORMATS,
    QuantFormat,
    QuantizedLinear,
    format_of,
    join,
    quantize_as,
)
from tilewright.nn.routed_experts import read_routed_experts
from tilewright.nn.row_blocks import ROWS, RowBlockLinear, in_row_blocks, linear_in_row_blocks
from tilewright.nn.weights import (
    Adapted,
    Stored,
    base_weights,
    print_trainable_parameters,
    quantized,
    shape_of,
    trainable_parameters,
)

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_FILE",
    "BESIDE",
    "DEFAULT_GROUPS",
    "FORMATS",
    "FUSED",
    "OF_EXPERTS",
    "PROJECTIONS",
    "ROWS",
    "Adapted",
    "CrossEntropyLoss",
    "Linear",
    "LinearCrossEntropyLoss",
    "LoRALinear",
    "QuantFormat",
    "QuantizeReport",
    "QuantizedLinear",
    "RMSNorm",
    "RowBlockLinear",
    "Stored",
    "SwiGLU",
    "add_lora",
    "base_weights",
    "format_of",
    "in_row_blocks",
    "join",
    "linear_in_row_blocks",
    "load_adapter",
    "matches",
    "merge_adapters",
    "merge_and_unload",
    "print_trainable_parameters",
    "quantize_",
    "quantize_as",
    "quantize_model",
    "quantized",
    "read_routed_experts",
    "reset_adapters",
    "save_adapter",
    "set_noise",
    "shape_of",
    "trainable_parameters",
]
