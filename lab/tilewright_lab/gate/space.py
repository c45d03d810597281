"""Candidates that leave the search spaces: kernels/rejected.json, of `gate --registry --space`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tilewright.core.registry import Op
from tilewright.kernels import tuning
from tilewright_lab.gate.compilers import Result, labeled
from tilewright_lab.gate.verdict import problems, unmet


class Candidate(NamedTuple):
    """A configuration of a search, by the launch and the key that it is for.

    usual: whether it is the heuristic's, which never leaves the space: the gate must pass it.
    """

    launch: str
    key: dict[str, Any]
    config: dict[str, Any]
    usual: bool


def candidates(ops: Iterable[Op]) -> dict[str, Candidate]:
    """Candidates by the names of the specs that `collect` makes for a space."""
    by_spec: dict[str, Candidate] = {}
    for op in ops:
        for tunable in (t for impl in op.implementations for t in impl.tunables()):
            for key in map(tunable.named, tunable.keys):
                usual = tunable.candidates(**key)[0]
                for config in tunable.compiled(**key):
                    for spec in labeled(tunable, key, config, ""):
                        candidate = Candidate(tunable.name, key, config, config == usual)
                        by_spec.setdefault(f"{op.name}/{spec.label}", candidate)
    return by_spec


def known(ops: Iterable[Op], tasks: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
    """The tasks of candidates that are rejected already."""
    by_spec = candidates(ops)

    def is_rejected(c: Candidate, arch: int) -> bool:
        return tuning.identity(c.launch, arch, c.key, c.config) in tuning.rejected()

    return {(name, arch) for name, arch in tasks if is_rejected(by_spec[name], arch)}


def write(ops: Iterable[Op], version: str, results: Sequence[Result], specs: dict[str, Any]) -> int:
    """Replaces the entries of these results' launches and architectures for one Triton version.

    Returns the number of entries in the file.
    """
    by_spec = candidates(ops)
    scope = {(by_spec[r.name].launch, r.arch) for r in results}
    rows = [
        row
        for row in json.loads(tuning.REJECTED.read_text())
        if (row["launch"], row["arch"]) not in scope or row["triton"] != version
    ]
    for r in results:
        launch, key, config, usual = by_spec[r.name]
        if not usual and (problems(r, specs[r.name]) or unmet(r, specs[r.name])):
            row = {"launch": launch, "arch": r.arch, "triton": version, "key": key}
            rows.append(row | {"config": config})
    lines = sorted({json.dumps(row) for row in rows})
    tuning.REJECTED.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    return len(lines)
