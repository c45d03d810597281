"""Tilewright: fused operations for training language models, each beside the plain PyTorch it
must equal.
"""

import importlib

from tilewright._version import __version__
from tilewright.registry import Implementation, ImplementationUnavailable, Op
from tilewright.selection import register_implementation, resolve, use

__all__ = [
    "Implementation",
    "ImplementationUnavailable",
    "Op",
    "__version__",
    "quantize_",
    "register_implementation",
    "resolve",
    "use",
    "verify",
]


def __getattr__(name: str):
    if name == "quantize_":  # imports the ops, which the rest does not need
        from tilewright.adapt import quantize_

        return quantize_
    if name == "verify":
        # By name, as the command finds it: the rest of the library may not import tools.
        return importlib.import_module("tilewright.tools.verify").verify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
