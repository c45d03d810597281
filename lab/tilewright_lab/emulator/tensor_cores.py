"""Matrix instructions of a cluster: ldmatrix, mma, wgmma."""

from __future__ import annotations

import re

import numpy as np

from tilewright_lab.emulator.faults import Fault
from tilewright_lab.emulator.formats import f32, from_float8, widen
from tilewright_lab.emulator.part import Part
from tilewright_lab.emulator.tma import swizzled


class TensorCores(Part):
    # ---- wgmma

    def operand(self, described, rows, size, transposed, block, text):
        """Byte indices of an operand in shared memory, [rows, K] elements of `size` bytes where a
        row has 32 bytes, from its matrix descriptor. A row is one of a's M or b's N. transposed:
        adjacent elements in memory belong to adjacent rows, not to the summed dimension.
        """
        start, leading, stride = ((described >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        span = {0: 0, 1: 128, 2: 64, 3: 32}[described >> 62]
        if span == 0 or described >> 49 & 7:
            raise KeyError(f"{text}: without a swizzle, or with an offset")
        at = matrix_places(start, leading, stride, span, rows, size, transposed, 32)
        return self.checked_matrix(at, block)

    def checked_matrix(self, at, block, warp=None):
        """Places of an operand's bytes, which tensor cores may read now.   warp: the one whose
        thread says so, if it is one.
        """
        if at.max() >= self.k.shared_size or at.min() < 1024:
            raise Fault("bounds", "outside shared memory")
        places = np.full(at.shape, block), at
        if self.flying[places].any():
            self.memory.fail("race", "reads what a copy may still be writing")
        if self.unfenced[places].any():
            self.memory.fail("race", "reads what threads wrote, without a fence between")
        if self.clocks is None and (self.written[places] != 0).any():
            self.memory.fail("race", "reads what threads wrote, without a barrier between")
        if warp is not None:
            self.ordered_for("reads", warp, at.reshape(-1), False)
        return places

    def warpgroups(self, who, text):
        groups = who.reshape(-1, 128)
        if self.k.threads % 128 or not (groups.all(1) | ~groups.any(1)).all():
            raise Fault("barrier", "part of a warpgroup")
        return np.flatnonzero(groups[:, 0])

    # Long: one instruction, whose operands have layouts of their own.
    def wgmma(self, op, args, who, text):
        groups = self.warpgroups(who, text)
        if op[1] == "fence":
            return
        if op[1] == "commit_group":
            for g in groups:
                for product in self.products[g]:
                    product["group"] += 1
            return
        if op[1] == "wait_group":
            for g in groups:
                done, left = {}, [p for p in self.products[g] if p["group"] <= int(args[0])]
                for p in self.products[g][: len(self.products[g]) - len(left)]:
                    done |= p["results"]
                    for places in p["read"]:
                        self.read[places] = -1  # read by all four warps
                        self.by_warps(g, places)
                self.products[g] = left
                here = np.arange(self.n) // 128 == g
                for r in done.keys() - {r for p in left for r in p["results"]}:
                    whole = np.zeros(self.n, np.uint32)
                    whole[here] = done[r]
                    self.put(r, whole, here)
            self.repin()
            return
        m = re.match(r"m64n(\d+)k(\d+)$", op[4])
        if op[1:4] != ["mma_async", "sync", "aligned"] or m is None or len(op) != 8:
            raise KeyError(text)
        columns, result, *kinds = int(m[1]), *op[5:]
        each = PER_REGISTER[kinds[0]]
        if result not in ("f32", "s32") or int(m[2]) != 8 * each:
            raise KeyError(text)
        if self.counts:
            self.counts.products += 64 * columns * 8 * each * len(groups)
        names = [p.strip() for p in args[0].strip("{}").split(",")]
        own = args[1].startswith("{")
        scales, turned = args[4:6], [int(a) for a in args[6:]]
        scaled, turns = result == "f32", each == 2  # only these have such arguments
        if scales != ["1", "1"] * scaled or len(turned) != (2 - own) * turns:
            raise KeyError(text)
        turned = turned or [0, 0]
        adds, described = self.truth(args[3]), self.get(args[2], 64)
        for g in groups:
            here = slice(128 * g, 128 * g + 128)
            block = int(self.block[128 * g])
            if own:
                a = np.stack(
                    [
                        elements(self.get(p.strip(), 32), kinds[0]).reshape(-1, 4, 8, 4, each)[g]
                        for p in args[1].strip("{}").split(",")
                    ]
                )  # register, warp, row, thread in row, element
                a = a.reshape(2, 2, 4, 8, 4, each).transpose(2, 1, 3, 0, 4, 5).reshape(64, -1)
                read = []
            else:
                places = self.operand(
                    int(self.get(args[1], 64)[128 * g]), 64, 4 // each, turned[0], block, text
                )
                self.by_warps(g, places)
                a, read = from_bytes(self.shared[places], kinds[0])[:, :, 0], [places]
            at = int(described[128 * g])
            places = self.operand(at, columns, 4 // each, turned[-1], block, text)
            self.by_warps(g, places)
            b = from_bytes(self.shared[places], kinds[1])[:, :, 0]
            read.append(places)
            waiting = {}  # pending results per register
            for p in self.products[g]:
                waiting |= p["results"]
            c = np.zeros((64, columns))
            if adds[128 * g]:
                given = np.stack(
                    [waiting[r] if r in waiting else self.get(r, 32)[here] for r in names]
                )
                c = (
                    sums(given, result)
                    .reshape(-1, 2, 2, 4, 8, 4)
                    .transpose(3, 1, 4, 0, 5, 2)
                    .reshape(64, columns)
                )
            d = rounded(a.astype(np.float64) @ b.T.astype(np.float64) + c, result)
            d = d.reshape(4, 2, 8, -1, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(len(names), 128)
            self.products[g].append(
                {"group": 0, "results": dict(zip(names, d, strict=True)), "read": read}
            )
            for r in names:  # NaN until the wait
                self.put(
                    r, np.full(self.n, 0x7FFFFFFF, np.uint32), who & (np.arange(self.n) // 128 == g)
                )
        self.repin()

    def by_warps(self, group, places):
        """The warps of a warpgroup read these bytes."""
        if self.clocks is not None:
            for warp in range(4 * group, 4 * group + 4):
                self.ordered_for("reads", warp, places[1].reshape(-1))

    def repin(self):
        self.pinned[:] = False
        for stores in self.stores.values():
            for _, places in stores:
                self.pinned[places] = True
        for products in self.products:
            for p in products:
                for places in p["read"]:
                    self.pinned[places] = True
        for queued in self.tensor.queue if self.tensor is not None else ():
            for places in queued.shared:
                self.pinned[places] = True

    def whole_warps(self, who, text):
        lanes = who.reshape(-1, 32)
        if not (lanes.all(1) | ~lanes.any(1)).all():
            raise Fault("barrier", "part of a warp")

    def matrix(self, name, op, args, who, text):
        """Matrices of 8 x 8 16-bit elements: thread i of a warp has two of row i / 4, or with trans
        of column i / 4, and provides the address of row i.
        """
        self.whole_warps(who, text)
        data, where = (args[0], args[1]) if name == "ldmatrix" else (args[1], args[0])
        rows, lane = self.address(where), self.thread % 32
        for i, part in enumerate(p.strip() for p in data.strip("{}").split(",")):
            first = np.arange(self.n) - lane + 8 * i  # the thread with row 0's address
            if (rows[first + lane % 8][who] % 16).any():
                raise Fault("alignment", "address not a multiple of 16")
            if self.counts:
                at = rows[first + lane // 4] + lane % 4 * 4
                self.counts.shared(at[who], 4, np.flatnonzero(who))
            # The two elements: adjacent in a row or a column.
            pieces = (
                [rows[first + lane // 4] + lane % 4 * 4]
                if "trans" not in op
                else [rows[first + lane % 4 * 2 + low] + lane // 4 * 2 for low in range(2)]
            )
            size = 4 // len(pieces)
            if name == "stmatrix":
                raw = self.get(part, 32)[who][:, None].view(np.uint8)
                for j, at in enumerate(pieces):
                    self.store("shared", at, raw[:, j * size : (j + 1) * size], who, text)
            else:
                value = np.zeros(self.n, np.uint32)
                raw = np.concatenate([self.load("shared", at, size, who, text) for at in pieces], 1)
                value[who] = np.ascontiguousarray(raw).view(np.uint32)[:, 0]
                self.put(part, value, who)

    def multiply(self, op, args, who, text):
        """mma.m16n8kK: d [16, 8] = a [16, K] b [K, 8] + c per warp; a group of four threads has one
        row (of b, column) and a register adjacent elements of it: two of 16 bits, four of 8, or one
        in TF32. Summed in float64 and rounded once.
        """
        m = re.match(r"m16n8k(\d+)$", op[3])
        kinds = [o for o in op[6:] if o not in ("satfinite", "kind::f8f6f4")]
        if op[1:3] + op[4:6] != ["sync", "aligned", "row", "col"] or m is None or len(kinds) != 4:
            raise KeyError(text)
        result, *factors, added = kinds
        each = PER_REGISTER[factors[0]]
        if result != added or result not in ("f32", "s32") or int(m[1]) != 8 * each:
            raise KeyError(text)
        self.whole_warps(who, text)
        names = [[p.strip() for p in a.strip("{}").split(",")] for a in args]
        warp = who.reshape(-1, 32)[:, 0]
        if self.counts:
            self.counts.products += 16 * 8 * 8 * each * int(warp.sum())
        a, b = (
            np.stack([elements(self.get(p, 32), kind).reshape(-1, 8, 4, each) for p in part])[
                :, warp
            ].astype(np.float64)
            for part, kind in zip(names[1:3], factors, strict=True)
        )  # register, warp, group, thread in it, element
        a = a.reshape(2, 2, *a.shape[1:]).transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 8 * each)
        b = b.transpose(1, 0, 3, 4, 2).reshape(-1, 8 * each, 8)
        c = np.stack([sums(self.get(p, 32), result).reshape(-1, 8, 4) for p in names[3]])[:, warp]
        c = c.astype(np.float64)
        c = c.reshape(2, 2, *c.shape[1:]).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)
        d = rounded(a @ b + c, result, "satfinite" in op)
        d = d.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        for part, value in zip(names[0], d, strict=True):
            whole = np.zeros(self.n, np.uint32)
            whole[who] = value
            self.put(part, whole, who)


def matrix_places(start, leading, stride, span, rows, size, transposed, width):
    """[rows, elements, size] addresses of a matrix in shared memory, whose rows have `width` bytes:
    a canonical layout of the PTX ISA, with a swizzle of `span` bytes, or 0 for none. transposed:
    adjacent elements in memory belong to adjacent rows.
    """
    row, k = np.arange(rows)[:, None], np.arange(width // size)[None, :]
    across = (span or 16) // size  # elements of a line
    if transposed:
        outer, inner = (leading, stride) if span else (stride, leading)
        at = row // across * outer + row % across * size + k % 8 * (span or 16) + k // 8 * inner
    elif span:
        at = row // 8 * stride + row % 8 * span + k * size
    else:
        at = row // 8 * stride + row % 8 * 16 + k // across * leading + k % across * size
    return swizzled(start + at[:, :, None] + np.arange(size), span)


# Elements in a register of 32 bits.
PER_REGISTER = {"bf16": 2, "f16": 2, "tf32": 1, "e4m3": 4, "e5m2": 4, "s8": 4, "u8": 4}


def elements(bits, kind):
    """The elements in registers, on a last dimension."""
    if kind == "tf32":  # the lowest 13 bits are ignored
        return f32(np.ascontiguousarray(bits) & np.uint32(0xFFFFE000))[..., None]
    return from_bytes(np.ascontiguousarray(bits)[..., None].view(np.uint8), kind)


def from_bytes(raw, kind):
    """Numbers from bytes, along the last dimension."""
    if kind in ("bf16", "f16"):
        return widen(raw.view(np.uint16), kind)
    if kind == "tf32":
        return f32(raw.view(np.uint32) & np.uint32(0xFFFFE000))
    if kind in ("s8", "u8"):
        return raw.view(np.int8) if kind == "s8" else raw
    return from_float8(raw, kind)


def sums(bits, kind):
    return f32(bits) if kind == "f32" else bits.view(np.int32)


def rounded(value, kind, saturates=False):
    """The bits of sums in float64."""
    if kind == "f32":
        return value.astype(np.float32).view(np.uint32)
    if saturates:
        value = np.clip(value, -(2.0**31), 2.0**31 - 1)
    return value.astype(np.int64).astype(np.uint32)
