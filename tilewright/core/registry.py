"""The registry: operations, their implementations, and which of them can run where.

An `Op` is a public function, its eager twin (the definition) and a tuple of `Implementation`s, best
first. Tests, benchmarks, the compile gate, `tilewright explain` and the trainer all read these
objects; nothing else lists implementation names.

Selection depends only on the requested name, the device, the dtype and, for ops whose
implementations support different options, the options of the call (`request`). It is cached per
key, so a call costs one dictionary look-up.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tilewright.core import platform, torch_names
from tilewright.core.cases import Case, Cost, Goal, Judged
from tilewright.core.installed import Installed, installed

__all__ = [
    "FLOATS",
    "PINS",
    "Case",
    "Cost",
    "DispatchOn",
    "Goal",
    "Implementation",
    "ImplementationUnavailable",
    "Judged",
    "Op",
    "always",
    "anything",
    "in_cpp",
    "in_gluon",
    "in_triton",
    "instead_of",
    "no_kernels",
    "short",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)


class ImplementationUnavailable(RuntimeError):
    """The implementation exists and was requested by name, but cannot run here. The message says
    why.
    """


def always(device_type: str) -> None:
    return None


def anything(request: Any) -> None:
    return None


def nothing(device_type: str, request: Any) -> None:
    return None


def no_kernels() -> tuple:
    return ()


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    name: the value of `implementation=`.
    load: imports its dependencies and returns the callable, which takes the arguments that the
        op's public function passes on.
    missing: device type -> None, or a sentence that says why it cannot run on that device type
        here.
    devices: device types on which `auto` may choose it.
    dtypes: supported dtypes of the op's first tensor.
    batch_invariant: device types on which a row's bits depend on neither the values nor the number
        of the other rows of a call.
    refuses: the request of a call (see `Op.pick`) -> None, or the unsupported option. Only for an
        op whose calls pass a request (see `Op.requests`).
    reads_host: the tag of the cases in which it reads input values on the host, which a CUDA graph
        cannot capture: "host", or "contract" for all; "" for none.
    gate: for compiled GPU kernels, returns the `KernelSpec`s that the compile gate compiles.
    tunables: returns the launches whose configurations `bench tune` searches
        (kernels.tuning.Tunable).
    aliases: further accepted names; nothing lists or returns them.
    rounds_between: rounds to the dtype between steps that the eager twin computes in a wider one.
        It holds its own op's contract, but `auto` does not use it as a part of a composed op.
    does: usable device type -> a sentence on how it computes there, for `tilewright explain`.
    slower_than: (device type, request) -> the name of a later implementation that computes this
        faster, which `auto` takes instead where it is usable; None if there is none.
    """

    name: str
    load: Callable[[], Callable]
    missing: Callable[[str], str | None] = always
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = FLOATS
    batch_invariant: tuple[str, ...] = ()
    refuses: Callable[[Any], str | None] = anything
    reads_host: str = ""
    gate: Callable[[], Any] = no_kernels
    tunables: Callable[[], Any] = no_kernels
    aliases: tuple[str, ...] = ()
    rounds_between: bool = False
    does: Callable[[str], str | None] = always
    slower_than: Callable[[str, Any], str | None] = nothing

    def why_not(
        self, device_type: str, dtype: torch.dtype | None = None, request: Any = None
    ) -> str | None:
        """None if it supports this device type, dtype and request here, else the reason."""
        if reason := self.missing(device_type):
            return reason
        if dtype is not None and dtype not in self.dtypes:
            return f"takes {', '.join(map(short, self.dtypes))}, not {short(dtype)}"
        return None if request is None else self.refuses(request)


def in_triton(
    load: Callable[[], Callable],
    missing: Callable[[str], str | None] = platform.no_triton,
    **options: Any,
) -> Implementation:
    """An implementation in Triton. `auto` chooses it for CUDA tensors; options: further fields."""
    return Implementation("triton", load, missing, **options)


def in_gluon(
    load: Callable[[], Callable],
    computes: str | Callable[[str], str | None],
    capabilities: tuple[int, ...] = (9,),
    **options: Any,
) -> Implementation:
    """An implementation with kernels in Gluon, for CUDA tensors of 16 bits. Triton's kernels
    compute the launches that its configurations do not give to Gluon's.

    computes: what specialized warps compute, for `explain`; or its `does`.
    capabilities: the major ones that its kernels are compiled for.
    options: further fields.
    """

    def missing(device_type: str) -> str | None:
        return platform.no_gluon(device_type, capabilities)

    def does(device_type: str) -> str | None:
        if not isinstance(computes, str):
            return computes(device_type)
        return f"specialized warps compute {computes}; Triton's kernels compute the rest"

    return Implementation("gluon", load, missing, **{"dtypes": HALVES, "does": does, **options})


