"""Loops of a compiled kernel, read from its PTX: what is between a label and a branch back to
it.
"""

from __future__ import annotations

import re

LABEL = re.compile(r"^\s*(\$[\w$]+):")
BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$[\w$]+)\s*;")
DIVISION = re.compile(r"(?<![\w.%$])(?:div|rem|rcp)\.[\w.]+")


def divisions(ptx: str) -> int:
    """How many instructions in loops divide, take a remainder or a reciprocal: each is dozens of
    machine instructions of integers, and several of floats.
    """
    lines = ptx.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := LABEL.match(line))}
    looped: set[int] = set()
    for i, line in enumerate(lines):
        for target in BRANCH.findall(line):
            looped.update(range(labels.get(target, i), i))
    return sum(len(DIVISION.findall(lines[i].partition("//")[0])) for i in looped)
