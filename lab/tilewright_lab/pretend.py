"""A simulated GPU: ops take their GPU paths and compile their kernels, but nothing is launched or
computed.

Inside `gpu`, tensors on "cuda" are PyTorch's meta tensors, with shapes, strides and offsets but no
memory, which report a CUDA device. All host work of a call runs: the choice of implementations and
launch configurations, backward passes, and Triton's `JITFunction.run`, which specializes arguments
and looks up compiled kernels before it calls the driver's launcher. So the key of a compiled kernel
is computed by the same code as on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils import _device

from tilewright import selection
from tilewright.core import library, platform
from tilewright.kernels.device import SMS

CUDA, META = torch.device("cuda", 0), torch.device("meta")
# By compute capability, for the most common devices (H100 and H200 SXM, B200, RTX PRO 6000): number
# of SMs, and bytes of shared memory per block. (CUDA C++ Programming Guide, "Technical
# Specifications".)
DEVICES = {90: (132, 227 * 1024), 100: (148, 227 * 1024), 120: (188, 99 * 1024)}


# Goals and tuned configurations are of devices by name.
NAMES = {90: "NVIDIA H200", 100: "NVIDIA B200", 120: "NVIDIA RTX PRO 6000"}


def no_compiling() -> str | None:
    """None if Triton can compile kernels in this process, else the reason."""
    if platform.interpreting():
        return "Triton's interpreter, which TRITON_INTERPRET asks for, compiles nothing"
    return platform.no_module("triton")


def registers(cubin: bytes) -> int:
    """Registers per thread of the first kernel: the attribute REGCOUNT (0x2f) in section .nv.info
    of the ELF file.
    """
    (at,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, at + i * size) for i in range(count)]
    for name, _, _, _, begin, length in headers:
        start = headers[names][4] + name
        if cubin[start : start + 9] == b".nv.info\0":
            place = begin
            while place < begin + length:
                form, attribute, value = struct.unpack_from("<BBH", cubin, place)
                if attribute == 0x2F:
                    return struct.unpack_from("<I", cubin, place + 8)[0]
                place += 4 + (value if form == 4 else 0)
    raise ValueError("this machine code does not say how many registers a thread has")


class NoDriver:
    """A Triton driver for a simulated GPU: it loads and launches nothing."""

    def __init__(self, arch: int, device: int = -1):
        from triton.backends.compiler import GPUTarget

        self._device = device  # Triton caches compiled kernels by device
        self._target = GPUTarget("cuda", arch, 32)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": DEVICES[arch][1]},
            load_binary=lambda name, cubin, shared, device: (name, name, registers(cubin), 0, 1024),
            unload_module=lambda name: None,
        )

    def get_current_device(self):
        return self._device

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self._target

    def launcher_cls(self, source, metadata):
        return lambda *arguments: None


def _on_meta(value: object) -> object:
    """Replaces a CUDA device, or its name, with the meta device."""
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return META
    return META if isinstance(value, torch.device) and value.type == "cuda" else value


_is_meta, _device_of, _where = (
    torch._C.TensorBase.is_meta.__get__,  # pyright: ignore[reportAttributeAccessIssue] (stub: bool)
    torch._C.TensorBase.device.__get__,
    torch._C.TensorBase.get_device,
)
_Real = torch.Generator


def _on_meta_device(fn: Callable) -> Callable:
    """Wraps a function that creates or moves tensors: CUDA devices become the meta device."""

    @functools.wraps(fn)
    def make(*args, **options):
        options = {n: _on_meta(v) for n, v in options.items() if not isinstance(v, _Generator)}
        return fn(*map(_on_meta, args), **options)

    return make


def _drawn(fn: Callable) -> Callable:
    """Wraps a random factory: meta tensors, which have no values, are only allocated."""

    @functools.wraps(fn)
    def make(*shape, dtype=None, device=None, **options):
        if _on_meta(device) == META:
            return torch.empty(*shape, dtype=dtype, device=META)
        return fn(*shape, dtype=dtype, device=device, **options)

    return make


def _drawn_into(method: Callable) -> Callable:
    @functools.wraps(method)
    def fill(self, *args, **options):
        return self if _is_meta(self) else method(self, *args, **options)

    return fill


class _Generator:
    """Draws nothing: meta tensors have no values."""

    def __new__(cls, device="cpu"):
        return object.__new__(cls) if _on_meta(device) == META else _Real(device=device)

    def manual_seed(self, seed):
        return self


def _call(operator: library.Operator, *args) -> Any:
    """Calls an operator's launcher directly: the dispatcher has none for meta tensors."""
    return (operator.launch if operator.cuda else operator.through_dispatcher)(*args)


