"""Reasons why `auto` is behind in a case, from the measurement and bench/results/reasons.toml."""

from __future__ import annotations

import fnmatch
import pathlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.page.comparisons import Pair
from bench.page.text import number
from tilewright.bench import report

NO_REASON = "no reason known yet"


@dataclass(frozen=True)
class Reason:
    """One entry of reasons.toml: glob patterns, and the sentence. A missing pattern matches
    everything.
    """

    reason: str
    op: str = "*"
    case: str = "*"
    dtype: str = "*"
    against: str = "*"
    device: str = "*"

    def fits(self, p: Pair) -> bool:
        named = {
            "op": p.group.op,
            "case": p.group.case,
            "dtype": p.group.dtype,
            "against": p.other["provider"],
            "device": p.group.source.device[1],
        }
        return all(fnmatch.fnmatchcase(value, getattr(self, name)) for name, value in named.items())


def read_reasons(path: pathlib.Path) -> list[Reason]:
    """The entries, of which the first match counts; [] without a file. Raises ValueError for a
    malformed entry.
    """
    if not path.exists():
        return []
    try:
        document = tomllib.loads(path.read_text())
        if unknown := set(document) - {"reason"}:
            raise ValueError(f"unknown {sorted(unknown)}; it holds [[reason]] entries")
        entries = [Reason(**entry) for entry in document.get("reason", [])]
        for entry in entries:
            if not all(isinstance(v, str) and v.strip() for v in vars(entry).values()):
                raise ValueError(f"every value must be a string, got {vars(entry)}")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    return entries


def why(p: Pair, reasons: Sequence[Reason]) -> str:
    """The measured reasons, then the known ones."""
    sentences = []
    if p.equal:
        ranges = " and ".join(_range(r[p.pass_name]) for r in (p.auto, p.other))
        sentences.append(f"Within spread: p20 to p80 are {ranges} ms.")
    if report.beyond(p.other):
        sentences.append(
            "It breaks the numerics contract and was timed within the slack for baselines."
        )
    if known_reason := next((r.reason for r in reasons if r.fits(p)), None):
        sentences.append(known_reason)
    if not (p.equal or known_reason):
        sentences.append(NO_REASON)
    return " ".join(sentences)


def _range(figures: dict[str, Any]) -> str:
    return f"{number(figures['p20_ms'])} to {number(figures['p80_ms'])}"
