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
                "race", "writes what wgmma may still be reading, without a wait_group between"
            )
        self.unfenced[places] = True
        for before in (self.written[places], self.read[places]):
            if self.of_others(before, thread).any():
                self.memory.fail(
                    "race",
                    "writes shared memory that another thread wrote or read, without a barrier between",
                )
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
        if self.written[place] not in (0, thread + 1):
            self.memory.fail("race", "another thread made the mbarrier, without a barrier between")
        return self.barriers[place]

    def turn(self, barrier):
        """Completes a phase if all arrivals and bytes are in."""
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
                    raise Fault("barrier", "copies are on their way")
                del self.barriers[int(self.block[thread]), int(self.address(args[0])[thread])]
        elif op[1:3] == ["arrive", "expect_tx"]:
            for thread in threads:
                barrier = self.barrier(args[1], thread, text)
                barrier["bytes"] += int(self.get(args[2], 32)[thread])
                barrier["missing"] -= 1
                if barrier["missing"] < 0:
                    raise Fault("barrier", "more arrive than were said to")
                self.turn(barrier)
        elif op[1:3] == ["try_wait", "parity"]:
            parity = self.get(args[2], 32) & 1
            for thread in threads:
                barrier = self.barrier(args[1], thread, text)
                for places, raw in barrier["copies"]:  # copies in flight land as late as possible
                    self.shared[places] = raw
                    self.flying[places] = False
                    barrier["bytes"] -= len(raw)
                if barrier["copies"]:
                    barrier["copies"] = []
                    self.turn(barrier)
                if barrier["phase"] % 2 == parity[thread]:  # retried when the others cannot proceed
                    self.waits[thread], self.pc[thread] = 3, pc
                    self.awaited[thread] = barrier, parity[thread]
            self.put(args[0], np.ones(self.n, bool), who & (self.waits == 0))
        else:
            raise KeyError(text)

    def bulk_copy(self, op, args, who, text):
        """cp.async.bulk.tensor: a box into shared memory; visible once a thread has waited at the
        mbarrier.
        """
        if op[5:] != ["shared::cta", "global", "mbarrier::complete_tx::bytes"]:
            raise KeyError(text)
        to, source, barrier = args
        found = re.match(r"\[(\S+?),\{(.*)\}\]", source.replace(" ", ""))
        if found is None:
            raise KeyError(text)
        source = found[1]
        corner = [self.get(c, 32).view(np.int32) for c in found[2].split(",")]
        for thread in np.flatnonzero(who):
            described = self.values[
                self.k.parameters[int(self.get(source, 64)[thread]) // 4096 - 1]
            ]
            each, inside = described.places(
                [int(c[thread]) for c in reversed(corner)]
            )  # innermost first
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
            start = int(self.address(to)[thread])
            if start % 128:
                raise Fault("alignment", "address not a multiple of 128")
            at = swizzled(start + np.arange(len(raw)), described.swizzle)
            if at.max() >= self.k.shared_size:
                raise Fault("bounds", "outside shared memory")
            places = np.full(len(at), self.block[thread]), at
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
            self.flying[places] = True
            self.unfenced[places] = False
            self.barrier(barrier, thread, text)["copies"].append((places, raw))
