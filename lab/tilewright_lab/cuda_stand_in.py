"""CPU tensors in place of a GPU's, for host functions that launch kernels.

Inside `StandIn`, every CPU tensor reports a CUDA device, functions that create or move tensors take
"cuda" for the CPU, and `torch.cuda` describes a GPU of the emulated architecture. Memory that
`torch.empty` allocates is filled with bytes 0xFF (NaN in every floating-point format), and each of
its bytes counts as unset until a kernel or an operation of torch writes it.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode, resolve_name

from tilewright.core.torch_names import RAW_STREAM
from tilewright.kernels.device import SMS
from tilewright_lab.emulator.memory import Memory, bytes_at, span
from tilewright_lab.pretend import DEVICES

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
ALLOCATE = {
    "torch.empty",
    "torch.empty_like",
    "torch.empty_strided",
    "torch.empty_permuted",
    "torch.Tensor.new_empty",
    "torch.Tensor.new_empty_strided",
}
STAY = {"torch.Tensor.cuda", "torch.Tensor.cpu", "torch.Tensor.pin_memory"}
SAYS = {
    "torch.Tensor.is_cuda.__get__": True,
    "torch.Tensor.is_cpu.__get__": False,
    "torch.Tensor.device.__get__": CUDA,
    "torch.Tensor.get_device": 0,
    "torch.Tensor.record_stream": None,
}


def on_cpu(value: Any) -> Any:
    """Replaces a CUDA device, or its name, with the CPU, also in tuples."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return CPU if value.partition(":")[0] == "cuda" else value
    return value


class Unset:
    """Memory that nothing has written, by the storages that hold it."""

    def __init__(self):
        self._held: dict[int, tuple[torch.Tensor, np.ndarray]] = {}  # keeps the storage alive

    def allocate(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        if storage.nbytes():
            first = storage.data_ptr()
            bytes_at(first, first + storage.nbytes())[:] = 0xFF
            self._held[first] = t.detach(), np.ones(storage.nbytes(), bool)

    def fill(self, t: torch.Tensor) -> None:
        """An operation of torch wrote some of this tensor's storage."""
        if t.layout == torch.strided and t.device.type == "cpu":
            self._held.pop(t.untyped_storage().data_ptr(), None)

    def among(self, first: int, last: int) -> np.ndarray | None:
        """Which bytes of [first, last) are unset; None: none."""
        for start, (_, unset) in self._held.items():
            if start < last and first < start + len(unset):
                mask = np.zeros(last - first, bool)
                low, high = max(start, first), min(start + len(unset), last)
                mask[low - first : high - first] = unset[low - start : high - start]
                return mask & (bytes_at(first, last) == 0xFF)
        return None

    def wrote(self, memory: Memory) -> None:
        """A launch wrote its memory."""
        for t, place in memory.tensors:
            first, size = t.data_ptr(), span(t) * t.element_size()
            for start, (_, unset) in list(self._held.items()):
                if size and start <= first < start + len(unset):
                    written = memory.written[place : place + size] != 0
                    unset[first - start : first - start + size] &= ~written
                    if not unset.any():
                        del self._held[start]

    def elements(self, t: torch.Tensor) -> int:
        """How many elements of a tensor are unset."""
        if not t.numel():
            return 0
        first = t.data_ptr()
        mask = self.among(first, first + span(t) * t.element_size())
        if mask is None:
            return 0
        whole = mask.reshape(-1, t.element_size()).any(1)
        strides = tuple(s * whole.itemsize for s in t.stride())
        return int(np.lib.stride_tricks.as_strided(whole, tuple(t.shape), strides).sum())


class _Mode(TorchFunctionMode):
    def __init__(self, unset: Unset):
        super().__init__()
        self.unset = unset

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.device:
            return args[0] if args and isinstance(args[0], torch.device) else func(*args, **kwargs)
        name = _name(func)
        if name in SAYS:
            return SAYS[name] if args[0].device.type == "cpu" else func(*args, **kwargs)
        if name in STAY:
            return args[0]
        if name == "torch.Tensor.backward":
            with self:  # inside this method the mode is off, and kernels' backwards ask for devices
                return torch.autograd.backward(*args, **kwargs)
        args = tuple(on_cpu(a) for a in args)
        kwargs = {k: on_cpu(v) for k, v in kwargs.items()}
        kwargs.pop("pin_memory", None)
        result = func(*args, **kwargs)
        if name in ALLOCATE:
            if isinstance(result, torch.Tensor):
                self.unset.allocate(result)
        elif _writes(func, name, kwargs):
            for t in (*args, *kwargs.values()):
                if isinstance(t, torch.Tensor):
                    self.unset.fill(t)
        return result


_names: dict[Any, str] = {}


def _name(func) -> str:
    try:
        if func not in _names:
            _names[func] = resolve_name(func) or getattr(func, "__name__", "")
        return _names[func]
    except TypeError:  # not hashable
        return getattr(func, "__name__", "")


def _writes(func, name: str, kwargs: dict) -> bool:
    """Whether a function may write into its arguments."""
    last = name.rsplit(".", 1)[-1]
    return (
        "out" in kwargs
        or (last.endswith("_") and not last.endswith("__"))
        or last in ("__setitem__", "__set__")
        or last.startswith("__i")
        or not name.startswith("torch.")
        or name.startswith("torch.ops")
    )


class _Stream:
    cuda_stream, device, stream_id = 0, CUDA, 0

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __getattr__(self, name):  # wait_stream, record_event, synchronize and the like
        return lambda *_, **__: None


class _Event(_Stream):
    def elapsed_time(self, _):
        return 0.0

    def query(self):
        return True


class _Generator:
    _real = torch.Generator

    def __new__(cls, device="cpu"):
        return cls._real(device=on_cpu(device))


# Long: a list of what is replaced while it lasts.
@contextlib.contextmanager
def stand_in(arch: int):
    """Inside, "cuda" is the CPU and a GPU of this architecture (90: sm_90).

    Yields:
        The `Unset` memory.
    """
    processors, block = DEVICES.get(arch, DEVICES[90])
    properties = SimpleNamespace(
        name=f"emulated sm_{arch}",
        major=arch // 10,
        minor=arch % 10,
        multi_processor_count=processors,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=block,
        **SMS.get(arch, SMS[90])._asdict(),
        max_threads_per_block=1024,
        L2_cache_size=50 * 2**20,
        total_memory=80 * 2**30,
        warp_size=32,
        gcnArchName="",
        is_integrated=False,
    )
    nothing = contextlib.nullcontext

    says: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "init": lambda: None,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (arch // 10, arch % 10),
        "get_device_properties": lambda device=None: properties,
        "synchronize": lambda device=None: None,
        "is_current_stream_capturing": lambda: False,
        "device": lambda device: nothing(),
        "device_of": lambda tensor: nothing(),
        "current_stream": _Stream,
        "default_stream": _Stream,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: nothing(),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": lambda device=None: (80 * 2**30, 80 * 2**30),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }
    unset = Unset()
    with contextlib.ExitStack() as stack:
        for name, value in says.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(*RAW_STREAM, lambda device: 0, create=True))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        # torch.autograd.grad is then not intercepted, and the mode is on in what it runs.
        stack.enter_context(
            mock.patch.object(torch.autograd, "has_torch_function", lambda *_: False)
        )
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_Mode(unset))
        yield unset
