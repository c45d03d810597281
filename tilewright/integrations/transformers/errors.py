"""This library's name in transformers' tables, and errors and warnings for unsupported requests."""

from __future__ import annotations

import warnings
from collections.abc import Hashable

import torch

from tilewright.core.registry import ImplementationUnavailable

NAME = "tilewright"


class NotComputed(ImplementationUnavailable):
    """A request that attention by this library does not compute, and another implementation may."""


def computed_mask(what: str) -> NotComputed:
    """The error for a model that computes with its mask."""
    return NotComputed(
        f'attn_implementation="{NAME}" builds no mask of queries x keys, and this model '
        f'computes with its mask ({what}) (others: "sdpa", "eager")'
    )


def not_traced(what: str) -> NotComputed:
    """The error for a feature that is supported without torch.compile only; `what` works with
    it.
    """
    return NotComputed(
        f'attn_implementation="{NAME}" under torch.compile(fullgraph=True) takes {what}, '
        "and lengths that are no tensors; without fullgraph it takes more"
    )


def hole_in_window(name: str) -> NotComputed:
    """The error for padding within a document together with a window."""
    return NotComputed(
        f'attn_implementation="{name}" takes no mask with holes in a document where there '
        'is a window, which would reach over them (others: "sdpa", "eager")'
    )


WARNED: set[Hashable] = set()  # the kinds of warnings that were given in this process


def warn_once(kind: Hashable, text: str) -> None:
    """Warns of each kind once; not in a graph, which a warning would break."""
    if not torch.compiler.is_compiling() and kind not in WARNED:
        WARNED.add(kind)
        warnings.warn(text, stacklevel=4)
