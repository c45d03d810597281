"""Counts the memory that a computation would allocate, without allocating it.

Tensors are fake: they have shapes, dtypes and storages without bytes. Small tensors that determine
control flow (routing, offsets, targets) are computed as well, so that `tolist` and `item` return
their values.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

SMALL = {
    True: 2**22,
    False: 2**23,
}  # largest tensors whose values are computed: floating point, or not
LOOKS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
)
ARITHMETIC = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
)  # too slow to repeat, and never read on the host


class Footprint(TorchDispatchMode):
    """now, peak: bytes of the fake storages alive, and their maximum; temporaries inside an
    operator are not counted. Reading a floating-point number from a tensor without values gives 1,
    as `contract.error` needs.
    """

    def __init__(self, mode: FakeTensorMode):
        super().__init__()
        self._mode = mode
        self.now = self.peak = 0
        self.small = dict(SMALL)
        self._sizes: dict[int, int] = {}
        self._values: dict[int, torch.Tensor] = {}

    def restart(self) -> None:
        """Counts the peak from here on. New floating-point tensors have no known values: none
        affects control flow.
        """
        self.peak = self.now
        self.small[True] = 0

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._values.get(id(tensor)) if isinstance(tensor, FakeTensor) else tensor

    def _remember(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if id(tensor) not in self._values:
            weakref.finalize(tensor, self._values.pop, id(tensor), None)
        self._values[id(tensor)] = value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        flat = not kwargs and not any(isinstance(a, list | tuple | dict) for a in args)
        leaves = args if flat else tree_leaves((args, kwargs))
        known = func.overloadpacket.__name__ not in ARITHMETIC and all(
            self._value(t) is not None for t in leaves if isinstance(t, torch.Tensor)
        )

        def computed():
            if flat:
                values = [self._value(a) if isinstance(a, torch.Tensor) else a for a in args]
                with _disable_current_modes():
                    return func(*values)
            with _disable_current_modes():
                return func(
                    *tree_map_only(torch.Tensor, self._value, args),
                    **tree_map_only(torch.Tensor, self._value, kwargs),
                )

        if func in LOOKS:  # reads of values, which control flow depends on
            if (
                not known
                and func is torch.ops.aten._local_scalar_dense.default
                and args[0].is_floating_point()
            ):
                return 1.0
            if known:
                found = computed()
                return found if not isinstance(found, torch.Tensor) else self._new(found)
        if known and torch.Tag.pointwise in func.tags and not func._schema.is_mutable:
            value = computed()
            if value.numel() <= self.small[value.is_floating_point()]:
                return self._new(value)  # no operator on fakes, which is slow
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        for t in made:
            self._hold(t)
        if known and all(t.numel() <= self.small[t.is_floating_point()] for t in made):
            for fake, value in zip(
                made, filter(torch.is_tensor, tree_leaves(computed())), strict=True
            ):
                self._remember(fake, value)
        else:  # an overwritten tensor's values are unknown
            for i, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for t in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                        self._values.pop(id(t), None)
        return out

    def _new(self, value: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():  # what torch.empty makes in the mode, in a tenth of the time
            meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
            fake = FakeTensor(self._mode, meta, value.device)
        self._hold(fake)
        self._remember(fake, value)
        return fake


@contextlib.contextmanager
def counting() -> Iterator[Footprint]:
    """Inside the block every new tensor is fake, and counted."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, Footprint(mode) as found:
        yield found
