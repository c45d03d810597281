"""Replaces the forward of one module instance, and takes the replacement back.

The instance gets a subclass of its own class, as from `torch.distributed.fsdp.fully_shard`. The
class itself, and all other instances, are unchanged; the subclass has the class's name, so that
configurations, reports and lists of class names read as before.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import nn

from tilewright.integrations.transformers.versions import absent

BASE = "_tilewright_base"
# Projections of an MLP, which adapters and quantizers replace, and which are called as before.
SPLIT, MERGED = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
# Of its other attributes: whether one was given a callable since the module's forward was replaced,
# and the names and classes of the children that it had then.
REPLACED, CHILDREN = "_tilewright_replaced", "_tilewright_children"


def replace_forward(module: nn.Module, make: Callable, *options: Any) -> None:
    """Gives the module the forward `make(its class, *options)`.

    make: a function of a module, which pickle finds by name; options: picklable and hashable.
    """
    module.__dict__[CHILDREN] = _children(module)
    module.__class__ = _subclass(type(module), make, options, type(module).forward)


def check_restorable(module: nn.Module) -> None:
    """Raises RuntimeError if another tool has derived a class from the replacement."""
    if getattr(type(module), BASE, None) is not None and BASE not in type(module).__dict__:
        raise RuntimeError(
            f"{type(module).__name__} was given a class of its own after accelerate (as by "
            "fully_shard); restore a model before that"
        )


def is_replaced(module: nn.Module) -> bool:
    """Whether the module has a forward of this library's."""
    return BASE in type(module).__dict__


def put_back(module: nn.Module) -> None:
    """Gives the module its own class again."""
    base = type(module).__dict__.get(BASE)
    if base is not None:
        module.__class__ = base
        module.__dict__.pop(REPLACED, None)
        module.__dict__.pop(CHILDREN, None)


def was_given(module: nn.Module) -> bool:
    """Whether the module was given another callable than projections since its forward was
    replaced, as a layer or an activation, or such a child has hooks.
    """
    return (
        REPLACED in module.__dict__
        or module.__dict__[CHILDREN] != _children(module)
        or any(has_hooks(child) for _, child in _others(module))
    )


def _others(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children that are no projections."""
    found = module._modules.items()
    return [(n, c) for n, c in found if c is not None and n not in (*SPLIT, *MERGED)]


def _children(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Their names and those of their classes, which pickle holds and a replaced forward leaves."""
    return tuple((name, type(child).__qualname__) for name, child in _others(module))


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class's forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def as_before(base: type) -> Callable:
    """A forward that stays: its instance only remembers, when it is unpickled, what it needs."""
    return base.forward


@functools.cache
def _subclass(
    base: type[nn.Module], make: Callable, options: tuple, forward: Callable
) -> type[nn.Module]:
    """forward: base's, which another library may have replaced since the last call."""

    def reduce(self, protocol):
        # pickle and copy find classes by name, and would find the base.
        _, _, *state = base.__reduce_ex__(self, protocol)
        return _new, (base, make, options), *state

    def set_attribute(self, name, value):
        base.__setattr__(self, name, value)
        if callable(value) and name not in (*SPLIT, *MERGED):
            self.__dict__[REPLACED] = True

    names = ("__module__", "__qualname__", "__doc__")
    body = {name: getattr(base, name) for name in names}
    body |= {BASE: base, "forward": make(base, *options), "__reduce_ex__": reduce}
    body["__setattr__"] = set_attribute
    metaclass = cast("Callable[..., type[nn.Module]]", type(base))
    return metaclass(base.__name__, (base,), body)


def _new(base: type[nn.Module], make: Callable, options: tuple) -> nn.Module:
    """An instance without state, for pickle and copy."""
    cls = _subclass(base, make, options, base.forward)
    if hasattr(cls, "set_attn_implementation"):  # its configuration may name the registered entries
        from tilewright.integrations.transformers.tables import register_once

        register_once()
    return cls.__new__(cls)


def own_function(function: Callable) -> FunctionType | None:
    """The Python function below its decorators, or None."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function if isinstance(function, FunctionType) else None


def with_globals(function: Callable, space: dict[str, Any]) -> FunctionType | None:
    """A copy of a function whose own code, below its decorators, looks names up in `space`.

    The decorators are kept: each is copied with what it wraps replaced. None if one of them does
    not hold what it wraps in its closure, as `functools.wraps` decorators do.
    """
    if not isinstance(function, FunctionType):
        return None
    wrapped = getattr(function, "__wrapped__", None)
    cells = function.__closure__ or ()
    if wrapped is not None:
        inner = with_globals(wrapped, space)
        places = [_content(cell) is wrapped for cell in cells]
        if inner is None or not any(places):
            return None
        cells = [
            CellType(inner) if is_place else cell
            for cell, is_place in zip(cells, places, strict=True)
        ]
        space = function.__globals__
    copied = FunctionType(
        function.__code__, space, function.__name__, function.__defaults__, tuple(cells)
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copied, function)
    if wrapped is None:
        del copied.__wrapped__
    else:
        copied.__wrapped__ = inner
    return copied


def called_by(cls: type, names: Iterable[str]) -> dict[str, Callable]:
    """The functions of these names that a class's forward calls."""
    own = own_function(cls.forward)
    if own is None:
        return {}
    space, used = own.__globals__, own.__code__.co_names
    return {n: space[n] for n in names if n in used and callable(space.get(n))}


def calling(base: type, chosen: dict[str, Callable]) -> FunctionType | str:
    """The class's own forward, in a namespace where these functions stand for those of their names;
    or the reason why it cannot be made.
    """
    own = own_function(base.forward)
    copied = None
    if own is not None:
        space = own.__globals__
        # Whatever another library has replaced there since: the copies hold what they were made of,
        # so that no other object gets the same id.
        now = tuple((key, id(value)) for key, value in space.items() if key != "__builtins__")
        copied = with_globals(
            base.forward, _namespace(space["__name__"], tuple(sorted(chosen.items())), now).__dict__
        )
    if copied is None:
        return absent(f"forward of {base.__name__} below a decorator that keeps it in its closure")
    return copied


@functools.cache
def _namespace(name: str, chosen: tuple[tuple[str, Any], ...], now: tuple) -> ModuleType:
    """A copy of a module with the values of `chosen`.   now: what the names of the module are.

    It can be imported: torch.compile looks the names of its functions up there.
    """
    module = sys.modules[name]
    number = sum(key.startswith(f"{__name__}.") for key in sys.modules)
    copied = ModuleType(f"{__name__}.{name.replace('.', '_')}_{number}")
    copied.__dict__.update({k: v for k, v in module.__dict__.items() if k != "__name__"})
    copied.__dict__.update(chosen)
    sys.modules[copied.__name__] = copied
    return copied


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def probe(module: nn.Module, *, parameters=None, modules=None) -> nn.Module:
    """A shallow copy without hooks whose parameters or children are replaced, on which the class's
    own forward can be evaluated without touching the module.
    """
    copied = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__)
    copied.__dict__["_parameters"] = dict(module._parameters) | (parameters or {})
    copied.__dict__["_modules"] = dict(module._modules) | (modules or {})
    copied.__dict__["training"] = True  # where dropout of its own shows
    return copied


@contextlib.contextmanager
def on_plain_numbers() -> Iterator[None]:
    """float32 on the CPU, for probes: `from_pretrained` builds models on meta, in their dtype.
    Random numbers that a probe draws are drawn again.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.device("cpu"),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=()),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)


def generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)
