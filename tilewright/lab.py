"""What needs tilewright-lab, the distribution of the tools, says so where that is not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class LabMissing(ImportError):
    """tilewright-lab is not installed."""


@contextlib.contextmanager
def needed(what: str) -> Iterator[None]:
    """Imports inside may be of tilewright-lab.   what: the name of what needs it.

    Raises:
        LabMissing: It is not installed; the message says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("tilewright_lab"):
            raise
        raise LabMissing(
            f"{what} is of tilewright-lab, which is not installed: pip install ./lab in a checkout"
        ) from error
