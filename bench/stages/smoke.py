"""The stage `smoke`: does each op's Triton implementation run, and is it right, on a small case?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from bench.stages.checks import checks, own_on_gpus, parity_results
from tilewright.bench import contract
from tilewright.bench.runner import Unit
from tilewright.bench.units import smallest
from tilewright.core import registry
from tilewright.core.registry import Op

LIMIT = 20.0  # seconds: a kernel of a small case that runs for longer hangs
# More failures than this end the call: what is timed after them would be thrown away.
FAILURES_AT_MOST = 3


def smoke_units(
    ops: Iterable[Op],
    device: str,
    dtypes: Mapping[str, Sequence[torch.dtype]],
    cases: Sequence[str] | None,
) -> list[Unit]:
    """A unit per op: its own implementation for a GPU by name, since `auto` may be another
    library's kernel; on a CPU, where Triton has only an interpreter, what `auto` takes.
    """
    units = []
    for op in ops:
        case = smallest(op, cases)
        for dtype in sorted(dtypes[op.name], key=lambda d: d != torch.bfloat16)[:1]:
            name = own_on_gpus(op) if device == "cuda" else op.choose(device, dtype)
            if case is not None and name in op.names() and name != "eager":
                units.append(_unit(op, case, device, dtype, name))
    return units


def _unit(op: Op, case: registry.Case, device: str, dtype: torch.dtype, name: str) -> Unit:
    def make():
        results = parity_results(op, case, device, dtype, [name], contract.LAYOUTS[:1])
        return {"op": op.name, "case": case.name, "results": results}

    return checks("smoke", op, case, device, [dtype], make, LIMIT)
