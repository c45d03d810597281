"""Counts the bytes of storages that a training step holds, without allocating them.

Within a `Tracker`, floating-point tensors are FakeTensors: shapes, dtypes and lifetimes of every
operator's results without values. Tensors of integers (ids, positions, boundaries) are real, since
the host reads them.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from tilewright.core.library import LAUNCHERS
from tilewright.core.torch_names import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    active_fake_mode,
    messages_kept,
    pytree,
)
from tilewright.nn.sharded import shard

log = logging.getLogger("tilewright")
# Code that allocates buffers of communication: FSDP2's gathered parameters and their gradients
# before they are scattered, the hidden states that stages receive, and rows and heads that ranks
# exchange.
COMMUNICATION = (
    "torch/distributed/fsdp/",
    "torch/distributed/pipelining/_utils",
    "torch/distributed/_functional_collectives",
    "tilewright/ops/moe/expert_transport",
    "tilewright/ops/attention/ulysses",
    "tilewright/ops/attention/ring",
)


@functools.cache
def _communicates(file: str) -> bool:
    return any(part in file for part in COMMUNICATION)


class Event(NamedTuple):
    """A change of a storage's size. key: of the storage; change: in bytes; owner: what the storage
    is for, as far as is known when it is allocated.
    """

    key: int
    change: int
    owner: str


class Tracker(TorchDispatchMode):
    """Logs every allocation and release of a storage.

    phase: the owner of what is allocated from now on, unless it is a communication buffer.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.fake = device, FakeTensorMode(allow_non_fake_inputs=True)
        self.events: list[Event] = []
        self.phase = "other"
        self._held: dict[int, tuple[weakref.ref, int, str]] = {}  # by key: storage, bytes, owner
        self._keys: dict[int, int] = {}  # a storage's address to its key
        self._next = 0

    @contextmanager
    def watching(self) -> Iterator[Tracker]:
        """Counts within the block; FSDP2 frees gathered parameters by resizing their storages."""
        resize: Any = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            self._note(storage)
            return result

        replaced: Any = counted
        torch.UntypedStorage.resize_ = replaced
        try:
            with messages_kept(), self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize

    @contextmanager
    def owned_by(self, owner: str) -> Iterator[None]:
        self.phase, before = owner, self.phase
        try:
            yield
        finally:
            self.phase = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls again with this rank's tensors
        if active_fake_mode() is not None:  # DTensor infers the shapes of whole tensors
            return func(*args, **kwargs)
        given = [t for t in pytree.arg_tree_leaves(*args, **kwargs) if torch.is_tensor(t)]
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(given[0], FakeTensor):
            return _value(given[0].dtype)
        result = self._call(func, given, args, kwargs)
        for t in pytree.tree_leaves(result):
            if torch.is_tensor(t) and t.device.type == self.device.type:
                self._note(t.untyped_storage())
        return result

    def _call(self, func, given, args, kwargs):
        if any(isinstance(t, FakeTensor) for t in given):
            if launch := LAUNCHERS.get(func.name()):
                self._launch(launch, args)
            elif not func._schema.returns:
                return None  # it writes into what it is given
            with self.fake:
                return func(*args, **kwargs)
        if all(t.is_meta for t in given):
            device = torch.device(kwargs.get("device") or (given[0].device if given else "cpu"))
            dtype = kwargs.get("dtype") or (given[0].dtype if given else _default(args))
            if device.type != "meta" and dtype.is_floating_point:
                if given:  # empty_like: the mode must not hold a parameter that is to be replaced
                    func, args = torch.ops.aten.empty.memory_format, (list(given[0].shape),)
                    kwargs = {"dtype": dtype, "device": device}
                with self.fake:
                    return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _launch(self, launch, args) -> None:
        """Counts what an operator allocates beside its results, where it is made of others. A
        kernel's launcher needs values, and allocates nothing after it has asked for them.
        """
        try:
            with self:
                launch(*args)
        except Exception as error:
            log.debug("a launcher reads values: %s", error)

    def _note(self, storage: torch.UntypedStorage) -> None:
        """Logs a storage that is new or has changed its size."""
        address, size = storage._cdata, storage.nbytes()
        key = self._keys.get(address)
        if key is None:
            key = self._keys[address] = self._next
            self._next += 1
            gone = weakref.ref(storage, lambda _: self._forget(key, address))
            before, owner = 0, self._owner()
        else:
            gone, before, owner = self._held[key]
        self._held[key] = (gone, size, owner)
        if size != before:
            self.events.append(Event(key, size - before, owner))

    def _forget(self, key: int, address: int) -> None:
        _, size, owner = self._held.pop(key)
        self._keys.pop(address)
        self.events.append(Event(key, -size, owner))

    def _owner(self) -> str:
        frame = sys._getframe(3)
        while frame is not None:
            if _communicates(frame.f_code.co_filename):
                return "communication"
            frame = frame.f_back
        return self.phase

    # ---- what was counted

    def own(self, owner: str, tensors: list[torch.Tensor]) -> dict[int, str]:
        """The keys of these tensors' storages, as a part of `peak`'s argument."""
        keys = (self._keys.get(shard(t).untyped_storage()._cdata) for t in tensors)
        return {key: owner for key in keys if key is not None}

    def live(self) -> Counter[str]:
        """Bytes now, by owner."""
        sizes: Counter[str] = Counter()
        for _, size, owner in self._held.values():
            sizes[owner] += size
        return sizes

    def peak(self, owners: dict[int, str]) -> tuple[Counter[str], Counter[str]]:
        """Bytes by owner when their sum is largest, and each owner's own most.

        owners: by key, instead of those that were known at first.
        """
        sizes: Counter[str] = Counter()
        best, own, total, most = Counter[str](), Counter[str](), 0, 0
        for event in self.events:
            owner = owners.get(event.key, event.owner)
            sizes[owner] += event.change
            own[owner] = max(own[owner], sizes[owner])
            total += event.change
            if total > most:
                best, most = sizes.copy(), total
        return +best, own


def _value(dtype: torch.dtype) -> Any:
    """What the host reads of a value that is not there: no check fails."""
    return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


def _default(args: tuple) -> torch.dtype:
    """The dtype of a new tensor without one: of numbers given (arange, full), or the default."""
    numbers = [a for a in args if isinstance(a, int | float) and not isinstance(a, bool)]
    if numbers and all(isinstance(a, int) for a in numbers):
        return torch.int64
    return torch.get_default_dtype()
