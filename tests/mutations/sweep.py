"""The table of planted faults."""

from __future__ import annotations

from tests.lib.sweeps import ROOT, Row, Sweep

from . import table
from .faults import load

FILE = "tests/mutations/results.jsonl"


def digests() -> dict[str, str]:
    return table.digests(ROOT / FILE)


def rows() -> dict[str, Row]:
    judged = {fault.id for fault in load() if fault.judgement}
    found = table.last_rows(ROOT / FILE)
    return {
        name: {
            "digest": row.get("digest"),
            "wrong": [row["result"]] * (row["result"] != "red" and name not in judged),
        }
        for name, row in found.items()
    }


SWEEP = Sweep("planted faults", f"python -m tests.mutations {FILE} --old", digests, rows)
