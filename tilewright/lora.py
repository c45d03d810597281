"""Linear layers with low-rank adapters, and formats of quantized weights: the public names of
`tilewright.nn.lora` and `tilewright.nn.quantized`.
"""

from tilewright.nn.lora import LoRALinear
from tilewright.nn.quantized import (
    DEFAULT_GROUPS,
    FORMATS,
    QuantFormat,
    QuantizedLinear,
    format_of,
    join,
    quantize_as,
    wrong_group_size,
)

__all__ = [
    "DEFAULT_GROUPS",
    "FORMATS",
    "LoRALinear",
    "QuantFormat",
    "QuantizedLinear",
    "format_of",
    "join",
    "quantize_as",
    "wrong_group_size",
]
