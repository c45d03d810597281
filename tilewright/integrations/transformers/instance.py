"""Replaces the forward of one module instance, and takes the replacement back.

The instance gets a subclass of its own class, as from `torch.distributed.fsdp.fully_shard`. The
class itself, and all other instances, are unchanged; the subclass has the class's name, so that
configurations, reports and lists of class names read as before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from tilewright.integrations.transformers.known import read_by
from tilewright.integrations.transformers.tables import register_once

BASE = "_tilewright_base"
# Projections of an MLP, which adapters and quantizers replace, and which are called as before.
SPLIT, MERGED = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
# Numbers and flags that replaced forwards read at each call, or that nothing depends on.
READ, PLAIN = {"eps", "variance_epsilon", "training"}, (int, float, str, type(None))
# The first is set on a module whose other attributes were given a callable, or another number or
# flag that the module's own forward may read, since that forward was replaced. The second holds the
# names and classes of the children that the module had then.
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
        was_changed(module)
        or module.__dict__[CHILDREN] != _children(module)
        or any(has_hooks(child) for _, child in _others(module))
    )


def was_changed(module: nn.Module) -> bool:
    """Whether an attribute that the module's own forward may read, and the replacement does not,
    was set since the forward was replaced.
    """
    return REPLACED in module.__dict__


def _others(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children that are no projections."""
    children = module._modules.items()
    return [(n, c) for n, c in children if c is not None and n not in (*SPLIT, *MERGED)]


def _children(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Names and class names of `_others`; pickle holds them, and a replaced forward leaves them."""
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
    """The class's own forward, for a model that must register this library's entries when it is
    unpickled.
    """
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

    read = read_by(base) - READ

    def set_attribute(self, name: str, value: Any) -> None:
        plain = issubclass(type(value), PLAIN)
        other = plain and name in read and value != getattr(self, name, None)
        base.__setattr__(self, name, value)
        if other or (callable(value) and name not in (*SPLIT, *MERGED)):
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
        register_once()
    return cls.__new__(cls)


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
