"""Warps of a block that run code of their own: barriers of some of them, mbarriers between them,
and registers that they hand to each other.

With a barrier of the whole block, an access is ordered or it is not, for all threads alike. Here it
is ordered for some warps: vector clocks say which. A warp's accesses carry its time; who meets it
at a barrier, or waits for a phase of an mbarrier at which it arrived, knows them from then on.
"""

from __future__ import annotations

import numpy as np

from tilewright_lab.emulator.faults import Fault
from tilewright_lab.emulator.part import Part
from tilewright_lab.emulator.tensor_memory import TensorState

REGISTERS = 4  # in `waits`: at a setmaxnreg.inc that other warps must give registers for


class Clocks:
    """now: [warps, units], what each warp knows of each: the warps, their queues (tcgen05), if
    there are any, and the unit that copies (TMA).
    wrote, read: [units, bytes of shared memory], when each last did.
    """

    def __init__(self, warps: int, size: int, queues: bool = False):
        self.units = warps * (1 + queues) + 1
        self.now = np.zeros((warps, self.units), np.int32)
        np.fill_diagonal(self.now, 1)
        self.wrote = np.zeros((self.units, size), np.int32)
        self.read = np.zeros((self.units, size), np.int32)
        self.copies = 0  # that have landed

    def unknown(self, log: np.ndarray, warp: int, at: np.ndarray) -> bool:
        """Whether others accessed these bytes, and `warp` does not know that they are done."""
        later = log[:, at] > self.now[warp][:, None]
        later[warp] = False
        return bool(later.any())

    def meet(self, warps: np.ndarray) -> None:
        self.now[warps] = self.now[warps].max(0)
        self.now[warps, warps] += 1

    def told(self, warp: int) -> np.ndarray:
        """What a warp knows; what it does later is not part of that."""
        known = self.now[warp].copy()
        self.now[warp, warp] += 1
        return known

    def learn(self, warp: int, known: np.ndarray) -> None:
        self.now[warp] = np.maximum(self.now[warp], known)

    def queue(self, warp: int) -> int:
        """The row of a warp's queue."""
        return len(self.now) + warp

    def landed(self, at: np.ndarray) -> np.ndarray:
        """A copy has written these bytes. Returns what those know who waited for it."""
        self.copies += 1
        self.wrote[-1, at] = self.copies
        known = np.zeros(self.now.shape[1], np.int32)
        known[-1] = self.copies
        return known


