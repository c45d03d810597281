"""Runs PTX on the CPU, so that a kernel for a GPU can be tested without one: what it computes, and that every access
to memory is inside a tensor and aligned.

All threads of a cluster run in NumPy arrays, those at the lowest instruction first, so that they meet again after a
branch. It knows the instructions that the CuTe DSL and Triton kernels are compiled to and raises for any other. fma is
computed in float64 and rounded once more; ex2.approx, lg2.approx, div.full and the like are exact to float32.
"""

from __future__ import annotations

import functools
import itertools
import re

import numpy as np
import torch

WINDOW = 1 << 20   # shared::cluster addresses: block r's shared memory is at (r + 1) * WINDOW
U = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
I = {16: np.int16, 32: np.int32, 64: np.int64}


class Memory:
    """Global memory: tensors at 256-byte boundaries, with nothing readable between them. `shift` bytes are put before
    each, to misalign it."""

    def __init__(self):
        self.data = np.zeros(4096, np.uint8)
        self.inside = np.zeros(4096, bool)
        self.written = np.zeros(4096, np.uint8)
        self.read = np.zeros(4096, bool)
        # In this launch, by which thread + 1 of all a byte was written, and read (-1: by several).
        self.writer = np.zeros(4096, np.int64)
        self.reader = np.zeros(4096, np.int64)
        self.tensors = []

    def put(self, t: torch.Tensor | None, shift: int = 0) -> int:
        """Its address. The whole storage travels, so that strides keep their meaning; only t's elements can be read."""
        if t is None:
            return 0
        for known, address in self.tensors:
            if known.data_ptr() == t.data_ptr() and known.numel() and known.shape == t.shape:
                return address
        whole = torch.as_strided(t, (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)),), (1,))
        raw = whole.contiguous().view(torch.uint8).numpy() if t.numel() else np.zeros(0, np.uint8)
        held = torch.zeros(whole.numel(), dtype=torch.uint8)
        if t.numel():
            torch.as_strided(held, t.shape, t.stride()).fill_(1)
        start = -(-len(self.data) // 256) * 256 + shift
        grown = start + len(raw) + 512
        for name, fill in (("data", 0xFF), ("inside", 0), ("written", 0), ("read", 0), ("writer", 0),
                           ("reader", 0)):
            old = getattr(self, name)
            new = np.full(grown, fill, old.dtype)
            new[:len(old)] = old
            setattr(self, name, new)
        self.data[start:start + len(raw)] = raw
        self.inside[start:start + len(raw)] = np.repeat(held.numpy().astype(bool), t.element_size())
        self.tensors.append((t, start))
        return start

    def take_back(self) -> None:
        """Writes what the kernel wrote into the tensors."""
        for t, start in self.tensors:
            span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            if t.numel() and self.written[start:start + span * t.element_size()].any():
                raw = torch.from_numpy(self.data[start:start + span * t.element_size()].copy()).view(t.dtype)
                t.copy_(torch.as_strided(raw, t.shape, t.stride()))

    def times(self, t: torch.Tensor, which: str) -> torch.Tensor:
        """How often each element was written, or whether it was read."""
        start = next(a for known, a in self.tensors if known is t)
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        raw = getattr(self, which)[start:start + span * t.element_size():t.element_size()]
        return torch.as_strided(torch.from_numpy(raw.astype(np.uint8)), t.shape, t.stride())


def _f32(bits):
    return bits.view(np.float32)


def _widen(bits, kind):
    """Numbers of 16 bits as float32."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def _narrow(x, kind, truncate=False):
    if truncate:
        assert kind == "bf16"
        return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    t = torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(torch.bfloat16 if kind == "bf16" else torch.float16)
    return t.view(torch.int16).numpy().view(np.uint16)


class Kernel:
    def __init__(self, ptx: str, dynamic_shared: int = 0):
        """dynamic_shared: bytes of the shared memory whose size the launch says, not the PTX."""
        body = re.sub(r"//[^\n]*|^\s*\.loc\s[^\n]*", "", ptx, flags=re.MULTILINE)
        outer = re.findall(r"\.extern \.shared \.align \d+ \.b8 (\S+)\[\];", body)
        head, body = body[body.index(".entry"):].split("{", 1)
        body = re.split(r"^\s*\.(?:file|section)\s", body, maxsplit=1, flags=re.MULTILINE)[0]
        lines = [line.strip() for line in head.splitlines()]
        self.parameters = [line.split()[-1].rstrip(",") for line in lines if line.startswith(".param")]
        self.threads = int(re.search(r"\.reqntid (\d+)", head)[1])
        self.shared, self.shared_size = dict.fromkeys(outer, 1024), 1024 + dynamic_shared
        self.widths = {name: 1 if kind == "pred" else int(kind[1:])
                       for kind, name in re.findall(r"\.reg \.(\w+)\s+(%[a-z]+)<", body)}
        self.code, self.labels = [], {}
        for statement in re.split(r"(?<=;)|(?<=:)(?=\s)", body):
            s = " ".join(statement.split()).rstrip(";").strip()
            if m := re.match(r"\.shared \.align (\d+) \.b8 (\S+)\[(\d+)\]", s):
                self.shared_size = -(-self.shared_size // int(m[1])) * int(m[1])
                self.shared[m[2]] = self.shared_size
                self.shared_size += int(m[3])
            elif m := re.match(r"(\$\w+):$", s):
                self.labels[m[1]] = len(self.code)
            elif s and not s.startswith((".", "}", "{")):
                m = re.match(r"(?:@(!?)(%p\d+) )?(\S+) ?(.*)", s)
                operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,]+", m[4].replace(", ", ","))]
                self.code.append((m[2], m[1] == "!", m[3].split("."), [o for o in operands if o]))

    def run(self, memory: Memory, values: list, grid: tuple[int, int, int], cluster: int = 1) -> None:
        values = dict(zip(self.parameters, values, strict=True))
        with np.errstate(all="ignore"):
            for z, y, first in itertools.product(range(grid[2]), range(grid[1]), range(0, grid[0], cluster)):
                _Cluster(self, memory, values, (first, y, z), cluster, grid).run()


class _Cluster:
    def __init__(self, kernel, memory, values, at, cluster, grid):
        self.k, self.memory, self.values, self.cluster = kernel, memory, values, cluster
        n = self.n = kernel.threads * cluster
        self.thread = np.arange(n) % kernel.threads
        self.block = np.arange(n) // kernel.threads
        first, y, z = at
        # Threads of the launch, from 1.
        self.everywhere = ((z * grid[1] + y) * grid[0] + first) * kernel.threads + np.arange(n) + 1
        self.special = {"%tid.x": self.thread, "%ctaid.x": first + self.block, "%ctaid.y": np.full(n, y),
                        "%ctaid.z": np.full(n, z), **{f"%nctaid.{d}": np.full(n, grid[i]) for i, d in enumerate("xyz")},
                        "%laneid": self.thread % 32, "%cluster_ctarank": self.block}
        self.shared = np.full((cluster, kernel.shared_size), 0xFF, np.uint8)
        # Since the last barrier: by which thread + 1 a byte was written, and read (-1: by several).
        self.written = np.zeros((cluster, kernel.shared_size), np.int64)
        self.read = np.zeros((cluster, kernel.shared_size), np.int64)
        # Copies of cp.async on their way: (threads, their groups, where to, bytes). Nobody may touch the places.
        self.copies, self.groups = [], np.zeros(n, np.int64)
        self.flying = np.zeros((cluster, kernel.shared_size), bool)
        self.abroad = np.full(n, -1)   # barrier.cluster.arrive's that a thread had made when it wrote to another block
        self.regs = {}
        self.pc = np.zeros(n, np.int64)
        self.waits = np.zeros(n, np.int8)   # 1: at bar.sync, 2: at barrier.cluster.wait
        self.arrived = np.zeros(n, np.int64)
        self.waited = np.zeros(n, np.int64)

    def run(self):
        code, end = self.k.code, len(self.k.code)
        while True:
            ready = (self.waits == 0) & (self.pc < end)
            if not ready.any():
                if (self.pc >= end).all():
                    return
                self.release()
                continue
            pc = self.pc[ready].min()
            who = ready & (self.pc == pc)
            predicate, negated, op, args = code[pc]
            self.pc[who] = pc + 1
            if predicate is not None:
                who = who & (self.regs[predicate] != negated)
            self.step(op, args, who, pc)

    def release(self):
        done = self.pc >= len(self.k.code)
        moved = False
        for b in range(self.cluster):
            here = self.block == b
            if (self.waits[here] == 1).all():   # bar.sync counts every thread of the block
                self.waits[here] = 0
                self.written[b] = self.read[b] = 0
                moved = True
        if (self.waits == 2).any() and (self.arrived >= self.waited.max() + 1).all():
            self.waited[self.waits == 2] += 1
            self.waits[self.waits == 2] = 0
            self.written[:] = self.read[:] = 0
            moved = True
        if not moved:
            at = [int((self.waits == i).sum()) for i in (1, 2)]
            raise RuntimeError(f"deadlock: {at[0]} at bar.sync, {at[1]} at barrier.cluster.wait, {done.sum()} ended")

    # ---- operands

    def get(self, name, bits):
        if name in self.regs:
            return self.regs[name]
        if name in self.special:
            return self.special[name].astype(U[bits])
        if name in self.k.shared:
            return np.full(self.n, self.k.shared[name], U[bits])
        if name.startswith("0f"):
            return np.full(self.n, int(name[2:], 16), np.uint32)
        if name.rstrip("0123456789") in self.k.widths:   # never written: of a pair, the half that does not matter
            return np.full(self.n, (1 << bits) - 1, U[bits])
        return np.full(self.n, int(name.rstrip("U"), 0) & (1 << bits) - 1, U[bits])

    def truth(self, name):
        return self.regs[name] if name in self.regs else np.full(self.n, bool(int(name)))

    def put(self, name, value, who):
        if name not in self.regs:
            self.regs[name] = np.zeros(self.n, value.dtype)
        if self.regs[name].dtype != value.dtype:
            raise TypeError(f"{name} holds {self.regs[name].dtype}, gets {value.dtype}")
        self.regs[name][who] = value[who]

    def address(self, operand):
        m = re.match(r"\[\s*(\S+?)\s*(?:\+\s*(-?\d+)\s*)?\]$", operand)
        base = self.get(m[1], 64).astype(np.int64)
        return base + int(m[2] or 0)

    # ---- memory

    def places(self, space, address, size, who, name):
        at = address[who]
        if (at % size).any():
            raise RuntimeError(f"{name}: address not a multiple of {size}")
        each = at[:, None] + np.arange(size)
        if space == "global":
            if (each >= len(self.memory.data)).any():
                raise RuntimeError(f"{name}: outside every tensor")
            # The compiler may read up to 16 aligned bytes of which some are in the tensor, and drop the others: no
            # page ends between them. They hold 0xFF here, so that using one shows.
            inside = self.memory.inside[each]
            if not (inside.any(1) if name.startswith("ld") else inside.all(1)).all():
                raise RuntimeError(f"{name}: outside every tensor")
            return each
        own = self.block[who][:, None]
        block = np.where(each >= WINDOW, each // WINDOW - 1, own)
        each = each % WINDOW
        if (each >= self.k.shared_size).any() or (each < 1024).any():
            raise RuntimeError(f"{name}: outside shared memory")
        if (abroad := (block != own).any(1)).any():
            if (self.waited[who][abroad] == 0).any():
                raise RuntimeError(f"{name}: to a block that may not have begun")
            self.abroad[np.flatnonzero(who)[abroad]] = self.arrived[who][abroad]
        return block, each

    def load(self, space, address, size, who, name):
        places = self.places(space, address, size, who, name)
        if space == "global":
            me, m = self.everywhere[who][:, None], self.memory
            if ((m.writer[places] != 0) & (m.writer[places] != me)).any():
                raise RuntimeError(f"{name}: reads what another thread writes in this launch")
            m.read[places] = True
            for at, i in zip(places.T, np.broadcast_to(me, places.shape).T, strict=True):
                m.reader[at] = np.where((m.reader[at] == 0) | (m.reader[at] == i), i, -1)
                m.reader[at[m.reader[at] != i]] = -1   # two threads of this very instruction
            return m.data[places]
        if self.flying[places].any():
            raise RuntimeError(f"{name}: reads what cp.async may still be writing, without a wait_group between")
        thread = np.broadcast_to((np.flatnonzero(who) + 1)[:, None], places[1].shape)
        if ((self.written[places] != 0) & (self.written[places] != thread)).any():
            raise RuntimeError(f"{name}: reads what another thread wrote, without a barrier between")
        for t, b, p in zip(thread.T, places[0].T if places[0].shape == thread.shape else [places[0][:, 0]] * size,
                           places[1].T, strict=True):
            before = self.read[b, p]
            self.read[b, p] = np.where((before == 0) | (before == t), t, -1)
            again = self.read[b, p] != t   # two lanes of this very instruction
            self.read[b[again], p[again]] = -1
        return self.shared[places]

    def store(self, space, address, raw, who, name):
        places = self.places(space, address, raw.shape[1], who, name)
        if space == "global":
            me, m = self.everywhere[who][:, None], self.memory
            if ((m.reader[places] != 0) & (m.reader[places] != me)).any():
                raise RuntimeError(f"{name}: writes what another thread reads in this launch")
            np.add.at(m.written, places, 1)
            m.writer[places] = me
            m.data[places] = raw
        else:
            self.claim(places, raw, who, name)
            self.shared[places] = raw

    def claim(self, places, raw, who, name):
        """That these threads may write this to shared memory, where until a barrier nobody else may. Threads with
        copies of one value may all write it."""
        thread = (np.flatnonzero(who) + 1)[:, None]
        if self.flying[places].any():
            raise RuntimeError(f"{name}: writes where cp.async may still be writing")
        for before in (self.written[places], self.read[places]):
            if ((before != 0) & (before != thread)).any():
                raise RuntimeError(f"{name}: writes where another thread wrote or read, no barrier between")
        self.written[places] = np.broadcast_to(thread, before.shape)
        if (again := self.written[places] != thread).any():
            trial = np.zeros_like(self.shared)
            trial[places] = raw
            if (trial[places] != raw).any():
                raise RuntimeError(f"{name}: two threads write one place at once")
            block, each = (np.broadcast_to(p, again.shape)[again] for p in places)
            self.written[block, each] = -1

    def copy(self, op, args, who, text):
        """cp.async: what it brings is in shared memory once the thread has waited for the group it was committed in."""
        if op[2] == "commit_group":
            self.groups[who] += 1
            return
        if op[2] == "wait_group":
            on_the_way, self.copies = self.copies, []
            for threads, group, places, raw in on_the_way:
                here = who[threads] & (group < self.groups[threads] - int(args[0]))
                block, each = (np.broadcast_to(p, raw.shape) for p in places)
                landed = block[here], each[here]
                self.flying[landed] = False
                self.shared[landed] = raw[here]
                self.written[landed] = (threads[here] + 1)[:, None]   # others see it after a barrier
                if not here.all():
                    self.copies.append((threads[~here], group[~here], (block[~here], each[~here]), raw[~here]))
            return
        size = int(args[2], 0)
        given = self.get(args[3], 32) if len(args) > 3 else np.full(self.n, size)
        if not np.isin(given[who], (0, size)).all():
            raise RuntimeError(f"{text}: copies a part")
        threads = np.flatnonzero(who)
        raw, full = np.zeros((len(threads), size), np.uint8), who & (given == size)   # the others get zeros
        if full.any():
            raw[full[who]] = self.load("global", self.address(args[1]), size, full, text)
        places = self.places("shared", self.address(args[0]), size, who, text)
        self.claim(places, raw, who, text)
        self.flying[places] = True
        self.copies.append((threads, self.groups[threads], places, raw))

    # ---- instructions

    def step(self, op, args, who, pc):
        if not who.any():
            return
        name, kind = op[0], op[-1]
        text = ".".join(op)
        bits = int(re.sub(r"\D", "", kind)[:2] or 0) if kind[0] in "busf" and kind != "f32x2" else 0
        if name == "ret":
            if (self.abroad[who] >= self.arrived[who]).any():
                raise RuntimeError("ret: wrote to another block, which may have ended: no barrier.cluster.arrive since")
            self.pc[who] = len(self.k.code)
        elif name == "bra":
            self.pc[who] = self.k.labels[args[0]]
        elif name == "bar" and (op[1] == "sync" or self.k.threads == 32):   # of a warp, where that is all
            self.waits[who] = 1
        elif name == "barrier" and op[2] == "arrive":
            self.arrived[who] += 1
        elif name == "barrier" and op[2] == "wait":
            self.waits[who] = 2
        elif name in ("ld", "st"):
            self.move(name, op, args, who, text, bits)
        elif name == "cp" and op[1] == "async":
            self.copy(op, args, who, text)
        elif name in ("ldmatrix", "stmatrix"):
            self.matrix(name, op, args, who, text)
        elif name == "redux":
            lanes = who.reshape(-1, 32)
            if not (lanes.all(1) | ~lanes.any(1)).all():
                raise RuntimeError(f"{text}: part of a warp")
            given = self.get(args[1], 32).view({"s32": np.int32, "u32": np.uint32, "f32": np.float32}[kind])
            if set(op) - {"redux", "sync", "min", "max", "add", kind} or (kind == "f32" and op[2] == "add"):
                raise KeyError(text)
            one, either = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum), "add": (None, np.add)}[op[2]]
            found = (one if kind == "f32" else either).reduce(given.reshape(-1, 32), axis=1, dtype=given.dtype)
            self.put(args[0], np.repeat(found, 32).view(np.uint32), who)
        elif name == "mapa":
            self.put(args[0], ((self.get(args[2], 32) + 1) * WINDOW + self.get(args[1], 32)).astype(np.uint32), who)
        elif name == "shfl":
            self.shuffle(op, args, who, text)
        elif name == "mov" and args[0].startswith("{"):
            parts = [p.strip() for p in args[0][1:-1].split(",")]
            small = U[bits // len(parts)]
            split = self.get(args[1], bits)[:, None].view(small)
            for i, part in enumerate(parts):
                if part != "_":
                    self.put(part, split[:, i].copy(), who)
        elif name == "mov" and args[1].startswith("{"):
            parts = [p.strip() for p in args[1][1:-1].split(",")]
            joined = np.stack([self.get(p, bits // len(parts)) for p in parts], 1)
            self.put(args[0], np.ascontiguousarray(joined).view(U[bits])[:, 0], who)
        elif name == "mov" and kind == "pred":
            self.put(args[0], self.truth(args[1]), who)
        elif name == "mov":
            self.put(args[0], self.get(args[1], bits or 32), who)
        elif name == "setp" and "|" in args[0]:   # of both halves
            for i, half in enumerate(args[0].split("|")):
                self.put(half, self.compare(op, args, i), who)
        elif name == "setp":
            self.put(args[0], self.compare(op, args), who)
        elif name == "selp":
            a, b = self.get(args[1], bits), self.get(args[2], bits)
            self.put(args[0], np.where(self.regs[args[3]], a, b), who)
        elif kind == "pred":
            given = [self.truth(a) for a in args[1:]]
            self.put(args[0], {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
                               "not": np.logical_not}[name](*given), who)
        elif name == "testp":
            self.put(args[0], {"infinite": np.isinf}[op[1]](_f32(self.get(args[1], 32))), who)
        elif name == "cvt":
            self.put(args[0], self.convert(op, args), who)
        elif kind in ("f32", "f32x2", "bf16", "bf16x2", "f16", "f16x2"):
            self.put(args[0], self.float(op, args), who)
        else:
            self.put(args[0], self.integer(op, args, bits), who)

    def move(self, name, op, args, who, text, bits):
        space = next(o for o in op if o.split(":")[0] in ("global", "shared", "param")).split(":")[0]
        if space == "param":
            value = self.values[args[1][1:-1]]
            raw = int(np.float32(value).view(np.uint32)) if isinstance(value, float) else int(value) & (1 << bits) - 1
            width = self.k.widths[args[0].rstrip("0123456789")]   # ld.param.s32 fills one of 64 bits, too
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
                value[who] = np.ascontiguousarray(raw[:, i * size:(i + 1) * size]).view(U[bits])[:, 0]
                self.put(part, value.astype(np.uint16) if bits == 8 else value, who)   # the narrowest registers
            return None
        raw = np.concatenate([self.get(p, bits).astype(U[bits])[who][:, None].view(np.uint8) for p in parts], 1)
        return self.store(space, where, raw, who, text)

    def shuffle(self, op, args, who, text):
        value = self.get(args[1], 32)
        lanes = who.reshape(-1, 32) if self.k.threads % 32 == 0 else who.reshape(self.cluster, -1)
        if args[4] == "-1" and not (lanes.all(1) | ~lanes.any(1)).all():
            raise RuntimeError(f"{text}: part of a warp")
        lane, me = self.thread % 32, np.arange(self.n)
        given = self.get(args[2], 32).astype(np.int64)
        other = lane ^ given if op[2] == "bfly" else given
        if op[2] == "up":   # the lowest keep their own
            other = np.where(lane < given, lane, lane - given)
        self.put(args[0], value[me - lane + other], who)

    def matrix(self, name, op, args, who, text):
        """Matrices of 8 x 8 elements of 16 bits: thread i of a warp has two of row i / 4, and says where row i is."""
        if "trans" in op or not who.reshape(-1, 32).all(1)[who.reshape(-1, 32).any(1)].all():
            raise RuntimeError(f"{text}: transposed, or part of a warp")
        data, where = (args[0], args[1]) if name == "ldmatrix" else (args[1], args[0])
        rows, lane = self.address(where), self.thread % 32
        for i, part in enumerate(p.strip() for p in data.strip("{}").split(",")):
            start = rows[np.arange(self.n) - lane + 8 * i + lane // 4]
            if (start[who] % 16).any():
                raise RuntimeError(f"{text}: address not a multiple of 16")
            at = start + lane % 4 * 4
            if name == "stmatrix":
                self.store("shared", at, self.get(part, 32)[who][:, None].view(np.uint8), who, text)
            else:
                value = np.zeros(self.n, np.uint32)
                value[who] = np.ascontiguousarray(self.load("shared", at, 4, who, text)).view(np.uint32)[:, 0]
                self.put(part, value, who)

    def compare(self, op, args, half=None):
        if {"and", "or", "xor"} & set(op):
            raise KeyError(".".join(op))
        kind, bits = op[-1], int(re.sub(r"\D", "", op[-1])[:2])
        a, b = self.get(args[1], 32 if half is not None else bits), self.get(args[2], 32 if half is not None else bits)
        if half is not None:   # of 16 bits, the lower one first
            kind = kind.removesuffix("x2")
            a, b = ((v >> 16 * half).astype(np.uint16) for v in (a, b))
        if kind == "f32":
            a, b = _f32(a), _f32(b)
        elif kind in ("bf16", "f16"):
            a, b = _widen(a, kind), _widen(b, kind)
        elif kind[0] == "s":
            a, b = a.view(I[bits]), b.view(I[bits])
        how = op[1]
        if how == "nan":
            return np.isnan(a) | np.isnan(b)
        unordered = how.endswith("u") and kind[-3:] in ("f32", "f16") and how not in ("lu",)
        found = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                 "ge": np.greater_equal}[how[:2]](a, b)
        if "f" in kind:
            nan = np.isnan(a) | np.isnan(b)
            found = (found | nan) if unordered else (found & ~nan)
        return found

    def convert(self, op, args):
        to, source = op[-2], op[-1]
        if extra := set(op[1:-2]) - {"rn", "rz", "ftz"}:
            raise KeyError(f"{'.'.join(op)}: {extra}")
        if to in ("bf16x2", "f16x2"):   # the first source is the upper half
            high, low = (_narrow(_f32(self.get(a, 32)), to[:-2], "rz" in op) for a in args[1:3])
            return high.astype(np.uint32) << 16 | low
        a = self.get(args[1], int(re.sub(r"\D", "", source)))
        if source in ("bf16", "f16"):
            return _widen(a, source).view(np.uint32)
        if source == "f32":
            return _narrow(_f32(a), to, "rz" in op)
        bits = int(to[1:])
        wide = a.view(I[a.itemsize * 8]) if source[0] == "s" else a
        return wide.astype(np.float32).view(np.uint32) if to == "f32" else wide.astype(U[bits])

    def float(self, op, args):
        name, kind = op[0], op[-1]
        if kind == "f32x2":
            given = [self.get(a, 64).view(np.float32) for a in args[1:]]
        elif kind.endswith("16x2"):
            given = [_widen(self.get(a, 32).view(np.uint16), kind[:-2]) for a in args[1:]]
        elif kind.endswith("16"):   # also add.rn.f32.bf16: all but the last are 16 bits wide
            given = [_widen(v, kind) if v.dtype == np.uint16 else _f32(v)
                     for v in (self.get(a, 32 if op[-2] == "f32" else 16) for a in args[1:])]
        else:
            given = [_f32(self.get(a, 32)) for a in args[1:]]
        if "ftz" in op:   # denormal numbers are zeros of their sign
            given = [np.where(np.abs(g) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), g), g) for g in given]
        if name == "fma":
            a, b, c = (g.astype(np.float64) for g in given)
            value = (a * b + c).astype(np.float32)
        elif name in ("max", "min"):
            pick = {"max": np.fmax, "min": np.fmin} if "NaN" not in op else {"max": np.maximum, "min": np.minimum}
            value = functools.reduce(pick[name], given)   # two, or (sm_100) three
        else:
            value = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "abs": np.abs,
                     "neg": np.negative, "sqrt": np.sqrt, "rcp": lambda x: np.float32(1) / x,
                     "ex2": lambda x: np.exp2(x.astype(np.float64)).astype(np.float32),
                     "lg2": lambda x: np.log2(x.astype(np.float64)).astype(np.float32)}[name](*given)
        value = np.ascontiguousarray(value, np.float32)
        if "ftz" in op:
            value = np.where(np.abs(value) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), value), value)
        if kind == "f32x2":
            return value.view(np.uint64)
        if kind.endswith("16x2"):
            return np.ascontiguousarray(_narrow(value, kind[:-2])).view(np.uint32)
        return _narrow(value, kind) if kind.endswith("16") and op[-2] != "f32" else value.view(np.uint32)

    def integer(self, op, args, bits):
        name = op[0]
        given = [self.get(a, bits) for a in args[1:]]
        if op[-1][0] == "s":
            given = [g.view(I[g.itemsize * 8]) for g in given]
        if name == "mul" or name == "mad":
            wide = op[1] == "wide"
            if wide:
                given[:2] = [g.astype((I if op[-1][0] == "s" else U)[2 * bits]) for g in given[:2]]
            out = given[0] * given[1]
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
            if op[-1][0] == "s":   # toward zero
                q = q + ((q < 0) & (q * b != a))
            return (q if name == "div" else a - q * b).astype(given[0].dtype).view(U[bits])
        if name == "bfe":   # bits of a number, the signed one's highest repeated
            at, count = (self.get(a, 32).astype(np.int64) for a in args[2:])
            up = bits - count
            return ((given[0].astype(given[0].dtype) << (up - at).astype(given[0].dtype))
                    >> up.astype(given[0].dtype)).view(U[bits])
        if name == "prmt":   # bytes of two numbers, chosen by four digits; one of 8 or more repeats the byte's sign
            both = given[0].astype(np.uint64) | given[1].astype(np.uint64) << np.uint64(32)
            out = np.zeros(self.n, np.uint32)
            for i in range(4):
                digit = given[2] >> np.uint32(4 * i) & 15
                byte = (both >> (digit & 7).astype(np.uint64) * np.uint64(8)).astype(np.uint8)
                byte = np.where(digit > 7, np.where(byte > 127, 255, 0), byte)
                out |= byte.astype(np.uint32) << np.uint32(8 * i)
            return out
        if name == "popc":   # of 32 bits or 64, into 32
            one = given[0].dtype.type(1)
            return sum(given[0] >> given[0].dtype.type(i) & one for i in range(bits)).astype(np.uint32)
        found = {"add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
                 "not": np.bitwise_not, "neg": np.negative, "min": np.minimum, "max": np.maximum, "abs": np.abs}
        many = functools.reduce if name in ("min", "max") else (lambda fn, given: fn(*given))
        return many(found[name], given).view(U[bits])
