"""Autograd formulas that name what they need of the forward pass, by their parameters."""

from __future__ import annotations

import inspect
import operator
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


def _picker(places: Sequence[int]) -> Callable[[Sequence], tuple]:
    """values -> those at these places."""
    if len(places) > 1:
        return operator.itemgetter(*places)  # which does not go through Python
    return lambda values: tuple([values[i] for i in places])


class Formula:
    """The autograd formula of an operator.

    gradients: (backward_op, gradient of the result; with a NamedTuple of results, one of theirs,
        *what it names) -> a dict of the gradients of arguments by their names. Missing ones are
        zero, and those that are not needed are dropped. What it names is kept: an argument, a field
        of the results, `result` itself, or what `computed` has of that name; an argument comes
        before a result. With a parameter `needs`, needs[name] tells whether an argument's gradient
        is needed.
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
        results: tuple[str, ...] = getattr(signature.result, "_fields", ())
        self.constants = [results.index(name) for name in constants]
        self._structured = bool(results)
        names = list(inspect.signature(gradients).parameters)[2:]
        self.asks = "needs" in names
        names = [n for n in names if n != "needs"]
        for name in computed:
            if name not in names:
                raise TypeError(f"{_name(gradients)}: no parameter is named {name!r}, got {names}")
        # In `keep`, the values of these names: an argument comes before a result.
        self._known = [*(a.name for a in signature.arguments), "result", *results]
        arguments = {argument.name: argument for argument in signature.arguments}
        tensors, values, others = [], [], []
        for name in names:
            argument = arguments.get(name)
            if name in computed:
                others.append(name)
            elif argument is None:
                (others if name == "result" else tensors).append(name)
            elif not argument.tensors and not argument.list_of_tensors:
                values.append(name)
            else:
                (tensors if argument.is_tensor else others).append(name)
        self._tensors = _picker([self._place(n, gradients) for n in tensors])
        self._values = _picker([self._place(n, gradients) for n in values])
        self._others = [self._read(n, gradients, computed.get(n)) for n in others]
        self._directly, self._saved = len(values), len(tensors)
        order = [*tensors, *values, *others]
        self._in_order = _picker([order.index(n) for n in names])

    def _place(self, name: str, of: Callable) -> int:
        if name in self._known:
            return self._known.index(name)
        known = [n for n in self._known if n != "result"]
        raise TypeError(
            f"{_name(of)}: a parameter must name one of {known}, or what is computed for it, got "
            f"{name!r}"
        )

    def _read(self, name: str, of: Callable, function: Callable | None) -> tuple:
        if function is None:
            return (lambda value: value), _picker([self._place(name, of)])
        parameters = inspect.signature(function).parameters
        return function, _picker([self._place(n, function) for n in parameters])

    def keep(self, ctx: Any, arguments: Sequence, result: Any) -> None:
        """Keeps what the formula names, as the function `keep`. Fast: it is part of each call."""
        found = (*arguments, result, *result) if self._structured else (*arguments, result)
        tensors, values = self._tensors(found), self._values(found)
        if self._others:
            also: list[torch.Tensor] = []
            others = [_fold(function(*pick(found)), also) for function, pick in self._others]
            tensors, values = (*tensors, *also), (*values, *others)
        ctx.kept = values
        ctx.save_for_backward(*tensors)

    def kept(self, ctx: Any) -> tuple:
        """What `keep` kept, in the order of the parameters. Call it once, as the function."""
        saved, values = ctx.saved_tensors, ctx.kept
        if self._others:
            also, n = iter(saved[self._saved :]), self._directly
            others = [_unfold(part, also) for part in values[n:]]
            saved, values = saved[: self._saved], (*values[:n], *others)
        return self._in_order((*saved, *values))

    def __call__(self, ctx: Any, grad: Any, needs: Any, backward_op: Any) -> dict[str, Any]:
        if self.asks:
            return self.gradients(backward_op, grad, *self.kept(ctx), needs=needs)
        return self.gradients(backward_op, grad, *self.kept(ctx))
