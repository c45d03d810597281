"""Memory of this process, as the kernel counts it."""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Callable


def status_mib(field: str) -> float:
    """A field of this process's status, in MiB: VmRSS, what is resident; VmHWM, its peak."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def peak_mib(fn: Callable[[], object]) -> float | None:
    """Peak memory of this process during fn, above the level before it, in MiB; None if the kernel
    does not report it. The allocator's cached free memory is released first.
    """

    try:
        ctypes.CDLL(None).malloc_trim(0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = status_mib("VmRSS")
    except (OSError, AttributeError):
        return None
    fn()
    return status_mib("VmHWM") - before
