"""What an operator takes and returns, as its Python code has it, and as PyTorch's schemas do.

Options and tensors that belong together are one NamedTuple in Python. A schema has no such
structures, no process groups and no numbers that may be tensors. For the dispatcher, arguments and
results are therefore flattened, in order, and read back:

    NamedTuple            its fields, under their names; all None for an optional one that is absent
    Tensor | float | None two arguments: the tensor, and the number under its name and "_number"
    ProcessGroup | None   the group's name, "" for None
    result: NamedTuple    its fields, of which an operator returns None for an absent one

Where a call bypasses the dispatcher, only NamedTuples with tensors are written field by field,
since autograd looks for tensors among arguments, and not inside them.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.core import torch_names

PLAIN = (torch.Tensor, torch.nn.Parameter)
_ABSENT = type(None)


class _Leaf:
    """An argument that schemas have.

    leaves: the names and annotations of its flat arguments.
    fields: the fields of a NamedTuple.
    is_tensor: whether it is a tensor or None.
    types: those that launchers take unchanged; the dispatcher converts or refuses others. Empty
        for any.
    """

    fields: Sequence[_Leaf] = ()

    def __init__(self, name: str, annotation: Any):
        self.name, self.leaves = name, [(name, annotation)]
        kinds = _options(annotation)
        self.tensors = torch.Tensor in kinds
        self.list_of_tensors = list[torch.Tensor] in kinds
        self.is_tensor = {*kinds} <= {torch.Tensor, _ABSENT}
        taken = [PLAIN if k is torch.Tensor else (typing.get_origin(k) or k,) for k in kinds]
        self.types: tuple[type, ...] = tuple(t for group in taken for t in group)

    def write(self, value, flat: list) -> None:
        flat.append(value)

    def read(self, flat: Sequence, at: int) -> tuple[Any, int]:
        return flat[at], at + 1


class _Number(_Leaf):
    """A number that may be a tensor."""

    def __init__(self, name: str):
        self.name, self.tensors, self.list_of_tensors = name, True, False
        self.is_tensor = False
        self.leaves = [(name, torch.Tensor | None), (f"{name}_number", float | None)]
        self.types = *PLAIN, float, int, _ABSENT

    def write(self, value, flat):
        if value is None or isinstance(value, torch.Tensor):
            flat += (value, None)
        else:
            flat += (None, float(value))

    def read(self, flat, at):
        return (flat[at + 1] if flat[at] is None else flat[at]), at + 2


class _Group(_Leaf):
    """A process group."""

    def __init__(self, name: str):
        self.name, self.tensors, self.list_of_tensors = name, False, False
        self.is_tensor = False
        self.leaves, self.types = [(name, str)], ()

    def write(self, value, flat):
        flat.append("" if value is None else value.group_name)

    def read(self, flat, at):
        return (torch_names.group_by_name(flat[at]) if flat[at] else None), at + 1


@functools.cache
def _hints(structure: type) -> dict[str, Any]:
    """The types of a structure's fields, cached: many operators take the same structure."""
    return typing.get_type_hints(structure, include_extras=True)


class _Structure(_Leaf):
    """A NamedTuple. An optional one is absent if its first field, a tensor, is None.

    flat: whether its fields are arguments that schemas have.
    """

    def __init__(self, name: str, structure: type, optional: bool):
        self.name, self.structure, self.optional = name, structure, optional
        hints = _hints(structure)
        self.fields = [_argument(field, hints[field]) for field in structure._fields]
        self.tensors = any(f.tensors or f.list_of_tensors for f in self.fields)
        self.list_of_tensors = self.is_tensor = False
        for field in self.fields:
            if isinstance(field, _Structure) and field.tensors:  # autograd would not see them
                raise TypeError(
                    f"{structure.__name__}.{field.name} must not be a structure with tensors, got "
                    f"{field.structure.__name__}: its fields would be two structures deep"
                )
        self.types = (structure, _ABSENT) if optional else (structure,)
        self.leaves = [leaf for field in self.fields for leaf in field.leaves]
        if optional:
            self.leaves = [(name, kind | None) for name, kind in self.leaves]
        self.flat = all(type(field) is _Leaf for field in self.fields)
        self.made = _maker(structure)

    def write(self, value, flat):
        if value is None:
            flat += (None,) * len(self.leaves)
        elif self.flat:
            flat += value
        else:
            for field, part in zip(self.fields, value, strict=True):
                field.write(part, flat)

    def read(self, flat, at):
        end = at + len(self.leaves)
        if self.optional and flat[at] is None:
            return None, end
        if self.flat:
            return self.structure(*flat[at:end]), end
        values = []
        for field in self.fields:
            value, at = field.read(flat, at)
            values.append(value)
        return self.structure(*values), end


@functools.cache
def _options(annotation: Any) -> tuple:
    """The members of a union, or the annotation."""
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if is_union else (annotation,)


def _argument(name: str, annotation: Any) -> _Leaf:
    kinds = _options(annotation)
    if torch.Tensor in kinds and float in kinds:
        return _Number(name)
    if torch_names.ProcessGroup in kinds:
        return _Group(name)
    if hasattr(kinds[0], "_fields"):
        return _Structure(name, kinds[0], _ABSENT in kinds)
    return _Leaf(name, annotation)


