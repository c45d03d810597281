"""Autograd formulas that name what they need of the forward pass, by their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilewright.core.schema import Signature

_SAVED = object()  # in place of a tensor


class _Folded:
    """A sequence with tensors in it, without them."""

    def __init__(self, kind: type, parts: list):
        self.kind, self.parts = kind, parts


def _fold(value: Any, tensors: list) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _SAVED
    if isinstance(value, (tuple, list)):
        before = len(tensors)
        parts = [_fold(part, tensors) for part in value]
        return value if len(tensors) == before else _Folded(type(value), parts)
    return value


def _unfold(part: Any, tensors: Any) -> Any:
    if part is _SAVED:
        return next(tensors)
    if type(part) is _Folded:
        values = [_unfold(p, tensors) for p in part.parts]
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
        before a result.
        With a parameter `needs`, needs[name] tells whether an argument's gradient is needed.
    computed: name -> a function whose parameters name arguments and results likewise.
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
        self.results: tuple[str, ...] = getattr(signature.result, "_fields", ())
        self.constants = [self.results.index(name) for name in constants]
        self._arguments = [argument.name for argument in signature.arguments]
        names = list(inspect.signature(gradients).parameters)[2:]
        for name in computed:
            if name not in names:
                raise TypeError(f"{_name(gradients)}: no parameter is named {name!r}, got {names}")
        self._asks = "needs" in names
        self._readers = [
            self._computed(computed[n]) if n in computed else self._reader(n, gradients)
            for n in names
            if n != "needs"
        ]

    def _reader(self, name: str, of: Callable) -> Callable[[Sequence, Any], Any]:
        """(arguments, result) -> the value of that name."""
        if name in self._arguments:
            i = self._arguments.index(name)
            return lambda arguments, result: arguments[i]
        if name == "result":
            return lambda arguments, result: result
        if name in self.results:
            i = self.results.index(name)
            return lambda arguments, result: result[i]
        known = [*self._arguments, *self.results]
        raise TypeError(
            f"{_name(of)}: a parameter must name one of {known}, or what is "
            f"computed for it, got {name!r}"
        )

    def _computed(self, function: Callable) -> Callable[[Sequence, Any], Any]:
        readers = [self._reader(n, function) for n in inspect.signature(function).parameters]
        return lambda arguments, result: function(*(r(arguments, result) for r in readers))

    def keep(self, ctx: Any, arguments: Sequence, result: Any) -> None:
        keep(ctx, [read(arguments, result) for read in self._readers])

    def __call__(self, ctx: Any, grad: Any, needs: Any, backward_op: Any) -> dict[str, Any]:
        if self._asks:
            return self.gradients(backward_op, grad, *kept(ctx), needs=needs)
        return self.gradients(backward_op, grad, *kept(ctx))
