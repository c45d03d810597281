"""Draws single faults from the library's source, from seeds.

    python -m tests.mutations.draw      # writes those of SEEDS before the named ones of faults.json

Left out: docstrings, annotations, decorators, messages of errors and logs, what only prints,
cases and costs (the tests' and the benchmark's own inputs), and specs of the compile gate.
"""

from __future__ import annotations

import ast
import collections
import itertools
import random
import re
from collections.abc import Collection

from . import cpp
from .faults import ROOT, Fault, functions, load, occurrences, span, write

# How many of each part, of which files.
PARTS = {
    "ops": (9, "tilewright/ops/**/*.py"),
    "kernels": (6, "tilewright/kernels/**/*.py"),
    "nn": (15, "tilewright/nn/**/*.py"),
    "integrations": (15, "tilewright/integrations/**/*.py"),
    "trainer": (15, "tilewright/trainer/**/*.py"),
}
LATER = {
    "core": (4, "tilewright/core/**/*.py"),
    "ops": (8, "tilewright/ops/**/*.py"),
    "kernels": (8, "tilewright/kernels/**/*_triton.py"),
    "gluon": (5, "tilewright/kernels/**/*_gluon.py"),
    "cute": (3, "tilewright/kernels/**/*_cute.py"),
    "cpp": (9, "csrc/cpu/*.cpp"),
    "nn": (6, "tilewright/nn/**/*.py"),
    "integrations": (6, "tilewright/integrations/**/*.py"),
    "trainer": (12, "tilewright/trainer/**/*.py"),
    "bench": (3, "tilewright/bench/**/*.py"),
}
SEEDS = {20261125: PARTS, 20261129: LATER}
NOT_DRAWN = re.compile(r"(cases|/cute|/gate|/spec|/__init__)\.py$")
# Functions that print, describe, or count for the benchmark and the gate.
NOT_IN = re.compile(r"__repr__|__str__|extra_repr|main|specs?|\w*(gate|gates|cost|case|cases)")
NOT_OF = {
    "Op", "Cost", "Case", "KernelSpec", "TypeError", "ValueError", "RuntimeError", "OSError",
    "ImplementationUnavailable", "NotFinite", "ConfigError", "print", "warn", "say", "debug",
    "info", "warning", "error", "TypeVar", "Literal", "getLogger",
}  # fmt: skip
SWAPS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "amax": "amin", "amin": "amax", "any": "all", "all": "any",
         "minimum": "maximum", "maximum": "minimum"}  # fmt: skip
DROPPED = ("detach", "clone", "contiguous", "float", "clamp_min", "clamp_max")


class Source:
    """A file's text, with the text and the place of each node."""

    def __init__(self, text: str):
        self.text, self.lines = text, [0]
        for line in text.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.utf8 = not text.isascii()

    def place(self, line: int, column: int) -> int:
        start = self.lines[line - 1]
        if self.utf8:
            text = self.text[start : self.lines[line]].encode()
            column = len(text[:column].decode())
        return start + column

    def of(self, node) -> tuple[int, int]:
        return (
            self.place(node.lineno, node.col_offset),
            self.place(node.end_lineno, node.end_col_offset),
        )

    def said(self, node) -> str:
        start, end = self.of(node)
        return self.text[start:end]


