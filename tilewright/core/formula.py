"""Autograd formulas that name what they need of the forward pass, by their parameters."""

from __future__ import annotations

import inspect
import linecache
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilewright.core.schema import Signature, described

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


def _returned(function: Callable) -> Any:
    """The annotation of what a function or a NamedTuple returns; None if it has none."""
    if inspect.isfunction(function):
        return typing.get_type_hints(function, include_extras=True).get("return")
    return function if hasattr(function, "_fields") else None


class Formula:
    """The autograd formula of an operator.

    gradients: (backward_op, the gradient of the result, or a NamedTuple of the gradients of several
        results, *the values that its parameters name) -> a dict of the gradients of arguments by
        their names. Missing gradients are zero, and those that are not needed are dropped. A named
        value is kept for backward: an argument, a field of the results, `result` itself, or an
        entry of `computed`; an argument takes precedence over a result of the same name. With a
        parameter `needs`, needs[name] tells whether an argument's gradient is needed.
    computed: name -> a function, or a NamedTuple, whose parameters name arguments and results
        likewise. A function should be annotated to return a tensor or a NamedTuple: calls then take
        less host time, since its value need not be searched for tensors.
    constants: floating-point results without a derivative.
    twice: the formula consists of differentiable calls only.

    Raises TypeError for a parameter that names nothing, and for an entry of `computed` that no
    parameter names.
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


class _Code:
    """The functions `keep` and `kept` of a formula, as code: they are part of each call, and loops
    took four times as long.

    globals: what they read.
    lines: the lines of `keep`, which set what is kept.
    tensors: variables that are tensors or None.
    values: variables without tensors in them.
    others: variables that may have tensors in them, folded (`_fold`).
    """

    def __init__(self) -> None:
        self.globals: dict[str, Any] = {"_fold": _fold, "_unfold": _unfold, "_ATOMS": _ATOMS}
        self.lines: list[str] = []
        self.tensors: list[str] = []
        self.values: list[str] = []
        self.others: list[str] = []

    def place(self, name: str, argument: Any) -> str:
        """Keeps the variable of this name; returns what `kept` has for it.

        argument: what the signature knows of it; None: nothing.
        """
        if argument is not None and argument.is_tensor:
            self.tensors.append(name)
        elif argument is not None and (fields := argument.fields) and argument.tensors:
            return self._place_fields(name, argument, fields)
        elif argument is not None and not (argument.tensors or argument.list_of_tensors):
            self.values.append(name)
        else:
            kept = f"{name}__folded"
            self.lines += [
                f"    {kept} = {name}",
                f"    if type({kept}) not in _ATOMS:",
                f"        {kept} = _fold({kept}, _rest)",
            ]
            self.others.append(kept)
            return f"_unfold({kept}, _rest)"
        return name

    def _place_fields(self, name: str, argument: Any, fields: Sequence[Any]) -> str:
        """Keeps the fields of a NamedTuple, or of None."""
        self.globals[f"{name}__made"] = argument.made
        given = name
        if argument.optional:
            given = f"{name} or {(None,) * len(fields)}"
            self.lines.append(f"    {name}__is = {name} is not None")
            self.values.append(f"{name}__is")
        names = [f"{name}__{field.name}" for field in fields]
        self.lines.append(f"    [{', '.join(names)}] = {given}")
        parts = ", ".join([self.place(*pair) for pair in zip(names, fields, strict=True)])
        made = f"{name}__made(({parts},))"
        return f"({made} if {name}__is else None)" if argument.optional else made


def _generated(
    gradients: Callable,
    names: Sequence[str],
    signature: Signature,
    computed: Mapping[str, Callable],
) -> tuple[Callable[[Any, Sequence, Any], None], Callable[[Any], list]]:
    """The functions `keep` and `kept` of these names."""
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

    code, back = _Code(), []
    for name in names:
        if name in computed:
            function = computed[name]
            given = [known(n, function) for n in inspect.signature(function).parameters]
            code.globals[f"{name}__of"] = function
            code.lines.append(f"    {name}__computed = {name}__of({', '.join(given)})")
            back.append(code.place(f"{name}__computed", described(_returned(function))))
        elif known(name, gradients) in arguments:
            back.append(code.place(name, arguments[name]))
        else:
            of_result = torch.Tensor if name in results else signature.annotated
            back.append(code.place(name, described(of_result)))
    fields = ["_" if name in arguments else name for name in results]
    directly, some = ", ".join([*code.values, *code.others]), bool(code.others)
    saved = ", ".join([*code.tensors, *["*_rest"] * some])  # _rest: the tensors of the others
    source = [
        "def keep(_ctx, _arguments, result):",
        f"    [{', '.join(arguments)}] = _arguments",
        *([f"    [{', '.join(fields)}] = result"] if results else []),
        *["    _rest = []"] * some,
        *code.lines,
        f"    _ctx.kept = [{directly}]",
        f"    _ctx.save_for_backward({saved})",
        "def kept(_ctx):",
        f"    [{saved}] = _ctx.saved_tensors",
        f"    [{directly}] = _ctx.kept",
        *["    _rest = iter(_rest)"] * some,
        f"    return [{', '.join(back)}]",
    ]
    made: dict[str, Any] = {}
    file = f"<what {_name(gradients)} keeps>"
    linecache.cache[file] = (0, None, [f"{line}\n" for line in source], file)
    exec(compile("\n".join(source), file, "exec"), code.globals, made)
    return made["keep"], made["kept"]
