"""What launchers of all kernel languages compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Triton's functions of these names can be called in kernels too, but take microseconds on the host.


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def without(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A configuration without what a kernel does not take of it."""
    return {name: value for name, value in config.items() if name not in names}


def unit(itemsize: int, columns: int, *strides: int) -> int:
    """The unit, in elements, of columns and row strides: 16 bytes if all are multiples of that,
    else one element.
    """
    vector = 16 // itemsize
    for stride in strides:
        columns |= stride  # vector is a power of 2
    return 1 if columns % vector else vector
