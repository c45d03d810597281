"""Checked memory of a launch: every access must be inside a tensor and aligned."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import torch

from tilewright_lab.emulator.faults import Fault

WINDOW = 1 << 20  # shared::cluster addresses: block r's shared memory is at (r + 1) * WINDOW
U = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
I = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}

SEVERAL = -1  # threads of several blocks


def synchronized(block):
    """The owner of a byte that a block accessed before its last barrier."""
    return -2 - 2 * block


def shared_in(block):
    """The owner of a byte that several threads of a block accessed since its last barrier."""
    return -3 - 2 * block


class Memory:
    """Global memory: tensors at 256-byte boundaries, with nothing readable between them. `shift`
    bytes precede each, to misalign it.

    Tensors of one storage share memory if they are given here.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()):
        self.data = np.zeros(4096, np.uint8)
        self.inside = np.zeros(4096, bool)
        self.written = np.zeros(4096, np.uint8)
        self.read = np.zeros(4096, bool)
        self.unset = np.zeros(4096, bool)  # allocated, and never written since
        self.atomic = np.zeros(4096, bool)  # all accesses of this launch were atomic
        # Who wrote a byte in this launch, and who read it: thread + 1, or one of the above.
        self.writer = np.zeros(4096, np.int32)
        self.reader = np.zeros(4096, np.int32)
        self.tensors: list[tuple[torch.Tensor, int]] = []
        self.names: dict[int, str] = {}  # by address
        self.notes: dict[object, Fault] = {}  # what did not end the launch
        self.tolerated: frozenset[str] = frozenset()  # kinds that end none
        self.passed: list[Fault] = []  # of such kinds, for which the cluster has no place yet
        # By block: where its atomics release, and where they acquire.
        self.released: dict[int, set[int]] = {}
        self.acquired: dict[int, set[int]] = {}
        self._spans: dict[int, tuple[int, int]] = {}  # by storage: first and last + 1 byte
        self._placed: dict[int, int] = {}  # by storage: the address of that first byte
        for t in tensors:
            if t.numel():
                key = t.untyped_storage().data_ptr()
                first, last = self._spans.get(key, (1 << 62, 0))
                end = t.data_ptr() + span(t) * t.element_size()
                self._spans[key] = min(first, t.data_ptr()), max(last, end)

    def fail(self, kind: str, what: str) -> None:
        """Raises a fault; keeps it if its kind ends no launch."""
        fault = Fault(kind, what)
        if kind not in self.tolerated:
            raise fault
        self.passed.append(fault)

    def put(self, t: torch.Tensor | None, shift: int = 0, name: str = "", unset=None) -> int:
        """Returns its address. All memory between its elements is copied, so strides stay valid;
        only t's elements are readable.

        unset: (first byte, one past the last) of memory -> which bytes nothing has written.
        """
        if t is None:
            return 0
        for known, address in self.tensors:
            if known.data_ptr() == t.data_ptr() and known.numel() and known.shape == t.shape:
                return address
        size = t.element_size()
        key = t.untyped_storage().data_ptr() if t.numel() else 0
        if key in self._placed:
            start = self._placed[key] + t.data_ptr() - self._spans[key][0]
        else:
            first, last = self._spans.get(key, (t.data_ptr(), t.data_ptr() + span(t) * size))
            place = self._grow(last - first, (shift - (t.data_ptr() - first)) % 16)
            start = place + t.data_ptr() - first
            if t.numel():
                self.data[place : place + last - first] = bytes_at(first, last)
                if unset is not None and (unwritten := unset(first, last)) is not None:
                    self.unset[place : place + last - first] = unwritten
                if key in self._spans:
                    self._placed[key] = place
        if t.numel():
            held = np.zeros(span(t), bool)
            np.lib.stride_tricks.as_strided(held, tuple(t.shape), t.stride())[...] = True
            self.inside[start : start + span(t) * size] |= np.repeat(held, size)
        self.tensors.append((t, start))
        self.names[start] = self.names.get(start, name)
        return start

    def _grow(self, size: int, shift: int) -> int:
        """Adds so many bytes; returns the address of the first."""
        start = -(-len(self.data) // 256) * 256 + shift
        for name, fill in (
            ("data", 0xFF),
            ("inside", 0),
            ("written", 0),
            ("read", 0),
            ("unset", 0),
            ("atomic", 0),
            ("writer", 0),
            ("reader", 0),
        ):
            old = getattr(self, name)
            new = np.full(start + size + 512, fill, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
        return start

    def take_back(self) -> None:
        """Copies the kernel's output into the tensors."""
        for t, start in self.tensors:
            size = span(t) * t.element_size()
            written = self.written[start : start + size] != 0
            if written.any():
                bytes_at(t.data_ptr(), t.data_ptr() + size)[written] = self.data[
                    start : start + size
                ][written]

    def times(self, t: torch.Tensor, which: str) -> torch.Tensor:
        """How often each element was written, or whether it was read."""
        start = next(a for known, a in self.tensors if known is t)
        raw = getattr(self, which)[start : start + span(t) * t.element_size() : t.element_size()]
        return torch.as_strided(torch.from_numpy(raw.astype(np.uint8)), t.shape, t.stride())

    # ---- in words

    def nearest(self, address: int) -> str:
        """Where an address outside every tensor is, from the tensor that it is closest to."""
        candidates = []
        for t, start in self.tensors:
            end = start + span(t) * t.element_size()
            distance = max(start - address, address - end + 1, 0)
            candidates.append((distance, start, end, t))
        if not candidates:
            return f"address {address:#x}, of no tensor"
        distance, start, end, t = min(candidates, key=lambda f: f[:2])
        name = f"{self.names[start] or 'a tensor'} {list(t.shape)}"
        if distance > 1 << 30:
            return f"address {address:#x}, far from every tensor"
        if address < start:
            return f"{start - address} bytes before {name}"
        if address >= end:
            past = f"{address - end} bytes" if address > end else "just"
            return f"{past} past the end of {name}"
        return f"between the elements of {name} with strides {list(t.stride())}"

    def element(self, address: int) -> str:
        """The element that a byte belongs to."""
        for t, start in self.tensors:
            at, size = address - start, t.element_size()
            if 0 <= at < span(t) * size:
                number = torch.arange(t.numel()).view(t.shape)
                held = torch.full((span(t),), -1)
                torch.as_strided(held, t.shape, t.stride())[...] = number
                if (flat := int(held[at // size])) >= 0:
                    index = torch.unravel_index(torch.tensor(flat), t.shape)
                    return f"{self.names[start] or 'a tensor'}[{', '.join(str(int(i)) for i in index)}]"
        return self.nearest(address)

    # ---- races

    def check_read(self, places, me, block, threads):
        """Fails if one of these threads may not read these bytes; notes that they do.

        me: [threads, 1], the thread + 1 of the launch; block: its block; threads: threads a block.
        """
        self._check(self.writer, "reads", "writes", places, me, block, threads)
        self.read[places] = True
        self.atomic[places] = False
        join(self.reader, places, me, block, threads)

    def join_writers(self, places, me, block, threads):
        """These threads write bytes that others may write too."""
        join(self.writer, places, me, block, threads)

    def check_write(self, places, raw, me, block, threads, excused=None):
        """Fails if one of these threads may not write these bytes; writes them.

        excused: which bytes threads may write that others of their block read.
        """
        self._check(self.reader, "writes", "reads", places, me, block, threads, excused=excused)
        self._check(
            self.writer, "writes", "writes another value to", places, me, block, threads, raw
        )
        np.add.at(self.written, places, 1)
        self.atomic[places] = False
        self.writer[places] = me
        self.data[places] = raw
        self.unset[places] = False

    def check_atomic(self, places, me, block, threads):
        """Fails if another thread accesses these bytes, but not atomically."""
        self._check(self.reader, "changes", "reads", places, me, block, threads)
        self._check(self.writer, "changes", "writes", places, me, block, threads)

    def _check(self, owners, does, did, places, me, block, threads, raw=None, excused=None):
        """Threads conflict with those of another block, and with those of another warp since their
        last barrier; lanes of a warp run together.
        """
        owner = owners[places]
        if not owner.any():
            return
        warps = -(-threads // 32)
        warp = np.where(
            owner > 0,
            owning_block(owner, threads) * warps + (owner - 1) % threads // 32,
            -1,
        )
        mine = block * warps + (me - 1) % threads // 32
        wrong = (owner != 0) & (warp != mine) & (owner != synchronized(block))
        if raw is not None:
            wrong &= self.data[places] != raw
        if excused is not None and wrong.any():
            row, column = np.nonzero(wrong & (owning_block(owner, threads) == block))
            if len(row):
                wrong[row, column] = ~excused(places[row, column], me[row, 0])
        for i, j in zip(*np.nonzero(wrong), strict=True):
            other, own = int(owning_block(owner[i, j], threads)), int(block[i, 0])
            # An atomic of the other block released what one of this block acquired. Which blocks
            # added to an element is not kept.
            acquired = self.acquired.get(own, set())
            if other != own and (
                self.released.get(other, set()) & acquired
                or (acquired and self.atomic[places[i, j]])
            ):
                continue
            who = "another thread of the program" if other == own else f"block {other} of the grid"
            did = did if other >= 0 else did.replace("s", "", 1)
            self.fail(
                "race",
                f"{does} {self.element(int(places[i, j]))}, which "
                f"{who if other >= 0 else 'several blocks'} {did} in this launch, with nothing "
                "between that orders them",
            )
            return

    def barrier(self, block, places, threads):
        """A block's threads have synchronized, after they accessed these bytes."""
        for owners in (self.reader, self.writer):
            owner = owners[places]
            mine = (owner == shared_in(block)) | (
                (owner > 0) & (owning_block(owner, threads) == block)
            )
            owners[places[mine]] = synchronized(block)


def join(owners, places, me, block, threads):
    """These threads are among the owners of these bytes."""
    before = owners[places]
    other = (before > 0) & (before != me)
    joined = np.where(other | (before == shared_in(block)), shared_in(block), me)
    foreign = (before != 0) & (owning_block(before, threads) != block)
    owners[places] = np.where(foreign, SEVERAL, joined)
    now = owners[places]
    if (again := (now > 0) & (now != me)).any():  # two threads of this instruction
        owners[places[again]] = shared_in(np.broadcast_to(block, again.shape)[again])


def owning_block(owner, threads):
    """The block of an owner; -1 for none and for several."""
    return np.where(owner > 0, (owner - 1) // threads, (-owner - 2) // 2)


def span(t: torch.Tensor) -> int:
    """Elements from a tensor's first to its last in memory."""
    return (
        1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    )


def bytes_at(first: int, last: int) -> np.ndarray:
    """The process's memory from address `first` to `last`."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * (last - first)).from_address(first))
