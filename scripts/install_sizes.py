"""Sizes of the installed packages that each extra brings, for docs/install.md.

    python scripts/install_sizes.py FILE.json

In the environment of `make test`, which has them all. A package counts for an extra with what it
requires, unless the package without extras, or torch, brings it. Triton counts as `triton`'s alone.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import pathlib
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tilewright.core import platform


def closure(name: str, extras: frozenset[str], names: set[str]) -> set[str]:
    """A distribution's name, and those of what it requires, as far as they are installed."""
    try:
        requires = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return names
    names.add(canonicalize_name(name))
    for text in requires:
        r = Requirement(text)
        asked = r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras or {""})
        # One with extras is followed again: they may ask for more.
        if asked and (canonicalize_name(r.name) not in names or r.extras):
            closure(r.name, frozenset(r.extras), names)
    return names


def size(name: str) -> int:
    """Bytes of a distribution's files."""
    files = importlib.metadata.files(name) or []
    return sum(
        path.stat().st_size for f in files if (path := pathlib.Path(str(f.locate()))).is_file()
    )


def main(target: str) -> None:
    base = closure("tilewright", frozenset(), set()) | closure("torch", frozenset(), set())
    extras = importlib.metadata.metadata("tilewright").get_all("Provides-Extra") or []
    rows = {"torch": {"torch": size("torch")}}
    for extra in extras:
        brought = closure("tilewright", frozenset({extra}), set()) - base
        if extra != "triton":
            brought -= {"triton"}
        rows[extra] = {name: size(name) for name in sorted(brought)}
    about = {"date": str(datetime.date.today()), **platform.provenance()}
    sizes = {extra: sum(packages.values()) for extra, packages in rows.items()}
    pathlib.Path(target).write_text(
        json.dumps({"about": about, "bytes": sizes, "packages": rows}, indent=1) + "\n"
    )
    for extra, total in sizes.items():
        print(f"{extra:16} {total / 1e9:.3f} GB")


if __name__ == "__main__":
    main(sys.argv[1])
