"""Tensor cores of sm_100 (tcgen05): matrices in tensor memory and in shared memory.

Instructions, descriptors and layouts are those of the PTX ISA 9.x, "TensorCore 5th Generation
Family Instructions". A warp waits for its own loads and stores (tcgen05.wait); products and copies
are of a queue of the warp that issues them, and run until somebody has waited at an mbarrier that
tcgen05.commit arrives at. cta_group::2, tcgen05.shift, sparse matrices and .ws are not here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright_lab.emulator.faults import Fault
from tilewright_lab.emulator.formats import E2M1, f32, from_float8, narrow, widen
from tilewright_lab.emulator.part import Part
from tilewright_lab.emulator.tensor_cores import from_bytes, matrix_places

LANES, COLUMNS = 128, 512  # of 32 bits each
GROUP = 16  # lanes: what is accessed is tracked by 16 lanes of a column, a cell
CELLS = LANES // GROUP * COLUMNS
PRODUCT, COPY = 1, 2  # what is on its way into a cell
SPANS = {0: 0, 2: 128, 4: 64, 6: 32}  # bytes of a swizzle, by its number in a descriptor

# By kind: formats by their number in the instruction descriptor, and elements of a step (K).
FORMATS = {
    "f16": ({0: "f16", 1: "bf16"}, 16),
    "tf32": ({2: "tf32"}, 8),
    "f8f6f4": ({0: "e4m3", 1: "e5m2"}, 32),
    "mxf8f6f4": ({0: "e4m3", 1: "e5m2"}, 32),
    "mxf4": ({1: "e2m1"}, 64),
    "mxf4nvf4": ({1: "e2m1"}, 64),
}
# By kind and what follows block_scale: scales of a row in a step.
SCALES = {
    ("mxf8f6f4", ""): 1,
    ("mxf8f6f4", "block32"): 1,
    ("mxf8f6f4", "scale_vec::1X"): 1,
    ("mxf4", ""): 2,
    ("mxf4", "block32"): 2,
    ("mxf4", "scale_vec::2X"): 2,
    ("mxf4nvf4", "block32"): 2,
    ("mxf4nvf4", "scale_vec::2X"): 2,
    ("mxf4nvf4", "block16"): 4,
    ("mxf4nvf4", "scale_vec::4X"): 4,
}


@dataclass
class Queued:
    """A product or copy that may still run."""

    warp: int
    time: int  # its number in the warp's queue
    shared: list[tuple[np.ndarray, np.ndarray]]  # which bytes it reads
    reads: np.ndarray  # cells
    writes: np.ndarray
    kind: int


class TensorState:
    """The tensor memory of a block. Flat arrays over cells; wrote and read as in `Clocks`."""

    def __init__(self, warps: int, clocks: int):
        self.bits = np.full((LANES, COLUMNS), 0xFFFFFFFF, np.uint32)
        self.unset = np.ones((LANES, COLUMNS), bool)
        self.held: dict[int, int] = {}  # columns, by the first
        self.permitted = True
        self.storing, self.loading = (
            np.zeros(CELLS, np.int16),
            np.zeros(CELLS, np.int16),
        )  # warp + 1
        self.filling, self.feeding = np.zeros(CELLS, np.int8), np.zeros(CELLS, bool)
        self.issuer = np.full(CELLS, -1, np.int16)  # of what fills or is fed
        self.wrote, self.read = (np.zeros((clocks, CELLS), np.int32) for _ in range(2))
        self.times = np.zeros(warps, np.int32)  # of each warp's queue
        self.queue: list[Queued] = []

    def allocated(self) -> np.ndarray:
        """[columns], which are."""
        columns = np.zeros(COLUMNS, bool)
        for first, count in self.held.items():
            columns[first : first + count] = True
        return columns

    def settle(self) -> None:
        """Notes anew what is on its way."""
        self.filling[:], self.feeding[:], self.issuer[:] = 0, False, -1
        for q in self.queue:
            self.feeding[q.reads] = True
            self.filling[q.writes] = q.kind
            self.issuer[np.concatenate((q.reads, q.writes))] = q.warp


def cells(lanes: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Those of lanes and columns, each once."""
    return np.unique(lanes // GROUP * COLUMNS + columns)


def rectangle(lanes: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The cells of all these lanes in all these columns."""
    return cells(np.unique(lanes // GROUP)[:, None] * GROUP, columns)


ALL = np.arange(LANES)


class TensorMemory(Part):
    def tcgen05(self, op, args, who, text):
        if self.tensor is None or "cta_group::2" in op:
            raise KeyError(f"{text} in a cluster of blocks")
        name = op[1]
        if name.startswith("fence") and len(op) == 2:
            return  # before and after barriers of threads, which order here without it
        if name == "mma":
            self.tensor_products(op, args, who, text)
        elif name == "cp":
            self.tensor_copies(op, args, who, text)
        elif name == "commit":
            self.commit(op, args, who, text)
        elif op[2:4] != ["sync", "aligned"] and op[3:5] != ["sync", "aligned"]:
            raise KeyError(text)
        else:
            self.whole_warps(who, text)
            warps = np.unique(np.flatnonzero(who) // 32)
            if name in ("wait::ld", "wait::st"):
                self.tensor_wait(name[-2:], warps)
            elif name in ("ld", "st"):
                self.tensor_access(op, args, who, text)
            elif name in ("alloc", "dealloc", "relinquish_alloc_permit"):
                for warp in warps:
                    self.allocation(op, args, int(warp), text)
            else:
                raise KeyError(text)

    # ---- allocation

    def allocation(self, op, args, warp, text):
        """alloc takes the last columns that are free: a GPU may have given the first to another
        block, and no program may count on an address.
        """
        t = self.tensor
        if op[1] == "relinquish_alloc_permit":
            t.permitted = False
            return
        count = int(self.get(args[1], 32)[32 * warp])
        if count not in (32, 64, 128, 256, 512):
            raise Fault("bounds", f"{count} columns of tensor memory: 32, 64, 128, 256 or 512")
        if op[1] == "alloc":
            if not t.permitted:
                raise Fault("barrier", "tensor memory is allocated after the permit was given up")
            free = ~t.allocated()
            starts = range(COLUMNS - count, -1, -count)
            first = next((s for s in starts if free[s : s + count].all()), None)
            if first is None:
                raise Fault("barrier", f"deadlock: no {count} columns of tensor memory are free")
            t.held[first] = count
            t.unset[:, first : first + count] = True
            t.bits[:, first : first + count] = 0xFFFFFFFF
            one = np.arange(self.n) == 32 * warp
            raw = np.array([[first]], np.uint32).view(np.uint8)
            self.store("shared", self.address(args[0]), raw, one, text)
            return
        first = int(self.get(args[0], 32)[32 * warp])
        if t.held.get(first) != count:
            raise Fault("bounds", f"{count} columns from {first} were not allocated as one")
        self.reach("frees", warp, rectangle(ALL, first + np.arange(count)))
        del t.held[first]

    def ended(self):
        """All threads of the block have ended."""
        if self.tensor is not None and self.tensor.held:
            raise Fault("barrier", "ends with tensor memory that is allocated: no tcgen05.dealloc")

    def inside(self, lanes, columns, does):
        """Fails unless these lanes and columns are allocated."""
        if lanes.min() < 0 or lanes.max() >= LANES or columns.min() < 0:
            raise Fault("bounds", f"{does} outside of tensor memory")
        if columns.max() >= COLUMNS or not self.tensor.allocated()[columns].all():
            held = ", ".join(f"{f} to {f + n - 1}" for f, n in sorted(self.tensor.held.items()))
            raise Fault(
                "bounds",
                f"{does} columns {columns.min()} to {columns.max()} of tensor memory; allocated: "
                f"{held or 'none'}",
            )

    # ---- order

    def reach(self, does, warp, at, queued=0):
        """Fails if a warp reads, writes or frees cells that others may access at that time.
        queued: PRODUCT or COPY, if its queue does, which runs in order. A product adds to what one
        before it writes, and takes as factors and scales only what copies before it have written.
        """
        t, where, writes = self.tensor, f"{does} tensor memory that", does != "reads"
        storing = t.storing[at] != 0
        if not queued and does == "writes":
            storing &= t.storing[at] != warp + 1  # its own stores are in order
        own = (t.issuer[at] == warp) & (queued != 0)
        filling = (t.filling[at] != 0) & ~own
        if queued == PRODUCT and not writes:
            filling |= t.filling[at] == PRODUCT
        for busy, what in (
            (storing, "tcgen05.st may still be writing, without a tcgen05.wait::st between"),
            (
                (t.loading[at] != 0) & writes,
                "tcgen05.ld may still be reading, without a tcgen05.wait::ld between",
            ),
            (
                filling | t.feeding[at] & ~own & writes,
                "tensor cores may still access: nobody has waited for a tcgen05.commit since",
            ),
        ):
            if busy.any():
                self.memory.fail("race", f"{where} {what}")
        clocks = self.clocks
        for did, log in (("wrote", t.wrote), ("reads", t.read)):
            later = log[:, at] > clocks.now[warp][:, None]
            later[warp] = False
            if queued:
                later[clocks.queue(warp)] = False
            if (did == "wrote" or writes) and later.any():
                other = "the tensor cores" if later[clocks.queue(0) : -1].any() else "another warp"
                self.memory.fail(
                    "race", f"{where} {other} {did}, with no barrier between that both have passed"
                )

    def tensor_wait(self, what, warps):
        """tcgen05.wait::ld and ::st. A load's registers may be used before (compilers do), which
        says nothing of its memory: what it reads may be overwritten only after the wait.
        """
        t = self.tensor
        for warp in warps:
            pending, log = (t.storing, t.wrote) if what == "st" else (t.loading, t.read)
            at = pending == warp + 1
            log[warp, at] = self.clocks.now[warp, warp]
            pending[at] = 0

    # ---- between registers and tensor memory

    def tensor_access(self, op, args, who, text):
        """tcgen05.ld and .st: each thread has the same number of registers, and a warp reaches a
        quarter of the lanes.
        """
        loads, shape, packed = op[1] == "ld", op[4], op[-2] in ("pack::16b", "unpack::16b")
        names = [p.strip() for p in (args[0] if loads else args[-1]).strip("{}").split(",")]
        half = int(args[2 if loads else 1], 0) if shape == "16x32bx2" else 0
        if op[-1] != "b32" or len(op) != 7 + packed or len(args) != 2 + (shape == "16x32bx2"):
            raise KeyError(text)
        lane, column, repeats = fragment(shape, len(names), half)
        if op[5] != f"x{repeats}":
            raise KeyError(text)
        address = self.address(args[1] if loads else args[0])[who]
        warp = np.flatnonzero(who) // 32
        if (address != np.repeat(address[::32], 32)).any():
            raise Fault("barrier", "threads of a warp give different addresses")
        base = address >> 16
        size = 32 if shape == "32x32b" else 16
        if (base % size).any() or (base // 32 != warp % 4).any():
            wrong = int(np.flatnonzero((base % size != 0) | (base // 32 != warp % 4))[0])
            raise Fault(
                "bounds",
                f"warp {warp[wrong]} reaches lanes {warp[wrong] % 4 * 32} to "
                f"{warp[wrong] % 4 * 32 + 31}, in steps of {size}, not those from {base[wrong]}",
            )
        threads = np.arange(len(address)) % 32
        lanes = base[:, None] + lane[threads]
        columns = (address & 0xFFFF)[:, None] + column[threads] * (1 + packed)
        if packed:
            lanes, columns = np.stack((lanes, lanes), -1), np.stack((columns, columns + 1), -1)
        self.inside(lanes, columns, "reads" if loads else "writes")
        for w in np.unique(warp):
            at = cells(lanes[warp == w], columns[warp == w])
            self.reach("reads" if loads else "writes", int(w), at)
            (self.tensor.loading if loads else self.tensor.storing)[at] = w + 1
        self.move_tensor(loads, names, (lanes, columns), packed, who)

    def move_tensor(self, loads, names, places, packed, who):
        t = self.tensor
        if loads:  # NaN where nothing has been written: compilers read that, too, and drop it
            bits = t.bits[places]
            if packed:
                bits = bits[..., 0] & np.uint32(0xFFFF) | bits[..., 1] << np.uint32(16)
            for i, name in enumerate(names):
                value = np.zeros(self.n, np.uint32)
                value[who] = bits[:, i]
                self.put(name, value, who)
            return
        given = np.stack([self.get(p, 32)[who] for p in names], 1)
        if packed:
            given = np.stack((given & np.uint32(0xFFFF), given >> np.uint32(16)), -1)
        t.bits[places] = given
        t.unset[places] = False

    def initialized(self, places):
        if self.tensor.unset[places].any():
            self.memory.fail("uninitialized", "reads tensor memory that nothing has written")

    # ---- of the queue

    def shared_matrix(self, described, rows, size, transposed, width, thread):
        """[rows, elements, size], the bytes that a matrix descriptor of sm_100 names, `width` of a
        row. The thread's warp queues what reads them.
        """
        start, leading, stride = ((described >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        if described >> 61 not in SPANS or described >> 46 & 7 != 1 or described >> 49 & 0xFFF:
            raise KeyError(f"matrix descriptor {described:#x}")
        span = SPANS[described >> 61]
        at = matrix_places(start, leading, stride, span, rows, size, transposed, width)
        return self.checked_matrix(at, int(self.block[thread]), thread // 32)

    def enqueue(self, thread, kind, shared, reads, writes):
        t, warp = self.tensor, thread // 32
        t.times[warp] += 1
        row = self.clocks.queue(warp)
        for places in shared:
            self.clocks.read[row, places[1].reshape(-1)] = t.times[warp]
        t.read[row, reads], t.wrote[row, writes] = t.times[warp], t.times[warp]
        t.queue.append(Queued(warp, int(t.times[warp]), shared, reads, writes, kind))
        t.settle()
        self.repin()

    def commit(self, op, args, who, text):
        """The mbarrier is arrived at when all that the thread has queued is done."""
        rest = op[3:-1]
        if rest and rest[-1] in ("shared::cluster", "shared::cta"):
            rest = rest[:-1]
        if op[2] != "cta_group::1" or rest != ["mbarrier::arrive::one"] or len(args) != 1:
            raise KeyError(text)
        for thread in np.flatnonzero(who).tolist():
            warp = thread // 32
            barrier = self.barrier(args[0], thread, text)
            upto = int(self.tensor.times[warp])
            barrier["commits"].append((warp, upto, self.clocks.told(warp)))

    def finish(self, barrier):
        """The first commit to an mbarrier is done, and so is what precedes it in its queue."""
        warp, upto, known = barrier["commits"].pop(0)
        t, row = self.tensor, self.clocks.queue(warp)
        t.queue = [q for q in t.queue if q.warp != warp or q.time > upto]
        t.settle()
        self.repin()
        known[row] = max(known[row], upto)
        self.arrive(barrier, known)
        self.turn(barrier)

    def tensor_copies(self, op, args, who, text):
        """tcgen05.cp: rows of a matrix in shared memory become lanes, in one quarter of them or in
        several.
        """
        # Triton names the warps first, which ptxas takes, too.
        shape = ".".join(sorted(op[3:], key=lambda part: part.startswith("warp")))
        if op[2] != "cta_group::1" or shape not in COPIES:
            raise KeyError(text)
        quarters, width = COPIES[shape]
        described = self.get(args[1], 64)
        for thread in np.flatnonzero(who).tolist():
            address = int(self.address(args[0])[thread])
            lane, column = address >> 16, address & 0xFFFF
            if lane:
                raise KeyError(f"{text}: from lane {lane}")
            rows = 32 * (max(quarters) + 1)
            given = int(described[thread])
            places = self.shared_matrix(given, rows, 1, False, width, thread)
            columns = np.arange(column, column + width // 4)
            self.inside(ALL, columns, "writes")
            at = rectangle(ALL, columns)
            self.reach("writes", thread // 32, at, COPY)
            raw = np.ascontiguousarray(self.shared[places][:, :, 0]).view(np.uint32)
            for quarter, source in enumerate(quarters):
                to = np.ix_(ALL[32 * quarter : 32 * quarter + 32], columns)
                self.tensor.bits[to] = raw[32 * source : 32 * source + 32]
                self.tensor.unset[to] = False
            self.enqueue(thread, COPY, [places], at[:0], at)

    def tensor_products(self, op, args, who, text):
        kind, scaled = op[3].removeprefix("kind::"), "block_scale" in op
        steps = SCALES.get((kind, ".".join(op[5:]))) if scaled else 0
        if (
            op[2] != "cta_group::1"
            or kind not in FORMATS
            or steps is None
            or (kind.startswith("mx") != scaled or len(op) > 4 + 2 * scaled)
            or len(args) != (7 if scaled else 5)
        ):
            raise KeyError(text)
        described, adds = self.get(args[3], 32), self.truth(args[-1])
        for thread in np.flatnonzero(who).tolist():
            p = Product.of(kind, steps, int(described[thread]), text)
            self.tensor_product(p, args, thread, bool(adds[thread]))

    def tensor_product(self, p, args, thread, adds):
        """d [M, N] = a [M, K] b [N, K]^T, plus d. M = 64: 16 rows in each quarter of the lanes."""
        t, warp, shared = self.tensor, thread // 32, []
        if self.counts:
            self.counts.products += p.m * p.n * p.k
        address = int(self.address(args[0])[thread])
        lanes = (address >> 16) + p.lanes()
        columns = (address & 0xFFFF) + np.arange(p.n)
        self.inside(lanes, columns, "writes")
        writes = rectangle(lanes, columns)
        if args[1].startswith("["):  # in tensor memory
            a_at = int(self.address(args[1])[thread])
            if p.turned[0]:
                raise KeyError("a transposed matrix in tensor memory")
            where = (a_at >> 16) + p.lanes(), (a_at & 0xFFFF) + np.arange(8)
            self.inside(*where, "reads")
            places, reads = np.ix_(*where), [rectangle(*where)]
            self.factor(reads[0], warp, places)
            a = decoded(np.ascontiguousarray(t.bits[places]).view(np.uint8), p.formats[0])
        else:
            reads = []
            a = self.factor_from_shared(p, 0, int(self.get(args[1], 64)[thread]), thread, shared)
        b = self.factor_from_shared(p, 1, int(self.get(args[2], 64)[thread]), thread, shared)
        a, b = a.reshape(4, p.m // 4, -1), np.broadcast_to(b, (4, *b.shape))  # by quarters
        if p.scales:
            starts = [int(self.address(o)[thread]) for o in args[4:6]]
            own, others = (self.scales(p, i, start, warp, reads) for i, start in enumerate(starts))
            # A quarter's lanes take their own copies.
            own = np.stack([own[q, 32 * q : 32 * q + 32] for q in range(4)])
            a, b = a * own, b * others
        self.reach("writes", warp, writes, PRODUCT)
        to = np.ix_(lanes, columns)
        c = np.zeros((p.m, p.n))
        if adds:
            self.initialized(to)
            bits = np.ascontiguousarray(t.bits[to])
            c = widen(bits.astype(np.uint16), "f16") if p.half else f32(bits)
        d = (a @ b.transpose(0, 2, 1)).reshape(p.m, p.n) + c
        t.bits[to] = narrow(d, "f16") if p.half else d.astype(np.float32).view(np.uint32)
        t.unset[to] = False
        self.enqueue(thread, PRODUCT, shared, np.concatenate([writes[:0], *reads]), writes)

    def factor(self, at, warp, places):
        """A product may read these."""
        self.reach("reads", warp, at, PRODUCT)
        self.initialized(places)

    def factor_from_shared(self, p, which, described, thread, shared):
        """[rows, K], a or b; appends the bytes to `shared`."""
        size = {"f16": 2, "bf16": 2, "tf32": 4}.get(p.formats[which], 1)
        rows, turned = (p.m, p.n)[which], p.turned[which]
        places = self.shared_matrix(described, rows, size, turned, 32, thread)
        shared.append(places)
        return decoded(self.shared[places].reshape(rows, 32), p.formats[which])

    def scales(self, p, which, address, warp, reads):
        """[4, rows, K], for each quarter of the lanes, each of which must hold a copy. Row r is in
        column r / 32 and lane r % 32 of a quarter, a byte for each step.
        """
        rows, first = (p.m, p.n)[which], p.first[which]
        columns = (address & 0xFFFF) + np.arange(-(-rows // 32))
        if address >> 16 & 0x3FFF:
            raise KeyError(f"scales from lane {address >> 16}")
        self.inside(ALL, columns, "reads")
        places = np.ix_(ALL, columns)
        reads.append(rectangle(ALL, columns))
        self.factor(reads[-1], warp, places)
        raw = np.ascontiguousarray(self.tensor.bits[places])[:, :, None].view(np.uint8)
        raw = raw[..., first : first + p.scales].reshape(4, 32, len(columns), p.scales)
        raw = np.ascontiguousarray(raw.transpose(0, 2, 1, 3)).reshape(4, -1, p.scales)[:, :rows]
        if p.power:  # ue8m0
            values = np.where(raw == 255, np.nan, np.exp2(raw.astype(np.float64) - 127))
        else:
            values = from_float8(raw & 0x7F, "e4m3").astype(np.float64)
        return np.repeat(values, p.k // p.scales, 2)


@dataclass(frozen=True)
class Product:
    """What an instruction descriptor says of a product, m x n x k."""

    m: int
    n: int
    k: int
    formats: tuple[str, str]
    turned: tuple[bool, bool]  # elements of a column are adjacent: M or N is the contiguous one
    half: bool  # d is float16
    scales: int  # of a row
    first: tuple[int, int]  # the byte of the first scale
    power: bool  # scales are powers of two

    @classmethod
    def of(cls, kind: str, scales: int, d: int, text: str) -> Product:
        """d: the descriptor; PTX ISA, tables "Instruction descriptor format"."""
        formats, k = FORMATS[kind]
        codes = d >> 7 & 7, d >> 10 & (3 if kind.startswith("mxf4") else 7)
        m, n = (d >> 24 & 31) << 4, (d >> 17 & 63) << 3
        step = 16 if m == 128 else 8
        first, negated, half = (d >> 29 & 3, d >> 4 & 3), d >> 13 & 3, False
        wrong = d & 15 or d >> 31 or negated or any(c not in formats for c in codes)
        if scales:
            wrong |= m != 128 or max(first) + scales > 4
        else:
            half = first[1] == 0
            wrong |= first[1] not in ((0, 1) if kind == "f16" else (1,)) or d >> 29
            first = 0, 0
        turned = bool(d >> 15 & 1), bool(d >> 16 & 1)
        wrong |= any(turned) and kind in ("tf32", "mxf4", "mxf4nvf4")
        if wrong or m not in (64, 128) or not 0 < n <= 256 or n % step:
            raise KeyError(f"{text}: instruction descriptor {d:#x}")
        named = formats[codes[0]], formats[codes[1]]
        return cls(m, n, k, named, turned, half, scales, first, bool(d >> 23 & 1))

    def lanes(self) -> np.ndarray:
        """The lane of each row, from the first lane."""
        row = np.arange(self.m)
        return row if self.m == 128 else row // 16 * 32 + row % 16


# tcgen05.cp: the rows, by 32, that each quarter of the lanes gets, and bytes of a row.
COPIES = {
    "128x256b": ((0, 1, 2, 3), 32),
    "128x128b": ((0, 1, 2, 3), 16),
    "64x128b.warpx2::02_13": ((0, 1, 0, 1), 16),
    "64x128b.warpx2::01_23": ((0, 0, 1, 1), 16),
    "32x128b.warpx4": ((0, 0, 0, 0), 16),
}


def fragment(shape: str, registers: int, half: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Lane and column [32 threads, registers] of tcgen05.ld and .st, from their address, and the
    number after the x.   half: to the address of the second 16 threads, with 16x32bx2.
    """
    thread, i = np.arange(32)[:, None], np.arange(registers)[None, :]
    if shape == "32x32b":
        return thread + 0 * i, i + 0 * thread, registers
    if shape == "16x32bx2":
        upper = thread // 16
        return thread % 16 + upper * (half >> 16) + 0 * i, i + upper * (half & 0xFFFF), registers
    if shape == "16x256b" and registers % 4 == 0:  # 8 columns of lanes 0 to 7, then of 8 to 15
        return (
            thread // 4 + i // 2 % 2 * 8,
            thread % 4 * 2 + i % 2 + i // 4 * 8,
            registers // 4,
        )
    raise KeyError(f"tcgen05 with the shape {shape}")


def decoded(raw: np.ndarray, kind: str) -> np.ndarray:
    """Numbers in float64 from the bytes of rows; of a byte in e2m1, the lower half first."""
    if kind == "e2m1":
        return E2M1[np.stack((raw & 15, raw >> 4), -1).reshape(len(raw), -1)].astype(np.float64)
    return from_bytes(raw, kind).astype(np.float64)
