"""Entry points of the group `tilewright.implementations`: implementations provided by other
packages.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
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

    def checked(
        self, kind: type, used_names: set[str], wrong_with: Callable[[Any], str | None]
    ) -> tuple[Any, str]:
        """Imports its module. Returns its object of this kind, and "" or the reason why it cannot
        be used.

        used_names: names and aliases that are taken.
        wrong_with: the object -> None, or a further reason.
        """
        try:
            loaded = self.point.load()
            if not self.name:
                return loaded, "has no name: it must be called OP.NAME"
            if not isinstance(loaded, kind):
                return loaded, f"is no {PACKAGE}.{kind.__name__}, but {loaded!r}"
            if loaded.name != self.name:
                return loaded, f"holds an implementation called {loaded.name!r}"
            if clash := used_names & {loaded.name, *loaded.aliases}:
                return loaded, f"the name {min(clash)!r} is taken"
            return loaded, wrong_with(loaded) or ""
        except Exception as error:  # another package's code may raise any class
            return None, f"does not import: {type(error).__name__}: {error}"

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
