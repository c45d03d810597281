"""The cost of a launch in counts: instructions by class, sectors, bank conflicts."""

from __future__ import annotations

import collections

import numpy as np

SPECIAL = {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "div"}
CONTROL = {"bra", "brx", "ret", "bar", "barrier", "mbarrier", "fence", "elect", "setmaxnreg"}


def instruction_class(op):
    """Classifies an instruction by the unit of a multiprocessor that executes it."""
    name = op[0]
    if name in ("ld", "st", "cp", "ldmatrix", "stmatrix"):
        return "parameter" if "param" in op else "memory"
    if name in ("mma", "wgmma", "tcgen05"):
        return "tensor"
    if name in SPECIAL:
        return "special"
    if name in CONTROL:
        return "control"
    if name in ("shfl", "redux", "mapa"):
        return "exchange"
    return (
        "convert"
        if name == "cvt"
        else "float"
        if op[-1] in ("f32", "f32x2", "bf16", "bf16x2", "f16", "f16x2")
        and name not in ("mov", "selp")
        else "integer"
    )


class Counts:
    """Counts over the launches of a kernel.

    requested: sectors of 32 bytes of global memory that warps' instructions read and wrote, each
    once per instruction.   least: those that programs touch, each once per program: all of it comes
    from memory or from the L2 at least once.

    wavefronts: passes of instructions over shared memory.   conflicts: those that a bank needed for
    several of its words.

    needed: sectors that would hold the bytes of each instruction if they were adjacent.
    by_line, apart: conflicts, and sectors beyond the needed ones, by the line of the source, as
        `where` names it for an instruction.

    issued: PTX instructions by class, one per warp.   products: multiply-adds of the tensor cores.
    """

    def __init__(self):
        self.requested, self.least = {"read": 0, "written": 0}, {"read": 0, "written": 0}
        self.wavefronts = self.conflicts = self.products = 0
        self.issued = collections.Counter()
        self.by_line = collections.Counter()  # conflicts
        self.needed, self.apart = {"read": 0, "written": 0}, collections.Counter()
        self.now, self.where = 0, lambda pc: ""

    def shared(self, address, size, lanes):
        """Counts an access of `size` bytes per thread: a pass covers 128 bytes, so 32, 16 or 8
        threads.
        """
        groups = lanes // (32 if size <= 4 else 128 // size)
        words = (address[:, None] + np.arange(0, size, 4)) // 4
        touched = np.unique(
            groups[:, None] * (1 << 32) + words
        )  # several threads at one word: one of them
        passes = np.zeros((groups.max() + 1, 32), np.int64)
        np.add.at(passes, (touched >> 32, touched % 32), 1)
        passes = passes.max(1)
        self.wavefronts += int(passes.sum())
        if conflicts := int((passes - 1)[passes > 0].sum()):
            self.conflicts += conflicts
            self.by_line[self.where(self.now)] += conflicts

    def sectors(self, kind, at, lanes, size):
        """Counts an access to global memory of `size` bytes per thread, each within a sector."""
        warp = lanes // 32 * (1 << 48)
        requested = len(np.unique(warp + at // 32))
        places = np.unique(warp + at)
        _, in_warp = np.unique(places >> 48, return_counts=True)
        needed = int((-(-in_warp * size // 32)).sum())
        self.requested[kind] += requested
        self.needed[kind] += needed
        if requested > needed:
            self.apart[self.where(self.now)] += requested - needed

    def facts(self):
        return {
            "requested": self.requested,
            "least": self.least,
            "wavefronts": self.wavefronts,
            "conflicts": self.conflicts,
            "issued": dict(sorted(self.issued.items())),
            "products": self.products,
        }
