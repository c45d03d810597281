"""Tables of what a configuration may name. A row is added by a file in the table's folder, or is
another package's entry point.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import pkgutil
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

Row = TypeVar("Row")


class Table(Generic[Row]):
    """Rows by name, in alphabetical order.

    Reading it first imports the modules of its package, in each of which rows are added. Entry
    points of the group `tilewright.NAME` are rows under their names; another package is imported
    when its row is asked for.

    Args:
        name: the plural, such as "losses".
        package: whose modules add rows, such as "tilewright.trainer.losses".
        row: the rows' class.

    Example:
        >>> from tilewright.trainer.optim.row import OPTIMIZERS
        >>> "adamw" in OPTIMIZERS.names()
        True
    """

    def __init__(self, name: str, package: str, row: type[Row]):
        self.name, self.package, self.row = name, package, row
        self._rows: dict[str, Row] = {}
        self._points: dict[str, importlib.metadata.EntryPoint] = {}
        self._lock, self._read = threading.RLock(), False

    def add(self, name: str, row: Row) -> None:
        """Raises ValueError for a name that is taken, TypeError for a row of another class; a
        class is a row where it is derived from that.
        """
        if not (issubclass(row, self.row) if isinstance(row, type) else isinstance(row, self.row)):
            of = f"{self.row.__module__}:{self.row.__name__}"
            raise TypeError(f"{self.name}: {name} must be a {of}, got {row!r}")
        if name in self._rows:
            raise ValueError(f"{self.name}: the name {name!r} is taken")
        self._rows[name] = row

    def _complete(self) -> None:
        with self._lock:
            if self._read:
                return
            self._read = True  # a row's file may read the table
            try:
                folder = importlib.import_module(self.package)
                for module in pkgutil.iter_modules(folder.__path__, f"{self.package}."):
                    importlib.import_module(module.name)
                for point in importlib.metadata.entry_points(group=f"tilewright.{self.name}"):
                    self._points.setdefault(point.name, point)
            except BaseException:
                self._read = False
                raise

    def names(self) -> list[str]:
        self._complete()
        return sorted({*self._rows, *self._points})

    def __getitem__(self, name: str) -> Row:
        """Raises ValueError for a name that has no row, and for an entry point that is none."""
        self._complete()
        point = self._points.get(name)
        if point is None and name not in self._rows:
            near = difflib.get_close_matches(str(name), self.names(), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"must be one of {', '.join(self.names())}{hint}")
        if point is not None:
            with self._lock:
                if name in self._points:
                    self._load(point)
        return self._rows[name]

    def _load(self, point: importlib.metadata.EntryPoint) -> None:
        """Adds the row of an entry point."""
        package = f" of {point.dist.name}" if point.dist else ""
        if point.name in self._rows:
            raise ValueError(
                f"{self.name}: the entry point {point.value}{package} has the name of another row; "
                "uninstall it, or give it another name"
            )
        try:
            row = point.load()
            if self._rows.get(point.name) is not row:  # its module may have added it
                self.add(point.name, row)
        except Exception as error:  # another package's code may raise any class
            raise ValueError(
                f"the entry point {point.value}{package} gives no row of {self.name}: "
                f"{type(error).__name__}: {error}"
            ) from error
        del self._points[point.name]

    def items(self) -> Iterator[tuple[str, Row]]:
        """The rows that are there: an entry point's once it has been asked for."""
        self._complete()
        yield from sorted(self._rows.items())
