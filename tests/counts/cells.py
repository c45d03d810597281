"""Cells: an op, an implementation, a dtype and a property that a test has held there.

A test of ops has its cell in the name of its parameters, as in `rmsnorm-cpp-ragged-float32`.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterable
from typing import Any

from tests.lib.shards import cases

DTYPES = {"float32", "bfloat16", "float16", "float64"}
FOLDERS = ("tests/ops/", "tests/ptx/")  # of tests of ops
NOT_PASSED = {"failure", "error", "skipped"}
Cell = tuple[str, str, str, str]  # property, op, implementation, dtype; "": all


def outcomes(reports: Iterable[str]) -> dict[str, int]:
    """How many tests had which outcome."""
    found: collections.Counter[str] = collections.Counter()
    for report in reports:
        for _, _, case in cases(report):
            kinds = {child.tag for child in case}
            found[next((k for k in ("failure", "error", "skipped") if k in kinds), "passed")] += 1
    return dict(sorted(found.items()))


def of_name(name: str, ops: dict[str, tuple[str, ...]]) -> Cell | None:
    """The cell of a test by its name.   ops: names of implementations by op."""
    test, _, parameters = name.partition("[")
    parts = re.split(r"[- /]", parameters.removesuffix("]"))
    op = next((part for part in parts if part in ops), None)
    if op is None:
        return None
    implementation = next((part for part in parts if part in ops[op]), "")
    dtype = next((part for part in parts if part in DTYPES), "")
    return test.rpartition("::")[2], op, implementation, dtype


def found_in(reports: Iterable[str]) -> collections.Counter[Cell]:
    """How many cases each cell has."""
    from tilewright.selection import operations

    ops = {name: (*op.names(), "auto") for name, op in operations().items()}
    found: collections.Counter[Cell] = collections.Counter()
    for report in reports:
        for file, name, case in cases(report):
            if not file.startswith(FOLDERS) or {child.tag for child in case} & NOT_PASSED:
                continue
            if cell := of_name(name, ops):
                found[cell] += 1
    return found


def counted(reports: Iterable[str]) -> dict[str, list[int]]:
    """Property -> cells, and cases."""
    found: dict[str, list[int]] = {}
    for (kind, *_), n in found_in(reports).items():
        sums = found.setdefault(kind, [0, 0])
        sums[0] += 1
        sums[1] += n
    return dict(sorted(found.items()))


def shown(found: dict[str, Any]) -> str:
    """JSON with a line for each number that may fall."""
    return re.sub(r"\[\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2]", json.dumps(found, indent=1)) + "\n"
