"""What a public function takes, declared once: the checks of its arguments and their errors follow
from it, and so do the refusals that tests provoke and the lines of `tilewright explain OP`.

    @takes("R < 2**31", x="float [R, K]", weight="x [E, N, K]", offsets="int32 [E]")

A tensor's declaration is its dtypes, then its shape:

    float               float32 | bfloat16 | float16 | float64
    int32 | int64       these dtypes
    x | float32         the dtype of x, an argument declared before, or float32
    [T, K]              names of sizes; the first argument with a name gives it its size
    [..., D], [*B, D]   any leading dimensions; the same ones wherever *B stands
    [E, 2*I, D//2]      a size times, or computed from, sizes and int arguments declared before
    [x]                 the shape of x, an argument declared before
    [D] | [H, D]        one of these shapes, the first that fits; one whose names an earlier
                        argument declares fits only where that argument gave them sizes

A tensor that gets no gradient, though results of the call do, is declared a constant. While a graph
is recorded, a constant that requires a gradient is refused, as is an object with such a tensor:

    constant float [classes]

A number's declaration is its type and an interval, which is open at a round bracket. A number must
also be finite in float32, in which kernels compute, and so must its inverse if the interval is open
at 0:

    number (0, inf)
    int [1, E]
    float | int64 [] or number [0, inf)     a tensor, on any device, or a number

"static" before it marks a number that changes with the model or the recipe, not from step to
step: compiled code has a graph for each value, since sizes, launches or the threshold of dropout
depend on it. One graph takes all values of any other number except 0 and 1.

    static int [1, E]

A bool's declaration is "bool"; a str, an int or a dtype with few accepted values has the tuple of
these values.
An object of another class is declared as errors call it, with its shape if it has one (and then a
device too):

    an AQN
    an NF4 or BlockFP8 [N, K]

Its class is in the function's annotation, as is whether None is accepted, or an object in a
tensor's place. Arguments that travel together are the fields of a NamedTuple, which is a parameter:
they are declared, and called by errors, as if each were a parameter. Tensors must be on one device.
Conditions are Python expressions over sizes, numbers and arguments. A condition is checked after
the last argument that it names, and its error is about that argument; with "x: condition" it is
about x. Other names are constants of fn's module.

The checks run at every call, so they are generated as code: one comparison each.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import keyword
import linecache
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from tilewright.core.registry import short

FLOAT = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Numbers > 0 that are finite in float32, the kernels' dtype, and have a finite inverse.
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
INT64 = torch.iinfo(torch.int64)
NAME = r"\b[A-Za-z_]\w*\b"
CONSTANT = "constant "
Function = TypeVar("Function", bound=Callable)


# ---- errors


def _or(accepted: Iterable[str]) -> str:
    return " or ".join(accepted)


def _wrong_class(name: str, value: object, accepted: str) -> TypeError:
    return TypeError(f"{name} must be {accepted}, got {type(value).__name__}")


def _wrong_dtype(name: str, t: torch.Tensor, accepted: str) -> TypeError:
    return TypeError(f"{name} must be {accepted}, got {short(t.dtype)}")


def _not_dense(name: str, t: torch.Tensor) -> TypeError:  # kernels read memory
    got = "a nested one" if t.is_nested else f"layout {str(t.layout).removeprefix('torch.')}"
    return TypeError(f"{name} must be a strided (dense) tensor, got {got}")


def _where(sizes: Mapping[str, Any]) -> str:
    known = {n: list(v) if isinstance(v, tuple) else v for n, v in sizes.items() if v is not None}
    return ", where " + ", ".join(f"{n} = {v}" for n, v in known.items()) if known else ""


def _wrong_shape(name: str, t: Any, accepted: str, sizes: Mapping[str, Any]) -> ValueError:
    return ValueError(f"{name} must have shape {accepted}{_where(sizes)}, got {list(t.shape)}")


def _wrong_device(name: str, t: torch.Tensor, first: str, device: torch.device) -> ValueError:
    return ValueError(f"{name} is on {t.device}, {first} on {device}; they must be on one device")


def _wrong_type(name: str, value: object, accepted: str) -> TypeError:
    return TypeError(f"{name} must be {accepted}, got {value!r}")


def _wrong_value(name: str, value: object, accepted: str, sizes: Mapping[str, Any]) -> ValueError:
    return ValueError(f"{name} must be {accepted}{_where(sizes)}, got {value!r}")


def _wrong_gradient(name: str, value: Any) -> ValueError:
    if isinstance(value, torch.Tensor):
        got = f"got one that does; pass {name}.detach()"
    else:
        got = f"got a {type(value).__name__} with a tensor that does; detach that"
    return ValueError(f"{name} must not require a gradient (it gets none), {got}")


ERRORS = (
    _wrong_gradient,
    _wrong_class,
    _wrong_dtype,
    _not_dense,
    _wrong_shape,
    _wrong_device,
    _wrong_type,
    _wrong_value,
)


# ---- declarations


class Shape(NamedTuple):
    """text: as declared.   batch: "", "..." or the name of its leading dimensions.
    sizes: an expression for each dimension after it.
    """

    text: str
    batch: str
    sizes: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Shape:
        sizes = [size.strip() for size in text.strip("[] ").split(",") if size.strip()]
        leading = bool(sizes) and (sizes[0] == "..." or sizes[0].startswith("*"))
        batch = sizes.pop(0).lstrip("*") if leading else ""
        return cls(text, batch, tuple(sizes))

    def names(self) -> set[str]:
        return set().union(*map(_names, self.sizes), {self.batch} - {"", "..."})


@dataclass(frozen=True)
class Argument:
    """text: the declaration.   optional: None is accepted.   others: the types that its annotation
    accepts beside a tensor's.   constant: a tensor that gets no gradient.
    """

    name: str
    text: str
    optional: bool = False

    def accepted(self, what: str) -> str:
        return f"{what} or None" if self.optional else what

    def names(self) -> set[str]:
        """What expressions may refer to."""
        return set()


@dataclass(frozen=True)
class TensorArgument(Argument):
    dtypes: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    others: tuple[type, ...] = ()
    constant: bool = False

    def names(self) -> set[str]:
        return set().union(*(shape.names() for shape in self.shapes))


@dataclass(frozen=True)
class ObjectArgument(TensorArgument):
    """One of the types `others`, which errors call `what`; one with a shape has a device too."""

    what: str = ""


@dataclass(frozen=True)
class NumberArgument(Argument):
    """low, high: expressions, checked as `low <= value`, or `<` where above, below.

    interval: as declared.   static: compiled code has a graph for each value.
    """

    integer: bool = False
    low: str = ""
    high: str = ""
    above: str = "<="
    below: str = "<="
    interval: str = ""
    static: bool = False

    def names(self) -> set[str]:
        return {self.name}


@dataclass(frozen=True)
class NumberOrTensorArgument(NumberArgument):
    tensor: TensorArgument | None = None

    def accepted(self, what: str) -> str:
        return super().accepted(f"{what} or a torch.Tensor")

    def names(self) -> set[str]:
        return set()


@dataclass(frozen=True)
class ChoiceArgument(Argument):
    values: tuple[Any, ...] = ()

    def names(self) -> set[str]:
        return {self.name}


class Condition(NamedTuple):
    """of: the argument that its error is about, if that is not the last one that it names."""

    text: str
    of: Argument | None = None


@dataclass(frozen=True)
class Takes:
    """A function's declaration, in the order of the checks."""

    arguments: tuple[Argument, ...]
    conditions: tuple[Condition, ...]

    def check(self, **values: Any) -> None:
        """Raises as the function does for these of its arguments."""
        _checks_of(self, tuple(values))(**values)

    def lines(self) -> list[str]:
        """A line for each argument, and one for each condition, as a person reads them."""
        width = max(len(a.name) for a in self.arguments)
        lines = [f"{a.name:{width}}  {Argument.accepted(a, a.text)}" for a in self.arguments]
        return lines + [f"{'':{width}}  {c.text}" for c in self.conditions]


