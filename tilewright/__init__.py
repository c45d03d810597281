"""Tilewright: fused operations for training language models, each beside the plain PyTorch it
must equal.
"""

from tilewright._version import __version__
from tilewright.registry import Implementation, ImplementationUnavailable, Op
from tilewright.selection import register_implementation, resolve, use

__all__ = [
    "Implementation",
    "ImplementationUnavailable",
    "Op",
    "__version__",
    "register_implementation",
    "resolve",
    "use",
]