def _maker(structure: type) -> Callable:
    """structure._make, in half the time: it does not go through Python."""
    return functools.partial(tuple.__new__, structure)


def _single(structures: list[tuple[int, Any]]) -> tuple[int, int, Callable] | None:
    """The place, the end and the maker of a structure that is the only one and always there."""
    if len(structures) != 1:
        return None
    [(i, only)] = structures
    if not isinstance(only, _Structure) or only.optional:
        return None
    return i, i + len(only.fields), only.made


def described(annotation: Any) -> _Leaf | None:
    """Describes a value of this annotation as if it were an argument. None unless the annotation is
    a tensor or a NamedTuple, optional or not.
    """
    kinds = {*_options(annotation)}
    if kinds <= {torch.Tensor, _ABSENT} or any(hasattr(kind, "_fields") for kind in kinds):
        return _argument("", annotation)
    return None


class Signature:
    """An operator's arguments and results, from the annotations of a function.

    arguments: as Python code has them.
    names: the names of the flat arguments.
    structured: whether the schema has other arguments or results than Python.
    result: the NamedTuple of the results, or None.
    annotated: the annotation of the results; None if there are none.
    made: makes the results from a sequence of their fields.
    direct: the arguments of a call that bypasses the dispatcher.
    expands: whether `direct` has more arguments than Python's: NamedTuples with tensors are split.
    """

    def __init__(self, function: Callable):
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters.values()
        self.arguments = [_argument(p.name, hints[p.name]) for p in parameters]
        self._leaves = [leaf for a in self.arguments for leaf in a.leaves]
        self.names = [name for name, _ in self._leaves]
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"{function.__qualname__}: two arguments have one name: {self.names}")
        returned = None if hints["return"] is _ABSENT else hints["return"]
        self.result = returned if hasattr(returned, "_fields") else None
        self.annotated = returned
        self._returned = returned
        if self.result is not None:
            self._returned = tuple[tuple(torch.Tensor for _ in self.result._fields)]
        self.made = None if self.result is None else _maker(self.result)
        others: list[tuple[int, Any]] = [
            (i, a) for i, a in enumerate(self.arguments) if type(a) is not _Leaf
        ]
        self._as_they_are = not others
        self.structured = self.result is not None or bool(others)
        # The only structure, if its fields are written as they are.
        self._only = _single(others)
        if self._only is not None and not others[0][1].flat:
            self._only = None
        # Arguments that a call may leave out: only where it passes them as they are.
        self._defaults = {} if self.structured else {p.name: p.default for p in parameters}
        self._expanded = [
            a if isinstance(a, _Structure) and a.tensors else None for a in self.arguments
        ]
        self.expands = any(self._expanded)
        self._spread = _single([(i, a) for i, a in enumerate(self._expanded) if a is not None])
        self.direct = [
            part
            for argument, expanded in zip(self.arguments, self._expanded, strict=True)
            for part in (expanded.fields if expanded else (argument,))
        ]

    def schema(self, mutates: Sequence[str] = ()) -> str:
        """As PyTorch writes it, without the operator's name."""

        def prototype():
            raise NotImplementedError

        def parameter(name, annotation):
            default = self._defaults.get(name, inspect.Parameter.empty)
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            return inspect.Parameter(name, kind, default=default, annotation=annotation)

        prototype.__signature__ = inspect.Signature(
            [parameter(*leaf) for leaf in self._leaves], return_annotation=self._returned
        )
        return torch.library.infer_schema(prototype, mutates_args=mutates)

    def flat(self, args: Sequence) -> Sequence:
        """Arguments as the schema has them."""
        if self._only is not None:  # as most are; the general way takes four times as long
            i = self._only[0]
            return *args[:i], *args[i], *args[i + 1 :]
        if self._as_they_are:
            return args
        flat: list = []
        for argument, value in zip(self.arguments, args, strict=True):
            argument.write(value, flat)
        return flat

    def read(self, flat: Sequence) -> Sequence:
        """Arguments as Python code has them; the inverse of `flat`."""
        if not self.structured:
            return flat
        args, at = [], 0
        for argument in self.arguments:
            value, at = argument.read(flat, at)
            args.append(value)
        return args

    def expand(self, args: Sequence) -> Sequence:
        """Arguments for a call that bypasses the dispatcher."""
        if self._spread is not None:  # as most are
            i = self._spread[0]
            return *args[:i], *args[i], *args[i + 1 :]
        direct: list = []
        for structure, value in zip(self._expanded, args, strict=True):
            if structure is None:
                direct.append(value)
            elif value is None:
                direct += (None,) * len(structure.fields)
            else:
                direct += value
        return direct

    def collect(self, direct: Sequence) -> Sequence:
        """The inverse of `expand`."""
        if self._spread is not None:
            i, end, made = self._spread
            return *direct[:i], made(direct[i:end]), *direct[end:]
        args, at = [], 0
        for structure in self._expanded:
            end = at + (1 if structure is None else len(structure.fields))
            if structure is None:
                args.append(direct[at])
            elif structure.optional and direct[at] is None:
                args.append(None)
            else:
                args.append(structure.structure(*direct[at:end]))
            at = end
        return args

    def flat_result(self, result):
        return result if self.result is None else tuple(result)

    def read_result(self, flat):
        return flat if self.result is None else self.result(*flat)