def in_cpp(load: Callable[[], Callable], **options: Any) -> Implementation:
    """An implementation in C++, for CPU tensors in float32 and bfloat16; options: more fields."""
    dtypes = torch.float32, torch.bfloat16
    return Implementation("cpp", load, platform.no_cpp, ("cpu",), dtypes, **options)


class DispatchOn(NamedTuple):
    """A stand-in for a tensor in `Op.pick`: the device and dtype to dispatch on."""

    device: torch.device
    dtype: torch.dtype = torch.float32


PINS: dict[str, str] = {}
_serials = itertools.count()
# Held while an implementation is loaded, which registers operators, and while an op's list of
# implementations changes: first calls may come from several threads.
_SETUP = threading.RLock()
WATCHERS: list[Callable[[str, str], None]] = []  # see selection.watching


@dataclass(eq=False)
class Op:
    """An operation (see the module's docstring). `public` is the function that users call;
    where it takes groups of arguments, `takes.spread` of it, which takes each.
    """

    name: str
    public: Callable
    eager: Callable
    built_in: tuple[Implementation, ...]
    cases: tuple[Case, ...] = ()
    # Absolute slack of the numerics contract, in the units of bench.contract.error, added to twice
    # the eager twin's error, by the inputs' dtype; the default is that of each result's dtype. An
    # op that needs more states the reason. A function takes (dtype, keyword arguments, name of the
    # result: "out 0", "grad x") and returns None for the default.
    atol: (
        Mapping[torch.dtype, float] | Callable[[torch.dtype, dict[str, Any], str], float | None]
    ) = field(default_factory=dict)
    judged: Judged = field(default_factory=Judged)
    goals: tuple[Goal, ...] = ()
    eager_reads_host: str = ""  # `Implementation.reads_host` of the eager twin
    # Unsupported by some implementation; for `explain`. Empty if calls pass no request.
    requests: tuple[Any, ...] = ()

    def __post_init__(self):
        twin = Implementation(
            "eager",
            lambda: self.eager,
            devices=("cpu", "cuda", "meta"),
            dtypes=(*FLOATS, torch.float64),
            reads_host=self.eager_reads_host,
        )
        self._table: dict[tuple[str, torch.device, torch.dtype, Any], Callable] = {}  # of `pick`
        self._unpinned: dict[tuple[torch.device, torch.dtype], str] = {}
        self.serial = next(_serials)  # an op is made after the ops that are its parts
        self._id = f"{self.name} {id(self)}"
        _by_id[self._id] = self
        # Whether installed implementations have been added, or are being added by this thread.
        self._complete = self._completing = False
        self.implementations = (*self.built_in, twin)

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        """All implementations, best first, the eager twin last. Installed ones are added on first
        access.
        """
        if not self._complete:
            with _SETUP:
                if not (self._complete or self._completing):
                    self._completing = True  # `add` reads this property
                    try:
                        for entry in installed().get(self.name, ()):
                            self.add(_installed_implementation(entry, self))
                        self._complete = True
                    finally:
                        self._completing = False
        return self._implementations

    @implementations.setter
    def implementations(self, implementations: tuple[Implementation, ...]) -> None:
        self._implementations = implementations
        # New ones, not cleared: another thread may be about to add a choice among the former.
        self._table, self._unpinned = type(self._table)(), {}
        # Callables for Dynamo, as attributes: it does not see entries added to a dictionary during
        # tracing. It guards them, so compiled code recompiles when they are replaced.
        self._by_key = types.SimpleNamespace()

    def add(self, implementation: Implementation, *, before: str | None = None) -> None:
        """See `tilewright.register_implementation`."""
        if not isinstance(implementation, Implementation):
            raise TypeError(
                f"{self.name}: implementation must be a tilewright.Implementation, got "
                f"{implementation!r}"
            )
        with _SETUP:
            self._add(implementation, before)

    def _add(self, implementation: Implementation, before: str | None) -> None:
        every, used_names = list(self.implementations), self.used_names()
        for name in (implementation.name, *implementation.aliases):
            if not isinstance(name, str) or not name:
                raise TypeError(
                    f"{self.name}: an implementation's name must be a str, got {name!r}"
                )
            if name in used_names:
                raise ValueError(
                    f"{self.name}: the name {name!r} is taken; have {['auto', *self.names()]}"
                )
        if reason := self.wrong_with(implementation):
            raise ValueError(f"{self.name}: implementation {implementation.name!r} {reason}")
        at = len(every) - 1 if before is None else every.index(self.implementation(before))
        self.implementations = (*every[:at], implementation, *every[at:])

    def used_names(self) -> set[str]:
        """All names and aliases that a further implementation must not have."""
        return {"auto", *(name for i in self.implementations for name in (i.name, *i.aliases))}

    def wrong_with(self, implementation: Implementation) -> str | None:
        """None, or why this implementation does not fit the op."""
        if implementation.refuses is anything or self.requests:
            return None
        return "has `refuses`, which is never called: calls of this op pass no request"

    def forget_choices(self, table: type[dict]) -> None:
        """Empties the cache of choices, which is of the class `table` from now on."""
        self._table, self._unpinned = table(), {}

    @contextlib.contextmanager
    def fresh_choices(self, table: dict | None = None) -> Iterator[None]:
        """Caches choices separately within a block, in `table` or a new one; the previous caches
        return after it.
        """
        before, implementations = (self._table, self._unpinned), self.implementations
        self._table, self._unpinned = {} if table is None else table, {}
        try:
            yield
        finally:
            # Choices among implementations that have been added to are no longer those of `auto`.
            same = self._implementations is implementations
            self._table, self._unpinned = before if same else ({}, {})

    @property
    def autocast(self) -> Any:
        """The op's behavior under torch.autocast (core.checks.Autocast), as its public function
        declares it; None if it declares none.
        """
        return getattr(self.public, "autocast", None)

    @property
    def takes(self) -> Any:
        """The arguments that its public function declares (core.takes.Takes); None if it declares
        none.
        """
        return getattr(self.public, "takes", None)

    def names(self) -> list[str]:
        return [impl.name for impl in self.implementations]

    def implementation(self, name: str) -> Implementation:
        """The implementation with this name or alias, usable or not.

        Raises ValueError if there is none, TypeError if the name is not a str.
        """
        if not isinstance(name, str):
            raise TypeError(
                f"{self.name}: implementation must be one of {['auto', *self.names()]}, got "
                f"{name!r}"
            )
        for impl in self.implementations:
            if name in (impl.name, *impl.aliases):
                return impl
        raise ValueError(
            f"{self.name}: unknown implementation {name!r}; have {['auto', *self.names()]}"
        )

    def usable(
        self, device_type: str, dtype: torch.dtype | None = None, request: Any = None
    ) -> list[str]:
        return [
            i.name for i in self.implementations if i.why_not(device_type, dtype, request) is None
        ]

    def choose(self, device_type: str, dtype: torch.dtype, request: Any = None) -> str:
        """The name that `auto` resolves to: the first usable implementation that lists this device
        type in `devices`, or a faster one that it names.
        """
        for impl in self.implementations:
            if device_type in impl.devices and impl.why_not(device_type, dtype, request) is None:
                faster = impl.slower_than(device_type, request)
                if faster is None:
                    return impl.name
                other = self.implementation(faster)
                usable = other.why_not(device_type, dtype, request) is None
                return other.name if usable else impl.name
        return "eager"

    def choose_invariant(self, device_type: str, dtype: torch.dtype, request: Any = None) -> str:
        """The first usable implementation for this device type that claims `batch_invariant`
        there.

        Raises ImplementationUnavailable if there is none.
        """
        for name in self.usable(device_type, dtype, request):
            impl = self.implementation(name)
            if device_type in impl.devices and device_type in impl.batch_invariant:
                return name
        raise ImplementationUnavailable(
            f"{self.name}: no implementation that is usable here claims that a row's bits "
            f"do not depend on the batch ({short(dtype)} on {device_type})"
        )

    def unpinned(self, tensor: torch.Tensor | DispatchOn, like: str = "") -> str:
        """The name that `auto` resolves to for a part of a composed op, regardless of `use`.

        Naming an implementation fixes its parts too. Parts that round where the twin does not would
        break the contract of the whole, so they are skipped. The answer is cached.

        like: "auto", or the name of the whole's implementation, which is returned if this op has an
            implementation of that name.
        """
        if torch.compiler.is_dynamo_compiling():
            return _unpinned_constant(self._id, tensor.device, tensor.dtype, like)
        if like and (like == "auto" or like in self.names()):
            return like
        key, known = (tensor.device, tensor.dtype), self._unpinned
        name = known.get(key)
        if name is None:
            kind = tensor.device.type
            with _current(tensor.device):
                name = known[key] = next(
                    (
                        i.name
                        for i in self.implementations
                        if kind in i.devices
                        and not i.rounds_between
                        and i.why_not(kind, tensor.dtype) is None
                    ),
                    "eager",
                )
        return name

    def part(self, tensor: torch.Tensor | DispatchOn, like: str = "") -> Callable:
        """The callable of the `unpinned` implementation."""
        return self.pick(self.unpinned(tensor, like), tensor)

    def resolve(
        self,
        name: str = "auto",
        device_type: str | None = None,
        dtype: torch.dtype = torch.float32,
        request: Any = None,
    ) -> Callable:
        """The callable of an implementation. Only "auto" chooses; a given name never falls back.

        Args:
            name: An implementation's name or alias, or "auto".
            device_type: Device type of the tensors; default: CUDA if present.
            dtype: Dtype of the op's first tensor.
            request: The options of the call (see `pick`); None if every implementation supports
                them.

        Raises:
            ValueError: There is no implementation of this name.
            ImplementationUnavailable: It cannot run here; the message gives the reason.

        Example:
            >>> from tilewright.ops import OPS
            >>> OPS["rmsnorm"].resolve("eager", "cpu") is OPS["rmsnorm"].eager
            True
        """
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        name = PINS.get(self.name, name) if name == "auto" else name
        impl = self.implementation(
            self.choose(device_type, dtype, request) if name == "auto" else name
        )
        if reason := impl.why_not(device_type, dtype, request):
            raise ImplementationUnavailable(
                f"{self.name}[{impl.name}]: {reason} (usable here: "
                f"{self.usable(device_type, dtype, request)})"
            )
        try:
            with _SETUP:
                return impl.load()
        except ImportError as error:  # installed, but broken: even auto must not hide that
            raise ImplementationUnavailable(
                f"{self.name}[{impl.name}]: does not import: {error}"
            ) from error

    def pick(self, name: str, tensor: torch.Tensor | DispatchOn, request: Any = None) -> Callable:
        """`resolve` for a call, by the tensor's device and dtype; cached.

        request: the options of the call that some implementations do not support, as a NamedTuple
        of constants of the op's own class.
        """
        if name == "auto" and PINS:
            name = PINS.get(self.name, name)
        if torch.compiler.is_dynamo_compiling():
            # Split up, since Dynamo passes a NamedTuple without its values.
            request_args = () if request is None else (type(request), tuple(request))
            return getattr(
                self._by_key,
                _resolve_constant(self._id, name, tensor.device, tensor.dtype, *request_args),
            )
        key, table = (name, tensor.device, tensor.dtype, request), self._table
        try:
            function = table.get(key)
        except TypeError:  # an unhashable name
            self.implementation(name)
            raise
        if function is None:
            kind = tensor.device.type
            with _current(tensor.device):
                function = self.resolve(name, kind, tensor.dtype, request)
                for seen in WATCHERS:
                    taken = self.choose(kind, tensor.dtype, request) if name == "auto" else name
                    seen(self.name, self.implementation(taken).name)
            table[key] = function
        return function


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes the device the current one, which the probes query."""
    cuda = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.device(device) if cuda else contextlib.nullcontext()


# For `_resolve_constant`: before torch 2.13, Dynamo accepts only constants as arguments, not an Op.
_by_id: weakref.WeakValueDictionary[str, Op] = weakref.WeakValueDictionary()


@torch_names.constant
def _unpinned_constant(op_id: str, device: torch.device, dtype: torch.dtype, like: str) -> str:
    return _by_id[op_id].unpinned(DispatchOn(device, dtype), like)


@torch_names.constant
def _resolve_constant(
    op_id: str,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    kind: type | None = None,
    values: tuple = (),
) -> str:
    # torch.compile runs this once during tracing, instead of tracing imports and probes. It must
    # return a constant, so the callable is stored in a namespace under a key that is written once.
    op = _by_id[op_id]
    request = None if kind is None else kind(*values)
    key = f"{name} {device} {short(dtype)} {request}"
    if not hasattr(op._by_key, key):
        with _current(device):
            setattr(op._by_key, key, op.resolve(name, device.type, dtype, request))
    return key


def _installed_implementation(entry: Installed, op: Op) -> Implementation:
    """The implementation of an entry point; if it provides none that fits the op, an unavailable
    one that gives the reason.
    """
    used_names = op.used_names()
    loaded, reason = entry.checked(Implementation, used_names, op.wrong_with)
    if not reason:
        return loaded
    name = entry.name
    while not name or name in used_names:
        name = f"{entry.module}:{name}"
    reason = f"{entry}: {reason}"
    return Implementation(name, entry.point.load, missing=lambda device_type: reason, devices=())


def short(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")


def instead_of(name: Any, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known name, and all of them."""
    known = list(known)
    nearest = [f" did you mean {n!r}?" for n in difflib.get_close_matches(str(name), known, 1)]
    return f";{''.join(nearest)} have {known}"
