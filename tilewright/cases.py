"""Inputs of an op for tests, benchmarks and tuning, their cost, and the speed that is aimed at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Cost:
    """Least traffic and arithmetic of one call, for rooflines. Bytes and floating-point
    operations.
    """

    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_flops: int = 0
    backward_flops: int = 0


@dataclass(frozen=True)
class Case:
    """One set of inputs, used by tests, benchmarks and tuning alike.

    make: (device, dtype, seed) -> keyword arguments of the op's public function. Tensors to
        differentiate have requires_grad set.
    cost: bytes per element of the dtype -> Cost.
    tags: "contract" (small, for parity tests), "cpu" and "cuda" (timed there), "big" (more than
        2^31 elements), "host" (values are read on the host by some
        implementations: `Implementation.reads_host`).
    """

    name: str
    make: Callable[[str, torch.dtype, int], dict[str, Any]]
    cost: Callable[[int], Cost] = lambda itemsize: Cost()
    tags: frozenset[str] = frozenset({"contract"})


@dataclass(frozen=True)
class Goal:
    """What `auto` is meant to reach in the timed cases of an op on a kind of devices; `bench
    report` checks it.

    device: part of a device's name; or classes of CUDA devices by compute capability, such as
        ("sm_90", "sm_100"): the goal is judged on every device of them that has results.   which:
        "forward", "backward" or "forward_backward".
    metric: "roofline_percent" of that device's measured roof, "matmul_percent" of its measured
        matrix product in this dtype, "peak_mib", or "over " and another provider's name: how many
        times its time is ours. Of a device that is named also "tflop_per_s" and "median_ms".
    at_least, at_most: the bound (one of them).   cases, dtypes: the names it holds for; empty: all.
    Raises ValueError for an absolute speed of a class of devices.
    """

    device: str | tuple[str, ...]
    which: str
    metric: str
    at_least: float | None = None
    at_most: float | None = None
    cases: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    def __post_init__(self):
        if isinstance(self.device, tuple) and self.metric in ("tflop_per_s", "median_ms"):
            raise ValueError(
                f"metric must not be {self.metric!r} for a class of devices "
                f"({', '.join(self.device)}): "
                "their speeds differ; use a share of what each has measured"
            )

    def holds_for(self, name: str, capability: str | None) -> bool:
        """Whether it speaks of a device of this name and compute capability ("9.0"; None: no
        CUDA device).
        """
        if isinstance(self.device, tuple):
            return capability is not None and f"sm_{capability.replace('.', '')}" in self.device
        return self.device in name

    @property
    def other(self) -> str:
        """The provider that it compares with, if any."""
        return self.metric.removeprefix("over ") if self.metric.startswith("over ") else ""
