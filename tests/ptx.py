"""Runs PTX on the CPU, so that a kernel for a GPU can be tested without one: what it computes, and
that every access to memory is inside a tensor and aligned.

All threads of a cluster run in NumPy arrays, those at the lowest instruction first, so that they
meet again after a branch. It knows the instructions that the CuTe DSL and Triton kernels are
compiled to and raises for any other. fma is computed in float64 and rounded once more; ex2.approx,
lg2.approx, div.full and the like are exact to float32.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re

import numpy as np
import torch

WINDOW = 1 << 20  # shared::cluster addresses: block r's shared memory is at (r + 1) * WINDOW
U = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
I = {16: np.int16, 32: np.int32, 64: np.int64}


class Memory:
    """Global memory: tensors at 256-byte boundaries, with nothing readable between them. `shift`
    bytes are put before each, to misalign it.
    """

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
        """Its address. The whole storage travels, so that strides keep their meaning; only t's
        elements can be read.
        """
        if t is None:
            return 0
        for known, address in self.tensors:
            if known.data_ptr() == t.data_ptr() and known.numel() and known.shape == t.shape:
                return address
        whole = torch.as_strided(
            t, (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)),), (1,)
        )
        raw = whole.contiguous().view(torch.uint8).numpy() if t.numel() else np.zeros(0, np.uint8)
        held = torch.zeros(whole.numel(), dtype=torch.uint8)
        if t.numel():
            torch.as_strided(held, t.shape, t.stride()).fill_(1)
        start = -(-len(self.data) // 256) * 256 + shift
        grown = start + len(raw) + 512
        for name, fill in (
            ("data", 0xFF),
            ("inside", 0),
            ("written", 0),
            ("read", 0),
            ("writer", 0),
            ("reader", 0),
        ):
            old = getattr(self, name)
            new = np.full(grown, fill, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
        self.data[start : start + len(raw)] = raw
        self.inside[start : start + len(raw)] = np.repeat(
            held.numpy().astype(bool), t.element_size()
        )
        self.tensors.append((t, start))
        return start

    def take_back(self) -> None:
        """Writes what the kernel wrote into the tensors."""
        for t, start in self.tensors:
            span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            if t.numel() and self.written[start : start + span * t.element_size()].any():
                raw = torch.from_numpy(
                    self.data[start : start + span * t.element_size()].copy()
                ).view(t.dtype)
                t.copy_(torch.as_strided(raw, t.shape, t.stride()))

    def times(self, t: torch.Tensor, which: str) -> torch.Tensor:
        """How often each element was written, or whether it was read."""
        start = next(a for known, a in self.tensors if known is t)
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        raw = getattr(self, which)[start : start + span * t.element_size() : t.element_size()]
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
    t = torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(
        torch.bfloat16 if kind == "bf16" else torch.float16
    )
    return t.view(torch.int16).numpy().view(np.uint16)


# Of each code: the sign is its highest bit.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _to_e2m1(x):
    """Codes of the nearest numbers; of two that are equally near, the even code; NaN becomes 6."""
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7], np.uint8)  # the first of equals is taken
    size = np.minimum(np.abs(x.astype(np.float64)), 6.0)
    code = order[np.abs(size[:, None] - E2M1[order].astype(np.float64)).argmin(1)]
    return np.where(np.isnan(x), 7, code | np.signbit(x).astype(np.uint8) << 3).astype(np.uint8)


def _to_e4m3(x):
    """Codes of the nearest numbers, ties to even; what is too large becomes the largest; NaN
    127.
    """
    t = torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn)
    return np.where(np.isnan(x), 127, t.view(torch.uint8).numpy()).astype(np.uint8)


def _from_e4m3(code):
    return torch.from_numpy(code).view(torch.float8_e4m3fn).to(torch.float16).numpy()


SPECIAL = {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "div"}
CONTROL = {"bra", "ret", "bar", "barrier", "mbarrier", "fence", "elect"}


def _class(op):
    """Of an instruction, by what of a multiprocessor it is for."""
    name = op[0]
    if name in ("ld", "st", "cp", "ldmatrix", "stmatrix"):
        return "parameter" if "param" in op else "memory"
    if name in ("mma", "wgmma"):
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
    """What launches of a kernel did.

    requested: sectors of 32 bytes of global memory that warps' instructions read and wrote, each
    instruction's once.
        least: those that programs touch, each program's once: all of it comes from memory or from
        the L2 at least once.
    wavefronts: passes that instructions made over shared memory; of these, conflicts are those that
    a bank had to make
        for several of its words.   issued: instructions of PTX by class, a warp's as one.
        products: multiply-adds of the tensor cores.
    """

    def __init__(self):
        self.requested, self.least = {"read": 0, "written": 0}, {"read": 0, "written": 0}
        self.wavefronts = self.conflicts = self.products = 0
        self.issued = collections.Counter()

    def shared(self, address, size, lanes):
        """An access of `size` bytes a thread: a pass is for 128 bytes, so for 32, 16 or 8
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
        self.conflicts += int((passes - 1)[passes > 0].sum())

    def facts(self):
        return {
            "requested": self.requested,
            "least": self.least,
            "wavefronts": self.wavefronts,
            "conflicts": self.conflicts,
            "issued": dict(sorted(self.issued.items())),
            "products": self.products,
        }