def _parse(name: str, declared: Any, annotation: Any) -> Argument:
    kinds = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    optional = type(None) in kinds
    if torch.Tensor in kinds and " or " in declared:
        tensor, _, number = declared.partition(" or ")
        parts = {**vars(_parse(name, number, float)), "text": declared, "optional": optional}
        parts["tensor"] = _parse(name, tensor, torch.Tensor)
        return NumberOrTensorArgument(**parts)
    if isinstance(declared, tuple):
        return ChoiceArgument(name, str(list(declared)), optional, declared)
    constant = declared.startswith(CONSTANT)
    first, bracket, rest = declared.removeprefix(CONSTANT).partition("[")
    shapes = tuple(Shape.parse(s.strip()) for s in (bracket + rest).split("|") if s.strip())
    others = tuple(k for k in kinds if k not in (torch.Tensor, type(None)))
    if declared.startswith(("a ", "an ")):
        return ObjectArgument(name, declared, optional, (), shapes, others, what=first.strip())
    if torch.Tensor in kinds:
        dtypes = tuple(d.strip() for d in first.split("|") if d.strip())
        return TensorArgument(name, declared, optional, dtypes, shapes, others, constant)
    declared, static = declared.removeprefix("static "), declared.startswith("static ")
    kind, _, interval = declared.partition(" ")
    if kind == "bool":
        return ChoiceArgument(name, "a bool", optional, (True, False))
    if kind not in ("int", "number"):
        raise ValueError(
            f"{name} must be declared as an int, a number, a bool, a tuple or an object, got "
            f"{declared!r}"
        )
    number = _number(name, declared, optional, kind == "int", interval or "(-inf, inf)")
    return dataclasses.replace(number, static=static)


