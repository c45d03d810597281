"""Counts the memory that a computation would allocate, without allocating it.

Tensors are fake: they have shapes, dtypes and storages without bytes. Small tensors that determine
control flow (routing, offsets, targets) are computed as well, so that `tolist` and `item` return
their values. PyTorch's own FakeTensorMode does more than is needed here, at four times the cost.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
import torch._meta_registrations  # shapes of what operators return
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

# Largest tensors whose values are computed: floating point (routers' logits), or not (what is made
# of them; not random bits of all elements, which take seconds).
SMALL = {True: 2**22, False: 2**20}
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


class Fake(torch.Tensor):
    """A tensor of the CPU, as far as its callers see. Its storage is that of a meta tensor; its
    value is None where it is not computed.
    """

    meta: torch.Tensor
    value: torch.Tensor | None
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, meta: torch.Tensor):
        fake = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device="cpu",
        )
        fake.meta, fake.value = meta, None
        return fake

    def tolist(self):  # PyTorch's refuses subclasses
        with _disable_current_modes():
            if self.value is None and self.is_floating_point():
                return torch.ones(self.shape).tolist()  # as a number that is read
            return self.value.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} of a fake tensor outside `counting`")


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Fake):
        return tensor.meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _value(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.value if isinstance(tensor, Fake) else tensor


class Footprint(TorchDispatchMode):
    """now, peak: bytes of the fake storages alive, and their maximum; temporaries inside an
    operator are not counted. Reading a floating-point number from a tensor without values gives 1,
    as `contract.error` needs.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.small = dict(SMALL)
        self._sizes: dict[int, int] = {}

    def restart(self) -> None:
        """Counts the peak from here on. New floating-point tensors have no known values: none
        affects control flow.
        """
        self.peak = self.now
        self.small[True] = 0

    def _hold(self, tensor: Fake) -> None:
        storage = tensor.meta.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        flat = not kwargs and not any(isinstance(a, list | tuple | dict) for a in args)
        leaves = args if flat else tree_leaves((args, kwargs))
        known = func.overloadpacket.__name__ not in ARITHMETIC and all(
            _value(t) is not None for t in leaves if isinstance(t, torch.Tensor)
        )

        def computed():
            if flat:
                values = [_value(a) if isinstance(a, torch.Tensor) else a for a in args]
                with _disable_current_modes():
                    return func(*values)
            with _disable_current_modes():
                return func(
                    *tree_map_only(torch.Tensor, _value, args),
                    **tree_map_only(torch.Tensor, _value, kwargs),
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
        out = self._out(func, args, kwargs, flat)
        made = (
            [out] if isinstance(out, Fake) else [t for t in tree_leaves(out) if torch.is_tensor(t)]
        )
        for t in made:
            self._hold(t)
        if known and all(t.numel() <= self.small[t.is_floating_point()] for t in made):
            for fake, value in zip(
                made, filter(torch.is_tensor, tree_leaves(computed())), strict=True
            ):
                fake.value = value
        else:  # an overwritten tensor's values are unknown
            for i, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for t in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                        if isinstance(t, Fake):
                            t.value = None
        return out

    def _out(self, func, args, kwargs, flat):
        """What the operator returns for fake tensors: of an argument that it overwrites, itself."""
        given = {}

        def meta_of(tensor):
            meta = _meta(tensor)
            given[id(meta)] = tensor if isinstance(tensor, Fake) else Fake(meta)
            return meta

        def fake_of(meta):
            return given[id(meta)] if id(meta) in given else Fake(meta)

        with _disable_current_modes():
            if flat:
                out = func(*(meta_of(a) if isinstance(a, torch.Tensor) else a for a in args))
            else:
                args, kwargs = tree_map_only(torch.Tensor, meta_of, (args, kwargs))
                if "device" in kwargs or not given:
                    kwargs["device"] = "meta"
                out = func(*args, **kwargs)
            if isinstance(out, torch.Tensor):
                return fake_of(out)
            return tree_map_only(torch.Tensor, fake_of, out)

    def _new(self, value: torch.Tensor) -> Fake:
        with _disable_current_modes():
            fake = Fake(torch.empty(value.shape, dtype=value.dtype, device="meta"))
        self._hold(fake)
        fake.value = value
        return fake


@contextlib.contextmanager
def counting() -> Iterator[Footprint]:
    """Inside the block every new tensor is fake, and counted."""
    with Footprint() as found:
        yield found
