"""`kernel[grid](*arguments, **constants)`, without what Triton does each time to find what it has compiled.

Triton writes the types, alignments and options of a launch down as strings and looks the kernel up under them, in
Python, which takes longer than the launch. Here what was compiled is kept, with all that its launch takes, under a key
of the few things that can ask for other code: dtypes, integers, constants. What is unusual goes Triton's way: pointers
that are not aligned to 16 bytes, types of other libraries, hooks of profilers, the interpreter.

Of Triton's own, not all of which is documented (seen in 3.6.0 and 3.9.0): `JITFunction.params` and `pre_run_hooks`;
`CompiledKernel.run`, called with the grid, the stream, `function`, `packed_metadata`, three of hooks and every
parameter in order, a pointer as an int; `knobs.runtime`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton import JITFunction, knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

MOST = 1024   # launches that are kept of a kernel and types of arguments; beyond, those seen so far are forgotten
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_CHAINS = "launch_enter_hook", "launch_exit_hook"
_INT32 = 2**31   # a number that is not specialized is 32 or 64 bits wide

_finders: dict[tuple, tuple[Any, Callable | None]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launches a kernel of Triton's, or runs it in Triton's interpreter, as `kernel[grid](*arguments, **constants)`.

    kernel: a @triton.jit function that lives as long as the process, whose constexpr parameters come last.
    arguments: for all others; tensors are on the current device.   constants: constexprs, num_warps and the like.
    """
    types = id(kernel), *map(type, arguments)
    found = _finders.get(types)
    if found is None:
        found = _finders[types] = kernel, _finder(kernel, types[1:])   # the kernel keeps its id
    if found[1] is None or not found[1](grid, constants, *arguments):
        kernel[grid](*arguments, **constants)


def forget() -> None:
    """Forgets all launches; the next of each goes Triton's way."""
    _finders.clear()


def _finder(kernel: Any, types: tuple[type, ...]) -> Callable | None:
    """find(grid, constants, *arguments), which launches with arguments of these types if it can, and says whether it
    did; None where none can. It is written as source: a loop over arguments would take twice as long."""
    if not isinstance(kernel, JITFunction) or any(p.is_constexpr for p in kernel.params[:len(types)]):
        return None
    names = [f"a{i}" for i in range(len(types))]
    pointers, key, passed = [], ["*constants", "*constants.values()"], []
    for name, kind, parameter in zip(names, types, kernel.params, strict=False):
        passed.append(name)
        if kind in _TENSORS:
            passed[-1] = f"p{name}"
            pointers.append(name)
            key.append(f"{name}.dtype")
        elif kind in (int, bool):
            if not parameter.do_not_specialize:
                key.append(name)
            elif not parameter.annotation_type:
                key.append(f"-{_INT32} <= {name} < {_INT32}")
        elif kind is TensorDescriptor:   # aligned, or it would not be one
            key.append(f"{name}.base.dtype, {name}.padding, *{name}.block_shape")
        elif kind not in (float, type(None)):
            return None
    if not pointers:
        return None
    kept: dict[tuple, tuple] = {}

    def keep(key, grid, constants, arguments):
        compiled = kernel[grid](*arguments, **constants)
        if hasattr(compiled, "packed_metadata"):
            if len(kept) >= MOST:
                kept.clear()
            rest = tuple(constants.get(p.name, p.default) for p in kernel.params[len(arguments):])
            kept[key] = compiled.run, compiled.function, compiled.packed_metadata, rest, compiled
        return True

    # Chains of hooks, in place of which anything may have been put.
    hooked = " or ".join(f"runtime.{name} is not {name} or {name}.calls" for name in _CHAINS)
    source = f"""
def find(grid, constants, {", ".join(names)}):
    {"; ".join(f"p{name} = {name}.data_ptr()" for name in pointers)}
    if ({" | ".join(f"p{name}" for name in pointers)}) & 15 or hooks or runtime.debug or {hooked}:
        return False
    active = driver.active
    device = {pointers[0]}.get_device()
    if device < 0:   # a tensor of a CPU, for what stands for a GPU
        device = active.get_current_device()
    key = device, {", ".join(key)}
    found = kept.get(key)
    if found is None:
        return keep(key, grid, constants, ({", ".join(names)},))
    run, function, metadata, rest, _ = found
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    run(x, y, z, active.get_current_stream(device), function, metadata, None, None, None,
        {", ".join(passed)}, *rest)
    return True
"""
    space = {"kept": kept, "keep": keep, "driver": driver, "hooks": kernel.pre_run_hooks, "runtime": knobs.runtime,
             **{name: getattr(knobs.runtime, name) for name in _CHAINS}}
    exec(source, space)   # of names and numbers made above
    return space["find"]