def _number(
    name: str, declared: str, optional: bool, integer: bool, interval: str
) -> NumberArgument:
    least, most = (INT64.min, INT64.max) if integer else (-LARGEST, LARGEST)
    low, high = (bound.strip() for bound in interval[1:-1].split(","))
    above, below = ("<" if bracket in "()" else "<=" for bracket in (interval[0], interval[-1]))
    if low == "-inf":
        low, above = repr(least), "<="
    elif low == "0" and above == "<" and not integer:
        low, above = repr(SMALLEST), "<="
    if high == "inf":
        high, below = repr(most), "<="
    return NumberArgument(name, declared, optional, integer, low, high, above, below, interval)


def _is_union(annotation: Any) -> bool:
    if isinstance(annotation, type):  # as most are, and known by one call
        return False
    return typing.get_origin(annotation) in (types.UnionType, typing.Union)


@functools.cache
def _names(expression: str) -> frozenset[str]:
    return frozenset(re.findall(NAME, expression)) - {*keyword.kwlist}


# ---- generated code


class _Code:
    """A function's checks, as they are written: `lines` of the body, and the `objects` and the
    sizes that it may refer to.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.objects: dict[str, Any] = {}
        self.sizes: set[str] = set()
        self.absent: set[str] = set()  # sizes and numbers that a call may leave None
        self.tensors: set[str] = set()  # arguments, whose names stand for their dtypes and shapes

    def add(self, depth: int, *lines: str) -> None:
        self.lines += ["    " * depth + line for line in lines]

    def object(self, value: Any) -> str:
        name = f"_{len(self.objects)}"
        self.objects[name] = value
        return name

    def known(self, text: str, own: Set[str] = frozenset()) -> str:
        """Source of a dictionary of the sizes in text, less the argument's own."""
        names = [n for n in dict.fromkeys(re.findall(NAME, text)) if n in self.sizes - own]
        return "{" + ", ".join(f"{n!r}: {n}" for n in names) + "}"

    def argument(self, a: Argument, conditions: Iterable[Condition]) -> None:
        """conditions: those that a completes."""
        depth = 0
        new = a.names() - self.sizes - self.tensors
        maybe = new if a.optional else set()
        if isinstance(a, TensorArgument):
            if not a.optional:  # what only some of its shapes name
                maybe = {n for n in new if not all(n in s.names() for s in a.shapes)}
            self.add(0, *(f"{size} = None" for size in sorted(maybe)))
        if a.optional:
            self.add(0, f"if {a.name} is not None:")
            depth = 1
        if isinstance(a, TensorArgument):
            self.tensor(a, depth, new)
        elif isinstance(a, NumberOrTensorArgument) and a.tensor:
            if unknown := a.tensor.names() - self.sizes - self.tensors:
                raise ValueError(f"{a.name} of {a.text!r} cannot declare the sizes {unknown}")
            self.add(depth, f"if isinstance({a.name}, _Tensor):")
            self.tensor(a.tensor, depth + 1, set())
            self.add(depth, "else:")
            self.number(a, depth + 1)
        elif isinstance(a, NumberArgument):
            self.number(a, depth)
        elif isinstance(a, ChoiceArgument):
            self.choice(a, depth)
        if isinstance(a, TensorArgument):
            self.tensors.add(a.name)
        self.sizes |= new
        self.absent |= maybe
        for condition in conditions:
            self.condition(condition, a)

    def condition(self, condition: Condition, last: Argument) -> None:
        a, text = condition.of or last, condition.text
        there = [f"{n} is not None and " for n in sorted(_names(text) & self.absent)]
        wrong, accepted = "_wrong_value", f"such that {text}"
        if isinstance(a, TensorArgument):
            wrong, accepted = "_wrong_shape", f"{_or(s.text for s in a.shapes)} with {text}"
        others = self.known(text, a.names())
        self.add(
            0,
            f"if {''.join(there)}not ({text}):",
            f"    raise {wrong}({a.name!r}, {a.name}, {accepted!r}, {others})",
        )

    def tensor(self, a: TensorArgument, depth: int, new: set[str]) -> None:
        name, body = a.name, depth
        if a.others:
            self.add(depth, f"if not isinstance({name}, {self.object(a.others)}):")
            body += 1
        if isinstance(a, ObjectArgument):
            self.add(body, f"raise _wrong_class({name!r}, {name}, {a.accepted(a.what)!r})")
            self.gradient(a, depth)
            self.shape(a, depth, new)
            return
        accepted = a.accepted(_or(["a torch.Tensor", *(t.__name__ for t in a.others)]))
        self.add(
            body,
            f"if not isinstance({name}, _Tensor):",
            f"    raise _wrong_class({name!r}, {name}, {accepted!r})",
        )
        self.dtype(a, body)
        self.add(
            body,
            f"if {name}.layout is not _STRIDED or {name}.is_nested:",
            f"    raise _not_dense({name!r}, {name})",
        )
        self.gradient(a, depth)
        self.shape(a, depth, new)

    def gradient(self, a: TensorArgument, depth: int) -> None:
        """Refuses a gradient that would be dropped."""
        name, learns = a.name, f"_recording() and {a.name}.requires_grad"
        frozen = tuple(kind for kind in a.others if hasattr(kind, "requires_grad"))
        if not a.constant:
            if not frozen:
                return
            if frozen != a.others or not isinstance(a, ObjectArgument):
                learns = f"{learns} and isinstance({name}, {self.object(frozen)})"
        self.add(depth, f"if {learns}:", f"    raise _wrong_gradient({name!r}, {name})")

    def dtype(self, a: TensorArgument, depth: int) -> None:
        fixed: list[torch.dtype] = []
        wrong, says = [], []
        for dtype in a.dtypes:
            if dtype == "float":
                fixed += FLOAT
                says.append("one of " + ", ".join(map(short, FLOAT)))
            elif isinstance(getattr(torch, dtype, None), torch.dtype):
                fixed.append(getattr(torch, dtype))
                says.append(dtype)
            elif dtype not in self.tensors:
                raise ValueError(
                    f"{dtype!r} of {a.text!r} is no dtype, nor a tensor before {a.name}"
                )
            else:
                wrong.append(f"{a.name}.dtype != {dtype}.dtype")
                says.append(f"{dtype}'s dtype {{_short({dtype}.dtype)}}")
        if fixed:
            wrong.append(f"{a.name}.dtype not in {self.object(tuple(fixed))}")
        if wrong:
            self.add(
                depth,
                f"if {' and '.join(wrong)}:",
                f"    raise _wrong_dtype({a.name!r}, {a.name}, f{_or(says)!r})",
            )

    def shape(self, a: TensorArgument, depth: int, new: set[str]) -> None:
        s, text = f"_shape_{a.name}", _or(shape.text for shape in a.shapes)
        sizes = self.known(text)
        if text.strip("[]") in self.tensors:
            sizes = f"{{{text.strip('[]')!r}: list(_shape_{text.strip('[]')})}}"
        wrong = f"raise _wrong_shape({a.name!r}, {a.name}, {text!r}, {sizes})"
        if a.shapes:
            self.add(depth, f"{s} = {a.name}.shape")
        for i, shape in enumerate(a.shapes):
            tests, given = self.fits(shape, s, new)
            self.add(depth, f"{'elif' if i else 'if'} {' and '.join(tests)}:")
            self.add(depth + 1, *(given or ["pass"]))
        if a.shapes:
            self.add(depth, "else:", f"    {wrong}")

    def fits(self, shape: Shape, s: str, new: set[str]) -> tuple[list[str], list[str]]:
        """(tests that the shape `s` is this one, assignments of the sizes that it then gives)"""
        if shape.sizes and shape.sizes[0] in self.tensors:
            like = f"_shape_{shape.sizes[0]}"  # in compiled code, equal Sizes may differ as Sizes
            return [f"({s} == {like} or tuple({s}) == tuple({like}))"], []
        n, at_first = len(shape.sizes), dict[str, str]()
        tests, given = [f"len({s}) {'>=' if shape.batch else '=='} {n}"], []
        for name in shape.names():
            if name in self.absent:
                tests.append(f"{name} is not None")
        for i, size in enumerate(shape.sizes):
            at = f"{s}[{i - n if shape.batch else i}]"
            if size in at_first:
                tests.append(f"{at} == {at_first[size]}")
            elif size in new:
                given.append(f"{size} = {at}")
                at_first[size] = at
            elif not _names(size) & new:
                tests.append(f"{at} == {size}")
            else:
                factor, of = (part.strip() for part in size.rsplit("*", 1))
                if of not in new or _names(factor) & new:
                    raise ValueError(f"{size} in {shape.text} must be a factor * one new size")
                tests += (
                    [f"{factor} > 0", f"{at} % ({factor}) == 0"]
                    if _names(factor)
                    else [f"{at} % {factor} == 0"]
                )
                given.append(f"{of} = {at} // ({factor})")
                at_first[of] = f"{at} // ({factor})"
        if shape.batch not in ("", "..."):
            leading = f"{s}[:{-n}]" if n else s
            if shape.batch in new:
                given.append(f"{shape.batch} = {leading}")
            else:
                tests.append(f"tuple({leading}) == tuple({shape.batch})")
        return tests, given

    def kind(self, name: str, depth: int, integer: bool, accepted: str) -> None:
        kinds = (int, torch.SymInt) if integer else (int, float, torch.SymInt, torch.SymFloat)
        self.add(
            depth,
            f"if type({name}) is not {'int' if integer else 'float'} and (",
            f"    not isinstance({name}, {self.object(kinds)}) or isinstance({name}, bool)",
            "):",
            f"    raise _wrong_type({name!r}, {name}, {accepted!r})",
        )

    def number(self, a: NumberArgument, depth: int) -> None:
        what = "an int" if a.integer else "a number"
        ends_in_float32 = not a.integer and ("inf" in a.interval or a.interval.startswith("(0,"))
        within = f"{what} in {a.interval}{' in float32' * ends_in_float32}"
        self.kind(a.name, depth, a.integer, a.accepted(what))
        self.add(
            depth,
            f"if not {a.low} {a.above} {a.name} {a.below} {a.high}:",
            f"    raise _wrong_value({a.name!r}, {a.name}, {a.accepted(within)!r}, "
            f"{self.known(a.interval)})",
        )

    def choice(self, a: ChoiceArgument, depth: int) -> None:
        kind, name = type(a.values[0]), a.name
        says = a.accepted(a.text if kind is bool else f"one of {list(a.values)}")
        if kind is bool:  # 1 == True
            wrong = f"{name} is not True and {name} is not False"
        elif kind is int:  # 16.0 == 16; and Dynamo may not find a symbol in a tuple
            self.kind(name, depth, True, says)
            wrong = " and ".join(f"{name} != {value}" for value in a.values)
        else:
            wrong = f"{name} not in {self.object(a.values)}"
        given = f"{name!r}, {name}, {says!r}"
        of_type = kind in (bool, torch.dtype)
        error = f"_wrong_type({given})" if of_type else f"_wrong_value({given}, {{}})"
        self.add(depth, f"if {wrong}:", f"    raise {error}")

    def devices(self, arguments: Iterable[Argument]) -> None:
        """Checks that all tensors are on the device of the first one that is always given."""
        tensors = [a for a in arguments if isinstance(a, TensorArgument)]
        tensors = [a for a in tensors if a.shapes or not isinstance(a, ObjectArgument)]
        if len(tensors) < 2:
            return
        first, *rest = sorted(tensors, key=lambda a: a.optional)
        self.add(0, f"_device = {first.name}.device")
        for a in rest:
            there = f"{a.name} is not None and " if a.optional else ""
            self.add(
                0,
                f"if {there}{a.name}.device != _device:",
                f"    raise _wrong_device({a.name!r}, {a.name}, {first.name!r}, _device)",
            )

    def function(
        self,
        name: str,
        parameters: Iterable[str],
        objects: Mapping[str, Any],
        module: str,
        globals_: dict[str, Any],
    ) -> Any:
        """The function of these lines. It is a closure over what it refers to, among the globals of
        a module, and so a function as any other to torch.compile.
        """
        names = {
            "_Tensor": torch.Tensor,
            "_STRIDED": torch.strided,
            "_recording": torch.is_grad_enabled,
            "_short": short,
            **{error.__name__: error for error in ERRORS},
            **self.objects,
            **objects,
        }
        lines = [
            f"def make({', '.join(names)}):",
            f"    def {name}({', '.join(parameters)}):",
            *("        " + line for line in self.lines),
            f"    return {name}",
        ]
        source, file = "\n".join(lines) + "\n", f"<checks of {module}.{name}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        made: dict[str, Any] = {}
        exec(compile(source, file, "exec"), globals_, made)
        return made["make"](**names)


