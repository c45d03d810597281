"""Entry points of the group `tilewright.implementations`: implementations provided by other
packages.
"""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from typing import Any

# "tilewright", or the name under which a copy was imported, as by Hugging Face `kernels`. What is
# global to a process is named after it, so that copies do not meet.
PACKAGE = __name__.partition(".")[0]
GROUP = f"{PACKAGE}.implementations"


@dataclass(frozen=True)
class Installed:
    """An entry point, named OP.NAME, whose object is a `tilewright.Implementation` named NAME."""

    point: importlib.metadata.EntryPoint

    @property
    def op(self) -> str:
        return self.point.name.partition(".")[0]

    @property
    def name(self) -> str:
        return self.point.name.partition(".")[2]

    @property
    def module(self) -> str:
        return self.point.module

    def load(self) -> Any:
        """Imports its module and returns its object."""
        return self.point.load()

    def __str__(self) -> str:
        package = self.point.dist
        source = f" of {package.name} {package.version}" if package else ""
        return f"entry point {self.point.name!r}{source}"


@functools.cache
def installed() -> dict[str, list[Installed]]:
    """The entry points by op name, sorted by name; none is imported."""
    by_op: dict[str, list[Installed]] = {}
    points = importlib.metadata.entry_points(group=GROUP)
    for entry in map(Installed, sorted(points, key=lambda point: point.name)):
        by_op.setdefault(entry.op, []).append(entry)
    return by_op
