"""Argument checks shared by public functions. Each raises one error that names the argument, its
value and what is accepted: TypeError for a wrong type or dtype, ValueError for a wrong shape or
value.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilewright.core.library import define
from tilewright.core.registry import FLOATS, ImplementationUnavailable, short
from tilewright.core.takes import FLOAT

# Read in every call: a module's own names take half the time of torch's.
Tensor, STRIDED = torch.Tensor, torch.strided


def floating(name: str, t: torch.Tensor) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.dtype not in FLOAT:
        raise TypeError(
            f"{name} must be one of {', '.join(map(short, FLOAT))}, got {short(t.dtype)}"
        )
    if t.layout is not STRIDED or t.is_nested:  # `dense`, without a call where it is
        dense(name, t)


def dense(name: str, t: torch.Tensor) -> None:
    if t.layout != torch.strided or t.is_nested:  # kernels read memory
        raise TypeError(
            f"{name} must be a strided (dense) tensor, got "
            f"{'a nested one' if t.is_nested else f'layout {short(t.layout)}'}"
        )


def number(name: str, value: object, low: float, high: float, accepted: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not low <= value <= high:  # also NaN, and ints that no float represents
        raise ValueError(f"{name} must be {accepted}, got {value!r}")


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether elements of t may share memory: a stride is no larger than the extent of the
    dimensions with smaller strides.
    """
    if t.numel() == 0:
        return False
    last = 0  # the largest offset so far
    for stride, n in sorted(
        (stride, n) for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1
    ):
        if stride <= last:
            return True
        last += (n - 1) * stride
    return False


def overwritable(name: str, t: torch.Tensor) -> None:
    """Raises ValueError for a tensor that backward cannot overwrite with its gradient."""
    if torch.compiler.is_compiling():
        raise ValueError(
            "inplace must be False under torch.compile, which plans memory itself, got True; or "
            "keep the loss outside the compiled region"
        )
    # Gradients would overwrite elements that are yet to be read.
    if overlaps_itself(t):
        raise ValueError(
            f"inplace=True cannot overwrite {name} whose elements share memory, got shape "
            f"{list(t.shape)} with strides {list(t.stride())}; pass {name}.contiguous() "
            "or inplace=False"
        )


# The behavior of an op under torch.autocast: that of PyTorch's function for it on this device type.
CONVENTIONS = {
    "products": "as `F.linear` and `F.scaled_dot_product_attention`: computes in autocast's dtype",
    "norm": "as `F.rms_norm`: computes in float32 and returns it; on a CPU, whose lists leave "
    "norms out, in the inputs' dtype",
    "float32": "as `F.cross_entropy`: statistics and results are float32 whatever the inputs are, "
    "so nothing is cast",
    "inputs": "as `F.silu`: follows the dtypes of its inputs",
}


class Autocast(NamedTuple):
    """convention: one of CONVENTIONS.   arguments: those that it casts."""

    convention: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        cast = f"; casts {', '.join(self.arguments)}" if self.arguments else ""
        return f"{CONVENTIONS[self.convention]}{cast}"


def autocasts(device: str) -> bool:
    """Whether autocast is on; False for a device type that has none, such as meta."""
    return (
        device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)
    ) and torch.is_autocast_enabled(device)


def parameters_of(fn: Any) -> tuple[str, ...]:
    """The names of fn's parameters, which `takes` may have read already."""
    return getattr(fn, "parameters", None) or tuple(inspect.signature(fn).parameters)


def autocast(convention: str, *arguments: str) -> Callable[[Callable], Callable]:
    """A decorator that gives a public function its torch.autocast behavior. `Op.autocast` reads it.

    convention: one of CONVENTIONS.
    arguments: tensors that "products" and "norm" cast, the function's first argument first, whose
        device type decides.

    As in PyTorch, each tensor is cast by itself if it is float32, bfloat16 or float16 (not float64)
    and on that device type; its gradient has its own dtype. Within "products" autocast is off.
    Casts come before checks of dtypes. Where autocast is off, a call costs one query. An argument
    may be a field of a NamedTuple that is a parameter.
    """

    def decorate(fn):
        fn.autocast = Autocast(convention, arguments)
        if not arguments:
            return fn
        names = parameters_of(fn)
        groups = getattr(fn, "groups", {})
        fields = {n: kind for kind in groups.values() for n in kind._fields if n in arguments}
        assert names[0] == arguments[0] and set(arguments) <= {*names, *fields}
        kinds = tuple({*fields.values()})
        cast_names = frozenset((*arguments, *(n for n, kind in groups.items() if kind in kinds)))
        places = frozenset(i for i, name in enumerate(names) if name in cast_names)

        @functools.wraps(fn)
        def following(*args, **kwargs):
            tensor = args[0] if args else kwargs.get(names[0])
            if not isinstance(tensor, torch.Tensor):
                return fn(*args, **kwargs)
            # The two flags are faster than the device's type.
            device = "cuda" if tensor.is_cuda else "cpu" if tensor.is_cpu else tensor.device.type
            if not autocasts(device):
                return fn(*args, **kwargs)
            products = convention == "products"
            if not products and device == "cpu":
                return fn(*args, **kwargs)
            dtype = torch.get_autocast_dtype(device) if products else torch.float32

            def cast(t):
                if isinstance(t, kinds):
                    return t._replace(**{n: cast(getattr(t, n)) for n in t._fields if n in fields})
                fits = isinstance(t, torch.Tensor) and t.dtype in FLOATS and t.device.type == device
                return t.to(dtype) if fits else t

            args = [cast(t) if i in places else t for i, t in enumerate(args)]
            kwargs = {name: cast(t) if name in cast_names else t for name, t in kwargs.items()}
            if not products:
                return fn(*args, **kwargs)
            try:
                with torch.autocast(device, enabled=False):
                    return fn(*args, **kwargs)
            except ImplementationUnavailable as error:
                # The dtype in its message may not be the caller's.
                raise ImplementationUnavailable(
                    f"{error}; under torch.autocast, which makes {', '.join(arguments)} "
                    f"{short(dtype)}"
                ) from None

        return following

    return decorate