def takes(*conditions: str, **declared: Any) -> Callable[[Function], Function]:
    """A decorator that declares a public function's arguments and checks them at each call (see the
    module's docstring). The function's `takes` is the declaration.

    Raises TypeError for a type or dtype, and ValueError for a shape, value or device, that is not
    as declared; the message names the argument, its value and what is accepted.
    """

    def decorate(fn: Function) -> Function:
        annotations, around = fn.__annotations__, fn.__globals__
        numbers = {n: v for n, v in around.items() if type(v) in (int, float)}

        def fixed(text: Any) -> Any:
            for name in numbers.keys() & _names(text) if isinstance(text, str) else ():
                text = re.sub(rf"\b{name}\b", str(numbers[name]), text)
            return text

        groups, fields = dict[str, Any](), dict[str, Any]()
        grouped = not declared.keys() <= annotations.keys()
        for name, kind in annotations.items() if grouped else ():
            kind = around.get(kind) if isinstance(kind, str) else kind
            if (
                name != "return"
                and isinstance(kind, type)
                and issubclass(kind, tuple)
                and hasattr(kind, "_fields")
            ):
                groups[name] = kind
                fields |= typing.get_type_hints(kind, include_extras=True)

        def hint(name: str) -> Any:
            return fields[name] if name in fields else _evaluated(annotations[name], around)

        if unknown := set(declared) - set(annotations) - set(fields):
            raise TypeError(f"{fn.__name__}() has no annotated arguments {sorted(unknown)}")
        arguments = [_parse(name, fixed(text), hint(name)) for name, text in declared.items()]
        by_name = {a.name: a for a in arguments}
        declaration = Takes(
            tuple(arguments), tuple(_condition(fixed(text), by_name) for text in conditions)
        )
        code = _Code()
        for name, kind in groups.items():
            wrong = f"raise _wrong_class({name!r}, {name}, 'a {kind.__name__}')"
            code.add(0, f"if not isinstance({name}, {code.object(kind)}):", f"    {wrong}")
            code.add(
                0, *(f"{field} = {name}.{field}" for field in kind._fields if field in declared)
            )
        code = _checks(declaration.arguments, declaration.conditions, code)
        own = {a.name for a in arguments if not isinstance(a, TensorArgument)}
        if taken := (code.sizes - own) & set(annotations):
            raise ValueError(f"{sorted(taken)} are arguments, and cannot be sizes too")
        signature = inspect.signature(fn).parameters
        parameters, passed = _parameters(signature.values())
        code.add(0, f"return _checked({', '.join(passed)})")
        defaults = {f"_default_{n}": p.default for n, p in signature.items()}
        checked = code.function(
            fn.__name__, parameters, {"_checked": fn, **defaults}, fn.__module__, fn.__globals__
        )
        functools.update_wrapper(checked, fn)
        checked.takes, checked.groups, checked.parameters = declaration, groups, tuple(signature)
        return checked

    return decorate


