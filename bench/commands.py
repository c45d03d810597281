"""What commands that measure share: a parser, the packages that they need, and what they write."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tilewright.bench import report, run, store
from tilewright.core import platform


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m bench {name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def need(parser: argparse.ArgumentParser, modules: Iterable[str] = platform.EXTRAS["trainer"]):
    """Exits with an error that names the first package which is not installed."""
    for module in modules:
        if reason := platform.no_module(module):
            parser.error(reason)


def metadata(
    name: str,
    argv: Sequence[str],
    settings: Mapping[str, Any],
    device: str = "cpu",
    commit: str | None = None,
) -> dict[str, Any]:
    """The metadata of a measurement of the trainer."""
    fields: Any = SimpleNamespace(**settings)  # `run.metadata` records those of any object
    return run.metadata(device, fields, [name, *argv], commit, trainer=True)


def write(path: pathlib.Path, meta: Mapping[str, Any], rows: Sequence[Any], **more: Any) -> None:
    """Writes a document, and its folder."""
    store.write_json(path, {"schema": report.SCHEMA, "meta": meta, **more, "rows": rows})
