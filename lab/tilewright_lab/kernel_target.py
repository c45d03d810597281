"""What `emulate` and `gate` are given: a kernel or a host function, its arguments, its launch."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import operator
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
FILLS = "randn, zeros, ones, empty, arange, randint(low, high), or a number"


class Rejected(Exception):
    """Bad input, in one sentence."""


def load(text: str, beside: pathlib.Path | None = None) -> tuple[Any, pathlib.Path | None]:
    """The object named FILE:NAME, where FILE is a file or a module, and the file.

    beside: the file of a NAME alone.
    """
    file, _, name = text.rpartition(":")
    if not name or not (file or beside):
        raise Rejected(f"{text}: give FILE:NAME, such as kernels.py:add or package.module:add")
    path = pathlib.Path(file) if file else beside
    if path is not None and (path.suffix == ".py" or path.is_file()):
        if not path.is_file():
            raise Rejected(f"{text}: there is no file {path}")
        module = _of_file(path)
    else:
        path, module = None, _imported(file)
    target = module
    for part in name.split("."):
        if not hasattr(target, part):
            names = [n for n, v in vars(module).items() if _own(v, module)]
            raise Rejected(f"{text}: {file or path} has no {name}; it has {', '.join(names)}")
        target = getattr(target, part)
    return target, path


def _own(value: Any, module: Any) -> bool:
    """Whether a module defines this function or kernel."""
    inner = innermost(value)
    return callable(inner) and getattr(inner, "__module__", None) == module.__name__


def _of_file(path: pathlib.Path):
    path = path.resolve()
    name = f"emulated_{path.stem}"
    if (known := sys.modules.get(name)) is not None and known.__file__ == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Rejected(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importing(path.name, str(path.parent)):
            spec.loader.exec_module(module)
    except Rejected:
        del sys.modules[name]
        raise
    return module


def _imported(name: str):
    with _importing(name, ""):
        return importlib.import_module(name)


@contextlib.contextmanager
def _importing(what: str, folder: str) -> Iterator[None]:
    """Inside, modules of a folder can be imported, and they can afterwards: functions import when
    they are called.
    """
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with told(f"{what} cannot be imported"):
        yield


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """What the user's code raises ends in a sentence, even if it is to end the process."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise Rejected(f"{what}: {one_line(error)}") from error


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception as one line; of a chain, Triton's first cause is the last."""
    while error.__cause__ is not None and type(error).__module__.startswith("triton"):
        error = error.__cause__
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = " ".join(lines)
    if len(text) > limit:
        text = f"{text[: limit // 2]} [...] {text[-limit // 2 :]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# ---- kernels


def innermost(value: Any) -> Any:
    """The @triton.jit function below autotuners and heuristics; anything else as it is."""
    while type(value).__module__.startswith("triton.runtime") and hasattr(value, "fn"):
        if type(value).__name__ in ("JITFunction", "InterpretedFunction"):
            return value
        value = value.fn
    return value


def is_kernel(value: Any) -> bool:
    return type(innermost(value)).__name__ in ("JITFunction", "InterpretedFunction")


def decided(value: Any) -> set[str]:
    """The arguments that autotuners and heuristics around a kernel give it."""
    names: set[str] = set()
    while type(value).__name__ in ("Autotuner", "Heuristics"):
        if type(value).__name__ == "Autotuner":
            names |= {name for config in value.configs for name in config.kwargs}
        else:
            names |= set(value.values)
        value = value.fn
    return names


# ---- arguments