class TensorMap:
    """What a TMA descriptor says: of a matrix or more dimensions, the last one contiguous. swizzle:
    within how many bytes, or 0.
    """

    def __init__(self, address, itemsize, shape, strides, box, swizzle):
        if box[-1] * itemsize > (swizzle or 1 << 20) or box[-1] * itemsize % 16 or max(box) > 256:
            raise RuntimeError(f"a box of {box} elements with a swizzle of {swizzle} bytes")
        self.address, self.itemsize, self.box, self.swizzle = address, itemsize, box, swizzle
        self.shape, self.strides = shape, strides

    def places(self, corner):
        """Of the box at `corner`, in the order of memory: the addresses of its bytes, and which
        are in the tensor.
        """
        at = np.indices(self.box).reshape(len(self.box), -1) + np.array(corner)[:, None]
        inside = ((at >= 0) & (at < np.array(self.shape)[:, None])).all(0)
        first = self.address + (at * np.array(self.strides)[:, None]).sum(0) * self.itemsize
        each = (first[:, None] + np.arange(self.itemsize)).reshape(-1)
        return each, np.repeat(inside, self.itemsize)


def _swizzled(address, span):
    """Units of 16 bytes change places within `span` bytes (32, 64 or 128; or 0) by the lines of
    128 above.
    """
    return address ^ (address >> 3 & (span - 16)) if span else address


# Instructions after which a thread may be elsewhere, or wait.
LEAVES = ("ret", "bra", "bar", "barrier", "mbarrier")


@functools.cache
def _text_and_bits(op):
    kind = op[-1]
    return ".".join(op), int(re.sub(r"\D", "", kind)[:2] or 0) if kind[
        0
    ] in "busf" and kind != "f32x2" else 0


@functools.cache
def _base_and_offset(operand):
    base, offset = re.match(r"\[\s*(\S+?)\s*(?:\+\s*(-?\d+)\s*)?\]$", operand).groups()
    return base, int(offset or 0)


class Kernel:
    def __init__(self, ptx: str, dynamic_shared: int = 0):
        """dynamic_shared: bytes of the shared memory whose size the launch says, not the PTX."""
        body = re.sub(r"//[^\n]*|^\s*\.loc\s[^\n]*", "", ptx, flags=re.MULTILINE)
        outer = re.findall(r"\.extern \.shared \.align \d+ \.b8 (\S+)\[\];", body)
        head, body = body[body.index(".entry") :].split("{", 1)
        body = re.split(r"^\s*\.(?:file|section)\s", body, maxsplit=1, flags=re.MULTILINE)[0]
        lines = [line.strip() for line in head.splitlines()]
        self.parameters = [
            line.split()[-1].rstrip(",").split("[")[0]
            for line in lines
            if line.startswith(".param")
        ]
        self.threads = int(re.search(r"\.reqntid (\d+)", head)[1])
        self.shared, self.shared_size = dict.fromkeys(outer, 1024), 1024 + dynamic_shared
        self.widths = {
            name: 1 if kind == "pred" else int(kind[1:])
            for kind, name in re.findall(r"\.reg \.(\w+)\s+(%[a-z]+)<", body)
        }
        self.code, self.labels, local = [], {}, {}
        for statement in re.split(r"(?<=;)|(?<=:)(?=\s)", body):
            s = " ".join(statement.split()).rstrip(";").lstrip("{} ").strip()
            if m := re.match(r"\.shared \.align (\d+) \.b8 (\S+)\[(\d+)\]", s):
                self.shared_size = -(-self.shared_size // int(m[1])) * int(m[1])
                self.shared[m[2]] = self.shared_size
                self.shared_size += int(m[3])
            elif m := re.match(r"(\$?\w+):$", s):
                if not m[1].startswith(
                    "$"
                ):  # of a block of its own, and there may be others with this name
                    local[m[1]] = f"{m[1]} {len(self.code)}"
                self.labels[local.get(m[1], m[1])] = len(self.code)
            elif s and not s.startswith("."):
                m = re.match(r"(?:@(!?)(%?\w+) )?(\S+) ?(.*)", s)
                operands = [
                    o.strip()
                    for o in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,]+", m[4].replace(", ", ","))
                ]
                operands = [local.get(o, o) if m[3].startswith("bra") else o for o in operands if o]
                self.code.append((m[2], m[1] == "!", m[3].split("."), operands))
        self.classes = [_class(op) for _, _, op, _ in self.code]

    def run(
        self,
        memory: Memory,
        values: list,
        grid: tuple[int, int, int],
        cluster: int = 1,
        counts: Counts | None = None,
    ) -> None:
        values = dict(zip(self.parameters, values, strict=True))
        with np.errstate(all="ignore"):
            for z, y, first in itertools.product(
                range(grid[2]), range(grid[1]), range(0, grid[0], cluster)
            ):
                _Cluster(self, memory, values, (first, y, z), cluster, grid, counts).run()