def spread(function: Any) -> Callable:
    """The function with the fields of each NamedTuple that it takes as keyword arguments, in place
    of the NamedTuple; a function that takes none is returned as it is. `grouped` is the original
    function.
    """
    groups = getattr(function, "groups", None)
    if not groups:
        return function

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        values = {
            name: kind(**{n: given.pop(n) for n in kind._fields if n in given})
            for name, kind in groups.items()
        }
        return function(*args, **values, **given)

    parameters: list[inspect.Parameter] = []
    for p in inspect.signature(function).parameters.values():
        kind = groups.get(p.name)
        names = (p.name,) if kind is None else kind._fields
        defaults = {p.name: p.default} if kind is None else kind._field_defaults
        parameters += (
            inspect.Parameter(n, p.KEYWORD_ONLY, default=defaults.get(n, p.empty)) for n in names
        )
    of: Any = call
    of.__signature__, of.grouped = inspect.Signature(parameters), function
    return call


def _evaluated(annotation: Any, around: dict[str, Any]) -> Any:
    """Evaluates one annotation: typing.get_type_hints evaluates all of a function's, in many more
    calls.
    """
    return eval(annotation, around) if isinstance(annotation, str) else annotation


def _condition(text: str, arguments: Mapping[str, Argument]) -> Condition:
    of, colon, rest = text.partition(": ")
    return Condition(rest, arguments[of]) if colon else Condition(text)


