"""`kernel[grid](*arguments, **constants)` without Triton's lookup of the compiled kernel per
launch.

Triton formats the types, alignments and options of each launch as strings and looks the kernel up
by them, in Python, which takes longer than the launch. This module caches the compiled kernel and
its launch arguments under the few values that can change the code: dtypes, integers, constants.
Unusual launches fall back to Triton: pointers that are not 16-byte aligned, types of other
libraries, profiler hooks, the interpreter.

It uses these parts of Triton, not all documented (checked in 3.6.0 and 3.9.0): `JITFunction.params`
and `pre_run_hooks`; `CompiledKernel.run`, called with the grid, the stream, `function`,
`packed_metadata`, three hooks and every parameter in order, a pointer as an int; `knobs.runtime`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from triton import JITFunction, knobs
from triton.runtime import driver

from tilewright.core.torch_names import FakeTensor

# What every launch chooses unless it names another choice, since Triton's default depends on its
# version. Fusion of a multiplication and an addition into one FMA, with one rounding: on, as it is
# by default up to 3.9; 3.10 turns it off.
COMPILE_OPTIONS = {"enable_fp_fusion": True}
# Cached launches per kernel and argument types; when it is full, the cache is cleared.
MAX_ENTRIES = 1024
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_CHAINS = "launch_enter_hook", "launch_exit_hook"
_INT32 = 2**31  # an integer that is not specialized is 32 or 64 bits wide

_cache: dict[tuple, _CachedLaunch] = {}
_caching = True


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launches a Triton kernel as `kernel[grid](*arguments, **constants)`, or runs it in Triton's
    interpreter.

    kernel: a @triton.jit function that lives as long as the process, whose constexpr parameters
        come last.
    arguments: for all other parameters; tensors are on the current device. Nothing is launched on
        FakeTensors. A tuple is of integers, such as strides; each is specialized.
    constants: constexprs, num_warps and the like, also other values of `COMPILE_OPTIONS`. A
        constexpr may be a NamedTuple, whose fields a kernel and its functions read by name; no
        properties, whose code Triton's cache does not see.
    """
    types = id(kernel), *map(type, arguments)
    cached = _cache.get(types)
    if cached is None:
        # _CachedLaunch references the kernel, so that its id is not reused.
        cached = _cache[types] = _CachedLaunch(kernel, types[1:])
    launched = cached.cacheable and _caching and cached.launch(grid, arguments, constants)
    if not (launched or cached.pretended):
        kernel[grid](*arguments, **{**COMPILE_OPTIONS, **constants})


def warm_up(kernel: Any, *arguments: Any, **constants: Any) -> Any:
    """Compiles what `launch` would launch with these arguments, and loads it onto the device.
    Returns Triton's compiled kernel.
    """
    compiled = kernel.warmup(*arguments, grid=(1,), **{**COMPILE_OPTIONS, **constants})
    _ = compiled.run  # loads it
    return compiled


def clear_launch_cache() -> None:
    """Clears the cache; the next launch of each kernel goes through Triton."""
    _cache.clear()


@contextlib.contextmanager
def no_launch_cache() -> Iterator[None]:
    """Sends every launch inside the block through Triton, for callers that observe
    `JITFunction.run`.
    """
    global _caching
    before, _caching = _caching, False
    try:
        yield
    finally:
        _caching = before


class _CachedLaunch:
    """The cached launches of a kernel with these argument types.

    cacheable: whether its launches can be cached.   pretended: whether tensors have no values.
    """

    def __init__(self, kernel: Any, types: tuple[type, ...]):
        self.kernel, self.entries = kernel, {}
        places: dict[str, list[int]] = {"tensor": [], "descriptor": [], "number": [], "wide": []}
        self.cacheable = isinstance(kernel, JITFunction)
        for i, (kind, p) in enumerate(
            zip(types, kernel.params if self.cacheable else (), strict=False)
        ):
            if kind in _TENSORS:
                places["tensor"].append(i)
            elif kind.__name__ == "TensorDescriptor":  # of Triton or of Gluon
                places["descriptor"].append(i)
            elif kind in (int, bool, tuple):
                if kind is tuple or not p.do_not_specialize:
                    places["number"].append(i)
                elif not p.annotation_type:
                    places["wide"].append(i)
            elif kind not in (float, type(None)):
                self.cacheable = False
            self.cacheable = self.cacheable and not p.is_constexpr
        self.tensors, self.descriptors, self.numbers, self.wide = map(tuple, places.values())
        self.cacheable = self.cacheable and bool(self.tensors)
        self.pretended = any(issubclass(kind, FakeTensor) for kind in types)
        self.hooks = [getattr(knobs.runtime, name) for name in _CHAINS]

    # Long: every launch takes this path, on which a function call would cost as much as a step.
    def launch(self, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> bool:
        """Returns whether it launched."""
        runtime, (enter, leave) = knobs.runtime, self.hooks
        # Hook chains; code may have replaced them with anything.
        if (
            runtime.debug
            or self.kernel.pre_run_hooks
            or runtime.launch_enter_hook is not enter
            or enter.calls
            or runtime.launch_exit_hook is not leave
            or leave.calls
        ):
            return False
        passed, key, low = [*arguments], [*constants, *constants.values()], 0
        for i in self.tensors:
            t = arguments[i]
            passed[i] = address = t.data_ptr()
            low |= address
            key.append(t.dtype)
        if low & 15:
            return False
        for i in self.numbers:
            key.append(arguments[i])
        for i in self.wide:
            key.append(-_INT32 <= arguments[i] < _INT32)
        for i in self.descriptors:  # descriptors are always aligned
            d = arguments[i]
            key += (d.base.dtype, d.padding, *d.block_shape)
        active: Any = driver.active  # of the backend that Triton found
        device = t.get_device()
        if device < 0:  # a CPU tensor that stands in for a GPU's
            device = active.get_current_device()
        key = device, *key
        entry = self.entries.get(key)
        if entry is None:
            compiled = self.kernel[grid](*arguments, **{**COMPILE_OPTIONS, **constants})
            if hasattr(compiled, "packed_metadata"):
                if len(self.entries) >= MAX_ENTRIES:
                    self.entries.clear()
                rest = [
                    constants.get(p.name, p.default) for p in self.kernel.params[len(arguments) :]
                ]
                self.entries[key] = (
                    compiled.run,
                    compiled.function,
                    compiled.packed_metadata,
                    rest,
                    compiled,
                )
            return True
        run, function, metadata, rest, _ = entry
        x, y, z = (*grid, 1, 1)[:3]
        run(
            x,
            y,
            z,
            active.get_current_stream(device),
            function,
            metadata,
            None,
            None,
            None,
            *passed,
            *rest,
        )
        return True
