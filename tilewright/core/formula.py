"""Autograd formulas that name what they need of the forward pass, by their parameters."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilewright.core.schema import Signature

_SAVED = object()  # in place of a tensor
# Which have no tensors in them.
_ATOMS = frozenset((type(None), bool, int, float, str, torch.dtype))


class _Folded:
    """A sequence with tensors in it, without them."""

    __slots__ = "kind", "parts"

    def __init__(self, kind: type, parts: list):
        self.kind, self.parts = kind, parts


def _fold(value: Any, tensors: list) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _SAVED
    if isinstance(value, (tuple, list)):
        before = len(tensors)
        parts = [p if type(p) in _ATOMS else _fold(p, tensors) for p in value]
        return value if len(tensors) == before else _Folded(type(value), parts)
    return value


def _unfold(part: Any, tensors: Any) -> Any:
    if part is _SAVED:
        return next(tensors)
    if type(part) is _Folded:
        values = [p if type(p) in _ATOMS else _unfold(p, tensors) for p in part.parts]
        return values if part.kind is list else tuple.__new__(part.kind, values)
    return part


def keep(ctx: Any, values: Sequence[Any]) -> None:
    """Keeps values for backward: tensors, also those in tuples and lists, as autograd saves them,
    and all else as it is. Once per context.
    """
    tensors: list[torch.Tensor] = []
    ctx.kept = [_fold(value, tensors) for value in values]
    ctx.save_for_backward(*tensors)


def kept(ctx: Any) -> list[Any]:
    """What `keep` kept. Call it once: checkpointing returns saved tensors once."""
    tensors = iter(ctx.saved_tensors)
    return [_unfold(part, tensors) for part in ctx.kept]


def _name(function: Callable) -> str:
    return f"{function.__module__}.{function.__qualname__}"


class Formula:
    """The autograd formula of an operator.

    gradients: (backward_op, gradient of the result; with a NamedTuple of results, one of theirs,
        *what it names) -> a dict of the gradients of arguments by their names. Missing ones are
        zero, and those that are not needed are dropped. What it names is kept: an argument, a field
        of the results, `result` itself, or what `computed` has of that name; an argument comes
        before a result. With a parameter `needs`, needs[name] tells whether an argument's gradient
        is needed.
    computed: name -> a function, or a NamedTuple, whose parameters name arguments and results
        likewise.
    constants: floating-point results without a derivative.
    twice: the formula consists of differentiable calls only.

    Raises TypeError for a parameter that names nothing, and for what is computed for none.
    """

    def __init__(
        self,
        gradients: Callable,
        signature: Signature,
        computed: Mapping[str, Callable],
        constants: Sequence[str],
        twice: bool,
    ):
        self.gradients, self.twice = gradients, twice
        results: tuple[str, ...] = getattr(signature.result, "_fields", ())
        self.constants = [results.index(name) for name in constants]
        names = list(inspect.signature(gradients).parameters)[2:]
        self.asks = "needs" in names
        # (ctx, arguments, result), and ctx -> what was kept, in the order of the names.
        self.keep, self.kept = _generated(
            gradients, [n for n in names if n != "needs"], signature, computed
        )

    def __call__(self, ctx: Any, grad: Any, needs: Any, backward_op: Any) -> dict[str, Any]:
        if self.asks:
            return self.gradients(backward_op, grad, *self.kept(ctx), needs=needs)
        return self.gradients(backward_op, grad, *self.kept(ctx))


def _holds(name: str, argument: Any) -> str:
    """What a value of this name is: "tensors", one or None; "values", which have none in them; or
    "others", which may. argument: None for a result.
    """
    if argument is None:
        return "others" if name == "result" else "tensors"
    if argument.is_tensor:
        return "tensors"
    return "others" if argument.tensors or argument.list_of_tensors else "values"


def _generated(
    gradients: Callable,
    names: Sequence[str],
    signature: Signature,
    computed: Mapping[str, Callable],
) -> tuple[Callable[[Any, Sequence, Any], None], Callable[[Any], list]]:
    """The functions `keep` and `kept` of these names, as code: they are part of each call, and
    loops took four times as long.
    """
    arguments = {argument.name: argument for argument in signature.arguments}
    results: tuple[str, ...] = getattr(signature.result, "_fields", ())
    for name in computed:
        if name not in names:
            raise TypeError(f"{_name(gradients)}: no parameter is named {name!r}, got {[*names]}")

    def known(name: str, of: Callable) -> str:
        if name in arguments or name in results or name == "result":
            return name
        raise TypeError(
            f"{_name(of)}: a parameter must name an argument or a result, one of "
            f"{[*arguments, *results]}, or a function given to formula(), got {name!r}"
        )

    globals_: dict[str, Any] = {"_fold": _fold, "_unfold": _unfold, "_ATOMS": _ATOMS}
    parts: dict[str, list[str]] = {"tensors": [], "values": [], "others": []}
    lines, back = [], []
    for name in names:
        if name in computed:
            globals_[f"computed_{name}"] = function = computed[name]
            given = [known(n, function) for n in inspect.signature(function).parameters]
            value, holds = f"computed_{name}({', '.join(given)})", "others"
        else:
            value, holds = known(name, gradients), _holds(name, arguments.get(name))
        if holds == "others":
            lines += [f"    kept_{name} = {value}", f"    if type(kept_{name}) not in _ATOMS:"]
            lines += [f"        kept_{name} = _fold(kept_{name}, _tensors)"]
        parts[holds].append(f"kept_{name}" if holds == "others" else name)
        back.append(f"_unfold(kept_{name}, _rest)" if holds == "others" else name)
    directly = ", ".join([*parts["values"], *parts["others"]])
    fields = ["_" if name in arguments else name for name in results]
    source = [
        "def keep(_ctx, _arguments, result):",
        f"    [{', '.join(arguments)}] = _arguments",
        *([f"    [{', '.join(fields)}] = result"] if results else []),
        f"    _tensors = [{', '.join(parts['tensors'])}]",
        *lines,
        f"    _ctx.kept = [{directly}]",
        "    _ctx.save_for_backward(*_tensors)",
        "def kept(_ctx):",
        f"    [{', '.join([*parts['tensors'], '*_rest'])}] = _ctx.saved_tensors",
        f"    [{directly}] = _ctx.kept",
        "    _rest = iter(_rest)",
        f"    return [{', '.join(back)}]",
    ]
    made: dict[str, Any] = {}
    file = f"<what {_name(gradients)} keeps>"
    linecache.cache[file] = (0, None, [f"{line}\n" for line in source], file)
    exec(compile("\n".join(source), file, "exec"), globals_, made)
    return made["keep"], made["kept"]
