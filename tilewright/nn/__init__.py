"""Modules over `tilewright.ops`.

`modules.py` has norms, the MLP and losses; `row_blocks.py` a batch-invariant linear layer;
`quantized.py`, `lora.py` and `lora_experts.py` frozen layers and their adapters; `quantize.py`,
`adapt.py`, `weights.py`, `save_pretrained.py` and `peft.py` apply these to whole models.
`routed_experts.py` reads recorded choices of experts.
"""

from tilewright.nn.modules import CrossEntropyLoss, Linear, LinearCrossEntropyLoss, RMSNorm, SwiGLU
from tilewright.nn.routed_experts import read_routed_experts
from tilewright.nn.row_blocks import ROWS, RowBlockLinear, in_row_blocks, linear_in_row_blocks

__all__ = [
    "ROWS",
    "CrossEntropyLoss",
    "Linear",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "RowBlockLinear",
    "SwiGLU",
    "in_row_blocks",
    "linear_in_row_blocks",
    "read_routed_experts",
]
