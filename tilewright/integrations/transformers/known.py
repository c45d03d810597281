"""What of a model's code is known: transformers' and PyTorch's own, and what is plain arithmetic.

Whether a module computes what an op does is found by evaluating it on a few numbers (`layers.py`).
For transformers' own classes that is enough. Others' code may compute something else in another
dtype, for another length, without gradients, for larger numbers, or once an attribute is changed:
it is replaced only if it is one straight line of arithmetic on its input, its weights and its
children. What cannot be known is left.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Collection, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from tilewright.integrations.transformers.functions import own_function

# fla and causal_conv1d: transformers takes functions of theirs in the place of its own.
PACKAGES = "transformers", "torch", "tilewright", "fla", "causal_conv1d"
# What straight lines may ask of tensors and of PyTorch: the same whatever they are.
ARITHMETIC = {
    *("nn", "functional", "Tensor", "dtype", "float32", "to", "float", "type_as", "type"),
    *("pow", "square", "mean", "sum", "rsqrt", "sqrt", "mul", "div", "add", "reciprocal", "chunk"),
    *("silu", "sigmoid", "gelu", "rms_norm"),
}
# Parts of the names of instructions that are not in a straight line of arithmetic.
BRANCHES = ("JUMP", "COMPARE", "IS_OP", "CONTAINS", "FOR_ITER")
OTHERS = ("STORE_ATTR", "GLOBAL_STORE", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE", "IMPORT", "DEREF")
OTHERS += ("CLOSURE", "MAKE_FUNCTION", "WITH", "SUBSCR", "SLICE", "YIELD", "RAISE", "SUPER")
# What a branch may depend on, of a function that is given tensors alone.
DEPENDS = {
    *("dtype", "shape", "size", "numel", "dim", "ndim", "device", "is_cuda", "requires_grad"),
    *("is_grad_enabled", "is_inference_mode_enabled", "is_inference", "is_autocast_enabled"),
    *("max", "min", "amax", "amin", "any", "all", "item", "abs", "training"),
}


def _is_of(name: Any) -> bool:
    return isinstance(name, str) and name.partition(".")[0] in PACKAGES


def is_known(function: Any) -> bool:
    """Whether the code of a function, below its decorators, is of one of PACKAGES."""
    own = own_function(function)
    if own is None:  # compiled, or an object
        return _is_of(getattr(function, "__module__", None) or type(function).__module__)
    return _is_of(own.__globals__.get("__name__"))


def is_known_class(cls: type) -> bool:
    """Whether a class of modules, all that it derives from, and all functions that they have, are
    of PACKAGES.
    """
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        if not _is_of(base.__module__):
            return False
        for value in vars(base).values():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType) and not is_known(function):
                return False
    return True


def read_by(cls: type) -> frozenset[str]:
    """Names that a class's forward, or another function of the class, may read of its instance."""
    return _read_by(cls, cls.forward)


@functools.cache
def _read_by(cls: type, forward: Callable) -> frozenset[str]:
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    functions = [own_function(v) for base in bases for v in vars(base).values()]
    codes = [f.__code__ for f in (own_function(forward), *functions) if f is not None]
    return frozenset(name for code in codes for name in code.co_names)


def why_unknown(module: nn.Module, attributes: Collection[str]) -> str | None:
    """Why nobody can tell that a module computes the same wherever it is called, or None.

    attributes: those that its forward may read: weights, children and what a replaced forward reads
        at each call.
    """
    own = [v for v in module.__dict__.values() if isinstance(v, FunctionType | types.MethodType)]
    children = [child for child in module.children() if not is_known_class(type(child))]
    if is_known_class(type(module)) and all(is_known(f) for f in own):
        others = [c for c in children if c not in _projections(module)]
        return f"calls {type(others[0]).__name__}, whose code is not known" if others else None
    cls = type(module)
    if cls.__call__ is not nn.Module.__call__ or cls.__getattr__ is not nn.Module.__getattr__:
        return "has a way of its own to be called or to get attributes"
    return next(_unknown(module, cls.forward, frozenset(attributes), set()), None)


def _projections(module: nn.Module) -> list[nn.Module | None]:
    return [child for name, child in module._modules.items() if name.endswith("_proj")]


def _unknown(
    module: nn.Module, function: Any, attributes: frozenset[str], seen: set[str]
) -> Iterator[str]:
    """What is not known of a function of the module's class."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        yield "has a decorated forward, or one that is no function"
        return
    for instruction in dis.get_instructions(function):
        operation, name = instruction.opname, instruction.argval
        if any(part in operation for part in BRANCHES):
            yield "has a forward of its own with branches"
        elif any(part in operation for part in OTHERS):
            yield f"has a forward of its own that is no plain arithmetic ({operation})"
        elif operation == "LOAD_GLOBAL":
            value = function.__globals__.get(name)
            if not (isinstance(value, types.ModuleType) and _is_of(value.__name__)):
                yield f"has a forward of its own that reads the global {name}"
        elif operation in ("LOAD_ATTR", "LOAD_METHOD") and name not in attributes | seen:
            method = getattr(type(module), name, None)
            if not hasattr(module, name) or method is getattr(nn.Module, name, ()):
                if name not in ARITHMETIC or name in module.__dict__:
                    yield f"has a forward of its own that reads or calls {name}"
            elif isinstance(method, FunctionType):
                yield from _unknown(module, method, attributes, seen | {name})
            else:
                yield f"reads {name}, which may change"


def may_depend(function: Callable) -> bool:
    """Whether a function of tensors alone, not of PACKAGES, branches and asks what a branch may
    depend on: a dtype, a size, a mode, a value.
    """
    names, branches = set(), False
    waiting: list[Any] = [function]
    seen = []
    while waiting:
        own = own_function(waiting.pop())
        if own is None or own in seen or is_known(own):
            continue
        seen.append(own)
        names |= {*own.__code__.co_names}
        operations = [i.opname for i in dis.get_instructions(own)]
        branches |= any(part in o for o in operations for part in ("JUMP", "COMPARE"))
        waiting += [own.__globals__.get(n) for n in own.__code__.co_names]
        waiting += [_content(cell) for cell in own.__closure__ or ()]
    modes = {n for n in names if n.startswith("is_") and n in DEPENDS}
    return bool(modes) or (branches and not names.isdisjoint(DEPENDS))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


DTYPES = torch.float32, torch.bfloat16, torch.float16
LENGTHS = 1, 5, 300
