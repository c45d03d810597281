"""The text of instructions, parsed."""

from __future__ import annotations

import functools
import re

LEAVES = ("ret", "bra", "brx", "bar", "barrier", "mbarrier", "setmaxnreg")


@functools.cache
def text_and_bits(op):
    kind = op[-1]
    return ".".join(op), int(re.sub(r"\D", "", kind)[:2] or 0) if kind[
        0
    ] in "busf" and kind != "f32x2" else 0


@functools.cache
def base_and_offset(operand):
    m = re.match(r"\[\s*(\S+?)\s*(?:\+\s*(-?\d+)\s*)?\]$", operand)
    if m is None:
        raise KeyError(operand)
    return m[1], int(m[2] or 0)
