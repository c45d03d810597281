"""Modules under the names that they had: one version long, each answers with its new place.

This folder is in the `__path__` of `tilewright`, and its folder ops/ in that of `tilewright.ops`.
"""

import importlib
import sys
import warnings

from tilewright import lab


def moved(old: str, new: str) -> None:
    """Makes `import old` give the module `new`, with a DeprecationWarning that says so."""
    warnings.warn(f"{old} is {new} now", DeprecationWarning, stacklevel=3)
    with lab.needed(old):
        sys.modules[old] = importlib.import_module(new)
