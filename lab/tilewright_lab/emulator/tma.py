"""Tensor maps for bulk copies, and the swizzle of shared memory."""

from __future__ import annotations

import numpy as np

from tilewright_lab.emulator.faults import Fault


class TensorMap:
    """A TMA descriptor: two or more dimensions, the last one contiguous. swizzle: span in bytes, or
    0.
    """

    def __init__(self, address, itemsize, shape, strides, box, swizzle):
        if box[-1] * itemsize > (swizzle or 1 << 20) or box[-1] * itemsize % 16 or max(box) > 256:
            raise Fault("barrier", f"a box of {box} elements with a swizzle of {swizzle} bytes")
        self.address, self.itemsize, self.box, self.swizzle = address, itemsize, box, swizzle
        self.shape, self.strides = shape, strides

    def places(self, corner):
        """The addresses of the bytes of the box at `corner`, in memory order, and which are in the
        tensor.
        """
        at = np.indices(self.box).reshape(len(self.box), -1) + np.array(corner)[:, None]
        inside = ((at >= 0) & (at < np.array(self.shape)[:, None])).all(0)
        first = self.address + (at * np.array(self.strides)[:, None]).sum(0) * self.itemsize
        each = (first[:, None] + np.arange(self.itemsize)).reshape(-1)
        return each, np.repeat(inside, self.itemsize)


def swizzled(address, span):
    """Permutes 16-byte units within `span` bytes (32, 64 or 128; or 0) by the index of the 128-byte
    line.
    """
    return address ^ (address >> 3 & (span - 16)) if span else address
