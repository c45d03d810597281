"""Stages that judge: the contract, CUDA graphs, large tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tilewright.bench import contract, run, sources, timing
from tilewright.bench.runner import Unit
from tilewright.bench.units import constants
from tilewright.core import registry
from tilewright.core.registry import Op, short


def checks(
    kind: str,
    op: Op,
    case: registry.Case,
    device: str,
    dtypes: Sequence[torch.dtype],
    make,
    limit: float = 180.0,
) -> Unit:
    """A unit whose document has "results": a status per implementation and dtype."""
    return Unit(
        f"{kind}/{op.name}.{case.name}",
        make,
        {"op": op.name, "case": case.name, "results": []},
        limit,
        {"dtypes": [short(d) for d in dtypes], "constants": constants(op, device)},
        sources.of_measured(op, device),
    )


def parity_unit(op: Op, case: registry.Case, device: str, dtypes: Sequence[torch.dtype]) -> Unit:
    def make():
        results = []
        for dtype in dtypes:
            candidates = [i for i in op.implementations if i.name != "eager" and dtype in i.dtypes]
            usable = [i for i in candidates if i.why_not(device, dtype) is None]
            results += [
                result(i.name, dtype, "unavailable", i.why_not(device, dtype))
                for i in candidates
                if i not in usable
            ]
            if usable:
                results += parity_results(op, case, device, dtype, [i.name for i in usable])
        return {"op": op.name, "case": case.name, "results": results}

    return checks("parity", op, case, device, dtypes, make)


def result(implementation, dtype, status, reason=None, tensors=()):
    return {
        "implementation": implementation,
        "dtype": short(dtype),
        "status": status,
        "reason": reason,
        "tensors": list(tensors),
    }


def own_on_gpus(op: Op) -> str:
    """The name of an op's own kernels for the current GPU: `auto` may take another library's."""
    gluon = next((i for i in op.implementations if i.name == "gluon"), None)
    if gluon is None or gluon.why_not("cuda", torch.bfloat16):
        return "triton"
    return gluon.slower_than("cuda", None) or gluon.name


def parity_results(
    op, case, device, dtype, names, layouts: Sequence[str] = contract.LAYOUTS
) -> list[dict[str, Any]]:
    """A result per implementation, with the worst error of each tensor over the layouts of
    upstream gradients.
    """
    worst: dict[str, dict[str, contract.Finding]] = {n: {} for n in names}
    raised: dict[str, str] = {}
    refused: dict[str, str] = {}  # reasons of implementations that do not support the case
    with contract.poisoned():
        for seed, layout in enumerate(layouts):
            kwargs = case.make(device, dtype, seed)
            by = contract.reference(op, kwargs, dtype, layout)
            for name in names:
                try:
                    findings = contract.judge(op, name, kwargs, by)
                except registry.ImplementationUnavailable as error:
                    refused[name] = str(error)
                    continue
                except Exception as error:
                    timing.raise_if_lost(error, f"{name} {short(dtype)}")
                    raised[name] = f"{layout} gradients: {timing.first_line(error)}"
                    continue
                for f in findings:
                    previous = worst[name].get(f.name)
                    if previous is None or f.share > previous.share:
                        worst[name][f.name] = f
    results = []
    for name in names:
        broken = contract.broken(worst[name].values())
        status = (
            "error"
            if name in raised
            else "unavailable"
            if name in refused
            else "broken"
            if broken
            else "holds"
        )
        reason = raised.get(name) or refused.get(name) or "; ".join(map(str, broken)) or None
        results.append(result(name, dtype, status, reason, map(tensor_entry, worst[name].values())))
    return results


def tensor_entry(f: contract.Finding) -> dict[str, Any]:
    # JSON has no infinity: the error of a missing or NaN tensor is None.
    def finite(x):
        return x if math.isfinite(x) else None

    return {
        "name": f.name,
        "error": finite(f.error),
        "eager": finite(f.eager),
        "budget": finite(f.budget),
    }


def check_unit(
    kind: str,
    op: Op,
    case: registry.Case,
    device: str,
    dtypes: Sequence[torch.dtype],
    check,
    skip,
    limit: float = 180.0,
) -> Unit:
    """A unit of findings without a reference: check(op, implementation, case, dtype) -> broken
    findings.

    skip: (op, implementation, case) -> None, or why it is not checked.
    """

    def make():
        results = []
        for impl in op.implementations:
            for dtype in dtypes:
                if dtype not in impl.dtypes or (impl.name == "eager" and kind == "big"):
                    continue
                if reason := skip(op, impl.name, case) or impl.why_not(device, dtype):
                    results.append(result(impl.name, dtype, "unavailable", reason))
                    continue
                try:
                    broken = check(op, impl.name, case, dtype)
                # The case is unsupported.
                except registry.ImplementationUnavailable as error:
                    results.append(result(impl.name, dtype, "unavailable", str(error)))
                    continue
                except Exception as error:
                    # A lost device must not be blamed on the next implementation.
                    timing.raise_if_lost(error, f"{impl.name} {short(dtype)}")
                    reason = timing.first_line(error)
                    # A failed capture raises an error about its end, with the cause as context.
                    if error.__context__ is not None:
                        reason += f" (after {timing.first_line(error.__context__)})"
                    results.append(result(impl.name, dtype, "error", reason))
                    continue
                results.append(
                    result(
                        impl.name,
                        dtype,
                        "broken" if broken else "holds",
                        "; ".join(map(str, broken)) or None,
                    )
                )
                run.free(device, compiled=False)
        return {"op": op.name, "case": case.name, "results": results}

    return checks(kind, op, case, device, dtypes, make, limit)