class Partitions(Part):
    clocks: Clocks | None

    def divide(self) -> None:
        """A cluster begins."""
        # At which bar.sync a thread waits, and how many threads it takes.
        self.at_bar, self.bar_size = np.zeros(self.n, np.int64), np.zeros(self.n, np.int64)
        # Per warp: registers of a thread, and those that it waits for; all of the block.
        self.registers = np.full(self.n // 32, self.k.registers)
        self.wanted, self.pool = self.registers.copy(), int(self.registers.sum())
        queues, warps = self.k.tensor_memory, self.n // 32
        own = (self.k.specialized or queues) and self.cluster == 1
        self.clocks = Clocks(warps, self.k.shared_size, queues) if own else None
        self.tensor = TensorState(warps, self.clocks.units) if self.clocks and queues else None
        self.coming: dict[
            str, np.ndarray
        ] = {}  # registers that tcgen05.ld writes, of which threads

    def ordered(self, does: str, who: np.ndarray, at: np.ndarray) -> None:
        """Fails if these threads access bytes (a row each) that another warp accessed, with
        nothing between that orders them; notes that they do.   does: "reads" or "writes".
        """
        if self.clocks is None:
            return
        at = np.broadcast_to(at, (int(who.sum()), at.shape[-1]))
        warps = np.flatnonzero(who) // 32
        for note in (False, True):  # warps may write copies of a value in one instruction
            for warp in np.unique(warps):
                self.ordered_for(does, int(warp), at[warps == warp].reshape(-1), note)

    def ordered_for(self, does: str, warp: int, at: np.ndarray, note: bool | None = None) -> None:
        """`ordered` for one warp.   note: only notes, or only checks."""
        clocks = self.clocks
        if clocks is None:
            return
        if note is not False:
            log = clocks.wrote if does == "writes" else clocks.read
            log[warp, at] = clocks.now[warp, warp]
        if note:
            return
        for did, log in (("wrote", clocks.wrote), ("reads", clocks.read)):
            if (did == "wrote" or does == "writes") and clocks.unknown(log, warp, at):
                self.memory.fail(
                    "race",
                    f"{does} shared memory that another warp or a copy {did}, with no barrier "
                    "between that both have passed",
                )

    def visible(self, threads: np.ndarray) -> np.ndarray:
        """[1, bytes]: whose writes these threads know, all of them. (-1: several threads wrote
        copies of one value.)
        """
        if self.clocks is None:
            known = (self.written == 0) | np.isin(self.written, threads + 1)
            return known | (self.written == -1) if len(threads) == self.n else known
        known = self.clocks.now[np.unique(threads // 32)].max(0)
        visible, at = ~self.unfenced, np.flatnonzero(self.unfenced[0])  # the rest is not asked for
        visible[0, at] = (self.clocks.wrote[:, at] <= known[:, None]).all(0)
        return visible

    def told(self, thread: int) -> np.ndarray | None:
        """What a thread's arrival tells."""
        return None if self.clocks is None else self.clocks.told(thread // 32)

    def arrive(self, barrier: dict, known: np.ndarray | None) -> None:
        """One arrival of an mbarrier's phase, of one who knows this."""
        barrier["missing"] -= 1
        if barrier["missing"] < 0:
            raise Fault("barrier", "more arrive than were said to")
        if known is not None:
            barrier["known"] = np.maximum(barrier["known"], known)

    def passed(self, barrier: dict, thread: int) -> None:
        """A thread has waited for a phase of an mbarrier."""
        if self.clocks is not None:
            self.clocks.learn(thread // 32, barrier["told"])

    # ---- barriers of threads

    def stand(self, args: list[str], who: np.ndarray) -> None:
        """bar.sync id, threads: all threads of the block, unless it says how many."""
        self.waits[who] = 1
        self.at_bar[who] = int(args[0])
        self.bar_size[who] = int(args[1]) if len(args) > 1 else self.k.threads

    def free(self, b: int) -> bool:
        """Lets threads go on that a barrier of this block waited for; whether there were any."""
        moved = False
        standing = (self.waits == 1) & (self.block == b)
        for number in np.unique(self.at_bar[standing]):
            here = standing & (self.at_bar == number)
            sizes = np.unique(self.bar_size[here])
            if len(sizes) > 1:
                raise Fault("barrier", f"threads expect {sizes.tolist()} threads at one barrier")
            if here.sum() > sizes[0]:
                raise Fault("barrier", f"{here.sum()} threads at a barrier of {sizes[0]}")
            if here.sum() == sizes[0]:
                self.waits[here] = 0
                self.together(b, here)
                moved = True
        return moved

    def together(self, b: int, here: np.ndarray) -> None:
        """These threads of a block have synchronized."""
        if self.clocks is None:
            self.meet(b)
            return
        threads = np.flatnonzero(here)
        self.clocks.meet(np.unique(threads // 32))
        for entries in (self.written, self.read):
            mine = (entries > threads[0]) & (entries <= threads[-1] + 1)
            entries[mine] = 0
        if len(threads) == self.k.threads:
            self.meet(b)

    # ---- registers

    def set_registers(self, op: list[str], args: list[str], who: np.ndarray, text: str) -> None:
        """setmaxnreg: a warp gives registers back, or waits until there are as many as it wants."""
        if self.clocks is None:
            raise KeyError(f"{text} in a cluster of blocks")
        self.whole_warps(who, text)
        count = int(args[0])
        if count % 8 or not 24 <= count <= 256:
            raise Fault("barrier", f"{count} registers: a multiple of 8, 24 to 256")
        for warp in np.unique(np.flatnonzero(who) // 32):
            less = count < self.registers[warp]
            if count != self.registers[warp] and less != (op[1] == "dec"):
                raise Fault("barrier", f"{op[1]} from {self.registers[warp]} to {count} registers")
            if less:
                self.registers[warp] = count
            else:
                self.wanted[warp] = count
                self.waits[32 * warp : 32 * warp + 32] = REGISTERS

    def hand_out(self) -> bool:
        """Gives warps the registers that they wait for; whether it gave any."""
        moved = False
        for warp in np.flatnonzero(self.waits[::32] == REGISTERS):
            more = self.wanted[warp] - self.registers[warp]
            if self.registers.sum() + more <= self.pool:
                self.registers[warp] = self.wanted[warp]
                self.waits[32 * warp : 32 * warp + 32] = 0
                moved = True
        return moved