def called(node) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def visited(node):
    """The nodes in which faults are drawn."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
        return
    if isinstance(node, ast.Call) and called(node) in NOT_OF:
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        if NOT_IN.fullmatch(node.name):
            return
        children = list(node.body)
        if not isinstance(node, ast.ClassDef):
            children += [d for d in (*node.args.defaults, *node.args.kw_defaults) if d is not None]
    elif isinstance(node, ast.AnnAssign):
        children = [node.value] if node.value else []
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    else:
        children = list(ast.iter_child_nodes(node))
    yield node
    for child in children:
        yield from visited(child)


def changes(source: Source, node):
    """(kind, start, end, new text) of each change of a node."""
    text = source.text
    if isinstance(node, ast.BinOp | ast.AugAssign):
        left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)  # fmt: skip
        yield from swapped(source, node, type(node.op), left, right)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from swapped(source, node, type(node.ops[0]), node.left, node.comparators[0])
    elif isinstance(node, ast.BoolOp):
        yield from swapped(source, node, type(node.op), node.values[0], node.values[1])
    elif isinstance(node, ast.Constant):
        start, end = source.of(node)
        if isinstance(node.value, bool):
            yield "constant", start, end, str(not node.value)
        elif isinstance(node.value, int):
            yield "constant", start, end, str(node.value + 1)
        elif isinstance(node.value, float):
            yield "constant", start, end, repr(node.value * 2 or 1.0)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "sign", *source.of(node), source.said(node.operand)
    elif isinstance(node, ast.Call):
        yield from of_a_call(source, node)
    elif isinstance(node, ast.IfExp):
        for branch in (node.body, node.orelse):
            yield "branch", *source.of(node), source.said(branch)
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        start, end = source.of(node.test)
        # `x := ...` and conditions of several lines keep their meaning in parentheses.
        yield "condition", start, end, f"not ({text[start:end]})"


def swapped(source: Source, node, operator, left, right):
    if operator in SWAPS:
        old, new = SWAPS[operator]
        (start, _), (_, end) = source.of(node), source.of(node)
        after, before = source.of(left)[1], source.of(right)[0]
        between = source.text[after:before]
        if isinstance(node, ast.AugAssign):
            old, new = f"{old}=", f"{new}="
        if between.count(old) == 1:
            changed = source.text[start:after] + between.replace(old, new) + source.text[before:end]
            yield "operator", start, end, changed


def of_a_call(source: Source, node):
    start, end = source.of(node)
    name = called(node)
    head = source.of(node.func)[1]
    if name in NAMES:
        at = head - len(name)
        yield "operator", start, end, source.text[start:at] + NAMES[name] + source.text[head:end]
    if name in DROPPED and isinstance(node.func, ast.Attribute):
        yield "dropped", start, end, source.said(node.func.value)
    for keyword in node.keywords:
        if keyword.arg is None or len(node.args) + len(node.keywords) < 2:
            continue
        first, last = source.of(keyword)
        rest = source.text[last:end]
        if comma := re.match(r"\s*,\s*", rest):
            last += comma.end()
        else:
            first -= len(source.text[start:first]) - len(source.text[start:first].rstrip(", \n"))
        yield "keyword", start, end, source.text[start:first] + source.text[last:end]


def candidates(file: str, text: str):
    """Every change of a file that can be drawn: its kind, and the arguments of `made`."""
    source = Source(text)
    for node in visited(ast.parse(text)):
        for kind, start, end, new in changes(source, node):
            yield kind, (file, text, kind, start, end, new)


def made(file: str, text: str, kind: str, start: int, end: int, new: str) -> Fault | None:
    """The fault without an id; None if it is none: no Python, or the same."""
    tree, source = ast.parse(text), Source(text)
    inside = [(source.of(node), path) for path, node in functions(tree)]
    owners = [path for (a, b), path in inside if a <= start and end <= b]
    function = max(owners, key=len, default="")
    # A constant alone is found everywhere: its line is the old text.
    if kind in ("constant", "sign"):
        first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end)
        first += len(text[first:start]) - len(text[first:start].lstrip())
        start, end, new = first, last, text[first:start] + new + text[end:last]
    old = text[start:end]
    places = occurrences(text, old, *span(text, function))
    fault = Fault("", file, function, old, new, kind, places.index(start), len(places))
    try:
        same = ast.dump(ast.parse(fault.applied(text))) == ast.dump(tree)
    except SyntaxError:
        return None
    return None if same else fault


def draw(seed: int, known: Collection[Fault] = ()) -> list[Fault]:
    """known: faults that are not drawn again."""
    drawn, first = [], seed == min(SEEDS)
    same = {(fault.file, fault.old, fault.new) for fault in known}
    for part, (count, files) in SEEDS[seed].items():
        # Its own generator: what is drawn of one part does not depend on the others.
        generator = random.Random(f"{seed} {part}")
        by_kind = collections.defaultdict(list)
        for path in sorted(ROOT.glob(files)):
            file = path.relative_to(ROOT).as_posix()
            if not NOT_DRAWN.search(file) and not (first and path.stem.endswith("_cute")):
                of = candidates if path.suffix == ".py" else cpp.candidates
                for kind, change in of(file, path.read_text()):
                    by_kind[kind].append(change)
        used, chosen = set(), []
        for kind in itertools.cycle(sorted(by_kind)):
            if len(chosen) == count:
                break
            fault = _made(generator.choice(by_kind[kind]), generator)
            # One of a function: they are to be apart.
            if fault is None or (fault.file, fault.old, fault.new) in same:
                continue
            if (fault.file, fault.function) not in used:
                used.add((fault.file, fault.function))
                number = f"{len(chosen) + 1:02}"
                chosen.append(fault._replace(id=f"{part}-{number if first else 'b' + number}"))
        drawn += chosen
    return drawn


def _made(change, generator: random.Random) -> Fault | None:
    if change[0].endswith(".py"):
        return made(*change)
    fault = cpp.made(*change, at=generator.randrange(2**16))
    return fault if cpp.compiles(fault) else None


if __name__ == "__main__":
    known = load()
    named = [fault for fault in known if fault.kind == "named"]
    drawn = [fault for fault in known if fault.kind != "named"]
    before = 0
    for seed, parts in SEEDS.items():
        count = sum(n for n, _ in parts.values())
        if len(drawn) < before + count:
            drawn[before:] = draw(seed, known)
        before += count
    write([*drawn, *named])
