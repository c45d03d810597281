"""Experts with low-rank adapters: the public names of `tilewright.nn.lora_experts`."""

from tilewright.nn.lora_experts import LoRAExperts
from tilewright.nn.peft_format import check_dtype, read_peft, settings, unsupported
from tilewright.nn.quantized import QuantizedExperts

__all__ = ["LoRAExperts", "QuantizedExperts", "check_dtype", "read_peft", "settings", "unsupported"]
