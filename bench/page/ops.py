"""Writes the table of docs/ops.md, a row for each op: its name, the first paragraph of its
docstring, and its implementations in the order in which `auto` considers them.

    python -m bench ops [--page docs/ops.md]
"""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Iterable, Sequence

from bench import commands
from bench.page.text import table
from tilewright.core.registry import Op
from tilewright.ops import OPS

COMMAND = "python -m bench ops"
BEGIN, END = "<!-- ops: generated -->", "<!-- end of ops -->"


def written(text: str, ops: Iterable[Op] = OPS.values()) -> str:
    """The page with its table written anew.

    Raises:
        ValueError: The page does not have the two lines between which the table is.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the page must have one line {BEGIN} and one {END}")
    before, _, rest = text.partition(BEGIN)
    rows = [[f"`{op.name}`", summary(op), ", ".join(own_names(op))] for op in ops]
    lines = table(["op", "what it computes", "implementations"], [(row, ()) for row in rows])
    return "\n".join([before + BEGIN, *lines[:-1], END + rest.partition(END)[2]])


def own_names(op: Op) -> list[str]:
    """An op's implementations without those that other packages have installed here."""
    return [*(implementation.name for implementation in op.built_in), "eager"]


def summary(op: Op) -> str:
    """The first paragraph of its public function's docstring, in one line."""
    paragraph, _, _ = (inspect.getdoc(op.public) or "").partition("\n\n")
    return " ".join(paragraph.split()).removesuffix(".")


def main(argv: Sequence[str]) -> int:
    parser = commands.parser("ops", __doc__)
    parser.add_argument("--page", type=pathlib.Path, default=pathlib.Path("docs/ops.md"))
    page = parser.parse_args(argv).page
    page.write_text(written(page.read_text()))
    return 0
