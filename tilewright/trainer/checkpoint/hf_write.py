"""Writes safetensors one tensor at a time, so that a file's tensors need not be in memory together.

The format (github.com/huggingface/safetensors): the header's length in 8 bytes, little-endian; the
header, JSON that may end in spaces; the tensors' bytes. The header is written last, into a space
that is kept for it.
"""

from __future__ import annotations

import json
import pathlib

import torch

from tilewright.nn.quantized_layers import DENSE_DTYPES

HEADER = 1 << 18  # bytes of the space: about two thousand tensors
_NAMES = {dtype: name for name, dtype in DENSE_DTYPES.items()}


class Shard:
    """One file.   sizes: the bytes of each tensor in it."""

    def __init__(self, path: pathlib.Path):
        self.sizes: dict[str, int] = {}
        self._header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._length = 64  # of the header as JSON, at most
        self._file = path.open("wb")
        self._file.seek(8 + HEADER)

    def full(self, name: str, tensor: torch.Tensor, most: int) -> bool:
        """Whether this file must end before a tensor.   most: bytes of all tensors."""
        size = sum(self.sizes.values()) + tensor.numel() * tensor.element_size()
        return bool(self.sizes) and (size > most or self._length + _entry(name) > HEADER)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """tensor: contiguous, on the CPU."""
        begin, size = sum(self.sizes.values()), tensor.numel() * tensor.element_size()
        self._header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + size],
        }
        self.sizes[name], self._length = size, self._length + _entry(name)
        self._file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        header = json.dumps(self._header, separators=(",", ":")).encode()
        self._file.seek(0)
        self._file.write(HEADER.to_bytes(8, "little") + header.ljust(HEADER))
        self._file.close()


def _entry(name: str) -> int:
    """A bound on the bytes of a tensor's entry in the header."""
    return len(json.dumps(name)) + 160