class _Cluster:
    def __init__(self, kernel, memory, values, at, cluster, grid, counts):
        self.counts, self.touched = counts, {"read": [], "written": []}
        self.k, self.memory, self.values, self.cluster = kernel, memory, values, cluster
        n = self.n = kernel.threads * cluster
        self.thread = np.arange(n) % kernel.threads
        self.block = np.arange(n) // kernel.threads
        first, y, z = at
        # Threads of the launch, from 1.
        self.everywhere = ((z * grid[1] + y) * grid[0] + first) * kernel.threads + np.arange(n) + 1
        self.special = {
            "%tid.x": self.thread,
            "%ctaid.x": first + self.block,
            "%ctaid.y": np.full(n, y),
            "%ctaid.z": np.full(n, z),
            **{f"%nctaid.{d}": np.full(n, grid[i]) for i, d in enumerate("xyz")},
            "%laneid": self.thread % 32,
            "%cluster_ctarank": self.block,
        }
        self.shared = np.full((cluster, kernel.shared_size), 0xFF, np.uint8)
        # Since the last barrier: by which thread + 1 a byte was written, and read (-1: by several;
        # -2 - w: by one of warp w, which has met at a barrier of its own).
        self.written = np.zeros((cluster, kernel.shared_size), np.int64)
        self.read = np.zeros((cluster, kernel.shared_size), np.int64)
        # Copies of cp.async on their way: (threads, their groups, where to, bytes). Nobody may
        # touch the places.
        self.copies, self.groups = [], np.zeros(n, np.int64)
        self.flying = np.zeros((cluster, kernel.shared_size), bool)
        # Shared memory that the other proxy (TMA, wgmma) may not have seen yet, and that wgmma may
        # still be reading.
        self.unfenced = np.zeros((cluster, kernel.shared_size), bool)
        self.pinned = np.zeros((cluster, kernel.shared_size), bool)
        self.barriers = {}  # (block, address) -> an mbarrier
        self.awaited = {}  # thread -> (its mbarrier, parity)
        # Of wgmma: those that were issued, by group of 128 threads: what comes into which
        # registers, what it reads.
        self.products = [[] for _ in range(-(-n // 128))]
        self.abroad = np.full(
            n, -1
        )  # barrier.cluster.arrive's that a thread had made when it wrote to another block
        self.regs, self.constants = {}, {}
        self.whole = None  # the threads at this instruction, if it is all of them
        self.pc = np.zeros(n, np.int64)
        self.waits = np.zeros(
            n, np.int8
        )  # 1: at bar.sync, 2: at barrier.cluster.wait, 3: at an mbarrier
        self.arrived = np.zeros(n, np.int64)
        self.waited = np.zeros(n, np.int64)

    def run(self):
        code, end = self.k.code, len(self.k.code)
        while True:
            ready = (self.waits == 0) & (self.pc < end)
            if not ready.any():
                if (self.pc >= end).all():
                    for kind, sectors in self.touched.items():
                        if sectors:
                            self.counts.least[kind] += len(np.unique(np.concatenate(sectors)))
                    return
                self.release()
                continue
            pc = int(self.pc[ready].min())
            here = ready & (self.pc == pc)
            others = self.pc[ready & ~here]
            until = int(others.min()) if len(others) else end  # where they meet again
            self.whole = here if here.all() else None
            going = True
            while going and pc < until:
                predicate, negated, op, args = code[pc]
                going = op[0] not in LEAVES
                if not going:
                    self.pc[here] = pc + 1
                who = here
                if predicate is not None:
                    who = here & (self.regs[predicate] != negated)
                if predicate is None or who.any():
                    if self.counts:
                        self.counts.issued[self.k.classes[pc]] += int(
                            who.reshape(-1, 32).any(1).sum()
                        )
                    self.step(op, args, who, pc)
                pc += 1
            if going:
                self.pc[here] = pc

    def release(self):
        done = self.pc >= len(self.k.code)
        moved = False
        for b in range(self.cluster):
            here = self.block == b
            if (self.waits[here] == 1).all():  # bar.sync counts every thread of the block
                self.waits[here] = 0
                self.written[b] = self.read[b] = 0
                moved = True
        if (self.waits == 2).any() and (self.arrived >= self.waited.max() + 1).all():
            self.waited[self.waits == 2] += 1
            self.waits[self.waits == 2] = 0
            self.written[:] = self.read[:] = 0
            moved = True
        for thread, (barrier, parity) in list(self.awaited.items()):
            if barrier["phase"] % 2 != parity:
                self.waits[thread] = 0
                del self.awaited[thread]
                moved = True
        if not moved:
            at = [int((self.waits == i).sum()) for i in (1, 2, 3)]
            raise RuntimeError(
                f"deadlock: {at[0]} at bar.sync, {at[1]} at barrier.cluster.wait, {at[2]} at an "
                f"mbarrier, {done.sum()} ended"
            )

    # ---- operands

    def get(self, name, bits):
        if name in self.regs:
            return self.regs[name]
        if name in self.special:
            return self.special[name].astype(U[bits])
        if name in self.k.parameters:  # the address of one
            return np.full(self.n, 4096 * (1 + self.k.parameters.index(name)), U[bits])
        if name in self.k.shared:
            return np.full(self.n, self.k.shared[name], U[bits])
        if (name, bits) not in self.constants:
            if name.startswith("0f"):
                number, bits = int(name[2:], 16), 32
            elif (
                name.rstrip("0123456789") in self.k.widths
            ):  # never written: of a pair, the half that does not matter
                number = -1
            else:
                number = int(name.rstrip("U"), 0)
            self.constants[name, bits] = np.full(self.n, number & (1 << bits) - 1, U[bits])
            self.constants[name, bits].flags.writeable = False
        return self.constants[name, bits]

    def truth(self, name):
        return self.regs[name] if name in self.regs else np.full(self.n, bool(int(name)))

    def put(self, name, value, who):
        if name not in self.regs:
            self.regs[name] = np.zeros(self.n, value.dtype)
        if self.regs[name].dtype != value.dtype:
            raise TypeError(f"{name} holds {self.regs[name].dtype}, gets {value.dtype}")
        if who is self.whole:
            self.regs[name][:] = value
        else:
            self.regs[name][who] = value[who]

    def address(self, operand):
        base, offset = _base_and_offset(operand)
        return self.get(base, 64).astype(np.int64) + offset

    # ---- memory

    def places(self, space, address, size, who, name):
        at = address[who]
        if (at % size).any():
            raise RuntimeError(f"{name}: address not a multiple of {size}")
        each = at[:, None] + np.arange(size)
        if space == "global":
            if (each >= len(self.memory.data)).any():
                raise RuntimeError(f"{name}: outside every tensor")
            # The compiler may read up to 16 aligned bytes of which some are in the tensor, and drop
            # the others: no page ends between them. They hold 0xFF here, so that using one shows.
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

    def of_others(self, before, thread):
        """Whether what `written` or `read` says is of a thread that this one (from 1) has not
        met since.
        """
        return (before != 0) & (before != thread) & (before != -2 - (thread - 1) // 32)

    def count(self, kind, at, lanes):
        """Sectors of global memory, of accesses that lie in one each."""
        self.counts.requested[kind] += len(np.unique(lanes // 32 * (1 << 48) + at // 32))
        self.touched[kind].append(np.unique(at // 32))

    def load(self, space, address, size, who, name):
        places = self.places(space, address, size, who, name)
        if self.counts and space == "global":
            self.count("read", address[who], np.flatnonzero(who))
        elif self.counts and not name.startswith("ldmatrix"):
            self.counts.shared(address[who], size, np.flatnonzero(who))
        if space == "global":
            me, m = self.everywhere[who][:, None], self.memory
            if ((m.writer[places] != 0) & (m.writer[places] != me)).any():
                raise RuntimeError(f"{name}: reads what another thread writes in this launch")
            m.read[places] = True
            before = m.reader[places]
            m.reader[places] = np.where((before == 0) | (before == me), me, -1)
            m.reader[places[m.reader[places] != me]] = -1  # two threads of this very instruction
            return m.data[places]
        if self.flying[places].any():
            raise RuntimeError(
                f"{name}: reads what cp.async may still be writing, without a wait_group between"
            )
        thread = np.broadcast_to((np.flatnonzero(who) + 1)[:, None], places[1].shape)
        if self.of_others(self.written[places], thread).any():
            raise RuntimeError(
                f"{name}: reads what another thread wrote, without a barrier between"
            )
        self.read[places] = np.where(self.of_others(self.read[places], thread), -1, thread)
        again = self.read[places] != thread  # two lanes of this very instruction
        if again.any():
            block, each = (np.broadcast_to(p, again.shape)[again] for p in places)
            self.read[block, each] = -1
        return self.shared[places]

    def store(self, space, address, raw, who, name):
        places = self.places(space, address, raw.shape[1], who, name)
        if self.counts and space == "global":
            self.count("written", address[who], np.flatnonzero(who))
        elif self.counts and not name.startswith("stmatrix"):
            self.counts.shared(address[who], raw.shape[1], np.flatnonzero(who))
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
        """That these threads may write this to shared memory, where until a barrier nobody else
        may. Threads with copies of one value may all write it.
        """
        thread = (np.flatnonzero(who) + 1)[:, None]
        if self.flying[places].any():
            raise RuntimeError(f"{name}: writes where cp.async may still be writing")
        if self.pinned[places].any():
            raise RuntimeError(
                f"{name}: writes what wgmma may still be reading, without a wait_group between"
            )
        self.unfenced[places] = True
        for before in (self.written[places], self.read[places]):
            if self.of_others(before, thread).any():
                raise RuntimeError(
                    f"{name}: writes where another thread wrote or read, no barrier between"
                )
        self.written[places] = np.broadcast_to(thread, before.shape)
        if (again := self.written[places] != thread).any():
            trial = np.zeros_like(self.shared)
            trial[places] = raw
            if (trial[places] != raw).any():
                raise RuntimeError(f"{name}: two threads write one place at once")
            block, each = (np.broadcast_to(p, again.shape)[again] for p in places)
            self.written[block, each] = -1

    def copy(self, op, args, who, text):
        """cp.async: what it brings is in shared memory once the thread has waited for the group
        it was committed in.
        """
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
                self.unfenced[landed] = True
                self.written[landed] = (threads[here] + 1)[:, None]  # others see it after a barrier
                if not here.all():
                    self.copies.append(
                        (threads[~here], group[~here], (block[~here], each[~here]), raw[~here])
                    )
            return
        size = int(args[2], 0)
        given = self.get(args[3], 32) if len(args) > 3 else np.full(self.n, size)
        if not np.isin(given[who], (0, size)).all():
            raise RuntimeError(f"{text}: copies a part")
        threads = np.flatnonzero(who)
        raw, full = (
            np.zeros((len(threads), size), np.uint8),
            who & (given == size),
        )  # the others get zeros
        if full.any():
            raw[full[who]] = self.load("global", self.address(args[1]), size, full, text)
        places = self.places("shared", self.address(args[0]), size, who, text)
        if self.counts:
            self.counts.shared(self.address(args[0])[who], size, threads)
        self.claim(places, raw, who, text)
        self.flying[places] = True
        self.copies.append((threads, self.groups[threads], places, raw))

    # ---- mbarriers and TMA

    def barrier(self, operand, thread, text):
        """The mbarrier that a thread names. Its init must be seen by it."""
        place = int(self.block[thread]), int(self.address(operand)[thread])
        if place not in self.barriers:
            raise RuntimeError(f"{text}: no mbarrier there")
        if self.written[place] not in (0, thread + 1):
            raise RuntimeError(
                f"{text}: another thread made the mbarrier, without a barrier between"
            )
        return self.barriers[place]

    def turn(self, barrier):
        """Ends a phase if all have arrived and all bytes have."""
        if barrier["missing"] == 0 and barrier["bytes"] == 0:
            barrier["phase"] += 1
            barrier["missing"] = barrier["count"]

    def mbarrier(self, op, args, who, text, pc):
        threads = np.flatnonzero(who)
        if op[1] == "init":
            for thread in threads:
                at = np.array([self.address(args[0])[thread]])
                only = np.arange(self.n) == thread
                places = self.places("shared", np.full(self.n, at), 8, only, text)
                self.claim(places, np.zeros((1, 8), np.uint8), only, text)
                count = int(self.get(args[1], 32)[thread])
                self.barriers[int(self.block[thread]), int(at[0])] = {
                    "count": count,
                    "missing": count,
                    "bytes": 0,
                    "phase": 0,
                    "copies": [],
                }
        elif op[1] == "inval":
            for thread in threads:
                if self.barrier(args[0], thread, text)["copies"]:
                    raise RuntimeError(f"{text}: copies are on their way")
                del self.barriers[int(self.block[thread]), int(self.address(args[0])[thread])]
        elif op[1:3] == ["arrive", "expect_tx"]:
            for thread in threads:
                barrier = self.barrier(args[1], thread, text)
                barrier["bytes"] += int(self.get(args[2], 32)[thread])
                barrier["missing"] -= 1
                if barrier["missing"] < 0:
                    raise RuntimeError(f"{text}: more arrive than were said to")
                self.turn(barrier)
        elif op[1:3] == ["try_wait", "parity"]:
            parity = self.get(args[2], 32) & 1
            for thread in threads:
                barrier = self.barrier(args[1], thread, text)
                for places, raw in barrier["copies"]:  # what was on its way lands as late as can be
                    self.shared[places] = raw
                    self.flying[places] = False
                    barrier["bytes"] -= len(raw)
                if barrier["copies"]:
                    barrier["copies"] = []
                    self.turn(barrier)
                if (
                    barrier["phase"] % 2 == parity[thread]
                ):  # it tries again when the others can go no further
                    self.waits[thread], self.pc[thread] = 3, pc
                    self.awaited[thread] = barrier, parity[thread]
            self.put(args[0], np.ones(self.n, bool), who & (self.waits == 0))
        else:
            raise KeyError(text)

    def bulk_copy(self, op, args, who, text):
        """cp.async.bulk.tensor: a box into shared memory; there once a thread has waited at the
        mbarrier.
        """
        if op[5:] != ["shared::cta", "global", "mbarrier::complete_tx::bytes"]:
            raise KeyError(text)
        to, source, barrier = args
        source, corner = re.match(r"\[(\S+?),\{(.*)\}\]", source.replace(" ", "")).groups()
        corner = [self.get(c, 32).view(np.int32) for c in corner.split(",")]
        for thread in np.flatnonzero(who):
            described = self.values[
                self.k.parameters[int(self.get(source, 64)[thread]) // 4096 - 1]
            ]
            each, inside = described.places(
                [int(c[thread]) for c in reversed(corner)]
            )  # the innermost comes first
            m, raw = self.memory, np.zeros(len(each), np.uint8)
            from_ = each[inside]
            if not m.inside[from_].all():
                raise RuntimeError(f"{text}: outside every tensor")
            if (m.writer[from_] != 0).any():
                raise RuntimeError(f"{text}: reads what a thread writes in this launch")
            m.read[from_] = True
            m.reader[from_] = -1
            if self.counts:
                self.count("read", from_, np.zeros(len(from_), np.int64))
            raw[inside] = m.data[from_]
            start = int(self.address(to)[thread])
            if start % 128:
                raise RuntimeError(f"{text}: address not a multiple of 128")
            at = _swizzled(start + np.arange(len(raw)), described.swizzle)
            if at.max() >= self.k.shared_size:
                raise RuntimeError(f"{text}: outside shared memory")
            places = np.full(len(at), self.block[thread]), at
            # It may not overtake what threads do there: they must have met at a barrier. (A
            # thread's own writes need more than that, a fence.)
            if self.flying[places].any() or self.pinned[places].any():
                raise RuntimeError(f"{text}: writes where others may still be reading or writing")
            for before in (self.written[places], self.read[places]):
                if self.of_others(before, thread + 1).any():
                    raise RuntimeError(
                        f"{text}: writes where a thread wrote or read, no barrier between"
                    )
            self.flying[places] = True
            self.unfenced[places] = False
            self.barrier(barrier, thread, text)["copies"].append((places, raw))

    # ---- wgmma

    def operand(self, described, rows, transposed, block, text):
        """Places of a [rows, 16] operand of 16-bit elements in shared memory, from its matrix
        descriptor. A row is of a's M or of b's N. transposed: neighbours in memory are of
        neighbouring rows, not of the sum.
        """
        start, leading, stride = ((described >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        span = {0: 0, 1: 128, 2: 64, 3: 32}[described >> 62]
        if span == 0 or described >> 49 & 7:
            raise KeyError(f"{text}: without a swizzle, or with an offset")
        row, k = np.arange(rows)[:, None], np.arange(16)[None, :]
        if transposed:
            at = (
                row // (span // 2) * leading
                + row % (span // 2) * 2
                + k % 8 * span
                + k // 8 * stride
            )
        else:
            at = row // 8 * stride + row % 8 * span + k * 2
        at = _swizzled(start + at[:, :, None] + np.arange(2), span)
        if at.max() >= self.k.shared_size or at.min() < 1024:
            raise RuntimeError(f"{text}: outside shared memory")
        places = np.full(at.shape, block), at
        if self.flying[places].any():
            raise RuntimeError(f"{text}: reads what a copy may still be writing")
        if self.unfenced[places].any():
            raise RuntimeError(f"{text}: reads what threads wrote, without a fence between")
        if (self.written[places] != 0).any():
            raise RuntimeError(f"{text}: reads what threads wrote, without a barrier between")
        return places

    def warpgroups(self, who, text):
        groups = who.reshape(-1, 128)
        if self.k.threads % 128 or not (groups.all(1) | ~groups.any(1)).all():
            raise RuntimeError(f"{text}: part of a warpgroup")
        return np.flatnonzero(groups[:, 0])

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
                        self.read[places] = -1  # by all four warps
                self.products[g] = left
                here = np.arange(self.n) // 128 == g
                for r in done.keys() - {r for p in left for r in p["results"]}:
                    whole = np.zeros(self.n, np.uint32)
                    whole[here] = done[r]
                    self.put(r, whole, here)
            self.repin()
            return
        m = re.match(r"m64n(\d+)k16$", op[4])
        if (
            op[1:4] != ["mma_async", "sync", "aligned"]
            or m is None
            or op[5] != "f32"
            or op[6] not in ("bf16", "f16")
        ):
            raise KeyError(text)
        columns, kind = int(m[1]), op[6]
        if self.counts:
            self.counts.products += 64 * columns * 16 * len(groups)
        names = [p.strip() for p in args[0].strip("{}").split(",")]
        own = args[1].startswith("{")
        scales, turned = args[4:6], [int(a) for a in args[6:]]
        if scales != ["1", "1"] or len(turned) != 2 - own:
            raise KeyError(text)
        adds, described = self.truth(args[3]), self.get(args[2], 64)
        for g in groups:
            here = slice(128 * g, 128 * g + 128)
            block = int(self.block[128 * g])
            if own:
                a = np.stack(
                    [
                        _widen(self.get(p.strip(), 32).view(np.uint16), kind).reshape(
                            -1, 4, 8, 4, 2
                        )[g]
                        for p in args[1].strip("{}").split(",")
                    ]
                )  # register, warp, row, thread of it, half
                a = a.reshape(2, 2, 4, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(64, 16)
                read = []
            else:
                places = self.operand(
                    int(self.get(args[1], 64)[128 * g]), 64, turned[0], block, text
                )
                a, read = _widen(self.shared[places].view(np.uint16)[:, :, 0], kind), [places]
            places = self.operand(int(described[128 * g]), columns, turned[-1], block, text)
            b = _widen(self.shared[places].view(np.uint16)[:, :, 0], kind)
            read.append(places)
            waiting = {}  # what products on their way leave in registers
            for p in self.products[g]:
                waiting |= p["results"]
            c = np.zeros((64, columns))
            if adds[128 * g]:
                given = np.stack(
                    [waiting[r] if r in waiting else self.get(r, 32)[here] for r in names]
                )
                c = (
                    _f32(given)
                    .reshape(-1, 2, 2, 4, 8, 4)
                    .transpose(3, 1, 4, 0, 5, 2)
                    .reshape(64, columns)
                )
            d = (a.astype(np.float64) @ b.T.astype(np.float64) + c).astype(np.float32)
            d = (
                d.reshape(4, 2, 8, -1, 4, 2)
                .transpose(3, 1, 5, 0, 2, 4)
                .reshape(len(names), 128)
                .view(np.uint32)
            )
            self.products[g].append(
                {"group": 0, "results": dict(zip(names, d, strict=True)), "read": read}
            )
            for r in names:  # until it is waited for, NaN
                self.put(
                    r, np.full(self.n, 0x7FFFFFFF, np.uint32), who & (np.arange(self.n) // 128 == g)
                )
        self.repin()

    def repin(self):
        self.pinned[:] = False
        for products in self.products:
            for p in products:
                for places in p["read"]:
                    self.pinned[places] = True

    # ---- instructions

    def step(self, op, args, who, pc):
        name, kind = op[0], op[-1]
        text, bits = _text_and_bits(tuple(op))
        if name == "ret":
            if (self.abroad[who] >= self.arrived[who]).any():
                raise RuntimeError(
                    "ret: wrote to another block, which may have ended: no barrier.cluster.arrive "
                    "since"
                )
            self.pc[who] = len(self.k.code)
        elif name == "bra":
            self.pc[who] = self.k.labels[args[0]]
        elif name == "bar" and (
            op[1] == "sync" or self.k.threads == 32
        ):  # of a warp, where that is all
            self.waits[who] = 1
        elif text == "bar.warp.sync":
            self.whole_warps(who, text)
            for done in (self.written, self.read):
                mine = np.isin(done, np.flatnonzero(who) + 1)
                done[mine] = -2 - (done[mine] - 1) // 32
        elif name == "barrier" and op[2] == "arrive":
            self.arrived[who] += 1
        elif name == "barrier" and op[2] == "wait":
            self.waits[who] = 2
        elif name in ("ld", "st"):
            self.move(name, op, args, who, text, bits)
        elif name == "cp" and op[1:4] == ["async", "bulk", "tensor"]:
            self.bulk_copy(op, args, who, text)
        elif name == "mbarrier":
            self.mbarrier(op, args, who, text, pc)
        elif name == "wgmma":
            self.wgmma(op, args, who, text)
        elif text == "fence.proxy.async.shared::cta":  # of the writes that these threads see
            threads = np.flatnonzero(who) + 1
            seen = (self.written == 0) | np.isin(self.written, threads)
            self.unfenced &= ~seen
        elif name == "elect":
            chosen, p = args[0].split("|")
            self.whole_warps(who, text)
            self.put(chosen, np.zeros(self.n, np.uint32), who)
            self.put(p, self.thread % 32 == 0, who)
        elif text == "cvta.param.u64":
            self.put(args[0], self.get(args[1], 64), who)
        elif name == "cp" and op[1] == "async":
            self.copy(op, args, who, text)
        elif name in ("ldmatrix", "stmatrix"):
            self.matrix(name, op, args, who, text)
        elif name == "mma":
            self.multiply(op, args, who, text)
        elif name == "redux":
            self.whole_warps(who, text)
            given = self.get(args[1], 32).view(
                {"s32": np.int32, "u32": np.uint32, "f32": np.float32}[kind]
            )
            if set(op) - {"redux", "sync", "min", "max", "add", kind} - (
                {"abs", "NaN"} if kind == "f32" else set()
            ) or (kind == "f32" and op[2] == "add"):
                raise KeyError(text)
            one, either = {
                "min": (np.fmin, np.minimum),
                "max": (np.fmax, np.maximum),
                "add": (None, np.add),
            }[op[2]]
            given = np.abs(given) if "abs" in op else given
            number = kind == "f32" and "NaN" not in op  # of a number and a NaN, the number
            found = (one if number else either).reduce(
                given.reshape(-1, 32), axis=1, dtype=given.dtype
            )
            self.put(args[0], np.repeat(found, 32).view(np.uint32), who)
        elif name == "mapa":
            self.put(
                args[0],
                ((self.get(args[2], 32) + 1) * WINDOW + self.get(args[1], 32)).astype(np.uint32),
                who,
            )
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
        elif name == "setp" and "|" in args[0]:  # of both halves
            for i, half in enumerate(args[0].split("|")):
                self.put(half, self.compare(op, args, i), who)
        elif name == "setp":
            self.put(args[0], self.compare(op, args), who)
        elif name == "selp":
            a, b = self.get(args[1], bits), self.get(args[2], bits)
            self.put(args[0], np.where(self.regs[args[3]], a, b), who)
        elif kind == "pred":
            given = [self.truth(a) for a in args[1:]]
            self.put(
                args[0],
                {
                    "and": np.logical_and,
                    "or": np.logical_or,
                    "xor": np.logical_xor,
                    "not": np.logical_not,
                }[name](*given),
                who,
            )
        elif name == "testp":
            self.put(args[0], {"infinite": np.isinf}[op[1]](_f32(self.get(args[1], 32))), who)
        elif name == "cvt":
            self.put(args[0], self.convert(op, args), who)
        elif kind in ("f32", "f32x2", "bf16", "bf16x2", "f16", "f16x2"):
            self.put(args[0], self.float(op, args), who)
        else:
            self.put(args[0], self.integer(op, args, bits), who)

    def move(self, name, op, args, who, text, bits):
        space = next(o for o in op if o.split(":")[0] in ("global", "shared", "param")).split(":")[
            0
        ]
        if space == "param":
            value = self.values[args[1][1:-1]]
            raw = (
                int(np.float32(value).view(np.uint32))
                if isinstance(value, float)
                else int(value) & (1 << bits) - 1
            )
            width = self.k.widths[
                args[0].rstrip("0123456789")
            ]  # ld.param.s32 fills one of 64 bits, too
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
                # A register may be wider than what is loaded.
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
            raise RuntimeError(f"{text}: part of a warp")
        lane, me = self.thread % 32, np.arange(self.n)
        given = self.get(args[2], 32).astype(np.int64)
        other = lane ^ given if op[2] == "bfly" else given
        if op[2] == "up":  # the lowest keep their own
            other = np.where(lane < given, lane, lane - given)
        self.put(args[0], value[me - lane + other], who)

    def whole_warps(self, who, text):
        lanes = who.reshape(-1, 32)
        if not (lanes.all(1) | ~lanes.any(1)).all():
            raise RuntimeError(f"{text}: part of a warp")

    def matrix(self, name, op, args, who, text):
        """Matrices of 8 x 8 elements of 16 bits: thread i of a warp has two of row i / 4, or with
        trans of column i / 4, and says where row i is.
        """
        self.whole_warps(who, text)
        data, where = (args[0], args[1]) if name == "ldmatrix" else (args[1], args[0])
        rows, lane = self.address(where), self.thread % 32
        for i, part in enumerate(p.strip() for p in data.strip("{}").split(",")):
            first = np.arange(self.n) - lane + 8 * i  # the thread that says where row 0 is
            if (rows[first + lane % 8][who] % 16).any():
                raise RuntimeError(f"{text}: address not a multiple of 16")
            if self.counts:
                at = rows[first + lane // 4] + lane % 4 * 4
                self.counts.shared(at[who], 4, np.flatnonzero(who))
            # Where the two elements are: beside each other, or below.
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
        """mma.m16n8k16: d [16, 8] = a [16, 16] b [16, 8] + c by each warp, with a row (of b, a
        column) in a group of four threads, which have two neighbours each. Summed in float64 and
        rounded once.
        """
        if (
            op[1:6] != ["sync", "aligned", "m16n8k16", "row", "col"]
            or op[6] != "f32"
            or op[9] != "f32"
        ):
            raise KeyError(text)
        self.whole_warps(who, text)
        names = [[p.strip() for p in a.strip("{}").split(",")] for a in args]
        warp = who.reshape(-1, 32)[:, 0]
        if self.counts:
            self.counts.products += 16 * 8 * 16 * int(warp.sum())
        a, b = (
            np.stack(
                [_widen(self.get(p, 32).view(np.uint16), op[7]).reshape(-1, 8, 4, 2) for p in part]
            )[:, warp].astype(np.float64)
            for part in names[1:3]
        )  # register, warp, group, thread in it, half
        a = a.reshape(2, 2, *a.shape[1:]).transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16)
        b = b.transpose(1, 0, 3, 4, 2).reshape(-1, 16, 8)
        c = np.stack([_f32(self.get(p, 32)).reshape(-1, 8, 4) for p in names[3]])[:, warp].astype(
            np.float64
        )
        c = c.reshape(2, 2, *c.shape[1:]).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)
        d = (
            (a @ b + c)
            .astype(np.float32)
            .reshape(-1, 2, 8, 4, 2)
            .transpose(1, 4, 0, 2, 3)
            .reshape(4, -1)
        )
        for part, value in zip(names[0], d, strict=True):
            whole = np.zeros(self.n, np.uint32)
            whole[who] = value.view(np.uint32)
            self.put(part, whole, who)

    def compare(self, op, args, half=None):
        if {"and", "or", "xor"} & set(op):
            raise KeyError(".".join(op))
        kind, bits = op[-1], int(re.sub(r"\D", "", op[-1])[:2])
        a, b = (
            self.get(args[1], 32 if half is not None else bits),
            self.get(args[2], 32 if half is not None else bits),
        )
        if half is not None:  # of 16 bits, the lower one first
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
        found = {
            "eq": np.equal,
            "ne": np.not_equal,
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
        }[how[:2]](a, b)
        if "f" in kind:
            nan = np.isnan(a) | np.isnan(b)
            found = (found | nan) if unordered else (found & ~nan)
        return found

    def convert(self, op, args):
        to, source = op[-2], op[-1]
        if op[1:] == ["rn", "satfinite", "e2m1x2", "f32"]:  # the first source is the upper half
            high, low = (_to_e2m1(_f32(self.get(a, 32))) for a in args[1:3])
            return high << 4 | low
        if op[1:] == ["rn", "satfinite", "e4m3x2", "f32"]:
            high, low = (_to_e4m3(_f32(self.get(a, 32))) for a in args[1:3])
            return high.astype(np.uint16) << 8 | low
        if op[1:] == ["rn", "f16x2", "e4m3x2"]:
            code = self.get(args[1], 16)
            high, low = (
                _from_e4m3(c.astype(np.uint8)).view(np.uint16) for c in (code >> 8, code & 255)
            )
            return high.astype(np.uint32) << 16 | low
        if op[1:] == ["rn", "f16x2", "e2m1x2"]:
            code = self.get(args[1], 8)
            high, low = (E2M1[c].astype(np.float16).view(np.uint16) for c in (code >> 4, code & 15))
            return high.astype(np.uint32) << 16 | low
        if extra := set(op[1:-2]) - {"rn", "rz", "rzi", "ftz"}:
            raise KeyError(f"{'.'.join(op)}: {extra}")
        if (
            "rzi" in op
        ):  # to a whole number, toward zero; what does not fit becomes the nearest that does, NaN 0
            if source != "f32" or to not in ("s32", "u32"):
                raise KeyError(".".join(op))
            limit = np.iinfo(I[32] if to == "s32" else U[32])
            whole = np.trunc(np.nan_to_num(_f32(self.get(args[1], 32)).astype(np.float64), nan=0.0))
            return np.clip(whole, limit.min, limit.max).astype(np.int64).astype(np.uint32)
        if to in ("bf16x2", "f16x2"):  # the first source is the upper half
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
        elif kind.endswith("16"):  # also add.rn.f32.bf16: all but the last are 16 bits wide
            given = [
                _widen(v, kind) if v.dtype == np.uint16 else _f32(v)
                for v in (self.get(a, 32 if op[-2] == "f32" else 16) for a in args[1:])
            ]
        else:
            given = [_f32(self.get(a, 32)) for a in args[1:]]
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
            return np.ascontiguousarray(_narrow(value, kind[:-2])).view(np.uint32)
        return (
            _narrow(value, kind)
            if kind.endswith("16") and op[-2] != "f32"
            else value.view(np.uint32)
        )

    def integer(self, op, args, bits):
        name = op[0]
        given = [self.get(a, bits) for a in args[1:]]
        if op[-1].endswith("16x2"):  # each half by itself
            halves = [self.get(a, 32).view(I[16] if op[-1][0] == "s" else U[16]) for a in args[1:]]
            found = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}[name](
                *halves
            )
            return np.ascontiguousarray(found).view(np.uint32)
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
        if name == "bfe":  # bits of a number, the signed one's highest repeated
            at, count = (self.get(a, 32).astype(np.int64) for a in args[2:])
            up = bits - count
            return (
                (given[0].astype(given[0].dtype) << (up - at).astype(given[0].dtype))
                >> up.astype(given[0].dtype)
            ).view(U[bits])
        if (
            name == "prmt"
        ):  # bytes of two numbers, chosen by four digits; one of 8 or more repeats the byte's sign
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
        ):  # of two numbers as one of 64 bits, the first below: its upper half, or its lower
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
            return sum(given[0] >> given[0].dtype.type(i) & one for i in range(bits)).astype(
                np.uint32
            )
        found = {
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
        return many(found[name], given).view(U[bits])
