"""A Triton driver for the emulated GPU: kernels are launched as on a GPU."""

from __future__ import annotations

import contextlib
import pathlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch

from tilewright_lab.emulator.counts import Counts
from tilewright_lab.emulator.faults import Fault, Unsupported
from tilewright_lab.emulator.kernel import Kernel
from tilewright_lab.emulator.memory import Memory
from tilewright_lab.emulator.tma import TensorMap
from tilewright_lab.emulator.undefined import Loads, filled, loads_without_other


@dataclass(frozen=True)
class Launch:
    """One launch: what Triton compiled, and what it was launched on."""

    name: str
    grid: tuple[int, int, int]
    source: Any  # Triton's ASTSource
    metadata: Any  # and its metadata
    kernel: Kernel


class Driver:
    """A Triton driver for this package's emulated GPU, so that Triton itself binds and specializes
    arguments. A device's number is its architecture, since Triton caches compiled kernels per
    device.

    keeps: whether the memory of every launch is kept.
    tolerated: kinds of faults that end no launch and are kept in `faults`: "replicas", "race".
    unset, wrote: the bytes of memory, by its addresses, that nothing has written (`Memory.put`),
        and what a launch wrote.
    """

    def __init__(
        self,
        arch: int = 90,
        keeps: bool = True,
        unset: Callable | None = None,
        wrote: Callable | None = None,
    ):
        self.arch, self.keeps, self.unset, self.wrote = arch, keeps, unset, wrote
        self.memories = []  # one per launch
        self.names = []  # the kernel of each launch
        self.launches: list[Launch] = []
        self.faults: list[Fault] = []  # what went wrong, also if the caller catches it
        self.tolerated: frozenset[str] = frozenset()
        self.change = None  # transforms PTX, to plant faults
        self.fill = ""  # of masked elements of loads without `other`, as in FILLS; "": zero
        self.undefined: dict[str, Loads] = {}  # such loads, by the kernel that was launched
        self.most: int | None = None  # instructions that a program may execute
        self.counts: dict[str, Counts] | None = None  # kernel name -> Counts, if requested
        self.pointed = {}  # address of a table of addresses -> the tensors, at its end
        self.compiles = ""  # the file of the kernel that Triton compiles now
        self.all_configs, self._tuned, self._probing = False, 0, False
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {
                "max_shared_mem": (99 if self.arch // 10 in (8, 12) and self.arch != 80 else 227)
                * 1024
            },
            load_binary=lambda name, cubin, shared, device: (name, name, 0, 0, 1024),
            unload_module=lambda name: None,
        )

    def translated(self, a, memory):
        """An argument; if it is a table of addresses, a copy with those in `memory`."""
        tensors = self.pointed.get(a.data_ptr()) if isinstance(a, torch.Tensor) else None
        if tensors is None:
            return a
        held = [memory.put(t, t.data_ptr() % 16) if t.numel() else 0 for t in tensors]
        return torch.cat((a[: -len(held)], torch.tensor(held)))

    def get_current_device(self):
        return self.arch

    def set_current_device(self, device):
        pass

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def get_device_interface(self):
        return torch.cuda

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_empty_cache_for_benchmark(self):
        return torch.empty(0)

    def clear_cache(self, cache):
        pass

    def get_benchmarker(self):
        """Triton's autotuner: the first configuration that a GPU can launch is the fastest."""

        # Autotuners keep it, and a later run of this process has another driver.
        return lambda call, quantiles=None, **_: active_driver().timed(call, len(quantiles or (0,)))

    def timed(self, kernel_call, count):
        if self.all_configs or not self._tuned:
            self._probing = not self.all_configs
            try:
                kernel_call()  # raises if the GPU has too little shared memory
            finally:
                self._probing = False
        self._tuned += 1
        return [float(self._tuned)] * count

    @property
    def probes(self) -> bool:
        """Whether kernels are compiled and not executed now."""
        return self._probing

    def tuning(self):
        """An autotuner begins."""
        self._tuned = 0

    def launcher_cls(self, source, metadata):
        from triton.runtime.cache import get_cache_manager

        cached = get_cache_manager(metadata.hash)
        text, ttir = (  # Triton has just compiled them; Gluon has no ttir
            pathlib.Path(file).read_text() if file else ""
            for kind in ("ptx", "ttir")
            for file in (cached.get_file(f"{metadata.name}.{kind}"),)
        )
        undefined = loads_without_other(ttir)
        kernels = {}

        def launch(x, y, z, stream, function, packed, about, enter, leave, *arguments):
            active = active_driver()  # a later run of this process may have another
            if active.probes:
                return
            key = active.change, active.fill
            if key not in kernels:
                changed = active.change(text) if active.change else text
                changed = filled(changed, undefined, active.fill) if active.fill else changed
                kernels[key] = active.parsed(changed, metadata)
            kernel = kernels[key]
            if undefined:
                active.undefined[metadata.name] = undefined
            active.execute(kernel, source, metadata, (x, y, z), arguments)

        return launch

    def parsed(self, text, metadata) -> Kernel:
        for needed, what in (
            (metadata.num_ctas != 1, f"launch of clusters (num_ctas = {metadata.num_ctas})"),
            (
                metadata.global_scratch_size or metadata.profile_scratch_size,
                "scratch memory, which descriptors made in a kernel take",
            ),
        ):
            if needed:
                raise _of(Unsupported(what), metadata.name)
        try:
            return Kernel(text, metadata.shared)
        except (KeyError, TypeError, ValueError) as error:
            raise _of(Unsupported("such PTX"), metadata.name) from error

    def execute(self, kernel, source, metadata, grid, arguments):
        values, given = [], flat(arguments, source.signature, metadata.name)
        tensors = [a for _, kind, a in given if isinstance(a, torch.Tensor)]
        memory = Memory(t for t in tensors if t.data_ptr() not in self.pointed)
        memory.tolerated = self.tolerated
        described = iter(metadata.tensordesc_meta or ())
        for name, kind, a in given:
            if kind.startswith("tensordesc"):
                values += tensor_map(a, next(described), memory, name)
            elif isinstance(a := self.translated(a, memory), torch.Tensor):
                values.append(memory.put(a, a.data_ptr() % 16, name, self.unset))
            elif kind.startswith("*") and a:
                raise _of(Unsupported(f"pointer given as a number ({name})"), metadata.name)
            else:
                values.append(float(a) if kind in ("fp32", "fp64") else a)
        counts = None if self.counts is None else self.counts.setdefault(metadata.name, Counts())
        if counts is not None:
            counts.where = kernel.where
        self.launches.append(Launch(metadata.name, grid, source, metadata, kernel))
        try:
            # The two pointers at the end.
            kernel.run(memory, [*values, 0, 0], grid, counts=counts, most=self.most)
        except Fault as fault:
            fault.kernel = metadata.name
            self.faults.append(fault)
            raise
        except Unsupported as unsupported:
            raise _of(unsupported, metadata.name) from unsupported.__cause__
        finally:
            for note in memory.notes.values():
                note.kernel = metadata.name
                self.faults.append(note)
        memory.take_back()
        if self.wrote is not None:
            self.wrote(memory)
        if self.keeps:
            self.memories.append(memory)
            self.names.append(metadata.name)


