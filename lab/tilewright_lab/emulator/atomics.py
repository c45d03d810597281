"""Atomic operations of a cluster on global and shared memory."""

from __future__ import annotations

import re

import numpy as np

from tilewright_lab.emulator.formats import narrow, widen
from tilewright_lab.emulator.memory import I, U
from tilewright_lab.emulator.part import Part

ORDERS = {"acq_rel", "acquire", "release", "relaxed"}
SCOPES = {"cta", "cluster", "gpu", "sys"}


class Atomics(Part):
    def atomic(self, op, args, who, text, bits):
        """atom and red: threads take turns, the lowest first; a vector is one operation per
        element.
        """
        rest = [o for o in op[1:-1] if o not in ORDERS | SCOPES | {"noftz", "l2", "L2::cache_hint"}]
        space = next((o.split(":")[0] for o in rest if o.startswith(("global", "shared"))), "")
        what = [o for o in rest if o.split(":")[0] != space and not re.fullmatch(r"v\d", o)]
        kind = op[-1]
        digits = re.search(r"\d+", kind)
        if not space or len(what) != 1 or digits is None:
            raise KeyError(text)
        returns = op[0] == "atom"
        target, *operands = args[1:] if returns else args
        given = [[p.strip() for p in a.strip("{}").split(",")] for a in operands]
        old = [p.strip() for p in args[0].strip("{}").split(",")] if returns else []
        width = int(digits[0]) * (2 if kind.endswith("x2") else 1)
        size, address = width // 8, self.address(target)
        count = len(given[0])
        places = self.places(space, address, size * count, who, "st")
        values = [[self.get(p, width) for p in part] for part in given]
        previous = np.zeros((self.n, count), U[width])
        self.count_atomic(space, address, size * count, who)
        data = self.memory.data if space == "global" else self.shared
        if space == "global":
            self.check_atomic(places, who, op)
        for row, thread in enumerate(np.flatnonzero(who)):
            for i in range(count):
                part = slice(i * size, (i + 1) * size)
                at = (
                    places[row, part]
                    if space == "global"
                    else (
                        np.broadcast_to(places[0], places[1].shape)[row, part],
                        places[1][row, part],
                    )
                )
                before = data[at].view(U[width])
                previous[thread, i] = before[0]
                operand = [v[i][thread : thread + 1].view(U[width]) for v in values]
                if space != "global":
                    self.written[at] = -1  # other threads read it after a barrier
                data[at] = applied(what[0], kind, width, before, operand).view(np.uint8)
        for i, part in enumerate(old):
            if part != "_":
                self.put(part, previous[:, i].copy(), who)

    def count_atomic(self, space, address, size, who):
        if self.counts and space == "global":
            self.count("written", address[who], np.flatnonzero(who), size)
        elif self.counts:
            self.counts.shared(address[who], size, np.flatnonzero(who))

    def check_atomic(self, places, who, op):
        """Atomics do not race with each other, but with plain accesses of other threads."""
        memory, threads = self.memory, self.k.threads
        me, block = self.everywhere[who][:, None], self.blocks[who][:, None]
        plain = ~memory.atomic[places]
        if plain.any():
            lane, _ = np.nonzero(plain)
            chosen = np.unique(lane)
            memory.check_atomic(places[chosen], me[chosen], block[chosen], threads)
        unset = memory.unset[places]
        if unset.any():
            at = int(places[unset][0])
            self.note("uninitialized", f"adds to {memory.element(at)}, which nothing has written")
        memory.join_writers(places, me, block, threads)
        memory.atomic[places] = True
        memory.written[places] |= 1
        self.note_access(places, who)
        memory.unset[places] = False
        for does, orders in (
            (memory.released, {"release", "acq_rel"}),
            (memory.acquired, {"acquire", "acq_rel"}),
        ):
            for b in np.unique(block) if orders & set(op) else ():
                does.setdefault(int(b), set()).update(places[(block == b)[:, 0], 0].tolist())


def applied(what, kind, width, before, operand):
    """The new value of one element: arrays of one unsigned number."""
    if what == "exch":
        return operand[0]
    if what == "cas":
        return np.where(before == operand[0], operand[1], before)
    if what in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[what](
            before, operand[0]
        )
    apply = {"add": np.add, "min": np.fmin, "max": np.fmax}[what]
    if kind[0] in "us":
        types = I if kind[0] == "s" else U
        apply = {"add": np.add, "min": np.minimum, "max": np.maximum}[what]
        return apply(before.view(types[width]), operand[0].view(types[width])).view(U[width])
    if kind in ("f32", "f64"):
        real = np.float32 if kind == "f32" else np.float64
        return apply(before.view(real), operand[0].view(real)).view(U[width])
    half = kind.removesuffix("x2")
    pair = (widen(v.view(np.uint16), half) for v in (before, operand[0]))
    return np.ascontiguousarray(narrow(apply(*pair), half)).view(U[width])
