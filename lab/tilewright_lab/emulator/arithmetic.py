"""Arithmetic, comparisons, conversions and shuffles of a cluster."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np

from tilewright_lab.emulator.faults import Fault
from tilewright_lab.emulator.formats import E2M1, f32, from_e4m3, narrow, to_e2m1, to_e4m3, widen
from tilewright_lab.emulator.memory import I, U
from tilewright_lab.emulator.part import Part


class Arithmetic(Part):
    def move(self, name, op, args, who, text, bits):
        spaces = ("global", "shared", "param", "local")
        space = next(o for o in op if o.split(":")[0] in spaces).split(":")[0]
        if space == "param":
            value = self.values[args[1][1:-1]]
            raw = (
                int(
                    np.float64(value).view(np.uint64)
                    if bits == 64
                    else np.float32(value).view(np.uint32)
                )
                if isinstance(value, float)
                else int(value) & (1 << bits) - 1
            )
            width = self.k.widths[
                args[0].rstrip("0123456789")
            ]  # ld.param.s32 may also fill a 64-bit register
            if op[-1][0] == "s" and raw >> bits - 1:
                raw |= (1 << width) - (1 << bits)
            return self.put(args[0], np.full(self.n, raw, U[width]), who)
        data = args[0] if name == "ld" else args[1]
        where = self.address(args[1] if name == "ld" else args[0])
        parts = [p.strip() for p in data.strip("{}").split(",")]
        size = bits // 8
        if name == "ld":
            raw = self.load(space, where, size * len(parts), who, text)
            for i, part in enumerate(parts):
                value = np.zeros(self.n, U[bits])
                value[who] = np.ascontiguousarray(raw[:, i * size : (i + 1) * size]).view(U[bits])[
                    :, 0
                ]
                if op[-1][0] == "s":
                    value = value.view(I[bits])
                # A register may be wider than the load.
                width = U[self.k.widths[part.rstrip("0123456789")]]
                self.put(part, value.astype(width), who)
            return None
        raw = np.concatenate(
            [self.get(p, bits).astype(U[bits])[who][:, None].view(np.uint8) for p in parts], 1
        )
        return self.store(space, where, raw, who, text)

    def shuffle(self, op, args, who, text):
        value = self.get(args[1], 32)
        lanes = who.reshape(-1, 32) if self.k.threads % 32 == 0 else who.reshape(self.cluster, -1)
        if args[4] == "-1" and not (lanes.all(1) | ~lanes.any(1)).all():
            raise Fault("barrier", "part of a warp")
        lane, me = self.thread % 32, np.arange(self.n)
        given = self.get(args[2], 32).astype(np.int64)
        other = lane ^ given if op[2] == "bfly" else given
        if op[2] == "up":  # the lowest lanes keep their own value
            other = np.where(lane < given, lane, lane - given)
        self.put(args[0], value[me - lane + other], who)

    def compare(self, op, args, half=None):
        kind, bits = op[-1], int(re.sub(r"\D", "", op[-1])[:2])
        a, b = (
            self.get(args[1], 32 if half is not None else bits),
            self.get(args[2], 32 if half is not None else bits),
        )
        if half is not None:  # of 16 bits, the lower one first
            kind = kind.removesuffix("x2")
            a, b = ((v >> 16 * half).astype(np.uint16) for v in (a, b))
        if kind == "f32":
            a, b = f32(a), f32(b)
        elif kind == "f64":
            a, b = a.view(np.float64), b.view(np.float64)
        elif kind in ("bf16", "f16"):
            a, b = widen(a, kind), widen(b, kind)
        elif kind[0] == "s":
            a, b = a.view(I[bits]), b.view(I[bits])
        how = op[1]
        if how == "nan":
            return np.isnan(a) | np.isnan(b)
        if how == "num":
            return ~(np.isnan(a) | np.isnan(b))
        unordered = how.endswith("u") and kind[-3:] in ("f32", "f16", "f64") and how not in ("lu",)
        holds = {
            "eq": np.equal,
            "ne": np.not_equal,
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
        }[how[:2]](a, b)
        if "f" in kind:
            nan = np.isnan(a) | np.isnan(b)
            holds = (holds | nan) if unordered else (holds & ~nan)
        for both in {"and", "or", "xor"} & set(op):  # with a third operand
            third = self.truth(args[3].lstrip("!")) ^ args[3].startswith("!")
            join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
            holds = join[both](holds, third)
        return holds

    def convert(self, op, args):
        to, source = op[-2], op[-1]
        if op[1:] == ["rn", "satfinite", "e2m1x2", "f32"]:  # the first source is the upper half
            high, low = (to_e2m1(f32(self.get(a, 32))) for a in args[1:3])
            return high << 4 | low
        if op[1:] == ["rn", "satfinite", "e4m3x2", "f32"]:
            high, low = (to_e4m3(f32(self.get(a, 32))) for a in args[1:3])
            return high.astype(np.uint16) << 8 | low
        if op[1:] == ["rn", "f16x2", "e4m3x2"]:
            code = self.get(args[1], 16)
            high, low = (
                from_e4m3(c.astype(np.uint8)).view(np.uint16) for c in (code >> 8, code & 255)
            )
            return high.astype(np.uint32) << 16 | low
        if op[1:] == ["rn", "f16x2", "e2m1x2"]:
            code = self.get(args[1], 8)
            high, low = (E2M1[c].astype(np.float16).view(np.uint16) for c in (code >> 4, code & 15))
            return high.astype(np.uint32) << 16 | low
        if extra := set(op[1:-2]) - {"rn", "rz", "rzi", "ftz"}:
            raise KeyError(f"{'.'.join(op)}: {extra}")
        if "rzi" in op:  # to an integer, toward zero, saturating; NaN becomes 0
            if source != "f32" or to not in ("s32", "u32"):
                raise KeyError(".".join(op))
            limit = np.iinfo(I[32] if to == "s32" else U[32])
            whole = np.trunc(np.nan_to_num(f32(self.get(args[1], 32)).astype(np.float64), nan=0.0))
            return np.clip(whole, limit.min, limit.max).astype(np.int64).astype(np.uint32)
        if to in ("bf16x2", "f16x2"):  # the first source is the upper half
            high, low = (narrow(f32(self.get(a, 32)), to[:-2], "rz" in op) for a in args[1:3])
            return high.astype(np.uint32) << 16 | low
        a = self.get(args[1], int(re.sub(r"\D", "", source)))
        if source in ("bf16", "f16"):
            return widen(a, source).view(np.uint32)
        if source == "f32":
            return narrow(f32(a), to, "rz" in op)
        bits = int(to[1:])
        wide = a.view(I[a.itemsize * 8]) if source[0] == "s" else a
        return wide.astype(np.float32).view(np.uint32) if to == "f32" else wide.astype(U[bits])

    def float(self, op, args):
        name, kind = op[0], op[-1]
        if kind == "f32x2":
            given = [self.get(a, 64).view(np.float32) for a in args[1:]]
        elif kind.endswith("16x2"):
            given = [widen(self.get(a, 32).view(np.uint16), kind[:-2]) for a in args[1:]]
        elif kind.endswith("16"):  # also add.rn.f32.bf16: all but the last are 16 bits wide
            given = [
                widen(v, kind) if v.dtype == np.uint16 else f32(v)
                for v in (self.get(a, 32 if op[-2] == "f32" else 16) for a in args[1:])
            ]
        else:
            given = [f32(self.get(a, 32)) for a in args[1:]]
        if "ftz" in op:  # denormal numbers are zeros of their sign
            given = [
                np.where(np.abs(g) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), g), g)
                for g in given
            ]
        if name == "fma":
            a, b, c = (g.astype(np.float64) for g in given)
            value = (a * b + c).astype(np.float32)
        elif name in ("max", "min"):
            pick = (
                {"max": np.fmax, "min": np.fmin}
                if "NaN" not in op
                else {"max": np.maximum, "min": np.minimum}
            )
            value = functools.reduce(pick[name], given)  # two, or (sm_100) three
        else:
            value = {
                "add": np.add,
                "sub": np.subtract,
                "mul": np.multiply,
                "div": np.divide,
                "abs": np.abs,
                "neg": np.negative,
                "sqrt": np.sqrt,
                "rcp": lambda x: np.float32(1) / x,
                "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(np.float32),
                "sin": np.sin,
                "cos": np.cos,
                "tanh": lambda x: np.tanh(x.astype(np.float64)).astype(np.float32),
                "ex2": lambda x: np.exp2(x.astype(np.float64)).astype(np.float32),
                "lg2": lambda x: np.log2(x.astype(np.float64)).astype(np.float32),
            }[name](*given)
        value = np.ascontiguousarray(value, np.float32)
        if "ftz" in op:
            value = np.where(
                np.abs(value) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), value), value
            )
        if kind == "f32x2":
            return value.view(np.uint64)
        if kind.endswith("16x2"):
            return np.ascontiguousarray(narrow(value, kind[:-2])).view(np.uint32)
        return (
            narrow(value, kind)
            if kind.endswith("16") and op[-2] != "f32"
            else value.view(np.uint32)
        )

    # Long: a table of instructions.
    def integer(self, op, args, bits):
        name = op[0]
        given = [self.get(a, bits) for a in args[1:]]
        if op[-1].endswith("16x2"):  # each half by itself
            halves = [self.get(a, 32).view(I[16] if op[-1][0] == "s" else U[16]) for a in args[1:]]
            out = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}[name](
                *halves
            )
            return np.ascontiguousarray(out).view(np.uint32)
        if op[-1][0] == "s":
            given = [g.view(I[g.itemsize * 8]) for g in given]
        if name == "mul" or name == "mad":
            if bits == 64 and op[1] != "lo":
                raise KeyError(".".join(op))
            wide = op[1] in ("wide", "hi")  # hi: the upper half of it
            if wide:
                given[:2] = [g.astype((I if op[-1][0] == "s" else U)[2 * bits]) for g in given[:2]]
            out = given[0] * given[1]
            if op[1] == "hi":
                wide, out = False, (out >> bits).astype(I[bits] if op[-1][0] == "s" else U[bits])
            if name == "mad":
                third = self.get(args[3], bits * 2 if wide else bits)
                out = out + third.view(out.dtype)
            return out.view(U[bits * 2 if wide else bits])
        if name in ("shl", "shr"):
            by = self.get(args[2], 32).astype(given[0].dtype)
            return (np.left_shift if name == "shl" else np.right_shift)(given[0], by).view(U[bits])
        if name in ("div", "rem"):
            a, b = given
            q = np.where(b == 0, 0, a // np.where(b == 0, 1, b))
            if op[-1][0] == "s":  # toward zero
                q = q + ((q < 0) & (q * b != a))
            return (q if name == "div" else a - q * b).astype(given[0].dtype).view(U[bits])
        if name == "bfe":  # a bit field, sign-extended if signed
            at, count = (self.get(a, 32).astype(np.int64) for a in args[2:])
            up = bits - count
            return (
                (given[0].astype(given[0].dtype) << (up - at).astype(given[0].dtype))
                >> up.astype(given[0].dtype)
            ).view(U[bits])
        if (
            name == "prmt"
        ):  # bytes of two numbers, selected by four digits; 8 or more repeats the byte's sign
            both = given[0].astype(np.uint64) | given[1].astype(np.uint64) << np.uint64(32)
            out = np.zeros(self.n, np.uint32)
            for i in range(4):
                digit = given[2] >> np.uint32(4 * i) & 15
                byte = (both >> (digit & 7).astype(np.uint64) * np.uint64(8)).astype(np.uint8)
                byte = np.where(digit > 7, np.where(byte > 127, 255, 0), byte)
                out |= byte.astype(np.uint32) << np.uint32(8 * i)
            return out
        if (
            name == "shf"
        ):  # two numbers as one of 64 bits, the first the low half: its upper or lower half
            both = given[0].astype(np.uint64) | given[1].astype(np.uint64) << np.uint64(32)
            by = given[2] & 31 if "wrap" in op else np.minimum(given[2], 32)
            shifted = (
                both << by.astype(np.uint64) >> np.uint64(32)
                if op[1] == "l"
                else both >> by.astype(np.uint64)
            )
            return shifted.astype(np.uint32)
        if name == "popc":  # of 32 bits or 64, into 32
            one = given[0].dtype.type(1)
            ones: Any = sum(given[0] >> given[0].dtype.type(i) & one for i in range(bits))
            return ones.astype(np.uint32)
        functions = {
            "add": np.add,
            "sub": np.subtract,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
            "not": np.bitwise_not,
            "neg": np.negative,
            "min": np.minimum,
            "max": np.maximum,
            "abs": np.abs,
        }
        many = functools.reduce if name in ("min", "max") else (lambda fn, given: fn(*given))
        return many(functions[name], given).view(U[bits])