def active_driver() -> Driver:
    """The driver that Triton launches on now, inside `installed`."""
    from triton.runtime import driver

    return cast(Driver, driver.active)


def _of(unsupported: Unsupported, kernel: str) -> Unsupported:
    unsupported.kernel = kernel
    return unsupported


def flat(arguments, signature, kernel) -> list[tuple[str, str, Any]]:
    """(name, type, value) of each argument that a kernel takes, tuples opened."""
    flattened = []

    def add(name, kind, value):
        if isinstance(kind, tuple):
            for i, (k, v) in enumerate(zip(kind, value, strict=True)):
                add(f"{name}[{i}]", k, v)
        elif kind != "constexpr":
            if kind in ("fp16", "bf16"):
                raise _of(Unsupported(f"argument of type {kind} ({name})"), kernel)
            if hasattr(value, "data_ptr") and not isinstance(value, torch.Tensor):
                value = value.base  # of triton.reinterpret
            flattened.append((name, kind, value))

    for value, (name, kind) in zip(arguments, signature.items(), strict=True):
        add(name, kind, value)
    return flattened


def tensor_map(a, about, memory, name) -> list[Any]:
    """The values of a tensor descriptor that the host made."""
    where = memory.put(a.base, 0, name)
    swizzle = (0, 32, 64, 128)[about["swizzle"]]
    box = about["block_size"]
    return [
        TensorMap(where, about["elem_size"], a.shape, a.strides, box, swizzle),
        *a.shape,
        *a.strides,
    ]


def without_machine_code(backend=None, stages=None, options=None, language=None, capability=None):
    """Triton's hook into its stages: it ends with PTX, which is run here. Without arguments, the
    key that distinguishes such kernels in Triton's cache.
    """
    if stages is None:
        key = f"without machine code {active_driver().compiles}".strip()
        return key, key
    stages["cubin"] = lambda text, metadata: b""
    return None


@contextlib.contextmanager
def installed(driver: Driver) -> Iterator[Driver]:
    """Inside, Triton launches on this driver. Its caches are apart from those of real GPUs."""
    from unittest import mock

    from triton import knobs
    from triton.runtime import autotuner
    from triton.runtime import driver as triton_driver
    from triton.runtime.jit import JITFunction

    from tilewright.kernels.launch import no_launch_cache

    real, seen = autotuner.Autotuner.run, set()
    compiled = JITFunction._do_compile

    def compile_(self, *args, **kwargs):
        # PTX names the source file, which Triton's key leaves out.
        if not knobs.compilation.disable_line_info:
            driver.compiles = self.fn.__code__.co_filename
        try:
            return compiled(self, *args, **kwargs)
        finally:
            driver.compiles = ""

    def run(self, *args, **kwargs):
        if self not in seen:  # choices of another run of this process
            seen.add(self)
            self.cache.clear()
        driver.tuning()
        return real(self, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(no_launch_cache())
        stack.enter_context(warnings.catch_warnings())
        # A user's kernel may leave fusion to Triton's version, as it would on a GPU.
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
        for group in (knobs.runtime, knobs.cache):
            stack.enter_context(group.scope())
        # Triton's protocol for it has neither all arguments nor the call without any.
        knobs.runtime.add_stages_inspection_hook = cast(Any, without_machine_code)
        knobs.cache.dir = str(pathlib.Path(knobs.cache.dir) / "emulated")
        stack.enter_context(mock.patch.object(triton_driver, "_active", driver))
        stack.enter_context(mock.patch.object(JITFunction, "_do_compile", compile_))
        stack.enter_context(mock.patch.object(autotuner.Autotuner, "run", run))
        yield driver
