"""Masked loads without `other`: Triton does not define what they give where the mask is false.
Today its PTX sets that to zero; here it is set to what shows in a result that it reaches.
"""

from __future__ import annotations

import re

# By type of the elements, infinity: it reaches sums, maxima and products with zero, and no
# `tl.where`. Integers, and the 8-bit format without infinities, get a pattern.
HIGH = {"f16": "7c00", "bf16": "7f80", "f32": "7f800000", "f64": "7ff0000000000000", "f8E5M2": "7c"}
# Below every number, which alone reaches minima.
LOW = {"f16": "fc00", "bf16": "ff80", "f32": "ff800000", "f64": "fff0000000000000", "f8E5M2": "fc"}
FILLS = {"high": (HIGH, "5a"), "low": (LOW, "a5")}

Loads = dict[tuple[str, int], str]  # by file and line: the type of the elements


def loads_without_other(ttir: str) -> Loads:
    """Those of Triton's IR, where a load's operands are its pointer, its mask and its `other`."""
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttir, re.MULTILINE))

    def place(text: str) -> tuple[str, int] | None:
        """The innermost file and line of a location."""
        while (m := re.search(r"#loc\d*", text)) and not text.startswith('"/'):
            text = places.get(m[0], "")
        m = re.match(r'"(.*?)":(\d+)', text)
        return (m[1], int(m[2])) if m else None

    loads: Loads = {}
    load = r"tt\.load %\w+, %\w+ (?:\w+ = \w+ |\{[^}]*\} )*: .*?!tt\.ptr<(\w+)>.* loc\((#loc\d*)\)"
    for element, where in re.findall(load, ttir):
        if (at := place(where)) is not None:
            loads[at] = element
    return loads


def filled(ptx: str, loads: Loads, fill: str) -> str:
    """The PTX with other numbers than zero for these loads' masked elements.   fill: of FILLS."""
    of_type, pattern = FILLS[fill]
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', ptx))

    def of_a_load(assembly: re.Match) -> str:
        m = re.search(r"\.loc\s+(\d+)\s+(\d+)", assembly[0])
        element = loads.get((files.get(m[1], ""), int(m[2]))) if m else None
        if element is None or "ld.global" not in assembly[0]:
            return assembly[0]
        bits = of_type.get(element, pattern)

        def other(zero: re.Match) -> str:
            return f"mov.{zero[1]}{zero[2]} {zero[3]}, 0x{bits * (int(zero[2]) // 4 // len(bits))};"

        return re.sub(r"mov\.([ub])(\d+) (%\w+), 0x0;", other, assembly[0])

    return re.sub(r"// begin inline asm.*?// end inline asm", of_a_load, ptx, flags=re.DOTALL)
