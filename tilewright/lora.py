"""Linear layers with low-rank adapters, and formats of quantized weights: the public names of
`tilewright.nn.lora` and `tilewright.nn.quantized`.
"""

from tilewright.nn.lora import LoRALinear
from tilewright.nn.quantized import (
    BESIDE,
    DEFAULT_GROUPS,
    DENSE_DTYPES,
    FORMATS,
    QuantFormat,
    QuantizedLinear,
    absent,
    as_stored,
    format_of,
    join,
    quantize_as,
    wrong_group_size,
)

# The names that the site shows. The library's own modules use the others too.
__all__ = [
    "BESIDE",
    "DEFAULT_GROUPS",
    "FORMATS",
    "LoRALinear",
    "QuantFormat",
    "QuantizedLinear",
    "format_of",
    "join",
    "quantize_as",
]
