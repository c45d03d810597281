"""Tables of what a configuration may name: losses, optimizers, schedules, model families, types of
data sets, callbacks. A row is added by a file in the table's folder, or is another package's
entry point.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import pkgutil
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Row = TypeVar("Row")


class Unknown(ValueError):
    """A name that is in no row."""


class Table(Generic[Row]):
    """Rows by name, in alphabetical order.

    Reading it first imports the modules of its package, in each of which rows are added. Entry
    points of the group `tilewright.NAME` are rows under their names; their packages are imported
    when a row is asked for.

    Args:
        name: the plural, such as "losses".
        package: the package whose modules add rows, such as "tilewright.trainer.losses".
        kind: the class of its rows.

    Example:
        >>> from tilewright.trainer.losses.loss import LOSSES
        >>> "language_modeling" in LOSSES.names()
        True
    """

    def __init__(self, name: str, package: str, kind: type[Row]):
        self.name, self.package, self.kind = name, package, kind
        self._rows: dict[str, Row] = {}
        self._points: dict[str, importlib.metadata.EntryPoint] = {}
        self._lock, self._read = threading.RLock(), False

    def add(self, name: str, row: Row) -> Row:
        """Raises ValueError for a name that is taken, TypeError for a row of another class."""
        if not isinstance(row, self.kind):
            raise TypeError(f"{self.name}: {name} must be a {self.kind.__name__}, got {row!r}")
        if name in self._rows:
            raise ValueError(f"{self.name}: the name {name!r} is taken")
        self._rows[name] = row
        return row

    def _complete(self) -> None:
        with self._lock:
            if self._read:
                return
            folder = importlib.import_module(self.package)
            for module in pkgutil.iter_modules(folder.__path__, f"{self.package}."):
                importlib.import_module(module.name)
            for point in importlib.metadata.entry_points(group=f"tilewright.{self.name}"):
                if point.name in self._rows or point.name in self._points:
                    raise ValueError(
                        f"{self.name}: the name {point.name!r} is taken ({point.value})"
                    )
                self._points[point.name] = point
            self._read = True

    def names(self) -> list[str]:
        self._complete()
        return sorted({*self._rows, *self._points})

    def __getitem__(self, name: str) -> Row:
        """Raises Unknown for a name that has no row, ValueError for an entry point that is none."""
        self._complete()
        if name in self._rows:
            return self._rows[name]
        if name not in self._points:
            near = difflib.get_close_matches(str(name), self.names(), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise Unknown(f"must be one of {', '.join(self.names())}{hint}")
        point = self._points[name]
        try:
            return self.add(name, point.load())
        except Exception as error:  # another package's code may raise any class
            raise ValueError(
                f"the entry point {point.value} is no row of {self.name}: {error}"
            ) from error

    def items(self) -> Iterator[tuple[str, Row]]:
        for name in self.names():
            yield name, self[name]

    def known(self, name: str) -> str:
        """The name. Raises ValueError as `table[name]` does; for pydantic."""
        self[name]
        return name


def optional(known: Callable[[str], str]) -> Callable[[Any], Any]:
    """`Table.known` of a field that may be null."""
    return lambda name: None if name is None else known(name)
