"""Tilewright: fused operations for training language models, each beside the plain PyTorch it
must equal.
"""

import importlib
from typing import TYPE_CHECKING

from tilewright import lab
from tilewright._version import __version__
from tilewright.core.registry import Implementation, ImplementationUnavailable, Op
from tilewright.selection import register_implementation, resolve, use

if TYPE_CHECKING:  # given by __getattr__
    from tilewright.nn import quantize_

__all__ = [
    "Implementation",
    "ImplementationUnavailable",
    "Op",
    "__version__",
    "quantize_",
    "register_implementation",
    "resolve",
    "use",
]

# What imports the ops, which the rest does not need.
_LATER = {"quantize_": "tilewright.nn", "verify": "tilewright_lab.verify.verify"}


def __getattr__(name: str):
    if name in _LATER:
        try:
            with lab.needed(f"tilewright.{name}"):
                return getattr(importlib.import_module(_LATER[name]), name)
        except lab.LabMissing as error:  # so that hasattr() is False
            raise AttributeError(str(error)) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
