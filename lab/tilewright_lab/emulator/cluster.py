"""One cluster of blocks, whose threads run in NumPy arrays."""

from __future__ import annotations

import numpy as np

from tilewright_lab.emulator.arithmetic import Arithmetic
from tilewright_lab.emulator.atomics import Atomics
from tilewright_lab.emulator.faults import Fault, Unsupported
from tilewright_lab.emulator.formats import f32
from tilewright_lab.emulator.memory import WINDOW, U
from tilewright_lab.emulator.partitions import Partitions
from tilewright_lab.emulator.tensor_cores import TensorCores
from tilewright_lab.emulator.tensor_memory import TensorMemory
from tilewright_lab.emulator.text import LEAVES, base_and_offset, text_and_bits
from tilewright_lab.emulator.transfers import Transfers
from tilewright_lab.emulator.uncommon import Uncommon


class Cluster(Partitions, Transfers, Atomics, TensorCores, TensorMemory, Uncommon, Arithmetic):
    def __init__(self, kernel, memory, values, at, cluster, grid, counts, most=None):
        """most: instructions that it may execute."""
        self.executed, self.most = 0, most
        self.counts, self.touched = counts, {"read": [], "written": []}
        self.k, self.memory, self.values, self.cluster = kernel, memory, values, cluster
        n = self.n = kernel.threads * cluster
        self.thread = np.arange(n) % kernel.threads
        self.block = np.arange(n) // kernel.threads
        first, y, z = at
        # Blocks of the launch, and threads of the launch from 1.
        self.blocks = (z * grid[1] + y) * grid[0] + first + self.block
        self.everywhere = self.blocks * kernel.threads + self.thread + 1
        self.at = first, y, z
        # Global memory that each block accessed since its last barrier.
        self.accessed = [[] for _ in range(cluster)]
        self.reads = []
        self.special = {
            "%tid.x": self.thread,
            "%ctaid.x": first + self.block,
            "%ctaid.y": np.full(n, y),
            "%ctaid.z": np.full(n, z),
            **{f"%nctaid.{d}": np.full(n, grid[i]) for i, d in enumerate("xyz")},
            **{f"%ntid.{d}": np.full(n, kernel.threads if d == "x" else 1) for d in "xyz"},
            "%tid.y": np.zeros(n, np.int64),
            "%tid.z": np.zeros(n, np.int64),
            "%warpid": self.thread // 32,
            "%laneid": self.thread % 32,
            "%cluster_ctarank": self.block,
        }
        self.local = np.full((n, kernel.local_size), 0xFF, np.uint8)
        self.shared = np.full((cluster, kernel.shared_size), 0xFF, np.uint8)
        # Since the last barrier: thread + 1 that wrote a byte, and that read it (-1: several; -2 -
        # w: one of warp w, which has synchronized at its own barrier).
        self.written = np.zeros((cluster, kernel.shared_size), np.int64)
        self.read = np.zeros((cluster, kernel.shared_size), np.int64)
        # cp.async copies in flight: (threads, their groups, indices, bytes). No thread may access
        # those indices.
        self.copies, self.groups = [], np.zeros(n, np.int64)
        self.flying = np.zeros((cluster, kernel.shared_size), bool)
        # Shared memory not yet visible to the async proxy (TMA, wgmma, tcgen05), and still being
        # read by tensor cores.
        self.unfenced = np.zeros((cluster, kernel.shared_size), bool)
        self.pinned = np.zeros((cluster, kernel.shared_size), bool)
        self.barriers = {}  # (block, address) -> an mbarrier
        self.awaited = {}  # thread -> (its mbarrier, parity)
        # Issued wgmma per group of 128 threads: the values for each register, and the memory it
        # reads.
        self.products = [[] for _ in range(-(-n // 128))]
        self.abroad = np.full(
            n, -1
        )  # barrier.cluster.arrive's that a thread had made when it wrote to another block
        self.regs, self.constants = {}, {}
        self.whole = None  # the threads at this instruction, if all are
        self.pc = np.zeros(n, np.int64)
        # 1: at bar.sync, 2: at barrier.cluster.wait, 3: at an mbarrier, 4: for registers
        self.waits = np.zeros(n, np.int8)
        # By thread: its bulk stores that may still read shared memory, [groups since, places].
        self.stores = {}
        self.divide()
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
                            assert self.counts is not None  # they are of `count`
                            self.counts.least[kind] += len(np.unique(np.concatenate(sectors)))
                    return
                self.release()
                continue
            pc = int(self.pc[ready].min())
            here = ready & (self.pc == pc)
            others = self.pc[ready & ~here]
            until = int(others.min()) if len(others) else end  # where they reconverge
            self.whole = here if here.all() else None
            going = True
            while going and pc < until:
                if self.executed == self.most:
                    raise self.located(self.endless(), pc)
                self.executed += 1
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
                    self.attempt(op, args, who, pc)
                pc += 1
            if going:
                self.pc[here] = pc

    def attempt(self, op, args, who, pc):
        """Executes an instruction; what goes wrong is told with its place in the source."""
        try:
            self.now = pc
            if self.counts:
                self.counts.now = pc
            self.step(op, args, who, pc)
        except Fault as fault:
            raise self.located(fault, pc) from None
        except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
            unsupported = Unsupported(f"instruction `{self.k.texts[pc]}`")
            unsupported.line = self.k.where(pc)
            raise unsupported from e
        finally:
            for fault in self.memory.passed:
                self.keep(fault)
            self.memory.passed.clear()

    def endless(self):
        return Fault(
            "limit",
            f"has executed {self.most} instructions and not ended; programs run one after another, "
            "and none can wait for a later one (--max-instructions accepts more)",
        )

    def located(self, fault, pc):
        fault.instruction, fault.line = self.k.texts[pc], self.k.where(pc)
        fault.program = tuple(int(i) for i in self.at)
        return fault

    def note(self, kind, what):
        """Reports what does not end a launch, once per line of the source."""
        self.keep(Fault(kind, what))

    def keep(self, fault):
        line = (fault.kind, self.located(fault, self.now).line or self.now)
        self.memory.notes.setdefault(line, fault)

    def note_read(self, places, me):
        """Remembers who reads global memory until the next barrier."""
        self.reads.append((places, me))

    def replicated(self, at, me):
        """Which bytes were read once since the last barrier, by these threads and by others that
        hold copies of their work: what those read too late they have no use for.
        """
        if "replicas" not in self.memory.tolerated:
            return np.zeros(len(at), bool)
        times, own = np.zeros(len(at), int), np.zeros(len(at), bool)
        for places, readers in self.reads:
            times += np.isin(at, places)
            own |= np.isin(at << 32 | me, places << 32 | readers)
        replicas = own & (times == 1)
        if replicas.any():
            self.note(
                "replicas",
                f"writes {self.memory.element(int(at[replicas][0]))}, which threads that hold copies "
                "of the writing thread's work read, with no barrier between",
            )
        return replicas

    def note_access(self, places, who):
        """Remembers global memory until the next barrier orders these accesses."""
        if self.k.synchronizes:
            for b in range(self.cluster):
                mine = places if self.cluster == 1 else places[self.block[who] == b]
                self.accessed[b].append(mine.reshape(-1))

    def meet(self, b):
        """A block's threads have synchronized."""
        self.written[b] = self.read[b] = 0
        if self.cluster == 1:
            self.reads = []
        if self.accessed[b]:
            block = int(self.blocks[self.block == b][0])
            self.memory.barrier(block, np.concatenate(self.accessed[b]), self.k.threads)
            self.accessed[b] = []

    def release(self):
        done = self.pc >= len(self.k.code)
        moved = False
        for b in range(self.cluster):
            moved |= self.free(b)
        if (self.waits == 2).any() and (self.arrived >= self.waited.max() + 1).all():
            self.waited[self.waits == 2] += 1
            self.waits[self.waits == 2] = 0
            for b in range(self.cluster):
                self.meet(b)
            moved = True
        for thread, (barrier, parity) in list(self.awaited.items()):
            self.land(barrier, parity)
            if barrier["phase"] % 2 != parity:
                self.waits[thread] = 0
                self.passed(barrier, thread)
                del self.awaited[thread]
                moved = True
        moved |= self.hand_out()
        if not moved:
            at = [int((self.waits == i).sum()) for i in (1, 2, 3, 4)]
            raise Fault(
                "barrier",
                f"deadlock: {at[0]} at bar.sync, {at[1]} at barrier.cluster.wait, {at[2]} at an "
                f"mbarrier, {at[3]} for registers, {done.sum()} ended",
            )

    # ---- operands

    def get(self, name, bits):
        if name in self.regs:
            return self.regs[name]
        if name in self.special:
            return self.special[name].astype(U[bits])
        if name in self.k.parameters:  # the address of a parameter
            return np.full(self.n, 4096 * (1 + self.k.parameters.index(name)), U[bits])
        if name in self.k.local:
            return np.full(self.n, self.k.local[name], U[bits])
        if name in self.k.shared:
            return np.full(self.n, self.k.shared[name], U[bits])
        if (name, bits) not in self.constants:
            if name.startswith("0f"):
                number, bits = int(name[2:], 16), 32
            elif name.startswith("0d"):
                number, bits = int(name[2:], 16), 64
            elif (
                name.rstrip("0123456789") in self.k.widths
            ):  # never written: the unused half of a pair
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
        base, offset = base_and_offset(operand)
        return self.get(base, 64).astype(np.int64) + offset

    # ---- memory

    def places(self, space, address, size, who, name):
        at = address[who]
        does = "reads" if name.startswith(("ld", "cp.async")) else "writes"
        if (at % size).any():
            where = int(at[at % size != 0][0])
            what = self.memory.element(where) if space == "global" else "shared memory"
            raise Fault(
                "alignment",
                f"{does} {size} bytes at {what}, whose address is no multiple of {size}",
            )
        each = at[:, None] + np.arange(size)
        if space == "global":
            memory = self.memory
            inside = (each >= 0) & (each < len(memory.data))
            inside &= memory.inside[np.where(inside, each, 0)]
            # The compiler may read up to 16 aligned bytes partly outside the tensor and drop the
            # rest: no page ends between them. They are 0xFF here, so that using one shows.
            accepted = inside.any(1) if name.startswith("ld") else inside.all(1)
            if not accepted.all():
                outside = each[~accepted]
                where = int(outside[~inside[~accepted]][0])
                thread = int(self.thread[who][~accepted][0])
                raise Fault(
                    "bounds",
                    f"{does} {memory.nearest(where)}, in {int((~accepted).sum())} of "
                    f"{int(who.sum())} threads (the first: {thread})",
                )
            return each
        own = self.block[who][:, None]
        block = np.where(each >= WINDOW, each // WINDOW - 1, own)
        each = each % WINDOW
        if (each >= self.k.shared_size).any() or (each < 1024).any():
            raise Fault("bounds", "outside shared memory")
        if (abroad := (block != own).any(1)).any():
            if (self.waited[who][abroad] == 0).any():
                raise Fault("barrier", "to a block that may not have begun")
            self.abroad[np.flatnonzero(who)[abroad]] = self.arrived[who][abroad]
        return block, each

    def of_others(self, before, thread):
        """Whether the entry in `written` or `read` belongs to a thread that this one (from 1) has
        not synchronized with since.
        """
        if self.clocks is not None:  # they order warps; what is left is a warp's own threads
            same = (before - 1) // 32 == (thread - 1) // 32
            return (before > 0) & (before != thread) & same
        return (before != 0) & (before != thread) & (before != -2 - (thread - 1) // 32)

    def count(self, kind, at, lanes, size):
        """Counts sectors of global memory, for accesses that each lie in one."""
        assert self.counts is not None
        self.counts.sectors(kind, at, lanes, size)
        self.touched[kind].append(np.unique(at // 32))

    # ---- instructions

    # Long: a table of instructions.
    def step(self, op, args, who, pc):
        name, kind = op[0], op[-1]
        text, bits = text_and_bits(tuple(op))
        if self.uncommon(op, args, who, text, bits):
            pass
        elif name == "ret":
            if (self.abroad[who] >= self.arrived[who]).any():
                raise Fault(
                    "barrier",
                    "ret: wrote to another block, which may have ended: no barrier.cluster.arrive "
                    "since",
                )
            if (self.pc >= len(self.k.code))[~who].all():
                self.ended()
            if any(self.stores.get(thread) for thread in np.flatnonzero(who).tolist()):
                raise Fault("barrier", "ret: a bulk store may still read shared memory")
            self.pc[who] = len(self.k.code)
        elif name == "bra":
            self.pc[who] = self.k.labels[args[0]]
        elif text == "brx.idx":
            places = np.array([self.k.labels[label] for label in self.k.targets[args[1]]])
            self.pc[who] = places[self.get(args[0], 32)[who]]
        elif name in ("bar", "barrier") and op[1] == "sync":
            self.stand(args, who)
        elif name == "bar" and self.k.threads == 32:  # of a warp, if it is complete
            self.stand(["0"], who)
        elif name == "setmaxnreg":
            self.set_registers(op, args, who, text)
        elif text == "bar.warp.sync":
            self.whole_warps(who, text)
            for done in (self.written, self.read):
                mine = np.isin(done, np.flatnonzero(who) + 1)
                done[mine] = -2 - (done[mine] - 1) // 32
        elif name == "barrier" and op[2] == "arrive":
            self.arrived[who] += 1
        elif name == "barrier" and op[2] == "wait":
            self.waits[who] = 2
        elif name in ("atom", "red"):
            self.atomic(op, args, who, text, bits)
        elif name == "ld" and "acquire" in op:  # as an atomic that changes nothing
            atom = ["atom", *op[1:-1], "or", kind]
            self.atomic(atom, [*args, "0"], who, ".".join(atom), bits)
        elif name in ("ld", "st"):
            self.move(name, op, args, who, text, bits)
        elif name == "cp" and "bulk" in op[:4]:
            self.bulk(op, args, who, text)
        elif name == "mbarrier":
            self.mbarrier(op, args, who, text, pc)
        elif name == "wgmma":
            self.wgmma(op, args, who, text)
        elif name == "tcgen05":
            self.tcgen05(op, args, who, text)
        elif text == "fence.proxy.async.shared::cta":  # for the writes that these threads see
            self.unfenced &= ~self.visible(np.flatnonzero(who))
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
            reduced = (one if number else either).reduce(
                given.reshape(-1, 32), axis=1, dtype=given.dtype
            )
            self.put(args[0], np.repeat(reduced, 32).view(np.uint32), who)
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
            self.put(args[0], {"infinite": np.isinf}[op[1]](f32(self.get(args[1], 32))), who)
        elif name == "cvt":
            self.put(args[0], self.convert(op, args), who)
        elif kind in ("f32", "f32x2", "bf16", "bf16x2", "f16", "f16x2"):
            self.put(args[0], self.float(op, args), who)
        else:
            self.put(args[0], self.integer(op, args, bits), who)
