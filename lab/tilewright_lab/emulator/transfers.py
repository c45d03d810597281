"""Loads, stores, copies and barriers of a cluster."""

from __future__ import annotations

import re

import numpy as np

from tilewright_lab.emulator.faults import Fault
from tilewright_lab.emulator.memory import SEVERAL, owning_block, shared_in
from tilewright_lab.emulator.part import Part
from tilewright_lab.emulator.tma import swizzled


def alike(one, other):
    """Whether bytes hold numbers that differ by rounding: copies of one sum, which the compiler
    let threads add in different orders.
    """
    if one.shape[1] % 4 == 0:
        a, b = (np.ascontiguousarray(v).view(np.float32).astype(np.float64) for v in (one, other))
        size = np.abs(np.stack((a, b)))
        if np.isfinite(size).all() and (np.abs(a - b) <= 1e-4 * size.max()).all():
            return bool(size.max() > 1e-30)
    if one.shape[1] % 2:
        return False
    a, b = (np.ascontiguousarray(v).view(np.uint16).astype(np.int64) for v in (one, other))
    return bool((np.abs(a - b) <= 1).all())


class Transfers(Part):
    def own(self, address, size, who):
        """Indices of bytes of the threads' own memory."""
        at = address[who][:, None] + np.arange(size)
        if (at < 0).any() or (at >= self.k.local_size).any():
            raise Fault("bounds", "outside the thread's local memory")
        return np.flatnonzero(who)[:, None], at

    def load(self, space, address, size, who, name):
        if space == "local":
            return self.local[self.own(address, size, who)]
        places = self.places(space, address, size, who, name)
        if self.counts and space == "global":
            self.count("read", address[who], np.flatnonzero(who), size)
        elif self.counts and not name.startswith("ldmatrix"):
            self.counts.shared(address[who], size, np.flatnonzero(who))
        if space == "global":
            me, m = self.everywhere[who][:, None], self.memory
            m.check_read(places, me, self.blocks[who][:, None], self.k.threads)
            self.note_access(places, who)
            self.note_read(places, me)
            if m.unset[places].any():
                at = int(places[m.unset[places]][0])
                self.note("uninitialized", f"reads {m.element(at)}, which nothing has written")
            return m.data[places]
        if self.flying[places].any():
            self.memory.fail(
                "race", "reads what cp.async may still be writing, without a wait_group between"
            )
        thread = np.broadcast_to((np.flatnonzero(who) + 1)[:, None], places[1].shape)
        if self.of_others(self.written[places], thread).any():
            self.memory.fail(
                "race", "reads shared memory that another thread wrote, without a barrier between"
            )
        self.ordered("reads", who, places[1])
        self.read[places] = np.where(self.of_others(self.read[places], thread), -1, thread)
        again = self.read[places] != thread  # two lanes of this instruction
        if again.any():
            block, each = (np.broadcast_to(p, again.shape)[again] for p in places)
            self.read[block, each] = -1
        return self.shared[places]

    def store(self, space, address, raw, who, name):
        if space == "local":
            self.local[self.own(address, raw.shape[1], who)] = raw
            return
        places = self.places(space, address, raw.shape[1], who, name)
        if self.counts and space == "global":
            self.count("written", address[who], np.flatnonzero(who), raw.shape[1])
        elif self.counts and not name.startswith("stmatrix"):
            self.counts.shared(address[who], raw.shape[1], np.flatnonzero(who))
        if space == "global":
            me, block = self.everywhere[who][:, None], self.blocks[who][:, None]
            self.memory.check_write(places, raw, me, block, self.k.threads, self.replicated)
            now = self.memory.data[places]
            if (wrong := now != raw).any():
                self.differ(self.memory.element(int(places[wrong][0])), now, raw)
            self.note_access(places, who)
        else:
            self.claim(places, raw, who, name)
            self.shared[places] = raw

    def differ(self, where, one, other):
        """Two threads of an instruction write different values to one place."""
        if alike(one, other):
            what = f"two threads write values that differ by rounding to {where}"
            return self.memory.fail("replicas", what)
        return self.memory.fail("race", f"two threads write different values to {where} at once")

    def claim(self, places, raw, who, name):
        """Checks that these threads may write this to shared memory, exclusively until a barrier.
        Threads with copies of one value may all write it.
        """
        thread = (np.flatnonzero(who) + 1)[:, None]
        if self.flying[places].any():
            self.memory.fail("race", "writes where cp.async may still be writing")
        if self.pinned[places].any():
            self.memory.fail(
                "race", "writes what tensor cores may still be reading, without a wait between"
            )
        self.unfenced[places] = True
        for before in (self.written[places], self.read[places]):
            if self.of_others(before, thread).any():
                self.memory.fail(
                    "race",
                    "writes shared memory that another thread wrote or read, without a barrier between",
                )
        self.ordered("writes", who, places[1])
        self.written[places] = np.broadcast_to(thread, before.shape)
        if (again := self.written[places] != thread).any():
            trial = np.zeros_like(self.shared)
            trial[places] = raw
            if (trial[places] != raw).any():
                self.differ("one place of shared memory", trial[places], raw)
            block, each = (np.broadcast_to(p, again.shape)[again] for p in places)
            self.written[block, each] = -1

    def copy(self, op, args, who, text):
        """cp.async: its data is in shared memory once the thread has waited for the group it was
        committed in.
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
                # Visible to others after a barrier.
                self.written[landed] = (threads[here] + 1)[:, None]
                if here.any():
                    done = np.zeros(self.n, bool)
                    done[threads[here]] = True
                    self.ordered("writes", done, landed[1])
                if not here.all():
                    self.copies.append(
                        (threads[~here], group[~here], (block[~here], each[~here]), raw[~here])
                    )
            return
        size = int(args[2], 0)
        given = self.get(args[3], 32) if len(args) > 3 else np.full(self.n, size)
        if not np.isin(given[who], (0, size)).all():
            raise Fault("barrier", "copies a part")
        threads = np.flatnonzero(who)
        raw, full = (
            np.zeros((len(threads), size), np.uint8),
            who & (given == size),
        )  # the rest is zero-filled
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
        """The mbarrier named by a thread, whose init must be visible to it."""
        place = int(self.block[thread]), int(self.address(operand)[thread])
        if place not in self.barriers:
            raise Fault("barrier", "no mbarrier there")
        made = self.written[place]
        if self.clocks is not None:
            unknown = self.clocks.unknown(self.clocks.wrote, thread // 32, np.array([place[1]]))
        else:
            unknown = made not in (0, thread + 1)
        if unknown:
            self.memory.fail("race", "another thread made the mbarrier, without a barrier between")
        return self.barriers[place]

    def turn(self, barrier):
        """Completes a phase if all arrivals and bytes are in."""
        if barrier["missing"] == 0 and barrier["bytes"] == 0:
            barrier["phase"] += 1
            barrier["missing"] = barrier["count"]
            barrier["told"] = barrier["known"]

    def land(self, barrier, parity):
        """Copies in flight land as late as possible: when somebody waits for them. So does what
        tensor cores do, if it is this phase that is waited for.
        """
        copies, barrier["copies"] = barrier["copies"], []
        for places, raw in copies:
            self.shared[places] = raw
            self.flying[places] = False
            barrier["bytes"] -= len(raw)
            if self.clocks is not None:
                known = self.clocks.landed(places[1])
                barrier["known"] = np.maximum(barrier["known"], known)
        if copies:
            self.turn(barrier)
        while barrier["commits"] and barrier["phase"] % 2 == parity:
            self.finish(barrier)

    def mbarrier(self, op, args, who, text, pc):
        threads = np.flatnonzero(who).tolist()
        if op[1] == "init":
            units = self.clocks.units if self.clocks is not None else 0
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
                    "commits": [],  # of tcgen05
                    # What those knew who arrived, until now and in the phases that are complete.
                    "known": np.zeros(units, np.int32),
                    "told": np.zeros(units, np.int32),
                }
        elif op[1] == "inval":
            for thread in threads:
                barrier = self.barrier(args[0], thread, text)
                if barrier["copies"] or barrier["commits"]:
                    raise Fault("barrier", "copies or products are on their way")
                del self.barriers[int(self.block[thread]), int(self.address(args[0])[thread])]
        elif op[1:3] == ["arrive", "expect_tx"]:
            for thread in threads:
                barrier = self.barrier(args[1], thread, text)
                barrier["bytes"] += int(self.get(args[2], 32)[thread])
                self.arrive(barrier, self.told(thread))
                self.turn(barrier)
        elif op[1] == "arrive" and op[2].startswith("shared") and args[0] == "_":
            for thread in threads:
                barrier = self.barrier(args[1], thread, text)
                for _ in range(int(args[2]) if len(args) > 2 else 1):
                    self.arrive(barrier, self.told(thread))
                self.turn(barrier)
        elif op[1:3] == ["try_wait", "parity"]:
            parity = self.get(args[2], 32) & 1
            for thread in threads:
                barrier = self.barrier(args[1], thread, text)
                self.land(barrier, parity[thread])
                if barrier["phase"] % 2 == parity[thread]:  # retried when the others cannot proceed
                    self.waits[thread], self.pc[thread] = 3, pc
                    self.awaited[thread] = barrier, parity[thread]
                else:
                    self.passed(barrier, thread)
            self.put(args[0], np.ones(self.n, bool), who & (self.waits == 0))
        else:
            raise KeyError(text)

    def bulk(self, op, args, who, text):
        if op[3:] == ["commit_group"]:
            for thread in np.flatnonzero(who).tolist():
                for store in self.stores.get(thread, ()):
                    store[0] += 1
        elif op[3] == "wait_group":
            for thread in np.flatnonzero(who).tolist():
                self.stored(thread, int(args[0]))
            self.repin()
        elif op[5:] == ["global", "shared::cta", "bulk_group"]:
            self.bulk_store(args, who, text)
        elif op[1] == "reduce" and op[6:] == ["global", "shared::cta", "add", "bulk_group"]:
            self.bulk_store(args, who, text, adds=True)
        elif op[5] in ("shared::cta", "shared::cluster") and op[6:] == [
            "global",
            "mbarrier::complete_tx::bytes",
        ]:
            self.bulk_load(args, who, text)
        else:
            raise KeyError(text)

    def stored(self, thread, left):
        """A thread has waited until at most `left` groups of its bulk stores read shared memory."""
        pending = self.stores.get(thread, [])
        self.stores[thread] = [s for s in pending if s[0] <= left]
        for group, places in pending:
            if group > left:
                self.read[places] = thread + 1
                self.ordered_for("reads", thread // 32, places[1])

    def box(self, operand, thread, text):
        """The tensor map of an operand, which names a map and a corner, the addresses of the box's
        bytes in memory order, and which of them are in the tensor.
        """
        matched = re.match(r"\[(\S+?),\{(.*)\}\]", operand.replace(" ", ""))
        if matched is None:
            raise KeyError(text)
        corner = [int(self.get(c, 32).view(np.int32)[thread]) for c in matched[2].split(",")]
        described = self.values[
            self.k.parameters[int(self.get(matched[1], 64)[thread]) // 4096 - 1]
        ]
        return described, *described.places(corner[::-1])  # innermost first

    def staged(self, operand, thread, count, swizzle):
        """Where a box's bytes are in shared memory."""
        start = int(self.address(operand)[thread])
        if start % 128:
            raise Fault("alignment", "address not a multiple of 128")
        at = swizzled(start + np.arange(count), swizzle)
        if at.max() >= self.k.shared_size:
            raise Fault("bounds", "outside shared memory")
        return np.full(count, self.block[thread]), at

    def bulk_store(self, args, who, text, adds=False):
        """cp.async.bulk.tensor from shared memory, which it may read until its thread waited; or
        cp.reduce.async.bulk.tensor, of float32, each element of which is an atomic operation.
        """
        for thread in np.flatnonzero(who).tolist():
            described, each, inside = self.box(args[0], thread, text)
            places = self.staged(args[1], thread, len(each), described.swizzle)
            if self.flying[places].any():
                self.memory.fail("race", "stores what a copy may still be writing")
            if self.unfenced[places].any():
                self.memory.fail("race", "stores what threads wrote, without a fence between")
            if self.of_others(self.written[places], thread + 1).any():
                self.memory.fail("race", "stores what threads wrote, without a barrier between")
            self.ordered_for("reads", thread // 32, places[1])
            to, m = each[inside], self.memory
            if not m.inside[to].all():
                raise Fault("bounds", f"writes {m.nearest(int(to[~m.inside[to]][0]))}")
            if self.counts:
                self.count("written", to, np.zeros(len(to), np.int64), 1)
            raw = self.shared[places][inside]
            if adds:
                assert described.itemsize == 4, text
                self.check_atomic(to[None], np.arange(self.n) == thread, ())
                m.data[to] = (m.data[to].view(np.float32) + raw.view(np.float32)).view(np.uint8)
            else:
                me, block = self.everywhere[[thread]][:, None], self.blocks[[thread]][:, None]
                m.check_write(to[None], raw[None], me, block, self.k.threads)
                self.accessed[self.block[thread]].append(to)
            self.stores.setdefault(thread, []).append([0, places])
        self.repin()

    def bulk_load(self, args, who, text):
        """cp.async.bulk.tensor: a box into shared memory; visible once a thread has waited at the
        mbarrier.
        """
        to, source, barrier = args
        for thread in np.flatnonzero(who).tolist():
            described, each, inside = self.box(source, thread, text)
            m, raw = self.memory, np.zeros(len(each), np.uint8)
            from_ = each[inside]
            if not m.inside[from_].all():
                at = int(from_[~m.inside[from_]][0])
                raise Fault("bounds", f"reads {m.nearest(at)}")
            if (m.writer[from_] != 0).any():
                self.memory.fail("race", "reads what a thread writes in this launch")
            m.read[from_] = True
            own, before = self.blocks[thread], m.reader[from_]
            foreign = (before != 0) & (owning_block(before, self.k.threads) != own)
            m.reader[from_] = np.where(foreign, SEVERAL, shared_in(own))
            self.accessed[self.block[thread]].append(from_)
            if self.counts:
                self.count("read", from_, np.zeros(len(from_), np.int64), 1)
            raw[inside] = m.data[from_]
            places = self.staged(to, thread, len(raw), described.swizzle)
            # It must be ordered after the threads' accesses by a barrier. (A thread's own writes
            # also need a fence.)
            if self.flying[places].any() or self.pinned[places].any():
                self.memory.fail("race", "writes where others may still be reading or writing")
            for before in (self.written[places], self.read[places]):
                if self.of_others(before, thread + 1).any():
                    self.memory.fail(
                        "race",
                        "writes shared memory that a thread wrote or read, without a barrier between",
                    )
            self.ordered_for("writes", thread // 32, places[1], False)
            self.flying[places] = True
            self.unfenced[places] = False
            self.barrier(barrier, thread, text)["copies"].append((places, raw))
