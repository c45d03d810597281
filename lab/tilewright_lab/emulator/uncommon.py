"""Instructions of other people's kernels: float64, rounding to integers, bit fields, votes."""

from __future__ import annotations

import numpy as np

from tilewright_lab.emulator.faults import Fault
from tilewright_lab.emulator.formats import f32
from tilewright_lab.emulator.memory import I, U
from tilewright_lab.emulator.part import Part

# They order memory, or tell the hardware something, and change no value.
SILENT = {"membar", "griddepcontrol", "prefetch", "prefetchu", "nanosleep", "createpolicy"}
ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
FLOAT64 = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "abs": np.abs,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "rcp": np.reciprocal,
    "max": np.fmax,
    "min": np.fmin,
}


class Uncommon(Part):
    def uncommon(self, op, args, who, text, bits) -> bool:
        """Executes an instruction; False if it is none of these."""
        name, kind = op[0], op[-1]
        if name in SILENT or text in ("fence.acq_rel.gpu", "fence.acq_rel.cta", "fence.sc.gpu"):
            if name == "createpolicy":
                self.put(args[0], np.zeros(self.n, np.uint64), who)
        elif text.startswith("cvta"):  # addresses are the same in every space
            if "local" not in op and "global" not in op:
                return False
            self.put(args[0], self.get(args[1], bits), who)
        elif name == "trap":
            raise Fault("barrier", "trap: an assertion of the kernel failed")
        elif name == "exit":
            self.pc[who] = len(self.k.code)
        elif name == "vote":
            self.vote(op, args, who, text)
        elif name == "activemask":
            lanes = who.reshape(-1, 32)
            self.put(args[0], np.repeat(mask_of(lanes), 32), who)
        elif name in ("lop3", "bfi", "brev", "clz"):
            self.put(args[0], self.bit_field(op, args, bits), who)
        elif name == "mul" and op[1] == "hi" and bits == 64:
            self.put(args[0], self.high_half(op, args), who)
        elif name == "copysign":
            size, sign = self.get(args[2], bits), self.get(args[1], bits)
            top = U[bits](1 << bits - 1)
            self.put(args[0], size & ~top | sign & top, who)
        elif name == "cvt" and (converted := self.convert_more(op, args)) is not None:
            self.put(args[0], converted, who)
        elif kind == "f64" and name not in ("mov", "selp", "setp", "ld", "st", "cvt"):
            self.put(args[0], self.float64(op, args), who)
        else:
            return False
        return True

    def vote(self, op, args, who, text):
        self.whole_warps(who, text)
        lanes = self.truth(args[1].lstrip("!")).reshape(-1, 32) ^ args[1].startswith("!")
        if op[2] == "ballot":
            self.put(args[0], np.repeat(mask_of(lanes), 32), who)
            return
        voted = {"any": lanes.any(1), "all": lanes.all(1)}[op[2]]
        self.put(args[0], np.repeat(voted, 32), who)

    def bit_field(self, op, args, bits):
        name = op[0]
        given = [self.get(a, bits) for a in args[1:3]]
        if name == "lop3":  # the table's bit at 4 a + 2 b + c
            a, b, c = *given, self.get(args[3], 32)
            table, out = int(args[4], 0), np.zeros(self.n, np.uint32)
            for i in range(8):
                if table >> i & 1:
                    out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            return out
        if name == "bfi":
            at, count = (self.get(a, 32).astype(np.uint64) for a in args[3:5])
            field = (np.uint64(1) << count) - np.uint64(1) << at
            low, into = (g.astype(np.uint64) for g in given)
            return (into & ~field | low << at & field).astype(U[bits])
        raw = given[0].astype(f">u{bits // 8}").view(np.uint8).reshape(self.n, -1)
        digits = np.unpackbits(raw, axis=1)  # the highest first
        if name == "brev":
            return np.packbits(digits[:, ::-1], axis=1).view(f">u{bits // 8}")[:, 0].astype(U[bits])
        return np.where(digits.any(1), digits.argmax(1), bits).astype(np.uint32)

    def high_half(self, op, args):
        kind = I[64] if op[-1] == "s64" else U[64]
        a, b = (self.get(x, 64).view(kind).tolist() for x in args[1:])
        high = [(x * y >> 64) & (1 << 64) - 1 for x, y in zip(a, b, strict=True)]
        return np.array(high, np.uint64)

    def convert_more(self, op, args):
        """Conversions that `convert` has not; None: it has."""
        to, source, how = op[-2], op[-1], set(op[1:-2])
        if to == "tf32":
            bits = self.get(args[1], 32)
            if "rna" in how:  # ties away from zero
                return bits + np.uint32(1 << 12) & np.uint32(0xFFFFE000)
            odd = bits >> np.uint32(13) & np.uint32(1)
            return bits + np.uint32((1 << 12) - 1) + odd & np.uint32(0xFFFFE000)
        rounding = next((r for r in ROUND if r in how), None)
        floats = {"f32", "f64"}
        if source in floats and to in floats:
            value = self.real(args[1], source)
            if rounding:
                value = ROUND[rounding](value)
            if "sat" in how:
                value = np.where(np.isnan(value), 0, np.clip(value, 0, 1))
            return self.unreal(value, to)
        if source in floats and to[0] in "su" and rounding and to not in ("bf16", "f16"):
            if (source, to, rounding) in (("f32", "s32", "rzi"), ("f32", "u32", "rzi")):
                return None
            bits = int(to[1:])
            limit = np.iinfo(I[bits] if to[0] == "s" else U[bits])
            whole = ROUND[rounding](np.nan_to_num(self.real(args[1], source), nan=0.0))
            exact = [
                min(max(int(v), limit.min), limit.max) for v in np.clip(whole, -(2.0**65), 2.0**65)
            ]
            return np.array(exact, I[bits] if to[0] == "s" else U[bits]).view(U[bits])
        if to == "f64" and source[0] in "su":
            raw = self.get(args[1], int(source[1:]))
            raw = raw.view(I[raw.itemsize * 8]) if source[0] == "s" else raw
            return raw.astype(np.float64).view(np.uint64)
        return None

    def real(self, name, kind):
        """An operand's numbers in float64."""
        if kind == "f64":
            return self.get(name, 64).view(np.float64)
        return f32(self.get(name, 32)).astype(np.float64)

    @staticmethod
    def unreal(value, kind):
        if kind == "f64":
            return np.ascontiguousarray(value, np.float64).view(np.uint64)
        return np.ascontiguousarray(value, np.float32).view(np.uint32)

    def float64(self, op, args):
        given = [self.real(a, "f64") for a in args[1:]]
        if op[0] == "fma":  # in the widest type of NumPy, so one rounding is almost exact
            a, b, c = (g.astype(np.longdouble) for g in given)
            return self.unreal(a * b + c, "f64")
        return self.unreal(FLOAT64[op[0]](*given), "f64")


def mask_of(lanes):
    """[warps, 32] as one number per warp, lane 0 the lowest bit."""
    return (lanes.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