def _checks(
    arguments: Sequence[Argument], conditions: Sequence[Condition], code: _Code | None = None
) -> _Code:
    """code: what comes before."""
    code, waiting = code or _Code(), list(conditions)
    for a in arguments:
        known = code.sizes | code.tensors | a.names() | {a.name}
        completed = [c for c in waiting if _names(c.text) <= known]
        waiting = [c for c in waiting if c not in completed]
        code.argument(a, completed)
    if waiting:
        raise ValueError(f"no argument declares all names of the conditions {waiting}")
    code.devices(arguments)
    return code


@functools.cache
def _checks_of(declaration: Takes, names: tuple[str, ...]) -> Callable[..., None]:
    """The checks of these arguments alone, and of the conditions over nothing else."""
    arguments = [a for a in declaration.arguments if a.name in names]
    known = set().union(*(a.names() for a in arguments))
    code = _checks(arguments, [c for c in declaration.conditions if _names(c.text) <= known])
    return code.function("check", names, {}, __name__, globals())


def _parameters(signature: Iterable[inspect.Parameter]) -> tuple[list[str], list[str]]:
    """(parameters as a def has them, the arguments of a call that passes them on)"""
    parameters, passed, keyword = [], [], False
    for p in signature:
        if p.kind is p.KEYWORD_ONLY and not keyword:
            parameters.append("*")
            keyword = True
        parameters.append(p.name + ("" if p.default is p.empty else f"=_default_{p.name}"))
        passed.append(f"{p.name}={p.name}" if keyword else p.name)
    return parameters, passed
