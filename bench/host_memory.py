"""Memory of this process, as the kernel counts it."""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Callable


def status_mib(field: str) -> float:
    """A field of this process's status, in MiB: VmRSS, what is resident; VmHWM, its peak."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def level_mib() -> float:
    """What is resident now, once the allocator's cached free memory is released, in MiB; the peak
    that VmHWM reports begins here. Raises OSError or AttributeError where there is no such thing.
    """
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    return status_mib("VmRSS")


def peak_mib(fn: Callable[[], object]) -> float | None:
    """Peak memory of this process during fn, above the level before it, in MiB; None if the kernel
    does not report it.
    """
    try:
        before = level_mib()
    except (OSError, AttributeError):
        return None
    fn()
    return status_mib("VmHWM") - before