def not_compiled(kernel, key, signature, device, *_):
    """Caches a dummy in place of a compiled kernel."""
    dummy = kernel.device_caches[device][0][key] = SimpleNamespace(
        run=lambda *_: None,
        launch_metadata=lambda *_: None,
        function=None,
        packed_metadata=None,
        n_regs=0,
        metadata=SimpleNamespace(shared=0),
    )
    return dummy


# Long: a list of what is replaced while it lasts.
@contextlib.contextmanager
def gpu(arch: int = 90, name: str | None = None, compiles: bool = True) -> Iterator[None]:
    """Inside, "cuda" is a device of compute capability `arch` (90: 9.0) without memory.

    name: the device's; default: by `NAMES`.
    compiles: whether Triton's kernels are compiled; False replaces them with dummies, for callers
    that only record calls.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from tilewright.kernels import arrivals
    from tilewright.kernels.launch import no_launch_cache
    from tilewright.kernels.norm import rmsnorm_triton

    processors, _ = DEVICES[arch]
    name = name or NAMES[arch]
    properties = SimpleNamespace(
        name=name,
        major=arch // 10,
        minor=arch % 10,
        multi_processor_count=processors,
        **SMS[arch]._asdict(),
        L2_cache_size=50 * 2**20,
        total_memory=80 * 2**30,
        warp_size=32,
    )
    says = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: name,
        "get_device_capability": lambda device=None: (arch // 10, arch % 10),
        "get_device_properties": lambda device=None: properties,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0),
        "is_current_stream_capturing": lambda: False,
        "device": lambda device: contextlib.nullcontext(),
    }
    tensors = {
        "device": property(lambda self: CUDA if _is_meta(self) else _device_of(self)),
        "is_cuda": property(_is_meta),
        "is_meta": property(lambda self: False),
        "get_device": lambda self: 0 if _is_meta(self) else _where(self),
    }
    with contextlib.ExitStack() as stack:

        def put(where, name, value):
            stack.enter_context(mock.patch.object(where, name, value, create=True))

        stack.enter_context(no_launch_cache())
        put(driver, "_active", NoDriver(arch, -1 if compiles else -2))
        if not compiles:
            put(JITFunction, "_do_compile", not_compiled)
        for name_, value in says.items():
            put(torch.cuda, name_, value)
        put(torch, "Generator", _Generator)
        for fn in _device._device_constructors():
            if getattr(torch, fn.__name__, None) is fn:
                put(torch, fn.__name__, _on_meta_device(fn))
        put(library.Operator, "__call__", _call)
        put(torch.Tensor, "pin_memory", lambda self, *_: self)  # it would look for a driver
        # PyTorch's own versions for meta tensors read the reported CUDA device.
        for name_ in ("randn", "rand"):
            put(torch, name_, _drawn(getattr(torch, name_)))
        for name_ in ("normal_", "uniform_", "random_", "bernoulli_", "exponential_"):
            put(torch.Tensor, name_, _drawn_into(getattr(torch.Tensor, name_)))
        for name_ in ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
            put(torch.Tensor, name_, _on_meta_device(getattr(torch.Tensor, name_)))
        for name_ in (
            "rand_like",
            "randn_like",
            "empty_like",
            "zeros_like",
            "ones_like",
            "full_like",
            "randint_like",
        ):
            put(torch, name_, _on_meta_device(getattr(torch, name_)))
        put(rmsnorm_triton, "_resident", {})  # a cache that depends on the compiled kernels
        put(arrivals, "_devices", {})  # and one of tensors
        for op in selection.operations().values():
            stack.enter_context(op.fresh_choices())
        for name_, value in tensors.items():
            put(torch.Tensor, name_, value)
        yield
