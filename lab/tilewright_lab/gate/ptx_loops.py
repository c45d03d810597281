"""Reads the loops of a compiled kernel from its PTX: lines between a label and a branch back."""

from __future__ import annotations

import re

LABEL = re.compile(r"^\s*(\$[\w$]+):")
BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$[\w$]+)\s*;")
DIVISION = re.compile(r"(?<![\w.%$])(?:div|rem|rcp)\.[\w.]+")


def divisions(ptx: str) -> int:
    """Counts divisions, remainders and reciprocals in loops: each is dozens of machine instructions
    for integers, and several for floats.
    """
    lines = ptx.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := LABEL.match(line))}
    looped: set[int] = set()
    for i, line in enumerate(lines):
        for target in BRANCH.findall(line):
            looped.update(range(labels.get(target, i), i))
    return sum(len(DIVISION.findall(lines[i].partition("//")[0])) for i in looped)