@dataclass
class Call:
    """A call of a kernel or of a host function.

    options: num_warps, num_stages.   grid: an expression over the kernel's arguments.
    """

    target: Any
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    grid: str | None = None
    options: dict[str, int] = field(default_factory=dict)

    @property
    def kernel(self) -> Any | None:
        """The kernel; None if the target is a host function."""
        return innermost(self.target) if is_kernel(self.target) else None

    def check(self, label: str) -> None:
        """Raises if these are not the arguments that the target takes."""
        if self.kernel is None:
            if not callable(self.target):
                kind = type(self.target).__name__
                raise Rejected(f"{label} is neither a kernel nor a function, but of type {kind}")
            try:
                inspect.signature(self.target).bind(*self.arguments, **self.named)
            except TypeError as error:
                what = str(error)
                if what.startswith("missing a required"):
                    name = what.split("'")[1]
                    what += f"; give it by --arg {name}=... or --inputs"
                raise Rejected(f"{label}: {what}") from None
            except ValueError:  # a builtin without a signature
                pass
            return
        parameters = self.kernel.params if hasattr(self.kernel, "params") else []
        names = list(self.kernel.arg_names)
        given = {*names[: len(self.arguments)], *self.named}
        if unknown := [n for n in self.named if n not in names]:
            raise Rejected(
                f"{label}: the kernel has no argument {', '.join(unknown)}; it has {', '.join(names)}"
            )
        optional = {p.name for p in parameters if p.default is not inspect.Parameter.empty}
        if missing := [n for n in names if n not in given | optional | decided(self.target)]:
            raise Rejected(
                f"{label}: the kernel's argument {', '.join(missing)} is not given: --arg for "
                "tensors and numbers, --constexpr for constants"
            )
        if self.grid is None:
            raise Rejected(f"{label}: a kernel needs --grid, such as --grid 'cdiv(n, BLOCK)'")

    def run(self) -> Any:
        """Calls the host function, or launches the kernel."""
        if self.kernel is None:
            return self.target(*self.arguments, **self.named)
        self.target[self._launch_grid](*self.arguments, **self.named, **self.options)
        return None

    def _launch_grid(self, meta) -> tuple[int, ...]:
        try:
            node = ast.parse(str(self.grid), mode="eval").body
            nodes = node.elts if isinstance(node, ast.Tuple) else [node]
            sizes = tuple(int(_value(n, dict(meta))) for n in nodes)
        except Exception as error:
            raise Rejected(f"--grid {self.grid}: {one_line(error)}") from None
        if not 1 <= len(sizes) <= 3 or min(sizes) < 0:
            raise Rejected(f"--grid {self.grid}: gives {sizes}; accepted: one to three sizes")
        return sizes


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
FUNCTIONS = {"cdiv": lambda a, b: -(-a // b), "min": min, "max": max}


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    """An expression of a grid: numbers, names, + - * // % and FUNCTIONS."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left, known), _value(node.right, known))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        return FUNCTIONS[node.func.id](*(_value(a, known) for a in node.args))
    raise ValueError(
        f"{ast.unparse(node)} is none of numbers, arguments ({', '.join(known)}), + - * // % and "
        f"{', '.join(FUNCTIONS)}"
    )


def argument(text: str, constant: bool = False) -> tuple[str, Any]:
    """name=value, where value is tensor(dtype, shape, fill), a dtype or a Python literal."""
    name, equals, value = text.partition("=")
    name, option = name.strip(), "--constexpr" if constant else "--arg"
    if not equals or not name.isidentifier():
        raise Rejected(f"{option} {text}: give NAME=VALUE")
    value = value.strip()
    if value in DTYPES:
        return name, DTYPES[value]
    try:
        node = ast.parse(value, mode="eval").body
    except SyntaxError:
        node = None
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "tensor" and not constant:
        return name, _tensor(node, text)
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        kinds = "a number, a string" if constant else "tensor(f32, [128, 64]), a number, a string"
        raise Rejected(f"{option} {text}: accepted values are {kinds}, True, None") from None


def _tensor(node: ast.Call, text: str) -> torch.Tensor:
    given = [ast.unparse(a) for a in node.args]
    if (
        len(given) not in (2, 3)
        or node.keywords[1:]
        or any(k.arg != "strides" for k in node.keywords)
    ):
        raise Rejected(
            f"--arg {text}: give tensor(dtype, shape), then a fill ({FILLS}) or strides="
        )
    if given[0] not in DTYPES:
        raise Rejected(f"--arg {text}: no dtype {given[0]}; accepted: {', '.join(DTYPES)}")
    dtype = DTYPES[given[0]]
    try:
        shape = ast.literal_eval(given[1])
        shape = [shape] if isinstance(shape, int) else [int(n) for n in shape]
        filled = fill(shape, dtype, given[2] if len(given) == 3 else None)
        if not node.keywords:
            return filled
        strides = [int(n) for n in ast.literal_eval(node.keywords[0].value)]
        return torch.empty_strided(shape, strides, dtype=dtype).copy_(filled)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Rejected(f"--arg {text}: {error}; a fill is {FILLS}") from None


def fill(shape: list[int], dtype: torch.dtype, how: str | None) -> torch.Tensor:
    """A tensor with these contents; by default numbers from a normal distribution, or zeros for
    integers.
    """
    how = how or ("randn" if dtype.is_floating_point else "zeros")
    if how == "randn":
        return torch.randn(shape).to(dtype)
    if how in ("zeros", "ones"):
        return getattr(torch, how)(shape).to(dtype)
    if how == "empty":
        return torch.empty(shape, dtype=dtype)
    if how == "arange":
        return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    if how.startswith("randint("):
        low, high = ast.literal_eval(how.removeprefix("randint"))
        return torch.randint(low, high, shape).to(dtype)
    return torch.full(shape, ast.literal_eval(how)).to(dtype)


def call_of(
    target: Any,
    label: str,
    arguments: Sequence[str],
    constants: Sequence[str] = (),
    inputs: Callable[[], Any] | None = None,
) -> Call:
    """The call of a target with these arguments.

    inputs: returns arguments: a dictionary by name, a tuple in order, or one alone.
    """
    named = dict(argument(a) for a in arguments)
    fixed = dict(argument(a, constant=True) for a in constants)
    if is_kernel(target):
        params = {p.name: p for p in getattr(innermost(target), "params", ())}
        if wrong := [n for n in fixed if n in params and not params[n].is_constexpr]:
            raise Rejected(f"{label}: {', '.join(wrong)} is no tl.constexpr; give it by --arg")
    positional: tuple[Any, ...] = ()
    if inputs is not None:
        with told("--inputs: the function fails"):
            given = inputs()
        if isinstance(given, dict):
            named = {**given, **named}
        else:
            positional = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    return Call(target, positional, {**named, **fixed})
