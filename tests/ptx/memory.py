"""Checked memory of a launch: every access must be inside a tensor and aligned."""

from __future__ import annotations

import numpy as np
import torch

WINDOW = 1 << 20  # shared::cluster addresses: block r's shared memory is at (r + 1) * WINDOW
U = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
I = {16: np.int16, 32: np.int32, 64: np.int64}


class Memory:
    """Global memory: tensors at 256-byte boundaries, with nothing readable between them. `shift`
    bytes precede each, to misalign it.
    """

    def __init__(self):
        self.data = np.zeros(4096, np.uint8)
        self.inside = np.zeros(4096, bool)
        self.written = np.zeros(4096, np.uint8)
        self.read = np.zeros(4096, bool)
        # In this launch, thread + 1 that wrote a byte, and that read it (-1: several).
        self.writer = np.zeros(4096, np.int64)
        self.reader = np.zeros(4096, np.int64)
        self.tensors = []

    def put(self, t: torch.Tensor | None, shift: int = 0) -> int:
        """Returns its address. The whole storage is copied, so strides stay valid; only t's
        elements are readable.
        """
        if t is None:
            return 0
        for known, address in self.tensors:
            if known.data_ptr() == t.data_ptr() and known.numel() and known.shape == t.shape:
                return address
        whole = torch.as_strided(
            t, (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)),), (1,)
        )
        raw = whole.contiguous().view(torch.uint8).numpy() if t.numel() else np.zeros(0, np.uint8)
        held = torch.zeros(whole.numel(), dtype=torch.uint8)
        if t.numel():
            torch.as_strided(held, t.shape, t.stride()).fill_(1)
        start = -(-len(self.data) // 256) * 256 + shift
        grown = start + len(raw) + 512
        for name, fill in (
            ("data", 0xFF),
            ("inside", 0),
            ("written", 0),
            ("read", 0),
            ("writer", 0),
            ("reader", 0),
        ):
            old = getattr(self, name)
            new = np.full(grown, fill, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
        self.data[start : start + len(raw)] = raw
        self.inside[start : start + len(raw)] = np.repeat(
            held.numpy().astype(bool), t.element_size()
        )
        self.tensors.append((t, start))
        return start

    def take_back(self) -> None:
        """Copies the kernel's output into the tensors."""
        for t, start in self.tensors:
            span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            if t.numel() and self.written[start : start + span * t.element_size()].any():
                raw = torch.from_numpy(
                    self.data[start : start + span * t.element_size()].copy()
                ).view(t.dtype)
                t.copy_(torch.as_strided(raw, t.shape, t.stride()))

    def times(self, t: torch.Tensor, which: str) -> torch.Tensor:
        """How often each element was written, or whether it was read."""
        start = next(a for known, a in self.tensors if known is t)
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        raw = getattr(self, which)[start : start + span * t.element_size() : t.element_size()]
        return torch.as_strided(torch.from_numpy(raw.astype(np.uint8)), t.shape, t.stride())
