"""Identifies the sources of a measurement: one digest per op, from the syntax of its code.

An op's sources are its module, its kernels and everything that these import within the package, the
C++ files whose operators they name, and the measuring core of the bench. Those of a measurement on
a CPU are without modules that import triton or cutlass, which run on GPUs alone, and on a GPU
without C++ files, which run on CPUs alone. The digest ignores comments, docstrings, goals and
formatting, packages' __init__ files, which only list their contents, and where modules are and what
they are called.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tilewright.core import platform
from tilewright.core.registry import Op

PACKAGE = pathlib.Path(__file__).parents[1]
CSRC = PACKAGE.parent / "csrc"
# Where this project's packages are, beside PACKAGE; a wheel has no other.
PLACES = {"tilewright": "tilewright", "tilewright_lab": "lab/tilewright_lab", "bench": "bench"}
# The modules, besides the op itself, that affect a measurement. Their imports are left out: those
# belong to an op, or run units, report them or search configurations.
CORE = [
    path
    for name in (
        "contract",
        "bounds",
        "grid",
        "tensors",
        "piece*",
        "providers",
        "peer*",
        "timing",
        "run",
    )
    for path in sorted((PACKAGE / "bench").glob(f"{name}.py"))
]
CORE += (PACKAGE.parent / "bench").glob("overhead.py")
# These files in the digests of what calls them: as they were when the committed results were
# measured. How sources are identified, and results stored, changes no result.
KEPT = {
    "sources": "135f31a622635c182c40507a7eb77922d228204e9a421e94b9f235a1fb4322ae",
    "store": "6a00b839950eac4860a28fc95e2ce6f4166c4fd0ec1dd2485e2a6d867f941425",
}
OPERATOR = re.compile(r"\w*_cpp\w*")
NAMED = re.compile("⟨([^⟩]*)⟩")
ON_GPUS = re.compile(r"^\s*(?:import|from) (?:triton|cutlass)\b", re.M)


@functools.cache
def digest(op: Op | None = None, device: str | None = None) -> str:
    """The digest of an op's sources. None: the measuring core alone, for results without an op,
    such as the roofline.   device: "cpu" or "cuda", only what runs there; None: everything.
    """
    paths = [*CORE, *files([] if op is None else _modules_of(op), device)]
    return _hash("\0".join(sorted(_meaning(path, device) for path in paths)))[:16]


def of_measured(op: Op, device: str) -> str:
    """The digest for a measurement made now; it covers everything if Triton kernels run on CPUs."""
    return digest(op, None if device == "cpu" and platform.interpreting() else device)


def of_files(paths: Iterable[pathlib.Path], *further: str) -> str:
    """The digest of files, by their syntax if they are Python, and of what is said beside them."""
    parts = [*further]
    for path in sorted(paths):
        text = path.read_text()
        parts.append(meaning(text) if path.suffix == ".py" else text)
    return _hash("\0".join(parts))[:16]


def everything() -> str:
    """The digest of all ops together."""
    from tilewright.ops import OPS

    return _hash(" ".join(map(digest, [None, *OPS.values()])))[:16]


def _modules_of(op: Op) -> list[str]:
    """The modules that define an op, its twin and its implementations, without other packages'
    modules.
    """
    functions = [
        op.public,
        op.eager,
        *(f for i in op.implementations for f in (i.load, i.tunables, i.gate)),
    ]
    names = (
        getattr(getattr(f, "__wrapped__", f), "__module__", None)
        for f in functions
        if f is not None
    )
    return [
        n for n in dict.fromkeys(names) if n and n.startswith("tilewright.") and n != Op.__module__
    ]


def files(roots: Iterable[str], device: str | None = None) -> list[pathlib.Path]:
    """The files of these modules and of everything they import, sorted by path; with a device,
    without what does not run there and what that alone imports.
    """
    todo, done = [p for n in roots if (p := _path(n))], set()
    while todo:
        path = todo.pop()
        if path not in done and not _runs_elsewhere(path, path.stat().st_mtime_ns, device):
            done.add(path)
            todo += _needs(path, path.stat().st_mtime_ns)
    return sorted(done)


@functools.cache
def _runs_elsewhere(path: pathlib.Path, changed: int, device: str | None) -> bool:
    if device == "cuda":
        return path.suffix != ".py"
    kernels = device == "cpu" and path.is_relative_to(PACKAGE / "kernels")
    return kernels and bool(ON_GPUS.search(path.read_text()))


@functools.cache
def _needs(path: pathlib.Path, changed: int) -> tuple[pathlib.Path, ...]:
    """The files that a file imports (anywhere in it), includes, or uses by an operator's name."""
    if path.suffix != ".py":
        names = re.findall(r'#include "([^"]+)"', path.read_text())
        return tuple(p for n in names if (p := CSRC / n).exists())
    tree = ast.parse(path.read_text())
    modules = [n for node in ast.walk(tree) for n in _imported(node)]
    return (*(p for n in dict.fromkeys(modules) if (p := _path(n))), *_written_in_cpp(tree))


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{a.name}" for a in node.names)


