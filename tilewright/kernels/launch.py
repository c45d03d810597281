"""`kernel[grid](*arguments, **constants)`, without what Triton does each time to find what it has
compiled.

Triton writes the types, alignments and options of a launch down as strings and looks the kernel up
under them, in Python, which takes longer than the launch. Here what was compiled is kept, with all
that its launch takes, under a key of the few things that can ask for other code: dtypes, integers,
constants. What is unusual goes Triton's way: pointers that are not aligned to 16 bytes, types of
other libraries, hooks of profilers, the interpreter.

Of Triton's own, not all of which is documented (seen in 3.6.0 and 3.9.0): `JITFunction.params` and
`pre_run_hooks`; `CompiledKernel.run`, called with the grid, the stream, `function`,
`packed_metadata`, three of hooks and every parameter in order, a pointer as an int;
`knobs.runtime`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from triton import JITFunction, knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

# launches that are kept of a kernel and types of arguments; beyond, those seen so far are forgotten
MOST = 1024
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_CHAINS = "launch_enter_hook", "launch_exit_hook"
_INT32 = 2**31  # a number that is not specialized is 32 or 64 bits wide

_kept: dict[tuple, _Kept] = {}
_keeping = True


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launches a kernel of Triton's, or runs it in Triton's interpreter, as
    `kernel[grid](*arguments, **constants)`.

    kernel: a @triton.jit function that lives as long as the process, whose constexpr parameters
    come last.
    arguments: for all others; tensors are on the current device.   constants: constexprs, num_warps
    and the like.
    """
    types = id(kernel), *map(type, arguments)
    kept = _kept.get(types)
    if kept is None:
        kept = _kept[types] = _Kept(
            kernel, types[1:]
        )  # which holds the kernel, so that no other gets its id
    if not (kept.possible and _keeping and kept.launch(grid, arguments, constants)):
        kernel[grid](*arguments, **constants)


def forget() -> None:
    """Forgets all launches; the next of each goes Triton's way."""
    _kept.clear()


@contextlib.contextmanager
def none_kept() -> Iterator[None]:
    """Inside, every launch goes Triton's way, for those who watch `JITFunction.run`."""
    global _keeping
    before, _keeping = _keeping, False
    try:
        yield
    finally:
        _keeping = before


class _Kept:
    """Launches of a kernel with arguments of these types. possible: whether they can be kept."""

    def __init__(self, kernel: Any, types: tuple[type, ...]):
        self.kernel, self.found = kernel, {}
        places: dict[str, list[int]] = {"tensor": [], "descriptor": [], "number": [], "wide": []}
        self.possible = isinstance(kernel, JITFunction)
        for i, (kind, p) in enumerate(
            zip(types, kernel.params if self.possible else (), strict=False)
        ):
            if kind in _TENSORS:
                places["tensor"].append(i)
            elif kind is TensorDescriptor:
                places["descriptor"].append(i)
            elif kind in (int, bool):
                if not p.do_not_specialize:
                    places["number"].append(i)
                elif not p.annotation_type:
                    places["wide"].append(i)
            elif kind not in (float, type(None)):
                self.possible = False
            self.possible = self.possible and not p.is_constexpr
        self.tensors, self.descriptors, self.numbers, self.wide = map(tuple, places.values())
        self.possible = self.possible and bool(self.tensors)
        self.hooks = [getattr(knobs.runtime, name) for name in _CHAINS]

    def launch(self, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> bool:
        """Whether it was launched."""
        runtime, (enter, leave) = knobs.runtime, self.hooks
        # Chains of hooks, in place of which anything may have been put.
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
        for i in self.descriptors:  # aligned, or they would not be descriptors
            d = arguments[i]
            key += (d.base.dtype, d.padding, *d.block_shape)
        active, device = driver.active, t.get_device()
        if device < 0:  # a tensor of a CPU, for what stands for a GPU
            device = active.get_current_device()
        key = device, *key
        found = self.found.get(key)
        if found is None:
            compiled = self.kernel[grid](*arguments, **constants)
            if hasattr(compiled, "packed_metadata"):
                if len(self.found) >= MOST:
                    self.found.clear()
                rest = [
                    constants.get(p.name, p.default) for p in self.kernel.params[len(arguments) :]
                ]
                self.found[key] = (
                    compiled.run,
                    compiled.function,
                    compiled.packed_metadata,
                    rest,
                    compiled,
                )
            return True
        run, function, metadata, rest, _ = found
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
