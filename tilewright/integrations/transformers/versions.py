"""Which versions of transformers this integration runs with, and what it takes from inside them."""

from __future__ import annotations

import importlib
from typing import Any

from tilewright.core import platform
from tilewright.core.registry import ImplementationUnavailable

OLDEST = (5, 17)


def require_transformers() -> None:
    """Raises ImplementationUnavailable if transformers is missing or too old."""
    if reason := platform.no_module("transformers"):
        raise ImplementationUnavailable(reason)
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImplementationUnavailable(
            f"transformers {transformers.__version__} is too old: {oldest} or later is supported"
        )


def part_of(module: str, name: str) -> Any:
    """An object of `transformers.<module>` that is not part of its public interface.

    Raises ImplementationUnavailable, with the version in its sentence, if a version has moved it.
    """
    try:
        return getattr(importlib.import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError):
        raise ImplementationUnavailable(absent(f"transformers.{module}.{name}")) from None


def absent(what: str) -> str:
    """The sentence for a part of transformers that the installed version does not have, or has in
    another form.
    """
    import transformers

    oldest = ".".join(map(str, OLDEST))
    return (
        f"transformers {transformers.__version__} has no {what}; {oldest} to "
        f"{platform.TESTED['transformers']} were tested"
    )