def _path(module: str) -> pathlib.Path | None:
    """The file of a module of this project; None for a package, for a name in a module, and for
    other projects' modules.
    """
    package, *inside = module.split(".")
    if package not in PLACES or not inside:
        return None
    path = PACKAGE.parent.joinpath(PLACES[package], *inside).with_suffix(".py")
    return path if path.exists() else None


def _written_in_cpp(tree: ast.AST) -> list[pathlib.Path]:
    named = set()
    for node in ast.walk(tree):
        text = (
            node.value
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            else node.attr
            if isinstance(node, ast.Attribute)
            else ""
        )
        named.update(OPERATOR.findall(text))
    named = {n for n in named if n.strip("_") != "cpp"}  # f-strings contain only a name's end
    return [
        p
        for p, operators in _operators()
        if any(o == n or (n.startswith("_") and o.endswith(n)) for o in operators for n in named)
    ]


@functools.cache
def _operators() -> list[tuple[pathlib.Path, list[str]]]:
    return [(p, re.findall(r'"(\w*_cpp\w*)\(', p.read_text())) for p in sorted(CSRC.rglob("*.cpp"))]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _meaning(path: pathlib.Path, device: str | None) -> str:
    """The digest of a file, in which a name from another module counts with that module's own."""
    text = _text(path, path.stat().st_mtime_ns, True)
    return _hash(NAMED.sub(lambda m: _plain(pathlib.Path(m[1]), device), text))


@functools.cache
def _text(path: pathlib.Path, changed: int, named: bool) -> str:
    """What a file says.   named: with the path of the module that each name comes from, in NAMED's
    brackets: the text is kept, and those modules may change.
    """
    text = path.read_text()
    if path.suffix == ".py":
        tree = ast.parse(text)
        of = (lambda path: f"⟨{path.as_posix()}⟩") if named else (lambda path: "")
        return _dump(_Placeless(tree, of).visit(tree))
    # Strings are matched first, so that `//` and `/*` inside them are no comments.
    text = re.sub(
        r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|//[^\n]*|/\*.*?\*/',
        lambda m: m[1] or " ",
        text,
        flags=re.DOTALL,
    )
    return " ".join(text.split())


def _plain(path: pathlib.Path, device: str | None) -> str:
    changed = path.stat().st_mtime_ns
    if _runs_elsewhere(path, changed, device):
        return ""
    kept = KEPT.get(path.stem) if path.parent == PACKAGE / "bench" else None
    return kept or _bare(path, changed)


@functools.cache
def _bare(path: pathlib.Path, changed: int) -> str:
    """The digest of a file without that of others: modules may import each other."""
    return _hash(_text(path, changed, False))


def meaning(source: str) -> str:
    """The syntax tree of Python source, without positions, comments, docstrings and goals."""
    return _dump(_Meaning().visit(ast.parse(source)))


def _dump(node: Any) -> str:
    """As ast.dump, but the same under every version of Python: without what is empty, fields or
    parts of a formatted string, which a later version may have added.
    """
    if isinstance(node, ast.JoinedStr):
        parts = (v for v in node.values if not (isinstance(v, ast.Constant) and v.value == ""))
        return f"JoinedStr({', '.join(map(_dump, parts))})"
    if isinstance(node, list):
        return f"[{', '.join(map(_dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = (f"{n}={_dump(v)}" for n, v in ast.iter_fields(node) if v is not None and v != [])
    return f"{type(node).__name__}({', '.join(fields)})"


class _Meaning(ast.NodeTransformer):
    """Removes docstrings and goals, which do not affect results."""

    def _body(self, node):
        self.generic_visit(node)
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            node.body = node.body[1:]
        return node

    visit_Module = visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _body

    def visit_Call(self, node):
        self.generic_visit(node)
        node.keywords = [k for k in node.keywords if k.arg != "goals"]
        return node


class _Placeless(_Meaning):
    """Replaces names from this project's modules by what they were there, qualified by `of` their
    module's file, and removes the imports.
    """

    def __init__(self, tree: ast.AST, of: Callable[[pathlib.Path], str]):
        self._of = of
        self._modules: dict[str, str] = {}
        self._names: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and _is_own(node):
                for a in node.names:
                    module = _path(f"{node.module}.{a.name}")
                    file = _path(node.module or "")
                    if module:
                        self._modules[a.asname or a.name] = of(module)
                    else:
                        whose = of(file) if file else node.module
                        self._names[a.asname or a.name] = f"{a.name}@{whose}"

    def visit_ImportFrom(self, node):
        return None if _is_own(node) else node

    def visit_Attribute(self, node):
        if isinstance(node.value, ast.Name) and node.value.id in self._modules:
            return ast.Name(f"{node.attr}@{self._modules[node.value.id]}", node.ctx)
        return self.generic_visit(node)

    def visit_Name(self, node):
        name = self._names.get(node.id, self._modules.get(node.id, node.id))
        return ast.Name(name, node.ctx)

    def visit_Call(self, node):
        node = super().visit_Call(node)
        if getattr(node.func, "id", "").startswith("from_kernels"):
            file = _path(f"tilewright.kernels.{ast.literal_eval(node.args[0])}")
            assert file is not None, ast.unparse(node)
            node.args[0] = ast.Constant(self._of(file))
        return node


def _is_own(node: ast.ImportFrom) -> bool:
    return not node.level and (node.module or "").partition(".")[0] in PLACES
