"""Llama (arXiv 2407.21783): the ground of all others."""

from tilewright.trainer.models.families.architecture import FAMILIES, Architecture

LLAMA = Architecture("llama", "Llama", neutral={"use_sliding_window": False})
FAMILIES.add("llama", LLAMA)
