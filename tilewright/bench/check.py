"""Checks one implementation against the numerics contract, for `tilewright check`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from tilewright.bench import contract
from tilewright.core.registry import Case, ImplementationUnavailable, Op, short


class Row(NamedTuple):
    """The outcome for one case, dtype and layout of the upstream gradients.

    worst: the tensor with the largest error relative to its budget.
    reason: why nothing was compared: the case is unsupported, or the call raised.
    """

    case: str
    dtype: torch.dtype
    layout: str
    holds: bool
    worst: contract.Finding | None = None
    reason: str | None = None


def rows(op: Op, implementation: str, device: str, dtypes: Iterable[torch.dtype]) -> Iterator[Row]:
    """Checks an implementation on each small case of an op, in every layout of the gradients."""
    cases = [case for case in op.cases if "contract" in case.tags]
    for dtype in dtypes:
        for case in cases:
            for seed, layout in enumerate(contract.LAYOUTS):
                yield _judge(op, implementation, case, device, dtype, seed, layout)


def _judge(op: Op, implementation: str, case: Case, device: str, dtype, seed: int, layout) -> Row:
    kwargs = case.make(device, dtype, seed)
    by = contract.reference(op, kwargs, dtype, layout)
    try:
        with contract.poisoned():
            findings = contract.judge(op, implementation, kwargs, by)
    except ImplementationUnavailable as error:  # this case is unsupported
        return Row(case.name, dtype, layout, True, reason=str(error))
    except Exception as error:  # an implementation may raise any class
        reason = f"raises {type(error).__name__}: {error}"
        return Row(case.name, dtype, layout, False, reason=reason)
    worst = max(findings, key=lambda f: f.share)
    return Row(case.name, dtype, layout, not contract.broken(findings), worst)


def check(op: Op, implementation: str, device: str, dtypes: Iterable[torch.dtype]) -> int:
    """Prints a table. Returns 0 if the implementation supports at least one case and the contract
    holds on all that it supports, else 1.
    """
    wide = max(len(case.name) for case in op.cases)
    print(f"{op.name}[{implementation}] on {device}: error against float64, and what is allowed\n")
    print(
        f"{'case':<{wide}}  {'dtype':<8}  {'gradients':<10}  {'error':>8}  {'allowed':>8}  worst of"
    )
    compared = broken = unsupported = 0
    for row in rows(op, implementation, device, dtypes):
        start = f"{row.case:<{wide}}  {short(row.dtype):<8}  {row.layout:<10}"
        if row.worst is None:
            print(f"{start}  {'-':>8}  {'-':>8}  {row.reason}")
        else:
            mark = "" if row.holds else f"  BROKEN at {list(row.worst.where)}"
            numbers = f"{row.worst.error:8.1e}  {row.worst.budget:8.1e}"
            print(f"{start}  {numbers}  {row.worst.name}{mark}")
        broken += not row.holds
        unsupported += row.holds and row.worst is None
        compared += 1
    print(
        f"\n{compared - unsupported - broken} hold, {broken} break the contract, "
        f"{unsupported} are unsupported"
    )
    return 0 if compared > unsupported and not broken else 1
