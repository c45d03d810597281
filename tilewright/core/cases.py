"""An op's inputs for tests, benchmarks and tuning, their cost, and performance goals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Cost:
    """The least memory traffic (bytes) and arithmetic (floating-point operations) of a call, for
    rooflines.
    """

    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_flops: int = 0
    backward_flops: int = 0


@dataclass(frozen=True)
class Case:
    """One set of inputs, used by tests, benchmarks and tuning.

    make: (device, dtype, seed) -> keyword arguments of the op's public function. Differentiable
        inputs have requires_grad set.
    cost: bytes per element of the dtype -> Cost.
    tags: "contract" (small, for parity tests), "cpu" and "cuda" (timed there), "big" (more than
        2^31 elements), "host" (some implementations read values on the host:
        `Implementation.reads_host`), "predicted" (as large as a model's, and not timed: its check
        would not fit).
    """

    name: str
    make: Callable[[str, torch.dtype, int], dict[str, Any]]
    cost: Callable[[int], Cost] = lambda itemsize: Cost()
    tags: frozenset[str] = frozenset({"contract"})


DETECTED = 0.02


@dataclass(frozen=True)
class Judged:
    """How the numerics contract judges an op's results, beside its tolerances (`Op.atol`).

    exact: every implementation has the values of the eager twin in the same dtype.
    quantizes: keyword arguments -> the values, by the eager twin, that each result holds; for
        results in a format with FP8 codes. Codes are then judged in steps of their own grid.
    together: (results by name, keyword arguments) -> results that are judged in place of those of
        the same names, such as the sum of the two parts of a number.
    of_sums: the results are sums, and the terms of a small result may be larger than it. The
        tolerances are then relative to the root mean square of the results, even where an element
        is otherwise compared with the median.
    detects: dtype -> result -> the relative error of an ordinary element (one of median magnitude)
        that breaks the contract in every case; given where an error of `DETECTED` need not break
        it.
    """

    exact: bool = False
    quantizes: Callable[..., list[torch.Tensor]] | None = None
    together: (
        Callable[[dict[str, torch.Tensor], dict[str, Any]], dict[str, torch.Tensor]] | None
    ) = None
    of_sums: bool = False
    detects: Mapping[torch.dtype, Mapping[str, float]] = field(default_factory=dict)

    def detected(self, dtype: torch.dtype, name: str) -> float:
        return self.detects.get(dtype, {}).get(name, DETECTED)


@dataclass(frozen=True)
class Goal:
    """A performance goal of an op in its timed cases on a class of devices; `bench report` checks
    it. docs/goals.md is the table of all goals.

    device: part of a device's name; or classes of CUDA devices by compute capability, such as
        ("sm_90", "sm_100"): the goal is judged on each such device that has results.
    which: "forward", "backward" or "forward_backward".
    metric: "roofline_percent" of that device's measured roof, "matmul_percent" of its measured
        matmul in this dtype, "peak_mib", or "over " and another provider's name: its time divided
        by ours; "over best" compares with the fastest of all that were timed. For a named device
        also "tflop_per_s" and "median_ms".
    at_least, at_most: the bound; set one of them.
    cases, dtypes: the names it applies to; empty: all.
    by: the implementation that is to reach it; empty: what `auto` takes.
    within_mib: a result counts only if its peak memory is at most this.
    otherwise: another bound of the same metric that counts as well.

    Raises ValueError for an absolute speed on a class of devices.
    """

    device: str | tuple[str, ...]
    which: str
    metric: str
    at_least: float | None = None
    at_most: float | None = None
    cases: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    by: str = ""
    within_mib: float | None = None
    otherwise: Goal | None = None

    def __post_init__(self):
        if isinstance(self.device, tuple) and self.metric in ("tflop_per_s", "median_ms"):
            raise ValueError(
                f"metric must not be {self.metric!r} for a class of devices "
                f"({', '.join(self.device)}): "
                "their speeds differ; use a share of what each has measured"
            )

    def holds_for(self, name: str, capability: str | None) -> bool:
        """Whether the goal applies to a device of this name and compute capability ("9.0"; None:
        no CUDA device).
        """
        if isinstance(self.device, tuple):
            return capability is not None and f"sm_{capability.replace('.', '')}" in self.device
        return self.device in name

    @property
    def other(self) -> str:
        """The provider that the goal compares with, or ""."""
        return self.metric.removeprefix("over ") if self.metric.startswith("over ") else ""
