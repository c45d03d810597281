"""Faults as data: each replaces a piece of text in a function, wherever its lines are.

python -m tests.mutations.faults      # after code has moved: finds each fault's file again
"""

from __future__ import annotations

import ast
import functools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
LIST = pathlib.Path(__file__).with_name("faults.json")


class Fault(NamedTuple):
    """old is found `of` times in the text of a function (decorators included; "": of the file); the
    one at `at`, from 0, is replaced by new.

    seen_by: how the name of the test begins that ought to see it, if it is known; it is run first.
    id: unique.   file: relative to the root.   function: by its path, as in `Engine.divide` and
    `_triton.loss`.   kind: the kind of change; "named" for faults that a person wrote down.
    judgement: what a survivor is, "equivalent: ..." or "unseen: ...", with why; "" if it is red.
    """

    id: str
    file: str
    function: str
    old: str
    new: str
    kind: str = "named"
    at: int = 0
    of: int = 1
    seen_by: str = ""
    judgement: str = ""

    def applied(self, text: str) -> str:
        """The file's text with the fault. Raises ValueError if it is not as the fault says."""
        start, end = span(text, self.function)
        places = occurrences(text, self.old, start, end)
        if len(places) != self.of:
            raise ValueError(
                f"{self.id}: {self.old!r} is {len(places)} times in {self.file} "
                f"{self.function or '(the file)'}, not {self.of}"
            )
        place = places[self.at]
        return text[:place] + self.new + text[place + len(self.old) :]


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The functions and classes of a tree by their paths, inner ones too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


@functools.lru_cache(8)
def _functions(text: str) -> list[tuple[str, ast.AST]]:
    return list(functions(ast.parse(text)))


def span(text: str, function: str) -> tuple[int, int]:
    """Where a function's text begins and ends."""
    if not function:
        return 0, len(text)
    found = [node for path, node in _functions(text) if path == function]
    if not found:
        raise ValueError(f"there is no {function}")
    first = min([found[0].lineno, *(d.lineno for d in found[0].decorator_list)])
    lines = text.splitlines(keepends=True)
    # Functions of one name, as of two branches, are taken together.
    return len("".join(lines[: first - 1])), len("".join(lines[: found[-1].end_lineno]))


def occurrences(text: str, old: str, start: int, end: int) -> list[int]:
    found, at = [], text.find(old, start, end)
    while at >= 0:
        found.append(at)
        at = text.find(old, at + 1, end)
    return found


def load(path: pathlib.Path = LIST) -> list[Fault]:
    return [Fault(**row) for row in json.loads(path.read_text())]


def write(faults: list[Fault], path: pathlib.Path = LIST) -> None:
    rows: list[dict[str, Any]] = [
        {k: v for k, v in f._asdict().items() if v != Fault._field_defaults.get(k)} for f in faults
    ]
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def moved(fault: Fault) -> Fault | None:
    """The fault in the file that its text is in now; None if no file or more than one has it."""
    found = []
    for path in sorted([*(ROOT / "tilewright").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]):
        text = path.read_text()
        if fault.old in text:
            here = fault._replace(file=path.relative_to(ROOT).as_posix())
            try:
                here.applied(text)
            except (ValueError, SyntaxError):  # a function of Python, sought in C++
                continue
            found.append(here)
    own = [here for here in found if here.file == fault.file] or found
    return own[0] if len(own) == 1 else None


def main() -> int:
    faults = [(fault, moved(fault)) for fault in load()]
    write([now or fault for fault, now in faults])
    lost = [fault for fault, now in faults if now is None]
    for fault in lost:
        print(f"{fault.id}: no single place has this text; write it anew:\n{fault.old}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