def torch_names(**ours: str) -> Callable[[Callable], Callable]:
    """A decorator: the function's error for a keyword that only PyTorch has suggests its name here.

    ours: PyTorch's name of an argument -> the function's name of it, or a sentence that says what
        to use instead.
    """

    def decorate(fn):
        known = parameters_of(fn)
        assert not set(ours) & set(known)  # a name that exists needs no answer

        @functools.wraps(fn)
        def named(*args, **kwargs):
            for name in kwargs:
                if name not in known:
                    raise TypeError(_unknown_keyword(fn, name, known, ours))
            return fn(*args, **kwargs)

        return named

    return decorate


def _unknown_keyword(fn: Callable, name: str, known: tuple[str, ...], ours: dict[str, str]) -> str:
    what = fn.__qualname__.removesuffix(".__init__")
    hint = ours.get(name)
    if hint is None:
        nearest = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {nearest[0]}?" if nearest else "see help() for its arguments"
    elif hint in known:
        hint = f"it is {hint} here"
    return f"{what}() has no argument {name}: {hint}"


def no_autocast(t: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context without autocast on t's device: kernels do not follow it, so their substitutes in
    PyTorch must not either.
    """
    return (
        torch.autocast(t.device.type, enabled=False)
        if autocasts(t.device.type)
        else contextlib.nullcontext()
    )


def same_device(**tensors: torch.Tensor | None) -> None:
    """Raises ValueError unless all tensors that are not None are on one device."""
    first = device = None
    for name, t in tensors.items():
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if device is None:
            first, device = name, t.device
        elif t.device != device:
            raise ValueError(
                f"{name} is on {t.device}, {first} on {device}; they must be on one device"
            )


def shape(name: str, t: Any, expected: tuple[int, ...], why: str) -> None:
    if t.shape != expected and tuple(t.shape) != tuple(expected):
        raise ValueError(f"{name} must have shape {list(expected)} ({why}), got {list(t.shape)}")


def choice(name: str, value: object, accepted: tuple) -> None:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {list(accepted)}, got {value!r}")


def cu_seqlens(cu: torch.Tensor, tokens: int, *, wait: bool) -> torch.Tensor:
    """Checks that cu_seqlens, int32 or int64 [documents + 1], rises from 0 to `tokens` without
    decreasing, and returns it as int64.

    wait: also check the values on a CUDA device, which synchronizes. On a CPU they are always
        checked, in compiled code at run time: the check is an operator, whose result the caller
        must use.
    """
    if wait and cu.is_meta:
        raise ValueError(
            "cu_seqlens must be on a device that holds values, since the number of documents "
            "depends on them; got one on meta"
        )
    return _checked_cu_seqlens(cu, tokens, wait)


def _cu_seqlens(cu: torch.Tensor, tokens: int, wait: bool) -> torch.Tensor:
    if wait or not cu.is_cuda:
        ends = cu.tolist()
        if ends[0] != 0:
            raise ValueError(f"cu_seqlens must start at 0, got {ends[0]}")
        for i, (a, b) in enumerate(itertools.pairwise(ends)):
            if b < a:
                raise ValueError(
                    f"cu_seqlens must not decrease, got {b} after {a} at index {i + 1}"
                )
        if ends[-1] != tokens:
            raise ValueError(
                f"cu_seqlens must end at {tokens}, the number of tokens, got {ends[-1]}"
            )
    return cu.to(torch.int64, copy=True)


_checked_cu_seqlens = define(
    "checked_cu_seqlens",
    _cu_seqlens,
    lambda cu, tokens, wait: torch.empty_like(cu, dtype=torch.int64),
    plain=lambda cu, tokens, wait: cu.to(torch.int64),
)
